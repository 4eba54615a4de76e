"""Runs the rows of a job through an LLM."""

import json
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from operator import itemgetter
from typing import Any

from nanovllm import LLM, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
from nanovllm.jobs.data import with_data
from nanovllm.jobs.index import Index
from nanovllm.jobs.output_rows import embedding_of, error_of, output_of
from nanovllm.jobs.plan import early_rows, in_windows
from nanovllm.jobs.report import Progress
from nanovllm.jobs.results import Results
from nanovllm.jobs.rows import JobRow
from nanovllm.jobs.timeline import Lengths
from nanovllm.jobs.vectors import packed
from nanovllm.replicas.replicas import Replicas

_Params = SamplingParams | PoolingParams
# The rows that the LLM has, by the prompt's number in the call.
_Running = dict[int, tuple[JobRow, _Params]]


def finished_row(
    row: JobRow,
    params: _Params | None,
    output: RequestOutput | PoolingRequestOutput | None,
    created: int,
    model: str,
) -> tuple[dict[str, Any], bytes]:
    """The output row of a row, as `output_of` makes it and as `packed` makes it. It depends only on the arguments."""
    with_token_ids = isinstance(params, SamplingParams) and not params.detokenize
    made = output_of(row, output, with_token_ids=with_token_ids, created=created, model=model)
    text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
    # A tokenizer may decode half of a surrogate pair, which UTF-8 does not have.
    return made, packed(with_data(text.encode(errors="replace"), row.data), embedding_of(row, output))


class RowsRun:
    """Runs the rows that `results` lacks.

    Args:
        index: the job's rows.
        results: takes the output rows.
        created, model: for output rows of OpenAI's format.
        lengths: takes those of the rows that this run finishes.

    num_stops: signals that came.
    tail_seconds: how long the last 1% of this run's rows took; None if the run did not reach them.
    """

    def __init__(self, index: Index, results: Results, created: int, model: str, lengths: Lengths | None = None):
        self._index, self._results, self._created, self._model = index, results, created, model
        self.num_stops = 0
        self.tail_seconds: float | None = None
        self._lengths = lengths

    def run(self, llm: LLM | Replicas, progress: Progress) -> None:
        """Runs the rows. In the main thread, the first SIGINT or SIGTERM lets running rows finish, and the second
        raises KeyboardInterrupt."""
        running: _Running = {}
        given: deque[Any] = deque()
        is_drained = False
        num_rows, num_before = len(self._index), self._results.num_rows
        before_tail = num_rows - max(1, (num_rows - num_before) // 100)
        tail_began = time.monotonic() if num_before >= before_tail else None
        with self._stopping_at_signals():
            prompts = self._prompts(running, given, progress)
            outputs = llm.generate_iter(
                prompts, iter(given.popleft, None), ordered=False, lora_request=self._lora_request(running)
            )
            for output in outputs:
                row, params = running.pop(output.prompt_index)
                self._take(row, params, output)
                progress.update(self._results.num_rows, self._results.errors.num_rows)
                if tail_began is None and self._results.num_rows >= before_tail:
                    tail_began = time.monotonic()
                if (self.num_stops or progress.is_enough) and not is_drained:
                    outputs.drain()
                    is_drained = True
            self._results.write()
        if tail_began is not None:
            self.tail_seconds = time.monotonic() - tail_began

    def _lora_request(self, running: _Running) -> Any:
        """The adapter of all rows, which the LLM can merge into its weights; or an iterator with that of each row. The
        LLM takes a row's adapter after its prompt and before its output."""
        index = self._index
        if len(index.adapters) > 1:
            return (index.params.adapter_of(running[number][0]) for number in count())
        return next((index.params.adapters[name] for name in index.adapters if name is not None), None)

    def _prompts(self, running: _Running, given: deque[Any], progress: Progress) -> Iterator[Any]:
        """Yields the prompts as the LLM asks for them; the LLM takes a prompt's parameters right after the prompt. Rows
        that cannot run become output rows at once."""
        number_in_call = 0
        for row in self._planned():
            if self.num_stops:
                return
            progress.sample()
            if row.error is not None:
                self._take(row, None, None)
                continue
            params = self._index.params.of(row)
            running[number_in_call] = row, params
            number_in_call += 1
            given.append(params)
            yield row.prompt

    def _planned(self) -> Iterator[JobRow]:
        results, index = self._results, self._index
        early = [number for number in early_rows(index.max_num_new_tokens) if number not in results]
        is_early = set(early)
        rest = (number for number in range(len(index)) if number not in results and number not in is_early)
        for number in early:
            yield index.read(number)[0]
        planned = in_windows(
            map(index.read, rest),
            size_of=itemgetter(1),
            prompt_of=lambda read: read[0].prompt,
            group_of=lambda read: read[0].adapter or "",
        )
        for row, _ in planned:
            yield row

    def _take(self, row: JobRow, params: _Params | None, output: RequestOutput | PoolingRequestOutput | None) -> None:
        """Adds the output row of a row that has finished."""
        made, line = finished_row(row, params, output, self._created, self._model)
        error = error_of(made)
        self._results.append(row.number, line, error)
        if self._lengths is not None and output is not None and error is None:
            self._lengths.prompts[output.num_prompt_tokens] += 1
            if isinstance(output, RequestOutput):
                self._lengths.completions.update(len(completion.token_ids) for completion in output.outputs)

    @contextmanager
    def _stopping_at_signals(self) -> Iterator[None]:
        def stop(number: int, frame: Any) -> None:
            self.num_stops += 1
            if self.num_stops > 1:
                raise KeyboardInterrupt
            print("\nstopping after the running rows; press Ctrl-C again to stop at once", file=sys.stderr)

        may_set = threading.current_thread() is threading.main_thread()
        kinds = (signal.SIGINT, signal.SIGTERM) if may_set else ()
        # A shell starts background jobs so that they ignore Ctrl-C.
        wanted = [kind for kind in kinds if signal.getsignal(kind) is not signal.SIG_IGN]
        before = [(kind, signal.signal(kind, stop)) for kind in wanted]
        try:
            yield
        finally:
            for kind, handler in before:
                signal.signal(kind, handler)
