"""What belongs to the process as a whole, and so to all LLMs in it: its garbage collector, and whether it is a fork."""

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class Collector:
    """Makes the garbage collector walk through all objects a hundred times less often while some LLM runs. With PyTorch
    loaded and thousands of requests, each walk takes a tenth of a second.

    LLMs in several threads share the collector, and the last one to end restores the thresholds. There is no lock and
    no count, because Ctrl-C could leave either behind. Whatever it leaves, the next call of an LLM puts right.
    """

    def __init__(self):
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._before = self._raised = (0, 0, 0)

    @contextmanager
    def eased(self, user: object) -> Iterator[None]:
        """While this lasts, `user` runs."""
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


class Forks:
    """Refuses to start a model in a fork of a process that has run one. A fork lacks the threads of PyTorch, and it
    would wait for them without end.

    has_computed: whether this process has run a model.
    """

    def __init__(self):
        self.has_computed = self._is_broken = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._is_broken = self.has_computed

    def check(self) -> None:
        """Raises a RuntimeError in such a fork, unless PyTorch uses a single thread there."""
        if not self._is_broken:
            return
        import torch

        if torch.get_num_threads() > 1:
            raise RuntimeError(
                "this process is a fork of one that has run a model, and a fork lacks its threads; start processes by "
                'the "spawn" method'
            )


COLLECTOR, FORKS = Collector(), Forks()
