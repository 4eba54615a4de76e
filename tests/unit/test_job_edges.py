"""Edges of jobs that once lost an output, changed data in silence, or ended late with an error."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from support.fake_llm import FakeLLM

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs.cli import main
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import Job, JobOptions

MODEL = str(MODEL_DIRECTORY)


@pytest.fixture(autouse=True)
def nothing_made():
    FakeLLM.made = []


@pytest.fixture
def run(tmp_path):
    """Runs a job of a file's rows; returns the output rows, or the whole output as bytes."""

    def run(given, output="out", llm=FakeLLM, **options):
        default = JobOptions(given, str(tmp_path / output), MODEL, preflight="off")
        Job(replace(default, **options), llm).run()
        written = (tmp_path / output).read_bytes()
        return written if output.endswith(".parquet") else [json.loads(line) for line in written.splitlines()]

    return run


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow")


@pytest.fixture
def write(pa, tmp_path):
    """Writes columns as a Parquet file beside a column of prompts; returns its path."""
    import pyarrow.parquet as pq

    def write(name="in.parquet", num_rows=2, **columns):
        pq.write_table(pa.table({"prompt": ["x"] * num_rows, **columns}), tmp_path / name)
        return str(tmp_path / name)

    return write


def lines(path, *rows) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


ROW = {"prompt": "x"}


# --restart


def test_restart_deletes_nothing_before_the_model_has_loaded(run, tmp_path):
    """A wrong --device once cost a finished output."""

    class Broken(FakeLLM):
        def __init__(self, *arguments, **options):
            raise RuntimeError("no such device")

    given = lines(tmp_path / "in", ROW)
    run(given)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="no such device"):
        run(given, llm=Broken, restart=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(run(given, restart=True, params={"max_tokens": 3})) == 1 and len(FakeLLM.made) == 2


# Data columns of tables


def test_values_that_do_not_fit_one_type_refuse_the_job_before_it_runs(run, write, pa, tmp_path):
    """18446744073709551615 once became −1; a decimal beside integers failed when all rows had run, each time."""
    from decimal import Decimal

    second, nanosecond = pa.timestamp("s"), pa.timestamp("ns")
    for first, other in (
        (pa.array([1, 2**64 - 1], pa.uint64()), pa.array([1, -1], pa.int64())),
        (pa.array([Decimal("1.25")] * 2, pa.decimal128(10, 2)), pa.array([1, 2**62])),
        (pa.array([0, 253402300799], second), pa.array([0, 1], nanosecond)),
    ):
        paths = [write("1.parquet", value=first), write("2.parquet", value=other)]
        with pytest.raises(JobError, match=r"parquet: a value of the column 'value' does not fit|has other types"):
            run(paths, output="out.parquet")
        assert FakeLLM.made == [] and not list(tmp_path.glob("out*"))


def test_a_damaged_data_column_refuses_the_job_before_it_runs(run, write, pa, tmp_path):
    path = write(num_rows=3000, label=[f"a label that is stored {number}" for number in range(3000)])
    content = bytearray((tmp_path / "in.parquet").read_bytes())
    middle = len(content) // 2  # in the second column, whose pages are larger than all else
    content[middle - 200 : middle + 200] = bytes(400)
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(JobError, match=r"in\.parquet cannot be read as Parquet"):
        run(path, output="out.parquet")
    assert FakeLLM.made == []


def test_a_table_whose_data_changes_while_the_job_runs_is_noticed(run, write, tmp_path):
    path = write(label=[1, 1])

    class Changing(FakeLLM):
        def complete(self, *arguments):
            write(label=[2, 2])
            return super().complete(*arguments)

    with pytest.raises(JobError, match="the input has changed while the job ran"):
        run(path, llm=Changing, output="out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_times_that_python_lacks_come_through_as_text(run, write, pa):
    """Inside a list or a struct they once became null; so did years after 9999."""
    late, fine = pa.array([300000000000, None], pa.timestamp("s")), pa.array([1001, None], pa.timestamp("ns"))
    nested = pa.StructArray.from_arrays([fine, pa.array([1, 2])], ["at", "n"])
    found = run(write(late=late, nested=nested, times=pa.array([[1001], []], pa.list_(pa.timestamp("ns")))))
    assert found[0]["late"].startswith("11476-") and found[1]["late"] is None
    assert found[0]["nested"] == {"at": "1970-01-01T00:00:00.000001001", "n": 1}
    assert found[1]["nested"] == {"at": None, "n": 2}
    assert [row["times"] for row in found] == [["1970-01-01T00:00:00.000001001"], []]


def test_a_body_beside_prompts_is_data(run, write):
    """A table of mails was once taken for one of OpenAI's requests."""
    found = run(write(subject=["a", "b"], body=["c", "d"]))
    assert [(row["error"], row["body"]) for row in found] == [(None, "c"), (None, "d")]


def test_a_column_of_several_types_is_announced(run, pa, tmp_path, caplog):
    given = lines(tmp_path / "in", {"text": "a", "v": 1}, {"text": "b", "v": "x"}, {"text": "c", "v": None})
    run(given, output="out.parquet", prompt_column="text")
    assert "the column 'v' holds values of several types: it becomes JSON text" in caplog.text
    objects = lines(tmp_path / "objects", {"text": "a", "v": {"w": 1}, "n": None})
    run(objects, output="out2.parquet", prompt_column="text")
    assert "the column 'v' holds objects, lists or very large integers: it becomes JSON text" in caplog.text
    assert "'n'" not in caplog.text and "'text'" not in caplog.text


# Ids


def test_integers_that_a_null_made_floats_are_ids(run, write):
    assert [row["id"] for row in run(write(id=[7.0, None]))] == ["7", "2"]


def test_the_number_of_a_row_without_an_id_takes_no_other_rows_id(run, tmp_path):
    given = lines(tmp_path / "in", ROW, {**ROW, "id": "1"}, {**ROW, "id": "1"})
    assert [(row["id"], row["error"] is None) for row in run(given)] == [("1", True), ("1", True), ("1", False)]


# Inputs


def test_each_mention_of_the_input_counts(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("nanovllm.jobs.cli.run_batch", lambda options: given.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["run-batch", "-i", "a", "b", "-i", "c", "-o", "out", "--model", "bundled"])
    assert given[0].input == ["a", "b", "c"]


def test_a_report_among_the_files_of_a_pattern_is_no_input(run, tmp_path):
    lines(tmp_path / "in.jsonl", ROW)
    for _ in range(2):
        run(str(tmp_path / "*.jsonl"), output="out", report=tmp_path / "report.jsonl", restart=True)
    assert len(FakeLLM.made) == 2


def test_each_file_must_have_the_named_column(run, tmp_path):
    paths = [lines(tmp_path / "1", {"text": "a"}), lines(tmp_path / "2", {"txt": "a"})]
    with pytest.raises(JobError, match=r"/2 has no column 'text'; it has 'txt'"):
        run(paths, prompt_column="text")


@pytest.mark.parametrize(
    ("name", "message"),
    [("in.csv", "an input is JSON Lines or Parquet"), ("", "is a directory; name its files"), ("no", "no file")],
)
def test_what_is_no_input_is_said(run, tmp_path, name, message):
    (tmp_path / "in.csv").write_text("text\n")
    with pytest.raises(JobError, match=message):
        run(str(tmp_path / name))


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl.gz"])
def test_an_output_of_another_format_is_refused(run, tmp_path, name):
    with pytest.raises(JobError, match="an output is JSON Lines or Parquet, and never compressed"):
        run(lines(tmp_path / "in", ROW), output=name)


def test_a_mark_of_byte_order_alone_is_a_blank_line(run, tmp_path):
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf\n" + json.dumps(ROW).encode())
    assert len(run(str(tmp_path / "in"))) == 1


def test_a_template_takes_no_nan_inside_a_list(run, tmp_path):
    found = run(lines(tmp_path / "in", '{"l": [NaN]}\n', {"l": [1]}), prompt="{l}")
    assert "holds NaN or an infinity" in found[0]["error"] and found[1]["error"] is None


def test_arguments_of_the_chat_template_apply_to_all_rows(run, tmp_path):
    seen = []

    class Seeing(FakeLLM):
        def complete(self, number, prompt, params):
            seen.append(prompt)
            return super().complete(number, "x", params)

    given = lines(tmp_path / "in", {"text": "a"})
    run(given, llm=Seeing, prompt_column="text", chat=True, chat_template_kwargs={"enable_thinking": False})
    message = {"role": "user", "content": "a"}
    assert seen == [{"messages": [message], "chat_template_kwargs": {"enable_thinking": False}}]
    with pytest.raises(ValueError, match="chat_template_kwargs need chat or messages_column"):
        JobOptions(given, "out", MODEL, prompt_column="text", chat_template_kwargs={})


def test_the_first_prompt_is_shown_as_the_model_gets_it(tmp_path, caplog):
    r"""A \n in a shell's double quotes is a backslash and an n, and no output shows a prompt."""
    given = lines(tmp_path / "in", {"text": 1}, {"text": "two"})
    command = ["run-batch", "-i", given, "-o", str(tmp_path / "out"), "--model", "bundled", "--dry-run"]
    assert main([*command, "--prompt", r"Q:\n{text}"]) == 0
    assert r"the first prompt: 'Q:\\n1'" in caplog.text and "a shell writes a line break as $'" in caplog.text
    caplog.clear()
    assert main([*command, "--prompt", "Q:\n{text}"]) == 0
    assert r"the first prompt: 'Q:\n1'" in caplog.text and "a shell writes" not in caplog.text


# Signals


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_rows_run_is_one_line(tmp_path, kind):
    """SIGTERM once ended the command with 143, without a word."""
    given = lines(tmp_path / "in", ROW)
    code = (
        "import time, nanovllm.jobs.cli as c, nanovllm.__main__ as m\n"
        "c.run_batch = lambda options: print('begun', flush=True) or time.sleep(60)\n"
        "raise SystemExit(m.main())"
    )
    command = [sys.executable, "-c", code, "run-batch", "-i", given, "-o", "-", "--model", "bundled"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, kind)
        began = time.monotonic()
        error = process.stderr.read()
    assert (process.returncode, error) == (130, "nanovllm run-batch: stopped\n") and time.monotonic() - began < 30
