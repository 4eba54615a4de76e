"""Decodes over a KV cache in FP8: the kernel that TritonAttention launches in place of `decode_kernel`.

No cached number is converted: keys, which are integers, are multiplied by integers, and values by numbers in e4m3. A
Hopper GPU's tensor cores multiply tiles of at least 64 rows from shared memory by few columns. So keys (and transposed
values) are the rows; a group's queries (and weights) are the columns. Each query and each weight takes two columns of
8-bit numbers: the rounded number, and the remainder times a factor. Together they have about the precision of bfloat16.
Tensor cores sum products of integers exactly. They sum products in e4m3 less precisely than float32, and only over one
tile of keys; the kernel adds the tiles' sums in float32.

A key's scale multiplies its scores. A value's scale would have to multiply its weights. It is a power of two, so its
exponent is added to the scores instead, before the softmax: weights then fill the range of e4m3. In the sum of the
weights, each weight is divided by its scale again.
"""

from typing import Any

from nanovllm.attention.splits import keys_of_item
from nanovllm.ops.dependent_launch import let_next_come, wait
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.quantize import TO_INTEGER, subnormal_or, to_e4m3, to_int8

# Log2 of the largest attention weight before it becomes e4m3.
_PEAK_EXPONENT = tl.constexpr(7)
# Rounding leaves a remainder. That of a weight is multiplied by 32, because e4m3 has no number between 0 and 2^-9, and
# many small weights beside a large one would vanish. That of a query is at most 0.5, so times 254 it fills int8.
_REMAINDER_OF_WEIGHT = tl.constexpr(32.0)
_REMAINDER_OF_QUERY = tl.constexpr(254.0)
_PEAK_OF_QUERY = tl.constexpr(127.0)  # a query's largest number, before it becomes int8
# The least number of a group's heads in a product, in two columns each; smaller groups are padded. Triton's products
# with fewer than 16 columns were not tried.
MIN_GROUP = 8


def keys_of_tile(block_size: int) -> int:
    """Keys per tile. A tile is part of one block."""
    return 64 if block_size % 64 == 0 else 32


def descriptors(cache: LayerCache, width: int) -> tuple[Any, Any]:
    """Tensor descriptors of tiles of keys, [keys_of_tile, width], and of transposed values, [width, keys_of_tile].

    width: see `padded_head_dim`.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_keys = keys_of_tile(cache.block_size)
    num_rows = cache.keys.shape[0] * cache.num_kv_heads
    sizes = cache.block_size, cache.head_dim
    of_keys = TensorDescriptor(cache.keys, [num_rows * sizes[0], sizes[1]], [sizes[1], 1], [num_keys, width])
    of_values = TensorDescriptor(cache.values, [num_rows * sizes[1], sizes[0]], [sizes[0], 1], [width, num_keys])
    return of_keys, of_values


def padded_head_dim(head_dim: int) -> int:
    """A power of two that products in FP8 can sum over."""
    return max(32, triton.next_power_of_2(head_dim))


def launch_options(width: int) -> dict[str, int]:
    """Warps and pipeline stages: the fastest of those measured on an H200."""
    return {"num_warps": 4, "num_stages": 5 if width <= 128 else 3}


@jit
def _side_by_side(rounded, remainders):
    """[size, columns] each -> [size, 2 × columns]"""
    return tl.join(rounded, remainders).permute(0, 2, 1).reshape(rounded.shape[0], 2 * rounded.shape[1])


@jit
def _twice_in_int8(x):
    """float32 [size, columns], at most 127 -> int8 [size, 2 × columns]: the rounded numbers, then the remainders times
    _REMAINDER_OF_QUERY."""
    rounded = (x + TO_INTEGER) - TO_INTEGER
    return _side_by_side(to_int8(x), to_int8((x - rounded) * _REMAINDER_OF_QUERY))


@jit
def _twice_in_e4m3(x):
    """float32 [size, columns], below 256 -> e4m3 [size, 2 × columns]: the rounded numbers, then the remainders times
    _REMAINDER_OF_WEIGHT."""
    # `rounded` comes from the bits, because the result of `to_e4m3` may not have a second use.
    rounded = ((x.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
    rounded = subnormal_or(x, rounded)
    return _side_by_side(to_e4m3(rounded), to_e4m3((x - rounded) * _REMAINDER_OF_WEIGHT))


@jit
def _sum_of_both(product, FACTOR: tl.constexpr):
    """[size, 2 × columns] -> float32 [size, columns]; FACTOR: the factor of the remainders."""
    rounded, remainders = tl.split(product.reshape(product.shape[0], 2, product.shape[1] // 2).permute(0, 2, 1))
    return rounded.to(tl.float32) + remainders.to(tl.float32) * (1 / FACTOR)


@jit
def _scales_of_queries(queries):
    """float32 [WIDTH, GROUP] -> [GROUP]: the scales that make each query's largest number 127, or less if it is below
    2^-100. A query with a NaN or an infinity gets such a scale, because int8 has neither."""
    peak = tl.max(queries.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)  # the bits of a NaN are larger than any number's
    least = (127 - 100) << 23  # 2^-100, so that a query of zeros is not divided by 0
    return tl.maximum(peak, least).to(tl.float32, bitcast=True) * (1 / _PEAK_OF_QUERY)


@jit
def _attend_fp8_keys(
    queries, query_scales, keys, values, scales, block_table, kv_head, first, last, first_seen,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attends keys first … last − 1, except those before `first_seen`; `first` is a multiple of KEYS. Returns (the
    largest sum of a score and its value's exponent, the sum of weights, the sum of weighted values).

    queries: as `_twice_in_int8` gives them, [WIDTH, 2 × GROUP]; query_scales: float32 [GROUP], the scale of scores
        included. keys, values: as `descriptors` gives them.
    """
    key = tl.arange(0, KEYS)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    totals = tl.zeros([KEYS, GROUP], tl.float32)
    summed = tl.zeros([WIDTH, 2 * GROUP], tl.float32)
    for start in range(first, last, KEYS):
        block, place = tl.load(block_table + start // BLOCK_SIZE), start % BLOCK_SIZE
        of_head, num_left = block * NUM_KV_HEADS + kv_head, last - start
        is_seen = (key < num_left) & (key >= first_seen - start) if WINDOW else key < num_left
        both = tl.load(scales + (of_head.to(tl.int64) * BLOCK_SIZE + place) + key, is_seen, 0)
        exponent = (both >> 7) & 0xFF
        key_scales = (both & -65536).to(tl.float32, bitcast=True)
        scores = _sum_of_both(tl.dot(keys.load([of_head * BLOCK_SIZE + place, 0]), queries), _REMAINDER_OF_QUERY)
        scores = scores * (key_scales[:, None] * query_scales[None, :]) + (exponent - 127).to(tl.float32)[:, None]
        # The tile may reach past the last key. Its numbers there are not NaN, and their weights are 0.
        scores = tl.where(is_seen[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp2(scores - (new_largest - _PEAK_EXPONENT)[None, :])
        shrink = tl.exp2(largest - new_largest)
        # An infinite scale (exponent 255) gives −infinity here. log2 of the sum is then NaN, and so is the row.
        totals = totals * shrink[None, :] + weights * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        product = tl.dot(values.load([of_head * HEAD_DIM, place]), _twice_in_e4m3(weights))
        shrink_of_both = tl.join(shrink, shrink).permute(1, 0).reshape(2 * GROUP)
        summed = summed * shrink_of_both[None, :] + product
        largest = new_largest
    return largest, tl.sum(totals, 0), _sum_of_both(summed, _REMAINDER_OF_WEIGHT)


@jit(do_not_specialize=["q_stride", "table_stride"])
def decode_fp8_kernel(
    q, keys, values, scales, block_tables, context_lens, num_items, item_rows, item_splits, first_items, partial,
    log_sums, scale, q_stride, table_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, IS_BESIDE_PROMPTS: tl.constexpr, WINDOW: tl.constexpr, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """Like `decode_kernel` of triton_decodes.py. keys, values: as `descriptors` gives them; scales: LayerCache's."""
    let_next_come()
    if not IS_BESIDE_PROMPTS:
        wait()
    member = tl.arange(0, PADDED_GROUP)
    column = tl.arange(0, WIDTH)
    is_member = (member < GROUP)[None, :] & (column < HEAD_DIM)[:, None]
    for work in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        row, split, first, last, first_seen = keys_of_item(
            item_rows, item_splits, context_lens, item, KEYS, WINDOW, SHORTEST, LONGEST
        )
        head = kv_head * GROUP + member
        given = tl.load(q + row * q_stride + head[None, :] * HEAD_DIM + column[:, None], is_member, 0.0).to(tl.float32)
        query_scales = _scales_of_queries(given)
        largest, total, summed = _attend_fp8_keys(
            _twice_in_int8(given / query_scales[None, :]), query_scales * scale, keys, values, scales,
            block_tables + row * table_stride, kv_head, first, last, first_seen, NUM_KV_HEADS, PADDED_GROUP, HEAD_DIM,
            WIDTH, BLOCK_SIZE, KEYS, WINDOW,
        )  # fmt: skip
        place = (tl.load(first_items + row) + split).to(tl.int64) * NUM_HEADS + head
        result = partial + place[None, :] * HEAD_DIM + column[:, None]
        tl.store(result, summed / total[None, :], is_member, eviction_policy="evict_last")
        tl.store(log_sums + place, largest + tl.log2(total) - _PEAK_EXPONENT, member < GROUP)
    if IS_BESIDE_PROMPTS and tl.program_id(0) == 0:
        wait()  # so that this kernel ends after the prompts' kernel
