"""The forms in which one layer passes activations to the next.

A layer `accepts` some forms. The layer before it is made with `gives`, the forms that its reader accepts, and gives
those of them that it can make.
"""

from enum import Flag, auto
from typing import NamedTuple

import torch

from nanovllm.ops.quantize import ScaledProduct


class Form(Flag):
    """Forms other than a plain tensor, which every layer accepts.

    QUANTIZED: rows in FP8, see Quantized.
    SCALED: a product whose scales are not applied yet, see ScaledProduct.
    UNFINISHED: a product in several parts, or one that is not calculated yet, see PartialSum and PendingProduct.
    """

    PLAIN = 0
    QUANTIZED = auto()
    SCALED = auto()
    UNFINISHED = auto()


class PartialSum(NamedTuple):
    """One rank's summand of a tensor. `RMSNorm.reduce_add`, `RMSNorm.reduce` and `VocabParallelEmbedding.reduce` sum it
    over the ranks. Until then code may multiply it by a number, but must not apply a nonlinear function to it, or add a
    tensor that every rank holds.

    part: [num_tokens, size]. `RMSNorm.reduce_add` also accepts a ScaledProduct, and on one rank the parts of a product:
        float32 [num_parts, num_tokens, size], to be summed over the parts.
    """

    part: torch.Tensor | ScaledProduct


class PendingProduct(NamedTuple):
    """`x @ weight.T`, not calculated yet. Its reader uses the results while it multiplies: `RMSNorm.reduce_add` adds
    them to the residual, DecoderMLP applies the activation, and Attention norms, rotates and stores them.

    x: [num_tokens, input_size]; weight: [size, input_size].
    """

    x: torch.Tensor
    weight: torch.Tensor
