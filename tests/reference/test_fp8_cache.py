"""The KV cache in FP8: its format, each kernel against its plain twin, and engines against each other."""

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_case import MIXED, TOLERANCE, make_case, relative_error, run
from support.family_factory import FAMILIES, save_family_model
from support.fp8_cache import CPU, DECODE_TOLERANCE, assert_same_bits, heads_of_many_sizes, poisoned_cache
from support.fp8_factory import HALF_MIN, HALF_ULP, assert_alike, random_product, random_tensor
from support.long import some
from support.model_factory import save_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention import triton_prompts
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.attention.flash_backend import FlashAttention
from nanovllm.jobs.identity import identity_of
from nanovllm.models.config import one_group
from nanovllm.ops.copy_blocks import copy_blocks
from nanovllm.ops.layer_cache import (
    LARGEST_KEY,
    MIN_SCALE,
    LayerCache,
    quantize_keys,
    quantize_values,
    rounded_keys,
    rounded_values,
    whole_heads,
)
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.quantize import E4M3, LARGEST, ScaledProduct
from nanovllm.ops.store_kvcache import store_kvcache
from nanovllm.runner.device import kv_cache_dtype_of
from nanovllm.runner.kv_cache import KVCacheLayout
from nanovllm.sampling_params import completion_seed

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities that are meant

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


# The format


@DTYPES
def test_a_value_is_rounded_to_e4m3_by_a_power_of_two(dtype):
    x = heads_of_many_sizes(200, 3, 40).to(dtype)
    heads, scales = quantize_values(x)
    assert heads.dtype == E4M3 and torch.equal(scales, torch.exp2(scales.log2().round()))
    exact, found = x.float(), whole_heads(heads, scales)
    limit = HALF_ULP * exact.abs() + HALF_MIN * scales[..., None]
    assert ((found - exact).abs() <= limit).all()
    quotients = exact.abs().amax(-1) / scales
    is_zero = quotients == 0
    assert is_zero.sum() == 3 and (found[is_zero] == 0).all()
    assert (quotients[~is_zero] > 224).all() and (quotients <= 448).all(), "the range of e4m3 is used, not exceeded"
    assert torch.equal(found, found.bfloat16().float()), "exact in bfloat16"


@DTYPES
def test_a_key_is_rounded_to_integers(dtype):
    x = heads_of_many_sizes(200, 3, 40).to(dtype)
    heads, scales = quantize_keys(x)
    assert heads.dtype == torch.int8 and torch.equal(scales, scales.bfloat16().float())
    exact, found = x.float(), whole_heads(heads, scales)
    assert ((found - exact).abs() <= 0.50001 * scales[..., None]).all()
    largest = heads.int().abs().amax(-1)
    is_zero = exact.abs().amax(-1) == 0
    assert is_zero.sum() == 3 and (found[is_zero] == 0).all()
    assert (largest[~is_zero] >= 126).all() and (largest <= 127).all(), "the range is used, and −128 is not"


@pytest.mark.parametrize("peak", [1e-45, 1e-38, 1e-10, 2e-10, 5e-10, 1e-9, 1e36, 3e38])
def test_the_ends_of_float32_are_scaled_too(peak):
    """The smallest scale is 2^-40. The inverse of a value's can still be multiplied by many weights."""
    x = torch.tensor([[peak, -peak / 2, 0, peak / 7]])
    for quantize in (quantize_keys, quantize_values):
        heads, scales = quantize(x)
        if quantize is quantize_keys and peak > 2.0**120:
            assert scales[0] == math.inf and not heads.any()  # because 32896 times the scale would be infinite
            continue
        assert scales[0] * 32896 < 3e38 or quantize is quantize_values
        largest = LARGEST_KEY if heads.dtype == torch.int8 else LARGEST
        assert (scales[0] == MIN_SCALE) == (peak <= largest * MIN_SCALE)
        error = (heads.double() * scales.double()[:, None] - x.double()).abs()
        limit = 0.50001 * scales
        if heads.dtype == E4M3:
            limit = HALF_ULP * x.double().abs() + HALF_MIN * scales
        assert (error <= limit).all()


@pytest.mark.parametrize("quantize", [quantize_keys, quantize_values])
def test_what_is_no_number_stays_in_its_head(quantize):
    x = random_tensor(4, 2, 16)
    expected = whole_heads(*quantize(x))
    x[1, 0, 3], x[2, 1, 15], x[3, 0, 0] = float("nan"), float("inf"), -float("inf")
    heads, scales = quantize(x)
    is_bad = torch.zeros(4, 2, dtype=torch.bool)
    is_bad[1, 0] = is_bad[2, 1] = is_bad[3, 0] = True
    assert not heads[is_bad].float().any() and (scales[is_bad] == math.inf).all()
    assert whole_heads(heads, scales)[is_bad].isnan().all()
    assert torch.equal(whole_heads(heads, scales)[~is_bad], expected[~is_bad])


@pytest.mark.parametrize(("num_kv_heads", "block_size", "head_dim"), [(3, 4, 10), (1, 32, 16), (2, 1, 64)])
def test_what_is_written_is_read_and_lies_where_the_format_says(num_kv_heads, block_size, head_dim):
    cache = poisoned_cache(9, block_size, num_kv_heads, head_dim)
    assert (cache.num_kv_heads, cache.block_size, cache.head_dim) == (num_kv_heads, block_size, head_dim)
    before = LayerCache(*(tensor.clone() for tensor in cache))
    k, v = (heads_of_many_sizes(9, num_kv_heads, head_dim, seed) for seed in (0, 1))
    slots = torch.randperm(9 * block_size, generator=torch.Generator().manual_seed(0))[:9]
    slots[[0, 7]] = -1
    cache.write(k, v, slots)
    found = [x.unflatten(0, (9, block_size)) for x in cache.read(torch.arange(9))]
    halves = cache.scales.view(torch.bfloat16).unflatten(-1, (block_size, 2))  # little-endian: first the value's
    is_written = torch.zeros(9, block_size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, place = divmod(slot, block_size)
        is_written[block, place] = True
        for head in range(num_kv_heads):
            key, value = cache.keys[block, head, place].float(), cache.values[block, head, :, place].float()
            value_scale, key_scale = halves[block, head, place].float()
            expected = rounded_keys(k[token, head]), rounded_values(v[token, head])
            assert torch.equal(key * key_scale, expected[0])
            assert torch.equal(value * value_scale, expected[1])
            rows = torch.tensor([slot * num_kv_heads + head])
            for of_head, each, whole in zip(cache.read_heads(rows), expected, found, strict=True):
                assert torch.equal(of_head[0], each)
                assert torch.equal(whole[block, place, head], each)
    for now, old in zip(
        (cache.keys.transpose(1, 2), cache.values.permute(0, 3, 1, 2), cache.scales.transpose(1, 2)),
        (before.keys.transpose(1, 2), before.values.permute(0, 3, 1, 2), before.scales.transpose(1, 2)),
        strict=True,
    ):
        now, old = (x[~is_written].contiguous().view(torch.uint8) for x in (now, old))
        assert torch.equal(now, old), "another slot was written"


def test_blocks_are_read_in_the_order_asked_for():
    cache = poisoned_cache(5, 4, 2, 16)
    k, v = random_tensor(20, 2, 16), random_tensor(20, 2, 16, seed=1)
    cache.write(k, v, torch.arange(20))
    for found, x in zip(cache.read(torch.tensor([3, 0, 3])), (rounded_keys(k), rounded_values(v)), strict=True):
        assert torch.equal(found, x.unflatten(0, (5, 4))[[3, 0, 3]].flatten(0, 1))


# Stores


@pytest.mark.grid(1)
@DTYPES
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("order", ["scattered", "prompts", "one prompt", "a hole", "another goes on"])
def test_the_store_kernels_write_what_their_twin_writes(head_dim, block_size, order, dtype):
    """Tokens are anywhere or next to each other, over the end of a block. Strides are not powers of two, and padding
    comes between tokens and after them.
    """
    num_tokens, num_kv_heads = 75, 3
    found, expected = (poisoned_cache(3, block_size, num_kv_heads, head_dim) for _ in range(2))
    k, v = (heads_of_many_sizes(num_tokens, num_kv_heads, head_dim, seed) for seed in (0, 1))
    k[8, 1, 3], k[9, 0, head_dim - 1], v[10, 2, 0] = float("nan"), -float("inf"), float("inf")
    if dtype != torch.float16:
        k[11, 0, 1], k[12, 1, 2], k[13, 2, 0] = 2.0**120, -1.3e36, 3e38
    qkv = torch.cat((random_tensor(num_tokens, 4, head_dim), k, v), 1).to(dtype)
    _, k, v = qkv.split((4, num_kv_heads, num_kv_heads), 1)
    slots = torch.randperm(3 * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[::6] = -1
    if order != "scattered":
        # A program stores 32 tokens. The first prompt begins within a block, and goes on in another one than the next.
        prompt = torch.cat((torch.arange(2 * block_size + 5, 3 * block_size), torch.arange(block_size)))
        prompt = prompt[: num_tokens - 3]
        slots = torch.cat((prompt, torch.full((num_tokens - len(prompt),), -1)))
    if order == "a hole":  # where the next block begins, followed by slot 0
        slots[block_size - 5], slots[block_size - 4 :] = -1, torch.arange(num_tokens - block_size + 4)
    if order == "another goes on":  # within a block, after the first tokens, which end with their block
        first = block_size - 5
        slots[first : first + 15] = torch.arange(block_size + 7, block_size + 22)
        slots[first + 15 :] = -1
    if order == "prompts":
        slots[1:10] = torch.tensor([block_size + 3, block_size + 9, *range(block_size + 20, block_size + 27)])
        slots[40] = -1
    expected.write(k, v, slots)
    store_kvcache(k, v, found, slots, use_kernels=True)
    assert_same_bits(found, expected)


@pytest.mark.grid(1)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (64, 64), (80, 48), (80, 2), (128, 128)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (16, 1)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("has_prompts", [False, True])
def test_the_fused_kernel_stores_what_its_twin_stores(
    head_dim, rotary_dim, num_heads, num_kv_heads, has_norm, is_scaled, has_prompts
):
    """Keys are stored when finished, values when projected; the other half of a scale is not changed."""
    num_tokens, num_normed = 37, num_heads + num_kv_heads
    product = random_product(num_tokens, (num_normed + num_kv_heads) * head_dim)
    product.product[6], product.product[7] = 0, product.product[7] * 1e-6
    product.product[8, [3, (num_heads + 1) * head_dim - 1, -2]] = float("nan")  # in a query, a key and a value
    product.product[9, -1] = float("inf")
    dtype = torch.float32 if has_norm else torch.float16  # the interpreter does not round to bfloat16
    product = ScaledProduct(product.product.to(dtype), product.row_scales, product.column_scales)
    qkv: Any = product if is_scaled else product.whole()
    weight = torch.rand(num_normed, head_dim) + 0.5 if has_norm else None
    cos, sin = (random_tensor(num_tokens, 1, head_dim, seed=seed).to(dtype) for seed in (3, 4))
    usual = LayerCache(*(torch.zeros(2, 32, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[::5] = -1
    out = qk_norm_rotate_store(qkv, weight, 1e-6, cos, sin, rotary_dim, usual, slots)
    found, expected = (poisoned_cache(2, 32, num_kv_heads, head_dim) for _ in range(2))
    found_out = qk_norm_rotate_store(qkv, weight, 1e-6, cos, sin, rotary_dim, found, slots, has_prompts)
    torch.testing.assert_close(found_out, out, rtol=0, atol=0, equal_nan=True)
    values = product.whole().unflatten(1, (-1, head_dim))[:, num_normed:]
    expected.write(out[:, num_heads:], values, slots)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
def test_copied_blocks_take_their_scales_along(fused):
    layout = KVCacheLayout(one_group(3), 32, 2, 48, E4M3)
    cache = layout.empty(6, CPU)
    for seed, layer in enumerate(cache.layers):
        k, v = random_tensor(64, 2, 48, seed=seed), random_tensor(64, 2, 48, seed=seed + 10)
        layer.write(k, v, torch.arange(64))
        layer.write(k, v, torch.arange(64, 128))
    for tensor in cache.tensors:
        copy_blocks(tensor, ((0, 4), (1, 2), (0, 5)), fused)
    for seed, layer in enumerate(cache.layers):
        k, v = random_tensor(64, 2, 48, seed=seed), random_tensor(64, 2, 48, seed=seed + 10)
        for found, x in zip(layer.read(torch.tensor([4, 2, 5, 0])), (rounded_keys(k), rounded_values(v)), strict=True):
            assert torch.equal(found, x.unflatten(0, (2, 32))[[0, 1, 0, 0]].flatten(0, 1))


# Attention. The formula sees rounded keys and values; everything that is not a sequence's own is NaN.


def assert_exact(backend: str, case) -> None:
    tolerance = TOLERANCE[case.queries[0].dtype]
    if backend == "triton" and case.metadata.max_num_decodes:
        tolerance = max(tolerance, DECODE_TOLERANCE)
    error = relative_error(case, run(backend, case))
    assert error <= tolerance, error


BACKENDS_AND_DTYPES = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", torch.float32), ("torch", torch.bfloat16), ("sdpa", torch.float32), ("sdpa", torch.bfloat16),
        ("triton", torch.float32), ("triton", torch.float16),
    ],
    ids=str,
)  # fmt: skip


PROMPTS_ONLY = [(0, 17), (12, 9), (0, 4), (5, 2), (64, 64), (130, 70), (0, 150), (31, 33)]


@pytest.mark.grid(1)
@BACKENDS_AND_DTYPES
@pytest.mark.parametrize("window", [0, 1, 33, 100])
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim"), [(2, 1, 32), (1, 4, 64), (3, 3, 80), (2, 2, 128), (1, 2, 256)]
)
def test_prompts_attend_as_the_formula_says(backend, dtype, window, block_size, num_kv_heads, group_size, head_dim):
    options = {"dtype": dtype, "seed": head_dim + window, "window": window, "is_fp8": True}
    assert_exact(backend, make_case(PROMPTS_ONLY, block_size, num_kv_heads, group_size, head_dim, **options))


@pytest.mark.grid(1)
@BACKENDS_AND_DTYPES
@pytest.mark.parametrize("window", [0, 1, 33, 300])
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim"), [(2, 1, 32), (1, 8, 64), (3, 3, 80), (2, 5, 128), (1, 2, 256)]
)
def test_decodes_beside_prompts_attend_as_the_formula_says(
    backend, dtype, window, block_size, num_kv_heads, group_size, head_dim
):
    options = {"dtype": dtype, "seed": head_dim + window, "window": window, "is_fp8": True}
    sequences = [(250, 1), (256, 1), (600, 1), *MIXED]
    assert_exact(backend, make_case(sequences, block_size, num_kv_heads, group_size, head_dim, **options))


@pytest.mark.parametrize("backend", ["torch", "sdpa", "tiled", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_prompt_in_chunks_attends_as_in_one_piece(backend, dtype):
    """Queries see new keys as they are cached; otherwise results would depend on where a prompt was cut."""
    whole = make_case([(0, 50)], 32, num_kv_heads=2, dtype=dtype, is_fp8=True)
    expected, parts = run(backend, whole), []
    # Chunks have at least two tokens, because decodes have their own kernel.
    for start, end in ((0, 13), (13, 15), (15, 40), (40, 50)):
        case = make_case([(start, end - start)], 32, num_kv_heads=2, dtype=dtype, is_fp8=True)
        case.queries, case.keys, case.values = (
            [tensors[0][:end]] for tensors in (whole.queries, whole.keys, whole.values)
        )
        slots = (case.metadata.block_tables[0].long()[:, None] * 32 + torch.arange(32)).flatten()
        case.cache.write(whole.keys[0][:start], whole.values[0][:start], slots[:start])
        parts.append(run(backend, case))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(torch.cat(parts), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.grid(1)
@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["torch", "sdpa", "tiled", "triton"])
def test_what_is_no_number_reaches_the_queries_that_see_it_and_no_others(backend, number, what):
    """A row of NaN logits gets an error. Its neighbours and its other heads are not affected."""
    case = make_case([(30, 1), (63, 1), (0, 40), (20, 9)], 32, 2, 2, 32, is_fp8=True)
    expected = run(backend, case)
    for row in (0, 2):
        getattr(case, what)[row][-1, 1, 5] = number
    found = run(backend, case)
    sees = torch.zeros(found.shape[:2], dtype=torch.bool)
    sees[[0, 41], 2:] = True  # the decode, and the last query of the prompt
    assert found[sees].isnan().all()
    sees[2:42, 2:] = True  # a weight of 0 does not help the prompt's other queries
    assert torch.equal(found[~sees], expected[~sees])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["torch", "sdpa", "tiled", "triton"])
def test_a_query_that_is_no_number_gives_none(backend, number):
    """Decodes convert queries to int8, which has no NaN."""
    case = make_case([(30, 1), (63, 1), (0, 40)], 32, 2, 2, 32, is_fp8=True)
    expected = run(backend, case)
    case.queries[0][-1, 1, 5] = number
    found = run(backend, case)
    is_bad = torch.zeros(found.shape[:2], dtype=torch.bool)
    is_bad[0, 1] = True
    assert found[is_bad].isnan().all() and torch.equal(found[~is_bad], expected[~is_bad])


def test_queries_of_all_sizes_attend_as_the_formula_says():
    """One query is of zeros, and some have numbers of very different sizes."""
    case = make_case([(200, 1)] * 6, 64, 2, 2, 64, is_fp8=True)
    for row, factor in enumerate((0.0, 1e-30, 1e-3, 1.0, 30.0)):
        case.queries[row].mul_(factor)
    case.queries[5][:, :, 7] *= 1000
    assert_exact("triton", case)


def test_no_number_before_the_window_reaches_a_query():
    """A weight of 0 does not remove the infinite scale of such a value."""
    case = make_case([(69, 1), (299, 1)], 32, 1, 2, 32, window=40, is_fp8=True)
    expected = run("triton", case)
    case.keys[0][26, 0, 1] = case.values[0][27, 0, 3] = case.values[1][259, 0, 0] = float("nan")
    block_tables = case.metadata.block_tables.long()
    for row in range(2):
        slots = (block_tables[row][:, None] * 32 + torch.arange(32)).flatten()[: len(case.keys[row]) - 1]
        case.cache.write(case.keys[row][:-1], case.values[row][:-1], slots)
    assert torch.equal(run("triton", case), expected)


def test_many_small_weights_beside_a_large_one_count():
    """The first key takes nearly all of the softmax, as a first token's key often does. The weights of the others once
    vanished.
    """
    case = make_case([(511, 1)], 64, 1, 1, 64, is_fp8=True)
    query, keys, values = case.queries[0][-1], case.keys[0].zero_(), case.values[0].zero_()
    query.zero_()[0, 0] = 8.0
    keys[3, 0, 0] = 17 * math.log(2)
    values[:, 0, 1] = 1.0
    values[3, 0, 1] = 0.0
    slots = (case.metadata.block_tables[0].long()[:, None] * 64 + torch.arange(64)).flatten()
    case.cache.write(keys[:-1], values[:-1], slots[:511])
    exact, found = (float(run(backend, case)[0, 0, 1]) for backend in ("torch", "triton"))
    assert 0.002 < exact < 0.005 and abs(found / exact - 1) < 0.02


@pytest.mark.grid(1)
@pytest.mark.parametrize("block_size", [96, 128, 256])
@pytest.mark.parametrize("window", [0, 100])
def test_decodes_over_blocks_of_several_tiles_attend_as_the_formula_says(block_size, window):
    sequences = [(length - 1, 1) for length in (1, 32, 33, 65, 96, 129, 257, 300, 600)]
    assert_exact("triton", make_case(sequences, block_size, 2, 2, 32, window=window, is_fp8=True))


@pytest.mark.parametrize("group_size", [1, 3])
def test_decodes_of_the_smallest_heads_attend_as_the_formula_says(group_size):
    assert_exact("triton", make_case([(250, 1), (30, 1)], 32, 2, group_size, 16, is_fp8=True))


# Engines. The cache in FP8 is a part of the model here: every engine has it.


PROMPTS = [list(range(1, length + 1)) for length in (1, 2, 29, 5, 40, 33, 64)]
PROMPTS += [PROMPTS[-1] + [7], PROMPTS[-1] + [9, 3], PROMPTS[4] + [8] * 20]
SAMPLED = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, detokenize=False)


def make_llm(directory: Path, **options: Any) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "kv_cache_dtype": "fp8"}
    return LLM(str(directory), **(defaults | options))


def greedy(directory: Path, **options: Any) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log-probabilities) for each prompt."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    with make_llm(directory, **options) as llm:
        outputs = llm.generate([*PROMPTS[:4], PROMPTS[2] * 2], params, use_tqdm=False, raise_on_error=True)
    of_each = [output.outputs[0] for output in outputs]
    return [
        (one.token_ids, [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)])
        for one in of_each
    ]


def assert_nearly_alike(found, expected) -> None:
    """The decode kernel is about as exact as bfloat16. This sometimes changes what a later key is rounded to, and then
    the log-probabilities, or the order of two nearly equal tokens. At most one completion may differ.
    """
    num_different = 0
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        same = next((i for i, pair in enumerate(zip(tokens, expected_tokens, strict=True)) if len(set(pair)) > 1), 6)
        differences = torch.tensor(logprobs[: same + 1]) - torch.tensor(expected_logprobs[: same + 1])
        num_different += same < 6 or bool(differences.abs().max() > 0.15)
        assert differences.abs().max() < 0.5
    assert num_different <= 1


def sampled(llm: LLM) -> list[list[int]]:
    params = [replace(SAMPLED, seed=seed) for seed in range(len(PROMPTS))]
    return [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False, raise_on_error=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, seed=5, head_dim=32, vocab_size=101)
    return directory


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """The results of one prompt at a time, computed whole."""
    found = []
    with make_llm(model, attention_backend="torch", enable_prefix_caching=False, overlap=False) as llm:
        for seed, prompt in enumerate(PROMPTS):
            found.append(llm.generate(prompt, replace(SAMPLED, seed=seed), use_tqdm=False)[0].token_ids)
    return found


def family_options(family: str) -> dict[str, Any]:
    """Options of a model whose heads our kernels can keep in FP8."""
    rng = random.Random(family)
    while True:
        options = FAMILIES[family][2](rng)
        if options.get("head_dim", options["hidden_size"] // options["num_attention_heads"]) % 16 == 0:
            return options


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", some(["sdpa", "triton"], "sdpa"))
def test_every_familys_tokens_are_those_of_the_plain_backend(tmp_path, family, backend):
    save_family_model(tmp_path, family, family_options(family), seed=1)
    plain = greedy(tmp_path, attention_backend="torch")
    found = greedy(tmp_path, attention_backend=backend, kvcache_block_size=32)
    if backend == "sdpa":
        assert_alike(found, plain)
    else:
        assert_nearly_alike(found, plain)
    in_float32 = greedy(tmp_path, attention_backend="torch", kv_cache_dtype="auto")
    assert [logprobs for _, logprobs in in_float32] != [logprobs for _, logprobs in plain], "nothing was rounded"


SCHEDULES: dict[str, dict[str, Any]] = {
    "at once": {},
    "chunks": {"max_num_batched_tokens": 16},
    "no sharing": {"enable_prefix_caching": False, "overlap": False},
    "few blocks": {"num_kvcache_blocks": 20, "kvcache_block_size": 8, "max_num_seqs": 6},
    "few rows": {"max_num_seqs": 3},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("schedule", some(SCHEDULES, "at once", "chunks", "few blocks"))
def test_no_schedule_changes_a_token(model, expected, schedule):
    with make_llm(model, attention_backend="sdpa", **SCHEDULES[schedule]) as llm:
        assert sampled(llm) == expected
        assert sampled(llm) == expected, "now with hits"
        metrics = llm.metrics()
        assert (metrics["num_preemptions"] > 0) == (schedule == "few blocks")
        assert (metrics["prefix_cache_hit_rate"] > 0) == (schedule != "no sharing")


def test_a_chunk_goes_on_within_a_block_behind_a_decode_that_ends_one(model):
    """Values of the chunk once went to the beginning of its block."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompts = [[7 * i % 100 for i in range(63)], [(11 * i + 3) % 100 for i in range(30)]]
    found = []
    for backend in ("torch", "triton"):
        options = {"attention_backend": backend, "kvcache_block_size": 64, "max_num_batched_tokens": 66}
        with make_llm(model, overlap=False, **options) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", ["torch", "sdpa", "tiled", "triton"])
def test_completions_of_one_prompt_have_copies_of_its_last_block(model, backend):
    params = replace(SAMPLED, max_tokens=5)
    with make_llm(model, attention_backend="torch") as llm:
        seeds = [completion_seed(4, index) for index in range(3)]
        apart = [llm.generate(PROMPTS[4], replace(params, seed=seed), use_tqdm=False)[0].token_ids for seed in seeds]
    with make_llm(model, attention_backend=backend) as llm:
        (output,) = llm.generate([PROMPTS[4]], replace(params, n=3, seed=4), use_tqdm=False)
        assert [completion.token_ids for completion in output.outputs] == apart


def test_a_cache_in_fp8_wakes_up_empty_and_right(model, expected):
    with make_llm(model, attention_backend="sdpa") as llm:
        bytes_awake = llm.metrics()["memory_bytes"]["kv_cache"]
        sampled(llm)
        llm.sleep()
        assert llm.metrics()["memory_bytes"]["kv_cache"] == 0
        llm.wake_up()
        assert llm.metrics()["memory_bytes"]["kv_cache"] == bytes_awake
        assert sampled(llm) == expected


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nearly_twice_the_blocks_fit(head_dim):
    """Keys and values each have a scale of two bytes per head."""
    of_fp8, usual = (KVCacheLayout(one_group(4), 64, 8, head_dim, dtype) for dtype in (E4M3, torch.bfloat16))
    assert usual.block_bytes / of_fp8.block_bytes == 2 * head_dim / (head_dim + 2)
    for layout in (of_fp8, usual):
        cache = layout.empty(7, CPU)
        of_layers = sum(tensor.nbytes for layer in cache.layers for tensor in layer if tensor is not None)
        assert cache.nbytes == 7 * layout.block_bytes == of_layers
        assert len(cache.layers) == 4 and all(layer.is_fp8 == layout.is_fp8 for layer in cache.layers)


def test_an_engine_gets_nearly_twice_the_blocks(tmp_path, monkeypatch):
    """It gets as many as fit into memory, and the default number of rows follows from that."""
    save_model(tmp_path, head_dim=128, num_hidden_layers=1)
    monkeypatch.setattr("nanovllm.runner.settings.free_bytes", lambda device: 30 * 2**20)
    options = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 512, "attention_backend": "sdpa"}
    numbers = []
    for kv_cache_dtype in ("auto", "fp8"):
        with make_llm(tmp_path, kv_cache_dtype=kv_cache_dtype, **options) as llm:
            info = llm.engine.info
            numbers.append(info.num_kvcache_blocks)
            assert llm.metrics()["memory_bytes"]["kv_cache"] <= 15 * 2**20
    assert numbers[1] >= 1.9 * numbers[0] > 100


# Options


def shape_of(head_dim: int = 32, device: str = "cpu") -> AttentionShape:
    return AttentionShape(4, 2, head_dim, torch.float32, torch.device(device), has_fp8_cache=True)


def test_options_that_cannot_be_are_named(model, monkeypatch):
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8, not 'int8'"):
        make_llm(model, kv_cache_dtype="int8")
    with pytest.raises(ValueError, match=r'16 divides for kv_cache_dtype="fp8", not 40; use .*sdpa'):
        make_attention_backend("triton", shape_of(40))
    with pytest.raises(ValueError, match='multiple of 32 for kv_cache_dtype="fp8", not 16'):
        make_attention_backend("triton", shape_of(), 16)
    with pytest.raises(ValueError, match="multiple of 32"):
        make_llm(model, attention_backend="triton", kvcache_block_size=16)
    for name in ("torch", "sdpa"):
        assert make_attention_backend(name, shape_of(40), 16).name == name
    problem = FlashAttention.problem(shape_of(device="cuda"), None)
    assert isinstance(problem, ValueError) and 'cannot read kv_cache_dtype="fp8"' in str(problem)


def test_the_log_says_what_is_in_eight_bits(model, caplog):
    for options, said in (
        ({"quantization": "fp8"}, "torch.float32 with FP8 weights, .* of int8 keys and e4m3 values"),
        ({"kv_cache_dtype": "auto"}, r"torch.float32, attention .* GiB of torch\.float32\)"),
    ):
        caplog.clear()
        with caplog.at_level("INFO", logger="nanovllm"):
            make_llm(model, **options).close()
        assert re.search(said, caplog.text), caplog.text


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_without_fp8_is_named(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert kv_cache_dtype_of("auto", torch.float16, device) == torch.float16
    assert kv_cache_dtype_of("fp8", torch.float16, CPU) == E4M3
    if capability >= (8, 9):
        assert kv_cache_dtype_of("fp8", torch.float16, device) == E4M3
    else:
        with pytest.raises(ValueError, match=r"capability 8\.9 or newer; use kv_cache_dtype"):
            kv_cache_dtype_of("fp8", torch.float16, device)


def test_the_tensor_descriptors_of_the_usual_cache_are_not_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for has_fp8_cache in (False, True):
        shape = AttentionShape(8, 4, 128, torch.bfloat16, torch.device("cuda"), has_fp8_cache=has_fp8_cache)
        launch = triton_prompts.prompt_launch.__wrapped__(shape, 64)
        assert launch.heads == 2 and launch.has_descriptors != has_fp8_cache


def test_a_job_is_another_one_with_another_cache(model):
    of_each = [
        identity_of("", 1, model, {"model": str(model), **engine}, {}, 0)
        for engine in ({}, {"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "fp8"})
    ]
    assert of_each[2] not in of_each[:2]
