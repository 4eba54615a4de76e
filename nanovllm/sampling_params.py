"""The sampling of one request: values that are checked when they are given."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import nanovllm.sampling_checks as checked
from nanovllm.accepted import ACCEPTED_PARAMETERS, RENAMED_PARAMETERS
from nanovllm.checks import boolean, integer, suggests_names
from nanovllm.prompts import NOT_YET
from nanovllm.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = checked.MAX_LOGPROBS
_MASK = 2**64 - 1
_OF_COMPLETIONS = 0x5BF03635  # makes the seeds of completions differ from those of requests
DEFAULT_MAX_TOKENS = checked.DefaultMaxTokens(64)
_BEAMS = "nanovllm has no beam search; leave it out"

# Other libraries' names for our parameters, or the advice where we have none.
_MEANT = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_gen_toks": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "temp": "temperature",
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "guided_json": "structured_outputs=StructuredOutputsParams(json=…)",
    "guided_regex": "structured_outputs=StructuredOutputsParams(regex=…)",
    "guided_choice": "structured_outputs=StructuredOutputsParams(choice=…)",
    "guided_grammar": "structured_outputs=StructuredOutputsParams(grammar=…)",
    "response_format": "structured_outputs=StructuredOutputsParams(json=…)",
    "greedy": "temperature=0 is greedy",
    "k": "top_k",
    "p": "top_p",
    "nucleus": "top_p",
    "repeat_penalty": "repetition_penalty",
    "repetition_context_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "stop_words": "stop",
    "stop_sequences": "stop",
    "until": "stop",
    "eos_token_id": "stop_token_ids",
    "stop_tokens": "stop_token_ids",
    "ignore_eos_token": "ignore_eos",
    "bad_words_ids": "bad_words",
    "suppress_tokens": "bad_words=[[id], [id], …] bans single tokens",
    "banned_tokens": "bad_words=[[id], [id], …] bans single tokens",
    "allowed_tokens": "allowed_token_ids",
    "sequence_bias": "logit_bias biases single tokens",
    "random_seed": "seed",
    "generator": "seed",
    "num_beams": _BEAMS,
    "beam_width": _BEAMS,
    "num_return_sequences": "n",
    "task": "it is a parameter of PoolingParams, which embed() and generate_iter() take",
}


@suggests_names("parameter", _MEANT, ACCEPTED_PARAMETERS, RENAMED_PARAMETERS)
@dataclass(init=False)
class SamplingParams:
    """The sampling of one request. Its parameters may be assigned to; a request keeps those that it was added with.

    Logits are processed in this order: `allowed_token_ids`, `bad_words`, `min_tokens` and `logit_bias`, then the
    repetition, frequency and presence penalties, then the temperature, then `top_k`, then `top_p` over the rest,
    then `min_p`.

    Args:
        n: completions per prompt, 1 to 16,384; only 1 with temperature 0, where all would be equal. They share the
            computation of the prompt. Completion i equals the completion of a request with `completion_seed(seed, i)`.
        temperature: divides the logits; 0 is greedy.
        max_tokens: maximum number of tokens to generate, at least 1; None is as many as fit within `max_model_len`.
            With `prompt_logprobs` it may be 0, which only scores the prompt.
        min_tokens: until this many tokens are generated, stop tokens are banned and stop strings do not count. Only
            structured outputs that cannot go on end earlier.
        top_k: sample among the k most probable tokens; 0 or −1 is off.
        top_p: sample among the fewest most probable tokens whose probabilities reach p; 1 is off.
        min_p: drop tokens less probable than min_p × the most probable one; 0 is off.
        stop: string or strings that end the completion, among them the texts of special tokens; the text is cut before
            the first of them.
        include_stop_str_in_output: cut the text after the stop string instead.
        stop_token_ids: token ids that end the completion, besides the model's own end-of-sequence ids.
        ignore_eos: continue after the model's end-of-sequence ids (`stop_token_ids` still stop).
        seed: the same seed gives the same noise, independent of the other requests; None or −1 derives one from the
            engine's seed and the request's number.
        skip_special_tokens: leave special tokens out of the text (`token_ids` always keeps them).
        detokenize: make the text; False saves the time and leaves the text empty, and `stop` cannot be used then.
        repetition_penalty: above 0. The logits of tokens in the prompt or the completion are divided by it if they are
            positive, and multiplied by it if they are negative; 1 is off.
        presence_penalty: −2 to 2, subtracted from the logits of tokens in the completion; 0 is off.
        frequency_penalty: −2 to 2, subtracted from a token's logit once per occurrence in the completion; 0 is off.
        logit_bias: {token id: number from −100 to 100}, added to the logits; at most 4,096. Ids may also be strings, as
            in JSON.
        bad_words: up to 4,096 words that must not be generated, each a string or a list of token ids. A string is
            banned as it is tokenized at the start of a text. It is also banned as it is tokenized after a space, if
            that gives as many tokens and another first one (vLLM's rule). Other ways to spell it remain.
        allowed_token_ids: the only token ids that may be generated, at least one; None allows all.
        logprobs: return each token's log-probability and rank, and this many of the most probable tokens; 0 to 128.
            None returns no log-probabilities.
        logprobs_mode: the distribution of `logprobs`. "raw" is the model's: the softmax of its logits. "processed" is
            the one that the token was drawn from: after penalties, bans and the temperature, over the tokens that the
            filters keep. For a greedy request the temperature counts as 1.
        prompt_logprobs: the same for each token of the prompt but the first, always "raw"; 0 to 128, or None.
        structured_outputs: the form of the completion, such as JSON of a schema; see StructuredOutputsParams. A
            completion that `max_tokens` cuts may be incomplete; its finish reason then is "length".

        logits_processors: functions that change the logits of each new token before all else, called in order as
            `f(token_ids, logits)` or `f(prompt_token_ids, token_ids, logits)`. `token_ids` is the list of generated
            tokens, `logits` a float32 tensor [vocab_size] on the model's device, and the result a tensor like it. Slow:
            a step that samples for such a request waits for the functions. They need tensor_parallel_size=1.

    Raises:
        TypeError, ValueError: a parameter of the wrong type or out of range, named with the range.
    """

    temperature: float
    max_tokens: int | None
    min_tokens: int
    top_k: int
    top_p: float
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int | None
    skip_special_tokens: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    bad_words: tuple[str | tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...] | None
    include_stop_str_in_output: bool
    detokenize: bool
    n: int
    logprobs: int | None
    logprobs_mode: str
    prompt_logprobs: int | None
    structured_outputs: StructuredOutputsParams | None
    logits_processors: tuple[Callable[..., Any], ...]

    def __init__(
        self,
        temperature: float = 1.0,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        min_tokens: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        seed: int | None = None,
        skip_special_tokens: bool = True,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        bad_words: str | Sequence[str | Sequence[int]] | None = None,
        allowed_token_ids: Collection[int] | None = None,
        include_stop_str_in_output: bool = False,
        detokenize: bool = True,
        n: int = 1,
        logprobs: int | None = None,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        prompt_logprobs: int | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        logits_processors: Sequence[Callable[..., Any]] | None = None,
    ):
        given = locals()
        put = object.__setattr__
        for name, default, kept in _FIELDS:
            value = given[name]
            put(self, name, kept if value is default else _CHECKS[name](value))
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks the value as the constructor does. None is the default, but for `max_tokens` it has a meaning."""
        name = RENAMED_PARAMETERS.get(name, name)
        if name in _CHECKS:
            value = _DEFAULTS[name] if value is None and name != "max_tokens" else value
            object.__setattr__(self, name, _CHECKS[name](value))
        elif name not in ACCEPTED_PARAMETERS or not ACCEPTED_PARAMETERS[name].takes(value, vars(self)):
            try:
                SamplingParams(**{name: value})  # says what to do
            except TypeError as error:
                raise AttributeError(str(error)) from None

    def check(self) -> None:
        """Raises a ValueError if two parameters contradict each other. Each call does this too, because parameters may
        be assigned to in any order."""
        checked.together(self)

    @classmethod
    def from_optional(cls, **parameters: Any) -> "SamplingParams":
        """vLLM's name of the constructor: None is a parameter's default."""
        return cls(**parameters)

    def clone(self) -> "SamplingParams":
        """An equal value."""
        return _copy(self)


# The check of each parameter by itself; `sampling_checks.together` checks them against each other.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "temperature": partial(checked.in_range, "temperature", minimum=0, meaning=" (greedy)"),
    "max_tokens": checked.max_tokens,
    "min_tokens": partial(integer, "min_tokens", minimum=0),
    "top_k": checked.top_k,
    "top_p": checked.top_p,
    "min_p": partial(checked.in_range, "min_p", minimum=0, meaning=" (off)", maximum=1),
    "stop": partial(checked.strings, "stop"),
    "stop_token_ids": checked.stop_token_ids,
    "ignore_eos": partial(boolean, "ignore_eos"),
    "seed": checked.seed,
    "skip_special_tokens": partial(boolean, "skip_special_tokens"),
    "repetition_penalty": checked.repetition_penalty,
    "presence_penalty": partial(checked.in_range, "presence_penalty", minimum=-2, maximum=2),
    "frequency_penalty": partial(checked.in_range, "frequency_penalty", minimum=-2, maximum=2),
    "logit_bias": checked.logit_bias,
    "bad_words": checked.bad_words,
    "allowed_token_ids": checked.allowed_token_ids,
    "include_stop_str_in_output": partial(boolean, "include_stop_str_in_output"),
    "detokenize": partial(boolean, "detokenize"),
    "n": checked.n,
    "logprobs": partial(checked.num_logprobs, "logprobs"),
    "logprobs_mode": checked.logprobs_mode,
    "prompt_logprobs": partial(checked.num_logprobs, "prompt_logprobs"),
    "structured_outputs": checked.structured_outputs,
    "logits_processors": checked.logits_processors,
}
_DEFAULTS = {name: each.default for name, each in inspect.signature(SamplingParams).parameters.items()}
# Each parameter's name and default, and that default as it is kept.
_FIELDS = [(name, default, _CHECKS[name](default)) for name, default in _DEFAULTS.items()]
# Advice for a method that is given a parameter as an argument of its own.
AS_ARGUMENT = {
    given: f"give it as sampling_params=SamplingParams({name}=…)"
    for given, name in {**_MEANT, **{name: name for name in _DEFAULTS}}.items()
    if name in _DEFAULTS
}


# What `sampling_params` may be, besides None: one for all prompts, or one per prompt.
OneOrMany = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]]


def completion_seed(seed: int, index: int) -> int:
    """The 64-bit seed of completion `index` of a request with `seed`; completion 0 has the request's own."""
    return mixed_seed(seed ^ _OF_COMPLETIONS, index) if index else seed


def row_seed(seed: int, row_id: Any) -> int:
    """A 64-bit seed for each id: BLAKE2 over the seed and the id's text. It does not depend on a row's place."""
    return int.from_bytes(blake2b(f"{seed} {row_id}".encode(), digest_size=8).digest(), "little")


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """A copy with another seed. The other parameters are not checked again, which would take six times as long, for
    each row of a job."""
    copy = _copy(params)
    object.__setattr__(copy, "seed", seed)
    return copy


def _copy(params: SamplingParams) -> SamplingParams:
    copy = object.__new__(type(params))
    vars(copy).update(vars(params))
    return copy


def mixed_seed(seed: int, number: int) -> int:
    """A 64-bit seed for each number: SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed and number."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def checked_params(given: Any, others: tuple[type, ...] = ()) -> Any:
    """A checked copy of one SamplingParams or of a list of them. A dict of parameters becomes a SamplingParams. All
    else, such as an iterator or one of `others`, is returned as it is.

    Raises:
        TypeError, ValueError: a parameter is unknown or wrong, or an item of a list is something else.
    """
    if isinstance(given, (list, tuple)):
        return [
            params if isinstance(params, others) else _checked(params, f"[{index}]")
            for index, params in enumerate(given)
        ]
    return _checked(given) if isinstance(given, (SamplingParams, Mapping)) else given


def one_per_prompt(given: Any, num_prompts: int, others: tuple[type, ...] = ()) -> list[Any]:
    """A list with one per prompt, from such a list or from one for all; otherwise a TypeError or ValueError.

    others: further types of parameters, which never change.
    """
    params = checked_params(given, others)
    if isinstance(params, (SamplingParams, *others)):
        return [params] * num_prompts
    if not isinstance(params, list):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, not a {type(given).__name__}")
    if len(params) != num_prompts:
        raise ValueError(
            f"{len(params)} sampling_params for {num_prompts} prompts; give one for all, or one per prompt"
        )
    return params


def with_params(prompts: Iterator[Any], given: Any, others: tuple[type, ...] = ()) -> Iterator[tuple[Any, Any] | None]:
    """Each prompt with its parameters, as they are now: `given` is one for all, or an iterable with one per prompt.
    NOT_YET gives None.

    others: further types of parameters, which never change.

    Raises:
        TypeError: `given` is neither.
        ValueError, TypeError: raised while the pairs are read: `given` ends before the prompts, or holds something
            else.
    """
    given = checked_params(given, others)
    if isinstance(given, (SamplingParams, *others)):
        return (None if prompt is NOT_YET else (prompt, given) for prompt in prompts)
    if not isinstance(given, Iterable):
        raise TypeError(
            f"sampling_params must be a SamplingParams or an iterable of them, not a {type(given).__name__}"
        )
    return _zip_params(prompts, iter(given), others)


def _zip_params(
    prompts: Iterator[Any], given: Iterator[Any], others: tuple[type, ...]
) -> Iterator[tuple[Any, Any] | None]:
    index = -1
    for prompt in prompts:
        if prompt is NOT_YET:
            yield None
            continue
        index += 1
        params = next(given, None)
        if params is None:
            raise ValueError(f"sampling_params end before prompt {index}; give one for all, or one per prompt")
        yield prompt, params if isinstance(params, others) else _checked(params, f"[{index}]")


def _checked(params: Any, place: str = "") -> SamplingParams:
    """A copy of the parameters, which may be a dict. `place` is their index, for errors."""
    if not isinstance(params, (SamplingParams, Mapping)):
        advice = "; embed() and generate_iter() take PoolingParams" * (type(params).__name__ == "PoolingParams")
        raise TypeError(f"sampling_params{place} must be a SamplingParams, not {repr(params)[:200]}{advice}")
    try:
        if isinstance(params, Mapping):
            return SamplingParams(**params)
        params.check()
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"sampling_params{place}: {error}") from None
    return params.clone()
