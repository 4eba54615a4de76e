"""How argparse takes the options of a command: from a signature's types, and from a docstring's meanings."""

import argparse
import difflib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import MISSING
from enum import IntEnum
from functools import partial
from typing import Any

from nanovllm.jobs.columns import LABELS_ADVICE

# The job sets these itself, or has no use for them.
_NOT_OPTIONS = ("self", "model", "seed", "queue_calls", "task")


class Exit(IntEnum):
    """Exit statuses; the help of each command says what they mean."""

    GOOD = 0
    FAILED = 1
    WRONG_COMMAND = 2
    SOME_ERRORS = DIFFERENCES = 3
    ALL_ERRORS = 4
    INTERRUPTED = 130


def _json_object(text: str) -> dict[str, Any]:
    if not isinstance(value := json.loads(text), dict):
        raise ValueError
    return value


def numbers(text: str) -> list[int]:
    """A list of integers such as "5,71203"."""
    return list(map(int, text.split(",")))


def read(kind: Callable[[str], Any], noun: str, text: str) -> Any:
    """`kind(text)`, or argparse's error for a text that is not the noun."""
    try:
        return kind(text)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"must be {noun}, not {text!r:.100}") from None


# How argparse takes a parameter of a type.
KINDS: dict[str, dict[str, Any]] = {
    "int": {"type": partial(read, int, "an integer"), "metavar": "NUMBER"},
    "float": {"type": partial(read, float, "a number"), "metavar": "NUMBER"},
    "str": {"metavar": "TEXT"},
    "bool": {"action": argparse.BooleanOptionalAction},
}


def json_option(example: str) -> dict[str, Any]:
    """How argparse takes a JSON object."""
    return {"type": partial(read, _json_object, f"an object such as {example}"), "metavar": "JSON"}


class Parser(argparse.ArgumentParser):
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


def add_options(group: Any, function: Callable[..., None], meanings: dict[str, str]) -> list[str]:
    """Adds an option for each parameter of `function` that is a number, a string or a switch; returns their names."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).split(" | ")[0]
        if name not in _NOT_OPTIONS and kind in KINDS:
            meaning = help_of(meanings.get(name, ""), parameter.default)
            group.add_argument(f"--{name.replace('_', '-')}", help=meaning, **KINDS[kind])
            names.append(name)
    return names


def meanings_of(documented: type) -> dict[str, str]:
    """The meaning of each argument, from the docstring of a class; empty if Python runs without docstrings."""
    arguments = (inspect.getdoc(documented) or "").partition("\nArgs:\n")[2]
    found = re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def help_of(meaning: str, default: Any) -> str:
    """argparse's help for an option. The meaning itself says what a default of None is."""
    if isinstance(default, bool):
        default = "on" if default else "off"
    said = "" if default in (None, MISSING) else f" Default: {default}."
    return f"{meaning.removesuffix('.')}.{said}".replace("%", "%%").replace("−", "-")  # a shell needs ASCII's minus
