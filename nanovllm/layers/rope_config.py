"""The kind and the numbers of a rotary embedding. No torch: the reader of configurations needs it too."""

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Kind and numbers of a rotary embedding.

    Args:
        theta: base of the frequencies.
        rotary_dim: leading columns of a head that are rotated, an even number.
        kind: one of ROPE_KINDS, or "none", which rotates nothing.
        factor: how far the context is stretched.
        original_max_position: context length before stretching (yarn, llama3, longrope).
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate, low_freq_factor, high_freq_factor,
            short_factor, long_factor, llama_4_scaling_beta: numbers of some kinds, named as in transformers.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    llama_4_scaling_beta: float = 0.0
