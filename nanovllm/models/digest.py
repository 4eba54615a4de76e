"""The parts of the checkpoint's tensors that a model holds, each with a sum of its numbers; see ops/weights_sum.py.

The numbers are those that the model computes with: rounded to its dtype or to FP8, and with the offset of a norm added.
Sums of the parts on several ranks add up to that of the tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import Packable
from nanovllm.layers.shard import WHOLE, Shard
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import expected_of
from nanovllm.models.weight_parts import WeightPart
from nanovllm.ops.weights_sum import Keys, units_of, weights_sum

# Keeps the sum of a weight's scales apart from that of its values; any odd number does.
_OF_SCALES = 0xD1342543DE82EF95


@torch.inference_mode()
def weight_parts(model: CausalLM, use_kernels: bool = False) -> list[WeightPart]:
    """The parts that this rank holds of each tensor that the loader expects. It reads every weight once.

    A parameter may repeat a part, as that of a head's norm does for each head. Then `sums` are those of the largest and
    of the smallest bits among the copies, which are equal if all copies are. If the loader quantizes a weight, the
    weight's sum covers its scales, which have no name in the checkpoint.
    """
    of_modules = [(module, _shards_of(model, prefix, module)) for prefix, module in model.named_modules()]
    held = [pair for _, shards in of_modules for pair in shards]
    wholes = [_region(shard.shape, [(0, size) for size in shard.shape]) for _, shard in held]
    device = next(model.parameters()).device
    # A number has at most two units.
    keys = Keys.of(max(whole[1] for whole in wholes), 2 * max(whole[3] for whole in wholes), device)
    totals = torch.zeros((len(held), 2), dtype=torch.int64, device=device)
    totals_of_shards = iter(totals)
    for module, shards in of_modules:
        dense = module.packed.to_dense() if isinstance(module, Packable) and module.packed is not None else None
        for _, shard in shards:
            first_row, _, first_column, num_columns = _region(shard.shape, shard.source)
            for units, total in zip(_units(shard, dense), next(totals_of_shards), strict=False):
                first_unit = first_column * units.shape[1] // num_columns
                weights_sum(units, keys.part(first_row, first_unit, units), total, use_kernels)
    return [
        WeightPart(name, shard.shape, str(shard.target.dtype), _region(shard.shape, shard.source), _sums(shard, *sums))
        for (name, shard), sums in zip(held, totals.tolist(), strict=True)
    ]


def _shards_of(model: CausalLM, prefix: str, module: nn.Module) -> list[tuple[str, Shard]]:
    """The shards of a module's parameters that are not empty, each with its tensor's name."""
    expected = expected_of(model, prefix, module)
    if isinstance(module, ParallelLMHead) and not expected and module.packed is not None:
        # A tied head multiplies with a copy of the embedding. As for all packed weights, the target has no values.
        [shard] = module.shards("weight")[WHOLE]
        expected = {model.tied_weights["lm_head.weight"]: [replace(shard, target=shard.target.to("meta"))]}
    return [(name, shard) for name, shards in expected.items() for shard in shards if shard.target.numel()]


def _region(shape: tuple[int, ...], source: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
    """A part of a tensor as (first row, rows, first column, columns); the tensor's last dimension is the columns."""
    *outer, (first_column, num_columns) = source
    if not outer:
        return 0, 1, first_column, num_columns
    width = math.prod(shape[1:-1])  # parts are whole in the dimensions between
    return outer[0][0] * width, outer[0][1] * width, first_column, num_columns


def _is_repeated(shard: Shard) -> bool:
    return shard.target.numel() > math.prod(length for _, length in shard.source)


def _units(shard: Shard, dense: torch.Tensor | None) -> list[torch.Tensor]:
    """The units that the shard's sums are made of, each [rows, units of a row].

    dense: the packed weight of the shard's module, or None.
    """
    target = shard.target
    if target.is_meta and dense is not None:
        target = dense.as_strided(target.shape, target.stride(), target.storage_offset())
    _, num_rows, _, num_columns = _region(shard.shape, shard.source)
    if _is_repeated(shard):
        copies = units_of(target.reshape(-1, num_rows * num_columns))
        return [each.view(num_rows, -1) for each in (copies.amax(0), copies.amin(0))]
    units = [units_of(target.reshape(num_rows, num_columns))]
    return units if shard.scales is None else [*units, units_of(shard.scales[:, None])]


def _sums(shard: Shard, first: int, second: int) -> list[int]:
    """The sums of the copies, from those of `_units`."""
    if shard.scales is not None:
        return [(first + _OF_SCALES * second) % 2**64]
    return [each % 2**64 for each in ((first, second) if _is_repeated(shard) else (first,))]
