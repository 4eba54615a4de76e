"""What a job knows of each row before it runs, in a few bytes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xxhash

from nanovllm.jobs.rows import JobRow, parse_row
from nanovllm.jobs.source import Lines

_MOST_ERRORS = 1000  # that are kept with their texts


class Index:
    """How much each row may generate, and whether its id was there before.

    Args:
        lines: is read once, whole.
        most_new_tokens: of a row.

    num_errors: rows that cannot run, as far as the rows alone can tell; `errors` are the first of them, by name.
    most_new_tokens: int64 [num_rows].
    """

    def __init__(self, lines: Lines, most_new_tokens: Callable[[JobRow], int]):
        ids, most = [], []
        self.errors: list[tuple[str, str]] = []
        self.num_errors = 0
        for number, line in enumerate(lines.scan()):
            row = parse_row(number, line)
            # A row without an id is like no other.
            ids.append(xxhash.xxh3_64_intdigest(row.id.encode()) if row.id is not None else 0)
            most.append(0 if row.error is not None else most_new_tokens(row))
            self._note(row, row.error)
        self.most_new_tokens = np.array(most, np.int64)
        self.first_use = _first_uses(np.array(ids, np.uint64), lines)
        for number in np.flatnonzero(self.first_use >= 0).tolist():
            self._note(row := self.row(number, lines.read(number)), row.error)

    def row(self, number: int, line: bytes) -> JobRow:
        """The row of a line; one whose id was there before is an error row."""
        row = parse_row(number, line)
        if (first := self.first_use[number]) >= 0 and row.error is None:
            return replace(row, error=f"the id {row.id!r} is already that of row {first + 1}; ids must be unique")
        return row

    def _note(self, row: JobRow, error: str | None) -> None:
        if error is not None:
            self.num_errors += 1
            if len(self.errors) < _MOST_ERRORS:
                self.errors.append((name_of(row), error))


def _first_uses(ids: np.ndarray, lines: Lines) -> np.ndarray:
    """Of each row, the first row with the same id, or −1 if it is that row itself. Ids are hashes, 0 without one."""
    first_use = np.full(len(ids), -1, np.int64)
    order = np.argsort(ids, kind="stable")
    equal = np.flatnonzero((ids[order][1:] == ids[order][:-1]) & (ids[order][1:] != 0)) + 1
    firsts: dict[str | None, int] = {}
    for place in equal.tolist():
        for number in (int(order[place - 1]), int(order[place])):
            # Two ids may have the same hash, so they are read again.
            first = firsts.setdefault(parse_row(number, lines.read(number)).id, number)
            first_use[number] = first if first < number else -1
    return first_use


def name_of(row: JobRow) -> str:
    """What people find the row by."""
    return f"row {row.number + 1}" if row.id is None else f"row {row.number + 1}, id {row.id!r}"
