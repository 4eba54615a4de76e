"""Programmatic dependent launch (CUDA, compute capability 9.0): a kernel's blocks are put in place while the kernel
before it still ends, which saves most of the gap between two short kernels.

A kernel launched with `LAUNCH_OPTIONS` calls `begin()` before it touches memory that a kernel before it writes:
every one of its programs lets the kernel after it come, and waits for the kernel before to have ended. Weights, which
no kernel of a step writes, may be read earlier.

A kernel may run beside the one before it if it reads nothing of that one: then the one before waits first and only then
lets it come, so that what both read is complete, and one program of it waits at its end, so that whoever waits for it
has waited for both. CUDA promises what was written before to a grid that waits itself; that one which does not sees it
too rests on its starting, with empty first-level caches, after those writes were flushed.
"""

import os

import torch

from nanovllm.ops.kernel import jit, tl


def _is_supported() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    every = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return min(every) >= (9, 0)


_HAS_IT = _is_supported()
IS_SUPPORTED = tl.constexpr(_HAS_IT)
LAUNCH_OPTIONS = {"launch_pdl": True} if _HAS_IT else {}

if _HAS_IT:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@jit
def begin():
    let_next_come()
    wait()


@jit
def let_next_come():
    """The kernel after this one may start once all programs have called this or ended."""
    if IS_SUPPORTED:
        gdc_launch_dependents()


@jit
def wait():
    """Returns when the kernel before this one has ended."""
    if IS_SUPPORTED:
        gdc_wait()
