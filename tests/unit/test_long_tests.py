"""A default run takes some cases of every test, says how many it left out, and `--long` takes all."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from support.long import cover

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_cover_holds_every_combination_of_axes_values(strength):
    cases = [case for case in product(range(4), range(3), range(2)) if case != (3, 2, 1)]
    chosen = [cases[number] for number in cover(cases, strength)]
    for axes in combinations(range(3), strength):
        assert {tuple(case[axis] for axis in axes) for case in chosen} == {
            tuple(case[axis] for axis in axes) for case in cases
        }
    assert len(chosen) == {1: 4, 2: 12, 3: 23}[strength]


MODULE = """
import pytest

pytestmark = pytest.mark.grid(2)
A = pytest.mark.parametrize("a", range(3))

@A
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_of_three_axes(a, b, c, count):
    assert count(2, 5) == 2

@A
def test_of_one_axis(a):
    pass

@pytest.mark.long
@A
def test_that_is_long(a, count):
    assert count(2, 5) == 5

@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.long)])
def test_of_which_one_case_is_long(a):
    pass
"""


def test_the_summary_says_how_many_long_tests_were_left_out(tmp_path):
    (tmp_path / "test_grid.py").write_text(MODULE)

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "conftest", *options, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts sooner
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    shown = run("-p", "xdist.plugin", "-n1")
    assert "14 passed" in shown and "21 long tests were left out; run them with pytest --long" in shown, shown
    shown = run("--long", "-k", "not three_axes")
    assert "8 passed" in shown and "left out" not in shown, shown
