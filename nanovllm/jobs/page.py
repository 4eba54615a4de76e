"""The file of a job's report: JSON, or one page of HTML if its name ends in ".html" or ".htm".

The page loads nothing and runs no script. All that comes from data is escaped.
"""

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.jobs.errors import worded
from nanovllm.jobs.figures import import_matplotlib
from nanovllm.jobs.identity import whole_file
from nanovllm.jobs.page_figures import lengths_figures, timeline_figures
from nanovllm.jobs.report import duration_in_words, num_rows_in_words
from nanovllm.jobs.timeline import Lengths, Timeline

_MAX_KINDS_SHOWN = 20
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #c4ccd4; --page: #fff; --card: #f4f6f8;
  --data: #0a66c2; --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3adb8; --line: #4a545e; --page: #14171a;
  --card: #1f2429; --data: #6cb2ff; --bad: #ff8a80 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere }
main { max-width: 1160px; margin: 0 auto; padding: 16px }
h1 { font-size: 1.4rem; line-height: 1.25; margin: .5rem 0 }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p { margin: .5rem 0 } .soft, figcaption small { color: var(--soft); font-size: .875rem } .bad { color: var(--bad) }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)) }
dl.grid { grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); margin: 1rem 0 }
dl div, figure { background: var(--card); border-radius: 8px; padding: 10px 12px; margin: 0 }
dt, dd small { color: var(--soft); font-size: .875rem } dd { margin: 0; font-size: 1.25rem; font-weight: 600 }
dd small { display: block; font-weight: 400 }
figcaption { font-weight: 600 } figcaption small { display: block; font-weight: 400 }
svg { display: block; width: 100%; height: auto; margin-top: 8px } svg * { stroke-linejoin: round }
svg text { font-family: inherit !important }
table { border-collapse: collapse; width: 100% } details table { margin-top: 8px }
th, td { text-align: left; vertical-align: top; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line) }
th { font-weight: 600 } tbody th { font-weight: 400; color: var(--soft); width: 42% }
.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap }
"""


def page_of(
    report: dict[str, Any], title: str, timeline: Timeline | None = None, lengths: Lengths | None = None
) -> str:
    """The page of a report. Equal arguments give equal pages.

    Args:
        report: as docs/jobs.md describes it. A dict under "manifest" gets a table of its own.
        title: the page's heading.
        timeline: of the run, closed; None if no rows ran.
        lengths: of the rows that the run finished.
    """
    numbers = {name: value for name, value in report.items() if name not in ("errors", "manifest")}
    is_dry, num_before = "preflight" in report, report["rows"]["finished_before"]
    sections = [
        _head(report, title),
        _tiles(_dry_tiles(report) if is_dry else _run_tiles(report)),
        "" if is_dry else _section("Timeline", timeline_figures(timeline, num_before, bool(report["tokens"]))),
        _section("Lengths", lengths_figures(lengths)),
        _errors_section(report),
        _section("Numbers of the report", _table(numbers, _number)),
        _section("Manifest", _table(report["manifest"], str)) if report.get("manifest") else "",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


def _text(value: Any) -> str:
    """Text from data, for HTML. A browser would stumble over control characters and halves of surrogate pairs."""
    return html.escape(re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(value)))


def _section(heading: str, body: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{body}\n</section>" if body else ""


# Headline figures


def _head(report: dict[str, Any], title: str) -> str:
    rows = report["rows"]
    if "preflight" in report:
        said = "This was a dry run: it checked rows and wrote no output."
    elif rows["finished"] == rows["total"]:
        said = "All rows are finished." if rows["total"] else "The input has no rows."
    else:
        left = rows["total"] - rows["finished"]
        said = f"{num_rows_in_words(left)} {'is' if left == 1 else 'are'} left. The job is not finished."
    return f"<h1>{_text(title)}</h1>\n<p>{said}</p>"


_Tile = tuple[str, str, str]  # name, value, and a remark


def _tiles(tiles: list[_Tile]) -> str:
    cells = []
    for name, value, remark in tiles:
        kind = ' class="bad"' if name in ("Error rows", "Cannot run") and value != "0" else ""
        cells.append(f"<div><dt>{name}</dt><dd{kind}>{value}{f'<small>{remark}</small>' if remark else ''}</dd></div>")
    return '<dl class="grid">\n' + "\n".join(cells) + "\n</dl>"


def _run_tiles(report: dict[str, Any]) -> list[_Tile]:
    rows, tokens, cost = report["rows"], report["tokens"], report.get("cost")
    before = f"{rows['finished_before']:,} by earlier runs" if rows["finished_before"] else ""
    seconds = sum(report["seconds"].values())
    tiles = [
        ("Finished rows", f"{rows['finished']:,}", f"of {rows['total']:,}{', ' * bool(before)}{before}"),
        ("Error rows", f"{rows['errors']:,}", ""),
        ("Time of this run", duration_in_words(seconds), ""),
    ]
    if tokens:
        hits = f"{tokens['prefix_cache_hit_rate']:.0%} from the prefix cache"
        tiles.append(("Prompt tokens", f"{tokens['prompt']:,}", hits))
        tiles.append(("Prompt tokens per second", f"{tokens['prompt_per_second']:,.0f}", ""))
        if tokens["output"]:
            tiles.append(("Generated tokens", f"{tokens['output']:,}", ""))
            tiles.append(("Generated tokens per second", f"{tokens['output_per_second']:,.0f}", ""))
        tiles.append(("Preemptions", f"{report['preemptions']:,}", ""))
    if cost is not None:
        price = cost["per_million_output_tokens"]
        remark = "" if price is None else f"{price:,.4f} per million generated tokens"
        tiles.append(("Cost of this run", f"{cost['total']:,.4f}", remark))
    return tiles


def _dry_tiles(report: dict[str, Any]) -> list[_Tile]:
    """The headline figures of a dry run."""
    rows, checked = report["rows"], report["preflight"]
    tiles = [
        ("Rows", f"{rows['total']:,}", f"{checked['checked_rows']:,} checked"),
        ("Cannot run", f"{rows['errors']:,}", ""),
        ("Prompt tokens", f"{checked['num_prompt_tokens']:,}", "of the checked rows"),
    ]
    if "estimate" in report and report["estimate"] is None:
        tiles.append(("Estimate", "none", "because no row can run"))
    elif "estimate" in report:
        estimate = report["estimate"]
        start = f"and {duration_in_words(estimate['seconds']['start'])} to start"
        measured = f"measured with {num_rows_in_words(estimate['measured_rows'])}"
        measured += "" if estimate["filled_the_batch"] else ", which never filled the batch: probably too high"
        tiles.append(("Estimated time of the rows", duration_in_words(estimate["seconds"]["rows"]), start))
        tiles.append(("Estimated generated tokens", f"{estimate['output_tokens']:,}", measured))
        if "cost" in estimate:
            tiles.append(("Estimated cost", f"{estimate['cost']:,.4f}", ""))
    return tiles


# Tables


def _errors_section(report: dict[str, Any]) -> str:
    kinds = report["errors"]
    if not kinds:
        return ""

    def table(of: list[dict[str, Any]]) -> str:
        rows = (
            f'<tr><td class="number">{each["rows"]:,}</td><td>{_text(each["error"])}<br>'
            f'<span class="soft">first: {_text(each["first"])}</span></td></tr>'
            for each in of
        )
        head = '<thead><tr><th class="number">Rows</th><th>Error</th></tr></thead>'
        return f"<table>{head}<tbody>\n" + "\n".join(rows) + "\n</tbody></table>"

    shown, others = table(kinds[:_MAX_KINDS_SHOWN]), kinds[_MAX_KINDS_SHOWN:]
    if others:
        num_rows = num_rows_in_words(sum(kind["rows"] for kind in others))
        num_others = f"{len(others):,} other error{'s' * (len(others) > 1)}"
        shown += f"\n<details><summary>{num_rows} with {num_others}</summary>{table(others)}</details>"
    return _section("Rows that cannot run" if "preflight" in report else "Error rows", shown)


def _table(values: dict[str, Any], in_words: Callable[[Any], str]) -> str:
    """A table of nested values, each with its path."""
    breakable = re.compile("(?<=[._/])")
    rows = (
        f'<tr><th scope="row">{breakable.sub("<wbr>", _text(path))}</th><td>{_text(value)}</td></tr>'
        for path, value in _leaves(values, in_words)
    )
    return "<table><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"


def _leaves(value: Any, in_words: Callable[[Any], str], path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, (list, tuple)) and any(isinstance(each, (dict, list, tuple)) for each in value):
        value = dict(enumerate(value, 1))
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(each, in_words, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple, dict)):
        yield path, ", ".join(map(in_words, value)) or "none"
    else:
        yield path, "none" if value is None else in_words(value)


def _number(value: Any) -> str:
    """A number of the report. Small ones have four digits; larger ones are rounded to integers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


# The file of a report


def is_page(path: Path) -> bool:
    """Whether the report is a page."""
    return path.suffix.lower() in (".html", ".htm")


def check_report(path: Path) -> None:
    """Raises a JobError if the report will need a package that is missing."""
    if is_page(path):
        import_matplotlib(path)


def write_report(
    path: Path, report: dict[str, Any], title: str, timeline: Timeline | None, lengths: Lengths | None
) -> None:
    """Writes the report; see page_of for the last three.

    Raises:
        JobError: the file cannot be written.
    """
    text = page_of(report, title, timeline, lengths) if is_page(path) else json.dumps(report, indent=1) + "\n"
    if path.exists() and not path.is_file():  # a terminal or a pipe
        with worded(f"the report {path} cannot be written"):
            path.write_bytes(text.encode())
    else:
        with whole_file(path.resolve()) as file:
            file.write(text.encode())
