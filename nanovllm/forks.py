"""Whether this process is a fork that cannot run a model."""

import os


class Forks:
    """Refuses to start a model in a fork of a process that has run one. A fork lacks the threads of PyTorch, and it
    would wait for them forever.

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


FORKS = Forks()
