"""The kernels of ops/delta_net.py for prompts: the delta rule in its chunked form (Yang, Wang, Zhang, Shen, Kim, 2024).

The first two kernels compute all that does not depend on the states, in parallel for all tiles of tokens: queries, keys
and values, and per tile the inverse of the triangular system of its changes and the products of its queries and keys.
The third walks through the tiles of each row and carries the state. Its programs compute parts of heads, and the gated
norm needs whole ones, so a fourth kernel applies it.
"""

import torch

from nanovllm.ops.delta_inputs import convolve, gated_norm, gates, keep_input, l2_norm
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_state import DeltaWeights, LayerState, StateRows

TILE = 64  # maximum number of tokens that the chunked form computes at a time
_TILE = tl.constexpr(TILE)
_HALF = tl.constexpr(TILE // 2)
_COLUMNS = 64  # columns of a state that a program of the third kernel carries


@jit
def _times(a, b, PRECISION: tl.constexpr):
    """a @ b in float32, for b in float32. If a has 16 bits, b is split into two numbers of 16 bits: such products are
    exact, and faster than with a converted to float32."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision=PRECISION)
    high = b.to(a.dtype)
    low = (b - high.to(tl.float32)).to(a.dtype)
    return tl.dot(a, low, tl.dot(a, high))


@jit
def _rounded(x, PRECISION: tl.constexpr):
    """x, rounded to TF32 if products have this precision. Tensor cores would cut the last bits off. Such errors have
    one sign, and in sums with cancellation they add up to more than the rounding errors of bfloat16."""
    if PRECISION == "tf32":
        return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@jit
def _inverse(a, PRECISION: tl.constexpr):
    """(I + a)⁻¹ of a strictly lower triangular matrix [64, 64]. It inverts blocks on the diagonal, of 2, 4, … 64 rows:
    [[P, 0], [B, Q]]⁻¹ = [[P⁻¹, 0], [−Q⁻¹ B P⁻¹, Q⁻¹]]."""
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    a = _rounded(a, PRECISION)
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -a, 0.0))
    for power in range(1, 6):  # joins two blocks of 2^power rows
        between = tl.where((i >> power + 1 == j >> power + 1) & (i >> power != j >> power), a, 0.0)
        rounded = _rounded(inverse, PRECISION)
        product = tl.dot(rounded, between, input_precision=PRECISION)
        inverse -= tl.dot(_rounded(product, PRECISION), rounded, input_precision=PRECISION)
    return inverse


@jit(do_not_specialize=["entries_stride"])
def _delta_inputs_kernel(
    qkvz, convolution, inputs, entries, cu_seqlens, tiles, qkv, qkvz_stride, entries_stride,
    NUM_KEY_HEADS: tl.constexpr, NUM_V_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes queries, keys and values to `qkv`, [num_tokens, num_channels]. One program per half tile and head: those
    of queries first, then those of keys and values. WIDTH: the larger dimension padded to a power of 2."""
    begin()
    head, half, tile = tl.program_id(0), tl.program_id(1) % 2, tiles + tl.program_id(1) // 2 * 4
    num_tokens = tl.load(tile + 1)
    if num_tokens > half * _HALF:
        first_token, first_position, row = tl.load(tile).to(tl.int64), tl.load(tile + 2), tl.load(tile + 3)
        state = tl.load(entries + row * entries_stride).to(tl.int64)
        index, column = (half * _HALF + tl.arange(0, _HALF))[:, None], tl.arange(0, WIDTH)[None, :]
        is_value_head = head >= 2 * NUM_KEY_HEADS
        first = head * KEY_DIM + tl.maximum(head - 2 * NUM_KEY_HEADS, 0) * (VALUE_DIM - KEY_DIM)
        is_real = (index < num_tokens) & (column < tl.where(is_value_head, VALUE_DIM, KEY_DIM))
        num_channels: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_V_HEADS * VALUE_DIM
        ring = inputs + state * (KERNEL_SIZE * num_channels)
        first_new = first_position - (first_token - tl.load(cu_seqlens + row)).to(tl.int32)
        of_tile = qkvz + first_token * qkvz_stride
        source = of_tile, qkvz_stride, ring, convolution, index, first_position + index, first_new
        x = convolve(source, first + column, is_real, num_channels, KERNEL_SIZE)
        if not is_value_head:
            x = l2_norm(x)
        if head < NUM_KEY_HEADS:
            x *= KEY_DIM**-0.5
        tl.store(qkv + first_token * num_channels + (index * num_channels + first + column), x, is_real)


@jit
def _delta_tiles_kernel(
    qkv, ba, a_log, dt_bias, tiles, decays, solutions, scores, ba_stride, NUM_KEY_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per value head and tile. KEYS: key_dim padded to a power of 2.

    decays: float32 [num_tokens, num_v_heads], log of the decay since the start of the tile.
    solutions, scores: float32 [num_tokens, num_v_heads, 64], the inverse of the tile's system × β, and the products of
        queries and keys × the decay between them.
    """
    begin()
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    num_tokens = tl.load(tile + 1)
    if num_tokens > 0:
        first_token, place = tl.load(tile).to(tl.int64), tl.arange(0, _TILE)
        is_token, key = place < num_tokens, tl.arange(0, KEYS)[None, :]
        of_tokens = ba + first_token * ba_stride + place * ba_stride
        log_decay, beta = gates(of_tokens, head, a_log, dt_bias, is_token, NUM_V_HEADS)
        decay = tl.cumsum(log_decay, 0)
        first_head = first_token * NUM_V_HEADS + head
        tl.store(decays + first_head + place * NUM_V_HEADS, decay, is_token)
        index, later, is_token = place[:, None], place[None, :], is_token[:, None]
        between = tl.where(index >= later, tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0)), 0.0)
        num_channels: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_V_HEADS * VALUE_DIM
        of_q = qkv + first_token * num_channels + head // (NUM_V_HEADS // NUM_KEY_HEADS) * KEY_DIM
        at = index * num_channels + key
        k = tl.load(of_q + NUM_KEY_HEADS * KEY_DIM + at, is_token & (key < KEY_DIM), 0.0)
        q = tl.load(of_q + at, is_token & (key < KEY_DIM), 0.0)
        at = index * (NUM_V_HEADS * _TILE) + later
        scores, solutions = scores + first_head * _TILE, solutions + first_head * _TILE
        score = between * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        tl.store(scores + at, _rounded(score, PRECISION), is_token)
        system = beta[:, None] * between * tl.dot(k, tl.trans(k), input_precision=PRECISION)
        solution = _inverse(tl.where(index > later, system, 0.0), PRECISION) * beta[None, :]
        tl.store(solutions + at, _rounded(solution, PRECISION), is_token)


@jit(do_not_specialize=["entries_stride"])
def _delta_rows_kernel(
    qkvz, recurrent, inputs, entries, cu_seqlens, context_lens, num_decodes, qkv, decays, solutions, scores, out,
    qkvz_stride, entries_stride, NUM_KEY_HEADS: tl.constexpr, NUM_V_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KERNEL_SIZE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per COLUMNS values of a value head's state and row. KEYS: key_dim padded to a power of 2."""
    begin()
    head, row = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(cu_seqlens + row).to(tl.int64), tl.load(cu_seqlens + row + 1).to(tl.int64)
    if (row >= tl.load(num_decodes)) & (start < end):
        state = tl.load(entries + row * entries_stride).to(tl.int64)
        length = tl.load(context_lens + row)
        width: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
        num_channels: tl.constexpr = 2 * width + NUM_V_HEADS * VALUE_DIM
        index, later = tl.arange(0, _TILE)[:, None], tl.arange(0, _TILE)[None, :]
        key, value = tl.arange(0, KEYS)[None, :], (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        is_key, is_value = key < KEY_DIM, value < VALUE_DIM
        of_q, of_v = head // (NUM_V_HEADS // NUM_KEY_HEADS) * KEY_DIM + key, 2 * width + head * VALUE_DIM + value
        line = tl.arange(0, KEYS)[:, None]
        matrix = recurrent + (state * NUM_V_HEADS + head) * (KEY_DIM * VALUE_DIM) + value * KEY_DIM + line
        is_number = (line < KEY_DIM) & is_value
        s = tl.load(matrix, is_number & (line < tl.where(length > end - start, KEY_DIM, 0)), 0.0)
        for first in range(start, end, _TILE):
            num_tokens = tl.minimum(end - first, _TILE).to(tl.int32)
            is_token, of_tile, first_head = index < num_tokens, qkv + first * num_channels, first * NUM_V_HEADS + head
            q = tl.load(of_tile + (index * num_channels + of_q), is_token & is_key, 0.0)
            k = tl.load(of_tile + width + (index * num_channels + of_q), is_token & is_key, 0.0)
            v = tl.load(of_tile + (index * num_channels + of_v), is_token & is_value, 0.0).to(tl.float32)
            at = index * (NUM_V_HEADS * _TILE) + later
            solution = tl.load(solutions + first_head * _TILE + at, is_token, 0.0)
            score = tl.load(scores + first_head * _TILE + at, is_token, 0.0)
            last = tl.load(decays + first_head + (num_tokens - 1) * NUM_V_HEADS)
            log_decay = tl.load(decays + first_head + index * NUM_V_HEADS, is_token, 0.0)
            decay = tl.exp(log_decay)
            missing = _rounded(v - decay * _times(k, s, PRECISION), PRECISION)
            changes = tl.dot(solution, missing, input_precision=PRECISION)
            inside = tl.dot(score, _rounded(changes, PRECISION), input_precision=PRECISION)
            x = decay * _times(q, s, PRECISION) + inside
            at = index * (NUM_V_HEADS * VALUE_DIM) + value
            tl.store(out + first_head * VALUE_DIM + at, x, is_token & is_value)
            changes *= tl.exp(tl.minimum(last - log_decay, 0.0))
            s = tl.exp(last) * s + _times(tl.trans(k), changes, PRECISION)
        tl.store(matrix, s, is_number)
        ring = inputs + state * (KERNEL_SIZE * num_channels)
        for back in tl.static_range(1, KERNEL_SIZE + 1):
            source = qkvz + (end - back) * qkvz_stride, qkvz_stride, ring, qkvz, 0, length - back, 0
            if end - back >= start:
                keep_input(source, of_v, is_value, num_channels, KERNEL_SIZE)
                if (head % (NUM_V_HEADS // NUM_KEY_HEADS) == 0) & (tl.program_id(0) == 0):
                    keep_input(source, of_q, is_key, num_channels, KERNEL_SIZE)
                    keep_input(source, width + of_q, is_key, num_channels, KERNEL_SIZE)


@jit
def _delta_norm_kernel(
    qkvz, norm, tiles, out, eps, qkvz_stride, NUM_CHANNELS: tl.constexpr, NUM_V_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Applies the gated norm to `out`, in place. One program per value head and tile."""
    begin()
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    num_tokens = tl.load(tile + 1)
    if num_tokens > 0:
        index, value = tl.arange(0, _TILE)[:, None], tl.arange(0, VALUES)[None, :]
        first_token, is_value = tl.load(tile).to(tl.int64), value < VALUE_DIM
        is_real = (index < num_tokens) & is_value
        at = out + first_token * (NUM_V_HEADS * VALUE_DIM) + ((index * NUM_V_HEADS + head) * VALUE_DIM + value)
        of_tile = qkvz + first_token * qkvz_stride + NUM_CHANNELS
        z = tl.load(of_tile + (index * qkvz_stride + head * VALUE_DIM + value), is_real, 0.0).to(tl.float32)
        weight = tl.load(norm + value, is_value, 0.0).to(tl.float32)
        x = tl.load(at, is_real, 0.0).to(tl.float32)
        tl.store(at, gated_norm(x, tl.sum(x * x, 1)[:, None], weight, z, eps, VALUE_DIM), is_real)


def _precision(dtype: torch.dtype, key_dim: int) -> str:
    """How the kernels multiply float32 numbers."""
    if dtype != torch.float32:
        return "tf32"  # rounds systems and changes less than the inputs' 16 bits do
    # Three products of TF32 are almost as precise as IEEE 754, for which ptxas runs out of registers.
    return "tf32x3" if key_dim <= 128 else "ieee"  # wider keys in three parts do not fit into shared memory


def triton_delta_prompts(
    qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState, rows: StateRows, out: torch.Tensor
) -> None:
    """Writes the rows of `out` that are tokens of prompts."""
    if rows.tiles is None:
        return
    (_, num_v_heads, value_dim, key_dim), num_key_heads = state.recurrent.shape, state.num_key_heads
    num_tokens, num_tiles, num_channels = len(qkvz), len(rows.tiles), state.inputs.shape[2]
    qkv = qkvz.new_empty((num_tokens, num_channels))
    decays = state.recurrent.new_empty((num_tokens, num_v_heads))
    solutions, scores = state.recurrent.new_empty((2, num_tokens, num_v_heads, TILE))
    heads = {
        "NUM_KEY_HEADS": num_key_heads, "NUM_V_HEADS": num_v_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim,
    }  # fmt: skip
    precision = _precision(qkvz.dtype, key_dim)
    keys, values = max(16, triton.next_power_of_2(key_dim)), triton.next_power_of_2(value_dim)
    of_rows = rows.entries, rows.cu_seqlens
    _delta_inputs_kernel[(2 * num_key_heads + num_v_heads, 2 * num_tiles)](
        qkvz, weights.convolution, state.inputs, *of_rows, rows.tiles, qkv, qkvz.stride(0), rows.entries.stride(0),
        **heads, KERNEL_SIZE=state.inputs.shape[1], WIDTH=max(keys, values), num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    _delta_tiles_kernel[(num_v_heads, num_tiles)](
        qkv, ba, weights.a_log, weights.dt_bias, rows.tiles, decays, solutions, scores, ba.stride(0), **heads,
        KEYS=keys, PRECISION=precision, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    # With wider keys, fewer columns fit into shared memory.
    columns = min(_COLUMNS if key_dim <= 128 else 16, max(16, values))
    _delta_rows_kernel[(triton.cdiv(value_dim, columns), num_v_heads, len(rows.entries))](
        qkvz, *state, *of_rows, rows.context_lens, rows.num_decodes, qkv, decays, solutions, scores, out,
        qkvz.stride(0), rows.entries.stride(0), **heads, KERNEL_SIZE=state.inputs.shape[1], KEYS=keys,
        COLUMNS=columns, PRECISION=precision, num_warps=4, num_stages=2, **LAUNCH_OPTIONS,
    )  # fmt: skip
    _delta_norm_kernel[(num_v_heads, num_tiles)](
        qkvz, weights.norm, rows.tiles, out, weights.eps, qkvz.stride(0), NUM_CHANNELS=num_channels,
        NUM_V_HEADS=num_v_heads, VALUE_DIM=value_dim, VALUES=values, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
