"""A mixture of experts in the place of a layer's MLP."""

import torch
from torch import nn

from nanovllm.layers.context import LayerContext
from nanovllm.layers.forms import Form, PartialSum
from nanovllm.layers.quantization import FormattedWeight, WeightFormat
from nanovllm.layers.shard import Shard, Shards, replicated_shards
from nanovllm.ops.grouped_mlp import ExpertWeights, find_pairs_of_tile, grouped_mlp
from nanovllm.ops.low_rank import AdapterRows
from nanovllm.ops.route import route


class Router(nn.Module):
    """weight: [num_experts, hidden_size], whole on every rank, so that all ranks choose the same experts.

    The gate of a shared expert is a router of one expert.
    """

    def __init__(self, hidden_size: int, num_experts: int, context: LayerContext):
        super().__init__()
        self.weight = context.parameter(num_experts, hidden_size)

    def shards(self, name: str) -> Shards:
        return replicated_shards(self.weight)


class ExpertLinear(FormattedWeight):
    """One projection of all experts. weight: [num_experts, output_size, input_size] of this rank.

    Args:
        size: intermediate size of an expert's MLP over all ranks.
        part: this rank's part of it, as (start, length).
    """

    weight: nn.Parameter

    def __init__(
        self, shape: tuple[int, ...], size: int, part: tuple[int, int], format: WeightFormat | None,
        context: LayerContext,
    ):  # fmt: skip
        super().__init__(shape, format, context)
        self._size, self._part = size, part

    @property
    def weights(self) -> ExpertWeights:
        if self.format is None:
            return ExpertWeights(self.weight)
        num_experts, output_size, input_size = self.weight.shape
        rows, columns = self.format.config.block or (1, input_size)
        scales = self.get_parameter(self.format.scale_name)
        return ExpertWeights(self.weight, scales.view(num_experts, -(-output_size // rows), -1), rows, columns)


class ExpertColumns(ExpertLinear):
    """The gate and up projections of all experts, one after the other; each expert's columns are divided over the
    ranks."""

    def shards(self, name: str) -> Shards:
        hidden_size, shards = self.weight.shape[2], Shards()
        for expert, weight in enumerate(self.weight):
            for index, (key, target) in enumerate(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)):
                whole = Shard((self._size, hidden_size), (self._part, (0, hidden_size)), target)
                if (shard := self._shard(name, whole, index * self._part[1], expert)) is not None:
                    shards[f"experts.{expert}.{key}"] = [shard]
        return shards


class ExpertRows(ExpertLinear):
    """The down projections of all experts; each expert's rows are divided over the ranks."""

    def shards(self, name: str) -> Shards:
        hidden_size, shards = self.weight.shape[1], Shards()
        for expert, weight in enumerate(self.weight):
            whole = Shard((hidden_size, self._size), ((0, hidden_size), self._part), weight)
            if (shard := self._shard(name, whole, 0, expert)) is not None:
                shards[f"experts.{expert}.down_proj"] = [shard]
        return shards


class Experts(nn.Module):
    """Each token goes through `top_k` of the experts, which are gated MLPs, and gets the weighted sum of their outputs.
    It may also go through a shared expert, whose output is added with a weight of its own.

    Each expert's columns are divided over the ranks.

    Args:
        size: intermediate size of an expert's MLP.
        renormalizes: a token's weights add up to 1.
        activation: see ops/act_and_mul.py.
        format: format of the experts' weights; None is the context's dtype.
        shared_expert: an MLP that gives plain tensors; None if there is no shared expert.
    """

    accepts = Form.PLAIN

    def __init__(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        top_k: int,
        renormalizes: bool,
        activation: str,
        context: LayerContext,
        format: WeightFormat | None = None,
        shared_expert: nn.Module | None = None,
    ):
        super().__init__()
        self._top_k, self._renormalizes, self._activation = top_k, renormalizes, activation
        self._use_kernels, self._row_ops = context.use_kernels, context.row_ops
        self._deterministic = context.deterministic
        part = context.parallel.shard(size, "the experts' intermediate size")
        self.gate = Router(hidden_size, num_experts, context)
        self.gate_up_proj = ExpertColumns((num_experts, 2 * part[1], hidden_size), size, part, format, context)
        self.down_proj = ExpertRows((num_experts, hidden_size, part[1]), size, part, format, context)
        self.shared_expert = shared_expert
        self.shared_expert_gate = None if shared_expert is None else Router(hidden_size, 1, context)

    def variant_key(self, num_tokens: int) -> int:
        """See CausalLM.variant_key."""
        if not self._use_kernels:
            return 0
        num_experts, dtype = len(self.gate.weight), self.gate.weight.dtype
        return find_pairs_of_tile(num_tokens * self._top_k, num_experts, dtype, self._deterministic)

    def forward(self, hidden_states: torch.Tensor, adapters: AdapterRows | None = None) -> PartialSum:
        """hidden_states: [num_tokens, hidden_size] -> the same shape

        adapters: those of the tokens, for the shared expert; None if no token has one.
        """
        kind = self._use_kernels, self._row_ops
        routes = route(hidden_states, self.gate.weight, self._top_k, self._renormalizes, *kind)
        weights = self.gate_up_proj.weights, self.down_proj.weights
        output = grouped_mlp(hidden_states, routes, *weights, self._activation, *kind)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            weight = self._row_ops.sigmoid(self._row_ops.linear(hidden_states, self.shared_expert_gate.weight))
            output.addcmul_(weight, self.shared_expert(hidden_states, adapters).part)
        return PartialSum(output)
