"""The states and the weights that the operation of a gated DeltaNet layer takes (ops/delta_net.py), and a step's rows
as it sees them."""

from typing import NamedTuple

import torch


class DeltaWeights(NamedTuple):
    """The weights of one layer that are not in its projections.

    convolution: [num_channels, kernel_size], the channels of queries, keys and values, in the activations' dtype.
    a_log, dt_bias: float32 [num_v_heads].
    norm: [value_dim], in the activations' dtype; eps: of that norm.
    """

    convolution: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


class LayerState(NamedTuple):
    """One layer's states of all sequences, and of the prefix cache.

    recurrent: float32 [num_states, num_v_heads, value_dim, key_dim].
    inputs: [num_states, kernel_size, num_channels] in the activations' dtype, the last inputs of the convolution. The
        input at position p has the index p % kernel_size.
    """

    recurrent: torch.Tensor
    inputs: torch.Tensor

    @property
    def num_key_heads(self) -> int:
        """Key heads of this rank; each is shared by num_v_heads / num_key_heads value heads."""
        _, num_v_heads, value_dim, key_dim = self.recurrent.shape
        return (self.inputs.shape[2] - num_v_heads * value_dim) // (2 * key_dim)


class StateRows(NamedTuple):
    """The rows of a step. A row whose first new token is at position 0 begins with a state of zeros. A row without new
    tokens leaves its state as it is.

    entries: int32 [num_rows], each row's state; may be a view with a stride.
    cu_seqlens, context_lens, num_decodes, max_num_decodes: as in AttentionMetadata.
    tiles: int32 [num_tiles, 4], AttentionMetadata's query_tiles; None if all rows are decodes.
    """

    entries: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    num_decodes: torch.Tensor
    max_num_decodes: int
    tiles: torch.Tensor | None
