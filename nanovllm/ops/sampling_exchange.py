"""What the ranks exchange to sample, over memory that all GPUs of the model reach directly (NVLink).

A rank has some columns of the logits of all rows. Where a temperature is all that a step asks for, it finds the best of
them, and the ranks exchange those. Otherwise the ranks exchange the columns, so that each has some rows with all their
columns, samples those rows, and sends the others their tokens.

A rank writes into memory of its own that the others read, or reads into its own what they wrote, and a barrier stands
between. No second barrier protects the memory from the next step's writes: every step begins with the layers' sums, in
which a rank takes part after it has read, and which no rank ends before all have taken part. The plain twins are
`Parallel.rows_of_columns` and `Parallel.all_gather`, which NCCL does in several times the time.
"""

import logging
from collections.abc import Callable

import torch

from nanovllm.ops.collectives import Parallel
from nanovllm.ops.sample import num_sampled_parts

logger = logging.getLogger(__name__)


class SamplingExchange:
    """This rank's side.

    Args:
        parallel: this rank's place.
        columns: each rank's memory for its columns of the logits, [most_rows, num_columns]; 8 bytes divide a row.
        gathered: each rank's memory for what `all_gather` returns, int64 of one dimension.
        barrier: puts a kernel into the stream that ends when every rank's stream has come to its own.
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
        """Where this rank's columns belong, [most_rows, num_columns]."""
        return self._columns[self._rank]

    def rows_of_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """As Parallel.rows_of_columns, but `columns` must be the leading rows of `self.columns`."""
        num_rows, num_columns = len(columns) // self._size, columns.shape[1]
        mine = slice(self._rank * num_rows, (self._rank + 1) * num_rows)
        rows = columns.new_empty(num_rows, self._size, num_columns)
        self._barrier()
        for distance in range(self._size):  # so that the ranks do not all read from one at once
            peer = (self._rank + distance) % self._size
            # Eight bytes at a time: NVLink carries them in half the time of two.
            rows[:, peer].view(torch.int64).copy_(self._columns[peer][mine].view(torch.int64))
        return rows.flatten(1)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Parallel.all_gather, of contiguous tensors whose bytes 8 divides; the next call writes over the result."""
        flat = tensor.view(-1).view(torch.int64)
        mine = slice(self._rank * len(flat), (self._rank + 1) * len(flat))
        for of_rank in self._gathered:
            of_rank[mine].copy_(flat)
        self._barrier()
        gathered = self._gathered[self._rank][: self._size * len(flat)]
        return gathered.view(tensor.dtype).view(self._size * tensor.shape[0], *tensor.shape[1:])


def make_sampling_exchange(
    parallel: Parallel, most_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> SamplingExchange | None:
    """A SamplingExchange for `most_rows` rows, or None where the GPUs cannot reach each other's memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    try:
        num_gathered = parallel.size * most_rows * num_sampled_parts(num_columns)  # more than one token for each row
        memory = [
            symmetric_memory.empty(*shape, dtype=of_dtype, device=device)
            for shape, of_dtype in (((most_rows, num_columns), dtype), ((num_gathered,), torch.int64))
        ]
        handles = [symmetric_memory.rendezvous(tensor, parallel.group.group_name) for tensor in memory]
        columns, gathered = (
            [handle.get_buffer(rank, tensor.shape, tensor.dtype) for rank in range(parallel.size)]
            for handle, tensor in zip(handles, memory, strict=True)
        )
        columns[parallel.rank], gathered[parallel.rank] = memory  # which also keeps it
        exchange = SamplingExchange(parallel, columns, gathered, handles[0].barrier)
    except torch.cuda.OutOfMemoryError:
        raise  # perhaps on this rank alone
    except RuntimeError as error:
        logger.warning("the GPUs cannot reach each other's memory, so NCCL moves logits, which is slower: %s", error)
        exchange = None
    return exchange if parallel.minimum(exchange is not None, device) else None
