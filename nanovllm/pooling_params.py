"""What one forward pass of a prompt is to return, instead of generated tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.accepted import ACCEPTED_POOLING, RENAMED_POOLING
from nanovllm.checks import boolean, integer, suggests_names
from nanovllm.sampling_params import SamplingParams

TASKS = ("embed", "token_embed", "classify", "reward", "score", "label")
POOLINGS = ("last", "mean", "cls")
RECIPES = ("qwen3-reranker",)
# The parameters that not every task takes, and the tasks that take them.
_ONLY_OF = {
    "normalize": tuple(task for task in TASKS if task != "label"),
    "pooling": ("embed", "score"),
    "dimensions": ("embed", "score"),
    "hidden_states_layers": ("embed", "token_embed"),
    "prompt_name": ("embed", "token_embed"),
    "truncate_prompt_tokens": tuple(task for task in TASKS if task != "label"),
    "labels": ("label",),
    "recipe": ("score",),
    "instruction": ("score",),
}


@suggests_names("parameter", {"layers": "hidden_states_layers"}, ACCEPTED_POOLING, RENAMED_POOLING)
@dataclass(frozen=True)
class PoolingParams:
    """What one row returns. Its prompt is computed once, and nothing is generated.

    Args:
        task: "embed": the final norm's hidden state, pooled over the prompt's tokens. "token_embed": the states of all
            tokens. "classify": the probability of each label of a …ForSequenceClassification model. "reward": the
            numbers of such a model's head. "score": how well a document fits a query; the prompt is a pair (query,
            document). "label": the probability of each of `labels` as the prompt's continuation. None is the method's
            task, or else "embed".
        pooling: which tokens' state is the embedding: "last", "mean" or "cls" (the first); None is what the
            checkpoint's sentence-transformers files say, or else "last".
        normalize: make embeddings of length 1, or probabilities of a head's numbers. None: embeddings as the
            checkpoint's sentence-transformers files say, or else of length 1; probabilities for "classify" and
            "score", as the checkpoint's config says, and plain numbers for "token_embed" and "reward".
        dimensions: keep this many leading numbers of an embedding, before it is normalized, for models that were
            trained for that (Matryoshka representation learning: Kusupati et al., 2022); None keeps all.
        hidden_states_layers: also return the states of these layers, pooled over the same tokens and not normalized. As
            in transformers, 0 is the embedding, i the output of the layer i, counted from 1, and the last one the
            final norm's; negative numbers count from the end. It needs tensor_parallel_size=1.
        prompt_name: put the text of this name before each prompt, which must be a string; the checkpoint's
            sentence-transformers files have such texts. None puts the checkpoint's default prompt there, if any.
        truncate_prompt_tokens: keep at most this many tokens of a prompt: the first ones, unless the tokenizer's
            truncation_side is "left". −1 is as many as the model and the checkpoint's sentence-transformers files
            allow. None makes an error row of a prompt that is too long.
        labels: for "label": at least two different strings or lists of token ids.
        recipe: for "score": how the pair becomes a prompt. "qwen3-reranker" is the published template of Qwen3-Reranker
            (Zhang et al., 2025), and without a classification head the score is the probability of "yes" against
            "no". None gives both texts to the tokenizer as a pair, or embeds each of them.
        instruction: the recipe's task description; None is the published one.

    Raises:
        TypeError, ValueError: a parameter of the wrong type or out of range, or one that the task does not take.
    """

    task: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    hidden_states_layers: tuple[int, ...] = ()
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    labels: tuple[Any, ...] = ()
    recipe: str | None = None
    instruction: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.pooling, str):
            self._set("pooling", self.pooling.lower())
        for name, values in (("task", (None, *TASKS)), ("pooling", (None, *POOLINGS)), ("recipe", (None, *RECIPES))):
            if getattr(self, name) not in values:
                known = ", ".join(map(repr, values))
                raise ValueError(f"{name} must be one of {known}, not {getattr(self, name)!r:.100}")
        if self.normalize is not None:
            boolean("normalize", self.normalize)
        if self.dimensions is not None:
            self._set("dimensions", integer("dimensions", self.dimensions, minimum=1))
        if self.truncate_prompt_tokens not in (None, -1):
            self._set("truncate_prompt_tokens", integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1))
        self._set("hidden_states_layers", _layers(self.hidden_states_layers))
        if self.task == "label" or not isinstance(self.labels, tuple) or self.labels:
            self._set("labels", _labels(self.labels))
        for name in ("instruction", "prompt_name"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise TypeError(f"{name} must be a string, not {getattr(self, name)!r:.100}")
        for name, tasks in _ONLY_OF.items():
            if getattr(self, name) not in (None, ()) and self.task not in (None, *tasks):
                raise ValueError(f"{name} is a parameter of {' and '.join(map(repr, tasks))}, not of {self.task!r}")
        if self.instruction is not None and self.recipe is None:
            raise ValueError("instruction needs a recipe, such as recipe='qwen3-reranker'")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def n(self) -> int:
        """How many requests of the engine a row takes at most."""
        return max(len(self.labels), 2 if self.task == "score" else 1)

    def clone(self) -> "PoolingParams":
        """vLLM's name of a copy; the parameters never change."""
        return self


def _layers(given: Any) -> tuple[int, ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"hidden_states_layers must be a list of integers, not {given!r:.100}")
    layers = tuple(integer("hidden_states_layers", layer) for layer in given)
    if len(set(layers)) < len(layers):
        raise ValueError(f"hidden_states_layers names a layer twice: {list(layers)}")
    return layers


def _labels(given: Any) -> tuple[Any, ...]:
    """Labels as strings or tuples of token ids."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise TypeError(f"labels must be a list of strings or of lists of token ids, not {given!r:.100}")
    labels = tuple(each if isinstance(each, str) else _label_ids(each) for each in given)
    if len(labels) < 2 or len(set(labels)) < len(labels) or not all(labels):
        raise ValueError(f"labels must be at least two different ones, none of them empty, not {list(labels)!r:.200}")
    return labels


def _label_ids(label: Any) -> tuple[int, ...]:
    label = label.tolist() if hasattr(label, "tolist") else label
    if not isinstance(label, (list, tuple)):
        raise TypeError(f"a label must be a string or a list of token ids, not {label!r:.100}")
    return tuple(integer("a label's token id", each) for each in label)


# The parameters of a row of any kind.
RowParams = SamplingParams | PoolingParams


def pooling_params(given: Any, task: str, num_prompts: int, **more: Any) -> list[PoolingParams]:
    """One PoolingParams per prompt, from one for all, from a list, from dicts of parameters, or from None.

    Args:
        task: the task of those that name none.
        more: parameters that precede those of `given`, unless they are None.

    Raises:
        TypeError, ValueError: `given` is something else, a parameter is wrong, or the task is another one.
    """
    more = {name: value for name, value in more.items() if value is not None}
    if not isinstance(given, (list, tuple)):
        return [_with_task(given, task, more)] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(f"{len(given)} pooling_params for {num_prompts} prompts; give one for all, or one per prompt")
    return [_with_task(each, task, more) for each in given]


def _with_task(given: Any, task: str, more: dict[str, Any]) -> PoolingParams:
    params = PoolingParams(**given) if isinstance(given, Mapping) else PoolingParams() if given is None else given
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params must be PoolingParams or a dict of parameters, not {type(given).__name__}")
    if params.task not in (None, task):
        raise ValueError(f"the pooling_params are for the task {params.task!r}, and this call is for {task!r}")
    return replace(params, task=task, **more)


def pooler_config(given: Any) -> dict[str, Any]:
    """The fields that an LLM's option `pooler_config` sets, from vLLM's PoolerConfig or a dict.

    Raises:
        TypeError, ValueError: it is something else, or sets a field that does not say how embeddings are made.
    """
    given = given if isinstance(given, Mapping) else getattr(given, "__dict__", None)
    if given is None:
        raise TypeError('pooler_config must be a dict such as {"pooling_type": "MEAN", "normalize": False}')
    meant = {**RENAMED_POOLING, "seq_pooling_type": "pooling"}
    fields = {meant.get(name, name): value for name, value in given.items() if value is not None}
    if unknown := fields.keys() - {"pooling", "normalize"}:
        raise ValueError(
            f"pooler_config takes pooling_type and normalize, as vLLM names them, not {min(unknown)!r}; if embed() "
            "takes that, give it there"
        )
    PoolingParams("embed", **fields)  # checks the values
    return {name: value.lower() if isinstance(value, str) else value for name, value in fields.items()}
