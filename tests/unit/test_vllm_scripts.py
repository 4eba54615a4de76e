"""Whole scripts in the style of public ones, written for vLLM, run as they are on the bundled model."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.long import long
from support.lora_files import save_for_demo_model
from support.model_factory import save_demo_classifier, save_demo_model, save_embedder_files
from support.vllm_scripts import SCRIPTS, run_alone, run_here, vllm_names

from nanovllm import LLM
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.runner.model_runner import ModelRunner

QUESTIONS = {
    "What is 47 + 385?": "432",
    "Reverse the word planet.": "tenalp",
    "Write paged in upper case.": "PAGED",
    "Which is larger, 17 or 52?": "52",
}
MODEL = ("--model", MODEL_DIRECTORY)
POOLER_CONFIG = ("--override-pooler-config", '{"pooling_type": "MEAN"}')
# Scripts that print their results, with their arguments and what they must print.
PRINTING = [
    ("basic", MODEL, re.compile(r"(?s)Prompt: +'Q: What is 47 .*Output: +' 432'.*' tenalp'.*' aaabnn'.*' PAGED'")),
    ("engine_args", (*MODEL, "--num-prompts", 3), "sums 11\nsums 22\nsums 33\n"),
    ("engine_args", (*MODEL, "-m", "chat", "--num-prompts", 2, "--seed", 3), "chat 11\nchat 22\n"),
    (
        "classify_logprobs",
        (*MODEL, "--dtype", "float32"),
        "banana/a: 3 (sure)\napple/p: 2 (sure)\nmississippi/s: 4 (sure)\ngarden/z: 0 (sure)\n",
    ),
    (
        "perplexity",
        MODEL,
        "winner: A: 432 ratio > 2: True\nwinner: A: tenalp ratio > 2: True\nwinner: A: PAGED ratio > 2: True\n",
    ),
    (
        "self_consistency",
        ("--model_name_or_path", MODEL_DIRECTORY),
        "gold=432 pred=432 majority=True\ngold=42 pred=42 majority=True\ngold=71 pred=71 majority=True\nmaj@5: 1.00\n",
    ),
    ("best_of_n", MODEL, "[0, 1, 2, 3] nedrag\n[0, 1, 2, 3] dinoww\n"),
    ("self_chat", (MODEL_DIRECTORY, 3), "alice: 24\nbob: 48\nalice: 96\n[4, 2]\n"),
    ("judge", ("--judge-model", MODEL_DIRECTORY), "wins: {'alpha': 0, 'beta': 2, 'gamma': 4}\nconsistent: True\n"),
    ("mmlu_letters", MODEL, "C C {'2'}\nB B {'3'}\nA A {'1'}\nD D {'4'}\nAverage accuracy 1.000\n"),
    ("two_models", ("--models", MODEL_DIRECTORY, MODEL_DIRECTORY), re.compile(r"\['100', '64'\]\nagreement: True\n$")),
    (
        "prefix_caching",
        MODEL,
        "caching=False cached=[False, False, False] fast=True\ncaching=True cached=[True, True, True] fast=True\n"
        "Generated texts are the same: True\n",
    ),
    (
        "constrained",
        MODEL,
        re.compile(
            r"plain ' 1 2 3 4 5 6 7 8 9' stop 256 19\nbad_words '[^5]*' .*\nlogit_bias '77' length None 2\n"
            r"stop_token ' 1 2 3 4' stop 52 8\nstop ' 1 2 3' stop  3 6\nmin_tokens ' 1 2' length None 4\n"
        ),
    ),
    ("lora_adapter", MODEL, "14\n"),
    # Values of SamplingParams are assigned.
    (
        "chat_cli",
        (*MODEL, "--max_tokens", 16, "--temperature=0", "--trust-remote-code", "--max-model-len", 256),
        "one: 385\nmany: ['40', '42', '44', '46', '48']\n",
    ),
    ("per_sample_seeds", MODEL, "same: True\ngreedy:  ellowy\nseeds: [100, 101, 102] None\n"),
    # llm.llm_engine is read.
    (
        "harness_until",
        MODEL,
        "max_length 256\n' 3 4 5'\n' 42<|endoftext|>'\n' 40 41 42 43 44<|endoftext|>'\n' elb'\n' ehcac<|endoftext|>'\n",
    ),
    ("truncate", MODEL, "max_model_len: 200\ncut: 1 longest: 184\nfinished: True\n"),
    (
        "rl_rollout",
        (*MODEL, "--device", "cpu"),
        "before: True (2, 4)\nafter: False (2, 4)\n",
    ),
    # Structured outputs have min_tokens.
    (
        "regex_numbers",
        (),
        re.compile(r"What is 47 \+ 385\? 432\nWhat is 90 - 48\? 42\nReverse the word 12\. [0-9]+\n"),
    ),
    # Callables change logits.
    ("logits_processors", MODEL, "plain:  PAGED\ncapitals: False\nforced:  PAGED\n"),
    # A process of a pool and a Python process import vllm.
    ("graded_in_a_pool", MODEL, "grades: True False\nversion: 0.11.0\n"),
    # RequestOutput has metrics.
    ("latency", MODEL, "tokens: 32\nin order: True\nhas percentiles: True\n"),
]


@pytest.fixture(params=["here", long("alone")])
def run(request, tmp_path, monkeypatch):
    """Runs a script and returns what it prints: in this process, or with --long as the command does too."""
    monkeypatch.chdir(tmp_path)
    return {"here": run_here, "alone": run_alone}[request.param]


@pytest.mark.parametrize(("name", "arguments", "expected"), PRINTING, ids=[name for name, *_ in PRINTING])
def test_a_script_prints_what_it_must(run, name, arguments, expected):
    printed = run(name, *arguments, MODEL=str(MODEL_DIRECTORY))
    assert expected.search(printed) if isinstance(expected, re.Pattern) else printed == expected


def test_rows_of_json_are_answered_once(run, tmp_path):
    rows = [{"id": str(number), "question": question} for number, question in enumerate(QUESTIONS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    arguments = (*MODEL, "--input", "in.jsonl", "--output", "out.jsonl", "--batch_size", 1)
    assert run("jsonl_batch", *arguments) == "2 rows, 0 done, 2 to do\n"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("jsonl_batch", *arguments) == "4 rows, 2 done, 2 to do\n"
    answered = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["question"]: row["response"] for row in answered} == QUESTIONS
    assert [row["finish_reason"] for row in answered] == ["stop"] * 4
    assert all(row["usage"]["completion_tokens"] == len(row["response"]) + 1 for row in answered)


def test_shards_of_a_data_set_join(run, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([{"question": question} for question in QUESTIONS]))
    arguments = ("--model-path", MODEL_DIRECTORY, "--data", "data.json", "--out-dir", "parts", "--num-shards", 2)
    found = {}
    for shard in range(2):
        part = f"part-0000{shard}-of-00002.json"
        assert run("shard", *arguments, "--shard-id", shard) == f"wrote {part}\n"
        rows = json.loads((tmp_path / "parts" / part).read_text())
        assert len(rows) == 2
        found.update({row["question"]: row["prediction"] for row in rows})
    assert found == QUESTIONS


def test_extracted_records_have_the_form_of_a_pydantic_model(run):
    pytest.importorskip("pydantic")
    records = json.loads(run("json_extraction", *MODEL))
    assert len(records) == 2
    for record in records:
        assert record.keys() == {"larger", "is_certain"} and record["larger"] in range(10)


def test_a_teachers_answers_become_data(run, tmp_path):
    printed = run("distill", "--teacher", MODEL_DIRECTORY, "--output-file", "data.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert printed == f"kept {len(rows)}, dropped {18 - len(rows)}\n"
    found = {question["content"]: answer["content"] for question, answer in (row["messages"] for row in rows)}
    assert len(found) == 6 and found["Write silver in upper case."] == "SILVER"
    assert len({row["id"] for row in rows}) == len(rows)


def test_lines_are_translated_in_their_order(run, tmp_path):
    (tmp_path / "lines.txt").write_text("planet\n\nsilver\norange\n")
    assert run("translate", *MODEL, "--src", "lines.txt", "--out", "lines.tsv") == "translated 3 lines\n"
    assert (tmp_path / "lines.tsv").read_text() == "planet\tPLANET\nsilver\tSILVER\norange\tORANGE\n"


def test_wrong_samples_are_rejected_until_one_is_right(run, tmp_path):
    assert run("rejection_sampling", *MODEL, "--save-to", "accepted.jsonl") == "accepted 4 of 4\n"
    rows = [json.loads(line) for line in (tmp_path / "accepted.jsonl").read_text().splitlines()]
    assert sorted(row["answer"] for row in rows) == ["1001", "15", "432", "512"]


# Request ids go on counting over calls.
def test_results_of_several_calls_keep_their_order_by_request_id(run, tmp_path):
    assert run("request_ids", *MODEL, "--out", "answers.json") == "increasing: True\n"
    assert json.loads((tmp_path / "answers.json").read_text()) == ["2", "4", "6", "8", "10"]


# One forward pass per row.
def last_state(kind: Any, directory: Path, text: str, pooling: str = "last") -> np.ndarray:
    """What transformers computes for a text: the pooled state of the final norm, or a head's numbers."""
    model = kind.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        found = model(torch.tensor([[*text.encode()]]))[0][0]
    return (found.mean(0) if pooling == "mean" else found[-1] if found.ndim == 2 else found).numpy()


def numbers_of(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", line)]


@pytest.mark.parametrize(
    ("flags", "pooling"), [((), "last"), (("--mean",), "mean"), (POOLER_CONFIG, "mean")], ids=["last", "mean", "json"]
)
def test_embeddings_are_those_of_the_pooling_that_a_script_asks_for(run, flags, pooling):
    from transformers import AutoModel

    *_, similarity, same = run("embed", *MODEL, *flags).splitlines()
    france, hello, italy = (
        last_state(AutoModel, MODEL_DIRECTORY, text, pooling)
        for text in ("The capital of France is", "Hello, my name is", "The capital of Italy is")
    )
    cosines = [france @ other / np.linalg.norm(france) / np.linalg.norm(other) for other in (hello, italy)]
    assert numbers_of(similarity) == pytest.approx(cosines, abs=2e-4) and same == "Same: True"


def test_classes_are_those_of_the_head(run, tmp_path):
    from transformers import AutoModelForSequenceClassification

    directory = save_demo_classifier(tmp_path / "model", 3)
    lines = run("classify", "--model", directory).splitlines()
    logits = last_state(AutoModelForSequenceClassification, directory, "Hello, my name is")
    assert numbers_of(lines[-1]) == pytest.approx(logits, abs=2e-4)
    assert numbers_of(lines[0]) == pytest.approx(np.exp(logits) / np.exp(logits).sum(), abs=2e-4)
    assert len(lines) == 4 and lines[0].endswith("(size=3)")


def test_rewards_are_those_of_the_head(run, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    directory = save_demo_classifier(tmp_path / "model", 1)
    found = {
        line.split(maxsplit=1)[1]: numbers_of(line)[0] for line in run("reward", "--model", directory).splitlines()
    }
    assert len(found) == 3 and sorted(found.values(), reverse=True) == [*found.values()]
    chat = [{"role": "user", "content": "What is 12 + 30?"}, {"role": "assistant", "content": "42"}]
    ids = AutoTokenizer.from_pretrained(directory).apply_chat_template(chat, return_dict=False)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        assert found["42"] == pytest.approx(float(model(torch.tensor([ids])).logits), abs=2e-4)


def test_scores_are_those_of_a_cross_encoder_or_of_an_embedder(run, tmp_path):
    from transformers import AutoModel, AutoModelForSequenceClassification

    query, document = "What is the capital of France?", "The capital of France is Paris."
    directory = save_demo_classifier(tmp_path / "model", 1)
    lines = run("score", "--model", directory).splitlines()
    (logit,) = last_state(AutoModelForSequenceClassification, directory, query + document)
    assert numbers_of(lines[1])[0] == pytest.approx(1 / (1 + np.exp(-logit)), abs=2e-4) and lines[-1] == "Same: True"
    directory = save_embedder_files(save_demo_model(tmp_path / "embedder", 6))
    lines = run("score", "--model", directory).splitlines()
    one, two = (last_state(AutoModel, directory, text, "mean") for text in (query, document))
    cosine = one @ two / np.linalg.norm(one) / np.linalg.norm(two)
    assert numbers_of(lines[1])[0] == pytest.approx(cosine, abs=2e-4) and lines[-1] == "Same: True"


def test_qwen3_reranker_answers_yes_or_no_after_the_texts_of_the_script(run):
    with vllm_names():
        source = runpy.run_path(str(SCRIPTS / "qwen3_reranker.py"))
    text = f"{source['PREFIX']}<Instruct>: {source['INSTRUCTION']}\n<Query>: {source['QUERIES'][0]}\n"
    text += f"<Document>: {source['DOCUMENTS'][0]}{source['SUFFIX']}"
    found = list(map(float, run("qwen3_reranker", MODEL_DIRECTORY).split()))
    with LLM(MODEL_DIRECTORY, device="cpu") as llm:
        ids = llm.get_tokenizer()(text)["input_ids"]
        no, yes = llm.label([ids], ["no", "yes"], use_tqdm=False)[0].probs
    assert len(found) == 2 and found[0] == pytest.approx(yes, rel=1e-3) and 0 < yes < 1 and no == pytest.approx(1 - yes)


def test_a_script_generates_with_its_adapter(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(ModelRunner, "set_adapter", lambda runner, *arguments: given.append(arguments), raising=False)
    save_for_demo_model(tmp_path / "adapter")
    assert run_here("lora_adapter", *MODEL, "--lora-path", tmp_path / "adapter") == "14\n"
    assert [(slot, request.lora_name, str(request.lora_path)) for slot, request in given] == [
        (0, "adapter", str(tmp_path / "adapter"))
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("async_engine", (MODEL_DIRECTORY,), r"no AsyncLLMEngine.from_engine_args; .*llm.generate_iter\(\) gives"),
        ("beam_search", MODEL, "LLM has no beam_search; ask for n completions"),
    ],
    ids=["async_engine", "beam_search"],
)
def test_a_script_that_cannot_run_says_what_to_do(run, name, arguments, message):
    with pytest.raises((ValueError, AttributeError, RuntimeError), match=message):
        run(name, *arguments)


def test_every_script_has_a_test():
    source = Path(__file__).read_text(encoding="utf-8")
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    assert len(scripts) >= 25 and all(f'"{name}"' in source for name in scripts)
