"""The files of a job, and the checks of all paths before anything is written."""

import sys
from pathlib import Path
from typing import NamedTuple

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.source import check_name, input_paths


class JobPaths(NamedTuple):
    """The output of a job, and the files beside it: the job's description, the journal, and of a deterministic job the
    manifest and the hashes of the rows."""

    output: Path
    state: Path
    journal: Path
    manifest: Path
    hashes: Path

    @classmethod
    def of(cls, output: str) -> "JobPaths":
        """The files of the job with this output. If it is a link, the other files are beside its target."""
        path = Path(output).resolve()
        return cls(path, *(Path(f"{path}.{kind}") for kind in ("job", "part", "manifest", "rows")))

    @property
    def of_proof(self) -> list[Path]:
        """The files that only a deterministic job has."""
        return [self.manifest, self.hashes]

    def owned(self, with_proof: bool) -> list[Path]:
        """All paths that the job writes."""
        ours = [path for path in self if with_proof or path not in self.of_proof]
        return [*ours, *(path.with_name(path.name + ".new") for path in ours)]


def checked_paths(options: JobOptions) -> list[str]:
    """The input's files. Refuses streams that are closed, and paths that would overwrite each other's files or that
    cannot be written at the end.

    Raises:
        JobError: names the path.
    """
    is_stream = options.output == "-"
    ours = [] if is_stream else JobPaths.of(options.output).owned(options.is_deterministic)
    reports = [] if options.report is None else [Path(options.report).resolve()]
    paths = input_paths(options.input, [*ours, *reports])
    for name, is_used, stream in (("input", "-" in paths, sys.stdin), ("output", is_stream, sys.stdout)):
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
    check_name(options.output, is_output=True)
    if ours and ours[0].exists() and not ours[0].is_file():
        raise JobError(f'the output {ours[0]} is not a regular file; "-" is standard output')
    return paths
