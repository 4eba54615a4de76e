"""With deterministic=True, a request's tokens and log-probabilities are the same bytes in every schedule."""

import itertools
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.family_factory import FAMILIES, save_divisible_model, save_family_model
from support.long import long, some
from support.model_factory import TINY, save_model

from nanovllm import LLM, PoolingParams, SamplingParams
from nanovllm.layers.linear import LinearBase
from nanovllm.ops import row_invariant
from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.row_invariant import (
    activated,
    in_row_tiles,
    row_invariant_act_and_mul,
    row_invariant_linear,
    sigmoid,
    sums_of_rows,
)
from nanovllm.replicas.replicas import Replicas
from nanovllm.runner import determinism

MAX_TOKENS = 10
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 2, "max_tokens": 3},
    {"temperature": 0.9, "n": 3, "logprobs": 1},
)
# A vocabulary that PyTorch would sum in parts, if a step samples a single row.
LARGE_VOCABULARY = {"vocab_size": 40000, "hidden_size": 16, "intermediate_size": 24, "tie_word_embeddings": True}
MODELS = {
    "qwen3": {}, "large vocabulary": {}, "gemma3": {}, "qwen2_moe": {}, "olmo2": {}, "phi3": {}, "granite": {},
    "qwen3_moe": {}, "olmo3": {},
    "fp8 weights": {"quantization": "fp8"}, "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 experts": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}  # fmt: skip


@dataclass
class Schedule:
    """One way to run the requests: in this order, `call_size` at a time, `num_times` times. In a tiny pool, the longest
    request fills the KV cache."""

    options: dict[str, Any] = field(default_factory=dict)
    is_shuffled: bool = False
    call_size: int = 10**6
    num_times: int = 1
    has_tiny_pool: bool = False


ALONE = Schedule({"overlap": False, "enable_prefix_caching": False, "kvcache_block_size": 5}, call_size=1)
SCHEDULES = {
    "all at once": Schedule(),
    "shuffled, no overlap": Schedule({"overlap": False}, is_shuffled=True),
    "chunks of 17, cache off": Schedule({"max_num_batched_tokens": 17, "enable_prefix_caching": False}),
    "chunks of 5": Schedule({"max_num_batched_tokens": 5, "kvcache_block_size": 3}, is_shuffled=True),
    "tiny pool": Schedule({"kvcache_block_size": 1}, is_shuffled=True, has_tiny_pool=True),
    "7 at a time": Schedule({"max_num_seqs": 7, "kvcache_block_size": 4}, is_shuffled=True),
    "alone, warm cache": Schedule({"kvcache_block_size": 1}, call_size=1, num_times=2),
    "calls of 3": Schedule({"kvcache_block_size": 4}, call_size=3),
}


def save(name: str, directory) -> str:
    if name == "large vocabulary":
        save_model(directory, seed=4, **LARGE_VOCABULARY)
    elif name in FAMILIES or name == "fp8 experts":
        family = "qwen3_moe" if name == "fp8 experts" else name
        save_divisible_model(directory, family, random.Random(5), vocab_size=TINY["vocab_size"])
    else:
        save_model(directory, seed=11, attention_bias=True)
    return str(directory)


def make_requests(num_requests: int) -> list[tuple[list[int], SamplingParams]]:
    """Ragged prompts, most of them with a shared beginning, with each of KINDS in turn."""
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]

    beginnings = [tokens(length) for length in (0, 9, 16, 33, 70)]
    return [
        (
            rng.choice(beginnings) + tokens(rng.randrange(1, 60)),
            SamplingParams(**({"max_tokens": MAX_TOKENS} | KINDS[row % len(KINDS)]), ignore_eos=True, seed=row),
        )
        for row in range(num_requests)
    ]


def numbers_of(output) -> tuple:
    """All that a request's output says, its log-probabilities to the last bit."""

    def of_tokens(positions) -> list:
        return [each and sorted((id, x.rank, x.logprob) for id, x in each.items()) for each in positions or ()]

    assert output.error is None, output.error
    completions = [(each.token_ids, of_tokens(each.logprobs)) for each in output.outputs]
    return completions, of_tokens(output.prompt_logprobs)


def run(model: str, requests: list, schedule: Schedule, **options) -> tuple[list[tuple], dict[str, Any]]:
    """Each request's numbers, and the LLM's metrics. The runs of one request must agree with each other."""
    order = list(range(len(requests)))
    if schedule.is_shuffled:
        random.Random(1).shuffle(order)
    if schedule.has_tiny_pool:
        options["num_kvcache_blocks"] = max(len(prompt) + params.max_tokens for prompt, params in requests)
    found: dict[int, tuple] = {}
    with LLM(model, **({"device": "cpu", "deterministic": True} | options | schedule.options)) as llm:
        for first in [*range(0, len(order), schedule.call_size)] * schedule.num_times:
            rows = order[first : first + schedule.call_size]
            prompts, params = zip(*(requests[row] for row in rows), strict=True)
            for row, output in zip(rows, llm.generate(list(prompts), list(params), use_tqdm=False), strict=True):
                assert found.setdefault(row, numbers_of(output)) == numbers_of(output), f"row {row} of the same LLM"
        metrics = llm.metrics()
    return [found[row] for row in range(len(requests))], metrics


def rows_that_differ(found: list, expected: list) -> list[int]:
    return [row for row, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]


DEFAULTS = (("qwen3", torch.bfloat16), ("large vocabulary", torch.float32), ("qwen2_moe", torch.bfloat16),
            ("gemma3", torch.float32), ("fp8 experts", torch.bfloat16))  # fmt: skip
IN_FLOAT32 = ("qwen3", "large vocabulary", "gemma3", "qwen3_moe", "fp8 experts")
CASES = [
    *itertools.product(MODELS, [torch.bfloat16]),
    *itertools.product(IN_FLOAT32, [torch.float32]),
    ("qwen3", torch.float16),
]


@pytest.mark.parametrize(("name", "dtype"), [each if each in DEFAULTS else long(*each) for each in CASES], ids=str)
def test_no_schedule_changes_a_byte(name, dtype, tmp_path, request):
    """Batch sizes, order of arrival, chunks, cache off, cold and warm, preemption, overlap, rows of all kinds. Each
    request by itself is the reference. With the option off, last bits do differ here."""
    is_long = request.config.option.long
    num_requests = 24 if not is_long else 200 if name == "qwen3" else 48
    model, requests = save(name, tmp_path / "model"), make_requests(num_requests)
    options = {"dtype": dtype, "max_model_len": 256, **MODELS[name]}
    alone, _ = run(model, requests, ALONE, **options)
    assert sum(len(set(each[0][0][0])) > 3 for each in alone) > 0.5 * len(requests)  # most completions wander
    num_preemptions = hit_rate = 0.0
    every = list(SCHEDULES) if is_long else ["chunks of 17, cache off", "tiny pool"]
    every += ["shuffled, no overlap"] if name == "qwen3" and not is_long else []
    for schedule in every:
        found, metrics = run(model, requests, SCHEDULES[schedule], **options)
        assert not (rows := rows_that_differ(found, alone)), f"{schedule}: rows {rows}"
        num_preemptions += metrics["num_preemptions"]
        hit_rate = max(hit_rate, metrics["prefix_cache_hit_rate"])
    # Most of this model's layers have windows, whose blocks come back so early that the pool is never full.
    assert (num_preemptions > 0 or name == "olmo3") and hit_rate > 0.2
    if is_long or name == "qwen3":
        found, _ = run(model, requests, SCHEDULES["chunks of 17, cache off"], deterministic=False, **options)
        assert rows_that_differ(found, alone), "the test cannot tell an LLM without the option"
        if dtype == torch.float32:  # greedy tokens are those of an LLM without the option
            assert all(found[row][0][0][0] == alone[row][0][0][0] for row in range(0, len(requests), len(KINDS)))


POOLED = (PoolingParams(), PoolingParams("token_embed"), PoolingParams("label", labels=((1, 2), (3,), (4, 5, 6))),
          PoolingParams(hidden_states_layers=[0, 1]))  # fmt: skip


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
def test_no_schedule_changes_a_byte_of_pooled_or_scored_rows(dtype, tmp_path):
    model = save("qwen3", tmp_path / "model")
    prompts = [prompt for prompt, _ in make_requests(24)]
    params = [POOLED[row % len(POOLED)] for row in range(len(prompts))]
    options = {"device": "cpu", "dtype": dtype, "deterministic": True}
    with LLM(model, **options) as llm:
        alone = [next(llm.generate_iter([prompt], each)).data for prompt, each in zip(prompts, params, strict=True)]
        cut = [(prompt[:-3], prompt[-3:]) for prompt in prompts if len(prompt) > 3]
        scores = [llm.loglikelihood([context], [end])[0].logprobs.tolist() for context, end in cut]
    for schedule in ("chunks of 5", "7 at a time"):
        with LLM(model, **options, **SCHEDULES[schedule].options) as llm:
            found = [output.data for output in llm.generate_iter(prompts, params)]
            outputs = llm.loglikelihood(*map(list, zip(*cut, strict=True)))
            assert [output.logprobs.tolist() for output in outputs] == scores, schedule
        for row, pair in enumerate(zip(found, alone, strict=True)):
            assert np.array_equal(*pair), f"{schedule}, row {row}"


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe", "olmo2"])
def test_no_schedule_changes_a_byte_of_two_ranks(name, dtype, tmp_path):
    """Two ranks give the bytes of two ranks, in every schedule. They need not be those of one rank."""
    model, requests = save(name, tmp_path / "model"), make_requests(60)
    options = {"dtype": dtype, "max_model_len": 256, "tensor_parallel_size": 2}
    alone, _ = run(model, requests, ALONE, **options)
    for schedule in ("all at once", "chunks of 17, cache off", "tiny pool"):
        found, _ = run(model, requests, SCHEDULES[schedule], **options)
        assert not (rows := rows_that_differ(found, alone)), f"{schedule}: rows {rows}"


@pytest.mark.long
def test_replicas_give_the_bytes_of_one_llm(tmp_path):
    model, requests = save("qwen3", tmp_path / "model"), make_requests(60)
    options = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 256, "deterministic": True}
    alone, _ = run(model, requests, ALONE, **options)
    with Replicas(model, data_parallel_size=2, **options) as replicas:
        outputs = {
            output.prompt_index: output for output in replicas.generate_iter(*map(iter, zip(*requests, strict=True)))
        }
    assert not rows_that_differ([numbers_of(outputs[row]) for row in range(len(requests))], alone)


def test_a_start_finds_rows_that_depend_on_their_place(tmp_path, monkeypatch):
    """A build of PyTorch may lack the properties that the promise is built on. Here a layer's products depend on the
    place of a row in its tile."""
    model, multiply = save("qwen3", tmp_path / "model"), LinearBase._multiply
    for place in (1, 33):

        def planted(layer, x, bias, adapters, place=place):
            out = multiply(layer, x, bias, adapters)
            out[place:] = out[place:].nextafter(torch.tensor(torch.inf))
            return out

        monkeypatch.setattr(LinearBase, "_multiply", planted)
        with pytest.raises(RuntimeError, match="deterministic=True: 37 rows in another order differ"):
            LLM(model, device="cpu", dtype="float32", deterministic=True)


def test_a_start_compares_no_step_that_is_larger_than_allowed(tmp_path, monkeypatch):
    """Larger ones have neither captures nor measured memory on a GPU."""
    sizes, numbers = set(), determinism._numbers

    def noted(program, prompts, start, end, ids):
        sizes.add((len(prompts), end - start))
        return numbers(program, prompts, start, end, ids)

    monkeypatch.setattr(determinism, "_numbers", noted)
    LLM(save("qwen3", tmp_path / "model"), device="cpu", deterministic=True, max_num_batched_tokens=8).close()
    assert max(rows for rows, _ in sizes) == max(tokens for _, tokens in sizes) == 8


def test_a_start_finds_chunks_that_change_bits(tmp_path, monkeypatch):
    """Attention that adds keys in other tiles gives a decode other bits than the same token in a prompt."""
    from nanovllm.attention.sdpa_backend import SDPAAttention

    monkeypatch.setattr(SDPAAttention, "is_deterministic", True)
    with pytest.raises(RuntimeError, match="a prompt of 20 tokens and its chunks differ in their last bits"):
        LLM(save("qwen3", tmp_path / "model"), device="cpu", attention_backend="sdpa", deterministic=True)


def test_decodes_take_whole_tiles_where_small_ones_have_other_bits(tmp_path, monkeypatch):
    """Here a product of few rows has other bits, as that of one row has."""
    multiply, sizes = torch.bmm, set()

    def planted(left, right):
        sizes.add(left.shape[1])
        out = multiply(left, right)
        return out if left.shape[1] > 8 else out.nextafter(torch.tensor(torch.inf))

    monkeypatch.setattr(torch, "bmm", planted)
    model, requests = save("qwen3", tmp_path / "model"), make_requests(6)
    options = {"dtype": torch.float32, "max_model_len": 256}
    alone, _ = run(model, requests, ALONE, **options)
    assert min(sizes) <= 8  # tried when the LLM was made
    sizes.clear()
    found, _ = run(model, requests, SCHEDULES["all at once"], **options)
    assert found == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "sdpa"}, 'with attention_backend="sdpa", the last bits depend on .* "auto" or "tiled"'),
        ({"attention_backend": "torch"}, 'with attention_backend="torch", the last bits depend on the batch'),
    ],
)
def test_a_backend_that_cannot_keep_the_promise_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("bundled", deterministic=True, device="cpu", **options)


def test_a_model_with_recurrent_states_is_refused(tmp_path):
    options = FAMILIES["qwen3_5"][2](random.Random(3))
    save_family_model(tmp_path / "model", "qwen3_5", options)
    with pytest.raises(ValueError, match="deterministic=True cannot run a model with recurrent states"):
        LLM(str(tmp_path / "model"), deterministic=True, device="cpu")


def test_a_mean_is_refused(tmp_path):
    with LLM("bundled", deterministic=True, device="cpu") as llm:
        with pytest.raises(ValueError, match="deterministic=True cannot pool the mean"):
            llm.embed(["a"], pooling="mean")
        assert np.isfinite(llm.embed(["a"])[0].embedding).all()


# Operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 33, 100])
def test_a_product_in_tiles_equals_the_whole_one(num_rows, dtype):
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, 50, dtype=dtype), torch.randn(77, 50, dtype=dtype)
    sizes = []

    def multiply(rows):
        sizes.append(len(rows))
        return F.linear(rows, weight)

    product = in_row_tiles(x, multiply)
    assert product.shape == (num_rows, 77) and set(sizes) == {32}
    torch.testing.assert_close(product, F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_of_an_odd_size_do_not_depend_on_their_place(dtype):
    """A router of 30 inputs and 11 experts gave 17 of 20 requests other bytes in a batch: in MKL's products, rows that
    begin at other addresses than multiples of 16 bytes are added in another order."""
    torch.manual_seed(0)
    for input_size, output_size in ((30, 11), (5, 3), (79, 8), (250, 6), (33, 300)):
        x, weight = torch.randn(20, input_size, dtype=dtype), torch.randn(output_size, input_size, dtype=dtype)
        for row in x:
            product = row_invariant_linear(row.repeat(32, 1), weight)
            assert (product == product[:1]).all()
            torch.testing.assert_close(product[0], F.linear(row, weight))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_do_not_depend_on_their_place(activation, dtype):
    """PyTorch's own do: a tensor's last numbers are computed by other instructions."""
    torch.manual_seed(0)
    x = torch.randn(1000, 94).mul_(3).to(dtype)
    whole = row_invariant_act_and_mul(x, activation)
    torch.testing.assert_close(whole, act_and_mul(x, activation))
    for first in range(0, 999, 37):
        part = row_invariant_act_and_mul(x[first : first + 3].clone(), activation)
        assert torch.equal(part, whole[first : first + 3])
    for function, expected in ((sigmoid, torch.sigmoid), (partial(activated, activation=activation), None)):
        numbers = function(x)
        if expected is not None:
            torch.testing.assert_close(numbers, expected(x))
        for row, size in enumerate(range(1, 61)):
            assert torch.equal(function(x[row, :size].clone()), numbers[row, :size])


@pytest.mark.parametrize("size", [1000, 50000])
def test_sums_of_one_row_are_those_of_several(size):
    """PyTorch divides a long sum between threads, if there is one."""
    x, num_threads = torch.randn(5, size), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sums = [sums_of_rows(row[None]) for row in x]
    finally:
        torch.set_num_threads(num_threads)
    torch.testing.assert_close(sums_of_rows(x), x.sum(1, keepdim=True))
    assert torch.equal(torch.cat(sums), sums_of_rows(x))


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe"])
def test_every_product_of_a_model_has_the_same_number_of_rows(name, tmp_path, monkeypatch):
    """Products of tiny models have the same bits at most numbers of rows, so the bytes alone would not show one that
    takes all rows of the step."""
    sizes = set()
    for module in (row_invariant, F):

        def noted(x, *args, function=module.linear, **options):
            sizes.add((x.shape[0], function.__module__))
            return function(x, *args, **options)

        monkeypatch.setattr(module, "linear", noted)
    with LLM(save(name, tmp_path / "model"), device="cpu", deterministic=True) as llm:
        sizes.clear()
        llm.generate([[5, 6, 7], [8], list(range(1, 40))], SamplingParams(max_tokens=3), use_tqdm=False)
    assert {num_rows for num_rows, _ in sizes} == {32}, sizes


def test_ranks_add_in_their_order():
    """Three numbers whose sum depends on the order."""
    parts = torch.tensor([[1e8, 1.0], [1.0, 1e8], [-1e8, -1e8]])

    class Rank(Parallel):
        def all_gather(self, tensor):
            return parts

    own = torch.zeros(2)
    assert Rank(0, 3, in_rank_order=True).all_reduce(own) is own
    assert torch.equal(own, (parts[0] + parts[1]) + parts[2])
