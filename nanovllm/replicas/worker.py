"""One replica of a model, as a process of its own: an LLM that completes the prompts from a socket.

`ReplicaPool` starts it. The parent sends ("requests", call, [(number, prompt, parameters, adapter), …], is_mixed), then
("end", call), ("drain", call) or ("abort", call); and ("close", 0). Without is_mixed, all requests have the same
adapter or none. The answers are ("output", call, a row's output, metrics), where metrics are usually None, and at last
("done", call, metrics).
"""

import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, repeat
from queue import SimpleQueue
from typing import Any

from nanovllm.child_processes import serve
from nanovllm.llm import LLM
from nanovllm.lora import LoRARequest
from nanovllm.pooling_params import RowParams
from nanovllm.prompts import NOT_YET

_SECONDS_BETWEEN_METRICS = 0.2

# A prompt may be any object, and outputs may hold arrays. pickle takes both. The writer of a pickle can run code in the
# process that reads it. Only the parent and its own child hold the two ends of this socket, and the parent runs the
# child.
dumps, loads = pickle.dumps, pickle.loads


# A request's number in the parent's call, its prompt, its parameters and its adapter.
_Request = tuple[int, Any, RowParams, LoRARequest | None]


class _Aborted(Exception):
    """The parent wants no more of a call."""


class _Call:
    """One generate_iter over the requests that come while it runs."""

    def __init__(self, message: tuple[Any, ...], inbox: "SimpleQueue[Any]", reply: Callable[[Any], None]):
        _, number, requests, self._is_mixed = message
        self._adapters: deque[LoRARequest | None] = deque()  # as _params
        self._number, self._inbox, self._reply = number, inbox, reply
        self._waiting = deque(requests)
        self._running: dict[int, int] = {}  # the requests' numbers in the parent's call, by their numbers here
        self._params: deque[Any] = deque()  # of the prompts that were given
        self._has_ended = self._is_draining = False
        self._said_at = time.monotonic()

    def run(self, llm: LLM) -> None:
        of_all = self._waiting[0][-1]
        try:
            outputs = self._begin(llm, (self._adapters.popleft() for _ in repeat(None)) if self._is_mixed else of_all)
        except ValueError:  # the adapter cannot be merged; given per row, it makes error rows that say why
            outputs = self._begin(llm, repeat(of_all))
        try:
            for output in outputs:
                number = self._running.pop(output.prompt_index)
                output = replace(output, request_id=str(number), prompt_index=number)
                self._reply(("output", self._number, output, self._metrics(llm)))
                if self._is_draining:
                    outputs.drain()
        except _Aborted:
            pass
        self._reply(("done", self._number, llm.metrics()))

    def _begin(self, llm: LLM, lora_request: Any) -> Any:
        params = iter(self._params.popleft, None)
        return llm.generate_iter(self._prompts(), params, ordered=False, lora_request=lora_request)

    def _prompts(self) -> Iterator[Any]:
        """Yields prompts. It ends only when all requests have finished, because the parent's messages are read only
        here."""
        numbers = count()
        while True:
            self._hear(waits=not (self._waiting or self._running or self._has_ended))
            if self._is_draining:
                return
            if self._waiting:
                self._running[next(numbers)], prompt, params, adapter = self._waiting.popleft()
                self._params.append(params)
                if self._is_mixed:
                    self._adapters.append(adapter)
                yield prompt
            elif self._has_ended and not self._running:
                return
            else:
                yield NOT_YET

    def _hear(self, waits: bool) -> None:
        while waits or not self._inbox.empty():
            waits = False
            message = self._inbox.get()
            kind, call = message[:2]
            if kind == "close":
                self._inbox.put(message)  # nothing comes after it
                raise _Aborted
            if call != self._number:
                continue
            if kind == "abort":
                raise _Aborted
            if kind == "requests":
                self._waiting.extend(message[2])
            self._has_ended |= kind == "end"
            self._is_draining |= kind == "drain"

    def _metrics(self, llm: LLM) -> dict[str, Any] | None:
        now = time.monotonic()
        if now - self._said_at < _SECONDS_BETWEEN_METRICS:
            return None
        self._said_at = now
        return llm.metrics()


def _run(inbox: "SimpleQueue[Any]", reply: Callable[[Any], None]) -> None:
    options, index, level = inbox.get()
    level = level if index == 0 else max(level, logging.WARNING)
    logging.basicConfig(level=level, format=f"%(levelname)s:replica {index}:%(name)s:%(message)s")
    logging.getLogger("nanovllm.llm").setLevel(logging.ERROR)  # the parent logs error rows, by their own numbers
    with LLM(**options) as llm:
        provenance = llm.provenance() if options["deterministic"] else {}
        reply(("ready", provenance, llm.metrics(), llm.engine.runner.pids(), llm.engine.info.max_num_seqs))
        while (message := inbox.get())[0] != "close":
            if message[0] == "requests":  # other messages are for a call that is over
                _Call(message, inbox, reply).run(llm)
    os._exit(0)  # the parent waits; taking the interpreter down would take another second


def main() -> None:
    serve(_run, loads, dumps)


if __name__ == "__main__":
    main()
