"""What stays on the device from step to step, so that the steps of decodes need next to nothing from the host."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from nanovllm.engine.batch import Batch, sampling_temperature
from nanovllm.engine.scheduler import Work
from nanovllm.kernels import is_fused
from nanovllm.layers.sampler import SamplingBatch
from nanovllm.utils.context import Context, DecodeInputs
from nanovllm.utils.upload import upload


class DeviceState:
    """What the device itself knows of the running sequences, so that a decode step needs next to nothing sent.

    By slot: the token sampled last and the block table. By row of the decode batch: its slot, context length and
    sampling, which `decode_batch` turns into a Batch and moves on by one token, on the device. `update` sends only
    what has changed. The slot after the last stands for rows that pad a captured step.
    """

    def __init__(self, max_num_seqs: int, max_num_blocks: int, block_size: int, device: torch.device):
        self.block_size = block_size
        self.device = device
        self.padding_slot = max_num_seqs
        self.last_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((max_num_seqs + 1, max_num_blocks), dtype=torch.int32, device=device)
        # Columns: slot, context length (0 for padding), seed, temperature as float64.
        self.rows = torch.zeros((max_num_seqs, 4), dtype=torch.int64, device=device)
        self.rows[:, 0] = self.padding_slot
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        # The block table objects of the rows sent last, a new one for each admission, and how long they were.
        self._tables: list[list[int]] = []
        self._num_sent = np.zeros(0, np.int64)
        # By slot: the table object that the device has, and how much of it.
        self._table_of_slot: dict[int, tuple[list[int], int]] = {}

    def forget_rows(self) -> None:
        """The next decode step is not the one after the last; its rows are sent anew."""
        self._tables = []

    def update(self, work: Work, num_rows: int) -> bool:
        """Makes the device's state that of the decodes `work`, padded to `num_rows`.

        Returns:
            Whether these are the rows of the step before, each one token further.
        """
        tables = [seq.block_table for seq, _, _ in work]
        num_blocks = np.fromiter(map(len, tables), np.int64, len(tables))
        is_next_step = list(map(id, tables)) == list(map(id, self._tables))
        self._tables = []  # until all of it is sent
        entries: list[tuple[int, int]] = []  # (index into the flat block tables, block)
        width = self.block_tables.shape[1]
        grown = np.flatnonzero(num_blocks != self._num_sent).tolist() if is_next_step else range(len(work))
        for row in grown:
            slot, table = work[row][0].slot, tables[row]
            known_table, num_known = self._table_of_slot.get(slot, (None, 0))
            if known_table is not table:
                num_known = 0
            first = slot * width
            entries += [(first + index, table[index]) for index in range(num_known, len(table))]
            self._table_of_slot[slot] = table, len(table)
        if entries:
            entries = np.array(entries, np.int64)
            indices, blocks = upload([entries[:, 0], entries[:, 1].astype(np.int32)], self.device)
            self.block_tables.view(-1).index_copy_(0, indices, blocks)
        if not is_next_step:
            self._send_rows(work, num_rows)
        self._tables, self._num_sent = tables, num_blocks
        return is_next_step

    def _send_rows(self, work: Work, num_rows: int) -> None:
        rows = np.zeros((num_rows, 4), np.int64)
        rows[len(work) :, 0] = self.padding_slot
        rows[: len(work), 0] = [seq.slot for seq, _, _ in work]
        rows[: len(work), 1] = [seq.num_computed_tokens for seq, _, _ in work]
        rows[: len(work), 2] = np.array([seq.seed for seq, _, _ in work], np.uint64).view(np.int64)
        rows.view(np.float64)[: len(work), 3] = [sampling_temperature(seq) for seq, _, _ in work]
        # A token the host knows may be one that this slot has never held: a prompt's, or one from before a preemption.
        known = [
            (seq.slot, seq.token_ids[seq.num_computed_tokens - 1])
            for seq, _, _ in work
            if seq.num_computed_tokens <= len(seq.token_ids)
        ]
        known_slots, known_tokens = np.array(known, np.int64).reshape(-1, 2).T
        sent_rows, slots, token_ids = upload([rows, known_slots, known_tokens], self.device)
        self.rows[:num_rows].copy_(sent_rows)
        if known:
            self.last_token_ids.index_copy_(0, slots, token_ids)

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Every row is padding meanwhile, so that a step may be tried without a trace."""
        rows = self.rows.clone()
        self.rows.zero_()
        self.rows[:, 0] = self.padding_slot
        try:
            yield
        finally:
            self.rows.copy_(rows)

    def decode_batch(self, num_rows: int, is_grouped: bool = False, seq_ids: list[int] | None = None) -> Batch:
        """The Batch of the first `num_rows` rows, each of which moves on by a token; all on the device."""
        inputs = self._decode_inputs(self.rows[:num_rows])
        return Batch(
            token_ids=inputs.token_ids,
            in_flight_slots=None,
            positions=inputs.positions,
            context=Context(
                cu_seqlens_q=self._one_each[: num_rows + 1],
                cu_seqlens_k=None,
                max_seqlen_q=1,
                max_seqlen_k=self.block_tables.shape[1] * self.block_size,
                slot_mapping=inputs.slot_mapping,
                context_lens=inputs.context_lens,
                block_tables=inputs.block_tables,
                block_size=self.block_size,
                num_decodes=num_rows,
                is_grouped=is_grouped,
                seq_ids=seq_ids,
            ),
            sampled_rows=None,
            sampled_slots=inputs.slots,
            # The sampled token stands after the last computed one.
            sampling=SamplingBatch(inputs.temperatures, inputs.seeds, inputs.lengths),
        )

    def _decode_inputs(self, rows: torch.Tensor) -> DecodeInputs:
        """What the step of `rows` works on; moves them on by a token."""
        if is_fused(rows):
            from nanovllm.kernels.fused import decode_inputs

            return decode_inputs(rows, self.last_token_ids, self.block_tables, self.block_size)
        # A copy, for one row's transpose would be a view of what is changed below.
        slots, lengths, seeds, temperatures = rows.t().clone(memory_format=torch.contiguous_format)
        positions = (lengths - 1).clamp_(min=0)
        block_tables = self.block_tables.index_select(0, slots)
        blocks = block_tables.gather(1, (positions // self.block_size).unsqueeze(1)).squeeze(1).long()
        slot_mapping = blocks * self.block_size + positions % self.block_size
        rows[:, 1] += lengths > 0
        return DecodeInputs(
            token_ids=self.last_token_ids.index_select(0, slots),
            positions=positions,
            slots=slots,
            slot_mapping=slot_mapping.where(lengths > 0, -1),
            lengths=lengths,
            seeds=seeds,
            context_lens=lengths.int(),
            temperatures=temperatures.view(torch.float64).float(),
            block_tables=block_tables,
        )
