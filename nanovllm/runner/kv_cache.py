"""The KV cache: its tensors, their dtype and scales, and a layer's view of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from nanovllm.models.config import CachePlace
from nanovllm.models.cost import head_kv_bytes
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.quantize import E4M3


@dataclass(frozen=True)
class KVCache:
    """The memory of all blocks, and each layer's part of it.

    tensors: the whole memory, contiguous, each [num_tensors, num_parts, num_blocks, …]. Each layer has a part of its
        group's blocks.
    layers: each layer's view of them. Layers of different groups may have the same part.
    """

    tensors: tuple[torch.Tensor, ...]
    layers: list[LayerCache]

    @property
    def num_blocks(self) -> int:
        return len(self.layers[0].keys)

    @property
    def block_size(self) -> int:
        return self.layers[0].block_size

    @property
    def is_fp8(self) -> bool:
        return self.layers[0].is_fp8

    @property
    def nbytes(self) -> int:
        """Bytes that the blocks take on the device, even if the memory is released now."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes_held(self) -> int:
        """Bytes that are allocated now; 0 during sleep."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def release(self) -> None:
        """Frees the memory; the tensor objects stay."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocates the memory again; its contents are lost. Without a `release` it does nothing."""
        for tensor in self.tensors:
            if tensor.untyped_storage().nbytes() == 0:
                tensor.untyped_storage().resize_(tensor.nbytes)
                if tensor.dtype == torch.int8:  # see KVCacheLayout.empty
                    tensor.zero_()

    def zero_(self) -> "KVCache":
        for tensor in self.tensors:
            tensor.zero_()
        return self


@dataclass(frozen=True)
class KVCacheLayout:
    """The shape and dtype of a cache, except its number of blocks; `num_kv_heads` counts this rank's heads.

    places: each layer's place in the cache.
    dtype: float8_e4m3fn for a cache in FP8, whose keys are int8.
    """

    places: tuple[CachePlace, ...]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        return self.dtype == E4M3

    @property
    def num_parts(self) -> int:
        """Parts of a block: the layers of the largest group."""
        return 1 + max(place.part for place in self.places)

    @property
    def num_groups(self) -> int:
        return 1 + max(place.group for place in self.places)

    @property
    def block_bytes(self) -> int:
        head_bytes = head_kv_bytes(self.head_dim, self.dtype.itemsize)
        return self.num_parts * self.block_size * self.num_kv_heads * head_bytes

    def empty(self, num_blocks: int, device: torch.device) -> KVCache:
        """A cache of keys, values, and in FP8 scales; LayerCache has the shapes.

        In FP8, keys and values begin as zeros, because an uninitialised byte may be NaN in e4m3. Other memory is
        uninitialised.
        """
        blocks, heads = (self.num_parts, num_blocks), self.num_kv_heads
        if not self.is_fp8:
            shape = 2, *blocks, self.block_size, heads, self.head_dim
            whole = torch.empty(shape, dtype=self.dtype, device=device)
            return self._with_layers((whole,), zip(*whole, strict=True))
        numbers = torch.zeros((2, *blocks, heads, self.block_size * self.head_dim), dtype=torch.int8, device=device)
        scales = torch.empty((1, *blocks, heads, self.block_size), dtype=torch.int32, device=device)
        keys = numbers[0].unflatten(-1, (self.block_size, self.head_dim))
        values = numbers[1].view(E4M3).unflatten(-1, (self.head_dim, self.block_size))
        return self._with_layers((numbers, scales), zip(keys, values, scales[0], strict=True))

    def _with_layers(self, tensors: tuple[torch.Tensor, ...], parts: Iterable[tuple[torch.Tensor, ...]]) -> KVCache:
        caches = [LayerCache(*part) for part in parts]
        return KVCache(tensors, [caches[place.part] for place in self.places])
