"""Rotary position embedding (Su et al., 2021), half-split as in Llama and Qwen, with linear and YaRN scaling."""

import math

import torch
from torch import nn

from nanovllm.layers.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, from a table of cosines and sines."""

    table: torch.Tensor  # [2, max_position, head_dim]

    def __init__(self, head_dim: int, max_position: int, rope: RopeConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        inv_freq, scale = inverse_frequencies(head_dim, rope)
        angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # Each [max_position, head_dim]: x rotated is x × cos + (x with its halves swapped) × (−sin, sin).
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        self.register_buffer("table", table.to(device=device, dtype=dtype), persistent=False)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [num_tokens] -> cos and signed sin: [num_tokens, 1, head_dim], to be looked up once per step"""
        cos, sin = self.table[:, positions].unsqueeze(2)
        return cos, sin

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, num_heads, head_dim] -> the same, rotated"""
        first, second = x.chunk(2, -1)
        return torch.cat((second, first), -1).mul_(sin).addcmul_(x, cos)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """(frequencies float32 [head_dim / 2], factor on cosines and sines)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "yarn":
        return _yarn(head_dim, rope, base)
    return base, 1.0


def _yarn(head_dim: int, rope: RopeConfig, base: torch.Tensor) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): fast dimensions keep their frequency, slow ones are interpolated, a ramp between."""

    def dimension_of(num_rotations: float) -> float:
        return (head_dim * math.log(rope.original_max_position / (num_rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    dimension = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((dimension - low) / (high - low)).clamp(0, 1)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)
    scale = rope.attention_factor
    if scale is None:
        if rope.mscale and rope.mscale_all_dim:
            scale = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
        else:
            scale = magnitude(1.0)
    return frequencies, scale
