"""RMSNorm layers: for hidden states, after the residual is added, and for queries and keys."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.context import LayerContext
from nanovllm.layers.forms import Form, PartialSum, PendingProduct
from nanovllm.layers.shard import Rows, Shard, Shards, replicated_shards, shards_of_rows
from nanovllm.ops.norm import add_rms_norm, rms_norm, sums_of_squares
from nanovllm.ops.quantize import Quantized, ScaledProduct


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) × weight`, computed in float32; see ops/norm.py.

    Args:
        size: size of a row.
        offset: the loader adds it to the checkpoint's weights (1 for Gemma); such weights are kept in float32.
        gives: the forms that the reader of the results of `forward` and `reduce_add` accepts.
    """

    def __init__(self, size: int, eps: float, context: LayerContext, offset: float = 0.0, gives: Form = Form.PLAIN):
        super().__init__()
        self.weight = context.parameter(size, dtype=torch.float32 if offset else None)
        self.eps, self.offset = eps, offset
        self.use_kernels, self.parallel = context.use_kernels, context.parallel
        self._quantizes = context.use_kernels and Form.QUANTIZED in gives

    @staticmethod
    def accepted_sums(context: LayerContext) -> Form:
        """The forms of sums that `reduce_add` takes; `reduce` takes only plain ones."""
        parallel = context.parallel
        if not context.use_kernels:
            return Form.PLAIN
        if parallel.size == 1:
            return Form.SCALED | Form.UNFINISHED
        # Without an exchange, NCCL sums the products, so their scales must be applied before.
        return Form.PLAIN if parallel.exchange is None else Form.SCALED

    def shards(self, name: str) -> Shards:
        return replicated_shards(self.weight, self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor | Quantized:
        """x: [..., size] -> the same; x itself is not changed."""
        return rms_norm(x, self.weight, self.eps, self.use_kernels, self._quantizes)

    def reduce_add(
        self, x: PartialSum | PendingProduct | torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
        """(norm(x + residual), x + residual), with the ranks' parts of x summed: the residual form of pre-norm layers.

        Args:
            x: a PartialSum, or a tensor [num_tokens, size] that is whole on every rank; `residual` must then be whole
                too.
            residual: [num_tokens, size], which may be overwritten; None in the first call of a step.

        Returns:
            The second result is a residual for the next call and nothing else: after a PartialSum it may lack the rows
            of other ranks.
        """
        if isinstance(x, PendingProduct):
            assert residual is not None, "a step begins with an embedding"
            total = residual.addmm_(x.x, x.weight.mT)
            return self(total), total
        if not isinstance(x, PartialSum):
            return self._add(x, residual)
        if self.parallel.exchange is not None:
            begins = residual is None
            return self.parallel.exchange.sum_add_norm(x.part, residual, self.weight, self.eps, begins, self._quantizes)
        if isinstance(x.part, ScaledProduct):
            assert residual is not None and self.parallel.size == 1, "NCCL needs products with their scales applied"
            return add_rms_norm(x.part, residual, self.weight, self.eps, self.use_kernels, self._quantizes)
        return self._add(self.parallel.all_reduce(x.part), residual)

    def reduce(self, x: PartialSum) -> torch.Tensor:
        """x: [num_tokens, size] -> norm(x) with the ranks' parts summed, which is whole on every rank."""
        assert isinstance(x.part, torch.Tensor) and x.part.ndim == 2, "only reduce_add takes an unfinished product"
        assert not self._quantizes, "a norm after a block is added to the residual"
        if self.parallel.exchange is not None:
            return self.parallel.exchange.sum_add_norm(x.part, None, self.weight, self.eps, False)[0]
        return self(self.parallel.all_reduce(x.part))

    def _add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.use_kernels, self._quantizes)


class ResidualAdd(nn.Module):
    """Takes the place of the norm before a block if the model has no such norm."""

    def reduce_add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + residual, x + residual), as RMSNorm.reduce_add without the norm; x must be whole on every rank."""
        total = x if residual is None else x + residual
        return total, total


class QKNorm(nn.Module):
    """RMSNorm of every query and key head, with one weight for the queries and one for the keys.

    weight: [num_heads + num_kv_heads, head_dim], the same row for all query heads and for all key heads.
    offset: see RMSNorm.

    If Attention norms, rotates and stores with one kernel, that kernel reads `weight`, and `forward` is not called.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        context: LayerContext,
        offset: float = 0.0,
    ):
        super().__init__()
        self.num_heads, self.eps, self.offset = num_heads, eps, offset
        self.weight = context.parameter(num_heads + num_kv_heads, head_dim, dtype=torch.float32 if offset else None)

    def shards(self, name: str) -> Shards:
        head_dim = self.weight.shape[1]
        heads = {"q_norm": self.weight[: self.num_heads], "k_norm": self.weight[self.num_heads :]}
        return {key: [Shard((head_dim,), ((0, head_dim),), target, self.offset)] for key, target in heads.items()}

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """qk: [num_tokens, num_heads + num_kv_heads, head_dim] -> the same; qk itself is not changed."""
        normed = F.rms_norm(qk.float(), (qk.shape[-1],), None, self.eps)
        return normed.to(self.weight.dtype).mul_(self.weight).to(qk.dtype)


class ProjectionNorm(nn.Module):
    """RMSNorm of a token's queries in all heads of all ranks together, and of its keys in all heads, as in OLMo 2.

    weight: [query columns + key columns] of this rank.

    Args:
        rows: this rank's rows of q_proj and of k_proj.
    """

    def __init__(self, rows: Sequence[Rows], eps: float, context: LayerContext):
        super().__init__()
        self.eps, self.parallel, self._use_kernels = eps, context.parallel, context.use_kernels
        self._rows = [each._replace(key=key) for key, each in zip(("q_norm", "k_norm"), rows, strict=True)]
        self._lengths = [each.length for each in rows]
        self.weight = context.parameter(sum(self._lengths))

    def shards(self, name: str) -> Shards:
        return shards_of_rows(self.weight, self._rows)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: [num_tokens, query, key and value columns of this rank] -> the same tensor, normed in place"""
        parts = qkv[:, : len(self.weight)].split(self._lengths, 1)
        sums = [sums_of_squares(part, self._use_kernels) for part in parts]
        means = torch.stack([each / length for each, length in zip(sums, self._lengths, strict=True)], 1)
        # The mean of the ranks' means counts every head alike: each rank has the same number of heads, and each key
        # head is on the same number of ranks.
        scales = torch.rsqrt(self.parallel.all_reduce(means) / self.parallel.size + self.eps)
        for part, scale, weight in zip(parts, scales.split(1, 1), self.weight.split(self._lengths), strict=True):
            part.mul_(scale * weight)
        return qkv
