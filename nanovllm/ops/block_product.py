"""Products of two matrices in FP8 whose scales change along the sum: each row of the inputs has a scale per block of
columns, and each block of the weight has one. The scales are applied block by block, which no kernel before or after
the product could do.

The plain twin computes in float64, so a row's results do not depend on the number of rows.
"""

from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.quantize import BlockQuantized


class BlockWeight(NamedTuple):
    """A weight in FP8 with a scale per block.

    values: float8_e4m3fn [output_size, input_size].
    scales: float32 [output_size / rows, input_size / columns], rounded up.
    rows, columns: the size of a block; the last block of a row or column may be cut off.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows: int
    columns: int

    def whole(self) -> torch.Tensor:
        """float64 [output_size, input_size]"""
        output_size, input_size = self.values.shape
        of_rows = self.scales.double().repeat_interleave(self.rows, 0)[:output_size]
        return self.values.double() * of_rows.repeat_interleave(self.columns, 1)[:, :input_size]


class _Tile(NamedTuple):
    """The work of a program: `outputs` columns of the result. It loads `num_stages` tiles of inputs at a time."""

    outputs: int
    num_stages: int
    num_warps: int


# Rows of a tile -> the tile. Few rows are limited by reading the weights, many by computing. The outputs are the left
# side of the products: Hopper's matrix units take 64 there, and few rows fit on the right.
_TILES = {16: _Tile(64, 6, 4), 32: _Tile(64, 6, 4), 64: _Tile(64, 5, 4), 128: _Tile(128, 4, 8)}
# Tiles of rows that are computed together before the next outputs, so that the inputs stay in the L2 cache.
_ROW_TILES_OF_GROUP = 16


def plain_block_product(
    x: BlockQuantized, weight: BlockWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    product = F.linear(x.whole(), weight.whole()).float()
    return (product if bias is None else product + bias).to(dtype)


@jit(do_not_specialize=["num_rows", "output_size"])
def _block_product_kernel(
    x, row_scales, weight, scales, bias, out, num_rows, output_size, SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows and outputs. The grid is (row tile in its group, tile of outputs, group of row
    tiles).

    INPUTS: number of inputs that are multiplied at a time and share their scales. WIDTH: blocks per row of the weight.
    """
    first_row = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * ROWS
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    column = tl.arange(0, INPUTS)
    is_row, is_output = row < num_rows, output < output_size
    at_x = x + row[None, :] * SIZE + column[:, None]
    at_weight = weight + output[:, None] * SIZE + column[None, :]
    at_row_scales = row_scales + row * WIDTH
    at_scales = scales + output // BLOCK_ROWS * WIDTH
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    begin()
    if first_row < num_rows:
        for start in range(0, SIZE, INPUTS):
            is_real = column < SIZE - start
            weights = tl.load(at_weight + start, is_output[:, None] & is_real[None, :], 0.0)
            values = tl.load(at_x + start, is_real[:, None] & is_row[None, :], 0.0)
            block = start // BLOCK_COLUMNS
            of_rows = tl.load(at_row_scales + block, is_row, 0.0)
            of_outputs = tl.load(at_scales + block, is_output, 0.0)
            total += tl.dot(weights, values) * (of_outputs[:, None] * of_rows[None, :])
        if HAS_BIAS:
            total += tl.load(bias + output, is_output, 0.0).to(tl.float32)[:, None]
        at_out = out + row[:, None] * output_size + output[None, :]
        tl.store(at_out, tl.trans(total), is_row[:, None] & is_output[None, :])


def rows_of_tile(num_rows: int) -> int:
    """Rows of the inputs per program."""
    return min(max(_TILES), max(min(_TILES), triton.next_power_of_2(num_rows)))


def triton_block_product(
    x: BlockQuantized, weight: BlockWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    num_rows, (output_size, input_size) = x.values.shape[0], weight.values.shape
    out = torch.empty((num_rows, output_size), dtype=dtype, device=x.values.device)
    rows = rows_of_tile(num_rows)
    tile, num_row_tiles = _TILES[rows], triton.cdiv(num_rows, rows)
    of_group = min(_ROW_TILES_OF_GROUP, num_row_tiles)
    _block_product_kernel[(of_group, triton.cdiv(output_size, tile.outputs), triton.cdiv(num_row_tiles, of_group))](
        x.values, x.scales, weight.values, weight.scales, bias, out, num_rows, output_size, SIZE=input_size,
        BLOCK_ROWS=weight.rows, BLOCK_COLUMNS=weight.columns, WIDTH=weight.scales.shape[1], ROWS=rows,
        OUTPUTS=tile.outputs, INPUTS=gcd(128, weight.columns), HAS_BIAS=bias is not None, num_stages=tile.num_stages,
        num_warps=tile.num_warps, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def block_product(
    x: BlockQuantized, weight: BlockWeight, bias: torch.Tensor | None, dtype: torch.dtype, use_kernels: bool = False
) -> torch.Tensor:
    """`x @ weight.T + bias`, added in float32.

    Args:
        x: [num_rows, input_size], in blocks of as many columns as the weight's.
        bias: [output_size] or None.
        dtype: the result's dtype.
        use_kernels: compute with the kernel.

    Returns:
        [num_rows, output_size].
    """
    return (triton_block_product if use_kernels else plain_block_product)(x, weight, bias, dtype)
