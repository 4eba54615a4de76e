"""RequestOutput: a frozen record that also answers out["text"]."""

import dataclasses
import pickle

import pytest

from nanovllm import RequestOutput

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
