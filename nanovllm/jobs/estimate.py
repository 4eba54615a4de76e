"""How long a job will take, measured on some of its rows."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nanovllm import LLM, PreflightSummary
from nanovllm.jobs.index import Index
from nanovllm.jobs.plan import BYTES_OF_WINDOW, ROWS_OF_WINDOW, beginning
from nanovllm.jobs.report import Progress
from nanovllm.jobs.row_params import RowParams
from nanovllm.jobs.rows import JobRow
from nanovllm.jobs.run import RowsRun
from nanovllm.jobs.source import Source
from nanovllm.parallel.replicas import Replicas

# A sample fills the batch so many times, but computes at most so many tokens of prompts, and may generate at most as
# many.
_BATCHES, _MOST_TOKENS = 4, 2**22
# The sample is taken in so many stretches of neighbours, and measured in so many parts.
_STRETCHES, _PARTS = 16, 16


class Sample:
    """A sample of a job's rows, in the place of Results. All other rows count as finished, so RowsRun runs the sample
    alone. Output rows are dropped.

    Args:
        index, lines: of the job.
        num_wanted: about how many rows to choose; `num_chosen` is how many were chosen.
    """

    def __init__(self, index: Index, lines: Source, num_wanted: int):
        self._chosen = frozenset(row.number for row in _stretches(_candidates(index, lines), num_wanted))
        self.num_rows, self.num_chosen = 0, len(self._chosen)

    def __contains__(self, number: int) -> bool:
        return number not in self._chosen

    def append(self, number: int, row: bytes) -> None:
        self.num_rows += 1

    def write(self) -> None:
        """There is nothing to write."""


def _candidates(index: Index, lines: Source) -> list[JobRow]:
    """Rows without errors from the whole input, as many as a window of the job has, and sorted like one. Rows that
    begin alike are then neighbours, as in the job."""
    numbers = np.flatnonzero(index.can_run)
    some = [len(lines.read(number)) for number in _stretches(numbers, 256)]
    most_rows = BYTES_OF_WINDOW * len(some) // max(sum(some), 1)
    chosen = _stretches(numbers, min(ROWS_OF_WINDOW, max(most_rows, 1)))
    rows = [index.row(number, lines.read(number)) for number in chosen]
    return sorted(rows, key=lambda row: beginning(row.prompt))


def _stretches(items: Any, num_items: int) -> list[Any]:
    """About `num_items` items, in stretches of neighbours that are spread evenly; all items if there are no more."""
    if num_items >= len(items):
        return list(items)
    size = -(-num_items // _STRETCHES)
    starts = np.linspace(0, len(items) - size, -(-num_items // size)).astype(np.int64)
    return [items[place] for place in np.unique(starts[:, None] + np.arange(size)).tolist()]


def num_rows_of_sample(max_num_seqs: int, summary: PreflightSummary) -> int:
    """Rows that fill the batch a few times; fewer if they are long, where the KV cache holds fewer too."""
    most_tokens = max(summary.num_prompt_tokens - summary.num_shared_tokens, summary.most_new_tokens)
    mean = most_tokens / max(summary.num_prompts - summary.num_errors, 1)
    return max(1, min(_BATCHES * max_num_seqs, int(_MOST_TOKENS / max(mean, 1))))


class _Mark(NamedTuple):
    num_rows: int  # that have finished
    seconds: float
    num_prefill_tokens: int
    num_decode_tokens: int


class Pace(Progress):
    """Shows the progress of a sample, and measures it.

    The batch is full until fewer rows are left than it can hold. That part tells the seconds per prefill token and per
    decode token. Rows beyond the sample are charged at these prices. Filling and emptying the batch count once.

    Args:
        num_rows: of the sample.
        metrics: of the LLM.
    """

    def __init__(self, num_rows: int, metrics: Callable[[], dict[str, Any]]):
        super().__init__(num_rows, 0, metrics, "estimate")
        self._marks = [self._mark(0)]

    def update(self, num_finished: int, num_errors: int) -> None:
        super().update(num_finished, num_errors)
        before = self._marks[-1].num_rows
        if num_finished * _PARTS // self._num_rows > before * _PARTS // self._num_rows:
            self._marks.append(self._mark(num_finished))

    def close(self) -> None:
        """Ends the measurement; replicas tell their last tokens only now."""
        super().close()
        last, now = self._marks[-1], self._mark(0)
        self._marks[-1] = last._replace(
            num_prefill_tokens=now.num_prefill_tokens, num_decode_tokens=now.num_decode_tokens
        )
        most_left = last.num_rows - self._metrics()["max_batch_size"]
        self._full = [mark for mark in self._marks[1:] if mark.num_rows <= most_left]

    @property
    def filled_the_batch(self) -> bool:
        """Whether the batch was full for long enough to be measured."""
        return len(self._full) > 2

    def _mark(self, num_finished: int) -> _Mark:
        metrics = self._metrics()
        return _Mark(num_finished, time.monotonic(), metrics["num_prefill_tokens"], metrics["num_decode_tokens"])

    def seconds_of(self, num_rows: int) -> float:
        """How many seconds `num_rows` rows like those of the sample take, without the LLM's start."""
        first, last = self._marks[0], self._marks[-1]
        seconds = last.seconds - first.seconds
        if num_rows <= last.num_rows:
            return seconds * num_rows / last.num_rows
        steady = seconds  # that the sample would take if the batch were full throughout
        if self.filled_the_batch:
            parts = np.diff(np.array(self._full), axis=0)[:, 1:]
            prices = _prices(parts[:, 1:], parts[:, 0])
            steady = float(prices @ np.subtract(last, first)[2:])
        return seconds + (num_rows - last.num_rows) / last.num_rows * steady


def _prices(amounts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The price of each kind of token, by least squares; none is negative.

    Args:
        amounts: float64 [num_parts, 2], tokens of each kind.
        seconds: float64 [num_parts].
    """
    prices, *_ = np.linalg.lstsq(amounts, seconds, rcond=None)
    for kind in np.flatnonzero(prices < 0):
        others = np.where(np.arange(2) == kind, 0, amounts)
        prices, *_ = np.linalg.lstsq(others, seconds, rcond=None)
    return prices.clip(0)


def estimate(
    make_llm: Callable[[], LLM | Replicas],
    lines: Source,
    index: Index,
    params: RowParams,
    summary: PreflightSummary,
    price_per_hour: float | None,
) -> dict[str, Any] | None:
    """Completes a sample of a job's rows, and says what the whole job will take; None if no row can run.

    Returns:
        docs/jobs.md lists the keys.

    Raises:
        KeyboardInterrupt: a signal stopped the sample.
    """
    num_rows = len(lines) - index.num_errors
    if not num_rows or summary.num_errors == summary.num_prompts:
        return None
    began = time.monotonic()
    with make_llm() as llm:
        start = time.monotonic() - began
        sample = Sample(index, lines, num_rows_of_sample(llm.metrics()["max_num_seqs"], summary))
        pace = Pace(sample.num_chosen, llm.metrics)
        try:
            RowsRun(lines, index, params, sample, 0, "").through(llm, pace)
        finally:
            pace.close()
        num_output_tokens = llm.metrics()["num_output_tokens"]
    if sample.num_rows < sample.num_chosen:
        raise KeyboardInterrupt
    seconds = pace.seconds_of(num_rows)
    found: dict[str, Any] = {
        "measured_rows": sample.num_rows,
        "seconds": {"start": start, "rows": seconds},
        "output_tokens": round(num_output_tokens / sample.num_rows * num_rows),
        "filled_the_batch": pace.filled_the_batch or sample.num_rows == num_rows,
    }
    if price_per_hour is not None:
        found["cost"] = price_per_hour * (start + seconds) / 3600
    return found
