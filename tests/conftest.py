"""Options and fixtures that all tests share. Nothing here imports torch."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runs", type=int, default=1, help="multiplies the random workloads (default 1)")


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--runs")
