"""Norms (if the model does) and rotates every query and key head, and writes keys and values to their slots, in one
kernel. In steps with prompts, a second kernel writes the values of a cache in FP8: transposed, many tokens at a time.

The plain twins are the layers' own operations: QKNorm, RotaryEmbedding.rotate and a backend's store_kvcache.
"""

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.quantize import ScaledProduct, to_e4m3, to_int8
from nanovllm.ops.store_fp8 import (
    STORE_OPTIONS,
    bits_of_peak,
    halves,
    scale_of_keys,
    scale_of_values,
    store_fp8,
    times_factor,
)

# Heads that a program norms and rotates together, and its warps.
_HEADS_OF_PROGRAM = 16
_NUM_WARPS = 4


@jit
def _store_columns(numbers, column, is_column, keys, values, BLOCK_SIZE: tl.constexpr, STORES_VALUES: tl.constexpr):
    """Stores some columns of heads in FP8. keys, values: (which heads they are, their factors, 0 for the other heads,
    their addresses). Values are transposed."""
    is_key, of_key, to_key = keys
    is_value, of_value, to_value = values
    tl.store(to_key + column, to_int8(times_factor(numbers, of_key)), is_key & is_column)
    if STORES_VALUES:
        tl.store(to_value + column * BLOCK_SIZE, to_e4m3(times_factor(numbers, of_value)), is_value & is_column)


@jit
def _qk_norm_rotate_store_kernel(
    qkv, row_scales, column_scales, weight, cos, sin, out, k_cache, v_cache, cache_scales, slot_mapping, eps,
    STRIDE: tl.constexpr, NUM_NORMED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NORMS: tl.constexpr, IS_SCALED: tl.constexpr, STORES_VALUES: tl.constexpr,
):  # fmt: skip
    """One program per token and some of its heads; the heads of values are the last. They are neither normed nor
    rotated, and are stored only if STORES_VALUES.

    A head is read in parts: the two halves that rotate into each other, and the columns after them, which do not
    rotate. HALF and REST are their padded numbers of columns; REST is 0 if all columns rotate. IS_SCALED: qkv is a
    ScaledProduct, with its scales. cache_scales: `halves` of a cache in FP8, or None.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_normed, is_head = head < NUM_NORMED, head < NUM_NORMED + NUM_KV_HEADS
    low = tl.arange(0, HALF)[None, :]
    high, is_rotated = low + ROTARY_DIM // 2, low < ROTARY_DIM // 2
    if REST:
        rest = ROTARY_DIM + tl.arange(0, REST)[None, :]
        is_rest = rest < HEAD_DIM
    if NORMS:  # no earlier kernel writes the weights
        weights_low = tl.load(weight + head * HEAD_DIM + low, is_normed & is_rotated, 0.0).to(tl.float32)
        weights_high = tl.load(weight + head * HEAD_DIM + high, is_normed & is_rotated, 0.0).to(tl.float32)
        if REST:
            weights_rest = tl.load(weight + head * HEAD_DIM + rest, is_normed & is_rest, 0.0).to(tl.float32)
    if IS_SCALED:
        scales_low = tl.load(column_scales + head * HEAD_DIM + low, is_head & is_rotated, 0.0)
        scales_high = tl.load(column_scales + head * HEAD_DIM + high, is_head & is_rotated, 0.0)
        if REST:
            scales_rest = tl.load(column_scales + head * HEAD_DIM + rest, is_head & is_rest, 0.0)
    begin()
    of_head = qkv + token * STRIDE + head * HEAD_DIM
    given_low = tl.load(of_head + low, is_head & is_rotated, 0.0)
    given_high = tl.load(of_head + high, is_head & is_rotated, 0.0)
    if IS_SCALED:
        of_row = tl.load(row_scales + token)
        given_low = (given_low.to(tl.float32) * of_row * scales_low).to(out.dtype.element_ty)
        given_high = (given_high.to(tl.float32) * of_row * scales_high).to(out.dtype.element_ty)
    x, y = given_low.to(tl.float32), given_high.to(tl.float32)
    if REST:
        given_rest = tl.load(of_head + rest, is_head & is_rest, 0.0)
        if IS_SCALED:
            given_rest = (given_rest.to(tl.float32) * of_row * scales_rest).to(out.dtype.element_ty)
        z = given_rest.to(tl.float32)
    if NORMS:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if REST:
            squares += tl.sum(z * z, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        x *= scale * weights_low
        y *= scale * weights_high
        if REST:
            z *= scale * weights_rest
    cosine = tl.load(cos + token * HEAD_DIM + high, is_rotated, 0.0).to(tl.float32)
    sine = tl.load(sin + token * HEAD_DIM + high, is_rotated, 0.0).to(tl.float32)  # the low half's have the other sign
    rotated_low = (x * cosine - y * sine).to(out.dtype.element_ty)
    rotated_high = (y * cosine + x * sine).to(out.dtype.element_ty)
    of_out = out + token * NUM_NORMED * HEAD_DIM + head * HEAD_DIM
    tl.store(of_out + low, rotated_low, is_normed & is_rotated)
    tl.store(of_out + high, rotated_high, is_normed & is_rotated)
    if REST:
        finished_rest = z.to(out.dtype.element_ty)
        tl.store(of_out + rest, finished_rest, is_normed & is_rest)
    slot = tl.load(slot_mapping + token)
    kv_head = head - (NUM_NORMED - NUM_KV_HEADS)
    is_kept = (is_head if STORES_VALUES else is_normed) & (kv_head >= 0)
    kept_low, kept_high = tl.where(is_normed, rotated_low, given_low), tl.where(is_normed, rotated_high, given_high)
    if REST:
        kept_rest = tl.where(is_normed, finished_rest, given_rest)
    if slot >= 0:
        if cache_scales is not None:
            low_number, high_number = kept_low.to(tl.float32), kept_high.to(tl.float32)
            peak = tl.maximum(bits_of_peak(low_number), bits_of_peak(high_number))
            if REST:
                rest_number = kept_rest.to(tl.float32)
                peak = tl.maximum(peak, bits_of_peak(rest_number))
            of_key, key_half = scale_of_keys(peak)
            of_value, value_half = scale_of_values(peak)
            of_kv_head, place = slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head % NUM_KV_HEADS, slot % BLOCK_SIZE
            row = of_kv_head * BLOCK_SIZE + place
            half = tl.where(is_normed, key_half, value_half)
            tl.store(cache_scales + 2 * row + is_normed.to(tl.int64), half, is_kept)
            keys = is_kept & is_normed, tl.where(is_normed, of_key, 0.0), k_cache + row * HEAD_DIM
            to_values = v_cache + (of_kv_head * HEAD_DIM * BLOCK_SIZE + place)
            values = is_kept & ~is_normed, tl.where(is_normed, 0.0, of_value), to_values
            _store_columns(low_number, low, is_rotated, keys, values, BLOCK_SIZE, STORES_VALUES)
            _store_columns(high_number, high, is_rotated, keys, values, BLOCK_SIZE, STORES_VALUES)
            if REST:
                _store_columns(rest_number, rest, is_rest, keys, values, BLOCK_SIZE, STORES_VALUES)
        else:
            at_slot = slot * NUM_KV_HEADS * HEAD_DIM + kv_head % NUM_KV_HEADS * HEAD_DIM
            of_slot = tl.where(is_normed, k_cache + at_slot, v_cache + at_slot)
            tl.store(of_slot + low, kept_low, is_kept & is_rotated)
            tl.store(of_slot + high, kept_high, is_kept & is_rotated)
            if REST:
                tl.store(of_slot + rest, kept_rest, is_kept & is_rest)


def qk_norm_rotate_store(
    qkv: torch.Tensor | ScaledProduct,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_dim: int,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    has_prompts: bool = True,
) -> torch.Tensor:
    """Norms and rotates every query and key head, and writes keys and values to their slots.

    Args:
        qkv: [num_tokens, (num_heads + 2 × num_kv_heads) × head_dim], or with a dimension for the heads. Rows may have
            a stride.
        weight: [num_heads + num_kv_heads, head_dim], the norm's weights; None does not norm.
        cos, sin: [num_tokens, 1, head_dim], as RotaryEmbedding.lookup gives them.
        rotary_dim: number of leading columns of a head that are rotated.
        slot_mapping: int64 [num_tokens]; −1 is not written.
        has_prompts: the step has prompts, whose tokens are next to each other in the cache. A second kernel then writes
            the values of a cache in FP8. It costs a launch, but fills whole sectors of memory.

    Returns:
        The finished queries and keys: [num_tokens, num_heads + num_kv_heads, head_dim].
    """
    given, *scales = qkv if isinstance(qkv, ScaledProduct) else (qkv, None, None)
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    num_tokens, num_all_heads = given.shape[0], given.shape[1:].numel() // head_dim
    num_normed, rest = num_all_heads - num_kv_heads, head_dim - rotary_dim
    out = torch.empty((num_tokens, num_normed, head_dim), dtype=given.dtype, device=given.device)
    stores_values = not (cache.is_fp8 and has_prompts)
    num_heads = num_all_heads if stores_values else num_normed
    heads = min(_HEADS_OF_PROGRAM, triton.next_power_of_2(num_heads))
    _qk_norm_rotate_store_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        given, *scales, weight, cos, sin, out, cache.keys, cache.values, halves(cache), slot_mapping, eps,
        STRIDE=given.stride(0), NUM_NORMED=num_normed, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim, BLOCK_SIZE=cache.block_size, HEADS=heads,
        HALF=triton.next_power_of_2(rotary_dim // 2), REST=triton.next_power_of_2(rest) if rest else 0,
        NORMS=weight is not None, IS_SCALED=isinstance(qkv, ScaledProduct), STORES_VALUES=stores_values,
        num_warps=_NUM_WARPS, **(STORE_OPTIONS if cache.is_fp8 else LAUNCH_OPTIONS),
    )  # fmt: skip
    if not stores_values:
        first = num_normed * head_dim
        values: torch.Tensor | ScaledProduct = given.flatten(1)[:, first:]
        if isinstance(qkv, ScaledProduct):
            values = ScaledProduct(qkv.product[:, first:], qkv.row_scales, qkv.column_scales[first:])
        store_fp8(values, cache, slot_mapping, are_keys=False)
    return out
