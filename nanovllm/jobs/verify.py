"""Verifies the proof of a job: compares its output, its input, its model and this machine with the manifest, and runs
some rows again, each alone."""

import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm import LLM, Preflight, RequestOutput
from nanovllm.jobs.compared_output import MAX_ROWS_NAMED, Chosen, compared_output, note
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.index import Index
from nanovllm.jobs.options import JobOptions, VerifyOptions
from nanovllm.jobs.output import line_of, write_parquet
from nanovllm.jobs.parquet import canonical_rows, import_pyarrow, is_parquet
from nanovllm.jobs.paths import JobPaths
from nanovllm.jobs.proof import (
    as_sentence,
    differences,
    environment_differences,
    environment_of_files,
    hash_of,
    load_manifest,
)
from nanovllm.jobs.report import num_rows_in_words
from nanovllm.jobs.row_difference import first_difference
from nanovllm.jobs.run import finished_row
from nanovllm.jobs.source import Files, input_paths
from nanovllm.jobs.start import index_of, make_llm, preflight_of, started_llm
from nanovllm.replicas.replicas import Replicas

logger = logging.getLogger("nanovllm.jobs")

_RELATIVE = " (a relative path is one from the current directory)"
_ADVICE = "no row was run, because these differences may change its bytes; undo them, or run the rows anyway (--anyway)"


def verify(options: VerifyOptions, make_llm: Callable[..., LLM | Replicas] = make_llm) -> dict[str, Any]:
    """Verifies the proof of a job.

    Returns:
        A dict. "differences" is a list of dicts of `what`, `recorded` and `found`; it is empty if all is equal. "rows"
        has the `total` of the job, how many rows of the output are `changed` and how many are `missing`, and the
        numbers, from 1, of those that were `run` and of those among them that gave the bytes with the recorded hash,
        `equal`. "seed" is that of the sample, or None. "advice" says why no row was run, or is None.

    Raises:
        JobError: there is no manifest, or it cannot be used; the input or the model is not where it was.
        OSError, TypeError, ValueError, RuntimeError: an error of a file, of an option, or of the LLM.
    """
    paths = JobPaths.of(options.output)
    manifest = load_manifest(paths)
    total = manifest["output"]["rows"]
    if options.rows is None and options.seed is None:
        options = replace(options, seed=random.randrange(2**32))
    output = compared_output(paths, manifest, frozenset(options.chosen(total)))
    job = _job_of(options, manifest, paths.output)
    preflight, lines = _preflight_of(options, job), _lines_of(options, job, paths)
    try:
        ran = _compared_rows(
            options, manifest, job, preflight, index_of(job, lines, preflight), output.chosen, make_llm
        )
    finally:
        lines.close()
    return {
        "output": str(paths.output),
        "rows": {
            "total": total,
            "changed": output.num_changed,
            "missing": output.num_missing,
            "run": ran.run,
            "equal": ran.equal,
        },
        "seed": options.seed if options.rows is None else None,
        "differences": output.differences + ran.differences,
        "advice": ran.advice,
    }


def verified_in_words(report: dict[str, Any]) -> str:
    """The result of `verify` for a person: a line for each difference, the rows that ran, and a summary."""
    rows, num_differences, advice = report["rows"], len(report["differences"]), report["advice"]
    num_equal, num_run = len(rows["equal"]), len(rows["run"])
    lines = [*map(as_sentence, report["differences"])]
    if num_run:
        ran = f"{num_equal} of the {num_rows_in_words(num_run)} that ran alone gave the bytes that the job recorded"
        seed = "" if report["seed"] is None else f" (chosen with --seed {report['seed']})"
        more = f" and {num_run - MAX_ROWS_NAMED} more" if num_run > MAX_ROWS_NAMED else ""
        lines.append(f"the rows that ran{seed}: {', '.join(map(str, rows['run'][:MAX_ROWS_NAMED]))}{more}")
    else:
        ran = "no row was run" if advice else "no row was run; the weights and the device were not compared"
    missing = f", {rows['missing']:,} of them missing" if rows["missing"] else ""
    head = f"{report['output']}: {num_rows_in_words(rows['total'])}, {rows['changed']:,} of them changed{missing}; "
    said = f"{num_differences or 'no'} difference{'' if num_differences == 1 else 's'}"
    return "\n".join([*lines, f"{head}{ran}; {said}", *([advice] if advice else [])])


# The job


def _job_of(options: VerifyOptions, manifest: dict[str, Any], output: Path) -> JobOptions:
    recorded, job = manifest["options"], manifest["job"]
    engine = {name: value for name, value in recorded["engine"].items() if name != "data_parallel_size"}
    return JobOptions(
        recorded["input"] if options.input is None else options.input, str(output),
        recorded["model"] if options.model is None else options.model, engine, job["params"], job["seed"],
        **job["columns"],
    )  # fmt: skip


def _preflight_of(options: VerifyOptions, job: JobOptions) -> Preflight:
    try:
        return preflight_of(job)
    except ValueError as error:
        named = "" if options.model is not None else "; if the model has moved, name it with --model"
        raise JobError(f"{error}{named}{_RELATIVE}") from None


def _lines_of(options: VerifyOptions, job: JobOptions, paths: JobPaths) -> Files:
    if options.input is None and "-" in job.input:
        raise JobError("the job read standard input; name a file with the same text with --input")
    try:
        found = input_paths(job.input, paths.owned(with_proof=True))
        return Files(found, job.columns, None, is_parquet(job.output))
    except JobError as error:
        named = "" if options.input is not None else "; if the input has moved, name it with --input"
        raise JobError(f"{error}{named}{_RELATIVE}") from None


# The rows


class _Ran(NamedTuple):
    """The numbers, from 1, of the rows that ran and of those that gave the same bytes; the differences; the advice if
    no row may run."""

    run: list[int]
    equal: list[int]
    differences: list[dict[str, Any]]
    advice: str | None = None


def _compared_rows(
    options: VerifyOptions, manifest: dict[str, Any], job: JobOptions, preflight: Preflight, index: Index,
    chosen: list[Chosen], make_llm: Callable[..., LLM | Replicas],
) -> _Ran:  # fmt: skip
    """Compares what the rows are made of, and then runs those that were chosen and compares them."""
    of_input = {"digest": index.lines.digest, "rows": len(index)}
    found = differences({"input's": manifest["job"]["input"]}, {"input's": of_input})
    read = ", ".join(str(Path(part.path).resolve()) for part in index.lines.parts)
    found = [{**each, "what": f"{each['what']} (read from {read:.500})"} for each in found]
    found += environment_differences(manifest["environment"], environment_of_files(preflight))
    if not chosen:
        return _Ran([], [], found)
    if found and not options.anyway:
        return _Ran([], [], found, _ADVICE)
    numbers = [row.number for row in chosen]
    if numbers[-1] >= len(index):
        raise JobError(f"row {numbers[-1] + 1:,} cannot run: the input has {len(index):,} rows")
    with started_llm(job, index, make_llm) as llm:
        found += environment_differences(manifest["environment"], llm.provenance())
        if found and not options.anyway:
            return _Ran([], [], found, _ADVICE)
        made = _run_rows(llm, index, numbers, manifest["options"]["model"])
    tokenizer, equal = preflight.get_tokenizer(), []
    written = _as_written([row for row, _ in made], index, numbers, Path(job.output))
    for row, now, (_, output) in zip(chosen, written, made, strict=True):
        if hash_of(now) == row.recorded:
            equal.append(row.number + 1)
        if row.written is None or not hash_of(now) == row.recorded == hash_of(row.written):
            found += _row_differences(row, now, output, tokenizer)
    return _Ran([number + 1 for number in numbers], equal, found)


def _run_rows(llm: LLM | Replicas, index: Index, numbers: Sequence[int], model: str) -> list[tuple[bytes, Any]]:
    """Runs each row in a call of its own. Returns the output row of each, and the LLM's output.

    model: its name in rows of OpenAI's format, which is another one if the model has moved.
    """
    logger.info("running %s, one at a time", num_rows_in_words(len(numbers)))
    made = []
    for number in numbers:
        row, _ = index.read(number)
        params = output = None
        if row.error is None:
            params = index.params.of(row)
            (output,) = llm.generate_iter(iter([row.prompt]), iter([params]), ordered=False)
        made.append((finished_row(row, params, output, 0, model)[1], output))
    return made


def _as_written(rows: list[bytes], index: Index, numbers: Sequence[int], output: Path) -> Iterator[bytes]:
    """The rows with these numbers as `rows_of` reads them from an output."""
    data = index.lines.data
    if not is_parquet(str(output)):
        for number, row in zip(numbers, rows, strict=True):
            yield line_of(row, data, number)
        return
    table = BytesIO()
    columns: Any = None if data is None else _ChosenData(data, frozenset(numbers))
    has_one_size = len(index.dimensions) == 1
    write_parquet(table, output, lambda: iter(rows), index.kinds, columns, has_one_size)
    table.seek(0)
    yield from canonical_rows(table)


def _row_differences(chosen: Chosen, made: bytes, output: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The difference of a row of the output, of what the job recorded, and of what it gave when it ran alone."""
    name, written = f"row {chosen.number + 1}", chosen.written
    completions = output.outputs if isinstance(output, RequestOutput) else []
    if hash_of(made) != chosen.recorded:
        if written is None or hash_of(written) != chosen.recorded:  # the recorded row is nowhere
            what = f"{name}, run alone (its row of the output has changed too): the hash"
            return [note(what, chosen.recorded, hash_of(made))]
        place, before, now = first_difference(written, made, completions, tokenizer)
        return [note(f"{name}, run alone: {place}", before, now)]
    if written is None:
        return []
    place, now, before = first_difference(written, made, completions, tokenizer)  # `made` is what the job recorded
    return [note(f"{name} of the output, beside its rerun: {place}", before, now)]


class _ChosenData:
    """The data columns of some rows alone; see TableData and LinesData."""

    def __init__(self, data: Any, numbers: Collection[int]):
        self.schema, self._data, self._numbers = data.schema, data, numbers

    def rows(self) -> Iterator[tuple[Any, int]]:
        return (each for number, each in enumerate(self._data.rows()) if number in self._numbers)

    def table(self, rows: list[Any]) -> Any:
        # The data's own method takes neighbours alone.
        return import_pyarrow("the output")[0].concat_tables([self._data.table([row]) for row in rows])
