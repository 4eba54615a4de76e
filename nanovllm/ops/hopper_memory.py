"""What our kernels in Gluon share: shared memory, how data gets there, and the barriers that say when."""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS
from nanovllm.ops.quantize import E4M3

# Triton 3.8 renamed the copies, and Triton 3.9 renamed _reinterpret.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_SharedMemory = gl.shared_memory_descriptor
reinterpret = getattr(_SharedMemory, "reinterpret" if hasattr(_SharedMemory, "reinterpret") else "_reinterpret")
DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int8: gl.int8,
    E4M3: gl.float8e4nv,
}
IS_DEPENDENT = gl.constexpr("launch_pdl" in LAUNCH_OPTIONS)


@gluon.jit
def make_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """[NUM, 1] barriers, each of which completes after COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM):
        mbarrier.init(barriers.index(stage), count=COUNT)
    return barriers
