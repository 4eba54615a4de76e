"""The outputs of rows that are computed in one forward pass."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm.outputs import RequestMetrics


@dataclass(frozen=True, slots=True, eq=False)
class PooledOutput:
    """The numbers of one row, in vLLM's shape: lists instead of arrays. A field of another task is None.

    `data` is what the task returns: the embedding, the states of all tokens, probabilities, or a head's numbers.
    """

    task: str
    data: np.ndarray | None = None

    @property
    def embedding(self) -> list[float] | None:
        return self.data.tolist() if self.data is not None and self.task == "embed" else None

    @property
    def hidden_size(self) -> int:
        return 0 if self.data is None else self.data.shape[-1]

    @property
    def probs(self) -> list[float] | None:
        return self.data.tolist() if self.data is not None and self.task in ("classify", "label") else None

    @property
    def num_classes(self) -> int:
        return len(self.probs or ())

    @property
    def score(self) -> float | None:
        if self.data is None or self.task not in ("score", "reward") or self.data.size != 1:
            return None
        return float(self.data.reshape(-1)[0])


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput:
    """The output of one row that was computed in one forward pass.

    Args:
        request_id: the request's number, as a string. The numbers go on from call to call.
        prompt: the prompt's text; None for a prompt of token ids.
        prompt_token_ids: the prompt's tokens; empty if it could not be tokenized. For a query and a document that
            are embedded: those of the query.
        outputs: the numbers in vLLM's shape.
        num_cached_tokens: how many of the prompts' tokens the prefix cache served.
        error: why the row failed, else None. Its numbers are None then.
        labels: the labels of `probs`.
        logprobs: float32 [num_labels], for the task "label": the log-probability of each whole label after the prompt.
        hidden_states: float32 [num_layers, hidden_size], or [num_layers, num_tokens, hidden_size] for "token_embed":
            the states of `hidden_states_layers`, if they were asked for.
        weight_version: how many times `LLM.update_weights` had changed the weights that computed the output.
        prompt_index: the row's number in its call.
        metrics: the request's times; None if it could not run. There is no first token.

    Beside them, `embedding` is the float32 array [dimensions] of "embed", `data` the array of any task, `probs` float32
    [num_labels], `label` the most probable label (the first of equals), and `score` a float.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PooledOutput
    num_cached_tokens: int = 0
    error: str | None = None
    labels: tuple[Any, ...] = ()
    logprobs: np.ndarray | None = None
    hidden_states: np.ndarray | None = None
    weight_version: int = 0
    prompt_index: int = 0
    metrics: RequestMetrics | None = None

    @property
    def data(self) -> np.ndarray | None:
        return self.outputs.data

    @property
    def embedding(self) -> np.ndarray | None:
        return self.outputs.data if self.outputs.task == "embed" else None

    @property
    def probs(self) -> np.ndarray | None:
        return self.outputs.data if self.outputs.task in ("classify", "label") else None

    @property
    def label(self) -> Any:
        probs = self.probs
        return None if probs is None else self.labels[int(probs.argmax())]

    @property
    def score(self) -> float | None:
        return self.outputs.score

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(type(self), name):
            raise KeyError(f"{name!r} is not a field of PoolingRequestOutput")
        return getattr(self, name)
