"""What an engine counts of its steps."""

import time
from dataclasses import dataclass

from nanovllm.engine.step import Step


@dataclass
class StepStats:
    """Counters over the engine's life.

    A decode token is a sampled one that is computed alone; all others are prefill tokens. A step with nothing but
    single new tokens is a decode step, any other a prefill step, which may hold decodes as well. The seconds of
    scheduling, launching and waiting for a step are shared between the phases as its tokens are.
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

    def count(self, step: Step) -> float:
        """Counts a step that was launched; returns which part of its tokens are decodes."""
        chunks = step.chunks
        num_tokens = num_decodes = 0
        for seq, num_new_tokens, _ in chunks:
            num_tokens += num_new_tokens
            if num_new_tokens == 1 and seq.num_computed_tokens > seq.num_prompt_tokens:
                num_decodes += 1
        self.max_batch_size = max(self.max_batch_size, len(chunks))
        self.num_decode_tokens += num_decodes
        self.num_prefill_tokens += num_tokens - num_decodes
        self.num_steps_with_decodes += num_decodes > 0
        if num_tokens == len(chunks):
            self.num_decode_steps += 1
        else:
            self.num_prefill_steps += 1
        return num_decodes / num_tokens

    def count_seconds(self, began: float, decode_share: float) -> float:
        """Shares out the seconds since `began`, a `time.perf_counter()`; returns the time now."""
        now = time.perf_counter()
        self.decode_seconds += (now - began) * decode_share
        self.prefill_seconds += (now - began) * (1 - decode_share)
        return now
