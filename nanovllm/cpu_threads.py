"""The number of threads of an engine on a CPU, which follows the machine's load.

OpenMP's threads wait for each other several hundred times per step. If another process takes the CPU of one of them,
the others spin until it is back, which takes milliseconds each time: on two CPUs with one of them busy, two threads
are eight times as slow as one. So there are no more threads than CPUs that no other process uses.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nanovllm.machine import cpu_quotas, cpus, num_cores

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_CHECKS = 0.2  # the system counts CPU time in hundredths of a second
_MIN_SECONDS_TO_JUDGE_BY = 0.05
# This much of a CPU must be free for one more thread: with less, waiting costs more than the thread gains.
_MIN_FREE = 0.7


def choose_num_threads(maximum: int, num_cpus: int, num_busy: float) -> int:
    """As many threads as CPUs are free, from 1 to `maximum`.

    The number is rounded down to few different ones, because oneDNN compiles and keeps kernels for each. A fourth of
    the CPUs always counts as free: otherwise, if two engines share a machine, the second would stay at one thread.

    Args:
        maximum: threads that PyTorch itself would use.
        num_cpus: CPUs that this process may use.
        num_busy: how many of them other processes use, on average.
    """
    maximum = max(1, min(maximum, num_cpus))
    num_free = max(int(num_cpus - num_busy + 1 - _MIN_FREE), num_cpus // 4, 1)
    return maximum if num_free >= maximum else num_free - num_free % max(1, maximum // 8)


class CpuThreads:
    """Context manager that sets PyTorch's number of threads; `adapt` checks it between steps.

    A number that the user chose stays: OMP_NUM_THREADS, MKL_NUM_THREADS, or `torch.set_num_threads` with a number other
    than PyTorch's own. If the system does not report its load, PyTorch's own choice stays, too.

    Args:
        is_used: False makes the `with` block do nothing.
        clock: gives seconds.
        cpu_seconds: gives the CPU seconds of (all processes, this one) so far, or None if they are not known.
    """

    def __init__(
        self,
        is_used: bool = True,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[], tuple[float, float] | None] | None = None,
    ):
        self._is_used, self._clock, self._cpu_seconds = is_used, clock, cpu_seconds or _cpu_seconds
        self._num_cpus = len(cpus())
        self._num_busy = 0.0
        self._measured_at, self._measured = clock(), self._cpu_seconds()
        self._before = self._maximum = 0  # threads; 0 outside the `with` block, and if the number stays
        self._next_check = 0.0
        self._wanted = self._num_logged = 0

    def __enter__(self) -> "CpuThreads":
        if self._is_used:
            before = torch.get_num_threads()
            reason = _users_choice(before)
            if reason:
                self._log(before, reason)
            else:
                self._before, self._maximum = before, max(1, min([before, *cpu_quotas()]))
                self._wanted = self._maximum
                self._next_check = self._clock()
                self.adapt()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before:
            torch.set_num_threads(self._before)
            self._before = self._maximum = 0

    def adapt(self) -> None:
        """Follows the load of the machine; most calls only look at the clock."""
        if not self._maximum or self._clock() < self._next_check:
            return
        self._next_check = self._clock() + _SECONDS_BETWEEN_CHECKS
        self._measure()
        current = torch.get_num_threads()
        wanted_before, self._wanted = self._wanted, choose_num_threads(self._maximum, self._num_cpus, self._num_busy)
        # The number falls at once, but rises only when two checks agree.
        num_threads = self._wanted if self._wanted < current else min(wanted_before, self._wanted)
        if num_threads != current:
            torch.set_num_threads(num_threads)
        self._log(num_threads, f"other processes use {self._num_busy:.1f} of {self._num_cpus} CPUs")

    def _measure(self) -> None:
        now, cpu_seconds = self._clock(), self._cpu_seconds()
        seconds = now - self._measured_at
        if cpu_seconds is None or self._measured is None or seconds < _MIN_SECONDS_TO_JUDGE_BY:
            return
        of_all, of_this = (after - before for after, before in zip(cpu_seconds, self._measured, strict=True))
        self._num_busy = max(0.0, of_all - of_this) / seconds
        self._measured_at, self._measured = now, cpu_seconds

    def _log(self, num_threads: int, reason: str) -> None:
        if num_threads != self._num_logged:
            self._num_logged = num_threads
            logger.info("number of CPU threads is %d: %s", num_threads, reason)


def _users_choice(num_threads: int) -> str | None:
    """How the user chose the number; None if PyTorch chose it."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(name):
            return f"{name} is set"
    if num_threads in (os.cpu_count(), len(cpus()), num_cores()):
        return None
    return "the number was set with torch.set_num_threads"


def _cpu_seconds() -> tuple[float, float] | None:
    """CPU seconds of (all processes on our CPUs, this process) since their start; None if /proc does not show them."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{cpu}" for cpu in cpus()}
        fields = [[int(value) for value in line.split()[1:9]] for line in lines if line.split(maxsplit=1)[0] in ours]
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = sum(sum(values) - values[3] - values[4] for values in fields)
        return ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
    except (OSError, ValueError, IndexError):
        return None
