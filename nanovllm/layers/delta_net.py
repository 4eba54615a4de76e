"""The gated DeltaNet, which keeps a state of fixed size per sequence instead of keys and values."""

import torch
from torch import nn

from nanovllm.attention.metadata import QUERY_TILE, AttentionMetadata
from nanovllm.layers.context import LayerContext
from nanovllm.layers.delta_net_config import DeltaNetConfig
from nanovllm.layers.forms import Form, PartialSum, PendingProduct
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.quantization import Formats
from nanovllm.layers.rotary_embedding import Rotary
from nanovllm.layers.shard import WHOLE, Rows, Shards, in_one_tensor, rows_of_heads, shards_of_rows
from nanovllm.ops.delta_net import delta_net
from nanovllm.ops.delta_prompts import TILE
from nanovllm.ops.layer_state import DeltaWeights, LayerState, StateRows
from nanovllm.ops.low_rank import AdapterRows

assert TILE == QUERY_TILE, "the kernels of prompts walk through the tiles of queries"


class Convolution(nn.Module):
    """weight: [num_channels, 1, kernel_size] of this rank."""

    def __init__(self, rows: list[Rows], kernel_size: int, context: LayerContext):
        super().__init__()
        self._rows = rows
        self.weight = context.parameter(sum(each.length for each in rows), 1, kernel_size)

    def shards(self, name: str) -> Shards:
        return shards_of_rows(self.weight, self._rows)


class GatedDeltaNet(nn.Module):
    """One layer's projections and weights around ops/delta_net.py. The StepProgram owns the states.

    The ranks divide the key heads, each with the value heads that share it.

    accepts: the forms of inputs that the layer takes.

    Args:
        layer_index: this layer's index in the cache.
        name: the layer's name, such as model.layers.0.linear_attn.
        gives: the forms of sums that the norm after it accepts.
        is_by_head: the checkpoint holds the rows of all projections key head by key head, as Qwen3-Next does.
    """

    accepts = Form.PLAIN  # the small projections are never in FP8

    def __init__(
        self, layer_index: int, name: str, net: DeltaNetConfig, hidden_size: int, eps: float, formats: Formats,
        gives: Form, context: LayerContext, is_by_head: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.layer_index, self.use_kernels = layer_index, context.use_kernels
        num_heads, num_shared = net.num_key_heads, net.num_value_heads // net.num_key_heads
        part = context.parallel.shard(num_heads, "linear_num_key_heads")
        widths = {"q": net.key_dim, "k": net.key_dim, "v": num_shared * net.value_dim}
        qkv = [rows for kind, width in widths.items() for rows in rows_of_heads(kind, num_heads, part, width)]
        if is_by_head:
            qkvz = rows_of_heads("in_proj_qkvz", num_heads, part, *widths.values(), widths["v"])
            ba = rows_of_heads("in_proj_ba", num_heads, part, num_shared, num_shared)
        else:
            z = rows_of_heads("in_proj_z", num_heads, part, widths["v"])
            qkvz = [*in_one_tensor("in_proj_qkv", qkv), *z]
            ba = [
                rows for key in ("in_proj_b", "in_proj_a") for rows in rows_of_heads(key, num_heads, part, num_shared)
            ]
        names, plain_names = (dict.fromkeys(each.key for each in rows) for rows in (qkvz, ba))
        formats.check_plain(name, *plain_names)
        self.in_proj_qkvz = MergedColumnParallelLinear(
            hidden_size, qkvz, False, context, format=formats.of(name, *names)
        )
        self.in_proj_ba = MergedColumnParallelLinear(hidden_size, ba, False, context)
        self.conv1d = Convolution(in_one_tensor(WHOLE, qkv), net.kernel_size, context)
        self._rows_of_heads = rows_of_heads(WHOLE, num_heads, part, num_shared)
        num_value_heads = part[1] * num_shared
        self.A_log, self.dt_bias = (context.parameter(num_value_heads, dtype=torch.float32) for _ in range(2))
        self.norm = RMSNorm(net.value_dim, eps, context)
        self.out_proj = RowParallelLinear(
            net.num_value_heads * net.value_dim, hidden_size, False, context, format=formats.of(name, "out_proj"),
            gives=gives,
        )  # fmt: skip

    def shards(self, name: str) -> Shards:
        return shards_of_rows(self.get_parameter(name), self._rows_of_heads)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: Rotary,
        kv_cache: list[LayerState],
        groups: list[AttentionMetadata],
        needed: torch.Tensor | None = None,
        adapters: AdapterRows | None = None,
        needed_adapters: AdapterRows | None = None,
    ) -> PartialSum | PendingProduct:
        """The layer's results for new tokens. The states of their sequences advance.

        Args:
            hidden_states: [num_tokens, hidden_size].
            rotary: not used; the recurrence knows the order of the tokens.
            kv_cache: what each layer keeps; a LayerState for this one.
            groups: the metadata of each group of layers. This layer uses group 0's, with all `query_tiles`.
            needed: int64 [num_needed], the tokens whose results are read; None for all.
            adapters, needed_adapters: those of all tokens, and of the needed ones; None if no token has one.

        Returns:
            [num_needed, hidden_size].
        """
        metadata = groups[0]
        assert metadata.entries is not None, "steps of the SequenceTable have entries"
        rows = StateRows(
            metadata.entries, metadata.cu_seqlens_q, metadata.context_lens, metadata.num_decodes,
            metadata.max_num_decodes, metadata.query_tiles,
        )  # fmt: skip
        weights = DeltaWeights(self.conv1d.weight[:, 0], self.A_log, self.dt_bias, self.norm.weight, self.norm.eps)
        qkvz, ba = self.in_proj_qkvz(hidden_states, adapters), self.in_proj_ba(hidden_states, adapters)
        outputs = delta_net(qkvz, ba, weights, kv_cache[self.layer_index], rows, self.use_kernels)
        return self.out_proj(outputs if needed is None else outputs.index_select(0, needed), needed_adapters)
