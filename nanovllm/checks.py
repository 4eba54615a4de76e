"""Checks of arguments that several modules share, and helpful errors for unknown keywords."""

import difflib
import functools
import inspect
import logging
import math
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from nanovllm.accepted import Accepted

logger = logging.getLogger(__name__)

_Class = TypeVar("_Class", bound=type[Any])
_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def suggests_names(
    noun: str,
    meant: Mapping[str, str],
    accepted: Mapping[str, Accepted] = MappingProxyType({}),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[_Class], _Class]:
    """Makes a class take keywords as `takes_keywords` says. Its signature stays."""

    def decorate(cls: _Class) -> _Class:
        cls.__init__ = takes_keywords(noun, meant, accepted, renamed, of=cls.__name__)(cls.__init__)
        return cls

    return decorate


def takes_keywords(
    noun: str,
    meant: Mapping[str, str],
    accepted: Mapping[str, Accepted] = MappingProxyType({}),
    renamed: Mapping[str, str] = MappingProxyType({}),
    of: str | None = None,
) -> Callable[[_Function], _Function]:
    """Makes a method take vLLM's keywords where it can, and answer others with a TypeError that suggests the right one.

    None for an argument whose default is not None means the default, unless the argument's type has None. The method
    keeps its signature, so editors still complete its arguments.

    Args:
        noun: the word for its keywords.
        meant: other libraries' names -> our name, or a sentence with advice.
        accepted: keywords that change nothing. Values that ask for something else raise a ValueError. For keywords that
            accept any value, one line is logged per process and set of keywords.
        renamed: vLLM's names -> ours.
        of: what the log calls the method; None is its name.
    """

    def decorate(function: _Function) -> _Function:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        takes_none = {
            parameter.name: parameter.default in (None, parameter.empty) or "None" in str(parameter.annotation)
            for parameter in parameters
        }
        names = takes_none.keys()
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

        @functools.wraps(function)
        def explaining(self, *args, **kwargs):
            if kwargs.keys() <= names and not [None for value in (*args, *kwargs.values()) if value is None]:
                return function(self, *args, **kwargs)
            if len(args) > len(positional):
                return function(self, *args, **kwargs)  # Python says what is wrong
            given = zip(positional, args, strict=False)
            ours: dict[str, Any] = {name: value for name, value in given if value is not None or takes_none[name]}
            unneeded = []
            for name, value in kwargs.items():
                our_name = renamed.get(name, name)
                if our_name in takes_none:
                    if value is not None and ours.get(our_name) is not None:
                        raise TypeError(f"{our_name} is given twice, by another name too; give it once")
                    if value is not None or (takes_none[our_name] and our_name not in ours):
                        ours[our_name] = value
                elif name not in accepted:
                    raise TypeError(f"unknown {noun} {name!r}; {_hint(name, list(takes_none), noun, meant)}")
                elif not accepted[name].takes(value, kwargs):
                    raise ValueError(f"{name} cannot be {value!r:.100}; {accepted[name].reason}")
                elif value is not None and value is not False and accepted[name].values is None:
                    unneeded.append(f"{name} ({accepted[name].reason})")
            if unneeded:
                _warn_once(f"{of or function.__name__}: some {noun}s change nothing: {'; '.join(unneeded)}")
            return function(self, **ours)

        return cast(_Function, explaining)

    return decorate


@functools.lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    """Logs a message that every request of a script would repeat."""
    logger.warning("%s", message)


def _hint(name: str, known: list[str], noun: str, meant: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name.lower(), [*known, *meant], n=1)
    ours = meant.get(name) or next((meant.get(each, each) for each in close), None)
    if ours is None:
        return f"the {noun}s are {', '.join(known)}"
    return f"did you mean {ours}?" if ours in known else ours
