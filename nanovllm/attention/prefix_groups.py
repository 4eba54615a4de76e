"""Finds the decodes that share their first keys, so that attention reads those once for all of them.

A row's keys are split at multiples of its split length. Rows with the same split length share a split if they share its
blocks and every split before it. Rows that share a block do not always share those before it: one of them may hold an
equal copy of an earlier block.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class PrefixGroups:
    """Items. An item is a shared split and rows that share it, at most as many rows as one tile of queries holds.

    items: int32 [num_items, 3], number of the split in its rows, index of its first member, number of members.
    members: int32 [Σ members], rows of the decode batch.
    num_shared: int32 [num_rows], leading splits of each row that are in `items`.
    """

    items: np.ndarray
    members: np.ndarray
    num_shared: np.ndarray


def find_prefix_groups(
    block_tables: np.ndarray, context_lens: np.ndarray, block_size: int, split_lengths: np.ndarray, max_num_members: int
) -> PrefixGroups | None:
    """The groups among decodes; None if nothing is shared.

    Args:
        block_tables: int [num_rows, ≥ blocks of the longest row].
        context_lens: int [num_rows], number of keys of each row.
        split_lengths: int [num_rows], number of keys of each split of the row; multiples of block_size.
        max_num_members: upper bound of the rows of one item.
    """
    items: list[tuple[int, int, int]] = []
    members: list[np.ndarray] = []
    num_members = 0
    num_shared = np.zeros(len(block_tables), np.int32)
    for split_length in np.unique(split_lengths).tolist():
        blocks_per_split = split_length // block_size
        # Only whole splits: a row still writes to its last block.
        num_splits = np.where(split_lengths == split_length, context_lens // split_length, 0)
        # A prefix is identified by the prefix before its last split and the blocks of that split.
        rows, index = np.flatnonzero(num_splits > 0), 0
        prefixes = np.zeros(len(rows), np.int64)
        while len(rows) > 1:
            blocks = block_tables[rows, index * blocks_per_split : (index + 1) * blocks_per_split]
            order, sizes = _equal_rows(np.column_stack((prefixes, blocks)))
            is_shared = np.repeat(sizes > 1, sizes)
            rows, sizes = rows[order[is_shared]], sizes[sizes > 1]
            num_shared[rows] = index + 1
            for size in sizes.tolist():
                for first in range(0, size, max_num_members):
                    items.append((index, num_members + first, min(max_num_members, size - first)))
                num_members += size
            members.append(rows)
            index += 1
            prefixes = np.repeat(np.arange(len(sizes)), sizes)
            goes_on = num_splits[rows] > index
            rows, prefixes = rows[goes_on], prefixes[goes_on]
    if not items:
        return None
    return PrefixGroups(np.array(items, np.int32), np.concatenate(members).astype(np.int32), num_shared)


def _equal_rows(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """numbers: int [num_rows, n] -> indices of the rows, equal ones next to each other, and the size of each set of
    equal rows."""
    order = np.lexsort(numbers.T)
    ordered = numbers[order]
    starts = np.flatnonzero(np.append(True, (ordered[1:] != ordered[:-1]).any(1)))
    return order, np.diff(np.append(starts, len(numbers)))
