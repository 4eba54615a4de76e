"""How one request is to be sampled: a frozen value, checked when it is made."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request.

    The filters apply in this order: temperature, then `top_k`, then `top_p` over what is left, then `min_p`.

    Args:
        temperature: divides the logits; 0 is greedy.
        max_tokens: most tokens to generate, at least 1.
        min_tokens: stop tokens and stop strings are not possible before this many tokens were generated.
        top_k: sample among the k most probable tokens; 0 is off.
        top_p: sample among the fewest most probable tokens whose probabilities reach p; 1 is off.
        min_p: drop tokens less probable than min_p × the most probable one; 0 is off.
        stop: string or strings that end the completion; the text is cut before the first of them.
        stop_token_ids: token ids that end the completion, besides the model's own end-of-sequence ids.
        ignore_eos: go on after the model's end-of-sequence ids (`stop_token_ids` still stop).
        seed: the same seed gives the same tokens whatever runs beside the request; None takes one from the
            engine's seed and the request's number.
        skip_special_tokens: leave special tokens out of the text (`token_ids` always keeps them).

    Raises:
        TypeError, ValueError: a parameter of the wrong type or out of range, named with the range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    min_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._set("temperature", _real("temperature", self.temperature))
        self._set("top_p", _real("top_p", self.top_p))
        self._set("min_p", _real("min_p", self.min_p))
        for name in ("max_tokens", "min_tokens", "top_k"):
            self._set(name, _integer(name, getattr(self, name)))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 (off) and 1, not {self.min_p}")
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed))
            if not 0 <= self.seed < 2**64:
                raise ValueError(f"seed must be between 0 and 2**64 - 1, not {self.seed}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    return int(value)


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) for string in strings):
        raise TypeError(f"stop must be a string or a list of strings, not {stop!r}")
    if "" in strings:
        raise ValueError("stop must not hold an empty string: it would end every completion at once")
    if any(0xD800 <= ord(character) < 0xE000 for string in strings for character in string):
        raise ValueError(f"stop must be text; {stop!r} holds half of a surrogate pair")
    return tuple(strings)


def _stop_token_ids(token_ids: object) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if not isinstance(token_ids, (list, tuple, set, frozenset)):
        raise TypeError(f"stop_token_ids must be a list of token ids, not {token_ids!r}")
    return tuple(_integer("stop_token_ids", token_id) for token_id in token_ids)
