"""The kernel of fused_product.py, in Gluon, the lower-level language of Triton 3.6 and later: a product of many rows
together with an activation, or with norm, rotation and store. The product itself never goes to memory.

There are no more programs than processors. Each multiplies one tile after another: 128 rows of the inputs with 256 rows
of the weight. In each program, one warp fetches both with the copy engine (TMA), and two groups of four warps multiply
64 rows of inputs each. One group may be a few stages ahead of the other. So while one finishes its part of a tile, the
tensor cores work for the other.
"""

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
from triton.language.extra.cuda.libdevice import fast_dividef

from nanovllm.ops.act_and_mul import divisor
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS
from nanovllm.ops.hopper_memory import DTYPES, IS_DEPENDENT, fetch, make_barriers, reinterpret, write
from nanovllm.ops.kernel import num_processors
from nanovllm.ops.layer_cache import LayerCache

# A group of warps has ROWS rows of a tile and two times COLUMNS columns: of gate and of up, or two heads. Inputs and
# weights come INPUTS at a time, to the next of STAGES places. Their tiles and the results fill the shared memory.
ROWS, COLUMNS, INPUTS, STAGES = (gl.constexpr(number) for number in (64, 128, 64, 4))
# Programs go down this many tiles before they go to the right, so that inputs and weights come from the cache.
_TILES = gl.constexpr(8)


def gated_product(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """See fused_product.py."""
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, None, activation)
    return out


def stored_product(
    x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: LayerCache, slot_mapping: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """See fused_product.py."""
    assert cache.head_dim == COLUMNS.value and not cache.is_fp8
    num_heads = len(weight) // cache.head_dim - 2 * cache.num_kv_heads
    out = torch.empty((len(x), num_heads, cache.head_dim), dtype=x.dtype, device=x.device)
    heads = (norm, eps, cos, sin, cache.keys, cache.values, slot_mapping)
    _launch(x, weight, out.flatten(1), heads, None, num_heads, cache.num_kv_heads)
    return out


def _launch(x, weight, out, heads: tuple[Any, ...] | None, activation: str | None, *num_heads: int) -> None:
    rows, columns, inputs = ROWS.value, COLUMNS.value, INPUTS.value
    assert x.shape[1] % inputs == len(weight) % (2 * columns) == 0, "tiles are whole"
    num_columns = len(weight) // (2 * columns)
    num_tiles = -(-len(x) // (2 * rows)) * num_columns
    of_queries, of_keys = num_heads or (0, 0)
    _fused_product_kernel[(min(num_processors(x.device), num_tiles),)](
        _descriptor(x, 2 * rows, inputs), _descriptor(weight, columns, inputs), _descriptor(out, rows, columns), heads,
        len(x), INPUT_SIZE=x.shape[1], NUM_COLUMNS=num_columns, NUM_HEADS=of_queries, NUM_KV_HEADS=of_keys,
        ACTIVATION=activation, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor, *box: int) -> TensorDescriptor:
    """For copies of boxes of the matrix. Rows after its last one are read as zeros and are not written."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[matrix.dtype])
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(box), layout)


@gluon.jit
def _place(tile, num_tokens, NUM_COLUMNS: gl.constexpr):
    """A tile's first row, and its place among the tiles of the same rows."""
    first = tile // (_TILES * NUM_COLUMNS) * _TILES
    height = gl.minimum(gl.cdiv(num_tokens, 2 * ROWS) - first, _TILES)
    rest = tile % (_TILES * NUM_COLUMNS)
    return (first + rest % height) * (2 * ROWS), rest // height


@gluon.jit
def _fetch_all(
    x, weight, inputs, weights, are_there, are_free, num_tokens, num_tiles, INPUT_SIZE: gl.constexpr,
    NUM_COLUMNS: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """The warp that fetches. It puts data into a stage as soon as both groups have released it."""
    pairs = reinterpret(inputs, inputs.dtype, [STAGES, 2 * ROWS, INPUTS], inputs.layout)
    halves = reinterpret(weights, weights.dtype, [2 * STAGES, COLUMNS, INPUTS], weights.layout)
    num_done = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, place = _place(tile, num_tokens, NUM_COLUMNS)
        if IS_GATED:
            column, second = place * COLUMNS, (NUM_COLUMNS + place) * COLUMNS
        else:
            column, second = place * 2 * COLUMNS, (place * 2 + 1) * COLUMNS
        for first in range(0, INPUT_SIZE, INPUTS):
            stage = num_done % STAGES
            is_there = are_there.index(stage)
            mbarrier.wait(are_free.index(stage), num_done // STAGES & 1 ^ 1)
            mbarrier.expect(is_there, x.block_type.nbytes + 2 * weight.block_type.nbytes)
            fetch(x, [row, first], is_there, pairs.index(stage))
            fetch(weight, [column, first], is_there, halves.index(2 * stage))
            fetch(weight, [second, first], is_there, halves.index(2 * stage + 1))
            num_done += 1


@gluon.jit
def _halves(numbers):
    """[rows, 2 × columns] -> twice [rows, columns]. Every number stays in its register."""
    return numbers.reshape([numbers.shape[0], 2, numbers.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _put(result, numbers):
    """Writes a result to shared memory, as soon as the copy engine has read the one before."""
    tma.store_wait(0)
    result.store(numbers.to(result.dtype))
    fence_async_shared()


@gluon.jit
def _read_rotation(cos, sin, row, num_tokens, LAYOUT: gl.constexpr):
    """Cosines and sines of the rows from `row` on, for both halves of a head. The low half's sines have the other
    sign."""
    token = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = COLUMNS // 2 + gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, LAYOUT))
    at, is_token = token[:, None] * COLUMNS + column[None, :], (token < num_tokens)[:, None]
    return gl.load(cos + at, is_token, 0.0), gl.load(sin + at, is_token, 0.0)


@gluon.jit
def _rotated(numbers, head, norm, eps, cosine, sine):
    """A head of queries or keys, normed and rotated, in the layout that it had."""
    low, high = _halves(numbers)
    LAYOUT: gl.constexpr = low.type.layout
    if norm is not None:
        column = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, LAYOUT))
        scale = gl.rsqrt((gl.sum(low * low, 1) + gl.sum(high * high, 1)) / COLUMNS + eps)[:, None]
        of_head = norm + head * COLUMNS + column
        low *= scale * gl.load(of_head).to(gl.float32)[None, :]
        high *= scale * gl.load(of_head + COLUMNS // 2).to(gl.float32)[None, :]
    cosine = gl.convert_layout(cosine, LAYOUT, assert_trivial=True).to(gl.float32)
    sine = gl.convert_layout(sine, LAYOUT, assert_trivial=True).to(gl.float32)
    both = gl.join(low * cosine - high * sine, high * cosine + low * sine).permute((0, 2, 1)).reshape(numbers.shape)
    return gl.convert_layout(both, numbers.type.layout, assert_trivial=True)


@gluon.jit
def _finish_heads(
    sums, heads, rotation, out, result, row, place, num_tokens, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr
):
    """Finishes two heads. The copy engine writes queries; the warps write keys and values, each row to its slot."""
    norm, eps, _cos, _sin, keys, values, slot_mapping = heads
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    token = row + gl.arange(0, ROWS, gl.SliceLayout(1, WRITTEN))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, WRITTEN))
    # Read now, so that no warp waits for it later.
    slot = gl.load(slot_mapping + token, (token < num_tokens) & (place * 2 >= NUM_HEADS), -1)
    halves = _halves(sums)
    for half in gl.static_range(2):
        head = place * 2 + half
        is_value = head >= NUM_HEADS + NUM_KV_HEADS
        numbers = halves[half]
        if not is_value:
            numbers = _rotated(numbers, head, norm, eps, rotation[0], rotation[1])
        _put(result, numbers)
        if head < NUM_HEADS:
            write(out, [row, head * COLUMNS], result)
        else:
            cache = keys
            if is_value:
                cache = values
            at = slot * (NUM_KV_HEADS * COLUMNS) + (head - NUM_HEADS) % NUM_KV_HEADS * COLUMNS
            gl.store(cache + at[:, None] + column[None, :], result.load(WRITTEN), (slot >= 0)[:, None])


@gluon.jit
def _multiply_all(
    out, heads, inputs, weights, results, are_there, are_free, num_tokens, num_tiles, WHICH: gl.constexpr,
    INPUT_SIZE: gl.constexpr, NUM_COLUMNS: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A group of four warps, which multiplies the first or the second half of each tile's rows."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    HALF_HEAD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    num_done = 0
    result = results.index(WHICH)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, place = _place(tile, num_tokens, NUM_COLUMNS)
        row += WHICH * ROWS
        if ACTIVATION is None:  # read now, so that no warp waits for it later; values do not rotate
            num_rotated = gl.where(place * 2 < NUM_HEADS + NUM_KV_HEADS, num_tokens, 0)
            rotation = _read_rotation(heads[2], heads[3], row, num_rotated, HALF_HEAD)
        sums = gl.full([ROWS, 2 * COLUMNS], 0.0, gl.float32, SUMS)
        for first in range(0, INPUT_SIZE, INPUTS):
            stage = num_done % STAGES
            mbarrier.wait(are_there.index(stage), num_done // STAGES & 1)
            mine = inputs.index(2 * stage + WHICH)
            sums = warpgroup_mma(mine, weights.index(stage).permute((1, 0)), sums, use_acc=first > 0, is_async=True)
            sums = warpgroup_mma_wait(0, (sums,))
            mbarrier.arrive(are_free.index(stage), count=1)
            num_done += 1
        if ACTIVATION is None:
            _finish_heads(sums, heads, rotation, out, result, row, place, num_tokens, NUM_HEADS, NUM_KV_HEADS)
        else:
            gate, up = _halves(sums)
            _put(result, fast_dividef(gate, divisor(gate, ACTIVATION)) * up)
            write(out, [row, place * COLUMNS], result)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens"])
def _fused_product_kernel(
    x, weight, out, heads, num_tokens, INPUT_SIZE: gl.constexpr, NUM_COLUMNS: gl.constexpr, NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One program per processor. `are_there` complete when the data of a stage have arrived, `are_free` when both
    groups have released the stage. heads: None for gate and up."""
    inputs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, INPUTS], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * COLUMNS, INPUTS], weight.layout)
    results = gl.allocate_shared_memory(x.dtype, [2, ROWS, COLUMNS], out.layout)
    are_there, are_free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    num_tiles = gl.cdiv(num_tokens, 2 * ROWS) * NUM_COLUMNS
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    gl.warp_specialize(
        [
            (_multiply_all, (
                out, heads, inputs, weights, results, are_there, are_free, num_tokens, num_tiles, 0, INPUT_SIZE,
                NUM_COLUMNS, NUM_HEADS, NUM_KV_HEADS, ACTIVATION,
            )),
            (_multiply_all, (
                out, heads, inputs, weights, results, are_there, are_free, num_tokens, num_tiles, 1, INPUT_SIZE,
                NUM_COLUMNS, NUM_HEADS, NUM_KV_HEADS, ACTIVATION,
            )),
            (_fetch_all, (
                x, weight, inputs, weights, are_there, are_free, num_tokens, num_tiles, INPUT_SIZE, NUM_COLUMNS,
                ACTIVATION is not None,
            )),
        ],
        [4, 1],  # warps of the second group and of the one that fetches
        [240, 24],  # their registers per thread; the first group has 240 too
    )  # fmt: skip
