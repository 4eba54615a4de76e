"""One model over several processes gives the tokens of one process, and an error says which rank failed."""

import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import support.interrupts
from support.interrupts import Fault, assert_empty, interrupt_at_random_moments, run_traced
from support.long import long, some
from support.model_factory import read_tensors, save_model, write_tensors
from support.processes import (
    FILTERS,
    LONG,
    SCRIPT_ENVIRONMENT,
    assert_refuses_work,
    children,
    is_running,
    listening_sockets,
    nothing_left_behind,
    pids_of,
    sockets_of,
    wait_until,
)

import nanovllm.parallel.parallel_runner
from nanovllm import LLM, PoolingParams, SamplingParams
from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.demo.problems import problems
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import CorruptCacheError
from nanovllm.parallel.parallel_runner import TensorParallelRunner
from nanovllm.parallel.worker import HAS_MET

# An exception in a thread of the driver would otherwise be only a line on the screen.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

# These give hits, chunks, and a cache in which not everything fits at once.
OPTIONS = {"device": "cpu", "kvcache_block_size": 4, "num_kvcache_blocks": 24, "max_num_batched_tokens": 32}
# Each has two key/value heads, so that four ranks hold both twice. Slices are padded to 16 ids. With 61 ids the last
# rank has fewer; with 20, the second has few and the third none; with 7, the second has none.
MODELS: dict[str, dict[str, Any]] = {
    "61 ids": {"vocab_size": 61},
    "20 ids, tied, bias": {"vocab_size": 20, "tie_word_embeddings": True, "attention_bias": True},
    "7 ids, tied": {"vocab_size": 7, "tie_word_embeddings": True},
}
Request = tuple[list[int], SamplingParams]


def save(directory: Path, **overrides) -> str:
    save_model(directory, **{"seed": 5, "num_key_value_heads": 2, **overrides})
    return str(directory)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("tiny"))


# Processes and what they leave behind


@pytest.fixture(autouse=True, scope="module")
def no_process_outlives_the_tests():
    before = children()
    yield
    assert children() == before


# Requests


@pytest.fixture(scope="module", params=some(MODELS, "20 ids, tied, bias"))
def engines(request, tmp_path_factory) -> Iterator[dict[int, LLM]]:
    """One model at every size; the others are compared with the first. A default run has no engine of two ranks here:
    four show more, and `pair` has two."""
    directory = save(tmp_path_factory.mktemp("model"), **MODELS[request.param])
    sizes = (1, 2, 4) if request.config.option.long else (1, 4)
    with ExitStack() as stack:
        yield {size: stack.enter_context(LLM(directory, tensor_parallel_size=size, **OPTIONS)) for size in sizes}


def sharded(engines: dict[int, LLM]) -> list[int]:
    return [size for size in engines if size > 1]


def make_requests(vocab_size: int, num: int = 20) -> list[Request]:
    """Prompts of 1 to 50 tokens, most of them behind one of two beginnings; greedy."""
    rng = random.Random(vocab_size)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    beginnings = [tokens(length) for length in (0, 13, 30)]
    params = [SamplingParams(0.0, max_tokens=rng.randrange(4, 14), ignore_eos=True) for _ in range(num)]
    return [(rng.choice(beginnings) + tokens(rng.randrange(1, 20)), row) for row in params]


def generate(llm: LLM, requests: list[Request]) -> list[tuple]:
    outputs = llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False, raise_on_error=True)
    return [(output.token_ids, output.finish_reason, output.text, output.num_cached_tokens) for output in outputs]


def counters(llm: LLM) -> dict[str, Any]:
    """The metrics that must be equal at every size: all except bytes and seconds."""
    metrics = llm.metrics()
    return {name: value for name, value in metrics.items() if "seconds" not in name and name != "memory_bytes"}


# Every size gives the same


def test_greedy_tokens_and_the_schedule_are_those_of_one_rank(engines):
    """A head, a bias, a padded row of the vocabulary or a replicated key on the wrong rank changes some token; chunks,
    hits and preemptions lay the cache out differently.
    """
    requests = make_requests(engines[1].engine.info.vocab_size)
    assert max(len(prompt) for prompt, _ in requests) > OPTIONS["max_num_batched_tokens"]
    expected = generate(engines[1], requests)
    assert len({tuple(token_ids) for token_ids, *_ in expected}) > len(requests) / 2
    metrics = counters(engines[1])
    assert metrics["num_preemptions"] > 0 and metrics["num_cached_prompt_tokens"] > 0
    assert metrics["num_prefill_steps"] > metrics["num_prefill_tokens"] / OPTIONS["max_num_batched_tokens"]
    for size in sharded(engines):
        assert generate(engines[size], requests) == expected, size
        assert counters(engines[size]) == metrics, size
        engines[size].engine.scheduler.check_integrity()


NAN = float("nan")


def test_sampled_tokens_are_those_of_one_rank(engines, count):
    """Each rank samples its own part of the rows, with the rows' settings and rules and the tokens so far, including
    those that other ranks sampled.
    """
    requests = make_requests(engines[1].engine.info.vocab_size, count(1, 2) * len(FILTERS))
    options = [{"temperature": 0.8, "max_tokens": 9, "ignore_eos": True, **changes} for changes in FILTERS.values()]
    requests = [(prompt, SamplingParams(**options[row % len(options)])) for row, (prompt, _) in enumerate(requests)]
    # A request's number is its seed, so all engines must have had as many.
    assert len({llm.metrics()["num_requests"] for llm in engines.values()}) == 1
    expected = generate(engines[1], requests)
    assert {reason for _, reason, *_ in expected} == {"stop", "length"}
    for size in sharded(engines):
        for (prompt, params), ours, theirs in zip(requests, generate(engines[size], requests), expected, strict=True):
            assert ours == theirs, (size, prompt, params)


def test_rows_of_one_forward_pass_are_those_of_one_rank(engines):
    """States come from rank 0, and rows that generate run beside those that pool."""
    kinds = [
        PoolingParams(), PoolingParams(pooling="mean", normalize=False), PoolingParams(pooling="cls"),
        PoolingParams("token_embed"), PoolingParams("label", labels=((1,), (2, 3), (2, 4))),
    ]  # fmt: skip
    requests = make_requests(engines[1].engine.info.vocab_size, num=7)
    rows = [(prompt, params) for prompt, generates in requests for params in (*kinds, generates)]

    def outputs_of(llm: LLM) -> list[Any]:
        return list(llm.generate_iter(*map(iter, zip(*rows, strict=True))))

    expected = outputs_of(engines[1])
    for size in sharded(engines):
        for (_, params), ours, theirs in zip(rows, outputs_of(engines[size]), expected, strict=True):
            assert ours.error is None and ours.num_cached_tokens == theirs.num_cached_tokens
            if isinstance(params, SamplingParams):
                assert ours.token_ids == theirs.token_ids
            else:
                np.testing.assert_allclose(ours.data, theirs.data, rtol=1e-5, atol=1e-5 * abs(theirs.data).max())
        engines[size].engine.scheduler.check_integrity()
        with pytest.raises(ValueError, match="hidden_states_layers needs tensor_parallel_size=1"):
            engines[size].embed([[1, 2]], hidden_states_layers=[0], use_tqdm=False)
    engines[1].embed([[1, 2]], use_tqdm=False)  # so that all have had as many requests


def test_a_request_by_itself_and_one_beside_others_agree_at_every_size(engines):
    """If one rank mixes up two rows, the sizes still agree as long as both run these rows together."""
    requests = [
        (prompt, replace(params, seed=3)) for prompt, params in make_requests(engines[1].engine.info.vocab_size)
    ]
    requests = [(prompt, replace(params, temperature=0.8 * (row % 2))) for row, (prompt, params) in enumerate(requests)]
    together = [token_ids for token_ids, *_ in generate(engines[1], requests)]
    for size in sharded(engines):
        assert [generate(engines[size], [request])[0][0] for request in requests[:3]] == together[:3], size


@pytest.mark.parametrize(("overlap", "caching"), [(True, True), long(False, False)])
def test_stop_strings_are_those_of_one_rank(overlap, caching):
    """Only the driver knows text: the ranks must end a request in the same commit as the driver."""
    options = {**OPTIONS, "num_kvcache_blocks": 60, "overlap": overlap, "enable_prefix_caching": caching}
    texts = [f"user: {question}\n" for question, _ in islice(problems(seed=1, held_out=True), 3)]
    prompts = [*texts, "Count: 1 2 3", "Count: 1 2 4", "+"] * 2
    kinds = [{"stop": ["5 6", "t", "31"]}, {"stop": ["5", "t", " "], "min_tokens": 5}, {"stop": ["no such text"]}, {}]
    params = [
        SamplingParams(0.9 * (row % 2), max_tokens=12, ignore_eos=True, seed=row, **kinds[row % len(kinds)])
        for row in range(len(prompts))
    ]
    found = []
    for size in (1, 2):
        with LLM(MODEL_DIRECTORY, tensor_parallel_size=size, **options) as llm:
            # The second time, the cache is warm.
            found.append(([generate(llm, list(zip(prompts, params, strict=True))) for _ in range(2)], counters(llm)))
    assert found[0] == found[1]
    outputs, metrics = found[0]
    lengths = [len(token_ids) for token_ids, reason, *_ in outputs[0] if reason == "stop"]
    assert len(lengths) > 3 and min(lengths) < 5 < max(lengths) < 12, lengths
    assert metrics["finish_reasons"].keys() == {"stop", "length"}
    assert (metrics["num_cached_prompt_tokens"] > 0) is caching


@pytest.fixture(scope="module")
def meeting_place(tmp_path_factory) -> Path:
    """Where the ranks of `pair` meet."""
    return tmp_path_factory.mktemp("meeting_place")


@pytest.fixture(scope="module", params=some([True, False], True), ids=["overlap", "sync"])
def pair(request, tiny, meeting_place) -> Iterator[tuple[LLM, LLM]]:
    """One rank and two ranks."""
    options = {**OPTIONS, "overlap": request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(meeting_place))
        one, two = LLM(tiny, **options), LLM(tiny, tensor_parallel_size=2, **options)
    with one, two:
        yield one, two
    assert not os.listdir(meeting_place)


def test_requests_and_aborts_by_hand_between_steps_give_what_one_rank_gives(pair):
    """An abort of a row that is in flight, waits, or was preempted must take effect at the same place in every log."""
    rng = random.Random(3)
    requests = make_requests(61, 40)
    stories = []
    for llm in pair:
        llm.engine.reset()
    # Tests before this one may have run on one of the two alone: the workers of a session share a module's tests.
    before = [counters(llm) for llm in pair]
    # Whether to add a request, whether to abort one, and which one, counted back from the newest.
    plan = [(rng.random() < 0.6, rng.random() < 0.6, rng.randrange(20)) for _ in range(100)]
    for llm, counted in zip(pair, before, strict=True):
        engine, story, added, first = llm.engine, [], 0, counted["num_requests"]
        for adds, aborts, which in plan:
            if adds and added < len(requests):
                engine.add_request(*requests[added])
                added += 1
            if aborts:
                seq = engine.abort(first + which)
                story.append(("abort", which, seq and seq.completion_token_ids))
            story += [(seq.seq_id - first, seq.finish_reason, seq.token_ids) for seq in engine.step()]
        while not engine.is_finished():
            story += [(seq.seq_id - first, seq.finish_reason, seq.token_ids) for seq in engine.step()]
        stories.append(story)
        assert_empty(engine)
    aborted = [completion for what, _, completion in stories[0] if what == "abort" and completion is not None]
    assert len(aborted) > 5 and any(aborted) and len(stories[0]) > 40
    assert stories[0] == stories[1]
    preempted = [
        counters(llm)["num_preemptions"] - counted["num_preemptions"] for llm, counted in zip(pair, before, strict=True)
    ]
    assert preempted[0] == preempted[1] > 0


@pytest.mark.parametrize("where", some(["embedding", "vocabulary"], "embedding"))
def test_logits_that_are_not_finite_end_a_row_as_on_one_rank(tmp_path, where):
    """NaN in a slice of the vocabulary that only the last rank has must end the row on all ranks."""
    save(tmp_path)
    tensors = read_tensors(tmp_path)
    if where == "embedding":
        tensors["model.embed_tokens.weight"][60] = NAN  # for the rows that hold this token
    else:
        tensors["lm_head.weight"][60, 0] = NAN
    write_tensors(tmp_path, tensors)
    rng = random.Random(6)
    prompts = [[*(rng.randrange(60) for _ in range(rng.randrange(4, 40))), 60][row % 2 :][::-1] for row in range(8)]
    prompts += [[rng.randrange(60) for _ in range(20)] for _ in range(4)]
    params = [
        SamplingParams(0.8 * (row % 3), max_tokens=6, ignore_eos=True, seed=row, top_p=0.9 if row % 3 == 2 else 1.0)
        for row in range(len(prompts))
    ]
    found = []
    for size in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=size, **OPTIONS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([(output.token_ids, output.finish_reason, output.error) for output in outputs])
    assert found[0] == found[1]
    assert {reason for _, reason, _ in found[0]} == ({"error", "length"} if where == "embedding" else {"error"})


def test_a_row_whose_bans_leave_no_token_ends_as_on_one_rank(pair):
    """Only the rank that samples the row notices; the others sample its neighbours."""
    nothing = {"allowed_token_ids": [7], "logit_bias": {9: 4.0}}
    params = [
        SamplingParams(0.8, max_tokens=6, seed=row, ignore_eos=True, **(nothing if row % 3 == 1 else {}))
        for row in range(7)
    ]
    params = [replace(row, bad_words=[[7]]) if row.allowed_token_ids else row for row in params]
    found = []
    for llm in pair:
        outputs = llm.generate([[row, 3] for row in range(7)], params, use_tqdm=False)
        found.append([(output.token_ids, output.finish_reason, output.error) for output in outputs])
    assert found[0] == found[1]
    reasons = [reason for _, reason, _ in found[0]]
    assert reasons == ["length", "error", "length", "length", "error", "length", "length"]
    assert all("no token is left" in error for _, reason, error in found[0] if reason == "error")


def test_memory_is_the_sum_over_the_ranks(engines):
    """The whole model counted once per rank, or rank 0's part alone, would not be the memory that is in use."""
    of_sizes = {size: llm.metrics()["memory_bytes"] for size, llm in engines.items()}
    # Half the heads on each of two ranks; four have to hold both heads twice.
    for size in sharded(engines):
        assert of_sizes[size]["kv_cache"] / of_sizes[1]["kv_cache"] == {2: 1, 4: 2}[size]
        assert of_sizes[size // 2 if size // 2 in engines else 1]["weights"] < of_sizes[size]["weights"]
        assert of_sizes[size]["weights"] < size * of_sizes[1]["weights"]


# A rank that dies

DEATH_OPTIONS = {**OPTIONS, "num_kvcache_blocks": 400}


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_a_rank_killed_at_a_random_moment_ends_the_run_with_its_name(tiny, rank, count, tmp_path, monkeypatch):
    """The others would wait in a collective for ever, or first report a lost connection, which hides the cause."""
    rng = random.Random(rank)
    prompts = [[token, 1, 2] for token in range(4)]
    slowest = 0.0
    for _ in range(count(1, 10)):
        with nothing_left_behind(tmp_path, monkeypatch):
            llm = LLM(tiny, tensor_parallel_size=2, overlap=rng.random() < 0.7, **DEATH_OPTIONS)
            pids = pids_of(llm)
            sockets = sockets_of(pids) & listening_sockets()
            assert sockets
            # In the middle of what happens at this step; before the first one with the ranks idle.
            at, delay = rng.choice([0, rng.randrange(1, 5), rng.randrange(5, 100)]), rng.uniform(0, 0.01)
            killed_at = []

            def kill(pid=pids[rank], killed_at=killed_at) -> None:
                killed_at.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

            timer = threading.Timer(delay, kill)
            num_steps = 0
            step = llm.engine.step

            def count_step(at=at, timer=timer, step=step) -> Any:
                nonlocal num_steps
                num_steps += 1
                if num_steps == at:
                    timer.start()
                return step()

            monkeypatch.setattr(llm.engine, "step", count_step)
            if at == 0:
                kill()
            with pytest.raises(RuntimeError, match=f"^rank {rank} of 2 was killed by signal 9$"):
                llm.generate(prompts, LONG, use_tqdm=False)
            slowest = max(slowest, time.monotonic() - killed_at[0])
            assert not any(map(is_running, pids))
            assert_refuses_work(llm, f"rank {rank} of 2 was killed by signal 9")
            assert not sockets & listening_sockets()
            del llm, step, count_step
            monkeypatch.undo()
    print(f"{slowest:.2f} s until the slowest error")
    assert slowest < 10


# The start


def test_a_rank_that_is_ready_before_another_has_met_it_is_not_forgotten():
    """Its answer was dropped, and the start waited for ever; the messages of two ranks have no order."""
    runner = object.__new__(TensorParallelRunner)
    runner._size, runner._failure, runner._troubles, runner._inbox = 2, None, [], SimpleQueue()
    for message in ((0, [HAS_MET, None]), (0, [0, "ready"]), (1, [HAS_MET, None]), (1, [0, "too"])):
        runner._inbox.put(message)
    assert runner._replies(HAS_MET, 60) == [None, None] and runner._replies(0, 60) == ["ready", "too"]


# Planted faults


def run_by_hand(engine: LLMEngine, requests: list[Request]) -> list[tuple[int, list[int]]]:
    for request in requests:
        engine.add_request(*request)
    finished = []
    while not engine.is_finished():
        finished += [(seq.seq_id, seq.completion_token_ids) for seq in engine.step()]
    return finished


def start_faulty(tiny: str, fault: str, rank: int, monkeypatch, **options: Any) -> LLMEngine:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULTY_RANK", str(rank))
    config = Config(tiny, tensor_parallel_size=2, **OPTIONS, **options)
    return LLMEngine(config, runner=TensorParallelRunner(config, worker_module="support.faulty_worker"))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_keys_of_one_rank_are_found_and_the_ranks_go_on(tiny, rank, tmp_path, monkeypatch):
    """Each rank checks its own cache; the error comes before that of ranks that sample different tokens."""
    with nothing_left_behind(tmp_path, monkeypatch):
        engine = start_faulty(tiny, "spoils its canaries", rank, monkeypatch, cache_canary=True)
        with pytest.raises(CorruptCacheError, match=f"read wrong keys at position 0, in block .* of rank {rank}'s"):
            run_by_hand(engine, make_requests(61))
        assert engine.is_finished()
        assert len(run_by_hand(engine, make_requests(61))) == 20
        engine.exit()


WOULD_COMPUTE = "the ranks diverged at step 4, which is a bug: rank {rank} would compute"


@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        ("drops a row", 1, WOULD_COMPUTE),
        long("reverses the rows", 1, WOULD_COMPUTE),
        long("has one token more", 0, WOULD_COMPUTE),
        long("takes another block", 1, WOULD_COMPUTE),
        long("samples nothing", 1, WOULD_COMPUTE),
        long("takes another entry", 0, WOULD_COMPUTE),
        long("samples another token", 1, "the ranks diverged at step 4, which is a bug: rank 1 sampled other tokens"),
        long("out of memory", 1, r"^OutOfMemoryError: out of memory: tried to allocate 3 GiB \(rank 1 of 2\)$"),
        long("exits in a step", 1, "^rank 1 of 2 ended with exit status 7$"),
    ],
)
def test_a_rank_that_goes_its_own_way_ends_the_run(tiny, fault, rank, message, tmp_path, monkeypatch):
    """Ranks that compute different steps would silently give wrong tokens, or hang in a collective."""
    message = message.format(rank=rank)
    with nothing_left_behind(tmp_path, monkeypatch):
        engine = start_faulty(tiny, fault, rank, monkeypatch)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=message):
            run_by_hand(engine, make_requests(61))
        assert time.monotonic() - began < 10
        with pytest.raises(RuntimeError, match="make a new LLM"):
            engine.add_request(*make_requests(61)[0])
        engine.exit()
        del engine


@pytest.mark.parametrize(
    ("fault", "rank", "kind", "message"),
    [
        long("ValueError", 1, ValueError, r"^the option cannot be so \(rank 1 of 2\)$"),
        long("OSError", 1, RuntimeError, r"^OSError: no file \(rank 1 of 2\)$"),
        long("exit status", 1, RuntimeError, "^rank 1 of 2 ended with exit status 5$"),
        long("sys.exit", 1, RuntimeError, r"6 \(rank 1 of 2\)$"),
        ("abort", 0, RuntimeError, "^rank 0 of 2 was killed by signal 6$"),
        long("exits at once", 0, RuntimeError, "^rank [01] of 2 ended with exit status 4$"),
    ],
)
def test_a_rank_that_fails_at_its_start_says_why(tiny, fault, rank, kind, message, tmp_path, monkeypatch):
    """The other rank would wait for it for ever."""
    with nothing_left_behind(tmp_path, monkeypatch):
        began = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            start_faulty(tiny, fault, rank, monkeypatch)
        assert type(caught.value) is kind
        assert time.monotonic() - began < 20
        del caught


def test_ranks_that_do_not_meet_in_time_end_with_an_error(tiny, tmp_path, monkeypatch):
    """A rank without address space once left the others and the driver waiting for it."""
    monkeypatch.setattr(nanovllm.parallel.parallel_runner, "_SECONDS_TO_MEET", 0.3)  # Python alone takes that long
    message = r"^the ranks did not meet within 0\.3 s; give them more memory \(see also ulimit -v\)$"
    with nothing_left_behind(tmp_path, monkeypatch), pytest.raises(RuntimeError, match=message) as caught:
        LLM(tiny, tensor_parallel_size=2, **OPTIONS)
    del caught


def test_a_module_that_is_not_there_is_an_error(tiny, tmp_path, monkeypatch, capfd):
    config = Config(tiny, tensor_parallel_size=2, **OPTIONS)
    with (
        nothing_left_behind(tmp_path, monkeypatch),
        pytest.raises(RuntimeError, match=r"rank [01] of 2 ended with exit status 1"),
    ):
        TensorParallelRunner(config, worker_module="no_such_worker")
    assert "no_such_worker" in capfd.readouterr().err  # what a rank itself says is not swallowed


def test_a_broken_checkpoint_is_the_loaders_own_error(tmp_path, monkeypatch):
    save(tmp_path / "model")
    tensors = read_tensors(tmp_path / "model")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    write_tensors(tmp_path / "model", tensors)
    (tmp_path / "temporary").mkdir()
    message = "a tensor is missing from .*: model.layers.1.mlp.down_proj.weight"
    with nothing_left_behind(tmp_path / "temporary", monkeypatch), pytest.raises(ValueError, match=message) as caught:
        LLM(str(tmp_path / "model"), tensor_parallel_size=2, **OPTIONS)
    assert "Traceback" not in str(caught.value)


# Interrupts and exceptions in the driver

VICTIMS = [
    (prompt, SamplingParams(0.9 * (row % 2), max_tokens=3 + row, ignore_eos=True, seed=row))
    for row, (prompt, _) in enumerate(make_requests(61, 4))
]
POINTS = {
    "add_request": (LLMEngine, "add_request"),
    "request_added": (TensorParallelRunner, "request_added"),
    "schedule": (Scheduler, "schedule"),
    "launch": (TensorParallelRunner, "launch"),
    "ask": (TensorParallelRunner, "output_of"),
    "replies": (TensorParallelRunner, "_replies"),
    "commit": (Scheduler, "commit"),
    "step_committed": (TensorParallelRunner, "step_committed"),
    "write": (TensorParallelRunner, "_write"),
    "step": (LLMEngine, "step"),
}


def run_victims(llm: LLM) -> list[tuple]:
    llm.engine.reset()
    return generate(llm, VICTIMS)


@pytest.fixture(scope="module")
def answers(pair) -> list[tuple]:
    answers = run_victims(pair[0])
    assert run_victims(pair[1]) == answers
    return answers


@pytest.fixture(scope="module")
def num_calls(pair, answers) -> dict[str, int]:
    """How often the victims pass each of POINTS."""
    with ExitStack() as stack:
        probes = {name: stack.enter_context(Fault(*point)) for name, point in POINTS.items()}
        run_victims(pair[1])
    assert all(probe.num_calls > 0 for probe in probes.values())
    return {name: probe.num_calls for name, probe in probes.items()}


@pytest.mark.parametrize("point", POINTS)
def test_after_an_exception_anywhere_in_the_driver_the_next_call_is_right(pair, answers, num_calls, point, count):
    """Ranks that get half of a step, or of a request, would go on with a different schedule from the driver's."""
    llm = pair[1]
    rng = random.Random(f"{point} {llm.engine.depth}")
    kinds = [(KeyboardInterrupt(), False), (KeyboardInterrupt(), True), (RuntimeError("lost"), True)]
    for error, is_after in rng.sample(kinds, min(3, count(1, 3))):
        at = rng.randint(1, num_calls[point])
        with pytest.raises(type(error)) as caught, Fault(*POINTS[point], at, error, is_after):
            run_victims(llm)
        assert caught.value is error
        assert_empty(llm.engine)
        assert run_victims(llm) == answers, (at, is_after)


def test_ctrl_c_may_come_at_any_line_of_the_driver(pair, answers, count, monkeypatch):
    """It may come between the driver's own bookkeeping and its message to the ranks."""
    llm = pair[1]
    files = (*support.interrupts.FILES, nanovllm.parallel.parallel_runner.__file__)
    monkeypatch.setattr(support.interrupts, "FILES", files)
    visits: dict[tuple[str, int], int] = {}

    def count_visit(file, line) -> None:
        visits[file, line] = visits.get((file, line), 0) + 1

    run_traced(lambda: run_victims(llm), count_visit)
    assert len([file for file, _ in visits if file == files[-1]]) > 20
    rng = random.Random(4)
    places = list(visits.items())
    of_runner = [place for place in places if place[0][0] == files[-1]]
    of_runner = of_runner[llm.engine.depth :: 2]
    chosen = [
        *rng.sample(of_runner, min(len(of_runner), count(8, 10**6))),
        *rng.sample(places, min(len(places), count(4, 10))),
    ]
    for place, num_visits in chosen:
        remaining = [rng.randint(1, num_visits)]

        def interrupt(file, line, place=place, remaining=remaining) -> None:
            if (file, line) == place:
                remaining[0] -= 1
                if remaining[0] == 0:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_traced(lambda interrupt=interrupt: run_victims(llm), interrupt)
        assert_empty(llm.engine)
        assert run_victims(llm) == answers, place


def test_metrics_may_be_read_while_a_call_waits_for_the_ranks(pair, answers):
    """Asking the ranks for their memory once took the answer that the step waited for, and both waited for ever."""
    llm, seen = pair[1], []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(llm.metrics()["memory_bytes"]))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        assert run_victims(llm) == answers
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen and all(memory == seen[0] and memory["weights"] > 0 for memory in seen)


def test_a_fork_of_the_driver_is_told_that_the_ranks_are_not_its_own(pair, answers):
    """It has no threads that write to the ranks or read from them, and once waited for ever."""
    llm = pair[1]
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run_victims(llm)
        except RuntimeError as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable) as told:
        assert "fork" in told.read()
    os.waitpid(child, 0)
    assert run_victims(llm) == answers


def test_a_fork_of_the_driver_may_close_what_is_not_its_own(pair, answers):
    """A `with` block that a child leaves does so. It once ended with an error, and reset the ranks."""
    llm = pair[1]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            llm.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert run_victims(llm) == answers


def test_a_stop_predicate_that_would_reset_the_engine_is_refused(pair, answers):
    """The driver once told the ranks to commit a step that they had dropped, and the next call met a StopIteration."""
    for llm in pair:
        llm.engine.reset()
        llm.engine.add_request([1, 2, 3], SamplingParams(0.0, max_tokens=8), lambda _, llm=llm: llm.engine.reset())
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            while not llm.engine.is_finished():
                llm.engine.step()
        assert_empty(llm.engine)
        assert run_victims(llm) == answers


def test_closing_from_another_thread_during_a_call_is_refused(pair, answers):
    """The call once went on without the model."""
    for llm in pair:
        told = []

        def close(llm=llm, told=told) -> None:
            with pytest.raises(RuntimeError, match="busy") as error:
                llm.close()
            told.append(error)

        def step(close=close, step=llm.engine.step) -> list:
            thread = threading.Thread(target=close)
            thread.start()
            thread.join()
            return step()

        llm.engine.step = step
        try:
            assert run_victims(llm) == answers
        finally:
            del llm.engine.step
        assert told


def test_ctrl_c_at_random_moments(pair, answers, count):
    """The driver may be waiting for its ranks, for example."""
    llm = pair[1]

    def check() -> None:
        assert_empty(llm.engine)
        assert run_victims(llm) == answers

    interrupt_at_random_moments(lambda: run_victims(llm), count(4, 12), check)


@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_stop_predicate_that_raises_empties_the_engine(pair, answers, at):
    """The ranks have no predicate, so their engines would have gone on with the step."""
    engine = pair[1].engine
    num_calls = 0

    def predicate(token_id: int) -> bool:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise LookupError("no such token")
        return False

    for prompt, params in VICTIMS:
        engine.add_request(prompt, params, predicate)
    with pytest.raises(LookupError, match="no such token"):
        while not engine.is_finished():
            engine.step()
    assert_empty(engine)
    assert run_victims(pair[1]) == answers


def test_a_stop_predicate_ends_a_request_as_on_one_rank(pair):
    """This holds even if its answer comes too early to count, or if the token ends the request anyway."""
    stories = []
    for llm in pair:
        engine = llm.engine
        engine.reset()
        first = engine.metrics()["num_requests"]
        for row, (prompt, params) in enumerate(make_requests(61, 12)):
            params = replace(params, min_tokens=row % 4, stop_token_ids=range_of_ids(row))
            engine.add_request(prompt, params, lambda token_id: token_id % 8 == 1)
        story = []
        while not engine.is_finished():
            story += [(seq.seq_id - first, seq.finish_reason, seq.token_ids) for seq in engine.step()]
        stories.append(story)
    assert stories[0] == stories[1]
    assert {reason for _, reason, _ in stories[0]} == {"stop", "length"}


def range_of_ids(row: int) -> list[int]:
    return list(range(10)) if row % 3 == 0 else []


@pytest.mark.parametrize("is_dead", some([True, False], True), ids=["a death", "a rank's error"])
def test_ctrl_c_while_a_failure_is_looked_into_does_not_make_the_next_call_hang(tiny, is_dead, tmp_path, monkeypatch):
    """A death is reported once. A driver that was interrupted before it had stored the report once waited for ever."""

    def interrupted(*arguments) -> None:
        raise KeyboardInterrupt

    with nothing_left_behind(tmp_path, monkeypatch):
        engine = start_faulty(tiny, "exits in a step" if is_dead else "out of memory", 1, monkeypatch)
        with monkeypatch.context() as patch:
            if is_dead:
                patch.setattr(TensorParallelRunner, "_death_of", interrupted)
            patch.setattr(nanovllm.parallel.parallel_runner.time, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run_by_hand(engine, make_requests(61))
        # Nothing but the end of the ranks can free a driver that waits.
        processes = [rank.process for rank in engine.runner._ranks]
        killer = threading.Timer(6, lambda: [process.kill() for process in processes])
        killer.start()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            run_by_hand(engine, make_requests(61))
        seconds = time.monotonic() - began
        killer.cancel()
        killer.join()
        engine.exit()
        del engine
    assert seconds < 5


# Start and end


@pytest.mark.long  # the test of two engines shows most of it
def test_closing_ends_the_ranks_and_may_be_done_twice(tiny, tmp_path, monkeypatch):
    with nothing_left_behind(tmp_path, monkeypatch):
        llm = LLM(tiny, tensor_parallel_size=2, **OPTIONS)
        pids = pids_of(llm)
        assert all(map(is_running, pids)) and set(pids) <= children()
        began = time.monotonic()
        llm.close()
        assert time.monotonic() - began < 4  # not by running into a timeout
        llm.close()
        assert not any(map(is_running, pids))
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([[1]], LONG, use_tqdm=False)
        assert llm.metrics()["memory_bytes"] == {}


def test_ranks_meet_where_no_other_user_can_write(pair, meeting_place):
    """A store at a port once accepted addresses from any user of the host, and the ranks connect to these. gloo listens
    once per rank for its own connections; rank 0, which had the store, once listened twice."""
    listening = listening_sockets()
    assert len({len(sockets_of([pid]) & listening) for pid in pids_of(pair[1])}) == 1
    (directory,) = meeting_place.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700 and os.listdir(directory) == ["store"]


def test_an_engine_that_is_dropped_takes_its_ranks_along(tiny, tmp_path, monkeypatch):
    with nothing_left_behind(tmp_path, monkeypatch):
        llm = LLM(tiny, tensor_parallel_size=2, **OPTIONS)
        pids = pids_of(llm)
        del llm
        assert not any(map(is_running, pids))


def test_two_engines_of_two_ranks_each_are_both_right(pair, tiny):
    """A port, a name or a group that both take makes one of them talk to the other's ranks."""
    one, two = pair
    requests = [(prompt, replace(params, temperature=0.8, seed=row)) for row, (prompt, params) in enumerate(VICTIMS)]
    one.engine.reset()
    expected = [token_ids for token_ids, *_ in generate(one, requests)]
    with LLM(tiny, tensor_parallel_size=2, **{**OPTIONS, "num_kvcache_blocks": 60}) as other:
        ids = [{llm.engine.add_request(*request): row for row, request in enumerate(requests)} for llm in (two, other)]
        found: list[dict[int, list[int]]] = [{}, {}]
        while not (two.engine.is_finished() and other.engine.is_finished()):
            for index, llm in enumerate((two, other)):
                found[index] |= {ids[index][seq.seq_id]: seq.completion_token_ids for seq in llm.engine.step()}
        assert [[of_engine[row] for row in range(len(requests))] for of_engine in found] == [expected, expected]
        # The end of one is not the end of the other.
        pids, began = pids_of(other), time.monotonic()
        assert all(map(is_running, pids)) and set(pids) <= children()
        other.close()
        assert time.monotonic() - began < 4  # not by running into a timeout
        assert not any(map(is_running, pids))
        with pytest.raises(RuntimeError, match="closed"):
            other.generate([[1]], LONG, use_tqdm=False)
        assert other.metrics()["memory_bytes"] == {}
        other.close()
        assert [token_ids for token_ids, *_ in generate(two, requests)] == expected


@pytest.mark.long
def test_ranks_run_the_drivers_own_package(tiny, tmp_path):
    """The ranks once ran another package of the same name that Python finds first, such as an installed one."""
    other = tmp_path / "other" / "nanovllm"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('another package')")
    package = Path(nanovllm.__file__).parent
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "nanovllm").symlink_to(package, target_is_directory=True)
    program = (
        "from nanovllm import LLM, SamplingParams\n"
        f"with LLM({tiny!r}, tensor_parallel_size=2, device='cpu', num_kvcache_blocks=64) as llm:\n"
        "    print('tokens', llm.generate([[1, 2, 3]], SamplingParams(0.0, 4, ignore_eos=True))[0].token_ids)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(other.parent)}
    command = [sys.executable, "-c", program]  # which looks in the working directory first
    run = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=120)
    assert "tokens [" in run.stdout, run.stderr


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from nanovllm import LLM, PoolingParams, SamplingParams

print("this file runs", flush=True)
llm = LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", num_kvcache_blocks=64, kvcache_block_size=8)
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
print("tokens", llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].token_ids, flush=True)
print("ranks", *(rank.process.pid for rank in llm.engine.runner._ranks), flush=True)
"""
INTERRUPTED = """
try:
    print("ready", flush=True)
    while True:
        llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("tokens", llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].token_ids, flush=True)
"""


@pytest.fixture(scope="module")
def interrupted_script(tiny, tmp_path_factory) -> tuple[list[str], str, int]:
    """The lines, errors and exit status of a script that got one Ctrl-C and did not close its LLM."""
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(SCRIPT + INTERRUPTED)
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, script, tiny]
    with subprocess.Popen(command, env=SCRIPT_ENVIRONMENT, start_new_session=True, **options) as process:
        try:
            lines = [process.stdout.readline().strip() for _ in range(4)]
            assert lines[3] == "ready", lines
            os.killpg(process.pid, signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    return [*lines, *output.splitlines()], errors, process.returncode


def assert_ended_by_itself(lines: list[str], errors: str) -> None:
    assert [line.split()[0] for line in lines[:3]] == ["this", "tokens", "ranks"], (lines, errors)
    assert [line.split()[0] for line in lines].count("this") == 1
    assert not any(is_running(int(pid)) for pid in lines[2].split()[1:])


def test_a_script_that_does_not_close_ends_by_itself(interrupted_script):
    """It has no `__main__` guard: a rank that imported the script would run it again, and start ranks of its own."""
    lines, errors, status = interrupted_script
    assert_ended_by_itself(lines, errors)
    assert status == 0 and "Traceback" not in errors, errors


@pytest.mark.long
@pytest.mark.parametrize("ending", ["the last line", "an exception"])
def test_a_script_that_fails_or_does_nothing_else_ends_by_itself(tiny, ending, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + ("raise LookupError('the script is wrong')" if ending == "an exception" else ""))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, script, tiny], capture_output=True, text=True, timeout=60, env=SCRIPT_ENVIRONMENT
    )
    seconds = time.monotonic() - began
    lines = done.stdout.splitlines()
    assert_ended_by_itself(lines, done.stderr)
    assert len(lines) == 3 and done.returncode == (ending == "an exception"), done.stderr
    assert ("LookupError" in done.stderr) is (ending == "an exception")
    assert done.stderr.count("Traceback") == (ending == "an exception"), done.stderr
    assert seconds < 30


@pytest.mark.parametrize("moment", some(["idle", "busy"], "busy"))
def test_a_driver_that_is_killed_leaves_no_rank_behind(tiny, moment, tmp_path):
    """No process is left to tell the ranks; one that held a GPU for ever would keep the next run from starting."""
    script = tmp_path / "script.py"
    busy = "while True: llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)"
    script.write_text(SCRIPT + ("sys.stdin.read()" if moment == "idle" else busy))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script, tiny], env=SCRIPT_ENVIRONMENT, **pipes) as process:
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            pids = [int(pid) for pid in lines[2].split()[1:]]
            assert len(pids) == 2 and all(map(is_running, pids)) and set(pids) == children(process.pid)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    try:
        assert wait_until(lambda: not any(map(is_running, pids)), 10)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


WAITS_WITH_WEIGHTS = """
import time
from pathlib import Path
from queue import SimpleQueue
from safetensors.torch import load_file

def ask(kind, directory):
    print(directory, len(list(Path(directory).iterdir())), flush=True)
    time.sleep(60)

llm.engine.runner._ask = ask
llm.update_weights(load_file(Path(sys.argv[1], "model.safetensors")))
"""


def test_sigterm_of_a_whole_job_leaves_no_directory_behind(tiny, tmp_path):
    """The signal ends Python at once. The directory where the ranks met, and the weights of an update, once stayed."""
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(SCRIPT + WAITS_WITH_WEIGHTS)
    temporary.mkdir()
    command, environment = [sys.executable, script, tiny], {**SCRIPT_ENVIRONMENT, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline().split() for _ in range(4)]
            pids, (weights, num_files) = [int(pid) for pid in lines[2][1:]], lines[3]
            assert int(num_files) > 0 and len(list(temporary.iterdir())) > 0
            for pid in (*pids, process.pid):
                os.kill(pid, signal.SIGTERM)
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.kill()
    assert wait_until(lambda: not any(map(is_running, pids)), 10)
    assert not os.path.exists(weights) and not list(temporary.iterdir())


def test_ctrl_c_in_a_terminal_reaches_the_driver_alone(interrupted_script):
    """A terminal sends it to the whole foreground group; a rank that took it would be gone for the next call."""
    lines, _, status = interrupted_script
    assert lines[4:] == ["interrupted", lines[1]] and status == 0


# Bad input is refused before a process starts


@pytest.mark.parametrize(
    ("size", "works"),
    [(3, "1, 2, 4"), (8, "1, 2, 4")],
)
def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(tiny, size, works, monkeypatch):
    """If the ranks checked it, the error would come after seconds of imports, and from all ranks at once."""
    monkeypatch.setattr(nanovllm.parallel.parallel_runner, "_start_rank", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(ValueError, match=rf"tensor_parallel_size.*{works}"):
        LLM(tiny, tensor_parallel_size=size, **OPTIONS)


def test_a_device_that_is_one_gpu_is_refused_for_two_ranks(tiny):
    with pytest.raises(ValueError, match=r"device='cuda:1' is one GPU, but tensor_parallel_size=2.*device=\"cuda\""):
        LLM(tiny, tensor_parallel_size=2, **{**OPTIONS, "device": "cuda:1"})


def test_bad_rows_come_back_as_errors_and_the_ranks_do_not_notice(pair):
    """A request that the driver refuses must not reach the ranks' schedulers."""
    found = []
    for llm in pair:
        llm.engine.reset()
        prompts = [[1, 2], [], [61], [1] * 2000, [3, 4], None]
        outputs = llm.generate(prompts, SamplingParams(0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        found.append([(output.token_ids, output.finish_reason, output.error) for output in outputs])
    assert found[0] == found[1]
    assert [reason for _, reason, _ in found[0]] == ["length", "error", "error", "error", "length", "error"]
