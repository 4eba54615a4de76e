"""Jobs whose rows have LoRA adapters: which adapter each row gets, what is refused, what a resumed job must have."""

import json
from dataclasses import replace

import pytest
from support.fake_llm import FakeLLM

from nanovllm import LoRARequest
from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import cli
from nanovllm.jobs import job as job_module
from nanovllm.jobs.adapters import warn_if_unused
from nanovllm.jobs.cli import main
from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import Job, JobOptions
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.paths import JobPaths
from nanovllm.jobs.plan import in_windows
from nanovllm.jobs.rows import parse_row
from nanovllm.replicas import worker
from nanovllm.replicas.iterator import ReplicaIterator
from nanovllm.replicas.replicas import Replicas, _with_adapters

CHAT = [{"role": "user", "content": "Hi"}]
OPENAI = {"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "p"}}


class Seen(FakeLLM):
    """The last one that was made."""

    last: "Seen"

    def __init__(self, model, **options):
        super().__init__(model, **options)
        Seen.last = self


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A directory with the adapters "sql" and "law"."""
    monkeypatch.chdir(tmp_path)
    FakeLLM.made = []
    for name in ("sql", "law"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8}')
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    return tmp_path


def write(rows) -> None:
    with open("in", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def run(rows=None, llm=Seen, **options):
    """Runs a job of these rows; returns its output rows."""
    if rows is not None:
        write(rows)
    default = JobOptions("in", "out", str(MODEL_DIRECTORY), adapters={"sql": "sql", "law": "law"}, preflight="off")
    Job(replace(default, **options), llm).run()
    with open("out") as file:
        return [json.loads(line) for line in file]


def made() -> dict[str, str | None]:
    """The adapter that each prompt was completed with."""
    return {prompt.strip('"'): name or None for prompt, _, name in (each.partition(" with ") for each in FakeLLM.made)}


def row(prompt: str, adapter=None, **more):
    return {"id": prompt, "prompt": prompt, "adapter": adapter, **more}


def test_each_row_is_completed_with_the_adapter_that_it_names():
    names = [("sql", "law", None)[number % 3] for number in range(300)]
    rows = [row(f"p{number}", name) for number, name in enumerate(names)]
    rows[0].pop("adapter")
    found = run(rows)
    assert made() == {f"p{number}": name if number else None for number, name in enumerate(names)}
    assert [each["id"] for each in found] == [each["id"] for each in rows]
    assert set(found[1]) == {"id", "outputs", "num_prompt_tokens", "error"}
    assert Seen.last.options["enable_lora"] is True and Seen.last.options["max_loras"] == 2


@pytest.mark.parametrize("kind", ["plain", "openai"])
def test_error_rows_between_the_others_shift_no_adapter(kind):
    rows = []
    for number in range(60):
        name = ("sql", "law", None, "lost")[number % 4]
        prompt = 5 if number % 7 == 0 else f"p{number}"
        body = {"prompt": prompt, "adapter": name}
        plain = {"id": number, **body}
        rows.append(plain if kind == "plain" else {**OPENAI, "custom_id": str(number), "body": body})
    found = run(rows)
    expected = {f"p{n}": ("sql", "law", None)[n % 4] for n in range(60) if n % 7 and n % 4 < 3}
    assert made() == expected and sum(each["error"] is None for each in found) == len(expected)


def test_rows_without_adapters_run_as_in_a_job_without_adapters():
    run([row(f"p{number}") for number in range(5)])
    assert Seen.last.lora_request is None and set(made().values()) == {None}


def test_one_adapter_of_all_rows_is_given_as_one_so_that_it_can_be_merged():
    run([*(row(f"p{number}", "law") for number in range(5)), row("bad", "lost"), {"id": "worse", "prompt": 5}])
    assert isinstance(Seen.last.lora_request, LoRARequest) and set(made().values()) == {"law"}
    assert Seen.last.lora_request.lora_int_id == 2 and Seen.last.lora_request.lora_path.endswith("/law")


@pytest.mark.parametrize(
    "given",
    [
        {**OPENAI, "adapter": "sql"},
        {**OPENAI, "body": {"prompt": "p", "adapter": "sql"}},
        {**OPENAI, "body": {"prompt": "p", "model": "sql"}},  # vLLM's server takes it as a model
        {**OPENAI, "adapter": "sql", "body": {"prompt": "p", "adapter": "sql", "model": "base"}},
        {**OPENAI, "adapter": None, "body": {"prompt": "p", "adapter": None, "model": "sql"}},
        {**OPENAI, "url": "/v1/embeddings", "body": {"input": "p", "adapter": "sql"}},
        {**OPENAI, "url": "/v1/score", "adapter": "sql", "body": {"queries": "p", "documents": "d", "pooling": "last"}},
        {"id": "q", "task": "score", "query": "p", "document": "d", "pooling": "last", "adapter": "sql"},
        {"id": "q", "task": "label", "prompt": "p", "labels": ["a", "b"], "adapter": "sql"},
        {"id": "q", "messages": CHAT, "adapter": "sql"},
    ],
    ids=lambda given: json.dumps(given)[:60],
)
def test_rows_of_every_format_may_name_an_adapter(given):
    (found,) = run([given])
    assert found["error"] is None and list(made().values()) == ["sql"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (row("p", "lost"), "unknown adapter 'lost'; the job has 'sql', 'law' (--adapter NAME=DIRECTORY adds one)"),
        (row("p", 5), '"adapter" must be the name of an adapter, or null, not 5'),
        (row("p", ""), "\"adapter\" must be the name of an adapter, or null, not ''"),
        ({"id": 1, "prompt": "p", "lora_name": "sql"}, "unknown key 'lora_name'; did you mean \"adapter\"?"),
        (
            {**OPENAI, "adapter": "sql", "body": {"prompt": "p", "adapter": "law"}},
            "\"adapter\" is 'sql', and 'law' in the body; leave one out",
        ),
        (
            {**OPENAI, "adapter": "sql", "body": {"prompt": "p", "model": "law"}},
            "\"adapter\" is 'sql', and \"model\" is the adapter 'law'; leave one out",
        ),
        ({**OPENAI, "adapter": "", "body": {"prompt": "p"}}, '"adapter" must be the name of an adapter, or null'),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_row_whose_adapter_is_not_the_jobs_is_an_error_row(given, error):
    bad, good = run([given, row("good", "law")])
    said = bad["error"] if isinstance(bad["error"], str) else bad["error"]["message"]
    assert error in said and good["error"] is None and len(FakeLLM.made) == 1


def test_a_job_without_adapters_says_so_to_rows_that_name_one():
    bad, good = run([row("p", "sql"), row("good")], adapters={})
    assert "unknown adapter 'sql'; the job has none (--adapter" in bad["error"] and good["error"] is None
    assert "enable_lora" not in Seen.last.options


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": {"deterministic": True}}, "a deterministic job takes no adapters .*has no hash of them"),
        ({"engine": {"enable_lora": False}}, "adapters need enable_lora"),
        ({"prompt_column": "prompt"}, "only if adapter_column .*names its column"),
        ({"adapters": {"sql": "nowhere"}}, "'sql' cannot be read: .*nowhere is not a directory"),
        ({"adapters": {"sql": "half"}}, "half has no adapter_model.safetensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_adapters_that_cannot_be_used_are_refused_before_work(directory, options, problem, dry_run):
    (directory / "half").mkdir()
    (directory / "half" / "adapter_config.json").write_text("{}")
    with pytest.raises((ValueError, JobError), match=problem):
        run([row("p", "sql")], dry_run=dry_run, **options)
    assert FakeLLM.made == [] and not (directory / "out.job").exists()


def test_a_dry_run_knows_the_adapters(directory):
    write([row("p", "sql"), row("q", "lost")])
    default = JobOptions("in", "out", str(MODEL_DIRECTORY), adapters={"sql": "sql"}, dry_run=True)
    report = Job(default, Seen).run()
    assert report["rows"]["errors"] == 1 and "unknown adapter 'lost'" in report["errors"][0]["error"]
    report = Job(replace(default, estimate=True), Seen).run()
    assert report["estimate"]["measured_rows"] == 1 and set(made().values()) == {"sql"}


def test_a_column_names_the_adapter_of_rows_of_any_shape():
    rows = [{"q": "a", "who": "sql"}, {"q": "b", "who": None}, {"q": "c"}, {"q": "d", "who": float("nan")}]
    found = run([*rows, {"q": "e", "who": "lost"}], prompt="{q}", adapter_column="who")
    assert made() == {"a": "sql", "b": None, "c": None, "d": None}
    assert "unknown adapter 'lost'" in found[4]["error"] and found[0]["who"] == "sql"
    found = parse_row(0, b'{"query": "a", "document": "b", "who": "sql"}', Columns(task="score", adapter_column="who"))
    assert (found.prompt, found.adapter) == (("a", "b"), "sql")


def test_a_tables_column_adapter_is_the_rows_adapter(directory):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "adapter": ["law", None]}), "in.parquet")
    default = JobOptions("in.parquet", "out.jsonl", str(MODEL_DIRECTORY), adapters={"law": "law"}, preflight="off")
    Job(default, Seen).run()
    assert made() == {"a": "law", "b": None}


# Resuming


def unfinished(num_finished: int, rows) -> None:
    """Leaves a job that was killed after some rows."""
    found = run(rows)
    paths = JobPaths.of("out")
    state = json.loads(paths.state.read_text())
    paths.state.write_text(json.dumps({**state, "finished": False}))
    journal = Journal(paths.journal)
    journal.recover(len(rows))
    for number in range(num_finished):
        journal.append(number, json.dumps(found[number]).encode(), None)
    journal.close()
    paths.output.unlink()
    FakeLLM.made = []


ROWS = [row(f"p{number}", ("sql", "law")[number % 2]) for number in range(20)]


def test_a_resumed_job_completes_the_other_rows_with_their_adapters(directory):
    unfinished(7, ROWS)
    (directory / "sql").rename(directory / "moved")  # the same files in another place
    found = run(adapters={"law": "law", "sql": "moved"})
    assert len(found) == 20 and made() == {f"p{number}": ("sql", "law")[number % 2] for number in range(7, 20)}


@pytest.mark.parametrize(
    "adapters", [{"sql": "law", "law": "law"}, {"sql": "sql"}, {}, {"sql": "sql", "law": "law", "more": "sql"}]
)
def test_a_resumed_job_must_have_the_same_adapters(adapters):
    unfinished(7, ROWS)
    with pytest.raises(JobError, match="belongs to another job: an adapter has changed"):
        run(adapters=adapters)
    assert FakeLLM.made == []


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_with_another_file_is_another_one(directory, file):
    unfinished(7, ROWS)
    path = directory / "sql" / file
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(JobError, match="an adapter has changed"):
        run()


def test_a_job_that_an_older_nanovllm_began_has_no_adapters(directory):
    unfinished(7, [row(f"p{number}") for number in range(20)])
    state = json.loads((directory / "out.job").read_text())
    del state["identity"]["adapters"]
    (directory / "out.job").write_text(json.dumps(state))
    with pytest.raises(JobError, match="an adapter has changed"):
        run()
    assert len(run(adapters={})) == 20 and len(FakeLLM.made) == 13


# The command


def test_the_command_takes_adapters_by_name(monkeypatch):
    write([row("a", "sql"), row("b", "law"), row("c")])
    monkeypatch.setattr(job_module.Job.__init__, "__defaults__", (Seen,))
    words = ["run-batch", "-i", "in", "-o", "out", "--model", str(MODEL_DIRECTORY), "--preflight", "off"]
    assert main([*words, "--adapter", "sql=sql", "--adapter", "law=law", "--max-loras", "4"]) == 0
    assert made() == {"a": "sql", "b": "law", "c": None} and Seen.last.options["max_loras"] == 4
    # vLLM's name, and its way to name several at once
    assert main([*words, "--restart", "--lora-modules", "sql=sql", "law=law", "--max-lora-rank", "64"]) == 0
    assert Seen.last.options["max_lora_rank"] == 64


@pytest.mark.parametrize("text", ["sql", "=sql", "sql="])
def test_an_adapter_without_a_name_or_a_directory_is_a_wrong_command(capsys, text):
    with pytest.raises(SystemExit) as stopped:
        main(["run-batch", "-i", "in", "-o", "out", "--model", "bundled", "--adapter", text])
    assert stopped.value.code == 2
    assert f"must be NAME=DIRECTORY, not {text!r}" in capsys.readouterr().err


def test_two_adapters_of_one_name_are_refused(capsys):
    write([row("a")])
    words = ["run-batch", "-i", "in", "-o", "out", "--model", "bundled", "--adapter", "a=sql", "a=law"]
    assert cli.main(words) == 1
    assert "two adapters have the name 'a': sql and law; give each its own" in capsys.readouterr().err


# The order


def test_rows_of_an_adapter_stay_together_in_a_window():
    rows = [(f"{number % 4}", ("", "law", "sql")[number % 3], number) for number in range(120)]
    planned = list(in_windows(rows, lambda row: 1, lambda row: row[0], 120, 120, lambda row: row[1]))
    assert planned == sorted(rows, key=lambda row: (row[1], row[0]))


# Replicas


class Pool:
    """The part of a ReplicaPool that an iterator needs to read its source."""

    processes: list = []


def test_requests_of_replicas_carry_their_adapters():
    adapters = [LoRARequest("a", 1, "a"), None, LoRARequest("b", 2, "b")]
    pairs = iter([("p", None), None, ("q", None), ("r", None)])
    params = type("Params", (), {"n": 1})()
    pairs = (pair and (pair[0], params) for pair in pairs)
    iterator = ReplicaIterator(Pool(), 1, _with_adapters(pairs, iter(adapters)), True)
    found = [*iterator._read(16), *iterator._read(16)]
    assert [(each.prompt, each.adapter) for each in found] == list(zip("pqr", adapters, strict=True))
    with pytest.raises(ValueError, match="lora_request ended before the prompts did"):
        list(_with_adapters(iter([("p", params)] * 2), iter(adapters[:1])))
    with pytest.raises(TypeError, match="must be a LoRARequest or None, not 'a'"):
        list(_with_adapters(iter([("p", params)]), iter("a")))


@pytest.mark.parametrize("kind", ["one", "mixed", "one that cannot be merged"])
def test_a_replica_gives_its_llm_the_adapters_of_its_requests(kind):
    """An adapter that did not fit once killed replica after replica."""
    is_mixed = kind == "mixed"
    a, b = LoRARequest("a", 1, "a"), LoRARequest("b", 2, "b")
    adapters = [a, None, b] if is_mixed else [a, a, a]
    requests = [(10 + number, f"p{number}", "params", each) for number, each in enumerate(adapters)]
    inbox, replies = worker.SimpleQueue(), []
    inbox.put(("requests", 1, requests[2:], is_mixed))
    inbox.put(("end", 1))
    seen = []

    class Fake:
        def generate_iter(self, prompts, params, *, ordered, lora_request):
            if kind == "one that cannot be merged" and isinstance(lora_request, LoRARequest):
                raise ValueError("it does not fit")
            piece = []  # an LLM takes the adapters of a piece after all of its prompts
            for prompt in prompts:
                if prompt is not worker.NOT_YET:
                    next(params)
                    piece.append(prompt)
                if prompt is worker.NOT_YET or len(piece) == 2:
                    seen.extend((each, lora_request if kind == "one" else next(lora_request)) for each in piece)
                    piece.clear()
                if len(seen) == 3:
                    call._running.clear()  # all have finished
            return iter(())

        def metrics(self):
            return {}

    call = worker._Call(("requests", 1, requests[:2], is_mixed), inbox, replies.append)
    call.run(Fake())
    assert seen == [(f"p{number}", each) for number, each in enumerate(adapters)]
    assert replies == [("done", 1, {})]


def replicas(**options) -> Replicas:
    """Without processes."""
    made = object.__new__(Replicas)
    made._config = Config("m", **options)
    return made


def test_replicas_get_the_path_of_the_callers_directory(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = _with_adapters(
        iter([("p", None), None, ("q", None)]), iter([LoRARequest("a", 1, "a"), LoRARequest("h", 2, "x/y")])
    )
    found = [row and row[2].path for row in rows]
    assert found == [str(tmp_path / "a"), None, "x/y"]


def test_a_job_whose_rows_name_no_adapter_warns(caplog):
    for adapters, used in (({"sql": "x"}, {None, "sql"}), ({"sql": "x"}, set()), ({}, {None})):
        warn_if_unused(adapters, used)
    assert not caplog.records
    warn_if_unused({"sql": "x", "law": "y"}, {None})
    assert (
        """no row names an adapter, so the model itself computes all rows; give rows "adapter": 'sql', 'law'"""
        in caplog.text
    )


@pytest.mark.parametrize(
    ("options", "given", "problem"),
    [
        ({}, LoRARequest("a", 1, "a"), r"lora_request needs Replicas\(enable_lora=True\)"),
        ({"enable_lora": True}, "a", "lora_request must be a LoRARequest or None, not 'a'"),
    ],
)
def test_replicas_refuse_the_adapters_that_an_llm_refuses(options, given, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        replicas(**options).generate_iter(["p"], None, lora_request=given)


def test_replicas_read_adapters_from_files():
    with pytest.raises(ValueError, match="adapter 'a' needs a lora_path"):
        list(_with_adapters(iter([("p", None)]), iter([LoRARequest("a", 1, tensors={}, config={})])))
