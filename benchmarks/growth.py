"""Measures how cost grows with the number of requests, the number of sequences at once, the length of prompts and the
length of contexts.

    python -m benchmarks.growth [--size 0.6B] [--curves requests,sequences,prompts,contexts] [--output FILE]

requests: output tokens per second of one call, with 32 tokens in and 32 out per request. A call of up to 10,000 such
    requests runs once more under `tracemalloc`: `bytes_per_request` is the most memory that Python held, without the
    prompts, divided by the number of requests.
sequences: output tokens per second of as many requests of 128 tokens in and 256 out as may run at once.
prompts: input tokens per second of prompts with one token out each; at least 131,072 tokens in all.
contexts: output tokens per second of 16 sequences, from the difference of two calls with 1 and 129 tokens each.

Every point is the second call of its kind. On a GPU, each point also has the roofline of the same steps, and
`host_seconds_per_request`: the CPU time of the whole process, except for waiting for the GPU. The command prints each
curve as a line of JSON and appends it to FILE. With the fields that benchmarks/plot.py names, such a line can be added
to benchmarks/results.json.
"""

import argparse
import json
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.roofline import costs_of, device_rates, logged_steps
from benchmarks.workloads import SIZES, write_config
from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.step import Step
from nanovllm.models.cost import Rates, roofline_seconds
from nanovllm.models.read_config import load_model_config

POINTS = {
    "requests": [100, 316, 1_000, 3_162, 10_000, 31_623, 100_000],
    "sequences": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024],
    "prompts": [32, 128, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 30_000],
    "contexts": [1_024, 2_048, 4_096, 8_192, 16_384, 30_000],
}
_MIN_PROMPT_TOKENS = 131_072
_MAX_TRACED = 10_000  # requests; tracing multiplies the time of a call


class Growth:
    """The curves of one model."""

    def __init__(self, directory: Path, load_format: str):
        self._directory, self._load_format = directory, load_format
        self._config = load_model_config(directory)
        self._rates: Rates | None = None

    def points(self, name: str, max_point: int) -> list[int]:
        """The points of a curve that the model can run, up to `max_point`."""
        if name in ("prompts", "contexts"):
            max_point = min(max_point, self._config.max_position - 256)
        return [point for point in POINTS[name] if point <= max_point]

    def curve(self, name: str, points: list[int]) -> list[dict[str, float]]:
        max_seqs = {"max_num_seqs": max(points)} if name == "sequences" else {}
        lengths = {"prompts": max(points) + 16, "contexts": max(points) + 256}
        length = min(lengths.get(name, 1_024), self._config.max_position)
        options: dict[str, Any] = {"load_format": self._load_format, "max_model_len": length, **max_seqs}
        measures = {
            "requests": self._requests, "sequences": self._sequences,
            "prompts": self._prompts, "contexts": self._contexts,
        }  # fmt: skip
        with LLM(str(self._directory), enable_prefix_caching=False, **options) as llm:
            return [{"at": point, **measures[name](llm, point)} for point in points]

    def _requests(self, llm: LLM, number: int) -> dict[str, float]:
        found = self._run(llm, number, 32, 32, of_output=True)
        if number <= _MAX_TRACED:
            call = self._call(llm, number, 32, 32)
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            call()
            found["bytes_per_request"] = (tracemalloc.get_traced_memory()[1] - before) / number
            tracemalloc.stop()
        return found

    def _sequences(self, llm: LLM, number: int) -> dict[str, float]:
        return self._run(llm, number, 128, 256, of_output=True)

    def _prompts(self, llm: LLM, length: int) -> dict[str, float]:
        return self._run(llm, -(-_MIN_PROMPT_TOKENS // length), length, 1, of_output=False)

    def _contexts(self, llm: LLM, length: int) -> dict[str, float]:
        short, long = (self._run(llm, 16, length, num_tokens, of_output=True) for num_tokens in (1, 129))
        tokens = 16 * 128
        found = {"tokens_per_second": tokens / (long["seconds"] - short["seconds"])}
        if "roofline" in long:
            rooflines = [16 * num / each["roofline"] for each, num in ((short, 1), (long, 129))]
            found["roofline"] = tokens / (rooflines[1] - rooflines[0])
        return found

    def _call(self, llm: LLM, number: int, length: int, num_tokens: int) -> Callable[[], None]:
        rng = random.Random(number)
        prompts = [rng.choices(range(self._config.vocab_size), k=length) for _ in range(number)]
        params = SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

        def call() -> None:
            llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)

        return call

    def _run(self, llm: LLM, number: int, length: int, num_tokens: int, of_output: bool) -> dict[str, float]:
        """The second of two calls, and on a GPU the roofline of a third call."""
        call = self._call(llm, number, length, num_tokens)
        call()
        with waiting_time(llm) as waited:
            cpu, began = time.process_time(), time.perf_counter()
            call()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        tokens = number * (num_tokens if of_output else length)
        found = {"tokens_per_second": tokens / seconds, "seconds": seconds}
        if llm.engine.info.device.startswith("cuda"):
            found["host_seconds_per_request"] = (cpu - sum(waited)) / number
            found["roofline"] = tokens / self._roofline_seconds(llm, call)
        return found

    def _roofline_seconds(self, llm: LLM, call: Callable[[], None]) -> float:
        if self._rates is None:
            self._rates = device_rates(torch.device(llm.engine.info.device))
        with logged_steps(llm) as log:
            call()
        return roofline_seconds(costs_of(llm, log), self._rates)


@contextmanager
def waiting_time(llm: LLM) -> Iterator[list[float]]:
    """Context manager that yields the CPU seconds of each wait for a step's results, which is a busy loop."""
    runner, waited = llm.engine.runner, list[float]()
    launch = runner.launch

    def launch_timed(step: Step) -> Any:
        launched = launch(step)

        def wait() -> Any:
            began = time.process_time()
            try:
                return launched.wait()
            finally:
                waited.append(time.process_time() - began)

        return SimpleNamespace(wait=wait)

    runner.launch = launch_timed  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        del runner.launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--size", choices=SIZES, help="random weights of this shape")
    which.add_argument("--model", help="directory of a model; without either, the bundled one")
    parser.add_argument("--curves", default=",".join(POINTS))
    parser.add_argument("--max-point", type=int, default=2**31, help="leave out the points beyond this")
    parser.add_argument("--output", type=Path, help="append the lines there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path, load_format = Path(given.model or MODEL_DIRECTORY), "auto"
        if given.size:
            path, load_format = Path(directory), "dummy"
            write_config(given.size, path)
        growth = Growth(path, load_format)
        for name in given.curves.split(","):
            if points := growth.points(name, given.max_point):
                line = json.dumps({
                    "model": given.size or path.name, "curve": name, "points": growth.curve(name, points)
                })  # fmt: skip
                print(line, flush=True)
                if given.output:
                    with given.output.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
