"""The command `nanovllm`, also `python -m nanovllm`, with its subcommands `run-batch` and `verify`."""

import argparse
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

from nanovllm import LLM, Config, PoolingParams, SamplingParams, __version__
from nanovllm.jobs import JobError, JobOptions, VerifyOptions, run_batch, verify
from nanovllm.jobs.adapters import by_name, name_and_directory
from nanovllm.jobs.arguments import KINDS, Exit, Parser, add_options, help_of, json_option, meanings_of, numbers, read
from nanovllm.jobs.columns import LABELS_ADVICE
from nanovllm.jobs.options import OnError, PreflightKind
from nanovllm.jobs.verify import verified_in_words

_DESCRIPTION = """\
Completes every row of a file. If it is killed, run the same command again: it continues where it stopped.

    nanovllm run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --max-tokens 256

A row is {"id": "a", "prompt": "Hello"} or a line of an OpenAI batch file. Rows of any other shape need an option such
as --prompt "Translate: {text}" for a column "text". docs/jobs.md describes all of them."""
_DESCRIPTION_OF_VERIFY = """\
Verifies the proof of a job that ran with --deterministic: compares its output, its input, its model and this machine
with the manifest beside the output, and runs some rows again, each alone. They must give the same bytes.

    nanovllm verify out.jsonl --sample 50"""
_ADAPTERS = """a LoRA adapter that peft saved, for rows with "adapter": "NAME"; takes several, and may be repeated"""
# What a job or a verification raises if it is refused or fails.
_PROBLEMS = (JobError, ImportError, OSError, TypeError, ValueError, RuntimeError)
_COLUMNS = ("prompt", "messages", "id", "query", "document", "adapter")
_STOPPED = "stopped; run the same command again to resume"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, and returns its exit status, which is one of Exit. A wrong command raises SystemExit."""
    top, engine, sampling = _make_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        top.print_help(sys.stderr)
        return Exit.WRONG_COMMAND
    given = vars(top.parse_args(arguments))
    is_job = given.pop("command") == "run-batch"
    if missing := [f"--{name}" for name in ("input", "output", "model") if is_job and name not in given]:
        top.error(f"run-batch needs {', '.join(missing)}; run-batch --help lists all options")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    return _run_batch(given, engine, sampling) if is_job else _verify(given)


def _run_batch(given: dict[str, Any], engine: list[str], sampling: list[str]) -> int:
    """Exit statuses of the command:

    0    no row is an error row (in a dry run, none of the rows that were checked)
    1    the job was refused or failed
    2    the command is wrong
    3    some rows are error rows
    4    all rows are error rows
    130  a signal stopped it; the same command resumes the job
    """
    # engine, sampling: the names of LLM's options, and those of parameters of rows.
    is_dry_run = given.get("dry_run", False)
    stopped = "stopped" if is_dry_run or given["output"] == "-" else _STOPPED
    options = {field.name: given[field.name] for field in fields(JobOptions) if field.name in given}
    options["engine"] = {name: given[name] for name in engine if name in given}
    options["params"] = given.get("params", {}) | {name: given[name] for name in sampling if name in given}
    if "\\n" in options.get("prompt", ""):
        logging.getLogger("nanovllm.jobs").warning(
            "--prompt has a backslash and an n; a shell writes a line break as $'\\n'"
        )
    try:
        if "adapters" in options:
            options["adapters"] = by_name(options["adapters"])
        report = run_batch(JobOptions(**options))
        rows = report["rows"]
        if is_dry_run or rows["finished"] == rows["total"]:
            checked = report.get("preflight", {"num_prompts": 0})
            is_all = rows["errors"] == rows["total"] or 0 < checked["num_prompts"] == checked["num_errors"]
            return (Exit.ALL_ERRORS if is_all else Exit.SOME_ERRORS) if rows["errors"] else Exit.GOOD
        problem, status = stopped, Exit.INTERRUPTED
    except _PROBLEMS as error:
        problem, status = str(error), Exit.FAILED
    except KeyboardInterrupt:
        problem, status = stopped, Exit.INTERRUPTED
    print(f"nanovllm run-batch: {problem}", file=sys.stderr)
    return status


def _verify(given: dict[str, Any]) -> int:
    """Exit statuses of the command:

    0    all is equal
    1    nothing was verified: no manifest, an unusable one, or an error
    2    the command is wrong
    3    there are differences; standard output names each
    130  a signal stopped it
    """
    try:
        options = VerifyOptions(**given)
    except (TypeError, ValueError) as error:
        print(f"nanovllm verify: {error}", file=sys.stderr)
        return Exit.WRONG_COMMAND
    try:
        found = verify(options)
    except _PROBLEMS as error:
        problem, status = str(error), Exit.FAILED
    except KeyboardInterrupt:
        problem, status = "stopped", Exit.INTERRUPTED
    else:
        print(verified_in_words(found))
        return Exit.DIFFERENCES if found["differences"] else Exit.GOOD
    print(f"nanovllm verify: {problem}", file=sys.stderr)
    return status


def _make_parser() -> tuple[argparse.ArgumentParser, list[str], list[str]]:
    """The parser of the whole command, the names of LLM's options, and those of parameters of rows."""
    description = "Offline LLM inference. nanovllm COMMAND --help lists the options of a command."
    top = Parser("nanovllm", description=description, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    names = _add_run_batch(commands)
    _add_verify(commands)
    return top, *names


def _add_command(commands: Any, name: str, usage: str, meaning: str, description: str, run: Callable[..., int]) -> Any:
    parser = commands.add_parser(
        name,
        help=meaning,
        usage=usage,
        description=description,
        epilog=inspect.getdoc(run),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # JobOptions and VerifyOptions have the defaults
        allow_abbrev=False,
    )
    parser.set_defaults(command=name)
    return parser


def _adder(parser: Any, options: type) -> Callable[..., None]:
    """A function that adds an option like `add_argument`, with its meaning and its default from a dataclass."""
    meanings, defaults = meanings_of(options), {field.name: field.default for field in fields(options)}

    def add(*flags: str, group: Any = parser, **how: Any) -> None:
        name = how.get("dest") or flags[-1].strip("-").replace("-", "_")
        meaning = how.get("help") or meanings.get(name, "")
        if how.get("metavar") == "JSON":
            meaning = meaning.replace("False", "false").replace("True", "true")
        how["help"] = help_of(meaning, defaults.get(name))
        group.add_argument(*flags, **how)

    return add


def _add_verify(commands: Any) -> None:
    usage, meaning = "nanovllm verify OUTPUT [options]", "check the proof of a job, and run some of its rows again"
    parser = _add_command(commands, "verify", usage, meaning, _DESCRIPTION_OF_VERIFY, _verify)
    add = _adder(parser, VerifyOptions)
    add("output", metavar="OUTPUT")
    add("--rows", type=partial(read, numbers, "numbers such as 5,71203"), metavar="NUMBER,…")
    add("--sample", **KINDS["int"])
    add("--seed", **KINDS["int"])
    add("--model")
    add("--input", nargs="+", metavar="FILE")
    add("--anyway", action="store_true")


def _add_run_batch(commands: Any) -> tuple[list[str], list[str]]:
    """Adds run-batch; returns the names of LLM's options, and those of parameters of rows."""
    usage, meaning = "nanovllm run-batch -i INPUT -o OUTPUT --model MODEL [options]", "complete every row of a file"
    parser = _add_command(commands, "run-batch", usage, meaning, _DESCRIPTION, _run_batch)
    add = _adder(parser, JobOptions)
    add("-i", "--input", nargs="+", action="extend", metavar="FILE")
    add("-o", "--output")
    add("--model", help='a directory, a hub name, or "bundled" for the small model that comes with nanovllm')
    add("--seed", **KINDS["int"])
    add("--on-error", choices=get_args(OnError))
    add("--restart", action="store_true")
    add("--dry-run", action="store_true")
    add("--estimate", action="store_true")
    add("--preflight", choices=get_args(PreflightKind))
    add("--sync-seconds", dest="seconds_between_syncs", **KINDS["float"])
    add("--price-per-hour", **KINDS["float"])
    add("--report", type=Path)
    columns = "Name the columns that make the rows. The output repeats all columns."
    data = parser.add_argument_group("data of any shape", columns)
    for name in ("prompt", *(f"{each}-column" for each in _COLUMNS)):
        add(f"--{name}", group=data, metavar="TEMPLATE" if name == "prompt" else "NAME")
    add("--chat", group=data, action="store_true")
    add("--chat-template-kwargs", group=data, **json_option('{"enable_thinking": false}'))
    precedence = "A row's own parameters take precedence. The defaults count where generation_config.json has no value."
    sampling = parser.add_argument_group("sampling of all rows", precedence)
    params_help = """parameters as a JSON object, such as '{"stop": ["\\n"], "max_tokens": null}'; null is None"""
    add("--params", group=sampling, help=params_help, **json_option('{"temperature": 0.7}'))
    names = add_options(sampling, SamplingParams.__init__, meanings_of(SamplingParams))
    pooling = parser.add_argument_group("rows of one forward pass", f"They need --task. Labels: {LABELS_ADVICE}")
    task_help = "embed, classify, reward, score or label: what to compute of each row, in place of a completion"
    add("--task", group=pooling, help=task_help, **KINDS["str"])
    names += ["task", *add_options(pooling, PoolingParams.__init__, meanings_of(PoolingParams))]
    engine = parser.add_argument_group("engine")
    how = {"type": partial(read, name_and_directory, "NAME=DIRECTORY"), "nargs": "+", "action": "extend"}
    add("--adapter", "--lora-modules", dest="adapters", group=engine, help=_ADAPTERS, metavar="NAME=DIRECTORY", **how)
    of_config = meanings_of(Config)
    add("--pooler-config", group=engine, help=of_config.get("pooler_config"), **json_option('{"pooling_type": "MEAN"}'))
    add(
        "--hf-overrides",
        group=engine,
        help=of_config.get("hf_overrides"),
        **json_option('{"is_original_qwen3_reranker": true, …}'),
    )
    add("--data-parallel-size", group=engine, help="LLMs, each on GPUs of its own. Default: 1", **KINDS["int"])
    others = ["data_parallel_size", "pooler_config", "hf_overrides"]
    return [*others, *add_options(engine, LLM.__init__, of_config)], names
