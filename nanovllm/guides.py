"""Makes completions follow structured outputs. Nothing here touches a device, and llguidance is optional."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from nanovllm.constraints import Choice, Constraint, FillError, Grammar, GrammarCopies, allow, fill_masks, in_one_line
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams

# Maximum number of compiled grammars that are kept per model. With 49,152 token ids, a grammar in use took 0.2 MB.
_MAX_COMPILED = 256
# Characters of one to four UTF-8 bytes, some after a space.
_SAMPLE = '{"a": [1, "é к 字 🙂"]}'
_MISSING = (
    'any structured output but choice needs llguidance: pip install llguidance, or nanovllm with its extra "structured"'
)


class Guide:
    """A TokenGuide of one completion; it keeps the reason why the completion cannot go on.

    Args:
        constraint: says which tokens may come next.
        stops: another stop predicate of the completion, or None.
        min_tokens: until this many tokens are generated, ids that end the completion are banned, unless the constraint
            allows no others: a completion that breaks its form would be worse than a short one.
        end_token_ids: the ids that end the completion.
    """

    def __init__(
        self, constraint: Constraint, stops: Callable[[int], bool] | None = None, min_tokens: int = 0,
        end_token_ids: Collection[int] = (),
    ):  # fmt: skip
        self.constraint, self.stops = constraint, stops
        self._num_tokens_wanted, self._end_token_ids = min_tokens, end_token_ids
        self._error: ValueError | None = None

    @property
    def error(self) -> ValueError | None:
        return self._error or getattr(self.stops, "error", None)

    def __call__(self, token_id: int) -> bool:
        self._num_tokens_wanted -= 1
        is_stopped = self.stops is not None and self.stops(token_id)
        if self._error is not None:  # its mask could not be filled
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
        for index, guide in enumerate(guides):
            if guide._num_tokens_wanted > 0:
                guide._ban_ends(masks[index])

    def _ban_ends(self, mask: np.ndarray) -> None:
        ends = np.zeros_like(mask)
        allow(ends, self._end_token_ids)
        if (mask & ~ends).any():
            mask &= ~ends

    def _fail(self, reason: str) -> None:
        self._error = ValueError(f"the structured output cannot go on: {reason}")


def _grammar_of(params: StructuredOutputsParams) -> tuple[str, Callable[[], str]]:
    """The name of the parameter that is given, and a function that makes llguidance's grammar of it."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return "regex", partial(LLMatcher.grammar_from_regex, params.regex)
    if params.grammar is not None:
        return "grammar", partial(grammar_from, "grammar", params.grammar)
    name, schema = ("json_object", '{"type":"object"}') if params.json is None else ("json", params.json)
    # Lenient: llguidance warns of parts that it cannot follow. `_matcher` turns most warnings into errors.
    defaults: Any = {"lenient": True, "whitespace_flexible": not params.disable_any_whitespace}
    defaults["whitespace_pattern"] = params.whitespace_pattern
    return name, partial(LLMatcher.grammar_from_json_schema, schema, defaults=defaults)


def check_installed(params: Iterable[Any]) -> None:
    """Raises an ImportError if one of these SamplingParams needs llguidance, and it is not installed."""
    wanted = [each.structured_outputs for each in params if getattr(each, "structured_outputs", None) is not None]
    if any(each.choice is None for each in wanted) and find_spec("llguidance") is None:
        raise ImportError(_MISSING)


class StructuredOutputs:
    """Makes the constraints of one model's completions.

    Args:
        tokenizer: transformers' tokenizer of the model, or None.
        vocab_size: the width of the model's logits; may be larger than the tokenizer's vocabulary.
        eos_token_ids: the ids that end a completion. Those that the tokenizer lacks are left out.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._all_eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        # Many prompts have the same parameters.
        self._compiled = lru_cache(maxsize=_MAX_COMPILED)(self._compile)

    def guide(self, params: SamplingParams, stops: Callable[[int], bool] | None = None) -> Guide:
        """A guide of one completion with structured outputs; a ValueError as in `constraint`.

        Args:
            stops: another stop predicate of the completion, or None.
        """
        assert params.structured_outputs is not None
        constraint = self.constraint(params.structured_outputs)
        ends = [token_id for token_id in params.stop_token_ids if 0 <= token_id < self._vocab_size]
        return Guide(constraint, stops, params.min_tokens, [*self._eos_token_ids, *ends])

    def constraint(self, params: StructuredOutputsParams) -> Constraint:
        """A constraint for one completion, at its beginning.

        Raises:
            ValueError: there is no tokenizer or none that llguidance can read, llguidance is not installed or cannot
                compile the parameters, or the tokenizer cannot spell a choice.
        """
        return self._compiled(params)()

    def _compile(self, params: StructuredOutputsParams) -> Callable[[], Constraint]:
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer, which structured outputs need; give tokenizer= (--tokenizer)")
        if params.choice is not None:
            spelled = [(self._spelled(choice), choice) for choice in params.choice]
            root = Choice.trie(spelled, can_end=bool(self._eos_token_ids))
            return lambda: Choice(root, self._eos_token_ids)
        return GrammarCopies(lambda: self._matcher(params))

    @cached_property
    def _eos_token_ids(self) -> list[int]:
        known = set(self._tokenizer.get_vocab().values())
        return [token_id for token_id in self._all_eos_token_ids if token_id in known and token_id < self._vocab_size]

    def _spelled(self, choice: str) -> list[int]:
        """A choice's token ids; raises a ValueError if their text is not the choice."""
        try:
            token_ids = self._tokenizer(choice, add_special_tokens=False, verbose=False)["input_ids"]
            # Most outputs skip special tokens. A choice that contains one would not come back as it is.
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except Exception as error:  # tokenizers raise all kinds of errors
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
            # The first mask tells whether there is a first token at all; copies share the work on it.
            Grammar(matcher).fill(np.empty(-(-self._vocab_size // 32), np.int32))
            # JSON Schema calls an unknown format an annotation. All other warnings are of parts that are not followed.
            warnings = matcher.get_grammar_warnings()
            if ignored := [each for each in warnings if not each.startswith("Unknown format: ")]:
                raise ValueError(", ".join(ignored).partition(", falling back")[0])
        except Exception as error:  # a RecursionError of a deep schema too
            raise ValueError(f"{name} cannot be compiled: {in_one_line(error)}") from None
        return matcher

    @cached_property
    def _llguidance_tokenizer(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(_MISSING) from error
        if not self._eos_token_ids:
            raise ValueError(
                "the model has no end-of-sequence token, with which structured outputs end; choice works without one"
            )
        try:
            described = _described(self._tokenizer, self._vocab_size)
            tokenizer = LLTokenizer(described, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            self._check_spelling(tokenizer)
        except Exception as error:
            raise ValueError(f"llguidance cannot read the model's tokenizer: {in_one_line(error)}") from error
        return tokenizer

    def _check_spelling(self, tokenizer: Any) -> None:
        """Raises a ValueError if llguidance reads tokens as the wrong bytes: its masks would then be wrong."""
        token_ids = self._tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
        left_out = {*self._tokenizer.all_special_ids, *range(self._vocab_size, len(self._tokenizer))}
        token_ids = [token_id for token_id in token_ids if token_id not in left_out]
        spelled = tokenizer.decode_bytes(token_ids).decode(errors="replace")
        meant = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        if spelled.removeprefix(" ") != meant.removeprefix(" "):  # SentencePiece adds and strips a leading space
            raise ValueError(f"it reads the tokens of {meant!r} as {spelled!r}")


def _described(tokenizer: Any, vocab_size: int) -> str:
    """The tokenizer as JSON, changed so that llguidance reads it right. If there are several decoders, llguidance obeys
    the first one that maps tokens to bytes. Tokenizers made from GGUF files have ByteFallback before ByteLevel, but
    ByteLevel is the right one. Tokens that the model lacks are left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it is not a fast tokenizer (one of the library tokenizers)")
    described = json.loads(backend.to_str())
    described["padding"] = described["truncation"] = None
    described["added_tokens"] = [each for each in described["added_tokens"] if each["id"] < vocab_size]
    if isinstance((model := described["model"])["vocab"], dict):  # all but Unigram
        model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token_id < vocab_size}
        model["merges"] = [pair for pair in model.get("merges", ()) if "".join(pair) in model["vocab"]]
    for decoder in (described["decoder"] or {}).get("decoders", []):
        if decoder["type"] == "ByteLevel":
            described["decoder"] = decoder
    return json.dumps(described)
