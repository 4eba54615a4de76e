"""The warps of the kernel in hopper_prompts.py that attend: each group of four takes one head of an item."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.attention.hopper_loads import item_of_turn


@gluon.jit
def _begin_scores(queries, keys, SCORES: gl.constexpr):
    """Starts the products of queries with a tile of keys."""
    zeros = gl.full([queries.shape[0], keys.shape[0]], 0.0, gl.float32, SCORES)
    return warpgroup_mma(queries, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _as_stored(values, IS_FP8: gl.constexpr):
    """A tile of values, [keys, 128]."""
    if IS_FP8:
        return values.permute((1, 0))
    else:
        return values


@gluon.jit
def _softmax(
    scores, first_key, position, largest, total, scale, IS_MASKED: gl.constexpr, WEIGHTS: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Updates an online softmax with a tile of scores. Returns the weights of this tile, the largest score so far, the
    total of all weights so far, and the factor by which earlier sums shrink."""
    SCORES: gl.constexpr = scores.type.layout
    if IS_MASKED:
        key = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_largest[:, None])
    shrink = gl.exp2(largest - new_largest)
    total = total * shrink + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(dtype), WEIGHTS), new_largest, total, shrink


@gluon.jit
def _attend_tiles(
    begin, end, num_done, queries, keys, values, barriers, position, weights, largest, total, summed, scale,
    IS_MASKED: gl.constexpr, IS_FP8: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
    WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Processes tiles begin … end − 1 of an item: the scores of each, and the values of the tile before it."""
    _queries_there, _queries_free, keys_there, keys_free, values_there, values_free = barriers
    for tile in range(begin, end):
        done = num_done + tile
        stage, before = done % STAGES, (done - 1) % STAGES
        mbarrier.wait(keys_there.index(stage), done // STAGES & 1)
        scores = _begin_scores(queries, keys.index(stage), SCORES)
        mbarrier.wait(values_there.index(before), (done - 1) // STAGES & 1)
        sums = warpgroup_mma(weights, _as_stored(values.index(before), IS_FP8), summed, is_async=True)
        scores = warpgroup_mma_wait(1, (scores,))
        weights, largest, total, shrink = _softmax(
            scores, tile * keys.shape[1], position, largest, total, scale, IS_MASKED, WEIGHTS, queries.dtype
        )
        summed = warpgroup_mma_wait(0, (sums,))
        # Each release waits for all warps of the group. The first release synchronizes them, so the second is cheap.
        mbarrier.arrive(keys_free.index(stage), count=1)
        mbarrier.arrive(values_free.index(before), count=1)
        summed = summed * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    return weights, largest, total, summed


@gluon.jit
def _clear_behind(values, num_left):
    """Zeroes the rows of a tile of values from `num_left` on. They may hold NaN, which a weight of 0 does not remove.
    Both groups write the same zeros, in any order."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, values.shape[0], gl.SliceLayout(1, ROWS))
    values.store(gl.where((row < num_left)[:, None], values.load(ROWS), 0.0))
    fence_async_shared()


@gluon.jit
def _write(out, result, first, num_rows, stride):
    """Writes the first rows of a tile's result, [queries, 128], to rows `first` + row × stride of `out`."""
    HEAD_DIM: gl.constexpr = result.shape[1]
    # Like the layout of a product, but a thread has four successive columns, not two, and four threads write whole
    # sectors of 32 bytes.
    OUTPUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], result.shape,
    )  # fmt: skip
    row = gl.arange(0, result.shape[0], gl.SliceLayout(1, OUTPUT))
    to = (first.to(gl.int64) + row * stride)[:, None] * HEAD_DIM
    to += gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUTPUT))[None, :]
    gl.store(out + to, gl.convert_layout(result.to(out.dtype.element_ty), OUTPUT), (row < num_rows)[:, None])


@gluon.jit
def attend_all(
    out, queries, keys, values, barriers, query_tiles, num_items, scale, WHICH: gl.constexpr, IS_FP8: gl.constexpr,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr, IS_DECODE: gl.constexpr,
):  # fmt: skip
    """A group of four warps, which attends the first or the second head of each item, or a decode's heads, one per row
    of its tile."""
    queries_there, queries_free, keys_there, keys_free, values_there, values_free = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    num_done, num_taken = 0, 0  # tiles of keys, and items
    first_token, num_queries, first_position, _row, head, second_head = item_of_turn(
        0, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS, IS_DECODE
    )
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        # Read now, so that no warp waits for it later.
        next_token, next_number, next_position, _row, next_head, next_second_head = item_of_turn(
            turn + 1, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS, IS_DECODE
        )
        if num_queries > 0:
            num_keys = first_position + num_queries
            num_tiles = (num_keys + KEYS - 1) // KEYS
            query_stage = num_taken % QUERY_STAGES
            row = gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))
            if IS_DECODE:
                mine = queries.index(query_stage)
                position = first_position + row * 0
            else:
                mine = queries.index(query_stage * 2 + WHICH)
                position = first_position + row
            largest = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.full([QUERIES], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
            summed = gl.full([QUERIES, HEAD_DIM], 0.0, gl.float32, SUMS)
            mbarrier.wait(queries_there.index(query_stage), num_taken // QUERY_STAGES & 1)
            mbarrier.wait(keys_there.index(num_done % STAGES), num_done // STAGES & 1)
            scores = warpgroup_mma_wait(0, (_begin_scores(mine, keys.index(num_done % STAGES), SCORES),))
            mbarrier.arrive(keys_free.index(num_done % STAGES), count=1)
            weights, largest, total, _shrink = _softmax(
                scores, 0, position, largest, total, scale, True, WEIGHTS, mine.dtype
            )
            # Every query sees all keys of the tiles before this one.
            first_masked = gl.maximum((first_position + 1) // KEYS, 1)
            weights, largest, total, summed = _attend_tiles(
                1, first_masked, num_done, mine, keys, values, barriers, position, weights, largest, total, summed,
                scale, False, IS_FP8, STAGES, SCORES, SUMS, WEIGHTS,
            )  # fmt: skip
            weights, largest, total, summed = _attend_tiles(
                first_masked, num_tiles, num_done, mine, keys, values, barriers, position, weights, largest, total,
                summed, scale, True, IS_FP8, STAGES, SCORES, SUMS, WEIGHTS,
            )  # fmt: skip
            mbarrier.arrive(queries_free.index(query_stage), count=1)
            num_done += num_tiles
            num_taken += 1
            last = (num_done - 1) % STAGES
            mbarrier.wait(values_there.index(last), (num_done - 1) // STAGES & 1)
            num_left = num_keys - (num_tiles - 1) * KEYS
            if not IS_FP8:  # noqa: SIM102 (one is known when the kernel is compiled)
                if num_left < KEYS:
                    _clear_behind(values.index(last), num_left)
            sums = warpgroup_mma(weights, _as_stored(values.index(last), IS_FP8), summed, is_async=True)
            summed = warpgroup_mma_wait(0, (sums,))
            mbarrier.arrive(values_free.index(last), count=1)
            result = summed / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
            if IS_DECODE:
                _write(out, result, first_token * NUM_HEADS + head, NUM_HEADS // NUM_KV_HEADS, 1)
            elif WHICH == 0:
                _write(out, result, first_token * NUM_HEADS + head, num_queries, NUM_HEADS)
            elif second_head > head:
                _write(out, result, first_token * NUM_HEADS + second_head, num_queries, NUM_HEADS)
        first_token, num_queries, first_position = next_token, next_number, next_position
        head, second_head = next_head, next_second_head
