"""The command `nanovllm`, of which `run-batch` is the only part so far. Also `python -m nanovllm`."""

import argparse
import inspect
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.jobs.errors import JobError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

_DESCRIPTION = """\
Completes every row of a file. If it is killed, the same command goes on where it was.

    nanovllm run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --max-tokens 256

A row is {"id": …, "prompt": …} or a line of an OpenAI batch file; docs/jobs.md describes both."""
# What the job sets itself, or needs more than a number.
_NOT_OPTIONS = ("self", "model", "seed")
_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 if the job is finished (or was only checked), 1 if it was refused or stopped by an error, 130 if it was
        stopped and can be resumed.
    """
    parser, engine, sampling = _make_parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    from nanovllm.jobs.job import JobOptions, run_batch  # imports numpy and transformers

    try:
        options = JobOptions(
            given.input,
            given.output,
            given.model,
            engine={name: value for name in engine if (value := getattr(given, name)) is not None},
            params={
                **given.params,
                **{name: value for name in sampling if (value := getattr(given, f"param_{name}")) is not None},
            },
            seed=given.seed,
            on_error=given.on_error,
            restart=given.restart,
            dry_run=given.dry_run,
            preflight=given.preflight or ("full" if given.dry_run else "sample"),
            seconds_between_syncs=given.sync_seconds,
            price_per_hour=given.price_per_hour,
            report=given.report,
        )
        report = run_batch(options)
    except (JobError, OSError, TypeError, ValueError, RuntimeError) as error:
        print(f"nanovllm run-batch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nanovllm run-batch: stopped; the same command goes on", file=sys.stderr)
        return 130
    is_done = report["rows"]["finished"] == report["rows"]["total"]
    return 0 if is_done or given.dry_run else 130


def _make_parser() -> tuple[argparse.ArgumentParser, list[str], list[str]]:
    """The parser of the whole command, the names of LLM's options, and those of SamplingParams."""
    top = argparse.ArgumentParser("nanovllm")
    parser = top.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "run-batch",
        help="complete every row of a file",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--input", required=True, help='JSON lines, or a .parquet file; "-" is standard input')
    parser.add_argument(
        "-o", "--output", required=True, help='where the rows go, in the same formats; "-" is standard output'
    )
    parser.add_argument("--model", required=True, help="a directory or a hub name")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the job; each row's seed is made of it and the row's id"
    )
    parser.add_argument(
        "--on-error", choices=("row", "stop"), default="row", help="rows that cannot run: error rows, or no job at all"
    )
    parser.add_argument("--restart", action="store_true", help="drop what is there, the output too, and begin anew")
    parser.add_argument("--dry-run", action="store_true", help="check the rows and stop before the weights are loaded")
    parser.add_argument(
        "--preflight",
        choices=("full", "sample", "off"),
        help="rows to tokenize first: all, at most 20,000, none (default sample; full with --dry-run)",
    )
    parser.add_argument("--sync-seconds", type=float, default=10.0, help="between two syncs to the disk (default 10)")
    parser.add_argument("--price-per-hour", type=float, help="of the machine, for the cost in the report")
    parser.add_argument("--report", type=Path, help="write the report there as JSON")
    sampling = parser.add_argument_group(
        "sampling of all rows",
        "A row's own parameters count over these; what nobody gives is what the model recommends.",
    )
    sampling.add_argument("--params", type=_json_object, default={}, help="any SamplingParams, as a JSON object")
    names = _add_options(sampling, SamplingParams.__init__, "param_")
    return top, _add_options(parser.add_argument_group("engine: LLM's options"), LLM.__init__, ""), names


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
