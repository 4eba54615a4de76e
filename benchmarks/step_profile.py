"""Profiles some steps in the middle of a run; step_budget.py evaluates the files."""

import json
import statistics
from pathlib import Path

import torch

from benchmarks.roofline import config_and_itemsizes, costs_of, device_rates, logged_steps
from benchmarks.workloads import Requests
from nanovllm import LLM, SamplingParams

_NUM_STEPS = 30


def write_profile(llm: LLM, requests: Requests, params: list[SamplingParams], directory: Path) -> None:
    """Writes a trace of 30 steps, for chrome://tracing or Perfetto, and a table of their operators.

    On a GPU it also writes steps.json: means of the bytes and the arithmetic of those steps, and the chip's rates.
    """
    from torch.profiler import ProfilerActivity, profile

    directory.mkdir(parents=True, exist_ok=True)
    engine = llm.engine
    for prompt, of_request in zip(requests.prompts, params, strict=True):
        engine.add_request(prompt, of_request)
    for _ in range(int(statistics.median(requests.max_tokens)) // 2):
        engine.step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with logged_steps(llm) as log, profile(activities=activities) as profiled:
        while len(log.steps) < _NUM_STEPS and not engine.is_finished():
            engine.step()
    engine.reset()
    profiled.export_chrome_trace(str(directory / "trace.json"))
    sort = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    (directory / "operators.txt").write_text(profiled.key_averages().table(sort_by=sort, row_limit=60))
    if torch.cuda.is_available():
        config, itemsize, _ = config_and_itemsizes(llm)
        costs = costs_of(llm, log)
        rates = device_rates(torch.device(engine.info.device))
        mean_rows = statistics.mean(step.num_sampled for step in log.steps)
        steps = {
            "num_steps": len(log.steps),
            "mean_rows": mean_rows,
            "key_value_bytes": statistics.mean(cost.kv_bytes for cost in costs),
            "state_bytes": statistics.mean(cost.state_bytes for cost in costs),
            "score_operations": statistics.mean(cost.attention_flop for cost in costs),
            "weight_bytes": statistics.mean(cost.weight_bytes for cost in costs),
            "matrix_operations": statistics.mean(cost.product_flop for cost in costs),
            "fp8_matrix_operations": statistics.mean(cost.fp8_product_flop for cost in costs),
            "logit_bytes": mean_rows * config.vocab_size * itemsize,
            "bytes_per_second": rates.bandwidth,
            "matrix_operations_per_second": rates.products,
            "fp8_matrix_operations_per_second": rates.fp8_products,
        }
        (directory / "steps.json").write_text(json.dumps(steps) + "\n")
