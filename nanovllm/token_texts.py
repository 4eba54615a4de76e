"""The texts of a sequence's tokens, which join to its text even where a character is spread over several tokens."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

_UNKNOWN = "\ufffd"  # what decoders write for bytes that are not a character


class TokenPiece(NamedTuple):
    """What one token adds to a text.

    text: behind other tokens, with U+FFFD for a part of a character. A token that is not in the text has its name here.
    in_bytes: the same in UTF-8, with the bytes of that part; None if the token is not in the text.
    num_dropped: number of leading spaces that are dropped where the token begins a text.
    is_part: whether its text depends on its neighbours: it holds a part of a character, or is not in the text.
    is_byte: it is one byte of a tokenizer with byte fallback.
    """

    text: str
    in_bytes: bytes | None
    num_dropped: int = 0
    is_part: bool = False
    is_byte: bool = False


class Place(NamedTuple):
    """A token's place in a sequence.

    text, in_bytes: what the sequence's own token adds there.
    unfinished: the bytes before it of a character that is not complete.
    begins_text: no token before it has text.
    """

    text: str
    in_bytes: bytes | None
    unfinished: bytes
    begins_text: bool

    def of_other(self, piece: TokenPiece) -> tuple[str, bytes | None]:
        """The text and the bytes that another token would have here. If it does not complete a character, the text is
        as in OpenAI's completions: `bytes:\\xe2\\x80`."""
        text, in_bytes = piece.text, piece.in_bytes
        if in_bytes is None:
            return text, None
        if self.begins_text:
            text, in_bytes = text[piece.num_dropped :], in_bytes[piece.num_dropped :]
        if piece.is_part and _UNKNOWN in text:
            try:
                text = (self.unfinished + in_bytes).decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in in_bytes)
        return text, in_bytes


def places(pieces: Sequence[TokenPiece], follows_text: bool) -> list[Place]:
    """The place of each token of a sequence. A character belongs to the token that completes it.

    follows_text: whether a text is before the first token.
    """
    texts = [pair for _, run in groupby(pieces, attrgetter("is_part")) for pair in _texts_of_run(list(run))]
    found: list[Place] = []
    for piece, (text, unfinished) in zip(pieces, texts, strict=True):
        in_bytes = piece.in_bytes
        if in_bytes is None:
            text = piece.text
        elif not follows_text and text == piece.text:
            text, in_bytes = text[piece.num_dropped :], in_bytes[piece.num_dropped :]
        found.append(Place(text, in_bytes, unfinished, not follows_text))
        follows_text = follows_text or in_bytes is not None
    return found


def _texts_of_run(run: list[TokenPiece]) -> list[tuple[str, bytes]]:
    """The text of each piece, and the bytes before it of a character that is not complete.

    A decoder for byte fallback writes U+FFFD for each byte of a run that is not UTF-8. Other decoders write it for what
    is not UTF-8, and it belongs to the last token that has some of that.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    texts, unfinished, last = [], [], 0
    for index, piece in enumerate(run):
        unfinished.append(decoder.getstate()[0])
        texts.append(decoder.decode(piece.in_bytes or b""))
        last = index if piece.in_bytes else last
    texts[last] += decoder.decode(b"", final=True)
    if any(piece.is_byte for piece in run) and _UNKNOWN in "".join(texts):
        texts = [_UNKNOWN * len(piece.in_bytes or b"") for piece in run]
    return list(zip(texts, unfinished, strict=True))
