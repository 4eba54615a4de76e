"""The tests have teeth: each planted bug makes them fail, and without one they pass."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

import nanovllm

TESTS = Path(__file__).parent
PACKAGE = Path(nanovllm.__file__).parent


def run(directory: Path, killers: list[str]) -> subprocess.CompletedProcess:
    """Runs tests in a process that finds the copy in `directory` before the installed package."""
    # `-m` puts the working directory first on the path.
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}",
        "-o", "addopts=-m 'not gpu'",  # without the plugins that the project's own options need
    ]  # fmt: skip
    return subprocess.run(
        [*command, *(str(TESTS / killer) for killer in killers)],
        cwd=directory,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # starts twice as fast
        capture_output=True,
        text=True,
    )


def copy_package(directory: Path) -> Path:
    copy = directory / "nanovllm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run_with(mutant: Mutant, directory: Path) -> subprocess.CompletedProcess:
    """Plants the bug in a copy of the package and runs the tests that are to notice it."""
    file = copy_package(directory) / mutant.file
    source = file.read_text(encoding="utf-8")
    count = source.count(mutant.old)
    assert count == 1, f"{mutant.file} holds this text {count} times, not once; update mutants.py:\n{mutant.old}"
    file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    return run(directory, list(mutant.killers))


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[str, Future]:
    """Of every mutant that is to be tested, by name; as many at a time as there are processors."""
    of_items = (getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__))
    selected = [callspec.params["mutant"] for callspec in of_items if callspec and "mutant" in callspec.params]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {mutant.name: pool.submit(run_with, mutant, tmp_path_factory.mktemp("mutant")) for mutant in selected}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_bug_is_noticed(mutant, results):
    result = results[mutant.name].result()
    # 1 is "tests failed"; anything else means that they could not be run.
    assert result.returncode == 1, f"survived, or could not be run ({result.returncode}):\n{result.stdout[-3000:]}"


def test_without_a_planted_bug_the_same_tests_pass(tmp_path):
    """Otherwise a copy that cannot run would kill every mutant."""
    package = copy_package(tmp_path)
    (package / "copied.py").touch()
    probe = "import nanovllm.copied"
    assert subprocess.run([sys.executable, "-c", probe], cwd=package.parent).returncode == 0, "the copy is not found"
    # Every test runs in the suite as well; here it is the copy that is tried, so a few of each file will do.
    killers: dict[str, str] = {}
    for mutant in MUTANTS:
        for killer in mutant.killers:
            if "::" in killer:
                killers[killer.split("::")[0]] = killer
    result = run(package.parent, sorted(killers.values()))
    assert result.returncode == 0, result.stdout[-3000:]
