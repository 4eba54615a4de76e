"""`Parallel`: this rank's place among the ranks of one model, and the collectives that it needs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Parallel:
    """Layers get rank and size from this value, never from a global. At size 1 every collective does nothing.

    Args:
        rank: this process, 0 ≤ rank < size.
        size: number of processes that share the model.
        group: the torch.distributed process group; None at size 1.
        exchange, sampling_exchange: an ops.exchange.Exchange and an ops.sampling_exchange.SamplingExchange, if the
            ranks' GPUs can reach each other's memory; otherwise None.
        reduces_in_layers: layers of the model call `all_reduce` themselves.
        in_rank_order: `all_reduce` adds the ranks' parts by rank, not in an order that depends on the number of bytes.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    exchange: Any = None
    sampling_exchange: Any = None
    reduces_in_layers: bool = False
    in_rank_order: bool = False

    @property
    def calls_nccl(self) -> bool:
        """Whether a step on GPUs calls NCCL, because not every collective has an exchange."""
        return self.size > 1 and (self.exchange is None or self.sampling_exchange is None or self.reduces_in_layers)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over the ranks, in place, and returns it."""
        if self.size > 1 and self.in_rank_order:
            first, *others = self.all_gather(tensor[None])
            return tensor.copy_(sum(others, first.float()))
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor`, concatenated along its first dimension in rank order."""
        if self.size == 1:
            return tensor
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        # PyTorch 2.13 warns about the second name, which was the only one before.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def rows_of_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Exchanges all rows of some columns for some rows of all columns.

        Args:
            columns: [num_rows, num_columns], this rank's columns; the number of ranks divides num_rows.

        Returns:
            [num_rows / size, size × num_columns], this rank's rows, with the ranks' columns in rank order.
        """
        if self.size == 1:
            return columns
        received = torch.empty_like(columns, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, columns.contiguous(), group=self.group)
        return received.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of any rank."""
        if self.size == 1:
            return value
        smallest = torch.tensor(value, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.group)
        return int(smallest)

    def shard(self, total: int, noun: str) -> tuple[int, int]:
        """(start, length) of this rank's equal part of `total`; a ValueError names `noun` if it does not divide."""
        if total % self.size:
            raise ValueError(f"{noun} ({total}) cannot be split over {self.size} ranks")
        return self.rank * (total // self.size), total // self.size
