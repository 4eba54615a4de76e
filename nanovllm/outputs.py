"""The outputs of requests, and a summary of their errors."""

import re
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from nanovllm.logprobs import TokenLogprobs
from nanovllm.lora import LoRARequest

FinishReason = Literal["stop", "length", "error", "abort"]
# The maximum numbers of kinds of reasons that are counted separately, of kinds that are named, and of prompts that are
# named for each.
_MAX_KINDS, _MAX_REASONS, _MAX_INDICES = 1000, 5, 5


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        index: its number among the prompt's completions.
        text: the completion, without special tokens (unless asked for) and cut before a stop string (or after it).
        token_ids: every generated token, the stop token included.
        finish_reason: "stop" (a stop token or stop string), "length" (`max_tokens` or `max_model_len`),
            "error" (see RequestOutput.error) or "abort".
        stop_reason: the stop string, or the token id, that ended the completion; None for the tokenizer's
            end-of-sequence id (without a tokenizer: the model's ids) and for other reasons.
        cumulative_logprob: the sum of the generated tokens' log-probabilities, if they were asked for.
        logprobs: the log-probabilities of each generated token, if they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | None = None

    def finished(self) -> bool:
        """Always True. Scripts for vLLM call it."""
        return True


class RequestMetrics(NamedTuple):
    """When a request was read, had its first token (None without one) and finished: seconds since the epoch."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one prompt. `output["text"]` and `dict(output)` work too.

    Args:
        request_id: the request's number, as a string. The numbers go on from call to call. Comparison ignores it.
        prompt: the prompt's text, as given or as the chat template rendered it; None for a prompt of token ids.
        prompt_token_ids: the prompt's tokens; empty if it could not be tokenized.
        outputs: its completions, at least one.
        num_cached_tokens: how many of the prompt's tokens the prefix cache served.
        error: why the request failed, else None.
        prompt_logprobs: the log-probabilities of the prompt's tokens, if they were asked for; the first token has none.
        weight_version: how many times `LLM.update_weights` had changed the weights that computed the output.
        prompt_index: the prompt's number in its call.
        metrics: the request's times; None if it could not run. Comparison ignores them.
        lora_request: the adapter that the request was made with, or None. Comparison ignores it.

    `text`, `token_ids` and `finish_reason` are those of the first completion, `num_prompt_tokens` is the length of
    `prompt_token_ids`. `finished` is True, because only finished requests are returned.
    """

    request_id: str = field(compare=False)
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: TokenLogprobs | None = None
    weight_version: int = 0
    prompt_index: int = 0
    metrics: RequestMetrics | None = field(default=None, compare=False)
    lora_request: LoRARequest | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return True

    def __getitem__(self, name: str):
        if name not in _KEYS:
            raise KeyError(f"{name!r} is not a field of RequestOutput, which has {', '.join(_KEYS)}")
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in _KEYS

    def keys(self) -> list[str]:
        """The names that `output[name]` answers to."""
        return list(_KEYS)


_OF_FIRST = ("text", "token_ids", "finish_reason", "num_prompt_tokens")
_KEYS = (*_OF_FIRST, *(each.name for each in fields(RequestOutput)), "finished")


class ErrorSummary:
    """The failed prompts of a call, by reason. Its memory does not grow with their number."""

    def __init__(self):
        self._kinds: dict[str, _Kind] = {}
        self._num_others = 0

    def add(self, index: int, error: str) -> None:
        # Reasons that differ only in their numbers or in the value that they show are of one kind.
        key = re.sub("-?[0-9]+", "0", error.split(", not ")[0])
        if key not in self._kinds and len(self._kinds) == _MAX_KINDS:
            self._num_others += 1
            return
        kind = self._kinds.setdefault(key, _Kind([]))
        kind.num_prompts += 1
        insort(kind.first, (index, error))
        del kind.first[_MAX_INDICES:]

    def describe(self, num_prompts: int) -> str | None:
        """How many of a call's prompts failed, why, and the indices of the first of each kind; None if none failed."""
        kinds = sorted(self._kinds.values(), key=lambda kind: (-kind.num_prompts, kind.first))
        if not kinds:
            return None
        parts = []
        for kind in kinds[:_MAX_REASONS]:
            first = ", ".join(str(index) for index, _ in kind.first) + (
                ", …" if kind.num_prompts > _MAX_INDICES else ""
            )
            parts.append(f"{kind.num_prompts} × {kind.first[0][1]} (at {first})")
        num_named = sum(kind.num_prompts for kind in kinds[:_MAX_REASONS])
        num_errors = sum(kind.num_prompts for kind in kinds) + self._num_others
        if num_errors > num_named:
            many = "many" if self._num_others else len(kinds) - _MAX_REASONS
            parts.append(f"{num_errors - num_named} × {many} other reasons")
        return f"{num_errors} of {num_prompts} prompts ended in an error: {'; '.join(parts)}"


@dataclass(slots=True)
class _Kind:
    """Errors of one reason: the first (index, error) pairs, and how many prompts have one."""

    first: list[tuple[int, str]]
    num_prompts: int = 0


def keep_outputs(error: BaseException, outputs: Mapping[int, object]) -> None:
    """Attaches the outputs that had finished, by number, to an exception as its attribute `finished_outputs`."""
    error.finished_outputs = outputs  # type: ignore[attr-defined]
