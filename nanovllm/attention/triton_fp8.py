"""Decodes over a KV cache in FP8: the kernel that TritonAttention launches in place of its `_decode_kernel`.

What was cached becomes float16, which e4m3 does without loss and in one instruction for two numbers. Scales stay out of
the products, so that nothing else happens to the numbers. A key's scale multiplies its scores. A value's scale ought to
multiply its weights. It is a power of two, so its exponent is added to the scores instead, before the softmax: weights
then fit float16. The sum of the weights takes the scale out again.
"""

from nanovllm.attention.splits import split_length_of
from nanovllm.ops.dependent_launch import let_next_come, wait
from nanovllm.ops.kernel import jit, tl

# Log2 of the largest weight and of the largest number of a row of queries, when they become float16.
_PEAK_EXPONENT = tl.constexpr(8)
# How the kernel is launched: the fastest of several on an H200.
FP8_LAUNCH = {"num_warps": 1, "num_stages": 3}


@jit
def _attend_fp8_keys(
    queries, query_scales, keys, values, scales, block_table, kv_head, first, last, first_seen,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(the largest sum of a score and its value's exponent, the sum of weights, the sum of weighted values) of keys
    first … last − 1, of which those before `first_seen` do not count; `first` is a multiple of KEYS.

    queries: float16 [GROUP, WIDTH]; query_scales: float32 [GROUP], the scale of scores included.
    """
    column = tl.arange(0, WIDTH)
    is_column = column < HEAD_DIM
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    summed = tl.zeros([GROUP, WIDTH], tl.float32)
    for start in range(tl.multiple_of(first, KEYS), last, KEYS):
        position = start + tl.arange(0, KEYS)
        is_key = (position < last) & (position >= first_seen) if WINDOW else position < last
        if BLOCK_SIZE % KEYS == 0:
            block = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(block_table + position // BLOCK_SIZE, is_key, 0).to(tl.int64)
        place = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        both = tl.load(scales + place, is_key, 0)
        # Numbers behind the last key are read too: they are not NaN, and their weight is 0.
        at = place[:, None] * HEAD_DIM + column[None, :]
        tile = tl.load(keys + at) if WIDTH == HEAD_DIM else tl.load(keys + at, is_column[None, :], 0.0)
        scores = tl.dot(queries, tl.trans(tile.to(tl.float16))) * query_scales[:, None]
        exponent = (both >> 7) & 0xFF
        scores = scores * (both & -65536).to(tl.float32, bitcast=True)[None, :] + (exponent - 127).to(tl.float32)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - (new_largest - _PEAK_EXPONENT)[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[None, :], 1)
        at = (place - position % BLOCK_SIZE) * HEAD_DIM + position % BLOCK_SIZE
        at = at[None, :] + column[:, None] * BLOCK_SIZE
        tile = tl.load(values + at) if WIDTH == HEAD_DIM else tl.load(values + at, is_column[:, None], 0.0)
        summed = tl.dot(weights.to(tl.float16), tl.trans(tile.to(tl.float16)), summed * shrink[:, None])
        largest = new_largest
    return largest, total, summed


@jit(do_not_specialize=["q_stride", "table_stride"])
def decode_fp8_kernel(
    q, keys, values, scales, block_tables, context_lens, num_items, item_rows, item_splits, first_items, partial,
    log_sums, scale, q_stride, table_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, IS_BESIDE_PROMPTS: tl.constexpr, WINDOW: tl.constexpr, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """Like `_decode_kernel` of triton_backend.py. keys, values, scales: LayerCache's."""
    let_next_come()
    if not IS_BESIDE_PROMPTS:
        wait()
    member = tl.arange(0, PADDED_GROUP)
    column = tl.arange(0, WIDTH)
    is_member = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    for work in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        row = tl.load(item_rows + item).to(tl.int64)
        split = tl.load(item_splits + item)
        length = tl.load(context_lens + row)
        split_length = split_length_of(length, SHORTEST, LONGEST)
        first = split * split_length
        last = tl.minimum(first + split_length, length)
        first_seen = tl.maximum(length - WINDOW, 0) if WINDOW else 0
        if WINDOW:
            first = tl.maximum(first, first_seen // KEYS * KEYS)
        head = kv_head * GROUP + member
        given = tl.load(q + row * q_stride + head[:, None] * HEAD_DIM + column[None, :], is_member, 0.0).to(tl.float32)
        query_scales = tl.maximum(tl.max(tl.abs(given), 1), 1e-30) * (1 / 2**_PEAK_EXPONENT)
        largest, total, summed = _attend_fp8_keys(
            (given / query_scales[:, None]).to(tl.float16), query_scales * scale, keys, values, scales,
            block_tables + row * table_stride, kv_head, first, last, first_seen, NUM_KV_HEADS, PADDED_GROUP, HEAD_DIM,
            WIDTH, BLOCK_SIZE, KEYS, WINDOW,
        )  # fmt: skip
        place = (tl.load(first_items + row) + split).to(tl.int64) * NUM_HEADS + head
        result = partial + place[:, None] * HEAD_DIM + column[None, :]
        tl.store(result, summed / total[:, None], is_member, eviction_policy="evict_last")
        tl.store(log_sums + place, largest + tl.log2(total) - _PEAK_EXPONENT, member < GROUP)
    if IS_BESIDE_PROMPTS and tl.program_id(0) == 0:
        wait()  # so that this kernel's end is that of the prompts' kernel too
