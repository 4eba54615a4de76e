"""Turns a step's scheduled work into tensors."""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.scheduler import Work
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import SamplingBatch
from nanovllm.utils.context import Context


@dataclass
class Batch:
    """The inputs of one step, on the device.

    Args:
        token_ids: int64 [num_tokens], 0 where the token is still in flight.
        in_flight_rows: int64 [num_in_flight], which tokens those are; None if there are none.
        in_flight_slots: int64 [num_in_flight], where on the device the step before leaves them.
        positions: int64 [num_tokens].
        context: for attention; its plan is still to be made.
        sampled_rows: int64 [num_sampled], the last token of each sequence that samples.
        sampled_slots: int64 [num_sampled], where to leave what they sample.
        sampling: how.
    """

    token_ids: torch.Tensor
    in_flight_rows: torch.Tensor | None
    in_flight_slots: torch.Tensor | None
    positions: torch.Tensor
    context: Context
    sampled_rows: torch.Tensor
    sampled_slots: torch.Tensor
    sampling: SamplingBatch


def build_batch(work: Work, block_size: int, vocab_size: int, device: torch.device) -> Batch:
    """The Batch of `work`, which was just scheduled: `num_computed_tokens` is where each chunk ends."""

    def on_device(values, dtype=np.int64) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype)).to(device, non_blocking=True)

    num_seqs = len(work)
    num_new_tokens = np.fromiter((num_new for _, num_new, _ in work), np.int64, num_seqs)
    context_lens = np.fromiter((seq.num_computed_tokens for seq, _, _ in work), np.int64, num_seqs)
    starts = context_lens - num_new_tokens
    cu_seqlens_q = np.zeros(num_seqs + 1, np.int64)
    cu_seqlens_k = np.zeros(num_seqs + 1, np.int64)
    np.cumsum(num_new_tokens, out=cu_seqlens_q[1:])
    np.cumsum(context_lens, out=cu_seqlens_k[1:])

    token_ids: list[int] = []
    in_flight_rows: list[int] = []
    in_flight_slots: list[int] = []
    for seq, num_new, _ in work:
        end = seq.num_computed_tokens
        token_ids += seq.token_ids[end - num_new : end]
        if end > len(seq.token_ids):  # only ever the last one
            in_flight_rows.append(len(token_ids))
            in_flight_slots.append(seq.slot)
            token_ids.append(0)

    block_tables = _block_tables(work)
    row = np.repeat(np.arange(num_seqs), num_new_tokens)
    positions = np.arange(cu_seqlens_q[-1]) + (starts - cu_seqlens_q[:-1])[row]
    slot_mapping = block_tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size

    samples = np.fromiter((samples for _, _, samples in work), bool, num_seqs)
    sampled_seqs = [seq for seq, _, samples in work if samples]
    return Batch(
        token_ids=on_device(token_ids),
        in_flight_rows=on_device(in_flight_rows) if in_flight_rows else None,
        in_flight_slots=on_device(in_flight_slots) if in_flight_rows else None,
        positions=on_device(positions),
        context=Context(
            cu_seqlens_q=on_device(cu_seqlens_q, np.int32),
            cu_seqlens_k=on_device(cu_seqlens_k, np.int32),
            max_seqlen_q=int(num_new_tokens.max()),
            max_seqlen_k=int(context_lens.max()),
            slot_mapping=on_device(slot_mapping),
            context_lens=on_device(context_lens, np.int32),
            block_tables=on_device(block_tables, np.int32),
            block_size=block_size,
            seq_ids=[seq.seq_id for seq, _, _ in work],
        ),
        sampled_rows=on_device(cu_seqlens_q[1:][samples] - 1),
        sampled_slots=on_device([seq.slot for seq in sampled_seqs]),
        sampling=_build_sampling(sampled_seqs, vocab_size, on_device),
    )


def _block_tables(work: Work) -> np.ndarray:
    """int32 [num_seqs, most blocks], padded with 0."""
    num_blocks = np.fromiter((len(seq.block_table) for seq, _, _ in work), np.int64, len(work))
    block_tables = np.zeros((len(work), num_blocks.max()), np.int32)
    is_block = np.arange(num_blocks.max()) < num_blocks[:, None]
    block_tables[is_block] = [block_id for seq, _, _ in work for block_id in seq.block_table]
    return block_tables


def _build_sampling(seqs: list[Sequence], vocab_size: int, on_device) -> SamplingBatch:
    batch = SamplingBatch()
    banned = [
        (row, token_id)
        for row, seq in enumerate(seqs)
        # The token being sampled is counted in num_tokens already.
        if seq.num_tokens - 1 - seq.num_prompt_tokens < seq.sampling_params.min_tokens
        for token_id in seq.stop_token_ids
    ]
    if banned:
        batch.banned_rows, batch.banned_ids = on_device(banned).unbind(1)
    random = [(row, seq, seq.sampling_params) for row, seq in enumerate(seqs) if seq.sampling_params.temperature > 0]
    if not random:
        return batch
    batch.random_rows = on_device([row for row, _, _ in random])
    # In float32 a temperature can become 0 or infinite; the smallest and largest numbers are as good as those.
    batch.temperatures = on_device(
        [min(max(params.temperature, 1.2e-38), 3.4e38) for _, _, params in random], np.float32
    )
    batch.seeds = on_device(np.array([seq.seed for _, seq, _ in random], np.uint64).view(np.int64))
    batch.positions = on_device([seq.num_tokens - 1 for _, seq, _ in random])
    filtered = [
        (row, params)
        for row, (_, _, params) in enumerate(random)
        if 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0
    ]
    if filtered:
        batch.filtered = on_device([row for row, _ in filtered])
        batch.top_ks = on_device([min(params.top_k or vocab_size, vocab_size) for _, params in filtered])
        batch.top_ps = on_device([params.top_p for _, params in filtered], np.float32)
        batch.min_ps = on_device([params.min_p for _, params in filtered], np.float32)
    return batch
