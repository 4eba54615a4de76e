"""A mixture of experts in the place of a layer's MLP."""

import torch
from torch import nn

from nanovllm.layers.linear import PartialSum
from nanovllm.layers.quantization import WeightFormat
from nanovllm.layers.shard import Shard, Shards, empty_parameter, replicated_shards
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.grouped_mlp import ExpertWeights, find_pairs_of_tile, grouped_mlp
from nanovllm.ops.quantize import E4M3
from nanovllm.ops.route import route


class Router(nn.Module):
    """weight: [num_experts, hidden_size], whole on every rank, so that all ranks choose the same experts."""

    def __init__(self, hidden_size: int, num_experts: int, **kw):
        super().__init__()
        self.weight = empty_parameter(num_experts, hidden_size, **kw)

    def shards(self, name: str) -> Shards:
        return replicated_shards(self.weight)


class ExpertLinear(nn.Module):
    """One projection of all experts.

    weight: [num_experts, output_size, input_size] of this rank.

    Args:
        format: of the weight; None is `dtype`.
    """

    def __init__(self, num_experts: int, output_size: int, input_size: int, format: WeightFormat | None, **kw):
        super().__init__()
        self._format, self._scale_name = format, ""
        weight_kw = kw if format is None else {**kw, "dtype": E4M3}
        self.weight = empty_parameter(num_experts, output_size, input_size, **weight_kw)
        if format is not None:
            self._scale_name = format.config.scale_name or "weight_scale"
            shape = num_experts, *format.scales_shape(output_size, input_size)
            self.register_parameter(self._scale_name, empty_parameter(*shape, **{**kw, "dtype": torch.float32}))

    @property
    def weights(self) -> ExpertWeights:
        if self._format is None:
            return ExpertWeights(self.weight)
        num_experts, output_size, input_size = self.weight.shape
        rows, columns = self._format.config.block or (1, input_size)
        scales = self.get_parameter(self._scale_name)
        return ExpertWeights(self.weight, scales.view(num_experts, -(-output_size // rows), -1), rows, columns)

    def _shard(self, name: str, expert: int, shard: Shard, first_row: int) -> list[Shard]:
        """That of this parameter, given that of a part of an expert's weight, which begins with `first_row`."""
        if self._format is None:
            return [shard]
        of_part = self._format.weight_shard if name == "weight" else self._format.scales_shard
        found = of_part(shard, self.get_parameter(self._scale_name)[expert], first_row)
        return [] if found is None else [found]


class ExpertColumns(ExpertLinear):
    """The gate and up projections of all experts, one after the other; each expert's columns are divided over the
    ranks."""

    def __init__(self, num_experts: int, hidden_size: int, size: int, part: tuple[int, int], **kw):
        self._size, self._part = size, part
        super().__init__(num_experts, 2 * part[1], hidden_size, **kw)

    def shards(self, name: str) -> Shards:
        hidden_size, shards = self.weight.shape[2], Shards()
        for expert, weight in enumerate(self.weight):
            for index, (key, target) in enumerate(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)):
                shard = Shard((self._size, hidden_size), (self._part, (0, hidden_size)), target)
                if found := self._shard(name, expert, shard, index * self._part[1]):
                    shards[f"experts.{expert}.{key}"] = found
        return shards


class ExpertRows(ExpertLinear):
    """The down projections of all experts; each expert's rows are divided over the ranks."""

    def __init__(self, num_experts: int, hidden_size: int, size: int, part: tuple[int, int], **kw):
        self._size, self._part = size, part
        super().__init__(num_experts, hidden_size, part[1], **kw)

    def shards(self, name: str) -> Shards:
        hidden_size, shards = self.weight.shape[1], Shards()
        for expert, weight in enumerate(self.weight):
            shard = Shard((hidden_size, self._size), ((0, hidden_size), self._part), weight)
            if found := self._shard(name, expert, shard, 0):
                shards[f"experts.{expert}.down_proj"] = found
        return shards


class Experts(nn.Module):
    """Each token goes through `top_k` of the experts, which are gated MLPs, and gets the weighted sum of their outputs.

    Args:
        size: of an expert's MLP.
        renormalizes: a token's weights add up to 1.
        activation: see ops/act_and_mul.py.
        parallel: the ranks over which each expert's columns are divided.
        format: of the experts' weights, see ExpertLinear.
        use_kernels: compute with our kernels.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        top_k: int,
        renormalizes: bool,
        activation: str,
        parallel: Parallel,
        use_kernels: bool = False,
        format: WeightFormat | None = None,
        **kw,
    ):
        super().__init__()
        self._top_k, self._renormalizes, self._activation, self._use_kernels = (
            top_k,
            renormalizes,
            activation,
            use_kernels,
        )
        part = parallel.shard(size, "the experts' intermediate size")
        self.gate = Router(hidden_size, num_experts, **kw)
        self.gate_up_proj = ExpertColumns(num_experts, hidden_size, size, part, format=format, **kw)
        self.down_proj = ExpertRows(num_experts, hidden_size, size, part, format=format, **kw)

    def variant_key(self, num_tokens: int) -> int:
        """See CausalLM.variant_key."""
        num_experts, dtype = len(self.gate.weight), self.gate.weight.dtype
        return find_pairs_of_tile(num_tokens * self._top_k, num_experts, dtype) if self._use_kernels else 0

    def forward(self, hidden_states: torch.Tensor) -> PartialSum:
        """hidden_states: [num_tokens, hidden_size] -> the same shape"""
        routes = route(hidden_states, self.gate.weight, self._top_k, self._renormalizes, self._use_kernels)
        weights = self.gate_up_proj.weights, self.down_proj.weights
        return PartialSum(grouped_mlp(hidden_states, routes, *weights, self._activation, self._use_kernels))
