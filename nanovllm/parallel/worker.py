"""One rank of a model that is split over several devices, as a process of its own.

`TensorParallelRunner` starts it and writes it a log of all changes of the schedule: requests added and aborted, steps
launched and committed. Each rank follows that log with a Scheduler of its own, which decides as the driver's did. So no
step sends any state of its requests; the ranks' collectives do the rest. A log entry and a reply are JSON.
"""

import logging
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.child_processes import serve
from nanovllm.config import Config
from nanovllm.engine.runner import LaunchedStep, make_scheduler
from nanovllm.engine.sequence import Adapter, Pooling, Sequence, completions_of
from nanovllm.engine.step import Step, StepOutput, TokenNumbers
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.models.adapter import LowRank
    from nanovllm.models.tensors import Tensors
    from nanovllm.runner.model_runner import ModelRunner


HAS_MET = -1  # the tag of a rank's message that it is connected with the others


def fingerprint(step: Step) -> int:
    """A number that is the same in every process that has scheduled the same step (Python hashes numbers alike).

    It covers the length and the last block of a block table, and the last blocks of window groups.
    """
    chunks = tuple(
        (
            seq.seq_id,
            num_new,
            samples,
            seq.num_computed_tokens,
            seq.entry,
            len(table := seq.block_table),
            table[-1],
            *seq.window_table[-1:],
        )
        for seq, num_new, samples in step.chunks
    )
    # Doubled, because Python hashes -1 and -2 alike, and numbers of snapshots are negative.
    states = tuple(
        tuple((2 * source, 2 * target) for source, target in pairs) for pairs in (step.state_loads, step.state_copies)
    )
    return hash((chunks, step.copies, states, tuple((scored.seq.seq_id, *scored[1:]) for scored in step.scored)))


def pack_output(output: StepOutput) -> list:
    """A step's output for JSON; see `unpack_output`."""
    numbers = [(each.data, each.row_bytes) for each in (output.logprobs, output.prompt_logprobs)]
    states = [(each.tobytes(), each.nbytes // len(each)) for each in output.states]
    return [output.token_ids, *([b64encode(data).decode(), row_bytes] for data, row_bytes in numbers + states)]


def pack_masks(masks: np.ndarray) -> list:
    """int32 [num_rows, num_words] for JSON; see `unpack_masks`. Rows under one schema often have equal masks."""
    place_of: dict[bytes, int] = {}
    places = [place_of.setdefault(mask.tobytes(), len(place_of)) for mask in masks]
    return [places, masks.shape[1], b64encode(b"".join(place_of)).decode()]


def unpack_masks(places: list[int], num_words: int, data: str) -> np.ndarray:
    different = np.frombuffer(b64decode(data), np.int32).reshape(-1, num_words)
    return different[np.array(places, np.int64)]


def unpack_output(token_ids: list[int], *numbers: list) -> StepOutput:
    logprobs, prompt_logprobs, *states = ((b64decode(data), row_bytes) for data, row_bytes in numbers)
    arrays = (np.frombuffer(data, np.float32).reshape(-1, row_bytes // 4) for data, row_bytes in states)
    return StepOutput(token_ids, TokenNumbers(*logprobs), TokenNumbers(*prompt_logprobs), tuple(arrays))


class Worker:
    """Follows the driver's log.

    Args:
        config, runner: as for an LLMEngine.
        rank: the number of this process.
    """

    def __init__(self, config: Config, runner: "ModelRunner", rank: int):
        self._config, self._runner, self._rank = config, runner, rank
        self._update: Tensors = {}  # weights that were checked and are still to be loaded
        self._adapter: tuple[int, dict[str, LowRank]] | None = None  # likewise, with its slot
        self._in_flight: dict[int, tuple[Step, LaunchedStep]] = {}
        self._sampled: dict[int, list[int]] = {}  # tokens by step, once `wait` has returned them
        self._renew()

    def follow(self, log: Iterator[list], reply: Any) -> None:
        """Follows the log until "close". An entry is [tag, kind, its arguments]; one that has a tag is answered."""
        entries: dict[str, Callable[..., Any]] = {
            "add": self._add,
            "abort": self._abort,
            "launch": self._launch,
            "schedule nothing": self._schedule_nothing,
            "constrain": self._constrain,
            "wait": self._wait,
            "commit": self._commit,
            "renew": self._renew,
            "check_update": self._check_update,
            "load_update": self._load_update,
            "check_adapter": self._check_adapter,
            "set_adapter": self._set_adapter,
            "weight_parts": self._runner.weight_parts,
            "sleep": self._sleep,
            "restore": self._restore,
            "capture": self._capture,
        }
        for tag, kind, *arguments in log:
            if kind == "close":
                return
            answer = entries[kind](*arguments)
            if tag is not None:
                reply([tag, answer])

    def _renew(self) -> None:
        for _, launched in self._in_flight.values():
            launched.wait()
        self._in_flight, self._sampled = {}, {}
        self._unfinished: dict[int, Sequence] = {}
        self._scheduler = make_scheduler(self._config, self._runner.info)

    # If some rank may fail at a change, every rank first does the part that can be undone, and says whether it failed.

    def _check_update(self, directory: str) -> list[str] | None:
        from nanovllm.parallel.weight_files import stored_weights

        def check() -> None:
            self._update = {}
            self._update = self._runner.check_update(stored_weights(directory))

        return _refusal(check)

    def _load_update(self) -> list[str]:
        tensors, self._update = self._update, {}
        self._runner.load_update(tensors)
        return self._runner.undefined_weights()

    def _check_adapter(self, slot: int, sent: list | None) -> list[str] | None:
        from nanovllm.parallel.sent_adapters import received_adapter

        def check() -> None:
            self._adapter = None
            self._adapter = slot, self._runner.check_adapter(slot, received_adapter(sent))

        return _refusal(check)

    def _set_adapter(self) -> None:
        assert self._adapter is not None, "it was checked"
        (slot, adapter), self._adapter = self._adapter, None
        self._runner.load_adapter(slot, adapter)

    def _sleep(self, level: int) -> list:
        self._runner.sleep(level)
        return [self._runner.undefined_weights(), self._runner.memory()]

    def _restore(self) -> list[str] | None:
        return _refusal(self._runner.restore)

    def _capture(self) -> dict[str, int]:
        self._runner.capture()
        return self._runner.memory()

    def _add(
        self, first_id, token_ids, params, max_length, stop_token_ids, seed, first_scored, is_constrained, pooling,
        adapter,
    ) -> None:  # fmt: skip
        kind = None if pooling is None else Pooling(pooling[0], tuple(pooling[1]), pooling[2])
        first = Sequence(
            first_id, token_ids, SamplingParams(**params), max_length, frozenset(stop_token_ids), seed, pooling=kind,
            adapter=Adapter(*adapter),
        )  # fmt: skip
        first.next_scored = first.first_scored = first_scored
        first.is_constrained = is_constrained
        for seq in completions_of(first):
            self._unfinished[seq.seq_id] = seq
            self._scheduler.add(seq)

    def _abort(self, seq_id: int) -> None:
        self._scheduler.abort(self._unfinished.pop(seq_id))

    def _launch(self, number: int, expected: int) -> None:
        step = self._scheduler.schedule()
        if fingerprint(step) != expected:
            raise RuntimeError(
                f"the ranks diverged at step {number}, which is a bug: rank {self._rank} would compute "
                f"{len(step.chunks)} rows, {[(seq.seq_id, num_new) for seq, num_new, _ in step.chunks[:8]]} …, the "
                "driver would compute others"
            )
        self._in_flight[number] = step, self._runner.launch(step)

    def _schedule_nothing(self) -> None:
        if self._scheduler.schedule().chunks:
            raise RuntimeError(f"the ranks diverged, which is a bug: rank {self._rank} would launch a step")

    def _constrain(self, number: int, rows: list[int], *packed) -> None:
        self._in_flight[number][1].constrain(unpack_masks(*packed), rows, {})

    def _wait(self, number: int) -> list:
        """A hash of the step's tokens, the wrong slot, and on rank 0 the rest of the step's output."""
        output = self._in_flight[number][1].wait()
        self._sampled[number] = output.token_ids
        wrong_slot = output.wrong_slot and output.wrong_slot._replace(rank=self._rank)
        return [hash(tuple(output.token_ids)), wrong_slot, pack_output(output) if self._rank == 0 else None]

    def _commit(self, number: int, stopped: list[int], broken: list[int]) -> None:
        step, _ = self._in_flight.pop(number)
        finished, again = self._scheduler.commit(step, self._sampled.pop(number), set(stopped), set(broken))
        self._unfinished.update((seq.seq_id, seq) for seq in again)
        for seq in finished:
            del self._unfinished[seq.seq_id]


def _refusal(attempt: Callable[[], None]) -> list[str] | None:
    """Calls `attempt`, which changes nothing if it fails. Then returns the error's type and message, else None."""
    try:
        attempt()
    except (TypeError, ValueError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return None


def _run(inbox: Iterator, reply: Any) -> None:
    """Starts this rank's part of the model and follows the log."""
    options, rank, size, level, meeting_place = next(inbox)
    level = level if rank == 0 else max(level, logging.WARNING)
    logging.basicConfig(level=level, format=f"%(levelname)s:rank {rank}:%(name)s:%(message)s")
    config = Config(**options)
    import torch
    import torch.distributed as dist

    from nanovllm.ops.collectives import Parallel
    from nanovllm.runner.device import rank_device
    from nanovllm.runner.model_runner import ModelRunner

    device = rank_device(config.device, rank, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # A process that can write to the store can make the ranks do anything. It is a file in a directory that only this
    # user may enter; a TCPStore would listen at a port for all users of this host. If the FileStore knew the number of
    # ranks, it would remove the file once that many of its instances are gone. But NCCL reads the file until the end,
    # so the driver removes it.
    store = dist.FileStore(f"{meeting_place}/store")
    kind, own_gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(kind, store=store, rank=rank, world_size=size, device_id=own_gpu)
    reply([HAS_MET, None])
    runner = ModelRunner(config, Parallel(rank, size, dist.group.WORLD, in_rank_order=config.deterministic))
    info = runner.info
    reply([0, [{**vars(info), "eos_token_ids": sorted(info.eos_token_ids)}, runner.memory()]])
    Worker(config, runner, rank).follow(inbox, reply)
    runner.close()
    os._exit(0)  # the driver waits; taking the interpreter down would take another second


def main() -> None:
    serve(lambda inbox, reply: _run(iter(inbox.get, None), reply))


if __name__ == "__main__":
    main()
