"""The tests have teeth: each planted bug makes them fail, and without one they pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

import nanovllm

TESTS = Path(__file__).parent
PACKAGE = Path(nanovllm.__file__).parent


def run(directory: Path, killers: list[str]) -> subprocess.CompletedProcess:
    """Runs tests in a process that finds the copy in `directory` before the installed package."""
    # `-m` puts the working directory first on the path.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]
    return subprocess.run(
        [*command, *(str(TESTS / killer) for killer in killers)],
        cwd=directory,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # starts twice as fast
        capture_output=True,
        text=True,
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "nanovllm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    return copy


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_bug_is_noticed(mutant, package):
    file = package / mutant.file
    source = file.read_text(encoding="utf-8")
    count = source.count(mutant.old)
    assert count == 1, f"{mutant.file} holds this text {count} times, not once; update mutants.py:\n{mutant.old}"
    file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    result = run(package.parent, list(mutant.killers))
    # 1 is "tests failed"; anything else means that they could not be run.
    assert result.returncode == 1, f"survived, or could not be run ({result.returncode}):\n{result.stdout[-3000:]}"


def test_without_a_planted_bug_the_same_tests_pass(package):
    (package / "copied.py").touch()
    probe = "import nanovllm.copied"
    assert subprocess.run([sys.executable, "-c", probe], cwd=package.parent).returncode == 0, "the copy is not found"
    killers = sorted({killer for mutant in MUTANTS for killer in mutant.killers})
    result = run(package.parent, killers)
    assert result.returncode == 0, result.stdout[-3000:]
