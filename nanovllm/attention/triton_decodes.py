"""Kernels that attend decodes for TritonAttention: `plan_kernel` lists the splits of their keys, `decode_kernel` and
`grouped_kernel` attend them, and `merge_kernel` merges the partial results.

With a cache in FP8, the kernel of triton_fp8.py takes the place of `decode_kernel`.
"""

from nanovllm.attention.splits import keys_of_item, split_length_of
from nanovllm.attention.triton_keys import attend_keys, slots_of
from nanovllm.ops.dependent_launch import begin, let_next_come, wait
from nanovllm.ops.kernel import jit, tl


@jit
def plan_kernel(
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
def decode_kernel(
    q, k_cache, v_cache, block_tables, context_lens, num_items, item_rows, item_splits, first_items, partial,
    log_sums, scale, q_stride, table_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, IS_BESIDE_PROMPTS: tl.constexpr, WINDOW: tl.constexpr, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs share the list of splits × key/value heads; neighbours read neighbouring heads.

    In a step with prompts, this kernel runs beside the prompts' kernel, which has waited for everything that both read.
    Prompts keep the arithmetic units busy, decodes the memory. The kernel in hopper_prompts.py fills each processor
    that it runs on. Beside it, decodes start only on a processor that has no prompts left.
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
        # evict_last keeps the results in the L2 cache until they are merged, although keys and values pass through it.
        result = partial + place[:, None] * HEAD_DIM + column[None, :]
        tl.store(result, summed / total[:, None], is_member, eviction_policy="evict_last")
        tl.store(log_sums + place, largest + tl.log2(total), member < GROUP)
    if IS_BESIDE_PROMPTS and tl.program_id(0) == 0:
        wait()  # so that this kernel ends after the prompts' kernel


@jit(do_not_specialize=["q_stride", "table_stride"])
def grouped_kernel(
    q, k_cache, v_cache, scales, block_tables, context_lens, num_groups, groups, members, first_items, partial,
    log_sums, scale, q_stride, table_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """Like decode_kernel for splits that several rows share: their queries form one tile."""
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
def merge_kernel(
    partial, log_sums, context_lens, num_decodes, first_items, out, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """One program per row and some heads merges the splits' results, weighted by their sums. Only decodes have
    splits."""
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
