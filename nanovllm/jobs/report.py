"""The progress of a job while it runs, and its report at the end."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from shlex import quote
from typing import Any

from tqdm import tqdm

from nanovllm.jobs.errors import Errors, kind_in_words
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.timeline import Timeline

logger = logging.getLogger("nanovllm.jobs")

_SECONDS_BETWEEN_LINES, _SECONDS_BETWEEN_RATES = 60.0, 0.5
_MAX_KINDS_SHOWN = 10


class Progress:
    """Shows progress: a line that changes on a terminal, otherwise a line per minute in the log.

    Tokens per second are those since the first row of this run. On a terminal, the remaining time is tqdm's, from the
    rate of the last moments.

    Args:
        num_rows: rows of the job.
        num_finished: those that earlier runs finished.
        metrics: gives the LLM's metrics.
        name: of the command.
        timeline: is sampled as the job goes on, and closed with this object.

    is_enough: whether no more rows should start.
    """

    def __init__(
        self,
        num_rows: int,
        num_finished: int,
        metrics: Callable[[], dict[str, Any]],
        name: str = "run-batch",
        timeline: Timeline | None = None,
    ):
        self._num_rows, self._num_finished, self._num_before = num_rows, num_finished, num_finished
        self._metrics, self._at_start = metrics, metrics()
        self.is_enough = False
        self._timeline = timeline
        self._began = self._shown_at = time.monotonic()
        self._bar = tqdm(total=num_rows, initial=num_finished, unit="row", desc=name, disable=not sys.stderr.isatty())
        if self._bar.disable:
            logger.info("%s: %s of %s rows", name, f"{num_finished:,}", f"{num_rows:,}")

    def update(self, num_finished: int, num_errors: int) -> None:
        """Shows the number of rows that have finished, and of the error rows among them, those of earlier runs
        included."""
        self.sample()
        num_new, self._num_finished, now = num_finished - self._num_finished, num_finished, time.monotonic()
        if now - self._shown_at >= (_SECONDS_BETWEEN_LINES if self._bar.disable else _SECONDS_BETWEEN_RATES):
            self._shown_at = now
            if self._bar.disable:
                logger.info("%s", self._line(num_errors))
            else:
                self._bar.set_postfix_str(self._rates(num_errors), refresh=False)
        self._bar.update(num_new)

    def sample(self) -> None:
        """Samples the timeline, if there is one."""
        if self._timeline is not None:
            self._timeline.sample()

    def _line(self, num_errors: int) -> str:
        seconds = time.monotonic() - self._began
        done, left = self._num_finished - self._num_before, self._num_rows - self._num_finished
        eta = f", {duration_in_words(seconds / done * left)} left" if done else ""
        return f"{self._num_finished:,} of {self._num_rows:,} rows, {self._rates(num_errors)}{eta}"

    def _rates(self, num_errors: int) -> str:
        now, seconds = self._metrics(), max(time.monotonic() - self._began, 1e-9)
        per_second = [
            f"{phase} {(now[name] - self._at_start[name]) / seconds:,.0f} tok/s"
            for phase, name in (("prefill", "num_prefill_tokens"), ("decode", "num_decode_tokens"))
        ]
        parts = [*per_second, f"cache hits {now['prefix_cache_hit_rate']:.0%}", f"memory {_resident_mib():,} MiB"]
        return ", ".join([*parts, f"errors: {num_rows_in_words(num_errors)}"] if num_errors else parts)

    def close(self) -> None:
        self._bar.close()
        if self._timeline is not None:
            self._timeline.close()


def duration_in_words(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def _resident_mib() -> int:
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**20  # bytes, where there is no /proc


def num_rows_in_words(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


class Report:
    """Collects the times and metrics of a run, from its beginning on.

    seconds: by phase.
    metrics: the LLM's at its end; empty without an LLM.
    """

    def __init__(self, options: JobOptions):
        self._options, self._began = options, time.monotonic()
        self.seconds: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that times a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def as_dict(
        self, num_rows: int, num_before: int, num_finished: int, errors: Errors, tail_seconds: float | None = None
    ) -> dict[str, Any]:
        """The report, at the end of the run; docs/jobs.md lists its keys."""
        all_seconds, metrics, price = time.monotonic() - self._began, self.metrics, self._options.price_per_hour
        counts = {"total": num_rows, "finished": num_finished, "finished_before": num_before}
        report: dict[str, Any] = {
            "rows": {**counts, "errors": errors.num_rows}, "errors": errors.by_kind(), "seconds": dict(self.seconds),
            "tail_seconds": tail_seconds, "tokens": {}, "preemptions": metrics.get("num_preemptions", 0),
            "device_seconds": 0.0,
        }  # fmt: skip
        if not metrics:
            return report
        output = metrics["num_output_tokens"]
        report["tokens"] = {
            "prompt": metrics["num_prompt_tokens"],
            "prefix_cache_hit_rate": metrics["prefix_cache_hit_rate"],
            "output": output,
            "prompt_per_second": metrics["num_prompt_tokens"] / max(self.seconds.get("rows", 0.0), 1e-9),
            "output_per_second": output / max(self.seconds.get("rows", 0.0), 1e-9),
        }
        engine = self._options.engine
        num_devices = math.prod((engine.get(f"{kind}_parallel_size") or 1) for kind in ("data", "tensor"))
        report["device_seconds"] = all_seconds * num_devices
        if price is not None:
            total = price * all_seconds / 3600
            report["cost"] = {"total": total, "per_million_output_tokens": total / output * 1e6 if output else None}
        return report


def in_words(report: dict[str, Any]) -> str:
    """The report for a person."""
    rows, tokens, seconds = report["rows"], report["tokens"], report["seconds"]
    if "preflight" in report:
        at_least = "at least " if report["preflight"]["checked_rows"] < rows["total"] else ""
        head = f"{num_rows_in_words(rows['total'])}, of which {at_least}{rows['errors']:,} cannot run"
    else:
        finished = f"{rows['finished']:,} of {rows['total']:,} rows are finished"
        head = f"{finished}, {rows['finished_before']:,} of them by earlier runs"
    lines = [head, "seconds: " + ", ".join(f"{name} {value:,.1f}" for name, value in seconds.items())]
    if tokens:
        generated = f"{tokens['output']:,} generated, {tokens['output_per_second']:,.0f} per second; "
        lines.append(
            f"tokens of this run: {tokens['prompt']:,} of prompts ({tokens['prefix_cache_hit_rate']:.0%} from the "
            f"prefix cache), {tokens['prompt_per_second']:,.0f} per second; {generated * bool(tokens['output'])}"
            f"{report['preemptions']:,} preemptions"
        )
    if "manifest" in report:
        manifest = report["manifest"]["path"]
        lines.append(f"manifest: {manifest}; check it: nanovllm verify {quote(manifest.removesuffix('.manifest'))}")
    tail, num_new = report.get("tail_seconds"), rows["finished"] - rows["finished_before"]
    if tail is not None and num_new >= 100 and tail > max(1.0, 0.05 * seconds["rows"]):
        lines.append(f"the last 1% of the rows took {tail:,.1f} s: a few long rows ran alone at the end")
    if "estimate" in report:
        lines.append(_estimate_in_words(report["estimate"]))
    if "cost" in report:
        cost = report["cost"]
        per_million = cost["per_million_output_tokens"]
        price = "" if per_million is None else f", {per_million:,.4f} per million generated tokens"
        lines.append(f"cost of this run: {cost['total']:,.4f}{price}")
    if report["errors"]:
        if "preflight" not in report:
            lines.append(f"error rows: {rows['errors']:,} of {rows['finished']:,}")
        named, others = report["errors"][:_MAX_KINDS_SHOWN], report["errors"][_MAX_KINDS_SHOWN:]
        lines += [f"  {kind_in_words(kind)}" for kind in named]
        if others:
            num_rows = num_rows_in_words(sum(kind["rows"] for kind in others))
            num_others = f"{len(others):,} other error{'s' * (len(others) > 1)}"
            lines.append(f"  and {num_rows} with {num_others}, which --report writes")
    return "\n".join(lines)


def _estimate_in_words(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "no estimate, because no row can run"
    cost = f", at a cost of {estimate['cost']:,.4f}" if "cost" in estimate else ""
    return (
        f"estimate for the whole job: {duration_in_words(estimate['seconds']['rows'])} for the rows and "
        f"{duration_in_words(estimate['seconds']['start'])} to start, {estimate['output_tokens']:,} generated "
        f"tokens{cost} (measured: {num_rows_in_words(estimate['measured_rows'])}"
        + (")" if estimate["filled_the_batch"] else ", which never filled the batch: probably too high)")
    )
