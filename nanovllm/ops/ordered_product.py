"""OrderedProducts: products on a GPU whose numbers are added in one order, whatever the number of rows.

A matrix unit adds the inputs of a product in steps, from the first to the last. So all tiles of our kernel give the
same bits, and most kernels of cuBLASLt do. At some numbers of rows it divides the inputs between programs (split-K),
and adds in another order. So `prepare` compares its bits with those of our kernel at each number of rows that it will
get. Where they differ, our kernel multiplies; else the library does, which is faster for many rows. Up to 16 rows our
kernel always multiplies, because it is faster there: it is launched before the preceding kernel has ended.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.library import cublas_lt
from nanovllm.ops.quantize import E4M3
from nanovllm.ops.row_invariant import PLAIN, RowOps, in_row_tiles

# Up to this many rows, our kernel always multiplies.
_FEW_ROWS = 16
# More rows are multiplied in parts of this size, so that fewer numbers of rows have to be compared.
_MAX_ROWS, _MAX_PADDED_ROWS = 4096, 512
# Eager steps pad their rows to the next of these numbers, or to that of a captured step.
_LADDER = (*range(32, 257, 16), *range(288, 513, 32), *range(640, 1025, 128), 1280, 1536, 2048, 3072, _MAX_ROWS)
_ALIGNMENT = 256  # bytes
_NUM_COMPARED = 2**16  # results to compare for each number of rows, if the largest step has so many


class _Tile(NamedTuple):
    """The work of a program: `rows` × `outputs` numbers, from `inputs` at a time."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# Maximum number of rows -> tile: the fastest of nine on an H200. In FP8, fewer than 64 outputs would be multiplied by
# other instructions, which round differently.
_TILES = {_FEW_ROWS: _Tile(16, 64, 128, 4, 4), 128: _Tile(32, 64, 128, 4, 4)}
_LARGEST_TILE = _Tile(128, 128, 64, 8, 4)
_ROW_TILES_OF_GROUP = 8  # computed together before the next outputs, so that the inputs stay in the L2 cache


@jit(do_not_specialize=["num_rows"])
def _ordered_product_kernel(
    x, weight, bias, out, num_rows, output_size, input_size, x_stride, out_stride, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per tile. The outputs are the left side of the products: Hopper's matrix units take 64 there, and few
    rows fit on the right."""
    num_row_tiles, num_output_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(output_size, OUTPUTS)
    first = tl.program_id(0) // (GROUP * num_output_tiles) * GROUP
    height, place = tl.minimum(num_row_tiles - first, GROUP), tl.program_id(0) % (GROUP * num_output_tiles)
    row = (first + place % height) * ROWS + tl.arange(0, ROWS)
    output = place // height * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    is_row, is_output = row < num_rows, output < output_size
    at_x = x + row[None, :].to(tl.int64) * x_stride + column[:, None]
    at_weight = weight + output[:, None].to(tl.int64) * input_size + column[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    begin()
    for start in range(0, input_size, INPUTS):
        is_real = column < input_size - start
        weights = tl.load(at_weight + start, is_output[:, None] & is_real[None, :], 0.0)
        values = tl.load(at_x + start, is_real[:, None] & is_row[None, :], 0.0)
        total = tl.dot(weights, values, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, is_output, 0.0).to(tl.float32)[:, None]
    at_out = out + row[:, None].to(tl.int64) * out_stride + output[None, :]
    tl.store(at_out, tl.trans(total), is_row[:, None] & is_output[None, :])


def triton_ordered_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: _Tile | None = None
) -> torch.Tensor:
    """Writes `x @ weight.T + bias` to `out`, added in float32.

    Args:
        x: [num_rows, input_size], of 16 or 32 bits or e4m3; rows may have a stride.
        weight: [output_size, input_size], contiguous, of x's dtype.
        bias: [output_size] or None.
        out: [num_rows, output_size]; rows may have a stride.
        tile: the work of a program; None chooses by the number of rows. All give the same bits.
    """
    (num_rows, input_size), output_size = x.shape, len(weight)
    if tile is None:
        tile = next((tile for rows, tile in _TILES.items() if num_rows <= rows), _LARGEST_TILE)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(output_size, tile.outputs)
    _ordered_product_kernel[(num_tiles,)](
        x, weight, bias, out, num_rows, output_size, input_size, x.stride(0), out.stride(0), ROWS=tile.rows,
        OUTPUTS=tile.outputs, INPUTS=tile.inputs // (2 if x.dtype == torch.float32 else 1), GROUP=_ROW_TILES_OF_GROUP,
        HAS_BIAS=bias is not None, num_warps=tile.num_warps,
        num_stages=tile.num_stages // (2 if x.dtype == torch.float32 else 1), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


class OrderedProducts:
    """Products of a model's weights on one GPU.

    Args:
        sizes: numbers of rows of captured steps.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device):
        parts = {part for size in sizes for part in (min(size, _MAX_ROWS), size % _MAX_ROWS)}
        self._sizes = sorted({*_LADDER, *(part for part in parts if part > _FEW_ROWS)})
        self._one = torch.ones((), dtype=torch.float32, device=device)
        # Output size, input size, dtype of the weight, whether there is a bias -> the numbers of rows at which the
        # library adds in our kernel's order.
        self._agreed: dict[tuple[int, int, torch.dtype, bool], frozenset[int]] = {}

    @property
    def row_ops(self) -> RowOps:
        return PLAIN._replace(is_invariant=True, linear=self.linear, fp8_product=self.fp8_product, prepare=self.prepare)

    def prepare(self, weight: torch.Tensor, dtype: torch.dtype, has_bias: bool, max_rows: int) -> None:
        """Compares the library with our kernel for a weight of this shape, with numbers that partly cancel. Without
        this, our kernel multiplies.

        Args:
            weight: its numbers are not read.
            dtype: dtype of the results.
            max_rows: the largest number of rows that this weight multiplies.

        Raises:
            RuntimeError: on this GPU the tile of our kernel changes the bits.
        """
        key = (*weight.shape, weight.dtype, has_bias)
        # The caller may at any time allow the library to round float32 to TF32, so it never multiplies that.
        if key in self._agreed or weight.dtype == torch.float32:
            return
        (output_size, input_size), device = weight.shape, weight.device
        largest = self._sizes[bisect_left(self._sizes, min(max_rows, _MAX_ROWS))]
        x, weights = _cancelling(largest, output_size, input_size, dtype, device)
        x, weights = x.to(weight.dtype), weights.to(weight.dtype)
        bias = weights.new_ones(output_size, dtype=dtype) if has_bias else None
        expected = torch.empty((largest, output_size), dtype=dtype, device=device)
        triton_ordered_product(x, weights, bias, expected, _LARGEST_TILE)

        def agrees(num_rows: int, multiply: Callable[..., object], *options: Any) -> bool:
            num_times = min(largest // num_rows, -(-_NUM_COMPARED // (num_rows * output_size)))
            for part, result in zip(x.split(num_rows)[:num_times], expected.split(num_rows), strict=False):
                found = torch.full_like(result, torch.nan)
                multiply(part, weights, bias, found, *options)
                if not torch.equal(found, result):
                    return False
            return True

        for num_rows, tile in _TILES.items():
            if not agrees(min(num_rows, largest), triton_ordered_product, tile):
                raise RuntimeError(
                    f"deterministic=True: on this GPU, {torch.cuda.get_device_name(device)}, sums of products depend "
                    "on the number of rows; leave deterministic out"
                )
        with cublas_lt():
            sizes = self._sizes[: self._sizes.index(largest) + 1]
            self._agreed[key] = frozenset(size for size in sizes if agrees(size, self._multiply_by_library))

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        packed: None = None,
        bias: torch.Tensor | None = None,
        use_kernels: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `ops.linear.linear`. Products of float64, which are few and small, are those of `in_row_tiles`."""
        if x.dtype == torch.float64:
            return in_row_tiles(x, partial(F.linear, weight=weight, bias=bias))
        return self._multiply(x, weight, bias, out, x.dtype)

    def fp8_product(self, x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `ops.quantize.fp8_product`."""
        return self._multiply(x, weight, None, None, dtype)

    def _multiply(self, x, weight, bias, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
        agreed = self._agreed.get((*weight.shape, weight.dtype, bias is not None), frozenset())
        start = 0
        for num_rows, size in self._parts(len(x)):
            part, result = x[start : start + num_rows], out[start : start + num_rows]
            if num_rows <= _FEW_ROWS or size not in agreed:
                triton_ordered_product(part, weight, bias, result)
            elif size == num_rows and _is_aligned(part) and _is_aligned(result):
                self._multiply_by_library(part, weight, bias, result)
            else:
                padded, results = part.new_zeros(size, part.shape[1]), out.new_empty(size, len(weight))
                padded[:num_rows] = part
                self._multiply_by_library(padded, weight, bias, results)
                result.copy_(results[:num_rows])
            start += num_rows
        return out

    def _parts(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """The number of rows of each part, without and with padding. Only a small part is padded, because the trial of
        the largest step measures no memory for padding."""
        while num_rows > _MAX_PADDED_ROWS:
            size = self._sizes[bisect_right(self._sizes, num_rows) - 1]
            yield size, size
            num_rows -= size
        if num_rows:
            yield num_rows, self._sizes[bisect_left(self._sizes, num_rows)]

    def _multiply_by_library(self, x, weight, bias, out) -> None:
        if weight.dtype == E4M3:
            torch._scaled_mm(
                x, weight.mT, scale_a=self._one, scale_b=self._one, out_dtype=out.dtype, use_fast_accum=True, out=out
            )
        elif bias is None:
            torch.mm(x, weight.mT, out=out)
        else:
            torch.addmm(bias, x, weight.mT, out=out)


def _cancelling(
    num_rows: int, output_size: int, input_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, input_size] and weight [output_size, input_size]. The first third of the inputs is large, and the
    last third cancels it. So sums on the way are large compared with the result, and another order of addition shows in
    its bits. If all inputs were of one size, it would show in one result of a thousand."""
    generator, num_large = torch.Generator(device).manual_seed(0), input_size // 3
    x, weight = (
        torch.randn(size, input_size, dtype=dtype, device=device, generator=generator)
        for size in (num_rows, output_size)
    )
    for numbers, sign in ((x, -1), (weight, 1)):
        large = numbers[:, :num_large].mul_(16)
        numbers[:, input_size - num_large :] = sign * large
    return x, weight


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins at an address like a new tensor's: the library also chooses its kernel by the alignment."""
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0
