"""Expands the rows of a step into the tensors that its layers and its sampler read: with a value per token, per row or
per sampled row."""

from typing import NamedTuple

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

# Tokens and sampled rows per program, and blocks of a table that it copies at a time.
_WIDTH = 128


class Table(NamedTuple):
    """The device's data of each entry.

    tokens: int32 [num_entries, max_model_len], prompt and completion.
    block_tables: int32 [num_groups, num_entries, max_blocks], a table per group of layers.
    settings: int32 [num_settings, num_entries], the bits of sampling settings.
    seeds: int64 [num_entries], 64 bits each.
    """

    tokens: torch.Tensor
    block_tables: torch.Tensor
    settings: torch.Tensor
    seeds: torch.Tensor


class Expanded(NamedTuple):
    """The expanded rows of a step.

    token_ids, positions: int64 [num_tokens], and slot_mapping: int64 [num_groups, num_tokens]; padding tokens have id
        and position 0 and slot −1.
    cu_seqlens_q: int32 [num_rows + 1]; context_lens: int32 [num_rows]; block_tables: int32 [num_groups, num_rows,
        max_blocks].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor


class ExpandedSamples(NamedTuple):
    """The expanded rows that sample. Each row of `settings` begins at a multiple of 16 bytes.

    token_indices: int64 [num_sampled], the index of each row's last token in the flat batch.
    entries: int64 [num_sampled], each row's entry; for padding the last one.
    lengths: int64 [num_sampled], each row's number of tokens so far, which is the position of the sampled token.
    settings: int32 [num_settings, num_sampled]; seeds: int64 [num_sampled].
    """

    token_indices: torch.Tensor
    entries: torch.Tensor
    lengths: torch.Tensor
    settings: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def empty(cls, num_sampled: int, num_settings: int, device: torch.device) -> "ExpandedSamples":
        indices, entries, lengths, seeds = _aligned(torch.int64, device, 4, num_sampled)
        return cls(indices, entries, lengths, _aligned(torch.int32, device, num_settings, num_sampled), seeds)

    def first(self, num_sampled: int) -> "ExpandedSamples":
        """The first `num_sampled` rows, in the same memory."""
        return ExpandedSamples(*(values[..., :num_sampled] for values in self))


def _aligned(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    """Uninitialised memory. Its rows all begin at addresses that Triton treats as aligned, so that all sizes share a
    kernel."""
    padded = torch.empty(*shape[:-1], -(-shape[-1] // 16) * 16, dtype=dtype, device=device)
    return padded[..., : shape[-1]]


def plain_expand_rows(
    rows: torch.Tensor, table: Table, num_rows: int, num_tokens: int, samples: ExpandedSamples, block_size: int
) -> Expanded:
    entry, context_lens, first_token = rows[: num_rows + 1, :3].t().contiguous().long()
    token = torch.arange(num_tokens, device=rows.device)
    row = torch.searchsorted(first_token, token, right=True) - 1
    is_real = token < first_token[-1]
    after = torch.cat((first_token[1:], first_token[-1:]))  # the end of the row's tokens
    positions = torch.where(is_real, context_lens[row] - after[row] + token, 0)
    block = table.block_tables[:, entry[row], positions // block_size].long()
    sampled = rows[: len(samples.token_indices), 3].long()
    entries = entry[sampled]
    samples.token_indices.copy_(torch.where(context_lens > 0, after - 1, 0)[sampled])
    samples.entries.copy_(entries)
    samples.lengths.copy_(context_lens[sampled])
    samples.settings.copy_(table.settings[:, entries])
    samples.seeds.copy_(table.seeds[entries])
    return Expanded(
        token_ids=torch.where(is_real, table.tokens[entry[row], positions], 0).long(),
        positions=positions,
        slot_mapping=torch.where(is_real, block * block_size + positions % block_size, -1),
        cu_seqlens_q=first_token.int(),
        context_lens=context_lens[:-1].int(),
        block_tables=table.block_tables[:, entry[:-1]],
    )


@jit(
    do_not_specialize=[
        "num_rows", "num_tokens", "num_sampled", "num_halvings", "max_model_len", "max_blocks", "num_entries",
        "settings_stride", "slots_stride", "tables_stride", "table_stride",
    ]
)  # fmt: skip
def _expand_rows_kernel(
    rows, tokens, block_tables, settings, seeds, token_ids, positions, slot_mapping, cu_seqlens_q, context_lens,
    row_tables, sampled_tokens, entries, lengths, row_settings, row_seeds, num_rows, num_tokens, num_sampled,
    num_halvings, max_model_len, max_blocks, num_entries, settings_stride, slots_stride, tables_stride, table_stride,
    NUM_SETTINGS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Each program expands one row, WIDTH tokens and WIDTH sampled rows."""
    begin()
    program = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    if program <= num_rows:
        tl.store(cu_seqlens_q + program, tl.load(rows + program * 4 + 2))
    if program < num_rows:
        tl.store(context_lens + program, tl.load(rows + program * 4 + 1))
        entry = tl.load(rows + program * 4).to(tl.int64)
        for group in tl.static_range(NUM_GROUPS):
            source = block_tables + (group * num_entries + entry) * max_blocks
            target = row_tables + group * tables_stride.to(tl.int64) + program.to(tl.int64) * table_stride
            for first in range(0, max_blocks, WIDTH):
                is_block = first + lane < max_blocks
                tl.store(target + first + lane, tl.load(source + first + lane, is_block, 0), is_block)
    if program * WIDTH < num_tokens:
        token = program * WIDTH + lane
        is_token = token < num_tokens
        # The last row that begins at or before each token, by bisection.
        row = lane * 0
        end = row + num_rows + 1
        for _ in range(num_halvings):
            middle = (row + end) // 2
            is_before = tl.load(rows + middle * 4 + 2, is_token, 0) <= token
            row = tl.where(is_before, middle, row)
            end = tl.where(is_before, end, middle)
        is_real = is_token & (row < num_rows)
        entry = tl.load(rows + row * 4, is_real, 0).to(tl.int64)
        length = tl.load(rows + row * 4 + 1, is_real, 0)
        position = tl.where(is_real, length - tl.load(rows + row * 4 + 6, is_real, 0) + token, 0)
        tl.store(token_ids + token, tl.load(tokens + entry * max_model_len + position, is_real, 0), is_token)
        tl.store(positions + token, position, is_token)
        for group in tl.static_range(NUM_GROUPS):
            place = (group * num_entries + entry) * max_blocks + position // BLOCK_SIZE
            block = tl.load(block_tables + place, is_real, 0).to(tl.int64)
            slot = tl.where(is_real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(slot_mapping + group * slots_stride + token, slot, is_token)
    if program * WIDTH < num_sampled:
        index = program * WIDTH + lane
        is_sampled = index < num_sampled
        row = tl.load(rows + index * 4 + 3, is_sampled, 0)
        length = tl.load(rows + row * 4 + 1, is_sampled, 0)
        after = tl.load(rows + row * 4 + 6, is_sampled & (length > 0), 1)
        entry = tl.load(rows + row * 4, is_sampled, 0)
        tl.store(sampled_tokens + index, after - 1, is_sampled)
        tl.store(entries + index, entry, is_sampled)
        tl.store(lengths + index, length, is_sampled)
        tl.store(row_seeds + index, tl.load(seeds + entry, is_sampled, 0), is_sampled)
        for setting in tl.static_range(NUM_SETTINGS):
            value = tl.load(settings + setting * num_entries + entry, is_sampled, 0)
            tl.store(row_settings + setting * settings_stride + index, value, is_sampled)


def triton_expand_rows(
    rows: torch.Tensor, table: Table, num_rows: int, num_tokens: int, samples: ExpandedSamples, block_size: int
) -> Expanded:
    (num_groups, num_entries, max_blocks), num_settings = table.block_tables.shape, len(table.settings)
    device, num_sampled = rows.device, len(samples.token_indices)
    row_tables = _aligned(torch.int32, device, num_groups, num_rows, max_blocks)
    cu_seqlens_q, context_lens = _aligned(torch.int32, device, num_rows + 1), _aligned(torch.int32, device, num_rows)
    (token_ids, positions), slots = _aligned(torch.int64, device, 2 + num_groups, num_tokens).split((2, num_groups))
    out = Expanded(token_ids, positions, slots, cu_seqlens_q, context_lens, row_tables)
    num_programs = max(num_rows + 1, triton.cdiv(num_tokens, _WIDTH), triton.cdiv(num_sampled, _WIDTH))
    _expand_rows_kernel[(num_programs,)](
        rows, *table, *out, *samples, num_rows, num_tokens, num_sampled, num_rows.bit_length(), table.tokens.shape[1],
        max_blocks, num_entries, samples.settings.stride(0), slots.stride(0), *row_tables.stride()[:2],
        NUM_SETTINGS=num_settings, NUM_GROUPS=num_groups, BLOCK_SIZE=block_size, WIDTH=_WIDTH, num_warps=4,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def expand_rows(
    rows: torch.Tensor, table: Table, num_rows: int, num_tokens: int, samples: ExpandedSamples, block_size: int,
    use_kernels: bool = False,
) -> Expanded:  # fmt: skip
    """Expands rows, each of which names an entry of the table.

    Args:
        rows: int32 [n, 4], where n is at least num_rows + 1 and at least num_sampled. The first three numbers of row i
            are its entry, its number of keys after the step, and the index of its first token in the flat batch. The
            fourth is an item of another list: the number of the i-th row that samples. Row `num_rows` ends the list.
            It has the table's last entry, which no sequence has, no keys, and the number of real tokens as its first
            token; every padding row before it has the same. The list of rows that sample is padded with `num_rows`.
        num_rows, num_tokens: numbers with padding.
        samples: is filled with the rows that sample, with padding.
        use_kernels: compute with the kernel.
    """
    expand = triton_expand_rows if use_kernels else plain_expand_rows
    return expand(rows, table, num_rows, num_tokens, samples, block_size)
