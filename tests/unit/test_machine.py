"""Limits of control groups: of both versions, and of the process's own group and those above it."""

import platform
from pathlib import Path

import pytest
import torch

from nanovllm import machine
from nanovllm.machine import cpu_quotas, device_kind, free_bytes

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path, monkeypatch) -> Path:
    """An empty tree of control groups; `membership` beside it says where the process is."""
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("0::/\n")
    return tmp_path / "cgroup"


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def limit_memory(directory: Path, limit: object, used: int, cached: int = 0) -> None:
    stat = f"active_file 7\ninactive_file {cached}"
    write(directory, memory__max=limit, memory__current=used, memory__stat=stat)


def test_the_tightest_group_counts(groups):
    """A job inside a container may have less than the container, or the container less than it promised the job."""
    limit_memory(groups, "max", 5 * GIB)
    limit_memory(groups / "a", 3 * GIB, 2 * GIB)
    limit_memory(groups / "a" / "b", 2 * GIB, GIB // 2)
    before = free_bytes(CPU)
    assert before > 3 * GIB
    for path, expected in (("/a/b", GIB), ("/a", GIB), ("/", before), ("/other", before), ("/a/gone/c", GIB)):
        groups.with_name("membership").write_text(f"0::{path}\n")
        assert abs(free_bytes(CPU) - expected) < (GIB if expected == before else 1), path
    limit_memory(groups / "a" / "b", GIB, GIB // 2)
    groups.with_name("membership").write_text("0::/a/b\n")
    assert free_bytes(CPU) == GIB // 2
    limit_memory(groups / "a" / "b", GIB, GIB + 5)
    assert free_bytes(CPU) == 0


def test_cached_files_are_given_up(groups):
    limit_memory(groups, 2 * GIB, 2 * GIB, cached=GIB)
    assert free_bytes(CPU) == GIB


def test_version_1_has_a_tree_for_each_controller(groups):
    groups.with_name("membership").write_text("9:name=systemd:/x\n4:memory:/x/y\n2:cpu,cpuacct:/x\n0::/\n")
    stat = "inactive_file 3\ntotal_inactive_file 100"
    limits = {"memory__limit_in_bytes": GIB, "memory__usage_in_bytes": GIB // 4, "memory__stat": stat}
    write(groups / "memory" / "x", **limits)
    write(groups / "memory" / "x" / "y", **{**limits, "memory__limit_in_bytes": 2**63 - 4096})  # no limit
    write(groups / "cpu" / "x", cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    write(groups / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert free_bytes(CPU) == GIB - GIB // 4 + 100
    assert cpu_quotas() == [2]


def test_quotas_of_every_group_above_count(groups):
    groups.with_name("membership").write_text("0::/a/b\n")
    write(groups, cpu__max="max 100000")
    write(groups / "a", cpu__max="150000 100000")
    write(groups / "a" / "b", cpu__max="400000 100000")
    assert sorted(cpu_quotas()) == [1, 4]


@pytest.mark.parametrize("path", ["/../../../etc", "/..", "//", "/a/../.."])
def test_a_path_that_leaves_the_tree_is_not_followed(groups, path):
    write(groups, cpu__max="300000 100000")
    write(groups.parent, cpu__max="100000 100000")
    groups.with_name("membership").write_text(f"0::{path}\n")
    assert cpu_quotas() == [3]


def test_a_machine_without_control_groups_has_what_the_system_says(groups):
    groups.with_name("membership").unlink()
    assert cpu_quotas() == [] and free_bytes(CPU) > 0


def test_the_kind_of_a_cpu_is_its_name_and_its_instructions(monkeypatch):
    kind = device_kind("cpu")
    assert kind["type"] == "cpu" and kind["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert kind["name"] in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else kind["name"]

    def fails(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fails)
    assert device_kind("cpu")["name"] == (platform.processor() or platform.machine())
