"""Measures offline throughput: tokens per second of wall time, from the call of `generate` to its return.

    python bench.py                                     the bundled model on a small workload
    python bench.py --vs transformers                   the same requests through transformers too, with the ratio
    python bench.py --workload nano --size 0.6B         random weights of a real model's shape
    python bench.py --workload nano --size 0.6B --top-k 20 --top-p 0.95 --vs vllm
    python bench.py --workload nano --size 8B --quantization fp8 --kv-cache-dtype fp8
    python bench.py --workload classify --model Qwen/Qwen3-0.6B --embed

An offline job calls `generate` once, so the first call after start counts. The report shows it on its own
(first_seconds). The later calls follow (seconds, as many as --repeats says). All figures without "first" in their name
are from the later calls' median. Each call starts with an empty prefix cache.

Workloads (sequences; prompt tokens; output tokens): demo (64; 8-200; 8-200, greedy), nano (256; 100-1024; 100-1024),
big (2048 of nano's), prefix (2048 behind 32 shared prefixes of 1024; 16-128 more; 64-256), short (8192; 16-64; 16-64),
one (1; 128; 512), classify (2048; 300-1500; 1), docs (64; 8000-16000; 32-96, without prefix caching), samples (32
prompts; 300-900; 32 completions of 200-400 each), ctx4k (384; 2800-3000; 200-1000), queries (65536; 32; 1). The bundled
model takes 1,024 tokens, which is enough for demo, short, one and queries. The figure of interest is output tokens per
second, and for classify, docs, queries and with --embed input tokens per second.

On a GPU the report also has the roofline of the run: the throughput that this chip allows for the same steps. A step
takes at least the time to read the keys and values of its decodes, each shared one once, at the memory bandwidth
measured here. To this the roofline adds the longer of two times: reading the weights, and the arithmetic at the matrix
rate measured here. The number of experts is the mean if each expert is equally likely. Weights and caches in FP8 count
with their scales. The arithmetic of weights in FP8 counts at the rate that products in FP8 reach here, and that of
attention at the usual rate.

--vs starts the other engine after ours is closed, so that each has the machine to itself. Both get the same token ids,
sampling, dtype, quantization, KV cache dtype, max_model_len, seed, prefix caching and number of GPUs. All other options
are each engine's defaults, CPU threads included unless --threads is given. With --size, transformers loads the same
random weights as nanovllm, and vLLM makes its own.

The last line on stdout is JSON.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ours import check_lengths, make_llm, run_nanovllm
from benchmarks.peers import PEERS, Task, check_peer, measure_peer
from benchmarks.roofline import gpu_report
from benchmarks.step_profile import write_profile
from benchmarks.timing import Timing, errors_as_text, say, timed
from benchmarks.workloads import (
    SAMPLING_OPTIONS,
    SIZES,
    WORKLOADS,
    make_requests,
    write_config,
    write_random_checkpoint,
)
from nanovllm import SamplingParams
from nanovllm.config import KV_CACHE_DTYPES, QUANTIZATIONS
from nanovllm.demo import MODEL_DIRECTORY


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="demo")
    parser.add_argument("--embed", action="store_true", help="embed the prompts instead of completing them")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="directory or hub name; without it, the bundled model")
    which.add_argument("--size", choices=SIZES, help="random weights of this shape; nothing is downloaded")
    parser.add_argument("--vs", choices=PEERS, help="run the same requests through another engine too")
    parser.add_argument("--repeats", type=int, default=3, help="calls after the first; their median counts (default 3)")
    sampling = parser.add_argument_group("sampling of every request; default: the workload's temperature, all else off")
    for name, kind in SAMPLING_OPTIONS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind)
    engine = parser.add_argument_group("options of nanovllm; default: its own")
    engine.add_argument(
        "--backend", choices=("auto", "triton", "flash", "sdpa", "torch"), default="auto", help="attention backend"
    )
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--quantization", choices=QUANTIZATIONS, help="format of linear layers' weights; default: none")
    engine.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="default: the model's dtype")
    engine.add_argument("--device", default="auto")
    engine.add_argument("--max-model-len", type=int, help="with --size, default: the workload's, 4096 or 20000")
    engine.add_argument("--max-num-seqs", type=int)
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--block-size", type=int)
    engine.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs to split the model over")
    engine.add_argument("--threads", type=int, help="CPU threads of both engines, per rank; default: each engine's own")
    for flag in ("enforce-eager", "no-overlap", "no-prefix-caching", "no-prefix-grouping"):
        engine.add_argument(f"--{flag}", action="store_true")
    engine.add_argument("--deterministic", action="store_true", help="the same bytes in every batch, which is slower")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of some steps there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there as well")
    parsed = parser.parse_args(arguments)
    if parsed.repeats < 1:
        parser.error("--repeats must be at least 1")
    if parsed.embed and (parsed.vs or parsed.profile):
        parser.error("--embed goes with neither --vs nor --profile")
    if parsed.profile and parsed.tensor_parallel_size > 1:
        parser.error("--profile sees the steps of one process; use --tensor-parallel-size 1")
    sampling_options = {name: getattr(parsed, name) for name in SAMPLING_OPTIONS}
    parsed.sampling = {name: value for name, value in sampling_options.items() if value is not None}
    return parsed


def measure(arguments: argparse.Namespace, directory: str, has_weights: bool) -> tuple[dict[str, Any], Task, Timing]:
    """nanovllm's part of the report, the same task for a peer, and nanovllm's times. Closes the LLM."""
    say("nanovllm: loading the model")
    began = time.perf_counter()
    with errors_as_text():
        llm = make_llm(arguments, directory, has_weights)
    start_seconds = time.perf_counter() - began
    with llm:
        engine, info = llm.engine, llm.engine.info
        device = torch.device(info.device)
        requests = make_requests(arguments.workload, info.vocab_size, arguments.sampling, arguments.embed)
        params = None if arguments.embed else requests.sampling_params()
        check_lengths(arguments, requests, info.max_model_len)
        before: dict[str, Any] = {}

        def forget() -> None:
            engine.reset()  # no call may use the prefix cache of an earlier one
            before.update(llm.metrics())

        def run() -> list[list[int]]:
            return run_nanovllm(llm, requests, params)

        ours = timed("nanovllm", run, forget, arguments.repeats, start_seconds)
        # The counts of the last call only.
        last = {name: value - before[name] for name, value in llm.metrics().items() if isinstance(value, int)}
        assert [len(completion) for completion in ours.tokens] == requests.max_tokens
        report = {
            "workload": arguments.workload,
            "model": arguments.size or arguments.model or "bundled",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "dtype": info.dtype,
            "quantization": arguments.quantization,
            "kv_cache_dtype": engine.config.kv_cache_dtype,
            "deterministic": engine.config.deterministic,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "backend": info.attention_backend,
            "block_size": info.kvcache_block_size,
            "max_model_len": info.max_model_len,
            "max_num_seqs": engine.scheduler.max_num_seqs,
            "sampling": requests.sampling,
            "num_prompt_tokens": requests.num_prompt_tokens,
            "num_output_tokens": requests.num_output_tokens,
            **ours.report(requests),
            "mean_decodes_per_step": last["num_decode_tokens"] / max(last["num_steps"], 1),
            "prefix_cache_hit_rate": last["num_cached_prompt_tokens"] / max(last["num_prompt_tokens"], 1),
            "num_preemptions": last["num_preemptions"],
        }
        if device.type == "cuda":
            forget()
            report |= gpu_report(llm, requests, run, ours.median)
        if arguments.profile and params is not None:
            forget()
            write_profile(llm, requests, params, arguments.profile)
        task = Task(
            requests, engine.config.model, has_weights, info.dtype, info.device, info.max_model_len,
            engine.config.enable_prefix_caching, arguments.tensor_parallel_size, engine.config.seed,
            arguments.quantization, engine.config.kv_cache_dtype,
        )  # fmt: skip
    return report, task, ours


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # for ranks in other processes
    with errors_as_text():
        SamplingParams(**arguments.sampling)  # so that a mistake is found before a model starts
    if arguments.vs:
        is_fp8 = "fp8" in (arguments.quantization, arguments.kv_cache_dtype)
        check_peer(arguments.vs, arguments.sampling, is_fp8)
    with tempfile.TemporaryDirectory() as temporary:
        directory, has_weights = arguments.model or str(MODEL_DIRECTORY), True
        if arguments.size:
            directory, has_weights = temporary, arguments.vs == "transformers"
            write = write_random_checkpoint if has_weights else write_config
            write(arguments.size, Path(temporary))
        elif not arguments.model:
            say("no --model and no --size: using the bundled model")
        report, task, ours = measure(arguments, directory, has_weights)
        if arguments.vs:
            report |= measure_peer(arguments.vs, task, ours, arguments.repeats)
    for name, value in report.items():
        print(f"{name:40} {value:,.3f}" if isinstance(value, float) else f"{name:40} {value}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
