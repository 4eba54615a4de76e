"""The gate of SwiGLU (Shazeer, 2020)."""

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton


def silu_and_mul(gate_up: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """gate_up: [num_tokens, 2 × size] -> silu(gate) × up: [num_tokens, size]; `fused` computes with the kernel."""
    if fused:
        return _fused_silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@jit
def _silu_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, is_real, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, is_real, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gate / (1.0 + tl.exp(-gate)) * up, is_real)


def _fused_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, **LAUNCH_OPTIONS)
    return out
