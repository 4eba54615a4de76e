"""One layer's KV cache, in the model's dtype or in FP8, and how it is written and read by plain operations.

In FP8, each head of a key or value is e4m3 with a scale of its own. Scales are powers of two, so e4m3 × scale is exact
in bfloat16. Values are transposed, because a product in FP8 needs the numbers that it sums over next to each other.
"""

from typing import NamedTuple

import torch

from nanovllm.ops.quantize import E4M3

NO_SCALE = 255  # the exponent, as floats have it, of infinity
# 2^-40: a scale's inverse times thousands of weights stays far below the largest float32 (triton_fp8.py).
LEAST_EXPONENT = 127 - 40


class LayerCache(NamedTuple):
    """One layer's keys and values of all blocks.

    keys, values: [num_blocks, block_size, num_kv_heads, head_dim]. In FP8, keys are [num_blocks, num_kv_heads,
        block_size, head_dim] and values [num_blocks, num_kv_heads, head_dim, block_size].
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
        (keys, key_exponents), (values, value_exponents) = quantize_heads(k), quantize_heads(v)
        self.keys[block, :, place] = keys
        self.values[block, :, :, place] = values
        self.scales[block, :, place] = key_exponents << 23 | value_exponents << 7

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `blocks`: int64 [n], each [n × block_size, num_kv_heads, head_dim]; of FP8 in float32."""
        if self.scales is None:
            return self.keys[blocks].flatten(0, 1), self.values[blocks].flatten(0, 1)
        exponents = _exponents(self.scales[blocks])
        heads = self.keys[blocks], self.values[blocks].mT
        keys, values = (whole_heads(*each).transpose(1, 2).flatten(0, 1) for each in zip(heads, exponents, strict=True))
        return keys, values

    def read_heads(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Some heads of keys and values in FP8, each float32 [n, head_dim].

        rows: int64 [n], slot × num_kv_heads + head.
        """
        assert self.scales is not None
        slot, head = rows // self.num_kv_heads, rows % self.num_kv_heads
        block, place = slot // self.block_size, slot % self.block_size
        key_exponents, value_exponents = _exponents(self.scales[block, head, place])
        keys = whole_heads(self.keys[block, head, place], key_exponents)
        return keys, whole_heads(self.values[block, head, :, place], value_exponents)


def quantize_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each head by the smallest power of two that brings its largest number to at most 448, and rounds it.

    Args:
        x: [..., head_dim]. A head with a NaN or an infinity becomes zeros with an infinite scale, whose products are
            NaN. So no number of a cache is NaN, and kernels may read tiles whose last keys are nobody's.

    Returns:
        e4m3 [..., head_dim]; int32 [...], the scales' exponents as floats have them: a scale is 2^(exponent − 127).
    """
    numbers = x.float()
    peak = numbers.abs().amax(-1)
    exponents = ((peak.view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp(min=LEAST_EXPONENT)
    is_finite = peak.isfinite()
    exponents = torch.where(is_finite, exponents, NO_SCALE)
    quotients = numbers / _scales(exponents)[..., None]
    return torch.where(is_finite[..., None], quotients, 0.0).to(E4M3), exponents


def whole_heads(heads: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """What `quantize_heads` rounded: float32 [..., head_dim]."""
    return heads.float() * _scales(exponents)[..., None]


def rounded_heads(x: torch.Tensor) -> torch.Tensor:
    """Heads as a cache in FP8 keeps them, in their own dtype: [..., head_dim]."""
    return whole_heads(*quantize_heads(x)).to(x.dtype)


def _scales(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents << 23).view(torch.float32)


def _exponents(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the keys and of the values, each like LayerCache.scales."""
    return scales >> 23 & 0xFF, scales >> 7 & 0xFF
