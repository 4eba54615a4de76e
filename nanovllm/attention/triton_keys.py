"""Functions that process paged keys and values, tile by tile, with the online softmax of FlashAttention (Dao, 2023), in
base 2. Our kernels of prompts and of decodes call them."""

from nanovllm.ops.kernel import jit, tl

LOG2_E = 1.4426950408889634


@jit
def slots_of(block_table, position, is_key, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """int64 [KEYS], the slots of the keys at these successive positions."""
    if BLOCK_SIZE % KEYS == 0:  # all in one block
        first = tl.min(position, 0)
        block = tl.load(block_table + first // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + position % BLOCK_SIZE
    block = tl.load(block_table + position // BLOCK_SIZE, is_key, 0).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@jit
def online_softmax(scores, scale, largest, total, summed, CAN_BE_EMPTY: tl.constexpr):
    """Updates an online softmax with one tile of scores. Returns the tile's weights, the largest score so far, and
    `total` and `summed` rescaled to that score. CAN_BE_EMPTY: a query may not have seen any key yet."""
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    shift = new_largest
    if CAN_BE_EMPTY:
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores * scale - shift[:, None])
    shrink = tl.exp2(largest - shift)
    return weights, new_largest, total * shrink + tl.sum(weights, 1), summed * shrink[:, None]


@jit
def attend_keys(
    queries, query_position, largest, total, summed, k_cache, v_cache, scales, block_table, kv_head, scale, first, last,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, IS_MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attends keys first … last − 1 with a tile of queries. If IS_MASKED, a query sees only keys up to its own position
    and in its window, if it has one. scales: LayerCache's, or None."""
    column = tl.arange(0, WIDTH)
    for start in range(first, last, KEYS):
        position = start + tl.arange(0, KEYS)
        is_key = position < last
        slot = slots_of(block_table, position, is_key, BLOCK_SIZE, KEYS)
        is_read = is_key[:, None] & (column < HEAD_DIM)[None, :]
        if scales is None:
            at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
            keys = tl.load(k_cache + at, is_read, 0.0)
        else:
            of_head = slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head
            place = slot % BLOCK_SIZE
            row = of_head * BLOCK_SIZE + place
            both_scales = tl.load(scales + row, is_key, 0)
            key_scales = (both_scales & -65536).to(tl.float32, bitcast=True)
            keys = tl.load(k_cache + row[:, None] * HEAD_DIM + column[None, :], is_read, 0.0)
            keys = (keys.to(tl.float32) * key_scales[:, None]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if IS_MASKED:
            scores = tl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
            if WINDOW:
                scores = tl.where(position[None, :] > query_position[:, None] - WINDOW, scores, float("-inf"))
        weights, largest, total, summed = online_softmax(
            scores, scale, largest, total, summed, IS_MASKED and WINDOW > 0
        )
        if scales is None:
            values = tl.load(v_cache + at, is_read, 0.0)
        else:
            value_scales = (both_scales << 16).to(tl.float32, bitcast=True)
            at = of_head[:, None] * (HEAD_DIM * BLOCK_SIZE) + column[None, :] * BLOCK_SIZE + place[:, None]
            values = tl.load(v_cache + at, is_read, 0.0)
            values = (values.to(tl.float32) * value_scales[:, None]).to(queries.dtype)
        summed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return largest, total, summed
