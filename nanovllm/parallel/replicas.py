"""Several engines of one model in processes of their own, which take rows from one queue.

`Replicas` has the face that a job sees of an LLM. It starts the processes (parallel/replica.py) and starts them anew
when they die; parallel/replica_rows.py deals the rows out.
"""

import contextlib
import logging
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

from nanovllm.checks import integer
from nanovllm.config import Config
from nanovllm.machine import cpus
from nanovllm.parallel.processes import ERRORS, Child, end_children, frame, start_child, start_reader, start_writer
from nanovllm.parallel.replica import dumps, loads
from nanovllm.parallel.replica_rows import Replica, ReplicaIterator
from nanovllm.prompts import as_prompt_list
from nanovllm.sampling_params import SamplingParams, with_params

logger = logging.getLogger(__name__)

_SECONDS_TO_END = 5.0
# Of metrics: what belongs to processes that live, and what replicas have alike.
_OF_LIVING = (
    "num_unfinished_requests",
    "max_num_seqs",
    "max_batch_size",
    "num_kvcache_blocks",
    "num_free_kvcache_blocks",
    "memory_bytes",
)
_ALIKE = ("kvcache_block_size",)


class _Process(Replica):
    """A replica's process. Its reading thread, which Ctrl-C never reaches, notes here what must not get lost.

    Args:
        send_to: where what it says is put, as (this object, message).
        all_children, all_outboxes: it adds its own to these.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[str], Child],
        options: tuple[Any, ...],
        send_to: "SimpleQueue[tuple[Replica, tuple[Any, ...]]]",
        all_children: list[Child],
        all_outboxes: "list[SimpleQueue[bytes | None]]",
    ):
        super().__init__()
        self.child = start(name)
        all_children.append(self.child)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        all_outboxes.append(self._outbox)
        self._inbox = send_to
        self.metrics: dict[str, Any] = {}
        self.error: dict[str, str] | None = None
        self.pids: list[int] = []
        start_reader(self.child, self._hear, loads)
        start_writer([self.child], self._outbox)
        self._outbox.put(frame(options, dumps))

    def send(self, *message: Any) -> None:
        self._outbox.put(frame(message, dumps))

    def _hear(self, message: Any) -> None:
        if message is None:
            self.has_ended = True
            message = ("ended", 0)
        elif isinstance(message, dict):
            self.error = message
            if self.max_num_seqs:  # what failed after the start may work in a new process, as after a death
                self.child.process.kill()
            message = ("failed", 0)
        elif message[0] == "ready":
            _, self.max_num_seqs, self.metrics, self.pids = message
        elif message[-1] is not None:
            self.metrics = message[-1]
        self._inbox.put((self, message))

    def death(self) -> str:
        """How it ended. Returns once its memory is free."""
        how = self.child.death()
        self._outbox.put(None)
        deadline = time.monotonic() + _SECONDS_TO_END
        while any(map(_is_running, self.pids)) and time.monotonic() < deadline:  # its ranks end by themselves
            time.sleep(0.01)
        return how if self.error is None else f"{self.child.name}: {_in_words(self.error)}"


class Replicas:
    """A model in several processes, each an LLM with a queue of its own.

    Which replica runs a row must not decide its result: give each row that samples a seed. Use it from one thread.

    Args:
        model: as for LLM.
        data_parallel_size: how many. Each takes `tensor_parallel_size` GPUs of this host, from the first on; on a CPU,
            they share CPUs and memory.
        replica_module: what a replica runs.
        engine_options: of each LLM.

    Raises:
        TypeError, ValueError: an option of the wrong type or value; too few GPUs.
        RuntimeError: a replica's own error at its start, or its death.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        data_parallel_size: int,
        replica_module: str = "nanovllm.parallel.replica",
        **engine_options: Any,
    ):
        size = integer("data_parallel_size", data_parallel_size, minimum=1)
        config = Config(os.fspath(model), **engine_options)
        from nanovllm.models.loader import find_model  # imports torch
        from nanovllm.models.read_config import load_model_config

        settings = _settings(config, size)
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        load_model_config(directory).check_parallel_size(config.tensor_parallel_size)
        self._config, self._module, self._settings = replace(config, model=str(directory)), replica_module, settings
        self.inbox: SimpleQueue[tuple[Replica, tuple[Any, ...]]] = SimpleQueue()
        self._failure: str | None = None
        self._parent, self._num_calls = os.getpid(), 0
        self._past: list[dict[str, Any]] = []  # metrics of those that died
        self._iterator: weakref.ref[ReplicaIterator] | None = None
        self._children: list[Child] = []
        self._outboxes: list[SimpleQueue[bytes | None]] = []
        # Runs when this object or the interpreter ends, whatever happened.
        self._end = weakref.finalize(self, end_children, self._children, self._outboxes, self._parent)
        self.processes: list[_Process] = []
        try:
            for index in range(size):
                self.processes.append(self._start(index))
            while not all(process.max_num_seqs for process in self.processes):
                self.inbox.get()
                self.check()
                if dead := [process for process in self.processes if process.has_ended]:
                    self.fail(f"{dead[0].death()} while it started")
        except BaseException:
            self._failure = self._failure or "the replicas did not start"
            self._end()
            raise

    def generate_iter(
        self,
        prompts: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams],
        *,
        ordered: bool = False,
    ) -> ReplicaIterator:
        """As LLM.generate_iter, in no order: `request_id` tells a prompt's number.

        Rows of a replica that dies run again in another process. See ReplicaIterator.

        Raises:
            ValueError: `ordered` is True.
            RuntimeError: they are closed or failed, or an iterator of theirs has not finished.
        """
        if ordered:
            raise ValueError("replicas give results as they finish; leave ordered=False and sort by request_id")
        self.check()
        before = self._iterator() if self._iterator is not None else None
        if before is not None and before.is_open:
            raise RuntimeError("an iterator of generate_iter has not finished: exhaust it, or close() it")
        for process in list(self.processes):
            if process.has_ended:
                self.replace(process)
        self._num_calls += 1
        source = iter(prompts if isinstance(prompts, Iterator) else as_prompt_list(prompts))
        iterator = ReplicaIterator(self, self._num_calls, with_params(source, sampling_params))
        self._iterator = weakref.ref(iterator)
        return iterator

    def metrics(self) -> dict[str, Any]:
        """Those of LLM.metrics, summed over the replicas; they may be some tenths of a second old."""
        return _merged([process.metrics for process in self.processes], self._past)

    def close(self) -> None:
        """Ends the replicas. Calling it again does nothing."""
        if self._end.alive and self._failure is None and os.getpid() == self._parent:
            for process in self.processes:
                process.send("close", 0)
            deadline = time.monotonic() + _SECONDS_TO_END
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.child.process.wait(max(0.0, deadline - time.monotonic()))
        self._failure = self._failure or "the replicas are closed"
        self._end()

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # For ReplicaIterator

    def check(self) -> None:
        """Raises what ended all replicas, or makes one that could not start."""
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

    def replace(self, process: Replica) -> str:
        """Starts a process in the place of one that died; returns how that one died."""
        index = next(index for index, each in enumerate(self.processes) if each is process)
        how = self.processes[index].death()
        self._past.append(self.processes[index].metrics)
        self.processes[index] = self._start(index)
        logger.warning("%s; its unfinished rows run again in a new process", how)
        return how

    def fail(self, message: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        """Ends all replicas because of an error."""
        self._failure = message
        self._end()
        raise kind(message)

    def _start(self, index: int) -> _Process:
        threads = max(1, len(cpus()) // (len(self._settings) * self._config.tensor_parallel_size))
        defaults = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))  # torch's, and the tokenizer's
        start = partial(start_child, module=self._module, defaults=defaults, settings=self._settings[index])
        level = logging.getLogger("nanovllm").getEffectiveLevel()
        name, options = f"replica {index} of {len(self._settings)}", (vars(self._config), index, level)
        return _Process(name, start, options, self.inbox, self._children, self._outboxes)


def _settings(config: Config, size: int) -> list[dict[str, str]]:
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


def _merged(of_living: list[dict[str, Any]], of_dead: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for metrics in (*of_living, *({**each, **dict.fromkeys(_OF_LIVING)} for each in of_dead)):
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                before = merged.setdefault(name, {})
                before.update((key, before.get(key, 0) + number) for key, number in value.items())
            elif value is not None:
                merged[name] = max(merged.get(name, 0), value) if name in _ALIKE else merged.get(name, 0) + value
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
