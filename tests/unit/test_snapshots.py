"""Models with recurrent states: where snapshots are taken, which requests begin from them, and what forks copy."""

import pytest
from support.fake_runner import expected_completion, expected_scores, make_engine, run_to_end

from nanovllm.engine.block_manager import BlockManager, Snapshots
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import NO_STOP, Sequence, completions_of
from nanovllm.engine.step import Chunk, Step
from nanovllm.parallel.worker import fingerprint
from nanovllm.sampling_params import SamplingParams

both_depths = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


def engine_of(num_snapshots: int = 4, min_saved_tokens: int = 0, **options) -> LLMEngine:
    return make_engine(block_size=4, snapshots=Snapshots(True, num_snapshots, min_saved_tokens), **options)


def add(engine: LLMEngine, prompt, **params) -> int:
    return engine.add_request(list(prompt), SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params}))


def finish(engine: LLMEngine) -> None:
    """Runs to the end and asserts that every answer is that of the request alone."""
    for seq in run_to_end(engine).values():
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        expected = expected_completion(list(prompt), seq.sampling_params, engine.info)
        assert (seq.completion_token_ids, seq.finish_reason) == expected, seq


def num_computed(engine: LLMEngine, *prompts) -> int:
    """How many prompt tokens the engine computes for these requests."""
    before = engine.step_stats.num_prefill_tokens
    for prompt in prompts:
        add(engine, prompt)
    finish(engine)
    return engine.step_stats.num_prefill_tokens - before


def chunks_of(engine: LLMEngine, seq_id: int) -> list[int]:
    """The number of new tokens of each chunk of the request's prompt."""
    rows = [row for step in engine.runner.log for row in step if row[0] == seq_id]
    return [num_new_tokens for _, num_new_tokens, _ in rows[: 1 + [samples for *_, samples in rows].index(True)]]


# After the last block that waiting requests share


@both_depths
def test_what_waiting_requests_share_is_computed_once(overlap):
    engine = engine_of(overlap=overlap, max_num_seqs=16)
    assert num_computed(engine, *([*range(14), 100 + row, 200] for row in range(10))) == 16 + 9 * 4
    assert chunks_of(engine, 0) == [12, 4] and chunks_of(engine, 1) == [4]
    assert engine.runner.num_snapshots == 1 and engine.runner.num_loads == 9
    assert engine.metrics()["num_cached_prompt_tokens"] == 9 * 12


def test_requests_that_begin_from_a_snapshot_wait_for_the_step_after_it():
    """Loads come before a step's layers, snapshots after them. Admission then goes on although few places are free."""
    engine = engine_of(max_num_seqs=32, num_blocks=256, overlap=False)
    for row in range(24):
        add(engine, [900 + row], max_tokens=40)
    engine.step()
    for row in range(10):
        add(engine, [*range(9), row], max_tokens=2)
    finish(engine)
    prompts = [[seq_id for seq_id, num_new_tokens, _ in step if num_new_tokens > 1] for step in engine.runner.log]
    assert prompts[:3] == [[], [24], list(range(24, 32))]


def test_a_request_that_shares_nothing_with_the_others_does_not_wait_behind_them_for_ever():
    engine = engine_of(max_num_seqs=8)
    prompts = [[*range(group * 100, group * 100 + 9), row] for group in range(3) for row in range(3)]
    assert num_computed(engine, *prompts) == 3 * (10 + 2 * 2)


@pytest.mark.parametrize("least, num_snapshots", [(0, 1), (8, 1), (16, 1), (17, 0)])
def test_a_snapshot_is_taken_only_if_it_saves_enough_for_all_that_wait(least, num_snapshots):
    engine = engine_of(min_saved_tokens=least)
    num_saved = 16 if num_snapshots else 0
    assert num_computed(engine, *([*range(9), row] for row in range(3))) == 30 - num_saved
    assert engine.runner.num_snapshots == num_snapshots


def test_savings_are_those_of_the_next_requests_that_share_the_block():
    """The fourth prompt begins otherwise in its second block, so it counts as one that computes everything."""
    prompts = [[*range(8), row] for row in range(3)] + [[*range(4), 99, 99, 99, 99, row] for row in range(4)]
    engine = engine_of(min_saved_tokens=17)
    num_computed(engine, *prompts)
    assert chunks_of(engine, 0) == [9]
    engine = engine_of(min_saved_tokens=16)
    num_computed(engine, *prompts)
    assert chunks_of(engine, 0) == [8, 1]


def test_prompts_that_share_more_than_others_go_on_from_snapshot_to_snapshot():
    """Questions about documents behind one system prompt are such prompts."""
    system = list(range(8))
    prompts = [[*system, *[100 + document] * 4, question] for document in range(4) for question in range(3)]
    engine = engine_of(num_snapshots=8)
    # The first document's first prompt has all to compute, and so has the second's, which finds a snapshot only behind
    # the first document. It takes one behind the system prompt.
    assert num_computed(engine, *prompts) == 13 + 13 + 2 * 5 + 8 * 1
    assert [chunks_of(engine, seq_id) for seq_id in (0, 3, 6)] == [[12, 1], [8, 4, 1], [4, 1]]


def test_a_prompt_that_ends_where_the_shared_blocks_end_has_its_snapshot_there():
    engine = engine_of()
    assert num_computed(engine, range(8), [*range(8), 50]) == 8 + 1
    engine = engine_of()
    assert num_computed(engine, range(8), range(8)) == 8 + 4, "the last token is computed"


def test_the_blocks_of_a_completion_are_found_although_its_prompt_was_compared_with_a_longer_one():
    engine = engine_of()
    first = add(engine, range(8), max_tokens=9)
    add(engine, [*range(8), 50, 51, 52, 53, 54])
    finished = run_to_end(engine)
    tokens = [*range(8), *finished[first].completion_token_ids[:8]]
    seq = Sequence(9, [*tokens, 1], None, max_length=1000)
    assert len(engine.scheduler.block_manager.registered_prefix(seq)) == 4


# After the last block that an earlier request computed


@both_depths
def test_the_second_request_that_begins_alike_pays_and_the_third_profits(overlap):
    engine = engine_of(overlap=overlap)
    assert [num_computed(engine, [*range(14), 100 + row]) for row in range(4)] == [15, 15, 3, 3]
    assert chunks_of(engine, 1) == [12, 3]


def test_the_second_request_takes_no_snapshot_that_saves_too_little():
    engine = engine_of(min_saved_tokens=13)
    assert [num_computed(engine, [*range(14), 100 + row]) for row in range(3)] == [15, 15, 15]


def test_a_second_call_finds_the_snapshots_of_the_first():
    engine = engine_of()
    prompts = [[*range(14), 100 + row] for row in range(3)]
    assert num_computed(engine, *prompts) == 15 + 2 * 3
    assert num_computed(engine, *prompts) == 3 * 3
    engine.reset_prefix_cache()
    assert num_computed(engine, *prompts) == 15 + 2 * 3


# Preemption


def test_a_preempted_sequence_plans_its_snapshot_again():
    """The prefix cache holds the blocks that it computed, but no other request began with them."""
    engine = engine_of(overlap=False, max_num_batched_tokens=6)
    first = add(engine, range(20))
    other = add(engine, [*range(18), 99])
    engine.step()
    scheduler = engine.scheduler
    (seq,) = scheduler.running
    assert seq.seq_id == first and seq.next_stop == 16
    scheduler._preempt(scheduler.running.pop())
    engine.abort(other)
    finish(engine)
    assert chunks_of(engine, first) == [6, 6, 6, 6, 2] and engine.runner.num_snapshots == 0


def test_a_preempted_sequence_comes_back_from_its_snapshot():
    engine = engine_of(overlap=False)
    add(engine, range(20))
    add(engine, [*range(18), 99])
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    scheduler._preempt(scheduler.running.pop())
    scheduler._preempt(scheduler.running.pop())
    before = engine.runner.num_computed_tokens
    finish(engine)
    assert engine.runner.num_computed_tokens - before <= 2 * (20 + 4 - 16) and engine.runner.num_snapshots == 1


# Forks


@both_depths
@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_prompt_copy_its_state_and_need_no_snapshot(caching, overlap):
    engine = engine_of(overlap=overlap, max_num_seqs=16, enable_prefix_caching=caching)
    add(engine, range(10), n=9)
    finish(engine)
    assert engine.step_stats.num_prefill_tokens == 10 and engine.runner.num_forks == 8
    assert engine.runner.num_snapshots == engine.runner.num_loads == 0


@both_depths
def test_completions_that_find_no_place_begin_from_a_snapshot(overlap):
    engine = engine_of(overlap=overlap, max_num_seqs=2)
    add(engine, range(10), n=4)
    finish(engine)
    assert chunks_of(engine, 0) == [8, 2]
    # They are forked from each other, or computed, from the snapshot on.
    assert engine.step_stats.num_prefill_tokens + 10 * engine.runner.num_forks >= 4 * 10 - 3 * 8
    assert engine.step_stats.num_prefill_tokens <= 10 + 3 * 2 and engine.runner.num_snapshots == 1


def test_forked_completions_do_not_count_as_waiting():
    """Only a request that is not its sibling counts."""
    engine = engine_of(min_saved_tokens=4, max_num_seqs=16)
    add(engine, range(10), n=3)
    add(engine, [*range(5), 99])
    finish(engine)
    assert chunks_of(engine, 0) == [4, 6] and chunks_of(engine, 3) == [2]


# Without prefixes to share


@pytest.mark.parametrize("options", [{"num_snapshots": 0}, {"enable_prefix_caching": False}])
def test_without_snapshots_or_without_prefix_caching_every_prompt_is_computed(options):
    engine = engine_of(**options)
    prompts = [[*range(9), row] for row in range(5)]
    assert num_computed(engine, *prompts) == num_computed(engine, *prompts) == 50
    assert engine.runner.num_snapshots == engine.runner.num_loads == 0


def test_completions_that_find_no_place_compute_the_prompt_if_nothing_is_cached():
    """They once shared the full blocks of a running one, whose state had moved past them."""
    engine = engine_of(enable_prefix_caching=False, max_num_seqs=2)
    add(engine, range(10), n=4)
    finish(engine)
    assert engine.runner.num_loads == 0


def test_a_completion_that_was_preempted_in_its_prompt_is_forked_without_a_stop():
    """It once kept the place of its next snapshot, which lay behind it then, and waited for ever."""
    leader, sibling = completions_of(Sequence(0, list(range(12)), SamplingParams(n=2), max_length=20))
    scheduler = Scheduler(BlockManager(16, 4, snapshots=Snapshots(True, 4)), 100, 4)
    for seq in (leader, sibling):
        scheduler.add(seq)
    scheduler.waiting.remove(sibling)
    scheduler._run(sibling)
    scheduler.block_manager.allocate(sibling)
    sibling.next_stop = 4
    scheduler.running.remove(sibling)
    scheduler._preempt(sibling)
    assert sibling.next_stop == NO_STOP


def test_completions_wait_for_a_prompt_that_is_cut_for_a_snapshot():
    """If no snapshot could be taken, the next completion once computed the prompt itself."""
    engine = engine_of(num_blocks=240, max_model_len=600, max_num_seqs=16, max_num_batched_tokens=44, overlap=False)
    beginnings = [[100 * row + place for place in range(4)] for row in range(1, 5)]
    document = list(range(600, 620))
    for prompt in (*beginnings, document):  # their blocks are registered
        add(engine, [*prompt, 999])
        finish(engine)
    for prompt in beginnings:  # their snapshots fill the pool in one step
        add(engine, [*prompt, 998], max_tokens=60)
    add(engine, [*document, *[7] * 400], max_tokens=8, n=2)
    finish(engine)
    assert engine.runner.num_forks == 1


# Scores


def test_continuations_of_a_context_are_forked_with_its_state():
    """They once computed the context again and again if it was short."""
    engine = engine_of()
    context = list(range(11))
    rows = [[*context, 50 + row] for row in range(4)]
    for prompt in rows:
        engine.add_request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0), None, len(context))
    finished = run_to_end(engine)
    for seq_id, prompt in enumerate(rows):
        assert finished[seq_id].prompt_logprobs == expected_scores(prompt, len(context), engine.info)
    assert engine.runner.num_computed_tokens == 10 + 4 * 1 and engine.runner.num_snapshots == 0


def test_a_snapshot_is_taken_where_scores_let_the_next_prompt_begin():
    """The last token of the first prompt is never computed, and the second prompt begins before its first score."""
    for first, second, first_scored in [(range(8), [*range(8), 50, 51], 9), (range(12), range(12), 8)]:
        engine = engine_of()
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        engine.add_request(list(first), params, None, 7)
        engine.add_request(list(second), params, None, first_scored)
        finished = run_to_end(engine)
        assert finished[1].prompt_logprobs == expected_scores(list(second), first_scored, engine.info)
        assert engine.runner.num_computed_tokens == len(first) - 1 + len(second) - 1 - 4
        assert engine.runner.num_snapshots == engine.runner.num_loads == 1


# The pool


def compute(manager: BlockManager, tokens, copies=None, takes: bool = True) -> Sequence:
    """Computes a prompt in a step with these copies of states, or in its own step, and takes a snapshot at its end."""
    seq = Sequence(0, list(tokens), None, max_length=1000)
    seq.entry = 7
    manager.allocate(seq)
    manager.append(seq, seq.num_tokens - seq.num_computed_tokens)
    if takes:
        copies = [] if copies is None else copies
        copies += manager.take_snapshot(seq, copies)
    return seq


def num_shared(manager: BlockManager, tokens) -> int:
    return manager.num_cached_tokens(Sequence(1, [*tokens, 9], None, max_length=1000))


ONES, TWOS, THREES = [1] * 4, [2] * 4, [3] * 4


def test_the_least_recently_used_snapshot_is_reused():
    manager = BlockManager(16, 4, snapshots=Snapshots(True, 2))
    for tokens in (ONES, TWOS):
        compute(manager, tokens)
    compute(manager, [*ONES, 5], takes=False)  # uses the first one
    compute(manager, THREES)
    assert [num_shared(manager, tokens) for tokens in (ONES, TWOS, THREES)] == [4, 0, 4]


def test_a_snapshot_goes_with_its_block_and_is_the_next_to_be_reused():
    manager = BlockManager(3, 4, snapshots=Snapshots(True, 2))
    manager.deallocate(compute(manager, ONES))
    twos = compute(manager, TWOS)
    other = compute(manager, [8] * 5, takes=False)  # takes the block of ONES
    manager.deallocate(other)
    assert num_shared(manager, ONES) == num_shared(manager, [8] * 4) == 0
    manager.deallocate(compute(manager, THREES))
    assert [num_shared(manager, tokens) for tokens in (ONES, TWOS, THREES)] == [0, 4, 4]
    manager.check_integrity([twos])


def test_a_step_fills_a_snapshot_once():
    """The block that owns it may be gone before the step is launched."""
    manager, copies = BlockManager(16, 4, snapshots=Snapshots(True, 1)), []
    compute(manager, ONES, copies)
    seq = compute(manager, TWOS, copies)
    assert copies == [(7, -1)] and num_shared(manager, ONES) == 4 and num_shared(manager, TWOS) == 0
    manager.forget(Sequence(1, ONES, None, max_length=1000))
    assert manager.take_snapshot(seq, copies) == []
    assert manager.take_snapshot(seq, []) == [(7, -1)] and num_shared(manager, TWOS) == 4


def test_ranks_notice_that_they_would_load_or_save_other_snapshots():
    """Python hashes -1 and -2 alike."""
    seq = Sequence(0, [1, 2], None, 9, status=None)
    seq.block_table, seq.entry = [0], 0
    pairs = [(-1, 0), (-2, 0), (0, -1), (0, -2), (0, 1)]
    steps = [Step.of([Chunk(seq, 1, True)], state_loads=[pair]) for pair in pairs]
    steps += [Step.of([Chunk(seq, 1, True)], copies=[(0, 1)]), Step.of([Chunk(seq, 1, True)])]
    assert len(set(map(fingerprint, steps))) == len(steps)
