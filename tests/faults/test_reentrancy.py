"""Calls inside calls, forks and copies: each is refused by one clear error, and the engine goes on as before."""

import copy
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from support.interrupts import assert_empty
from support.long import some

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY

OPTIONS = {"device": "cpu", "kvcache_block_size": 8, "num_kvcache_blocks": 32}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [list(b"First"), list(b"The second"), list(b"3rd")]

CHANGES: dict[str, Callable[[LLM], object]] = {
    "step": lambda llm: llm.engine.step(),
    "abort": lambda llm: llm.engine.abort(llm.engine.metrics()["num_requests"] - 1),
    "abort of another": lambda llm: llm.engine.abort(llm.engine.metrics()["num_requests"] - 2),
    "abort of nobody": lambda llm: llm.engine.abort(10**9),
    "add_request": lambda llm: llm.engine.add_request([65], PARAMS),
    "a bad request": lambda llm: llm.engine.add_request([], PARAMS),
    "reset": lambda llm: llm.engine.reset(),
    "exit": lambda llm: llm.engine.exit(),
}
CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("Hi", PARAMS, use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Hi"}], PARAMS, use_tqdm=False),
    "close": lambda llm: llm.close(),
}


ENGINES = {"overlap": (1, True), "sync": (1, False), "two ranks": (2, True)}


@pytest.fixture(scope="module", params=some(ENGINES, "overlap"))
def llm(request):
    num_ranks, overlap = ENGINES[request.param]
    with LLM(MODEL_DIRECTORY, tensor_parallel_size=num_ranks, overlap=overlap, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return answers(llm)


def answers(llm: LLM, predicate: Callable[[int], bool] | None = None, at: int = 1) -> list[list[int]]:
    """Completions by hand; the predicate is that of request number `at`."""
    ids = [
        llm.engine.add_request(prompt, PARAMS, predicate if index == at else None)
        for index, prompt in enumerate(PROMPTS)
    ]
    finished = {}
    while not llm.engine.is_finished():
        finished.update({seq.seq_id: seq.completion_token_ids for seq in llm.engine.step()})
    return [finished[seq_id] for seq_id in ids]


# Inside a step


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at_token", [1, 5])
def test_a_stop_predicate_that_would_change_the_engine_ends_the_run_with_one_clear_error(
    llm, expected, change, at_token
):
    """It was once a raw KeyError, or on two ranks a false error that they diverged. The engine is empty and usable."""
    num_seen = 0

    def predicate(token_id: int) -> bool:
        nonlocal num_seen
        num_seen += 1
        if num_seen == at_token:
            CHANGES[change](llm)
        return False

    with pytest.raises(RuntimeError, match="in the middle of a step or request, so a stop predicate"):
        answers(llm, predicate)
    assert num_seen == at_token
    assert_empty(llm.engine)
    assert answers(llm) == expected


@pytest.mark.parametrize("change", CHANGES)
def test_a_stop_predicate_that_survives_the_error_changes_nothing(llm, expected, change):
    """Half an abort, or a request that only some ranks have, would change the tokens."""
    before = llm.metrics()
    errors = []

    def predicate(token_id: int) -> bool:
        with pytest.raises(RuntimeError) as error:
            CHANGES[change](llm)
        errors.append(str(error.value))
        return False

    assert answers(llm, predicate) == expected
    assert len(errors) == PARAMS.max_tokens and len(set(errors)) == 1 and "in the middle of a step" in errors[0]
    after = llm.metrics()
    assert after["num_requests"] - before["num_requests"] == len(PROMPTS)
    assert after["num_rejected_requests"] == before["num_rejected_requests"]
    assert_empty(llm.engine)


def test_a_stop_predicate_may_read_and_stop(llm, expected):
    """Metrics and is_finished change nothing, so they are allowed."""
    seen = []

    def predicate(token_id: int) -> bool:
        seen.append((llm.metrics()["num_unfinished_requests"], llm.engine.is_finished()))
        return len(seen) == 3

    stopped = answers(llm, predicate)
    assert stopped == [expected[0], expected[1][:3], expected[2]]
    assert seen == [(3, False)] * 3
    assert answers(llm) == expected


@pytest.mark.parametrize("change", CHANGES)
def test_a_signal_handler_that_would_change_the_engine_in_a_step_is_refused(llm, expected, change):
    """The signal may come in the middle of a commit, for example."""

    def on_signal(number, frame) -> None:
        CHANGES[change](llm)

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        for where in ("schedule", "commit"):
            real = getattr(llm.engine.scheduler, where)

            def interrupted(*arguments, real=real):
                signal.raise_signal(signal.SIGUSR1)
                return real(*arguments)

            setattr(llm.engine.scheduler, where, interrupted)
            with pytest.raises(RuntimeError, match="or a signal handler cannot change it"):
                answers(llm)
            assert_empty(llm.engine)
            assert answers(llm) == expected
    finally:
        signal.signal(signal.SIGUSR1, before)


# Inside a call


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", ["between two steps", "in a step", "in the tokenizer"])
def test_a_signal_handler_that_would_call_or_close_an_llm_during_a_call_is_refused(
    llm, expected, monkeypatch, call, where
):
    """close() once freed the model during the call, and another call dropped the first call's requests."""
    owner, name = {
        "between two steps": (llm.engine, "is_finished"),
        "in a step": (llm.engine.runner, "launch"),
        "in the tokenizer": (llm._text, "complete"),
    }[where]
    real, num_calls = getattr(owner, name), 0

    def interrupted(*arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls == (3 if where != "in the tokenizer" else 1):
            signal.raise_signal(signal.SIGUSR1)
        return real(*arguments)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: CALLS[call](llm))
    try:
        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(
            RuntimeError, match="in the middle of a call, so a signal handler or a source of prompts cannot"
        ):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR1, before)
    assert_empty(llm.engine)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected


def test_after_a_call_was_interrupted_anywhere_an_llm_can_still_be_called_and_closed(llm, expected):
    """If an interrupt left the mark of a running call, every later call would be refused."""
    real = llm.engine.step

    def interrupted():
        real()
        raise KeyboardInterrupt

    llm.engine.step = interrupted
    try:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt) as caught:  # its traceback is alive during the next call
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    finally:
        del llm.engine.step
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected
    assert caught.value is not None


# Inside code of the user that a call of an LLM runs


class Calling:
    """A tokenizer or a progress bar that runs `change` in one of its methods."""

    disable = False

    def __init__(self, real, method: str, change: Callable[[], object]):
        self._real, self._method, self._change = real, method, change

    def __getattr__(self, name: str):
        if name == self._method:
            self._change()
        return getattr(self._real, name, lambda *args, **kwargs: None)

    def __call__(self, *args, **kwargs):
        if self._method == "__call__":
            self._change()
        return self._real(*args, **kwargs)


def from_source(llm: LLM, change: Callable[[], object]) -> list[RequestOutput]:
    return list(llm.generate_iter(calling_source(PROMPTS, change), PARAMS))


def calling_source(given: Iterable, change: Callable[[], object]) -> Iterator:
    for index, each in enumerate(given):
        if index == 1:
            change()
        yield each


def from_params(llm: LLM, change: Callable[[], object]) -> list[RequestOutput]:
    return list(llm.generate_iter(iter(PROMPTS), calling_source([PARAMS] * 3, change)))


def from_bar(method: str) -> Callable[[LLM, Callable[[], object]], list[RequestOutput]]:
    return lambda llm, change: llm.generate(PROMPTS, PARAMS, use_tqdm=lambda **_: Calling(None, method, change))


def making_bar(llm: LLM, change: Callable[[], object]) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=lambda **_: change() or Calling(None, "", change))


def from_tokenizer(method: str, *bad_words: str) -> Callable[[LLM, Callable[[], object]], list[RequestOutput]]:
    def call(llm: LLM, change: Callable[[], object]) -> list[RequestOutput]:
        real = llm.get_tokenizer()
        llm.set_tokenizer(Calling(real, method, change))
        try:
            prompts = PROMPTS if bad_words else [bytes(prompt).decode() for prompt in PROMPTS]
            return llm.generate(prompts, replace(PARAMS, bad_words=bad_words), use_tqdm=False)
        finally:
            llm.set_tokenizer(real)

    return call


PLACES: dict[str, Callable[[LLM, Callable[[], object]], list[RequestOutput]]] = {
    "a source of prompts": from_source,
    "a source of parameters": from_params,
    "the maker of a bar": making_bar,
    "a bar": from_bar("update"),
    "a tokenizer that encodes": from_tokenizer("__call__"),
    "a tokenizer of bad words": from_tokenizer("__call__", "never"),
    "a tokenizer that decodes": from_tokenizer("batch_decode"),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_of_the_user_inside_a_call_cannot_change_the_engine(llm, expected, place):
    """A source of prompts that added a request to the engine once ended the call with a KeyError, and one that closed
    the engine closed it."""
    errors: list[str] = []

    def change() -> None:
        for call in (*CHANGES.values(), *CALLS.values()):
            with pytest.raises(RuntimeError, match=r"in the middle of a (call|step or request), so") as error:
                call(llm)
            errors.append(str(error.value))

    outputs = PLACES[place](llm, change)
    assert [output.token_ids for output in outputs] == expected and len(errors) >= len(CHANGES) + len(CALLS)
    assert all("a source of prompts" in error for error in errors)
    assert_empty(llm.engine)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected


@pytest.mark.parametrize("place", ["a source of prompts", "a bar"])
def test_a_call_from_inside_a_call_ends_it_with_one_clear_error(llm, expected, place):
    with pytest.raises(RuntimeError, match="this LLM is in the middle of a call"):
        PLACES[place](llm, lambda: llm.sleep())
    assert_empty(llm.engine)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected


@pytest.mark.parametrize("method", ["close", "drain", "__next__"])
def test_a_source_cannot_use_the_iterator_that_reads_it(llm, expected, method):
    errors: list[str] = []

    def change() -> None:
        with pytest.raises(RuntimeError, match="this LLM is in the middle of a call") as error:
            getattr(iterator, method)()
        errors.append(str(error.value))

    iterator = llm.generate_iter(calling_source(PROMPTS, change), PARAMS)
    assert [output.token_ids for output in iterator] == expected and len(errors) == 1


# Copies and forks


@pytest.mark.parametrize("copy_it", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_an_llm_and_its_engine_cannot_be_copied(llm, expected, copy_it):
    """It once ended in "cannot pickle '_thread.RLock' object", or copied gigabytes first."""
    with pytest.raises(TypeError, match=r"an LLM cannot be pickled or copied; make one in each process"):
        copy_it(llm)
    with pytest.raises(TypeError, match=r"an engine cannot be pickled or copied; make one in each process"):
        copy_it(llm.engine)
    assert answers(llm) == expected


FORK = """
import os, sys
import torch
from nanovllm import LLM, RequestOutput, SamplingParams

torch.set_num_threads(2)
llm = LLM(sys.argv[1], device="cpu", num_kvcache_blocks=64)
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
prompts = [list(range(1, 200))] * 4
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
before = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
calls = [
    lambda: llm.generate(prompts, params, use_tqdm=False),
    lambda: llm.generate("Hi", params, use_tqdm=False),
    lambda: llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False),
    lambda: llm.engine.add_request([1], params),
    lambda: llm.engine.step(),
    lambda: llm.engine.abort(0),
    lambda: llm.engine.reset(),
    lambda: torch.set_num_threads(2) or LLM(sys.argv[1]),
]
child = os.fork()
if child == 0:
    told = 0
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            told += "this process is a fork" in str(error) and '"spawn"' in str(error)
    llm.metrics()
    llm.close()
    os._exit(0 if told == len(calls) else 1)
assert os.waitpid(child, 0)[1] == 0
assert before == [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
print("fine")
"""


def test_a_fork_of_a_process_with_a_used_llm_is_told_so():
    """OpenMP's threads do not survive a fork, so the child once waited for ever. The child may close the LLM."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", FORK, str(MODEL_DIRECTORY)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert (result.stdout, result.returncode) == ("fine\n", 0), result.stderr
