"""The ranks' sum of a layer's output, the residual and the RMSNorm after it in one kernel, over memory that all GPUs of
the model reach directly (NVLink).

There are two ways, and the number of bytes decides which one takes less time. Directly: every rank sends its product to
all ranks, and each sums, adds the residual and norms for itself. By owner: every rank sends each row to the rank that
owns it; the owner sums, adds the residual, norms and sends the result to all. That is a reduce-scatter and an
all-gather with the norm between them. With more than two ranks it sends less, but takes two trips instead of one, and
only a row's owner has its residual. The plain twin is `Parallel.all_reduce`, then `add_rms_norm`.

With FP8 weights, a product keeps its scales until it is sent, and the normed rows are rounded for the next product. The
plain twin of that is `ScaledProduct.whole` before, and `quantize_rows` after.

No rank signals that it has sent. An empty place of a mailbox holds −0.0, and no rank sends −0.0 (it sends 0.0 instead).
A rank that waits reads until no −0.0 is left, then writes −0.0 again; TensorRT-LLM calls such an all-reduce Lamport's.
Successive sums use different mailboxes. A rank empties the mailbox of one sum before it sends in the next, and no rank
ends that next sum before all have sent in it. So a rank that sends in the sum after that finds an empty mailbox.

Some of this relies on the hardware, not on guarantees of CUDA: plain stores arrive at another GPU while the sender
waits, a number arrives whole, and a grid's programs start in the order of their numbers.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from nanovllm.ops.collectives import Parallel
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.quantize import Quantized, ScaledProduct, divided_by_peak, empty_quantized

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")

# Rows of half a mailbox. More rows go in parts. Each part costs a wait for the ranks, short compared with its rows.
_MAX_ROWS = 2048
# Bytes that NVLink carries during a trip: to save a trip, this many more bytes may be sent.
_BYTES_OF_A_TRIP = 2**20


class Exchange:
    """This rank's side of the sums of products of one width.

    Args:
        parallel: this rank's place.
        mail: this rank's memory, `mail_shape(width)`, which all ranks reach; it is filled with −0.0.
        addresses: the address of each rank's memory in this process.
    """

    def __init__(self, parallel: Parallel, mail: torch.Tensor, addresses: list[int]):
        self._rank, self._size, self._mail, self._mailbox = parallel.rank, parallel.size, mail.fill_(-0.0), 0
        # The distance of each rank's mail from this rank's, in numbers: int64 [size].
        distances = [(address - addresses[parallel.rank]) // mail.itemsize for address in addresses]
        self._distances = torch.tensor(distances, device=mail.device)

    def sum_add_norm(
        self,
        product: torch.Tensor | ScaledProduct,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        begins_step: bool,
        quantizes: bool = False,
    ) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
        """(norm(the ranks' products + residual), that sum): [num_rows, width] each, the first in FP8 if it `quantizes`

        The second is only a residual for the next call: it may lack the rows of other ranks.

        Args:
            product: this rank's product, contiguous [num_rows, width]; a ScaledProduct is scaled before it is sent.
            residual: the second result of the last call; None is zeros.
            weight: [width]; None does not norm, so that the first result is the whole sum.
            begins_step: whether this is the first call of a step. A step makes at least two calls, all with the same
                number of rows.
            quantizes: whether the first result is in FP8, with a scale per row.
        """
        given, row_scales, column_scales = product if isinstance(product, ScaledProduct) else (product, None, None)
        num_rows, width = given.shape
        total = torch.empty_like(given)
        normed = empty_quantized(num_rows, width, given.device) if quantizes else torch.empty_like(given)
        out, scales = normed if isinstance(normed, Quantized) else (normed, None)
        # At least as many numbers as threads: two threads that read one number might see different values.
        padded = max(128, triton.next_power_of_2(width))
        num_warps = 4 if padded <= 1024 else min(16, max(8, self._size * padded // 2048))
        is_direct = self.sends_directly(num_rows, given.nbytes)
        for first in range(0, num_rows, _MAX_ROWS):
            part = slice(first, min(first + _MAX_ROWS, num_rows))
            # Captured steps keep their mailboxes. So each step begins with mailbox 2 and ends, because it has at least
            # two sums, with 0 or 1: the first mailbox of any step is not the last one of the step before.
            self._mailbox = 2 if begins_step and first == 0 else int(self._mailbox == 0)
            num_programs = part.stop - first if is_direct else -(-(part.stop - first) // self._size)
            _sum_add_norm_kernel[(num_programs,)](
                self._mail[self._mailbox], self._distances, given[part],
                None if row_scales is None else row_scales[part], column_scales,
                given[part] if residual is None else residual[part], total[part], out[part],
                None if scales is None else scales[part], weight,
                part.stop - first, num_programs, eps, ADDS=residual is not None, NORMS=weight is not None,
                IS_DIRECT=is_direct, RANK=self._rank, SIZE=self._size, WIDTH=width, PADDED=padded,
                HALF=self._mail[0, 0].numel(), num_warps=num_warps, **LAUNCH_OPTIONS,
            )  # fmt: skip
        return normed, total

    def sends_directly(self, num_rows: int, num_bytes: int) -> bool:
        """Whether products of `num_rows` rows and `num_bytes` bytes go directly; each way has a kernel of its own."""
        return _is_direct(self._size, num_rows, num_bytes)


def mail_shape(width: int) -> tuple[int, ...]:
    """[mailboxes, halves, rows, width]. By owner, one half is for products and one for normed rows; directly, both are
    for products. Two mailboxes alternate, and the third begins a step."""
    return 3, 2, _MAX_ROWS, width


def _is_direct(size: int, num_rows: int, num_bytes: int) -> bool:
    """Whether it is faster to send `size` ranks' products of `num_rows` rows and `num_bytes` bytes to all."""
    sent_directly, sent_by_owner = (size - 1) * num_bytes, 2 * (size - 1) * num_bytes / size
    fits = size * min(num_rows, _MAX_ROWS) <= 2 * _MAX_ROWS
    return fits and sent_directly - sent_by_owner <= _BYTES_OF_A_TRIP


@jit(do_not_specialize=["num_rows", "num_programs"])
def _sum_add_norm_kernel(
    mail, distances, product, row_scales, column_scales, residual, total, normed, scales, weight, num_rows,
    num_programs, eps, ADDS: tl.constexpr, NORMS: tl.constexpr, IS_DIRECT: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Directly, a program sends and sums the row of its number; by owner it sends one row to each rank, and sums this
    rank's.

    It waits only for the other ranks' programs of the same number, so any number of them may run at once.

    mail: a mailbox, [2, _MAX_ROWS, WIDTH]; distances: [SIZE]; product, residual, total, normed: [num_rows, WIDTH].
    row_scales, column_scales: those of a ScaledProduct, else None. scales: those of `normed` in FP8, else None.
    """
    program = tl.program_id(0)
    column = tl.arange(0, PADDED)
    is_real = column < WIDTH
    if NORMS:
        weights = tl.load(weight + column, is_real, 0.0).to(tl.float32)  # no earlier kernel writes them
    if column_scales is not None:
        of_columns = tl.load(column_scales + column, is_real, 0.0)[None, :]
    ranks = tl.arange(0, SIZE)
    mails = mail + tl.multiple_of(tl.load(distances + ranks), 16)[:, None] + column
    begin()
    wide = tl.full([], WIDTH, tl.int64)
    numbers = ranks * num_programs + program
    at = numbers[:, None] * wide + column  # places in the mail of each rank's products
    sent_to = (RANK * num_programs + program) * wide
    row = program if IS_DIRECT else RANK * num_programs + program
    row_at = row * wide + column
    if IS_DIRECT:
        is_there = is_real[None, :]
        products = tl.load(product + row_at, is_real, 0.0)[None, :]
        if row_scales is not None:
            products = products.to(tl.float32) * tl.load(row_scales + row)
    else:
        is_there = (numbers < num_rows)[:, None] & is_real
        products = tl.load(product + at, is_there, 0.0)
        if row_scales is not None:
            products = products.to(tl.float32) * tl.load(row_scales + numbers, numbers < num_rows, 0.0)[:, None]
    if row_scales is not None:
        products = (products * of_columns).to(total.dtype.element_ty)
    _send(mails + sent_to, products, is_there)
    if row < num_rows:
        values = tl.sum(_receive(mail + at, is_real[None, :]).to(tl.float32), 0)
        if ADDS:
            values += tl.load(residual + row_at, is_real, 0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row_at, rounded, is_real)
        values = rounded.to(tl.float32)  # the norm reads the rounded sum, as it is stored
        if NORMS:
            values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps) * weights
        finished = values.to(total.dtype.element_ty)[None, :]
        if IS_DIRECT:
            one_row = tl.full([1, 1], row, tl.int32)
            _finish(normed, scales, finished, row_at[None, :], one_row, one_row < num_rows, is_there)
        else:
            _send(mails + HALF + sent_to, finished, is_real[None, :])
    if not IS_DIRECT:
        finished = _receive(mail + HALF + at, is_there)
        _finish(normed, scales, finished, at, numbers[:, None], (numbers < num_rows)[:, None], is_there)


@jit
def _finish(normed, scales, values, at, row, is_row, is_there):
    """Writes rows of the result, in FP8 if it has scales."""
    if scales is not None:
        values = values.to(tl.float32)
        values, of_rows = divided_by_peak(values, tl.max(tl.abs(values), 1)[:, None])
        tl.store(scales + row, of_rows, is_row)
    tl.store(normed + at, values, is_there)


@jit
def _send(mails, values, is_there):
    tl.store(mails, tl.where(_is_nothing(values), 0.0, values), is_there)


@jit
def _receive(mail, is_there):
    """Waits until the mail is full, returns its values and empties it."""
    values = tl.load(mail, is_there, 0.0, volatile=True)
    while tl.max(_is_nothing(values).to(tl.int32)) > 0:
        values = tl.load(mail, is_there, 0.0, volatile=True)
    tl.store(mail, _nothing(values.dtype), is_there)
    return values


@jit
def _nothing(dtype: tl.constexpr):
    """−0.0, made of its bits, because Triton takes `-0.0` for 0.0 − 0.0."""
    bits: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    lowest: tl.constexpr = -(2 ** (dtype.primitive_bitwidth - 1))
    return tl.full([1, 1], lowest, bits).to(dtype, bitcast=True)


@jit
def _is_nothing(values):
    bits: tl.constexpr = tl.int16 if values.dtype.primitive_bitwidth == 16 else tl.int32
    return values.to(bits, bitcast=True) == _nothing(values.dtype).to(bits, bitcast=True)


def make_exchange(parallel: Parallel, width: int, dtype: torch.dtype, device: torch.device) -> Exchange | None:
    """An Exchange, or None if the GPUs cannot reach each other's memory or their number is not a power of 2."""
    import torch.distributed._symmetric_memory as symmetric_memory

    def make() -> Exchange:
        mail = symmetric_memory.empty(*mail_shape(width), dtype=dtype, device=device)
        addresses = symmetric_memory.rendezvous(mail, parallel.group.group_name).buffer_ptrs
        exchange = Exchange(parallel, mail, addresses)
        torch.cuda.synchronize(device)
        return exchange

    # made_by_all waits for all ranks, so that no rank sends before all mailboxes are empty.
    return None if parallel.size & (parallel.size - 1) else made_by_all(make, parallel, device)


def made_by_all(make: Callable[[], _Made], parallel: Parallel, device: torch.device) -> _Made | None:
    """The result of `make`, over memory that all GPUs reach, once every rank has one; None if some rank cannot."""
    made = None
    try:
        made = make()
    except torch.cuda.OutOfMemoryError:
        raise  # not a missing link: the other ranks may have enough memory
    except RuntimeError as error:
        logger.warning("the GPUs cannot reach each other's memory, so they exchange through NCCL: %s", error)
    return made if parallel.minimum(made is not None, device) else None
