"""Makes an output row of each result. docs/jobs.md has the formats."""

from typing import Any, cast

import numpy as np

from nanovllm import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput, TokenLogprobs
from nanovllm.jobs.fields import finite_or_none, scored_tokens
from nanovllm.jobs.openai_pooling import PooledKind, pooled_body
from nanovllm.jobs.openai_rows import OPENAI_KINDS, CompletionKind, response_body
from nanovllm.jobs.rows import JobRow
from nanovllm.jobs.vectors import json_numbers

# The keys of a plain output row with a task. They are null in an error row.
NUMBERS: dict[str, tuple[str, ...]] = {
    "embed": ("embedding",), "classify": ("label", "probs"), "reward": ("score", "data"), "score": ("score",),
    "label": ("label", "probs", "logprobs"),
}  # fmt: skip


def output_of(
    row: JobRow,
    output: RequestOutput | PoolingRequestOutput | None,
    *,
    with_token_ids: bool = False,
    created: int = 0,
    model: str = "",
) -> dict[str, Any]:
    """The output row of an input row, ready for JSON. It depends only on the values of the arguments. An embedding is
    null, because `embedding_of` has it.

    Args:
        row: the input row.
        output: its result; None for a row with an error.
        with_token_ids: give plain rows the token ids of their completions.
        created: seconds since 1970, for rows of OpenAI's format.
        model: the model's name, for rows of OpenAI's format without one.
    """
    reason = row.error if output is None or row.error is not None else output.error
    assert output is not None or reason is not None, "a row without an error has an output"
    found: dict[str, Any]
    if row.kind not in OPENAI_KINDS:
        num_prompt_tokens = 0 if output is None else output.num_prompt_tokens
        results = {"outputs": []} if row.kind == "plain" else dict.fromkeys(NUMBERS[row.kind])
        found = {"id": row.id, **results, "num_prompt_tokens": num_prompt_tokens, "error": reason}
        if isinstance(output, PoolingRequestOutput):
            found.update(_numbers(output) if reason is None else {})
        elif output is not None and reason is None:
            found["outputs"] = [_plain_completion(each, with_token_ids) for each in output.outputs]
            if output.prompt_logprobs is not None:
                found["prompt_logprobs"] = _plain_logprobs(output.prompt_logprobs)
    else:
        found = {"id": f"batch_req_{row.number}", "custom_id": row.id, "response": None, "error": None}
        if reason is not None:
            found["error"] = {"code": "invalid_request_error", "message": reason}
        elif output is not None:
            name = row.model or model
            if isinstance(output, PoolingRequestOutput):
                kind = cast(PooledKind, row.kind)
                body = pooled_body(kind, row.number, output, created, name, row.is_base64)
            else:
                body = response_body(cast(CompletionKind, row.kind), row.number, output, created, name)
            found["response"] = {"status_code": 200, "request_id": f"req_{row.number}", "body": body}
    if row.id is None:
        found["row"] = row.number + 1
    return found


def embedding_of(row: JobRow, output: Any) -> np.ndarray | None:
    """The embedding that the output row lacks, float32 [dimensions]; None if it lacks none."""
    is_lacking = row.kind in ("embed", "embeddings") and output is not None and not row.is_base64
    return output.embedding if is_lacking and output.error is None else None


def _numbers(output: PoolingRequestOutput) -> dict[str, Any]:
    """The fields of a plain output row with a task."""
    assert output.data is not None, "a row without an error has numbers"
    task = output.outputs.task
    if task == "embed":
        return {}
    numbers = json_numbers(output.data)
    if task in ("score", "reward"):
        return {"score": numbers[0]} if len(numbers) == 1 else {"data": numbers}
    label = output.label if isinstance(output.label, str) else list(output.label)
    return {"label": label, "probs": numbers} | (
        {} if output.logprobs is None else {"logprobs": json_numbers(output.logprobs)}
    )


def error_of(made: dict[str, Any]) -> tuple[str | None, str] | None:
    """The input row's id and the error of an error row, as `output_of` makes it; None for other rows."""
    if (error := made["error"]) is None:
        return None
    return (made["id"], error) if isinstance(error, str) else (made["custom_id"], error["message"])


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
        found["cumulative_logprob"] = finite_or_none(completion.cumulative_logprob)
    if completion.logprobs is not None:
        found["logprobs"] = _plain_logprobs(completion.logprobs)
    return found


def _plain_logprobs(found: TokenLogprobs) -> list[dict[str, Any] | None]:
    return [None if each is None else _scored_token(*each) for each in scored_tokens(found)]


def _scored_token(token_id: int, scored: dict[int, Logprob], best: list[int]) -> dict[str, Any]:
    top = [_entry(other, scored[other], rank) for rank, other in enumerate(best, 1)]
    return {**_entry(token_id, scored[token_id], scored[token_id].rank), "top": top}


def _entry(token_id: int, scored: Logprob, rank: int | None) -> dict[str, Any]:
    return {"id": token_id, "token": scored.decoded_token, "logprob": finite_or_none(scored.logprob), "rank": rank}
