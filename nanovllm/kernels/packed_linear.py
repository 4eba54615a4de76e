"""Linear layers on a CPU through oneDNN, with the weights rearranged once for its matrix kernels.

PyTorch multiplies float32 matrices with MKL, which shares a product of few rows badly between threads: at 30
rows oneDNN takes half to a third of its time (docs/performance.md). The plain twin is `F.linear`.
"""

import torch
import torch.nn.functional as F


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
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def linear(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, through the packed weight if there is one."""
    if packed is None:
        return F.linear(x, weight, bias)
    return packed_linear(x, packed, bias)
