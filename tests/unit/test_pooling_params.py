"""PoolingParams: what each task takes, wrong values, and the forms in which they may be given."""

import logging
import pickle
from dataclasses import replace

import numpy as np
import pytest

from nanovllm import PoolingParams
from nanovllm.pooling_params import TASKS, pooling_params

LABELS = ("yes", "no")
OF_TASK = {"label": {"labels": LABELS}}  # what a task cannot do without
VALUES = {
    "pooling": "mean", "dimensions": 4, "hidden_states_layers": [1], "truncate_prompt_tokens": 3, "labels": LABELS,
    "recipe": "qwen3-reranker", "instruction": "Judge", "normalize": False,
}  # fmt: skip
TAKEN = {
    "embed": {"pooling", "normalize", "dimensions", "hidden_states_layers", "truncate_prompt_tokens"},
    "token_embed": {"normalize", "hidden_states_layers", "truncate_prompt_tokens"},
    "classify": {"normalize", "truncate_prompt_tokens"},
    "reward": {"normalize", "truncate_prompt_tokens"},
    "score": {"pooling", "normalize", "dimensions", "truncate_prompt_tokens", "recipe", "instruction"},
    "label": {"labels"},
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("task", TASKS)
def test_a_parameter_that_the_task_does_not_take_is_refused(task, name):
    """It once was dropped in silence for `normalize` of a label."""
    given = {**OF_TASK.get(task, {}), name: VALUES[name]}
    if name == "instruction":
        given["recipe"] = "qwen3-reranker"
    if name in TAKEN[task]:
        assert getattr(PoolingParams(task, **given), name) in (VALUES[name], (1,))
    else:
        with pytest.raises(ValueError, match=f"is a parameter of .*, not of '{task}'"):
            PoolingParams(task, **given)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"task": "rank"}, ValueError, "task must be one of .*'embed'.*'label', not 'rank'"),
        ({"task": ["embed"]}, ValueError, "task must be one of"),
        ({"pooling": "max"}, ValueError, "pooling must be one of .*'last', 'mean', 'cls', not 'max'"),
        ({"recipe": "bge"}, ValueError, "recipe must be one of .*'qwen3-reranker', not 'bge'"),
        ({"normalize": 1}, TypeError, "normalize"),
        ({"normalize": "no"}, TypeError, "normalize"),
        ({"dimensions": 0}, ValueError, "dimensions"),
        ({"dimensions": 1.5}, TypeError, "dimensions"),
        ({"dimensions": True}, TypeError, "dimensions"),
        ({"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, ValueError, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, TypeError, "truncate_prompt_tokens"),
        ({"hidden_states_layers": 1}, TypeError, "hidden_states_layers must be a list"),
        ({"hidden_states_layers": "12"}, TypeError, "hidden_states_layers must be a list"),
        ({"hidden_states_layers": [1.5]}, TypeError, "hidden_states_layers"),
        ({"hidden_states_layers": [1, 2, 1]}, ValueError, r"names a layer twice: \[1, 2, 1\]"),
        ({"task": "label"}, ValueError, "labels must be at least two different ones"),
        ({"task": "label", "labels": ["yes"]}, ValueError, "at least two"),
        ({"task": "label", "labels": ["yes", "yes"]}, ValueError, "different"),
        ({"task": "label", "labels": ["yes", ""]}, ValueError, "none of them empty"),
        ({"task": "label", "labels": ["yes", []]}, ValueError, "none of them empty"),
        ({"task": "label", "labels": "yes"}, TypeError, "labels must be a list"),
        ({"task": "label", "labels": {"yes": 1, "no": 0}}, TypeError, "labels must be a list"),
        ({"labels": 5}, TypeError, "labels must be a list"),
        ({"labels": iter(["yes", "no"])}, TypeError, "labels must be a list"),
        ({"task": "label", "labels": ["yes", 5]}, TypeError, "a label must be a string or a list of token ids, not 5"),
        ({"task": "label", "labels": ["yes", ["no"]]}, TypeError, "a label's token id"),
        ({"task": "score", "instruction": 5, "recipe": "qwen3-reranker"}, TypeError, "instruction must be a string"),
        ({"task": "score", "instruction": "Judge"}, ValueError, "instruction needs a recipe"),
        ({"layers": [1]}, TypeError, "hidden_states_layers"),
        ({"dimension": 4}, TypeError, "dimensions"),
        ({"temperature": 1}, TypeError, "temperature"),
        ({"step_tag_id": 4}, ValueError, "step_tag_id"),
    ],
)
def test_a_wrong_value_is_named_with_the_fix(given, error, words):
    with pytest.raises(error, match=words):
        PoolingParams(**given)


def test_values_are_kept_in_one_form():
    """So equal parameters are equal values, which rows are grouped by."""
    one = PoolingParams("label", labels=np.array(["yes", "no"]))
    assert one == PoolingParams("label", labels=["yes", "no"]) and one.labels == ("yes", "no")
    ids = PoolingParams("label", labels=[[1, 2], np.array([3]), "x"])
    assert ids.labels == ((1, 2), (3,), "x") and hash(ids) == hash(pickle.loads(pickle.dumps(ids)))
    params = PoolingParams(dimensions=np.int64(4), hidden_states_layers=range(2), truncate_prompt_tokens=-1)
    assert params == replace(params) == params.clone()
    assert (params.dimensions, params.hidden_states_layers) == (4, (0, 1)) and type(params.dimensions) is int


def test_vllms_names_mean_ours(caplog):
    for name in ("use_activation", "activation", "softmax"):
        assert PoolingParams("classify", **{name: False}) == PoolingParams("classify", normalize=False)
    assert PoolingParams(pooling_type="mean", step_tag_id=None) == PoolingParams(pooling="mean")
    with caplog.at_level(logging.INFO):
        assert PoolingParams(requires_token_ids=True, output_kind=2) == PoolingParams()
    with pytest.raises(TypeError, match="normalize is given twice"):
        PoolingParams("classify", use_activation=True, normalize=False)


@pytest.mark.parametrize("given", [None, {"dimensions": 3}, PoolingParams(dimensions=3), [{"dimensions": 3}, None]])
def test_a_dict_a_list_or_none_may_be_given(given):
    found = pooling_params(given, "embed", 2, pooling="mean", normalize=None)
    first = None if given is None else 3
    second = None if isinstance(given, list) else first
    assert [each.dimensions for each in found] == [first, second]
    assert {(each.task, each.pooling) for each in found} == {("embed", "mean")}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([None], ValueError, "1 pooling_params for 2 prompts"),
        (5, TypeError, "pooling_params must be PoolingParams or a dict of parameters, not int"),
        ([None, "mean"], TypeError, "pooling_params must be"),
        ({"dim": 3}, TypeError, "dimensions"),
        (PoolingParams("classify"), ValueError, "are for the task 'classify', and this call is for 'embed'"),
        (PoolingParams(labels=LABELS), ValueError, "labels is a parameter of 'label', not of 'embed'"),
    ],
)
def test_other_things_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        pooling_params(given, "embed", 2)
