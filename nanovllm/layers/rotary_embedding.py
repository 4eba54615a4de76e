"""Rotary position embedding (Su et al., 2021), half-split as in Llama, of the kinds in `ROPE_KINDS`."""

import math
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.layers.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, from a table of cosines and sines.

    Columns beyond `rope.rotary_dim` stay as they are: their cosine is 1 and their sine 0.

    table: [2, max_position, head_dim].
    query_scales: [max_position], factors of rotated queries, as in Llama 4: 1 + β × log(1 + ⌊position /
        original_max_position⌋); None if all are 1.
    """

    table: torch.Tensor
    query_scales: torch.Tensor | None

    def __init__(self, head_dim: int, max_position: int, rope: RopeConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.rotary_dim = rope.rotary_dim
        inv_freq, scale = inverse_frequencies(rope, max_position)
        angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq
        cos, sin = angles.cos() * scale, angles.sin() * scale
        rest = torch.zeros(max_position, head_dim - rope.rotary_dim, device="cpu")
        # Each [max_position, head_dim]: x rotated is x × cos + (x with its halves swapped) × (−sin, sin).
        table = torch.stack((torch.cat((cos, cos, rest + 1), -1), torch.cat((-sin, sin, rest), -1)))
        self.register_buffer("table", table.to(device=device, dtype=dtype), persistent=False)
        scales = None
        if rope.llama_4_scaling_beta and max_position > rope.original_max_position:
            num_contexts = torch.arange(max_position, device="cpu") // rope.original_max_position
            scales = 1 + rope.llama_4_scaling_beta * num_contexts.float().log1p()
            scales = scales.to(device=device, dtype=dtype)
        self.register_buffer("query_scales", scales, persistent=False)

    def lookup(self, positions: torch.Tensor) -> "Rotary":
        """The rotations of tokens at `positions`: [num_tokens]; called once per step."""
        cos, sin = self.table[:, positions].unsqueeze(2)
        scales = None if self.query_scales is None else self.query_scales[positions, None, None]
        return Rotary(cos, sin, self.rotary_dim, scales)


class Rotary(NamedTuple):
    """The rotations of a step's tokens.

    cos, sin: [num_tokens, 1, head_dim]; `sin` is signed, see RotaryEmbedding.
    rotary_dim: leading columns of a head that are rotated.
    query_scales: [num_tokens, 1, 1], factors of rotated queries; None for 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rotary_dim: int
    query_scales: torch.Tensor | None = None

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, num_heads, head_dim] -> the same, rotated"""
        half = self.rotary_dim // 2
        first, second, rest = x.split((half, half, x.shape[-1] - self.rotary_dim), -1)
        return torch.cat((second, first, rest), -1).mul_(self.sin).addcmul_(x, self.cos)


def inverse_frequencies(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    """(frequencies float32 [rotary_dim / 2], factor on cosines and sines) for positions below `max_position`."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rope.rotary_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "none":
        return torch.zeros_like(base), 1.0
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "longrope":
        return _longrope(rope, base, max_position)
    raise ValueError(f"rope kind {rope.kind!r} has no formula")


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: dimensions that turn often within the original context keep their frequency, those that turn seldom
    are interpolated, and the others are blended."""
    num_turns = rope.original_max_position * base / (2 * math.pi)
    kept = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return base / rope.factor * (1 - kept) + base * kept


def _longrope(rope: RopeConfig, base: torch.Tensor, max_position: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., 2024): every dimension has two factors, one for sequences up to the original context and
    one for longer ones. The engine uses one of them for all sequences, so that they can share cached keys."""
    is_long = max_position > rope.original_max_position
    factors = torch.tensor(rope.long_factor if is_long else rope.short_factor, dtype=torch.float32, device="cpu")
    scale = rope.attention_factor
    if scale is None:
        stretch = math.log(rope.factor) / math.log(rope.original_max_position) if rope.factor > 1 else 0.0
        scale = math.sqrt(1 + stretch)
    return base / factors, scale


def _yarn(rope: RopeConfig, base: torch.Tensor) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): fast dimensions keep their frequency, slow ones are interpolated, with a ramp between
    them."""

    def dimension_of(num_rotations: float) -> float:
        return (rope.rotary_dim * math.log(rope.original_max_position / (num_rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    dimension = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((dimension - low) / (high - low)).clamp(0, 1)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)
    scale = rope.attention_factor
    if scale is None:
        if rope.mscale and rope.mscale_all_dim:
            scale = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
        else:
            scale = magnitude(1.0)
    return frequencies, scale
