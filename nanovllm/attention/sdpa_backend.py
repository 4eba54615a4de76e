"""Attention through PyTorch's fused `scaled_dot_product_attention`, for devices without a kernel of our own.

Prompts are attended one sequence after the other, on the new keys alone if nothing is cached. Decodes are batched:
their keys are gathered through the block tables into buckets of similar length, so that one call serves many sequences
and little is padded. As long as the same sequences decode, the gathered copy is kept and each step appends its new
keys to it; see gathered_keys.py. The plain twin is TorchAttention.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.gathered_keys import Gathered, kept_places, lay_out, slots_of_positions
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.ops.layer_cache import LayerCache, rounded_keys, rounded_values

# Gathered keys are kept only on a CPU, and only if they take at most this part of the KV cache's memory in addition.
_MAX_KEPT = 0.25
# Queries of a chunk over cached keys that share one mask; bounds the mask's memory.
_QUERIES_PER_MASK = 512


@dataclass
class Prefill:
    """One sequence's chunk.

    start, end: its tokens in the flat batch.
    slots: int64 [context length], the slots of all its keys; None if all of them are new.
    """

    start: int
    end: int
    slots: torch.Tensor | None


@dataclass
class DecodePlan:
    """How the step's decodes are attended.

    group: the group of layers that the plan is for.
    rows: int64 [num_decodes], their tokens in the flat batch.
    places: int64 [num_decodes], the place of each in `gathered`.
    place_rows: int64 [num_places], the token whose query is computed in each place; any token for a finished sequence.
    masks: for each window and bucket [size × num_kv_heads, 1, longest], −inf where a shorter sequence is padded and
        before the window.
    source_rows: int64 [num_rows], the rows [num_blocks × block_size × num_kv_heads] of the cache to gather; None if
        they were kept from the last step.
    new_rows: int64 [num_decodes × num_kv_heads], the gathered rows that the decodes' new keys become.
    may_keep: whether the next step may reuse the keys that this one gathers.
    num_groups: how many groups of layers share each part of the cache.
    """

    group: int
    gathered: Gathered
    rows: torch.Tensor
    places: torch.Tensor
    place_rows: torch.Tensor
    masks: dict[int, list[torch.Tensor]]
    source_rows: torch.Tensor | None
    new_rows: torch.Tensor
    may_keep: bool
    num_groups: int


@dataclass
class SDPAPlan:
    """is_full: no token is padding."""

    prefills: list[Prefill]
    decodes: DecodePlan | None
    is_full: bool


class SDPAAttention(AttentionBackend):
    name = "sdpa"
    reads_new_keys = True

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        self._kept: dict[int, Gathered] = {}  # by group of layers
        # Memory for gathered keys and values, by group and layer if they are kept. Fresh memory for every layer of
        # every step would cost more in page faults than the copy itself.
        self._buffers: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep_buffers(self, is_kept: bool) -> None:
        if not is_kept:
            self._kept, self._buffers = {}, {}

    def plans(self, groups: list[AttentionMetadata]) -> list[SDPAPlan]:
        return [self.plan(each, len(groups)) for each in groups]

    def plan(self, metadata: AttentionMetadata, num_groups: int = 1) -> SDPAPlan:
        starts = metadata.cu_seqlens_q.cpu().numpy().astype(np.int64)
        lengths = metadata.context_lens.cpu().numpy().astype(np.int64)
        tables = metadata.block_tables.cpu().numpy().astype(np.int64)
        num_new, is_full = np.diff(starts), int(starts[-1]) == len(metadata.slot_mapping)
        window = min(self._shape.windows) if metadata.group == 0 else max(self._shape.windows)
        # The first key that a query of each row sees. Slots before it may hold other sequences' keys.
        first_seen = np.maximum(lengths - num_new + 1 - window, 0) if window else np.zeros_like(lengths)
        prefills = []
        for row in np.flatnonzero(num_new > 1).tolist():
            slots = None
            if lengths[row] > num_new[row]:
                rows = slice(row, row + 1)
                slots_of_row = slots_of_positions(
                    tables[rows], lengths[rows], np.arange(lengths[row]), metadata.block_size, first_seen[rows]
                )
                slots = self._on_device(slots_of_row[0])
            prefills.append(Prefill(int(starts[row]), int(starts[row + 1]), slots))
        decodes = np.flatnonzero(num_new == 1)
        kept = self._kept.pop(metadata.group, None)
        if not len(decodes):
            return SDPAPlan(prefills, None, is_full)
        names = None if prefills or metadata.tenants is None else [metadata.tenants[row] for row in decodes]
        plan = self._plan_decodes(kept, names, metadata, starts, lengths, first_seen, tables, decodes, num_groups)
        return SDPAPlan(prefills, plan, is_full)

    def _plan_decodes(
        self, kept, names, metadata, starts, lengths, first_seen, tables, decodes, num_groups
    ) -> DecodePlan:
        """The plan for the rows `decodes`. names: their tenants if the next step may reuse the gathered keys."""
        places = kept_places(kept, names, lengths[decodes])
        source_rows, num_kv_heads = None, self._shape.num_kv_heads
        if places is None:
            order = decodes[np.argsort(-lengths[decodes], kind="stable")]
            places = np.empty(len(starts), np.int64)
            places[order] = np.arange(len(order))
            places = places[decodes]
            gathered, source_rows = lay_out(
                lengths[order], first_seen[order], tables[order], metadata.block_size, num_kv_heads, names is not None
            )
            if names is not None:
                gathered.place_of = dict(zip(names, places.tolist(), strict=True))
        else:
            gathered = self._kept[metadata.group] = kept
            gathered.lengths[places] = lengths[decodes]
        rows = starts[decodes]
        place_rows = np.full(len(gathered.lengths), rows[0])
        place_rows[places] = rows
        masks: dict[int, list[torch.Tensor]] = {window: [] for window in self._shape.windows}
        for window, bucket in itertools.product(masks, gathered.buckets):
            of_bucket = gathered.lengths[bucket.first : bucket.first + bucket.size, None]
            distance = of_bucket - 1 - np.arange(of_bucket.max())
            is_seen = (distance >= 0) & (distance < (window or of_bucket))
            mask = np.where(is_seen, np.float32(0), np.float32(-np.inf)).repeat(num_kv_heads, 0)[:, None]
            masks[window].append(self._on_device(mask).to(self._shape.dtype))
        new_rows = (gathered.first_rows + gathered.lengths - 1)[places, None]
        new_rows = new_rows + np.arange(num_kv_heads) * gathered.capacities[places, None]
        return DecodePlan(
            metadata.group,
            gathered,
            self._on_device(rows),
            self._on_device(places),
            self._on_device(place_rows),
            masks,
            None if source_rows is None else self._on_device(source_rows),
            self._on_device(new_rows.ravel()),
            names is not None,
            num_groups,
        )

    def store_kvcache(self, k, v, cache: LayerCache, metadata: AttentionMetadata) -> None:
        slot_mapping = metadata.slot_mapping
        if cache.is_fp8 or not metadata.plan.is_full:
            cache.write(k, v, slot_mapping)
        else:
            cache.keys.flatten(0, 1).index_copy_(0, slot_mapping, k)
            cache.values.flatten(0, 1).index_copy_(0, slot_mapping, v)

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        plan: SDPAPlan = metadata.plan
        if cache.is_fp8:
            k, v = rounded_keys(k), rounded_values(v)
        if plan.decodes is not None and not plan.prefills:
            return self._attend_decodes(plan.decodes, q, k, v, cache, window)
        out = torch.empty_like(q)
        for prefill in plan.prefills:
            self._attend_prefill(out, prefill, q, k, v, cache, window)
        if plan.decodes is not None:
            rows = plan.decodes.rows
            out.index_copy_(0, rows, self._attend_decodes(plan.decodes, q, k[rows], v[rows], cache, window))
        return out

    def _attend_decodes(self, plan: DecodePlan, q, k, v, cache: LayerCache, window: int) -> torch.Tensor:
        """q: queries of all tokens; k, v: keys and values of the decodes alone -> [num_decodes, num_heads, head_dim]"""
        keys, values = self._decode_keys(plan, k, v, cache)
        num_kv_heads, scale = k.shape[1], self._shape.score_scale
        # The query heads of a group are queries of its one key head: [num_places, num_kv_heads, group_size, head_dim].
        queries = q.index_select(0, plan.place_rows).unflatten(1, (num_kv_heads, -1))
        attended = torch.empty_like(queries)
        for bucket, mask in zip(plan.gathered.buckets, plan.masks[window], strict=True):
            of_bucket = slice(bucket.first, bucket.first + bucket.size)
            rows = slice(bucket.first_row, bucket.first_row + bucket.num_rows)
            shape = -1, bucket.capacity, q.shape[-1]
            bucket_keys, bucket_values = (x[rows].view(shape)[:, : mask.shape[-1]] for x in (keys, values))
            if q.dtype == torch.float32:
                # This is faster on a CPU than the fused call.
                scores = torch.baddbmm(mask, queries[of_bucket].flatten(0, 1), bucket_keys.mT, alpha=scale)
                torch.bmm(scores.softmax(-1), bucket_values, out=attended[of_bucket].flatten(0, 1))
            else:
                by_head = (x.unflatten(0, (-1, num_kv_heads)) for x in (bucket_keys, bucket_values, mask))
                keys_of_head, values_of_head, mask_of_head = by_head
                attended[of_bucket] = F.scaled_dot_product_attention(
                    queries[of_bucket], keys_of_head, values_of_head, attn_mask=mask_of_head, scale=scale
                )
        return attended.flatten(1, 2).index_select(0, plan.places)

    def _decode_keys(self, plan: DecodePlan, k, v, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all places, new ones included: each [num_rows, head_dim]."""
        layer, head_dim = cache.keys.data_ptr(), k.shape[-1]
        if plan.source_rows is None:
            for gathered, new in zip(plan.gathered.layers[layer], (k, v), strict=True):
                gathered.index_copy_(0, plan.new_rows, new.reshape(-1, head_dim))
            return plan.gathered.layers[layer]
        num_bytes = plan.source_rows.numel() * head_dim * k.itemsize
        if not plan.may_keep or k.is_cuda or num_bytes > _MAX_KEPT * cache.keys.nbytes / plan.num_groups:
            return self._gather(cache, plan.source_rows, head_dim)
        self._kept[plan.group] = plan.gathered
        plan.gathered.layers[layer] = self._gather(cache, plan.source_rows, head_dim, buffer=(plan.group, layer))
        return plan.gathered.layers[layer]

    def _attend_prefill(self, out, prefill: Prefill, q, k, v, cache: LayerCache, window: int) -> None:
        """Writes one sequence's rows of `out`: [num_tokens, num_heads, head_dim]."""
        start, end = prefill.start, prefill.end
        attend = partial(F.scaled_dot_product_attention, enable_gqa=True, scale=self._shape.score_scale)
        queries = q[start:end].transpose(0, 1).unsqueeze(0)  # [1, num_heads, num_queries, head_dim]
        num_queries = end - start
        if prefill.slots is None:
            keys, values = (new[start:end].transpose(0, 1).unsqueeze(0) for new in (k, v))
            if not window or num_queries <= window:
                attended = attend(queries, keys, values, is_causal=True)
                out[start:end] = attended[0].transpose(0, 1)
                return
        else:
            num_kv_heads, head_dim = k.shape[1:]
            keys, values = (
                x.view(1, -1, num_kv_heads, head_dim).transpose(1, 2)
                for x in self._gather(cache, prefill.slots, num_kv_heads * head_dim)
            )
        num_before = keys.shape[2] - num_queries
        for first in range(0, num_queries, _QUERIES_PER_MASK):
            last = min(first + _QUERIES_PER_MASK, num_queries)
            first_key = max(num_before + first + 1 - window, 0) if window else 0
            seen = slice(first_key, num_before + last)
            diagonal = num_before + first - first_key
            is_seen = torch.ones(last - first, seen.stop - first_key, dtype=torch.bool, device=q.device).tril(diagonal)
            if window:
                is_seen = is_seen.triu(diagonal + 1 - window)
            attended = attend(queries[:, :, first:last], keys[:, :, seen], values[:, :, seen], attn_mask=is_seen)
            out[start + first : start + last] = attended[0].transpose(0, 1)

    def _gather(
        self, cache: LayerCache, rows: torch.Tensor, width: int, buffer: tuple[int, int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """These rows of the keys and values, [num_rows, width] each, with the cache seen as [-1, width]. They are valid
        until the next call with the same buffer.

        width: numbers of one head, or of all heads.
        """
        if cache.is_fp8:
            num_heads = width // cache.head_dim
            of_heads = rows[:, None] * num_heads + torch.arange(num_heads, device=rows.device)
            keys, values = (x.to(self._shape.dtype).view(-1, width) for x in cache.read_heads(of_heads.flatten()))
            return keys, values
        size = rows.numel() * width
        buffers = self._buffers.get(buffer)
        if buffers is None or buffers[0].numel() < size:
            # Half as much again for the next step's longer contexts. Kept keys have room already.
            new = torch.empty(size if buffer else size + size // 2, dtype=cache.keys.dtype, device=cache.keys.device)
            self._buffers[buffer] = buffers = new, torch.empty_like(new)
        keys, values = (
            torch.index_select(whole.view(-1, width), 0, rows, out=memory[:size].view(-1, width))
            for whole, memory in zip((cache.keys, cache.values), buffers, strict=True)
        )
        return keys, values

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._shape.device)
