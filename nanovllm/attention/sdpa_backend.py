"""Attention through PyTorch's fused `scaled_dot_product_attention`, for devices without a kernel of our own.

Prefill goes sequence by sequence, on the new keys alone where nothing is cached. Decodes are batched: their
keys are gathered through the block tables into buckets of similar length, so that one call serves many
sequences and little is padded. While the same sequences decode on, the gathered copy is kept and each step
appends its new keys to it. The plain twin is TorchAttention.
"""

import itertools
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.ops.layer_cache import LayerCache, rounded_keys, rounded_values

# A bucket is closed when the next sequence is shorter than this part of the bucket's longest: padding costs
# memory traffic, another bucket costs a few small operations per layer.
_SHORTEST_IN_BUCKET = 0.5
_SMALLEST_BUCKET = 16
# Gathered keys are kept while at least this part of their sequences still runs: those of the others are read in vain.
_MIN_STILL_RUNNING = 0.75
# They are kept only on a CPU, and only if they take at most this part of the KV cache's memory, in addition to it.
_MAX_KEPT = 0.25
# Queries of a chunk over cached keys that share one mask; bounds the mask's memory.
_QUERIES_PER_MASK = 512


@dataclass
class Bucket:
    """Decodes of similar context length, laid out [size, num_kv_heads, capacity, head_dim].

    first, size: its places; first_row, num_rows: its rows of the gathered keys […, head_dim].
    """

    first: int
    size: int
    capacity: int
    first_row: int
    num_rows: int


@dataclass
class Gathered:
    """Decodes laid side by side for attention, in places, longest context first.

    place_of: place of each sequence by its tenant (see AttentionMetadata).
    lengths: int64 [num_places], keys of each so far; of a finished sequence, the last it had.
    capacities: int64 [num_places], keys that each has room for.
    first_rows: int64 [num_places], where the rows of each one's first key/value head begin.
    layers: address of a layer's keys in the cache -> its gathered keys and values, each [num_rows, head_dim].
    """

    place_of: dict[tuple[int, int], int]
    lengths: np.ndarray
    capacities: np.ndarray
    first_rows: np.ndarray
    buckets: list[Bucket]
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass
class Prefill:
    """One sequence's chunk: its queries' place in the batch, and the slots of all its keys if any are cached."""

    start: int
    end: int
    slots: torch.Tensor | None


@dataclass
class DecodePlan:
    """How the step's decodes are attended.

    rows: int64 [num_decodes], their rows in the flat batch.
    places: int64 [num_decodes], where each stands in `gathered`.
    place_rows: int64 [num_places], the row whose query is computed in each place (a finished sequence's: any).
    masks: for each window and bucket [size × num_kv_heads, 1, longest], −inf where a shorter sequence is padded and
        before the window.
    source_rows: int64 [num_rows], which rows [num_blocks × block_size × num_kv_heads] of the cache to gather; None
        if they were kept from the last step.
    new_rows: int64 [num_decodes × num_kv_heads], the gathered rows that the decodes' new keys become.
    may_keep: whether the next step may go on with what this one gathers.
    """

    gathered: Gathered
    rows: torch.Tensor
    places: torch.Tensor
    place_rows: torch.Tensor
    masks: dict[int, list[torch.Tensor]]
    source_rows: torch.Tensor | None
    new_rows: torch.Tensor
    may_keep: bool


@dataclass
class SDPAPlan:
    prefills: list[Prefill]
    decodes: DecodePlan | None


class SDPAAttention:
    name = "sdpa"
    default_block_size = 64
    can_be_captured = False
    can_capture_prompts = False
    reads_new_keys = True
    max_num_shared_splits = 0

    def __init__(self, shape: AttentionShape):
        self._shape = shape
        self._kept: Gathered | None = None
        self._full_mapping: torch.Tensor | None = None  # the planned step's slot mapping, if it has no −1
        # Where gathered keys and values go, by layer if they are kept. Fresh memory for every layer of every step
        # would cost more in page faults than the copy itself.
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep_buffers(self, is_kept: bool) -> None:
        if not is_kept:
            self._kept, self._full_mapping, self._buffers = None, None, {}

    def shared_prefixes(self, block_tables, context_lens, block_size) -> None:
        return None

    def split_lengths(self, context_lens):
        return context_lens

    def variant_key(self, max_num_decodes: int, has_prompts: bool) -> None:
        return None

    def plan(self, metadata: AttentionMetadata) -> SDPAPlan:
        starts = metadata.cu_seqlens_q.cpu().numpy().astype(np.int64)
        lengths = metadata.context_lens.cpu().numpy().astype(np.int64)
        tables = metadata.block_tables.cpu().numpy().astype(np.int64)
        num_new = np.diff(starts)
        prefills = []
        for row in np.flatnonzero(num_new > 1).tolist():
            slots = None
            if lengths[row] > num_new[row]:
                slots = self._on_device(_slots(tables[[row]], lengths[[row]], lengths[row], metadata.block_size)[0])
            prefills.append(Prefill(int(starts[row]), int(starts[row + 1]), slots))
        self._full_mapping = metadata.slot_mapping if bool((metadata.slot_mapping >= 0).all()) else None
        decodes = np.flatnonzero(num_new == 1)
        kept, self._kept = self._kept, None
        if not len(decodes):
            return SDPAPlan(prefills, None)
        names = None if prefills or metadata.tenants is None else [metadata.tenants[row] for row in decodes]
        plan = self._plan_decodes(kept, names, starts, lengths, tables, decodes, metadata.block_size)
        return SDPAPlan(prefills, plan)

    def _plan_decodes(self, kept, names, starts, lengths, tables, decodes, block_size) -> DecodePlan:
        """The plan for the rows `decodes`, whose tenants are `names` if the next step may reuse what it gathers."""
        places = _kept_places(kept, names, lengths[decodes])
        source_rows, num_kv_heads = None, self._shape.num_kv_heads
        if places is None:
            order = decodes[np.argsort(-lengths[decodes], kind="stable")]
            places = np.empty(len(starts), np.int64)
            places[order] = np.arange(len(order))
            places = places[decodes]
            gathered, source_rows = _lay_out(lengths[order], tables[order], block_size, num_kv_heads, names is not None)
            if names is not None:
                gathered.place_of = dict(zip(names, places.tolist(), strict=True))
        else:
            gathered = self._kept = kept
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
            gathered,
            self._on_device(rows),
            self._on_device(places),
            self._on_device(place_rows),
            masks,
            None if source_rows is None else self._on_device(source_rows),
            self._on_device(new_rows.ravel()),
            names is not None,
        )

    def store_kvcache(self, k, v, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        if slot_mapping is not self._full_mapping or cache.is_fp8:
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
        """q: every row of the batch; k, v: the decodes' alone -> [num_decodes, num_heads, head_dim]"""
        keys, values = self._decode_keys(plan, k, v, cache)
        num_kv_heads, scale = k.shape[1], self._shape.score_scale
        # The query heads of a group are queries of its one key head: [num_places, num_kv_heads, group_size, head_dim].
        queries = q.index_select(0, plan.place_rows).unflatten(1, (num_kv_heads, -1))
        attended = torch.empty_like(queries)
        for bucket, mask in zip(plan.gathered.buckets, plan.masks[window], strict=True):
            of_bucket = slice(bucket.first, bucket.first + bucket.size)
            rows, shape = (
                slice(bucket.first_row, bucket.first_row + bucket.num_rows),
                (-1, bucket.capacity, q.shape[-1]),
            )
            bucket_keys, bucket_values = (x[rows].view(shape)[:, : mask.shape[-1]] for x in (keys, values))
            if q.dtype == torch.float32:
                # On a CPU faster than the fused call.
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
        """The places' keys and values, new ones included: each [num_rows, head_dim]."""
        layer, head_dim = cache.keys.data_ptr(), k.shape[-1]
        if plan.source_rows is None:
            for gathered, new in zip(plan.gathered.layers[layer], (k, v), strict=True):
                gathered.index_copy_(0, plan.new_rows, new.reshape(-1, head_dim))
            return plan.gathered.layers[layer]
        num_bytes = plan.source_rows.numel() * head_dim * k.itemsize
        if not plan.may_keep or k.is_cuda or num_bytes > _MAX_KEPT * cache.keys.nbytes:
            return self._gather(cache, plan.source_rows, head_dim)
        self._kept = plan.gathered
        self._kept.layers[layer] = self._gather(cache, plan.source_rows, head_dim, buffer=layer)
        return self._kept.layers[layer]

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
        self, cache: LayerCache, rows: torch.Tensor, width: int, buffer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the cache as [-1, width], each [num_rows, width], valid until the next call with that buffer.

        width: one head's or all heads'.
        """
        if cache.is_fp8:
            num_heads = width // cache.head_dim
            of_heads = rows[:, None] * num_heads + torch.arange(num_heads, device=rows.device)
            keys, values = (x.to(self._shape.dtype).view(-1, width) for x in cache.read_heads(of_heads.flatten()))
            return keys, values
        size = rows.numel() * width
        buffers = self._buffers.get(buffer)
        if buffers is None or buffers[0].numel() < size:
            # Half as much again for the next step's longer contexts; what is kept has room already.
            new = torch.empty(size if buffer else size + size // 2, dtype=cache.keys.dtype, device=cache.keys.device)
            self._buffers[buffer] = buffers = new, torch.empty_like(new)
        keys, values = (
            torch.index_select(whole.view(-1, width), 0, rows, out=memory[:size].view(-1, width))
            for whole, memory in zip((cache.keys, cache.values), buffers, strict=True)
        )
        return keys, values

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._shape.device)


def _kept_places(kept: Gathered | None, names: list[tuple[int, int]] | None, lengths: np.ndarray) -> np.ndarray | None:
    """int64 [num_decodes], where the decodes of these names stand in what the last step gathered, or None.

    They do if each of them has one more key than then, and room for it.
    """
    if kept is None or names is None or len(names) < _MIN_STILL_RUNNING * len(kept.lengths):
        return None
    if any(name not in kept.place_of for name in names):
        return None
    places = np.array([kept.place_of[name] for name in names])
    fits = (kept.lengths[places] + 1 == lengths) & (lengths <= kept.capacities[places])
    return places if fits.all() else None


def _lay_out(
    lengths: np.ndarray, tables: np.ndarray, block_size: int, num_kv_heads: int, has_room: bool
) -> tuple[Gathered, np.ndarray]:
    """Buckets for decodes of these lengths, longest first, and the rows of the cache that they gather.

    Args:
        lengths: int64 [num_decodes]; tables: int64 [num_decodes, max_blocks], their block tables.
        has_room: whether each gets room for the keys of later steps.
    """
    buckets, source_rows, first_rows, capacities, first, first_row = [], [], [], [], 0, 0
    while first < len(lengths):
        longest = int(lengths[first])
        num_similar = int(np.count_nonzero(lengths[first:] >= _SHORTEST_IN_BUCKET * longest))
        size = min(max(num_similar, _SMALLEST_BUCKET), len(lengths) - first)
        capacity = longest + has_room * (longest // 4 + 16)
        buckets.append(Bucket(first, size, capacity, first_row, size * num_kv_heads * capacity))
        of_bucket = slice(first, first + size)
        slots = _slots(tables[of_bucket], lengths[of_bucket], capacity, block_size)
        source_rows.append((slots[:, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]).ravel())
        first_rows.append(first_row + num_kv_heads * capacity * np.arange(size))
        capacities.append(np.full(size, capacity))
        first, first_row = first + size, first_row + buckets[-1].num_rows
    gathered = Gathered({}, lengths, np.concatenate(capacities), np.concatenate(first_rows), buckets)
    return gathered, np.concatenate(source_rows)


def _slots(tables: np.ndarray, lengths: np.ndarray, capacity: int, block_size: int) -> np.ndarray:
    """Slots of the sequences' keys: int64 [num_seqs, capacity].

    Padding repeats the sequence's own first key: a slot of somebody else's might hold a NaN, which a mask
    does not stop.
    """
    position = np.arange(capacity)
    position = np.where(position < lengths[:, None], position, 0)
    return np.take_along_axis(tables, position // block_size, 1) * block_size + position % block_size
