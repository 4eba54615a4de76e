"""The scheduler and the loop around it: scenarios that have broken engines like this one. No model, no torch."""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from support.fake_runner import expected_completion, make_engine, run_to_end
from support.host_cost import microseconds_per_sequence
from support.long import some

from nanovllm.engine.block_manager import WindowGroups
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import Chunk, Step
from nanovllm.engine.waiting_queue import WaitingQueue
from nanovllm.sampling_params import SamplingParams

both_depths = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


def expect(engine: LLMEngine, prompt: list[int], **params) -> list[int]:
    return expected_completion(prompt, SamplingParams(**params), engine.info)[0]


def add(engine: LLMEngine, prompt, **params) -> int:
    return engine.add_request(list(prompt), SamplingParams(**params))


def add_that_stops(engine: LLMEngine, prompt, num_tokens: int, max_tokens: int) -> int:
    """Adds a request that ends earlier than its place in the queue suggests."""
    last = expect(engine, list(prompt), max_tokens=num_tokens)[-1]
    return add(engine, prompt, max_tokens=max_tokens, stop_token_ids=[last])


def check_right(engine: LLMEngine, finished) -> None:
    """Asserts that every finished sequence equals that of the request alone."""
    for seq in finished.values():
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        expected = expected_completion(prompt, seq.sampling_params, engine.info)
        assert (seq.completion_token_ids, seq.finish_reason) == expected, seq


def rows_of(engine: LLMEngine, seq_id: int) -> list[tuple[int, bool]]:
    """(number of new tokens, samples) of each step that the request was in."""
    return [(num, samples) for step in engine.runner.log for row_id, num, samples in step if row_id == seq_id]


# Steps


@pytest.mark.parametrize(
    "lengths, num_decodes",
    [([], 0), ([1], 1), ([7], 0), ([1, 1, 1], 3), ([1, 1, 5], 2), ([1, 5, 1], 1), ([5, 1, 1], 0), ([1, 2, 3, 1], 1)],
)
def test_decodes_are_the_leading_chunks_of_one_new_token(lengths, num_decodes):
    """A single token behind a longer chunk is attended with the prompts: rows are never sorted."""
    chunks = [Chunk(Sequence(index, [0] * 9, None, 20), num, True) for index, num in enumerate(lengths)]
    step = Step.of(chunks)
    assert step.num_decodes == num_decodes and step.chunks == chunks


@both_depths
def test_every_step_of_the_scheduler_says_how_many_of_its_chunks_are_decodes(overlap):
    """FakeRunner counts them in each launch; this run has all kinds of steps."""
    engine = make_engine(num_blocks=40, max_num_batched_tokens=12, overlap=overlap)
    steps, launch = [], engine.runner.launch
    engine.runner.launch = lambda step: steps.append((step.num_decodes, len(step.chunks))) or launch(step)
    for index in range(6):
        add(engine, [index] * (3 + 5 * index % 17), max_tokens=6)
    check_right(engine, run_to_end(engine))
    kinds = {(num_decodes > 0, num_decodes < num_rows) for num_decodes, num_rows in steps}
    assert kinds == {(True, False), (True, True), (False, True)}


def test_a_completion_whose_last_step_is_in_flight_keeps_no_place():
    """The place counts as free during that step, so a new row is read for it. Otherwise the device would wait for that
    row after the step."""
    engine = make_engine(max_num_seqs=4, overlap=True)
    for max_tokens in (1, 3, 2, 3, 3, 3):
        add(engine, [max_tokens] * 5, max_tokens=max_tokens)
    assert engine.room_for_prompts()[0] == -2
    found = []
    for _ in range(3):
        engine.step()
        found.append((len(engine.scheduler.running), engine.room_for_prompts()[0]))
    assert found == [(4, -2), (4, -2), (4, 2)]
    run_to_end(engine)
    assert engine.room_for_prompts()[0] == 4


def test_the_room_for_prompts_is_that_of_the_next_step():
    """Beside decodes a step takes fewer tokens of prompts. A prompt of which a chunk is left is no decode."""
    engine = make_engine(max_num_batched_tokens=8, max_tokens_beside_decodes=4, max_num_seqs=4)
    assert engine.room_for_prompts() == (4, 8)
    add(engine, range(10), max_tokens=3)
    engine.step()
    assert engine.room_for_prompts() == (3, 8)
    engine.step()
    assert engine.room_for_prompts() == (3, 3)


def test_the_room_for_prompts_is_less_the_decodes_without_a_cap_too():
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    for token in (1, 2):
        add(engine, [token] * 3, max_tokens=9)
    engine.step()
    engine.step()
    assert engine.room_for_prompts() == (2, 6)


def test_the_room_for_prompts_is_larger_if_the_next_prompt_is_long(monkeypatch):
    """The next prompt is the first that waits. If none waits, it is assumed to be as long as the last one."""
    monkeypatch.setattr("nanovllm.engine.scheduler._LONG_SEQUENCE", 30)
    monkeypatch.setattr("nanovllm.engine.scheduler._TOKENS_BESIDE_DECODES_OF_LONG", 20)
    engine = make_engine(max_num_batched_tokens=60, max_tokens_beside_decodes=10, max_num_seqs=4)
    found = []
    for token, length in ((1, 5), (2, 35), (3, 5)):
        add(engine, [token] * length, max_tokens=16)
        waiting = engine.room_for_prompts()
        while engine.scheduler.waiting or engine.scheduler.running[-1].num_tokens == length:
            engine.step()
        found.append((waiting, engine.room_for_prompts()))
    assert found == [((3, 60), (3, 9)), ((2, 19), (2, 18)), ((1, 8), (1, 7))]
    check_right(engine, run_to_end(engine))


def test_a_row_that_only_scores_keeps_its_place_until_its_prompt_is_read():
    """It has its greatest length from the start, so its place once counted as free."""
    engine = make_engine(max_num_batched_tokens=8, max_tokens_beside_decodes=4, max_num_seqs=4)
    add(engine, range(20), max_tokens=0, prompt_logprobs=0)
    found = []
    while not engine.is_finished():
        engine.step()
        found.append(engine.room_for_prompts())
    assert (3, 8) in found and found[-1] == (4, 8)


def test_bytes_are_no_token_ids():
    """An array would read four of them as one number."""
    engine = make_engine()
    for prompt in (b"four", bytearray(b"four"), memoryview(b"four")):
        with pytest.raises(TypeError, match="token ids must be integers"):
            engine.add_request(prompt, SamplingParams())


# Prefix cache


@both_depths
@pytest.mark.parametrize("block_size, num_computed", [(1, 1), (4, 4), (8, 8)])
def test_a_fully_cached_prompt_still_computes_one_token(block_size, num_computed, overlap):
    """A prompt of full blocks, all of them cached, once left no token to sample from."""
    engine = make_engine(block_size=block_size, overlap=overlap)
    for _ in range(2):
        seq_id = add(engine, range(8), max_tokens=3)
        check_right(engine, run_to_end(engine))
    assert rows_of(engine, seq_id)[0] == (num_computed, True)


def test_two_prompts_of_one_prefill_step_share_their_prefix():
    engine = make_engine()
    add(engine, [*range(8), 100])
    add(engine, [*range(8), 200, 201])
    check_right(engine, run_to_end(engine))
    assert engine.runner.log[0] == [(0, 9, True), (1, 2, True)]
    assert engine.runner.num_same_step_hits == 1


def test_fifteen_prompts_with_one_prefix_admitted_in_one_step_compute_it_once():
    """Blocks could once be matched only after their step, so requests that started together computed the same ones."""
    engine = make_engine(num_blocks=256)
    for index in range(15):
        add(engine, [*range(20), 100 + index], max_tokens=4)
    check_right(engine, run_to_end(engine))
    assert engine.runner.log[0] == [(0, 21, True)] + [(index, 1, True) for index in range(1, 15)]
    assert engine.metrics()["num_cached_prompt_tokens"] == 14 * 20


def test_prompts_that_share_a_prefix_are_admitted_together():
    engine = make_engine(max_num_seqs=2)
    a, b = list(range(5)), list(range(50, 55))
    for prompt in (a, b, a, b, [1, 2], a):
        add(engine, prompt, max_tokens=1)
    run_to_end(engine)
    assert [[seq_id for seq_id, _, _ in step] for step in engine.runner.log] == [[0, 2], [5, 1], [3, 4]]


@both_depths
def test_generated_blocks_are_hit_by_later_prompts(overlap):
    engine = make_engine(overlap=overlap)
    add(engine, [1, 2, 3], max_tokens=10)
    (first,) = run_to_end(engine).values()
    seq_id = add(engine, [*first.token_ids, 9])
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert finished[seq_id].num_cached_tokens == 12


# Preemption


def preempting_engine(overlap: bool, **options) -> LLMEngine:
    """Six blocks of four: at 12 computed tokens each, request 0 takes a block from request 1.

    Both may grow to the same length, so request 0 comes first; it stops after 11 tokens.
    """
    engine = make_engine(num_blocks=6, max_model_len=24, overlap=overlap, **options)
    add_that_stops(engine, range(4), num_tokens=11, max_tokens=16)
    add(engine, range(50, 54), max_tokens=16)
    return engine


@both_depths
def test_a_preempted_sequence_comes_back_through_the_cache_generated_blocks_included(overlap):
    engine = preempting_engine(overlap)
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert finished[0].num_preemptions == 0 and finished[1].num_preemptions == 1
    assert finished[1].num_cached_tokens == 0, "what the prompt found in the cache at first does not change"
    # 8 of 13 tokens were found again: the prompt and a generated block. The third block went to request 0.
    assert [num for num, _ in rows_of(engine, 1) if num > 1] == [4, 5]


@both_depths
def test_the_budget_of_a_readmitted_sequence_counts_only_what_is_computed(overlap):
    """The whole length was once taken from the budget before the cache was asked."""
    engine = preempting_engine(overlap, max_num_batched_tokens=8)
    third = add(engine, [70, 71, 72], max_tokens=1)
    finished = run_to_end(engine)
    check_right(engine, finished)
    (step,) = [step for step in engine.runner.log if (1, 5, True) in step]
    assert (third, 3, True) in step, "13 tokens come back, 5 of them are computed, 3 are left of the budget"


@both_depths
def test_a_sequence_preempted_just_behind_a_block_boundary_keeps_its_sampled_token(overlap):
    """At block_size + 1 tokens, the sampled token was once lost with the blocks."""
    engine = make_engine(num_blocks=3, max_model_len=12, overlap=overlap)
    for start in (0, 50):
        add(engine, range(start, start + 4), max_tokens=8)
    preempted_at = []
    finished = {}
    while not engine.is_finished():
        finished |= {seq.seq_id: seq for seq in engine.step()}
        preempted_at += [len(seq.token_ids) for seq in engine.scheduler.waiting if seq.num_preemptions]
    check_right(engine, finished)
    assert finished[1].num_preemptions == 1 and preempted_at[-1] == 5


@both_depths
def test_the_newest_is_preempted_and_the_oldest_comes_back_first(overlap):
    engine = make_engine(num_blocks=8, max_model_len=32, overlap=overlap)
    for index in range(4):
        add(engine, [index] * 4, max_tokens=24)
    done, returned = [], []
    while not engine.is_finished():
        waiting = [seq.seq_id for seq in engine.scheduler.waiting if seq.num_preemptions]
        assert waiting == sorted(waiting)
        returned += waiting
        done += [seq.seq_id for seq in engine.step()]
        running = [seq.seq_id for seq in engine.scheduler.running]
        assert running == sorted(running)
    assert done == [0, 1, 2, 3] and set(returned) == {1, 2, 3}


def test_a_preempted_sequence_with_a_token_in_flight_waits_for_its_commit():
    """It was once readmitted at once, and computed without the token that was still on the device."""
    engine = make_engine(num_blocks=3, max_model_len=12, overlap=True)
    for start in (0, 50):
        add(engine, range(start, start + 4), max_tokens=8)
    scheduler = engine.scheduler
    first = scheduler.schedule()
    victim = scheduler.running[1]
    second = scheduler.schedule()  # both want a second block, and there is one
    assert [seq.seq_id for seq, _, _ in first.chunks] == [0, 1] and [seq.seq_id for seq, _, _ in second.chunks] == [0]
    assert victim.status is SequenceStatus.WAITING and victim.has_token_in_flight
    engine.abort(0)  # now there is room for it
    assert scheduler.schedule() == Step([], 0)
    scheduler.commit(first, [7, 8])
    ((seq, num_new_tokens, samples),) = scheduler.schedule().chunks
    assert seq is victim and list(seq.token_ids) == [50, 51, 52, 53, 8] and (num_new_tokens, samples) == (1, True)


@both_depths
def test_an_admission_leaves_a_block_for_the_growth_of_each_that_runs(overlap):
    """Without the reserve, the sequence that was admitted last would be preempted at once, again and again."""
    engine = make_engine(num_blocks=8, max_model_len=32, overlap=overlap)
    add(engine, range(8), max_tokens=8)
    add(engine, range(50, 58), max_tokens=8)
    add(engine, range(100, 110), max_tokens=8)
    engine.step()
    assert [seq_id for seq_id, _, _ in engine.runner.log[0]] == [0, 1]
    check_right(engine, run_to_end(engine))
    assert engine.metrics()["num_preemptions"] == 0


# Limits


@both_depths
def test_a_request_that_could_never_fit_is_refused_and_the_largest_that_fits_runs(overlap):
    """A request larger than the pool was once preempted for ever."""
    engine = make_engine(num_blocks=4, max_model_len=40, overlap=overlap)
    add(engine, [1, 2, 3], max_tokens=5)
    with pytest.raises(ValueError, match="5 KV cache blocks of 4 tokens, but there are 4"):
        add(engine, range(10), max_tokens=8)
    with pytest.raises(ValueError, match="KV cache blocks"):
        add(engine, range(30), max_tokens=1)
    largest = add(engine, range(10), max_tokens=7)
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert set(finished) == {0, largest} and len(finished[largest].token_ids) == 17


@both_depths
def test_a_prompt_needs_room_for_one_token_within_max_model_len(overlap):
    engine = make_engine(max_model_len=16, overlap=overlap)
    for length in (16, 17):
        with pytest.raises(ValueError, match=f"{length} tokens leave no room .* max_model_len=16"):
            add(engine, range(length))
    seq_id = add(engine, range(15), max_tokens=5)
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert len(finished[seq_id].completion_token_ids) == 1 and finished[seq_id].finish_reason == "length"


@both_depths
def test_generation_ends_exactly_at_max_model_len(overlap):
    engine = make_engine(max_model_len=16, num_blocks=8, overlap=overlap)
    for length in range(1, 16):
        add(engine, [length] * length, max_tokens=100)
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert {(len(seq.token_ids), seq.finish_reason) for seq in finished.values()} == {(16, "length")}


@both_depths
@pytest.mark.parametrize("max_num_seqs", some([1, 3, 12, 20, 100, 500], 1, 3, 12, 20, 100))
def test_every_batch_size_up_to_max_num_seqs_is_met_and_none_above(max_num_seqs, overlap):
    engine = make_engine(
        num_blocks=10_000, block_size=16, max_model_len=600, vocab_size=2000, max_num_seqs=max_num_seqs,
        overlap=overlap,
    )  # fmt: skip
    for index in range(max_num_seqs):
        add(engine, [index], max_tokens=index + 1)
    check_right(engine, dict(list(run_to_end(engine).items())[::7]))
    assert {len(step) for step in engine.runner.log} == set(range(1, max_num_seqs + 1))
    for index in range(2 * max_num_seqs + 1):
        add(engine, [index], max_tokens=2)
    check_right(engine, run_to_end(engine))
    assert max(len(step) for step in engine.runner.log) == max_num_seqs


@both_depths
def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples(overlap):
    engine = make_engine(max_num_batched_tokens=8, overlap=overlap)
    seq_id = add(engine, range(20), max_tokens=2)
    check_right(engine, run_to_end(engine))
    assert rows_of(engine, seq_id) == [(8, False), (8, False), (4, True), (1, True)]


def test_a_step_never_computes_more_than_its_budget_and_fills_it():
    engine = make_engine(max_num_batched_tokens=10, num_blocks=100)
    for index in range(6):
        add(engine, [index] * 7, max_tokens=1)
    run_to_end(engine)
    assert [sum(num for _, num, _ in step) for step in engine.runner.log] == [10, 10, 10, 10, 2]


def admissions(engine: LLMEngine) -> list[int]:
    """For each step, how many requests it was the first step of."""
    seen: set[int] = set()
    counts = []
    for step in engine.runner.log:
        ids = {seq_id for seq_id, _, _ in step}
        counts.append(len(ids - seen))
        seen |= ids
    return counts


def test_admissions_are_gathered_while_decode_is_busy():
    """If prompts came in one at a time, every step would be a prefill step."""
    engine = make_engine(num_blocks=10_000, max_num_seqs=64)
    for index in range(96):
        add(engine, [index], max_tokens=2 + index % 64)
    run_to_end(engine)
    assert [count for count in admissions(engine) if count] == [64, 16, 16]


def test_admissions_are_gathered_when_blocks_are_what_is_short():
    """With free places but a full cache, each sequence that finished once let in the next, with a prefill step each."""
    engine = make_engine(num_blocks=160, max_num_seqs=512, overlap=False)
    for index in range(200):
        # All may grow to the same length, so they come in the order of arrival, and running ones end one by one.
        add_that_stops(engine, [index] * 12, num_tokens=4 + index % 16, max_tokens=19)
    check_right(engine, run_to_end(engine))
    later = [count for count in admissions(engine)[1:] if count]
    assert sum(later) / len(later) >= 3, later


def test_a_refused_request_that_is_aborted_holds_nobody_back():
    """The blocks that it needed once stayed reserved, so requests that fitted waited for the running one to end."""
    engine = make_engine(num_blocks=100, max_model_len=400, max_num_seqs=8, overlap=False)
    add(engine, [1] * 40, max_tokens=300)
    engine.step()
    large = add(engine, [2] * 390, max_tokens=2)
    engine.step()
    engine.abort(large)
    small = [add(engine, [3 + index], max_tokens=2) for index in range(5)]
    finished = [seq.seq_id for _ in range(4) for seq in engine.step()]
    assert sorted(finished) == small


def test_aborted_requests_leave_nothing_in_the_queue():
    engine = make_engine()
    for index in range(20):
        engine.abort(add(engine, [index] * 9, max_tokens=2))
    assert all(not value for value in vars(engine.scheduler.waiting).values())


def test_newcomers_with_a_popular_prefix_cannot_keep_others_waiting():
    """A group that was being served once took in newcomers, so requests behind it never came to the front."""
    engine = make_engine(max_num_seqs=2, overlap=False)
    popular = [7] * 8
    for _ in range(4):
        add(engine, [*popular, 1], max_tokens=3)
    lonely = add(engine, range(20, 29), max_tokens=3)
    for _ in range(60):
        for seq in engine.step():
            if seq.seq_id == lonely:
                return
            add(engine, [*popular, 1], max_tokens=3)
    raise AssertionError("the other request still waits")


def test_the_last_prompts_are_admitted_as_soon_as_there_are_places_for_all_of_them():
    """They once waited for places that no other request would ever take."""
    engine = make_engine(num_blocks=10_000, max_num_seqs=64, overlap=False)
    for index in range(67):
        add(engine, [index], max_tokens=max(2, 65 - index))
    run_to_end(engine)
    assert admissions(engine)[:5] == [64, 0, 0, 0, 3], "one of the first 64 ends with each step but the first"


def test_an_admission_that_the_budget_cut_short_goes_on_with_the_next_step():
    """When the step was full, the rest once had to wait for as many free places as at the start."""
    engine = make_engine(num_blocks=10_000, max_num_seqs=64, max_num_batched_tokens=120)
    for index in range(90):
        add(engine, [index] * 6, max_tokens=40)
    run_to_end(engine)
    counts = admissions(engine)
    assert sum(counts[: counts.index(0)]) == 64


# Who is next


def order_of_admission(engine: LLMEngine) -> list[int]:
    return list(dict.fromkeys(seq_id for step in engine.runner.log for seq_id, _, _ in step))


@both_depths
def test_the_longest_completion_is_admitted_first_and_ties_go_by_arrival(overlap):
    """When requests ran in order of arrival, a run ended with the few longest decoding alone."""
    engine = make_engine(max_num_seqs=1, overlap=overlap)
    for index, max_tokens in enumerate([3, 9, 1, 9, 12, 3]):
        add(engine, [index], max_tokens=max_tokens)
    check_right(engine, run_to_end(engine))
    assert order_of_admission(engine) == [4, 1, 3, 0, 5, 2]


def test_a_completion_is_as_long_as_its_prompt_leaves_room_for():
    """The prompt's tokens do not count, nor do tokens beyond max_model_len."""
    engine = make_engine(max_num_seqs=1, max_model_len=16)
    add(engine, [1] * 12, max_tokens=100)  # 4 to generate
    add(engine, [2] * 6, max_tokens=100)  # 10
    add(engine, [3], max_tokens=5)
    add(engine, [4] * 11, max_tokens=3)
    check_right(engine, run_to_end(engine))
    assert order_of_admission(engine) == [1, 2, 0, 3]


@both_depths
def test_a_group_stands_where_its_longest_member_stands_and_is_served_together(overlap):
    engine = make_engine(max_num_seqs=1, overlap=overlap)
    a, b = list(range(5)), list(range(50, 55))
    for prompt, max_tokens in [(a, 2), ([1], 8), (b, 5), (a, 6), (b, 9), (a, 2), ([2], 5)]:
        add(engine, prompt, max_tokens=max_tokens)
    check_right(engine, run_to_end(engine))
    assert order_of_admission(engine) == [4, 2, 1, 3, 0, 5, 6]


def test_a_group_that_is_served_takes_no_more_members_and_no_longer_newcomer_splits_it():
    engine = make_engine(max_num_seqs=1, overlap=False)
    popular = list(range(5))
    for max_tokens in (5, 3, 2):
        add(engine, popular, max_tokens=max_tokens)
    add(engine, [1], max_tokens=4)
    engine.step()
    add(engine, popular, max_tokens=2)  # would come before request 3
    add(engine, popular, max_tokens=9)  # would come before requests 1 and 2
    add(engine, [2], max_tokens=10)
    check_right(engine, run_to_end(engine))
    assert order_of_admission(engine) == [0, 1, 2, 6, 5, 4, 3]


@dataclass(eq=False)
class PlainGroup:
    key: int | None  # None once it takes no more members
    members: list[Sequence]


@dataclass
class PlainQueue:
    """The behaviour of a WaitingQueue, by sorting again for every question."""

    returned: list[Sequence] = field(default_factory=list)
    groups: list[PlainGroup] = field(default_factory=list)
    served: PlainGroup | None = None

    @staticmethod
    def rank(seq: Sequence) -> tuple[int, int]:
        return -(seq.max_length - seq.num_prompt_tokens), seq.seq_id

    def push(self, seq: Sequence, prefix_key: int | None) -> None:
        for group in self.groups:
            if prefix_key is not None and group.key == prefix_key:
                group.members.append(seq)
                return
        self.groups.append(PlainGroup(prefix_key, [seq]))

    def push_front(self, seq: Sequence) -> None:
        self.returned.insert(0, seq)

    def in_order(self) -> list[Sequence]:
        groups = [(group is not self.served, sorted(group.members, key=self.rank)) for group in self.groups]
        groups.sort(key=lambda group: (group[0], self.rank(group[1][0])))
        return self.returned + [seq for _, members in groups for seq in members]

    def pop(self) -> Sequence:
        seq = self.in_order()[0]
        for group in self.groups:
            if seq in group.members:
                group.key, self.served = None, group
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        if seq in self.returned:
            self.returned.remove(seq)
            return
        for group in self.groups:
            if seq in group.members:
                group.members.remove(seq)
        self.groups = [group for group in self.groups if group.members]


def check_same(queue: WaitingQueue, plain: PlainQueue) -> None:
    expected = plain.in_order()
    assert len(queue) == len(expected) and bool(queue) == bool(expected)
    assert Counter(seq.seq_id for seq in queue) == Counter(seq.seq_id for seq in expected)
    if expected:
        assert queue.peek() is expected[0]
    served = plain.served.members if plain.served else []
    assert list(queue.rest_of_group()) == sorted(served, key=plain.rank)


def waiting_sequence(seq_id: int, num_prompt_tokens: int, num_to_generate: int) -> Sequence:
    return Sequence(seq_id, [0] * num_prompt_tokens, SamplingParams(), num_prompt_tokens + num_to_generate)


def test_whoever_leaves_the_queue_leaves_the_others_in_order():
    """The first, the middle or the last of the queue or of a group, before or after its group began to be served."""
    rows = [(None, 4), (7, 3), (7, 6), (8, 5), (7, 1), (8, 5), (None, 6)]
    for num_popped in range(len(rows) - 1):
        for first in range(len(rows) - num_popped):
            for second in range(len(rows) - num_popped - 1):
                queue, plain = WaitingQueue(), PlainQueue()
                for seq_id, (key, num_to_generate) in enumerate(rows):
                    seq = waiting_sequence(seq_id, 2 + seq_id % 3, num_to_generate)
                    queue.push(seq, key)
                    plain.push(seq, key)
                for _ in range(num_popped):
                    assert queue.pop() is plain.pop()
                for index in (first, second):
                    seq = plain.in_order()[index]
                    queue.remove(seq)
                    plain.remove(seq)
                    check_same(queue, plain)
                while plain.in_order():
                    assert queue.pop() is plain.pop()
                    check_same(queue, plain)


def test_the_queue_does_what_a_plain_list_sorted_anew_does(count):
    """Random arrivals, admissions, aborts and preemptions."""
    met: Counter[str] = Counter()
    num_seeds = count(60, 200)
    for seed in range(num_seeds):
        rng = random.Random(seed)
        queue, plain = WaitingQueue(), PlainQueue()
        popped: list[Sequence] = []
        num_keys, longest, num_pushed = rng.choice([0, 1, 3, 10]), rng.choice([1, 3, 50]), 0
        weights = [rng.choice([2, 5]), rng.choice([1, 3]), rng.choice([0, 1]), rng.choice([0, 1])]
        for _ in range(200):
            (action,) = rng.choices(["push", "pop", "remove", "push_front"], weights)
            if action == "push":
                seq = waiting_sequence(num_pushed, rng.randint(1, 9), rng.randint(1, longest))
                key = rng.randrange(num_keys) if num_keys and rng.random() < 0.8 else None
                num_pushed += 1
                queue.push(seq, key)
                plain.push(seq, key)
            elif action == "pop" and queue:
                popped.append(queue.pop())
                assert popped[-1] is plain.pop()
            elif action == "remove" and queue:
                seq = rng.choice(plain.in_order())
                queue.remove(seq)
                plain.remove(seq)
            elif action == "push_front" and popped:
                seq = popped.pop(rng.randrange(len(popped)))
                queue.push_front(seq)
                plain.push_front(seq)
            else:
                continue
            met[action] += 1
            check_same(queue, plain)
        while plain.in_order():
            assert queue.pop() is plain.pop()
            check_same(queue, plain)
        del queue._served_group  # only a number
        assert not any(vars(queue).values()), "something was left behind"
    assert min(met.values()) > 5 * num_seeds and len(met) == 4, met


# Prompts beside decodes


def note_steps(engine: LLMEngine) -> list[tuple[int, int, int]]:
    """A list that gets (running before, those of them that run for one token, tokens) of each step."""
    steps = []
    schedule = engine.scheduler.schedule

    def noted():
        running = [seq.seq_id for seq in engine.scheduler.running]
        step = schedule()
        num_decodes = sum(num_new_tokens == 1 and seq.seq_id in running for seq, num_new_tokens, _ in step.chunks)
        steps.append((len(running), num_decodes, step.num_tokens))
        return step

    engine.scheduler.schedule = noted
    return steps


@both_depths
def test_prompts_beside_decodes_fill_steps_of_their_own_size_and_the_first_the_whole_budget(overlap):
    """The decodes once had to wait during one large prefill after another."""
    engine = make_engine(
        num_blocks=1000, max_num_batched_tokens=60, max_tokens_beside_decodes=10, max_num_seqs=20, overlap=overlap
    )
    steps = note_steps(engine)
    for index in range(20):
        add(engine, [index] * 16, max_tokens=40)
    check_right(engine, run_to_end(engine))
    # 3 prompts and most of the fourth, then the rest beside the decodes: 10 tokens, or as many as they have.
    while_prompts_came = list(takewhile(lambda step: step[0] < 20, steps))
    assert while_prompts_came[:3] == [(0, 0, 60), (4, 3, 10), (5, 4, 10)]
    assert {num_tokens for _, _, num_tokens in while_prompts_came[1:]} == {*range(10, 38, 2)}
    for num_running, num_decodes, num_tokens in while_prompts_came[1:]:
        assert num_decodes >= num_running - 1 and num_tokens == max(10, 2 * num_decodes)


@both_depths
def test_chunks_of_prompts_are_cut_short_only_beside_decodes(overlap):
    engine = make_engine(max_num_batched_tokens=8, max_tokens_beside_decodes=1, overlap=overlap)
    for index in range(2):
        add(engine, [index] * 20, max_tokens=9)
    check_right(engine, run_to_end(engine))
    assert [num for num, _ in rows_of(engine, 0)][:4] == [8, 8, 4, 1]
    assert [num for num, _ in rows_of(engine, 1)][:7] == [4, 1, 1, 1, 1, 1, 1]


@both_depths
@pytest.mark.parametrize("scores", [False, True])
def test_rows_that_end_with_their_first_token_are_no_decodes(scores, overlap):
    """One more step is planned before their token is known; it still has the whole budget."""
    engine = make_engine(
        num_blocks=1000, max_num_batched_tokens=60, max_tokens_beside_decodes=10, max_num_seqs=40, overlap=overlap
    )
    steps = note_steps(engine)
    for index in range(20):
        params = {"max_tokens": 0, "prompt_logprobs": 0} if scores and index % 2 else {"max_tokens": 1}
        add(engine, [index] * 15, **params)
    check_right(engine, run_to_end(engine))
    tokens = [num_tokens for _, _, num_tokens in steps if num_tokens]
    assert tokens[:-1] == [60] * (len(tokens) - 1) and tokens[-1] <= 60 and sum(tokens) >= 290


@both_depths
def test_long_prompts_beside_decodes_have_larger_steps(overlap, monkeypatch):
    monkeypatch.setattr("nanovllm.engine.scheduler._LONG_SEQUENCE", 30)
    monkeypatch.setattr("nanovllm.engine.scheduler._TOKENS_BESIDE_DECODES_OF_LONG", 20)
    engine = make_engine(
        num_blocks=1000, max_num_batched_tokens=60, max_model_len=64, max_tokens_beside_decodes=10, overlap=overlap
    )
    steps = note_steps(engine)
    add(engine, [1] * 50, max_tokens=14)
    for token, length in ((2, 29), (3, 30), (4, 29), (5, 50)):
        add(engine, [token] * length, max_tokens=13 - token)
    check_right(engine, run_to_end(engine))
    # Only the third and the last are long, and begin steps when the prompt before them has one token left, or none.
    assert [tokens for _, _, tokens in steps][:10] == [60, 10, 10, 20, 20, 10, 10, 10, 10, 20]


@both_depths
@pytest.mark.parametrize("cap", [1, 5, 24, 1000])
def test_no_step_with_decodes_is_larger_than_the_cap_or_twice_its_decodes(cap, overlap):
    rng = random.Random(cap)
    engine = make_engine(
        num_blocks=24, max_num_batched_tokens=48, max_tokens_beside_decodes=cap, max_num_seqs=12, overlap=overlap
    )
    steps = note_steps(engine)
    finished = {}
    for _ in range(400):
        if rng.random() < 0.7:
            add(engine, [rng.randrange(1000)] * rng.randint(1, 40), max_tokens=rng.randint(1, 20))
        if not engine.is_finished():
            finished |= {seq.seq_id: seq for seq in engine.step()}
    finished |= run_to_end(engine)
    check_right(engine, finished)
    assert len(finished) > 150 and engine.metrics()["num_preemptions"] > 10
    for _, num_decodes, num_tokens in steps:
        assert num_tokens <= (48 if num_decodes == 0 else min(48, max(cap, 2 * num_decodes)))
    assert max(num_tokens for _, num_decodes, num_tokens in steps if num_decodes == 0) == 48


@both_depths
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 1}, {"num_blocks": 12}, {"max_num_seqs": 1}])
def test_with_the_smallest_cap_everything_still_finishes_and_is_right(options, overlap):
    engine = make_engine(**{"max_model_len": 48, "max_tokens_beside_decodes": 1, "overlap": overlap, **options})
    rng = random.Random(0)
    for index in range(60):
        add(engine, [index % 5] * rng.randint(1, 30), max_tokens=rng.randint(1, 18))
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert len(finished) == 60


# Ends


@both_depths
def test_a_sequence_that_ends_by_length_never_runs_a_step_over(overlap):
    engine = make_engine(max_model_len=16, overlap=overlap)
    by_max_tokens = add(engine, range(5), max_tokens=6)
    by_max_model_len = add(engine, range(50, 60), max_tokens=60)
    check_right(engine, run_to_end(engine))
    assert sum(num for num, _ in rows_of(engine, by_max_tokens)) == 5 + 6 - 1
    assert sum(num for num, _ in rows_of(engine, by_max_model_len)) == 15


@pytest.mark.parametrize("overlap, num_steps", [(False, 4), (True, 5)])
def test_a_stop_token_drops_the_token_of_the_step_that_ran_over(overlap, num_steps):
    """The extra token of the step in flight was once added to the completion."""
    engine = make_engine(overlap=overlap)
    prompt = [1, 2, 3]
    stop = expect(engine, prompt, max_tokens=4)[-1]
    seq_id = add(engine, prompt, max_tokens=20, stop_token_ids=[stop])
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert finished[seq_id].completion_token_ids[-1] == stop and finished[seq_id].finish_reason == "stop"
    assert len(finished[seq_id].completion_token_ids) == 4 and len(rows_of(engine, seq_id)) == num_steps


@both_depths
def test_each_of_several_eos_ids_ends_a_completion(overlap):
    """Only the first id of generation_config's list was once used."""
    plain = make_engine()
    prompts = [[index, 1, 2] for index in range(3)]
    eos = frozenset(expect(plain, prompt, max_tokens=5)[-1] for prompt in prompts[:2])
    engine = make_engine(eos_token_ids=eos, overlap=overlap)
    for prompt in prompts:
        add(engine, prompt, max_tokens=9)
        add(engine, prompt, max_tokens=9, ignore_eos=True)
        add(engine, prompt, max_tokens=9, ignore_eos=True, stop_token_ids=sorted(eos))
    finished = run_to_end(engine)
    check_right(engine, finished)
    lengths = [len(finished[seq_id].completion_token_ids) for seq_id in range(9)]
    assert lengths == [5, 9, 5, 5, 9, 5, 9, 9, 9]


@both_depths
def test_the_tokenizers_eos_ends_a_completion_as_well(overlap):
    stop = expect(make_engine(), [1, 2], max_tokens=3)[-1]
    plain = make_engine(overlap=overlap)
    engine = LLMEngine(plain.config, plain.runner)
    engine.set_eos_token_ids([stop])
    add(engine, [1, 2], max_tokens=9)
    (seq,) = run_to_end(engine).values()
    assert len(seq.completion_token_ids) == 3 and seq.finish_reason == "stop"


@both_depths
def test_no_stop_token_stops_a_completion_before_min_tokens(overlap):
    engine = make_engine(vocab_size=2, overlap=overlap)
    add(engine, [1], max_tokens=20, min_tokens=9, stop_token_ids=[0, 1])
    (finished,) = run_to_end(engine).values()
    assert len(finished.completion_token_ids) == 10


@both_depths
def test_the_stop_predicate_sees_every_token_of_its_request_once_and_in_order(overlap):
    engine = make_engine(num_blocks=3, max_model_len=12, overlap=overlap)  # preempts
    seen: dict[int, list[int]] = {0: [], 1: []}
    for index in range(2):
        engine.add_request([index] * 4, SamplingParams(max_tokens=8), seen[index].append)
    finished = run_to_end(engine)
    assert engine.metrics()["num_preemptions"] == 1
    assert all(seen[seq_id] == finished[seq_id].completion_token_ids for seq_id in (0, 1))


@both_depths
def test_the_stop_predicate_heeds_min_tokens_itself_and_is_asked_of_no_token_after_the_end(overlap):
    """A form may be complete before min_tokens; the extra token of the last step is not part of the text."""
    engine = make_engine(overlap=overlap)
    prompt, seen = [1, 2, 3], []

    def asked(token_id: int) -> bool:
        seen.append(token_id)
        return len(seen) == 3

    engine.add_request(prompt, SamplingParams(max_tokens=20, min_tokens=9), asked)
    (finished,) = run_to_end(engine).values()
    assert seen == finished.completion_token_ids == expect(engine, prompt, max_tokens=3)


@both_depths
def test_the_stop_predicate_is_not_asked_of_what_is_no_token(overlap):
    """The −1 of broken logits once went to the tokenizer."""
    engine, seen = make_engine(overlap=overlap), []
    engine.runner.is_broken = lambda seq: seq.num_computed_tokens >= 6
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9), seen.append)
    (finished,) = run_to_end(engine).values()
    assert finished.finish_reason == "error" and len(seen) == 3 and seen == finished.completion_token_ids


def test_commit_ends_what_the_engine_stops_and_knows_no_predicate():
    """Each rank's Scheduler commits the same as the driver's, but knows only the ids of the stopped requests."""
    engine = make_engine(overlap=False)
    scheduler = engine.scheduler
    for seq_id in range(2):
        params = SamplingParams(max_tokens=9)
        engine.add_request([seq_id], params, lambda token_id: pytest.fail("the scheduler asked"))
    step = scheduler.schedule()
    finished, _ = scheduler.commit(step, [5, 6], stopped=frozenset((1,)))
    assert [(seq.seq_id, seq.finish_reason, seq.completion_token_ids) for seq in finished] == [(1, "stop", [6])]
    step = scheduler.schedule()
    assert [seq.seq_id for seq, _, _ in step.chunks] == [0]


# Failures


@both_depths
def test_broken_logits_end_their_row_with_an_error_and_not_the_batch(overlap):
    engine = make_engine(overlap=overlap)
    for index in range(4):
        add(engine, [index] * 6, max_tokens=6)
    engine.runner.is_broken = lambda seq: seq.seq_id == 2 and seq.num_computed_tokens >= 9
    finished = run_to_end(engine)
    broken = finished.pop(2)
    check_right(engine, finished)
    assert broken.finish_reason == "error" and "not finite" in broken.error
    assert broken.completion_token_ids == expect(engine, [2] * 6, max_tokens=3)
    engine.runner.is_broken = lambda seq: False
    again = add(engine, [2] * 6, max_tokens=6)
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert finished[again].num_cached_tokens == 0, "what a broken row wrote was served"


def test_a_row_whose_logits_prove_broken_after_its_preemption_is_forgotten_as_well():
    """Its blocks once went back to the pool before the host saw the NaN, and stayed in the cache."""
    engine = make_engine(num_blocks=3, max_model_len=12, overlap=True)
    add(engine, range(4), max_tokens=3)
    add(engine, range(50, 54), max_tokens=3)
    engine.runner.is_broken = lambda seq: seq.seq_id == 1
    finished = run_to_end(engine)
    assert finished[1].num_preemptions == 1 and finished[1].finish_reason == "error"
    engine.runner.is_broken = lambda seq: False
    again = add(engine, range(50, 55), max_tokens=1)
    assert run_to_end(engine)[again].num_cached_tokens == 0


@both_depths
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_broken_row_that_shares_keys_begins_again_without_them(overlap, num_steps):
    """Another row that was broken may have written them. It once ended with the other's error."""
    engine = make_engine(overlap=overlap)
    prompt = list(range(9))
    add(engine, prompt, max_tokens=12)
    engine.step()
    second = add(engine, prompt, max_tokens=6)
    broken = []

    def is_broken(seq) -> bool:
        broken.append(seq.num_shared_tokens > 0 and seq.num_computed_tokens >= 9 + num_steps)
        return broken[-1]

    engine.runner.is_broken = is_broken
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert any(broken) and finished[second].num_cached_tokens == 8 and finished[second].num_preemptions == 1
    assert not finished[second].may_share and finished[second].error is None


@both_depths
def test_a_row_that_is_broken_by_itself_too_ends_with_an_error(overlap):
    """It begins again only once. It can be aborted like any other when it has begun again."""
    engine = make_engine(overlap=overlap)
    ids = [add(engine, range(9), max_tokens=12)]
    engine.step()
    ids += [add(engine, range(9), max_tokens=12) for _ in range(2)]
    engine.runner.is_broken = lambda seq: seq.seq_id != ids[0]
    while not (again := [seq for seq in engine._unfinished.values() if not seq.may_share]):
        engine.step()
    assert engine.abort(again[0].seq_id) is again[0]
    finished = run_to_end(engine)
    (error,) = (seq for seq in finished.values() if seq.finish_reason == "error")
    assert error.num_preemptions == 1 and "not finite" in error.error and finished[ids[0]].error is None


@both_depths
def test_a_broken_prompt_is_computed_once_for_all_completions(overlap):
    """Each completion once computed the whole prompt again, because it had the keys of the first one."""
    engine = make_engine(overlap=overlap)
    engine.runner.is_broken = lambda seq: True
    add(engine, range(9), n=8, max_tokens=6)
    finished = run_to_end(engine)
    assert [seq.finish_reason for seq in finished.values()] == ["error"] * 8
    assert all("not finite" in seq.error for seq in finished.values())
    assert engine.step_stats.num_prefill_tokens == 9 and engine.metrics()["num_preemptions"] == 0


@both_depths
def test_completions_of_a_prompt_that_shares_keys_begin_again_without_them(overlap):
    """The keys may be broken that the first completion shares with another request."""
    engine = make_engine(overlap=overlap)
    add(engine, range(9), max_tokens=12)
    engine.step()
    first = add(engine, range(9), n=3, max_tokens=6)
    engine.runner.is_broken = lambda seq: seq.num_shared_tokens > 0
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert [finished[first + index].num_preemptions for index in range(3)] == [1, 1, 1]


def test_rows_that_begin_again_in_one_commit_are_admitted_oldest_first():
    """The queue once had the newest first. The second row's scores are broken, the others' tokens are."""
    engine = make_engine(overlap=False)
    add(engine, range(9), max_tokens=30)
    engine.step()
    for index in range(4):
        scores = {"prompt_logprobs": 0} if index == 1 else {}
        engine.add_request([*range(8), index, index], SamplingParams(max_tokens=6, **scores), first_scored=9)
    step = engine.scheduler.schedule()
    assert [chunk.seq.seq_id for chunk in step.chunks] == [0, 1, 2, 3, 4]
    _, again = engine.scheduler.commit(step, [7, -1, 7, -1, -1], broken={2})
    assert sorted(seq.seq_id for seq in again) == [1, 2, 3, 4]
    assert [seq.seq_id for seq in engine.scheduler.waiting] == [1, 2, 3, 4]


def failing_launch(engine: LLMEngine, error: BaseException) -> None:
    engine.runner.launch_error = error


def failing_wait(engine: LLMEngine, error: BaseException) -> None:
    engine.runner.wait_error = error


def failing_predicate(engine: LLMEngine, error: BaseException) -> None:
    def stop_predicate(token_id: int) -> bool:
        raise error

    engine.add_request([9, 9], SamplingParams(), stop_predicate)


@both_depths
@pytest.mark.parametrize("fail", [failing_launch, failing_wait, failing_predicate])
@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("num_steps_before", [0, 1, 2, 5])
def test_after_a_step_that_failed_the_engine_is_empty_and_the_next_requests_are_right(
    num_steps_before, error, fail, overlap
):
    """Half-computed blocks were once served from the cache, and the next call returned rows of the failed one."""
    engine = make_engine(overlap=overlap, max_num_batched_tokens=16)
    prompts = [[*range(8), index] for index in range(4)]
    for prompt in prompts:
        add(engine, prompt, max_tokens=8)
    for _ in range(num_steps_before):
        assert engine.step() == []
    fail(engine, error)
    with pytest.raises(type(error)):
        while not engine.is_finished():
            engine.step()
    assert engine.is_finished() and not engine.runner.in_flight
    assert not engine.scheduler.running and not engine.scheduler.waiting
    again = [add(engine, prompt, max_tokens=8) for prompt in prompts]
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert list(finished) == again


@both_depths
@pytest.mark.parametrize("num_steps_before", range(6))
def test_an_abort_ends_waiting_running_and_in_flight_requests_at_once(num_steps_before, overlap):
    engine = make_engine(max_num_seqs=2, overlap=overlap)
    for index in range(4):
        add(engine, [index] * 5, max_tokens=20)
    for _ in range(num_steps_before):
        engine.step()
    for seq_id in (0, 3):
        seq = engine.abort(seq_id)
        engine.scheduler.check_integrity()
        assert seq.finish_reason == "abort" and seq.status is SequenceStatus.FINISHED and seq.entry == -1
        assert seq.completion_token_ids == expect(engine, [seq_id] * 5, max_tokens=20)[: len(seq.token_ids) - 5]
        assert engine.abort(seq_id) is None
        num_tokens = len(seq.token_ids)
        engine.step()
        assert len(seq.token_ids) == num_tokens
    finished = run_to_end(engine)
    check_right(engine, finished)
    assert set(finished) == {1, 2} and engine.abort(99) is None
    assert engine.metrics()["finish_reasons"] == {"abort": 2, "length": 2}


@both_depths
def test_an_abort_of_everything_leaves_an_engine_that_drains(overlap):
    engine = make_engine(num_blocks=3, max_model_len=12, overlap=overlap)
    for start in (0, 50):
        add(engine, range(start, start + 4), max_tokens=8)
    while not engine.metrics()["num_preemptions"]:
        engine.step()
    for seq_id in (0, 1):
        engine.abort(seq_id)
    assert run_to_end(engine) == {}


def test_running_sequences_have_entries_of_their_own():
    engine = make_engine(max_num_seqs=3, num_blocks=4, max_model_len=16, overlap=True)
    for index in range(9):
        add(engine, [index] * 4, max_tokens=1 + index)
    while not engine.is_finished():
        engine.step()
        entries = [seq.entry for seq in engine.scheduler.running]
        assert len(set(entries)) == len(entries) and set(entries) <= {0, 1, 2}
    assert engine.metrics()["num_preemptions"] > 0


# The engine's own face


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "the prompt is empty"),
        ([1, 1000], {}, "token id 1000 is outside the vocabulary"),
        ([-1], {}, "token id -1 is outside"),
        ([1], {"stop_token_ids": [1000]}, "stop token id 1000 is outside"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_and_changes_nothing_for_the_others(prompt, params, message):
    seeds = []
    for bad in (False, True):
        engine = make_engine()
        add(engine, [5])
        if bad:
            with pytest.raises(ValueError, match=message):
                add(engine, prompt, **params)
        else:
            add(engine, [5])
        last = add(engine, [5], max_tokens=5)
        finished = run_to_end(engine)
        check_right(engine, finished)
        seeds.append(finished[last].seed)
    assert seeds[0] == seeds[1], "the number of a bad request is used up"


def test_requests_without_a_seed_have_seeds_of_their_own_that_depend_on_the_engines():
    def seeds(seed: int) -> list[int]:
        engine = make_engine(seed=seed)
        for _ in range(100):
            add(engine, [5], max_tokens=1)
        given = add(engine, [5], max_tokens=1, seed=77)
        finished = run_to_end(engine)
        assert finished.pop(given).seed == 77
        return [seq.seed for _, seq in sorted(finished.items())]

    assert seeds(0) == seeds(0) and len({*seeds(0), *seeds(1)}) == 200


@both_depths
def test_the_same_requests_give_the_same_steps(overlap):
    logs = []
    for _ in range(2):
        engine = make_engine(
            num_blocks=24, max_model_len=40, max_num_seqs=12, max_num_batched_tokens=32, overlap=overlap
        )
        for index in range(60):
            add(engine, [index % 7] * (1 + index % 13), max_tokens=1 + index % 23)
        run_to_end(engine)
        logs.append(engine.runner.log)
    assert engine.metrics()["num_preemptions"] > 0
    assert logs[0] == logs[1]


def test_two_engines_in_one_process_do_not_notice_each_other():
    engines = [make_engine(block_size=block_size, vocab_size=100 + block_size) for block_size in (2, 5)]
    for engine in engines:
        for index in range(8):
            add(engine, [index] * 7, max_tokens=9)
    finished = [{}, {}]
    while not all(engine.is_finished() for engine in engines):
        for engine, done in zip(engines, finished, strict=True):
            done.update((seq.seq_id, seq) for seq in engine.step())
    for engine, done in zip(engines, finished, strict=True):
        check_right(engine, done)
        assert len(done) == 8


@both_depths
def test_tokens_and_steps_are_counted_as_what_they_are(overlap):
    """A prompt of one token once counted as a decode, and so did tokens computed again after a preemption."""
    engine = make_engine(num_blocks=12, block_size=2, max_num_seqs=8, overlap=overlap)
    chunks = []  # of each step, the positions of each row's new tokens, from 0 at the first after the prompt
    launch = engine.runner.launch

    def noted(step):
        ends = [(num_new, seq.num_computed_tokens - seq.num_prompt_tokens) for seq, num_new, _ in step.chunks]
        chunks.append([range(end - num_new, end) for num_new, end in ends])
        return launch(step)

    engine.runner.launch = noted
    at_start = engine.metrics()
    for lengths in ((1,), (1, 1, 3, 5, 2, 4)):
        for length in lengths:
            add(engine, range(length), max_tokens=8)
        run_to_end(engine)
    metrics = engine.metrics()
    decodes = [chunk for step in chunks for chunk in step if len(chunk) == 1 and chunk[0] >= 0]
    steps_of_singles = [step for step in chunks if all(len(chunk) == 1 for chunk in step)]
    assert any(chunk[-1] >= 0 and len(chunk) > 1 for step in chunks for chunk in step), "nobody came back"
    assert metrics["num_decode_tokens"] == len(decodes)
    assert metrics["num_prefill_tokens"] == sum(len(chunk) for step in chunks for chunk in step) - len(decodes)
    assert metrics["num_decode_steps"] == len(steps_of_singles)
    assert metrics["num_prefill_steps"] == len(chunks) - len(steps_of_singles)
    has_decodes = [any(len(chunk) == 1 and chunk[0] >= 0 for chunk in step) for step in chunks]
    assert metrics["num_steps_with_decodes"] == sum(has_decodes)
    assert metrics["mean_decode_batch_size"] == len(decodes) / sum(has_decodes)
    assert at_start["finish_reasons"] == {} and at_start["num_steps"] == 0, "what was read changes later"


def test_the_metrics_add_up():
    engine = make_engine(num_blocks=100, overlap=False)
    add(engine, range(9), max_tokens=4)
    add(engine, range(9), max_tokens=4)
    run_to_end(engine)
    metrics = engine.metrics()
    expected = {
        "num_requests": 2, "num_unfinished_requests": 0, "finish_reasons": {"length": 2}, "num_prompt_tokens": 18,
        "num_cached_prompt_tokens": 8, "prefix_cache_hit_rate": 8 / 18, "num_output_tokens": 8,
        "num_prefill_tokens": 10, "num_decode_tokens": 6, "num_preemptions": 0, "num_prefill_steps": 1,
        "num_decode_steps": 3, "mean_decode_batch_size": 2.0, "max_batch_size": 2, "num_steps": 4,
        "num_kvcache_blocks": 100, "num_free_kvcache_blocks": 100, "kvcache_block_size": 4,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected


def test_a_closed_engine_says_so():
    engine = make_engine()
    add(engine, [1, 2])
    engine.step()
    engine.exit()
    engine.exit()
    assert engine.runner.is_closed and not engine.runner.in_flight
    for call in (engine.step, lambda: add(engine, [1]), lambda: engine.abort(0)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


# Host cost


def test_a_decode_step_costs_the_host_at_most_two_microseconds_per_sequence():
    """The bound has room for a noisy machine; the figure itself is printed (and by host_cost.py)."""
    cost = microseconds_per_sequence(num_seqs=512, block_size=256)
    print(f"\nhost cost: {cost:.2f} µs per running sequence and step")
    assert cost <= 4


def test_siblings_do_not_fork_from_a_leader_that_came_back():
    """The leader then samples its second token, but the siblings' first tokens must come from the prompt's logits."""
    engine = make_engine(block_size=4, max_num_seqs=2, overlap=False)
    other = add(engine, [1], max_tokens=40)
    engine.step()
    first = add(engine, range(9), max_tokens=5, n=3)
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    leader = scheduler.running[1]
    assert leader.seq_id == first and len(leader.completion_token_ids) == 2
    engine.abort(other)
    scheduler._preempt(scheduler.running.pop())
    finished = run_to_end(engine)
    assert {seq_id: len(seq.completion_token_ids) for seq_id, seq in finished.items()} == {
        first: 5, first + 1: 5, first + 2: 5,
    }  # fmt: skip


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_that_only_score_are_not_cut_to_the_size_that_decodes_want(overlap):
    """A prompt whose last chunk is in flight has one token left, like a decode, but will never compute it."""
    engine = make_engine(
        num_blocks=200, max_num_batched_tokens=64, max_tokens_beside_decodes=8, max_num_seqs=32, overlap=overlap
    )
    for first in range(20):
        engine.add_request([first, *range(15)], SamplingParams(max_tokens=0, prompt_logprobs=0))
    run_to_end(engine)
    sizes = [sum(num_new_tokens for _, num_new_tokens, _ in step) for step in engine.runner.log]
    assert sum(sizes) == 20 * 15 and all(size == 64 for size in sizes[:-1])


def test_a_long_prompt_is_admitted_with_room_for_the_window_of_its_later_chunks():
    """It was admitted with room for its first chunk alone, and preempted itself at the second one, again and again."""
    windows = WindowGroups(5, 64, max_num_new_tokens=64)
    for num_blocks in (83, 100, 110, 150):
        engine = make_engine(
            num_blocks=num_blocks, block_size=16, max_model_len=600, max_num_batched_tokens=64, max_num_seqs=8,
            enable_prefix_caching=False, windows=windows,
        )  # fmt: skip
        engine.add_request([1] * 8, SamplingParams(max_tokens=400, ignore_eos=True))
        engine.add_request([2] * 512, SamplingParams(max_tokens=8, ignore_eos=True))
        run_to_end(engine)
        assert engine.metrics()["num_preemptions"] == 0
        assert engine.runner.num_computed_tokens == 8 + 399 + 512 + 7


def test_blocks_behind_the_window_of_generated_tokens_are_reused_first():
    """They pushed a system prompt that all requests share out of the cache."""
    windows = WindowGroups(5, 16, max_num_new_tokens=64)
    engine = make_engine(num_blocks=400, block_size=4, max_model_len=400, max_num_seqs=2, windows=windows)
    for number in range(12):
        engine.add_request([*range(100), 500 + number], SamplingParams(max_tokens=150, ignore_eos=True))
    run_to_end(engine)
    assert engine.metrics()["num_cached_prompt_tokens"] == 11 * 100


def test_users_see_blocks_per_group_of_layers():
    """The option counts them so. The message once named the blocks of all groups."""
    engine = make_engine(num_blocks=60, block_size=4, max_model_len=400, windows=WindowGroups(5, 8, 1, 4))
    assert engine.metrics()["num_kvcache_blocks"] == engine.metrics()["num_free_kvcache_blocks"] == 10
    with pytest.raises(ValueError, match=r"may need 13 KV cache blocks of 4 tokens, but there are 10.*max_num_batched"):
        engine.add_request([1] * 200, SamplingParams(max_tokens=8))
