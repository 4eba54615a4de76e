"""The identity of a job: its input, its model and all else that decides its results. Only the same job is resumed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from nanovllm.jobs.errors import JobError, what_to_do, worded

# Engine options that can change a completion. The others may differ when a job is resumed on another machine.
_DECIDING = (
    "model", "revision", "tokenizer", "dtype", "load_format", "quantization", "kv_cache_dtype", "max_model_len",
    "pooler_config", "hf_overrides", "deterministic",
)  # fmt: skip
# The format of a job's description and journal.
VERSION = 3
_SUFFIXES = (".json", ".safetensors", ".model", ".jinja", ".txt")
_NUM_SAMPLES, _BYTES_OF_SAMPLE = 64, 2**14
_NAMES = {"model": "the model", "engine": "an engine option", "params": "a parameter", "adapters": "an adapter"}


def fingerprints_of_model(directory: Path) -> dict[str, str | None]:
    """A digest of each file of a model's configuration, tokenizer and weights. Small files are hashed whole. For a
    large file, only the size and 64 samples are hashed, because fine-tuning changes nearly all weights.

    The value is None if there is no generation_config.json, because one that is added changes results.
    """
    found: dict[str, str | None] = {"generation_config.json": None}
    for path in sorted(directory.iterdir()):
        if path.suffix not in _SUFFIXES or not path.is_file():
            continue
        found[path.name] = digest_of(path)
    return found


def digest_of(path: Path) -> str:
    """A digest of a file: of all of it, or of its size and samples."""
    with worded(f"{path} cannot be read"), path.open("rb") as file:
        size = path.stat().st_size
        digest = xxhash.xxh3_128(f"{size} ".encode())
        if size <= _NUM_SAMPLES * _BYTES_OF_SAMPLE:
            digest.update(file.read())
        else:
            for sample in range(_NUM_SAMPLES):
                file.seek(sample * (size - _BYTES_OF_SAMPLE) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_BYTES_OF_SAMPLE))
    return digest.hexdigest()


def identity_of(
    lines_digest: str, num_rows: int, directory: Path, engine: dict[str, Any], params: dict[str, Any], seed: int,
    columns: dict[str, Any] | None = None, adapters: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The facts that must be equal for a job to be resumed, as JSON reads them back."""
    deciding = {name: engine[name] for name in _DECIDING if engine.get(name) not in (None, False)}
    # A hub model's directory is named by its commit, and gets its weights only when an LLM needs them.
    is_local = engine["model"] == "bundled" or Path(engine["model"]).expanduser().is_dir()
    identity = {
        "input": {"digest": lines_digest, "rows": num_rows},
        "model": fingerprints_of_model(directory) if is_local else directory.name,
        "engine": deciding,
        "params": params,
        "seed": seed,
        "columns": columns or {},
        "adapters": adapters or {},
    }
    return json.loads(json.dumps(identity, default=repr))


def check_same(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raises a JobError that names the changes. A .json or .txt file that came into the model's directory later is not
    one: it may be a person's notes, or a report."""
    before = {"adapters": {}, **before}  # a job of an older nanovllm has none
    files, found = before.get("model"), now["model"]
    if isinstance(files, dict) and isinstance(found, dict):
        kept = {name: each for name, each in found.items() if name in files or not name.endswith((".json", ".txt"))}
        now = {**now, "model": kept}
    changed = [_change(name, before.get(name), now[name]) for name in now if before.get(name) != now[name]]
    if changed:
        raise JobError(
            f"{path} belongs to another job: {'; '.join(changed)}. Run the command of "
            "that job, choose another output, or start over with --restart, which deletes that job's results"
        )


def _change(name: str, before: Any, now: Any) -> str:
    if name == "input":
        numbers = "" if before["rows"] == now["rows"] else f" (it had {before['rows']:,} rows and has {now['rows']:,})"
        return f"the input has changed{numbers}"
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        values = ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys)
        return f"{_NAMES.get(name, 'an option')} has changed ({values})"
    return f"{_NAMES.get(name, f'the {name}')} has changed (it was {before!r} and is {now!r})"


def load_state(path: Path) -> dict[str, Any] | None:
    """The job's description, or None if there is none.

    Raises:
        JobError: the file is not a description, or one that this version of nanovllm cannot continue.
    """
    try:
        state = json.loads(path.read_text())
        # The journal of version 1 does not say which rows are error rows; version 2 has one digest of a whole model.
        if state["version"] in (1, 2):
            raise JobError(f"an older nanovllm wrote {path}; finish the job with it, or start over with --restart")
        if state["version"] == VERSION and isinstance(state["identity"]["input"]["rows"], int):
            is_whole = isinstance(state["created"], int) and isinstance(state["finished"], bool)
            if is_whole and (not state["finished"] or isinstance(state["report"], dict)):
                return state
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError, IsADirectoryError):
        pass
    raise JobError(f"{path} is not a job's description; move it away, or start over with --restart")


def has_proof(state: dict[str, Any] | None) -> bool:
    """Whether the job with this description writes a proof, so that the one beside its output is its own."""
    return state is not None and bool((state["identity"].get("engine") or {}).get("deterministic"))


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Replaces the description; a kill leaves the old one or the new one."""
    with whole_file(path) as file:
        file.write(json.dumps(state, indent=1).encode())


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager that yields a file to write and then puts it at `path`, whole and on the disk. If the body
    raises, no trace of the file is left.

    Raises:
        JobError: the file cannot be written.
    """
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _replace_durably(new, path)
    except BaseException as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise JobError(f"{path} cannot be written: {error.strerror or error}. {what_to_do(error)}") from error


def _replace_durably(new: Path, path: Path) -> None:
    """Renames a file whose content is on the disk, and syncs the new name too."""
    os.replace(new, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
