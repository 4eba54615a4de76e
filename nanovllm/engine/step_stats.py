"""What an engine counts of its steps."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.engine.step import Step


@dataclass
class StepStats:
    """Counters over the engine's life.

    A decode token is a sampled one that is computed alone; all others are prefill tokens. A step with nothing but
    single new tokens is a decode step, any other a prefill step, which may hold decodes as well. The seconds of
    scheduling, launching and waiting for a step are divided between the phases in proportion to its tokens.
    """

    num_rejected_requests: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_steps_with_decodes: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    max_batch_size: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def count(self, step: Step, num_tokens: "StepTokens") -> None:
        """Counts a step that was launched."""
        self.max_batch_size = max(self.max_batch_size, len(step.chunks))
        self.num_prefill_tokens += num_tokens.prefill
        self.num_decode_tokens += num_tokens.decode
        self.num_steps_with_decodes += num_tokens.decode > 0
        is_decode_step = step.num_decodes == len(step.chunks)
        self.num_decode_steps += is_decode_step
        self.num_prefill_steps += not is_decode_step

    def count_seconds(self, num_tokens: "StepTokens", began: float) -> float:
        """Divides a step's seconds since `began`, a `time.perf_counter()`, between the phases; returns the time now."""
        now = time.perf_counter()
        of_decodes = (now - began) * num_tokens.decode / sum(num_tokens)
        self.decode_seconds += of_decodes
        self.prefill_seconds += now - began - of_decodes
        return now


class StepTokens(NamedTuple):
    """How many tokens a step computes, by phase."""

    prefill: int
    decode: int


def tokens_of(step: Step) -> StepTokens:
    """The tokens of a step that was just scheduled: its sequences' counters must still be those of the step."""
    num_tokens = num_decodes = 0
    for seq, num_new_tokens, _ in step.chunks:
        num_tokens += num_new_tokens
        if num_new_tokens == 1 and seq.num_computed_tokens > seq.num_prompt_tokens:
            num_decodes += 1
    return StepTokens(num_tokens - num_decodes, num_decodes)
