"""A step as the host describes it to the device: its rows as columns of numbers, and how the step is run."""

from typing import NamedTuple

import numpy as np

from nanovllm.engine.step import Step


class StepRows(NamedTuple):
    """A step's chunks as columns, int64 [num_rows] each: all that the host says about it, gathered in one pass.

    tenants: [num_rows, 2], the request's id and how often it was preempted, which together identify one admission.
    entries: the row's place in the SequenceTable.
    num_new_tokens, keys: number of tokens to compute, and of keys after the step.
    samples: 1 for rows that sample.
    num_blocks: number of blocks in the row's block table.
    num_cached: prompt tokens that the prefix cache served.
    """

    tenants: np.ndarray
    entries: np.ndarray
    num_new_tokens: np.ndarray
    keys: np.ndarray
    samples: np.ndarray
    num_blocks: np.ndarray
    num_cached: np.ndarray

    @classmethod
    def of(cls, step: Step) -> "StepRows":
        """The rows of a step that was just scheduled."""
        numbers = (
            number
            for seq, num_new, samples in step.chunks
            for number in (
                seq.seq_id, seq.num_preemptions, seq.entry, num_new, seq.num_computed_tokens, samples,
                len(seq.block_table), seq.num_cached_tokens,
            )
        )  # fmt: skip
        columns = np.fromiter(numbers, np.int64, 8 * len(step.chunks)).reshape(-1, 8).T
        return cls(columns[:2].T, *columns[2:])

    @property
    def num_sampled(self) -> int:
        return int(self.samples.sum())


NO_ROWS = StepRows.of(Step.of([]))
