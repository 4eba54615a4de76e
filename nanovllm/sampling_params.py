"""How one request is to be sampled: a frozen value, checked when it is made."""

import numbers
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from nanovllm.checks import boolean, integer, real, seed_number, suggests_names
from nanovllm.prompts import NOT_YET
from nanovllm.structured_outputs import StructuredOutputsParams

# Of one request. Each running sequence keeps as many on the device as the longest list has, 20 bytes each.
_MAX_EDITS = 4096
_MAX_COMPLETIONS = 16384
MAX_LOGPROBS = 128
_MASK = 2**64 - 1
_OF_COMPLETIONS = 0x5BF03635  # so that completions and requests have different seeds
DEFAULT_MAX_TOKENS = 64
_BEAMS = "nanovllm has no beam search; leave it out"

# Other libraries' names for our parameters, or what to do instead of using theirs.
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
    "guided_decoding": "structured_outputs",
    "guided_json": "structured_outputs=StructuredOutputsParams(json=…)",
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
    "use_beam_search": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "num_return_sequences": "n",
    "best_of": "n",
}


@suggests_names("parameter", _MEANT)
@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """Sampling of one request.

    Logits are processed in this order: `allowed_token_ids`, `bad_words`, `min_tokens` and `logit_bias`, then the
    repetition, frequency and presence penalties, then the temperature, then `top_k`, then `top_p` over what is left,
    then `min_p`.

    Args:
        n: completions per prompt, 1 to 16,384; not with temperature 0, where all would be equal. They share the
            computation of the prompt. Completion i is the one that a request with `completion_seed(seed, i)` gets.
        temperature: divides the logits; 0 is greedy.
        max_tokens: most tokens to generate, at least 1; None is as many as fit within `max_model_len`. With
            `prompt_logprobs` it may be 0, which only scores the prompt.
        min_tokens: until so many tokens are generated, stop tokens are banned and stop strings do not count.
        top_k: sample among the k most probable tokens; 0 or −1 is off.
        top_p: sample among the fewest most probable tokens whose probabilities reach p; 1 is off.
        min_p: drop tokens less probable than min_p × the most probable one; 0 is off.
        stop: string or strings that end the completion; the text is cut before the first of them.
        include_stop_str_in_output: cut the text after the stop string instead.
        stop_token_ids: token ids that end the completion, besides the model's own end-of-sequence ids.
        ignore_eos: go on after the model's end-of-sequence ids (`stop_token_ids` still stop).
        seed: the same seed gives the same noise whatever runs beside the request; None takes one from the
            engine's seed and the request's number.
        skip_special_tokens: leave special tokens out of the text (`token_ids` always keeps them).
        detokenize: make the text; False saves its time and leaves it empty, and `stop` cannot be used then.
        repetition_penalty: above 0. The logits of tokens that prompt or completion hold are divided by it if they are
            positive and multiplied if they are negative; 1 is off.
        presence_penalty: −2 to 2, subtracted from the logits of tokens that the completion holds; 0 is off.
        frequency_penalty: −2 to 2, subtracted from a token's logit once per time that the completion holds it; 0 is
            off.
        logit_bias: {token id: number from −100 to 100}, added to the logits; at most 4,096. As from JSON, ids may be
            strings.
        bad_words: what must not be generated, at most 4,096: each a string or a list of token ids. A string is banned
            as it is tokenized at the start of a text. It is also banned as it is tokenized after a space, if that gives
            as many tokens and another first one (vLLM's rule). Other ways to spell it remain.
        allowed_token_ids: the only token ids that may be generated, at least one; None allows all.
        logprobs: with each token return its log-probability and rank, and the k most probable tokens; 0 to 128. None
            returns none.
        logprobs_mode: of which distribution. "raw" is what the model gives: the softmax of its logits. "processed" is
            what the token was drawn from: after penalties, bans and the temperature, over the tokens that the filters
            keep. For a greedy request the temperature counts as 1.
        prompt_logprobs: the same for each token of the prompt but the first, always "raw"; 0 to 128, or None.
        structured_outputs: what the completion must be, such as JSON of a schema; see StructuredOutputsParams. Cut by
            `max_tokens`, it may be incomplete; its finish reason then is "length".

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
    logit_bias: dict[int, float] = field(hash=False)
    bad_words: tuple[str | tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...] | None
    include_stop_str_in_output: bool
    detokenize: bool
    n: int
    logprobs: int | None
    logprobs_mode: str
    prompt_logprobs: int | None
    structured_outputs: StructuredOutputsParams | None

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
    ):
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("temperature", _in_range("temperature", temperature, minimum=0, meaning=" (greedy)"))
        put("n", _num_completions(n, self.temperature, max_tokens))
        put("logprobs", _num_logprobs("logprobs", logprobs))
        put("prompt_logprobs", _num_logprobs("prompt_logprobs", prompt_logprobs))
        put("logprobs_mode", _logprobs_mode(logprobs_mode))
        fewest = 1 if prompt_logprobs is None else 0
        put("max_tokens", None if max_tokens is None else integer("max_tokens", max_tokens, minimum=fewest))
        put("min_tokens", integer("min_tokens", min_tokens))
        most = self.min_tokens if self.max_tokens is None else self.max_tokens
        if not 0 <= self.min_tokens <= most:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}")
        put("top_k", max(_top_k(top_k), 0))
        put("top_p", real("top_p", top_p))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        put("min_p", _in_range("min_p", min_p, minimum=0, meaning=" (off)", maximum=1))
        put("stop", _strings("stop", stop))
        put("include_stop_str_in_output", boolean("include_stop_str_in_output", include_stop_str_in_output))
        put("stop_token_ids", () if stop_token_ids is None else _token_ids("stop_token_ids", stop_token_ids))
        put("ignore_eos", boolean("ignore_eos", ignore_eos))
        put("seed", None if seed is None else seed_number(seed))
        put("skip_special_tokens", boolean("skip_special_tokens", skip_special_tokens))
        put("detokenize", boolean("detokenize", detokenize))
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in the text; use stop_token_ids, or leave out detokenize=False")
        put("repetition_penalty", _repetition_penalty(repetition_penalty))
        put("presence_penalty", _in_range("presence_penalty", presence_penalty, minimum=-2, maximum=2))
        put("frequency_penalty", _in_range("frequency_penalty", frequency_penalty, minimum=-2, maximum=2))
        put("logit_bias", _logit_bias(logit_bias))
        put("bad_words", _bad_words(bad_words))
        put("structured_outputs", _structured_outputs(structured_outputs))
        if self.structured_outputs is not None and (self.min_tokens or allowed_token_ids is not None):
            name = "min_tokens" if self.min_tokens else "allowed_token_ids"
            raise ValueError(f"structured_outputs says which tokens may come when; leave out {name}")
        put("allowed_token_ids", None if allowed_token_ids is None else _allowed_token_ids(allowed_token_ids))


def completion_seed(seed: int, index: int) -> int:
    """The 64-bit seed of completion `index` of a request with `seed`; completion 0 has the request's own."""
    return mixed_seed(seed ^ _OF_COMPLETIONS, index) if index else seed


def row_seed(seed: int, row_id: Any) -> int:
    """A 64-bit seed for each id: BLAKE2 over the seed and the id's text. It does not depend on where a row stands."""
    return int.from_bytes(blake2b(f"{seed} {row_id}".encode(), digest_size=8).digest(), "little")


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """A copy with another seed. The other parameters are not checked again: checks make a copy take six times as long,
    for each row of a job."""
    copy = object.__new__(SamplingParams)
    for name in SamplingParams.__slots__:
        object.__setattr__(copy, name, getattr(params, name))
    object.__setattr__(copy, "seed", seed)
    return copy


def mixed_seed(seed: int, number: int) -> int:
    """A 64-bit seed for each number: SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed and number."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def one_per_prompt(given: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """A list with one per prompt, from such a list or from one for all; a TypeError or ValueError for anything else."""
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, not a {type(given).__name__}")
    params = [_checked(params, index) for index, params in enumerate(given)]
    if len(given) != num_prompts:
        raise ValueError(f"{len(given)} sampling_params for {num_prompts} prompts; give one for all, or one per prompt")
    return params


def with_params(prompts: Iterator[Any], given: Any) -> Iterator[tuple[Any, SamplingParams] | None]:
    """Each prompt with its parameters: `given` is one for all, or an iterable with one per prompt. NOT_YET gives
    None.

    Raises:
        TypeError: `given` is neither.
        ValueError, TypeError: raised as the pairs are read: it ends before the prompts, or holds something else.
    """
    if isinstance(given, SamplingParams):
        return (None if prompt is NOT_YET else (prompt, given) for prompt in prompts)
    if not isinstance(given, Iterable):
        raise TypeError(
            f"sampling_params must be a SamplingParams or an iterable of them, not a {type(given).__name__}"
        )
    return _zip_params(prompts, iter(given))


def _zip_params(prompts: Iterator[Any], given: Iterator[Any]) -> Iterator[tuple[Any, SamplingParams] | None]:
    index = -1
    for prompt in prompts:
        if prompt is NOT_YET:
            yield None
            continue
        index += 1
        params = next(given, None)
        if params is None:
            raise ValueError(f"sampling_params end before prompt {index}; give one for all, or one per prompt")
        yield prompt, _checked(params, index)


def _checked(params: Any, index: int) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params[{index}] must be a SamplingParams, not {repr(params)[:200]}")
    return params


def _in_range(name: str, value: Any, minimum: float, meaning: str = "", maximum: float | None = None) -> float:
    number = real(name, value)
    if maximum is None and number < minimum:
        raise ValueError(f"{name} must be {minimum}{meaning} or more, not {number}")
    if maximum is not None and not minimum <= number <= maximum:
        raise ValueError(f"{name} must be between {minimum}{meaning} and {maximum}, not {number}")
    return number


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping):  # as from JSON
        return StructuredOutputsParams(**value)
    raise TypeError(f"structured_outputs must be a StructuredOutputsParams or a dict of its fields, not {value!r}")


def _num_completions(value: Any, temperature: float, max_tokens: Any) -> int:
    n = integer("n", value, minimum=1)
    if n > _MAX_COMPLETIONS:
        raise ValueError(f"n must be at most {_MAX_COMPLETIONS}, not {n}")
    if n > 1 and temperature == 0:
        raise ValueError(f"n={n} greedy completions would all be equal; set a temperature above 0, or n=1")
    if n > 1 and max_tokens == 0:
        raise ValueError(f"n={n} completions of no tokens would all be equal; set n=1, or max_tokens above 0")
    return n


def _repetition_penalty(value: Any) -> float:
    penalty = real("repetition_penalty", value)
    if not 1e-30 <= penalty <= 1e30:  # what float32 can divide by
        raise ValueError(f"repetition_penalty must be above 0 (1 is off) and at most 1e30, not {penalty}")
    return penalty


def _logprobs_mode(value: Any) -> str:
    if value not in ("raw", "processed"):
        raise ValueError(f'logprobs_mode must be "raw" or "processed", not {value!r}')
    return value


def _num_logprobs(name: str, value: Any) -> int | None:
    number = None if value is None else integer(name, value, minimum=0)
    if number is not None and number > MAX_LOGPROBS:
        raise ValueError(f"{name} must be at most {MAX_LOGPROBS}, not {number}")
    return number


def _top_k(value: Any) -> int:
    top_k = integer("top_k", value)
    if top_k < -1:
        raise ValueError(f"top_k must be 0 or -1 (off) or more, not {top_k}")
    return top_k


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) for string in strings):
        raise TypeError(f"{name} must be a string or a list of strings, not {value!r}")
    if "" in strings:
        raise ValueError(f"{name} must not hold an empty string: every completion would hold it at once")
    if any(0xD800 <= ord(character) < 0xE000 for string in strings for character in string):
        raise ValueError(f"{name} must be text; {value!r} holds half of a surrogate pair")
    return tuple(strings)


def _token_ids(name: str, value: Any, minimum: int | None = None) -> tuple[int, ...]:
    """Any collection of token ids, an array too, as plain integers."""
    token_ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(token_ids, (list, tuple, set, frozenset, range)):
        raise TypeError(f"{name} must be a list of token ids, not {value!r}")
    return tuple(integer(name, token_id, minimum) for token_id in token_ids)


def _allowed_token_ids(value: Any) -> tuple[int, ...]:
    token_ids = _token_ids("allowed_token_ids", value, minimum=0)
    if not token_ids:
        raise ValueError("allowed_token_ids must hold at least one token id; None allows all")
    return tuple(sorted(set(token_ids)))


def _logit_bias(value: Any) -> dict[int, float]:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must be a dict from token ids to numbers, not {value!r}")
    if value is not None and len(value) > _MAX_EDITS:
        raise ValueError(
            f"logit_bias holds {len(value)} ids, and at most {_MAX_EDITS} are possible; allowed_token_ids bans more"
        )
    biases: dict[int, float] = {}
    for key, bias in (value or {}).items():
        # JSON's keys are strings.
        is_text = isinstance(key, str) and key.isascii() and key.isdigit()
        token_id = integer("a key of logit_bias", int(key) if is_text else key, minimum=0)
        if token_id in biases:
            raise ValueError(f"logit_bias names token {token_id} twice")
        is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        if is_number and not -100 <= bias <= 100:  # infinite and NaN biases too
            raise ValueError(
                f"logit_bias[{token_id}] must be between -100 and 100, not {bias}; "
                "bad_words and allowed_token_ids ban tokens"
            )
        biases[token_id] = real(f"logit_bias[{token_id}]", bias)
    return biases


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    words = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(words, (list, tuple)) or any(isinstance(word, numbers.Number) for word in words):
        raise TypeError(f"bad_words must be a list of strings or of lists of token ids, not {value!r}")
    if len(words) > _MAX_EDITS:
        raise ValueError(
            f"bad_words holds {len(words)} words, and at most {_MAX_EDITS} are possible; allowed_token_ids bans more"
        )
    checked: list[str | tuple[int, ...]] = []
    for word in words:
        checked += _strings("bad_words", word) if isinstance(word, str) else [_token_ids("bad_words", word, minimum=0)]
    if () in checked:
        raise ValueError("bad_words must not hold an empty list of token ids")
    return tuple(checked)
