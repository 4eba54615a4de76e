"""Text: tokenizer, chat template, stop strings, detokenizing. Nothing else of nanovllm knows what a token says."""

import copy
import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nanovllm.models.directory import find_model
from nanovllm.prompts import Conversation, Row, as_token_ids, check_messages, without_dict
from nanovllm.sampling_params import SamplingParams

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# What ends the program or its generators, and is no fault of a row.
_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_NO_TOKENIZER = "the model has no tokenizer"


class Text:
    """What a model's tokenizer can do; without one, whatever needs it is an error of the row that asks for it.

    Args:
        tokenizer: transformers' tokenizer of the model, or None.
        max_model_len: of the model, if longer texts are to be refused before they are tokenized.
    """

    def __init__(self, tokenizer: Any, max_model_len: int | None = None):
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        # One tokenizer serves many requests, whose parameters are mostly the same.
        self._has_text = lru_cache(maxsize=None)(self._find_whether_it_has_text)
        self._token_text = lru_cache(maxsize=None)(self._find_token_text)
        self._bad_word_ids = lru_cache(maxsize=1024)(self._find_bad_word_ids)

    @classmethod
    def of_model(cls, directory: Path) -> "Text":
        """With the tokenizer in `directory`, or without one if there is none; a ValueError if it cannot be loaded."""
        if not any((directory / name).exists() for name in _TOKENIZER_FILES):
            return cls(None)
        from transformers import AutoTokenizer  # slow to import

        try:
            return cls(AutoTokenizer.from_pretrained(directory, trust_remote_code=False))
        except Exception as error:  # whatever a broken file makes transformers raise
            raise ValueError(f"the tokenizer in {directory} cannot be loaded: {error}") from error

    @classmethod
    def of_options(cls, directory: Path, tokenizer: str | None) -> "Text":
        """With the tokenizer that the option `tokenizer` names, or with that of the model in `directory`.

        Raises:
            ValueError: there is no such tokenizer, or it cannot be loaded.
        """
        if tokenizer is None:
            return cls.of_model(directory)
        text = cls.of_model(find_model(tokenizer, None, with_weights=False, option="tokenizer"))
        if text.tokenizer is None:
            raise ValueError(f"tokenizer={tokenizer!r} holds no tokenizer")
        return text

    def limited_to(self, max_model_len: int) -> "Text":
        """The same, which refuses texts that are sure to be longer."""
        return Text(self.tokenizer, max_model_len)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence id, if it has one."""
        token_id = getattr(self.tokenizer, "eos_token_id", None)
        return () if token_id is None else (token_id,)

    # From prompts to rows

    def encode(
        self, prompts: Sequence[Any], add_special_tokens: bool = True, splits_special: bool = False
    ) -> list[Row]:
        """The row of every prompt: strings, token ids, dicts of either, or dicts of a conversation, whose special
        tokens are those of the chat template. A ValueError is a row that cannot run.

        splits_special: a special token in a string or a message is ordinary text.
        """
        prompts = [without_dict(prompt) for prompt in prompts]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._encode(texts, add_special_tokens, splits_special) if texts else ())
        conversations = [prompt for prompt in prompts if isinstance(prompt, Conversation)]
        answers = iter(self._encode_each_conversation(conversations, splits_special) if conversations else ())
        rows = []
        for prompt in prompts:
            if isinstance(prompt, str):
                rows.append(Row.of(prompt, next(encoded)))
            elif isinstance(prompt, Conversation):
                rows.append(next(answers))
            else:
                rows.append(prompt if isinstance(prompt, Row) else Row.of(None, as_token_ids(prompt)))
        return rows

    def _refusal(self, text: str) -> ValueError | None:
        """Why a text is not worth tokenizing: its tokens are sure to be more than `max_model_len`."""
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
        """Bytes of a text that one token stands for, at most; None if the tokenizer may drop or merge any number."""
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        backend = self.tokenizer.backend_tokenizer
        keeps_all = "ByteLevel" in repr(backend.pre_tokenizer) and repr(backend.normalizer) in ("None", "NFC()")
        if not keeps_all or any(each.lstrip or each.rstrip for each in self.tokenizer.added_tokens_decoder.values()):
            return None
        return max(len(token.encode()) for token in backend.get_vocab())

    def encode_pairs(self, pairs: Sequence[tuple[Any, Any]]) -> list[Row]:
        """The row of every (context, continuation), of which the continuation's tokens are scored. Each is a string, or
        token ids.

        Two strings are tokenized as one text. If the context alone has k tokens, the tokens after the first k are the
        continuation's. Spaces that end the context count as the continuation's. An empty context stands for the token
        that begins texts, or else for the one that ends them. These are lm-evaluation-harness's rules for models whose
        tokenizer adds no special tokens; where it adds some, they begin the context. A conversation is refused.
        """
        pairs = [_without_spaces_alone(*map(_without_conversation, pair)) for pair in pairs]
        joined = [pair for pair in pairs if _are_texts(pair)]
        bare = dict.fromkeys(context.rstrip() for context, _ in joined)  # few-shot examples are shared by many
        encoded = self.encode([*bare, *map("".join, joined)])
        contexts, wholes = dict(zip(bare, encoded, strict=False)), iter(encoded[len(bare) :])
        rows = []
        for context, continuation in pairs:
            if _are_texts((context, continuation)):
                rows.append(_joined(contexts[context.rstrip()], next(wholes)))
                continue
            begins_text = isinstance(context, str) and context == ""
            (before,) = [Row(None, self._first_token_ids)] if begins_text else self.encode([context])
            (after,) = self.encode([continuation], add_special_tokens=False)
            if begins_text and before.token_ids == after.token_ids[:1]:
                after = after._replace(token_ids=after.token_ids[1:])  # it begins with that token itself
            rows.append(_joined(before, Row(None, before.token_ids + after.token_ids, before.error or after.error)))
        return rows

    @property
    def _first_token_ids(self) -> list[int]:
        """The token that begins texts, or else the one that ends them; empty without either."""
        names = ("bos_token_id", "eos_token_id")
        found = [token_id for name in names if (token_id := getattr(self.tokenizer, name, None)) is not None]
        return found[:1]

    def _encode(
        self, texts: list[str], add_special_tokens: bool, splits_special: bool = False
    ) -> list[list[int] | ValueError]:
        """Token ids of every text, or the reason why it has none."""
        if self.tokenizer is None:
            error = ValueError(f"{_NO_TOKENIZER}; give the prompt as token ids, or LLM(tokenizer=…) another one")
            return [error] * len(texts)
        refused = {row: why for row, text in enumerate(texts) if (why := self._refusal(text)) is not None}
        if refused:
            rest = [text for row, text in enumerate(texts) if row not in refused]
            encoded = iter(self._encode(rest, add_special_tokens, splits_special) if rest else ())
            return [refused[row] if row in refused else next(encoded) for row in range(len(texts))]
        options = {"add_special_tokens": add_special_tokens, "return_attention_mask": False, "verbose": False}
        if splits_special:
            options["split_special_tokens"] = True
        try:
            return self.tokenizer(texts, **options)["input_ids"]
        except BaseException as error:  # tokenizers raise what they like, and a panic of theirs is no Exception
            if isinstance(error, _EXITS):
                raise
            if len(texts) == 1:
                return [ValueError(f"the prompt cannot be tokenized: {_why_no_text(texts[0]) or error}")]
            return [self._encode([text], add_special_tokens, splits_special)[0] for text in texts]

    def encode_conversations(
        self,
        conversations: Sequence[Any],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
        splits_special: bool = False,
    ) -> list[Row]:
        """The row of every conversation, through the chat template.

        splits_special: a special token in a message is ordinary text.

        Raises:
            ValueError: the tokenizer has no chat template, or cannot split special tokens.
            TypeError: `template_kwargs` is not a dict, or holds what is set here.
        """
        options = self._template_options(add_generation_prompt, template_kwargs)
        marks = self._marks if splits_special else None
        return self._encode_rendered([self._render(messages, options, marks) for messages in conversations], marks)

    def _encode_each_conversation(self, conversations: Sequence[Conversation], splits_special: bool) -> list[Row]:
        """As `encode_conversations`, but each has options of its own, and what it raises is the row's error. All are
        tokenized together."""
        texts: list[str | ValueError] = []
        marks = None
        for messages, template_kwargs in conversations:
            try:
                options = self._template_options(True, template_kwargs)
                marks = self._marks if splits_special else None
                texts.append(self._render(messages, options, marks))
            except (TypeError, ValueError) as error:
                texts.append(ValueError(str(error)))
        return self._encode_rendered(texts, marks)

    def _template_options(self, add_generation_prompt: bool, template_kwargs: Any) -> dict[str, Any]:
        """What the tokenizer's chat template is called with; raises as `encode_conversations` does."""
        if self.tokenizer is None:
            raise ValueError(f"{_NO_TOKENIZER}; give LLM(tokenizer=…) one with a chat template")
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("the model's tokenizer has no chat template; use generate with text or token ids")
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise TypeError(f"chat_template_kwargs must be a dict, not {template_kwargs!r:.100}")
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        taken = {"conversation", *options} & set(template_kwargs or ())
        if taken:
            raise TypeError(f"chat_template_kwargs must not hold {', '.join(sorted(taken))}; nanovllm sets that itself")
        return {**(template_kwargs or {}), **options}

    def _render(self, messages: Any, options: Mapping[str, Any], marks: "Marks | None") -> str | ValueError:
        """A conversation's text, or the reason why it has none."""
        try:
            check_messages(messages)
            messages = messages if marks is None else marks.hide(messages)
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # templates raise what they like
            return ValueError(f"the chat template cannot render the conversation: {error}")

    def _encode_rendered(self, texts: list[str | ValueError], marks: "Marks | None") -> list[Row]:
        # The template writes its special tokens itself.
        return self.encode(texts, add_special_tokens=False) if marks is None else marks.encode(texts)

    @cached_property
    def _marks(self) -> "Marks":
        return Marks(self.tokenizer)

    # What parameters say about text

    def bad_words_as_ids(self, bad_words: Iterable[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """SamplingParams.bad_words with every string replaced by its token ids; ids stay as they are.

        Each string gives its ids without leading spaces. It also gives its ids with one leading space, if those are as
        many and begin with another id. This is vLLM's rule, `SamplingParams.update_from_tokenizer`.

        Raises:
            ValueError: there is no tokenizer, or it knows no tokens for a string.
        """
        ids: list[tuple[int, ...]] = []
        for word in bad_words:
            ids += self._bad_word_ids(word) if isinstance(word, str) else [word]
        return tuple(ids)

    def _find_bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        if self.tokenizer is None:
            raise ValueError(f"{_NO_TOKENIZER}; give bad_words as lists of token ids")
        word = word.lstrip() or word  # a word may be nothing but spaces
        bare, spaced = self._encode([word, " " + word], add_special_tokens=False)
        if isinstance(bare, ValueError) or isinstance(spaced, ValueError) or not bare:
            raise ValueError(f"the tokenizer has no tokens for the bad word {word!r}")
        ids = [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]
        return [tuple(token_ids) for token_ids in ids]

    def stop_strings(self, params: SamplingParams) -> "StopStrings":
        """A predicate that finds the stop strings of one completion; a ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError(f"{_NO_TOKENIZER}, so stop strings cannot be found; use stop_token_ids")
        return StopStrings(self, params)

    # From completions to text

    def complete(
        self, completions: Sequence[tuple[list[int], SamplingParams]]
    ) -> list[tuple[str | ValueError, str | None]]:
        """Each completion's text, cut at its first stop string, and that string, or None if there is none. The text is
        empty without a tokenizer and with `detokenize=False`, and a ValueError where the tokenizer fails."""
        texts: list[tuple[str | ValueError, str | None]] = [("", None)] * len(completions)
        for skips in (True, False) if self.tokenizer is not None else ():
            rows = [
                row
                for row, (_, params) in enumerate(completions)
                if params.detokenize and params.skip_special_tokens is skips
            ]
            for row, text in zip(rows, self._cut_texts([completions[row] for row in rows], skips), strict=True):
                texts[row] = text
        return texts

    def _cut_texts(
        self, completions: list[tuple[list[int], SamplingParams]], skip_special_tokens: bool
    ) -> list[tuple[str | ValueError, str | None]]:
        """As `complete`, of completions that all have a text."""
        if not completions:
            return []
        try:
            decoded = self.decode([token_ids for token_ids, _ in completions], skip_special_tokens)
            return [self._cut(text, *completion) for text, completion in zip(decoded, completions, strict=True)]
        except BaseException as error:  # as in `_encode`
            if isinstance(error, _EXITS):
                raise
            if len(completions) == 1:
                return [(_undecodable(error), None)]
            return [self._cut_texts([completion], skip_special_tokens)[0] for completion in completions]

    def decode(self, completions: list[list[int]], skip_special_tokens: bool) -> list[str]:
        """The text of each list of token ids."""
        return self.tokenizer.batch_decode(
            completions, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_text(self, token_id: int) -> str | None:
        """The text of one token alone, special tokens too; None without a tokenizer, or if it cannot decode it."""
        return self._token_text(token_id)

    def _find_token_text(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        try:
            return self.decode([[token_id]], skip_special_tokens=False)[0]
        except BaseException as error:  # as in `_encode`
            if isinstance(error, _EXITS):
                raise
            return None

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether a token adds anything to the text. Skipped special tokens and ids that the tokenizer lacks do not."""
        return self._has_text(token_id, skip_special_tokens)

    def _find_whether_it_has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        # Alone, a space can vanish at the text's beginning, so the token stands between two others.
        neighbour = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        without, with_it = [*neighbour, *neighbour], [*neighbour, token_id, *neighbour]
        return len(set(self.decode([without, with_it], skip_special_tokens))) == 2

    def _cut(self, text: str, token_ids: list[int], params: SamplingParams) -> tuple[str, str | None]:
        """The text cut at the first stop string that could count, and that string; of several that begin there, the
        shortest."""
        if not params.stop:
            return text, None
        before = token_ids[: params.min_tokens]
        start = len(self.decode([before], params.skip_special_tokens)[0]) if before else 0
        ends = [(end, len(stop), stop) for stop in params.stop if (end := text.find(stop, start)) >= 0]
        if not ends:
            return text, None
        end, length, stop = min(ends)
        return text[: end + length if params.include_stop_str_in_output else end], stop


class Marks:
    """Tells the special tokens that a chat template writes from text in messages that looks like them.

    In the messages, a mark takes the place of such text. Once the template is rendered, these marks become the text
    again, and other marks take the place of the template's own special tokens. A copy of the tokenizer knows those
    marks as tokens, so it takes everything else for ordinary text. A mark is made of characters for private use, of
    which some are random: no text from outside holds one.

    Raises:
        ValueError: the tokenizer is not one of the tokenizers library.
    """

    def __init__(self, tokenizer: Any):
        from tokenizers import AddedToken  # slow to import

        if not tokenizer.is_fast:
            raise ValueError("split_special_tokens=True needs a model with a tokenizer.json")
        special = {token_id: token for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        # Longer ones first, because one may begin another.
        contents = sorted({token.content for token in special.values()}, key=len, reverse=True)
        secret = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(6))
        self._hidden = {content: secret + chr(0x100000 + 2 * index) for index, content in enumerate(contents)}
        of_template = {content: secret + chr(0x100001 + 2 * index) for index, content in enumerate(contents)}
        self._shown = {mark: content for content, mark in self._hidden.items()} | of_template
        self._pattern = re.compile("|".join(map(re.escape, self._shown)) or "(?!)")
        tokenizer = copy.deepcopy(tokenizer)
        for token in special.values():
            options = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            tokenizer.add_tokens([AddedToken(of_template[token.content], special=False, **options)])
        marks = [of_template[token.content] for token in special.values()]
        self._ids = dict(zip(tokenizer.convert_tokens_to_ids(marks), special, strict=True))
        self._text = Text(tokenizer)

    def hide(self, messages: Any) -> Any:
        """The messages, with a mark for each text that is a special token."""
        return _replaced(messages, self._hidden)

    def encode(self, texts: Sequence[str | ValueError]) -> list[Row]:
        """The rows of rendered conversations; a ValueError is a row that cannot run."""

        def show(text: str) -> str:
            return self._pattern.sub(lambda found: self._shown[found[0]], text)

        marked = [text if isinstance(text, ValueError) else show(text) for text in texts]
        contents = {mark: content for content, mark in self._hidden.items()}
        return [
            Row(
                _replaced(text, contents) if isinstance(text, str) else None,
                [self._ids.get(each, each) for each in row.token_ids],
                row.error,
            )
            for text, row in zip(
                texts, self._text.encode(marked, add_special_tokens=False, splits_special=True), strict=True
            )
        ]


class StopStrings:
    """Says after each token of one request whether the text since `min_tokens` holds a stop string.

    It looks at a window of the last tokens that have text. Each of them adds at least a byte, so a string that the
    newest token completes lies within as many tokens as it has bytes; four more make the first character of that
    window whole.

    A tokenizer that fails ends the request; `error` then says so.

    Args:
        text: of the model.
        params: the request's; `stop` is not empty.
    """

    def __init__(self, text: Text, params: SamplingParams):
        self._text = text
        self._params = params
        self._window_size = max(len(stop.encode()) for stop in params.stop) + 4
        self._window: list[int] = []
        self._num_tokens = 0
        self.error: ValueError | None = None

    def __call__(self, token_id: int) -> bool:
        try:
            return self._ends(token_id)
        except BaseException as error:
            if isinstance(error, _EXITS):
                raise
            self.error = _undecodable(error)
            return True

    def _ends(self, token_id: int) -> bool:
        self._num_tokens += 1
        skips = self._params.skip_special_tokens
        if self._num_tokens <= self._params.min_tokens or not self._text.has_text(token_id, skips):
            return False
        self._window = [*self._window[1 - self._window_size :], token_id]
        text = self._text.decode([self._window], skips)[0]
        return any(stop in text for stop in self._params.stop)


def _without_conversation(prompt: Any) -> Any:
    """As `without_dict`; a conversation is an error, because scores are of given texts."""
    prompt = without_dict(prompt)
    if isinstance(prompt, Conversation):
        return ValueError("a conversation cannot be scored; give its text, as the chat template renders it")
    return prompt


def _without_spaces_alone(context: Any, continuation: Any) -> tuple[Any, Any]:
    """The pair; a context of spaces alone is the beginning of its continuation."""
    if isinstance(context, str) and isinstance(continuation, str) and not context.rstrip():
        return "", context + continuation
    return context, continuation


def _are_texts(pair: tuple[Any, Any]) -> bool:
    """Whether a context and its continuation are tokenized as one text."""
    return all(isinstance(each, str) for each in pair) and pair[0] != ""


def _joined(context: Row, whole: Row) -> Row:
    """The row of `whole`. Its tokens after those of `context` are scored."""
    first = len(context.token_ids)
    error = context.error or whole.error
    if error is None and first == 0:
        error = ValueError("the context is empty; a continuation's first token needs a token before it")
    if error is None and first >= len(whole.token_ids):
        error = ValueError("the continuation has no tokens; there is nothing to score")
    return whole._replace(error=error, first_scored=first)


def _undecodable(error: BaseException) -> ValueError:
    return ValueError(f"the completion cannot be decoded: {error}")


def _why_no_text(text: str) -> str | None:
    """What is wrong with a string that has no UTF-8 form; the tokenizer would only speak of its own types."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!r} at position {error.start} is half a surrogate pair, not a character"
    return None


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """`value` with every key of `texts` in its strings, at any depth, replaced."""
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(part, texts) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(part, texts) for part in value]
    return value
