"""Triton kernels for what is neither attention nor a product of matrices, fused for fewer launches and fewer bytes, and
for the product of a single row.

Each computes in float32 and rounds once. The plain twins are the layers' own PyTorch code: RMSNorm, QKNorm with
RotaryEmbedding and a backend's store_kvcache, SiluAndMul, the plain half of DeviceState.decode_batch, and `F.linear`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.utils.context import DecodeInputs

# Heads that a program norms and rotates together.
_HEADS_OF_PROGRAM = 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [num_tokens, size] -> the same, normed and weighted"""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    _rms_norm_kernel[(num_tokens,)](
        x, x, weight, out, out, eps, SIZE=size, PADDED=triton.next_power_of_2(size), ADDS=False,
        num_warps=_num_warps(size), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [num_tokens, size] -> (norm(x + residual), x + residual)"""
    out, total = torch.empty_like(x), torch.empty_like(x)
    num_tokens, size = x.shape
    _rms_norm_kernel[(num_tokens,)](
        x, residual, weight, out, total, eps, SIZE=size, PADDED=triton.next_power_of_2(size), ADDS=True,
        num_warps=_num_warps(size), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out, total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [num_tokens, 2 × size] -> silu(gate) × up: [num_tokens, size]"""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, **LAUNCH_OPTIONS)
    return out


def qk_norm_rotate_store(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Norms and rotates every query and key head, and writes keys and values to their slots.

    Args:
        qkv: [num_tokens, num_heads + 2 × num_kv_heads, head_dim].
        weight: [num_heads + num_kv_heads, head_dim].
        cos, sin: [num_tokens, 1, head_dim], as RotaryEmbedding.lookup gives them.
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
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HEADS=heads, WIDTH=triton.next_power_of_2(head_dim),
        num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def single_row_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [1, input_size], weight: [output_size, input_size] -> `x @ weight.T`, [1, output_size]

    With one row there is nothing to reuse: all that counts is to read the weights without a pause. Each program's
    first ones are on their way before the kernel before has ended. The plain twin is `F.linear`.
    """
    output_size, input_size = weight.shape
    out = torch.empty((1, output_size), dtype=x.dtype, device=x.device)
    _single_row_linear_kernel[(triton.cdiv(output_size, 8),)](
        x, weight, out, output_size, SIZE=input_size, OUTPUTS=8,
        INPUTS=min(1024, triton.next_power_of_2(input_size)), num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def decode_inputs(
    rows: torch.Tensor, last_token_ids: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> DecodeInputs:
    """Reads the rows of a decode step from the device's state and moves each on by a token; see DeviceState.

    Args:
        rows: int64 [num_rows, 4], slot, context length, seed and temperature (float64); changed.
        last_token_ids: int64 [num_slots]; block_tables: int32 [num_slots, max_blocks].
    """
    num_rows, max_blocks = len(rows), block_tables.shape[1]
    longs = torch.empty((6, num_rows), dtype=torch.int64, device=rows.device)
    context_lens = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    temperatures = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    tables = torch.empty((num_rows, max_blocks), dtype=torch.int32, device=rows.device)
    _decode_inputs_kernel[(num_rows,)](
        rows, rows.view(torch.float64), last_token_ids, block_tables, longs, context_lens, temperatures, tables,
        num_rows, max_blocks, BLOCK_SIZE=block_size, CHUNK=min(1024, triton.next_power_of_2(max_blocks)),
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return DecodeInputs(*longs, context_lens, temperatures, tables)


def _num_warps(size: int) -> int:
    return 4 if size <= 2048 else 8


@triton.jit(do_not_specialize=["num_rows", "max_blocks"])
def _decode_inputs_kernel(
    rows, rows_as_float, last_token_ids, block_tables, longs, context_lens, temperatures, tables, num_rows, max_blocks,
    BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    begin()
    row = tl.program_id(0)
    slot = tl.load(rows + row * 4)
    length = tl.load(rows + row * 4 + 1)
    table = block_tables + slot * max_blocks
    position = tl.maximum(length - 1, 0)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    at_slot = tl.where(length > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(longs + row, tl.load(last_token_ids + slot))
    tl.store(longs + num_rows + row, position)
    tl.store(longs + 2 * num_rows + row, slot)
    tl.store(longs + 3 * num_rows + row, at_slot)
    tl.store(longs + 4 * num_rows + row, length)
    tl.store(longs + 5 * num_rows + row, tl.load(rows + row * 4 + 2))
    tl.store(context_lens + row, length.to(tl.int32))
    tl.store(temperatures + row, tl.load(rows_as_float + row * 4 + 3).to(tl.float32))
    for first in range(0, max_blocks, CHUNK):
        index = first + tl.arange(0, CHUNK)
        is_block = index < max_blocks
        tl.store(tables + row.to(tl.int64) * max_blocks + index, tl.load(table + index, is_block, 0), is_block)
    tl.store(rows + row * 4 + 1, length + (length > 0).to(tl.int64))


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, PADDED)
    is_real = column < SIZE
    weights = tl.load(weight + column, is_real, 0.0).to(tl.float32)  # nothing before writes it
    begin()
    values = tl.load(x + row + column, is_real, 0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row + column, is_real, 0.0).to(tl.float32)
        # What is normed is the sum as it is kept.
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row + column, rounded, is_real)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + row + column, values * scale * weights, is_real)


@triton.jit(do_not_specialize=["output_size"])
def _single_row_linear_kernel(
    x, weight, out, output_size, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    is_output = output < output_size
    at = weight + output[:, None].to(tl.int64) * SIZE + column[None, :]
    weights = tl.load(at, is_output[:, None] & (column < SIZE)[None, :], 0.0)  # nothing before writes them
    begin()
    products = weights.to(tl.float32) * tl.load(x + column, column < SIZE, 0.0).to(tl.float32)[None, :]
    for first in tl.static_range(INPUTS, SIZE, INPUTS):
        is_real = first + column < SIZE
        weights = tl.load(at + first, is_output[:, None] & is_real[None, :], 0.0)
        products += weights.to(tl.float32) * tl.load(x + first + column, is_real, 0.0).to(tl.float32)[None, :]
    tl.store(out + output, tl.sum(products, 1), is_output)


@triton.jit
def _silu_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, is_real, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, is_real, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gate / (1.0 + tl.exp(-gate)) * up, is_real)


@triton.jit
def _qk_norm_rotate_store_kernel(
    qkv, weight, cos, sin, out, k_cache, v_cache, slot_mapping, eps, NUM_NORMED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a token and some of its heads; the values, which come last, are only stored."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    is_column = column < HEAD_DIM
    is_normed = (head < NUM_NORMED) & is_column
    first = qkv + token * (NUM_NORMED + NUM_KV_HEADS) * HEAD_DIM
    # The halves swapped: rotated is normed × cos + swapped × signed sin.
    swapped_column = (column + HEAD_DIM // 2) % HEAD_DIM
    weights = tl.load(weight + head * HEAD_DIM + column, is_normed, 0.0).to(tl.float32)  # nothing before writes them
    swapped_weights = tl.load(weight + head * HEAD_DIM + swapped_column, is_normed, 0.0).to(tl.float32)
    begin()
    is_head = (head < NUM_NORMED + NUM_KV_HEADS) & is_column
    values = tl.load(first + head * HEAD_DIM + column, is_head, 0.0)
    x = values.to(tl.float32)
    swapped = tl.load(first + head * HEAD_DIM + swapped_column, is_normed, 0.0).to(tl.float32)
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
