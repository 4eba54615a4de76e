"""RMSNorm (Zhang and Sennrich, 2019), alone and fused with the residual add before it."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import Shards, empty_parameter, replicated_shards


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) × weight`, computed in float32 and rounded before the weight is applied."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def shards(self, name: str) -> Shards:
        return replicated_shards(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] -> the same; x itself is not changed."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), the residual form of pre-norm layers; neither input is changed."""
        residual = x + residual
        return self(residual), residual
