"""The documents' code runs as it is printed, with the bundled model in place of those from the hub.

A page's Python blocks run one after the other in one namespace. A comment below a line that prints is what it prints.
support/pages.py has the comments that mark blocks.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.long import some
from support.pages import BLOCKS, ROOT, Block

from nanovllm import LLM
from nanovllm.demo import MODEL_DIRECTORY

PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.argument("run") is not None]
NOT_RUN = {
    "docs/integrations.md": [f"{name} is not installed" for name in ("lighteval", "trl", "mteb", "ray", "ray")],
    "docs/lora.md": ["it needs a trainer's model"],
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with the context length of a real one."""
    directory = tmp_path_factory.mktemp("stand_in") / "model"
    shutil.copytree(MODEL_DIRECTORY, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40_960}))
    return directory


@pytest.fixture
def hub(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hub name gives the stand-in; files go to the test's own directory. With a GiB of free memory the KV cache
    stays small; in FP8, one of the usual size takes seconds to fill with zeros."""
    monkeypatch.setattr("nanovllm.runner.settings.free_bytes", lambda device: 2**30)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(stand_in))
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def closing_llms() -> Iterator[dict[str, Any]]:
    """Context manager with a namespace for code, which closes the LLMs that the code leaves open."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        yield namespace
    finally:
        for value in namespace.values():
            if isinstance(value, LLM):
                value.close()


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    exec(block.argument("before") or "", namespace)
    printed = io.StringIO()
    # Tracebacks show the page's lines.
    code = compile("\n" * block.line + block.code, str(ROOT / block.page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    if block.expected_output:
        assert printed.getvalue().splitlines() == block.expected_output


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_python_blocks_run(page: str, hub: None):
    with closing_llms() as namespace:
        for block in PYTHON:
            if block.page == page and not block.is_left_out:
                run_python(block, namespace)


@pytest.mark.long
@pytest.mark.parametrize("block", [block for block in PYTHON if block.argument("long")], ids=str)
def test_long_python_blocks_run(block: Block, hub: None):
    with closing_llms() as namespace:
        run_python(block, namespace)


def test_no_block_is_left_out_silently():
    left_out: dict[str, list[str]] = {}
    for block in BLOCKS:
        assert block.language in ("python", "bash", "json", ""), block
        if reason := block.argument("not run"):
            compile(block.code, block.page, "exec")
            left_out.setdefault(block.page, []).append(reason)
        elif block.comment:
            assert any(block.argument(keyword) is not None for keyword in ("before", "long", "run")), block
    assert left_out == NOT_RUN


@pytest.mark.parametrize("block", some(SHELL, *SHELL[:1]), ids=str)
def test_shell_blocks_run(block: Block, tmp_path: Path):
    (tmp_path / "nanovllm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nanovllm "$@"\n')
    (tmp_path / "nanovllm").chmod(0o755)
    paths = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(paths), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        ["bash", "-e", "-c", block.code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    expected = [line[2:] for line in block.code.splitlines() if line.startswith("# ")]
    assert result.stdout.splitlines() == expected
