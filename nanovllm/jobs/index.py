"""What a job knows of each row before it runs, in a few bytes."""

import zlib
from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xxhash

from nanovllm.jobs.errors import Errors, JobError
from nanovllm.jobs.rows import JobRow
from nanovllm.jobs.source import Source


class Index:
    """For each row: the most tokens that it may generate, and whether an earlier row has its id.

    Args:
        lines: of the input; they are scanned here.
        parse: makes the row of a number and a line.
        max_num_new_tokens: of a row without an error.

    errors: rows that cannot run, as far as the rows alone can tell.
    max_num_new_tokens: int64 [num_rows].
    kinds: the kinds of rows that there are; see JobRow.
    can_run: bool [num_rows], the rows without an error.
    first_use: int64 [num_rows], the number of the first row with the same id, or −1 if it is the first.
    """

    def __init__(
        self, lines: Source, parse: Callable[[int, bytes], JobRow], max_num_new_tokens: Callable[[JobRow], int]
    ):
        self._parse = parse
        self.errors = Errors()
        self.kinds: set[str] = set()
        ids, most, self._checksums, is_row = array("Q"), array("q"), array("I"), bytearray()
        for number, line in enumerate(lines.scan()):
            row = parse(number, line)
            # A row without an id is like no other.
            ids.append(xxhash.xxh3_64_intdigest(row.id.encode()) if row.id is not None else 0)
            most.append(0 if row.error is not None else max_num_new_tokens(row))
            self._checksums.append(zlib.crc32(line))
            is_row.append(row.error is None)
            self.kinds.add(row.kind)
            self._note(row)
        self.max_num_new_tokens = np.array(most, np.int64)
        self.first_use = self._first_uses(np.array(ids, np.uint64), lines)
        self.can_run = np.frombuffer(is_row, bool) & (self.first_use < 0)
        for number in np.flatnonzero(self.first_use >= 0).tolist():
            line = lines.read(number)
            if parse(number, line).error is None:  # its own error is noted already
                self._note(self.row(number, line))

    def row(self, number: int, line: bytes) -> JobRow:
        """The row of a line; an error row if an earlier row has the same id.

        Raises:
            JobError: it is not the line that was scanned.
        """
        if zlib.crc32(line) != self._checksums[number]:
            raise JobError(
                f"row {number + 1} of the input has changed while the job ran. Restore the input, and run the same "
                "command again"
            )
        row = self._parse(number, line)
        if (first := self.first_use[number]) >= 0 and row.error is None:
            return replace(row, error=f"row {first + 1} has the same id {row.id!r}; ids must be unique")
        return row

    def _note(self, row: JobRow) -> None:
        if row.error is not None:
            self.errors.add(name_of(row), row.error)

    def _first_uses(self, ids: np.ndarray, lines: Source) -> np.ndarray:
        """`first_use`; `ids` are hashes, and 0 stands for no id."""
        first_use = np.full(len(ids), -1, np.int64)
        order = np.argsort(ids, kind="stable")
        equal = np.flatnonzero((ids[order][1:] == ids[order][:-1]) & (ids[order][1:] != 0)) + 1
        firsts: dict[str | None, int] = {}
        # Two ids may have the same hash, so they are read again; in order, because a table is slow to read otherwise.
        for number in np.union1d(order[equal - 1], order[equal]).tolist():
            first = firsts.setdefault(self._parse(number, lines.read(number)).id, number)
            first_use[number] = first if first < number else -1
        return first_use


def name_of(row: JobRow) -> str:
    """The row's number and id, for messages."""
    return f"row {row.number + 1}" if row.id is None else f"row {row.number + 1}, id {row.id!r}"
