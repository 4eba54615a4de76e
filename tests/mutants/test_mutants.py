"""The tests have teeth: each planted bug makes them fail, and without one they pass."""

import shutil
from collections.abc import Callable, Iterator
from multiprocessing.pool import AsyncResult
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant
from support.long import long
from support.mutant_run import NUM_PROCESSES, TESTS, make_pool, run_tests

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent


def copy_package(directory: Path) -> Path:
    copy = directory / "nanovllm"
    shutil.copytree(PACKAGE, copy)  # copies compiled files too, which Python checks by the sources' times
    return copy


def num_places(mutant: Mutant) -> int:
    """How often the mutant's file holds the text to replace."""
    file = PACKAGE / mutant.file
    return file.read_text(encoding="utf-8").count(mutant.old) if file.exists() else 0


def plant(mutant: Mutant, directory: Path) -> None:
    """Puts a copy of the package with the bug into `directory`."""
    count = num_places(mutant)
    assert count == 1, f"{mutant.file} holds this text {count} times, not once; update mutants.py:\n{mutant.old}"
    file = copy_package(directory) / mutant.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


@pytest.fixture(scope="module")
def result_of(request, tmp_path_factory) -> Iterator[Callable[[Mutant], tuple[int, str]]]:
    """The result of a mutant's tests. Starts those of the next mutants too; other workers may take later ones."""
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
            # If the mutant kills its process, there is no result.
            return started[mutant.name].get(timeout=200)

        yield result_of


# The first historic bug of each file: of equal keys, a dictionary keeps the last one.
DEFAULT = {mutant.file: mutant for mutant in reversed(MUTANTS) if mutant.is_historic}.values()
CASES = [
    pytest.param(mutant, id=mutant.name.replace(" ", "-"), marks=() if mutant in DEFAULT else pytest.mark.long)
    for mutant in MUTANTS
]


def test_every_mutant_names_one_line_and_tests_that_exist():
    """A default run leaves out most mutants, so this checks that their lines and tests still have these names."""
    tests = {path.name: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    wrong = []
    for mutant in MUTANTS:
        if num_places(mutant) != 1:
            wrong.append(f"{mutant.name}: {mutant.file} holds its old text {num_places(mutant)} times")
        for killer in mutant.killers:
            file, *_, name = killer.partition("[")[0].split("::")
            if f"def {name}(" not in tests.get(file, ""):
                wrong.append(f"{mutant.name}: there is no {killer}")
    assert not wrong, "\n".join(wrong)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) <= 209


@pytest.mark.parametrize("mutant", CASES)
def test_a_planted_bug_is_noticed(mutant, result_of):
    status, output = result_of(mutant)
    # 1 is "tests failed"; anything else means that they could not be run.
    assert status == 1, f"survived, or could not be run ({status}):\n{output[-3000:]}"


@pytest.mark.parametrize("is_default", [True, long(False)])
def test_without_a_planted_bug_the_same_tests_pass(is_default, tmp_path):
    """Otherwise a copy that cannot run would seem to kill every mutant. It runs one test per file; by default, one per
    fifth file that the default mutants name."""
    package = copy_package(tmp_path)
    mutants = DEFAULT if is_default else MUTANTS
    one_of_file = {killer.split("::")[0]: killer for mutant in mutants for killer in mutant.killers}
    step = 5 if is_default else 1
    (package / "copied.py").touch()
    test_copy = tmp_path / "test_copy.py"
    test_copy.write_text("def test_the_copy_is_what_is_found():\n    import nanovllm.copied\n")
    killers = [str(test_copy), *sorted(one_of_file.values())[::step]]
    with make_pool() as pool:
        status, output = pool.apply(run_tests, (package.parent, killers))
    assert status == 0, output[-3000:]
