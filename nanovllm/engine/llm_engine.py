"""The engine's loop: schedule → launch → commit.

A step that was launched is *in flight* until its tokens are committed. With depth 0 every step is committed before the
next one is scheduled; with depth 1 the device works on step N + 1 while the host commits step N. The loop is the same
for both.
"""

import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from nanovllm.checks import integer
from nanovllm.config import Config
from nanovllm.engine.adapters import Adapters
from nanovllm.engine.limits import check_pooled, check_request, max_length
from nanovllm.engine.runner import LaunchedStep, Runner, StepTooLargeError, make_scheduler
from nanovllm.engine.scheduler import SchedulerStats
from nanovllm.engine.sequence import (
    BASE,
    POOLED,
    Adapter,
    Pooling,
    Sequence,
    SequenceStatus,
    TokenGuide,
    completions_of,
)
from nanovllm.engine.step import Step, StepOutput, halves
from nanovllm.engine.step_stats import StepStats
from nanovllm.guard import Guard
from nanovllm.logits_processors import LogitsProcessors
from nanovllm.lora import LoRARequest
from nanovllm.sampling_params import SamplingParams, mixed_seed

logger = logging.getLogger(__name__)

StopPredicate = Callable[[int], bool]
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")


def _guarded(method: _Method) -> _Method:
    """Makes a method that changes the engine refuse to run inside another such method, and in a closed engine."""

    @functools.wraps(method)
    def guarded(engine: "LLMEngine", *args: Any, **kwargs: Any) -> Any:
        return engine._guard.run(engine._change, method, *args, **kwargs)

    return cast(_Method, guarded)


class LLMEngine:
    """Runs requests given as token ids; `LLM` puts text around it.

    To run it step by step, call `add_request` for each request, then `step` until `is_finished`, and `exit` at the end.
    These methods and the others that change the engine raise a RuntimeError if a stop predicate or a signal handler
    calls them during a step or a request. All but `exit` also raise one in a fork of the process that made the engine.
    A refused call changes nothing.

    Args:
        config: the options.
        runner: computes the steps, as `nanovllm.llm.make_runner` makes it for `config`.
    """

    def __init__(self, config: Config, runner: Runner):
        self.config = config
        self.runner = runner
        self.info = runner.info
        self.depth = 1 if config.overlap else 0
        self.set_eos_token_ids(())
        self.step_stats = StepStats()
        self.scheduler_stats = SchedulerStats()
        self.weight_version = 0
        self.is_sleeping = False
        self.num_requests = 0  # so far, refused ones too
        self._num_sequences = 0
        self._in_flight: deque[tuple[Step, LaunchedStep]] = deque()
        self._unfinished: dict[int, Sequence] = {}
        self._ran_out_of_memory = False  # in a step
        self._process_id = os.getpid()
        self.is_closed = False
        self._guard = Guard(
            "the engine is in the middle of a step or request, so a stop predicate, a source of prompts or a "
            "signal handler cannot change it; do that between two steps"
        )
        self._adapters = Adapters(runner, config.max_loras * config.enable_lora, runner.info.may_merge_adapters)
        self._renew_scheduler()

    def set_eos_token_ids(self, eos_token_ids: Iterable[int]) -> None:
        """Requests that are added from now on also end with these ids, besides the model's own."""
        ids = (*self.info.eos_token_ids, *eos_token_ids)
        # An id outside the vocabulary can be neither sampled nor banned.
        self.eos_token_ids = frozenset(token_id for token_id in ids if 0 <= token_id < self.info.vocab_size)

    # Requests

    @_guarded
    def add_request(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        stop_predicates: StopPredicate | list[StopPredicate] | None = None,
        first_scored: int = 1,
        may_change: bool = True,
        adapter: Adapter = BASE,
    ) -> int:
        """Queues a request and returns its id, which is the id of its first completion; the others' ids follow it.

        Requests that may generate more tokens are started first. A short one waits as long as longer ones keep coming.

        Args:
            prompt_token_ids: the prompt.
            sampling_params: how to sample it.
            stop_predicates: one for each of its `n` completions, or one for the only completion. It is called with
                each new token in order; True ends the completion. An exception from it fails the step and empties the
                engine. It cannot call the engine itself, and heeds `min_tokens` itself. With `structured_outputs` each
                must be a TokenGuide.
            first_scored: with `prompt_logprobs`, the first token of the prompt to score, at least 1.
            may_change: the caller may change `sampling_params` later, so they are checked and copied.
            adapter: from `merge_adapter` or `place_adapter`.

        Raises:
            TypeError: the prompt holds something other than integers.
            ValueError: the prompt can never be run. Its number is still used up, so that one bad request does not
                change the seeds of those after it.
            RuntimeError: see `check_awake`.
        """
        self.check_awake()
        number, seq_id, n = self.num_requests, self._num_sequences, sampling_params.n
        self.num_requests += 1
        self._num_sequences += n
        try:
            if may_change:
                sampling_params.check()
                sampling_params = sampling_params.clone()
            prompt = check_request(prompt_token_ids, sampling_params, self.info, first_scored)
            predicates = self._predicates(stop_predicates, sampling_params, prompt)
        except (TypeError, ValueError):
            self.step_stats.num_rejected_requests += 1
            raise
        stop_token_ids = frozenset(sampling_params.stop_token_ids)
        if not sampling_params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        seed = mixed_seed(self.config.seed, number) if sampling_params.seed is None else sampling_params.seed
        max_num_tokens = max_length(len(prompt), sampling_params, self.info)
        first = Sequence(seq_id, prompt, sampling_params, max_num_tokens, stop_token_ids, seed, adapter=adapter)
        first.is_constrained = bool(sampling_params.structured_outputs or sampling_params.logits_processors)
        if sampling_params.prompt_logprobs is not None:
            first.next_scored = first.first_scored = first_scored
        sequences = completions_of(first)
        for seq, predicate in zip(sequences, predicates, strict=True):
            seq.stop_predicate = predicate
        self._queue(sequences)
        return seq_id

    @_guarded
    def add_pooled(self, prompt_token_ids: list[int], pooling: Pooling, adapter: Adapter = BASE) -> int:
        """Queues a request that returns hidden states of its prompt and generates nothing; returns its id. Raises what
        `add_request` raises."""
        self.check_awake()
        seq_id = self._num_sequences
        self.num_requests += 1
        self._num_sequences += 1
        try:
            prompt = check_pooled(prompt_token_ids, pooling, self.info)
        except (TypeError, ValueError):
            self.step_stats.num_rejected_requests += 1
            raise
        self._queue([Sequence(seq_id, prompt, POOLED, len(prompt), pooling=pooling, adapter=adapter)])
        return seq_id

    def _queue(self, sequences: list[Sequence]) -> None:
        adapter = sequences[0].adapter
        if adapter == BASE and self.is_finished():
            self._adapters.merge(None)
        self._adapters.check_place(adapter)
        try:
            self.runner.request_added(sequences)
            for seq in sequences:
                self._unfinished[seq.seq_id] = seq
                self.scheduler.add(seq)
        except BaseException:  # Ctrl-C: the runner may know of a request that the scheduler lacks
            self._empty()
            raise

    def _predicates(self, given: Any, params: SamplingParams, prompt: Iterable[int]) -> list[Any]:
        """A stop predicate, or None, for each completion of a request; see `add_request`."""
        predicates = [None] * params.n if given is None else [given] if callable(given) else given
        if len(predicates) != params.n:
            raise ValueError(f"{len(predicates)} stop predicates for n={params.n} completions; give one for each")
        if params.structured_outputs is not None and not all(hasattr(each, "fill_masks") for each in predicates):
            raise ValueError("an engine knows no text; give each completion of structured_outputs a TokenGuide")
        if not params.logits_processors:
            return predicates
        if self.config.tensor_parallel_size > 1:
            raise ValueError("logits_processors need tensor_parallel_size=1: the ranks compute in other processes")
        return [LogitsProcessors(params.logits_processors, prompt, each) for each in predicates]

    @_guarded
    def abort(self, seq_id: int) -> Sequence | None:
        """Ends a completion between two steps, and returns it; None if there is no unfinished one with this id."""
        seq = self._unfinished.get(seq_id)
        if seq is not None:
            try:
                self.runner.request_aborted(seq)
                self.scheduler.abort(seq)
                del self._unfinished[seq_id]
            except BaseException:
                self._empty()
                raise
            self.step_stats.num_output_tokens += len(seq.token_ids) - seq.num_prompt_tokens
        return seq

    def without_changes(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Calls a function that may call code of the user, such as a source of prompts, and returns its result. That
        code cannot change the engine, as if a step called it."""
        return self._guard.run(function, *args)

    def is_finished(self) -> bool:
        """Whether nothing is queued, running or in flight."""
        return not self._in_flight and not self._unfinished

    def room_for_prompts(self) -> tuple[int, int]:
        """See Scheduler.room_for_prompts."""
        return self.scheduler.room_for_prompts()

    def num_uncached_tokens(self, seq_id: int) -> int:
        """How many tokens of an unfinished completion the prefix cache does not hold now."""
        seq = self._unfinished[seq_id]
        return seq.num_tokens - self.scheduler.block_manager.num_cached_tokens(seq)

    def is_waiting(self, seq_id: int) -> bool:
        """Whether a completion has not started yet. A preempted completion has started."""
        seq = self._unfinished.get(seq_id)
        return seq is not None and seq.status is SequenceStatus.WAITING and seq.num_preemptions == 0

    # The loop

    @_guarded
    def step(self) -> list[Sequence]:
        """Launches the next step, and commits the oldest ones until at most `depth` are in flight, or none if no step
        could be launched. Returns the completions that finished.

        If anything fails, the engine is emptied (all requests are dropped) before the exception propagates.
        """
        began = time.perf_counter()
        try:
            finished: list[Sequence] = []
            scheduled = self.scheduler.schedule()
            if scheduled.chunks:
                self._launch(scheduled)
                if len(self._in_flight) == 1:
                    self._constrain(*self._in_flight[0])
                self.step_stats.count(scheduled, self.scheduler)
                began = self.step_stats.count_seconds(scheduled, began)
            elif self._in_flight:
                self.runner.nothing_scheduled()
            elif self._unfinished:
                raise RuntimeError(f"nothing can be scheduled, which is a bug: {list(self._unfinished.values())[:3]}")
            while len(self._in_flight) > (self.depth if scheduled.chunks else 0):
                committed, launched = self._in_flight.popleft()
                output = launched.wait()
                output.check_cache(committed)
                token_ids = output.token_ids
                broken = _keep_logprobs(committed, output) + _keep_states(committed, output)
                stopped = _ask_stop_predicates(committed, token_ids)
                ended, again = self.scheduler.commit(committed, token_ids, frozenset(stopped), frozenset(broken))
                finished += ended
                self._unfinished.update((seq.seq_id, seq) for seq in again)
                self.runner.step_committed(stopped, broken)
                for seq in committed.first_tokens:
                    seq.first_token_time = time.time() if len(seq.token_ids) > seq.num_prompt_tokens else None
                if self._in_flight:
                    self._constrain(*self._in_flight[0])
                for seq in ended:
                    del self._unfinished[seq.seq_id]
                    self.step_stats.num_output_tokens += len(seq.token_ids) - seq.num_prompt_tokens
                began = self.step_stats.count_seconds(committed, began)
        except BaseException:
            self._empty()
            raise
        return finished

    def _launch(self, step: Step) -> None:
        """Launches a step, as its halves if memory is too short for it. These are in flight as two steps."""
        try:
            self._in_flight.append((step, self.runner.launch(step)))
            return
        except StepTooLargeError:
            parts = halves(step) or (step,)
        if not self._ran_out_of_memory:
            logger.warning(
                "memory ran out in a step of %d tokens; it runs again%s, which is slower. If this happens often, lower "
                "max_num_batched_tokens or gpu_memory_utilization (warned once per LLM)",
                step.num_tokens, " in two halves" if len(parts) > 1 else "",
            )  # fmt: skip
        self._ran_out_of_memory = True
        for part in parts:
            self._in_flight.append((part, self.runner.launch(part)))

    def _constrain(self, step: Step, launched: LaunchedStep) -> None:
        """Lets a step sample, now that all steps before it are committed: its masks depend on their tokens. While the
        host fills the masks, the device computes the step's layers."""
        if not step.constrained:
            return
        guides: dict[int, Any] = {
            row: seq.stop_predicate
            for row, seq in enumerate(step.constrained)
            if seq.status is not SequenceStatus.FINISHED
        }
        changes = {row: guide.change_logits for row, guide in guides.items() if isinstance(guide, LogitsProcessors)}
        masked: dict[int, TokenGuide] = {row: guide for row, guide in guides.items() if row not in changes}
        masks = self.runner.mask_buffer(len(masked))
        if masked:
            next(iter(masked.values())).fill_masks(list(masked.values()), masks)
        launched.constrain(masks, list(masked), changes)

    @_guarded
    def reset(self) -> None:
        """Drops all requests, waits for the steps in flight and starts with an empty cache."""
        self._empty()

    def _empty(self) -> None:
        in_flight = self._in_flight
        # One statement, so that a second Ctrl-C finds all of it done or none of it.
        self._in_flight, self._unfinished, self._is_scheduler_stale = deque(), {}, True
        self._renew_scheduler()
        for _, launched in in_flight:
            try:
                launched.wait()
            except Exception as error:  # the failure that led here is already on its way to the caller
                logger.warning("a step in flight failed as well: %s", error)

    # Adapters

    @_guarded
    def merge_adapter(self, request: LoRARequest | None) -> Adapter | None:
        """See Adapters.merge."""
        self._check_finished()
        return self._adapters.merge(request)

    @_guarded
    def place_adapter(self, request: LoRARequest | None, version: int) -> Adapter | None:
        """See Adapters.place. Requests may be running."""
        return self._adapters.place(request, version, self._busy_slots)

    def adapter_version(self, request: LoRARequest) -> int:
        """See Adapters.version_of."""
        return self._adapters.version_of(request)

    def _busy_slots(self) -> set[int]:
        in_flight = (chunk.seq for step, _ in self._in_flight for chunk in step.chunks)
        return {seq.adapter.slot for seq in chain(self._unfinished.values(), in_flight)}

    # Weights and memory, while nothing runs; LLM's methods of these names describe them

    @_guarded
    def update_weights(self, weights: list[Any]) -> None:
        """weights: pairs of a name and a tensor."""
        self._check_finished()
        if self.is_sleeping:
            raise RuntimeError("the engine sleeps and has no place for weights; call wake_up() first")
        self._adapters.merge(None)
        self._renew_scheduler()  # first, so that no cached key of other weights is ever read
        self.runner.update_weights(weights)
        self.weight_version += 1

    @_guarded
    def weight_digests(self) -> dict[str, str]:
        """A digest of each tensor of the checkpoint. Requests may be running, but not with a merged adapter."""
        self.check_awake()
        if self._adapters.has_merged:
            raise RuntimeError("an adapter is merged into the weights; finish the iterator that uses it first")
        return self.runner.weight_digests()

    @_guarded
    def reset_prefix_cache(self) -> None:
        self._check_finished()
        self._renew_scheduler()

    @_guarded
    def sleep(self, level: int) -> None:
        if integer("level", level) not in (1, 2):
            raise ValueError(f"level must be 1 (keep the weights on the host) or 2 (drop them), not {level}")
        self._check_finished()
        self.is_sleeping = True  # first: an interrupted call may have freed something
        self._renew_scheduler()
        if level == 2:
            self._adapters.forget()
        self.runner.sleep(level)

    @_guarded
    def wake_up(self) -> None:
        if self.is_sleeping:
            self.runner.wake_up()
            self.is_sleeping = False

    def check_awake(self) -> None:
        """Raises a RuntimeError if the engine sleeps, or if some of its weights are undefined."""
        if self.is_sleeping:
            raise RuntimeError("the engine sleeps; call wake_up() first")
        if names := self.runner.undefined_weights():
            raise RuntimeError(
                f"{len(names)} tensors are undefined, since sleep(level=2) or an update that was cut off: "
                f"{', '.join(names[:3])}{' …' * (len(names) > 3)}; give them to update_weights() first"
            )

    def _check_finished(self) -> None:
        if not self.is_finished():
            raise RuntimeError("the engine has requests that have not finished; finish or abort them first")

    def exit(self) -> None:
        """Frees the device's memory; the engine cannot be used afterwards. Calling it again does nothing."""
        if self.is_closed:
            return
        if os.getpid() == self._process_id:  # a fork's runner belongs to its parent
            self.reset()
            self.runner.close()
        self.is_closed = True

    def check_alive(self) -> None:
        """Raises a RuntimeError if the engine is closed, or belongs to another process."""
        if self.is_closed:
            raise RuntimeError("the engine is closed; make a new one")
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "this process is a fork of the one that made the engine, whose threads and memory a fork cannot use; "
                'start processes by the "spawn" method and make an engine in each'
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be pickled or copied; make one in each process from the same Config")

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine's start, as in StepStats and SchedulerStats; bytes by use.

        Counters that end with `of_steps`, divided by `num_steps`, are means. So two calls give the means of the time
        between them. `mean_decode_batch_size` is the mean number of decodes over the steps that have any.
        """
        steps, scheduled = self.step_stats, self.scheduler_stats
        return {
            "num_requests": self.num_requests,
            "num_unfinished_requests": len(self._unfinished),
            **vars(scheduled),
            "finish_reasons": dict(scheduled.finish_reasons),
            "prefix_cache_hit_rate": scheduled.num_cached_prompt_tokens / max(scheduled.num_prompt_tokens, 1),
            **vars(steps),
            "mean_decode_batch_size": steps.num_decode_tokens / max(steps.num_steps_with_decodes, 1),
            "num_steps": steps.num_prefill_steps + steps.num_decode_steps,
            "max_num_seqs": self.info.max_num_seqs,
            "num_kvcache_blocks": self.info.num_blocks_per_group,
            "num_free_kvcache_blocks": self.scheduler.block_manager.num_free_blocks // self.info.num_groups,
            "kvcache_block_size": self.info.kvcache_block_size,
            "memory_bytes": {} if self.is_closed else self.runner.memory(),
        }

    def _renew_scheduler(self) -> None:
        self.runner.scheduler_renewed()
        self.scheduler = make_scheduler(self.config, self.info, self.scheduler_stats)
        self._is_scheduler_stale = False

    def _change(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.check_alive()
        if self._is_scheduler_stale:  # its renewal was interrupted
            self._renew_scheduler()
        return method(self, *args, **kwargs)


def _keep_logprobs(step: Step, output: StepOutput) -> list[int]:
    """Gives the sequences the log-probabilities of their new tokens, and of their prompts' tokens. Returns the ids of
    the sequences whose prompts cannot be scored, because the logits were not finite."""
    if output.logprobs.data:
        sampling = (chunk.seq for chunk in step.chunks if chunk.samples)
        for index, (seq, token_id) in enumerate(zip(sampling, output.token_ids, strict=True)):
            num_logprobs = seq.sampling_params.logprobs
            if num_logprobs is not None and seq.status is not SequenceStatus.FINISHED and token_id >= 0:
                seq.logprobs += output.logprobs.row(index, num_logprobs)
    index, broken = 0, []
    for seq, start, end, _ in step.scored:
        if seq.pooling is not None:
            continue
        if output.prompt_logprobs.has_broken(index, end - start):
            broken.append(seq.seq_id)
        num_logprobs = seq.sampling_params.prompt_logprobs or 0
        for row in range(index, index + end - start):
            seq.prompt_logprobs += output.prompt_logprobs.row(row, num_logprobs)
        index += end - start
    return broken


def _keep_states(step: Step, output: StepOutput) -> list[int]:
    """Gives the sequences what they pool. Returns the ids of those with numbers that are not finite."""
    broken = []
    for (kind, of_kind), states in zip(step.pooled.items(), output.states, strict=True):
        is_finite, end = np.isfinite(states).all(1), 0
        for seq, first, last, _ in of_kind:
            start, end = end, end + (last - first if kind.tokens == "all" else 1)
            seq.states.append(states[start:end])
            if not is_finite[start:end].all():
                broken.append(seq.seq_id)
    return broken


def _ask_stop_predicates(step: Step, token_ids: list[int]) -> list[int]:
    """The ids of the sequences whose stop predicates say that the new token ends them."""
    sampling = (chunk.seq for chunk in step.chunks if chunk.samples)
    return [
        seq.seq_id
        for seq, token_id in zip(sampling, token_ids, strict=True)
        if seq.stop_predicate is not None
        and seq.status is not SequenceStatus.FINISHED
        and token_id >= 0
        and seq.stop_predicate(token_id)
    ]
