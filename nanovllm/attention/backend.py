"""AttentionShape, the numbers that a backend is made for, and AttentionBackend, the base class of all backends.

`choice.py` chooses the backend of a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.attention.prefix_groups import PrefixGroups
from nanovllm.ops.layer_cache import LayerCache


@dataclass(frozen=True)
class AttentionShape:
    """The numbers that all attention layers of a model share.

    num_heads, num_kv_heads: heads of this rank.
    scale: factor on the scores; None is 1 / sqrt(head_dim).
    windows: the different windows of the layers, see AttentionBackend.attend.
    has_fp8_cache: whether the KV cache is in FP8.
    deterministic: a query's result must depend on its own sequence alone, bit for bit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    max_num_seqs: int = 512
    max_model_len: int = 4096
    scale: float | None = None
    windows: tuple[int, ...] = (0,)
    has_fp8_cache: bool = False
    deterministic: bool = False

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class AttentionBackend(ABC):
    """Causal attention of ragged queries over paged keys. A backend belongs to one KV cache and plans steps in the
    order in which they run. The defaults are those of a backend that keeps nothing and only runs eagerly.

    name: the value of the option `attention_backend`.
    default_block_size: tokens per block if the user does not choose.
    can_be_captured: whether `plan` and `attend` of decodes only launch kernels, so that a CUDA graph can hold them.
    can_capture_prompts: the same for any queries, given as query_tiles.
    reads_new_keys: whether `attend` reads k and v too, and not only the cache.
    num_keys_per_tile: in a layer with a window, `attend` reads from the tile on in which the window begins. A tile has
        this many keys.
    is_deterministic: whether a query's result depends on its own sequence alone, bit for bit, and not on the step.
    max_num_shared_splits: capacity of the results of `shared_prefixes`; 0 if the backend reads every row's keys for
        that row alone.
    """

    name: ClassVar[str]
    default_block_size: ClassVar[int] = 64
    can_be_captured: ClassVar[bool] = False
    can_capture_prompts: ClassVar[bool] = False
    reads_new_keys: ClassVar[bool] = False
    num_keys_per_tile: ClassVar[int] = 1
    is_deterministic: ClassVar[bool] = False
    max_num_shared_splits: int = 0

    def __init__(self, shape: AttentionShape):
        self._shape = shape
        self.has_fp8_cache = shape.has_fp8_cache

    @classmethod
    def problem(cls, shape: AttentionShape, block_size: int | None) -> Exception | None:
        """Why this backend cannot run such a model here, as the error to raise; None if it can.

        block_size: tokens per block; None is `default_block_size`.
        """
        return None

    def keep_buffers(self, is_kept: bool) -> None:  # noqa: B027 (most backends have no buffers)
        """False frees the memory that steps share, and forgets its contents. True allocates it again; this must happen
        before the next step is planned."""

    def shared_prefixes(
        self, block_tables: np.ndarray, context_lens: np.ndarray, block_size: int
    ) -> PrefixGroups | None:
        """Finds the decodes that share leading blocks, so that `attend` can read those once for all of them.

        block_tables: int [num_rows, ≥ blocks of the longest row]; context_lens: int [num_rows].

        The result is valid while the same rows decode and their `split_lengths` do not change. It goes into the
        metadata; the backend does not keep it. None if nothing is shared.
        """
        return None

    def split_lengths(self, context_lens: np.ndarray) -> np.ndarray:
        """Keys per split in sequences of `context_lens` keys: int, [n]. Only for a backend with
        `max_num_shared_splits`."""
        return context_lens

    def variant_key(self, max_num_decodes: int, has_prompts: bool) -> Hashable:
        """A hashable key: captured steps whose keys differ need different compiled kernels."""
        return None

    def plan(self, metadata: AttentionMetadata) -> Any:
        """Prepares `attend`, once per step for all layers. The result goes into `metadata.plan`."""
        return None

    def plans(self, groups: list[AttentionMetadata]) -> list[Any]:
        """The plan of each group of layers."""
        return [self.plan(groups[0])] * len(groups)

    def store_kvcache(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata) -> None:
        """Writes the new keys and values; see `LayerCache.write`."""
        cache.write(k, v, metadata.slot_mapping)

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int = 0,
    ) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim] -> the same; the new k, v are in the cache already.

        A sequence's queries are its last ones: query i of n sees keys 0 … context_len − n + i, and with a sliding
        window only the last `window` of those; 0 is no window. Scores are scaled by `shape.score_scale`. A backend
        reads no keys but the sequence's own: other slots may hold NaN. Whole tiles of `num_keys_per_tile` keys may be
        gone if they are behind the windows of all queries. With a cache in FP8, all keys and values are attended as the
        cache holds them, new ones too. So the chunks of a prompt do not change its attention.
        """
