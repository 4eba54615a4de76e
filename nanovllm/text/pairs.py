"""Pairs of a context and a continuation as prompts whose last tokens are scored."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from nanovllm.prompts import Conversation, EncodedPrompt, without_dict


def encode_pairs(
    pairs: Sequence[tuple[Any, Any]], encode: Callable[..., list[EncodedPrompt]], first_token_ids: list[int]
) -> list[EncodedPrompt]:
    """See Text.encode_pairs.

    Args:
        encode: Text.encode.
        first_token_ids: the token before a continuation that begins a text, if there is one.
    """
    both = _encoded(pairs, encode, first_token_ids, str.rstrip)
    return [_scored(context, whole, len(context.token_ids)) for context, whole in both]


def encode_labels(
    rows: Sequence[tuple[Any, Sequence[Any]]], encode: Callable[..., list[EncodedPrompt]], first_token_ids: list[int]
) -> list[list[EncodedPrompt]]:
    """Like `encode_pairs`, for contexts with several continuations each. All of them are scored from the same token
    on: the first one in which one of the wholes differs from the context alone. Their text is that of the context."""
    pairs = [(context, label) for context, labels in rows for label in labels]
    both, encoded = iter(_encoded(pairs, encode, first_token_ids, str)), []
    for _, labels in rows:
        some = list(islice(both, len(labels)))
        first = min(_num_common(context.token_ids, whole.token_ids) for context, whole in some)
        if first == 0 and all(context.token_ids for context, _ in some):
            # Their first token is scored too, after the token that begins texts.
            some = [(_after(first_token_ids, context), _after(first_token_ids, whole)) for context, whole in some]
            first = len(first_token_ids)
        encoded.append([_scored(context, whole, max(first, 1))._replace(text=context.text) for context, whole in some])
    return encoded


def _after(token_ids: list[int], prompt: EncodedPrompt) -> EncodedPrompt:
    return prompt._replace(token_ids=token_ids + prompt.token_ids)


def _encoded(
    pairs: Sequence[tuple[Any, Any]],
    encode: Callable[..., list[EncodedPrompt]],
    first_token_ids: list[int],
    bare: Callable[[str], str],
) -> list[tuple[EncodedPrompt, EncodedPrompt]]:
    """Per pair: its context, texts through `bare`; and context and continuation as one prompt."""
    pairs = [_without_spaces_alone(*map(_without_conversation, pair)) for pair in pairs]
    joined = [pair for pair in pairs if _are_texts(pair)]
    texts = dict.fromkeys(bare(context) for context, _ in joined)  # few-shot examples are shared by many
    encoded = encode([*texts, *map("".join, joined)])
    contexts, wholes = dict(zip(texts, encoded, strict=False)), iter(encoded[len(texts) :])
    prompts = []
    for context, continuation in pairs:
        if _are_texts((context, continuation)):
            prompts.append((contexts[bare(context)], next(wholes)))
            continue
        begins_text = isinstance(context, str) and context == ""
        (before,) = [EncodedPrompt(context, first_token_ids)] if begins_text else encode([context])
        (after,) = encode([continuation], add_special_tokens=False)
        if begins_text and before.token_ids == after.token_ids[:1]:
            after = after._replace(token_ids=after.token_ids[1:])  # it begins with that token itself
        whole = EncodedPrompt(None, before.token_ids + after.token_ids, before.error or after.error)
        prompts.append((before, whole))
    return prompts


def _without_conversation(prompt: Any) -> Any:
    """Like `without_dict`, but a conversation becomes an error, because only a given text can be scored."""
    prompt = without_dict(prompt)
    if isinstance(prompt, Conversation):
        return ValueError("a conversation cannot be scored; give its text, as the chat template renders it")
    return prompt


def _without_spaces_alone(context: Any, continuation: Any) -> tuple[Any, Any]:
    """The pair, in which a context of spaces alone becomes the beginning of its continuation."""
    if isinstance(context, str) and isinstance(continuation, str) and not context.rstrip():
        return "", context + continuation
    return context, continuation


def _are_texts(pair: tuple[Any, Any]) -> bool:
    """Whether a context and its continuation are tokenized as one text."""
    return all(isinstance(each, str) for each in pair) and pair[0] != ""


def _num_common(first: list[int], second: list[int]) -> int:
    """The number of leading tokens that both have."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _scored(context: EncodedPrompt, whole: EncodedPrompt, first: int) -> EncodedPrompt:
    """`whole`, whose tokens from `first` on are scored."""
    error = context.error or whole.error
    if error is None and not context.token_ids:
        error = ValueError("the context is empty; a continuation's first token needs a token before it")
    if error is None and first >= len(whole.token_ids):
        error = ValueError("the continuation has no tokens; there is nothing to score")
    return whole._replace(error=error, first_scored=first)
