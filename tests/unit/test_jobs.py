"""Jobs with a fake LLM: each row once, in the input's order; resumed only as the same job; errors are rows."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_llm import FakeLLM

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import cli
from nanovllm.jobs import job as job_module
from nanovllm.jobs.cli import main
from nanovllm.jobs.errors import Errors, JobError
from nanovllm.jobs.identity import fingerprints_of_model, identity_of, whole_file
from nanovllm.jobs.job import Job, JobOptions
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.output_rows import error_of
from nanovllm.jobs.plan import beginning, early_rows, in_windows
from nanovllm.jobs.report import in_words
from nanovllm.jobs.source import Lines

MODEL = str(MODEL_DIRECTORY)


@pytest.fixture(autouse=True)
def nothing_made():
    FakeLLM.made = []


@pytest.fixture
def job(tmp_path):
    """Runs a job of these rows to `out`; returns (report, output rows)."""

    def run(rows=None, llm=FakeLLM, **options):
        if rows is not None:
            lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
            (tmp_path / "in").write_bytes(b"".join(line + b"\n" for line in lines))
        default = JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), MODEL, preflight="off")
        report = Job(replace(default, **options), llm).run()
        return report, read(tmp_path / "out") if (tmp_path / "out").exists() else None

    return run


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain(count, **params):
    return [{"id": f"r{number}", "prompt": f"prompt {number}", "params": params} for number in range(count)]


def test_each_row_gives_one_row_in_the_inputs_order(job):
    report, found = job(plain(500))
    assert [row["id"] for row in found] == [f"r{number}" for number in range(500)]
    assert all(row["error"] is None and len(row["outputs"]) == 1 for row in found)
    assert sorted(FakeLLM.made) == sorted(json.dumps(f"prompt {number}") for number in range(500))
    assert report["rows"] == {"total": 500, "finished": 500, "finished_before": 0, "errors": 0}
    assert report["tokens"]["output"] == 2000
    assert 0 <= report["tail_seconds"] <= report["seconds"]["rows"]


BAD_ROWS = {
    "not JSON": b'{"id": "b0", "prompt": ',
    "not UTF-8": b'{"id": "b1", "prompt": "\xff"}',
    "must be a JSON object": b"[1, 2]",
    '"id" must be': {"id": 1.5, "prompt": "x"},
    "row 1 has the same id": {"id": "r0", "prompt": "again"},
    "exactly one of": {"id": "b5"},
    "unknown key": {"id": "b6", "prompt": "x", "promt": "x"},
    "temperature must be": {"id": "b7", "prompt": "x", "params": {"temperature": -1}},
    "max_new_tokens": {"id": "b8", "prompt": "x", "params": {"max_new_tokens": 5}},
    "token ids": {"id": "b9", "token_ids": "x"},
    "NaN": b'{"id": "b10", "prompt": "x", "params": {"top_p": NaN}}',
    "min_tokens": {"id": "b11", "prompt": "x", "params": {"min_tokens": 100}},  # above the job's max_tokens
}


@pytest.mark.parametrize("preflight", ["off", "sample", "full"])
def test_bad_rows_of_every_kind_are_error_rows_and_the_others_run(job, preflight):
    rows = plain(228)
    bad = dict(zip(range(5, 240, 20), BAD_ROWS.items(), strict=True))
    for place, (_, row) in bad.items():
        rows.insert(place, row)
    report, found = job(rows, params={"max_tokens": 64}, preflight=preflight)
    assert len(found) == 240 and report["rows"]["errors"] == len(bad)
    for place, row in enumerate(found):
        assert (bad[place][0] in row["error"]) if place in bad else row["error"] is None, row
    assert sum(kind["rows"] for kind in report["errors"]) == len(bad)
    assert len(FakeLLM.made) == 228


def test_on_error_stop_names_the_rows_before_anything_is_made(job, tmp_path):
    with pytest.raises(
        JobError,
        match=r"2 rows cannot run; .*1 × temperature.*first: row 2, id 'r1'.; 1 × the line is not JSON.*first: row 4",
    ):
        job(
            [*plain(1), {"id": "r1", "prompt": "x", "params": {"temperature": -1}}, *plain(3)[2:], b"{"],
            on_error="stop",
        )
    assert FakeLLM.made == [] and os.listdir(tmp_path) == ["in"]
    with pytest.raises(JobError, match=r"1 row cannot run; .*max_model_len.*row 1, id 'long'"):
        job([{"id": "long", "prompt": "x " * 5000}, *plain(1)], on_error="stop", preflight="full")
    assert FakeLLM.made == []


def test_a_finished_job_does_nothing_when_it_is_run_again(job, tmp_path):
    before, found = job(plain(20))
    FakeLLM.made = []
    after, again = job()
    assert (after, again, FakeLLM.made) == (before, found, [])
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "out.job"]


def unfinished(job, tmp_path, rows, num_finished):
    """Leaves a job that was killed after some rows."""
    whole = job(rows)[1]
    (tmp_path / "out").unlink()
    state = json.loads((tmp_path / "out.job").read_text())
    (tmp_path / "out.job").write_text(json.dumps({**state, "finished": False}))
    journal = Journal(tmp_path / "out.part")
    journal.recover(len(rows))
    for number in range(num_finished):
        row = json.dumps(whole[number], separators=(",", ":")).encode()
        journal.append(number, row, error_of(whole[number]))
    journal.close()
    FakeLLM.made = []
    return whole


def test_only_the_missing_rows_run_again(job, tmp_path):
    whole = unfinished(job, tmp_path, plain(50), 30)
    report, found = job()
    assert found == whole and len(FakeLLM.made) == 20
    assert report["rows"] == {"total": 50, "finished": 50, "finished_before": 30, "errors": 0}


def mixed(count):
    """Rows of both formats, and error rows of several kinds: some without an id, some that only the LLM refuses."""
    rows = plain(count)
    for place in range(0, count, 5):
        rows[place] = {"id": f"r{place}", "promt": "x"} if place % 2 else {"prompt": place}
        rows[place + 1] = {"custom_id": f"o{place}", "url": "/v1/completions", "body": {"prompt": f"refused {place}"}}
        rows[place + 2] = {"custom_id": f"o{place}", "url": "/v1/nothing", "body": {}}
    return rows


class Refusing(FakeLLM):
    def complete(self, number, prompt, params):
        output = super().complete(number, prompt, params)
        return replace(output, error=f"no room for {prompt!r}") if str(prompt).startswith("refused") else output


@pytest.mark.parametrize("num_finished", [1, 30, 60])
def test_a_resumed_job_counts_the_error_rows_of_earlier_runs(job, tmp_path, num_finished, capsys, caplog, monkeypatch):
    """A report once said `"errors": 0` beside five error rows: it counted this run alone."""
    rows = mixed(60)
    whole, found = job(rows, Refusing, output=str(tmp_path / "whole"))[0], read(tmp_path / "whole")
    assert whole["rows"]["errors"] == sum(row["error"] is not None for row in found) == 36
    assert len(whole["errors"]) == 4 and whole["errors"][0]["first"] == "row 2, id 'o0'"
    job(rows, Refusing)
    state = json.loads((tmp_path / "out.job").read_text())
    (tmp_path / "out").unlink()
    (tmp_path / "out.job").write_text(json.dumps({**state, "finished": False}))
    with Journal(tmp_path / "out.part") as journal:
        journal.recover(60)
        for number in random.Random(0).sample(range(60), num_finished):
            journal.append(number, json.dumps(found[number], separators=(",", ":")).encode(), error_of(found[number]))
    monkeypatch.setattr("nanovllm.jobs.report._SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level("INFO", "nanovllm.jobs")
    report, _ = job(llm=Refusing)
    assert (report["rows"]["errors"], report["errors"]) == (36, whole["errors"])
    assert report["rows"]["finished_before"] == num_finished
    assert "error rows: 36 of 60" in in_words(report)
    if num_finished < 60:
        assert f"run-batch: {num_finished} of 60 rows" in caplog.messages
        assert [line for line in caplog.messages if "rows, prefill" in line][-1].count("errors: 36 rows") == 1
    assert job(llm=Refusing)[0] == report, "a job that is finished gives the report of the whole job again"


def test_a_job_of_both_formats_is_counted_as_it_is_read_again(job, tmp_path):
    """Names and errors come from the output rows, which differ between the formats."""
    assert error_of({"id": "a", "error": None}) is None
    assert error_of({"id": None, "error": "x"}) == (None, "x")
    assert error_of({"id": "batch_req_1", "custom_id": "c", "error": {"code": "…", "message": "x"}}) == ("c", "x")
    assert error_of({"id": "batch_req_1", "custom_id": "c", "error": None, "response": {}}) is None


def test_a_report_names_the_first_row_of_the_input_whatever_finished_first():
    errors = Errors()
    for number in (5, 3, 9, 2):
        errors.add(number, None, f"{'token' if number % 2 else 'id'} {number} is wrong")
    assert [(kind["rows"], kind["first"]) for kind in errors.by_kind()] == [(3, "row 4"), (1, "row 3")]
    errors.add(4, None, "id 4 is wrong")
    errors.add(6, None, "id 6 is wrong")
    assert [kind["first"] for kind in errors.by_kind()] == ["row 3", "row 4"], "equal counts: the first row decides"


LONG = "x " * 5000
ALL_BAD = {
    "unknown key": [{"id": str(number), "text": "x"} for number in range(40)],
    "no chat template": [{"id": str(number), "messages": [{"role": "user", "content": "x"}]} for number in range(40)],
    "max_model_len": [{"id": str(number), "prompt": LONG} for number in range(40)],
    "mixed": [{"id": str(number), **({"prompt": LONG} if number % 2 else {"text": "x"})} for number in range(40)],
}


@pytest.mark.parametrize("preflight", ["full", None])
@pytest.mark.parametrize("kind", ALL_BAD)
def test_a_job_of_which_no_row_can_run_is_refused_with_the_error(job, tmp_path, kind, preflight):
    """5,000 error rows once took a night, printed "finished" and ended with 0."""
    model = tmp_path / "model"
    model.mkdir()
    for path in MODEL_DIRECTORY.iterdir():
        text = path.read_bytes()
        if path.name == "tokenizer_config.json":
            text = json.dumps({**json.loads(text), "chat_template": None}).encode()
        if path.suffix != ".jinja":
            (model / path.name).write_bytes(text)
    told = {
        "mixed": "20 × unknown key .*first: row 1, id '0'.; .*max_model_len.*",
        "unknown key": '40 × unknown key .*did you mean "prompt"',
    }
    with pytest.raises(JobError, match=rf"can run.*: {told.get(kind, f'.* × .*{kind}.*first: row 1, id .0')}"):
        job(ALL_BAD[kind], preflight=preflight, model=str(model))
    assert FakeLLM.made == [] and not list(tmp_path.glob("out*"))
    with pytest.raises(JobError, match="can run"):
        job(preflight=preflight, model=str(model), output="-")
    assert job(model=str(model), preflight=None, dry_run=True)[0]["rows"]["errors"] == 40, "a dry run reports"
    report, _ = job([*ALL_BAD[kind], *plain(1)], preflight="full", model=str(model))
    assert report["rows"]["errors"] == sum("text" in row for row in ALL_BAD[kind]), "the fake LLM runs all others"


def test_a_sample_that_cannot_run_says_how_to_check_all(job, monkeypatch, caplog):
    """A look at 16 rows is only a warning: others may run."""
    rows = [{"id": str(number), "prompt": LONG} for number in range(100)]
    message = r"none of the 16 rows that were checked can run \(--preflight full checks all\): 16 × "
    assert len(job([*rows[:1], *plain(1), *rows[1:]], preflight="off")[1]) == 101
    assert re.search(message, caplog.text)
    monkeypatch.setattr("nanovllm.jobs.check._ROWS_OF_SAMPLE", 16)
    with pytest.raises(JobError, match=message):
        job(preflight="sample", restart=True)
    assert len(job(preflight="full", restart=True)[1]) == 101


def test_rows_that_cannot_be_read_do_not_hide_those_that_can(job):
    """A look at 16 of these rows, whether they can be read or not, would see no good one."""
    rows = [{"id": str(number), "promt": "x"} for number in range(400)]
    rows[7:7] = plain(1)
    assert job(rows)[0]["rows"]["errors"] == 400 and len(FakeLLM.made) == 1


def test_a_job_that_has_finished_rows_is_never_refused_for_its_rows(job, tmp_path):
    class OnlyFirst(FakeLLM):
        def complete(self, number, prompt, params):
            return replace(super().complete(number, prompt, params), error="it failed")

    report, _ = job(plain(20), OnlyFirst)
    assert report["rows"]["errors"] == 20
    assert job(plain(20))[0]["rows"]["errors"] == 20
    assert job([], output=str(tmp_path / "none"))[0]["rows"]["errors"] == 0, "an empty input is a finished job"


@pytest.mark.parametrize("preflight", ["off", "sample"])
def test_a_missing_library_is_said_once_before_the_model_is_loaded(job, monkeypatch, preflight):
    """Each row that needed llguidance once was an error row, although no row was at fault."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    rows = plain(3000)
    rows[1234]["params"] = {"structured_outputs": {"regex": "a+"}}
    with pytest.raises(JobError, match=r"structured_outputs need llguidance, .*: pip install llguidance"):
        job(rows, preflight=preflight)
    assert FakeLLM.made == []
    rows[1234]["params"] = {"structured_outputs": {"choice": ["a", "b"]}}  # needs no library
    assert job(rows, preflight=preflight)[0]["rows"]["errors"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"structured_outputs": {"json": {"type": "object"}}}}, "need llguidance"),
    ],
)
def test_a_library_that_all_rows_need_is_missed_at_once(job, monkeypatch, change, message):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(JobError, match=message):
        job(plain(3), **change)
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": plain(49)}, r"the input has changed \(it had 50 rows and has 49\)"),
        ({"rows": [*plain(49), {"id": "r49", "prompt": "else"}]}, "another job: the input has changed. Run"),
        ({"seed": 1}, r"the seed has changed \(it was 0 and is 1\)"),
        ({"params": {"top_p": 0.5}}, "top_p was None and is 0.5"),
        ({"engine": {"dtype": "bfloat16"}}, "dtype was None and is 'bfloat16'"),
    ],
)
def test_a_changed_job_is_refused_with_what_changed(job, tmp_path, change, message):
    unfinished(job, tmp_path, plain(50), 30)
    with pytest.raises(JobError, match=message):
        job(**change)
    assert FakeLLM.made == [] and (tmp_path / "out.part").stat().st_size > 0
    _, found = job(**change, restart=True)
    rows = change.get("rows") or plain(50)
    assert len(FakeLLM.made) == len(rows) and [row["id"] for row in found] == [row["id"] for row in rows]


def test_what_cannot_change_a_result_may_differ_when_a_job_goes_on(job, tmp_path):
    whole = unfinished(job, tmp_path, plain(50), 30)
    assert job(engine={"max_num_seqs": 3, "gpu_memory_utilization": 0.5})[1] == whole


def test_another_models_files_are_noticed(job, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in MODEL_DIRECTORY.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    job(plain(3), model=str(model))
    weights = next(model.glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-10_000:] = bytes(10_000)
    weights.write_bytes(changed)
    with pytest.raises(JobError, match=rf"the model has changed \({weights.name} was '\w+' and is '\w+'\)"):
        job(model=str(model))


def test_files_that_come_into_the_models_directory_later_are_not_the_models(job, tmp_path):
    """But generation_config.json is, because it changes results, and weights are."""
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIRECTORY, model, ignore=shutil.ignore_patterns("generation_config.json"))
    job(plain(3), model=str(model))
    for name in ("notes.txt", "report.json"):
        (model / name).write_text("{}")
    job(model=str(model))
    for name in ("generation_config.json", "more.safetensors"):
        (model / name).write_text("{}")
        with pytest.raises(JobError, match=rf"the model has changed \({name} was None and is"):
            job(model=str(model))
        (model / name).unlink()


def test_a_file_that_is_of_no_job_is_not_overwritten(job, tmp_path):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(JobError, match=r"exists, and no out.job says that this job wrote it"):
        job(plain(3))
    assert (tmp_path / "out").read_text() == "precious" and FakeLLM.made == []


def test_a_job_that_finished_nothing_may_be_corrected(job):
    """A limit of this machine shows only when the LLM is made, after the job has its description."""

    class Refusing(FakeLLM):
        def __init__(self, model, **options):
            raise ValueError("dtype must be something else")

    with pytest.raises(ValueError, match="dtype must be something else"):
        job(plain(5), Refusing, engine={"dtype": "float16"})
    assert len(job(engine={"dtype": "float32"})[1]) == 5


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_wrong_option_of_the_llm_is_refused_before_anything_is_read(job, tmp_path, dry_run):
    with pytest.raises(ValueError, match="quantization must be None or"):
        job(plain(5), engine={"quantization": "int8"}, dry_run=dry_run)
    assert not (tmp_path / "out.job").exists() and FakeLLM.made == []


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("in", "the job itself writes"),
        (".", "is a directory; name a file"),
        ("no/out", "does not exist; make it first"),
    ],
)
def test_a_bad_output_is_refused_before_anything_is_read(job, tmp_path, output, message):
    before = json.dumps(plain(1)[0]).encode() + b"\n"
    with pytest.raises(JobError, match=message):
        job(plain(1), output=str(tmp_path / output))
    assert (tmp_path / "in").read_bytes() == before and FakeLLM.made == []


@pytest.mark.parametrize("count", [49, 20, 0])
@pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"on_error": "stop"}])
def test_a_run_with_another_input_leaves_the_journal_as_it_is(job, tmp_path, count, options):
    """The journal was once cut at the first row that a shorter input lacks, before the job was compared."""
    unfinished(job, tmp_path, plain(50), 30)
    before = (tmp_path / "out.part").read_bytes()
    if "dry_run" in options:
        job(plain(count), **options)
    else:
        with pytest.raises(JobError, match="the input has changed"):
            job(plain(count), **options)
    assert (tmp_path / "out.part").read_bytes() == before and FakeLLM.made == []
    report, _ = job(plain(50))
    assert report["rows"]["finished_before"] == 30 and len(FakeLLM.made) == 20


def test_a_seed_for_all_rows_is_a_parameter_too(job, tmp_path):
    unfinished(job, tmp_path, plain(5), 0)
    job(params={"seed": 1})
    with pytest.raises(JobError, match="seed was 1 and is 2"):
        job(params={"seed": 2})


def test_an_input_that_changes_while_the_job_runs_is_noticed(job, tmp_path):
    rows = plain(100)

    class Changing(FakeLLM):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            lines = (tmp_path / "in").read_bytes()
            (tmp_path / "in").write_bytes(lines.replace(b"prompt 70", b"prompt 07"))

    with pytest.raises(JobError, match=r"row 71 of the input has changed while the job ran"):
        job(rows, Changing)
    assert len(job(rows)[1]) == 100


def test_finished_rows_reach_the_file_although_no_other_row_finishes(tmp_path):
    """The journal once looked at the clock only when a row was added, so the last of a burst waited in memory."""
    journal = Journal(tmp_path / "part")
    journal.recover(9)
    for number in range(9):
        journal.append(number, b"{}")
    deadline = time.monotonic() + 60
    while (tmp_path / "part").read_bytes().count(b"\n") < 9:
        assert time.monotonic() < deadline
        os.sched_yield()
    journal.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": "out.new"}, "the job itself writes"),
        ({"input": "out.part"}, "the job itself writes"),
        ({"report": "out"}, "the job itself writes"),
        ({"report": "in"}, "the report would replace the input"),
        ({"report": "no/report"}, "does not exist; make it first"),
    ],
)
def test_files_that_would_destroy_each_other_are_refused(job, tmp_path, options, message):
    for name in ("out.new", "out.part"):
        (tmp_path / name).write_text(json.dumps(plain(1)[0]) + "\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(JobError, match=message):
        job(**{name: str(tmp_path / value) for name, value in options.items()}, restart=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_link_is_followed_and_what_is_no_file_is_refused(job, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real" / "rows")
    assert len(job(plain(3))[1]) == 3
    assert (tmp_path / "out").is_symlink() and sorted(os.listdir(tmp_path / "real")) == ["rows", "rows.job"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JobError, match="is not a regular file"):
        job(output=str(tmp_path / "pipe"), restart=True)
    assert not (tmp_path / "pipe").is_file()


def test_a_file_that_appears_while_a_job_is_stopped_is_not_overwritten(job, tmp_path):
    unfinished(job, tmp_path, plain(50), 30)
    (tmp_path / "out").write_text("precious")
    with pytest.raises(JobError, match="exists, but its job has not finished"):
        job()
    assert (tmp_path / "out").read_text() == "precious"


@pytest.mark.parametrize("begins", [b"\xff\xfei\x00", b"PAR1"])
def test_a_file_that_is_no_text_is_refused_whole(job, tmp_path, begins):
    (tmp_path / "in").write_bytes(begins + b"more")
    with pytest.raises(JobError, match="give JSON Lines in UTF-8"):
        job()
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    "state", ["", "{}", "[]", '{"version": 3, "identity": {"input": {"rows": 1}}}', '{"version": 4}', "[" * 10_000]
)
def test_a_broken_description_is_refused_with_its_name(job, tmp_path, state):
    (tmp_path / "out.job").write_text(state)
    with pytest.raises(JobError, match=r"out.job is not a job's description"):
        job(plain(3))


@pytest.mark.parametrize("version", [1, 2])
def test_a_job_of_an_older_version_is_refused_with_what_to_do(job, tmp_path, version):
    """Its journal does not say which rows are error rows, or its description not which files are the model's."""
    unfinished(job, tmp_path, plain(50), 30)
    state = json.loads((tmp_path / "out.job").read_text())
    (tmp_path / "out.job").write_text(json.dumps({**state, "version": version}))
    before = (tmp_path / "out.part").read_bytes()
    with pytest.raises(JobError, match=r"an older nanovllm wrote .*out.job; finish .* --restart"):
        job()
    assert (tmp_path / "out.part").read_bytes() == before
    assert len(job(restart=True)[1]) == 50


@pytest.mark.parametrize(
    "options",
    [{"on_error": "Stop"}, {"preflight": "al"}, {"seed": -1}, {"price_per_hour": float("nan")},
     {"seconds_between_syncs": -1}, {"restart": True, "dry_run": True}],
)  # fmt: skip
def test_wrong_options_are_refused_when_they_are_made(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        JobOptions("in", "out", MODEL, **options)


def test_a_hub_model_may_get_its_weights_after_the_job_began(tmp_path):
    """Its directory is named by the commit, and an LLM fetches the weights into it."""
    snapshot = tmp_path / "0123abcd"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")

    def identity(model, directory=snapshot):
        return identity_of("digest", 5, directory, {"model": model}, {}, 0)

    hub, local = identity("org/name"), identity(str(snapshot))
    (snapshot / "model.safetensors").write_bytes(b"weights")
    assert identity("org/name") == hub and identity(str(snapshot)) != local
    assert identity("org/name", tmp_path / "4567abcd") != hub


def test_rows_are_on_the_disk_before_names_say_so(job, monkeypatch):
    """No kill shows a missing sync; only a power failure would."""
    calls = []

    def note(name, real):
        def noted(*arguments):
            calls.append(name if name != "replace" else f"replace {os.path.basename(arguments[1])}")
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)

    for name in ("fdatasync", "fsync", "replace"):
        note(name, getattr(os, name))
    job(plain(5), seconds_between_syncs=0.0)
    names = [name for name in calls if name.startswith("replace")]
    assert names == ["replace out.job", "replace out", "replace out.job"]
    for place in (place for place, name in enumerate(calls) if name.startswith("replace")):
        assert calls[place - 1] == "fsync" == calls[place + 1], calls  # of the file, then of its directory
    assert calls[: calls.index("replace out")].count("fdatasync") >= 5


@pytest.mark.parametrize("detokenize", [True, False])
def test_token_ids_are_there_if_the_job_wants_no_text(job, detokenize):
    _, found = job(plain(2), params={"detokenize": detokenize})
    assert all(("token_ids" in row["outputs"][0]) is not detokenize for row in found)


def test_two_runs_never_write_one_output(job, tmp_path):
    journal = Journal(tmp_path / "out.part")
    with pytest.raises(JobError, match="another process is writing"):
        job(plain(3))
    journal.close()
    assert len(job(plain(3))[1]) == 3


def test_results_belong_to_ids_and_not_to_places(job, tmp_path):
    rows = plain(60, temperature=0.9)
    _, found = job(rows)
    random.Random(0).shuffle(rows)
    _, shuffled = job(rows, output=str(tmp_path / "other"))
    shuffled = read(tmp_path / "other")
    assert {row["id"]: row for row in shuffled} == {row["id"]: row for row in found}
    assert [row["id"] for row in shuffled] == [row["id"] for row in rows]
    texts = {row["outputs"][0]["text"] for row in found}
    assert len(texts) == 60
    job(rows, output=str(tmp_path / "seeded"), seed=1)
    assert {row["outputs"][0]["text"] for row in read(tmp_path / "seeded")}.isdisjoint(texts)


def test_a_rows_own_parameters_count_over_the_jobs_and_those_over_the_formats(job):
    seen = []

    class Seeing(FakeLLM):
        def complete(self, number, prompt, params):
            seen.append(params)
            return super().complete(number, prompt, params)

    body = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}
    job([body, {"id": "b", "prompt": "x", "params": {"max_tokens": 3, "seed": 8}}], Seeing, params={"top_p": 0.5})
    by_tokens = {params.max_tokens: params for params in seen}
    assert sorted(by_tokens) == [3, 16] and all(params.top_p == 0.5 for params in seen)
    greedy = by_tokens[16].temperature == 0
    assert by_tokens[3].seed == 8 and (by_tokens[16].seed is None) == greedy


def test_ctrl_c_finishes_what_runs_and_the_same_command_goes_on(job, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    job(plain(300), output=str(tmp_path / "whole"))

    class Interrupted(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 100:
                os.kill(os.getpid(), signal.SIGINT)
            return super().complete(number, prompt, params)

    FakeLLM.made = []
    report, found = job(llm=Interrupted)
    assert found is None and 100 < report["rows"]["finished"] < 120 and report["tail_seconds"] is None
    made = len(FakeLLM.made)
    assert made == report["rows"]["finished"]
    report, found = job()
    assert len(FakeLLM.made) == 300 and found == read(tmp_path / "whole")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_the_process_ignores_stops_nothing(job):
    """Ctrl-C in a shell once stopped the jobs that the shell had started in the background."""

    class Interrupted(FakeLLM):
        def complete(self, number, prompt, params):
            os.kill(os.getpid(), signal.SIGINT)
            return super().complete(number, prompt, params)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert len(job(plain(5), Interrupted)[1]) == 5
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_resumed_job_tokenizes_nothing_in_advance(job, monkeypatch):
    class Interrupted(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 100:
                os.kill(os.getpid(), signal.SIGINT)
            return super().complete(number, prompt, params)

    checked = []
    check = job_module.check_rows
    monkeypatch.setattr(job_module, "check_rows", lambda *given: (checked.append(given[-1]), check(*given))[1])
    job(plain(300), Interrupted, preflight="full")
    assert job(preflight="full")[1] is not None
    job(preflight="full", restart=True)
    assert checked == [300, 0, 300]


def test_nobody_is_told_to_resume_a_dry_run(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_batch", interrupted)
    command = ["run-batch", "-i", "in", "-o", "out", "--model", "bundled"]
    assert main(command) == 130 and "to resume" in capsys.readouterr().err
    assert main([*command, "--dry-run"]) == 130 and "resume" not in capsys.readouterr().err


@pytest.mark.parametrize(("tail", "is_said"), [(None, False), (0.2, False), (4.0, False), (9.0, True)])
def test_a_long_tail_is_said(job, tail, is_said):
    report, _ = job(plain(100))
    report |= {"tail_seconds": tail, "seconds": {"rows": 100.0}}
    assert ("the last 1% of the rows took" in in_words(report)) is is_said
    report["rows"]["finished_before"] = 1  # one of a few rows is more than 1%
    assert "the last 1%" not in in_words(report)


def test_a_second_ctrl_c_stops_at_once_and_nothing_is_lost(job, tmp_path):
    class Impatient(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) in (100, 101):
                os.kill(os.getpid(), signal.SIGTERM)
            return super().complete(number, prompt, params)

    with pytest.raises(KeyboardInterrupt):
        job(plain(300), Impatient)
    num_finished = len(FakeLLM.made)
    _, found = job()
    assert len(found) == 300 and len(FakeLLM.made) <= 300 + 2 and num_finished <= 102


def test_a_full_disk_at_the_end_keeps_all_rows(job, tmp_path, monkeypatch):
    rows, replace = plain(40), os.replace

    def refuse(new, path):
        if not str(path).endswith(".job"):
            raise OSError(28, "No space left on device")
        replace(new, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(JobError, match=r"cannot be written: No space left on device. Make room and run"):
            job(rows)
    assert not list(tmp_path.glob("*.new"))
    FakeLLM.made = []
    assert len(job()[1]) == 40 and FakeLLM.made == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, JobError("a row cannot be written")])
def test_what_stops_a_file_leaves_no_trace_of_it(tmp_path, error):
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises((KeyboardInterrupt, JobError)), whole_file(tmp_path / "file") as file:
        file.write(b"half")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"before"


def test_room_is_asked_for_only_where_it_lacks(tmp_path):
    """If the directory was missing, the message once said to make room."""
    with (
        pytest.raises(JobError, match=r"cannot be written: No such file or directory\. Run the same command again"),
        whole_file(tmp_path / "missing" / "file") as file,
    ):
        file.write(b"")


def test_errors_beyond_the_first_ten_are_counted(job):
    """They were once left out without a message."""
    errors = Errors()
    for number, name in enumerate("abcdefghijklm"):
        for row in (1, 2):
            errors.add(2 * number + row, name, f"error {name}")
    text = errors.in_words()
    assert text.startswith("2 × error a (first: row 2, id 'a'); 2 × error b (first: ")
    assert text.endswith("2 × error e (first: row 10, id 'e'); and 16 more")
    report, _ = job(plain(20))
    report |= {"errors": errors.by_kind()}
    lines = in_words(report).splitlines()
    assert "  2 × error j (first: row 20, id 'j')" in lines
    assert lines[-1] == "  and 6 rows with 3 other errors, which --report writes"


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_description_that_cannot_be_written_is_named(job, tmp_path, monkeypatch, num_written):
    """This may be at the start, or when all rows are finished."""
    numbers, replace = iter(range(9)), os.replace

    def refuse(new, path):
        if str(path).endswith(".job") and next(numbers) >= num_written:
            raise OSError(28, "No space left on device")
        replace(new, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(JobError, match=r"\.job cannot be written: No space left on device. Make room and run"):
            job(plain(40))
    assert not list(tmp_path.glob("*.new"))
    FakeLLM.made = []
    assert len(job()[1]) == 40 and (FakeLLM.made == []) == bool(num_written)


def test_blank_lines_marks_and_a_last_line_without_end_are_read_as_people_mean_them(tmp_path):
    (tmp_path / "in").write_bytes(b'\xef\xbb\xbf{"id": 1}\r\n\n   \n{"id": 2}\n{"id": 3}')
    lines = Lines(str(tmp_path / "in"))
    assert list(lines.scan()) == [b'{"id": 1}', b'{"id": 2}', b'{"id": 3}']
    assert [lines.read(number) for number in (2, 0, 1)] == [b'{"id": 3}', b'{"id": 1}', b'{"id": 2}']
    lines.close()


@given(st.lists(st.integers(0, 50), max_size=300), st.integers(1, 40), st.integers(1, 40))
def test_windows_hold_every_row_once_and_grow(sizes, first_rows, max_num_rows):
    rows = [f"{size:03}{number}" for number, size in enumerate(sizes)]
    planned = list(in_windows(rows, len, lambda row: row, first_rows, max_num_rows))
    assert sorted(planned) == sorted(rows)
    start, size = 0, min(first_rows, max_num_rows)
    while start < len(rows):
        assert planned[start : start + size] == sorted(rows[start : start + size])
        start, size = start + size, min(2 * size, max_num_rows)


def test_windows_of_large_rows_are_small_and_rows_of_one_beginning_keep_their_order():
    rows = [(f"{number % 2}", number) for number in range(100)]
    planned = list(in_windows(rows, lambda row: 2**23, lambda row: row[0]))
    assert planned == [rows[start + place] for start in range(0, 100, 4) for place in (0, 2, 1, 3)]


@pytest.mark.parametrize("max_num_rows", [1, 10, 400])
def test_a_window_is_read_while_the_one_before_is_given_out(max_num_rows):
    """Running rows wait while others are read, so only a few are read at once."""
    num_read = 0

    def reading():
        nonlocal num_read
        for number in range(1000):
            num_read += 1
            yield f"{number}"

    for num_given, _ in enumerate(in_windows(reading(), len, lambda row: row, 4, max_num_rows)):
        assert num_read <= 3 * (num_given + 1) + 4
        assert num_read - num_given <= 2 * max_num_rows + 1
    assert num_read == 1000


def test_a_finished_job_is_no_failure_and_leaves_only_its_output(job, tmp_path, monkeypatch):
    """The journal's last sync once failed after the output was complete, and the report was lost."""
    write, failed = Job._write_output, threading.Event()

    def fails(fd: int) -> None:
        failed.set()
        raise OSError(5, "Input/output error")

    def written_before_it_fails(self, *arguments):
        found = write(self, *arguments)
        monkeypatch.setattr(os, "fdatasync", fails)
        assert failed.wait(60)
        return found

    monkeypatch.setattr(Job, "_write_output", written_before_it_fails)
    report, found = job(plain(5), seconds_between_syncs=0.02, report=str(tmp_path / "report"))
    assert report["rows"]["finished"] == len(found) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out.job", "report"]


def test_an_engines_error_is_not_hidden_by_the_journals(job, tmp_path, monkeypatch, caplog):
    failed = threading.Event()

    def fails(fd: int) -> None:
        failed.set()
        raise OSError(5, "Input/output error")

    class Dies(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 3:
                monkeypatch.setattr(os, "fdatasync", fails)
                assert failed.wait(60)
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().complete(number, prompt, params)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        job(plain(5), Dies, seconds_between_syncs=0.02)
    assert "out.part cannot be synced" in caplog.text
    monkeypatch.undo()
    assert len(job()[1]) == 5


def test_a_job_begins_before_many_rows_are_read():
    """A first window of 2,048 rows once kept the GPU waiting for a quarter of a second."""
    rows = iter(range(10_000))
    next(in_windows(rows, lambda row: 8, lambda row: [row]))
    assert next(rows) <= 256


def test_prompts_of_all_kinds_have_a_place():
    conversation = {"messages": [{"role": "user", "content": "x"}]}
    prompts = [[1, 2], "b", conversation, [], [-1], [2**40], "a", [1]]
    assert [beginning(prompt)[0] for prompt in prompts] == [2, 0, 1, 2, 2, 2, 0, 2]
    planned = list(in_windows(prompts, len, lambda prompt: prompt))
    assert planned[:3] == ["a", "b", conversation] and planned[-2:] == [[1], [1, 2]]


def test_shared_beginnings_stand_together_in_a_shuffled_input():
    rows = [f"prefix {number % 8} own {number}" for number in range(1000)]
    random.Random(0).shuffle(rows)
    planned = list(in_windows(rows, len, lambda row: row, first_rows=1000))
    changes = sum(a[:8] != b[:8] for a, b in pairwise(planned))
    assert changes == 7


def test_only_rows_that_would_run_alone_at_the_end_are_started_first():
    tokens = np.full(10_000, 100)
    assert early_rows(tokens) == []
    tokens[[50, 9_950, 9_999]] = 2_000  # the first of them ends long before the job
    assert early_rows(tokens) == [9_950, 9_999]
    tokens[50] = 20_000  # alone it takes longer than all others
    assert early_rows(tokens) == [50, 9_950, 9_999]
    assert early_rows(np.array([], np.int64)) == []


def test_memory_stays_flat_over_many_rows(job, tmp_path, count):
    """A job keeps some tens of bytes per row."""
    program = (
        "import re, sys; sys.path.insert(0, 'tests')\n"
        "from support.fake_llm import FakeLLM\nfrom nanovllm.jobs.job import Job, JobOptions\n"
        "FakeLLM.made = type('Nothing', (), {'append': lambda self, each: None})()\n"
        "peaks = []\n"
        "for name in ('small', 'large'):\n"
        f"    Job(JobOptions(sys.argv[1] + '/' + name, sys.argv[1] + '/out ' + name, {MODEL!r}, preflight='off'),"
        " FakeLLM).run()\n"
        "    peaks.append(int(re.search(r'VmHWM:\\s+([0-9]+)', open('/proc/self/status').read())[1]))\n"
        "print((peaks[1] - peaks[0]) / 1024)"
    )
    num_rows = count(10_000, 20_000)
    for name, size in (("small", 2_000), ("large", num_rows)):
        with (tmp_path / name).open("w") as file:
            for number in range(size):
                file.write(json.dumps({"id": f"row-{number}", "prompt": f"A short prompt, number {number}"}) + "\n")
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 30 + 8e-5 * num_rows, done.stdout


def test_the_command_runs_a_file_and_says_how_it_went(tmp_path, capsys, caplog):
    rows = [{"id": number, "prompt": f"Q: What is {number} + 3?\nA:"} for number in range(6)]
    rows.append({"id": "chat", "messages": [{"role": "user", "content": "Reverse the word kernel."}]})
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"id": "bad"}]))
    command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", MODEL]
    command += ["--max-tokens", "20", "--temperature", "0", "--max-num-seqs", "4", "--price-per-hour", "2"]
    assert main([*command, "--report", str(tmp_path / "report")]) == 3
    found = read(tmp_path / "out")
    assert [row["outputs"][0]["text"].strip() for row in found[:6]] == [str(number + 3) for number in range(6)]
    assert found[6]["outputs"][0]["text"].strip() == "lenrek" and "exactly one of" in found[7]["error"]
    report = json.loads((tmp_path / "report").read_text())
    assert report["rows"]["finished"] == 8 and report["cost"]["total"] > 0
    assert "error rows: 1 of 8\n" in capsys.readouterr().err
    assert main(command) == 3  # it is finished already
    assert "error rows: 1 of 8\n" in capsys.readouterr().err
    assert main([*command, "--top-p", "0.5"]) == 1
    assert "top_p was None and is 0.5" in capsys.readouterr().err


def full(*arguments: object) -> int:
    raise OSError(28, "No space left on device")


def unreadable(*arguments: object) -> bytes:
    raise OSError(5, "Input/output error")


def test_a_full_disk_while_standard_input_is_copied_is_named(job, tmp_path, monkeypatch):
    """It was "[Errno 28] No space left on device", without a file."""

    class Full(io.BytesIO):
        write = full

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"id": 1, "prompt": "x"}\n')))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: Full())
    message = rf"standard input cannot be copied .*{tmp_path}.*: No space left on device\. Make room and run"
    with pytest.raises(JobError, match=message):
        job(input="-")
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scan", r"/in cannot be read: Input/output error\. Run the same command again"),
        ("read", r"row 1 of /.*/in cannot be read: Input/output error\. Run the same command again"),
    ],
)
def test_an_input_that_cannot_be_read_is_named(job, monkeypatch, name, message):
    monkeypatch.setattr(Lines, name, unreadable)
    with pytest.raises(JobError, match=message):
        job(plain(1))


def test_a_model_that_cannot_be_read_is_named(job, tmp_path, monkeypatch):
    class Unreadable(io.BytesIO):
        read = unreadable

    monkeypatch.setattr(Path, "open", lambda *arguments: Unreadable())
    with pytest.raises(JobError, match=r"x\.json cannot be read: Input/output error"):
        (tmp_path / "x.json").touch()
        fingerprints_of_model(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_report_that_cannot_be_written_is_named(job):
    with pytest.raises(JobError, match=r"the report /dev/full cannot be written: No space left on device\. Make room"):
        job(plain(1), report="/dev/full")
    assert len(job()[1]) == 1
