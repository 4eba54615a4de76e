"""Options and fixtures that all tests share. Nothing here imports torch."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner

pytest.register_assert_rewrite("support")

TESTS = Path(__file__).parent
# For bench.py and benchmarks/. It comes last, so that the tests import an installed package and not the one beside
# them.
sys.path.append(str(TESTS.parent))

# The models here are tiny: a second thread would mostly wait, and on a busy machine for a long time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="runs every grid, run count, mutant and crash test")
    parser.addoption("--runs", type=int, default=1, help="multiplies the random workloads (default 1)")
    parser.addoption("--real-model", help="directory of a trained model, for -m real; see tests/real")


def pytest_configure(config: pytest.Config) -> None:
    # Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported.
    if "not gpu" in config.option.markexpr:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Importing modules whose tests will all be deselected takes seconds.
    name = {"not gpu": "gpu", "not real": "real"}
    directories = {directory for part, directory in name.items() if part in config.option.markexpr}
    return True if collection_path.parent == TESTS and collection_path.name in directories else None


def _in_one_chunk(function: Callable) -> Callable:
    """The same function, whose calls do not reach the end of a chunk of Python's stack.

    Since 3.11, Python keeps frames in chunks of 16 KiB. Where a loop's calls begin beyond the end of a chunk, each one
    takes a new chunk from the system and gives it back. That takes ten times as long as the call, and it made some
    tests of kernels twice as slow. A frame larger than half a MiB gets a chunk of one MiB, and its callees the rest.
    """

    def call(*args: Any) -> Any:
        return function(*args)

    call.__code__ = call.__code__.replace(co_stacksize=2**16)
    return call


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    return _in_one_chunk(runner.pytest_runtest_protocol)(item, nextitem)


# Long tests


NUM_LONG = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked `long`, and the cases of a `grid` that its cover does without. Tests named one by one
    run.
    """
    from support.long import cover

    if config.option.long or any("::" in argument for argument in config.args):
        return
    left_out = {item for item in items if item.get_closest_marker("long")}
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid") and hasattr(item, "callspec") and item not in left_out:
            grids[item.nodeid.partition("[")[0]].append(item)
    for grid in grids.values():
        marker = grid[0].get_closest_marker("grid")
        # pytest gives the cases that share an axis' value the same object.
        chosen = cover([tuple(map(id, item.callspec.params.values())) for item in grid], *marker.args)
        left_out.update(item for number, item in enumerate(grid) if number not in chosen)
    config.stash[NUM_LONG] = len(left_out)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def pytest_collection_finish() -> None:
    from support.interpreter import leave_out_overflow_checks, patch_once_per_launch

    patch_once_per_launch()
    leave_out_overflow_checks()
    freeze_what_lives()
    atexit.register(gc.unfreeze)  # else Triton says at the end that its objects leaked


def freeze_what_lives() -> None:
    """The libraries' objects and the collected tests live to the end. Frozen, they cost a full collection, which some
    tests ask for, no time; otherwise it takes tenths of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A worker of pytest-xdist tells the process that writes the summary.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_long"] = session.config.stash.get(NUM_LONG, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    node.config.stash[NUM_LONG] = getattr(node, "workeroutput", {}).get("num_long", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(NUM_LONG, 0):
        terminalreporter.write_line(f"{count} long tests were left out; run them with pytest --long")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    # Two tests run at a time, but only one on a GPU, because an engine takes most of its memory.
    return 2 if "not gpu" in config.option.markexpr else 0


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """count(default, long): how many runs of something this session makes."""
    option = request.config.option
    return lambda default, long: (long if option.long else default) * option.runs


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Tests import libraries too, whose objects the next module freezes."""
    freeze_what_lives()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Each module of tests starts with one thread, even if the module before it changed their number."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    yield


@pytest.fixture(scope="session", autouse=True)
def sigint() -> Iterator[None]:
    """A shell's background job inherits SIGINT ignored, and Python then installs no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """A command sets the level for its process; this fixture restores it for the next test."""
    logger = logging.getLogger("nanovllm")
    level = logger.level
    yield
    logger.setLevel(level)
