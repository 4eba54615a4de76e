"""The chat template: renders conversations as text, in which special tokens of messages may stay ordinary text."""

import copy
import inspect
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from json import dumps
from types import MappingProxyType
from typing import Any

from nanovllm.checks import boolean
from nanovllm.prompts import EncodedPrompt
from nanovllm.text.messages import Form, form_read, plain, plain_messages, shape_of
from nanovllm.text.tokenizer import NO_TOKENIZER, Tokenizer

logger = logging.getLogger(__name__)

_LISTS = ("tools", "documents")  # the template's arguments that it must not leave out
_MAX_SHAPES = 10_000  # of conversations whose forms are remembered


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: transformers' tokenizer of the model, or None.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._forms: dict[tuple[Any, ...], Form | None] = {}
        self._unwritten: dict[tuple[Any, ...], int | None] = {}
        # Arguments that need no warning, or no second one.
        self._known_names = {"chat_template", "add_generation_prompt", "continue_final_message", *_LISTS}

    def options(self, template_kwargs: Any, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """The arguments of `apply_chat_template`: `given`, and those that the caller has for the template.

        Raises:
            ValueError: there is no tokenizer, or no chat template; or the arguments contradict each other.
            TypeError: `template_kwargs` is not a dict, or holds an argument that is set here.
        """
        if self._tokenizer is None:
            raise ValueError(f"{NO_TOKENIZER}; give one with a chat template by tokenizer= (--tokenizer)")
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise TypeError(f"chat_template_kwargs must be a dict, not {template_kwargs!r:.100}")
        taken = {"conversation", "tokenize", *given} & set(template_kwargs or ())
        if taken:
            raise TypeError(f"chat_template_kwargs must not hold {', '.join(sorted(taken))}; nanovllm sets that itself")
        options = {"add_generation_prompt": True, **(template_kwargs or {}), **given, "tokenize": False}
        for name, default in (("add_generation_prompt", True), ("continue_final_message", False)):
            if options.get(name, default) is None:  # Parquet gives every row the fields of all
                options[name] = default
            boolean(name, options.get(name, default))
        for name in _LISTS:
            if options.get(name) is not None:
                options[name] = _as_list(name, options[name])
        options = plain(options)
        if not isinstance(options.get("chat_template"), (str, type(None))):
            raise TypeError(f"chat_template must be a string, not {options['chat_template']!r:.100}")
        template = options.get("chat_template") or getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise ValueError("the model's tokenizer has no chat template; pass chat_template=…, or use generate")
        if options.get("continue_final_message") and options["add_generation_prompt"]:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False: there is no new turn")
        if new_names := set(template_kwargs or ()) - self._known_names:
            self._warn_of_unread(new_names, f"{template} {self._tokenizer.chat_template}")
        return options

    def _warn_of_unread(self, names: Iterable[str], template: str) -> None:
        """Warns, once per name, of arguments that the template never mentions: scripts pass those of other models."""
        if unread := sorted(name for name in map(str, names) if name not in template):
            logger.warning("the chat template does not read chat_template_kwargs: %s", ", ".join(unread))
        self._known_names.update(names)

    def render(self, messages: Any, options: Mapping[str, Any], marks: "Marks | None") -> str | ValueError:
        """A conversation's text, or the reason why it has none."""
        try:
            messages = plain_messages(messages)
            if marks is not None:
                for_template = {name: marks.hide(options[name]) for name in _LISTS if name in options}
                messages, options = marks.hide(messages), {**options, **for_template}
            written = self._form_read(messages, options).of(messages)
            for name in _LISTS:
                if options.get(name):
                    self._check_written(name, written, options)
            return self._tokenizer.apply_chat_template(written, **options)
        except Exception as error:  # templates raise all kinds of errors
            return ValueError(f"the chat template cannot render the conversation: {error}")

    def _form_read(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Form:
        """The form of the conversation that the template reads; a ValueError if it leaves a part of that out."""
        key = self._key(messages, options)
        if key not in self._forms:
            if len(self._forms) == _MAX_SHAPES:
                self._forms.clear()
            self._forms[key] = form_read(messages, partial(self._tokenizer.apply_chat_template, **options))
        form = self._forms[key]
        if form is None:
            raise ValueError("it does not write the tool calls; leave them out, or pass another chat_template=…")
        return form

    def _key(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Equal for conversations that a template reads in the same way."""
        # A script may replace the tokenizer's template, and an argument may choose another part of it.
        template = options.get("chat_template") or self._tokenizer.chat_template
        others = {name: bool(value) if name in _LISTS else value for name, value in options.items()}
        return str(template), shape_of(messages), str(others)

    def _check_written(self, name: str, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
        """Raises a ValueError if the template leaves out one of the tools or documents: of copies with a mark in each
        text, it writes no mark of it. The answer is remembered for lists of the same structure."""
        given = options[name]
        key = *self._key(messages, options), name, dumps(_structure(given), default=str)
        if key not in self._unwritten:
            if len(self._unwritten) == _MAX_SHAPES:
                self._unwritten.clear()
            marks = [f"zq{index}qz" for index in range(len(given))]
            marked = [_marked(item, mark) for item, mark in zip(given, marks, strict=True)]
            text = "".join(marks)
            with suppress(Exception):  # a template may refuse what it does not expect
                text = self._tokenizer.apply_chat_template(messages, **{**options, name: marked})
            missing = (at for at, mark in enumerate(marks) if mark not in text and marked[at] != given[at])
            self._unwritten[key] = next(missing, None)
        if (index := self._unwritten[key]) is not None:
            raise ValueError(f"it does not write {name}[{index}]; leave it out, or pass another chat_template=…")

    @cached_property
    def marks(self) -> "Marks":
        return Marks(self._tokenizer)


class Marks:
    """Distinguishes the special tokens of a chat template from text in messages that looks like them.

    In the messages, a mark takes the place of such text. After rendering, these marks become the text again, and other
    marks take the place of the template's own special tokens. A copy of the tokenizer knows those marks as tokens, so
    it takes everything else for ordinary text. A mark is made of characters for private use, of which some are random:
    no input text contains one.

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
        self._tokenizer = Tokenizer(tokenizer)

    def hide(self, messages: Any) -> Any:
        """The messages, with a mark in place of each text that is a special token."""
        return _replaced(messages, self._hidden)

    def encode(self, texts: Sequence[str | ValueError]) -> list[EncodedPrompt]:
        """Tokenizes rendered conversations; a ValueError is one that could not be rendered."""
        rendered = [text for text in texts if isinstance(text, str)]
        marked = [self._pattern.sub(lambda found: self._shown[found[0]], text) for text in rendered]
        encoded = iter(self._tokenizer.encode_texts(marked, add_special_tokens=False, splits_special=True))
        contents = {mark: content for content, mark in self._hidden.items()}
        prompts = []
        for text in texts:
            found = text if isinstance(text, ValueError) else next(encoded)
            if not isinstance(found, ValueError):
                found = [self._ids.get(token_id, token_id) for token_id in found]
            shown = None if isinstance(text, ValueError) else _replaced(text, contents)
            prompts.append(EncodedPrompt.of(shown, found))
        return prompts


def _as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list, not {value!r:.100}")
    from transformers.utils import get_json_schema  # slow to import

    # transformers takes functions as tools, too.
    return [get_json_schema(item) if inspect.isfunction(item) else item for item in value]


def _structure(value: Any) -> Any:
    """A value with whether each text is empty, in place of the text."""
    if isinstance(value, Mapping):
        return {str(key): _structure(part) for key, part in value.items()}
    return (
        [_structure(part) for part in value]
        if isinstance(value, list)
        else bool(value)
        if isinstance(value, str)
        else value
    )


def _marked(value: Any, mark: str) -> Any:
    """A value with a mark at the end of each text, but for those that name a type."""
    if isinstance(value, Mapping):
        return {key: part if key == "type" else _marked(part, mark) for key, part in value.items()}
    if isinstance(value, list):
        return [_marked(part, mark) for part in value]
    return value + mark if isinstance(value, str) and value else value


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """`value` with every key of `texts` in its strings, at any depth and in keys too, replaced."""
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {_replaced(key, texts): _replaced(part, texts) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(part, texts) for part in value]
    return value
