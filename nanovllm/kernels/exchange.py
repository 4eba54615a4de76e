"""The ranks' sum of a layer's output, the residual and the RMSNorm after it in one kernel, over memory that all GPUs of
the model reach directly (NVLink).

Every rank's product is written where the others can read it. Each rank then sums its share of the rows, adds their
residuals, norms them, and writes the result to every rank: a reduce-scatter and an all-gather with the norm between
them. So a residual lies only with the rank whose row it is. The ranks meet before, when all products are written, and
after, when all rows have arrived; NCCL's all-reduce with RMSNorm.add is the plain twin.
"""

import logging

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import IS_SUPPORTED, LAUNCH_OPTIONS, begin
from nanovllm.utils.distributed import Parallel

logger = logging.getLogger(__name__)

_MOST_PROGRAMS = 264
# Of the weight that is read next: as much as memory gives while the ranks wait for each other, in parts of a program.
_PREFETCHED_BYTES, _PREFETCHED_PART = 24 * 2**20, 2**17
_MOST_ROWS_TO_PREFETCH = 512  # with more, a product takes longer than reading its weight


class Exchange:
    """Memory that all ranks share, for `max_rows` rows of `width` numbers.

    A result of `sum_add_norm` is good until the next one, and so is a product in `rows`.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(self, parallel: Parallel, max_rows: int, width: int, dtype: torch.dtype, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        self._rank, self._size = parallel.rank, parallel.size

        def shared(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
            tensor = symmetric_memory.empty(*shape, dtype=dtype, device=device)
            return tensor, symmetric_memory.rendezvous(tensor, parallel.group.group_name).buffer_ptrs

        self._products, products = shared((max_rows, width), dtype)
        self._normed, normed = shared((max_rows, width), dtype)
        self._flags, flags = shared((_MOST_PROGRAMS, self._size), torch.int32)
        self._flags.zero_()
        self._epochs = torch.zeros(_MOST_PROGRAMS, dtype=torch.int32, device=device)
        # Where each rank has the three: int64 [3, size].
        self._addresses = torch.tensor([products, normed, flags], device=device)
        torch.cuda.synchronize(device)
        parallel.barrier()  # nobody signals before all flags are 0

    def rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, width], where a product that is to be summed over the ranks goes."""
        return self._products[:num_rows]

    def sum_add_norm(
        self,
        num_rows: int,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        following: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(sum of the `rows` + residual), that sum, right in this rank's rows alone): [num_rows, width] each

        following: the weight that is read next, if that is known; its beginning is brought into the L2 cache meanwhile.
        """
        width = len(weight)
        total = torch.empty_like(self._products[:num_rows])
        num_programs = min(-(-num_rows // self._size), _MOST_PROGRAMS)
        num_parts = 0
        if following is not None and num_rows <= _MOST_ROWS_TO_PREFETCH and IS_SUPPORTED.value:
            num_parts = min(following.nbytes, _PREFETCHED_BYTES) // _PREFETCHED_PART
        _sum_add_norm_kernel[(num_programs + num_parts,)](
            self._addresses, self._epochs, total if residual is None else residual, total, weight,
            weight if following is None else following, num_rows, num_programs, eps, PART=_PREFETCHED_PART,
            ADDS=residual is not None, RANK=self._rank, SIZE=self._size, WIDTH=width,
            PADDED=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8, **LAUNCH_OPTIONS,
        )  # fmt: skip
        return self._normed[:num_rows], total


@triton.jit
def _meet(theirs, ours, epoch, SIZE: tl.constexpr):
    """Returns when this program of every rank is here; what any of them wrote before can then be read by all.

    theirs: where to tell the ranks, ours: where they tell this one; [SIZE] pointers.
    """
    tl.debug_barrier()
    nothing = tl.zeros([SIZE], tl.int32)
    tl.atomic_xchg(theirs, nothing + epoch, sem="release", scope="sys")
    # A rank may be one meeting ahead; the difference stays right when the count wraps around.
    while tl.min(tl.atomic_add(ours, nothing, sem="acquire", scope="sys") - epoch, 0) < 0:
        pass
    tl.debug_barrier()


@triton.jit
def _at(addresses, index, SIZE: tl.constexpr, dtype: tl.constexpr):
    """The pointer that stands at `index` of [SIZE] addresses in registers; loading it anew takes longer."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, addresses, 0), 0).to(tl.pointer_type(dtype))


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _sum_add_norm_kernel(
    addresses, epochs, residual, total, weight, following, num_rows, num_programs, eps, PART: tl.constexpr,
    ADDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The first programs take every so-manieth row of this rank each, the others prefetch."""
    program = tl.program_id(0)
    if program >= num_programs:
        _prefetch(following, program - num_programs, PART)
    else:
        column = tl.arange(0, PADDED)
        is_real = column < WIDTH
        # Nothing before writes these.
        weights = tl.load(weight + column, is_real, 0.0).to(tl.float32)
        peers = tl.arange(0, SIZE)
        product_addresses = tl.load(addresses + peers)
        normed_addresses = tl.load(addresses + SIZE + peers)
        theirs = tl.load(addresses + 2 * SIZE + peers).to(tl.pointer_type(tl.int32)) + program * SIZE + RANK
        ours = tl.load(addresses + 2 * SIZE + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE + peers
        begin()
        epoch = tl.load(epochs + program)
        _meet(theirs, ours, epoch + 1, SIZE)
        rows_of_rank = tl.cdiv(num_rows, SIZE)
        last = tl.minimum((RANK + 1) * rows_of_rank, num_rows)
        for row in range(RANK * rows_of_rank + program, last, num_programs):
            at = row * tl.full([], WIDTH, tl.int64) + column
            values = tl.zeros([PADDED], tl.float32)
            if ADDS:
                values += tl.load(residual + at, is_real, 0.0).to(tl.float32)
            for peer in tl.static_range(SIZE):
                products = _at(product_addresses, peer, SIZE, total.dtype.element_ty)
                values += tl.load(products + at, is_real, 0.0).to(tl.float32)
            # What is normed is the sum as it is kept.
            rounded = values.to(total.dtype.element_ty)
            tl.store(total + at, rounded, is_real)
            values = rounded.to(tl.float32)
            values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps) * weights
            for peer in tl.static_range(SIZE):
                normed = _at(normed_addresses, peer, SIZE, total.dtype.element_ty)
                tl.store(normed + at, values.to(total.dtype.element_ty), is_real)
        _meet(theirs, ours, epoch + 2, SIZE)
        tl.store(epochs + program, epoch + 2)


@triton.jit
def _prefetch(weight, part, PART: tl.constexpr):
    """Brings a part of a weight into the L2 cache; without waiting, for nothing writes weights."""
    address = weight.to(tl.int64) + part.to(tl.int64) * PART + tl.arange(0, PART // 512) * 512
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


def make_exchange(
    parallel: Parallel, max_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Exchange | None:
    """An Exchange, or None where the GPUs cannot reach each other's memory or their number is no power of 2."""
    if parallel.size & (parallel.size - 1):
        return None
    try:
        exchange = Exchange(parallel, max_rows, width, dtype, device)
    except torch.cuda.OutOfMemoryError:
        raise  # of this rank alone, perhaps
    except RuntimeError as error:
        logger.warning("the GPUs cannot reach each other's memory, so NCCL sums instead, slower: %s", error)
        exchange = None
    return exchange if parallel.minimum(exchange is not None, device) else None
