"""Fixtures that several modules of tests on a GPU share."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.demo_problems import CONVERSATIONS
from support.gpu_engines import NUM_REQUESTS
from support.gpu_weights import SIZES
from support.model_factory import save_model

from nanovllm import SamplingParams
from nanovllm.demo import MODEL_DIRECTORY


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts in pairs: a whole problem, whose answer the model is sure of, and a cut one, which makes it guess."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    texts = tokenizer.apply_chat_template(CONVERSATIONS[:NUM_REQUESTS], tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rng = random.Random(0)
    return [ids if row % 2 == 0 else ids[: rng.randrange(8, len(ids))] for row, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    """Two of four rows are greedy and two at 0.8; rows that guess go on for 20 tokens or for 64."""
    return [
        SamplingParams(
            temperature=0.8 if row % 4 >= 2 else 0.0,
            max_tokens=48 if row % 2 == 0 else 64 if row % 8 < 4 else 20,
            ignore_eos=row % 2 == 1,
            seed=row,
        )
        for row in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def dummy_directory(tmp_path_factory) -> str:
    """A config.json of Qwen3-0.6B's numbers, but untied: 112 KiB of cache per token, enough to fill any card."""
    directory = tmp_path_factory.mktemp("dummy")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "eos_token_id": 151645,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    directories = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for seed, directory in enumerate(directories):
        save_model(directory, seed, head_dim=64, num_hidden_layers=4, **SIZES)
    return directories


@pytest.fixture(params=[1, 5, 132])
def num_programs(request, monkeypatch) -> Iterator[int]:
    """With one program, items come one after another. The test must have used the kernel."""
    from nanovllm.attention import hopper_prompts
    from nanovllm.ops import hopper_product

    asked = []
    for kernels in (hopper_prompts, hopper_product):
        monkeypatch.setattr(kernels, "num_processors", lambda device: asked.append(device) or request.param)
    yield request.param
    assert asked
