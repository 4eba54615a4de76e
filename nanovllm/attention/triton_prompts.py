"""Attention of prompts for TritonAttention, by the kernel in this file or by the one in hopper_prompts.py.

A program attends a tile of a sequence's queries, for one head or for two that have the same keys.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.metadata import QUERY_TILE, AttentionMetadata
from nanovllm.attention.triton_keys import LOG2_E, attend_keys, online_softmax
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, let_next_come, wait
from nanovllm.ops.gluon import has_gluon
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_cache import LayerCache


@cache
def has_hopper_kernel(shape: AttentionShape, block_size: int) -> bool:
    """Whether hopper_prompts.py attends the prompts of layers without a window."""
    return (
        shape.dtype in (torch.bfloat16, torch.float16)
        and shape.head_dim == 128
        and shape.num_heads // shape.num_kv_heads > 1  # a program takes two heads with the same keys
        and block_size % 64 == 0
        and has_gluon(shape.device)
    )


class PromptLaunch(NamedTuple):
    """How _prefill_kernel is launched.

    heads, keys: how many a program takes at once.
    options: Triton's launch options.
    has_descriptors: whether whole tiles of keys and values come by tensor descriptors.
    queries: how many of a tile's queries a program has rows for.
    """

    heads: int
    keys: int
    options: dict[str, int]
    has_descriptors: bool = True
    queries: int = QUERY_TILE

    def of_decodes(self) -> "PromptLaunch":
        """The launch for tiles of a single query each, with the same bits: a program's rows are all heads that have
        the same keys, padded to QUERY_TILE. Each warp has as many rows as before."""
        num_warps = self.options["num_warps"] // self.heads
        return self._replace(heads=QUERY_TILE, queries=1, options={**self.options, "num_warps": num_warps})

    def by_slot(self, whole: torch.Tensor) -> Any:
        """A descriptor of [num_blocks, block_size, num_kv_heads, head_dim], or None."""
        if not self.has_descriptors:
            return None
        from triton.tools.tensor_descriptor import TensorDescriptor

        num_blocks, block_size, num_kv_heads, head_dim = whole.shape
        width = num_kv_heads * head_dim
        return TensorDescriptor(whole, [num_blocks * block_size, width], [width, 1], [self.keys, head_dim])


# Keyed by head_dim. The first launch is for an even number of query heads per key head, the second for an odd one.
# Registers limit how many programs a processor runs at once. With two, one calculates products while the other
# calculates weights.
_PROMPT_LAUNCHES = {
    64: (
        PromptLaunch(1, 64, {"num_warps": 4, "num_stages": 2, "maxnreg": 96}),
        PromptLaunch(1, 64, {"num_warps": 4, "num_stages": 2, "maxnreg": 96}),
    ),
    128: (
        PromptLaunch(2, 64, {"num_warps": 8, "num_stages": 2, "maxnreg": 128}),
        PromptLaunch(1, 32, {"num_warps": 4, "num_stages": 2, "maxnreg": 128}),
    ),
    256: (
        PromptLaunch(2, 64, {"num_warps": 8, "num_stages": 2}),
        PromptLaunch(1, 32, {"num_warps": 4, "num_stages": 2}),
    ),
}


@cache
def prompt_launch(shape: AttentionShape, block_size: int) -> PromptLaunch:
    """The fastest launch of _prefill_kernel found for this shape; docs/record.md has the figures."""
    is_interpreted = shape.device.type == "cpu"
    # The copy engine came with compute capability 9.0. Later GPUs have other registers and less shared memory. Products
    # of float32 need other tiles.
    is_known = is_interpreted or (shape.dtype.itemsize == 2 and torch.cuda.get_device_capability(shape.device)[0] == 9)
    if is_known and shape.head_dim in _PROMPT_LAUNCHES:
        launch = _PROMPT_LAUNCHES[shape.head_dim][shape.num_heads // shape.num_kv_heads % 2]
        if block_size % launch.keys == 0:
            return launch._replace(has_descriptors=not shape.has_fp8_cache)
    warps, stages = (4, 3) if shape.head_dim <= 128 else (8, 2)
    return PromptLaunch(1, 32, {"num_warps": warps, "num_stages": stages}, has_descriptors=False)


def attend_prompts(
    shape: AttentionShape,
    q: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    window: int,
) -> None:
    """Attends the queries of `metadata.query_tiles` by the fastest kernel for the shape, and writes their rows of out.

    Args:
        q: [num_tokens, num_heads, head_dim]; rows may have a stride.
        out: [num_tokens, num_heads, head_dim], contiguous.
        window: see AttentionBackend.attend.
    """
    scale = shape.score_scale * LOG2_E
    if window == 0 and has_hopper_kernel(shape, metadata.block_size):
        from nanovllm.attention import hopper_prompts  # not every Triton has Gluon

        hopper_prompts.attend_prompts(q, cache, out, metadata, scale)
    else:
        how = prompt_launch(shape, metadata.block_size)
        assert metadata.query_tiles is not None
        launch_prefill(how, q, cache, out, metadata, metadata.query_tiles, scale, window)


def attend_decodes_as_prompts(
    shape: AttentionShape,
    q: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    tiles: torch.Tensor,
    window: int,
) -> None:
    """`attend_prompts` for tiles of a single query each: with the same bits, and faster.

    Args:
        tiles: int32 [num_tiles, 4], as AttentionMetadata has them.
    """
    scale = shape.score_scale * LOG2_E
    if shape.num_heads // shape.num_kv_heads > QUERY_TILE:  # more heads than a tile has rows
        attend_prompts(shape, q, cache, out, replace(metadata, query_tiles=tiles), window)
    elif window == 0 and has_hopper_kernel(shape, metadata.block_size):
        from nanovllm.attention import hopper_prompts

        hopper_prompts.attend_decodes(q, cache, out, metadata, tiles, scale)
    else:
        how = prompt_launch(shape, metadata.block_size).of_decodes()
        launch_prefill(how, q, cache, out, metadata, tiles, scale, window)


def launch_prefill(
    how: PromptLaunch,
    q: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    tiles: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    """Attends tiles of queries by _prefill_kernel.

    Args:
        tiles: int32 [num_tiles, 4], as AttentionMetadata has them.
        scale: factor on the scores, in base 2.
    """
    (num_heads, head_dim), num_kv_heads = q.shape[1:], cache.num_kv_heads
    group_size = num_heads // num_kv_heads
    heads = min(how.heads, group_size)
    _prefill_kernel[(num_heads // heads, len(tiles))](
        q, *cache, how.by_slot(cache.keys), how.by_slot(cache.values), out, metadata.block_tables, tiles, scale,
        q.stride(0), metadata.block_tables.stride(0), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, WIDTH=triton.next_power_of_2(head_dim), BLOCK_SIZE=metadata.block_size, QUERIES=how.queries,
        HEADS=heads, ROWS=how.heads * how.queries, KEYS=how.keys, WINDOW=window, **how.options, **LAUNCH_OPTIONS,
    )  # fmt: skip


@jit
def _attend_whole_tiles(
    queries, largest, total, summed, keys_by_slot, values_by_slot, block_table, kv_head, scale, first, last,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """`attend_keys` without a mask, where the GPU's copy engine (TMA) fetches the tiles. Programs then compute no
    addresses and keep no registers for them."""
    for start in range(first, last, KEYS):
        slot = tl.load(block_table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
        keys = keys_by_slot.load([slot, kv_head * HEAD_DIM])
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        weights, largest, total, summed = online_softmax(scores, scale, largest, total, summed, False)
        values = values_by_slot.load([slot, kv_head * HEAD_DIM])
        summed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return largest, total, summed


@jit(do_not_specialize=["q_stride", "table_stride"])
def _prefill_kernel(
    q, k_cache, v_cache, scales, keys_by_slot, values_by_slot, out, block_tables, query_tiles, scale, q_stride,
    table_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One program per tile of a sequence's queries and `HEADS` heads, which have the same keys. Heads of one tile are
    neighbours. Tiles start in the list's order, so those with most keys start first. ROWS: HEADS × QUERIES and padding.

    keys_by_slot, values_by_slot: descriptors of k_cache and v_cache as [num_slots, num_kv_heads × head_dim] in boxes of
    [KEYS, HEAD_DIM]; None if the GPU or the shape does not use them.
    """
    wait()  # before the next kernel may start, which does not wait
    let_next_come()
    first_head = tl.program_id(0) * HEADS
    tile = query_tiles + tl.program_id(1) * 4
    num_queries = tl.load(tile + 1)
    if num_queries > 0:
        first_token = tl.load(tile).to(tl.int64)
        first_position = tl.load(tile + 2)
        seq = tl.load(tile + 3).to(tl.int64)
        query = tl.arange(0, ROWS) % QUERIES
        head = first_head + tl.arange(0, ROWS) // QUERIES
        column = tl.arange(0, WIDTH)
        is_row = (query < num_queries) & (head < first_head + HEADS)
        is_query = is_row[:, None] & (column < HEAD_DIM)[None, :]
        token = first_token + query
        at = token[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :]
        queries = tl.load(q + at, is_query, 0.0)
        # Every query of the tile sees the keys before this one, unless they are before its window.
        last_of_all = (first_position + 1) // KEYS * KEYS
        first_of_all = 0
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, WIDTH], tl.float32)
        block_table = block_tables + seq * table_stride
        kv_head = first_head // (NUM_HEADS // NUM_KV_HEADS)
        if WINDOW:
            # From here on, keys are in the window of the tile's last query too.
            first_of_all = tl.cdiv(tl.maximum(first_position + num_queries - WINDOW, 0), KEYS) * KEYS
            first_seen = tl.maximum(first_position + 1 - WINDOW, 0) // KEYS * KEYS
            largest, total, summed = attend_keys(
                queries, first_position + query, largest, total, summed, k_cache, v_cache, scales, block_table, kv_head,
                scale, first_seen, tl.minimum(first_of_all, first_position + num_queries), NUM_KV_HEADS, HEAD_DIM,
                WIDTH, BLOCK_SIZE, KEYS, True, WINDOW,
            )  # fmt: skip
        if keys_by_slot is not None:
            largest, total, summed = _attend_whole_tiles(
                queries, largest, total, summed, keys_by_slot, values_by_slot, block_table, kv_head, scale,
                first_of_all, last_of_all, HEAD_DIM, BLOCK_SIZE, KEYS,
            )  # fmt: skip
        else:
            largest, total, summed = attend_keys(
                queries, first_position + query, largest, total, summed, k_cache, v_cache, scales, block_table, kv_head,
                scale, first_of_all, last_of_all, NUM_KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, KEYS, False, WINDOW,
            )  # fmt: skip
        if WINDOW:
            last_of_all = tl.maximum(last_of_all, first_of_all)
        largest, total, summed = attend_keys(
            queries, first_position + query, largest, total, summed, k_cache, v_cache, scales, block_table, kv_head,
            scale, last_of_all, first_position + num_queries, NUM_KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, KEYS, True,
            WINDOW,
        )  # fmt: skip
        # The first token is read again. Keeping it would take registers, which limit how many programs run at once.
        token = tl.load(tile, volatile=True).to(tl.int64) + query
        at = token[:, None] * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
        tl.store(out + at, summed / total[:, None], is_query)
