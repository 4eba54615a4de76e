"""Attention over the paged cache: norms and rotates queries and keys, stores keys and values, and attends."""

import torch
from torch import nn

from nanovllm.kernels import AttentionBackend, is_fused
from nanovllm.layers.layernorm import QKNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context


class Attention(nn.Module):
    """One layer's attention. The cache belongs to the ModelRunner and comes in with each call."""

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
        context: Context,
    ) -> torch.Tensor:
        """Causal attention of new tokens over everything before them.

        Args:
            qkv: [num_tokens, num_heads + 2 × num_kv_heads, head_dim], as projected.
            qk_norm: the layer's.
            rotary: what RotaryEmbedding.lookup gives for the tokens' positions.
            kv_cache: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim].
            context: the step's.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        k_cache, v_cache = kv_cache[0, self.layer_index], kv_cache[1, self.layer_index]
        num_kv_heads = k_cache.shape[2]
        qk, v = qkv.split((qkv.shape[1] - num_kv_heads, num_kv_heads), 1)
        if is_fused(qkv):
            from nanovllm.kernels.fused import qk_norm_rotate_store

            qk = qk_norm_rotate_store(qkv, qk_norm.weight, qk_norm.eps, *rotary, k_cache, v_cache, context.slot_mapping)
        else:
            qk = RotaryEmbedding.rotate(qk_norm(qk), *rotary)
        q, k = qk.split((qk.shape[1] - num_kv_heads, num_kv_heads), 1)
        if not is_fused(qkv):
            self.backend.store_kvcache(k, v, k_cache, v_cache, context.slot_mapping)
        return self.backend.attend(q, k, v, k_cache, v_cache, context)
