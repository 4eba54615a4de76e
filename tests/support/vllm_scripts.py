"""Runs scripts that were written for vLLM, in the test's process or in one of their own."""

import contextlib
import gc
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[1] / "vllm_scripts"


@contextlib.contextmanager
def vllm_names() -> Iterator[ModuleType]:
    """vLLM's names in this process, until the end. A script's changes to sys and to the environment end too."""

    def names() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "vllm"]

    modules = {name: sys.modules[name] for name in names()}
    argv, path, finders, environment = sys.argv, [*sys.path], [*sys.meta_path], {**os.environ}
    try:
        from nanovllm.integrations import vllm

        vllm.install(replace=True)
        yield vllm
    finally:
        for name in names():
            del sys.modules[name]
        sys.modules.update(modules)
        sys.argv, sys.path[:], sys.meta_path[:] = argv, path, finders
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()  # the script's LLM


def run_here(name: str, *arguments: object, **environment: str) -> str:
    """The output of a script of SCRIPTS. It shares this process's imports, so it starts at once."""
    output = io.StringIO()
    with vllm_names() as vllm, contextlib.redirect_stdout(output):
        os.environ.update(environment)
        vllm.main([str(SCRIPTS / f"{name}.py"), *map(str, arguments)])
    return output.getvalue()


def run_alone(name: str, *arguments: object, **environment: str) -> str:
    """The output of a script of SCRIPTS, as the command runs it.

    Raises:
        RuntimeError: it fails; the message is the end of its error output.
    """
    command = [sys.executable, "-m", "nanovllm.integrations.vllm", SCRIPTS / f"{name}.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout
