"""The gate of SwiGLU (Shazeer, 2020)."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import is_fused


class SiluAndMul(nn.Module):
    """silu(gate) × up, the two halves of one merged projection."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [num_tokens, 2 × size] -> [num_tokens, size]"""
        if is_fused(gate_up):
            from nanovllm.kernels.fused import silu_and_mul

            return silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
