"""Attention over the paged cache: norms and rotates queries and keys, stores keys and values, and attends."""

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.layers.forms import Form, PendingProduct
from nanovllm.layers.norm import QKNorm
from nanovllm.layers.rotary_embedding import Rotary
from nanovllm.ops.fused_product import stored_product
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.quantize import ScaledProduct


class Attention(nn.Module):
    """One layer's attention. The StepProgram owns the cache and passes it to each call.

    accepts: the forms of projections that the layer takes.

    Args:
        layer_index: this layer's index in the cache.
        group: the group of layers whose block tables it reads.
        window: number of keys that a query sees, its own included; 0 is all.
        use_kernels: norm, rotate and store with one kernel of our own.
        may_fuse: do it even in the kernel of the product, if the cache is not in FP8; see `stored_product`.
    """

    def __init__(
        self, layer_index: int, backend: AttentionBackend, window: int = 0, use_kernels: bool = False, group: int = 0,
        may_fuse: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.layer_index, self.backend, self.window, self.use_kernels = layer_index, backend, window, use_kernels
        self.group = group
        # The kernel applies the scales, except to v: a backend that reads new values needs a plain tensor.
        self.accepts = Form.SCALED if use_kernels and not backend.reads_new_keys else Form.PLAIN
        if self.accepts and may_fuse and not backend.has_fp8_cache:
            self.accepts |= Form.UNFINISHED

    def forward(
        self,
        qkv: torch.Tensor | ScaledProduct | PendingProduct,
        qk_norm: QKNorm | None,
        rotary: Rotary,
        kv_cache: list[LayerCache],
        groups: list[AttentionMetadata],
    ) -> torch.Tensor:
        """Causal attention of new tokens over everything before them.

        Args:
            qkv: [num_tokens, (num_heads + 2 × num_kv_heads) × head_dim], in one of the forms of `accepts`.
            rotary: the rotations of the tokens, from RotaryEmbedding.lookup.
            kv_cache: the caches of all layers.
            groups: the metadata of each group of layers.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        cache, metadata = kv_cache[self.layer_index], groups[self.group]
        slots = metadata.slot_mapping
        num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
        weight, eps = (None, 0.0) if qk_norm is None else (qk_norm.weight, qk_norm.eps)
        if isinstance(qkv, PendingProduct):
            q = stored_product(*qkv, weight, eps, rotary.cos, rotary.sin, cache, slots)
            k = v = q[:, :0]  # not read
        else:
            values = qkv.product if isinstance(qkv, ScaledProduct) else qkv
            qk, v = values.unflatten(1, (-1, head_dim)).tensor_split((-num_kv_heads,), 1)
            if self.use_kernels:
                # If bits must not depend on the step, the kernel that norms a row must not either.
                has_prompts = metadata.query_tiles is not None or self.backend.is_deterministic
                qk = qk_norm_rotate_store(qkv, weight, eps, *rotary[:3], cache, slots, has_prompts)
            else:
                qk = rotary.rotate(qk if qk_norm is None else qk_norm(qk))
            q, k = qk.tensor_split((-num_kv_heads,), 1)
        if rotary.query_scales is not None:
            q.mul_(rotary.query_scales)
        if not self.use_kernels:
            self.backend.store_kvcache(k, v, cache, metadata)
        return self.backend.attend(q, k, v, cache, metadata, self.window)
