"""What attention needs to know of one step: an argument, never a global."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Queries of one sequence that a program of the attention kernel takes together.
QUERY_TILE = 64


@dataclass
class Context:
    """Ragged queries over paged keys; a decode is a query of length 1.

    A captured step does not know how many of its sequences are decodes: all may be, and those that are not, or are
    padding, have a context length of 0. Their queries, if any, are in the tiles alone; `attend` leaves what belongs to
    neither undefined, and every operation after it stays within a row.

    Args:
        cu_seqlens_q: int32 [num_seqs + 1], where each sequence's new tokens begin in the flat batch; None if captured.
        cu_seqlens_k: int32 [num_seqs + 1], the same over each sequence's keys, old and new; None if all are decodes, or
            if captured.
        max_seqlen_q, max_seqlen_k: the longest of each, or more.
        slot_mapping: int64 [num_tokens], block × block_size + offset to write each token's keys to.
        context_lens: int32 [num_seqs], keys of each sequence, new ones included.
        block_tables: int32 [num_seqs, max_blocks], padded with 0.
        block_size: tokens in a block.
        num_decodes: leading sequences that have a single query each, or may have.
        is_grouped: whether those are the rows of the backend's last `group_prefixes`.
        query_tiles: int32 [num_tiles, 4], the queries of the other sequences; see the function. None if there are none.
        has_cached_keys: whether any sequence after those has keys besides its new ones.
        seq_ids: names of the sequences, never used again by others, for a backend that remembers them from step
            to step; None if there are none.
        plan: what the attention backend's `plan` made of the rest.
    """

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    num_decodes: int = 0
    is_grouped: bool = False
    query_tiles: torch.Tensor | None = None
    has_cached_keys: bool = True
    seq_ids: list[int] | None = None
    plan: Any = None


def query_tiles(num_new_tokens: np.ndarray, context_lens: np.ndarray, num_decodes: int) -> np.ndarray:
    """The queries of the sequences after the decodes in tiles: int32 [num_tiles, 4], each with its first token in the
    flat batch, its number of queries, the first one's position, and the sequence.

    num_new_tokens, context_lens: int64 [num_seqs]. Tiles that see most keys come first: they take longest.
    """
    num_tiles = -(-num_new_tokens // QUERY_TILE)
    num_tiles[:num_decodes] = 0
    seq = np.repeat(np.arange(len(num_tiles)), num_tiles)
    first = (np.arange(len(seq)) - (np.cumsum(num_tiles) - num_tiles)[seq]) * QUERY_TILE
    token = (np.cumsum(num_new_tokens) - num_new_tokens)[seq] + first
    position = (context_lens - num_new_tokens)[seq] + first
    num_queries = np.minimum(num_new_tokens[seq] - first, QUERY_TILE)
    tiles = np.stack([token, num_queries, position, seq], 1).astype(np.int32)
    return tiles[np.argsort(-(position + num_queries), kind="stable")]


@dataclass
class DecodeInputs:
    """What a decode step works on, [num_rows] each: token_ids, positions, slots, slot_mapping, lengths and seeds in
    int64, context_lens in int32, temperatures in float32; block_tables: int32 [num_rows, max_blocks]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    slot_mapping: torch.Tensor
    lengths: torch.Tensor
    seeds: torch.Tensor
    context_lens: torch.Tensor
    temperatures: torch.Tensor
    block_tables: torch.Tensor
