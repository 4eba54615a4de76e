"""Draws docs/throughput.svg: `pip install matplotlib`, then `python docs/plot.py`. `--table` prints Markdown instead.

Our figures are in docs/measurements/NAME.json, one file per workload, in the format of `bench.py --output`. The
roofline may be that of an earlier run. The other engines' figures stand in docs/measurements/peers.json with how and
when each was measured. There a pair is the lowest and highest of several runs. A workload that has no file of ours yet
is drawn with the earlier figures of `nanovllm at …` in peers.json.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
EARLIER, ROOFLINE = "nanovllm at 1203224", "roofline"
# File or key: what a reader calls it. Input tokens per second where so many more go in than come out.
WORKLOADS = {
    "nano": "nano, 0.6B", "nano-k20-p95": "nano, 0.6B\ntop-k 20, top-p 0.95", "nano-p95": "nano, 0.6B\ntop-p 0.95",
    "nano-minp05": "nano, 0.6B\nmin-p 0.05", "nano-greedy": "nano, 0.6B\ngreedy", "big": "big, 0.6B",
    "prefix": "prefix, 0.6B", "short": "short, 0.6B", "one": "one, 0.6B", "classify": "classify, 0.6B\ninput",
    "docs": "docs, 0.6B\ninput", "nano-8B": "nano, 8B", "nano-8B-k20-p95": "nano, 8B\ntop-k 20, top-p 0.95",
    "classify-8B": "classify, 8B\ninput", "docs-8B": "docs, 8B\ninput", "nano-8B-2gpus": "nano, 8B\ntwo GPUs",
    "nano-8B-2gpus-k20-p95": "nano, 8B, two GPUs\ntop-k 20, top-p 0.95",
}  # fmt: skip
COLUMNS = 6


@dataclass(frozen=True)
class Figure:
    """Tokens per second: of several runs the lowest and the highest, and of the first call where it is known."""

    low: float
    high: float
    first: float | None = None

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return f"{self.low:,.0f}" if self.low == self.high else f"{self.low:,.0f}–{self.high:,.0f}"

    def short(self) -> str:
        """As "1,050" or "22.2k", the middle of a range."""
        return f"{self.middle:,.0f}" if self.middle < 10_000 else f"{self.middle / 1000:.3g}k"


def is_input(workload: str) -> bool:
    return WORKLOADS[workload].endswith("input")


def our_figures(workload: str) -> tuple[Figure, Figure | None] | None:
    """(ours, roofline) from the workload's file, or None if there is none. A run's roofline may be unknown."""
    path = DOCS / "measurements" / f"{workload}.json"
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    kind = "input" if is_input(workload) else "output"
    # Files that precede the first call's figures have output tokens alone.
    rate, first = report[f"{kind}_tokens_per_second"], report.get(f"first_{kind}_tokens_per_second")
    roofline = report.get("roofline_input_tokens_per_second" if is_input(workload) else "roofline_tokens_per_second")
    return Figure(rate, rate, first), None if roofline is None else Figure(roofline, roofline)


def read_figures() -> dict[str, dict[str, Figure]]:
    """Engine, or the roofline → workload → figure. Ours comes first."""
    series: dict[str, dict[str, Figure]] = {"nanovllm": {}}
    for engine, entry in json.loads((DOCS / "measurements" / "peers.json").read_text()).items():
        firsts = entry.get("first_tokens_per_second", {})
        series[engine] = {}
        for workload, value in entry["tokens_per_second"].items():
            low, high = value if isinstance(value, list) else (value, value)
            series[engine][workload] = Figure(low, high, firsts.get(workload))
    earlier = series.pop(EARLIER)
    for workload in WORKLOADS:
        ours = our_figures(workload)
        if ours is not None:
            series["nanovllm"][workload], roofline = ours
            if roofline is not None:
                series[ROOFLINE][workload] = roofline
        elif workload in earlier:
            print(f"no docs/measurements/{workload}.json: drawn with the figure of {EARLIER}", file=sys.stderr)
            series["nanovllm"][workload] = earlier[workload]
    return series


def draw(series: dict[str, dict[str, Figure]]) -> None:
    """A panel per workload, a bar per engine, the roofline as a line."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "nanovllm", "svg.fonttype": "none", "font.size": 8})
    rooflines = series[ROOFLINE]
    engines = [engine for engine in series if engine != ROOFLINE]
    workloads = [workload for workload in WORKLOADS if workload in series["nanovllm"]]
    num_rows = -(-len(workloads) // COLUMNS)
    figure, panels = plt.subplots(num_rows, COLUMNS, figsize=(11, 2.3 * num_rows + 0.6), squeeze=False)
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
    handles = [matplotlib.patches.Patch(color=f"C{place}", label=engine) for place, engine in enumerate(engines)]
    handles.append(matplotlib.lines.Line2D([], [], color="black", linestyle="--", label="roofline of the chip"))
    handles.append(matplotlib.lines.Line2D([], [], color="black", linewidth=2, label="first call, where measured"))
    figure.suptitle("Tokens per second on H200s, output unless marked as input", fontsize=10)
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(DOCS / "throughput.svg", metadata={"Date": None})


def draw_bar(panel, place: int, figure: Figure, color: str) -> None:
    panel.bar(place, figure.middle, 0.85, color=color)
    if figure.low < figure.high:
        half = figure.high - figure.middle
        panel.errorbar(place, figure.middle, half, color="black", linewidth=0.8, capsize=2)
    if figure.first is not None:
        panel.hlines(figure.first, place - 0.42, place + 0.42, color="black", linewidth=2)
    panel.text(place, figure.high, figure.short(), ha="center", va="bottom", size=7)


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
    series = read_figures()
    if parser.parse_args().table:
        print_table(series)
    else:
        draw(series)


if __name__ == "__main__":
    main()
