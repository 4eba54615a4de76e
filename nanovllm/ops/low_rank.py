"""The segmented product of LoRA adapters (Hu et al., 2021). It adds scale × B @ A @ x to each row of a linear layer's
product, with the factors of that row's own adapter.

A step's tokens are sorted by their slots once, for all layers. One kernel shrinks the inputs to the rank, A @ x, and
one expands the result and adds it. A program has a tile of tokens in that order, so it reads the factors of few slots.
Tokens without an adapter come first, and their tiles end at once: they cost nothing, and their rows keep their bits.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, let_next_come, wait
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.quantize import Quantized
from nanovllm.ops.row_invariant import PLAIN, RowOps


class AdapterRows(NamedTuple):
    """The adapters of some tokens.

    slots: int32 [num_tokens], 0 for tokens without an adapter.
    ordered: int32 [num_tokens], the slots in ascending order.
    order: int64 [num_tokens], the tokens' indices in this order.
    """

    slots: torch.Tensor
    ordered: torch.Tensor
    order: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor) -> "AdapterRows":
        return cls(slots, *slots.sort(stable=True))

    def at(self, tokens: torch.Tensor | None) -> "AdapterRows":
        """Those of the tokens with these indices, int64 [num_needed]; None for all."""
        return self if tokens is None else AdapterRows.of(self.slots.index_select(0, tokens))


class Factors(NamedTuple):
    """The factors of all slots beside one linear layer. The layer's outputs are those of one or several weights of the
    checkpoint, its parts, each with factors of its own.

    a: [num_slots, num_parts × rank, input_size]. Slot 1 comes first, because slot 0 has no factors.
    b: [num_slots, output_size, rank].
    scales: float32 [num_slots, num_parts].
    parts: int32 [output_size], the part that each output belongs to.
    counters: int32 [num_counters], zeros, which the kernels use and leave as zeros. Kernels that run at the same time
        need different counters.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    parts: torch.Tensor
    counters: torch.Tensor


class _Tiles(NamedTuple):
    """The work of the programs of both kernels.

    tokens: tokens of a tile.
    num_splits: how many programs of the first kernel share a tile's inputs, so that few tiles occupy all processors.
        The one that ends last adds their sums.
    outputs: outputs per program of the second kernel.
    """

    tokens: int
    num_splits: int
    outputs: int


# Maximum number of tokens -> tiles.
_TILES = {64: _Tiles(16, 32, 128), 512: _Tiles(16, 16, 256), 2048: _Tiles(32, 8, 128)}
_LARGEST_TILES = _Tiles(32, 1, 128)
_ONE_SIZE = _Tiles(16, 8, 256)  # if results must not depend on the step
_INPUT_BYTES = 256  # of each row of inputs and of A that a program multiplies at a time


def plain_add_low_rank(
    out: torch.Tensor, x: torch.Tensor | Quantized, factors: Factors, rows: AdapterRows, row_ops: RowOps
) -> torch.Tensor:
    num_parts, rank = factors.scales.shape[1], factors.b.shape[2]
    for slot in filter(None, rows.slots.unique().tolist()):
        a, b, scales = (tensor[slot - 1].float() for tensor in factors[:3])
        tokens = (rows.slots == slot).nonzero()[:, 0]
        inputs = Quantized(x.values[tokens], x.scales[tokens]).whole() if isinstance(x, Quantized) else x[tokens]
        hidden = row_ops.linear(inputs.float(), a)
        total = out[tokens].float()
        for part in range(num_parts):
            of_part = factors.parts == part
            inner = hidden[:, part * rank : (part + 1) * rank].contiguous()
            total[:, of_part] += row_ops.linear(inner, b[of_part]) * scales[part]
        out[tokens] = total.to(out.dtype)
    return out


@jit
def _tile(order, ordered, num_tokens, TOKENS: tl.constexpr):
    """(the tokens of this program's tile, their slots, the least slot above 0, the largest slot). The places after the
    last token have slot 0."""
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = tl.load(order + place, place < num_tokens, 0)
    slot = tl.load(ordered + place, place < num_tokens, 0)
    last = tl.max(slot, 0)
    # Offsets of slots need 64 bits.
    return token, slot, tl.min(tl.where(slot > 0, slot, last), 0).to(tl.int64), last.to(tl.int64)


@jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x, row_scales, a, order, ordered, hidden, counters, num_tokens, x_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """hidden: [num_splits, num_tokens, WIDTH], A @ x of each token with an adapter, summed over the SPLIT inputs of a
    split. At the end, the sum of all splits replaces the first. The grid is (tiles of tokens, tiles of the WIDTH ranks
    of all parts, splits)."""
    # In this order: the next kernel reads `order`, `ordered` and `out` before it waits, so they must be complete.
    wait()
    let_next_come()
    token, slot, first, last = _tile(order, ordered, num_tokens, TOKENS)
    if last > 0:
        rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        column = tl.program_id(2) * SPLIT + tl.arange(0, INPUTS)
        at_x = x + token[:, None] * x_stride + column[None, :]
        at_first = hidden + token[:, None] * WIDTH + rank[None, :]
        at_hidden = at_first + tl.program_id(2).to(tl.int64) * num_tokens * WIDTH
        is_rank = rank < WIDTH
        for each in range(first, last + 1):
            is_ours = slot == each
            if tl.max(is_ours.to(tl.int32), 0) > 0:
                at_a = a + (each - 1) * (WIDTH * SIZE) + rank[None, :] * SIZE + column[:, None]
                total = tl.zeros([TOKENS, RANKS], tl.float32)
                for start in range(0, SPLIT, INPUTS):
                    is_real = column < SIZE - start
                    factors = tl.load(at_a + start, is_real[:, None] & is_rank[None, :], 0.0)
                    values = tl.load(at_x + start, is_ours[:, None] & is_real[None, :], 0.0)
                    total = tl.dot(values.to(factors.dtype), factors, total, input_precision="ieee")
                if IS_QUANTIZED:
                    total *= tl.load(row_scales + token, is_ours, 0.0)[:, None]
                tl.store(at_hidden, total, is_ours[:, None] & is_rank[None, :])
        if NUM_SPLITS > 1:
            tl.debug_barrier()  # all threads have stored
            counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            if tl.atomic_add(counter, 1) == NUM_SPLITS - 1:
                tl.store(counter, 0)
                is_there = (slot > 0)[:, None] & is_rank[None, :]
                total = tl.zeros([TOKENS, RANKS], tl.float32)
                at_split = at_first
                for _ in tl.static_range(NUM_SPLITS):
                    total += tl.load(at_split, is_there, 0.0, cache_modifier=".cg")
                    at_split += num_tokens * WIDTH
                tl.store(at_first, total, is_there)


@jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    hidden, b, scales, parts, order, ordered, out, num_tokens, out_stride, OUTPUT_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Multiplies `hidden` by B and its scale, and adds that to `out`. The grid is (tiles of tokens, tiles of
    outputs)."""
    let_next_come()
    # The kernel before this one waited for these before it let this one start.
    token, slot, first, last = _tile(order, ordered, num_tokens, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < OUTPUT_SIZE
    part = tl.load(parts + output, is_output, 0)
    at_out = out + token[:, None] * out_stride + output[None, :]
    is_changed = (slot > 0)[:, None] & is_output[None, :]
    total = tl.load(at_out, is_changed, 0.0).to(tl.float32)
    wait()  # also in tiles without adapters, so that the kernel after this one waits for both
    if last > 0:
        first_part = tl.min(tl.where(is_output, part, NUM_PARTS), 0)
        last_part = tl.max(part, 0)
        for each in range(first, last + 1):
            is_ours = slot == each
            if tl.max(is_ours.to(tl.int32), 0) > 0:
                at_b = b + ((each - 1) * OUTPUT_SIZE + output[None, :]) * RANK
                for of_part in range(first_part, last_part + 1):
                    is_part = (part == of_part) & is_output
                    product = tl.zeros([TOKENS, OUTPUTS], tl.float32)
                    for start in tl.static_range(0, RANK, RANKS):
                        rank = start + tl.arange(0, RANKS)
                        at = hidden + token[:, None] * (NUM_PARTS * RANK) + of_part * RANK + rank[None, :]
                        inner = tl.load(at, is_ours[:, None], 0.0)
                        factors = tl.load(at_b + rank[:, None], is_part[None, :], 0.0)
                        product = tl.dot(inner.to(factors.dtype), factors, product, input_precision="ieee")
                    scale = tl.load(scales + (each - 1) * NUM_PARTS + of_part)
                    total = tl.where(is_ours[:, None] & is_part[None, :], total + product * scale, total)
        tl.store(at_out, total, is_changed)


def _tiles(num_tokens: int, deterministic: bool = False) -> _Tiles:
    if deterministic:
        return _ONE_SIZE
    return next((tiles for limit, tiles in _TILES.items() if num_tokens <= limit), _LARGEST_TILES)


def low_rank_variant(num_tokens: int) -> Hashable:
    """Numbers of tokens with equal results need the same compiled kernels."""
    return _tiles(num_tokens)


def triton_add_low_rank(
    out: torch.Tensor, x: torch.Tensor | Quantized, factors: Factors, rows: AdapterRows, deterministic: bool
) -> torch.Tensor:
    values, row_scales = x if isinstance(x, Quantized) else (x, None)
    (num_tokens, output_size), (_, width, size), rank = out.shape, factors.a.shape, factors.b.shape[2]
    tiles, num_inputs = _tiles(num_tokens, deterministic), _INPUT_BYTES // factors.a.itemsize
    split = triton.cdiv(triton.cdiv(size, tiles.num_splits), num_inputs) * num_inputs
    num_splits, num_tiles = triton.cdiv(size, split), triton.cdiv(num_tokens, tiles.tokens)
    hidden = torch.empty((num_splits, num_tokens, width), dtype=torch.float32, device=out.device)
    ranks = min(64, triton.next_power_of_2(width))
    num_rank_tiles, counters = triton.cdiv(width, ranks), factors.counters
    if num_splits > 1 and num_tiles * num_rank_tiles > len(counters):
        counters = torch.zeros(num_tiles * num_rank_tiles, dtype=torch.int32, device=out.device)
    _shrink_kernel[(num_tiles, num_rank_tiles, num_splits)](
        values, row_scales, factors.a, rows.order, rows.ordered, hidden, counters, num_tokens, values.stride(0),
        SIZE=size, WIDTH=width, SPLIT=split, NUM_SPLITS=num_splits, TOKENS=tiles.tokens, RANKS=ranks,
        INPUTS=num_inputs, IS_QUANTIZED=row_scales is not None, num_warps=4, num_stages=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    _expand_kernel[(num_tiles, triton.cdiv(output_size, tiles.outputs))](
        hidden, factors.b, factors.scales, factors.parts, rows.order, rows.ordered, out, num_tokens, out.stride(0),
        OUTPUT_SIZE=output_size, NUM_PARTS=width // rank, RANK=rank, TOKENS=tiles.tokens, OUTPUTS=tiles.outputs,
        RANKS=min(64, rank & -rank), num_warps=4, num_stages=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor | Quantized,
    factors: Factors,
    rows: AdapterRows,
    use_kernels: bool = False,
    row_ops: RowOps = PLAIN,
) -> torch.Tensor:
    """Adds scale × B @ A @ x to the outputs of each token with an adapter, in float32, and rounds once. Other tokens
    keep their bits.

    Args:
        out: [num_tokens, output_size], contiguous, the layer's product; it is changed.
        x: [num_tokens, input_size], the layer's inputs.
        factors: their rank is a multiple of 16.
        rows: of these tokens. The slots are at most `num_slots`.
        use_kernels: compute with the kernels, which round A @ x to the factors' dtype. All tiles have one size if
            `row_ops` are invariant. Otherwise `row_ops` multiply.

    Returns:
        `out`.
    """
    if use_kernels:
        return triton_add_low_rank(out, x, factors, rows, row_ops.is_invariant)
    return plain_add_low_rank(out, x, factors, rows, row_ops)
