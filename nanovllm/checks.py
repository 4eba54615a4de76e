"""Checks of arguments that several modules share, and helpful errors for unknown keywords."""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])


def real(name: str, value: Any) -> float:
    """The value as a finite float.

    Raises:
        TypeError, ValueError: it is not a number, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """The value as a plain int of at least `minimum`.

    Raises:
        TypeError, ValueError: it is not an integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """The value, if it is a bool; raises a TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def seed_number(value: Any) -> int:
    """The value as a 64-bit seed; raises a TypeError or ValueError if it is not one."""
    seed = integer("seed", value)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be between 0 and 2**64 - 1, not {seed}")
    return seed


def suggests_names(noun: str, meant: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Makes a class answer an unknown keyword with a TypeError that suggests the right one.

    The class keeps its signature, so editors still complete its arguments.

    Args:
        noun: the class's word for its keywords.
        meant: other libraries' names -> our name, or a sentence with advice.
    """

    def decorate(cls: _Class) -> _Class:
        init = cls.__init__
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def explaining_init(self, *args, **kwargs):
            for name in kwargs:
                if name not in known:
                    raise TypeError(f"unknown {noun} {name!r}; {_hint(name, known, noun, meant)}")
            init(self, *args, **kwargs)

        cls.__init__ = explaining_init
        return cls

    return decorate


def _hint(name: str, known: list[str], noun: str, meant: Mapping[str, str]) -> str:
    ours = meant.get(name) or next(iter(difflib.get_close_matches(name.lower(), known, n=1)), None)
    if ours is None:
        return f"the {noun}s are {', '.join(known)}"
    return f"did you mean {ours}?" if ours in known else ours
