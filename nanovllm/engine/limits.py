"""The limits of a request, which are checked before anything runs."""

from array import array
from collections.abc import Collection, Iterable

import numpy as np

from nanovllm.engine.runner import RunnerInfo
from nanovllm.engine.sequence import Pooling
from nanovllm.sampling_params import SamplingParams


def max_length(num_prompt_tokens: int, params: SamplingParams, info: RunnerInfo) -> int:
    """The maximum number of tokens of prompt + completion."""
    if params.max_tokens is None:
        return info.max_model_len
    return min(num_prompt_tokens + params.max_tokens, info.max_model_len)


def _check_length(num_tokens: int, purpose: str, info: RunnerInfo) -> None:
    """Refuses a prompt that is too long to be scored or pooled."""
    if num_tokens > info.max_model_len:
        cut = ", give truncate_prompt_tokens=-1" if purpose == "pool" else ""
        raise ValueError(
            f"the {num_tokens} tokens to {purpose} are more than max_model_len={info.max_model_len}; shorten "
            f"them{cut}, or raise max_model_len if the model was made for more"
        )


def _check_placeholders(numbers: np.ndarray, info: RunnerInfo) -> None:
    """Refuses a prompt that holds the token of an image or a video."""
    for name, token_id in info.placeholders.items():
        if (numbers == token_id).any():
            raise ValueError(
                f"the prompt holds token id {token_id}, the model's {name}, where an image or a video would go; "
                "nanovllm reads text only, so leave the token out"
            )


def check_pooled(token_ids: Collection[int], pooling: Pooling, info: RunnerInfo) -> "array[int]":
    """Refuses a request to pool that can never run; returns its prompt as an array of 32-bit integers.

    Raises:
        TypeError: the prompt holds something other than integers.
        ValueError: the prompt is empty or too long, or might never fit in the KV cache, a token id is outside the
            vocabulary, or the model has no such layer or no classification head.
    """
    if pooling.uses_head and info.head != "score":
        raise ValueError("this model has no classification head; load one of …ForSequenceClassification")
    outside = [layer for layer in pooling.layers if not 0 <= layer <= info.num_layers]
    if outside:
        raise ValueError(f"hidden_states_layers must be from 0 to {info.num_layers}, not {outside[0]}")
    _check_length(len(token_ids), "pool", info)
    prompt = _checked_ids(token_ids, info)
    _check_blocks(len(token_ids), "", info)
    return prompt


def check_request(
    token_ids: Collection[int], params: SamplingParams, info: RunnerInfo, first_scored: int = 1
) -> "array[int]":
    """Refuses a request that can never be run; returns its prompt as an array of 32-bit integers.

    Raises:
        TypeError: the prompt holds something other than integers.
        ValueError: the prompt is empty or too long, or holds the token of an image or a video, a token id of prompt or
            parameters is outside the vocabulary, `first_scored` is outside the prompt, the request might never fit in
            the KV cache, or the model has no LM head.
    """
    num_tokens = len(token_ids)
    if info.head != "lm":
        raise ValueError(
            "this model has no LM head, so it can neither generate nor score text; load one of …ForCausalLM, without "
            'runner="pooling"'
        )
    if params.max_tokens == 0:
        if num_tokens == 1:
            raise ValueError("a prompt of one token has nothing to score; give it at least two")
        _check_length(num_tokens, "score", info)
    elif num_tokens >= info.max_model_len:
        raise ValueError(
            f"the prompt's {num_tokens} tokens leave no room for a new one within max_model_len="
            f"{info.max_model_len}; shorten it, or raise max_model_len if the model was made for more"
        )
    prompt = _checked_ids(token_ids, info)
    if params.prompt_logprobs is not None and not 1 <= first_scored <= num_tokens:
        raise ValueError(f"first_scored must be from 1 to the prompt's length, not {first_scored}")
    _check_ids_of_params(params, info)
    # The last token's keys are never needed.
    _check_blocks(max_length(num_tokens, params, info) - 1, "max_tokens", info)
    return prompt


def _checked_ids(token_ids: Collection[int], info: RunnerInfo) -> "array[int]":
    """The ids as 32-bit integers; raises a TypeError or ValueError if some are no ids of the vocabulary."""
    if len(token_ids) == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    try:
        if isinstance(token_ids, (bytes, bytearray, memoryview)):  # array() would read their bytes, perhaps four as one
            raise TypeError
        prompt = array("i", token_ids)
        numbers = np.frombuffer(prompt, np.intc)
        is_inside = numbers.min() >= 0 and numbers.max() < info.vocab_size
    except TypeError:
        raise TypeError("token ids must be integers") from None
    except OverflowError:
        is_inside = False
    if not is_inside:
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size)
        raise ValueError(f"token id {bad} is outside the vocabulary (0 to {info.vocab_size - 1})")
    _check_placeholders(numbers, info)
    return prompt


def _check_ids_of_params(params: SamplingParams, info: RunnerInfo) -> None:
    """Refuses parameters that hold text, or ids outside the vocabulary."""
    if any(isinstance(word, str) for word in params.bad_words):
        raise ValueError("an engine knows no text; give bad_words as lists of token ids")
    named: dict[str, Iterable[int]] = {
        "stop token id": params.stop_token_ids,
        "token id in logit_bias": params.logit_bias,
        "token id in allowed_token_ids": (params.allowed_token_ids or ())[-1:],  # they are sorted and not negative
        "token id in bad_words": (each for word in params.bad_words if not isinstance(word, str) for each in word),
    }
    for name, ids in named.items():
        for token_id in ids:
            if not 0 <= token_id < info.vocab_size:
                raise ValueError(f"{name} {token_id} is outside the vocabulary (0 to {info.vocab_size - 1})")


def _check_blocks(num_keys: int, option: str, info: RunnerInfo) -> None:
    """Refuses a request whose keys might never fit in the cache.

    option: the parameter that makes it smaller, if there is one.
    """
    num_blocks = info.windows.max_num_blocks(num_keys, info.kvcache_block_size)
    if num_blocks > info.num_kvcache_blocks:
        options = [option] * bool(option) + ["max_num_batched_tokens"] * (info.num_groups > 1)
        smaller = f"lower {' or '.join(options)}, " if options else ""
        raise ValueError(
            f"the request may need {-(-num_blocks // info.num_groups)} KV cache blocks of {info.kvcache_block_size} "
            f"tokens, but there are {info.num_blocks_per_group}; {smaller}shorten the prompt or raise "
            "num_kvcache_blocks"
        )
