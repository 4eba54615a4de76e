"""Passes new weights from the driver to the ranks, as safetensors files in a directory that only this user can open."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanovllm.machine import free_bytes
from nanovllm.models.tensors import Given, Stored

_MEMORY = Path("/dev/shm")  # files there are memory, which ranks read as fast as their own
_MARGIN = 2**28
_FILE_BYTES = 2**29  # approximate size of a file; the tensors of one file are copied at a time


def weights_directories(meeting_place: str) -> list[Path]:
    """The directories of `written_weights` for the ranks that met there: in memory, and beside that place."""
    name = f"{Path(meeting_place).name}-weights"
    return [place / name for place in (_MEMORY, Path(meeting_place).parent)]


@contextmanager
def written_weights(tensors: Mapping[str, Given], meeting_place: str) -> Iterator[str]:
    """Context manager that writes the tensors to files and yields their directory.

    The directory is in memory if they fit there; see `weights_directories`. Only this user can open it.

    Raises:
        RuntimeError: they cannot be written.
    """
    wholes = {name: tensor.whole() for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in wholes.values())
    in_memory, beside = weights_directories(meeting_place)
    directory = in_memory if _fit_in_memory(num_bytes) else beside
    try:
        try:
            shutil.rmtree(directory, ignore_errors=True)  # Ctrl-C may have left it
            directory.mkdir(mode=0o700)
            for number, names in enumerate(_batches(wholes)):
                save_file({name: _on_host(wholes[name]) for name in names}, directory / f"{number}.safetensors")
        except (OSError, SafetensorError) as error:
            raise RuntimeError(
                f"{num_bytes / 2**30:.2f} GiB of weights cannot be written to {directory}, where the ranks would read "
                f"them: {error}; make room there, or let TMPDIR name another directory"
            ) from None
        yield str(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def stored_weights(directory: str) -> dict[str, Stored]:
    """The tensors of such a directory; a RuntimeError if they cannot be read."""
    found = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"{path} cannot be read: {error}") from None
        found.update({name: Stored(f"tensor {name}", name, file) for name in file.keys()})  # noqa: SIM118
    return found


def _fit_in_memory(num_bytes: int) -> bool:
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return False
    free = min(shutil.disk_usage(_MEMORY).free, free_bytes(torch.device("cpu")))
    return num_bytes + _FILE_BYTES + _MARGIN <= free


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names, in one group per file."""
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if names and num_bytes + tensor.nbytes > _FILE_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += tensor.nbytes
    if names:
        yield names


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, because safetensors refuses tensors that share memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
