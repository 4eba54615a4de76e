"""Parquet in jobs: a table's rows are those of the same JSON lines, and an output table has one declared schema."""

import decimal
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_llm import FakeLLM
from support.long import long

from nanovllm import CompletionOutput, RequestOutput, TokenLogprobs
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import output, parquet, rows
from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import Job, JobOptions
from nanovllm.jobs.parquet import ParquetLines
from nanovllm.jobs.rows import parse_row
from nanovllm.jobs.source import Lines
from nanovllm.token_texts import TokenPiece

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

MODEL = str(MODEL_DIRECTORY)
COMPLETION = {
    "index": pa.int64(),
    "text": pa.string(),
    "finish_reason": pa.string(),
    "stop_reason": pa.string(),
    "num_tokens": pa.int64(),
    "token_ids": pa.list_(pa.int64()),
    "cumulative_logprob": pa.float64(),
    "logprobs": pa.string(),
}
PLAIN = {
    "text": pa.string(),
    "num_prompt_tokens": pa.int64(),
    "outputs": pa.list_(pa.struct(list(COMPLETION.items()))),
    "prompt_logprobs": pa.string(),
}
OPENAI = {"custom_id": pa.string(), "response": pa.string()}
ID, LAST = {"id": pa.string()}, {"error": pa.string(), "row": pa.int64()}
PARAMS = pa.struct([("max_tokens", pa.int64()), ("temperature", pa.float64()), ("stop", pa.list_(pa.string()))])


@pytest.fixture(autouse=True)
def nothing_made():
    FakeLLM.made = []


@pytest.fixture
def job(tmp_path):
    """Runs a job of this table (or of JSON lines) to `out.parquet`, or to `output`; returns (report, output)."""

    def run(rows=None, llm=FakeLLM, output="out.parquet", **options):
        if isinstance(rows, pa.Table):
            pq.write_table(rows, tmp_path / "in.parquet", row_group_size=options.pop("row_group_size", None))
        elif rows is not None:
            (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = tmp_path / ("in" if (tmp_path / "in").exists() else "in.parquet")
        path = tmp_path / output
        default = JobOptions(str(source), str(path), MODEL, preflight="off")
        report = Job(replace(default, **options), llm).run()
        if not path.exists():
            return report, None
        if path.suffix == ".parquet":
            return report, pq.read_table(path)
        return report, [json.loads(line) for line in path.read_text().splitlines()]

    return run


def plain(count):
    return [{"id": f"r{number}", "prompt": f"prompt {number}"} for number in range(count)]


def openai(name, **body):
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name, **body}}


def open_source(path) -> ParquetLines:
    return ParquetLines(str(path), Columns())


def parsed(source) -> list:
    """The rows of a source, which is closed afterwards."""
    rows = [parse_row(number, line) for number, line in enumerate(source.scan())]
    assert len(source) == len(rows)
    source.close()
    return rows


def rows_of(path, table, **options) -> list:
    pq.write_table(table, path / "t.parquet", **options)
    return parsed(open_source(path / "t.parquet"))


def error_of(path, **columns) -> str:
    """The error of the one row of a table, whose id is 7 if no column says otherwise."""
    (row,) = rows_of(path, pa.table({"custom_id" if "body" in columns else "id": [7], **columns}))
    assert row.error is not None and row.prompt is None and (row.id == "7" or "id" in columns)
    return row.error


# Input

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
token_lists = st.lists(st.integers(0, 99), max_size=4)
params = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(0, 9),
        "temperature": st.floats(-1, 2),
        "stop": st.lists(texts, min_size=1, max_size=2),
    },
)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"])}, optional={"content": texts}), max_size=3
)
plain_rows = st.fixed_dictionaries(
    {},
    optional={
        "id": texts, "prompt": texts, "token_ids": token_lists, "messages": conversations, "params": params,
        "chat_template_kwargs": st.fixed_dictionaries({"enable_thinking": st.booleans()}),
    },
)  # fmt: skip
openai_rows = st.fixed_dictionaries(
    {"custom_id": texts, "url": st.just("/v1/chat/completions")},
    optional={
        "method": st.sampled_from(["POST", "GET"]),
        "body": st.fixed_dictionaries({"messages": conversations}, optional={"max_tokens": st.integers(0, 9)}),
    },
)
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
STRUCTS = pa.schema(
    {
        "id": pa.string(), "prompt": pa.string(), "token_ids": pa.list_(pa.int32()), "messages": MESSAGES,
        "params": PARAMS, "chat_template_kwargs": pa.struct([("enable_thinking", pa.bool_())]),
        "custom_id": pa.dictionary(pa.int32(), pa.string()), "url": pa.string(),
        "method": pa.string(), "body": pa.struct([("messages", MESSAGES), ("max_tokens", pa.int16())]),
    }
)  # fmt: skip
JSON_COLUMNS = ("messages", "params", "chat_template_kwargs", "body")


@given(st.lists(plain_rows | openai_rows, max_size=8), st.sets(st.sampled_from(JSON_COLUMNS)), st.integers(1, 9))
def test_a_table_gives_the_rows_of_the_same_lines(tmp_path_factory, rows, as_json, row_group_size):
    """Columns with structure may be structs or JSON text."""
    path = tmp_path_factory.mktemp("table")
    # Arrow cannot tell an empty struct from one of nulls alone.
    rows = [{name: value for name, value in row.items() if value != {}} for row in rows]
    (path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema = STRUCTS
    for name in as_json:
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
    table = [{name: json.dumps(each) if name in as_json else each for name, each in row.items()} for row in rows]
    found = rows_of(path, pa.Table.from_pylist(table, schema), row_group_size=row_group_size)
    assert found == parsed(Lines(str(path / "in")))


@given(st.lists(st.integers(0, 99), max_size=30), st.integers(1, 40), st.integers(1, 40))
def test_rows_are_read_in_any_order(tmp_path_factory, numbers, row_group_size, rows_of_batch):
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    pq.write_table(pa.table({"id": range(100)}), path, row_group_size=row_group_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_ROWS_OF_BATCH", rows_of_batch)
        source = open_source(path)
    assert [source.read(number) for number in numbers] == [b'{"id":%d}' % number for number in numbers]
    source.close()


def test_reading_on_decodes_each_row_group_once(tmp_path, monkeypatch):
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "t.parquet", row_group_size=100)
    decoded = []

    class Counting(pq.ParquetFile):
        def iter_batches(self, rows_of_batch, groups, *others, **options):
            decoded.extend(groups)
            return super().iter_batches(rows_of_batch, groups, *others, **options)

    monkeypatch.setattr(pq, "ParquetFile", Counting)
    source = open_source(tmp_path / "t.parquet")
    assert len(list(source.scan())) == 1000 and decoded == list(range(10))
    decoded.clear()
    assert [source.read(number) for number in range(0, 1000, 30)] and decoded == list(range(10))
    source.close()


def test_groups_without_rows_and_tables_without_rows_are_read(tmp_path):
    schema = pa.schema({"id": pa.int64()})
    with pq.ParquetWriter(tmp_path / "t.parquet", schema) as writer:
        for numbers in ([], [0, 1], [], [2], []):
            writer.write_table(pa.table({"id": numbers}, schema))
    assert [row.id for row in parsed(open_source(tmp_path / "t.parquet"))] == ["0", "1", "2"]
    assert rows_of(tmp_path, pa.table({"id": []}, schema)) == []


def test_what_is_null_was_not_given(tmp_path):
    structs = pa.struct([("temperature", pa.float64()), ("nested", pa.struct([("x", pa.int64())]))])
    table = pa.table(
        {
            "id": [1, 2, 3],
            "prompt": ["a", "b", None],
            "token_ids": pa.array([None, None, [1, 2]], pa.list_(pa.int64())),
            "params": pa.array([{"temperature": 0.0}, {"nested": {"x": None}}, None], structs),
            "custom_id": pa.nulls(3),
        }
    )
    rows = rows_of(tmp_path, table)
    assert [(row.prompt, row.params, row.error) for row in rows] == [
        ("a", {"temperature": 0.0}, None),
        ("b", {}, None),
        ([1, 2], {}, None),
    ]


def test_a_null_in_json_text_is_a_value(tmp_path):
    (row,) = rows_of(tmp_path, pa.table({"id": [1], "prompt": ["a"], "params": ['{"max_tokens": null}']}))
    assert row.params == {"max_tokens": None} and row.error is None


def test_a_null_in_a_list_keeps_its_place(tmp_path):
    assert "[1, None]" in error_of(tmp_path, token_ids=[[1, None]])


def test_decimals_are_numbers(tmp_path):
    """Some databases turn 0.7, and all integers, into decimals."""
    one, point_seven = decimal.Decimal("12"), decimal.Decimal("0.70")
    table = {"id": [one], "prompt": ["a"], "params": [{"max_tokens": one, "temperature": point_seven}]}
    (row,) = rows_of(tmp_path, pa.table(table))
    assert (row.id, row.params, row.error) == ("12", {"max_tokens": 12, "temperature": 0.7}, None)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("prompt", pa.array([b"raw"]), "the column 'prompt' (binary) holds what JSON does not have: a value of"),
        ("prompt", pa.array([1], pa.duration("s")), "a value of the type timedelta; cast it to a string or a number"),
        ("prompt", pa.array([b"\xff"]).cast(pa.binary()).view(pa.string()), "can't decode byte 0xff"),
        ("params", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "a map; write a struct"),
        ("params", pa.array([{"top_p": float("nan")}]), "the line holds NaN"),
        ("params", pa.array([{"top_p": [float("-inf")]}]), "the line holds -Infinity"),
        ("params", pa.array([{"stop": [b"raw"]}]), "'params' (struct<stop: list<"),
        ("params", pa.array(['{"top_p": 1']), '"params" must be an object'),
        ("params", pa.array(['{}, "prompt": "smuggled"']), '"params" must be an object'),
        ("params", pa.array(['{"top_p": NaN}']), "the line holds NaN"),
        ("params", pa.array(['{"top_p": 1, "top_p": 1}']), "the key 'top_p' twice"),
        ("body", pa.array(["x"]), '"body" must be an object'),
        ("messages", pa.array(["Hello"]), '"messages" must be a list'),
        ("id", pa.array([1.5]), '"id" must be a string or an integer, not 1.5'),
        ("id", pa.array([b"raw"]), "the column 'id' (binary)"),
    ],
)
def test_a_value_that_json_lacks_is_its_rows_error(tmp_path, name, values, message):
    other = {"url": ["/v1/completions"]} if name == "body" else {} if name == "messages" else {"prompt": ["a"]}
    assert message in error_of(tmp_path, **{**other, name: values})


def test_a_row_that_is_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_BYTES_OF_LINE", 1000)
    short, long = rows_of(tmp_path, pa.table({"prompt": ["a", "a" * 5000], "id": [1, 2]}))
    assert short.error is None and long.id == "2"
    assert "the row has more than 1,000 bytes of JSON" in long.error


def test_a_broken_file_is_refused_with_its_name(tmp_path):
    path = tmp_path / "t.parquet"
    with pytest.raises(FileNotFoundError, match=r"t\.parquet"):
        open_source(path)
    pq.write_table(pa.table({"id": [str(number) for number in range(9999)]}), path)
    good = path.read_bytes()
    for bad in (b"", b'{"id": 1, "prompt": "a"}\n', good[:-100]):
        path.write_bytes(bad)
        with pytest.raises(JobError, match=r"t\.parquet cannot be read as Parquet: .*Write it again"):
            open_source(path)
    path.write_bytes(good[:100] + b"\xff" * 500 + good[600:])
    source = open_source(path)
    with pytest.raises(JobError, match=r"t\.parquet cannot be read as Parquet"):
        list(source.scan())
    source.close()
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["id", "id"]), path)
    with pytest.raises(JobError, match="has the column 'id' twice"):
        open_source(path)


def test_the_digest_is_of_the_whole_file(tmp_path):
    digests = set()
    for metadata in ({}, {"a": "b"}):
        pq.write_table(pa.table({"id": [1]}).replace_schema_metadata(metadata), tmp_path / "t.PARQUET")
        source = open_source(tmp_path / "t.PARQUET")
        assert list(source.scan()) == [b'{"id":1}']
        digests.add(source.digest)
        source.close()
    assert len(digests) == 2


@pytest.mark.parametrize(("size", "most"), [(3_000, 40_000), long(1_000_000, 120)])
def test_one_large_row_group_is_not_read_as_a_whole(tmp_path, size, most, count):
    """The peak is not that of getrusage, which a process inherits from the one that started it."""
    program = (
        "import re, sys\nfrom nanovllm.jobs.columns import Columns\nfrom nanovllm.jobs.parquet import ParquetLines\n"
        "peaks = []\n"
        "for name in ('small', 'large'):\n"
        "    source = ParquetLines(sys.argv[1] + '/' + name + '.parquet', Columns())\n"
        "    num_bytes = sum(map(len, source.scan()))\n"
        "    source.close()\n"
        "    peaks.append(int(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1]))\n"
        "print((peaks[1] - peaks[0]) / 1024, num_bytes / 2**20)"
    )
    rng = random.Random(0)
    most = count(most // 2, most)
    for name, num_rows in (("small", most // 12), ("large", most)):
        prompts = [rng.randbytes(size // 2).hex() for _ in range(num_rows)]
        table = pa.table({"id": range(num_rows), "prompt": prompts})
        # A page is decoded as a whole, and pyarrow ends no page within a batch.
        pq.write_table(table, tmp_path / f"{name}.parquet", use_dictionary=False, write_batch_size=4)
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    growth, num_mib = map(float, done.stdout.split())
    assert num_mib > 0.95 * size * most / 2**20 > 50 and growth < 25, done.stdout


# Output


def test_a_table_gives_a_table_in_the_inputs_order(job, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_ROWS_OF_GROUP", 64)
    rows = [*plain(199), {"id": "", "prompt": "x"}]
    report, table = job(pa.Table.from_pylist(rows), row_group_size=30)
    assert report["rows"] == {"total": 200, "finished": 200, "finished_before": 0, "errors": 1}
    assert table.schema.remove_metadata() == pa.schema({**ID, **PLAIN, **LAST})
    assert pq.ParquetFile(tmp_path / "out.parquet").metadata.num_row_groups == 4
    assert table["id"].to_pylist() == [*(row["id"] for row in rows[:199]), None]
    found = table.to_pylist()
    assert all(row["text"] == row["outputs"][0]["text"] and row["error"] is None for row in found[:199])
    assert len({row["text"] for row in found}) == 200
    assert (found[199]["text"], found[199]["outputs"], found[199]["row"]) == (None, [], 200)
    assert '"id" must have' in found[199]["error"] and all(row["row"] is None for row in found[:199])
    assert sorted(os.listdir(tmp_path)) == ["in.parquet", "out.parquet", "out.parquet.job"]


def test_lines_and_tables_give_the_same_results(job):
    rows = plain(50)
    rows[3]["params"], rows[7]["params"] = {"n": 2}, {"temperature": -1.0}
    _, lines = job(rows, output="out")
    _, table = job(output="out.parquet")
    _, lines_of_table = job(output="other")
    assert lines == lines_of_table
    for line, row in zip(lines, table.to_pylist(), strict=True):
        row["outputs"] = [{name: each for name, each in one.items() if each is not None} for one in row["outputs"]]
        assert {name: row[name] for name in line} == line


def test_a_table_in_and_lines_out(job):
    _, found = job(pa.Table.from_pylist(plain(5)), output="out")
    assert [(row["id"], row["error"]) for row in found] == [(f"r{number}", None) for number in range(5)]


@pytest.mark.parametrize("row_group_size", [None, 7])
def test_only_the_missing_rows_of_a_table_run_again(job, tmp_path, row_group_size):
    table = pa.Table.from_pylist(plain(300))
    _, whole = job(table, output="whole.parquet", row_group_size=row_group_size)

    class Killed(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 100:
                raise RuntimeError("killed")
            return super().complete(number, prompt, params)

    FakeLLM.made = []
    with pytest.raises(RuntimeError, match="killed"):
        job(llm=Killed)
    assert not (tmp_path / "out.parquet").exists()
    report, found = job()
    assert report["rows"]["finished_before"] == 100 and len(FakeLLM.made) == 300 and found.equals(whole)


def test_another_table_is_another_job(job, tmp_path):
    job(pa.Table.from_pylist(plain(5)))
    (tmp_path / "out.parquet").unlink()
    with pytest.raises(JobError, match=r"the input has changed\. Run"):
        job(pa.Table.from_pylist(plain(5)), row_group_size=2)


def test_ids_are_unique_across_row_groups(job):
    rows = [*plain(40), *plain(40)]
    random.Random(0).shuffle(rows)
    _, table = job(pa.Table.from_pylist(rows), row_group_size=7)
    first = {}
    for number, row in enumerate(table.to_pylist()):
        if (place := first.setdefault(row["id"], number)) == number:
            assert row["error"] is None
        else:
            assert f"row {place + 1} has the same id" in row["error"]


def test_openai_rows_have_columns_of_their_own(job):
    rows = [openai("a"), {**openai("b"), "body": json.dumps({"prompt": "b", "temperature": -1})}]
    rows[0]["body"] = json.dumps(rows[0]["body"])
    _, table = job(pa.Table.from_pylist(rows))
    assert table.schema.remove_metadata() == pa.schema({**ID, **OPENAI, **LAST})
    good, bad = table.to_pylist()
    assert (good["id"], good["custom_id"], good["error"]) == ("batch_req_0", "a", None)
    assert json.loads(good["response"])["body"]["choices"][0]["text"]
    assert bad["response"] is None and "temperature" in json.loads(bad["error"])["message"]


def test_a_job_with_both_kinds_of_rows_has_all_columns(job):
    _, table = job([openai("a"), *plain(1)])
    assert table.schema.remove_metadata() == pa.schema({**ID, **OPENAI, **PLAIN, **LAST})
    first, second = table.to_pylist()
    assert (first["custom_id"], first["outputs"], first["text"]) == ("a", None, None) and first["response"]
    assert (second["id"], second["custom_id"], second["response"]) == ("r0", None, None) and second["text"]


def test_what_has_no_fixed_shape_is_text(job):
    """Log-probabilities are JSON, and a stop reason is a string even if it is a token's id."""

    class Scoring(FakeLLM):
        def complete(self, number, prompt, params):
            outputs = [
                CompletionOutput(0, "ä", [5], "stop", 5, -0.5, one_logprob()),
                CompletionOutput(1, "", [6], "stop", "END"),
            ]
            return RequestOutput(
                str(number), prompt, [1, 2], outputs, prompt_index=number, prompt_logprobs=one_logprob()
            )

    _, table = job([{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "params": {"detokenize": False}}], Scoring)
    first, second = table["outputs"].to_pylist()
    assert [each["stop_reason"] for each in first] == ["5", "END"]
    assert [each["cumulative_logprob"] for each in first] == [-0.5, None]
    assert json.loads(first[0]["logprobs"])[0]["token"] == "ä" and "ä" in first[0]["logprobs"]
    assert json.loads(table["prompt_logprobs"][0].as_py()) == json.loads(first[0]["logprobs"])
    assert [each["token_ids"] for each in first + second] == [None, None, [5], [6]]


def one_logprob():
    ids = np.array([[5, 5]], np.int32)
    return TokenLogprobs(
        ids, np.full((1, 2), -0.5, np.float32), np.ones(1, np.int32), 0, {5: TokenPiece("ä", "ä".encode())}
    )


def test_a_row_group_of_an_output_is_bounded_in_bytes(job, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_BYTES_OF_GROUP", 2000)
    _, table = job(plain(100))
    metadata = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert table.num_rows == 100 and 5 <= metadata.num_row_groups <= 20


def test_a_full_disk_at_the_end_keeps_all_rows_of_a_table(job, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", refuse)
        with pytest.raises(JobError, match=r"cannot be written: No space left on device. Make room and run"):
            job(plain(40))
    assert sorted(os.listdir(tmp_path)) == ["in", "out.parquet.job", "out.parquet.part"]
    FakeLLM.made = []
    assert job()[1].num_rows == 40 and FakeLLM.made == []


@pytest.mark.parametrize("name", ["in.parquet", "out.parquet"])
def test_without_pyarrow_the_error_names_the_extra_before_a_row_runs(job, tmp_path, monkeypatch, name):
    rows = plain(3) if name == "out.parquet" else None
    pq.write_table(pa.Table.from_pylist(plain(3)), tmp_path / "in.parquet")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(JobError, match=rf"{name} is a Parquet file.*pip install pyarrow"):
            job(rows, output="out" if rows is None else name)
    assert FakeLLM.made == []


def test_lines_need_no_pyarrow(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert len(job(plain(3), output="out")[1]) == 3
