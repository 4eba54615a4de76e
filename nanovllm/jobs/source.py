"""The rows of a job's input: lines of files or rows of tables, read in order or one by one."""

import gzip
import shutil
import sys
import tempfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from nanovllm.jobs.columns import Columns
from nanovllm.jobs.data import LinesData, TableData
from nanovllm.jobs.errors import JobError, what_to_do, worded
from nanovllm.jobs.fields import MAX_BYTES_OF_LINE, fields_of
from nanovllm.jobs.parquet import ParquetLines, import_pyarrow, is_parquet

_OTHER_FILES = {
    b"\x1f\x8b": "compressed twice, by gzip",
    b"\x28\xb5\x2f\xfd": "compressed twice, by zstd",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PAR1": "a Parquet file by another name",
}
# A named column must be in one of these first rows.
_ROWS_WITH_NAMES = 100


class Lines:
    """The lines of a file that are not blank; each is a row, numbered from 0.

    A file that is compressed by gzip or zstd is decompressed into a temporary file. A file that cannot be read twice,
    such as standard input, is copied to one first.

    Args:
        path: the file, or "-" for standard input.
        spool_directory: the directory of temporary files.

    Raises:
        OSError: the file cannot be read.
        JobError: it is not text in UTF-8, its archive is damaged, or it cannot be copied.
    """

    def __init__(self, path: str, spool_directory: Path | None = None):
        self.path, self._directory = "standard input" if path == "-" else path, spool_directory
        self._offsets = array("q")
        self.digest = ""
        if path != "-" and Path(path).is_file():
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - close() closes it
        else:
            with nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as stream:
                self._file = self._copied(stream)
        if (decompressed := _decompressed(self._file, self.path)) is not None:
            with self._file:
                self._file = self._copied(decompressed)
        begins = self._file.read(4)
        for beginning, kind in _OTHER_FILES.items():
            if begins.startswith(beginning):
                raise JobError(f"{self.path} is {kind}; give JSON Lines in UTF-8, or a Parquet file named .parquet")

    def __len__(self) -> int:
        return len(self._offsets)

    def scan(self) -> Iterator[bytes]:
        """Yields all rows in order; finds their places and, at the end, `digest` (of the whole text)."""
        file, digest = self._file, xxhash.xxh3_128()
        file.seek(0)
        self._offsets, offset = array("q"), 0
        while row := self._next_line():
            start, piece = offset, row
            while piece:
                offset += len(piece)
                digest.update(piece)
                piece = b"" if piece.endswith(b"\n") else self._next_line()
            if _cut(row, start).strip() or len(row) > MAX_BYTES_OF_LINE:
                self._offsets.append(start)
                yield _cut(row, start)
        self.digest = digest.hexdigest()

    def read(self, number: int) -> bytes:
        """One row, after `scan`."""
        start = self._offsets[number]
        self._file.seek(start)
        return _cut(self._next_line(), start)

    def close(self) -> None:
        self._file.close()

    def _next_line(self) -> bytes:
        """A line, or the part of a longer one that shows that it is too long."""
        return self._file.readline(MAX_BYTES_OF_LINE + 16)

    def _copied(self, stream: Any) -> BinaryIO:
        """A temporary file with the rest of a stream."""
        file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - close() closes it
        try:
            shutil.copyfileobj(stream, file, 2**20)
            file.seek(0)  # writes what is buffered
        except (OSError, EOFError, ValueError, zlib.error) as error:
            file.close()
            if not isinstance(error, OSError) or error.errno is None:
                raise JobError(f"{self.path} is a damaged archive: {error}; make it again") from None
            where = self._directory or tempfile.gettempdir()
            raise JobError(f"{self.path} cannot be copied to {where}: {error.strerror}. {what_to_do(error)}") from error
        return file


class Files:
    """The rows of all files of an input, numbered from 0 over all files.

    Args:
        paths: the files; see Lines and, for names that end in ".parquet", ParquetLines.
        columns: which columns make the rows.
        directory: the directory of temporary files.
        to_table: whether the output is a table.

    data: the input's data columns, or None if there are none.
    digest: of the input, after `scan`.

    Raises:
        OSError: a file cannot be read.
        JobError: a file cannot be read, lacks a column, or does not match the files before it.
    """

    def __init__(self, paths: Sequence[str], columns: Columns, directory: Path | None = None, to_table: bool = False):
        self.parts: list[Lines | ParquetLines] = []
        self.data: LinesData | TableData | None = None
        self.digest = ""
        self._starts: list[int] = []
        self._checksums = array("I")
        self._states: list[tuple[int, int]] = []
        self._note: Callable[[bytes], None] | None = None
        try:
            for path in paths:
                if path != "-" and not Path(path).exists():
                    raise JobError(f"there is no file {path!r}")
                self.parts.append(ParquetLines(path, columns) if is_parquet(path) else Lines(path, directory))
            self._check_alike()
            for part in self.parts:
                columns.check(_names_in(part), part.path, is_parquet(paths[0]))
            if not is_parquet(paths[0]):
                self.data = LinesData(self.read, columns) if columns.given else None
                self._note = self.data.note if self.data is not None and to_table else None
            elif columns.carried(_names_in(self.parts[0])):
                self.data = TableData([ParquetLines(path, columns, is_data=True) for path in paths], to_table)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def scan(self) -> Iterator[bytes]:
        """Yields all rows in order, and finds `digest`."""
        self._starts, self._checksums = [], array("I")
        for part in self.parts:
            self._starts.append(len(self._checksums))
            with worded(f"{part.path} cannot be read"):
                for line in part.scan():
                    self._checksums.append(zlib.crc32(line))
                    if self._note is not None:
                        self._note(line)
                    yield line
        if isinstance(self.data, TableData):
            self._states = self._find_states()
            self.data.check()
        elif self._note is not None and self.data is not None:
            self.data.warn_of_text()
        digests = [part.digest for part in self.parts]
        self.digest = digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest(" ".join(digests).encode())

    def read(self, number: int) -> bytes:
        """One row, after `scan`.

        Raises:
            JobError: the row has changed since it was scanned.
        """
        part, inner = self._find(number)
        with worded(f"row {inner + 1} of {part.path} cannot be read"):
            line = part.read(inner)
        if zlib.crc32(line) != self._checksums[number]:
            raise JobError(
                f"row {number + 1} of the input has changed while the job ran. Restore the input, and run the same "
                "command again"
            )
        return line

    def check_unchanged(self) -> None:
        """Raises a JobError if a table has changed since `scan`: its data columns are read once more at the end. (A
        line is checked when it is read.)"""
        if isinstance(self.data, TableData) and self._find_states() != self._states:
            raise JobError("the input has changed while the job ran. Restore the input, and run the same command again")

    def _find_states(self) -> list[tuple[int, int]]:
        states = [Path(part.path).stat() for part in self.parts]
        return [(each.st_size, each.st_mtime_ns) for each in states]

    def place(self, number: int) -> str:
        """A row's number in its file and the file's name; empty if there is one file."""
        if len(self.parts) == 1:
            return ""
        part, inner = self._find(number)
        return f"row {inner + 1} of {part.path}"

    def close(self) -> None:
        for each in (*self.parts, self.data):
            if each is not None:
                each.close()

    def _find(self, number: int) -> tuple[Lines | ParquetLines, int]:
        index = bisect_right(self._starts, number) - 1
        return self.parts[index], number - self._starts[index]

    def _check_alike(self) -> None:
        if len({type(part) for part in self.parts}) > 1:
            raise JobError("the input has JSON Lines and Parquet files; run a job for each format")
        tables = [part for part in self.parts if isinstance(part, ParquetLines)]
        for part in tables[1:]:
            if different := {*part.names} ^ {*tables[0].names}:
                raise JobError(f"the columns {sorted(different)} are in only one of {tables[0].path} and {part.path}")


def _names_in(part: Lines | ParquetLines) -> list[str]:
    """The columns of a table, or the keys of the first lines."""
    if isinstance(part, ParquetLines):
        return part.names
    with worded(f"{part.path} cannot be read"):
        return list(dict.fromkeys(name for line in islice(part.scan(), _ROWS_WITH_NAMES) for name in fields_of(line)))


def check_name(path: str, is_output: bool = False) -> None:
    """Raises a JobError for a file whose name says that it has another format. An output is never compressed."""
    others = (".csv", ".tsv", ".xls", ".xlsx", *((".gz", ".zst") if is_output else ()))
    if Path(path).suffix.lower() in others:
        kinds = "JSON Lines or Parquet, and never compressed" if is_output else "JSON Lines or Parquet"
        raise JobError(f"{path}: {'an output' if is_output else 'an input'} is {kinds}; name another file")


def input_paths(given: str | Sequence[str], ours: Collection[Path]) -> list[str]:
    """The files of an input.

    Args:
        given: paths and patterns of `glob`; the files of a pattern are sorted by name.
        ours: paths that no pattern matches, because the job writes them.

    Raises:
        JobError: no file matches, or a file is there twice.
    """
    paths: list[str] = []
    for each in [given] if isinstance(given, str) else given:
        if Path(each).is_dir() and each:
            raise JobError(f"{each} is a directory; name its files, for example '{each}/*.jsonl'")
        if Path(each).exists() or not any(sign in each for sign in "*?["):
            paths.append(each)
            continue
        found = sorted(path for path in glob(each, recursive=True) if Path(path).resolve() not in ours)
        if not found:
            raise JobError(f"no file matches {each!r}")
        paths += found
    seen: set[Path] = set()
    for path in paths:
        check_name(path)
        if (resolved := Path(path).resolve()) in seen:
            raise JobError(f"the input has {path} twice; leave one out")
        seen.add(resolved)
    return paths


def _decompressed(file: BinaryIO, path: str) -> Any:
    """A stream of the text of a compressed file, or None for another file."""
    begins = file.read(4)
    file.seek(0)
    if begins.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if begins == b"\x28\xb5\x2f\xfd":
        return import_pyarrow(path, "compressed by zstd")[0].CompressedInputStream(file, "zstd")
    return None


def _cut(line: bytes, start: int) -> bytes:
    """A line without its end, and without a byte order mark at the beginning of the file."""
    return (line.removeprefix(b"\xef\xbb\xbf") if start == 0 else line).rstrip(b"\r\n")
