"""The product of a linear layer: by PyTorch, by our kernel for a single row on a GPU, or, on a CPU, by oneDNN with the
weights rearranged once for its matrix kernels.

PyTorch multiplies float32 matrices with MKL, which divides a product of few rows badly between threads: at 30 rows
oneDNN takes half to a third of its time (docs/record.md). The plain twin is `F.linear`.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
import torch.nn.functional as F

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

# oneDNN compiles and keeps a kernel, half a megabyte, for each weight shape and number of rows. So it gets only these
# numbers: fewer rows are padded, more are cut into pieces of the largest.
_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32), 512, 1024)
# (maximum outputs, minimum rows, parts) for which parts were faster on an H200; the first entry that fits counts.
_INPUT_PARTS = ((2048, 2, 4), (3072, 2, 2), (4096, 65, 2), (5120, 193, 2))
MAX_ROWS_IN_PARTS = 256


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """weight: float32 [output_size, input_size] on a CPU -> the same in oneDNN's own layout; None if it has none."""
    # These are the operators that torch.compile uses; a build of PyTorch may lack them.
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def in_few_sizes(x: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`multiply(x)`, which works row by row, called with only a few different numbers of rows.

    x: [num_rows, input_size] -> [num_rows, output_size]
    """
    num_rows = x.shape[0]
    if num_rows > _ROWS[-1]:
        return torch.cat([in_few_sizes(part, multiply) for part in x.split(_ROWS[-1])])
    num_padded = _ROWS[bisect_left(_ROWS, num_rows)]
    if num_padded > num_rows:
        x = F.pad(x, (0, 0, 0, num_padded - num_rows))
    return multiply(x)[:num_rows]


def num_input_parts(num_rows: int, input_size: int, output_size: int) -> int:
    """The number of parts for `linear_in_parts`; 1 if the product as a whole is as fast.

    A narrow product of few rows has too few output tiles to occupy all processors of a GPU. So several programs share
    the inputs of a tile (split-K), and the norm that reads the product sums their parts.
    """
    if num_rows > MAX_ROWS_IN_PARTS:
        return 1
    for max_num_outputs, min_rows, num_parts in _INPUT_PARTS:
        if output_size <= max_num_outputs and num_rows >= min_rows:
            return num_parts if input_size % (8 * num_parts) == 0 else 1  # every part starts at a multiple of 16 bytes
    return 1


def linear_in_parts(x: torch.Tensor, weight: torch.Tensor, num_parts: int) -> torch.Tensor:
    """x: [num_rows, input_size], weight: [output_size, input_size] -> float32 [num_parts, num_rows, output_size], whose
    sum over the parts is `x @ weight.T`; each part has its share of the inputs."""
    inputs, weights = x.unflatten(1, (num_parts, -1)), weight.unflatten(1, (num_parts, -1))
    inputs, weights = inputs.transpose(0, 1), weights.permute(1, 2, 0)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.bmm(inputs, weights, out_dtype=torch.float32)
    return torch.bmm(inputs.float(), weights.float())


@jit(do_not_specialize=["output_size"])
def _single_row_linear_kernel(
    x, weight, bias, out, output_size, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    is_output = output < output_size
    at = weight + output[:, None].to(tl.int64) * SIZE + column[None, :]
    weights = tl.load(at, is_output[:, None] & (column < SIZE)[None, :], 0.0)  # no earlier kernel writes them
    begin()
    products = weights.to(tl.float32) * tl.load(x + column, column < SIZE, 0.0).to(tl.float32)[None, :]
    for first in tl.static_range(INPUTS, SIZE, INPUTS):
        is_real = first + column < SIZE
        weights = tl.load(at + first, is_output[:, None] & is_real[None, :], 0.0)
        products += weights.to(tl.float32) * tl.load(x + first + column, is_real, 0.0).to(tl.float32)[None, :]
    total = tl.sum(products, 1)
    if HAS_BIAS:
        total += tl.load(bias + output, is_output, 0.0).to(tl.float32)
    tl.store(out + output, total, is_output)


def triton_single_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [1, input_size], weight: [output_size, input_size] -> `x @ weight.T + bias`, [1, output_size]

    With one row, no weight is used twice, so the time is that of reading the weights. Each program loads its first
    weights before the preceding kernel has ended.
    """
    output_size, input_size = weight.shape
    out = torch.empty((1, output_size), dtype=x.dtype, device=x.device) if out is None else out
    _single_row_linear_kernel[(triton.cdiv(output_size, 8),)](
        x, weight, bias, out, output_size, SIZE=input_size, OUTPUTS=8,
        INPUTS=min(1024, triton.next_power_of_2(input_size)), HAS_BIAS=bias is not None, num_warps=4,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    packed: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_kernels: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, through the packed weight if there is one.

    Args:
        x: [..., input_size].
        weight: [output_size, input_size]; may be None if there is `packed`.
        packed: the result of `pack_weight`, or None.
        bias: [output_size] or None.
        use_kernels: compute a single row with our kernel.
        out: [num_rows, output_size], takes the result; only without a bias.
    """
    if packed is not None:
        assert out is None, "oneDNN allocates its results"
        return in_few_sizes(x, lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], ""))
    assert weight is not None, "only a packed weight may be missing"
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.ndim == 2:  # PyTorch uses oneDNN for these too
        assert out is None, "padded rows do not fit into it"
        return in_few_sizes(x, lambda rows: F.linear(rows, weight, bias))
    if use_kernels and x.shape[:-1] == (1,):
        return triton_single_row_linear(x, weight, bias, out)
    assert out is None or bias is None, "torch.mm adds no bias"
    return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.mT, out=out)
