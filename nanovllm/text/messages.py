"""Conversations as OpenAI's clients write them, in the forms that chat templates read.

Some templates read a content as a string, others as a list of parts, and each writes nothing, or Python's form of the
list, for the other kind. Templates differ in the same way about tool calls. So `forms` gives a conversation in several
forms, and `says_all` tells whether a template wrote all of one.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from json import dumps, loads
from typing import Any

Message = dict[str, Any]

_TEXT_TYPES = ("text", "input_text", "output_text")
_LISTS_IN_TEXT = ("'type': 'text'", '"type": "text"')  # in Python and in JSON


def plain_messages(messages: Any) -> list[Message]:
    """A checked conversation of plain dicts, lists and strings.

    A content is a string or a list of text parts; a tool's may be a dict. Arrays, mappings and pydantic's models become
    lists and dicts. Fields that are None are left out, because Parquet gives every message the fields of all.

    Raises:
        ValueError: this is not a conversation, or a part is not text.
    """
    if type(messages) is list and messages and all(map(_is_plain, messages)):  # nearly always
        return messages
    messages = plain(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError("a conversation must be a list of at least one message")
    return [_message(message) for message in messages]


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation in the forms that templates read, the most usual first."""
    yield messages
    contents: list[Callable[[Message], Any]] = [_as_given, _as_parts, _as_text, _as_parts_of_users]
    if not _has_calls(messages):
        for content in contents[1:]:
            yield [{**message, "content": content(message)} for message in messages]
        return
    # Some templates write calls only without a content, and some add the arguments to a text.
    for is_json, is_none, content in product((False, True), (False, True), contents):
        yield [_with_calls({**message, "content": content(message)}, is_json, is_none) for message in messages]


def says_all(text: str, messages: list[Message]) -> bool:
    """Whether a template wrote the texts of all messages and the names of all calls.

    An assistant's string does not count, because templates leave out what it thought.
    """
    has_lists = False
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            has_lists = True
            if not all(part["text"].strip() in text for part in content):
                return False
        elif isinstance(content, str) and message["role"] != "assistant" and content.strip() not in text:
            return False
    return says_calls(text, messages) and not (has_lists and any(each in text for each in _LISTS_IN_TEXT))


def says_calls(text: str, messages: list[Message]) -> bool:
    names = (name for message in messages for name in _names_of_calls(message))
    return all(name in text for name in names)


def has_parts(messages: list[Message]) -> bool:
    return any(isinstance(message.get("content"), list) for message in messages)


def _is_plain(message: Any) -> bool:
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )


def plain(value: Any) -> Any:
    """Arrays, mappings and pydantic's models as lists and dicts, at any depth."""
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    elif hasattr(value, "model_dump"):  # pydantic's models, as OpenAI's client returns them
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def _message(message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or (message.get("content") is None and role != "assistant"):
        raise ValueError(f'a message must be a dict with "role" and "content", not {message!r}'[:300])
    given = {key: value for key, value in message.items() if value is not None}
    if not given.get("tool_calls", True):
        del given["tool_calls"]
    given["content"] = _content(given.get("content", ""), role)
    if "tool_calls" in given:
        given["tool_calls"] = _with_arguments(given["tool_calls"], is_json=False)
    return given


def _content(content: Any, role: str) -> Any:
    if isinstance(content, str) or (role == "tool" and isinstance(content, dict)):
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


# Forms of a content


def _as_given(message: Message) -> Any:
    return message["content"]


def _as_parts(message: Message) -> Any:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text(message: Message) -> Any:
    """The texts of parts are joined by line breaks, as vLLM joins them."""
    content = message["content"]
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _as_parts_of_users(message: Message) -> Any:
    return (_as_parts if message["role"] == "user" else _as_text)(message)


# Tool calls


def _has_calls(messages: list[Message]) -> bool:
    return any("tool_calls" in message for message in messages)


def _names_of_calls(message: Message) -> list[str]:
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [each["name"] for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)]


def _with_calls(message: Message, is_json: bool, is_none: bool) -> Message:
    """The message with its calls' arguments as JSON or as dicts; if it has no content, that is None or ""."""
    if "tool_calls" not in message:
        return message
    content = None if is_none and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": _with_arguments(message["tool_calls"], is_json)}


def _with_arguments(calls: Any, is_json: bool) -> Any:
    return [_with_argument(call, is_json) for call in calls] if isinstance(calls, list) else calls


def _with_argument(call: Any, is_json: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if is_json and isinstance(arguments, dict):
        arguments = dumps(arguments, ensure_ascii=False)
    elif not is_json and isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of a tool call must be JSON, not {arguments!r:.100}: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}
