"""Deals rows out to replicas, and runs those again whose replica died."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from nanovllm.outputs import CompletionOutput, ErrorSummary, RequestOutput
from nanovllm.row_stream import keep_outputs
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.replicas.replicas import Replicas

logger = logging.getLogger(__name__)

# Rows that a replica has at a time, for each that it can run, or fewer if rows have several completions. With one batch
# more than runs, its planner can choose, and its steps stay full while the parent is busy. What it has, no other
# replica can take, so near the end of a job more of them would keep one replica busy and the others idle.
_ROWS_OF_REPLICA = 2
# Neighbouring rows often begin alike, and a replica's prefix cache serves only rows that it has.
_ROWS_OF_PIECE = 16
# Rows that a replica has at most, one of which was unfinished when a process died: once, and twice. A row that kills
# processes is so found alone, and no row beside it is taken for it.
_ROWS_AFTER_DEATHS = (16, 1)
_MAX_DEATHS = 5  # of each replica, with no row finished in between


@dataclass(slots=True)
class _Row:
    number: int
    prompt: Any
    params: SamplingParams
    num_deaths: int = 0  # of processes that had not finished it


class Replica:
    """What is known of a replica's process.

    max_num_seqs: 0 until it has started.
    rows: were given to it and have not come back.
    max_num_rows: how many these may be.
    """

    def __init__(self) -> None:
        self.max_num_seqs, self.has_ended = 0, False
        self.rows: dict[int, _Row] = {}
        self.max_num_rows = 0
        self.is_in_call = False

    def send(self, kind: str, call: int, *arguments: Any) -> None:
        raise NotImplementedError

    def leave_call(self) -> None:
        self.rows, self.is_in_call = {}, False


class ReplicaIterator(Iterator[RequestOutput]):
    """What `Replicas.generate_iter` returns: outputs as they finish.

    If a replica dies, its unfinished rows run again: in small groups, because one of them may be what killed it. Those
    of a group that dies run alone. A row that is alone when a process dies becomes an error row.

    Args:
        replicas: run them.
        call: this call's number.
        source: prompts with their parameters; see RowStream.
    """

    def __init__(self, replicas: "Replicas", call: int, source: Iterator[tuple[Any, SamplingParams] | None]):
        self._replicas, self._call, self._source = replicas, call, source
        self._num_read = self._num_deaths = 0
        self._max_num_completions = 1  # that a row of this call has
        self._again: list[_Row] = []
        self._held: deque[RequestOutput] = deque()
        self._errors = ErrorSummary()
        self._is_exhausted = False
        self._is_ending = False  # the replicas were told that no row follows
        self.is_open = True

    def __next__(self) -> RequestOutput:
        try:
            while self.is_open and not self._held:
                self._advance()
        except BaseException as error:
            keep_outputs(error, {int(output.request_id): output for output in self._held})
            self.close()
            raise
        if not self._held:
            raise StopIteration
        return self._held.popleft()

    def drain(self) -> None:
        """Reads no more prompts, and drops the rows that have not started. What has started is finished and given out,
        unless its replica dies. Calling it again does nothing."""
        if self.is_open and not self._is_ending:
            self._again.clear()
            self._tell_end("drain")

    def close(self) -> None:
        """Aborts what has not finished, and ends the iteration. Calling it again does nothing."""
        if self.is_open:
            self._held.clear()
            self._tell("abort")
            for replica in self._replicas.processes:
                replica.leave_call()
            self._finish()

    def __del__(self) -> None:
        # Also of an object whose constructor failed.
        if getattr(self, "is_open", False):
            with suppress(Exception):
                self.close()

    def _advance(self) -> None:
        """Gives rows, and waits for news of the replicas."""
        self._replicas.check()
        replicas = self._replicas.processes
        if not self._is_ending:
            self._give()
            if self._is_exhausted and not self._again and not any(replica.rows for replica in replicas):
                self._tell_end("end")
        if self._is_ending:
            if not any(replica.is_in_call for replica in replicas):
                self._finish()
                return
        elif all(replica.max_num_seqs and not replica.has_ended and not replica.rows for replica in replicas):
            return  # the source has no prompt yet, and nothing else can happen
        self._take(*self._replicas.inbox.get())

    def _take(self, replica: Replica, message: tuple[Any, ...]) -> None:
        kind, call = message[:2]
        if kind == "ended":
            self._lose(replica)
        elif call == self._call and kind == "done":
            replica.leave_call()
        elif call == self._call and kind == "output":
            output: RequestOutput = message[2]
            if replica.rows.pop(int(output.request_id), None) is not None:
                self._num_deaths = 0
                self._put(output)

    def _put(self, output: RequestOutput) -> None:
        if output.error is not None:
            self._errors.add(int(output.request_id), output.error)
        self._held.append(output)

    # Rows to replicas

    def _give(self) -> None:
        """Gives rows to the replicas that have room, the emptiest first, so that the last rows spread over all."""
        has_given = True
        while has_given:
            has_given = False
            for replica in sorted(self._replicas.processes, key=lambda each: len(each.rows)):
                if replica.max_num_seqs and not replica.has_ended and (rows := self._rows_for(replica)):
                    replica.rows.update((row.number, row) for row in rows)
                    replica.is_in_call = True
                    replica.send("rows", self._call, [(row.number, row.prompt, row.params) for row in rows])
                    has_given = True
                    break

    def _rows_for(self, replica: Replica) -> list[_Row]:
        num_running = max(1, replica.max_num_seqs // self._max_num_completions)
        if not replica.rows:
            replica.max_num_rows = _ROWS_OF_REPLICA * num_running
        if rows := self._suspects_for(replica):
            return rows
        num = min(_ROWS_OF_PIECE, num_running)
        most = min(replica.max_num_rows, _ROWS_OF_REPLICA * num_running)
        return [] if self._is_exhausted or len(replica.rows) + num > most else self._read(num)

    def _suspects_for(self, replica: Replica) -> list[_Row]:
        """Of the rows whose replica died, those that this one may have beside its others."""
        rows: list[_Row] = []
        left: list[_Row] = []
        for row in self._again:
            most = min(replica.max_num_rows, _ROWS_AFTER_DEATHS[row.num_deaths - 1])
            if len(replica.rows) + len(rows) < most:
                rows.append(row)
                replica.max_num_rows = most
            else:
                left.append(row)
        self._again = left
        return rows

    def _read(self, num: int) -> list[_Row]:
        rows: list[_Row] = []
        for pair in islice(self._source, num):
            if pair is None:  # none is there yet
                return rows
            rows.append(_Row(self._num_read, *pair))
            self._num_read += 1
            self._max_num_completions = max(self._max_num_completions, rows[-1].params.n)
        self._is_exhausted = len(rows) < num
        return rows

    def _lose(self, replica: Replica) -> None:
        """A replica died."""
        if not any(each is replica for each in self._replicas.processes):
            return  # that was noticed before
        rows = list(replica.rows.values())
        replica.leave_call()
        if self._is_ending:
            return  # the next call replaces it
        how = self._replicas.replace(replica)
        self._num_deaths += 1
        if self._num_deaths > _MAX_DEATHS * len(self._replicas.processes):
            self._replicas.fail(
                f"{how}; replicas died {self._num_deaths} times and finished no row in between. If memory is short, "
                "lower max_num_seqs or max_num_batched_tokens"
            )
        for row in rows:
            row.num_deaths += 1
            if row.num_deaths <= len(_ROWS_AFTER_DEATHS):
                self._again.append(row)
                continue
            text = row.prompt if isinstance(row.prompt, str) else None
            error = f"the replica died {row.num_deaths} times while it ran this row, the last time alone: {how}"
            completions = [CompletionOutput(0, "", [], "error")]
            self._put(RequestOutput(str(row.number), text, [], completions, error=error))

    # The end

    def _tell(self, kind: str) -> None:
        for replica in self._replicas.processes:
            if replica.is_in_call:
                replica.send(kind, self._call)

    def _tell_end(self, kind: str) -> None:
        self._is_ending = True
        self._tell(kind)

    def _finish(self) -> None:
        self.is_open = False
        if errors := self._errors.describe(self._num_read):
            logger.warning(errors)
