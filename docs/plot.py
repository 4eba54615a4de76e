"""Draws docs/throughput.svg from docs/measurements: `pip install matplotlib`, then `python docs/plot.py`.

The measurements are what `bench.py --output` wrote, one file a workload; the floor is that of the measured run's own
steps. The peers ran the same workloads on an H200 (2026-11-20), each with its own defaults.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
# Output tokens per second by workload, where there is a figure.
PEERS = {
    "vLLM 0.24.0": {"nano": 23300, "big": 26200, "prefix": 22050, "short": 45300, "one": 590, "nano-8B": 9150},
    "mini-sglang": {"nano": 21900, "big": 23700, "prefix": 22800},
    "nano-vllm": {"nano": 20250, "big": 21300, "prefix": 23700, "short": 28100, "one": 466, "nano-8B": 8500},
}
WORKLOADS = {
    "nano": "nano\n0.6B", "big": "big\n0.6B", "prefix": "prefix\n0.6B", "short": "short\n0.6B", "one": "one\n0.6B",
    "nano-8B": "nano\n8B",
}  # fmt: skip


def main() -> None:
    reports = {name: json.loads((DOCS / "measurements" / f"{name}.json").read_text()) for name in WORKLOADS}
    ours = {name: report["output_tokens_per_second"] for name, report in reports.items()}
    series = {"nanovllm": ours, **PEERS}
    plt.rcParams.update({"svg.hashsalt": "nanovllm", "font.size": 9})
    figure, axes = plt.subplots(figsize=(9, 4))
    width = 0.8 / len(series)
    for index, (name, figures) in enumerate(series.items()):
        for place, workload in enumerate(WORKLOADS):
            if workload in figures:
                at = place - 0.4 + (index + 0.5) * width
                share = figures[workload] / reports[workload]["floor_tokens_per_second"]
                axes.bar(at, share, width * 0.92, color=f"C{index}", label=name if place == 0 else None)
                axes.text(at, share + 0.01, f"{figures[workload]:,.0f}", ha="center", va="bottom", rotation=90, size=7)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(WORKLOADS)), [
        f"{label}\nfloor {reports[name]['floor_tokens_per_second']:,.0f}" for name, label in WORKLOADS.items()
    ])  # fmt: skip
    axes.set_ylim(0, 1.2)
    axes.set_ylabel("of what the chip allows")
    axes.set_title("Output tokens per second on one H200, as a part of the floor", fontsize=10)
    axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, 1.0), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "throughput.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
