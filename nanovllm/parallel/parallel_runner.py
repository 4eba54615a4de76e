"""Runs steps on several devices: starts a Worker process for each rank, writes them the log of the schedule, collects
their tokens, and ends them all when one of them fails.

The driver's LLMEngine holds requests and tokens. Its Scheduler makes the same decisions as every rank's own Scheduler,
because the log has each change at the point of the schedule where it took effect.
"""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np

from nanovllm.child_processes import ERRORS, Child, end_children, frame, start_child, start_reader, start_writer
from nanovllm.config import Config
from nanovllm.engine.block_manager import Snapshots, WindowGroups
from nanovllm.engine.runner import Runner, RunnerInfo
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step, StepOutput, WrongSlot
from nanovllm.lora import LoRARequest
from nanovllm.models.directory import find_model
from nanovllm.models.read_config import load_model_config
from nanovllm.models.weight_parts import tensor_digests
from nanovllm.parallel.sent_adapters import sent_adapter
from nanovllm.parallel.weight_files import weights_directories, written_weights
from nanovllm.parallel.worker import HAS_MET, fingerprint, pack_masks, unpack_output
from nanovllm.sampling_params import SamplingParams

# The ranks import torch first, which takes minutes if the disk is slow.
_SECONDS_TO_MEET = 300
_SECONDS_TO_END = 5.0
_SECONDS_TO_FIND_THE_CULPRIT = 0.5
# The driver's stop predicates do the work of the other fields.
_SAMPLING_FIELDS = [each.name for each in fields(SamplingParams) if each.name not in ("stop", "structured_outputs")]


class _ParallelStep:
    """A launched step; see LaunchedStep."""

    def __init__(self, runner: "TensorParallelRunner", number: int):
        self._runner, self._number = runner, number

    def constrain(self, masks: np.ndarray, rows: list[int], changes: Mapping[int, Any]) -> None:
        assert not changes, "the engine refuses logits_processors for several ranks"
        self._runner.constrain(self._number, masks, rows)

    def wait(self) -> StepOutput:
        return self._runner.output_of(self._number)


class TensorParallelRunner(Runner):
    """A model split over `config.tensor_parallel_size` ranks.

    Args:
        config: the options; each rank gets them as they are.
        worker_module: the module that a rank runs.

    Raises:
        ValueError, TypeError, RuntimeError: a rank's own error at its start, or its death.
    """

    def __init__(self, config: Config, worker_module: str = "nanovllm.parallel.worker"):
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        load_model_config(directory).check_parallel_size(config.tensor_parallel_size)
        self._size, self._driver = config.tensor_parallel_size, os.getpid()
        self._ranks: list[Child] = []
        self._inbox: SimpleQueue = SimpleQueue()  # (rank, message)
        self._outbox: SimpleQueue = SimpleQueue()  # bytes for all ranks; None to end
        self._failure: str | None = None
        self._troubles: list[tuple[int, Any]] = []  # errors and deaths of ranks, kept where Ctrl-C cannot lose them
        self._num_asked = 0  # tag 0 is that of the start
        self._num_launched = self._num_committed = 0
        self._undefined: list[str] = []
        # Runs when this object or the interpreter ends, after any error.
        self._meeting_place = place = tempfile.mkdtemp(prefix="nanovllm-ranks-")  # which no other user may enter
        paths = [place, *map(str, weights_directories(place))]
        self._end = weakref.finalize(self, end_children, self._ranks, [self._outbox], self._driver, *paths)
        try:
            for rank in range(self._size):
                self._ranks.append(_start_rank(worker_module, rank, self._size, paths))
                level = logging.getLogger("nanovllm").getEffectiveLevel()
                start_reader(self._ranks[rank], partial(_hear, rank, self._inbox, self._troubles))
                with contextlib.suppress(OSError):  # its reader notices that the rank is gone
                    self._ranks[rank].socket.sendall(frame([vars(config), rank, self._size, level, place]))
            start_writer(self._ranks, self._outbox)
            self._replies(HAS_MET, _SECONDS_TO_MEET)
            found = self._replies(0)
        except BaseException:
            self._failure = self._failure or "the ranks did not start"
            self._end()
            raise
        info, _ = found[0]
        eos_token_ids, windows = frozenset(info["eos_token_ids"]), WindowGroups(*info["windows"])
        snapshots = Snapshots(*info["snapshots"])
        self.info = RunnerInfo(**{**info, "eos_token_ids": eos_token_ids, "windows": windows, "snapshots": snapshots})
        self._memory = _sums([of_rank for _, of_rank in found])

    def launch(self, step: Step) -> _ParallelStep:
        self._num_launched += 1
        self._write("launch", self._num_launched, fingerprint(step))
        return _ParallelStep(self, self._num_launched)

    def constrain(self, number: int, masks: np.ndarray, rows: list[int]) -> None:
        """See LaunchedStep."""
        self._write("constrain", number, rows, *pack_masks(masks))

    def output_of(self, number: int) -> StepOutput:
        """The result of step `number`; an empty one if the step will not be committed."""
        if number <= self._num_committed:
            return StepOutput([])
        replies = self._ask("wait", number)
        (expected, _, output), *others = replies
        if wrong_slots := [WrongSlot(*slot) for _, slot, _ in replies if slot is not None]:
            return StepOutput([], wrong_slot=wrong_slots[0])
        for rank, (found, *_) in enumerate(others, 1):
            if found != expected:
                self._fail(f"the ranks diverged at step {number}, which is a bug: rank {rank} sampled other tokens")
        return unpack_output(*output)

    def update_weights(self, weights: list[Any]) -> None:
        from nanovllm.models.tensors import given_tensors

        tensors = given_tensors(weights)
        with written_weights(tensors, self._meeting_place) as directory:
            self._raise_refusal(self._ask("check_update", directory))
            # All ranks copy now. If Ctrl-C ends the wait for them, it is not known whether they have.
            self._undefined = sorted({*self._undefined, *tensors})
            undefined, *_ = self._ask("load_update")
        self._undefined = undefined

    def set_adapter(self, slot: int, request: LoRARequest | None) -> None:
        with sent_adapter(request, self._meeting_place) as sent:
            self._raise_refusal(self._ask("check_adapter", slot, sent))
        self._ask("set_adapter")

    def undefined_weights(self) -> list[str]:
        return self._undefined

    def weight_digests(self) -> dict[str, str]:
        return tensor_digests(self._ask("weight_parts"))

    def sleep(self, level: int) -> None:
        replies = self._ask("sleep", level)
        self._undefined = replies[0][0]
        self._memory = _sums([memory for _, memory in replies])

    def wake_up(self) -> None:
        refusals = self._ask("restore")
        if any(refusals):
            self.sleep(1)  # the ranks that woke up; the others keep their level
            self._raise_refusal(refusals)
        self._memory = _sums(self._ask("capture"))

    def _raise_refusal(self, refusals: list[list[str] | None]) -> None:
        for rank, refusal in enumerate(refusals):
            if refusal is not None:
                name, message = refusal
                raise ERRORS.get(name, RuntimeError)(f"{message} (rank {rank} of {self._size})")

    def request_added(self, sequences: list[Sequence]) -> None:
        seq = sequences[0]
        params = {name: getattr(seq.sampling_params, name) for name in _SAMPLING_FIELDS}
        numbers = seq.max_length, list(seq.stop_token_ids), seq.seed, seq.next_scored, seq.is_constrained
        self._write("add", seq.seq_id, seq.token_ids.tolist(), params, *numbers, seq.pooling, seq.adapter)

    def request_aborted(self, seq: Sequence) -> None:
        self._write("abort", seq.seq_id)

    def nothing_scheduled(self) -> None:
        self._write("schedule nothing")

    def step_committed(self, stopped: list[int], broken: list[int]) -> None:
        self._num_committed += 1
        self._write("commit", self._num_committed, stopped, broken)

    def scheduler_renewed(self) -> None:
        self._num_committed = self._num_launched
        if self._failure is None and os.getpid() == self._driver:
            self._write("renew")

    def memory(self) -> dict[str, int]:
        return {} if self._failure is not None else dict(self._memory)

    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

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

    def _replies(self, tag: int, seconds: float | None = None) -> list:
        """Every rank's answer. All ranks end if no answer comes for that many seconds."""
        replies: dict[int, Any] = {}
        early = []
        while len(replies) < self._size:
            if self._failure is not None:  # closed during the wait, by another thread or a signal's handler
                raise RuntimeError(self._failure)
            if self._troubles:
                self._explain(*self._troubles[0])
            try:
                rank, message = self._inbox.get(timeout=seconds)
            except Empty:
                self._fail(f"the ranks did not meet within {seconds} s; give them more memory (see also ulimit -v)")
            if message[0] == tag:  # not the answer to an interrupted call
                replies[rank] = message[1]
            elif message[0] == 0:  # a rank may be ready before the message that another one has met it
                early.append((rank, message))
        for each in early:
            self._inbox.put(each)
        return [replies[rank] for rank in range(self._size)]

    def _explain(self, rank: int, message: dict[str, str] | None) -> NoReturn:
        """Ends all ranks because one of them failed or died; `message` is its error, or None."""
        if message is None:
            self._fail(self._death_of(rank))
        # The death of a rank makes the collectives of the others fail, and their errors may come first.
        time.sleep(_SECONDS_TO_FIND_THE_CULPRIT)
        dead = [other for other, it in enumerate(self._ranks) if it.process.poll() is not None]
        if dead:
            self._fail(self._death_of(dead[0]))
        name, text = message["error"], message["message"] or "nothing more is known"
        prefix = "" if name in ERRORS else f"{name}: "
        self._fail(f"{prefix}{text} (rank {rank} of {self._size})", ERRORS.get(name, RuntimeError))

    def _death_of(self, rank: int) -> str:
        return self._ranks[rank].death()

    def _fail(self, message: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        self._failure = message
        self._end()
        raise kind(message)


def _sums(of_ranks: list[dict[str, int]]) -> dict[str, int]:
    return {use: sum(of_rank[use] for of_rank in of_ranks) for use in of_ranks[0]}


def _start_rank(module: str, rank: int, size: int, paths: list[str]) -> Child:
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Multicast over NVLink needs rights that containers seldom have.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    return start_child(f"rank {rank} of {size}", module, defaults, None, *paths)


def _hear(rank: int, inbox: SimpleQueue, troubles: list[tuple[int, Any]], message: Any) -> None:
    """Takes a message of a rank, in the thread that reads from it."""
    if message is None or isinstance(message, dict):
        troubles.append((rank, message))
        message = [None]  # wakes a caller that waits
    inbox.put((rank, message))
