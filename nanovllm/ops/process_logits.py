"""Logits processors: a request's rules about single tokens, applied to a step's logits before sampling.

Their order and meaning are vLLM's: allowed ids, then edits (bad words, min_tokens, logit_bias), then the repetition,
frequency and presence penalties, all in float32. Everything is read on the device, so that a step with processors
can be captured. A step without such requests should not call this: it copies the logits.

A ban adds −inf. So a NaN or +inf logit, which breaks its row, stays visible to the sampler in spite of a ban.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

ALWAYS = 2**31 - 1  # an edit_until that no number of generated tokens reaches

_IDS = 4096  # ids of the vocabulary per program of the dense kernel
_POSITIONS = 256  # positions of a history, or edits, that a program of the sparse kernels takes at once
_PROGRAMS = 2048  # about the programs of a sparse kernel; the rows share them


@dataclass
class TokenRules:
    """Each entry's rules about single tokens; contiguous tensors, by entry.

    An edit applies while fewer completion tokens than its `until` were generated, and, if it has a prefix, only when
    the completion ends with the prefix's tokens. Ids outside the vocabulary are ignored.
    """

    num_prompt_tokens: Tensor  # int32 [num_entries]
    penalties: Tensor  # float32 [num_entries, 3]: repetition (1 = off), presence (0), frequency (0)
    allowed: Tensor  # int32 [num_entries, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 allows id i
    edit_ids: Tensor  # int32 [num_entries, num_edits]; −1 for no edit
    edit_values: Tensor  # float32 [num_entries, num_edits], added to the logit; −inf bans
    edit_until: Tensor  # int32 [num_entries, num_edits]
    edit_prefix: Tensor  # int32 [num_entries, num_edits, 2]: (start, length) in prefix_tokens
    prefix_tokens: Tensor  # int32 [num_entries, num_prefix_tokens]


class Edits(NamedTuple):
    """One request's edits: numpy arrays with an entry's rows of TokenRules."""

    ids: np.ndarray
    values: np.ndarray
    until: np.ndarray
    prefixes: np.ndarray
    prefix_tokens: np.ndarray


def edits_of(
    logit_bias: Mapping[int, float], bad_words: Sequence[Sequence[int]], stop_token_ids: Iterable[int], min_tokens: int
) -> Edits:
    """The edits of one request. A bad word of one or more ids bans its last when the completion ends with the
    others. Stop tokens, with those that end a sequence, are banned until min_tokens tokens were generated."""
    edits = [(token, value, ALWAYS, 0, 0) for token, value in logit_bias.items()]
    prefix_tokens: list[int] = []
    for *prefix, last in bad_words:
        edits.append((last, -np.inf, ALWAYS, len(prefix_tokens), len(prefix)))
        prefix_tokens += prefix
    if min_tokens > 0:
        edits += [(token, -np.inf, min(min_tokens, ALWAYS), 0, 0) for token in stop_token_ids]
    columns = list(zip(*edits, strict=True)) or [()] * 5
    ids, until, starts, lengths = (np.array(columns[index], np.int32) for index in (0, 2, 3, 4))
    prefixes = np.stack([starts, lengths], axis=1)
    return Edits(ids, np.array(columns[1], np.float32), until, prefixes, np.array(prefix_tokens, np.int32))


def pack_allowed(ids: Iterable[int] | None, vocab_size: int) -> np.ndarray:
    """Allowed token ids -> a row of TokenRules.allowed: int32 [ceil(vocab_size / 32)]. None allows every id."""
    num_words = -(-vocab_size // 32)
    if ids is None:
        return np.full(num_words, -1, np.int32)
    ids = np.fromiter(ids, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"allowed_token_ids must be from 0 to {vocab_size - 1}; got {ids.min()} to {ids.max()}.")
    bits = np.zeros(num_words * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def plain_process_logits(
    logits: Tensor, entries: Tensor, lengths: Tensor, tokens: Tensor, rules: TokenRules, first_id: int
) -> Tensor:
    out = logits.to(torch.float32, copy=True)
    rows = _rows_where((rules.allowed[entries] != -1).any(1))
    ids = torch.arange(first_id, first_id + out.shape[1], device=out.device)
    is_allowed = (rules.allowed[entries[rows]][:, ids // 32] >> (ids % 32)) & 1 != 0
    out[rows] = torch.where(is_allowed, out[rows], out[rows] - torch.inf)
    _edit(out, entries, lengths, tokens, rules, first_id)
    _penalise(out, entries, lengths, tokens, rules, first_id)
    return out


def _rows_where(asks: Tensor) -> Tensor:
    """bool [num_rows] -> int64, the rows for which it is True; on a GPU all rows, because the host would have to wait
    for the values."""
    return asks.nonzero()[:, 0] if asks.device.type == "cpu" else torch.arange(len(asks), device=asks.device)


def _largest(values: Tensor, bound: int) -> int:
    """The largest value; on a GPU its upper bound."""
    return max(values.flatten().tolist(), default=0) if values.device.type == "cpu" else bound


def _edit(out: Tensor, entries: Tensor, lengths: Tensor, tokens: Tensor, rules: TokenRules, first_id: int) -> None:
    rows = _rows_where((rules.edit_ids[entries] >= 0).any(1))
    entries, lengths = entries[rows, None], lengths[rows, None]
    columns = rules.edit_ids[entries[:, 0]] - first_id  # [num_rows, num_edits]
    starts, prefix_lens = rules.edit_prefix[entries[:, 0]].unbind(2)
    num_generated = lengths - rules.num_prompt_tokens[entries]
    applies = (columns >= 0) & (columns < out.shape[1])
    applies &= (num_generated < rules.edit_until[entries[:, 0]]) & (num_generated >= prefix_lens)
    for index in range(_largest(prefix_lens, rules.prefix_tokens.shape[1])):
        is_prefix = applies & (index < prefix_lens)
        expected = rules.prefix_tokens[entries, torch.where(is_prefix, starts + index, 0)]
        generated = tokens[entries, torch.where(is_prefix, lengths - prefix_lens + index, 0)]
        applies &= ~is_prefix | (generated == expected)
    values = torch.where(applies, rules.edit_values[entries[:, 0]], 0.0)
    out.index_put_((rows[:, None], torch.where(applies, columns, 0)), values, accumulate=True)


def _penalise(out: Tensor, entries: Tensor, lengths: Tensor, tokens: Tensor, rules: TokenRules, first_id: int) -> None:
    repetition, presence, frequency = rules.penalties[entries].unbind(1)
    rows = _rows_where((repetition != 1) | (presence != 0) | (frequency != 0))
    entries, lengths = entries[rows], lengths[rows, None]
    position = torch.arange(_largest(lengths, tokens.shape[1]), device=out.device)
    columns = tokens[entries, : len(position)].long() - first_id  # [num_rows, len(position)]
    is_token = (position < lengths) & (columns >= 0) & (columns < out.shape[1])
    is_generated = is_token & (position >= rules.num_prompt_tokens[entries, None])
    columns = torch.where(is_token, columns, 0)
    nothing = torch.zeros((len(rows), out.shape[1]), dtype=torch.float32, device=out.device)
    occurs = nothing.scatter_add(1, columns, is_token.float()) > 0
    counts = nothing.scatter_add_(1, columns, is_generated.float())
    repetition, presence, frequency = (each[rows, None] for each in (repetition, presence, frequency))
    values = out[rows]
    values = torch.where(occurs, torch.where(values > 0, values / repetition, values * repetition), values)
    out[rows] = values - frequency * counts - presence * (counts > 0)


# The kernels. Each row's occurrences are counted in num_ids counters, of which only those of the history's ids are
# touched: the dense kernel clears them, the next counts, and the last applies the penalties, for each token at the
# first occurrence that takes its counter. So the logits are read once and written once, and the rest is a few sectors
# per token of history. A dense pass over the counters would read and write twice the bytes of the logits.
_IN_PROMPT = tl.constexpr(1 << 30)  # in a counter, beside the number of occurrences in the completion


@jit
def _history(row, entries, lengths, num_prompt_tokens, penalties):
    """(entry, num_prompt_tokens, begin, end): the row's penalties look at the tokens from begin to end, if any."""
    entry = tl.load(entries + row)
    end = tl.load(lengths + row)
    num_prompt = tl.load(num_prompt_tokens + entry)
    repeats = tl.load(penalties + entry * 3) != 1.0  # the only one that looks at the prompt
    counts = (tl.load(penalties + entry * 3 + 1) != 0.0) | (tl.load(penalties + entry * 3 + 2) != 0.0)
    return entry, num_prompt, tl.where(repeats, 0, tl.where(counts, num_prompt, end)), end


@jit
def _columns(tokens_of_entry, position, end, first_id, num_ids):
    """(the column of the logit of each token of a history, whether there is such a logit)"""
    column = tl.load(tokens_of_entry + position, position < end, -1) - first_id
    return column, (column >= 0) & (column < num_ids)


@jit
def _allow_kernel(
    logits, out, counts, entries, lengths, tokens, num_prompt_tokens, penalties, tokens_stride, num_ids, first_id,
    allowed, logits_stride, num_words, IDS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Applies the allowed ids to a part of a row's logits; clears a part of the counters that the row will use."""
    begin()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    entry, _, start, end = _history(row, entries, lengths, num_prompt_tokens, penalties)
    column = part * IDS + tl.arange(0, IDS)
    is_real = column < num_ids
    token = first_id + column
    word = tl.load(allowed + entry * num_words + (token >> 5), is_real, 0)
    logit = tl.load(logits + row * logits_stride + column, is_real, 0.0).to(tl.float32)
    is_allowed = ((word >> (token & 31)) & 1) != 0
    tl.store(out + row * num_ids + column, tl.where(is_allowed, logit, logit - float("inf")), is_real)
    for at in range(start + part * POSITIONS, end, tl.num_programs(0) * POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        used, is_here = _columns(tokens + entry * tokens_stride, position, end, first_id, num_ids)
        tl.store(counts + row * num_ids + used, 0, is_here)


@jit(do_not_specialize=["num_edits", "num_prefix_tokens"])
def _edit_and_count_kernel(
    out, counts, entries, lengths, tokens, num_prompt_tokens, penalties, tokens_stride, num_ids, first_id, edit_ids,
    edit_values, edit_until, edit_prefix, prefix_tokens, num_edits, num_prefix_tokens, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Counts the tokens of a part of a row's history, and applies a part of its edits."""
    begin()
    first = tl.program_id(0) * POSITIONS
    stride = tl.num_programs(0) * POSITIONS
    row = tl.program_id(1).to(tl.int64)
    entry, num_prompt, start, end = _history(row, entries, lengths, num_prompt_tokens, penalties)
    tokens_of_entry = tokens + entry * tokens_stride
    for at in range(start + first, end, stride):
        position = at + tl.arange(0, POSITIONS)
        column, is_here = _columns(tokens_of_entry, position, end, first_id, num_ids)
        count = counts + row * num_ids + column
        tl.atomic_or(count, _IN_PROMPT, is_here & (position < num_prompt), sem="relaxed")
        tl.atomic_add(count, 1, is_here & (position >= num_prompt), sem="relaxed")
    for at in range(first, num_edits, stride):
        index = at + tl.arange(0, POSITIONS)
        edit = entry * num_edits + index
        column = tl.load(edit_ids + edit, index < num_edits, -1) - first_id
        applies = (column >= 0) & (column < num_ids)
        prefix_start = tl.load(edit_prefix + edit * 2, applies, 0)
        prefix_len = tl.load(edit_prefix + edit * 2 + 1, applies, 0)
        applies &= end - num_prompt < tl.load(edit_until + edit, applies, 0)
        applies &= end - num_prompt >= prefix_len
        for offset in range(tl.max(tl.where(applies, prefix_len, 0), 0)):
            is_prefix = applies & (offset < prefix_len)
            expected = tl.load(prefix_tokens + entry * num_prefix_tokens + prefix_start + offset, is_prefix, 0)
            generated = tl.load(tokens_of_entry + (end - prefix_len) + offset, is_prefix, 0)
            applies &= expected == generated
        tl.atomic_add(out + row * num_ids + column, tl.load(edit_values + edit, applies, 0.0), applies, sem="relaxed")


@jit
def _penalise_kernel(
    out, counts, entries, lengths, tokens, num_prompt_tokens, penalties, tokens_stride, num_ids, first_id,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Applies the penalties of a part of a row's history: for each token, the first occurrence to take its counter."""
    begin()
    row = tl.program_id(1).to(tl.int64)
    entry, _, start, end = _history(row, entries, lengths, num_prompt_tokens, penalties)
    repetition = tl.load(penalties + entry * 3)
    presence = tl.load(penalties + entry * 3 + 1)
    frequency = tl.load(penalties + entry * 3 + 2)
    for at in range(start + tl.program_id(0) * POSITIONS, end, tl.num_programs(0) * POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        column, is_here = _columns(tokens + entry * tokens_stride, position, end, first_id, num_ids)
        count = tl.atomic_xchg(counts + row * num_ids + column, 0, is_here, sem="relaxed")
        takes = is_here & (count != 0)
        num_generated = (count & (_IN_PROMPT - 1)).to(tl.float32)
        value = tl.load(out + row * num_ids + column, takes, 0.0)
        value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = value - frequency * num_generated - tl.where(num_generated > 0, presence, 0.0)
        tl.store(out + row * num_ids + column, value, takes)


def triton_process_logits(
    logits: Tensor, entries: Tensor, lengths: Tensor, tokens: Tensor, rules: TokenRules, first_id: int
) -> Tensor:
    """The grids depend on shapes only."""
    num_rows, num_ids = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    counts = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
    num_edits, num_prefix_tokens = rules.edit_ids.shape[1], rules.prefix_tokens.shape[1]
    parts = max(1, min(triton.cdiv(max(tokens.shape[1], num_edits), _POSITIONS), _PROGRAMS // num_rows))
    history = (entries, lengths, tokens, rules.num_prompt_tokens, rules.penalties, tokens.stride(0), num_ids, first_id)
    _allow_kernel[(triton.cdiv(num_ids, _IDS), num_rows)](
        logits, out, counts, *history, rules.allowed, logits.stride(0), rules.allowed.shape[1], IDS=_IDS,
        POSITIONS=_POSITIONS, num_warps=8, **LAUNCH_OPTIONS,
    )  # fmt: skip
    _edit_and_count_kernel[(parts, num_rows)](
        out, counts, *history, rules.edit_ids, rules.edit_values, rules.edit_until, rules.edit_prefix,
        rules.prefix_tokens, num_edits, num_prefix_tokens, POSITIONS=_POSITIONS, **LAUNCH_OPTIONS,
    )  # fmt: skip
    # A product and a difference are rounded one by one, as PyTorch does.
    options = {**LAUNCH_OPTIONS, "enable_fp_fusion": False}
    _penalise_kernel[(parts, num_rows)](out, counts, *history, _POSITIONS, **options)
    return out


def process_logits(
    logits: Tensor, entries: Tensor, lengths: Tensor, tokens: Tensor, rules: TokenRules, first_id: int = 0,
    use_kernels: bool = False,
) -> Tensor:  # fmt: skip
    """Applies each row's rules to its logits.

    Args:
        logits: [num_rows, num_ids], float32, bfloat16 or float16; a row's logits are contiguous.
        entries: int64 [num_rows], the entry of each row.
        lengths: int32 or int64 [num_rows], number of known tokens, which is the position of the token to sample. 0 for
            a padding row.
        tokens: int32 [num_entries, max_len], each entry's prompt and completion.
        first_id: the id of the first logit, if a rank has only a part of the vocabulary.
        use_kernels: compute with the kernels.

    Returns:
        float32 [num_rows, num_ids], a new tensor. The kernels give the twin's numbers, except if an entry has several
        edits of finite values for one id: their sum may differ in its last bits.
    """
    if not logits.numel():
        return torch.empty_like(logits, dtype=torch.float32)
    process = triton_process_logits if use_kernels else plain_process_logits
    return process(logits, entries, lengths, tokens, rules, first_id)
