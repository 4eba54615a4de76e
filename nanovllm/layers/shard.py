"""Which part of a checkpoint tensor fills which part of a parameter."""

from dataclasses import dataclass

import torch

# The key of a parameter that is one checkpoint tensor of the same name. Merged layers have keys such as "q_proj".
WHOLE = ""


@dataclass(frozen=True)
class Shard:
    """How the loader fills a part of a parameter from a checkpoint tensor.

    Args:
        shape: the tensor's whole shape in the checkpoint.
        source: the part of the tensor that this rank reads, a (start, length) per dimension.
        target: the part of the parameter to fill. A smaller source is repeated to its shape.
        offset: is added to the numbers.
        scales: float32 [rows of target]. If given, the target is e4m3: rows in another dtype are quantized, into the
            target and into these scales.
    """

    shape: tuple[int, ...]
    source: tuple[tuple[int, int], ...]
    target: torch.Tensor
    offset: float = 0.0
    scales: torch.Tensor | None = None


# The shards of a parameter by the key of their checkpoint tensor. Only a tensor that holds several projections has
# several shards.
Shards = dict[str, list[Shard]]


def replicated_shards(parameter: torch.Tensor, offset: float = 0.0) -> Shards:
    """The rule of a parameter that every rank holds whole."""
    shape = tuple(parameter.shape)
    return {WHOLE: [Shard(shape, tuple((0, size) for size in shape), parameter, offset)]}
