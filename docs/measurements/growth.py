"""Measures how cost grows: tokens per second against the number of requests, the number of sequences at once, the
length of prompts and the length of contexts; and per request, what the host takes.

    python docs/measurements/growth.py [--size 0.6B] [--curves requests,sequences,prompts,contexts] --output FILE
    python docs/measurements/growth.py --draw FILE…

requests: output tokens per second of one call, with 32 tokens in and 32 out per request. A call of up to 10,000 such
    requests runs once more under `tracemalloc`: `bytes_per_request` is the most memory of Python that it held, its
    prompts aside, divided by the number of requests.
sequences: as many requests of 128 tokens in and 256 out as may run at once, output tokens per second.
prompts: input tokens per second of prompts that get one token each; at least 131,072 tokens in all.
contexts: output tokens per second of 16 sequences, from the difference of two calls with 1 and 129 tokens each.

Every point is the second call of its kind. On a GPU, the roofline of bench.py for the same steps stands beside it, and
`host_seconds_per_request`: the time of all the process's processors, but for that which it waits for the GPU. `--draw`
draws docs/growth.svg and needs matplotlib.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import bench
from nanovllm import LLM, SamplingParams
from nanovllm.models.read_config import load_model_config
from nanovllm.runner.step_in_flight import StepInFlight

DOCS = Path(__file__).resolve().parent.parent
POINTS = {
    "requests": [100, 316, 1_000, 3_162, 10_000, 31_623, 100_000],
    "sequences": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024],
    "prompts": [32, 128, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 30_000],
    "contexts": [1_024, 2_048, 4_096, 8_192, 16_384, 30_000],
}
AXES = {
    "requests": ("requests of 32 + 32 tokens", "output tokens per second"),
    "sequences": ("sequences at once, 128 + 256 tokens", "output tokens per second"),
    "prompts": ("tokens of a prompt, one token out", "input tokens per second"),
    "contexts": ("keys of each of 16 sequences", "output tokens per second"),
}
_TOKENS_OF_PROMPTS = 131_072  # in all, or a little more
_MAX_TRACED = 10_000  # requests; tracing multiplies the time of a call


class Growth:
    """Curves of one model."""

    def __init__(self, directory: Path, load_format: str):
        self._directory, self._load_format = directory, load_format
        self._config = load_model_config(directory)
        self._rates: bench.Rates | None = None

    def points(self, name: str, most: int) -> list[int]:
        """Those of a curve that the model takes."""
        if name in ("prompts", "contexts"):
            most = min(most, self._config.max_position - 256)
        return [point for point in POINTS[name] if point <= most]

    def curve(self, name: str, points: list[int]) -> list[dict[str, float]]:
        max_seqs = {"max_num_seqs": max(points)} if name == "sequences" else {}
        lengths = {"prompts": max(points) + 16, "contexts": max(points) + 256}
        length = min(lengths.get(name, 1_024), self._config.max_position)
        options = {"load_format": self._load_format, "max_model_len": length, **max_seqs}
        with LLM(self._directory, enable_prefix_caching=False, **options) as llm:
            found = []
            for point in points:
                found.append({"at": point, **getattr(self, f"_{name}")(llm, point)})
                print(name, json.dumps(found[-1]), flush=True)
        return found

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
        return self._run(llm, -(-_TOKENS_OF_PROMPTS // length), length, 1, of_output=False)

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
        """The second of two calls, and on a GPU the roofline of a third."""
        call = self._call(llm, number, length, num_tokens)
        call()
        with waiting_time() as waited:
            cpu, began = time.process_time(), time.perf_counter()
            call()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        tokens = number * (num_tokens if of_output else length)
        found = {"tokens_per_second": tokens / seconds, "seconds": seconds}
        if llm.engine.info.device.startswith("cuda"):
            found["host_seconds_per_request"] = (cpu - sum(waited)) / number
            found["roofline"] = tokens / self._roofline_seconds(llm, call)
        return found

    def _roofline_seconds(self, llm: LLM, call: Callable[[], Any]) -> float:
        device = torch.device(llm.engine.info.device)
        if self._rates is None:
            self._rates = bench.device_rates(device)
        with bench.logged_steps(llm) as log:
            call()
        return bench.roofline_seconds(log, bench.Numbers.of(llm), self._rates)


@contextmanager
def waiting_time() -> Iterator[list[float]]:
    """A list of the processors' seconds of each wait for a step's results, which is a loop that asks for them."""
    wait, waited = StepInFlight.wait, list[float]()

    def timed(step: StepInFlight) -> Any:
        began = time.process_time()
        try:
            return wait(step)
        finally:
            waited.append(time.process_time() - began)

    StepInFlight.wait = timed  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        StepInFlight.wait = wait  # type: ignore[method-assign]


def draw(files: list[Path], target: Path) -> None:
    """A panel per curve, a line per file and its roofline."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "nanovllm", "svg.fonttype": "none", "font.size": 8})
    reports = [json.loads(path.read_text()) for path in files]
    names = [name for name in AXES if any(report["curves"].get(name) for report in reports)]
    figure, panels = plt.subplots(1, len(names), figsize=(3 * len(names), 3), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for index, report in enumerate(reports):
            points = report["curves"].get(name, [])
            places = [point["at"] for point in points]
            speeds = [point["tokens_per_second"] for point in points]
            panel.plot(places, speeds, f"C{index}o-", markersize=3, label=report["model"])
            if points and "roofline" in points[0]:
                panel.plot(places, [point["roofline"] for point in points], f"C{index}--", label="its roofline")
        panel.set(xscale="log", yscale="log", xlabel=AXES[name][0], ylabel=AXES[name][1])
        panel.grid(True, which="major", linewidth=0.3)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help="draw what --output wrote")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--size", choices=bench.SIZES, help="random weights of this shape")
    which.add_argument("--model", help="directory of a model; without either, the bundled one")
    parser.add_argument("--curves", default=",".join(POINTS))
    parser.add_argument("--most", type=int, default=2**31, help="leave out the points beyond this")
    parser.add_argument("--output", type=Path, help="JSON; curves that it has of another run are kept")
    given = parser.parse_args()
    if given.draw:
        draw(given.draw, DOCS / "growth.svg")
        return
    with tempfile.TemporaryDirectory() as directory:
        path, load_format = Path(given.model or bench.MODEL_DIRECTORY), "auto"
        if given.size:
            path, load_format = Path(directory), "dummy"
            bench.write_config(given.size, path)
        growth = Growth(path, load_format)
        report = {"model": given.size or path.name, "curves": {}}
        if given.output and given.output.exists():
            before = json.loads(given.output.read_text())
            if before["model"] != report["model"]:
                parser.error(f"{given.output} holds curves of {before['model']}; give another file")
            report["curves"] = before["curves"]
        for name in given.curves.split(","):
            points = growth.points(name, given.most)
            report["curves"][name] = growth.curve(name, points) if points else []
            if given.output:
                given.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
