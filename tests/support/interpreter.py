"""Triton's interpreter, in which kernels run on a machine without a GPU, made faster."""

import sys
from collections.abc import Callable
from typing import Any


def patch_once_per_launch() -> None:
    """The interpreter replaces the functions of `tl` at a kernel's launch, and once more at each call of a function
    that the kernel calls, which finds everything replaced and took a third of the time. Here the first call of a
    launch alone does so, for each file that the functions are of."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(interpreter, "_patch_lang") or hasattr(interpreter, "patched_by_tests"):
        return
    patched = interpreter.patched_by_tests = set()
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launch_anew(self, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(function: Callable) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_anew, patch_once
