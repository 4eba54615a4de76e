"""With deterministic=True on a GPU, a request's tokens and log-probabilities are the same bytes in every schedule."""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.fp8_factory import LAYOUTS, quantized_copy
from support.gpu_engines import skip_without
from support.gpu_models import MODELS as FAMILY_MODELS
from support.gpu_models import VOCAB_SIZE, save_gpu_model
from support.long import long, some
from support.real_text import text_of_topics
from support.schedules import Differences, Request, Result, Schedule, Seen, Start, make_requests, random_ids

from benchmarks.workloads import SIZES, write_config
from nanovllm import LLM, PoolingParams
from nanovllm.layers.linear import LinearBase

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MAX_MODEL_LEN = 4096


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Memory that a failed test's traceback holds must not make the next test fail."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(what: str, runs: dict[str, tuple[dict[int, Result], Seen]], began: float) -> None:
    """Prints what happened; pytest shows it with -rP or -s."""
    print(f"\n{what}: {time.monotonic() - began:.1f} s")
    for name, (_, seen) in runs.items():
        print(f"  {name}: {seen}")


def assert_same_bytes(
    runs: dict[str, tuple[dict[int, Result], Seen]], start: Start, expected: dict[int, Result], reference: Seen,
    min_num_graphs: int = 2,
) -> None:  # fmt: skip
    """Each schedule gave the bytes of the reference, and did what it is for."""
    is_captured = DEVICE == "cuda" and not start.options.get("enforce_eager", False)
    for name, (found, seen) in runs.items():
        differences = Differences.of(found, expected)
        assert not differences.numbers, f"{name}: {differences}: {differences.numbers}"
        assert start.schedules[name].happened(seen, reference), f"{name} did not do what it is for: {seen}"
        num_sizes = len(seen.replays)
        assert num_sizes >= min_num_graphs if is_captured else num_sizes == 0, f"{name}: {seen}"


# Large models

NUM_REQUESTS = {"0.6B": 500, "8B": 500, "real": 500}
# Each starts one LLM. Most change several options at once, so that few LLMs start.
STARTS = {
    "captured": Start(
        {"max_num_seqs": 512},
        {
            "all at once": Schedule(
                lambda seen, _: seen.max_num_rows > 0.2 * seen.num_rows and seen.num_cached_tokens > 0
            ),
            "warm, shuffled": Schedule(
                lambda seen, cold: seen.num_cached_tokens > cold.num_cached_tokens, is_shuffled=True, is_warm=True
            ),
            "calls of 50": Schedule(lambda seen, _: seen.num_calls > 1 and seen.max_num_rows <= 100, call_size=50),
            "20 alone": Schedule(lambda seen, _: seen.num_calls == 20 and seen.max_num_rows <= 2, 1, num_rows=20),
        },
    ),
    "eager": Start(
        {"enforce_eager": True, "max_num_seqs": 256}, {"eager": Schedule(lambda seen, _: seen.num_cached_tokens > 0)}
    ),
    "no overlap": Start(
        {"overlap": False, "prefix_grouping": False, "max_num_seqs": 128},
        {"shuffled, no overlap": Schedule(lambda seen, _: seen.num_cached_tokens > 0, is_shuffled=True)},
    ),
    "chunks": Start(
        {"max_num_batched_tokens": 512, "enable_prefix_caching": False, "max_num_seqs": 100},
        {
            "chunks of 512, cache off": Schedule(
                lambda seen, _: (
                    len(seen.chunked) > 0.2 * seen.num_rows
                    and seen.num_cached_tokens == 0
                    and seen.max_num_tokens <= 512
                )
            )
        },
    ),
    "small cache": Start(
        {"kvcache_block_size": 64, "max_num_seqs": 64},
        {"preempted": Schedule(lambda seen, _: seen.num_preemptions > 5, is_shuffled=True)},
        cache_part=1 / 16,
    ),
    "37 at a time": Start(
        {"max_num_seqs": 37, "kvcache_block_size": 128},
        {"37 at a time": Schedule(lambda seen, _: seen.max_num_rows == 37)},
    ),
}


@dataclass
class Subject:
    """A model and its requests. Its results in each schedule are computed once."""

    directory: str
    options: dict[str, Any]
    requests: list[Request]
    _runs: dict[str, dict[str, tuple[dict[int, Result], Seen]]] = field(default_factory=dict)

    def runs(self, name: str) -> dict[str, tuple[dict[int, Result], Seen]]:
        if name not in self._runs:
            began, options = time.monotonic(), {"deterministic": True, **self.options}
            self._runs[name] = STARTS[name].run(self.directory, self.requests, **options)
            report(name, self._runs[name], began)
        return self._runs[name]

    def reference(self) -> tuple[dict[int, Result], Seen]:
        return self.runs("captured")["all at once"]


def slices_of(ids: list[int]) -> Callable[[int], list[int]]:
    rng = random.Random(1)

    def draw(length: int) -> list[int]:
        first = rng.randrange(len(ids) - length)
        return ids[first : first + length]

    return draw


def real_subject(directory: str) -> Subject:
    from transformers import AutoTokenizer

    draw = slices_of(AutoTokenizer.from_pretrained(directory)(text_of_topics())["input_ids"])
    options = {"device": DEVICE, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    return Subject(directory, options, make_requests(NUM_REQUESTS["real"], draw, 3000, 128))


@pytest.fixture(scope="module", params=some(["0.6B", "8B", "real"], "0.6B", "real"))
def subject(request, tmp_path_factory) -> Subject:
    """Random weights of a real model's shape, or a trained model, whose directory --real-model or the environment
    variable NANOVLLM_REAL_MODEL names. SmolLM2-135M-Instruct has nine heads of 64, and three of keys."""
    if request.param == "real":
        if not (directory := request.config.option.real_model or os.environ.get("NANOVLLM_REAL_MODEL")):
            pytest.skip("needs --real-model=DIRECTORY or NANOVLLM_REAL_MODEL")
        return real_subject(directory)
    directory = tmp_path_factory.mktemp("model")
    write_config(request.param, directory)
    vocab_size = SIZES[request.param][6]
    requests = make_requests(NUM_REQUESTS[request.param], random_ids(vocab_size), 3000, 128)
    options = {"device": DEVICE, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "load_format": "dummy"}
    return Subject(str(directory), options, requests)


@pytest.mark.parametrize("start", STARTS)
def test_no_schedule_changes_a_byte(subject, start):
    """Batch sizes, order of arrival, chunks, cache off, cold and warm, preemption, overlap, graphs, sizes of blocks."""
    assert_same_bytes(subject.runs(start), STARTS[start], *subject.reference())


def test_results_are_completions(subject):
    """A constant would be the same in every schedule too."""
    expected, _ = subject.reference()
    for (_, params), result in zip(subject.requests, expected.values(), strict=True):
        assert [len(tokens) for tokens in result.tokens] == [params.max_tokens] * params.n
    completions = [tuple(tokens) for result in expected.values() for tokens in result.tokens]
    assert sum(len(set(tokens)) > 3 for tokens in completions) > 0.5 * len(completions)
    assert len(set(completions)) > 0.5 * len(completions)


def test_an_llm_without_the_option_has_other_bytes(subject):
    """Otherwise these schedules would prove nothing. Most first tokens must be the same with the option and without."""
    expected, _ = subject.reference()
    names = ("all at once", "calls of 50")
    start = Start(STARTS["captured"].options, {name: STARTS["captured"].schedules[name] for name in names})
    began = time.monotonic()
    runs = start.run(subject.directory, subject.requests, deterministic=False, **subject.options)
    report("deterministic=False", runs, began)
    together, (apart, _) = runs["all at once"][0], runs["calls of 50"]
    differences = Differences.of(apart, together)
    print(f"  deterministic=False, two schedules: {differences}, of {len(together)}")
    print(f"  deterministic=False and True: {Differences.of(together, expected)}")
    assert differences.numbers
    num_same = sum(result.tokens[0][0] == expected[row].tokens[0][0] for row, result in together.items())
    print(f"  {num_same} of {len(together)} first tokens are the same")
    assert num_same > 0.5 * len(together)


# Small models of many kinds


class Model(NamedTuple):
    """A small random model. family, sizes: as in FAMILY_MODELS. layout: of a checkpoint in FP8; None is bfloat16."""

    family: str
    sizes: dict[str, Any]
    options: dict[str, Any] = {}
    layout: str | None = None


def qwen3(head_dim: int, num_heads: int = 6, num_kv_heads: int = 2, **options: Any) -> Model:
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return Model("qwen3", sizes, options)


# Whole blocks of 128 columns.
EXPERTS = {**FAMILY_MODELS["qwen3_moe"][1], "num_experts": 8, "moe_intermediate_size": 256}
MODELS = {
    "heads of 64": qwen3(64, 9, 3),
    "heads of 128": qwen3(128),
    "heads of 256": qwen3(256, 4),
    "float16": qwen3(128, dtype="float16"),
    "qwen2": Model(*FAMILY_MODELS["qwen2"]),  # biases
    "gemma3": Model(*FAMILY_MODELS["gemma3"]),  # windows
    "olmo3": Model(*FAMILY_MODELS["olmo3"]),
    "qwen3_moe": Model(*FAMILY_MODELS["qwen3_moe"]),
    "fp8 weights": qwen3(128, quantization="fp8"),
    "fp8 blocks": qwen3(128)._replace(layout="block"),
    "fp8 cache": qwen3(128, kv_cache_dtype="fp8"),
    "fp8 experts": Model("qwen3_moe", EXPERTS, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "fp8 blocks of experts": Model("qwen3_moe", EXPERTS, layout="block"),
    "float32": qwen3(64, dtype="float32"),
    "heads of 80": Model(*FAMILY_MODELS["llama, heads of 80"]),
    "fp8 cache, heads of 64": qwen3(64, kv_cache_dtype="fp8"),
    "fp8 cache, windows": Model(*FAMILY_MODELS["gemma3"], {"kv_cache_dtype": "fp8"}),
    **{name: Model(*FAMILY_MODELS[name]) for name in ("qwen2_moe", "olmo2", "phi3", "granite", "mixtral")},
}
LONG = (
    "float32", "heads of 80", "fp8 blocks of experts", "fp8 cache, heads of 64", "fp8 cache, windows", "qwen2_moe",
    "olmo2", "phi3", "granite", "mixtral",
)  # fmt: skip
SMALL_STARTS = {
    "captured": Start(
        {"max_num_seqs": 32},
        {
            "all at once": Schedule(lambda seen, _: seen.max_num_rows > 20 and seen.num_cached_tokens > 0),
            "warm, calls of 7": Schedule(
                lambda seen, cold: seen.num_cached_tokens > cold.num_cached_tokens and seen.max_num_rows <= 14,
                call_size=7, is_shuffled=True, is_warm=True,
            ),
        },
    ),
    "eager": Start(
        {
            "enforce_eager": True, "overlap": False, "max_num_batched_tokens": 50, "enable_prefix_caching": False,
            "kvcache_block_size": 64, "max_num_seqs": 40,
        },
        {
            "eager, preempted, chunks of 50": Schedule(
                lambda seen, _: len(seen.chunked) > 10, is_shuffled=True
            ),
            "eager, 4 alone": Schedule(lambda seen, _: seen.max_num_rows <= 2, call_size=1, num_rows=4),
        },
        cache_part=1 / 4,
    ),
}  # fmt: skip


def save(model: Model, directory: Path) -> str:
    save_gpu_model(directory / "plain", model.family, model.sizes)
    if model.layout is None:
        return str(directory / "plain")
    return str(quantized_copy(directory / "plain", directory / "fp8", LAYOUTS[model.layout]))


def small_requests() -> list[Request]:
    return make_requests(24, random_ids(VOCAB_SIZE), 180, 70, max_scored=80, beginnings=(0, 70, 135))


def options_of(model: Model) -> dict[str, Any]:
    common = {"device": DEVICE, "dtype": "bfloat16", "max_model_len": 256, "gpu_memory_utilization": 0.5}
    return {**common, "deterministic": True, **model.options}


def check_in_small_schedules(what: str, directory: str, **options: Any) -> None:
    """Layers with windows give blocks back early, so their models need not preempt."""
    began, requests = time.monotonic(), small_requests()
    found = {name: start.run(directory, requests, **options) for name, start in SMALL_STARTS.items()}
    report(what, {name: each for runs in found.values() for name, each in runs.items()}, began)
    expected, reference = found["captured"]["all at once"]
    assert sum(len(set(result.tokens[0])) > 3 for result in expected.values()) > 0.5 * len(requests)
    for name, runs in found.items():
        assert_same_bytes(runs, SMALL_STARTS[name], expected, reference, min_num_graphs=1)
    num_preemptions = sum(seen.num_preemptions for runs in found.values() for _, seen in runs.values())
    assert num_preemptions > 0 or MODELS[what].family in ("gemma3", "olmo3")


@pytest.mark.parametrize("name", [long(name) if name in LONG else name for name in MODELS])
def test_no_schedule_changes_a_byte_of_small_models(name, tmp_path):
    """Captured and eager steps, chunks, a warm cache and none, preemption, and requests alone."""
    check_in_small_schedules(name, save(MODELS[name], tmp_path), **options_of(MODELS[name]))


# Three heads of keys cannot be divided.
OF_TWO_RANKS = {name: MODELS[name] for name in ("heads of 128", "qwen3_moe", "fp8 weights")} | {
    "olmo2": Model("olmo2", {**FAMILY_MODELS["olmo2"][1], "num_attention_heads": 6, "num_key_value_heads": 6})
}


@pytest.mark.parametrize("name", some(OF_TWO_RANKS, "heads of 128", "qwen3_moe"))
def test_no_schedule_changes_a_byte_of_two_ranks(name, tmp_path):
    """Two ranks give the bytes of two ranks. They need not be those of one rank."""
    skip_without(2)
    began, model, requests = time.monotonic(), OF_TWO_RANKS[name], small_requests()
    options = {**options_of(model), "tensor_parallel_size": 2}
    directory = save(model, tmp_path)
    found = {start: SMALL_STARTS[start].run(directory, requests, **options) for start in SMALL_STARTS}
    report(f"{name}, two ranks", {name: each for runs in found.values() for name, each in runs.items()}, began)
    expected, reference = found["captured"]["all at once"]
    for start, runs in found.items():
        for schedule, (results, seen) in runs.items():
            differences = Differences.of(results, expected)
            assert not differences.numbers, f"{schedule}: {differences}: {differences.numbers}"
            assert SMALL_STARTS[start].schedules[schedule].happened(seen, reference), f"{schedule}: {seen}"


def test_two_ranks_without_the_option_have_other_bytes(tmp_path):
    skip_without(2)
    model, requests = MODELS["heads of 128"], small_requests()
    options = {**options_of(model), "tensor_parallel_size": 2, "deterministic": False}
    directory = save(model, tmp_path)
    runs = [SMALL_STARTS[start].run(directory, requests, **options) for start in SMALL_STARTS]
    differences = Differences.of(next(iter(runs[1].values()))[0], runs[0]["all at once"][0])
    print(f"two ranks, deterministic=False: {differences}, of {len(requests)}")
    assert differences.numbers


# Rows that pool, and scores

POOLED = (PoolingParams(), PoolingParams("token_embed"), PoolingParams(hidden_states_layers=[0, 1]),
          PoolingParams(pooling="cls"))  # fmt: skip
LABELS = PoolingParams("label", labels=((1, 2), (3,), (4, 5, 6)))
POOLED_SCHEDULES: tuple[dict[str, Any], ...] = (
    {}, {"enforce_eager": True, "max_num_batched_tokens": 40, "max_num_seqs": 7, "enable_prefix_caching": False},
)  # fmt: skip


@pytest.mark.parametrize("runner", ["auto", "pooling"])
@pytest.mark.parametrize("name", some(["heads of 64", "gemma3", "qwen3_moe", "fp8 weights"], "heads of 64"))
def test_no_schedule_changes_a_byte_of_pooled_or_scored_rows(name, runner, tmp_path):
    """Generation shows the last token of a prompt only; here the states of all tokens are compared."""
    directory, prompts = save(MODELS[name], tmp_path), [prompt for prompt, _ in small_requests()]
    kinds = [*POOLED, LABELS] if runner == "auto" else POOLED
    params = [kinds[row % len(kinds)] for row in range(len(prompts))]
    pairs = [(prompt[:-3], prompt[-3:]) for prompt in prompts if len(prompt) > 3]
    found, num_steps = [], []
    for schedule in POOLED_SCHEDULES:
        with LLM(directory, runner=runner, **{**options_of(MODELS[name]), "max_num_seqs": 32, **schedule}) as llm:
            results = [output.data for output in llm.generate_iter(prompts, params)]
            if runner == "auto":
                outputs = llm.loglikelihood(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
                results += [output.logprobs for output in outputs]
            found.append(results)
            num_steps.append(llm.metrics()["num_steps"])
    assert num_steps[1] > 3 * num_steps[0]
    wrong = [row for row, pair in enumerate(zip(*found, strict=True)) if not np.array_equal(*pair)]
    assert not wrong, f"rows {wrong} of {len(found[0])}"


# The check of each start


def few_rows(out: torch.Tensor) -> torch.Tensor:
    """A library's other kernel for few rows."""
    return out * 1.02 if len(out) < 20 else out


def later_rows(out: torch.Tensor) -> torch.Tensor:
    """A kernel's other code for the last tile."""
    return torch.cat([out[:33], out[33:] * 1.02])


@pytest.mark.parametrize("fault", [few_rows, later_rows])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_a_start_finds_products_that_depend_on_the_step(fault, enforce_eager, tmp_path, monkeypatch):
    model, multiply = MODELS["heads of 128"], LinearBase._multiply

    def planted(layer: LinearBase, x: Any, bias: torch.Tensor | None, adapters: Any) -> Any:
        out = multiply(layer, x, bias, adapters)
        return fault(out) if isinstance(out, torch.Tensor) else out

    directory = save(model, tmp_path)
    monkeypatch.setattr(LinearBase, "_multiply", planted)
    with pytest.raises(RuntimeError, match=r"deterministic=True: .* differ in their last bits on this machine"):
        LLM(directory, enforce_eager=enforce_eager, max_num_seqs=64, **options_of(model))


def test_more_than_two_gpus_are_refused(tmp_path):
    skip_without(4)
    with pytest.raises(ValueError, match="deterministic=True was tested on one and on two GPUs"):
        LLM(save(MODELS["heads of 128"], tmp_path), tensor_parallel_size=4, **options_of(MODELS["heads of 128"]))


@pytest.mark.parametrize("backend", ["sdpa", "torch", "flash"])
def test_a_backend_that_cannot_keep_the_promise_is_refused(backend, tmp_path):
    with pytest.raises(ValueError, match=f'with attention_backend="{backend}", the last bits depend on the batch'):
        LLM(save(MODELS["heads of 128"], tmp_path), attention_backend=backend, **options_of(MODELS["heads of 128"]))
