"""Runs steps on several devices: starts a Worker process for each rank, writes them the log of the schedule, collects
their tokens, and ends them all when one of them fails.

The driver's LLMEngine holds requests and tokens. Its Scheduler takes the same decisions as every rank's own Scheduler,
because each entry of the log stands at the point of the schedule where it took effect.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np

import nanovllm
from nanovllm.config import Config
from nanovllm.engine.runner import Runner, RunnerInfo
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step, StepOutput
from nanovllm.parallel.worker import fingerprint, frame, messages, pack_masks, unpack_output
from nanovllm.sampling_params import SamplingParams

_SECONDS_TO_END = 5.0
_SECONDS_TO_FIND_THE_CULPRIT = 0.5
# What the driver's stop predicates do is theirs alone.
_SAMPLING_FIELDS = [each.name for each in fields(SamplingParams) if each.name not in ("stop", "structured_outputs")]
_ERRORS = {"ValueError": ValueError, "TypeError": TypeError}


@dataclass
class _Rank:
    process: subprocess.Popen
    socket: socket.socket


class _ParallelStep:
    """A launched step; see LaunchedStep."""

    def __init__(self, runner: "TensorParallelRunner", number: int):
        self._runner, self._number = runner, number

    def constrain(self, masks: np.ndarray, rows: list[int]) -> None:
        self._runner.constrain(self._number, masks, rows)

    def wait(self) -> StepOutput:
        return self._runner.output_of(self._number)


class TensorParallelRunner(Runner):
    """A model split over `config.tensor_parallel_size` ranks.

    Args:
        config: the options; each rank gets them as they are.
        worker_module: what a rank runs.

    Raises:
        ValueError, TypeError, RuntimeError: a rank's own error at its start, or its death.
    """

    def __init__(self, config: Config, worker_module: str = "nanovllm.parallel.worker"):
        from nanovllm.models.config import load_model_config
        from nanovllm.models.loader import find_model  # imports torch

        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        load_model_config(directory).check_parallel_size(config.tensor_parallel_size)
        self._size, self._driver = config.tensor_parallel_size, os.getpid()
        self._ranks: list[_Rank] = []
        self._inbox: SimpleQueue = SimpleQueue()  # (rank, message)
        self._outbox: SimpleQueue = SimpleQueue()  # bytes for all ranks; None to end
        self._failure: str | None = None
        self._troubles: list[tuple[int, Any]] = []  # messages that end it all, kept where no Ctrl-C loses them
        self._num_asked = 1  # tags below are those of the start
        self._num_launched = self._num_committed = 0
        self._undefined: list[str] = []
        # Runs when this object or the interpreter ends, whatever happened.
        self._end = weakref.finalize(self, _end, self._ranks, self._outbox, self._driver)
        try:
            for rank in range(self._size):
                self._ranks.append(_start_rank(worker_module, rank, self._size))
                level = logging.getLogger("nanovllm").getEffectiveLevel()
                _start_thread(_read, self._ranks[rank].socket, rank, self._inbox, self._troubles)
                with contextlib.suppress(OSError):  # its reader hears that it is gone
                    self._ranks[rank].socket.sendall(frame([vars(config), rank, self._size, level]))
            _start_thread(_write, [rank.socket for rank in self._ranks], self._outbox)
            self._outbox.put(frame([self._replies(0)[0]]))
            found = self._replies(1)
        except BaseException:
            self._failure = self._failure or "the ranks did not start"
            self._end()
            raise
        info, _ = found[0]
        self.info = RunnerInfo(**{**info, "eos_token_ids": frozenset(info["eos_token_ids"])})
        self._memory = _sums([of_rank for _, of_rank in found])

    def launch(self, step: Step) -> _ParallelStep:
        self._num_launched += 1
        self._write("launch", self._num_launched, fingerprint(step))
        return _ParallelStep(self, self._num_launched)

    def constrain(self, number: int, masks: np.ndarray, rows: list[int]) -> None:
        """See LaunchedStep."""
        self._write("constrain", number, rows, *pack_masks(masks))

    def output_of(self, number: int) -> StepOutput:
        """What step `number` computed; nothing if it will not be committed."""
        if number <= self._num_committed:
            return StepOutput([])
        (expected, output), *others = self._ask("wait", number)
        for rank, (found, _) in enumerate(others, 1):
            if found != expected:
                self._fail(f"the ranks diverged at step {number}, which is a bug: rank {rank} sampled other tokens")
        return unpack_output(*output)

    def update_weights(self, weights: list[Any]) -> None:
        from nanovllm.models.loader import given_tensors
        from nanovllm.parallel.weight_files import written_weights

        tensors = given_tensors(weights)
        with written_weights(tensors) as directory:
            self._raise_refusal(self._ask("check_update", directory))
            # All ranks copy now. If Ctrl-C ends the wait for them, nobody knows that they have.
            self._undefined = sorted({*self._undefined, *tensors})
            undefined, *_ = self._ask("load_update")
        self._undefined = undefined

    def undefined_weights(self) -> list[str]:
        return self._undefined

    def sleep(self, level: int) -> None:
        replies = self._ask("sleep", level)
        self._undefined = replies[0][0]
        self._memory = _sums([memory for _, memory in replies])

    def wake_up(self) -> None:
        refusals = self._ask("restore")
        if any(refusals):
            self.sleep(1)  # the others; a rank knows if it slept deeper
            self._raise_refusal(refusals)
        self._memory = _sums(self._ask("capture"))

    def _raise_refusal(self, refusals: list[list[str] | None]) -> None:
        for rank, refusal in enumerate(refusals):
            if refusal is not None:
                name, message = refusal
                raise _ERRORS.get(name, RuntimeError)(f"{message} (rank {rank} of {self._size})")

    def request_added(self, sequences: list[Sequence]) -> None:
        seq = sequences[0]
        params = {name: getattr(seq.sampling_params, name) for name in _SAMPLING_FIELDS}
        numbers = seq.max_length, list(seq.stop_token_ids), seq.seed, seq.next_scored, seq.is_constrained
        self._write("add", seq.seq_id, seq.token_ids, params, *numbers)

    def request_aborted(self, seq: Sequence) -> None:
        self._write("abort", seq.seq_id)

    def step_committed(self, stopped: list[int], broken: list[int]) -> None:
        self._num_committed += 1
        self._write("commit", self._num_committed, stopped, broken)

    def scheduler_renewed(self) -> None:
        self._num_committed = self._num_launched
        if self._failure is None and os.getpid() == self._driver:
            self._write("renew")

    def memory(self) -> dict[str, int]:
        return {} if self._failure is not None else dict(self._memory)

    def close(self) -> None:
        if self._end.alive and self._failure is None and os.getpid() == self._driver:
            self._outbox.put(frame([None, "close"]))
            deadline = time.monotonic() + _SECONDS_TO_END
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._failure = self._failure or "the ranks are closed"
        self._end()

    def _write(self, kind: str, *arguments: Any, tag: int | None = None) -> None:
        if self._failure is not None:
            raise RuntimeError(f"{self._failure}; make a new LLM")
        if os.getpid() != self._driver:
            raise RuntimeError("this process is a fork of the one that the ranks work for; make an engine of its own")
        self._outbox.put(frame([tag, kind, *arguments]))

    def _ask(self, kind: str, *arguments: Any) -> list:
        """Every rank's answer to an entry of the log."""
        self._num_asked += 1
        tag = self._num_asked
        self._write(kind, *arguments, tag=tag)
        return self._replies(tag)

    def _replies(self, tag: int) -> list:
        """Every rank's answer."""
        replies: dict[int, Any] = {}
        while len(replies) < self._size:
            if self._failure is not None:  # closed during the wait, by another thread or a signal's handler
                raise RuntimeError(self._failure)
            if self._troubles:
                self._explain(*self._troubles[0])
            rank, message = self._inbox.get()
            if message[0] == tag:  # not the answer to something that was interrupted
                replies[rank] = message[1]
        return [replies[rank] for rank in range(self._size)]

    def _explain(self, rank: int, message: dict[str, str] | None) -> NoReturn:
        """Ends all ranks because of what was heard of one: its error, or nothing more at all."""
        if message is None:
            self._fail(self._death_of(rank))
        # A rank that died makes the collectives of the others fail, which may be heard of first.
        time.sleep(_SECONDS_TO_FIND_THE_CULPRIT)
        dead = [other for other, it in enumerate(self._ranks) if it.process.poll() is not None]
        if dead:
            self._fail(self._death_of(dead[0]))
        name, text = message["error"], message["message"] or "nothing more is known"
        prefix = "" if name in (*_ERRORS, "RuntimeError") else f"{name}: "
        self._fail(f"{prefix}{text} (rank {rank} of {self._size})", _ERRORS.get(name, RuntimeError))

    def _death_of(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ranks[rank].process.wait(1.0)
        code = self._ranks[rank].process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit status {code}"
        return f"rank {rank} of {self._size} {how}"

    def _fail(self, message: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        self._failure = message
        self._end()
        raise kind(message)


def _sums(of_ranks: list[dict[str, int]]) -> dict[str, int]:
    return {use: sum(of_rank[use] for of_rank in of_ranks) for use in of_ranks[0]}


def _start_rank(module: str, rank: int, size: int) -> _Rank:
    ours, theirs = socket.socketpair()
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Multicast over NVLink needs rights that containers seldom have.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    # What can be imported here can be imported there, and nothing from the working directory besides. PYTHONPATH would
    # come before the standard library. The rank gets this very package, not another of the same name.
    path, package = [entry for entry in sys.path if isinstance(entry, str) and entry], Path(nanovllm.__file__).parent
    program = f"""import sys; sys.path[:] = {path!r}
import importlib.util, runpy
spec = importlib.util.spec_from_file_location(
    "nanovllm", {nanovllm.__file__!r}, submodule_search_locations=[{str(package)!r}]
)
sys.modules["nanovllm"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["nanovllm"])
runpy.run_module({module!r}, run_name="__main__")"""
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env={**defaults, **os.environ},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver alone
        )
    return _Rank(process, ours)


def _start_thread(target, *arguments) -> None:
    # Signals reach only the main thread, so neither reading nor writing is ever cut short by Ctrl-C.
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _read(sock: socket.socket, rank: int, inbox: SimpleQueue, troubles: list[tuple[int, Any]]) -> None:
    try:
        for message in messages(sock):
            if isinstance(message, dict):
                troubles.append((rank, message))
                message = [None]  # wakes whoever waits
            inbox.put((rank, message))
    finally:
        troubles.append((rank, None))
        inbox.put((rank, [None]))
        sock.close()


def _write(sockets: list[socket.socket], outbox: SimpleQueue) -> None:
    for data in iter(outbox.get, None):
        for sock in sockets:
            with contextlib.suppress(OSError):  # the reader will hear of it
                sock.sendall(data)


def _end(ranks: list[_Rank], outbox: SimpleQueue, driver: int) -> None:
    if os.getpid() != driver:  # a fork of it, which ends without its parent
        return
    outbox.put(None)
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        # Its reader closes it. Closed here, its number might become another file's while the reader still uses it.
        with contextlib.suppress(OSError):
            rank.socket.shutdown(socket.SHUT_RDWR)
