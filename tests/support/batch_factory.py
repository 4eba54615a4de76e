"""The Batch of an eager step, as a new SequenceTable makes it, and all tensors that rows expand to."""

from collections import namedtuple

import torch

from nanovllm.attention.metadata import QUERY_TILE
from nanovllm.engine.block_manager import WindowGroups
from nanovllm.engine.step import Chunk, Step
from nanovllm.layers.sampler import SamplingNeeds
from nanovllm.ops.expand_rows import Expanded, ExpandedSamples, Table, expand_rows
from nanovllm.runner.sequence_table import Batch, SequenceTable
from nanovllm.runner.step_sizes import StepRows, StepSize


def make_batch(
    chunks: list[Chunk], block_size: int, max_model_len: int = 128, device: str = "cpu", num_window_groups: int = 0
) -> Batch:
    """The Batch of a step of these chunks, whose sequences have entries."""
    step, num_new = Step.of(chunks), [chunk.num_new_tokens for chunk in chunks]
    num_sampled = sum(chunk.samples for chunk in chunks)
    num_tiles = sum(-(-n // QUERY_TILE) for n in num_new[step.num_decodes :])
    size = StepSize(len(chunks), sum(num_new), num_sampled, num_tiles, step.num_decodes, max(num_new), False)
    table = SequenceTable(
        len(chunks), max_model_len, block_size, 1000, sum(num_new), torch.device(device),
        windows=WindowGroups(num_window_groups),
    )  # fmt: skip
    return table.batch(table.send(step, OneSize(size)))


class OneSize:
    """StepSizes that give every step the same size."""

    generates = True

    def __init__(self, size: StepSize):
        self._size = size

    def size_of(self, rows: StepRows, num_decodes: int, is_scored: bool) -> tuple[StepSize, bool]:
        return self._size, False


def send(table: SequenceTable, step: Step, size: StepSize) -> SamplingNeeds:
    """Puts a step into place, as StepProgram.launch does."""
    return table.send(step, OneSize(size)).needs


# Expanded and ExpandedSamples together.
WholeExpansion = namedtuple("WholeExpansion", (*Expanded._fields, *ExpandedSamples._fields))


def expanded(
    rows: torch.Tensor,
    table: Table,
    num_rows: int,
    num_tokens: int,
    num_sampled: int,
    block_size: int,
    use_kernels: bool = False,
) -> WholeExpansion:
    """`expand_rows` with memory of its own for the rows that sample."""
    samples = ExpandedSamples.empty(num_sampled, len(table.settings), rows.device)
    return WholeExpansion(*expand_rows(rows, table, num_rows, num_tokens, samples, block_size, use_kernels), *samples)
