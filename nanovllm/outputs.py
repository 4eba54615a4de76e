"""What a request comes back as."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        index: its number among the prompt's completions.
        text: the completion, without special tokens (unless asked for) and cut before a stop string (or after it).
        token_ids: every generated token, the stop token included.
        finish_reason: "stop" (a stop token or stop string), "length" (`max_tokens` or `max_model_len`),
            "error" (see RequestOutput.error) or "abort".
        stop_reason: the stop string, or the id in `stop_token_ids`, that ended the completion; None for the model's own
            end-of-sequence ids and for other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a prompt came back as. It also answers `output["text"]`, and `dict(output)` works.

    Args:
        request_id: the prompt's number in its call, as a string.
        prompt: its text, as given or as the chat template rendered it; None for a prompt of token ids.
        prompt_token_ids: its tokens; empty if it could not be tokenized.
        outputs: its completions, at least one.
        num_cached_tokens: how many of the prompt's tokens the prefix cache served.
        error: why the request failed, else None.

    `text`, `token_ids` and `finish_reason` are those of the first completion, `num_prompt_tokens` is the length of
    `prompt_token_ids`, and `finished` is True: nothing comes back before it is finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: str | None = None

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
_KEYS = (*_OF_FIRST, *(field.name for field in fields(RequestOutput)), "finished")


def describe_errors(
    outputs: Mapping[int, RequestOutput], num_prompts: int, most_reasons: int = 5, most_indices: int = 5
) -> str | None:
    """How many rows of a call failed, why, and the indices of the first of each kind; None if none did.

    Args:
        outputs: index -> output, for the rows that have one.
        num_prompts: of the call.
        most_reasons, most_indices: how many kinds, and how many rows of each kind, are named at most.
    """
    rows_of: dict[str, list[int]] = {}
    for row, output in sorted(outputs.items()):
        if output.error is not None:
            # Reasons that differ only in their numbers or in the value that they show are of one kind.
            rows_of.setdefault(re.sub("-?[0-9]+", "0", output.error.split(", not ")[0]), []).append(row)
    if not rows_of:
        return None
    kinds = sorted(rows_of.values(), key=len, reverse=True)
    parts = []
    for rows in kinds[:most_reasons]:
        first = ", ".join(map(str, rows[:most_indices])) + (", …" if len(rows) > most_indices else "")
        parts.append(f"{len(rows)} × {outputs[rows[0]].error} (at {first})")
    if len(kinds) > most_reasons:
        parts.append(f"{sum(map(len, kinds[most_reasons:]))} × {len(kinds) - most_reasons} other reasons")
    return f"{sum(map(len, kinds))} of {num_prompts} prompts ended in an error: {'; '.join(parts)}"
