"""LayerContext: how and where the layers of a model compute. Every layer gets it when it is made."""

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.ops.collectives import Parallel
from nanovllm.ops.row_invariant import PLAIN, RowOps


@dataclass(frozen=True)
class LayerContext:
    """Chosen once for all layers of a model; no layer asks for it inside `forward`.

    dtype, device: dtype and device of parameters and activations.
    use_kernels: compute with our kernels instead of their plain twins.
    parallel: this rank's place among those that share the model.
    row_ops: how to compute rows.
    max_loras, max_lora_rank: the number and maximum rank of LoRA adapters that a layer has room for; 0 for none.
    """

    dtype: torch.dtype
    device: torch.device
    use_kernels: bool = False
    parallel: Parallel = Parallel()  # noqa: RUF009 (frozen)
    row_ops: RowOps = PLAIN
    max_loras: int = 0
    max_lora_rank: int = 0

    @property
    def deterministic(self) -> bool:
        """A row's results depend on that row alone, bit for bit."""
        return self.row_ops.is_invariant

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter; `dtype=None` means the context's dtype."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)
