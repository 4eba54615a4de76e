"""What the planner and whoever computes its steps tell each other. Plain values, no torch.

A step moves some sequences forward. `num_computed_tokens` of each sequence already counts the step's new tokens when
the Scheduler returns it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence

# What stands where a row sampled no token; both are below every token id.
BROKEN_LOGITS, NO_TOKEN_LEFT = -1, -2


class Chunk(NamedTuple):
    """One sequence's share of a step.

    Args:
        seq: the sequence.
        num_new_tokens: how many tokens are computed; they end at `seq.num_computed_tokens`. It is 0 for a sibling of
            the chunk before, which has just been forked from it and samples from the same logits.
        samples: whether the step samples the token after them.
    """

    seq: Sequence
    num_new_tokens: int
    samples: bool


class Step(NamedTuple):
    """What the device computes at once.

    Args:
        chunks: one per sequence; the decodes are those of a single new token that come before all others.
        num_decodes: how many those are. This is what the device calls a decode; StepStats counts tokens by phase.
        copies: blocks to copy once the step's keys are stored, as (source, copy).
    """

    chunks: list[Chunk]
    num_decodes: int
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return sum(chunk.num_new_tokens for chunk in self.chunks)

    @classmethod
    def of(cls, chunks: list[Chunk], copies: Iterable[tuple[int, int]] = ()) -> "Step":
        """The step of these chunks, with its decodes counted."""
        num_decodes = next((i for i, chunk in enumerate(chunks) if chunk.num_new_tokens != 1), len(chunks))
        return cls(chunks, num_decodes, tuple(copies))


@dataclass(frozen=True)
class StepOutput:
    """What a step sampled.

    Args:
        token_ids: one per chunk that samples, in the step's order; BROKEN_LOGITS where the model's logits were not
            finite, NO_TOKEN_LEFT where the request's bans leave no token.
    """

    token_ids: list[int]
