"""The texts of a sequence's tokens, which join to its text even where a character is spread over several tokens."""

from codecs import getincrementaldecoder
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

_UNKNOWN = "\ufffd"  # decoders write it for bytes that are not a character


class TokenPiece(NamedTuple):
    """What one token adds to a text.

    text: as it is after other tokens, with U+FFFD for a part of a character. A token that is not in the text has its
        name here.
    in_bytes: the text in UTF-8, with the true bytes of such a part; None if the token is not in the text.
    num_dropped: how many of its leading spaces are dropped if it begins the sequence's text.
    is_part: whether its text depends on its neighbours: it holds a part of a character, or is not in the text.
    is_byte: it is one byte of a tokenizer with byte fallback.
    """

    text: str
    in_bytes: bytes | None
    num_dropped: int = 0
    is_part: bool = False
    is_byte: bool = False

    def first(self) -> "TokenPiece":
        """The piece where it begins the text."""
        start = self.num_dropped
        return self._replace(text=self.text[start:], in_bytes=self.in_bytes and self.in_bytes[start:])


class Place(NamedTuple):
    """A token's place in a sequence.

    own: the piece of the sequence's token, with its text there.
    unfinished: the bytes before it of a character that is not complete.
    begins_text: no token before it has text.
    """

    own: TokenPiece
    unfinished: bytes
    begins_text: bool

    def with_text(self, other: TokenPiece) -> TokenPiece:
        """The piece of another token, with the text that it would have here. If it leaves a character incomplete, the
        text is as in OpenAI's completions: `bytes:\\xe2\\x80`."""
        if self.begins_text:
            other = other.first()
        if not other.is_part or other.in_bytes is None or _UNKNOWN not in other.text:
            return other
        try:
            text = (self.unfinished + other.in_bytes).decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in other.in_bytes)
        return other._replace(text=text)


def places(pieces: Iterable[TokenPiece]) -> list[Place]:
    """The place of each token of a sequence. A character in several tokens belongs to the last one."""
    found = list(pieces)
    first = next((index for index, piece in enumerate(found) if piece.in_bytes is not None), len(found))
    found[first : first + 1] = [piece.first() for piece in found[first : first + 1]]
    in_context = (each for _, run in groupby(found, attrgetter("is_part")) for each in _in_context(list(run)))
    return [Place(piece, unfinished, index <= first) for index, (piece, unfinished) in enumerate(in_context)]


def _in_context(run: list[TokenPiece]) -> list[tuple[TokenPiece, bytes]]:
    """Each piece with its text in this run, and the bytes before it of a character that is not complete.

    Byte fallback writes U+FFFD for each byte of a run that is not UTF-8. Other decoders write it for each part that is
    not UTF-8; it belongs to the last token that has some of the part.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    texts, unfinished, last = [], [], 0
    for index, piece in enumerate(run):
        unfinished.append(decoder.getstate()[0])
        texts.append(decoder.decode(piece.in_bytes or b""))
        last = index if piece.in_bytes else last
    texts[last] += decoder.decode(b"", final=True)
    if any(piece.is_byte for piece in run) and _UNKNOWN in "".join(texts):
        texts = [_UNKNOWN] * len(run)
    shown = [piece if piece.in_bytes is None else piece._replace(text=texts[index]) for index, piece in enumerate(run)]
    return list(zip(shown, unfinished, strict=True))
