"""The interface between the loop and the device, or the devices, that compute its steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.block_manager import NO_STATES, NO_WINDOWS, BlockManager, Snapshots, WindowGroups
from nanovllm.engine.scheduler import Scheduler, SchedulerStats
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step, StepOutput
from nanovllm.lora import LoRARequest


class StepTooLargeError(RuntimeError):
    """The device's memory is too short for a step. The step, or its halves, may be launched next: they write again all
    that it has written."""


@dataclass(frozen=True)
class RunnerInfo:
    """The facts that a runner determines at start-up.

    Args:
        num_kvcache_blocks, kvcache_block_size: the KV cache; blocks of all groups of layers together.
        max_model_len: maximum number of tokens of prompt + completion.
        vocab_size: token ids are below it.
        eos_token_ids: the model's own end-of-sequence ids.
        generation_config: the model's generation_config.json, for the sampling it recommends.
        max_num_seqs: maximum number of sequences that run at a time.
        max_useful_batched_tokens: a larger step computes no more tokens per second.
        max_tokens_beside_decodes: see Scheduler.
        placeholders: ids of the tokens of images and videos, by their fields in config.json; no prompt may hold them.
        device, dtype, attention_backend: where and how it computes; of several devices, the first is named.
        head: what follows the final norm, see ModelConfig.
        num_layers: the model's layers.
        windows: the layers whose blocks are given back.
        snapshots: whether layers have recurrent states, and the pool of their snapshots.
        may_merge_adapters: whether an adapter may be merged into the weights; otherwise all are computed beside them.
    """

    num_kvcache_blocks: int
    kvcache_block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    generation_config: dict[str, Any] = field(default_factory=dict)
    max_num_seqs: int = 512
    max_useful_batched_tokens: int = 2**31
    max_tokens_beside_decodes: int = 2**31
    placeholders: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = ""
    head: str = "lm"
    num_layers: int = 0
    windows: WindowGroups = NO_WINDOWS
    snapshots: Snapshots = NO_STATES
    may_merge_adapters: bool = True

    @property
    def num_groups(self) -> int:
        return 1 + self.windows.num_groups

    @property
    def num_blocks_per_group(self) -> int:
        """Blocks of the cache as the option num_kvcache_blocks counts them."""
        return self.num_kvcache_blocks // self.num_groups


class LaunchedStep(Protocol):
    """A step that the device may still be working on."""

    def constrain(self, masks: np.ndarray, rows: list[int], changes: Mapping[int, Callable[[Any], Any]]) -> None:
        """Lets a step that has constrained rows sample. Needed before `wait`, unless the step is thrown away.

        Args:
            masks: int32 [len(rows), ceil(vocab_size / 32)], as TokenGuide has them.
            rows: indices into `step.constrained`, one per mask.
            changes: functions that take a row's logits (float32 [vocab_size] on the device) and return its new ones, by
                index into `step.constrained`. The tokens of constrained rows that have neither are dropped.
        """

    def wait(self) -> StepOutput:
        """Waits for the device, and returns the step's result."""


class Runner:
    """Computes steps. A runner needs `info` and `launch`; all else has a default.

    The methods from `request_added` on tell the runner, in order, of all other changes of the schedule. Only a runner
    that computes in other processes needs them.
    """

    info: RunnerInfo

    def launch(self, step: Step) -> LaunchedStep:
        """Starts a step and returns without waiting for the device. A step with constrained rows runs the layers;
        logits and tokens wait for `LaunchedStep.constrain`.

        Raises:
            StepTooLargeError: memory is too short. All memory that the device can spare is free now.
        """
        raise NotImplementedError

    def mask_buffer(self, num_rows: int) -> np.ndarray:
        """Memory for the masks of the next step with constrained rows: int32 [num_rows, ceil(vocab_size / 32)],
        contiguous. The runner may give the same memory again once the tokens of that step have arrived."""
        return np.empty((num_rows, -(-self.info.vocab_size // 32)), np.int32)

    def memory(self) -> dict[str, int]:
        """Bytes on the device, or on all devices, by use."""
        return {}

    def pids(self) -> list[int]:
        """The other processes that compute for it."""
        return []

    def close(self) -> None:
        """Gives the device's memory back; calling it again does nothing."""

    def update_weights(self, weights: list[Any]) -> None:
        """Copies (name, tensor) pairs into the model while nothing runs. See LLM.update_weights."""
        raise RuntimeError("this runner has no weights")

    def set_adapter(self, slot: int, request: LoRARequest | None) -> None:
        """Puts an adapter into a slot, in place of the one before. Checks the adapter before anything changes.

        Args:
            slot: 0 merges the adapter into the weights, while nothing runs. No step in flight may use another slot that
                is given here.
            request: None for no adapter, which restores the exact weights in slot 0.

        Raises:
            ValueError, TypeError: the adapter cannot be read, or it does not fit the model or the slot.
            RuntimeError: there is too little memory. Slot 0 is undefined until a call for it succeeds.
        """
        raise RuntimeError("this runner has no weights")

    def undefined_weights(self) -> list[str]:
        """Names of tensors that must be given to `update_weights` before a step may run."""
        return []

    def weight_digests(self) -> dict[str, str]:
        """A digest of each tensor of the checkpoint, by name. See LLM.weights_digest."""
        raise RuntimeError("this runner has no weights")

    def sleep(self, level: int) -> None:
        """Frees the KV cache, and moves the weights to the host (level 1) or drops them (level 2). Called again, it
        finishes a call that was interrupted, or does the rest of a deeper level."""

    def wake_up(self) -> None:
        """Undoes `sleep`. After an exception the runner sleeps as before."""

    def request_added(self, sequences: list[Sequence]) -> None:
        """The scheduler is about to get a new request, which has these completions."""

    def request_aborted(self, seq: Sequence) -> None:
        """The scheduler is about to drop a completion."""

    def nothing_scheduled(self) -> None:
        """The scheduler found no step to launch, but it may have preempted sequences."""

    def step_committed(self, stopped: list[int], broken: list[int]) -> None:
        """The oldest step in flight was committed.

        Args:
            stopped: ids of the completions that the engine ended with it.
            broken: ids of the completions that ended with it because their prompts could not be scored.
        """

    def scheduler_renewed(self) -> None:
        """A new scheduler takes over; steps in flight will not be committed."""


def make_scheduler(config: Config, info: RunnerInfo, stats: SchedulerStats | None = None) -> Scheduler:
    """An empty scheduler for a runner. With equal arguments and requests, schedulers make the same decisions in every
    process."""
    block_manager = BlockManager(
        info.num_kvcache_blocks, info.kvcache_block_size, config.enable_prefix_caching,
        windows=info.windows, snapshots=info.snapshots,
    )  # fmt: skip
    return Scheduler(
        block_manager,
        min(config.max_num_batched_tokens, info.max_useful_batched_tokens),
        config.max_num_seqs or info.max_num_seqs,
        stats,
        info.max_tokens_beside_decodes,
    )
