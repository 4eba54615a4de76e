"""Every family's tokens and logits are those of transformers, in float32 on the CPU."""

import random

import pytest
import torch
from family_factory import FAMILIES, save_family_model
from model_factory import one_thread  # noqa: F401
from test_against_transformers import Tally, compare, ragged_prompts, teacher_forced_logits

from nanovllm import LLM

NUM_CONFIGS = 60


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("backend", "overlap"), [("sdpa", True), ("sdpa", False), ("torch", True)])
def test_greedy_completions_are_those_of_transformers(tmp_path, family, backend, overlap, runs):
    """Through paging, chunks, prefix hits, preemption and overlap, with windows shorter and longer than all of them."""
    rng = random.Random(f"{family} {backend} {overlap}")
    tally = Tally()
    for index in range(NUM_CONFIGS // 3 * runs):
        options = FAMILIES[family][2](rng)
        directory = tmp_path / str(index)
        model = save_family_model(directory, family, options, seed=rng.randrange(10**6))
        compare(model, directory, ragged_prompts(rng, options["vocab_size"]), rng, backend, overlap, tally)
    print(tally)  # pytest -rP shows it
    assert tally.num_ties <= tally.num_rows / 100
    # The comparison proves something only if completions vary and the schedules were not trivial.
    assert tally.num_repeating < tally.num_rows / 3
    assert tally.num_cached_tokens > tally.num_rows
    assert tally.num_chunked_prompts > 5
    assert tally.num_preemptions > 10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["sdpa", "torch"])
def test_teacher_forced_logits_are_those_of_transformers(tmp_path, family, backend):
    """Tokens hide errors that are smaller than the gap between candidates; logits do not."""
    for seed in range(6):
        rng = random.Random(seed)
        options = FAMILIES[family][2](rng)
        directory = tmp_path / str(seed)
        model = save_family_model(directory, family, options, seed=seed)
        chunks = [33, 1, 1, 20, 1, 7, 1, 40, 1]
        token_ids = [rng.randrange(options["vocab_size"]) for _ in range(sum(chunks))]
        with LLM(str(directory), device="cpu", attention_backend=backend, kvcache_block_size=5) as llm:
            ours = teacher_forced_logits(llm, token_ids, chunks)
        with torch.inference_mode():
            theirs = model(torch.tensor([token_ids])).logits[0]
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error < 1e-4, (error, options)
