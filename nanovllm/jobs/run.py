"""The rows of a job through an LLM."""

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.jobs.errors import Errors
from nanovllm.jobs.index import Index, name_of
from nanovllm.jobs.plan import early_rows, in_windows
from nanovllm.jobs.report import Progress
from nanovllm.jobs.row_params import RowParams
from nanovllm.jobs.rows import JobRow, output_of
from nanovllm.jobs.source import Source
from nanovllm.replicas.replicas import Replicas

# Rows that the LLM has, by the prompt's number in the call.
_Running = dict[int, tuple[JobRow, SamplingParams]]


class Results(Protocol):
    """Where output rows go: a Journal, or standard output."""

    num_rows: int

    def __contains__(self, number: int) -> bool:
        """Whether the output row of an input row is there."""

    def append(self, number: int, row: bytes) -> None:
        """Adds the output row of an input row."""

    def write(self) -> None:
        """Hands over what waits."""


class Stdout:
    """Standard output as Results: rows as they finish, and nothing to resume."""

    def __init__(self) -> None:
        self.num_rows = 0

    def __contains__(self, number: int) -> bool:
        return False

    def append(self, number: int, row: bytes) -> None:
        self.num_rows += 1
        sys.stdout.buffer.write(row + b"\n")
        sys.stdout.buffer.flush()

    def write(self) -> None:
        sys.stdout.buffer.flush()


class RowsRun:
    """Runs the rows that `results` lacks.

    Args:
        lines, index, params: of the job.
        results: takes the output rows.
        created, model: for output rows of OpenAI's format.

    errors: the rows that this run found in error.
    tail_seconds: how long the last 1% of this run's rows took; None if the run has not come so far.
    """

    def __init__(self, lines: Source, index: Index, params: RowParams, results: Results, created: int, model: str):
        self._lines, self._index, self._params, self._results = lines, index, params, results
        self._created, self._model = created, model
        self._num_stops = 0
        self.errors = Errors()
        self.tail_seconds: float | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether a signal came."""
        return self._num_stops > 0

    def through(self, llm: LLM | Replicas, progress: Progress) -> None:
        """Runs them. In the main thread, the first SIGINT or SIGTERM lets running rows finish, and the second raises
        KeyboardInterrupt."""
        running: _Running = {}
        given: deque[SamplingParams] = deque()
        is_drained = False
        num_rows, num_before = len(self._lines), self._results.num_rows
        before_tail = num_rows - max(1, (num_rows - num_before) // 100)
        tail_began = time.monotonic() if num_before >= before_tail else None
        with self._stopping_at_signals():
            outputs = llm.generate_iter(self._prompts(running, given), iter(given.popleft, None), ordered=False)
            for output in outputs:
                row, params = running.pop(int(output.request_id))
                self._take(row, params, output)
                progress.update(self._results.num_rows, self.errors.num_rows)
                if tail_began is None and self._results.num_rows >= before_tail:
                    tail_began = time.monotonic()
                if (self._num_stops or progress.is_enough) and not is_drained:
                    outputs.drain()
                    is_drained = True
            self._results.write()
        if tail_began is not None:
            self.tail_seconds = time.monotonic() - tail_began

    def _prompts(self, running: _Running, given: deque[SamplingParams]) -> Iterator[Any]:
        """The prompts to run, as the LLM asks for them; it takes a prompt's parameters right after the prompt. Rows
        that cannot run become output rows at once."""
        number_in_call = 0
        for row in self._planned():
            if self._num_stops:
                return
            if row.error is not None:
                self._take(row, None, None)
                continue
            params = self._params.of(row)
            running[number_in_call] = row, params
            number_in_call += 1
            given.append(params)
            yield row.prompt

    def _planned(self) -> Iterator[JobRow]:
        results, lines, index = self._results, self._lines, self._index
        early = [number for number in early_rows(index.max_num_new_tokens) if number not in results]
        is_early = set(early)

        def rest() -> Iterator[tuple[int, JobRow]]:
            for number in range(len(lines)):
                if number not in results and number not in is_early:
                    line = lines.read(number)
                    yield len(line), index.row(number, line)

        for number in early:
            yield index.row(number, lines.read(number))
        for _, row in in_windows(rest(), lambda each: each[0], lambda each: each[1].prompt):
            yield row

    def _take(self, row: JobRow, params: SamplingParams | None, output: RequestOutput | None) -> None:
        """Keeps the output row of a row that has finished."""
        error = row.error if output is None else output.error
        if error is not None:
            self.errors.add(name_of(row), error)
        with_token_ids = params is not None and not params.detokenize
        made = output_of(row, output, with_token_ids=with_token_ids, created=self._created, model=self._model)
        text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
        # A tokenizer may decode half of a surrogate pair, which UTF-8 does not have.
        self._results.append(row.number, text.encode(errors="replace"))

    @contextmanager
    def _stopping_at_signals(self) -> Iterator[None]:
        def stop(number: int, frame: Any) -> None:
            self._num_stops += 1
            if self._num_stops > 1:
                raise KeyboardInterrupt
            print("\nstopping after the running rows; press Ctrl-C again to stop at once", file=sys.stderr)

        before: dict[int, Callable[..., Any] | int | None] = {}
        with suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, stop)
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
