"""Attention of prompts on Hopper GPUs, in Gluon, the lower-level language of Triton 3.6 and later.

The schedule is that of FlashAttention 3 (Shah et al., 2024). In each program, one warp fetches queries, keys and values
with the copy engine (TMA; hopper_loads.py), and two groups of four warps attend two heads that have the same keys
(hopper_attend.py). A group starts two products at once: its queries with a tile of keys, and the weights of the
previous tile with that tile's values. While the group calculates weights, the tensor cores work for the other group.
There are no more programs than processors. Each program takes its share of a list of items (a tile of queries and two
heads). The next item's data arrives while the program writes the result of the current one.

With a cache in FP8, another group of four warps converts the fetched tiles of keys and values to the queries' dtype,
and multiplies them by their scales. Then the schedule is the same.

`triton_prompts.attend_prompts` calls this kernel in layers without a window, if `has_hopper_kernel`. Its twin is
`_prefill_kernel` in triton_prompts.py.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.attention.hopper_attend import attend_all
from nanovllm.attention.hopper_loads import convert_all, fetch_all
from nanovllm.attention.metadata import QUERY_TILE, AttentionMetadata
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS
from nanovllm.ops.hopper_memory import DTYPES, IS_DEPENDENT, make_barriers
from nanovllm.ops.kernel import num_processors
from nanovllm.ops.layer_cache import LayerCache

# A tile of keys or values is fetched in boxes of 64 rows × 64 columns. A box is part of one block. In shared memory,
# the boxes with a tile's first 64 columns precede the others, because the tensor cores read a tile in this order.
_KEYS, _BOX = 128, 64
# Shared memory holds _STAGES tiles of keys, as many tiles of values, and _QUERY_STAGES pairs of query tiles. With three
# and one instead, long prompts were not faster, and short ones were slower.
_STAGES, _QUERY_STAGES = 2, 2
CONSTANTS = {"QUERIES": QUERY_TILE, "KEYS": _KEYS, "STAGES": _STAGES, "QUERY_STAGES": _QUERY_STAGES, "IS_DECODE": False}
# Tiles in FP8 take shared memory too.
FP8_CONSTANTS = CONSTANTS | {"QUERY_STAGES": 1}
# A decode has one tile of queries per item. That leaves room for a third stage of keys and values.
DECODE_CONSTANTS = CONSTANTS | {"STAGES": 3, "IS_DECODE": True}
FP8_DECODE_CONSTANTS = FP8_CONSTANTS | {"IS_DECODE": True}


def attend_prompts(
    q: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> None:
    """Like `triton_prompts.attend_prompts`, for 16-bit heads of 128, blocks of a multiple of 64, and no window.

    If an odd number of heads has the same keys, both groups of warps attend the last one, and the first writes it.

    scale: factor on the scores, in base 2.
    """
    assert metadata.query_tiles is not None
    num_pairs = -(-(q.shape[1] // cache.num_kv_heads) // 2)
    constants = FP8_CONSTANTS if cache.is_fp8 else CONSTANTS
    width = q.shape[1] * q.shape[2]
    _launch(q, [len(q), width], q.stride(0), cache, out, metadata, metadata.query_tiles, scale, num_pairs, constants)


def attend_decodes(
    q: torch.Tensor, cache: LayerCache, out: torch.Tensor, metadata: AttentionMetadata, tiles: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    """The same for tiles of a single query each, with the same bits: a tile's rows are the heads that have the same
    keys. Their number is at most 64, and the queries' stride a multiple of head_dim.

    tiles: int32 [num_tiles, 4], as AttentionMetadata has them.
    """
    (num_tokens, num_heads, head_dim), stride = q.shape, q.stride(0)
    constants = FP8_DECODE_CONSTANTS if cache.is_fp8 else DECODE_CONSTANTS
    num_rows = (num_tokens - 1) * (stride // head_dim) + num_heads
    _launch(q, [num_rows, head_dim], head_dim, cache, out, metadata, tiles, scale, 1, constants)


def _launch(
    q: torch.Tensor, q_shape: list[int], q_stride: int, cache: LayerCache, out: torch.Tensor,
    metadata: AttentionMetadata, tiles: torch.Tensor, scale: float, num_pairs: int, constants: dict[str, int],
) -> None:  # fmt: skip
    num_items, (_, num_heads, head_dim) = len(tiles) * cache.num_kv_heads * num_pairs, q.shape
    layout = gl.NVMMASharedLayout.get_default_for([_BOX, _BOX], DTYPES[q.dtype])
    by_row = TensorDescriptor(q, q_shape, [q_stride, 1], [QUERY_TILE, head_dim], layout)
    _attend_prompts_kernel[(min(num_processors(q.device), num_items),)](
        by_row, q.stride(0) // head_dim, *_descriptors(cache), out, metadata.block_tables, tiles, scale, num_items,
        metadata.block_tables.stride(0), NUM_HEADS=num_heads, NUM_KV_HEADS=cache.num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=metadata.block_size, num_warps=4, **constants, **LAUNCH_OPTIONS,
    )  # fmt: skip


def _descriptors(cache: LayerCache) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of keys, values and scales. In FP8, rows are blocks × heads × (keys or head_dim)."""
    row = cache.num_kv_heads * cache.head_dim
    widths = (cache.head_dim, cache.block_size) if cache.is_fp8 else (row, row)
    box = [_BOX, _BOX]
    layouts = (gl.NVMMASharedLayout.get_default_for(box, DTYPES[numbers.dtype]) for numbers in cache[:2])
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


@gluon.jit(do_not_specialize=["num_items", "table_stride", "rows_per_token"])
def _attend_prompts_kernel(
    q_by_row, rows_per_token, keys_by_row, values_by_row, scales_by_row, out, block_tables, query_tiles, scale,
    num_items, table_stride, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr, IS_DECODE: gl.constexpr,
):  # fmt: skip
    """One program per processor. A barrier X_there completes when the data of a stage have arrived, X_free when all
    groups have released the stage: two, or one for decodes."""
    gl.static_assert(HEAD_DIM == 128 and QUERIES == 64)
    dtype: gl.constexpr = q_by_row.dtype
    layout: gl.constexpr = q_by_row.layout
    NUM_GROUPS: gl.constexpr = 1 if IS_DECODE else 2
    queries = gl.allocate_shared_memory(dtype, [NUM_GROUPS * QUERY_STAGES, QUERIES, HEAD_DIM], layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], layout)
    queries_there, queries_free = make_barriers(QUERY_STAGES, 1), make_barriers(QUERY_STAGES, NUM_GROUPS)
    keys_there, keys_free = make_barriers(STAGES, 1), make_barriers(STAGES, NUM_GROUPS)
    values_there, values_free = make_barriers(STAGES, 1), make_barriers(STAGES, NUM_GROUPS)
    if IS_DEPENDENT:
        gdc_wait()  # comes first: the decodes' kernel may start right after the next line, and does not wait itself
        gdc_launch_dependents()
    barriers = (queries_there, queries_free, keys_there, keys_free, values_there, values_free)
    if scales_by_row is not None:
        fetched_keys = gl.allocate_shared_memory(keys_by_row.dtype, [STAGES, KEYS, HEAD_DIM], keys_by_row.layout)
        fetched_values = gl.allocate_shared_memory(values_by_row.dtype, [STAGES, HEAD_DIM, KEYS], values_by_row.layout)
        key_scales = gl.allocate_shared_memory(gl.int32, [STAGES * KEYS // 64, 1, 64], scales_by_row.layout)
        value_scales = gl.allocate_shared_memory(gl.int32, [STAGES * KEYS // 64, 1, 64], scales_by_row.layout)
        new_keys, old_keys = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
        new_values, old_values = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
        fetched = (queries_there, queries_free, new_keys, old_keys, new_values, old_values)
    # Triton loses the constants in a tuple that is bound to a name, so the tuples are repeated.
    if scales_by_row is None and not IS_DECODE:
        gl.warp_specialize(
            [
                (attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 0, False, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
                (attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 1, False, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
                (fetch_all, (
                    q_by_row, rows_per_token, keys_by_row, values_by_row, None, queries, keys, values, None, None,
                    barriers, block_tables, query_tiles, num_items, table_stride, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
                    BLOCK_SIZE, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
            ],
            [4, 1],  # warps of the second group and of the one that fetches
            [240, 24],  # their registers per thread; the first group has 240 too
        )  # fmt: skip
    elif scales_by_row is None:
        gl.warp_specialize(
            [
                (attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 0, False, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
                (fetch_all, (
                    q_by_row, rows_per_token, keys_by_row, values_by_row, None, queries, keys, values, None, None,
                    barriers, block_tables, query_tiles, num_items, table_stride, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
                    BLOCK_SIZE, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif not IS_DECODE:
        gl.warp_specialize(
            [
                (attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 0, True, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
                (attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 1, True, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
                (convert_all, (
                    fetched_keys, fetched_values, key_scales, value_scales, fetched, keys, values, barriers,
                    query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS, KEYS, STAGES, IS_DECODE,
                )),
                (fetch_all, (
                    q_by_row, rows_per_token, keys_by_row, values_by_row, scales_by_row, queries, fetched_keys,
                    fetched_values, key_scales, value_scales, fetched, block_tables, query_tiles, num_items,
                    table_stride, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
            ],
            [4, 4, 1],  # warps of the second group, and of those that convert and that fetch
            [192, 104, 24],  # their registers per thread; the first group has 192 too
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_all, (
                    out, queries, keys, values, barriers, query_tiles, num_items, scale, 0, True, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, QUERIES, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
                (convert_all, (
                    fetched_keys, fetched_values, key_scales, value_scales, fetched, keys, values, barriers,
                    query_tiles, num_items, NUM_HEADS, NUM_KV_HEADS, KEYS, STAGES, IS_DECODE,
                )),
                (fetch_all, (
                    q_by_row, rows_per_token, keys_by_row, values_by_row, scales_by_row, queries, fetched_keys,
                    fetched_values, key_scales, value_scales, fetched, block_tables, query_tiles, num_items,
                    table_stride, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, STAGES, QUERY_STAGES, IS_DECODE,
                )),
            ],
            [4, 1],
            [104, 24],
        )  # fmt: skip
