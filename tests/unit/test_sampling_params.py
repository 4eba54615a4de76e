"""SamplingParams: what is accepted and what it becomes. What is refused stands in test_bad_input.py."""

import dataclasses
import pickle

import numpy as np
import pytest

from nanovllm import SamplingParams


def test_the_defaults_are_the_documented_ones():
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "max_tokens": 64,
        "min_tokens": 0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "seed": None,
        "skip_special_tokens": True,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1e300},
        {"temperature": 5e-324},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"top_k": 0},
        {"top_k": 10**30},
        {"max_tokens": 1},
        {"max_tokens": 10**30},
        {"min_tokens": 5, "max_tokens": 5},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"stop_token_ids": [0]},
    ],
    ids=str,
)
def test_the_ends_of_every_range_belong_to_it(values):
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("stop", ["end", ["end"], ("end",)])
def test_a_stop_string_may_stand_alone(stop):
    """A bare string taken as a list would stop at every one of its letters."""
    assert SamplingParams(stop=stop).stop == ("end",)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_stop_token_ids_may_be_any_collection(kind):
    assert SamplingParams(stop_token_ids=kind([7])).stop_token_ids == (7,)


def test_numpy_numbers_become_plain_ones():
    """A numpy integer that stays one overflows where a Python integer grows."""
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        max_tokens=np.int32(9),
        top_k=np.uint8(3),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=[np.int64(4)],
    )
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k) == (0.5, 0.25, 9, 3)
    assert (params.seed, params.stop_token_ids) == (2**64 - 1, (4,))
    values = (params.temperature, params.max_tokens, params.top_k, params.seed, params.stop_token_ids[0])
    assert [type(value) for value in values] == [float, int, int, int, int]


def test_they_are_frozen_and_hold_no_list_of_the_caller():
    """One object serves thousands of rows; a change in the middle of a run would reach all of them."""
    stop, stop_token_ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids)
    stop.append("b")
    stop_token_ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0


def test_they_can_be_compared_hashed_pickled_and_replaced():
    params = SamplingParams(temperature=0.3, stop=["x", "y"], stop_token_ids=[3], seed=1)
    assert params == SamplingParams(temperature=0.3, stop=("x", "y"), stop_token_ids=(3,), seed=1)
    assert len({params, pickle.loads(pickle.dumps(params))}) == 1
    assert dataclasses.replace(params, seed=2) == SamplingParams(
        temperature=0.3, stop=["x", "y"], stop_token_ids=[3], seed=2
    )


def test_replace_checks_again():
    with pytest.raises(ValueError, match="max_tokens"):
        dataclasses.replace(SamplingParams(), max_tokens=0)
