"""The kind and the numbers of a rotary embedding. No torch: the reader of configurations needs it too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Kind and numbers of a rotary embedding.

    Args:
        theta: base of the frequencies.
        kind: "default", "linear" or "yarn".
        factor: how far the context is stretched.
        original_max_position: context length before stretching (yarn).
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: YaRN's own, as transformers
            names them.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
