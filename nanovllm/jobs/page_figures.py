"""Which figures a report's page has, and what they are called."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import reduce

from nanovllm.jobs import figures
from nanovllm.jobs.report import num_rows_in_words
from nanovllm.jobs.timeline import Interval, Lengths, Timeline

_MIN_INTERVALS, _MIN_BINS = 3, 6
# 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, …: two bins per power of two.
_BIN_STARTS = [0, 1, *(size for power in range(1, 32) for size in (2**power, 2**power + 2 ** (power - 1)))]
# Caption, counter and remark of each figure of the timeline. Counters of steps are shown as means over them, times a
# factor, and all others per second.
_FIGURES = (
    ("Prefill tokens per second", "num_prefill_tokens", "", 1.0),
    ("Decode tokens per second", "num_decode_tokens", "", 1.0),
    ("Running rows", "num_running_of_steps", " (means over steps); each completion counts", 1.0),
    ("Waiting rows", "num_waiting_of_steps", " (means over steps): read, but not running", 1.0),
    ("KV cache in use", "kvcache_use_of_steps", " percent of its blocks", 100.0),
    (
        "Preemptions per second", "num_preemptions", ": how often a row gave its place in the KV cache to another, or "
        "began again because it shared keys with a broken row", 1.0,
    ),
)  # fmt: skip


def _soft(text: str) -> str:
    return f'<p class="soft">{text}</p>'


def _figure(caption: str, remark: str, svg: str) -> str:
    return f"<figure><figcaption>{caption}<small>{remark}</small></figcaption>\n{svg}\n</figure>"


def timeline_figures(timeline: Timeline | None, num_before: int, was_finished: bool) -> str:
    """The figures of a run's timeline, with what they mean; a sentence if there are none.

    Args:
        timeline: of the run, closed; None if no rows ran.
        num_before: rows that earlier runs finished.
        was_finished: the report is that of an earlier run.
    """
    if timeline is None:
        old = " The job was finished before, and the numbers are those of the run that finished it." * was_finished
        return _soft(f"This run computed no rows, so it has no timeline.{old}")
    intervals = timeline.intervals
    parts = []
    if num_before:
        parts.append(_soft(f"Earlier runs finished {num_rows_in_words(num_before)}. Figures show this run alone."))
    if len(intervals) < _MIN_INTERVALS:
        few = "The rows ran for too short a time, or finished too rarely, for a timeline."
        return "\n".join([*parts, _soft(few)])
    unit, size = figures.time_unit(intervals[-1].end)
    said = f"The horizontal axes show {unit} since the rows began."
    if not all(each.counts["num_steps"] for each in intervals):
        said += " Where a figure has a gap, no step began."
    parts += [_soft(said), '<div class="grid">', *_of_intervals(intervals, size), "</div>"]
    return "\n".join(parts)


def _of_intervals(intervals: list[Interval], size: float) -> Iterator[str]:
    """The figures of a timeline whose unit has `size` seconds. Those that would show only zeros are left out."""
    edges = [0.0, *(each.end / size for each in intervals)]
    whole = reduce(Interval.merged, intervals)
    for caption, counter, said, factor in _FIGURES:
        of = Interval.per_step if counter.endswith("of_steps") else Interval.per_second
        if whole.counts[counter]:
            values = [factor * of(each, counter) for each in intervals]
            highest = max(value for value in values if not math.isnan(value))
            mean = factor * of(whole, counter)
            remark = f"mean {figures.short_number(mean)}, highest {figures.short_number(highest)}{said}"
            top = 100.0 if counter == "kvcache_use_of_steps" else highest
            yield _figure(caption, remark, figures.steps(edges, values, counter, top))


def lengths_figures(lengths: Lengths | None) -> str:
    """Histograms of the lengths of prompts and completions; empty if there are none."""
    found = []
    for name, counts in () if lengths is None else zip(("prompt", "completion"), lengths, strict=True):
        if counts:
            num_texts, num_tokens = counts.total(), sum(length * count for length, count in counts.items())
            mean = num_tokens / num_texts
            remark = f"mean {mean:,.0f} tokens, longest {max(counts):,}, together {num_tokens:,}"
            caption = f"Lengths of {num_texts:,} {name}{'s' * (num_texts > 1)}"
            found.append(_figure(caption, remark, figures.bars(*_bins(counts), name)))
    if not found:
        return ""
    said = (
        "These are the rows that this run finished without an error. The number at a bar's left edge is its shortest "
        "length."
    )
    return "\n".join([_soft(said), '<div class="grid">', *found, "</div>"])


def _bins(counts: Counter[int]) -> tuple[list[int], list[int]]:
    """A histogram: where bins begin, with the end of the last one, and how many texts each bin has."""
    filled: Counter[int] = Counter()
    for length, count in counts.items():
        filled[bisect_right(_BIN_STARTS, length) - 1] += count
    first, end = min(filled), max(filled) + 1
    while end - first < _MIN_BINS:  # a single bar would fill the figure
        first, end = max(first - 1, 0), min(end + 1, len(_BIN_STARTS) - 1)
    return _BIN_STARTS[first : end + 1], [filled[index] for index in range(first, end)]
