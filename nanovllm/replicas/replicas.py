"""`Replicas`: several LLMs in processes of their own, with the part of LLM's interface that a job uses."""

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

from nanovllm.config import Config
from nanovllm.lora import LoRARequest, checked_adapter
from nanovllm.pooling_params import PoolingParams, RowParams
from nanovllm.prompts import as_prompt_list
from nanovllm.replicas.iterator import ReplicaIterator
from nanovllm.replicas.pool import ReplicaPool, merged_metrics
from nanovllm.sampling_params import with_params


class Replicas:
    """A model in several processes, each an LLM, which share the prompts of a call.

    The result of a request must not depend on the replica that runs it: give each request that samples a seed. Use a
    Replicas from one thread.

    Args:
        model: as for LLM.
        data_parallel_size: number of replicas. Each takes `tensor_parallel_size` GPUs of this host, from the first on;
            on a CPU, they share CPUs and memory.
        replica_module: the module that a replica runs.
        engine_options: options of each LLM.

    Raises:
        TypeError, ValueError: an option of the wrong type or value; too few GPUs.
        RuntimeError: a replica's own error at its start, or its death.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        data_parallel_size: int,
        replica_module: str = "nanovllm.replicas.worker",
        **engine_options: Any,
    ):
        self._config = Config(os.fspath(model), **engine_options)
        self._pool = ReplicaPool(self._config, data_parallel_size, replica_module)
        self._num_calls = 0
        self._iterator: weakref.ref[ReplicaIterator] | None = None

    def generate_iter(
        self,
        prompts: Iterable[Any],
        sampling_params: RowParams | Iterable[RowParams],
        *,
        ordered: bool = False,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
    ) -> ReplicaIterator:
        """Like LLM.generate_iter, but in no order: `prompt_index` and `request_id` are the prompt's number. Adapters
        come from files, which each replica reads.

        Requests of a replica that dies run again in another process. See ReplicaIterator.

        Raises:
            TypeError, ValueError: `ordered` is True, or an adapter that LLM.generate_iter refuses.
            RuntimeError: the replicas are closed or have failed, or their last iterator has not finished.
        """
        if ordered:
            raise ValueError("replicas give results as they finish; leave ordered=False and sort by prompt_index")
        is_per_row = isinstance(lora_request, Iterable) and not isinstance(lora_request, str)
        if lora_request is not None and not self._config.enable_lora:
            raise ValueError("lora_request needs Replicas(enable_lora=True)")
        adapters = iter(lora_request) if is_per_row else repeat(checked_adapter(lora_request))  # type: ignore[arg-type]
        self._pool.check()
        before = self._iterator() if self._iterator is not None else None
        if before is not None and before.is_open:
            raise RuntimeError("an iterator of generate_iter has not finished: exhaust it, or close() it")
        for process in list(self._pool.processes):
            if process.has_ended:
                self._pool.replace(process)
        self._num_calls += 1
        source = iter(prompts if isinstance(prompts, Iterator) else as_prompt_list(prompts))
        rows = _with_adapters(with_params(source, sampling_params, (PoolingParams,)), adapters)
        iterator = ReplicaIterator(self._pool, self._num_calls, rows, is_per_row)
        self._iterator = weakref.ref(iterator)
        return iterator

    def metrics(self) -> dict[str, Any]:
        """LLM.metrics, summed over the replicas; the numbers may be some tenths of a second old."""
        return merged_metrics([process.metrics for process in self._pool.processes], self._pool.of_dead)

    def provenance(self) -> dict[str, Any]:
        """LLM.provenance, which is the same for each replica. Only replicas with deterministic=True have one.

        Raises:
            RuntimeError: the replicas differ, are closed or have failed.
        """
        self._pool.check()
        return self._pool.provenance

    def close(self) -> None:
        """Ends the replicas. Calling it again does nothing. A source of prompts that calls it gets a RuntimeError."""
        self._pool.guard.run(self._pool.close)

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _with_adapters(pairs: Iterator[Any], adapters: Iterator[LoRARequest | None]) -> Iterator[Any]:
    """Adds an adapter to each prompt and its parameters, and passes None on."""
    for pair in pairs:
        if pair is None:
            yield None
            continue
        try:
            request = checked_adapter(next(adapters))
        except StopIteration:
            raise ValueError("lora_request ended before the prompts did; give one for all, or one per prompt") from None
        if request is not None and request.tensors is not None:
            raise ValueError(f"replicas read adapters from files; adapter {request.lora_name!r} needs a lora_path")
        yield *pair, _with_absolute_path(request)


def _with_absolute_path(request: LoRARequest | None) -> LoRARequest | None:
    """The same adapter for a process in another directory."""
    path = "" if request is None else os.path.abspath(os.path.expanduser(request.lora_path))
    return replace(request, lora_path=path) if request is not None and os.path.isdir(path) else request
