"""In which order the rows of a job run. It changes no result: a row's seed comes from its id."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# Rows of a window, of which those that begin alike run together; and bytes, so that memory stays flat.
_ROWS_OF_WINDOW, _BYTES_OF_WINDOW = 2**16, 2**26
# Sequences that decode together, for the estimate of how long the rest of a job keeps a device busy.
_BATCH = 256


def early_rows(most_new_tokens: np.ndarray) -> list[int]:
    """The rows to run first, because at their own place they would still run when all others have finished.

    A row of `most_new_tokens` takes as many steps. The rows from it to the end of the job take about their tokens
    divided by the batch. Only rows of more than twice the mean are moved: among equal rows one must be the last.

    Args:
        most_new_tokens: int64 [num_rows], of each row in the input's order.
    """
    if not len(most_new_tokens):
        return []
    after = np.cumsum(most_new_tokens[::-1])[::-1]
    is_late = (most_new_tokens > after / _BATCH) & (most_new_tokens > 2 * most_new_tokens.mean())
    return np.flatnonzero(is_late).tolist()


def in_windows(
    rows: Iterable[T],
    size_of: Callable[[T], int],
    prompt_of: Callable[[T], Any],
    most_rows: int = _ROWS_OF_WINDOW,
) -> Iterator[T]:
    """The rows, sorted by how their prompts begin, window by window.

    The prefix cache then serves a shared beginning while it is still there, also if the input is shuffled.

    size_of: bytes that a row takes.
    most_rows: of a window.
    """
    window: list[T] = []
    num_bytes = 0
    for row in rows:
        window.append(row)
        num_bytes += size_of(row)
        if len(window) == most_rows or num_bytes >= _BYTES_OF_WINDOW:
            yield from sorted(window, key=lambda row: _beginning(prompt_of(row)))
            window, num_bytes = [], 0
    yield from sorted(window, key=lambda row: _beginning(prompt_of(row)))


def _beginning(prompt: Any, most: int = 8192) -> tuple[int, Any]:
    """What prompts are sorted by; kinds of prompts are not compared with each other."""
    if isinstance(prompt, str):
        return 0, prompt[:most]
    if isinstance(prompt, dict):
        return 1, repr(prompt.get("messages"))[:most]
    return 2, prompt[:most] if isinstance(prompt, list) and all(type(each) is int for each in prompt[:most]) else []
