"""`Parallel`: this rank's place among those that share one model, and the collectives it needs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Of candidates for a token (layers.sampler): one that beats all others, and the upper half of those with a score of
# −inf, whose bits are 0xFF800000.
BROKEN, NOTHING = 2**63 - 1, -0x7F800001
# Successive ids that the sampler draws as one before it draws one of them; no rank has a part of such a group.
SAMPLING_GROUP = 16


@dataclass(frozen=True)
class Parallel:
    """Rank and size are given to layers, never asked of a global; every collective does nothing at size 1.

    Args:
        rank: this process, 0 ≤ rank < size.
        size: processes that share the model.
        group: the torch.distributed process group; None at size 1.
        exchange: a kernels.exchange.Exchange, where the ranks' GPUs can reach each other's memory.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    exchange: Any = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over the ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's `tensor`, concatenated along `dim` in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of any rank."""
        return -int(self.maximum(torch.tensor(-value, device=device)))

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of `tensor` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's `tensor`, written over everybody's."""
        if self.size > 1:
            dist.broadcast(tensor, group_src=0, group=self.group)
        return tensor

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """(start, length) of this rank's equal part of `total`; a ValueError names `what` if it does not divide."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) cannot be split over {self.size} ranks")
        return self.rank * (total // self.size), total // self.size
