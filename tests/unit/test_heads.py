"""Heads: which one a checkpoint has, its labels, and what loading says about one that is missing or wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.family_factory import save_family_model
from support.model_factory import TINY, edit_config, read_tensors, save_model, write_tensors

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.layers.context import LayerContext
from nanovllm.layers.embed_head import ClassificationHead
from nanovllm.models.config import ModelConfig
from nanovllm.models.cost import StepWork, num_parameters, step_costs, step_weight_bytes, weight_bytes
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import check_update, expected_tensors, fill_dummy_weights, load_weights, update_weights
from nanovllm.models.read_config import load_model_config
from nanovllm.models.tensors import given_tensors
from nanovllm.ops.collectives import Parallel

CPU = torch.device("cpu")
FIELDS = {**TINY, "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
CLASSIFIER = "Qwen3ForSequenceClassification"


def make(config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    backend = TorchAttention(AttentionShape(1, 1, config.head_dim, dtype, CPU))
    return CausalLM(config, 64, backend, Parallel(), dtype, CPU)


def load(directory: Path, config: ModelConfig | None = None) -> CausalLM:
    model = make(config or load_model_config(directory))
    load_weights(model, directory)
    return model


def read(directory: Path, **changes) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**FIELDS, **changes}))
    return load_model_config(directory)


def error_of(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(directory)
    return str(error.value)


@pytest.fixture
def classifier(tmp_path) -> Path:
    """A checkpoint in bfloat16 with three labels."""
    model = save_family_model(tmp_path, "qwen3", {**TINY, "num_labels": 3}, architecture=CLASSIFIER)
    model.bfloat16().save_pretrained(tmp_path)
    return tmp_path


# Which head


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": None, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"id2label": {"1": "good", "0": "bad"}}, ("bad", "good")),
        ({"id2label": {str(index): f"l{index}" for index in (10, *range(10))}}, tuple(f"l{i}" for i in range(11))),
    ],
)
def test_labels_are_in_the_order_of_the_heads_rows(tmp_path, fields, labels):
    assert read(tmp_path, **fields).labels == labels


@pytest.mark.parametrize("given", [{}, {"0": "a", "2": "b"}, {"1": "a"}, ["a"], {"0": 5}, 5])
def test_labels_that_are_no_names_of_rows_are_refused(tmp_path, given):
    with pytest.raises(ValueError, match="id2label in config"):
        read(tmp_path, id2label=given)


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("num_labels", "fields", "activation"),
    [
        (1, {}, "sigmoid"),
        (2, {}, "softmax"),
        (2, {"problem_type": "single_label_classification"}, "softmax"),
        (1, {"problem_type": "regression"}, "none"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (1, {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, "none"),
        (1, {"sentence_transformers": {"version": "4.1.0"}}, "sigmoid"),
        (3, {"sbert_ce_default_activation_function": SIGMOID, "problem_type": "regression"}, "sigmoid"),
    ],
)
def test_what_turns_scores_into_probabilities(tmp_path, num_labels, fields, activation):
    assert read(tmp_path, num_labels=num_labels, **fields).score_activation == activation


def test_version_6_of_sentence_transformers_names_the_activation_in_a_file_of_its_own(tmp_path):
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": IDENTITY}))
    assert read(tmp_path, num_labels=1, sentence_transformers={"activation_fn": SIGMOID}).score_activation == "none"


@pytest.mark.parametrize(
    "fields",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
        {"sbert_ce_default_activation_function": ["my.Tanh"]},
        {"problem_type": "token_classification"},
    ],
)
def test_another_activation_is_refused_by_name(tmp_path, fields):
    with pytest.raises(ValueError, match=r"Tanh.*Sigmoid|token_classification.*regression"):
        read(tmp_path, **fields)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3ForTokenClassification", "Qwen3ForQuestionAnswering", "Qwen3ForRewardModel", "Qwen3ForProcessRewardModel",
        "LlamaForSequenceClassification", "GPT2ForSequenceClassification",
    ],
)  # fmt: skip
def test_another_head_is_refused_by_name(tmp_path, name):
    """The model_type of a LlamaForSequenceClassification is llama."""
    with pytest.raises(ValueError, match=f"{name}.*supported: .*Qwen3ForCausalLM.*…ForSequenceClassification"):
        read(tmp_path, architectures=[name])


def test_attention_in_both_directions_is_refused(tmp_path):
    """Some embedders have it, and transformers heeds it in every family."""
    assert read(tmp_path, is_causal=True).head == "score"
    with pytest.raises(ValueError, match="is_causal=False"):
        read(tmp_path, is_causal=False)


@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("stores_head", [False, True])
@pytest.mark.parametrize("is_embedder", [False, True])
def test_a_decoder_alone_has_no_head(tmp_path, name, is_tied, stores_head, is_embedder):
    """Embedders are often saved without the LM head but with its architecture. A lost LM head stays an error in other
    checkpoints."""
    save_model(tmp_path, tie_word_embeddings=is_tied)
    edit_config(tmp_path, architectures=[name])
    if not stores_head:
        tensors = read_tensors(tmp_path)
        write_tensors(tmp_path, {name: tensors[name] for name in tensors if name != "lm_head.weight"})
    if is_embedder:
        modules = [
            {"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("Transformer", "Pooling")
        ]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "Pooling").mkdir()
        (tmp_path / "Pooling/config.json").write_text("{}")
    is_alone = name == "Qwen3Model" or is_embedder
    has_head = is_tied or stores_head or not is_alone
    assert load_model_config(tmp_path).head == ("lm" if has_head else "none")
    if has_head and not is_tied and not stores_head:
        assert "lm_head.weight" in error_of(tmp_path)
    else:
        assert (load(tmp_path).lm_head is not None) == has_head


# Loading


def test_a_head_in_16_bits_is_float32(classifier):
    model = load(classifier)
    assert model.lm_head is None and model.score.weight.dtype == torch.float32
    assert torch.equal(model.score.weight, read_tensors(classifier)["score.weight"].float())
    states = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = states.double() @ model.score.weight.double().T
    torch.testing.assert_close(model.score(states), expected.float(), rtol=0, atol=0)


def test_a_heads_product_loses_no_digits():
    """In float32, the GPU library computes it in TF32 after a user's torch.set_float32_matmul_precision("high")."""
    head = ClassificationHead(1, 3, LayerContext(torch.float32, CPU))
    head.weight.fill_(1.0)
    assert head(torch.tensor([[2.0**30, 1.0, -(2.0**30)]])).item() == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("score.weight"), ("missing", "score.weight")),
        (lambda tensors: tensors.update({"score.weight": torch.ones(2, 32)}), ("score.weight", "[2, 32]", "[3, 32]")),
        (lambda tensors: tensors.update({"score.bias": torch.ones(3)}), ("score.bias", "no bias")),
        (lambda tensors: tensors.update({"score.0.weight": torch.ones(3, 32)}), ("score.0.weight", "score.weight")),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(61, 32)}), ("lm_head.weight", "LM head")),
    ],
    ids=["missing", "shape", "bias", "several layers", "two heads"],
)  # fmt: skip
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_is_missing_or_wrong_is_named(classifier, change, words, is_tied):
    edit_config(classifier, tie_word_embeddings=is_tied)
    tensors = read_tensors(classifier)
    change(tensors)
    write_tensors(classifier, tensors)
    message = error_of(classifier)
    assert all(word in message for word in words) and str(classifier) in message


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_an_lm_head_can_be_left_out(tmp_path, is_tied, name, caplog):
    """A tied model may store the embedding under the head's name. An update may hold the head too."""
    expected = save_model(tmp_path, tie_word_embeddings=is_tied).state_dict()
    tensors = read_tensors(tmp_path)
    if is_tied:
        embedding = tensors.pop("model.embed_tokens.weight")
        write_tensors(tmp_path, {**tensors, name: embedding})
    with caplog.at_level("INFO"):
        model = load(tmp_path, load_model_config(tmp_path).without_lm_head())
    assert ("skipped 1 tensors" in caplog.text) == (not is_tied)
    assert model.lm_head is None and "lm_head.weight" not in expected_tensors(model)
    assert torch.equal(model.model.embed_tokens.weight, expected["model.embed_tokens.weight"])
    given = check_update(model, given_tensors([("lm_head.weight", expected["lm_head.weight"] + 1)]))
    update_weights(model, given)
    changed = torch.equal(model.model.embed_tokens.weight, expected["model.embed_tokens.weight"] + 1)
    assert changed == is_tied


def test_a_classification_head_stays_without_lm_head(classifier):
    config = load_model_config(classifier)
    assert config.without_lm_head() == config


def test_an_update_replaces_the_head(classifier):
    model, new = load(classifier), torch.randn(3, 32)
    update_weights(model, check_update(model, given_tensors([("score.weight", new)])))
    assert torch.equal(model.score.weight, new)
    with pytest.raises(ValueError, match=r"score.weight.*\[2, 32\]"):
        check_update(model, given_tensors([("score.weight", new[:2])]))


def test_dummy_weights_fill_the_head(classifier):
    model = make(load_model_config(classifier), torch.bfloat16)
    model.score.weight.fill_(float("nan"))
    fill_dummy_weights(model, 0)
    assert 0 < model.score.weight.std() < 0.05


# Costs


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "score", "none"])
def test_costs_count_the_head_that_there_is(tmp_path, head, is_tied):
    """Each rank holds a classification head whole, in float32."""
    config = read(tmp_path, num_labels=3, tie_word_embeddings=is_tied)
    config = replace(config, head=head, labels=config.labels * (head == "score"))
    model = make(config, torch.bfloat16)
    weights = {id(weight): weight for weight in model.parameters() if weight.dim() > 1}
    weights = [weight for weight in weights.values() if weight.shape[1] != 16]  # without norms of heads
    assert num_parameters(config) == sum(weight.numel() for weight in weights)
    total = sum(weight.nbytes for weight in weights)
    own = 3 * 32 * 4 * (head == "score")
    assert weight_bytes(config, 2) == total and weight_bytes(config, 2, 2) == (total - own) // 2 + own
    read_bytes = {"lm": 61 * 32 * 2, "score": own, "none": 0}[head]
    bare = replace(config, head="none", labels=())
    assert step_weight_bytes(config, 2, 5) == step_weight_bytes(bare, 2, 5) + read_bytes
    [cost], [bare_cost] = (step_costs(each, 2, 2, [StepWork(5, 2, 0, 0, 0)]) for each in (config, bare))
    assert cost.product_flop - bare_cost.product_flop == 2 * 2 * 32 * {"lm": 61, "score": 3, "none": 0}[head]
