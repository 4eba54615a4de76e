"""The proof of a job that ran with deterministic=True: a manifest, and a hash of each output row.

Both are beside the output; docs/jobs.md describes them. `nanovllm verify` reads them on another day: it runs some rows
alone, on the same kind of device and with the same versions, and each must give the same bytes.
"""

import json
import platform
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanovllm import Preflight, __version__
from nanovllm.jobs.errors import JobError, worded
from nanovllm.jobs.identity import whole_file
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.parquet import canonical_rows, is_parquet
from nanovllm.jobs.paths import JobPaths

# The format of a manifest.
FORMAT = 1
# A row's hash is the beginning of its SHA-256.
BYTES_OF_HASH = 16
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "llguidance", "jinja2")
_SUFFIXES = (".json", ".model", ".jinja", ".txt")
# Words for values of an environment, and for the beginnings of other values' paths.
_NAMES = {
    ("weights", "all"): "the digest of all weights",
    ("chat_template",): "the SHA-256 of the chat template in use",
}
_BEGINNINGS = {
    ("files",): "the SHA-256 of", ("versions",): "the version of", ("weights", "tensors"): "the weight",
    ("device",): "the device's",
}  # fmt: skip
_MAX_SHOWN = 5


# The environment


def environment_of_files(preflight: Preflight) -> dict[str, Any]:
    """The part of the environment that is known without the weights: versions, the model's and the tokenizer's files,
    the chat template."""
    directories = {"": preflight.directory}
    if preflight.tokenizer_directory != preflight.directory:
        directories["tokenizer: "] = preflight.tokenizer_directory
    files: dict[str, str | None] = {"generation_config.json": None}  # one that is added changes results
    for prefix, directory in directories.items():
        # The configuration of a pooling is in a directory of its own.
        for path in sorted([*directory.iterdir(), *directory.glob("*/config.json")]):
            if path.suffix in _SUFFIXES and path.is_file():
                with worded(f"{path} cannot be read"):
                    files[prefix + path.relative_to(directory).as_posix()] = sha256(path.read_bytes()).hexdigest()
    template = getattr(preflight.get_tokenizer(), "chat_template", None)
    return {
        "files": files,
        "chat_template": None if template is None else sha256(json.dumps(template).encode()).hexdigest(),
        "versions": {"nanovllm": __version__, "python": platform.python_version(), **dict(map(_version, _PACKAGES))},
    }


def _version(package: str) -> tuple[str, str | None]:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values that differ, each as a dict of `what`, `recorded` and `found`; None is a value that is missing."""
    values = [dict(_leaves(each)) for each in (before, now)]
    names = [name for name in {**values[0], **values[1]} if values[0].get(name) != values[1].get(name)]
    return [{"what": _in_words(name), "recorded": values[0].get(name), "found": values[1].get(name)} for name in names]


def environment_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The differences of those parts of an environment that are in `now`. Files that were not recorded do not count: a
    directory may get notes, or another job's output. A new chat template shows in the hash of the one in use."""
    before = {name: before.get(name) for name in now}
    if "files" in now:
        recorded = before["files"] or {}
        now = {**now, "files": {name: each for name, each in now["files"].items() if name in recorded}}
    return differences(before, now)


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, each in value.items():
        yield from _leaves(each, (*path, name))


def _in_words(path: tuple[str, ...]) -> str:
    if path in _NAMES:
        return _NAMES[path]
    for length in (2, 1):
        if len(path) > length and path[:length] in _BEGINNINGS:
            return f"{_BEGINNINGS[path[:length]]} {' '.join(path[length:])}"
    return "the " + " ".join(path).replace("_", " ")


def as_sentence(difference: Mapping[str, Any]) -> str:
    """A difference for a person."""
    before, now = ("missing" if value is None else repr(value) for value in map(difference.get, ("recorded", "found")))
    return f"{difference['what']} was {before} and is {now}"


def check_same_environment(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raises a JobError that names what has changed since the first run of a job."""
    if found := environment_differences(before, now):
        more = [f"and {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
        changed = "; ".join([*map(as_sentence, found[:_MAX_SHOWN]), *more])
        raise JobError(
            f"{path} was begun in another environment, so the remaining rows would not match the finished ones: "
            f"{changed}. Restore that environment, or start over with --restart, which deletes that job's results"
        )


# The files


def check_recordable(options: JobOptions) -> None:
    """Raises a JobError if a manifest cannot hold an option."""
    for kind in ("params", "engine"):
        for name, value in getattr(options, kind).items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise JobError(
                    f"the manifest of a deterministic job holds its options as JSON, which {name}={value!r:.100} is "
                    "not; give it as a string, a number, a list or a dict, or leave deterministic out"
                ) from None


def rows_of(path: Path, is_table: bool) -> Iterator[bytes]:
    """The rows of an output as bytes, each with a line feed: its lines, or `canonical_rows` of a table."""
    if is_table:
        yield from canonical_rows(path)
    else:
        with worded(f"{path} cannot be read"), path.open("rb") as file:
            yield from file


def hash_of(row: bytes) -> str:
    return sha256(row).digest()[:BYTES_OF_HASH].hex()


def write_proof(
    written: Path, paths: JobPaths, options: JobOptions, job: dict[str, Any], environment: dict[str, Any]
) -> dict[str, Any]:
    """Writes the manifest and the hashes of the rows.

    Args:
        written: the output, by any name.
        paths: the files of the job.
        options: its options.
        job: its identity.
        environment: what its results depend on besides; `environment_of_files` and `LLM.provenance`.

    Returns:
        The summary for the report.
    """
    of_output, of_hashes, num_rows = sha256(), sha256(), 0
    with whole_file(paths.hashes) as file:
        for row in rows_of(written, is_parquet(str(paths.output))):
            line = hash_of(row).encode() + b"\n"
            file.write(line)
            of_output.update(row)
            of_hashes.update(line)
            num_rows += 1
    given = [options.input] if isinstance(options.input, str) else list(options.input)
    manifest = {
        "format": FORMAT,
        "output": {"rows": num_rows, "sha256": of_output.hexdigest(), "hashes_sha256": of_hashes.hexdigest()},
        "job": job,
        "options": {"input": given, "model": options.model, "engine": options.engine},
        "environment": environment,
    }
    with whole_file(paths.manifest) as file:
        file.write(json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1).encode() + b"\n")
    return {
        "path": str(paths.manifest), "rows": num_rows, "output": of_output.hexdigest(),
        "weights": environment["weights"]["all"], "versions": environment["versions"], "device": environment["device"],
    }  # fmt: skip


def _checksum(manifest: dict[str, Any]) -> str:
    """Tells a manifest from one that was edited or damaged. It is not a signature."""
    values = {name: value for name, value in manifest.items() if name != "checksum"}
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def load_manifest(paths: JobPaths) -> dict[str, Any]:
    """The manifest of an output.

    Raises:
        JobError: there is none, or it is not one that this version of nanovllm can read.
    """
    path = paths.manifest
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        reason = "a job writes one if it runs with --deterministic and finishes"
        raise JobError(f"there is no manifest {path}: {reason}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"{path} cannot be read as a manifest: {error}; copy it again from the job") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise JobError(f"{path} is not the manifest of a job: it has no format; copy it again from the job")
    if manifest["format"] != FORMAT:
        raise JobError(
            f"{path} has format {manifest['format']}, and this nanovllm reads format {FORMAT}; use the version that "
            "wrote it"
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise JobError(f"{path} is not as the job wrote it: its checksum does not match; copy it again from the job")
    return manifest


def load_hashes(paths: JobPaths, manifest: dict[str, Any]) -> Iterator[str]:
    """The recorded hash of each row, in order.

    Raises:
        JobError: at once, if the file is missing or not the one that the job wrote.
    """
    digest = sha256()
    try:
        with paths.hashes.open("rb") as file:
            while data := file.read(2**20):
                digest.update(data)
    except OSError as error:
        raise JobError(f"{paths.hashes}, the hashes of the rows, cannot be read: {error.strerror}") from None
    if digest.hexdigest() != manifest["output"]["hashes_sha256"]:
        raise JobError(f"{paths.hashes} does not belong to {paths.manifest.name}; copy both again from the job")
    return _lines_of(paths.hashes)


def _lines_of(path: Path) -> Iterator[str]:
    with path.open() as file:
        yield from map(str.strip, file)
