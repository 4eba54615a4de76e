"""The scheduler decides which tokens run next. Plain Python, no torch, no clock: equal requests give equal steps
everywhere.

There is one rule: a step moves each sequence's `num_computed_tokens` towards its `num_tokens`. Prefill, a chunk of a
long prompt, decode, and coming back after preemption are that rule with other numbers.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import NO_STOP, Sequence, SequenceStatus
from nanovllm.engine.step import BROKEN_LOGITS, NO_TOKEN_LEFT, Chunk, Scored, Step, StepBuilder
from nanovllm.engine.waiting_queue import WaitingQueue

# From this many tokens on, a sequence is long: attention takes a good part of its prompt's time. A step whose first
# prompt is long may take more tokens beside decodes, because smaller steps leave some of the GPU's processors idle.
_LONG_SEQUENCE = 4096
_TOKENS_BESIDE_DECODES_OF_LONG = 8192

_BROKEN_LOGITS = "the model's logits were not finite (NaN or infinity)"
_NO_TOKEN_LEFT = (
    "no token is left to sample: logit_bias, bad_words, allowed_token_ids, min_tokens, structured_outputs and "
    "logits_processors together ban all of them; loosen them"
)


@dataclass
class SchedulerStats:
    """Counters over the engine's life; a new Scheduler continues them. Prompt tokens count when they are admitted. A
    row that begins again (see Scheduler.commit) counts as a preemption.
    """

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_preemptions: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)


class Committed(NamedTuple):
    """The sequences that a commit changed.

    finished: those that ended.
    begun_again: each takes the place of the one with its id, and computes its tokens again.
    """

    finished: list[Sequence]
    begun_again: list[Sequence]


class Scheduler:
    """Admits, advances, preempts and finishes sequences.

    Args:
        block_manager: owns the KV cache's blocks.
        max_num_batched_tokens: maximum number of tokens of one step.
        max_num_seqs: maximum number of running sequences.
        stats: counters to add to.
        max_tokens_beside_decodes: maximum number of tokens of a step with decodes, or twice its decodes if that is
            more. Decodes cost little more than their attention in a step that computes a prompt's tokens anyway. So
            prompts are spread over steps that are just large enough. Long prompts get larger steps.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        stats: SchedulerStats | None = None,
        max_tokens_beside_decodes: int = 2**31,
    ):
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.stats = stats or SchedulerStats()
        self.max_tokens_beside_decodes = max_tokens_beside_decodes
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of admission
        self._is_admitting = False  # an admission has begun and was only cut short by the step's budget
        self._num_free_blocks_wanted = 0  # before the next admission, after one that ran out of blocks
        self._free_entries = list(range(max_num_seqs - 1, -1, -1))
        # The last admitted sequence whose prompt is scored and that computes its context itself.
        self._context_source: Sequence | None = None

    def add(self, seq: Sequence) -> None:
        self.waiting.push(seq, self.block_manager.prefix_key(seq))
        if self.waiting.peek() is seq:
            self._num_free_blocks_wanted = 0  # they were for another sequence

    def abort(self, seq: Sequence) -> None:
        """Ends a sequence at once; a token of it that is still in flight will be dropped."""
        self._finish(seq, "abort")

    def room_for_prompts(self) -> tuple[int, int]:
        """How many more completions the batch can take, and how many prompt tokens the next step can take.

        The first number is the batch's places, minus the waiting completions, minus the running completions that do not
        reach their maximum length with the steps in flight. It is negative if more completions wait than fit. The
        second number assumes that no stop token ends a running completion.
        """
        # A sequence that only scores has its maximum length from the start.
        staying = [seq for seq in self.running if not seq.is_all_launched or seq.num_tokens < seq.max_length]
        num_tokens = self.max_num_batched_tokens
        if staying:
            num_decodes = sum(seq.num_tokens - seq.num_computed_tokens == 1 for seq in staying)
            # If no sequence waits, the next prompt is assumed to be as long as the last one.
            first = self.waiting.peek() if self.waiting else self.running[-1]
            num_tokens = self._budget_of_prompts(num_decodes, num_tokens - num_decodes, first)
        return self.max_num_seqs - len(staying) - len(self.waiting), num_tokens

    def schedule(self) -> Step:
        """The next step. It has no chunks if nothing can run until a step in flight is committed."""
        step = StepBuilder()
        budget = self._advance_running(step, self.max_num_batched_tokens)
        if self.waiting and budget > 0:
            self._admit(step, budget)
        return step.build()

    def commit(
        self, step: Step, token_ids: list[int], stopped: Container[int] = (), broken: Container[int] = ()
    ) -> Committed:
        """Takes the tokens that `step` sampled.

        A sequence's end may be noticed one step late. Only this method drops the sequence's extra token.

        If the logits of a sequence are not finite, it ends with an error, unless it shares keys that others computed.
        Then these may be the cause: attention lets a NaN reach earlier tokens of its own row, so the beginning of a
        broken prompt is broken too. Such a sequence begins again, without sharing.

        Args:
            step: the oldest that was not committed.
            token_ids: as in StepOutput.
            broken: ids of the sequences whose prompts have scores from logits that were not finite.
            stopped: ids of the sequences whose stop predicates say that the new token ends them.
        """
        finished, begun_again, tokens = list[Sequence](), list[Sequence](), iter(token_ids)
        block_manager, block_size = self.block_manager, self.block_manager.block_size
        for seq, _, samples in step.chunks:
            if not samples:
                continue
            token = next(tokens)
            if seq.status is SequenceStatus.FINISHED or seq.pooling is not None:
                continue
            known, reason = seq.token_ids, None
            if token < 0:
                if token == BROKEN_LOGITS and seq.num_shared_tokens:
                    begun_again.append(self._begin_again(seq))
                    continue
                seq.error = _NO_TOKEN_LEFT if token == NO_TOKEN_LEFT else _BROKEN_LOGITS
                reason = "error"
            else:
                known.append(token)
                is_stopped = seq.seq_id in stopped
                if is_stopped or token in seq.stop_token_ids:
                    reason = self._stop_reason(seq, token, is_stopped)
                if reason is None and len(known) >= seq.max_length:
                    reason = "length"
            # With a step in flight a block is full before its last token is known, so it is registered here.
            if len(known) % block_size == 0 and seq.num_computed_tokens >= len(known):
                block_manager.register_full_blocks(seq)
            if reason is not None:
                self._finish(seq, reason, remove=False)
                finished.append(seq)
        for scored in step.scored:
            is_broken = scored.seq.seq_id in broken
            if is_broken and scored.seq.num_shared_tokens and scored.seq.status is not SequenceStatus.FINISHED:
                begun_again.append(self._begin_again(scored.seq))
            elif (scored.ends or is_broken) and scored.seq.status is not SequenceStatus.FINISHED:
                scored.seq.error = _BROKEN_LOGITS if is_broken else None
                self._finish(scored.seq, "error" if is_broken else "length", remove=False)
                finished.append(scored.seq)
        if begun_again:
            self._put_in_front(begun_again, step)
        if finished or begun_again:
            self.running = [seq for seq in self.running if seq.status is not SequenceStatus.FINISHED]
        return Committed(finished, begun_again)

    def _advance_running(self, step: StepBuilder, budget: int) -> int:
        """Schedules the running sequences, oldest first, and preempts the newest if blocks run out. Returns the budget
        that is left."""
        running, block_manager = self.running, self.block_manager
        has_windows = block_manager.num_window_groups > 0
        index, is_past_decodes = 0, False
        while index < len(running) and budget > 0:
            seq = running[index]
            index += 1
            # The last token of a sequence is never computed: nothing is sampled from it.
            num_new_tokens = min(seq.num_tokens, seq.max_num_computed, seq.next_stop) - seq.num_computed_tokens
            if num_new_tokens <= 0:
                continue
            if num_new_tokens > 1 and not is_past_decodes:  # the last token of a prompt is computed like a decode
                budget, is_past_decodes = self._budget_of_prompts(len(step.chunks), budget, seq), True
            if num_new_tokens > budget:
                num_new_tokens = budget
            if has_windows:
                block_manager.free_behind_window(seq)
            while not block_manager.can_append(seq, num_new_tokens):
                newest = running.pop()
                self._preempt(newest)
                if newest is seq:
                    break
            else:
                budget -= num_new_tokens
                self._launch(step, seq, num_new_tokens)
        if not is_past_decodes and self.waiting:
            budget = self._budget_of_prompts(len(step.chunks), budget, self.waiting.peek())
        self._fork(step)
        return budget

    def _budget_of_prompts(self, num_decodes: int, budget: int, first: Sequence) -> int:
        """How many prompt tokens the step may take.

        Args:
            num_decodes: decodes of the step. A sequence that has its last token, or waits for it, is not in the step.
            budget: tokens that the decodes left.
            first: the first of these prompts.
        """
        if num_decodes == 0:
            return budget
        maximum = self.max_tokens_beside_decodes
        if first.num_tokens >= _LONG_SEQUENCE:
            maximum = max(maximum, _TOKENS_BESIDE_DECODES_OF_LONG)
        return min(budget, max(maximum - num_decodes, num_decodes))

    def _admit(self, step: StepBuilder, budget: int) -> None:
        """Admits waiting sequences, in one large prefill rather than many small ones."""
        num_running = len(self.running)
        num_free_places = self.max_num_seqs - num_running
        num_to_gather = min(max(min(16, self.max_num_seqs // 4), num_running // 8), len(self.waiting))
        block_manager, has_states = self.block_manager, self.block_manager.snapshots.has_states
        is_too_early = num_free_places < num_to_gather or block_manager.num_free_blocks < self._num_free_blocks_wanted
        if step.chunks and is_too_early and not self._is_admitting:
            return
        self._is_admitting = False
        self._num_free_blocks_wanted = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            if budget == 0:
                self._is_admitting = True
                return
            seq = self.waiting.peek()
            self._is_admitting = has_states and self._begins_too_early(seq, step)
            if self._is_admitting or seq.is_all_launched:
                return
            # Each running sequence will want another block sooner or later; without that reserve an admission would be
            # preempted at once. A sequence that would be alone needs no reserve.
            if not block_manager.can_allocate(seq, len(self.running), budget):
                # Without this, each sequence that finishes would admit one other, in a prefill step of its own.
                num_blocks = len(block_manager.blocks)
                self._num_free_blocks_wanted = min(block_manager.num_free_blocks + num_blocks // 16 + 1, num_blocks)
                return
            self.waiting.pop()
            source = self._source_of(seq, step)
            self._run(seq)
            if source is None:
                step.state_loads += block_manager.allocate(seq)
            else:
                self._copy_state(step, source, seq)
                step.copies += block_manager.fork(source, seq, seq.next_scored - 1)
            if seq.num_preemptions == 0:
                seq.num_cached_tokens = seq.num_computed_tokens
                self.stats.num_prompt_tokens += seq.num_prompt_tokens
                self.stats.num_cached_prompt_tokens += seq.num_cached_tokens
            if source is not None:  # its last block is filled at this step's end, so its own tokens follow in the next
                continue
            if has_states:
                seq.next_stop = self._next_stop(seq)
            num_left = min(seq.num_tokens, seq.max_num_computed, seq.next_stop) - seq.num_computed_tokens
            num_new_tokens = min(num_left, budget)
            budget -= num_new_tokens
            self._launch(step, seq, num_new_tokens)
            self._fork(step)

    def _source_of(self, seq: Sequence, step: StepBuilder) -> Sequence | None:
        """A running sequence that has computed the context of `seq`, whose continuation is scored; None if there is
        none. Full blocks would be shared anyway, but few contexts end where a block ends."""
        if (
            seq.next_scored == seq.num_prompt_tokens
            or not seq.may_share
            or not self.block_manager.enable_prefix_caching
        ):
            return None
        source, end = self._context_source, seq.next_scored - 1  # the context's last token must be computed
        # The copies of a step without chunks are never made.
        num_computed = 0 if source is None else source.num_computed_tokens
        has_context = num_computed == end if self.block_manager.snapshots.has_states else num_computed >= end
        if source is not None and has_context and end > 0 and step.chunks:
            has_window = self.block_manager.has_window(source, end)
            if has_window and source.begins_as(seq, end):
                return source
        self._context_source = seq
        return None

    def _begins_too_early(self, seq: Sequence, step: StepBuilder) -> bool:
        """Whether `seq` should begin from a state that this step, or a later one, copies after its layers."""
        if seq.waits_for_prompt and any(0 < each.num_computed_tokens < each.num_prompt_tokens for each in seq.siblings):
            return True  # it is forked once the prompt is complete
        return self.block_manager.begins_too_early(seq, step.state_copies)

    def _next_stop(self, seq: Sequence) -> int:
        """After how many tokens of `seq`, whose prompt is being computed, its state is copied for other requests.

        A snapshot is due after the last block that the next waiting request shares, and after the last block that an
        earlier request computed: a third request may begin as these two do. If the next one scores another continuation
        of the same context, it is forked at the end of this context.
        """
        block_manager, start = self.block_manager, seq.num_computed_tokens
        least, due = max(block_manager.snapshots.min_saved_tokens, 1), NO_STOP
        num_registered = len(block_manager.registered_prefix(seq)) * block_manager.block_size
        if num_registered - start >= least and seq.num_preemptions == 0:  # after a preemption it finds its own blocks
            due = num_registered
        end = seq.next_scored - 1
        if start < end and any(seq.scores_context_of(other) for other in islice(self.waiting.rest_of_group(), 1)):
            return min(due, end)
        num_forks = min(sum(each.waits_for_prompt for each in seq.siblings), self.max_num_seqs - len(self.running))
        num_shared = num_saved = 0
        for other in islice(self.waiting.rest_of_group(), num_forks, None):  # its siblings come first
            num_common = block_manager.num_common_tokens(seq, other)
            num_shared = num_shared or num_common
            if num_common < num_shared or num_shared <= start:
                break
            num_saved += num_shared - start
            if num_saved >= least:
                return min(due, num_shared)
        return due

    def _fork(self, step: StepBuilder) -> None:
        """Lets the waiting siblings of sequences whose prompts this step completes sample from the same logits.

        If there is no place or no block for a sibling, it keeps waiting. It is admitted like others, and shares full
        blocks.
        """
        for index in reversed(step.leaders):
            leader, forked = step.chunks[index].seq, index + 1
            for seq in leader.siblings:
                num_running, num_tokens = len(self.running), leader.num_computed_tokens
                if num_running == self.max_num_seqs or not self.block_manager.can_fork(num_tokens, num_running):
                    break
                if seq.waits_for_prompt:
                    self.waiting.remove(seq)
                    step.copies += self.block_manager.fork(leader, seq, num_tokens)
                    seq.num_shared_tokens = leader.num_shared_tokens  # the others are of its own request
                    self._run(seq)
                    self._copy_state(step, leader, seq)
                    seq.num_cached_tokens = seq.num_computed_tokens
                    seq.num_tokens += 1
                    step.chunks.insert(forked, Chunk(seq, 0, True))
                    forked += 1
                    if seq.is_constrained:
                        step.constrained.append(seq)
        step.leaders.clear()

    def _copy_state(self, step: StepBuilder, source: Sequence, seq: Sequence) -> None:
        if self.block_manager.snapshots.has_states:
            step.state_copies.append((source.entry, seq.entry))

    def _run(self, seq: Sequence) -> None:
        """Gives a sequence an entry and adds it to the running ones."""
        seq.status = SequenceStatus.RUNNING
        seq.entry = self._free_entries.pop()
        self.running.append(seq)

    def _launch(self, step: StepBuilder, seq: Sequence, num_new_tokens: int) -> None:
        self.block_manager.append(seq, num_new_tokens)
        samples = seq.num_computed_tokens == seq.num_tokens and (seq.pooling is None or seq.pooling.needs_row_only)
        step.chunks.append(Chunk(seq, num_new_tokens, samples))
        if samples and seq.pooling is None:
            seq.num_tokens += 1
            if seq.is_constrained:
                step.constrained.append(seq)
        if seq.num_computed_tokens - num_new_tokens < seq.num_prompt_tokens:  # it reaches into the prompt
            if seq.next_scored < seq.end_scored:
                self._score(step, seq)
            if seq.num_computed_tokens == seq.next_stop:
                step.state_copies += self.block_manager.take_snapshot(seq, step.state_copies)
                seq.next_stop = self._next_stop(seq)
            if samples and seq.num_computed_tokens == seq.num_prompt_tokens:
                step.first_tokens.append(seq)
                if seq.siblings:
                    step.leaders.append(len(step.chunks) - 1)

    def _score(self, step: StepBuilder, seq: Sequence) -> None:
        """Schedules the numbers of the prompt's tokens. The state after one token scores the next one."""
        start, end = seq.next_scored, min(seq.num_computed_tokens + 1, seq.end_scored)
        if start < end:
            seq.next_scored = end
            step.scored.append(Scored(seq, start, end, seq.only_scores and end == seq.end_scored))

    def _preempt(self, seq: Sequence) -> None:
        """Frees the blocks of a sequence that left `running`. The sequence is admitted next, with all of its tokens."""
        self.block_manager.deallocate(seq)
        self._release_entry(seq)
        seq.status, seq.next_stop = SequenceStatus.WAITING, NO_STOP
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._num_free_blocks_wanted = 0  # they were for another sequence
        self.waiting.push_front(seq)

    def _begin_again(self, seq: Sequence) -> Sequence:
        """Returns a copy of the sequence, which may share no keys. The caller puts it in front of the waiting ones, and
        removes the old one from `running`."""
        self._leave(seq)
        self.block_manager.forget(seq)
        again = seq.begun_again()
        self.stats.num_preemptions += 1
        self._num_free_blocks_wanted = 0
        return again

    def _put_in_front(self, begun_again: list[Sequence], step: Step) -> None:
        """Lets them wait in the order that they had in the step, the oldest first."""
        ids = [chunk.seq.seq_id for chunk in step.chunks]
        for seq in sorted(begun_again, key=lambda again: ids.index(again.seq_id), reverse=True):
            self.waiting.push_front(seq)

    def _leave(self, seq: Sequence) -> None:
        """Frees a sequence's blocks and entry, or removes it from `waiting`."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
            self._num_free_blocks_wanted = 0  # they may have been for this one
        else:
            self.block_manager.deallocate(seq)
            self._release_entry(seq)

    def _finish(self, seq: Sequence, reason: str, remove: bool = True) -> None:
        """Frees the sequence's blocks and entry; `remove=False` leaves `running` to the caller."""
        if remove and seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        self._leave(seq)
        if seq.error == _BROKEN_LOGITS:  # its keys must not be served to others
            self.block_manager.forget(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.num_tokens = len(seq.token_ids)
        self.stats.finish_reasons[reason] = self.stats.finish_reasons.get(reason, 0) + 1

    def _release_entry(self, seq: Sequence) -> None:
        self._free_entries.append(seq.entry)
        seq.entry = -1

    def _stop_reason(self, seq: Sequence, token: int, is_stopped: bool) -> str | None:
        num_completion_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        is_stop_id = token in seq.stop_token_ids and num_completion_tokens > seq.sampling_params.min_tokens
        return "stop" if is_stop_id or is_stopped else None

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, entries and statuses agree."""
        self.block_manager.check_integrity(self.running)
        entries = [seq.entry for seq in self.running]
        assert sorted(entries + self._free_entries) == list(range(self.max_num_seqs)), "entries do not add up"
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running)
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING and not seq.block_table and seq.entry == -1, seq
            assert not seq.window_table, seq
