"""Writes a job's output, lines or a table, from its output rows and the input's data columns.

Neither is in memory as a whole: both are read in the input's order.
"""

import json
from collections.abc import Callable, Collection, Iterable
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

from nanovllm.jobs.data import LinesData, TableData, with_data
from nanovllm.jobs.parquet import import_pyarrow
from nanovllm.jobs.plan import in_pieces

# Rows and bytes of a row group of an output. The writer holds a row group in memory, as readers do.
_ROWS_OF_GROUP, _BYTES_OF_GROUP = 10_000, 2**26
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def write_lines(file: BinaryIO, rows: Iterable[bytes], data: LinesData | TableData | None) -> None:
    """Writes output rows as lines; see `write_parquet`."""
    for number, row in enumerate(rows):
        file.write((row if data is None else with_data(row, data.text(number))) + b"\n")


def write_parquet(
    file: BinaryIO, path: Path, rows: Iterable[bytes], kinds: Collection[str], data: LinesData | TableData | None
) -> None:
    """Writes output rows as a table, row group by row group.

    Args:
        file: is written, and stays open.
        path: the file's name, for errors.
        rows: lines of JSON as `output_of` makes them.
        kinds: the kinds of the job's rows, which decide the columns. A row has null where a column does not apply to
            it.
        data: the input's data columns, which follow the columns of the rows.
    """
    pyarrow, parquet = import_pyarrow(path)
    schema = _schema_of(pyarrow, kinds)
    codec = "zstd" if pyarrow.Codec.is_available("zstd") else "snappy"
    whole = schema if data is None else pyarrow.schema([*schema, *data.schema])
    extras = repeat((None, 0)) if data is None else data.rows()
    pairs = zip(rows, extras, strict=False)
    sized = (((_table_row(json.loads(row)), extra), len(row) + size) for row, (extra, size) in pairs)
    with parquet.ParquetWriter(file, whole, compression=codec) as writer:
        for group in in_pieces(sized, _ROWS_OF_GROUP, _BYTES_OF_GROUP):
            columns = pyarrow.Table.from_pylist([row for row, _ in group], schema).columns
            columns += [] if data is None else data.table([extra for _, extra in group]).columns
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=whole))


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
