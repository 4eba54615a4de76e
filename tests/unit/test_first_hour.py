"""What a new user meets first: the model's name, the parameters, the progress bar, help, and calls from threads."""

import os
import pydoc
import re
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import nanovllm.progress
from nanovllm import LLM, Config, Preflight, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.step_stats import StepStats
from nanovllm.guard import ExclusiveGuard
from nanovllm.jobs.identity import identity_of
from nanovllm.models.directory import find_model
from nanovllm.progress import Progress
from nanovllm.prompts import key_of
from nanovllm.recommended_sampling import DefaultSampling

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SUM = "Q: What is 12 + 30?\nA:"
HELLO = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM("bundled", queue_calls=True, **OPTIONS) as llm:
        yield llm


def texts(outputs) -> list[str]:
    return [output.text for output in outputs]


# The model's name


def test_bundled_is_the_bundled_model(llm, tmp_path, monkeypatch):
    """Only the command knew the name, and LLM asked the hub for it."""
    monkeypatch.chdir(tmp_path)
    assert texts(llm.generate(SUM, GREEDY)) == [" 42"]
    assert Preflight("bundled").directory == find_model("bundled", None) == MODEL_DIRECTORY
    (tmp_path / "bundled").mkdir()
    assert find_model("bundled", None).resolve() == tmp_path / "bundled"


def test_a_job_knows_the_bundled_model_by_its_weights():
    """They may change with the version, unlike those of a hub name's commit."""
    by_name, by_path = (
        identity_of("", 0, MODEL_DIRECTORY, {"model": name}, {}, 0)["model"] for name in ("bundled", MODEL_DIRECTORY)
    )
    assert by_name == by_path


@pytest.mark.parametrize("make", [LLM, Preflight])
def test_a_name_without_a_network_is_one_short_message(monkeypatch, make):
    """Three tracebacks of the hub's client came first."""

    def fail(*args, **kwargs):
        try:
            raise ConnectionError("Name or service not known")
        except ConnectionError as error:
            raise OSError("Got: ConnectError\n" + "An error happened while trying to locate the files. " * 9) from error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError) as caught:
        make("Qwen/Qwen3-0.6B")
    message = str(caught.value)
    assert "'Qwen/Qwen3-0.6B' is not a directory" in message and "OSError: Got: ConnectError" in message
    assert "the directory of a downloaded model" in message and '"bundled"' in message
    assert len(message) < 400 and "\n" not in message
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


# Parameters


@pytest.fixture
def without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)


def test_a_missing_library_is_an_error_of_the_call(llm, without_llguidance):
    """It was the error of each of 5,000 rows."""
    before = llm.metrics()["num_requests"]
    regex, choice = ({"structured_outputs": {kind: given}} for kind, given in (("regex", "a"), ("choice", ["42"])))
    calls = [
        lambda: llm.generate(SUM, regex),
        lambda: llm.generate([SUM, SUM], [SamplingParams(**choice), SamplingParams(**regex)]),
        lambda: llm.chat(HELLO, SamplingParams(**regex)),
        lambda: llm.generate_iter([SUM], regex),
        lambda: llm.generate_iter(iter([SUM, SUM]), [choice, regex]),
    ]
    for call in calls:
        with pytest.raises(ImportError, match="pip install llguidance"):
            call()
    assert llm.metrics()["num_requests"] == before
    assert texts(llm.generate(SUM, choice)) == ["42"]
    good, bad = llm.generate_iter([SUM] * 2, (SamplingParams(**each) for each in (choice, regex)))
    assert good.error is None and "pip install llguidance" in bad.error


def test_parameters_may_be_dicts(llm):
    expected = [texts(llm.generate(SUM, SamplingParams(temperature=0, max_tokens=n))) for n in (1, 3)]
    one, three = ({"temperature": 0, "max_tokens": n} for n in (1, 3))
    assert texts(llm.generate(SUM, three)) == texts(llm.generate_iter(SUM, three)) == expected[1]
    assert texts(llm.generate([SUM, SUM], [one, SamplingParams(**three)])) == [*expected[0], *expected[1]]
    assert texts(llm.generate_iter(iter([SUM, SUM]), iter([one, three]))) == [*expected[0], *expected[1]]
    assert texts(llm.chat(HELLO, one)) == texts(llm.chat(HELLO, SamplingParams(**one)))
    assert [check.max_num_new_tokens for check in Preflight("bundled").check([SUM, SUM], [one, three])] == [1, 3]
    with pytest.raises(TypeError, match="sampling_params: unknown parameter 'max_token'; did you mean max_tokens"):
        llm.generate(SUM, {"max_token": 3})
    with pytest.raises(ValueError, match=r"sampling_params\[1\]: top_p must be"):
        llm.generate_iter(iter([SUM, SUM]), [one, {"top_p": 7}])


@pytest.mark.parametrize("call", ["generate", "generate_iter", "chat"])
def test_a_parameter_given_as_an_argument_is_told_where_it_belongs(llm, call):
    for name in [*(each.name for each in fields(SamplingParams)), "max_new_tokens"]:
        ours = name.replace("new_", "")
        with pytest.raises(TypeError, match=re.escape(f"unknown argument '{name}'; give it as sampling_params=")) as e:
            getattr(llm, call)(SUM, **{name: 3})
        assert f"SamplingParams({ours}=…)" in str(e.value)
    with pytest.raises(TypeError, match=r"SamplingParams\(temperature=…\)"):
        getattr(llm, call)(SUM, temprature=0)


CUT = "the default of max_tokens, 64, cut completions of {} of {} prompts; set max_tokens to another number"


def test_rows_that_the_default_of_max_tokens_cuts_are_counted(llm, caplog):
    """Answers ended in the middle of a sentence, and nothing said why."""
    endless = SamplingParams(temperature=0, ignore_eos=True)
    short = SamplingParams(temperature=0, ignore_eos=True, max_tokens=64)
    llm.generate([SUM] * 3, [endless, GREEDY, SamplingParams(ignore_eos=True, bad_words=["x"])])
    [message] = caplog.messages
    assert CUT.format(2, 3) in message
    assert list(llm.generate_iter([SUM], replace(endless, temperature=1.0, n=2)))
    assert len(caplog.messages) == 2 and CUT.format(1, 1) in caplog.messages[1]
    caplog.clear()
    llm.generate([SUM] * 2, short)  # the same number, but asked for
    llm.generate(SUM, SamplingParams(temperature=0))  # ends by itself
    llm.generate([65] * 1000, endless)  # max_model_len cut it
    llm.chat(HELLO)
    assert caplog.messages == []


def test_a_recommended_max_tokens_is_not_the_default(llm, caplog, monkeypatch):
    for recommended, num_warnings in (({"max_new_tokens": 64}, 0), ({}, 1)):
        default = DefaultSampling({"do_sample": False, **recommended})
        monkeypatch.setattr(llm, "_default_sampling", default)
        params = llm.get_default_sampling_params()
        params.ignore_eos = True
        llm.generate(SUM, params)
        assert len(caplog.messages) == num_warnings


# The progress bar


class Bar:
    """Records how it was made and updated, like tqdm's bar of a notebook."""

    def __init__(self, **options):
        self.options, self.updates, self.postfix = options, [], ""
        self.disable = bool(options.get("disable"))

    def update(self, number):
        self.updates.append(number)

    def set_postfix_str(self, text, refresh):
        self.postfix = text

    def close(self):
        pass


@pytest.fixture
def bars(monkeypatch):
    made = []
    monkeypatch.setattr(nanovllm.progress, "tqdm", lambda **options: made.append(Bar(**options)) or made[-1])
    monkeypatch.setattr(nanovllm.progress, "_SECONDS_BETWEEN_UPDATES", 0)
    return made


def test_the_bar_moves_with_tokens(llm, bars):
    """One prompt of 512 tokens showed 0% to its end, and no time left."""
    llm.generate([65] * 10, SamplingParams(ignore_eos=True, max_tokens=64))
    [bar] = bars
    assert len(bar.updates) > 60 and min(bar.updates) >= 0 and sum(bar.updates) == 1
    done = [sum(bar.updates[: index + 1]) for index in range(len(bar.updates))]
    assert all(abs(part - index / 64) < 0.1 for index, part in enumerate(done[:64]))


def test_a_bar_of_many_prompts_ends_at_their_number(llm, bars):
    params = [SamplingParams(ignore_eos=True, max_tokens=5 + index % 7, n=1 + index % 3) for index in range(20)]
    llm.generate([SUM, "", *[SUM] * 18], params)
    [bar] = bars
    assert min(bar.updates) >= 0 and sum(bar.updates) == 20 and bar.postfix.endswith("errors: 1")


def test_a_bar_of_the_callers_making_counts_whole_prompts(llm, bars):
    """vLLM's does; a caller may have made it for that."""
    made = []
    llm.generate([SUM] * 4, GREEDY, lambda **options: made.append(Bar(**options)) or made[-1])
    [bar] = made
    assert bars == [] and sum(bar.updates) == 4 and {type(each) for each in bar.updates} == {int}


def engine_with(sequences: list) -> SimpleNamespace:
    scheduler = SimpleNamespace(running=sequences)
    return SimpleNamespace(
        step_stats=StepStats(), scheduler=scheduler, without_changes=lambda function, *given: function(*given)
    )


def running(num_prompt_tokens, num_new, max_new, num_computed=None) -> SimpleNamespace:
    num_tokens = num_prompt_tokens + num_new
    return SimpleNamespace(
        num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens, max_length=num_prompt_tokens + max_new,
        num_computed_tokens=num_tokens if num_computed is None else num_computed, sampling_params=SamplingParams(),
    )  # fmt: skip


def test_the_estimate_knows_how_long_completions_usually_are(bars):
    """By max_tokens alone, answers of 100 tokens of 10,000 allowed would leave the bar at 1%."""
    engine = engine_with([running(16, 50, 10_000)] * 4)
    progress = Progress(engine, 10, True)
    finished = SimpleNamespace(error=None, outputs=[SimpleNamespace(token_ids=[1] * 100)])
    progress.add_finished([])
    assert bars[0].updates == [0]  # 4 × 51 / 10,001
    progress.add_finished([finished] * 4)  # then a completion can expect 150 more tokens
    assert sum(bars[0].updates) == int(16 * (4 + 4 * 51 / 201)) / 16
    engine.scheduler.running = [running(16_000, 0, 0, num_computed=4_000)]
    progress = Progress(engine, 1, True)
    progress.add_finished([])
    assert bars[-1].updates == [0.25]  # a prompt counts too


def test_without_a_terminal_the_bar_comes_once_per_minute(monkeypatch, capsys):
    """A log had ten lines per second."""
    engine = engine_with([])
    with Progress(engine, 3, True) as progress:
        progress.add_finished([])
        assert (progress._bar.mininterval, progress._bar.delay, progress._bar.disable) == (60, 60, False)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(engine, 3, True) as progress:
        assert (progress._bar.mininterval, progress._bar.delay) == (0.1, 0)
    assert "0.0/3" in capsys.readouterr().err
    with Progress(engine, 3, False) as progress:
        progress.add_finished([])
    assert capsys.readouterr() == ("", "")


def test_a_notebook_has_the_usual_bar(bars):
    """Its stderr is no terminal."""
    Progress(engine_with([]), 3, True)
    [bar] = bars
    assert "mininterval" not in bar.options and bar.options["total"] == 3 and "{bar}" in bar.options["bar_format"]


# Help


def test_the_options_are_in_help():
    text = pydoc.plain(pydoc.render_doc(LLM))
    for each in fields(Config)[1:]:
        assert f"\n |      {each.name} (default {each.default!r}): " in text, each.name
    assert "tokens computed in one step" in text and "{options}" not in text


def test_an_llm_says_what_it_is():
    llm = LLM("bundled", max_model_len=100, **OPTIONS)
    said = f"LLM {str(MODEL_DIRECTORY)!r}, dtype=float32, device=cpu, max_model_len=100, num_kvcache_blocks=64>"
    assert repr(llm) == f"<{said}"
    llm.close()
    assert repr(llm) == f"<closed {said}"


# Threads


def test_calls_of_several_threads_wait_for_each_other(llm):
    """`llm` has queue_calls=True."""
    questions = [f"Q: What is {n} + 30?\nA:" for n in range(8)]
    expected, found = texts(llm.generate(questions, GREEDY)), {}

    def work(index: int) -> None:
        found[index] = texts(llm.generate(questions[index], GREEDY, use_tqdm=False))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [text for index in range(8) for text in found[index]] == expected


def test_a_queue_does_not_let_a_signal_handler_wait_for_its_own_call(llm, monkeypatch):
    step = llm.engine.step

    def interrupted():
        signal.raise_signal(signal.SIGUSR1)
        return step()

    before = signal.signal(signal.SIGUSR1, lambda number, frame: llm.generate(SUM, GREEDY))
    try:
        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(RuntimeError, match="in the middle of a call, so a signal handler or a source"):
            llm.generate(SUM, GREEDY)
    finally:
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.undo()
    assert texts(llm.generate(SUM, GREEDY)) == [" 42"]


def test_a_queue_does_not_wait_for_an_iterator(llm):
    """The iterator might be this very thread's."""
    outputs = llm.generate_iter([SUM, SUM], GREEDY)
    next(outputs)
    with pytest.raises(RuntimeError, match="an iterator of generate_iter has not finished"):
        llm.generate(SUM, GREEDY)
    assert texts(outputs) == [" 42"]


@pytest.mark.parametrize("waits", [True, False])
def test_a_guard_lets_other_threads_wait_or_refuses_them(waits):
    guard = ExclusiveGuard("inside", "busy", waits)
    is_running, may_end, results = threading.Event(), threading.Event(), []

    def slow() -> str:
        is_running.set()
        assert may_end.wait(60)
        return "slow"

    def second() -> None:
        try:
            results.append(guard.run(lambda: "second"))
        except RuntimeError as error:
            results.append(str(error))

    first, other = threading.Thread(target=lambda: results.append(guard.run(slow))), threading.Thread(target=second)
    first.start()
    assert is_running.wait(60)
    other.start()
    other.join(0.05 if waits else 60)
    assert results == ([] if waits else ["busy"])
    may_end.set()
    first.join(60)
    other.join(60)
    assert sorted(results) == (["second", "slow"] if waits else ["busy", "slow"])
    with pytest.raises(RuntimeError, match="inside"):
        guard.run(partial(guard.run, lambda: None))
    assert guard.run(lambda: "free") == "free"


def test_the_refusal_names_the_option():
    with LLM("bundled", **OPTIONS) as llm:
        steps = llm.engine.step
        errors = []

        def step():
            def call():
                try:
                    llm.generate(SUM, GREEDY)
                except RuntimeError as error:
                    errors.append(str(error))

            thread = threading.Thread(target=call)
            thread.start()
            thread.join(60)
            return steps()

        llm.engine.step = step
        llm.generate(SUM, replace(GREEDY, max_tokens=1))
    assert "make it with queue_calls=True" in errors[0]


# The package


def test_the_package_shows_its_names_before_they_are_imported():
    """They were not in dir(), and `nanovllm.outputs` was an AttributeError until something imported it."""
    code = (
        "import nanovllm; print({*nanovllm.__all__} <= {*dir(nanovllm)}, nanovllm.outputs.RequestOutput.__name__, "
        "nanovllm.LLM is nanovllm.llm.LLM, hasattr(nanovllm, 'no_name'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True RequestOutput True False\n", done.stderr


def test_an_import_that_fails_says_why(tmp_path):
    """`from nanovllm import LLM` said "cannot import name 'LLM'" if a library was broken."""
    (tmp_path / "numpy.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "from nanovllm import LLM"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert re.search(r"ImportError: nanovllm\.llm cannot be imported: .*numpy.* has no attribute", done.stderr)


def test_a_name_too_long_for_a_directory_is_refused():
    with pytest.raises(ValueError, match="cannot be a directory: File name too long"):
        Preflight("a" * 5000)


def test_a_context_is_compared_by_its_tokens_alone(llm):
    """Its repr was asked for."""

    class Odd:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    rows = llm.loglikelihood(["a", np.array([97]), None, [97]], ["b"] * 4, use_tqdm=False)
    assert [row.error is None for row in rows] == [True, True, False, True]
    assert rows[0].total == pytest.approx(rows[1].total) == pytest.approx(rows[3].total)
    assert key_of([97, 98]) == key_of(np.array([97, 98])) != key_of([97]) and key_of(Odd()) is None
