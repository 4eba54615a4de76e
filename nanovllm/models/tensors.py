"""The tensors of a checkpoint, in safetensors files or in memory, behind one interface. Nothing is unpickled."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn


class Stored:
    """A tensor of a safetensors file. Only the parts that are asked for are read.

    Args:
        what: its description in errors.
        file: from safe_open.
    """

    def __init__(self, what: str, name: str, file: Any):
        self.what, self._name, self._file = what, name, file

    @property
    def shape(self) -> tuple[int, ...]:
        try:
            return tuple(self._file.get_slice(self._name).get_shape())
        except (SafetensorError, RuntimeError) as error:  # such as a type of number that PyTorch lacks
            raise self._unreadable(error) from None

    def part(self, source: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """The part that the `source` of a Shard names."""
        try:
            return self._file.get_slice(self._name)[_slices(source)]
        except (SafetensorError, RuntimeError) as error:
            raise self._unreadable(error) from None

    def whole(self) -> torch.Tensor:
        try:
            return self._file.get_tensor(self._name)
        except SafetensorError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> ValueError:
        return ValueError(f"{self.what} cannot be read: {error}")


class Given:
    """A tensor in memory, on any device, with the interface of Stored."""

    def __init__(self, what: str, tensor: torch.Tensor):
        self.what, self._tensor = what, tensor.detach()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def part(self, source: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return self._tensor[_slices(source)]

    def whole(self) -> torch.Tensor:
        return self._tensor


class PackedExpert:
    """The matrix of one expert, or some of its rows, in a tensor of all experts, with the interface of Stored.

    Args:
        packed: [num_experts, rows, columns], or with rows and columns exchanged if `is_transposed`.
        expert: the expert's index.
        first_row, shape: the rows that belong to the matrix, and the matrix's shape.
    """

    what: str

    def __init__(self, packed: "AnyTensor", expert: int, first_row: int, shape: tuple[int, ...], is_transposed: bool):
        self.what, self.shape = packed.what, shape
        self._packed, self._expert, self._first_row, self._is_transposed = packed, expert, first_row, is_transposed

    def part(self, source: tuple[tuple[int, int], ...]) -> torch.Tensor:
        (start, length), columns = source
        rows = (self._first_row + start, length)
        if self._is_transposed:
            return self._packed.part(((self._expert, 1), columns, rows))[0].T.contiguous()
        return self._packed.part(((self._expert, 1), rows, columns))[0]

    def whole(self) -> torch.Tensor:
        return self.part(tuple((0, size) for size in self.shape))


def _slices(source: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in source)


AnyTensor = Stored | Given | PackedExpert
Tensors = Mapping[str, AnyTensor]  # by the names of a checkpoint


def given_tensors(weights: Iterable[Any]) -> dict[str, Given]:
    """The tensors of (name, tensor) pairs, by name.

    Raises:
        TypeError: an item is not such a pair.
        ValueError: a name is given twice, or a tensor is not dense.
    """
    found: dict[str, Given] = {}
    for pair in weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"weights must be pairs of a name and a tensor, not {type(pair).__name__} {pair!r:.100}")
        name, tensor = pair
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise TypeError(
                f"tensor {name} is a {type(tensor).__name__}; give a plain torch.Tensor, such as a DTensor's "
                "full_tensor()"
            )
        if name in found:
            raise ValueError(f"tensor {name} is given twice")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"tensor {name} is on {tensor.device} in layout {tensor.layout}; give one with all values")
        found[name] = Given(f"tensor {name}", tensor)
    return found


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name.

    Raises:
        ValueError: the file cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")  # reading a pipe would wait for its writer
    try:
        file: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        with path.open("rb") as content:
            is_pointer = content.read(24).startswith(b"version https://git-lfs")
        hint = "it is a pointer of Git LFS; run git lfs pull" if is_pointer else str(error)
        raise ValueError(f"{path} is truncated or not a safetensors file: {hint}") from None
    # A safetensors file is not a mapping.
    return {name: Stored(f"tensor {name} in {path}", name, file) for name in file.keys()}  # noqa: SIM118
