"""Finds the first token, or else the first log-probability, in which two output rows differ."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from nanovllm import CompletionOutput

_TEXTS = ("token_ids", "text", "content")
# Values of a table that hold JSON, by their places. A row's data may have texts by the same names elsewhere.
_JSON = (("response",), ("prompt_logprobs",), ("outputs", "logprobs"))
_CHARACTERS = 40  # of a text that are shown

_Path = tuple[str | int, ...]


def first_difference(
    before: bytes, now: bytes, completions: Sequence[CompletionOutput], tokenizer: Any
) -> tuple[str, Any, Any]:
    """Where two rows of an output differ, and both values there: (place, before, now).

    A difference of tokens comes before one of log-probabilities, and that before all others.

    Args:
        before, now: the rows, as `rows_of` gives them.
        completions: those of `now`.
        tokenizer: transformers' tokenizer of the model, or None.
    """
    try:
        values = json.loads(before), json.loads(now)
    except ValueError:
        return "the row, which is not JSON", _shown(before), _shown(now)
    found = list(_leaves((), *values))
    if not found:  # the same values, written in another way
        return "the bytes of the row", _shown(before), _shown(now)
    path, old, new = min(found, key=lambda each: _rank(each[0]))
    # The numbers in a path are a completion's and a token's. A table also has the first completion's text by itself.
    number, token, *_ = [*(each for each in path if isinstance(each, int)), 0, 0]
    where, in_words = ".".join(map(str, path)), f"of completion {number + 1}"
    if _rank(path) == 0 and isinstance(old, str) and isinstance(new, str):
        start = next((place for place, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), -1)
        start = min(len(old), len(new)) if start < 0 else start
        if tokenizer is not None and number < len(completions):
            token_ids = completions[number].token_ids
            ends = range(1, len(token_ids) + 1)
            token = bisect_right(ends, start, key=lambda end: len(tokenizer.decode(token_ids[:end])))
            in_words = f"token {token + 1} {in_words}"
        else:
            in_words = f"character {start + 1} {in_words}"
        return f"{in_words} ({where})", old[start : start + _CHARACTERS], new[start : start + _CHARACTERS]
    if _rank(path) < 2:
        kind = "token" if _rank(path) == 0 else "the log-probability of token"
        return f"{kind} {token + 1} {in_words} ({where})", old, new
    return where, old, new


def _shown(row: bytes) -> str:
    return row[:_CHARACTERS].decode(errors="replace")


def _rank(path: _Path) -> int:
    """0 for tokens and texts, 1 for what a token's entry among log-probabilities holds, 2 for sums of them, 3 for all
    else."""
    if "prompt_logprobs" in path:
        return 3
    if any("logprob" in str(each) for each in path):
        return 2 if "cumulative_logprob" in path else 1
    return 0 if any(name in path for name in _TEXTS) else 3


def _leaves(path: _Path, old: Any, new: Any) -> Iterator[tuple[_Path, Any, Any]]:
    """The values that differ, with their places, in the row's order."""
    if old == new:
        return
    names = tuple(each for each in path if isinstance(each, str))
    if names in _JSON and isinstance(old, str) and isinstance(new, str):
        with suppress(ValueError):  # then the texts themselves differ
            old, new = json.loads(old), json.loads(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _leaves((*path, name), old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list):
        for number in range(max(len(old), len(new))):
            values = (each[number] if number < len(each) else None for each in (old, new))
            yield from _leaves((*path, number), *values)
    else:
        yield path, old, new
