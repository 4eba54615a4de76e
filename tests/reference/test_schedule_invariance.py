"""A request gives the same tokens beside any other requests, in float32 on the CPU."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.against_transformers import perturbed_scores
from support.family_factory import FAMILIES, save_family_model
from support.long import some
from support.model_factory import TINY, save_model

from nanovllm import LLM, PoolingParams, SamplingParams
from nanovllm.runner import settings

# In a default run, and with --long.
NUM_REQUESTS = (40, 64)
MAX_TOKENS = 12
# Kinds of rows, used in turn: two that transformers' logits alone explain, and two whose tokens depend on earlier ones.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4},
    {"temperature": 0.9, "frequency_penalty": 0.5, "bad_words": [[3], [7, 9]], "logit_bias": {5: 2.0}, "top_p": 0.9},
)
NUM_PLAIN = 2
# Where two candidates are closer than this, float32 does not say which is larger.
TIE = 1e-5


@dataclass
class Schedule:
    """One way to run the requests: `rows` in this order, in generate calls of `call_size`, `num_times` times."""

    options: dict[str, Any]
    rows: list[int]
    call_size: int = max(NUM_REQUESTS)
    num_times: int = 1


@pytest.fixture(scope="module", params=["keys", "states"])
def model(request, tmp_path_factory):
    """Two models: all layers of the first have attention, and most layers of the second have recurrent states."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "keys":
        model = save_model(directory, seed=11, attention_bias=True)
    else:
        options = FAMILIES["qwen3_5"][2](random.Random(3))
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        options |= {"vocab_size": TINY["vocab_size"], "num_hidden_layers": 3, "layer_types": kinds}
        model = save_family_model(directory, "qwen3_5", options)
    model.directory, model.has_states = str(directory), request.param == "states"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_MIN_SAVED_TOKENS", {"cpu": 1})  # short prompts are worth a snapshot
        yield model


@pytest.fixture(scope="module")
def requests(request) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 60 tokens, most of them with a shared beginning, with each of KINDS in turn."""
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]

    beginnings = [tokens(length) for length in (0, 9, 16, 33)]
    return [
        (
            rng.choice(beginnings) + tokens(rng.randrange(1, 28)),
            SamplingParams(**KINDS[row % len(KINDS)], max_tokens=MAX_TOKENS, ignore_eos=True, seed=row),
        )
        for row in range(NUM_REQUESTS[request.config.option.long])
    ]


@pytest.fixture(scope="module")
def alone(model, requests) -> list[list[int]]:
    """Every request by itself: one sequence, no cache, no chunks, no overlap, the plainest attention."""
    options = {"attention_backend": "torch", "overlap": False, "enable_prefix_caching": False}
    with LLM(model.directory, device="cpu", **options) as llm:
        completions = [llm.generate([prompt], params, use_tqdm=False)[0].token_ids for prompt, params in requests]
    # Completions that repeat one token would hide most faults.
    assert sum(len(set(completion)) > 3 for completion in completions) > 0.8 * len(requests)
    return completions


def candidates_gap(model, prompt: list[int], params: SamplingParams, ours: list[int], theirs: list[int]) -> float:
    """The gap between the scores of the two candidates where two completions part."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    scores = perturbed_scores(model, prompt, params, theirs)[at]
    return abs(float(scores[ours[at]] - scores[theirs[at]]))


def schedules(num_requests: int) -> dict[str, Schedule]:
    everything = list(range(num_requests))
    shuffled = [random.Random(seed).sample(everything, num_requests) for seed in range(2)]
    half_running = {"kvcache_block_size": 4, "max_num_seqs": 13}
    found = {
        f"calls of {size}": Schedule({"kvcache_block_size": 4}, everything[: 10 * size], call_size=size)
        for size in (1, 2, 5, 8, 20, 33, 64)
    }
    found |= {f"{size} at a time": Schedule({"max_num_seqs": size}, everything) for size in (3, 12, 31)}
    found |= {f"shuffled {i}": Schedule(half_running, rows) for i, rows in enumerate(shuffled)}
    found |= {
        f"chunks of {size}": Schedule({"kvcache_block_size": 3, "max_num_batched_tokens": size}, shuffled[0])
        for size in (7, 17, 64)
    }
    found["chunks of 1"] = Schedule({"kvcache_block_size": 2, "max_num_batched_tokens": 1}, everything[:6])
    found["cache off"] = Schedule({"enable_prefix_caching": False, "kvcache_block_size": 4}, everything)
    found["cache warm"] = Schedule({"kvcache_block_size": 4}, shuffled[1], num_times=2)
    found["blocks of 1, warm"] = Schedule({"kvcache_block_size": 1}, everything, num_times=2)
    # The longest request takes 72 places, so that running requests are preempted again and again.
    found["tiny pool of large blocks"] = Schedule({"kvcache_block_size": 16, "num_kvcache_blocks": 7}, shuffled[1])
    found["tiny pool of blocks of 1"] = Schedule({"kvcache_block_size": 1, "num_kvcache_blocks": 90}, everything)
    found["tiny pool"] = Schedule({"kvcache_block_size": 2, "num_kvcache_blocks": 40}, shuffled[0])
    found["tiny pool, no cache, chunks"] = Schedule(
        {
            "kvcache_block_size": 4, "num_kvcache_blocks": 30, "enable_prefix_caching": False,
            "max_num_batched_tokens": 33,
        },
        everything,
    )  # fmt: skip
    return found


# The schedules that a default run takes with each engine: some of every kind, which together overfill the cache.
ENGINES = {
    ("sdpa", True): ("calls of 8", "shuffled 0", "cache off", "tiny pool", "tiny pool of large blocks"),
    ("sdpa", False): ("calls of 33", "chunks of 17", "blocks of 1, warm", "tiny pool, no cache, chunks"),
    ("torch", True): ("calls of 1", "12 at a time", "chunks of 1", "cache warm", "tiny pool of blocks of 1"),
}
# The same for a model with states.
WITH_STATES = {
    ("sdpa", True): ("calls of 8", "tiny pool"),
    ("sdpa", False): ("chunks of 17", "blocks of 1, warm"),
    ("torch", True): ("shuffled 0", "cache warm"),
}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_schedule_changes_no_token(model, requests, alone, engine, request):
    """Schedules vary batch sizes, order of arrival, chunks, cache (off, cold and warm), preemption and overlap. Rows
    are greedy and sampled, with penalties, bans and filters. Only a plain row whose candidates tie in float32 may
    differ, and hardly any do.

    In a default run, each engine takes some of the schedules."""
    backend, overlap = engine
    num_rows = num_ties = num_preemptions = num_cached_tokens = 0
    is_long, every = request.config.option.long, schedules(len(requests))
    for name in every if is_long else (WITH_STATES if model.has_states else ENGINES)[engine]:
        schedule = every[name]
        options = {"attention_backend": backend, "overlap": overlap, "device": "cpu", "cache_canary": True}
        options |= schedule.options
        with LLM(model.directory, **options) as llm:
            for first in [*range(0, len(schedule.rows), schedule.call_size)] * schedule.num_times:
                rows = schedule.rows[first : first + schedule.call_size]
                prompts, params = zip(*(requests[row] for row in rows), strict=True)
                outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
                num_rows += len(rows)
                for row, output in zip(rows, outputs, strict=True):
                    num_cached_tokens += output.num_cached_tokens
                    assert output.error is None, (name, output.error)
                    if output.token_ids != alone[row]:
                        assert row % len(KINDS) < NUM_PLAIN, f"{name}, row {row}: {output.token_ids}, {alone[row]}"
                        gap = candidates_gap(model, *requests[row], output.token_ids, alone[row])
                        assert gap < TIE, f"{name}, row {row}: {output.token_ids}, alone {alone[row]}, {gap} apart"
                        num_ties += 1
            num_preemptions += llm.metrics()["num_preemptions"]
            llm.engine.scheduler.check_integrity()
    print(f"{num_rows} rows, {num_ties} ties, {num_preemptions} preemptions, {num_cached_tokens} cached tokens")
    assert num_ties <= num_rows / 100
    if is_long or not model.has_states:
        assert num_preemptions > (50 if is_long else 5) and num_cached_tokens > (10000 if is_long else 1800)
    else:
        assert num_preemptions >= 5 * ("tiny pool" in WITH_STATES[engine]) and num_cached_tokens > 700


POOLED = (
    PoolingParams(), PoolingParams(pooling="mean", hidden_states_layers=[0, 1]), PoolingParams("token_embed"),
    PoolingParams("label", labels=((1, 2), (3,), (4, 5, 6))),
)  # fmt: skip


@pytest.fixture(scope="module")
def pooled(model, requests) -> list[tuple[list[int], PoolingParams, np.ndarray]]:
    """Each request's prompt, what it pools, and the result by itself."""
    rows = [(prompt, POOLED[row % len(POOLED)]) for row, (prompt, _) in enumerate(requests)]
    with LLM(model.directory, device="cpu", attention_backend="torch", enable_prefix_caching=False) as llm:
        return [(prompt, params, next(llm.generate_iter([prompt], params)).data) for prompt, params in rows]


@pytest.mark.parametrize("engine", some(ENGINES, ("sdpa", True), ("torch", True)), ids=str)
def test_nor_any_number_of_rows_that_pool(model, requests, pooled, engine, request):
    """They are computed between the rows that generate, and one call takes all rows of a schedule."""
    backend, overlap = engine
    every, chosen = schedules(len(requests)), (WITH_STATES if model.has_states else ENGINES)[engine]
    for name in every if request.config.option.long else chosen[-1:]:
        options = {"attention_backend": backend, "overlap": overlap, "device": "cpu", "cache_canary": True}
        options |= every[name].options
        rows = [pair for row in every[name].rows for pair in (requests[row], pooled[row][:2])]
        with LLM(model.directory, **options) as llm:
            outputs = [*llm.generate_iter(*map(iter, zip(*rows, strict=True)))]
            llm.engine.scheduler.check_integrity()
        for row, output in zip(every[name].rows, outputs[1::2], strict=True):
            alone = pooled[row][2]
            limit = 1e-5 * max(1, abs(alone).max())
            np.testing.assert_allclose(output.data, alone, rtol=0, atol=limit, err_msg=f"{name}, row {row}")


def test_every_token_is_the_best_of_its_perturbed_scores(model, requests, alone):
    """The tokens on which all schedules agree are right: the argmax of transformers' logits over the temperature plus
    noise.
    """
    plain = [row for row in range(len(requests)) if row % len(KINDS) < NUM_PLAIN]
    for (prompt, params), completion in ((requests[row], alone[row]) for row in plain):
        scores = perturbed_scores(model, prompt, params, completion)
        of_chosen = scores[range(len(completion)), completion]
        assert (scores.max(-1).values - of_chosen < TIE).all()
        # A wrong token must not pass for a tie.
        wrong = [(token + 1) % TINY["vocab_size"] for token in completion]
        assert candidates_gap(model, prompt, params, wrong, completion) > 10 * TIE
