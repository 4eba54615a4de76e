"""The forms of a prompt: those that a caller may give, and the one that the engine gets."""

from collections.abc import Iterable, Mapping, Set
from enum import Enum
from numbers import Integral, Number
from typing import Any, NamedTuple

# The keys of a prompt that is a dict, as vLLM names them, and those of a conversation, as in OpenAI's requests.
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
_CONVERSATION_KEYS = ("messages", "chat_template_kwargs")


class NotYet(Enum):
    """Says that an iterator of prompts has no prompt ready; see `LLM.generate_iter`."""

    NOT_YET = "no prompt is ready"


NOT_YET = NotYet.NOT_YET


class EncodedPrompt(NamedTuple):
    """A prompt as token ids, ready for the engine.

    text: the prompt's text; None for a prompt of token ids.
    token_ids: empty if there is an error.
    error: why the prompt cannot run, or None.
    first_scored: with `prompt_logprobs`, the index of the first token that is scored.
    others: further prompts of the same row, such as the document that a query is compared with.
    """

    text: str | None
    token_ids: list[int]
    error: ValueError | None = None
    first_scored: int = 1
    others: "tuple[EncodedPrompt, ...]" = ()

    def cut(self, max_tokens: int, side: str) -> "EncodedPrompt":
        """The same with at most this many tokens; `side`, "left" or "right", is the end that is cut off."""
        if len(self.token_ids) <= max_tokens:
            return self
        return self._replace(token_ids=self.token_ids[-max_tokens:] if side == "left" else self.token_ids[:max_tokens])

    @classmethod
    def of(cls, text: str | None, found: list[int] | ValueError) -> "EncodedPrompt":
        return cls(text, [], found) if isinstance(found, ValueError) else cls(text, found)


class Conversation(NamedTuple):
    """A prompt that the chat template renders as text; neither field is checked yet."""

    messages: Any
    template_kwargs: Any


class OnePrompt(list[Any]):
    """The list of a prompt that was given alone, not in a list."""


def as_pairs(
    contexts: Any, continuations: Any, nouns: tuple[str, str] = ("contexts", "continuations")
) -> list[tuple[Any, Any]]:
    """Each context with its continuation. A context that is given alone goes with all continuations, and vice versa.

    nouns: their names, for errors.

    Raises:
        TypeError: as in `as_prompt_list`.
        ValueError: the numbers of contexts and continuations differ.
    """
    before, after = as_prompt_list(contexts), as_prompt_list(continuations)
    if isinstance(before, OnePrompt):
        before = before * len(after)
    elif isinstance(after, OnePrompt):
        after = after * len(before)
    if len(before) != len(after):
        first, second = nouns
        raise ValueError(f"{len(before)} {first} for {len(after)} {second}; give one per {second.removesuffix('s')}")
    return list(zip(before, after, strict=True))


def key_of(context: Any) -> Any:
    """Equal for equal texts and equal lists of token ids; None for all else."""
    context = context if isinstance(context, str) else listed(context)
    is_ids = isinstance(context, (list, tuple, range)) and set(map(type, context)) == {int}
    return context if isinstance(context, str) else tuple(context) if is_ids else None


def as_prompt_list(prompts: Any) -> list[Any]:
    """One or many prompts as a list of prompts; a TypeError if `prompts` can be neither."""
    prompts = _without_array("prompts", prompts)
    if isinstance(prompts, (str, Mapping)):
        return OnePrompt([prompts])
    if not isinstance(prompts, Iterable) or isinstance(prompts, (Set, bytes, bytearray)):
        raise TypeError(f"prompts must be a string, a list of token ids, a dict of one, or a list, not {prompts!r}")
    prompts = list(prompts)
    if prompts and all(_is_token_id(prompt) for prompt in prompts):
        return OnePrompt([prompts])
    if prompts and all(isinstance(prompt, Number) for prompt in prompts):
        raise TypeError(f"a prompt of token ids must hold integers only, not {prompts[:8]!r}")
    return prompts


def as_conversation_list(conversations: Any) -> list[Any]:
    """One or many conversations as a list of conversations; a TypeError if `conversations` can be neither."""
    conversations = _without_array("conversations", conversations)
    if not isinstance(conversations, Iterable) or isinstance(conversations, (str, bytes, bytearray, Mapping, Set)):
        raise TypeError(
            f"conversations must be a list of messages or a list of such lists, not {type(conversations).__name__}"
        )
    conversations = list(conversations)
    if conversations and all(isinstance(each, Mapping) or hasattr(each, "model_dump") for each in conversations):
        return [conversations]
    return conversations


def _without_array(noun: str, value: Any) -> Any:
    """An array, a tensor or a table's column as a list; a TypeError for a whole table."""
    if hasattr(value, "columns"):
        raise TypeError(f"{noun} must not be a table ({type(value).__name__}); give one of its columns")
    return listed(value)


def listed(value: Any) -> Any:
    """An array or a column of NumPy, pandas, pyarrow or polars as a list; any other value as it is."""
    convert = next((getattr(value, name) for name in ("tolist", "to_pylist", "to_list") if hasattr(value, name)), None)
    return value if convert is None else convert()


def without_dict(prompt: Any) -> Any:
    """The content of a prompt that is a dict: its text, its token ids as an EncodedPrompt, its Conversation, or a
    ValueError. Any other prompt is returned as it is."""
    if not isinstance(prompt, Mapping):
        return prompt
    # Empty data of images, and vLLM's salt of the prefix cache, change nothing.
    given = {key: value for key, value in prompt.items() if value is not None and not _is_neutral(key, value)}
    is_conversation = "messages" in given
    others = [key for key in given if key not in (_CONVERSATION_KEYS if is_conversation else _PROMPT_KEYS)]
    if others or not given:
        found = ", ".join(map(repr, others)) or "none of them"
        found += ' beside "messages"' if is_conversation else ""
        return ValueError(
            'a prompt that is a dict has "prompt" or "prompt_token_ids", or else "messages" and perhaps '
            f'"chat_template_kwargs"; this one holds {found}; leave that out'[:300]
        )
    if is_conversation:
        return Conversation(*map(given.get, _CONVERSATION_KEYS))
    text, token_ids = map(given.get, _PROMPT_KEYS)
    if text is not None and not isinstance(text, str):
        return ValueError(f'"prompt" must be a string, not {text!r}'[:200])
    return text if token_ids is None else EncodedPrompt.of(text, as_token_ids(token_ids))


def without_header(prompt: Any) -> Any:
    """A prompt to which no answer follows: a conversation ends with its last message, unless it says otherwise."""
    if not isinstance(prompt, Mapping) or prompt.get("messages") is None:
        return prompt
    given = prompt.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        return prompt
    return {**prompt, "chat_template_kwargs": {"add_generation_prompt": False, **given}}


def _is_neutral(key: Any, value: Any) -> bool:
    return key == "cache_salt" or (key in ("multi_modal_data", "mm_processor_kwargs") and not value)


def as_token_ids(prompt: Any) -> list[int] | ValueError:
    """The token ids of a prompt that is not a text, or the reason why it cannot run."""
    if isinstance(prompt, ValueError):
        return prompt
    prompt = listed(prompt)
    if not isinstance(prompt, (list, tuple, range)):
        return ValueError(f"a prompt must be a string or a list of token ids, not {prompt!r}"[:200])
    if set(map(type, prompt)) == {int}:  # nearly always, and prompts can be long
        return list(prompt)
    bad = next((token_id for token_id in prompt if not _is_token_id(token_id)), None)
    if isinstance(bad, Mapping) and "role" in bad:
        return ValueError('a conversation is a dict here: {"messages": [{"role": …, "content": …}, …]}')
    if bad is not None or None in prompt:
        return ValueError(f"token ids must be integers, not {bad!r}"[:200])
    return [int(token_id) for token_id in prompt]


def _is_token_id(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
