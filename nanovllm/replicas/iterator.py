"""Distributes requests to replicas, and runs requests again if their replica died."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from nanovllm.lora import LoRARequest
from nanovllm.outputs import CompletionOutput, ErrorSummary, RequestOutput, keep_outputs
from nanovllm.pooling_outputs import PooledOutput, PoolingRequestOutput
from nanovllm.pooling_params import PoolingParams, RowParams
from nanovllm.replicas.pool import ReplicaPool, ReplicaProcess

logger = logging.getLogger(__name__)

# Requests that a replica has at a time, per request that it can run; fewer if they have several completions. With one
# batch waiting, its scheduler can choose, and its steps stay full while the parent is busy. Requests do not move to
# another replica, so near the end of a job a larger number would keep one replica busy and the others idle.
_REQUESTS_PER_PLACE = 2
# Neighbouring prompts often begin alike, and replicas do not share a prefix cache. So a replica gets several
# neighbours.
_REQUESTS_OF_PIECE = 16
# Maximum number of requests of a replica if one of them was unfinished when a process died once, and twice. So a
# request that kills processes is alone in the end, and no other request is blamed.
_REQUESTS_AFTER_DEATHS = (16, 1)
_MAX_DEATHS = 5  # of each replica, with no request finished in between


@dataclass(slots=True)
class _Request:
    number: int
    prompt: Any
    params: RowParams
    adapter: LoRARequest | None = None
    num_deaths: int = 0  # of processes that had not finished it


@dataclass(slots=True)
class _Share:
    """A replica's part of the call.

    requests: the unfinished requests that it was given, by number.
    max_num_requests: maximum number of these.
    is_in_call: whether it takes part in the call, and has not said that it is done.
    """

    requests: dict[int, _Request] = field(default_factory=dict)
    max_num_requests: int = 0
    is_in_call: bool = False


_Output = RequestOutput | PoolingRequestOutput
_Row = tuple[Any, RowParams, LoRARequest | None]


class ReplicaIterator(Iterator[_Output]):
    """The result of `Replicas.generate_iter`: outputs as they finish.

    If a replica dies, its unfinished requests run again: in small groups, because one of them may have killed it. If a
    process dies with such a group, each request of the group runs alone. A request that is alone when a process dies
    becomes an error row.

    Args:
        pool: the replicas.
        call: this call's number.
        source: prompts with their parameters and adapters; None while there is no prompt.
        is_mixed: whether prompts may have different adapters.
    """

    def __init__(self, pool: ReplicaPool, call: int, source: Iterator[_Row | None], is_mixed: bool):
        self._pool, self._call, self._source, self._is_mixed = pool, call, source, is_mixed
        self._shares: dict[ReplicaProcess, _Share] = {process: _Share() for process in pool.processes}
        self._num_read = self._num_deaths = 0
        self._max_num_completions = 1  # that a request of this call has
        self._again: list[_Request] = []
        self._held: deque[_Output] = deque()
        self._errors = ErrorSummary()
        self._is_exhausted = False
        self._is_ending = False  # the replicas were told that no request follows
        self.is_open = True

    def __next__(self) -> _Output:
        return self._pool.guard.run(self._take_output)

    def _take_output(self) -> _Output:
        try:
            while self.is_open and not self._held:
                self._advance()
        except BaseException as error:
            keep_outputs(error, {output.prompt_index: output for output in self._held})
            self._abort()
            raise
        if not self._held:
            raise StopIteration
        return self._held.popleft()

    def drain(self) -> None:
        """Reads no more prompts, and drops the requests that have not started. The others are finished and returned,
        unless their replica dies. Calling it again does nothing. A source of prompts that calls it gets a
        RuntimeError."""
        self._pool.guard.run(self._drain)

    def _drain(self) -> None:
        if self.is_open and not self._is_ending:
            self._again.clear()
            self._tell_end("drain")

    def close(self) -> None:
        """Aborts all unfinished requests, and ends the iteration. Calling it again does nothing. A source of prompts
        that calls it gets a RuntimeError."""
        self._pool.guard.run(self._abort)

    def _abort(self) -> None:
        if self.is_open:
            self._held.clear()
            self._tell("abort")
            self._finish()

    def __del__(self) -> None:
        # Python calls this even if the constructor failed.
        if getattr(self, "is_open", False):
            with suppress(Exception):
                self.close()

    def _advance(self) -> None:
        """Gives requests, and waits for messages of the replicas."""
        self._pool.check()
        shares = self._shares
        if not self._is_ending:
            self._give()
            if self._is_exhausted and not self._again and not any(share.requests for share in shares.values()):
                self._tell_end("end")
        if self._is_ending:
            if not any(share.is_in_call for share in shares.values()):
                self._finish()
                return
        elif all(process.max_num_seqs and not process.has_ended and not shares[process].requests for process in shares):
            return  # the source has no prompt yet, and nothing else can happen
        self._take(*self._pool.receive())

    def _take(self, process: ReplicaProcess, message: tuple[Any, ...]) -> None:
        kind, call = message[:2]
        share = self._shares.get(process)
        if share is None:  # a process that was replaced
            return
        if kind == "ended":
            self._lose(process)
        elif call == self._call and kind == "done":
            share.is_in_call = False
        elif call == self._call and kind == "output":
            output: _Output = message[2]
            if share.requests.pop(output.prompt_index, None) is not None:
                self._num_deaths = 0
                self._put(output)

    def _put(self, output: _Output) -> None:
        if output.error is not None:
            self._errors.add(output.prompt_index, output.error)
        self._held.append(output)

    # Requests to replicas

    def _give(self) -> None:
        """Gives requests to the replicas that have room, the emptiest first, so that the last ones spread over all."""
        has_given = True
        while has_given:
            has_given = False
            for process, share in sorted(self._shares.items(), key=lambda each: len(each[1].requests)):
                if process.max_num_seqs and not process.has_ended and (requests := self._requests_for(process, share)):
                    share.requests.update((request.number, request) for request in requests)
                    share.is_in_call = True
                    given = [(each.number, each.prompt, each.params, each.adapter) for each in requests]
                    process.send("requests", self._call, given, self._is_mixed)
                    has_given = True
                    break

    def _requests_for(self, process: ReplicaProcess, share: _Share) -> list[_Request]:
        num_running = max(1, process.max_num_seqs // self._max_num_completions)
        if not share.requests:
            share.max_num_requests = _REQUESTS_PER_PLACE * num_running
        if requests := self._suspects_for(share):
            return requests
        num = min(_REQUESTS_OF_PIECE, num_running)
        maximum = min(share.max_num_requests, _REQUESTS_PER_PLACE * num_running)
        return [] if self._is_exhausted or len(share.requests) + num > maximum else self._read(num)

    def _suspects_for(self, share: _Share) -> list[_Request]:
        """The requests of dead replicas that this replica may take in addition to its own."""
        requests: list[_Request] = []
        left: list[_Request] = []
        for request in self._again:
            maximum = min(share.max_num_requests, _REQUESTS_AFTER_DEATHS[request.num_deaths - 1])
            if len(share.requests) + len(requests) < maximum:
                requests.append(request)
                share.max_num_requests = maximum
            else:
                left.append(request)
        self._again = left
        return requests

    def _read(self, num: int) -> list[_Request]:
        requests: list[_Request] = []
        for row in islice(self._source, num):
            if row is None:  # none is ready yet
                return requests
            requests.append(_Request(self._num_read, *row))
            self._num_read += 1
            self._max_num_completions = max(self._max_num_completions, requests[-1].params.n)
        self._is_exhausted = len(requests) < num
        return requests

    def _lose(self, process: ReplicaProcess) -> None:
        """Handles the death of a replica."""
        share = self._shares[process]
        if self._is_ending:
            share.is_in_call = False
            return  # the next call replaces it
        how = self._pool.replace(process)
        self._shares = {each: self._shares.get(each) or _Share() for each in self._pool.processes}
        self._num_deaths += 1
        if self._num_deaths > _MAX_DEATHS * len(self._shares):
            self._pool.fail(
                f"{how}; replicas died {self._num_deaths} times and finished no row in between. If memory is short, "
                "lower max_num_seqs or max_num_batched_tokens"
            )
        for request in share.requests.values():
            request.num_deaths += 1
            if request.num_deaths <= len(_REQUESTS_AFTER_DEATHS):
                self._again.append(request)
                continue
            error = f"the replica died {request.num_deaths} times while it ran this row, the last time alone: {how}"
            self._put(_error_row(request, error))

    # The end

    def _tell(self, kind: str) -> None:
        for process, share in self._shares.items():
            if share.is_in_call:
                process.send(kind, self._call)

    def _tell_end(self, kind: str) -> None:
        self._is_ending = True
        self._tell(kind)

    def _finish(self) -> None:
        self.is_open = False
        if errors := self._errors.describe(self._num_read):
            logger.warning(errors)


def _error_row(request: _Request, error: str) -> _Output:
    text, params, number = request.prompt if isinstance(request.prompt, str) else None, request.params, request.number
    if isinstance(params, PoolingParams):
        nothing = PooledOutput(params.task or "embed")
        return PoolingRequestOutput(str(number), text, [], nothing, error=error, prompt_index=number)
    completions = [CompletionOutput(0, "", [], "error")]
    output = RequestOutput(str(number), text, [], completions, error=error, prompt_index=number)
    return replace(output, lora_request=request.adapter)
