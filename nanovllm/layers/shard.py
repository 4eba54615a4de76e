"""Which part of a checkpoint tensor fills which part of a parameter."""

from dataclasses import dataclass

import torch
from torch import nn

# Key of a parameter that is one checkpoint tensor of the same name; merged layers use names such as "q_proj".
WHOLE = ""


@dataclass(frozen=True)
class Shard:
    """How a checkpoint tensor, or a part of it, gets into a parameter.

    Args:
        shape: the tensor's whole shape in the checkpoint.
        source: what this rank reads of it, a (start, length) for each dimension.
        target: the part of the parameter that it fills; numbers that fit into it are repeated.
        offset: is added to it.
        scales: float32 [rows of target]; if given, the target is e4m3, and rows of other numbers are quantized into it
            and their scales into this.
    """

    shape: tuple[int, ...]
    source: tuple[tuple[int, int], ...]
    target: torch.Tensor
    offset: float = 0.0
    scales: torch.Tensor | None = None


# What each checkpoint tensor fills. Only one that holds several projections has several shards.
Shards = dict[str, list[Shard]]


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def replicated_shards(parameter: torch.Tensor, offset: float = 0.0) -> Shards:
    """The rule of a parameter that every rank holds whole."""
    shape = tuple(parameter.shape)
    return {WHOLE: [Shard(shape, tuple((0, size) for size in shape), parameter, offset)]}
