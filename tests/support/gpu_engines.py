"""Engines on a GPU: their memory, and a judge of tokens that differ."""

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from support.against_transformers import perturbed_scores


def skip_without(num_gpus: int) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")


DEVICE = "cuda"
MIB = 2**20
NUM_REQUESTS = 256
# Where two float32 scores are closer than this part of the largest, float32 does not say which is larger.
TIE = 1e-5


def generate(llm: LLM, prompts: list[list[int]], params) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def free_memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@dataclass
class Judge:
    """Decides whether two completions differ first where their candidates tie.

    model: transformers' model in float32, on the CPU; noise: the largest error of a logit of transformers in bfloat16.
    """

    model: Any
    noise: float

    def count_ties(
        self,
        requests: list[tuple[list[int], SamplingParams]],
        ours: list[list[int]],
        theirs: list[list[int]],
        what: str = "",
        is_float32: bool = True,
    ) -> int:
        """The number of rows that differ; each must first differ at a tie."""
        num_ties = 0
        for row, ((prompt, params), a, b) in enumerate(zip(requests, ours, theirs, strict=True)):
            if a == b:
                continue
            num_ties += 1
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            assert at is not None, f"{what}, row {row}: {a} and {b} differ only in length"
            scores = perturbed_scores(self.model, prompt, params, b[: at + 1])[at]
            gap = abs(float(scores[a[at]] - scores[b[at]]))
            temperature = params.temperature or 1.0
            allowed = TIE * float(scores.abs().max()) if is_float32 else 2 * self.noise / temperature
            assert gap < allowed, f"{what}, row {row}: {a} instead of {b}, {gap} apart at {at}, {allowed} allowed"
        return num_ties


def num_different(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(ours, theirs, strict=True))
