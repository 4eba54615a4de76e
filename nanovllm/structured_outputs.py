"""Structured outputs: the required form of a completion, as a frozen value. guides.py makes completions follow it."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json import dumps, loads
from typing import Any

from nanovllm.accepted import ACCEPTED_STRUCTURED_OUTPUTS
from nanovllm.checks import boolean, suggests_names

# The values of these keywords of a schema are data, in which "$ref" is an ordinary key.
_DATA_KEYWORDS = ("const", "enum", "default", "examples")
# The values of these are dicts of schemas, whose keys are not keywords.
_DICTS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# llguidance reads the numbers of these keywords as float64, so it could round larger integers.
_NUMBER_KEYWORDS = (
    "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
_MAX_EXACT = 2**53 - 1
# With the operators of regular expressions. Rust's \\s has more than JSON's four.
_WHITESPACE = re.compile(r"(\\[nrts]|[ \n\r\t]|\(\?:|[\[\]()|*+?]|\{[0-9]+(,[0-9]*)?\})*")
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
}


@suggests_names("parameter", _MEANT, ACCEPTED_STRUCTURED_OUTPUTS)
@dataclass(frozen=True, slots=True, init=False)
class StructuredOutputsParams:
    """The required form of a completion: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    All but `choice` need llguidance (`pip install llguidance`). Some mistakes, such as an unsupported keyword of a
    schema, are found by llguidance alone. They become the error of the request.

    Args:
        json: the completion is JSON of this schema: a dict, a string, or a class with `model_json_schema()`, as
            pydantic's models have. Properties come in the schema's order. Numbers in `const`, `enum`, `multipleOf` and
            limits such as `minimum` must be within ±(2^53 - 1). A `format` that llguidance does not know changes
            nothing, as JSON Schema says. The schema is kept as a string.
        regex: the whole completion matches, in the syntax of Rust's `regex`: without look-around, and \\d and \\w are
            any digit and letter of Unicode ([0-9] is plainer).
        choice: the completion is one of these strings, as the tokenizer tokenizes it at the start of a text. It ends
            where it equals one of them. If that one begins another, an end-of-sequence token ends it.
        grammar: the completion matches this grammar, in a form that llguidance takes: Lark-like with a rule `start`, or
            GBNF with a rule `root`. `~` (anything but) needs `&` beside it, as in `/(?s:.*)/ & ~/.*no.*/`, because
            alone it allows special tokens too.
        json_object: the completion is any JSON object.
        disable_any_whitespace: JSON without whitespace between its parts. False allows any amount, and small models may
            then write whitespace without end.
        disable_additional_properties: objects of the schema that list `properties` or `patternProperties`, and say
            nothing about additional ones, have none.
        whitespace_pattern: a regular expression. Where JSON allows whitespace, at most one match of it may come, in
            place of what disable_any_whitespace says.

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
    disable_additional_properties: bool
    whitespace_pattern: str | None

    def __init__(
        self,
        json: str | dict[str, Any] | type | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool = False,
        disable_any_whitespace: bool = True,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
    ):
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        is_closed = boolean("disable_additional_properties", disable_additional_properties)
        put("json", None if json is None else _schema(json, is_closed))
        put("regex", _regex("regex", regex))
        put("choice", None if choice is None else _choices(choice))
        put("grammar", None if grammar is None else _text("grammar", grammar))
        put("json_object", boolean("json_object", json_object))
        put("disable_any_whitespace", boolean("disable_any_whitespace", disable_any_whitespace))
        put("disable_additional_properties", is_closed)
        put("whitespace_pattern", _regex("whitespace_pattern", whitespace_pattern))
        names = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(names)}, not {' and '.join(given) or 'none of them'}")
        if self.whitespace_pattern is not None:
            if given[0] not in ("json", "json_object"):
                raise ValueError(f"whitespace_pattern is for json and json_object; leave it out with {given[0]}")
            if not _WHITESPACE.fullmatch(self.whitespace_pattern):
                raise ValueError(
                    "whitespace_pattern must be made of spaces, \\n, \\r, \\t, \\s and operators, "
                    f"not {self.whitespace_pattern!r}"
                )
            put("whitespace_pattern", self.whitespace_pattern.replace(r"\s", r"[ \t\n\r]"))

    @classmethod
    def from_optional(cls, **parameters: Any) -> "StructuredOutputsParams":
        """vLLM's name for the constructor. None is a parameter's default."""
        return cls(**parameters)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {value!r}")
    if not value:
        raise ValueError(f"{name} must not be an empty string")
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
    for each, count in Counter(value).items():
        if count > 1:
            raise ValueError(f"choice holds {each!r} twice; leave one out")
    return tuple(value)


def _regex(name: str, value: Any) -> str | None:
    if value is None:
        return None
    _text(name, value)
    try:
        with warnings.catch_warnings():  # warnings about nested sets, which llguidance supports
            warnings.simplefilter("ignore")
            re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        if any(complaint in str(error) for complaint in _SURELY_WRONG):
            raise ValueError(f"{name} {value!r} is not valid: {error}") from None
    return value


def _schema(value: Any, is_closed: bool) -> str:
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
        # A copy. Keys keep their order: it is the order in which properties are generated.
        schema = loads(dumps(value, allow_nan=False))
    except TypeError as error:
        raise TypeError(f"json must hold only what JSON has: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json is not a JSON schema: {error}") from None
    for part in _schemas_in(schema):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise ValueError(
                f'json refers to {reference!r}, and only references within the schema work ("#/$defs/…"); '
                "copy what it refers to into $defs"
            )
        for keyword in _NUMBER_KEYWORDS:
            _check_numbers(keyword, part.get(keyword))
        if is_closed and ("properties" in part or "patternProperties" in part):
            part.setdefault("additionalProperties", False)
    return dumps(schema, separators=(",", ":"))


def _check_numbers(keyword: str, value: Any) -> None:
    """Raises a ValueError if llguidance could round a number in the value of a schema's keyword."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, (int, float)) and abs(part) > _MAX_EXACT:
            raise ValueError(
                f"json has {part!r:.100} in {keyword}, and numbers beyond ±(2^53 - 1) could be rounded; use smaller "
                "numbers, or regex"
            )
        if isinstance(part, (dict, list)):
            parts += part.values() if isinstance(part, dict) else part


def _schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield part
            for keyword, each in part.items():
                if keyword in _DICTS_OF_SCHEMAS and isinstance(each, dict):
                    parts += each.values()
                elif keyword not in _DATA_KEYWORDS:
                    parts.append(each)
        elif isinstance(part, list):
            parts += part
