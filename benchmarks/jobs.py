"""Compares the speed of `run-batch` on the file of a bench.py workload with that of `LLM.generate` on its prompts.

    python -m benchmarks.jobs [--size 0.6B] [--workload big] [--times 1] [--items generate,job,generate]

Each item starts an engine in its own process and prints the seconds of its rows. For a job, these are the seconds from
the first row that the engine gets to the last row that is written. Prompts are token ids, and no text is made.

generate: one call of `LLM.generate`, after a warm-up call of one token. generate-sorted: in the order of the prompts.
job: a file with the rows in the workload's order. sorted: in the order of their prompts.
replicasN: `job` with `--data-parallel-size N`. It also prints how many output rows equal those of the last `job`.
estimate: the prediction of `--dry-run --estimate` for `job`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workloads import SIZES, WORKLOADS, make_requests, write_config

ITEMS = r"generate|generate-sorted|job|sorted|estimate|replicas[1-9][0-9]*"


class Measurement:
    """A directory with a model of random weights and files of a workload's rows, repeated `times` times."""

    def __init__(self, directory: Path, size: str, workload: str, times: int, max_num_seqs: int | None):
        self._directory = directory
        write_config(size, directory)
        requests = make_requests(workload, SIZES[size][6])
        self._sampling = {**requests.sampling, "ignore_eos": True, "detokenize": False}
        self._rows = [
            # Copies differ in every token, so they share no prefixes.
            {"id": f"{copy}-{number}", "token_ids": [t + copy for t in prompt], "params": {"max_tokens": max_tokens}}
            for copy in range(times)
            for number, (prompt, max_tokens) in enumerate(zip(requests.prompts, requests.max_tokens, strict=True))
        ]
        self._num_tokens = requests.num_output_tokens * times
        shape = WORKLOADS[workload]
        self._engine = {"max_model_len": shape.max_model_len, "enable_prefix_caching": shape.prefix_caching}
        if max_num_seqs is not None:
            self._engine["max_num_seqs"] = max_num_seqs

    def run(self, item: str) -> None:
        if item in ("generate", "generate-sorted"):
            command = [sys.executable, "-m", "benchmarks.jobs", "call"]
            asked = {"directory": str(self._directory), "rows": self._in_order(item), "sampling": self._sampling}
            asked["engine"] = self._engine
            done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
            self._say(item, float(done.stdout.split()[-1]))
        elif item == "estimate":
            report = self._job("job", "--dry-run", "--estimate")
            estimate = report["estimate"]
            self._say(f"estimate after {estimate['measured_rows']} rows", estimate["seconds"]["rows"])
            print(f"{estimate['output_tokens']} generated tokens expected, {self._num_tokens} asked for")
        else:
            replicas = item.removeprefix("replicas") if item.startswith("replicas") else "1"
            began = time.monotonic()
            report = self._job(item, "--data-parallel-size", replicas)
            seconds = report["seconds"]
            self._say(item, seconds["rows"])
            print(f"  all of {item}: {time.monotonic() - began:.1f} s, {json.dumps(seconds)}")
            print(f"  cache hits {report['tokens']['prefix_cache_hit_rate']:.3f}, tail {report['tail_seconds']:.1f} s")
            if replicas != "1" and (self._directory / "job.out").exists():
                pairs = zip(*(self._outputs(name) for name in ("job", item)), strict=True)
                print(f"  {sum(one == other for one, other in pairs)} of {len(self._rows)} rows are those of job")

    def _job(self, item: str, *options: str) -> dict[str, Any]:
        rows = self._in_order(item)
        paths = {kind: self._directory / f"{item}.{kind}" for kind in ("in", "out", "report")}
        paths["in"].write_text("".join(json.dumps(row) + "\n" for row in rows))
        command: list[Any] = [sys.executable, "-m", "nanovllm", "run-batch", "-i", paths["in"], "-o", paths["out"]]
        command += ["--model", self._directory, "--load-format", "dummy", "--report", paths["report"], *options]
        command += ["--params", json.dumps(self._sampling)]
        for name, value in self._engine.items():
            option = name.replace("_", "-")
            command += (
                [f"--{option}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{option}"]
            )
        if "--dry-run" not in options:
            command.append("--restart")
        subprocess.run(command, check=True)
        return json.loads(paths["report"].read_text())

    def _in_order(self, item: str) -> list[dict[str, Any]]:
        return sorted(self._rows, key=lambda row: row["token_ids"]) if item.endswith("sorted") else self._rows

    def _outputs(self, item: str) -> list[Any]:
        return [json.loads(line)["outputs"] for line in (self._directory / f"{item}.out").open()]

    def _say(self, item: str, seconds: float) -> None:
        print(f"{item}: {seconds:.2f} s, {self._num_tokens / seconds:,.0f} output tok/s", flush=True)


def call() -> None:
    """Runs the item `generate` in this process, which `run` started for it."""
    from nanovllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    params = [SamplingParams(**asked["sampling"], **row["params"]) for row in asked["rows"]]
    with LLM(asked["directory"], load_format="dummy", **asked["engine"]) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        began = time.monotonic()
        llm.generate([row["token_ids"] for row in asked["rows"]], params, use_tqdm=False)
        print(time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--workload", choices=WORKLOADS, default="big")
    parser.add_argument("--times", type=int, default=1, help="how many copies of the workload's rows")
    parser.add_argument("--items", default="generate,job,generate", help="what to run, in this order")
    parser.add_argument("--max-num-seqs", type=int)
    given = parser.parse_args()
    items = given.items.split(",")
    if unknown := [item for item in items if not re.fullmatch(ITEMS, item)]:
        parser.error(
            f"unknown items {unknown}; known are generate, generate-sorted, job, sorted, estimate and replicasN"
        )
    with tempfile.TemporaryDirectory() as directory:
        measurement = Measurement(Path(directory), given.size, given.workload, given.times, given.max_num_seqs)
        for item in items:
            measurement.run(item)


if __name__ == "__main__":
    call() if sys.argv[1:] == ["call"] else main()
