"""Functions that all formats of job rows share: the limits of a line, checks of a row's fields, and log-probabilities
token by token."""

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from nanovllm import Logprob, TokenLogprobs

T = TypeVar("T")

# A longer line is an error row: it would take as much memory several times over.
MAX_BYTES_OF_LINE = 2**26
# The texts of a row that is scored.
PAIR = ("query", "document")
NOTHING_IS_GENERATED = "leave it out: nothing is generated"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_float=lambda text: finite_or_none(float(text)), parse_constant=lambda name: None)
_MAX_KEPT_CHARACTERS = 1024


class UnreadableLine(bytes):
    """Takes the place of a line if JSON cannot express a table's row. The bytes hold the fields that JSON can express,
    such as the id.

    problem: becomes the row's error.
    """

    problem: str

    def __new__(cls, line: bytes, problem: str) -> "UnreadableLine":
        made = super().__new__(cls, line)
        made.problem = problem
        return made


def kept_if_short(maxsize: int, function: Callable[..., T]) -> Callable[..., T]:
    """Caches the last `maxsize` results of a function whose last argument is JSON text. Most rows of a job have the
    same parameters. Results for long texts, such as schemas, are not kept, because they would fill the memory if each
    row had its own."""
    kept = lru_cache(maxsize)(function)
    return lambda *arguments: (kept if len(arguments[-1]) < _MAX_KEPT_CHARACTERS else function)(*arguments)


def fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line, without the checks of a row; none if it is not a JSON object.

    NaN and infinities become null, and half of a surrogate pair becomes "?", because JSON does not have them.
    """
    try:
        text = line.decode().removeprefix("\ufeff")
        found = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:
            found = json.loads(json_text(found).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def json_text(value: Any) -> str:
    """JSON for a value of `fields_of`; "null" for one that is nested too deeply."""
    try:
        return _ENCODER.encode(value)
    except RecursionError:
        return "null"


def finite_or_none(number: float) -> float | None:
    """The number, or None for NaN and infinities, which JSON does not have."""
    return number if math.isfinite(number) else None


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given: programs that write tables write null for a missing value."""
    return fields if None not in fields.values() else {name: each for name, each in fields.items() if each is not None}


def check_names(
    noun: str, fields: Mapping[str, Any], known: Collection[str], meant: Mapping[str, str], advice: str = ""
) -> None:
    """Raises a ValueError that names the first unknown field and the one that was probably meant.

    Args:
        noun: the error's word for such a field.
        meant: other names -> a name, which counts only if it is known, or a sentence with the advice.
        advice: what else to do.
    """
    name = next((name for name in fields if name not in known), None)
    if name is None:
        return
    close = name if name in meant else _closest(name[:100].lower(), (*known, *meant))
    hint = close if close in known else meant.get(close, "")
    if hint in known:
        hint = f'did you mean "{hint}"?'
    elif " " not in hint:
        hint = f"known are {', '.join(known)}"
    raise ValueError(f"unknown {noun} {name!r}; {hint}{advice}")


@lru_cache(maxsize=256)
def _closest(name: str, names: tuple[str, ...]) -> str:
    """Cached, because a comparison takes a millisecond and a file may have the same mistake in each row."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), "")


def prompt_of(name: str, value: Any) -> str | list[int]:
    """The value, if it is a string or a list of token ids; otherwise raises a ValueError that names the field."""
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int}):
        return value
    if isinstance(value, list) and all(isinstance(each, (str, list)) for each in value):
        raise ValueError(f'"{name}" holds {len(value)} prompts; write one row per prompt')
    raise ValueError(f'"{name}" must be a string or a list of token ids, not {value!r}')


def pair_of(fields: Mapping[str, Any], names: Sequence[str] = PAIR) -> tuple[str, str]:
    """The prompt of a row that is scored, from the fields with these names; a ValueError says which text it lacks."""
    query, document = names
    for name in names:
        if not isinstance(fields.get(name), str):
            raise ValueError(
                f'"{name}" must be a string, not {fields.get(name)!r}; a score needs "{query}" and "{document}"'
            )
    return fields[query], fields[document]


def conversation_of(fields: Mapping[str, Any], arguments: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The prompt of a row with "messages", as `LLM.generate_iter` takes it; a ValueError names a wrong field.

    arguments: what the chat template gets besides "chat_template_kwargs".
    """
    messages, template_kwargs = fields["messages"], fields.get("chat_template_kwargs", {})
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f'"messages" must be a list of at least one message (an object), not {messages!r}')
    if not isinstance(template_kwargs, dict):
        raise ValueError(f'"chat_template_kwargs" must be an object, not {template_kwargs!r}')
    if twice := template_kwargs.keys() & arguments.keys():
        raise ValueError(f'{min(twice)!r} is in the body and in "chat_template_kwargs"; leave one out')
    template_kwargs = {**template_kwargs, **arguments}
    return {"messages": messages, **({"chat_template_kwargs": template_kwargs} if template_kwargs else {})}


def scored_tokens(found: TokenLogprobs) -> Iterator[tuple[int, dict[int, Logprob], list[int]] | None]:
    """For each token its id, the dict that `found` has for it, and the ids of the most probable tokens, best first.

    Tokens without a score give None. The dict has the token itself first, even if it is among the best.
    """
    for index, scored in enumerate(found):
        if scored is None:
            yield None
        else:
            token_id, *best = found.token_ids[index - found.first].tolist()
            yield token_id, scored, [each for each in best if each >= 0]  # −1 is padding if fewer tokens can occur
