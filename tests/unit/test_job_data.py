"""Data as people have it: named columns make the rows, all others come through; several and compressed inputs."""

import gzip
import io
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.fake_llm import FakeLLM

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import data, rows, source
from nanovllm.jobs.cli import main
from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import Job, JobOptions
from nanovllm.jobs.rows import parse_row
from nanovllm.jobs.source import Files, Lines, input_paths

MODEL = str(MODEL_DIRECTORY)
DATA = [
    {"text": "one", "label": 1, "url": "https://a.org"},
    {"text": "zwei €", "label": None, "url": "https://b.org"},
    {"text": "three", "label": 3},
]


@pytest.fixture(autouse=True)
def nothing_made():
    FakeLLM.made = []


@pytest.fixture
def job(tmp_path):
    """Runs a job of these rows to `out`, or of `input`; returns (report, output rows)."""

    def run(rows=None, llm=FakeLLM, output="out", **options):
        if rows is not None:
            (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
        default = JobOptions(str(tmp_path / "in"), str(tmp_path / output), MODEL, preflight="off")
        report = Job(replace(default, **options), llm).run()
        return report, [json.loads(line) for line in (tmp_path / output).read_text().splitlines()]

    return run


def parsed(fields, number=0, **columns) -> rows.JobRow:
    return parse_row(number, json.dumps(fields).encode(), Columns(**columns))


# Rows of named columns


@pytest.mark.parametrize(
    ("columns", "prompt"),
    [
        ({"prompt_column": "text"}, "one"),
        ({"prompt": "Translate: {text}"}, "Translate: one"),
        ({"prompt": "{{{text}}} {n} {f} {list} {is}"}, '{one} 7 0.5 [1, "ä"] true'),
        ({"prompt": "{a.b[0]}|{two words}"}, "dot|space"),
        ({"prompt_column": "text", "chat": True}, {"messages": [{"role": "user", "content": "one"}]}),
        ({"prompt": "Say {text}", "chat": True}, {"messages": [{"role": "user", "content": "Say one"}]}),
        ({"messages_column": "talk"}, {"messages": [{"role": "user", "content": "Hi"}]}),
        ({"prompt_column": "list_of_ids"}, [1, 2]),
        ({"chat": True}, {"messages": [{"role": "user", "content": "p"}]}),
        ({"id_column": "n"}, "p"),
    ],
)
def test_named_columns_make_the_prompt(columns, prompt):
    row = {
        "text": "one", "n": 7, "f": 0.5, "list": [1, "ä"], "is": True, "a.b[0]": "dot", "two words": "space",
        "talk": [{"role": "user", "content": "Hi"}], "list_of_ids": [1, 2], "prompt": "p", "params": "data too",
        "custom_id": "data", "url": "data", "body": 1,
    }  # fmt: skip
    found = parsed(row, 4, **columns)
    assert (found.error, found.prompt, found.params, found.kind) == (None, prompt, {}, "plain")
    assert found.id == ("7" if "id_column" in columns else "5")


@pytest.mark.parametrize(
    ("fields", "columns", "error"),
    [
        ({"label": 1}, {"prompt_column": "text"}, "the column 'text' is null or missing"),
        ({"text": None}, {"prompt": "{text}"}, "the column 'text' is null or missing"),
        ({"text": float("nan")}, {"prompt": "{text}"}, "the column 'text' is null or missing"),
        ({"text": "a"}, {"prompt": "{text} {other}"}, "the column 'other' is null or missing"),
        ({"text": 5}, {"prompt_column": "text"}, '"text" must be a string or a list of token ids, not 5'),
        ({"text": [1]}, {"prompt_column": "text", "chat": True}, "the column 'text' holds token ids"),
        ({"text": "Hi"}, {"messages_column": "text"}, "must be a list of at least one message"),
        ({"text": "a"}, {"prompt_column": "text", "id_column": "key"}, 'the row has no "key"'),
        ({"text": "a", "key": 1.5}, {"prompt_column": "text", "id_column": "key"}, '"key" must be a string'),
    ],
)
def test_a_row_without_its_prompt_or_its_id_is_an_error_row(fields, columns, error):
    assert error in parsed(fields, **columns).error


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"prompt_column": "a", "prompt": "{a}"}, "only one of"),
        ({"messages_column": "a", "prompt_column": "a"}, "only one of"),
        ({"messages_column": "a", "chat": True}, "messages_column has whole conversations"),
        ({"prompt": "Hello"}, "names no column"),
        ({"prompt": "{"}, "write a brace of the text twice"),
        ({"prompt": "{}"}, "needs only the name of a column in its braces"),
        ({"prompt": "{a:>5}"}, "needs only the name of a column in its braces"),
        ({"prompt": "{a!r}"}, "needs only the name of a column in its braces"),
        ({"input": []}, "at least one file"),
    ],
)
def test_options_that_contradict_each_other_are_refused(columns, error):
    with pytest.raises(ValueError, match=error):
        JobOptions(**{"input": "in", "output": "out", "model": MODEL, **columns})


@pytest.mark.parametrize("columns", [{"prompt_column": "txt"}, {"prompt": "{txt}"}, {"messages_column": "txt"}])
def test_a_column_that_no_row_has_refuses_the_job(job, tmp_path, columns):
    for options in (columns, {"prompt_column": "text", "id_column": "txt"}):
        with pytest.raises(JobError, match="in has no column 'txt'; it has 'text', 'label', 'url'"):
            job(DATA, **options)
    assert FakeLLM.made == [] and os.listdir(tmp_path) == ["in"]


def test_rows_without_ids_get_their_number_over_all_files(job, tmp_path):
    for name in "ab":
        (tmp_path / name).write_text('{"prompt": "x"}\n\n{"prompt": "y"}\n')
    _, found = job(input=[str(tmp_path / "a"), str(tmp_path / "b")])
    assert [row["id"] for row in found] == ["1", "2", "3", "4"] and all("row" not in row for row in found)


def test_a_request_of_openai_still_needs_its_id(job):
    _, (row, _) = job([{"url": "/v1/completions", "body": {"prompt": "x"}}, {"prompt": "x"}])
    assert 'no "custom_id"' in row["error"]["message"] and row["row"] == 1


def test_the_command_takes_the_columns_and_several_files(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": "Hello", "label": 1}) + "\n")
    command = ["run-batch", "-o", str(tmp_path / "out"), "--model", "bundled", "--dry-run", "-i"]
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.*")]
    assert main([*command, *files, "--prompt", "Say {text}", "--chat", "--id-column", "text"]) == 3
    assert "2 rows, of which 1 cannot run" in capsys.readouterr().err  # both have one id
    assert main([*command, *files, "--prompt-column", "txt"]) == 1
    assert "has no column 'txt'; it has 'text', 'label'" in capsys.readouterr().err


# Columns that come through


def test_all_columns_come_through_also_those_of_error_rows(job):
    report, found = job([*DATA, {"text": None, "label": 4}], prompt_column="text")
    carried = [{name: each for name, each in row.items() if name in ("input_text", "label", "url")} for row in found]
    assert carried == [
        {"input_text": "one", "label": 1, "url": "https://a.org"},
        {"input_text": "zwei €", "label": None, "url": "https://b.org"},
        {"input_text": "three", "label": 3},
        {"input_text": None, "label": 4},
    ]
    assert [row["id"] for row in found] == ["1", "2", "3", "4"] and report["rows"]["errors"] == 1
    assert found[3]["error"] and not found[3]["outputs"]


def test_names_that_outputs_have_are_never_overwritten(job):
    row = {"q": "x", "id": "a", "text": 1, "input_text": 2, "input_input_text": 3, "error": 4, "inputs": 5, "row": 6}
    _, (found,) = job([row], prompt_column="q")
    assert found["id"] == "a" and found["error"] is None
    names = ["input_text", "input_input_text", "input_input_input_text", "input_error", "inputs", "input_row", "q"]
    assert [found[name] for name in names] == [1, 2, 3, 4, 5, 6, "x"] and "input_id" not in found
    _, (found,) = job([row], prompt_column="q", id_column="inputs", restart=True)
    assert (found["id"], found["input_id"], found["inputs"]) == ("5", "a", 5)


def test_what_json_lacks_comes_through_as_null_or_a_question_mark(job, tmp_path):
    line = '{"text": "x", "a": NaN, "b": [1e999, -Infinity], "c": "\\ud800", "\\ud800": 1, "d": {"e": 1.5}}\n'
    (tmp_path / "in").write_text(line + '{"text": "x"}\n')
    _, (found, _) = job(prompt_column="text")
    assert found["error"] and "surrogate" in found["error"]
    assert [found[name] for name in ("a", "b", "c", "?", "d")] == [None, [None, None], "?", 1, {"e": 1.5}]
    (tmp_path / "in").write_text('{"text": "x", "a": NaN, "b": 1e999}\n')
    _, (found,) = job(prompt_column="text", restart=True)
    assert (found["error"], found["a"], found["b"]) == (None, None, None)


def test_a_broken_line_has_no_columns_and_stops_nothing(job, tmp_path):
    deep = "[" * 990 + "]" * 990
    lines = ['{"text": "x", "n": 1', "[1]", f'{{"text": "x", "n": {deep}}}', '{"text": "x", "n": ' + "9" * 5000 + "}"]
    (tmp_path / "in").write_text("\n".join([json.dumps({"text": "x"}), *lines]))
    report, found = job(prompt_column="text")
    assert len(found) == 5 and report["rows"]["errors"] >= 3 and found[0]["error"] is None


def test_with_stdout_each_row_carries_its_columns_when_it_finishes(job, capfdbinary, tmp_path):
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in DATA))
    options = JobOptions(str(tmp_path / "in"), "-", MODEL, preflight="off", prompt_column="text")
    Job(options, FakeLLM).run()
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert sorted((row["id"], row["input_text"]) for row in found) == [("1", "one"), ("2", "zwei €"), ("3", "three")]


def test_columns_are_not_in_the_journal_and_a_resumed_job_has_them(job, tmp_path):
    many = [{"text": f"prompt {number}", "secret": f"column {number}"} for number in range(300)]
    _, whole = job(many, prompt_column="text", output="whole")

    class Killed(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 100:
                raise RuntimeError("killed")
            return super().complete(number, prompt, params)

    FakeLLM.made = []
    with pytest.raises(RuntimeError, match="killed"):
        job(llm=Killed, prompt_column="text")
    assert b"column" not in (tmp_path / "out.part").read_bytes()
    report, found = job(prompt_column="text")
    assert found == whole and report["rows"]["finished_before"] == 100


def test_other_columns_make_another_job(job, tmp_path):
    job(DATA, prompt_column="text")
    (tmp_path / "out").unlink()
    with pytest.raises(JobError, match=r"an option has changed .prompt_column was 'text' and is None, "):
        job(prompt="{text}", chat=True)


def test_an_input_that_changes_before_the_output_is_written_is_noticed(job, tmp_path):
    class Changing(FakeLLM):
        def __exit__(self, *exception):
            text = (tmp_path / "in").read_text()
            (tmp_path / "in").write_text(text.replace("three", "THREE"))

    with pytest.raises(JobError, match="row 3 of the input has changed"):
        job(DATA, Changing, prompt_column="text")


# Several and compressed inputs


def test_files_and_patterns_are_one_input(job, tmp_path):
    for number, name in enumerate(["b.jsonl", "a.jsonl", "c.txt"]):
        (tmp_path / name).write_text(json.dumps({"id": number, "prompt": "x"}) + "\n")
    _, found = job(input=[str(tmp_path / "c.txt"), str(tmp_path / "*.jsonl")])
    assert [row["id"] for row in found] == ["2", "1", "0"]
    # The output matches the pattern of the second run.
    for _ in range(2):
        _, found = job(input=str(tmp_path / "*.jsonl"), output="out.jsonl")
        assert [row["id"] for row in found] == ["1", "0"]
    with pytest.raises(JobError, match=r"no file matches '.*\*\.csv'"):
        job(input=str(tmp_path / "*.csv"))
    with pytest.raises(JobError, match=r"the input has .*a\.jsonl twice"):
        job(input=[str(tmp_path / "*.jsonl"), str(tmp_path / "." / "a.jsonl")])
    with pytest.raises(JobError, match="the job itself writes"):
        job(input=[str(tmp_path / "a.jsonl"), str(tmp_path / "out.part")], restart=True)


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path):
    (tmp_path / "a[1].jsonl").touch()
    assert input_paths(str(tmp_path / "a[1].jsonl"), []) == [str(tmp_path / "a[1].jsonl")]


def test_messages_name_the_file_of_a_row(job, tmp_path, caplog):
    for name, rows_of_file in (("a", [{"id": 1, "prompt": "x"}]), ("b", [{"id": 2, "prompt": "x"}, {"id": 1}])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))
    with pytest.raises(JobError, match=r"1 × a row has exactly one of .*first: row 3 \(row 2 of .*/b\), id '1'"):
        job(input=[str(tmp_path / "a"), str(tmp_path / "b")], on_error="stop")
    report, _ = job(input=[str(tmp_path / "a"), str(tmp_path / "b")])
    assert report["errors"][0]["first"] == f"row 3 (row 2 of {tmp_path / 'b'}), id '1'"
    (tmp_path / "b").write_text('{"prompt": "x"}\n{"prompt": 1}\n')
    report, _ = job(input=[str(tmp_path / "a"), str(tmp_path / "b")], restart=True)
    assert report["errors"][0]["first"] == f"row 3 (row 2 of {tmp_path / 'b'})", "the number is the id"


def test_the_digest_covers_all_files(tmp_path):
    def digest(*texts):
        for number, text in enumerate(texts):
            (tmp_path / str(number)).write_text(text)
        files = Files([str(tmp_path / str(number)) for number in range(len(texts))], Columns())
        assert len(list(files.scan())) == len(files)
        files.close()
        return files.digest

    one, two, three = (json.dumps({"id": number}) + "\n" for number in (1, 2, 3))
    assert len({digest(one, two), digest(two, one), digest(one, three), digest(one)}) == 4


ROWS = b"".join(b'{"id": %d, "prompt": "number %d"}\n' % (number, number) for number in range(3000))


def zstd(text: bytes) -> bytes:
    return pytest.importorskip("pyarrow").Codec("zstd").compress(text, asbytes=True)


@pytest.mark.parametrize("compress", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_a_compressed_file_is_read_whatever_its_name(tmp_path, monkeypatch, compress):
    packed = compress(ROWS[:20_000]) + compress(ROWS[20_000:])  # as of two files that were joined
    (tmp_path / "in").write_bytes(packed)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(packed)))
    for path in (str(tmp_path / "in"), "-"):
        lines = Lines(path, tmp_path)
        assert list(lines.scan()) == ROWS.splitlines() and lines.read(2999) == ROWS.splitlines()[2999]
        lines.close()
    assert os.listdir(tmp_path) == ["in"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ROWS)))
    with pytest.raises(JobError, match="standard input has no column 'text'; it has 'id', 'prompt'"):
        Files(["-"], Columns(prompt_column="text"))
    whole = compress(ROWS)
    for bad in (whole[: len(whole) // 2], whole[:-1], whole[:40] + b"\xff" * 9 + whole[49:], whole + b"garbage"):
        (tmp_path / "in").write_bytes(bad)
        with pytest.raises(JobError, match=r"in is a damaged archive: .*; make it again"):
            Lines(str(tmp_path / "in"))
    (tmp_path / "in").write_bytes(compress(whole))
    with pytest.raises(JobError, match="in is compressed twice"):
        Lines(str(tmp_path / "in"))


def test_zstd_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(zstd(ROWS))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JobError, match=r"in is compressed by zstd, which needs pyarrow .*pip install pyarrow"):
        Lines(str(tmp_path / "in"))


def test_no_room_for_a_copy_is_named(tmp_path, monkeypatch):
    def full(stream, file, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(source.shutil, "copyfileobj", full)
    (tmp_path / "in").write_bytes(gzip.compress(ROWS))
    with pytest.raises(JobError, match=rf"in cannot be copied to {tmp_path}: No space left on device. Make room"):
        Lines(str(tmp_path / "in"), tmp_path)


# Long lines


TAILS = {"short": b"", "spaces": b" " * 500, "more": b', "more": 1}', "two ends": b"}" + b" " * 500}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_line_over_the_limit_is_an_error_that_names_the_limit(tmp_path, monkeypatch, tail, place):
    """A longer line once ran without its end if its first 64 MiB happened to be whole JSON."""
    monkeypatch.setattr(rows, "MAX_BYTES_OF_LINE", 1000)
    monkeypatch.setattr(source, "MAX_BYTES_OF_LINE", 1000)
    short = b'{"id": "b", "prompt": "x"}'
    long = (b'{"id": "a", "prompt": "%s"}' % (b"x" * 700)).ljust(1000) + b" " * 100 + tail
    (tmp_path / "in").write_bytes(b"\n".join([long, short] if place == 0 else [short, long]))
    lines = Lines(str(tmp_path / "in"))
    found = [parse_row(number, line) for number, line in enumerate(lines.scan())]
    lines.close()
    assert found[1 - place].error is None and found[1 - place].id == "b"
    assert "more than 1,000 bytes of JSON, which is the limit" in found[place].error and found[place].id == "a"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_at_the_limit_runs(tmp_path, monkeypatch, end):
    monkeypatch.setattr(rows, "MAX_BYTES_OF_LINE", 1000)
    monkeypatch.setattr(source, "MAX_BYTES_OF_LINE", 1000)
    (tmp_path / "in").write_bytes(b'{"id": "a", "prompt": "x"}'.ljust(1000) + end)
    (line,) = (lines := Lines(str(tmp_path / "in"))).scan()
    lines.close()
    assert parse_row(0, line).error is None


def test_a_long_line_of_blanks_is_not_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_BYTES_OF_LINE", 1000)
    (tmp_path / "in").write_bytes(b" " * 3000 + b'{"id": "a", "prompt": "x"}\n')
    lines = Lines(str(tmp_path / "in"))
    assert len(list(lines.scan())) == 1
    lines.close()


# Parquet


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow")


@pytest.fixture
def tables(pa, tmp_path):
    """(writes a table as a Parquet file and returns its path, reads one as a table)."""
    import pyarrow.parquet as pq

    def write(table, name="in.parquet", **options):
        pq.write_table(table, tmp_path / name, **options)
        return str(tmp_path / name)

    return write, lambda name="out.parquet": pq.read_table(tmp_path / name)


def public_table(pa, num_rows=400):
    """As data sets on the web have them, with the index that pandas writes."""
    import datetime
    from decimal import Decimal

    numbers = range(num_rows)
    columns = {
        "text": [None if number == 7 else f"A text about {number % 50} things." for number in numbers],
        "label": pa.array([number % 3 for number in numbers], pa.int8()),
        "url": [f"https://example.org/{number}" for number in numbers],
        "seen": pa.array([datetime.datetime(2026, 1, 1, 0, 0, number % 60) for number in numbers], pa.timestamp("ns")),
        "day": pa.array([datetime.date(2026, 1, 1 + number % 20) for number in numbers]),
        "kind": pa.array([f"kind {number % 4}" for number in numbers]).dictionary_encode(),
        "tags": [[{"name": f"t{number}", "score": None if number % 2 else 0.5}] for number in numbers],
        "price": pa.array([Decimal("1.50")] * num_rows, pa.decimal128(8, 2)),
        "thumbnail": [bytes([number % 256] * 5) for number in numbers],
        "__index_level_0__": pa.array([number * 2 for number in numbers], pa.int64()),
    }
    return pa.table(columns).replace_schema_metadata({"pandas": '{"index_columns": ["__index_level_0__"]}'})


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from support.fake_llm import FakeLLM
from nanovllm.jobs import journal
from nanovllm.jobs.job import Job, JobOptions

journal._SECONDS_BETWEEN_WRITES = 0.0

class Killed(FakeLLM):
    def complete(self, number, prompt, params):
        if len(self.made) == int(sys.argv[5]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().complete(number, prompt, params)

Job(JobOptions(*sys.argv[2:5], preflight="off", prompt_column="text"), Killed).run()
"""


def test_a_public_data_set_killed_twice_is_as_if_never_killed(pa, tables, tmp_path):
    """The types of all columns stay, and the rows of both runs before the kills are kept."""
    write, read = tables
    table = public_table(pa)
    path = write(table, row_group_size=90)
    tests = str(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

    def options(name):
        return JobOptions(path, str(tmp_path / name), MODEL, preflight="off", prompt_column="text")

    Job(options("whole.parquet"), FakeLLM).run()
    for kill in (100, 150):
        command = [sys.executable, "-c", KILLED, tests, path, str(tmp_path / "out.parquet"), MODEL, str(kill)]
        assert subprocess.run(command).returncode == -9 and not (tmp_path / "out.parquet").exists()
    report = Job(options("out.parquet"), FakeLLM).run()
    assert report["rows"]["finished_before"] >= 200
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    found = read()
    assert found["input_text"].to_pylist() == table["text"].to_pylist()
    for name in table.column_names[1:]:
        assert found[name].type == table[name].type and found[name].to_pylist() == table[name].to_pylist(), name
    assert found["id"].to_pylist() == [str(number + 1) for number in range(400)]
    errors = [number for number, error in enumerate(found["error"].to_pylist()) if error is not None]
    assert errors == [7] and found["text"].null_count == 1


def test_a_table_becomes_lines_with_dates_in_iso_form(pa, tables, job):
    write, _ = tables
    table = public_table(pa, 9)
    with pytest.raises(JobError, match=r"JSON cannot express the column 'thumbnail' \(binary\); write a Parquet"):
        job(input=write(table), prompt_column="text")
    assert FakeLLM.made == []
    binary = pa.struct([("a", pa.list_(pa.large_binary()))])
    for kind in (binary, pa.map_(pa.string(), pa.int8()), pa.duration("s"), pa.dictionary(pa.int8(), pa.binary())):
        with pytest.raises(JobError, match="JSON cannot express the column 'x'"):
            job(input=write(pa.table({"prompt": ["a"], "x": pa.array([None], kind)}), "no.parquet"))
    named = pa.table({"prompt": ["a"], "x": [{"duration of call": 1, "binary (yes/no)": 2, "map": [3]}]})
    assert job(input=write(named, "named.parquet"), output="named")[1][0]["x"]["map"] == [3]
    _, found = job(input=write(table.drop_columns(["thumbnail"])), prompt_column="text")
    assert [row["input_text"] for row in found] == table["text"].to_pylist()
    assert found[3] == {
        **{name: found[3][name] for name in ("id", "outputs", "num_prompt_tokens", "error")},
        "input_text": "A text about 3 things.", "label": 0, "url": "https://example.org/3",
        "seen": "2026-01-01T00:00:03", "day": "2026-01-04", "kind": "kind 3", "tags": [{"name": "t3", "score": None}],
        "price": 1.5, "__index_level_0__": 6,
    }  # fmt: skip


def test_values_that_python_or_json_lacks_come_through_to_lines(pa, tables, job, caplog):
    write, _ = tables
    columns = {
        "prompt": ["a", "b"],
        "nan": [float("nan"), float("inf")],
        "nanos": pa.array([1, None], pa.timestamp("ns")),
        "broken": pa.array([b"x", b"\xff"]).view(pa.string()),
        "nested": [{"x": [float("nan")], "y": None}, {"x": [], "y": None}],
    }
    _, found = job(input=write(pa.table(columns)))
    assert [row["error"] for row in found] == [None, None]
    assert [[row[name] for name in list(columns)[1:]] for row in found] == [
        [None, "1970-01-01T00:00:00.000000001", "x", {"x": [None], "y": None}],
        [None, None, None, {"x": [], "y": None}],
    ]
    assert "the column 'broken' (string) holds what JSON does not have" in caplog.text and "in row 2" in caplog.text


def test_unknown_columns_of_a_table_come_through_with_a_warning_of_a_slip(pa, tables, job, caplog):
    """A table with one column more once gave nothing but error rows."""
    write, _ = tables
    table = pa.table({"id": [1, 2], "prompt": ["a", "b"], "parms": ["x", "y"], "label": [0, 1], "url": ["u", "v"]})
    with caplog.at_level(logging.WARNING):
        _, found = job(input=write(table))
    assert [(row["id"], row["parms"], row["label"], row["url"], row["error"]) for row in found] == [
        ("1", "x", 0, "u", None), ("2", "y", 1, "v", None)
    ]  # fmt: skip
    assert caplog.text.count("the output only repeats the column 'parms'; did you mean 'params'?") == 1
    assert "label" not in caplog.text and "prompt" not in found[0]


def test_a_table_without_prompts_is_refused_with_its_columns(pa, tables, job):
    write, _ = tables
    path = write(pa.table({"text": ["a"], "url": ["b"]}))
    with pytest.raises(JobError, match=r"no column with prompts; name one .* --prompt-column: it has 'text', 'url'"):
        job(input=path)
    with pytest.raises(JobError, match=r"in.parquet has no column 'txt'; it has 'text', 'url'"):
        job(input=path, prompt_column="txt")


@pytest.mark.parametrize("talk", ["structs", "json"])
def test_conversations_of_a_table_are_structs_or_json(pa, tables, job, talk):
    write, _ = tables
    messages = [{"role": "user", "content": "Hi"}]
    column = [json.dumps(messages)] if talk == "json" else [messages]
    job(input=write(pa.table({"talk": column, "messages": ["data"]})), messages_column="talk")
    assert FakeLLM.made == [json.dumps({"messages": messages})]


def test_lines_become_a_table_with_types_of_all_values(pa, tables, job, tmp_path):
    _, read = tables
    rows_of_input = [
        {
            "q": "a",
            "n": 1,
            "f": 1,
            "b": True,
            "s": "x",
            "mixed": 1,
            "list": [1],
            "big": 1,
            "none": None,
            "half": "\ud800",
        },
        {"q": "b", "n": None, "f": 0.5, "b": False, "s": "y", "mixed": "1", "list": {"a": "ä"}, "big": 2**64},
        {"q": "c", "late": "z", "f": 2**60 + 1, "b": None},
    ]  # fmt: skip
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows_of_input) + "{broken\n")
    Job(
        JobOptions(str(tmp_path / "in"), str(tmp_path / "out.parquet"), MODEL, preflight="off", prompt_column="q"),
        FakeLLM,
    ).run()
    table = read().select(["q", "n", "f", "b", "s", "mixed", "list", "big", "none", "half", "late"])
    types = ["string", "int64", "string", "bool", *["string"] * 7]
    assert [str(field.type) for field in table.schema] == types
    assert table.to_pylist()[:2] == [
        {"q": "a", "n": 1, "f": "1", "b": True, "s": "x", "mixed": "1", "list": "[1]", "big": "1", "none": None,
         "half": "?", "late": None},
        {"q": "b", "n": None, "f": "0.5", "b": False, "s": "y", "mixed": '"1"', "list": '{"a":"ä"}',
         "big": "18446744073709551616", "none": None, "half": None, "late": None},
    ]  # fmt: skip
    assert table["f"][2].as_py() == str(2**60 + 1), "a double would round it"
    assert set(table.to_pylist()[3].values()) == {None}


def test_a_table_cannot_have_a_column_for_each_row(job, pa, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MAX_KEYS", 20)
    many = [{"q": "a", f"key {number}": 1} for number in range(30)]
    with pytest.raises(JobError, match="more than 20 different keys; write the output as JSON Lines"):
        job(many, prompt_column="q", output="out.parquet")


def test_tables_of_several_files_go_together_or_are_refused(pa, tables, job, tmp_path):
    write, read = tables
    first = write(pa.table({"prompt": ["a"] * 3, "n": pa.array([1, 2, 2**50 + 1])}), "1.parquet")
    second = write(pa.table({"n": pa.array([4.5, None]), "prompt": ["b"] * 2}), "2.parquet")
    empty = write(pa.table({"n": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())}), "0.parquet")
    options = JobOptions(str(tmp_path / "?.parquet"), str(tmp_path / "out.parquet"), MODEL, preflight="off")
    Job(options, FakeLLM).run()
    assert read()["n"].to_pylist() == [1.0, 2.0, 2.0**50 + 1, 4.5, None] and read()["id"].to_pylist() == list("12345")
    _, found = job(input=[empty, first, second])
    assert [row["n"] for row in found] == [1, 2, 2**50 + 1, 4.5, None]
    other = write(pa.table({"prompt": ["a"], "m": [1]}), "m.parquet")
    with pytest.raises(JobError, match=r"the columns \['m', 'n'\] are in only one of .*1.parquet and .*m.parquet"):
        job(input=[first, other])
    strings = write(pa.table({"prompt": ["a"], "n": ["x"]}), "s.parquet")
    with pytest.raises(JobError, match=r"s.parquet has other types than the files before it: .*n"):
        job(input=[first, strings], output="out2.parquet")
    (tmp_path / "in").write_text("{}")
    with pytest.raises(JobError, match="JSON Lines and Parquet files"):
        job(input=[first, str(tmp_path / "in")])
    assert len(job(input=[first, strings], output="out2")[1]) == 4


def test_rows_are_made_without_a_read_of_other_columns(pa, tables, monkeypatch):
    import pyarrow.parquet as pq

    write, _ = tables
    read = []

    class Counting(pq.ParquetFile):
        def iter_batches(self, size, groups, columns, **options):
            read.append(columns)
            return super().iter_batches(size, groups, columns, **options)

    monkeypatch.setattr(pq, "ParquetFile", Counting)
    files = Files([write(public_table(pa))], Columns(prompt_column="text"), to_table=True)
    lines = files.scan()
    assert len([next(lines) for _ in range(400)]) == 400 and read == [["text"]]
    files.close()


def test_large_columns_make_small_row_groups(pa, tables, tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    from nanovllm.jobs import output

    monkeypatch.setattr(output, "_BYTES_OF_GROUP", 100_000)
    write, read = tables
    table = pa.table({"prompt": ["a"] * 300, "image": [os.urandom(2000) for _ in range(300)]})
    Job(JobOptions(write(table), str(tmp_path / "out.parquet"), MODEL, preflight="off"), FakeLLM).run()
    assert 5 <= pq.ParquetFile(tmp_path / "out.parquet").metadata.num_row_groups <= 9
    assert read()["image"].to_pylist() == table["image"].to_pylist()


def test_with_stdout_rows_of_a_table_carry_their_columns(pa, tables, capfdbinary):
    write, _ = tables
    path = write(pa.table({"prompt": [f"p{number}" for number in range(300)], "n": range(300)}), row_group_size=40)
    Job(JobOptions(path, "-", MODEL, preflight="off"), FakeLLM).run()
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert sorted((row["n"], row["id"]) for row in found) == [(number, str(number + 1)) for number in range(300)]
