"""What the planner and whoever computes its steps tell each other. Plain values, no torch.

A step moves some sequences forward. `num_computed_tokens` of each sequence already counts the step's new tokens when
the Scheduler returns it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence

# What stands where a row sampled no token; both are below every token id.
BROKEN_LOGITS, NO_TOKEN_LEFT = -1, -2


class Chunk(NamedTuple):
    """One sequence's share of a step.

    Args:
        seq: the sequence.
        num_new_tokens: how many tokens are computed, at least 1; they end at `seq.num_computed_tokens`.
        samples: whether the step samples the token after them.
    """

    seq: Sequence
    num_new_tokens: int
    samples: bool


class Step(NamedTuple):
    """What the device computes at once.

    Args:
        chunks: one per sequence; the decodes are those of a single new token that come before all longer ones.
        num_decodes: how many those are. This is what the device calls a decode; StepStats counts tokens by phase.
    """

    chunks: list[Chunk]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return sum(chunk.num_new_tokens for chunk in self.chunks)

    @classmethod
    def of(cls, chunks: list[Chunk]) -> "Step":
        """The step of these chunks, with its decodes counted."""
        return cls(chunks, next((i for i, chunk in enumerate(chunks) if chunk.num_new_tokens > 1), len(chunks)))


@dataclass(frozen=True)
class StepOutput:
    """What a step sampled.

    Args:
        token_ids: one per chunk that samples, in the step's order; BROKEN_LOGITS where the model's logits were not
            finite, NO_TOKEN_LEFT where the request's bans leave no token.
    """

    token_ids: list[int]
