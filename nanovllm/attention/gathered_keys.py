"""How SDPAAttention lays out the gathered keys of decodes, and when a step may reuse those of the last step."""

from dataclasses import dataclass, field

import numpy as np
import torch

# A bucket is closed when the next sequence is shorter than this part of the bucket's longest. Padding costs memory
# traffic, another bucket costs a few small operations per layer.
_SHORTEST_IN_BUCKET = 0.5
_SMALLEST_BUCKET = 16
# Gathered keys are kept while at least this part of their sequences still runs. Keys of finished sequences are read for
# nothing.
_MIN_STILL_RUNNING = 0.75


@dataclass
class Bucket:
    """Decodes of similar context length, laid out [size, num_kv_heads, capacity, head_dim].

    first, size: the places of these decodes; first_row, num_rows: their rows of the gathered keys [num_rows, head_dim].
    """

    first: int
    size: int
    capacity: int
    first_row: int
    num_rows: int


@dataclass
class Gathered:
    """Decodes side by side. Each has a place; the longest context comes first.

    place_of: the place of each sequence, by its tenant (see AttentionMetadata).
    lengths: int64 [num_places], number of keys of each sequence; for a finished one, the number at its end.
    capacities: int64 [num_places], number of keys that each has room for.
    first_rows: int64 [num_places], first row of each sequence's first key/value head.
    layers: address of a layer's keys in the cache -> its gathered keys and values, each [num_rows, head_dim].
    """

    place_of: dict[tuple[int, int], int]
    lengths: np.ndarray
    capacities: np.ndarray
    first_rows: np.ndarray
    buckets: list[Bucket]
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def kept_places(kept: Gathered | None, names: list[tuple[int, int]] | None, lengths: np.ndarray) -> np.ndarray | None:
    """int64 [num_decodes], the places of these decodes among the keys that the last step gathered. None unless each of
    them has one key more than in that step, and room for it.

    names: the decodes' tenants, or None if they are not known.
    """
    if kept is None or names is None or len(names) < _MIN_STILL_RUNNING * len(kept.lengths):
        return None
    if any(name not in kept.place_of for name in names):
        return None
    places = np.array([kept.place_of[name] for name in names])
    fits = (kept.lengths[places] + 1 == lengths) & (lengths <= kept.capacities[places])
    return places if fits.all() else None


def lay_out(
    lengths: np.ndarray,
    first_seen: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    num_kv_heads: int,
    has_room: bool,
) -> tuple[Gathered, np.ndarray]:
    """Buckets for decodes, and the rows of the cache to gather into them.

    Args:
        lengths: int64 [num_decodes], their context lengths, longest first.
        first_seen: int64 [num_decodes], the first key that each sees.
        tables: int64 [num_decodes, max_blocks], their block tables.
        has_room: whether each gets room for the keys of later steps.
    """
    buckets, source_rows, first_rows, capacities, first, first_row = [], [], [], [], 0, 0
    while first < len(lengths):
        longest = int(lengths[first])
        num_similar = int(np.count_nonzero(lengths[first:] >= _SHORTEST_IN_BUCKET * longest))
        size = min(max(num_similar, _SMALLEST_BUCKET), len(lengths) - first)
        capacity = longest + has_room * (longest // 4 + 16)
        buckets.append(Bucket(first, size, capacity, first_row, size * num_kv_heads * capacity))
        of_bucket = slice(first, first + size)
        slots = slots_of_positions(
            tables[of_bucket], lengths[of_bucket], np.arange(capacity), block_size, first_seen[of_bucket]
        )
        source_rows.append((slots[:, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]).ravel())
        first_rows.append(first_row + num_kv_heads * capacity * np.arange(size))
        capacities.append(np.full(size, capacity))
        first, first_row = first + size, first_row + buckets[-1].num_rows
    gathered = Gathered({}, lengths, np.concatenate(capacities), np.concatenate(first_rows), buckets)
    return gathered, np.concatenate(source_rows)


def slots_of_positions(
    tables: np.ndarray, lengths: np.ndarray, position: np.ndarray, block_size: int, first_seen: np.ndarray
) -> np.ndarray:
    """Slots of the sequences' keys at these positions: int64 [num_seqs, num_positions].

    Padding and keys before `first_seen` repeat the sequence's own last key. The slot of another sequence might hold a
    NaN, which a mask does not stop.
    """
    last = lengths[:, None] - 1
    position = np.where((position >= first_seen[:, None]) & (position <= last), position, last)
    return np.take_along_axis(tables, position // block_size, 1) * block_size + position % block_size
