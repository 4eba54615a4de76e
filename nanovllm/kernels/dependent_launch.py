"""Programmatic dependent launch (CUDA, compute capability 9.0): a kernel's blocks are put in place while the kernel
before it still ends, which saves most of the gap between two short kernels.

A kernel launched with `LAUNCH_OPTIONS` calls `begin()` before it touches memory that a kernel before it writes:
every one of its programs waits there for the kernel before to have ended, and lets the kernel after it come. Weights,
which no kernel of a step writes, may be read earlier.
"""

import os

import torch
import triton
import triton.language as tl


def _is_supported() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    every = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return min(every) >= (9, 0)


IS_SUPPORTED = tl.constexpr(_is_supported())
LAUNCH_OPTIONS = {"launch_pdl": True} if IS_SUPPORTED.value else {}

if IS_SUPPORTED.value:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(WAITS: tl.constexpr = True):
    """Lets the kernel after this one come and, as a rule, waits for the one before."""
    if IS_SUPPORTED:
        gdc_launch_dependents()
        if WAITS:
            gdc_wait()


@triton.jit
def wait():
    if IS_SUPPORTED:
        gdc_wait()
