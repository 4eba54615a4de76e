"""nanovllm as bench.py runs it."""

import argparse
from typing import Any

from benchmarks.workloads import WORKLOADS, Requests
from nanovllm import LLM, SamplingParams


def make_llm(arguments: argparse.Namespace, directory: str, has_weights: bool) -> LLM:
    """An LLM with the options of bench.py's command line."""
    workload = WORKLOADS[arguments.workload]
    options: dict[str, Any] = {
        "load_format": "auto" if has_weights else "dummy", "attention_backend": arguments.backend,
        "dtype": arguments.dtype, "device": arguments.device, "enforce_eager": arguments.enforce_eager,
        "overlap": not arguments.no_overlap, "prefix_grouping": not arguments.no_prefix_grouping,
        "enable_prefix_caching": workload.prefix_caching and not arguments.no_prefix_caching,
        "tensor_parallel_size": arguments.tensor_parallel_size, "deterministic": arguments.deterministic,
        "runner": "pooling" if arguments.embed else "auto",
    }  # fmt: skip
    given = {
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "kvcache_block_size": arguments.block_size,
        "max_model_len": arguments.max_model_len or (workload.max_model_len if arguments.size else None),
    }
    options |= {name: value for name, value in given.items() if value is not None}
    return LLM(directory, **options)


def check_lengths(arguments: argparse.Namespace, requests: Requests, max_model_len: int) -> None:
    """Ends the script if a request is too long for the model."""
    lengths = zip(requests.prompts, requests.max_tokens, strict=True)
    max_length = max(len(prompt) + max_tokens for prompt, max_tokens in lengths)
    if max_length > max_model_len:
        hint = "raise --max-model-len" if arguments.max_model_len else "use --size or another --model"
        raise SystemExit(
            f"workload {arguments.workload} has requests of up to {max_length:,} tokens, but this model takes "
            f"{max_model_len:,}; {hint}"
        )


def run_nanovllm(llm: LLM, requests: Requests, params: list[SamplingParams] | None) -> list[list[int]]:
    """The completions' token ids. Without parameters the prompts are embedded, and there are no tokens."""
    outputs: list[Any] = (
        llm.embed(requests.prompts, use_tqdm=False)
        if params is None
        else llm.generate(requests.prompts, params, use_tqdm=False)
    )
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise SystemExit(f"{len(errors)} of {len(outputs)} requests failed. The first error: {errors[0]}")
    return [[] if params is None else output.token_ids for output in outputs]
