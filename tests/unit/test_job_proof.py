"""The proof of a job: what the manifest says, that a kill does not change it, and that `verify` finds each change.

Most tests run a fake LLM, which is deterministic.
"""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from support.fake_llm import FakeLLM

from nanovllm import LLM, CompletionOutput
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobError, JobOptions, VerifyOptions, cli, proof, verify
from nanovllm.jobs.job import Job
from nanovllm.jobs.parquet import import_pyarrow
from nanovllm.jobs.report import in_words
from nanovllm.jobs.row_difference import first_difference
from nanovllm.jobs.verify import verified_in_words
from nanovllm.replicas.pool import ReplicaPool

SAMPLED = {"n": 2, "temperature": 0.7}
ROWS: list[dict] = [
    *(
        {"id": f"r{number}", "prompt": f"prompt {number}", "params": SAMPLED if number % 2 else {}}
        for number in range(12)
    ),
    {"custom_id": "c1", "url": "/v1/completions", "body": {"prompt": "x"}},
    {"custom_id": "c2", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}},
    {"custom_id": "c3", "url": "/v1/embeddings", "body": {"input": "x"}},
    {"id": "e1", "task": "embed", "prompt": "x", "dimensions": 8},
    {"id": "s1", "task": "score", "query": "x", "document": "y"},
    {"id": "bad", "prompt": 5},
    {"prompt": "a row without an id"},
]
FILES = ("out", "out.manifest", "out.rows")


class Other(FakeLLM):
    """A fake with other results."""

    def complete(self, number, prompt, params):
        return super().complete(number, f"{prompt} changed", params)


class Alone(FakeLLM):
    """Notes the number of prompts of each call."""

    sizes: list[int] = []

    def generate_iter(self, prompts, params, **options):
        prompts = list(prompts)
        self.sizes.append(len(prompts))
        return super().generate_iter(iter(prompts), params, **options)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def job(directory):
    """Runs a deterministic job of these rows; returns its report."""

    def run(rows=ROWS, llm=FakeLLM, engine=None, **options):
        Path("in").write_text("".join(json.dumps(row) + "\n" for row in rows))
        default = JobOptions("in", "out", str(MODEL_DIRECTORY), {"deterministic": True} | (engine or {}))
        return Job(replace(default, preflight="off", **options), llm).run()

    return run


def manifest_of(output="out") -> dict:
    return json.loads(Path(f"{output}.manifest").read_text())


def sealed(change, output="out") -> None:
    """Changes a manifest, and gives it the right checksum."""
    manifest = manifest_of(output)
    change(manifest)
    manifest["checksum"] = proof._checksum(manifest)
    Path(f"{output}.manifest").write_text(json.dumps(manifest))


def check(output="out", llm=FakeLLM, **options) -> dict:
    return verify(VerifyOptions(output, **({} if "rows" in options else {"sample": 100}) | options), llm)


def names(report) -> list[str]:
    return [difference["what"] for difference in report["differences"]]


# The manifest


def test_the_manifest_says_what_the_rows_were_made_of(job):
    report = job(params={"max_tokens": 7}, seed=3, engine={"max_num_seqs": 5})
    manifest, lines = manifest_of(), Path("out").read_bytes().splitlines(keepends=True)
    whole = sha256(Path("out").read_bytes()).hexdigest()
    assert manifest["output"]["sha256"] == whole and manifest["output"]["rows"] == len(lines) == len(ROWS)
    assert Path("out.rows").read_text().split() == [sha256(line).hexdigest()[:32] for line in lines]
    assert manifest["output"]["hashes_sha256"] == sha256(Path("out.rows").read_bytes()).hexdigest()
    assert manifest["job"]["seed"] == 3 and manifest["job"]["params"] == {"max_tokens": 7}
    assert manifest["job"]["input"]["rows"] == len(ROWS)
    engine = {"deterministic": True, "max_num_seqs": 5}
    assert manifest["options"] == {"input": ["in"], "model": str(MODEL_DIRECTORY), "engine": engine}
    environment = manifest["environment"]
    config = sha256((MODEL_DIRECTORY / "config.json").read_bytes()).hexdigest()
    assert environment["files"]["config.json"] == config
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} < environment["files"].keys()
    assert len(environment["chat_template"]) == 64 and environment["num_ranks"] == 1
    wanted = {"nanovllm", "torch", "triton", "transformers", "tokenizers", "python"}
    assert wanted <= environment["versions"].keys() and environment["versions"]["python"] == sys.version.split()[0]
    assert environment["device"]["type"] == "cpu" and environment["dtype"] == "float32"
    assert report["manifest"] == {
        "path": str(Path("out.manifest").resolve()), "rows": len(ROWS), "output": whole, "weights": "0" * 16,
        "versions": environment["versions"], "device": environment["device"],
    }  # fmt: skip


def test_the_report_ends_with_a_command_that_a_shell_reads(job):
    Path("a dir").mkdir()
    (line,) = (line for line in in_words(job(output="a dir/out")).splitlines() if "nanovllm verify" in line)
    assert shlex.split(line[line.index("nanovllm verify") :])[2:] == [str(Path("a dir/out").resolve())]


def test_a_tokenizer_of_its_own_has_its_files_in_the_manifest(job, directory):
    shutil.copytree(MODEL_DIRECTORY, "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    job(engine={"tokenizer": "tokenizer"})
    files = manifest_of()["environment"]["files"]
    assert files["tokenizer: tokenizer.json"] == files["tokenizer.json"]


def test_a_killed_job_has_the_same_files_as_one_that_was_not(job):
    class Dying(FakeLLM):
        after = 5

        def complete(self, number, prompt, params):
            Dying.after -= 1
            if not Dying.after:
                raise RuntimeError("killed")
            return super().complete(number, prompt, params)

    job()
    whole = [Path(name).read_bytes() for name in FILES]
    for name in (*FILES, "out.job"):
        os.unlink(name)
    for _ in range(2):
        Dying.after = 6
        with pytest.raises(RuntimeError, match="killed"):
            job(llm=Dying)
        assert not Path("out.manifest").exists()
    assert job()["rows"]["finished_before"] > 5
    assert [Path(name).read_bytes() for name in FILES] == whole
    assert b'"created":0' in whole[0]


def test_a_job_killed_before_its_output_writes_its_proof_without_a_model(job, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("nanovllm.jobs.job.write_proof", fails)
        with pytest.raises(RuntimeError, match="killed"):
            job()
    assert not Path("out").exists()
    report = job(llm=None)
    assert report["manifest"]["weights"] == "0" * 16 and check()["differences"] == []


def test_a_job_goes_on_only_in_the_environment_in_which_it_began(job):
    class Dying(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 3:
                raise RuntimeError("killed")
            return super().complete(number, prompt, params)

    class Elsewhere(FakeLLM):
        def provenance(self):
            found = super().provenance()
            weights = {"all": "f" * 16, "tensors": {**found["weights"]["tensors"], "b": "3" * 16}}
            return {**found, "device": {**found["device"], "name": "another"}, "weights": weights}

    FakeLLM.made.clear()
    with pytest.raises(RuntimeError, match="killed"):
        job(llm=Dying)
    before = Path("out.part").read_bytes()
    with pytest.raises(JobError, match=r"another environment.*the weight b was '2{16}' and is '3{16}'.*device's name"):
        job(llm=Elsewhere)
    with pytest.raises(JobError, match="deterministic was True and is None"):
        job(engine={"deterministic": False})
    assert Path("out.part").read_bytes() == before


def test_options_that_a_manifest_cannot_hold_are_refused(job):
    with pytest.raises(JobError, match=r"tokenizer=PosixPath.* is not; give it as a string"):
        job(engine={"tokenizer": MODEL_DIRECTORY})
    with pytest.raises(JobError, match="logits_processors"):
        job(params={"logits_processors": [print]})


PROOF = {"deterministic": True}


@pytest.mark.parametrize("name", ["out.manifest", "out.rows", "out.manifest.new"])
def test_no_input_or_report_of_a_deterministic_job_is_a_file_of_its_proof(directory, name):
    Path(name).write_text('{"prompt": "x"}\n')
    Path("in").write_text('{"prompt": "x"}\n')
    for is_dry in (False, True):
        for given, report in ((name, None), ("in", Path(name))):
            with pytest.raises(JobError, match="the job itself writes"):
                Job(JobOptions(given, "out", "bundled", PROOF, report=report, dry_run=is_dry), FakeLLM).run()
    options = JobOptions("*", "out", "bundled", PROOF, preflight="off", restart=True)  # a pattern does not match it
    assert Job(options, FakeLLM).run()["rows"]["total"] == 1


@pytest.mark.parametrize("name", ["out.manifest", "out.rows"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_plain_job_leaves_files_named_like_a_proof_alone(directory, name, restart):
    text = '{"prompt": "x"}\n'
    Path(name).write_text(text)
    options = JobOptions(name, "out", "bundled", preflight="off", restart=restart)
    assert Job(options, FakeLLM).run()["rows"]["finished"] == 1
    assert Path(name).read_text() == text
    Job(replace(options, restart=True, seed=1), FakeLLM).run()
    assert Path(name).read_text() == text


@pytest.mark.parametrize("name", ["out.manifest", "out.rows"])
@pytest.mark.parametrize("has_description", [False, True])
def test_a_new_proof_does_not_replace_a_file_that_the_job_did_not_write(job, name, has_description):
    if has_description:  # of a plain job that finished no row

        class Failing(FakeLLM):
            def generate_iter(self, *arguments, **options):
                raise RuntimeError("killed")

        with pytest.raises(RuntimeError, match="killed"):
            job(llm=Failing, engine={"deterministic": False})
        assert Path("out.job").exists()
    Path(name).write_text("mine")
    with pytest.raises(JobError, match=rf"{name} exists, and no out.job says that this job wrote it.*--restart"):
        job()
    assert Path(name).read_text() == "mine" and not Path("out").exists()
    job(restart=True)
    assert check()["differences"] == []


def test_a_proof_goes_with_the_rows_that_it_proved(job):
    """Also if a person deleted the output, and the same job begins again."""

    class Failing(FakeLLM):
        def generate_iter(self, *arguments, **options):
            raise RuntimeError("killed")

    job()
    os.unlink("out")
    with pytest.raises(RuntimeError, match="killed"):
        job(llm=Failing)
    assert not Path("out.manifest").exists() and not Path("out.rows").exists()


def test_restart_replaces_a_description_that_cannot_be_read(job):
    job()
    Path("out.job").write_text("damaged")
    with pytest.raises(JobError, match="not a job's description"):
        job()
    job(restart=True)
    assert check()["differences"] == []


def test_standard_output_has_no_manifest_and_the_log_says_so(job, directory, caplog, capfdbinary):
    job(ROWS[:2], output="-")
    assert "no manifest" in caplog.text and [path.name for path in directory.iterdir()] == ["in"]


def test_a_job_without_determinism_has_no_manifest(job, capsys):
    """With --restart, it also deletes the manifest of the job before it."""
    assert "manifest" in job()
    assert "manifest" not in job(engine={"deterministic": False}, restart=True)
    assert not Path("out.manifest").exists() and not Path("out.rows").exists()
    assert cli.main(["verify", "out"]) == 1
    assert "there is no manifest" in (said := capsys.readouterr().err) and "--deterministic" in said


# Verification


@pytest.mark.parametrize("output", ["out", "out.parquet"])
@pytest.mark.parametrize("columns", [{}, {"prompt_column": "prompt", "id_column": "id"}], ids=["rows", "columns"])
def test_each_row_runs_alone_and_gives_the_same_bytes(job, output, columns):
    rows = ROWS if not columns else [{"id": str(each), "prompt": f"p {each}", "label": each / 2} for each in range(9)]
    job(rows, output=output, **columns)
    Alone.sizes = []
    report = check(output, Alone)
    assert report["differences"] == [] and report["rows"]["run"] == report["rows"]["equal"]
    num_errors = sum("bad" in row.values() for row in rows)
    assert len(report["rows"]["run"]) == len(rows) and Alone.sizes == [1] * (len(rows) - num_errors)
    assert json.loads(json.dumps(report)) == report and verified_in_words(report).endswith("no differences")


@pytest.mark.parametrize("output", ["out", "out.parquet"])
@pytest.mark.parametrize("is_table", [False, True], ids=["lines", "table"])
def test_a_row_has_its_own_data_columns_when_it_runs_alone(directory, output, is_table):
    rows = [{"id": str(number), "prompt": f"p {number}", "label": number / 2} for number in range(9)]
    if is_table:
        pyarrow, parquet = import_pyarrow("in")
        parquet.write_table(pyarrow.Table.from_pylist(rows), "in.parquet", row_group_size=4)
    else:
        Path("in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = JobOptions(
        "in.parquet" if is_table else "in", output, "bundled", {"deterministic": True}, preflight="off",
        prompt_column="prompt", id_column="id",
    )  # fmt: skip
    Job(options, FakeLLM).run()
    report = check(output, rows=[3, 6, 8])
    assert report["differences"] == [] and report["rows"]["equal"] == [3, 6, 8]


def test_a_sample_is_seeded_and_rows_are_chosen_by_number(job):
    job()
    chosen = [check(sample=4, seed=seed)["rows"]["run"] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2] and len(chosen[0]) == 4
    by_number = check(rows=[7, 2, 7])
    assert by_number["rows"]["run"] == [2, 7] and by_number["seed"] is None
    assert "the rows that ran: 2, 7\n" in verified_in_words(by_number)
    assert len(verify(VerifyOptions("out"), FakeLLM)["rows"]["run"]) == len(ROWS)  # 20 by default
    with pytest.raises(JobError, match=r"there is no row 20: the job has 19 rows, numbered from 1"):
        check(rows=[1, 20])
    with pytest.raises(ValueError, match="rows must be at least 1, not 0"):
        check(rows=[0])
    with pytest.raises(TypeError, match="sample must be an integer"):
        check(sample=1.5)
    for others, words in (({"sample": 3}, "sample"), ({"seed": 0}, "seed"), ({"sample": 0, "seed": 1}, "sample and")):
        with pytest.raises(ValueError, match=f"rows names the rows, and {words}.* would choose them; leave one"):
            check(rows=[1], **others)


def test_each_sample_has_a_new_seed_with_which_it_can_be_chosen_again(job):
    job([{"prompt": f"p {number}"} for number in range(100)])
    reports = [check(sample=30) for _ in range(3)]
    assert len({tuple(report["rows"]["run"]) for report in reports}) > 1
    for report in reports:
        rows, seed = report["rows"]["run"], report["seed"]
        assert check(sample=30, seed=seed)["rows"]["run"] == rows
        said = f"the rows that ran (chosen with --seed {seed}): {', '.join(map(str, rows[:20]))} and 10 more\n"
        assert said in verified_in_words(report)


def test_without_a_sample_no_model_is_loaded_and_the_words_say_so(job):
    job()
    report = check(llm=None, sample=0)
    said = "no row was run; the weights and the device were not compared; no differences"
    assert report["differences"] == [] and verified_in_words(report).endswith(said)
    replaced("in", b"prompt 3", b"prompt 4")
    report = check(llm=None, sample=0)
    (difference,) = report["differences"]
    assert difference["what"] == f"the input's digest (read from {Path('in').resolve()})" and report["advice"] is None
    assert "--anyway" not in verified_in_words(report)


@pytest.mark.parametrize("rows", [5, "12", {1}, iter([1])], ids=["number", "text", "set", "iterator"])
def test_rows_must_be_a_list_or_a_tuple_of_integers(rows):
    assert VerifyOptions("out", rows=(1, 2)).chosen(2) == [0, 1] and VerifyOptions("out", rows=[]).chosen(2) == []
    with pytest.raises(TypeError, match=r"rows must be a list or a tuple of integers, such as \[5, 71203\], not"):
        VerifyOptions("out", rows=rows)
    with pytest.raises(TypeError, match="rows must be integers, not '1'"):
        VerifyOptions("out", rows=["1"])


def test_a_row_that_differs_is_named_with_its_first_token(job):
    job(ROWS[:3])
    report = check(llm=Other)
    assert report["rows"]["equal"] == [] and names(report)[0].startswith("row 1, run alone: token 1 of completion 1")
    assert report["differences"][0]["recorded"] in Path("out").read_text()


def replaced(name: str, old: bytes, new: bytes) -> None:
    data = Path(name).read_bytes()
    assert data.count(old) >= 1
    Path(name).write_bytes(data.replace(old, new, 1))


def swap_rows() -> None:
    lines = Path("out").read_bytes().splitlines(keepends=True)
    lines[2], lines[5] = lines[5], lines[2]
    Path("out").write_bytes(b"".join(lines))


def keep_rows(*ranges) -> None:
    lines = Path("out").read_bytes().splitlines(keepends=True)
    Path("out").write_bytes(b"".join(line for start, end in ranges for line in lines[start:end]))


COUNT = "the number of rows of the output was 19 and is "


@pytest.mark.parametrize(
    ("change", "found", "counts"),
    [
        (lambda: replaced("out", b'"id":"r3"', b'"id":"r4"'), ["row 4 of the output: its hash", "row 4 of"], (1, 0)),
        (swap_rows, [f"row {row} of the output" for row in (3, 6, 3, 6)], (2, 0)),
        (lambda: Path("out").write_bytes(Path("out").read_bytes()[:-1]), ["row 19 of the output"] * 2, (1, 0)),
        (lambda: keep_rows((0, 18)), [f"{COUNT}18"], (0, 1)),
        (lambda: keep_rows((0, 0)), [f"{COUNT}0"], (0, 19)),
        (lambda: Path("out").write_bytes(Path("out").read_bytes() + b"{}\n"), [f"{COUNT}20"], (0, 0)),
        (
            lambda: keep_rows((0, 4), (5, 19)),
            [f"{COUNT}18", "rows from 5 on have moved: the number of the first of them was 6 and is 5"],
            (14, 1),
        ),
        (
            lambda: keep_rows((0, 4), (7, 19)),
            [f"{COUNT}16", "rows from 5 on have moved: the number of the first of them was 8 and is 5"],
            (12, 3),
        ),
        (
            lambda: keep_rows((0, 4), (2, 19)),
            [f"{COUNT}21", "rows from 5 on have moved: the number of the first of them was 5 and is 7"],
            (15, 0),
        ),
        (
            lambda: [keep_rows((0, 17), (18, 19)), replaced("out", b'"id":"r3"', b'"id":"r4"')],
            [f"{COUNT}18", *(f"row {row} of the output" for row in (4, 18, 4, 18))],
            (2, 1),
        ),
    ],
    ids=["a byte", "swapped rows", "no last line feed", "no last row", "no row", "a row more", "a row deleted",
         "rows deleted", "rows inserted", "a row deleted and one changed"],
)  # fmt: skip
def test_a_changed_output_is_found_and_the_rows_still_run(job, change, found, counts):
    job()
    change()
    report = check()
    said = verified_in_words(report).splitlines()[: len(report["differences"])]
    assert len(said) == len(found) and all(map(str.startswith, said, found))
    assert (report["rows"]["changed"], report["rows"]["missing"]) == counts
    missing = f", {counts[1]} of them missing" if counts[1] else ""
    assert f"19 rows, {counts[0]} of them changed{missing}; 19 of the 19 rows" in verified_in_words(report)
    assert report["rows"]["equal"] == [*range(1, len(ROWS) + 1)] and report["advice"] is None


def test_a_changed_row_is_named_with_the_first_token_that_differs_from_its_rerun(job):
    """Though the rerun gives the hash that the job recorded."""
    job(ROWS[:3])
    text = json.loads(Path("out").read_bytes().splitlines()[1])["outputs"][0]["text"]
    replaced("out", text[:4].encode(), b"zzzz")
    report = check(rows=[2])
    assert names(report)[1] == "row 2 of the output, beside its rerun: token 1 of completion 1 (outputs.0.text)"
    assert report["differences"][1]["recorded"] == text[:40] and report["differences"][1]["found"][:4] == "zzzz"
    assert report["rows"]["equal"] == [2]
    assert "1 of the 1 row that ran alone gave the bytes that the job recorded" in verified_in_words(report)


def test_many_changed_rows_are_counted(job):
    job([{"prompt": f"p {number}"} for number in range(50)])
    Path("out").write_bytes(Path("out").read_bytes().replace(b'"error"', b'"errors"'))
    report = check(sample=0)
    assert len(report["differences"]) == 21 and report["differences"][-1]["found"] == 30
    assert report["rows"]["changed"] == 50


def test_a_row_that_changed_in_both_places_is_named(job):
    job(ROWS[:2])
    replaced("out", b'"id":"r1"', b'"id":"r4"')
    assert any("row 2, run alone (its row" in name for name in names(check(llm=Other)))


def change_template() -> None:
    replaced("model/chat_template.jinja", b"{", b" {")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_template, ["the SHA-256 of chat_template.jinja", "the SHA-256 of the chat template in use"]),
        (lambda: replaced("model/tokenizer_config.json", b"{", b"{ "), ["the SHA-256 of tokenizer_config.json"]),
        (lambda: replaced("model/generation_config.json", b"{", b"{ "), ["the SHA-256 of generation_config.json"]),
        (lambda: replaced("in", b"prompt 3", b"prompt 4"), ["the input's digest"]),
        (lambda: Path("in").write_text(Path("in").read_text() + '{"prompt": "x"}\n'), ["the input's digest", "rows"]),
    ],
    ids=["chat template", "tokenizer", "generation config", "input row", "one more input row"],
)
def test_a_changed_origin_is_found_and_no_row_runs(job, change, found):
    shutil.copytree(MODEL_DIRECTORY, "model")
    job(model="model")
    assert check()["differences"] == []
    change()
    report = check(llm=None)
    assert len(names(report)) == len(found)
    assert all(part in name for part, name in zip(found, names(report), strict=True))
    assert report["rows"]["run"] == [] and "--anyway" in report["advice"] in verified_in_words(report)
    anyway = check(anyway=True)
    assert len(anyway["rows"]["run"]) == len(ROWS) and anyway["advice"] is None


def test_a_changed_input_row_run_anyway_is_the_one_that_differs(job):
    job()
    replaced("in", b"prompt 3", b"prompt 5")
    report = check(anyway=True)
    assert report["rows"]["equal"] == [number for number in range(1, 20) if number != 4]
    assert names(report)[1].startswith("row 4, run alone: token 1 of completion 1 (outputs.0.text)")


def test_an_output_and_notes_in_the_models_directory_are_not_files_of_the_model(job, capsys):
    shutil.copytree(MODEL_DIRECTORY, "model", ignore=shutil.ignore_patterns("generation_config.json"))
    report = job(model="model", output="model/out")
    assert check("model/out")["differences"] == [] and job(llm=None, model="model", output="model/out") == report
    Path("model/notes.txt").write_text("a note")
    Path("model/report.json").write_text("{}")
    assert check("model/out")["differences"] == [] and job(llm=None, model="model", output="model/out") == report
    Path("model/generation_config.json").write_text("{}")  # this one decides parameters
    assert names(check("model/out", llm=None)) == ["the SHA-256 of generation_config.json"]


def test_a_deterministic_job_goes_on_beside_new_notes(job):
    class Dying(FakeLLM):
        def complete(self, number, prompt, params):
            if prompt == "prompt 9":
                raise RuntimeError("killed")
            return super().complete(number, prompt, params)

    shutil.copytree(MODEL_DIRECTORY, "model")
    with pytest.raises(RuntimeError, match="killed"):
        job(llm=Dying, model="model")
    Path("model/notes.txt").write_text("a note")
    assert job(model="model")["rows"]["finished_before"] > 0 and check()["differences"] == []


def test_another_version_is_found(job, monkeypatch):
    job()
    monkeypatch.setattr(proof, "version", lambda package: "0.0.1")
    report = check(llm=None)
    assert "the version of torch" in names(report) and "the version of nanovllm" not in names(report)
    assert re.search(r"the version of torch was '2.*' and is '0.0.1'", verified_in_words(report))


def test_another_device_and_other_weights_are_found_before_a_row_runs(job):
    class Elsewhere(FakeLLM):
        def provenance(self):
            found = super().provenance()
            return {**found, "device": {**found["device"], "name": "B"}, "weights": {"all": "x", "tensors": {"a": "y"}}}

        def generate_iter(self, *arguments, **options):
            raise AssertionError

    job()
    report = check(llm=Elsewhere)
    assert names(report) == [
        "the digest of all weights", "the weight a", "the weight b", "the device's name"
    ]  # fmt: skip
    assert "the weight a was '1111111111111111' and is 'y'" in verified_in_words(report)
    assert "the weight b was '2222222222222222' and is missing" in verified_in_words(report)
    assert report["rows"]["run"] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["job"].update(seed=1),
        lambda manifest: manifest["job"].update(params={"max_tokens": 5}),
        lambda manifest: manifest["options"].update(model="bundled"),
    ],
    ids=["seed", "parameters", "model's name"],
)
def test_a_forged_manifest_is_found_by_the_rows(job, change):
    job()
    sealed(change)
    report = check()
    assert 0 < len(report["rows"]["equal"]) < len(ROWS) and all("run alone" in name for name in names(report))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:500], "cannot be read as a manifest"),
        (lambda data: b"[]", "is not the manifest of a job"),
        (lambda data: b'{"format": 2}', "has format 2, and this nanovllm reads format 1"),
        (lambda data: data.replace(b'"seed": 0', b'"seed": 1'), "its checksum does not match"),
        (lambda data: b'{"format": 1}', "its checksum does not match"),
        (lambda data: b"\xff", "cannot be read as a manifest"),
    ],
    ids=["cut", "a list", "another format", "edited", "hand-made", "not UTF-8"],
)
def test_a_damaged_manifest_is_refused_with_what_is_wrong(job, capsys, change, message):
    job()
    path = Path("out.manifest")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(JobError, match=message):
        check()
    assert cli.main(["verify", "out"]) == 1 and len(capsys.readouterr().err.splitlines()) == 1


def test_hashes_and_output_must_be_those_of_the_manifest(job):
    job()
    replaced("out.rows", b"0", b"1")
    with pytest.raises(JobError, match=r"does not belong to out.manifest"):
        check()
    os.unlink("out.rows")
    with pytest.raises(JobError, match="the hashes of the rows, cannot be read: No such file"):
        check()
    job(restart=True)
    os.unlink("out")
    with pytest.raises(JobError, match="there is no output"):
        check()


def test_moved_inputs_and_models_are_named_by_options(job):
    shutil.copytree(MODEL_DIRECTORY, "model")
    job(model="model")
    os.rename("in", "moved")
    os.rename("model", "elsewhere")
    with pytest.raises(JobError, match=r"'model' is not a directory.*; if the model has moved, name it"):
        check(input="moved")
    with pytest.raises(JobError, match=r"no file 'in'; if the input has moved, name it with --input \(a relative"):
        check(model="elsewhere")
    assert check(input="moved", model="elsewhere")["differences"] == []


def test_parquet_rows_are_hashed_by_their_values(job):
    """Another version of pyarrow writes other bytes of the same rows."""
    rows = [
        {"id": str(number), "task": "embed", "prompt": f"p {number}", "dimensions": 1 + number % 3}
        for number in range(5)
    ]
    job([*rows, *ROWS], output="out.parquet")
    pyarrow, parquet = import_pyarrow("out.parquet")
    table, before = parquet.read_table("out.parquet"), Path("out.parquet").read_bytes()
    parquet.write_table(table, "out.parquet", compression="gzip", row_group_size=3)
    assert Path("out.parquet").read_bytes() != before and check("out.parquet")["differences"] == []
    vectors = table["embedding"].to_pylist()
    vectors[3][0] += 1e-6
    column = pyarrow.array(vectors, table["embedding"].type)
    parquet.write_table(table.set_column(table.schema.get_field_index("embedding"), "embedding", column), "out.parquet")
    report = check("out.parquet", rows=[1, 4])
    places = ["row 4 of the output: its hash", "row 4 of the output, beside its rerun: embedding"]
    assert names(report) == places and report["rows"]["equal"] == [1, 4]


def test_a_table_names_the_first_token_too(job):
    job(ROWS[:1], output="out.parquet")
    assert names(check("out.parquet", Other))[0].startswith("row 1, run alone: token 1 of completion 1")


# The first difference

LOGPROBS = [{"id": 5, "token": "a", "logprob": -0.5, "rank": 1, "top": []} for _ in range(3)]
PLAIN = {"id": "a", "outputs": [{"index": 0, "text": "abcd", "cumulative_logprob": -1.5, "logprobs": LOGPROBS}]}


def changed(row, *path_and_value):
    *path, last, value = path_and_value
    row = json.loads(json.dumps(row))
    inner = row
    for name in path:
        inner = inner[name]
    inner[last] = value
    return row


def place_of(old, new, ids=(), tokenizer=None):
    completions = [CompletionOutput(0, "", list(ids), "length")]
    return first_difference(*(json.dumps(each).encode() for each in (old, new)), completions, tokenizer)


def test_a_differing_token_comes_before_its_log_probability():
    new = changed(changed(PLAIN, "outputs", 0, "text", "abXd"), "outputs", 0, "logprobs", 0, "logprob", -0.25)
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(chr(each) for each in ids))
    assert place_of(PLAIN, new, map(ord, "abXd"), tokenizer) == ("token 3 of completion 1 (outputs.0.text)", "cd", "Xd")
    assert place_of(PLAIN, changed(PLAIN, "outputs", 0, "text", "ab"), map(ord, "ab"), tokenizer)[0].startswith(
        "token 3"
    )
    assert place_of(PLAIN, new)[0] == "character 3 of completion 1 (outputs.0.text)"
    ids = [changed(PLAIN, "outputs", 0, "token_ids", each) for each in ([1, 2, 3], [1, 2, 4])]
    assert place_of(*ids) == ("token 3 of completion 1 (outputs.0.token_ids.2)", 3, 4)


def test_a_differing_log_probability_comes_before_their_sum():
    new = changed(changed(PLAIN, "outputs", 0, "cumulative_logprob", -2), "outputs", 0, "logprobs", 1, "logprob", -1.0)
    place = "the log-probability of token 2 of completion 1 (outputs.0.logprobs.1.logprob)"
    assert place_of(PLAIN, new) == (place, -0.5, -1.0)
    table = [{**row, "outputs": [{**row["outputs"][0], "logprobs": json.dumps(row["outputs"][0]["logprobs"])}]}
             for row in (PLAIN, new)]  # fmt: skip
    assert place_of(*table) == (place, -0.5, -1.0)


def test_any_other_difference_is_named_by_its_place():
    assert place_of(PLAIN, {**PLAIN, "error": "x"}) == ("error", None, "x")
    assert first_difference(b"{}\n", b"{ }\n", [], None)[0] == "the bytes of the row"
    assert first_difference(b"{\n", b"{}\n", [], None) == ("the row, which is not JSON", "{\n", "{}\n")


@pytest.mark.parametrize("name", ["response", "logprobs", "prompt_logprobs"])
def test_texts_of_data_are_not_read_as_json(name):
    """Whether they differ or not, and whether they are JSON or not."""
    for data in ({name: "plain {text"}, [{name: "x"}], {name: "5"}):
        new = changed({**PLAIN, "data": data}, "outputs", 0, "text", "abXd")
        assert place_of({**PLAIN, "data": data}, new)[0] == "character 3 of completion 1 (outputs.0.text)"
    for texts in (['{"a": 1}', '{"a": 2}'], ['{"a": 1', '{"a": 2']):
        place, *values = place_of(*({**PLAIN, "data": {name: text}} for text in texts))
        assert values == texts and place.removesuffix(")").endswith(f"data.{name}")
    tables = ({"response": '{"status": 200}'}, {"response": '{"status": 500}'})
    assert place_of(*tables) == ("response.status", 200, 500)
    assert place_of({"response": "x"}, {"response": "y"}) == ("response", "x", "y")


# The command


def test_the_exit_status_of_verify_says_what_was_found(job, monkeypatch, capsys):
    job(ROWS[:3])
    monkeypatch.setattr(cli, "verify", lambda options: verify(options, FakeLLM))
    assert cli.main(["verify", "out"]) == 0 and "no differences" in capsys.readouterr().out
    assert (
        cli.main(["verify", "out", "--rows", "1,3"]) == 0
        and "2 of the 2 rows that ran alone" in capsys.readouterr().out
    )
    assert cli.main(["verify", "out", "--rows", "4"]) == 1 and "there is no row 4" in capsys.readouterr().err
    replaced("out", b"r1", b"r2")
    assert cli.main(["verify", "out", "--sample", "1", "--seed", "4"]) == 3
    assert "row 2 of the output: its hash was" in capsys.readouterr().out
    for words in (["--rows", "0"], ["--rows=-1"], ["--sample", "-1"], ["--rows", "1", "--sample", "0"]):
        assert cli.main(["verify", "out", *words]) == 2
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1 and not said.out
    for words in (["verify"], ["verify", "out", "--rows", "one"], ["verify", "out", "--row", "1"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1

    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "verify", interrupted)
    assert cli.main(["verify", "out"]) == 130


def test_the_exit_statuses_of_verifys_help_are_those_of_the_code(capsys):
    found = [int(each) for each in re.findall(r"^ +(\d+)  ", cli._verify.__doc__, re.MULTILINE)]
    assert found == [each for each in cli.Exit if each is not cli.Exit.ALL_ERRORS]
    with pytest.raises(SystemExit):
        cli.main(["verify", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--sample NUMBER how many rows to run again, chosen at random. By default (None), 20." in said
    assert "By default (None) it is a new one each time, which the result names." in said
    with pytest.raises(SystemExit):
        cli.main(["run-batch", "--help"])
    assert "--deterministic, --no-deterministic" in capsys.readouterr().out


# The real LLM, and replicas


def test_a_flipped_bit_of_a_weight_is_found_and_changes_a_row(job):
    shutil.copytree(MODEL_DIRECTORY, "model")
    params = {"max_tokens": 6, "temperature": 0, "logprobs": 1}
    rows = [{"id": 1, "prompt": "once", "params": params}]
    job(rows, LLM, {}, model="model")
    manifest = manifest_of()["environment"]
    assert manifest["device"]["instructions"] and len(manifest["weights"]["tensors"]) > 50
    data = bytearray(Path("model/model.safetensors").read_bytes())
    data[-2] ^= 1 << 4  # a bit of the mantissa of the last weight, in bfloat16
    Path("model/model.safetensors").write_bytes(data)
    report = check(llm=LLM, anyway=True)
    tensors = [name for name in names(report) if name.startswith("the weight ")]
    assert len(tensors) == 1 and "the digest of all weights" in names(report)
    assert re.match(r"row 1, run alone: .*token \d of completion 1", names(report)[-1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"weights": {"all": "b"}}, "weights;"), ({"dtype": "float64"}, r"dtype \(float64, not float32\);")],
    ids=["weights", "dtype"],
)
def test_a_replica_that_differs_ends_all_of_them_when_it_is_ready(changes, words):
    facts = {"weights": {"all": "a"}, "dtype": "float32"}
    pool = ReplicaPool.__new__(ReplicaPool)
    pool.provenance, pool._failure, pool._end, pool._inbox = {}, None, lambda: None, SimpleQueue()
    for name, of in (("replica 0", facts), ("replica 1", dict(facts)), ("replica 2", facts | changes)):
        pool._inbox.put((SimpleNamespace(child=SimpleNamespace(name=name)), ("ready", of, {}, [], 4)))
    assert [pool.receive()[0].child.name for _ in range(2)] == ["replica 0", "replica 1"] and pool.provenance == facts
    with pytest.raises(RuntimeError, match=f"^replica 2 differs from the first replica that started, in its {words}"):
        pool.receive()
    assert pool._failure is not None
