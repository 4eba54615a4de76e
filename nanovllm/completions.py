"""Makes the outputs of finished requests that generate or score text."""

import time
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.logprobs import TokenLogprobs
from nanovllm.lora import LoRARequest
from nanovllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from nanovllm.prompts import EncodedPrompt
from nanovllm.sampling_checks import DefaultMaxTokens
from nanovllm.sampling_params import SamplingParams
from nanovllm.text import Completion, Text


class FinishedRow(NamedTuple):
    """A row whose sequences have all finished, or that could not run.

    number: the row's number in its call.
    sequences: in their order; none if it could not run.
    error: why it could not run.
    """

    number: int
    request_id: str
    prompt: EncodedPrompt
    params: Any
    sequences: list[Sequence]
    arrival_time: float
    weight_version: int
    error: str | None = None
    lora_request: LoRARequest | None = None


class Completions:
    """Makes the outputs of rows that have SamplingParams.

    Args:
        text: decodes.
        eos_token_ids: the ids that usually end a completion, if the tokenizer has none.
    """

    def __init__(self, text: Text, eos_token_ids: frozenset[int]):
        self._text, self._usual = text, text.eos_token_ids or eos_token_ids

    def outputs(self, rows: list[FinishedRow]) -> list[RequestOutput]:
        """One per row. All completions are decoded in one call."""
        tokens = [self._tokens(seq) for row in rows for seq in row.sequences]
        texts = iter(zip(tokens, self._text.complete(tokens), strict=True))
        return [self._output(row, list(islice(texts, len(row.sequences)))) for row in rows]

    def _output(self, row: FinishedRow, texts: list[tuple[Completion, tuple[str | ValueError, str | None]]]):
        error, outputs, scores, metrics, num_cached = row.error, [], None, None, 0
        for index, (seq, (tokens, (text, stop))) in enumerate(zip(row.sequences, texts, strict=True)):
            output, problem = self._completion(index, seq, tokens, text, stop)
            outputs.append(output)
            error = error or problem
        if row.sequences:
            first = row.sequences[0]
            metrics = RequestMetrics(row.arrival_time, first.first_token_time, time.time())
            num_cached, params = first.num_cached_tokens, row.params
            scores = self._logprobs(
                first.prompt_logprobs, params.prompt_logprobs, params, True, row.prompt.first_scored
            )
        return RequestOutput(
            row.request_id, row.prompt.text, row.prompt.token_ids, outputs or [CompletionOutput(0, "", [], "error")],
            num_cached, error, scores, row.weight_version, row.number, metrics, row.lora_request,
        )  # fmt: skip

    def _completion(
        self, index: int, seq: Sequence, tokens: Completion, text: str | ValueError, stop: str | None
    ) -> tuple[CompletionOutput, str | None]:
        """The output of one completion, and its error or None."""
        reason, error = cast(FinishReason, seq.finish_reason), seq.error
        problem = getattr(seq.stop_predicate, "error", None) or (text if isinstance(text, ValueError) else None)
        if problem is not None:
            reason, error = "error", error or str(problem)
        text = "" if isinstance(text, ValueError) else text
        stop_reason = self._stop_reason(seq, stop) if error is None else None
        logprobs = self._logprobs(seq.logprobs, tokens.params.logprobs, tokens.params, tokens.follows_text)
        total = None if logprobs is None else float(logprobs.of_tokens.sum(dtype=np.float64))
        return CompletionOutput(index, text, tokens.token_ids, reason, stop_reason, total, logprobs), error

    def _tokens(self, seq: Sequence) -> Completion:
        prompt, params = islice(seq.token_ids, seq.num_prompt_tokens), seq.sampling_params
        return Completion(seq.completion_token_ids, params, self._text.follows_text(prompt, params))

    def _logprobs(
        self, numbers: bytearray, num_logprobs: int | None, params: SamplingParams, follows_text: bool, first: int = 0
    ) -> TokenLogprobs | None:
        if num_logprobs is None:
            return None
        return TokenLogprobs.of(bytes(numbers), num_logprobs, first, self._text.pieces(params, follows_text))

    def _stop_reason(self, seq: Sequence, stop: str | None) -> int | str | None:
        """See CompletionOutput; `stop` is the stop string in the text."""
        if seq.finish_reason != "stop":
            return None
        last = seq.token_ids[-1]
        if last not in seq.stop_token_ids:
            return stop
        return None if last in self._usual and not seq.sampling_params.ignore_eos else last


def is_cut_by_default(row: FinishedRow) -> bool:
    """Whether a completion of the row ended at a `max_tokens` that the caller did not give."""
    maximum = row.params.max_tokens
    return isinstance(maximum, DefaultMaxTokens) and any(
        seq.finish_reason == "length" and len(seq.token_ids) - seq.num_prompt_tokens == maximum for seq in row.sequences
    )
