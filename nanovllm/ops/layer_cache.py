"""One layer's KV cache, in the model's dtype or in FP8, and the plain operations that write and read it.

A cache in FP8 has a byte per number, and one scale per token and head for keys and for values each. Values are e4m3.
Keys are int8: a head of a key usually has a few large numbers, which dominate its scores, and e4m3 has only three bits
of mantissa. In a measurement, keys in e4m3 cost ten times as much accuracy (docs/quantization.md). Scales of values are
powers of two, because triton_fp8.py adds their exponents to scores. Values are transposed, because a product in FP8
needs the numbers that it sums next to each other.
"""

from typing import NamedTuple

import torch

from nanovllm.ops.quantize import E4M3

LARGEST_KEY = 127  # integer
# 2^120: a head of a key with such a number, or a larger one, counts as infinite. The scale of any other head is finite
# even times 32896 (hopper_prompts.py).
KEY_LIMIT_EXPONENT = 127 + 120
# Scales are at least 2^-40, so that their inverses are finite. Inverses of values' scales are also multiplied by
# thousands of weights (triton_fp8.py).
MIN_EXPONENT = 127 - 40
MIN_SCALE = 2.0 ** (MIN_EXPONENT - 127)


class LayerCache(NamedTuple):
    """One layer's keys and values of all blocks.

    keys, values: [num_blocks, block_size, num_kv_heads, head_dim]. In FP8, keys are int8 [num_blocks, num_kv_heads,
        block_size, head_dim], and values float8_e4m3fn [num_blocks, num_kv_heads, head_dim, block_size].
    scales: int32 [num_blocks, num_kv_heads, block_size] in FP8, else None. The upper 16 bits are a key's scale in
        bfloat16, the lower 16 a value's.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.scales is not None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2 if self.is_fp8 else 1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1 if self.is_fp8 else 2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes k, v: [num_tokens, num_kv_heads, head_dim] to `slots`: int64 [num_tokens]; −1 is skipped."""
        is_written = slots >= 0
        k, v, slots = k[is_written], v[is_written], slots[is_written]
        if self.scales is None:
            self.keys.flatten(0, 1)[slots] = k
            self.values.flatten(0, 1)[slots] = v
            return
        block, place = slots // self.block_size, slots % self.block_size
        (keys, key_scales), (values, value_scales) = quantize_keys(k), quantize_values(v)
        self.keys[block, :, place] = keys
        self.values[block, :, :, place] = values
        self.scales[block, :, place] = key_scales.view(torch.int32) | value_scales.view(torch.int32) >> 16

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `blocks`: int64 [n], each [n × block_size, num_kv_heads, head_dim]; float32 for FP8."""
        if self.scales is None:
            return self.keys[blocks].flatten(0, 1), self.values[blocks].flatten(0, 1)
        scales = _scales(self.scales[blocks])
        heads = self.keys[blocks], self.values[blocks].mT
        keys, values = (whole_heads(*each).transpose(1, 2).flatten(0, 1) for each in zip(heads, scales, strict=True))
        return keys, values

    def read_heads(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Some heads of keys and of values from a cache in FP8, each float32 [n, head_dim].

        rows: int64 [n], slot × num_kv_heads + head.
        """
        assert self.scales is not None
        slot, head = rows // self.num_kv_heads, rows % self.num_kv_heads
        block, place = slot // self.block_size, slot % self.block_size
        key_scales, value_scales = _scales(self.scales[block, head, place])
        keys = whole_heads(self.keys[block, head, place], key_scales)
        return keys, whole_heads(self.values[block, head, :, place], value_scales)


def quantize_keys(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each head by a scale that makes its largest number 127 or a little less, and rounds it.

    Args:
        x: [..., head_dim]. A head with a NaN, or with a number of 2^120 or more, becomes zeros with an infinite scale,
            whose products are NaN. So no number of a cache is NaN, and kernels may read tiles whose last keys belong to
            no sequence.

    Returns:
        int8 [..., head_dim]; float32 [...], the scales, which bfloat16 holds exactly.
    """
    numbers = x.float()
    peak = numbers.abs().amax(-1)
    exact = (peak * (1 / LARGEST_KEY)).clamp(min=MIN_SCALE)
    scales = (exact.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)  # rounded up to bfloat16
    is_finite = peak < 2.0 ** (KEY_LIMIT_EXPONENT - 127)
    scales = torch.where(is_finite, scales, torch.inf)
    quotients = (numbers * (1 / scales)[..., None]).round()
    return torch.where(is_finite[..., None], quotients, 0.0).to(torch.int8), scales


def quantize_values(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each head by the smallest power of two that makes its largest number at most 448, and rounds it.

    Args:
        x: [..., head_dim]. A head with a NaN or an infinity becomes zeros with an infinite scale.

    Returns:
        float8_e4m3fn [..., head_dim]; float32 [...], the scales.
    """
    numbers = x.float()
    peak = numbers.abs().amax(-1)
    exponents = ((peak.view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp(min=MIN_EXPONENT)
    is_finite = peak.isfinite()
    scales = torch.where(is_finite, (exponents << 23).view(torch.float32), torch.inf)
    return torch.where(is_finite[..., None], numbers / scales[..., None], 0.0).to(E4M3), scales


def whole_heads(heads: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The heads that `quantize_keys` or `quantize_values` rounded: float32 [..., head_dim]."""
    return heads.float() * scales[..., None]


def rounded_keys(k: torch.Tensor) -> torch.Tensor:
    """Heads of keys, rounded as in a cache in FP8, in their own dtype: [..., head_dim]."""
    return whole_heads(*quantize_keys(k)).to(k.dtype)


def rounded_values(v: torch.Tensor) -> torch.Tensor:
    """Heads of values, rounded as in a cache in FP8, in their own dtype: [..., head_dim]."""
    return whole_heads(*quantize_values(v)).to(v.dtype)


def _scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of keys and of values, float32, each shaped like LayerCache.scales."""
    return (scales & -0x10000).view(torch.float32), (scales << 16).view(torch.float32)
