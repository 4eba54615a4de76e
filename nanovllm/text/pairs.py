"""Pairs of a context and a continuation as prompts whose last tokens are scored."""

from collections.abc import Callable, Sequence
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
    pairs = [_without_spaces_alone(*map(_without_conversation, pair)) for pair in pairs]
    joined = [pair for pair in pairs if _are_texts(pair)]
    bare = dict.fromkeys(context.rstrip() for context, _ in joined)  # few-shot examples are shared by many
    encoded = encode([*bare, *map("".join, joined)])
    contexts, wholes = dict(zip(bare, encoded, strict=False)), iter(encoded[len(bare) :])
    prompts = []
    for context, continuation in pairs:
        if _are_texts((context, continuation)):
            prompts.append(_joined(contexts[context.rstrip()], next(wholes)))
            continue
        begins_text = isinstance(context, str) and context == ""
        (before,) = [EncodedPrompt(None, first_token_ids)] if begins_text else encode([context])
        (after,) = encode([continuation], add_special_tokens=False)
        if begins_text and before.token_ids == after.token_ids[:1]:
            after = after._replace(token_ids=after.token_ids[1:])  # it begins with that token itself
        whole = EncodedPrompt(None, before.token_ids + after.token_ids, before.error or after.error)
        prompts.append(_joined(before, whole))
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


def _joined(context: EncodedPrompt, whole: EncodedPrompt) -> EncodedPrompt:
    """`whole`, of which the tokens after those of `context` are scored."""
    first = len(context.token_ids)
    error = context.error or whole.error
    if error is None and first == 0:
        error = ValueError("the context is empty; a continuation's first token needs a token before it")
    if error is None and first >= len(whole.token_ids):
        error = ValueError("the continuation has no tokens; there is nothing to score")
    return whole._replace(error=error, first_scored=first)
