"""Log-probabilities as a caller sees them: arrays that also read like vLLM's list of dicts."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np

from nanovllm.token_texts import Place, TokenPiece, places

TokenPieces = Callable[[int], TokenPiece | None] | Mapping[int, TokenPiece | None]

_NO_TEXT = TokenPiece("", None, is_part=True)


class Logprob(NamedTuple):
    """One token's log-probability at one position.

    rank: for the position's own token, 1 + the number of tokens with a larger logit; the most probable tokens are
        numbered 1, 2, …, even if some are tied.
    decoded_token: what the token adds to the text; None without a tokenizer. The texts of the tokens themselves join to
        the text; a character in several tokens belongs to the last one. Another token that would leave a character
        incomplete has OpenAI's form of its bytes, such as `bytes:\\xe2\\x80`. A special token has its name, even where
        `skip_special_tokens` leaves it out of the text.
    token_bytes: the token's bytes, whole characters or not; None without a tokenizer, and for a token that is not in
        the text.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None
    token_bytes: bytes | None = None


class TokenLogprobs(Sequence["dict[int, Logprob] | None"]):
    """Log-probabilities of successive tokens.

    Item i is a dict from token ids to Logprob: token i itself first, then the most probable tokens, best first. It is
    None for tokens that were not scored, such as the first one of a prompt.

    Args:
        token_ids: int32 [num_scored, k + 1], the token itself, then the k most probable ones; −1 if fewer can occur.
        logprobs: float32 [num_scored, k + 1], their log-probabilities.
        ranks: int32 [num_scored], for the token itself: 1 + the number of tokens with a larger logit.
        first: number of tokens before the first one that was scored.
        pieces: a function or a dict that gives what a token adds to a text. It is asked when an item is first read.
    """

    __slots__ = ("_piece", "_places", "first", "logprobs", "ranks", "token_ids")

    def __init__(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        ranks: np.ndarray,
        first: int = 0,
        pieces: TokenPieces | None = None,
    ):
        self.token_ids, self.logprobs, self.ranks, self.first = token_ids, logprobs, ranks, first
        self._piece = pieces if callable(pieces) else ({} if pieces is None else pieces).get
        self._places: list[Place] | None = None

    @classmethod
    def of(cls, numbers: bytes, num_logprobs: int, first: int = 0, pieces: TokenPieces | None = None):
        """Reads the numbers of a step (engine/step.py's TokenNumbers) with `num_logprobs` most probable tokens."""
        rows = np.frombuffer(bytes(numbers), np.int32).reshape(-1, 3 + 2 * num_logprobs)
        return cls(rows[:, 1::2], rows[:, 2::2].view(np.float32), rows[:, 0], first, pieces)

    def __len__(self) -> int:
        return self.first + len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = range(len(self))[index] - self.first  # an IndexError out of range
        if position < 0:
            return None
        token_ids, logprobs = self.token_ids[position].tolist(), self.logprobs[position].tolist()
        ranks = [int(self.ranks[position]), *range(1, len(token_ids))]
        found: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True):
            if token_id >= 0 and token_id not in found:
                found[token_id] = Logprob(logprob, rank, *self._text(position, token_id, is_own=not found))
        return found

    @property
    def of_tokens(self) -> np.ndarray:
        """float32 [num_scored], the log-probabilities of the tokens themselves."""
        return self.logprobs[:, 0]

    def _text(self, position: int, token_id: int, is_own: bool) -> tuple[str | None, bytes | None]:
        """The text and the bytes of the position's own token, or of another one there."""
        if (piece := self._piece(token_id)) is None:
            return None, None
        if self._places is None:
            self._places = places(self._piece(each) or _NO_TEXT for each in self.token_ids[:, 0].tolist())
        place = self._places[position]
        return (place.own if is_own else place.with_text(piece))[:2]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprobs):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("token_ids", "logprobs", "ranks"))
        return self.first == other.first and all(np.array_equal(*pair) for pair in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        num_scored, width = self.token_ids.shape
        return f"TokenLogprobs({num_scored} tokens from {self.first} on, {width - 1} most probable ones)"

    def __reduce__(self):
        # Otherwise the tokenizer would be pickled too.
        pieces = {token_id: self._piece(token_id) for token_id in np.unique(self.token_ids).tolist() if token_id >= 0}
        return TokenLogprobs, (self.token_ids, self.logprobs, self.ranks, self.first, pieces)
