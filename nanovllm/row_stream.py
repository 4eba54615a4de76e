"""The requests of one call: prompts are read ahead within a window, computed together, and returned as they finish."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any, cast

import numpy as np

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.guides import StructuredOutputs
from nanovllm.logprobs import TokenLogprobs
from nanovllm.outputs import CompletionOutput, ErrorSummary, FinishReason, RequestMetrics, RequestOutput, keep_outputs
from nanovllm.prompts import EncodedPrompt
from nanovllm.sampling_checks import DefaultMaxTokens
from nanovllm.sampling_params import SamplingParams
from nanovllm.text import Completion, Text

# Maximum number of prompts per piece: a tokenizer takes ten times a text's memory while it works. If no request runs,
# the next piece is this large, so that the first step can choose: requests that may generate more tokens start first.
PROMPTS_OF_PIECE = 256
# Prompts per piece if requests run: while the batch has free places, and when it has none.
_PROMPTS_OF_LATER_PIECE, _PROMPTS_OF_LAST_PIECE = 32, 8
# When the batch is full, no further piece is read before the next step once this many prompts or tokens are read,
# because reading should take less time than the step.
_PROMPTS_AHEAD_OF_STEP, _TOKENS_AHEAD_OF_STEP = 32, 8192
# Size of the window, in prompts per sequence that can run at a time.
_PROMPTS_AHEAD = 16
StopPredicates = list[Callable[[int], bool]] | None  # one for each completion of a request


@dataclass(slots=True)
class _Request:
    """A request that runs: the prompt's place in reading order, when it was read, and the completions that have
    finished, by index."""

    place: int
    prompt: EncodedPrompt
    num_completions: int
    arrival_time: float
    completions: dict[int, CompletionOutput] = field(default_factory=dict)
    error: str | None = None


class RowStream:
    """The requests of one call.

    A prompt's number is its place in the call; outputs and errors have it. Reading stops when it is a fixed number of
    prompts (the window) ahead of the oldest unfinished one. So memory stays flat for any number of prompts, and no
    prompt waits for ever behind longer ones.

    Args:
        engine: computes the requests.
        text: tokenizes and decodes.
        source: prompts or conversations, each with its parameters; may be endless. None means that no prompt is ready
            yet.
        encode: encodes a list of them.
        structured: makes the constraints of structured outputs.
        before_step: is called before each step.
        raises: read all prompts first, and raise a ValueError if one of them cannot run.
        order: the prompts' numbers in the order of `source`; None if they are read in order.
    """

    def __init__(
        self,
        engine: LLMEngine,
        text: Text,
        source: Iterator[tuple[Any, SamplingParams] | None],
        encode: Callable[[list[Any]], list[EncodedPrompt]],
        structured: StructuredOutputs,
        before_step: Callable[[], None] = lambda: None,
        raises: bool = False,
        order: SequenceOf[int] | None = None,
    ):
        self.num_read, self._order = 0, order
        self._first_id = engine.num_requests
        self.errors = ErrorSummary()
        self.num_cut = 0  # prompts with a completion that was cut by a max_tokens that the caller did not give
        self._engine, self._text, self._source, self._encode, self._raises = engine, text, source, encode, raises
        self._window = None if raises else _PROMPTS_AHEAD * engine.info.max_num_seqs
        self._structured, self._before_step = structured, before_step
        self._is_exhausted = False
        self._running: dict[int, _Request] = {}  # by request id, in the prompts' order
        self._max_num_completions = 1  # of a request of this call

    def run(self) -> Iterator[dict[int, RequestOutput]]:
        """Yields the outputs that finish with each step, by number, and before a step the error rows that were read."""
        while True:
            refused = self._read()
            if refused:
                yield refused
            if self._engine.is_finished():
                if self._running:
                    raise RuntimeError("somebody else aborted requests of this call, or emptied the engine")
                if self._is_exhausted:
                    return
                continue
            self._before_step()
            yield self._engine.without_changes(self._outputs_of, self._engine.step())

    def abort(self) -> None:
        """Ends all requests, between two steps; the cache keeps the computed keys."""
        for request_id, request in self._running.items():
            for index in range(request.num_completions):
                self._engine.abort(request_id + index)
        while not self._engine.is_finished():  # a step may be in flight
            self._engine.step()
        self._running.clear()

    def drain(self) -> set[int]:
        """Reads no more, and drops the requests without a started completion; returns their prompts' numbers."""
        self._is_exhausted = True
        waiting = {
            request_id: request
            for request_id, request in self._running.items()
            if all(self._engine.is_waiting(request_id + index) for index in range(request.num_completions))
        }
        for request_id, request in waiting.items():
            for index in range(request.num_completions):
                self._engine.abort(request_id + index)
            del self._running[request_id]
        return {self._number(request.place) for request in waiting.values()}

    # Reading

    def _read(self) -> dict[int, RequestOutput]:
        """Reads prompts and adds their requests; returns the error rows of those that cannot run.

        Reading takes time. So each step waits for few prompts, and the device works during most of the reading. A piece
        is read as a whole, however long its prompts are.
        """
        refused: dict[int, RequestOutput] = {}
        if self._is_exhausted:
            return refused
        num_places, num_tokens = self._engine.room_for_prompts()
        prompts_ahead, tokens_ahead = _PROMPTS_AHEAD_OF_STEP, _TOKENS_AHEAD_OF_STEP
        while not self._is_exhausted and len(refused) < PROMPTS_OF_PIECE and (room := self._room(num_places)) > 0:
            piece = self._engine.without_changes(self._read_piece, room)
            is_ahead = num_places <= 0
            if is_ahead:
                prompts_ahead -= len(piece)
                tokens_ahead -= sum(len(prompt.token_ids) for prompt, *_ in piece)
            for prompt, params, predicates in piece:
                added = self._add(prompt, params, predicates)
                if isinstance(added, RequestOutput):
                    refused[self._number(self.num_read)] = added
                else:
                    num_places -= params.n
                    num_tokens -= self._engine.num_uncached_tokens(added)
                self.num_read += 1
            is_full = (prompts_ahead <= 0 or tokens_ahead <= 0) if is_ahead else num_tokens <= 0
            if len(piece) < room or (is_full and not self._raises):
                break
        return refused

    def _read_piece(self, room: int) -> list[tuple[EncodedPrompt, SamplingParams, StopPredicates]]:
        """At most `room` prompts, each with its parameters and stop predicates as the engine takes them."""
        piece: list[tuple[Any, SamplingParams]] = []
        for pair in islice(self._source, room):
            if pair is None:  # the source is not asked again before the next step
                break
            piece.append(pair)
        else:
            self._is_exhausted = len(piece) < room
        prompts = self._encode([prompt for prompt, _ in piece])
        return [self._prepared(prompt, params) for prompt, (_, params) in zip(prompts, piece, strict=True)]

    def _prepared(
        self, prompt: EncodedPrompt, params: SamplingParams
    ) -> tuple[EncodedPrompt, SamplingParams, StopPredicates]:
        try:
            return prompt, *without_text(prompt, params, self._text, self._structured, params.n)
        except ValueError as error:
            return prompt._replace(error=error), params, None

    def _room(self, num_places: int) -> int:
        """How many prompts the next piece may have.

        Args:
            num_places: free places of the batch.
        """
        if self._window is None:
            return PROMPTS_OF_PIECE
        oldest = next(iter(self._running.values())).place if self._running else self.num_read
        window = max(1, self._window // self._max_num_completions)
        later = _PROMPTS_OF_LATER_PIECE if num_places > 0 else _PROMPTS_OF_LAST_PIECE
        return min(later if self._running else PROMPTS_OF_PIECE, oldest + window - self.num_read)

    def _add(self, prompt: EncodedPrompt, params: SamplingParams, predicates: StopPredicates) -> int | RequestOutput:
        """Adds a prompt's request and returns its id, or returns the error row of a prompt that cannot run."""
        self._max_num_completions = max(self._max_num_completions, params.n)
        try:
            # The engine gets an empty prompt instead of one that cannot run, so that it uses up its number too.
            token_ids = prompt.token_ids if prompt.error is None else []
            request_id = self._engine.add_request(token_ids, params, predicates, prompt.first_scored, may_change=False)
            self._running[request_id] = _Request(self.num_read, prompt, params.n, time.time())
            return request_id
        except ValueError as problem:
            reason = str(prompt.error or problem)
            if self._raises:
                raise ValueError(f"prompt {self._number(self.num_read)}: {reason}") from None
            return self._output(self.num_read, prompt, [CompletionOutput(0, "", [], "error")], error=reason)

    def _number(self, place: int) -> int:
        return place if self._order is None else self._order[place]

    # Outputs

    def _outputs_of(self, sequences: list[Sequence]) -> dict[int, RequestOutput]:
        if not sequences:
            return {}
        tokens = list(map(self._completion, sequences))
        texts = self._text.complete(tokens)
        outputs: dict[int, RequestOutput] = {}
        now = time.time()
        for seq, (_, params, follows_text), (text, stop) in zip(sequences, tokens, texts, strict=True):
            reason, error = cast(FinishReason, seq.finish_reason), seq.error
            problem = getattr(seq.stop_predicate, "error", None) or (text if isinstance(text, ValueError) else None)
            if problem is not None:
                reason, error = "error", error or str(problem)
            text = "" if isinstance(text, ValueError) else text
            stop_reason = self._stop_reason(seq, stop) if error is None else None
            first = seq.siblings[0] if seq.siblings else seq
            index, request = seq.seq_id - first.seq_id, self._running[first.seq_id]
            logprobs = self._logprobs(seq.logprobs, params.logprobs, params, follows_text)
            total = None if logprobs is None else float(logprobs.of_tokens.sum(dtype=np.float64))
            request.completions[index] = CompletionOutput(
                index, text, seq.completion_token_ids, reason, stop_reason, total, logprobs
            )
            request.error = request.error or error
            if len(request.completions) == request.num_completions:
                del self._running[first.seq_id]
                self.num_cut += any(_is_cut_by_default(each, params) for each in request.completions.values())
                completions = [request.completions[index] for index in range(request.num_completions)]
                place, prompt = request.place, request.prompt
                wanted, start = first.sampling_params.prompt_logprobs, prompt.first_scored
                scores = self._logprobs(first.prompt_logprobs, wanted, params, True, start)
                metrics = RequestMetrics(request.arrival_time, first.first_token_time, now)
                cached, error = first.num_cached_tokens, request.error
                output = self._output(place, prompt, completions, cached, error, scores, metrics)
                outputs[output.prompt_index] = output
        return outputs

    def _completion(self, seq: Sequence) -> Completion:
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
        usual = self._text.eos_token_ids or self._engine.eos_token_ids
        return None if last in usual and not seq.sampling_params.ignore_eos else last

    def _output(
        self,
        place: int,
        prompt: EncodedPrompt,
        completions: list[CompletionOutput],
        num_cached_tokens: int = 0,
        error: str | None = None,
        scores: TokenLogprobs | None = None,
        metrics: RequestMetrics | None = None,
    ) -> RequestOutput:
        number = self._number(place)
        if error is not None:
            self.errors.add(number, error)
        version, request_id = self._engine.weight_version, str(self._first_id + place)
        return RequestOutput(
            request_id, prompt.text, prompt.token_ids, completions, num_cached_tokens, error, scores, version, number,
            metrics,
        )  # fmt: skip


def _is_cut_by_default(completion: CompletionOutput, params: SamplingParams) -> bool:
    """Whether the completion ended at a `max_tokens` that the caller did not give."""
    is_default = isinstance(params.max_tokens, DefaultMaxTokens)
    return is_default and completion.finish_reason == "length" and len(completion.token_ids) == params.max_tokens


def without_text(
    prompt: EncodedPrompt, params: SamplingParams, text: Text, structured: StructuredOutputs, num_completions: int
) -> tuple[SamplingParams, StopPredicates]:
    """The parameters of a request for an engine, which handles only token ids.

    Returns:
        The parameters with bad words as token ids, and the stop predicates of `num_completions` completions, or None if
        they need none.

    Raises:
        ValueError: the prompt cannot run.
    """
    if prompt.error is not None:
        raise prompt.error
    predicates: StopPredicates = None
    if params.stop:
        follows_text = text.follows_text(prompt.token_ids, params)
        predicates = [text.stop_strings(params, follows_text) for _ in range(num_completions)]
    if params.structured_outputs is not None:
        each_stops = predicates or repeat(None, num_completions)
        predicates = [structured.guide(params, stops) for stops in each_stops]
    if params.bad_words:
        params = replace(params, bad_words=text.bad_words_as_ids(params.bad_words))
    return params, predicates


class OutputIterator(Iterator[RequestOutput]):
    """The result of `LLM.generate_iter`: computes as far as the next output needs.

    Dropping it, or `close()`, aborts the running requests; `drain()` lets them finish. An exception ends it;
    `finished_outputs` of the exception holds the outputs that had finished and were not yet returned, by number.

    Args:
        stream: the requests.
        run: calls a function that uses the engine.
        finish: is called once, at the end, with True if an exception cut the requests off.
        is_ordered: give outputs in the prompts' order, else as they finish.
    """

    def __init__(
        self,
        stream: RowStream,
        run: Callable[[Callable[[], None]], None],
        finish: Callable[[bool], None],
        is_ordered: bool,
    ):
        self._stream, self._steps = stream, stream.run()
        self._run, self._finish, self._is_ordered = run, finish, is_ordered
        self._held: dict[int, RequestOutput] = {}  # not yet returned, in the order in which they finished
        self._next = 0  # the number to return next, if they are ordered
        self._dropped: set[int] = set()  # numbers that will never finish
        self._is_open = True

    def __next__(self) -> RequestOutput:
        while True:
            while self._next in self._dropped:
                self._next += 1
            number = self._next if self._is_ordered else next(iter(self._held), None)
            if number in self._held:
                self._next += 1
                return self._held.pop(number)
            if not self._is_open:
                raise StopIteration
            self._run(self._compute)

    def _compute(self) -> None:
        """Computes a step."""
        try:
            finished = next(self._steps, None)
            if finished is None:
                self._end(was_cut=False)
            else:
                self._held.update(finished)
        except BaseException as error:
            self._cut(error)
            raise

    def drain(self) -> None:
        """Reads no more prompts, and drops the requests that have not started. A request with a started completion is
        finished and returned as before; then the iteration ends. Calling it again does nothing.

        Raises:
            RuntimeError: the call comes during a step, or while another thread uses the LLM.
        """
        if self._is_open:
            self._run(self._drain)

    def _drain(self) -> None:
        try:
            self._dropped |= self._stream.drain()
        except BaseException as error:
            self._cut(error)
            raise

    def _cut(self, error: BaseException) -> None:
        """Ends the iteration with an exception, which gets the outputs that were not returned."""
        keep_outputs(error, self._held)
        self._held = {}
        self._end(was_cut=True)

    def close(self) -> None:
        """Aborts all unfinished requests, and ends the iteration. Calling it again does nothing."""
        if self._is_open:
            self._run(self._abort)

    def _abort(self) -> None:
        is_aborted = False
        try:
            self._stream.abort()
            is_aborted = True
        finally:
            self._held = {}
            self._end(was_cut=not is_aborted)

    def _end(self, was_cut: bool) -> None:
        self._is_open = False
        self._finish(was_cut)

    def __del__(self) -> None:
        # Python calls this even if the constructor failed. If another thread's call is running, that call cleans up.
        if getattr(self, "_is_open", False):
            with suppress(Exception):
                self.close()
