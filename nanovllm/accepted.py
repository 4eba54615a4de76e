"""Keywords of vLLM that nanovllm accepts although it has no such option: tables, with the reason for each.

A keyword that means something here is never in these tables: it has a name of ours, or it is refused. docs/vllm.md
lists them all.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Accepted(NamedTuple):
    """A keyword that nanovllm accepts.

    reason: why it changes nothing here. For a keyword of which only some values are accepted, what to do instead of the
        others.
    values: the values that are accepted, which all ask for what nanovllm does anyway; None accepts every value.
    same_as: another keyword, whose value is accepted too.
    """

    reason: str
    values: tuple[Any, ...] | None = None
    same_as: str | None = None

    def takes(self, value: Any, others: Mapping[str, Any] = MappingProxyType({})) -> bool:
        if isinstance(value, (list, tuple)) and value and all(each is None for each in value):
            value = None  # one per prompt
        elif hasattr(value, "item") and getattr(value, "size", 0) == 1:  # NumPy's numbers
            value = value.item()
        is_plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
        is_same = is_plain and self.same_as is not None and value == others.get(self.same_as)
        return self.values is None or is_same or (is_plain and value in self.values)


def _only(*values: Any, instead: str, same_as: str | None = None) -> Accepted:
    return Accepted(instead, (None, *values), same_as)


# vLLM's names of options that nanovllm has under a name of its own.
RENAMED_OPTIONS = {
    "block_size": "kvcache_block_size", "num_gpu_blocks_override": "num_kvcache_blocks", "task": "runner",
    "override_pooler_config": "pooler_config",
}  # fmt: skip

_CAPTURES = "nanovllm itself chooses the steps that it captures; enforce_eager=True captures none"
TEXT_ONLY = "nanovllm reads text only"
_LLGUIDANCE = "llguidance is nanovllm's only backend of structured outputs"
_HEADS = "the checkpoint says which head a model has; load one of …ForSequenceClassification"
_NO_DRAFTS = "nanovllm has no speculative decoding; leave it out"
ADAPTERS = "pass a LoRARequest as lora_request to a call; see docs/lora.md"
EDIT_CONFIG = "edit config.json in a copy of the model's directory"
REPLICAS = "a job's --data-parallel-size runs several LLMs; see docs/jobs.md"
UPDATE_WEIGHTS = "llm.update_weights() changes the weights of all ranks"
CHOOSE = "ask for n completions, and choose among them by their log-probabilities"
NO_TRANSFERS = "nanovllm moves no KV cache between processes; leave it out"
PROFILE = "bench.py --profile writes a profile"
_FILE_BY_FILE = "nanovllm reads a checkpoint file by file"
_FINISHED = "nanovllm returns only finished completions"
_NO_BEAMS = "nanovllm has no beam search; leave it out"
_ONE_HOST = "tensor_parallel_size divides a model over the GPUs of one host"

ACCEPTED_OPTIONS: Mapping[str, Accepted] = {
    # These change nothing here, with any value.
    "trust_remote_code": Accepted("nanovllm never runs code from a model's directory"),
    "disable_log_stats": Accepted("nanovllm logs no statistics; llm.metrics() returns them"),
    "disable_log_requests": Accepted("nanovllm logs no requests"),
    "enable_log_requests": Accepted("nanovllm logs no requests"),
    "swap_space": Accepted("nanovllm recomputes preempted requests instead of swapping their blocks"),
    "preemption_mode": Accepted("nanovllm recomputes preempted requests instead of swapping their blocks"),
    "use_v2_block_manager": Accepted("nanovllm has one block manager"),
    "enable_chunked_prefill": Accepted("nanovllm computes long prompts in chunks, which changes no result"),
    "max_num_partial_prefills": Accepted("nanovllm itself decides how many prompts a step computes in part"),
    "max_long_partial_prefills": Accepted("nanovllm itself decides how many prompts a step computes in part"),
    "num_scheduler_steps": Accepted("nanovllm launches a step before it has read the previous one's tokens"),
    "multi_step_stream_outputs": Accepted(_FINISHED),
    "stream_interval": Accepted(_FINISHED),
    "scheduler_delay_factor": Accepted("nanovllm itself decides how many prompts it gathers for a step"),
    "distributed_executor_backend": Accepted("nanovllm starts the ranks of a model itself"),
    "worker_use_ray": Accepted("nanovllm starts the ranks of a model itself"),
    "disable_custom_all_reduce": Accepted("nanovllm uses NCCL where GPUs cannot reach each other's memory"),
    "enable_sleep_mode": Accepted("llm.sleep() needs no option"),
    "enable_cumem_allocator": Accepted("llm.sleep() needs no option"),
    "compilation_config": Accepted(_CAPTURES),
    "cudagraph_capture_sizes": Accepted(_CAPTURES),
    "max_cudagraph_capture_size": Accepted(_CAPTURES),
    "optimization_level": Accepted(_CAPTURES),
    "max_seq_len_to_capture": Accepted("nanovllm's captured steps serve sequences of any length"),
    "max_context_len_to_capture": Accepted("nanovllm's captured steps serve sequences of any length"),
    "disable_cascade_attn": Accepted("prefix_grouping is nanovllm's option, and on by default; it changes no result"),
    "async_scheduling": Accepted("overlap is nanovllm's option, and on by default; it changes no result"),
    "disable_async_output_proc": Accepted("overlap is nanovllm's option, and on by default; it changes no result"),
    "prefix_caching_hash_algo": Accepted("nanovllm compares the tokens of every match, so no hash decides a result"),
    "guided_decoding_backend": Accepted(_LLGUIDANCE),
    "guided_decoding_disable_fallback": Accepted(_LLGUIDANCE),
    "structured_outputs_config": Accepted(_LLGUIDANCE),
    "served_model_name": Accepted("nanovllm serves no API"),
    "limit_mm_per_prompt": Accepted(TEXT_ONLY),
    "disable_mm_preprocessor_cache": Accepted(TEXT_ONLY),
    "mm_processor_cache_gb": Accepted(TEXT_ONLY),
    "mm_processor_cache_type": Accepted(TEXT_ONLY),
    "mm_encoder_tp_mode": Accepted(TEXT_ONLY),
    "skip_mm_profiling": Accepted(TEXT_ONLY),
    "disable_chunked_mm_input": Accepted(TEXT_ONLY),
    "media_io_kwargs": Accepted(TEXT_ONLY),
    "language_model_only": Accepted(TEXT_ONLY),
    "use_tqdm_on_load": Accepted("nanovllm shows no progress bar while it loads a model"),
    "max_parallel_loading_workers": Accepted(_FILE_BY_FILE),
    "safetensors_load_strategy": Accepted(_FILE_BY_FILE),
    "pt_load_map_location": Accepted("nanovllm reads only safetensors"),
    "tokenizer_pool_size": Accepted("nanovllm tokenizes in its own process"),
    "tokenizer_pool_type": Accepted("nanovllm tokenizes in its own process"),
    "max_logprobs": Accepted("a request may ask for 128 log-probabilities per token, whatever the limit"),
    "tokenizer_mode": Accepted("nanovllm loads the tokenizer that the directory holds"),
    "code_revision": Accepted("nanovllm never runs code from a model's directory"),
    "reasoning_parser": Accepted("nanovllm returns the whole text, the reasoning included"),
    "enable_reasoning": Accepted("nanovllm returns the whole text, the reasoning included"),
    # nanovllm accepts only the values of these that ask for what it does anyway.
    "pipeline_parallel_size": _only(1, instead="tensor_parallel_size divides a model over GPUs"),
    "data_parallel_size": _only(1, instead=REPLICAS),
    "data_parallel_rank": _only(0, instead=REPLICAS),
    "data_parallel_size_local": _only(1, instead=REPLICAS),
    "data_parallel_backend": _only("mp", instead=REPLICAS),
    "decode_context_parallel_size": _only(1, instead="tensor_parallel_size divides a model over GPUs"),
    "nnodes": _only(1, instead=_ONE_HOST),
    "node_rank": _only(0, instead=_ONE_HOST),
    "enable_expert_parallel": _only(False, instead="tensor_parallel_size divides every expert over GPUs"),
    "enable_eplb": _only(False, instead="tensor_parallel_size divides every expert over GPUs"),
    "moe_backend": _only("auto", instead="nanovllm itself chooses the kernels; leave it out"),
    "attention_config": _only({}, instead="attention_backend chooses the kernels of attention"),
    "cpu_offload_gb": _only(0, instead='use quantization="fp8" or tensor_parallel_size to make a model fit'),
    "max_cpu_loras": Accepted("nanovllm reads an adapter again when it needs it"),
    "fully_sharded_loras": Accepted("nanovllm divides an adapter as it divides the layer"),
    "lora_extra_vocab_size": _only(256, 0, instead="nanovllm takes no adapters with tokens of their own"),
    "lora_dtype": _only("auto", instead="nanovllm keeps adapters in the model's dtype"),
    "enable_lora_bias": _only(False, instead="nanovllm takes no adapters with biases"),
    "default_mm_loras": _only(instead=TEXT_ONLY),
    "enable_prompt_adapter": _only(False, instead="nanovllm has no prompt adapters; leave it out"),
    "speculative_config": _only(instead=_NO_DRAFTS),
    "speculative_model": _only(instead=_NO_DRAFTS),
    "num_speculative_tokens": _only(instead=_NO_DRAFTS),
    "ngram_prompt_lookup_max": _only(instead=_NO_DRAFTS),
    "num_lookahead_slots": _only(0, instead=_NO_DRAFTS),
    "kv_transfer_config": _only(instead=NO_TRANSFERS),
    "kv_events_config": _only(instead=NO_TRANSFERS),
    "kv_offloading_size": _only(instead="nanovllm moves no KV cache to the host; leave it out"),
    "hf_config_path": _only(instead=EDIT_CONFIG),
    "rope_scaling": _only({}, instead=EDIT_CONFIG),
    "rope_theta": _only(instead=EDIT_CONFIG),
    "hf_token": _only(True, instead="set HF_TOKEN in the environment"),
    "download_dir": _only(instead="set HF_HUB_CACHE to it in the environment"),
    "ignore_patterns": _only([], (), instead="nanovllm downloads only config, tokenizer and safetensors"),
    "model_loader_extra_config": _only({}, instead=_FILE_BY_FILE),
    "config_format": _only("auto", "hf", instead="nanovllm reads config.json"),
    "kv_cache_memory_bytes": _only(instead="gpu_memory_utilization or num_kvcache_blocks limits the KV cache"),
    "profiler_config": _only(instead=PROFILE),
    "ray_workers_use_nsight": _only(False, instead=PROFILE),
    "otlp_traces_endpoint": _only(instead="llm.metrics() returns counters and times"),
    "collect_detailed_traces": _only(instead="llm.metrics() returns counters and times"),
    "tokenizer_revision": _only("main", instead="pass the directory of that revision's tokenizer as tokenizer=…"),
    "skip_tokenizer_init": _only(False, instead="pass token ids as prompts, and SamplingParams(detokenize=False)"),
    "model_impl": _only("auto", "vllm", instead="nanovllm has one implementation of each model"),
    "convert": _only("auto", "none", "embed", "reward", "classify", instead=_HEADS),
    "scheduling_policy": _only("fcfs", instead="nanovllm orders requests itself; results keep the prompts' order"),
    "logprobs_mode": _only("raw_logprobs", instead='SamplingParams(logprobs_mode="processed") chooses per request'),
    "override_generation_config": _only({}, instead="pass SamplingParams"),
    "calculate_kv_scales": _only(False, instead="nanovllm's FP8 cache scales each token, without calibration"),
    "quantization_param_path": _only(instead="nanovllm's FP8 cache scales each token, without calibration"),
    "allowed_local_media_path": _only("", instead=TEXT_ONLY),
    "enable_mm_embeds": _only(False, instead=TEXT_ONLY),
    "enable_prompt_embeds": _only(False, instead=TEXT_ONLY),
    "mm_processor_kwargs": _only({}, instead=TEXT_ONLY),
    "long_prefill_token_threshold": _only(0, instead="nanovllm itself decides how long a chunk is"),
    "disable_sliding_window": _only(False, instead="nanovllm always uses the model's sliding windows; leave it out"),
    "guided_decoding_disable_any_whitespace": _only(
        False, instead="StructuredOutputsParams(disable_any_whitespace=True) is the default"
    ),
    "scheduler_cls": _only(instead="nanovllm has one scheduler; leave it out"),
    "worker_cls": _only("auto", instead=UPDATE_WEIGHTS),
    "worker_extension_cls": _only("", instead=UPDATE_WEIGHTS),
    "weight_transfer_config": _only(instead=UPDATE_WEIGHTS),
    "additional_config": _only({}, instead="nanovllm has no plug-ins that would read it; leave it out"),
    "enable_return_routed_experts": _only(
        False, instead="nanovllm does not say which experts computed a token; leave it out"
    ),
    "logits_processors": _only([], (), instead="pass functions as SamplingParams(logits_processors=[…])"),
}

# vLLM's names of arguments of generate and chat.
RENAMED_ARGUMENTS = {"prompt_token_ids": "prompts", "messages": "conversations"}

ACCEPTED_ARGUMENTS: Mapping[str, Accepted] = {
    "chat_template_content_format": Accepted("nanovllm finds out which form of content a template reads"),
    "prompt_adapter_request": _only(instead="nanovllm has no prompt adapters; leave it out"),
    "guided_options_request": _only(instead="use SamplingParams(structured_outputs=StructuredOutputsParams(…))"),
    "priority": Accepted("nanovllm orders requests itself; results keep the prompts' order"),
    "tokenization_kwargs": _only({}, instead="pass token ids as prompts; embed() takes truncate_prompt_tokens"),
    "mm_processor_kwargs": _only({}, instead=TEXT_ONLY),
}

# vLLM's names of parameters of PoolingParams, and those that change nothing.
RENAMED_POOLING = {
    "use_activation": "normalize", "activation": "normalize", "softmax": "normalize", "pooling_type": "pooling",
}  # fmt: skip
ACCEPTED_POOLING: Mapping[str, Accepted] = {
    "requires_token_ids": Accepted("nanovllm returns the token ids of every prompt"),
    "step_tag_id": _only(instead="classify needs a head of one vector per prompt; leave it out"),
    "returned_token_ids": _only(instead="classify returns the numbers of all labels; leave it out"),
    "late_interaction_params": _only(instead="encode() returns the states of all tokens; leave it out"),
    "extra_kwargs": _only({}, instead="nanovllm has no plug-ins that would read it; leave it out"),
    "output_kind": Accepted(_FINISHED),
}

# vLLM's arguments of LoRARequest: those with another name here, and those that change nothing.
RENAMED_LORA = {"lora_local_path": "lora_path"}
ACCEPTED_LORA: Mapping[str, Accepted] = {
    "base_model_name": Accepted("nanovllm compares an adapter's tensors with the model's"),
    "load_inplace": Accepted("nanovllm reads an adapter again if its files have changed"),
    "long_lora_max_len": _only(instead="max_model_len limits all requests, with an adapter or without"),
    "tensorizer_config_dict": _only(instead="nanovllm reads adapter_model.safetensors"),
}

# The same of reset_prefix_cache.
ACCEPTED_BY_RESET = {
    "reset_running_requests": Accepted("nanovllm empties the prefix cache between calls, when nothing runs"),
    "reset_connector": _only(False, instead=NO_TRANSFERS),
}

# Attributes of vLLM's LLM that ours lacks, by what to do instead.
REFUSED_ATTRIBUTES: Mapping[str, str] = {
    UPDATE_WEIGHTS: "apply_model collective_rpc",
    CHOOSE: "beam_search",
    "llm.metrics() returns counters and times": "get_metrics",
    "llm.chat() answers conversations, and llm.render() gives their text": "preprocess_chat",
    PROFILE: "start_profile stop_profile",
    "llm.close() frees the memory": "shutdown",
    "llm.llm_engine.model_config has its values": "model_config",
    "each RequestOutput has its request_id": "request_counter",
    "llm.generate_iter() reads prompts as it needs them": "enqueue wait_for_completion _add_request _run_engine",
}


def missing_attribute(what: str, name: str, refused: Mapping[str, str] = REFUSED_ATTRIBUTES) -> AttributeError:
    """The error for an attribute that `what` lacks, with the advice that a table like REFUSED_ATTRIBUTES has."""
    advice = [f"; {advice}" for advice, names in refused.items() if name in names.split()]
    return AttributeError(f"{what} has no {name}{''.join(advice)}")


# vLLM's earlier name, whose class integrations/vllm.py has.
RENAMED_PARAMETERS = {"guided_decoding": "structured_outputs"}

ACCEPTED_PARAMETERS: Mapping[str, Accepted] = {
    "best_of": _only(1, same_as="n", instead=CHOOSE),
    "use_beam_search": _only(False, instead=_NO_BEAMS),
    "length_penalty": _only(1, instead=_NO_BEAMS),
    "early_stopping": _only(False, instead=_NO_BEAMS),
    "truncate_prompt_tokens": _only(instead="cut the prompt's token ids before the call"),
    "spaces_between_special_tokens": Accepted("nanovllm's texts are as the tokenizer decodes them"),
    "extra_args": _only({}, instead="nanovllm has no plug-ins that would read them; leave them out"),
    "skip_clone": Accepted("nanovllm copies parameters when it reads them, which is quick"),
    "flat_logprobs": Accepted("nanovllm's log-probabilities are arrays that also read like vLLM's dicts"),
    "output_kind": Accepted(_FINISHED),
    "stream_interval": Accepted(_FINISHED),
    "skip_reading_prefix_cache": _only(False, instead="pass LLM(enable_prefix_caching=False)"),
    "thinking_token_budget": _only(-1, instead="max_tokens limits thinking and answer together"),
    "repetition_detection": _only(instead="repetition_penalty and frequency_penalty make repetition rarer"),
    "logprob_token_ids": _only(instead='use logprobs=128, or allowed_token_ids with logprobs_mode="processed"'),
}

ACCEPTED_STRUCTURED_OUTPUTS: Mapping[str, Accepted] = {
    "backend": Accepted(_LLGUIDANCE),
    "disable_fallback": Accepted(_LLGUIDANCE),
    "structural_tag": _only(instead="nanovllm has no structural tags; write a grammar"),
}
