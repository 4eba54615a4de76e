"""Attention through FlashAttention 2 (Dao, 2023), the optional flash-attn package, on GPUs.

Prefill and decode read the paged cache, which holds the new keys by then. The plain twin is TorchAttention.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.ops.kernel import has_triton
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.store_kvcache import store_kvcache


@dataclass
class PrefillPlan:
    """Where the queries and keys of each row after the decodes begin, counted from the first such row.

    cu_seqlens_q, cu_seqlens_k: int32 [num_prefills + 1].
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


class FlashAttention(AttentionBackend):
    name = "flash"
    default_block_size = 256
    num_keys_per_tile = 256  # its kernels choose a number that divides it
    can_be_captured = True

    def __init__(self, shape: AttentionShape):
        import flash_attn

        super().__init__(shape)
        self._flash, self._stores_by_kernel = flash_attn, has_triton()

    @classmethod
    def problem(cls, shape: AttentionShape, block_size: int | None) -> Exception | None:
        head_dim, needs = shape.head_dim, 'attention_backend="flash" needs'
        if shape.device.type != "cuda":
            return RuntimeError(f'{needs} a GPU; on a CPU use "auto"')
        if shape.has_fp8_cache:
            return ValueError(
                'attention_backend="flash" cannot read kv_cache_dtype="fp8"; use "triton", or kv_cache_dtype="auto"'
            )
        if shape.dtype not in (torch.bfloat16, torch.float16):
            return ValueError(f"{needs} dtype bfloat16 or float16, not {shape.dtype}")
        if head_dim > 256 or head_dim % 8:
            return ValueError(f"{needs} a head_dim of at most 256 that 8 divides, not {head_dim}")
        if block_size is not None and block_size % 256:
            return ValueError(f"{needs} kvcache_block_size to be a multiple of 256, not {block_size}")
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:  # also one that was built for another PyTorch
            return RuntimeError(f'{needs} the flash-attn package: pip install flash-attn; or use "triton" ({error})')
        if torch.cuda.get_device_capability(shape.device) < (8, 0):
            return ValueError(f'{needs} a GPU of compute capability 8.0 or newer; use "triton"')
        if (fault := find_fault(shape)) is not None:
            windows = " with sliding windows" if any(shape.windows) else ""
            return ValueError(
                f"{needs} another build of flash-attn: the installed one cannot compute heads of {head_dim}{windows} "
                f'({fault}); or use "triton"'
            )
        return None

    def plan(self, metadata: AttentionMetadata) -> PrefillPlan | None:
        if metadata.query_tiles is None:
            return None
        first = metadata.max_num_decodes
        starts = metadata.cu_seqlens_q[first:] - metadata.cu_seqlens_q[first]
        keys = F.pad(metadata.context_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
        return PrefillPlan(starts, keys)

    def store_kvcache(self, k, v, cache: LayerCache, metadata: AttentionMetadata) -> None:
        store_kvcache(k, v, cache, metadata.slot_mapping, self._stores_by_kernel)

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        num_decodes = metadata.max_num_decodes
        # How many keys a query sees before its own and after it; −1 is all of them.
        window_size = (window - 1, 0 if window else -1)
        options = {"causal": True, "softmax_scale": self._shape.score_scale, "window_size": window_size}
        if metadata.query_tiles is None:
            return self._attend_decodes(q, cache, metadata, options)
        if num_decodes == 0:
            return self._attend_prefills(q, cache, metadata, options)
        decodes = self._attend_decodes(q[:num_decodes], cache, metadata, options)
        return torch.cat((decodes, self._attend_prefills(q[num_decodes:], cache, metadata, options)))

    def _attend_decodes(self, q, cache: LayerCache, metadata: AttentionMetadata, options) -> torch.Tensor:
        decodes = slice(metadata.max_num_decodes)
        out = self._flash.flash_attn_with_kvcache(
            q.unsqueeze(1), cache.keys, cache.values, cache_seqlens=metadata.context_lens[decodes],
            block_table=metadata.block_tables[decodes], **options,
        )  # fmt: skip
        return out.squeeze(1)

    def _attend_prefills(self, q, cache: LayerCache, metadata: AttentionMetadata, options) -> torch.Tensor:
        plan: PrefillPlan = metadata.plan
        return self._flash.flash_attn_varlen_func(
            q, cache.keys, cache.values, plan.cu_seqlens_q, plan.cu_seqlens_k, metadata.max_seqlen_q,
            metadata.max_seqlen_k, block_table=metadata.block_tables[metadata.max_num_decodes :], **options,
        )  # fmt: skip


def find_fault(shape: AttentionShape) -> str | None:
    """Why the installed flash-attn cannot compute such layers, or None. It tries two small decodes for each window.

    Builds differ: some lack windows or large heads. In one build, decodes with heads of 80 and 96 were wrong if their
    keys were split.
    """
    # Several rows and heads: a single one would be right even if results of splits overwrote each other.
    shape = replace(shape, num_heads=6, num_kv_heads=2)
    lengths = 700, 300
    integers: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(3, **integers), context_lens=torch.tensor(lengths, **integers),
        num_decodes=torch.tensor([2], **integers), max_num_decodes=2, max_seqlen_q=1, max_seqlen_k=max(lengths),
        slot_mapping=torch.zeros(2, dtype=torch.int64, device=shape.device),
        block_tables=torch.arange(6, **integers).view(2, 3), block_size=256,
    )  # fmt: skip
    generator = torch.Generator(shape.device).manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=shape.device).to(shape.dtype)

    q, k, v = randn(2, 6, shape.head_dim), randn(6, 256, 2, shape.head_dim), randn(6, 256, 2, shape.head_dim)
    for window in dict.fromkeys(min(window, 200) for window in shape.windows):
        expected = TorchAttention(shape).attend(q, k, v, LayerCache(k, v), metadata, window)
        try:
            out = FlashAttention(shape).attend(q, k, v, LayerCache(k, v), metadata, window)
        except (RuntimeError, TypeError) as error:  # TypeError: a version with other arguments
            return str(error)
        error_norm, norm = (float(x.float().norm()) for x in (out - expected, expected))
        if not error_norm <= 0.02 * norm:  # NaN is a fault too
            return "its results are wrong"
    return None
