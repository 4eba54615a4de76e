"""Makes completions follow structured outputs: which tokens may come next in one.

Nothing here touches a device. A constraint follows one completion and writes masks on the host. Choices are our own
tries of token ids; everything else is llguidance's, which is optional and imported when first needed.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from nanovllm.structured_outputs import StructuredOutputsParams

# Compiled grammars that are kept, of one model. With 49,152 ids a used one had 0.2 MB.
_MAX_COMPILED = 256
# Waking llguidance's threads takes 0.1 ms, in which one thread fills about as many masks as these.
_MIN_IN_PARALLEL = 16
# Copies of one matcher that are in use before another is compiled.
_COPIES_OF_ONE = 8
# Of llguidance's threads: that share of the CPUs, and at most so many, which are its own defaults.
_SHARE_OF_CPUS, _MAX_THREADS = 0.8, 32
# Characters of one to four UTF-8 bytes, some after a space.
_SAMPLE = '{"a": [1, "é к 字 🙂"]}'
_INSTALL = 'needs llguidance: pip install llguidance, or nanovllm with its extra "structured"'


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
        """Writes the mask of the next token. It always allows something. For a complete completion it allows only the
        end-of-sequence ids.

        Raises:
            ValueError: no token can come next, or llguidance reached one of its limits; the completion cannot go on.
        """
        ...


class FillError(ValueError):
    """Some masks could not be filled.

    reasons: {index of the constraint: why}. The other masks are filled; those of these have the end-of-sequence ids.
    """

    def __init__(self, reasons: dict[int, str]):
        super().__init__("; ".join(f"{index}: {reason}" for index, reason in reasons.items()))
        self.reasons = reasons


def fill_masks(constraints: Sequence[Constraint], masks: np.ndarray) -> None:
    """Fills the masks of many constraints at once. No constraint may stand twice in the list.

    Args:
        masks: int32 [len(constraints), ceil(vocab_size / 32)], contiguous.

    Raises:
        FillError: some could not be filled; all others are.
    """
    grammars = [(row, each) for row, each in enumerate(constraints) if isinstance(each, _Grammar)]
    if is_parallel := len(grammars) >= _MIN_IN_PARALLEL:
        from llguidance.numpy import fill_next_token_bitmask_par

        # A thread takes neighbours, and threads that have copies of one matcher wait for each other.
        grammars.sort(key=lambda each: each[1].group)
        fill_next_token_bitmask_par(_executor(), [(each.matcher, row) for row, each in grammars], masks)
    reasons = {}
    for row, constraint in enumerate(constraints):
        try:
            if is_parallel and isinstance(constraint, _Grammar):
                constraint.check()
            else:
                constraint.fill(masks[row])
        except ValueError as error:
            reasons[row] = str(error)
    if reasons:
        raise FillError(reasons)


class Guide:
    """A TokenGuide of one completion; it keeps the reason why it cannot go on.

    Args:
        constraint: of the completion.
        stops: another stop predicate of the completion, or None.
    """

    def __init__(self, constraint: Constraint, stops: Callable[[int], bool] | None = None):
        self.constraint, self.stops = constraint, stops
        self._error: ValueError | None = None

    @property
    def error(self) -> ValueError | None:
        return self._error or getattr(self.stops, "error", None)

    def __call__(self, token_id: int) -> bool:
        is_stopped = self.stops is not None and self.stops(token_id)
        if self._error is not None:  # its mask had failed
            return True
        try:
            return self.constraint.advance(token_id) or is_stopped
        except ValueError as error:
            self._fail(str(error))
            return True

    @staticmethod
    def fill_masks(guides: "Sequence[Guide]", masks: np.ndarray) -> None:
        """A guide whose mask cannot be filled ends its completion with the next token, and keeps the reason."""
        try:
            fill_masks([guide.constraint for guide in guides], masks)
        except FillError as error:
            for index, reason in error.reasons.items():
                guides[index]._fail(reason)

    def _fail(self, reason: str) -> None:
        self._error = ValueError(f"the structured output cannot go on: {reason}")


@lru_cache(maxsize=1)
def _executor() -> Any:
    """llguidance's threads."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=_num_threads())


@lru_cache(maxsize=1)
def _num_threads() -> int:
    from nanovllm.machine import cpus  # imports torch

    return max(1, min(int(_SHARE_OF_CPUS * len(cpus())), _MAX_THREADS))


# A trie's node: the ids that may come next, each with the node behind it. A node without any is the end of a choice.
_Node = dict[int, Any]


class _Choice:
    """A Constraint that walks down a trie."""

    def __init__(self, root: _Node, eos_token_ids: Collection[int]):
        self._node = root
        self._eos_token_ids = eos_token_ids

    def advance(self, token_id: int) -> bool:
        if not self._node and token_id in self._eos_token_ids:
            return True
        if token_id not in self._node:
            raise ValueError(f"token {token_id} continues none of the choices")
        self._node = self._node[token_id]
        return not self._node

    def fill(self, mask: np.ndarray) -> None:
        ids = np.fromiter(self._node or self._eos_token_ids, np.int32)
        mask[:] = 0
        np.bitwise_or.at(mask, ids >> 5, np.left_shift(np.int32(1), ids & 31))


class _Grammar:
    """A Constraint around llguidance's LLMatcher, of which this is the only user.

    group: a number that copies of the same matcher have in common.
    """

    def __init__(self, matcher: Any, group: int = 0):
        self.matcher, self.group = matcher, group

    def advance(self, token_id: int) -> bool:
        self.matcher.consume_token(token_id)
        self.check()
        return self.matcher.is_stopped()

    def fill(self, mask: np.ndarray) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self.matcher, mask[None])
        self.check()

    def check(self) -> None:
        """Raises what the matcher only notes; it never leaves such a state, and its masks allow the end then."""
        if self.matcher.is_error():
            raise ValueError(_reason(self.matcher.get_error()))


class _Copies:
    """Makes constraints of one grammar.

    A copy of a matcher takes microseconds and shares, behind a lock, what the lexer has learnt. Threads that fill masks
    of copies of one matcher are slower than one thread. So many constraints are copies of several matchers, one or two
    for each thread: llguidance halves the list of matchers until every thread has a part.

    Args:
        compile: makes a matcher, in half a millisecond for a small schema.
    """

    def __init__(self, compile: Callable[[], Any]):
        self._compile = compile
        self._groups: list[tuple[Any, WeakSet[_Grammar]]] = [(compile(), WeakSet())]

    def __call__(self) -> _Grammar:
        group = min(range(len(self._groups)), key=lambda index: len(self._groups[index][1]))
        max_num_groups = 1 << (_num_threads() - 1).bit_length()
        if len(self._groups[group][1]) >= _COPIES_OF_ONE and len(self._groups) < max_num_groups:
            group = len(self._groups)
            self._groups.append((self._compile(), WeakSet()))
        matcher, in_use = self._groups[group]
        constraint = _Grammar(matcher.deep_copy(), group)
        in_use.add(constraint)
        return constraint


def _reason(error: object) -> str:
    """llguidance's reason in one line, without the parser's state, which follows it in tags."""
    text = str(error).split("\n<")[0]
    reason = " ".join(text.split())
    if "NoExtensionBias" in reason:
        return "no token can come next"
    if len(reason) > 300 and (found := re.search(r"^error: (.*)$", text, re.MULTILINE)):
        return found[1]  # what stands before it repeats the regex
    return reason if len(reason) <= 300 else reason[:300] + "…"


def _grammar_of(params: StructuredOutputsParams) -> tuple[str, Callable[[], str]]:
    """The name of what is given, and a function that makes llguidance's grammar of it."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return "regex", partial(LLMatcher.grammar_from_regex, params.regex)
    if params.grammar is not None:
        return "grammar", partial(grammar_from, "grammar", params.grammar)
    name, schema = ("json_object", '{"type":"object"}') if params.json is None else ("json", params.json)
    defaults: Any = {"whitespace_flexible": not params.disable_any_whitespace}
    return name, partial(LLMatcher.grammar_from_json_schema, schema, defaults=defaults)


class StructuredOutputs:
    """Makes the constraints of one model's completions.

    Args:
        tokenizer: transformers' tokenizer of the model, or None.
        vocab_size: of the model's logits; may be larger than the tokenizer's.
        eos_token_ids: the ids that end a completion. Those that the tokenizer lacks are left out.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._all_eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        # Many rows have the same parameters.
        self._compiled = lru_cache(maxsize=_MAX_COMPILED)(self._compile)

    def constraint(self, params: StructuredOutputsParams) -> Constraint:
        """A constraint for one completion, which begins with it.

        Raises:
            ValueError: there is no tokenizer or none that llguidance can read, llguidance is not installed or cannot
                compile the parameters, or the tokenizer cannot spell a choice.
        """
        return self._compiled(params)()

    def _compile(self, params: StructuredOutputsParams) -> Callable[[], Constraint]:
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer, which structured outputs need; give LLM(tokenizer=…) one")
        if params.choice is not None:
            root = self._trie(params.choice)
            return lambda: _Choice(root, self._eos_token_ids)
        return _Copies(lambda: self._matcher(params))

    @cached_property
    def _eos_token_ids(self) -> list[int]:
        known = set(self._tokenizer.get_vocab().values())
        return [token_id for token_id in self._all_eos_token_ids if token_id in known and token_id < self._vocab_size]

    def _trie(self, choices: Sequence[str]) -> _Node:
        spelled = sorted((self._spelled(choice), choice) for choice in choices)
        for (token_ids, choice), (longer, other) in pairwise(spelled):
            if longer[: len(token_ids)] == token_ids:
                raise ValueError(
                    f"the tokens of choice {choice!r} are a prefix of those of choice {other!r}; change one of them"
                )
        root: _Node = {}
        for token_ids, _ in spelled:
            node = root
            for token_id in token_ids:
                node = node.setdefault(token_id, {})
        return root

    def _spelled(self, choice: str) -> list[int]:
        """A choice's token ids; a ValueError if they do not say the choice."""
        try:
            token_ids = self._tokenizer(choice, add_special_tokens=False, verbose=False)["input_ids"]
            # Skipped, as in most outputs: a special token would leave nothing of its choice.
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except Exception as error:  # tokenizers raise what they like
            raise ValueError(f"choice {choice!r} cannot be tokenized: {error}") from error
        # SentencePiece adds and strips a leading space.
        if text not in (choice, " " + choice) and " " + text != choice:
            raise ValueError(f"the tokenizer cannot spell choice {choice!r}: its tokens say {text!r}")
        if not token_ids:
            raise ValueError(f"the tokenizer has no tokens for choice {choice!r}")
        if max(token_ids) >= self._vocab_size:
            raise ValueError(
                f"choice {choice!r} has token {max(token_ids)}, but the model has only {self._vocab_size} token ids"
            )
        return token_ids

    def _matcher(self, params: StructuredOutputsParams) -> Any:
        """An LLMatcher at the beginning of a completion."""
        tokenizer = self._llguidance_tokenizer
        from llguidance import LLMatcher

        name, make_grammar = _grammar_of(params)
        try:
            matcher = LLMatcher(tokenizer, make_grammar(), log_level=0)
            # The first mask tells whether there is a first token at all; copies then need not compute it anew.
            _Grammar(matcher).fill(np.empty(-(-self._vocab_size // 32), np.int32))
        except Exception as error:  # a RecursionError of a deep schema too
            raise ValueError(f"{name} cannot be compiled: {_reason(error)}") from None
        return matcher

    @cached_property
    def _llguidance_tokenizer(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(f"any structured output but choice {_INSTALL}") from error
        if not self._eos_token_ids:
            raise ValueError(
                "the model has no end-of-sequence token, with which structured outputs end; choice works without one"
            )
        try:
            described = _described(self._tokenizer)
            tokenizer = LLTokenizer(described, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            self._check_spelling(tokenizer)
        except Exception as error:
            raise ValueError(f"llguidance cannot read the model's tokenizer: {_reason(error)}") from error
        return tokenizer

    def _check_spelling(self, tokenizer: Any) -> None:
        """Raises a ValueError if llguidance reads tokens as the wrong bytes. Its masks would then allow what the
        grammar forbids."""
        token_ids = self._tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
        token_ids = [token_id for token_id in token_ids if token_id not in self._tokenizer.all_special_ids]
        spelled = tokenizer.decode_bytes(token_ids).decode(errors="replace")
        meant = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        if spelled.removeprefix(" ") != meant.removeprefix(" "):  # SentencePiece adds and strips a leading space
            raise ValueError(f"it reads the tokens of {meant!r} as {spelled!r}")


def _described(tokenizer: Any) -> str:
    """The tokenizer as JSON, changed so that llguidance reads it right. Of several decoders, llguidance obeys the first
    that maps tokens to bytes. Tokenizers made from GGUF files have ByteFallback before ByteLevel, but ByteLevel is the
    right one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it is not a fast tokenizer (one of the library tokenizers)")
    described = json.loads(backend.to_str())
    described["padding"] = described["truncation"] = None
    for decoder in (described["decoder"] or {}).get("decoders", []):
        if decoder["type"] == "ByteLevel":
            described["decoder"] = decoder
    return json.dumps(described)
