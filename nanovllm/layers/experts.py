"""A mixture of experts in the place of a layer's MLP."""

import torch
from torch import nn

from nanovllm.layers.linear import PartialSum, Shard, Shards, empty_parameter, replicated_shards
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.grouped_mlp import find_pairs_of_tile, grouped_mlp
from nanovllm.ops.route import route


class Router(nn.Module):
    """weight: [num_experts, hidden_size], whole on every rank, so that all ranks choose the same experts."""

    def __init__(self, hidden_size: int, num_experts: int, **kw):
        super().__init__()
        self.weight = empty_parameter(num_experts, hidden_size, **kw)

    def shards(self, name: str) -> Shards:
        return replicated_shards(self.weight)


class ExpertColumns(nn.Module):
    """The gate and up projections of all experts, one after the other; each expert's columns are divided over the
    ranks.

    weight: [num_experts, 2 × this rank's part of size, hidden_size].
    """

    def __init__(self, num_experts: int, hidden_size: int, size: int, part: tuple[int, int], **kw):
        super().__init__()
        self._size, self._part = size, part
        self.weight = empty_parameter(num_experts, 2 * part[1], hidden_size, **kw)

    def shards(self, name: str) -> Shards:
        hidden_size, shards = self.weight.shape[2], Shards()
        for expert, weight in enumerate(self.weight):
            for key, target in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                shard = Shard((self._size, hidden_size), (self._part, (0, hidden_size)), target)
                shards[f"experts.{expert}.{key}"] = [shard]
        return shards


class ExpertRows(nn.Module):
    """The down projections of all experts. weight: [num_experts, hidden_size, this rank's part of size]."""

    def __init__(self, num_experts: int, hidden_size: int, size: int, part: tuple[int, int], **kw):
        super().__init__()
        self._size, self._part = size, part
        self.weight = empty_parameter(num_experts, hidden_size, part[1], **kw)

    def shards(self, name: str) -> Shards:
        hidden_size = self.weight.shape[1]
        return {
            f"experts.{expert}.down_proj": [Shard((hidden_size, self._size), ((0, hidden_size), self._part), weight)]
            for expert, weight in enumerate(self.weight)
        }


class Experts(nn.Module):
    """Each token goes through `top_k` of the experts, which are gated MLPs, and gets the weighted sum of their outputs.

    Args:
        size: of an expert's MLP.
        renormalizes: a token's weights add up to 1.
        activation: see ops/act_and_mul.py.
        parallel: the ranks over which each expert's columns are divided.
        fused: compute with our kernels.
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
        fused: bool = False,
        **kw,
    ):
        super().__init__()
        self._top_k, self._renormalizes, self._activation, self._fused = top_k, renormalizes, activation, fused
        part = parallel.shard(size, "the experts' intermediate size")
        self.gate = Router(hidden_size, num_experts, **kw)
        self.gate_up_proj = ExpertColumns(num_experts, hidden_size, size, part, **kw)
        self.down_proj = ExpertRows(num_experts, hidden_size, size, part, **kw)

    def kernels(self, num_tokens: int) -> int:
        """See CausalLM.kernels."""
        num_experts, dtype = len(self.gate.weight), self.gate_up_proj.weight.dtype
        return find_pairs_of_tile(num_tokens * self._top_k, num_experts, dtype) if self._fused else 0

    def forward(self, hidden_states: torch.Tensor) -> PartialSum:
        """hidden_states: [num_tokens, hidden_size] -> the same shape"""
        routes = route(hidden_states, self.gate.weight, self._top_k, self._renormalizes, self._fused)
        weights = self.gate_up_proj.weight, self.down_proj.weight
        return PartialSum(grouped_mlp(hidden_states, routes, *weights, self._activation, self._fused))
