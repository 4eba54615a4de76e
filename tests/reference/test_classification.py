"""Scores of classification heads, and hidden states of decoders without a head, beside transformers in float32."""

import copy
import random
from pathlib import Path

import pytest
import torch
import transformers
from support.family_factory import FAMILIES, WRAPPED, save_family_model
from support.thread_ranks import hidden_states_of, on_ranks

from nanovllm.models.read_config import load_model_config

ENDINGS = ("ForSequenceClassification", "TextForSequenceClassification")


def classifiers() -> list[tuple[str, str]]:
    """(family, transformers' class with a classification head) of all families that have one."""
    found = []
    for family, (_, name, *_) in {**FAMILIES, **WRAPPED}.items():
        base = name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        names = [base + ending for ending in ENDINGS[: 1 if family in WRAPPED else 2]]
        if classes := [each for each in names if hasattr(transformers, each)]:
            found.append((family, classes[-1]))
    return found


def options_of(family: str, **more) -> dict:
    return ({**FAMILIES, **WRAPPED}[family][2])(random.Random(family)) | more


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to 40 tokens. No token is the first or one of the last ids, which are padding and placeholders."""
    rng = random.Random(0)
    return [[rng.randrange(1, vocab_size - 4) for _ in range(length)] for length in (1, 9, 40)]


@torch.inference_mode()
def scores_of(directory: Path, prompt: list[int], **ranks) -> torch.Tensor:
    model, hidden_states = hidden_states_of(directory, prompt, **ranks)
    return model.score(hidden_states[-1:])[0]


@pytest.mark.parametrize(("family", "name"), classifiers(), ids=str)
def test_scores_equal_those_of_transformers(tmp_path, family, name):
    """Any class of transformers whose decoder is one of ours loads by a rule on its name. The exact scores are those of
    transformers in float64; our error is at most 1e-5 above that of transformers in float32."""
    num_labels = 2 if family in WRAPPED else 3
    options = options_of(family, **({} if family in WRAPPED else {"num_labels": num_labels}))
    model = save_family_model(tmp_path, family, options, architecture=name)
    config = load_model_config(tmp_path)
    assert (config.head, len(config.labels), config.score_activation) == ("score", num_labels, "softmax")
    prompts = prompts_of(options["vocab_size"])
    ours = torch.stack([scores_of(tmp_path, prompt) for prompt in prompts])
    with torch.inference_mode():
        theirs, exact = (
            torch.stack([each(torch.tensor([prompt])).logits[0].double() for prompt in prompts])
            for each in (model, copy.deepcopy(model).double())
        )
    assert ours.dtype == torch.float32 and exact.std() > 0.3
    assert ((ours - exact).abs() <= (theirs - exact).abs() + 1e-5).all()


def test_two_ranks_have_the_same_scores(tmp_path):
    """Each of them holds the whole head."""
    options = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_labels": 1,
    }  # fmt: skip
    save_family_model(tmp_path, "llama", options, architecture="LlamaForSequenceClassification")
    prompt = prompts_of(61)[1]
    scores = on_ranks(2, lambda rank: scores_of(tmp_path, prompt, parallel=rank))
    torch.testing.assert_close(scores[0], scores_of(tmp_path, prompt), rtol=1e-5, atol=1e-5)
    assert torch.equal(scores[0], scores[1])


def test_hidden_states_of_a_decoder_alone_equal_those_of_transformers(tmp_path):
    """It has no LM head, neither in the checkpoint nor in the model."""
    options = options_of("mistral", tie_word_embeddings=False)
    save_family_model(tmp_path, "mistral", options, architecture="MistralModel")
    assert load_model_config(tmp_path).head == "none"
    theirs = transformers.AutoModel.from_pretrained(tmp_path)
    for prompt in prompts_of(options["vocab_size"]):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(hidden_states_of(tmp_path, prompt)[1], expected, rtol=1e-5, atol=1e-5)
