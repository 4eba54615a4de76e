"""The command `nanovllm`, also `python -m nanovllm`. Its only subcommand so far is `run-batch`."""

import argparse
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobError, JobOptions, run_batch
from nanovllm.jobs.options import OnError, PreflightKind

_DESCRIPTION = """\
Completes every row of a file. If it is killed, run the same command again: it continues where it stopped.

    nanovllm run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --max-tokens 256

A row is {"id": "a", "prompt": "Hello"} or a line of an OpenAI batch file; docs/jobs.md describes both."""
_STOPPED = "stopped; run the same command again to resume"
# The job sets these itself.
_NOT_OPTIONS = ("self", "model", "seed")
# How argparse takes a parameter of a type.
_KINDS: dict[str, dict[str, Any]] = {
    **{kind.__name__: {"type": kind, "metavar": kind.__name__.upper()} for kind in (int, float, str)},
    "bool": {"action": argparse.BooleanOptionalAction},
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 if the job is finished or was only checked, 1 if it was refused or failed, 130 if a signal stopped it. A wrong
        command exits with 2.
    """
    parser, engine, sampling = _make_parser()
    given = vars(parser.parse_args(arguments))
    is_dry_run = given.get("dry_run", False)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    options = {field.name: given[field.name] for field in fields(JobOptions) if field.name in given}
    options["engine"] = {name: given[name] for name in engine if name in given}
    options["params"] = given.get("params", {}) | {name: given[name] for name in sampling if name in given}
    if options["model"] == "bundled":
        options["model"] = str(MODEL_DIRECTORY)
    try:
        report = run_batch(JobOptions(**options))
        if is_dry_run or report["rows"]["finished"] == report["rows"]["total"]:
            return 0
        problem, status = _STOPPED, 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at the end would fail too
        problem, status = "the program that read standard output has ended", 1
    except (JobError, OSError, TypeError, ValueError, RuntimeError) as error:
        problem, status = str(error), 1
    except KeyboardInterrupt:
        problem, status = "stopped" if is_dry_run else _STOPPED, 130
    print(f"nanovllm run-batch: {problem}", file=sys.stderr)
    return status


def _make_parser() -> tuple[argparse.ArgumentParser, list[str], list[str]]:
    """The parser of the whole command, the names of LLM's options, and those of SamplingParams."""
    top = argparse.ArgumentParser("nanovllm")
    parser = top.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "run-batch",
        help="complete every row of a file",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # JobOptions has the defaults
    )
    add = parser.add_argument
    add(
        "-i",
        "--input",
        required=True,
        nargs="+",
        metavar="FILE",
        help='JSON Lines or .parquet files, and patterns of them; "-" is standard input',
    )
    add("-o", "--output", required=True, help='the output file; "-" is standard output, which cannot be resumed')
    add("--model", required=True, help='a directory, a hub name, or "bundled"')
    add("--seed", type=int, help="the job's seed; a row's seed is derived from it and the row's id")
    # fmt: off
    add("--on-error", choices=get_args(OnError),
        help="rows that cannot run: row writes error rows (default), stop refuses the job")
    add("--restart", action="store_true", help="delete the output and journal of an earlier run, and start over")
    add("--dry-run", action="store_true", help="check the rows and stop; no weights are loaded")
    add("--estimate", action="store_true",
        help="with --dry-run: also complete a sample of the rows and estimate how long the whole job takes")
    add("--preflight", choices=get_args(PreflightKind),
        help="how many rows to tokenize first: full is all, sample at most 5,000, off none (default: sample, or full "
             "with --dry-run or --on-error stop)")
    add("--sync-seconds", type=float, dest="seconds_between_syncs", metavar="SYNC_SECONDS",
        help="seconds between syncs to the disk (default 10)")
    # fmt: on
    add("--price-per-hour", type=float, help="the machine's price per hour; adds the cost to the report")
    add("--report", type=Path, help="also write the report to this file, as JSON")
    columns = parser.add_argument_group(
        "data of any shape", "Name the columns that make the rows. The output repeats all other columns."
    )
    columns.add_argument("--prompt-column", metavar="NAME", help="the column with the prompts")
    columns.add_argument("--messages-column", metavar="NAME", help="the column with the conversations")
    columns.add_argument("--prompt", metavar="TEMPLATE", help='a prompt with names of columns: "Translate: {text}"')
    columns.add_argument("--id-column", metavar="NAME", help='the column with the ids (default: "id", or row numbers)')
    columns.add_argument("--chat", action="store_true", help="make each prompt the user's message of a conversation")
    sampling = parser.add_argument_group(
        "sampling of all rows",
        "A row's own parameters take precedence. Parameters that are not set come from the model's "
        "generation_config.json.",
    )
    sampling.add_argument("--params", type=_json_object, help="SamplingParams as a JSON object")
    names = _add_options(sampling, SamplingParams.__init__)
    engine = parser.add_argument_group("engine", "Options of LLM; docs/api.md describes them.")
    engine.add_argument("--data-parallel-size", type=int, metavar="INT", help="how many LLMs, each on GPUs of its own")
    return top, ["data_parallel_size", *_add_options(engine, LLM.__init__)], names


def _add_options(group: Any, function: Callable[..., None]) -> list[str]:
    """Adds an option for each parameter of `function` that is a number, a string or a switch; returns their names."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).split(" | ")[0]
        if name not in _NOT_OPTIONS and kind in _KINDS:
            group.add_argument(f"--{name.replace('_', '-')}", **_KINDS[kind])
            names.append(name)
    return names


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object, such as {"temperature": 0.7}')
    return value


if __name__ == "__main__":
    sys.exit(main())
