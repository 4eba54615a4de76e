"""LoRARequest names a LoRA adapter (Hu et al., 2021): files that peft wrote, or tensors in memory."""

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from nanovllm.accepted import ACCEPTED_LORA, RENAMED_LORA
from nanovllm.checks import suggests_names

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@suggests_names("argument", {}, ACCEPTED_LORA, RENAMED_LORA)
@dataclass(frozen=True, eq=False)
class LoRARequest:
    """An adapter that rows are computed with. Rows with the same `lora_int_id` have the same adapter.

    Args:
        lora_name: a name for messages.
        lora_int_id: at least 1; two adapters of one LLM have different ids.
        lora_path: a directory with adapter_config.json and adapter_model.safetensors, or a name on the hub.
        tensors: the adapter's tensors by peft's names, as get_peft_model_state_dict returns them, in place of files.
            They are copied: for other values, make another LoRARequest.
        config: what adapter_config.json would hold, such as LoraConfig.to_dict(); needed with `tensors`.

    Raises:
        TypeError, ValueError: an argument of the wrong type, an id below 1, or neither a path nor tensors.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str] = ""
    tensors: Mapping[str, Any] | None = field(default=None, repr=False)
    config: Mapping[str, Any] | None = field(default=None, repr=False)
    _values: object = field(default_factory=object, init=False, repr=False)  # names the tensors' values

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise TypeError(f"lora_name must be a name, not {self.lora_name!r}")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int):
            raise TypeError(f"lora_int_id must be an integer, not {self.lora_int_id!r}")
        if self.lora_int_id < 1:
            raise ValueError(
                f"lora_int_id must be at least 1, not {self.lora_int_id}; 0 is the model without an adapter"
            )
        if not isinstance(self.lora_path, str | os.PathLike):
            raise TypeError(f"lora_path of adapter {self.lora_name!r} must be a path, not {self.lora_path!r:.100}")
        path = os.fspath(self.lora_path)
        if not isinstance(path, str) or "\0" in path:
            raise ValueError(f"lora_path of adapter {self.lora_name!r} cannot be a path: {path!r:.100}")
        for name, value in (("tensors", self.tensors), ("config", self.config)):
            if value is not None and not isinstance(value, Mapping):
                hint = "; call its to_dict()" if hasattr(value, "to_dict") else ""
                kind = type(value).__name__
                raise TypeError(f"{name} of adapter {self.lora_name!r} must be a mapping, not a {kind}{hint}")
        if bool(os.fspath(self.lora_path)) == (self.tensors is not None):
            raise ValueError(f"adapter {self.lora_name!r} needs either a lora_path or tensors with their config")
        if (self.tensors is None) != (self.config is None):
            raise ValueError(f"adapter {self.lora_name!r}: tensors and config go together")
        if self.tensors is not None:
            # A trainer may change its tensors in place, which cannot always be seen.
            tensors = {name: _copied(tensor) for name, tensor in self.tensors.items()}
            object.__setattr__(self, "tensors", tensors)
            object.__setattr__(self, "config", deepcopy(self.config))

    @property
    def name(self) -> str:
        """vLLM's other name for `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """vLLM's other name for `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """vLLM's other name for `lora_path`."""
        return os.fspath(self.lora_path)

    def fingerprint(self) -> Hashable:
        """Equal while the values are the same: unchanged files, or the tensors of this LoRARequest. A hub name always
        has the same values."""
        if self.tensors is not None:
            return self._values
        path = os.path.abspath(os.path.expanduser(self.lora_path))
        return path, *(_file_state(os.path.join(path, name)) for name in ADAPTER_FILES)

    @property
    def key(self) -> Hashable:
        """Equal for requests of the same adapter in one call."""
        return self.lora_int_id, os.fspath(self.lora_path), None if self.tensors is None else self._values


OneOrManyAdapters = LoRARequest | Sequence[LoRARequest | None] | None


def adapters_of_call(
    given: Any, num_rows: int, max_loras: int | None = None
) -> tuple[LoRARequest | Iterator[LoRARequest | None] | None, list[int] | None]:
    """The adapters of a call's rows.

    Returns:
        The adapter of all rows, or an iterator with one per row; and the order in which the rows should be read, or
        None for their own. If there are more adapters than `max_loras`, rows with the same one come together.

    Raises:
        TypeError, ValueError: as `one_per_row`.
    """
    if given is None or isinstance(given, LoRARequest):
        return given, None
    adapters = one_per_row(given, num_rows)
    keys = [each and each.key for each in adapters]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    if len(places) <= 1:
        return next(iter(adapters), None), None
    if max_loras is None or len(places) <= max_loras:
        return iter(adapters), None
    rows = sorted(range(num_rows), key=lambda row: places[keys[row]])
    return iter([adapters[row] for row in rows]), rows


def one_per_row(given: Any, num_rows: int) -> list[LoRARequest | None]:
    """A list with an adapter or None per row, from such a list or from one for all.

    Raises:
        TypeError, ValueError: neither, a list of another length, or two adapters with the same `lora_int_id`.
    """
    if given is None or isinstance(given, LoRARequest):
        return [given] * num_rows
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"lora_request must be a LoRARequest, or a list with one or None per prompt, not {given!r:.80}")
    if len(given) != num_rows:
        raise ValueError(f"{len(given)} lora_requests for {num_rows} prompts; give one for all, or one per prompt")
    checked = list(map(checked_adapter, given))
    paths: dict[int, Hashable] = {}
    for each in checked:
        if each is not None and paths.setdefault(each.lora_int_id, each.key) != each.key:
            raise ValueError(
                f"two adapters have the lora_int_id {each.lora_int_id}, one is {each.lora_name!r}; give each its own"
            )
    return checked


def checked_adapter(given: Any) -> LoRARequest | None:
    """`given`; a TypeError if it is neither a LoRARequest nor None."""
    if given is not None and not isinstance(given, LoRARequest):
        raise TypeError(f"lora_request must be a LoRARequest or None, not {given!r:.100}")
    return given


def _copied(tensor: Any) -> Any:
    return tensor.detach().clone() if hasattr(tensor, "detach") else tensor


def _file_state(path: str) -> tuple[int, ...] | None:
    """Which file it is, its size, and when it was changed; None if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
