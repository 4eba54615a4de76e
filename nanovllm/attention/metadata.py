"""AttentionMetadata describes one step to the attention layers. Every field has the same meaning in every step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

# Queries of one sequence that one program of the attention kernel takes.
QUERY_TILE = 64


class SharedPrefixes(NamedTuple):
    """Splits of keys that several decodes share (attention/prefix_groups.py), on the device, int32.

    num_items: [1], how many of `items` are valid.
    items: [capacity, 3], per item: number of the split in its rows, index of its first member in `members`, number of
        members.
    members: [capacity], rows of the step.
    num_shared: [max_num_seqs], how many leading splits of each row are in `items`.
    """

    num_items: torch.Tensor
    items: torch.Tensor
    members: torch.Tensor
    num_shared: torch.Tensor


@dataclass
class AttentionMetadata:
    """Ragged queries over paged keys. Row i is one sequence; a decode is a row with a single query.

    The step's decodes come first. In a captured step, padding may follow the rows and the tokens: a padding row has no
    queries and no keys, a padding token has no slot. `attend` leaves the output of padding tokens undefined.

    Args:
        cu_seqlens_q: int32 [num_rows + 1], index of each row's first query in the flat batch, then the number of all
            queries.
        context_lens: int32 [num_rows], number of keys of each row, those of its queries included.
        num_decodes: int32 [1], leading rows that are decodes.
        max_num_decodes: an upper bound of num_decodes that the host knows: exact in an eager step, the number of rows
            in a captured one.
        max_seqlen_q, max_seqlen_k: no row has more queries or keys.
        slot_mapping: int64 [num_tokens], slot of each token's keys, block × block_size + offset; −1 for padding.
        block_tables: int32 [num_rows, max_blocks]; entries after a row's own blocks are not read, nor those of blocks
            that are behind the windows of all its queries.
        block_size: tokens per block.
        query_tiles: int32 [num_tiles, 4], the queries of the rows that are not decodes; see `query_tiles`. A tile of
            padding has no queries. None if the step holds decodes alone.
        sampled_tiles: int32 [num_tiles, 4], those of `query_tiles` that hold the last token of a row that samples, then
            tiles of padding. None if no layer asks for them, or if the step holds decodes alone.
        shared_prefixes: the keys that several decodes share; None if there are none.
        group: the group of layers that these slots, block tables and plan are for. All else is the same in all groups.
        entries: int32 [num_rows], each row's entry in the SequenceTable; may be a view with a stride. None in
            batches that no layer with states reads.
        tenants: each row's admission as (request id, number of preemptions), which is unique: for a backend that keeps
            keys from step to step. None where it is not known, as in a captured step.
        plan: the result of the attention backend's `plan`; None before that call.
    """

    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    num_decodes: torch.Tensor
    max_num_decodes: int
    max_seqlen_q: int
    max_seqlen_k: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    query_tiles: torch.Tensor | None = None
    sampled_tiles: torch.Tensor | None = None
    shared_prefixes: SharedPrefixes | None = None
    group: int = 0
    entries: torch.Tensor | None = None
    tenants: list[tuple[int, int]] | None = None
    plan: Any = None


def query_tiles(num_new_tokens: np.ndarray, context_lens: np.ndarray, num_decodes: int) -> np.ndarray:
    """The queries of the rows after the decodes, in tiles: int32 [num_tiles, 4], per tile: its first token in the flat
    batch, its number of queries, the position of the first query, and the row.

    num_new_tokens, context_lens: int64 [num_rows]. Tiles that see the most keys come first: they take longest.
    """
    num_tiles = -(-num_new_tokens // QUERY_TILE)
    num_tiles[:num_decodes] = 0
    row = np.repeat(np.arange(len(num_tiles)), num_tiles)
    first = (np.arange(len(row)) - (np.cumsum(num_tiles) - num_tiles)[row]) * QUERY_TILE
    token = (np.cumsum(num_new_tokens) - num_new_tokens)[row] + first
    position = (context_lens - num_new_tokens)[row] + first
    num_queries = np.minimum(num_new_tokens[row] - first, QUERY_TILE)
    tiles = np.stack([token, num_queries, position, row], 1).astype(np.int32)
    return tiles[np.argsort(-(position + num_queries), kind="stable")]
