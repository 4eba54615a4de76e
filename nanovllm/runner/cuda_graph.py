"""Captures parts of a step once per size and replays them, so that each is one launch."""

import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch

from nanovllm.ops.library import cublas_lt

logger = logging.getLogger(__name__)

_ADVICE = "lower gpu_memory_utilization or max_num_seqs, or use enforce_eager=True"


class CudaGraphs:
    """Captured functions that share one pool of memory.

    Args:
        parked: a context in which a step may be tried without leaving a trace.
        device: the GPU.
        is_alone: no other rank takes part in the steps, so if memory is short this one may run without a graph.
        tries_all: every function is tried before its capture, not only the first of a kind: NCCL initialises itself for
            each new size.
    """

    def __init__(
        self,
        parked: Callable[[], AbstractContextManager],
        device: torch.device,
        is_alone: bool = True,
        tries_all: bool = False,
    ):
        self._parked, self._device, self._is_alone, self._tries_all = parked, device, is_alone, tries_all
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any] | None] = {}
        self._tried: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Frees the memory of all that is captured. The kernels stay loaded, so nothing is tried again."""
        self._captured = {}
        self._pool = torch.cuda.graph_pool_handle()  # PyTorch cannot reuse a pool whose last graph is gone

    def run(self, key: Hashable, function: Callable[[], Any], kind: Hashable = None) -> Any:
        """Replays `function`, after capturing it if the key is new.

        Args:
            key: names the function and every size in it.
            function: only launches kernels, on state at fixed addresses; returns a tensor or None.
            kind: functions of one kind need the same kernels, so only the first one is tried before its capture.

        Returns:
            The captured call's result, which the next replay overwrites; without a graph, the result of this call.
        """
        if key not in self._captured:
            self.capture(key, function, kind)
        captured = self._captured[key]
        if captured is None:
            return function()
        graph, outputs = captured
        graph.replay()
        return outputs

    def capture(self, key: Hashable, function: Callable[[], Any], kind: Hashable = None) -> None:
        """Captures `function`, and launches nothing that leaves a trace."""
        try:
            if self._tries_all or kind not in self._tried:
                self._try(function)
                self._tried.add(kind)
            try:
                self._captured[key] = self._record(function)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()  # which the allocator does by itself, but not during a capture
                self._captured[key] = self._record(function)
        except torch.cuda.OutOfMemoryError:
            if not self._is_alone:  # the other ranks need this one to take part
                raise torch.cuda.OutOfMemoryError(
                    f"too little GPU memory for a CUDA graph of {key}; {_ADVICE}"
                ) from None
            message = "too little GPU memory for a CUDA graph of %s; it runs without one, which is slower; %s"
            logger.warning(message, key, _ADVICE)
            self._captured[key] = None

    def _try(self, function: Callable[[], Any]) -> None:
        """Compiles kernels and loads libraries, which is not allowed during a capture.

        The step is parked on the current stream, and only `function` runs on the stream of the captures. With both
        there, captured decodes of many rows were 2% slower (H200, CUDA 13.0), because kernels began later. The cause is
        unknown; docs/record.md has the figures.
        """
        current = torch.cuda.current_stream(self._device)
        with self._parked():
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream), cublas_lt():
                    function()
            finally:
                current.wait_stream(self._stream)

    def _record(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        with torch.cuda.stream(self._stream), cublas_lt():
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(), which collects garbage and empties the cache each time. Calls that might break the
            # capture are forbidden only in this thread, because other engines may be running.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = function()
            finally:
                graph.capture_end()
        return graph, outputs
