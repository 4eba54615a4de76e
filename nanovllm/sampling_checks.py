"""Checks of SamplingParams' arguments. Each returns the value that is kept, or raises a TypeError or ValueError."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.checks import integer, real, seed_number
from nanovllm.structured_outputs import StructuredOutputsParams

# Maximum per request. For each running sequence, the device has room for the longest list, 20 bytes per edit.
_MAX_EDITS = 4096
_MAX_COMPLETIONS = 16384
MAX_LOGPROBS = 128


def in_range(name: str, value: Any, minimum: float, meaning: str = "", maximum: float | None = None) -> float:
    number = real(name, value)
    if maximum is None and number < minimum:
        raise ValueError(f"{name} must be {minimum}{meaning} or more, not {number}")
    if maximum is not None and not minimum <= number <= maximum:
        raise ValueError(f"{name} must be between {minimum}{meaning} and {maximum}, not {number}")
    return number


def n(value: Any) -> int:
    number = integer("n", value, minimum=1)
    if number > _MAX_COMPLETIONS:
        raise ValueError(f"n must be at most {_MAX_COMPLETIONS}, not {number}")
    return number


def num_logprobs(name: str, value: Any) -> int | None:
    number = None if value is None else integer(name, value, minimum=0)
    if number is not None and number > MAX_LOGPROBS:
        raise ValueError(f"{name} must be at most {MAX_LOGPROBS}, not {number}")
    return number


def logprobs_mode(value: Any) -> str:
    if value not in ("raw", "processed"):
        raise ValueError(f'logprobs_mode must be "raw" or "processed", not {value!r}')
    return value


class DefaultMaxTokens(int):
    """A `max_tokens` that the caller did not give. It is a type of its own, because the caller may give the same
    number."""


def max_tokens(value: Any) -> int | None:
    return value if value is None or isinstance(value, DefaultMaxTokens) else integer("max_tokens", value, minimum=0)


def seed(value: Any) -> int | None:
    """The value as a seed; None for −1, with which vLLM asks for no seed."""
    return None if value is None or integer("seed", value) == -1 else seed_number(value)


def top_k(value: Any) -> int:
    """The value as an integer; −1 becomes 0, which is off."""
    number = integer("top_k", value)
    if number < -1:
        raise ValueError(f"top_k must be 0 or -1 (off) or more, not {number}")
    return max(number, 0)


def top_p(value: Any) -> float:
    number = real("top_p", value)
    if not 0 < number <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (off), not {number}")
    return number


def repetition_penalty(value: Any) -> float:
    penalty = real("repetition_penalty", value)
    if not 1e-30 <= penalty <= 1e30:  # float32 can divide by these
        raise ValueError(f"repetition_penalty must be above 0 (1 is off) and at most 1e30, not {penalty}")
    return penalty


def strings(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(string, str) for string in found):
        raise TypeError(f"{name} must be a string or a list of strings, not {value!r}")
    if "" in found:
        raise ValueError(f"{name} must not hold an empty string: every completion would hold it at once")
    if any(0xD800 <= ord(character) < 0xE000 for string in found for character in string):
        raise ValueError(f"{name} must be text; {value!r} holds half of a surrogate pair")
    return tuple(found)


def token_ids(name: str, value: Any, minimum: int | None = None) -> tuple[int, ...]:
    """Any collection of token ids, also an array, as plain integers."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(found, (list, tuple, set, frozenset, range)):
        raise TypeError(f"{name} must be a list of token ids, not {value!r}")
    return tuple(integer(name, token_id, minimum) for token_id in found)


def stop_token_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else token_ids("stop_token_ids", value)


def allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    found = token_ids("allowed_token_ids", value, minimum=0)
    if not found:
        raise ValueError("allowed_token_ids must hold at least one token id; None allows all")
    return tuple(sorted(set(found)))


class LogitBias(dict[int, float]):
    """A checked `logit_bias`, which cannot be changed in place: a request might be running with it."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("logit_bias cannot be changed in place; assign a new dict")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


def logit_bias(value: Any) -> dict[int, float]:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must be a dict from token ids to numbers, not {value!r}")
    if value is not None and len(value) > _MAX_EDITS:
        raise ValueError(
            f"logit_bias holds {len(value)} ids, and at most {_MAX_EDITS} are possible; allowed_token_ids bans more"
        )
    biases: dict[int, float] = {}
    for key, bias in (value or {}).items():
        # JSON's keys are strings.
        is_text = isinstance(key, str) and key.isascii() and key.isdigit()
        token_id = integer("a key of logit_bias", int(key) if is_text else key, minimum=0)
        if token_id in biases:
            raise ValueError(f"logit_bias names token {token_id} twice")
        is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        if is_number and not -100 <= bias <= 100:  # infinite and NaN biases too
            raise ValueError(
                f"logit_bias[{token_id}] must be between -100 and 100, not {bias}; "
                "bad_words and allowed_token_ids ban tokens"
            )
        biases[token_id] = real(f"logit_bias[{token_id}]", bias)
    return LogitBias(biases)


def bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    words = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(words, (list, tuple)) or any(isinstance(word, numbers.Number) for word in words):
        raise TypeError(f"bad_words must be a list of strings or of lists of token ids, not {value!r}")
    if len(words) > _MAX_EDITS:
        raise ValueError(
            f"bad_words holds {len(words)} words, and at most {_MAX_EDITS} are possible; allowed_token_ids bans more"
        )
    found: list[str | tuple[int, ...]] = []
    for word in words:
        found += strings("bad_words", word) if isinstance(word, str) else [token_ids("bad_words", word, minimum=0)]
    if () in found:
        raise ValueError("bad_words must not hold an empty list of token ids")
    return tuple(found)


def structured_outputs(value: Any) -> StructuredOutputsParams | None:
    if isinstance(value, Mapping):  # from JSON, say
        value = StructuredOutputsParams(**value)
    if value is not None and not isinstance(value, StructuredOutputsParams):
        raise TypeError(f"structured_outputs must be a StructuredOutputsParams or a dict of its fields, not {value!r}")
    return value


def logits_processors(value: Any) -> tuple[Callable[..., Any], ...]:
    found = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(map(callable, found)):
        raise TypeError(f"logits_processors must be a list of functions, not {value!r}")
    return found


def together(params: Any) -> None:
    """Raises a ValueError if a SamplingParams contradicts itself."""
    n, max_tokens = params.n, params.max_tokens
    if n > 1 and params.temperature == 0:
        raise ValueError(f"n={n} greedy completions would all be equal; set a temperature above 0, or n=1")
    if n > 1 and max_tokens == 0:
        raise ValueError(f"n={n} completions of no tokens would all be equal; set n=1, or max_tokens above 0")
    if max_tokens == 0 and params.prompt_logprobs is None:
        raise ValueError("max_tokens must be at least 1, not 0; 0 with prompt_logprobs scores the prompt")
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise ValueError(f"min_tokens must be between 0 and max_tokens ({max_tokens}), not {params.min_tokens}")
    if params.stop and not params.detokenize:
        raise ValueError("stop strings are found in the text; use stop_token_ids, or leave out detokenize=False")
    if params.structured_outputs is not None:
        others = ("allowed_token_ids", "logits_processors")
        if name := next((name for name in others if getattr(params, name)), None):
            raise ValueError(f"structured_outputs says which tokens may come when; leave out {name}")
