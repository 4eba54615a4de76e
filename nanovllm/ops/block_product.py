"""Products of two matrices in FP8 whose scales change along the sum: each row of the inputs has one per block of
columns, and each block of the weight has one. So they are multiplied in while the product is added up.

A matrix unit adds up the products of one block, and float32 takes the sum of the blocks. The plain twin is
`block_product` with fused=False: PyTorch, in float64.
"""

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
    rows, columns: of a block; the last block of a row or column may be cut off.
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
    """What a program computes: columns of the result; num_stages: tiles of inputs that are loaded at a time."""

    outputs: int
    num_warps: int
    num_stages: int


# Rows of a tile -> the tile. With few rows the time goes into reading the weights: small tiles occupy more processors.
_TILES = {16: _Tile(64, 4, 4), 64: _Tile(64, 4, 4), 128: _Tile(128, 8, 3)}
# Inputs that are multiplied at a time, at most, and the fewest that a product of two e4m3 matrices takes.
_MOST_INPUTS, _LEAST_INPUTS = 128, 32
# Tiles of rows that are computed side by side before the next outputs, so that both matrices stay in the L2 cache.
_ROW_TILES_OF_GROUP = 8


def rows_of_tile(num_rows: int) -> int:
    """Rows that a program takes."""
    return next((rows for rows in _TILES if num_rows <= rows), max(_TILES))


def block_product(
    x: BlockQuantized, weight: BlockWeight, bias: torch.Tensor | None, dtype: torch.dtype, fused: bool = False
) -> torch.Tensor:
    """`x @ weight.T + bias`, added up in float32.

    Args:
        x: [num_rows, input_size], in blocks of as many columns as the weight's.
        bias: [output_size] or None.
        dtype: of the result.
        fused: compute with the kernel.

    Returns:
        [num_rows, output_size].
    """
    if fused:
        return _fused_block_product(x, weight, bias, dtype)
    # As good as exact, so that a row's results do not depend on how many rows there are.
    product = F.linear(x.whole(), weight.whole()).float()
    return (product if bias is None else product + bias).to(dtype)


@jit
def _place_of_tile(num_rows, OUTPUT_SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """(tile of rows, tile of outputs) of this program. GROUP tiles of rows go through all outputs together."""
    size_of_group = GROUP * tl.cdiv(OUTPUT_SIZE, OUTPUTS)
    first = tl.program_id(0) // size_of_group * GROUP
    place = tl.program_id(0) % size_of_group
    row_tiles = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    return first + place % row_tiles, place // row_tiles


@jit(do_not_specialize=["num_rows"])
def _block_product_kernel(
    x, row_scales, weight, scales, bias, out, num_rows, SIZE: tl.constexpr, OUTPUT_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows and outputs. row_scales: [number of blocks, num_rows]. A block of inputs is taken in
    pieces of INPUTS, the last of which may be cut off."""
    PIECES: tl.constexpr = tl.cdiv(BLOCK_COLUMNS, INPUTS)
    BLOCKS: tl.constexpr = tl.cdiv(SIZE, BLOCK_COLUMNS)
    IS_ONE_SCALE: tl.constexpr = BLOCK_ROWS % OUTPUTS == 0  # for all of the tile's outputs
    row_tile, output_tile = _place_of_tile(num_rows, OUTPUT_SIZE, ROWS, OUTPUTS, GROUP)
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = output_tile.to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    piece = tl.arange(0, INPUTS)
    is_row, is_output = row < num_rows, output < OUTPUT_SIZE
    at_scales = scales + (output_tile * OUTPUTS if IS_ONE_SCALE else output) // BLOCK_ROWS * BLOCKS
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    begin()
    for step in range(BLOCKS * PIECES):
        block = step // PIECES
        in_block = step % PIECES * INPUTS + piece
        column = block * BLOCK_COLUMNS + in_block
        is_column = column < SIZE
        if BLOCK_COLUMNS % INPUTS:
            is_column &= in_block < BLOCK_COLUMNS
        of_rows = tl.load(row_scales + block * num_rows + row, is_row, 0.0)
        if IS_ONE_SCALE:
            factors = (of_rows * tl.load(at_scales + block))[:, None]
        else:
            factors = of_rows[:, None] * tl.load(at_scales + block, is_output, 0.0)[None, :]
        values = tl.load(x + row[:, None] * SIZE + column[None, :], is_row[:, None] & is_column[None, :], 0.0)
        at_weights = weight + output[None, :] * SIZE + column[:, None]
        weights = tl.load(at_weights, is_column[:, None] & is_output[None, :], 0.0)
        total += tl.dot(values, weights) * factors
    if bias is not None:
        total += tl.load(bias + output, is_output, 0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * OUTPUT_SIZE + output[None, :], total, is_row[:, None] & is_output[None, :])


def _fused_block_product(
    x: BlockQuantized, weight: BlockWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    num_rows, (output_size, input_size) = x.values.shape[0], weight.values.shape
    out = torch.empty((num_rows, output_size), dtype=dtype, device=x.values.device)
    rows = rows_of_tile(num_rows)
    tile = _TILES[rows]
    inputs = min(_MOST_INPUTS, max(_LEAST_INPUTS, triton.next_power_of_2(weight.columns)))
    _block_product_kernel[(triton.cdiv(num_rows, rows) * triton.cdiv(output_size, tile.outputs),)](
        x.values, x.scales.mT.contiguous(), weight.values, weight.scales, bias, out, num_rows, SIZE=input_size,
        OUTPUT_SIZE=output_size, BLOCK_ROWS=weight.rows, BLOCK_COLUMNS=weight.columns, ROWS=rows, OUTPUTS=tile.outputs,
        INPUTS=inputs, GROUP=_ROW_TILES_OF_GROUP, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out
