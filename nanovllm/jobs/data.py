"""The data columns of a job's input: the output repeats them, and no row needs them to run.

They are never in the journal. Output rows are in the input's order, so both are read side by side at the end.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, count, groupby
from typing import Any

from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.fields import UnreadableLine, fields_of, json_text
from nanovllm.jobs.parquet import ParquetLines, import_pyarrow

logger = logging.getLogger("nanovllm.jobs")

# Types that JSON cannot express.
_NO_JSON = ("binary", "large_binary", "fixed_size_binary", "binary_view", "map", "duration", "interval", "union")
_TYPE_NAMES = {bool: "bool", int: "int64", float: "double", str: "string", json_text: "string"}
# A double holds every integer up to this one.
_MAX_EXACT = 2**53
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
        self._is_warned, self._to_table = False, to_table
        self.schema = parts[0].schema
        for part in parts:
            if to_table:
                self._add(part)
            elif bad := [each for each in part.schema if self._lacks_json(each.type)]:
                raise JobError(
                    f"{part.path}: JSON cannot express the column {bad[0].name!r} ({bad[0].type}); write a Parquet "
                    "output, or drop the column"
                )

    def _add(self, part: ParquetLines) -> None:
        try:
            self.schema = self._pyarrow.unify_schemas([self.schema, part.schema], promote_options="permissive")
        except self._pyarrow.ArrowException as error:
            raise JobError(f"{part.path} has other types than the files before it: {error}") from None

    def _lacks_json(self, kind: Any) -> bool:
        types = self._pyarrow.types
        if types.is_struct(kind):
            return any(self._lacks_json(kind.field(index).type) for index in range(kind.num_fields))
        if hasattr(kind, "value_type") and not types.is_map(kind):  # a list or a dictionary
            return self._lacks_json(kind.value_type)
        is_named = any(getattr(types, f"is_{name}", lambda kind: False)(kind) for name in _NO_JSON)
        return is_named or isinstance(kind, self._pyarrow.BaseExtensionType)

    def check(self) -> None:
        """Reads all data once, so that no value can stop the job when its rows have run.

        Raises:
            JobError: a file is damaged, or a value does not fit the type of its column in all files.
        """
        for part in self._parts:
            for table in part.tables():
                self._cast(part.path, table)

    def _cast(self, path: str, table: Any) -> Any:
        if not self._to_table:
            return table
        columns = []
        for field in self.schema:
            try:
                columns.append(table[field.name].cast(field.type))
            except self._pyarrow.ArrowException as error:
                raise JobError(
                    f"{path}: a value of the column {field.name!r} does not fit {field.type}, its type in all files "
                    f"together ({error}); give the column one type"
                ) from None
        return self._pyarrow.Table.from_arrays(columns, schema=self.schema)

    def text(self, number: int) -> bytes:
        """JSON for a row's data, without braces."""
        part = bisect_right(self._starts, number) - 1
        line = self._parts[part].read(number - self._starts[part])
        if isinstance(line, UnreadableLine) and not self._is_warned:
            self._is_warned = True
            logger.warning("%s; it becomes null in row %d, and in others without a warning", line.problem, number + 1)
        return line[1:-1]

    def rows(self) -> Iterator[tuple[Any, int]]:
        """Each row, in order, with about how many bytes it has."""
        for part in self._parts:
            for table in part.tables():
                whole = self._cast(part.path, table)
                yield from (((whole, row), table.nbytes // table.num_rows) for row in range(table.num_rows))

    def table(self, rows: list[Any]) -> Any:
        """A table of some of these rows, which are neighbours."""
        groups = [list(group) for _, group in groupby(rows, key=lambda row: id(row[0]))]
        return self._pyarrow.concat_tables([group[0][0].slice(group[0][1], len(group)) for group in groups])

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

    def note(self, line: bytes) -> None:
        """Notes the types of a line's values, for a table.

        Raises:
            JobError: a table cannot have that many columns.
        """
        for name, value in self._fields(line).items():
            types = self._types.setdefault(name, set())
            if value is not None:
                kind = type(value)
                if kind is int and abs(value) > _MAX_EXACT:  # `complex` beside floats, which would round it
                    kind = complex if -(2**63) <= value < 2**63 else dict
                types.add(kind)
        if len(self._types) > _MAX_KEYS:
            raise JobError(f"the input has more than {_MAX_KEYS:,} different keys; write the output as JSON Lines")

    def warn_of_text(self) -> None:
        """Warns of columns that become JSON text, after `note` of all lines."""
        for name, types in self._types.items():
            if types and self._type_of(name) is json_text:
                kinds = "values of several types" if len(types) > 1 else "objects, lists or very large integers"
                logger.warning("the column %r holds %s: it becomes JSON text", name, kinds)

    def text(self, number: int) -> bytes:
        """JSON for a row's data, without braces."""
        fields = self._fields(self._read(number))
        return ",".join(f"{json_text(name)}:{json_text(value)}" for name, value in fields.items()).encode()

    @property
    def schema(self) -> Any:
        """The columns' names and types, after `note` of all lines."""
        pyarrow, _ = import_pyarrow("the output")
        return pyarrow.schema([(name, _TYPE_NAMES[self._type_of(name)]) for name in self._types])

    def rows(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Each row, in order, with about how many bytes it has."""
        num_bytes = 8 * len(self._types)  # a table has a cell for each column
        return ((self._fields(line), len(line) + num_bytes) for line in map(self._read, count()))

    def table(self, rows: list[Any]) -> Any:
        """A table of some of these rows."""
        types = {name: self._type_of(name) for name in self._types}
        made = [{name: each if each is None else types[name](each) for name, each in row.items()} for row in rows]
        return import_pyarrow("the output")[0].Table.from_pylist(made, self.schema)

    def close(self) -> None:
        pass

    def _type_of(self, name: str) -> Callable[[Any], Any]:
        types = self._types[name]
        if types == {int, float}:
            return float
        if complex in types and types <= {int, complex}:
            return int
        return next(iter(types)) if len(types) == 1 and types < _TYPE_NAMES.keys() else json_text

    def _fields(self, line: bytes) -> dict[str, Any]:
        fields = fields_of(line)
        return {new: fields[name] for name, new in self._columns.carried(fields).items()}
