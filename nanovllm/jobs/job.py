"""A job runs the rows of a file through an LLM and writes the results to a file. If it is killed, it loses nothing.

    input ──scan──▶ Index (a few bytes for each row) ──plan──▶ rows to run ──LLM.generate_iter──▶ journal
                                                               error rows ────────────────────────────▲
    complete journal ──▶ output, in the input's order

Beside `OUTPUT` there are `OUTPUT.job`, the job's description, and until the end `OUTPUT.part`, the journal. proof.py
writes two more for a deterministic job.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm import LLM, Preflight
from nanovllm.jobs.adapters import fingerprints_of, warn_if_unused
from nanovllm.jobs.check import Checked, check_rows, num_to_check
from nanovllm.jobs.errors import Errors, JobError
from nanovllm.jobs.estimate import estimate
from nanovllm.jobs.identity import VERSION, check_same, has_proof, identity_of, load_state, save_state, whole_file
from nanovllm.jobs.index import Index
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.output import write_lines, write_parquet
from nanovllm.jobs.page import check_report, is_page, write_report
from nanovllm.jobs.parquet import import_pyarrow, is_parquet
from nanovllm.jobs.paths import JobPaths, checked_paths
from nanovllm.jobs.proof import check_recordable, check_same_environment, environment_of_files, write_proof
from nanovllm.jobs.report import Progress, Report, in_words, num_rows_in_words
from nanovllm.jobs.results import Results, Stdout
from nanovllm.jobs.run import RowsRun
from nanovllm.jobs.source import Files
from nanovllm.jobs.start import index_of, make_llm, preflight_of, started_llm
from nanovllm.jobs.timeline import Lengths, Timeline
from nanovllm.replicas.replicas import Replicas

logger = logging.getLogger("nanovllm.jobs")

# What a run shows in the figures of its page.
_Measured = tuple[Timeline | None, Lengths | None]
_NOTHING: _Measured = (None, None)


class Job:
    """One run of a job.

    Args:
        options: the job's options.
        make_llm: called with the model and the options of the engine.
    """

    def __init__(self, options: JobOptions, make_llm: Callable[..., LLM | Replicas] = make_llm):
        self._options, self._make_llm = options, make_llm
        self._is_stream = options.output == "-"
        self._paths = JobPaths.of(options.output)
        # The bytes of a row with a proof must not depend on when it ran.
        self._created = 0 if options.is_deterministic else int(time.time())
        self._report = Report(options)

    def run(self) -> dict[str, Any]:
        """Runs the rest of the job, and returns the report; see run_batch."""
        options = self._options
        paths = checked_paths(options)
        if options.has_proof:
            check_recordable(options)
        elif self._is_stream and options.is_deterministic:
            logger.warning("a job that writes to standard output has no manifest, and verify needs one; name a file")
        if is_parquet(options.output):
            import_pyarrow(options.output)  # now, not when all rows have run
        if options.report is not None:
            check_report(Path(options.report))
        directory = None if self._is_stream else self._paths.output.parent
        lines = Files(paths, options.columns, directory, is_parquet(options.output))
        try:
            with self._report.phase("preflight"):
                preflight = preflight_of(options)
                index = index_of(options, lines, preflight)
                warn_if_unused(options.adapters, index.adapters)
                self._refuse(index.errors)
                is_new = self._is_new()
                checked = check_rows(index, preflight, num_to_check(options, len(index)) if is_new else 0)
                if is_new and not options.dry_run:
                    checked.refuse_if_none_can_run(index, is_look=options.preflight == "off")
                if is_new and options.preflight != "off":
                    checked.log(index)
                    self._refuse(checked.refused)
            if options.dry_run:
                report, measured = self._dry_run(index, checked), _NOTHING
            elif self._is_stream:
                report, measured = self._run_rows(index, Stdout(index.lines.place))
            else:
                report, measured = self._with_journal(index, preflight)
        finally:
            lines.close()
        if options.report is not None:
            name = "to standard output" if self._is_stream else self._paths.output.name
            write_report(Path(options.report), report, f"Job {name}, model {options.model}", *measured)
        return report

    # Before the rows run

    def _refuse(self, errors: Errors) -> None:
        if self._options.on_error == "stop" and errors.num_rows:
            num_rows, first = num_rows_in_words(errors.num_rows), errors.in_words()
            raise JobError(f"{num_rows} cannot run; --on-error stop refuses the job: {first}")

    def _is_new(self) -> bool:
        """Whether the job has no finished rows. One that has them was checked when it began."""
        if self._options.restart or self._options.dry_run or self._is_stream:
            return True
        return not any(path.exists() and path.stat().st_size for path in (self._paths.journal, self._paths.output))

    def _dry_run(self, index: Index, checked: Checked) -> dict[str, Any]:
        options, found = self._options, {}
        if options.estimate:
            with self._report.phase("estimate"):
                make_llm = partial(started_llm, options, index, self._make_llm)
                found["estimate"] = estimate(make_llm, index, checked.summary, options.price_per_hour)
        report = self._report.as_dict(len(index), 0, 0, index.errors + checked.refused)
        return {**report, "preflight": {"checked_rows": checked.num_rows, **asdict(checked.summary)}, **found}

    # With a journal

    def _with_journal(self, index: Index, preflight: Preflight) -> tuple[dict[str, Any], _Measured]:
        """Resumes the job beside the output, or begins one."""
        options = self._options
        with ExitStack() as stack:
            journal = stack.enter_context(
                Journal(self._paths.journal, options.seconds_between_syncs, index.lines.place)
            )

            def start() -> LLM | Replicas:
                with self._report.phase("start"):
                    llm = started_llm(options, index, self._make_llm)
                stack.enter_context(llm)
                return llm

            # Nothing is deleted before the model has loaded.
            llm = start() if options.restart else None
            with self._report.phase("recovery"):
                if options.restart:
                    self._delete_results(journal)
                engine = {**options.engine, "model": options.model}
                digest, columns = index.lines.digest, options.columns.given
                adapters = fingerprints_of(index.params.adapters)
                identity = identity_of(
                    digest, len(index), preflight.directory, engine, options.params, options.seed, columns, adapters
                )
                state = self._state(identity, journal, len(index))
            if state["finished"] and self._paths.output.exists():
                journal.remove()
                logger.info(
                    "%s is finished already; the report of the run that finished it follows", self._paths.output
                )
                return state["report"], _NOTHING
            # A run that only writes the output, after a kill at the end, needs no LLM.
            if options.has_proof and not (journal.is_complete() and "environment" in state):
                llm = llm or start()
                state = self._with_environment(state, preflight, llm)
            report, measured = self._run_rows(index, journal, llm)
            if journal.is_complete():
                with self._report.phase("output"):
                    # Otherwise a power failure could tear the journal of a job whose output exists already.
                    journal.sync()
                    report.update(self._write_output(journal, index, state))
                report["seconds"] = dict(self._report.seconds)
                save_state(self._paths.state, {**state, "finished": True, "report": report})
                journal.remove()
            return report, measured

    def _delete_results(self, journal: Journal) -> None:
        """Deletes all that earlier runs wrote. A kill leaves an output without a description, which is refused."""
        before = None
        with suppress(JobError):  # a description that cannot be read is deleted too
            before = load_state(self._paths.state)
        of_proof = self._paths.of_proof if self._options.has_proof or has_proof(before) else []
        for path in (*of_proof, self._paths.state, self._paths.output):
            path.unlink(missing_ok=True)
        journal.clear()

    def _state(self, identity: dict[str, Any], journal: Journal, num_rows: int) -> dict[str, Any]:
        """The job's description: the one beside the output if it is the same job, else a new one. Recovers the
        journal."""
        state = load_state(self._paths.state)
        before_has_proof = has_proof(state)
        strange = [self._paths.output, self._paths.journal] if state is None else []
        if self._options.has_proof and not before_has_proof:
            strange += self._paths.of_proof
        for path in strange:
            if path.exists() and path.stat().st_size:
                raise JobError(
                    f"{path} exists, and no {self._paths.state.name} says that this job wrote it; move it away, or "
                    "replace it with --restart"
                )
        # This comes before any change to the journal, which may belong to another job. Without finished rows, nothing
        # can be lost.
        if state is not None and (state["finished"] or self._paths.journal.stat().st_size):
            check_same(state["identity"], identity, self._paths.state)
        else:
            state = None
        journal.recover(num_rows)
        if state is not None and state["finished"] and self._paths.output.exists():
            return state
        if state is not None and self._paths.output.exists() and not journal.is_complete():
            raise JobError(f"{self._paths.output} exists, but its job has not finished; move it away")
        if state is not None:
            self._created = state["created"]
            logger.info("%s of %s rows are finished", f"{journal.num_rows:,}", f"{num_rows:,}")
        environment: dict[str, Any] = {}
        if state is not None and journal.num_rows and "environment" in state:
            environment["environment"] = state["environment"]
        elif before_has_proof:  # a proof that is there belongs to earlier rows
            for path in self._paths.of_proof:
                path.unlink(missing_ok=True)
        state = {"version": VERSION, "identity": identity, "created": self._created, "finished": False, **environment}
        save_state(self._paths.state, state)
        return state

    def _with_environment(self, state: dict[str, Any], preflight: Preflight, llm: LLM | Replicas) -> dict[str, Any]:
        """Adds the environment to the description of a deterministic job, before its first row runs. Later runs must
        have the same."""
        with self._report.phase("start"):
            environment = {**environment_of_files(preflight), **llm.provenance()}
        if "environment" in state:
            check_same_environment(state["environment"], environment, self._paths.state)
        state = {**state, "environment": environment}
        save_state(self._paths.state, state)
        return state

    def _write_output(self, journal: Journal, index: Index, state: dict[str, Any]) -> dict[str, Any]:
        """Writes the output, and before it appears the proof, whose summary is returned for the report."""
        with whole_file(self._paths.output) as file:
            if is_parquet(self._options.output):
                has_one_size = len(index.dimensions) == 1
                write_parquet(file, self._paths.output, journal.rows, index.kinds, index.lines.data, has_one_size)
            else:
                write_lines(file, journal.rows(), index.lines.data)
            index.lines.check_unchanged()
            if not self._options.has_proof:
                return {}
            file.flush()
            proof = state["identity"], state["environment"]
            return {"manifest": write_proof(Path(file.name), self._paths, self._options, *proof)}

    # The rows

    def _run_rows(
        self, index: Index, results: Results, llm: LLM | Replicas | None = None
    ) -> tuple[dict[str, Any], _Measured]:
        """Runs the rows that `results` lacks. Starts the LLM if there is none. Returns the report, and what it shows as
        a page."""
        num_before = results.num_rows
        if num_before == len(index):
            return self._report.as_dict(num_before, num_before, num_before, results.errors), _NOTHING
        if llm is None:
            with self._report.phase("start"):
                llm = started_llm(self._options, index, self._make_llm)
        has_page = self._options.report is not None and is_page(Path(self._options.report))
        lengths = Lengths(Counter(), Counter()) if has_page else None
        rows_run = RowsRun(index, results, self._created, self._options.model, lengths)
        with llm, self._report.phase("rows"):
            timeline = Timeline(llm.metrics) if has_page else None
            progress = Progress(len(index), num_before, llm.metrics, timeline=timeline)
            try:
                rows_run.run(llm, progress)
            finally:
                progress.close()
                self._report.metrics = llm.metrics()
        report = self._report.as_dict(len(index), num_before, results.num_rows, results.errors, rows_run.tail_seconds)
        return report, (timeline, lengths)


def run_batch(options: JobOptions) -> dict[str, Any]:
    """Runs a job, or the rest of it.

    In the main thread, the first SIGINT or SIGTERM lets running rows finish, and the second stops at once. The report
    is also printed to standard error.

    Returns:
        The report; docs/jobs.md lists its keys. `report["rows"]` shows whether all rows have finished.

    Raises:
        JobError: the job cannot start or continue; finished rows are kept.
        OSError, TypeError, ValueError, RuntimeError: an error of a file, of an option, or of the LLM.
        KeyboardInterrupt: a second signal came; during an estimate, the first.
    """
    report = Job(options).run()
    print(in_words(report), file=sys.stderr)
    return report
