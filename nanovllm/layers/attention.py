"""Attention over the paged cache: norms and rotates queries and keys, stores keys and values, and attends."""

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.layers.norm import QKNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store


class Attention(nn.Module):
    """One layer's attention. The cache belongs to the ModelRunner and comes in with each call.

    Args:
        layer_index: which layer of the cache is this one's.
        backend: attends.
    """

    def __init__(self, layer_index: int, backend: AttentionBackend):
        super().__init__()
        self.layer_index = layer_index
        self.backend = backend

    def forward(
        self,
        qkv: torch.Tensor,
        qk_norm: QKNorm,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Causal attention of new tokens over everything before them.

        Args:
            qkv: [num_tokens, num_heads + 2 × num_kv_heads, head_dim], as projected.
            qk_norm: the layer's.
            rotary: what RotaryEmbedding.lookup gives for the tokens' positions.
            kv_cache: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim].
            metadata: the step's.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        k_cache, v_cache = kv_cache[0, self.layer_index], kv_cache[1, self.layer_index]
        num_kv_heads, slots = k_cache.shape[2], metadata.slot_mapping
        qk, v = qkv.split((qkv.shape[1] - num_kv_heads, num_kv_heads), 1)
        if qk_norm.fused:
            qk = qk_norm_rotate_store(qkv, qk_norm.weight, qk_norm.eps, *rotary, k_cache, v_cache, slots)
        else:
            qk = RotaryEmbedding.rotate(qk_norm(qk), *rotary)
        q, k = qk.split((qk.shape[1] - num_kv_heads, num_kv_heads), 1)
        if not qk_norm.fused:
            self.backend.store_kvcache(k, v, k_cache, v_cache, slots)
        return self.backend.attend(q, k, v, k_cache, v_cache, metadata)
