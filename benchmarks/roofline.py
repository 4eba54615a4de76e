"""The roofline of a run: the least time in which a chip could run the same steps."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import Requests
from nanovllm import LLM
from nanovllm.engine.step import Step
from nanovllm.models.config import ModelConfig
from nanovllm.models.cost import Rates, StepCost, StepWork, num_query_key_pairs, roofline_seconds, step_costs
from nanovllm.models.read_config import load_model_config
from nanovllm.runner.device import fp8_of, kv_cache_dtype_of


@dataclass
class StepLog:
    """The steps of one run, in their order.

    events: on one GPU, before and after each step.
    """

    steps: list[StepWork] = field(default_factory=list)
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def idle_seconds(self) -> float:
        """Time between the end of a step and the beginning of the next."""
        torch.cuda.synchronize()
        gaps = (before[1].elapsed_time(after[0]) for before, after in zip(self.events, self.events[1:]))  # noqa: B905
        return sum(gaps) / 1e3


def step_work(step: Step, windows: Sequence[int], block_size: int) -> StepWork:
    """The work of a step when it is launched: `num_computed_tokens` includes its new tokens.

    Args:
        windows: each layer's sliding window, 0 for none.
    """
    chunks = step.chunks
    single = [chunk.seq for chunk in chunks if chunk.num_new_tokens == 1]
    longer = [(chunk.seq.num_computed_tokens, chunk.num_new_tokens) for chunk in chunks if chunk.num_new_tokens > 1]
    num_repeated = 0
    if any(seq.num_cached_tokens for seq in single):
        # A step needs to read a block only once, even if several sequences share it.
        num_blocks, distinct = sum(len(seq.block_table) for seq in single), set()
        for seq in single:
            distinct.update(seq.block_table)
        num_repeated = (num_blocks - len(distinct)) * block_size
    num_keys = num_pairs = 0
    for window, num_layers in Counter(windows).items():
        num_read = sum(min(seq.num_computed_tokens, window or 2**31) for seq in single)
        num_keys += num_layers * (num_read if window else num_read - num_repeated)
        num_pairs += num_layers * sum(
            num_query_key_pairs(end, window) - num_query_key_pairs(end - num_new, window) for end, num_new in longer
        )
    return StepWork(
        num_tokens=sum(chunk.num_new_tokens for chunk in chunks),
        num_sampled=sum(chunk.samples for chunk in chunks),
        num_keys=num_keys / len(windows),
        num_pairs=num_pairs / len(windows),
        # A row that begins with its sequence reads no state.
        num_states=sum(
            1 + (chunk.seq.num_computed_tokens > chunk.num_new_tokens) for chunk in chunks if chunk.num_new_tokens
        ),
    )


@contextmanager
def logged_steps(llm: LLM) -> Iterator[StepLog]:
    """Context manager that yields a log of the steps that are launched during it."""
    windows = [layer.window for layer in load_model_config(Path(llm.engine.config.model)).layers]
    runner, log = llm.engine.runner, StepLog()
    launch, block_size = runner.launch, llm.engine.info.kvcache_block_size
    # With several ranks, the GPUs belong to other processes.
    is_timed = llm.engine.info.device.startswith("cuda") and llm.engine.config.tensor_parallel_size == 1

    def logged(step: Step) -> Any:
        log.steps.append(step_work(step, windows, block_size))
        if not is_timed:
            return launch(step)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        launched = launch(step)
        events[1].record()
        log.events.append(events)
        return launched

    runner.launch = logged  # type: ignore[method-assign]
    try:
        yield log
    finally:
        del runner.launch


def device_rates(device: torch.device) -> Rates:
    """The rates of a large copy and of large products, as measured. A GPU without products in FP8 gets the rate of
    bfloat16 for them."""

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


def config_and_itemsizes(llm: LLM) -> tuple[ModelConfig, int, int]:
    """(the model's config with the FP8 layout that the engine uses, bytes of a weight, bytes of a number in the KV
    cache), as `nanovllm.models.cost` takes them."""
    info, options = llm.engine.info, llm.engine.config
    config = load_model_config(Path(options.model))
    config = config if info.head == "lm" else config.without_lm_head()
    dtype, device = getattr(torch, info.dtype), torch.device(info.device)
    fp8 = fp8_of(options.quantization, config.fp8, dtype, device)
    kv_cache_dtype = kv_cache_dtype_of(options.kv_cache_dtype, dtype, device)
    return replace(config, fp8=fp8), dtype.itemsize, kv_cache_dtype.itemsize


def costs_of(llm: LLM, log: StepLog) -> list[StepCost]:
    """The cost of each step in the log."""
    return step_costs(*config_and_itemsizes(llm), log.steps)


def gpu_report(llm: LLM, requests: Requests, run: Callable[[], object], median_seconds: float) -> dict[str, Any]:
    """The roofline of the requests and the fraction of it that was reached, idle time and memory, from one more `run`.

    The steps do not depend on time, so that run has the steps of the timed ones. Several GPUs share the bytes and
    the arithmetic equally. Idle time and memory are known only for one GPU.
    """
    engine, device = llm.engine, torch.device(llm.engine.info.device)
    num_gpus = engine.config.tensor_parallel_size
    torch.cuda.reset_peak_memory_stats(device)
    with torch.cuda.device(device), logged_steps(llm) as log:
        began = time.perf_counter()
        run()
        logged_seconds = time.perf_counter() - began
        peak_bytes = torch.cuda.max_memory_allocated()
        rates = device_rates(device)
        idle_seconds = log.idle_seconds()
    roofline = roofline_seconds(costs_of(llm, log), rates.times(num_gpus))
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
