"""The order in which the rows of a job run, and pieces of rows. No result depends on them: a row's seed comes from its
id."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

# The limits of a window's rows and bytes, which keep memory flat; two windows are in memory. The rows of a window that
# begin alike run together. The first window is small, so that the job starts soon.
ROWS_OF_WINDOW, BYTES_OF_WINDOW = 2**15, 2**25
_ROWS_OF_FIRST_WINDOW = 2**8
# Sequences that decode together, for the estimate of how long the rest of a job keeps a device busy.
_BATCH = 256


def early_rows(max_num_new_tokens: np.ndarray) -> list[int]:
    """The rows to run first, because at their own place they would still run when all others have finished.

    A row takes as many steps as it generates tokens. The rows from it to the end of the job take about their tokens
    divided by the batch. Only rows of more than twice the mean are moved: among equal rows one must be the last.

    Args:
        max_num_new_tokens: int64 [num_rows], for each row in the input's order.
    """
    if not len(max_num_new_tokens):
        return []
    after = np.cumsum(max_num_new_tokens[::-1])[::-1]
    is_late = (max_num_new_tokens > after / _BATCH) & (max_num_new_tokens > 2 * max_num_new_tokens.mean())
    return np.flatnonzero(is_late).tolist()


def in_pieces(sized: Iterable[tuple[T, int]], num_rows: int, num_bytes: int) -> Iterator[list[T]]:
    """Lists of rows, given with their bytes: each ends when it has `num_rows` rows, or `num_bytes` bytes or more."""
    piece: list[T] = []
    total = 0
    for row, size in sized:
        piece.append(row)
        total += size
        if len(piece) == num_rows or total >= num_bytes:
            yield piece
            piece, total = [], 0
    if piece:
        yield piece


def in_windows(
    rows: Iterable[T],
    size_of: Callable[[T], int],
    prompt_of: Callable[[T], Any],
    first_rows: int = _ROWS_OF_FIRST_WINDOW,
    max_num_rows: int = ROWS_OF_WINDOW,
    group_of: Callable[[T], str] = lambda row: "",
) -> Iterator[T]:
    """The rows, sorted by how their prompts begin, window by window.

    The prefix cache then serves a shared beginning while it is still there, even if the input is shuffled. Each window
    has twice the rows of the one before, up to a limit. While the rows of one window are yielded, the next is read, a
    few rows at a time, because running rows wait during a read.

    Args:
        rows: read as they are needed.
        size_of: bytes that a row takes.
        prompt_of: a row's prompt: a string, a list of token ids, or a dict with a conversation.
        first_rows: rows of the first window.
        max_num_rows: maximum for every window.
        group_of: a row's group. Rows of different groups share no keys, so a window has one group after the other.
    """
    sized = ((row, size_of(row), (group_of(row), beginning(prompt_of(row)))) for row in rows)
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
    """Rows that are sorted together, each with its key."""

    def __init__(self, max_num_rows: int):
        self.max_num_rows, self._num_bytes = max_num_rows, 0
        self.rows: list[tuple[Any, T]] = []

    def read(self, sized: Iterator[tuple[T, int, Any]], maximum: int) -> None:
        """Adds at most `maximum` rows, given as (row, bytes, key)."""
        if self._num_bytes < BYTES_OF_WINDOW:
            for row, size, key in islice(sized, min(maximum, self.max_num_rows - len(self.rows))):
                self.rows.append((key, row))
                self._num_bytes += size
                if self._num_bytes >= BYTES_OF_WINDOW:
                    return


def beginning(prompt: Any, maximum: int = 8192) -> tuple[int, Any]:
    """The key that prompts are sorted by. Prompts that begin alike have keys that begin alike; the order means nothing
    else. Prompts of different kinds are never compared."""
    if isinstance(prompt, str):
        return 0, prompt[:maximum]
    if isinstance(prompt, dict):
        return 1, repr(prompt.get("messages"))[:maximum]
    if isinstance(prompt, tuple):  # a query and a document
        return 3, repr(prompt)[:maximum]
    try:
        return 2, array("I", prompt[:maximum]).tobytes()  # compared faster than a list
    except (OverflowError, TypeError):  # not token ids; the row will be an error
        return 2, b""
