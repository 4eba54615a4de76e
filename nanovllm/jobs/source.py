"""The rows of a job's input: lines of a file or rows of a table, read in order or one by one."""

import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import xxhash

from nanovllm.jobs.errors import JobError, worded
from nanovllm.jobs.fields import MAX_BYTES_OF_LINE
from nanovllm.jobs.parquet import ParquetLines, is_parquet

_OTHER_FILES = {
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PAR1": "a Parquet file by another name",
}


class Lines:
    """The lines of an input that are not blank; each is a row, numbered from 0.

    An input that cannot be read twice, such as standard input, is copied to a temporary file first.

    Args:
        path: the input, or "-" for standard input.
        spool_directory: the copy's directory.

    Raises:
        OSError: the input cannot be read.
        JobError: it is not text in UTF-8.
    """

    def __init__(self, path: str, spool_directory: Path | None = None):
        self._offsets = array("q")
        self.digest = ""
        if path != "-" and Path(path).is_file():
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - close() closes it
        else:
            name, directory = "standard input" if path == "-" else path, spool_directory or tempfile.gettempdir()
            opened = nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb")  # noqa: SIM115
            with opened as stream, worded(f"{name} cannot be copied to a file in {directory}"):
                self._file = tempfile.TemporaryFile(dir=spool_directory)  # noqa: SIM115
                shutil.copyfileobj(stream, self._file, 2**20)
                self._file.flush()
        self._file.seek(0)
        begins = self._file.read(4)
        for beginning, kind in _OTHER_FILES.items():
            if begins.startswith(beginning):
                raise JobError(f"{path} is {kind}; give JSON Lines in UTF-8, or a Parquet file named .parquet")

    def __len__(self) -> int:
        return len(self._offsets)

    def scan(self) -> Iterator[bytes]:
        """Yields all rows in order; finds their places and, at the end, `digest` (of the whole input)."""
        file, digest = self._file, xxhash.xxh3_128()
        file.seek(0)
        self._offsets, offset = array("q"), 0
        while line := file.readline(MAX_BYTES_OF_LINE + 1):
            start, is_whole = offset, line.endswith(b"\n")
            offset += len(line)
            digest.update(line)
            row = line
            while not is_whole and (rest := file.readline(MAX_BYTES_OF_LINE)):
                is_whole = rest.endswith(b"\n")
                offset += len(rest)
                digest.update(rest)
            if row.strip():
                self._offsets.append(start)
                yield _cut(row, start)
        self.digest = digest.hexdigest()

    def read(self, number: int) -> bytes:
        """One row, after `scan`."""
        start = self._offsets[number]
        self._file.seek(start)
        return _cut(self._file.readline(MAX_BYTES_OF_LINE + 1), start)

    def close(self) -> None:
        self._file.close()


Source = Lines | ParquetLines


def open_source(path: str, spool_directory: Path | None = None) -> Source:
    """The rows of an input: those of a Parquet file if its name ends in ".parquet", else lines. See both classes."""
    return ParquetLines(path) if is_parquet(path) else Lines(path, spool_directory)


def _cut(line: bytes, start: int) -> bytes:
    """A line without its end, and without a byte order mark at the beginning of the file."""
    return (line.removeprefix(b"\xef\xbb\xbf") if start == 0 else line).rstrip(b"\r\n")
