"""The experts' gated MLPs, each on the tokens that chose it, and their weighted sum.

A pair is a token and one of its experts: pair i belongs to token i // top_k. One kernel lists each expert's pairs. The
two grouped products have a fixed grid and read on the device how many pairs an expert has, so a captured step serves
any choice. They read only the weights of chosen experts, and write their results by pair. So nothing is sorted, and a
token's results are added in the order of its experts, in which the other tokens' choices play no part.

Weights in FP8 become numbers of the inputs' dtype when they are read, and the inputs are not rounded: most of an
expert's cost is the reading of its weights.
"""

from math import gcd
from typing import NamedTuple

import torch

from nanovllm.ops.act_and_mul import activated
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, shared_memory, tl, triton
from nanovllm.ops.route import Routes
from nanovllm.ops.row_invariant import PLAIN, RowOps


class _Tile(NamedTuple):
    """The work of a program of a grouped product.

    columns: columns of the result; input_bytes: bytes per stage of each row of inputs and weights; num_stages: stages
        that are loaded at a time.
    """

    columns: int
    input_bytes: int
    num_stages: int
    num_warps: int


class ExpertWeights(NamedTuple):
    """One projection of all experts.

    weight: [num_experts, output_size, input_size].
    scales: for FP8, float32 [num_experts, output_size / rows, input_size / columns], rounded up; otherwise None.
    rows, columns: the size of the weight's blocks with a scale; the last block of a row or column may be cut off.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    rows: int = 1
    columns: int = 1

    def whole(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[output_size, input_size]"""
        weight = self.weight[expert]
        if self.scales is None:
            return weight
        of_rows = self.scales[expert].repeat_interleave(self.rows, 0)[: weight.shape[0]]
        return (weight.float() * of_rows.repeat_interleave(self.columns, 1)[:, : weight.shape[1]]).to(dtype)

    def options(self, inputs: int) -> dict[str, int]:
        """The kernels' constants: ROWS and COLUMNS of a block and WIDTH, the blocks per row, all 0 without scales.
        INPUTS is the number of inputs that they multiply at a time: `inputs`, or fewer that share a scale."""
        if self.scales is None:
            return {"ROWS": 0, "COLUMNS": 0, "WIDTH": 0, "INPUTS": inputs}
        width = self.scales.shape[2]
        if width > 1:
            inputs = gcd(inputs, self.columns)
        return {"ROWS": self.rows, "COLUMNS": self.columns, "WIDTH": width, "INPUTS": inputs}


# Pairs of a tile -> (tile of the product that makes `hidden`, tile of the one that makes `outputs`): the fastest of 121
# and of 131 shapes on an H200 with the experts of Qwen3-30B-A3B (docs/record.md).
_TILES = {
    16: (_Tile(32, 256, 4, 4), _Tile(128, 256, 4, 4)),
    32: (_Tile(64, 256, 3, 4), _Tile(128, 256, 3, 4)),
    64: (_Tile(64, 128, 3, 4), _Tile(128, 128, 3, 4)),
    128: (_Tile(128, 128, 4, 8), _Tile(256, 128, 4, 8)),
}
_ONE_SIZE = 64  # of all tiles, if results must not depend on the step: others add FP8 in other portions
# Maximum number of pairs that the listing kernel reads at a time.
_PAIRS_OF_CHUNK = 8192


def plain_grouped_mlp(
    x: torch.Tensor, routes: Routes, gate_up: ExpertWeights, down: ExpertWeights, activation: str, row_ops: RowOps
) -> torch.Tensor:
    outputs = x.new_zeros(*routes.experts.shape, x.shape[1])
    for expert in routes.experts.unique().tolist():
        token, place = torch.where(routes.experts == expert)
        hidden = row_ops.act_and_mul(row_ops.linear(x[token], gate_up.whole(expert, x.dtype)), activation)
        outputs[token, place] = row_ops.linear(hidden, down.whole(expert, x.dtype))
    return (outputs.float() * routes.weights[:, :, None]).sum(1).to(x.dtype)


@jit(do_not_specialize=["num_pairs", "num_tokens"])
def _pairs_kernel(experts, pairs, counts, num_pairs, num_tokens, CHUNK: tl.constexpr):
    """One program per expert lists its pairs in order.

    experts: [num_pairs]; pairs: [num_experts, num_tokens]; counts: [num_experts].
    """
    begin()
    expert = tl.program_id(0)
    count = 0
    for first in range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        is_ours = (tl.load(experts + pair, pair < num_pairs, -1) == expert).to(tl.int32)
        place = count + tl.cumsum(is_ours, 0) - is_ours
        tl.store(pairs + expert.to(tl.int64) * num_tokens + place, pair, is_ours > 0)
        count += tl.sum(is_ours, 0)
    tl.store(counts + expert, count)


@jit
def _tile(pairs, counts, num_tokens, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """(expert, its pairs in this program's tile, which of them are real, whether any is); a tile has at most PAIRS
    pairs of one expert, and none if it is one of the last, unused tiles."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert, expert < NUM_EXPERTS, 0)
    num_tiles = (count + PAIRS - 1) // PAIRS
    end = tl.cumsum(num_tiles, 0)
    ours = tl.sum((end <= tl.program_id(0)).to(tl.int32), 0).to(tl.int64)
    is_ours = expert == ours
    first = (tl.program_id(0) - tl.sum(tl.where(is_ours, end - num_tiles, 0), 0)) * PAIRS
    num_pairs = tl.sum(tl.where(is_ours, count, 0), 0)
    place = first + tl.arange(0, PAIRS)
    pair = tl.load(pairs + ours * num_tokens + place, place < num_pairs, 0).to(tl.int64)
    return ours, pair, place < num_pairs, first < num_pairs


@jit
def _product(
    values, at_weights, is_weight, scales, expert, output, is_output, start, OUTPUT_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The product of some inputs, the first of which is `start`, and their weights, times the scales of the weights."""
    weights = tl.load(at_weights, is_weight, 0.0).to(values.dtype)
    product = tl.dot(values, weights, input_precision="ieee")
    if ROWS:  # an early return would not do: Triton would still compile the rest
        of_expert = scales + expert * (tl.cdiv(OUTPUT_SIZE, ROWS) * WIDTH)
        at = of_expert + output // ROWS * WIDTH + start // COLUMNS
        product *= tl.load(at, is_output, 0.0)[None, :]
    return product


@jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    x, gate_up, scales, pairs, counts, hidden, num_tokens, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SIZE: tl.constexpr, HIDDEN_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """hidden: [num_pairs, SIZE]; one program per tile of pairs and of the columns of `hidden`."""
    begin()
    expert, pair, is_pair, has_pairs = _tile(pairs, counts, num_tokens, NUM_EXPERTS, EXPERTS, PAIRS)
    if has_pairs:
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        column = tl.arange(0, INPUTS)
        is_output = output < SIZE
        at_x = x + (pair // TOP_K)[:, None] * HIDDEN_SIZE + column[None, :]
        weights = gate_up + expert * (2 * SIZE * HIDDEN_SIZE)
        at_gate = weights + output[None, :] * HIDDEN_SIZE + column[:, None]
        gate = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        up = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for start in range(0, HIDDEN_SIZE, INPUTS):
            is_real = column < HIDDEN_SIZE - start
            values = tl.load(at_x + start, is_pair[:, None] & is_real[None, :], 0.0)
            is_weight = is_real[:, None] & is_output[None, :]
            gate += _product(
                values, at_gate + start, is_weight, scales, expert, output, is_output, start, 2 * SIZE, ROWS, COLUMNS,
                WIDTH,
            )  # fmt: skip
            up += _product(
                values, at_gate + SIZE * HIDDEN_SIZE + start, is_weight, scales, expert, SIZE + output, is_output,
                start, 2 * SIZE, ROWS, COLUMNS, WIDTH,
            )  # fmt: skip
        at = hidden + pair[:, None] * SIZE + output[None, :]
        tl.store(at, activated(gate, ACTIVATION) * up, is_pair[:, None] & is_output[None, :])


@jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    hidden, down, scales, pairs, counts, outputs, num_tokens, NUM_EXPERTS: tl.constexpr, SIZE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """outputs: [num_pairs, HIDDEN_SIZE]; one program per tile of pairs and of the columns of `outputs`."""
    begin()
    expert, pair, is_pair, has_pairs = _tile(pairs, counts, num_tokens, NUM_EXPERTS, EXPERTS, PAIRS)
    if has_pairs:
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        column = tl.arange(0, INPUTS)
        is_output = output < HIDDEN_SIZE
        at_hidden = hidden + pair[:, None] * SIZE + column[None, :]
        at_down = down + expert * (SIZE * HIDDEN_SIZE) + output[None, :] * SIZE + column[:, None]
        total = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for start in range(0, SIZE, INPUTS):
            is_real = column < SIZE - start
            values = tl.load(at_hidden + start, is_pair[:, None] & is_real[None, :], 0.0)
            total += _product(
                values, at_down + start, is_real[:, None] & is_output[None, :], scales, expert, output, is_output,
                start, HIDDEN_SIZE, ROWS, COLUMNS, WIDTH,
            )  # fmt: skip
        tl.store(outputs + pair[:, None] * HIDDEN_SIZE + output[None, :], total, is_pair[:, None] & is_output[None, :])


@jit
def _combine_kernel(outputs, weights, out, TOP_K: tl.constexpr, HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program per token and block of columns."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < HIDDEN_SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        values = tl.load(outputs + pair * HIDDEN_SIZE + column, is_real, 0.0).to(tl.float32)
        total += values * tl.load(weights + pair)
    tl.store(out + token * HIDDEN_SIZE + column, total, is_real)


def find_pairs_of_tile(num_pairs: int, num_experts: int, dtype: torch.dtype, deterministic: bool = False) -> int:
    """Pairs of a token and an expert per program."""
    if deterministic:
        return _ONE_SIZE
    # A tile holds about twice the average number of pairs per expert, because each further tile of an expert reads its
    # weights again. With the largest tile, products of float32 would need too many registers.
    max_num_pairs = 128 if dtype.itemsize == 2 else 64
    return min(max_num_pairs, max(16, triton.next_power_of_2(2 * num_pairs // num_experts)))


def _launch_options(tile: _Tile, num_rows: int, x: torch.Tensor) -> dict[str, int]:
    """num_rows: rows of inputs and weights that a program loads per stage. As many stages as fit are loaded."""
    return {
        "OUTPUTS": tile.columns,
        "num_stages": min(tile.num_stages, shared_memory(x.device) // (num_rows * tile.input_bytes)),
        "num_warps": tile.num_warps,
    }


def triton_grouped_mlp(
    x: torch.Tensor, routes: Routes, gate_up: ExpertWeights, down: ExpertWeights, activation: str, deterministic: bool
) -> torch.Tensor:
    (num_tokens, top_k), (num_experts, hidden_size, size), device = routes.experts.shape, down.weight.shape, x.device
    num_pairs = num_tokens * top_k
    pairs = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    hidden = torch.empty((num_pairs, size), dtype=x.dtype, device=device)
    outputs = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    chunk = min(_PAIRS_OF_CHUNK, max(1024, triton.next_power_of_2(num_pairs)))
    _pairs_kernel[(num_experts,)](
        routes.experts, pairs, counts, num_pairs, num_tokens, CHUNK=chunk, num_warps=max(4, chunk // 1024),
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    pairs_of_tile = find_pairs_of_tile(num_pairs, num_experts, x.dtype, deterministic)
    num_tiles = num_pairs // pairs_of_tile + min(num_experts, num_pairs)
    of_hidden, of_outputs = _TILES[pairs_of_tile]
    shape = {
        "NUM_EXPERTS": num_experts, "SIZE": size, "HIDDEN_SIZE": hidden_size, "PAIRS": pairs_of_tile,
        "EXPERTS": triton.next_power_of_2(num_experts), **LAUNCH_OPTIONS,
    }  # fmt: skip
    _gate_up_kernel[(num_tiles, triton.cdiv(size, of_hidden.columns))](
        x, gate_up.weight, gate_up.scales, pairs, counts, hidden, num_tokens, TOP_K=top_k, ACTIVATION=activation,
        **gate_up.options(of_hidden.input_bytes // x.itemsize),
        **_launch_options(of_hidden, pairs_of_tile + 2 * of_hidden.columns, x), **shape,
    )  # fmt: skip
    _down_kernel[(num_tiles, triton.cdiv(hidden_size, of_outputs.columns))](
        hidden, down.weight, down.scales, pairs, counts, outputs, num_tokens,
        **down.options(of_outputs.input_bytes // x.itemsize),
        **_launch_options(of_outputs, pairs_of_tile + of_outputs.columns, x), **shape,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(hidden_size))
    _combine_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        outputs, routes.weights, out, TOP_K=top_k, HIDDEN_SIZE=hidden_size, BLOCK=block, num_warps=4, **LAUNCH_OPTIONS
    )
    return out


def grouped_mlp(
    x: torch.Tensor,
    routes: Routes,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: str = "silu",
    use_kernels: bool = False,
    row_ops: RowOps = PLAIN,
) -> torch.Tensor:
    """The sum over each token's experts of weight × down(activation(gate) × up), added in float32.

    Args:
        x: [num_tokens, hidden_size].
        routes: the tokens' experts.
        gate_up: 2 × size outputs and hidden_size inputs.
        down: hidden_size outputs and size inputs.
        activation: see act_and_mul.
        use_kernels: compute with the kernels, and otherwise with `row_ops`. Tiles have one size if those are invariant.

    Returns:
        [num_tokens, hidden_size].
    """
    if use_kernels:
        return triton_grouped_mlp(x, routes, gate_up, down, activation, row_ops.is_invariant)
    return plain_grouped_mlp(x, routes, gate_up, down, activation, row_ops)
