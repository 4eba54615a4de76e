"""Keywords of vLLM that nanovllm accepts although it has no such option: tables, with the reason for each.

A keyword that means something here is never in these tables: it has a name of ours, or it is refused. docs/vllm.md
lists them all.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Accepted(NamedTuple):
    """A keyword that nanovllm accepts.

    reason: why it changes nothing here. For a keyword of which only some values are accepted, what to do instead of the
        others.
    values: the values that are accepted, which all ask for what nanovllm does anyway; None accepts every value.
    """

    reason: str
    values: tuple[Any, ...] | None = None

    def takes(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)) and value and all(each is None for each in value):
            value = None  # one per prompt
        elif hasattr(value, "item") and getattr(value, "size", 0) == 1:  # NumPy's numbers
            value = value.item()
        is_plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
        return self.values is None or (is_plain and value in self.values)


def _only(*values: Any, instead: str) -> Accepted:
    return Accepted(instead, (None, *values))


# vLLM's names of options that nanovllm has under a name of its own.
RENAMED_OPTIONS = {"block_size": "kvcache_block_size", "num_gpu_blocks_override": "num_kvcache_blocks"}

_CAPTURES = "nanovllm chooses itself which steps it captures; enforce_eager=True captures none"
_TEXT_ONLY = "nanovllm reads text only"
_LLGUIDANCE = "nanovllm's structured outputs all come from llguidance"

ACCEPTED_OPTIONS: Mapping[str, Accepted] = {
    # These change nothing here, with any value.
    "trust_remote_code": Accepted("nanovllm never runs code from a model's directory"),
    "disable_log_stats": Accepted("nanovllm logs no statistics; llm.metrics() returns them"),
    "disable_log_requests": Accepted("nanovllm logs no requests"),
    "enable_log_requests": Accepted("nanovllm logs no requests"),
    "swap_space": Accepted("nanovllm computes preempted requests again and swaps none"),
    "enable_chunked_prefill": Accepted("nanovllm computes long prompts in chunks, which changes no result"),
    "max_num_partial_prefills": Accepted("nanovllm decides itself how many prompts a step computes in part"),
    "distributed_executor_backend": Accepted("nanovllm starts the ranks of a model itself"),
    "disable_custom_all_reduce": Accepted("nanovllm takes NCCL where GPUs cannot reach each other's memory"),
    "enable_sleep_mode": Accepted("llm.sleep() needs no option"),
    "compilation_config": Accepted(_CAPTURES),
    "cudagraph_capture_sizes": Accepted(_CAPTURES),
    "max_seq_len_to_capture": Accepted("nanovllm's captured steps serve sequences of any length"),
    "disable_cascade_attn": Accepted("prefix_grouping=False is nanovllm's option; neither changes a result"),
    "async_scheduling": Accepted("overlap is nanovllm's option, and on by default; neither changes a result"),
    "guided_decoding_backend": Accepted(_LLGUIDANCE),
    "structured_outputs_config": Accepted(_LLGUIDANCE),
    "served_model_name": Accepted("nanovllm serves no API"),
    "limit_mm_per_prompt": Accepted(_TEXT_ONLY),
    "disable_mm_preprocessor_cache": Accepted(_TEXT_ONLY),
    "mm_processor_cache_gb": Accepted(_TEXT_ONLY),
    "use_tqdm_on_load": Accepted("nanovllm shows no progress of loading"),
    "max_parallel_loading_workers": Accepted("nanovllm reads a checkpoint file by file"),
    # nanovllm accepts only the values of these that ask for what it does anyway.
    "pipeline_parallel_size": _only(1, instead="tensor_parallel_size divides a model over GPUs"),
    "data_parallel_size": _only(1, instead="a job's --data-parallel-size runs several LLMs; see docs/jobs.md"),
    "enable_expert_parallel": _only(False, instead="tensor_parallel_size divides every expert over GPUs"),
    "cpu_offload_gb": _only(0, instead='quantization="fp8" and tensor_parallel_size make a model fit'),
    "enable_lora": _only(False, instead="merge the adapter into the model's weights and load the merged model"),
    "max_lora_rank": _only(16, instead="merge the adapter into the model's weights and load the merged model"),
    "max_loras": _only(1, instead="merge the adapter into the model's weights and load the merged model"),
    "enable_prompt_adapter": _only(False, instead="nanovllm has no prompt adapters"),
    "speculative_config": _only(instead="nanovllm has no speculative decoding"),
    "speculative_model": _only(instead="nanovllm has no speculative decoding"),
    "kv_transfer_config": _only(instead="nanovllm moves no KV cache between processes"),
    "hf_overrides": _only({}, instead="edit config.json in a copy of the model's directory"),
    "hf_token": _only(instead="set HF_TOKEN in the environment"),
    "download_dir": _only(instead="set HF_HUB_CACHE to it in the environment"),
    "ignore_patterns": _only([], (), instead="nanovllm downloads config, tokenizer and safetensors alone"),
    "config_format": _only("auto", "hf", instead="nanovllm reads config.json"),
    "kv_cache_memory_bytes": _only(instead="gpu_memory_utilization or num_kvcache_blocks limits the KV cache"),
    "profiler_config": _only(instead="bench.py --profile writes a profile"),
    "tokenizer_revision": _only(instead="download the tokenizer's revision and pass its directory as tokenizer=…"),
    "code_revision": _only(instead="nanovllm never runs code from a model's directory"),
    "skip_tokenizer_init": _only(False, instead="pass token ids as prompts, and SamplingParams(detokenize=False)"),
    "tokenizer_mode": _only("auto", "hf", instead="nanovllm loads the tokenizer that transformers chooses"),
    "model_impl": _only("auto", "vllm", instead="nanovllm has one implementation of each model"),
    "task": _only("auto", "generate", instead="nanovllm generates and scores text"),
    "runner": _only("auto", "generate", instead="nanovllm generates and scores text"),
    "convert": _only("auto", "none", instead="nanovllm generates and scores text"),
    "scheduling_policy": _only("fcfs", instead="nanovllm orders requests itself; results keep the prompts' order"),
    "logprobs_mode": _only("raw_logprobs", instead='SamplingParams(logprobs_mode="processed") chooses per request'),
    "max_logprobs": _only(*range(129), instead="nanovllm returns at most 128 log-probabilities per token"),
    "generation_config": _only("auto", instead="pass SamplingParams, which replace the model's recommendation"),
    "override_generation_config": _only({}, instead="pass SamplingParams"),
    "calculate_kv_scales": _only(False, instead="nanovllm's FP8 cache scales each token, without calibration"),
    "allowed_local_media_path": _only("", instead=_TEXT_ONLY),
    "mm_processor_kwargs": _only({}, instead=_TEXT_ONLY),
    "long_prefill_token_threshold": _only(0, instead="nanovllm decides itself how long a chunk is"),
    "disable_sliding_window": _only(False, instead="nanovllm attends as the model was trained"),
    "logits_processors": _only([], (), instead="logit_bias, bad_words, allowed_token_ids and penalties change logits"),
}

# vLLM's names of arguments of generate and chat.
RENAMED_ARGUMENTS = {"prompt_token_ids": "prompts", "messages": "conversations"}

ACCEPTED_ARGUMENTS: Mapping[str, Accepted] = {
    "chat_template_content_format": _only("auto", instead="nanovllm finds the form of a content that a template reads"),
    "lora_request": _only(instead="merge the adapter into the model's weights and load the merged model"),
    "prompt_adapter_request": _only(instead="nanovllm has no prompt adapters"),
    "guided_options_request": _only(instead="SamplingParams(structured_outputs=StructuredOutputsParams(…))"),
    "priority": _only(0, instead="nanovllm orders requests itself; results keep the prompts' order"),
    "tokenization_kwargs": _only({}, instead="pass token ids as prompts"),
    "mm_processor_kwargs": _only({}, instead=_TEXT_ONLY),
}

# vLLM's earlier name, whose class integrations/vllm.py has.
RENAMED_PARAMETERS = {"guided_decoding": "structured_outputs"}

ACCEPTED_PARAMETERS: Mapping[str, Accepted] = {
    "best_of": _only(1, instead="ask for n completions, and choose among them by their log-probabilities"),
    "use_beam_search": _only(False, instead="nanovllm has no beam search"),
    "length_penalty": _only(1, instead="nanovllm has no beam search"),
    "early_stopping": _only(False, instead="nanovllm has no beam search"),
    "logits_processors": _only([], (), instead="logit_bias, bad_words, allowed_token_ids and penalties change logits"),
    "truncate_prompt_tokens": _only(instead="cut the prompt's token ids before the call"),
    "spaces_between_special_tokens": _only(True, instead="nanovllm's texts are as the tokenizer decodes them"),
    "extra_args": _only({}, instead="nanovllm has no plug-ins that would read them"),
    "skip_clone": Accepted("nanovllm never changes a SamplingParams"),
    "flat_logprobs": Accepted("nanovllm's log-probabilities are arrays that also read like vLLM's dicts"),
    "output_kind": Accepted("nanovllm returns finished completions"),
    "skip_reading_prefix_cache": _only(False, instead="LLM(enable_prefix_caching=False)"),
}

ACCEPTED_STRUCTURED_OUTPUTS: Mapping[str, Accepted] = {
    "backend": Accepted(_LLGUIDANCE),
    "disable_fallback": Accepted(_LLGUIDANCE),
    "structural_tag": _only(instead="nanovllm has no structural tags; write a grammar"),
}
