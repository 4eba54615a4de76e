"""What is wrong with a job, and with its rows."""

import errno
import re
from collections import Counter
from typing import Any

_MAX_KINDS, _MAX_FIRST = 1000, 10


class JobError(Exception):
    """The job cannot start or go on. Nothing that it wrote is lost; the message says what to do."""


def what_to_do(error: OSError) -> str:
    """After a job's file could not be written."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{'Make room and run' if is_full else 'Run'} the same command again; the rows that are on the disk are kept"


class Errors:
    """Error rows by kind: errors that differ only in numbers and quoted values are of one. Memory stays flat.

    num_rows: all of them.
    """

    def __init__(self):
        self.num_rows = 0
        self._first: list[str] = []
        self._count: Counter[str] = Counter()
        self._example: dict[str, tuple[str, str]] = {}  # of each kind, the first row's name and its error

    def add(self, row: str, error: str) -> None:
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|-?[0-9][0-9,.]*", "…", error)[:200]
        self._add(kind, (row, error[:500]), 1)
        if len(self._first) < _MAX_FIRST:
            self._first.append(f"{row}: {error[:500]}")

    def include(self, others: "Errors") -> None:
        """Adds the rows of `others`."""
        for kind, count in others._count.items():
            self._add(kind, others._example[kind], count)
        self._first += others._first[: _MAX_FIRST - len(self._first)]

    def _add(self, kind: str, example: tuple[str, str], count: int) -> None:
        self.num_rows += count
        if kind not in self._count and len(self._count) >= _MAX_KINDS:
            kind = "other errors"
        self._count[kind] += count
        self._example.setdefault(kind, example)

    def in_words(self) -> str:
        """The first ten, each with its name, and how many more there are."""
        num_more = self.num_rows - len(self._first)
        return "; ".join([*self._first, *[f"and {num_more:,} more"] * (num_more > 0)])

    def by_kind(self) -> list[dict[str, Any]]:
        """The most frequent first."""
        return [
            {"rows": count, "first": self._example[kind][0], "error": self._example[kind][1]}
            for kind, count in self._count.most_common()
        ]
