"""RMSNorm (Zhang and Sennrich, 2019), alone and with the residual added before it."""

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.quantize import Quantized, ScaledProduct, divided_by_peak, empty_quantized


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def plain_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual if x.ndim == 2 else (x.sum(0) + residual).to(residual.dtype)
    return plain_rms_norm(total, weight, eps), total


@jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, row_scales, column_scales, residual, weight, out, scales, total, eps, num_rows, SIZE: tl.constexpr,
    PADDED: tl.constexpr, PARTS: tl.constexpr, ADDS: tl.constexpr, IS_SCALED: tl.constexpr, QUANTIZES: tl.constexpr,
):  # fmt: skip
    """One program per row. IS_SCALED: x is a ScaledProduct, with its scales; QUANTIZES: `out` and `scales` are a
    Quantized."""
    program = tl.program_id(0).to(tl.int64)
    row = program * SIZE
    column = tl.arange(0, PADDED)
    is_real = column < SIZE
    weights = tl.load(weight + column, is_real, 0.0).to(tl.float32)  # no earlier kernel writes it
    if IS_SCALED:
        of_columns = tl.load(column_scales + column, is_real, 0.0)
    begin()
    values = tl.load(x + row + column, is_real, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(x + part * num_rows * SIZE + row + column, is_real, 0.0)
    if IS_SCALED:
        values *= tl.load(row_scales + program) * of_columns
    if ADDS:
        values += tl.load(residual + row + column, is_real, 0.0).to(tl.float32)
        # The norm reads the rounded sum, as it is stored.
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row + column, rounded, is_real)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normed = values * scale * weights
    if QUANTIZES:
        quantized, scale_of_row = divided_by_peak(normed, tl.max(tl.abs(normed), 0))
        tl.store(out + row + column, quantized, is_real)
        tl.store(scales + program, scale_of_row)
    else:
        tl.store(out + row + column, normed, is_real)


def triton_rms_norm(
    x: torch.Tensor | ScaledProduct, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, quantizes: bool
) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
    """(norm(total), total), where `total` is x, or its sum with the residual."""
    given, *scales_of_x = x if isinstance(x, ScaledProduct) else (x, None, None)
    like = given if residual is None else residual
    num_rows, size = like.shape
    normed = empty_quantized(num_rows, size, like.device) if quantizes else torch.empty_like(like)
    out, scales = normed if isinstance(normed, Quantized) else (normed, None)
    total = like if residual is None else torch.empty_like(like)
    _rms_norm_kernel[(num_rows,)](
        given, *scales_of_x, residual, weight, out, scales, total, eps, num_rows, SIZE=size,
        PADDED=triton.next_power_of_2(size), PARTS=len(given) if given.ndim == 3 else 1, ADDS=residual is not None,
        IS_SCALED=isinstance(x, ScaledProduct), QUANTIZES=quantizes, num_warps=4 if size <= 2048 else 8,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return normed, total


@jit
def _sums_of_squares_kernel(x, sums, stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """One program per row."""
    begin()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    values = tl.load(x + row * stride + column, column < SIZE, 0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(values * values, 0))


def sums_of_squares(x: torch.Tensor, use_kernels: bool = False) -> torch.Tensor:
    """x: [num_rows, size]; rows may have a stride -> float32 [num_rows]. PyTorch adds in an order that depends on the
    number of rows; the kernel does not."""
    if not use_kernels:
        return torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).square()
    (num_rows, size), sums = x.shape, torch.empty(len(x), dtype=torch.float32, device=x.device)
    _sums_of_squares_kernel[(num_rows,)](
        x, sums, x.stride(0), SIZE=size, PADDED=triton.next_power_of_2(size), num_warps=8, **LAUNCH_OPTIONS
    )
    return sums


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, use_kernels: bool = False, quantizes: bool = False
) -> torch.Tensor | Quantized:
    """`x / sqrt(mean(x²) + eps) × weight`, computed in float32; x itself is not changed.

    The kernel rounds once. Plain PyTorch, like transformers, also rounds before it applies a weight of x's dtype.

    Args:
        x: [..., size]; the kernel takes [num_rows, size].
        weight: [size], of x's dtype or float32.
        use_kernels: compute with the kernel.
        quantizes: the kernel rounds to e4m3, with a scale per row; only with `use_kernels`.
    """
    if use_kernels and x.ndim == 2:
        return triton_rms_norm(x, None, weight, eps, quantizes)[0]
    assert not quantizes, "without the kernel, a layer quantizes its inputs itself"
    return plain_rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor | ScaledProduct,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    use_kernels: bool = False,
    quantizes: bool = False,
) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
    """(norm(x + residual), x + residual); neither input is changed.

    Args:
        x: [num_rows, size], or float32 [num_parts, num_rows, size], which is summed with the residual before it is
            rounded; or, only with `use_kernels`, a product whose scales the kernel applies.
        residual: [num_rows, size].
        use_kernels, quantizes: as for `rms_norm`.
    """
    if use_kernels:
        return triton_rms_norm(x, residual, weight, eps, quantizes)
    assert not quantizes and isinstance(x, torch.Tensor), "only the kernel knows FP8"
    return plain_add_rms_norm(x, residual, weight, eps)
