"""The numbers of a gated DeltaNet layer. No torch: the reader of configurations needs them too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaNetConfig:
    """The gated DeltaNet in a model's recurrent layers (Yang et al., 2024); see ops/delta_net.py.

    num_key_heads, num_value_heads: the latter is a multiple of the former.
    key_dim, value_dim: sizes of one head.
    kernel_size: tokens that the convolution sees, the current one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def num_channels(self) -> int:
        """Columns of queries, keys and values together, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
