"""SamplingParams: accepted values and their results. test_bad_input.py has the refused ones."""

import copy
import dataclasses
import functools
import inspect
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from nanovllm import SamplingParams, sampling_params
from nanovllm.sampling_params import one_per_prompt, with_seed


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
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_words": (),
        "allowed_token_ids": None,
        "include_stop_str_in_output": False,
        "detokenize": True,
        "n": 1,
        "logprobs": None,
        "logprobs_mode": "raw",
        "prompt_logprobs": None,
        "structured_outputs": None,
        "logits_processors": (),
    }


def test_the_signature_shows_every_field_in_its_order():
    """Completion and help() once showed `*args, **kwargs` for a class whose constructor explained wrong names."""
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(SamplingParams)]
    assert parameters["temperature"].default == 1.0 and parameters["stop"].default is None
    assert SamplingParams(0.5, 7) == SamplingParams(temperature=0.5, max_tokens=7)


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
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 1e30},
        {"presence_penalty": -2},
        {"presence_penalty": 2},
        {"frequency_penalty": -2},
        {"frequency_penalty": 2},
        {"logit_bias": {0: -100, 1: 100}},
        {"allowed_token_ids": [0]},
    ],
    ids=str,
)
def test_the_ends_of_every_range_belong_to_it(values):
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("stop", ["end", ["end"], ("end",)])
def test_a_stop_string_may_stand_alone(stop):
    """A bare string taken as a list would stop at each of its letters."""
    assert SamplingParams(stop=stop).stop == ("end",)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, np.array])
def test_token_ids_may_be_any_collection(kind):
    params = SamplingParams(stop_token_ids=kind([7]), allowed_token_ids=kind([7]), bad_words=[kind([7])])
    assert (params.stop_token_ids, params.allowed_token_ids, params.bad_words) == ((7,), (7,), ((7,),))


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_ways_to_write_top_k_off_are_one(top_k):
    """vLLM's −1 was refused, and once became the largest k of an unsigned number."""
    assert SamplingParams(top_k=top_k) == SamplingParams() and SamplingParams(top_k=top_k).top_k == 0


def test_logit_bias_may_have_the_string_keys_of_json():
    """A biased id that stays a string is never found among the vocabulary's integers."""
    biases = {3: -7.5, 250: 100}
    expected = SamplingParams(logit_bias=biases)
    assert expected.logit_bias == {3: -7.5, 250: 100.0}
    assert SamplingParams(logit_bias=json.loads(json.dumps(biases))) == expected
    assert [(type(key), type(value)) for key, value in expected.logit_bias.items()] == [(int, float)] * 2


def test_a_bad_word_may_stand_alone_and_words_and_ids_may_mix():
    """A bare string taken as a list would ban each of its letters."""
    assert SamplingParams(bad_words="end").bad_words == ("end",)
    assert SamplingParams(bad_words=["end", [3, 4], (5,)]).bad_words == ("end", (3, 4), (5,))


def test_allowed_token_ids_are_sorted_and_single():
    assert SamplingParams(allowed_token_ids=[9, 2, 9, 4]).allowed_token_ids == (2, 4, 9)


def test_they_come_through_json_as_they_were():
    """The ranks of a split model get every field but `stop` as JSON; None must not come back as an empty list."""
    params = [
        SamplingParams(),
        SamplingParams(
            temperature=0.3, top_k=-1, stop_token_ids={3}, repetition_penalty=1.1, presence_penalty=-0.5,
            frequency_penalty=2, logit_bias={7: -100, 8: 0.25}, bad_words=[[1], "two", [3, 4]],
            allowed_token_ids=range(5), seed=2**64 - 1,
        ),
    ]  # fmt: skip
    for one in params:
        fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(SamplingParams)}
        assert SamplingParams(**json.loads(json.dumps(fields))) == one


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("temp", "temperature"),
        ("Temperature", "temperature"),
        ("stop_strings", "stop"),
        ("eos_token_id", "stop_token_ids"),
        ("bad_words_ids", "bad_words"),
        ("repeat_penalty", "repetition_penalty"),
        ("presence_penality", "presence_penalty"),
        ("topp", "top_p"),
    ],
)
def test_an_unknown_name_is_told_the_right_one(name, ours):
    """A name from another library once got a bare "unexpected keyword argument"."""
    for make in (SamplingParams, functools.partial(dataclasses.replace, SamplingParams())):
        with pytest.raises(TypeError) as error:
            make(**{name: 1})
        assert str(error.value) == f"unknown parameter {name!r}; did you mean {ours}?"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("do_sample", "temperature=0 is greedy"),
        ("num_beams", "nanovllm has no beam search"),
        ("suppress_tokens", "bad_words="),
        (
            "quux",
            "the parameters are temperature, .*, logits_processors$",
        ),
    ],
)
def test_an_unknown_name_without_a_right_one_is_told_what_to_do(name, advice):
    with pytest.raises(TypeError, match=f"unknown parameter '{name}'; {advice}"):
        SamplingParams(**{name: 1})


def test_what_unknown_names_are_told_are_names_that_exist():
    """A table of hints is right only as long as the fields that it names."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not names & set(sampling_params._MEANT), "a name of ours is in no need of a hint"
    assert all(ours.split("=")[0] in names or " " in ours for ours in sampling_params._MEANT.values())


def test_numpy_numbers_become_plain_ones():
    """A numpy integer that stays one overflows where a Python integer grows."""
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        max_tokens=np.int32(9),
        top_k=np.uint8(3),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=[np.int64(4)],
        logit_bias={np.int64(3): np.float32(0.5)},
        allowed_token_ids=np.arange(2),
    )
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k) == (0.5, 0.25, 9, 3)
    assert (params.seed, params.stop_token_ids) == (2**64 - 1, (4,))
    values = (params.temperature, params.max_tokens, params.top_k, params.seed, params.stop_token_ids[0])
    assert [type(value) for value in values] == [float, int, int, int, int]
    ((token_id, bias),) = params.logit_bias.items()
    assert (token_id, bias, type(token_id), type(bias)) == (3, 0.5, int, float)
    assert [type(token_id) for token_id in params.allowed_token_ids] == [int, int]


def test_they_hold_no_list_of_the_caller():
    """One object serves thousands of rows; a change in the middle of a run would reach all of them."""
    stop, stop_token_ids, logit_bias, bad_word = ["a"], [1], {1: 2.0}, [5, 6]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, logit_bias=logit_bias, bad_words=[bad_word])
    stop.append("b")
    stop_token_ids.append(2)
    logit_bias[3] = 4.0
    bad_word.append(7)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert (params.logit_bias, params.bad_words) == ({1: 2.0}, ((5, 6),))


def test_they_can_be_compared_pickled_and_replaced():
    params = SamplingParams(temperature=0.3, stop=["x", "y"], stop_token_ids=[3], seed=1, logit_bias={3: 1})
    assert params == SamplingParams(temperature=0.3, stop=("x", "y"), stop_token_ids=(3,), seed=1, logit_bias={3: 1.0})
    assert params != dataclasses.replace(params, logit_bias={3: 2.0})
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=2) == SamplingParams(
        temperature=0.3, stop=["x", "y"], stop_token_ids=[3], seed=2, logit_bias={3: 1}
    )


def test_replace_checks_again():
    with pytest.raises(ValueError, match="max_tokens"):
        dataclasses.replace(SamplingParams(), max_tokens=0)


def test_too_many_edits_are_refused_with_what_to_do():
    """Each running sequence keeps as many on the device as the longest list has: one long list would take gigabytes."""
    SamplingParams(logit_bias=dict.fromkeys(range(4096), 1), bad_words=[[i] for i in range(4096)])
    with pytest.raises(ValueError, match=r"logit_bias holds 4097 ids.*allowed_token_ids"):
        SamplingParams(logit_bias=dict.fromkeys(range(4097), 1))
    with pytest.raises(ValueError, match=r"bad_words holds 4097 words.*allowed_token_ids"):
        SamplingParams(bad_words=[[i] for i in range(4097)])


def test_a_wrong_item_among_many_is_named_by_its_index():
    """The message once held all ten thousand of them."""
    with pytest.raises(TypeError, match=r"^sampling_params\[3\] must be a SamplingParams, not None$"):
        sampling_params.one_per_prompt([SamplingParams()] * 3 + [None] * 9997, 10_000)


def test_with_another_seed_it_is_as_if_made_with_it():
    params = SamplingParams(
        seed=7, stop=["a"], logit_bias={3: 1.0}, logprobs=2, n=4, structured_outputs={"regex": "a"}, bad_words=["x"]
    )
    assert with_seed(params, 3) == replace(params, seed=3) and params.seed == 7
    assert type(with_seed(params, 3)) is SamplingParams


def test_a_parameter_can_be_assigned_to_and_is_checked():
    params = SamplingParams(temperature=0.5)
    params.temperature, params.stop, params.max_tokens = 0, "x", None
    params.guided_decoding, params.best_of = {"choice": ["a"]}, 1  # vLLM's names
    assert (params.temperature, params.stop, params.max_tokens) == (0.0, ("x",), None)
    assert params.structured_outputs.choice == ("a",)
    params.top_p = None
    assert params.top_p == 1.0
    with pytest.raises(ValueError, match="top_p must be above 0"):
        params.top_p = 2
    with pytest.raises(AttributeError, match="unknown parameter 'max_new_tokens'; did you mean max_tokens"):
        params.max_new_tokens = 5
    with pytest.raises(ValueError, match="best_of cannot be 3"):
        params.best_of = 3
    assert params.top_p == 1.0


def test_parameters_may_contradict_each_other_until_they_are_used():
    """A script may assign to several in any order."""
    params = SamplingParams(n=4)
    params.temperature = 0
    with pytest.raises(ValueError, match="n=4 greedy completions"):
        params.check()
    with pytest.raises(ValueError, match=r"sampling_params\[1\]: n=4 greedy"):
        one_per_prompt([SamplingParams(), params], 2)
    with pytest.raises(ValueError, match="n=4 greedy"):
        one_per_prompt(params, 2)
    params.n = 1
    params.check()


def test_a_clone_has_values_of_its_own():
    params = SamplingParams(logit_bias={3: 1.0})
    clone = params.clone()
    clone.top_k = 5
    with pytest.raises(TypeError, match="logit_bias cannot be changed in place; assign a new dict"):
        clone.logit_bias[4] = 2.0
    clone.logit_bias = {4: 2.0}
    assert params == copy.deepcopy(params) == SamplingParams(logit_bias={3: 1.0})
