"""Reads a model's config.json and generation_config.json: the only place that knows Hugging Face's quirks."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.layers.rope_config import RopeConfig

ARCHITECTURES = ("Qwen3ForCausalLM",)
ROPE_KINDS = ("default", "linear", "yarn")

# generation_config.json's names -> SamplingParams'.
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
    "stop_strings": "stop",
}
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# What changes no token: ids, caches, speed, what else is returned, and settings of beams alone.
_NO_SAMPLING_NAMES = re.compile(
    "do_sample|max_length|(pad|bos|eos|decoder_start)_token_id|transformers_version|_from_model_config|use_cache|"
    "cache_.*|max_cache_len|output_.*|return_.*|remove_invalid_values|renormalize_logits|length_penalty|early_stopping|"
    "low_memory|compile_config|disable_compile|prefill_chunk_size|continuous_batching_config|use_mtp|is_assistant|"
    ".*assistant_.*|.*_lookbehind|speculation_type|prompt_lookup_num_tokens|max_matching_ngram_size|_.*|chat_format|"
    "max_window_size"
)
# What changes tokens unless it has this value, or is null, false, 0 or empty.
_NEUTRAL = {
    "typical_p": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "top_h": 1,
}


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one model, checked. Names are the Hugging Face ones."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    rope: RopeConfig
    max_position: int  # most tokens the model was made for, scaling included
    dtype: str | None  # of the checkpoint, as "bfloat16"
    eos_token_ids: frozenset[int]
    generation: dict[str, Any]  # generation_config.json, for the recommended sampling

    @property
    def num_kv_values_per_token(self) -> int:
        """Numbers that the KV cache keeps for one token, all layers and heads: 2 × layers × heads × head_dim."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Numbers in all weight matrices."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + (2 - self.tie_word_embeddings) * self.vocab_size * self.hidden_size

    def check_parallel_size(self, size: int) -> None:
        """Raises a ValueError that names the sizes that work, unless the model can be split over `size` ranks."""

        def divides(n: int) -> bool:
            num_kv_heads = self.num_key_value_heads  # of which several ranks may hold the same
            is_even = self.num_attention_heads % n == 0 and self.intermediate_size % n == 0
            return is_even and (num_kv_heads % n == 0 or n % num_kv_heads == 0)

        if not divides(size):
            sizes = ", ".join(str(n) for n in range(1, self.num_attention_heads + 1) if divides(n))
            raise ValueError(
                f"tensor_parallel_size={size} does not divide the model's {self.num_attention_heads} attention heads, "
                f"{self.num_key_value_heads} key/value heads and intermediate size {self.intermediate_size}; {sizes} do"
            )


def load_model_config(directory: Path) -> ModelConfig:
    """Reads the config of the model in `directory`.

    Raises:
        ValueError: the file is missing or not JSON, a field is missing or wrong, or the model needs something
            that is not implemented; the message says which and what there is.
    """
    raw = _read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    found = _list(raw, "architectures")
    architecture = next((name for name in found if name in ARCHITECTURES), None)
    if architecture is None:
        raise ValueError(f"{directory} holds the architecture {found}; supported: {', '.join(ARCHITECTURES)}")
    if raw.get("use_sliding_window") or any(kind != "full_attention" for kind in _list(raw, "layer_types")):
        raise ValueError("sliding-window attention is not supported (use_sliding_window, layer_types)")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; silu is")
    if raw.get("quantization_config"):
        raise ValueError("quantized checkpoints are not supported (quantization_config)")

    num_heads = _count(raw, "num_attention_heads")
    num_kv_heads = _count(raw, "num_key_value_heads", default=num_heads)
    hidden_size = _count(raw, "hidden_size")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    # Qwen3 checkpoints always name head_dim; transformers' default for one that does not is 128.
    head_dim = _count(raw, "head_dim", default=128)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotary embedding")
    max_position = _count(raw, "max_position_embeddings", default=32768)
    rope = _rope(raw, max_position)
    if rope.kind != "default":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_hidden_layers=_count(raw, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", default=1e-6),
        attention_bias=_flag(raw, "attention_bias", default=False),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", default=False),
        rope=rope,
        max_position=max_position,
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_token_ids=_eos_token_ids(generation) or _eos_token_ids(raw),
        generation=generation,
    )


def _rope(raw: dict[str, Any], max_position: int) -> RopeConfig:
    """transformers 4: rope_theta and rope_scaling; 5: both in rope_parameters."""
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise ValueError(f"{name} in config.json must be one object for all layers, not {given!r}")
        fields.update(given)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")
    theta = _number(fields if "rope_theta" in fields else raw, "rope_theta", default=10000.0)
    if fields.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(fields, "factor")
    if factor < 1:
        raise ValueError(f"rope scaling {kind!r} needs a factor of at least 1, not {factor!r}")
    names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    given = {name: _number(fields, name) for name in names if fields.get(name)}  # 0 counts as absent
    original = _count(fields, "original_max_position_embeddings", default=max_position)
    return RopeConfig(theta, kind, factor, original, truncate=_flag(fields, "truncate", default=True), **given)


def recommended_sampling(generation: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a generation_config.json recommends: (parameters of SamplingParams, settings that we cannot follow).

    The second are those that change which tokens come out and that we lack or do not know.
    """
    is_greedy = generation.get("do_sample") is False
    params, others = {}, {}
    for name, value in generation.items():
        if name in _SAMPLING_NAMES:
            # transformers leaves the filters in the file when do_sample is false; they mean nothing then.
            if value is not None and not (is_greedy and name in _ONLY_WHEN_SAMPLING):
                params[_SAMPLING_NAMES[name]] = value
        elif value and value != _NEUTRAL.get(name) and not _NO_SAMPLING_NAMES.fullmatch(name):
            others[name] = value
    if is_greedy:
        params["temperature"] = 0.0
    return params, others


def _eos_token_ids(raw: dict[str, Any]) -> frozenset[int]:
    given = raw.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {given!r}")
    return frozenset(ids)


def _list(raw: dict[str, Any], name: str) -> list[Any]:
    value = raw.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} in config.json must be a list, not {value!r}")
    return value


def _given(raw: dict[str, Any], name: str, default: Any) -> Any:
    value = raw.get(name)
    return default if value is None else value


def _flag(raw: dict[str, Any], name: str, default: bool) -> bool:
    value = _given(raw, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} in config.json must be true or false, not {value!r}")
    return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _given(raw, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} in config.json must be a positive number, not {value!r}")
    return float(value)


def _count(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _given(raw, name, default)
    if value is None:
        raise ValueError(f"config.json has no {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} in config.json must be a positive integer, not {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; model must be a directory in the Hugging Face layout") from None
    except (OSError, ValueError) as error:  # unreadable, not UTF-8 or not JSON
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content
