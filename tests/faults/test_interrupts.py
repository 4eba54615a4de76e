"""Ctrl-C and exceptions inside generate(): the caller sees them, and the next call is right."""

import random
import signal
from itertools import count

import pytest
from support.interrupts import Fault, assert_empty, interrupt_at_random_moments, run_traced
from support.long import some
from transformers import PreTrainedTokenizerBase

import nanovllm.progress
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.llm import make_runner
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.step_in_flight import StepInFlight
from nanovllm.runner.step_program import StepProgram
from nanovllm.text import StopStrings, Text

# Chunks, several steps, and a cache in which not everything fits at once.
OPTIONS = {"device": "cpu", "kvcache_block_size": 8, "num_kvcache_blocks": 14, "max_num_batched_tokens": 24}

VICTIMS = ["Interrupt me in the middle.", "Me as well", list(b"And me!"), ""]
VICTIM_PARAMS = [SamplingParams(temperature=0.9, seed=row, max_tokens=6, ignore_eos=True) for row in range(4)]
VICTIM_PARAMS[1] = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, stop=["never", "there"])

PROMPTS = ["<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n", list(b"Me as"), "Go on and on"]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=7, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True),
]

POINTS = {
    "tokenize": (Text, "encode"),
    "add_request": (LLMEngine, "add_request"),
    "schedule": (Scheduler, "schedule"),
    "allocate": (BlockManager, "allocate"),
    "append": (BlockManager, "append"),
    "deallocate": (BlockManager, "deallocate"),
    "launch": (ModelRunner, "launch"),
    "model": (StepProgram, "_forward"),
    "sampling": (StepProgram, "_sample"),
    "wait": (StepInFlight, "wait"),
    "commit": (Scheduler, "commit"),
    "stop string": (StopStrings, "__call__"),
    "step": (LLMEngine, "step"),
    "progress": (nanovllm.progress.Progress, "add_finished"),
    "decode": (PreTrainedTokenizerBase, "batch_decode"),
}


@pytest.fixture(scope="module", params=some([True, False], True), ids=["overlap", "sync"])
def llm(request):
    with LLM(MODEL_DIRECTORY, overlap=request.param, **OPTIONS) as llm:
        run_victims(llm)  # caches facts that are computed once per tokenizer
        yield llm


@pytest.fixture(scope="module")
def expected():
    with LLM(MODEL_DIRECTORY, device="cpu", attention_backend="torch") as llm:
        answers = answer(llm)
    assert answers[0][0] == "42"
    return answers


def answer(llm) -> list[tuple]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.text, output.token_ids, output.finish_reason, output.error) for output in outputs]


def run_victims(llm):
    """The same steps every time: from an empty cache, and with seeds of their own."""
    llm.engine.reset()
    return llm.generate(VICTIMS, VICTIM_PARAMS, use_tqdm=False)


# Exceptions at every function that a call passes


@pytest.mark.grid(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is lost"), signal.SIGINT], ids=repr)
@pytest.mark.parametrize("point", POINTS)
def test_after_an_exception_anywhere_the_next_call_is_right(llm, expected, point, error):
    """A step in flight, a half-filled block table or a row of the failed call once turned up in the next one."""
    owner, name = POINTS[point]
    with Fault(owner, name) as probe:
        assert len(run_victims(llm)) == len(VICTIMS)
    rng = random.Random(f"{point} {error!r}")
    assert probe.num_calls > 0
    for at in {1, probe.num_calls, rng.randint(1, probe.num_calls)}:
        kind = KeyboardInterrupt if error is signal.SIGINT else type(error)
        fault = Fault(owner, name, at, error, rng.random() < 0.5)
        if (point, kind) == ("decode", RuntimeError):  # a completion that cannot be decoded is a row's own fault
            with fault:
                assert len(run_victims(llm)) == len(VICTIMS)
        else:
            with pytest.raises(kind) as caught, fault:
                run_victims(llm)
            assert error is signal.SIGINT or caught.value is error
        assert_empty(llm.engine)
        assert answer(llm) == expected
        assert_empty(llm.engine)


@pytest.mark.parametrize("at", range(1, 12))
def test_interrupts_one_after_the_other_do_not_add_up(llm, expected, at):
    """No good call comes between them that could repair anything."""
    for name, owner in (("launch", ModelRunner), ("schedule", Scheduler), ("launch", ModelRunner)):
        with pytest.raises(KeyboardInterrupt), Fault(owner, name, at % 7 + 1, KeyboardInterrupt()):
            run_victims(llm)
        assert_empty(llm.engine)
    assert answer(llm) == expected


def test_after_a_fault_the_victims_themselves_come_out_right(llm):
    """Keys that the failed call wrote to the cache must not be served when it is repeated."""
    intact = run_victims(llm)
    with Fault(ModelRunner, "launch") as probe:
        run_victims(llm)
    for at in range(1, probe.num_calls + 1):
        with pytest.raises(RuntimeError, match="lost"), Fault(ModelRunner, "launch", at, RuntimeError("lost")):
            run_victims(llm)
        again = llm.generate(VICTIMS, VICTIM_PARAMS, use_tqdm=False)
        assert [output.token_ids for output in again] == [output.token_ids for output in intact]


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_device_that_stays_broken_reports_its_first_error(llm, expected, at):
    """Draining the steps in flight fails as well; that must neither hide the cause nor leave anything behind."""
    real, calls = StepInFlight.wait, count(1)
    errors = []

    def broken(result):
        if next(calls) < at:
            return real(result)
        errors.append(RuntimeError(f"failure {len(errors) + 1}"))
        raise errors[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepInFlight, "wait", broken)
        with pytest.raises(RuntimeError, match="failure 1"):
            run_victims(llm)
    assert len(errors) == 1 + llm.engine.depth
    assert_empty(llm.engine)
    assert answer(llm) == expected


# Ctrl-C


def test_ctrl_c_may_come_at_any_line(llm, expected, count):
    """It may come between taking a lock and the `try` that releases it, or between taking a step and storing it."""
    visits: dict[tuple[str, int], int] = {}

    def count_visit(file, line):
        visits[file, line] = visits.get((file, line), 0) + 1

    run_traced(lambda: run_victims(llm), count_visit)
    assert len(visits) > 100
    rng = random.Random(1)
    # The two engines take every other line each.
    places = list(visits.items())[llm.engine.depth :: 2]
    for place, num_visits in rng.sample(places, min(len(places), count(25, len(places)))):
        remaining = [rng.randint(1, num_visits)]

        def interrupt(file, line, place=place, remaining=remaining):
            if (file, line) == place:
                remaining[0] -= 1
                if remaining[0] == 0:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_traced(lambda interrupt=interrupt: run_victims(llm), interrupt)
        # The next call comes while the traceback is still alive, as in an interactive session.
        assert_empty(llm.engine)
        assert answer(llm) == expected, place
        assert_empty(llm.engine)


def test_ctrl_c_at_random_moments(llm, expected, count):
    """The call may be anywhere, even in torch."""

    def check() -> None:
        assert_empty(llm.engine)
        assert answer(llm) == expected

    interrupt_at_random_moments(lambda: run_victims(llm), count(5, 20), check)


@pytest.mark.grid(1)
@pytest.mark.parametrize("point", ["launch", "wait", "progress", "add_request"])
@pytest.mark.parametrize("second", [BlockManager, Scheduler])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_second_ctrl_c_during_the_clean_up_is_as_harmless(llm, expected, point, second, is_after):
    """Users press it twice; an interrupted reset once left the old requests in the scheduler."""
    owner, name = POINTS[point]
    llm.engine.reset()
    first_fault = Fault(owner, name, 3, KeyboardInterrupt())
    second_fault = Fault(second, "__init__", 1, KeyboardInterrupt(), is_after)
    with pytest.raises(KeyboardInterrupt), first_fault, second_fault:
        llm.generate(VICTIMS, VICTIM_PARAMS, use_tqdm=False)
    assert first_fault.num_calls == 3
    assert second_fault.num_calls > 0
    assert llm.engine.is_finished()
    assert answer(llm) == expected
    assert_empty(llm.engine)


# By hand, and other ways to fail


@pytest.mark.parametrize("point", ["schedule", "allocate", "launch", "wait", "commit"])
def test_a_step_by_hand_that_fails_empties_the_engine(point):
    owner, name = POINTS[point]
    config = Config(str(MODEL_DIRECTORY), **OPTIONS)
    engine = LLMEngine(config, make_runner(config))
    prompt = list(b"By hand")

    def run() -> list[int]:
        engine.add_request(prompt, PARAMS[2])
        finished = []
        while not engine.is_finished():
            finished += engine.step()
        return [seq.completion_token_ids for seq in finished]

    intact = run()
    with Fault(owner, name) as probe:
        assert run() == intact
    for at in range(1, probe.num_calls + 1):
        with pytest.raises(RuntimeError, match="lost"), Fault(owner, name, at, RuntimeError("lost")):
            engine.reset()
            run()
        assert_empty(engine)
        assert run() == intact
    engine.exit()


def test_ctrl_c_at_any_line_of_a_step_by_hand_leaves_an_engine_that_goes_on(llm, expected):
    """A finished request once stayed on the list of unfinished ones, so the list could never become empty."""
    engine = llm.engine

    def add() -> None:
        engine.reset()
        for row, prompt in enumerate(PROMPTS):
            engine.add_request(list(prompt.encode()) if isinstance(prompt, str) else prompt, VICTIM_PARAMS[row])

    def run_to_end() -> None:
        while not engine.is_finished():
            engine.step()

    places: dict[tuple[str, int], None] = {}
    add()
    run_traced(run_to_end, lambda *place: places.setdefault(place))
    for place in places:

        def interrupt(*now, place=place):
            if now == place:
                raise KeyboardInterrupt

        add()
        with pytest.raises(KeyboardInterrupt):
            run_traced(run_to_end, interrupt)
        run_to_end()
        assert_empty(engine)
    assert answer(llm) == expected


def test_a_call_refused_for_its_arguments_changes_nothing(llm, expected):
    for prompts, params, error in (
        (["fine", None], None, ValueError),
        (["fine", [259]], None, ValueError),
        (["fine", "also"], [PARAMS[0]], ValueError),
        (5, None, TypeError),
    ):
        with pytest.raises(error):
            llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)
        assert_empty(llm.engine)
        assert answer(llm) == expected


def test_closing_after_a_fault_works():
    lost = RuntimeError("lost")
    with (
        pytest.raises(RuntimeError, match="lost"),
        LLM(MODEL_DIRECTORY, **OPTIONS) as llm,
        Fault(ModelRunner, "launch", 3, lost),
    ):
        run_victims(llm)
    with pytest.raises(RuntimeError, match="closed"):
        answer(llm)
