"""Measures offline throughput: output tokens per second of wall time, from `generate` being called to its return.

    python bench.py                                     the bundled model on a small workload
    python bench.py --vs transformers                   the same requests through transformers as well, with the ratio
    python bench.py --workload nano --size 0.6B         random weights of a real model's shape
    python bench.py --workload nano --model Qwen/Qwen3-0.6B

Workloads (sequences; prompt tokens; output tokens): demo (64; 8-200; 8-200, greedy), nano (256; 100-1024; 100-1024),
big (2048 of nano's), prefix (2048 behind 32 prefixes of 1024; 16-128 more; 64-256), short (8192; 16-64; 16-64),
one (1; 128; 512). The bundled model takes 1,024 tokens: enough for demo, short and one.

On a GPU the report also has the run's floor: what the chip needs at least for the steps that were run. That is, for
each step, the different keys and values its decodes read ÷ the memory bandwidth measured here, plus the larger of
the weights ÷ that bandwidth and the arithmetic ÷ the matrix rate measured here.

The last line on stdout is JSON.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.models import ARCHITECTURES
from nanovllm.models.config import ModelConfig, load_model_config

# hidden size, layers, heads, key/value heads, head_dim, intermediate size, vocabulary, tied embeddings
SIZES = {
    "40M": (512, 8, 8, 4, 64, 1536, 32000, True),  # no published model; small enough for a CPU
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True),
    "4B": (2560, 36, 32, 8, 128, 9728, 151936, True),
    "8B": (4096, 36, 32, 8, 128, 12288, 151936, False),
    "14B": (5120, 40, 40, 8, 128, 17408, 151936, False),
    "32B": (5120, 64, 64, 8, 128, 25600, 151936, False),
}


@dataclass
class Requests:
    prompts: list[list[int]]
    max_tokens: list[int]
    temperature: float

    def sampling_params(self) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=self.temperature, max_tokens=max_tokens, ignore_eos=True)
            for max_tokens in self.max_tokens
        ]


def make_requests(workload: str, vocab_size: int) -> Requests:
    """The workloads by name; every draw comes from one seeded generator, prompts before lengths."""
    highest = min(10000, vocab_size - 1)
    # name: (sequences, seed, prompt lengths, output lengths, temperature)
    shapes = {
        "demo": (64, 0, (8, 200), (8, 200), 0.0),
        "nano": (256, 0, (100, 1024), (100, 1024), 0.6),
        "big": (2048, 7, (100, 1024), (100, 1024), 0.6),
        "prefix": (2048, 1, (16, 128), (64, 256), 0.6),
        "short": (8192, 5, (16, 64), (16, 64), 0.6),
        "one": (1, 3, (128, 128), (512, 512), 0.6),
    }
    num_seqs, seed, prompt_lengths, output_lengths, temperature = shapes[workload]
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return [rng.randint(0, highest) for _ in range(length)]

    if workload == "prefix":
        prefixes = [draw(1024) for _ in range(32)]
        prompts = [rng.choice(prefixes) + draw(rng.randint(*prompt_lengths)) for _ in range(num_seqs)]
    else:
        prompts = [draw(rng.randint(*prompt_lengths)) for _ in range(num_seqs)]
    return Requests(prompts, [rng.randint(*output_lengths) for _ in range(num_seqs)], temperature)


def write_config(size: str, directory: Path) -> None:
    """A config.json of the size's shape, which is all that load_format="dummy" needs."""
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "intermediate_size": intermediate, "vocab_size": vocab, "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 40960, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def write_random_checkpoint(size: str, directory: Path) -> None:
    """A checkpoint with random weights, where two engines must load the same ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(size, directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    model.save_pretrained(directory)


def run_nanovllm(llm: LLM, requests: Requests, params: list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(requests.prompts, params, use_tqdm=False)]


def load_transformers(directory: Path, dtype: torch.dtype, device: torch.device):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()


@torch.inference_mode()
def run_transformers(model, requests: Requests) -> list[list[int]]:
    """One left-padded batch that runs to the longest request, the way a script would; each row cut to its length."""
    longest = max(map(len, requests.prompts))
    padded = torch.zeros(len(requests.prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(requests.prompts):
        padded[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": requests.temperature, "top_k": 0} if requests.temperature else {}
    outputs = model.generate(
        input_ids=padded.to(model.device), attention_mask=mask.to(model.device), eos_token_id=None, pad_token_id=0,
        max_new_tokens=max(requests.max_tokens), **(sampling or {"do_sample": False}),
    )  # fmt: skip
    completions = outputs[:, longest:].tolist()
    return [completion[:length] for completion, length in zip(completions, requests.max_tokens, strict=True)]


def timed(
    run: Callable[[], list[list[int]]], repeats: int, device: torch.device, prepare: Callable[[], None] = lambda: None
) -> tuple[list[float], list[list[int]]]:
    """Seconds of each run, after one that is not counted, and the last run's tokens; `prepare` is not timed."""
    prepare()
    seconds, tokens = [], run()
    for _ in range(repeats):
        prepare()
        began = time.perf_counter()
        tokens = run()
        if device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds, tokens


@dataclass
class StepLog:
    """What the steps of one run computed, and when the GPU was between them."""

    num_tokens: list[int] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    num_keys: list[int] = field(
        default_factory=list
    )  # different ones of the sequences with one new token: what decode attention reads
    prefill_scores: list[int] = field(default_factory=list)  # query-key pairs of the other sequences
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)  # around each step

    def idle_seconds(self) -> float:
        """Time between the end of a step and the beginning of the next."""
        torch.cuda.synchronize()
        gaps = (before[1].elapsed_time(after[0]) for before, after in zip(self.events, self.events[1:]))  # noqa: B905
        return sum(gaps) / 1e3


def logged_run(llm: LLM, requests: Requests, params: list[SamplingParams]) -> tuple[StepLog, float]:
    """The run once more with every step noted (the steps do not depend on time), and the seconds it took."""
    runner, log = llm.engine.runner, StepLog()
    launch = runner.launch

    def noted(work):
        log.num_tokens.append(sum(num_new for _, num_new, _ in work))
        log.num_sampled.append(sum(samples for _, _, samples in work))
        decodes = [seq for seq, num_new, _ in work if num_new == 1]
        num_keys = sum(seq.num_computed_tokens for seq in decodes)
        if any(seq.num_cached_tokens for seq in decodes):
            # What several share need be read once.
            num_blocks, num_distinct = sum(len(seq.block_table) for seq in decodes), set()
            for seq in decodes:
                num_distinct.update(seq.block_table)
            num_keys -= (num_blocks - len(num_distinct)) * runner.info.kvcache_block_size
        log.num_keys.append(num_keys)
        chunks = ((seq.num_computed_tokens, num_new) for seq, num_new, _ in work if num_new > 1)
        log.prefill_scores.append(sum(num_new * (end - num_new // 2) for end, num_new in chunks))
        if llm.engine.config.tensor_parallel_size > 1:
            return launch(work)  # the GPUs are other processes'
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        result = launch(work)
        events[1].record()
        log.events.append(events)
        return result

    runner.launch = noted
    try:
        began = time.perf_counter()
        run_nanovllm(llm, requests, params)
        return log, time.perf_counter() - began
    finally:
        del runner.launch


def device_rates(device: torch.device) -> tuple[float, float]:
    """(bytes a second of a large copy, read and written; operations a second of a large bfloat16 product)."""

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
    return bandwidth, 2 * 8192**3 / best_seconds(torch.matmul, left, right)


def num_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of the layers and the LM head: what a decode step multiplies with."""
    attention = config.hidden_size * (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layers = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    return layers + config.vocab_size * config.hidden_size


def floor_seconds(log: StepLog, config: ModelConfig, itemsize: int, bandwidth: float, matrix_rate: float) -> float:
    """What the chip needs at least for the steps of `log`."""
    head = config.vocab_size * config.hidden_size
    layers = num_weights(config) - head
    weight_seconds = (layers + head) * itemsize / bandwidth
    # For a query-key pair, a product with the key and one with the value in every head of every layer.
    score_operations = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    seconds = 0.0
    for num_tokens, num_sampled, num_keys, scores in zip(
        log.num_tokens, log.num_sampled, log.num_keys, log.prefill_scores, strict=True
    ):
        operations = 2 * (num_tokens * layers + num_sampled * head) + scores * score_operations
        seconds += num_keys * config.num_kv_values_per_token * itemsize / bandwidth
        seconds += max(weight_seconds, operations / matrix_rate)
    return seconds


def write_profile(llm: LLM, requests: Requests, params: list[SamplingParams], directory: Path) -> None:
    """A trace of 30 steps from the middle of the run, for chrome://tracing or Perfetto, and what they worked on.

    The latter, for docs/step_budget.py, takes all of them for decodes that share nothing.
    """
    from torch.profiler import ProfilerActivity, profile

    directory.mkdir(parents=True, exist_ok=True)
    engine = llm.engine
    for prompt, of_request in zip(requests.prompts, params, strict=True):
        engine.add_request(prompt, of_request)
    middle = statistics.median(requests.max_tokens) // 2
    for _ in range(int(middle)):
        engine.step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    rows: list[int] = []
    keys: list[int] = []
    with profile(activities=activities) as profiled:
        while len(rows) < 30 and not engine.is_finished():
            rows.append(len(engine.scheduler.running))
            keys.append(sum(seq.num_computed_tokens for seq in engine.scheduler.running))
            engine.step()
    engine.reset()
    config, itemsize = engine.runner.model_config, engine.runner.dtype.itemsize
    if torch.cuda.is_available():
        bandwidth, matrix_rate = device_rates(engine.runner.device)
        steps = {
            "num_steps": len(rows),
            "mean_rows": statistics.mean(rows),
            "key_value_bytes": statistics.mean(keys) * config.num_kv_values_per_token * itemsize,
            "weight_bytes": num_weights(config) * itemsize,
            "matrix_operations": 2 * statistics.mean(rows) * num_weights(config),
            "logit_bytes": statistics.mean(rows) * config.vocab_size * itemsize,
            "bytes_per_second": bandwidth,
            "matrix_operations_per_second": matrix_rate,
        }
        (directory / "steps.json").write_text(json.dumps(steps) + "\n")
    profiled.export_chrome_trace(str(directory / "trace.json"))
    sort = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    (directory / "operators.txt").write_text(profiled.key_averages().table(sort_by=sort, row_limit=60))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("demo", "nano", "big", "prefix", "short", "one"), default="demo")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="directory or hub name; without it, the bundled model")
    which.add_argument("--size", choices=SIZES, help="random weights of this shape; nothing is downloaded")
    parser.add_argument("--vs", choices=("transformers",), help="run the same requests through another engine too")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each engine; the median counts")
    parser.add_argument(
        "--backend", choices=("auto", "triton", "flash", "sdpa", "torch"), default="auto", help="attention backend"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, help="default: 4096 with --size, else the model's own")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs to split the model over")
    parser.add_argument("--threads", type=int, help="CPU threads of both engines, a rank; default: PyTorch's choice")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--no-prefix-grouping", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of some steps there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there as well")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    if arguments.profile and arguments.tensor_parallel_size > 1:
        parser.error("--profile sees the steps of one process; use --tensor-parallel-size 1")
    return arguments


def make_llm(arguments: argparse.Namespace, directory: str, is_dummy: bool) -> LLM:
    options = {
        "load_format": "dummy" if is_dummy else "auto", "attention_backend": arguments.backend,
        "dtype": arguments.dtype, "device": arguments.device, "max_num_seqs": arguments.max_num_seqs,
        "kvcache_block_size": arguments.block_size, "enforce_eager": arguments.enforce_eager,
        "overlap": not arguments.no_overlap, "enable_prefix_caching": not arguments.no_prefix_caching,
        "prefix_grouping": not arguments.no_prefix_grouping, "tensor_parallel_size": arguments.tensor_parallel_size,
    }  # fmt: skip
    if arguments.max_model_len or arguments.size:
        options["max_model_len"] = arguments.max_model_len or 4096
    return LLM(directory, **options)


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of ranks
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.model or str(MODEL_DIRECTORY)
        if arguments.size:
            directory = temporary
            write = write_random_checkpoint if arguments.vs else write_config
            write(arguments.size, Path(temporary))
        elif not arguments.model:
            print("no --model and no --size: using the bundled model", file=sys.stderr)
        with make_llm(arguments, directory, is_dummy=bool(arguments.size) and not arguments.vs) as llm:
            report = measure(arguments, llm)
    for name, value in report.items():
        print(f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


def gpu_report(llm: LLM, requests: Requests, params: list[SamplingParams], median_seconds: float) -> dict[str, object]:
    """The floor and what was reached of it, idle time and memory, from another run of the requests.

    Several GPUs have a share each of the bytes and of the arithmetic; idle time and memory are known of one alone.
    """
    engine, device = llm.engine, torch.device(llm.engine.info.device)
    num_gpus = engine.config.tensor_parallel_size
    torch.cuda.reset_peak_memory_stats(device)
    with torch.cuda.device(device):
        log, logged_seconds = logged_run(llm, requests, params)
        peak_bytes = torch.cuda.max_memory_allocated()
        bandwidth, matrix_rate = device_rates(device)
        idle_seconds = log.idle_seconds()
    model_config = load_model_config(Path(engine.config.model), list(ARCHITECTURES))
    itemsize = getattr(torch, engine.info.dtype).itemsize
    floor = floor_seconds(log, model_config, itemsize, num_gpus * bandwidth, num_gpus * matrix_rate)
    of_one_gpu = {"gpu_idle_fraction": idle_seconds / logged_seconds, "peak_memory_gib": peak_bytes / 2**30}
    return {
        "bandwidth_tb_per_second": bandwidth / 1e12,
        "matrix_tflop_per_second": matrix_rate / 1e12,
        "floor_seconds": floor,
        "floor_tokens_per_second": sum(requests.max_tokens) / floor,
        "fraction_of_floor": floor / median_seconds,
        **(of_one_gpu if num_gpus == 1 else {}),
    }


def measure(arguments: argparse.Namespace, llm: LLM) -> dict[str, object]:
    info = llm.engine.info
    device = torch.device(info.device)
    requests = make_requests(arguments.workload, llm.engine.info.vocab_size)
    longest = max(len(prompt) + length for prompt, length in zip(requests.prompts, requests.max_tokens, strict=True))
    if longest > info.max_model_len:
        raise SystemExit(
            f"workload {arguments.workload} has requests of up to {longest} tokens, this model takes "
            f"{info.max_model_len}; "
            + ("raise --max-model-len" if arguments.max_model_len else "use --size or another --model")
        )
    num_output_tokens = sum(requests.max_tokens)
    params = requests.sampling_params()
    before: dict = {}

    def prepare() -> None:
        llm.engine.reset()  # an earlier run's prefix cache is not to help this one
        before.update(llm.metrics())

    seconds, tokens = timed(lambda: run_nanovllm(llm, requests, params), arguments.repeats, device, prepare)
    assert [len(completion) for completion in tokens] == requests.max_tokens
    median = statistics.median(seconds)
    # Of the last run alone.
    last = {name: value - before[name] for name, value in llm.metrics().items() if isinstance(value, int)}
    report: dict[str, object] = {
        "workload": arguments.workload,
        "model": arguments.size or arguments.model or "bundled",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "dtype": info.dtype,
        "threads": torch.get_num_threads(),
        "backend": info.attention_backend,
        "block_size": info.kvcache_block_size,
        "max_num_seqs": arguments.max_num_seqs,
        "num_prompt_tokens": sum(map(len, requests.prompts)),
        "num_output_tokens": num_output_tokens,
        "seconds": [round(value, 3) for value in seconds],
        "output_tokens_per_second": num_output_tokens / median,
        "mean_decodes_per_step": last["num_decode_tokens"]
        / max(last["num_prefill_steps"] + last["num_decode_steps"], 1),
        "prefix_cache_hit_rate": last["num_cached_prompt_tokens"] / max(last["num_prompt_tokens"], 1),
        "num_preemptions": last["num_preemptions"],
    }
    if device.type == "cuda":
        prepare()
        report |= gpu_report(llm, requests, params, median)
    if arguments.profile:
        prepare()
        write_profile(llm, requests, params, arguments.profile)
    if arguments.vs:
        model = load_transformers(Path(llm.engine.config.model), getattr(torch, info.dtype), device)
        their_seconds, their_tokens = timed(lambda: run_transformers(model, requests), arguments.repeats, device)
        their_median = statistics.median(their_seconds)
        num_equal = sum(ours == theirs for ours, theirs in zip(tokens, their_tokens, strict=True))
        report |= {
            "transformers_seconds": [round(value, 3) for value in their_seconds],
            "transformers_output_tokens_per_second": num_output_tokens / their_median,
            "ratio_to_transformers": their_median / median,
            "requests_with_equal_tokens": f"{num_equal} of {len(tokens)}",
        }
    return report


if __name__ == "__main__":
    main()
