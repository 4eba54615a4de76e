"""The LoRA adapters of a job, by the names that its rows use."""

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm import LoRARequest
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.identity import digest_of
from nanovllm.lora import ADAPTER_FILES

logger = logging.getLogger(__name__)


def name_and_directory(text: str) -> tuple[str, str]:
    """Both parts of NAME=DIRECTORY; a ValueError if one is missing."""
    name, _, directory = text.partition("=")
    if not name or not directory:
        raise ValueError
    return name, directory


def by_name(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A dict of the pairs; a ValueError if a name has two directories."""
    found: dict[str, str] = {}
    for name, directory in pairs:
        if found.setdefault(name, directory) != directory:
            raise ValueError(f"two adapters have the name {name!r}: {found[name]} and {directory}; give each its own")
    return found


def requests_of(adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """The adapters, from their directories.

    Raises:
        JobError: a directory lacks a file.
    """
    found = {}
    for number, (name, given) in enumerate(adapters.items(), 1):
        directory = Path(given).expanduser().resolve()
        if not directory.is_dir():
            raise JobError(
                f"the adapter {name!r} cannot be read: {directory} is not a directory; a job takes no hub names"
            )
        for file in ADAPTER_FILES:
            if not (directory / file).is_file():
                raise JobError(
                    f"the adapter {name!r} cannot be read: {directory} has no {file}; name a directory that peft's "
                    "save_pretrained wrote"
                )
        found[name] = LoRARequest(name, number, str(directory))
    return found


def warn_if_unused(adapters: Collection[str], used: Collection[str | None]) -> None:
    """Logs a warning if rows can run, and all of them have the model itself, although the job has adapters.

    used: the names that rows have, and None if a row has none.
    """
    if adapters and set(used) == {None}:
        names = ", ".join(map(repr, adapters))
        logger.warning('no row names an adapter, so the model itself computes all rows; give rows "adapter": %s', names)


def fingerprints_of(adapters: Mapping[str, LoRARequest]) -> dict[str, Any]:
    """A digest of each file of each adapter. A copy of the files in another place has the same."""
    paths = {name: Path(request.lora_path) for name, request in adapters.items()}
    return {name: {file: digest_of(path / file) for file in ADAPTER_FILES} for name, path in paths.items()}


def adapter_name(value: Any) -> str | None:
    """The name in a row's field "adapter"; None if it is null; a ValueError if it is something else."""
    if value is None or value != value:  # NaN is pandas' null
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f'"adapter" must be the name of an adapter, or null, not {value!r}')
    return value


def check_known(name: str | None, known: Collection[str]) -> None:
    """Raises a ValueError if the job has no such adapter."""
    if name is not None and name not in known:
        has = ", ".join(map(repr, known)) or "none"
        raise ValueError(f"unknown adapter {name!r}; the job has {has} (--adapter NAME=DIRECTORY adds one)")
