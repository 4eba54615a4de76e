"""FP8: rows of e4m3 with a scale each, and products of two such matrices before their scales are applied.

A product is limited by memory bandwidth alone only if it applies no scales. So the kernel that makes a row also
quantizes it, and the kernel that reads the product next, which reads all of it anyway, applies both scales.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
_MIN_PEAK = 1e-30  # so that the scale of a row of zeros is not 0
# 1.5 × 2^23. Float32 numbers of this size are 1 apart, so a sum with a small number is rounded to an integer.
TO_INTEGER = tl.constexpr(12582912.0)
# 1.5 × 2^14. Numbers of this size are 2^-9 apart, like the numbers of e4m3 below 2^-6.
_TO_SUBNORMAL = tl.constexpr(24576.0)
_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Quantized(NamedTuple):
    """Rows of numbers, each `values × scales`.

    values: float8_e4m3fn [num_rows, size].
    scales: float32 [num_rows].
    """

    values: torch.Tensor
    scales: torch.Tensor

    def whole(self) -> torch.Tensor:
        """float32 [num_rows, size]"""
        return self.values.float() * self.scales[:, None]


class BlockQuantized(NamedTuple):
    """Rows of numbers, each `values × scales`, with a scale per block of columns.

    values: float8_e4m3fn [num_rows, size].
    scales: float32 [num_rows, size / columns], rounded up.
    columns: columns of a block; a row's last block may be cut off.
    """

    values: torch.Tensor
    scales: torch.Tensor
    columns: int

    def whole(self) -> torch.Tensor:
        """float64 [num_rows, size]"""
        return self.values.double() * self.scales.repeat_interleave(self.columns, 1)[:, : self.values.shape[1]]


class ScaledProduct(NamedTuple):
    """A matrix whose numbers are `product × row_scales × column_scales`.

    product: [num_rows, size], not in float16, whose range is too small.
    row_scales: float32 [num_rows].
    column_scales: float32 [size].
    """

    product: torch.Tensor
    row_scales: torch.Tensor
    column_scales: torch.Tensor

    def whole(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, size], in the product's dtype, with a bias [size] added."""
        scaled = self.product.float() * self.row_scales[:, None] * self.column_scales
        return (scaled if bias is None else scaled + bias).to(self.product.dtype)


def plain_quantize_rows(x: torch.Tensor) -> Quantized:
    scales = x.abs().amax(1).float().clamp(min=_MIN_PEAK) / LARGEST
    return Quantized((x.float() / scales[:, None]).to(E4M3), scales)


def plain_quantize_row_blocks(x: torch.Tensor, columns: int) -> BlockQuantized:
    size = x.shape[1]
    blocks = F.pad(x.float(), (0, -size % columns)).unflatten(1, (-1, columns))
    scales = blocks.abs().amax(2).clamp(min=_MIN_PEAK) / LARGEST
    values = (blocks / scales[:, :, None]).to(E4M3).flatten(1)[:, :size]
    return BlockQuantized(values.contiguous(), scales, columns)


@jit
def to_e4m3(x):
    """Rounds float32 numbers to e4m3.

    If the result is stored four numbers at a time in one place, do not use it number by number in another: convert
    again. ptxas 12.8 and 12.9 compile the second use wrongly, so that it gets stale numbers.
    tests/support/compile_kernels.py looks for that.
    """
    # Triton's interpreter halves some numbers that it rounds up, so this rounds before it does.
    if _IS_INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = subnormal_or(x, rounded)
    return x.to(tl.float8e4nv)


@jit
def subnormal_or(x, rounded):
    """float32: x rounded to e4m3 where that is subnormal, else `rounded`."""
    return tl.where(tl.abs(x) < 0.015625, (x + _TO_SUBNORMAL) - _TO_SUBNORMAL, rounded)


@jit
def to_int8(x):
    """float32, from −128 to 127 -> the nearest integer, int8, which is in the lowest bits of the sum."""
    return (x + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)


@jit
def divided_by_peak(values, peak):
    """(float32 values, their largest absolute number) -> (e4m3 values, scale)"""
    scale = tl.maximum(peak, 1e-30) / 448.0
    return to_e4m3(values / scale), scale


def empty_quantized(num_rows: int, size: int, device: torch.device) -> Quantized:
    """Uninitialised memory for a kernel to fill."""
    values = torch.empty((num_rows, size), dtype=E4M3, device=device)
    return Quantized(values, torch.empty(num_rows, dtype=torch.float32, device=device))


def num_warps_of_row(padded: int) -> int:
    """The number of warps for a kernel with `padded` numbers of a row per program."""
    return max(4, min(16, padded // 512))


@jit
def _quantize_rows_kernel(x, values, scales, SIZE: tl.constexpr, PADDED: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_real = column < SIZE
    numbers = tl.load(x + row * SIZE + column, is_real, 0.0).to(tl.float32)
    quantized, scale = divided_by_peak(numbers, tl.max(tl.abs(numbers), 0))
    tl.store(values + row * SIZE + column, quantized, is_real)
    tl.store(scales + row, scale)


def triton_quantize_rows(x: torch.Tensor) -> Quantized:
    num_rows, size = x.shape
    quantized = empty_quantized(num_rows, size, x.device)
    padded = triton.next_power_of_2(size)
    _quantize_rows_kernel[(num_rows,)](
        x, *quantized, SIZE=size, PADDED=padded, num_warps=num_warps_of_row(padded), **LAUNCH_OPTIONS
    )
    return quantized


@jit
def _quantize_row_blocks_kernel(
    x, values, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per row and BLOCKS of its WIDTH blocks."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inner = tl.arange(0, PADDED)
    column = block[:, None] * COLUMNS + inner[None, :]
    is_real = (inner < COLUMNS)[None, :] & (column < SIZE)
    numbers = tl.load(x + row * SIZE + column, is_real, 0.0).to(tl.float32)
    quantized, of_blocks = divided_by_peak(numbers, tl.max(tl.abs(numbers), 1)[:, None])
    tl.store(values + row * SIZE + column, quantized, is_real)
    tl.store(scales + row * WIDTH + block[:, None], of_blocks, block[:, None] < WIDTH)


def triton_quantize_row_blocks(x: torch.Tensor, columns: int) -> BlockQuantized:
    (num_rows, size), width = x.shape, triton.cdiv(x.shape[1], columns)
    values = torch.empty((num_rows, size), dtype=E4M3, device=x.device)
    scales = torch.empty((num_rows, width), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(columns)
    blocks = min(max(1, 1024 // padded), triton.next_power_of_2(width))
    _quantize_row_blocks_kernel[(num_rows, triton.cdiv(width, blocks))](
        x, values, scales, SIZE=size, WIDTH=width, COLUMNS=columns, PADDED=padded, BLOCKS=blocks,
        num_warps=num_warps_of_row(blocks * padded), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return BlockQuantized(values, scales, columns)


def quantize_rows(x: torch.Tensor, use_kernels: bool = False) -> Quantized:
    """Divides each row by a scale that makes its largest number 448, and rounds it to e4m3.

    Args:
        x: [num_rows, size]. A row with a NaN or an infinity becomes a row of NaNs.
        use_kernels: compute with the kernel.
    """
    return (triton_quantize_rows if use_kernels else plain_quantize_rows)(x)


def quantize_row_blocks(x: torch.Tensor, columns: int, use_kernels: bool = False) -> BlockQuantized:
    """`quantize_rows` of each block of columns.

    Args:
        x: [num_rows, size]. A block with a NaN or an infinity has a NaN.
        columns: columns of a block.
        use_kernels: compute with the kernel.
    """
    return (triton_quantize_row_blocks if use_kernels else plain_quantize_row_blocks)(x, columns)


def fp8_product(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x @ weight.T` of two matrices in e4m3, computed in float32 and rounded to `dtype`.

    Args:
        x: [num_rows, input_size].
        weight: [output_size, input_size].
        one: float32 [], the number 1 on the weight's device.

    Returns:
        [num_rows, output_size].
    """
    if weight.is_cuda:
        return torch._scaled_mm(x, weight.mT, scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True)
    return _exact_product(x, weight).to(dtype)


def scaled_product(
    x: Quantized,
    weight: torch.Tensor,
    scales: torch.Tensor,
    one: torch.Tensor,
    dtype: torch.dtype,
    product: Callable[..., torch.Tensor] = fp8_product,
) -> ScaledProduct:
    """Multiplies by `product` and leaves the scales to the reader. scales: float32 [output_size], those of the weight's
    rows."""
    return ScaledProduct(product(x.values, weight, one, dtype), x.scales, scales)


def whole_product(
    x: Quantized, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`x @ weight.T + bias`: [num_rows, output_size], with the scales applied by the product, which is slower for few
    rows.

    Args:
        x: rows of [num_rows, input_size].
        weight: float8_e4m3fn [output_size, input_size].
        scales: float32 [output_size], the scales of the weight's rows.
        bias: [output_size] or None.
        dtype: the result's dtype.
    """
    if weight.is_cuda:
        return torch._scaled_mm(
            x.values, weight.mT, scale_a=x.scales[:, None], scale_b=scales[None, :], bias=bias, out_dtype=dtype,
            use_fast_accum=True,
        )  # fmt: skip
    product = _exact_product(x.values, weight) * x.scales[:, None] * scales
    return (product if bias is None else product + bias).to(dtype)


def _exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` of numbers in e4m3, in float32. float64 holds every sum exactly, so a row's result does not depend
    on the number of rows. Otherwise a last bit would sometimes decide how a later layer's input is rounded."""
    return F.linear(x.double(), weight.double()).float()
