"""A small choice of a grid's cases: the ones that a default run takes."""

from collections.abc import Sequence
from itertools import combinations

Case = tuple[int, ...]


def cover(cases: Sequence[Case], strength: int) -> set[int]:
    """The numbers of cases that together hold every combination of `strength` axes' values that the cases hold.

    cases: what tells values apart on each axis. Strength 2 is a pairwise cover. Each round takes the case that holds
    the most combinations that are still missing, the first of several.
    """
    if not cases:
        return set()
    strength = min(strength, len(cases[0]))
    held = [set(combinations(enumerate(case), strength)) for case in cases]
    missing = set().union(*held)
    chosen = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(held[number] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen
