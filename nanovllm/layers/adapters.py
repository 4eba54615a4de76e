"""Room for LoRA adapters beside the weight of a linear layer; ops/low_rank.py has the product."""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.layers.context import LayerContext
from nanovllm.layers.shard import Rows, Shard
from nanovllm.ops.low_rank import AdapterRows, Factors, add_low_rank
from nanovllm.ops.quantize import Quantized

_NUM_COUNTERS = 2048  # of tiles; a step with more tiles makes its own
_RANK_MULTIPLE = 16  # matrix units multiply this many numbers at a time


class AdapterSlots(nn.Module):
    """The factors of several adapters of one linear layer. Each adapter has a slot, from 1 on. All factors are 0 at
    first. Ranks divide them as they divide the layer: a rank adds its own part before the ranks' sum.

    The loader does not know these parameters, because they have no `shards`.

    a: [max_loras, num_parts × rank, input_size]; b: [max_loras, output_size, rank]; scales: float32 [max_loras,
        num_parts]. A part is one weight of the checkpoint, and the rank is rounded up.
    keys: the parts' keys, as `Rows` have them.

    Args:
        rows: the rows of checkpoint tensors that are this rank's rows of the layer's weight, in their order.
        input_size: columns of those tensors.
        columns: the columns that this rank has, as (start, length).
    """

    def __init__(self, rows: Sequence[Rows], input_size: int, columns: tuple[int, int], context: LayerContext):
        super().__init__()
        self.keys = list(dict.fromkeys(each.key for each in rows))
        self.max_rank = context.max_lora_rank
        self._rows, self._input_size, self._columns = rows, input_size, columns
        self._rank = -(-self.max_rank // _RANK_MULTIPLE) * _RANK_MULTIPLE
        self._use_kernels, self._row_ops = context.use_kernels, context.row_ops
        num_slots, num_parts, output_size = context.max_loras, len(self.keys), sum(each.length for each in rows)
        self.a = context.parameter(num_slots, num_parts * self._rank, columns[1])
        self.b = context.parameter(num_slots, output_size, self._rank)
        self.scales = context.parameter(num_slots, num_parts, dtype=torch.float32)
        for parameter in self.parameters():
            parameter.zero_()
        parts = [self.keys.index(each.key) for each in rows for _ in range(each.length)]
        # A sleep leaves these in place.
        self._parts = torch.tensor(parts, dtype=torch.int32, device=context.device)
        self._counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=context.device)

    def clear(self, slot: int) -> None:
        """Sets the factors of a slot to 0."""
        for parameter in self.parameters():
            parameter[slot - 1].zero_()

    def factor_shards(self, slot: int, key: str, rank: int) -> tuple[Shard, list[Shard]]:
        """How A and B of a part fill a slot, for an adapter of this rank: A [rank, input_size] and B [output_size,
        rank], both as a checkpoint without ranks has them."""
        first_rank = self.keys.index(key) * self._rank
        a = self.a[slot - 1, first_rank : first_rank + rank]
        of_b, first = [], 0
        for each in self._rows:
            if each.key == key:
                target = self.b[slot - 1, first : first + each.length, :rank]
                of_b.append(Shard((each.size, rank), ((each.start, each.length), (0, rank)), target))
            first += each.length
        return Shard((rank, self._input_size), ((0, rank), self._columns), a), of_b

    def set_scale(self, slot: int, key: str, scale: float) -> None:
        self.scales[slot - 1, self.keys.index(key)] = scale

    def forward(self, out: torch.Tensor, x: torch.Tensor | Quantized, adapters: AdapterRows) -> torch.Tensor:
        """Adds the adapters' products to the layer's, `out` [num_tokens, output_size], and returns it."""
        factors = Factors(self.a, self.b, self.scales, self._parts, self._counters)
        return add_low_rank(out, x, factors, adapters, self._use_kernels, self._row_ops)
