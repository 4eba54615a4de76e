"""Which cases of a test a default run takes; `pytest --long` takes all."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def long(*values: Any) -> ParameterSet:
    """A case of `parametrize` that runs with --long alone."""
    return pytest.param(*values, marks=pytest.mark.long)


def some(cases: Iterable[Any], *default: Any) -> list[Any]:
    """Cases of one value each; a default run takes those of `default`."""
    cases = list(cases)
    assert all(case in cases for case in default)
    return [case if case in default else long(case) for case in cases]


def cover(cases: Sequence[tuple[int, ...]], strength: int) -> set[int]:
    """The numbers of cases that together hold every combination of `strength` axes' values that the cases hold.

    cases: for each case, a key of its value on each axis. Strength 2 is a pairwise cover. Each round takes the case
    that holds the most combinations that are still missing, the first of several.
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
