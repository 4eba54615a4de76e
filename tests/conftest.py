"""Options and fixtures that all tests share. Nothing here imports torch."""

import os

import pytest

# The models here are tiny: a second thread would mostly wait, and on a busy machine for a long time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runs", type=int, default=1, help="multiplies the random workloads (default 1)")


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--runs")
