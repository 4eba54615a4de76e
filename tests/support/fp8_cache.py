"""FP8 caches for tests of the kernels that read and write them."""

import torch

from nanovllm.models.config import one_group
from nanovllm.ops.layer_cache import (
    LayerCache,
)
from nanovllm.ops.quantize import E4M3
from nanovllm.runner.kv_cache import KVCacheLayout
from support.attention_case import filled_with_nan
from support.fp8_factory import random_tensor

CPU = torch.device("cpu")
# The decode kernel rounds each weight to two numbers of e4m3, which is about 8 bits.
DECODE_TOLERANCE = 1.5e-3


def poisoned_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
    layout = KVCacheLayout(one_group(1), block_size, num_kv_heads, head_dim, E4M3)
    return filled_with_nan(layout.empty(num_blocks, CPU)).layers[0]


def assert_same_bits(found: LayerCache, expected: LayerCache) -> None:
    assert torch.equal(found.scales, expected.scales)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        # Interpreted kernels make zeros of the small numbers of which PyTorch makes negative zeros.
        ours, theirs = (bits.where(bits != 0x80, 0) for bits in (ours.view(torch.uint8), theirs.view(torch.uint8)))
        assert torch.equal(ours, theirs)


def heads_of_many_sizes(num_tokens: int, num_heads: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    """Some heads are zeros, and some have a largest number of 448 or 127 × a power of two, or slightly off."""
    x = random_tensor(num_tokens, num_heads, head_dim, seed=seed)
    x = x * torch.exp(2 * random_tensor(num_tokens, num_heads, 1, seed=seed + 100))
    x[1] = 0
    peaks = ((2, 448.0), (3, 448.00003), (4, 447.99997), (5, 56.0), (6, 127.0), (7, 127.00001), (8, 126.99999))
    for token, peak in peaks:
        x[token] = x[token].clamp(-peak / 2, peak / 2)
        x[token, :, head_dim // 2] = -peak
    return x
