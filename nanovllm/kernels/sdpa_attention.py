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
# memory traffic, another bucket costs a few small operations a layer.
_SHORTEST_IN_BUCKET = 0.7
_SMALLEST_BUCKET = 8
# Queries of a chunk over cached keys that share one mask; bounds the mask's memory.
_QUERIES_PER_MASK = 512


@dataclass
class DecodeBucket:
    """Decodes of similar context length, neighbours in SDPAPlan.decode_rows.

    size, longest: decodes and the most keys of one; is_key: bool [size, 1, 1, longest], False where a shorter
    sequence is padded.
    """

    size: int
    longest: int
    is_key: torch.Tensor


@dataclass
class Prefill:
    """One sequence's chunk: its queries' place in the batch, and the slots of all its keys if any are cached."""

    start: int
    end: int
    slots: torch.Tensor | None


@dataclass
class SDPAPlan:
    """What is to be attended how.

    decode_rows: int64 [num_decodes], the decodes' queries in the flat batch, longest context first;
    decode_slots: int64 [Σ size × longest], where the buckets' keys are, one bucket after the other.
    """

    prefills: list[Prefill]
    decode_rows: torch.Tensor
    decode_slots: torch.Tensor | None
    decode_buckets: list[DecodeBucket]


class SDPAAttention:
    name = "sdpa"
    default_block_size = 64

    def __init__(self):
        # Where gathered keys and values go. Fresh memory for every layer of every step would cost more in
        # page faults than the copy itself.
        self._key_buffer = self._value_buffer = torch.empty(0)

    def plan(self, context: Context) -> SDPAPlan:
        starts = context.cu_seqlens_q.tolist()
        lengths = context.context_lens.tolist()
        prefills, decodes = [], []
        for row, length in enumerate(lengths):
            start, end = starts[row], starts[row + 1]
            if end - start == 1:
                decodes.append(row)
            else:
                is_cached = length > end - start
                prefills.append(Prefill(start, end, _slots(context, [row], [length]) if is_cached else None))
        decodes.sort(key=lambda row: -lengths[row])
        buckets, slots, first = [], [], 0
        while first < len(decodes):
            longest, last = lengths[decodes[first]], first + 1
            while last < len(decodes) and (
                last - first < _SMALLEST_BUCKET or lengths[decodes[last]] >= _SHORTEST_IN_BUCKET * longest
            ):
                last += 1
            rows = decodes[first:last]
            bucket_lengths = [lengths[row] for row in rows]
            is_key = torch.arange(longest) < torch.tensor(bucket_lengths)[:, None]
            is_key = is_key[:, None, None].to(context.block_tables.device)
            buckets.append(DecodeBucket(len(rows), longest, is_key))
            slots.append(_slots(context, rows, bucket_lengths))
            first = last
        decode_rows = torch.tensor([starts[row] for row in decodes], dtype=torch.int64)
        decode_rows = decode_rows.to(context.block_tables.device)
        return SDPAPlan(prefills, decode_rows, torch.cat(slots) if slots else None, buckets)

    def store_kvcache(self, k, v, k_cache, v_cache, slot_mapping) -> None:
        if slot_mapping.device.type != "cpu" or bool((slot_mapping < 0).any()):
            store_kvcache(k, v, k_cache, v_cache, slot_mapping)
        else:
            k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
            v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)

    def attend(self, q, k, v, k_cache, v_cache, context: Context) -> torch.Tensor:
        plan: SDPAPlan = context.plan
        out = torch.empty_like(q)
        for prefill in plan.prefills:
            self._attend_prefill(out, prefill, q, k, v, k_cache, v_cache)
        if plan.decode_buckets:
            queries = q.index_select(0, plan.decode_rows).unsqueeze(2)  # [num_decodes, num_heads, 1, head_dim]
            attended, first, first_slot = torch.empty_like(queries), 0, 0
            keys, values = self._gather(k_cache, v_cache, plan.decode_slots)
            for bucket in plan.decode_buckets:
                last, last_slot = first + bucket.size, first_slot + bucket.size * bucket.longest
                attended[first:last] = F.scaled_dot_product_attention(
                    queries[first:last],
                    _by_sequence(keys[first_slot:last_slot], bucket.size),
                    _by_sequence(values[first_slot:last_slot], bucket.size),
                    attn_mask=bucket.is_key,
                    enable_gqa=True,
                )
                first, first_slot = last, last_slot
            out.index_copy_(0, plan.decode_rows, attended.squeeze(2))
        return out

    def _attend_prefill(self, out, prefill: Prefill, q, k, v, k_cache, v_cache) -> None:
        """Writes one sequence's rows of `out`: [num_tokens, num_heads, head_dim]."""
        start, end = prefill.start, prefill.end
        queries = q[start:end].transpose(0, 1).unsqueeze(0)  # [1, num_heads, num_queries, head_dim]
        if prefill.slots is None:
            keys, values = (new[start:end].transpose(0, 1).unsqueeze(0) for new in (k, v))
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            out[start:end] = attended[0].transpose(0, 1)
            return
        keys, values = (_by_sequence(x, 1) for x in self._gather(k_cache, v_cache, prefill.slots))
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

    def _gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots`, each [num_slots, num_kv_heads, head_dim], valid until the next call."""
        num_kv_heads, head_dim = k_cache.shape[2:]
        width, num_slots = num_kv_heads * head_dim, slots.numel()
        size = num_slots * width
        if self._key_buffer.numel() < size or self._key_buffer.dtype != k_cache.dtype:
            # Half as much again, since the next steps' contexts are longer.
            self._key_buffer = torch.empty(size + size // 2, dtype=k_cache.dtype, device=k_cache.device)
            self._value_buffer = torch.empty_like(self._key_buffer)
        keys, values = (
            torch.index_select(cache.view(-1, width), 0, slots, out=buffer[:size].view(num_slots, width))
            for cache, buffer in ((k_cache, self._key_buffer), (v_cache, self._value_buffer))
        )
        return keys.view(num_slots, num_kv_heads, head_dim), values.view(num_slots, num_kv_heads, head_dim)


def _by_sequence(gathered: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """[num_seqs × length, num_kv_heads, head_dim] -> [num_seqs, num_kv_heads, length, head_dim]"""
    return gathered.unflatten(0, (num_seqs, -1)).transpose(1, 2)


def _slots(context: Context, rows: list[int], lengths: list[int]) -> torch.Tensor:
    """Slots of the rows' keys: int64 [len(rows) × longest].

    Padding repeats the sequence's own first key: a slot of somebody else's might hold a NaN, which a mask
    does not stop.
    """
    device = context.block_tables.device
    position = torch.arange(max(lengths), device=device)
    position = position.where(position < torch.tensor(lengths, device=device)[:, None], 0)
    blocks = context.block_tables[torch.tensor(rows, device=device)].long().gather(1, position // context.block_size)
    return (blocks * context.block_size + position % context.block_size).flatten()
