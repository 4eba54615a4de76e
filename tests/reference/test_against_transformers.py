"""The engine's tokens and logits are those of transformers, in float32 on the CPU."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from support.batch_factory import make_batch
from support.model_factory import edit_config, make_model, one_thread, random_model_options, save_model  # noqa: F401

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk

NUM_CONFIGS = 220
# Where two logits are closer than this, float32 does not say which is larger.
TIE = 1e-5


def ragged_prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Eight prompts of 1 to 40 tokens; most continue one of two common beginnings."""
    beginnings = [[rng.randrange(vocab_size) for _ in range(length)] for length in (rng.randrange(5, 25), 0, 12)]
    return [rng.choice(beginnings) + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 16))] for _ in range(8)]


@torch.inference_mode()
def reference_completions(model, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """transformers' greedy `generate`, left-padded."""
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
    if getattr(model.config, "sliding_window", None) == 1:
        options["use_cache"] = False  # with its cache, transformers forgets that such a window ends
    return model.generate(token_ids, attention_mask=mask, **options)[:, longest:].tolist()


@torch.inference_mode()
def logit_gap(model, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """How far apart the two candidates' logits lie where two completions part."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    logits = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
    return abs(float(logits[ours[at]] - logits[theirs[at]]))


@dataclass
class Tally:
    num_rows: int = 0
    num_ties: int = 0
    num_repeating: int = 0
    num_cached_tokens: int = 0
    num_chunked_prompts: int = 0
    num_preemptions: int = 0


def compare(model, directory, prompts, rng: random.Random, backend: str, overlap: bool, tally: Tally, **more) -> None:
    """Runs the prompts twice on one engine with a random schedule and checks every completion."""
    block_size = rng.choice((1, 2, 3, 4, 5, 7, 16))
    budget = rng.randrange(7, 40)
    max_tokens = rng.randrange(8, 13)
    longest = -(-(max(map(len, prompts)) + max_tokens) // block_size)
    options = {
        "device": "cpu",
        "attention_backend": backend,
        "overlap": overlap,
        "kvcache_block_size": block_size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice((2, 3, 8)),
        "num_kvcache_blocks": longest * rng.choice((1, 1, 2, 3, 8)),
        **more,
    }
    expected = reference_completions(model, prompts, max_tokens)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(str(directory), **options) as llm:
        outputs = llm.generate(prompts[:3], params, use_tqdm=False)
        outputs += llm.generate(prompts, params, use_tqdm=False)
        tally.num_preemptions += llm.metrics()["num_preemptions"]
    rows = zip(prompts[:3] + prompts, outputs, expected[:3] + expected, strict=True)
    for prompt, output, theirs in rows:
        assert output.error is None
        tally.num_rows += 1
        tally.num_cached_tokens += output.num_cached_tokens
        tally.num_chunked_prompts += len(prompt) - output.num_cached_tokens > budget
        tally.num_repeating += len(set(theirs)) <= 2
        if output.token_ids != theirs:
            gap = logit_gap(model, prompt, output.token_ids, theirs)
            assert gap < TIE, f"{output.token_ids} instead of {theirs}, logits {gap} apart, {options}, {model.config}"
            tally.num_ties += 1


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_completions_are_those_of_transformers(tmp_path, backend, overlap):
    """Paging, chunks, prefix hits, preemption and overlap are invisible in the tokens, whatever the model's shape."""
    rng = random.Random(f"{backend} {overlap}")
    tally = Tally()
    for index in range(NUM_CONFIGS // 4):
        options = random_model_options(rng)
        directory = tmp_path / str(index)
        model = save_model(directory, seed=rng.randrange(10**6), **options)
        compare(model, directory, ragged_prompts(rng, options["vocab_size"]), rng, backend, overlap, tally)
    print(tally)  # pytest -rP shows it
    assert tally.num_ties <= tally.num_rows / 100
    # The comparison proves something only if completions vary and the schedules were not trivial.
    assert tally.num_repeating < tally.num_rows / 6
    assert tally.num_cached_tokens > tally.num_rows
    assert tally.num_chunked_prompts > 20
    assert tally.num_preemptions > 40


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
    """transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters; a reader of one of them falls
    back to a default theta for the other and answers nonsense."""
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


@torch.inference_mode()
def teacher_forced_logits(llm: LLM, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Our logits [num_tokens, vocab_size] at every position, computed in `chunks` over pages in reverse order."""
    runner = llm.engine.runner
    seq = Sequence(0, token_ids, SamplingParams(temperature=0), len(token_ids) + 1)
    seq.block_table = list(range(-(-len(token_ids) // runner.info.kvcache_block_size)))[::-1]
    seq.entry = 0
    logits = []
    for num_new in chunks:
        seq.num_computed_tokens += num_new
        batch = make_batch(
            [Chunk(seq, num_new, False)],
            runner.info.kvcache_block_size,
            runner.settings.max_model_len,
            str(runner.settings.device),
        )
        metadata = replace(batch.metadata, plan=runner.program.backend.plan(batch.metadata))
        hidden_states = runner.program.model(batch.token_ids, batch.positions, runner.program.kv_cache.layers, metadata)
        logits.append(runner.program.model.compute_logits(hidden_states))
    return torch.cat(logits)


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("seed", range(4))
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
