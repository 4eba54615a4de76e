"""CPU threads: as many as the machine has free, and no setting stays changed."""

import os
import subprocess
import sys
import time

import pytest
import torch

from nanovllm import LLM, SamplingParams, cpu_threads
from nanovllm.cpu_threads import CpuThreads, choose_num_threads
from nanovllm.demo import MODEL_DIRECTORY

# The choice


def test_an_idle_machine_gives_all_its_threads():
    for most in range(1, 300):
        assert choose_num_threads(most, most, 0.0) == choose_num_threads(most, 2 * most, 0.0) == most
        assert choose_num_threads(most, most, 0.25) == most, "a little is always going on"


@pytest.mark.parametrize(
    ("most", "num_cpus", "num_busy", "expected"),
    [
        (2, 2, 0.5, 1),  # half the time two threads would wait for one another
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),
        (2, 2, 9.0, 1),
        (4, 4, 1.0, 3),
        (4, 4, 2.4, 1),
        (8, 8, 3.0, 5),
        (8, 16, 3.0, 8),  # hyperthreads: there are enough CPUs for one thread per core
        (8, 16, 12.0, 4),
        (64, 64, 1.0, 56),
        (64, 64, 63.0, 16),  # its share of a full machine
        (2, 64, 62.0, 2),
        (64, 8, 0.0, 8),  # more than one per CPU is never right
    ],
)
def test_a_busy_machine_gives_what_others_leave(most, num_cpus, num_busy, expected):
    """Two threads on two CPUs, one of them busy, took eight times as long as one thread."""
    assert choose_num_threads(most, num_cpus, num_busy) == expected


def test_the_choice_is_in_range_falls_with_the_load_and_has_few_values():
    """Each number of threads costs oneDNN a set of kernels, of half a megabyte each."""
    for most, num_cpus in ((1, 1), (2, 2), (6, 12), (13, 13), (64, 128), (192, 192)):
        choices = [choose_num_threads(most, num_cpus, busy / 10) for busy in range(20 * num_cpus)]
        assert choices == sorted(choices, reverse=True)
        assert choices[0] == most and choices[-1] >= 1
        assert len(set(choices)) <= 16
        assert choices[-1] <= max(1, num_cpus // 4)


# The load


class Machine:
    """A clock, and CPUs of which other processes use `busy`."""

    def __init__(self, num_cpus: int = 4, own_busy: float = 0.0):
        self.now, self.busy, self.own_busy, self.num_cpus = 1000.0, 0.0, own_busy, num_cpus
        self.all, self.own = 500.0, 70.0

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.own += seconds * self.own_busy
        self.all += seconds * (self.own_busy + self.busy)


@pytest.fixture
def machine(monkeypatch) -> Machine:
    """Four CPUs, and four threads as PyTorch's own choice."""
    machine = Machine()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_threads, "cpus", lambda: set(range(machine.num_cpus)))
    monkeypatch.setattr(cpu_threads, "cpu_quotas", lambda: [])
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield machine
    torch.set_num_threads(before)


def threads_of(machine: Machine, **options) -> CpuThreads:
    return CpuThreads(clock=lambda: machine.now, cpu_seconds=lambda: (machine.all, machine.own), **options)


def test_the_load_since_the_last_look_decides_at_the_start(machine):
    threads = threads_of(machine)
    machine.busy = 2.0
    machine.run(5.0)
    with threads:
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4


def test_what_this_process_uses_itself_is_not_a_load(machine):
    """An engine that counted its own threads as load would go down to one thread and stay there."""
    threads = threads_of(machine)
    machine.own_busy = 4.0
    with threads:
        for _ in range(50):
            machine.run(0.1)
            threads.adapt()
            assert torch.get_num_threads() == 4


def test_threads_go_down_at_once_and_up_when_two_looks_agree(machine):
    """If another process sleeps now and then, the number must not change all the time."""
    with threads_of(machine) as threads:
        seen = []
        for busy in (0, 0, 3, 3, 0, 0, 0, 3, 0, 3, 0, 0):
            machine.busy = busy
            machine.run(0.25)
            threads.adapt()
            seen.append(torch.get_num_threads())
    assert seen == [4, 4, 1, 1, 1, 4, 4, 1, 1, 1, 1, 4]


def test_most_steps_only_look_at_the_clock(machine):
    """Reading /proc for each of 1,000 steps per second would be a load of its own."""
    num_looks = 0

    def look():
        nonlocal num_looks
        num_looks += 1
        return machine.all, machine.own

    with CpuThreads(clock=lambda: machine.now, cpu_seconds=look) as threads:
        for _ in range(1000):
            machine.run(0.001)
            threads.adapt()
    assert num_looks <= 8


def test_calls_one_right_after_the_other_keep_what_was_found(machine):
    """Within a hundredth of a second the system's counters say nothing."""
    threads = threads_of(machine)
    machine.busy = 3.0
    machine.run(1.0)
    for _ in range(5):
        with threads:
            assert torch.get_num_threads() == 1
        machine.all += 0.02  # a tick, out of turn
        machine.run(0.001)


def test_a_system_that_does_not_tell_its_load_keeps_pytorchs_choice(machine):
    with CpuThreads(clock=lambda: machine.now, cpu_seconds=lambda: None) as threads:
        for _ in range(5):
            machine.run(1.0)
            threads.adapt()
            assert torch.get_num_threads() == 4


def test_a_containers_quota_is_a_limit(machine, monkeypatch):
    """PyTorch starts a thread per CPU of the host; in a container with two CPUs' worth of time, these wait for each
    other.
    """
    monkeypatch.setattr(cpu_threads, "cpu_quotas", lambda: [2])
    with threads_of(machine):
        assert torch.get_num_threads() == 2
    monkeypatch.setattr(cpu_threads, "cpu_quotas", lambda: [0, 8])
    with threads_of(machine):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


# The user's own choice


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_environments_number_stays(machine, monkeypatch, name, caplog):
    monkeypatch.setenv(name, "4")
    threads = threads_of(machine)
    machine.busy = 4.0
    machine.run(5.0)
    with caplog.at_level("INFO"), threads:
        threads.adapt()
        assert torch.get_num_threads() == 4
    assert [record.getMessage() for record in caplog.records] == [f"number of CPU threads is 4: {name} is set"]


def test_a_number_set_with_torch_stays(machine, monkeypatch, caplog):
    monkeypatch.setattr(cpu_threads, "num_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    threads = threads_of(machine)
    machine.busy = 4.0
    machine.run(5.0)
    torch.set_num_threads(3)
    with caplog.at_level("INFO"), threads:
        threads.adapt()
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3
    assert caplog.records[0].getMessage() == "number of CPU threads is 3: the number was set with torch.set_num_threads"


def test_who_computes_elsewhere_changes_nothing(machine):
    """Such an engine is on a GPU, or its ranks are separate processes."""
    threads = threads_of(machine, is_used=False)
    machine.busy = 4.0
    machine.run(5.0)
    with threads:
        threads.adapt()
        assert torch.get_num_threads() == 4


# Settings that stay, and log messages


def test_the_number_is_given_back_after_an_error_too(machine):
    threads = threads_of(machine)
    machine.busy = 3.0
    machine.run(5.0)
    with pytest.raises(ZeroDivisionError), threads:
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 4
    threads.adapt()
    assert torch.get_num_threads() == 4


def test_the_log_says_what_was_chosen_and_why_once_per_change(machine, caplog):
    threads = threads_of(machine)
    with caplog.at_level("INFO"):
        for busy in (0, 0, 2, 2, 2):
            machine.busy = busy
            machine.run(1.0)
            with threads:
                threads.adapt()
    assert [record.getMessage() for record in caplog.records] == [
        "number of CPU threads is 4: other processes use 0.0 of 4 CPUs",
        "number of CPU threads is 2: other processes use 2.0 of 4 CPUs",
    ]


# The real thing


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux tells what each CPU does")
def test_the_systems_counters_tell_busy_from_idle():
    """The counters are in seconds, not ticks. They count all processes, not only this one, and only our CPUs."""
    before = cpu_threads._cpu_seconds()
    assert before is not None and before[0] > before[1] > 0
    deadline = time.process_time() + 0.3
    while time.process_time() < deadline:
        pass
    after = cpu_threads._cpu_seconds()
    assert 0.25 < after[1] - before[1] < 2.0
    assert after[0] - before[0] > 0.2


PROGRAM = """
import itertools, sys, torch
from nanovllm import LLM, SamplingParams
from nanovllm import cpu_threads

seconds = itertools.count(0.0, 1e9)
cpu_threads._cpu_seconds = lambda: (next(seconds), 0.0)  # others are busy without end
cpu_threads._MIN_SECONDS_TO_JUDGE_BY = 0.0  # a fast machine makes the LLM and calls it within less
before = torch.get_num_threads()
with LLM(sys.argv[1], device="cpu", num_kvcache_blocks=64) as llm:
    step, seen = llm.engine.step, set()
    llm.engine.step = lambda: seen.add(torch.get_num_threads()) or step()
    llm.generate("Hi", SamplingParams(max_tokens=3), use_tqdm=False)
    print(before, *seen, torch.get_num_threads())
"""


def test_a_call_computes_with_what_was_chosen_and_gives_it_back():
    """On two CPUs that others used too, the engine's own default once took 207 s where one thread took 16 s."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODEL_DIRECTORY)], capture_output=True, text=True, timeout=60,
        env={name: value for name, value in os.environ.items() if name not in names},
    )  # fmt: skip
    before, *seen, after = map(int, result.stdout.split())
    assert seen == [choose_num_threads(before, len(cpu_threads.cpus()), 1e9)], result.stderr
    assert after == before


def test_the_load_is_looked_at_before_each_step(monkeypatch):
    """The load changes during a call of hours, so the choice at its start may not stay right."""
    seen = []
    adapt = CpuThreads.adapt
    monkeypatch.setattr(CpuThreads, "adapt", lambda threads: seen.append("look") or adapt(threads))
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda: seen.append("step") or step())
        llm.generate("Hi", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert seen == ["look", "step"] * (len(seen) // 2) and len(seen) >= 10


def test_an_llm_honours_the_environment():
    """The tests themselves run with OMP_NUM_THREADS=1."""
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        before = torch.get_num_threads()
        llm.generate("Hi", SamplingParams(max_tokens=3), use_tqdm=False)
        assert torch.get_num_threads() == before
