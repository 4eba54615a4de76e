"""Models of all families that are large enough for kernels on a GPU."""

from pathlib import Path
from typing import Any

import torch

from support.family_factory import make_family_model

DEVICE, VOCAB_SIZE = "cuda", 1013
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 3,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 128}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(36)], "long_factor": [2.0] * 36}
DELTA_NET = {
    "head_dim": 256, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25},
    "pad_token_id": 0,
}  # fmt: skip
# Each with the head sizes and windows that its models have, or shorter windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "rope_parameters": LLAMA3}),
    "llama, heads of 80": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80}),
    "mistral": (
        "mistral", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 100},
    ),
    "qwen2": (
        "qwen2",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 256,
            "max_window_layers": 1,
        },
    ),
    "phi3": (
        "phi3",
        {
            "num_attention_heads": 4, "num_key_value_heads": 2, "original_max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **FACTORS},
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 7,
            "sliding_window": 70, "query_pre_attn_scalar": 256,
        },
    ),
    "olmoe": (
        "olmoe",
        {
            "num_attention_heads": 6, "num_key_value_heads": 6, "num_experts": 24, "num_experts_per_tok": 5,
            "pad_token_id": 0,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 24, "num_experts_per_tok": 4,
            "moe_intermediate_size": 200, "shared_expert_intermediate_size": 320,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 24,
            "num_experts_per_tok": 5, "moe_intermediate_size": 200, "norm_topk_prob": True,
        },
    ),
    "gemma3, wrapped": (
        "gemma3_wrapped",
        {
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 7,
            "sliding_window": 70,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 24,
            "num_experts_per_tok": 5, "moe_intermediate_size": 200,
        },
    ),
    "qwen3_5": ("qwen3_5", {"num_attention_heads": 4, "num_key_value_heads": 2, **DELTA_NET}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 24, "num_experts_per_tok": 5,
            "moe_intermediate_size": 200, "shared_expert_intermediate_size": 320, **DELTA_NET,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 24, "num_experts_per_tok": 5,
            "moe_intermediate_size": 200, "shared_expert_intermediate_size": 320, **DELTA_NET,
        },
    ),
    "granite": (
        "granite",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "attention_multiplier": 1 / 64,
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0,
        },
    ),
    "granite4": (
        "granite4",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "attention_multiplier": 1 / 64,
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 10.0,
            "shared_intermediate_size": 512, "num_local_experts": 0, "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "nope", "mamba_n_heads": 2, "pad_token_id": 0,
        },
    ),
    "ministral": (
        "ministral",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 100,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "pad_token_id": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "olmo2": ("olmo2", {"num_attention_heads": 3, "num_key_value_heads": 3, "pad_token_id": 0}),
    "olmo3": (
        "olmo3",
        {
            "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 4, "sliding_window": 100,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}, "pad_token_id": 0,
        },
    ),
    "seed_oss": (
        "seed_oss",
        {
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
            "pad_token_id": 0,
        },
    ),
    "smollm3": (
        "smollm3", {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4, "pad_token_id": 0},
    ),
    "mixtral": (
        "mixtral",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 7, "num_experts_per_tok": 2},
    ),
}  # fmt: skip


def make_gpu_model(family: str, options: dict[str, Any]) -> Any:
    """transformers' model in float32, whose weights have the spread of trained models of this width."""
    options = {**COMMON, "rope_parameters": PLAIN, **options}
    if family.startswith("gemma3"):
        options["rope_parameters"] = {"full_attention": {**PLAIN, "rope_theta": 1e6}, "sliding_attention": PLAIN}
    if family in ("phi3", "gemma3", "gemma3_wrapped"):
        options["pad_token_id"] = 0
    model = make_family_model(family, options, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.2)
    return model


def save_gpu_model(directory: Path, family: str, options: dict[str, Any]) -> Path:
    """Writes `make_gpu_model`'s checkpoint in bfloat16; returns the directory."""
    make_gpu_model(family, options).bfloat16().save_pretrained(directory)
    return directory
