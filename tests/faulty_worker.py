"""A rank with a planted fault, for ParallelRunner's `worker_module`: the environment variables FAULT and FAULTY_RANK
say which fault, and whose."""

import os
import sys
from collections.abc import Callable

import torch

import nanovllm.runner.model_runner
import nanovllm.parallel.worker
from nanovllm.engine.runner import LaunchedStep
from nanovllm.engine.scheduler import Scheduler, Work
from nanovllm.ops.collectives import Parallel

# A launch of this number is the first that goes wrong.
FAULTY_STEP = 4


class Worker(nanovllm.parallel.worker.Worker):
    """Goes wrong in the launch of FAULTY_STEP and all later ones."""

    def launch(self, number: int, expected: int) -> None:
        if self._rank == FAULTY_RANK and number >= FAULTY_STEP:
            FAULTS[FAULT](self)
        super().launch(number, expected)


def _reschedule(change: Callable[[Work], Work]) -> Callable[[Worker], None]:
    def fault(worker: Worker) -> None:
        real = Scheduler.schedule
        worker._scheduler.schedule = lambda: change(real(worker._scheduler))

    return fault


def _other_block(work: Work) -> Work:
    work[-1][0].block_table[-1] ^= 1
    return work


def _other_slot(work: Work) -> Work:
    work[-1][0].slot += 1
    return work


class _OtherTokens:
    def __init__(self, step: LaunchedStep):
        self._step = step

    def wait(self) -> list[int]:
        return [token_id ^ 1 for token_id in self._step.wait()]


def _other_token(worker: Worker) -> None:
    real = type(worker._runner).launch
    worker._runner.launch = lambda work: _OtherTokens(real(worker._runner, work))


def _out_of_memory(worker: Worker) -> None:
    def launch(work: Work) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB")

    worker._runner.launch = launch


def _exit_in_step(worker: Worker) -> None:
    os._exit(7)


FAULTS: dict[str, Callable[[Worker], None]] = {
    "drops a row": _reschedule(lambda work: work[:-1]),
    "reverses the rows": _reschedule(lambda work: work[::-1]),
    "has one token more": _reschedule(lambda work: [(seq, num_new + 1, samples) for seq, num_new, samples in work]),
    "takes another block": _reschedule(_other_block),
    "takes another slot": _reschedule(_other_slot),
    "samples another token": _other_token,
    "out of memory": _out_of_memory,
    "exits in a step": _exit_in_step,
}


class ModelRunner(nanovllm.runner.model_runner.ModelRunner):
    """Goes wrong at the start; FAULT is then the name of one of START_FAULTS."""

    def __init__(self, config, parallel: Parallel):
        if parallel.rank == FAULTY_RANK:
            START_FAULTS[FAULT]()
        super().__init__(config, parallel)


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
    nanovllm.parallel.worker.Worker = Worker
    nanovllm.parallel.worker.main()
