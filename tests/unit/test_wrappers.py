"""Config and weights of multimodal checkpoints, whose text part runs."""

import json
import random
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_factory import FAMILIES, RECURRENT, WRAPPED, save_family_model
from support.fp8_factory import compressed, quantized_copy
from support.long import long
from support.model_factory import edit_config, read_tensors, write_tensors
from support.thread_ranks import logits_of, on_ranks
from support.weight_updates import OPTIONS, generate, make_llm, of_fresh_llm
from transformers import AutoConfig, GenerationConfig

from nanovllm import LLM, Preflight, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.models.read_config import load_model_config
from nanovllm.models.wrappers import TEXT_PREFIXES, WRAPPERS
from nanovllm.ops.collectives import Parallel

# Parts of real config.json files, which leave to transformers what they do not say.
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
    "image_token_index": 262144, "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 4},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
OF_27B = {
    "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
    "hidden_size": 5376, "num_hidden_layers": 62,
}  # fmt: skip
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "pixtral"}, "tie_word_embeddings": False,
    "text_config": {
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
    },
}  # fmt: skip
QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "eos_token_id": 151645, "model_type": "qwen2_vl",
    "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 32768, "max_window_layers": 28,
    "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    "vision_config": {"model_type": "qwen2_vl", "depth": 1},
}  # fmt: skip
QWEN25_VL = QWEN2_VL | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
# transformers 4.5x wrote the text part twice.
TWICE = QWEN25_VL | {
    "text_config": {
        **{name: value for name, value in QWEN25_VL.items() if name not in ("vision_config", "torch_dtype")},
        "model_type": "qwen2_5_vl_text", "dtype": "float32", "layer_types": ["full_attention"] * 28,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]},
    },
}  # fmt: skip
STRETCHED = QWEN25_VL | {
    "rope_scaling": {
        "type": "yarn", "mrope_section": [16, 24, 24], "factor": 4, "original_max_position_embeddings": 32768,
    },
}  # fmt: skip
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "tie_word_embeddings": True, "video_token_id": 151656, "vision_config": {"depth": 1},
    "text_config": {
        "attention_bias": False, "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128,
        "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5e6, "tie_word_embeddings": True, "vocab_size": 151936,
    },
}  # fmt: skip
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
QWEN3_VL_MOE = QWEN3_VL | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
    "text_config": QWEN3_VL["text_config"] | EXPERTS | {"model_type": "qwen3_vl_moe_text"},
}  # fmt: skip
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "tie_word_embeddings": False, "video_token_id": 248057, "vision_config": {"depth": 1, "model_type": "qwen3_5"},
    "text_config": {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 17408, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
        "num_hidden_layers": 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 1e7, "rope_type": "default",
        },
    },
}  # fmt: skip
EXPERTS_OF_35B = {
    "hidden_size": 2048, "linear_num_value_heads": 32, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "layer_types": None, "model_type": "qwen3_5_moe_text",
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": {
        name: value for name, value in (QWEN3_5["text_config"] | EXPERTS_OF_35B).items() if name != "intermediate_size"
    },
}  # fmt: skip
# All that a config may leave out is missing.
SPARSE_TEXT = {name: QWEN2_VL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
SPARSE_TEXT["num_attention_heads"] = 32
CONFIGS = {
    "gemma-3-4b": GEMMA3,
    "gemma-3-27b": GEMMA3 | {"text_config": GEMMA3["text_config"] | OF_27B},
    "mistral-small-3.1": MISTRAL3,
    "qwen2-vl": QWEN2_VL,
    "qwen2.5-vl": QWEN25_VL,
    "qwen2.5-vl, twice": TWICE,
    "qwen2.5-vl, stretched": STRETCHED,
    "qwen3-vl": QWEN3_VL,
    "qwen3-vl-moe": QWEN3_VL_MOE,
    "qwen3.5-27b": QWEN3_5,
    "qwen3.5-35b-a3b": QWEN3_5_MOE,
    **{
        f"{row.model_type}, sparse": {
            "model_type": row.model_type, "tie_word_embeddings": False,
            "text_config": SPARSE_TEXT | ({"num_local_experts": 60} if "moe" in row.model_type else {}),
        }
        for row in WRAPPERS.values()
    },
}  # fmt: skip


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def error_of(directory: Path, config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        load_model_config(write_config(directory, config))
    return str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_parts_numbers_are_those_of_transformers(tmp_path, name):
    """Gemma-3-4B's config.json leaves out the number of heads, and Qwen2-VL's has no text_config."""
    ours = load_model_config(write_config(tmp_path, CONFIGS[name]))
    theirs = AutoConfig.from_pretrained(tmp_path)
    text = theirs.get_text_config()
    for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps",
    ):  # fmt: skip
        assert not hasattr(text, field) or getattr(ours, field) == getattr(text, field), field
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert ours.attention_scale == getattr(text, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    if theirs.dtype is not None:
        assert ours.dtype == str(theirs.dtype).removeprefix("torch.")
    ends = GenerationConfig.from_model_config(theirs).eos_token_id if "eos_token_id" in str(CONFIGS[name]) else None
    assert ours.eos_token_ids == set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    kinds = ["sliding_attention" if ours.family.windows == "all" and text.sliding_window else kind for kind in kinds]
    for kind, layer in zip(kinds, ours.layers, strict=True):
        assert layer.window == (text.sliding_window if kind == "sliding_attention" else 0)
        rope = text.rope_parameters
        rope = rope.get(kind, rope)
        assert (layer.rope.kind, layer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert layer.rope.factor == rope.get("factor", 1.0)
        assert layer.rope.rotary_dim == int(ours.head_dim * rope.get("partial_rotary_factor", 1))
        assert layer.is_recurrent == (kind == "linear_attention")
    if ours.delta_net is not None:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        assert astuple(ours.delta_net) == tuple(getattr(text, f"linear_{name}") for name in names)
    if ours.experts is not None:
        assert ours.experts.renormalizes and ours.experts.num_experts == text.num_experts
        assert (ours.experts.top_k, ours.experts.size) == (text.num_experts_per_tok, text.moe_intermediate_size)
    fields = ("image_token_id", "image_token_index", "video_token_id", "boi_token_index")
    assert ours.placeholders == {field: getattr(theirs, field) for field in fields if field in theirs.to_dict()}


def test_the_wrappers_own_fields_count_before_the_text_parts(tmp_path):
    """Otherwise the text part's count."""
    fields = {"dtype": "float16", "eos_token_id": 7, "tie_word_embeddings": True}
    config = {**QWEN3_VL, "text_config": {**QWEN3_VL["text_config"], **fields}, "tie_word_embeddings": None}
    read = load_model_config(write_config(tmp_path, config))
    assert (read.dtype, read.eos_token_ids, read.tie_word_embeddings) == ("float16", {7}, True)
    config |= {"torch_dtype": "bfloat16", "eos_token_id": [8, 9], "tie_word_embeddings": False}
    read = load_model_config(write_config(tmp_path, config))
    assert (read.dtype, read.eos_token_ids, read.tie_word_embeddings) == ("bfloat16", {8, 9}, False)


@pytest.mark.parametrize("place", ["text_config", "the wrapper"])
def test_layers_that_are_not_in_fp8_may_have_the_wrappers_names(tmp_path, place):
    names = ["model.language_model.layers.0.mlp.down_proj", "language_model.model.layers.1", "model.visual", "lm_head"]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": names}
    config = {**QWEN3_VL, "text_config": dict(QWEN3_VL["text_config"])}
    (config if place == "the wrapper" else config["text_config"])["quantization_config"] = fp8
    read = load_model_config(write_config(tmp_path, config)).fp8
    for layer, is_fp8 in (("0.mlp.down_proj", False), ("0.mlp.up_proj", True), ("1.mlp.up_proj", False)):
        assert read.applies_to(f"model.layers.{layer}") == is_fp8


def test_a_text_part_that_is_not_supported_is_named(tmp_path):
    message = error_of(tmp_path, {**MISTRAL3, "text_config": {**MISTRAL3["text_config"], "model_type": "mistral4"}})
    assert (
        "text_config in config.json has the model_type 'mistral4', which is not supported in mistral3; supported: "
        in message
    )
    assert "gemma3_text" in message
    assert "[1]" in error_of(tmp_path, {**MISTRAL3, "text_config": {**MISTRAL3["text_config"], "model_type": [1]}})
    for text in (None, "gemma3_text", [1]):
        problem = "it is missing" if text is None else f"not {text!r}"
        assert problem in error_of(tmp_path, {**GEMMA3, "text_config": text})
    assert "norm_topk_prob=False" in error_of(
        tmp_path, {**QWEN3_VL_MOE, "text_config": {**QWEN3_VL_MOE["text_config"], "norm_topk_prob": False}}
    )
    assert "image_token_index" in error_of(tmp_path, {**GEMMA3, "image_token_index": "<image>"})


@pytest.mark.parametrize(
    ("config", "synonym"),
    [(GEMMA3, None), (QWEN2_VL | {"text_config": QWEN2_VL | {"model_type": "qwen2_vl_text"}}, "qwen2"),
     (TWICE, "qwen2"), (QWEN3_VL, "qwen3"), (QWEN3_VL_MOE, "qwen3_moe")],
    ids=lambda config: config["model_type"] if isinstance(config, dict) else "",
)  # fmt: skip
def test_only_mistral3_chooses_the_family_of_its_text_part(tmp_path, config, synonym):
    """transformers always takes the wrapper's own text part. Another family's defaults once counted."""
    own = WRAPPERS[config["architectures"][0]].text_type
    # What a family's defaults decide is missing.
    left_out = ("rope_theta", "rope_scaling", "max_position_embeddings")
    text = {name: value for name, value in config["text_config"].items() if name not in left_out}
    config = {name: value for name, value in config.items() if name not in left_out}
    for model_type in ("mistral", "llama", "qwen2_moe"):
        message = error_of(tmp_path, {**config, "text_config": {**text, "model_type": model_type}})
        assert f"the model_type {model_type!r}, which is not supported in {config['model_type']}" in message
        assert f"supported: {', '.join([own, *filter(None, [synonym])])}" in message
    expected = load_model_config(write_config(tmp_path, {**config, "text_config": {**text, "model_type": own}}))
    for model_type in filter(None, (config["model_type"], synonym)):
        read = load_model_config(write_config(tmp_path, {**config, "text_config": {**text, "model_type": model_type}}))
        assert read == expected


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        (GEMMA3, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (GEMMA3, {"num_hidden_layers": 33}),
        (GEMMA3, {"sliding_window_pattern": 5}),
        (MISTRAL3, {"sliding_window": 4096}),
        (MISTRAL3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        (QWEN3_VL, {"rope_theta": 1e6}),
        (QWEN3_VL, {"max_position_embeddings": 1000000}),
        (QWEN3_VL, {"use_sliding_window": True, "sliding_window": 4096}),
        (TWICE, {"rope_scaling": STRETCHED["rope_scaling"]}),
        (QWEN3_5_MOE, {"full_attention_interval": 2}),
    ],
    ids=lambda fields: fields.get("model_type") or str(fields),
)
def test_fields_beside_the_text_part_that_would_change_it_are_refused(tmp_path, config, beside):
    """transformers does not read them there. Repeated ones, and those of other parts, change nothing."""
    message = error_of(tmp_path, {**config, **beside})
    assert "beside text_config in config.json would change the text part" in message
    assert all(name in message for name in beside)
    text = config["text_config"]
    repeated = {name: text[name] for name in beside if name in text}
    expected = load_model_config(write_config(tmp_path, config))
    others = {} if config is TWICE else {"hidden_size": 1152, "vocab_size": 7}
    assert load_model_config(write_config(tmp_path, {**config, **repeated, **others})) == expected


def test_a_theta_that_rope_parameters_hide_is_refused_beside_them(tmp_path):
    text = {**MISTRAL3["text_config"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e9}}
    config = {**MISTRAL3, "text_config": text, "rope_theta": 1e9}
    assert load_model_config(write_config(tmp_path, config)).layers[0].rope.theta == 1e9
    assert "rope_theta beside text_config" in error_of(tmp_path, {**config, "rope_theta": 1e4})


def test_placeholders_have_two_names_in_transformers(tmp_path):
    for config in (GEMMA3, MISTRAL3):
        other_name = {**config, "image_token_id": 77, "image_token_index": None}
        ours = load_model_config(write_config(tmp_path, other_name))
        assert ours.placeholders["image_token_index"] == 77
        message = error_of(tmp_path, {**config, "image_token_id": 77})
        assert message == "image_token_index and image_token_id in config.json differ; keep only image_token_index"


# Weights


def small(family: str, **changes) -> dict[str, Any]:
    """Options that two ranks can share."""
    options = {**FAMILIES, **WRAPPED}[family][2](random.Random(family)) | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": False,
    }  # fmt: skip
    options |= {"head_dim": 8} if "head_dim" in options else {}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if family == "ministral3_wrapped":
        rope |= {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    if family == "gemma3_wrapped":
        options |= {"layer_types": None, "rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    else:
        options["rope_parameters"] = rope | ({"mrope_section": [2, 1, 1]} if "_vl" in family else {})
    is_recurrent = family.startswith(RECURRENT)
    if "moe" in family or family == "qwen3_next":
        options |= {"moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2}
        options |= {"shared_expert_intermediate_size": 12} if is_recurrent else {"decoder_sparse_step": 1}
    if "layer_types" in options:
        options["layer_types"] = None
    if is_recurrent:
        options |= {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }  # fmt: skip
    return options | changes


TOKENS = [3, 14, 15, 9, 26, 5, 35, 8]
TEXT = {
    "the text part alone": "model.",
    "2025": "language_model.model.",
    "transformers' modules": "model.language_model.",
}


def logits(directory: Path) -> torch.Tensor:
    return logits_of(directory, TOKENS, Parallel())


def text_name(name: str) -> str:
    """The name that the text part's tensor has in a model of its own; "" for other parts."""
    if any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector.")):
        return ""
    name = name.replace("language_model.", "").removeprefix("model.")
    return name if name == "lm_head.weight" else f"model.{name}"


def renamed(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        ours = text_name(name)
        if not ours:
            name = "model." * (prefix == "model.language_model.") + name.removeprefix("model.")
        elif ours == "lm_head.weight":
            name = ("language_model." if prefix == "language_model.model." else "") + ours
        else:
            name = prefix + ours.removeprefix("model.")
        found[name] = tensor
    return found


@pytest.fixture(scope="module", params=WRAPPED)
def checkpoint(request, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A checkpoint with an LM head, and the logits of TOKENS by transformers."""
    directory = tmp_path_factory.mktemp(request.param)
    model = save_family_model(directory, request.param, small(request.param), seed=3)
    with torch.inference_mode():
        return directory, model(torch.tensor([TOKENS])).logits[0]


@pytest.fixture
def copied(checkpoint, tmp_path) -> tuple[Path, torch.Tensor, dict[str, torch.Tensor]]:
    """A copy of its config, these logits, and its tensors."""
    directory, expected = checkpoint
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    return tmp_path, expected, read_tensors(directory)


@pytest.mark.parametrize("layout", TEXT)
def test_names_of_all_layouts_load(copied, layout, caplog):
    """The other parts' tensors are left out, and a line of the log counts them."""
    directory, expected, tensors = copied
    written = write_tensors(directory, renamed(tensors, TEXT[layout]))
    assert layout == "the text part alone" or "model.embed_tokens.weight" not in written
    with caplog.at_level("INFO"):
        torch.testing.assert_close(logits(directory), expected, rtol=1e-4, atol=1e-4)
    others = [name for name in written if not text_name(name)]
    assert len(others) > 5
    (line,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert line == f"skipped {len(others)} tensors that the model does not need, such as {others[0]}"


def load_error(directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    write_tensors(directory, tensors)
    with pytest.raises(ValueError) as error:
        logits(directory)
    return str(error.value)


def test_a_text_part_that_is_missing_or_elsewhere_is_named(copied):
    """The error names the first tensor that is not expected."""
    directory, _, tensors = copied
    texts = {name: tensor for name, tensor in renamed(tensors, "model.").items() if text_name(name)}
    others = {name: tensor for name, tensor in tensors.items() if not text_name(name)}
    moved = {f"thinker.{name}": tensor for name, tensor in texts.items()}
    message = load_error(directory, others | moved)
    assert f"unexpected tensor {sorted(moved)[0]} in {directory}" in message
    assert all(prefix in message for prefix in TEXT_PREFIXES[:-1])
    message = load_error(directory, others)
    assert message == f"{directory} has no tensor of the text part"
    message = load_error(directory, others | {k: v for k, v in texts.items() if k != "model.norm.weight"})
    assert message.startswith("a tensor is missing") and message.endswith("model.norm.weight")
    # With a known prefix, the error does not say that prefixes are wrong.
    extra = {"model.visual_extra.weight": torch.zeros(2)}
    message = load_error(directory, renamed(tensors, "model.language_model.") | extra)
    assert "unexpected tensor model.visual_extra.weight" in message and "must begin with" not in message
    assert message.endswith("; most names begin with model.language_model.")
    extra = {"model.language_model.extra.weight": torch.zeros(2)}
    message = load_error(directory, renamed(tensors, "model.language_model.") | extra)
    assert message.endswith("the model has no such parameter")


def test_an_lm_head_of_its_own_is_used_though_the_wrapper_says_tied(copied):
    """transformers 5 writes that for all of Mistral 3, and unties what is stored untied."""
    directory, expected, tensors = copied
    write_tensors(directory, tensors)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    write_config(directory, config | {"tie_word_embeddings": True})
    assert not load_model_config(directory).tie_word_embeddings
    torch.testing.assert_close(logits(directory), expected, rtol=1e-4, atol=1e-4)
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")})
    assert load_model_config(directory).tie_word_embeddings


def test_a_missing_lm_head_may_be_the_embedding(tmp_path):
    save_family_model(tmp_path, "qwen3_vl", small("qwen3_vl"))
    tensors = read_tensors(tmp_path)
    del tensors["lm_head.weight"]
    hint = "set tie_word_embeddings to true in config.json"
    assert load_error(tmp_path, tensors).endswith(hint)
    del tensors["model.language_model.embed_tokens.weight"]
    assert hint not in load_error(tmp_path, tensors)


def test_vision_tensors_of_a_text_model_are_unexpected(tmp_path):
    """They are left out of wrapped checkpoints only."""
    save_family_model(tmp_path, "mistral3", small("mistral3"))
    config = json.loads((tmp_path / "config.json").read_text())
    write_config(tmp_path, config["text_config"] | {"architectures": ["MistralForCausalLM"]})
    with pytest.raises(ValueError, match=r"unexpected tensor multi_modal_projector\.linear_1\.weight"):
        logits(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5_wrapped", "qwen3_next"])
def test_parts_beside_a_text_model_are_skipped(tmp_path, family):
    """Published checkpoints hold layers that predict several tokens. transformers loads the text model from a wrapped
    checkpoint too, and skips the vision part then."""
    save_family_model(tmp_path, family, small(family))
    expected, tensors = logits(tmp_path), read_tensors(tmp_path)
    extra = {f"mtp.layers.0.{name}": torch.zeros(2) for name in ("self_attn.q_proj.weight", "input_layernorm.weight")}
    write_tensors(tmp_path, tensors | extra | {"mtp.norm.weight": torch.zeros(2)})
    assert torch.equal(logits(tmp_path), expected)
    config = json.loads((tmp_path / "config.json").read_text())
    if "text_config" in config:
        fields = {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": False}
        write_config(tmp_path, config["text_config"] | fields)
        assert any("visual" in name for name in tensors)
        assert torch.equal(logits(tmp_path), expected)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    save_family_model(directory, "qwen3_vl_moe", small("qwen3_vl_moe"), seed=5)
    return directory


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Qwen3-VL's published checkpoints have them."""
    return {name: tensor.mT if ".mlp.experts." in name else tensor for name, tensor in tensors.items()}


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert's projections in tensors of their own."""
    found = {}
    for name, tensor in tensors.items():
        module, is_packed, projection = name.partition(".experts.")
        for expert, weight in enumerate(tensor if is_packed else ()):
            if projection == "down_proj":
                found[f"{module}.experts.{expert}.down_proj.weight"] = weight
            else:
                for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                    found[f"{module}.experts.{expert}.{part}.weight"] = half
        if not is_packed:
            found[name] = tensor
    return found


@pytest.mark.parametrize("layout", [transposed, apart])
@pytest.mark.parametrize("size", [1, 2])
def test_experts_of_all_layouts_load(experts, tmp_path, layout, size):
    """Together or apart, and with rows and columns exchanged; each rank reads its part of each expert."""
    expected = logits(experts)
    (tmp_path / "config.json").write_bytes((experts / "config.json").read_bytes())
    write_tensors(tmp_path, layout(read_tensors(experts)))
    if layout is transposed:
        model = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path)
        model.set_experts_implementation("eager")
        with torch.inference_mode():
            torch.testing.assert_close(expected, model(torch.tensor([TOKENS])).logits[0], rtol=1e-4, atol=1e-4)
    for ours in on_ranks(size, lambda rank: logits_of(tmp_path, TOKENS, rank)):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_packed_experts_of_another_shape_are_named(experts, tmp_path):
    (tmp_path / "config.json").write_bytes((experts / "config.json").read_bytes())
    tensors = read_tensors(experts)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    for wrong in (tensors[name][:2], tensors[name][:, :-1], tensors[name][0]):
        message = load_error(tmp_path, tensors | {name: wrong})
        assert f"tensor {name} in " in message and f"{list(wrong.shape)}, the model needs [3, 24, 32]" in message
    both = {name.replace("gate_up_proj", "2.up_proj.weight"): tensors[name][2, 12:]}
    assert "are the same tensor; keep one of them" in load_error(tmp_path, tensors | both)


@pytest.mark.parametrize(("size", "square"), [(16, "gate_up_proj"), (32, "down_proj")])
def test_square_experts_have_the_layout_of_the_layers_other_tensor(tmp_path, size, square):
    """Published checkpoints exchange rows and columns. The shape does not show it here."""
    save_family_model(tmp_path, "qwen3_vl_moe", small("qwen3_vl_moe", moe_intermediate_size=size), seed=5)
    expected, tensors = logits(tmp_path), read_tensors(tmp_path)
    name = f"model.language_model.layers.0.mlp.experts.{square}"
    assert tensors[name].shape == (3, 32, 32)
    write_tensors(tmp_path, transposed(tensors))
    torch.testing.assert_close(logits(tmp_path), expected, rtol=1e-4, atol=1e-4)
    alone = {name: tensor for name, tensor in tensors.items() if "experts" not in name} | {name: tensors[name]}
    assert "does not tell rows from columns; give model.layers.0.mlp.experts." in load_error(tmp_path, alone)


def test_a_square_tensor_of_experts_may_come_alone_without_a_wrapper(tmp_path):
    """OLMoE's are square, and trainers may send tensor by tensor, in the layout of transformers' modules."""
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        options = small("qwen3_moe", moe_intermediate_size=16)
        model = save_family_model(tmp_path / str(number), "qwen3_moe", options, seed=number)
    expected = of_fresh_llm(tmp_path / "1")[0]
    with make_llm(tmp_path / "0") as llm:
        for name, tensor in model.named_parameters():
            assert "gate_up_proj" not in name or tensor.shape == (3, 32, 32)
            llm.update_weights({name: tensor.detach()})
        assert generate(llm) == expected


def test_scales_of_packed_experts_are_refused_with_advice(experts, tmp_path):
    (tmp_path / "config.json").write_bytes((experts / "config.json").read_bytes())
    tensors = read_tensors(experts)
    for name in ("down_proj_scale_inv", "gate_up_proj.weight_scale"):
        scales = {f"model.language_model.layers.0.mlp.experts.{name}": torch.ones(3, 1, 1)}
        assert load_error(tmp_path, tensors | scales).endswith(
            "FP8 weights of experts and their scales must be in tensors of their own, expert by expert"
        )


def test_fp8_weights_of_a_wrapper_are_those_of_its_text_part_alone(tmp_path):
    """Scales have the wrapper's prefix, and so has the name of a layer that is not in FP8."""
    whole, alone, plain = tmp_path / "wrapped", tmp_path / "alone", ".layers.0.mlp.down_proj"
    save_family_model(tmp_path / "plain", "qwen3_vl", small("qwen3_vl"))
    quantized_copy(tmp_path / "plain", whole, ignore=[f"model.language_model{plain}", "re:.*visual.*"])
    of_plain = {name: tensor for name, tensor in read_tensors(tmp_path / "plain").items() if f"{plain}." in name}
    tensors = {name: tensor for name, tensor in read_tensors(whole).items() if f"{plain}." not in name} | of_plain
    write_tensors(whole, tensors)
    alone.mkdir()
    write_tensors(alone, {text_name(name): tensor for name, tensor in tensors.items() if text_name(name)})
    config = json.loads((whole / "config.json").read_text())
    text = config["text_config"] | {"model_type": "qwen3", "tie_word_embeddings": False}
    write_config(alone, text | {"quantization_config": compressed(ignore=[f"model{plain}"])})
    assert torch.equal(logits(whole), logits(alone))


WITH_TRAINERS_NAMES = [
    ("gemma3_wrapped", 1), ("qwen3_moe", 1), ("qwen3_vl_moe", 1), long("qwen3_vl_moe", 2), ("qwen3_next", 1),
    ("qwen3_5_moe_wrapped", 2),
]  # fmt: skip


@pytest.mark.parametrize(("family", "size"), WITH_TRAINERS_NAMES)
def test_update_weights_takes_the_names_of_transformers_modules(tmp_path, family, size):
    """As trainers send them: with the wrapper's prefixes, vision tensors and packed experts, which transformers 5 has
    in models without a wrapper too."""
    options = small(family)
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        model = save_family_model(tmp_path / str(number), family, options, seed=number)
    expected = of_fresh_llm(tmp_path / "1")[0]
    given = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert family in FAMILIES or not all(map(text_name, given))
    assert "moe" not in family or any(name.endswith("mlp.experts.gate_up_proj") for name in given)
    with make_llm(tmp_path / "0", tensor_parallel_size=size) as llm:
        assert llm.engine.info.snapshots.has_states == family.startswith(RECURRENT)  # also through several processes
        llm.update_weights(given)
        assert generate(llm) == expected
        with pytest.raises(ValueError, match=r"unexpected tensor vision\.weight"):
            llm.update_weights({"vision.weight": torch.zeros(2)})
        llm.update_weights({})
        llm.update_weights({name: tensor for name, tensor in given.items() if not text_name(name)})
        assert generate(llm) == expected


# Prompts


def test_prompts_with_placeholders_of_images_are_refused(tmp_path):
    """Tokens beside images, such as vision_start_token_id, are ordinary tokens."""
    save_family_model(tmp_path, "qwen2_5_vl", small("qwen2_5_vl"))
    edit_config(tmp_path, vision_start_token_id=7)
    prompts = [[3, 48], [3, 7], [49], [3, 49, 3]]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        with pytest.raises(ValueError, match="token id 48, the model's video_token_id"):
            llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)
    errors = [output.error for output in outputs]
    assert errors[1] is None and len(outputs[1].token_ids) == 2
    for error, name in zip((errors[0], *errors[2:]), ("video", "image", "image"), strict=True):
        assert f"the model's {name}_token_id" in error and "nanovllm reads text only" in error
    assert [check.error for check in Preflight(tmp_path).check(prompts)] == errors


def test_gemmas_token_for_an_image_is_a_placeholder_too(tmp_path):
    """Its chat template writes boi_token, <start_of_image>; the processor writes the other token behind it."""
    write_config(tmp_path, GEMMA3)
    error = Preflight(tmp_path).check([[5, 255999]])[0].error
    assert "token id 255999, the model's boi_token_index" in error and "nanovllm reads text only" in error


def test_texts_with_placeholders_of_images_are_refused(tmp_path):
    """A special token in a text, such as <|image_pad|>, becomes the placeholder's id."""
    write_config(tmp_path, {**QWEN3_VL, "image_token_id": ord("~"), "chat_template": None})
    preflight = Preflight(tmp_path, tokenizer=MODEL_DIRECTORY)
    assert preflight.get_tokenizer()("~")["input_ids"] == [ord("~")]
    good, bad = preflight.check(["a b", "a ~ b"])
    assert good.error is None and f"token id {ord('~')}, the model's image_token_id" in bad.error
