"""The kernel of ops/delta_net.py for decodes. It reads and writes each state once, and memory bandwidth limits it."""

import torch

from nanovllm.ops.delta_inputs import convolve, gated_norm, gates, keep_input, l2_norm
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_state import DeltaWeights, LayerState, StateRows

_COLUMNS = 32  # values of a state that a program computes at a time


@jit(do_not_specialize=["entries_stride"])
def _delta_decode_kernel(
    qkvz, ba, convolution, a_log, dt_bias, norm, recurrent, inputs, entries, context_lens, num_decodes, out, eps,
    qkvz_stride, ba_stride, entries_stride, NUM_KEY_HEADS: tl.constexpr, NUM_V_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KERNEL_SIZE: tl.constexpr, KEYS: tl.constexpr,
    NUM_PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per value head and row. KEYS: key_dim padded to a power of 2. The program computes COLUMNS values of
    the state at a time, because few programs have room for a whole one beside each other."""
    begin()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if row < tl.load(num_decodes):
        state = tl.load(entries + row * entries_stride).to(tl.int64)
        position = tl.load(context_lens + row) - 1
        heads_per_key: tl.constexpr = NUM_V_HEADS // NUM_KEY_HEADS
        width: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
        num_channels: tl.constexpr = 2 * width + NUM_V_HEADS * VALUE_DIM
        zero = tl.zeros([1, 1], tl.int32)
        ring = inputs + state * (KERNEL_SIZE * num_channels)
        source = qkvz + row * qkvz_stride, qkvz_stride, ring, convolution, zero, position + zero, position
        # Query and key are two lines of one tensor, and sums take them apart. So each is computed once, and threads get
        # the numbers that they need. Otherwise Triton makes each thread compute all these numbers itself.
        part, key = tl.arange(0, 2)[:, None], tl.arange(0, KEYS)[None, :]
        of_key, is_key = part * width + head // heads_per_key * KEY_DIM + key, (part < 2) & (key < KEY_DIM)
        qk = l2_norm(convolve(source, of_key, is_key, num_channels, KERNEL_SIZE))
        q = tl.sum(tl.where(part == 0, qk, 0.0), 0)[None, :] * KEY_DIM**-0.5
        k = tl.sum(tl.where(part == 1, qk, 0.0), 0)[None, :]
        index, column = tl.arange(0, NUM_PARTS)[:, None], tl.arange(0, COLUMNS)[None, :]
        value = index * COLUMNS + column
        is_value = value < VALUE_DIM
        of_value = 2 * width + head * VALUE_DIM + value
        v = convolve(source, of_value, is_value, num_channels, KERNEL_SIZE)
        # The convolution does not read this place of the ring, so slower programs with the same key head see no change.
        keep_input(source, of_value, is_value, num_channels, KERNEL_SIZE)
        if head % heads_per_key == 0:
            keep_input(source, of_key, is_key, num_channels, KERNEL_SIZE)

        log_decay, beta = gates(ba + row * ba_stride, head, a_log, dt_bias, True, NUM_V_HEADS)
        decay, score = tl.exp(log_decay), tl.sum(q * k)
        line = tl.arange(0, COLUMNS)[:, None]
        matrix = recurrent + (state * NUM_V_HEADS + head) * (KEY_DIM * VALUE_DIM) + line * KEY_DIM + key
        x = tl.zeros([NUM_PARTS, COLUMNS], tl.float32)
        for first in tl.range(0, NUM_PARTS * COLUMNS, COLUMNS):
            is_number = (first + line < VALUE_DIM) & (key < KEY_DIM)
            s = tl.load(matrix + first * KEY_DIM, is_number & (key < tl.where(position > 0, KEY_DIM, 0)), 0.0)
            is_part = index * COLUMNS == first
            change = beta * (tl.sum(tl.where(is_part, v, 0.0), 0) - decay * tl.sum(s * k, 1))
            x = tl.where(is_part, (decay * tl.sum(s * q, 1) + score * change)[None, :], x)
            tl.store(matrix + first * KEY_DIM, decay * s + change[:, None] * k, is_number)
        z = tl.load(qkvz + row * qkvz_stride + num_channels + head * VALUE_DIM + value, is_value, 0.0).to(tl.float32)
        weight = tl.load(norm + value, is_value, 0.0).to(tl.float32)
        at = (row * NUM_V_HEADS + head) * VALUE_DIM + value
        tl.store(out + at, gated_norm(x, tl.sum(x * x), weight, z, eps, VALUE_DIM), is_value)


def triton_delta_decodes(
    qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState, rows: StateRows, out: torch.Tensor
) -> None:
    """Writes the rows of `out` that are decodes."""
    if rows.max_num_decodes == 0:
        return
    _, num_v_heads, value_dim, key_dim = state.recurrent.shape
    keys, values = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    columns = min(values, _COLUMNS)
    _delta_decode_kernel[(num_v_heads, rows.max_num_decodes)](
        qkvz, ba, *weights[:4], *state, rows.entries, rows.context_lens, rows.num_decodes, out, weights.eps,
        qkvz.stride(0), ba.stride(0), rows.entries.stride(0), NUM_KEY_HEADS=state.num_key_heads,
        NUM_V_HEADS=num_v_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, KERNEL_SIZE=state.inputs.shape[1], KEYS=keys,
        NUM_PARTS=values // columns, COLUMNS=columns, num_warps=8, **LAUNCH_OPTIONS,
    )  # fmt: skip
