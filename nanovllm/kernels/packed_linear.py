"""What a linear layer multiplies with: PyTorch, our kernel for a single row on a GPU, or, on a CPU, oneDNN with the
weights rearranged once for its matrix kernels.

PyTorch multiplies float32 matrices with MKL, which shares a product of few rows badly between threads: at 30
rows oneDNN takes half to a third of its time (docs/performance.md). The plain twin is `F.linear`.
"""

from bisect import bisect_left

import torch
import torch.nn.functional as F

from nanovllm.kernels import is_fused

# oneDNN compiles and keeps a kernel, half a megabyte, for each weight shape and number of rows. So only these
# numbers are ever asked for: fewer rows are padded, more are cut into pieces of the largest.
_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32), 512, 1024)


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """weight: float32 [output_size, input_size] on a CPU -> the same in oneDNN's own layout; None if that cannot be."""
    # The operators are the ones that torch.compile uses; a build of PyTorch may lack them.
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [num_rows, input_size] -> [num_rows, output_size]"""
    num_rows = x.shape[0]
    if num_rows > _ROWS[-1]:
        return torch.cat([packed_linear(part, packed, bias) for part in x.split(_ROWS[-1])])
    num_padded = _ROWS[bisect_left(_ROWS, num_rows)]
    if num_padded > num_rows:
        x = F.pad(x, (0, 0, 0, num_padded - num_rows))
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")[:num_rows]


def linear(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, through the packed weight if there is one; on a GPU one row has a kernel of its own."""
    if packed is not None:
        return packed_linear(x, packed, bias)
    if bias is None and x.shape[:-1] == (1,) and is_fused(x):
        from nanovllm.kernels.fused import single_row_linear

        return single_row_linear(x, weight)
    return F.linear(x, weight, bias)
