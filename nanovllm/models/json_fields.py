"""Reads JSON files, and checked values of the fields of config.json. Each error names the file or the field."""

import json
from pathlib import Path
from typing import Any

# Numbers beyond these bounds are mistakes. They would exhaust the memory or take minutes, and no later error would name
# the field.
_MIN_NUMBER, _MAX_NUMBER = 1e-12, 1e18
MAX_SIZE = 2**24


def read_json(path: Path, kind: type = dict, default: Any = None) -> Any:
    """The JSON object in a file, or the list if `kind` is list. If the file is missing, `default` is returned unless it
    is None.

    Raises:
        ValueError: the file is missing, or it cannot be read, or it holds something else; the message names the file.
    """
    if not path.exists():
        if default is not None:
            return default
        raise ValueError(f"{path} is missing; model must be a directory in the Hugging Face layout")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")  # reading a pipe would wait for its writer
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # unreadable, not UTF-8, not JSON, or nested too deep
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}")
    return content


def read_list(raw: dict[str, Any], name: str) -> list[Any]:
    value = raw.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} in config.json must be a list, not {shown(value)}")
    return value


def _given(raw: dict[str, Any], name: str, default: Any) -> Any:
    """The field's value, or the default if the field is absent or null."""
    value = raw.get(name)
    return default if value is None else value


def read_flag(raw: dict[str, Any], name: str, default: bool) -> bool:
    value = _given(raw, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} in config.json must be true or false, not {shown(value)}")
    return value


def read_number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _given(raw, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _MIN_NUMBER <= value <= _MAX_NUMBER:
        limits = f"{_MIN_NUMBER:g} to {_MAX_NUMBER:g}"
        raise ValueError(f"{name} in config.json must be a number from {limits}, not {shown(value)}")
    return float(value)


def read_numbers(raw: dict[str, Any], name: str, length: int) -> tuple[float, ...]:
    values = read_list(raw, name)
    if len(values) != length:
        raise ValueError(f"{name} in config.json must hold {length} numbers, not {len(values)}")
    return tuple(read_number({name: value}, name) for value in values)


def read_count(
    raw: dict[str, Any], name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE
) -> int:
    value = _given(raw, name, default)
    if value is None:
        raise ValueError(f"config.json has no {name}")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{name} in config.json must be an integer from {minimum} to {maximum}, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """The value as error messages show it; a long one is cut."""
    shown = repr(value)
    return shown if len(shown) < 100 else f"{shown[:40]}… ({len(shown)} characters)"
