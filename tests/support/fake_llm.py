"""An LLM without a model, for jobs: completions are made of the prompt, the seed and the adapter, and finish in a
shuffled order."""

import hashlib
import json
import random
from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

import numpy as np

from nanovllm import CompletionOutput, LoRARequest, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
from nanovllm.jobs.timeline import COUNTERS
from nanovllm.pooling_outputs import PooledOutput

DIMENSIONS = 64  # of a whole embedding


class FakeLLM:
    """The part of LLM that Job needs.

    Class attributes for tests: `rows_ahead`, the rows that it reads before one finishes; `made`, the completed rows.
    """

    rows_ahead = 64
    made: list[str] = []

    def __init__(self, model: str, **options: Any):
        self.options = options
        self.lora_request: Any = None
        self.adapters: dict[int, LoRARequest | None] = {}  # by the prompt's number
        self._metrics = dict.fromkeys(
            ("num_prompt_tokens", "num_output_tokens", *COUNTERS), 0
        )  # fmt: skip

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def metrics(self) -> dict[str, Any]:
        max_num_seqs = self.options.get("max_num_seqs") or 1024
        return {**self._metrics, "prefix_cache_hit_rate": 0.0, "max_num_seqs": max_num_seqs, "max_batch_size": 1}

    def provenance(self) -> dict[str, Any]:
        return {
            "weights": {"all": "0" * 16, "tensors": {"a": "1" * 16, "b": "2" * 16}},
            "device": {"type": "cpu", "name": "a fake", "instructions": "none"},
            "dtype": "float32", "attention_backend": "torch", "kvcache_block_size": 64, "num_ranks": 1,
        }  # fmt: skip

    def generate_iter(
        self,
        prompts: Iterator[Any],
        params: Iterator[SamplingParams],
        *,
        ordered: bool,
        lora_request: Any = None,
    ) -> "FakeIterator":
        assert not ordered and (lora_request is None or self.options["enable_lora"])
        self.lora_request = lora_request
        return FakeIterator(self, prompts, params)

    def complete(self, number: int, prompt: Any, params: Any) -> RequestOutput | PoolingRequestOutput:
        name = json.dumps(prompt)
        if (adapter := self.adapters.pop(number)) is not None:
            name += f" with {adapter.lora_name}"
        self.made.append(name)
        if isinstance(params, PoolingParams):
            return pooled(number, name, params)
        outputs = []
        for index in range(params.n):
            text = hashlib.sha256(f"{name} {params.seed} {params.max_tokens} {index}".encode()).hexdigest()
            outputs.append(CompletionOutput(index, text, list(text.encode())[:4], "length"))
        self._metrics["num_output_tokens"] += 4 * params.n
        return RequestOutput(str(number), name, [1, 2, 3], outputs, prompt_index=number)


def pooled(number: int, name: str, params: PoolingParams) -> PoolingRequestOutput:
    """Numbers made of the prompt, with all bits that float32 has."""
    labels = params.labels or ("no", "yes")
    size = {"embed": params.dimensions or DIMENSIONS, "score": 1, "reward": 1}.get(params.task, len(labels))
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    array = np.random.default_rng(seed).normal(0, 0.1, size).astype(np.float32)
    return PoolingRequestOutput(
        str(number), name, [1, 2, 3], PooledOutput(params.task, array), labels=labels, prompt_index=number,
        logprobs=-abs(array) if params.task == "label" else None,
    )  # fmt: skip


class FakeIterator:
    def __init__(self, llm: FakeLLM, prompts: Iterator[Any], params: Iterator[SamplingParams]):
        self._llm, self._source = llm, self._pairs(llm, prompts, params)
        self._running: list[tuple[int, Any, SamplingParams]] = []
        self._rng, self._is_drained = random.Random(0), False

    @staticmethod
    def _pairs(llm, prompts, params):
        given = llm.lora_request
        adapters = repeat(given) if given is None or isinstance(given, LoRARequest) else given
        for number, prompt in enumerate(prompts):
            row = number, prompt, next(params)
            llm.adapters[number] = next(adapters)
            yield row

    def drain(self) -> None:
        """An eighth of the rows that were read runs."""
        self._is_drained = True
        del self._running[len(self._running) // 8 :]

    def __iter__(self) -> "FakeIterator":
        return self

    def __next__(self) -> RequestOutput:
        if not self._is_drained:
            self._running += islice(self._source, self._llm.rows_ahead - len(self._running))
        if not self._running:
            raise StopIteration
        return self._llm.complete(*self._running.pop(self._rng.randrange(len(self._running))))
