"""Norms (if the model does) and rotates every query and key head, and writes keys and values to their slots, in one
kernel.

The plain twin is what the layers do one after the other: QKNorm, RotaryEmbedding.rotate and a backend's store_kvcache.
"""

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

# Heads that a program norms and rotates together.
_HEADS_OF_PROGRAM = 8


@jit
def _qk_norm_rotate_store_kernel(
    qkv, weight, cos, sin, out, k_cache, v_cache, slot_mapping, eps, NUM_NORMED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """One program per token and some of its heads; the values, which come last, are only stored."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    is_column = column < HEAD_DIM
    is_normed = (head < NUM_NORMED) & is_column
    first = qkv + token * (NUM_NORMED + NUM_KV_HEADS) * HEAD_DIM
    # The halves swapped: rotated is normed × cos + swapped × signed sin. Beyond ROTARY_DIM, cos is 1 and sin is 0.
    swapped_column = (column + ROTARY_DIM // 2) % ROTARY_DIM
    if ROTARY_DIM < HEAD_DIM:
        swapped_column = tl.where(column < ROTARY_DIM, swapped_column, column)
    if NORMS:  # nothing before writes the weights
        weights = tl.load(weight + head * HEAD_DIM + column, is_normed, 0.0).to(tl.float32)
        swapped_weights = tl.load(weight + head * HEAD_DIM + swapped_column, is_normed, 0.0).to(tl.float32)
    begin()
    is_head = (head < NUM_NORMED + NUM_KV_HEADS) & is_column
    values = tl.load(first + head * HEAD_DIM + column, is_head, 0.0)
    x = values.to(tl.float32)
    swapped = tl.load(first + head * HEAD_DIM + swapped_column, is_normed, 0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x *= scale * weights
        swapped *= scale * swapped_weights
    cosine = tl.load(cos + token * HEAD_DIM + column, is_column, 0.0).to(tl.float32)
    sine = tl.load(sin + token * HEAD_DIM + column, is_column, 0.0).to(tl.float32)
    rotated = (x * cosine + swapped * sine).to(out.dtype.element_ty)
    tl.store(out + token * NUM_NORMED * HEAD_DIM + head * HEAD_DIM + column, rotated, is_normed)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        at_slot = slot * NUM_KV_HEADS * HEAD_DIM + column
        kv_head = head - (NUM_NORMED - NUM_KV_HEADS)
        tl.store(k_cache + at_slot + kv_head * HEAD_DIM, rotated, is_normed & (kv_head >= 0))
        value_head = head - NUM_NORMED
        tl.store(v_cache + at_slot + value_head * HEAD_DIM, values, is_head & (value_head >= 0))


def qk_norm_rotate_store(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Norms and rotates every query and key head, and writes keys and values to their slots.

    Args:
        qkv: [num_tokens, num_heads + 2 × num_kv_heads, head_dim].
        weight: [num_heads + num_kv_heads, head_dim], of the norm; None does not norm.
        cos, sin: [num_tokens, 1, head_dim], as RotaryEmbedding.lookup gives them.
        rotary_dim: leading columns of a head that are rotated.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        slot_mapping: int64 [num_tokens]; −1 is not written.

    Returns:
        The finished queries and keys: [num_tokens, num_heads + num_kv_heads, head_dim].
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[2]
    num_normed = num_all_heads - num_kv_heads
    out = torch.empty((num_tokens, num_normed, head_dim), dtype=qkv.dtype, device=qkv.device)
    heads = min(_HEADS_OF_PROGRAM, triton.next_power_of_2(num_all_heads))
    _qk_norm_rotate_store_kernel[(num_tokens, triton.cdiv(num_all_heads, heads))](
        qkv, weight, cos, sin, out, k_cache, v_cache, slot_mapping, eps, NUM_NORMED=num_normed,
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, HEADS=heads,
        WIDTH=triton.next_power_of_2(head_dim), NORMS=weight is not None, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out
