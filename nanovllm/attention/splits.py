"""How the keys of a decode are split between the programs of a kernel. Only the length of its sequence matters."""

import numpy as np

from nanovllm.ops.kernel import jit, tl

# A sequence of up to _SHORT_SPLITS × SHORTEST_SPLIT keys has splits of SHORTEST_SPLIT keys. A longer one has splits
# of twice that, doubled further only to stay within _MAX_SPLITS. Short splits let few sequences occupy all processors.
# But each split costs a partial result, and long sequences have many.
SHORTEST_SPLIT = 256
_SHORT_SPLITS = tl.constexpr(4)
_MAX_SPLITS = tl.constexpr(32)


def split_lengths(context_lens: np.ndarray) -> np.ndarray:
    """Keys per split in sequences of `context_lens` keys: int64, the same shape."""
    lengths = np.where(context_lens > int(_SHORT_SPLITS) * SHORTEST_SPLIT, 2 * SHORTEST_SPLIT, SHORTEST_SPLIT)
    while (is_short := lengths * int(_MAX_SPLITS) < context_lens).any():
        lengths = np.where(is_short, 2 * lengths, lengths)
    return lengths


def max_num_splits(max_model_len: int) -> int:
    """Upper bound of the splits of a sequence of up to `max_model_len` keys."""
    in_short, in_long = (-(-max_model_len // (times * SHORTEST_SPLIT)) for times in (1, 2))
    return min(max(min(in_short, int(_SHORT_SPLITS)), in_long), int(_MAX_SPLITS))


@jit
def split_length_of(length, SHORTEST: tl.constexpr, LONGEST: tl.constexpr):
    """`split_lengths` on the device, for sequences whose splits have at most LONGEST keys."""
    split = tl.where(length > _SHORT_SPLITS * SHORTEST, 2 * SHORTEST, SHORTEST)
    for doublings in tl.static_range(2, 32):
        if SHORTEST * 2**doublings <= LONGEST:
            split = tl.where(length > split * _MAX_SPLITS, 2 * split, split)
    return split


@jit
def keys_of_item(
    item_rows, item_splits, context_lens, item, KEYS: tl.constexpr, WINDOW: tl.constexpr, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """The keys of an item of a DecodePlan: (row, split, first key, end of the keys, first key that the query sees).
    With a window, the first key is the first of a tile of KEYS, so some keys of that tile may be before the window."""
    row = tl.load(item_rows + item).to(tl.int64)
    split = tl.load(item_splits + item)
    length = tl.load(context_lens + row)
    split_length = split_length_of(length, SHORTEST, LONGEST)
    first = split * split_length
    last = tl.minimum(first + split_length, length)
    first_seen = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    if WINDOW:
        first = tl.maximum(first, first_seen // KEYS * KEYS)
    return row, split, first, last, first_seen
