"""From a line of a job's input to a row, and from a result to a line of its output. docs/jobs.md has the formats."""

import json
import math
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from nanovllm import CompletionOutput, Logprob, RequestOutput, SamplingParams, TokenLogprobs
from nanovllm.jobs.fields import (
    UnreadableLine,
    check_names,
    conversation_of,
    prompt_of,
    scored_tokens,
    without_nulls,
)
from nanovllm.jobs.openai_rows import kind_of, request_of, response_body

_MAX_ID_CHARACTERS = 512
_MAX_ERROR_CHARACTERS = 500
_KEYS = ("id", "prompt", "messages", "token_ids", "params", "chat_template_kwargs")
_PROMPTS = ("prompt", "messages", "token_ids")
_KEY_SET = frozenset(_KEYS)
_OPENAI_KEYS = frozenset(("custom_id", "url", "body"))
_PARAMETERS = ("max_new_tokens", "max_completion_tokens", *(field.name for field in fields(SamplingParams)))
# Other names for a plain row's keys, or what to do instead.
_MEANT = {
    **dict.fromkeys(_PARAMETERS, 'put it into "params"'),
    **dict.fromkeys(("text", "input", "instruction", "question", "query"), "prompt"),
    **dict.fromkeys(("conversation", "conversations", "chat", "dialog"), "messages"),
    **dict.fromkeys(("prompt_token_ids", "input_ids", "tokens", "ids"), "token_ids"),
    **dict.fromkeys(("sampling_params", "parameters", "options", "sampling"), "params"),
    **dict.fromkeys(("key", "uid", "uuid", "row_id", "request_id", "index"), "id"),
    "model": "a job has one model; leave it out",
}
# The id of a line that is no JSON is known only if it comes first: elsewhere it may belong to something else.
_FIRST_ID = re.compile(r'\s*\{\s*"(id|custom_id)"\s*:\s*("(?:[^"\\]|\\.){0,3072}"|-?\d{1,512})\s*[,}]')
_DEEP = "the line is nested too deeply; a row needs only a few levels"
_HALF = "the line holds half of a surrogate pair, which is no character; write the whole one"


@dataclass(frozen=True, slots=True)
class JobRow:
    """One row of a job's input.

    Args:
        number: its place in the input, from 0.
        id: None only if the row has none, and then there is an error.
        prompt: as `LLM.generate_iter` takes it; None if there is an error.
        params: keyword arguments for SamplingParams that the row gives itself.
        kind: in which format the row came, and its output goes.
        error: why it cannot run, or None.
        model: what the body of OpenAI's format calls the model.
    """

    number: int
    id: str | None
    prompt: Any
    params: dict[str, Any]
    kind: Literal["plain", "completions", "chat"]
    error: str | None = None
    model: str | None = None


class _Refused(ValueError):
    """JSON as Python reads it, but not as a row may be."""


def parse_row(number: int, line: bytes | str) -> JobRow:
    """The row of a line. Whatever is wrong with the line becomes the row's error; nothing is raised.

    Args:
        number: the row's place in the input, from 0.
        line: with or without its end.
    """
    try:
        if isinstance(line, UnreadableLine):
            raise ValueError(line.problem)
        given = _object_of(line)
    except (ValueError, RecursionError) as problem:
        row_id, is_openai = _recovered(line)
        return _error_row(number, row_id, "completions" if is_openai else "plain", problem)
    is_openai = not _OPENAI_KEYS.isdisjoint(given)
    kind: Literal["plain", "completions", "chat"] = kind_of(given) if is_openai else "plain"
    row_id, model = None, None
    try:
        given = without_nulls(given)
        row_id, id_problem = _id_of(given.get("custom_id", given.get("id")), "custom_id" if is_openai else "id")
        if kind == "plain":
            prompt, params = _plain(given)
        else:
            prompt, params, model = request_of(given, kind)
        if id_problem is not None:
            raise ValueError(id_problem)
        if params and (complaint := _complaint_about(json.dumps(params))) is not None:
            raise ValueError(complaint)
    except (ValueError, RecursionError) as problem:
        return _error_row(number, row_id, kind, problem)
    return JobRow(number, row_id, prompt, params, kind, None, model)


def _error_row(
    number: int, row_id: str | None, kind: Literal["plain", "completions", "chat"], problem: Exception
) -> JobRow:
    error = _DEEP if isinstance(problem, RecursionError) else str(problem)
    if len(error) > _MAX_ERROR_CHARACTERS:  # errors show values, and those may be as long as the line
        error = error[: _MAX_ERROR_CHARACTERS - 1] + "…"
    return JobRow(number, row_id, None, {}, kind, error)


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


def _object_of(line: bytes | str) -> dict[str, Any]:
    try:
        text = line if isinstance(line, str) else line.decode()
        found = _DECODER.decode(text.removeprefix("\ufeff"))  # some editors mark the start of a file so
        # Only an escape can write half a pair. Looking for one character is a hundred times as fast as for three.
        if "\\" in text and ("\\ud" in text or "\\uD" in text):
            json.dumps(found, ensure_ascii=False).encode()
        if isinstance(line, str) and not line.isascii():
            line.encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 at byte {error.start}; convert the file to UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError(_HALF) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error.msg} at character {error.pos}") from None
    except _Refused:
        raise
    except ValueError:  # Python's own limit on the digits of an integer
        raise ValueError("the line holds an integer with too many digits") from None
    if not isinstance(found, dict):
        raise ValueError(f"the line must be a JSON object, not {text[:40]!r}")
    return found


def _recovered(line: bytes | str) -> tuple[str | None, bool]:
    """The id of a line that is no row, if one can be told, and whether the line is one of OpenAI's format."""
    text = line if isinstance(line, str) else line.decode(errors="surrogateescape")
    pairs: Any = ()
    try:
        pairs = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        if (match := _FIRST_ID.match(text.removeprefix("\ufeff"))) is not None:
            try:
                pairs = ((match[1], json.loads(match[2])),)
            except ValueError:  # a string with a wrong escape
                pairs = ((match[1], None),)
    if not isinstance(pairs, tuple):
        return None, False
    is_openai = any(name in _OPENAI_KEYS for name, _ in pairs)
    ids = [value for name, value in pairs if name in ("id", "custom_id")]
    row_id = _id_of(ids[0], "id")[0] if len(ids) == 1 else None
    try:
        (row_id or "").encode()
    except UnicodeEncodeError:
        row_id = None
    return row_id, is_openai


def _id_of(value: Any, name: str) -> tuple[str | None, str | None]:
    """The id as a string, or None and what is wrong with it."""
    if value is None:
        return None, f'the row has no "{name}", which must be a string or an integer'
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None, f'"{name}" must be a string or an integer, not {value!r}'
    text = str(value)
    if not 0 < len(text) <= _MAX_ID_CHARACTERS:
        return None, f'"{name}" must have 1 to {_MAX_ID_CHARACTERS} characters, not {len(text)}'
    return text, None


def _plain(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The prompt and the parameters of a plain row; a ValueError that names a bad key."""
    if not given.keys() <= _KEY_SET:
        check_names("key", given, _KEYS, _MEANT)
    params = given.get("params", {})
    if not isinstance(params, dict):
        raise ValueError(f'"params" must be an object with parameters of SamplingParams, not {params!r}')
    names = [name for name in _PROMPTS if name in given]
    if len(names) != 1:
        raise ValueError(f"a row has exactly one of {', '.join(_PROMPTS)}, not {' and '.join(names) or 'none of them'}")
    name = names[0]
    if name == "messages":
        return conversation_of(given), params
    if "chat_template_kwargs" in given:
        raise ValueError(f'"chat_template_kwargs" needs "messages"; this row has "{name}"')
    if name == "token_ids" and not isinstance(given[name], list):
        raise ValueError(f'"token_ids" must be a list of token ids, not {given[name]!r}')
    return prompt_of(name, given[name]), params


def _complaint_about(params: str) -> str | None:
    # Large parameters, such as schemas, would fill the memory if each row had its own.
    return (_complaint if len(params) < 1024 else _complaint.__wrapped__)(params)


@lru_cache(maxsize=256)
def _complaint(params: str) -> str | None:
    """What SamplingParams says against parameters in JSON. Most rows of a job have the same, so answers are kept."""
    try:
        # A job may have another default of max_tokens, so a row without it is not held to SamplingParams' own.
        SamplingParams(**{"max_tokens": None, **json.loads(params)})
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None


def output_of(
    row: JobRow, output: RequestOutput | None, *, with_token_ids: bool = False, created: int = 0, model: str = ""
) -> dict[str, Any]:
    """The output row of a row, ready for JSON. It depends on nothing but the arguments' values.

    Args:
        row: the input's.
        output: what came back for it; None for a row with an error.
        with_token_ids: plain rows have their completions' token ids.
        created: seconds since 1970 that rows of OpenAI's format say.
        model: the model's name for such rows that name none.
    """
    reason = row.error if output is None or row.error is not None else output.error
    assert output is not None or reason is not None, "a row without an error has an output"
    found: dict[str, Any]
    if row.kind == "plain":
        found = {"id": row.id, "outputs": [], "num_prompt_tokens": 0, "error": reason}
        if output is not None:
            found["num_prompt_tokens"] = output.num_prompt_tokens
            if reason is None:
                found["outputs"] = [_plain_completion(each, with_token_ids) for each in output.outputs]
                if output.prompt_logprobs is not None:
                    found["prompt_logprobs"] = _plain_logprobs(output.prompt_logprobs)
    else:
        found = {"id": f"batch_req_{row.number}", "custom_id": row.id, "response": None, "error": None}
        if reason is not None:
            found["error"] = {"code": "invalid_request_error", "message": reason}
        elif output is not None:
            body = response_body(row.kind, row.number, output, created, row.model or model)
            found["response"] = {"status_code": 200, "request_id": f"req_{row.number}", "body": body}
    if row.id is None:
        found["row"] = row.number + 1
    return found


def _plain_completion(completion: CompletionOutput, with_ids: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.token_ids),
    }
    if completion.stop_reason is not None:
        found["stop_reason"] = completion.stop_reason
    if with_ids:
        found["token_ids"] = completion.token_ids
    if completion.cumulative_logprob is not None:
        found["cumulative_logprob"] = _or_null(completion.cumulative_logprob)
    if completion.logprobs is not None:
        found["logprobs"] = _plain_logprobs(completion.logprobs)
    return found


def _plain_logprobs(found: TokenLogprobs) -> list[dict[str, Any] | None]:
    entries: list[dict[str, Any] | None] = []
    for each in scored_tokens(found):
        if each is None:
            entries.append(None)
            continue
        token_id, scored, best = each
        top = [_entry(other, scored[other], rank) for rank, other in enumerate(best, 1)]
        entries.append({**_entry(token_id, scored[token_id], scored[token_id].rank), "top": top})
    return entries


def _entry(token_id: int, scored: Logprob, rank: int | None) -> dict[str, Any]:
    return {"id": token_id, "token": scored.decoded_token, "logprob": _or_null(scored.logprob), "rank": rank}


def _or_null(number: float) -> float | None:
    """JSON has no −∞, which is the log-probability of what could not occur."""
    return number if math.isfinite(number) else None
