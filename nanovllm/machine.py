"""The machine's resources that this process may use: CPUs, and memory of a CPU or of a GPU.

On Linux, control groups (versions 1 and 2) may limit the CPUs and the host's memory. A group's limits hold for all
groups below it.
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MEMBERSHIP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cpus() -> set[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def num_cores() -> int:
    """The number of physical cores of these CPUs: hyperthreads of one core name the same siblings."""
    try:
        directories = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology") for cpu in cpus())
        return len({(directory / "thread_siblings_list").read_text() for directory in directories})
    except OSError:
        return len(cpus())


def cpu_quotas() -> list[int]:
    """The quotas of this process's control groups, in CPUs, rounded down."""
    quotas = []
    for group in _control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if int(quota) > 0:
                    quotas.append(int(quota) // int(period))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return quotas


def device_kind(device: str) -> dict[str, str]:
    """The kind of a device: its type ("cpu" or "cuda"), its name, and the instructions that it has.

    device: such as "cpu" or "cuda:0".
    """
    import torch

    if device.startswith("cuda"):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return {"type": "cuda", "name": torch.cuda.get_device_name(device), "instructions": capability}
    return {"type": "cpu", "name": _cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def free_bytes(device: "torch.device") -> int:
    """Free memory of the device, in bytes; on a CPU, within the limits of the system and of the control groups."""
    if device.type == "cuda":
        import torch  # here, because the command answers `--help` without it

        torch.cuda.empty_cache()  # memory that PyTorch holds and does not use is free as well
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = min(free, int(fields["MemAvailable"].split()[0]) * 1024)
    return max(0, min([free, *_free_of_groups()]))


def _free_of_groups() -> Iterator[int]:
    """Bytes that each limited control group has left."""
    for group in _control_groups("memory"):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file "),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
        ):
            try:
                free = int((group / limit).read_text()) - int((group / used).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):  # no such file, or "max"
                continue
            # The system frees cached file pages, such as the checkpoint just read, when memory is short.
            yield free + sum(int(line.split()[1]) for line in lines if line.startswith(cached))


def _control_groups(controller: str) -> Iterator[Path]:
    """The directories of this process's control groups that may limit it, and of those above them.

    In a container the path may be the host's, which does not exist there; the groups above it do.
    """
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS  # version 1 has a tree for each controller
        group = Path(os.path.normpath(f"{root}/{path}"))
        while group != root and root in group.parents:
            yield group
            group = group.parent
        yield root
