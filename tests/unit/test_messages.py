"""Conversations as OpenAI's clients write them: what templates of each kind make of them."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.text import Text

# As in the models' own templates, as far as contents and tool calls go.
TEMPLATES = {
    "qwen3": (
        "{% for m in messages %}{% if m.content is string %}{% set content = m.content %}{% else %}"
        "{% set content = '' %}{% endif %}<{{ m.role }}>{{ content }}"
        "{% for call in m.tool_calls %}<call>{{ call.function.name }} "
        "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    ),
    "llama3": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
    "strict": "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}",
    "gemma3": (
        "{% for m in messages %}<{{ m.role }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
    ),
    "parts alone": (
        "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    ),
}
PARTS = [{"type": "text", "text": "See"}, {"type": "text", "text": "this"}]


@pytest.fixture(params=TEMPLATES)
def rendered(request):
    """Renders a conversation with one of the templates; an error is returned."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.chat_template = TEMPLATES[request.param]
    text = Text(tokenizer)

    def render(messages, **options):
        (prompt,) = text.encode_conversations([messages], False, None, **options)
        return prompt.error or prompt.text

    render.name = request.param
    return render


def test_a_string_reaches_every_template(rendered):
    """Templates of multimodal models may go through a content part by part, and wrote nothing for a string."""
    assert rendered([{"role": "user", "content": "See this"}]) == "<user>See this"


def test_text_parts_reach_every_template(rendered):
    """Qwen3's template wrote nothing for them, and Llama 3's wrote Python's form of the list, both without an error."""
    separator = "" if rendered.name in ("gemma3", "parts alone") else "\n"  # the template's own, or vLLM's
    for parts in (
        PARTS,
        tuple(PARTS),
        np.array(PARTS),
        ["See", "this"],
        [{"type": "input_text", "text": "See"}, "this"],
    ):
        assert rendered([{"role": "user", "content": parts}]) == f"<user>See{separator}this"
    both = [{"role": "user", "content": "Hi"}, {"role": "user", "content": PARTS}]
    assert rendered(both) == f"<user>Hi<user>See{separator}this"
    assert rendered([{"role": "user", "content": PARTS}], splits_special=True) == f"<user>See{separator}this"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://example.org/cat.png"}},
        {"type": "text"},
        {"type": "text", "text": 5},
        {"text": "no type"},
        7,
        None,
    ],
    ids=str,
)
def test_a_part_that_is_not_text_is_refused(rendered, part):
    error = rendered([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}])
    assert isinstance(error, ValueError) and "nanovllm reads text only" in str(error) and repr(part)[:20] in str(error)


@pytest.mark.parametrize("content", [None, 5, {"type": "text", "text": "Hi"}, True], ids=str)
def test_a_content_that_is_neither_text_nor_parts_is_refused(rendered, content):
    error = rendered([{"role": "user", "content": content}])
    assert isinstance(error, ValueError) and "content" in str(error)


@pytest.mark.parametrize("rendered", ["qwen3"], indirect=True)
@pytest.mark.parametrize("arguments", ['{"city": "Ulm", "days": 2}', {"city": "Ulm", "days": 2}], ids=["text", "dict"])
def test_tool_calls_need_no_content_and_arguments_are_written_once(rendered, arguments):
    """OpenAI's clients send `content: null` and arguments as a JSON string, which templates wrote in quotes."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    for message in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ):
        assert rendered([message]) == '<assistant><call>weather {"city": "Ulm", "days": 2}'
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{no json"}}]}
    assert "the arguments of a tool call must be JSON, not '{no json'" in str(rendered([message]))
    empty = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    assert rendered([empty]) == "<assistant><call>f {}"


@pytest.mark.parametrize("rendered", ["qwen3"], indirect=True)
def test_arrays_and_fields_that_are_none_are_as_in_json(rendered):
    """Parquet gives arrays for lists, and every message the fields of all messages."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"ids": np.arange(2)}}}
    messages = np.array(
        [
            {"role": "user", "content": "Hi", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": np.array([call])},
        ]
    )
    assert rendered(messages) == '<user>Hi<assistant><call>f {"ids": [0, 1]}'
    assert json.dumps(rendered(list(messages))) == json.dumps(rendered(messages))
