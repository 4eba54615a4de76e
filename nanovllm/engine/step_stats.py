"""The counters of an engine's steps."""

import time
from dataclasses import dataclass

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import Step


@dataclass
class StepStats:
    """Counters over the engine's life.

    Decode tokens are the steps' `num_generated_tokens`; all others are prefill tokens. A step with nothing but decodes
    is a decode step, any other a prefill step, which may have decodes as well. The seconds of scheduling, launching and
    waiting for a step are divided between the phases in proportion to its tokens.

    Fields that end with `of_steps` are sums over the steps, each as the step is launched: running sequences, waiting
    ones (preempted ones too), and the share of the KV cache's blocks that sequences hold, 0 to 1.
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
    num_running_of_steps: int = 0
    num_waiting_of_steps: int = 0
    kvcache_use_of_steps: float = 0.0

    def count(self, step: Step, scheduler: Scheduler) -> None:
        """Counts a step that was launched, and what the scheduler has then."""
        self.num_running_of_steps += len(scheduler.running)
        self.num_waiting_of_steps += len(scheduler.waiting)
        self.kvcache_use_of_steps += scheduler.block_manager.use
        self.max_batch_size = max(self.max_batch_size, len(step.chunks))
        self.num_prefill_tokens += step.num_tokens - step.num_generated_tokens
        self.num_decode_tokens += step.num_generated_tokens
        self.num_steps_with_decodes += step.num_generated_tokens > 0
        is_decode_step = step.num_decodes == len(step.chunks)
        self.num_decode_steps += is_decode_step
        self.num_prefill_steps += not is_decode_step

    def count_seconds(self, step: Step, began: float) -> float:
        """Divides a step's seconds since `began`, a `time.perf_counter()`, between the phases; returns the time now."""
        now = time.perf_counter()
        of_decodes = (now - began) * step.num_generated_tokens / step.num_tokens
        self.decode_seconds += of_decodes
        self.prefill_seconds += now - began - of_decodes
        return now
