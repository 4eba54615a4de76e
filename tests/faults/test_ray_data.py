"""Ray Data over LLMs in actors: rows that cannot run, actors that die, and batches that run together."""

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.harness_texts import OPTIONS
from support.model_factory import save_demo_classifier

from nanovllm import LLM, NOT_YET, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from nanovllm.integrations import ray_data  # noqa: E402
from nanovllm.integrations.ray_data import LLMActor, Rows, generate  # noqa: E402
from nanovllm.sampling_params import row_seed  # noqa: E402

MODEL = str(MODEL_DIRECTORY)
PARAMS = SamplingParams(temperature=1.0, max_tokens=8)
NUM_ROWS = 40
SECONDS = 60  # after which a wait has failed


@pytest.fixture(scope="module")
def cluster():
    # Two actors and Ray's own tasks. The CPUs are Ray's own count.
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, **OPTIONS) as llm:
        yield llm


def make_rows() -> list[dict]:
    rows = [{"id": f"row {n}", "prompt": f"Q: What is {n} + 30?\nA:", "sampling": None} for n in range(NUM_ROWS)]
    rows[3]["prompt"] = ""
    rows[4]["prompt"] = None
    rows[5]["sampling"] = json.dumps({"temperature": -1})
    rows[6]["sampling"] = "{"
    rows[8]["sampling"] = "[" * 100_000
    rows[7]["sampling"] = json.dumps({"max_tokens": 1, "seed": 5})
    return rows


BAD = {
    3: "the prompt is empty",
    4: "a prompt must be a string",
    5: "temperature must be 0",
    6: "'{' is not JSON",
    8: "maximum recursion",
}
ROWS = Rows(prompt="prompt", sampling_params=PARAMS, sampling_column="sampling", id="id", seed=11)


def expected_texts(llm) -> list[str]:
    """As the LLM gives them when it is called directly; empty for rows that cannot run."""
    rows = make_rows()
    prompts = ["" if n in BAD else row["prompt"] for n, row in enumerate(rows)]
    params = [SamplingParams(max_tokens=8, seed=row_seed(11, row["id"])) for row in rows]
    params[7] = SamplingParams(max_tokens=1, seed=5)
    return [output.text for output in llm.generate(prompts, params, use_tqdm=False)]


def run(rows: Rows = ROWS, **options):
    dataset = ray.data.from_items(make_rows(), override_num_blocks=1)
    given = {"concurrency": 2, "batch_size": 5, "batches_in_flight": 2, "options": OPTIONS, **options}
    found = generate(dataset, MODEL, rows, **given).take_all()
    return sorted(found, key=lambda row: int(row["id"].split()[1]))


# In Ray


def test_each_row_comes_back_once_as_the_llm_gives_it_and_a_bad_row_has_an_error(cluster, llm):
    found = run()
    given = make_rows()
    assert [{name: row[name] for name in given[0]} for row in found] == given
    assert [row["text"] for row in found] == expected_texts(llm)
    assert {n for n, row in enumerate(found) if row["error"] is not None} == set(BAD)
    for n, message in BAD.items():
        assert message in found[n]["error"] and found[n]["finish_reason"] == "error"
    assert found[0]["num_prompt_tokens"] == 21 and found[0]["finish_reason"] in ("stop", "length")


def test_rows_of_an_actor_that_is_killed_are_computed_again(cluster, llm, monkeypatch, tmp_path):
    marker = str(tmp_path / "killed")

    class Mortal(LLMActor):
        """The first actor that is called a third time dies, and loses its other batches too."""

        num_calls = 0

        def __call__(self, table):
            self.num_calls += 1
            if self.num_calls == 3:
                try:
                    os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
            return super().__call__(table)

    monkeypatch.setattr(ray_data, "LLMActor", Mortal)
    found = run()
    assert os.path.exists(marker)
    assert [row["id"] for row in found] == [row["id"] for row in make_rows()]
    assert [row["text"] for row in found] == expected_texts(llm)


def test_an_actor_gets_several_batches_of_one_block_at_a_time(cluster, monkeypatch):
    seconds = SECONDS

    class Meeting(LLMActor):
        """A batch waits for another one."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.barrier = threading.Barrier(2)

        def __call__(self, table):
            self.barrier.wait(seconds)
            return super().__call__(table)

    monkeypatch.setattr(ray_data, "LLMActor", Meeting)
    assert len(run(concurrency=1)) == NUM_ROWS


def test_a_job_that_failed_is_resumed_with_the_rows_that_it_had_not_written(cluster, monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("ray_job", Path(__file__).parents[2] / "docs" / "ray_job.py")
    ray_job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ray_job)
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    columns = ["--prompt", "prompt", "--sampling", '{"max_tokens": 4}']
    sizes, seconds = ["--batch-size", "5", "--batches", "1", "--rows-per-file", "5"], SECONDS
    command = ["", str(source), "--output", str(output), "--model", MODEL, "--options", json.dumps(OPTIONS)]
    monkeypatch.setattr(sys, "argv", [*command, *columns, *sizes])
    monkeypatch.setattr(ray.data.DataContext.get_current(), "checkpoint_config", None)  # restores it after the test

    class Failing(LLMActor):
        """Fails in its fourth call, when two files have been written."""

        num_calls = 0

        def __call__(self, table):
            self.num_calls += 1
            deadline = time.monotonic() + seconds
            while self.num_calls == 4 and len(list(output.glob("*.parquet"))) < 2 and time.monotonic() < deadline:
                os.sched_yield()
            if self.num_calls == 4:
                raise RuntimeError("the device is lost")
            return super().__call__(table)

    with monkeypatch.context() as patch:
        patch.setattr(ray_data, "LLMActor", Failing)
        with pytest.raises(ray.exceptions.RayTaskError, match="the device is lost"):
            ray_job.main()
    written = {path: path.stat().st_mtime_ns for path in output.glob("*.parquet")}
    assert 2 <= len(written) < NUM_ROWS // 5
    ray_job.main()
    found = pq.read_table(output).to_pylist()
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in make_rows())
    assert all(path.stat().st_mtime_ns == time for path, time in written.items()), "what was written was left alone"


# In this process


class FakeLLM:
    """Gives the outputs of two rows together, and fails if one of them is "fail"."""

    def __init__(self, model, **options):
        self.is_closed = threading.Event()

    def get_default_sampling_params(self):
        return SamplingParams()

    def get_tokenizer(self):
        return None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.is_closed.set()

    def generate_iter(self, prompts, params, ordered):
        assert not ordered
        held = []
        for number, prompt in enumerate(prompt for prompt in prompts if prompt is not NOT_YET):
            held.append(
                RequestOutput(
                    str(number), prompt, [], [CompletionOutput(0, prompt.upper(), [], "stop")], prompt_index=number
                )
            )
            assert next(params) == SamplingParams()
            if len(held) == 2:
                if "fail" in (output.prompt for output in held):
                    raise RuntimeError("the device is lost")
                yield from held
                held = []


def table(*prompts: str, **columns) -> pa.Table:
    return pa.table({"prompt": list(prompts), **columns})


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(ray_data, "LLM", FakeLLM)
    return LLMActor(MODEL, Rows(prompt="prompt"))


def test_rows_of_two_batches_run_together(actor):
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(actor, table(prompt)) for prompt in ("one", "two")]
        assert [call.result(SECONDS)["text"].to_pylist() for call in calls] == [["ONE"], ["TWO"]]
    assert actor(table("three", "four"))["text"].to_pylist() == ["THREE", "FOUR"], "after a pause"
    assert actor(table()).num_rows == 0


def test_a_fault_of_the_engine_reaches_all_calls_that_wait(actor):
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(actor, table(prompt)) for prompt in ("one", "fail")]
        for call in calls:
            with pytest.raises(RuntimeError, match="the device is lost"):
                call.result(SECONDS)
    assert actor(table("three", "four"))["text"].to_pylist() == ["THREE", "FOUR"]


def test_an_actor_that_is_dropped_closes_its_llm(monkeypatch):
    made = []
    monkeypatch.setattr(ray_data, "LLM", lambda *arguments: made.append(FakeLLM(*arguments)) or made[-1])
    actor = LLMActor(MODEL, Rows(prompt="prompt"))
    del actor
    assert made[0].is_closed.wait(SECONDS)


def test_a_batch_that_lacks_a_column_or_has_that_of_a_result_is_refused(actor):
    with pytest.raises(ValueError, match="the dataset has no column 'prompt'; it has question"):
        actor(pa.table({"question": ["one"]}))
    with pytest.raises(ValueError, match="the dataset has a column 'text'; give the result another name: columns="):
        actor(table("one", text=["t"]))


def test_what_the_llm_refuses_the_actor_refuses(tmp_path):
    with pytest.raises(ValueError, match="max_model_len"):
        LLMActor(MODEL, Rows(prompt="prompt"), {"max_model_len": 0})


def test_conversations_are_answered_as_by_llm_chat(llm):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    conversations = [
        [{"role": "user", "content": "What is 1 + 2?"}],
        [{"role": "user", "content": "Reverse the word cat."}, {"role": "assistant", "content": "tac", "name": "x"}],
    ]
    expected = llm.chat(conversations, greedy, use_tqdm=False)
    columns = {"text": "answer", "token_ids": "ids", "error": "why", "outputs": "all"}
    actor = LLMActor(MODEL, Rows(messages="messages", sampling_params=greedy, columns=columns), OPTIONS)
    as_json = pa.table({"messages": [json.dumps(conversations[0]), "[1]", "7", None, "[{}]"]})
    found = actor(as_json).to_pylist()
    assert found[0]["answer"] == expected[0].text and found[0]["why"] is None
    assert all("cannot render the conversation" in found[number]["why"] for number in (1, 2, 4)), found
    assert found[3]["why"] is not None
    found = actor(pa.table({"messages": conversations})).to_pylist()  # Arrow gives both messages a name
    assert [row["answer"] for row in found] == [output.text for output in expected]
    assert [row["ids"] for row in found] == [output.token_ids for output in expected]
    assert [row["all"][0]["text"] for row in found] == [output.text for output in expected]


def test_arrow_columns_of_dicts_of_token_ids_and_of_null_ids_are_read():
    rows = Rows(prompt="prompt", sampling_params={"max_tokens": 2}, sampling_column="sampling", id="id", seed=1)
    actor = LLMActor(MODEL, rows, OPTIONS)
    sampling = [{"n": 2, "max_tokens": None}, {"n": None, "max_tokens": 1}, None]
    found = actor(pa.table({"prompt": [[65, 66], [67], [68]], "sampling": sampling, "id": [7, 8, None]})).to_pylist()
    assert [row["num_prompt_tokens"] for row in found] == [2, 1, 0]
    assert [row["error"] for row in found] == [None, None, "id is null, and the row's seed comes from it"]


def test_rows_of_one_forward_pass_are_as_the_llm_computes_them(cluster, llm):
    """In Ray: embeddings have Ray's column name and the same type in all blocks, one of error rows alone included."""
    texts = [None if row < 5 else f"text {row}" * (row % 3) for row in range(20)]
    dataset = ray.data.from_items([{"id": str(row), "text": text} for row, text in enumerate(texts)])
    rows = Rows(prompt="text", task_type="embed", pooling_params={"pooling": "mean", "dimensions": 8})
    found = generate(dataset, MODEL, rows, batch_size=5, options=OPTIONS).take_all()
    found.sort(key=lambda row: int(row["id"]))
    expected = llm.embed([text or "" for text in texts], pooling="mean", dimensions=8, use_tqdm=False)
    assert [row["error"] is None for row in found] == [bool(text) for text in texts]
    for row, output in zip(found, expected, strict=True):
        assert (row["embeddings"] is None) == (output.embedding is None)
        if output.embedding is not None:
            assert row["embeddings"] == pytest.approx(output.embedding, abs=1e-5)
            assert row["num_prompt_tokens"] == output.num_prompt_tokens


def test_each_task_has_its_results(llm, tmp_path):
    classifier, scorer = (str(save_demo_classifier(tmp_path / str(labels), labels)) for labels in (3, 1))
    table = pa.table({"text": ["one", "two", ""], "passage": ["more", None, "x"]})
    [one, two, none] = LLMActor(classifier, Rows(prompt="text", task_type="classify"), OPTIONS)(table).to_pylist()
    with LLM(classifier, **OPTIONS) as classes:
        expected = classes.classify(["one", "two"], use_tqdm=False)
    assert [one["label"], two["label"], none["label"]] == [expected[0].label, expected[1].label, None]
    assert one["probs"] == pytest.approx(expected[0].probs) and none["probs"] is None and "empty" in none["error"]
    [one, two, _] = LLMActor(scorer, Rows(prompt="text", task_type="reward"), OPTIONS)(table).to_pylist()
    assert isinstance(one["score"], float) and one["score"] != two["score"]
    rows = Rows(prompt="text", document="passage", task_type="score", columns={"score": "fit", "error": "why"})
    [one, two, _] = LLMActor(scorer, rows, OPTIONS)(table).to_pylist()
    with LLM(scorer, **OPTIONS) as cross:
        assert one["fit"] == pytest.approx(cross.score("one", "more", use_tqdm=False)[0].score) and one["why"] is None
    assert two["fit"] is None and "score takes pairs of two strings" in two["why"]


def test_labels_may_differ_by_row(llm):
    rows = Rows(prompt="text", task_type="label", pooling_params={"labels": [" 5", " 6"]}, sampling_column="more")
    more = ['{"labels": [" 7", [32, 53]]}', None, '{"labels": ["a"]}', '{"task": "embed"}']
    found = LLMActor(MODEL, rows, OPTIONS)(pa.table({"text": ["Q: What is 2 + 3?\nA:"] * 4, "more": more})).to_pylist()
    assert [row["label"] for row in found] == ["(32, 53)", " 5", None, None]
    assert "at least two different ones" in found[2]["error"] and "'task'" in found[3]["error"]
    (exact,) = llm.label("Q: What is 2 + 3?\nA:", [" 5", " 6"], use_tqdm=False)
    assert found[1]["probs"] == pytest.approx(exact.probs)


def test_a_task_that_the_model_cannot_serve_is_refused_before_any_row():
    with pytest.raises(ValueError, match="classify needs a model with a classification head"):
        LLMActor(MODEL, Rows(prompt="prompt", task_type="classify"), OPTIONS)


def test_the_seed_of_a_row_depends_on_both_numbers_and_on_nothing_else():
    seeds = {row_seed(seed, row_id) for seed in (0, 1) for row_id in (0, 1, "a")}
    assert len(seeds) == 6 and all(0 <= seed < 2**64 for seed in seeds)
    # A job that is resumed with a later version draws the same.
    assert row_seed(0, 1) == row_seed(0, "1") == 4952996671628478330


def test_a_wrong_option_is_refused_before_an_actor_starts():
    with pytest.raises(TypeError, match="unknown option 'devise'; did you mean device"):
        generate(None, MODEL, Rows(prompt="prompt"), options={"devise": "cpu"})
    with pytest.raises(TypeError, match="rows must say what to read"):
        generate(None, MODEL, "prompt")


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "name one column with the prompts"),
        ({"prompt": "a", "messages": "b"}, "name one column with the prompts"),
        ({"prompt": "a", "seed": 1}, "name the ids' column"),
        ({"prompt": "a", "columns": {"txt": "text"}}, "columns names the result 'txt'; the results are text"),
        ({"prompt": "a", "sampling_params": {"top_p": 2}}, "top_p must be above 0"),
        ({"prompt": "a", "task_type": "encode"}, "task_type must be one of generate, embed, classify"),
        ({"prompt": "a", "task_type": "score"}, "reads two columns"),
        ({"prompt": "a", "task_type": "embed", "document": "b"}, "reads two columns"),
        ({"messages": "a", "task_type": "score", "document": "b"}, "reads two columns"),
        ({"prompt": "a", "task_type": "embed", "sampling_params": {}}, "'embed' does not read sampling_params"),
        ({"prompt": "a", "pooling_params": {}}, "'generate' does not read pooling_params"),
        ({"prompt": "a", "task_type": "embed", "seed": 1, "id": "i"}, "samples nothing"),
        (
            {"prompt": "a", "task_type": "embed", "columns": {"text": "t"}},
            "the results are num_prompt_tokens, error, emb",
        ),
        ({"prompt": "a", "task_type": "embed", "pooling_params": {"pooling": "max"}}, "pooling must be one of"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        Rows(**options)
