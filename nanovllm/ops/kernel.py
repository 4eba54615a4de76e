"""Triton, on machines that can run its kernels.

A file with kernels begins with `from nanovllm.ops.kernel import jit, tl, triton`. It can then be imported on any
machine. On one without a GPU it costs nothing: the three names are stand-ins there, and no kernel is called.
"""

import importlib.util
import os
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch


@cache
def has_triton() -> bool:
    """Whether the triton package is installed; PyTorch's CUDA builds bring it on Linux."""
    return importlib.util.find_spec("triton") is not None


@cache
def has_kernels() -> bool:
    """Whether our kernels can run here: on a GPU, or on a CPU with TRITON_INTERPRET=1, for tests."""
    return has_triton() and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a kernel's program can share between its threads; the interpreter has no limit."""
    if device.type == "cpu":
        return 2**20
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's types do not name all of them
    return properties.shared_memory_per_block_optin


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


if TYPE_CHECKING:
    tl: Any
    triton: Any
    jit: Any
elif has_kernels():
    import triton
    import triton.language as tl

    jit = triton.jit
else:

    class _StandIn(SimpleNamespace):
        """Has every attribute, because annotations and decorators of kernels name some when a file is imported."""

        def __getattr__(self, name: str) -> Any:
            return _StandIn()

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return arguments[0] if arguments else _StandIn()

    triton = tl = _StandIn()

    def jit(function: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function
