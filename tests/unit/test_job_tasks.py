"""Rows of a job that are computed in one forward pass: their formats, and the numbers that come out."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.fake_llm import DIMENSIONS, FakeLLM, pooled
from support.model_factory import save_demo_classifier

from nanovllm import LLM, PoolingParams, PoolingRequestOutput, Preflight
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobError, JobOptions, cli
from nanovllm.jobs.cli import main
from nanovllm.jobs.identity import _DECIDING
from nanovllm.jobs.job import Job
from nanovllm.jobs.openai_pooling import pooled_request_of
from nanovllm.jobs.output import write_parquet
from nanovllm.jobs.output_rows import embedding_of as embedding_of_output
from nanovllm.jobs.output_rows import output_of
from nanovllm.jobs.plan import beginning
from nanovllm.jobs.report import in_words
from nanovllm.jobs.rows import JobRow, parse_row
from nanovllm.jobs.vectors import as_line, packed, unpacked
from nanovllm.pooling_outputs import PooledOutput

MODEL = str(MODEL_DIRECTORY)
MESSAGES = [{"role": "user", "content": "Hi"}]
EMBED = {"id": "e", "task": "embed", "prompt": "Hi"}
SCORE = {"id": "s", "task": "score", "query": "a", "document": "b"}
LABEL = {"id": "l", "task": "label", "prompt": "Hi", "labels": ["a", "b"]}


def row_of(fields) -> JobRow:
    return parse_row(4, json.dumps(fields).encode())


def openai(url: str = "/v1/embeddings", name: str = "o", **body) -> dict:
    return {"custom_id": name, "url": url, "body": body}


@pytest.fixture(autouse=True)
def nothing_made():
    FakeLLM.made = []


@pytest.fixture
def job(tmp_path):
    """Runs a job of these rows to `out`, or to `output`; returns (report, the path)."""

    def run(rows=None, llm=FakeLLM, output="out", **options):
        if rows is not None:
            (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
        default = JobOptions(str(tmp_path / "in"), str(tmp_path / output), MODEL, preflight="off")
        return Job(replace(default, **options), llm).run(), tmp_path / output

    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def embedding_of(prompt, **params) -> np.ndarray:
    """What FakeLLM makes of the prompt."""
    return pooled(0, json.dumps(prompt), PoolingParams("embed", **params)).embedding


def bits(numbers) -> bytes:
    return np.array(numbers, np.float32).tobytes()


# Rows


@pytest.mark.parametrize(
    ("fields", "kind", "prompt", "params"),
    [
        (EMBED, "embed", "Hi", {}),
        ({**EMBED, "prompt": [1, 2]}, "embed", [1, 2], {}),
        ({"id": "e", "task": "embed", "token_ids": [1]}, "embed", [1], {}),
        ({"id": "e", "task": "reward", "messages": MESSAGES}, "reward", {"messages": MESSAGES}, {}),
        ({**EMBED, "dimensions": 8, "normalize": False}, "embed", "Hi", {"dimensions": 8, "normalize": False}),
        ({**EMBED, "params": {"dimensions": 8}, "pooling": "cls"}, "embed", "Hi", {"dimensions": 8, "pooling": "cls"}),
        ({**EMBED, "task": "classify", "truncate_prompt_tokens": 9}, "classify", "Hi", {"truncate_prompt_tokens": 9}),
        (SCORE, "score", ("a", "b"), {}),
        ({**SCORE, "recipe": "qwen3-reranker", "instruction": "x"}, "score", ("a", "b"),
         {"recipe": "qwen3-reranker", "instruction": "x"}),
        (LABEL, "label", "Hi", {"labels": ["a", "b"]}),
        ({**LABEL, "task": "generate", "labels": None}, "plain", "Hi", {}),
        (openai(input="Hi"), "embeddings", "Hi", {}),
        (openai(input=["Hi"], model="m", user="u", priority=3), "embeddings", "Hi", {}),
        (openai(input=[1, 2], dimensions=8, encoding_format="float"), "embeddings", [1, 2], {"dimensions": 8}),
        (openai(input=[[1, 2]], add_special_tokens=True), "embeddings", [1, 2], {}),
        (openai("/score", text_1="a", text_2="b"), "score_url", ("a", "b"), {}),
        (openai("/v1/score", queries="a", documents=["b"], use_activation=False), "score_url", ("a", "b"),
         {"use_activation": False}),
        (openai("/classify", input="Hi", truncate_prompt_tokens=-1), "classify_url", "Hi",
         {"truncate_prompt_tokens": -1}),
    ],
)  # fmt: skip
def test_a_row_with_a_task_is_what_it_says(fields, kind, prompt, params):
    found = row_of(fields)
    assert (found.kind, found.prompt, found.params, found.error) == (kind, prompt, params, None)


BAD = [
    ({**EMBED, "task": "embd"}, '"task" must be generate, embed, classify, reward, label or score, not'),
    ({**EMBED, "task": "token_embed"}, '"task" must be'),
    ({**EMBED, "task": ["embed"]}, '"task" must be'),
    ({**EMBED, "dimensions": 0}, "dimensions must be at least 1"),
    ({**EMBED, "pooling": "max"}, "pooling must be one of"),
    ({**EMBED, "labels": ["a", "b"]}, "labels is a parameter of 'label', not of 'embed'"),
    ({**EMBED, "params": {"temperature": 1}}, "unknown parameter 'temperature'"),
    ({**EMBED, "params": {"hidden_states_layers": [1]}}, "no output for hidden_states_layers"),
    ({**EMBED, "dimensions": 8, "params": {"dimensions": 8}}, '"dimensions" is a key of the row and also in "params"'),
    ({**EMBED, "query": "a"}, "unknown key 'query'; did you mean \"prompt\""),
    ({**SCORE, "prompt": "a"}, "unknown key 'prompt'"),
    ({**SCORE, "document": None}, '"document" must be a string, not None'),
    ({**SCORE, "query": ["a"]}, '"query" must be a string'),
    ({**LABEL, "labels": ["a"]}, "labels must be at least two"),
    ({**LABEL, "labels": "ab"}, "labels must be a list"),
    ({"id": "l", "task": "label", "prompt": "Hi"}, """needs labels: --params '{"labels": ["yes", "no"]}', or a key"""),
    ({"id": "a", "prompt": "Hi", "labels": ["a", "b"]}, "unknown key 'labels'; it needs a \"task\""),
    ({**EMBED, "dimension": 3}, "unknown key 'dimension'; did you mean \"dimensions\""),
    ({**EMBED, "max_tokens": 3}, "unknown key 'max_tokens'; leave it out: nothing is generated"),
    ({**EMBED, "document": "a"}, "unknown key 'document'; did you mean \"prompt\""),
    ({**SCORE, "documents": ["b"]}, "unknown key 'documents'; did you mean \"document\""),
    ({**SCORE, "text": "a"}, "unknown key 'text'; the texts of a score are \"query\" and \"document\""),
    (openai(input="a", max_tokens=3), "unknown field of the body 'max_tokens'; leave it out: nothing is generated"),
    ({**SCORE, "instructon": "x"}, "unknown key 'instructon'; did you mean \"instruction\""),
    (openai(input="a", functions=[]), "unknown field of the body 'functions'; known are model, "),
    (openai(input="a", max_new_tokens=3), "'max_new_tokens'; leave it out: nothing is generated"),
    (openai(input=["a", "b"]), '"input" holds 2 prompts; write one row per prompt'),
    (openai(input=5), '"input" must be a string'),
    (openai(), 'the body has no "input"'),
    (openai(prompt="a"), "unknown field of the body 'prompt'"),
    (openai(input="a", dimensons=5), "did you mean \"dimensions\""),
    (openai(input="a", temperature=0), "unknown field of the body 'temperature'"),
    (openai(input="a", encoding_format="int8"), '"encoding_format" must be "float" or "base64"'),
    (openai(input="a", add_special_tokens=False), '"add_special_tokens" must be true'),
    (openai("/v1/score", text_1="a"), "write one pair per row"),
    (openai("/v1/score", text_1="a", documents="b"), "write one pair per row"),
    (openai("/v1/score", text_1="a", text_2=["b", "c"]), '"text_2" holds 2 prompts'),
    (openai("/v1/score", text_1=[1], text_2="b"), '"query" must be a string, not [1]'),
    (openai("/v1/completions", input="a"), "it belongs to /v1/embeddings"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error"), BAD)
def test_what_is_wrong_with_a_row_is_its_error_before_it_runs(job, fields, error):
    report, path = job([fields, {"id": "good", "prompt": "Hi"}])
    bad, good = lines(path)
    found = bad["error"] if isinstance(bad["error"], str) else bad["error"]["message"]
    assert error in found and good["error"] is None and report["rows"]["errors"] == 1
    assert len(FakeLLM.made) == 1


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"prmpt": "Hi"}, "--prompt-column takes the prompt"), ({"prompt": "Hi", "texts": 1}, None),
        ({**SCORE, "document": None, "passage": "b"}, "--query-column and --document-column"),
        ({**SCORE, "x": 1}, None),
    ],
)  # fmt: skip
def test_only_a_row_without_its_prompt_hears_of_options_that_name_columns(fields, advice):
    error = row_of(fields).error
    assert "unknown key" in error and (advice in error if advice else "-column" not in error)


def test_a_jobs_task_is_that_of_rows_without_one(job):
    rows = [
        {"id": "a", "prompt": "a"}, {"id": "b", "prompt": "b", "dimensions": 4},
        {"id": "c", "prompt": "c", "task": "generate", "params": {"max_tokens": 3}}, LABEL,
        openai(input="d"), openai("/v1/completions", "p", prompt="e"), {"id": "f", "prompt": "f", "params": {"n": 2}},
    ]  # fmt: skip
    _, path = job(rows, params={"task": "embed", "dimensions": 8})
    a, b, c, label, d, e, f = lines(path)
    assert (len(a["embedding"]), len(b["embedding"])) == (8, 4) and c["outputs"][0]["text"]
    # The job's parameters are for rows of its task: a label has no dimensions.
    assert label["probs"] and len(d["response"]["body"]["data"][0]["embedding"]) == 8
    assert e["response"]["body"]["choices"] and "unknown parameter 'n'" in f["error"] and f["embedding"] is None


def test_a_broken_line_is_an_error_row_of_the_jobs_task(job, tmp_path):
    (tmp_path / "in").write_text('{"id": "a", "prompt": "Hi"}\n{"id": "b", \n')
    _, path = job(params={"task": "embed"})
    first, second = lines(path)
    assert first["embedding"] and second == {**second, "id": "b", "embedding": None} and "outputs" not in second


def test_labels_may_be_the_jobs_or_the_rows(job):
    rows = [{"id": "a", "prompt": "a"}, {"id": "b", "prompt": "b", "labels": ["x", "y", "z"]}]
    _, path = job(rows, params={"task": "label", "labels": ["p", "q"]})
    assert [len(row["probs"]) for row in lines(path)] == [2, 3]
    _, path = job(rows, params={"task": "label"}, output="out2")
    first, second = lines(path)
    assert "task 'label' needs labels" in first["error"] and first["label"] is None and second["error"] is None


@pytest.mark.parametrize(
    ("params", "columns", "error"),
    [
        ({"dimensions": 8}, {}, "dimensions is a parameter of a task; give the task too"),
        ({"task": "embed", "max_tokens": 8}, {}, "unknown parameter 'max_tokens'"),
        ({"task": "embed", "dimensions": 0}, {}, "dimensions must be at least 1"),
        ({"task": "embd"}, {}, '"task" must be generate, embed'),
        ({"task": "score"}, {"prompt_column": "text"}, "does not take --prompt-column; .* --query-column and --docu"),
        ({"task": "embed"}, {"query_column": "text"}, r"--query-column needs the task 'score' \(--task score\)"),
        ({}, {"document_column": "text"}, "--document-column needs the task 'score'"),
        ({"task": "label", "labels": ["a"]}, {}, "labels must be at least two"),
    ],
)
def test_wrong_parameters_of_a_job_refuse_it(job, params, columns, error):
    with pytest.raises((TypeError, ValueError), match=error):
        job([EMBED], params=params, **columns)


def test_a_deterministic_job_refuses_means_before_the_weights_load(job):
    given = {"params": {"task": "embed", "pooling": "mean"}, "engine": {"deterministic": True}}
    report, _ = job([EMBED, {**EMBED, "id": "last", "pooling": "last"}], None, **given, dry_run=True, preflight="full")
    assert report["rows"]["errors"] == 1 and "deterministic=True cannot pool the mean" in report["errors"][0]["error"]
    with pytest.raises(JobError, match=r"1 row cannot run; --on-error stop .*deterministic=True cannot pool the mean"):
        job(None, None, **given, preflight="full", on_error="stop")


def test_rows_of_one_query_run_together():
    """A cross-encoder then computes the query once."""
    rows = [(query, document) for document in "12" for query in "ab"]
    assert sorted(rows, key=beginning) == [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]


# Output rows


def test_each_task_has_its_numbers(job):
    rows = [
        EMBED, {**EMBED, "id": "d", "dimensions": 8}, LABEL, {**LABEL, "id": "ids", "labels": [[1], [2, 3]]}, SCORE,
        {**EMBED, "id": "c", "task": "classify"}, {**EMBED, "id": "r", "task": "reward"}, {**EMBED, "id": "g"},
    ]  # fmt: skip
    rows[-1]["task"] = "generate"
    report, path = job(rows)
    embed, short, label, ids, score, classify, reward, text = lines(path)
    assert list(embed) == ["id", "embedding", "num_prompt_tokens", "error"]
    assert bits(embed["embedding"]) == bits(embedding_of("Hi")) and embed["num_prompt_tokens"] == 3
    assert bits(short["embedding"]) == bits(embedding_of("Hi", dimensions=8))
    assert list(label) == ["id", "label", "probs", "logprobs", "num_prompt_tokens", "error"]
    assert label["label"] == "ab"[np.argmax(label["probs"])] and label["logprobs"][0] == -abs(label["probs"][0])
    assert ids["label"] in ([1], [2, 3])
    assert list(score) == ["id", "score", "num_prompt_tokens", "error"]
    found = pooled(0, json.dumps(["a", "b"]), PoolingParams("score")).score
    assert np.float32(score["score"]) == np.float32(found)
    assert classify["label"] in ("no", "yes") and len(classify["probs"]) == 2
    assert isinstance(reward["score"], float) and reward["data"] is None
    assert text["outputs"][0]["text"] and report["tokens"]["output"] == 4


def test_a_reward_of_several_numbers_is_data():
    output = PoolingRequestOutput("0", None, [1], PooledOutput("reward", np.array([1.5, -2], np.float32)))
    found = output_of(JobRow(0, "a", "x", {}, "reward"), output)
    assert (found["score"], found["data"]) == (None, [1.5, -2.0])


def test_an_embedding_in_base64_is_not_there_twice():
    output = pooled(0, "x", PoolingParams("embed"))
    row = JobRow(0, "a", "x", {}, "embeddings")
    assert embedding_of_output(row, output) is output.embedding
    assert embedding_of_output(replace(row, is_base64=True), output) is None


def test_openais_rows_have_the_bodies_of_the_servers(job):
    rows = [
        openai(name="a", input="Hi", model="m"), openai(name="b", input="Hi", encoding_format="base64"),
        openai("/score", "c", text_1="a", text_2="b"), openai("/classify", "d", input="Hi"),
    ]  # fmt: skip
    _, path = job(rows)
    made = lines(path)
    assert [(row["id"], row["error"]) for row in made] == [(f"batch_req_{number}", None) for number in range(4)]
    assert {row["response"]["status_code"] for row in made} == {200}
    floats, base, score, classes = (row["response"]["body"] for row in made)
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    (data,) = floats.pop("data")
    assert floats == {"object": "list", "model": "m", "usage": usage}
    assert bits(data.pop("embedding")) == bits(embedding_of("Hi")) and data == {"object": "embedding", "index": 0}
    assert base64.b64decode(base["data"][0]["embedding"]) == bits(embedding_of("Hi")) and base["model"] == MODEL
    assert isinstance(score["data"][0].pop("score"), float)
    assert score["data"] == [{"index": 0, "object": "score"}] and score["usage"] == usage
    assert score["id"] == "score-2" and score["object"] == "list" and isinstance(score["created"], int)
    assert classes["data"][0]["num_classes"] == len(classes["data"][0]["probs"]) == 2
    assert classes["data"][0]["label"] in ("no", "yes")


@given(arrays(np.uint32, st.integers(1, 40)))
@example(np.array([1e8, 1, -0.0, np.nan, -np.inf], np.float32).view(np.uint32))
def test_an_embedding_keeps_all_its_bits(numbers):
    """NaN and infinities are null in a line, and themselves in a table."""
    vector = numbers.view(np.float32)
    row = packed(b'{"id":"\\"embedding\\":null","embedding":null}', vector)
    text, found = unpacked(row)
    assert found.tobytes() == vector.tobytes() and json.loads(text)["embedding"] is None
    made = json.loads(as_line(row))
    assert made["id"] == '"embedding":null'
    assert [each is None for each in made["embedding"]] == (~np.isfinite(vector)).tolist()
    finite = [each for each in made["embedding"] if each is not None]
    assert (np.array(finite, np.float32) == vector[np.isfinite(vector)]).all()


def test_a_row_without_an_embedding_is_itself():
    assert packed(b'{"a":1}', None) == as_line(b'{"a":1}') == b'{"a":1}' and unpacked(b'{"a":1}')[1] is None


def test_standard_output_has_the_whole_rows(job, capfdbinary):
    _, path = job([EMBED, {"id": "g", "prompt": "Hi"}])
    Job(JobOptions(str(path.with_name("in")), "-", MODEL, preflight="off"), FakeLLM).run()
    assert sorted(capfdbinary.readouterr().out.splitlines()) == sorted(path.read_bytes().splitlines())


@pytest.mark.parametrize("suffix", ["", ".parquet"])
@pytest.mark.parametrize("count", [0, 1, 9, 19])
def test_a_resumed_job_has_the_output_of_one_that_never_stopped(job, count, suffix):
    rows = [{**EMBED, "id": f"e{n}", "prompt": f"text {n}"} for n in range(10)]
    rows += [openai(name=f"o{n}", input=f"text {n}") for n in range(5)] + [{**LABEL, "id": f"l{n}"} for n in range(5)]

    class Stopping(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == count:
                raise KeyboardInterrupt
            return super().complete(number, prompt, params)

    _, whole = job(rows, output=f"whole{suffix}")
    FakeLLM.made.clear()
    with pytest.raises(KeyboardInterrupt):
        job(llm=Stopping, output=f"out{suffix}")
    FakeLLM.made.clear()
    _, path = job(output=f"out{suffix}")
    assert len(FakeLLM.made) == 20 - count and path.read_bytes() == whole.read_bytes()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> str:
    """A model with a classification head of one number."""
    return str(save_demo_classifier(tmp_path_factory.mktemp("reranker"), 1))


# Tables

NUMBERS = {"num_prompt_tokens": "int64", "error": "string", "row": "int64"}
LIST = "list<element: float>"


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([EMBED], {"embedding": f"fixed_size_list<element: float>[{DIMENSIONS}]"}),
        ([{**EMBED, "dimensions": 8}], {"embedding": "fixed_size_list<element: float>[8]"}),
        ([EMBED, {**EMBED, "id": "d", "dimensions": 8}], {"embedding": LIST}),
        ([{**EMBED, "prompt": 5}, LABEL], {"embedding": LIST, "label": "string", "probs": LIST, "logprobs": LIST}),
        ([LABEL], {"label": "string", "probs": LIST, "logprobs": LIST}),
        ([{**EMBED, "task": "classify"}, SCORE], {"label": "string", "probs": LIST, "score": "double"}),
        ([{**EMBED, "task": "reward"}], {"score": "double", "data": LIST}),
    ],
)
def test_a_table_has_the_columns_of_the_tasks(job, rows, columns, reranker):
    pq = pytest.importorskip("pyarrow.parquet")
    model = reranker if rows[0]["task"] in ("classify", "reward") else MODEL
    _, path = job(rows, output="out.parquet", model=model)
    table = pq.read_table(path)
    assert {field.name: str(field.type) for field in table.schema} == {"id": "string", **columns, **NUMBERS}
    _, path = job(rows, model=model)
    for made, line in zip(table.to_pylist(), lines(path), strict=True):
        for name in columns:
            if isinstance(made[name], (list, float)):
                assert bits(made[name]) == bits(line[name])
            else:
                assert made[name] == line.get(name)


def test_embeddings_of_a_table_keep_their_rows(job, monkeypatch):
    """Beside error rows, completions and embeddings of OpenAI's rows, in several row groups."""
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("nanovllm.jobs.output._ROWS_OF_GROUP", 4)
    rows = [
        [{**EMBED, "prompt": 5}, {**EMBED, "prompt": f"text {n}"}, {"prompt": "x"}, openai(input="Hi")][n % 4]
        for n in range(23)
    ]
    rows = [{**row, "custom_id" if "url" in row else "id": f"r{n}"} for n, row in enumerate(rows)]
    _, path = job(rows, output="out.parquet")
    table = pq.read_table(path)
    assert str(table.schema.field("embedding").type) == f"fixed_size_list<element: float>[{DIMENSIONS}]"
    for number, row in enumerate(table.to_pylist()):
        is_embedded = number % 4 == 1
        assert (row["embedding"] is not None) == is_embedded
        assert not is_embedded or bits(row["embedding"]) == bits(embedding_of(f"text {number}"))
        assert (row["text"] is not None) == (number % 4 == 2) and (row["response"] is not None) == (number % 4 == 3)
    (data,) = json.loads(table["response"][3].as_py())["body"]["data"]
    assert bits(data["embedding"]) == bits(embedding_of("Hi"))


def test_openais_rows_may_ask_for_other_dimensions_than_plain_ones(job):
    pq = pytest.importorskip("pyarrow.parquet")
    _, path = job([openai(input="Hi", dimensions=8), EMBED], output="out.parquet")
    first, second = pq.read_table(path).to_pylist()
    assert first["embedding"] is None and bits(second["embedding"]) == bits(embedding_of("Hi"))


def test_embeddings_of_several_sizes_never_become_a_column_of_one(tmp_path):
    pa = pytest.importorskip("pyarrow")
    rows = [packed(b'{"id":"a","embedding":null,"error":null}', np.ones(size, np.float32)) for size in (3, 2)]
    with (tmp_path / "out").open("wb") as file, pytest.raises(pa.ArrowInvalid):
        write_parquet(file, tmp_path / "out", lambda: iter(rows), {"embed"}, None, has_one_size=True)


def test_columns_of_a_table_make_rows_with_tasks(job, tmp_path):
    """A column that a task's output has gets another name only if rows may have tasks."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"id": "a", "task": "score", "query": "a", "document": "b", "score": 0.5, "prompt": None, "labels": None},
        {
            "id": "b",
            "task": "label",
            "query": None,
            "document": None,
            "score": 1.5,
            "prompt": "x",
            "labels": ["p", "q"],
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    _, path = job(output="out.parquet", input=str(tmp_path / "in.parquet"))
    first, second = pq.read_table(path).to_pylist()
    assert first["score"] == lines_of_score("a", "b") and first["input_score"] == 0.5
    assert second["label"] in "pq" and second["input_score"] == 1.5
    table = pa.table({"id": ["a"], "prompt": ["x"], "score": [0.5], "labels": [["n"]], "query": ["q"]})
    pq.write_table(table, tmp_path / "in.parquet")
    _, path = job(output="out2.parquet", input=str(tmp_path / "in.parquet"))
    (row,) = pq.read_table(path).to_pylist()
    assert row["text"] and (row["score"], row["labels"], row["query"]) == (0.5, ["n"], "q")
    pq.write_table(pa.table({"query": ["a"], "document": ["b"]}), tmp_path / "in.parquet")
    params = {"task": "score", "pooling": "last"}
    _, path = job(output="out3", input=str(tmp_path / "in.parquet"), params=params)
    assert lines(path)[0]["score"] == lines_of_score("a", "b")
    table = pa.table({"prompt": ["x"], "task": ["label"], "labels": ['["p", "q"]']})
    pq.write_table(table, tmp_path / "in.parquet")
    _, path = job(output="out4", input=str(tmp_path / "in.parquet"))
    assert lines(path)[0]["label"] in "pq"


def lines_of_score(query: str, document: str) -> float:
    return json.loads(f"{pooled(0, json.dumps([query, document]), PoolingParams('score')).score:.9g}")


def test_named_columns_make_prompts_of_a_jobs_task(job):
    rows = [{"id": n, "text": f"text {n}", "label": "x", "task": "mine"} for n in range(3)]
    _, path = job(rows, prompt="Q: {text}", params={"task": "embed"})
    for number, row in enumerate(lines(path)):
        assert bits(row["embedding"]) == bits(embedding_of(f"Q: text {number}"))
        assert (row["text"] if "text" in row else row["input_text"]) == f"text {number}"
        assert row["input_label"] == "x" and row["task"] == "mine"
    _, path = job(rows, prompt_column="text", output="out3")
    assert [row["label"] for row in lines(path)] == ["x"] * 3  # a completion has no label of its own
    rows = [{"asin": "a", "query": "a", "document": "b", "price": 3}, {"asin": "b", "query": "a"}]
    _, path = job(rows, id_column="asin", params={"task": "score", "pooling": "last"}, output="out2")
    first, second = lines(path)
    assert (first["id"], first["price"], first["score"]) == ("a", 3, lines_of_score("a", "b"))
    assert "the column 'document' is null or missing" in second["error"] and second["score"] is None


def test_the_columns_of_a_pair_have_names(job):
    rows = [{"q": "a", "passage": "b", "query": "c"}, {"q": "a", "passage": 5}]
    params = {"task": "score", "pooling": "last"}
    names = {"query_column": "q", "document_column": "passage"}
    _, path = job(rows, params=params, **names)
    first, second = lines(path)
    assert first["score"] == lines_of_score("a", "b") and (first["passage"], first["query"]) == ("b", "c")
    assert '"passage" must be a string, not 5; a score needs "q" and "passage"' in second["error"]
    _, path = job([{"q": "a", "document": "b"}], output="out2", params=params, query_column="q")
    assert lines(path)[0]["score"] == lines_of_score("a", "b")
    with pytest.raises(JobError, match="has no column 'passage'"):
        job([{"q": "a", "document": "b"}], output="out3", params=params, **names)


def test_a_table_without_the_columns_of_a_pair_is_refused_with_the_options_that_name_them(job, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"q": ["a"], "passage": ["b"]}), tmp_path / "in.parquet")
    error = (
        "has no columns 'query' and 'document'; name them with --query-column and --document-column: it has 'q', 'pa"
    )
    with pytest.raises(JobError, match=error):
        job(input=str(tmp_path / "in.parquet"), params={"task": "score"})


@pytest.mark.parametrize("more", [{}, {"prompt": "{text}"}])
def test_a_job_of_labels_without_labels_is_refused(job, more):
    with pytest.raises(JobError, match=r"""no row can run: .*needs labels: --params '{"labels": \["yes", "no"\]}'"""):
        job([{"text": "Hi"} if more else {"prompt": "Hi"}], params={"task": "label"}, **more)


@pytest.mark.parametrize(
    ("rows", "engine", "runner"),
    [
        ([EMBED, openai(input="Hi"), {**EMBED, "id": "c", "task": "classify"}], {}, "pooling"),
        ([EMBED], {"runner": "auto"}, "auto"), ([EMBED, SCORE], {}, None), ([EMBED, LABEL], {}, None),
        ([EMBED, {"id": "g", "prompt": "Hi"}], {}, None),
    ],
)  # fmt: skip
def test_a_model_has_an_lm_head_only_if_a_row_may_need_it(job, tmp_path, rows, engine, runner):
    made = []

    class Seen(FakeLLM):
        def __init__(self, model, **options):
            made.append(options.get("runner"))
            super().__init__(model, **options)

    job(rows, llm=Seen, engine=engine)
    assert made == [runner]
    assert "runner" not in json.loads((tmp_path / "out.job").read_text())["identity"]["engine"]


def test_the_log_and_the_report_fit_rows_with_tasks(job, caplog):
    caplog.set_level("INFO", "nanovllm")
    report, _ = job([{**SCORE, "query": "a" * 1000, "pooling": "last"}], preflight="full")
    assert f"the first query and document: '{'a' * 399}, 'b'" in caplog.text and "generated" not in in_words(report)
    report, _ = job([{"id": "g", "prompt": "Hi"}], preflight="full", output="out2")
    assert "the first prompt: 'Hi'" in caplog.text and "4 generated, " in in_words(report)


# With a model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> str:
    return str(save_demo_classifier(tmp_path_factory.mktemp("classifier"), 3))


def test_the_command_embeds_with_the_numbers_of_llm(tmp_path):
    texts = ["Hello there", "a", "What is 12 + 30?"]
    rows = [{"id": text, "prompt": text} for text in texts] + [{"id": "long", "prompt": "x" * 5000}]
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "bundled"]
    assert main([*words, "--task", "embed", "--dimensions", "16", "--report", str(tmp_path / "report")]) == 3
    with LLM("bundled") as llm:
        expected = llm.embed(texts, dimensions=16, use_tqdm=False)
    *made, long = lines(tmp_path / "out")
    for row, output in zip(made, expected, strict=True):
        np.testing.assert_allclose(row["embedding"], output.embedding, atol=1e-6)
        assert row["num_prompt_tokens"] == output.num_prompt_tokens
    assert "to pool are more than max_model_len" in long["error"]
    tokens = json.loads((tmp_path / "report").read_text())["tokens"]
    assert tokens["prompt"] == sum(output.num_prompt_tokens for output in expected) and tokens["output"] == 0
    assert tokens["prompt_per_second"] > 0
    assert main([*words, "--dimensions", "16"]) == 1


def test_a_classifier_serves_its_tasks_and_refuses_to_generate(classifier, tmp_path):
    rows = [
        {"id": "a", "task": "classify", "prompt": "Hi"}, {"id": "b", "task": "reward", "prompt": "Hi"},
        {"id": "c", "prompt": "Hi"}, {"id": "d", **{k: SCORE[k] for k in ("task", "query", "document")}},
        openai("/classify", "e", input="Hi"),
    ]  # fmt: skip
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = Job(JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), classifier)).run()
    classify, reward, text, score, body = lines(tmp_path / "out")
    with LLM(classifier) as llm:
        (expected,), (numbers,) = llm.classify("Hi", use_tqdm=False), llm.reward("Hi", use_tqdm=False)
    np.testing.assert_allclose(classify["probs"], expected.probs, atol=1e-6)
    np.testing.assert_allclose(reward["data"], numbers.data, atol=1e-6)
    (data,) = body["response"]["body"]["data"]
    assert classify["label"] == expected.label == data["label"] and data["num_classes"] == 3
    assert "no LM head" in text["error"] and "score needs a head of one number" in score["error"]
    assert report["rows"]["errors"] == 2


def test_a_task_that_the_model_lacks_refuses_the_job_before_weights_are_loaded(tmp_path):
    (tmp_path / "in").write_text(json.dumps({"id": "a", "prompt": "Hi"}))
    options = JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), MODEL, params={"task": "classify"})
    with pytest.raises(JobError, match=r"no row can run: .*classify needs a model with a classification head"):
        Job(options, lambda *_: pytest.fail("the LLM was made")).run()
    with pytest.raises(JobError, match=r"no row can run: .*no LM head"):
        Job(replace(options, params={}, engine={"runner": "pooling"}), lambda *_: pytest.fail("the LLM was made")).run()


PREFLIGHT_ROWS = [
    ("Hi", PoolingParams()), ("", PoolingParams()), ("x" * 5000, PoolingParams()), ([1, 10**6], PoolingParams()),
    ("x" * 5000, PoolingParams("embed", truncate_prompt_tokens=7)), ("Hi", PoolingParams("classify")),
    ("Hi", PoolingParams("label", labels=("a", "bcd"))), ("x" * 5000, PoolingParams("label", labels=("a", "b"))),
    (("a", "bc"), PoolingParams("score", pooling="mean")), (("a", "b"), PoolingParams("score")),
    ({"messages": MESSAGES}, PoolingParams("embed")), ("Hi", PoolingParams("reward")),
]  # fmt: skip


@pytest.mark.parametrize("model", ["bundled", "classifier", "no head", "pooler"])
def test_preflight_predicts_rows_with_tasks(model, classifier):
    name = classifier if model == "classifier" else MODEL
    given = {"no head": {"runner": "pooling"}, "pooler": {"pooler_config": {"pooling_type": "MEAN"}}}
    options = given.get(model, {})
    preflight = Preflight(name, **options)
    prompts, params = [row[0] for row in PREFLIGHT_ROWS], [row[1] for row in PREFLIGHT_ROWS]
    checks = preflight.check(prompts, params)
    with LLM(name, max_num_seqs=8, num_kvcache_blocks=64, **options) as llm:
        outputs = list(llm.generate_iter(iter(prompts), iter(params)))
        num_tokens = llm.metrics()["num_prompt_tokens"]
    assert [check.error for check in checks] == [output.error for output in outputs]
    assert any(check.error for check in checks) and not all(check.error for check in checks)
    assert sum(check.num_prompt_tokens for check in checks if check.error is None) == num_tokens
    summary = preflight.summary()
    assert summary.max_num_new_tokens == 0 and summary.num_prompt_tokens == num_tokens
    assert summary.num_errors == sum(check.error is not None for check in checks)


@pytest.mark.parametrize(
    "params",
    [
        PoolingParams(),
        PoolingParams(pooling="mean"),
        PoolingParams("label", labels=("a", "b")),
        PoolingParams("score", pooling="last"),
    ],
    ids=["last", "mean", "label", "score"],
)
def test_preflight_knows_which_tokens_the_prefix_cache_may_serve(params):
    """The mean needs the states of all tokens. Labels share their prompt below a block too."""
    prompts = [f"{'The same beginning. ' * 12}{end}" for end in ("one", "two", "three")]
    if params.task == "score":
        prompts = [("a", prompt) for prompt in prompts]
    preflight = Preflight(MODEL)
    preflight.check(prompts, params)
    with LLM(MODEL, max_num_seqs=8, num_kvcache_blocks=64) as llm:
        assert len(list(llm.generate_iter(iter(prompts), params))) == 3
        served = llm.metrics()["num_cached_prompt_tokens"]
    found = preflight.summary().num_shared_tokens
    assert found == served or (params.task == "label" and 0 < found < served)
    assert (found > 0) == (params.pooling != "mean")


def test_an_estimate_counts_no_output_of_rows_with_tasks(tmp_path):
    rows = [{"id": str(number), "prompt": f"text {number}"} for number in range(30)]
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), MODEL, dry_run=True, estimate=True,
                         params={"task": "embed"}, engine={"max_num_seqs": 8, "num_kvcache_blocks": 64})  # fmt: skip
    found = Job(options).run()
    assert found["estimate"]["output_tokens"] == 0 == found["preflight"]["max_num_new_tokens"]
    assert found["estimate"]["measured_rows"] == 30 and found["preflight"]["num_prompt_tokens"] == 200


def test_jobs_of_pooled_urls():
    assert pooled_request_of("score_url", {"data_1": "a", "data_2": "b"})[0] == ("a", "b")
    assert pooled_request_of("embeddings", {"input": "a", "normalize": False, "pooling": "mean"})[1] == {
        "normalize": False,
        "pooling": "mean",
    }


def test_jobs_identity():
    assert {"pooler_config", "hf_overrides"} <= set(_DECIDING)


def test_jobs_pairs_with_equal_documents_beginnings():
    assert beginning(("a", "1")) != beginning(("a", "2"))


def test_jobs_command():
    parser = cli._make_parser()[0]
    given = parser.parse_args(
        ["run-batch", "-i", "a", "-o", "b", "--model", "m", "--pooler-config", '{"pooling_type": "MEAN"}']
    )
    assert given.pooler_config == {"pooling_type": "MEAN"}
