"""A job runs the rows of a file through an LLM and writes the results to a file. If it is killed, it loses nothing.

    input ──scan──▶ Index (a few bytes for each row) ──plan──▶ rows to run ──LLM.generate_iter──▶ journal
                                                               error rows ────────────────────────────▲
    complete journal ──▶ output, in the input's order

Beside `OUTPUT` there are `OUTPUT.job`, the job's description, and until the end `OUTPUT.part`, the journal.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm import LLM, Preflight
from nanovllm.jobs.check import Checked, check_rows
from nanovllm.jobs.errors import Errors, JobError, worded
from nanovllm.jobs.estimate import estimate
from nanovllm.jobs.identity import VERSION, check_same, identity_of, load_state, save_state, whole_file
from nanovllm.jobs.index import Index
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.output import write_lines, write_parquet
from nanovllm.jobs.parquet import import_pyarrow, is_parquet
from nanovllm.jobs.report import Progress, Report, in_words, num_rows_in_words
from nanovllm.jobs.results import Results, Stdout
from nanovllm.jobs.row_params import RowParams
from nanovllm.jobs.rows import KINDS_WITHOUT_LM_HEAD
from nanovllm.jobs.run import RowsRun
from nanovllm.jobs.source import Files, check_name, input_paths
from nanovllm.replicas.replicas import Replicas

logger = logging.getLogger("nanovllm.jobs")

_ROWS_OF_SAMPLE, _ROWS_OF_LOOK = 5000, 16


def make_llm(model: str, *, data_parallel_size: int | None = None, **engine: Any) -> LLM | Replicas:
    """The LLM of a job, or several of them."""
    if data_parallel_size in (None, 1):
        return LLM(model, **engine)
    return Replicas(model, data_parallel_size=data_parallel_size, **engine)


class Job:
    """One run of a job.

    Args:
        options: the job's options.
        make_llm: called with the model and the options of the engine.
    """

    def __init__(self, options: JobOptions, make_llm: Callable[..., LLM | Replicas] = make_llm):
        self._options, self._make_llm = options, make_llm
        self._is_stream = options.output == "-"
        self._output = Path(options.output).resolve()  # if it is a link, the other files are beside its target
        self._state_path, self._part_path = (Path(f"{self._output}.{kind}") for kind in ("job", "part"))
        self._created, self._report = int(time.time()), Report(options)

    def run(self) -> dict[str, Any]:
        """Runs the rest of the job, and returns the report; see run_batch."""
        options = self._options
        paths = self._checked_paths()
        if is_parquet(options.output):
            import_pyarrow(options.output)  # now, not when all rows have run
        directory = None if self._is_stream else self._output.parent
        lines = Files(paths, options.columns, directory, is_parquet(options.output))
        try:
            with self._report.phase("preflight"):
                preflight = self._preflight_of_model()
                recommended = preflight.get_default_sampling_params()
                params = RowParams(recommended, options.params, options.seed, options.columns)
                index = Index(lines, params, preflight.max_model_len, with_data=self._is_stream)
                self._refuse(index.errors)
                is_new = self._is_new()
                checked = check_rows(index, preflight, self._num_to_check(len(index)) if is_new else 0)
                if is_new and not options.dry_run:
                    checked.refuse_if_none_can_run(index, is_look=options.preflight == "off")
                if is_new and options.preflight != "off":
                    checked.log(index)
                    self._refuse(checked.refused)
            if options.dry_run:
                report = self._dry_run(index, checked)
            elif self._is_stream:
                report = self._run_rows(index, Stdout(index.lines.place))
            else:
                report = self._with_journal(index, preflight.directory)
        finally:
            lines.close()
        if options.report is not None:
            self._write_report(json.dumps(report, indent=1) + "\n", Path(options.report))
        return report

    def _write_report(self, text: str, path: Path) -> None:
        if path.exists() and not path.is_file():  # a terminal or a pipe
            with worded(f"the report {path} cannot be written"):
                path.write_text(text)
        else:
            with whole_file(path.resolve()) as file:
                file.write(text.encode())

    # Before the rows run

    def _checked_paths(self) -> list[str]:
        """The input's files. Refuses streams that are closed, and paths that would overwrite each other's files or that
        cannot be written at the end."""
        ours = [] if self._is_stream else [self._output, self._state_path, self._part_path]
        ours += [path.with_name(path.name + ".new") for path in ours]
        reports = [] if self._options.report is None else [Path(self._options.report).resolve()]
        paths = input_paths(self._options.input, [*ours, *reports])
        for name, is_used, stream in (("input", "-" in paths, sys.stdin), ("output", self._is_stream, sys.stdout)):
            if is_used and stream is None:
                raise JobError(f'"-" is standard {name}, which is closed; open it, or name a file')
        inputs = [Path(path).resolve() for path in paths]
        for path in [*inputs, *reports]:
            if path in ours:
                raise JobError(f"the job itself writes {path}; choose another output")
        if reports and reports[0] in inputs:
            raise JobError(f"the report would replace the input {reports[0]}; choose another file")
        for path in [*ours[:1], *reports]:
            if not path.parent.is_dir():
                raise JobError(f"the directory {path.parent} does not exist; make it first")
            if path.is_dir():
                raise JobError(f"{path} is a directory; name a file")
        check_name(self._options.output, is_output=True)
        if ours and self._output.exists() and not self._output.is_file():
            raise JobError(f'the output {self._output} is not a regular file; "-" is standard output')
        return paths

    def _preflight_of_model(self) -> Preflight:
        names = (
            "revision", "tokenizer", "max_model_len", "generation_config", "runner", "pooler_config", "hf_overrides",
        )  # fmt: skip
        given = {name: value for name, value in self._options.engine.items() if name in names and value is not None}
        return Preflight(self._options.model, **given)

    def _refuse(self, errors: Errors) -> None:
        if self._options.on_error == "stop" and errors.num_rows:
            num_rows, first = num_rows_in_words(errors.num_rows), errors.in_words()
            raise JobError(f"{num_rows} cannot run; --on-error stop refuses the job: {first}")

    def _is_new(self) -> bool:
        """Whether the job has no finished rows. One that has them was checked when it began."""
        if self._options.restart or self._options.dry_run or self._is_stream:
            return True
        return not any(path.exists() and path.stat().st_size for path in (self._part_path, self._output))

    def _num_to_check(self, num_rows: int) -> int:
        """How many rows are tokenized before the weights are loaded."""
        options = self._options
        needs_all = options.dry_run or options.on_error == "stop"
        kind = options.preflight or ("full" if needs_all else "sample")
        # Without a preflight, a job still checks whether any of its rows can run.
        num_off = 0 if options.dry_run else _ROWS_OF_LOOK
        return {"off": num_off, "sample": _ROWS_OF_SAMPLE, "full": num_rows}[kind]

    def _dry_run(self, index: Index, checked: Checked) -> dict[str, Any]:
        options, found = self._options, {}
        if options.estimate:
            with self._report.phase("estimate"):
                make_llm = partial(self._started_llm, index)
                found["estimate"] = estimate(make_llm, index, checked.summary, options.price_per_hour)
        report = self._report.as_dict(len(index), 0, 0, index.errors + checked.refused)
        return {**report, "preflight": {"checked_rows": checked.num_rows, **asdict(checked.summary)}, **found}

    def _started_llm(self, index: Index) -> LLM | Replicas:
        engine = {**self._options.engine, "seed": self._options.seed}
        # Without an LM head, the weights and the KV cache take less memory.
        if index.kinds <= KINDS_WITHOUT_LM_HEAD and not (engine.get("runner") or engine.get("task")):
            engine["runner"] = "pooling"
        return self._make_llm(self._options.model, **engine)

    # With a journal

    def _with_journal(self, index: Index, directory: Path) -> dict[str, Any]:
        """Resumes the job beside the output, or begins one."""
        options = self._options
        with ExitStack() as stack:
            journal = stack.enter_context(Journal(self._part_path, options.seconds_between_syncs, index.lines.place))
            # Nothing is deleted before the model has loaded.
            llm = None
            if options.restart:
                with self._report.phase("start"):
                    llm = self._started_llm(index)
                stack.enter_context(llm)
            with self._report.phase("recovery"):
                if options.restart:
                    for path in (self._state_path, self._output):
                        path.unlink(missing_ok=True)
                    journal.clear()
                engine = {**options.engine, "model": options.model}
                digest, columns = index.lines.digest, options.columns.given
                identity = identity_of(digest, len(index), directory, engine, options.params, options.seed, columns)
                state = self._state(identity, journal, len(index))
            if state["finished"] and self._output.exists():
                journal.remove()
                logger.info("%s is finished already; the report of the run that finished it follows", self._output)
                return state["report"]
            report = self._run_rows(index, journal, llm)
            if journal.is_complete():
                with self._report.phase("output"):
                    # Otherwise a power failure could tear the journal of a job whose output exists already.
                    journal.sync()
                    self._write_output(journal, index)
                report["seconds"] = dict(self._report.seconds)
                save_state(self._state_path, {**state, "finished": True, "report": report})
                journal.remove()
            return report

    def _state(self, identity: dict[str, Any], journal: Journal, num_rows: int) -> dict[str, Any]:
        """The job's description: the one beside the output if it is the same job, else a new one. Recovers the
        journal."""
        state = load_state(self._state_path)
        if state is None:
            for path in (self._output, self._part_path):
                if path.exists() and path.stat().st_size:
                    raise JobError(
                        f"{path} exists, and no {self._state_path.name} says which job wrote it; move it away, or "
                        "replace it with --restart"
                    )
        elif state["finished"] or self._part_path.stat().st_size:
            # This comes before any change to the journal, which may belong to another job. Without finished rows,
            # nothing can be lost.
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
        state = {"version": VERSION, "identity": identity, "created": self._created, "finished": False}
        save_state(self._state_path, state)
        return state

    def _write_output(self, journal: Journal, index: Index) -> None:
        with whole_file(self._output) as file:
            if is_parquet(self._options.output):
                has_one_size = len(index.dimensions) == 1
                write_parquet(file, self._output, journal.rows, index.kinds, index.lines.data, has_one_size)
            else:
                write_lines(file, journal.rows(), index.lines.data)
            index.lines.check_unchanged()

    # The rows

    def _run_rows(self, index: Index, results: Results, llm: LLM | Replicas | None = None) -> dict[str, Any]:
        """Runs the rows that `results` lacks. Starts the LLM if there is none."""
        num_before = results.num_rows
        if num_before == len(index):
            return self._report.as_dict(num_before, num_before, num_before, results.errors)
        if llm is None:
            with self._report.phase("start"):
                llm = self._started_llm(index)
        rows_run = RowsRun(index, results, self._created, self._options.model)
        with llm, self._report.phase("rows"):
            progress = Progress(len(index), num_before, llm.metrics)
            try:
                rows_run.run(llm, progress)
            finally:
                progress.close()
                self._report.metrics = llm.metrics()
        return self._report.as_dict(len(index), num_before, results.num_rows, results.errors, rows_run.tail_seconds)


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
