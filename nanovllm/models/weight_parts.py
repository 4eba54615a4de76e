"""What each rank says of the weights it holds, and the digests that follow from it. Nothing here needs torch."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class WeightPart(NamedTuple):
    """A part of a checkpoint's tensor that a rank holds. Ranks send it to their driver as JSON.

    name: the tensor's name in the checkpoint, as `loader.expected_tensors` has it.
    shape: the whole tensor's shape there.
    dtype: of the loaded numbers.
    region: the part as (first row, rows, first column, columns) of the tensor, whose last dimension is the columns.
    sums: of each copy of the part on this rank, modulo 2^64; see models/digest.py.
    """

    name: str
    shape: Sequence[int]
    dtype: str
    region: Sequence[int]
    sums: Sequence[int]


def tensor_digests(of_ranks: Iterable[Iterable[Sequence]]) -> dict[str, str]:
    """A digest of each tensor's name, in the order of the names: 16 hex digits.

    A region that several ranks hold, or one rank several times, counts once.

    Args:
        of_ranks: the parts of each rank, each with the fields of a WeightPart.

    Raises:
        RuntimeError: copies of a region differ; the message names the tensors and the ranks.
    """
    heads: dict[str, str] = {}
    sums: dict[str, dict[tuple[int, ...], int]] = {}
    differing: dict[str, int] = {}
    num_numbers: dict[str, int] = {}
    for rank, parts in enumerate(of_ranks):
        for part in parts:
            name, shape, dtype, region, copies = WeightPart(*part)
            heads[name], num_numbers[name] = f"{list(shape)} {dtype}", math.prod(shape)
            known = sums.setdefault(name, {})
            for copy in copies:
                if known.setdefault(tuple(region), copy) != copy:
                    differing.setdefault(name, rank)
    if differing:
        names = ", ".join(f"{name} (rank {rank})" for name, rank in list(differing.items())[:3])
        raise RuntimeError(
            f"copies in memory differ, of {len(differing)} tensor{'' if len(differing) == 1 else 's'}: "
            f"{names}{' …' * (len(differing) > 3)}; only some of the copies were changed; give these tensors to "
            "update_weights()"
        )
    for name, regions in sums.items():
        num_found = sum(num_rows * num_columns for _, num_rows, _, num_columns in regions)
        assert num_found == num_numbers[name], f"{name}: {num_found} of {num_numbers[name]} numbers are counted"
    return {name: _digest(f"{heads[name]} {sum(sums[name].values()) % 2**64}")[:16] for name in sorted(sums)}


def whole_digest(digests: dict[str, str]) -> str:
    """A digest of the result of `tensor_digests`: 64 hex digits."""
    return _digest("".join(f"{name} {digest}\n" for name, digest in sorted(digests.items())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
