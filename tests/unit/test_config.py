"""Config: accepted values and their results. test_bad_input.py has the refused ones."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.config import MEANT_OPTIONS, Config
from nanovllm.demo import MODEL_DIRECTORY


def test_the_defaults_are_the_documented_ones():
    assert dataclasses.asdict(Config("m")) == {
        "model": "m",
        "tokenizer": None,
        "revision": None,
        "dtype": "auto",
        "device": "auto",
        "attention_backend": "auto",
        "load_format": "auto",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "max_model_len": None,
        "max_num_batched_tokens": 16896,
        "max_num_seqs": None,
        "gpu_memory_utilization": 0.9,
        "kvcache_block_size": None,
        "num_kvcache_blocks": None,
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "overlap": True,
        "enable_prefix_caching": True,
        "prefix_grouping": True,
        "runner": "auto",
        "pooler_config": None,
        "hf_overrides": None,
        "generation_config": "auto",
        "queue_calls": False,
        "deterministic": False,
        "enable_lora": False,
        "max_loras": 8,
        "max_lora_rank": 16,
        "cache_canary": False,
        "seed": 0,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"device": "cpu"},
        {"device": "cuda"},
        {"device": "cuda:13"},
        {"attention_backend": "torch"},
        {"load_format": "dummy"},
        {"max_model_len": 2},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},
        {"gpu_memory_utilization": 1},
        {"gpu_memory_utilization": 0.01},
        {"kvcache_block_size": 1},
        {"num_kvcache_blocks": 1},
        {"seed": 2**64 - 1},
        {"revision": "main"},
    ],
    ids=str,
)
def test_the_ends_of_every_range_belong_to_it(values):
    config = Config("m", **values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("float32", "float", "fp32", "torch.float32", torch.float32, torch.float), "float32"),
        (("float16", "half", "fp16", "torch.half", torch.float16, torch.half), "float16"),
        (("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16), "bfloat16"),
    ],
)
def test_a_dtype_has_the_names_that_people_give_it(names, dtype):
    """ "half" and "bf16", which vLLM and transformers' scripts say, were refused."""
    assert {Config("m", dtype=name).dtype for name in names} == {dtype}


def test_the_options_of_llm_are_those_of_config_with_types_and_defaults():
    """They were once `**options`, without completion, help() or a type check."""
    ours = dict(inspect.signature(LLM).parameters)
    theirs = inspect.signature(Config).parameters
    assert list(ours) == list(theirs) == [field.name for field in dataclasses.fields(Config)]
    for name, parameter in ours.items():
        assert parameter.default == theirs[name].default, name
        assert parameter.kind is (parameter.POSITIONAL_OR_KEYWORD if name == "model" else parameter.KEYWORD_ONLY)
    # These accept more types than Config holds in the end.
    for name in set(ours) - {"model", "tokenizer", "dtype", "device"}:
        assert ours[name].annotation == theirs[name].annotation, name
    assert all(parameter.annotation is not parameter.empty for parameter in ours.values())


def test_what_unknown_options_are_told_are_options_that_exist():
    names = {field.name for field in dataclasses.fields(Config)}
    assert not names & set(MEANT_OPTIONS), "a name of ours is in no need of a hint"
    assert all(ours in names or " " in ours for ours in MEANT_OPTIONS.values())


def test_config_is_public():
    assert nanovllm.Config is Config and "Config" in nanovllm.__all__


def test_torch_values_and_paths_may_stand_for_their_names():
    config = Config(Path("some") / "where", dtype=torch.bfloat16, device=torch.device("cuda", 1))
    assert (config.model, config.dtype, config.device) == (str(Path("some/where")), "bfloat16", "cuda:1")


def test_numpy_integers_become_plain_ones():
    """seed=np.int64(3) once passed here and overflowed when the first request mixed it with its number."""
    config = Config("m", max_num_seqs=np.int32(4), num_kvcache_blocks=np.int64(9), seed=np.int64(3))
    assert (config.max_num_seqs, config.num_kvcache_blocks, config.seed) == (4, 9, 3)
    assert type(config.max_num_seqs) is type(config.num_kvcache_blocks) is type(config.seed) is int


def test_a_numpy_seed_samples_as_the_plain_one():
    texts = []
    for seed in (np.int64(3), 3):
        with LLM(MODEL_DIRECTORY, device="cpu", seed=seed, num_kvcache_blocks=16) as llm:
            texts.append(llm.generate("Once", SamplingParams(max_tokens=12), use_tqdm=False)[0].text)
    assert texts[0] == texts[1]


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config("m").max_model_len = 5


def test_start_up_writes_nothing_back():
    """The engine keeps the block count and lengths that it found at start-up; the config keeps the given options."""
    with LLM(MODEL_DIRECTORY, device="cpu", max_num_seqs=2) as llm:
        assert llm.engine.config == Config(str(MODEL_DIRECTORY), device="cpu", max_num_seqs=2)
        assert llm.engine.config.num_kvcache_blocks is None
        assert llm.engine.info.num_kvcache_blocks > 0


def test_wrong_options_are_refused_without_torch():
    """A misspelt option must not cost the seconds that importing torch and transformers takes."""
    program = (
        "import sys, nanovllm\n"
        "try:\n"
        "    nanovllm.LLM('m', max_seq_len=1)\n"
        "except TypeError as error:\n"
        "    print(error)\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))\n"
    )
    lines = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert lines.splitlines() == ["unknown option 'max_seq_len'; did you mean max_model_len?", "[]"]


def test_pooler_config_sets_how_embeddings_are_made():
    """It is vLLM's PoolerConfig, or a dict of its fields."""
    expected = {"pooling": "mean", "normalize": False}
    given = {"seq_pooling_type": "MEAN", "use_activation": False, "dimensions": None}
    assert Config("m", pooler_config=given).pooler_config == expected
    config = Config("m", pooler_config=SimpleNamespace(**given))
    assert config.pooler_config == dataclasses.replace(config, seed=1).pooler_config == expected


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("MEAN", TypeError, "pooler_config must be a dict such as"),
        ({"pooling_type": "ALL"}, ValueError, "pooling must be one of"),
        ({"normalize": 1}, TypeError, "normalize must be True or False"),
        ({"dimensions": 8}, ValueError, "takes pooling_type and normalize, as vLLM names them, not 'dimensions'"),
    ],
)
def test_another_pooler_config_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        Config("m", pooler_config=given)


def test_hf_overrides_are_those_of_qwen3_reranker_alone():
    """They keep the LM head, whatever the runner."""
    given = {
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }  # fmt: skip
    assert Config("m", hf_overrides=given, runner="pooling").runner == "auto"
    assert Config("m", hf_overrides={}, runner="pooling").runner == "pooling"
    assert Config("m", hf_overrides={"is_matryoshka": True}, runner="pooling").runner == "pooling"
    for wrong in (given | {"classifier_from_token": ["false", "true"]}, {"rope_theta": 1}, str):
        with pytest.raises(ValueError, match=r"hf_overrides cannot be .*; edit config.json in a copy"):
            Config("m", hf_overrides=wrong)
