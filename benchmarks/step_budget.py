"""Divides a step's time into parts: `python bench.py … --profile DIR`, then `python benchmarks/step_budget.py DIR`.

Reads trace.json and steps.json from the directory. For each part of the steps it prints the milliseconds per step and
the roofline: the least time in which the chip can read the part's bytes, or do its arithmetic, at the rates measured in
the same run. With programmatic dependent launch, a kernel starts before the preceding kernel has ended. Its time counts
from that end, so that the parts add up to the time of the steps. The last line on stdout is JSON.
"""

import json
import sys
from pathlib import Path

from nanovllm.models.cost import Rates, StepCost

# Parts, and texts in the names of their kernels. The first part that matches counts.
PARTS = {
    "DeltaNet": ("_delta_",),  # before attention: _delta_decode_kernel contains decode_kernel
    "attention": ("decode_kernel", "grouped_kernel", "merge_kernel", "_prefill_kernel", "_attend_prompts_kernel",
                  "decode_fp8_kernel", "flash_fwd"),
    "matrix products": (
        "nvjet", "splitKreduce", "gemm", "gemv", "_single_row_linear_kernel", "_block_product_kernel",
        "_fused_product_kernel", "_gate_up_kernel", "_down_kernel", "_ordered_product_kernel",
    ),
    "adapters": ("_shrink_kernel", "_expand_kernel"),
    "routing": ("_router_kernel", "_top_experts_kernel", "_pairs_kernel", "_combine_kernel"),
    "sampling": (
        "_allow_kernel", "_edit_and_count_kernel", "_penalise_kernel", "_filter_kernel", "_best_of_part_kernel",
        "_best_part_kernel", "_logprobs_of_part_kernel", "_logprobs_of_row_kernel",
    ),
    "norms, rotation, store, SiLU": (
        "_norm_kernel", "_store_kernel", "_store_fp8_kernel", "_act_and_mul_kernel", "_quantize_rows_kernel",
        "_quantize_row_blocks_kernel", "_sums_of_squares_kernel",
    ),
}  # fmt: skip
REST, IDLE = "the rest", "idle"


def part_of(kernel: str) -> str:
    return next((part for part, names in PARTS.items() if any(name in kernel for name in names)), REST)


def times_of_parts(events: list[dict]) -> dict[str, float]:
    """Microseconds of each part between the first kernel's start and the last one's end."""
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_gpu:
        raise SystemExit("the trace holds no kernels of a GPU; profile a run on one")
    on_gpu.sort(key=lambda event: event["ts"] + event["dur"])
    times = dict.fromkeys((*PARTS, REST, IDLE), 0.0)
    last_end = min(event["ts"] for event in on_gpu)
    for event in on_gpu:
        end = event["ts"] + event["dur"]
        begin = max(event["ts"], last_end)
        times[IDLE] += begin - last_end
        times[part_of(event["name"])] += end - begin
        last_end = end
    return times


def rooflines(steps: dict[str, float]) -> dict[str, float]:
    """Seconds per step that each part takes at least.

    Args:
        steps: the contents of steps.json, which `write_profile` writes.
    """
    rates = Rates(
        steps["bytes_per_second"], steps["matrix_operations_per_second"], steps["fp8_matrix_operations_per_second"]
    )
    cost = StepCost(
        weight_bytes=steps["weight_bytes"],
        kv_bytes=steps["key_value_bytes"],
        product_flop=steps["matrix_operations"],
        fp8_product_flop=steps["fp8_matrix_operations"],
        attention_flop=steps["score_operations"],
        state_bytes=steps["state_bytes"],
    )
    return {
        "attention": cost.kv_bytes / rates.bandwidth + cost.attention_flop / rates.products,
        "matrix products": max(cost.weight_bytes / rates.bandwidth, cost.product_seconds(rates)),
        "DeltaNet": cost.state_bytes / rates.bandwidth,
        "sampling": steps["logit_bytes"] / rates.bandwidth,
    }


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python benchmarks/step_budget.py DIR, with the DIR of bench.py --profile DIR")
    directory = Path(sys.argv[1])
    times = times_of_parts(json.loads((directory / "trace.json").read_text())["traceEvents"])
    steps = json.loads((directory / "steps.json").read_text())
    min_seconds = rooflines(steps)
    report = {
        part: {"ms": time / steps["num_steps"] / 1e3, "roofline_ms": min_seconds.get(part, 0.0) * 1e3}
        for part, time in times.items()
    }
    print(f"{steps['num_steps']} steps, {steps['mean_rows']:.0f} rows, {steps['key_value_bytes'] / 1e9:.1f} GB of keys")
    print(f"{'part':30} {'ms':>8} {'roofline':>8}")
    for part, figures in report.items():
        print(f"{part:30} {figures['ms']:8.3f} {figures['roofline_ms']:8.3f}")
    print(json.dumps({"steps": steps, "parts": report}))


if __name__ == "__main__":
    main()
