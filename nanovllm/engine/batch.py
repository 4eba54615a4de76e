"""Turns a step's scheduled work into tensors."""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.scheduler import Work
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import COLDEST, SamplingBatch, SpecialRows
from nanovllm.utils.context import Context, query_tiles
from nanovllm.utils.upload import upload


@dataclass
class Batch:
    """The inputs of one step, on the device.

    Args:
        token_ids: int64 [num_tokens], 0 where the token is still in flight.
        in_flight_slots: int64 [num_tokens], where on the device the step before leaves such a token, elsewhere −1; None
            if there are none.
        positions: int64 [num_tokens].
        context: for attention; its plan is still to be made.
        sampled_rows: int64 [num_sampled], the last token of each sequence that samples; None if all rows are.
        sampled_slots: int64 [num_sampled], where to leave what they sample.
        sampling: how.
    """

    token_ids: torch.Tensor
    in_flight_slots: torch.Tensor | None
    positions: torch.Tensor
    context: Context
    sampled_rows: torch.Tensor | None
    sampled_slots: torch.Tensor
    sampling: SamplingBatch


def build_batch(work: Work, block_size: int, device: torch.device, is_grouped: bool = False) -> Batch:
    """The Batch of `work`, which was just scheduled: `num_computed_tokens` is where each chunk ends.

    is_grouped: whether its decodes are the rows of the backend's last `group_prefixes`.
    """
    num_new_tokens, context_lens, num_decodes = step_lengths(work)
    arrays = step_arrays(work, block_size) | {
        "context_lens": context_lens.astype(np.int32),
        "cu_seqlens_q": np.append(0, np.cumsum(num_new_tokens)).astype(np.int32),
        "cu_seqlens_k": np.append(0, np.cumsum(context_lens)).astype(np.int32),
    }
    inputs = dict(zip(arrays, upload(list(arrays.values()), device), strict=True))
    return Batch(
        token_ids=inputs["token_ids"],
        in_flight_slots=inputs["in_flight_slots"] if (arrays["in_flight_slots"] >= 0).any() else None,
        positions=inputs["positions"],
        context=Context(
            cu_seqlens_q=inputs["cu_seqlens_q"],
            cu_seqlens_k=inputs["cu_seqlens_k"],
            max_seqlen_q=int(num_new_tokens.max()),
            max_seqlen_k=int(context_lens.max()),
            slot_mapping=inputs["slot_mapping"],
            context_lens=inputs["context_lens"],
            block_tables=inputs["block_tables"],
            block_size=block_size,
            num_decodes=num_decodes,
            is_grouped=is_grouped,
            query_tiles=inputs["query_tiles"] if num_decodes < len(work) else None,
            has_cached_keys=bool((context_lens > num_new_tokens)[num_decodes:].any()),
            seq_ids=[seq.seq_id for seq, _, _ in work],
        ),
        sampled_rows=inputs["sampled_rows"],
        sampled_slots=inputs["sampled_slots"],
        sampling=SamplingBatch(inputs["temperatures"], inputs["seeds"], inputs["sampled_positions"]),
    )


def step_lengths(work: Work) -> tuple[np.ndarray, np.ndarray, int]:
    """New tokens and keys of each sequence, int64 [num_seqs], and how many leading ones have a single new token."""
    num_new_tokens = np.fromiter((num_new for _, num_new, _ in work), np.int64, len(work))
    context_lens = np.fromiter((seq.num_computed_tokens for seq, _, _ in work), np.int64, len(work))
    is_longer = np.flatnonzero(num_new_tokens > 1)
    return num_new_tokens, context_lens, int(is_longer[0]) if len(is_longer) else len(work)


def step_arrays(work: Work, block_size: int) -> dict[str, np.ndarray]:
    """What every step with prompts sends to the device; see Batch, Context and SamplingBatch."""
    num_new_tokens, context_lens, num_decodes = step_lengths(work)
    token_ids, in_flight_slots = _token_ids(work)
    block_tables = _block_tables(work)
    ends = np.cumsum(num_new_tokens)
    row = np.repeat(np.arange(len(work)), num_new_tokens)
    positions = np.arange(ends[-1]) + (context_lens - ends)[row]
    slot_mapping = block_tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    samples = np.fromiter((samples for _, _, samples in work), bool, len(work))
    sampled_slots, temperatures, seeds, sampled_positions = _sampling_arrays(
        [seq for seq, _, samples in work if samples]
    )
    return {
        "token_ids": token_ids,
        "in_flight_slots": in_flight_slots,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "block_tables": block_tables,
        "query_tiles": query_tiles(num_new_tokens, context_lens, num_decodes),
        "sampled_rows": ends[samples] - 1,
        "sampled_slots": sampled_slots,
        "temperatures": temperatures,
        "seeds": seeds,
        "sampled_positions": sampled_positions,
    }


def _token_ids(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """The new tokens, 0 for one in flight, and the slots of those, elsewhere −1: int64 [num_tokens] each."""
    token_ids: list[int] = []
    in_flight: list[tuple[int, int]] = []  # (token, slot)
    for seq, num_new, _ in work:
        end = seq.num_computed_tokens
        token_ids += seq.token_ids[end - num_new : end]
        if end > len(seq.token_ids):  # only ever the last one
            in_flight.append((len(token_ids), seq.slot))
            token_ids.append(0)
    slots = np.full(len(token_ids), -1, np.int64)
    tokens_in_flight, their_slots = np.array(in_flight, np.int64).reshape(-1, 2).T
    slots[tokens_in_flight] = their_slots
    return np.array(token_ids, np.int64), slots


def _block_tables(work: Work) -> np.ndarray:
    """int32 [num_seqs, most blocks], padded with 0."""
    num_blocks = np.fromiter((len(seq.block_table) for seq, _, _ in work), np.int64, len(work))
    block_tables = np.zeros((len(work), num_blocks.max()), np.int32)
    is_block = np.arange(num_blocks.max()) < num_blocks[:, None]
    block_tables[is_block] = [block_id for seq, _, _ in work for block_id in seq.block_table]
    return block_tables


def _sampling_arrays(seqs: list[Sequence]) -> list[np.ndarray]:
    """Slots, temperatures, seeds and the sampled tokens' positions, each [num_seqs]."""
    return [
        np.array([seq.slot for seq in seqs], np.int64),
        np.array([sampling_temperature(seq) for seq in seqs], np.float32),
        np.array([seq.seed for seq in seqs], np.uint64).view(np.int64),
        np.array([seq.num_tokens - 1 for seq in seqs], np.int64),
    ]


def sampling_temperature(seq: Sequence) -> float:
    """Of the sequence's sampling; what float32 would make 0 or infinite becomes a number as good."""
    temperature = seq.sampling_params.temperature
    return min(max(temperature, COLDEST), 1e30) if temperature > 0 else 0.0


def special_rows(work: Work, vocab_size: int, device: torch.device, most_rows: int = 64) -> list[SpecialRows]:
    """The sampled rows of `work` with a top-k, top-p, min-p, or ids that min_tokens bans, in parts.

    Args:
        most_rows: of a part; sorting a vocabulary takes many times the memory of its logits.
    """
    special = []  # (row, sequence, whether its stop ids are banned)
    for row, seq in enumerate(seq for seq, _, samples in work if samples):
        params = seq.sampling_params
        # The token being sampled is counted in num_tokens already.
        is_banned = bool(seq.stop_token_ids) and seq.num_tokens - 1 - seq.num_prompt_tokens < params.min_tokens
        is_filtered = params.temperature > 0 and (0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0)
        if is_banned or is_filtered:
            special.append((row, seq, is_banned))
    parts = (special[first : first + most_rows] for first in range(0, len(special), most_rows))
    return [_special_rows(part, vocab_size, device) for part in parts]


def _special_rows(special: list[tuple[int, Sequence, bool]], vocab_size: int, device: torch.device) -> SpecialRows:
    params = [seq.sampling_params for _, seq, _ in special]
    banned = [
        (index, token_id)
        for index, (_, seq, is_banned) in enumerate(special)
        for token_id in (seq.stop_token_ids if is_banned else ())
    ]
    banned_rows, banned_ids = np.array(banned, np.int64).reshape(-1, 2).T
    rows, slots, temperatures, seeds, positions, top_ks, top_ps, min_ps, banned_rows, banned_ids = upload(
        [
            np.array([row for row, _, _ in special], np.int64),
            *_sampling_arrays([seq for _, seq, _ in special]),
            np.array([min(p.top_k or vocab_size, vocab_size) for p in params], np.int64),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            banned_rows,
            banned_ids,
        ],
        device,
    )
    return SpecialRows(
        rows, slots, SamplingBatch(temperatures, seeds, positions), top_ks, top_ps, min_ps, banned_rows, banned_ids
    )
