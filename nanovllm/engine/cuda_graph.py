"""Captures the decode step once for each batch size and replays it, so that a step is one launch."""

import bisect
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, every 16 up to 256, then every 32, and the largest."""
    sizes = [1, 2, 4, 8, *range(16, min(largest, 256) + 1, 16), *range(288, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


@contextmanager
def _few_rows() -> Iterator[None]:
    """Matrix products come from cuBLASLt meanwhile, which chooses better kernels for few rows than cuBLAS.

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
    """Captured decode steps that share one pool of memory: for each size a plain one, and one that groups shared
    prefixes from when it is first wanted.

    Args:
        step: (number of rows, whether shared prefixes are grouped) -> tensors; runs the step on state that lies in
            fixed places.
        parked: the state is one that a step may be tried on, meanwhile.
        sizes: ascending numbers of rows; others are padded to the next.
        device: the GPU.
        is_alone: no other rank takes part in the steps, so that this one may do without a graph.
    """

    def __init__(
        self,
        step: Callable[[int, bool], Any],
        parked: Callable[[], AbstractContextManager],
        sizes: list[int],
        device: torch.device,
        is_alone: bool = True,
    ):
        self.sizes = sizes
        self._step, self._parked, self._device, self._is_alone = step, parked, device, is_alone
        self._captured: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        began = time.perf_counter()
        for size in reversed(sizes):  # the largest first: smaller ones then fit into its memory
            self._capture(size, False)
        torch.cuda.synchronize(device)
        logger.info("captured %d CUDA graphs in %.1f s", len(sizes), time.perf_counter() - began)

    def _capture(self, size: int, is_grouped: bool) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), self._parked(), _few_rows():
                self._step(size, is_grouped)  # compiles kernels and loads libraries, which a capture may not
        finally:
            current.wait_stream(self._stream)
        with torch.cuda.stream(self._stream), _few_rows():
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(), which collects garbage and empties the cache each time. What might break a
            # capture is forbidden to this thread alone: other engines may be at work.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._step(size, is_grouped)
            finally:
                graph.capture_end()
        self._captured[size, is_grouped] = graph, outputs

    def padded_size(self, num_rows: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, num_rows)]

    def replay(self, num_rows: int, is_grouped: bool) -> Any:
        """Runs the step of `num_rows`, one of the sizes; its outputs are overwritten by the next replay."""
        if (num_rows, is_grouped) not in self._captured:
            try:
                self._capture(num_rows, is_grouped)
            except torch.cuda.OutOfMemoryError:
                if not self._is_alone:
                    raise  # the others have begun the trial step
                logger.warning("too little GPU memory to capture steps of shared prefixes; they are not grouped")
                self._captured[num_rows, is_grouped] = self._captured[num_rows, False]
        graph, outputs = self._captured[num_rows, is_grouped]
        graph.replay()
        return outputs
