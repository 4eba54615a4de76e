"""Linear layers and how their weights are divided over the ranks of one model.

A layer's `shards` names the checkpoint tensors that fill each part of each of its parameters; the loader needs to know
nothing else. Column-parallel layers divide the outputs, row-parallel ones the inputs, so that a pair of them needs one
all-reduce (Megatron-LM, Shoeybi et al., 2019).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from nanovllm.layers.adapters import AdapterSlots
from nanovllm.layers.context import LayerContext
from nanovllm.layers.forms import Form, PartialSum, PendingProduct
from nanovllm.layers.quantization import FormattedWeight, WeightFormat
from nanovllm.layers.shard import (
    WHOLE,
    Rows,
    Shard,
    Shards,
    in_one_tensor,
    replicated_shards,
    rows_of_heads,
    shards_of_rows,
)
from nanovllm.ops.fused_product import has_fused_product
from nanovllm.ops.linear import MAX_ROWS_IN_PARTS, linear_in_parts, num_input_parts, pack_weight
from nanovllm.ops.low_rank import AdapterRows
from nanovllm.ops.quantize import Quantized, ScaledProduct


class Packable(nn.Module):
    """A layer that can replace its loaded weight by a layout that multiplies faster, where the device has one.

    weight: as loaded; None once packed, unless another layer reads it too.
    packed: the other layout, or None.
    """

    weight: nn.Parameter | None
    packed: torch.Tensor | None = None
    _shares_weight: bool = False

    def pack(self) -> None:
        """Packs the weight, where there is a layout for it."""
        self.packed = pack_weight(self.get_parameter("weight"))
        if self.packed is not None and not self._shares_weight:
            self.weight = None

    def unpack(self) -> None:
        """Undoes `pack`, exactly."""
        if self.packed is not None and self.weight is None:
            self.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        self.packed = None

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter of this name. For a packed weight, an empty tensor of its shape on the "meta" device."""
        if name == "weight" and self.weight is None and self.packed is not None:
            return torch.empty(self.packed.shape, dtype=self.packed.dtype, device="meta")
        return self.get_parameter(name)


class LinearBase(Packable, FormattedWeight):
    """The parameters of `y = x @ weight.T + bias`.

    weight: [output_size, input_size] of this rank.
    accepts: the forms of inputs that the layer takes.
    gives: the forms of results that it gives. In a step with adapters they are plain, because adapters add to them.
    adapter_slots: the factors of adapters, or None.

    Args:
        format: format of the weight; None is the context's dtype.
        gives: the forms that the reader of the results accepts.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool,
        context: LayerContext,
        format: WeightFormat | None = None,
        gives: Form = Form.PLAIN,
    ):
        super().__init__((output_size, input_size), format, context)
        self.use_kernels, self.parallel = context.use_kernels, context.parallel
        self._row_ops = context.row_ops
        self.bias = context.parameter(output_size) if bias else None
        # An unfinished product is added in another order, and only in steps of some sizes.
        makes = Form.UNFINISHED if context.use_kernels and not context.deterministic else Form.PLAIN
        self.accepts = Form.PLAIN
        if format is not None:
            format.check(output_size, input_size)
            self.accepts, makes = format.accepts, format.makes
        if context.deterministic and context.max_loras:
            makes = Form.PLAIN  # else a row's bits would depend on whether another row has an adapter
        self.gives = Form.PLAIN if bias else gives & makes  # a bias is added after the scales, and only once
        self.adapter_slots: AdapterSlots | None = None

    def variant_key(self, num_tokens: int) -> int:
        """See CausalLM.variant_key."""
        return 1 if self.format is None else self.format.variant_key(num_tokens)

    def _multiply(
        self, x: torch.Tensor | Quantized, bias: torch.Tensor | None, adapters: AdapterRows | None
    ) -> torch.Tensor | ScaledProduct:
        """x: [num_rows, input_size] -> [num_rows, output_size]"""
        if self.format is None:
            assert isinstance(x, torch.Tensor), "only layers in FP8 take inputs in FP8"
            product = self._row_ops.linear(x, self.weight, self.packed, bias=bias, use_kernels=self.use_kernels)
        else:
            weight, scales = self.get_parameter("weight"), self.get_parameter(self.format.scale_name)
            gives = self.gives if adapters is None else Form.PLAIN
            by_format = partial(self.format.multiply, weight=weight, scales=scales, bias=bias, gives=gives)
            product = self._row_ops.multiply(x, by_format)
        if adapters is None:
            return product
        assert self.adapter_slots is not None, "a model without room for adapters has no tokens with one"
        return self.adapter_slots(product, x, adapters)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers over one input as a single product, their outputs side by side.

    Args:
        input_size: width of the input.
        rows: the rows of checkpoint tensors that are this rank's rows of the weight, in their order.
    """

    def __init__(self, input_size: int, rows: Sequence[Rows], bias: bool, context: LayerContext, **kw):
        super().__init__(input_size, sum(each.length for each in rows), bias, context, **kw)
        self.rows = rows
        if context.max_loras:
            self.adapter_slots = AdapterSlots(rows, input_size, (0, input_size), context)

    def shards(self, name: str) -> Shards:
        parameter = self.parameter("bias" if name == "bias" else "weight")
        return shards_of_rows(parameter, self.rows, lambda shard, first: self._shard(name, shard, first))

    def variant_key(self, num_tokens: int) -> int:
        """0 if an UNFINISHED product is left to its reader. See CausalLM.variant_key."""
        if Form.UNFINISHED in self.gives and self.weight is not None and has_fused_product(num_tokens, self.weight):
            return 0
        return super().variant_key(num_tokens)

    def forward(
        self, x: torch.Tensor | Quantized, adapters: AdapterRows | None = None
    ) -> torch.Tensor | ScaledProduct | PendingProduct:
        """x: [num_rows, input_size] -> [num_rows, output_size / ranks], in one of the forms of `gives`

        adapters: those of the rows; None if no row has one.
        """
        if adapters is None and isinstance(x, torch.Tensor) and self.variant_key(x.shape[0]) == 0:
            return PendingProduct(x, self.get_parameter("weight"))
        return self._multiply(x, self.bias, adapters)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections in one product; heads are divided over the ranks.

    With more ranks than key/value heads, `size / num_kv_heads` neighbouring ranks hold the same head.

    num_heads, num_kv_heads: heads of this rank.

    Args:
        has_gates: q_proj holds a gate behind each query head. The gates of all heads come after the values.
        stored_as: the checkpoint holds the projections as one tensor of this name, one after the other.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        context: LayerContext,
        has_gates: bool = False,
        stored_as: str | None = None,
        **kw,
    ):
        parallel = context.parallel
        q_part = parallel.shard(num_heads, "num_attention_heads")
        if num_kv_heads >= parallel.size:
            kv_part = parallel.shard(num_kv_heads, "num_key_value_heads")
        elif parallel.size % num_kv_heads == 0:
            kv_part = parallel.rank * num_kv_heads // parallel.size, 1
        else:
            raise ValueError(f"num_key_value_heads ({num_kv_heads}) cannot be replicated over {parallel.size} ranks")
        queries = rows_of_heads("q_proj", num_heads, q_part, *[head_dim] * (1 + has_gates))
        keys, values = (rows_of_heads(key, num_kv_heads, kv_part, head_dim) for key in ("k_proj", "v_proj"))
        first_gate = len(queries) // (1 + has_gates)
        rows = [*queries[:first_gate], *keys, *values, *queries[first_gate:]]
        super().__init__(hidden_size, in_one_tensor(stored_as, rows) if stored_as else rows, bias, context, **kw)
        self.num_heads, self.num_kv_heads = q_part[1], kv_part[1]


class RowParallelLinear(LinearBase):
    """The inputs are divided over the ranks; the norm that reads the products sums them over the ranks.

    Rank 0 alone adds the bias.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, context: LayerContext, **kw):
        part = context.parallel.shard(input_size, "input size")
        super().__init__(part[1], output_size, bias, context, **kw)
        self.full_input_size, self.part = input_size, part
        if context.max_loras:
            self.adapter_slots = AdapterSlots([Rows(WHOLE, output_size, 0, output_size)], input_size, part, context)

    def shards(self, name: str) -> Shards:
        if name == "bias":
            return replicated_shards(self.parameter(name))
        weight = self.parameter("weight")
        output_size = weight.shape[0]
        shape = (output_size, self.full_input_size)
        shard = self._shard(name, Shard(shape, ((0, output_size), self.part), weight), 0)
        return {} if shard is None else {WHOLE: [shard]}

    def variant_key(self, num_tokens: int) -> int:
        """The number of parts in which an UNFINISHED product comes; 0 if it is left to `RMSNorm.reduce_add`. See
        CausalLM.variant_key."""
        if Form.UNFINISHED not in self.gives or self.weight is None:
            return super().variant_key(num_tokens)
        # Only a large product takes longer than reading and writing the residual.
        is_pending = num_tokens > MAX_ROWS_IN_PARTS
        return 0 if is_pending else num_input_parts(num_tokens, *self.weight.shape[::-1])

    def forward(self, x: torch.Tensor | Quantized, adapters: AdapterRows | None = None) -> PartialSum | PendingProduct:
        """x: [num_tokens, input_size / ranks] -> [num_tokens, output_size], in one of the forms of `gives`

        adapters: those of the tokens; None if no token has one.
        """
        is_plain = self.format is None and adapters is None
        if is_plain and isinstance(x, torch.Tensor) and (num_parts := self.variant_key(x.shape[0])) != 1:
            assert self.weight is not None, "a packed weight gives no parts"
            if num_parts == 0:
                return PendingProduct(x, self.weight)
            return PartialSum(linear_in_parts(x, self.weight, num_parts))
        # Every rank holds the bias, but the sum may count it only once.
        bias = self.bias if self.parallel.rank == 0 else None
        return PartialSum(self._multiply(x, bias, adapters))
