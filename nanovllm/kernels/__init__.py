"""Attention backends, each behind three functions: plan, store_kvcache, attend.

`torch` is the plain reference; `sdpa` is what runs fast without kernels of our own.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nanovllm.utils.context import Context


@dataclass(frozen=True)
class AttentionShape:
    """What all attention layers of a model have in common; heads are those of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class AttentionBackend(Protocol):
    """Causal attention of ragged queries over paged keys. A backend belongs to one KV cache and
    plans steps in the order in which they run."""

    name: str
    default_block_size: int

    def plan(self, context: Context) -> Any:
        """What `attend` wants to know beforehand, once a step for all layers; goes into `context.plan`."""

    def store_kvcache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes k, v: [num_tokens, num_kv_heads, head_dim] into caches [num_blocks, block_size, num_kv_heads,
        head_dim] at `slot_mapping`: int64 [num_tokens]; a slot of −1 is skipped."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
    ) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim] -> the same; the new k, v are in the cache already.

        A sequence's queries are its last ones: query i of n sees keys 0 … context_len − n + i. Scores are
        scaled by 1 / sqrt(head_dim). Nothing beyond a sequence's own keys is read: other slots may hold NaN.
        """


def make_attention_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend that `attention_backend` asks for; "auto" is the fastest that can run here."""
    if name == "torch":
        from nanovllm.kernels.torch_attention import TorchAttention

        return TorchAttention(shape)
    from nanovllm.kernels.sdpa_attention import SDPAAttention

    return SDPAAttention(shape)
