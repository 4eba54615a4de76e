"""The gate of a gated MLP (Shazeer, 2020): SwiGLU, or GeGLU with the tanh form of GELU."""

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.quantize import Quantized, ScaledProduct, divided_by_peak, empty_quantized

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda gate: F.gelu(gate, approximate="tanh")}


def plain_act_and_mul(gate_up: torch.Tensor | ScaledProduct, activation: str) -> torch.Tensor:
    assert isinstance(gate_up, torch.Tensor), "only the kernel knows FP8"
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


@jit
def divisor(gate, ACTIVATION: tl.constexpr):
    """gate: float32 -> its activation is the gate divided by this."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_pytorch_tanh", "an activation of ACTIVATIONS")
    if ACTIVATION == "gelu_pytorch_tanh":
        # (1 + tanh(x)) / 2 is sigmoid(2 x), and 2 sqrt(2 / π) is 1.5957…
        return 1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return 1.0 + tl.exp(-gate)


@jit
def activated(gate, ACTIVATION: tl.constexpr):
    """gate: float32 -> its activation."""
    return gate / divisor(gate, ACTIVATION)


@jit
def _act_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, is_real, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, is_real, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, activated(gate, ACTIVATION) * up, is_real)


@jit
def _scaled_act_and_mul_kernel(
    gate_up, row_scales, column_scales, out, scales, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One program per row. It computes the row twice, for the peak and to store it, because it cannot hold a long row.
    The second time it reads from the caches."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    of_row = tl.load(row_scales + row)
    peaks = tl.zeros([COLUMNS], tl.float32)
    for first in tl.static_range(0, SIZE, COLUMNS):
        peaks = tl.maximum(peaks, tl.abs(_gated(gate_up, column_scales, row, of_row, first, SIZE, COLUMNS, ACTIVATION)))
    peak = tl.max(peaks, 0)
    for first in tl.static_range(0, SIZE, COLUMNS):
        values = _gated(gate_up, column_scales, row, of_row, first, SIZE, COLUMNS, ACTIVATION)
        quantized, scale = divided_by_peak(values, peak)
        column = first + tl.arange(0, COLUMNS)
        tl.store(out + row * SIZE + column, quantized, column < SIZE)
        tl.store(scales + row, scale)


@jit
def _gated(
    gate_up, column_scales, row, of_row, first, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """The results for the columns from `first` to first + COLUMNS of a row, in float32."""
    column = first + tl.arange(0, COLUMNS)
    is_real = column < SIZE
    at = gate_up + row * 2 * SIZE + column
    gate = tl.load(at, is_real, 0.0).to(tl.float32) * of_row * tl.load(column_scales + column, is_real, 0.0)
    up = tl.load(at + SIZE, is_real, 0.0).to(tl.float32) * of_row * tl.load(column_scales + SIZE + column, is_real, 0.0)
    return activated(gate, ACTIVATION) * up


def triton_act_and_mul(gate_up: torch.Tensor | ScaledProduct, activation: str) -> torch.Tensor | Quantized:
    given = gate_up.product if isinstance(gate_up, ScaledProduct) else gate_up
    num_tokens, size = given.shape[0], given.shape[1] // 2
    if isinstance(gate_up, ScaledProduct):
        quantized = empty_quantized(num_tokens, size, given.device)
        columns = min(4096, triton.next_power_of_2(size))
        _scaled_act_and_mul_kernel[(num_tokens,)](
            *gate_up, *quantized, SIZE=size, COLUMNS=columns, ACTIVATION=activation, num_warps=max(4, columns // 512),
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        return quantized
    out = torch.empty((num_tokens, size), dtype=given.dtype, device=given.device)
    block = min(1024, triton.next_power_of_2(size))
    _act_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        given, out, SIZE=size, BLOCK=block, ACTIVATION=activation, **LAUNCH_OPTIONS
    )
    return out


def act_and_mul(
    gate_up: torch.Tensor | ScaledProduct, activation: str = "silu", use_kernels: bool = False
) -> torch.Tensor | Quantized:
    """activation(gate) × up.

    Args:
        gate_up: [num_tokens, 2 × size]; a ScaledProduct only for the kernel.
        activation: one of ACTIVATIONS.
        use_kernels: compute with the kernel.

    Returns:
        [num_tokens, size]; for a ScaledProduct, rows in FP8.
    """
    return (triton_act_and_mul if use_kernels else plain_act_and_mul)(gate_up, activation)
