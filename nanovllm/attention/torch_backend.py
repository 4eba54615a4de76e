"""The reference: attention as the formula says, one sequence after the other, on any device and dtype."""

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.ops.layer_cache import LayerCache


class TorchAttention(AttentionBackend):
    """softmax(scale × q kᵀ) v in float32 (float64 stays float64)."""

    name = "torch"

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        out = torch.empty_like(q)
        group_size = q.shape[1] // cache.num_kv_heads
        precision = torch.promote_types(q.dtype, torch.float32)
        starts = metadata.cu_seqlens_q.tolist()
        for row, length in enumerate(metadata.context_lens.tolist()):
            queries = q[starts[row] : starts[row + 1]].to(precision)
            first = max(0, length - len(queries) + 1 - window) if window else 0  # the first key that a query sees
            first_block = first // cache.block_size
            table = metadata.block_tables[row, first_block : -(-length // cache.block_size)].long()
            seen = slice(first - first_block * cache.block_size, length - first_block * cache.block_size)
            keys, values = (heads[seen].repeat_interleave(group_size, 1).to(precision) for heads in cache.read(table))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self._shape.score_scale
            position = torch.arange(length - len(queries), length, device=q.device)
            distance = position[:, None] - torch.arange(first, length, device=q.device)
            is_unseen = (distance < 0) | (distance >= (window or length))
            weights = scores.masked_fill(is_unseen, float("-inf")).softmax(-1)
            out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out
