"""Programmatic dependent launch (CUDA, compute capability 9.0): a kernel is set up while the preceding kernel still
runs, which saves most of the gap between two short kernels.

A kernel launched with `LAUNCH_OPTIONS` calls `begin()` before it reads or writes memory that an earlier kernel writes:
each of its programs lets the next kernel start, and waits until the preceding kernel has ended. It may read weights
before that, because no kernel of a step writes them.

A kernel may run beside the preceding one if it reads nothing that the preceding one writes. Then the preceding kernel
waits first and only then lets the second one start, so that the inputs of both are complete. One program of the second
kernel waits at its end, so that a kernel that waits for the second has waited for both. CUDA guarantees that earlier
writes are visible only to a grid that waits itself. A kernel that does not wait still sees them, because it starts,
with empty first-level caches, after those writes were flushed; this relies on the hardware.
"""

import os

import torch

from nanovllm.ops.kernel import has_triton, jit, tl, triton


def _is_supported() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available() or not has_triton():
        return False
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5):  # it cannot launch kernels in this way
        return False
    every = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return min(every) >= (9, 0)


_HAS_IT = _is_supported()
IS_SUPPORTED = tl.constexpr(_HAS_IT)
# Multiplications and additions may be fused. Triton 3.9 asks for the option, and later versions will not fuse without
# it.
LAUNCH_OPTIONS = {"enable_fp_fusion": True} | ({"launch_pdl": True} if _HAS_IT else {})

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
