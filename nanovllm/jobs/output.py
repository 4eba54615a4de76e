"""Writes a job's output, lines or a table, from its output rows and the input's data columns.

Neither is in memory as a whole: both are read in the input's order.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanovllm.jobs.data import LinesData, TableData, with_data
from nanovllm.jobs.openai_rows import OPENAI_KINDS
from nanovllm.jobs.output_rows import NUMBERS
from nanovllm.jobs.parquet import import_pyarrow
from nanovllm.jobs.plan import in_pieces
from nanovllm.jobs.vectors import as_line, unpacked

# Rows and bytes of a row group of an output. The writer holds a row group in memory, as readers do.
_ROWS_OF_GROUP, _BYTES_OF_GROUP = 10_000, 2**26
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def write_lines(file: BinaryIO, rows: Iterable[bytes], data: LinesData | TableData | None) -> None:
    """Writes output rows as lines; see `write_parquet`."""
    for number, row in enumerate(rows):
        file.write(line_of(row, data, number))


def line_of(row: bytes, data: LinesData | TableData | None, number: int) -> bytes:
    """One output row as a line."""
    line = as_line(row)
    return (line if data is None else with_data(line, data.text(number))) + b"\n"


def write_parquet(
    file: BinaryIO,
    path: Path,
    rows: Callable[[], Iterator[bytes]],
    kinds: Collection[str],
    data: LinesData | TableData | None,
    has_one_size: bool = False,
) -> None:
    """Writes output rows as a table, row group by row group.

    Args:
        file: is written, and stays open.
        path: the file's name, for errors.
        rows: gives the rows, as `packed` makes them.
        kinds: the kinds of the job's rows, which decide the columns. A row has null where a column does not apply to
            it.
        data: the input's data columns, which follow the columns of the rows.
        has_one_size: all embeddings have the same size.
    """
    pyarrow, parquet = import_pyarrow(path)
    vectors = (vector for _, vector in map(unpacked, rows() if has_one_size else ()) if vector is not None)
    schema = _schema_of(pyarrow, kinds, next((vector.size for vector in vectors), -1))
    codec = "zstd" if pyarrow.Codec.is_available("zstd") else "snappy"
    whole = schema if data is None else pyarrow.schema([*schema, *data.schema])
    extras = repeat((None, 0)) if data is None else data.rows()
    pairs = zip(rows(), extras, strict=False)
    sized = (((_table_row(row), extra), len(row) + size) for row, (extra, size) in pairs)
    # A dictionary of equal values makes embeddings eight times slower to read.
    dictionaries: Any = "embedding" not in schema.names or [name for name in whole.names if name != "embedding"]
    with parquet.ParquetWriter(file, whole, compression=codec, use_dictionary=dictionaries) as writer:
        for group in in_pieces(sized, _ROWS_OF_GROUP, _BYTES_OF_GROUP):
            columns = pyarrow.Table.from_pylist([row for row, _ in group], schema).columns
            if "embedding" in schema.names:
                place = schema.get_field_index("embedding")
                columns[place] = _vectors(pyarrow, schema.field(place).type, [row["vector"] for row, _ in group])
            columns += [] if data is None else data.table([extra for _, extra in group]).columns
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=whole))


def _vectors(pyarrow: Any, kind: Any, vectors: Sequence[np.ndarray | None]) -> Any:
    """A column of embeddings, each of the list type `kind` or null."""
    is_there = pyarrow.array([vector is not None for vector in vectors])
    size = getattr(kind, "list_size", 0)
    found = [np.zeros(size, np.float32) if vector is None else vector for vector in vectors]
    ends = np.cumsum([0, *map(len, found)], dtype=np.int32)
    buffers = [is_there.buffers()[1], *([] if size else [pyarrow.py_buffer(ends)])]
    return pyarrow.Array.from_buffers(kind, len(found), buffers, children=[pyarrow.array(np.concatenate(found))])


def _schema_of(pyarrow: Any, kinds: Collection[str], size: int) -> Any:
    """The columns of the rows.

    size: of all embeddings, or −1 if they differ.
    """
    string, integer, numbers = pyarrow.string(), pyarrow.int64(), pyarrow.list_(pyarrow.float32())
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
    of_tasks = {
        "embedding": pyarrow.list_(pyarrow.float32(), size),
        "label": string,
        "probs": numbers,
        "logprobs": numbers,
        "score": pyarrow.float64(),
        "data": numbers,
        "num_prompt_tokens": integer,
    }
    plain = {
        "text": string,
        "num_prompt_tokens": integer,
        "outputs": pyarrow.list_(pyarrow.struct(list(completion.items()))),
        "prompt_logprobs": string,
    }
    is_openai, is_plain = not OPENAI_KINDS.isdisjoint(kinds), "plain" in kinds or not kinds
    used = {name for kind in kinds if kind in NUMBERS for name in (*NUMBERS[kind], "num_prompt_tokens")}
    columns = {"id": string, **(openai if is_openai else {}), **(plain if is_plain else {})}
    columns |= {name: kind for name, kind in of_tasks.items() if name in used}
    return pyarrow.schema(list({**columns, "error": string, "row": integer}.items()))


def _table_row(packed: bytes) -> dict[str, Any]:
    """An output row as a row of the table: fields without a fixed shape become JSON text. "vector" is the embedding."""
    text, vector = unpacked(packed)
    row = json.loads(text)
    if "custom_id" in row:
        row = row if vector is None else json.loads(as_line(packed))
        return {**row, "response": _text_of(row["response"]), "error": _text_of(row["error"]), "vector": None}
    if "outputs" not in row:
        return {**row, "label": _label_text(row.get("label")), "embedding": None, "vector": vector}
    outputs = [
        {**each, "stop_reason": _text_of(each.get("stop_reason"), str), "logprobs": _text_of(each.get("logprobs"))}
        for each in row["outputs"]
    ]
    return {
        **row,
        "text": outputs[0]["text"] if outputs else None,
        "outputs": outputs,
        "prompt_logprobs": _text_of(row.get("prompt_logprobs")),
        "vector": None,
    }


def _label_text(label: Any) -> str | None:
    return label if isinstance(label, str) else _text_of(label)


def _text_of(value: Any, write: Callable[[Any], str] = _ENCODER.encode) -> str | None:
    return None if value is None else write(value)
