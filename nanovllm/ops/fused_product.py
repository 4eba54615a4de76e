"""A product together with what comes after it, in one kernel on Hopper GPUs (hopper_product.py).

The plain twins are `linear` with `act_and_mul` and with `qk_norm_rotate_store`.
"""

import torch

from nanovllm.ops.gluon import has_gluon
from nanovllm.ops.kernel import num_processors
from nanovllm.ops.layer_cache import LayerCache

# The time that a fused product saves on an H100, in inputs of a product; rounded down.
_INPUTS_SAVED = 256
_MIN_ROWS = 512  # fewer were not measured


def has_fused_product(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether the functions below are faster than `linear` and the kernel after it.

    A processor multiplies one tile at a time, 128 rows with 256 outputs. In the last turn some processors have no tile.
    A fused product is faster if that wastes less time than it saves.

    weight: [output_size, input_size].
    """
    output_size, input_size = weight.shape
    is_fit = num_rows >= _MIN_ROWS and output_size % 256 == input_size % 64 == 0
    if not (is_fit and weight.dtype in (torch.bfloat16, torch.float16) and has_gluon(weight.device)):
        return False
    num_tiles, num_programs = -(-num_rows // 128) * (output_size // 256), num_processors(weight.device)
    num_turns = -(-num_tiles // num_programs)
    return num_turns * num_programs * input_size < num_tiles * (input_size + _INPUTS_SAVED)


def gated_product(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) × up, where gate and up are the halves of `x @ weight.T`.

    Args:
        x: [num_tokens, input_size].
        weight: [2 × size, input_size].
        activation: one of ACTIVATIONS.

    Returns:
        [num_tokens, size].
    """
    from nanovllm.ops import hopper_product  # not every Triton has Gluon

    return hopper_product.gated_product(x, weight, activation)


def stored_product(
    x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: LayerCache, slot_mapping: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Like `qk_norm_rotate_store` of `x @ weight.T`, for heads of 128 columns that all rotate, and a cache in 16 bits.

    Args:
        x: [num_tokens, input_size].
        weight: [(num_heads + 2 × num_kv_heads) × 128, input_size].
        norm, eps, cos, sin, cache, slot_mapping: as `qk_norm_rotate_store` takes them; `norm` is its `weight`.

    Returns:
        The finished queries: [num_tokens, num_heads, 128].
    """
    from nanovllm.ops import hopper_product

    return hopper_product.stored_product(x, weight, norm, eps, cos, sin, cache, slot_mapping)
