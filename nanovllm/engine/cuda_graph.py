"""Captures the decode step once for each batch size and replays it, so that a step is one launch."""

import bisect
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, every 16 up to 256, then every 32, and the largest."""
    sizes = [1, 2, 4, 8, *range(16, min(largest, 256) + 1, 16), *range(288, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


class CudaGraphs:
    """Captured decode steps that share one pool of memory.

    Args:
        step: runs the step of so many rows on state that lies in fixed places; returns tensors.
        sizes: ascending numbers of rows; others are padded to the next.
        device: the GPU.
    """

    def __init__(self, step: Callable[[int], Any], sizes: list[int], device: torch.device):
        self.sizes = sizes
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
        began = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # The largest first: smaller ones then fit into its memory.
            for size in reversed(sizes):
                step(size)  # compiles kernels and loads libraries, which a capture may not
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    outputs = step(size)
                finally:
                    graph.capture_end()
                self._captured[size] = graph, outputs
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        logger.info("captured %d CUDA graphs in %.1f s", len(sizes), time.perf_counter() - began)

    def padded_size(self, num_rows: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, num_rows)]

    def replay(self, num_rows: int) -> Any:
        """Runs the step of `num_rows`, a captured size; its outputs are overwritten by the next replay."""
        graph, outputs = self._captured[num_rows]
        graph.replay()
        return outputs
