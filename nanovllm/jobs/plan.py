"""In which order the rows of a job run. It changes no result: a row's seed comes from its id."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

# A window has at most so many rows and bytes, so that memory stays flat. Those of its rows that begin alike run
# together. Two windows are in memory. The first one is small, so that the job starts soon.
ROWS_OF_WINDOW, BYTES_OF_WINDOW = 2**15, 2**25
_ROWS_OF_FIRST_WINDOW = 2**8
# Sequences that decode together, for the estimate of how long the rest of a job keeps a device busy.
_BATCH = 256


def early_rows(max_num_new_tokens: np.ndarray) -> list[int]:
    """The rows to run first, because at their own place they would still run when all others have finished.

    A row of `max_num_new_tokens` takes as many steps. The rows from it to the end of the job take about their tokens
    divided by the batch. Only rows of more than twice the mean are moved: among equal rows one must be the last.

    Args:
        max_num_new_tokens: int64 [num_rows], of each row in the input's order.
    """
    if not len(max_num_new_tokens):
        return []
    after = np.cumsum(max_num_new_tokens[::-1])[::-1]
    is_late = (max_num_new_tokens > after / _BATCH) & (max_num_new_tokens > 2 * max_num_new_tokens.mean())
    return np.flatnonzero(is_late).tolist()


def in_windows(
    rows: Iterable[T],
    size_of: Callable[[T], int],
    prompt_of: Callable[[T], Any],
    first_rows: int = _ROWS_OF_FIRST_WINDOW,
    max_num_rows: int = ROWS_OF_WINDOW,
) -> Iterator[T]:
    """The rows, sorted by how their prompts begin, window by window.

    The prefix cache then serves a shared beginning while it is still there, also if the input is shuffled. Each window
    has twice the rows of the one before, up to a limit. While one window is given out, the next is read, a few rows at
    a time, because running rows wait during a read.

    Args:
        rows: read as they are needed.
        size_of: bytes that a row takes.
        prompt_of: a row's prompt: a string, a list of token ids, or a dict with a conversation.
        first_rows: of the first window.
        max_num_rows: of any window.
    """
    sized = ((row, size_of(row), beginning(prompt_of(row))) for row in rows)
    window = _Window[T](min(first_rows, max_num_rows))
    window.read(sized, window.max_num_rows)
    while window.rows:
        coming = _Window[T](min(2 * len(window.rows), max_num_rows))
        window.rows.sort(key=itemgetter(0))
        window.rows.reverse()
        while window.rows:
            yield window.rows.pop()[1]
            coming.read(sized, 2)
        window = coming


class _Window(Generic[T]):
    """Rows that are sorted together, each with what it is sorted by."""

    def __init__(self, max_num_rows: int):
        self.max_num_rows, self._num_bytes = max_num_rows, 0
        self.rows: list[tuple[Any, T]] = []

    def read(self, sized: Iterator[tuple[T, int, Any]], maximum: int) -> None:
        """Adds at most `maximum` rows: each with its bytes, and what it is sorted by."""
        while maximum and len(self.rows) < self.max_num_rows and self._num_bytes < BYTES_OF_WINDOW:
            found = next(sized, None)
            if found is None:
                return
            row, size, key = found
            self.rows.append((key, row))
            self._num_bytes += size
            maximum -= 1


def beginning(prompt: Any, maximum: int = 8192) -> tuple[int, Any]:
    """What prompts are sorted by; kinds of prompts are not compared with each other. Prompts that begin alike have keys
    that begin alike. The order means nothing else."""
    if isinstance(prompt, str):
        return 0, prompt[:maximum]
    if isinstance(prompt, dict):
        return 1, repr(prompt.get("messages"))[:maximum]
    try:
        return 2, array("I", prompt[:maximum]).tobytes()  # compared faster than a list
    except (OverflowError, TypeError):  # no token ids; the row will be an error
        return 2, b""
