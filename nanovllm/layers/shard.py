"""Which part of a checkpoint tensor fills which part of a parameter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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


class Rows(NamedTuple):
    """Neighbouring rows of a checkpoint tensor, which fill neighbouring rows of a parameter.

    key: the tensor's key in Shards.
    size: how many rows the tensor has.
    start, length: the rows that this rank reads.
    """

    key: str
    size: int
    start: int
    length: int


def rows_of_heads(key: str, num_heads: int, part: tuple[int, int], *widths: int) -> list[Rows]:
    """A rank's rows of a tensor that consists of heads: those of the first kind in all its heads, then the next kind.

    Args:
        part: the rank's heads, as (start, length).
        widths: the number of rows of each kind in a head; in the tensor, a head's kinds follow each other.
    """
    (start, length), width = part, sum(widths)
    if len(widths) == 1:
        return [Rows(key, num_heads * width, start * width, length * width)]
    return [
        Rows(key, num_heads * width, head * width + first, num_rows)
        for first, num_rows in zip(accumulate(widths, initial=0), widths, strict=False)
        for head in range(start, start + length)
    ]


def in_one_tensor(key: str, rows: Sequence[Rows]) -> list[Rows]:
    """The same rows, in one tensor that holds the tensors of `rows` one after the other."""
    sizes = {each.key: each.size for each in rows}
    firsts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    return [Rows(key, sum(sizes.values()), firsts[each.key] + each.start, each.length) for each in rows]


def shards_of_rows(
    parameter: torch.Tensor,
    rows: Sequence[Rows],
    of_part: Callable[[Shard, int], Shard | None] = lambda shard, first: shard,
) -> Shards:
    """The rule of a parameter that consists of `rows`, one after the other.

    Args:
        of_part: gets the shard of a part and its first row in the parameter; returns the shard to use, or None.
    """
    first, rest, shards = 0, tuple(parameter.shape[1:]), Shards()
    for key, size, start, length in rows:
        source = ((start, length), *((0, width) for width in rest))
        whole = Shard((size, *rest), source, parameter[first : first + length])
        if (shard := of_part(whole, first)) is not None:
            shards.setdefault(key, []).append(shard)
        first += length
    return shards
