"""A model's tokenizer: it encodes and decodes, and turns the tokenizer's errors into ValueErrors."""

import re
import unicodedata
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from nanovllm.token_texts import TokenPiece

Given = TypeVar("Given")
Found = TypeVar("Found")

NO_TOKENIZER = "the model has no tokenizer"
# Exceptions that end the program or its generators, and are not the fault of a text.
EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)
# The names of tokens that hold bytes: one byte in tokenizers with byte fallback, and GPT-2's characters in byte-level
# ones, where the bytes that have no printable character of their own are numbered from U+0100 on.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTES = {chr(byte): byte for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
_BYTES |= {chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*_BYTES.values()}))}


class Tokenizer:
    """A model's tokenizer, or none. A text that it cannot encode gives a ValueError, which is its prompt's error.

    Args:
        tokenizer: transformers' tokenizer of the model, or None.
        max_model_len: refuse, before tokenizing, texts that are certain to have more tokens; None refuses none.
    """

    def __init__(self, tokenizer: Any, max_model_len: int | None = None):
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        # Many requests ask about the same tokens.
        self._has_text = lru_cache(maxsize=None)(self._find_whether_it_has_text)
        self._piece = lru_cache(maxsize=None)(self._find_piece)
        self._bad_word_ids = lru_cache(maxsize=1024)(self._find_bad_word_ids)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence id, if it has one."""
        token_id = getattr(self.tokenizer, "eos_token_id", None)
        return () if token_id is None else (token_id,)

    @property
    def first_token_ids(self) -> list[int]:
        """The token that begins texts, or else the one that ends them; empty without either."""
        names = ("bos_token_id", "eos_token_id")
        found = [token_id for name in names if (token_id := getattr(self.tokenizer, name, None)) is not None]
        return found[:1]

    def encode_texts(
        self,
        texts: Sequence[str | tuple[str, str]],
        add_special_tokens: bool,
        splits_special: bool = False,
        max_tokens: int | None = None,
    ) -> list[list[int] | ValueError]:
        """Token ids of every text or pair of texts, or the reason why it has none.

        splits_special: a special token in a text is ordinary text.
        max_tokens: longer texts are cut to this many tokens, those that the tokenizer adds included.
        """
        if self.tokenizer is None:
            error = ValueError(f"{NO_TOKENIZER}; give the prompt as token ids, or tokenizer= (--tokenizer)")
            return [error] * len(texts)
        options: dict[str, Any] = {
            "add_special_tokens": add_special_tokens,
            "return_attention_mask": False,
            "verbose": False,
        }
        if splits_special:
            options["split_special_tokens"] = True
        if max_tokens is not None:
            options |= {"truncation": True, "max_length": max_tokens}
        refusals = [self._refusal("".join(text)) if max_tokens is None else None for text in texts]
        rest = [text for text, refusal in zip(texts, refusals, strict=True) if refusal is None]
        found = all_or_each(lambda some: self.tokenizer(some, **options)["input_ids"], rest)
        encoded = map(_ids_or_error, map("".join, rest), found)
        if add_special_tokens and not splits_special:
            encoded = map(self._without_second_bos, encoded)
        return [next(encoded) if refusal is None else refusal for refusal in refusals]

    @cached_property
    def num_closing(self) -> int:
        """How many special tokens the tokenizer puts after a text."""
        whole, bare = (self.encode_texts(["a"], add_special_tokens)[0] for add_special_tokens in (True, False))
        if isinstance(whole, ValueError) or isinstance(bare, ValueError) or not bare:
            return 0
        starts = [start for start in range(len(whole)) if whole[start : start + len(bare)] == bare]
        return len(whole) - starts[0] - len(bare) if starts else 0

    def _without_second_bos(self, found: list[int] | ValueError) -> list[int] | ValueError:
        """A text that a chat template wrote begins with the token that the tokenizer adds, too."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return found[1:] if isinstance(found, list) and found[:2] == [bos, bos] else found

    def _refusal(self, text: str) -> ValueError | None:
        """The error for a text that is certain to have more than `max_model_len` tokens, so that it is not
        tokenized."""
        longest = self._longest_token if self._max_model_len is not None else None
        if longest is None or self._max_model_len is None or 4 * len(text) <= longest * self._max_model_len:
            return None
        if repr(self.tokenizer.backend_tokenizer.normalizer) == "NFC()":
            text = unicodedata.normalize("NFC", text)
        num_bytes = len(text.encode(errors="replace"))
        if num_bytes <= longest * self._max_model_len:
            return None
        return ValueError(
            f"the prompt's {num_bytes} bytes are more than max_model_len={self._max_model_len} tokens of at most "
            f"{longest} bytes can hold; shorten it"
        )

    @cached_property
    def _longest_token(self) -> int | None:
        """Maximum number of bytes of text per token; None if the tokenizer may drop or merge any number of bytes."""
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        backend = self.tokenizer.backend_tokenizer
        keeps_all = "ByteLevel" in repr(backend.pre_tokenizer) and repr(backend.normalizer) in ("None", "NFC()")
        if not keeps_all or any(each.lstrip or each.rstrip for each in self.tokenizer.added_tokens_decoder.values()):
            return None
        return max(len(token.encode()) for token in backend.get_vocab())

    def bad_words_as_ids(self, bad_words: Iterable[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """SamplingParams.bad_words with every string replaced by its token ids; ids stay as they are.

        Each string gives its ids without leading spaces. It also gives its ids with one leading space, if those are as
        many and begin with another id. This is vLLM's rule, `SamplingParams.update_from_tokenizer`.

        Raises:
            ValueError: there is no tokenizer, or it has no tokens for a string.
        """
        ids: list[tuple[int, ...]] = []
        for word in bad_words:
            ids += self._bad_word_ids(word) if isinstance(word, str) else [word]
        return tuple(ids)

    def _find_bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        if self.tokenizer is None:
            raise ValueError(f"{NO_TOKENIZER}; give bad_words as lists of token ids")
        word = word.lstrip() or word  # a word may be nothing but spaces
        bare, spaced = self.encode_texts([word, " " + word], add_special_tokens=False)
        if isinstance(bare, ValueError) or isinstance(spaced, ValueError) or not bare:
            raise ValueError(f"the tokenizer has no tokens for the bad word {word!r}")
        ids = [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]
        return [tuple(token_ids) for token_ids in ids]

    def decode(
        self, completions: Sequence[list[int]], skip_special_tokens: bool, follows: Sequence[bool] = ()
    ) -> list[str]:
        """The text of each list of token ids.

        follows: whether each one follows a text; empty if none does. Then the text begins with the space that the
            decoder drops at the beginning of a whole text.
        """
        lead, lead_text = self._lead if any(follows) else ([], "")
        if lead:
            completions = [[*lead, *ids] if each else ids for ids, each in zip(completions, follows, strict=True)]
        texts = self.tokenizer.batch_decode(
            completions, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return [text[len(lead_text) * each :] for text, each in zip(texts, follows, strict=True)] if lead else texts

    @cached_property
    def _letter(self) -> list[int]:
        """The tokens of a letter, which is put beside tokens to decode them in context."""
        return self.tokenizer("a", add_special_tokens=False)["input_ids"]

    @cached_property
    def _lead(self) -> tuple[list[int], str]:
        """The tokens of a text to put before tokens that follow one, and that text; empty if the decoder drops no
        space at the beginning of a text, as those of Llama 2 and Mistral do."""
        try:
            token_ids = self._letter
            once, twice = self.decode([token_ids, token_ids * 2], skip_special_tokens=False)
        except EXITS:
            raise
        except BaseException:  # it has no token for the letter
            return [], ""
        return ([], "") if twice == once * 2 else (token_ids, once)

    @property
    def drops_first_space(self) -> bool:
        """Whether it matters to `decode` that tokens follow a text."""
        return self.tokenizer is not None and bool(self._lead[0])

    def piece(self, token_id: int, skip_special_tokens: bool, follows_text: bool) -> TokenPiece | None:
        """What a token adds to a text; None without a tokenizer or if it fails."""
        return self._piece(token_id, skip_special_tokens, follows_text)

    def _find_piece(self, token_id: int, skip_special_tokens: bool, follows_text: bool) -> TokenPiece | None:

        def read(ids: list[int]) -> list[tuple[str, str, str, bool]]:
            text, first = self.decode([ids] * 2, False, [True, follows_text])
            name = str(self.tokenizer.convert_ids_to_tokens(token_id))
            return [(text, first, name, self.has_text(token_id, skip_special_tokens))]

        (found,) = all_or_each(read, [token_id])
        if isinstance(found, BaseException):  # without a tokenizer too
            return None
        text, first, name, has_text = found
        if not has_text:
            return TokenPiece(text, None, is_part=True)
        in_bytes = whole = text.encode(errors="replace")
        byte = None if text == name else _BYTE_TOKEN.fullmatch(name)
        if byte is not None:
            in_bytes = bytes.fromhex(byte[1])
        elif "\ufffd" in text and _BYTES.keys() >= set(name):
            in_bytes = bytes(_BYTES[character] for character in name)
        is_part = byte is not None or in_bytes != whole
        return TokenPiece(text, in_bytes, len(text) - len(first), is_part, byte is not None)

    def whole_characters(self, token_ids: list[int], is_cut: bool) -> list[int]:
        """A part of a completion without the bytes of characters that its end cuts, and its beginning if `is_cut`. Byte
        fallback decodes all bytes beside a cut character as U+FFFD."""
        pieces = [self.piece(token_id, True, True) for token_id in token_ids]
        if not any(piece is not None and piece.is_byte for piece in (*pieces[:1], *pieces[-1:])):
            return token_ids
        parts = [(piece.in_bytes or b"") if piece is not None and piece.is_byte else b"" for piece in pieces]
        ends = (index for index, part in enumerate(parts) if not part or part[0] & 0xC0 != 0x80)
        start = next(ends, len(parts)) if is_cut else 0
        decoder = getincrementaldecoder("utf-8")("ignore")
        decoder.decode(b"".join(part or b" " for part in parts[start:]))
        num_pending = len(decoder.getstate()[0])
        return token_ids[start : len(token_ids) - num_pending]

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens by their texts."""
        tokens = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {token.content: token_id for token_id, token in tokens.items() if token.special}

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether a token adds anything to the text. Skipped special tokens and ids that the tokenizer lacks do not."""
        return self._has_text(token_id, skip_special_tokens)

    def _find_whether_it_has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        # Alone, a space can vanish at the text's beginning, so the token is decoded between two others.
        without, with_it = self._letter * 2, [*self._letter, token_id, *self._letter]
        return len(set(self.decode([without, with_it], skip_special_tokens))) == 2


def all_or_each(
    function: Callable[[list[Given]], Sequence[Found]], given: list[Given]
) -> Sequence[Found | BaseException]:
    """Calls the function with all items. If it raises, calls it with each item alone, which then has its own result or
    error.

    Tokenizers raise all kinds of errors; a panic of theirs is not even an Exception.
    """
    if not given:
        return []
    try:
        return function(given)
    except EXITS:
        raise
    except BaseException as error:
        return [error] if len(given) == 1 else [all_or_each(function, [each])[0] for each in given]


def _ids_or_error(text: str, found: list[int] | BaseException) -> list[int] | ValueError:
    if isinstance(found, BaseException):
        return ValueError(f"the prompt cannot be tokenized: {_why_no_text(text) or found}")
    return found


def _why_no_text(text: str) -> str | None:
    """The fault of a string that has no UTF-8 form; the tokenizer's own error would name only its types."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!r} at position {error.start} is half a surrogate pair, not a character"
    return None
