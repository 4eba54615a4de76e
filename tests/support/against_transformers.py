"""Completions and logits beside those of transformers."""

import random
from dataclasses import dataclass, replace

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk
from support.batch_factory import make_batch
from support.model_factory import perturbed

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
    if getattr(model.config.get_text_config(), "sliding_window", None) == 1:
        options["use_cache"] = False  # with its cache, transformers does not apply such a window
    return model.generate(token_ids, attention_mask=mask, **options)[:, longest:].tolist()


@torch.inference_mode()
def logit_gap(model, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """The gap between the two candidates' logits where two completions part."""
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


def compare(
    model, directory, prompts, rng: random.Random, backend: str, overlap: bool, tally: Tally, n: int = 1, **more
) -> None:
    """Runs the prompts twice on one engine with a random schedule and checks every completion, `n` per prompt."""
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
    # Several greedy completions are refused, because they are equal. At this temperature, noise changes no token.
    temperature = 0 if n == 1 else 1e-7
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, n=n)
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
        assert len(output.outputs) == n
        for ours in (completion.token_ids for completion in output.outputs):
            if ours != theirs:
                gap = logit_gap(model, prompt, ours, theirs)
                assert gap < TIE, f"{ours} instead of {theirs}, logits {gap} apart, {options}, {model.config}"
                tally.num_ties += 1


@torch.inference_mode()
def teacher_forced_logits(llm: LLM, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Our logits [num_tokens, vocab_size] at every position, computed in `chunks` over pages in reverse order."""
    runner = llm.engine.runner
    seq = Sequence(0, token_ids, SamplingParams(temperature=0), len(token_ids) + 1)
    seq.block_table = list(range(-(-len(token_ids) // runner.info.kvcache_block_size)))[::-1]
    seq.entry, windows = 0, runner.info.windows
    num_blocks = len(seq.block_table)
    logits = []
    for num_new in chunks:
        seq.num_computed_tokens += num_new
        known = range(-(-seq.num_computed_tokens // runner.info.kvcache_block_size))
        seq.window_table = [tuple(block + num_blocks * (1 + i) for i in range(windows.num_groups)) for block in known]
        batch = make_batch(
            [Chunk(seq, num_new, False)],
            runner.info.kvcache_block_size,
            runner.settings.max_model_len,
            str(runner.settings.device),
            windows.num_groups,
        )
        plans = runner.program.backend.plans(batch.groups)
        groups = [replace(group, plan=plan) for group, plan in zip(batch.groups, plans, strict=True)]
        hidden_states = runner.program.model(batch.token_ids, batch.positions, runner.program.kv_cache.layers, groups)
        logits.append(runner.program.model.compute_logits(hidden_states))
    return torch.cat(logits)


@torch.inference_mode()
def perturbed_scores(model, prompt: list[int], params: SamplingParams, completion: list[int]) -> torch.Tensor:
    """The scores, by transformers' logits, of which each token of a completion was the largest: [len(completion),
    vocab_size].
    """
    scores = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    if params.temperature > 0:
        positions = torch.arange(len(completion)) + len(prompt)
        seeds = torch.full_like(positions, params.seed)
        scores = perturbed(scores, params.temperature, seeds, positions)
    return scores
