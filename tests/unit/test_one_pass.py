"""The methods that compute each row in one forward pass: what they do, what they leave out, and what they refuse."""

import itertools
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_runner import add_pooled, expected_states, make_engine, run_to_end
from support.model_factory import read_tensors, save_demo_model, save_model
from support.one_pass import save_classifier
from support.small_tokenizers import small_tokenizers
from tqdm.auto import tqdm

from nanovllm import LLM, NOT_YET, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.sequence import Pooling
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.step_program import StepProgram
from nanovllm.text import Text
from nanovllm.text.load_tokenizer import load_tokenizer

# Few at a time, so that the window of 32 rows is soon full.
OPTIONS = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 64}
QUIET = {"use_tqdm": False}
PROMPTS = [f"Row {index} " + "of many" * (index % 5) for index in range(40)]
GENERATE = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
KINDS = [
    PoolingParams(), PoolingParams(pooling="mean"), PoolingParams("token_embed", hidden_states_layers=[0]),
    PoolingParams("label", labels=("yes", "not at all")),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_demo_model(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture(scope="module")
def shared_llm(model):
    with LLM(model, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm):
    """After the test, nothing is left of its requests."""
    yield shared_llm
    scheduler = shared_llm.engine.scheduler
    scheduler.check_integrity()
    assert shared_llm.engine.is_finished() and not scheduler.running
    assert scheduler.block_manager.num_free_blocks == len(scheduler.block_manager.blocks)
    assert shared_llm.embed("Hi", **QUIET)[0].error is None


@pytest.fixture(scope="module")
def classifier_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("classifier")
    save_classifier(directory, 1)
    return directory


@pytest.fixture(scope="module")
def classifier(classifier_model):
    with LLM(classifier_model, **OPTIONS) as llm:
        yield llm


def same(one: PoolingRequestOutput, other: PoolingRequestOutput) -> bool:
    return one.prompt == other.prompt and np.allclose(one.data, other.data, rtol=1e-4, atol=1e-5)


# Outputs


def test_a_method_is_its_task_and_rows_come_back_in_order(llm):
    methods = {
        "embed": lambda: llm.embed(PROMPTS, pooling="mean", dimensions=7, normalize=False, **QUIET),
        "token_embed": lambda: llm.encode(PROMPTS, normalize=True, **QUIET),
        "label": lambda: llm.label(PROMPTS, ["yes", " no"], **QUIET),
    }
    all_params = {
        "embed": PoolingParams("embed", "mean", False, 7),
        "token_embed": PoolingParams("token_embed", normalize=True),
        "label": PoolingParams("label", labels=("yes", " no")),
    }
    for task, method in methods.items():
        outputs = method()
        assert [output.prompt_index for output in outputs] == list(range(40))
        assert [output.prompt for output in outputs] == PROMPTS
        assert all(map(same, outputs, llm.generate_iter(PROMPTS, all_params[task])))


def test_an_output_has_vllms_shape_too(llm, classifier):
    (output,) = llm.embed(["One two"], hidden_states_layers=[0, -1], **QUIET)
    assert output.outputs.embedding == output.embedding.tolist() == output["embedding"].tolist()
    assert output.data is output.embedding and output.outputs.hidden_size == len(output.embedding) == 160
    assert output.hidden_states.shape == (2, 160) and output.embedding.dtype == np.float32
    assert (output.probs, output.label, output.score, output.outputs.probs, output.outputs.num_classes) == (
        None, None, None, None, 0,
    )  # fmt: skip
    assert output.prompt_token_ids == list(b"One two") and output.num_prompt_tokens == 7 and output.finished
    assert output.metrics.finished_time >= output.metrics.arrival_time
    with pytest.raises(KeyError, match="'text' is not a field"):
        output["text"]
    (output,) = classifier.classify([[1, 2, 3]], **QUIET)
    assert output.outputs.probs == output.probs.tolist() and output.outputs.num_classes == 1
    assert output.label == "LABEL_0" and output.embedding is None and output.prompt is None
    (output,) = classifier.reward([[1, 2, 3]], **QUIET)
    assert output.outputs.score == output.score == float(output.data[0]) and output.probs is None
    (output,) = llm.label(["One"], ["a", "b"], **QUIET)
    assert output.outputs.probs == output.probs.tolist() and abs(output.probs.sum() - 1) < 1e-6
    assert output.label == ("a", "b")[output.probs.argmax()] and output.logprobs.shape == (2,)


def test_generate_iter_takes_rows_of_all_kinds(llm):
    params = [each for _ in range(8) for each in (*KINDS, GENERATE)]
    expected = [
        llm.generate(prompt, each, **QUIET)[0] if each is GENERATE else next(llm.generate_iter([prompt], each))
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    for ordered, as_given in ((True, iter), (False, iter), (True, list)):
        outputs = list(llm.generate_iter(as_given(PROMPTS), as_given(params), ordered=ordered))
        numbers = [output.prompt_index for output in outputs]
        assert sorted(numbers) == list(range(40)) and (numbers == sorted(numbers)) == ordered
        for output in outputs:
            other = expected[output.prompt_index]
            if isinstance(other, RequestOutput):
                assert output.token_ids == other.token_ids and output.error is None
            else:
                assert same(output, other)


def test_a_row_that_samples_and_one_that_pools_have_their_own_states(model):
    """The last states of both come from one array."""
    starts_first = replace(GENERATE, max_tokens=30)
    params = [PoolingParams(), starts_first, PoolingParams(normalize=False), starts_first]
    with LLM(model, device="cpu", max_model_len=64, max_num_seqs=8) as llm:
        alone = llm.embed(PROMPTS[:4], **QUIET)
        outputs = list(llm.generate_iter(PROMPTS[:4], iter(params)))
        steps = llm.metrics()["num_prefill_steps"]
    assert same(outputs[0], alone[0]) and outputs[1].error is None and steps == 2
    assert np.allclose(outputs[2].data / np.linalg.norm(outputs[2].data), alone[2].data, atol=1e-5)


def test_params_may_differ_per_prompt_and_keywords_precede_them(llm):
    given = [{"dimensions": 3}, None, PoolingParams("embed", normalize=False), {"normalize": False, "dimensions": 2}]
    outputs = llm.embed(PROMPTS[:4], given, dimensions=5, **QUIET)
    assert [len(output.embedding) for output in outputs] == [5] * 4
    lengths = [float(np.linalg.norm(output.embedding)) for output in outputs]
    assert lengths[0] == pytest.approx(1) == pytest.approx(lengths[1]) and min(lengths[2:]) > 1.5
    with pytest.raises(ValueError, match="4 pooling_params for 3 prompts"):
        llm.embed(PROMPTS[:3], given, **QUIET)
    assert llm.embed(prompts="a", pooling_params={"use_activation": False}, pooling_type="mean", **QUIET)[0].data.any()


def test_labels_for_all_or_per_prompt(llm):
    (one,) = llm.label("Good?", ["yes", [65, 66]], **QUIET)
    assert one.labels == ("yes", (65, 66)) and one.label in one.labels
    outputs = llm.label(["Good?", "Bad?"], [["yes", "no"], [[65], [66], [67]]], **QUIET)
    assert [len(output.probs) for output in outputs] == [2, 3]
    for labels, error, words in (
        ("yes", TypeError, "labels must be a list of labels"),
        ([["a", "b"]], ValueError, "1 lists of labels for 2 prompts; give one per prompt"),
        (["yes"], ValueError, "at least two different ones"),
        ([["a", "b"], ["a"]], ValueError, "at least two different ones"),
        ([], ValueError, "at least two different ones"),
    ):
        with pytest.raises(error, match=words):
            llm.label(["Good?", "Bad?"], labels, **QUIET)


def test_the_prompt_of_labels_ends_before_them(llm):
    outputs = llm.label([list(b"Good?"), "Bad?"], [" yes", " no"], **QUIET)
    assert [bytes(output.prompt_token_ids) for output in outputs] == [b"Good?", b"Bad?"]


def test_states_of_tokens_are_normalized_on_request(llm):
    (plain,), (found,) = (llm.encode("Hello", normalize=normalize, **QUIET) for normalize in (False, True))
    lengths = np.linalg.norm(plain.data, axis=1, keepdims=True)
    assert (abs(lengths - 1) > 0.1).all()
    np.testing.assert_allclose(found.data, plain.data / lengths, rtol=1e-5, atol=1e-6)


def test_negative_layers_count_from_the_end(llm):
    """As in transformers' output_hidden_states: the model of one layer has 0 (the embedding), and 1 or −1."""
    (negative,), (positive,) = (
        llm.embed("Hello", hidden_states_layers=layers, **QUIET) for layers in ([-1, -2], [1, 0])
    )
    assert np.array_equal(negative.hidden_states, positive.hidden_states)
    assert not np.array_equal(positive.hidden_states[0], positive.hidden_states[1])


def test_a_prompts_labels_are_scored_from_the_same_token(llm):
    """Even where the prompt's last letters and a label's first ones are one token."""
    text = Text(small_tokenizers()["byte-level BPE"])
    alone = text.encode(["the ca"])[0].token_ids
    (found,) = text.encode_labels([("the ca", ["t", "tx", "b sat"])])
    first = found[0].first_scored
    assert [each.token_ids for each in found] == [
        each.token_ids for each in text.encode(["the cat", "the catx", "the cab sat"])
    ]
    assert {each.first_scored for each in found} == {first} and {each.error for each in found} == {None}
    assert all(each.token_ids[:first] == alone[:first] for each in found) and first < len(alone)
    spaces, ids = text.encode_labels([("the cat\n", ["a", [3, 4]])])[0]
    assert spaces.first_scored == ids.first_scored == len(text.encode(["the cat\n"])[0].token_ids)


@pytest.mark.parametrize(("maximum", "length"), [(3, 3), (-1, 64), (64, 64), (1000, None)])
def test_prompts_are_cut_on_request(llm, maximum, length):
    prompts = ["x" * 500, list(range(1, 80)), {"prompt": "y" * 70}]
    outputs = llm.embed(prompts, truncate_prompt_tokens=maximum, **QUIET)
    found = [None if output.error else output.num_prompt_tokens for output in outputs]
    assert found == [length] * 3 or (length is None and found == [None] * 3)


# What is left out


@pytest.fixture
def no_tokens(monkeypatch):
    """Nothing may be projected onto the vocabulary or sampled."""
    monkeypatch.setattr(CausalLM, "compute_logits", lambda *_: pytest.fail("computed logits"))
    monkeypatch.setattr(Sampler, "sample", lambda *_: pytest.fail("sampled"))


def test_a_row_that_pools_samples_nothing(model, no_tokens):
    with LLM(model, **OPTIONS, max_num_batched_tokens=7) as llm:
        for params in KINDS[:3]:
            assert all(output.error is None for output in llm.generate_iter(PROMPTS[:9], params))
        metrics = llm.metrics()
    assert metrics["num_output_tokens"] == metrics["num_decode_tokens"] == 0
    assert metrics["num_prefill_tokens"] > 0 and metrics["finish_reasons"] == {"length": 27}


def test_nor_does_one_that_is_classified(classifier, no_tokens):
    assert all(output.error is None for output in classifier.classify([[1, 2], [3]], **QUIET))


def test_of_prompts_whose_last_state_is_wanted_only_the_last_tokens_pass_the_last_layer(llm, monkeypatch):
    monkeypatch.setattr(StepProgram, "_forward_and_pool", lambda *_: pytest.fail("computed the states of all tokens"))
    assert all(output.error is None for output in llm.embed(PROMPTS, **QUIET))
    with pytest.raises(pytest.fail.Exception, match="states of all tokens"):
        llm.embed(PROMPTS, pooling="mean", **QUIET)


def test_a_prompt_is_computed_once_for_all_of_its_labels(model):
    context, labels = [7] * 60, [[index, 100, 101] for index in range(8)]
    with LLM(model, device="cpu", max_model_len=64) as llm:
        llm.label([context], labels, **QUIET)
        computed = llm.metrics()["num_prefill_tokens"]
    assert computed <= len(context) + 3 * len(labels)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", ["last", "first", "mean", "all"])
def test_blocks_are_given_back_when_a_row_ends(tokens, overlap):
    """After the step that ends it, and not after the last row; a row may start in its place."""
    engine = make_engine(num_blocks=20, block_size=2, max_num_seqs=2, max_num_batched_tokens=8, overlap=overlap)
    prompts = [list(range(first, first + 13)) for first in range(0, 90, 15)]
    for prompt in prompts:
        add_pooled(engine, prompt, Pooling(tokens))
    num_finished = 0
    while not engine.is_finished():
        for seq in engine.step():
            num_finished += 1
            assert not seq.block_table and seq.entry == -1 and seq.finish_reason == "length"
            assert seq.completion_token_ids == [] and seq not in engine.scheduler.running
        engine.scheduler.check_integrity()
    assert num_finished == len(prompts) and engine.scheduler.block_manager.num_free_blocks == 20


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_was_preempted_returns_each_state_once(overlap):
    """Beside a row that grows, there is no block for the end of a long prompt."""
    engine = make_engine(
        num_blocks=12, block_size=2, max_num_seqs=4, max_num_batched_tokens=3, overlap=overlap, is_mirrored=True
    )
    engine.add_request([5], SamplingParams(max_tokens=14, ignore_eos=True))
    engine.step()
    kinds = [Pooling("all"), Pooling("mean", (0, 1)), Pooling("last")]
    prompt = list(range(20))
    ids = {add_pooled(engine, prompt, kind): kind for kind in kinds}
    finished = run_to_end(engine)
    assert engine.metrics()["num_preemptions"] > 0
    for seq_id, kind in ids.items():
        states = np.concatenate(finished[seq_id].states)
        states = states.sum(0, keepdims=True) if kind.tokens == "mean" else states
        assert np.array_equal(states, expected_states(prompt, kind, engine.info))


# Rows that cannot run


BAD_ROWS: dict[str, tuple[Any, PoolingParams, str]] = {
    "empty": ("", PoolingParams(), "the prompt is empty"),
    "no ids": ([], PoolingParams("token_embed"), "the prompt is empty"),
    "too long": ([1] * 65, PoolingParams(), "the 65 tokens to pool are more than max_model_len=64"),
    "unknown id": ([1, 70000], PoolingParams(pooling="mean"), "token id 70000 is outside the vocabulary"),
    "no prompt": (None, PoolingParams(), "a prompt must be a string or a list of token ids"),
    "dict": ({"text": "a"}, PoolingParams(), "this one holds 'text'"),
    "conversation": ({"messages": "hello"}, PoolingParams(), "a conversation must be a list"),
    "no pair": ("a", PoolingParams("score", pooling="last"), "score takes pairs of two strings"),
    "a pair of ids": (([1], [2]), PoolingParams("score", pooling="last"), "score takes pairs of two strings"),
    "empty document": (("a", ""), PoolingParams("score", pooling="last"), "the prompt is empty"),
    "no context": ([], PoolingParams("label", labels=("a", "b")), "the context is empty"),
    "unknown label": ("a", PoolingParams("label", labels=((1,), (70000,))), "token id 70000 is outside"),
    "labels too long": ("a" * 60, PoolingParams("label", labels=("abc", "a" * 9)), "the 69 tokens to score"),
    "no head": ("a", PoolingParams("classify"), "classify needs a model with a classification head"),
    "no such layer": ("a", PoolingParams(hidden_states_layers=[7]), "layers must be from -2 to 1, not [7]"),
    "too wide": ("a", PoolingParams(dimensions=161), "dimensions=161 is more than the model's hidden_size=160"),
}  # fmt: skip


def test_a_row_that_cannot_run_is_an_error_row_in_its_place(llm, caplog):
    prompts = [each for prompt, *_ in BAD_ROWS.values() for each in (prompt, "Good")]
    params = [each for _, params, _ in BAD_ROWS.values() for each in (params, PoolingParams())]
    outputs = list(llm.generate_iter(iter(prompts), iter(params)))
    for (_, _, words), bad, good in zip(BAD_ROWS.values(), outputs[::2], outputs[1::2], strict=True):
        assert words in bad.error and (bad.data, bad.embedding, bad.probs, bad.label, bad.score) == (None,) * 5
        assert good.error is None and good.embedding is not None
    assert [output.prompt_index for output in outputs] == list(range(len(prompts)))
    (message,) = [record.getMessage() for record in caplog.records if record.name == "nanovllm.llm"]
    assert message.startswith(f"{len(BAD_ROWS)} of {len(prompts)} prompts ended in an error")


def test_raise_on_error_names_the_prompt_before_anything_runs(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a row ran"))
    for call in (
        lambda: llm.embed(["a long one", "a", ""], raise_on_error=True, **QUIET),
        lambda: llm.encode(["a long one", "a", ""], raise_on_error=True, **QUIET),
        lambda: llm.label(["a", "b", []], ["x", "y"], raise_on_error=True, **QUIET),
        lambda: llm.score("a", ["b", "c", ""], pooling="last", raise_on_error=True, **QUIET),
    ):
        with pytest.raises(ValueError, match=r"prompt 2: the (prompt|context) is empty"):
            call()


@pytest.fixture
def with_a_broken_token(tmp_path):
    """An LLM in which the embedding of token 50 is not finite."""
    save_model(tmp_path)
    weight = read_tensors(tmp_path)["model.embed_tokens.weight"]
    weight[50] = torch.nan
    with LLM(tmp_path, device="cpu", max_model_len=64, kvcache_block_size=4) as llm:
        llm.update_weights({"model.embed_tokens.weight": weight})
        yield llm


@pytest.mark.parametrize(
    "params",
    [*KINDS[:3], PoolingParams(hidden_states_layers=[1]), PoolingParams("label", labels=((1,), (2, 3)))],
    ids=["last", "mean", "all", "layer", "label"],
)
def test_states_that_are_not_finite_make_error_rows_whose_keys_are_forgotten(with_a_broken_token, params):
    llm, beginning = with_a_broken_token, [*range(1, 9)]
    rows = [[*beginning, 50, 11, 12], [4, 5, 6], [7, 8]]
    broken, *good = llm.generate_iter(rows, params)
    assert "not finite" in broken.error and broken.data is None and broken.hidden_states is None
    assert all(output.error is None and np.isfinite(output.data).all() for output in good)
    (after,) = llm.generate_iter([[*beginning, 13, 14]], PoolingParams())
    assert after.num_cached_tokens == 0 and after.error is None
    (again,) = llm.generate_iter([[*beginning, 13, 15]], PoolingParams())
    assert again.num_cached_tokens == 8


# What the model cannot serve


def test_a_task_that_the_model_cannot_serve_is_refused_at_once(llm, classifier, monkeypatch):
    """Before a prompt is looked at, and even without prompts. The message says which calls the model serves."""
    no_head = "needs a model with a classification head .* it serves embed, encode, label"
    no_lm_head = "needs a model with an LM head .* has a classification head, which classify, reward and score read"
    for call, words in (
        (lambda: llm.classify([]), f"classify {no_head}"),
        (lambda: llm.reward(5), "prompts must be"),
        (lambda: llm.reward(["a"]), f"reward {no_head}"),
        (lambda: llm.encode(["a"], pooling_task="classify"), f"classify {no_head}"),
        (lambda: llm.score("a", "b"), "give recipe='qwen3-reranker' .* or pooling='last'"),
        (lambda: llm.embed([], dimensions=161), "hidden_size=160"),
        (lambda: llm.embed([], hidden_states_layers=[-3]), r"from -2 to 1, not \[-3\]"),
        (lambda: llm.embed_iter([], dimensions=161), "hidden_size=160"),
        (lambda: llm.encode([], pooling_task="rank"), "pooling_task must be"),
        (lambda: llm.encode("a", pooling_task="label"), "pooling_task must be"),
        (lambda: llm.embed("a", PoolingParams("token_embed")), "for the task 'token_embed', and this call is for"),
        (lambda: classifier.label(["a"], ["x", "y"]), f"label {no_lm_head}"),
        (lambda: classifier.generate(["a"]), "no LM head"),
        (lambda: classifier.loglikelihood("a", "b"), "no LM head"),
        (lambda: classifier.generate_iter(["a"]), "no LM head"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"pooling": "last", "normalize": False}, "cosine"),
        ({"recipe": "qwen3-reranker", "pooling": "mean"}, "recipe"),
        ({"recipe": "qwen3-reranker", "normalize": True}, "recipe"),
    ],
)
def test_a_parameter_that_would_change_no_score_is_refused(llm, given, kind):
    """Each once was dropped in silence."""
    with pytest.raises(ValueError, match=f"would change nothing in this score, which is that of a {kind}"):
        llm.score("a", "b", **given, **QUIET)


def test_nor_does_a_head_take_a_pooling(classifier):
    with pytest.raises(ValueError, match="pooling would change nothing in this score, which is that of a head"):
        classifier.score("a", "b", pooling="mean", **QUIET)
    with pytest.raises(ValueError, match="dimensions would change nothing"):
        classifier.score("a", "b", pooling_params={"dimensions": 4}, **QUIET)


def test_a_head_of_several_numbers_has_no_score(tmp_path):
    save_classifier(tmp_path, 2)
    words = "score needs a head of one number, and this one has 2; use classify"
    with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(ValueError, match=words):
        llm.score("a", "b", **QUIET)


def test_scores_far_from_zero_are_probabilities_without_a_warning(classifier_model):
    """exp(-x) overflows in float32 below -88."""
    with LLM(classifier_model, **OPTIONS) as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.update_weights({"score.weight": read_tensors(classifier_model)["score.weight"] * 1e3})
        prompts = [[index] for index in range(1, 40)]
        raw, probs = ([float(each.data[0]) for each in call(prompts, **QUIET)] for call in (llm.reward, llm.classify))
    assert min(raw) < -100 and max(raw) > 100 and min(probs) == 0 and max(probs) == 1


# Streams


def test_embed_iter_gives_what_embed_gives(llm):
    expected = llm.embed(PROMPTS, pooling="mean", dimensions=9, **QUIET)
    given = {"pooling": "mean", "dimensions": 9}
    for call in (
        lambda: llm.embed_iter(iter(PROMPTS), **given), lambda: llm.embed_iter(PROMPTS, given, ordered=False),
    ):  # fmt: skip
        outputs = sorted(call(), key=lambda output: output.prompt_index)
        assert len(outputs) == 40 and all(map(same, outputs, expected))
    assert [output.prompt for output in llm.embed_iter("one")] == ["one"]


def test_embed_iter_takes_one_pooling_params(llm):
    """A list of one was once taken for all prompts."""
    with pytest.raises(TypeError, match="embed_iter takes one pooling_params for all prompts; generate_iter takes"):
        llm.embed_iter(PROMPTS, [PoolingParams()])


def test_a_progress_bar_counts_rows_that_pool(llm):
    bars = []

    def make(**given):
        bars.append(tqdm(**given, disable=True))
        return bars[-1]

    assert len(llm.embed(PROMPTS, use_tqdm=make)) == bars[0].total == 40


def test_embed_iter_reads_within_its_window(llm):
    seen = []
    outputs = llm.embed_iter(seen.append(n) or f"Row {n}" for n in itertools.count())
    assert not seen
    for number, output in enumerate(itertools.islice(outputs, 200)):
        assert output.prompt_index == number and output.error is None
        assert number < len(seen) <= number + 1 + 32 + 256
    outputs.close()
    assert list(outputs) == []


def test_rows_of_many_requests_share_the_window(llm):
    """A row of 8 labels is 8 requests, so fewer such rows are read ahead."""
    seen, labels = [], tuple(f"label {index}" for index in range(8))
    params = PoolingParams("label", labels=labels)
    outputs = llm.generate_iter((seen.append(n) or f"Row {n}" for n in itertools.count()), itertools.repeat(params))
    first = next(outputs)
    num_first = len(seen)
    numbers = [first.prompt_index, *(output.prompt_index for output in itertools.islice(outputs, 60))]
    assert numbers == list(range(61)) and len(seen) <= 61 + max(num_first, 8)
    outputs.close()


@pytest.mark.parametrize(
    "params",
    [*KINDS, PoolingParams(hidden_states_layers=[0]), PoolingParams("score", pooling="mean")],
    ids=["last", "mean", "all", "label", "layer", "cosine"],
)
def test_an_output_keeps_no_array_of_a_whole_step(model, params):
    """A row that a caller keeps once held the hidden states of all rows beside it."""
    prompts = [("query", prompt) if params.task == "score" else prompt for prompt in PROMPTS]
    with LLM(model, device="cpu", max_model_len=64) as llm:
        for output in llm.generate_iter(prompts, params):
            arrays = [each for each in (output.data, output.hidden_states, output.logprobs) if each is not None]
            owned = [each if each.base is None else each.base for each in arrays]
            assert max(each.nbytes for each in owned) <= sum(each.nbytes for each in arrays)


def test_memory_stays_flat_over_many_rows(llm):
    for _ in llm.embed_iter(([1 + n % 200, 2] for n in range(200)), ordered=False):
        assert len(llm.engine._unfinished) <= 32


def test_a_source_may_have_no_prompt_yet(llm):
    found = []

    def prompts():
        for number, prompt in enumerate(["Row 0", "", "Row 2"]):
            while len(found) < number:
                yield NOT_YET
            yield prompt

    for output in llm.embed_iter(prompts(), ordered=False):
        found.append(output)
    assert [(output.prompt_index, output.error is None) for output in found] == [(0, True), (1, False), (2, True)]


def test_drain_lets_what_has_started_finish(llm):
    seen = []
    params = [PoolingParams("label", labels=("yes", "no", "perhaps not"))] * 40
    outputs = llm.generate_iter((seen.append(n) or f"Row {n}" for n in range(40)), iter(params), ordered=False)
    first = next(outputs)
    num_read = len(seen)
    outputs.drain()
    rest = list(outputs)
    assert 0 < 1 + len(rest) < num_read == len(seen) and first.error is None
    assert all(len(output.probs) == 3 for output in rest)


def test_dropping_it_aborts_what_runs(llm):
    outputs = llm.embed_iter(PROMPTS)
    next(outputs)
    del outputs
    assert llm.engine.is_finished()


def test_an_exception_keeps_what_had_finished(llm):
    def prompts():
        yield from PROMPTS[:20]
        raise OSError("the source is gone")

    outputs, found = llm.embed_iter(prompts()), []
    with pytest.raises(OSError, match="the source is gone") as error:
        for output in outputs:
            found.append(output)
    kept = error.value.finished_outputs
    assert all(isinstance(output, PoolingRequestOutput) for output in kept.values())
    assert {output.prompt_index for output in found}.isdisjoint(kept) and llm.engine.is_finished()


@pytest.mark.parametrize("has_begun", [True, False])
def test_while_one_is_open_other_calls_are_refused(llm, has_begun):
    outputs = llm.embed_iter(PROMPTS)
    if has_begun:
        next(outputs)
    for call in (
        lambda: llm.embed("a", **QUIET), lambda: llm.encode("a", **QUIET), lambda: llm.embed_iter("a"),
        lambda: llm.label("a", ["b", "c"], **QUIET), lambda: llm.score("a", "b", pooling="last", **QUIET),
        lambda: llm.generate("a", **QUIET), lambda: llm.update_weights({}), llm.sleep,
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="has not finished: exhaust it, or close"):
            call()
    assert len(list(outputs)) == 40 - has_begun


def test_a_source_may_not_call_the_llm(llm):
    def prompts():
        yield "One"
        yield llm.embed("Two", **QUIET)[0].prompt

    with pytest.raises(RuntimeError, match="in the middle of a call"):
        list(llm.embed_iter(prompts()))


def test_requests_that_were_added_by_hand_are_not_dropped(llm):
    add_pooled(llm.engine, [1, 2], Pooling("last"))
    with pytest.raises(RuntimeError, match="requests that were added by hand"):
        llm.embed("a", **QUIET)
    assert len(run_to_end(llm.engine)) == 1


# Weights, sleep, runner, close


def test_an_output_says_which_weights_computed_it(model):
    weights = read_tensors(model)
    with LLM(model, **OPTIONS) as llm:
        (before,) = llm.embed("One two three", **QUIET)
        llm.update_weights({"model.norm.weight": weights["model.norm.weight"].flip(0)})
        (after,) = llm.embed("One two three", **QUIET)
        (label,) = llm.label("One", ["a", "b"], **QUIET)
    assert (before.weight_version, after.weight_version, label.weight_version) == (0, 1, 1)
    assert after.num_cached_tokens == 0 and not same(before, after)


CALLS = {
    "embed": lambda llm: llm.embed("a", **QUIET),
    "embed_iter": lambda llm: llm.embed_iter("a"),
    "encode": lambda llm: llm.encode("a", **QUIET),
    "label": lambda llm: llm.label("a", ["b", "c"], **QUIET),
    "score": lambda llm: llm.score("a", "b", pooling="last", **QUIET),
    "classify": lambda llm: llm.classify("a", **QUIET),
    "reward": lambda llm: llm.reward("a", **QUIET),
    "empty": lambda llm: llm.embed([], **QUIET),
}


def test_an_llm_that_sleeps_is_closed_or_is_a_fork_refuses(model):
    with LLM(model, **OPTIONS) as llm:
        (before,) = llm.embed("a", **QUIET)
        llm.sleep()
        for name in ("embed", "embed_iter", "encode", "label", "score"):
            with pytest.raises(RuntimeError, match="the engine sleeps; call wake_up"):
                CALLS[name](llm)
        llm.wake_up()
        assert same(before, llm.embed("a", **QUIET)[0])
        llm.engine._process_id += 1
        for call in CALLS.values():
            with pytest.raises(RuntimeError, match="is a fork of the one that made the engine"):
                call(llm)
        llm.engine._process_id -= 1
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call(llm)


def test_calls_from_threads_wait_for_each_other(model):
    found = []
    with LLM(model, **OPTIONS, queue_calls=True) as llm:
        threads = [threading.Thread(target=lambda: found.append(llm.embed(PROMPTS, **QUIET))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3 and all(map(same, found[0], found[2]))


def test_runner_pooling_leaves_out_the_lm_head(tmp_path):
    model = save_model(tmp_path, vocab_size=280, tie_word_embeddings=False)
    with LLM(tmp_path, **OPTIONS) as whole:
        expected, with_head = whole.embed([[1, 2, 3]], **QUIET)[0], whole.metrics()["memory_bytes"]["weights"]
    with LLM(tmp_path, **OPTIONS, runner="pooling") as llm:
        assert same(llm.embed([[1, 2, 3]], **QUIET)[0], expected)
        assert with_head - llm.metrics()["memory_bytes"]["weights"] == 4 * model.lm_head.weight.numel()
        assert llm.engine.runner.program.model.lm_head is None
        for call in (llm.generate, llm.generate_iter):
            with pytest.raises(ValueError, match="no LM head, so it can neither generate nor score"):
                call([[1, 2, 3]])
        with pytest.raises(ValueError, match=r"needs a model with an LM head .*without runner='pooling'"):
            llm.label([[1]], [[2], [3]], **QUIET)
        (row,) = llm.generate_iter(iter([[1, 2]]), iter([GENERATE]))
        assert "no LM head" in row.error
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.update_weights(model.state_dict())
            assert same(llm.embed([[1, 2, 3]], **QUIET)[0], expected)
        llm.update_weights({"model.norm.weight": model.state_dict()["model.norm.weight"].flip(0)})
        assert not same(llm.embed([[1, 2, 3]], **QUIET)[0], expected)


def test_runner_generate_refuses_a_model_without_an_lm_head(classifier_model):
    with pytest.raises(ValueError, match="runner"):
        LLM(classifier_model, **OPTIONS, runner="generate")


@pytest.mark.parametrize("side, kept", [("right", [1, 2, 3]), ("left", [3, 4, 5])])
def test_a_prompt_is_cut_on_the_tokenizers_side(side, kept):
    tokenizer = load_tokenizer(MODEL_DIRECTORY)
    tokenizer.truncation_side = side
    text = Text(tokenizer)
    assert [each.token_ids for each in text.encode([[1, 2, 3, 4, 5], [7]], max_tokens=3)] == [kept, [7]]
    whole = text.encode(["abcdef"])[0].token_ids
    assert text.encode(["abcdef"], max_tokens=2)[0].token_ids == (whole[-2:] if side == "left" else whole[:2])


@pytest.mark.parametrize("name", ["byte-level BPE"])
def test_labels_that_merge_with_a_prompt_of_one_token_are_scored_whole(name):
    """They were scored from their second token on, or refused."""
    tokenizer = small_tokenizers()[name]
    text = Text(tokenizer)
    (first, second), (third, fourth) = text.encode_labels([("t", ["he cat", "wo"]), ("c", ["at", "an"])])
    for each, whole in ((first, "the cat"), (second, "two"), (third, "cat"), (fourth, "can")):
        assert each.error is None and each.token_ids[each.first_scored :] == tokenizer(whole)["input_ids"]
        assert each.token_ids[: each.first_scored] == text.first_token_ids


def test_a_label_follows_its_prompt_even_if_the_tokenizer_ends_texts_with_a_token():
    """Text and label each ended with that token."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(MODEL_DIRECTORY)
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    text = Text(tokenizer)
    assert text.num_closing == 1 and text.encode(["ab"])[0].token_ids[-1] == tokenizer.eos_token_id
    [labels] = text.encode_labels([("ab", ["cd", [100, 101]])])
    assert [each.token_ids for each in labels] == [[97, 98, 99, 100], [97, 98, 100, 101]]


def test_special_tokens_of_rows_that_pool_can_be_split(llm):
    params = [PoolingParams(), SamplingParams(max_tokens=1)]
    pooled, generated = llm.generate_iter(["<|im_start|>a"] * 2, params, split_special_tokens=True)
    assert (
        pooled.prompt_token_ids == generated.prompt_token_ids != llm.embed("<|im_start|>a", **QUIET)[0].prompt_token_ids
    )
    (refused,) = llm.generate_iter(["a"], PoolingParams("label", labels=("b", "c")), split_special_tokens=True)
    assert "split_special_tokens does not apply to the task 'label'" in refused.error
