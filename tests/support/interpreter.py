"""Triton's interpreter, in which kernels run on a machine without a GPU, made faster."""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any


def patch_once_per_launch() -> None:
    """Lets the interpreter replace the functions of `tl` only once per launch and file.

    It replaces them at a kernel's launch, and again at each call of a function that the kernel calls. The repetition
    changes nothing and takes a third of the time.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    names = "_patch_lang", "GridExecutor"  # private ones, which another version of Triton may not have
    if not all(hasattr(interpreter, name) for name in names) or hasattr(interpreter, "patched_by_tests"):
        return
    patched = interpreter.patched_by_tests = set()
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launch_afresh(self, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(function: Callable) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_afresh, patch_once


def leave_out_overflow_checks() -> None:
    """Stops the interpreter from computing each sum and product of integers twice.

    It computes the second one in 64 bits, to assert that the first did not overflow. Without `debug` it skips the
    assertion, but not the computation, which is half of the time of a kernel that computes many addresses.
    """
    builder: Any = getattr(sys.modules.get("triton.runtime.interpreter"), "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = replace(options, sanitize_overflow=False)


def shuffle_programs(monkeypatch: Any, seed: int) -> None:
    """Lets the interpreter run each kernel's programs in a random order, as a GPU may. By itself it runs the last axis
    first."""
    from triton.runtime.interpreter import InterpreterBuilder

    set_grid_dim, set_grid_idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    rng = random.Random(seed)
    order: Iterator[tuple[int, ...]] = iter(())

    def begin(self: Any, *sizes: int) -> None:
        nonlocal order
        programs = list(product(*map(range, sizes)))
        order = iter(rng.sample(programs, len(programs)))
        set_grid_dim(self, *sizes)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_dim", begin)
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", lambda self, *_: set_grid_idx(self, *next(order)))


def multiply_bfloat16(monkeypatch: Any) -> None:
    """Lets the interpreter multiply matrices of bfloat16. By itself it multiplies their bits, as integers."""
    from triton.language import bfloat16
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def as_float32(matrix: Any) -> Any:
        if matrix.dtype.scalar != bfloat16:
            return matrix
        bits = matrix.data.view("uint16").astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)

    def create(self, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create)
