"""Constraints, which say which tokens may come next in a completion under structured outputs.

A constraint follows one completion and writes masks on the host. A choice is our own trie of token ids; all other
constraints are matchers of llguidance, which is optional and imported when first needed.
"""

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

# Waking llguidance's threads takes 0.1 ms. One thread fills about this many masks in that time.
_MIN_IN_PARALLEL = 16
# Another matcher is compiled once this many copies of one matcher are in use.
_COPIES_OF_ONE = 8
# The number of llguidance's threads: a share of the CPUs, and a maximum. Both are llguidance's own defaults.
_SHARE_OF_CPUS, _MAX_THREADS = 0.8, 32
# llguidance's complaints -> what to do instead.
_ADVICE = {
    "look-around": "write out what may come, or exclude texts in a grammar: TEXT: /[a-z]+/ & ~/.*no.*/",
    "backreferences": "write out the texts that may come twice",
    "word boundaries": "write out the characters beside the word",
    "unrecognized": "the syntax is that of Rust's regex",
    "Unimplemented keys": "leave them out, and check them in the completions",
    "oneOf": "give the alternatives a required property with different constants, or write anyOf",
}
# How it shows a mistake in a regular expression: the expression, a mark under the mistake, and the complaint.
_MISTAKE = re.compile(r"regex parse error:\n    (.*)\n    ( *\^+).*\nerror: (.*)")


class Constraint(Protocol):
    """Follows one completion. A mask is int32 [ceil(vocab_size / 32)], contiguous: bit `id & 31` of word `id >> 5` says
    whether the id may come next, as in `ops.process_logits.pack_allowed`."""

    def advance(self, token_id: int) -> bool:
        """Takes the token that was generated next.

        Returns:
            Whether the completion is complete: it was an end-of-sequence token, or nothing else could follow.

        Raises:
            ValueError: the token was not allowed, or llguidance reached one of its limits; the completion cannot go on.
        """
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Writes the mask of the next token, which always allows some id. For a complete completion it allows only the
        end-of-sequence ids.

        Raises:
            ValueError: no token can come next, or llguidance reached one of its limits; the completion cannot go on.
        """
        ...


class FillError(ValueError):
    """Some masks could not be filled. They allow the end-of-sequence ids; all other masks are filled.

    reasons: {index of the constraint: why}.
    """

    def __init__(self, reasons: dict[int, str]):
        super().__init__("; ".join(f"{index}: {reason}" for index, reason in reasons.items()))
        self.reasons = reasons


def fill_masks(constraints: Sequence[Constraint], masks: np.ndarray) -> None:
    """Fills the masks of many constraints at once. No constraint may be in the list twice.

    Args:
        masks: int32 [len(constraints), ceil(vocab_size / 32)], contiguous.

    Raises:
        FillError: some could not be filled; all others are.
    """
    grammars = [(row, each) for row, each in enumerate(constraints) if isinstance(each, Grammar)]
    if is_parallel := len(grammars) >= _MIN_IN_PARALLEL:
        from llguidance.numpy import fill_next_token_bitmask_par

        # Each thread takes neighbours in the list, and threads with copies of the same matcher wait for each other.
        grammars.sort(key=lambda each: each[1].group)
        fill_next_token_bitmask_par(_executor(), [(each.matcher, row) for row, each in grammars], masks)
    reasons = {}
    for row, constraint in enumerate(constraints):
        try:
            if is_parallel and isinstance(constraint, Grammar):
                constraint.finish(masks[row])
            else:
                constraint.fill(masks[row])
        except ValueError as error:
            reasons[row] = str(error)
    if reasons:
        raise FillError(reasons)


@lru_cache(maxsize=1)
def _executor() -> Any:
    """llguidance's threads."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=_num_threads())


@lru_cache(maxsize=1)
def _num_threads() -> int:
    from nanovllm.machine import cpus  # imports torch

    return max(1, min(int(_SHARE_OF_CPUS * len(cpus())), _MAX_THREADS))


# A trie's node: the ids that may come next, each with its child node. At the end of a choice, _END maps to it.
Node = dict[int, Any]
_END = -1


class Choice:
    """A Constraint that walks down a trie. If a choice begins another, an end-of-sequence id ends the shorter one."""

    def __init__(self, root: Node, eos_token_ids: Collection[int]):
        self._node = root
        self._eos_token_ids = eos_token_ids

    @staticmethod
    def trie(choices: list[tuple[list[int], str]], can_end: bool) -> Node:
        """The root of the trie of some choices, each with its token ids.

        Args:
            can_end: whether there are end-of-sequence ids.

        Raises:
            ValueError: two choices have the same tokens, or one begins another and could not end.
        """
        root: Node = {}
        for token_ids, choice in sorted(choices):
            node = root
            for token_id in token_ids:
                if _END in node and not can_end:
                    raise ValueError(
                        f"{node[_END]!r} begins {choice!r}, and the model has no end-of-sequence token; change a choice"
                    )
                node = node.setdefault(token_id, {})
            if _END in node:
                raise ValueError(f"choices {node[_END]!r} and {choice!r} have the same tokens; leave one out")
            node[_END] = choice
        return root

    def advance(self, token_id: int) -> bool:
        if _END in self._node and token_id in self._eos_token_ids:
            self._node = {_END: self._node[_END]}
        elif token_id in self._node:
            self._node = self._node[token_id]
        else:
            raise ValueError(f"token {token_id} continues none of the choices")
        return self._node.keys() == {_END}

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        allow(mask, self._node.keys() - {_END})
        allow(mask, self._eos_token_ids if _END in self._node else ())


def allow(mask: np.ndarray, token_ids: Collection[int]) -> None:
    """Allows the ids in a mask."""
    ids = np.fromiter(token_ids, np.int32)
    np.bitwise_or.at(mask, ids >> 5, np.left_shift(np.int32(1), ids & 31))


class Grammar:
    """A Constraint around llguidance's LLMatcher, of which this is the only user.

    Copies of a matcher share the limits of its lexer. So if a copy fails, a newly compiled matcher takes its tokens
    again. If that fails too, the completion cannot go on.

    Args:
        matcher: the matcher, at the beginning of a completion.
        group: a number that copies of the same matcher have in common.
        compile: makes another matcher; None if the matcher shares nothing.
    """

    def __init__(self, matcher: Any, group: int = 0, compile: Callable[[], Any] | None = None):
        self.matcher, self.group, self._compile = matcher, group, compile
        self._token_ids: list[int] = []

    def advance(self, token_id: int) -> bool:
        self._token_ids.append(token_id)
        self.matcher.consume_token(token_id)
        self._check()
        return self.matcher.is_stopped()

    def fill(self, mask: np.ndarray) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self.matcher, mask[None])
        self.finish(mask)

    def finish(self, mask: np.ndarray) -> None:
        """Checks a mask that llguidance has filled; if another matcher took the failed one's place, fills it again."""
        if self._check():
            self.fill(mask)

    def _check(self) -> bool:
        """Raises the error that the matcher has stored, if there is one. Its masks then allow only the end. Returns
        whether another matcher took its place."""
        if not self.matcher.is_error():
            return False
        if self._compile is None:
            raise ValueError(in_one_line(self.matcher.get_error()))
        self.matcher, self._compile = self._compile(), None
        self.matcher.consume_tokens(self._token_ids)
        self._check()
        return True


class GrammarCopies:
    """Makes constraints of one grammar.

    A copy of a matcher takes microseconds and shares the lexer's states with it, behind a lock. So threads that fill
    masks of copies of one matcher are slower than one thread. Many constraints are therefore copies of several
    matchers, one or two for each thread: llguidance halves the list of matchers until every thread has a part.

    Args:
        compile: makes a matcher, in half a millisecond for a small schema.
    """

    def __init__(self, compile: Callable[[], Any]):
        self._compile = compile
        self._groups: list[tuple[Any, WeakSet[Grammar]]] = [(compile(), WeakSet())]

    def __call__(self) -> Grammar:
        group = min(range(len(self._groups)), key=lambda index: len(self._groups[index][1]))
        max_num_groups = 1 << (_num_threads() - 1).bit_length()
        if len(self._groups[group][1]) >= _COPIES_OF_ONE and len(self._groups) < max_num_groups:
            group = len(self._groups)
            self._groups.append((self._compile(), WeakSet()))
        matcher, in_use = self._groups[group]
        constraint = Grammar(matcher.deep_copy(), group, self._compile)
        in_use.add(constraint)
        return constraint


def in_one_line(error: object) -> str:
    """llguidance's reason in one line, with advice, and without the parser's state, which follows it in tags."""
    text = str(error).split("\n<")[0]
    if "NoExtensionBias" in text:
        return "no token can come next"
    if found := _MISTAKE.search(text):
        text = f"{found[3]}: {found[1][: len(found[2])][-80:]}"
    elif found := re.search(r"lookarounds not supported yet; (\w+)", text):
        text = "word boundaries (\\b, \\B) are not supported" if "Word" in found[1] else "^ must be first and $ last"
    reason = " ".join(text.split())
    reason = reason if len(reason) <= 300 else reason[:300] + "…"
    advice = next((advice for complaint, advice in _ADVICE.items() if complaint in reason), None)
    return f"{reason}; {advice}" if advice and advice not in reason else reason
