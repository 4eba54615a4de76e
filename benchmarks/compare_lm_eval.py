"""Compares results and times of lm-evaluation-harness with its own `hf` model and with nanovllm.

    OMP_NUM_THREADS=1 python -m benchmarks.compare_lm_eval DIRECTORY --rows 500 --generate-rows 200

The script makes the tasks from a seed: word problems with four answers and five shots before each, and the same stories
with an answer to generate. `hf` gets the fastest of several batch sizes, measured on the first rows. Both compute in
float32 on the CPU. The last line is JSON. The exit status is 1 if the results differ.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from nanovllm.integrations.lm_eval import NanovllmLM

NAMES = ["Tom", "Mary", "Ahmed", "Ling", "Sofia", "Peter", "Aiko", "Carlos", "Nina", "David"]
THINGS = ["apples", "books", "coins", "stamps", "pencils", "cookies", "marbles", "tickets", "shells", "letters"]
PLACES = ["the market", "the library", "the park", "the station", "the school", "the beach", "the museum"]
TOLERANCE = 1e-3
CHOICE_TASK = """
task: nanovllm_choice
dataset_path: json
dataset_kwargs: {data_files: {train: DATA/train.jsonl, test: DATA/choice.jsonl}}
test_split: test
fewshot_split: train
fewshot_config: {sampler: SAMPLER}
num_fewshot: 5
output_type: multiple_choice
doc_to_text: "Question: {{story}} Who has how many {{thing}} in the evening?\\nAnswer:"
doc_to_target: label
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE_TASK = """
task: nanovllm_generate
dataset_path: json
dataset_kwargs: {data_files: {train: DATA/train.jsonl, test: DATA/generate.jsonl}}
test_split: test
fewshot_split: train
fewshot_config: {sampler: SAMPLER}
num_fewshot: 5
output_type: generate_until
doc_to_text: "Question: {{story}} What did {{giver}} give away?\\nAnswer:"
doc_to_target: gift
generation_kwargs: {until: ["\\n\\n", "Question:"], max_gen_toks: 32, do_sample: false}
filter_list: [{name: strip, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match, ignore_case: true}]
"""


def make_row(rng: random.Random) -> dict[str, Any]:
    """A problem of about 50 tokens with four whole sentences to choose from."""
    giver, taker = rng.sample(NAMES, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    total, given = rng.randint(20, 60), rng.randint(2, 19)
    left = total - given
    story = (
        f"{giver} went to {place} in the morning with {total} {thing}. There {giver} met {taker}, who had none, and "
        f"gave {taker} {given} of the {thing}."
    )
    answers = [
        f"{giver} has {left} {thing} and {taker} has {given} {thing}.",
        f"{giver} has {total} {thing} and {taker} has {given} {thing}.",
        f"{taker} has {left} {thing} and {giver} has none.",
        f"{giver} has {left + rng.randint(1, 9)} {thing} and {taker} has none.",
    ]
    answer = answers[0]
    rng.shuffle(answers)
    row = {"story": story, "giver": giver, "thing": thing, "gift": f"{giver} gave {given} {thing} to {taker}."}
    return {**row, "choices": answers, "label": answers.index(answer)}


def write_tasks(directory: Path, num_rows: int, num_generate_rows: int, sampler: str) -> None:
    rng = random.Random(0)
    for name, count in (("train", 50), ("choice", num_rows), ("generate", num_generate_rows)):
        rows = [json.dumps(make_row(rng)) + "\n" for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(rows))
    for name, text in (("choice", CHOICE_TASK), ("generate", GENERATE_TASK)):
        (directory / f"{name}.yaml").write_text(text.replace("DATA", str(directory)).replace("SAMPLER", sampler))


def evaluate(model: LM, task: str, directory: Path, limit: int | None = None) -> dict[str, Any]:
    """The task's metrics, the model's answer to each request, and the seconds of the model's own call.

    `cpu_seconds` are the sum of all threads. Other programs on the same cores change them less.
    """
    seconds = cpu_seconds = 0.0
    for name in ("loglikelihood", "generate_until"):
        method = getattr(type(model), name)

        def timed(requests, method=method):
            nonlocal seconds, cpu_seconds
            began, cpu_began = time.perf_counter(), time.process_time()
            answers = method(model, requests)
            seconds += time.perf_counter() - began
            cpu_seconds += time.process_time() - cpu_began
            return answers

        setattr(model, name, timed)
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    began = time.perf_counter()
    results = simple_evaluate(
        model=model, tasks=[f"nanovllm_{task}"], task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=True
    )
    wall = time.perf_counter() - began
    samples = sorted(results["samples"][f"nanovllm_{task}"], key=lambda sample: sample["doc_id"])
    metrics = {name: value for name, value in results["results"][f"nanovllm_{task}"].items() if "," in name}
    answers = [response[0] for sample in samples for response in sample["resps"]]
    times = {"seconds": seconds, "cpu_seconds": cpu_seconds, "wall": wall}
    return {"metrics": metrics, "answers": answers, "rows": len(samples), **times}


def fastest_batch_size(
    hf: HFLM, task: str, directory: Path, batch_sizes: list[int], num_rows: int
) -> tuple[int, dict[int, float]]:
    """(the batch size with the least CPU seconds on the first rows, the seconds of each)."""
    if len(batch_sizes) == 1:
        return batch_sizes[0], {}
    seconds = {}
    for size in batch_sizes:
        hf.batch_size_per_gpu = size  # the harness reads the size at each call
        seconds[size] = round(evaluate(hf, task, directory, num_rows)["cpu_seconds"], 2)
        print(f"{task}: hf, batch size {size}: {seconds[size]} CPU seconds for {num_rows} rows", flush=True)
    return min(seconds, key=seconds.__getitem__), seconds


def compare(
    task: str, ours: dict[str, Any], hf: HFLM, directory: Path, batch_sizes: list[int], num_probe_rows: int
) -> dict[str, Any]:
    """The task's part of the report.

    Args:
        ours: from `evaluate` with nanovllm.
    """
    hf.batch_size_per_gpu, probes = fastest_batch_size(hf, task, directory, batch_sizes, num_probe_rows)
    theirs = evaluate(hf, task, directory)
    pairs = list(zip(ours["answers"], theirs["answers"], strict=True))
    line: dict[str, Any] = {
        "rows": ours["rows"],
        "requests": len(pairs),
        "hf_probes": probes,
        "hf_batch_size": hf.batch_size_per_gpu,
    }
    for kind in ("seconds", "cpu_seconds", "wall"):
        line[f"{kind}_of_hf"], line[f"{kind}_of_nanovllm"] = round(theirs[kind], 1), round(ours[kind], 1)
        line[f"{kind}_of_ratio"] = round(theirs[kind] / ours[kind], 2)
    line |= {"hf_metrics": theirs["metrics"], "nanovllm_metrics": ours["metrics"]}
    line["is_equal"] = ours["metrics"] == theirs["metrics"]
    if task == "choice":
        line["max_difference"] = max(abs(mine - other) for (mine, _), (other, _) in pairs)
        line["greedy_flags_equal"] = all(mine == other for (_, mine), (_, other) in pairs)
        line["is_equal"] &= line["max_difference"] <= TOLERANCE
    else:
        line["different_texts"] = sum(mine != other for mine, other in pairs)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="directory of a trained model with a tokenizer")
    parser.add_argument("--rows", type=int, default=500, help="rows with choices; 0 leaves them out")
    parser.add_argument("--generate-rows", type=int, default=200, help="rows with generation; 0 leaves them out")
    # hf's "auto" does not work on a CPU: it tries batches of the model's full length until memory ends.
    parser.add_argument("--hf-batch-sizes", default="1,8,16,32", help="batch sizes that hf tries (default 1,8,16,32)")
    parser.add_argument("--probe-rows", type=int, default=8, help="rows on which hf tries them (default 8)")
    parser.add_argument("--random-shots", action="store_true", help="each row has other shots: no shared prefix")
    options = parser.parse_args()
    batch_sizes = [int(size) for size in options.hf_batch_sizes.split(",")]
    counts = {"choice": options.rows, "generate": options.generate_rows}
    tasks = [task for task, rows in counts.items() if rows]
    report: dict[str, Any] = {"threads": torch.get_num_threads(), "random_shots": options.random_shots}
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        write_tasks(
            directory, options.rows or 1, options.generate_rows or 1, "default" if options.random_shots else "first_n"
        )
        print(f"nanovllm, {report['threads']} threads", flush=True)
        ours = NanovllmLM(options.model, dtype="float32", device="cpu", max_model_len=2048)
        found = {task: evaluate(ours, task, directory) for task in tasks}
        report["prefix_cache_hit_rate"] = round(ours.llm.metrics()["prefix_cache_hit_rate"], 3)
        ours.llm.close()
        for task in tasks:
            print(f"{task}: nanovllm {found[task]['rows']} rows in {found[task]['seconds']:.1f} s", flush=True)
        gc.collect()
        hf = HFLM(pretrained=options.model, dtype="float32", device="cpu", batch_size=1)
        for task in tasks:
            line = compare(task, found[task], hf, directory, batch_sizes, min(options.probe_rows, counts[task]))
            report[task] = line
            print(task, json.dumps(line, indent=1), flush=True)
    report["is_equal"] = all(report[task]["is_equal"] for task in tasks)
    print(json.dumps(report))
    sys.exit(not report["is_equal"])


if __name__ == "__main__":
    main()
