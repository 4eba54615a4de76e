"""The command `nanovllm`, of which `run-batch` is the only part so far. Also `python -m nanovllm`."""

import argparse
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobError, JobOptions, run_batch

_DESCRIPTION = """\
Completes every row of a file. If it is killed, run the same command again: it continues where it stopped.

    nanovllm run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --max-tokens 256

A row is {"id": "a", "prompt": "Hello"} or a line of an OpenAI batch file; docs/jobs.md describes both."""
# The job sets these itself.
_NOT_OPTIONS = ("self", "model", "seed")
_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 if the job is finished or was only checked, 1 if it was refused or failed, 130 if a signal stopped it. A wrong
        command exits with 2.
    """
    parser, engine, sampling = _make_parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    try:
        options = JobOptions(
            given.input,
            given.output,
            str(MODEL_DIRECTORY) if given.model == "bundled" else given.model,
            engine={name: value for name in engine if (value := getattr(given, name)) is not None},
            params={
                **given.params,
                **{name: value for name in sampling if (value := getattr(given, f"param_{name}")) is not None},
            },
            seed=given.seed,
            on_error=given.on_error,
            restart=given.restart,
            dry_run=given.dry_run,
            estimate=given.estimate,
            preflight=given.preflight,
            seconds_between_syncs=given.sync_seconds,
            price_per_hour=given.price_per_hour,
            report=given.report,
        )
        report = run_batch(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at the end would fail too
        print("nanovllm run-batch: nobody reads standard output any more", file=sys.stderr)
        return 1
    except (JobError, OSError, TypeError, ValueError, RuntimeError) as error:
        print(f"nanovllm run-batch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        how = "" if given.dry_run else "; run the same command again to resume"
        print(f"nanovllm run-batch: stopped{how}", file=sys.stderr)
        return 130
    is_done = report["rows"]["finished"] == report["rows"]["total"]
    if not is_done and not given.dry_run:
        print("nanovllm run-batch: stopped; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def _make_parser() -> tuple[argparse.ArgumentParser, list[str], list[str]]:
    """The parser of the whole command, the names of LLM's options, and those of SamplingParams."""
    top = argparse.ArgumentParser("nanovllm")
    parser = top.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "run-batch",
        help="complete every row of a file",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-i", "--input", required=True, help='JSON Lines or a .parquet file; "-" is standard input')
    add("-o", "--output", required=True, help='the output file; "-" is standard output, which cannot be resumed')
    add("--model", required=True, help='a directory, a hub name, or "bundled"')
    add("--seed", type=int, default=0, help="the job's seed; a row's seed is derived from it and the row's id")
    add(
        "--on-error",
        choices=("row", "stop"),
        default="row",
        help="rows that cannot run: row writes error rows (default), stop refuses the job",
    )
    add("--restart", action="store_true", help="delete the output and journal of an earlier run, and start over")
    add("--dry-run", action="store_true", help="check the rows and stop; no weights are loaded")
    add(
        "--estimate",
        action="store_true",
        help="with --dry-run: also complete a sample of the rows and estimate how long the whole job takes",
    )
    add(
        "--preflight",
        choices=("full", "sample", "off"),
        help="how many rows to tokenize first: full is all, sample at most 5,000, off none (default: sample, or full "
        "with --dry-run or --on-error stop)",
    )
    add("--sync-seconds", type=float, default=10.0, help="seconds between syncs to the disk (default 10)")
    add("--price-per-hour", type=float, help="the machine's price per hour; adds the cost to the report")
    add("--report", type=Path, help="also write the report to this file, as JSON")
    sampling = parser.add_argument_group(
        "sampling of all rows",
        "A row's own parameters take precedence. Parameters that are not set come from the model's "
        "generation_config.json.",
    )
    sampling.add_argument("--params", type=_json_object, default={}, help="SamplingParams as a JSON object")
    names = _add_options(sampling, SamplingParams.__init__, "param_")
    engine = parser.add_argument_group("engine", "Options of LLM; docs/api.md describes them.")
    engine.add_argument("--data-parallel-size", type=int, metavar="INT", help="how many LLMs, each on GPUs of its own")
    return top, ["data_parallel_size", *_add_options(engine, LLM.__init__, "")], names


def _add_options(group: Any, function: Callable[..., None], prefix: str) -> list[str]:
    """An option for each parameter that is a number, a string or a switch. Returns their names."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).split(" | ")[0]
        if name in _NOT_OPTIONS or kind not in (*_KINDS, "bool"):
            continue
        option = f"--{name.replace('_', '-')}"
        if kind == "bool":
            group.add_argument(option, dest=prefix + name, action=argparse.BooleanOptionalAction)
        else:
            group.add_argument(option, dest=prefix + name, type=_KINDS[kind], metavar=kind.upper())
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
