"""Draws docs/throughput.svg and docs/growth.svg from benchmarks/results.json; `--table` prints Markdown instead.

    pip install matplotlib && python benchmarks/plot.py
    python benchmarks/plot.py --table --device H100

results.json holds one measurement per line:

- `name`: the workload, with the model and options where they differ from 0.6B in bfloat16.
- `engine` (with its version), `commit` (of nanovllm), `device`, `date` and `how` it was measured.
- The figures, named as in the report of bench.py. A pair is the minimum and the maximum of several runs.

The last line of a name, engine and device counts. The roofline is that of nanovllm's run. The engine "roofline" has
lines for workloads whose roofline no run has measured. Lines with `curve` are from growth.py, and lines with `parts`
from step_budget.py.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).parent.parent / "docs"
ROOFLINE = "roofline"
# Titles by name. "input" marks workloads with far more input than output: their figures are input tokens per second.
WORKLOADS = {
    "nano": "nano, 0.6B", "nano-k20-p95": "nano, 0.6B\ntop-k 20, top-p 0.95", "nano-p95": "nano, 0.6B\ntop-p 0.95",
    "nano-minp05": "nano, 0.6B\nmin-p 0.05", "nano-greedy": "nano, 0.6B\ngreedy", "big": "big, 0.6B",
    "prefix": "prefix, 0.6B", "short": "short, 0.6B", "one": "one, 0.6B", "samples": "samples, 0.6B",
    "classify": "classify, 0.6B\ninput", "docs": "docs, 0.6B\ninput", "ctx4k": "ctx4k, 0.6B", "nano-8B": "nano, 8B",
    "nano-8B-k20-p95": "nano, 8B\ntop-k 20, top-p 0.95", "classify-8B": "classify, 8B\ninput",
    "docs-8B": "docs, 8B\ninput", "nano-8B-fp8": "nano, 8B\nFP8 weights",
    "nano-8B-fp8-fp8cache": "nano, 8B\nFP8 weights and cache", "nano-30B-A3B": "nano, 30B-A3B",
    "nano-8B-2gpus": "nano, 8B\ntwo GPUs", "nano-8B-2gpus-k20-p95": "nano, 8B, two GPUs\ntop-k 20, top-p 0.95",
}  # fmt: skip
# Labels of growth.py's curves: x and y.
CURVES = {
    "requests": ("requests of 32 + 32 tokens", "output tokens per second"),
    "sequences": ("sequences at once, 128 + 256 tokens", "output tokens per second"),
    "prompts": ("tokens of a prompt, one token out", "input tokens per second"),
    "contexts": ("keys of each of 16 sequences", "output tokens per second"),
}
_NUM_COLUMNS = 6


@dataclass(frozen=True)
class Figure:
    """Tokens per second: minimum and maximum of several runs, and the first call's if it is known."""

    low: float
    high: float
    first: float | None = None

    @classmethod
    def of(cls, value: Any, first: float | None = None) -> "Figure | None":
        """value: a number, a pair, or None."""
        if value is None:
            return None
        low, high = value if isinstance(value, list) else (value, value)
        return cls(low, high, first)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return f"{self.low:,.0f}" if self.low == self.high else f"{self.low:,.0f}–{self.high:,.0f}"

    def short(self) -> str:
        """The middle, such as "1,050" or "22.2k"."""
        return f"{self.middle:,.0f}" if self.middle < 10_000 else f"{self.middle / 1000:.3g}k"


def is_input(workload: str) -> bool:
    return WORKLOADS[workload].endswith("input")


def read_results(device: str) -> list[dict[str, Any]]:
    """The measurements on devices whose name contains `device`."""
    return [entry for entry in json.loads(RESULTS.read_text(encoding="utf-8")) if device in entry["device"]]


def figures_of(results: list[dict[str, Any]]) -> dict[str, dict[str, Figure]]:
    """Engine, or the roofline -> workload -> figure. nanovllm comes first."""
    series: dict[str, dict[str, Figure]] = {"nanovllm": {}, ROOFLINE: {}}
    for entry in results:
        engine, name = entry["engine"], entry["name"]
        if name not in WORKLOADS:
            continue
        kind, of_input = ("input", "input_") if is_input(name) else ("output", "")
        first = entry.get(f"first_{kind}_tokens_per_second")
        figure = Figure.of(entry.get(f"{kind}_tokens_per_second"), first)
        if figure is not None:
            series.setdefault(engine, {})[name] = figure
        roofline = Figure.of(entry.get(f"roofline_{of_input}tokens_per_second"))
        if roofline is not None and engine in ("nanovllm", ROOFLINE):
            series[ROOFLINE][name] = roofline
    series[ROOFLINE] = series.pop(ROOFLINE)
    return series


def draw_throughput(series: dict[str, dict[str, Figure]], device: str, plt: Any) -> None:
    """A panel per workload, a bar per engine, the roofline as a line."""
    rooflines = series[ROOFLINE]
    engines = [engine for engine in series if engine != ROOFLINE]
    workloads = [workload for workload in WORKLOADS if workload in series["nanovllm"]]
    num_rows = -(-len(workloads) // _NUM_COLUMNS)
    figure, panels = plt.subplots(num_rows, _NUM_COLUMNS, figsize=(11, 2.3 * num_rows + 0.6), squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    for panel, workload in zip(panels.flat, workloads, strict=False):
        panel.set_axis_on()
        highest = max(series[engine][workload].high for engine in engines if workload in series[engine])
        roofline = rooflines[workload].middle if workload in rooflines else None
        panel.set_ylim(0, 1.15 * max(highest, roofline or 0))
        for place, engine in enumerate(engines):
            if workload in series[engine]:
                draw_bar(panel, place, series[engine][workload], f"C{place}")
        if roofline is not None:
            panel.axhline(roofline, color="black", linewidth=1, linestyle="--")
            text = f"roofline {rooflines[workload].short()}"
            panel.text(len(engines) - 0.5, roofline, text, ha="right", va="bottom", size=7)
        panel.set_xlim(-0.6, len(engines) - 0.4)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.set_title(WORKLOADS[workload], fontsize=8)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{place}", label=engine) for place, engine in enumerate(engines)]
    handles.append(plt.Line2D([], [], color="black", linestyle="--", label="roofline of the chip"))
    handles.append(plt.Line2D([], [], color="black", linewidth=2, label="first call, where measured"))
    figure.suptitle(f"Tokens per second on {device}s, output unless marked as input", fontsize=10)
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(DOCS / "throughput.svg", metadata={"Date": None})


def draw_bar(panel: Any, place: int, figure: Figure, color: str) -> None:
    panel.bar(place, figure.middle, 0.85, color=color)
    if figure.low < figure.high:
        half = figure.high - figure.middle
        panel.errorbar(place, figure.middle, half, color="black", linewidth=0.8, capsize=2)
    if figure.first is not None:
        panel.hlines(figure.first, place - 0.42, place + 0.42, color="black", linewidth=2)
    panel.text(place, figure.high, figure.short(), ha="center", va="bottom", size=7)


def draw_growth(results: list[dict[str, Any]], plt: Any) -> None:
    """A panel per curve, a line per model and its roofline."""
    measured = {(entry["curve"], entry["model"]): entry["points"] for entry in results if "curve" in entry}
    models = list(dict.fromkeys(model for _, model in measured))
    names = [name for name in CURVES if any(name == curve for curve, _ in measured)]
    figure, panels = plt.subplots(1, len(names), figsize=(3 * len(names), 3), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for index, model in enumerate(models):
            points = measured.get((name, model), [])
            places = [point["at"] for point in points]
            speeds = [point["tokens_per_second"] for point in points]
            panel.plot(places, speeds, f"C{index}o-", markersize=3, label=model)
            if points and "roofline" in points[0]:
                panel.plot(places, [point["roofline"] for point in points], f"C{index}--", label="its roofline")
        panel.set(xscale="log", yscale="log", xlabel=CURVES[name][0], ylabel=CURVES[name][1])
        panel.grid(True, which="major", linewidth=0.3)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(DOCS / "growth.svg", metadata={"Date": None})


def print_table(series: dict[str, dict[str, Figure]]) -> None:
    engines = [engine for engine in series if engine != ROOFLINE]
    print("| workload, model | " + " | ".join(engines) + " | roofline | of the roofline |")
    print("|---" * (len(engines) + 3) + "|")
    for workload, title in WORKLOADS.items():
        ours, roofline = series["nanovllm"].get(workload), series[ROOFLINE].get(workload)
        if ours is None:
            continue
        cells = [title.replace("\n", ", ") + (" tokens" if is_input(workload) else "")]
        for engine in engines:
            cell = series[engine].get(workload)
            first = f" (first call {cell.first:,.0f})" if cell is not None and cell.first is not None else ""
            cells.append("" if cell is None else f"{cell}{first}")
        cells += ["", ""] if roofline is None else [str(roofline), f"{ours.middle / roofline.middle:.2f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print a Markdown table instead of drawing")
    parser.add_argument("--device", default="H200", help="part of the device's name (default H200)")
    given = parser.parse_args()
    results = read_results(given.device)
    if given.table:
        print_table(figures_of(results))
        return
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "nanovllm", "svg.fonttype": "none", "font.size": 8})
    draw_throughput(figures_of(results), given.device, plt)
    draw_growth(results, plt)


if __name__ == "__main__":
    main()
