"""The tests have teeth: each planted bug makes them fail, and without one they pass."""

import shutil
from collections.abc import Callable, Iterator
from multiprocessing.pool import AsyncResult
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant
from support.mutant_run import NUM_PROCESSES, make_pool, run_tests

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent


def copy_package(directory: Path) -> Path:
    copy = directory / "nanovllm"
    shutil.copytree(PACKAGE, copy)  # with what Python compiled: it looks at the files' times
    return copy


def num_places(mutant: Mutant) -> int:
    """How often the text to replace stands in its file."""
    return (PACKAGE / mutant.file).read_text(encoding="utf-8").count(mutant.old)


def plant(mutant: Mutant, directory: Path) -> None:
    """Puts a copy of the package with the bug into `directory`."""
    count = num_places(mutant)
    assert count == 1, f"{mutant.file} holds this text {count} times, not once; update mutants.py:\n{mutant.old}"
    file = copy_package(directory) / mutant.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


@pytest.fixture(scope="module")
def result_of(request, tmp_path_factory) -> Iterator[Callable[[Mutant], tuple[int, str]]]:
    """What came of a mutant's tests; those of the next mutants are begun. Other workers may take the ones after."""
    of_items = (getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__))
    selected = [callspec.params["mutant"] for callspec in of_items if callspec and "mutant" in callspec.params]
    started: dict[str, AsyncResult] = {}
    with make_pool() as pool:

        def result_of(mutant: Mutant) -> tuple[int, str]:
            first = selected.index(mutant)
            for each in selected[first : first + NUM_PROCESSES + 1]:
                if each.name not in started and (each is mutant or num_places(each) == 1):
                    directory = tmp_path_factory.mktemp("mutant")
                    plant(each, directory)
                    started[each.name] = pool.apply_async(run_tests, (directory, list(each.killers)))
            # A process that dies of its mutant leaves no result.
            return started[mutant.name].get(timeout=200)

        yield result_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_bug_is_noticed(mutant, result_of):
    status, output = result_of(mutant)
    # 1 is "tests failed"; anything else means that they could not be run.
    assert status == 1, f"survived, or could not be run ({status}):\n{output[-3000:]}"


def test_without_a_planted_bug_the_same_tests_pass(tmp_path):
    """Otherwise a copy that cannot run would kill every mutant."""
    package = copy_package(tmp_path)
    # Every test runs in the suite as well; here it is the copy that is tried, so one of every fifth file will do.
    killers: dict[str, str] = {}
    for mutant in MUTANTS:
        for killer in mutant.killers:
            if "::" in killer:
                killers[killer.split("::")[0]] = killer
    (package / "copied.py").touch()
    test_copy = tmp_path / "test_copy.py"
    test_copy.write_text("def test_the_copy_is_what_is_found():\n    import nanovllm.copied\n")
    with make_pool() as pool:
        status, output = pool.apply(run_tests, (package.parent, [str(test_copy), *sorted(killers.values())[::5]]))
    assert status == 0, output[-3000:]
