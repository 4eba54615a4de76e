"""What a request comes back as."""

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

    def keys(self) -> list[str]:
        """The fields' names, so that `dict(output)` works."""
        return [field.name for field in fields(self)]
