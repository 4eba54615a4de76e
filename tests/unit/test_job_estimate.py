"""The estimate of a dry run: which rows are measured, and what is made of the measurement."""

import json
import os
import random
import signal
from types import SimpleNamespace

import pytest
from fake_llm import FakeLLM

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobOptions, estimate
from nanovllm.jobs.cli import main
from nanovllm.jobs.estimate import Pace, num_rows_of_sample
from nanovllm.jobs.job import Job
from nanovllm.jobs.report import Progress

MODEL = str(MODEL_DIRECTORY)


class Batch:
    """An engine whose steps take a second and give each running row a token; rows are of random lengths.

    Args:
        size: rows that run together.
    """

    def __init__(self, size: int, monkeypatch):
        self._size, self._rng = size, random.Random(0)
        self.seconds = self._tokens = 0
        monkeypatch.setattr(estimate.time, "monotonic", lambda: self.seconds)

    def metrics(self) -> dict[str, int]:
        return {"num_prefill_tokens": 0, "num_decode_tokens": self._tokens}

    def run(self, num_rows: int, update=lambda finished, errors: None) -> None:
        waiting = [self._rng.randint(20, 200) for _ in range(num_rows)]
        running: list[int] = []
        finished = 0
        while waiting or running:
            while waiting and len(running) < self._size:
                running.append(waiting.pop())
            self.seconds += 1
            self._tokens += len(running)
            running = [left - 1 for left in running]
            for _ in range(running.count(0)):
                finished += 1
                update(finished, 0)
            running = [left for left in running if left]


@pytest.mark.parametrize("num_in_batches", [2, 4, 8])
def test_the_time_of_all_rows_is_foretold_by_some(monkeypatch, num_in_batches):
    """The mean rate of a small sample would be wrong: its batch empties soon, the job's only once."""
    size = 64
    batch = Batch(size, monkeypatch)
    pace = Pace(num_in_batches * size, batch.metrics)
    batch.run(num_in_batches * size, pace.update)
    sample_seconds = batch.seconds
    whole = Batch(size, monkeypatch)
    whole.run(100 * size)
    assert pace.seconds_of(100 * size) == pytest.approx(whole.seconds, rel=0.08)
    if num_in_batches == 2:
        assert sample_seconds * 50 > 1.3 * whole.seconds


@pytest.mark.parametrize("num_measured", range(1, 9))
def test_few_rows_give_their_mean(monkeypatch, num_measured):
    batch = Batch(1, monkeypatch)
    pace = Pace(num_measured, batch.metrics)
    batch.run(num_measured, pace.update)
    assert pace.seconds_of(num_measured) == batch.seconds
    assert pace.seconds_of(10 * num_measured) == pytest.approx(10 * batch.seconds)


def test_pace_can_stand_for_progress():
    public = {name for name in vars(Progress) if not name.startswith("_")}
    assert public <= vars(Pace).keys()


@pytest.mark.parametrize(
    ("engine", "mean_tokens", "expected"),
    [
        ({}, 100, 4096),
        ({"max_num_seqs": 8}, 100, 32),
        ({"max_num_seqs": 8, "data_parallel_size": 3}, 100, 96),
        ({}, 2000, 2**22 // 2000),
        ({}, 2**23, 1),
    ],
)
def test_a_sample_fills_the_batch_and_is_smaller_where_prompts_are_long(engine, mean_tokens, expected):
    summary = SimpleNamespace(num_prompt_tokens=9000 * mean_tokens, num_prompts=10_000, num_errors=1000)
    assert num_rows_of_sample(engine, summary) == expected


@pytest.fixture(autouse=True)
def nothing_made():
    FakeLLM.made = []


def run_dry(tmp_path, rows, llm=FakeLLM, **options):
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"dry_run": True, "estimate": True, **options}
    return Job(JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), MODEL, **options), llm).run()


def test_a_dry_run_measures_rows_from_the_whole_input_and_keeps_nothing(tmp_path):
    """Of rows in groups that begin alike, whole groups run."""
    rng = random.Random(1)
    rows = [{"id": f"{place}", "prompt": f"group {place % 200:03} {place}"} for place in range(2000)]
    rng.shuffle(rows)
    rows += [{"id": "0", "prompt": "again"}, {"id": "bad"}]
    report = run_dry(tmp_path, rows, engine={"max_num_seqs": 80}, price_per_hour=36_000_000)
    measured = report["estimate"].pop("seconds")
    assert set(measured) == {"start", "rows"} and measured["rows"] > 0
    assert report["estimate"].pop("cost") == pytest.approx(10_000 * sum(measured.values()))
    assert report["estimate"] == {"measured_rows": 320, "output_tokens": 8000}
    assert report["rows"]["finished"] == 0 and report["tokens"] == {}
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    groups = [made.split()[1] for made in FakeLLM.made]
    assert len(groups) == 320 == len(set(FakeLLM.made))
    whole = [group for group in set(groups) if groups.count(group) == 10]
    assert len(whole) >= 16 and min(whole) < "020" and max(whole) > "180"


def test_all_rows_of_a_small_job_are_measured(tmp_path):
    report = run_dry(tmp_path, [{"id": f"{place}", "prompt": "x"} for place in range(50)])
    assert report["estimate"]["measured_rows"] == 50 == len(FakeLLM.made)
    assert report["estimate"]["output_tokens"] == 200


def test_without_rows_that_can_run_there_is_no_estimate(tmp_path):
    assert "estimate" not in run_dry(tmp_path, [])
    assert run_dry(tmp_path, [{"id": "bad"}])["estimate"] is None
    assert not FakeLLM.made


def test_a_signal_stops_the_sample(tmp_path):
    class Interrupted(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 100:
                os.kill(os.getpid(), signal.SIGINT)
            return super().complete(number, prompt, params)

    report = run_dry(tmp_path, [{"id": f"{place}", "prompt": "x"} for place in range(500)], Interrupted)
    assert report["estimate"] is None and 100 < len(FakeLLM.made) < 120


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
    assert "estimate after 16 rows: " in said and "500 generated tokens" in said
    assert not (tmp_path / "out").exists()
