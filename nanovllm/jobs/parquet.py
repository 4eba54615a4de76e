"""Parquet files as a job's input. pyarrow is imported only for them.

A row of an input table becomes an equal line of JSON, so that there is one parser of rows. The journal is JSON lines in
any case; output.py makes the output table of it at the end.
"""

import json
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.fields import UnreadableLine, finite_or_none, json_text
from nanovllm.jobs.vectors import base64_of

# Rows and bytes of an input that are decoded at once. The bytes are unknown if equal values are stored once, so the
# number of rows is small.
_ROWS_OF_BATCH, _BYTES_OF_BATCH = 128, 2**22
# Without a buffer of this size, or with pre_buffer, pyarrow reads a column's whole part of a row group.
_BYTES_OF_BUFFER = 2**18


def is_parquet(path: str) -> bool:
    """Whether the name ends in ".parquet"."""
    return Path(path).suffix.lower() == ".parquet"


def import_pyarrow(path: str | Path, kind: str = "a Parquet file") -> tuple[Any, Any]:
    """Imports and returns the modules pyarrow and pyarrow.parquet.

    path, kind: the file that needs them, for the JobError if they are missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise JobError(
            f"{path} is {kind}, which needs pyarrow ({error}); install it (pip install pyarrow), or use JSON Lines"
        ) from None
    return pyarrow, pyarrow.parquet


class ParquetLines:
    """Rows of a Parquet file as lines of JSON, with the interface of `Lines`.

    One batch of rows is in memory. Reading forward from there is fast; reading backward decodes the row group from its
    start again.

    Args:
        path: the file.
        columns: which columns make the rows and which are data.
        is_data: read the data columns, and give their nulls too. Otherwise the columns that make the rows are read, and
            a null is absent.

    names: all columns of the file.
    schema: of the columns that are read, with their names in the output.

    Raises:
        JobError: pyarrow is missing, or the file is not a whole Parquet file; later reads may find that too.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, columns: Columns, is_data: bool = False):
        self.path, self._is_data, self._json_names = path, is_data, () if is_data else columns.json_names
        self._pyarrow, parquet = import_pyarrow(path)
        self.digest = ""
        self._bytes: BinaryIO = open(path, "rb")  # noqa: SIM115 - close() closes it
        try:
            with self._reading():
                self._file = parquet.ParquetFile(self._bytes, buffer_size=_BYTES_OF_BUFFER, pre_buffer=False)
            schema = self._file.schema_arrow
            self.names: list[str] = schema.names
            if len(set(self.names)) != len(self.names):
                twice = next(name for name in self.names if self.names.count(name) > 1)
                raise JobError(f"{path} has the column {twice!r} twice; leave one out")
        except BaseException:
            self._bytes.close()
            raise
        self._read = columns.carried(self.names) if is_data else columns.of_rows(self.names)
        self.schema = self._pyarrow.schema([schema.field(name).with_name(new) for name, new in self._read.items()])
        metadata = self._file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._num_rows: int = metadata.num_rows
        self._starts = list(accumulate((group.num_rows for group in groups), initial=0))[:-1]
        sizes = [_num_bytes(group, self._read) // max(group.num_rows, 1) for group in groups]
        self._rows_of_batch = [max(1, min(_ROWS_OF_BATCH, _BYTES_OF_BATCH // max(size, 1))) for size in sizes]
        # The batch in memory, and the next ones of its row group.
        self._group, self._start, self._rows_in_batch = -1, 0, 0
        self._columns: list[tuple[str, Any]] = []
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._num_rows

    def scan(self) -> Iterator[bytes]:
        """Finds `digest` (of the file's bytes), and yields all rows in order."""
        digest = xxhash.xxh3_128()
        self._bytes.seek(0)
        while data := self._bytes.read(2**20):
            digest.update(data)
        self.digest = digest.hexdigest()
        yield from map(self.read, range(self._num_rows))

    def read(self, number: int) -> bytes:
        """One row's line; an UnreadableLine if JSON cannot express it."""
        if not self._start <= number < self._start + self._rows_in_batch:
            self._move_to(number)
        return self._line_of(number - self._start)

    def tables(self) -> Iterator[Any]:
        """The rows as tables of a few rows, with `schema`."""
        self._group, number = -1, 0  # from the start, even if the first batch is in memory
        while number < self._num_rows:
            self._move_to(number)
            number = self._start + self._rows_in_batch
            yield self._pyarrow.Table.from_arrays([column for _, column in self._columns], schema=self.schema)

    def close(self) -> None:
        self._batches, self._columns = iter(()), []
        self._bytes.close()

    def _move_to(self, number: int) -> None:
        group = bisect_right(self._starts, number) - 1
        with self._reading():
            if group != self._group or number < self._start:
                # Without threads: most of the time goes into making Python's values of a batch, not into decoding it.
                self._batches = self._file.iter_batches(
                    self._rows_of_batch[group], [group], list(self._read), use_threads=False
                )
                self._group, self._start, self._rows_in_batch = group, self._starts[group], 0
            for batch in self._batches:
                self._start += self._rows_in_batch
                self._rows_in_batch = batch.num_rows
                self._columns = [(new, batch.column(name)) for name, new in self._read.items()]
                if number < self._start + self._rows_in_batch:
                    return
        raise JobError(f"{self.path} has fewer rows than it says; write it again")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (self._pyarrow.ArrowException, OSError) as error:
            self._group, self._rows_in_batch = -1, 0
            raise JobError(
                f"{self.path} cannot be read as Parquet: {error}. Write it again, or rename it if it is another format"
            ) from error

    def _line_of(self, index: int) -> bytes:
        """The line of JSON for a row of the batch."""
        fields, problem = [], None
        for name, column in self._columns:
            try:
                value = _json_value(_python_value(column[index]), self._is_data)
            except (ArithmeticError, ImportError, NotImplementedError, TypeError, ValueError) as error:
                problem = problem or f"the column {name!r} ({column.type}) holds what JSON does not have: {error}"
                value = None
            if self._is_data:
                fields.append(f"{json.dumps(name)}:{json_text(value)}")
            elif value is not None:
                is_json = isinstance(value, str) and name in self._json_names and _is_json(value)
                fields.append(f"{json.dumps(name)}:{value if is_json else json.dumps(value, ensure_ascii=False)}")
        line = f"{{{','.join(fields)}}}".encode()
        return line if problem is None else UnreadableLine(line, problem)


def canonical_rows(source: Path | BinaryIO) -> Iterator[bytes]:
    """The rows of a table as bytes, each with a line feed, which depend on the columns' names and values alone: two
    files with equal rows may have other bytes, from another version of pyarrow for example.

    Raises:
        JobError: it cannot be read.
    """
    pyarrow, parquet = import_pyarrow(str(source))
    try:
        # One row group is in memory at a time.
        with parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(_ROWS_OF_BATCH, use_threads=False):
                columns = [[_canonical(pyarrow, each) for each in column] for column in batch.columns]
                for values in zip(*columns, strict=True):
                    named = dict(zip(batch.schema.names, values, strict=True))
                    yield json.dumps(named, ensure_ascii=False, separators=(",", ":"), default=str).encode() + b"\n"
    except (pyarrow.ArrowException, OSError) as error:
        raise JobError(f"{source} cannot be read as Parquet: {error}") from None


def _canonical(pyarrow: Any, scalar: Any) -> Any:
    """A value for JSON. The numbers of an embedding are base64, because JSON takes long for them."""
    numbers = getattr(scalar, "values", None)
    if isinstance(numbers, pyarrow.FloatArray) and not numbers.null_count:
        return base64_of(numbers.to_numpy())
    return _python_value(scalar)


def _num_bytes(group: Any, names: Collection[str]) -> int:
    """Bytes of some columns of a row group, before compression."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    paths = [each.path_in_schema for each in chunks]
    is_ours = [path in names or path.split(".")[0] in names for path in paths]  # a struct has a path for each field
    return sum(each.total_uncompressed_size for each, ours in zip(chunks, is_ours, strict=True) if ours)


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ImportError, OverflowError, ValueError):  # nanoseconds and far years, which Python's datetime does not have
        if hasattr(scalar, "keys"):  # a struct
            fields = [scalar.type.field(index) for index in range(scalar.type.num_fields)]
            return {field.name: _python_value(scalar[index]) for index, field in enumerate(fields)}
        if hasattr(scalar, "values"):  # a list
            return [_python_value(each) for each in scalar.values]
        return scalar.cast("string").as_py().replace(" ", "T", 1)


def _json_value(value: Any, is_data: bool) -> Any:
    """A value of a table as a value of JSON.

    Arrow stores each field of a struct in each row. So null fields and structs of nulls count as absent, unless
    `is_data`. A null in a list stays.

    Raises:
        ValueError: JSON has no such value.
    """
    if isinstance(value, float) and is_data:
        return finite_or_none(value)
    if value is None or isinstance(value, (str, int, float)):
        return value  # also NaN and infinity, for which parse_row has an error
    if isinstance(value, list):
        return [_json_value(each, is_data) for each in value]
    if isinstance(value, dict):
        given = {name: _json_value(each, is_data) for name, each in value.items()}
        return given if is_data else {name: each for name, each in given.items() if each is not None} or None
    if isinstance(value, Decimal):  # the type that some databases give 0.7, or all integers
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, tuple):
        raise ValueError("a map; write a struct, or JSON as a string")
    raise ValueError(f"a value of the type {type(value).__name__}; cast it to a string or a number")


def _is_json(text: str) -> bool:
    """Whether the text is one value of JSON, which a line can hold. parse_row is stricter and has clearer errors."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
