"""The number formats of weights in FP8 (e4m3): how a checkpoint stores them, and how they are multiplied.

A linear layer only hands over its inputs, its weight and its scales.
"""

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import nn

from nanovllm.layers.context import LayerContext
from nanovllm.layers.forms import Form
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.shard import Shard
from nanovllm.ops.block_product import BlockWeight, block_product, rows_of_tile
from nanovllm.ops.quantize import (
    E4M3,
    Quantized,
    ScaledProduct,
    quantize_row_blocks,
    quantize_rows,
    scaled_product,
    whole_product,
)


class WeightFormat(ABC):
    """A number format of weights with scales.

    accepts: the forms of inputs that `multiply` takes.
    makes: the forms of results that `multiply` can give, if it adds no bias.

    Args:
        config: how the checkpoint stores the scales.
    """

    accepts = makes = Form.PLAIN

    def __init__(self, config: Fp8Config, context: LayerContext):
        self.config, self._context = config, context
        self.scale_name = config.scale_name or "weight_scale"

    def check(self, output_size: int, input_size: int) -> None:  # noqa: B027 (most formats take any size)
        """Raises a ValueError if the device cannot multiply a weight of these sizes."""

    @abstractmethod
    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        """The shape of the scales of a weight [output_size, input_size]."""

    def weight_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard:
        """The shard of a part of the weight.

        Args:
            shard: the part's shard in a weight without scales.
            scales: scales of the whole weight.
            first_row: the part's first row in the weight.
        """
        return shard

    @abstractmethod
    def scales_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard | None:
        """The shard of the scales of that part; None if the checkpoint has no scales."""

    @abstractmethod
    def multiply(
        self, x: torch.Tensor | Quantized, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
        gives: Form = Form.PLAIN,
    ) -> torch.Tensor | ScaledProduct:  # fmt: skip
        """`x @ weight.T + bias`: [num_rows, output_size].

        Args:
            x: [num_rows, input_size].
            weight: [output_size, input_size]; scales: as `scales_shape` says.
            gives: the forms of the result to choose from; only PLAIN with a bias.
        """

    def variant_key(self, num_tokens: int) -> int:
        """See CausalLM.variant_key."""
        return 1


class ChannelFp8(WeightFormat):
    """A scale per output channel of the weight, and one per row of the inputs, which earlier kernels may quantize.

    If the checkpoint has no scales, weights are quantized while they load.
    """

    def __init__(self, config: Fp8Config, context: LayerContext):
        super().__init__(config, context)
        if context.use_kernels:
            self.accepts, self.makes = Form.QUANTIZED, Form.SCALED
        self._one = torch.ones((), dtype=torch.float32, device=context.device)

    def check(self, output_size: int, input_size: int) -> None:
        if self._one.is_cuda and (output_size % 16 or input_size % 16):
            raise ValueError(
                f"a linear layer has {input_size} inputs and {output_size} outputs per rank; FP8 on a GPU needs "
                'multiples of 16; leave out quantization="fp8", take weights that are not in FP8, or use another '
                "tensor_parallel_size"
            )

    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        return (output_size,)

    def weight_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard:
        if self.config.scale_name is not None:
            return shard
        return replace(shard, scales=scales[first_row : first_row + len(shard.target)])

    def scales_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard | None:
        target = scales[first_row : first_row + len(shard.target)]
        if self.config.scale_name is None:
            return None
        if self.config.is_per_tensor:
            return Shard((1,), ((0, 1),), target)
        return Shard((shard.shape[0], 1), (shard.source[0], (0, 1)), target[:, None])

    def multiply(self, x, weight, scales, bias, gives=Form.PLAIN):
        dtype = self._context.dtype
        quantized = x if isinstance(x, Quantized) else quantize_rows(x, self._context.use_kernels)
        if Form.SCALED not in gives and not (self._context.deterministic and self._context.use_kernels):
            return whole_product(quantized, weight, scales, bias, dtype)
        product = self._context.row_ops.fp8_product
        scaled = scaled_product(quantized, weight, scales, self._one, dtype, product)
        return scaled if Form.SCALED in gives else scaled.whole(bias)


class BlockFp8(WeightFormat):
    """A scale per block of the weight, and one per row and block of inputs: DeepSeek-V3's format."""

    def __init__(self, config: Fp8Config, context: LayerContext):
        super().__init__(config, context)
        assert config.block is not None
        self._rows, self._columns = config.block

    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        return -(-output_size // self._rows), -(-input_size // self._columns)

    def scales_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard:
        """Raises a ValueError if the part's blocks are not whole."""
        source = []
        for (start, length), size, block in zip(shard.source, shard.shape, self.config.block or (), strict=True):
            if start % block or (length % block and start + length < size) or first_row % self._rows:
                raise ValueError(
                    f"FP8 weights in blocks of {self._rows} × {self._columns}: a layer, or its part on a rank, must "
                    f"consist of whole blocks, but has {length} of {size} from {start} on, behind {first_row} rows of "
                    "other projections; use "
                    + "a smaller tensor_parallel_size, or " * (length < size)
                    + 'weights that are not quantized (quantization="fp8" makes them FP8 while they load)'
                )
            source.append((start // block, -(-length // block)))
        first = first_row // self._rows
        return Shard(self.scales_shape(*shard.shape), tuple(source), scales[first : first + source[0][1]])

    def multiply(self, x, weight, scales, bias, gives=Form.PLAIN):
        assert isinstance(x, torch.Tensor), "no kernel before it rounds by blocks"
        quantized = quantize_row_blocks(x, self._columns, self._context.use_kernels)
        of_weight = BlockWeight(weight, scales, self._rows, self._columns)
        return block_product(quantized, of_weight, bias, self._context.dtype, self._context.use_kernels)

    def variant_key(self, num_tokens: int) -> int:
        return rows_of_tile(num_tokens) if self._context.use_kernels else 1


class FormattedWeight(nn.Module):
    """Owns the weight of a linear layer, or the weights of one per expert, and the scales if there is a format.

    weight: [output_size, input_size] of this rank, or [num_experts, output_size, input_size]. With a format, its scales
        are a parameter named as in the checkpoint.

    Args:
        shape: shape of the weight.
        format: format of the weight; None is the context's dtype.
    """

    weight: nn.Parameter | None

    def __init__(self, shape: tuple[int, ...], format: WeightFormat | None, context: LayerContext):
        super().__init__()
        self.format = format
        self.weight = context.parameter(*shape, dtype=None if format is None else E4M3)
        if format is not None:
            scales_shape = *shape[:-2], *format.scales_shape(*shape[-2:])
            self.register_parameter(format.scale_name, context.parameter(*scales_shape, dtype=torch.float32))

    def _shard(self, name: str, shard: Shard, first_row: int, expert: int | None = None) -> Shard | None:
        """The shard of this parameter; None if the checkpoint does not have it.

        Args:
            shard: the shard of a part of the weight or bias, as if there were no format.
            first_row: the part's first row in the weight.
            expert: the expert that the weight belongs to, if there are experts.
        """
        if self.format is None or name == "bias":
            return shard
        scales = self.get_parameter(self.format.scale_name)
        of_part = self.format.weight_shard if name == "weight" else self.format.scales_shard
        return of_part(shard, scales if expert is None else scales[expert], first_row)


class Formats:
    """The number formats of a model's linear layers.

    Args:
        config: None if no layer is in FP8.
    """

    def __init__(self, config: Fp8Config | None, context: LayerContext):
        self._config, self._fp8 = config, None
        if config is not None:
            self._fp8 = (ChannelFp8 if config.block is None else BlockFp8)(config, context)

    def check_plain(self, module: str, *names: str) -> None:
        """Raises a ValueError if the checkpoint has one of these layers in FP8; for the arguments see `of`."""
        layers = [f"{module}.{name}" for name in names]
        if self._config is not None and self._config.scale_name and any(map(self._config.applies_to, layers)):
            raise ValueError(
                f"config.json says that {' or '.join(layers)} is in FP8; nanovllm reads them only in 16 or 32 bits; "
                'take a checkpoint that is not quantized; quantization="fp8" rounds its large projections as they load'
            )

    def of(self, module: str, *names: str) -> WeightFormat | None:
        """The format of the layer that computes these layers of a module as one product; None for plain weights.

        module, names: ours, such as "model.layers.0.mlp" and "gate_proj".

        Raises:
            ValueError: some of them are in FP8, and some are not.
        """
        if self._config is None:
            return None
        layers = [f"{module}.{name}" for name in names]
        are_fp8 = [self._config.applies_to(layer) for layer in layers]
        if any(are_fp8) != all(are_fp8):
            raise ValueError(
                f"config.json says that some of {', '.join(layers)} are in FP8 and some are not; they are computed as "
                "one product, so they must be alike"
            )
        return self._fp8 if all(are_fp8) else None
