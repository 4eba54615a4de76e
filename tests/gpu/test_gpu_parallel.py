"""One model over several GPUs gives the tokens of one GPU, with graphs and without. No memory is left taken when a rank
dies.
"""

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from support.demo_problems import CONVERSATIONS
from support.gpu_engines import Judge, num_different, skip_without
from support.interrupts import Fault, assert_empty, interrupt_at_random_moments
from support.model_factory import save_model
from support.processes import FILTERS, assert_refuses_work, is_running, pids_of, wait_until

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.parallel.parallel_runner import TensorParallelRunner

pytestmark = pytest.mark.gpu

MIB = 2**20
# These give chunks, hits and a cache in which not everything fits at once, and few graphs, so that engines start soon.
OPTIONS = {
    "device": "cuda", "dtype": "float32", "attention_backend": "triton", "kvcache_block_size": 16, "max_num_seqs": 16,
    "num_kvcache_blocks": 70, "max_num_batched_tokens": 96, "max_model_len": 512,
}  # fmt: skip
NUM_REQUESTS = 40
# There are two key/value heads, so that four ranks hold both twice. With 61 ids in slices of 16, the last rank has 13.
TINY = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "attention_bias": True,
}  # fmt: skip


@dataclass
class Workload:
    """directory: where a model is; prompts: token ids; judge: knows where two float32 completions tie; expected: the
    tokens of one GPU, by the name of `params_for`; memory: that engine's memory.
    """

    directory: str
    prompts: list[list[int]]
    judge: Judge
    expected: dict[str, list[list[int]]]
    memory: dict[str, int]


def params_for(kind: str) -> list[SamplingParams]:
    """kind: "greedy", "sampled", or "filtered": with filters, penalties, biases and bans of many kinds, row by row."""
    options = {"temperature": 0.0 if kind == "greedy" else 0.8, "ignore_eos": True}
    filters = list(FILTERS.values()) if kind == "filtered" else [{}]
    return [
        SamplingParams(**{**options, "max_tokens": 10 + row % 20, "seed": row, **filters[row % len(filters)]})
        for row in range(NUM_REQUESTS)
    ]


def tokens_of(llm: LLM, prompts: list[list[int]], kind: str) -> list[list[int]]:
    outputs = llm.generate(prompts, params_for(kind), use_tqdm=False, raise_on_error=True)
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def assert_same(workload: Workload, kind: str, found: list[list[int]], what: str) -> None:
    expected = workload.expected[kind]
    if kind == "filtered":  # the judge knows of no filters; a tie would be one row
        assert num_different(found, expected) <= 1, what
        return
    requests = list(zip(workload.prompts, params_for(kind), strict=True))
    assert workload.judge.count_ties(requests, found, expected, what) <= 1


@pytest.fixture(scope="module")
def workloads(tmp_path_factory) -> Callable[[str], Workload]:
    """Workloads by the model's name, each made when it is first asked for."""
    return cache(lambda name: make_workload(name, tmp_path_factory.mktemp(name)))


def make_workload(name: str, directory: Path) -> Workload:
    rng = random.Random(0)
    if name == "tiny":
        model = save_model(directory, seed=5, **TINY)
        beginnings = [[rng.randrange(61) for _ in range(length)] for length in (0, 20, 80)]
        prompts = [
            rng.choice(beginnings) + [rng.randrange(61) for _ in range(rng.randrange(1, 60))]
            for _ in range(NUM_REQUESTS)
        ]
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory = MODEL_DIRECTORY
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        texts = tokenizer.apply_chat_template(CONVERSATIONS[:NUM_REQUESTS], tokenize=False, add_generation_prompt=True)
        prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        # A prompt that is cut short makes the model guess.
        prompts = [ids if row % 2 == 0 else ids[: rng.randrange(8, len(ids))] for row, ids in enumerate(prompts)]
    with LLM(str(directory), enforce_eager=True, overlap=False, **OPTIONS) as llm:
        expected = {kind: tokens_of(llm, prompts, kind) for kind in ("greedy", "sampled", "filtered")}
        metrics = llm.metrics()
    assert metrics["num_cached_prompt_tokens"] > 0 and metrics["num_prefill_steps"] > 1
    assert all(len({tuple(tokens) for tokens in of_kind}) > NUM_REQUESTS / 2 for of_kind in expected.values())
    return Workload(str(directory), prompts, Judge(model, 0.0), expected, metrics["memory_bytes"])


@dataclass
class Case:
    """One engine, and the results of its model's single-GPU engine."""

    llm: LLM
    size: int
    workload: Workload


CASES = [  # model, size, enforce_eager
    ("tiny", 2, True), ("tiny", 2, False), ("tiny", 4, False),
    ("demo", 2, False), ("demo", 4, False), ("demo", 4, True),
]  # fmt: skip


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{'eager' if case[2] else 'graphs'}"
)
def case(request, workloads) -> Iterator[Case]:
    name, size, enforce_eager = request.param
    skip_without(size)
    workload = workloads(name)
    with LLM(workload.directory, tensor_parallel_size=size, enforce_eager=enforce_eager, **OPTIONS) as llm:
        yield Case(llm, size, workload)


def test_tokens_are_those_of_one_gpu(case):
    """Requests are greedy, sampled or filtered, with and without overlap. This finds a graph that holds a collective of
    another size, a buffer that the next step writes over, and a rank's slice of the noise in the wrong place.
    """
    llm, workload = case.llm, case.workload
    for depth in (1, 0, 1):
        llm.engine.depth = depth
        for kind in workload.expected:
            llm.engine.reset()  # the first time, the cache is cold
            for turn in ("cold", "warm"):
                found = tokens_of(llm, workload.prompts, kind)
                assert_same(workload, kind, found, f"{case.size} ranks, depth {depth}, {kind}, {turn}")
            assert_empty(llm.engine)


def test_every_batch_size_gives_the_tokens_of_one_gpu(case):
    """One row, and each size from which another graph or another way to exchange sums is used."""
    workload = case.workload
    for num_rows in (1, 2, 3, 5, 9, 16):
        rows = list(range(num_rows))
        params = [params_for("greedy")[row] for row in rows]
        prompts = [workload.prompts[row] for row in rows]
        outputs = case.llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)
        requests = list(zip(prompts, params, strict=True))
        expected = [workload.expected["greedy"][row] for row in rows]
        ours = [output.token_ids for output in outputs]
        assert workload.judge.count_ties(requests, ours, expected, f"{num_rows} rows") <= 1


def test_a_request_alone_gives_the_tokens_of_one_gpu(case):
    """Each rank samples an equal part of the rows. With one row, all ranks except the first sample padding."""
    workload = case.workload
    found = [
        case.llm.generate([prompt], params, use_tqdm=False, raise_on_error=True)[0].token_ids
        for prompt, params in zip(workload.prompts[: len(FILTERS)], params_for("filtered"), strict=False)
    ]
    assert num_different(found, workload.expected["filtered"][: len(FILTERS)]) <= 1


@pytest.mark.parametrize("overlap", [True, False])
def test_the_first_call_after_the_start_equals_the_second(workloads, overlap):
    """The ranks try every step together before they capture it; a trial that leaves something behind, or that only some
    of them make, would show. The schedule is the same, so the tokens must be exactly equal.
    """
    skip_without(2)
    workload = workloads("demo")
    with LLM(workload.directory, tensor_parallel_size=2, **{**OPTIONS, "overlap": overlap}) as llm:
        calls = []
        for _ in range(3):
            calls.append([tokens_of(llm, workload.prompts, kind) for kind in ("filtered", "sampled")])
            llm.engine.reset()
    assert calls[0] == calls[1] == calls[2]
    for kind, found in zip(("filtered", "sampled"), calls[0], strict=True):
        assert_same(workload, kind, found, kind)


@pytest.mark.parametrize(
    "point",
    [(TensorParallelRunner, "launch"), (TensorParallelRunner, "_replies"), (LLMEngine, "add_request")],
    ids=["launch", "wait", "add_request"],
)
def test_after_ctrl_c_between_two_entries_of_the_log_the_next_call_is_right(case, point):
    """The LLM must wait for a step in flight on the devices: its writes would reach the next call's cache."""
    llm, workload = case.llm, case.workload
    for at in (1, 5, 20):
        with pytest.raises(KeyboardInterrupt), Fault(*point, at, KeyboardInterrupt()):
            tokens_of(llm, workload.prompts, "greedy")
        assert_empty(llm.engine)
        assert_same(workload, "greedy", tokens_of(llm, workload.prompts, "greedy"), f"after call {at}")


def test_ctrl_c_at_random_moments(case):
    llm, workload = case.llm, case.workload

    def check() -> None:
        assert_empty(llm.engine)
        assert_same(workload, "greedy", tokens_of(llm, workload.prompts, "greedy"), "after Ctrl-C")

    interrupt_at_random_moments(lambda: tokens_of(llm, workload.prompts, "greedy"), 6, check)


def test_memory_is_the_sum_over_the_gpus(case):
    """Each of two GPUs has half the heads; with more GPUs than heads, some hold the same ones."""
    alone, memory = case.workload.memory, case.llm.metrics()["memory_bytes"]
    copies = max(1, case.size // (4 if case.workload.directory == str(MODEL_DIRECTORY) else 2))
    assert memory["kv_cache"] == copies * alone["kv_cache"]
    assert alone["weights"] < memory["weights"] < case.size * alone["weights"]


# Death


def free_memory(num_gpus: int) -> list[int]:
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(index)[0] for index in range(num_gpus)]


@pytest.mark.parametrize(("size", "rank", "at"), [(2, 0, 1), (2, 1, 30), (4, 3, 8)])
def test_a_killed_rank_ends_the_run_and_gives_all_memory_back(tmp_path_factory, size, rank, at):
    """The others would spin in a collective for ever, and hold their GPUs."""
    skip_without(size)
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, seed=5, **TINY)
    before = free_memory(size)
    llm = LLM(str(directory), tensor_parallel_size=size, **{**OPTIONS, "num_kvcache_blocks": 20000})
    pids = pids_of(llm)
    held = [b - a for b, a in zip(before, free_memory(size), strict=True)]
    assert min(held) > 100 * MIB
    step, num_steps, killed_at = llm.engine.step, 0, 0.0

    def step_and_kill() -> list:
        nonlocal num_steps, killed_at
        num_steps += 1
        if num_steps == at:
            killed_at = time.monotonic()
            os.kill(pids[rank], signal.SIGKILL)
        return step()

    llm.engine.step = step_and_kill
    params = SamplingParams(0.0, max_tokens=400, ignore_eos=True)
    with pytest.raises(RuntimeError, match=f"^rank {rank} of {size} was killed by signal 9$"):
        llm.generate([[token, 1, 2] for token in range(12)], params, use_tqdm=False)
    seconds = time.monotonic() - killed_at
    print(f"{seconds:.2f} s until the error")
    assert seconds < 10
    assert not any(map(is_running, pids))
    # Both include the driver's own contexts, which the question itself made.
    wait_until(lambda: all(b - a < 50 * MIB for b, a in zip(before, free_memory(size), strict=True)), 5)
    left = [b - a for b, a in zip(before, free_memory(size), strict=True)]
    assert max(left) < 50 * MIB, left
    assert_refuses_work(llm, f"rank {rank} of {size} was killed by signal 9")


def test_more_ranks_than_gpus_is_an_error_that_says_so(tmp_path):
    skip_without(1)
    size = 1 << torch.cuda.device_count().bit_length()  # a power of two above the number of GPUs
    save_model(tmp_path, seed=5, **{**TINY, "num_attention_heads": 2 * size, "intermediate_size": 8 * size})
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match=f"tensor_parallel_size={size}"):
        LLM(str(tmp_path), tensor_parallel_size=size, **OPTIONS)
    assert time.monotonic() - began < 60
