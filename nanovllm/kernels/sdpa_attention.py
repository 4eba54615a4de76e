"""Attention through PyTorch's fused `scaled_dot_product_attention`, for devices without a kernel of our own.

Prefill goes sequence by sequence, on the new keys alone where nothing is cached. Decodes are batched: their
keys are gathered through the block tables into buckets of similar length, so that one call serves many
sequences and little is padded. The plain twin is TorchAttention.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels.torch_attention import store_kvcache
from nanovllm.utils.context import Context

# A bucket is closed when the next sequence is shorter than this part of the bucket's longest: padding costs
# memory traffic, another bucket costs five small operations a layer.
_SHORTEST_IN_BUCKET = 0.7
_SMALLEST_BUCKET = 8
# Queries of a chunk over cached keys that share one mask; bounds the mask's memory.
_QUERIES_PER_MASK = 512


@dataclass
class DecodeBucket:
    """Decodes of similar context length.

    rows: int64 [size], their queries in the flat batch; slots: int64 [size × longest], where their keys are;
    is_key: bool [size, 1, 1, longest], False where a shorter sequence is padded.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    is_key: torch.Tensor


@dataclass
class Prefill:
    """One sequence's chunk: its queries' place in the batch, and the slots of all its keys if any are cached."""

    start: int
    end: int
    slots: torch.Tensor | None


@dataclass
class SDPAPlan:
    prefills: list[Prefill]
    decodes: list[DecodeBucket]


class SDPAAttention:
    name = "sdpa"
    default_block_size = 64

    def plan(self, context: Context) -> SDPAPlan:
        starts = context.cu_seqlens_q.tolist()
        lengths = context.context_lens.tolist()
        prefills, decode_rows = [], []
        for row, length in enumerate(lengths):
            start, end = starts[row], starts[row + 1]
            if end - start == 1:
                decode_rows.append(row)
            else:
                is_cached = length > end - start
                slots = _slots(context, torch.tensor([row]), [length], length) if is_cached else None
                prefills.append(Prefill(start, end, slots))
        decode_rows.sort(key=lambda row: -lengths[row])
        decodes = []
        while decode_rows:
            longest = lengths[decode_rows[0]]
            size = 1
            while size < len(decode_rows) and (
                size < _SMALLEST_BUCKET or lengths[decode_rows[size]] >= _SHORTEST_IN_BUCKET * longest
            ):
                size += 1
            bucket, decode_rows = decode_rows[:size], decode_rows[size:]
            decodes.append(_decode_bucket(context, bucket, [lengths[row] for row in bucket], longest))
        return SDPAPlan(prefills, decodes)

    def store_kvcache(self, k, v, k_cache, v_cache, slot_mapping) -> None:
        if slot_mapping.device.type != "cpu" or bool((slot_mapping < 0).any()):
            store_kvcache(k, v, k_cache, v_cache, slot_mapping)
        else:
            k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
            v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)

    def attend(self, q, k, v, k_cache, v_cache, context: Context) -> torch.Tensor:
        out = torch.empty_like(q)
        for prefill in context.plan.prefills:
            _attend_prefill(out, prefill, q, k, v, k_cache, v_cache)
        for bucket in context.plan.decodes:
            keys, values = (_gather(cache, bucket.slots, len(bucket.rows)) for cache in (k_cache, v_cache))
            queries = q.index_select(0, bucket.rows).unsqueeze(2)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bucket.is_key, enable_gqa=True)
            out.index_copy_(0, bucket.rows, attended.squeeze(2))
        return out


def _attend_prefill(out, prefill: Prefill, q, k, v, k_cache, v_cache) -> None:
    """Writes one sequence's rows of `out`: [num_tokens, num_heads, head_dim]."""
    start, end = prefill.start, prefill.end
    queries = q[start:end].transpose(0, 1).unsqueeze(0)  # [1, num_heads, num_queries, head_dim]
    if prefill.slots is None:
        keys, values = (new[start:end].transpose(0, 1).unsqueeze(0) for new in (k, v))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        out[start:end] = attended[0].transpose(0, 1)
        return
    keys, values = (_gather(cache, prefill.slots, 1) for cache in (k_cache, v_cache))
    num_queries = end - start
    num_before = len(prefill.slots) - num_queries
    for first in range(0, num_queries, _QUERIES_PER_MASK):
        last = min(first + _QUERIES_PER_MASK, num_queries)
        num_keys = num_before + last
        is_seen = torch.ones(last - first, num_keys, dtype=torch.bool, device=q.device).tril(num_before + first)
        attended = F.scaled_dot_product_attention(
            queries[:, :, first:last],
            keys[:, :, :num_keys],
            values[:, :, :num_keys],
            attn_mask=is_seen,
            enable_gqa=True,
        )
        out[start + first : start + last] = attended[0].transpose(0, 1)


def _gather(cache: torch.Tensor, slots: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """cache: [num_blocks, block_size, num_kv_heads, head_dim] -> [num_seqs, num_kv_heads, length, head_dim]"""
    num_kv_heads, head_dim = cache.shape[2:]
    rows = cache.view(-1, num_kv_heads * head_dim).index_select(0, slots)
    return rows.view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)


def _decode_bucket(context: Context, rows: list[int], lengths: list[int], longest: int) -> DecodeBucket:
    device = context.block_tables.device
    index = torch.tensor(rows)
    is_key = torch.arange(longest) < torch.tensor(lengths)[:, None]
    # A decode's query stands where its sequence begins in the flat batch.
    query_rows = context.cu_seqlens_q[index.to(device)].long()
    return DecodeBucket(query_rows, _slots(context, index, lengths, longest), is_key[:, None, None].to(device))


def _slots(context: Context, rows: torch.Tensor, lengths: list[int], longest: int) -> torch.Tensor:
    """Slots of the rows' keys: int64 [len(rows) × longest].

    Padding repeats the sequence's own first key: a slot of somebody else's might hold a NaN, which a mask
    does not stop.
    """
    device = context.block_tables.device
    position = torch.arange(longest, device=device)
    position = position.where(position < torch.tensor(lengths, device=device)[:, None], 0)
    blocks = context.block_tables[rows.to(device)].long().gather(1, position // context.block_size)
    return (blocks * context.block_size + position % context.block_size).flatten()
