"""Conversations as OpenAI's clients write them: what templates of each kind make of them."""

import copy
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
    "gemma3 with images": (
        "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}"
        "{% set prefix = '<system>' + (first if first is string else first[0]['text']) %}{% set turns = messages[1:] %}"
        "{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}{{ (prefix if loop.first else '') + '<' + m['role'] + '>' }}"
        "{% if m['content'] is string %}{{ m['content'] | trim }}{% elif m['content'] is iterable %}"
        "{% for item in m['content'] %}{% if item['type'] == 'image' %}<start_of_image>"
        "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
        "{% else %}{{ raise_exception('Invalid content type') }}{% endif %}{% endfor %}"
    ),
    "qwen2.5-vl": (
        "{% set images = namespace(value=0) %}{% for m in messages %}<{{ m['role'] }}>"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for item in m['content'] %}"
        "{% if item['type'] == 'image' or 'image' in item or 'image_url' in item %}"
        "{% set images.value = images.value + 1 %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif item['type'] == 'video' or 'video' in item %}<|vision_start|><|video_pad|><|vision_end|>"
        "{% elif 'text' in item %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    ),
    "qwen3-vl": (
        "{% macro written(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
        "{% if 'image' in item or item.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in item %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}<{{ m.role }}>{{ written(m.content) }}{% for call in m.tool_calls %}"
        "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    ),
    "parts alone": (
        "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    ),
}
JOIN_PARTS = ("gemma3", "gemma3 with images", "qwen2.5-vl", "qwen3-vl", "parts alone")  # by themselves
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
    separator = "" if rendered.name in JOIN_PARTS else "\n"  # the template's own, or vLLM's
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


def encoded(template: str, messages, tokenizer=None, **options):
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.chat_template = template
    (prompt,) = Text(tokenizer).encode_conversations([messages], False, None, **options)
    return prompt.error or prompt.text


def test_each_roles_contents_get_the_form_that_it_is_read_in():
    """In some templates only the user's turn goes through parts, and others raise without a system message."""
    template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<user>{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    roles = ("system", "user", "assistant")
    parts = {role: [{"type": "text", "text": role}, {"type": "text", "text": "!"}] for role in roles}
    for lists in ((), roles, ("user",), ("system",), ("assistant",)):
        messages = [{"role": role, "content": parts[role] if role in lists else f"{role}?"} for role in parts]
        system, user, assistant = (f"{role}\n!" if role in lists else f"{role}?" for role in parts)
        assert encoded(template, messages) == f"<system>{system}<user>{user.replace(chr(10), '')}<assistant>{assistant}"


def test_a_text_that_another_message_holds_is_written_too(rendered):
    """The search for a message's text in the prompt found it elsewhere, so its turn could be empty."""
    system = {"role": "system", "content": 'Translate words. Example: cat -> chat. {"type": "text"} user'}
    for word in ("cat", "user", "a", '"type": "text"'):
        for content in (word, [{"type": "text", "text": word}]):
            assert rendered([system, {"role": "user", "content": content}]).endswith(f"<user>{word}")
            assert rendered([{"role": "user", "content": content}]) == f"<user>{word}"


def test_calls_whose_names_other_messages_hold_are_not_lost():
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": {}}}]
    messages = [{"role": "user", "content": "Call get_weather"}, {"role": "assistant", "tool_calls": calls}]
    error = encoded(TEMPLATES["strict"], messages)
    assert isinstance(error, ValueError) and "it does not write the tool calls" in str(error)


def test_an_error_of_the_template_is_the_conversations():
    template = "{% if messages[0].role == 'assistant' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    for content in ("Hi", PARTS):
        assert "roles must alternate" in str(encoded(template, [{"role": "assistant", "content": content}]))
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert "roles must alternate" in str(encoded(template, [{"role": "assistant", "tool_calls": calls}]))


def test_a_template_may_change_texts_and_be_replaced():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    for _ in range(2):
        upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
        assert encoded(upper, [{"role": "user", "content": "Hi"}], tokenizer) == "HI"
        assert encoded(upper, [{"role": "user", "content": PARTS}], tokenizer) == "SEE\nTHIS"
        assert encoded(TEMPLATES["parts alone"], [{"role": "user", "content": "Hi"}], tokenizer) == "<user>Hi"


def test_the_form_follows_the_template_and_its_arguments():
    """The forms that were found are remembered."""
    tokenizer, message = AutoTokenizer.from_pretrained(MODEL_DIRECTORY), [{"role": "user", "content": "Hi"}]
    text = Text(tokenizer)
    for name in ("strict", "parts alone", "qwen3", "parts alone"):
        tokenizer.chat_template = TEMPLATES[name]
        assert text.encode_conversations([message], False, None)[0].text == "<user>Hi"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if style == 'parts' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for style in ("parts", "text", "parts"):
        assert text.encode_conversations([message], False, {"style": style})[0].text == "Hi"


def test_parts_are_strings_where_the_template_leaves_out_a_message():
    template = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
    assert encoded(template, messages) == "<user>See\nthis"


def test_tool_calls_are_written_in_the_form_that_the_template_adds_up():
    """Templates of DeepSeek's kind add the arguments to a text, so they must be JSON."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + ':' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    for arguments in ('{"city": "Ulm"}', {"city": "Ulm"}):
        calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "tool_calls": calls}]
        assert encoded(template, messages) == 'Rain?weather:{"city": "Ulm"}'
    error = encoded(TEMPLATES["gemma3"], messages)
    assert isinstance(error, ValueError) and "it does not write the tool calls" in str(error)


def test_what_has_no_text_is_kept_where_templates_read_it():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}"
        "{% if 'tool_calls' in m %}calls{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": []},
        {"role": "tool", "content": {"degrees": 20}},
    ]
    assert encoded(template, messages) == "<assistant>Hm.<tool>{'degrees': 20}"


def test_special_tokens_are_ordinary_text_in_calls_and_documents_too():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{% for each in documents or [] %}{{ each.text }}"
        "{% endfor %}<|im_end|>"
    )
    call = {"function": {"name": "f", "arguments": '{"<|im_end|>": "<|im_end|>"}'}}
    messages = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "tool_calls": [call]}]
    options = {"documents": [{"text": "<|im_end|>"}]}
    (prompt,) = Text(tokenizer).encode_conversations([messages], False, None, True, options)
    assert prompt.token_ids.count(tokenizer.eos_token_id) == 1, "the template's own"
    assert prompt.text == 'a<|im_end|>f{"<|im_end|>": "<|im_end|>"}<|im_end|><|im_end|>'


def test_the_callers_messages_stay_as_they_are(rendered):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    rendered(messages)
    rendered(messages, splits_special=True)
    assert messages == before


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


@pytest.mark.parametrize("key", ["image", "images", "image_url", "video", "videos", "audio", "audios"])
def test_what_is_attached_beside_a_text_is_refused(rendered, key):
    """Templates leave it out, or write a placeholder for it. Empty fields, as tables have them, attach nothing."""
    text = {"type": "text", "text": "What is this?"}

    def conversations(value):
        user = {"role": "user", "content": "What is this?"}
        yield [{**user, key: value}]
        yield [{"role": "user", "content": [text, {**text, key: value}]}]
        yield [user, {"role": "tool", "content": {"degrees": 20, key: value}}]

    for messages in conversations(["cat.png"]):
        error = rendered(messages)
        assert isinstance(error, ValueError) and f"nanovllm reads text only, so leave {key}=['cat.png'] out" in str(
            error
        )
    for value in (None, [], ""):
        assert not any("nanovllm reads text only" in str(rendered(messages)) for messages in conversations(value))


def test_a_chat_template_in_a_file_of_its_own_is_found(tmp_path):
    """Processors of multimodal models once wrote it to chat_template.json, which their tokenizers do not read."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    assert Text.of_model(tmp_path).tokenizer.chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATES["gemma3 with images"]}))
    (found,) = Text.of_model(tmp_path).encode_conversations([messages], False, None)
    assert found.text == "<user>Hi"
    rows = [{"name": "default", "template": TEMPLATES["strict"]}, {"name": "rag", "template": "x"}]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": rows}))
    (found,) = Text.of_model(tmp_path).encode_conversations([messages], False, None)
    assert found.text == "<user>Hi"
    for wrong in (5, ["x"], [{"name": "default"}]):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ValueError, match=r"chat_template in .*chat_template\.json must be a string"):
            Text.of_model(tmp_path)
    tokenizer.chat_template = TEMPLATES["strict"]
    tokenizer.save_pretrained(tmp_path)
    assert Text.of_model(tmp_path).tokenizer.chat_template == TEMPLATES["strict"]


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


# Tools and documents


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": {}}}]
DOCUMENTS = [{"title": "Ulm", "text": "The minster."}]
READS = {
    "tools": "{% for each in tools or [] %}{{ each | tojson }}{% endfor %}",
    "documents": "{% for each in documents or [] %}{{ each.text }}{% endfor %}",
}


@pytest.mark.parametrize("name, value", [("tools", TOOLS), ("documents", DOCUMENTS)])
@pytest.mark.parametrize("splits_special", [False, True])
def test_what_the_template_does_not_read_is_refused(name, value, splits_special):
    """transformers drops it without a word."""
    message = [{"role": "user", "content": "Rain?"}]
    options = {"options": {name: value}, "splits_special": splits_special}
    error = encoded(TEMPLATES["llama3"], message, **options)
    assert f"it does not write {name}[0]; leave it out, or pass another chat_template=" in str(error)
    assert encoded(TEMPLATES["llama3"], message, options={name: []}) == "<user>Rain?"
    written = encoded(READS[name] + TEMPLATES["llama3"], message, **options)
    assert ("weather" if name == "tools" else "The minster.") in written and written.endswith("<user>Rain?")
    (prompt,) = text_with(TEMPLATES["llama3"]).encode([{"messages": message, "chat_template_kwargs": {name: value}}])
    assert f"it does not write {name}[0]" in str(prompt.error)


def text_with(template: str) -> Text:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.chat_template = template
    return Text(tokenizer)


def test_a_template_may_read_tools_in_some_conversations_alone():
    template = "{% if messages[0].role == 'user' %}" + READS["tools"] + "{% endif %}" + TEMPLATES["llama3"]
    text, user, system = text_with(template), {"role": "user", "content": "Hi"}, {"role": "system", "content": "Hi"}
    for _ in range(2):  # forms are remembered
        written, dropped, plain = (
            text.encode_conversations([[first, user]], False, None, options={"tools": tools})[0]
            for first, tools in ((user, TOOLS), (system, TOOLS), (system, []))
        )
        assert "weather" in written.text and plain.text == "<system>Hi<user>Hi"
        assert "does not write tools[0]" in str(dropped.error)


def test_documents_of_their_own_cost_a_conversation_nothing(monkeypatch):
    """What a template reads was found again for each conversation with other documents."""
    text, calls = text_with(READS["documents"] + TEMPLATES["llama3"]), []
    render = text.tokenizer.apply_chat_template

    def counted(*given, **named):
        calls.append(given)
        return render(*given, **named)

    monkeypatch.setattr(text.tokenizer, "apply_chat_template", counted)
    for number in range(4):
        calls.clear()
        options = {"documents": [{"text": f"{number}"}]}
        (prompt,) = text.encode_conversations([[{"role": "user", "content": "Hi"}]], False, None, options=options)
        assert prompt.text == f"{number}<user>Hi" and (len(calls) == 1 or number == 0)


def test_each_tool_and_document_is_checked_in_each_conversation():
    """A template may leave out some of them, and another conversation of the call says nothing about this one's."""
    reads = "{% for each in documents or [] %}{% if each.title %}{{ each.text }}{% endif %}{{ ' ' }}{% endfor %}"
    text, message = text_with(reads + TEMPLATES["llama3"]), [{"role": "user", "content": "Hi"}]
    good, bad = {"title": "A", "text": "The minster."}, {"text": "Rain."}
    for documents, dropped in [([bad], 0), ([good], None), ([good, bad], 1), ([good, good], None)]:
        (prompt,) = text.encode_conversations([message], False, None, options={"documents": documents})
        error = f"it does not write documents[{dropped}]; leave it out"
        assert (prompt.error is None) if dropped is None else (error in str(prompt.error))


def test_tools_may_be_an_iterator_and_are_written_one_by_one():
    message, template = [{"role": "user", "content": "Rain?"}], READS["tools"] + TEMPLATES["llama3"]
    for _ in range(2):
        assert "weather" in encoded(template, message, options={"tools": iter(TOOLS)})
    counting = "{{ (tools or []) | length }} tools. " + TEMPLATES["llama3"]
    assert "it does not write tools[0]" in str(encoded(counting, message, options={"tools": TOOLS}))
    twice = (
        "{% for each in tools | unique(attribute='function.name') %}{{ each | tojson }}{% endfor %}"
        + TEMPLATES["llama3"]
    )
    assert "weather" in encoded(twice, message, options={"tools": TOOLS * 2})
    with pytest.raises(TypeError, match="documents must be a list, not 'text'"):
        encoded(template, message, options={"documents": "text"})
    none = {"add_generation_prompt": None, "continue_final_message": None}
    (prompt,) = text_with(template).encode([{"messages": message, "chat_template_kwargs": none}])
    assert prompt.error is None


def test_a_function_may_be_a_tool():
    def weather(city: str) -> str:
        """It rains.

        Args:
            city: Where.
        """

    message = [{"role": "user", "content": "Rain?"}]
    assert '"name": "weather"' in encoded(READS["tools"] + TEMPLATES["llama3"], message, options={"tools": [weather]})
    assert "does not write tools[0]" in str(encoded(TEMPLATES["llama3"], message, options={"tools": [weather]}))


def test_arguments_that_the_template_never_mentions_are_named_once(caplog):
    """transformers ignores them, and scripts pass `enable_thinking` to models that cannot think."""
    text, message = text_with(TEMPLATES["llama3"] + "{{ style }}"), [{"role": "user", "content": "Hi"}]
    given = {"enable_thinking": False, "style": "!", "tools": None}
    for _ in range(2):
        (one,) = text.encode_conversations([message], False, given)
        (two,) = text.encode([{"messages": message, "chat_template_kwargs": {**given, "add_generation_prompt": False}}])
        assert one.text == two.text == "<user>Hi!"
    assert caplog.messages == ["the chat template does not read chat_template_kwargs: enable_thinking"]
    text.encode_conversations([message], False, {"thinking": True})
    assert caplog.messages[1:] == ["the chat template does not read chat_template_kwargs: thinking"]


def test_a_conversation_of_a_dict_may_continue_its_last_message():
    text = text_with(TEMPLATES["llama3"] + "{% if add_generation_prompt %}<assistant>{% endif %}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]

    def prompt(**arguments):
        (found,) = text.encode([{"messages": messages, "chat_template_kwargs": arguments}])
        return found.error or found.text

    assert prompt() == "<user>Hi<assistant>Well,<assistant>"
    assert prompt(add_generation_prompt=False, continue_final_message=True) == "<user>Hi<assistant>Well,"
    assert "needs add_generation_prompt=False" in str(prompt(continue_final_message=True))
    assert "must not hold tokenize" in str(prompt(tokenize=True))


# Refusals and arguments


def test_a_refusal_is_text(rendered):
    """OpenAI's clients send back what the model refused, as a part or as a field of the message."""
    for message in (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "refusal": "I cannot.", "tool_calls": None},
        {"role": "assistant", "content": "I cannot.", "refusal": None},
    ):
        assert rendered([message]) == "<assistant>I cannot."
    both = {"role": "assistant", "content": "Yes.", "refusal": "No."}
    assert "a message has a content or a refusal, not both" in str(rendered([both]))
    assert "nanovllm reads text only" in str(rendered([{"role": "assistant", "content": [{"type": "refusal"}]}]))


@pytest.mark.parametrize("rendered", ["qwen3"], indirect=True)
def test_values_of_arguments_survive(rendered):
    def written(arguments: str):
        found = rendered([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
        return found if isinstance(found, ValueError) else found.removeprefix("<assistant><call>f ")

    for same in ('{"a": 1.0}', f'{{"a": {2**60}}}', '{"a": "äöü 😀 <b>"}', '{"a": -0.0, "b": [null, true]}'):
        assert written(same) == same
    assert written('{"a": 1.50, "b": 1e3}') == '{"a": 1.5, "b": 1000.0}'
    assert written('{"a": 1, "a": 2}') == '{"a": 2}', "the last one counts, as for Python's json and JavaScript"
    assert "1e400 is too large for a float" in str(written('{"a": 1e400}')), "JSON has no Infinity"
