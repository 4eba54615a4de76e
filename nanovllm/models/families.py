"""The supported architectures, and how each of them differs from Llama: one row of flags per architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Family:
    """Flags of one architecture.

    Args:
        model_type: config.json's model_type, which names the architecture where `architectures` does not.
        defaults: transformers' defaults for fields that config.json may leave out, where they differ from those of
            `load_model_config`. They must include max_position_embeddings.
        windows: which layers have a sliding window if layer_types does not say so: "none", "all" (if there is a
            sliding_window), "listed" (as "all", but here layer_types may differ), "switched" (all, if
            use_sliding_window), "upper" (from max_window_layers on, if use_sliding_window), "alternate" (every second
            layer, the first included, below max_window_layers, if use_sliding_window), "unrotated" (those without a
            rotary embedding, if use_sliding_window), or "pattern" (all but every nth; see window_period).
        window_period: n of the windows "pattern". Where `reads` has sliding_window_pattern, config.json may say it.
        local_theta: the field of config.json with the theta of layers with a window, whose rotary embedding is not
            scaled; "" if all layers have the same rotary embedding.
        names_stretched_length: max_position_embeddings is the length after linear stretching.
        longrope_names: rope types that mean LongRoPE, besides "longrope" and "su".
        qkv_bias: True: queries, keys and values have a bias, unless the config has qkv_bias=false, and the attention's
            output has none. None: attention_bias decides for all four, but attention_out_bias for the output, if read.
        qk_norm: "head": each query head and each key head is normalized on its own. "projection": all query heads are
            normalized together, and all key heads. "": none is.
        stores_merged: the projections that the checkpoint merges: "qkv_proj" (queries, keys, values), "gate_up_proj",
            "in_proj_qkvz" (those of a gated DeltaNet, grouped by key head; in_proj_ba is then merged too).
        norm_offset: a number that is added to the stored weights of norms.
        has_pre_norms: the inputs of attention and MLP are normalized.
        has_post_norms: the outputs of attention and MLP are normalized, before they are added to the residual.
        scales_embedding: embeddings are multiplied by sqrt(hidden_size), rounded to their dtype.
        num_experts_names: layers have a mixture of experts instead of an MLP, and the first of these fields of
            config.json that is there gives the number of experts. Qwen's models may mix layers of both kinds.
        full_attention_interval: if n, every nth layer has attention and the others are gated DeltaNets, unless
            config.json has layer_types or a field of this name. 0: all layers have attention.
        has_gates: q_proj also holds gates, whose sigmoid multiplies the outputs of attention.
        has_other_parts: checkpoints may hold other parts than the model, such as multi-token prediction; nanovllm
            skips them.
        needs: values that fields of config.json must have if they are there.
        renames: parts of our tensors' names, and the checkpoint's names for them.
        reads: fields of `read_config.OPTIONAL` that the architecture reads, or that it has and ignores, such as
            attention_bias in Qwen2.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"
    window_period: int = 0
    local_theta: str = ""
    names_stretched_length: bool = False
    longrope_names: tuple[str, ...] = ()
    qkv_bias: bool | None = None
    qk_norm: str = ""
    stores_merged: tuple[str, ...] = ()
    norm_offset: float = 0.0
    has_pre_norms: bool = True
    has_post_norms: bool = False
    scales_embedding: bool = False
    num_experts_names: tuple[str, ...] = ()
    full_attention_interval: int = 0
    has_gates: bool = False
    has_other_parts: bool = False
    needs: Mapping[str, Any] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    reads: tuple[str, ...] = ()


_MULTIPLIERS = (
    "attention_bias", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip
_QWEN3_5: dict[str, Any] = {
    "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_QWEN3_5_MOE: dict[str, Any] = {
    **_QWEN3_5, "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_OF_QWEN3_5 = Family(
    "qwen3_5_text", {**_QWEN3_5, "num_key_value_heads": 4}, qk_norm="head", norm_offset=1.0,
    full_attention_interval=4, has_gates=True, has_other_parts=True,
    needs={
        "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "hidden_act": "silu",
    },
    reads=("attention_bias", "partial_rotary_factor", "full_attention_interval"),
)  # fmt: skip
_MOE_FIELDS = ("moe_intermediate_size", "shared_expert_intermediate_size")
FAMILIES = {
    "Gemma3ForCausalLM": Family(
        "gemma3_text", {
            "head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_theta": 1e6,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
        },
        windows="pattern", window_period=6, local_theta="rope_local_base_freq", names_stretched_length=True,
        qk_norm="head", norm_offset=1.0, has_post_norms=True, scales_embedding=True,
        reads=("attention_bias", "query_pre_attn_scalar", "hidden_activation", "sliding_window_pattern"),
    ),
    "GraniteForCausalLM": Family(
        "granite", {"max_position_embeddings": 2048, "attention_multiplier": 1}, reads=(*_MULTIPLIERS, "mlp_bias")
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid", {
            "max_position_embeddings": 2048, "attention_multiplier": 1, "shared_intermediate_size": 1024,
            "num_local_experts": 8, "position_embedding_type": "nope",
        },
        stores_merged=("gate_up_proj",),
        renames=((".mlp.", ".shared_mlp."), (".gate_up_proj.", ".input_linear."), (".down_proj.", ".output_linear.")),
        reads=(*_MULTIPLIERS, "shared_intermediate_size", "position_embedding_type", "layers_block_type"),
    ),
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}, reads=("attention_bias", "mlp_bias")),
    "Ministral3ForCausalLM": Family(
        "ministral3", {
            "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
        windows="all",
    ),
    "MinistralForCausalLM": Family(
        "ministral", {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows="listed",
    ),
    "MistralForCausalLM": Family(
        "mistral", {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}, windows="all"
    ),
    "MixtralForCausalLM": Family(
        "mixtral", {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_experts_per_tok": 2, "num_local_experts": 8,
        },
        windows="all", num_experts_names=("num_experts", "num_local_experts"),
        renames=(
            (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."),
        ),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        qk_norm="projection", has_pre_norms=False, has_post_norms=True, reads=("attention_bias",),
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", {
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5,
        },
        windows="pattern", window_period=4, local_theta="rope_theta", qk_norm="projection", has_pre_norms=False,
        has_post_norms=True, reads=("attention_bias",),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8,
        },
        qk_norm="projection", num_experts_names=("num_local_experts", "num_experts"),
        reads=("attention_bias", "norm_topk_prob"),
    ),
    "Phi3ForCausalLM": Family(
        "phi3", {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        windows="all", longrope_names=("yarn",), stores_merged=("qkv_proj", "gate_up_proj"),
        reads=("partial_rotary_factor",),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        windows="upper", qkv_bias=True, reads=("attention_bias",),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", {
            "num_key_value_heads": 16, "max_position_embeddings": 32768, "sliding_window": 4096,
            "max_window_layers": 28, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        windows="alternate", qkv_bias=True, num_experts_names=("num_experts",),
        reads=(
            "qkv_bias", "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step",
            "mlp_only_layers", "norm_topk_prob",
        ),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", {"head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        windows="upper", qk_norm="head", reads=("attention_bias",),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096,
            "moe_intermediate_size": 768,
        },
        windows="switched", qk_norm="head", num_experts_names=("num_local_experts", "num_experts"),
        reads=(
            "attention_bias", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob",
        ),
    ),
    "Qwen3NextForCausalLM": replace(
        _OF_QWEN3_5, model_type="qwen3_next", stores_merged=("in_proj_qkvz",), num_experts_names=("num_experts",),
        defaults={
            **_QWEN3_5_MOE, "intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        reads=(*_OF_QWEN3_5.reads, *_MOE_FIELDS, "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"),
    ),
    "Qwen3_5ForCausalLM": _OF_QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(
        _OF_QWEN3_5, model_type="qwen3_5_moe_text", num_experts_names=("num_experts",),
        defaults={
            # intermediate_size is not used: all layers have experts.
            **_QWEN3_5_MOE, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        },
        reads=(*_OF_QWEN3_5.reads, *_MOE_FIELDS),
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss", {
            "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288, "attention_bias": True,
            "attention_out_bias": False,
        },
        reads=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True,
            "rope_theta": 2e6, "no_rope_layer_interval": 4,
        },
        windows="unrotated", reads=("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
    ),
}  # fmt: skip
