"""Parquet files as a job's input and output. pyarrow is imported only for them.

A row of an input table becomes an equal line of JSON, so that there is one parser of rows. The journal is JSON lines in
any case, and the output table is made of it at the end.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.fields import MAX_BYTES_OF_LINE, UnreadableLine
from nanovllm.jobs.plan import in_pieces

# Rows and bytes of an input that are decoded at once. The bytes are unknown if equal values are stored once, so the
# number of rows is small.
_ROWS_OF_BATCH, _BYTES_OF_BATCH = 128, 2**22
# Without a buffer of this size, or with pre_buffer, pyarrow reads a column's whole part of a row group.
_BYTES_OF_BUFFER = 2**18
# Rows and bytes of a row group of an output. The writer holds a row group in memory, as readers do.
_ROWS_OF_GROUP, _BYTES_OF_GROUP = 10_000, 2**26
# A row that is too long keeps only the fields with fewer characters than this.
_SHORT = 4096
# Columns whose strings may be JSON text; a prompt never is.
_JSON_COLUMNS = ("params", "chat_template_kwargs", "body", "messages")
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def is_parquet(path: str) -> bool:
    """Whether the name ends in ".parquet"."""
    return Path(path).suffix.lower() == ".parquet"


def import_pyarrow(path: str | Path) -> tuple[Any, Any]:
    """Imports and returns the modules pyarrow and pyarrow.parquet.

    path: the file that needs them, for the JobError if they are missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise JobError(
            f"{path} is a Parquet file, which needs pyarrow ({error}); install it (pip install pyarrow), or use JSON "
            "Lines"
        ) from None
    return pyarrow, pyarrow.parquet


class ParquetLines:
    """The rows of a Parquet file, with the interface of `Lines`.

    A row's line has the columns that are not null. One batch of rows is in memory. Reading forward from there is fast;
    reading backward decodes the row group from its start again.

    Args:
        path: the file.

    Raises:
        JobError: pyarrow is missing, or the file is not a whole Parquet file; later reads may find that too.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str):
        self._path = path
        self._pyarrow, parquet = import_pyarrow(path)
        self.digest = ""
        self._bytes: BinaryIO = open(path, "rb")  # noqa: SIM115 - close() closes it
        try:
            with self._reading():
                self._file = parquet.ParquetFile(self._bytes, buffer_size=_BYTES_OF_BUFFER, pre_buffer=False)
            names = self._file.schema_arrow.names
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise JobError(f"{path} has the column {twice!r} twice; leave one out")
        except BaseException:
            self._bytes.close()
            raise
        metadata = self._file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._num_rows: int = metadata.num_rows
        self._starts = list(accumulate((group.num_rows for group in groups), initial=0))[:-1]
        # The byte sizes of row groups are those before compression.
        sizes = [group.total_byte_size // max(group.num_rows, 1) for group in groups]
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
            with self._reading():
                self._move_to(number)
        return _line_of(self._columns, number - self._start)

    def close(self) -> None:
        self._batches, self._columns = iter(()), []
        self._bytes.close()

    def _move_to(self, number: int) -> None:
        group = bisect_right(self._starts, number) - 1
        if group != self._group or number < self._start:
            # Without threads: most of the time goes into making Python's values of a batch, not into decoding it.
            self._batches = self._file.iter_batches(self._rows_of_batch[group], [group], use_threads=False)
            self._group, self._start, self._rows_in_batch = group, self._starts[group], 0
        for batch in self._batches:
            self._start += self._rows_in_batch
            self._rows_in_batch = batch.num_rows
            self._columns = list(zip(batch.schema.names, batch.columns, strict=True))
            if number < self._start + self._rows_in_batch:
                return
        raise JobError(f"{self._path} has fewer rows than it says; write it again")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (self._pyarrow.ArrowException, OSError) as error:
            self._group, self._rows_in_batch = -1, 0
            raise JobError(
                f"{self._path} cannot be read as Parquet: {error}. Write it again, or rename it if it is another format"
            ) from error


def _line_of(columns: list[tuple[str, Any]], index: int) -> bytes:
    """The line of JSON for a row of a batch."""
    fields, problem = [], None
    for name, column in columns:
        try:
            value = _json_value(column[index].as_py())
        except (ArithmeticError, ImportError, NotImplementedError, TypeError, ValueError) as error:
            problem = problem or f"the column {name!r} ({column.type}) holds what JSON does not have: {error}"
            continue
        if value is None:
            continue
        is_json = isinstance(value, str) and name in _JSON_COLUMNS and _is_json(value)
        fields.append(f"{json.dumps(name)}:{value if is_json else json.dumps(value, ensure_ascii=False)}")
    line = f"{{{','.join(fields)}}}".encode()
    if len(line) > MAX_BYTES_OF_LINE:
        problem = problem or f"the row has {len(line):,} bytes of JSON, more than {MAX_BYTES_OF_LINE:,}"
        line = f"{{{','.join(each for each in fields if len(each) < _SHORT)}}}".encode()  # the id among them
    return line if problem is None else UnreadableLine(line, problem)


def _json_value(value: Any) -> Any:
    """A value of a table as a value of JSON.

    Arrow stores each field of a struct in each row. So null fields and structs of nulls count as absent. A null in a
    list stays.

    Raises:
        ValueError: JSON has no such value.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value  # also NaN and infinity, for which parse_row has an error
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    if isinstance(value, dict):
        given = {name: _json_value(each) for name, each in value.items()}
        return {name: each for name, each in given.items() if each is not None} or None
    if isinstance(value, Decimal):  # the type that some databases give 0.7, or all integers
        return int(value) if value == value.to_integral_value() else float(value)
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


def write_parquet(file: BinaryIO, path: Path, rows: Iterable[bytes], kinds: Collection[str]) -> None:
    """Writes output rows as a table, row group by row group.

    Args:
        file: is written, and stays open.
        path: the file's name, for errors.
        rows: lines of JSON as `output_of` makes them.
        kinds: the kinds of the job's rows, which decide the columns. A row has null where a column does not apply to
            it.
    """
    pyarrow, parquet = import_pyarrow(path)
    schema = _schema_of(pyarrow, kinds)
    codec = "zstd" if pyarrow.Codec.is_available("zstd") else "snappy"
    sized = ((_table_row(json.loads(row)), len(row)) for row in rows)
    with parquet.ParquetWriter(file, schema, compression=codec) as writer:
        for group in in_pieces(sized, _ROWS_OF_GROUP, _BYTES_OF_GROUP):
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


def _schema_of(pyarrow: Any, kinds: Collection[str]) -> Any:
    string, integer = pyarrow.string(), pyarrow.int64()
    completion = {
        "index": integer,
        "text": string,
        "finish_reason": string,
        "stop_reason": string,
        "num_tokens": integer,
        "token_ids": pyarrow.list_(integer),
        "cumulative_logprob": pyarrow.float64(),
        "logprobs": string,
    }
    openai = {"custom_id": string, "response": string}
    plain = {
        "text": string,
        "num_prompt_tokens": integer,
        "outputs": pyarrow.list_(pyarrow.struct(list(completion.items()))),
        "prompt_logprobs": string,
    }
    is_openai, is_plain = bool(set(kinds) - {"plain"}), "plain" in kinds or not kinds
    columns = {"id": string, **(openai if is_openai else {}), **(plain if is_plain else {})}
    return pyarrow.schema(list({**columns, "error": string, "row": integer}.items()))


def _table_row(row: dict[str, Any]) -> dict[str, Any]:
    """An output row as a row of the table: fields without a fixed shape become JSON text."""
    if "custom_id" in row:
        return {**row, "response": _text_of(row["response"]), "error": _text_of(row["error"])}
    outputs = [
        {**each, "stop_reason": _text_of(each.get("stop_reason"), str), "logprobs": _text_of(each.get("logprobs"))}
        for each in row["outputs"]
    ]
    text = outputs[0]["text"] if outputs else None
    return {**row, "text": text, "outputs": outputs, "prompt_logprobs": _text_of(row.get("prompt_logprobs"))}


def _text_of(value: Any, write: Callable[[Any], str] = _ENCODER.encode) -> str | None:
    return None if value is None else write(value)
