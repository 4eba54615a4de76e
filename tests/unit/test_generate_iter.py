"""LLM.generate_iter takes any iterable and gives results as they finish or in order; interrupted calls keep results."""

import gc
import itertools
import resource
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from support.fake_runner import make_engine
from support.long import long, some
from support.model_factory import save_demo_model
from tqdm.auto import tqdm

from nanovllm import LLM, NOT_YET, SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.guides import StructuredOutputs
from nanovllm.prompts import EncodedPrompt
from nanovllm.row_stream import RowStream
from nanovllm.text import Text

# Few at a time, so that the window of 32 rows is soon full.
OPTIONS = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 64}
PROMPTS = [f"Row {index}" for index in range(40)]
PARAMS = [SamplingParams(temperature=0, max_tokens=1 + index * 5 % 7, ignore_eos=True) for index in range(40)]
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


class Panic(BaseException):
    """The kind of exception that a tokenizer written in Rust raises."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One layer: what is computed does not matter here, and there are thousands of steps."""
    return save_demo_model(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    gc.collect()
    assert llm.engine.is_finished() and not llm.engine.scheduler.running
    assert llm.generate("Hi", SHORT, use_tqdm=False)[0].error is None


def plain(output):
    """An output without the fields that depend on the cache."""
    return output.prompt_index, output.prompt, output.token_ids, output.finish_reason, output.error


def counted(prompts, seen: list):
    for prompt in prompts:
        seen.append(prompt)
        yield prompt


# Results


@pytest.mark.parametrize("as_iterator", [list, iter, tuple])
def test_in_order_it_gives_what_generate_gives(llm, expected, as_iterator):
    outputs = list(llm.generate_iter(as_iterator(PROMPTS), as_iterator(PARAMS)))
    assert list(map(plain, outputs)) == list(map(plain, expected))


def test_as_they_finish_it_gives_the_same_with_their_numbers(llm, expected):
    outputs = list(llm.generate_iter(PROMPTS, PARAMS, ordered=False))
    numbers = [output.prompt_index for output in outputs]
    assert numbers != sorted(numbers) == list(range(40))
    assert sorted(map(plain, outputs)) == sorted(map(plain, expected))


def test_a_single_prompt_and_none(llm):
    assert [plain(output) for output in llm.generate_iter("Row 0", SHORT)] == [
        plain(output) for output in llm.generate("Row 0", SHORT, use_tqdm=False)
    ]
    assert list(llm.generate_iter([])) == list(llm.generate_iter(iter(()))) == []


def test_an_endless_source_is_read_as_it_is_needed(llm):
    """Reading runs ahead of the oldest row by 16 times the sequences that run."""
    seen = []
    outputs = llm.generate_iter(counted((f"Row {n}" for n in itertools.count()), seen), itertools.cycle(PARAMS))
    assert not seen, "nothing is read before the first result is asked for"
    for number, output in enumerate(itertools.islice(outputs, 100)):
        assert output.prompt_index == number and output.error is None
        assert number < len(seen) <= number + 1 + 32 + 7
    outputs.close()
    assert list(outputs) == []
    outputs.close()


def test_a_row_waits_no_longer_than_the_window_behind_longer_ones(llm):
    """The longest rows go first, and in an endless stream there is always a longer one."""
    params = itertools.chain([SHORT], itertools.repeat(SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    outputs = llm.generate_iter((f"Row {n}" for n in itertools.count()), params, ordered=False)
    numbers = [output.prompt_index for output in itertools.islice(outputs, 40)]
    assert 0 in numbers[:34]


@pytest.mark.parametrize("text", [None, "Row"])
@pytest.mark.parametrize("num_tokens, num_read", [(1, 544), (56, 324), (63, 288), (64, 256), (5000, 256)])
def test_the_first_step_waits_only_for_what_fills_it(text, num_tokens, num_read):
    """It once waited for all rows of the window, and so did the GPU."""
    source = itertools.repeat((EncodedPrompt(text, [1] * num_tokens), SamplingParams(max_tokens=1)))
    rows = RowStream(FakeEngine(), Text(None), source, list, StructuredOutputs(None, 8, []))
    assert len(next(rows.run())) == rows.num_read == num_read


@pytest.mark.parametrize(
    "num_tokens, read",
    [
        (1, [544, 32, 32]),
        (128, [256, 128, 128, 128, 32]),
        (1100, [256, *[32] * 10, 8]),
        long(10**5, [256, *[32] * 10, 8]),
    ],
)
def test_few_rows_are_read_per_step_when_no_place_is_left(num_tokens, read):
    """Running rows wait during a read, and a long row takes longer to read."""
    source = itertools.repeat((EncodedPrompt(None, [1] * num_tokens), SamplingParams(max_tokens=1)))
    rows = RowStream(FakeEngine(maximum=4), Text(None), source, list, StructuredOutputs(None, 8, []))
    numbers = [0, *(rows.num_read for _ in zip(read, rows.run(), strict=False))]
    assert [after - before for before, after in pairwise(numbers)] == read


@pytest.mark.parametrize("as_params", [lambda _: SHORT, lambda num: iter([SHORT] * num)], ids=["for all", "each"])
def test_rows_run_while_the_source_has_no_prompt(llm, expected, as_params):
    """Here each prompt waits for the result of the one before; the one in the middle cannot run."""
    found = []

    def prompts():
        for number, prompt in enumerate(["Row 0", "", "Row 2"]):
            while len(found) < number:
                yield NOT_YET
            yield prompt

    for output in llm.generate_iter(prompts(), as_params(3), ordered=False):
        found.append(output)
    assert [output.prompt_index for output in found] == [0, 1, 2]
    assert [output.error is None for output in found] == [True, False, True]


def test_a_source_without_a_prompt_is_asked_once_per_step_and_what_it_gives_joins_what_runs(model, monkeypatch):
    events = []

    def prompts():
        yield "Row 0"
        for _ in range(4):
            events.append("asked")
            yield NOT_YET
        yield "Row 1"

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, device="cpu", max_num_seqs=8, max_model_len=64) as llm:
        step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda: events.append("step") or step())
        assert len(list(llm.generate_iter(prompts(), params))) == 2
        metrics = llm.metrics()
    assert events[:8] == ["asked", "step"] * 4
    assert metrics["num_steps_with_decodes"] < metrics["num_decode_tokens"] == 22


@pytest.mark.parametrize("text", [None, "Row"])
def test_an_iterator_is_asked_for_a_few_rows_per_step_once_enough_wait(text):
    """Running rows wait while the iterator makes new ones."""
    seen, per_step = [], []
    source = ((EncodedPrompt(text, [1]), SamplingParams(max_tokens=1)) for _ in counted(range(3000), seen))
    rows = RowStream(FakeEngine(maximum=4), Text(None), source, list, StructuredOutputs(None, 8, []))
    for _ in rows.run():
        per_step.append(len(seen))
    read = [after - before for before, after in pairwise(per_step) if after < 3000]
    assert per_step[0] == 544 and set(read) == {32} and len(read) > 50


def test_an_iterator_of_token_ids_is_not_read_to_its_end_before_the_first_step(model):
    seen = []
    with LLM(model, device="cpu", max_num_seqs=64, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=1)
        outputs = llm.generate_iter(counted([[1, 2]] * 900, seen), params, ordered=False)
        next(outputs)
        assert len(seen) < 600
        outputs.close()


def test_rows_that_finish_at_once_leave_no_step_without_rows():
    """Small pieces once left most of the batch empty."""
    source = (([1], SamplingParams(max_tokens=1)) for _ in range(4000))
    rows = RowStream(FakeEngine(), Text(None), source, Text(None).encode, StructuredOutputs(None, 8, []))
    sizes = [len(finished) for finished in rows.run()]
    assert sum(sizes) == 4000 and min(sizes[:-1]) >= 512


def test_rows_are_read_ahead_whatever_the_next_step_may_take():
    """Beside many decodes a step takes few tokens of prompts. The scheduler chooses among waiting rows, so more are
    read.
    """
    engine = FakeEngine(maximum=4)
    engine.tokens_of_step = 16
    rows = RowStream(
        engine,
        Text(None),
        itertools.repeat((EncodedPrompt(None, [1] * 10), SamplingParams(max_tokens=1))),
        list,
        StructuredOutputs(None, 8, []),
    )
    numbers = [0, *(rows.num_read for _ in zip(range(14), rows.run(), strict=False))]
    assert [after - before for before, after in pairwise(numbers)] == [256, *[32] * 13]


@pytest.mark.parametrize("max_tokens, num_steps", [(1, 15), (4, 78)])
def test_enough_rows_are_read_where_the_cache_has_most_of_their_tokens(max_tokens, num_steps):
    """A step of 512 tokens takes 64 of these rows. Without the cache it would take 4. The number of steps is the same
    as if all rows had been read before.
    """
    engine = make_engine(
        num_blocks=4000, block_size=8, max_model_len=256, max_num_seqs=128, max_num_batched_tokens=512,
        max_tokens_beside_decodes=128, overlap=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    source = (([1] * 120 + [2 + i % 30, 2 + i // 30] + [1] * 6, params) for i in range(900))
    rows = RowStream(engine, Text(None), source, Text(None).encode, StructuredOutputs(None, 8, []))
    assert sum(map(len, rows.run())) == 900
    assert engine.metrics()["num_steps"] == num_steps


def test_only_an_iterator_may_have_no_prompt_yet(llm):
    (output,) = llm.generate([NOT_YET], SHORT, use_tqdm=False)
    assert "a prompt must be a string or a list of token ids" in output.error


def test_what_cannot_run_is_raised_before_anything_runs_even_beyond_the_window(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a row ran"))
    with pytest.raises(ValueError, match="prompt 39: the prompt is empty"):
        llm.generate([*PROMPTS[:39], ""], PARAMS, use_tqdm=False, raise_on_error=True)


def test_bad_rows_come_in_their_places_and_are_logged_at_the_end(llm, caplog):
    prompts = ["One", "", None, "Two", [70000], "Three"]
    outputs = list(llm.generate_iter(iter(prompts), SHORT))
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length", "error", "length"]
    (message,) = [record.getMessage() for record in caplog.records if record.name == "nanovllm.llm"]
    assert message.startswith("3 of 6 prompts ended in an error")


def test_an_endless_source_of_bad_rows_gives_error_rows(llm):
    outputs = llm.generate_iter(itertools.repeat(""), SHORT)
    errors = {output.error for output in itertools.islice(outputs, 1000)}
    assert errors == {"the prompt is empty; it needs at least one token"}


# One call at a time


def test_until_it_ends_the_llm_refuses_other_calls(llm):
    outputs = llm.generate_iter(PROMPTS, PARAMS)
    first = next(outputs)
    for call in (lambda: llm.generate("Hi", SHORT, use_tqdm=False), lambda: llm.generate_iter("Hi", SHORT)):
        with pytest.raises(RuntimeError, match="an iterator of generate_iter has not finished: exhaust it, or close"):
            call()
    assert [first, *outputs][-1].prompt_index == 39
    llm.generate("Hi", SHORT, use_tqdm=False)


def test_a_request_keeps_the_parameters_that_it_was_read_with(llm):
    """The source changes one object between its prompts."""
    params = SamplingParams(temperature=0, ignore_eos=True)

    def changing():
        for length in (3, 1, 2):
            params.max_tokens = length
            yield params

    outputs = llm.generate_iter(iter(PROMPTS[:3]), changing())
    assert [len(output.token_ids) for output in outputs] == [3, 1, 2]
    params.max_tokens = 4
    outputs = llm.generate_iter(iter(PROMPTS[:3]), params)
    params.max_tokens = 9
    assert [len(output.token_ids) for output in outputs] == [4, 4, 4]


def test_generate_keeps_the_parameters_of_the_call(llm):
    """Rows are read while others run, and the progress bar is the user's."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def changes(**named):
        params.max_tokens = 9
        return tqdm(disable=True, **named)

    prompts = [f"Row {index}" for index in range(600)]
    outputs = llm.generate(prompts, params, changes)
    assert {len(output.token_ids) for output in outputs} == {1} and params.max_tokens == 9


def test_the_engine_keeps_a_copy_of_the_parameters_and_checks_them(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.engine.add_request([1, 2], params)
    params.allowed_token_ids = [65]
    finished = []
    while not llm.engine.is_finished():
        finished += llm.engine.step()
    assert [seq.completion_token_ids == [65] * 3 for seq in finished] == [False]
    params.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        llm.engine.add_request([1, 2, 3], params)


def test_request_ids_count_on_and_times_are_in_order(llm):
    (before,) = llm.generate("Hi", SHORT, use_tqdm=False)
    began = time.time()
    outputs = llm.generate([*PROMPTS[:3], []], SHORT, use_tqdm=False)
    outputs += llm.generate_iter(PROMPTS[:2], SHORT)
    first = int(before.request_id) + 1
    assert [int(output.request_id) - first for output in outputs] == list(range(6))
    assert [output.prompt_index for output in outputs] == [0, 1, 2, 3, 0, 1]
    bad = outputs.pop(3)
    assert bad.error is not None and bad.metrics is None
    for output in outputs:
        arrival, first_token, finished = output.metrics
        assert began <= arrival <= first_token <= finished <= time.time()
        assert output.lora_request is None and output.finished and output.outputs[0].finished()
    (scored,) = llm.generate("Hi", SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert scored.metrics.first_token_time is None
    nothing = SamplingParams(allowed_token_ids=[5], bad_words=[[5]], max_tokens=2)
    (banned,) = llm.generate("Hi", nothing, use_tqdm=False)
    assert banned.token_ids == [] and banned.metrics.first_token_time is None


def test_dropping_it_aborts_what_runs(llm):
    first = next(llm.generate_iter(PROMPTS, PARAMS))
    assert first.prompt_index == 0 and llm.engine.is_finished()
    outputs = llm.generate_iter(PROMPTS, PARAMS)
    next(outputs)
    assert not llm.engine.is_finished()
    del outputs
    assert llm.engine.is_finished()
    never = llm.generate_iter(PROMPTS, PARAMS)  # not even begun
    del never


def test_between_two_results_the_process_is_the_callers(llm, monkeypatch):
    """The garbage collector and the threads are the caller's, because the loop's body may compute too."""
    during, step = [], llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: during.append(gc.get_threshold()) or step())
    before = gc.get_threshold()
    for _ in itertools.islice(llm.generate_iter(PROMPTS, PARAMS), 5):
        assert gc.get_threshold() == before
    assert during and all(threshold != before for threshold in during)


def test_one_dropped_while_another_thread_has_the_llm_is_cleaned_up_by_the_next_call(llm):
    outputs = llm.generate_iter(PROMPTS, PARAMS)
    next(outputs)
    has_it, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        has_it.set()
        may_go.wait()

    thread = threading.Thread(target=lambda: llm._guard.run(hold))
    thread.start()
    has_it.wait()
    del outputs
    may_go.set()
    thread.join()
    assert not llm.engine.is_finished()
    assert llm.generate("Hi", SHORT, use_tqdm=False)[0].error is None


def test_the_source_may_not_call_the_llm(llm):
    def prompts():
        yield "One"
        yield llm.generate("Two", SHORT, use_tqdm=False)[0].text

    with pytest.raises(RuntimeError, match="in the middle of a call"):
        list(llm.generate_iter(prompts(), SHORT))


def test_an_engine_emptied_by_hand_is_noticed(llm):
    """The rest of the rows would be missing without an error."""
    outputs = llm.generate_iter(PROMPTS, PARAMS)
    next(outputs)
    llm.engine.reset()
    with pytest.raises(RuntimeError, match="somebody else aborted requests of this call, or emptied the engine"):
        list(outputs)
    assert list(outputs) == []


def test_closing_the_llm_ends_it(model):
    with LLM(model, **OPTIONS) as llm:
        outputs = llm.generate_iter(PROMPTS, PARAMS)
        next(outputs)
    with pytest.raises(RuntimeError):
        list(outputs)


# Draining

# The longest go first: 0, 2, 4, …, and then 1, 3, 5, … The first two do not end together.
UNEVEN = [SamplingParams(temperature=0, max_tokens=7 - 4 * (row % 2), ignore_eos=True) for row in range(40)]
UNEVEN[0] = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def llm_for_two(model):
    """An LLM with enough blocks for two running requests: the usual number leaves no reserve for the second."""
    with LLM(model, **OPTIONS, num_kvcache_blocks=32) as llm:
        yield llm


@pytest.fixture
def pair(llm_for_two, expected):
    """An LLM that runs two requests at a time. After the test, it must hold no drained request, and later calls must be
    right.
    """
    yield llm_for_two
    gc.collect()
    assert llm_for_two.engine.is_finished()
    llm_for_two.engine.scheduler.check_integrity()
    later = llm_for_two.generate(PROMPTS[:8], PARAMS[:8], use_tqdm=False)
    assert list(map(plain, later)) == list(map(plain, expected[:8]))


@pytest.fixture
def started(pair, monkeypatch):
    """The prompts whose requests some step has computed, by their numbers in PROMPTS."""
    numbers, launch = set(), pair.engine.runner.launch

    def noting(step):
        numbers.update(PROMPTS.index(pair.get_tokenizer().decode(chunk.seq.token_ids[: chunk.seq.num_prompt_tokens]))
                       for chunk in step.chunks)  # fmt: skip
        return launch(step)

    monkeypatch.setattr(pair.engine.runner, "launch", noting)
    return numbers


@pytest.mark.grid(1)
@pytest.mark.parametrize("num_before", [1, 2, 7])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_drained_iterator_finishes_what_has_started_and_nothing_else(pair, started, caplog, num_before, is_ordered):
    whole = pair.generate(PROMPTS, UNEVEN, use_tqdm=False)
    started.clear()
    seen = []
    outputs = pair.generate_iter(counted(PROMPTS, seen), UNEVEN, ordered=is_ordered)
    before = list(itertools.islice(outputs, num_before))
    num_read, at_drain = len(seen), set(started)
    outputs.drain()
    after = list(outputs)
    numbers = [output.prompt_index for output in [*before, *after]]
    assert set(numbers) == started == at_drain and len(numbers) == len(at_drain) < num_read == len(seen)
    assert all(plain(output) == plain(whole[output.prompt_index]) for output in [*before, *after])
    if is_ordered:
        assert numbers == sorted(numbers)
    assert max(numbers) >= len(numbers), "some are missing in between"
    assert len(after) > 0 and not [record for record in caplog.records if record.name == "nanovllm.llm"]
    with pytest.raises(StopIteration):
        next(outputs)


def test_draining_keeps_all_completions_of_a_request_of_which_one_has_started(pair):
    """With two places, one completion of the second request runs when the first result comes; the third has none."""
    sampled = {"temperature": 1.5, "ignore_eos": True}
    params = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)]
    params += [SamplingParams(**sampled, max_tokens=8 - row, n=5, seed=row) for row in (1, 2)]
    whole = pair.generate(PROMPTS[:3], params, use_tqdm=False)
    outputs = pair.generate_iter(PROMPTS[:3], params)
    found = [next(outputs)]
    outputs.drain()
    found += outputs
    assert [output.prompt_index for output in found] == [0, 1]
    assert [len(output.outputs) for output in found] == [1, 5]
    for output, same in zip(found, whole, strict=False):
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in same.outputs]


@pytest.mark.parametrize("overlap", some([True, False], True))
def test_draining_keeps_what_was_preempted(model, overlap):
    """A preempted request waits, but has tokens."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {"max_num_seqs": 4, "num_kvcache_blocks": 12, "kvcache_block_size": 8, "max_model_len": 64}
    num_preempted = 0
    with LLM(model, device="cpu", overlap=overlap, **options) as llm:
        whole = llm.generate(PROMPTS[:12], params, use_tqdm=False)
        for num_before in range(1, 6):
            outputs = llm.generate_iter(PROMPTS[:12], params, ordered=False)
            found = list(itertools.islice(outputs, num_before))
            preempted = {seq.seq_id for seq in llm.engine.scheduler.waiting if seq.num_preemptions}
            outputs.drain()
            assert {seq.seq_id for seq in llm.engine.scheduler.waiting} == preempted
            num_preempted += len(preempted)
            found += outputs
            assert len(found) < 12
            assert all(plain(output) == plain(whole[output.prompt_index]) for output in found)
            llm.engine.scheduler.check_integrity()
    assert num_preempted > 0


@pytest.mark.long
def test_ranks_drain_as_one(model, expected):
    with LLM(model, **OPTIONS, num_kvcache_blocks=32, tensor_parallel_size=2) as llm:
        outputs = llm.generate_iter(PROMPTS, PARAMS, ordered=False)
        found = list(itertools.islice(outputs, 3))
        outputs.drain()
        found += outputs
        assert 3 < len(found) < 10
        assert all(plain(output) == plain(expected[output.prompt_index]) for output in found)
        assert list(map(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))) == list(map(plain, expected))


def test_draining_before_the_first_result_leaves_nothing_to_do(pair):
    seen = []
    outputs = pair.generate_iter(counted(PROMPTS, seen), PARAMS)
    outputs.drain()
    assert list(outputs) == seen == []


def test_draining_is_done_once(pair):
    outputs = pair.generate_iter(PROMPTS, UNEVEN, ordered=False)
    next(outputs)
    outputs.drain()
    num_unfinished = pair.metrics()["num_unfinished_requests"]
    outputs.drain()
    assert pair.metrics()["num_unfinished_requests"] == num_unfinished > 0
    assert len(list(outputs)) > 0
    outputs.drain()
    running = pair.generate_iter(PROMPTS, UNEVEN)
    outputs.drain()  # it has ended, so it must not affect another call
    assert len(list(running)) == 40
    running.close()
    running.drain()


def test_bad_rows_that_were_read_come_out_of_a_drained_iterator(pair, caplog):
    outputs = pair.generate_iter(iter(["", *PROMPTS[:9], "", *PROMPTS[:9]]), SHORT)
    assert next(outputs).error
    outputs.drain()
    assert [(output.prompt_index, output.finish_reason) for output in outputs] == [(10, "error")]
    (message,) = [record.getMessage() for record in caplog.records if record.name == "nanovllm.llm"]
    assert message.startswith("2 of 20 prompts ended in an error") and "empty" in message


def test_draining_in_the_middle_of_a_step_is_refused_and_changes_nothing(pair, expected, monkeypatch):
    """A signal handler may try; it should drain between two results."""
    step, num_refused = pair.engine.step, 0

    def draining():
        nonlocal num_refused
        with pytest.raises(RuntimeError, match="in the middle of a call, so a signal handler"):
            outputs.drain()
        num_refused += 1
        return step()

    monkeypatch.setattr(pair.engine, "step", draining)
    outputs = pair.generate_iter(PROMPTS, PARAMS)
    assert list(map(plain, outputs)) == list(map(plain, expected)) and num_refused > 0


@pytest.mark.parametrize("is_closing", [True, False])
def test_while_it_drains_nothing_else_may_be_called(pair, monkeypatch, is_closing):
    outputs = pair.generate_iter(PROMPTS, UNEVEN, ordered=False)
    next(outputs)
    abort, num_refused = pair.engine.abort, 0

    def interrupted(seq_id):
        nonlocal num_refused
        with pytest.raises(RuntimeError, match="in the middle of a call"):
            outputs.close() if is_closing else pair.generate("Hi", SHORT, use_tqdm=False)
        num_refused += 1
        return abort(seq_id)

    monkeypatch.setattr(pair.engine, "abort", interrupted)
    outputs.drain()
    assert num_refused > 0
    monkeypatch.undo()
    assert list(outputs)


def test_an_interrupt_while_it_drains_ends_it_with_what_was_finished(pair, monkeypatch):
    """This is a second Ctrl-C. Results in the exception are not given out again."""
    outputs = pair.generate_iter(PROMPTS, SHORT, ordered=False)  # the first two end together
    next(outputs)

    def interrupted(seq_id):
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.engine, "abort", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        outputs.drain()
    monkeypatch.undo()
    assert list(caught.value.finished_outputs) == [1] and list(outputs) == []


# Arguments


def test_what_is_wrong_at_once_is_said_at_once(llm):
    with pytest.raises(TypeError, match="ordered must be True or False"):
        llm.generate_iter(PROMPTS, SHORT, ordered="yes")
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams or an iterable of them, not a int"):
        llm.generate_iter(PROMPTS, 5)
    with pytest.raises(TypeError, match="prompts must be a string"):
        llm.generate_iter({"a", "b"}, SHORT)
    for num_params in (39, 41):
        with pytest.raises(ValueError, match=f"{num_params} sampling_params for 40 prompts"):
            llm.generate_iter(PROMPTS, [SHORT] * num_params)


def test_parameters_that_end_too_soon_are_an_error_that_keeps_what_was_finished(llm):
    with pytest.raises(ValueError, match="sampling_params end before prompt 3; give one for all, or one per prompt"):
        list(llm.generate_iter(iter(PROMPTS), PARAMS[:3]))
    with pytest.raises(TypeError, match=r"sampling_params\[1\] must be a SamplingParams, not 5"):
        list(llm.generate_iter(iter(PROMPTS), [SHORT, 5]))


# Results that an interrupted call keeps


def test_a_source_that_fails_ends_it_with_what_was_finished(llm, expected):
    def prompts():
        yield from PROMPTS[:39]
        raise OSError("the disk is gone")

    found, outputs = [], llm.generate_iter(prompts(), PARAMS)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        found.extend(outputs)
    kept = caught.value.finished_outputs
    assert [output.prompt_index for output in found] == list(range(len(found)))
    assert kept and min(kept) >= len(found)
    for output in [*found, *kept.values()]:
        assert plain(output) == plain(expected[output.prompt_index])
    assert list(outputs) == [], "what the exception holds is not given out again"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is lost")], ids=repr)
def test_generate_keeps_what_was_finished_when_it_is_interrupted(llm, expected, monkeypatch, error):
    """Hours of work were once lost to one key."""
    step, num_steps = llm.engine.step, itertools.count()

    def interrupted():
        if next(num_steps) == 60:
            raise error
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(type(error)) as caught:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    monkeypatch.undo()
    kept = caught.value.finished_outputs
    assert 5 < len(kept) < 40
    assert all(plain(output) == plain(expected[number]) for number, output in kept.items())


# Faults of the tokenizer are errors of a row


@pytest.mark.parametrize("error", [Panic("11 million spaces"), ValueError("no"), RuntimeError("no")], ids=repr)
def test_a_tokenizer_that_fails_on_a_prompt_spares_the_others(llm, monkeypatch, error):
    tokenizer = llm.get_tokenizer()
    real = type(tokenizer).__call__

    def failing(self, texts, **options):
        if "bad" in texts:
            raise error
        return real(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", failing)
    outputs = llm.generate(["One", "bad", "Two"], SHORT, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert f"cannot be tokenized: {error}" in outputs[1].error and outputs[1].prompt == "bad"


@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("error", [Panic("no"), TypeError("NoneType")], ids=repr)
def test_a_completion_that_cannot_be_decoded_keeps_its_tokens(llm, monkeypatch, error, stop):
    """With a padded vocabulary a byte tokenizer lost all rows of a call for one."""
    greedy = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    params = [
        SamplingParams(**greedy, logit_bias={65: 100}),
        SamplingParams(**greedy, logit_bias={66: 100}, stop=stop),
    ]
    real = Text.decode

    def failing(self, completions, skip_special_tokens, follows=()):
        if any(66 in completion for completion in completions):
            raise error
        return real(self, completions, skip_special_tokens, follows)

    monkeypatch.setattr(Text, "decode", failing)
    good, bad = llm.generate(["One", "Two"], params, use_tqdm=False)
    assert good.text == "AAA" and good.error is None
    assert bad.finish_reason == "error" and f"the completion cannot be decoded: {error}" in bad.error
    assert bad.text == "" and bad.token_ids == [66] * (3 if stop is None else 1)
    assert bad.outputs[0].stop_reason is None


def test_a_tokenizer_that_fails_while_a_stop_string_is_looked_for_is_seen(llm, monkeypatch):
    """The row ends there. The text of all its tokens may be fine, and would hide that some are missing."""

    def failing(self, token_id, skip_special_tokens):
        raise Panic("no such token")

    monkeypatch.setattr(Text, "has_text", failing)
    params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, stop=stop) for stop in ("never", None)]
    bad, good = llm.generate(["One", "One"], params, use_tqdm=False)
    assert bad.error == "the completion cannot be decoded: no such token" and bad.finish_reason == "error"
    assert bad.token_ids == good.token_ids[:1] and good.error is None


def test_a_completion_whose_beginning_cannot_be_decoded_spares_the_others(llm, monkeypatch):
    """Before `min_tokens` stop strings do not count, so the text of the first tokens is decoded, too."""
    real = Text.decode

    def failing(self, completions, skip_special_tokens, follows=()):
        if any(len(completion) == 6 for completion in completions):
            raise TypeError("NoneType")
        return real(self, completions, skip_special_tokens, follows)

    monkeypatch.setattr(Text, "decode", failing)
    greedy = {"temperature": 0, "max_tokens": 7, "ignore_eos": True}
    params = [SamplingParams(**greedy), SamplingParams(**greedy, min_tokens=6, stop="never")]
    good, bad = llm.generate(["One", "Two"], params, use_tqdm=False)
    assert good.error is None and "cannot be decoded" in bad.error and len(bad.token_ids) == 7


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=repr)
def test_what_ends_the_program_is_no_fault_of_a_row(llm, monkeypatch, error):
    def failing(*args, **options):
        raise error

    for owner, name in ((type(llm.get_tokenizer()), "__call__"), (Text, "decode")):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(owner, name, failing)
            llm.generate(["One", "Two"], SHORT, use_tqdm=False)


# Memory


class FakeEngine:
    """Each step finishes all its rows, or at most a given number."""

    def __init__(self, maximum=None):
        self._most = maximum
        self.info, self.eos_token_ids = SimpleNamespace(max_num_seqs=512), frozenset()
        self.num_requests, self.waiting, self.weight_version = 0, [], 0
        self.tokens_of_step = 2**14

    def add_request(self, token_ids, params, predicates, first_scored, may_change, adapter):
        seq = Sequence(self.num_requests, token_ids, params, 64)
        seq.token_ids.append(7)
        seq.finish_reason = "length"
        self.num_requests += 1
        self.waiting.append(seq)
        return seq.seq_id

    def without_changes(self, function, *arguments):
        return function(*arguments)

    def room_for_prompts(self):
        return 512 - len(self.waiting), self.tokens_of_step

    def num_uncached_tokens(self, seq_id):
        return self.waiting[-1].num_tokens

    def is_finished(self):
        return not self.waiting

    def step(self):
        finished, self.waiting = self.waiting[: self._most], self.waiting[self._most :] if self._most else []
        return finished


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_stays_flat_however_many_rows_there_are(count):
    """A row may keep 250 bytes."""
    params, engine, num_rows = SamplingParams(max_tokens=1), FakeEngine(), count(60_000, 150_000)
    source = (([index % 50] * 20, params) for index in range(num_rows))
    rows = RowStream(engine, Text(None), source, Text(None).encode, StructuredOutputs(None, 8, []))
    num_found, at_start = 0, None
    for finished in rows.run():
        num_found += len(finished)
        if at_start is None and num_found > num_rows // 5:
            at_start = resident_bytes()
    assert num_found == rows.num_read == num_rows
    assert resident_bytes() - at_start < 250 * (num_rows - num_rows // 5)
