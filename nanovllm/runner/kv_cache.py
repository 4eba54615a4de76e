"""The tensors of all that layers keep per sequence, keys and values in blocks or a recurrent state; a layer's view."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from nanovllm.models.config import CachePlace, ModelConfig
from nanovllm.models.cost import head_kv_bytes
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.layer_state import LayerState
from nanovllm.ops.quantize import E4M3


@dataclass(frozen=True)
class KVCache:
    """The memory of all blocks and recurrent states, and each layer's part of it.

    tensors: the whole memory of blocks, contiguous, each [num_tensors, num_parts, num_blocks, …]. Each layer has a part
        of its group's blocks.
    states: see `empty_states`.
    layers: each layer's view of them. Layers of different groups may have the same part.
    canaries: int64 [num_blocks, block_size], see ops/cache_canary.py; a view of the last of `tensors`, or None.
    """

    tensors: tuple[torch.Tensor, ...]
    layers: list[LayerCache | LayerState]
    states: tuple[torch.Tensor, ...] = ()
    canaries: torch.Tensor | None = None

    @property
    def _first(self) -> LayerCache:
        return next(layer for layer in self.layers if isinstance(layer, LayerCache))

    @property
    def num_blocks(self) -> int:
        return len(self._first.keys)

    @property
    def block_size(self) -> int:
        return self._first.block_size

    @property
    def is_fp8(self) -> bool:
        return self._first.is_fp8

    @property
    def nbytes(self) -> int:
        """Bytes that the blocks take on the device, even if the memory is released now."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes_released(self) -> int:
        """Bytes of blocks and states that `restore` would allocate."""
        return sum(tensor.nbytes - num_bytes_held(tensor) for tensor in (*self.tensors, *self.states))

    def release(self) -> None:
        """Frees the memory of blocks and states; the tensor objects stay."""
        for tensor in (*self.tensors, *self.states):
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocates the memory again; its contents are lost. Without a `release` it does nothing."""
        for tensor in (*self.tensors, *self.states):
            if num_bytes_held(tensor) == 0:
                tensor.untyped_storage().resize_(tensor.nbytes)
                if tensor.dtype == torch.int8:  # see KVCacheLayout.empty
                    tensor.zero_()

    def zero_(self) -> "KVCache":
        for tensor in self.tensors:
            tensor.zero_()
        return self


def num_bytes_held(tensor: torch.Tensor) -> int:
    """Bytes of a whole tensor that are allocated now; 0 during sleep."""
    return tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class KVCacheLayout:
    """The shape and dtype of a cache, except its number of blocks; `num_kv_heads` counts this rank's heads.

    places: each layer's place in the cache; None for a recurrent layer.
    dtype: float8_e4m3fn for a cache in FP8, whose keys are int8.
    has_canaries: whether each slot has a canary.
    """

    places: tuple[CachePlace | None, ...]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_canaries: bool = False

    @property
    def is_fp8(self) -> bool:
        return self.dtype == E4M3

    @property
    def num_parts(self) -> int:
        """Parts of a block: the layers of the largest group."""
        return 1 + max(place.part for place in self.places if place is not None)

    @property
    def num_groups(self) -> int:
        return 1 + max(place.group for place in self.places if place is not None)

    @property
    def block_bytes(self) -> int:
        head_bytes = head_kv_bytes(self.head_dim, self.dtype.itemsize)
        return self.block_size * (self.num_parts * self.num_kv_heads * head_bytes + 8 * self.has_canaries)

    def empty(self, num_blocks: int, device: torch.device, states: tuple[torch.Tensor, ...] = ()) -> KVCache:
        """A cache of keys, values, and in FP8 scales, beside the given states; LayerCache has the shapes.

        In FP8, keys and values begin as zeros, because an uninitialised byte may be NaN in e4m3. Other memory is
        uninitialised.
        """
        blocks, heads = (self.num_parts, num_blocks), self.num_kv_heads
        if not self.is_fp8:
            shape = 2, *blocks, self.block_size, heads, self.head_dim
            whole = torch.empty(shape, dtype=self.dtype, device=device)
            return self._with_layers((whole,), zip(*whole, strict=True), states)
        numbers = torch.zeros((2, *blocks, heads, self.block_size * self.head_dim), dtype=torch.int8, device=device)
        scales = torch.empty((1, *blocks, heads, self.block_size), dtype=torch.int32, device=device)
        keys = numbers[0].unflatten(-1, (self.block_size, self.head_dim))
        values = numbers[1].view(E4M3).unflatten(-1, (self.head_dim, self.block_size))
        return self._with_layers((numbers, scales), zip(keys, values, scales[0], strict=True), states)

    def _with_layers(
        self,
        tensors: tuple[torch.Tensor, ...],
        parts: Iterable[tuple[torch.Tensor, ...]],
        states: tuple[torch.Tensor, ...],
    ) -> KVCache:
        caches = [LayerCache(*part) for part in parts]
        of_states = iter([LayerState(*of_layer) for of_layer in zip(*(whole[0] for whole in states), strict=True)])
        layers = [next(of_states) if place is None else caches[place.part] for place in self.places]
        if not self.has_canaries:
            return KVCache(tensors, layers, states)
        shape = 1, 1, len(caches[0].keys), self.block_size
        canaries = torch.empty(shape, dtype=torch.int64, device=tensors[0].device)
        return KVCache((*tensors, canaries), layers, states, canaries[0, 0])


def empty_states(
    config: ModelConfig, num_states: int, num_ranks: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """One rank's recurrent states and inputs of convolutions, uninitialised, each [1, num_layers, num_states, …] as
    copy_blocks takes them; () if no layer is recurrent. LayerState has the shapes.

    dtype: dtype of the activations.
    """
    if (net := config.delta_net) is None:
        return ()
    shape = 1, config.num_recurrent_layers, num_states
    of_heads = net.num_value_heads // num_ranks, net.value_dim, net.key_dim
    recurrent = torch.empty((*shape, *of_heads), dtype=torch.float32, device=device)
    of_inputs = net.kernel_size, net.num_channels // num_ranks
    return recurrent, torch.empty((*shape, *of_inputs), dtype=dtype, device=device)
