"""The command `nanovllm`, also `python -m nanovllm`. Its only subcommand so far is `run-batch`."""

import argparse
import difflib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, get_args

from nanovllm import LLM, Config, PoolingParams, SamplingParams, __version__
from nanovllm.jobs import JobError, JobOptions, run_batch
from nanovllm.jobs.columns import LABELS_ADVICE
from nanovllm.jobs.options import OnError, PreflightKind


class Exit(IntEnum):
    """Exit statuses of the command:

    0    no row is an error row (in a dry run, none of the rows that were checked)
    1    the job was refused or failed
    2    the command is wrong
    3    some rows are error rows
    4    all rows are error rows
    130  a signal stopped it; the same command resumes the job
    """

    GOOD = 0
    FAILED = 1
    WRONG_COMMAND = 2
    SOME_ERRORS = 3
    ALL_ERRORS = 4
    INTERRUPTED = 130


_DESCRIPTION = """\
Completes every row of a file. If it is killed, run the same command again: it continues where it stopped.

    nanovllm run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --max-tokens 256

A row is {"id": "a", "prompt": "Hello"} or a line of an OpenAI batch file. Rows of any other shape need an option such
as --prompt "Translate: {text}" for a column "text". docs/jobs.md describes all of them."""
_STOPPED = "stopped; run the same command again to resume"
# The job sets these itself, or has no use for them.
_NOT_OPTIONS = ("self", "model", "seed", "queue_calls", "task")


def _json_object(text: str) -> dict[str, Any]:
    if not isinstance(value := json.loads(text), dict):
        raise ValueError
    return value


def _read(kind: Callable[[str], Any], noun: str, text: str) -> Any:
    try:
        return kind(text)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"must be {noun}, not {text!r:.100}") from None


# How argparse takes a parameter of a type.
_KINDS: dict[str, dict[str, Any]] = {
    "int": {"type": partial(_read, int, "an integer"), "metavar": "NUMBER"},
    "float": {"type": partial(_read, float, "a number"), "metavar": "NUMBER"},
    "str": {"metavar": "TEXT"},
    "bool": {"action": argparse.BooleanOptionalAction},
}


def _json(example: str) -> dict[str, Any]:
    """How argparse takes a JSON object."""
    return {"type": partial(_read, _json_object, f"an object such as {example}"), "metavar": "JSON"}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the option that was probably meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {close[0]}?" if close else "--help lists all options"
            hint = f"labels are parameters: {LABELS_ADVICE}" if name == "--labels" else hint
            kind = "unknown option" if name.startswith("-") else "unexpected argument"
            self.error(f"{kind} {name}; {hint}")
        return found, unknown

    def error(self, message: str) -> Any:
        message = message.removeprefix("argument ").replace(": must", " must", 1)
        self.exit(Exit.WRONG_COMMAND, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, and returns its exit status, which Exit describes. A wrong command raises SystemExit."""
    parser, engine, sampling = _make_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help(sys.stderr)
        return Exit.WRONG_COMMAND
    given = vars(parser.parse_args(arguments))
    if missing := [f"--{name}" for name in ("input", "output", "model") if name not in given]:
        parser.error(f"run-batch needs {', '.join(missing)}; run-batch --help lists all options")
    is_dry_run = given.get("dry_run", False)
    stopped = "stopped" if is_dry_run or given["output"] == "-" else _STOPPED
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    options = {field.name: given[field.name] for field in fields(JobOptions) if field.name in given}
    options["engine"] = {name: given[name] for name in engine if name in given}
    options["params"] = given.get("params", {}) | {name: given[name] for name in sampling if name in given}
    if "\\n" in options.get("prompt", ""):
        logging.getLogger("nanovllm.jobs").warning(
            "--prompt has a backslash and an n; a shell writes a line break as $'\\n'"
        )
    try:
        report = run_batch(JobOptions(**options))
        rows = report["rows"]
        if is_dry_run or rows["finished"] == rows["total"]:
            checked = report.get("preflight", {"num_prompts": 0})
            is_all = rows["errors"] == rows["total"] or 0 < checked["num_prompts"] == checked["num_errors"]
            return (Exit.ALL_ERRORS if is_all else Exit.SOME_ERRORS) if rows["errors"] else Exit.GOOD
        problem, status = stopped, Exit.INTERRUPTED
    except (JobError, ImportError, OSError, TypeError, ValueError, RuntimeError) as error:
        problem, status = str(error), Exit.FAILED
    except KeyboardInterrupt:
        problem, status = stopped, Exit.INTERRUPTED
    print(f"nanovllm run-batch: {problem}", file=sys.stderr)
    return status


def _make_parser() -> tuple[argparse.ArgumentParser, list[str], list[str]]:
    """The parser of the whole command, the names of LLM's options, and those of parameters of rows."""
    description = "Offline LLM inference. nanovllm COMMAND --help lists the options of a command."
    top = _Parser("nanovllm", description=description, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    parser = top.add_subparsers(title="commands", required=True, metavar="COMMAND").add_parser(
        "run-batch",
        help="complete every row of a file",
        usage="nanovllm run-batch -i INPUT -o OUTPUT --model MODEL [options]",
        description=_DESCRIPTION,
        epilog=inspect.cleandoc(Exit.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # JobOptions has the defaults
        allow_abbrev=False,
    )
    meanings, defaults = _meanings(JobOptions), {field.name: field.default for field in fields(JobOptions)}

    def add(*flags: str, group: Any = parser, **how: Any) -> None:
        name = how.get("dest") or flags[-1].strip("-").replace("-", "_")
        meaning = how.get("help") or meanings.get(name, "")
        if how.get("metavar") == "JSON":
            meaning = meaning.replace("False", "false").replace("True", "true")
        how["help"] = _help(meaning, defaults.get(name))
        group.add_argument(*flags, **how)

    add("-i", "--input", nargs="+", action="extend", metavar="FILE")
    add("-o", "--output")
    add("--model", help='a directory, a hub name, or "bundled" for the small model that comes with nanovllm')
    add("--seed", **_KINDS["int"])
    add("--on-error", choices=get_args(OnError))
    add("--restart", action="store_true")
    add("--dry-run", action="store_true")
    add("--estimate", action="store_true")
    add("--preflight", choices=get_args(PreflightKind))
    add("--sync-seconds", dest="seconds_between_syncs", **_KINDS["float"])
    add("--price-per-hour", **_KINDS["float"])
    add("--report", type=Path)
    columns = "Name the columns that make the rows. The output repeats all columns."
    data = parser.add_argument_group("data of any shape", columns)
    for name in ("prompt", *(f"{each}-column" for each in ("prompt", "messages", "id", "query", "document"))):
        add(f"--{name}", group=data, metavar="TEMPLATE" if name == "prompt" else "NAME")
    add("--chat", group=data, action="store_true")
    add("--chat-template-kwargs", group=data, **_json('{"enable_thinking": false}'))
    precedence = "A row's own parameters take precedence. The defaults count where generation_config.json has no value."
    sampling = parser.add_argument_group("sampling of all rows", precedence)
    params_help = """parameters as a JSON object, such as '{"stop": ["\\n"], "max_tokens": null}'; null is None"""
    add("--params", group=sampling, help=params_help, **_json('{"temperature": 0.7}'))
    names = _add_options(sampling, SamplingParams.__init__, _meanings(SamplingParams))
    pooling = parser.add_argument_group("rows of one forward pass", f"They need --task. Labels: {LABELS_ADVICE}")
    task_help = "embed, classify, reward, score or label: what to compute of each row, in place of a completion"
    add("--task", group=pooling, help=task_help, **_KINDS["str"])
    names += ["task", *_add_options(pooling, PoolingParams.__init__, _meanings(PoolingParams))]
    engine = parser.add_argument_group("engine")
    meanings |= _meanings(Config)
    add("--pooler-config", group=engine, **_json('{"pooling_type": "MEAN"}'))
    add("--hf-overrides", group=engine, **_json('{"is_original_qwen3_reranker": true, …}'))
    add("--data-parallel-size", group=engine, help="LLMs, each on GPUs of its own. Default: 1", **_KINDS["int"])
    others = ["data_parallel_size", "pooler_config", "hf_overrides"]
    return top, [*others, *_add_options(engine, LLM.__init__, _meanings(Config))], names


def _add_options(group: Any, function: Callable[..., None], meanings: dict[str, str]) -> list[str]:
    """Adds an option for each parameter of `function` that is a number, a string or a switch; returns their names."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).split(" | ")[0]
        if name not in _NOT_OPTIONS and kind in _KINDS:
            meaning = _help(meanings.get(name, ""), parameter.default)
            group.add_argument(f"--{name.replace('_', '-')}", help=meaning, **_KINDS[kind])
            names.append(name)
    return names


def _meanings(documented: type) -> dict[str, str]:
    """The meaning of each argument, from the docstring of a class; empty if Python runs without docstrings."""
    arguments = (inspect.getdoc(documented) or "").partition("\nArgs:\n")[2]
    found = re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _help(meaning: str, default: Any) -> str:
    """argparse's help for an option. The meaning itself says what a default of None is."""
    if isinstance(default, bool):
        default = "on" if default else "off"
    said = "" if default in (None, MISSING) else f" Default: {default}."
    return f"{meaning.removesuffix('.')}.{said}".replace("%", "%%").replace("−", "-")  # a shell needs ASCII's minus
