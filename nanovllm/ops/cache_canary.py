"""Canaries of the KV cache: beside each slot a number that depends on the whole prefix whose last token has its keys
there. A row of a step then shows, without its keys, whether every slot that it reads was written for its own tokens.

The canary of position p is h[p] = Σ mix(token i, i) over i ≤ p, modulo 2⁶⁴, plus a constant per group of layers. `mix`
is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), which maps different (token, position) to different
numbers. A sum can be checked in parts: h[p] − h[p − 1] must be mix(token p, p).
"""

import torch
from torch import Tensor

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.expand_rows import Expanded
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.splitmix64 import FIRST, SECOND, SIGNED_STEP, STEP, finalized

NONE_WRONG = 2**63 - 1
_OF_GROUP = 0x9E3779B97F4A7  # group × this is added, so that blocks of different groups cannot be confused
_WIDTH = 1024  # tokens that a program takes at a time
_MAX_PROGRAMS = 16  # that share the check of a row


def mix(token_ids: Tensor, positions: Tensor) -> Tensor:
    """SplitMix64 of (position, token id), both int64 in 0 … 2³² − 1: int64, all 64 bits of it random."""
    return finalized((positions << 32).add_(token_ids).add_(SIGNED_STEP))


def plain_guard_cache(
    canaries: Tensor, tokens: Tensor, entries: Tensor, rows: Expanded, window: int, wrong_slots: Tensor
) -> None:
    (num_blocks, block_size), flat = canaries.shape, canaries.view(-1)
    cu_seqlens, num_groups = rows.cu_seqlens_q.long(), len(rows.slot_mapping)
    num_new, num_tokens = cu_seqlens.diff(), int(cu_seqlens[-1])
    lengths = torch.where(num_new > 0, rows.context_lens, 0).long()  # a row without new tokens reads no keys
    starts = lengths - num_new
    wrong_slots.fill_(NONE_WRONG)
    ends = lengths.cumsum(0)
    # All positions of all rows, side by side.
    row = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths)
    position = torch.arange(len(row), device=tokens.device) - (ends - lengths)[row]
    place = (entries.long() * tokens.shape[1])[row] + position
    of_tokens = mix(tokens.view(-1).take(place).long(), position)
    sums = torch.nn.functional.pad(of_tokens.cumsum(0), (1, 0))
    before = sums[ends - lengths]
    expected = sums[1:] - before[row]
    # New tokens continue the sum of the tokens before them.
    of_new = torch.nn.functional.pad(mix(rows.token_ids, rows.positions)[:num_tokens].cumsum(0), (1, 0))
    continued = sums[ends - num_new] - before - of_new[cu_seqlens[:-1]]
    written = of_new[1:] + torch.repeat_interleave(continued, num_new)
    for group in range(num_groups):
        flat[rows.slot_mapping[group, :num_tokens]] = written + group * _OF_GROUP
    index = position // block_size
    offset, index = position - index * block_size, index.add_(row * rows.block_tables.shape[2])
    for group in range(num_groups):
        block = rows.block_tables[group].reshape(-1).take(index).long()
        is_outside = (block < 0) | (block >= num_blocks)
        slot = (block * block_size).add_(offset).masked_fill_(is_outside, 0)
        is_wrong = (flat.take(slot) != expected + group * _OF_GROUP) | is_outside
        if group:
            is_wrong &= position > (starts - window)[row]
        places = is_wrong.nonzero()[:, 0]
        wrong_slots.scatter_reduce_(0, row[places], (position << 32 | block & 0xFFFFFFFF)[places], "amin")


_STEP_IN_KERNEL, _FIRST_IN_KERNEL, _SECOND_IN_KERNEL = map(tl.constexpr, (STEP, FIRST, SECOND))
_OF_GROUP_IN_KERNEL, _NONE_WRONG = tl.constexpr(_OF_GROUP), tl.constexpr(NONE_WRONG)


@jit
def _mix(token, position):
    mixed = ((position.to(tl.uint64) << 32) | token.to(tl.uint64)) + _STEP_IN_KERNEL
    mixed = (mixed ^ (mixed >> 30)) * _FIRST_IN_KERNEL
    mixed = (mixed ^ (mixed >> 27)) * _SECOND_IN_KERNEL
    return (mixed ^ (mixed >> 31)).to(tl.int64, bitcast=True)


@jit(do_not_specialize=["max_model_len", "slots_stride"])
def _write_kernel(
    canaries, wrong_slots, tokens, entries, token_ids, positions, slots, cu_seqlens, context_lens, max_model_len,
    slots_stride, entries_stride: tl.constexpr, NUM_GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes the canaries of a row's new tokens."""
    begin()
    row = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    tl.store(wrong_slots + row, _NONE_WRONG)
    first = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    num_before = tl.load(context_lens + row) - (end - first)
    if first < end:
        known = tokens + tl.load(entries + row * entries_stride).to(tl.int64) * max_model_len
        sums = tl.zeros((WIDTH,), tl.int64)
        for at in range(0, num_before, WIDTH):
            is_known = at + lane < num_before
            mixed = _mix(tl.load(known + at + lane, is_known, 0), at + lane)
            sums += tl.where(is_known, mixed, 0)
        total = tl.sum(sums, 0)
        for at in range(first, end, WIDTH):
            token = at + lane
            is_new = token < end
            mixed = _mix(tl.load(token_ids + token, is_new, 0), tl.load(positions + token, is_new, 0))
            mixed = tl.where(is_new, mixed, 0)
            canary = total + tl.cumsum(mixed, 0)
            total += tl.sum(mixed, 0)
            for group in tl.static_range(NUM_GROUPS):
                slot = tl.load(slots + group * slots_stride.to(tl.int64) + token, is_new, -1)
                tl.store(canaries + slot, canary + group * _OF_GROUP_IN_KERNEL, is_new & (slot >= 0))


@jit(do_not_specialize=["max_model_len", "num_blocks", "window", "tables_stride", "table_stride"])
def _check_kernel(
    canaries, wrong_slots, tokens, entries, block_tables, cu_seqlens, context_lens, max_model_len, num_blocks, window,
    tables_stride, table_stride, entries_stride: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Finds a row's first slot with a wrong canary. Several programs share a row."""
    begin()
    row = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    num_new = tl.load(cu_seqlens + row + 1) - tl.load(cu_seqlens + row)
    length = tl.where(num_new > 0, tl.load(context_lens + row), 0)  # a row without new tokens reads no keys
    known = tokens + tl.load(entries + row * entries_stride).to(tl.int64) * max_model_len
    table = block_tables + row.to(tl.int64) * table_stride
    for at in range(tl.program_id(1) * WIDTH, length, tl.num_programs(1) * WIDTH):
        position = at + lane
        is_key = position < length
        block = tl.load(table + position // BLOCK_SIZE, is_key, 0).to(tl.int64)
        is_inside = (block >= 0) & (block < num_blocks)
        canary = tl.load(canaries + block * BLOCK_SIZE + position % BLOCK_SIZE, is_key & is_inside, 0)
        before = tl.maximum(position - 1, 0)
        block_before = tl.load(table + before // BLOCK_SIZE, is_key, 0).to(tl.int64)
        has_before = is_key & (position > 0) & (block_before >= 0) & (block_before < num_blocks)
        canary_before = tl.load(canaries + block_before * BLOCK_SIZE + before % BLOCK_SIZE, has_before, 0)
        mixed = _mix(tl.load(known + position, is_key, 0), position)
        is_wrong = is_key & ((canary - canary_before != mixed) | (is_inside == 0))
        wrong = tl.where(is_wrong, (position.to(tl.int64) << 32) | (block & 0xFFFFFFFF), _NONE_WRONG)
        for group in tl.static_range(1, NUM_GROUPS):
            is_seen = is_key & (position > length - num_new - window)
            of_group = tl.load(table + group * tables_stride.to(tl.int64) + position // BLOCK_SIZE, is_seen, 0)
            of_group = of_group.to(tl.int64)
            is_inside = (of_group >= 0) & (of_group < num_blocks)
            other = tl.load(canaries + of_group * BLOCK_SIZE + position % BLOCK_SIZE, is_seen & is_inside, 0)
            differs = is_seen & (is_wrong == 0) & ((other - canary != group * _OF_GROUP_IN_KERNEL) | (is_inside == 0))
            wrong = tl.where(differs, tl.minimum(wrong, (position.to(tl.int64) << 32) | (of_group & 0xFFFFFFFF)), wrong)
        first_wrong = tl.min(wrong, 0)
        if first_wrong < _NONE_WRONG:
            tl.atomic_min(wrong_slots + row, first_wrong)


def triton_guard_cache(
    canaries: Tensor, tokens: Tensor, entries: Tensor, rows: Expanded, window: int, wrong_slots: Tensor
) -> None:
    """The grids depend on shapes only. The check is a kernel of its own, because a row may read slots that another row
    writes in the same step."""
    (num_blocks, block_size), max_model_len, num_rows = canaries.shape, tokens.shape[1], len(rows.context_lens)
    shared = {"entries_stride": entries.stride(0), "NUM_GROUPS": len(rows.slot_mapping)}
    _write_kernel[(num_rows,)](
        canaries, wrong_slots, tokens, entries, rows.token_ids, rows.positions, rows.slot_mapping, rows.cu_seqlens_q,
        rows.context_lens, max_model_len, rows.slot_mapping.stride(0), **shared, WIDTH=_WIDTH, **LAUNCH_OPTIONS,
    )  # fmt: skip
    num_programs = min(triton.cdiv(max_model_len, _WIDTH), _MAX_PROGRAMS)
    _check_kernel[(num_rows, num_programs)](
        canaries, wrong_slots, tokens, entries, rows.block_tables, rows.cu_seqlens_q, rows.context_lens, max_model_len,
        num_blocks, window, *rows.block_tables.stride()[:2], **shared, BLOCK_SIZE=block_size, WIDTH=_WIDTH,
        **LAUNCH_OPTIONS,
    )  # fmt: skip


def guard_cache(
    canaries: Tensor,
    tokens: Tensor,
    entries: Tensor,
    rows: Expanded,
    window: int,
    wrong_slots: Tensor,
    use_kernels: bool = False,
) -> None:
    """Writes the canaries of a step's new tokens, then checks all slots whose keys its rows read.

    Padding rows and rows without new tokens read nothing, so nothing of them is checked.

    Args:
        canaries: int64 [num_blocks, block_size], changed.
        tokens: int32 [num_entries, max_model_len], what the slots must have been written for.
        entries: int32 [num_rows].
        rows: the step's rows, as its layers get them.
        window: how many keys a query of the groups 1, 2, … sees. Their slots before it are not checked.
        wrong_slots: int64 [num_rows], filled with position × 2³² + block of each row's first wrong slot, or NONE_WRONG.
        use_kernels: compute with the kernels.
    """
    guard = triton_guard_cache if use_kernels else plain_guard_cache
    guard(canaries, tokens, entries, rows, window, wrong_slots)
