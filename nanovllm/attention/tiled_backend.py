"""Attention with the same bits in every batch, for a CPU: the backend of `deterministic=True`.

Queries and keys come in tiles that begin at absolute positions: position p is always number p % 16 of its tile of
queries, and sees the same tiles of keys in the same order, however its sequence was divided into chunks. All products
have one shape. Decodes have smaller tiles of queries, if the machine multiplies those to the same bits. Tiles of all
sequences are multiplied together, one tile of keys after the other, with the online softmax of FlashAttention (Dao,
2023). The plain twin is TorchAttention.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.gathered_keys import slots_of_positions
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.ops.layer_cache import LayerCache

_QUERIES, _KEYS = 16, 64  # of a tile; as the first divides the second, a tile of queries needs the same tiles of keys
_ROWS = 4  # a decode's queries, those of all heads with the same keys, are padded to a multiple of this
_LOWEST = -1e30  # below every score, and finite: exp(−inf − lowest) is 0


@dataclass
class Tiles:
    """Tiles of queries of one size. Those that need the most tiles of keys come first.

    num_queries: queries of a tile.
    tokens: int64 [num_tokens], the tokens in the flat batch.
    places: int64 [num_tokens], each token's place among the queries of all tiles.
    positions: int64 [num_tiles, num_queries], the queries' positions.
    slots: for each tile of keys, int64 [num_active, 64]: the keys of the first `num_active` tiles of queries.
    """

    num_queries: int
    tokens: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]


class TiledAttention(AttentionBackend):
    name = "tiled"
    is_deterministic = True

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        group_size = shape.num_heads // shape.num_kv_heads
        small = _ROWS // int(np.gcd(_ROWS, group_size))
        self._num_queries_of_decode = small if _agree(small * group_size, group_size, shape.head_dim) else _QUERIES

    @classmethod
    def problem(cls, shape: AttentionShape, block_size: int | None) -> Exception | None:
        if shape.device.type == "cpu":
            return None
        return ValueError('attention_backend="tiled" is for CPUs; use "auto" or "triton"')

    def plans(self, groups: list[AttentionMetadata]) -> list[list[Tiles]]:
        return [self.plan(each) for each in groups]

    def plan(self, metadata: AttentionMetadata) -> list[Tiles]:
        starts = metadata.cu_seqlens_q.cpu().numpy().astype(np.int64)
        num_new = np.diff(starts)
        sizes = np.where(num_new == 1, self._num_queries_of_decode, _QUERIES)
        return [
            self._tiles(size, np.flatnonzero((num_new > 0) & (sizes == size)), starts, metadata)
            for size in np.unique(sizes[num_new > 0]).tolist()
        ]

    def _tiles(self, num_queries: int, rows: np.ndarray, starts: np.ndarray, metadata: AttentionMetadata) -> Tiles:
        """The tiles of these rows of the step: int64 [num_rows]."""
        lengths = metadata.context_lens.cpu().numpy().astype(np.int64)
        tables = metadata.block_tables.cpu().numpy().astype(np.int64)
        num_new = starts[rows + 1] - starts[rows]
        row = np.repeat(rows, num_new)
        number = np.arange(num_new.sum()) - np.repeat(np.cumsum(num_new) - num_new, num_new)  # of the row's new tokens
        position = number + np.repeat(lengths[rows] - num_new, num_new)
        # The tiles as (minus the number of the last tile of keys, row, number in the row), in this order.
        names = np.stack([-(position // _KEYS), row, position // num_queries], 1)
        tiles, tile_of_token = np.unique(names, axis=0, return_inverse=True)
        num_key_tiles, row_of_tile = 1 - tiles[:, 0], tiles[:, 1]
        window = min(self._shape.windows) if metadata.group == 0 else max(self._shape.windows)
        # The first key that a query of each row sees. Slots before it may hold other sequences' keys.
        first_seen = np.maximum(lengths - np.diff(starts) + 1 - window, 0) if window else np.zeros_like(lengths)
        slots = []
        for index in range(num_key_tiles[0]):
            active = row_of_tile[: np.count_nonzero(num_key_tiles > index)]
            keys = index * _KEYS + np.arange(_KEYS)
            of_tile = slots_of_positions(tables[active], lengths[active], keys, metadata.block_size, first_seen[active])
            slots.append(self._on_device(of_tile))
        places = tile_of_token.reshape(-1) * num_queries + position % num_queries
        positions = tiles[:, 2:] * num_queries + np.arange(num_queries)
        tokens, on_device = starts[row] + number, self._on_device
        return Tiles(num_queries, on_device(tokens), on_device(places), on_device(positions), slots)

    def attend(self, q, k, v, cache: LayerCache, metadata: AttentionMetadata, window: int = 0) -> torch.Tensor:
        out = torch.empty_like(q)
        for tiles in metadata.plan:
            out[tiles.tokens] = self._attend_tiles(tiles, q[tiles.tokens], cache, window).to(q.dtype)
        return out

    def _attend_tiles(self, tiles: Tiles, q: torch.Tensor, cache: LayerCache, window: int) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim] of the tiles' tokens -> the same, float32"""
        (num_heads, head_dim), num_kv_heads, num_tiles = q.shape[1:], cache.num_kv_heads, len(tiles.positions)
        queries = q.new_zeros(num_tiles * tiles.num_queries, num_heads, head_dim, dtype=torch.float32)
        queries[tiles.places] = q.float() * self._shape.score_scale
        # [num_tiles, num_kv_heads, query heads of the group, queries, head_dim]
        by_head = queries.view(num_tiles, tiles.num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        queries = by_head.contiguous()
        largest = torch.full_like(queries[..., :1], _LOWEST)
        total, summed = torch.zeros_like(largest), torch.zeros_like(queries)
        first = max(int(tiles.positions.min()) + 1 - window, 0) // _KEYS if window else 0
        for index, slots in enumerate(tiles.slots[first:], first):
            active = slice(len(slots))
            keys, values = self._read(cache, slots)
            scores = torch.bmm(queries[active].flatten(2, 3).flatten(0, 1), keys.mT)
            scores = scores.view(*queries[active].shape[:4], _KEYS)
            distance = tiles.positions[active, :, None] - torch.arange(_KEYS, device=q.device) - index * _KEYS
            is_unseen = (distance < 0) | (distance >= window) if window else distance < 0
            scores = scores.masked_fill(is_unseen[:, None, None], -torch.inf)
            new_largest = largest[active].maximum(scores.amax(-1, keepdim=True))
            weights, factor = (scores - new_largest).exp_(), (largest[active] - new_largest).exp_()
            largest[active] = new_largest
            total[active] = total[active] * factor + weights.sum(-1, keepdim=True)
            of_values = torch.bmm(weights.flatten(2, 3).flatten(0, 1), values).view(summed[active].shape)
            summed[active] = summed[active] * factor + of_values
        return (summed / total).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)[tiles.places]

    @staticmethod
    def _read(cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """slots: int64 [n, 64] -> keys and values, each float32 [n × num_kv_heads, 64, head_dim]"""
        heads = torch.arange(cache.num_kv_heads, device=slots.device)
        rows = (slots[:, None] * cache.num_kv_heads + heads[:, None]).flatten()
        if cache.is_fp8:
            keys, values = cache.read_heads(rows)
        else:
            keys, values = (
                each.view(-1, cache.head_dim).index_select(0, rows).float() for each in (cache.keys, cache.values)
            )
        return keys.view(-1, _KEYS, cache.head_dim), values.view(-1, _KEYS, cache.head_dim)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._shape.device)


def _agree(num_rows: int, group_size: int, head_dim: int) -> bool:
    """Whether products of `num_rows` rows have the bits of those of a whole tile, wherever the rows are in it."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values, weights = (
        torch.randn(3, size, width, generator=generator)
        for size, width in (
            (_QUERIES * group_size, head_dim),
            (_KEYS, head_dim),
            (_KEYS, head_dim),
            (_QUERIES * group_size, _KEYS),
        )
    )
    for left, right in ((queries, keys.mT), (weights, values)):
        parts = [torch.bmm(part.contiguous(), right) for part in left.split(num_rows, 1)]
        if not torch.equal(torch.cat(parts, 1), torch.bmm(left, right)):
            return False
    return True
