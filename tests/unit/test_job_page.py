"""The page of a job's report: what it is made of, and that nothing in it comes from elsewhere or runs."""

import html
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from support.fake_llm import FakeLLM

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import figures, page, page_figures
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import Job
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.page import page_of
from nanovllm.jobs.report import Progress
from nanovllm.jobs.timeline import COUNTERS, Lengths, Timeline
from nanovllm.replicas.pool import merged_metrics

HOSTILE = """</td></table><script>alert('x')</script><img src=https://evil.example/a onerror="alert(1)">&amp;\x1b[31m"""


class FakeRun:
    """A clock and counters that a test advances."""

    def __init__(self):
        self.now, self.calls = 100.0, 0
        self.counts = dict.fromkeys(COUNTERS, 5)

    def metrics(self):
        self.calls += 1
        return dict(self.counts)

    def timeline(self, max_intervals=1024) -> Timeline:
        return Timeline(self.metrics, max_intervals, lambda: self.now)

    def advance(self, seconds: float, **counts: float) -> None:
        self.now += seconds
        for name, count in counts.items():
            self.counts[name] += count


def timeline_of(num_seconds: int, **per_second: float) -> Timeline:
    run = FakeRun()
    timeline = run.timeline()
    for _ in range(num_seconds):
        run.advance(1.0, **{"num_steps": 10, **per_second})
        timeline.sample()
    timeline.close()
    return timeline


def lengths_of(prompts, completions=()) -> Lengths:
    return Lengths(Counter(prompts), Counter(completions))


def report_of(**changes):
    report = {
        "rows": {"total": 12, "finished": 12, "finished_before": 0, "errors": 0},
        "errors": [],
        "seconds": {"preflight": 0.5, "start": 2.0, "rows": 100.0},
        "tail_seconds": None,
        "tokens": {
            "prompt": 1000, "prefix_cache_hit_rate": 0.25, "output": 5000, "prompt_per_second": 10.0,
            "output_per_second": 50.0,
        },
        "preemptions": 3,
        "device_seconds": 102.5,
    }  # fmt: skip
    return report | changes


# The timeline


@pytest.mark.parametrize("max_intervals", [2, 8, 1024])
def test_a_timeline_keeps_each_token_and_its_bound(max_intervals):
    """Through any number of merges, for a job of hours."""
    rng, run = random.Random(max_intervals), FakeRun()
    timeline = run.timeline(max_intervals)
    before = dict(run.counts)
    for _ in range(10_000):
        run.advance(rng.choice((0.01, 0.3, 1.0, 7.0)), **{name: rng.randrange(100) for name in COUNTERS})
        timeline.sample()
        assert len(timeline.intervals) < max_intervals
    timeline.close()
    assert len(timeline.intervals) <= max_intervals
    for name in COUNTERS:
        assert sum(each.counts[name] for each in timeline.intervals) == run.counts[name] - before[name]
    assert timeline.intervals[0].begin == 0 and timeline.intervals[-1].end == pytest.approx(run.now - 100)
    assert all(one.end == other.begin for one, other in pairwise(timeline.intervals))
    if max_intervals == 1024:
        assert len(timeline.intervals) >= 512, "as fine as its bound allows"


def test_metrics_are_asked_for_at_most_once_per_second():
    run = FakeRun()
    timeline = run.timeline()
    for _ in range(1000):
        run.advance(0.125)
        timeline.sample()
    assert run.calls == 1 + 125
    assert {each.seconds for each in timeline.intervals} == {1.0}


def test_a_long_job_has_intervals_of_equal_length():
    """Otherwise its end would be shown finer and finer, and its beginning in ever fewer intervals."""
    run = FakeRun()
    timeline = run.timeline(8)
    for _ in range(1000):
        run.advance(1.0)
        timeline.sample()
    assert {each.seconds for each in timeline.intervals} == {128.0} and run.calls < 50


def test_progress_ends_its_timeline_with_the_last_tokens():
    run = FakeRun()
    timeline = Timeline(run.metrics)
    progress = Progress(2, 0, run.metrics, timeline=timeline)
    run.advance(0, num_decode_tokens=7)
    progress.update(2, 0)
    progress.close()
    assert [each.counts["num_decode_tokens"] for each in timeline.intervals] == [7]


def test_late_tokens_of_replicas_are_no_moment_of_great_speed():
    run = FakeRun()
    timeline = run.timeline()
    run.advance(2.0, num_decode_tokens=100)
    timeline.sample()
    run.advance(0.01, num_decode_tokens=20)
    timeline.close()
    assert [each.per_second("num_decode_tokens") for each in timeline.intervals] == [pytest.approx(120 / 2.01)]
    timeline.close()
    assert len(timeline.intervals) == 1, "no interval without time"


def test_levels_are_means_over_the_steps_and_unknown_without_steps():
    run = FakeRun()
    timeline = run.timeline()
    for num_steps, num_running in ((2, 20), (0, 0), (6, 240)):
        run.advance(1.0, num_steps=num_steps, num_running_of_steps=num_running)
        timeline.sample()
    first, idle, last = timeline.intervals
    assert (first.per_step("num_running_of_steps"), last.per_step("num_running_of_steps")) == (10, 40)
    assert str(idle.per_step("num_running_of_steps")) == "nan"
    assert first.merged(idle).merged(last).per_step("num_running_of_steps") == 260 / 8


def test_levels_of_replicas_are_those_of_a_mean_replica():
    one, other = ({**dict.fromkeys(COUNTERS, 0), "num_steps": 10, "kvcache_use_of_steps": use} for use in (4.0, 8.0))
    found = iter([merged_metrics([{}, {}], [dict.fromkeys(COUNTERS, 0)]), merged_metrics([one], [other])])
    times = iter([0.0, 2.0])
    timeline = Timeline(lambda: next(found), clock=lambda: next(times))
    timeline.sample()
    assert timeline.intervals[0].per_step("kvcache_use_of_steps") == pytest.approx(0.6)


def test_each_length_is_in_the_bin_that_names_it():
    for length in [*range(200), 2**20 - 1, 2**20, 2**31]:
        starts, counts = page_figures._bins(Counter({length: 7}))
        place = counts.index(7)
        assert starts[place] <= length < starts[place + 1] and sum(counts) == 7 and len(starts) == len(counts) + 1
        assert len(counts) >= 6, "a single bar would fill the figure"
    starts, counts = page_figures._bins(Counter([3, 100, 7, 100]))
    found = {start: count for start, count in zip(starts, counts, strict=False) if count}
    assert found == {3: 1, 6: 1, 96: 2} and (starts[0], starts[-1]) == (3, 128)


# The page


class Reader(HTMLParser):
    """Reads a page as a browser does, and checks that its elements are closed in order."""

    VOID = {"meta", "br", "wbr", "path", "use", "rect"}  # in SVG these end with a slash

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.open, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))

    def values_of(self, name: str) -> list[str]:
        return [value for each, value in self.attributes if each == name]


@cache
def full_page() -> str:
    """A page with all of its parts."""
    return make_page()


def make_page(**changes) -> str:
    timeline = timeline_of(
        30, num_prefill_tokens=700, num_decode_tokens=5000, num_preemptions=1, num_running_of_steps=80,
        num_waiting_of_steps=5, kvcache_use_of_steps=4.5,
    )  # fmt: skip
    errors = [{"rows": 2, "first": f"row 1, id {HOSTILE!r}", "error": HOSTILE}]
    manifest = {"input": {HOSTILE: ["a", 1, None]}, "files": [{"path": HOSTILE}, {"path": "b"}], "empty": {}}
    report = report_of(errors=errors, manifest=manifest, cost={"total": 1.5, "per_million_output_tokens": 300.0})
    return page_of(report | changes, HOSTILE, timeline, lengths_of([3, 5, 900], [64] * 9))


CAPTIONS = [
    "Prefill tokens per second", "Decode tokens per second", "Running rows", "Waiting rows", "KV cache in use",
    "Preemptions per second", "Lengths of 3 prompts", "Lengths of 9 completions",
]  # fmt: skip


def captions_in(text: str) -> list[str]:
    return re.findall("<figcaption>(.*?)<small>", text)


def test_a_page_has_all_its_parts_and_they_are_well_formed():
    text = full_page()
    found = Reader(text)
    assert captions_in(text) == CAPTIONS and found.tags.count("svg") == len(CAPTIONS)
    for said in (
        "mean 5k, highest 5k",
        "mean 8, highest 8 (means over steps)",
        "mean 45, highest 45 percent",
        "longest 900",
    ):
        assert said in found.text
    for heading in ("Timeline", "Lengths", "Error rows", "Numbers of the report", "Manifest"):
        assert f"<h2>{heading}</h2>" in text
    assert "300.0000 per million generated tokens" in found.text and "cost.total1.5" in found.text
    assert "files.2.path" in found.text and "emptynone" in found.text and "a, 1, None" in found.text
    assert 'name="viewport" content="width=device-width' in text and "prefers-color-scheme: dark" in text


def test_a_page_loads_nothing_and_runs_nothing():
    text = full_page()
    found = Reader(text)
    assert set(found.tags) & {"script", "link", "img", "iframe", "object", "embed", "base", "image", "form"} == set()
    names = {name for name, _ in found.attributes}
    assert not [name for name in names if name.startswith("on")] and not names & {"src", "srcset", "action"}
    assert all(value.startswith("#") for name in ("href", "xlink:href") for value in found.values_of(name))
    assert "@import" not in text and set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "default-src 'none'" in found.values_of("content")[-1]
    assert found.tags.count("style") == 1, "a figure's style would be that of the whole page"
    without_data = text.replace("<wbr>", "").replace("https://evil.example", "")
    assert "http:" not in without_data and "https:" not in without_data


def test_ids_are_unique_and_what_figures_refer_to_is_there():
    """matplotlib gives each figure the same ids."""
    text = full_page()
    found = Reader(text)
    ids = found.values_of("id")
    assert len(ids) == len(set(ids)) > 0
    used = {value[1:] for value in found.values_of("xlink:href")} | set(re.findall(r"url\(#([^)]*)\)", text))
    assert used and used <= set(ids)


def test_hostile_texts_are_shown_and_not_run():
    text = full_page()
    found = Reader(text)
    shown = HOSTILE.replace("\x1b", "\ufffd")
    assert found.text.count(shown) >= 4, "in the heading, the error, and the manifest's keys and values"
    assert "\x1b" not in text
    harmless = make_page(errors=[], manifest={})
    assert set(found.tags) == set(Reader(harmless).tags) | {"br", "thead", "td", "span"}
    page_of(report_of(), "half of a pair: \ud83d").encode()


@pytest.mark.parametrize(
    ("num_finished", "said"),
    [(12, "All rows are finished."), (11, "1 row is left. The job"), (2, "10 rows are left. The job")],
)
def test_the_head_says_how_many_rows_are_left(num_finished, said):
    rows = {"total": 12, "finished": num_finished, "finished_before": 0, "errors": 0}
    assert f"<p>{said}" in page_of(report_of(rows=rows), "job")


def test_equal_arguments_give_equal_pages():
    assert full_page() == make_page()


def test_many_kinds_of_errors_are_all_there_behind_a_click():
    errors = [{"rows": 100 - n, "first": f"row {n}", "error": f"error {n}."} for n in range(60)]
    text = page_of(report_of(errors=errors), "job")
    before, _, after = text.partition("<details>")
    assert all((f"error {n}." in before) == (n < 20) and (f"error {n}." in after) == (n >= 20) for n in range(60))
    assert "2,420 rows with 40 other errors" in after
    assert "<details>" not in page_of(report_of(errors=errors[:20]), "job")
    assert "80 rows with 1 other error<" in page_of(report_of(errors=errors[:21]), "job")


def test_figures_of_zeros_are_left_out():
    timeline = timeline_of(5, num_prefill_tokens=10, num_running_of_steps=10)
    text = page_of(report_of(), "job", timeline, lengths_of([1]))
    assert captions_in(text) == ["Prefill tokens per second", "Running rows", "Lengths of 1 prompt"]


def test_a_figure_has_a_gap_where_nothing_ran():
    run = FakeRun()
    timeline = run.timeline()
    for num_steps in (10, 10, 0, 10):
        run.advance(1.0, num_steps=num_steps, num_running_of_steps=num_steps)
        timeline.sample()
    text = page_of(report_of(), "job", timeline)
    assert "Where a figure has a gap, no step began." in text and "mean 1, highest 1" in text
    stroke = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--data\)', text)
    assert [path.count("M") for path in stroke] == [2]
    assert "has a gap" not in page_of(report_of(), "job", timeline_of(4, num_running_of_steps=10))


@pytest.mark.parametrize(
    ("seconds", "unit"), [(100, "seconds"), (1000, "minutes"), (20_000, "hours"), (500_000, "days")]
)
def test_the_axis_of_time_has_a_fitting_unit(seconds, unit):
    assert figures.time_unit(seconds)[0] == unit


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.5, "0.5"), (999, "999"), (1500, "1.5k"), (2e6, "2M"), (12_300_000, "12.3M")]
)
def test_numbers_at_axes_are_short(number, text):
    assert figures.short_number(number) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12_345, "12,345"), (0.123456, "0.1235"), (12_345.6, "12,346"), (True, "True"), ("x", "x")]
)
def test_numbers_of_the_report_are_readable(value, text):
    assert page._number(value) == text


# Jobs


@pytest.fixture
def job(tmp_path):
    """Runs a job of these rows; returns its report and its page."""

    def run(rows, llm=FakeLLM, **options):
        (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "report.HTML"
        default = JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), str(MODEL_DIRECTORY), report=path)
        report = Job(replace(default, **options), llm).run()
        text = path.read_text(encoding="utf-8")
        return report, text, Reader(text).text

    return run


def rows_of(count, **keys):
    return [{"id": f"r{number}", "prompt": f"prompt {number}", **keys} for number in range(count)]


@pytest.fixture
def slow(monkeypatch):
    """Every call of the clock takes a tenth of a second, so that a small job has a timeline."""
    now = [0.0]

    def tick():
        now[0] += 0.1
        return now[0]

    real = Timeline.__init__
    monkeypatch.setattr(Timeline, "__init__", lambda self, metrics: real(self, metrics, clock=tick))


class CountingLLM(FakeLLM):
    """Counts as an engine does."""

    def complete(self, number, prompt, params):
        for name, count in (("num_prefill_tokens", 3), ("num_steps", 1), ("num_running_of_steps", 8)):
            self._metrics[name] += count
        output = super().complete(number, prompt, params)
        self._metrics["num_decode_tokens"] = self._metrics["num_output_tokens"]
        return output


def test_a_job_writes_a_page_with_its_timeline_and_lengths(job, slow):
    report, text, shown = job(rows_of(100), CountingLLM, params={"n": 2, "temperature": 1.0}, price_per_hour=3.0)
    assert captions_in(text) == [
        "Prefill tokens per second", "Decode tokens per second", "Running rows", "Lengths of 100 prompts",
        "Lengths of 200 completions",
    ]  # fmt: skip
    assert "Job out, model" in shown and "All rows are finished." in shown and "Finished rows100of 100" in shown
    assert f"Cost of this run{report['cost']['total']:,.4f}" in shown
    assert "mean 3 tokens, longest 3, together 300" in shown and "mean 4 tokens, longest 4, together 800" in shown


@pytest.mark.parametrize("name", [None, "report.json"])
def test_only_a_page_measures_the_job(job, tmp_path, monkeypatch, name):
    for kind in ("Timeline", "Lengths"):
        monkeypatch.setattr(f"nanovllm.jobs.job.{kind}", None)
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    path = None if name is None else tmp_path / name
    options = JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), str(MODEL_DIRECTORY), report=path)
    assert Job(options, FakeLLM).run()["rows"]["finished"] == 1
    with pytest.raises(TypeError, match="not callable"):
        job(rows_of(1), restart=True)


def test_a_job_without_rows_says_so(job):
    _, text, shown = job([])
    assert "The input has no rows." in shown and "This run computed no rows" in shown and captions_in(text) == []


def test_a_single_row_has_no_timeline_but_lengths(job):
    _, text, shown = job(rows_of(1))
    assert "for too short a time, or finished too rarely" in shown
    assert captions_in(text) == ["Lengths of 1 prompt", "Lengths of 1 completion"]


def test_rows_that_all_end_in_errors_have_no_lengths(job):
    class Refusing(FakeLLM):
        def complete(self, number, prompt, params):
            return replace(super().complete(number, prompt, params), error=f"no {prompt}", outputs=[])

    report, text, shown = job(rows_of(5), Refusing)
    assert report["rows"]["errors"] == 5 and captions_in(text) == [] and "Error rows5" in shown
    assert "no prompt" in shown and "Lengths" not in shown


def test_a_dry_run_shows_what_was_checked(job):
    report, text, shown = job([*rows_of(5), {"id": "bad"}], dry_run=True)
    assert "This was a dry run" in shown and "Rows66 checked" in shown and "Cannot run1" in shown
    assert f"Prompt tokens{report['preflight']['num_prompt_tokens']}" in shown and "Timeline" not in shown
    assert "Rows that cannot run" in shown and captions_in(text) == []


def test_an_estimate_is_a_headline(job):
    report, _, shown = job(rows_of(8), dry_run=True, estimate=True, price_per_hour=7.0)
    assert "Estimated time of the rows" in shown and "measured with 8 rows" in shown
    assert f"Estimated cost{report['estimate']['cost']:,.4f}" in shown
    _, _, shown = job([{"id": "bad"}], dry_run=True, estimate=True)
    assert "Estimatenonebecause no row can run" in shown


def test_a_job_to_standard_output_has_a_page_too(job, capfdbinary):
    _, _, shown = job(rows_of(4), output="-")
    assert "Job to standard output" in shown and "Lengths of 4 prompts" in shown
    assert len(capfdbinary.readouterr().out.splitlines()) == 4


def test_rows_of_one_forward_pass_have_no_decode(job, slow):
    _, text, shown = job(rows_of(60, task="embed"), CountingLLM)
    assert captions_in(text) == ["Prefill tokens per second", "Running rows", "Lengths of 60 prompts"]
    assert "Generated" not in shown


def test_a_resumed_job_shows_its_last_run_and_says_so(job, tmp_path):
    class Dies(FakeLLM):
        def complete(self, number, prompt, params):
            if len(self.made) == 6:
                raise RuntimeError("out of memory")
            return super().complete(number, prompt, params)

    FakeLLM.made.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        job(rows_of(10), Dies)
    assert not (tmp_path / "report.HTML").exists()
    _, text, shown = job(rows_of(10))
    assert "Earlier runs finished 6 rows. Figures show this run alone." in shown
    assert "Finished rows10of 10, 6 by earlier runs" in shown and captions_in(text)[0] == "Lengths of 4 prompts"
    _, text, shown = job(rows_of(10))  # the job is finished
    assert "This run computed no rows" in shown and captions_in(text) == []
    assert "The job was finished before, and the numbers are those of the run that finished it." in shown


@pytest.mark.parametrize(("name", "begins"), [("r.htm", "<!doctype"), ("r.HTM", "<!doctype"), ("r.xhtml", "{")])
def test_the_name_of_a_report_says_whether_it_is_a_page(tmp_path, name, begins):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    path = tmp_path / name
    Job(JobOptions(str(tmp_path / "in"), str(tmp_path / "o"), str(MODEL_DIRECTORY), report=path), FakeLLM).run()
    assert path.read_text(encoding="utf-8").startswith(begins)


def test_without_matplotlib_a_page_is_refused_before_work_starts(job, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    FakeLLM.made.clear()
    with pytest.raises(JobError, match=r"report\.HTML is a page.*needs? matplotlib .*pip install .*JSON"):
        job(rows_of(3))
    assert FakeLLM.made == [] and [path.name for path in tmp_path.iterdir()] == ["in"]
    path = tmp_path / "report.json"
    report = Job(JobOptions(str(tmp_path / "in"), str(tmp_path / "out"), str(MODEL_DIRECTORY), report=path), FakeLLM)
    assert report.run() == json.loads(path.read_text())


def test_a_report_in_json_imports_no_matplotlib():
    script = "import sys; import nanovllm.jobs; assert 'nanovllm.jobs.page' in sys.modules; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "matplotlib" not in done.stdout.split()


# In a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """<!doctype html><body><iframe src="page.html" style="width:390px;height:4000px;border:0"></iframe><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument, boxes = [];
  for (const svg of page.querySelectorAll("svg")) {
    const of = [...svg.querySelectorAll("text")].map(each => each.getBoundingClientRect());
    boxes.push(of.map(box => [box.left, box.right, box.top, box.bottom]));
  }
  document.body.textContent = JSON.stringify({
    width: page.documentElement.scrollWidth, boxes,
    widest: Math.max(...[...page.querySelectorAll("*")].map(each => each.getBoundingClientRect().right)),
    ran: page.querySelectorAll("script, img").length,
  });
};
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_page_fits_a_phone_and_its_labels_do_not_overlap(tmp_path):
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(full_page(), encoding="utf-8")
    (tmp_path / "frame.html").write_text(MEASURE, encoding="utf-8")
    options = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --hide-scrollbars "
        "--dump-dom --allow-file-access-from-files --virtual-time-budget=5000"
    )
    command = [CHROMIUM, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path}/frame.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    found = json.loads(html.unescape(re.sub("<[^>]*>", "", dom)))
    assert found["width"] == 390 >= found["widest"] and found["ran"] == 0
    assert len(found["boxes"]) == len(CAPTIONS)
    for boxes in found["boxes"]:
        assert len(boxes) >= 4 and all(bottom - top >= 10 for *_, top, bottom in boxes)
        for index, (left, right, top, bottom) in enumerate(boxes):
            for other in boxes[:index]:
                assert right < other[0] or other[1] < left or bottom <= other[2] or other[3] <= top
