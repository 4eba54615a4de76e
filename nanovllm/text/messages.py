"""Conversations as OpenAI's clients write them, in the form that chat templates read."""

from collections.abc import Mapping
from json import loads
from typing import Any

_TEXT_TYPES = ("text", "input_text", "output_text")


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """A checked conversation of plain dicts, lists and strings. A content is a string or a list of text parts.

    - Arrays and mappings, as they come from Parquet, become lists and dicts. A field that is None is left out.
    - An assistant's message with `tool_calls` may lack a content, which becomes "". If their `arguments` are JSON, they
      become a dict, because templates write the JSON themselves.

    Raises:
        ValueError: this is not a conversation, or a part is not text.
    """
    messages = _plain(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError("a conversation must be a list of at least one message")
    return [_message(message) for message in messages]


def has_parts(messages: list[dict[str, Any]]) -> bool:
    return any(isinstance(message["content"], list) for message in messages)


def with_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the texts of parts joined by line breaks, as vLLM joins them."""
    return [{**message, "content": _joined(message["content"])} for message in messages]


def with_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with each content as a list of parts."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'a message must be a dict with "role" and "content", not {message!r}')
    given = {key: value for key, value in message.items() if value is not None}
    calls = given.get("tool_calls")
    if "content" not in given and not calls:
        raise ValueError(f'a message must be a dict with "role" and "content", not {message!r}')
    given["content"] = _content(given.get("content", ""))
    if isinstance(calls, list):
        given["tool_calls"] = [_call(call) for call in calls]
    return given


def _content(content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"a message's content must be a string or a list of text parts, not {content!r}"[:300])
    return [{"type": "text", "text": _text_of(part)} for part in content]


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_TYPES else None
    if not isinstance(text, str):
        wanted = 'a part of a message must be {"type": "text", "text": …}'
        raise ValueError(f"nanovllm reads text only, so {wanted}, not {part!r}"[:300])
    return text


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        arguments = loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a tool call must be JSON, not {arguments!r:.100}: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}
