"""Copies blocks of the KV cache, and recurrent states: when completions of one prompt diverge, each needs a last block
and states of its own."""

import numpy as np
import torch

from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.upload import upload

_WIDTH = 2048  # numbers that a program copies at a time
_MAX_PROGRAMS = 64  # that share a block of one layer


def plain_copy_blocks(whole: torch.Tensor, copies: tuple[tuple[int, int], ...]) -> None:
    # One by one, because all of them gathered may be larger than the free memory.
    for source, target in copies:
        whole[:, :, target] = whole[:, :, source]


@jit(do_not_specialize=["num_blocks"])
def _copy_kernel(whole, sources, targets, num_blocks, size, WIDTH: tl.constexpr):
    """Copies a block of one layer: its keys, values or scales, or a state. Several programs share it."""
    part = whole + tl.program_id(0).to(tl.int64) * num_blocks * size
    source = part + tl.load(sources + tl.program_id(1)) * size
    target = part + tl.load(targets + tl.program_id(1)) * size
    for first in range(tl.program_id(2) * WIDTH, size, tl.num_programs(2) * WIDTH):
        place = first + tl.arange(0, WIDTH)
        tl.store(target + place, tl.load(source + place, place < size), place < size)


def triton_copy_blocks(whole: torch.Tensor, copies: tuple[tuple[int, int], ...]) -> None:
    sources, targets = upload(list(np.array(copies, np.int64).T % whole.shape[2]), whole.device)
    flat = whole.flatten(0, 1).flatten(2)  # [num_parts × num_layers, num_blocks, size]
    num_parts, num_blocks, size = flat.shape
    num_programs = min(triton.cdiv(size, 4 * _WIDTH), _MAX_PROGRAMS)
    _copy_kernel[(num_parts, len(copies), num_programs)](
        flat, sources, targets, num_blocks, size, WIDTH=_WIDTH, enable_fp_fusion=True
    )  # fmt: skip


def copy_blocks(whole: torch.Tensor, copies: tuple[tuple[int, int], ...], use_kernels: bool = False) -> None:
    """Copies blocks over others, in every layer. No block is a target twice, or a source and a target.

    Args:
        whole: contiguous [num_parts, num_layers, num_blocks, …], one of KVCache's tensors or states.
        copies: (source, target) block ids; negative ones count from the end.
        use_kernels: compute with the kernel, which needs no memory for the blocks.
    """
    (triton_copy_blocks if use_kernels else plain_copy_blocks)(whole, copies)
