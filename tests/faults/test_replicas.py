"""Several engines on one queue of rows: each row once, the same results as from one engine, whichever replica dies."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.interrupts import interrupt_at_random_moments
from support.long import long, some
from support.processes import SCRIPT_ENVIRONMENT, children, is_running, nothing_left_behind, wait_until

from nanovllm import LLM, NOT_YET, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobOptions
from nanovllm.jobs.cli import main
from nanovllm.jobs.job import Job
from nanovllm.jobs.run import RowsRun
from nanovllm.replicas.pool import gpu_shares, merged_metrics
from nanovllm.replicas.replicas import Replicas

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

MODEL = str(MODEL_DIRECTORY)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 128}
PROMPTS = [f"Q: What is {number} + {7 * number % 50}?\nA:" for number in range(60)]
PARAMS = [
    SamplingParams(0.9 * (number % 3), max_tokens=4 + number % 17, ignore_eos=True, seed=number) for number in range(60)
]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM(MODEL, **OPTIONS) as llm:
        return [output.text for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def three() -> Iterator[Replicas]:
    with Replicas("bundled", data_parallel_size=3, **OPTIONS) as replicas:
        yield replicas


@pytest.fixture(autouse=True, scope="module")
def no_process_outlives_the_tests():
    before = children()
    yield
    assert children() == before


def run(replicas: Replicas, prompts=PROMPTS, params=PARAMS) -> list[RequestOutput]:
    """All outputs by number; each number once."""
    outputs = list(replicas.generate_iter(iter(prompts), iter(params)))
    numbers = sorted(output.prompt_index for output in outputs)
    assert numbers == list(range(len(prompts)))
    return sorted(outputs, key=lambda output: output.prompt_index)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


def pid(replicas: Replicas, index: int) -> int:
    return replicas._pool.processes[index].child.process.pid


# Results


def test_three_replicas_give_the_texts_of_one_engine_and_share_the_rows(three, expected):
    before = three.metrics()
    assert texts(run(three)) == expected
    metrics = three.metrics()
    assert metrics["num_requests"] - before["num_requests"] == 60
    shares = [process.metrics["num_requests"] for process in three._pool.processes]
    assert sum(shares) == metrics["num_requests"] and min(shares) >= 8


def test_rows_of_one_forward_pass_come_back_with_their_numbers(three):
    """In one call with rows that generate text, and with an error row."""
    label = PoolingParams("label", labels=(" 42", " 43"))
    params = [PoolingParams(), label, SamplingParams(0, max_tokens=4), PoolingParams("classify")] * 10
    with LLM(MODEL, **OPTIONS) as llm:
        expected = list(llm.generate_iter(PROMPTS[:40], params))
    for output, other in zip(run(three, PROMPTS[:40], params), expected, strict=True):
        assert type(output) is type(other) and (output.error, output.prompt) == (other.error, other.prompt)
        if isinstance(output, RequestOutput):
            assert output.text == other.text
        elif output.error is None:
            np.testing.assert_allclose(output.data, other.data, atol=1e-5)
            assert output.data.dtype == np.float32 and output.label == other.label
    assert [output.error is None for output in expected] == [True, True, True, False] * 10


def test_few_rows_spread_over_all_replicas(three):
    """The last rows of a job must do so."""
    before = [process.metrics["num_requests"] for process in three._pool.processes]
    run(three, PROMPTS[:12], PARAMS[:12])
    assert [process.metrics["num_requests"] for process in three._pool.processes] == [count + 4 for count in before]


def test_rows_of_several_completions_are_read_less_far_ahead(three):
    """Each counts as several sequences, so the other replicas would have nothing to do near the end."""
    read = []

    def prompts() -> Iterator[str]:
        for number, prompt in enumerate(PROMPTS):
            read.append(number)
            yield prompt

    outputs = three.generate_iter(prompts(), SamplingParams(0.8, n=4, max_tokens=3, seed=1))
    next(outputs)
    assert len(read) <= 4 + 2 + 2
    outputs.close()


def test_rows_are_read_as_there_is_room_and_each_with_its_own_parameters(three, expected):
    """A job gives the parameters of the prompt that was read last."""
    read = []

    def prompts() -> Iterator[str]:
        for number, prompt in enumerate(PROMPTS):
            read.append(number)
            yield prompt

    def params() -> Iterator[SamplingParams]:
        while True:
            yield PARAMS[read[-1]]

    outputs = three.generate_iter(prompts(), params())
    first = next(outputs)
    assert len(read) <= 3 * 2 * OPTIONS["max_num_seqs"] + 4
    found = {output.prompt_index: output.text for output in (first, *outputs)}
    assert [found[number] for number in range(60)] == expected


def test_a_source_may_wait_for_results(three):
    found: list[RequestOutput] = []

    def prompts() -> Iterator[Any]:
        for number in range(4):
            while len(found) < number:
                yield NOT_YET
            yield PROMPTS[number]

    for output in three.generate_iter(prompts(), replace(PARAMS[0], max_tokens=3)):
        found.append(output)
    assert [output.prompt_index for output in found] == [0, 1, 2, 3]


def test_log_probabilities_several_completions_and_error_rows_come_as_from_one_engine(three):
    prompts = [PROMPTS[0], "", {"messages": [{"role": "user", "content": "Hi"}]}, [1, 2, 3]]
    params = SamplingParams(0.7, max_tokens=5, n=2, seed=3, logprobs=2, prompt_logprobs=1)
    with LLM(MODEL, **OPTIONS) as llm:
        assert run(three, prompts, [params] * 4) == llm.generate(prompts, params, use_tqdm=False)


def test_an_iterator_that_is_cut_off_leaves_nothing_to_the_next_call(three, expected):
    def prompts() -> Iterator[str]:
        yield from PROMPTS[:20]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(three.generate_iter(prompts(), iter(PARAMS)))
    outputs = three.generate_iter(iter(PROMPTS), iter(PARAMS))
    next(outputs)
    with pytest.raises(RuntimeError, match="exhaust it, or close"):
        three.generate_iter(PROMPTS, PARAMS)
    outputs.close()
    assert list(outputs) == []
    next(three.generate_iter(iter(PROMPTS), iter(PARAMS)))  # dropped
    assert texts(run(three)) == expected


def test_ctrl_c_at_random_moments_leaves_nothing_to_the_next_call(three, expected, count):
    def check() -> None:
        assert texts(run(three, PROMPTS[:12], PARAMS[:12])) == expected[:12]

    interrupt_at_random_moments(lambda: run(three, PROMPTS[:30], PARAMS[:30]), count(5, 15), check)


def test_drain_finishes_what_has_started_and_reads_no_more(three, expected):
    read = []

    def prompts() -> Iterator[str]:
        for number, prompt in enumerate(PROMPTS):
            read.append(number)
            yield prompt

    outputs = three.generate_iter(prompts(), iter(PARAMS))
    found = [next(outputs)]
    num_read = len(read)
    outputs.drain()
    outputs.drain()
    found += outputs
    assert len(read) == num_read
    assert 2 <= len(found) < num_read and len({output.prompt_index for output in found}) == len(found)
    assert all(output.text == expected[output.prompt_index] and output.error is None for output in found)
    assert texts(run(three)) == expected


class Source(Iterator):
    """The prompts. Before the sixth one it runs `change`. A generator could not, because it cannot be entered twice."""

    def __init__(self, change: Callable[[], object]):
        self._change, self._prompts, self._num_read = change, iter(PROMPTS), 0

    def __next__(self) -> str:
        self._num_read += 1
        if self._num_read == 6:
            self._change()
        return next(self._prompts)


CHANGES: dict[str, Callable[[Replicas, Iterator], object]] = {
    "next": lambda replicas, iterator: next(iterator),
    "close the iterator": lambda replicas, iterator: iterator.close(),
    "drain": lambda replicas, iterator: iterator.drain(),
    "close": lambda replicas, iterator: replicas.close(),
}


def test_a_source_of_prompts_cannot_call_the_replicas(three, expected):
    """A source that asked its own iterator for a row once made the call wait for ever."""
    errors: list[str] = []

    def change() -> None:
        for call in CHANGES.values():
            with pytest.raises(RuntimeError, match=r"replicas are in the middle of a call, so .* source") as error:
                call(three, iterator)
            errors.append(str(error.value))
        with pytest.raises(RuntimeError, match="an iterator of generate_iter has not finished"):
            three.generate_iter(["Q"], PARAMS[0])

    iterator = three.generate_iter(Source(change), iter(PARAMS))
    outputs = sorted(iterator, key=lambda output: output.prompt_index)
    assert [output.text for output in outputs] == expected and len(errors) == len(CHANGES)
    with pytest.raises(RuntimeError, match="the replicas are in the middle of a call"):
        list(three.generate_iter(Source(three.close), iter(PARAMS)))
    assert [output.text for output in run(three)] == expected


def test_metrics_are_sums_and_rates_are_of_the_sums():
    one = {"num_prompt_tokens": 10, "num_cached_prompt_tokens": 10, "finish_reasons": {"stop": 1}, "max_batch_size": 4}
    two = {"num_prompt_tokens": 30, "num_cached_prompt_tokens": 0, "finish_reasons": {"length": 2}, "max_batch_size": 3}
    dead = {**two, "memory_bytes": {"weights": 5}, "num_kvcache_blocks": 7}
    merged = merged_metrics([{**one, "memory_bytes": {"weights": 5}, "num_kvcache_blocks": 7}, two], [dead])
    assert merged["prefix_cache_hit_rate"] == 10 / 70 and merged["max_batch_size"] == 7
    assert merged["finish_reasons"] == {"stop": 1, "length": 4}
    assert merged["memory_bytes"] == {"weights": 5} and merged["num_kvcache_blocks"] == 7


# A replica that dies


@pytest.fixture
def job(tmp_path):
    (tmp_path / "in").write_text(
        "".join(
            json.dumps({"id": f"r{number}", "prompt": prompt, "params": {"max_tokens": 4 + number % 17}}) + "\n"
            for number, prompt in enumerate(PROMPTS)
        )
    )

    def make(output: str, make_llm=None, size: int = 3, **options) -> Job:
        engine = {**OPTIONS, "data_parallel_size": size}
        made = JobOptions(
            str(tmp_path / "in"), str(tmp_path / output), MODEL, engine, {"temperature": 0.8}, preflight="off"
        )
        return Job(made, make_llm) if make_llm else Job(made)

    return make


@pytest.mark.long
def test_a_job_of_three_replicas_gives_the_file_of_one(job, tmp_path):
    job("one", size=1).run()
    report = job("three").run()
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()
    assert report["device_seconds"] > 3 * report["seconds"]["rows"]


@pytest.mark.parametrize(("size", "kills"), [(2, (20,)), long(3, (5, 30))])
def test_a_job_one_of_whose_replicas_is_killed_gives_the_same_file(job, tmp_path, monkeypatch, size, kills):
    job("one", size=1).run()
    made, taken = [], []

    def make_llm(model: str, **engine: Any) -> Replicas:
        made.append(Replicas(model, **engine))
        return made[0]

    take = RowsRun._take

    def take_and_kill(self, *arguments) -> None:
        taken.append(arguments)
        if len(taken) in kills:
            os.kill(pid(made[0], len(taken) % size), signal.SIGKILL)
        take(self, *arguments)

    monkeypatch.setattr(RowsRun, "_take", take_and_kill)
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    with nothing_left_behind(tmp_path / "temporary", monkeypatch):
        report = job("killed", make_llm, size).run()
    assert len(made[0]._pool.of_dead) == len(kills), "no replica died during the job"
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "one").read_bytes()
    assert len(taken) == 60 and report["rows"]["errors"] == 0


@pytest.mark.parametrize("how", some(["is killed", "raises"], "is killed"))
def test_a_row_that_kills_its_replica_becomes_one_error_row(expected, how, monkeypatch, tmp_path):
    """Its neighbours were once run again together with it, died with it, and became error rows as well. The error row
    is of the class of the row's other outputs."""
    monkeypatch.setenv("FATAL_TEXT", "POISON")
    monkeypatch.setenv("HOW", how)
    prompts, params = [*PROMPTS], [*PARAMS]
    prompts[17] = "POISON"
    kind = RequestOutput
    if how == "is killed":
        params[17], kind = PoolingParams("label", labels=("a", "b")), PoolingRequestOutput
    with (
        nothing_left_behind(tmp_path, monkeypatch),
        Replicas(MODEL, data_parallel_size=2, replica_module="support.faulty_replica", **OPTIONS) as replicas,
    ):
        outputs = run(replicas, prompts, params)
        assert len(replicas._pool.of_dead) == 3
        del replicas
    assert [output.error is not None for output in outputs] == [number == 17 for number in range(60)]
    reason = "was killed by signal 9" if how == "is killed" else "MemoryError: the row is too large"
    assert "died 3 times while it ran this row" in outputs[17].error and reason in outputs[17].error
    assert type(outputs[17]) is kind and (outputs[17].request_id, outputs[17].prompt) == ("17", "POISON")
    assert texts(outputs[:17] + outputs[18:]) == expected[:17] + expected[18:]


@pytest.mark.long
def test_replicas_that_die_of_every_row_end_the_call(monkeypatch, tmp_path):
    monkeypatch.setenv("FATAL_TEXT", "Q:")
    with (
        nothing_left_behind(tmp_path, monkeypatch),
        Replicas(MODEL, data_parallel_size=1, replica_module="support.faulty_replica", **OPTIONS) as replicas,
    ):
        outputs = replicas.generate_iter(PROMPTS, PARAMS)
        with pytest.raises(RuntimeError, match=r"replica 0 of 1 was killed by signal 9; replicas died 6 times"):
            list(outputs)
        with pytest.raises(RuntimeError, match=r"died 6 times.*make new Replicas"):
            replicas.generate_iter(PROMPTS, PARAMS)
        del replicas, outputs


def test_a_replica_that_dies_between_two_calls_is_replaced(three, expected):
    before = pid(three, 1)
    os.kill(before, signal.SIGKILL)
    assert texts(run(three)) == expected
    assert pid(three, 1) != before


# Start and end


@pytest.mark.long
def test_a_replica_that_cannot_start_says_why_and_is_not_started_again(monkeypatch, tmp_path):
    with (
        nothing_left_behind(tmp_path, monkeypatch),
        pytest.raises(RuntimeError, match=r"num_kvcache_blocks=\d+ needs .* GiB more.*replica [01] of 2"),
    ):
        Replicas(MODEL, data_parallel_size=2, num_kvcache_blocks=10**8, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"replica [01] of 2 ended with exit status 1 while it started"):
        Replicas(MODEL, data_parallel_size=2, replica_module="no_such_module", **OPTIONS)
    with pytest.raises(TypeError, match="did you mean"):
        Replicas(MODEL, data_parallel_size=2, max_num_seq=3)


def test_each_replica_gets_gpus_of_its_own_out_of_those_that_are_visible(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def given(size: int, of_each: int = 1, device: str = "auto") -> list[str | None]:
        config = Config(MODEL, device=device, tensor_parallel_size=of_each)
        return [settings.get("CUDA_VISIBLE_DEVICES") for settings in gpu_shares(config, size)]

    assert given(3) == ["0", "1", "2"] and given(2, 2) == ["0,1", "2,3"] and given(2, device="cpu") == [None, None]
    with pytest.raises(ValueError, match=r"data_parallel_size=3 times .*=2 takes 6 GPUs.*there are 4"):
        given(3, 2)
    with pytest.raises(ValueError, match="'cuda:1' is one GPU"):
        given(2, device="cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5c, 3,1")
    assert given(2, 2, "cuda") == ["7,GPU-5c", "3,1"]


SCRIPT = """
import os, sys
from nanovllm import SamplingParams
from nanovllm.replicas.replicas import Replicas

size = int(sys.argv[2])
replicas = Replicas(sys.argv[1], data_parallel_size=size, tensor_parallel_size=2, device="cpu", max_num_seqs=4,
                    max_model_len=128)
print(*(pid for each in replicas._pool.processes for pid in (each.child.process.pid, *each.pids)), flush=True)
params = SamplingParams(0.0, max_tokens=20, ignore_eos=True)
print(sum(1 for _ in replicas.generate_iter(iter(["Q"] * 8), params)), flush=True)
"""


@pytest.mark.parametrize(("ending", "size"), [("killed", 1), long("killed", 2), long("by itself", 2)])
def test_a_parent_that_ends_leaves_neither_replicas_nor_their_ranks_behind(ending, size, tmp_path):
    script = tmp_path / "script.py"
    endless = "for _ in replicas.generate_iter(iter(lambda: 'Q', None), params): print('row', flush=True)"
    script.write_text(SCRIPT + (endless if ending == "killed" else ""))
    with subprocess.Popen(
        [sys.executable, script, MODEL, str(size)], env=SCRIPT_ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            pids = list(map(int, process.stdout.readline().split()))
            assert len(set(pids)) == 3 * size
            assert process.stdout.readline() == "8\n"
            if ending == "killed":
                assert process.stdout.readline() == "row\n" and all(map(is_running, pids))
                process.kill()
            else:
                assert process.wait(30) == 0
        finally:
            process.kill()
    try:
        assert wait_until(lambda: not any(map(is_running, pids)), 10)
    finally:
        for each in filter(is_running, pids):
            os.kill(each, signal.SIGKILL)


@pytest.mark.long
def test_the_command_takes_the_number_of_replicas(job, tmp_path):
    job("one", size=1).run()
    arguments = f"run-batch -i {tmp_path}/in -o {tmp_path}/out --model {MODEL} --device cpu --max-num-seqs 4"
    options = "--max-model-len 128 --data-parallel-size 2 --temperature 0.8"
    assert main([*arguments.split(), *options.split()]) == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "one").read_bytes()
