"""Structured outputs: the required form of a completion, as a frozen value. guides.py makes completions follow it."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from json import dumps, loads
from typing import Any

from nanovllm.checks import boolean, suggests_names

# The values of these keywords of a schema are data, in which "$ref" is an ordinary key.
_VALUE_KEYWORDS, _ANNOTATIONS = ("const", "enum"), ("default", "examples")
# llguidance reads the numbers of these keywords as float64, so it could round larger integers.
_NUMBER_KEYWORDS = (*_VALUE_KEYWORDS, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_EXACT = 2**53 - 1
# Complaints of Python's `re` that are errors for llguidance too. Others are ignored, because its syntax has more.
_SURELY_WRONG = ("unterminated", "unbalanced", "nothing to repeat", "min repeat greater", "(end of pattern)")

_MEANT = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "schema": "json",
    "pattern": "regex",
    "options": "choice",
    "enum": "choice",
    "ebnf": "grammar",
    "gbnf": "grammar",
    "lark": "grammar",
    "cfg": "grammar",
    "whitespace_pattern": "disable_any_whitespace=False allows any whitespace that JSON allows",
    "disable_additional_properties": "put additionalProperties: false into the schema's objects",
    "structural_tag": "nanovllm has no structural tags; grammar can say the same",
    "backend": "llguidance is the only backend; leave it out",
    "disable_fallback": "llguidance is the only backend; leave it out",
}


@suggests_names("parameter", _MEANT)
@dataclass(frozen=True, slots=True, init=False)
class StructuredOutputsParams:
    """The required form of a completion: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    All but `choice` need llguidance (`pip install llguidance`). Some mistakes, such as an unsupported keyword of a
    schema, are found by llguidance alone. They become the error of the request.

    Args:
        json: the completion is JSON of this schema: a dict, a string, or a class with `model_json_schema()`, as
            pydantic's models have. Properties come in the schema's order. Its integers must be within ±(2^53 - 1).
            It is kept as a string.
        regex: the whole completion matches, in the syntax of Rust's `regex`: without look-around, and \\d and \\w are
            any digit and letter of Unicode ([0-9] is plainer).
        choice: the completion is one of these strings, as the tokenizer tokenizes it at the start of a text. It ends
            as soon as it equals one, so none may be a prefix of another.
        grammar: the completion matches this grammar, in a form that llguidance takes: Lark-like with a rule `start`, or
            GBNF with a rule `root`.
        json_object: the completion is any JSON object.
        disable_any_whitespace: JSON without whitespace between its parts. False allows any amount, and small models may
            then write whitespace without end.

    Raises:
        TypeError, ValueError: a parameter of the wrong type, none or several of them, or one that no completion can
            satisfy.
    """

    json: str | None
    regex: str | None
    choice: tuple[str, ...] | None
    grammar: str | None
    json_object: bool
    disable_any_whitespace: bool

    def __init__(
        self,
        json: str | dict[str, Any] | type | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool = False,
        disable_any_whitespace: bool = True,
    ):
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("json", None if json is None else _schema(json))
        put("regex", None if regex is None else _regex(regex))
        put("choice", None if choice is None else _choices(choice))
        put("grammar", None if grammar is None else _text("grammar", grammar))
        put("json_object", boolean("json_object", json_object))
        put("disable_any_whitespace", boolean("disable_any_whitespace", disable_any_whitespace))
        names = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(names)}, not {' and '.join(given) or 'none of them'}")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {value!r}")
    if not value:
        raise ValueError(f"{name} must not be an empty string: nothing could be generated")
    if any(0xD800 <= ord(character) < 0xE000 for character in value):
        raise ValueError(f"{name} must be text; {value!r} holds half of a surrogate pair")
    return value


def _choices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"choice must be a list of strings, not {value!r}")
    if not value:
        raise ValueError("choice must hold at least one string")
    for each in value:
        _text("a string of choice", each)
    # After sorting, all strings between a prefix and its string have the same prefix. So it is enough to compare
    # neighbours.
    for shorter, longer in pairwise(sorted(value)):
        if shorter == longer:
            raise ValueError(f"choice holds {shorter!r} twice; leave one out")
        if longer.startswith(shorter):
            raise ValueError(
                f"choice {shorter!r} is a prefix of choice {longer!r}, which could never be generated; change one of "
                "them, or use regex, with which the model may go on"
            )
    return tuple(value)


def _regex(value: Any) -> str:
    _text("regex", value)
    try:
        with warnings.catch_warnings():  # warnings about nested sets, which llguidance supports
            warnings.simplefilter("ignore")
            re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        if any(complaint in str(error) for complaint in _SURELY_WRONG):
            raise ValueError(f"regex {value!r} is not valid: {error}") from None
    return value


def _schema(value: Any) -> str:
    if isinstance(value, type) and callable(make := getattr(value, "model_json_schema", None)):
        try:
            value = make()
        except Exception as error:  # pydantic raises its own
            raise ValueError(f"json: there is no schema of {value.__name__}: {error}") from error
    is_text = isinstance(value, str)
    if is_text:
        try:
            value = loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json must be a JSON schema, and the string is not JSON: {error}") from None
    if not isinstance(value, dict):
        kind = ValueError if is_text else TypeError
        raise kind(f"json must be a JSON schema that is a dict, its string, or a pydantic class, not {value!r}")
    try:
        # Keys keep their order: it is the order in which properties are generated.
        text = dumps(value, separators=(",", ":"), allow_nan=False)
    except TypeError as error:
        raise TypeError(f"json must hold only what JSON has: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json is not a JSON schema: {error}") from None
    _check_parts(value)
    return text


def _check_parts(schema: dict[str, Any]) -> None:
    """Raises a ValueError for references and numbers that llguidance would not follow exactly."""
    parts: list[tuple[str, Any]] = [("", schema)]  # with the keyword whose value it is
    while parts:
        keyword, part = parts.pop()
        if keyword in _NUMBER_KEYWORDS and isinstance(part, (int, float)) and abs(part) > _MAX_EXACT:
            raise ValueError(
                f"json has {part!r:.100} in {keyword}, and numbers beyond ±(2^53 - 1) would be rounded; use smaller "
                "numbers, or regex"
            )
        if isinstance(part, dict) and keyword in _VALUE_KEYWORDS:
            parts += [(keyword, each) for each in part.values()]
        elif isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                raise ValueError(
                    f'json refers to {reference!r}, and only references within the schema work ("#/$defs/…"); '
                    "copy what it refers to into $defs"
                )
            parts += [(name, each) for name, each in part.items() if name not in _ANNOTATIONS]
        elif isinstance(part, (list, tuple)):
            parts += [(keyword, each) for each in part]
