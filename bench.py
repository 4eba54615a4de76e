"""Measures offline throughput: tokens per second of wall time, from `generate` being called to its return.

    python bench.py                                     the bundled model on a small workload
    python bench.py --vs transformers                   the same requests through transformers too, with the ratio
    python bench.py --workload nano --size 0.6B         random weights of a real model's shape
    python bench.py --workload nano --size 0.6B --top-k 20 --top-p 0.95 --vs vllm
    python bench.py --workload nano --size 8B --quantization fp8 --kv-cache-dtype fp8
    python bench.py --workload classify --model Qwen/Qwen3-0.6B

An offline job calls `generate` once, so the first call after start counts. The report shows it on its own
(first_seconds). The later calls follow (seconds, as many as --repeats says). All figures without "first" in their name
are from the later calls' median. Each call starts with an empty prefix cache.

Workloads (sequences; prompt tokens; output tokens): demo (64; 8-200; 8-200, greedy), nano (256; 100-1024; 100-1024),
big (2048 of nano's), prefix (2048 behind 32 shared prefixes of 1024; 16-128 more; 64-256), short (8192; 16-64; 16-64),
one (1; 128; 512), classify (2048; 300-1500; 1), docs (64; 8000-16000; 32-96, without prefix caching), samples (32
prompts; 300-900; 32 completions of 200-400 each), ctx4k (384; 2800-3000; 200-1000). The bundled model takes 1,024
tokens, which is enough for demo, short and one. The figure of interest is output tokens per second, and for classify
and docs input tokens per second.

On a GPU the report also has the roofline of the run: the throughput that this chip allows for the very steps that were
run. A step takes at least the time to read the keys and values of its decodes, each shared one once, at the memory
bandwidth measured here, plus the longer of reading the weights and doing the arithmetic at the matrix rate measured
here. Of experts it counts as many as the tokens would choose if each were as likely as the others. Weights in FP8 count
with their scales, and their arithmetic at the rate that products in FP8 reach here. A cache in FP8 counts with its
scales too; attention's arithmetic counts at the usual rate.

--vs starts the other engine after ours is closed, so that each has the machine to itself. Both get the same token ids,
sampling, dtype, quantization, KV cache's dtype, max_model_len, seed, prefix caching and number of GPUs; all else is
each engine's own default, threads of a CPU included unless --threads is given. With --size, transformers loads the same
random weights as ours, vLLM makes up its own.

The last line on stdout is JSON.
"""

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import KV_CACHE_DTYPES, QUANTIZATIONS
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.step import Step
from nanovllm.models.config import ModelConfig
from nanovllm.models.cost import layer_matrices, step_weight_bytes, token_kv_bytes
from nanovllm.models.read_config import load_model_config
from nanovllm.runner.device import fp8_of, kv_cache_dtype_of

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 8192,
}  # fmt: skip
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# Hidden size, layers, heads, key/value heads, head_dim, intermediate size, vocabulary, tied embeddings; then what
# differs from Qwen3.
SIZES: dict[str, tuple[Any, ...]] = {
    "40M": (512, 8, 8, 4, 64, 1536, 32000, True),  # no published model; small enough for a CPU
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True),
    "4B": (2560, 36, 32, 8, 128, 9728, 151936, True),
    "8B": (4096, 36, 32, 8, 128, 12288, 151936, False),
    "14B": (5120, 40, 40, 8, 128, 17408, 151936, False),
    "32B": (5120, 64, 64, 8, 128, 25600, 151936, False),
    "30B-A3B": (2048, 48, 32, 4, 128, 6144, 151936, False, _QWEN3_MOE),
    "llama-1B": (2048, 16, 32, 8, 64, 8192, 128256, True, {**_LLAMA, "rope_parameters": {**_LLAMA3, "factor": 32.0}}),
    "llama-8B": (4096, 32, 32, 8, 128, 14336, 128256, False, {**_LLAMA, "rope_parameters": {**_LLAMA3, "factor": 8.0}}),
    "qwen2.5-7B": (3584, 28, 28, 4, 128, 18944, 152064, False, _QWEN2),
}
# Options of this script that every request's sampling gets, by the names of SamplingParams.
SAMPLING_OPTIONS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "n": int,
    "logprobs": int,
}
# What an engine raises for options or a model that cannot work; its text says enough.
EXPECTED_ERRORS = (OSError, RuntimeError, ValueError)


# Workloads


class Workload(NamedTuple):
    num_seqs: int
    seed: int
    prompt_lengths: tuple[int, int]  # lowest and highest, both possible
    output_lengths: tuple[int, int]
    temperature: float = 0.6
    num_prefixes: int = 0  # of 1,024 tokens, shared
    max_model_len: int = 4096  # with random weights; a real model has its own
    prefix_caching: bool = True
    n: int = 1  # completions per prompt


WORKLOADS = {
    "demo": Workload(64, 0, (8, 200), (8, 200), temperature=0.0),
    "nano": Workload(256, 0, (100, 1024), (100, 1024)),
    "big": Workload(2048, 7, (100, 1024), (100, 1024)),
    "prefix": Workload(2048, 1, (16, 128), (64, 256), num_prefixes=32),
    "short": Workload(8192, 5, (16, 64), (16, 64)),
    "one": Workload(1, 3, (128, 128), (512, 512)),
    "classify": Workload(2048, 31, (300, 1500), (1, 1)),
    "samples": Workload(32, 35, (300, 900), (200, 400), n=32),
    "docs": Workload(64, 33, (8000, 16000), (32, 96), max_model_len=20000, prefix_caching=False),
    "ctx4k": Workload(384, 37, (2800, 3000), (200, 1000)),
}


@dataclass(frozen=True)
class Requests:
    prompts: list[list[int]]
    max_tokens: list[int]
    sampling: dict[str, Any]  # what all of them have in common, by the names of SamplingParams

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens) * self.sampling.get("n", 1)

    def sampling_params(self, make: Callable[..., Any] = SamplingParams, **more: Any) -> list[Any]:
        """Each request's sampling; other engines use the same names."""
        options = {**self.sampling, "ignore_eos": True, **more}
        return [make(max_tokens=max_tokens, **options) for max_tokens in self.max_tokens]


def make_requests(workload: str, vocab_size: int, sampling: dict[str, Any] | None = None) -> Requests:
    """The requests of a workload. One seeded generator draws everything: all prompts first, then all output lengths."""
    shape = WORKLOADS[workload]
    highest = min(10000, vocab_size - 1)
    rng = random.Random(shape.seed)

    def draw(length: int) -> list[int]:
        return [rng.randint(0, highest) for _ in range(length)]

    prefixes = [draw(1024) for _ in range(shape.num_prefixes)]
    prompts = []
    for _ in range(shape.num_seqs):
        prefix = rng.choice(prefixes) if prefixes else []
        prompts.append(prefix + draw(rng.randint(*shape.prompt_lengths)))
    max_tokens = [rng.randint(*shape.output_lengths) for _ in range(shape.num_seqs)]
    several = {"n": shape.n} if shape.n > 1 else {}
    return Requests(prompts, max_tokens, {"temperature": shape.temperature, **several, **(sampling or {})})


def write_config(size: str, directory: Path) -> None:
    """Writes a config.json of the size's shape, which is all that load_format="dummy" needs."""
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied, *more = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "intermediate_size": intermediate, "vocab_size": vocab, "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 40960, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }  # fmt: skip
    for fields in more:
        config |= fields
    (directory / "config.json").write_text(json.dumps(config))


def write_random_checkpoint(size: str, directory: Path) -> None:
    """Writes a checkpoint with random weights, for two engines that must load the same ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(size, directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    model.save_pretrained(directory)


# Timing


@dataclass(frozen=True)
class Timing:
    """How long one engine took."""

    start_seconds: float  # to construct it
    first_seconds: float  # the first call
    seconds: list[float]  # each later call
    tokens: list[list[int]]  # the last call's completions

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def report(self, requests: Requests) -> dict[str, Any]:
        return {
            "start_seconds": round(self.start_seconds, 3),
            "first_seconds": round(self.first_seconds, 3),
            "seconds": [round(seconds, 3) for seconds in self.seconds],
            "first_output_tokens_per_second": requests.num_output_tokens / self.first_seconds,
            "first_input_tokens_per_second": requests.num_prompt_tokens / self.first_seconds,
            "output_tokens_per_second": requests.num_output_tokens / self.median,
            "input_tokens_per_second": requests.num_prompt_tokens / self.median,
        }


def timed(
    run: Callable[[], list[list[int]]], forget: Callable[[], object], repeats: int, start_seconds: float
) -> Timing:
    """Times the first call and then `repeats` later ones; `forget`, before each, is not timed."""
    seconds = []
    for _ in range(1 + repeats):
        forget()
        began = time.perf_counter()
        tokens = run()
        seconds.append(time.perf_counter() - began)
    return Timing(start_seconds, seconds[0], seconds[1:], tokens)


@contextmanager
def errors_as_text() -> Iterator[None]:
    """Ends the script with an expected error's text alone."""
    try:
        yield
    except EXPECTED_ERRORS as error:
        raise SystemExit(str(error)) from None


# The other engines


@dataclass(frozen=True)
class Job:
    """What both engines are given."""

    requests: Requests
    directory: str
    has_weights: bool  # else there is a config alone
    dtype: str
    device: str
    max_model_len: int
    prefix_caching: bool
    tensor_parallel_size: int
    seed: int
    quantization: str | None  # None: as the checkpoint stores its weights
    kv_cache_dtype: str


class Peer(Protocol):
    settings: dict[str, Any]  # its version and options, for the report

    def run(self, requests: Requests) -> list[list[int]]:
        """The completions' token ids."""

    def forget(self) -> None:
        """Empties its prefix cache."""


class TransformersPeer:
    """transformers' `generate`: one left-padded batch that runs to the longest request, the way a script would."""

    def __init__(self, job: Job):
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, job.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(job.directory, dtype=dtype).to(job.device).eval()
        self.settings = {"version": importlib.metadata.version("transformers"), "threads": torch.get_num_threads()}

    @torch.inference_mode()
    def run(self, requests: Requests) -> list[list[int]]:
        longest = max(map(len, requests.prompts))
        padded = torch.zeros(len(requests.prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, prompt in enumerate(requests.prompts):
            padded[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        sampling = dict(requests.sampling)
        if sampling["temperature"]:
            # Its own default is 50, and −1 is not its way to say "off".
            sampling = {"do_sample": True, **sampling, "top_k": max(sampling.get("top_k", 0), 0)}
        else:
            sampling = {"do_sample": False, "repetition_penalty": sampling.get("repetition_penalty", 1.0)}
        outputs = self.model.generate(
            input_ids=padded.to(self.model.device), attention_mask=mask.to(self.model.device), eos_token_id=None,
            pad_token_id=0, max_new_tokens=max(requests.max_tokens), **sampling,
        )  # fmt: skip
        completions = outputs[:, longest:].tolist()
        return [completion[:length] for completion, length in zip(completions, requests.max_tokens, strict=True)]

    def forget(self) -> None:
        pass


class VllmPeer:
    """vLLM's `LLM.generate`, with all options but the job's own at vLLM's defaults."""

    def __init__(self, job: Job):
        import vllm

        options: dict[str, Any] = {
            "dtype": job.dtype, "max_model_len": job.max_model_len, "seed": job.seed,
            "enable_prefix_caching": job.prefix_caching, "tensor_parallel_size": job.tensor_parallel_size,
        }  # fmt: skip
        self._more: dict[str, Any] = {}
        if job.quantization is not None:
            options["quantization"] = job.quantization
        if job.kv_cache_dtype != "auto":
            options["kv_cache_dtype"] = job.kv_cache_dtype
        if not job.has_weights:
            options["load_format"] = "dummy"
        if not any(Path(job.directory).glob("tokenizer*")):
            options["skip_tokenizer_init"] = True
            self._more["detokenize"] = False  # ours has no tokenizer either, so neither makes text
        self._sampling_params = vllm.SamplingParams
        self.llm = vllm.LLM(job.directory, **options)
        self.settings = {"version": vllm.__version__, **options}
        with suppress(AttributeError):  # what it chose itself, where this version says so
            self.settings["max_num_seqs"] = self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    def run(self, requests: Requests) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in requests.prompts]
        params = requests.sampling_params(self._sampling_params, **self._more)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        self.llm.reset_prefix_cache()


PEERS: dict[str, Callable[[Job], Peer]] = {"transformers": TransformersPeer, "vllm": VllmPeer}


def check_peer(name: str, sampling: dict[str, Any], is_fp8: bool = False) -> None:
    """Ends the script, before anything is measured, if the other engine cannot run these requests."""
    if name == "transformers" and is_fp8:
        raise SystemExit("transformers would not compute in FP8; use --vs vllm, or leave out the options of FP8")
    if importlib.util.find_spec(name) is None:
        raise SystemExit(
            f"--vs {name} needs {name} in this virtual environment: pip install {name}. It may want another PyTorch "
            "than this one; then use a virtual environment made for both"
        )
    unknown = {"presence_penalty", "frequency_penalty", "n", "logprobs"} & set(sampling)
    if name == "transformers" and unknown:
        raise SystemExit(f"transformers has no {' or '.join(sorted(unknown))}; use --vs vllm")


def measure_peer(name: str, job: Job, ours: Timing, repeats: int) -> dict[str, Any]:
    """The other engine's part of the report. Ours must be closed."""
    if name == "vllm" and torch.device(job.device).type == "cpu" and torch.cuda.is_available():
        raise SystemExit("vLLM would run on the GPU that --device cpu leaves out; use --device cuda")
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    requests = job.requests
    began = time.perf_counter()
    with errors_as_text():
        peer = PEERS[name](job)
    timing = timed(lambda: peer.run(requests), peer.forget, repeats, time.perf_counter() - began)
    if [len(completion) for completion in timing.tokens] != requests.max_tokens:
        raise SystemExit(f"{name} returned other numbers of tokens than it was asked for, so the times say nothing")
    report = {"settings": peer.settings, **timing.report(requests)}
    compared = {
        f"ratio_to_{name}": timing.median / ours.median,
        f"ratio_to_{name}_of_first_calls": timing.first_seconds / ours.first_seconds,
    }
    if job.has_weights and not requests.sampling["temperature"]:
        num_equal = sum(a == b for a, b in zip(ours.tokens, timing.tokens, strict=True))
        compared["requests_with_equal_tokens"] = f"{num_equal} of {len(ours.tokens)}"
    return {f"{name}_{key}": value for key, value in report.items()} | compared


# The roofline


@dataclass
class StepLog:
    """What the steps of one run computed, and when the GPU was between them; an item per step."""

    num_tokens: list[int] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    # Different keys of the sequences with one new token: what decode attention reads. The mean of the layers.
    num_keys: list[float] = field(default_factory=list)
    # Query-key pairs of the other sequences. The mean of the layers.
    prefill_scores: list[float] = field(default_factory=list)
    # Each layer's sliding window, 0 for none.
    windows: tuple[int, ...] = (0,)
    # Before and after each step.
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def note(self, step: Step, block_size: int) -> None:
        """Counts what a Step computes, when it is launched: `num_computed_tokens` includes its new tokens."""
        chunks = step.chunks
        self.num_tokens.append(sum(chunk.num_new_tokens for chunk in chunks))
        self.num_sampled.append(sum(chunk.samples for chunk in chunks))
        single = [chunk.seq for chunk in chunks if chunk.num_new_tokens == 1]
        longer = [(chunk.seq.num_computed_tokens, chunk.num_new_tokens) for chunk in chunks if chunk.num_new_tokens > 1]
        num_repeated = 0
        if any(seq.num_cached_tokens for seq in single):
            # What several share need be read once.
            num_blocks, distinct = sum(len(seq.block_table) for seq in single), set()
            for seq in single:
                distinct.update(seq.block_table)
            num_repeated = (num_blocks - len(distinct)) * block_size
        num_keys = num_scores = 0
        for window, num_layers in Counter(self.windows).items():
            read = sum(min(seq.num_computed_tokens, window or 2**31) for seq in single)
            num_keys += num_layers * (read if window else read - num_repeated)
            pairs = (num_pairs(end, window) - num_pairs(end - num_new, window) for end, num_new in longer)
            num_scores += num_layers * sum(pairs)
        self.num_keys.append(num_keys / len(self.windows))
        self.prefill_scores.append(num_scores / len(self.windows))

    def idle_seconds(self) -> float:
        """Time between the end of a step and the beginning of the next."""
        torch.cuda.synchronize()
        gaps = (before[1].elapsed_time(after[0]) for before, after in zip(self.events, self.events[1:]))  # noqa: B905
        return sum(gaps) / 1e3


def num_pairs(num_tokens: int, window: int) -> int:
    """Query-key pairs of a prompt: token i sees itself and all before it, or the last `window` of these."""
    growing = min(num_tokens, window or num_tokens)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * growing


@contextmanager
def logged_steps(llm: LLM) -> Iterator[StepLog]:
    """A log of the steps that are launched in the `with` block."""
    layers = load_model_config(Path(llm.engine.config.model)).layers
    runner, log = llm.engine.runner, StepLog(windows=tuple(layer.window for layer in layers))
    launch, block_size = runner.launch, llm.engine.info.kvcache_block_size
    # The GPUs of several ranks are other processes'.
    is_timed = llm.engine.info.device.startswith("cuda") and llm.engine.config.tensor_parallel_size == 1

    def noted(step: Step):
        log.note(step, block_size)
        if not is_timed:
            return launch(step)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        launched = launch(step)
        events[1].record()
        log.events.append(events)
        return launched

    runner.launch = noted
    try:
        yield log
    finally:
        del runner.launch


class Rates(NamedTuple):
    """What a chip does per second.

    bandwidth: bytes read and written; products, fp8_products: operations of matrix products in bfloat16 and in FP8.
    """

    bandwidth: float
    products: float
    fp8_products: float

    def times(self, num_gpus: int) -> "Rates":
        return Rates(*(num_gpus * rate for rate in self))


def device_rates(device: torch.device) -> Rates:
    """As measured: of a large copy and of large products. A GPU without products in FP8 has the rate of bfloat16."""

    def best_seconds(run: Callable[..., object], *tensors: torch.Tensor) -> float:
        seconds = []
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(*tensors)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return min(seconds)

    source = torch.randn(2**28, device=device)  # 1 GiB
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / best_seconds(torch.Tensor.copy_, target, source)
    del source, target
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    products = fp8_products = 2 * 8192**3 / best_seconds(torch.matmul, left, right)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)

        def in_fp8(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(left, right.mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        inputs = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
        fp8_products = 2 * 8192**3 / best_seconds(in_fp8, *inputs)
    return Rates(bandwidth, products, fp8_products)


@dataclass(frozen=True)
class Numbers:
    """What a model's numbers are stored in.

    config: its `fp8` says which weights are in FP8.
    dtype: of all other weights.
    kv_cache_dtype: see KVCacheLayout.
    """

    config: ModelConfig
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype

    @classmethod
    def of(cls, llm: LLM) -> "Numbers":
        info, options = llm.engine.info, llm.engine.config
        config, dtype, device = load_model_config(Path(options.model)), getattr(torch, info.dtype), info.device
        fp8 = fp8_of(options.quantization, config.fp8, dtype, torch.device(device))
        return cls(
            replace(config, fp8=fp8), dtype, kv_cache_dtype_of(options.kv_cache_dtype, dtype, torch.device(device))
        )

    def weight_bytes(self, num_tokens: int = 1) -> int:
        """Of the matrices of the layers and the LM head that a step of so many tokens reads."""
        return step_weight_bytes(self.config, self.dtype.itemsize, num_tokens)

    @property
    def key_value_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        return token_kv_bytes(self.config, self.kv_cache_dtype.itemsize)


class Operations(NamedTuple):
    """A multiplication and an addition are two; all numbers but FP8's together, and those of FP8."""

    usual: int
    fp8: int

    def seconds(self, rates: Rates) -> float:
        return self.usual / rates.products + self.fp8 / rates.fp8_products


def matrix_operations(log: StepLog, config: ModelConfig) -> list[Operations]:
    """Operations of each step's matrix products."""
    last = f"model.layers.{config.num_hidden_layers - 1}."
    of_keys = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    # Of all tokens, and of those that sample: after the attention of the last layer, a step needs only these.
    all_tokens, sampled = Counter[bool](), Counter({False: config.vocab_size * config.hidden_size})
    for matrix in layer_matrices(config, 1):
        is_of_sampled = matrix.name.startswith(last) and not matrix.name.endswith(of_keys)
        (sampled if is_of_sampled else all_tokens)[matrix.fp8 is not None] += matrix.num_parameters

    def operations(num_tokens: int, num_sampled: int, is_fp8: bool) -> int:
        return 2 * (num_tokens * all_tokens[is_fp8] + num_sampled * sampled[is_fp8])

    steps = zip(log.num_tokens, log.num_sampled, strict=True)
    return [Operations(operations(*step, False), operations(*step, True)) for step in steps]


def score_operations(log: StepLog, config: ModelConfig) -> list[float]:
    """Operations of each step's attention over prompts: per query-key pair, head and layer, a product with the key and
    one with the value. All queries count in the last layer too, although the engine skips tiles that nobody reads."""
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return [scores * per_pair for scores in log.prefill_scores]


def roofline_seconds(log: StepLog, numbers: Numbers, rates: Rates) -> float:
    """What the steps of `log` take at least on a chip of these rates."""
    weight_seconds = {n: numbers.weight_bytes(n) / rates.bandwidth for n in set(log.num_tokens)}
    key_seconds = numbers.key_value_bytes / rates.bandwidth
    operations = matrix_operations(log, numbers.config), score_operations(log, numbers.config)
    return sum(
        num_keys * key_seconds + max(weight_seconds[num_tokens], products.seconds(rates) + scores / rates.products)
        for num_tokens, num_keys, products, scores in zip(log.num_tokens, log.num_keys, *operations, strict=True)
    )


def gpu_report(llm: LLM, requests: Requests, params: list[SamplingParams], median_seconds: float) -> dict[str, Any]:
    """The roofline and what was reached of it, idle time and memory, from another run of the requests.

    The steps do not depend on time, so that run has those that were timed. Several GPUs have a share each of the bytes
    and of the arithmetic; idle time and memory are known of one GPU alone.
    """
    engine, device = llm.engine, torch.device(llm.engine.info.device)
    num_gpus = engine.config.tensor_parallel_size
    torch.cuda.reset_peak_memory_stats(device)
    with torch.cuda.device(device), logged_steps(llm) as log:
        began = time.perf_counter()
        run_nanovllm(llm, requests, params)
        logged_seconds = time.perf_counter() - began
        peak_bytes = torch.cuda.max_memory_allocated()
        rates = device_rates(device)
        idle_seconds = log.idle_seconds()
    roofline = roofline_seconds(log, Numbers.of(llm), rates.times(num_gpus))
    of_one_gpu = {"gpu_idle_fraction": idle_seconds / logged_seconds, "peak_memory_gib": peak_bytes / 2**30}
    return {
        "bandwidth_tb_per_second": rates.bandwidth / 1e12,
        "matrix_tflop_per_second": rates.products / 1e12,
        "fp8_matrix_tflop_per_second": rates.fp8_products / 1e12,
        "roofline_seconds": roofline,
        "roofline_tokens_per_second": requests.num_output_tokens / roofline,
        "roofline_input_tokens_per_second": requests.num_prompt_tokens / roofline,
        "fraction_of_roofline": roofline / median_seconds,
        **(of_one_gpu if num_gpus == 1 else {}),
    }


def write_profile(llm: LLM, requests: Requests, params: list[SamplingParams], directory: Path) -> None:
    """Writes a trace of 30 steps from the middle of a run, for chrome://tracing or Perfetto, and an operator table.

    On a GPU it also writes what those steps computed, for docs/step_budget.py.
    """
    from torch.profiler import ProfilerActivity, profile

    directory.mkdir(parents=True, exist_ok=True)
    engine = llm.engine
    for prompt, of_request in zip(requests.prompts, params, strict=True):
        engine.add_request(prompt, of_request)
    for _ in range(int(statistics.median(requests.max_tokens)) // 2):
        engine.step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with logged_steps(llm) as log, profile(activities=activities) as profiled:
        while len(log.num_tokens) < 30 and not engine.is_finished():
            engine.step()
    engine.reset()
    profiled.export_chrome_trace(str(directory / "trace.json"))
    sort = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    (directory / "operators.txt").write_text(profiled.key_averages().table(sort_by=sort, row_limit=60))
    if torch.cuda.is_available():
        numbers, rates = Numbers.of(llm), device_rates(torch.device(engine.info.device))
        operations = matrix_operations(log, numbers.config)
        logits = numbers.config.vocab_size * numbers.dtype.itemsize
        steps = {
            "num_steps": len(log.num_tokens),
            "mean_rows": statistics.mean(log.num_sampled),
            "key_value_bytes": statistics.mean(log.num_keys) * numbers.key_value_bytes,
            "score_operations": statistics.mean(score_operations(log, numbers.config)),
            "weight_bytes": statistics.mean(map(numbers.weight_bytes, log.num_tokens)),
            "matrix_operations": statistics.mean(each.usual for each in operations),
            "fp8_matrix_operations": statistics.mean(each.fp8 for each in operations),
            "logit_bytes": statistics.mean(log.num_sampled) * logits,
            "bytes_per_second": rates.bandwidth,
            "matrix_operations_per_second": rates.products,
            "fp8_matrix_operations_per_second": rates.fp8_products,
        }
        (directory / "steps.json").write_text(json.dumps(steps) + "\n")


# Ours, and the command line


def run_nanovllm(llm: LLM, requests: Requests, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(requests.prompts, params, use_tqdm=False)
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise SystemExit(f"{len(errors)} of {len(outputs)} requests failed. The first error: {errors[0]}")
    return [output.token_ids for output in outputs]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="demo")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="directory or hub name; without it, the bundled model")
    which.add_argument("--size", choices=SIZES, help="random weights of this shape; nothing is downloaded")
    parser.add_argument("--vs", choices=PEERS, help="run the same requests through another engine too")
    parser.add_argument("--repeats", type=int, default=3, help="calls after the first; their median counts (default 3)")
    sampling = parser.add_argument_group("sampling of every request; default: the workload's temperature, all else off")
    for name, kind in SAMPLING_OPTIONS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind)
    engine = parser.add_argument_group("options of this engine; default: its own")
    engine.add_argument(
        "--backend", choices=("auto", "triton", "flash", "sdpa", "torch"), default="auto", help="attention backend"
    )
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights of linear layers; default: none")
    engine.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="default: that of the model")
    engine.add_argument("--device", default="auto")
    engine.add_argument("--max-model-len", type=int, help="with --size, default: the workload's, 4096 or 20000")
    engine.add_argument("--max-num-seqs", type=int)
    engine.add_argument("--block-size", type=int)
    engine.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs to split the model over")
    engine.add_argument("--threads", type=int, help="CPU threads of both engines, per rank; default: each engine's own")
    engine.add_argument("--enforce-eager", action="store_true")
    engine.add_argument("--no-overlap", action="store_true")
    engine.add_argument("--no-prefix-caching", action="store_true")
    engine.add_argument("--no-prefix-grouping", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of some steps there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there as well")
    parsed = parser.parse_args(arguments)
    if parsed.repeats < 1:
        parser.error("--repeats must be at least 1")
    if parsed.profile and parsed.tensor_parallel_size > 1:
        parser.error("--profile sees the steps of one process; use --tensor-parallel-size 1")
    sampling_options = {name: getattr(parsed, name) for name in SAMPLING_OPTIONS}
    parsed.sampling = {name: value for name, value in sampling_options.items() if value is not None}
    return parsed


def make_llm(arguments: argparse.Namespace, directory: str, has_weights: bool) -> LLM:
    workload = WORKLOADS[arguments.workload]
    options: dict[str, Any] = {
        "load_format": "auto" if has_weights else "dummy", "attention_backend": arguments.backend,
        "dtype": arguments.dtype, "device": arguments.device, "enforce_eager": arguments.enforce_eager,
        "overlap": not arguments.no_overlap, "prefix_grouping": not arguments.no_prefix_grouping,
        "enable_prefix_caching": workload.prefix_caching and not arguments.no_prefix_caching,
        "tensor_parallel_size": arguments.tensor_parallel_size,
    }  # fmt: skip
    given = {
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "max_num_seqs": arguments.max_num_seqs,
        "kvcache_block_size": arguments.block_size,
        "max_model_len": arguments.max_model_len or (workload.max_model_len if arguments.size else None),
    }
    options |= {name: value for name, value in given.items() if value is not None}
    return LLM(directory, **options)


def measure(arguments: argparse.Namespace, directory: str, has_weights: bool) -> tuple[dict[str, Any], Job, Timing]:
    """Our part of the report, what a peer would have to do, and our times. The LLM is closed when this returns."""
    began = time.perf_counter()
    with errors_as_text():
        llm = make_llm(arguments, directory, has_weights)
    start_seconds = time.perf_counter() - began
    with llm:
        engine, info = llm.engine, llm.engine.info
        device = torch.device(info.device)
        requests = make_requests(arguments.workload, info.vocab_size, arguments.sampling)
        params = requests.sampling_params()
        check_lengths(arguments, requests, info.max_model_len)
        before: dict[str, Any] = {}

        def forget() -> None:
            engine.reset()  # an earlier call's prefix cache is not to help this one
            before.update(llm.metrics())

        ours = timed(lambda: run_nanovllm(llm, requests, params), forget, arguments.repeats, start_seconds)
        # Of the last call alone.
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
            report |= gpu_report(llm, requests, params, ours.median)
        if arguments.profile:
            forget()
            write_profile(llm, requests, params, arguments.profile)
        job = Job(
            requests, engine.config.model, has_weights, info.dtype, info.device, info.max_model_len,
            engine.config.enable_prefix_caching, arguments.tensor_parallel_size, engine.config.seed,
            arguments.quantization, engine.config.kv_cache_dtype,
        )  # fmt: skip
    return report, job, ours


def check_lengths(arguments: argparse.Namespace, requests: Requests, max_model_len: int) -> None:
    lengths = zip(requests.prompts, requests.max_tokens, strict=True)
    longest = max(len(prompt) + max_tokens for prompt, max_tokens in lengths)
    if longest > max_model_len:
        hint = "raise --max-model-len" if arguments.max_model_len else "use --size or another --model"
        raise SystemExit(
            f"workload {arguments.workload} has requests of up to {longest:,} tokens, but this model takes "
            f"{max_model_len:,}; {hint}"
        )


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of ranks, which are other processes
    with errors_as_text():
        SamplingParams(**arguments.sampling)  # a mistake should not take a model's start to be found
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
            print("no --model and no --size: using the bundled model", file=sys.stderr)
        report, job, ours = measure(arguments, directory, has_weights)
        if arguments.vs:
            report |= measure_peer(arguments.vs, job, ours, arguments.repeats)
    for name, value in report.items():
        print(f"{name:40} {value:,.3f}" if isinstance(value, float) else f"{name:40} {value}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
