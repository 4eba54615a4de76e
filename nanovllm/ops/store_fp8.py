"""Writes new keys or values to a KV cache in FP8: both for a layer without a merged kernel, and the values in steps
with prompts. The plain twin is LayerCache.write."""

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_cache import KEY_LIMIT_EXPONENT, LARGEST_KEY, MIN_EXPONENT, MIN_SCALE, LayerCache
from nanovllm.ops.quantize import ScaledProduct, to_e4m3, to_int8

_KEY_LIMIT_EXPONENT = tl.constexpr(KEY_LIMIT_EXPONENT)
_LARGEST_KEY = tl.constexpr(LARGEST_KEY)
_MIN_EXPONENT = tl.constexpr(MIN_EXPONENT)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_TOKENS = 32  # tokens per program, which stores one head
# No fused multiply-add: x × factor must be rounded to float32 before `to_int8` adds its constant, as in the plain twin.
# A fused one would round once, and could give another integer. This also applies to norms and rotations in the same
# kernel.
STORE_OPTIONS = LAUNCH_OPTIONS | {"enable_fp_fusion": False}


@jit
def bits_of_peak(x):
    """float32 [m, n] -> int32 [m, 1], the bits of each row's largest absolute number; a NaN's bits are larger than any
    number's."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None]


@jit
def scale_of_keys(peak):
    """The result of `bits_of_peak` -> (float32 factors that rows of keys are multiplied by before they become integers,
    int16 bits of their scales in bfloat16). A row with a NaN or a number that is too large has the factor 0. The
    twin is `quantize_keys`."""
    is_finite = peak < (_KEY_LIMIT_EXPONENT << 23)
    exact = tl.maximum(peak.to(tl.float32, bitcast=True) * (1 / _LARGEST_KEY), _MIN_SCALE)
    bits = tl.where(is_finite, (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000, 0x7F800000)
    return tl.div_rn(1.0, bits.to(tl.float32, bitcast=True)), (bits >> 16).to(tl.int16)


@jit
def scale_of_values(peak):
    """Like `scale_of_keys`, for rows of values, which become e4m3. The twin is `quantize_values`."""
    is_finite = peak < 0x7F800000
    exponent = tl.where(is_finite, tl.maximum(((peak + 0x1FFFFF) >> 23) - 8, _MIN_EXPONENT), 255)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, factor, 0.0), (exponent << 7).to(tl.int16)


@jit
def times_factor(x, factor):
    """float32 -> float32; a factor of 0 makes NaN and infinity 0 too."""
    return tl.where(factor == 0, 0.0, x * factor)


@jit(do_not_specialize=["num_tokens", "stride"])
def _store_fp8_kernel(
    x, row_scales, column_scales, heads, scales, slot_mapping, num_tokens, stride, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    ARE_KEYS: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens and head. Another kernel may write the other half of a scale."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    index = tl.arange(0, TOKENS)[:, None]
    token = first + index
    kv_head = tl.program_id(1)
    column = tl.arange(0, WIDTH)[None, :]
    is_token, is_column = token < num_tokens, column < HEAD_DIM
    if IS_SCALED:
        scale_of_column = tl.load(column_scales + kv_head * HEAD_DIM + column, is_column, 0.0)
    begin()
    numbers = tl.load(x + token * stride + kv_head * HEAD_DIM + column, is_token & is_column, 0.0)
    if IS_SCALED:
        scale_of_row = tl.load(row_scales + token, is_token, 0.0)
        numbers = (numbers.to(tl.float32) * scale_of_row * scale_of_column).to(x.dtype.element_ty)
    numbers = numbers.to(tl.float32)
    peak = bits_of_peak(numbers)
    if ARE_KEYS:
        factor, half = scale_of_keys(peak)
    else:
        factor, half = scale_of_values(peak)
    slot = tl.load(slot_mapping + token, is_token, -1)
    is_stored = slot >= 0
    of_head, place = slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head, slot % BLOCK_SIZE
    row = of_head * BLOCK_SIZE + place
    numbers = times_factor(numbers, factor)
    if ARE_KEYS:
        tl.store(scales + 2 * row + 1, half, is_stored)
        tl.store(heads + row * HEAD_DIM + column, to_int8(numbers), is_stored & is_column)
    else:
        tl.store(scales + 2 * row, half, is_stored)
        numbers = to_e4m3(numbers)
        # A prompt's tokens are next to each other, in one block or two. If the addresses show that, neighbouring
        # threads write neighbouring tokens, and a warp fills whole sectors of 32 bytes. Otherwise each number takes a
        # sector.
        first_slot = tl.load(slot_mapping + first)
        num_before = BLOCK_SIZE - first_slot % BLOCK_SIZE  # tokens before the second block
        is_second = (num_before < TOKENS) & (num_before < num_tokens - first)
        second_slot = tl.load(slot_mapping + first + num_before, is_second, -1)
        # Otherwise the tokens after the first block are padding, or continue another sequence's block.
        begins_block = (second_slot >= 0) & (second_slot % BLOCK_SIZE == 0) & (index < num_before + BLOCK_SIZE)
        expected = tl.where(begins_block, second_slot + index - num_before, -1)
        expected = tl.where(index < num_before, first_slot + index, expected)
        num_elsewhere = tl.sum((is_stored & (slot != expected)).to(tl.int32))
        if (first_slot >= 0) & (num_elsewhere == 0):
            to = heads + column * BLOCK_SIZE + index
            of_first = (first_slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * HEAD_DIM * BLOCK_SIZE
            is_here = is_stored & is_column & (index < num_before)
            tl.store(to + (of_first + first_slot % BLOCK_SIZE), numbers, is_here)
            if second_slot >= 0:
                of_second = (second_slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * HEAD_DIM * BLOCK_SIZE
                is_here = is_stored & is_column & (index >= num_before)
                tl.store(to + (of_second - num_before), numbers, is_here)
        else:
            at = (of_head * HEAD_DIM + column) * BLOCK_SIZE + place
            tl.store(heads + at, numbers, is_stored & is_column)


def store_fp8(x: torch.Tensor | ScaledProduct, cache: LayerCache, slot_mapping: torch.Tensor, are_keys: bool) -> None:
    """Writes new keys, or new values, to their slots of a cache in FP8.

    Args:
        x: [num_tokens, num_kv_heads × head_dim], or with a dimension for the heads; rows may have a stride.
        slot_mapping: int64 [num_tokens]; −1 is not written.
        are_keys: whether x are keys.
    """
    given, *scales = x if isinstance(x, ScaledProduct) else (x, None, None)
    _store_fp8_kernel[(triton.cdiv(len(given), _TOKENS), cache.num_kv_heads)](
        given, *scales, cache.keys if are_keys else cache.values, halves(cache), slot_mapping, len(given),
        given.stride(0), NUM_KV_HEADS=cache.num_kv_heads, HEAD_DIM=cache.head_dim,
        WIDTH=triton.next_power_of_2(cache.head_dim), BLOCK_SIZE=cache.block_size, TOKENS=_TOKENS, ARE_KEYS=are_keys,
        IS_SCALED=isinstance(x, ScaledProduct), **STORE_OPTIONS,
    )  # fmt: skip


def halves(cache: LayerCache) -> torch.Tensor | None:
    """The scales of a cache in FP8 as int16, each value's before its key's (little-endian); None for other caches."""
    return None if cache.scales is None else cache.scales.view(torch.int16)
