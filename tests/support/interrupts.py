"""Exceptions and Ctrl-C at chosen calls, at chosen lines and at random moments."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nanovllm.llm
from nanovllm.engine.llm_engine import LLMEngine


def assert_empty(engine: LLMEngine) -> None:
    assert engine.is_finished()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.scheduler.block_manager.num_free_blocks == engine.info.num_kvcache_blocks
    engine.scheduler.check_integrity()


class Fault:
    """Raises `error` at the `at`-th call of a function, before or after its work; counts the calls."""

    def __init__(self, owner, name: str, at: int = -1, error=None, is_after: bool = False):
        self.num_calls = 0
        self._patch = pytest.MonkeyPatch()
        real = getattr(owner, name)

        def faulty(*args, **options):
            self.num_calls += 1
            is_it = self.num_calls == at
            if is_it and not is_after:
                self._raise(error)
            try:
                return real(*args, **options)
            finally:
                if is_it:
                    self._raise(error)

        self._patch.setattr(owner, name, faulty)

    def _raise(self, error) -> None:
        if error is signal.SIGINT:
            signal.raise_signal(error)
        else:
            raise error

    def __enter__(self) -> "Fault":
        return self

    def __exit__(self, *exception) -> None:
        self._patch.undo()


PACKAGE = str(Path(nanovllm.llm.__file__).parent)
FILES = (
    *(f"{PACKAGE}/{name}" for name in ("llm.py", "row_stream.py", "guard.py", "engine/llm_engine.py")),
    *map(str, Path(PACKAGE, "text").glob("*.py")),
)


def run_traced(function, on_line) -> None:
    """Calls `on_line(file, line)` before each line of FILES that `function()` runs; what it raises is raised there."""

    def trace_calls(frame, event, argument):
        return trace_lines if frame.f_code.co_filename in FILES else None

    def trace_lines(frame, event, argument):
        if event == "line":
            on_line(frame.f_code.co_filename, frame.f_lineno)
        return trace_lines

    before = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        function()
    finally:
        sys.settrace(before)


def interrupt_at_random_moments(run: Callable[[], Any], num_times: int, check: Callable[[], None]) -> None:
    """Sends Ctrl-C at random moments of `run`, as a terminal would, and calls `check` after each."""
    run()
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    rng = random.Random(2)
    num_interrupted = 0
    for _ in range(num_times):
        # Only a real signal wakes a thread that waits.
        timer = threading.Timer(rng.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGINT))
        outputs = None
        try:
            timer.start()  # which waits for the thread to run, so Ctrl-C may come here already
            outputs = run()
            timer.join()
        except KeyboardInterrupt:
            num_interrupted += outputs is None
        check()
    assert num_interrupted > 0
