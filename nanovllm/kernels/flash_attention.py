"""Attention through FlashAttention 2 (Dao, 2023), the optional flash-attn package, on GPUs.

Prefill reads the new keys where nothing is cached, else the paged cache; decode reads the paged cache. The plain
twin is TorchAttention.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels import AttentionShape, has_triton
from nanovllm.kernels.torch_attention import store_kvcache as plain_store_kvcache
from nanovllm.utils.context import Context


@dataclass
class PrefillPlan:
    """Cumulative lengths of the sequences after the decodes, from 0: int32 [num_prefills + 1]."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


class FlashAttention:
    name = "flash"
    default_block_size = 256
    can_capture_prompts = False

    def __init__(self, shape: AttentionShape):
        import flash_attn

        self._flash = flash_attn
        self.can_be_captured = has_triton()  # the plain sampler asks the device for a count, which a capture may not
        self.store_kvcache = plain_store_kvcache
        if has_triton():
            from nanovllm.kernels.triton_attention import store_kvcache

            self.store_kvcache = store_kvcache

    def group_prefixes(self, block_tables, context_lens, block_size, num_rows) -> bool:
        return False

    def plan(self, context: Context) -> PrefillPlan | None:
        first = context.num_decodes
        if first == len(context.context_lens):
            return None
        return PrefillPlan(*(cu[first:] - cu[first] for cu in (context.cu_seqlens_q, context.cu_seqlens_k)))

    def attend(self, q, k, v, k_cache, v_cache, context: Context) -> torch.Tensor:
        num_decodes, num_seqs = context.num_decodes, len(context.context_lens)
        if num_decodes == num_seqs:
            return self._attend_decodes(q, k_cache, v_cache, context)
        if num_decodes == 0:
            return self._attend_prefills(q, k, v, k_cache, v_cache, context)
        decodes, prefills = slice(num_decodes), slice(num_decodes, None)
        return torch.cat((
            self._attend_decodes(q[decodes], k_cache, v_cache, context),
            self._attend_prefills(q[prefills], k[prefills], v[prefills], k_cache, v_cache, context),
        ))  # fmt: skip

    def _attend_decodes(self, q, k_cache, v_cache, context: Context) -> torch.Tensor:
        decodes = slice(context.num_decodes)
        out = self._flash.flash_attn_with_kvcache(
            q.unsqueeze(1), k_cache, v_cache, cache_seqlens=context.context_lens[decodes],
            block_table=context.block_tables[decodes], causal=True,
        )  # fmt: skip
        return out.squeeze(1)

    def _attend_prefills(self, q, k, v, k_cache, v_cache, context: Context) -> torch.Tensor:
        plan: PrefillPlan = context.plan
        block_tables = None
        if context.has_cached_keys:
            k, v, block_tables = k_cache, v_cache, context.block_tables[context.num_decodes :]
        return self._flash.flash_attn_varlen_func(
            q, k, v, plan.cu_seqlens_q, plan.cu_seqlens_k, context.max_seqlen_q, context.max_seqlen_k,
            causal=True, block_table=block_tables,
        )  # fmt: skip
