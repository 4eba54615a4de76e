"""Bad input raises a typed error that names what to change, before work starts, or gives a row that says why it did not
run.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from support.bad_rows import BAD_ROWS, GREEDY, INFINITY, NAN
from support.model_factory import stable_id

import nanovllm.runner.settings
from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.attention.flash_backend import find_fault
from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.models.config import one_group
from nanovllm.runner import memory as memory_of
from nanovllm.runner.kv_cache import KVCacheLayout
from nanovllm.runner.memory import MemoryUse
from nanovllm.runner.warm_up import measure_memory

# 256 tokens in the cache, 300 within max_model_len: some requests fit only one of the two.
OPTIONS = {"device": "cpu", "num_kvcache_blocks": 16, "kvcache_block_size": 16, "max_model_len": 300}
SAMPLED = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL_DIRECTORY, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def idle_llm(llm) -> Iterator[LLM]:
    """An LLM that must not have run anything by the end of the test."""
    before = llm.metrics()
    yield llm
    after = llm.metrics()
    assert (after["num_steps"], after["num_unfinished_requests"]) == (before["num_steps"], 0)
    assert after["num_free_kvcache_blocks"] == OPTIONS["num_kvcache_blocks"]


# Rows come back with the reason, and their neighbours are not affected


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_says_why_and_spares_its_neighbours(llm, kind):
    row, reason = BAD_ROWS[kind]
    params = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True, seed=3)
    good = llm.generate(["One", "Two"], [GREEDY, params], use_tqdm=False)
    with pytest.MonkeyPatch.context() as patch:
        launched = []
        launch = llm.engine.runner.launch
        patch.setattr(llm.engine.runner, "launch", lambda step: launched.append(len(step.chunks)) or launch(step))
        first, bad, second = llm.generate(["One", row, "Two"], [GREEDY, GREEDY, params], use_tqdm=False)
    assert [first.token_ids, second.token_ids] == [output.token_ids for output in good]
    assert [first.error, second.error, max(launched)] == [None, None, 2]
    assert re.search(reason, bad.error), bad.error
    completion = CompletionOutput(0, "", [], "error")
    assert bad == RequestOutput("1", bad.prompt, bad.prompt_token_ids, [completion], error=bad.error, prompt_index=1)


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_raise_on_error_names_the_row_and_runs_nothing(idle_llm, kind):
    row, reason = BAD_ROWS[kind]
    with pytest.raises(ValueError, match=f"prompt 1: .*{reason}"):
        idle_llm.generate(["One", row, "Two"], GREEDY, use_tqdm=False, raise_on_error=True)


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_neighbours_without_a_seed_are_sampled_as_if_the_bad_rows_were_good(params):
    """A refused row that used up no number once shifted the seeds of all rows after it."""
    good = [f"Prompt {index}" for index in range(len(BAD_ROWS))]
    results = []
    for others in ([row for row, _ in BAD_ROWS.values()], ["something else"] * len(BAD_ROWS)):
        with LLM(MODEL_DIRECTORY, **OPTIONS) as llm:
            prompts = [prompt for pair in zip(good, others, strict=True) for prompt in pair]
            results.append(llm.generate(prompts, params, use_tqdm=False))
    spoilt, intact = results
    assert [output.token_ids for output in spoilt[::2]] == [output.token_ids for output in intact[::2]]
    assert {output.finish_reason for output in spoilt[1::2]} == {"error"}
    assert {output.finish_reason for output in intact} == {"length"}


def test_nothing_runs_when_all_rows_are_bad(idle_llm):
    rows = [row for row, _ in BAD_ROWS.values()]
    outputs = idle_llm.generate(rows, SAMPLED, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["error"] * len(rows)


@pytest.mark.parametrize("row", ["empty string", "empty list", "surrogate"])
def test_a_bad_row_alone_is_a_list_of_one(idle_llm, row):
    (output,) = idle_llm.generate([BAD_ROWS[row][0]], GREEDY, use_tqdm=False)
    assert output.finish_reason == "error"


@pytest.mark.parametrize("token_id", [-1, 259, 2**70])
def test_a_stop_token_outside_the_vocabulary_spoils_only_its_row(llm, token_id):
    """If it reached the logits, it would be an index outside them."""
    bad = SamplingParams(max_tokens=6, stop_token_ids=[65, token_id])
    first, second = llm.generate(["One", "One"], [bad, GREEDY], use_tqdm=False)
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert f"stop token id {token_id} is outside the vocabulary (0 to 258)" in first.error


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"logit_bias": {65: 1.0, 259: 2.0}}, "token id in logit_bias 259 is outside the vocabulary (0 to 258)"),
        ({"allowed_token_ids": [2**31, 5]}, "token id in allowed_token_ids 2147483648 is outside the vocabulary"),
        ({"bad_words": [[65], [66, 259]]}, "token id in bad_words 259 is outside the vocabulary"),
    ],
    ids=str,
)
def test_a_rule_about_a_token_outside_the_vocabulary_spoils_only_its_row(llm, params, reason):
    """The model's vocabulary is not known when the parameters are made."""
    bad = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **params)
    first, second = llm.generate(["One", "One"], [bad, GREEDY], use_tqdm=False)
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert reason in first.error
    assert replace(second, prompt_index=0) == llm.generate("One", GREEDY, use_tqdm=False)[0]


def test_an_engine_by_hand_refuses_bad_words_as_strings(llm):
    """Only the facade knows their tokens; an engine that skipped them would ban nothing."""
    with pytest.raises(ValueError, match="an engine knows no text; give bad_words as lists of token ids"):
        llm.engine.add_request([65], SamplingParams(bad_words=["no"]))
    assert llm.engine.is_finished()


# Error rows are seen


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("call", ["generate", "chat"])
def test_error_rows_are_logged_once_per_call(llm, caplog, call):
    """A job of a million prompts, all refused, once ended without a message."""
    before = llm.metrics()["num_rejected_requests"]
    if call == "generate":
        llm.generate(["One", "", [65] * 300, "Two", "", [65] * 301, None], GREEDY, use_tqdm=False)
        reasons = [
            "2 × the prompt is empty; it needs at least one token (at 1, 4)",
            "2 × the prompt's 300 tokens leave no room",
            "1 × a prompt must be a string or a list of token ids, not None (at 6)",
        ]
        start, num_bad = "5 of 7 prompts ended in an error: ", 5
    else:
        llm.chat([[{"role": "user", "content": "Hi"}], []], GREEDY, use_tqdm=False)
        reasons, start, num_bad = ["at least one message, not [] (at 1)"], "1 of 2 prompts ended in an error: ", 1
    (warning,) = warnings_of(caplog)
    assert warning.startswith(start) and all(reason in warning for reason in reasons), warning
    assert llm.metrics()["num_rejected_requests"] - before == num_bad


def test_a_call_without_error_rows_logs_nothing(llm, caplog):
    before = llm.metrics()["num_rejected_requests"]
    llm.generate(["One", "Two"], GREEDY, use_tqdm=False)
    llm.generate([], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 0"):
        llm.generate([""], GREEDY, use_tqdm=False, raise_on_error=True)
    assert warnings_of(caplog) == []
    assert llm.metrics()["num_rejected_requests"] - before == 1


def test_rows_that_fail_while_they_run_are_logged_too(llm, caplog, monkeypatch):
    """There is one warning for both kinds, and it leaves out the good row."""
    step = llm.engine.step

    def failing_step():
        finished = step()
        for seq in finished:
            if seq.token_ids[0] == ord("T"):
                seq.finish_reason, seq.error = "error", "the model's logits were not finite (NaN or infinity)"
        return finished

    monkeypatch.setattr(llm.engine, "step", failing_step)
    outputs = llm.generate(["One", "", "Two"], GREEDY, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["length", "error", "error"]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("2 of 3 prompts ended in an error: ")
    assert "1 × the model's logits were not finite (NaN or infinity) (at 2)" in warning


def test_what_was_refused_is_logged_even_if_the_call_is_interrupted(llm, caplog, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["One", ""], GREEDY, use_tqdm=False)
    assert [warning[:35] for warning in warnings_of(caplog)] == ["1 of 2 prompts ended in an error: 1"]


def test_a_subclass_of_str_is_a_string(llm):
    class Text(str):
        __slots__ = ()

    (expected,) = llm.generate("One", GREEDY, use_tqdm=False)
    for prompts in (Text("One"), [Text("One")]):
        assert llm.generate(prompts, GREEDY, use_tqdm=False) == [expected]


# Arguments of generate and chat


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a string, a list of token ids, a dict of one, or a list, not None"),
        (5, "prompts must be .* not 5"),
        (1.5, "prompts must be .* not 1.5"),
        (NAN, "prompts must be .* not nan"),
        (True, "prompts must be .* not True"),
        (b"bytes", "prompts must be .* not b'bytes'"),
        (bytearray(b"x"), "prompts must be"),
        ({"Hi"}, "prompts must be .* not {'Hi'}"),
        (frozenset([65]), "prompts must be"),
        (object(), "prompts must be"),
        (np.array(5), "prompts must be .* not 5"),
        ([1.0, 2.0], r"must hold integers only, not \[1.0, 2.0\]"),
        ([65, 66.5], "must hold integers only"),
        ([NAN], "must hold integers only"),
        ([True, False], "must hold integers only"),
        ([65, True], "must hold integers only"),
        (np.array([1.0, 2.0]), "must hold integers only"),
        (torch.tensor([0.5]), "must hold integers only"),
    ],
    ids=stable_id,
)
def test_what_can_be_no_prompts_is_a_type_error(idle_llm, prompts, message):
    """A set has no order to return results in, and a dict once ran its keys."""
    with pytest.raises(TypeError, match=message):
        idle_llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "params",
    [
        "greedy",
        0.7,
        [None],
        [GREEDY, None],
        [["temperature", 0]],
        (params for params in [GREEDY]),
        SamplingParams,
        {1: GREEDY}.values(),
    ],
    ids=stable_id,
)
def test_what_is_no_sampling_params_is_a_type_error(idle_llm, params):
    with pytest.raises(TypeError, match=r"sampling_params(\[\d\])? must be a SamplingParams"):
        idle_llm.generate(["Hi"], params, use_tqdm=False)
    with pytest.raises(TypeError, match=r"sampling_params(\[\d\])? must be a SamplingParams"):
        idle_llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)


def test_a_step_of_any_number_of_tokens_may_be_allowed():
    """Memory was once allocated for as many tiles as the option said: petabytes, so the allocator failed."""
    with LLM(str(MODEL_DIRECTORY), device="cpu", max_num_batched_tokens=sys.maxsize, num_kvcache_blocks=8) as llm:
        assert llm.generate("Hi", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].error is None


@pytest.mark.parametrize("option", ["temperature", "max_tokens", "sampling_param"])
def test_an_unknown_keyword_of_generate_is_refused(idle_llm, option):
    with pytest.raises(TypeError, match=option):
        idle_llm.generate("Hi", **{option: 1})


@pytest.mark.parametrize("conversations", ["Hi", None, 5, {"role": "user", "content": "Hi"}, b"Hi", {1}], ids=stable_id)
def test_what_can_be_no_conversations_is_a_type_error(idle_llm, conversations):
    with pytest.raises(TypeError, match="conversations must be a list of messages or a list of such lists"):
        idle_llm.chat(conversations, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("kwargs", ["enable_thinking", [("enable_thinking", False)], 1], ids=repr)
def test_chat_template_kwargs_must_be_a_dict(idle_llm, kwargs):
    with pytest.raises(TypeError, match="chat_template_kwargs must be a dict"):
        idle_llm.chat([{"role": "user", "content": "Hi"}], GREEDY, chat_template_kwargs=kwargs)


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        ([], "at least one message"),
        (None, "at least one message"),
        ("Hi", "at least one message"),
        ({"role": "user", "content": "Hi"}, "at least one message"),
        ([None], 'a dict with "role" and "content", not None'),
        (["Hi"], 'a dict with "role" and "content", not \'Hi\''),
        ([{"role": "user"}], 'a dict with "role" and "content"'),
        ([{"content": "Hi"}], 'a dict with "role" and "content"'),
        ([{"role": 1, "content": "Hi"}], 'a dict with "role" and "content"'),
        ([{"role": "user", "content": None}], "chat template cannot render"),
        ([{"role": "user", "content": 5}], "chat template cannot render"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
        ([{"role": "user", "content": "long" * 100}], "leave no room"),
    ],
    ids=repr,
)
def test_a_bad_conversation_spares_the_others(llm, conversation, reason):
    good = [{"role": "user", "content": "What is 12 + 30?"}]
    first, bad, second = llm.chat([good, conversation, good], GREEDY, use_tqdm=False)
    assert re.search(reason, bad.error), bad.error
    assert (bad.text, bad.token_ids, bad.finish_reason) == ("", [], "error")
    assert first.token_ids == second.token_ids == llm.chat(good, GREEDY, use_tqdm=False)[0].token_ids
    with pytest.raises(ValueError, match=f"prompt 1: .*{reason}"):
        llm.chat([good, conversation], GREEDY, use_tqdm=False, raise_on_error=True)


# Sampling parameters


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, r"temperature must be 0 \(greedy\) or more, not -0.1"),
        ({"temperature": NAN}, ValueError, "temperature must be finite, not nan"),
        ({"temperature": INFINITY}, ValueError, "temperature must be finite, not inf"),
        ({"temperature": np.float32("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": 10**400}, ValueError, "temperature must be finite"),
        ({"temperature": "0.7"}, TypeError, "temperature must be a number, not '0.7'"),
        ({"temperature": True}, TypeError, "temperature must be a number, not True"),
        ({"temperature": [0.7]}, TypeError, "temperature must be a number"),
        ({"temperature": 1j}, TypeError, "temperature must be a number"),
        ({"top_p": 0}, ValueError, r"top_p must be above 0 and at most 1 \(off\), not 0"),
        ({"top_p": -0.5}, ValueError, "top_p must be above 0"),
        ({"top_p": 1.01}, ValueError, "top_p must be above 0 and at most 1"),
        ({"top_p": NAN}, ValueError, "top_p must be finite"),
        ({"top_p": "0.9"}, TypeError, "top_p must be a number"),
        ({"top_p": False}, TypeError, "top_p must be a number"),
        ({"min_p": -0.1}, ValueError, r"min_p must be between 0 \(off\) and 1"),
        ({"min_p": 1.1}, ValueError, "min_p must be between 0"),
        ({"min_p": -INFINITY}, ValueError, "min_p must be finite"),
        ({"min_p": b"0"}, TypeError, "min_p must be a number"),
        ({"top_k": -2}, ValueError, r"top_k must be 0 or -1 \(off\) or more, not -2"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer, not 2.0"),
        ({"top_k": "2"}, TypeError, "top_k must be an integer"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -5}, ValueError, "max_tokens must be at least 0, not -5"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens must be an integer"),
        ({"max_tokens": INFINITY}, TypeError, "max_tokens must be an integer, not inf"),
        ({"max_tokens": "5"}, TypeError, "max_tokens must be an integer, not '5'"),
        ({"stop": "a", "detokenize": False}, ValueError, "stop strings are found in the text; use stop_token_ids"),
        ({"min_tokens": -1, "max_tokens": None}, ValueError, "min_tokens must be at least 0, not -1"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an integer, not True"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0, not -1"),
        ({"min_tokens": 65}, ValueError, r"min_tokens must be between 0 and max_tokens \(64\), not 65"),
        ({"min_tokens": 6, "max_tokens": 5}, ValueError, r"min_tokens must be between 0 and max_tokens \(5\)"),
        ({"min_tokens": "1"}, TypeError, "min_tokens must be an integer"),
        ({"stop": ""}, ValueError, "stop must not hold an empty string"),
        ({"stop": ["a", "b\ud800"]}, ValueError, "stop must be text"),
        ({"stop": ["a", ""]}, ValueError, "stop must not hold an empty string"),
        ({"stop": 5}, TypeError, "stop must be a string or a list of strings, not 5"),
        ({"stop": ["a", 5]}, TypeError, "stop must be a string or a list of strings"),
        ({"stop": [None]}, TypeError, "stop must be a string or a list of strings"),
        ({"stop": b"end"}, TypeError, "stop must be a string or a list of strings, not b'end'"),
        ({"stop": {"a": 1}}, TypeError, "stop must be a string or a list of strings"),
        ({"stop": (text for text in "ab")}, TypeError, "stop must be a string or a list of strings"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids must be a list of token ids, not 5"),
        ({"stop_token_ids": "5"}, TypeError, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": ["5"]}, TypeError, "stop_token_ids must be an integer, not '5'"),
        ({"stop_token_ids": [1.0]}, TypeError, "stop_token_ids must be an integer, not 1.0"),
        ({"stop_token_ids": [None]}, TypeError, "stop_token_ids must be an integer, not None"),
        ({"stop_token_ids": [True]}, TypeError, "stop_token_ids must be an integer, not True"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos must be True or False, not 1"),
        ({"ignore_eos": "no"}, TypeError, "ignore_eos must be True or False"),
        ({"seed": -2}, ValueError, r"seed must be between 0 and 2\*\*64 - 1, not -2"),
        ({"seed": 2**64}, ValueError, "seed must be between 0"),
        ({"seed": 1.0}, TypeError, "seed must be an integer, not 1.0"),
        ({"seed": "1"}, TypeError, "seed must be an integer"),
        ({"seed": True}, TypeError, "seed must be an integer"),
        ({"max_new_tokens": 5}, TypeError, "unknown parameter 'max_new_tokens'; did you mean max_tokens"),
        ({"repetition_penalty": 0}, ValueError, r"repetition_penalty must be above 0 \(1 is off\) .* not 0.0"),
        ({"repetition_penalty": -1.0}, ValueError, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 1e-300}, ValueError, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 1e300}, ValueError, r"repetition_penalty must be .* at most 1e30, not 1e\+300"),
        ({"repetition_penalty": NAN}, ValueError, "repetition_penalty must be finite"),
        ({"repetition_penalty": "1"}, TypeError, "repetition_penalty must be a number"),
        ({"presence_penalty": 2.01}, ValueError, "presence_penalty must be between -2 and 2, not 2.01"),
        ({"presence_penalty": -3}, ValueError, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": -2.1}, ValueError, "frequency_penalty must be between -2 and 2, not -2.1"),
        ({"frequency_penalty": NAN}, ValueError, "frequency_penalty must be finite"),
        ({"frequency_penalty": True}, TypeError, "frequency_penalty must be a number"),
        ({"logit_bias": {1: 101}}, ValueError, r"logit_bias\[1\] must be between -100 and 100, not 101"),
        ({"logit_bias": {"7": -INFINITY}}, ValueError, r"logit_bias\[7\] .* not -inf; bad_words and allowed_token"),
        ({"logit_bias": {1: NAN}}, ValueError, r"logit_bias\[1\] must be between -100 and 100, not nan"),
        ({"logit_bias": {1: "5"}}, TypeError, r"logit_bias\[1\] must be a number, not '5'"),
        ({"logit_bias": {1: True}}, TypeError, r"logit_bias\[1\] must be a number, not True"),
        ({"logit_bias": {-1: 5}}, ValueError, "a key of logit_bias must be at least 0, not -1"),
        ({"logit_bias": {"-1": 5}}, TypeError, "a key of logit_bias must be an integer, not '-1'"),
        ({"logit_bias": {"the": 5}}, TypeError, "a key of logit_bias must be an integer, not 'the'"),
        ({"logit_bias": {"²": 5}}, TypeError, "a key of logit_bias must be an integer"),
        ({"logit_bias": {1.0: 5}}, TypeError, "a key of logit_bias must be an integer, not 1.0"),
        ({"logit_bias": {5: 1, "5": 2}}, ValueError, "logit_bias names token 5 twice"),
        ({"logit_bias": [(1, 5)]}, TypeError, "logit_bias must be a dict from token ids to numbers"),
        ({"logit_bias": 5}, TypeError, "logit_bias must be a dict"),
        ({"bad_words": [1, 2]}, TypeError, r"bad_words must be a list of strings or of lists .*, not \[1, 2\]"),
        ({"bad_words": 5}, TypeError, "bad_words must be a list"),
        ({"bad_words": {"a"}}, TypeError, "bad_words must be a list"),
        ({"bad_words": [None]}, TypeError, "bad_words must be a list of token ids, not None"),
        ({"bad_words": ["a", ""]}, ValueError, "bad_words must not hold an empty string"),
        ({"bad_words": ["\ud800"]}, ValueError, "bad_words must be text"),
        ({"bad_words": [[]]}, ValueError, "bad_words must not hold an empty list"),
        ({"bad_words": [[1, -1]]}, ValueError, "bad_words must be at least 0, not -1"),
        ({"bad_words": [[1.5]]}, TypeError, "bad_words must be an integer, not 1.5"),
        ({"allowed_token_ids": []}, ValueError, "allowed_token_ids must hold at least one token id; None allows all"),
        ({"allowed_token_ids": [-1]}, ValueError, "allowed_token_ids must be at least 0, not -1"),
        ({"allowed_token_ids": [1.0]}, TypeError, "allowed_token_ids must be an integer"),
        ({"allowed_token_ids": "abc"}, TypeError, "allowed_token_ids must be a list of token ids, not 'abc'"),
        ({"allowed_token_ids": 5}, TypeError, "allowed_token_ids must be a list of token ids"),
        ({"num_beams": 4}, TypeError, "nanovllm has no beam search"),
    ],
    ids=stable_id,
)
def test_a_wrong_sampling_parameter_is_refused_when_it_is_made(values, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**values)


# Options of LLM


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_seq_len": 1}, TypeError, "unknown option 'max_seq_len'; did you mean max_model_len"),
        ({"gpu_memory_utilisation": 0.5}, TypeError, "did you mean gpu_memory_utilization"),
        ({"tensor_parallel": 2}, TypeError, "did you mean tensor_parallel_size"),
        ({"quux": 1}, TypeError, "unknown option 'quux'; the options are model, tokenizer, revision, .*seed$"),
        ({"Seed": 1}, TypeError, "did you mean seed"),
        ({"max_model_len": 0}, ValueError, "max_model_len must be at least 1, not 0"),
        ({"max_model_len": 1}, ValueError, "max_model_len must be at least 2: one token of prompt"),
        ({"max_model_len": -1}, ValueError, "max_model_len must be at least 1"),
        ({"max_model_len": 512.0}, TypeError, "max_model_len must be an integer, not 512.0"),
        ({"max_model_len": "512"}, TypeError, "max_model_len must be an integer, not '512'"),
        ({"max_model_len": True}, TypeError, "max_model_len must be an integer, not True"),
        ({"max_num_batched_tokens": 0}, ValueError, "max_num_batched_tokens must be at least 1"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": 10**9}, ValueError, "max_num_seqs must be at most 65535, not 1000000000"),
        ({"max_num_seqs": 2**63}, ValueError, "max_num_seqs must be at most 65535"),
        ({"kvcache_block_size": 10**6}, ValueError, "kvcache_block_size must be at most 65535"),
        ({"device": "cuda:99999999999999999999"}, ValueError, "device must be"),
        ({"max_num_seqs": INFINITY}, TypeError, "max_num_seqs must be an integer"),
        ({"kvcache_block_size": 0}, ValueError, "kvcache_block_size must be at least 1"),
        ({"kvcache_block_size": [16]}, TypeError, "kvcache_block_size must be an integer"),
        ({"num_kvcache_blocks": -3}, ValueError, "num_kvcache_blocks must be at least 1, not -3"),
        ({"num_kvcache_blocks": 1e3}, TypeError, "num_kvcache_blocks must be an integer"),
        ({"gpu_memory_utilization": 0}, ValueError, "gpu_memory_utilization must be above 0 and at most 1, not 0"),
        ({"gpu_memory_utilization": 90}, ValueError, "gpu_memory_utilization must be above 0 and at most 1, not 90"),
        ({"gpu_memory_utilization": NAN}, ValueError, "gpu_memory_utilization must be finite, not nan"),
        ({"gpu_memory_utilization": "0.9"}, TypeError, "gpu_memory_utilization must be a number"),
        ({"gpu_memory_utilization": True}, TypeError, "gpu_memory_utilization must be a number"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size must be at least 1"),
        ({"tensor_parallel_size": "2"}, TypeError, "tensor_parallel_size must be an integer"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of auto, float32, bfloat16, float16, not 'int8'"),
        ({"dtype": torch.int64}, ValueError, "dtype must be one of"),
        ({"dtype": "double"}, ValueError, "dtype must be one of"),
        ({"torch_dtype": "half"}, TypeError, "did you mean dtype"),
        ({"tp_size": 2}, TypeError, "did you mean tensor_parallel_size"),
        (
            {"attention_backend": "xformers"},
            ValueError,
            "attention_backend must be one of auto, triton, flash, sdpa, tiled, torch",
        ),
        ({"attention_backend": ["torch"]}, ValueError, "attention_backend must be one of"),
        ({"load_format": "gguf"}, ValueError, "load_format must be one of auto, safetensors, dummy, not 'gguf'"),
        ({"enforce_eager": 1}, TypeError, "enforce_eager must be True or False, not 1"),
        ({"overlap": "yes"}, TypeError, "overlap must be True or False"),
        ({"prefix_grouping": 0}, TypeError, "prefix_grouping must be True or False"),
        ({"deterministic": 1}, TypeError, "deterministic must be True or False, not 1"),
        ({"seed": -2}, ValueError, r"seed must be between 0 and 2\*\*64 - 1, not -2"),
        ({"seed": 2**64}, ValueError, "seed must be between 0"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"revision": 1}, TypeError, "revision must be a string, not 1"),
        ({"device": "tpu"}, ValueError, 'device must be "auto", "cpu", "cuda" or "cuda:N", not \'tpu\''),
        ({"device": "gpu"}, ValueError, "device must be"),
        ({"device": "CUDA"}, ValueError, "device must be"),
        ({"device": "cpu:0"}, ValueError, "device must be"),
        ({"device": "cuda:"}, ValueError, "device must be .* not 'cuda:'"),
        ({"device": "cuda:-1"}, ValueError, "device must be"),
        ({"device": "cuda:one"}, ValueError, "device must be"),
        ({"device": "cuda:²"}, ValueError, "device must be"),
        ({"device": "auto:0"}, ValueError, "device must be"),
        ({"device": ""}, ValueError, "device must be"),
        ({"device": 0}, ValueError, "device must be .* not 0"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(options, error, message):
    """The directory does not even exist. An unknown keyword was once ignored."""
    with pytest.raises(error, match=message):
        LLM("/there/is/no/such/model", **options)


@pytest.mark.parametrize("model", [None, 5, b"/model", "", ["model"], {"model": 1}], ids=repr)
def test_a_model_must_be_a_name_or_a_path(model):
    with pytest.raises(TypeError, match="model must be a directory or a hub name"):
        LLM(model)


def test_a_config_made_directly_is_checked_as_well():
    with pytest.raises(TypeError, match="max_seq_len"):
        Config("m", max_seq_len=1)
    with pytest.raises(ValueError, match="max_num_seqs"):
        Config("m", max_num_seqs=0)


# Devices and memory


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:99"])
def test_a_gpu_that_is_not_there_is_a_runtime_error(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=f"device='{device}', but PyTorch finds no GPU; use device=\"cpu\""):
        LLM(MODEL_DIRECTORY, device=device)


@pytest.mark.parametrize("index", [2, 99])
def test_a_gpu_beyond_the_last_is_a_runtime_error(monkeypatch, index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=f"device='cuda:{index}', but there are 2 GPUs"):
        LLM(MODEL_DIRECTORY, device=f"cuda:{index}")


@pytest.mark.parametrize("num_blocks", [10**9, 10**18, 2**70])
def test_more_cache_than_memory_says_how_much_and_what_to_lower(num_blocks):
    message = rf"num_kvcache_blocks={num_blocks} needs [\d.]+ GiB more than the [\d.]+ GiB there are for it; lower it$"
    with pytest.raises(RuntimeError, match=message):
        LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=num_blocks)


@pytest.mark.parametrize("left", [0, 2 * 2**20])
def test_too_little_memory_for_one_sequence_says_how_much_and_what_to_lower(monkeypatch, left):
    """The weights of the bundled model take 7.9 MiB, and the cache gets half of what they leave."""
    answers = iter([2**23, 2**23])
    monkeypatch.setattr(nanovllm.runner.settings, "free_bytes", lambda device: next(answers, left))
    message = r"one sequence of 16 blocks .*needs [\d.]+ GiB more than the [\d.]+ GiB .*; lower max_model_len$"
    with pytest.raises(RuntimeError, match=message):
        LLM(MODEL_DIRECTORY, device="cpu")


GPU = MemoryUse(total=100, free_at_start=90, free=80, activations=15, graphs=5)


def blocks_on_gpu(monkeypatch, memory: MemoryUse, **options) -> int:
    """Blocks of a byte on a GPU of `memory`, without a margin; the longest sequence takes 12."""
    monkeypatch.setattr(memory_of, "_GPU_MARGIN", 0)
    return memory_of.num_kvcache_blocks(
        Config("m", **options), memory, 1, 12, 12 * options.get("max_num_seqs", 512), True
    )


def test_a_gpu_gives_what_weights_activations_and_graphs_leave_of_its_share(monkeypatch):
    """The memory of other processes was once counted as our own, so a second engine on the GPU failed or starved the
    first.
    """
    for utilization, expected in ((0.9, 90 - 30), (0.5, 50 - 30), (0.42, 12), (1.0, 90 - 30)):
        assert blocks_on_gpu(monkeypatch, GPU, gpu_memory_utilization=utilization) == expected
    # Memory that other processes hold limits us, but does not count as ours.
    assert blocks_on_gpu(monkeypatch, MemoryUse(100, 50, 40, 15, 5), gpu_memory_utilization=0.9) == 20
    assert blocks_on_gpu(monkeypatch, GPU, max_num_seqs=2) == 24, "more could never be used"
    assert blocks_on_gpu(monkeypatch, GPU, num_kvcache_blocks=60) == 60


def test_a_gpu_without_room_says_what_to_change(monkeypatch):
    message = r"needs [\d.]+ GiB more than .*; lower max_model_len, .*max_num_seqs, raise gpu_memory_utilization"
    with pytest.raises(RuntimeError, match=message):
        blocks_on_gpu(monkeypatch, GPU, gpu_memory_utilization=0.41)
    with pytest.raises(RuntimeError, match=r"num_kvcache_blocks=61 .*; lower it or raise gpu_memory_utilization$"):
        blocks_on_gpu(monkeypatch, GPU, num_kvcache_blocks=61)


class FakeGpu:
    """Answers what measure_memory asks: steps take 3 bytes a token for a while, and 40 bytes of kernels stay."""

    def __init__(self, monkeypatch, max_num_tokens: int = 10**9):
        self.steps, self.max_num_tokens, self.used, self.peak = [], max_num_tokens, 100, 100
        for name in (
            "empty_cache",
            "reset_peak_memory_stats",
            "mem_get_info",
            "memory_allocated",
            "max_memory_allocated",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def run_step(self, sizes: list[int]) -> None:
        if sum(sizes) > self.max_num_tokens:
            raise torch.cuda.OutOfMemoryError("tried to allocate")
        self.steps.append(sizes)
        self.used = 140
        self.peak = max(self.peak, 50 + 3 * sum(sizes))

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self, device):
        self.peak = 50

    def mem_get_info(self, device):
        return 10_000 - self.used, 10_000

    def memory_allocated(self, device):
        return 50

    def max_memory_allocated(self, device):
        return self.peak


def test_a_layouts_bytes_are_those_of_its_tensor():
    layout = KVCacheLayout(one_group(3), 16, 2, 8, torch.bfloat16)
    cache = layout.empty(5, torch.device("cpu"))
    assert cache.tensors[0].shape == (2, 3, 5, 16, 2, 8) and cache.nbytes == 5 * layout.block_bytes


@pytest.mark.parametrize(
    ("num_tokens", "max_num_seqs", "num_seqs"),
    [(1000, 16, 16), (10, 16, 10), (3, 2, 2), (2, 2, 2), (1, 4, 1), (50, 1, 1)],
)
def test_the_step_that_is_measured_is_as_large_as_any(monkeypatch, num_tokens, max_num_seqs, num_seqs):
    """A trial step that was too small once let the cache take memory that the largest step then lacked."""
    gpu = FakeGpu(monkeypatch)
    memory = measure_memory(gpu.run_step, num_tokens, max_num_seqs, 9_950, torch.device("cuda", 0))
    *small, largest = gpu.steps
    assert sum(largest) == num_tokens and len(largest) == num_seqs and max(largest) - min(largest) <= 1
    assert small == ([[1, 2]] if num_tokens > num_seqs > 1 else []), "what decodes beside prompts take is compiled too"
    # Memory that kernels took is no longer free, and does not count as activations either.
    assert memory == MemoryUse(10_000, 9_950, 10_000 - 140, activations=3 * num_tokens)


def test_a_step_too_large_for_the_gpu_says_which_and_what_to_lower(monkeypatch):
    gpu = FakeGpu(monkeypatch, max_num_tokens=999)
    with pytest.raises(RuntimeError, match=r"^a step of 1000 tokens and 16 sampled rows does not .*; lower max_num_b"):
        measure_memory(gpu.run_step, 1000, 16, 9_950, torch.device("cuda", 0))


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_a_backend_for_gpus_is_refused_on_a_cpu(monkeypatch, backend):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=f'attention_backend="{backend}" needs a GPU; on a CPU use "auto"'):
        LLM(MODEL_DIRECTORY, device="cpu", attention_backend=backend)


@pytest.mark.parametrize(
    ("backend", "changes", "block_size", "error", "message"),
    [
        ("triton", {}, 24, ValueError, "kvcache_block_size to be a multiple of 16, not 24"),
        ("flash", {}, 256, RuntimeError, 'pip install flash-attn; or use "triton"'),
        ("flash", {"dtype": torch.float32}, 256, ValueError, "dtype bfloat16 or float16, not torch.float32"),
        ("flash", {"head_dim": 264}, 256, ValueError, "head_dim of at most 256 that 8 divides, not 264"),
        ("flash", {"head_dim": 36}, None, ValueError, "head_dim of at most 256 that 8 divides, not 36"),
        ("flash", {}, 128, ValueError, "kvcache_block_size to be a multiple of 256, not 128"),
    ],
)
def test_a_backend_that_cannot_run_the_model_says_what_it_needs(
    monkeypatch, backend, changes, block_size, error, message
):
    """The check does not import the backend: a GPU machine without FlashAttention must get the message too."""
    has_flash = error is not RuntimeError
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (has_flash or None) if name == "flash_attn" else find_spec(name),
    )
    fields = {"dtype": torch.bfloat16, "device": torch.device("cuda", 0), **changes}
    with pytest.raises(error, match=f'attention_backend="{backend}" needs .*{message}'):
        make_attention_backend(
            backend,
            AttentionShape(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, **fields}),
            block_size,
        )


def test_a_build_of_flash_attn_that_computes_wrongly_is_found(monkeypatch):
    """One decode is tried without a window and, where layers have one, with one; a build may lack either."""

    def decode(q, k, v, cache_seqlens, block_table, causal, softmax_scale, window_size):
        left, rows = window_size[0], []
        for row, length in enumerate(cache_seqlens.tolist()):
            seen = slice(0 if left < 0 else length - 1 - left, length)
            keys, values = (x[block_table[row].long()].flatten(0, 1)[seen].transpose(0, 1) for x in (k, v))
            options = {"scale": softmax_scale, "enable_gqa": True}
            attended = torch.nn.functional.scaled_dot_product_attention(q[row].transpose(0, 1), keys, values, **options)
            rows.append(attended.transpose(0, 1))
        return torch.stack(rows)

    def lacks_room(*args, **options):
        """A row's second head is overwritten by another."""
        out = decode(*args, **options)
        out[:, :, 1] = out[:, :, 0]
        return out

    def lacks_windows(q, *more, window_size, **options):
        if window_size != (-1, -1):
            raise RuntimeError("no local attention")
        return decode(q, *more, window_size=window_size, **options)

    def of(windows: tuple[int, ...], function) -> str | None:
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=function))
        fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "scale": 0.3}
        shape = AttentionShape(device=torch.device("cpu"), windows=windows, **fields)
        return find_fault(shape)

    for windows in ((0,), (0, 50)):
        assert of(windows, decode) is None
        assert of(windows, lambda *args, **options: decode(*args, **options) * 1.05) == "its results are wrong"
        assert of(windows, lambda *args, **options: decode(*args, **options) * float("nan")) == "its results are wrong"
        assert of(windows, lacks_room) == "its results are wrong"
        assert "argument" in of(windows, lambda q, k, v: q)
    assert of((0,), lacks_windows) is None and of((0, 50), lacks_windows) == "no local attention"


@pytest.mark.parametrize("max_model_len", [1025, 32768, 2**70])
def test_max_model_len_never_exceeds_what_the_model_was_made_for(max_model_len):
    """Positions beyond it have no meaning to the model; the table of cosines would end there too."""
    with pytest.raises(ValueError, match=f"max_model_len={max_model_len} exceeds the 1024 tokens"):
        LLM(MODEL_DIRECTORY, max_model_len=max_model_len)


# Checkpoints


@pytest.fixture
def directory(tmp_path) -> Path:
    """A copy of the model for tests to damage."""
    return Path(shutil.copytree(MODEL_DIRECTORY, tmp_path / "model"))


@pytest.mark.parametrize("model", ["/no/such/directory", "./none", "../none", "~/none-such", "a/b/c"])
def test_a_missing_directory_is_not_looked_for_on_the_hub(monkeypatch, model):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ValueError, match=f"model '{re.escape(model)}' is not a directory"):
        LLM(model)


def test_a_file_is_no_model():
    with pytest.raises(ValueError, match=r"config.json' is not a directory"):
        LLM(MODEL_DIRECTORY / "config.json")


def test_a_name_that_the_hub_refuses_says_why(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"'some/model' is not a directory, and the hub .*: no route"):
        LLM("some/model")


def test_an_empty_directory_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"config.json is missing; model must be a directory in the Hugging Face"):
        LLM(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe\x00"], ids=repr)
def test_a_broken_config_names_its_file(directory, name, content):
    (directory / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} (cannot be read|must hold a JSON object)"):
        LLM(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architecture \['GPT2LMHeadModel'\]; supported: Gemma3ForCausalLM"),
        (
            {"architectures": None, "model_type": "gpt2"},
            "config.json in .* has no architectures, and model_type 'gpt2'; supported: Gemma3ForCausalLM",
        ),
        ({"rope_parameters": {"rope_type": "axial", "factor": 8.0}}, "rope type 'axial' is not supported; default"),
        ({"rope_parameters": {"rope_type": "mrope", "mrope_section": [2, 1, 1]}}, "rope type 'mrope' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta in config.json must be a number from 1e-12 to 1e"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor in config.json is not supported"),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 6, "sliding_window": 0},
            "sliding_window in config.json must be an integer from 1",
        ),
        ({"layer_types": ["sliding_attention"] * 6}, "does not fit sliding_window=None and use_sliding_window=False"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types in config.json must say"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; silu, gelu_pytorch_tanh are"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\} in config.json is not supported"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"vocab_size": "259"}, "vocab_size in config.json must be an integer from 1 to 16777216, not '259'"),
        ({"vocab_size": 0}, "vocab_size in config.json must be an integer from 1 to 16777216, not 0"),
        ({"hidden_size": 160.0}, "hidden_size in config.json must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers in config.json must be an integer from 1 to 1024"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 31}, "head_dim=31 must be even"),
        ({"max_position_embeddings": -1}, "max_position_embeddings in config.json must be an integer"),
        # A config that disagrees with the weights.
        ({"num_hidden_layers": 7, "layer_types": None}, r"tensors are missing from .*model.layers.6."),
        ({"num_hidden_layers": 5, "layer_types": None}, r"unexpected tensor model.layers.5"),
        ({"intermediate_size": 449}, r"tensor model.layers.0.mlp.\w+.weight in .* has shape \[.*\], the model needs"),
        ({"vocab_size": 260}, r"tensor model.embed_tokens.weight .* has shape \[259, 160\].* needs \[260, 160\]"),
        ({"tie_word_embeddings": False}, r"a tensor is missing from .*: lm_head.weight"),
    ],
    ids=str,
)
def test_a_config_that_cannot_work_names_the_field(directory, changes, message):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        LLM(directory)


@pytest.mark.parametrize("sizes", [{"vocab_size": 2**24, "hidden_size": 2**18}, {"intermediate_size": 2**24}], ids=str)
def test_weights_that_memory_cannot_hold_are_refused_before_they_are_allocated(directory, monkeypatch, sizes):
    """Linux may promise more than it has, and kill the process that takes it."""
    monkeypatch.setattr(nanovllm.runner.settings, "free_bytes", lambda device: 2**34)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **sizes}))
    with pytest.raises(
        RuntimeError, match=r"weights need about \d+\.\d\d GiB of cpu in torch.float32, but 16.00 GiB are free"
    ):
        LLM(directory, device="cpu", load_format="dummy")


def test_weights_that_just_fit_are_allowed():
    for device, hint in (("cpu", "model or dtype, or check"), ("cuda", "or a higher tensor_parallel_size, or check")):
        memory_of.check_weights_fit(100, 100, torch.float32, torch.device(device))
        with pytest.raises(RuntimeError, match=hint):
            memory_of.check_weights_fit(101, 100, torch.float32, torch.device(device))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _write_index(path: Path, weight_map) -> None:
    (path.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, r"holds no .safetensors file"),
        (_truncate, r"model.safetensors is truncated or not a safetensors file"),
        (lambda path: path.write_bytes(b""), r"model.safetensors is truncated or not a safetensors file"),
        (lambda path: path.write_bytes(b"\x80\x04pickle" * 99), r"model.safetensors is truncated or not a safetensors"),
        (
            lambda path: path.rename(path.with_name("pytorch_model.bin")),
            r"holds no .safetensors file, only pytorch_mod",
        ),
        (lambda path: (path.unlink(), os.mkfifo(path)), r"model.safetensors is not a regular file"),
        (
            lambda path: (
                shutil.copy(path, path.with_name("a.safetensors")),
                path.rename(path.with_name("b.safetensors")),
            ),
            r"tensor .* in .* and tensor .* in .* are the same tensor",
        ),
        (
            lambda path: _write_index(path, {"w": "../model.safetensors"}),
            r"names the file '../model.safetensors', which",
        ),
        (lambda path: _write_index(path, {"w": "/etc/passwd"}), r"names the file '/etc/passwd', which is not"),
        (lambda path: _write_index(path, {"w": "model.bin"}), r"names the file 'model.bin', which is not"),
        (
            lambda path: (path.unlink(), _write_index(path, {"w": "gone.safetensors"})),
            r"names gone.safetensors, which is missing",
        ),
        (lambda path: _write_index(path, ["model.safetensors"]), r"index.json cannot be read"),
        (lambda path: _write_index(path, None), r"index.json cannot be read"),
    ],
)
def test_broken_weights_name_the_file(directory, spoil, message):
    """An index that may point anywhere could read files outside the checkpoint."""
    spoil(directory / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        LLM(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {"type": "BPE"}}'], ids=repr)
def test_a_broken_tokenizer_names_its_directory(directory, content):
    (directory / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"the tokenizer in {re.escape(str(directory))} cannot be loaded"):
        LLM(directory)


@pytest.mark.parametrize(
    ("recommended", "message"),
    [
        ({"do_sample": True, "temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"do_sample": True, "top_p": 3}, "top_p must be above 0"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1"),
    ],
    ids=str,
)
def test_wrong_recommendations_matter_only_to_those_who_ask_for_them(directory, recommended, message):
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **recommended}))
    with LLM(directory, **OPTIONS) as llm:
        with pytest.raises((TypeError, ValueError), match=message):
            llm.generate("Hi", use_tqdm=False)
        assert llm.generate("Hi", GREEDY, use_tqdm=False)[0].error is None


def test_a_failed_start_leaves_no_trace(llm, directory):
    """The next LLM of the same process must work, and a running one must not be affected."""
    (expected,) = llm.generate("One", GREEDY, use_tqdm=False)
    _truncate(directory / "model.safetensors")
    default_dtype = torch.get_default_dtype()
    with pytest.raises(ValueError, match="truncated"):
        LLM(directory)
    assert torch.get_default_dtype() is default_dtype
    with LLM(MODEL_DIRECTORY, **OPTIONS) as other:
        for model in (llm, other):
            assert model.generate("One", GREEDY, use_tqdm=False)[0].token_ids == expected.token_ids


def test_a_failed_start_leaves_the_callers_exception_alone(directory):
    """A failed start once cleared the variables that an exception of the caller still holds."""

    def values():
        yield 1
        yield 2

    def caller():
        kept, iterator = [1, 2, 3], values()
        next(iterator)
        raise KeyError(kept.pop())

    _truncate(directory / "model.safetensors")
    try:
        caller()
    except KeyError as error:
        with pytest.raises(ValueError, match="truncated"):
            LLM(directory)
        held = error.__traceback__.tb_next.tb_frame.f_locals
        assert held["kept"] == [1, 2] and next(held["iterator"]) == 2


def test_no_message_names_a_package_that_is_not_ours():
    """A user who follows `pip install nanovllm` gets a stranger's package, if one has that name on the index."""
    package = Path(nanovllm.__file__).parent
    hints = [
        (path.name, hint)
        for path in sorted(package.rglob("*.py"))
        for hint in re.findall(r"pip install[^\n]*", path.read_text(encoding="utf-8"))
    ]
    assert hints, "there are hints to look at"
    packages = "flash-attn|triton|llguidance|pyarrow|mistral-common|matplotlib"
    for name, hint in hints:
        assert re.match(rf"pip install ({packages})\b", hint), (name, hint)
