"""Guards that refuse a call inside another call."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Guard:
    """Runs functions, and refuses to run one inside another one in the same thread.

    The inner call comes from a callback of the outer one, such as a stop predicate, or from a signal handler that runs
    during it.

    A function is running if a frame of this guard's `run` is on the stack. A flag, counter or lock would be less
    reliable. Ctrl-C raises KeyboardInterrupt between any two byte codes: between setting a flag and the `try` whose
    `finally` clears it, and also inside that `finally`. Then the flag stays set, and every later call is refused. But a
    frame leaves the stack however its call ends, so after Ctrl-C the next call works.

    Args:
        refusal: the message of the RuntimeError.
    """

    def __init__(self, refusal: str):
        self._refusal = refusal

    def run(self, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Returns the function's result.

        Raises:
            RuntimeError: the call is inside another one.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is Guard.run.__code__ and frame.f_locals["self"] is self:
                raise RuntimeError(self._refusal)
            frame = frame.f_back
        return function(*args, **kwargs)


class ExclusiveGuard(Guard):
    """A guard that also refuses other threads while a function runs, or lets them wait.

    For this it has a lock. Ctrl-C may prevent the lock's release, so the lock is reentrant: the same thread can take it
    again. The lock therefore neither refuses an inner call nor lets it wait for ever; the check of the stack refuses
    it.

    Args:
        refusal, busy: the messages of the RuntimeError in the same thread and in another one.
        waits: another thread's call waits until the function has returned.
    """

    def __init__(self, refusal: str, busy: str, waits: bool = False):
        super().__init__(refusal)
        self._busy, self._waits, self._lock = busy, waits, threading.RLock()

    def run(self, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        if self._waits:
            with self._lock:  # Ctrl-C cannot prevent this release, which other threads wait for
                return super().run(function, *args, **kwargs)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(self._busy)
        try:
            return super().run(function, *args, **kwargs)
        finally:
            self._lock.release()
