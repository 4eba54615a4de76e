"""Finds the decodes that share their first keys, so that attention reads those once for all of them.

Keys are split at multiples of a fixed length. A split whose last block stands in several block tables is the same
for all of them, since a block is only ever shared together with everything before it.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class PrefixGroups:
    """Shared splits, each with the rows that share it, at most as many as one tile of queries holds.

    items: int32 [num_items, 3], the split, where its members begin and how many they are.
    members: int32 [Σ members], rows of the decode batch.
    num_shared: int32 [num_rows], leading splits of each row that are in `items`.
    """

    items: np.ndarray
    members: np.ndarray
    num_shared: np.ndarray


def find_prefix_groups(
    block_tables: list[list[int]], context_lens: list[int], block_size: int, split: int, most_members: int
) -> PrefixGroups | None:
    """The groups among decodes with these block tables; None if nothing is shared.

    Args:
        split: keys in a split, a multiple of block_size.
        most_members: rows of one item.
    """
    blocks_per_split = split // block_size
    rows_of_block: dict[int, list[int]] = {}  # last block of a split -> rows that have it
    split_of_block: dict[int, int] = {}
    for row, (table, length) in enumerate(zip(block_tables, context_lens, strict=True)):
        # Only whole splits: a row still writes to its last block.
        for index, block in enumerate(table[blocks_per_split - 1 : length // block_size : blocks_per_split]):
            if block in rows_of_block:
                rows_of_block[block].append(row)
            else:
                rows_of_block[block] = [row]
                split_of_block[block] = index
    items, members, num_shared = [], [], np.zeros(len(block_tables), np.int32)
    for block, rows in rows_of_block.items():
        if len(rows) < 2:
            continue
        index = split_of_block[block]
        num_shared[rows] = np.maximum(num_shared[rows], index + 1)
        for first in range(0, len(rows), most_members):
            part = rows[first : first + most_members]
            items.append((index, len(members), len(part)))
            members += part
    if not items:
        return None
    return PrefixGroups(np.array(items, np.int32), np.array(members, np.int32), num_shared)
