"""Requests of all kinds, the schedules in which an LLM runs them, and what happened in each schedule."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import Step
from nanovllm.outputs import RequestOutput
from nanovllm.runner.step_sizes import StepSize

Request = tuple[list[int], SamplingParams]
# All of them ask for log-probabilities, whose bits show more than the tokens do. The prompts of the last kind are
# scored, and short.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 2},
    {"temperature": 0.8, "logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}, "logprobs": 1},
    {"temperature": 0.9, "n": 2, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1},
)


def make_requests(
    num_requests: int, draw: Callable[[int], list[int]], max_prompt: int, max_tokens: int, max_scored: int = 200,
    beginnings: Sequence[int] = (0, 120, 270, 450, 720),
) -> list[Request]:  # fmt: skip
    """Ragged prompts of 1 to `max_prompt` tokens, behind beginnings of these lengths, with each of KINDS in turn. Some
    are a part of a beginning.

    draw: gives as many tokens as it is asked for.
    max_scored: the maximum length of prompts that are scored.
    """
    rng = random.Random(0)
    shared = [draw(length) for length in beginnings]
    requests = []
    for row in range(num_requests):
        kind = KINDS[row % len(KINDS)]
        length = rng.randint(1, min(max_prompt, max_scored) if "prompt_logprobs" in kind else max_prompt)
        prompt = (rng.choice(shared) + draw(length))[:length]
        params = SamplingParams(**kind, max_tokens=max_tokens, ignore_eos=True, seed=row, detokenize=False)
        requests.append((prompt, params))
    return requests


def random_ids(vocab_size: int, seed: int = 1) -> Callable[[int], list[int]]:
    rng = random.Random(seed)
    return lambda length: [rng.randrange(vocab_size) for _ in range(length)]


@dataclass
class Seen:
    """What happened in some calls.

    num_cached_tokens: prompt tokens that the prefix cache served.
    chunked: ids of the sequences whose prompts took several steps.
    max_num_tokens, max_num_rows: of a step.
    replays: how often a forward half of each size was replayed; always empty with several ranks.
    """

    num_rows: int = 0
    num_calls: int = 0
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    max_num_tokens: int = 0
    max_num_rows: int = 0
    chunked: set[int] = field(default_factory=set)
    replays: Counter[StepSize] = field(default_factory=Counter)

    def count(self, step: Step) -> None:
        """Counts a step that is launched: `num_computed_tokens` of its sequences includes it."""
        self.num_steps += 1
        self.max_num_tokens = max(self.max_num_tokens, step.num_tokens)
        self.max_num_rows = max(self.max_num_rows, len(step.chunks))
        self.chunked |= {seq.seq_id for seq, *_ in step.chunks if seq.num_computed_tokens < seq.num_prompt_tokens}

    def __str__(self) -> str:
        decodes = sum(size.num_tiles == 0 for size in self.replays)
        return (
            f"{self.num_rows} rows in {self.num_calls} calls, {self.num_steps} steps of up to {self.max_num_rows} rows "
            f"and {self.max_num_tokens} tokens; {self.num_cached_tokens} cached tokens, {self.num_preemptions} "
            f"preemptions, {len(self.chunked)} prompts in chunks; {sum(self.replays.values())} replays of {decodes} "
            f"sizes of decodes and {len(self.replays) - decodes} with prompts"
        )


@contextmanager
def seen_in(llm: LLM) -> Iterator[Seen]:
    """Context manager that counts what happens in the LLM's calls."""
    seen, before, runner = Seen(), llm.metrics(), llm.engine.runner
    launch, graphs = runner.launch, getattr(getattr(runner, "program", None), "graphs", None)

    def noted_launch(step: Step) -> Any:
        seen.count(step)
        return launch(step)

    def noted_run(key: Any, *arguments: Any) -> Any:
        if key[0] == "forward":
            seen.replays[key[1]] += 1
        return type(graphs).run(graphs, key, *arguments)

    runner.launch = noted_launch
    if graphs is not None:
        graphs.run = noted_run
    try:
        yield seen
    finally:
        del runner.launch
        if graphs is not None:
            del graphs.run
        after = llm.metrics()
        seen.num_cached_tokens = after["num_cached_prompt_tokens"] - before["num_cached_prompt_tokens"]
        seen.num_preemptions = after["num_preemptions"] - before["num_preemptions"]


class Schedule(NamedTuple):
    """One way to run the requests.

    happened: takes what was seen in this schedule and in that of the reference, and says whether this one did what it
        is for.
    call_size: requests per call.
    is_shuffled: in another order.
    is_warm: the prefix cache keeps what earlier schedules left. Otherwise it is empty at the first call.
    num_rows: so many requests, drawn from all; None is all.
    """

    happened: Callable[[Seen, Seen], bool]
    call_size: int = 10**6
    is_shuffled: bool = False
    is_warm: bool = False
    num_rows: int | None = None


class Result(NamedTuple):
    """One request's result. tokens: of each completion. numbers: all its log-probabilities, with ids and ranks."""

    tokens: list[list[int]]
    numbers: bytes

    @classmethod
    def of(cls, output: RequestOutput) -> "Result":
        assert output.error is None, output.error
        arrays = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
        parts = [
            part.tobytes()
            for each in arrays
            if each is not None
            for part in (each.token_ids, each.logprobs, each.ranks)
        ]
        return cls([each.token_ids for each in output.outputs], b"".join(parts))


def run(llm: LLM, requests: list[Request], schedule: Schedule) -> tuple[dict[int, Result], Seen]:
    """The results of the requests that this schedule runs, by their number, and what happened."""
    order = list(range(len(requests)))
    if schedule.num_rows is not None:
        order = random.Random(2).sample(order, schedule.num_rows)
    if schedule.is_shuffled:
        random.Random(1).shuffle(order)
    if not schedule.is_warm:
        llm.reset_prefix_cache()
    results: dict[int, Result] = {}
    with seen_in(llm) as seen:
        for first in range(0, len(order), schedule.call_size):
            rows = order[first : first + schedule.call_size]
            prompts, params = zip(*(requests[row] for row in rows), strict=True)
            outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
            results |= {row: Result.of(output) for row, output in zip(rows, outputs, strict=True)}
            seen.num_calls += 1
    seen.num_rows = len(order)
    return results, seen


class Differences(NamedTuple):
    """Numbers of the requests with other tokens, and of those with other log-probabilities, which include the first."""

    tokens: list[int]
    numbers: list[int]

    @classmethod
    def of(cls, found: dict[int, Result], expected: dict[int, Result]) -> "Differences":
        """The requests of `found` that differ from those of `expected`."""
        tokens = [row for row, result in found.items() if result.tokens != expected[row].tokens]
        return cls(tokens, [row for row, result in found.items() if result != expected[row]])

    def __str__(self) -> str:
        return f"{len(self.numbers)} rows have other log-probabilities, and {len(self.tokens)} have other tokens"


class Start(NamedTuple):
    """An LLM and the schedules that it runs one after another.

    options: of the LLM.
    cache_part: the KV cache holds this part of all prompts' tokens, and at least the longest request; 0: as usual.
    """

    options: dict[str, Any]
    schedules: dict[str, Schedule]
    cache_part: float = 0.0

    def options_for(self, requests: list[Request]) -> dict[str, Any]:
        if not self.cache_part:
            return self.options
        longest = max(len(prompt) + params.max_tokens for prompt, params in requests)
        num_tokens = max(longest, int(self.cache_part * sum(len(prompt) for prompt, _ in requests)))
        return {**self.options, "num_kvcache_blocks": -(-num_tokens // self.options["kvcache_block_size"])}

    def run(self, model: str, requests: list[Request], **options: Any) -> dict[str, tuple[dict[int, Result], Seen]]:
        """The results of each schedule, and what happened in it."""
        with LLM(model, **{**options, **self.options_for(requests)}) as llm:
            return {name: run(llm, requests, schedule) for name, schedule in self.schedules.items()}
