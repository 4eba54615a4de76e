"""The result of `LLM.loglikelihood`."""

from dataclasses import dataclass, fields

import numpy as np

from nanovllm.outputs import RequestOutput


@dataclass(frozen=True, slots=True, eq=False)
class Loglikelihood:
    """How probable a model finds a continuation of a context.

    Args:
        context_token_ids: the tokens before the continuation; empty if the pair failed.
        token_ids: the continuation's tokens.
        logprobs: float32 [num_tokens], the log-probability of each of the continuation's tokens.
        is_greedy: bool [num_tokens], whether each was the most probable token; ties go to the lowest id.
        num_cached_tokens: how many of the context's tokens the prefix cache served.
        error: why the pair failed, else None.
    """

    context_token_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray
    is_greedy: np.ndarray
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def total(self) -> float:
        """The sum of `logprobs`; NaN if the pair failed."""
        return float(self.logprobs.sum(dtype=np.float64)) if self.error is None else float("nan")

    @property
    def all_greedy(self) -> bool:
        """Whether greedy decoding would have given this continuation; False if the pair failed."""
        return self.error is None and bool(self.is_greedy.all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Loglikelihood):
            return NotImplemented
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]
        return all(np.array_equal(*pair) if isinstance(pair[0], np.ndarray) else pair[0] == pair[1] for pair in pairs)

    @classmethod
    def of(cls, output: RequestOutput) -> "Loglikelihood":
        """Reads the output of a prompt that was scored from the continuation on, with the most probable tokens."""
        scores = output.prompt_logprobs
        if output.error is not None or scores is None:
            nothing = np.zeros(0, np.float32)
            return cls([], [], nothing, nothing > 0, output.num_cached_tokens, output.error)
        ids, first = output.prompt_token_ids, scores.first
        is_greedy = scores.token_ids[:, 0] == scores.token_ids[:, 1]
        return cls(ids[:first], ids[first:], scores.of_tokens, is_greedy, output.num_cached_tokens)
