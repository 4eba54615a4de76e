"""Rows of OpenAI's Batch files: turns a request into a prompt with parameters, and a result into a response's body.

The formats are those of OpenAI's API reference (Batch, Completions, Chat Completions). Fields that vLLM's server adds
have vLLM's names and shapes.
"""

import math
from typing import Any, Literal, NamedTuple, cast

from nanovllm import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from nanovllm.jobs.adapters import adapter_name
from nanovllm.jobs.fields import NOTHING_IS_GENERATED, check_names, conversation_of, scored_tokens, without_nulls
from nanovllm.jobs.openai_pooling import POOLED_FIELDS, POOLED_URLS, TASKS, PooledKind, one_prompt, pooled_request_of

CompletionKind = Literal["completions", "chat"]
OpenAIKind = CompletionKind | PooledKind

_TOP = ("custom_id", "method", "url", "body", "adapter")
_URLS: dict[Any, OpenAIKind] = {"/v1/completions": "completions", "/v1/chat/completions": "chat", **POOLED_URLS}
# OpenAI's defaults, where neither the body nor the job sets the parameter.
OPENAI_DEFAULTS: dict[str, dict[str, Any]] = {"completions": {"max_tokens": 16}, "chat": {"max_tokens": None}}
OPENAI_KINDS = frozenset((*OPENAI_DEFAULTS, *TASKS))
# Fields that do not affect the result.
_IGNORED = frozenset((
    "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key", "priority",
))  # fmt: skip
_SAME = (  # names that SamplingParams has too
    "n", "temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "top_k",
    "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output", "bad_words", "allowed_token_ids", "logprobs_mode", "prompt_logprobs",
)  # fmt: skip
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_BOTH = (
    "model", "adapter", "max_tokens", "max_completion_tokens", *_SAME, "logprobs", "response_format",
    "structured_outputs", *_GUIDED, "stream", "echo", "best_of",
)  # fmt: skip
# Fields of a chat that are arguments of the chat template.
_OF_TEMPLATE = ("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")
_OF_CHAT = ("messages", "chat_template_kwargs", *_OF_TEMPLATE, "tool_choice", "parallel_tool_calls", "top_logprobs")
_OF_KIND: dict[OpenAIKind, tuple[str, ...]] = {
    "completions": ("prompt", *_BOTH),
    "chat": (*_OF_CHAT, *_BOTH),
    **POOLED_FIELDS,
}
_ELSEWHERE = 'put it into "body"; a plain row has "id" in place of "custom_id"'
_MEANT_AT_TOP = {
    **dict.fromkeys((*(name for names in _OF_KIND.values() for name in names), "params", "token_ids"), _ELSEWHERE),
    "id": "custom_id",
}
_MEANT_IN_BODY = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_decoding_backend": "llguidance is nanovllm's only backend of structured outputs; leave it out",
    "guided_whitespace_pattern": 'write it as "whitespace_pattern" of "structured_outputs"',
    "suffix": "nanovllm only continues a prompt; leave it out",
    "use_beam_search": "nanovllm has no beam search; leave it out",
    "max_new_tokens": "max_tokens",
    "prompt": "it belongs to /v1/completions",
    "input": "it belongs to /v1/embeddings",
    **dict.fromkeys(_OF_CHAT, "it belongs to /v1/chat/completions"),
}
_MEANT_IN_POOLED_BODY = {**_MEANT_IN_BODY, **dict.fromkeys((*_BOTH, "max_new_tokens"), NOTHING_IS_GENERATED)}
# The keys of each "response_format", and of the schema of one. Name, description and strict change nothing.
_FORMATS = {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
_JSON_SCHEMA = ("schema", "name", "description", "strict")
_NEEDS_TYPE = 'a schema needs "type": "json_schema", "json_schema": {"name": …, "schema": …}'
# In place of a log-probability of −∞, which JSON does not have; OpenAI's reference gives such tokens this number.
_MIN_LOGPROB = -9999.0


def kind_of(fields: dict[str, Any]) -> OpenAIKind:
    """The kind that a row's url names; completions if it names none, because the errors of both kinds look alike."""
    url = fields.get("url")
    return _URLS.get(url, "completions") if isinstance(url, str) else "completions"


class Request(NamedTuple):
    """A row's prompt, its parameters as arguments of SamplingParams or PoolingParams, its "model", whether its
    embedding is to be base64, and the name of its adapter."""

    prompt: Any
    params: dict[str, Any]
    model: str | None
    is_base64: bool = False
    adapter: str | None = None


def request_of(fields: dict[str, Any], kind: OpenAIKind) -> Request:
    """The request of a row.

    Raises:
        ValueError: names a field that is missing, unknown or of the wrong form.
    """
    check_names("key", fields, _TOP, _MEANT_AT_TOP)
    if fields.get("method", "POST") != "POST":
        raise ValueError(f'"method" must be "POST", not {fields["method"]!r}')
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in _URLS:
        raise ValueError(f'"url" must be {" or ".join(map(repr, _URLS))}, not {url!r}')
    if not isinstance(body, dict):
        raise ValueError(f'"body" must be an object with the request, not {body!r}')
    body = {name: value for name, value in without_nulls(body).items() if name not in _IGNORED}
    meant = _MEANT_IN_POOLED_BODY if kind in TASKS else _MEANT_IN_BODY
    check_names("field of the body", body, _OF_KIND[kind], meant)
    if (model := body.get("model")) is not None and not isinstance(model, str):
        raise ValueError(f'"model" must be a string, not {model!r}')
    adapter, other = adapter_name(body.get("adapter")), adapter_name(fields.get("adapter"))
    if None not in (adapter, other) and adapter != other:
        raise ValueError(f'"adapter" is {other!r}, and {adapter!r} in the body; leave one out')
    adapter = adapter or other
    if kind in TASKS:
        prompt, params, is_base64 = pooled_request_of(cast(PooledKind, kind), body)
        return Request(prompt, params, model, is_base64, adapter)
    _check_fixed(body)
    params = _max_tokens(body) | {name: body[name] for name in _SAME if name in body}
    if (logprobs := _chat_logprobs(body) if kind == "chat" else body.get("logprobs")) is not None:
        params["logprobs"] = logprobs
    if (structured := _structured_outputs(body)) is not None:
        params["structured_outputs"] = structured
    needed = "messages" if kind == "chat" else "prompt"
    if needed not in body:
        raise ValueError(f'the body has no "{needed}", which {url} needs')
    prompt = _conversation(body) if kind == "chat" else one_prompt("prompt", body["prompt"])
    return Request(prompt, params, model, adapter=adapter)


def _check_fixed(body: dict[str, Any]) -> None:
    for name in ("stream", "echo"):
        if body.get(name, False) is not False:
            raise ValueError(f'"{name}" must be false, not {body[name]!r}; a row gets its completion alone, as a whole')
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise ValueError(f'"best_of" must be 1 or as "n", not {body["best_of"]!r}; nanovllm returns all it generates')


def _conversation(body: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a chat, with the fields that are arguments of its template. Checks the fields about tool calls."""
    given = {name: body[name] for name in _OF_TEMPLATE if name in body}
    if (choice := body.get("tool_choice", "auto")) == "none":
        given.pop("tools", None)
    elif choice != "auto":
        advice = 'nanovllm forces no call, but "response_format" can say what the answer must be'
        raise ValueError(f'"tool_choice" must be "auto" or "none", not {choice!r}; {advice}')
    if body.get("parallel_tool_calls", True) is not True:
        raise ValueError('"parallel_tool_calls" must be true or left out; nanovllm does not read calls in an answer')
    return conversation_of(body, given)


def _max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(f'"max_completion_tokens" is {given[0]!r} and "max_tokens" is {given[1]!r}; leave one out')
    return {"max_tokens": given[0]} if given else {}


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    """How many of the most probable tokens to return, or None for no log-probabilities. A chat has separate fields for
    these."""
    wanted, number = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise ValueError(f'"logprobs" of a chat must be true or false, not {wanted!r}; "top_logprobs" says how many')
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f'"top_logprobs" must be an integer, not {number!r}')
    if number and not wanted:
        raise ValueError('"top_logprobs" needs "logprobs": true')
    return number if wanted else None


def _structured_outputs(body: dict[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] = {name: {ours: body[name]} for name, ours in _GUIDED.items() if name in body}
    if "structured_outputs" in body:
        if not isinstance(given := body["structured_outputs"], dict):
            raise ValueError(f'"structured_outputs" must be an object, not {given!r}')
        found["structured_outputs"] = without_nulls(given)
    if "response_format" in body:
        found["response_format"] = _response_format(body["response_format"])
    asked = {name: each for name, each in found.items() if each is not None}
    if len(asked) > 1:
        raise ValueError(f"only one of {', '.join(asked)} can say what the completion must be; leave out the others")
    return next(iter(asked.values()), None)


def _response_format(value: Any) -> dict[str, Any] | None:
    given = without_nulls(value) if isinstance(value, dict) else {}
    if not isinstance(kind := given.get("type"), str) or kind not in _FORMATS:
        raise ValueError(f'"response_format" must have a "type" of text, json_object or json_schema, not {value!r}')
    check_names("key of response_format", given, _FORMATS[kind], dict.fromkeys(("schema", "json_schema"), _NEEDS_TYPE))
    if kind != "json_schema":
        return {"json_object": True} if kind == "json_object" else None
    described = given.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise ValueError(f'"response_format" needs its schema at json_schema.schema, not {described!r}')
    check_names("key of json_schema", without_nulls(described), _JSON_SCHEMA, {})
    return {"json": described["schema"]}


def response_body(kind: CompletionKind, number: int, output: RequestOutput, created: int, model: str) -> dict[str, Any]:
    """The body of the response that OpenAI's server would give; usage counts the tokens of all choices."""
    num_generated = sum(len(each.token_ids) for each in output.outputs)
    choices = [_choice(kind, each) for each in output.outputs]
    body: dict[str, Any] = {
        "id": f"chatcmpl-{number}" if kind == "chat" else f"cmpl-{number}",
        "object": "chat.completion" if kind == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": output.num_prompt_tokens + num_generated,
        },
    }
    if output.prompt_logprobs is not None:
        # vLLM has them in the body of a chat and in each choice of a completion.
        scored = _prompt_logprobs(output.prompt_logprobs)
        for part in [body] if kind == "chat" else choices:
            part["prompt_logprobs"] = scored
    return body


def _choice(kind: CompletionKind, completion: CompletionOutput) -> dict[str, Any]:
    text, found = completion.text, completion.logprobs
    return {
        "index": completion.index,
        **({"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": None if found is None else _content_logprobs(found) if kind == "chat" else _legacy_logprobs(found),
    }


def _legacy_logprobs(found: TokenLogprobs) -> dict[str, Any]:
    """The "logprobs" of /v1/completions. An offset is the number of the completion's characters before the token. A
    special token that the completion leaves out still has a text.

    If two of the most probable tokens have the same text, the more probable one counts.
    """
    rows: list[tuple[str, float, dict[str, float], int]] = []
    end = 0
    for token_id, scored, _ in filter(None, scored_tokens(found)):
        token, top = _text(token_id, scored[token_id]), dict[str, float]()
        for other, logprob in scored.items():
            top.setdefault(_text(other, logprob), _finite(logprob.logprob))
        rows.append((token, _finite(scored[token_id].logprob), top, end))
        end += 0 if scored[token_id].token_bytes is None else len(token)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns: dict[str, Any] = {name: [row[column] for row in rows] for column, name in enumerate(names)}
    asks_top = found.token_ids.shape[1] > 1
    return columns if asks_top else {**columns, "top_logprobs": None}


def _content_logprobs(found: TokenLogprobs) -> dict[str, Any]:
    """The "logprobs" of /v1/chat/completions."""
    content = [
        {**_entry(token_id, scored), "top_logprobs": [_entry(other, scored) for other in best]}
        for token_id, scored, best in filter(None, scored_tokens(found))
    ]
    return {"content": content, "refusal": None}


def _entry(token_id: int, scored: dict[int, Logprob]) -> dict[str, Any]:
    found = scored[token_id]
    in_bytes = None if found.token_bytes is None else list(found.token_bytes)
    return {"token": _text(token_id, found), "logprob": _finite(found.logprob), "bytes": in_bytes}


def _prompt_logprobs(found: TokenLogprobs) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token that was scored, a dict from token ids to log-probabilities."""
    return [scored if scored is None else {str(each): _as_vllm(scored[each]) for each in scored} for scored in found]


def _as_vllm(logprob: Logprob) -> dict[str, Any]:
    return {"logprob": _finite(logprob.logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _text(token_id: int, logprob: Logprob) -> str:
    """A token's text; without a tokenizer, vLLM's text for a token id."""
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
