"""Estimates how long a job will take from a sample of its rows."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nanovllm import LLM, PreflightSummary
from nanovllm.jobs.index import Index
from nanovllm.jobs.plan import ROWS_OF_WINDOW, beginning
from nanovllm.jobs.report import Progress
from nanovllm.jobs.results import Results
from nanovllm.jobs.run import RowsRun
from nanovllm.replicas.replicas import Replicas

# A sample fills this many batches, and has at most this many prompt tokens. After this many generated tokens, no more
# of its rows start.
_BATCHES, _MAX_PROMPT_TOKENS, _MAX_NEW_TOKENS = 4, 2**22, 2**22
# Number of stretches of neighbouring rows in a sample, and of parts in which it is measured.
_STRETCHES, _PARTS = 16, 16
# Bytes of lines that are read to choose a sample, and characters or tokens of a prompt by which it is sorted.
_BYTES_TO_READ, _BEGINNING = 2**28, 512


class Sample(Results):
    """A sample of a job's rows. All other rows count as finished, so that RowsRun runs the sample alone. Output rows
    are dropped.

    Args:
        index: the job's rows.
        summary: their preflight.
        max_num_seqs: sequences that can run at a time.

    num_chosen: how many rows were chosen.
    mean_n: completions per row.
    """

    def __init__(self, index: Index, summary: PreflightSummary, max_num_seqs: int):
        super().__init__()
        candidates, self.mean_n = _candidates(index)
        self._chosen = frozenset(_stretches(candidates, num_rows_of_sample(max_num_seqs / self.mean_n, summary)))
        self.num_chosen = len(self._chosen)

    def __contains__(self, number: int) -> bool:
        return number not in self._chosen


def _candidates(index: Index) -> tuple[list[int], float]:
    """As many rows without errors as a window of the job has, from the whole input and sorted like a window, and their
    mean n. Rows that begin alike are then neighbours, as in the job."""
    numbers = np.flatnonzero(index.can_run)
    sizes = [index.read(number)[1] for number in _stretches(numbers, 256)]
    max_num_rows = _BYTES_TO_READ * len(sizes) // max(sum(sizes), 1)
    found = []
    num_completions = 0
    for number in _stretches(numbers, min(ROWS_OF_WINDOW, max(max_num_rows, 1))):
        row, _ = index.read(number)
        found.append(((row.adapter or "", beginning(row.prompt, _BEGINNING)), number))
        num_completions += index.params.of(row).n
    return [number for _, number in sorted(found)], num_completions / max(len(found), 1)


def _stretches(items: Any, num_items: int) -> list[int]:
    """About `num_items` of the items, in evenly spread stretches of neighbours; all of them if there are not more."""
    if num_items >= len(items):
        return [int(item) for item in items]
    size = -(-num_items // _STRETCHES)
    starts = np.linspace(0, len(items) - size, -(-num_items // size)).astype(np.int64)
    return [int(items[place]) for place in np.unique(starts[:, None] + np.arange(size)).tolist()]


def num_rows_of_sample(rows_at_a_time: float, summary: PreflightSummary) -> int:
    """Rows that fill the batch a few times; fewer if prompts are long, because the KV cache holds fewer of those."""
    num_uncached = summary.num_prompt_tokens - summary.num_shared_tokens
    mean = num_uncached / max(summary.num_prompts - summary.num_errors, 1)
    return max(1, min(int(_BATCHES * rows_at_a_time), int(_MAX_PROMPT_TOKENS / max(mean, 1))))


class _Mark(NamedTuple):
    num_rows: int  # that have finished
    seconds: float
    num_prefill_tokens: int
    num_decode_tokens: int


class Pace(Progress):
    """Shows the progress of a sample, and measures it.

    The batch is full until fewer rows are left than it can hold. That part gives the prices: the seconds per prefill
    token and per decode token. Rows beyond the sample cost these prices. The sample itself counts with the time that it
    took, so filling and emptying the batch count once.

    Args:
        num_rows: rows of the sample.
        mean_n: completions per row.
        metrics: gives the LLM's metrics.
    """

    def __init__(self, num_rows: int, mean_n: float, metrics: Callable[[], dict[str, Any]]):
        super().__init__(num_rows, 0, metrics, "estimate")
        self._mean_n = mean_n
        self._marks = [self._mark(0)]
        self._ended = self._marks[0].seconds
        self._steady: float | None = None

    @property
    def filled_the_batch(self) -> bool:
        """Whether the batch was full for long enough to be measured."""
        return self._steady is not None

    def update(self, num_finished: int, num_errors: int) -> None:
        super().update(num_finished, num_errors)
        self._ended = time.monotonic()
        before = self._marks[-1]
        if num_finished * _PARTS // self._num_rows > before.num_rows * _PARTS // self._num_rows:
            mark = self._mark(num_finished)
            # Rows that finish in one step make one mark.
            if mark[2:] == before[2:] and before.num_rows:
                self._marks.pop()
            self._marks.append(mark)
            self.is_enough = mark.num_decode_tokens >= _MAX_NEW_TOKENS

    def _mark(self, num_finished: int) -> _Mark:
        metrics = self._metrics()
        return _Mark(num_finished, time.monotonic(), metrics["num_prefill_tokens"], metrics["num_decode_tokens"])

    def measure(self) -> None:
        """Computes the prices, after the last row; replicas report their last tokens only then."""
        last = self._mark(self._num_finished)._replace(seconds=self._ended)
        self._marks.append(last)
        rows_at_a_time = self._metrics().get("max_batch_size", 0) / self._mean_n
        full = [mark for mark in self._marks[1:-1] if mark.num_rows <= last.num_rows - rows_at_a_time]
        if len(full) < 3:
            return
        parts = np.diff(np.array(full), axis=0)[:, 1:]
        if (prices := _prices(parts[:, 1:], parts[:, 0])) is not None:
            self._steady = float(prices @ np.subtract(last, self._marks[0])[2:])

    def seconds_of(self, num_rows: int) -> float:
        """Seconds that `num_rows` rows like those of the sample take, without the LLM's start."""
        num_measured, seconds = self._marks[-1].num_rows, self._marks[-1].seconds - self._marks[0].seconds
        if num_rows <= num_measured:
            return seconds * num_rows / num_measured
        steady = seconds if self._steady is None else self._steady
        return seconds + (num_rows - num_measured) / num_measured * steady


def _prices(amounts: np.ndarray, seconds: np.ndarray) -> np.ndarray | None:
    """The price of each kind of token, by least squares. Both are at least 0, and together they explain all the
    seconds. Returns None if there are no tokens.

    Args:
        amounts: float64 [num_parts, 2], tokens of each kind.
        seconds: float64 [num_parts].
    """
    prices, *_ = np.linalg.lstsq(amounts, seconds, rcond=None)
    if prices.min() < 0:  # then the other kind explains everything
        prices = np.where(prices < 0, 0.0, 1.0)
    explained = float((amounts @ prices).sum())
    return prices * (float(seconds.sum()) / explained) if explained > 0 else None


def estimate(
    make_llm: Callable[[], LLM | Replicas], index: Index, summary: PreflightSummary, price_per_hour: float | None
) -> dict[str, Any] | None:
    """Completes a sample of a job's rows, and estimates the whole job; None if no row can run.

    Returns:
        A dict; docs/jobs.md lists its keys.

    Raises:
        KeyboardInterrupt: a signal stopped the sample.
    """
    num_rows = len(index) - index.errors.num_rows
    if not num_rows or summary.num_errors == summary.num_prompts:
        return None
    began = time.monotonic()
    with make_llm() as llm:
        start = time.monotonic() - began
        sample = Sample(index, summary, llm.metrics()["max_num_seqs"])
        pace = Pace(sample.num_chosen, sample.mean_n, llm.metrics)
        rows_run = RowsRun(index, sample, 0, "")
        try:
            rows_run.run(llm, pace)
        finally:
            pace.close()
        if rows_run.num_stops or not sample.num_rows:
            raise KeyboardInterrupt
        pace.measure()
        num_output_tokens = llm.metrics()["num_output_tokens"]
    seconds = pace.seconds_of(num_rows)
    found: dict[str, Any] = {
        "measured_rows": sample.num_rows,
        "filled_the_batch": pace.filled_the_batch or sample.num_rows >= num_rows,
        "seconds": {"start": start, "rows": seconds},
        "output_tokens": round(num_output_tokens / sample.num_rows * num_rows),
    }
    if price_per_hour is not None:
        found["cost"] = price_per_hour * (start + seconds) / 3600
    return found
