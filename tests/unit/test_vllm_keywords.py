"""vLLM's keywords: accepted, renamed, or refused with the reason."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from nanovllm import LLM, Config, SamplingParams
from nanovllm.accepted import ACCEPTED_OPTIONS, ACCEPTED_PARAMETERS, RENAMED_OPTIONS
from nanovllm.checks import suggests_names
from nanovllm.demo import MODEL_DIRECTORY

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SMALL = {"device": "cpu", "max_model_len": 128}
ANY = [name for name, option in ACCEPTED_OPTIONS.items() if option.values is None]
SOME = [name for name, option in ACCEPTED_OPTIONS.items() if option.values is not None]


@suggests_names("option", {}, ACCEPTED_OPTIONS, RENAMED_OPTIONS)
class Options:
    """Takes keywords as LLM does, without a model."""

    def __init__(self, *, kvcache_block_size: int | None = None, seed: int = 0, dtype: "str | None" = "auto"):
        self.taken = {"kvcache_block_size": kvcache_block_size, "seed": seed, "dtype": dtype}


def test_options_that_change_nothing_are_accepted_with_one_line(caplog):
    """`trust_remote_code=True` alone once stopped half of the scripts written for vLLM."""
    with LLM(MODEL_DIRECTORY, **SMALL) as llm:
        (expected,) = llm.generate("Q: What is 2 + 3?\nA:", GREEDY, use_tqdm=False)
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        options = {**dict.fromkeys(ANY, 4), **{name: ACCEPTED_OPTIONS[name].values[-1] for name in SOME}}
        with LLM(MODEL_DIRECTORY, **SMALL, **options) as llm:
            (output,) = llm.generate("Q: What is 2 + 3?\nA:", GREEDY, use_tqdm=False)
    assert output.token_ids == expected.token_ids
    (record,) = caplog.records
    assert all(f"{name} ({ACCEPTED_OPTIONS[name].reason})" in record.getMessage() for name in ANY)
    assert not any(name in re.sub(r"\(.*?\)", "", record.getMessage()) for name in SOME)


@pytest.mark.parametrize("name", SOME)
def test_an_option_that_asks_for_more_is_refused_with_what_to_do(name):
    option = ACCEPTED_OPTIONS[name]
    for value in option.values:
        Options(**{name: value})
    for value in ("something else", -1, np.ones(3)):
        with pytest.raises(ValueError, match=f"^{name} cannot be .*{re.escape(option.reason)}$"):
            Options(**{name: value})


@pytest.mark.parametrize("name", ACCEPTED_PARAMETERS)
def test_a_sampling_parameter_that_asks_for_more_is_refused_with_what_to_do(name, caplog):
    parameter = ACCEPTED_PARAMETERS[name]
    for value in parameter.values or (None, 1):
        assert SamplingParams(temperature=0.5, **{name: value}) == SamplingParams(temperature=0.5)
    assert len(caplog.records) == (parameter.values is None)
    if parameter.values is not None:
        with pytest.raises(ValueError, match=f"^{name} cannot be 7; {re.escape(parameter.reason)}$"):
            SamplingParams(**{name: 7})


def test_vllms_names_of_our_options_are_heeded():
    with LLM(MODEL_DIRECTORY, **SMALL, block_size=16, num_gpu_blocks_override=20) as llm:
        assert (llm.engine.info.kvcache_block_size, llm.engine.info.num_kvcache_blocks) == (16, 20)
    assert Options(block_size=16).taken["kvcache_block_size"] == 16
    with pytest.raises(TypeError, match=r"block_size is vLLM's name of kvcache_block_size; give one of them"):
        Options(block_size=16, kvcache_block_size=16)


def test_none_means_the_default():
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "min_tokens",
        "stop",
        "seed",
        "n",
        "repetition_penalty",
        "ignore_eos",
    )
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(max_tokens=None).max_tokens is None, "None means something here"
    assert Config("m", dtype=None, seed=None, enforce_eager=None) == Config("m")
    assert Options(seed=None, dtype=None).taken == {"kvcache_block_size": None, "seed": 0, "dtype": None}


def test_minus_one_is_no_seed():
    assert SamplingParams(seed=-1) == SamplingParams() and Config("m", seed=-1) == Config("m")


def test_no_accepted_name_is_ours():
    ours = {*Config.__dataclass_fields__}
    assert not ours & {*ACCEPTED_OPTIONS, *RENAMED_OPTIONS} and ours >= {*RENAMED_OPTIONS.values()}
    assert not ACCEPTED_PARAMETERS.keys() & {*SamplingParams.__slots__}


def test_the_page_names_each_keyword_with_its_reason():
    page = (Path(__file__).parents[2] / "docs/vllm.md").read_text(encoding="utf-8")
    for name, accepted in {**ACCEPTED_OPTIONS, **ACCEPTED_PARAMETERS}.items():
        assert any(f"`{name}`" in line and accepted.reason in line for line in page.splitlines()), name
    assert all(f"`{theirs}` | `{ours}`" in page for theirs, ours in RENAMED_OPTIONS.items())
