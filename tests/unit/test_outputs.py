"""RequestOutput: a frozen record that also answers out["text"]."""

import dataclasses
import pickle

import pytest

from nanovllm import CompletionOutput, RequestOutput
from nanovllm.outputs import ErrorSummary

COMPLETION = CompletionOutput(0, "42", [52, 50, 258], "stop", 258)
OUTPUT = RequestOutput("7", "What?", [1, 2, 3], [COMPLETION, CompletionOutput(1, "6", [54], "length")], 2)
FIELDS = [
    "request_id", "prompt", "prompt_token_ids", "outputs", "num_cached_tokens", "error", "prompt_logprobs",
    "weight_version", "prompt_index", "metrics", "lora_request",
]  # fmt: skip
KEYS = {
    "text": "42", "token_ids": [52, 50, 258], "finish_reason": "stop", "num_prompt_tokens": 3, "request_id": "7",
    "prompt": "What?", "prompt_token_ids": [1, 2, 3], "outputs": OUTPUT.outputs, "num_cached_tokens": 2, "error": None,
    "prompt_logprobs": None, "weight_version": 0, "prompt_index": 0, "metrics": None, "lora_request": None,
    "finished": True,
}  # fmt: skip


def test_they_have_the_documented_fields_in_that_order():
    """They are vLLM's names, so a script only has to change its import line."""
    assert [field.name for field in dataclasses.fields(RequestOutput)] == FIELDS
    completion = ["index", "text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob", "logprobs"]
    assert [field.name for field in dataclasses.fields(CompletionOutput)] == completion


@pytest.mark.parametrize("name", KEYS)
def test_every_name_is_also_an_item(name):
    """The short names are those of the first completion."""
    assert OUTPUT[name] == getattr(OUTPUT, name) == KEYS[name]


@pytest.mark.parametrize("name", ["token_id", "keys", "__class__", "index", 0, None])
def test_what_is_no_field_is_a_key_error_that_lists_the_fields(name):
    """A method's name must not be a key, or a misspelt key would return a bound method."""
    with pytest.raises(KeyError, match=r"not a field of RequestOutput, which has text, token_ids"):
        OUTPUT[name]


def test_it_turns_into_a_dict():
    assert dict(OUTPUT) == {**OUTPUT} == KEYS and list(dict(OUTPUT)) == OUTPUT.keys() == list(KEYS)


@pytest.mark.parametrize("name", FIELDS)
def test_it_is_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(OUTPUT, name, None)


@pytest.mark.parametrize("name", ["text", "finished"])
def test_what_speaks_of_the_first_completion_is_frozen_too(name):
    """For a dataclass with slots, Python 3.11 raises a TypeError."""
    with pytest.raises((AttributeError, TypeError)):
        setattr(OUTPUT, name, None)


def test_it_takes_no_new_attributes():
    for output in (OUTPUT, COMPLETION):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            output.score = 1.0
        assert not hasattr(output, "__dict__")


def test_it_survives_pickling_and_compares_by_value():
    """Results travel between processes."""
    assert pickle.loads(pickle.dumps(OUTPUT)) == OUTPUT
    assert dataclasses.replace(OUTPUT, prompt="Who?") != OUTPUT


# The summary of failed rows


def summary(errors: dict[int, str]) -> ErrorSummary:
    """The order is random, because rows may fail at any time."""
    found = ErrorSummary()
    for index in sorted(errors, key=lambda index: index * 7 % 11):
        found.add(index, errors[index])
    return found


def test_rows_that_did_not_fail_are_not_spoken_of():
    assert summary({}).describe(2) is None


def test_errors_are_grouped_by_reason_with_the_first_rows_of_each():
    """If a million rows are too long, each with its own length, that is one reason and not a million lines."""
    errors = {index: f"the prompt's {index} tokens leave no room" for index in range(90, 40, -5)}
    errors[7] = "a prompt must be a string or a list of token ids, not None"
    errors[3] = "a prompt must be a string or a list of token ids, not 1.5"
    assert summary(errors).describe(200) == (
        "12 of 200 prompts ended in an error: 10 × the prompt's 45 tokens leave no room (at 45, 50, 55, 60, 65, …); "
        "2 × a prompt must be a string or a list of token ids, not 1.5 (at 3, 7)"
    )


def test_of_many_reasons_only_the_most_frequent_are_named():
    letters = "abcdefgh"
    text = summary({index: f"reason {letters[index % 8]}" for index in range(20)}).describe(200)
    assert text.startswith("20 of 200 prompts ended in an error: 3 × reason a (at 0, 8, 16); 3 × reason b")
    assert text.count("(at ") == 5 and text.endswith("; 6 × 3 other reasons")


def test_a_million_reasons_take_no_more_memory_than_a_thousand():
    """The tokenizer's message may differ from row to row."""
    found = summary({})
    for index in range(5000):
        found.add(index, "x" * index)
    assert len(found._kinds) == 1000
    assert found.describe(6000).startswith("5000 of 6000 prompts") and "4995 × many other reasons" in found.describe(
        6000
    )
    for index in range(5000, 6000):
        found.add(index, "")
    assert found.describe(6000).startswith("6000 of 6000 prompts ended in an error: 1001 ×  (at 0, 5000, 5001,")


def test_in_asks_for_a_field():
    """Without `__contains__`, `in` once tried the index 0."""
    assert "text" in OUTPUT and "prompt" in OUTPUT and "index" not in OUTPUT and 0 not in OUTPUT
