"""What the loop asks of whoever says which tokens a completion may hold. The engine itself knows no text."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class TokenGuide(Protocol):
    """A stop predicate that also says which tokens may come next."""

    def __call__(self, token_id: int) -> bool:
        """Takes the token that was generated next; True ends the completion."""
        ...

    @staticmethod
    def fill_masks(guides: Sequence[Any], masks: np.ndarray) -> None:
        """Writes the mask of each guide's next token.

        masks: int32 [len(guides), ceil(vocab_size / 32)], contiguous; bit `id & 31` of word `id >> 5` says whether the
            id may come next.
        """
        ...
