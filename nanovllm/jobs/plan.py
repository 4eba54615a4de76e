"""In which order the rows of a job run. It changes no result: a row's seed comes from its id."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

# Rows of a window, of which those that begin alike run together; and bytes, so that memory stays flat. Two windows are
# in memory. The first is small, so that the job starts soon.
_ROWS_OF_FIRST_WINDOW, _ROWS_OF_WINDOW, _BYTES_OF_WINDOW = 2**11, 2**15, 2**25
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
    first_rows: int = _ROWS_OF_FIRST_WINDOW,
    most_rows: int = _ROWS_OF_WINDOW,
) -> Iterator[T]:
    """The rows, sorted by how their prompts begin, window by window.

    The prefix cache then serves a shared beginning while it is still there, also if the input is shuffled. Each window
    has twice the rows of the one before, up to a limit. It is read while that one is given out, a few rows at a time,
    because rows that run wait while others are read.

    Args:
        rows: read as they are needed.
        size_of: bytes that a row takes.
        prompt_of: a row's prompt: a string, a list of token ids, or a dict with a conversation.
        first_rows, most_rows: of the first window, and of any.
    """
    rows = iter(rows)
    window = _Window[T](min(first_rows, most_rows))

    def read(window: _Window[T], count: int) -> None:
        for row in islice(rows, min(count, window.most_rows - len(window.rows))):
            window.rows.append((beginning(prompt_of(row)), row))
            window.num_bytes += size_of(row)
            if window.num_bytes >= _BYTES_OF_WINDOW:
                window.most_rows = len(window.rows)
                return

    read(window, window.most_rows)
    while window.rows:
        coming = _Window[T](min(2 * window.most_rows, most_rows))
        rows_each = -(-coming.most_rows // len(window.rows))
        window.rows.sort(key=itemgetter(0))
        window.rows.reverse()
        while window.rows:
            yield window.rows.pop()[1]
            read(coming, rows_each)
        window = coming


@dataclass
class _Window(Generic[T]):
    """Rows that are sorted together, each with what it is sorted by."""

    most_rows: int
    num_bytes: int = 0
    rows: list[tuple[Any, T]] = field(default_factory=list)


def beginning(prompt: Any, most: int = 8192) -> tuple[int, Any]:
    """What prompts are sorted by; kinds of prompts are not compared with each other. Prompts that begin alike have keys
    that begin alike, and nothing else matters."""
    if isinstance(prompt, str):
        return 0, prompt[:most]
    if isinstance(prompt, dict):
        return 1, repr(prompt.get("messages"))[:most]
    try:
        return 2, array("I", prompt[:most]).tobytes()  # compared faster than a list
    except (OverflowError, TypeError):  # no token ids; the row will be an error
        return 2, b""
