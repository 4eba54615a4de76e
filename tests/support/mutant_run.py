"""Runs tests against a copy of the package, in a fork of a process that has already imported the slow libraries.

This module does not import the package, so that the fork finds the copy.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.pool import Pool
from pathlib import Path

TESTS = Path(__file__).parent.parent
_PRELOADED = [
    "torch", "pytest", "numpy", "triton", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3", "hypothesis",
]  # fmt: skip


# As many at a time as there are processors, or one per worker of pytest-xdist, because the workers share them.
NUM_PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1


def make_pool() -> Pool:
    """A pool of processes that each run one task."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context.Pool(NUM_PROCESSES, maxtasksperchild=1)


def path_of(killer: str) -> str:
    """A test by its path. It is named by its file's name alone, which only one directory of the tests has."""
    file, *names = killer.split("::")
    [path] = [Path(file)] if Path(file).is_absolute() else TESTS.rglob(file)
    return "::".join([str(path), *names])


def run_tests(directory: Path, killers: list[str]) -> tuple[int, str]:
    """pytest's exit status for the tests, with the package in `directory`, and what it printed."""
    import pytest

    gc.freeze()  # pytest collects garbage at its end, and the libraries are none
    assert not any(name.split(".")[0] == "nanovllm" for name in sys.modules), "the copy would not be found"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # starts sooner
    os.chdir(directory)
    sys.path[:0] = [str(directory), str(TESTS)]
    with tempfile.TemporaryFile() as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", f"--rootdir={TESTS.parent}"]
        plainly = ["-o", "addopts=-m 'not gpu'"]  # without the plugins that the project's own options need
        status = pytest.main([*options, *plainly, *map(path_of, killers)])
        sys.stdout.flush()
        output.seek(0)
        return int(status), output.read().decode(errors="replace")
