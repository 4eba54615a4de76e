"""Attention of prompts on Hopper GPUs, in Gluon, the lower-level language of Triton 3.6 and later.

The schedule is that of FlashAttention 3 (Shah et al., 2024). In each program, one warp fetches queries, keys and values
with the copy engine (TMA), and two groups of four warps attend two heads that have the same keys. A group starts two
products at once: its queries with a tile of keys, and the weights of the tile before with that tile's values. While the
group calculates weights, the tensor cores work for the other group. There are no more programs than processors. Each
program takes its share of a list of items (a tile of queries and two heads). The next item's data arrives while the
program writes the result of the current one.

With a cache in FP8, another group of four warps converts the fetched tiles of keys and values to the queries' dtype,
and multiplies them by their scales. Then the schedule is the same.

`triton_prompts.attend_prompts` calls this kernel in layers without a window, if `has_hopper_kernel`. Its twin is
`_prefill_kernel` in triton_prompts.py.
"""

from functools import cache
from typing import Any

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.attention.metadata import QUERY_TILE, AttentionMetadata
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.quantize import E4M3

# A tile of keys or values is fetched in boxes of 64 rows × 64 columns. A box lies in one block. In shared memory, the
# boxes with a tile's first 64 columns precede the others, because the tensor cores read a tile in this order.
_KEYS, _BOX = 128, 64
# Shared memory holds _STAGES tiles of keys, as many tiles of values, and _QUERY_STAGES pairs of query tiles. With three
# and one instead, long prompts were not faster, and short ones were slower.
_STAGES, _QUERY_STAGES = 2, 2
_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int8: gl.int8,
    E4M3: gl.float8e4nv,
}
CONSTANTS = {"QUERIES": QUERY_TILE, "KEYS": _KEYS, "STAGES": _STAGES, "QUERY_STAGES": _QUERY_STAGES}
# What is fetched in FP8 takes shared memory too.
FP8_CONSTANTS = CONSTANTS | {"QUERY_STAGES": 1}
_IS_DEPENDENT = gl.constexpr("launch_pdl" in LAUNCH_OPTIONS)
# Triton 3.8 renamed async_copy_global_to_shared, and Triton 3.9 renamed _reinterpret.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_SharedMemory = gl.shared_memory_descriptor
_reinterpret = _SharedMemory.reinterpret if hasattr(_SharedMemory, "reinterpret") else _SharedMemory._reinterpret


def attend_prompts(
    q: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> None:
    """Like `triton_prompts.attend_prompts`, for 16-bit heads of 128, blocks of a multiple of 64, and no window.

    If an odd number of heads has the same keys, both groups of warps attend the last one, and the first writes it.

    scale: of the scores, in base 2.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads, tiles = q.shape, cache.num_kv_heads, metadata.query_tiles
    assert tiles is not None
    num_items = len(tiles) * num_kv_heads * -(-(num_heads // num_kv_heads) // 2)
    layout = gl.NVMMASharedLayout.get_default_for([_BOX, _BOX], _DTYPES[q.dtype])
    by_token = TensorDescriptor(q, [num_tokens, num_heads * head_dim], [q.stride(0), 1], [QUERY_TILE, head_dim], layout)
    _attend_prompts_kernel[(min(_num_processors(q.device), num_items),)](
        by_token, *_descriptors(cache), out, metadata.block_tables, tiles, scale, num_items,
        metadata.block_tables.stride(0), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=metadata.block_size, num_warps=4, **(FP8_CONSTANTS if cache.is_fp8 else CONSTANTS), **LAUNCH_OPTIONS,
    )  # fmt: skip


def _descriptors(cache: LayerCache) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor | None]:
    """Of keys, values and scales. In FP8, rows are blocks × heads × (keys or head_dim)."""
    row = cache.num_kv_heads * cache.head_dim
    widths = (cache.head_dim, cache.block_size) if cache.is_fp8 else (row, row)
    box = [_BOX, _BOX]
    layouts = (gl.NVMMASharedLayout.get_default_for(box, _DTYPES[numbers.dtype]) for numbers in cache[:2])
    keys, values = (
        TensorDescriptor(numbers, [numbers.numel() // width, width], [width, 1], box, layout)
        for numbers, width, layout in zip(cache[:2], widths, layouts, strict=True)
    )
    if cache.scales is None:
        return keys, values, None
    size = cache.block_size
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return (
        keys,
        values,
        TensorDescriptor(cache.scales, [cache.scales.numel() // size, size], [size, 1], [1, _BOX], plain),
    )


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@gluon.jit
def _item(turn, query_tiles, num_items, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr):
    """What this program does in a turn: the tile's first token, number of queries, first position and row, and the
    heads of both groups. If no work is left, the number of queries is 0.

    The tiles that see the most keys come first. Turns alternate in direction: the program that gets the longest item of
    one turn gets the shortest of the next.
    """
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    item = turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
    place = gl.minimum(item, num_items - 1)
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    NUM_PAIRS: gl.constexpr = (GROUP + 1) // 2
    tile = query_tiles + place // (NUM_KV_HEADS * NUM_PAIRS) * 4
    num_queries = gl.where(item < num_items, gl.load(tile + 1), 0)
    first_of_pair = place % NUM_PAIRS * 2
    head = place // NUM_PAIRS % NUM_KV_HEADS * GROUP + first_of_pair
    second_head = gl.where(first_of_pair + 1 < GROUP, head + 1, head)
    return gl.load(tile), num_queries, gl.load(tile + 2), gl.load(tile + 3), head, second_head


@gluon.jit
def _boxes(tile, BOX: gl.constexpr):
    """A tile as [number of boxes, BOX, BOX]."""
    SHAPE: gl.constexpr = [tile.shape[0] * tile.shape[1] // (BOX * BOX), BOX, BOX]
    return _reinterpret(tile, tile.dtype, SHAPE, tile.layout)


@gluon.jit
def _fetch_tile(
    by_row, scales_by_row, tiles, scales, barriers, stage, block_table, first_key, num_keys, kv_head,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, ARE_KEYS: gl.constexpr,
):  # fmt: skip
    """Fetches the boxes of a stage's tile of keys or of values, and in FP8 their scales."""
    tile, is_there = tiles.index(stage), barriers.index(stage)
    BOX: gl.constexpr = by_row.block_type.shape[0]
    NUM_BOXES: gl.constexpr = tile.shape[0] // BOX
    boxes = _boxes(tile, BOX)
    num_bytes: gl.constexpr = boxes.shape[0] * by_row.block_type.nbytes
    if scales_by_row is None:
        mbarrier.expect(is_there, num_bytes)
    else:
        mbarrier.expect(is_there, num_bytes + NUM_BOXES * scales_by_row.block_type.nbytes)
    for box in gl.static_range(NUM_BOXES):
        key = first_key + box * BOX
        # A box may lie behind the last block. Any block will do: its keys are masked, its values cleared.
        block = gl.load(block_table + gl.minimum(key // BLOCK_SIZE, (num_keys - 1) // BLOCK_SIZE))
        of_head, place = block * NUM_KV_HEADS + kv_head, key % BLOCK_SIZE
        if scales_by_row is not None:
            _fetch(scales_by_row, [of_head, place], is_there, scales.index(stage * NUM_BOXES + box))
        for part in gl.static_range(boxes.shape[0] // NUM_BOXES):
            if scales_by_row is None:
                at = [block * BLOCK_SIZE + place, kv_head * HEAD_DIM + part * BOX]
            elif ARE_KEYS:
                at = [of_head * BLOCK_SIZE + place, part * BOX]
            else:  # transposed
                at = [of_head * HEAD_DIM + part * BOX, place]
            _fetch(by_row, at, is_there, boxes.index(part * NUM_BOXES + box))


@gluon.jit
def _fetch_all(
    q_by_token, keys_by_row, values_by_row, scales_by_row, queries, keys, values, key_scales, value_scales, barriers,
    block_tables, query_tiles, num_items, table_stride, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that fetches. It puts data into a stage as soon as both groups have released it."""
    queries_there, queries_free, keys_there, keys_free, values_there, values_free = barriers
    num_done, num_taken = 0, 0  # tiles of keys, and items
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        first_token, num_queries, first_position, row, head, second_head = _item(
            turn, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS
        )
        if num_queries > 0:
            block_table = block_tables + row.to(gl.int64) * table_stride
            num_keys = first_position + num_queries
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            for first_key in range(0, num_keys, KEYS):
                stage, phase = num_done % STAGES, num_done // STAGES & 1 ^ 1
                mbarrier.wait(keys_free.index(stage), phase)
                _fetch_tile(
                    keys_by_row, scales_by_row, keys, key_scales, keys_there, stage, block_table, first_key, num_keys,
                    kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, True,
                )  # fmt: skip
                if first_key == 0:
                    query_stage = num_taken % QUERY_STAGES
                    is_there = queries_there.index(query_stage)
                    mbarrier.wait(queries_free.index(query_stage), num_taken // QUERY_STAGES & 1 ^ 1)
                    mbarrier.expect(is_there, 2 * q_by_token.block_type.nbytes)
                    _fetch(q_by_token, [first_token, head * HEAD_DIM], is_there, queries.index(query_stage * 2))
                    at = [first_token, second_head * HEAD_DIM]
                    _fetch(q_by_token, at, is_there, queries.index(query_stage * 2 + 1))
                mbarrier.wait(values_free.index(stage), phase)
                _fetch_tile(
                    values_by_row, scales_by_row, values, value_scales, values_there, stage, block_table, first_key,
                    num_keys, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, False,
                )  # fmt: skip
                num_done += 1
            num_taken += 1


@gluon.jit
def _plus_32896(numbers):
    """int8 -> float32, the number + 32896. Flipping the sign bit adds 128. The byte then goes into the mantissa of
    32768.0. The GPU's own conversion would compete with the exponentials of the softmax for the same units."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 bytes;
        xor.b32 bytes, $4, 0x80808080;
        prmt.b32 $0, bytes, 0x47000000, 0x7404;
        prmt.b32 $1, bytes, 0x47000000, 0x7414;
        prmt.b32 $2, bytes, 0x47000000, 0x7424;
        prmt.b32 $3, bytes, 0x47000000, 0x7434;
        }
        """,
        "=r,=r,=r,=r,r", [numbers], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _convert_keys(fetched, scales, tiles, stage):
    """Writes a stage's tile of keys, whose boxes of integers and scales were fetched."""
    BOX: gl.constexpr = scales.shape[2]
    NUM_BOXES: gl.constexpr = tiles.shape[1] // BOX
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    fetched, boxes = _boxes(fetched.index(stage), BOX), _boxes(tiles.index(stage), BOX)
    for box in gl.static_range(NUM_BOXES):
        bits = scales.index(stage * NUM_BOXES + box).permute((1, 0)).load(NUMBERS) & -65536
        factor = bits.to(gl.float32, bitcast=True)
        for part in gl.static_range(NUM_BOXES):
            numbers = _plus_32896(fetched.index(part * NUM_BOXES + box).load(NUMBERS))
            # The product with 32896 is exact: 8 and 9 significant bits fit into the 24 of float32.
            numbers = gl.fma(numbers, factor, factor * -32896.0)
            boxes.index(part * NUM_BOXES + box).store(numbers.to(tiles.dtype))
    fence_async_shared()


@gluon.jit
def _convert_values(fetched, scales, tiles, stage, num_left):
    """Writes a stage's tile of transposed values, whose boxes in e4m3 and scales were fetched. Values from `num_left`
    on become 0: their scales may be infinite, which a weight of 0 does not remove."""
    BOX: gl.constexpr = scales.shape[2]
    NUM_BOXES: gl.constexpr = tiles.shape[1] // BOX
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    fetched, boxes = _boxes(fetched.index(stage), BOX), _boxes(tiles.index(stage), BOX)
    for box in gl.static_range(NUM_BOXES):
        is_there = box * BOX + gl.arange(0, BOX, gl.SliceLayout(0, NUMBERS))[None, :] < num_left
        bits = scales.index(stage * NUM_BOXES + box).load(NUMBERS) << 16
        factor = gl.where(is_there, bits.to(gl.float32, bitcast=True), 0.0)
        for part in gl.static_range(NUM_BOXES):
            numbers = fetched.index(part * NUM_BOXES + box).load(NUMBERS).to(gl.float32) * factor
            boxes.index(box * NUM_BOXES + part).store(numbers.to(tiles.dtype))
    fence_async_shared()


@gluon.jit
def _convert_all(
    fetched_keys, fetched_values, key_scales, value_scales, fetched, keys, values, barriers, query_tiles, num_items,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that convert tiles in FP8. `fetched`: barriers of what is fetched."""
    _queries_there, _queries_free, keys_there, keys_free, values_there, values_free = barriers
    _queries_there, _queries_free, new_keys, old_keys, new_values, old_values = fetched
    num_done = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        _token, num_queries, first_position, _row, _head, _second_head = _item(
            turn, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS
        )
        if num_queries > 0:
            num_keys = first_position + num_queries
            for first_key in range(0, num_keys, KEYS):
                stage, phase = num_done % STAGES, num_done // STAGES & 1 ^ 1
                num_left = num_keys - first_key
                mbarrier.wait(keys_free.index(stage), phase)
                mbarrier.wait(new_keys.index(stage), phase ^ 1)
                _convert_keys(fetched_keys, key_scales, keys, stage)
                mbarrier.arrive(keys_there.index(stage), count=1)
                mbarrier.arrive(old_keys.index(stage), count=1)
                mbarrier.wait(values_free.index(stage), phase)
                mbarrier.wait(new_values.index(stage), phase ^ 1)
                _convert_values(fetched_values, value_scales, values, stage, num_left)
                mbarrier.arrive(values_there.index(stage), count=1)
                mbarrier.arrive(old_values.index(stage), count=1)
                num_done += 1


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
    """Takes a tile of scores into an online softmax. Returns the weights of this tile, the largest score so far, the
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
    """Takes tiles begin … end − 1 of an item: the scores of each, and the values of the tile before it."""
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
        # Each release waits for all warps of the group. The first has just brought them together, so the second is
        # cheap.
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
def _write(out, result, first_token, num_queries, head, NUM_HEADS: gl.constexpr):
    """Writes what a tile's queries got for a head, [queries, 128]."""
    HEAD_DIM: gl.constexpr = result.shape[1]
    # Like the layout of a product, but a thread has four successive columns, not two, and four threads write whole
    # sectors of 32 bytes.
    OUTPUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], result.shape,
    )  # fmt: skip
    query = gl.arange(0, result.shape[0], gl.SliceLayout(1, OUTPUT))
    to = (first_token.to(gl.int64) + query)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    to += gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUTPUT))[None, :]
    gl.store(out + to, gl.convert_layout(result.to(out.dtype.element_ty), OUTPUT), (query < num_queries)[:, None])


@gluon.jit
def _attend_all(
    out, queries, keys, values, barriers, query_tiles, num_items, scale, WHICH: gl.constexpr, IS_FP8: gl.constexpr,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    """A group of four warps, which attends the first or the second head of each item."""
    queries_there, queries_free, keys_there, keys_free, values_there, values_free = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    num_done, num_taken = 0, 0  # tiles of keys, and items
    first_token, num_queries, first_position, _row, head, second_head = _item(
        0, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS
    )
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        # Read now, so that nobody waits for it later.
        next_token, next_number, next_position, _row, next_head, next_second_head = _item(
            turn + 1, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS
        )
        if num_queries > 0:
            num_keys = first_position + num_queries
            num_tiles = (num_keys + KEYS - 1) // KEYS
            query_stage = num_taken % QUERY_STAGES
            mine = queries.index(query_stage * 2 + WHICH)
            position = first_position + gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))
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
            if WHICH == 0:
                _write(out, result, first_token, num_queries, head, NUM_HEADS)
            elif second_head > head:
                _write(out, result, first_token, num_queries, second_head, NUM_HEADS)
        first_token, num_queries, first_position = next_token, next_number, next_position
        head, second_head = next_head, next_second_head


@gluon.jit(do_not_specialize=["num_items", "table_stride"])
def _attend_prompts_kernel(
    q_by_token, keys_by_row, values_by_row, scales_by_row, out, block_tables, query_tiles, scale, num_items,
    table_stride, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    """One program per processor. A barrier X_there is passed when the data of a stage have arrived, X_free when both
    groups have released it."""
    gl.static_assert(HEAD_DIM == 128 and QUERIES == 64)
    dtype: gl.constexpr = q_by_token.dtype
    layout: gl.constexpr = q_by_token.layout
    queries = gl.allocate_shared_memory(dtype, [2 * QUERY_STAGES, QUERIES, HEAD_DIM], layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], layout)
    queries_there = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], mbarrier.MBarrierLayout())
    queries_free = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], mbarrier.MBarrierLayout())
    keys_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(QUERY_STAGES):
        mbarrier.init(queries_there.index(stage), count=1)
        mbarrier.init(queries_free.index(stage), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_there.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_there.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    if _IS_DEPENDENT:
        gdc_wait()  # comes first: the decodes' kernel may start right after the next line, and does not wait itself
        gdc_launch_dependents()
    barriers = (queries_there, queries_free, keys_there, keys_free, values_there, values_free)
    if scales_by_row is None:
        gl.warp_specialize(
            [
                (_attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 0, False, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES,
                )),
                (_attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 1, False, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES,
                )),
                (_fetch_all, (
                    q_by_token, keys_by_row, values_by_row, None, queries, keys, values, None, None, barriers,
                    block_tables, query_tiles, num_items, table_stride, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                    KEYS, STAGES, QUERY_STAGES,
                )),
            ],
            [4, 1],  # warps of the second group and of the one that fetches
            [240, 24],  # their registers per thread; the first group has 240 too
        )  # fmt: skip
    else:
        fetched_keys = gl.allocate_shared_memory(keys_by_row.dtype, [STAGES, KEYS, HEAD_DIM], keys_by_row.layout)
        fetched_values = gl.allocate_shared_memory(values_by_row.dtype, [STAGES, HEAD_DIM, KEYS], values_by_row.layout)
        key_scales = gl.allocate_shared_memory(gl.int32, [STAGES * KEYS // 64, 1, 64], scales_by_row.layout)
        value_scales = gl.allocate_shared_memory(gl.int32, [STAGES * KEYS // 64, 1, 64], scales_by_row.layout)
        new_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        old_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        new_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        old_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(new_keys.index(stage), count=1)
            mbarrier.init(old_keys.index(stage), count=1)
            mbarrier.init(new_values.index(stage), count=1)
            mbarrier.init(old_values.index(stage), count=1)
        fetched = (queries_there, queries_free, new_keys, old_keys, new_values, old_values)
        gl.warp_specialize(
            [
                (_attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 0, True, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES,
                )),
                (_attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 1, True, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES,
                )),
                (_convert_all, (
                    fetched_keys, fetched_values, key_scales, value_scales, fetched, keys, values, barriers,
                    query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS, KEYS, STAGES,
                )),
                (_fetch_all, (
                    q_by_token, keys_by_row, values_by_row, scales_by_row, queries, fetched_keys, fetched_values,
                    key_scales, value_scales, fetched, block_tables, query_tiles, num_items, table_stride, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, STAGES, QUERY_STAGES,
                )),
            ],
            [4, 4, 1],  # warps of the second group, and of those that convert and that fetch
            [192, 104, 24],  # their registers per thread; the first group has 192 too
        )  # fmt: skip
