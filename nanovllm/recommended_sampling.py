"""What a model's generation_config.json recommends, in the words of SamplingParams."""

import re
from typing import Any

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
