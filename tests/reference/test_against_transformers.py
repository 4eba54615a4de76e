"""The engine's tokens and logits are those of transformers, in float32 on the CPU."""

import random

import pytest
import torch
from support.against_transformers import (
    Tally,
    compare,
    ragged_prompts,
    teacher_forced_logits,
)
from support.long import some
from support.model_factory import edit_config, make_model, random_model_options, save_model

from nanovllm import LLM


@pytest.mark.grid(1)
@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_completions_are_those_of_transformers(tmp_path, backend, overlap, count):
    """Paging, chunks, prefix hits, preemption and overlap do not change the tokens, for any shape of the model."""
    rng = random.Random(f"{backend} {overlap}")
    tally = Tally()
    for index in range(count(8, 55)):
        options = random_model_options(rng)
        directory = tmp_path / str(index)
        model = save_model(directory, seed=rng.randrange(10**6), **options)
        compare(model, directory, ragged_prompts(rng, options["vocab_size"]), rng, backend, overlap, tally)
    print(tally)  # pytest -rP shows it
    assert tally.num_ties <= tally.num_rows / 100
    # The comparison proves something only if completions vary and the schedules were not trivial.
    assert tally.num_repeating < tally.num_rows / 6
    assert tally.num_cached_tokens > tally.num_rows
    assert tally.num_chunked_prompts > count(2, 20)
    assert tally.num_preemptions > count(1, 40)


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_with_everything": {
        "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.9, "mscale_all_dim": 0.7,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 256,
        "attention_factor": 1.3,
    },
    "default": {"rope_type": "default", "rope_theta": 1234.5},
}  # fmt: skip


@pytest.mark.parametrize("layout", [4, 5])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_scaled_rope_is_that_of_transformers_in_both_layouts(tmp_path, rope, layout):
    """transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters; a reader of only one of them would
    use a default theta for the other and answer nonsense.
    """
    rng = random.Random(str(rope))
    model = save_model(tmp_path, seed=5, rope=rope, num_hidden_layers=2)
    if layout == 5:
        edit_config(tmp_path, remove=("rope_theta", "rope_scaling"), rope_parameters=rope)
    else:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        scaling["type"] = scaling.pop("rope_type")  # the oldest name
        changes = {} if scaling["type"] == "default" else {"rope_scaling": scaling}
        edit_config(tmp_path, remove=("rope_parameters",), rope_theta=rope["rope_theta"], **changes)
    tally = Tally()
    prompts = [[rng.randrange(61) for _ in range(length)] for length in (300, 70, 9)]
    compare(model, tmp_path, prompts, rng, "sdpa", True, tally)
    assert tally.num_ties == 0


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("seed", some(range(4), 0))
def test_teacher_forced_logits_are_those_of_transformers(tmp_path, backend, seed):
    """Tokens hide errors that are smaller than the gap between candidates; logits do not."""
    rng = random.Random(seed)
    options = random_model_options(rng)
    model = save_model(tmp_path, seed=seed, **options)
    chunks = [33, 1, 1, 20, 1, 7, 1]
    token_ids = [rng.randrange(options["vocab_size"]) for _ in range(sum(chunks))]
    with LLM(str(tmp_path), device="cpu", attention_backend=backend, kvcache_block_size=5) as llm:
        ours = teacher_forced_logits(llm, token_ids, chunks)
    with torch.inference_mode():
        theirs = model(torch.tensor([token_ids])).logits[0]
    assert ours.shape == theirs.shape
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < 1e-4, error


def test_a_bfloat16_checkpoint_runs_in_float32_on_a_cpu(tmp_path):
    """Weights widen exactly, so completions are those of transformers with the same weights in float32."""
    rng = random.Random(0)
    model = make_model(3).bfloat16()
    model.save_pretrained(tmp_path)
    tally = Tally()
    compare(model.float(), tmp_path, ragged_prompts(rng, 61), rng, "sdpa", True, tally)
    assert tally.num_ties == 0
