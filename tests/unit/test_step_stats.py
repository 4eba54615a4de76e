"""An engine's counts of its steps: tokens and seconds by phase, attributed in the same way."""

import random

import pytest
from support.fake_runner import make_engine, run_to_end

from nanovllm import SamplingParams
from nanovllm.engine import step_stats
from nanovllm.engine.llm_engine import LLMEngine


class Clock:
    """A clock that only a step's phases advance, by the seconds that they take."""

    def __init__(self, monkeypatch):
        self.now = 50.0
        for module in (step_stats, __import__("nanovllm.engine.llm_engine", fromlist=["time"])):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def during(self, owner: object, name: str, seconds: float, monkeypatch) -> None:
        """Makes `owner.name(...)` take this many seconds."""
        real = getattr(owner, name)

        def slow(*arguments):
            self.now += seconds
            return real(*arguments)

        monkeypatch.setattr(owner, name, slow)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def slow_engine(clock: Clock, monkeypatch, launch: float, wait: float, **options) -> LLMEngine:
    engine = make_engine(**{"max_num_seqs": 16, **options})
    clock.during(engine.runner, "launch", launch, monkeypatch)
    real = engine.runner.launch

    def launch_slowly(step):
        launched = real(step)
        clock.during(launched, "wait", wait, monkeypatch)
        return launched

    monkeypatch.setattr(engine.runner, "launch", launch_slowly)
    return engine


def add(engine: LLMEngine, prompt, max_tokens: int) -> int:
    return engine.add_request(list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_seconds_go_to_the_phases_as_the_steps_tokens_do(clock, monkeypatch, overlap):
    """A mixed step's seconds once all counted for prefill, and its decode tokens for decode: trillions of tokens per
    second.
    """
    engine = slow_engine(clock, monkeypatch, launch=1.0, wait=3.0, overlap=overlap, max_num_batched_tokens=10)
    add(engine, range(4), max_tokens=3)
    while not engine.metrics()["num_decode_tokens"]:
        engine.step()
    assert (engine.metrics()["prefill_seconds"], engine.metrics()["num_steps"]) == (4.0, 2)
    add(engine, range(100, 109), max_tokens=1)  # nine prompt tokens ride along with the last decode
    run_to_end(engine)
    metrics = engine.metrics()
    assert (metrics["num_prefill_tokens"], metrics["num_decode_tokens"], metrics["num_steps"]) == (13, 2, 3)
    # Each of the three steps takes four seconds: all prefill, all decode, and a tenth of the last decode.
    assert metrics["prefill_seconds"] == pytest.approx(4.0 + 3.6)
    assert metrics["decode_seconds"] == pytest.approx(4.0 + 0.4)


def test_no_phase_has_tokens_without_seconds_or_seconds_without_tokens(clock, monkeypatch):
    """Many short prompts are decoded in mixed steps only. Speeds of both phases must still be a machine's."""
    rng = random.Random(4)
    seen_both = 0
    for _ in range(30):
        engine = slow_engine(
            clock, monkeypatch, launch=0.25, wait=0.75, overlap=rng.random() < 0.5, num_blocks=256,
            max_num_seqs=rng.randint(1, 8), max_num_batched_tokens=rng.randint(4, 40),
        )  # fmt: skip
        for index in range(rng.randint(1, 40)):
            add(engine, [index] * rng.randint(1, 12), max_tokens=rng.randint(1, 3))
        before = clock.now
        run_to_end(engine)
        metrics = engine.metrics()
        max_tokens_per_second = engine.scheduler.max_num_batched_tokens / 1.0
        for phase in ("prefill", "decode"):
            num_tokens, seconds = metrics[f"num_{phase}_tokens"], metrics[f"{phase}_seconds"]
            assert (num_tokens > 0) == (seconds > 1e-9)
            assert num_tokens <= seconds * max_tokens_per_second * (1 + 1e-9)
        assert metrics["prefill_seconds"] + metrics["decode_seconds"] == pytest.approx(clock.now - before)
        seen_both += metrics["num_decode_tokens"] > 0
    assert seen_both > 10


@pytest.mark.parametrize("overlap", [False, True])
def test_the_mean_decode_batch_size_is_that_of_the_steps_that_have_decodes(overlap):
    """It once counted only the decodes of pure decode steps, not those beside prompts."""
    engine = make_engine(max_num_batched_tokens=8, num_blocks=256, max_num_seqs=4, overlap=overlap)
    for index in range(20):
        add(engine, [index] * (1 + index % 7), max_tokens=1 + index % 5)
    rows = []
    launch = engine.runner.launch

    def spy(step):
        rows.append(
            sum(num_new == 1 and seq.num_computed_tokens > seq.num_prompt_tokens for seq, num_new, _ in step.chunks)
        )
        return launch(step)

    engine.runner.launch = spy
    run_to_end(engine)
    metrics = engine.metrics()
    with_decodes = [num_decodes for num_decodes in rows if num_decodes]
    assert 0 < metrics["num_decode_steps"] < len(with_decodes) < len(rows), "steps of all three kinds"
    assert metrics["num_steps_with_decodes"] == len(with_decodes)
    assert metrics["mean_decode_batch_size"] == sum(with_decodes) / len(with_decodes)
    assert metrics["num_decode_tokens"] == sum(rows)
    assert metrics["num_steps"] == len(rows) == metrics["num_decode_steps"] + metrics["num_prefill_steps"]


@pytest.mark.parametrize("overlap", [False, True])
def test_means_over_steps_are_those_of_the_scheduler_as_each_step_is_launched(overlap):
    """With preemptions. A count taken when requests finish would not be such a mean."""
    engine = make_engine(num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=4, overlap=overlap)
    scheduler, launch = engine.scheduler, engine.runner.launch
    seen = []

    def spy(step):
        held = {block for seq in scheduler.running for block in seq.block_table}
        seen.append((len(scheduler.running), len(engine._unfinished) - len(scheduler.running), len(held) / 8))
        return launch(step)

    engine.runner.launch = spy
    for index in range(9):
        add(engine, [index] * 6, max_tokens=12)
    run_to_end(engine)
    metrics = engine.metrics()
    assert metrics["num_preemptions"] > 0 and metrics["num_steps"] == len(seen)
    running, waiting, use = (
        metrics[name] for name in ("num_running_of_steps", "num_waiting_of_steps", "kvcache_use_of_steps")
    )
    assert (running, waiting, use) == tuple(pytest.approx(sum(column)) for column in zip(*seen, strict=True))
    assert min(running, waiting, use) > 0


def test_refused_requests_are_counted():
    """Rows that never ran were once missing from metrics()."""
    engine = make_engine(num_blocks=4, block_size=4, max_model_len=64, max_num_seqs=4)
    add(engine, [5], max_tokens=1)
    for prompt, max_tokens in (([], 1), ([1000], 1), ([1], 60), ([1.0], 1)):
        with pytest.raises((TypeError, ValueError)):
            add(engine, prompt, max_tokens)
    run_to_end(engine)
    metrics = engine.metrics()
    assert (metrics["num_requests"], metrics["num_rejected_requests"]) == (5, 4)
    assert metrics["finish_reasons"] == {"length": 1}


def test_an_engine_that_has_done_nothing_has_no_means():
    metrics = make_engine(max_num_seqs=4).metrics()
    assert metrics["mean_decode_batch_size"] == metrics["prefix_cache_hit_rate"] == 0
    assert metrics["num_rejected_requests"] == metrics["prefill_seconds"] == metrics["decode_seconds"] == 0
