"""The journal: the finished rows of a job, safe from a kill at any instant.

Each line is `number checksum row`: the input row's number, the CRC-32 of number and row in hexadecimal, and the output
row (see vectors.py), which has no newline. An error row has a `!` before it, so that error rows are counted without
parsing the others. Lines are only appended. After a kill or a power failure the end may be torn or garbage; the file is
then cut before the first line with a wrong checksum.
"""

import fcntl
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.jobs.errors import Errors, JobError, what_to_do, worded
from nanovllm.jobs.output_rows import error_of
from nanovllm.jobs.results import Results

logger = logging.getLogger("nanovllm.jobs")

_BYTES_OF_READ = 2**22
_BYTES_OF_WRITE, _SECONDS_BETWEEN_WRITES = 2**17, 0.2


class Journal(Results):
    """The journal at `path`, which no other process can open as long as this one is alive.

    As a context manager it closes the file at the end. A failure that was not raised yet is then raised, or logged if
    the body has raised another exception.

    Args:
        path: the file, which is made if it does not exist.
        seconds_between_syncs: the file is synced when the last sync is this many seconds old.
        place: a row's place in its file; see Errors.

    Raises:
        JobError: another process has the file open.
    """

    def __init__(
        self, path: Path, seconds_between_syncs: float = 10.0, place: Callable[[int], str] = lambda number: ""
    ):
        super().__init__(place)
        self._path, self._seconds_between_syncs = path, seconds_between_syncs
        self._fd = _open_locked(path)
        self._waiting: list[bytes] = []
        self._num_waiting = 0
        self._size = 0  # bytes of the good lines in the file
        self._places = np.empty(0, np.int64)  # by number: the row's first byte, −1 for a row that is not in the file
        self._sizes = np.empty(0, np.int64)
        self._written_at = self._synced_at = time.monotonic()
        # The thread syncs the file. During a long step it also writes the waiting rows.
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._failure: JobError | None = None
        self._is_removed = False
        self._thread = threading.Thread(target=self._write_in_time, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except JobError as failure:
            if error is None:
                raise
            if failure is not error:
                logger.error("%s", failure)

    def recover(self, num_rows: int) -> None:
        """Reads the file, and cuts off a torn end. Call it before all methods but `clear`.

        Args:
            num_rows: rows of the input.

        Raises:
            JobError: the file cannot be read, cut or synced.
        """
        self._places, self._sizes = np.full(num_rows, -1, np.int64), np.zeros(num_rows, np.int64)
        self._size, self.num_rows, self.errors = 0, 0, Errors(self._place)
        for line in self._lines():
            number, _, rest = line.partition(b" ")
            checksum, _, marked = rest.partition(b" ")
            if not _is_good(number, checksum, marked) or int(number) >= num_rows:
                break
            is_error = marked.startswith(b"!")
            row = marked[is_error:]
            error = error_of(json.loads(row)) if is_error else None
            self._note(int(number), len(line) - len(row), len(row), error)
            self._size += len(line) + 1
        with worded(f"{self._path} cannot be repaired"):
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)

    def clear(self) -> None:
        """Drops all rows. Call it before `recover`.

        Raises:
            JobError: the file cannot be cut.
        """
        with worded(f"{self._path} cannot be emptied"):
            os.ftruncate(self._fd, 0)

    def __contains__(self, number: int) -> bool:
        return self._places[number] >= 0

    def is_complete(self) -> bool:
        """Whether each input row has its output row."""
        return self.num_rows == len(self._places)

    def append(self, number: int, row: bytes, error: tuple[str | None, str] | None = None) -> None:
        """Adds the output row of an input row, which is written soon and synced at the stated interval.

        The call waits for the disk only if the interval is 0. A sync may take seconds, during which the engine would do
        nothing.

        Raises:
            JobError: the file cannot be written, for example because the disk is full. Earlier lines are kept.
        """
        mark = b"" if error is None else b"!"
        head = b"%d %08x %s" % (number, zlib.crc32(row, zlib.crc32(b"%d %s" % (number, mark))), mark)
        with self._lock:
            self._note(number, len(head), len(row), error)
            self._waiting.append(head + row + b"\n")
            self._num_waiting += len(head) + len(row) + 1
        now = time.monotonic()
        if self._num_waiting >= _BYTES_OF_WRITE or now - self._written_at >= _SECONDS_BETWEEN_WRITES:
            self.write()
        if self._seconds_between_syncs == 0:
            self.sync()

    def write(self) -> None:
        """Hands the waiting lines to the operating system, so that they survive a kill of this process."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            data, self._waiting, self._num_waiting = b"".join(self._waiting), [], 0
            self._written_at = time.monotonic()
            view, offset = memoryview(data), self._size
            try:
                while view:
                    written = os.pwrite(self._fd, view, offset)
                    offset, view = offset + written, view[written:]
            except OSError as error:
                self._failure = self._error("cannot be written", error)
                with suppress(OSError):  # a torn line is cut off when the job resumes
                    os.ftruncate(self._fd, self._size)
                raise self._failure from error
            self._size = offset

    def sync(self) -> None:
        """Waits until everything is on the disk."""
        began = time.monotonic()  # rows that come during the sync count from here
        self.write()
        try:
            os.fdatasync(self._fd) if hasattr(os, "fdatasync") else os.fsync(self._fd)
        except OSError as error:  # a second sync could succeed without the rows of the first
            self._failure = self._error("cannot be synced", error)
            raise self._failure from error
        self._synced_at = began

    def _error(self, problem: str, error: OSError) -> JobError:
        return JobError(f"{self._path} {problem}: {error.strerror}. {what_to_do(error)}")

    def _write_in_time(self) -> None:
        while not self._closing.wait(min(_SECONDS_BETWEEN_WRITES, self._seconds_between_syncs) or 0.2):
            try:
                if self._waiting:
                    self.write()
                if time.monotonic() - self._synced_at >= self._seconds_between_syncs:
                    self.sync()
            except Exception as error:  # a later append raises it, or close()
                self._failure = error if isinstance(error, JobError) else JobError(f"{self._path}: {error!r}")
                return

    def rows(self) -> Iterator[bytes]:
        """Yields the output rows that are in the file, in the input's order."""
        self.write()
        for number in np.flatnonzero(self._places >= 0):  # a list of integers would take five times the memory
            yield self._read(int(self._sizes[number]), int(self._places[number]))

    def close(self) -> None:
        """Syncs and closes the file, unless it was removed. Removes it if it is empty.

        Raises:
            JobError: the file cannot be written or synced, or could not be before.
        """
        if self._fd < 0:
            return
        self._closing.set()
        try:
            self._thread.join()
            if self._is_removed:
                return
            if self._failure is not None:
                raise self._failure
            self.sync()
            if os.fstat(self._fd).st_size == 0:
                self.remove()
        finally:
            with self._lock:  # the thread may still run if Ctrl-C ended the wait for it
                os.close(self._fd)
                self._fd = -1

    def remove(self) -> None:
        """Removes the file, once its rows are elsewhere. Earlier failures no longer matter then."""
        self._is_removed = True
        with suppress(FileNotFoundError):
            # If this journal was removed before, another process may have one of the same name.
            if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                self._path.unlink()

    def _note(self, number: int, head_size: int, row_size: int, error: tuple[str | None, str] | None) -> None:
        """Notes the row's place: its line comes after those in the file and those that wait."""
        if self._places[number] < 0:
            self.count(number, error)
        self._places[number], self._sizes[number] = self._size + self._num_waiting + head_size, row_size

    def _read(self, size: int, place: int) -> bytes:
        with worded(f"{self._path} cannot be read"):
            return os.pread(self._fd, size, place)

    def _lines(self) -> Iterator[bytes]:
        """Yields the file's whole lines, without their newlines."""
        rest, offset = b"", 0
        while data := self._read(_BYTES_OF_READ, offset):
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def _is_good(number: bytes, checksum: bytes, row: bytes) -> bool:
    return number.isdigit() and checksum == b"%08x" % zlib.crc32(row, zlib.crc32(number + b" "))


def _open_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise JobError(f"another process is writing {path}; wait for it or stop it") from None
            raise JobError(f"{path} cannot be locked: {error.strerror}; choose an output on another disk") from error
        if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
            return fd
        os.close(fd)  # the process that had the file open has just removed it
