"""Tiny random checkpoints of every family, written by transformers. Tests compare the engine with them."""

import random
from pathlib import Path
from typing import Any

import torch

from nanovllm.models.read_config import load_model_config
from nanovllm.models.wrappers import WRAPPERS

# Prompts of the comparisons have up to 40 tokens and chunks 7 to 39, so windows are shorter and longer than both.
WINDOWS = (1, 2, 3, 5, 8, 16, 33, 60, 200)


def random_rope(rng: random.Random, rotary_dim: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """rope_parameters as transformers 5 has them, for models of 512 positions."""
    kind = rng.choice(kinds)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice((100.0, 10000.0, 5e5, 1e6))}
    if kind in ("linear", "yarn", "llama3"):
        rope["factor"] = rng.choice((2.0, 4.0, 8.0))
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = rng.choice((16, 64, 128))
    if kind == "dynamic":
        rope["factor"] = 2.0
    if kind == "llama3":
        low = rng.choice((1.0, 0.5, 2.0))
        rope |= {"low_freq_factor": low, "high_freq_factor": low * rng.choice((1.5, 4.0))}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            rope[name] = [rng.uniform(1, 4) for _ in range(rotary_dim // 2)]
    return rope


SCALED = ("default", "linear", "yarn", "llama3", "dynamic")


def _common(rng: random.Random, **kinds) -> dict[str, Any]:
    num_kv_heads, head_dim = rng.choice((1, 2, 3)), rng.choice((8, 10, 16, 24))
    num_heads = num_kv_heads * rng.choice((1, 2, 4))
    return {
        "vocab_size": rng.randrange(31, 160),
        "hidden_size": num_heads * head_dim,  # some configs insist on it
        "intermediate_size": rng.randrange(16, 80),
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": random_rope(rng, head_dim, SCALED),
    }


def _free_head_dim(rng: random.Random, options: dict[str, Any]) -> None:
    """A head_dim that is not hidden_size / num_attention_heads."""
    options["head_dim"] = head_dim = rng.choice((8, 10, 16, 24))
    options["rope_parameters"] = random_rope(rng, head_dim, SCALED)


def llama(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    if rng.random() < 0.3:
        _free_head_dim(rng, options)
    return options | {"attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3}


def mistral(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    if rng.random() < 0.5:
        _free_head_dim(rng, options)
    return options | {"sliding_window": rng.choice((None, *WINDOWS))}


def qwen2(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    num_layers = options["num_hidden_layers"]
    options |= {
        "use_sliding_window": rng.random() < 0.7,
        "sliding_window": rng.choice(WINDOWS),
        "max_window_layers": rng.randrange(num_layers + 1),
    }
    if options["use_sliding_window"] and rng.random() < 0.4:
        options["layer_types"] = [rng.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)]
    return options


def qwen3(rng: random.Random) -> dict[str, Any]:
    options = qwen2(rng) | {"attention_bias": rng.random() < 0.5}
    _free_head_dim(rng, options)
    return options


def phi3(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    head_dim = options["head_dim"]
    partial = rng.choice((1.0, 1.0, 0.75, 0.5))
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2:
        partial, rotary_dim = 1.0, head_dim
    rope = random_rope(rng, rotary_dim, ("default", "longrope"))
    rope["partial_rotary_factor"] = partial
    options |= {"rope_parameters": rope, "original_max_position_embeddings": rng.choice((128, 256, 512))}
    del options["head_dim"]
    return options | {"sliding_window": rng.choice((None, *WINDOWS)), "pad_token_id": 0}


def gemma3(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    head_dim, num_layers = options["head_dim"], options["num_hidden_layers"]
    options["num_hidden_layers"] = num_layers = num_layers + rng.choice((0, 3))
    options["tie_word_embeddings"] = rng.random() < 0.2  # with scaled embeddings, a tied one mostly repeats its token
    ropes = {
        "full_attention": random_rope(rng, head_dim, ("default", "linear")),
        "sliding_attention": random_rope(rng, head_dim, ("default",)),
    }
    options |= {
        "rope_parameters": ropes,
        "sliding_window": rng.choice(WINDOWS),
        "query_pre_attn_scalar": rng.choice((head_dim, 4 * head_dim, 7)),
        "attention_bias": rng.random() < 0.3,
        "pad_token_id": 0,
    }
    if rng.random() < 0.5:
        options["layer_types"] = [rng.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)]
    return options


def granite(rng: random.Random) -> dict[str, Any]:
    return _common(rng) | {
        "tie_word_embeddings": rng.random() < 0.2,  # as in gemma3
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
        "rms_norm_eps": rng.choice((1e-5, 0.003)),  # the residual multiplier changes the layers' eps
        "embedding_multiplier": rng.choice((1, 2, 5.0)),
        "attention_multiplier": rng.choice((0.05, 0.2, 0.5)),
        "residual_multiplier": rng.choice((0.22, 0.5, 1.0, 1.7)),
        "logits_scaling": rng.choice((1, 3, 16.0)),
    }


def granite4(rng: random.Random) -> dict[str, Any]:
    options = granite(rng)
    for name in ("mlp_bias", "intermediate_size"):
        del options[name]
    return options | {
        "shared_intermediate_size": rng.randrange(16, 80),
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * options["num_hidden_layers"],
        "position_embedding_type": rng.choice(("rope", "rope", "nope")),
        "pad_token_id": 0,
        "mamba_n_heads": 2,  # the config checks it though no layer is Mamba's
    }


def ministral(rng: random.Random) -> dict[str, Any]:
    options = mistral(rng) | {"sliding_window": rng.choice(WINDOWS)}  # transformers needs one
    if rng.random() < 0.7:
        kinds = ("full_attention", "sliding_attention")
        options["layer_types"] = [rng.choice(kinds) for _ in range(options["num_hidden_layers"])]
    return options


def ministral3(rng: random.Random) -> dict[str, Any]:
    options = mistral(rng)
    options["rope_parameters"] = random_rope(rng, options["head_dim"], ("yarn",)) | {
        "original_max_position_embeddings": rng.choice((8, 16, 64)),
        "llama_4_scaling_beta": rng.choice((0.1, 0.5, 2.0)),
        "mscale": 1.0,
        "mscale_all_dim": rng.choice((0.5, 1.0)),
    }
    return options | {"pad_token_id": 0}


def olmo2(rng: random.Random) -> dict[str, Any]:
    options = _common(rng) | {"tie_word_embeddings": rng.random() < 0.2}  # as in gemma3
    if rng.random() < 0.3:
        _free_head_dim(rng, options)
    return options | {"attention_bias": rng.random() < 0.3, "pad_token_id": 0}


def olmo3(rng: random.Random) -> dict[str, Any]:
    options = olmo2(rng)
    head_dim = options["head_dim"]
    options["num_hidden_layers"] = num_layers = options["num_hidden_layers"] + rng.choice((0, 2))
    theta = rng.choice((1e4, 5e5))
    options |= {
        "rope_parameters": {
            "full_attention": random_rope(rng, head_dim, ("default", "yarn")) | {"rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "sliding_window": rng.choice(WINDOWS),
    }
    if rng.random() < 0.5:
        options["layer_types"] = [rng.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)]
    return options


def seed_oss(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    options |= {name: rng.random() < 0.5 for name in ("attention_bias", "attention_out_bias", "mlp_bias")}
    _free_head_dim(rng, options)
    return options | {"pad_token_id": 0}


def smollm3(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    if rng.random() < 0.3:
        _free_head_dim(rng, options)
    options["num_hidden_layers"] = num_layers = options["num_hidden_layers"] + rng.randrange(3)
    options |= {
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
        "no_rope_layer_interval": rng.choice((1, 2, 3, 4)),
        "use_sliding_window": rng.random() < 0.5,
        "sliding_window": rng.choice(WINDOWS),
        "pad_token_id": 0,
    }
    if rng.random() < 0.5:
        options["no_rope_layers"] = [rng.randrange(2) for _ in range(num_layers)]
    if options["use_sliding_window"] and rng.random() < 0.5:
        options["layer_types"] = [rng.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)]
    return options


def _experts(rng: random.Random, options: dict[str, Any], name: str) -> dict[str, Any]:
    num_experts = rng.choice((1, 2, 3, 5, 7, 8, 11, 16))
    options |= {name: num_experts, "num_experts_per_tok": min(num_experts, rng.randrange(1, 9))}
    return options


def qwen3_moe(rng: random.Random) -> dict[str, Any]:
    options = _experts(rng, _common(rng), "num_experts")
    _free_head_dim(rng, options)
    return options | {
        "attention_bias": rng.random() < 0.3,
        "moe_intermediate_size": rng.randrange(6, 50),
        "norm_topk_prob": rng.random() < 0.7,
        "decoder_sparse_step": rng.choice((1, 1, 2)),
        "mlp_only_layers": [] if rng.random() < 0.7 else [0],
        "use_sliding_window": rng.random() < 0.3,
        "sliding_window": rng.choice(WINDOWS),
    }


def qwen2_moe(rng: random.Random) -> dict[str, Any]:
    options = _experts(rng, qwen2(rng), "num_experts")
    has_dense_layers = options["num_hidden_layers"] > 1 and rng.random() < 0.5
    return options | {
        "qkv_bias": rng.random() < 0.7,
        "moe_intermediate_size": rng.randrange(6, 50),
        "shared_expert_intermediate_size": rng.randrange(6, 50),
        "norm_topk_prob": rng.random() < 0.3,
        "decoder_sparse_step": 2 if has_dense_layers else 1,
        "mlp_only_layers": [0] if has_dense_layers and rng.random() < 0.5 else [],
    }


def mixtral(rng: random.Random) -> dict[str, Any]:
    options = _experts(rng, _common(rng), "num_local_experts")
    return options | {"sliding_window": rng.choice((None, *WINDOWS))}


def olmoe(rng: random.Random) -> dict[str, Any]:
    options = _experts(rng, _common(rng), "num_experts")
    del options["head_dim"]
    return options | {
        "attention_bias": rng.random() < 0.3,
        "norm_topk_prob": rng.random() < 0.5,
        "pad_token_id": 0,
    }


def qwen3_5(rng: random.Random) -> dict[str, Any]:
    options = _common(rng)
    options["head_dim"] = head_dim = rng.choice((16, 24, 32))
    partial = rng.choice((0.25, 0.25, 0.5, 0.75, 1.0))
    rope = random_rope(rng, int(head_dim * partial), SCALED)
    options["num_hidden_layers"] = num_layers = options["num_hidden_layers"] + rng.choice((1, 3))
    num_key_heads = rng.choice((1, 2, 3, 4))
    options |= {
        "rope_parameters": rope | {"partial_rotary_factor": partial},
        "attention_bias": rng.random() < 0.3,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * rng.choice((1, 2, 4)),
        "linear_key_head_dim": rng.choice((3, 4, 8, 12)),
        "linear_value_head_dim": rng.choice((2, 5, 8, 16)),
        "linear_conv_kernel_dim": rng.choice((2, 3, 4, 5)),
        "pad_token_id": 0,
    }
    if num_layers < 4 or rng.random() < 0.7:
        kinds = [
            "full_attention",
            *(rng.choice(("linear_attention",) * 2 + ("full_attention",)) for _ in range(num_layers - 1)),
        ]
        rng.shuffle(kinds)
        options["layer_types"] = kinds
    return options


def qwen3_5_moe(rng: random.Random) -> dict[str, Any]:
    options = _experts(rng, qwen3_5(rng), "num_experts")
    del options["intermediate_size"]
    return options | {
        "moe_intermediate_size": rng.randrange(6, 50),
        "shared_expert_intermediate_size": rng.randrange(6, 50),
    }


def qwen3_next(rng: random.Random) -> dict[str, Any]:
    options = qwen3_5_moe(rng)
    return options | {
        "intermediate_size": rng.randrange(16, 80),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice((1, 1, 2)),
        "mlp_only_layers": [] if rng.random() < 0.7 else [0],
    }


def _with_mrope(rng: random.Random, options: dict[str, Any], kinds: tuple[str, ...] = SCALED) -> dict[str, Any]:
    """Sections of the rotated columns for the three axes of a position; for text the axes are equal."""
    num_frequencies = options["head_dim"] // 2
    first, second = sorted(rng.choices(range(num_frequencies + 1), k=2))
    sections = [first, second - first, num_frequencies - second]
    rope = random_rope(rng, options["head_dim"], kinds) | {"mrope_section": sections}
    return options | {"rope_parameters": rope}


def qwen2_vl(rng: random.Random) -> dict[str, Any]:
    options = _with_mrope(rng, qwen2(rng))
    del options["head_dim"]
    return options


def qwen3_vl(rng: random.Random) -> dict[str, Any]:
    options = _common(rng) | {"attention_bias": rng.random() < 0.5}
    _free_head_dim(rng, options)
    return _with_mrope(rng, options)


def qwen3_vl_moe(rng: random.Random) -> dict[str, Any]:
    options = qwen3_moe(rng)
    for name in ("norm_topk_prob", "use_sliding_window", "sliding_window"):
        del options[name]
    return _with_mrope(rng, options)


# Family -> (transformers' config and model, random options).
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", llama),
    "mistral": ("MistralConfig", "MistralForCausalLM", mistral),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", qwen2),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", qwen3),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", phi3),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", qwen2_moe),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", qwen3_moe),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", mixtral),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", gemma3),
    "granite": ("GraniteConfig", "GraniteForCausalLM", granite),
    "granite4": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", granite4),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", ministral),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", ministral3),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", seed_oss),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", smollm3),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", olmo2),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", olmo3),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", olmoe),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", qwen3_5),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", qwen3_5_moe),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", qwen3_next),
}

RECURRENT = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

_VIT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4,
    "patch_size": 2,
}  # fmt: skip
_PIXTRAL = {**_VIT, "model_type": "pixtral", "head_dim": 8}
_QWEN_VIT = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2}
_QWEN3_VIT = _QWEN_VIT | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_QWEN3_5_VIT = _QWEN_VIT | {"num_position_embeddings": 16, "out_hidden_size": 16}
# Multimodal family -> (transformers' config and model, random options of the text part, options of the vision part).
WRAPPED = {
    "gemma3_wrapped": ("Gemma3Config", "Gemma3ForConditionalGeneration", gemma3, _VIT),
    "mistral3": (
        "Mistral3Config", "Mistral3ForConditionalGeneration", mistral, _PIXTRAL,
    ),
    "ministral3_wrapped": ("Mistral3Config", "Mistral3ForConditionalGeneration", ministral3, _PIXTRAL),
    "qwen2_vl": (
        "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", qwen2_vl, _QWEN_VIT | {"embed_dim": 16, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", qwen2_vl, _QWEN_VIT | {"fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", qwen3_vl, _QWEN3_VIT),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe, _QWEN3_VIT),
    "qwen3_5_wrapped": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", qwen3_5, _QWEN3_5_VIT),
    "qwen3_5_moe_wrapped": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", qwen3_5_moe, _QWEN3_5_VIT),
}  # fmt: skip


def _wrapped_config(family: str, options: dict[str, Any]) -> Any:
    """The config of a wrapper whose placeholder tokens are the last ids. Sometimes only the wrapper says whether
    embedding and LM head are tied, as in transformers 5."""
    import transformers  # slow to import

    name, architecture, options_of, vision = WRAPPED[family]
    text = {"bos_token_id": None, "eos_token_id": None, **options}
    tied, last = text.pop("tie_word_embeddings"), options["vocab_size"] - 1
    if options["hidden_size"] % 16:
        text["tie_word_embeddings"] = tied
    if WRAPPERS[architecture].takes_any_text:
        text["model_type"] = options_of.__name__
    ids = {field: last - index for index, field in enumerate(WRAPPERS[architecture].placeholders)}
    return getattr(transformers, name)(text_config=text, vision_config=dict(vision), tie_word_embeddings=tied, **ids)


def make_family_model(family: str, options: dict[str, Any], seed: int = 0, architecture: str = "") -> Any:
    """A float32 model with random parameters, norms and biases included, so that a lost one would show.

    Args:
        architecture: transformers' class; by default the one with an LM head.
    """
    import transformers  # slow to import

    transformers.utils.logging.disable_progress_bar()
    config_name, model_name, *_ = {**FAMILIES, **WRAPPED}[family]
    if family in WRAPPED:
        config = _wrapped_config(family, options)
    else:
        config = getattr(transformers, config_name)(bos_token_id=None, eos_token_id=None, **options)
    model = getattr(transformers, architecture or model_name)(config).float().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other implementations need sizes that are multiples of 16 bytes
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that greedy completions wander instead of repeating one token.
            parameter.normal_(0, 0.3, generator=generator)
            has_offset = family.startswith(("gemma3", *RECURRENT)) and "linear_attn.norm" not in name
            if "norm" in name and not has_offset:
                parameter.add_(1)
            if name.endswith("A_log"):  # as transformers initialises it
                parameter.uniform_(0.01, 16, generator=generator).log_()
            if name.endswith("dt_bias"):  # some heads remember long, others forget soon
                parameter.mul_(5).sub_(4)
            if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")):
                parameter.mul_(0.1)
            if "embed_tokens" in name and family in ("olmo2", "olmo3") and not config.tie_word_embeddings:
                parameter.mul_(5)  # norms make the outputs of blocks larger than embeddings, whatever the token
    return model


def save_family_model(
    directory: Path, family: str, options: dict[str, Any], seed: int = 0, architecture: str = ""
) -> Any:
    """Writes `make_family_model`'s checkpoint into `directory` and returns the model."""
    model = make_family_model(family, options, seed, architecture)
    model.save_pretrained(directory)
    return model


def save_divisible_model(directory: Path, family: str, rng: random.Random, **changes: Any) -> dict[str, Any]:
    """Saves a model of the family that two ranks can divide."""
    while True:
        options = {**FAMILIES, **WRAPPED}[family][2](rng) | changes
        save_family_model(directory, family, options, seed=1)
        try:
            load_model_config(directory).check_parallel_size(2)
            return options
        except ValueError:
            continue
