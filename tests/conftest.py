"""Options and fixtures that all tests share. Nothing here imports torch."""

import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("support")

# The models here are tiny: a second thread would mostly wait, and on a busy machine for a long time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runs", type=int, default=1, help="multiplies the random workloads (default 1)")
    parser.addoption("--real-model", help="directory of a trained model, for -m real; see tests/real")


def pytest_configure(config: pytest.Config) -> None:
    # Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported.
    if "not gpu" in config.option.markexpr:
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    # Two tests at a time, but one on a GPU, most of whose memory an engine takes.
    return 2 if "not gpu" in config.option.markexpr else 0


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--runs")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Each module of tests starts with one thread, also where the one before changed their number."""
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
    """A command sets the level for its process; the next test has the one before."""
    logger = logging.getLogger("nanovllm")
    level = logger.level
    yield
    logger.setLevel(level)
