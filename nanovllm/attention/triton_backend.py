"""Attention by kernels of our own, in Triton: any GPU, dtype and block size that is a multiple of 16.

triton_prompts.py attends prompts. The keys of a decode are divided into splits, and the partial results are merged in
order (triton_decodes.py). The length of a row's splits depends on the length of that row alone (splits.py). `plan`
lists the splits on the device, and a fixed grid works through the list, so a captured step serves any lengths. A
program reads the keys of a split once for all query heads of their group, and once for all decodes that share the
split: the idea of cascade inference (Ye et al., FlashInfer, 2024), with any number of prefixes. The plain twin is
TorchAttention.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.attention import splits, triton_fp8
from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.metadata import AttentionMetadata, SharedPrefixes
from nanovllm.attention.prefix_groups import PrefixGroups, find_prefix_groups
from nanovllm.attention.splits import max_num_splits, split_lengths
from nanovllm.attention.triton_decodes import decode_kernel, grouped_kernel, merge_kernel, plan_kernel
from nanovllm.attention.triton_keys import LOG2_E
from nanovllm.attention.triton_prompts import attend_prompts
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS
from nanovllm.ops.kernel import has_triton, shared_memory, triton
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.store_kvcache import store_kvcache

# Keys per tile, and the smallest group of query heads; smaller groups are padded.
_KEYS = 64
_MIN_GROUP = 16
# Pipeline stages of the decode kernel, if shared memory allows. Beside prompts, or with more decodes than this, two
# stages and more programs per processor are faster.
_NUM_STAGES = 5
_MAX_DECODES_OF_STAGES = 256
# Queries (rows that share a split × the heads of a group) that one program attends together.
_QUERIES_OF_GROUP = 64
# Heads that a program merges, one warp per head, and how many of their splits it reads at a time.
_HEADS_OF_MERGE = 4
_SPLITS_OF_MERGE = 8


@dataclass
class DecodePlan:
    """The splits of the decodes' keys, for the layers with one window. All tensors are int32.

    num_items: [1], number of splits in the list, which leaves out those that rows share.
    item_rows, item_splits: [capacity], the row of each split, and its number in that row.
    first_items: [max_num_decodes], index of each row's first partial result.
    """

    num_items: torch.Tensor
    item_rows: torch.Tensor
    item_splits: torch.Tensor
    first_items: torch.Tensor


class TritonAttention(AttentionBackend):
    name = "triton"
    can_be_captured = True
    can_capture_prompts = True
    num_keys_per_tile = _KEYS

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        self._scale = shape.score_scale * LOG2_E
        self._max_num_splits = max_num_splits(shape.max_model_len)
        longest = int(split_lengths(np.array(shape.max_model_len)))
        self._split = {"SHORTEST": splits.SHORTEST_SPLIT, "LONGEST": longest}
        capacity = shape.max_num_seqs * self._max_num_splits
        self.max_num_shared_splits = capacity
        # Partial results, between two kernels. A captured step needs them at fixed addresses.
        numbers: dict[str, Any] = {"dtype": torch.float32, "device": shape.device}
        self._partial = torch.empty((capacity, shape.num_heads, shape.head_dim), **numbers)
        self._log_sums = torch.empty((capacity, shape.num_heads), **numbers)
        self._items = {
            window: torch.empty((2, capacity), dtype=torch.int32, device=shape.device) for window in shape.windows
        }
        on_gpu = shape.device.type == "cuda"
        num_processors = torch.cuda.get_device_properties(shape.device).multi_processor_count if on_gpu else 1
        # Many more programs than run at once: a processor that has finished one takes the next.
        self._num_programs, self._num_grouped_programs = 32 * num_processors, 2 * num_processors
        self._rows = triton.next_power_of_2(shape.max_num_seqs)  # always the same, for one compilation
        self._width = triton.next_power_of_2(shape.head_dim)
        # Triton 3.4 buffers one tile of keys and values less than there are stages, later versions half as many.
        tile = 2 * _KEYS * self._width * shape.dtype.itemsize
        self._has_stages = (_NUM_STAGES - 1) * tile + 2**13 <= shared_memory(shape.device)

    @classmethod
    def problem(cls, shape: AttentionShape, block_size: int | None) -> Exception | None:
        needs = 'attention_backend="triton" needs'
        # The interpreter runs kernels on a CPU, slowly: for tests.
        if shape.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return RuntimeError(f'{needs} a GPU; on a CPU use "auto"')
        if not has_triton():
            return RuntimeError(f"{needs} the triton package: pip install triton")
        if shape.has_fp8_cache and shape.head_dim % 16:
            return ValueError(
                f'{needs} a head_dim that 16 divides for kv_cache_dtype="fp8", not {shape.head_dim}; '
                'use attention_backend="sdpa" or kv_cache_dtype="auto"'
            )
        multiple, where = (32, ' for kv_cache_dtype="fp8"') if shape.has_fp8_cache else (16, "")
        if block_size is not None and block_size % multiple:
            return ValueError(f"{needs} kvcache_block_size to be a multiple of {multiple}{where}, not {block_size}")
        return None

    def keep_buffers(self, is_kept: bool) -> None:
        for buffer in (self._partial, self._log_sums, *self._items.values()):
            buffer.untyped_storage().resize_(buffer.nbytes if is_kept else 0)

    def split_lengths(self, context_lens: np.ndarray) -> np.ndarray:
        return split_lengths(context_lens)

    def variant_key(self, max_num_decodes: int, has_prompts: bool) -> int:
        return _NUM_STAGES if self._has_stages and max_num_decodes <= _MAX_DECODES_OF_STAGES and not has_prompts else 2

    def shared_prefixes(
        self, block_tables: np.ndarray, context_lens: np.ndarray, block_size: int
    ) -> PrefixGroups | None:
        if splits.SHORTEST_SPLIT % block_size:
            return None
        group_size = self._shape.num_heads // self._shape.num_kv_heads
        max_num_members = max(1, _QUERIES_OF_GROUP // group_size)
        lengths = split_lengths(context_lens)
        return find_prefix_groups(block_tables, context_lens, block_size, lengths, max_num_members)

    def plan(self, metadata: AttentionMetadata) -> dict[int, DecodePlan]:
        """A plan per window."""
        if metadata.max_num_decodes == 0:
            return {}
        return {window: self._plan_decodes(metadata, window) for window in self._shape.windows}

    def _plan_decodes(self, metadata: AttentionMetadata, window: int) -> DecodePlan:
        num_rows, shared = metadata.max_num_decodes, _shared(metadata, window)
        numbers = torch.empty(num_rows + 1, dtype=torch.int32, device=self._shape.device)
        num_items, first_items = numbers.split((1, num_rows))
        plan = DecodePlan(num_items, self._items[window][0], self._items[window][1], first_items)
        plan_kernel[(1,)](
            metadata.context_lens, metadata.num_decodes, None if shared is None else shared.num_shared, num_items,
            first_items, plan.item_rows, plan.item_splits, ROWS=self._rows, IS_GROUPED=shared is not None,
            WINDOW=window, **self._split, **LAUNCH_OPTIONS,
        )  # fmt: skip
        return plan

    def store_kvcache(self, k, v, cache: LayerCache, metadata: AttentionMetadata) -> None:
        store_kvcache(k, v, cache, metadata.slot_mapping, use_kernels=True)

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if metadata.query_tiles is not None:
            attend_prompts(self._shape, q, cache, out, metadata, window)
        if metadata.max_num_decodes:
            self._attend_decodes(q, cache, metadata, window, out)
        return out

    def _attend_decodes(self, q, cache: LayerCache, metadata: AttentionMetadata, window: int, out) -> None:
        shape, plan, shared = self._shape, metadata.plan[window], _shared(metadata, window)
        group_size = shape.num_heads // shape.num_kv_heads
        is_beside_prompts = metadata.query_tiles is not None
        max_num_items = metadata.max_num_decodes * self._max_num_splits * shape.num_kv_heads
        caches: tuple[Any, ...]
        if cache.is_fp8:
            width = triton_fp8.padded_head_dim(shape.head_dim)
            kernel, options = triton_fp8.decode_fp8_kernel, triton_fp8.launch_options(width)
            caches = *triton_fp8.descriptors(cache, width), cache.scales
            num_keys, min_group = triton_fp8.keys_of_tile(cache.block_size), triton_fp8.MIN_GROUP
        else:
            num_stages = self.variant_key(metadata.max_num_decodes, is_beside_prompts)
            kernel, options, caches = decode_kernel, {"num_warps": 4, "num_stages": num_stages}, cache[:2]
            width = self._width
            num_keys, min_group = _KEYS, _MIN_GROUP
        kernel[(min(self._num_programs, max_num_items),)](
            q, *caches, metadata.block_tables, metadata.context_lens, plan.num_items, plan.item_rows,
            plan.item_splits, plan.first_items, self._partial, self._log_sums, self._scale,
            q.stride(0), metadata.block_tables.stride(0), NUM_HEADS=shape.num_heads, NUM_KV_HEADS=shape.num_kv_heads,
            GROUP=group_size, PADDED_GROUP=max(min_group, triton.next_power_of_2(group_size)),
            HEAD_DIM=shape.head_dim, WIDTH=width, BLOCK_SIZE=metadata.block_size, KEYS=num_keys,
            IS_BESIDE_PROMPTS=is_beside_prompts, WINDOW=window, **options, **self._split, **LAUNCH_OPTIONS,
        )  # fmt: skip
        if shared is not None:
            queries = max(16, triton.next_power_of_2(max(1, _QUERIES_OF_GROUP // group_size) * group_size))
            grouped_kernel[(self._num_grouped_programs,)](
                q, *cache, metadata.block_tables, metadata.context_lens, shared.num_items, shared.items,
                shared.members, plan.first_items, self._partial, self._log_sums, self._scale,
                q.stride(0), metadata.block_tables.stride(0), NUM_HEADS=shape.num_heads,
                NUM_KV_HEADS=shape.num_kv_heads, GROUP=group_size, QUERIES=queries, HEAD_DIM=shape.head_dim,
                WIDTH=self._width, BLOCK_SIZE=metadata.block_size, KEYS=_KEYS, num_warps=4, num_stages=2,
                **self._split, **LAUNCH_OPTIONS,
            )  # fmt: skip
        heads = min(_HEADS_OF_MERGE, triton.next_power_of_2(shape.num_heads))
        merge_kernel[(metadata.max_num_decodes, triton.cdiv(shape.num_heads, heads))](
            self._partial, self._log_sums, metadata.context_lens, metadata.num_decodes, plan.first_items, out,
            NUM_HEADS=shape.num_heads, HEAD_DIM=shape.head_dim, WIDTH=self._width,
            MAX_SPLITS=triton.next_power_of_2(self._max_num_splits), SPLITS=_SPLITS_OF_MERGE, HEADS=heads,
            WINDOW=window, num_warps=heads, **self._split, **LAUNCH_OPTIONS,
        )  # fmt: skip


def _shared(metadata: AttentionMetadata, window: int) -> SharedPrefixes | None:
    # Rows share their first keys, which a window soon leaves behind.
    return None if window else metadata.shared_prefixes
