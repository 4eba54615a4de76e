"""RMSNorm (Zhang and Sennrich, 2019), alone and with the residual added before it."""

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, fused: bool = False) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) × weight`, computed in float32; x itself is not changed.

    The kernel rounds once. Plain PyTorch, like transformers, also rounds before it applies a weight of x's dtype.

    Args:
        x: [..., size]; the kernel takes [num_rows, size].
        weight: [size], of x's dtype or float32.
        fused: compute with the kernel.
    """
    if fused and x.ndim == 2:
        return _fused_rms_norm(x, weight, eps)
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual); neither input is changed.

    Args:
        x: [num_rows, size], or float32 [num_parts, num_rows, size], which is summed with the residual before it is
            rounded.
        residual: [num_rows, size].
    """
    if fused:
        return _fused_add_rms_norm(x, residual, weight, eps)
    total = x + residual if x.ndim == 2 else (x.sum(0) + residual).to(residual.dtype)
    return rms_norm(total, weight, eps), total


@jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, out, total, eps, num_rows, SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, PADDED)
    is_real = column < SIZE
    weights = tl.load(weight + column, is_real, 0.0).to(tl.float32)  # no earlier kernel writes it
    begin()
    values = tl.load(x + row + column, is_real, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(x + part * num_rows * SIZE + row + column, is_real, 0.0)
    if ADDS:
        values += tl.load(residual + row + column, is_real, 0.0).to(tl.float32)
        # What is normed is the sum as it is kept.
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row + column, rounded, is_real)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + row + column, values * scale * weights, is_real)


def _fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    _rms_norm_kernel[(num_tokens,)](
        x, x, weight, out, out, eps, num_tokens, SIZE=size, PADDED=triton.next_power_of_2(size), PARTS=1, ADDS=False,
        num_warps=_num_warps(size), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    num_tokens, size = residual.shape
    _rms_norm_kernel[(num_tokens,)](
        x, residual, weight, out, total, eps, num_tokens, SIZE=size, PADDED=triton.next_power_of_2(size),
        PARTS=len(x) if x.ndim == 3 else 1, ADDS=True, num_warps=_num_warps(size), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out, total


def _num_warps(size: int) -> int:
    return 4 if size <= 2048 else 8
