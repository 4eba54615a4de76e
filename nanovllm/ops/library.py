"""Chooses NVIDIA's library for matrix products."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch


@dataclass
class _Contexts:
    """The `cublas_lt` contexts of this process, because PyTorch's setting applies to the whole process.

    num_open: how many are open.
    before: the setting before the first of them.
    has_entered: one was open before. PyTorch warns only once.
    """

    num_open: int = 0
    before: Any = None
    has_entered: bool = False
    lock: Any = field(default_factory=Lock)


_CONTEXTS = _Contexts()


@contextmanager
def cublas_lt(contexts: _Contexts = _CONTEXTS) -> Iterator[None]:
    """Context manager in which matrix products come from cuBLASLt. For few rows it chooses better kernels than cuBLAS,
    and for many rows nearly always the same.

    Products of other threads use cuBLASLt too until the last open context ends, which restores the setting.
    """
    with contexts.lock:
        if contexts.num_open == 0:
            contexts.before = torch.backends.cuda.preferred_blas_library()
            choose = partial(torch.backends.cuda.preferred_blas_library, "cublaslt")
            choose() if contexts.has_entered else _without_warnings(choose)  # it is called experimental
            contexts.has_entered = True
        contexts.num_open += 1
    try:
        yield
    finally:
        with contexts.lock:
            contexts.num_open -= 1
            if contexts.num_open == 0:
                torch.backends.cuda.preferred_blas_library(contexts.before)


def _without_warnings(function: Callable[[], Any]) -> None:
    """Calls a function of PyTorch without its warnings.

    A bare C++ binding writes its warnings to standard error, where Python cannot suppress them. If a tensor's method
    calls the function, PyTorch turns them into Python warnings.
    """

    def called(number: float) -> float:
        function()
        return number

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, device="cpu").apply_(called)
