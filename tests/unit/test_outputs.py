"""RequestOutput: a frozen record that also answers out["text"]."""

import dataclasses
import pickle

import pytest

from nanovllm import RequestOutput
from nanovllm.outputs import describe_errors

OUTPUT = RequestOutput("42", [52, 50, 258], "stop", num_prompt_tokens=35, num_cached_tokens=0)
FIELDS = ["text", "token_ids", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "error"]


def test_it_has_the_documented_fields_in_that_order():
    assert [field.name for field in dataclasses.fields(RequestOutput)] == FIELDS


def test_every_field_is_also_an_item():
    assert [OUTPUT[name] for name in FIELDS] == ["42", [52, 50, 258], "stop", 35, 0, None]


@pytest.mark.parametrize("name", ["token_id", "keys", "__class__", 0, None])
def test_what_is_no_field_is_a_key_error_that_lists_the_fields(name):
    """A method's name must not answer, or a misspelt key returns a bound method."""
    with pytest.raises(KeyError, match=r"not a field of RequestOutput, which has text, token_ids"):
        OUTPUT[name]


def test_it_turns_into_a_dict():
    expected = dict(zip(FIELDS, ("42", [52, 50, 258], "stop", 35, 0, None), strict=True))
    assert dict(OUTPUT) == {**OUTPUT} == dataclasses.asdict(OUTPUT) == expected


@pytest.mark.parametrize("name", FIELDS)
def test_it_is_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(OUTPUT, name, None)


def test_it_takes_no_new_attributes():
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        OUTPUT.score = 1.0
    assert not hasattr(OUTPUT, "__dict__")


def test_it_survives_pickling_and_compares_by_value():
    """Results travel between processes."""
    assert pickle.loads(pickle.dumps(OUTPUT)) == OUTPUT
    assert dataclasses.replace(OUTPUT, text="43") != OUTPUT


# What is said of the rows that failed


def row(error: str | None) -> RequestOutput:
    return RequestOutput("", [], "length" if error is None else "error", 0, 0, error)


def test_rows_that_did_not_fail_are_not_spoken_of():
    assert describe_errors({}, 2) is None
    assert describe_errors({0: row(None), 1: row(None)}, 2) is None


def test_errors_are_grouped_by_reason_with_the_first_rows_of_each():
    """A million rows that are too long, each with its own length, are one reason and not a million lines."""
    outputs = {index: row(None) for index in range(100)}
    outputs.update({index: row(f"the prompt's {index} tokens leave no room") for index in range(90, 40, -5)})
    outputs[7] = row("a prompt must be a string or a list of token ids, not None")
    outputs[3] = row("a prompt must be a string or a list of token ids, not 1.5")
    assert describe_errors(outputs, 200) == (
        "12 of 200 prompts ended in an error: 10 × the prompt's 45 tokens leave no room (at 45, 50, 55, 60, 65, …); "
        "2 × a prompt must be a string or a list of token ids, not 1.5 (at 3, 7)"
    )


def test_of_many_reasons_only_the_most_frequent_are_named():
    letters = "abcdefgh"
    outputs = {index: row(f"reason {letters[index % 8]}") for index in range(20)}
    text = describe_errors(outputs, 200)
    assert text.startswith("20 of 200 prompts ended in an error: 3 × reason a (at 0, 8, 16); 3 × reason b")
    assert text.count("(at ") == 5 and text.endswith("; 6 × 3 other reasons")


def test_in_asks_for_a_field():
    """Without an answer of its own, `in` tried the index 0."""
    output = RequestOutput("42", [52, 50], "stop", 3, 0)
    assert "text" in output and "prompt" not in output and 0 not in output
