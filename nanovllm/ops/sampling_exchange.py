"""Exchanges the ranks' data for sampling, through memory that all GPUs of the model reach directly (NVLink).

A rank has some columns of the logits of all rows. If no row of the step has a filter, each rank finds the best token of
its columns, and the ranks exchange only those. Otherwise the ranks exchange the columns, so that each has some rows
with all their columns, samples those rows, and sends the tokens to the others.

A rank writes its columns into its own memory, and the others read them there. It writes its tokens or scores into every
rank's memory, and each rank reads its own. A barrier separates writing from reading. No second barrier protects the
memory from the next step's writes: every step begins with the layers' sums. A rank takes part in them after it has
read, and no rank finishes them before all have taken part. The plain twins are `Parallel.rows_of_columns` and
`Parallel.all_gather`.
"""

from collections.abc import Callable

import torch

from nanovllm.ops.collectives import Parallel
from nanovllm.ops.exchange import made_by_all
from nanovllm.ops.sample import num_parts_of


class SamplingExchange:
    """This rank's side of the exchange.

    Args:
        parallel: this rank's place.
        columns: each rank's memory for its columns of the logits, [max_num_rows, num_columns]; the bytes of a row are a
            multiple of 8.
        gathered: each rank's memory for the results of `all_gather`, int64 of one dimension.
        barrier: launches a kernel that ends only when every rank's stream has reached its own such kernel.
    """

    def __init__(
        self,
        parallel: Parallel,
        columns: list[torch.Tensor],
        gathered: list[torch.Tensor],
        barrier: Callable[[], object],
    ):
        self._rank, self._size = parallel.rank, parallel.size
        self._columns, self._gathered, self._barrier = columns, gathered, barrier

    @property
    def columns(self) -> torch.Tensor:
        """The memory for this rank's columns, [max_num_rows, num_columns]."""
        return self._columns[self._rank]

    def rows_of_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Like Parallel.rows_of_columns, but `columns` must be the leading rows of `self.columns`."""
        num_rows, num_columns = len(columns) // self._size, columns.shape[1]
        is_there = columns.data_ptr() == self.columns.data_ptr() or not num_rows  # a tensor without rows has no address
        assert is_there, "the other ranks read these columns in their fixed place"
        mine = slice(self._rank * num_rows, (self._rank + 1) * num_rows)
        rows = columns.new_empty(num_rows, self._size, num_columns)
        self._barrier()
        # The ranks begin with different peers, so that they do not all read from the same one at once.
        for distance in range(self._size):
            peer = (self._rank + distance) % self._size
            # As numbers of 8 bytes, because the copy moves one number at a time.
            rows[:, peer].view(torch.int64).copy_(self._columns[peer][mine].view(torch.int64))
        return rows.flatten(1)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like Parallel.all_gather. `tensor` is contiguous and its bytes are a multiple of 8; the next call overwrites
        the result."""
        flat = tensor.view(-1).view(torch.int64)
        mine = slice(self._rank * len(flat), (self._rank + 1) * len(flat))
        for of_rank in self._gathered:
            of_rank[mine].copy_(flat)
        self._barrier()
        gathered = self._gathered[self._rank][: self._size * len(flat)]
        return gathered.view(tensor.dtype).view(self._size * tensor.shape[0], *tensor.shape[1:])


def make_sampling_exchange(
    parallel: Parallel,
    max_num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    max_row_size: int = 2,
) -> SamplingExchange | None:
    """A SamplingExchange for `max_num_rows` rows, or None if the GPUs cannot reach each other's memory.

    max_row_size: maximum number of 32-bit numbers that a rank sends per row that it samples.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    def shared(dtype: torch.dtype, *shape: int) -> tuple[list[torch.Tensor], Callable[[], object]]:
        """Each rank's memory, and a barrier."""
        own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
        handle = symmetric_memory.rendezvous(own, parallel.group.group_name)
        memory = [handle.get_buffer(rank, own.shape, own.dtype) for rank in range(parallel.size)]
        memory[parallel.rank] = own  # also keeps the memory alive
        return memory, handle.barrier

    def make() -> SamplingExchange:
        columns, barrier = shared(dtype, max_num_rows, num_columns)
        # For each part of each row, each rank's best score and id; or the numbers of each row, from one rank.
        row_size = max(parallel.size * num_parts_of(num_columns), -(-max_row_size // 2))
        gathered, _ = shared(torch.int64, max_num_rows * row_size)
        return SamplingExchange(parallel, columns, gathered, barrier)

    return made_by_all(make, parallel, device)
