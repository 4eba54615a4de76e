"""A job: the rows of a file through an LLM, to a file, with nothing lost if it is killed.

    input ──scan──▶ Index (what the job knows of each row) ──plan──▶ rows to run ──LLM.generate_iter──▶ journal
                                                                     error rows ────────────────────────────▲
    journal, complete ──▶ output, in the input's order

Beside `OUTPUT` there are `OUTPUT.job`, which says what the job is, and until the end `OUTPUT.part`, the journal.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanovllm import LLM, Preflight
from nanovllm.jobs.check import Checked, check_rows
from nanovllm.jobs.errors import Errors, JobError
from nanovllm.jobs.estimate import estimate
from nanovllm.jobs.identity import check_same, identity_of, load_state, save_state, whole_file
from nanovllm.jobs.index import Index
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.parquet import import_pyarrow, is_parquet, write_parquet
from nanovllm.jobs.report import Progress, in_words, num_rows_in_words, report_of
from nanovllm.jobs.row_params import RowParams
from nanovllm.jobs.run import Results, RowsRun, Stdout
from nanovllm.jobs.source import Source, open_source
from nanovllm.replicas.replicas import Replicas

logger = logging.getLogger("nanovllm.jobs")

_ROWS_OF_SAMPLE = 5000


def make_llm(model: str, *, data_parallel_size: int | None = None, **engine: Any) -> LLM | Replicas:
    """The LLM of a job, or several of them."""
    if data_parallel_size in (None, 1):
        return LLM(model, **engine)
    return Replicas(model, data_parallel_size=data_parallel_size, **engine)


class Job:
    """One run of a job.

    Args:
        options: what the job is to do.
        make_llm: is called with the model and the options of the engine.
    """

    def __init__(self, options: JobOptions, make_llm: Callable[..., LLM | Replicas] = make_llm):
        self._options, self._make_llm = options, make_llm
        self._is_stream = options.output == "-"
        self._output = Path(options.output).resolve()  # a link's target, beside which the other files stand
        self._state_path, self._part_path = (Path(f"{self._output}.{kind}") for kind in ("job", "part"))
        self._began, self._created = time.monotonic(), int(time.time())
        self._seconds: dict[str, float] = {}
        self._metrics: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Runs what is left of the job, and returns the report; see run_batch."""
        options = self._options
        self._check_paths()
        if is_parquet(options.output):
            import_pyarrow(options.output)  # now, not when all rows have run
        lines = open_source(options.input, None if self._is_stream else self._output.parent)
        try:
            with self._phase("preflight"):
                preflight = self._preflight_of_model()
                params = RowParams(preflight.get_default_sampling_params(), options.params, options.seed)
                most = preflight.max_model_len
                index = Index(lines, params.parse, lambda row: params.max_num_new_tokens(row, most))
                self._refuse(index.errors)
                checked = check_rows(lines, index, params, preflight, self._num_to_check(len(lines)))
                if checked.num_rows:
                    checked.say(len(lines), index)
                    self._refuse(checked.refused)
            if options.dry_run:
                report = self._dry_run(lines, index, params, checked)
            elif self._is_stream:
                report = self._run_rows(lines, index, params, Stdout())
            else:
                report = self._with_journal(lines, index, params, preflight.directory)
        finally:
            lines.close()
        if options.report is not None:
            text = json.dumps(report, indent=1) + "\n"
            path = Path(options.report)
            if path.exists() and not path.is_file():  # a terminal or a pipe
                path.write_text(text)
            else:
                with whole_file(path.resolve()) as file:
                    file.write(text.encode())
        return report

    # Before the rows run

    def _check_paths(self) -> None:
        """Refuses paths that would destroy each other's files, or that cannot be written at the end."""
        ours = [] if self._is_stream else [self._output, self._state_path, self._part_path]
        ours += [path.with_name(path.name + ".new") for path in ours]
        others = [Path(path).resolve() for path in (self._options.input, self._options.report) if path is not None]
        for path in others:
            if path in ours:
                raise JobError(f"the job itself writes {path}; choose another output")
        if len(others) == 2 and others[0] == others[1]:
            raise JobError(f"the report would replace the input {others[0]}; choose another file")
        for path in [*ours[:1], *others[1:]]:
            if not path.parent.is_dir():
                raise JobError(f"the directory {path.parent} does not exist; make it first")
            if path.is_dir():
                raise JobError(f"{path} is a directory; name a file")
        if ours and self._output.exists() and not self._output.is_file():
            raise JobError(f'the output {self._output} is not a regular file; "-" is standard output')

    def _preflight_of_model(self) -> Preflight:
        names = ("revision", "tokenizer", "max_model_len")
        given = {name: value for name, value in self._options.engine.items() if name in names and value is not None}
        return Preflight(self._options.model, **given)

    def _refuse(self, errors: Errors) -> None:
        if self._options.on_error == "stop" and errors.num_rows:
            num_rows, first = num_rows_in_words(errors.num_rows), errors.in_words()
            raise JobError(f"{num_rows} cannot run; --on-error stop refuses the job: {first}")

    def _num_to_check(self, num_rows: int) -> int:
        """How many rows are tokenized before the weights are loaded."""
        options = self._options
        # A resumed job was checked when it began.
        is_new = options.restart or options.dry_run or self._is_stream or not self._state_path.exists()
        needs_all = options.dry_run or options.on_error == "stop"
        kind = options.preflight or ("full" if needs_all else "sample")
        return {"off": 0, "sample": min(num_rows, _ROWS_OF_SAMPLE), "full": num_rows}[kind] if is_new else 0

    def _dry_run(self, lines: Source, index: Index, params: RowParams, checked: Checked) -> dict[str, Any]:
        options, found = self._options, {}
        if options.estimate:
            with self._phase("estimate"):
                found["estimate"] = estimate(
                    self._started_llm, lines, index, params, checked.summary, options.price_per_hour
                )
        report = self._report(len(lines), 0, 0, checked.errors(index))
        return {**report, "preflight": checked.as_report(), **found}

    def _started_llm(self) -> LLM | Replicas:
        return self._make_llm(self._options.model, **{**self._options.engine, "seed": self._options.seed})

    # With a journal

    def _with_journal(self, lines: Source, index: Index, params: RowParams, directory: Path) -> dict[str, Any]:
        """Goes on with the job beside the output, or begins one."""
        options = self._options
        with Journal(self._part_path, options.seconds_between_syncs) as journal:
            with self._phase("recovery"):
                if options.restart:
                    for path in (self._state_path, self._output):
                        path.unlink(missing_ok=True)
                    journal.clear()
                engine = {**options.engine, "model": options.model}
                identity = identity_of(lines.digest, len(lines), directory, engine, options.params, options.seed)
                state = self._state(identity, journal, len(lines))
            if state["finished"] and self._output.exists():
                journal.remove()
                logger.info("%s is finished already; the report of the run that finished it follows", self._output)
                return state["report"]
            report = self._run_rows(lines, index, params, journal)
            if journal.is_complete():
                with self._phase("output"):
                    # Otherwise a power cut could tear the journal of a job whose output is there already.
                    journal.sync()
                    self._write_output(journal, index)
                report["seconds"] = dict(self._seconds)
                save_state(self._state_path, {**state, "finished": True, "report": report})
                journal.remove()
            return report

    def _state(self, identity: dict[str, Any], journal: Journal, num_rows: int) -> dict[str, Any]:
        """The job's description: the one beside the output if it is the same job, or a new one. The journal then knows
        its rows."""
        state = load_state(self._state_path)
        if state is None:
            for path in (self._output, self._part_path):
                if path.exists() and path.stat().st_size:
                    raise JobError(
                        f"{path} exists, and no {self._state_path.name} says which job wrote it; move it away, or "
                        "replace it with --restart"
                    )
        elif state["finished"] or self._part_path.stat().st_size:
            # Before the journal is touched: it may be another job's. Where nothing is finished, nothing is lost.
            check_same(state["identity"], identity, self._state_path)
        else:
            state = None
        journal.recover(num_rows)
        if state is not None and state["finished"] and self._output.exists():
            return state
        if state is not None and self._output.exists() and not journal.is_complete():
            raise JobError(f"{self._output} exists, but its job has not finished; move it away")
        if state is not None:
            self._created = state["created"]
            logger.info("%s of %s rows are finished", f"{journal.num_rows:,}", f"{num_rows:,}")
        state = {"version": 1, "identity": identity, "created": self._created, "finished": False}
        save_state(self._state_path, state)
        return state

    def _write_output(self, journal: Journal, index: Index) -> None:
        with whole_file(self._output) as file:
            if is_parquet(self._options.output):
                write_parquet(file, self._output, journal.rows(), index.kinds)
            else:
                file.writelines(row + b"\n" for row in journal.rows())

    # The rows

    def _run_rows(self, lines: Source, index: Index, params: RowParams, results: Results) -> dict[str, Any]:
        """Runs what `results` lacks."""
        num_before = results.num_rows
        if num_before == len(lines):
            return self._report(len(lines), num_before, num_before, Errors())
        with self._phase("start"):
            llm = self._started_llm()
        run = RowsRun(lines, index, params, results, self._created, self._options.model)
        with llm, self._phase("rows"):
            progress = Progress(len(lines), num_before, llm.metrics)
            try:
                run.through(llm, progress)
            finally:
                progress.close()
                self._metrics = llm.metrics()
        return self._report(len(lines), num_before, results.num_rows, run.errors, run.tail_seconds)

    def _report(
        self, num_rows: int, num_before: int, num_finished: int, errors: Errors, tail_seconds: float | None = None
    ) -> dict[str, Any]:
        """The report of this run, at its end."""
        rows = {"total": num_rows, "finished": num_finished, "finished_before": num_before, "errors": errors.num_rows}
        num_devices = math.prod((self._options.engine.get(f"{kind}_parallel_size") or 1) for kind in ("data", "tensor"))
        return report_of(
            rows, errors.by_kind(), dict(self._seconds), tail_seconds, time.monotonic() - self._began, self._metrics,
            num_devices, self._options.price_per_hour,
        )  # fmt: skip

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began


def run_batch(options: JobOptions) -> dict[str, Any]:
    """Runs a job, or what is left of it.

    In the main thread, the first SIGINT or SIGTERM lets running rows finish, and the second stops at once. The report
    is also printed to standard error.

    Returns:
        The report; docs/jobs.md lists its keys. `report["rows"]` tells whether all rows have finished.

    Raises:
        JobError: the job cannot start or continue; finished rows are kept.
        OSError, TypeError, ValueError, RuntimeError: a file, an option, or the LLM.
        KeyboardInterrupt: a second signal; in an estimate, the first.
    """
    report = Job(options).run()
    print(in_words(report), file=sys.stderr)
    return report
