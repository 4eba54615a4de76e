"""Rows of OpenAI's Batch files that are computed in one forward pass: /v1/embeddings, and /v1/score and /classify of
vLLM's server."""

from typing import Any, Literal

from nanovllm import PoolingRequestOutput
from nanovllm.jobs.fields import pair_of, prompt_of
from nanovllm.jobs.vectors import base64_of, json_numbers

PooledKind = Literal["embeddings", "score_url", "classify_url"]

TASKS: dict[Any, str] = {"embeddings": "embed", "score_url": "score", "classify_url": "classify"}
POOLED_URLS: dict[Any, PooledKind] = {
    "/v1/embeddings": "embeddings", "/v1/score": "score_url", "/score": "score_url", "/classify": "classify_url",
}  # fmt: skip
# vLLM has had three pairs of names for the texts of a score.
_PAIRS = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"))
_SAME = ("normalize", "use_activation", "pooling", "truncate_prompt_tokens")  # names that PoolingParams has too
_FIELDS: dict[PooledKind, tuple[str, ...]] = {
    "embeddings": ("input", "dimensions", "encoding_format", *_SAME),
    "score_url": (*(name for pair in _PAIRS for name in pair), "recipe", "instruction", *_SAME),
    "classify_url": ("input", *_SAME),
}
POOLED_FIELDS: dict[Any, tuple[str, ...]] = {
    kind: ("model", "adapter", "add_special_tokens", *names) for kind, names in _FIELDS.items()
}


def one_prompt(name: str, value: Any) -> str | list[int]:
    """Unwraps a list of one prompt, because some programs always write lists."""
    is_one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list))
    return prompt_of(name, value[0] if is_one else value)


def pooled_request_of(kind: PooledKind, body: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """A row's prompt, its parameters as arguments of PoolingParams, and whether the embedding is to be base64.

    Raises:
        ValueError: names a field that is missing or of the wrong form.
    """
    if body.get("add_special_tokens", True) is not True:
        raise ValueError('"add_special_tokens" must be true; a prompt of token ids has no other tokens than its own')
    if (encoding := body.get("encoding_format", "float")) not in ("float", "base64"):
        raise ValueError(f'"encoding_format" must be "float" or "base64", not {encoding!r}')
    params = {name: body[name] for name in ("dimensions", "recipe", "instruction", *_SAME) if name in body}
    return _pair(body) if kind == "score_url" else _input(body), params, encoding == "base64"


def _input(body: dict[str, Any]) -> str | list[int]:
    if "input" not in body:
        raise ValueError('the body has no "input", the text or the token ids')
    return one_prompt("input", body["input"])


def _pair(body: dict[str, Any]) -> tuple[str, str]:
    given = [pair for pair in _PAIRS if not body.keys().isdisjoint(pair)]
    if len(given) != 1 or not body.keys() >= set(given[0]):
        raise ValueError(
            'the body must have "queries" and "documents", or "text_1" and "text_2"; write one pair per row'
        )
    query, document = (one_prompt(name, body[name]) for name in given[0])
    return pair_of({"query": query, "document": document})


def pooled_body(
    kind: PooledKind, number: int, output: PoolingRequestOutput, created: int, model: str, is_base64: bool
) -> dict[str, Any]:
    """The body of the response that the server would give. An embedding that is not base64 is null; see vectors.py."""
    assert output.data is not None, "a row without an error has numbers"
    if kind == "embeddings":
        made = {"object": "embedding", "index": 0, "embedding": base64_of(output.data) if is_base64 else None}
        head: dict[str, Any] = {"object": "list"}
    else:
        name = "score" if kind == "score_url" else "classify"
        head = {"id": f"{name}-{number}", "object": "list", "created": created}
        numbers = json_numbers(output.data)
        made = {"index": 0, "object": "score", "score": numbers[0]}
        if kind == "classify_url":
            made = {"index": 0, "label": output.label, "probs": numbers, "num_classes": len(numbers)}
    usage = {"prompt_tokens": output.num_prompt_tokens, "total_tokens": output.num_prompt_tokens}
    return {**head, "data": [made], "model": model, "usage": usage}
