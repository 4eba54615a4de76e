"""Multimodal checkpoints whose text part is one of our decoders: what config.json and the tensors' names look like.

A wrapper's config.json has the text part's fields in text_config, and its checkpoint puts a prefix before the text
part's names. The other parts, such as the vision tower, are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.models.directory import stores_lm_head
from nanovllm.models.families import FAMILIES, Family
from nanovllm.models.json_fields import read_count, read_flag, shown

# The prefixes of the text part's names: that of transformers' modules, two of older checkpoints, that of a text model,
# and none. Some are only before the LM head.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
# Parts for images, videos and sounds, and for multi-token prediction, with or without "model.".
OTHER_PARTS = ("audio_tower.", "mtp.", "multi_modal_projector.", "vision_model.", "vision_tower.", "visual.")


# Fields of the text part that decide its layers. Some checkpoints have them beside text_config too.
_OF_LAYERS = (
    "full_attention_interval", "layer_types", "max_position_embeddings", "max_window_layers", "num_hidden_layers",
    "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "sliding_window_pattern",
    "use_sliding_window",
)  # fmt: skip
# Fields with the ids of Qwen's placeholder tokens, and transformers' defaults.
_QWEN_PLACEHOLDERS = {"image_token_id": 151655, "video_token_id": 151656}
_QWEN3_5_PLACEHOLDERS = {"image_token_id": 248056, "video_token_id": 248057}


@dataclass(frozen=True)
class Wrapper:
    """One architecture that wraps a text part.

    Args:
        model_type: config.json's model_type, which names the architecture where `architectures` does not.
        text_type: the model_type of the text part, if text_config does not say it.
        placeholders: fields of config.json that hold the ids of tokens in whose place an image, a video or a sound
            goes, and transformers' defaults. Tokens around them, such as vision_start_token_id, are ordinary tokens.
        synonyms: model_types of text_config that mean text_type, as the wrapper's own does.
        takes_any_text: the text part may be of any family that its model_type names.
    """

    model_type: str
    text_type: str
    placeholders: Mapping[str, int]
    synonyms: tuple[str, ...] = ()
    takes_any_text: bool = False


WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper(
        # Chat templates write boi_token_index for an image. Its processor puts the other token behind it.
        "gemma3", "gemma3_text", {"image_token_index": 262144, "boi_token_index": 255999},
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3", "mistral", {"image_token_index": 10}, takes_any_text=True
    ),
    "Qwen2VLForConditionalGeneration": Wrapper("qwen2_vl", "qwen2_vl_text", _QWEN_PLACEHOLDERS, ("qwen2",)),
    "Qwen2_5_VLForConditionalGeneration": Wrapper("qwen2_5_vl", "qwen2_5_vl_text", _QWEN_PLACEHOLDERS, ("qwen2",)),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5", "qwen3_5_text", _QWEN3_5_PLACEHOLDERS),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_5_moe", "qwen3_5_moe_text", _QWEN3_5_PLACEHOLDERS),
    "Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl", "qwen3_vl_text", _QWEN_PLACEHOLDERS, ("qwen3",)),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(
        "qwen3_vl_moe", "qwen3_vl_moe_text", _QWEN_PLACEHOLDERS, ("qwen3_moe",)
    ),
}  # fmt: skip

_QWEN2_VL = {
    "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "sliding_window": 4096, "max_window_layers": 80,
}  # fmt: skip
_QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 5e5}
# Text parts that differ from a decoder of FAMILIES, mostly in the defaults of their fields. A text token has the same
# position on all three axes of mrope, so its rotary embedding is the ordinary one.
_TEXT_FAMILIES = [
    replace(FAMILIES["Qwen2ForCausalLM"], model_type="qwen2_vl_text", defaults=_QWEN2_VL),
    replace(FAMILIES["Qwen2ForCausalLM"], model_type="qwen2_5_vl_text", defaults=_QWEN2_VL),
    replace(
        FAMILIES["Qwen3ForCausalLM"], model_type="qwen3_vl_text", windows="none",
        defaults={**_QWEN3_VL, "head_dim": 128, "num_key_value_heads": 32},
    ),
    replace(
        FAMILIES["Qwen3MoeForCausalLM"], model_type="qwen3_vl_moe_text", windows="none",
        defaults={**_QWEN3_VL, "num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts_per_tok": 4},
        # The weights of a token's experts always add up to 1.
        reads=tuple(set(FAMILIES["Qwen3MoeForCausalLM"].reads) - {"norm_topk_prob"}),
    ),
]  # fmt: skip


def unwrap(wrapper: Wrapper, raw: dict[str, Any], directory: Path) -> tuple[Family, dict[str, Any], dict[str, int]]:
    """The text part's family, its fields, and the ids of placeholder tokens by their fields' names.

    Published configs of Qwen2-VL and Qwen2.5-VL have no text_config, but the text part's fields beside vision_config.

    Args:
        raw: config.json.

    Raises:
        ValueError: config.json has no text part, or one that is not supported.
    """
    text = raw.get("text_config")
    if text is None and raw.get("hidden_size") is not None:
        text = raw
    if not isinstance(text, dict):
        problem = "; it is missing" if text is None else f", not {shown(text)}"
        raise ValueError(f"text_config in config.json must be an object with the text part's fields{problem}")
    families = {family.model_type: family for family in (*FAMILIES.values(), *_TEXT_FAMILIES)}
    text_type, names = text.get("model_type"), (wrapper.text_type, *wrapper.synonyms)
    if text_type is None or text_type in (wrapper.model_type, *names):
        family = families[wrapper.text_type]
    elif wrapper.takes_any_text and str(text_type) in families:
        family = families[text_type]
    else:
        raise ValueError(
            f"text_config in config.json has the model_type {shown(text_type)}, which is not supported in "
            f"{wrapper.model_type}; supported: {', '.join(families if wrapper.takes_any_text else names)}"
        )
    fields = dict(text)
    # As in transformers: the wrapper's own field counts before the text part's.
    for names in (("dtype", "torch_dtype"), ("eos_token_id",), ("quantization_config",), ("tie_word_embeddings",)):
        if given := {name: raw[name] for name in names if raw.get(name) is not None}:
            fields |= dict.fromkeys(names) | given
    # transformers 5 writes true for each Mistral 3. It ties only those that do not store an LM head of their own.
    name = "tie_word_embeddings"
    if read_flag(fields, name, default=False) and not read_flag(text, name, family.defaults.get(name, False)):
        fields[name] = not stores_lm_head(directory)
    ids = {name: _placeholder(raw, name, default) for name, default in wrapper.placeholders.items()}
    return family, fields, ids


def fields_beside(raw: dict[str, Any]) -> dict[str, Any]:
    """The text part's fields that config.json has beside text_config, where transformers does not read them."""
    return {name: raw[name] for name in _OF_LAYERS if raw.get(name) is not None and raw.get("text_config") is not None}


def _placeholder(raw: dict[str, Any], name: str, default: int) -> int:
    """transformers reads image_token_id as another name of image_token_index."""
    names = [each for each in dict.fromkeys((name, name.replace("_index", "_id"))) if raw.get(each) is not None]
    ids = {read_count(raw, each, minimum=0) for each in names}
    if len(ids) > 1:
        raise ValueError(f"{' and '.join(names)} in config.json differ; keep only {name}")
    return ids.pop() if ids else default


def is_of_other_part(name: str) -> bool:
    """Whether a tensor of a wrapped checkpoint belongs to another part than text."""
    return name.removeprefix("model.").startswith(OTHER_PARTS)
