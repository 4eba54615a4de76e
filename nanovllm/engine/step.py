"""What the planner and whoever computes its steps tell each other. Plain values, no torch.

A step moves some sequences forward. `num_computed_tokens` of each sequence already counts the step's new tokens when
the Scheduler returns it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanovllm.engine.sequence import Sequence

# What stands where a row sampled no token; both are below every token id.
BROKEN_LOGITS, NO_TOKEN_LEFT = -1, -2


class Chunk(NamedTuple):
    """One sequence's share of a step.

    Args:
        seq: the sequence.
        num_new_tokens: how many tokens are computed; they end at `seq.num_computed_tokens`. It is 0 for a sibling
            that was just forked. It samples from the same logits as the nearest chunk before it that has tokens.
        samples: whether the step samples the token after them.
    """

    seq: Sequence
    num_new_tokens: int
    samples: bool


class Scored(NamedTuple):
    """Tokens of a prompt, from `start` to `end`, whose log-probabilities a step computes.

    ends: whether the sequence ends with them.
    """

    seq: Sequence
    start: int
    end: int
    ends: bool


class Step(NamedTuple):
    """What the device computes at once.

    Args:
        chunks: one per sequence; the decodes are those of a single new token that come before all others.
        num_decodes: how many those are. This is what the device calls a decode; StepStats counts tokens by phase.
        copies: blocks to copy once the step's keys are stored, as (source, copy).
        scored: the prompt tokens whose log-probabilities it computes.
        constrained: the sequences that sample among the tokens of a mask.
    """

    chunks: list[Chunk]
    num_decodes: int
    copies: tuple[tuple[int, int], ...] = ()
    scored: tuple[Scored, ...] = ()
    constrained: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return sum(chunk.num_new_tokens for chunk in self.chunks)

    @classmethod
    def of(
        cls,
        chunks: list[Chunk],
        copies: Iterable[tuple[int, int]] = (),
        scored: Iterable[Scored] = (),
        constrained: Iterable[Sequence] = (),
    ) -> "Step":
        """The step of these chunks, with its decodes counted."""
        num_decodes = next((i for i, chunk in enumerate(chunks) if chunk.num_new_tokens != 1), len(chunks))
        return cls(chunks, num_decodes, tuple(copies), tuple(scored), tuple(constrained))


@dataclass(frozen=True)
class TokenNumbers:
    """What ops/logprobs.py computes of some tokens, row after row: the rank of the token, then pairs of an id and the
    bits of its log-probability, the token's own first. All are 32 bits.

    data: the rows.
    row_bytes: of each.
    """

    data: bytes = b""
    row_bytes: int = 0

    def has_broken(self, first: int, num_rows: int) -> bool:
        """Whether one of these rows has rank BROKEN_LOGITS."""
        ranks = np.frombuffer(self.data, np.int32).reshape(-1, self.row_bytes // 4)[first : first + num_rows, 0]
        return bool((ranks == BROKEN_LOGITS).any())

    def row(self, index: int, num_logprobs: int) -> bytes:
        """The part of a row that a request for `num_logprobs` of the most probable tokens gets."""
        start = index * self.row_bytes
        return self.data[start : start + bytes_of_numbers(num_logprobs)]


def bytes_of_numbers(num_logprobs: int) -> int:
    """Bytes of one token's numbers, with so many of the most probable tokens."""
    return 4 * (1 + 2 * (1 + num_logprobs))


@dataclass(frozen=True)
class StepOutput:
    """What a step computed.

    Args:
        token_ids: one per chunk that samples, in the step's order; BROKEN_LOGITS where the model's logits were not
            finite, NO_TOKEN_LEFT where the request's bans leave no token.
        logprobs: a row per chunk that samples; empty if none of them asks for log-probabilities.
        prompt_logprobs: a row per token of `Step.scored`, with rank BROKEN_LOGITS where the logits were not finite.
    """

    token_ids: list[int]
    logprobs: TokenNumbers = TokenNumbers()
    prompt_logprobs: TokenNumbers = TokenNumbers()
