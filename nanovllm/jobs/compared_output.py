"""Compares the output of a job with the hashes of its rows: which rows changed, are missing, or have moved."""

from collections.abc import Collection
from itertools import zip_longest
from typing import Any, NamedTuple

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.parquet import is_parquet
from nanovllm.jobs.paths import JobPaths
from nanovllm.jobs.proof import BYTES_OF_HASH, hash_of, load_hashes, rows_of

# Rows of an output that are named; the others are counted.
MAX_ROWS_NAMED = 20


class Chosen(NamedTuple):
    """A row that was chosen: its number, its bytes in the output, and the recorded hash of what was there. The bytes
    are None if the output has no row there, or another row that has moved."""

    number: int
    written: bytes | None
    recorded: str | None


def note(what: str, recorded: Any, found: Any) -> dict[str, Any]:
    """A difference."""
    return {"what": what, "recorded": recorded, "found": found}


class ComparedOutput(NamedTuple):
    """An output compared with its hashes: the rows that were chosen, how many rows changed and how many are missing,
    and the differences."""

    chosen: list[Chosen]
    num_changed: int
    num_missing: int
    differences: list[dict[str, Any]]


def compared_output(paths: JobPaths, manifest: dict[str, Any], numbers: Collection[int]) -> ComparedOutput:
    """Compares the rows of the output with their hashes, and takes those with these numbers."""
    hashes = load_hashes(paths, manifest)
    if not paths.output.is_file():
        raise JobError(f"there is no output {paths.output}, only its manifest; copy it back beside that")
    before, now = bytearray(), bytearray()  # the hashes of all rows
    chosen, changed, num_changed, first = [], [], 0, 0
    for number, (row, recorded) in enumerate(zip_longest(rows_of(paths.output, is_parquet(str(paths.output))), hashes)):
        if number in numbers:
            chosen.append(Chosen(number, row, recorded))
        found = None if row is None else hash_of(row)
        now += bytes.fromhex(found or "")
        before += bytes.fromhex(recorded or "")
        if found is None or recorded is None or found == recorded:
            continue
        first = first if num_changed else number
        num_changed += 1
        if num_changed <= MAX_ROWS_NAMED:
            changed.append(note(f"row {number + 1} of the output: its hash", recorded, found))
    if (more := num_changed - MAX_ROWS_NAMED) > 0:
        changed.append(note("the number of other rows of the output that changed", 0, more))
    num_more = (len(now) - len(before)) // BYTES_OF_HASH
    if num_changed and _have_moved(before, now, first, num_more):
        numbers_of_row = (first + 1 + max(0, -num_more), first + 1 + max(0, num_more))
        changed = [note(f"rows from {first + 1} on have moved: the number of the first of them", *numbers_of_row)]
        chosen = [row._replace(written=None) if row.number >= first else row for row in chosen]
    if num_more:
        num_rows = len(before) // BYTES_OF_HASH
        changed.insert(0, note("the number of rows of the output", num_rows, num_rows + num_more))
    return ComparedOutput(chosen, num_changed, max(0, -num_more), changed)


def _have_moved(before: bytearray, now: bytearray, first: int, num_more: int) -> bool:
    """Whether the rows from one on only have other numbers, because rows were deleted or inserted there."""
    skipped = [(first + max(0, each)) * BYTES_OF_HASH for each in (-num_more, num_more)]
    return before[skipped[0] :] == now[skipped[1] :]
