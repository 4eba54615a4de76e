"""generation_config.json: the LLM follows each of a model's recommendations, or names it in a warning."""

import json
import logging
import shutil
from typing import Any

import pytest
from transformers import GenerationConfig

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.recommended_sampling import recommended_sampling

# A setting -> a value that changes which tokens come out.
NOT_FOLLOWED = {
    "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.4, "no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2, "num_beams": 4, "num_beam_groups": 2,
    "diversity_penalty": 0.5, "num_return_sequences": 2, "penalty_alpha": 0.6, "dola_layers": "high",
    "suppress_tokens": [1, 2], "begin_suppress_tokens": [220], "forced_bos_token_id": 3, "forced_eos_token_id": 4,
    "sequence_bias": [[[5], -1.0]], "guidance_scale": 1.5, "exponential_decay_length_penalty": [15, 1.6],
    "min_length": 20, "max_time": 3.0, "constraints": ["c"], "force_words_ids": [[1]], "token_healing": True,
    "watermarking_config": {"bias": 2.5}, "a_setting_of_next_year": 1,
}  # fmt: skip
# The same settings at the value at which they do nothing.
NEUTRAL = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "num_beams": 1, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "num_return_sequences": 1, "penalty_alpha": None, "dola_layers": None,
    "suppress_tokens": None, "begin_suppress_tokens": [], "forced_bos_token_id": None, "forced_eos_token_id": None,
    "sequence_bias": None, "guidance_scale": 1, "exponential_decay_length_penalty": None, "min_length": 0,
    "max_time": None, "constraints": None, "force_words_ids": None, "token_healing": False,
    "watermarking_config": None, "a_setting_of_next_year": None,
}  # fmt: skip
FOLLOWED = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05, "presence_penalty": 1.5,
    "frequency_penalty": -0.5, "max_new_tokens": 99, "min_new_tokens": 2, "bad_words_ids": [[5], [6, 7]],
    "stop_strings": ["END"],
}  # fmt: skip
# Other settings of real files, which change no token.
BESIDE = {
    "do_sample": True, "max_length": 32768, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": [3, 4],
    "decoder_start_token_id": 5, "transformers_version": "4.51.0", "_from_model_config": True, "use_cache": True,
    "cache_implementation": "hybrid", "cache_config": {}, "return_legacy_cache": True, "output_scores": True,
    "output_attentions": True, "return_dict_in_generate": True, "remove_invalid_values": True,
    "renormalize_logits": True, "length_penalty": 2.0, "early_stopping": True, "low_memory": True,
    "num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4,
    "assistant_early_exit": 4, "is_assistant": True, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2,
    "target_lookbehind": 10, "disable_compile": True, "compile_config": {"mode": "x"}, "prefill_chunk_size": 64,
    "chat_format": "chatml", "max_window_size": 6144,
}  # fmt: skip


@pytest.fixture
def recommending(tmp_path):
    """Makes LLMs of the bundled model with another generation_config.json."""
    made = []

    def make(options: Any = (), **recommended) -> LLM:
        directory = tmp_path / f"model{len(made)}"
        shutil.copytree(MODEL_DIRECTORY, directory)
        (directory / "generation_config.json").write_text(json.dumps(recommended))
        made.append(LLM(directory, device="cpu", num_kvcache_blocks=16, **dict(options)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_every_setting_that_we_have_is_followed():
    """repetition_penalty, which Qwen2.5 recommends, was once silently ignored."""
    params, others = recommended_sampling(FOLLOWED)
    assert others == {}
    assert SamplingParams(**params) == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05, presence_penalty=1.5,
        frequency_penalty=-0.5, max_tokens=99, min_tokens=2, bad_words=[[5], [6, 7]], stop="END",
    )  # fmt: skip


def test_what_is_null_is_not_recommended():
    assert recommended_sampling(dict.fromkeys(FOLLOWED)) == ({}, {})


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_setting_that_we_lack_is_named_unless_it_is_neutral(name):
    assert recommended_sampling({name: NOT_FOLLOWED[name]}) == ({}, {name: NOT_FOLLOWED[name]})
    assert recommended_sampling({name: NEUTRAL[name]}) == ({}, {})


def test_what_changes_no_token_is_not_spoken_of():
    """Needless warnings, such as about a cache or a version, teach users to overlook warnings."""
    assert recommended_sampling(BESIDE) == ({}, {})


def test_no_setting_of_transformers_is_overlooked():
    """Each one is in one of the lists above; one of a new release counts as changing tokens until it is looked at."""
    looked_at = {*NOT_FOLLOWED, *FOLLOWED, *BESIDE}
    params, others = recommended_sampling(dict.fromkeys(vars(GenerationConfig()), "something"))
    assert set(others) <= {name for name in vars(GenerationConfig()) if name not in {*FOLLOWED, *BESIDE}}
    assert set(NOT_FOLLOWED) & set(vars(GenerationConfig())) <= set(others)
    assert len(looked_at) > 50 and len(params) >= 9


def test_greedy_recommendations_keep_what_greedy_decoding_uses():
    """transformers leaves the filters in the file when do_sample is false; they mean nothing then. Penalties do."""
    params, others = recommended_sampling({**FOLLOWED, "do_sample": False})
    assert others == {}
    assert SamplingParams(**params) == SamplingParams(
        temperature=0.0, repetition_penalty=1.05, presence_penalty=1.5, frequency_penalty=-0.5, max_tokens=99,
        min_tokens=2, bad_words=[[5], [6, 7]], stop="END",
    )  # fmt: skip


def test_an_llm_samples_as_recommended(recommending):
    recommended = {"do_sample": True, "temperature": 0.7, "top_k": -1, "repetition_penalty": 1.05}
    llm = recommending(**recommended)
    params = SamplingParams(temperature=0.7, repetition_penalty=1.05)
    assert llm.get_default_sampling_params() == params
    # Qwen2.5's own recommendation, and a minimum that exceeds our own max_tokens.
    llm = recommending(do_sample=True, min_new_tokens=100)
    assert llm.get_default_sampling_params() == SamplingParams(min_tokens=100, max_tokens=100)
    llm = recommending(temperature=0.7, options={"generation_config": "vllm"})
    assert llm.get_default_sampling_params() == SamplingParams()


def test_settings_that_we_lack_are_named_in_one_warning_per_llm(recommending, caplog):
    """A script that calls generate a thousand times gets one warning; a script with its own parameters gets none."""
    settings = {"no_repeat_ngram_size": 3, "num_beams": 1, "temperature": 0.7, "max_new_tokens": 1}
    llm = recommending(do_sample=True, typical_p=0.9, **settings)
    llm.generate("Hi", SamplingParams(max_tokens=1), use_tqdm=False)
    assert caplog.records == []
    for _ in range(3):
        llm.generate("Hi", use_tqdm=False)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, max_tokens=1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "generation_config.json asks for sampling that is not available: typical_p=0.9, no_repeat_ngram_size=3"
    )
    recommending(num_beams=4, max_new_tokens=1).generate("Hi", use_tqdm=False)
    assert "num_beams=4" in caplog.records[-1].getMessage() and len(caplog.records) == 2


@pytest.mark.parametrize(
    ("recommended", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"min_new_tokens": "many"}, "generation_config.json: .*; give sampling_params of your own"),
        ({"bad_words_ids": [5, 6]}, "generation_config.json: bad_words must be a list"),
        ({"top_k": -2}, "generation_config.json: top_k must be"),
    ],
)
def test_a_wrong_recommendation_names_its_file(recommending, recommended, message):
    with pytest.raises(ValueError, match=message):
        recommending(**recommended).generate("Hi", use_tqdm=False)
