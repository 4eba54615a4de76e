"""Processes that an LLM starts, and what they must not leave behind."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import nanovllm.parallel.parallel_runner
from nanovllm import LLM, SamplingParams


def children(parent: int | None = None) -> set[int]:
    """The processes that `parent` (this one) has started, zombies included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            if int(after_name[1]) == (parent or os.getpid()):
                found.add(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def listening_sockets() -> set[str]:
    """The inodes of all listening sockets of this machine."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {line[9] for line in lines if line[3] == "0A"}


def sockets_of(pids: list[int]) -> set[str]:
    links = [os.readlink(entry) for pid in pids for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}


@contextmanager
def nothing_left_behind(temporary: Path, monkeypatch) -> Iterator[None]:
    """Asserts that no process, open file, thread, temporary file or shared memory is left."""
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # else tempfile keeps the directory that it used before

    def state() -> dict[str, Any]:
        return {
            "children": children(),
            "open files": len(os.listdir("/proc/self/fd")),
            "threads": {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"},
            "files": sorted(path.name for path in temporary.iterdir()),
            # Ranks have no semaphores of multiprocessing, but other processes of this machine do.
            "shared memory": {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")},
        }

    before = state()
    yield
    # The threads that read and write end by themselves, moments after the processes at the other end.
    wait_until(lambda: state() == before, 2)
    assert state() == before


def pids_of(llm: LLM) -> list[int]:
    return [rank.process.pid for rank in llm.engine.runner._ranks]


FILTERS: dict[str, dict[str, Any]] = {
    "temperature alone": {},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_p": 0.9, "top_k": 5, "min_p": 0.05},
    "own seed": {"seed": 2**64 - 1},
    "stop tokens": {"stop_token_ids": [0, 1, 2, 3]},
    "min_tokens": {"stop_token_ids": [0, 1, 2, 3], "min_tokens": 4},
    "greedy min_tokens": {"stop_token_ids": [0, 1, 2, 3], "min_tokens": 4, "temperature": 0.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 2.0},
    "biases and bans": {"logit_bias": {1: 3.0, 5: -100.0}, "bad_words": [[2], [1, 3]], "top_k": 6},
    "allowed ids": {"allowed_token_ids": [6, 1, 3, 4], "temperature": 0.0},
}


LONG = SamplingParams(0.0, max_tokens=400, ignore_eos=True)


def assert_refuses_work(llm: LLM, message: str) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{message}; make a new LLM"):
            llm.generate([[1, 2, 3]], LONG, use_tqdm=False)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1, 2, 3]], LONG, use_tqdm=False)


# The package that is tested here, even if it is a copy.
SCRIPT_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(nanovllm.__file__).parents[1])}
