"""The laws of the house that a program can check: CONTRIBUTING.md has all of them."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent
ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in PACKAGE.rglob("*.py"))

VALUES = {
    "accepted", "checks", "config", "logits_processors", "logprobs", "loglikelihood", "lora", "outputs",
    "pooling_outputs", "pooling_params", "prompts", "recommended_sampling", "sampling_checks", "sampling_params",
    "structured_outputs", "token_texts",
}  # fmt: skip
PROCESS = {"child_processes", "cpu_threads", "forks", "garbage_collector", "guard", "machine"}
RUNS_STEPS = {"engine", "runner", "parallel"}
# The rooms that each room may import, besides itself. A room is a package of nanovllm/ or a file beside them.
MAY_IMPORT = {
    "__main__": {"jobs"},
    "jobs": {"public face", "replicas", *VALUES},
    "integrations": {"public face", *VALUES},
    "replicas": {"llm", "models", "child_processes", "guard", "machine", *VALUES},
    "public face": {"llm", "preflight", *VALUES},
    "preflight": {"pooled_rows", "row_stream", "text", "guides", "models", "engine", *VALUES},
    "llm": {
        "one_pass",
        "pooled_rows",
        "row_stream",
        "progress",
        "vllm_engine",
        "text",
        "guides",
        "models",
        *RUNS_STEPS,
        *PROCESS,
        *VALUES,
    },
    "progress": {"engine", *VALUES},
    "vllm_engine": VALUES,
    "one_pass": {"pooled_rows", "row_stream", "text", "engine", *VALUES},
    "row_stream": {"completions", "pooled_rows", "text", "guides", "engine", *VALUES},
    "pooled_rows": {"completions", "text", "models", "engine", *VALUES},
    "completions": {"text", "engine", *VALUES},
    "text": {"models", *VALUES},
    "guides": {"constraints", *VALUES},
    "constraints": {"machine"},
    "parallel": {"runner", "models", "ops", "engine", "child_processes", "machine", *VALUES},
    "runner": {"models", "layers", "attention", "ops", "engine", "machine", *VALUES},
    "engine": {"guard", *VALUES},
    "models": {"layers", "attention", "ops", "demo", "lora"},
    "layers": {"attention", "ops"},
    "attention": {"ops"},
    "ops": set(),
    "demo": set(),
    **{room: {"machine"} for room in PROCESS},
    **{room: VALUES for room in VALUES},
}
# Beside the public face, bench.py and benchmarks/ read a model's config, a step's chunks and the formats that run.
BENCHMARKS_MAY_IMPORT = {"public face", "config", "demo", "integrations", "models", "engine", "runner"}
# Lines of code, without blanks, comments and docstrings.
BUDGETS = {
    # When a request had its first token, rows whose logits a user's functions change, contexts that are scored with
    # several continuations and computed once, and prompts that ask for an image. Layers with a window give their blocks
    # back. Snapshots of recurrent states are planned, taken and found again. Sequences may pool instead of generating.
    # Weights have digests. Each step counts the rows that run and wait, and the blocks that they use. Wrong slots are
    # errors, a step has halves, and a row that shares keys of a broken one begins again.
    # Adapters have versions, places and a way to wait for a slot, and rows of different ones share no keys.
    ("engine",): 1665,
    # Each of its files has imports and signatures of its own, in place of one class with 47 methods. A step has slots
    # and block tables per group of layers. Recurrent states have a budget, tensors and copies.
    # Steps pool hidden states, and without an LM head they have other sizes and another trial. A deterministic start
    # compares bits. Weights have digests. The cache may have canaries, and a step that ran out of memory runs again.
    # An adapter is read and checked, then merged or put into a slot. Entries have adapters, and steps with them have
    # sizes of their own.
    ("runner",): 1865,
    # Each family is a row with the defaults of its config.json, which is read field by field. Qwen3.5's second kind of
    # layer has projections whose rows checkpoints hold in several orders. A model has an LM head, a classification head
    # with its labels, or none, and the files of sentence-transformers say how it pools. A layer may leave its product
    # to its reader. Layers multiply row-invariantly if they are asked to. Each part of a checkpoint's tensor that a
    # model holds has a sum, and ranks' sums make a digest. Adapters are read, checked field by field, merged into
    # weights and taken out again; linear layers have room for others beside their weights.
    ("models", "layers"): 3325,
    # Ranks meet by a deadline, and remove what a driver left that a signal ended. They send sums of their weights, and
    # each has canaries of its own. A row's message has its adapter, and all ranks check an adapter before any changes.
    ("parallel",): 496,
    # A row of one forward pass that kills replicas has an error row of its own class. Deterministic replicas must have
    # the same weights, which are compared as each becomes ready. Each request carries its adapter.
    ("replicas",): 564,
    # text/messages.py takes conversations as OpenAI's clients write them, in the form that each template reads. It
    # refuses images, videos and sounds that are attached to a message. text/chat_template.py finds what a template
    # leaves out, and text/tokenizer.py knows each token's bytes. text/load_tokenizer.py knows when transformers' auto
    # class, which is slow to import, is not needed. progress.py estimates how much of the running prompts is done.
    # Each call has an adapter for all rows or one per row; rows wait for slots and are sorted by adapter.
    ("llm", "progress", "completions", "row_stream", "text"): 1790,
    # A third of it is the signatures of seven methods, whose keywords an editor completes; each takes adapters.
    ("one_pass", "pooled_rows"): 490,
    # constraints.py says which construct of a regular expression llguidance cannot take, and what to do instead. A
    # call refuses structured outputs without llguidance.
    ("guides", "constraints"): 297,
    # Rows that do not depend on others have operations and attention of their own, on CPUs and on GPUs, where products
    # are compared with the library's; digests and canaries have kernels, and so have the products of adapters.
    ("ops", "attention"): 5740,
    # Half of it is the parameters and their checks; accepted.py has a line for each keyword of vLLM's. Parameters may
    # also be dicts, and the options describe themselves in LLM's help. Rows that pool have parameters and outputs too.
    # Two options take vLLM's pooler_config and hf_overrides. An adapter is named by a LoRARequest.
    (*sorted(VALUES), "vllm_engine"): 1860,
    # A chat's row may have tools, documents and a template of its own, and its response_format is heeded or refused.
    # The command explains each option and each mistake, and counts the error rows of the whole job.
    # Data of any shape: named columns make rows, all others come through in two formats, and inputs are many files.
    # Rows of one forward pass have five tasks, three urls, and columns of their own; embeddings keep all their bits.
    # A deterministic job has a manifest; verify reads it, runs rows alone, and names the first token that differs. No
    # job deletes a file that no run of it wrote.
    # The report may be a page: its style, its figures, and the timeline and lengths that they show.
    # Verify counts missing rows, sees rows that moved, and names a changed row's first token and the sample's seed.
    # Rows of all formats may name an adapter; a resumed job must have the same ones.
    ("jobs",): 4025,
}
MAX_FILE, MAX_FUNCTION = 300, 60
LONG_FILES = {
    "llm.py": "two thirds are the docstrings of the public methods",
    "sampling_params.py": "a quarter is the docstring of the parameters, and one line checks each",
    "pooled_rows.py": "each task's way from prompts to requests, and from numbers to outputs",
    "row_stream.py": "prompts on their way in and outputs on their way out share one state",
    "engine/block_manager.py": "admission, growth and release of one pool, and its check of the books",
    "engine/llm_engine.py": "the loop, and all that may happen to an engine between two steps",
    "engine/scheduler.py": "one rule with its state: admission, growth, preemption, commit",
    "models/read_config.py": "the only reader of config.json: each check names its field",
    "runner/model_runner.py": "one device's life cycle, in the order of its life",
    "integrations/ray_data.py": "a third is the docstrings of the columns, the actor and the plan",
    "integrations/vllm.py": "tables of vLLM's names, and the few that need code",
    "models/decoder.py": "every decoder on one page",
    "runner/step_program.py": "one step from its rows to its tokens, eager and captured, in one place",
    "runner/sequence_table.py": "the only maker of a Batch: what is sent, and what is made of it",
}
LONG_FUNCTIONS = {
    "llm.py:__init__": "a line per option",
    "attention/hopper_attend.py:attend_all": "a kernel's loop, whose registers live from end to end",
    "attention/hopper_prompts.py:_attend_prompts_kernel": "a kernel that sets up the memory its three warps share",
    "attention/triton_prompts.py:_prefill_kernel": "a kernel: one loop over tiles of keys",
    "ops/qk_norm_rotate_store.py:_qk_norm_rotate_store_kernel": "a kernel that reads each number once for four uses",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    _, *inside = module.split(".")
    return inside[0] if inside else "public face"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> Iterator[str]:
    """The modules that a file imports, inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name_of(path)} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


MODULES = {module_of(path) for path in FILES}
IMPORTS = {module_of(path): {name for name in imported_modules(path) if name in MODULES} for path in FILES}


def code_lines(path: Path) -> int:
    """Lines that hold more than blanks, comments and docstrings."""
    source, docstrings, lines = path.read_text(encoding="utf-8"), set(), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    skipped = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    )  # fmt: skip
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_no_module_imports_itself_by_a_detour():
    """Imports inside functions and for types alone count too. Attention and the ranks once had such circles."""
    reached = {module: set(imported) for module, imported in IMPORTS.items()}
    for _ in reached:
        reached = {module: found.union(*(reached[each] for each in found)) for module, found in reached.items()}
    assert [module for module, found in reached.items() if module in found] == []


def test_imports_point_downward():
    found: dict[str, set[str]] = {}
    for module, imported in IMPORTS.items():
        found.setdefault(room_of(module), set()).update(map(room_of, imported))
    wrong = {room: rooms - MAY_IMPORT.get(room, set()) - {room} for room, rooms in found.items()}
    assert {room: rooms for room, rooms in wrong.items() if rooms} == {}
    assert MAY_IMPORT.keys() == found.keys(), "a room without a rule, or a rule without a room"


def test_benchmarks_import_what_they_measure():
    paths = [ROOT / "bench.py", *(ROOT / "benchmarks").glob("*.py")]
    imported = {name for path in paths for name in imported_modules(path) if name in MODULES}
    assert set(map(room_of, imported)) == BENCHMARKS_MAY_IMPORT


def test_the_engine_knows_no_torch():
    roots = {name_of(path): {name.split(".")[0] for name in imported_modules(path)} for path in FILES}
    assert [name for name, names in roots.items() if name.startswith("engine/") and "torch" in names] == []


@pytest.mark.parametrize("rooms", BUDGETS, ids=lambda rooms: "+".join(rooms[:3]))
def test_a_room_keeps_to_its_budget_of_lines(rooms):
    """A feature pays for its lines by those that it lets disappear."""
    num_lines = sum(code_lines(path) for path in FILES if room_of(module_of(path)) in rooms)
    assert 0 < num_lines <= BUDGETS[rooms]


def test_long_files_are_listed_with_a_reason():
    long = {name_of(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE}
    assert long == LONG_FILES.keys()


def test_long_functions_are_listed_with_a_reason():
    long = {
        f"{name_of(path)}:{node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= MAX_FUNCTION
    }
    assert long == LONG_FUNCTIONS.keys()


WORDS_TO_AVOID = re.compile(r"\b(anew|meanwhile|nobody|whoever|while this lasts)\b", re.IGNORECASE)


def test_prose_avoids_words_that_make_a_reader_stop():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "bench.py", ROOT / "example.py"]
    paths = [*FILES, *pages, *(ROOT / "benchmarks").glob("*.py")]
    found = {path.name: WORDS_TO_AVOID.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: words for name, words in found.items() if words} == {}


def test_nothing_is_global():
    assert [name_of(path) for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.Global)] == []


def test_private_names_stay_in_their_module():
    """An adapter once called a private method of LLM's text."""
    found = []
    for path in FILES:
        nodes = list(ast.walk(tree_of(path)))
        own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        found += [
            f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"
            for node in nodes
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and node.attr not in own
            if node.attr != "_replace" and ast.unparse(node).split(".")[0] not in ("self", "cls", "os", "sys", "torch")
        ]
    assert found == []


@pytest.mark.parametrize(("page", "limit"), [("README.md", 14_000), ("docs/performance.md", 15_000)])
def test_a_page_stays_short(page, limit):
    assert len((ROOT / page).read_bytes()) <= limit


def test_benchmarking_is_arguments_and_a_report():
    assert len((ROOT / "bench.py").read_text(encoding="utf-8").splitlines()) <= 200
