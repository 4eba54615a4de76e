"""A rank with a planted fault, for TensorParallelRunner's `worker_module`.

The environment variables FAULT and FAULTY_RANK say which fault, and whose.
"""

import os
import sys
from collections.abc import Callable

import torch

import nanovllm.parallel.worker
import nanovllm.runner.model_runner
from nanovllm.engine.runner import LaunchedStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import Chunk, Step, StepOutput
from nanovllm.ops.collectives import Parallel

# A launch of this number is the first that goes wrong.
FAULTY_STEP = 4


class Worker(nanovllm.parallel.worker.Worker):
    """Goes wrong in the launch of FAULTY_STEP and all later ones."""

    def _launch(self, number: int, expected: int) -> None:
        if self._rank == FAULTY_RANK and number >= FAULTY_STEP:
            FAULTS[FAULT](self)
        super()._launch(number, expected)


def _reschedule(change: Callable[[list[Chunk]], list[Chunk]]) -> Callable[[Worker], None]:
    def fault(worker: Worker) -> None:
        real = Scheduler.schedule
        worker._scheduler.schedule = lambda: Step.of(change(real(worker._scheduler).chunks))

    return fault


def _other_block(chunks: list[Chunk]) -> list[Chunk]:
    chunks[-1].seq.block_table[-1] ^= 1
    return chunks


def _other_entry(chunks: list[Chunk]) -> list[Chunk]:
    chunks[-1].seq.entry += 1
    return chunks


class _OtherTokens:
    def __init__(self, step: LaunchedStep):
        self._step = step

    def wait(self) -> StepOutput:
        return StepOutput([token_id ^ 1 for token_id in self._step.wait().token_ids])


def _other_token(worker: Worker) -> None:
    real = type(worker._runner).launch
    worker._runner.launch = lambda step: _OtherTokens(real(worker._runner, step))


def _out_of_memory(worker: Worker) -> None:
    def launch(step: Step) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB")

    worker._runner.launch = launch


def _spoil_canaries(worker: Worker) -> None:
    """Once; the driver can go on after it."""
    worker._runner.program.kv_cache.canaries.zero_()
    FAULTS[FAULT] = lambda worker: None


def _exit_in_step(worker: Worker) -> None:
    os._exit(7)


FAULTS: dict[str, Callable[[Worker], None]] = {
    "drops a row": _reschedule(lambda chunks: chunks[:-1]),
    "reverses the rows": _reschedule(lambda chunks: chunks[::-1]),
    "has one token more": _reschedule(
        lambda chunks: [it._replace(num_new_tokens=it.num_new_tokens + 1) for it in chunks]
    ),
    "samples nothing": _reschedule(lambda chunks: [it._replace(samples=False) for it in chunks]),
    "takes another block": _reschedule(_other_block),
    "takes another entry": _reschedule(_other_entry),
    "samples another token": _other_token,
    "out of memory": _out_of_memory,
    "spoils its canaries": _spoil_canaries,
    "exits in a step": _exit_in_step,
}


class ModelRunner(nanovllm.runner.model_runner.ModelRunner):
    """Goes wrong at the start; FAULT is then the name of one of START_FAULTS."""

    def __init__(self, config, parallel: Parallel):
        if parallel.rank == FAULTY_RANK:
            START_FAULTS[FAULT]()
        super().__init__(config, parallel)


class RefusingRunner(nanovllm.runner.model_runner.ModelRunner):
    """Refuses its first update, its first adapter and its first awakening."""

    has_refused = False
    has_refused_adapter = False
    has_slept_on = False

    def check_update(self, tensors):
        checked = super().check_update(tensors)
        if self.settings.parallel.rank == FAULTY_RANK and not self.has_refused:
            self.has_refused = True
            raise ValueError("cannot be read")
        return checked

    def check_adapter(self, slot, request):
        checked = super().check_adapter(slot, request)
        if self.settings.parallel.rank == FAULTY_RANK and not self.has_refused_adapter:
            self.has_refused_adapter = True
            raise ValueError("the adapter cannot be read")
        return checked

    def restore(self) -> None:
        if self.settings.parallel.rank == FAULTY_RANK and not self.has_slept_on:
            self.has_slept_on = True
            raise RuntimeError("no room to wake up")
        super().restore()


def _raise(error: Exception) -> None:
    raise error


START_FAULTS: dict[str, Callable[[], None]] = {
    "ValueError": lambda: _raise(ValueError("the option cannot be so")),
    "OSError": lambda: _raise(OSError("no file")),
    "exit status": lambda: os._exit(5),
    "sys.exit": lambda: sys.exit(6),
    "abort": os.abort,
}

FAULT, FAULTY_RANK = os.environ["FAULT"], int(os.environ["FAULTY_RANK"])

if __name__ == "__main__":
    if FAULT == "exits at once":
        sys.exit(4)
    if FAULT in START_FAULTS:
        nanovllm.runner.model_runner.ModelRunner = ModelRunner
    if FAULT == "refuses once":
        nanovllm.runner.model_runner.ModelRunner = RefusingRunner
    if FAULT in FAULTS:
        nanovllm.parallel.worker.Worker = Worker
    nanovllm.parallel.worker.main()
