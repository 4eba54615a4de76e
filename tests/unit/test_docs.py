"""The documents: their tables agree with the code, their links and names lead somewhere, and they stay small."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.lora_files import save_for_demo_model
from support.pages import BLOCKS, PAGES, ROOT, Block, blocks_of, prose_of, read

import nanovllm
from nanovllm import LLM, Config, PoolingParams, Preflight, SamplingParams, StructuredOutputsParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobOptions, cli, run_batch
from nanovllm.jobs.parquet import import_pyarrow
from nanovllm.one_pass import OnePass

PACKAGE = Path(nanovllm.__file__).parent


# Sizes, links and names


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


def is_there(name: str) -> bool:
    """Whether a file or directory of the repository has this path, or a path that ends with it."""
    places = (ROOT, ROOT / "docs", ROOT / "tests", PACKAGE, PACKAGE.parent)
    return any((place / name).exists() or any(place.glob(f"*/{name}")) for place in places)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str):
    drawings = "".join(block.code for block in blocks_of(page) if not block.language)
    names = re.findall(r"`([\w./-]+)`", prose_of(page)) + re.findall(r"[\w/]+\.py|\w+/", drawings)
    for name in names:
        if re.search(r"\w\.(py|md|svg)$|^benchmarks/.*\.json$|\w/$", name):
            assert is_there(name), name


@pytest.mark.parametrize("page", PAGES)
def test_extras_exist(page: str):
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for names in re.findall(r"pip\s+install\s+-e\s+\"\.\[([\w,-]+)\]\"", read(page)):
        for name in names.split(","):
            assert re.search(rf"^{name} = \[", declared, re.MULTILINE), name


# Tables


def tables(page: str, header: str) -> list[list[list[str]]]:
    """The tables of a page whose first column has this header: their rows' cells."""
    found = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", read(page), re.MULTILINE)
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()] for rows in found]


def names_and_defaults(rows: list[list[str]]) -> dict[str, Any]:
    return {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows}


def defaults_of(function: Callable) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def test_the_table_of_options_is_that_of_the_code():
    [rows] = tables("docs/api.md", "option")
    documented = names_and_defaults(rows)
    assert documented == {each.name: each.default for each in dataclasses.fields(Config) if each.name != "model"}
    assert documented == defaults_of(LLM.__init__)


def test_the_tables_of_parameters_are_those_of_the_code():
    found = [
        names_and_defaults(rows) for page in ("docs/api.md", "docs/embeddings.md") for rows in tables(page, "parameter")
    ]
    assert found == [defaults_of(each.__init__) for each in (SamplingParams, StructuredOutputsParams, PoolingParams)]


@pytest.mark.parametrize(
    "name", ["RequestOutput", "CompletionOutput", "Loglikelihood", "PreflightSummary", "PoolingRequestOutput"]
)
def test_the_tables_of_outputs_have_their_fields(name: str):
    [rows] = tables("docs/embeddings.md" if name.startswith("Pooling") else "docs/api.md", f"field of `{name}`")
    assert [row[0].strip("`") for row in rows] == [each.name for each in dataclasses.fields(getattr(nanovllm, name))]


def signature_in(code: str) -> list[tuple[str, bool, Any]]:
    """Name, whether it is keyword-only, and default of each parameter in `f(a, b=1, *, c=2)`."""
    [function] = ast.parse(f"def {code}: pass").body
    return parameters_of(eval(f"lambda {ast.unparse(function.args)}: None"))  # type: ignore[attr-defined]


def parameters_of(function: Callable) -> list[tuple[str, bool, Any]]:
    """The same for a function, without `self`."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in parameters if each.name != "self"]


@pytest.mark.parametrize("owner, page", [(LLM, "docs/api.md"), (OnePass, "docs/embeddings.md")])
def test_the_table_of_methods_has_every_method_with_its_parameters(owner: type, page: str):
    [rows] = tables(page, "method")
    documented = [code for row in rows for code in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(code.split("(")[0] for code in documented) == sorted(
        name for name in vars(owner) if name[0] != "_" and name != "engine"
    )
    for code in documented:
        member = getattr(LLM, code.split("(")[0])
        assert isinstance(member, property) or signature_in(code) == parameters_of(member), code


def test_the_parameters_of_preflight_are_those_of_the_code():
    [code] = re.findall(r"^`(Preflight\([^`]*\))`", read("docs/api.md"), re.MULTILINE)
    assert signature_in(code) == parameters_of(Preflight)


def test_the_measured_figures_of_the_readme_are_those_of_the_results():
    lines = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    values = [
        value
        for line in lines
        if "H100" in line.get("device", "")
        for name, value in line.items()
        if name.endswith("tokens_per_second")
    ]
    measured = {number for value in values for number in (value if isinstance(value, list) else [value])}
    [rows] = tables("README.md", "workload, model")
    assert 5 <= len(rows) <= 10
    for row in rows:
        shown = {int(number.replace(",", "")) for cell in row[1:4] for number in re.findall(r"[\d,]+", cell)}
        assert shown and shown <= measured, row


# Shell and JSON

PYTEST_OPTIONS = {"-m", "-n0", "-s", "-k"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hub name gives the bundled model; files go to the test's own directory."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(MODEL_DIRECTORY))
    monkeypatch.chdir(tmp_path)


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command. The commands of a pipeline or a list are separate."""
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
    """Runs a command of jobs as a dry run; a command that verifies one has nothing to verify."""
    if words[0] == "verify":
        assert cli.main(words) == 1, words
        return
    Path("in.jsonl").write_text('{"id": 1, "prompt": "Hello"}\n')
    pytest.importorskip("pyarrow")
    pyarrow, _ = import_pyarrow("reviews.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["Good"], "stars": [5]}), "reviews.parquet")
    for directory in re.findall(r"\w+=(\./[\w-]+)", " ".join(words)):
        save_for_demo_model(directory)
    assert cli.main([*words, "--dry-run"]) == 0, words


def check_script(words: list[str]) -> None:
    """Checks that a script exists, and that its options are in its file or in the benchmarks that it may read them
    from.
    """
    sources = [ROOT / words[0], *(ROOT / "benchmarks").glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for option in re.findall(r"^--([\w-]+)", "\n".join(words), re.MULTILINE):
        assert re.search(rf"\b{option.replace('-', '[-_]')}\b", text), f"{words[0]} has no --{option}"


def check_pytest(words: list[str]) -> None:
    """Checks that the files exist, and the options that are not pytest's own."""
    options = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    for word in words:
        if word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in options, word
        elif word.startswith("-"):
            assert word in PYTEST_OPTIONS, word
        elif word.startswith("tests"):
            assert (ROOT / word).exists(), word


SHELL = [block for block in BLOCKS if block.language == "bash"]


@pytest.mark.parametrize("block", [block for block in SHELL if block.argument("run") is None], ids=str)
def test_shell_blocks_name_commands_and_options_that_exist(block: Block, hub: None):
    for name, *words in commands_of(block):
        if name == "nanovllm":
            check_job(words)
        elif name == "pytest":
            check_pytest(words)
        elif name == "python" and words[0] == "-m":
            assert (PACKAGE.parent / f"{words[1].replace('.', '/')}.py").exists(), words
        elif name == "python":
            check_script(words)
        else:
            assert name in ("pip", "pre-commit"), name


def json_lines(page: str, heading: str, next_heading: str) -> list[str]:
    """The lines of the page's JSON blocks between two headings."""
    text = read(page)
    section = text[text.index(f"## {heading}\n") : text.index(f"## {next_heading}\n")]
    return "".join(re.findall(r"^```json\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)).splitlines()


def test_the_input_rows_of_the_page_on_jobs_can_run(hub: None):
    rows = json_lines("docs/jobs.md", "Input", "Output")
    # Both formats use the same ids, which must differ in one file; and the bundled model has 259 tokens.
    numbered = [re.sub(r'id": ("q\d"|3)', f'id": {number}', row) for number, row in enumerate(rows)]
    Path("in.jsonl").write_text("\n".join(numbered).replace("[1, 450, 7483]", "[1, 45, 74]"))
    report = run_batch(JobOptions("in.jsonl", "out.jsonl", "Qwen/Qwen3-0.6B", dry_run=True))
    assert report["rows"]["total"] == len(rows) >= 5 and report["rows"]["errors"] == 0, report["errors"]


def test_the_output_rows_of_the_page_on_jobs_are_json():
    rows = [json.loads(row) for row in json_lines("docs/jobs.md", "Output", "Kills, failures and resuming")]
    assert len(rows) >= 4 and all({"id", "error"} <= set(row) for row in rows)
