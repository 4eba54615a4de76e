"""Rows that are computed in one forward pass: from PoolingParams to requests, and from their numbers to outputs."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from nanovllm.completions import FinishedRow
from nanovllm.config import Config
from nanovllm.engine.runner import RunnerInfo
from nanovllm.engine.sequence import Pooling
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.models.config import ModelConfig
from nanovllm.models.pooling_config import PoolingConfig
from nanovllm.outputs import RequestMetrics
from nanovllm.pooling_outputs import PooledOutput, PoolingRequestOutput
from nanovllm.pooling_params import PoolingParams
from nanovllm.prompts import EncodedPrompt, without_dict, without_header
from nanovllm.sampling_params import SamplingParams
from nanovllm.text import Text

# The engine's parameters of requests that score a label.
_SCORED = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
_NO_AND_YES = ("no", "yes")
_TOKENS: dict[Any, Any] = {"last": "last", "mean": "mean", "cls": "first"}
_MAX_NUMBERS_OF_STATES = 2**30  # that a step returns
# The parameters that "score" takes and one of its kinds does not read.
_UNREAD = {
    "head": ("pooling", "dimensions"), "recipe": ("pooling", "dimensions", "normalize"), "cosine": ("normalize",),
}  # fmt: skip
_RERANKER_TASK = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt on which Qwen3-Reranker was trained (Zhang et al., 2025, and the model's card).
_RERANKER_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
DEFAULTS = PoolingConfig("last", True, None, {}, "", None)


class PoolingFacts(NamedTuple):
    """A model's properties that rows depend on.

    head: see ModelConfig.
    labels, activation: the names of a classification head's numbers, and the function that makes probabilities of them.
    embedder: what the checkpoint's sentence-transformers files and the option pooler_config say; None without them.
    refusal: why they cannot be followed, or "".
    asks_yes_or_no: whether a score without a recipe is the probability of "yes" after both texts.
    """

    head: str = "lm"
    labels: tuple[str, ...] = ()
    activation: str = "softmax"
    num_layers: int = 0
    hidden_size: int = 0
    max_model_len: int = 0
    embedder: PoolingConfig | None = None
    refusal: str = ""
    asks_yes_or_no: bool = False
    num_ranks: int = 1
    max_step_tokens: int = 0
    is_deterministic: bool = False

    @property
    def defaults(self) -> PoolingConfig:
        return self.embedder or DEFAULTS

    @classmethod
    def of(cls, config: ModelConfig, info: RunnerInfo, options: Config) -> "PoolingFacts":
        given, embedder, refusal = options.pooler_config, config.pooling, config.pooling_refusal
        if given and info.head == "score":
            raise ValueError("pooler_config says how embeddings are made, and this model has a classification head")
        if given is not None:
            fields = {"tokens": _TOKENS.get(given.get("pooling")), "normalizes": given.get("normalize")}
            given_fields = {name: value for name, value in fields.items() if value is not None}
            embedder = replace(embedder or DEFAULTS, **given_fields)
            refusal = refusal if "pooling" not in given else ""
        return cls(
            info.head, config.labels, config.score_activation, info.num_layers, config.hidden_size, info.max_model_len,
            embedder, refusal, bool(options.hf_overrides), options.tensor_parallel_size, options.max_num_batched_tokens,
            options.deterministic,
        )  # fmt: skip


class PooledRows:
    """Makes requests and outputs of rows that have PoolingParams.

    Args:
        text: tokenizes.
        facts: the model's properties.
        splits_special: a special token in a text is ordinary text.
    """

    def __init__(self, text: Text, facts: PoolingFacts, splits_special: bool = False):
        self._text, self.facts, self._splits_special = text, facts, splits_special

    def splitting_special(self) -> "PooledRows":
        """The same, but special tokens in a text are ordinary text."""
        return PooledRows(self._text, self.facts, True)

    def check(self, params: PoolingParams) -> None:
        """Raises a ValueError if the model cannot serve such rows."""
        facts, task = self.facts, params.task or "embed"
        served = {
            "lm": "embed, encode, label, and score with recipe= or pooling=",
            "none": "embed, encode, and score with pooling=",
        }  # fmt: skip
        if task in ("classify", "reward") and facts.head != "score":
            raise ValueError(
                f"{task} needs a model with a classification head (…ForSequenceClassification), and this one has none; "
                f"it serves {served[facts.head]}"
            )
        if (task == "label" or self._asks_yes_or_no(params)) and facts.head != "lm":
            raise ValueError(
                f"{task} needs a model with an LM head (…ForCausalLM), loaded without runner='pooling'; this one has "
                + ("a classification head, which classify, reward and score read" if facts.head == "score" else "none")
            )
        is_known = self._has_score_head or self._asks_yes_or_no(params) or self._embeds(params)
        if task == "score" and not is_known:
            raise ValueError(
                "this model has neither a classification head nor the files of sentence-transformers, so score does "
                "not know what to compute: give recipe='qwen3-reranker' for Qwen3-Reranker, or pooling='last' (or "
                "another one) for an embedder, whose score is the cosine"
            )
        asks_at_end = params.recipe is not None or self._asks_yes_or_no(params)
        if asks_at_end and params.truncate_prompt_tokens is not None:
            raise ValueError("a recipe's prompt cannot be cut, because its end asks the question; shorten the document")
        if task == "score" and self._has_score_head and len(facts.labels) > 1:
            raise ValueError(f"score needs a head of one number, and this one has {len(facts.labels)}; use classify")
        is_embedding = task == "embed" or (task == "score" and self._embeds(params))
        if is_embedding and params.pooling is None and facts.refusal:
            raise ValueError(f"{facts.refusal}; or give pooling= to decide it here")
        if facts.is_deterministic and is_embedding and (params.pooling or facts.defaults.tokens) == "mean":
            raise ValueError(
                "deterministic=True cannot pool the mean: the chunks of a prompt change the last bits of its sum; use "
                'an LLM without deterministic=True, or pooling="last" if the model was trained with it'
            )
        if params.prompt_name is not None and params.prompt_name not in facts.defaults.prompts:
            known = ", ".join(map(repr, facts.defaults.prompts)) or "none"
            raise ValueError(f"prompt_name={params.prompt_name!r} is not in the checkpoint, which has {known}")
        if params.hidden_states_layers:
            self._check_layers(params)
        if params.dimensions is not None and params.dimensions > facts.hidden_size:
            raise ValueError(f"dimensions={params.dimensions} is more than the model's hidden_size={facts.hidden_size}")
        kind = facts.defaults.similarity if self._embeds(params) else "head" if self._has_score_head else "recipe"
        for name in _UNREAD.get(kind, ()) if task == "score" else ():
            if getattr(params, name) is not None:
                raise ValueError(f"{name} would change nothing in this score, which is that of a {kind}; leave it out")

    def _check_layers(self, params: PoolingParams) -> None:
        facts, layers = self.facts, params.hidden_states_layers
        limits = -facts.num_layers - 1, facts.num_layers
        if not (limits[0] <= min(layers) and max(layers) <= limits[1]):
            raise ValueError(f"hidden_states_layers must be from {limits[0]} to {limits[1]}, not {list(layers)}")
        if facts.num_ranks > 1:
            raise ValueError("hidden_states_layers needs tensor_parallel_size=1: ranks may hold a part of a state")
        num_kept = len(layers) + 1 if params.task == "token_embed" else 0
        if num_kept * facts.max_step_tokens * facts.hidden_size > _MAX_NUMBERS_OF_STATES:
            raise ValueError(
                f"the states of {len(layers)} layers and of the final norm, for all tokens of a step of "
                f"{facts.max_step_tokens}, take too much memory; lower max_num_batched_tokens, or ask for fewer layers"
            )

    @property
    def _has_score_head(self) -> bool:
        return self.facts.head == "score"

    def _embeds(self, params: PoolingParams) -> bool:
        """Whether a score is the cosine of two embeddings."""
        return (
            not self._has_score_head
            and params.recipe is None
            and (self.facts.embedder is not None or bool(self.facts.refusal) or params.pooling is not None)
        )

    def _asks_yes_or_no(self, params: PoolingParams) -> bool:
        asks = params.recipe is not None or (self.facts.asks_yes_or_no and params.pooling is None)
        return params.task == "score" and asks and not self._has_score_head

    # From prompts to requests

    def encode(self, rows: Sequence[tuple[Any, PoolingParams]]) -> list[EncodedPrompt]:
        """Encodes the prompts of rows. Neighbours with the same parameters are tokenized together."""
        encoded: list[EncodedPrompt] = []
        for params, some in groupby(rows, key=lambda row: row[1]):
            prompts = [prompt for prompt, _ in some]
            try:
                self.check(params)
                encoded += self._encode(prompts, params)
            except ValueError as error:
                encoded += [EncodedPrompt(None, [], error)] * len(prompts)
        return encoded

    def _encode(self, prompts: list[Any], params: PoolingParams) -> list[EncodedPrompt]:
        if self._splits_special and params.task in ("label", "score"):
            raise ValueError(f"split_special_tokens does not apply to the task {params.task!r}; leave it out")
        if params.task == "label":
            rows = self._text.encode_labels([(prompt, params.labels) for prompt in prompts])
            return list(map(_joined, rows))
        maximum = params.truncate_prompt_tokens
        if maximum == -1:
            maximum = min(self.facts.max_model_len, self.facts.defaults.max_length or self.facts.max_model_len)
        if params.task != "score":
            prompts = [self._prefixed(without_header(prompt), params) for prompt in prompts]
            return self._text.encode(prompts, splits_special=self._splits_special, max_tokens=maximum)
        pairs = list(map(_pair, prompts))
        good = [pair for pair in pairs if isinstance(pair, tuple)]
        found = iter(self._encode_pairs(good, params, maximum))
        return [next(found) if isinstance(pair, tuple) else EncodedPrompt(None, [], pair) for pair in pairs]

    def _prefixed(self, prompt: Any, params: PoolingParams) -> Any:
        """The prompt after the checkpoint's own text for it."""
        if params.task not in (None, "embed", "token_embed", "score"):
            return prompt
        defaults, text = self.facts.defaults, without_dict(prompt)
        prefix = defaults.default_prompt if params.prompt_name is None else defaults.prompts[params.prompt_name]
        if isinstance(text, str):
            return prefix + text
        return prompt if params.prompt_name is None else ValueError("prompt_name needs a prompt that is a string")

    def _encode_pairs(
        self, pairs: list[tuple[str, str]], params: PoolingParams, maximum: int | None
    ) -> list[EncodedPrompt]:
        if params.recipe is not None:
            instruction = _RERANKER_TASK if params.instruction is None else params.instruction
            texts = [_RERANKER_PROMPT.format(instruction=instruction, query=q, document=d) for q, d in pairs]
            if self._has_score_head:
                return self._text.encode(texts, add_special_tokens=False, max_tokens=maximum)
            rows = self._text.encode_labels([(text, _NO_AND_YES) for text in texts], add_special_tokens=False)
            return list(map(_joined, rows))
        if self._has_score_head or self._asks_yes_or_no(params):
            found = self._text.encode_texts(pairs, add_special_tokens=True, max_tokens=maximum)
            if not self._has_score_head:
                return list(map(_joined, self._text.encode_labels([(ids, _NO_AND_YES) for ids in found])))
            return [EncodedPrompt.of("".join(pair), ids) for pair, ids in zip(pairs, found, strict=True)]
        both = self._text.encode([self._prefixed(text, params) for pair in pairs for text in pair], max_tokens=maximum)
        return [_joined(both[index : index + 2]) for index in range(0, len(both), 2)]

    def request(self, params: PoolingParams) -> SamplingParams | Pooling:
        """What the engine does with each prompt of a row: it scores the end of the prompt, or it pools."""
        if params.task == "label" or self._asks_yes_or_no(params):
            return _SCORED
        if params.task in ("classify", "reward") or (params.task == "score" and not self._embeds(params)):
            return Pooling("last", (), True)
        tokens: str = self.facts.defaults.tokens if params.pooling is None else _TOKENS[params.pooling]
        last = self.facts.num_layers
        layers = tuple(layer % (last + 1) for layer in params.hidden_states_layers)
        tokens = "all" if params.task == "token_embed" else tokens
        return Pooling(tokens, (*layers, last) if layers else ())

    # From numbers to outputs

    def outputs(self, rows: list[FinishedRow]) -> list[PoolingRequestOutput]:
        """One per row. Neighbours with the same parameters are computed together."""
        now, outputs = time.time(), []
        for params, some in groupby(rows, key=lambda row: row.params):
            of_kind = list(some)
            good = [row for row in of_kind if _error(row) is None]
            numbers = self._numbers(good, params) if good else iter(())
            outputs += [self._output(row, params, next(numbers) if _error(row) is None else {}, now) for row in of_kind]
        return outputs

    def _output(
        self, row: FinishedRow, params: PoolingParams, numbers: dict[str, Any], now: float
    ) -> PoolingRequestOutput:
        metrics = RequestMetrics(row.arrival_time, None, now) if row.sequences else None
        labels = {"label": params.labels, "classify": self.facts.labels}.get(params.task or "", ())
        prompt, is_scored = row.prompt, isinstance(self.request(params), SamplingParams)
        return PoolingRequestOutput(
            row.request_id, prompt.text, prompt.token_ids[: prompt.first_scored] if is_scored else prompt.token_ids,
            PooledOutput(params.task or "embed", numbers.pop("array", None)),
            sum(seq.num_cached_tokens for seq in row.sequences), _error(row), labels, **numbers,
            weight_version=row.weight_version, prompt_index=row.number, metrics=metrics,
        )  # fmt: skip

    def _numbers(self, rows: list[FinishedRow], params: PoolingParams) -> Iterator[dict[str, Any]]:
        """The fields of the outputs: `array`, and others of PoolingRequestOutput."""
        if params.task == "label" or self._asks_yes_or_no(params):
            totals = np.array([[_log_probability(seq) for seq in row.sequences] for row in rows], np.float32)
            probs = _softmax(totals)
            if params.task == "score":
                return ({"array": each[1:].copy()} for each in probs)
            return ({"array": each.copy(), "logprobs": total.copy()} for each, total in zip(probs, totals, strict=True))
        if params.task == "token_embed":
            return (self._token_states(row.sequences[0], params) for row in rows)
        sequences = [seq for row in rows for seq in row.sequences]
        states = np.stack([_pooled(seq) for seq in sequences])
        if params.task in ("classify", "reward", "score") and not self._embeds(params):
            return ({"array": each.copy()} for each in self._activated(states, params))
        num_layers = len(params.hidden_states_layers)
        *layers, last = np.split(states, num_layers + 1, 1)
        vectors = self._embeddings(last, params)
        if params.task == "score":
            if self.facts.defaults.similarity == "cosine":
                vectors = _normalized(vectors)
            return ({"array": each.copy()} for each in (vectors[::2] * vectors[1::2]).sum(1, keepdims=True))
        of_layers = list(map(np.copy, np.stack(layers, 1))) if layers else [None] * len(rows)
        return (
            {"array": vector.copy(), "hidden_states": of_row} for vector, of_row in zip(vectors, of_layers, strict=True)
        )

    def _token_states(self, seq: EngineSequence, params: PoolingParams) -> dict[str, Any]:
        states = np.concatenate(seq.states)
        *layers, last = np.split(states, len(params.hidden_states_layers) + 1, 1)
        array = _normalized(last) if params.normalize else last
        return {"array": array, "hidden_states": np.stack(layers) if layers else None}

    def _embeddings(self, states: np.ndarray, params: PoolingParams) -> np.ndarray:
        defaults = self.facts.defaults
        normalizes = defaults.normalizes if params.normalize is None else params.normalize
        vectors = states[:, : params.dimensions]
        vectors = _normalized(vectors) if normalizes else vectors
        return vectors if params.dimensions else vectors[:, : defaults.dimensions]

    def _activated(self, numbers: np.ndarray, params: PoolingParams) -> np.ndarray:
        """The outputs of a head, as probabilities if that is asked for."""
        activates = params.task != "reward" if params.normalize is None else params.normalize
        if not activates or self.facts.activation == "none":
            return numbers
        return _softmax(numbers) if self.facts.activation == "softmax" else np.exp(-np.logaddexp(0, -numbers))


def _joined(parts: Sequence[EncodedPrompt]) -> EncodedPrompt:
    """One row of several prompts, with the first error of them."""
    error = next((part.error for part in parts if part.error is not None), None)
    return parts[0]._replace(error=error, others=tuple(parts[1:]))


def _pair(prompt: Any) -> tuple[str, str] | ValueError:
    if isinstance(prompt, (list, tuple)) and len(prompt) == 2 and all(isinstance(each, str) for each in prompt):
        return (prompt[0], prompt[1])
    return ValueError(f"score takes pairs of two strings, a query and a document, not {prompt!r:.150}")


def _error(row: FinishedRow) -> str | None:
    return row.error or next((seq.error for seq in row.sequences if seq.error is not None), None)


def _pooled(seq: EngineSequence) -> np.ndarray:
    """float32 [width], from the states of the sequence's steps."""
    assert seq.pooling is not None
    if seq.pooling.tokens == "mean":
        return sum(states[0] for states in seq.states) / np.float32(seq.num_prompt_tokens)
    return seq.states[0][0]


def _log_probability(seq: EngineSequence) -> np.float64:
    """The sum over the scored tokens; TokenNumbers says how their numbers are laid out."""
    numbers = np.frombuffer(bytes(seq.prompt_logprobs), np.int32).reshape(-1, 3)
    return numbers[:, 2].copy().view(np.float32).sum(dtype=np.float64)


def _normalized(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1; a row of zeros stays, as in torch.nn.functional.normalize."""
    lengths = np.sqrt(np.square(vectors).sum(-1, keepdims=True))
    return vectors / np.maximum(lengths, np.float32(1e-12))


def _softmax(numbers: np.ndarray) -> np.ndarray:
    exponentials = np.exp(numbers - numbers.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)
