"""The data columns of a job's input: the output repeats them, and no row needs them to run.

They are never in the journal. Output rows are in the input's order, so both are read side by side at the end.
"""

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, count, repeat
from typing import Any

from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.fields import UnreadableLine, fields_of, json_text
from nanovllm.jobs.parquet import ParquetLines, import_pyarrow

logger = logging.getLogger("nanovllm.jobs")

# In the name of a type that JSON cannot express, also inside another type. A colon follows the name of a field.
_NO_JSON = re.compile(r"\b(\w*binary\w*|map|duration|\w*interval|\w*union|extension)\b(?!:)")
_TYPE_NAMES = {bool: "bool", int: "int64", float: "double", str: "string", json_text: "string"}
_MAX_KEYS = 10_000


def with_data(row: bytes, data: bytes) -> bytes:
    """An output row with its data columns as further keys."""
    return row[:-1] + b"," + data + b"}" if data else row


class TableData:
    """The data columns of Parquet files. In a table they keep their types.

    Args:
        parts: the files, opened for their data.
        to_table: the output is a table, not JSON Lines.

    schema: of the columns, with their names in the output.

    Raises:
        JobError: the files' types do not go together, or JSON cannot express a type.
    """

    def __init__(self, parts: list[ParquetLines], to_table: bool):
        self._parts, self._starts = parts, [*accumulate(map(len, parts), initial=0)]
        self._pyarrow, _ = import_pyarrow(parts[0].path)
        self._tables: list[Any] = []
        self._is_warned = False
        self.schema = parts[0].schema
        for part in parts:
            if to_table:
                self._add(part)
            elif bad := [each for each in part.schema if _NO_JSON.search(str(each.type))]:
                raise JobError(
                    f"{part.path}: JSON cannot express the column {bad[0].name!r} ({bad[0].type}); write a Parquet "
                    "output, or drop the column"
                )

    def _add(self, part: ParquetLines) -> None:
        try:
            self.schema = self._pyarrow.unify_schemas([self.schema, part.schema], promote_options="permissive")
        except self._pyarrow.ArrowException as error:
            raise JobError(f"{part.path} has other types than the files before it: {error}") from None

    def text(self, number: int) -> bytes:
        """JSON for a row's data, without braces."""
        part = bisect_right(self._starts, number) - 1
        line = self._parts[part].read(number - self._starts[part])
        if isinstance(line, UnreadableLine) and not self._is_warned:
            self._is_warned = True
            logger.warning("%s; it becomes null in row %d, and in others without a warning", line.problem, number + 1)
        return line[1:-1]

    def sizes(self) -> Iterator[int]:
        """Reads the rows in order, and yields about how many bytes each has."""
        for table in (table for part in self._parts for table in part.tables()):
            # Not safe: an integer that a double rounds must not stop a job whose rows have run.
            self._tables.append(table.select(self.schema.names).cast(self.schema, safe=False))
            yield from repeat(table.nbytes // table.num_rows, table.num_rows)

    def take(self, num_rows: int) -> Any:
        """A table of the next rows, which `sizes` has read."""
        table = self._pyarrow.concat_tables(self._tables)
        self._tables = [table.slice(num_rows)]
        return table.slice(0, num_rows)

    def close(self) -> None:
        for part in self._parts:
            part.close()


class LinesData:
    """The data columns of JSON Lines. In a table, a column has the type of its values if all have one (double, if some
    numbers have a fraction). Any other column holds JSON text.

    Args:
        read: gives the line of a row.
        columns: which keys are data.
    """

    def __init__(self, read: Callable[[int], bytes], columns: Columns):
        self._read, self._columns = read, columns
        self._types: dict[str, set[type]] = {}
        self._rows: list[dict[str, Any]] = []

    def note(self, line: bytes) -> None:
        """Notes the types of a line's values, for a table.

        Raises:
            JobError: a table cannot have that many columns.
        """
        for name, value in self._fields(line).items():
            types = self._types.setdefault(name, set())
            if value is not None:
                types.add(dict if type(value) is int and not -(2**63) <= value < 2**63 else type(value))
        if len(self._types) > _MAX_KEYS:
            raise JobError(f"the input has more than {_MAX_KEYS:,} different keys; write the output as JSON Lines")

    def text(self, number: int) -> bytes:
        """JSON for a row's data, without braces."""
        fields = self._fields(self._read(number))
        return ",".join(f"{json_text(name)}:{json_text(value)}" for name, value in fields.items()).encode()

    @property
    def schema(self) -> Any:
        """The columns' names and types, after `note` of all lines."""
        pyarrow, _ = import_pyarrow("the output")
        return pyarrow.schema([(name, _TYPE_NAMES[self._type_of(name)]) for name in self._types])

    def sizes(self) -> Iterator[int]:
        """Reads the rows in order, and yields about how many bytes each has."""
        for number in count():
            line = self._read(number)
            self._rows.append(self._fields(line))
            yield len(line)

    def take(self, num_rows: int) -> Any:
        """A table of the next rows, which `sizes` has read."""
        types = {name: self._type_of(name) for name in self._types}
        rows, self._rows = self._rows, []  # `sizes` reads no row in advance
        made = [{name: each if each is None else types[name](each) for name, each in row.items()} for row in rows]
        return import_pyarrow("the output")[0].Table.from_pylist(made, self.schema)

    def close(self) -> None:
        pass

    def _type_of(self, name: str) -> Callable[[Any], Any]:
        types = self._types[name]
        if types == {int, float}:
            return float
        return next(iter(types)) if len(types) == 1 and types < _TYPE_NAMES.keys() else json_text

    def _fields(self, line: bytes) -> dict[str, Any]:
        fields = fields_of(line)
        return {new: fields[name] for name, new in self._columns.carried(fields).items()}
