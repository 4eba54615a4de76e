"""Embeddings, hidden states, scores and labels beside those of transformers in float64, from engines in float32."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.family_factory import FAMILIES, save_family_model
from support.fp8_factory import CHANNEL, changed_copy, open_llm, quantized_copy, round_inputs
from support.long import long
from support.model_factory import save_model
from support.one_pass import assert_within, expected_arrays, log_probability, save_classifier, save_tokenizer
from transformers import AutoTokenizer

from nanovllm import LLM, NOT_YET, PoolingParams, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.runner import settings

MAX_MODEL_LEN = 64
TOKENS = {"use_tqdm": False, "raise_on_error": True}
EMBED: list[dict[str, Any]] = [
    {},
    {"pooling": "mean", "normalize": False, "hidden_states_layers": (0, 1, -2)},
    {"pooling": "cls", "dimensions": 5},
    {"pooling": "mean"},
    {"normalize": False, "hidden_states_layers": (-1, 0)},
]
KINDS = [
    *(PoolingParams("embed", **each) for each in EMBED),
    PoolingParams("token_embed", hidden_states_layers=(1,)),
    PoolingParams("token_embed", normalize=True),
    PoolingParams("label", labels=((3,), (4, 5, 6), (4, 5, 7), (8, 9))),
]
GROWS = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7, "kvcache_block_size": 4},
    "few blocks": {"num_kvcache_blocks": 18, "kvcache_block_size": 4, "max_num_batched_tokens": 4},
    "few blocks, sync": {
        "num_kvcache_blocks": 65, "kvcache_block_size": 1, "max_num_batched_tokens": 3, "overlap": False,
    },
    "torch, sync": {
        "attention_backend": "torch", "overlap": False, "kvcache_block_size": 3, "max_num_batched_tokens": 33,
    },
    "cache off": {"enable_prefix_caching": False, "max_num_batched_tokens": 17},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 16},
    "granite": {"residual_multiplier": 0.22},
    "olmo2": {},
    "gemma3": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "qwen3_5": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to max_model_len tokens; some begin alike, and some are equal."""
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(length)]

    beginnings = [tokens(length) for length in (5, 16, 33)]
    prompts = [tokens(1), tokens(2), *(each + tokens(rng.randrange(1, 15)) for each in 3 * beginnings)]
    return [*prompts, prompts[-1], prompts[4], tokens(MAX_MODEL_LEN)]


def save(directory: Path, family: str) -> Any:
    options = FAMILIES[family][2](random.Random(family)) | {"num_hidden_layers": 2} | MODELS[family]
    return save_family_model(directory, family, options)


def rows_of(prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
    """Each prompt with each of KINDS, if the labels fit after it. Beside them, a few rows that generate grow."""
    rows = [(prompt, params) for prompt in prompts for params in KINDS]
    fitting = [
        (prompt, params) for prompt, params in rows if len(prompt) + 3 * (params.task == "label") <= MAX_MODEL_LEN
    ]
    return [*fitting, *(([token], GROWS) for token in range(1, 5))]


@pytest.fixture
def preempted(monkeypatch) -> list[Sequence]:
    """The sequences that are preempted."""
    noted, preempt = [], Scheduler._preempt

    def note(self: Scheduler, seq: Sequence) -> None:
        noted.append(seq)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", note)
    return noted


@pytest.fixture
def small_snapshots(monkeypatch):
    """Short prompts are worth a snapshot of their states."""
    monkeypatch.setattr(settings, "_MIN_SAVED_TOKENS", {"cpu": 1})


# Embeddings, hidden states and labels


@pytest.mark.grid(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", MODELS)
def test_rows_of_all_kinds_equal_those_of_transformers(tmp_path, family, schedule, small_snapshots):
    """Chunks, prefix hits, preemption and rows that generate beside them change no number. The longest prompts have
    exactly max_model_len tokens."""
    model = save(tmp_path, family).double()
    rows = rows_of(prompts_of(min(model.config.vocab_size, 60)))
    random.Random(schedule).shuffle(rows)
    with LLM(tmp_path, device="cpu", max_model_len=MAX_MODEL_LEN, **SCHEDULES[schedule]) as llm:
        outputs = list(llm.generate_iter(*map(iter, zip(*rows, strict=True))))
        llm.engine.scheduler.check_integrity()
        metrics = llm.metrics()
    assert (metrics["num_preemptions"] > 0) == schedule.startswith("few blocks")
    # States are only shared with later steps, and the plain schedule of qwen3_5 has few of them with prompts.
    shares = schedule != "cache off" and (family, schedule) != ("qwen3_5", "plain")
    assert metrics["num_cached_prompt_tokens"] > 0 or not shares
    for (prompt, params), output in zip(rows, outputs, strict=True):
        assert output.error is None
        if isinstance(params, SamplingParams):
            continue
        for name, exact in expected_arrays(model, prompt, params).items():
            assert_within(getattr(output, name), exact)


@pytest.mark.parametrize("overlap", [True, long(False)])
@pytest.mark.parametrize("family", ["granite", "qwen3_5"])
def test_so_do_rows_that_are_preempted(tmp_path, family, overlap, small_snapshots, preempted):
    """The row that grows beside them takes their blocks when some of their tokens are computed."""
    model = save(tmp_path, family).double()
    prompt = [1 + token % 29 for token in range(60)]
    options = {**SCHEDULES["few blocks"], "overlap": overlap, "enable_prefix_caching": False}
    with LLM(tmp_path, device="cpu", max_model_len=MAX_MODEL_LEN, **options) as llm:
        for params in (each for each in KINDS if each.pooling != "cls"):  # that one ends with its first chunk
            preempted.clear()
            source = iter([[1], NOT_YET, prompt])
            _, output = llm.generate_iter(source, iter([GROWS, params]))
            assert any(seq.num_prompt_tokens >= len(prompt) for seq in preempted)
            for name, exact in expected_arrays(model, prompt, params).items():
                assert_within(getattr(output, name), exact)


def test_so_do_they_with_triton(tmp_path):
    """Its kernels run in the interpreter."""
    model = save(tmp_path, "qwen3").double()
    kinds = [params for params in KINDS if params.task != "label"]
    rows = [(prompt, params) for prompt in prompts_of(min(model.config.vocab_size, 60))[1:3] for params in kinds]
    with LLM(tmp_path, device="cpu", attention_backend="triton", max_model_len=MAX_MODEL_LEN) as llm:
        outputs = list(llm.generate_iter(*map(iter, zip(*rows, strict=True))))
    for (prompt, params), output in zip(rows, outputs, strict=True):
        for name, exact in expected_arrays(model, prompt, params).items():
            assert_within(getattr(output, name), exact)


def test_embeddings_with_weights_in_fp8_are_those_of_the_model_that_they_stand_for(tmp_path, monkeypatch):
    plain = tmp_path / "plain"
    plain.mkdir()
    save_model(plain, seed=5, hidden_size=192, intermediate_size=256, head_dim=64)
    quantized = quantized_copy(plain, tmp_path / "fp8")
    whole = changed_copy(plain, tmp_path / "whole", CHANNEL.whole)

    def embeddings(directory: Path) -> np.ndarray:
        with open_llm(directory) as llm:
            outputs = llm.embed(prompts_of(60), pooling="mean", **TOKENS)
            return np.stack([output.embedding for output in outputs])

    found, unrounded = embeddings(quantized), embeddings(whole)
    round_inputs(monkeypatch, CHANNEL)
    expected = embeddings(whole)
    assert_within(found, expected, 1e-3)
    assert abs(unrounded - expected).max() > 5e-3, "the rounding makes the difference"


# Classification heads


@torch.inference_mode()
def head_outputs(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    return torch.stack([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


ACTIVATIONS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "softmax": (3, {"id2label": {0: "bad", 1: "fair", 2: "good"}}, lambda x: x.softmax(1)),
    "sigmoid": (1, {}, torch.sigmoid),
    "several labels": (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
    "none": (1, {"problem_type": "regression"}, lambda x: x),
}


@pytest.mark.parametrize("overlap", [True, long(False)])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_classes_and_rewards_equal_those_of_transformers(tmp_path, kind, overlap):
    num_labels, fields, activate = ACTIVATIONS[kind]
    model, prompts = save_classifier(tmp_path, num_labels, **fields), prompts_of(60)
    exact = head_outputs(model, prompts)
    options = {"max_num_batched_tokens": 24, "kvcache_block_size": 4, "overlap": overlap}
    with LLM(tmp_path, device="cpu", max_model_len=MAX_MODEL_LEN, **options) as llm:
        classes, plain = llm.classify(prompts, **TOKENS), llm.classify(prompts, normalize=False, **TOKENS)
        rewards, probs = llm.reward(prompts, **TOKENS), llm.encode(prompts, pooling_task="classify", **TOKENS)
        assert llm.metrics()["num_cached_prompt_tokens"] > 0
    assert_within(np.stack([output.probs for output in classes]), activate(exact).numpy())
    assert_within(np.stack([output.data for output in probs]), activate(exact).numpy())
    for outputs in (plain, rewards):
        assert_within(np.stack([output.data for output in outputs]), exact.numpy())
    labels = list(fields.get("id2label", {index: f"LABEL_{index}" for index in range(num_labels)}).values())
    assert [output.label for output in classes] == [labels[index] for index in exact.argmax(1)]
    assert [output.outputs.score for output in rewards] == [
        float(output.data[0]) if num_labels == 1 else None for output in rewards
    ]


# Scores


QUERIES = ["how to boil an egg", "capital of Peru", "a"]
DOCUMENTS = ["Boil it for 7 minutes.", "Lima is the capital.", "no"]


def test_a_cross_encoder_reads_both_texts_as_a_pair(tmp_path):
    model = save_classifier(tmp_path, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pairs = [*zip(QUERIES, DOCUMENTS, strict=True), *((QUERIES[0], each) for each in DOCUMENTS)]
    exact = head_outputs(model, [tokenizer(*pair).input_ids for pair in pairs]).sigmoid()[:, 0]
    with LLM(tmp_path, device="cpu", max_num_batched_tokens=16) as llm:
        outputs = [*llm.score(QUERIES, DOCUMENTS, **TOKENS), *llm.score(QUERIES[0], DOCUMENTS, **TOKENS)]
        raw = llm.score(QUERIES, DOCUMENTS, normalize=False, **TOKENS)
    assert_within(np.float32([output.score for output in outputs]), exact.numpy())
    assert_within(np.float32([output.score for output in raw]), exact[:3].logit().numpy())


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_the_score_of_an_embedder_is_the_cosine(tmp_path, pooling):
    model = save_model(tmp_path, vocab_size=280).double()
    tokenizer = save_tokenizer(tmp_path)
    both = [
        [expected_arrays(model, tokenizer(text).input_ids, PoolingParams("embed", pooling))["data"] for text in texts]
        for texts in (QUERIES, DOCUMENTS)
    ]
    with LLM(tmp_path, device="cpu", max_num_batched_tokens=16) as llm:
        outputs = llm.score(QUERIES, DOCUMENTS, pooling=pooling, **TOKENS)
    assert_within(np.float32([output.score for output in outputs]), (np.stack(both[0]) * both[1]).sum(1))


PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("instruction", [None, "Judge recipes"])
def test_a_reranker_answers_yes_or_no_by_its_published_recipe(tmp_path, instruction):
    """As on the card of Qwen3-Reranker-0.6B: the probability of "yes" against "no" after the prompt's last token."""
    model = save_model(tmp_path, vocab_size=280).double()
    tokenizer = save_tokenizer(tmp_path, "yes", "no")
    shown = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    exact = []
    for query, document in zip(QUERIES, DOCUMENTS, strict=True):
        text = f"<Instruct>: {shown}\n<Query>: {query}\n<Document>: {document}"
        ids = [
            token for part in (PREFIX, text, SUFFIX) for token in tokenizer(part, add_special_tokens=False).input_ids
        ]
        with torch.inference_mode():
            scores = model(torch.tensor([ids])).logits[0, -1]
        ends = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
        exact.append(float(scores[ends].log_softmax(0)[1].exp()))
    with LLM(tmp_path, device="cpu", max_num_batched_tokens=200) as llm:
        outputs = llm.score(QUERIES, DOCUMENTS, recipe="qwen3-reranker", instruction=instruction, **TOKENS)
    assert_within(np.float32([output.score for output in outputs]), np.array(exact))
    assert np.std(exact) > 0.01


def test_a_recipe_is_the_prompt_of_a_reranker_with_a_head(tmp_path):
    model = save_classifier(tmp_path, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    shown = "Given a web search query, retrieve relevant passages that answer the query"
    texts = [
        f"{PREFIX}<Instruct>: {shown}\n<Query>: {query}\n<Document>: {document}{SUFFIX}"
        for query, document in zip(QUERIES, DOCUMENTS, strict=True)
    ]
    exact = head_outputs(model, [tokenizer(text, add_special_tokens=False).input_ids for text in texts]).sigmoid()
    with LLM(tmp_path, device="cpu") as llm:
        outputs = llm.score(QUERIES, DOCUMENTS, recipe="qwen3-reranker", **TOKENS)
    assert_within(np.stack([output.data for output in outputs]), exact.numpy())


# Labels


def test_labels_are_as_probable_as_teacher_forcing_says(tmp_path):
    """Prompts are texts, token ids and a conversation; labels are texts and token ids, for all prompts or for each. A
    label that was a text once counted the newline before it too, and one of token ids did not."""
    model = save_model(tmp_path, vocab_size=280).double()
    tokenizer = save_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "Is it good?"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    prompts: list[Any] = ["Is it good? Answer:", [65, 66, 67], {"messages": chat}, "Is it good? Say:"]
    ids: list[list[int]] = [tokenizer(prompts[0]).input_ids, [65, 66, 67], rendered, tokenizer(prompts[3]).input_ids]
    labels: list[Any] = [" yes", " no", " not at all", [7, 8, 9]]
    more: list[Any] = [["x", "yz"], [[1], [2, 3]], ["Yes", "No", "I"], [" a", [300 - 50]]]
    with LLM(tmp_path, device="cpu", kvcache_block_size=4, max_num_batched_tokens=20) as llm:
        outputs = [*llm.label(prompts, labels, **TOKENS), *llm.label(prompts, more, **TOKENS)]
    every = [*([labels] * 4), *more]
    for context, choices, output in zip(ids * 2, every, outputs, strict=True):
        of_labels = [tokenizer(each).input_ids if isinstance(each, str) else each for each in choices]
        exact = torch.tensor([log_probability(model, context, each) for each in of_labels])
        assert_within(output.logprobs, exact.numpy())
        assert_within(output.probs, exact.softmax(0).numpy())
        best = choices[int(exact.argmax())]
        assert output.label == (tuple(best) if isinstance(best, list) else best)
