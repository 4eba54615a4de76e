"""The ranks' sum of a layer's output, the residual and the RMSNorm after it in one kernel, over memory that all GPUs of
the model reach directly (NVLink).

Two ways, of which the one that takes less time is chosen by what is to be carried. Directly, every rank sends its
product to all, and each sums, adds the residual and norms for itself. By owner, every rank sends each row to the rank
whose row it is; that one sums them, adds the residual, norms the sum and sends the result to all: a reduce-scatter and
an all-gather with the norm between them, which carries less and takes twice as long to arrive. The residual of a row is
then known to its owner alone. NCCL's all-reduce with RMSNorm.add is the plain twin.

No rank says that it has sent. A mailbox holds −0.0 wherever nothing has come, nobody sends −0.0 (0.0 goes in its
place), and whoever waits reads until none is left, then writes −0.0 anew; TensorRT-LLM calls such an all-reduce
Lamport's. One call does not use the mailbox of the call before: a rank has emptied that one before it sends in this
call, and nobody ends this call before all have sent, so that what is sent in the next finds it empty.
"""

import logging

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.utils.distributed import Parallel

logger = logging.getLogger(__name__)

# Rows of either half of a mailbox. More are sent in parts, each of which takes long beside the ranks' wait.
_MOST_ROWS = 2048
# What NVLink carries in the time in which a row arrives: so much more may be sent to spare the second way.
_BYTES_OF_A_WAY = 2**20


class Exchange:
    """Mailboxes for rows of `width` numbers, which all ranks reach.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(self, parallel: Parallel, width: int, dtype: torch.dtype, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        mail = symmetric_memory.empty(*mail_shape(width), dtype=dtype, device=device)
        self._set(parallel, mail, symmetric_memory.rendezvous(mail, parallel.group.group_name).buffer_ptrs)
        torch.cuda.synchronize(device)
        parallel.barrier()  # nobody sends before all mailboxes are empty

    def _set(self, parallel: Parallel, mail: torch.Tensor, addresses: list[int]) -> None:
        self._rank, self._size, self._mail, self._mailbox = parallel.rank, parallel.size, mail.fill_(-0.0), 0
        # How far each rank's mail is from this one's, in numbers: int64 [size].
        distances = [(address - addresses[parallel.rank]) // mail.itemsize for address in addresses]
        self._distances = torch.tensor(distances, device=mail.device)

    def sum_add_norm(
        self, product: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(the ranks' products + residual), that sum, which is for the next call alone): [num_rows, width] each

        Args:
            product: this rank's, contiguous [num_rows, width].
            residual: the second result of the call before; None in the first call of a step, and only there.
        """
        num_rows, width = product.shape
        normed, total = torch.empty_like(product), torch.empty_like(product)
        padded = max(128, triton.next_power_of_2(width))
        more = (self._size - 1) * (self._size - 2) / self._size * product.nbytes
        is_direct = more <= _BYTES_OF_A_WAY and self._size * min(num_rows, _MOST_ROWS) <= 2 * _MOST_ROWS
        for first in range(0, num_rows, _MOST_ROWS):
            part = slice(first, min(first + _MOST_ROWS, num_rows))
            # A captured step holds the numbers of its mailboxes: all steps begin alike, and none as any ends.
            self._mailbox = 2 if residual is None and first == 0 else int(self._mailbox == 0)
            num_programs = part.stop - first if is_direct else -(-(part.stop - first) // self._size)
            _sum_add_norm_kernel[(num_programs,)](
                self._mail[self._mailbox], self._distances, product[part],
                product[part] if residual is None else residual[part], total[part], normed[part], weight,
                part.stop - first, num_programs, eps, ADDS=residual is not None, IS_DIRECT=is_direct, RANK=self._rank,
                SIZE=self._size, WIDTH=width, PADDED=padded, HALF=self._mail[0, 0].numel(),
                num_warps=4 if padded <= 1024 else min(16, max(8, self._size * padded // 2048)), **LAUNCH_OPTIONS,
            )  # fmt: skip
        return normed, total


def mail_shape(width: int) -> tuple[int, ...]:
    """Three mailboxes, each for products and for normed rows."""
    return 3, 2, _MOST_ROWS, width


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _sum_add_norm_kernel(
    mail, distances, product, residual, total, normed, weight, num_rows, num_programs, eps, ADDS: tl.constexpr,
    IS_DIRECT: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """A program has one row, or one of each rank.

    It waits for those of the same number alone, and programs start in order: it matters not how many run at once.
    """
    program = tl.program_id(0)
    column = tl.arange(0, PADDED)
    is_real = column < WIDTH
    weights = tl.load(weight + column, is_real, 0.0).to(tl.float32)  # nothing before writes them
    ranks = tl.arange(0, SIZE)
    mails = mail + tl.multiple_of(tl.load(distances + ranks), 16)[:, None] + column
    begin()
    wide = tl.full([], WIDTH, tl.int64)
    numbers = ranks * num_programs + program
    at = numbers[:, None] * wide + column  # in the mail, what each rank sends
    sent_to = (RANK * num_programs + program) * wide
    row = program if IS_DIRECT else RANK * num_programs + program
    row_at = row * wide + column
    if IS_DIRECT:
        is_there = is_real[None, :]
        products = tl.load(product + row_at, is_real, 0.0)[None, :]
    else:
        is_there = (numbers < num_rows)[:, None] & is_real
        products = tl.load(product + at, is_there, 0.0)
    _send(mails + sent_to, products, is_there)
    if row < num_rows:
        values = tl.sum(_receive(mail + at, is_real[None, :]).to(tl.float32), 0)
        if ADDS:
            values += tl.load(residual + row_at, is_real, 0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row_at, rounded, is_real)
        values = rounded.to(tl.float32)  # what is normed is the sum as it is kept
        values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps) * weights
        if IS_DIRECT:
            tl.store(normed + row_at, values, is_real)
        else:
            _send(mails + HALF + sent_to, values.to(total.dtype.element_ty)[None, :], is_real[None, :])
    if not IS_DIRECT:
        tl.store(normed + at, _receive(mail + HALF + at, is_there), is_there)


@triton.jit
def _send(mails, values, is_there):
    tl.store(mails, tl.where(values == 0, 0.0, values), is_there)


@triton.jit
def _receive(mail, is_there):
    """What stands in the mail once all of it has come; then it is empty again."""
    values = tl.load(mail, is_there, 0.0, volatile=True)
    while tl.max(_is_nothing(values).to(tl.int32)) > 0:
        values = tl.load(mail, is_there, 0.0, volatile=True)
    tl.store(mail, _nothing(values.dtype), is_there)
    return values


@triton.jit
def _nothing(dtype: tl.constexpr):
    """−0.0, from its bits: Triton takes `-0.0` for 0.0 − 0.0."""
    bits: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    lowest: tl.constexpr = -(2 ** (dtype.primitive_bitwidth - 1))
    return tl.full([1, 1], lowest, bits).to(dtype, bitcast=True)


@triton.jit
def _is_nothing(values):
    bits: tl.constexpr = tl.int16 if values.dtype.primitive_bitwidth == 16 else tl.int32
    return values.to(bits, bitcast=True) == _nothing(values.dtype).to(bits, bitcast=True)


def make_exchange(parallel: Parallel, width: int, dtype: torch.dtype, device: torch.device) -> Exchange | None:
    """An Exchange, or None where the GPUs cannot reach each other's memory or their number is no power of 2."""
    if parallel.size & (parallel.size - 1):
        return None
    try:
        exchange = Exchange(parallel, width, dtype, device)
    except torch.cuda.OutOfMemoryError:
        raise  # of this rank alone, perhaps
    except RuntimeError as error:
        logger.warning("the GPUs cannot reach each other's memory, so NCCL sums instead, slower: %s", error)
        exchange = None
    return exchange if parallel.minimum(exchange is not None, device) else None
