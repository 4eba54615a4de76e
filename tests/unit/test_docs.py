"""The documents: their code runs, their tables agree with the code, their links lead somewhere, and they stay small.

A page's Python blocks run one after the other in one namespace. A hub name gives the bundled model. A comment above a
block, which readers do not see, says more about it:

    <!-- before: CODE -->       runs before the block
    <!-- long: REASON -->       runs alone, with --long
    <!-- not run: REASON -->    is only compiled; NOT_RUN lists these
    <!-- run -->                a shell block that runs; of others, only the commands' options are checked

A comment below a line that prints is what it prints.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nanovllm
from nanovllm import LLM, Config, Preflight, SamplingParams, StructuredOutputsParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobOptions, cli, run_batch

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
MAX_BYTES = {"README.md": 14_000, "docs/performance.md": 15_000}
NOT_RUN = {
    "docs/integrations.md": [
        "lighteval is not installed", "trl is not installed", "ray is not installed",
    ],
}  # fmt: skip


class Block(NamedTuple):
    """A block of code: its language, the comment above it, and the line of the page that it begins at."""

    page: str
    line: int
    language: str
    comment: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def argument(self, keyword: str) -> str | None:
        """What follows a keyword in the comment; None without it."""
        found = re.fullmatch(rf"{keyword}:?(.*)", self.comment, re.DOTALL)
        return found and found[1].strip()

    @property
    def expected_output(self) -> list[str]:
        """The comments below lines that print."""
        expected: list[str] = []
        prints = False
        for line in self.code.splitlines():
            if not line.lstrip().startswith("#"):
                prints = "print(" in line or (prints and not line.strip())
            elif prints:
                expected.append(line.strip()[2:])
        return expected


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    pattern = r"(?:<!-- ((?:(?!-->).)*?)\s*-->\n)?^```(\w*)\n(.*?)^```$"
    text = read(page)
    return [
        Block(page, text.count("\n", 0, found.start(3)), found[2], (found[1] or "").strip(), found[3])
        for found in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def prose_of(page: str) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


# Sizes and links


@pytest.mark.parametrize("page", MAX_BYTES)
def test_pages_that_a_newcomer_reads_stay_short(page: str):
    assert len(read(page).encode()) <= MAX_BYTES[page]


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page: str):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str):
    drawings = "".join(block.code for block in blocks_of(page) if not block.language)
    names = re.findall(r"`([\w./-]+)`", prose_of(page)) + re.findall(r"[\w/]+\.py|\w+/", drawings)
    for name in names:
        if re.search(r"\w\.(py|md|svg)$|^benchmarks/.*\.json$|\w/$", name):
            assert is_there(name), name


def is_there(name: str) -> bool:
    """Whether a file or directory of the repository has this path, or a path that ends with it."""
    places = (ROOT, ROOT / "docs", ROOT / "nanovllm", ROOT / "tests")
    return any((place / name).exists() or any(place.glob(f"*/{name}")) for place in places)


# Tables


def table(page: str, header: str) -> list[list[str]]:
    """The rows of the only table of a page whose first column has this header."""
    [found] = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", read(page), re.MULTILINE)
    return [re.split(r" \| ", row.strip("| ")) for row in found.splitlines()]


def names_and_defaults(rows: list[list[str]]) -> dict[str, Any]:
    return {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows}


def defaults_of(function: Callable) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def test_the_table_of_options_is_that_of_the_code():
    documented = names_and_defaults(table("docs/api.md", "option"))
    assert documented == {each.name: each.default for each in dataclasses.fields(Config) if each.name != "model"}
    assert documented == defaults_of(LLM.__init__)


@pytest.mark.parametrize("params, place", [(SamplingParams, 0), (StructuredOutputsParams, 1)])
def test_the_tables_of_parameters_are_those_of_the_code(params: type, place: int):
    tables = re.findall(r"^\| parameter \|.*\n\|[-|]+\n((?:\|.*\n)+)", read("docs/api.md"), re.MULTILINE)
    rows = [re.split(r" \| ", row.strip("| ")) for row in tables[place].splitlines()]
    assert names_and_defaults(rows) == defaults_of(params.__init__)


@pytest.mark.parametrize("name", ["RequestOutput", "CompletionOutput", "Loglikelihood", "PreflightSummary"])
def test_the_tables_of_outputs_have_their_fields(name: str):
    documented = [row[0].strip("`") for row in table("docs/api.md", f"field of `{name}`")]
    assert documented == [each.name for each in dataclasses.fields(getattr(nanovllm, name))]


def signature_in(code: str) -> list[tuple[str, bool, Any]]:
    """Name, whether it is keyword-only, and default of each parameter in `f(a, b=1, *, c=2)`."""
    [function] = ast.parse(f"def {code}: pass").body
    found = inspect.signature(eval(f"lambda {ast.unparse(function.args)}: None"))  # type: ignore[attr-defined]
    return [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in found.parameters.values()]


def test_the_table_of_methods_has_every_method_with_its_parameters():
    cells = [row[0] for row in table("docs/api.md", "method")]
    documented = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    public = [name for name in vars(LLM) if not name.startswith("_")]
    assert sorted(code.split("(")[0] for code in documented) == sorted(public)
    for code in documented:
        member = getattr(LLM, code.split("(")[0])
        if not isinstance(member, property):
            parameters = list(inspect.signature(member).parameters.values())[1:]
            actual = [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in parameters]
            assert signature_in(code) == actual, code


def test_the_preflight_line_has_its_parameters():
    [code] = re.findall(r"^`Preflight(\([^`]*\))`", read("docs/api.md"), re.MULTILINE)
    actual = list(inspect.signature(Preflight).parameters.values())
    assert signature_in(f"f{code}") == [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in actual]


# Python


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
    """Every hub name gives the stand-in; files go to a directory of the test's own."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(stand_in))
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def closing_llms(namespace: dict[str, Any]) -> Iterator[None]:
    """Context manager that closes the LLMs which a page leaves open."""
    try:
        yield
    finally:
        for value in namespace.values():
            if isinstance(value, LLM):
                value.close()


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    exec(block.argument("before") or "", namespace)
    printed = io.StringIO()
    # The page's lines, for tracebacks.
    code = compile("\n" * block.line + block.code, str(ROOT / block.page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    if block.expected_output:
        assert printed.getvalue().splitlines() == block.expected_output


PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_python_blocks_run(page: str, hub: None):
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with closing_llms(namespace):
        for block in PYTHON:
            if block.page == page and block.argument("long") is None and block.argument("not run") is None:
                run_python(block, namespace)


@pytest.mark.long
@pytest.mark.parametrize("block", [block for block in PYTHON if block.argument("long")], ids=str)
def test_long_python_blocks_run(block: Block, hub: None):
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with closing_llms(namespace):
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


# Shell and JSON

SHELL = [block for block in BLOCKS if block.language == "bash"]
PYTEST_OPTIONS = {"-m", "-n0", "-s", "-k"}


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command; those of a pipeline or a list of commands apart."""
    commands: list[list[str]] = [[]]
    for line in block.code.replace("\\\n", " ").splitlines():
        for word in shlex.split(line, comments=True):
            if word in ("&&", "|"):
                commands.append([])
            else:
                commands[-1].append(word)
        commands.append([])
    return [words for words in commands if words]


def check_job(words: list[str]) -> None:
    """Runs a command of jobs as a dry run."""
    Path("in.jsonl").write_text('{"id": 1, "prompt": "Hello"}\n')
    assert cli.main([*words, "--dry-run"]) == 0, words


def check_script(words: list[str]) -> None:
    """A script exists, and so do its options, in its file or in the benchmarks that it may read them from."""
    sources = [ROOT / words[0], *(ROOT / "benchmarks").glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for option in re.findall(r"^--([\w-]+)", "\n".join(words), re.MULTILINE):
        assert re.search(rf"\b{option.replace('-', '[-_]')}\b", text), f"{words[0]} has no --{option}"


def check_pytest(words: list[str]) -> None:
    """The files exist, and so do the options that are not pytest's own."""
    options = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    for word in words:
        if word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in options, word
        elif word.startswith("-"):
            assert word in PYTEST_OPTIONS, word
        elif word.startswith("tests"):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("block", [block for block in SHELL if block.argument("run") is None], ids=str)
def test_shell_blocks_name_commands_and_options_that_exist(block: Block, hub: None):
    for name, *words in commands_of(block):
        if name == "nanovllm":
            check_job(words)
        elif name == "pytest":
            check_pytest(words)
        elif name == "python" and words[0] == "-m":
            assert (ROOT / f"{words[1].replace('.', '/')}.py").exists(), words
        elif name == "python":
            check_script(words)
        else:
            assert name in ("pip", "pre-commit"), name


@pytest.mark.parametrize("page", PAGES)
def test_extras_exist(page: str):
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for names in re.findall(r"pip\s+install\s+-e\s+\"\.\[([\w,-]+)\]\"", read(page)):
        for name in names.split(","):
            assert re.search(rf"^{name} = \[", declared, re.MULTILINE), name


def json_lines(page: str, before: str, after: str) -> list[str]:
    """The lines of the page's JSON blocks between two headings."""
    first, last = (read(page).index(f"## {heading}\n") for heading in (before, after))
    lines = read(page)[first:last]
    return "".join(re.findall(r"^```json\n(.*?)^```$", lines, re.MULTILINE | re.DOTALL)).splitlines()


def test_the_input_rows_of_the_page_on_jobs_can_run(hub: None):
    rows = json_lines("docs/jobs.md", "Input", "Output")
    # Both formats name their rows alike; ids must differ, and the bundled model has 259 tokens.
    numbered = [re.sub(r'"(custom_)?id": ("q\d"|3)', rf'"\g<1>id": {n}', row) for n, row in enumerate(rows)]
    Path("in.jsonl").write_text("\n".join(numbered).replace("[1, 450, 7483]", "[1, 45, 74]"))
    report = run_batch(JobOptions("in.jsonl", "out.jsonl", "Qwen/Qwen3-0.6B", dry_run=True))
    assert report["rows"]["total"] == len(rows) >= 5 and report["rows"]["errors"] == 0, report["errors"]


def test_the_output_rows_of_the_page_on_jobs_are_json():
    rows = [json.loads(row) for row in json_lines("docs/jobs.md", "Output", "Kills, failures and resuming")]
    assert len(rows) >= 4 and all({"id", "error"} <= set(row) for row in rows)


@pytest.mark.parametrize("block", [block for block in SHELL if block.argument("run") is not None], ids=str)
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
    assert result.stdout.splitlines()[: len(expected)] == expected
