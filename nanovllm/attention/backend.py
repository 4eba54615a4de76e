"""The protocol of attention backends (plan, store_kvcache, attend) and the choice between them.

`torch` is the plain reference, `sdpa` what runs fast on a CPU; `triton` (our own kernels) and `flash`
(FlashAttention 2) are for GPUs.
"""

import importlib
import logging
import os
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.attention.prefix_groups import PrefixGroups
from nanovllm.ops.kernel import has_triton
from nanovllm.ops.layer_cache import LayerCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionShape:
    """What all attention layers of a model have in common; heads are those of this rank.

    scale: of the scores; None is 1 / sqrt(head_dim).
    windows: those of the layers, see AttentionBackend.attend, each once.
    has_fp8_cache: whether the KV cache is in FP8.
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

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class AttentionBackend(Protocol):
    """Causal attention of ragged queries over paged keys. A backend belongs to one KV cache and
    plans steps in the order in which they run."""

    name: str
    default_block_size: int
    can_be_captured: bool  # whether plan and attend of decodes only launch kernels, so that a CUDA graph can hold them
    can_capture_prompts: bool  # the same for any queries, given as query_tiles
    reads_new_keys: bool  # whether attend reads k and v, and not the cache alone
    max_num_shared_splits: (
        int  # capacity of what `shared_prefixes` can return; 0 if the backend reads every key by itself
    )

    def keep_buffers(self, is_kept: bool) -> None:
        """False gives back the memory that steps share, and forgets what it holds; True takes it again, before the
        next step is planned."""

    def shared_prefixes(
        self, block_tables: np.ndarray, context_lens: np.ndarray, block_size: int
    ) -> PrefixGroups | None:
        """Which of these decodes share leading blocks, so that `attend` can read those once for all of them.

        block_tables: int [num_rows, ≥ blocks of the longest row]; context_lens: int [num_rows].

        The answer holds while the same rows go on decoding and their `split_lengths` do not change. It goes into the
        metadata, and the backend keeps nothing. None if nothing is shared.
        """

    def split_lengths(self, context_lens: np.ndarray) -> np.ndarray:
        """How many keys a split has in sequences of `context_lens` keys: int, [n]. Only a backend with
        `max_num_shared_splits` is asked."""

    def variant_key(self, max_num_decodes: int, has_prompts: bool) -> Hashable:
        """What captured steps of other sizes differ in, if they need other kernels."""

    def plan(self, metadata: AttentionMetadata) -> Any:
        """What `attend` wants to know beforehand, once per step for all layers; goes into `metadata.plan`."""

    def store_kvcache(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        """`cache.write`."""

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
        window only the last `window` of those; 0 is no window. Scores are scaled by `shape.score_scale`. Nothing
        beyond a sequence's own keys is read: other slots may hold NaN. With a cache in FP8, every key and value is seen
        as the cache has it, a new one too: a prompt attends alike however it is cut into chunks.
        """


def make_attention_backend(name: str, shape: AttentionShape, block_size: int | None = None) -> AttentionBackend:
    """The backend that `attention_backend` asks for; "auto" is the fastest that can run here.

    Args:
        block_size: tokens in a block; None leaves it to the backend.

    Raises:
        ValueError: the backend cannot run this model, dtype or block size here; the message says what can.
        RuntimeError: it needs a GPU or a package that is not there.
    """
    if name == "auto":
        name = _fastest(shape, block_size)
    problem = _problem(name, shape, block_size)
    if problem is not None:
        raise problem
    if name == "torch":
        from nanovllm.attention.torch_backend import TorchAttention

        return TorchAttention(shape)
    if name == "sdpa":
        from nanovllm.attention.sdpa_backend import SDPAAttention

        return SDPAAttention(shape)
    if name == "triton":
        from nanovllm.attention.triton_backend import TritonAttention

        return TritonAttention(shape)
    from nanovllm.attention.flash_backend import FlashAttention

    return FlashAttention(shape)


def _fastest(shape: AttentionShape, block_size: int | None) -> str:
    if shape.device.type == "cpu":
        return "sdpa"
    for name in ("triton", "flash", "sdpa"):
        problem = _problem(name, shape, block_size)
        if problem is None:
            level = logging.WARNING if name == "sdpa" else logging.INFO
            logger.log(level, "attention_backend %s is the fastest that can run here", name)
            return name
        logger.info("attention_backend %s is not used: %s", name, problem)
    raise AssertionError("sdpa runs everywhere")


def _problem(name: str, shape: AttentionShape, block_size: int | None) -> Exception | None:
    """Why a backend cannot run here, or None."""
    if name in ("triton", "flash") and shape.device.type != "cuda" and not _interprets(name):
        return RuntimeError(f'attention_backend="{name}" needs a GPU; on a CPU use "auto"')
    if name == "triton":
        if not has_triton():
            return RuntimeError('attention_backend="triton" needs the triton package: pip install triton')
        if shape.has_fp8_cache and shape.head_dim % 16:
            return ValueError(
                'attention_backend="triton" needs a head_dim that 16 divides for kv_cache_dtype="fp8", not '
                f'{shape.head_dim}; use attention_backend="sdpa" or kv_cache_dtype="auto"'
            )
        if shape.has_fp8_cache and block_size is not None and block_size % 32:
            return ValueError(
                'attention_backend="triton" needs kvcache_block_size to be a multiple of 32 for kv_cache_dtype="fp8", '
                f"not {block_size}"
            )
        if block_size is not None and block_size % 16:
            return ValueError(
                f'attention_backend="triton" needs kvcache_block_size to be a multiple of 16, not {block_size}'
            )
    if name == "flash":
        if shape.has_fp8_cache:
            return ValueError(
                'attention_backend="flash" cannot read kv_cache_dtype="fp8"; use "triton", or kv_cache_dtype="auto"'
            )
        if shape.dtype not in (torch.bfloat16, torch.float16):
            return ValueError(f'attention_backend="flash" needs dtype bfloat16 or float16, not {shape.dtype}')
        if shape.head_dim > 256 or shape.head_dim % 8:
            return ValueError(
                f'attention_backend="flash" needs a head_dim of at most 256 that 8 divides, not {shape.head_dim}'
            )
        if block_size is not None and block_size % 256:
            return ValueError(
                f'attention_backend="flash" needs kvcache_block_size to be a multiple of 256, not {block_size}'
            )
        try:
            importlib.import_module("flash_attn")
        except ImportError as error:  # also one that was built for another PyTorch
            return RuntimeError(
                'attention_backend="flash" needs the flash-attn package: pip install flash-attn; '
                f'or use "triton" ({error})'
            )
        if torch.cuda.get_device_capability(shape.device) < (8, 0):
            return ValueError('attention_backend="flash" needs a GPU of compute capability 8.0 or newer; use "triton"')
        from nanovllm.attention.flash_backend import find_fault

        fault = find_fault(shape)
        if fault is not None:
            windows = " with sliding windows" if any(shape.windows) else ""
            return ValueError(
                f'attention_backend="flash" needs another build of flash-attn: the installed one cannot compute heads '
                f'of {shape.head_dim}{windows} ({fault}); or use "triton"'
            )
    return None


def _interprets(name: str) -> bool:
    # Triton's interpreter runs kernels on a CPU, slowly: for tests.
    return name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
