"""The model that `--real-model` names."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--real-model")
    if given is None:
        pytest.fail("give --real-model=DIRECTORY; tests/real/make_smollm2.py makes one")
    return Path(given)
