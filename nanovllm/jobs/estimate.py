"""How long a job will take, measured on some of its rows."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nanovllm import PreflightSummary
from nanovllm.jobs.index import Index
from nanovllm.jobs.plan import beginning
from nanovllm.jobs.rows import JobRow
from nanovllm.jobs.source import Source

# Sequences that run together on a GPU unless the job says otherwise.
_SEQUENCES = 1024
# Batches that a sample fills, and prompt tokens that it has at most: a small model reads them in half a minute.
_BATCHES, _MOST_PROMPT_TOKENS = 4, 2**22
# Rows that a sample is chosen from, as many as a window of the job has, and stretches of neighbours that they are in.
_ROWS_TO_CHOOSE_FROM, _BYTES_TO_CHOOSE_FROM, _STRETCHES = 2**15, 2**25, 16


class Sample:
    """Some rows of a job as Results, so that RowsRun runs these alone. Nothing is kept.

    Args:
        index, lines: of the job.
        num_rows: how many rows to choose; `num_chosen` is how many there are.
    """

    def __init__(self, index: Index, lines: Source, num_rows: int):
        self._chosen = frozenset(row.number for row in _stretches(_candidates(index, lines), num_rows))
        self.num_rows, self.num_chosen = 0, len(self._chosen)

    def __contains__(self, number: int) -> bool:
        return number not in self._chosen

    def append(self, number: int, row: bytes) -> None:
        self.num_rows += 1

    def write(self) -> None:
        """There is nothing to write."""


def _candidates(index: Index, lines: Source) -> list[JobRow]:
    """Rows without errors from the whole input, in the order in which a window of the job would run them. So rows that
    begin alike are neighbours, as often as they are in the job."""
    some = [len(lines.read(number)) for number in _stretches(range(len(lines)), 256)]
    most_rows = _BYTES_TO_CHOOSE_FROM * len(some) // max(sum(some), 1)
    numbers = _stretches(range(len(lines)), min(_ROWS_TO_CHOOSE_FROM, max(most_rows, 1)))
    rows = [row for number in numbers if (row := index.row(number, lines.read(number))).error is None]
    return sorted(rows, key=lambda row: beginning(row.prompt))


def _stretches(items: Any, num_items: int) -> list[Any]:
    """Stretches of neighbours, spread evenly, of `num_items` items together; all if there are no more."""
    if num_items >= len(items):
        return list(items)
    size = -(-num_items // _STRETCHES)
    starts = np.linspace(0, len(items) - size, -(-num_items // size)).astype(np.int64).tolist()
    return [item for start in starts for item in items[start : start + size]]


def num_rows_of_sample(engine: dict[str, Any], summary: PreflightSummary) -> int:
    """Rows that fill the batch a few times, or fewer if their prompts are long."""
    num_sequences = (engine.get("max_num_seqs") or _SEQUENCES) * (engine.get("data_parallel_size") or 1)
    mean_tokens = summary.num_prompt_tokens / max(summary.num_prompts - summary.num_errors, 1)
    return max(1, min(_BATCHES * num_sequences, int(_MOST_PROMPT_TOKENS / max(mean_tokens, 1))))


class Pace:
    """Measures a sample while it runs. It has the methods of Progress.

    The batch is full while the second quarter of the rows finishes, if at most half of the rows fit in it. All rows
    beyond the sample take the time per token of that quarter. What the sample takes before and after it, to fill and to
    empty the batch, the job takes once.

    Args:
        num_rows: of the sample.
        metrics: of the LLM.
    """

    def __init__(self, num_rows: int, metrics: Callable[[], dict[str, Any]]):
        self._metrics = metrics
        self._marks = [(0, *self._now())]  # rows finished, seconds, tokens computed
        self._wanted = [num_rows // 4, num_rows // 2, num_rows]

    def update(self, num_finished: int, num_errors: int) -> None:
        """Takes how many rows have finished."""
        if self._wanted and num_finished >= self._wanted[0]:
            self._wanted = [wanted for wanted in self._wanted if wanted > num_finished]
            self._marks.append((num_finished, *self._now()))

    def close(self) -> None:
        """The sample is over."""

    def _now(self) -> tuple[float, int]:
        metrics = self._metrics()
        return time.monotonic(), metrics["num_prefill_tokens"] + metrics["num_decode_tokens"]

    def seconds_of(self, num_rows: int) -> float:
        """Seconds that so many rows like those of the sample take, without the LLM's start."""
        (_, began, no_tokens), (num_measured, ended, tokens) = self._marks[0], self._marks[-1]
        whole = ended - began
        if num_rows <= num_measured:
            return whole * num_rows / num_measured
        steady = whole  # seconds of the sample if the batch is full from beginning to end
        if len(self._marks) == 4 and (part := self._marks[2][2] - self._marks[1][2]):
            steady = (self._marks[2][1] - self._marks[1][1]) * (tokens - no_tokens) / part
        return whole + (num_rows - num_measured) / num_measured * steady
