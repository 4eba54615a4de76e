"""The processes of several replicas: their start and end, and the replacement of one that died."""

import contextlib
import logging
import os
import subprocess
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn

from nanovllm.checks import integer
from nanovllm.child_processes import ERRORS, Child, end_children, frame, start_child, start_reader, start_writer
from nanovllm.config import Config
from nanovllm.guard import Guard
from nanovllm.machine import cpus
from nanovllm.models.directory import find_model
from nanovllm.models.read_config import load_model_config
from nanovllm.replicas.worker import dumps, loads

logger = logging.getLogger(__name__)

_SECONDS_TO_END = 5.0
# Metrics that only living processes have, and metrics that are the same in all replicas. All others are summed.
_OF_LIVING = (
    "num_unfinished_requests",
    "max_num_seqs",
    "max_batch_size",
    "num_kvcache_blocks",
    "num_free_kvcache_blocks",
    "memory_bytes",
)
_EQUAL = ("kvcache_block_size",)


class ReplicaProcess:
    """A replica's process. Its reading thread, which Ctrl-C cannot interrupt, stores the state of the process here at
    once.

    Args:
        child: the process.
        outbox: carries bytes to it.
        options: its first message.
        inbox: gets each message of it, as (this object, message).

    max_num_seqs: 0 until it has started.
    has_ended: whether its end of the socket is closed.
    error: the exception that it raised, as a name and a message.
    pids: the processes of its ranks.
    """

    def __init__(self, child: Child, outbox: "SimpleQueue[bytes | None]", options: Any, inbox: "Inbox"):
        self.child, self._outbox, self._inbox = child, outbox, inbox
        self.max_num_seqs, self.has_ended = 0, False
        self.metrics: dict[str, Any] = {}
        self.error: dict[str, str] | None = None
        self.pids: list[int] = []
        start_reader(child, self._hear, loads)
        start_writer([child], outbox)
        self.send(*options)

    def send(self, *message: Any) -> None:
        self._outbox.put(frame(message, dumps))

    def _hear(self, message: Any) -> None:
        if message is None:
            self.has_ended = True
            message = ("ended", 0)
        elif isinstance(message, dict):
            self.error = message
            if self.max_num_seqs:  # a failure after the start is treated like a death: a new process may work
                self.child.process.kill()
            message = ("failed", 0)
        elif message[0] == "ready":
            _, _, self.metrics, self.pids, self.max_num_seqs = message
        elif message[-1] is not None:
            self.metrics = message[-1]
        self._inbox.put((self, message))

    def death(self) -> str:
        """Says how the process ended. Returns once its memory is free."""
        how = self.child.death()
        self._outbox.put(None)
        deadline = time.monotonic() + _SECONDS_TO_END
        while any(map(_is_running, self.pids)) and time.monotonic() < deadline:  # its ranks end by themselves
            time.sleep(0.01)
        return how if self.error is None else f"{self.child.name}: {_in_words(self.error)}"


Inbox = SimpleQueue[tuple[ReplicaProcess, tuple[Any, ...]]]


class ReplicaPool:
    """The processes of a model's replicas.

    Args:
        config: the options of each LLM.
        size: how many replicas.
        module: the module that a replica runs.

    guard: refuses a call inside another one.
    processes: one per replica.
    provenance: that of all replicas, if they are deterministic.

    Raises:
        TypeError, ValueError, RuntimeError: see Replicas.
    """

    def __init__(self, config: Config, size: int, module: str):
        size = integer("data_parallel_size", size, minimum=1)
        self._settings = gpu_shares(config, size)
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        load_model_config(directory).check_parallel_size(config.tensor_parallel_size)
        self._config, self._module = replace(config, model=str(directory)), module
        self.guard = Guard("the replicas are in the middle of a call, so a source of prompts cannot call or close them")
        self._inbox: Inbox = SimpleQueue()
        self.processes: list[ReplicaProcess] = []
        self.of_dead: list[dict[str, Any]] = []  # metrics of the processes that died
        self.provenance: dict[str, Any] = {}
        self._failure: str | None = None
        self._parent = os.getpid()
        self._children: list[Child] = []
        self._outboxes: list[SimpleQueue[bytes | None]] = []
        # Runs when this object or the interpreter ends, after any error.
        self._end = weakref.finalize(self, end_children, self._children, self._outboxes, self._parent)
        try:
            for index in range(size):
                self.processes.append(self._start(index))
            starting = set(self.processes)
            while starting:
                process, message = self.receive()
                if message[0] == "ready":
                    starting.discard(process)
                self.check()
                if dead := [process for process in self.processes if process.has_ended]:
                    self.fail(f"{dead[0].death()} while it started")
        except BaseException:
            self._failure = self._failure or "the replicas did not start"
            self._end()
            raise

    def check(self) -> None:
        """Raises the error that ended all replicas, or that of a replica that could not start."""
        if self._failure is not None:
            raise RuntimeError(f"{self._failure}; make new Replicas")
        if os.getpid() != self._parent:
            raise RuntimeError("this process is a fork of the one that the replicas work for; make Replicas of its own")
        for process in self.processes:
            if process.error is not None and not process.max_num_seqs:
                self.fail(
                    f"{_in_words(process.error)} ({process.child.name})",
                    ERRORS.get(process.error["error"], RuntimeError),
                )

    def receive(self) -> tuple[ReplicaProcess, tuple[Any, ...]]:
        """The next message of a process, and who sent it. Ends all replicas if one that has started differs from the
        first one, whose rows it shares."""
        process, message = self._inbox.get()
        if message[0] == "ready":
            self._compare(process.child.name, message[1])
        return process, message

    def _compare(self, name: str, provenance: dict[str, Any]) -> None:
        first = self.provenance = self.provenance or provenance
        for key, value in provenance.items():
            if value != first[key]:
                what = "weights" if key == "weights" else f"{key} ({value}, not {first[key]})"
                self.fail(
                    f"{name} differs from the first replica that started, in its {what}; all replicas need the same "
                    "weights and settings"
                )

    def replace(self, process: ReplicaProcess) -> str:
        """Starts a process in the place of one that died; returns how that one died."""
        index = self.processes.index(process)
        how = process.death()
        self.of_dead.append(process.metrics)
        self.processes[index] = self._start(index)
        logger.warning("%s; its unfinished rows run again in a new process", how)
        return how

    def fail(self, message: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        """Ends all replicas because of an error."""
        self._failure = message
        self._end()
        raise kind(message)

    def close(self) -> None:
        """See Replicas."""
        if self._end.alive and self._failure is None and os.getpid() == self._parent:
            for process in self.processes:
                process.send("close", 0)
            deadline = time.monotonic() + _SECONDS_TO_END
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.child.process.wait(max(0.0, deadline - time.monotonic()))
        self._failure = self._failure or "the replicas are closed"
        self._end()

    def _start(self, index: int) -> ReplicaProcess:
        size = len(self._settings)
        threads = max(1, len(cpus()) // (size * self._config.tensor_parallel_size))
        defaults = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))  # torch's, and the tokenizer's
        child = start_child(f"replica {index} of {size}", self._module, defaults, self._settings[index])
        self._children.append(child)
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._outboxes.append(outbox)
        level = logging.getLogger("nanovllm").getEffectiveLevel()
        return ReplicaProcess(child, outbox, (vars(self._config), index, level), self._inbox)


def gpu_shares(config: Config, size: int) -> list[dict[str, str]]:
    """Environment variables that give each replica its GPUs; none on a CPU.

    Raises:
        ValueError: there are too few.
    """
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return [{}] * size
    if ":" in config.device:
        raise ValueError(
            f"device={config.device!r} is one GPU, but each of data_parallel_size={size} replicas takes its own, from "
            'the first on; use device="cuda", and CUDA_VISIBLE_DEVICES to choose which those are'
        )
    num_gpus, of_each = torch.cuda.device_count(), config.tensor_parallel_size
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = (
        [each.strip() for each in given.split(",")][:num_gpus] if given is not None else list(map(str, range(num_gpus)))
    )
    if size * of_each > len(visible):
        raise ValueError(
            f"data_parallel_size={size} times tensor_parallel_size={of_each} takes {size * of_each} GPUs, but there "
            f"are {len(visible)}; lower one of them, or let CUDA_VISIBLE_DEVICES name more"
        )
    shares = [visible[index * of_each : (index + 1) * of_each] for index in range(size)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def merged_metrics(of_living: list[dict[str, Any]], of_dead: list[dict[str, Any]]) -> dict[str, Any]:
    """LLM.metrics of several LLMs as those of one."""
    merged: dict[str, Any] = {}
    for metrics in (*of_living, *({**each, **dict.fromkeys(_OF_LIVING)} for each in of_dead)):
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                before = merged.setdefault(name, {})
                before.update((key, before.get(key, 0) + number) for key, number in value.items())
            elif value is not None:
                merged[name] = max(merged.get(name, 0), value) if name in _EQUAL else merged.get(name, 0) + value
    for name, of, per in (
        ("prefix_cache_hit_rate", "num_cached_prompt_tokens", "num_prompt_tokens"),
        ("mean_decode_batch_size", "num_decode_tokens", "num_steps_with_decodes"),
    ):
        merged[name] = merged.get(of, 0) / max(merged.get(per, 0), 1)
    return merged


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _in_words(error: dict[str, str]) -> str:
    prefix = "" if error["error"] in ERRORS else f"{error['error']}: "
    return f"{prefix}{error['message'] or 'nothing more is known'}"
