"""What a request comes back as."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One completion; also answers `output["text"]`.

    Args:
        text: the completion, without special tokens (unless asked for) and cut before a stop string.
        token_ids: every generated token, the stop token included.
        finish_reason: "stop" (a stop token or stop string), "length" (`max_tokens` or `max_model_len`),
            "error" (see `error`) or "abort".
        num_prompt_tokens: tokens in the prompt.
        num_cached_tokens: how many of them the prefix cache served.
        error: why the request failed, else None.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None

    def __getitem__(self, name: str):
        if name not in self.keys():
            raise KeyError(f"{name!r} is not a field of RequestOutput, which has {', '.join(self.keys())}")
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def keys(self) -> list[str]:
        """The fields' names, so that `dict(output)` works."""
        return [field.name for field in fields(self)]


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
