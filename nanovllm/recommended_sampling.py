"""The sampling that a model's generation_config.json recommends, as SamplingParams."""

import logging
import re
from typing import Any

from nanovllm.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

logger = logging.getLogger(__name__)

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
# Settings that change no token: ids, caches, speed, further outputs, and settings of beam search alone.
_NO_SAMPLING_NAMES = re.compile(
    "do_sample|max_length|(pad|bos|eos|decoder_start)_token_id|transformers_version|_from_model_config|use_cache|"
    "cache_.*|max_cache_len|output_.*|return_.*|remove_invalid_values|renormalize_logits|length_penalty|early_stopping|"
    "low_memory|compile_config|disable_compile|prefill_chunk_size|continuous_batching_config|use_mtp|is_assistant|"
    ".*assistant_.*|.*_lookbehind|speculation_type|prompt_lookup_num_tokens|max_matching_ngram_size|_.*|chat_format|"
    "max_window_size"
)
# Settings that change tokens unless they have this value, or are null, false, 0 or empty.
_NEUTRAL = {
    "typical_p": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "top_h": 1,
}


def recommended_sampling(generation: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recommendations of a generation_config.json: (parameters of SamplingParams, settings that we cannot follow).

    The latter are settings that change the tokens and that we lack or do not know.
    """
    is_greedy = generation.get("do_sample") is False
    params, others = {}, {}
    for name, value in generation.items():
        if name in _SAMPLING_NAMES:
            # transformers leaves the filters in the file when do_sample is false; they have no effect then.
            if value is not None and not (is_greedy and name in _ONLY_WHEN_SAMPLING):
                params[_SAMPLING_NAMES[name]] = value
        elif value and value != _NEUTRAL.get(name) and not _NO_SAMPLING_NAMES.fullmatch(name):
            others[name] = value
    if is_greedy:
        params["temperature"] = 0.0
    return params, others


class DefaultSampling:
    """The parameters that a model recommends.

    Args:
        generation: the model's generation_config.json.
        choice: the option `generation_config`.
    """

    def __init__(self, generation: dict[str, Any], choice: str = "auto"):
        self._generation = generation if choice == "auto" else {}
        self._has_warned = False

    def params(self) -> SamplingParams:
        """The recommended parameters. A warning names the settings that we cannot follow, once.

        Raises:
            ValueError: a recommended value is out of range.
        """
        values, others = recommended_sampling(self._generation)
        if others and not self._has_warned:
            self._has_warned = True
            settings = ", ".join(f"{name}={value!r}" for name, value in others.items())
            logger.warning("generation_config.json asks for sampling that is not available: %s", settings)
        try:
            if "min_tokens" in values:
                values.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, values["min_tokens"]))
            return SamplingParams(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation_config.json: {error}; give sampling_params of your own") from None
