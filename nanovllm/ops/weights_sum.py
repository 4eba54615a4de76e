"""A hash of a tensor that is a sum over its numbers, so that the sums of the tensor's parts add up to its own.

It is multilinear (Carter and Wegman, "Universal classes of hash functions", 1979): each number is multiplied by a key
that depends on its place alone, and the products are added modulo 2^64.
"""

from typing import NamedTuple

import torch

from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.splitmix64 import SIGNED_STEP, finalized

_CHUNK = 2**16  # units that the plain twin holds as int64 at a time, so that they stay in a CPU's caches


def splitmix64(number: torch.Tensor) -> torch.Tensor:
    """The numbers with these indices that SplitMix64 generates from the seed 0.

    Args:
        number: int64 of any shape, at least 0.

    Returns:
        int64 of the same shape; read them as unsigned.
    """
    return finalized((number + 1) * SIGNED_STEP)


class Keys(NamedTuple):
    """The keys of places in a matrix. Rows and columns have different keys, so that a matrix and its transpose have
    different sums. All keys are odd, so that no change of a single unit leaves the sum as it was.

    rows: int64 [num_rows]; columns: int64 [num_columns], a column for each unit.
    """

    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, num_rows: int, num_columns: int, device: torch.device) -> "Keys":
        """The keys of a matrix of that many rows and units per row. Those of a smaller one are their beginning."""
        rows, columns = (torch.arange(number, device=device) for number in (num_rows, num_columns))
        return cls(splitmix64(2 * rows) | 1, splitmix64(2 * columns + 1) | 1)

    def part(self, first_row: int, first_column: int, units: torch.Tensor) -> "Keys":
        """The keys of a part of the matrix, which begins at this row and unit."""
        num_rows, num_columns = units.shape
        rows = self.rows[first_row : first_row + num_rows]
        return Keys(rows, self.columns[first_column : first_column + num_columns])


def units_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the numbers, in units of at most 16 bits: a change of few high bits of a larger unit would reach too
    few bits of the sum.

    Args:
        tensor: [..., num_columns] in any dtype, with the last dimension contiguous.

    Returns:
        A view, int8 [..., num_columns] for a dtype of one byte, else int16 [..., num_columns × bytes / 2].
    """
    return tensor.view(torch.int8 if tensor.itemsize == 1 else torch.int16)


def plain_weights_sum(units: torch.Tensor, keys: Keys, total: torch.Tensor) -> None:
    unsigned = units.view(torch.uint8 if units.itemsize == 1 else torch.uint16)
    num_rows = max(1, _CHUNK // units.shape[1])
    for part, row_keys in zip(unsigned.split(num_rows), keys.rows.split(num_rows), strict=True):
        total += ((part.long() * keys.columns).sum(1) * row_keys).sum()
    total += keys.rows.sum() * keys.columns.sum()  # the 1 of every unit


@jit(do_not_specialize=["num_rows"])
def _weights_sum_kernel(
    units, row_keys, column_keys, total, num_rows, num_columns, stride, MASK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per tile. It loads all rows of its tile at once, and multiplies by the columns' keys only once."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.int64)
    for index in tl.static_range(ROWS):
        row = first + index
        is_row = row < num_rows
        numbers = tl.load(units + row * stride + column, column < tl.where(is_row, num_columns, 0), 0)
        sums += ((numbers.to(tl.int64) & MASK) + 1) * tl.load(row_keys + row, is_row, 0)
    sums *= tl.load(column_keys + column, column < num_columns, 0)
    tl.atomic_add(total, tl.sum(sums, 0))


def triton_weights_sum(units: torch.Tensor, keys: Keys, total: torch.Tensor) -> None:
    num_rows, num_columns = units.shape
    rows, columns = 16 if num_rows > 1 else 1, 1024 if num_columns > 64 else 64
    _weights_sum_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))](
        units, keys.rows, keys.columns, total, num_rows, num_columns, units.stride(0),
        MASK=2 ** (8 * units.itemsize) - 1, ROWS=rows, COLUMNS=columns, num_warps=4 if columns > 64 else 1,
        enable_fp_fusion=True,
    )  # fmt: skip


def weights_sum(units: torch.Tensor, keys: Keys, total: torch.Tensor, use_kernels: bool = False) -> None:
    """Adds `sum over rows r and columns c of rows[r] × columns[c] × (units[r, c] + 1)` to `total`, modulo 2^64.

    Units count as unsigned. The 1 lets every unit count, also one that is 0. It reads the units once.

    Args:
        units: from `units_of`, [num_rows, num_columns], not empty; rows may have a stride.
        keys: those of the units' places.
        total: int64 [], on the same device.
        use_kernels: compute with the kernel.
    """
    (triton_weights_sum if use_kernels else plain_weights_sum)(units, keys, total)
