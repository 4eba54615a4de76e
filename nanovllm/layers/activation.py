"""The gate of SwiGLU (Shazeer, 2020)."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """silu(gate) × up, the two halves of one merged projection."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [num_tokens, 2 × size] -> [num_tokens, size]"""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
