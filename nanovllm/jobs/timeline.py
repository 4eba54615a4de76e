"""What a job's LLM did over time, and the lengths of its rows, in bounded memory: the report's page shows both."""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

_SECONDS_BETWEEN_SAMPLES, _MAX_INTERVALS = 1.0, 1024
# Counters of `LLM.metrics`. Those that end with `of_steps` are sums over the steps.
COUNTERS = (
    "num_prefill_tokens", "num_decode_tokens", "num_preemptions", "num_steps", "num_running_of_steps",
    "num_waiting_of_steps", "kvcache_use_of_steps",
)  # fmt: skip


class Interval(NamedTuple):
    """The time between two samples of `LLM.metrics`.

    Counters grow with each step, so they tell the whole interval. How many rows run at the moment of a sample would
    not: samples are taken when rows finish, so their places are just empty then.

    begin, end: seconds since the timeline began.
    counts: by how much each of COUNTERS grew.
    """

    begin: float
    end: float
    counts: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def per_second(self, counter: str) -> float:
        return self.counts[counter] / self.seconds

    def per_step(self, counter: str) -> float:
        """NaN without steps."""
        return self.counts[counter] / self.counts["num_steps"] if self.counts["num_steps"] else math.nan

    def merged(self, after: "Interval") -> "Interval":
        """This interval and the one after it as one."""
        counts = {name: count + after.counts[name] for name, count in self.counts.items()}
        return Interval(self.begin, after.end, counts)


class Timeline:
    """Samples `LLM.metrics` when it is asked to, at most once per second.

    When it has `max_intervals`, it merges neighbours and samples half as often. So it has the same size for a job of
    minutes and a job of days.

    Args:
        metrics: gives the LLM's metrics. They may be some tenths of a second old.
        max_intervals: an even number.
        clock: gives seconds.

    intervals: each begins where the one before ends.
    """

    def __init__(
        self,
        metrics: Callable[[], dict[str, Any]],
        max_intervals: int = _MAX_INTERVALS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._metrics, self._max_intervals, self._clock = metrics, max_intervals, clock
        self.intervals: list[Interval] = []
        self._seconds_between_samples = _SECONDS_BETWEEN_SAMPLES
        self._began = self._sampled_at = clock()
        self._counts = self._read()

    def _read(self) -> dict[str, float]:
        metrics = self._metrics()
        return {name: metrics[name] for name in COUNTERS}

    def sample(self) -> None:
        """Ends an interval, if the last sample is old enough."""
        now = self._clock()
        if now - self._sampled_at < self._seconds_between_samples:
            return
        self.intervals.append(self._interval(now))
        if len(self.intervals) >= self._max_intervals:
            pairs = zip(self.intervals[::2], self.intervals[1::2], strict=True)
            self.intervals = [one.merged(other) for one, other in pairs]
            self._seconds_between_samples *= 2

    def close(self) -> None:
        """Ends the last interval. A short one joins the one before: replicas tell their last tokens only at their end,
        which would look like a moment of great speed."""
        now = self._clock()
        if now <= self._sampled_at:
            return
        last = self._interval(now)
        if self.intervals and last.seconds < self._seconds_between_samples / 2:
            last = self.intervals.pop().merged(last)
        self.intervals.append(last)

    def _interval(self, now: float) -> Interval:
        before, began = self._counts, self._sampled_at
        self._counts, self._sampled_at = self._read(), now
        counts = {name: count - before[name] for name, count in self._counts.items()}
        return Interval(began - self._began, now - self._began, counts)


class Lengths(NamedTuple):
    """How many texts have how many tokens, in the rows that a run has finished without an error."""

    prompts: Counter[int]
    completions: Counter[int]
