"""What rows of one forward pass should return, computed plainly with transformers."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from transformers import AutoTokenizer

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.pooling_params import PoolingParams
from support.family_factory import save_family_model
from support.model_factory import TINY


@lru_cache(maxsize=20)
@torch.inference_mode()
def states_of(model: Any, token_ids: tuple[int, ...]) -> list[torch.Tensor]:
    """The hidden states [num_tokens, hidden_size] of the embedding, each layer and the final norm, in the model's
    dtype."""
    found = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [states[0] for states in found]


@torch.inference_mode()
def log_probability(model: Any, context: list[int], label: list[int]) -> float:
    """The sum over the label's tokens, teacher-forced."""
    logits = model(input_ids=torch.tensor([context + label])).logits[0, len(context) - 1 : -1]
    return float(logits.double().log_softmax(-1)[range(len(label)), label].sum())


def pooled(states: torch.Tensor, tokens: str | None) -> torch.Tensor:
    return {"mean": states.mean(0), "cls": states[0]}.get(tokens, states[-1])


def expected_arrays(model: Any, token_ids: list[int], params: PoolingParams) -> dict[str, np.ndarray]:
    """The arrays of the output of a row that embeds, returns its tokens' states or chooses a label, by field."""
    if params.task == "label":
        totals = torch.tensor([log_probability(model, token_ids, list(label)) for label in params.labels])
        return {"data": totals.softmax(0).numpy(), "logprobs": totals.numpy()}
    states = states_of(model, tuple(token_ids))
    of_layers = [states[layer] for layer in params.hidden_states_layers]
    if params.task == "token_embed":
        array = F.normalize(states[-1], dim=1) if params.normalize else states[-1]
    else:
        array = pooled(states[-1], params.pooling)[: params.dimensions]
        array = array if params.normalize is False else F.normalize(array, dim=0)
        of_layers = [pooled(each, params.pooling) for each in of_layers]
    return {"data": array.numpy()} | ({"hidden_states": torch.stack(of_layers).numpy()} if of_layers else {})


def assert_within(found: np.ndarray, exact: np.ndarray, tolerance: float = 1e-5) -> None:
    """Asserts that they differ by at most `tolerance`, relative to the largest number of `exact` if that is above 1, as
    in hidden states and the log-probabilities of labels."""
    assert found.dtype == np.float32 and found.shape == exact.shape
    assert abs(found - exact).max() <= tolerance * max(abs(exact).max(), 1)


def save_classifier(directory: Path, num_labels: int = 3, **fields: Any) -> Any:
    """A classifier with a tokenizer, in float64."""
    options = {**TINY, "vocab_size": 280, "num_labels": num_labels, **fields}
    model = save_family_model(directory, "qwen3", options, architecture="Qwen3ForSequenceClassification")
    save_tokenizer(directory)
    return model.double()


def save_tokenizer(directory: Path, *tokens: str) -> Any:
    """Writes a tokenizer of bytes that also has these words as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.add_tokens([AddedToken(token, single_word=True) for token in tokens])
    tokenizer.save_pretrained(directory)
    return tokenizer
