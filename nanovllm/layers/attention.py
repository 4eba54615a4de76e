"""Attention over the paged cache: stores the new keys and values, then attends, through a backend."""

import torch
from torch import nn

from nanovllm.kernels import AttentionBackend
from nanovllm.utils.context import Context


class Attention(nn.Module):
    """One layer's attention. The cache belongs to the ModelRunner and comes in with each call."""

    def __init__(self, layer_index: int, backend: AttentionBackend):
        super().__init__()
        self.layer_index = layer_index
        self.backend = backend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Causal attention of new tokens over everything before them.

        Args:
            q: [num_tokens, num_heads, head_dim].
            k, v: [num_tokens, num_kv_heads, head_dim].
            kv_cache: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim].
            context: the step's.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        k_cache, v_cache = kv_cache[0, self.layer_index], kv_cache[1, self.layer_index]
        self.backend.store_kvcache(k, v, k_cache, v_cache, context.slot_mapping)
        return self.backend.attend(q, k, v, k_cache, v_cache, context)
