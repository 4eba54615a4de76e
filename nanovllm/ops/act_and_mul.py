"""The gate of a gated MLP (Shazeer, 2020): SwiGLU, or GeGLU with the tanh form of GELU."""

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda gate: F.gelu(gate, approximate="tanh")}


def act_and_mul(gate_up: torch.Tensor, activation: str = "silu", fused: bool = False) -> torch.Tensor:
    """gate_up: [num_tokens, 2 × size] -> activation(gate) × up: [num_tokens, size].

    activation: one of ACTIVATIONS; fused: compute with the kernel.
    """
    if fused:
        return _fused_act_and_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


@jit
def activated(gate, ACTIVATION: tl.constexpr):
    """gate: float32 -> its activation."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_pytorch_tanh", "an activation of ACTIVATIONS")
    if ACTIVATION == "gelu_pytorch_tanh":
        # (1 + tanh(x)) / 2 is sigmoid(2 x), and 2 sqrt(2 / π) is 1.5957…
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return gate / (1.0 + tl.exp(-gate))


@jit
def _act_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, is_real, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, is_real, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, activated(gate, ACTIVATION) * up, is_real)


def _fused_act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _act_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, ACTIVATION=activation, **LAUNCH_OPTIONS
    )
    return out
