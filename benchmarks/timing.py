"""Times an engine's calls."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads import Requests

# Engines raise these for options or a model that cannot work. The text of the error says enough.
EXPECTED_ERRORS = (OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Timing:
    """The times of one engine.

    start_seconds: to construct it.
    first_seconds, seconds: the first call, and each later call.
    tokens: the completions of the last call.
    """

    start_seconds: float
    first_seconds: float
    seconds: list[float]
    tokens: list[list[int]]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def report(self, requests: Requests) -> dict[str, Any]:
        return {
            "start_seconds": round(self.start_seconds, 3),
            "first_seconds": round(self.first_seconds, 3),
            "seconds": [round(seconds, 3) for seconds in self.seconds],
            "first_output_tokens_per_second": requests.num_output_tokens / self.first_seconds,
            "first_input_tokens_per_second": requests.num_prompt_tokens / self.first_seconds,
            "output_tokens_per_second": requests.num_output_tokens / self.median,
            "input_tokens_per_second": requests.num_prompt_tokens / self.median,
        }


def say(text: str, end: str = "\n") -> None:
    """Prints to stderr, because stdout is for the report."""
    print(text, end=end, file=sys.stderr, flush=True)


def timed(
    name: str, run: Callable[[], list[list[int]]], forget: Callable[[], object], repeats: int, start_seconds: float
) -> Timing:
    """Times the first call of `run` and then `repeats` later ones, and prints each time. `forget` runs before each
    call, untimed. `name` is the engine's, for what is printed."""
    seconds = []
    for index in range(1 + repeats):
        forget()
        say(f"{name}: call {index + 1} of {1 + repeats} … ", end="")
        began = time.perf_counter()
        tokens = run()
        seconds.append(time.perf_counter() - began)
        say(f"{seconds[-1]:.1f} s")
    return Timing(start_seconds, seconds[0], seconds[1:], tokens)


@contextmanager
def errors_as_text() -> Iterator[None]:
    """Context manager that ends the script with the text of an expected error, without a traceback."""
    try:
        yield
    except EXPECTED_ERRORS as error:
        raise SystemExit(str(error)) from None
