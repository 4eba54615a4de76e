"""Every field of config.json is understood or refused by name; nothing is guessed."""

import json
import math
import os
import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from support.model_factory import TINY, save_model
from transformers import AutoConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from nanovllm import LLM
from nanovllm.layers.rope_config import RopeConfig
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.families import FAMILIES
from nanovllm.models.read_config import ACTIVATIONS, load_model_config
from nanovllm.models.wrappers import WRAPPERS
from nanovllm.ops import act_and_mul

FIELDS = {**TINY, "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6}


def read(directory: Path, remove: str = "", **changes) -> ModelConfig:
    """The config of FIELDS with `changes`."""
    fields = {name: value for name, value in {**FIELDS, **changes}.items() if name != remove}
    (directory / "config.json").write_text(json.dumps(fields))
    return load_model_config(directory)


def rope_of(directory: Path, **changes) -> RopeConfig:
    """The rotary embedding of the first layer."""
    return read(directory, **changes).layers[0].rope


def error_of(directory: Path, remove: str = "", **changes) -> str:
    with pytest.raises(ValueError) as error:
        read(directory, remove, **changes)
    return str(error.value)


# Configs that are understood


def test_what_transformers_writes_is_what_is_read(tmp_path):
    """Every number of the architecture, through save_pretrained."""
    theirs = save_model(tmp_path, rope={"rope_type": "default", "rope_theta": 77.0}, attention_bias=True).config
    ours = load_model_config(tmp_path)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "hidden_act",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.qkv_bias and ours.o_bias and not ours.mlp_bias
    assert ours.architecture == "Qwen3ForCausalLM" and ours.dtype == "float32"
    assert ours.max_position == theirs.max_position_embeddings and ours.layers[0].rope.theta == 77.0


def test_fields_that_transformers_has_defaults_for_may_be_absent(tmp_path):
    """null is absent: transformers 4 writes rope_scaling: null and sliding_window: null."""
    absent = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "mlp_bias": False, "tie_word_embeddings": False}
    for name, default in absent.items():
        for config in (read(tmp_path, remove=name), read(tmp_path, **{name: None})):
            assert getattr(config, name) == default
    config = read(tmp_path, rope_scaling=None, sliding_window=None, layer_types=None, quantization_config=None)
    assert config.layers[0] == config.layers[1] == LayerConfig(0, RopeConfig(10000.0, 16))
    assert read(tmp_path, remove="head_dim").head_dim == Qwen3Config().head_dim == 128


def test_both_layouts_of_rope_are_read(tmp_path):
    """Reading only one of them leaves the other at a theta of 10,000, and the model answers nonsense."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "truncate": False}
    old = rope_of(tmp_path, rope_theta=1e6, rope_scaling={"rope_type": "yarn", **yarn})
    oldest = rope_of(tmp_path, rope_theta=1e6, rope_scaling={"type": "yarn", **yarn})
    new = rope_of(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **yarn})
    assert old == oldest == new
    assert (new.kind, new.theta, new.factor, new.original_max_position) == ("yarn", 1e6, 4.0, 128)
    assert (new.beta_fast, new.beta_slow, new.truncate) == (16.0, 1.0, False)
    assert rope_of(tmp_path, rope_theta=5000000).theta == 5e6
    assert rope_of(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e6}, rope_theta=1.5).theta == 5e6


@pytest.mark.parametrize(
    ("max_position_embeddings", "scaling", "expected"),
    [
        (512, {"rope_type": "default"}, 512),
        (512, {"rope_type": "linear", "factor": 4.0}, 2048),
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (512, {"rope_type": "yarn", "factor": 1.0}, 512),
    ],
)
def test_scaled_rope_stretches_the_longest_context(tmp_path, max_position_embeddings, scaling, expected):
    """Some configs give the length before stretching, others the length after it."""
    config = read(tmp_path, max_position_embeddings=max_position_embeddings, rope_scaling=scaling)
    assert config.max_position == expected


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [
        ([3, 5], 7, {3, 5}), (3, 7, {3}), (None, 7, {7}), (None, [7, 8], {7, 8}), (None, None, set()),
        ([], [7], {7}), (0, 7, {0}),
    ],
)  # fmt: skip
def test_every_end_token_is_found(tmp_path, in_generation, in_config, expected):
    """Qwen3 has two. Those of generation_config.json take precedence over those of config.json."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation, "top_k": 20}))
    config = read(tmp_path, eos_token_id=in_config)
    assert config.eos_token_ids == expected and config.generation["top_k"] == 20


def test_a_model_without_generation_config_recommends_nothing(tmp_path):
    assert read(tmp_path).generation == {}


GRANITE4 = {"num_local_experts": 0, "layer_types": ["attention", "attention"]}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_without_architectures_the_type_decides(tmp_path, architecture):
    """As in transformers. A decoder that was saved alone has its own architecture."""
    model_type = FAMILIES[architecture].model_type
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == architecture
    fields = {"model_type": model_type, "sliding_window": 5, "num_experts_per_tok": 1, "num_experts": 4}
    if model_type == "granitemoehybrid":
        fields |= GRANITE4
    if FAMILIES[architecture].full_attention_interval:
        fields["layer_types"] = ["linear_attention", "full_attention"]
    decoder = MODEL_MAPPING_NAMES[model_type]
    for given in (None, [], [decoder]):
        assert read(tmp_path, **fields, architectures=given).architecture == architecture
    for given in (["Phi4ForSequenceClassification"], ["GPT2LMHeadModel"], ["T5ForConditionalGeneration", decoder]):
        assert str(given) in error_of(tmp_path, **fields, architectures=given)


YARN_OF_128 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BY_KIND = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 3.0}}
OF_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": None}
SIDE_BY_SIDE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"dtype": "float16", "torch_dtype": "bfloat16"}),
    ("llama", {"torch_dtype": "bfloat16", "dtype": "float16"}),
    ("llama", {"torch_dtype": "bfloat16", "dtype": None}),
    ("qwen3_moe", {"num_experts": 4, "num_local_experts": 6}),
    ("qwen3_moe", {"num_local_experts": 6}),
    ("qwen2_moe", {"num_experts": 4, "num_local_experts": 6}),
    ("olmoe", {"num_experts": 4, "num_local_experts": 6}),
    ("mixtral", {"num_experts": 4, "num_local_experts": 6}),
    ("mixtral", {"num_experts": 4}),
    ("mixtral", {"num_local_experts": 6}),
    ("mixtral", {"rope_parameters": {"rope_type": "default"}}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 7.0}),
    ("qwen3", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0}),
    ("qwen3", {"rope_parameters": {**YARN_OF_128, "rope_theta": 5.0}, "rope_theta": 5.0, "rope_scaling": YARN_OF_128}),
    ("qwen3", {"rope_parameters": {**YARN_OF_128, "rope_theta": 5.0}, "rope_theta": 7.0, "rope_scaling": {}}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": YARN_OF_128, "original_max_position_embeddings": 64}),
    ("phi3", {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 128},
              "original_max_position_embeddings": 64}),
    ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.5}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("gemma3_text", {"rope_parameters": BY_KIND, "rope_theta": 7.0, "rope_local_base_freq": 9.0}),
    ("gemma3_text", {"rope_parameters": {"full_attention": {}}, "rope_theta": 7.0, "rope_local_base_freq": 9.0}),
    ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": ["full_attention", "full_attention"]}),
    ("olmo3", {"rope_scaling": YARN_OF_128, "rope_theta": 5e5}),
    ("olmo3", {"rope_parameters": BY_KIND, "rope_theta": 7.0}),
    ("olmo3", {"num_hidden_layers": 8}),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("ministral", {"layer_types": ["full_attention", "sliding_attention"], "rope_theta": 7.0}),
    ("ministral", {}),
    ("ministral3", {}),
    ("ministral3", {"rope_parameters": {**YARN_OF_128, "rope_theta": 5.0, "llama_4_scaling_beta": 0.5}}),
    ("smollm3", {"use_sliding_window": True, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1, 0]}),
    ("smollm3", {"num_hidden_layers": 9}),
    ("smollm3", {"num_hidden_layers": 9, "no_rope_layer_interval": 2, "rope_theta": 7.0}),
    ("smollm3", {"no_rope_layers": [0, 1], "no_rope_layer_interval": 1}),
    ("qwen3_5_text", {**OF_FOUR_LAYERS, "rope_theta": 7.0}),
    ("qwen3_5_text", {**OF_FOUR_LAYERS, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
    ("qwen3_5_text", {**OF_FOUR_LAYERS, "rope_parameters": {"partial_rotary_factor": 0.5},
                      "partial_rotary_factor": 0.75}),
    ("qwen3_5_text", {**OF_FOUR_LAYERS, "rope_parameters": {**YARN_OF_128, "rope_theta": 5.0}}),
    ("qwen3_5_moe_text", {"full_attention_interval": 2, "layer_types": None, "num_experts": 4}),
    ("qwen3_5_moe_text", {"full_attention_interval": 2, "layer_types": ["full_attention", "linear_attention"]}),
    ("qwen3_next", {**OF_FOUR_LAYERS, "partial_rotary_factor": 0.5, "num_experts": 4, "num_local_experts": 6}),
    ("seed_oss", {"rope_theta": 7.0}),
    ("granite", {"rope_theta": 7.0}),
    ("granitemoehybrid", {**GRANITE4, "position_embedding_type": "rope", "rope_theta": 7.0, "mamba_n_heads": 2}),
    ("gemma3_text", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_config_of_sizes_alone_means_what_it_means_in_transformers(tmp_path, architecture):
    """`save_pretrained` writes every field, so tests of whole models never read a family's defaults."""
    fields: dict[str, Any] = {
        "model_type": FAMILIES[architecture].model_type, "hidden_size": 256, "intermediate_size": 96,
        "num_hidden_layers": 6, "num_attention_heads": 32, "vocab_size": 100,
    }  # fmt: skip
    if FAMILIES[architecture].num_experts_names:
        fields |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    if architecture == "GraniteMoeHybridForCausalLM":
        fields |= {"layer_types": ["attention"] * 6, "num_local_experts": 0}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}), encoding="utf-8")
    ours, theirs = load_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    names = ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.hidden_act == (getattr(theirs, "hidden_activation", None) or theirs.hidden_act)
    window, ropes = getattr(theirs, "sliding_window", None) or 0, theirs.rope_parameters
    kinds = getattr(theirs, "layer_types", None) or (["sliding_attention"] * 6 if window else ["full_attention"] * 6)
    for layer, kind in zip(ours.layers, kinds, strict=True):
        assert layer.window == (window if kind == "sliding_attention" else 0)
        assert layer.is_recurrent == (kind == "linear_attention")
        rope = ropes.get(kind, ropes)
        if layer.rope.kind != "none":
            assert (layer.rope.theta, layer.rope.kind) == (rope["rope_theta"], rope["rope_type"])
            assert layer.rope.rotary_dim == int(ours.head_dim * rope.get("partial_rotary_factor", 1))
    if ours.delta_net is not None:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        assert astuple(ours.delta_net) == tuple(getattr(theirs, f"linear_{name}") for name in names)


@pytest.mark.parametrize(("model_type", "changes"), SIDE_BY_SIDE, ids=str)
def test_of_keys_side_by_side_the_one_counts_that_counts_in_transformers(tmp_path, model_type, changes):
    """Old and new spellings, in either order. The number of experts once came from the other key."""
    fields = {"head_dim": 8, "model_type": model_type, "pad_token_id": 0, "sliding_window": 5, "num_experts_per_tok": 1}
    ours = read(tmp_path, remove="architectures", **{**fields, **changes})
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert ours.dtype == (theirs.dtype and str(theirs.dtype).removeprefix("torch."))
    if ours.experts is not None:
        assert ours.experts.num_experts == theirs.num_experts
    for index, layer in enumerate(ours.layers):
        rope = theirs.rope_parameters
        kind = getattr(theirs, "layer_types", {index: None})[index]
        assert layer.is_recurrent == (kind == "linear_attention")
        if model_type in ("gemma3_text", "olmo3", "ministral", "smollm3"):
            assert (layer.window > 0) == (kind == "sliding_attention")
        if model_type in ("gemma3_text", "olmo3"):
            rope = rope[kind]
        rotates = model_type != "smollm3" or theirs.no_rope_layers[index] == 1
        assert (layer.rope.kind != "none") == rotates
        if not rotates:
            continue
        assert (layer.rope.kind, layer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert layer.rope.rotary_dim == int(8 * rope.get("partial_rotary_factor", 1))
        if layer.rope.kind != "default":
            original = rope.get("original_max_position_embeddings", 512)
            factor = rope.get("factor", 512 / original)
            assert (layer.rope.original_max_position, layer.rope.factor) == (original, factor)
            assert layer.rope.llama_4_scaling_beta == rope.get("llama_4_scaling_beta", 0)


# Configs that are refused


@pytest.mark.parametrize(
    "architectures",
    [["GPT2LMHeadModel"], ["Llama4ForConditionalGeneration"], [], None, "Qwen3ForCausalLM", 5, {"a": 1}, [5]],
)
def test_an_unknown_architecture_is_named_beside_those_there_are(tmp_path, architectures):
    """Running it as Qwen3 would answer nonsense."""
    message = error_of(tmp_path, architectures=architectures, model_type="gpt2")
    if not architectures:
        assert "has no architectures, and model_type 'gpt2'; supported: " in message and "Qwen3ForCausalLM" in message
        assert "has no architectures, and model_type None; " in error_of(tmp_path, architectures=architectures)
    elif isinstance(architectures, list):
        assert all(name in message for name in (*FAMILIES, *WRAPPERS)) and str(architectures or []) in message
    else:
        assert "architectures" in message and repr(architectures) in message


COUNTS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("name", COUNTS)
def test_a_missing_number_is_named(tmp_path, name):
    """A default value would make another model."""
    assert name in error_of(tmp_path, remove=name)
    assert name in error_of(tmp_path, **{name: None})


@pytest.mark.parametrize("name", [*COUNTS, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -4, 1.5, 16.0, "16", True, [16], {"a": 16}], ids=repr)
def test_a_count_must_be_a_positive_integer(tmp_path, name, value):
    message = error_of(tmp_path, **{name: value})
    assert name in message and repr(value) in message


WRONG: list[tuple[str, Any]] = [
    *(("rms_norm_eps", value) for value in ("1e-6", [], True, -1e-6, 0, math.nan, math.inf)),
    *((name, value) for name in ("attention_bias", "tie_word_embeddings") for value in ("false", 0, 1, [])),
    *(("rope_theta", value) for value in ("10000", 0, -1.0, True, [1e6], math.nan, math.inf)),
    *(("layer_types", value) for value in (5, "full_attention", {"0": "full_attention"})),
    *(("eos_token_id", value) for value in ("3", 1.5, [1, "2"], [[1]], {"a": 1}, True, [None])),
    *(("rope_scaling", value) for value in (5, [1], "yarn", True)),
    *(("rope_parameters", value) for value in (5, [1], "yarn", True)),
    # A rotary embedding for each kind of layer, as in models with sliding windows.
    ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 5e6}}),
    ("hidden_act", "gelu"),
    ("hidden_act", 5),
    ("use_sliding_window", 1),
    ("layer_types", ["full_attention", "sliding_attention"]),  # without use_sliding_window
    ("layer_types", ["chunked_attention", "full_attention"]),
    ("layer_types", ["full_attention"]),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("use_bidirectional_attention", True),
    *(("mlp_bias", value) for value in ("false", True)),
    *(("query_pre_attn_scalar", value) for value in (0, "256", 5e-324)),
    *((name, 10**400) for name in ("rope_theta", "rms_norm_eps", "vocab_size", "query_pre_attn_scalar")),
    *((name, 10**9) for name in ("num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size")),
    *(("dtype", value) for value in (5, [1])),
    ("rope_theta", 1e-300),
    ("layer_types", ["full_attention", {}]),
    ("quantization_config", {"quant_method": "fp8"}),
    ("quantization_config", {"quant_method": "awq", "bits": 4}),
    *(("partial_rotary_factor", value) for value in (0.0, 1.5, 0.5, "half")),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value}" for name, value in WRONG])
def test_what_is_wrong_or_not_implemented_is_named(tmp_path, name, value):
    """bool("false") is True, float("nan") passes every comparison, and an unknown option changes the model."""
    assert name in error_of(tmp_path, **{name: value})


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}, "low_freq_factor"),
        ({"rope_type": "proportional", "factor": 2.0}, "proportional"),
        ({"type": "longrope"}, "short_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}, "long_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 7 + [0], "long_factor": [1.0] * 8}, "short_factor"),
        ({"type": "su", "short_factor": 5, "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_type": None}, "None"),
        ({"rope_type": ["yarn"]}, "yarn"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "yarn", "factor": math.nan}, "factor"),
        ({"rope_type": "yarn", "factor": math.inf}, "factor"),
        ({**YARN, "original_max_position_embeddings": "64"}, "original_max_position_embeddings"),
        ({**YARN, "original_max_position_embeddings": -64}, "original_max_position_embeddings"),
        ({**YARN, "beta_fast": "32"}, "beta_fast"),
        ({**YARN, "beta_slow": -1}, "beta_slow"),
        ({**YARN, "attention_factor": [1]}, "attention_factor"),
        ({**YARN, "mscale": "x"}, "mscale"),
        ({**YARN, "truncate": "no"}, "truncate"),
        ({**YARN, "rope_theta": "x"}, "rope_theta"),
        ({**YARN, "partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta"),
        ({**YARN, "factor": 10**400}, "factor"),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_a_rope_that_is_not_understood_is_named(tmp_path, layout, rope, named):
    """Falling back to the default rotary embedding is silent until the context is long."""
    assert named in error_of(tmp_path, **{layout: rope})


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "named"),
    [
        (4, 3, 16, ("4", "3", "num_key_value_heads")),
        (4, 8, 16, ("4", "8", "num_key_value_heads")),
        (4, 2, 15, ("15", "head_dim")),
    ],
)
def test_heads_that_do_not_divide_are_named(tmp_path, num_heads, num_kv_heads, head_dim, named):
    message = error_of(tmp_path, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim)
    assert all(part in message for part in named)


QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 3, "num_experts_per_tok": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False .* models with attn_output_gate=True are"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' .* models with output_gate_type=swish are"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' .* models with mamba_ssm_dtype=float32 are"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh' .* models with hidden_act=silu are"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 is not a multiple of linear_num_key_heads=16"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim in config.json must be an integer from 1"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim in config.json must be an integer"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer .* full attention; only models with such a layer"),
        ({"layer_types": None, "num_hidden_layers": 3}, "no layer .* full attention; .* full_attention_interval"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval in config.json must be"),
        ({"layer_types": ["sliding_attention", *["full_attention"] * 3]}, "must say full_attention or linear_"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "for each of the 4 layers"),
        ({"use_sliding_window": True, "sliding_window": 5}, "use_sliding_window=True .* is not supported"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 5.0}}, "rope type 'mrope' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers="),
    ],
    ids=str,
)  # fmt: skip
def test_what_qwen3_5_does_not_have_is_named(tmp_path, changes, message):
    """A missing gate, a state in 16 bits or another activation would be another model. A model without attention has
    no keys, and the engine counts blocks of keys."""
    for architecture in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        fields = {**QWEN3_5, "architectures": [architecture], **changes}
        assert re.search(message, error_of(tmp_path, **fields))


def test_fields_of_qwen3_5_are_refused_elsewhere(tmp_path):
    for changes in ({"attn_output_gate": True}, {"full_attention_interval": 4}):
        assert f"{next(iter(changes))}=" in error_of(tmp_path, **changes)
    assert "layer_types" in error_of(tmp_path, layer_types=["linear_attention", "full_attention"])


def test_sizes_that_divide_a_delta_net_are_named(tmp_path):
    """Its key heads are divided, each with the value heads that share it."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
    config = read(tmp_path, **{**QWEN3_5, **heads, "linear_num_key_heads": 6, "linear_num_value_heads": 24})
    config.check_parallel_size(2)
    with pytest.raises(ValueError) as error:
        config.check_parallel_size(4)
    assert "8 attention heads, 6 key heads of DeltaNets, 2 key/value heads" in str(error.value)
    assert str(error.value).endswith("sizes that work: 1, 2")


NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


@pytest.mark.parametrize("file_name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe\x00", b"<html>", NESTED], ids=lambda c: c[:9]
)
def test_a_file_that_is_no_json_object_is_named(tmp_path, file_name, content):
    """It may be an error page of a proxy, or a download that stopped."""
    read(tmp_path)
    (tmp_path / file_name).write_bytes(content)
    with pytest.raises(ValueError, match=file_name):
        load_model_config(tmp_path)


@pytest.mark.parametrize("architectures", [[[]], [{}], ["x" * 10**6]], ids=["list", "dict", "long"])
def test_an_architecture_of_any_kind_is_refused_briefly(tmp_path, architectures):
    message = error_of(tmp_path, architectures=architectures)
    assert "architecture" in message and len(message) < 1000


@pytest.mark.parametrize("file_name", ["config.json", "generation_config.json"])
def test_a_pipe_is_no_config(tmp_path, file_name):
    """Opening a pipe waits for ever, unless another process writes into it."""
    read(tmp_path)
    (tmp_path / file_name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file_name)
    with pytest.raises(ValueError, match=f"{file_name} is not a regular file"):
        load_model_config(tmp_path)


def test_code_of_the_models_own_is_refused_by_name(tmp_path):
    message = error_of(tmp_path, architectures=["MyLM"], auto_map={"AutoModelForCausalLM": "modeling.MyLM"})
    assert "auto_map" in message and "never run" in message


def test_the_activations_of_configs_are_those_of_the_kernel():
    assert set(ACTIVATIONS) == set(act_and_mul.ACTIVATIONS)


def test_llama3_and_longrope_do_not_stretch_what_the_config_says(tmp_path):
    """Llama 3.2 names 131,072 tokens, which its factor of 32 times 8,192 would exceed."""
    llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**llama3, "original_max_position_embeddings": 8192}
    config = read(tmp_path, max_position_embeddings=131072, rope_scaling=rope)
    assert config.max_position == config.usual_max_position == 131072
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = read(
        tmp_path, max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", **factors},
    )  # fmt: skip
    assert (config.max_position, config.usual_max_position) == (131072, 4096)
    assert config.layers[0].rope.factor == 32


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Qwen2ForCausalLM", {"query_pre_attn_scalar": 7}),
        ("MistralForCausalLM", {"partial_rotary_factor": 0.5}),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}}),
        ("LlamaForCausalLM", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("MistralForCausalLM", {"attention_bias": True}),
        ("Qwen3ForCausalLM", {"mlp_bias": True}),
        ("MixtralForCausalLM", {"num_local_experts": 4, "moe_intermediate_size": 9}),
        ("MixtralForCausalLM", {"decoder_sparse_step": 2}),
        ("MixtralForCausalLM", {"norm_topk_prob": False}),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}),
        ("Qwen2ForCausalLM", {"qkv_bias": False}),
        ("Qwen3MoeForCausalLM", {"num_experts": 9, "shared_expert_intermediate_size": 9}),
    ],
    ids=str,
)
def test_a_field_that_transformers_ignores_is_refused(tmp_path, architecture, fields):
    """nanovllm once followed it and gave other tokens than transformers."""
    assert list(fields)[-1].replace("rope_parameters", "partial_rotary_factor") in error_of(
        tmp_path, architectures=[architecture], **fields
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("shared_expert_intermediate_size", value) for value in (0, -4, 1.5, "16", True)),
        *(("max_window_layers", value) for value in (-1, "4")),
        *((name, value) for name in ("qkv_bias", "norm_topk_prob") for value in ("false", 0)),
    ],
    ids=str,
)
def test_a_wrong_field_of_qwen2_moe_is_named(tmp_path, name, value):
    fields = {"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True, "num_experts": 4}
    assert read(tmp_path, **fields).experts is not None
    assert name in error_of(tmp_path, **fields, **{name: value})


def test_biases_of_outputs_are_those_of_each_family(tmp_path):
    """transformers ignores attention_bias in Qwen2. Seed-OSS has a field of its own for the outputs."""
    for architecture, fields, expected in (
        ("Qwen2ForCausalLM", {"attention_bias": True}, (True, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True)),
        ("SeedOssForCausalLM", {"attention_bias": None}, (True, False)),
        ("SeedOssForCausalLM", {"attention_out_bias": True}, (False, True)),
    ):
        config = read(tmp_path, architectures=[architecture], **fields)
        assert (config.qkv_bias, config.o_bias) == expected


def test_qwen2_moe_may_have_no_biases(tmp_path):
    fields = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4}
    configs = [read(tmp_path, **fields, **given) for given in ({}, {"qkv_bias": False})]
    assert [(config.qkv_bias, config.o_bias) for config in configs] == [(True, False), (False, False)]


WRONG_OF_FAMILIES: list[tuple[str, str, Any]] = [
    *(
        ("GraniteForCausalLM", name, value)
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
        for value in ("0.22", 0, -1.0, True, [1])
    ),
    *(("GraniteMoeHybridForCausalLM", "shared_intermediate_size", value) for value in (0, 1.5, "16")),
    *(("GraniteMoeHybridForCausalLM", "num_local_experts", value) for value in (None, 8, "8", True)),
    *(("GraniteMoeHybridForCausalLM", "layer_types", value) for value in (None, ["attention", "mamba"], ["attention"])),
    ("GraniteMoeHybridForCausalLM", "layers_block_type", ["attention", "mamba"]),
    *(("GraniteMoeHybridForCausalLM", "position_embedding_type", value) for value in ("alibi", 5, [])),
    ("GraniteMoeHybridForCausalLM", "mlp_bias", True),
    *(("SeedOssForCausalLM", "attention_out_bias", value) for value in ("false", 0)),
    *(("SmolLM3ForCausalLM", "no_rope_layers", value) for value in ([1], [1, 2], [1, "0"], [1, None], 5, [])),
    *(("SmolLM3ForCausalLM", "no_rope_layer_interval", value) for value in (0, "4", 2.0)),
    *(("Olmo3ForCausalLM", "sliding_window", value) for value in (None, 0, "4096")),
    ("Olmo3ForCausalLM", "sliding_window_pattern", 2),
    *((f"{name}ForCausalLM", "use_sliding_window", True) for name in ("Llama", "Granite", "Olmo2", "SeedOss")),
    ("MinistralForCausalLM", "layer_types", ["sliding_attention", "chunked_attention"]),
    # transformers ignores these fields in Qwen3.
    *(
        ("Qwen3ForCausalLM", name, value)
        for name, value in (
            ("attention_multiplier", 0.5), ("embedding_multiplier", 12), ("residual_multiplier", 0.22),
            ("logits_scaling", 16), ("attention_out_bias", True), ("shared_intermediate_size", 9),
            ("num_local_experts", 8), ("position_embedding_type", "nope"), ("no_rope_layers", [1, 0]),
            ("no_rope_layer_interval", 4),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "name", "value"), WRONG_OF_FAMILIES, ids=str)
def test_a_wrong_field_of_a_family_is_named(tmp_path, architecture, name, value):
    fields = {"architectures": [architecture], "sliding_window": 5}
    if architecture == "GraniteMoeHybridForCausalLM":
        fields |= GRANITE4
    assert read(tmp_path, **fields).architecture == architecture
    assert name in error_of(tmp_path, **{**fields, name: value})


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [
        ("MistralForCausalLM", {**YARN, "llama_4_scaling_beta": 0.1}),
        ("Ministral3ForCausalLM", {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}),
        ("Ministral3ForCausalLM", {**YARN, "llama_4_scaling_beta": "0.1"}),
    ],
    ids=str,
)
def test_a_scale_of_queries_that_is_not_implemented_is_refused(tmp_path, architecture, rope):
    assert "llama_4_scaling_beta" in error_of(tmp_path, architectures=[architecture], rope_parameters=rope)


def test_granites_with_other_layers_hear_what_works(tmp_path):
    """Most models of Granite 4 have experts, or Mamba layers, which have no keys."""
    fields = {"architectures": ["GraniteMoeHybridForCausalLM"], **GRANITE4}
    message = error_of(tmp_path, **{**fields, "layer_types": ["mamba", "attention"]})
    assert "must say full_attention or sliding_attention" in message and "'mamba'" in message
    message = error_of(tmp_path, **{**fields, "layer_types": None})
    assert message.startswith("config.json has no layer_types")
    other_name = {**fields, "layer_types": None, "layers_block_type": ["attention", "attention"]}
    assert read(tmp_path, **other_name).layers == read(tmp_path, **fields).layers
    assert error_of(tmp_path, **{**fields, "num_local_experts": 62}).endswith("; models with num_local_experts=0 are")
    config = read(tmp_path, **fields, shared_intermediate_size=24, intermediate_size=8)
    assert config.intermediate_size == 24
    assert [layer.rope.kind for layer in config.layers] == ["none", "none"]


def test_olmos_layers_with_a_window_have_an_unscaled_rope_of_the_same_theta(tmp_path):
    """transformers 5 gives them its default theta if config.json has the old layout; OLMo's own code does not."""
    fields = {**WINDOWED, "architectures": ["Olmo3ForCausalLM"], "rope_scaling": YARN, "rope_theta": 7.0}
    ropes = [layer.rope for layer in read(tmp_path, **fields).layers]
    assert ropes[0] == RopeConfig(7.0, 16) and (ropes[3].kind, ropes[3].theta) == ("yarn", 7.0)


def test_rope_scaling_beside_other_rope_parameters_is_refused(tmp_path):
    """Qwen's model cards ask for rope_scaling. Beside rope_parameters, it was once silently ignored."""
    default, yarn = {"rope_type": "default", "rope_theta": 1e6}, {"type": "yarn", "factor": 4.0}
    assert "keep only rope_parameters" in error_of(tmp_path, rope_parameters=default, rope_scaling=yarn)
    same = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    assert rope_of(tmp_path, rope_parameters=same, rope_scaling=yarn, rope_theta=1e6).kind == "yarn"
    # transformers takes another theta then: its default.
    assert "keep only rope_parameters" in error_of(tmp_path, rope_parameters=same, rope_scaling=yarn)


def test_a_missing_factor_of_yarn_follows_from_the_lengths(tmp_path):
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    assert rope_of(tmp_path, max_position_embeddings=512, rope_scaling=rope).factor == 4


def test_windows_that_no_sequence_outgrows_are_none(tmp_path):
    """Phi-3's windows are longer than its contexts; kernels for windows would share no prefixes."""
    config = read(tmp_path, architectures=["Phi3ForCausalLM"], sliding_window=100)
    assert [layer.window for layer in config.without_idle_windows(101).layers] == [100, 100]
    assert [layer.window for layer in config.without_idle_windows(100).layers] == [0, 0]


def test_the_sizes_that_divide_are_found_at_once(tmp_path):
    """The list in the message once tried every number of heads."""
    config = read(tmp_path, num_attention_heads=1024, num_key_value_heads=1, intermediate_size=2**20)
    with pytest.raises(ValueError, match=r"sizes that work: 1, 2, 4, 8, 16, 32, 64$"):
        config.check_parallel_size(3)


def test_a_shared_expert_must_divide_too(tmp_path):
    """It has a size of its own."""
    fields = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 9}
    config = read(tmp_path, architectures=["Qwen2MoeForCausalLM"], **fields)
    with pytest.raises(ValueError, match=r"MLPs of size 8 and 9; sizes that work: 1$"):
        config.check_parallel_size(2)
    config = read(tmp_path, architectures=["MixtralForCausalLM"], num_local_experts=4, intermediate_size=9)
    with pytest.raises(ValueError, match=r"MLPs of size 9; sizes that work: 1$"):
        config.check_parallel_size(2)


WINDOWED = {"num_hidden_layers": 7, "sliding_window": 5}


def test_gemmas_local_layers_have_a_theta_of_their_own(tmp_path):
    """transformers 4 names it rope_local_base_freq; rope_scaling applies only to the other layers."""
    fields = {
        **WINDOWED,
        "architectures": ["Gemma3ForCausalLM"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    local, whole = (read(tmp_path, **fields, rope_local_base_freq=7.0).layers[index].rope for index in (0, 5))
    assert local == RopeConfig(7.0, 16) and (whole.theta, whole.kind, whole.factor) == (1e6, "linear", 8.0)
    assert read(tmp_path, **fields).layers[0].rope.theta == 10000.0
    nested = {"sliding_attention": {"rope_type": "default", "rope_theta": 3.0}, "full_attention": {"rope_theta": 5.0}}
    ropes = [layer.rope for layer in read(tmp_path, **{**fields, "rope_scaling": None}, rope_parameters=nested).layers]
    assert ropes == [RopeConfig(3.0, 16)] * 5 + [RopeConfig(5.0, 16), RopeConfig(3.0, 16)]


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("LlamaForCausalLM", {}, [0] * 7),
        ("MistralForCausalLM", {}, [5] * 7),
        ("MistralForCausalLM", {"sliding_window": None}, [0] * 7),
        ("Phi3ForCausalLM", {}, [5] * 7),
        ("Qwen2ForCausalLM", {"max_window_layers": 4}, [0] * 7),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 4}, [0] * 4 + [5] * 3),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 9}, [0] * 7),
        ("Qwen2MoeForCausalLM", {"max_window_layers": 4}, [0] * 7),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True, "max_window_layers": 4}, [5, 0, 5, 0, 0, 0, 0]),
        ("MinistralForCausalLM", {}, [5] * 7),
        ("MinistralForCausalLM", {"layer_types": (["full_attention"] + ["sliding_attention"] * 6)}, [0] + [5] * 6),
        ("Ministral3ForCausalLM", {}, [5] * 7),
        ("Olmo2ForCausalLM", {}, [0] * 7),
        ("Olmo3ForCausalLM", {}, [5, 5, 5, 0, 5, 5, 5]),
        ("SmolLM3ForCausalLM", {}, [0] * 7),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, [0, 0, 0, 5, 0, 0, 0]),
        ("Gemma3ForCausalLM", {}, [5] * 5 + [0, 5]),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 2}, [5, 0, 5, 0, 5, 0, 5]),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}, [0] * 6 + [5]),
    ],
    ids=str,
)
def test_windows_are_where_each_family_has_them(tmp_path, architecture, fields, expected):
    fields = {**WINDOWED, "architectures": [architecture], **fields}
    assert [layer.window for layer in read(tmp_path, **fields).layers] == expected


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"])
def test_layer_types_that_transformers_would_not_follow_are_refused(tmp_path, architecture):
    kinds = ["sliding_attention", "full_attention"]
    message = error_of(tmp_path, architectures=[architecture], layer_types=kinds, sliding_window=8)
    assert "layer_types" in message


def test_gemma_needs_its_window(tmp_path):
    """Without one, layers that were trained with the local rotary embedding once got the global one."""
    fields = {**WINDOWED, "architectures": ["Gemma3ForCausalLM"], "sliding_window": None}
    assert error_of(tmp_path, **fields) == "sliding_window in config.json must be an integer: some layers need it"


def test_the_number_of_experts_is_asked_for_by_the_familys_name(tmp_path):
    for architecture, name in (("Qwen3MoeForCausalLM", "num_experts"), ("MixtralForCausalLM", "num_local_experts")):
        fields = {"architectures": [architecture], "num_experts_per_tok": 1, name: None}
        if architecture.startswith("Qwen3"):
            assert error_of(tmp_path, **fields) == f"config.json has no {name}"
        config = read(tmp_path, **{**fields, name: 3})
        assert config.experts is not None and config.experts.num_experts == 3
        assert config.experts.renormalizes is (architecture == "MixtralForCausalLM")


def test_a_missing_config_is_named(tmp_path):
    """LLM raises the same error, before anything is loaded."""
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        LLM(str(tmp_path), device="cpu")


def test_a_model_len_beyond_the_models_own_is_an_error(tmp_path):
    """The rotary table ends at the last position that the model was made for."""
    save_model(tmp_path)
    with pytest.raises(ValueError, match=r"513.*512"):
        LLM(str(tmp_path), device="cpu", max_model_len=513)
    with LLM(str(tmp_path), device="cpu", max_model_len=512) as llm:
        assert llm.engine.info.max_model_len == 512


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_experts_that_a_config_leaves_out_are_those_of_transformers(tmp_path, architecture):
    fields = {
        "architectures": [architecture], "model_type": FAMILIES[architecture].model_type, "hidden_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 32, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    ours, theirs = load_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    found = ours.experts.num_experts, ours.experts.top_k, ours.experts.size, ours.experts.shared_size
    assert found == tuple(getattr(theirs, name) for name in names)
    assert ours.experts.renormalizes is getattr(theirs, "norm_topk_prob", True)
    assert not hasattr(theirs, "intermediate_size") or ours.intermediate_size == theirs.intermediate_size
