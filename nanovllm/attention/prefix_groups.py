"""Finds the decodes that share their first keys, so that attention reads those once for all of them.

A row's keys are split at multiples of its split length. Rows with the same split length share a split if they share its
blocks and every split before it. Sharing a block does not prove sharing those before it: a row may hold an equal copy
of one of them.
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
    block_tables: list[list[int]], context_lens: list[int], block_size: int, split_lengths: list[int], most_members: int
) -> PrefixGroups | None:
    """The groups among decodes with these block tables; None if nothing is shared.

    Args:
        split_lengths: of each row, how many keys a split has; multiples of block_size.
        most_members: rows of one item.
    """
    # A prefix is known by the prefix before it (-1: none) and its own last split's blocks.
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    rows_of_prefix: list[list[int]] = []
    splits: list[int] = []  # of each prefix, which split its last one is
    rows = zip(block_tables, context_lens, split_lengths, strict=True)
    for row, (table, length, split_length) in enumerate(rows):
        number, blocks_per_split = -1, split_length // block_size
        # Only whole splits: a row still writes to its last block.
        for index in range(length // split_length):
            blocks = tuple(table[index * blocks_per_split : (index + 1) * blocks_per_split])
            number = numbers.setdefault((number, blocks), len(numbers))
            if number == len(rows_of_prefix):
                rows_of_prefix.append([])
                splits.append(index)
            rows_of_prefix[number].append(row)
    items: list[tuple[int, int, int]] = []
    members: list[int] = []
    num_shared = np.zeros(len(block_tables), np.int32)
    for index, sharers in zip(splits, rows_of_prefix, strict=True):
        if len(sharers) < 2:
            continue
        num_shared[sharers] = np.maximum(num_shared[sharers], index + 1)
        for first in range(0, len(sharers), most_members):
            part = sharers[first : first + most_members]
            items.append((index, len(members), len(part)))
            members += part
    if not items:
        return None
    return PrefixGroups(np.array(items, np.int32), np.array(members, np.int32), num_shared)
