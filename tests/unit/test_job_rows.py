"""Rows of a job: each line becomes a row, with any content, and each row becomes one line of JSON."""

import json
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm import CompletionOutput, RequestOutput, SamplingParams, TokenLogprobs
from nanovllm.jobs.output_rows import output_of
from nanovllm.jobs.rows import JobRow, parse_row
from nanovllm.token_texts import TokenPiece

MESSAGES = [{"role": "user", "content": "Hi"}]
PLAIN = {"id": "a", "prompt": "Hi"}
KINDS = ("plain", "completions", "chat")
URLS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def row_of(fields, number: int = 0) -> JobRow:
    return parse_row(number, json.dumps(fields).encode() + b"\n")


def openai(kind: str = "chat", **body) -> dict:
    prompt = {"messages": MESSAGES} if kind == "chat" else {"prompt": "Hi"}
    return {"custom_id": "a", "method": "POST", "url": URLS[kind], "body": {"model": "m", **prompt, **body}}


def without(fields: dict, *names: str) -> dict:
    return {name: value for name, value in fields.items() if name not in names}


# Plain rows


@pytest.mark.parametrize(
    "fields, prompt",
    [
        ({"prompt": "Hi"}, "Hi"),
        ({"prompt": ""}, ""),
        ({"prompt": [1, 2]}, [1, 2]),
        ({"token_ids": [1, 2]}, [1, 2]),
        ({"messages": MESSAGES}, {"messages": MESSAGES}),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
            {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"prompt": "Hi", "messages": None, "params": None}, "Hi"),
        ({"prompt": "\ud83d\ude00 a surrogate pair that is whole"}, "\U0001f600 a surrogate pair that is whole"),
    ],
)
def test_a_plain_row_is_what_it_says(fields, prompt):
    assert row_of({"id": "a", **fields}, 7) == JobRow(7, "a", prompt, {}, "plain")


@pytest.mark.parametrize("given_id, found", [("a", "a"), (7, "7"), (0, "0"), (-1, "-1"), ("x" * 512, "x" * 512)])
def test_an_id_is_a_string_and_an_integer_becomes_one(given_id, found):
    assert row_of({**PLAIN, "id": given_id}).id == found
    assert row_of({**openai(), "custom_id": given_id}).id == found


def test_params_are_those_that_the_row_gives_and_null_means_none_there():
    params = {
        "max_tokens": None,
        "temperature": 0,
        "logit_bias": {"5": 1},
        "structured_outputs": {"choice": ["a", "b"]},
    }
    assert row_of({**PLAIN, "params": params}) == JobRow(0, "a", "Hi", params, "plain")


def test_min_tokens_are_not_held_against_a_default_of_max_tokens_that_the_job_may_change():
    assert row_of({**PLAIN, "params": {"min_tokens": 1000}}).error is None


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"  \n"])
def test_bytes_and_text_give_the_same_row_whatever_ends_the_line(end):
    line = json.dumps({**PLAIN, "prompt": "Grüße 😀"}, ensure_ascii=False).encode()
    assert parse_row(0, line + end) == parse_row(0, (line + end).decode()) == JobRow(0, "a", "Grüße 😀", {}, "plain")


def test_a_mark_at_the_start_of_a_file_is_not_part_of_the_row():
    assert parse_row(0, b"\xef\xbb\xbf" + json.dumps(PLAIN).encode()) == row_of(PLAIN)


# Errors of a plain row

BAD_PLAIN = [
    ({**PLAIN, "id": ""}, '"id" must have 1 to 512 characters, not 0', None),
    ({**PLAIN, "id": "x" * 513}, '"id" must have 1 to 512 characters, not 513', None),
    ({**PLAIN, "id": True}, '"id" must be a string or an integer, not True', None),
    ({**PLAIN, "id": 1.5}, '"id" must be a string or an integer, not 1.5', None),
    ({**PLAIN, "id": ["a"]}, '"id" must be a string or an integer', None),
    ({"id": "a"}, "exactly one of prompt, messages, token_ids, not none of them", "a"),
    ({**PLAIN, "messages": MESSAGES}, "exactly one of .*, not prompt and messages", "a"),
    ({**PLAIN, "prompt": 5}, '"prompt" must be a string or a list of token ids, not 5', "a"),
    ({**PLAIN, "prompt": [1, True]}, '"prompt" must be a string or a list of token ids', "a"),
    ({**PLAIN, "prompt": [1, "a"]}, '"prompt" must be a string or a list of token ids', "a"),
    ({**PLAIN, "prompt": ["a", "b"]}, '"prompt" holds 2 prompts; write one row per prompt', "a"),
    ({"id": "a", "token_ids": "Hi"}, '"token_ids" must be a list of token ids', "a"),
    ({"id": "a", "messages": []}, '"messages" must be a list of at least one message', "a"),
    ({"id": "a", "messages": "Hi"}, '"messages" must be a list of at least one message', "a"),
    ({"id": "a", "messages": ["Hi"]}, '"messages" must be a list of at least one message', "a"),
    ({"id": "a", "messages": MESSAGES, "chat_template_kwargs": 1}, '"chat_template_kwargs" must be an object', "a"),
    ({**PLAIN, "chat_template_kwargs": {}}, '"chat_template_kwargs" needs "messages"', "a"),
    ({**PLAIN, "params": []}, '"params" must be an object', "a"),
    ({**PLAIN, "params": {"temperature": -1}}, r"temperature must be 0 \(greedy\) or more, not -1", "a"),
    ({**PLAIN, "params": {"temprature": 1}}, "unknown parameter 'temprature'; did you mean temperature", "a"),
    ({**PLAIN, "params": {"self": 1}}, "self", "a"),
    ({**PLAIN, "params": {"structured_outputs": {"jsn": 1}}}, "unknown parameter 'jsn'; did you mean json", "a"),
    ({**PLAIN, "promt": "Hi"}, "unknown key 'promt'; did you mean \"prompt\"", "a"),
    ({"id": "a", "text": "Hi"}, "unknown key 'text'; did you mean \"prompt\"", "a"),
    ({"id": "a", "input": "Hi"}, "unknown key 'input'; did you mean \"prompt\"", "a"),
    ({**PLAIN, "max_tokens": 5}, "unknown key 'max_tokens'; put it into \"params\"", "a"),
    ({**PLAIN, "temperatur": 5}, "unknown key 'temperatur'; put it into \"params\"", "a"),
    ({**PLAIN, "sampling_params": {}}, "unknown key 'sampling_params'; did you mean \"params\"", "a"),
    ({**PLAIN, "§": 1}, "unknown key '§'; known are id, prompt, messages, token_ids, params", "a"),
    ({"uid": 1, "prompt": "Hi"}, "unknown key 'uid'; did you mean \"id\"", "5"),
    ({"id": "a", "text": "Hi"}, "--prompt-column takes the prompt from any key", "a"),
]


@pytest.mark.parametrize("fields, error, found_id", BAD_PLAIN)
def test_what_is_wrong_with_a_plain_row_is_named(fields, error, found_id):
    found = row_of(fields, 4)
    assert found == JobRow(4, found_id, None, {}, "plain", found.error, is_numbered="id" not in fields)
    assert found.error is not None
    with pytest.raises(ValueError, match=error):
        raise ValueError(found.error)


DEEP = "[" * 200_000 + "]" * 200_000
BROKEN = [
    (b"", "not JSON: Expecting value at character 0", None),
    (b'{"id": "a", "prompt": "Hi"', "not JSON: .* at character 26", "a"),
    (b'{"prompt": "Hi", "id": "a"', "not JSON", None),
    (b'{"prompt": {"id": "b"}, "id": "a"', "not JSON", None),
    (b'{"id": "\\q", "prompt"', "not JSON", None),
    (b'{"id": 12', "not JSON", None),
    (b'{"id": 12, "prompt": "two\nlines"}', "not JSON: Invalid control character", "12"),
    (b"\xff\xfe{\x00}\x00", "not UTF-8 at byte 0; convert the file to UTF-8", None),
    (b'{"id": "a", "prompt": "\xff"}', "not UTF-8 at byte 23", "a"),
    (b'{"id": "\xff", "prompt": "Hi"}', "not UTF-8", None),
    (b'["a"]', r"""must be a JSON object, not '\["a"\]'""", None),
    (b'"Hi"', "must be a JSON object", None),
    (b"null", "must be a JSON object", None),
    (b'{"id": "a", "prompt": "Hi", "prompt": "Ho"}', "the key 'prompt' twice; leave one out", "a"),
    (b'{"id": "a", "id": "b", "prompt": "Hi"}', "the key 'id' twice", None),
    (b'{"id": "a", "messages": [{"id": 1, "id": 2}]}', "the key 'id' twice", "a"),
    (b'{"prompt": NaN, "id": "a"}', "holds NaN, which JSON does not have", "a"),
    (b'{"id": "a", "prompt": [-Infinity]}', "holds -Infinity", "a"),
    (b'{"id": "a", "prompt": %s}' % DEEP.encode(), "nested too deeply", "a"),
    (b'{"prompt": %s}' % DEEP.encode(), "nested too deeply", None),
    (b'{"id": "a", "prompt": "\\ud800"}', "half of a surrogate pair", "a"),
    (b'{"id": "a", "messages": [{"\\uDC00": 1}]}', "half of a surrogate pair", "a"),
    (b'{"id": "\\ud800", "prompt": "Hi"}', "half of a surrogate pair", None),
]


@pytest.mark.parametrize("line, error, found_id", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_a_row_with_an_error_and_keeps_the_id_that_can_be_told(line, error, found_id):
    found = parse_row(2, line)
    assert found == JobRow(2, found_id, None, {}, "plain", found.error)
    with pytest.raises(ValueError, match=error):
        raise ValueError(found.error)


def test_a_line_of_text_may_hold_half_a_pair_as_it_is():
    assert "surrogate" in parse_row(0, '{"id": "a", "prompt": "\ud800"}').error


@pytest.mark.parametrize(
    "line", [b'{"id": "a", "prompt": [%s]}', b'{"id": "a", "prompt": "Hi", "params": {"seed": %s}}']
)
def test_a_gigantic_integer_is_the_error_of_its_row(line):
    for digits in (5000, 4000) if hasattr(sys, "get_int_max_str_digits") else (4000,):
        found = parse_row(0, line % (b"9" * digits))
        assert found.id == "a" and len(found.error or "") <= 500
        assert digits == 4000 or found.error == "the line holds an integer with too many digits"
    assert row_of({**PLAIN, "id": 10**600}).error == '"id" must have 1 to 512 characters, not 601'


def test_an_error_shows_only_the_start_of_a_long_value():
    for fields in ({**PLAIN, "prompt": ["x" * 10_000, 1]}, {**PLAIN, "y" * 10_000: 1}):
        error = row_of(fields).error
        assert len(error) == 500 and error.endswith("…")


# OpenAI's rows


def expected(kind: str, **params) -> dict:
    return params


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
SAME = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 5, "presence_penalty": 1, "frequency_penalty": -1,
    "logit_bias": {"7": -100}, "top_k": 4, "min_p": 0.1, "min_tokens": 3, "repetition_penalty": 1.2,
    "stop_token_ids": [2], "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
    "bad_words": ["x"], "allowed_token_ids": [1, 2], "logprobs_mode": "processed", "prompt_logprobs": 1,
}  # fmt: skip
FIELDS = [
    *(({name: value}, {name: value}) for name, value in SAME.items()),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ),
    ({"structured_outputs": {"regex": "a+", "json": None}}, {"structured_outputs": {"regex": "a+"}}),
    ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}),
    ({"response_format": {"type": "text", "json_schema": None}}, {}),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": [None]}, "strict": None, "description": "d", "of no one": None},
            }
        },
        {"structured_outputs": {"json": {"enum": [None]}}},
    ),
    ({"stream": False, "echo": False, "best_of": 1}, {}),
    ({"n": 3, "best_of": 3}, {"n": 3}),
    ({"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "flex", "prompt_cache_key": "k"}, {}),
    ({"safety_identifier": "s", "stream_options": {"include_usage": True}}, {}),
    ({**dict.fromkeys(SAME), "max_tokens": None, "tools": None, "of no one": None, "stream": None}, {}),
]


@pytest.mark.parametrize("body, params", FIELDS)
@pytest.mark.parametrize("kind", URLS)
def test_a_field_of_a_body_is_the_parameter_of_the_same_meaning(kind, body, params):
    found = row_of(openai(kind, **body), 3)
    prompt = {"messages": MESSAGES} if kind == "chat" else "Hi"
    assert found == JobRow(3, "a", prompt, expected(kind, **params), kind, None, "m")
    SamplingParams(**found.params)


@pytest.mark.parametrize(
    "kind, body, number",
    [
        ("completions", {"logprobs": 3}, 3),
        ("completions", {"logprobs": 0}, 0),
        ("chat", {"logprobs": True}, 0),
        ("chat", {"logprobs": True, "top_logprobs": 3}, 3),
        ("chat", {"logprobs": False}, None),
        ("chat", {"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_each_endpoint_has_its_own_way_to_ask_for_logprobs(kind, body, number):
    found = row_of(openai(kind, **body))
    assert found.error is None and found.params.get("logprobs") == number


def test_the_other_parts_of_a_request():
    kwargs = {"enable_thinking": False}
    assert row_of(openai(chat_template_kwargs=kwargs)).prompt == {"messages": MESSAGES, "chat_template_kwargs": kwargs}
    for prompt, found in (([5, 6], [5, 6]), (["Hi"], "Hi"), ([[5, 6]], [5, 6])):
        assert row_of(openai("completions", prompt=prompt)).prompt == found
    assert row_of(without(openai(), "method")).error is None
    assert row_of(openai(model=None)).model is None


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
DOCUMENTS = [{"title": "Ulm", "text": "The minster."}]


def test_fields_for_the_chat_template_are_among_its_arguments():
    def arguments(**body):
        row = row_of(openai(**body))
        assert row.error is None and row.params == {} and row.prompt["messages"] == MESSAGES
        return row.prompt.get("chat_template_kwargs")

    whole = {
        "tools": TOOLS, "documents": DOCUMENTS, "chat_template": "{{ messages }}", "add_generation_prompt": False,
        "continue_final_message": True,
    }  # fmt: skip
    assert arguments(**whole) == whole
    assert arguments(tools=TOOLS, chat_template_kwargs={"a": 1}) == {"tools": TOOLS, "a": 1}
    assert arguments(tools=TOOLS, tool_choice="auto", parallel_tool_calls=True) == {"tools": TOOLS}
    assert arguments(tools=TOOLS, tool_choice="none") is None, "the model must not call one"
    assert arguments(tools=None, tool_choice=None) is None


BAD_OPENAI = [
    (without(openai(), "custom_id"), 'has no "custom_id"', None),
    ({**without(openai(), "custom_id"), "id": "b"}, "unknown key 'id'; did you mean \"custom_id\"", "b"),
    ({**openai(), "custom_id": ""}, '"custom_id" must have 1 to 512', None),
    ({**openai(), "method": "GET"}, '"method" must be "POST", not \'GET\'', "a"),
    (
        {**openai(), "url": "/v1/rerank"},
        "\"url\" must be '/v1/completions' or '/v1/chat/completions' or '/v1/embeddings'",
        "a",
    ),
    ({**openai(), "url": ["x"]}, '"url" must be', "a"),
    (without(openai(), "url"), '"url" must be .*, not None', "a"),
    (without(openai(), "body"), '"body" must be an object with the request, not None', "a"),
    ({"custom_id": "a", "prompt": "Hi"}, 'unknown key \'prompt\'; put it into "body"; a plain row has "id"', "a"),
    ({**openai(), "temperature": 1}, "unknown key 'temperature'; put it into \"body\"", "a"),
    ({**openai(), "params": {}}, "unknown key 'params'; put it into \"body\"", "a"),
    (openai(messages=None), 'the body has no "messages", which /v1/chat/completions needs', "a"),
    (openai("completions", prompt=None), 'the body has no "prompt"', "a"),
    (openai(prompt="Hi"), "unknown field of the body 'prompt'; it belongs to /v1/completions", "a"),
    (openai("completions", messages=MESSAGES), "'messages'; it belongs to /v1/chat/completions", "a"),
    (openai("completions", top_logprobs=1), "'top_logprobs'; it belongs to /v1/chat/completions", "a"),
    (openai("completions", prompt=["a", "b"]), '"prompt" holds 2 prompts; write one row per prompt', "a"),
    (openai("completions", prompt=[[1], [2]]), '"prompt" holds 2 prompts; write one row per prompt', "a"),
    (openai("completions", prompt={}), '"prompt" must be a string or a list of token ids', "a"),
    (openai(messages=[]), '"messages" must be a list of at least one message', "a"),
    (openai(model=5), '"model" must be a string', "a"),
    (openai(stream=True), '"stream" must be false', "a"),
    (openai(echo=True), '"echo" must be false', "a"),
    (openai(stream=0), '"stream" must be false', "a"),
    (openai(best_of=2), '"best_of" must be 1 or as "n", not 2', "a"),
    (openai(max_tokens=5, max_completion_tokens=6), '"max_completion_tokens" is 6 and "max_tokens" is 5', "a"),
    (openai(max_tokens=0), "max_tokens must be at least 1, not 0", "a"),
    (openai(logprobs=3), '"logprobs" of a chat must be true or false, not 3; "top_logprobs" says how many', "a"),
    (openai(top_logprobs=3), '"top_logprobs" needs "logprobs": true', "a"),
    (openai(logprobs=True, top_logprobs=True), '"top_logprobs" must be an integer', "a"),
    (openai("completions", logprobs=True), "logprobs must be an integer, not True", "a"),
    (openai(response_format="json"), '"response_format" must have a "type" of', "a"),
    (openai(response_format={"type": "xml"}), '"response_format" must have a "type" of', "a"),
    (openai(response_format={"type": "json_schema"}), "needs its schema at json_schema.schema", "a"),
    (openai(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "json_schema.schema", "a"),
    *(
        (
            openai(response_format={"type": kind, key: SCHEMA}),
            f'{key!r}; a schema needs "type": "json_schema", "json_',
            "a",
        )
        for kind, key in (("json_object", "schema"), ("text", "json_schema"), ("json_object", "json_schema"))
    ),
    (openai(response_format={"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}), "'strict'", "a"),
    (
        openai(response_format={"type": "json_schema", "json_schema": {"schema": {}, "grammar": "x"}}),
        "unknown key of json_schema 'grammar'; known are schema, name, description, strict",
        "a",
    ),
    (
        openai(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "https://x"}}}),
        "json refers to 'https://x'",
        "a",
    ),
    (openai(response_format={"type": ["text"]}), '"response_format" must have a "type" of', "a"),
    (openai(guided_json={}, guided_whitespace_pattern=" ?"), 'write it as "whitespace_pattern" of', "a"),
    (openai(guided_json={}, guided_decoding_backend="outlines"), "structured outputs; leave it out", "a"),
    (openai(guided_regex="a", guided_json={}), "only one of guided_json, guided_regex can say", "a"),
    (openai(structured_outputs=5), '"structured_outputs" must be an object', "a"),
    (openai(structured_outputs={}), "give exactly one of json, regex", "a"),
    (openai(tools=TOOLS, tool_choice="required"), "\"tool_choice\" must be .* not 'required'; .*response_format", "a"),
    (openai(tools=TOOLS, tool_choice={"type": "function"}), '"tool_choice" must be "auto" or "none", not {', "a"),
    (openai(tools=TOOLS, parallel_tool_calls=False), '"parallel_tool_calls" must be true or left out', "a"),
    (openai(functions=[]), "'functions'; did you mean \"tools\"", "a"),
    (openai(function_call="auto"), "'function_call'; did you mean \"tool_choice\"", "a"),
    (openai("completions", tools=TOOLS), "'tools'; it belongs to /v1/chat/completions", "a"),
    (openai(tools=TOOLS, chat_template_kwargs={"tools": []}), "'tools' is in the body and in \"chat_template", "a"),
    (openai(chat_template_kwargs=5), '"chat_template_kwargs" must be an object, not 5', "a"),
    (openai("completions", suffix="x"), "'suffix'; nanovllm only continues", "a"),
    (openai(temprature=1), "unknown field of the body 'temprature'; did you mean \"temperature\"", "a"),
    (openai(max_new_tokens=1), "'max_new_tokens'; did you mean \"max_tokens\"", "a"),
    (openai(temperature="hot"), "temperature must be a number, not 'hot'", "a"),
]


@pytest.mark.parametrize("fields, error, found_id", BAD_OPENAI)
def test_what_is_wrong_with_a_row_of_openai_is_named(fields, error, found_id):
    found = row_of(fields, 4)
    assert (found.number, found.id, found.prompt, found.params) == (4, found_id, None, {})
    assert found.kind in URLS and found.error is not None
    with pytest.raises(ValueError, match=error):
        raise ValueError(found.error)


def test_a_broken_line_of_openai_is_told_by_its_keys():
    for line in (b'{"custom_id": "a", "url": ', b'{"url": NaN, "custom_id": "a"}'):
        found = parse_row(0, line)
        assert found.id == "a" and found.kind in URLS and found.error is not None


# Lines that must not raise

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({name for fields, *_ in [*BAD_PLAIN, *BAD_OPENAI] for name in fields})
BODIES = st.dictionaries(st.sampled_from(sorted({*SAME, *(name for body, _ in FIELDS for name in body)})), JSON)
ROWS = st.fixed_dictionaries({}, optional={name: JSON for name in NAMES})
REQUESTS = st.builds(lambda kind, body: openai(kind, **body), st.sampled_from(sorted(URLS)), BODIES)
PARAMS = st.builds(lambda params: {**PLAIN, "params": params}, BODIES)


def check(line: bytes | str) -> None:
    found = parse_row(5, line)
    assert found.number == 5 and (found.error is not None or found.id is not None)
    assert found.id is None or 0 < len(found.id.encode().decode()) <= 512
    if found.error is None:
        SamplingParams(**{"max_tokens": None, **found.params})
        assert found.prompt is not None
    else:
        row = output_of(found, None)
        assert json.loads(json.dumps(row, allow_nan=False)) == row and json.dumps(row, ensure_ascii=False).encode()


@given(st.binary())
@example(b"\xed\xa0\x80")
def test_no_bytes_raise(line):
    check(line)
    check(b'{"id": "a", "prompt": "' + line + b'"}')


@given(st.text(st.characters()))
def test_no_text_raises(line):
    check(line)
    check(f'{{"id": "{line}"}}')


@settings(max_examples=500)
@given(JSON | ROWS | REQUESTS | PARAMS)
@example({**PLAIN, "params": {"logit_bias": {"9" * 5000: 1}}})
@example({**PLAIN, "params": {"temperature": 10**400}})
def test_no_json_raises(value):
    check(json.dumps(value).encode())
    check(json.dumps(value))


def test_no_depth_raises_wherever_it_is():
    """At some depth JSON can still be read, but an error can no longer show it, so all depths near it are tried."""

    def nested(place: str, depth: int) -> str:
        return place % ("[" * depth + "]" * depth)

    prompt = '{"id": "a", "prompt": %s}'
    deepest = next(depth for depth in range(10, 100_000) if "deep" in (parse_row(0, nested(prompt, depth)).error or ""))
    for depth in (*range(max(deepest - 60, 1), deepest + 10), 10 * deepest):
        for place in (
            prompt,
            '{"id": "a", "prompt": "\\ud800", "params": %s}',
            '{"id": "a", "prompt": "", "params": {"stop": %s}}',
            '{"id": "a", "%s": 1}',
            '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "", "guided_json": {"a": %s}}}',
        ):
            check(nested(place, depth))


# Output


def logprobs(*tokens: list[tuple[int, float]], first: int = 0, text=lambda token_id: f"<{token_id}>") -> TokenLogprobs:
    """Each token is a list: itself, then the most probable ones. Its rank is 1 + its place among those."""
    ids, numbers = (np.array([[each[part] for each in token] for token in tokens]) for part in (0, 1))
    ranks = [next((i for i, each in enumerate(token[1:], 1) if each[0] == token[0][0]), 9) for token in tokens]

    def piece(token_id: int) -> TokenPiece | None:
        return None if (found := text(token_id)) is None else TokenPiece(found, found.encode())

    return TokenLogprobs(ids.astype(np.int32), numbers.astype(np.float32), np.array(ranks, np.int32), first, piece)


INF = float("inf")
# The first token is the second most probable one. Of the second token only one token could occur.
SCORED = logprobs([(7, -1.5), (8, -0.5), (7, -1.5)], [(9, -INF), (3, 0.0), (-1, -INF)])
TWO = RequestOutput(
    "0",
    "Hi",
    [1, 2, 3],
    [
        CompletionOutput(0, "Hé", [7, 9], "stop", "x", -INF, SCORED),
        CompletionOutput(1, "Ho", [4], "length", None, -0.25, logprobs([(4, -0.25), (4, -0.25), (5, -2.0)])),
    ],
    num_cached_tokens=2,
)
ONE = RequestOutput("0", "Hi", [1, 2, 3], [CompletionOutput(0, "Hé", [7, 9], "stop")])


def made(kind: str, number: int = 6, **params) -> JobRow:
    return JobRow(number, "a", "Hi", params, kind, None, "m" if kind != "plain" else None)


def test_a_plain_output_row():
    assert output_of(made("plain"), ONE) == {
        "id": "a",
        "outputs": [{"index": 0, "text": "Hé", "finish_reason": "stop", "num_tokens": 2}],
        "num_prompt_tokens": 3,
        "error": None,
    }


def test_token_ids_stand_in_for_the_text_of_a_row_without_text():
    assert output_of(made("plain"), ONE, with_token_ids=True)["outputs"][0]["token_ids"] == [7, 9]
    assert "token_ids" not in output_of(made("plain"), ONE)["outputs"][0]


def test_a_plain_output_row_has_every_completion_and_the_logprobs_and_null_for_minus_infinity():
    first, second = output_of(made("plain"), TWO)["outputs"]
    assert without(first, "logprobs") == {
        "index": 0, "text": "Hé", "finish_reason": "stop", "stop_reason": "x", "num_tokens": 2,
        "cumulative_logprob": None,
    }  # fmt: skip
    assert (second["index"], second["cumulative_logprob"], "stop_reason" in second) == (1, -0.25, False)
    assert first["logprobs"] == [
        {
            "id": 7, "token": "<7>", "logprob": -1.5, "rank": 2,
            "top": [
                {"id": 8, "token": "<8>", "logprob": -0.5, "rank": 1},
                {"id": 7, "token": "<7>", "logprob": -1.5, "rank": 2},
            ],
        },
        {
            "id": 9, "token": "<9>", "logprob": None, "rank": 9,
            "top": [{"id": 3, "token": "<3>", "logprob": 0.0, "rank": 1}],
        },
    ]  # fmt: skip


PROMPT_SCORED = RequestOutput("0", "Hi", [1, 7], ONE.outputs, prompt_logprobs=logprobs([(7, -INF), (8, -0.5)], first=1))


def test_a_prompts_first_token_has_no_logprobs():
    assert output_of(made("plain"), PROMPT_SCORED)["prompt_logprobs"] == [
        None,
        {
            "id": 7, "token": "<7>", "logprob": None, "rank": 9,
            "top": [{"id": 8, "token": "<8>", "logprob": -0.5, "rank": 1}],
        },
    ]  # fmt: skip
    as_vllm = [
        None,
        {
            "7": {"logprob": -9999.0, "rank": 9, "decoded_token": "<7>"},
            "8": {"logprob": -0.5, "rank": 1, "decoded_token": "<8>"},
        },
    ]
    assert output_of(made("chat"), PROMPT_SCORED)["response"]["body"]["prompt_logprobs"] == as_vllm
    assert output_of(made("completions"), PROMPT_SCORED)["response"]["body"]["choices"][0]["prompt_logprobs"] == as_vllm


@pytest.mark.parametrize("kind", URLS)
def test_an_output_row_of_openai(kind):
    is_chat = kind == "chat"
    answer = {"message": {"role": "assistant", "content": "Hé"}} if is_chat else {"text": "Hé"}
    assert output_of(made(kind), ONE, created=5, model="job's") == {
        "id": "batch_req_6",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_6",
            "body": {
                "id": "chatcmpl-6" if is_chat else "cmpl-6",
                "object": "chat.completion" if is_chat else "text_completion",
                "created": 5,
                "model": "m",
                "choices": [{"index": 0, **answer, "finish_reason": "stop", "stop_reason": None, "logprobs": None}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }
    unnamed = JobRow(6, "a", "Hi", {}, kind)
    assert output_of(unnamed, ONE, model="job's")["response"]["body"]["model"] == "job's"


def test_usage_counts_the_tokens_of_all_choices():
    body = output_of(made("chat"), TWO)["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_logprobs_of_a_completion_have_openais_first_shape():
    choices = output_of(made("completions"), TWO)["response"]["body"]["choices"]
    assert choices[0]["logprobs"] == {
        "tokens": ["<7>", "<9>"],
        "token_logprobs": [-1.5, -9999.0],
        "top_logprobs": [{"<7>": -1.5, "<8>": -0.5}, {"<9>": -9999.0, "<3>": 0.0}],
        "text_offset": [0, 3],
    }
    alone = CompletionOutput(0, "x", [7], "stop", logprobs=logprobs([(7, -1.0)]))
    body = output_of(made("completions"), RequestOutput("0", "Hi", [1], [alone]))["response"]["body"]
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None


def test_where_two_likely_tokens_have_one_text_the_more_probable_one_counts():
    same = logprobs([(7, -0.5), (7, -0.5), (8, -1.0)], text=lambda token_id: "x")
    output = RequestOutput("0", "Hi", [1], [CompletionOutput(0, "x", [7], "stop", logprobs=same)])
    body = output_of(made("completions"), output)["response"]["body"]
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.5}]


def test_logprobs_of_a_chat_have_openais_shape():
    found = output_of(made("chat"), TWO)["response"]["body"]["choices"][0]["logprobs"]
    seven = {"token": "<7>", "logprob": -1.5, "bytes": list(b"<7>")}
    eight = {"token": "<8>", "logprob": -0.5, "bytes": list(b"<8>")}
    nine = {"token": "<9>", "logprob": -9999.0, "bytes": list(b"<9>")}
    three = {"token": "<3>", "logprob": 0.0, "bytes": list(b"<3>")}
    content = [{**seven, "top_logprobs": [eight, seven]}, {**nine, "top_logprobs": [three]}]
    assert found == {"content": content, "refusal": None}


def test_without_a_tokenizer_tokens_have_no_bytes():
    scored = logprobs([(7, -1.0)], text=lambda token_id: None)
    output = RequestOutput("0", "Hi", [1], [CompletionOutput(0, "", [7], "stop", logprobs=scored)])
    found = output_of(made("chat"), output)["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert found == [{"token": "token_id:7", "logprob": -1.0, "bytes": None, "top_logprobs": []}]


def test_offsets_and_bytes_follow_the_text():
    """Each part of a character had the text U+FFFD and no bytes, and moved the offsets of all that followed it."""
    parts = "é".encode()
    pieces = {
        7: TokenPiece("\ufffd", parts[:1], is_part=True),
        8: TokenPiece("\ufffd", parts[1:], is_part=True),
        9: TokenPiece("Ho", b"Ho"),
        10: TokenPiece("<eos>", None, is_part=True),
    }
    ids = np.array([[9, 7], [7, 8], [8, 9], [10, 7], [9, 9]], np.int32)
    scored = TokenLogprobs(ids, np.full(ids.shape, -1.0, np.float32), np.ones(len(ids), np.int32), 0, pieces)
    output = RequestOutput("0", "Hi", [1], [CompletionOutput(0, "HoéHo", ids[:, 0].tolist(), "stop", logprobs=scored)])
    found = output_of(made("completions"), output)["response"]["body"]["choices"][0]["logprobs"]
    assert found["tokens"] == ["Ho", "", "é", "<eos>", "Ho"] and found["text_offset"] == [0, 2, 2, 3, 3]
    assert [sorted(each) for each in found["top_logprobs"]] == [
        ["Ho", "bytes:\\xc3"], ["", "bytes:\\xa9"], ["Ho", "é"], ["<eos>", "bytes:\\xc3"], ["Ho"],
    ]  # fmt: skip
    content = output_of(made("chat"), output)["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [list(b"Ho"), [0xC3], [0xA9], None, list(b"Ho")]
    plain = output_of(made("plain"), output)["outputs"][0]["logprobs"]
    assert [each["token"] for each in plain] == found["tokens"]


FAILED = RequestOutput("0", "Hi", [1, 2], [CompletionOutput(0, "", [], "error")], error="the prompt is too long")


def test_an_error_row_has_no_outputs_and_says_why():
    broken = parse_row(6, b"{")
    assert output_of(broken, None) == {
        "id": None, "outputs": [], "num_prompt_tokens": 0, "error": broken.error, "row": 7,
    }  # fmt: skip
    found = {"id": "a", "outputs": [], "num_prompt_tokens": 2, "error": "the prompt is too long"}
    assert output_of(made("plain"), FAILED) == found


def test_an_error_of_openai_says_whose_it_is():
    def error(row, output, **options):
        found = output_of(row, output, **options)
        assert (found["id"], found["custom_id"], found["response"]) == ("batch_req_6", row.id, None)
        assert ("row" in found) == (row.id is None)
        return found["error"]["code"], found["error"]["message"]

    assert error(made("chat"), FAILED) == ("invalid_request_error", "the prompt is too long")
    bad = row_of(without(openai(), "custom_id"), 6)
    assert error(bad, None) == ("invalid_request_error", bad.error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", [ONE, TWO, PROMPT_SCORED, FAILED], ids=["one", "two", "prompt", "failed"])
def test_every_output_row_survives_json(kind, output):
    found = output_of(made(kind), output, created=5)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_schedule_is_in_an_output_row(kind):
    """Rows that run in another order, beside other rows or from a warm cache must give the same file."""
    elsewhere = RequestOutput("99", "Hi", TWO.prompt_token_ids, TWO.outputs, num_cached_tokens=0, weight_version=3)
    assert output_of(made(kind), elsewhere, created=5) == output_of(made(kind), TWO, created=5)
