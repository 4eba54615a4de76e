"""The rows of a job, with a few bytes about each row that are known before it runs."""

from array import array
from dataclasses import replace

import numpy as np
import xxhash

from nanovllm.jobs.errors import Errors
from nanovllm.jobs.row_params import RowParams
from nanovllm.jobs.rows import JobRow
from nanovllm.jobs.source import Files


class Index:
    """The rows of a job by number. It knows how many tokens each may generate, and whether an earlier row has its id.

    Args:
        lines: the input; it is scanned here.
        params: parses the rows and makes their parameters.
        max_model_len: bounds the tokens of a completion.
        with_data: give each row the JSON of its data columns.

    errors: rows that cannot run, as far as the rows alone can tell.
    max_num_new_tokens: int64 [num_rows].
    kinds: the kinds of rows that occur; see JobRow.
    dimensions: those that rows with embeddings ask for.
    adapters: the names of the adapters of rows without an error, and None if any such row has no adapter.
    can_run: bool [num_rows], the rows without an error.
    first_use: int64 [num_rows], the number of the first row with the same id, or −1 if the row itself is the first.
    """

    def __init__(self, lines: Files, params: RowParams, max_model_len: int, with_data: bool = False):
        self.lines, self.params, self.kinds, self.dimensions = lines, params, set[str](), set[int | None]()
        self.errors, self.adapters = Errors(lines.place), set[str | None]()
        self._data = lines.data if with_data else None
        ids, max_num_new_tokens, is_row = array("Q"), array("q"), bytearray()
        for number, line in enumerate(lines.scan()):
            row = params.parse(number, line)
            # 0 for a row without an id of its own, which is not equal to any other.
            ids.append(0 if row.id is None or row.is_numbered else xxhash.xxh3_64_intdigest(row.id.encode()))
            max_num_new_tokens.append(0 if row.error is not None else params.max_num_new_tokens(row, max_model_len))
            is_row.append(row.error is None)
            self.kinds.add(row.kind)
            if row.kind in ("embed", "embeddings") and row.error is None:
                self.dimensions.add(params.dimensions(row))
            if row.error is None:
                self.adapters.add(row.adapter)
            self._note(row)
        self.max_num_new_tokens = np.array(max_num_new_tokens, np.int64)
        self.first_use = self._first_uses(np.array(ids, np.uint64))
        self.can_run = np.frombuffer(is_row, bool) & (self.first_use < 0)
        for number in np.flatnonzero(self.first_use >= 0).tolist():
            if is_row[number]:  # otherwise its own error is noted already
                self._note(self.read(number)[0])

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, number: int) -> tuple[JobRow, int]:
        """A row and the bytes of its line; an error row if an earlier row has the same id.

        Raises:
            JobError: the line has changed since it was scanned.
        """
        line = self.lines.read(number)
        data = b"" if self._data is None else self._data.text(number)
        row = replace(self.params.parse(number, line), data=data)
        if (first := self.first_use[number]) >= 0 and row.error is None:
            row = replace(row, error=f"row {first + 1} has the same id {row.id!r}; ids must be unique")
        return row, len(line) + len(row.data)

    def _note(self, row: JobRow) -> None:
        if row.error is not None:
            self.errors.add(row.number, row.id, row.error)

    def _first_uses(self, ids: np.ndarray) -> np.ndarray:
        """`first_use`, from hashes of the ids; 0 for a row without an id."""
        first_use = np.full(len(ids), -1, np.int64)
        order = np.argsort(ids, kind="stable")
        equal = np.flatnonzero((ids[order][1:] == ids[order][:-1]) & (ids[order][1:] != 0)) + 1
        firsts: dict[str | None, int] = {}
        # Two ids may have the same hash, so they are read again; in order, because a table is slow to read otherwise.
        for number in np.union1d(order[equal - 1], order[equal]).tolist():
            first = firsts.setdefault(self.params.parse(number, self.lines.read(number)).id, number)
            first_use[number] = first if first < number else -1
        return first_use
