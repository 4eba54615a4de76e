"""An LLM on a GPU whose weights are updated."""

import random
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "vocab_size": 512}


def make_llm(directory: Path, **options) -> LLM:
    defaults = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "gpu_memory_utilization": 0.5}
    return LLM(directory, **{**defaults, **options})


def generate(llm: LLM) -> list[tuple[list[int], int]]:
    """Greedy and sampled rows, with filters and penalties, behind shared prefixes."""
    rng = random.Random(0)
    prefix = [rng.randrange(512) for _ in range(200)]
    prompts = [prefix[: row % 3 * 100] + [rng.randrange(512) for _ in range(1 + row)] for row in range(64)]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.8}, {"repetition_penalty": 1.2}]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=row, **kinds[row % 4]) for row in range(64)]
    outputs = llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)
    return [(output.token_ids, output.num_cached_tokens) for output in outputs]
