"""What the loop needs of whoever computes its steps: a ModelRunner, or in tests something without a model."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from nanovllm.engine.scheduler import Work


@dataclass(frozen=True)
class RunnerInfo:
    """What a runner found out at start-up.

    Args:
        num_kvcache_blocks, kvcache_block_size: the KV cache.
        max_model_len: most tokens of prompt + completion.
        vocab_size: token ids are below it.
        eos_token_ids: the model's own end-of-sequence ids.
        generation_config: the model's generation_config.json, for the sampling it recommends.
        most_useful_batched_tokens: a larger step is no faster.
    """

    num_kvcache_blocks: int
    kvcache_block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    generation_config: dict[str, Any] = field(default_factory=dict)
    most_useful_batched_tokens: int = 2**31


class LaunchedStep(Protocol):
    """A step that the device may still be working on."""

    def wait(self) -> list[int]:
        """The sampled tokens in the work's order, once the device is done; below 0 for broken logits."""


class Runner(Protocol):
    """Computes steps."""

    info: RunnerInfo

    def launch(self, work: Work) -> LaunchedStep: ...
    def memory(self) -> dict[str, int]: ...
    def close(self) -> None: ...
