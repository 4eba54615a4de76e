"""Python's garbage collector, which all LLMs of a process share."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class Collector:
    """Makes the garbage collector walk through all objects a hundred times less often while an LLM runs. With PyTorch
    loaded and thousands of requests, each walk takes a tenth of a second.

    LLMs in several threads share the collector, and the last one to end restores the thresholds. There is no lock and
    no count, because Ctrl-C could leave either behind. The next call of an LLM repairs the thresholds.
    """

    def __init__(self):
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._before = self._raised = (0, 0, 0)

    @contextmanager
    def eased(self, user: object) -> Iterator[None]:
        """Context manager that raises the thresholds while `user` runs."""
        now = gc.get_threshold()
        if now != self._raised:
            self._before, self._raised = now, (now[0], now[1], min(100 * now[2], 2**31 - 1))
        self._users.add(user)
        gc.set_threshold(*self._raised)
        try:
            yield
        finally:
            if set(self._users) <= {user}:
                gc.set_threshold(*self._before)
            self._users.discard(user)


COLLECTOR = Collector()
