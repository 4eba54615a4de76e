"""Jobs that are killed: after resuming, every row is there once, with the completion of an uninterrupted run."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.long import long

SCRIPT = Path(__file__).parents[1] / "support" / "job_crashes.py"


def run(*arguments: object) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600 * 60)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_error_rows_of_killed_runs_count_at_every_point():
    assert run("counts").startswith("right: ")


@pytest.mark.parametrize(
    "rows",
    [long([]), long(["--columns"]), ["--tasks"], long(["--deterministic", "--tasks"])],
    ids=["plain", "columns", "tasks", "proof"],
)
def test_a_kill_at_any_call_that_changes_a_file_loses_and_repeats_nothing(count, rows):
    assert run("calls", "--rows", count(6, 12), *rows).startswith("right: ")


def test_a_kill_at_any_moment_loses_and_repeats_nothing(count):
    """With the bundled model; torn files and full disks are among the kills."""
    assert run("moments", "--kills", count(2, 500), "--rows", count(60, 2000), "--seconds", 1.5).startswith("right: ")
