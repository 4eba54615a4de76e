"""The number formats of weights in FP8 (e4m3): how a checkpoint stores them, and how they are multiplied.

A linear layer only hands over its inputs, its weight and its scales.
"""

from dataclasses import replace

import torch

from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.shard import Shard
from nanovllm.ops.block_product import BlockWeight, block_product, rows_of_tile
from nanovllm.ops.quantize import (
    Quantized,
    ScaledProduct,
    quantize_row_blocks,
    quantize_rows,
    scaled_product,
    whole_product,
)


class ChannelFp8:
    """A scale per output channel of the weight, and one per row of the inputs, which kernels before it may quantize.

    Args:
        config: says how the checkpoint stores the scales; if it has none, weights are quantized while they load.
        dtype: of results.
    """

    def __init__(self, config: Fp8Config, dtype: torch.dtype, device: torch.device):
        self.config, self._dtype = config, dtype
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def check(self, output_size: int, input_size: int) -> None:
        """Raises a ValueError if the device cannot multiply a weight of these sizes."""
        if self._one.is_cuda and (output_size % 16 or input_size % 16):
            raise ValueError(
                f"a linear layer has {input_size} inputs and {output_size} outputs per rank; FP8 on a GPU needs "
                'multiples of 16; leave out quantization="fp8", take weights that are not in FP8, or use another '
                "tensor_parallel_size"
            )

    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        return (output_size,)

    def weight_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard:
        """That of a part of the weight, which begins with `first_row`."""
        if self.config.scale_name is not None:
            return shard
        return replace(shard, scales=scales[first_row : first_row + len(shard.target)])

    def scales_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard | None:
        """That of the scales of a part of the weight; None if the checkpoint has none."""
        target = scales[first_row : first_row + len(shard.target)]
        if self.config.scale_name is None:
            return None
        if self.config.is_per_tensor:
            return Shard((1,), ((0, 1),), target)
        return Shard((shard.shape[0], 1), (shard.source[0], (0, 1)), target[:, None])

    def multiply(
        self,
        x: torch.Tensor | Quantized,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        use_kernels: bool,
        keeps_scales: bool,
    ) -> torch.Tensor | ScaledProduct:
        """`x @ weight.T + bias`: [num_rows, output_size]; without a bias, it may keep its scales.

        x: [num_rows, input_size].
        """
        quantized = x if isinstance(x, Quantized) else quantize_rows(x, use_kernels)
        if keeps_scales:
            return scaled_product(quantized, weight, scales, self._one, self._dtype)
        return whole_product(quantized, weight, scales, bias, self._dtype)

    def variant_key(self, num_tokens: int) -> int:
        """See CausalLM.variant_key."""
        return 1


class BlockFp8:
    """A scale per block of the weight, and one per row and as many inputs as a block has: DeepSeek-V3's format."""

    def __init__(self, config: Fp8Config, dtype: torch.dtype, device: torch.device):
        assert config.block is not None
        self.config, self._dtype = config, dtype
        self._rows, self._columns = config.block

    def check(self, output_size: int, input_size: int) -> None:
        """Any size will do."""

    def scales_shape(self, output_size: int, input_size: int) -> tuple[int, ...]:
        return -(-output_size // self._rows), -(-input_size // self._columns)

    def weight_shard(self, shard: Shard, scales: torch.Tensor, first_row: int) -> Shard:
        return shard

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

    def multiply(
        self,
        x: torch.Tensor | Quantized,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        use_kernels: bool,
        keeps_scales: bool,
    ) -> torch.Tensor:
        """x: [num_rows, input_size] -> `x @ weight.T + bias`: [num_rows, output_size]"""
        assert isinstance(x, torch.Tensor), "no kernel before it rounds by blocks"
        quantized = quantize_row_blocks(x, self._columns, use_kernels)
        of_weight = BlockWeight(weight, scales, self._rows, self._columns)
        return block_product(quantized, of_weight, bias, self._dtype, use_kernels)

    def variant_key(self, num_tokens: int) -> int:
        """See CausalLM.variant_key."""
        return rows_of_tile(num_tokens)


WeightFormat = ChannelFp8 | BlockFp8


class Formats:
    """Of a model's linear layers.

    Args:
        config: None if no layer is in FP8.
        dtype: of what the layers calculate.
    """

    def __init__(self, config: Fp8Config | None, dtype: torch.dtype, device: torch.device):
        self._config, self._fp8 = config, None
        if config is not None:
            self._fp8 = (ChannelFp8 if config.block is None else BlockFp8)(config, dtype, device)

    def of(self, *layers: str) -> WeightFormat | None:
        """That of the layer that computes these layers of the checkpoint at once; None for plain weights.

        Raises:
            ValueError: some of them are in FP8, and some are not.
        """
        if self._config is None:
            return None
        are_fp8 = [self._config.applies_to(layer) for layer in layers]
        if any(are_fp8) != all(are_fp8):
            raise ValueError(
                f"config.json says that some of {', '.join(layers)} are in FP8 and some are not; they are computed as "
                "one product, so they must be alike"
            )
        return self._fp8 if all(are_fp8) else None
