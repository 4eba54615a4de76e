"""Conversations as OpenAI's clients write them, in the forms that chat templates read.

Some templates read a content as a string, others as a list of parts, and each writes nothing, or Python's form of the
list, for the other kind. Templates differ in the same way about tool calls. So there are several FORMS of a
conversation. A template reads a form if it writes all texts of a conversation of the same shape, in which marks take
the place of the texts.
"""

from collections.abc import Callable, Mapping
from itertools import count, product
from json import dumps, loads
from math import isinf
from typing import Any, NamedTuple

Message = dict[str, Any]

# Keys that attach what is not text to a message or a part.
_MEDIA = (
    "image", "images", "image_url", "video", "videos", "video_url", "audio", "audios", "audio_url", "input_audio",
)  # fmt: skip
# The types of parts that are text, and the key of the text in each.
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_LISTS_IN_TEXT = ("'type': 'text'", '"type": "text"')  # in Python and in JSON


class Form(NamedTuple):
    """One way to write a conversation.

    content: gives a message's content.
    is_json: the arguments of tool calls are JSON, not dicts.
    lacks_content: a message with tool calls and no text has no content, not an empty one.
    """

    content: Callable[[Message], Any]
    is_json: bool = False
    lacks_content: bool = False

    def of(self, messages: list[Message]) -> list[Message]:
        if self.content is _as_given and not any("tool_calls" in message for message in messages):
            return messages
        return [self._of_message(message) for message in messages]

    def _of_message(self, message: Message) -> Message:
        message = {**message, "content": self.content(message)}
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_arguments(call, self.is_json) for call in message["tool_calls"]]
            if self.lacks_content and not message["content"]:
                message["content"] = None
        return message


def plain_messages(messages: Any) -> list[Message]:
    """A checked conversation of plain dicts, lists and strings.

    A content is a string or a list of parts, each text or a refusal; a tool's content may be a dict. Arrays, mappings
    and pydantic's models become lists and dicts. Fields that are None are left out, because Parquet gives every message
    the fields of all.

    Raises:
        ValueError: this is not a conversation, or a part is not text, or an image, a video or a sound is attached.
    """
    if type(messages) is list and messages and all(map(_is_plain, messages)):  # nearly always
        return messages
    messages = plain(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"a conversation must be a list of at least one message, not {messages!r}"[:300])
    return [_message(message) for message in messages]


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


def _is_plain(message: Any) -> bool:
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )


def _message(message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or (message.get("content") is None and role != "assistant"):
        raise ValueError(f'a message must be a dict with "role" and "content", not {message!r}'[:300])
    _check_text_only(message)
    given = {key: value for key, value in message.items() if value is not None}
    if not given.get("tool_calls", True):
        del given["tool_calls"]
    if refusal := given.pop("refusal", None):
        if given.get("content"):
            raise ValueError("a message has a content or a refusal, not both; put the refusal into the content")
        given["content"] = refusal
    given["content"] = _content(given.get("content", ""), role)
    for call in given.get("tool_calls", ()) if isinstance(given.get("tool_calls"), list) else ():
        _with_arguments(call, is_json=False)  # raises if they are not JSON
    return given


def _content(content: Any, role: str) -> Any:
    if role == "tool" and isinstance(content, dict):
        _check_text_only(content)
        return content
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"a message's content must be a string or a list of text parts, not {content!r}"[:300])
    return [{"type": "text", "text": _text_of(part)} for part in content]


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get(_TEXT_KEYS.get(str(part.get("type")))) if isinstance(part, dict) else None
    if not isinstance(text, str):
        wanted = 'a part of a message must be {"type": "text", "text": …}'
        raise ValueError(f"nanovllm reads text only, so {wanted}, not {part!r}"[:300])
    _check_text_only(part)
    return text


def _check_text_only(fields: dict[str, Any]) -> None:
    """Templates would leave these out, or write a placeholder for them."""
    for name in _MEDIA:
        if fields.get(name):
            raise ValueError(f"nanovllm reads text only, so leave {name}={fields[name]!r} out of the messages"[:300])


# Forms


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


def _with_arguments(call: Any, is_json: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if is_json and isinstance(arguments, dict):
        arguments = dumps(arguments, ensure_ascii=False)
    elif not is_json and isinstance(arguments, str):
        try:
            arguments = loads(arguments, parse_float=_finite) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of a tool call must be JSON, not {arguments!r:.100}: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _finite(number: str) -> float:
    if isinf(value := float(number)):
        raise ValueError(f"{number} is too large for a float")
    return value


_CONTENTS = (_as_given, _as_parts, _as_text, _as_parts_of_users)
# The most usual first. The last ones differ only for tool calls.
FORMS = [Form(content, *calls) for calls in product((False, True), (False, True)) for content in _CONTENTS]


# Which form a template reads


def shape_of(messages: list[Message]) -> tuple[Any, ...]:
    """Equal for conversations of which a template reads the same form."""
    return tuple((message["role"], _kind(message["content"]), _num_calls(message)) for message in messages)


def form_read(messages: list[Message], render: Callable[[list[Message]], str]) -> Form | None:
    """The first form that a template reads, tried on a conversation of the same shape.

    If it reads none, because it leaves out some texts by design, the first form that it renders, strings before parts.
    None if it writes the conversation, but no form of the tool calls.

    Args:
        render: the template. An exception means that it does not read this form.
    """
    marked, texts, of_calls = _marked(messages)
    has_parts, found, is_rendered = any(isinstance(each["content"], list) for each in messages), None, False
    for form in FORMS if of_calls else FORMS[: len(_CONTENTS)]:
        try:
            written = render(form.of(marked))
        except Exception:  # templates raise all kinds of errors
            continue
        is_rendered = True
        if not all(mark in written for mark in of_calls):
            continue
        if all(mark in written for mark in texts) and not any(each in written for each in _LISTS_IN_TEXT):
            return form
        if found is None or (has_parts and form.content is _as_text and found.content is not _as_text):
            found = form
    return found if is_rendered else FORMS[0]


def _num_calls(message: Message) -> int:
    calls = message.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


def _kind(content: Any) -> Any:
    return (len(content), bool(content)) if isinstance(content, list) else (type(content), bool(content))


def _marked(messages: list[Message]) -> tuple[list[Message], list[str], list[str]]:
    """The messages with a mark in place of each text, these marks, and those of the tool calls."""
    marks = (f"\U000fdead{number}\U000fdeae" for number in count())
    texts: list[str] = []
    of_calls: list[str] = []

    def mark(of: list[str]) -> str:
        of.append(next(marks))
        return of[-1]

    def marked_call(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        return {**call, "function": {**function, "name": mark(of_calls), "arguments": {"key": mark(of_calls)}}}

    marked = []
    for message in messages:
        content, calls = message["content"], message.get("tool_calls")
        if isinstance(content, str):
            content = mark(texts) if content else ""
        elif isinstance(content, list):
            content = [{"type": "text", "text": mark(texts)} for _ in content]
        message = {**message, "content": content}
        if isinstance(calls, list):
            message["tool_calls"] = [marked_call(call) for call in calls]
        marked.append(message)
    return marked, texts, of_calls
