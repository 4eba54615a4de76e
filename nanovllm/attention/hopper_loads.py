"""The warps of the kernel in hopper_prompts.py that bring queries, keys and values to shared memory: one fetches, and
with a cache in FP8 four others convert."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nanovllm.ops.hopper_memory import fetch, reinterpret


@gluon.jit
def item_of_turn(
    turn, query_tiles, num_items, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, IS_DECODE: gl.constexpr
):
    """This program's item in a turn: the tile's first token, number of queries, first position and row, and the heads
    of both groups. If no work is left, the number of queries is 0. IS_DECODE: the item has all heads with the same
    keys, from the first head on.

    The tiles that see the most keys come first. Turns alternate in direction: the program that gets the longest item of
    one turn gets the shortest of the next.
    """
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    item = turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
    place = gl.minimum(item, num_items - 1)
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    NUM_PAIRS: gl.constexpr = 1 if IS_DECODE else (GROUP + 1) // 2
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
    return reinterpret(tile, tile.dtype, SHAPE, tile.layout)


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
        # A box may be after the last block. Then it may hold any block: its keys are masked, and its values are
        # cleared.
        block = gl.load(block_table + gl.minimum(key // BLOCK_SIZE, (num_keys - 1) // BLOCK_SIZE))
        of_head, place = block * NUM_KV_HEADS + kv_head, key % BLOCK_SIZE
        if scales_by_row is not None:
            fetch(scales_by_row, [of_head, place], is_there, scales.index(stage * NUM_BOXES + box))
        for part in gl.static_range(boxes.shape[0] // NUM_BOXES):
            if scales_by_row is None:
                at = [block * BLOCK_SIZE + place, kv_head * HEAD_DIM + part * BOX]
            elif ARE_KEYS:
                at = [of_head * BLOCK_SIZE + place, part * BOX]
            else:  # transposed
                at = [of_head * HEAD_DIM + part * BOX, place]
            fetch(by_row, at, is_there, boxes.index(part * NUM_BOXES + box))


@gluon.jit
def fetch_all(
    q_by_row, rows_per_token, keys_by_row, values_by_row, scales_by_row, queries, keys, values, key_scales,
    value_scales, barriers, block_tables, query_tiles, num_items, table_stride, NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr, IS_DECODE: gl.constexpr,
):  # fmt: skip
    """The warp that fetches. It puts data into a stage as soon as both groups have released it."""
    queries_there, queries_free, keys_there, keys_free, values_there, values_free = barriers
    num_done, num_taken = 0, 0  # tiles of keys, and items
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        first_token, num_queries, first_position, row, head, second_head = item_of_turn(
            turn, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS, IS_DECODE
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
                    if IS_DECODE:
                        mbarrier.expect(is_there, q_by_row.block_type.nbytes)
                        fetch(q_by_row, [first_token * rows_per_token + head, 0], is_there, queries.index(query_stage))
                    else:
                        mbarrier.expect(is_there, 2 * q_by_row.block_type.nbytes)
                        fetch(q_by_row, [first_token, head * HEAD_DIM], is_there, queries.index(query_stage * 2))
                        at = [first_token, second_head * HEAD_DIM]
                        fetch(q_by_row, at, is_there, queries.index(query_stage * 2 + 1))
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
    """Writes a stage's tile of keys. Its integers and scales have been fetched, in boxes."""
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
    """Writes a stage's tile of transposed values. Its numbers in e4m3 and scales have been fetched, in boxes. Values
    from `num_left` on become 0: their scales may be infinite, which a weight of 0 does not remove."""
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
def convert_all(
    fetched_keys, fetched_values, key_scales, value_scales, fetched, keys, values, barriers, query_tiles, num_items,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    IS_DECODE: gl.constexpr,
):  # fmt: skip
    """The warps that convert tiles in FP8. fetched: barriers of the fetched tiles; barriers: those of the converted
    tiles."""
    _queries_there, _queries_free, keys_there, keys_free, values_there, values_free = barriers
    _queries_there, _queries_free, new_keys, old_keys, new_values, old_values = fetched
    num_done = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        _token, num_queries, first_position, _row, _head, _second_head = item_of_turn(
            turn, query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS, IS_DECODE
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
