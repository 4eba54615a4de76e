"""The errors of a job and of its rows."""

import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MAX_KINDS, _MAX_KINDS_SHOWN = 1000, 5


class JobError(Exception):
    """The job cannot start or continue. Nothing that it wrote is lost; the message says what to do."""


def what_to_do(error: OSError) -> str:
    """The advice after a job's file could not be read or written."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{'Make room and run' if is_full else 'Run'} the same command again; the rows that are on the disk are kept"


@contextmanager
def worded(problem: str) -> Iterator[None]:
    """Context manager that makes a JobError of an OSError, which may name no file: the problem, its reason, advice."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{problem}: {error.strerror or error}. {what_to_do(error)}") from error


def kind_in_words(kind: dict[str, Any]) -> str:
    """An item of Errors.by_kind."""
    return f"{kind['rows']:,} × {kind['error']} (first: {kind['first']})"


class Errors:
    """Error rows by kind: errors that differ only in numbers and quoted values are of one kind. Memory stays flat.

    Args:
        place: a row's place in its file, if there are several files.

    num_rows: error rows of all kinds.
    """

    def __init__(self, place: Callable[[int], str] = lambda number: ""):
        self.num_rows, self._place = 0, place
        self._count: Counter[str] = Counter()
        # By kind: number, name and error of the row with the lowest number, in whatever order the rows finish.
        self._example: dict[str, tuple[int, str, str]] = {}

    def add(self, number: int, row_id: str | None, error: str) -> None:
        """Adds the row with this number, counted from 0."""
        name = f"row {number + 1}"
        if place := self._place(number):
            name += f" ({place})"
        if row_id not in (None, str(number + 1)):  # a row without an id may have its number as its id
            name += f", id {row_id!r}"
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|-?[0-9][0-9,.]*", "…", error)[:200]
        self._add(kind, (number, name, error[:500]), 1)

    def __add__(self, others: "Errors") -> "Errors":
        """The rows of both."""
        both = Errors()
        for errors in (self, others):
            for kind, count in errors._count.items():
                both._add(kind, errors._example[kind], count)
        return both

    def _add(self, kind: str, example: tuple[int, str, str], count: int) -> None:
        self.num_rows += count
        if kind not in self._count and len(self._count) >= _MAX_KINDS:
            kind = "other errors"
        self._count[kind] += count
        self._example[kind] = min(example, self._example.get(kind, example))

    def in_words(self) -> str:
        """The most frequent kinds, and how many more rows there are."""
        kinds = self.by_kind()
        num_others = sum(kind["rows"] for kind in kinds[_MAX_KINDS_SHOWN:])
        more = [f"and {num_others:,} more"] if num_others else []
        return "; ".join([*map(kind_in_words, kinds[:_MAX_KINDS_SHOWN]), *more])

    def by_kind(self) -> list[dict[str, Any]]:
        """The kinds as the report lists them, the most frequent first."""
        kinds = sorted((-count, *self._example[kind]) for kind, count in self._count.items())
        return [{"rows": -count, "first": name, "error": error} for count, _, name, error in kinds]
