"""Writes new keys and values to their slots of the KV cache. The plain twin is LayerCache.write."""

import torch

from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.store_fp8 import store_fp8


@jit(do_not_specialize=["k_stride", "v_stride"])
def _store_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """One program per token: its keys and values of all heads, `WIDTH` numbers, go to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        column = tl.arange(0, PADDED)
        is_real = column < WIDTH
        tl.store(k_cache + slot * WIDTH + column, tl.load(k + token * k_stride + column, is_real), is_real)
        tl.store(v_cache + slot * WIDTH + column, tl.load(v + token * v_stride + column, is_real), is_real)


def triton_store_kvcache(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
    if cache.is_fp8:
        store_fp8(k, cache, slot_mapping, are_keys=True)
        store_fp8(v, cache, slot_mapping, are_keys=False)
        return
    width = k.shape[1] * k.shape[2]
    _store_kernel[(len(k),)](
        k, v, cache.keys, cache.values, slot_mapping, k.stride(0), v.stride(0),
        WIDTH=width, PADDED=triton.next_power_of_2(width), enable_fp_fusion=True,
    )  # fmt: skip


def store_kvcache(
    k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor, use_kernels: bool = False
) -> None:
    """k, v: [num_tokens, num_kv_heads, head_dim]; tokens may have a stride.

    slot_mapping: int64 [num_tokens]; −1 is not written.
    use_kernels: write with our kernels.
    """
    if use_kernels:
        triton_store_kvcache(k, v, cache, slot_mapping)
    else:
        cache.write(k, v, slot_mapping)
