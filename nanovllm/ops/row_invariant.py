"""RowOps: how layers compute rows. As usual; or so that a row's result depends on that row alone, bit for bit: by
ops/ordered_product.py on a GPU, and by the operations here on a CPU.

PyTorch's products choose a kernel by the number of rows, and kernels add in different orders. Its sigmoid computes the
last numbers of a tensor by other instructions than the first ones. So the operations here multiply a fixed number of
rows at a time, and are made of `exp` and the exactly rounded +, × and ÷, which give a number the same bits at every
place. `runner/determinism.py` checks that this holds on the machine.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.ops.act_and_mul import plain_act_and_mul
from nanovllm.ops.linear import linear
from nanovllm.ops.quantize import ScaledProduct, fp8_product

# Rows per product: few enough for a decode of one row, and enough that a long prompt takes little more time.
_ROWS = 32
_SIZE_MULTIPLE = 16


class RowOps(NamedTuple):
    """Chosen once for all layers of a model.

    is_invariant: a row's results depend on that row alone, bit for bit.
    multiply: applies a function that works row by row: (x [num_rows, input_size], function) -> its result.
    linear: as `ops.linear.linear`.
    fp8_product: as `ops.quantize.fp8_product`.
    act_and_mul: as ops/act_and_mul.py.
    sigmoid: of each number.
    prepare: called for each weight before the model runs, by (weight, dtype of the results, whether there is a bias,
        maximum number of rows).
    """

    is_invariant: bool
    multiply: Callable[[Any, Callable[[Any], Any]], Any]
    linear: Callable[..., torch.Tensor]
    fp8_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
    act_and_mul: Callable[[torch.Tensor | ScaledProduct, str], torch.Tensor]
    sigmoid: Callable[[torch.Tensor], torch.Tensor]
    prepare: Callable[[torch.Tensor, torch.dtype, bool, int], None] = lambda *_: None


def in_row_tiles(x: torch.Tensor, multiply: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """`multiply(x)`, which works row by row, called with the same number of rows each time.

    x: [num_rows, input_size] -> [num_rows, output_size]
    """
    num_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_rows % _ROWS or _ROWS * (num_rows == 0)))
    # Libraries may choose by alignment too, so each tile is a tensor of its own.
    return torch.cat([multiply(tile.clone()) for tile in padded.split(_ROWS)])[:num_rows]


def row_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor | None, packed: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """See RowOps. Rows of an odd size begin at other addresses than multiples of 16 bytes, from which MKL may add in
    another order. So rows are padded with zeros, unless the weight is packed."""
    if weight is not None and packed is None and (padding := -x.shape[1] % _SIZE_MULTIPLE):
        x, weight = F.pad(x, (0, padding)), F.pad(weight, (0, padding))
    return in_row_tiles(x, partial(linear, weight=weight, packed=packed, **options))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(−x)) in float32, rounded to x's dtype."""
    return (1 / (1 + (-x.float()).exp_())).to(x.dtype)


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """float32, the activation of `gate`, by the formulas of the kernels in ops/act_and_mul.py."""
    gate = gate.float()
    if activation == "gelu_pytorch_tanh":
        return gate / (1 + (-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)).exp_())
    return gate / (1 + (-gate).exp_())


def row_invariant_act_and_mul(gate_up: torch.Tensor | ScaledProduct, activation: str) -> torch.Tensor:
    """See act_and_mul; computed in float32."""
    assert isinstance(gate_up, torch.Tensor), "only the kernel knows FP8"
    gate, up = gate_up.chunk(2, -1)
    return (activated(gate, activation) * up.float()).to(up.dtype)


def sums_of_rows(x: torch.Tensor) -> torch.Tensor:
    """x: [num_rows, size] -> [num_rows, 1]. PyTorch divides the sum of a single long row between threads, so such a row
    is summed beside a copy of itself."""
    return x.sum(-1, keepdim=True) if len(x) > 1 else x.repeat(2, 1).sum(-1, keepdim=True)[:1]


def apply(x: Any, multiply: Callable[[Any], Any]) -> Any:
    return multiply(x)


PLAIN = RowOps(False, apply, linear, fp8_product, plain_act_and_mul, torch.sigmoid)
ROW_INVARIANT = RowOps(True, in_row_tiles, row_invariant_linear, fp8_product, row_invariant_act_and_mul, sigmoid)
