"""Two checkpoints of one config, and an LLM whose weights change from one to the other."""

from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.linear import Packable
from support.model_factory import save_model

OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 4, "num_kvcache_blocks": 40}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4] * 20, [5, 6] * 9, [7]]
HEAD, EMBEDDING, Q_PROJ = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
Weights = dict[str, torch.Tensor]


def make_llm(directory: Path, **options) -> LLM:
    return LLM(directory, **{**OPTIONS, **options})


def generate(llm: LLM) -> list[tuple[list[int], int]]:
    """Tokens of every prompt, and how many of the prompt's came from the cache."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, raise_on_error=True)
    return [(output.token_ids, output.num_cached_tokens) for output in outputs]


def values(llm: LLM) -> Weights:
    """Every weight of a single rank, with packed ones unpacked."""
    model = llm.engine.runner.program.model
    packed = {
        name: module.packed.to_dense()
        for name, module in model.named_modules()
        if isinstance(module, Packable) and module.packed is not None
    }
    return {**{name: parameter.clone() for name, parameter in model.named_parameters()}, **packed}


def of_fresh_llm(directory: Path, **options) -> tuple[list, Weights]:
    """Outputs and weights of an LLM that was loaded from the directory."""
    with make_llm(directory, **options) as llm:
        return generate(llm), values(llm)


def save_checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """Two checkpoints of one config, so small that two ranks divide it."""
    directories = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for seed, directory in enumerate(directories):
        save_model(directory, seed, attention_bias=True)
    return directories


def outputs_of(checkpoints: tuple[Path, Path]) -> list[list[tuple[list[int], int]]]:
    """The outputs of an LLM of each checkpoint, with an empty cache."""
    found = [of_fresh_llm(directory)[0] for directory in checkpoints]
    assert found[0] != found[1]
    return found
