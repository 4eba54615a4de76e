"""A candidate for attention of prompts on Hopper GPUs, which prompt_attention.py compares with what the engine uses.

It follows the scheme of FlashAttention 3 (Shah et al., 2024) in Gluon (Triton 3.6 and later): one warp fetches tiles of
keys and values, and two groups of four warps, one for each of two heads with the same keys, take them in. While a group
calculates the weights of a pair of tiles, its tensor cores multiply the weights of the pair before with their values.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.attention.metadata import QUERY_TILE, AttentionMetadata

_KEYS, _STAGES = 64, 2
# Its name changed in Triton 3.9.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def attend_prompts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> None:
    """Attends the queries of `metadata.query_tiles` and writes to `out`.

    Args:
        q: [num_tokens, num_heads, head_dim], a part of a product; bfloat16 or float16, head_dim 64 or 128, and an even
            number of heads for each key head.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], with blocks of a multiple of 64.
        scale: of the scores, in base 2.
    """
    (_, num_heads, head_dim), num_kv_heads, tiles = q.shape, k_cache.shape[2], metadata.query_tiles
    width, dtype = num_kv_heads * head_dim, gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([_KEYS, head_dim], dtype)
    descriptors = [
        TensorDescriptor(cache, [cache.numel() // width, width], [width, 1], [_KEYS, head_dim], layout)
        for cache in (k_cache, v_cache)
    ]
    _kernel[(num_heads // 2, len(tiles))](
        q, *descriptors, out, metadata.block_tables, tiles, scale, q.stride(0), metadata.block_tables.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=metadata.block_size,
        QUERIES=QUERY_TILE, KEYS=_KEYS, STAGES=_STAGES, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _produce(
    keys_by_slot, values_by_slot, keys, values, keys_there, keys_free, values_there, values_free, block_table, at_head,
    num_pairs, last_block, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetches one pair of tiles after the other, as soon as both groups have done with what was in its place."""
    for pair in range(num_pairs):
        stage, phase = pair % STAGES, (pair // STAGES & 1) ^ 1
        first, second = pair * 2 * KEYS, pair * 2 * KEYS + KEYS
        # The second tile may lie behind the last block; then any other will do, as its keys are masked.
        slot = gl.load(block_table + first // BLOCK_SIZE) * BLOCK_SIZE + first % BLOCK_SIZE
        next_block = gl.minimum(second // BLOCK_SIZE, last_block)
        next_slot = gl.load(block_table + next_block) * BLOCK_SIZE + second % BLOCK_SIZE
        mbarrier.wait(keys_free.index(stage), phase)
        mbarrier.expect(keys_there.index(stage), 2 * keys_by_slot.block_type.nbytes)
        _fetch(keys_by_slot, [slot, at_head], keys_there.index(stage), keys.index(stage * 2))
        _fetch(keys_by_slot, [next_slot, at_head], keys_there.index(stage), keys.index(stage * 2 + 1))
        mbarrier.wait(values_free.index(stage), phase)
        mbarrier.expect(values_there.index(stage), 2 * values_by_slot.block_type.nbytes)
        _fetch(values_by_slot, [slot, at_head], values_there.index(stage), values.index(stage * 2))
        _fetch(values_by_slot, [next_slot, at_head], values_there.index(stage), values.index(stage * 2 + 1))


@gluon.jit
def _begin_scores(queries, keys, stage, zeros):
    first = warpgroup_mma(queries, keys.index(stage * 2).permute((1, 0)), zeros, use_acc=False, is_async=True)
    second = warpgroup_mma(queries, keys.index(stage * 2 + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return first, second


@gluon.jit
def _softmax(
    first_scores, second_scores, first_key, position, largest, total, scale, IS_MASKED: gl.constexpr,
    KEYS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """The weights of a pair of tiles, and by how much earlier sums shrink."""
    if IS_MASKED:
        key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        first_scores = gl.where(key[None, :] <= position[:, None], first_scores, float("-inf"))
        second_scores = gl.where(key[None, :] + KEYS <= position[:, None], second_scores, float("-inf"))
    new_largest = gl.maximum(largest, gl.maximum(gl.max(first_scores, 1), gl.max(second_scores, 1)) * scale)
    first_weights = gl.exp2(first_scores * scale - new_largest[:, None])
    second_weights = gl.exp2(second_scores * scale - new_largest[:, None])
    shrink = gl.exp2(largest - new_largest)
    total = total * shrink + gl.sum(first_weights + second_weights, 1)
    return first_weights, second_weights, new_largest, total, shrink


@gluon.jit
def _attend_pairs(
    begin, end, queries, keys, values, keys_there, keys_free, values_there, values_free, position, first_weights,
    second_weights, largest, total, summed, zeros, scale, IS_MASKED: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Takes in the scores of pairs begin … end, and the values of the pair before each."""
    for pair in range(begin, end):
        stage, before = pair % STAGES, (pair - 1) % STAGES
        mbarrier.wait(keys_there.index(stage), pair // STAGES & 1)
        first, second = _begin_scores(queries, keys, stage, zeros)
        mbarrier.wait(values_there.index(before), (pair - 1) // STAGES & 1)
        sums = warpgroup_mma(first_weights, values.index(before * 2), summed, is_async=True)
        sums = warpgroup_mma(second_weights, values.index(before * 2 + 1), sums, is_async=True)
        first, second = warpgroup_mma_wait(2, (first, second))
        mbarrier.arrive(keys_free.index(stage), count=1)
        first, second, largest, total, shrink = _softmax(
            first, second, pair * 2 * KEYS, position, largest, total, scale, IS_MASKED, KEYS, SCORES
        )
        summed = warpgroup_mma_wait(0, (sums,))
        mbarrier.arrive(values_free.index(before), count=1)
        summed = summed * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        first_weights = gl.convert_layout(first.to(queries.dtype), WEIGHTS)
        second_weights = gl.convert_layout(second.to(queries.dtype), WEIGHTS)
    return first_weights, second_weights, largest, total, summed


@gluon.jit
def _clear_behind(tile, num_left, KEYS: gl.constexpr, ROWS: gl.constexpr):
    """Zeroes a tile's rows from `num_left` on, which may hold NaN."""
    row = gl.arange(0, KEYS, gl.SliceLayout(1, ROWS))
    tile.store(gl.where((row < num_left)[:, None], tile.load(ROWS), 0.0))


@gluon.jit
def _consume(
    q, out, queries, keys, values, keys_there, keys_free, values_there, values_free, first_token, num_queries,
    first_position, head, num_pairs, scale, q_stride, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One head's queries of a tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    query = gl.arange(0, QUERIES, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ROWS))
    at = (first_token + query)[:, None] * q_stride + head * HEAD_DIM + column[None, :]
    queries.store(gl.load(q + at, (query < num_queries)[:, None], 0.0))
    fence_async_shared()
    position = first_position + gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))
    largest = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.full([QUERIES], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    zeros = gl.full([QUERIES, KEYS], 0.0, gl.float32, SCORES)
    summed = gl.full([QUERIES, HEAD_DIM], 0.0, gl.float32, SUMS)
    mbarrier.wait(keys_there.index(0), 0)
    first, second = _begin_scores(queries, keys, 0, zeros)
    first, second = warpgroup_mma_wait(0, (first, second))
    mbarrier.arrive(keys_free.index(0), count=1)
    first, second, largest, total, _ = _softmax(first, second, 0, position, largest, total, scale, True, KEYS, SCORES)
    first_weights = gl.convert_layout(first.to(queries.dtype), WEIGHTS)
    second_weights = gl.convert_layout(second.to(queries.dtype), WEIGHTS)
    # Every query sees all keys of the pairs before this one.
    first_masked = gl.maximum((first_position + 1) // (2 * KEYS), 1)
    first_weights, second_weights, largest, total, summed = _attend_pairs(
        1, first_masked, queries, keys, values, keys_there, keys_free, values_there, values_free, position,
        first_weights, second_weights, largest, total, summed, zeros, scale, False, KEYS, STAGES, SCORES, SUMS, WEIGHTS,
    )  # fmt: skip
    first_weights, second_weights, largest, total, summed = _attend_pairs(
        first_masked, num_pairs, queries, keys, values, keys_there, keys_free, values_there, values_free, position,
        first_weights, second_weights, largest, total, summed, zeros, scale, True, KEYS, STAGES, SCORES, SUMS, WEIGHTS,
    )  # fmt: skip
    last = (num_pairs - 1) % STAGES
    mbarrier.wait(values_there.index(last), (num_pairs - 1) // STAGES & 1)
    num_left = first_position + num_queries - (num_pairs - 1) * 2 * KEYS
    if num_left < 2 * KEYS:  # both groups write the same
        _clear_behind(values.index(last * 2), num_left, KEYS, ROWS)
        _clear_behind(values.index(last * 2 + 1), num_left - KEYS, KEYS, ROWS)
        fence_async_shared()
    sums = warpgroup_mma(first_weights, values.index(last * 2), summed, is_async=True)
    sums = warpgroup_mma(second_weights, values.index(last * 2 + 1), sums, is_async=True)
    summed = warpgroup_mma_wait(0, (sums,))
    summed = summed / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    row = gl.arange(0, QUERIES, gl.SliceLayout(1, SUMS))
    to = (first_token + row)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    to += gl.arange(0, HEAD_DIM, gl.SliceLayout(0, SUMS))[None, :]
    gl.store(out + to, summed.to(out.dtype.element_ty), (row < num_queries)[:, None])


@gluon.jit(do_not_specialize=["q_stride", "table_stride"])
def _kernel(
    q, keys_by_slot, values_by_slot, out, block_tables, query_tiles, scale, q_stride, table_stride,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program per tile of a sequence's queries and two heads."""
    head = gl.program_id(0) * 2
    tile = query_tiles + gl.program_id(1) * 4
    num_queries = gl.load(tile + 1)
    if num_queries > 0:
        first_token, first_position = gl.load(tile).to(gl.int64), gl.load(tile + 2)
        block_table = block_tables + gl.load(tile + 3).to(gl.int64) * table_stride
        num_keys = first_position + num_queries
        num_pairs = (num_keys + 2 * KEYS - 1) // (2 * KEYS)
        at_head = head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM
        dtype: gl.constexpr = keys_by_slot.dtype
        layout: gl.constexpr = keys_by_slot.layout
        queries = gl.allocate_shared_memory(dtype, [2, QUERIES, HEAD_DIM], layout)
        keys = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, HEAD_DIM], layout)
        values = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, HEAD_DIM], layout)
        keys_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        values_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(keys_there.index(stage), count=1)
            mbarrier.init(values_there.index(stage), count=1)
            mbarrier.init(keys_free.index(stage), count=2)
            mbarrier.init(values_free.index(stage), count=2)
        gl.warp_specialize(
            [
                (_consume, (
                    q, out, queries.index(0), keys, values, keys_there, keys_free, values_there, values_free,
                    first_token, num_queries, first_position, head, num_pairs, scale, q_stride, NUM_HEADS, HEAD_DIM,
                    QUERIES, KEYS, STAGES,
                )),
                (_consume, (
                    q, out, queries.index(1), keys, values, keys_there, keys_free, values_there, values_free,
                    first_token, num_queries, first_position, head + 1, num_pairs, scale, q_stride, NUM_HEADS,
                    HEAD_DIM, QUERIES, KEYS, STAGES,
                )),
                (_produce, (
                    keys_by_slot, values_by_slot, keys, values, keys_there, keys_free, values_there, values_free,
                    block_table, at_head, num_pairs, (num_keys - 1) // BLOCK_SIZE, BLOCK_SIZE, KEYS, STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
