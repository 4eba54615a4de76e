"""Sequences in a given state, and steps of them."""

from itertools import count

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk, Step
from nanovllm.ops.expand_rows import Table
from nanovllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)


_new_ids = count()


def scheduled(tokens, block_table, num_computed_tokens=None, params=GREEDY, entry=0, seq_id=None, **fields):
    """A sequence as the scheduler leaves it once it has scheduled its tokens up to `num_computed_tokens`."""
    seq_id = next(_new_ids) if seq_id is None else seq_id
    seq = Sequence(seq_id, list(tokens), params, max_length=10_000, **fields)
    seq.block_table = block_table
    seq.num_computed_tokens = seq.num_tokens if num_computed_tokens is None else num_computed_tokens
    seq.entry = entry
    return seq


def step_of(*chunks: tuple[Sequence, int, bool]) -> Step:
    """(sequence, new tokens, whether it samples) of each chunk."""
    for seq, _, samples in chunks:
        seq.num_tokens += samples
    return Step.of([Chunk(*chunk) for chunk in chunks])


def random_rows(
    num_rows: int, num_tokens: int, num_sampled: int, max_blocks: int, seed: int = 0
) -> tuple[torch.Tensor, Table]:
    """Rows as `expand_rows` takes them, a few of them padding, and a table of blocks of 16."""
    rng = np.random.default_rng((num_rows, seed))
    num_entries, max_model_len, num_real = num_rows + 2, max_blocks * 16, max(1, num_rows - 2)
    table = Table(
        torch.from_numpy(rng.integers(0, 1000, (num_entries, max_model_len), np.int32)),
        torch.from_numpy(rng.integers(0, 2**28, (2, num_entries, max_blocks), np.int32)),
        torch.from_numpy(rng.integers(-(2**31), 2**31, (4, num_entries), np.int32)),
        torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_entries)),
    )
    table.block_tables[:, -1] = 0
    num_new = rng.integers(1, min(max(1, num_tokens // num_real), max_model_len), num_real, endpoint=True)
    rows = np.zeros((max(num_rows + 1, num_sampled), 4), np.int32)
    rows[:, 0], rows[:, 2], rows[:, 3] = num_entries - 1, num_new.sum(), num_rows
    rows[:num_real, 0] = rng.permutation(num_entries - 1)[:num_real]
    rows[:num_real, 1] = rng.integers(num_new, max_model_len, endpoint=True)
    rows[:num_real, 2] = np.cumsum(num_new) - num_new
    samples = np.flatnonzero(rng.random(num_real) < 0.8)[:num_sampled]
    rows[: len(samples), 3] = samples
    return torch.from_numpy(rows), table
