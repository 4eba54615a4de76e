"""Copies blocks of the KV cache: when completions of one prompt diverge, each needs a last block of its own."""

import numpy as np
import torch

from nanovllm.ops.kernel import jit, tl
from nanovllm.ops.upload import upload

_WIDTH = 2048  # numbers that a program copies at a time


def plain_copy_blocks(whole: torch.Tensor, copies: tuple[tuple[int, int], ...]) -> None:
    # One by one, because all of them gathered may be larger than the free memory.
    for source, target in copies:
        whole[:, :, target] = whole[:, :, source]


@jit(do_not_specialize=["num_blocks"])
def _copy_kernel(whole, sources, targets, num_blocks, size, WIDTH: tl.constexpr):
    """Copies one layer's keys or values of one block, or their scales."""
    part = whole + tl.program_id(0).to(tl.int64) * num_blocks * size
    source = part + tl.load(sources + tl.program_id(1)) * size
    target = part + tl.load(targets + tl.program_id(1)) * size
    for first in range(0, size, WIDTH):
        place = first + tl.arange(0, WIDTH)
        tl.store(target + place, tl.load(source + place, place < size), place < size)


def triton_copy_blocks(whole: torch.Tensor, copies: tuple[tuple[int, int], ...]) -> None:
    sources, targets = upload(list(np.array(copies, np.int64).T), whole.device)
    flat = whole.flatten(0, 1).flatten(2)  # [num_parts × num_layers, num_blocks, size]
    num_parts, num_blocks, size = flat.shape
    _copy_kernel[(num_parts, len(copies))](
        flat, sources, targets, num_blocks, size, WIDTH=_WIDTH, enable_fp_fusion=True
    )  # fmt: skip


def copy_blocks(whole: torch.Tensor, copies: tuple[tuple[int, int], ...], use_kernels: bool = False) -> None:
    """Copies blocks over others, in every layer. No block is a target twice, or a source and a target.

    Args:
        whole: contiguous [num_parts, num_layers, num_blocks, …], one of KVCache's tensors.
        copies: (source, target) block ids.
        use_kernels: compute with the kernel, which needs no memory for the blocks.
    """
    (triton_copy_blocks if use_kernels else plain_copy_blocks)(whole, copies)
