"""Where the output rows of a job go."""

import sys
from collections.abc import Callable

from nanovllm.jobs.errors import Errors, JobError
from nanovllm.jobs.vectors import as_line


class Results:
    """Takes output rows, and counts them: a journal, standard output, or the sample of an estimate.

    Args:
        place: a row's place in its file; see Errors.

    num_rows: output rows that are there, those of earlier runs included.
    errors: the error rows among them.
    """

    def __init__(self, place: Callable[[int], str] = lambda number: "") -> None:
        self.num_rows, self.errors, self._place = 0, Errors(place), place

    def __contains__(self, number: int) -> bool:
        """Whether the output row of an input row is there already."""
        return False

    def append(self, number: int, row: bytes, error: tuple[str | None, str] | None = None) -> None:
        """Adds the output row of an input row, as `packed` makes it.

        error: an error row's id and error; None for other rows.
        """
        self.count(number, error)

    def count(self, number: int, error: tuple[str | None, str] | None) -> None:
        """Counts an output row."""
        self.num_rows += 1
        if error is not None:
            self.errors.add(number, *error)

    def write(self) -> None:
        """Writes the rows that wait."""


class Stdout(Results):
    """Writes rows to standard output as they finish; there is nothing to resume."""

    def append(self, number: int, row: bytes, error: tuple[str | None, str] | None = None) -> None:
        """Adds a row; raises a JobError if it cannot be written."""
        try:
            sys.stdout.buffer.write(as_line(row) + b"\n")
            sys.stdout.buffer.flush()
        except OSError as problem:
            raise JobError(f"standard output cannot be written: {problem.strerror}. Run the job again") from problem
        self.count(number, error)
