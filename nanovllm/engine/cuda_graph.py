"""Captures steps once for each size and replays them, so that a step is one launch."""

import bisect
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_ADVICE = "lower gpu_memory_utilization or max_num_seqs, or use enforce_eager=True"


class StepSize(NamedTuple):
    """What a captured step is made for.

    num_sampled: rows that sample a token; of decodes alone all rows.
    is_grouped: whether shared prefixes are grouped.
    num_tokens: of a step that holds prompts, all tokens; 0 of decodes alone.
    """

    num_sampled: int
    is_grouped: bool = False
    num_tokens: int = 0


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, every 16 up to 256, then every 32, and the largest."""
    sizes = [1, 2, 4, 8, *range(16, min(largest, 256) + 1, 16), *range(288, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


@contextmanager
def _cublas_lt() -> Iterator[None]:
    """Matrix products come from cuBLASLt meanwhile, which chooses better kernels for few rows than cuBLAS, and for many
    hardly others.

    PyTorch knows this choice only for the process as a whole: another thread's products may come from there too.
    """
    before = torch.backends.cuda.preferred_blas_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this switch is experimental
        torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class CudaGraphs:
    """Captured steps that share one pool of memory: of decodes for each number of rows, and others from when they are
    first wanted.

    Args:
        step: runs the step of a size on state that lies in fixed places, and returns tensors.
        parked: the state is one that a step may be tried on, meanwhile.
        sizes: ascending numbers of rows of decodes; others are padded to the next.
        device: the GPU.
        is_alone: no other rank takes part in the steps, so that this one may do without a graph.
    """

    def __init__(
        self,
        step: Callable[[StepSize], Any],
        parked: Callable[[], AbstractContextManager],
        sizes: list[int],
        device: torch.device,
        is_alone: bool = True,
    ):
        self.sizes = sizes
        self._step, self._parked, self._device, self._is_alone = step, parked, device, is_alone
        self._captured: dict[StepSize, tuple[torch.cuda.CUDAGraph, Any] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        began = time.perf_counter()
        for size in reversed(sizes):  # the largest first: smaller ones then fit into its memory
            self._capture(StepSize(size))
        torch.cuda.synchronize(device)
        logger.info("captured %d CUDA graphs in %.1f s", len(sizes), time.perf_counter() - began)

    def _capture(self, size: StepSize) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), self._parked(), _cublas_lt():
                self._step(size)  # compiles kernels and loads libraries, which a capture may not
        finally:
            current.wait_stream(self._stream)
        try:
            self._record(size)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()  # which the allocator does by itself, but not during a capture
            self._record(size)

    def _record(self, size: StepSize) -> None:
        with torch.cuda.stream(self._stream), _cublas_lt():
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(), which collects garbage and empties the cache each time. What might break a
            # capture is forbidden to this thread alone: other engines may be at work.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._step(size)
            finally:
                graph.capture_end()
        self._captured[size] = graph, outputs

    def padded_size(self, num_rows: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, num_rows)]

    def replay(self, size: StepSize) -> Any:
        """Runs the step of a size; its outputs are overwritten by the next replay.

        Returns:
            None if memory ended with that size and there is no captured step that could take its place.
        """
        if size not in self._captured:
            try:
                self._capture(size)
            except torch.cuda.OutOfMemoryError:
                if not self._is_alone:  # the others have begun the trial step
                    raise torch.cuda.OutOfMemoryError(f"too little GPU memory to capture a {size}; {_ADVICE}") from None
                logger.warning("too little GPU memory to capture a %s, which is slower without; %s", size, _ADVICE)
                self._captured[size] = self._captured.get(size._replace(is_grouped=False))
        captured = self._captured[size]
        if captured is None:
            return None
        graph, outputs = captured
        graph.replay()
        return outputs
