"""The running sequences as the device knows them, and the rows of the current step.

The device keeps each running sequence in an entry of the table: its tokens, its block table and its sampling settings.
A step is nothing but rows: entry, keys, first token. `send` brings the device up to date with a step, and `batch` turns
the rows into a Batch on the device, with the same function for eager, padded and captured steps.
"""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import QUERY_TILE, AttentionMetadata, SharedPrefixes, query_tiles
from nanovllm.attention.prefix_groups import PrefixGroups
from nanovllm.engine.block_manager import NO_WINDOWS, WindowGroups
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampler import SampledRows, SamplingNeeds
from nanovllm.ops.expand_rows import Expanded, ExpandedSamples, Table, expand_rows
from nanovllm.ops.logprobs import NO_LOGPROBS, PROCESSED, RAW
from nanovllm.ops.low_rank import AdapterRows
from nanovllm.ops.sample import COLDEST
from nanovllm.ops.upload import upload
from nanovllm.runner.step_sizes import NO_ROWS, StepRows, StepSize, StepSizes
from nanovllm.runner.token_rules import TokenRulesTable
from nanovllm.sampling_params import MAX_LOGPROBS

_KINDS = {"raw": RAW, "processed": PROCESSED}
_WIDTHS = (1, 2, 6, 11, 21, 1 + MAX_LOGPROBS)


class SentStep(NamedTuple):
    """A step that was sent to the device. A capture has only the size.

    size: how large it is, with padding.
    rows: its rows.
    is_captured: whether it runs as CUDA graphs.
    needs: the features that its rows need from the sampler.
    """

    size: StepSize
    rows: StepRows = NO_ROWS
    is_captured: bool = False
    needs: SamplingNeeds = SamplingNeeds()

    @property
    def tenants(self) -> list[tuple[int, int]] | None:
        """See AttentionMetadata."""
        return None if self.is_captured else list(map(tuple, self.rows.tenants.tolist())) or None


@dataclass
class Batch:
    """The inputs of one step, on the device.

    token_ids, positions: int64 [num_tokens].
    groups: the metadata for the attention of each group of layers, still without a plan.
    rows: all of it that was expanded from the step's rows.
    adapters: those of the tokens; None if no row has one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: list[AttentionMetadata]
    rows: Expanded
    adapters: AdapterRows | None


class SequenceTable:
    """The entries of the running sequences, and the inputs of a step in fixed places.

    Args:
        max_num_seqs: entries; one more is for padding.
        max_model_len: tokens of an entry.
        vocab_size: token ids are below it.
        max_num_tokens: maximum number of tokens of a step.
        sharing: the attention backend that reads keys once for all decodes that share them. None reads every key for
            each decode.
        sampled_multiple: the number of sampled rows is padded to a multiple of it.
        use_kernels: compute with our kernels.
        windows: the groups of layers whose blocks are given back; each has a block table of its own.
        has_adapters: sequences may have adapters in slots.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        max_num_tokens: int,
        device: torch.device,
        sharing: AttentionBackend | None = None,
        sampled_multiple: int = 1,
        use_kernels: bool = False,
        windows: WindowGroups = NO_WINDOWS,
        has_adapters: bool = False,
    ):
        self.windows = windows
        self._block_size, self._vocab_size, self._device = block_size, vocab_size, device
        self._sharing, self._use_kernels = sharing, use_kernels
        self._padding_entry, num_entries = max_num_seqs, max_num_seqs + 1

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._table = Table(
            tokens=zeros(torch.int32, num_entries, max_model_len),
            block_tables=zeros(torch.int32, 1 + windows.num_groups, num_entries, -(-max_model_len // block_size)),
            settings=zeros(torch.int32, 5, num_entries),
            seeds=zeros(torch.int64, num_entries),
        )
        # The slot of each entry's adapter, on the device and on the host.
        self._adapters = zeros(torch.int32, num_entries) if has_adapters else None
        self._adapter_slots = np.zeros(num_entries, np.int32)
        self.rules = TokenRulesTable(num_entries, vocab_size, device)
        # The step's inputs: a first line with the number of decodes, then the rows that `expand_rows` describes.
        self._lines = zeros(torch.int32, 1 + num_entries + sampled_multiple, 4)
        self._samples = ExpandedSamples.empty(num_entries + sampled_multiple, len(self._table.settings), device)
        max_num_tiles = max_num_tokens // QUERY_TILE + min(max_num_seqs, max_num_tokens) + 1
        # Two lists: all tiles, then the tiles with tokens after which a row samples.
        self._tiles = zeros(torch.int32, 2 * max_num_tiles, 4)
        num_splits = 0 if sharing is None else sharing.max_num_shared_splits
        self._shared = SharedPrefixes(
            num_items=zeros(torch.int32, 1),
            items=zeros(torch.int32, num_splits, 3),
            members=zeros(torch.int32, num_splits),
            num_shared=zeros(torch.int32, max_num_seqs),
        )
        # For each entry, the tenant whose tokens and blocks the device has, and copies of group 0's blocks. The
        # sequences have the same blocks as lists, but converting lists in each step would take longer than finding
        # shared prefixes.
        self._tenants = np.full((num_entries, 2), -1, np.int64)
        self._block_tables = np.zeros(self._table.block_tables.shape[1:], np.int32)
        self._num_blocks, self._num_window_blocks = np.zeros((2, num_entries), np.int64)
        self._has_filters = np.zeros(num_entries, bool)
        self._ruled_until = np.zeros(num_entries, np.int64)
        self._logprobs_widths = np.zeros(num_entries, np.int64)
        # The decodes that were last searched for shared keys: their tenants and split lengths, and whether they share
        # any.
        self._grouped, self._is_grouped = np.zeros((0, 3), np.int64), False

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [num_entries, max_model_len], each entry's prompt and completion."""
        return self._table.tokens

    @property
    def groups_prefixes(self) -> bool:
        """Whether keys that decodes share may be read once for all of them."""
        return self._sharing is not None

    @property
    def has_adapters(self) -> bool:
        """Whether sequences may have adapters in slots."""
        return self._adapters is not None

    # From the host to the device

    def send(self, step: Step, sizes: StepSizes) -> SentStep:
        """Brings the device up to date with the host's sequences, and puts the step's rows into place."""
        rows = StepRows.of(step)
        num_decodes = step.num_decodes if sizes.generates else 0
        size, is_captured = sizes.size_of(rows, num_decodes, step.needs_all_states)
        self._send_sequences(step, rows)
        has_adapters = self.has_adapters and bool(self._adapter_slots[rows.entries].any())
        size = size._replace(is_grouped=self._group_prefixes(rows, num_decodes), has_adapters=has_adapters)
        needs = self._needs(rows)
        self._send_lines(rows, size, num_decodes)
        return SentStep(size, rows, is_captured, needs)

    def _send_sequences(self, step: Step, rows: StepRows) -> None:
        is_new = (self._tenants[rows.entries] != rows.tenants).any(1)
        if is_new.any():
            self._admit([step.chunks[row].seq for row in np.flatnonzero(is_new)], rows.entries[is_new])
            self._tenants[rows.entries[is_new]] = rows.tenants[is_new]
        has_grown = np.flatnonzero(self._num_blocks[rows.entries] != rows.num_blocks)
        if len(has_grown):
            self._send_blocks([step.chunks[row].seq for row in has_grown], rows.entries[has_grown])
            self._num_blocks[rows.entries] = rows.num_blocks
        if self.windows.num_groups:
            num_blocks = -(-rows.context_lens // self._block_size)
            has_grown = np.flatnonzero(self._num_window_blocks[rows.entries] != num_blocks)
            if len(has_grown):
                self._send_window_blocks([step.chunks[row].seq for row in has_grown], rows.entries[has_grown])
                self._num_window_blocks[rows.entries] = num_blocks

    def _group_prefixes(self, rows: StepRows, num_decodes: int) -> bool:
        """Whether the step's decodes share keys that are read once for all of them. If so, their groups are on the
        device."""
        decodes = slice(num_decodes)
        # Sequences that had no cache hit when they were admitted seldom share keys. A sequence that came back after
        # preemption may, but this search ignores it.
        if self._sharing is None or not rows.num_cached[decodes].any():
            return False
        # Groups stay valid while the same rows decode, until one of them gets longer splits.
        context_lens = rows.context_lens[decodes]
        grouped = np.column_stack((rows.tenants[decodes], self._sharing.split_lengths(context_lens)))
        if not np.array_equal(grouped, self._grouped):
            num_blocks = -(-int(context_lens.max()) // self._block_size)
            tables = self._block_tables[rows.entries[decodes], :num_blocks]
            groups = self._sharing.shared_prefixes(tables, context_lens, self._block_size)
            if groups is not None:
                self._send_shared_prefixes(groups)
            self._grouped, self._is_grouped = grouped, groups is not None
        return self._is_grouped

    def _send_shared_prefixes(self, groups: PrefixGroups) -> None:
        num_items = np.array([len(groups.items)], np.int32)
        arrays = [num_items, groups.items, groups.members, groups.num_shared]
        for place, new in zip(self._shared, upload(arrays, self._device), strict=True):
            place[: len(new)].copy_(new)

    def _needs(self, rows: StepRows) -> SamplingNeeds:
        samples = rows.samples > 0
        sampling = rows.entries[samples]
        is_ruled = bool((rows.context_lens[samples] < self._ruled_until[sampling]).any())
        return SamplingNeeds(
            bool(self._has_filters[sampling].any()),
            self.rules.version if is_ruled else 0,
            int(self._logprobs_widths[sampling].max(initial=0)),
        )

    def _send_lines(self, rows: StepRows, size: StepSize, num_decodes: int) -> None:
        num_rows, ends, sampled = len(rows.entries), np.cumsum(rows.num_new_tokens), np.flatnonzero(rows.samples)
        lines = np.zeros((1 + max(size.num_rows + 1, size.num_sampled), 4), np.int32)
        lines[0, 0] = num_decodes
        entry, keys, first_token, samples = lines[1:].T
        entry[:num_rows], entry[num_rows:] = rows.entries, self._padding_entry
        keys[:num_rows] = rows.context_lens
        first_token[:num_rows], first_token[num_rows:] = ends - rows.num_new_tokens, ends[-1]
        samples[: len(sampled)], samples[len(sampled) :] = sampled, size.num_rows
        upload([lines], self._device, into=self._lines)
        if size.num_tiles:
            tiles = np.zeros((2, size.num_tiles, 4), np.int32)
            real = query_tiles(rows.num_new_tokens, rows.context_lens, num_decodes)
            row_of_tile, is_last = real[:, 3], real[:, 0] + real[:, 1] == ends[real[:, 3]]
            sampled = real[is_last & (rows.samples[row_of_tile] > 0)]
            tiles[0, : len(real)], tiles[1, : len(sampled)] = real, sampled
            upload([tiles], self._device, into=self._tiles)

    def _admit(self, sequences: list[Sequence], entries: np.ndarray) -> None:
        """Sends all data of sequences that are new in their entries, except their blocks."""
        params = [seq.sampling_params for seq in sequences]
        temperatures = np.array([_temperature(p.temperature) for p in params], np.float32)
        top_ks = np.array([p.top_k if p.top_k < self._vocab_size else 0 for p in params], np.int32)
        top_ps, min_ps = (np.array([getattr(p, name) for p in params], np.float32) for name in ("top_p", "min_p"))
        self._has_filters[entries] = (temperatures > 0) & ((top_ks > 0) | (top_ps < 1) | (min_ps > 0))
        widths = [0 if p.logprobs is None else logprobs_width(p.logprobs) for p in params]
        self._logprobs_widths[entries] = widths
        kinds = np.array([_KINDS[p.logprobs_mode] if p.logprobs is not None else NO_LOGPROBS for p in params], np.int32)
        self._ruled_until[entries] = self.rules.admit(sequences, entries)
        self._num_blocks[entries] = self._num_window_blocks[entries] = 0
        lengths = np.array([len(seq.token_ids) for seq in sequences])
        first = np.repeat(entries * self.tokens.shape[1] - (np.cumsum(lengths) - lengths), lengths)
        places, token_ids, on_device, settings, seeds = upload(
            [
                first + np.arange(len(first)),
                np.frombuffer(bytearray().join(seq.token_ids for seq in sequences), np.int32),
                entries,
                np.stack([values.view(np.int32) for values in (temperatures, top_ks, top_ps, min_ps, kinds)]),
                np.array([seq.seed for seq in sequences], np.uint64).view(np.int64),
            ],
            self._device,
        )
        self.tokens.view(-1).index_copy_(0, places, token_ids)
        self._table.settings.index_copy_(1, on_device, settings)
        self._table.seeds.index_copy_(0, on_device, seeds)
        if self._adapters is not None:
            self._adapter_slots[entries] = [seq.adapter.slot for seq in sequences]
            (slots,) = upload([self._adapter_slots[entries]], self._device)
            self._adapters.index_copy_(0, on_device, slots)

    def _send_blocks(self, sequences: list[Sequence], entries: np.ndarray) -> None:
        """Sends the blocks that sequences got since the last step that had them."""
        width = self._table.block_tables.shape[2]
        places: list[int] = []
        blocks: list[int] = []
        for seq, entry, num_known in zip(sequences, entries.tolist(), self._num_blocks[entries].tolist(), strict=True):
            places += range(entry * width + num_known, entry * width + len(seq.block_table))
            blocks += seq.block_table[num_known:]
        known = np.array(places, np.int64), np.array(blocks, np.int32)
        self._block_tables.reshape(-1)[known[0]] = known[1]
        on_device, new = upload(list(known), self._device)
        self._table.block_tables.view(-1).index_copy_(0, on_device, new)

    def _send_window_blocks(self, sequences: list[Sequence], entries: np.ndarray) -> None:
        """The same for the window groups. Entries of blocks that were given back stay on the device; they are never
        read."""
        num_groups, num_entries, width = self._table.block_tables.shape
        places: list[int] = []
        blocks: list[tuple[int, ...]] = []
        for seq, entry, num_known in zip(
            sequences, entries.tolist(), self._num_window_blocks[entries].tolist(), strict=True
        ):
            first = max(num_known, seq.num_behind_window)
            places += range(entry * width + first, entry * width + len(seq.window_table))
            blocks += seq.window_table[first:]
        groups = np.arange(1, num_groups)[:, None] * (num_entries * width)
        known = (groups + np.array(places, np.int64)).ravel(), np.array(blocks, np.int32).T.ravel()
        on_device, new = upload([*known], self._device)
        self._table.block_tables.view(-1).index_copy_(0, on_device, new)

    # On the device

    def batch(self, sent: SentStep) -> Batch:
        """The Batch of the step whose rows are in place. Only launches kernels."""
        size = sent.size
        samples = self._samples.first(size.num_sampled)
        made = expand_rows(
            self._lines[1:], self._table, size.num_rows, size.num_tokens, samples, self._block_size, self._use_kernels
        )
        (slots, tables), *of_windows = zip(made.slot_mapping.unbind(), made.block_tables.unbind(), strict=True)
        first = AttentionMetadata(
            cu_seqlens_q=made.cu_seqlens_q,
            context_lens=made.context_lens,
            num_decodes=self._lines[0, :1],
            max_num_decodes=size.max_num_decodes,
            max_seqlen_q=size.max_seqlen_q,
            max_seqlen_k=self.tokens.shape[1],
            slot_mapping=slots,
            block_tables=tables,
            block_size=self._block_size,
            query_tiles=self._tiles[: size.num_tiles] if size.num_tiles else None,
            sampled_tiles=self._tiles[size.num_tiles : 2 * size.num_tiles] if size.num_tiles else None,
            shared_prefixes=self._shared if size.is_grouped else None,
            entries=self._lines[1 : 1 + size.num_rows, 0],
            tenants=sent.tenants,
        )
        windows = [
            replace(first, group=group, slot_mapping=slots, block_tables=tables)
            for group, (slots, tables) in enumerate(of_windows, 1)
        ]
        adapters = self._adapter_rows(made, size) if size.has_adapters else None
        return Batch(made.token_ids, made.positions, [first, *windows], made, adapters)

    def _adapter_rows(self, made: Expanded, size: StepSize) -> AdapterRows:
        assert self._adapters is not None, "only a table with adapters makes such a size"
        # Padding tokens belong to the row that ends the list, whose entry has no adapter.
        tokens = torch.arange(size.num_tokens, dtype=torch.int32, device=self._device)
        rows = torch.searchsorted(made.cu_seqlens_q[1:], tokens, right=True)
        entries = self._lines[1 : 2 + size.num_rows, 0].index_select(0, rows)
        return AdapterRows.of(self._adapters.index_select(0, entries))

    def sampled(self, num_sampled: int) -> tuple[torch.Tensor, SampledRows]:
        """The rows of the last Batch that may sample: the index of each one's last token, int64 [num_sampled], and how
        to sample. Both are in fixed places."""
        samples = self._samples.first(num_sampled)
        _, top_ks, _, _, kinds = samples.settings
        temperatures, _, top_ps, min_ps, _ = samples.settings.view(torch.float32)
        how = SampledRows(samples.entries, samples.lengths, samples.seeds, temperatures, top_ks, top_ps, min_ps, kinds)
        return samples.token_indices, how

    def padding_row(self) -> SampledRows:
        """One sampled row of padding."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        none, one = zero.float(), zero.float() + 1
        return SampledRows(zero + self._padding_entry, zero, zero, one, zero.int(), one, none, zero.int())

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Context manager during which every row, tile and sampled row is padding and no keys are shared, so that a
        step may be tried without a trace."""
        places = self._lines, self._tiles, self._shared.num_items, *self._samples
        saved = [place.clone() for place in places]
        for place in places:
            place.zero_()
        self._lines[1:, 0] = self._padding_entry
        self._samples.entries.fill_(self._padding_entry)
        try:
            yield
        finally:
            for place, values in zip(places, saved, strict=True):
                place.copy_(values)


def logprobs_width(num_logprobs: int) -> int:
    """Columns for this many log-probabilities and the token's own. There are few widths, so that few steps are
    captured."""
    return _WIDTHS[bisect_left(_WIDTHS, 1 + num_logprobs)]


def _temperature(temperature: float) -> float:
    """The temperature, clamped to float32's normal range; 0 stays 0, which is greedy."""
    return min(max(temperature, COLDEST), 1e30) if temperature > 0 else 0.0
