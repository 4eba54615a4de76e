"""Linear layers and how their weights are divided over the ranks of one model.

A layer says with `shards` which checkpoint tensors fill which part of which parameter; the loader needs to
know nothing else. Column-parallel layers divide the outputs, row-parallel ones the inputs, so that a pair of
them needs one all-reduce (Megatron-LM, Shoeybi et al., 2019). `kw` is the `dtype` and `device` of parameters.
"""

from typing import NamedTuple

import torch
from torch import nn

from nanovllm.layers.quantization import ChannelFp8, WeightFormat
from nanovllm.layers.shard import WHOLE, Shard, Shards, empty_parameter, replicated_shards
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.linear import MAX_ROWS_IN_PARTS, linear, linear_in_parts, num_input_parts, pack_weight
from nanovllm.ops.quantize import E4M3, Quantized, ScaledProduct


class PartialSum(NamedTuple):
    """One rank's summand of a tensor. `RMSNorm.reduce_add`, `RMSNorm.reduce` and `VocabParallelEmbedding.reduce` sum it
    over the ranks. Until then code may multiply it by a number, but must not apply a nonlinear function to it, or
    add a tensor that every rank holds.

    part: [num_tokens, size]. `RMSNorm.reduce_add` also takes a product whose scales are not multiplied in yet, and on
        one rank float32 [num_parts, num_tokens, size], to be summed over the parts.
    """

    part: torch.Tensor | ScaledProduct


class PendingProduct(NamedTuple):
    """`x @ weight.T`, not calculated yet: `RMSNorm.reduce_add` adds it to the residual while it multiplies.

    x: [num_tokens, input_size]; weight: [size, input_size].
    """

    x: torch.Tensor
    weight: torch.Tensor


class Packable(nn.Module):
    """A layer that may trade its loaded weight for a layout that multiplies faster, where the device has one.

    weight: as loaded; None once packed, unless another layer reads it too.
    packed: the other layout, or None.
    """

    weight: nn.Parameter | None
    packed: torch.Tensor | None
    _shares_weight: bool

    def pack(self) -> None:
        """Packs the weight, where there is a layout for it."""
        self.packed = pack_weight(self.get_parameter("weight"))
        if self.packed is not None and not self._shares_weight:
            self.weight = None

    def unpack(self) -> None:
        """Undoes `pack`, exactly."""
        if self.packed is not None and self.weight is None:
            self.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        self.packed = None

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter of this name. Of a packed weight it has the shape alone, on the "meta" device."""
        if name == "weight" and self.weight is None and self.packed is not None:
            return torch.empty(self.packed.shape, dtype=self.packed.dtype, device="meta")
        return self.get_parameter(name)


class LinearBase(Packable):
    """The parameters of `y = x @ weight.T + bias`; `use_kernels` computes with our kernels.

    weight: [output_size, input_size] of this rank.

    Args:
        format: of the weight; None is `dtype`. The weight's scales are a parameter named as in the checkpoint.
        keeps_scales: whoever reads the results takes a ScaledProduct too.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool,
        use_kernels: bool = False,
        format: WeightFormat | None = None,
        keeps_scales: bool = False,
        **kw,
    ):
        super().__init__()
        self.use_kernels, self.format = use_kernels, format
        weight_kw = kw if format is None else {**kw, "dtype": E4M3}
        self.weight = empty_parameter(output_size, input_size, **weight_kw)
        self.bias = empty_parameter(output_size, **kw) if bias else None
        self.packed = None
        self._shares_weight = False
        self._scale_name = ""
        if format is not None:
            format.check(output_size, input_size)
            self._scale_name = format.config.scale_name or "weight_scale"
            shape = format.scales_shape(output_size, input_size)
            self.register_parameter(self._scale_name, empty_parameter(*shape, **{**kw, "dtype": torch.float32}))
        self.keeps_scales = keeps_scales and use_kernels and not bias
        # What is given in e4m3 already; a layer that keeps no scales takes it all the same.
        self.takes_quantized = use_kernels and isinstance(format, ChannelFp8)

    def variant_key(self, num_tokens: int) -> int:
        """See CausalLM.variant_key."""
        return self.format.variant_key(num_tokens) if self.use_kernels and self.format is not None else 1

    def _shard(self, name: str, shard: Shard, first_row: int) -> Shard | None:
        """The shard of this parameter, given that of a part of the weight or bias, which begins with `first_row`."""
        if self.format is None or name == "bias":
            return shard
        of_part = self.format.weight_shard if name == "weight" else self.format.scales_shard
        return of_part(shard, self.get_parameter(self._scale_name), first_row)

    def _multiply(self, x: torch.Tensor | Quantized, bias: torch.Tensor | None) -> torch.Tensor | ScaledProduct:
        """x: [..., input_size] -> [..., output_size]"""
        if self.format is None:
            assert isinstance(x, torch.Tensor), "only layers in FP8 take inputs in FP8"
            return linear(x, self.weight, self.packed, bias, self.use_kernels)
        weight, scales = self.get_parameter("weight"), self.get_parameter(self._scale_name)
        return self.format.multiply(x, weight, scales, bias, self.use_kernels, self.keeps_scales)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers over one input as a single product, their outputs side by side.

    Args:
        input_size: width of the input.
        output_sizes: width of each output over all ranks, by the name of its checkpoint tensor.
        parts: what this rank holds of each, as (start, length); None divides each equally.
        stored_as: the checkpoint holds them as one tensor of this name, one after the other.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: dict[str, int],
        bias: bool,
        parallel: Parallel,
        parts: dict[str, tuple[int, int]] | None = None,
        stored_as: str | None = None,
        **kw,
    ):
        self.output_sizes = output_sizes
        self.stored_as = stored_as
        self.parts = parts or {name: parallel.shard(size, name) for name, size in output_sizes.items()}
        super().__init__(input_size, sum(length for _, length in self.parts.values()), bias, **kw)

    def shards(self, name: str) -> Shards:
        parameter, first, first_stored = self.parameter("bias" if name == "bias" else "weight"), 0, 0
        rest, shards = tuple(parameter.shape[1:]), Shards()
        for part, (start, length) in self.parts.items():
            key, num_rows = part, self.output_sizes[part]
            if self.stored_as is not None:
                start += first_stored
                first_stored += num_rows
                key, num_rows = self.stored_as, sum(self.output_sizes.values())
            source = ((start, length), *((0, width) for width in rest))
            whole = Shard((num_rows, *rest), source, parameter[first : first + length])
            if (shard := self._shard(name, whole, first)) is not None:
                shards.setdefault(key, []).append(shard)
            first += length
        return shards

    def forward(self, x: torch.Tensor | Quantized) -> torch.Tensor | ScaledProduct:
        """x: [..., input_size] -> [..., output_size / ranks]"""
        return self._multiply(x, self.bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """The outputs are divided over the ranks."""

    def __init__(self, input_size: int, output_size: int, bias: bool, parallel: Parallel, **kw):
        super().__init__(input_size, {WHOLE: output_size}, bias, parallel, **kw)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections in one product; heads are divided over the ranks.

    With more ranks than key/value heads, `size / num_kv_heads` neighbouring ranks hold the same head.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        parallel: Parallel,
        stored_as: str | None = None,
        **kw,
    ):
        q_start, self.num_heads = parallel.shard(num_heads, "num_attention_heads")
        if num_kv_heads >= parallel.size:
            kv_start, self.num_kv_heads = parallel.shard(num_kv_heads, "num_key_value_heads")
        elif parallel.size % num_kv_heads == 0:
            kv_start, self.num_kv_heads = parallel.rank * num_kv_heads // parallel.size, 1
        else:
            raise ValueError(f"num_key_value_heads ({num_kv_heads}) cannot be replicated over {parallel.size} ranks")
        kv_part = (kv_start * head_dim, self.num_kv_heads * head_dim)
        parts = {"q_proj": (q_start * head_dim, self.num_heads * head_dim), "k_proj": kv_part, "v_proj": kv_part}
        sizes = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        super().__init__(hidden_size, sizes, bias, parallel, parts, stored_as, **kw)


class RowParallelLinear(LinearBase):
    """The inputs are divided over the ranks; the norm that reads their products sums them over the ranks.

    Rank 0 alone adds the bias.

    Args:
        takes_unfinished: the norm that reads the products calls `RMSNorm.reduce_add`. Then a product may keep its
            scales. On a single rank it may also come as several parts, or be left to `reduce_add`.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool, parallel: Parallel, takes_unfinished: bool = False, **kw
    ):
        self.full_input_size = input_size
        self.part = parallel.shard(input_size, "input size")
        # Without an exchange, NCCL sums the products, so they must be scaled already.
        keeps_scales = takes_unfinished and (parallel.size == 1 or parallel.exchange is not None)
        super().__init__(self.part[1], output_size, bias, keeps_scales=keeps_scales, **kw)
        self.parallel = parallel
        is_plain = parallel.size == 1 and not bias and self.format is None
        self.in_parts = takes_unfinished and is_plain and self.use_kernels

    def shards(self, name: str) -> Shards:
        if name == "bias":
            return replicated_shards(self.parameter(name))
        weight = self.parameter("weight")
        output_size = weight.shape[0]
        shape = (output_size, self.full_input_size)
        shard = self._shard(name, Shard(shape, ((0, output_size), self.part), weight), 0)
        return {} if shard is None else {WHOLE: [shard]}

    def variant_key(self, num_tokens: int) -> int:
        """If `in_parts`, how many parts the product comes in; 0 if it is left to `RMSNorm.reduce_add`. See
        CausalLM.variant_key."""
        if not self.in_parts or self.weight is None:
            return super().variant_key(num_tokens)
        # Only a large product takes longer than the residual takes to be read and written.
        is_pending = num_tokens > MAX_ROWS_IN_PARTS
        return 0 if is_pending else num_input_parts(num_tokens, *self.weight.shape[::-1])

    def forward(self, x: torch.Tensor | Quantized) -> PartialSum | PendingProduct:
        """x: [num_tokens, input_size / ranks] -> [num_tokens, output_size], perhaps in parts, or not calculated yet"""
        if self.in_parts and isinstance(x, torch.Tensor) and (num_parts := self.variant_key(x.shape[0])) != 1:
            assert self.weight is not None, "a packed weight gives no parts"
            if num_parts == 0:
                return PendingProduct(x, self.weight)
            return PartialSum(linear_in_parts(x, self.weight, num_parts))
        # Every rank holds the bias, but the sum may count it only once.
        bias = self.bias if self.parallel.rank == 0 else None
        return PartialSum(self._multiply(x, bias))
