"""The estimate of a dry run: which rows are measured, and how the estimate follows from them."""

import json
import os
import random
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from support.fake_llm import FakeLLM

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobOptions, estimate
from nanovllm.jobs.cli import main
from nanovllm.jobs.estimate import Pace, num_rows_of_sample
from nanovllm.jobs.job import Job
from nanovllm.jobs.report import in_words
from nanovllm.jobs.timeline import COUNTERS

MODEL = str(MODEL_DIRECTORY)


class Batch:
    """An engine on its own clock. A step gives each running row a token, and computes the prompts of the rows that join
    it; every token has its price.

    Args:
        size: rows that run together.
    """

    def __init__(self, size: int, monkeypatch):
        self._size = size
        self.seconds, self._max_running = 0.0, 0
        self._num_tokens = {"num_prefill_tokens": 0, "num_decode_tokens": 0}
        monkeypatch.setattr(estimate.time, "monotonic", lambda: self.seconds)

    def metrics(self) -> dict[str, int]:
        return {**dict.fromkeys(COUNTERS, 0), **self._num_tokens, "max_batch_size": self._max_running}

    def run(self, rows: list[tuple[int, int]], update=lambda finished, errors: None) -> None:
        """`rows`: tokens of the prompt and of the completion, in the order in which they run."""
        waiting = rows[::-1]
        running: list[int] = []
        finished = 0
        while waiting or running:
            decodes = len(running)
            joining = [waiting.pop() for _ in range(min(len(waiting), self._size - len(running)))]
            self._max_running = max(self._max_running, decodes + len(joining))
            prefill = sum(num_prompt for num_prompt, _ in joining)
            self.seconds += 0.002 + 1e-5 * decodes + 2e-6 * prefill
            self._num_tokens["num_prefill_tokens"] += prefill
            self._num_tokens["num_decode_tokens"] += decodes
            running = [left - 1 for left in running] + [num_new - 1 for _, num_new in joining]
            for _ in range(running.count(0)):
                finished += 1
                update(finished, 0)
            running = [left for left in running if left]


def uniform(rng):
    return rng.randint(50, 500), rng.randint(20, 200)


def half_short(rng):
    return 200, rng.choice([5, 500])


def few_long(rng):
    return 100, rng.choice([*[50] * 9, 800])


def labels(rng):
    return rng.randint(300, 1500), 1


JOBS = {kind.__name__: kind for kind in (uniform, half_short, few_long, labels)}


def two_tasks(rng, share):
    """Texts, and then labels: rows of a window are sorted, so one task comes after the other."""
    return (200, rng.randint(100, 300)) if share < 0.5 else labels(rng)


@pytest.mark.parametrize("job", [*JOBS, "two_tasks"])
def test_a_sample_predicts_the_time_of_all_rows(monkeypatch, job):
    size, times = 256, 50
    rng = random.Random(0)
    draw = JOBS.get(job)
    rows = [[draw(rng) if draw else two_tasks(rng, place / 1024) for place in range(1024)] for _ in range(times)]
    batch = Batch(size, monkeypatch)
    pace = Pace(1024, 1, batch.metrics)
    batch.run(rows[0], pace.update)
    pace.measure()
    sample_seconds = batch.seconds
    whole = Batch(size, monkeypatch)
    whole.run([row for part in rows for row in part])
    assert pace.seconds_of(times * 1024) == pytest.approx(whole.seconds, rel=0.12)
    assert pace.seconds_of(512) == pytest.approx(sample_seconds / 2)


def test_the_batch_empties_only_once(monkeypatch):
    """The mean rate of a small sample would be wrong: emptying the batch is a large part of its time."""
    rng = random.Random(0)
    rows = [uniform(rng) for _ in range(512)]
    batch = Batch(128, monkeypatch)
    pace = Pace(512, 1, batch.metrics)
    batch.run(rows, pace.update)
    pace.measure()
    sample_seconds = batch.seconds
    whole = Batch(128, monkeypatch)
    whole.run(rows * 50)
    assert pace.seconds_of(512 * 50) == pytest.approx(whole.seconds, rel=0.06)
    assert sample_seconds * 50 > 1.1 * whole.seconds


@pytest.mark.parametrize("num_measured", [1, 2, 3, 16, 17])
def test_a_sample_that_never_fills_the_batch_gives_its_mean(monkeypatch, num_measured):
    batch = Batch(64, monkeypatch)
    pace = Pace(num_measured, 1, batch.metrics)
    batch.run([(10, 20 + place) for place in range(num_measured)], pace.update)
    pace.measure()
    assert not pace.filled_the_batch
    for num_rows in (num_measured, 10 * num_measured):
        assert pace.seconds_of(num_rows) == pytest.approx(batch.seconds * num_rows / num_measured)


@pytest.mark.parametrize("rows_in_batches", [1.25, 1.5, 2, 3, 4])
@pytest.mark.parametrize("spread", [0, 2])
def test_rows_that_finish_together_are_no_free_lunch(monkeypatch, rows_in_batches, spread):
    """Marks of one step once made prices of 0, and an estimate 50 times too low."""
    rng = random.Random(0)
    num_rows = int(64 * rows_in_batches)
    rows = [(100, 98 + rng.randint(0, spread)) for _ in range(num_rows)]
    batch = Batch(64, monkeypatch)
    pace = Pace(num_rows, 1, batch.metrics)
    batch.run(rows, pace.update)
    pace.measure()
    whole = Batch(64, monkeypatch)
    whole.run(rows * 40)
    assert (
        0.85 * whole.seconds <= pace.seconds_of(40 * num_rows) <= (2 if rows_in_batches < 4 else 1.15) * whole.seconds
    )


@pytest.mark.parametrize(
    ("amounts", "seconds", "expected"),
    [
        ([[1, 0], [0, 2], [1, 2]], [3, 10, 13], [3, 5]),
        ([[1, 2], [2, 4]], [5, 10], [1, 2]),  # proportional, so all prices that give these seconds are right
        ([[1, 9], [9, 1]], [9, 0], [0, 0.9]),  # one would be negative
        ([[1, 0], [2, 0]], [2, 4], [2, 0]),
        ([[0, 0], [0, 0]], [1, 2], None),
    ],
)
def test_prices_make_up_all_the_seconds_and_none_is_negative(amounts, seconds, expected):
    amounts = np.array(amounts, float)
    prices = estimate._prices(amounts, np.array(seconds, float))
    if expected is None:
        assert prices is None
    else:
        assert prices == pytest.approx(expected) and (amounts @ prices).sum() == pytest.approx(sum(seconds))


def test_tokens_that_come_late_are_counted(monkeypatch):
    """Replicas report them some tenths of a second later, and the last ones at their end."""
    rng = random.Random(0)
    rows = [uniform(rng) for _ in range(1024)]
    batch = Batch(128, monkeypatch)
    told: list[tuple[float, dict]] = [(0.0, batch.metrics())]

    def metrics():
        told.append((batch.seconds, batch.metrics()))
        return next(found for seconds, found in reversed(told) if seconds <= max(batch.seconds - 0.2, 0))

    pace = Pace(1024, 1, metrics)
    batch.run(rows, pace.update)
    batch.seconds += 9  # until the replicas have ended
    pace.measure()
    whole = Batch(128, monkeypatch)
    whole.run(rows * 20)
    assert pace.seconds_of(1024 * 20) == pytest.approx(whole.seconds, rel=0.12)


@pytest.mark.parametrize(
    ("rows_at_a_time", "num_prompt", "expected"),
    [(1024, 100, 4096), (8, 100, 32), (1024 / 8, 100, 512), (1024, 2000, 2**22 // 2000), (1024, 2**23, 1), (0.5, 1, 2)],
)
def test_a_sample_fills_the_batch_and_is_smaller_where_prompts_are_long(rows_at_a_time, num_prompt, expected):
    """Tokens that the prefix cache serves do not count."""
    summary = SimpleNamespace(
        num_prompt_tokens=9000 * (num_prompt + 5000), num_shared_tokens=9000 * 5000, num_prompts=10_000, num_errors=1000
    )
    assert num_rows_of_sample(rows_at_a_time, summary) == expected


@pytest.mark.parametrize("num_items", [0, 1, 15, 16, 17, 35, 1000])
@pytest.mark.parametrize("num_wanted", [1, 15, 16, 34, 500])
def test_stretches_hold_each_item_once(num_items, num_wanted):
    found = estimate._stretches(range(num_items), num_wanted)
    assert len(set(found)) == len(found) and found == sorted(found)
    assert min(num_wanted, num_items) - 16 <= len(found) <= min(num_wanted + 15, num_items)
    if num_items > num_wanted > 1:
        assert found[0] == 0 and found[-1] == num_items - 1


@pytest.fixture(autouse=True)
def nothing_made():
    FakeLLM.made = []


def run_dry(tmp_path, rows, llm=FakeLLM, **options):
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"dry_run": True, "estimate": True, **options}
    return Job(JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), MODEL, **options), llm).run()


def test_a_dry_run_measures_rows_from_the_whole_input_and_keeps_nothing(tmp_path):
    """If groups of rows begin alike, whole groups run."""
    rng = random.Random(1)
    rows = [{"id": f"{place}", "prompt": f"group {place % 200:03} {place}"} for place in range(2000)]
    rng.shuffle(rows)
    rows += [{"id": "0", "prompt": "again"}, {"id": "bad"}]
    report = run_dry(tmp_path, rows, engine={"max_num_seqs": 80}, price_per_hour=36_000_000)
    assert "2,002 rows, of which 2 cannot run" in in_words(report) and "estimate for the whole job" in in_words(report)
    measured = report["estimate"].pop("seconds")
    assert set(measured) == {"start", "rows"} and measured["rows"] > 0
    assert report["estimate"].pop("cost") == pytest.approx(10_000 * sum(measured.values()))
    assert report["estimate"].pop("filled_the_batch") in (True, False)  # depends on a real clock
    assert report["estimate"] == {"measured_rows": 320, "output_tokens": 8000}
    assert report["rows"] == {"total": 2002, "finished": 0, "finished_before": 0, "errors": 2}
    assert sum(kind["rows"] for kind in report["errors"]) == 2 and report["tokens"] == {}
    assert report["preflight"]["checked_rows"] == 2002 and report["preflight"]["num_prompts"] == 2000
    assert report["seconds"].keys() == {"preflight", "estimate"}
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    groups = [made.split()[1] for made in FakeLLM.made]
    assert len(groups) == 320 == len(set(FakeLLM.made))
    whole = [group for group in set(groups) if groups.count(group) == 10]
    assert len(whole) >= 16 and min(whole) < "020" and max(whole) > "180"


def test_all_rows_of_a_small_job_are_measured(tmp_path):
    report = run_dry(tmp_path, [{"id": f"{place}", "prompt": "x"} for place in range(50)])
    assert report["estimate"]["measured_rows"] == 50 == len(FakeLLM.made)
    assert report["estimate"]["filled_the_batch"] and "(measured: 50 rows)" in in_words(report)
    assert report["estimate"]["output_tokens"] == 200


@pytest.mark.parametrize("rows", [[], [{"id": "bad"}], [{"id": "long", "prompt": "x" * 5000}]])
def test_without_rows_that_can_run_there_is_no_estimate(tmp_path, rows):
    report = run_dry(tmp_path, rows)
    assert report["estimate"] is None and "no estimate, because no row can run" in in_words(report)
    assert report["rows"]["errors"] == len(rows) and not FakeLLM.made


def test_rows_of_several_completions_fill_the_batch_sooner(tmp_path):
    rows = [{"id": f"{place}", "prompt": "x", "params": {"n": 4}} for place in range(500)]
    report = run_dry(tmp_path, rows, engine={"max_num_seqs": 80}, params={"temperature": 1.0})
    assert report["estimate"]["measured_rows"] == 80 and report["estimate"]["output_tokens"] == 500 * 4 * 4


def test_a_sample_that_generates_very_much_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "_MAX_NEW_TOKENS", 400)

    class Counting(FakeLLM):
        def complete(self, number, prompt, params):
            self._metrics["num_decode_tokens"] += 4
            return super().complete(number, prompt, params)

    report = run_dry(tmp_path, [{"id": f"{place}", "prompt": "x"} for place in range(500)], Counting)
    assert 100 <= report["estimate"]["measured_rows"] < 150 and report["estimate"]["output_tokens"] == 2000


def test_that_the_batch_was_never_full_is_said(tmp_path):
    rows = [{"id": f"{place}", "prompt": "x"} for place in range(50)]
    report = run_dry(tmp_path, rows, engine={"max_num_seqs": 8})
    report["estimate"]["filled_the_batch"] = False
    assert "(measured: 32 rows, which never filled the batch: probably too high)" in in_words(report)


def test_all_bad_rows_are_counted_by_kind(tmp_path):
    rows = [{"id": f"{place}", "promt": "x"} for place in range(3000)]
    rows += [{"id": f"long {place}", "token_ids": [1] * 1500} for place in range(1500)]
    report = run_dry(tmp_path, rows, estimate=False)
    assert [kind["rows"] for kind in report["errors"]] == [3000, 1500] and report["rows"]["errors"] == 4500
    assert "4,500 rows, of which 4,500 cannot run" in in_words(report)
    report = run_dry(tmp_path, rows, estimate=False, preflight="sample")
    report["preflight"]["checked_rows"] = 100
    assert "of which at least " in in_words(report)


def test_rows_are_chosen_among_those_that_can_run(tmp_path, monkeypatch):
    """A broken row that is far longer than all others was once the only one to choose from."""
    monkeypatch.setattr(estimate, "_BYTES_TO_READ", 1000)
    rows = [{"id": "bad", "promt": "x" * 100_000}, *({"id": f"{place:03}", "prompt": "x"} for place in range(200))]
    assert 20 < run_dry(tmp_path, rows)["estimate"]["measured_rows"] < 60  # they take 28 bytes each


def test_a_signal_stops_the_sample(tmp_path):
    class Interrupted(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 100:
                os.kill(os.getpid(), signal.SIGINT)
            return super().complete(number, prompt, params)

    with pytest.raises(KeyboardInterrupt):
        run_dry(tmp_path, [{"id": f"{place}", "prompt": "x"} for place in range(500)], Interrupted)
    assert 100 < len(FakeLLM.made) < 120


@pytest.mark.parametrize("options", [{"dry_run": False}, {"preflight": "off"}])
def test_an_estimate_needs_a_dry_run(tmp_path, options):
    with pytest.raises(ValueError, match="estimate needs dry_run"):
        run_dry(tmp_path, [], **options)


def test_the_command_estimates_with_a_model(tmp_path, capsys):
    rows = [{"id": number, "prompt": f"Q: What is {number} + 3?\nA:"} for number in range(100)]
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "bundled"]
    command += ["--max-tokens", "5", "--ignore-eos", "--max-num-seqs", "4", "--dry-run", "--estimate"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "500 generated tokens (measured: 16 rows)" in said
    assert not (tmp_path / "out").exists()
