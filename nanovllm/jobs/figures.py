"""The figures of a report's page, as SVG inside HTML. matplotlib is imported only for them.

A figure has no words, only numbers at its axes: the page says what they are. Its colours are CSS variables, so that it
follows the reader's colour scheme.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.jobs.errors import JobError

# Inches, at 72 units per inch. A phone shows a figure in about this width, so that its digits keep their size.
_SIZE = (5.0, 2.3)
_MAX_TICKS = 6
# matplotlib draws with these colours, which the page replaces by its own.
_COLORS = {"#000001": "var(--ink)", "#000002": "var(--line)", "#000003": "var(--data)"}
_INK, _LINE, _DATA = _COLORS
_SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "nanovllm", "font.sans-serif": ["DejaVu Sans"], "font.size": 11,
    "axes.edgecolor": _LINE, "grid.color": _LINE,
    "xtick.color": _LINE, "ytick.color": _LINE, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "ytick.left": False,
    "axes.axisbelow": True, "lines.linewidth": 1.6, "path.simplify_threshold": 0.3,
}  # fmt: skip


def import_matplotlib(path: str | Path) -> Any:
    """Imports and returns matplotlib, without its state of a session (pyplot).

    path: the file that needs it, for the JobError if it is missing.
    """
    try:
        import matplotlib
        import matplotlib.backends.backend_svg
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError as error:
        raise JobError(
            f"{path} is a page with figures, which need matplotlib ({error}); install it (pip install matplotlib), or "
            "choose a name that does not end in .html or .htm, for a report in JSON"
        ) from None
    return matplotlib


def short_number(number: float) -> str:
    """A number in at most about five characters: 12, 1.5k, 20M."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.3g}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit of a time axis of this length, and its seconds."""
    for name, size, at_least in (("days", 86400.0, 4.0), ("hours", 3600.0, 3.0), ("minutes", 60.0, 3.0)):
        if seconds >= at_least * size:
            return name, size
    return "seconds", 1.0


def steps(edges: Sequence[float], values: Sequence[float], name: str, top: float) -> str:
    """A figure of one value per interval; NaN leaves a gap.

    Args:
        edges: where the intervals begin, and the last one's end.
        values: one for each interval.
        name: a prefix of the figure's ids in the page.
        top: the highest value that the figure has room for.
    """

    def draw(axes: Any) -> None:
        axes.step(edges, [*values, values[-1]], where="post", color=_DATA)
        axes.fill_between(edges, [*values, values[-1]], step="post", color=_DATA, alpha=0.15, linewidth=0)

    return _figure(draw, name, edges[-1], top)


def bars(starts: Sequence[int], counts: Sequence[int], name: str) -> str:
    """A histogram: a bar of the same width for each bin, labelled where it starts.

    Args:
        starts: of the bins, and the first number above the last one.
        counts: one for each bin.
        name: a prefix of the figure's ids in the page.
    """

    def draw(axes: Any) -> None:
        axes.bar(range(len(counts)), counts, width=0.9, align="edge", color=_DATA)
        places = range(0, len(starts), -(-len(starts) // _MAX_TICKS))
        axes.set_xticks(places, [short_number(starts[place]) for place in places])

    return _figure(draw, name, len(counts), max(counts), is_counted=True)


def _figure(draw: Any, name: str, right: float, highest: float, is_counted: bool = False) -> str:
    matplotlib = import_matplotlib("the report")
    with matplotlib.rc_context(_SETTINGS):
        figure = matplotlib.figure.Figure(_SIZE, layout="constrained")
        matplotlib.backends.backend_svg.FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(_MAX_TICKS, steps=[1, 2, 5, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda number, _: short_number(number)))
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, steps=[1, 2, 5, 10], integer=is_counted))
        draw(axes)
        axes.grid(axis="y", linewidth=0.6)
        axes.set_xlim(0, right or 1)
        axes.set_ylim(0, highest * 1.05 or 1)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inlined(file.getvalue(), name)


def _inlined(svg: str, name: str) -> str:
    """An SVG file as an element of an HTML page, without its head, its own size and style, and addresses."""
    found = svg[svg.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", found, flags=re.DOTALL)
    found = re.sub(r"(\d\.\d\d)\d+", r"\1", found)  # a hundredth of a unit is enough
    head, rest = found.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None, "matplotlib gives each SVG file a viewBox"
    rest = re.sub(r'( id=")|((?:xlink:)?href="#)|(url\(#)', lambda match: f"{match[0]}{name}-", rest)
    for color, variable in _COLORS.items():
        rest = rest.replace(color, variable)
    return f'<svg {view[0]} aria-hidden="true">{rest.strip()}'
