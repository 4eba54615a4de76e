"""Makes a row of each line of a job's input. docs/jobs.md has the formats."""

import json
import re
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, cast

from nanovllm import SamplingParams
from nanovllm.jobs.adapters import adapter_name
from nanovllm.jobs.columns import KEYS, OPENAI_KEYS, POOLING_KEYS, PROMPTS, Columns, kind_of_task
from nanovllm.jobs.fields import (
    MAX_BYTES_OF_LINE,
    NOTHING_IS_GENERATED,
    PAIR,
    UnreadableLine,
    check_names,
    conversation_of,
    kept_if_short,
    pair_of,
    prompt_of,
    without_nulls,
)
from nanovllm.jobs.openai_rows import OPENAI_DEFAULTS, OPENAI_KINDS, OpenAIKind, Request, kind_of, request_of

# "plain" generates text; the others of its line are plain rows with these tasks.
Kind = Literal["plain", "embed", "classify", "reward", "score", "label"] | OpenAIKind

_MAX_ID_CHARACTERS = 512
_MAX_ERROR_CHARACTERS = 500
# The kinds of rows that generate text.
TEXT_KINDS = ("plain", *OPENAI_DEFAULTS)
# A score may need the LM head: a recipe reads the logits of "yes" and "no".
KINDS_WITHOUT_LM_HEAD = frozenset(("embed", "classify", "reward", "embeddings", "classify_url"))
_NO_COLUMNS = Columns()
_PARAMETERS = ("max_new_tokens", "max_completion_tokens", *(field.name for field in fields(SamplingParams)))
# Other names for a plain row's keys, or the advice instead of one: of all rows, and of each kind.
_MEANT = {
    **dict.fromkeys(("text", "input", "instruction", "question", "query"), "prompt"),
    **dict.fromkeys(("conversation", "conversations", "chat", "dialog"), "messages"),
    **dict.fromkeys(("prompt_token_ids", "input_ids", "tokens", "ids"), "token_ids"),
    **dict.fromkeys(("sampling_params", "parameters", "options", "sampling"), "params"),
    **dict.fromkeys(("key", "uid", "uuid", "row_id", "request_id", "index"), "id"),
    **dict.fromkeys(("tools", "documents", "chat_template"), 'put it into "chat_template_kwargs"'),
    "model": "a job has one model; leave it out",
    **dict.fromkeys(("lora", "lora_name", "lora_request", "lora_adapter"), "adapter"),
}
_MEANT_WITH_TASK = {**dict.fromkeys(_PARAMETERS, NOTHING_IS_GENERATED), **_MEANT, "document": "prompt"}
_NO_PROMPTS = (*PROMPTS, "text", "input", "chat_template_kwargs", "chat_template", "tools")
_MEANT_BY_KIND = {
    **dict.fromkeys(KEYS, _MEANT_WITH_TASK),
    "plain": {**dict.fromkeys(_PARAMETERS, 'put it into "params"'),
              **dict.fromkeys((*PAIR, *POOLING_KEYS), 'it needs a "task"'), **_MEANT},
    "score": {**_MEANT_WITH_TASK, **dict.fromkeys(_NO_PROMPTS, 'the texts of a score are "query" and "document"'),
              "queries": "query", "documents": "document"},
}  # fmt: skip
# The id of a line that is not JSON is known only if it comes first: elsewhere it may belong to something else.
_FIRST_ID = re.compile(r'\s*\{\s*("(?:[^"\\]|\\.){0,512}")\s*:\s*("(?:[^"\\]|\\.){0,3072}"|-?\d{1,512})\s*[,}]')
_BYTES_OF_FIRST_ID = 8192
_DEEP = "the line is nested too deeply; a row needs only a few levels"
_HALF = "the line holds half of a surrogate pair, which is not a character; write the whole one"


@dataclass(frozen=True, slots=True)
class JobRow:
    """One row of a job's input.

    Args:
        number: the row's place in the input, from 0.
        id: of a plain row without one, its number from 1. With None there is an error.
        prompt: as `LLM.generate_iter` takes it; None if there is an error.
        params: keyword arguments for SamplingParams or PoolingParams that the row itself gives.
        kind: the format of the row and of its output.
        error: why the row cannot run, or None.
        model: the model's name in the body of a row of OpenAI's format.
        is_numbered: its id is its number, because it has none.
        data: JSON for the data columns, without braces, if the output gets rows as they finish.
        is_base64: its embedding is to be base64.
        adapter: the name of its adapter, or None.
    """

    number: int
    id: str | None
    prompt: Any
    params: dict[str, Any]
    kind: Kind
    error: str | None = None
    model: str | None = None
    is_numbered: bool = False
    data: bytes = b""
    is_base64: bool = False
    adapter: str | None = None


class _Refused(ValueError):
    """Python reads this as JSON, but a row must not hold it."""


def parse_row(number: int, line: bytes | str, columns: Columns = _NO_COLUMNS) -> JobRow:
    """The row of a line. Every fault of the line becomes the row's error; nothing is raised.

    Args:
        number: the row's place in the input, from 0.
        line: with or without its end.
        columns: the columns that make the row, if options name them.
    """
    kind: Kind = kind_of_task(columns.task)
    given = row_id = id_problem = None
    is_numbered = False
    try:
        if len(line) > MAX_BYTES_OF_LINE:
            raise ValueError(f"the row has more than {MAX_BYTES_OF_LINE:,} bytes of JSON, which is the limit of a row")
        if isinstance(line, UnreadableLine):
            raise ValueError(line.problem)
        given = _object_of(line, _DATA_DECODER if columns.given else _DECODER)
        if is_openai := not (columns.given or OPENAI_KEYS.isdisjoint(given)):
            kind = kind_of(given)
        given = without_nulls(given)
        value = given.get("custom_id", given.get("id")) if is_openai else given.get(columns.id_name)
        if value is None and not is_openai and columns.id_column is None:
            row_id, is_numbered = str(number + 1), True
        else:
            row_id, id_problem = _id_of(value, "custom_id" if is_openai else columns.id_name)
        if columns.given:
            adapter = None if columns.adapter_column is None else adapter_name(given.get(columns.adapter_column))
            request = Request(columns.prompt_of(given), {}, None, adapter=adapter)
        elif kind in OPENAI_KINDS:
            request = request_of(given, cast(OpenAIKind, kind))
        else:
            kind = kind_of_task(given.get("task", columns.task))
            request = _plain(given, kind)._replace(adapter=adapter_name(given.get("adapter")))
        if id_problem is not None:
            raise ValueError(id_problem)
        if request.params and kind in TEXT_KINDS and (complaint := _complaint(json.dumps(request.params))) is not None:
            raise ValueError(complaint)
    except (ValueError, RecursionError) as problem:
        if given is None:
            row_id, kind = _recovered(line, columns, kind)
        error = _DEEP if isinstance(problem, RecursionError) else str(problem)
        if len(error) > _MAX_ERROR_CHARACTERS:  # errors show values, which may be as long as the line
            error = error[: _MAX_ERROR_CHARACTERS - 1] + "…"
        return JobRow(number, row_id, None, {}, kind, error, is_numbered=is_numbered)
    prompt, params, model, is_base64, adapter = request
    return JobRow(number, row_id, prompt, params, kind, None, model, is_numbered, is_base64=is_base64, adapter=adapter)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _Refused(f"an object of the line has the key {twice!r} twice; leave one out")
    return found


def _no_constant(name: str) -> None:
    raise _Refused(f"the line holds {name}, which JSON does not have; write a number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
_DATA_DECODER = json.JSONDecoder(object_pairs_hook=_unique)  # NaN in a data column is no fault of the row


def _object_of(line: bytes | str, decoder: json.JSONDecoder) -> dict[str, Any]:
    try:
        text = line if isinstance(line, str) else line.decode()
        found = decoder.decode(text.removeprefix("\ufeff"))  # some editors mark the start of a file with it
        # Only an escape can write half a pair. A search for one character is a hundred times as fast as for three.
        if "\\" in text and ("\\ud" in text or "\\uD" in text):
            json.dumps(found, ensure_ascii=False).encode()
        if isinstance(line, str) and not line.isascii():
            line.encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 at byte {error.start}; convert the file to UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError(_HALF) from None
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise ValueError(f"the line is not JSON: {problem} at character {error.pos}") from None
    except _Refused:
        raise
    except ValueError:  # Python's own limit on the digits of an integer
        raise ValueError("the line holds an integer with too many digits") from None
    if not isinstance(found, dict):
        raise ValueError(f"the line must be a JSON object, not {text[:40]!r}")
    return found


def _recovered(line: bytes | str, columns: Columns, plain: Kind) -> tuple[str | None, Kind]:
    """The id of a line that is not a row, if it can be found, and the kind of error row that the line gets."""
    if len(line) > MAX_BYTES_OF_LINE:
        line = line[:_BYTES_OF_FIRST_ID]
    text = line if isinstance(line, str) else line.decode(errors="surrogateescape")
    pairs: Any = ()
    names = (columns.id_name,) if columns.given else ("id", "custom_id")
    try:
        pairs = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        if (match := _FIRST_ID.match(text.removeprefix("\ufeff"))) is not None:
            try:
                pairs = ((json.loads(match[1]), json.loads(match[2])),)
            except ValueError:  # a string with a wrong escape
                pairs = ((match[1].strip('"'), None),)
            pairs = pairs if pairs[0][0] in names else ()
    if not isinstance(pairs, tuple):
        return None, plain
    is_openai = not columns.given and any(name in OPENAI_KEYS for name, _ in pairs)
    kind: Kind = "completions" if is_openai else plain
    ids = [value for name, value in pairs if name in names]
    row_id = _id_of(ids[0], "id")[0] if len(ids) == 1 else None
    try:
        (row_id or "").encode()
    except UnicodeEncodeError:
        row_id = None
    return row_id, kind


def _id_of(value: Any, name: str) -> tuple[str | None, str | None]:
    """(the id as a string, None), or (None, the error)."""
    if value is None:
        return None, f'the row has no "{name}", which must be a string or an integer'
    if isinstance(value, float) and value.is_integer():  # pandas makes floats of integers beside a null
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None, f'"{name}" must be a string or an integer, not {value!r}'
    text = str(value)
    if not 0 < len(text) <= _MAX_ID_CHARACTERS:
        return None, f'"{name}" must have 1 to {_MAX_ID_CHARACTERS} characters, not {len(text)}'
    return text, None


def _plain(given: dict[str, Any], kind: Kind) -> Request:
    """The prompt and the parameters of a plain row; a ValueError names a wrong key."""
    advice = ""
    if kind == "score" and not given.keys() >= set(PAIR):
        advice = " (--task score with --query-column and --document-column takes the texts from any keys)"
    elif kind != "score" and given.keys().isdisjoint(PROMPTS):
        advice = " (--prompt-column takes the prompt from any key)"
    check_names("key", given, KEYS[kind], _MEANT_BY_KIND[kind], advice)
    params = given.get("params", {})
    if not isinstance(params, dict):
        raise ValueError(f'"params" must be an object with parameters of SamplingParams, not {params!r}')
    keys = {name: given[name] for name in POOLING_KEYS if name in given} if kind != "plain" else {}
    if twice := params.keys() & keys.keys():
        raise ValueError(f'"{min(twice)}" is a key of the row and also in "params"; leave one out')
    params = {**params, **keys}
    if kind == "score":
        return Request(pair_of(given), params, None)
    names = [name for name in PROMPTS if name in given]
    if len(names) != 1:
        raise ValueError(f"a row has exactly one of {', '.join(PROMPTS)}, not {' and '.join(names) or 'none of them'}")
    name = names[0]
    if name == "messages":
        return Request(conversation_of(given), params, None)
    if "chat_template_kwargs" in given:
        raise ValueError(f'"chat_template_kwargs" needs "messages"; this row has "{name}"')
    if name == "token_ids" and not isinstance(given[name], list):
        raise ValueError(f'"token_ids" must be a list of token ids, not {given[name]!r}')
    return Request(prompt_of(name, given[name]), params, None)


@partial(kept_if_short, 256)
def _complaint(params: str) -> str | None:
    """SamplingParams' error for parameters in JSON, or None."""
    try:
        # A job may have another default of max_tokens, so a row without it is not held to SamplingParams' own.
        SamplingParams(**{"max_tokens": None, **json.loads(params)})
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None
