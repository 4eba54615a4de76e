"""Calls a user's functions that change logits, SamplingParams.logits_processors. This path is slow."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class LogitsProcessors:
    """A stop predicate of one completion that also changes the logits of its next token.

    Args:
        processors: see SamplingParams.logits_processors.
        prompt_token_ids: the prompt.
        stops: another stop predicate of the completion, or None.
    """

    def __init__(
        self,
        processors: Sequence[Callable[..., Any]],
        prompt_token_ids: Iterable[int],
        stops: Callable[[int], bool] | None = None,
    ):
        self._processors, self._stops = processors, stops
        self._prompt_token_ids, self._token_ids = list(prompt_token_ids), list[int]()
        self._error: ValueError | None = None

    @property
    def error(self) -> ValueError | None:
        """Why the completion cannot go on, or None."""
        return self._error or getattr(self._stops, "error", None)

    def __call__(self, token_id: int) -> bool:
        self._token_ids.append(token_id)
        is_stopped = self._stops is not None and self._stops(token_id)
        return is_stopped or self._error is not None

    def change_logits(self, logits: Any) -> Any:
        """The changed logits of the next token: float32 [vocab_size]. If a function fails, they stay as they are, and
        the completion ends with that token and the reason."""
        changed = logits.clone()
        for processor in self._processors:
            try:
                given = ([*self._prompt_token_ids],) if _takes_prompt(processor) else ()
                changed = _checked(processor(*given, [*self._token_ids], changed), logits)
            except Exception as error:
                name = getattr(processor, "__name__", type(processor).__name__)
                self._error = ValueError(f"the logits processor {name} failed: {type(error).__name__}: {error}")
                return logits
        return changed


def _checked(changed: Any, logits: Any) -> Any:
    """A function's result, as logits like those that it was given."""
    like = (logits.layout, logits.shape)
    if not hasattr(changed, "layout") or (changed.layout, changed.shape) != like or not changed.is_floating_point():
        names = [name for name in ("layout", "dtype", "shape") if hasattr(changed, name)]
        found = ", ".join(f"{name} {getattr(changed, name)}" for name in names) or type(changed).__name__
        raise TypeError(f"it must return a floating-point tensor of shape {list(logits.shape)}, not {found}")
    changed = changed.detach().to(logits)
    if not bool((changed < float("inf")).all()):  # NaN is not below it either
        raise ValueError("it returned NaN or infinity; use -inf to ban a token, and a large number to force one")
    return changed


def _takes_prompt(processor: Callable[..., Any]) -> bool:
    parameters = inspect.signature(processor).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds and each.default is each.empty for each in parameters) == 3
