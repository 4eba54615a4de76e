"""Attention with the same bits in every batch, for a GPU: the backend of `deterministic=True`.

The kernels of prompts give a query the same bits in any tile and any chunk, because each query meets the tiles of its
keys in the same order (triton_prompts.py, hopper_prompts.py). So decodes are attended by the same kernels, as tiles of
a single query. The plain twin is TorchAttention.
"""

import torch

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.attention.triton_prompts import attend_decodes_as_prompts, attend_prompts
from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.layer_cache import LayerCache

_BLOCK_MULTIPLE = 64  # with other blocks, kernels take fewer keys at a time


@jit
def _list_decodes_kernel(context_lens, num_decodes, tiles, ROWS: tl.constexpr):
    """One program per row puts its tile behind those of rows with more keys."""
    begin()
    row, other, num_rows = tl.program_id(0), tl.arange(0, ROWS), tl.load(num_decodes)
    lengths = tl.load(context_lens + other, other < num_rows, 0)
    length = tl.sum(tl.where(other == row, lengths, 0), 0)
    is_before = (lengths > length) | ((lengths == length) & (other < row))
    tile = tiles + tl.sum(is_before.to(tl.int32), 0) * 4
    tl.store(tile, row)
    tl.store(tile + 1, (row < num_rows).to(tl.int32))
    tl.store(tile + 2, length - 1)
    tl.store(tile + 3, row)


class OrderedAttention(AttentionBackend):
    name = "triton"
    is_deterministic = True
    can_be_captured = can_capture_prompts = True
    num_keys_per_tile = TritonAttention.num_keys_per_tile
    store_kvcache = TritonAttention.store_kvcache

    @classmethod
    def problem(cls, shape: AttentionShape, block_size: int | None) -> Exception | None:
        if shape.device.type == "cpu":
            return ValueError(
                'attention_backend="triton" runs in an interpreter on a CPU, and its bits depend on the batch; for '
                'deterministic=True, use "auto" or "tiled"'
            )
        if block_size is not None and block_size % _BLOCK_MULTIPLE:
            return ValueError(
                f"deterministic=True needs kvcache_block_size to be a multiple of {_BLOCK_MULTIPLE} on a GPU, not "
                f"{block_size}"
            )
        return TritonAttention.problem(shape, block_size)

    def plan(self, metadata: AttentionMetadata) -> torch.Tensor:
        """The decodes as tiles: int32 [max_num_decodes, 4], see AttentionMetadata.query_tiles."""
        num_rows = metadata.max_num_decodes
        tiles = torch.empty((num_rows, 4), dtype=torch.int32, device=self._shape.device)
        if num_rows:
            rows = triton.next_power_of_2(self._shape.max_num_seqs)  # always the same, for one compilation
            _list_decodes_kernel[(num_rows,)](
                metadata.context_lens, metadata.num_decodes, tiles, ROWS=rows, **LAUNCH_OPTIONS
            )
        return tiles

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if metadata.query_tiles is not None:
            attend_prompts(self._shape, q, cache, out, metadata, window)
        if metadata.max_num_decodes:
            attend_decodes_as_prompts(self._shape, q, cache, out, metadata, metadata.plan, window)
        return out
