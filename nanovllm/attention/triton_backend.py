"""Attention by kernels of our own, in Triton: any GPU, dtype and block size that is a multiple of 16.

Prompts are attended in triton_prompts.py. Decodes are split over their keys, and the partial results are merged in
order. A sequence's own length decides how long its splits are; its neighbours have no influence. `plan` lists the
splits on the device, and a fixed grid works the list off, so a captured step serves any lengths. One program reads a
split's keys once for all query heads of their group, and once for all decodes that share it: the idea of cascade
inference (Ye et al., FlashInfer, 2024), with any number of prefixes. The softmax is the online one of FlashAttention
(Dao, 2023), in base 2; the plain twin is TorchAttention.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.attention import splits, triton_fp8
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.metadata import AttentionMetadata, SharedPrefixes
from nanovllm.attention.prefix_groups import PrefixGroups, find_prefix_groups
from nanovllm.attention.splits import keys_of_item, max_num_splits, split_length_of, split_lengths
from nanovllm.attention.triton_prompts import LOG2_E, attend_keys, attend_prompts, slots_of
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin, let_next_come, wait
from nanovllm.ops.kernel import jit, shared_memory, tl, triton
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.store_fp8 import store_fp8

# Keys of a tile, and query heads of a group at least; fewer are padded.
_KEYS = 64
_MIN_GROUP = 16
# Pipeline stages of the decode kernel, if shared memory allows. Beside prompts, or with more decodes than this, two
# stages and more programs per processor are faster.
_NUM_STAGES = 5
_MAX_DECODES_OF_STAGES = 256
# Queries (rows that share a split × the heads of a group) that one program attends together.
_QUERIES_OF_GROUP = 64
# Heads that a program merges, a warp for each, and how many of their splits at a time.
_HEADS_OF_MERGE = 4
_SPLITS_OF_MERGE = 8


@dataclass
class DecodePlan:
    """The decodes' splits of layers with one window, all int32.

    num_items: [1]; item_rows, item_splits: [capacity], whose split it is and which one; without those that rows share.
    first_items: [max_num_decodes], where each row's partial results begin.
    """

    num_items: torch.Tensor
    item_rows: torch.Tensor
    item_splits: torch.Tensor
    first_items: torch.Tensor


def store_kvcache(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
    """`cache.write`."""
    if cache.is_fp8:
        store_fp8(k, cache, slot_mapping, are_keys=True)
        store_fp8(v, cache, slot_mapping, are_keys=False)
        return
    width = k.shape[1] * k.shape[2]
    _store_kernel[(len(k),)](
        k, v, cache.keys, cache.values, slot_mapping, k.stride(0), v.stride(0),
        WIDTH=width, PADDED=triton.next_power_of_2(width), enable_fp_fusion=True,
    )  # fmt: skip


class TritonAttention:
    name = "triton"
    default_block_size = 64
    can_be_captured = True
    can_capture_prompts = True
    reads_new_keys = False

    def __init__(self, shape: AttentionShape):
        self._shape, self._scale = shape, shape.score_scale * LOG2_E
        self._max_num_splits = max_num_splits(shape.max_model_len)  # of a sequence
        longest = int(split_lengths(np.array(shape.max_model_len)))
        self._split = {"SHORTEST": splits.SHORTEST_SPLIT, "LONGEST": longest}
        capacity = shape.max_num_seqs * self._max_num_splits
        # Partial results live here between two kernels; a captured step needs them in one place.
        self._partial = torch.empty(
            (capacity, shape.num_heads, shape.head_dim), dtype=torch.float32, device=shape.device
        )
        self._log_sums = torch.empty((capacity, shape.num_heads), dtype=torch.float32, device=shape.device)
        self._items = {
            window: torch.empty((2, capacity), dtype=torch.int32, device=shape.device) for window in shape.windows
        }
        self.max_num_shared_splits = capacity
        on_gpu = shape.device.type == "cuda"
        num_processors = torch.cuda.get_device_properties(shape.device).multi_processor_count if on_gpu else 1
        # Many more programs than fit at once: a processor that is done with one takes the next.
        self._num_programs, self._num_grouped_programs = 32 * num_processors, 2 * num_processors
        self._rows = triton.next_power_of_2(shape.max_num_seqs)  # always the same, for one compilation
        self._width = triton.next_power_of_2(shape.head_dim)
        # Triton 3.4 buffers one tile of keys and values less than there are stages, later versions half as many.
        tile = 2 * _KEYS * self._width * shape.dtype.itemsize
        self._has_stages = (_NUM_STAGES - 1) * tile + 2**13 <= shared_memory(shape.device)

    def keep_buffers(self, is_kept: bool) -> None:
        for buffer in (self._partial, self._log_sums, *self._items.values()):
            buffer.untyped_storage().resize_(buffer.nbytes if is_kept else 0)

    def split_lengths(self, context_lens: np.ndarray) -> np.ndarray:
        return split_lengths(context_lens)

    def variant_key(self, max_num_decodes: int, has_prompts: bool) -> int:
        return _NUM_STAGES if self._has_stages and max_num_decodes <= _MAX_DECODES_OF_STAGES and not has_prompts else 2

    def shared_prefixes(
        self, block_tables: np.ndarray, context_lens: np.ndarray, block_size: int
    ) -> PrefixGroups | None:
        if splits.SHORTEST_SPLIT % block_size:
            return None
        group_size = self._shape.num_heads // self._shape.num_kv_heads
        max_num_members = max(1, _QUERIES_OF_GROUP // group_size)
        lengths = split_lengths(context_lens)
        return find_prefix_groups(block_tables, context_lens, block_size, lengths, max_num_members)

    def plan(self, metadata: AttentionMetadata) -> dict[int, DecodePlan]:
        """By window."""
        if metadata.max_num_decodes == 0:
            return {}
        return {window: self._plan_decodes(metadata, window) for window in self._shape.windows}

    def _plan_decodes(self, metadata: AttentionMetadata, window: int) -> DecodePlan:
        num_rows, shared = metadata.max_num_decodes, _shared(metadata, window)
        num_items, first_items = torch.empty(num_rows + 1, dtype=torch.int32, device=self._shape.device).split(
            (1, num_rows)
        )
        plan = DecodePlan(num_items, self._items[window][0], self._items[window][1], first_items)
        _plan_kernel[(1,)](
            metadata.context_lens, metadata.num_decodes, None if shared is None else shared.num_shared, num_items,
            first_items, plan.item_rows, plan.item_splits, ROWS=self._rows, IS_GROUPED=shared is not None,
            WINDOW=window, **self._split, **LAUNCH_OPTIONS,
        )  # fmt: skip
        return plan

    def store_kvcache(self, k, v, cache: LayerCache, slot_mapping) -> None:
        store_kvcache(k, v, cache, slot_mapping)

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if metadata.query_tiles is not None:
            attend_prompts(self._shape, q, cache, out, metadata, window)
        if metadata.max_num_decodes:
            self._attend_decodes(q, cache, metadata, window, out)
        return out

    def _attend_decodes(self, q, cache: LayerCache, metadata: AttentionMetadata, window: int, out) -> None:
        shape, plan, shared = self._shape, metadata.plan[window], _shared(metadata, window)
        group_size = shape.num_heads // shape.num_kv_heads
        is_beside_prompts = metadata.query_tiles is not None
        max_num_items = metadata.max_num_decodes * self._max_num_splits * shape.num_kv_heads
        caches: tuple[Any, ...]
        if cache.is_fp8:
            width = triton_fp8.padded_head_dim(shape.head_dim)
            kernel, options = triton_fp8.decode_fp8_kernel, triton_fp8.launch_options(width)
            caches = *triton_fp8.descriptors(cache, width), cache.scales
            num_keys, min_group = triton_fp8.keys_of_tile(cache.block_size), triton_fp8.MIN_GROUP
        else:
            num_stages = self.variant_key(metadata.max_num_decodes, is_beside_prompts)
            kernel, options, caches = _decode_kernel, {"num_warps": 4, "num_stages": num_stages}, cache[:2]
            width = self._width
            num_keys, min_group = _KEYS, _MIN_GROUP
        kernel[(min(self._num_programs, max_num_items),)](
            q, *caches, metadata.block_tables, metadata.context_lens, plan.num_items, plan.item_rows,
            plan.item_splits, plan.first_items, self._partial, self._log_sums, self._scale,
            q.stride(0), metadata.block_tables.stride(0), NUM_HEADS=shape.num_heads, NUM_KV_HEADS=shape.num_kv_heads,
            GROUP=group_size, PADDED_GROUP=max(min_group, triton.next_power_of_2(group_size)),
            HEAD_DIM=shape.head_dim, WIDTH=width, BLOCK_SIZE=metadata.block_size, KEYS=num_keys,
            IS_BESIDE_PROMPTS=is_beside_prompts, WINDOW=window, **options, **self._split, **LAUNCH_OPTIONS,
        )  # fmt: skip
        if shared is not None:
            queries = max(16, triton.next_power_of_2(max(1, _QUERIES_OF_GROUP // group_size) * group_size))
            _grouped_kernel[(self._num_grouped_programs,)](
                q, *cache, metadata.block_tables, metadata.context_lens, shared.num_items, shared.items,
                shared.members, plan.first_items, self._partial, self._log_sums, self._scale,
                q.stride(0), metadata.block_tables.stride(0), NUM_HEADS=shape.num_heads,
                NUM_KV_HEADS=shape.num_kv_heads, GROUP=group_size, QUERIES=queries, HEAD_DIM=shape.head_dim,
                WIDTH=self._width, BLOCK_SIZE=metadata.block_size, KEYS=_KEYS, num_warps=4, num_stages=2,
                **self._split, **LAUNCH_OPTIONS,
            )  # fmt: skip
        heads = min(_HEADS_OF_MERGE, triton.next_power_of_2(shape.num_heads))
        _merge_kernel[(metadata.max_num_decodes, triton.cdiv(shape.num_heads, heads))](
            self._partial, self._log_sums, metadata.context_lens, metadata.num_decodes, plan.first_items, out,
            NUM_HEADS=shape.num_heads, HEAD_DIM=shape.head_dim, WIDTH=self._width,
            MAX_SPLITS=triton.next_power_of_2(self._max_num_splits), SPLITS=_SPLITS_OF_MERGE, HEADS=heads,
            WINDOW=window, num_warps=heads, **self._split, **LAUNCH_OPTIONS,
        )  # fmt: skip


def _shared(metadata: AttentionMetadata, window: int) -> SharedPrefixes | None:
    # What rows share is their first keys, which a window soon leaves behind.
    return None if window else metadata.shared_prefixes


@jit(do_not_specialize=["k_stride", "v_stride"])
def _store_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """One program per token: its keys and values of all heads, `WIDTH` numbers, go to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        column = tl.arange(0, PADDED)
        is_real = column < WIDTH
        tl.store(k_cache + slot * WIDTH + column, tl.load(k + token * k_stride + column, is_real), is_real)
        tl.store(v_cache + slot * WIDTH + column, tl.load(v + token * v_stride + column, is_real), is_real)


@jit
def _plan_kernel(
    context_lens, num_decodes, num_shared, num_items, first_items, item_rows, item_splits, ROWS: tl.constexpr,
    IS_GROUPED: tl.constexpr, WINDOW: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """Lists every decode's splits, row by row, except those that it shares and those before its window."""
    begin()
    row = tl.arange(0, ROWS)
    is_row = row < tl.load(num_decodes)
    length = tl.load(context_lens + row, is_row, 0)
    split_length = split_length_of(length, SHORTEST, LONGEST)
    num_splits = tl.cdiv(length, split_length)
    tl.store(first_items + row, tl.cumsum(num_splits, 0) - num_splits, is_row)
    first_split = row * 0
    if IS_GROUPED:
        first_split = tl.load(num_shared + row, is_row, 0)
    if WINDOW:
        first_split = tl.maximum(length - WINDOW, 0) // split_length
    num_own = tl.maximum(num_splits - first_split, 0)  # a parked row has none
    first = tl.cumsum(num_own, 0) - num_own
    tl.store(num_items, tl.sum(num_own, 0))
    for index in range(0, tl.max(num_own, 0)):
        is_split = index < num_own
        tl.store(item_rows + first + index, row, is_split)
        tl.store(item_splits + first + index, first_split + index, is_split)


@jit(do_not_specialize=["q_stride", "table_stride"])
def _decode_kernel(
    q, k_cache, v_cache, block_tables, context_lens, num_items, item_rows, item_splits, first_items, partial,
    log_sums, scale, q_stride, table_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, IS_BESIDE_PROMPTS: tl.constexpr, WINDOW: tl.constexpr, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs share the list of splits × key/value heads; neighbours read neighbouring heads.

    In a step with prompts they run beside the prompts' kernel, which has waited for all that they read: prompts keep
    the arithmetic units busy, decodes the memory. The kernel in hopper_prompts.py fills each processor that it runs on.
    Beside it, decodes start only on a processor that has no prompts left.
    """
    let_next_come()
    if not IS_BESIDE_PROMPTS:
        wait()
    member = tl.arange(0, PADDED_GROUP)
    column = tl.arange(0, WIDTH)
    is_column = column < HEAD_DIM
    is_member = (member < GROUP)[:, None] & is_column[None, :]
    for work in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        row, split, first, last, first_seen = keys_of_item(
            item_rows, item_splits, context_lens, item, KEYS, WINDOW, SHORTEST, LONGEST
        )
        head = kv_head * GROUP + member
        queries = tl.load(q + row * q_stride + head[:, None] * HEAD_DIM + column[None, :], is_member, 0.0)
        largest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        summed = tl.zeros([PADDED_GROUP, WIDTH], tl.float32)
        for start in range(first, last, KEYS):
            position = start + tl.arange(0, KEYS)
            is_key = (position < last) & (position >= first_seen) if WINDOW else position < last
            slot = slots_of(block_tables + row * table_stride, position, is_key, BLOCK_SIZE, KEYS)
            at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
            is_read = is_key[:, None] & is_column[None, :]
            keys = tl.load(k_cache + at, is_read, 0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            total = total * shrink + tl.sum(weights, 1)
            values = tl.load(v_cache + at, is_read, 0.0)
            summed = summed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            largest = new_largest
        place = (tl.load(first_items + row) + split).to(tl.int64) * NUM_HEADS + head
        # Kept in the L2 cache until they are merged, although keys and values pass through it until then.
        result = partial + place[:, None] * HEAD_DIM + column[None, :]
        tl.store(result, summed / total[:, None], is_member, eviction_policy="evict_last")
        tl.store(log_sums + place, largest + tl.log2(total), member < GROUP)
    if IS_BESIDE_PROMPTS and tl.program_id(0) == 0:
        wait()  # so that this kernel's end is that of the prompts' kernel too


@jit(do_not_specialize=["q_stride", "table_stride"])
def _grouped_kernel(
    q, k_cache, v_cache, scales, block_tables, context_lens, num_groups, groups, members, first_items, partial,
    log_sums, scale, q_stride, table_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """Like _decode_kernel for splits that several rows share: their queries form one tile."""
    tl.static_assert(SHORTEST % KEYS == 0, "every key of a tile counts")
    begin()
    query = tl.arange(0, QUERIES)
    member = query // GROUP
    column = tl.arange(0, WIDTH)
    is_column = column < HEAD_DIM
    for work in range(tl.program_id(0), tl.load(num_groups) * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        split = tl.load(groups + item * 3)
        first_member = tl.load(groups + item * 3 + 1)
        is_query = member < tl.load(groups + item * 3 + 2)
        row = tl.load(members + first_member + member, is_query, 0).to(tl.int64)
        head = kv_head * GROUP + query % GROUP
        is_real = is_query[:, None] & is_column[None, :]
        queries = tl.load(q + row[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :], is_real, 0.0)
        one_of_them = tl.load(members + first_member).to(tl.int64)
        block_table = block_tables + one_of_them * table_stride
        split_length = split_length_of(tl.load(context_lens + one_of_them), SHORTEST, LONGEST)  # the same for all
        largest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        summed = tl.zeros([QUERIES, WIDTH], tl.float32)
        largest, total, summed = attend_keys(
            queries, query, largest, total, summed, k_cache, v_cache, scales, block_table, kv_head, scale,
            split * split_length, (split + 1) * split_length, NUM_KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, KEYS, False, 0,
        )  # fmt: skip
        place = (tl.load(first_items + row, is_query, 0) + split).to(tl.int64) * NUM_HEADS + head
        tl.store(partial + place[:, None] * HEAD_DIM + column[None, :], summed / total[:, None], is_real)
        tl.store(log_sums + place, largest + tl.log2(total), is_query)


@jit
def _merge_kernel(
    partial, log_sums, context_lens, num_decodes, first_items, out, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """One program per row and some heads: its splits' results, weighted by their sums. Only decodes have any."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    is_decode = row < tl.load(num_decodes)
    length = tl.load(context_lens + row)  # before the branch, so that both loads are under way
    split_length = split_length_of(length, SHORTEST, LONGEST)
    first_split, num_splits = 0, tl.cdiv(length, split_length)
    if WINDOW:
        first_split = tl.maximum(length - WINDOW, 0) // split_length
    if is_decode:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        column = tl.arange(0, WIDTH)
        is_head, is_column = head < NUM_HEADS, column < HEAD_DIM
        row_place = (tl.load(first_items + row).to(tl.int64) * NUM_HEADS + head)[:, None]
        split = tl.arange(0, MAX_SPLITS)
        is_split = ((split >= first_split) & (split < num_splits))[None, :] & is_head[:, None]
        largest = tl.max(tl.load(log_sums + row_place + split[None, :] * NUM_HEADS, is_split, float("-inf")), 1)
        total = tl.zeros([HEADS], tl.float32)
        merged = tl.zeros([HEADS, WIDTH], tl.float32)
        for start in range(first_split, num_splits, SPLITS):
            some = start + tl.arange(0, SPLITS)
            is_read = (some < num_splits)[None, :] & is_head[:, None]
            place = row_place + some[None, :] * NUM_HEADS
            log_sum = tl.load(log_sums + place, is_read, float("-inf"))
            weight = tl.where(is_read, tl.exp2(log_sum - largest[:, None]), 0.0)
            is_number = is_read[:, :, None] & is_column[None, None, :]
            results = tl.load(partial + place[:, :, None] * HEAD_DIM + column[None, None, :], is_number, 0.0)
            merged += tl.sum(weight[:, :, None] * results, 1)
            total += tl.sum(weight, 1)
        at = (row * NUM_HEADS + head[:, None]) * HEAD_DIM + column[None, :]
        tl.store(out + at, merged / total[:, None], is_head[:, None] & is_column[None, :])
