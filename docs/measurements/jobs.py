"""How fast `run-batch` completes a workload of bench.py as a file, beside `LLM.generate` on the same prompts.

    python docs/measurements/jobs.py [--size 0.6B] [--workload big] [--times 1] [--items generate,job,generate]

Each item starts an engine of its own, in a process of its own, and prints the seconds of its rows: for a job, from the
first row that the engine gets to the last one that is written. Prompts are token ids, and nothing is decoded.

generate: one call of `LLM.generate`, the first after a call with one token.
job: a file with the rows in the workload's order. sorted: in the order of their prompts.
replicasN: `job` with `--data-parallel-size N`, and how many rows are equal to those of the last `job`.
estimate: what `--dry-run --estimate` expects of `job`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import bench

SAMPLING: dict[str, Any] = {"ignore_eos": True, "detokenize": False}


class Measurement:
    """A directory with a model of random weights, and a workload's rows in it, several times over."""

    def __init__(self, directory: Path, size: str, workload: str, times: int, max_num_seqs: int | None):
        self._directory, self._max_num_seqs, self._workload = directory, max_num_seqs, workload
        bench.write_config(size, directory)
        requests = bench.make_requests(workload, bench.SIZES[size][6])
        self._temperature = requests.sampling["temperature"]
        self._rows = [
            # Copies differ in every token, so that they share nothing.
            {"id": f"{copy}-{number}", "token_ids": [t + copy for t in prompt], "params": {"max_tokens": max_tokens}}
            for copy in range(times)
            for number, (prompt, max_tokens) in enumerate(zip(requests.prompts, requests.max_tokens, strict=True))
        ]
        self._num_tokens = sum(row["params"]["max_tokens"] for row in self._rows)

    def run(self, item: str) -> None:
        if item == "generate":
            program = f"import sys; sys.path[:0] = {sys.path[:2]}; import {Path(__file__).stem} as m; m.generate()"
            command = [sys.executable, "-c", program]
            asked = {"directory": str(self._directory), "rows": self._rows, "temperature": self._temperature}
            asked |= {"max_num_seqs": self._max_num_seqs, "max_model_len": self._max_model_len}
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

    @property
    def _max_model_len(self) -> int:
        return bench.WORKLOADS[self._workload].max_model_len

    def _job(self, item: str, *options: str) -> dict[str, Any]:
        rows = sorted(self._rows, key=lambda row: row["token_ids"]) if item == "sorted" else self._rows
        paths = {kind: self._directory / f"{item}.{kind}" for kind in ("in", "out", "report")}
        paths["in"].write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "nanovllm", "run-batch", "-i", paths["in"], "-o", paths["out"]]
        command += ["--model", self._directory, "--load-format", "dummy", "--report", paths["report"], *options]
        command += ["--params", json.dumps({"temperature": self._temperature, **SAMPLING})]
        command += ["--max-model-len", str(self._max_model_len)]
        if self._max_num_seqs is not None:
            command += ["--max-num-seqs", str(self._max_num_seqs)]
        if "--dry-run" not in options:
            command.append("--restart")
        subprocess.run(command, check=True)
        return json.loads(paths["report"].read_text())

    def _outputs(self, item: str) -> list[Any]:
        return [json.loads(line)["outputs"] for line in (self._directory / f"{item}.out").open()]

    def _say(self, item: str, seconds: float) -> None:
        print(f"{item}: {seconds:.2f} s, {self._num_tokens / seconds:,.0f} output tok/s", flush=True)


def generate() -> None:
    """The item of this name, in its process."""
    from nanovllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    options = {name: asked[name] for name in ("max_num_seqs", "max_model_len") if asked[name] is not None}
    params = [SamplingParams(temperature=asked["temperature"], **SAMPLING, **row["params"]) for row in asked["rows"]]
    with LLM(asked["directory"], load_format="dummy", **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        began = time.monotonic()
        llm.generate([row["token_ids"] for row in asked["rows"]], params, use_tqdm=False)
        print(time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=bench.SIZES, default="0.6B")
    parser.add_argument("--workload", choices=bench.WORKLOADS, default="big")
    parser.add_argument("--times", type=int, default=1, help="how many copies of the workload's rows")
    parser.add_argument("--items", default="generate,job,generate", help="what to run, in this order")
    parser.add_argument("--max-num-seqs", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measurement = Measurement(Path(directory), given.size, given.workload, given.times, given.max_num_seqs)
        for item in given.items.split(","):
            measurement.run(item)


if __name__ == "__main__":
    main()
