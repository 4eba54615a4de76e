"""The requests of one call: prompts are read ahead within a window, computed together, and returned as they finish."""

import time
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any, NamedTuple

from nanovllm.completions import Completions, FinishedRow, is_cut_by_default
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import BASE, Adapter, Pooling, Sequence
from nanovllm.engine.step import CorruptCacheError
from nanovllm.guides import StructuredOutputs
from nanovllm.lora import LoRARequest
from nanovllm.outputs import ErrorSummary, RequestOutput, keep_outputs
from nanovllm.pooled_rows import PooledRows
from nanovllm.pooling_outputs import PoolingRequestOutput
from nanovllm.pooling_params import PoolingParams, RowParams
from nanovllm.prompts import EncodedPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.text import Text

# Maximum number of prompts per piece: a tokenizer takes ten times a text's memory while it works. If no request runs,
# the next piece is this large, so that the first step can choose: requests that may generate more tokens start first.
# Rows that only pool need no choice.
PROMPTS_OF_PIECE, FIRST_PROMPTS_OF_POOLED = 256, 32
# Prompts per piece during a run: the minimum while the batch has free places, and the number when it is full. A piece
# of short prompts may be larger, because the tokenizer divides a large piece over the cores.
_PROMPTS_OF_LATER_PIECE, _PROMPTS_OF_LAST_PIECE = 32, 8
# When the batch is full, no further piece is read before the next step once this many prompts or tokens are read,
# because reading should take less time than the step.
_PROMPTS_AHEAD_OF_STEP, _TOKENS_AHEAD_OF_STEP = 32, 8192
# Size of the window, in prompts per sequence that can run at a time.
_PROMPTS_AHEAD = 16
StopPredicates = list[Callable[[int], bool]] | None  # one for each completion of a request
RowAdapters = LoRARequest | Iterator[LoRARequest | None] | None  # the adapter of all rows, or that of each row
Output = RequestOutput | PoolingRequestOutput
_NO_PROMPT = EncodedPrompt(None, [])


class _Row(NamedTuple):
    """A row that was read: its prompt, its parameters and stop predicates as the engine takes them, and its adapter."""

    prompt: EncodedPrompt
    params: RowParams
    predicates: StopPredicates
    lora_request: LoRARequest | None


@dataclass(slots=True)
class _Request:
    """A row that runs: its place in reading order, when it was read, and its sequences that have finished, by their
    places among its sequences."""

    place: int
    prompt: EncodedPrompt
    params: RowParams
    arrival_time: float
    lora_request: LoRARequest | None = None
    num_sequences: int = 0
    finished: dict[int, Sequence] = field(default_factory=dict)


class RowStream:
    """The requests of one call. Most prompts are one request; a row that pools may be several.

    A prompt's number is its place in the call; outputs and errors have it. Reading stops when it is a fixed number of
    prompts (the window) ahead of the oldest unfinished one. So memory stays flat for any number of prompts, and no
    prompt waits for ever behind longer ones.

    Args:
        engine: computes the requests.
        text: tokenizes and decodes.
        source: prompts or conversations, each with its parameters; may be endless. None means that no prompt is ready
            yet.
        encode: encodes a list of those that have SamplingParams.
        structured: makes the constraints of structured outputs.
        before_step: is called before each step.
        raises: read all prompts first, and raise a ValueError if one of them cannot run. A row that waits for a slot of
            its adapter is read later.
        order: the prompts' numbers in the order of `source`; None if they are read in order.
        pooled: makes requests and outputs of those that have PoolingParams; None if there are none.
        num_first: prompts of a piece that is read when no request runs.
        adapters: the LoRA adapter of all rows, or an iterator with one per row of `source`. None is the model itself.
    """

    def __init__(
        self,
        engine: LLMEngine,
        text: Text,
        source: Iterator[tuple[Any, RowParams] | None],
        encode: Callable[[list[Any]], list[EncodedPrompt]],
        structured: StructuredOutputs,
        before_step: Callable[[], None] = lambda: None,
        raises: bool = False,
        order: SequenceOf[int] | None = None,
        pooled: PooledRows | None = None,
        num_first: int = PROMPTS_OF_PIECE,
        adapters: RowAdapters = None,
    ):
        self.num_read, self._num_tokens_read, self._order = 0, 0, order
        self._first_id = engine.num_requests
        self.errors = ErrorSummary()
        self.num_cut = 0  # prompts with a completion that was cut by a max_tokens that the caller did not give
        self._engine, self._text, self._source, self._encode, self._raises = engine, text, source, encode, raises
        self._num_first = num_first
        self._window = None if raises else _PROMPTS_AHEAD * engine.info.max_num_seqs
        self._structured, self._before_step = structured, before_step
        self._completions, self._pooled = Completions(text, engine.eos_token_ids), pooled
        self._is_exhausted = False
        self._running: dict[int, _Request] = {}  # by the id of the first sequence, in the prompts' order
        self._first_id_of: dict[int, int] = {}  # of each unfinished sequence of these
        self._max_num_sequences = 1  # of a row of this call
        self._of_all = None if isinstance(adapters, Iterator) else adapters
        self._adapters = adapters if isinstance(adapters, Iterator) else repeat(adapters)
        self._merged: Adapter | None = None  # the adapter of all rows, if it is in the weights
        # The version of each adapter that rows asked for, or why it cannot be used.
        self._versions: dict[Hashable, int | ValueError] = {}
        self._held: list[_Row] = []  # rows that were read and wait for a slot

    def merge_adapter(self) -> None:
        """Merges the adapter of all rows into the weights, or loads it into a slot if it may not be merged. If rows
        have different ones, merges none. Must be called before `run`, while nothing runs.

        Raises:
            TypeError, ValueError: it does not fit the model.
        """
        of_all = self._of_all
        self._merged = None if of_all is None else self._engine.merge_adapter(of_all)
        if self._merged is None:
            self._engine.merge_adapter(None)
        if self._merged is None and of_all is not None and isinstance(problem := self._place(of_all), ValueError):
            raise problem

    def run(self) -> Iterator[dict[int, Output]]:
        """Yields the outputs that finish with each step, by number, and before a step the error rows that were read."""
        while True:
            refused = self._read()
            if refused:
                yield refused
            if self._engine.is_finished():
                if self._running:
                    raise RuntimeError("somebody else aborted requests of this call, or emptied the engine")
                if self._is_exhausted and not self._held:
                    return
                continue
            self._before_step()
            yield self._engine.without_changes(self._outputs_of, self._step())

    def _step(self) -> list[Sequence]:
        try:
            return self._engine.step()
        except CorruptCacheError as error:
            request = self._running.get(self._first_id_of.get(error.seq_id, -1))
            if request is None:  # its last token was already committed
                raise
            raise CorruptCacheError(f"prompt {self._number(request.place)}: {error}", error.seq_id) from None

    def abort(self) -> None:
        """Ends all requests, between two steps; the cache keeps the computed keys."""
        for request_id, request in self._running.items():
            self._abort(request_id, request.num_sequences)
        while not self._engine.is_finished():  # a step may be in flight
            self._engine.step()
        self._running.clear()

    def drain(self) -> set[int]:
        """Reads no more, and drops the requests without a started completion; returns their prompts' numbers."""
        self._is_exhausted, held, self._held = True, len(self._held), []
        waiting = {
            request_id: request
            for request_id, request in self._running.items()
            if all(self._engine.is_waiting(request_id + index) for index in range(request.num_sequences))
        }
        for request_id, request in waiting.items():
            self._abort(request_id, request.num_sequences)
            del self._running[request_id]
        places = [request.place for request in waiting.values()]
        return {self._number(place) for place in (*places, *range(self.num_read, self.num_read + held))}

    def _abort(self, first_id: int, num_sequences: int) -> None:
        for seq_id in range(first_id, first_id + num_sequences):
            self._engine.abort(seq_id)

    # Reading

    def _read(self) -> dict[int, Output]:
        """Reads prompts and adds their requests; returns the error rows of those that cannot run.

        Reading takes time. So each step waits for few prompts, and the device works during most of the reading. A piece
        is read as a whole, however long its prompts are.
        """
        refused: dict[int, Output] = {}
        if self._is_exhausted and not self._held:
            return refused
        num_places, num_tokens = self._engine.room_for_prompts()
        prompts_ahead, tokens_ahead = _PROMPTS_AHEAD_OF_STEP, _TOKENS_AHEAD_OF_STEP
        while (
            (self._held or not self._is_exhausted)
            and len(refused) < PROMPTS_OF_PIECE
            and (room := self._room(num_places, num_tokens)) > 0
        ):
            piece = self._held or self._engine.without_changes(self._read_piece, room)
            is_ahead, self._held = num_places <= 0, []
            if is_ahead:
                prompts_ahead -= len(piece)
                tokens_ahead -= sum(len(row.prompt.token_ids) for row in piece)
            for index, row in enumerate(piece):
                adapter = self._place(row.lora_request)
                if adapter is None:
                    self._held = piece[index:]
                    return refused
                if isinstance(adapter, ValueError):
                    row, adapter = row._replace(prompt=row.prompt._replace(error=row.prompt.error or adapter)), BASE
                added = self._add(row, adapter)
                if isinstance(added, int):
                    num_places -= row.params.n
                    num_tokens -= self._engine.num_uncached_tokens(added)
                else:
                    refused |= self._outputs([added])
                self.num_read += 1
                self._num_tokens_read += len(row.prompt.token_ids)
            is_full = (prompts_ahead <= 0 or tokens_ahead <= 0) if is_ahead else num_tokens <= 0
            if len(piece) < room or (is_full and not self._raises):
                break
        return refused

    def _read_piece(self, room: int) -> list[_Row]:
        """At most `room` rows."""
        piece: list[tuple[Any, RowParams]] = []
        for pair in islice(self._source, room):
            if pair is None:  # the source is not asked again before the next step
                break
            piece.append(pair)
        else:
            self._is_exhausted = len(piece) < room
        prompts = zip(self._encoded(piece), piece, self._adapters_of(piece), strict=True)
        return [_Row(*self._prepared(prompt, params), adapter) for prompt, (_, params), adapter in prompts]

    def _adapters_of(self, piece: list[Any]) -> list[LoRARequest | None]:
        adapters = list(islice(self._adapters, len(piece)))
        if len(adapters) < len(piece):
            raise ValueError(
                f"lora_request ended after {self.num_read + len(adapters)} rows, before the prompts did; give one for "
                "all, or one per prompt"
            )
        return adapters

    def _place(self, request: LoRARequest | None) -> Adapter | ValueError | None:
        """The place of a row's adapter, or why it cannot be used. None if all slots are busy."""
        if request is None or self._merged is not None:
            return self._merged or BASE
        version = self._versions.get(request.key)
        try:
            if version is None:
                self._versions[request.key] = version = self._engine.adapter_version(request)
            return version if isinstance(version, ValueError) else self._engine.place_adapter(request, version)
        except (TypeError, ValueError) as error:
            self._versions[request.key] = problem = ValueError(str(error))
            return problem

    def _encoded(self, piece: list[tuple[Any, RowParams]]) -> Iterator[EncodedPrompt]:
        pooled = [(prompt, params) for prompt, params in piece if isinstance(params, PoolingParams)]
        others = iter(self._encode([prompt for prompt, params in piece if not isinstance(params, PoolingParams)]))
        of_pooled = iter(self._pooled.encode(pooled) if self._pooled is not None else ())
        return (next(of_pooled if isinstance(params, PoolingParams) else others) for _, params in piece)

    def _prepared(self, prompt: EncodedPrompt, params: RowParams) -> tuple[EncodedPrompt, RowParams, StopPredicates]:
        if isinstance(params, PoolingParams):
            return prompt, params, None
        try:
            return prompt, *without_text(prompt, params, self._text, self._structured, params.n)
        except ValueError as error:
            return prompt._replace(error=error), params, None

    def _room(self, num_places: int, num_tokens: int) -> int:
        """How many prompts the next piece may have.

        Args:
            num_places: free places of the batch.
            num_tokens: tokens that the next step still can take.
        """
        if self._window is None:
            return PROMPTS_OF_PIECE
        oldest = next(iter(self._running.values())).place if self._running else self.num_read
        window = max(1, self._window // self._max_num_sequences)
        later = _PROMPTS_OF_LAST_PIECE
        if num_places > 0:
            filling = num_tokens * self.num_read // max(self._num_tokens_read, 1)  # prompts that fill the next step
            later = min(max(filling, _PROMPTS_OF_LATER_PIECE), PROMPTS_OF_PIECE)
        if not self._running:
            later = self._num_first
        return min(later, oldest + window - self.num_read)

    def _add(self, row: _Row, adapter: Adapter) -> int | FinishedRow:
        """Adds a prompt's requests and returns the first one's id, or returns the row of a prompt that cannot run."""
        prompt, params = row.prompt, row.params
        self._max_num_sequences = max(self._max_num_sequences, params.n)
        request = _Request(self.num_read, prompt, params, time.time(), row.lora_request)
        first_id = None
        try:
            # The engine gets an empty prompt instead of one that cannot run, so that it uses up its number too.
            wanted = self._pooled.request(params) if isinstance(params, PoolingParams) and self._pooled else params
            for part in (prompt, *prompt.others) if prompt.error is None else (_NO_PROMPT,):
                request_id = self._request(part, wanted, row.predicates, adapter)
                first_id = request_id if first_id is None else first_id
                request.num_sequences += params.n if isinstance(params, SamplingParams) else 1
        except ValueError as problem:
            if first_id is not None:
                self._abort(first_id, request.num_sequences)
            reason = str(prompt.error or problem)
            if self._raises:
                raise ValueError(f"prompt {self._number(self.num_read)}: {reason}") from None
            return self._row(request, reason)
        assert first_id is not None, "a row has at least one request"
        self._running[first_id] = request
        self._first_id_of.update(dict.fromkeys(range(first_id, first_id + request.num_sequences), first_id))
        return first_id

    def _request(self, part: EncodedPrompt, wanted: Any, predicates: StopPredicates, adapter: Adapter) -> int:
        """Adds one request of a row, and returns its id. wanted: SamplingParams or a Pooling."""
        if isinstance(wanted, Pooling):
            return self._engine.add_pooled(part.token_ids, wanted, adapter)
        return self._engine.add_request(part.token_ids, wanted, predicates, part.first_scored, False, adapter)

    def _number(self, place: int) -> int:
        return place if self._order is None else self._order[place]

    # Outputs

    def _outputs_of(self, sequences: list[Sequence]) -> dict[int, Output]:
        """The outputs of the rows that these sequences finish."""
        rows: list[FinishedRow] = []
        for seq in sequences:
            first_id = self._first_id_of.pop(seq.seq_id)
            request = self._running[first_id]
            request.finished[seq.seq_id - first_id] = seq
            if len(request.finished) == request.num_sequences:
                del self._running[first_id]
                rows.append(self._row(request))
        return self._outputs(rows)

    def _row(self, request: _Request, error: str | None = None) -> FinishedRow:
        finished = [request.finished[index] for index in sorted(request.finished)]
        number, request_id = self._number(request.place), str(self._first_id + request.place)
        version = self._engine.weight_version
        return FinishedRow(
            number, request_id, request.prompt, request.params, finished, request.arrival_time, version, error,
            request.lora_request,
        )  # fmt: skip

    def _outputs(self, rows: list[FinishedRow]) -> dict[int, Output]:
        pooled = [row for row in rows if isinstance(row.params, PoolingParams)]
        others = [row for row in rows if not isinstance(row.params, PoolingParams)] if pooled else rows
        outputs: list[Output] = [*self._completions.outputs(others)] if others else []
        if pooled and self._pooled is not None:
            outputs += self._pooled.outputs(pooled)
        for output in outputs:
            if output.error is not None:
                self.errors.add(output.prompt_index, output.error)
        self.num_cut += sum(is_cut_by_default(row) for row in others)
        return {output.prompt_index: output for output in outputs}


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


class OutputIterator(Iterator[Any]):
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
        self._held: dict[int, Output] = {}  # not yet returned, in the order in which they finished
        self._next = 0  # the number to return next, if they are ordered
        self._dropped: set[int] = set()  # numbers that will never finish
        self._is_open = True

    def __next__(self) -> Any:
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
