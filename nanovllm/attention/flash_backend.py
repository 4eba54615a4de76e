"""Attention through FlashAttention 2 (Dao, 2023), the optional flash-attn package, on GPUs.

Prefill and decode read the paged cache, which holds the new keys by then. The plain twin is TorchAttention.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.ops.kernel import has_triton
from nanovllm.ops.layer_cache import LayerCache


@dataclass
class PrefillPlan:
    """Of the rows after the decodes.

    cu_seqlens_q, cu_seqlens_k: int32 [num_prefills + 1], where each one's queries and keys begin, from 0.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


class FlashAttention:
    name = "flash"
    default_block_size = 256
    can_be_captured = True
    can_capture_prompts = False
    reads_new_keys = False
    max_num_shared_splits = 0

    def __init__(self, shape: AttentionShape):
        import flash_attn

        self._flash = flash_attn
        self._scale = shape.score_scale

    def keep_buffers(self, is_kept: bool) -> None:
        return None

    def shared_prefixes(self, block_tables, context_lens, block_size) -> None:
        return None

    def split_lengths(self, context_lens):
        return context_lens

    def variant_key(self, max_num_decodes: int, has_prompts: bool) -> None:
        return None

    def plan(self, metadata: AttentionMetadata) -> PrefillPlan | None:
        if metadata.query_tiles is None:
            return None
        first = metadata.max_num_decodes
        starts = metadata.cu_seqlens_q[first:] - metadata.cu_seqlens_q[first]
        keys = F.pad(metadata.context_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
        return PrefillPlan(starts, keys)

    def store_kvcache(self, k, v, cache: LayerCache, slot_mapping) -> None:
        if has_triton():
            from nanovllm.attention.triton_backend import store_kvcache

            store_kvcache(k, v, cache, slot_mapping)
        else:
            cache.write(k, v, slot_mapping)

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        num_decodes = metadata.max_num_decodes
        # How many keys before its own a query sees, and how many after it; −1 is all of them.
        options = {"causal": True, "softmax_scale": self._scale, "window_size": (window - 1, 0 if window else -1)}
        if metadata.query_tiles is None:
            return self._attend_decodes(q, cache, metadata, options)
        if num_decodes == 0:
            return self._attend_prefills(q, cache, metadata, options)
        decodes = self._attend_decodes(q[:num_decodes], cache, metadata, options)
        return torch.cat((decodes, self._attend_prefills(q[num_decodes:], cache, metadata, options)))

    def _attend_decodes(self, q, cache: LayerCache, metadata: AttentionMetadata, options) -> torch.Tensor:
        decodes = slice(metadata.max_num_decodes)
        out = self._flash.flash_attn_with_kvcache(
            q.unsqueeze(1), cache.keys, cache.values, cache_seqlens=metadata.context_lens[decodes],
            block_table=metadata.block_tables[decodes], **options,
        )  # fmt: skip
        return out.squeeze(1)

    def _attend_prefills(self, q, cache: LayerCache, metadata: AttentionMetadata, options) -> torch.Tensor:
        plan: PrefillPlan = metadata.plan
        return self._flash.flash_attn_varlen_func(
            q, cache.keys, cache.values, plan.cu_seqlens_q, plan.cu_seqlens_k, metadata.max_seqlen_q,
            metadata.max_seqlen_k, block_table=metadata.block_tables[metadata.max_num_decodes :], **options,
        )  # fmt: skip


def find_fault(shape: AttentionShape) -> str | None:
    """Why the installed flash-attn cannot compute such layers, or None. Tries two small decodes for each window.

    Builds differ: some lack windows or large heads, and one was seen whose decodes with heads of 80 and 96 are wrong
    where their keys are split.
    """
    # Several rows and heads: where results of splits lie too close together, a single one is right all the same.
    shape = replace(shape, num_heads=6, num_kv_heads=2)
    lengths = 700, 300
    integers: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(3, **integers), context_lens=torch.tensor(lengths, **integers),
        num_decodes=torch.tensor([2], **integers), max_num_decodes=2, max_seqlen_q=1, max_seqlen_k=max(lengths),
        slot_mapping=torch.zeros(2, dtype=torch.int64, device=shape.device),
        block_tables=torch.arange(6, **integers).view(2, 3), block_size=256,
    )  # fmt: skip
    generator = torch.Generator(shape.device).manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=shape.device).to(shape.dtype)

    q, k, v = randn(2, 6, shape.head_dim), randn(6, 256, 2, shape.head_dim), randn(6, 256, 2, shape.head_dim)
    for window in dict.fromkeys(min(window, 200) for window in shape.windows):
        expected = TorchAttention(shape).attend(q, k, v, LayerCache(k, v), metadata, window)
        try:
            out = FlashAttention(shape).attend(q, k, v, LayerCache(k, v), metadata, window)
        except (RuntimeError, TypeError) as error:  # TypeError: a version with other arguments
            return str(error)
        error_norm, norm = (float(x.float().norm()) for x in (out - expected, expected))
        if not error_norm <= 0.02 * norm:  # NaN is a fault too
            return "its results are wrong"
    return None
