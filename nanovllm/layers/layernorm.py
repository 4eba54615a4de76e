"""RMSNorm (Zhang and Sennrich, 2019), alone and fused with the residual add before it."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import is_fused
from nanovllm.layers.linear import Shards, empty_parameter, replicated_shards
from nanovllm.utils.distributed import Parallel
from nanovllm.utils.loader import Shard


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) × weight`, computed in float32.

    The fused kernel rounds once; plain PyTorch, like transformers, also before the weight is applied.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device, parallel: Parallel | None = None
    ):
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self.parallel = parallel or Parallel()

    def shards(self, name: str) -> Shards:
        return replicated_shards(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] -> the same; x itself is not changed."""
        if x.ndim == 2 and is_fused(x):
            from nanovllm.kernels.fused import rms_norm

            return rms_norm(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), the residual form of pre-norm layers; no residual is one of zeros.

        x is an output of a RowParallelLinear or the embedding, whose sum over the ranks is taken here; the residual is
        not changed. The second result is a residual for the next call and nothing else: it may lack other ranks' rows.
        """
        exchange = self.parallel.exchange
        if exchange is not None:
            return exchange.sum_add_norm(x, residual, self.weight, self.eps)
        x = self.parallel.all_reduce(x)
        if residual is None:
            return self(x), x
        if x.ndim == 2 and is_fused(x):
            from nanovllm.kernels.fused import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps)
        residual = x + residual
        return self(residual), residual


class QKNorm(nn.Module):
    """RMSNorm of every query and key head, with one weight for the queries and one for the keys.

    weight: [num_heads + num_kv_heads, head_dim], the same row for all query heads and for all key heads.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.num_heads = num_heads
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
        self.eps = eps

    def shards(self, name: str) -> Shards:
        head_dim = self.weight.shape[1]
        heads = {"q_norm": self.weight[: self.num_heads], "k_norm": self.weight[self.num_heads :]}
        return {key: Shard((head_dim,), ((0, head_dim),), target) for key, target in heads.items()}

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """qk: [num_tokens, num_heads + num_kv_heads, head_dim] -> the same; qk itself is not changed."""
        normed = F.rms_norm(qk.float(), (qk.shape[-1],), None, self.eps)
        return normed.to(qk.dtype).mul_(self.weight)
