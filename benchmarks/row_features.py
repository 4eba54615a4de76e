"""Measures the cost of log-probabilities, several samples, scores and structured output, on one GPU with random
weights.

    python -m benchmarks.row_features [--size 0.6B] [--items logprobs,samples,scores,structured]
        [--tokenizer DIRECTORY]

`structured` needs a directory with a model's tokenizer. Its rows without a schema get as many tokens as the rows with
one had. A stop predicate ends them, so that the engine learns of their ends no earlier.
"""

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import SIZES, make_requests, write_config
from nanovllm import LLM, SamplingParams, StructuredOutputsParams

LABELS = ["price", "quality", "delivery", "support", "packaging", "design", "other"]
SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["positive", "negative", "neutral"]},
        "topics": {"type": "array", "items": {"enum": LABELS}, "minItems": 3, "maxItems": 6},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        # The lengths let random weights end, and keep them from ending at once.
        "reason": {"type": "string", "minLength": 150, "maxLength": 400},
    },
    "required": ["label", "topics", "confidence", "reason"],
    "additionalProperties": False,
}


class Measurement:
    """Measures one model of random weights. Each item makes its own LLMs."""

    def __init__(self, directory: Path, repeats: int):
        self._directory, self._repeats = directory, repeats

    @contextmanager
    def llm(self, **options: Any) -> Iterator[LLM]:
        with LLM(self._directory, load_format="dummy", max_model_len=4096, **options) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
            yield llm

    def calls(
        self, name: str, amount: int, llm: LLM, method: Callable[..., Any], *arguments: Any, unit: str = "tok"
    ) -> None:
        report(name, amount, [timed(llm, method, *arguments)[0] for _ in range(self._repeats)], unit)

    def logprobs(self) -> None:
        """`nano` without log-probabilities, with several kinds of them, and without them again."""
        requests = make_requests("nano", 151_936)
        with self.llm() as llm:
            for k, mode in ((None, "raw"), (0, "raw"), (5, "raw"), (5, "processed"), (20, "raw"), (None, "raw")):
                options: dict[str, Any] = {} if k is None else {"logprobs": k, "logprobs_mode": mode}
                params = requests.sampling_params(**options)
                name = f"nano, logprobs={k}, {mode}"
                self.calls(name, requests.num_output_tokens, llm, llm.generate, requests.prompts, params)

    def samples(self) -> None:
        requests = make_requests("samples", 151_936)
        for options in ({}, {"enable_prefix_caching": False}, {"prefix_grouping": False}):
            with self.llm(**options) as llm:
                name, params = f"32 samples of 32 prompts, {options}", requests.sampling_params()
                self.calls(name, requests.num_output_tokens, llm, llm.generate, requests.prompts, params)

    def scores(self) -> None:
        """Rows like those of a 5-shot task: one of 50 prefixes of 1,500 tokens, 80 own tokens, 10 scored tokens."""
        rng = random.Random(0)
        prefixes = [numbers(rng, 1500) for _ in range(50)]
        contexts = [rng.choice(prefixes) + numbers(rng, 80) for _ in range(4000)]
        continuations = [numbers(rng, 10) for _ in range(4000)]
        # Without a cache, each row computes its prefix again, as in engines whose prompt scores bypass their cache.
        for options in ({}, {"enable_prefix_caching": False}):
            with self.llm(**options) as llm:
                name = f"scores of 4,000 rows, {options}"
                self.calls(name, 4000, llm, llm.loglikelihood, contexts, continuations, unit="rows")

    def structured(self) -> None:
        rng = random.Random(1)
        prompts = [numbers(rng, rng.randint(100, 600)) for _ in range(256)]
        constrained = SamplingParams(
            temperature=0.6, max_tokens=400, structured_outputs=StructuredOutputsParams(json=SCHEMA)
        )
        free = SamplingParams(temperature=0.6, max_tokens=400, ignore_eos=True)
        with self.llm() as llm:
            ratios = []
            for _ in range(1 + self._repeats):
                under_schema, outputs = timed(llm, llm.generate, prompts, constrained)
                for output in outputs:
                    assert output.error is None, output.error
                    assert output.finish_reason == "length" or json.loads(output.text)["label"]
                lengths = [len(output.token_ids) for output in outputs]
                with ends_after(llm, lengths):
                    without, outputs = timed(llm, llm.generate, prompts, free)
                assert [len(output.token_ids) for output in outputs] == lengths
                report("256 rows under a schema", sum(lengths), [under_schema])
                report("256 rows without, of the same lengths", sum(lengths), [without])
                ratios.append(round(without / under_schema, 3))
            print("ratio of the calls", ratios, flush=True)


@contextmanager
def ends_after(llm: LLM, lengths: list[int]) -> Iterator[None]:
    """Context manager that ends each new request after its number of tokens, which the engine does not know before.

    Args:
        lengths: tokens of each request, in the requests' order.
    """
    add_request, left = llm.engine.add_request, iter(lengths)

    def add(token_ids, params, predicates=None, first_scored=1):
        num_tokens, count = next(left), itertools.count(1)
        return add_request(token_ids, params, [lambda token_id: next(count) >= num_tokens], first_scored)

    vars(llm.engine)["add_request"] = add
    try:
        yield
    finally:
        del vars(llm.engine)["add_request"]


def timed(llm: LLM, method: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """(seconds of one call of an LLM's method with an empty prefix cache, the result)."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    result = method(*arguments, use_tqdm=False)
    return time.perf_counter() - began, result


def numbers(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, 10_000) for _ in range(count)]


def report(name: str, amount: int, times: list[float], unit: str = "tok") -> None:
    rates = ", ".join(f"{amount / each:,.0f}" for each in times)
    print(f"{name}: {rates} {unit}/s; peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6B", choices=SIZES)
    parser.add_argument("--items", default="logprobs,samples,scores")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_config(options.size, directory)
        if options.tokenizer is not None:
            for path in options.tokenizer.iterdir():
                if "token" in path.name or path.suffix == ".jinja":
                    shutil.copy(path, directory)
        measurement = Measurement(directory, options.repeats)
        for item in options.items.split(","):
            getattr(measurement, item)()


if __name__ == "__main__":
    main()
