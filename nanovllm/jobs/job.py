"""A job: the rows of a file through an LLM, to a file, with nothing lost if it is killed.

    input ──scan──▶ _Index (what the job knows of each row) ──plan──▶ rows to run ──LLM.generate_iter──▶ journal
                                                                    error rows ────────────────────────────▲
    journal, complete ──▶ output, in the input's order

Beside `OUTPUT` there are `OUTPUT.job`, which says what the job is, and until the end `OUTPUT.part`, the journal.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.identity import check_same, identity_of, load_state, replace_durably, save_state, write_whole
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.openai_rows import OPENAI_DEFAULTS
from nanovllm.jobs.parquet import import_pyarrow, is_parquet, write_parquet
from nanovllm.jobs.plan import early_rows, in_windows
from nanovllm.jobs.report import Errors, Progress, in_words
from nanovllm.jobs.rows import JobRow, output_of, parse_row
from nanovllm.jobs.source import Source, open_source
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.preflight import Preflight, PreflightSummary
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm.jobs")

_ROWS_OF_PREFLIGHT, _ROWS_OF_PIECE = 20_000, 256


@dataclass(frozen=True)
class JobOptions:
    """What a job is to do.

    Args:
        input: JSON lines, or a Parquet file, whose name ends in ".parquet"; "-" is standard input.
        output: where the rows go, in the input's order, once all have finished; a Parquet file if the name ends in
            ".parquet". "-" is standard output, which gets lines as rows finish, and cannot be resumed.
        model: a directory or a hub name.
        engine: other options of LLM.
        params: SamplingParams of all rows, over which a row's own count. What neither gives is what the model
            recommends.
        seed: of the job. A row that samples and has no seed of its own gets one made of this and its id.
        on_error: "row" makes an error row of each row that cannot run; "stop" refuses the job before it starts.
        restart: drop what an earlier run of any job has left beside the output.
        dry_run: stop after the preflight.
        preflight: how many rows to tokenize before the weights are loaded: "full" all, "sample" at most 20,000 that are
            spread evenly, "off" none.
        seconds_between_syncs: after a power failure, at most the rows of so many seconds run again.
        price_per_hour: of the machine, in any currency, for the report.
        report: where the report goes as JSON.
    """

    input: str
    output: str
    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    on_error: Literal["row", "stop"] = "row"
    restart: bool = False
    dry_run: bool = False
    preflight: Literal["full", "sample", "off"] = "sample"
    seconds_between_syncs: float = 10.0
    price_per_hour: float | None = None
    report: Path | None = None


class _Index:
    """What a job knows of each row, in a few bytes: how much it may generate, and whether its id was there before."""

    def __init__(self, lines: Source, most_new_tokens: Callable[[JobRow], int]):
        ids, most = [], []
        self.errors: list[tuple[str, str]] = []  # the first ones
        self.num_errors = 0
        self.kinds: set[str] = set()
        for number, line in enumerate(lines.scan()):
            row = parse_row(number, line)
            # A row without an id is like no other.
            ids.append(xxhash.xxh3_64_intdigest(row.id.encode()) if row.id is not None else 0)
            most.append(0 if row.error is not None else most_new_tokens(row))
            self.kinds.add(row.kind)
            self._note(row, row.error)
        self.most_new_tokens = np.array(most, np.int64)
        self.first_use = _first_uses(np.array(ids, np.uint64), lines)
        for number in np.flatnonzero(self.first_use >= 0).tolist():
            self._note(row := self.row(number, lines.read(number)), row.error)

    def row(self, number: int, line: bytes) -> JobRow:
        row = parse_row(number, line)
        if (first := self.first_use[number]) >= 0 and row.error is None:
            return replace(row, error=f"the id {row.id!r} is already that of row {first + 1}; ids must be unique")
        return row

    def _note(self, row: JobRow, error: str | None) -> None:
        if error is not None:
            self.num_errors += 1
            if len(self.errors) < 1000:
                self.errors.append((_name(row), error))


def _first_uses(ids: np.ndarray, lines: Source) -> np.ndarray:
    """Of each row, the first row with the same id, or −1 if it is that row itself. Ids are hashes, 0 without one."""
    first_use = np.full(len(ids), -1, np.int64)
    order = np.argsort(ids, kind="stable")
    equal = np.flatnonzero((ids[order][1:] == ids[order][:-1]) & (ids[order][1:] != 0)) + 1
    firsts: dict[str | None, int] = {}
    # Two ids may have the same hash, so they are read again; in order, because a table is slow to read otherwise.
    for number in np.union1d(order[equal - 1], order[equal]).tolist():
        first = firsts.setdefault(parse_row(number, lines.read(number)).id, number)
        first_use[number] = first if first < number else -1
    return first_use


class _Params:
    """The sampling parameters of rows: what the model recommends, then those of the job, then the row's own."""

    def __init__(self, recommended: SamplingParams, params: dict[str, Any], seed: int):
        values = {each.name: getattr(recommended, each.name) for each in fields(recommended)}
        self._base = {kind: values | OPENAI_DEFAULTS.get(kind, {}) | params for kind in ("plain", *OPENAI_DEFAULTS)}
        self._seed = seed
        SamplingParams(**self._base["plain"])  # the job's own mistakes are not those of each row
        self._made = lru_cache(4096)(lambda kind, own: SamplingParams(**self._base[kind] | json.loads(own)))

    def of(self, row: JobRow) -> SamplingParams:
        """Raises TypeError or ValueError if the row's parameters do not fit the job's."""
        params = self._made(row.kind, json.dumps(row.params) if row.params else "{}")
        if params.seed is not None or params.temperature == 0:
            return params
        return replace(params, seed=xxhash.xxh3_64_intdigest((row.id or "").encode(), self._seed))

    def most_new_tokens(self, row: JobRow, most: int) -> int:
        """The most tokens that a row may generate, if no completion gets more than `most`."""
        values = self._base[row.kind]
        max_tokens, n = (row.params.get(name, values[name]) for name in ("max_tokens", "n"))
        return n * (most if max_tokens is None else min(max_tokens, most))


class Job:
    """One run of a job; see JobOptions.

    Raises, from `run`:
        JobError: it cannot start or go on; nothing finished is lost.
        OSError, TypeError, ValueError: a file or an option is wrong.
    """

    def __init__(self, options: JobOptions, make_llm: Callable[..., LLM] = LLM):
        self._options, self._make_llm = options, make_llm
        self._is_stream = options.output == "-"
        self._output = Path(options.output)
        self._state_path, self._part_path = (Path(f"{options.output}.{kind}") for kind in ("job", "part"))
        self._errors = Errors()
        self._seconds: dict[str, float] = {}
        self._running: dict[int, JobRow] = {}
        self._params_to_give: SamplingParams | None = None
        self._num_stops = 0
        self._created = int(time.time())
        self._metrics: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Runs what is left of the job. Returns the report; `report["rows"]["finished"]` tells whether all is done."""
        options = self._options
        began = time.monotonic()
        if not self._is_stream and not self._output.parent.is_dir():
            raise JobError(f"the output's directory {self._output.parent} does not exist; make it first")
        if is_parquet(options.output):
            import_pyarrow(options.output)  # now, not when all rows have run
        lines = open_source(options.input, None if self._is_stream else self._output.parent)
        try:
            with self._phase("preflight"):
                preflight = self._preflight_of_model()
                params = _Params(preflight.get_default_sampling_params(), options.params, options.seed)
                index = _Index(lines, lambda row: params.most_new_tokens(row, preflight.max_model_len))
                self._refuse_errors(index)
            if self._is_stream:
                return self._run_rows(lines, index, params, preflight, _Stdout(len(lines)), began)
            journal = self._open_journal()
            try:
                return self._resume(lines, index, params, preflight, journal, began)
            finally:
                journal.close()
        finally:
            lines.close()

    # Before the rows run

    def _preflight_of_model(self) -> Preflight:
        names = ("revision", "tokenizer", "max_model_len")
        given = {name: value for name, value in self._options.engine.items() if name in names and value is not None}
        return Preflight(self._options.model, **given)

    def _refuse_errors(self, index: _Index) -> None:
        if self._options.on_error == "stop" and index.num_errors:
            first = "; ".join(f"{row}: {error}" for row, error in index.errors[:10])
            raise JobError(f"{index.num_errors:,} rows cannot run, and --on-error stop refuses them: {first}")

    def _open_journal(self) -> Journal:
        journal = Journal(self._part_path, self._options.seconds_between_syncs)
        if self._options.restart:
            self._state_path.unlink(missing_ok=True)
            self._output.unlink(missing_ok=True)
            journal.clear()
        return journal

    def _resume(
        self, lines: Source, index: _Index, params: _Params, preflight: Preflight, journal: Journal, began: float
    ) -> dict[str, Any]:
        """Goes on with the job beside the output, or begins one."""
        options = self._options
        engine = {**options.engine, "model": options.model}
        with self._phase("recovery"):
            identity = identity_of(lines.digest, len(lines), preflight.directory, engine, options.params, options.seed)
            state = load_state(self._state_path)
            if state is None:
                if self._output.exists() or os.path.getsize(self._part_path):
                    raise JobError(
                        f"{self._output} exists and is not of this job; move it away, or replace it with --restart"
                    )
                state = {"version": 1, "identity": identity, "created": self._created, "finished": False}
                if not options.dry_run:
                    save_state(self._state_path, state)
            else:
                check_same(state["identity"], identity, self._state_path)
                self._created = state["created"]
            journal.recover(len(lines))
        if state["finished"] and self._output.exists():
            journal.remove()
            logger.info("%s is finished already", self._output)
            return state["report"]
        report = self._run_rows(lines, index, params, preflight, journal, began)
        if journal.is_complete() and not options.dry_run:
            with self._phase("output"):
                self._write_output(journal, index)
            report["seconds"] = dict(self._seconds)
            save_state(self._state_path, {**state, "finished": True, "report": report})
            journal.remove()
        if options.report is not None:
            write_whole(options.report, json.dumps(report, indent=1).encode())
        return report

    def _tokens_checked(
        self, lines: Source, index: _Index, params: _Params, preflight: Preflight
    ) -> PreflightSummary | None:
        """Tokenizes all rows or some, and says what is to be expected."""
        kind = self._options.preflight
        if kind == "off" or not len(lines):
            return None
        num_checked = len(lines) if kind == "full" else min(len(lines), _ROWS_OF_PREFLIGHT)
        numbers = np.linspace(0, len(lines) - 1, num_checked).astype(np.int64).tolist()
        refused: list[tuple[str, str]] = []
        for start in range(0, len(numbers), _ROWS_OF_PIECE):
            rows = [index.row(number, lines.read(number)) for number in numbers[start : start + _ROWS_OF_PIECE]]
            rows = [row for row in rows if row.error is None]
            checks = preflight.check([row.prompt for row in rows], [params.of(row) for row in rows])
            refused += [
                (_name(row), check.error)
                for row, check in zip(rows, checks, strict=True)
                if check.error is not None and len(refused) < 1000
            ]
        summary = preflight.summary()
        _say_preflight(summary, len(lines), index, refused)
        if refused and self._options.on_error == "stop":
            first = "; ".join(f"{row}: {error}" for row, error in refused[:10])
            raise JobError(f"{summary.num_errors:,} rows cannot run, and --on-error stop refuses them: {first}")
        return summary

    # The rows

    def _run_rows(
        self, lines: Source, index: _Index, params: _Params, preflight: Preflight, results: Any, began: float
    ) -> dict[str, Any]:
        """Runs what `results` lacks."""
        num_before = results.num_rows
        if num_before < len(lines):
            with self._phase("preflight"):
                self._tokens_checked(lines, index, params, preflight)
        if num_before == len(lines) or self._options.dry_run:
            return self._report(len(lines), num_before, results.num_rows, began)
        with self._phase("start"):
            llm = self._make_llm(self._options.model, **{**self._options.engine, "seed": self._options.seed})
        with llm, self._phase("rows"):
            progress = Progress(len(lines), num_before, llm)
            try:
                with self._stopping_at_signals():
                    self._generate(llm, self._prompts(lines, index, params, results), results, progress)
            finally:
                progress.close()
                self._metrics = llm.metrics()
        return self._report(len(lines), num_before, results.num_rows, began)

    def _generate(self, llm: LLM, prompts: Iterator[Any], results: Any, progress: Progress) -> None:
        outputs = llm.generate_iter(prompts, self._params_in_step(), ordered=False)
        is_drained = False
        for output in outputs:
            self._take(self._running.pop(int(output.request_id)), output, results)
            progress.add(1, self._errors.num_rows)
            if self._num_stops and not is_drained:
                outputs.drain()
                is_drained = True
        results.write()

    def _prompts(self, lines: Source, index: _Index, params: _Params, results: Any) -> Iterator[Any]:
        """The prompts to run, as the LLM asks for them. Rows that cannot run become output rows at once."""
        number_in_call = 0
        for row in self._planned(lines, index, results):
            if self._num_stops:
                return
            error = row.error
            if error is None:
                try:
                    self._params_to_give = params.of(row)
                except (TypeError, ValueError) as problem:
                    error = str(problem)
            if error is not None:
                self._take(replace(row, error=error), None, results)
                continue
            self._running[number_in_call] = row
            number_in_call += 1
            yield row.prompt

    def _params_in_step(self) -> Iterator[SamplingParams]:
        """The parameters of the prompt that was read last: the LLM reads them in turn."""
        while self._params_to_give is not None:
            yield self._params_to_give

    def _planned(self, lines: Source, index: _Index, results: Any) -> Iterator[JobRow]:
        early = [number for number in early_rows(index.most_new_tokens) if number not in results]
        is_early = set(early)

        def rest() -> Iterator[tuple[int, JobRow]]:
            for number in range(len(lines)):
                if number not in results and number not in is_early:
                    line = lines.read(number)
                    yield len(line), index.row(number, line)

        for number in early:
            yield index.row(number, lines.read(number))
        for _, row in in_windows(rest(), lambda each: each[0], lambda each: each[1].prompt):
            yield row

    def _take(self, row: JobRow, output: RequestOutput | None, results: Any) -> None:
        """Keeps the output row of a row that has finished."""
        error = row.error if output is None else output.error
        if error is not None:
            self._errors.add(_name(row), error)
        row = replace(row, params={**self._options.params, **row.params})
        made = output_of(row, output, created=self._created, model=self._options.model)
        results.append(row.number, json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode())

    @contextmanager
    def _stopping_at_signals(self) -> Iterator[None]:
        """The first Ctrl-C, or SIGTERM, lets what runs finish; the second stops at once."""

        def stop(number: int, frame: Any) -> None:
            self._num_stops += 1
            if self._num_stops > 1:
                raise KeyboardInterrupt
            print("\nstopping: what runs is finished; Ctrl-C again stops at once", file=sys.stderr)

        before = {}
        with suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # After the rows

    def _write_output(self, journal: Journal, index: _Index) -> None:
        new = self._output.with_name(self._output.name + ".new")
        try:
            with new.open("wb") as file:
                if is_parquet(self._options.output):
                    write_parquet(file, self._output, journal.rows(), index.kinds)
                else:
                    file.writelines(row + b"\n" for row in journal.rows())
                file.flush()
                os.fsync(file.fileno())
            replace_durably(new, self._output)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise JobError(
                f"{self._output} cannot be written: {error.strerror or error}. All rows are in {self._part_path}; make "
                "room and run the same command again"
            ) from error

    def _report(self, num_rows: int, num_before: int, num_finished: int, began: float) -> dict[str, Any]:
        metrics, seconds = self._metrics, time.monotonic() - began
        report: dict[str, Any] = {
            "rows": {
                "total": num_rows,
                "finished": num_finished,
                "finished_before": num_before,
                "errors": self._errors.num_rows,
            },
            "errors": self._errors.by_kind(),
            "seconds": dict(self._seconds),
            "tokens": {},
            "preemptions": metrics.get("num_preemptions", 0),
        }
        if metrics:
            output, in_rows = metrics["num_output_tokens"], max(self._seconds.get("rows", 0.0), 1e-9)
            report["tokens"] = {
                "prompt": metrics["num_prompt_tokens"],
                "prefix_cache_hit_rate": metrics["prefix_cache_hit_rate"],
                "output": output,
                "output_per_second": output / in_rows,
            }
            report["device_seconds"] = seconds * self._options.engine.get("tensor_parallel_size", 1)
            if self._options.price_per_hour is not None:
                total = self._options.price_per_hour * seconds / 3600
                report["cost"] = {
                    "total": total,
                    "per_million_output_tokens": total / output * 1e6 if output else None,
                }
        return report

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began


class _Stdout:
    """Standard output in the place of a journal: rows as they finish, and nothing to resume."""

    def __init__(self, num_rows: int):
        self.num_rows, self._total = 0, num_rows

    def __contains__(self, number: int) -> bool:
        return False

    def append(self, number: int, row: bytes) -> None:
        self.num_rows += 1
        sys.stdout.buffer.write(row + b"\n")

    def write(self) -> None:
        sys.stdout.buffer.flush()


def _name(row: JobRow) -> str:
    return f"row {row.number + 1}" if row.id is None else f"row {row.number + 1}, id {row.id!r}"


def _say_preflight(summary: PreflightSummary, num_rows: int, index: _Index, refused: list[tuple[str, str]]) -> None:
    checked = "all" if summary.num_prompts + index.num_errors >= num_rows else f"{summary.num_prompts:,} of them"
    logger.info(
        "%s rows; tokenized %s: %s prompt tokens, the longest prompt has %s; at most %s new tokens; %s distinct "
        "beginnings, %.0f%% of the prompt tokens are shared with an earlier row",
        f"{num_rows:,}", checked, f"{summary.num_prompt_tokens:,}", f"{summary.longest_prompt:,}",
        f"{summary.most_new_tokens:,}", f"{summary.num_distinct_prefixes:,}", 100 * summary.expected_hit_rate,
    )  # fmt: skip
    for what, errors, count in (
        ("cannot be read", index.errors, index.num_errors), ("cannot run", refused, len(refused))
    ):  # fmt: skip
        if count:
            first = "; ".join(f"{row}: {error}" for row, error in errors[:10])
            logger.warning("%s rows %s: %s", f"{count:,}", what, first)


def run_batch(options: JobOptions) -> dict[str, Any]:
    """Runs a job, or what is left of it, and returns its report. See JobOptions, and Job for what it raises."""
    report = Job(options).run()
    print(in_words(report), file=sys.stderr)
    return report
