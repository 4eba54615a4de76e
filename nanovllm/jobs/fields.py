"""What all formats of job rows share: the limits of a line, checks of a row's fields, and log-probabilities token by
token."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from nanovllm import Logprob, TokenLogprobs

# A line that is longer is an error row: it would take as much memory several times over.
MAX_BYTES_OF_LINE = 2**26


class UnreadableLine(bytes):
    """In place of a line, for a row of a table that JSON cannot say. The bytes hold what it can say, such as the id.

    problem: what becomes the row's error.
    """

    problem: str

    def __new__(cls, line: bytes, problem: str) -> "UnreadableLine":
        made = super().__new__(cls, line)
        made.problem = problem
        return made


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given: programs that write tables write null where there is nothing."""
    return fields if None not in fields.values() else {name: each for name, each in fields.items() if each is not None}


def check_names(noun: str, fields: Mapping[str, Any], known: Collection[str], meant: Mapping[str, str]) -> None:
    """A ValueError that names the first field that is not known, and what was probably meant.

    Args:
        noun: what such a field is called in the error.
        meant: other names -> a known name, or a sentence that says what to do instead.
    """
    name = next((name for name in fields if name not in known), None)
    if name is None:
        return
    close = name if name in meant else _closest(name[:100].lower(), (*known, *meant))
    hint = meant.get(close, close)
    if not hint:
        hint = f"known are {', '.join(known)}"
    elif hint in known:
        hint = f'did you mean "{hint}"?'
    raise ValueError(f"unknown {noun} {name!r}; {hint}")


@lru_cache(maxsize=256)
def _closest(name: str, names: tuple[str, ...]) -> str:
    """Kept, because a comparison takes a millisecond and a file may have the same mistake in each row."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), "")


def prompt_of(name: str, value: Any) -> str | list[int]:
    """The value, if it is a string or a list of token ids; a ValueError that names the field otherwise."""
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int}):
        return value
    if isinstance(value, list) and all(isinstance(each, (str, list)) for each in value):
        raise ValueError(f'"{name}" holds {len(value)} prompts; write one row per prompt')
    raise ValueError(f'"{name}" must be a string or a list of token ids, not {value!r}')


def conversation_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt of a row with "messages", as `LLM.generate_iter` takes it; a ValueError that names a bad field."""
    messages, template_kwargs = fields["messages"], fields.get("chat_template_kwargs")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f'"messages" must be a list of at least one message (an object), not {messages!r}')
    if template_kwargs is None:
        return {"messages": messages}
    if not isinstance(template_kwargs, dict):
        raise ValueError(f'"chat_template_kwargs" must be an object, not {template_kwargs!r}')
    return {"messages": messages, "chat_template_kwargs": template_kwargs}


def scored_tokens(found: TokenLogprobs) -> Iterator[tuple[int, dict[int, Logprob], list[int]] | None]:
    """Of each token its id, the dict that `found` has for it, and the ids of the most probable tokens, best first.

    None stands for a token that was not scored. The dict has the token itself first, even if it is among the best.
    """
    for index, scored in enumerate(found):
        if scored is None:
            yield None
        else:
            token_id, *best = found.token_ids[index - found.first].tolist()
            yield token_id, scored, [each for each in best if each >= 0]  # −1 where fewer tokens can occur
