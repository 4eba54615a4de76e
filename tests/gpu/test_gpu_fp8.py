"""FP8 on a GPU: each kernel against exact results, then engines with FP8 weights, with an FP8 cache, and with both.

Different kernels round a sum's last bit differently, and that bit sometimes decides which number of e4m3 an input or a
key becomes. So a different schedule moves the logits of an engine with FP8 nearly as much as the rounding itself does.
These tests measure by how much, bound this by the error of the rounding, and let tokens differ only where it explains
the difference.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.against_transformers import teacher_forced_logits
from support.attention_case import TOLERANCE, Case, make_case, run, share
from support.demo_problems import CONVERSATIONS, PROBLEMS
from support.experts import exact_mlp
from support.family_factory import make_family_model
from support.fp8_cache import DECODE_TOLERANCE, assert_same_bits, heads_of_many_sizes, poisoned_cache
from support.fp8_factory import (
    CHANNEL,
    LAYOUTS,
    assert_rounded,
    block_layout,
    by_channel,
    changed_copy,
    quantized_copy,
    random_product,
    random_tensor,
)
from support.gpu_engines import DEVICE, MIB, Judge, free_memory, generate, skip_without
from support.gpu_kernels import GPU, MIXED, captured, formula, make_gpu_case, on_gpu, part, randn
from support.gpu_models import COMMON, MODELS, PLAIN
from support.gpu_weights import generate as generate_mixed
from support.gpu_weights import make_llm as make_weights_llm
from support.model_factory import make_model, read_tensors

from nanovllm import LLM, SamplingParams
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.attention.metadata import SharedPrefixes
from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.attention.triton_prompts import has_hopper_kernel
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.models.config import one_group
from nanovllm.models.loader import load_weights
from nanovllm.ops.act_and_mul import ACTIVATIONS, act_and_mul
from nanovllm.ops.block_product import BlockWeight, block_product
from nanovllm.ops.copy_blocks import copy_blocks
from nanovllm.ops.grouped_mlp import ExpertWeights, grouped_mlp
from nanovllm.ops.layer_cache import LayerCache, rounded_keys, rounded_values
from nanovllm.ops.norm import add_rms_norm, rms_norm
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.quantize import (
    E4M3,
    BlockQuantized,
    Quantized,
    ScaledProduct,
    quantize_row_blocks,
    quantize_rows,
    scaled_product,
    whole_product,
)
from nanovllm.ops.route import route
from nanovllm.ops.store_kvcache import store_kvcache
from nanovllm.runner.kv_cache import KVCacheLayout
from nanovllm.sampling_params import completion_seed

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16
HALF_ULP = 2**-8  # of bfloat16, relative to a number
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="not a Hopper GPU"
)
FORMATS: dict[str, dict[str, Any]] = {
    "weights": {"quantization": "fp8"},
    "cache": {"kv_cache_dtype": "fp8"},
    "both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


# Kernels that round to e4m3


def in_order(values: torch.Tensor) -> torch.Tensor:
    """Numbers of e4m3 -> integers; those of neighbours differ by 1."""
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= 0x80, 0x80 - bits, bits)


def assert_nearly_twin(found: Any, expected: Quantized | BlockQuantized) -> None:
    """Asserts that numbers equal the twin's, except one in a hundred, which may be a neighbour in e4m3. The GPU's
    division, exp and rsqrt are off by a few last bits of float32, and some bfloat16 numbers are exactly halfway between
    two of e4m3.
    """
    assert isinstance(found, type(expected)) and found.values.dtype == E4M3
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
    steps = (in_order(found.values) - in_order(expected.values)).abs()
    assert steps.max() <= 1
    assert (steps > 0).sum() <= 2 + 0.01 * steps.numel(), float((steps > 0).float().mean())


def gpu_product(num_rows: int, size: int) -> ScaledProduct:
    product = random_product(num_rows, size)
    return ScaledProduct(product.product.to(GPU, BFLOAT16), product.row_scales.to(GPU), product.column_scales.to(GPU))


def exact_product(product: ScaledProduct) -> torch.Tensor:
    """The product's numbers in float64."""
    return product.product.double() * product.row_scales.double()[:, None] * product.column_scales.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 4096), (300, 1024), (33, 1000), (5, 7)])
def test_rows_and_their_blocks_are_rounded_as_by_the_twins(dtype, num_rows, size):
    """There are rows of all sizes, and one of zeros, whose peak cannot be a divisor."""
    x = randn(num_rows, size, dtype=torch.float32) * torch.logspace(-6, 6, num_rows, device=GPU)[:, None]
    x = torch.cat((x, torch.zeros(1, size, device=GPU))).to(dtype)
    found = quantize_rows(x, use_kernels=True)
    assert_nearly_twin(found, quantize_rows(x))
    assert_rounded(Quantized(found.values[:-1], found.scales[:-1]), x[:-1].float())
    assert not found.whole()[-1].any() and found.scales[-1] > 0
    for columns in (128, 96):
        assert_nearly_twin(quantize_row_blocks(x, columns, use_kernels=True), quantize_row_blocks(x, columns))


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1024), (300, 384), (33, 5120)])
def test_norms_read_and_write_fp8(num_rows, size):
    """The residual is the rounded sum, and the norm is of that sum."""
    weight = (1 + 0.3 * randn(size, dtype=torch.float32, seed=1)).bfloat16()

    def normed(x: torch.Tensor) -> torch.Tensor:
        return (x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()).float()

    x, residual = randn(num_rows, size, dtype=BFLOAT16, seed=2), randn(num_rows, size, dtype=BFLOAT16, seed=3)
    found = rms_norm(x, weight, 1e-6, True, True)
    assert_rounded(found, normed(x))
    assert_nearly_twin(found, quantize_rows(normed(x)))
    product = gpu_product(num_rows, size)
    exact = exact_product(product) + residual.double()
    limit = HALF_ULP * exact.abs() + 1e-6 * (exact_product(product).abs() + residual.abs())
    found, total = add_rms_norm(product, residual, weight, 1e-6, True, True)
    assert total.dtype == BFLOAT16 and ((total.double() - exact).abs() <= limit).all()
    assert_rounded(found, normed(total))
    assert_nearly_twin(found, quantize_rows(normed(total)))
    plain, total = add_rms_norm(product, residual, weight, 1e-6, True)
    assert ((total.double() - exact).abs() <= limit).all()
    assert ((plain.float() - normed(total)).abs() <= 1.001 * HALF_ULP * normed(total).abs()).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 448), (70, 3072), (9, 5000)])
def test_the_gate_reads_and_writes_fp8(num_rows, size, activation):
    """A long row is computed in several pieces."""
    product = gpu_product(num_rows, 2 * size)
    gate, up = exact_product(product).chunk(2, 1)
    exact = (ACTIVATIONS[activation](gate) * up).float()
    found = act_and_mul(product, activation, use_kernels=True)
    assert_rounded(found, exact)
    assert_nearly_twin(found, quantize_rows(exact))


def on_cpu(cache: LayerCache) -> LayerCache:
    return LayerCache(*(tensor.cpu() for tensor in cache))


def gpu_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
    return LayerCache(*(tensor.to(GPU) for tensor in poisoned_cache(num_blocks, block_size, num_kv_heads, head_dim)))


def slots_of_prompts(num_tokens: int, num_blocks: int, block_size: int) -> torch.Tensor:
    """The slots of 20 prompts and chunks of many lengths, which begin anywhere in a block."""
    rng = random.Random(block_size)
    blocks, slots = rng.sample(range(num_blocks), num_blocks), []
    ends = [*sorted(rng.sample(range(1, num_tokens), 19)), num_tokens]
    for end in ends:
        place = rng.choice((0, 0, rng.randrange(block_size)))
        while len(slots) < end:
            num = min(block_size - place, end - len(slots))
            first = blocks.pop() * block_size + place
            slots += range(first, first + num)
            place = 0
    return torch.tensor(slots)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [
        (torch.bfloat16, 128, 64), (torch.bfloat16, 64, 32), (torch.bfloat16, 80, 256), (torch.float16, 32, 64),
        (torch.float32, 256, 64),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("where", ["anywhere", "in prompts"])
def test_the_store_kernels_write_the_bits_of_their_twin(dtype, head_dim, block_size, where):
    """The rows hold NaN and infinity. They are rows of a projection, and some are padding. Slots are those of many
    decodes, and of prompts and chunks, whose tokens are next to each other until their block ends.
    """
    num_tokens, num_kv_heads, num_blocks = 3001, 3, 3001 // block_size + 45
    k, v = (heads_of_many_sizes(num_tokens, num_kv_heads, head_dim, seed) for seed in (0, 1))
    k[8, 1, 3], k[9, 0, head_dim - 1], v[10, 2, 0] = float("nan"), -float("inf"), float("inf")
    qkv = torch.cat((random_tensor(num_tokens, 4, head_dim), k, v), 1).to(dtype)
    if where == "in prompts":
        slots = slots_of_prompts(num_tokens, num_blocks, block_size)
        slots[100:140] = slots[-7:] = -1
    else:
        slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
        slots[::6] = -1
    expected = poisoned_cache(num_blocks, block_size, num_kv_heads, head_dim)
    found = gpu_cache(num_blocks, block_size, num_kv_heads, head_dim)
    heads = 4, num_kv_heads, num_kv_heads
    expected.write(*qkv.split(heads, 1)[1:], slots)
    store_kvcache(*qkv.to(GPU).split(heads, 1)[1:], found, slots.to(GPU), use_kernels=True)
    assert_same_bits(on_cpu(found), expected)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "has_norm"),
    [(16, 8, 128, 128, True), (8, 4, 32, 32, True), (6, 2, 64, 64, False), (4, 2, 96, 72, False), (5, 1, 80, 48, True)],
)
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("has_prompts", [False, True], ids=["decodes", "prompts"])
def test_the_fused_kernels_store_the_bits_of_their_twin(
    num_heads, num_kv_heads, head_dim, rotary_dim, has_norm, is_scaled, has_prompts
):
    """Keys are stored when they are finished, values when they are projected, by the same kernel or by a separate one.
    Queries and keys are the same as with a usual cache.
    """
    num_tokens, num_normed = 45, num_heads + num_kv_heads
    product = gpu_product(num_tokens, (num_normed + num_kv_heads) * head_dim)
    product.product[6], product.product[7] = 0, product.product[7] * 1e-6
    product.product[8, [3, (num_heads + 1) * head_dim - 1, -2]] = float("nan")  # in a query, a key and a value
    product.product[9, -1] = float("inf")
    qkv: Any = product if is_scaled else product.whole()
    weight = 1 + 0.3 * randn(num_normed, head_dim, dtype=BFLOAT16, seed=1) if has_norm else None
    cos, sin = (randn(num_tokens, 1, head_dim, dtype=BFLOAT16, seed=seed) for seed in (3, 4))
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[::5] = -1
    usual = LayerCache(*(torch.zeros(4, 64, num_kv_heads, head_dim, dtype=BFLOAT16, device=GPU) for _ in range(2)))
    found, expected = gpu_cache(4, 64, num_kv_heads, head_dim), poisoned_cache(4, 64, num_kv_heads, head_dim)
    rest = weight, 1e-6, cos, sin, rotary_dim
    twin = qk_norm_rotate_store(product.whole(), *rest, usual, slots.to(GPU))
    out = qk_norm_rotate_store(qkv, *rest, found, slots.to(GPU), has_prompts)
    assert torch.equal(out.isnan(), twin.isnan())
    whole = twin.nan_to_num().float()
    # A rotated number is a sum of two products, so what counts is the size of its head.
    assert ((out.nan_to_num().float() - whole).abs() <= 2**-7 * whole.abs().amax(-1, keepdim=True)).all()
    values = product.whole().unflatten(1, (-1, head_dim))[:, num_normed:]
    expected.write(out[:, num_heads:].cpu(), values.cpu(), slots)
    assert_same_bits(on_cpu(found), expected)


def test_copied_blocks_take_their_scales_along():
    cache = KVCacheLayout(one_group(3), 32, 2, 48, E4M3).empty(6, GPU)
    for tensor in cache.tensors:
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(256, bits.shape, generator=torch.Generator().manual_seed(0)))
        expected = tensor.cpu()
        copies = ((0, 4), (1, 2), (0, 5))
        copy_blocks(expected, copies)
        copy_blocks(tensor, copies, use_kernels=True)
        assert torch.equal(tensor.cpu().view(torch.uint8), expected.view(torch.uint8))


# Products


def accumulation_error(input_size: int) -> float:
    """The relative error that bfloat16 results and tensor cores explain. Rounding to bfloat16 changes a matrix by
    1.7e-3. A Hopper GPU that adds 32 products of FP8 to a sum keeps about 13 bits behind the point of the largest
    number.
    """
    return 3e-3 + input_size / 32 * 2**-13


def assert_close_product(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    error = found.double() - exact
    assert found.shape == exact.shape and error.isfinite().all()
    assert error.norm() <= tolerance * exact.norm(), float(error.norm() / exact.norm())
    of_rows = error.norm(dim=1) / exact.norm(dim=1)
    assert of_rows.max() <= 2 * tolerance, (int(of_rows.argmax()), float(of_rows.max()))


@pytest.mark.parametrize(("output_size", "input_size"), [(512, 160), (160, 448), (1024, 1024), (2048, 4096)])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
def test_a_product_by_channel_is_that_of_the_rounded_numbers(output_size, input_size, num_rows):
    """The scales are kept apart, or multiplied in. Rows have very different sizes, and each has its own scale."""
    sizes = torch.logspace(-3, 3, num_rows, device=GPU)[:, None]
    x = quantize_rows(randn(num_rows, input_size, dtype=torch.float32) * sizes, use_kernels=True)
    weight = quantize_rows(randn(output_size, input_size, dtype=torch.float32, seed=1))
    bias = randn(output_size, dtype=BFLOAT16, seed=2)
    exact = x.whole().double() @ weight.whole().double().T
    kept = scaled_product(x, *weight, torch.ones((), device=GPU), BFLOAT16)
    assert kept.product.dtype == BFLOAT16
    assert_close_product(exact_product(kept), exact, accumulation_error(input_size))
    found = whole_product(x, *weight, None, BFLOAT16)
    assert found.dtype == BFLOAT16
    assert_close_product(found, exact, accumulation_error(input_size))
    found = whole_product(x, *weight, bias, BFLOAT16)
    assert_close_product(found, exact + bias.double(), accumulation_error(input_size))


@pytest.mark.parametrize(
    ("num_rows", "output_size", "input_size", "rows", "columns"),
    [
        (1, 256, 1024, 128, 128), (17, 200, 448, 128, 128), (64, 160, 160, 64, 32), (300, 256, 1024, 128, 128),
        (300, 200, 448, 128, 128), (2000, 160, 160, 64, 32),
    ],
)  # fmt: skip
def test_a_product_of_blocks_is_that_of_the_rounded_numbers(num_rows, output_size, input_size, rows, columns):
    """Sums of different blocks are added in float32, so their number adds no error."""
    scales = randn(-(-output_size // rows), -(-input_size // columns), dtype=torch.float32, seed=2).abs() + 0.1
    values = randn(output_size, input_size, dtype=torch.float32).mul(100).clamp(-448, 448).to(E4M3)
    weight = BlockWeight(values, scales, rows, columns)
    x = quantize_row_blocks(randn(num_rows, input_size, dtype=BFLOAT16, seed=1), columns, use_kernels=True)
    exact = x.whole() @ weight.whole().T
    assert_close_product(block_product(x, weight, None, torch.float32, use_kernels=True), exact, 2e-3)
    bias = randn(output_size, dtype=BFLOAT16, seed=3)
    found = block_product(x, weight, bias, BFLOAT16, use_kernels=True)
    assert found.dtype == BFLOAT16
    assert_close_product(found, exact + bias.double(), accumulation_error(columns))


def test_what_is_no_number_stays_in_its_row():
    x = randn(6, 256, dtype=BFLOAT16)
    values, scales = quantize_rows(randn(64, 256, dtype=torch.float32, seed=1))
    blocks = BlockWeight(values, torch.ones(1, 2, device=GPU), 128, 128)

    def products() -> list[torch.Tensor]:
        kept = scaled_product(quantize_rows(x, use_kernels=True), values, scales, torch.ones((), device=GPU), BFLOAT16)
        of_blocks = block_product(
            quantize_row_blocks(x, 128, use_kernels=True), blocks, None, BFLOAT16, use_kernels=True
        )
        return [kept.whole(), of_blocks]

    healthy = products()
    x[1, 3], x[2, 200], x[4, 0] = float("nan"), float("inf"), -float("inf")
    for found, expected in zip(products(), healthy, strict=True):
        assert found[[1, 2, 4]].isnan().all()
        assert torch.equal(found[[0, 3, 5]], expected[[0, 3, 5]]) and expected.isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 100, 300])
@pytest.mark.parametrize("layout", ["channel", "block"])
def test_experts_multiply_with_what_their_weights_stand_for(layout, num_tokens):
    """They are no worse than the twin, which rounds the dequantized weights to bfloat16. Inputs are not rounded."""
    num_experts, size, hidden_size, of_layout = 8, 200, 320, LAYOUTS[layout]
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn((num_tokens, hidden_size), generator=generator).to(GPU, BFLOAT16)
    router = torch.randn((num_experts, hidden_size), generator=generator).to(GPU, BFLOAT16) * 0.1
    given, whole = [], []
    for shape in ((2 * size, hidden_size), (hidden_size, size)):
        weights = [torch.randn(shape, generator=generator) / 12 for _ in range(num_experts)]
        values, scales = (torch.stack(parts) for parts in zip(*map(of_layout.quantize, weights), strict=True))
        rows, columns = of_layout.block
        given.append(ExpertWeights(values.to(GPU), scales.to(GPU), rows, columns or shape[1]))
        whole.append(torch.stack([of_layout.whole("", weight)[""] for weight in weights]))
    routes = route(x, router, 2, True, True)
    some = torch.randperm(num_tokens, generator=generator)[:50].to(GPU)
    chosen = type(routes)(routes.experts[some].cpu(), routes.weights[some].cpu())
    exact = exact_mlp(x[some].cpu(), chosen, *whole, "silu").to(GPU)
    fused, twin = (grouped_mlp(x, routes, *given, use_kernels=is_fused)[some].double() for is_fused in (True, False))
    our_error, twin_error = (float((out - exact).norm() / exact.norm()) for out in (fused, twin))
    assert our_error <= 1.1 * twin_error + 1e-6 and twin_error < 0.01, (our_error, twin_error)


# Attention. The formula sees rounded keys and values. Unused slots have the largest numbers and infinite scales.


def fp8_case(sequences: list[tuple[int, int]], block_size: int = 64, **options: Any) -> Case:
    return make_gpu_case(sequences, block_size, **{"dtype": BFLOAT16, **options}, is_fp8=True)


def fp8_backend(case: Case) -> TritonAttention:
    (num_heads, head_dim), num_kv_heads = case.queries[0].shape[1:], case.keys[0].shape[1]
    dtype, windows = case.queries[0].dtype, tuple({0, case.window})
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype, GPU, 128, 4096, case.scale, windows, True)
    backend = make_attention_backend("triton", shape, case.metadata.block_size)
    assert isinstance(backend, TritonAttention)
    return backend


def assert_exact(case: Case, out: torch.Tensor) -> None:
    """Checks the error of the whole, and of each row within three times that; otherwise one lost key of thousands would
    not show.
    """
    dtype = case.queries[0].dtype
    tolerance = max(TOLERANCE[dtype], DECODE_TOLERANCE if case.metadata.max_num_decodes else 0.0)
    assert out.dtype == dtype and out.isfinite().all()
    keys, values = [rounded_keys(k) for k in case.keys], [rounded_values(v) for v in case.values]
    exact = formula(replace(case, keys=keys, values=values))
    error = out.double() - exact
    assert error.norm() <= tolerance * exact.norm(), float(error.norm() / exact.norm())
    of_rows = error.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert of_rows.max() <= 3 * tolerance, (int(of_rows.argmax()), float(of_rows.max()))


def decodes_of(case: Case) -> Case:
    """A step of its decodes alone, which has another kernel than decodes beside prompts."""
    return part(case, list(range(case.metadata.max_num_decodes)))


@pytest.mark.parametrize(
    ("head_dim", "group_size"), [(128, 1), (128, 2), (128, 4), (128, 8), (64, 3), (64, 6), (32, 5), (32, 7), (80, 4)]
)
def test_grouped_queries_attend_as_the_formula_says(head_dim, group_size):
    """Decodes run beside prompts and chunks, and alone."""
    options = {"num_kv_heads": 1 + group_size % 3, "group_size": group_size, "head_dim": head_dim}
    case = fp8_case(MIXED, seed=head_dim + group_size, **options)
    backend = fp8_backend(case)
    assert_exact(case, run("triton", case, backend))
    decodes = decodes_of(case)
    assert_exact(decodes, run("triton", decodes, backend))


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 128), (torch.float32, 64)], ids=str)
def test_queries_of_other_dtypes_attend_as_the_formula_says(dtype, head_dim):
    case = fp8_case(MIXED, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    backend = fp8_backend(case)
    assert_exact(case, run("triton", case, backend))
    prompts_alone = part(case, [row for row, (_, new) in enumerate(MIXED) if new > 1])
    assert_exact(prompts_alone, run("triton", prompts_alone, backend))


LENGTHS = [
    0, 1, 30, 31, 32, 62, 63, 64, 65, 126, 127, 128, 190, 254, 255, 256, 257, 510, 511, 512, 513, 766, 767, 768, 1022,
    1023, 1024, 1025, 2046, 2047, 2048, 2049, 4094, 4095,
]  # fmt: skip


@pytest.mark.parametrize(("block_size", "head_dim", "group_size"), [(32, 64, 2), (64, 128, 4), (256, 128, 3)])
def test_lengths_from_1_to_4096_around_blocks_and_splits(block_size, head_dim, group_size):
    """Decodes of all lengths run together, beside prompts and chunks that begin or end around a block's end."""
    rng = random.Random(block_size)
    lengths = LENGTHS + [int(2 ** rng.uniform(0, 12)) for _ in range(20)]
    rng.shuffle(lengths)
    around = [length for n in (1, 2) for length in range(n * block_size - 1, n * block_size + 2)]
    sequences = [(length, 1) for length in lengths]
    sequences += [ends for length in around for ends in ((0, length), (length, 3), (2, length))]
    case = fp8_case(sequences, block_size, group_size=group_size, head_dim=head_dim)
    backend = fp8_backend(case)
    assert_exact(case, run("triton", case, backend))
    decodes = decodes_of(case)
    assert_exact(decodes, run("triton", decodes, backend))


@pytest.mark.parametrize(("head_dim", "group_size", "window"), [(64, 2, 1), (128, 4, 100), (256, 2, 500), (32, 3, 64)])
def test_a_query_sees_the_last_keys_of_its_window(head_dim, group_size, window):
    sequences = [(250, 1), (256, 1), (900, 1), (3000, 1), *MIXED, (30, 100), (0, 150), (290, 40), (500, 70)]
    options = {"num_kv_heads": 2, "group_size": group_size, "head_dim": head_dim, "scale": 0.1}
    case = fp8_case(sequences, window=window, **options)
    backend = fp8_backend(case)
    assert_exact(case, run("triton", case, backend))
    decodes = decodes_of(case)
    assert_exact(decodes, run("triton", decodes, backend))


@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim", "block_size"), [(2, 2, 128, 64), (1, 8, 64, 256), (2, 5, 32, 64)]
)
def test_shared_splits_attended_once_change_nothing(num_kv_heads, group_size, head_dim, block_size):
    """There are prefixes of different lengths, rows that share nothing, and a group larger than a tile."""
    lengths = [700, 530, 520, 300, 800, 90, 1030, *range(520, 560)]
    options = {"num_kv_heads": num_kv_heads, "group_size": group_size, "head_dim": head_dim, "is_fp8": True}
    case = make_case([(length, 1) for length in lengths], block_size, dtype=BFLOAT16, **options)
    for row, source, num_keys in ((1, 0, 512), (2, 0, 512), (4, 0, 512), (3, 0, 256)):
        share(case, row, source, num_keys)
    for row in range(8, len(lengths)):
        share(case, row, 7, 512)
    case = on_gpu(case)
    backend, metadata = fp8_backend(case), case.metadata
    plain = run("triton", case, backend)
    tables, num_keys = metadata.block_tables.cpu().numpy(), np.array(lengths) + 1
    groups = backend.shared_prefixes(tables, num_keys, block_size)
    assert groups is not None and len(groups.items) > 3
    numbers = [torch.from_numpy(x).to(GPU) for x in (groups.items, groups.members, groups.num_shared)]
    metadata.shared_prefixes = SharedPrefixes(torch.tensor([len(groups.items)], device=GPU).int(), *numbers)
    grouped = run("triton", case, backend)
    assert_exact(case, plain)
    assert_exact(case, grouped)
    assert not torch.equal(plain, grouped), "or the shared splits were not attended by their own kernel"


def test_a_row_is_bitwise_the_same_whatever_its_neighbours():
    """If splits depended on the batch, they would round differently, and a near tie could go the other way."""
    rng = random.Random(2)
    lengths = [0, 1, 255, 256, 257, 1000, 4095, *(int(2 ** rng.uniform(0, 12)) for _ in range(20))]
    case = fp8_case([(length, 1) for length in lengths], num_kv_heads=2, group_size=4, head_dim=128)
    backend = fp8_backend(case)
    together = run("triton", case, backend)
    for row in range(len(lengths)):
        assert torch.equal(run("triton", part(case, [row]), backend)[0], together[row]), lengths[row]
    shuffled = rng.sample(range(len(lengths)), 15)
    assert torch.equal(run("triton", part(case, shuffled), backend), together[shuffled])


def test_a_captured_step_serves_other_lengths_and_padding():
    """All rows are padding when the engine captures, and some are later. They have length 0, slot −1 and a table of
    zeros, although another sequence may own block 0.
    """
    lengths, num_padding = [1, 64, 256, 257, 700, 1024, 3000], 5
    case = fp8_case([(length - 1, 1) for length in lengths], num_kv_heads=2, group_size=4, head_dim=128)
    backend = fp8_backend(case)
    expected = run("triton", case, backend)
    before = on_cpu(case.cache)

    def padded(tensor: torch.Tensor, value: float = 0) -> torch.Tensor:
        return torch.cat((tensor, torch.full((num_padding, *tensor.shape[1:]), value, dtype=tensor.dtype, device=GPU)))

    old = case.metadata
    metadata = replace(
        old,
        cu_seqlens_q=padded(old.cu_seqlens_q, len(lengths)),
        slot_mapping=padded(old.slot_mapping, -1),
        context_lens=padded(old.context_lens),
        block_tables=padded(old.block_tables),
        max_num_decodes=len(lengths) + num_padding,
    )
    final, slots = metadata.context_lens.clone(), metadata.slot_mapping.clone()
    q, k, v = (padded(case.new(x), 3.0) for x in (case.queries, case.keys, case.values))

    def step() -> torch.Tensor:
        planned = replace(metadata, plan=backend.plan(metadata))
        backend.store_kvcache(k, v, case.cache, metadata)
        return backend.attend(q, k, v, case.cache, planned)

    metadata.context_lens.zero_()
    metadata.num_decodes.zero_()
    metadata.slot_mapping.fill_(-1)
    graph, out = captured(step)
    metadata.context_lens.copy_(final)
    metadata.num_decodes.fill_(len(lengths))
    metadata.slot_mapping.copy_(slots)
    graph.replay()
    assert torch.equal(out[: len(lengths)], expected)
    assert_same_bits(on_cpu(case.cache), before)


@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_no_number_reaches_the_queries_that_see_it_and_no_others(head_dim, number, what):
    case = fp8_case([(30, 1), (63, 1), (0, 40), (20, 9)], num_kv_heads=2, head_dim=head_dim)
    backend = fp8_backend(case)
    expected = run("triton", case, backend)
    for row in (0, 2):
        getattr(case, what)[row][-1, 1, 5] = number
    found = run("triton", case, backend)
    sees = torch.zeros(found.shape[:2], dtype=torch.bool, device=GPU)
    sees[[0, 41], 2:] = True  # the decode, and the last query of the prompt
    assert found[sees].isnan().all()
    sees[2:42, 2:] = True  # a weight of 0 does not help the prompt's other queries
    assert torch.equal(found[~sees], expected[~sees]) and expected.isfinite().all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_query_that_is_no_number_gives_none(head_dim, number):
    """Decodes convert queries to int8, which has no NaN."""
    case = fp8_case([(30, 1), (63, 1), (0, 40)], num_kv_heads=2, head_dim=head_dim)
    backend = fp8_backend(case)
    expected = run("triton", case, backend)
    case.queries[0][-1, 1, 5] = number
    found = run("triton", case, backend)
    is_bad = torch.zeros(found.shape[:2], dtype=torch.bool, device=GPU)
    is_bad[0, 1] = True
    assert found[is_bad].isnan().all() and torch.equal(found[~is_bad], expected[~is_bad])


# (cached, new): ends around tiles of 64 queries and of 128 keys.
PROMPTS = [
    (40, 1), (1000, 1), (0, 63), (0, 64), (0, 65), (0, 127), (0, 128), (0, 129), (1, 63), (64, 64), (127, 2), (128, 3),
    (200, 300), (511, 130), (0, 1), (0, 700), (1500, 257), (3, 2),
]  # fmt: skip


def hopper_case(sequences: list[tuple[int, int]], block_size: int = 64, **options: Any) -> tuple[Case, TritonAttention]:
    case = fp8_case(sequences, block_size, **{"num_kv_heads": 2, "head_dim": 128, **options})
    backend = fp8_backend(case)
    assert has_hopper_kernel(backend._shape, block_size)
    return case, backend


@HOPPER
@pytest.mark.parametrize(
    ("block_size", "group_size", "dtype"),
    [(64, 2, torch.bfloat16), (192, 3, torch.bfloat16), (256, 8, torch.bfloat16), (64, 2, torch.float16)],
    ids=str,
)
def test_programs_of_many_prompts_attend_as_the_formula_says(num_programs, block_size, group_size, dtype):
    """The warps that convert a tile must keep step with those that fetch it and those that attend it, from item to
    item. Each sequence alone gives the same bits."""
    case, backend = hopper_case(PROMPTS, block_size, group_size=group_size, dtype=dtype, seed=block_size, scale=0.1)
    together = run("triton", case, backend)
    assert_exact(case, together)
    for row, expected in enumerate(together.split([new for _, new in PROMPTS])):
        if row >= 2:  # decodes alone have another kernel than beside prompts
            assert torch.equal(run("triton", part(case, [row]), backend), expected), PROMPTS[row]


@HOPPER
def test_long_prompts_attend_as_the_formula_says():
    case, backend = hopper_case([(4000, 1), (0, 4096), (3000, 1000), (2500, 1596)])
    assert_exact(case, run("triton", case, backend))


@HOPPER
def test_a_captured_step_of_prompts_follows_its_tiles(num_programs):
    """The step is captured while all tiles are padding. Later, padding comes between tiles and after them."""
    case, backend = hopper_case([(900, 1), (0, 500), (130, 333), (0, 65)])
    metadata, expected = case.metadata, run("triton", case, backend)
    assert metadata.query_tiles is not None
    final, lengths = metadata.query_tiles, metadata.context_lens.clone()
    tiles = torch.zeros(3 * len(final), 4, dtype=torch.int32, device=GPU)
    metadata = replace(metadata, query_tiles=tiles)
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)

    def step() -> torch.Tensor:
        return backend.attend(q, k, v, case.cache, replace(metadata, plan=backend.plan(metadata)))

    metadata.context_lens.zero_()
    graph, out = captured(step)
    metadata.context_lens.copy_(lengths)
    for places in (slice(0, len(final)), slice(0, 2 * len(final), 2), slice(2 * len(final), None)):
        tiles.zero_()
        tiles[places] = final
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(out, expected), places


@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("has_prompts", [False, True], ids=["decodes", "prompts"])
def test_layers_back_to_back_never_read_what_is_not_written_yet(is_scaled, has_prompts):
    """Each kernel may start before the previous one has ended: keys, values, prompts and decodes have one each."""
    sequences = [(900, 1), (1500, 1), *([(0, 200)] * 40 + [(500, 700)] if has_prompts else [(30, 1)] * 90)]
    case = fp8_case(sequences, num_kv_heads=8, head_dim=128)
    backend, num_tokens = fp8_backend(case), sum(new for _, new in sequences)
    metadata = replace(case.metadata, plan=backend.plan(case.metadata))
    cos, sin = (randn(num_tokens, 1, 128, dtype=BFLOAT16, seed=seed) for seed in (3, 4))
    weight = torch.ones(24, 128, dtype=BFLOAT16, device=GPU)
    inputs: list[Any] = [randn(num_tokens, 32 * 128, dtype=BFLOAT16, seed=seed) for seed in range(3)]
    if is_scaled:
        scales = [randn(number, dtype=torch.float32).abs() + 0.1 for number in (num_tokens, 32 * 128)]
        inputs = [ScaledProduct(x, *scales) for x in inputs]

    def layer(qkv: Any, is_awaited: bool = False) -> torch.Tensor:
        qk = qk_norm_rotate_store(qkv, weight, 1e-6, cos, sin, 128, case.cache, metadata.slot_mapping, has_prompts)
        if is_awaited:
            torch.cuda.synchronize()
        return backend.attend(qk[:, :16], qk[:, 16:], qk[:, 16:], case.cache, metadata)

    expected = []
    for qkv in inputs:
        expected.append(layer(qkv, is_awaited=True))
        torch.cuda.synchronize()
    assert not torch.equal(expected[0], expected[1])
    for number in range(300):
        out = layer(inputs[number % 3])
        if number % 7 == 0:  # seldom, so that several layers are under way
            assert torch.equal(out, expected[number % 3]), number


# How much FP8 changes a model's logits


class Checkpoint(NamedTuple):
    """directory: where a float32 checkpoint is whose numbers fit bfloat16; token_ids: some text; noise: the relative
    error of our logits for it in bfloat16, without FP8.
    """

    directory: Path
    token_ids: list[int]
    noise: float


# Together with decodes, prompts and both in one sequence.
CHUNKS = [90, 1, 1, 40, 1, 27]


def exact_model(directory: Path) -> Any:
    """transformers' in float32, on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@torch.inference_mode()
def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    return model(torch.tensor([token_ids])).logits[0]


def our_logits(directory: Path, token_ids: list[int], device: str = DEVICE, **options: Any) -> torch.Tensor:
    """On a GPU in bfloat16, elsewhere in float32 with plain twins; computed in CHUNKS."""
    dtype, backend = ("bfloat16", "triton") if device == DEVICE else ("float32", "sdpa")
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "enforce_eager": True, **options}
    options |= {"device": device, "dtype": dtype, "attention_backend": backend, "max_model_len": 256}
    with LLM(str(directory), **options) as llm:
        return teacher_forced_logits(llm, token_ids, CHUNKS).float().cpu()


def error_of(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


def save_checkpoint(directory: Path, model: Any, vocab_size: int) -> Checkpoint:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.2)  # gives them the spread of trained models of this width
    model.bfloat16().float().save_pretrained(directory)
    rng = random.Random(0)
    token_ids = [rng.randrange(vocab_size) for _ in range(sum(CHUNKS))]
    noise = error_of(our_logits(directory, token_ids), logits_of(exact_model(directory), token_ids))
    return Checkpoint(directory, token_ids, noise)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    model = make_model(
        3, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, vocab_size=1013,
    )  # fmt: skip
    return save_checkpoint(directory, model, 1013)


def assert_rounding_explains(checkpoint: Checkpoint, whole: Path, directory: Path, what: str, **options: Any) -> None:
    """Our logits differ from those of the dequantized model by the effect of rounding its inputs and keys in float32 on
    a CPU, plus that of bfloat16. They must differ, or nothing was rounded.

    whole: the dequantized checkpoint.
    """
    exact = logits_of(exact_model(whole), checkpoint.token_ids)
    rounding = error_of(our_logits(directory, checkpoint.token_ids, "cpu", **options), exact)
    error = error_of(our_logits(directory, checkpoint.token_ids, **options), exact)
    allowed = 1.2 * math.hypot(rounding, checkpoint.noise)
    print(f"{what}: error {error:.4f}, rounding {rounding:.4f}, bfloat16 {checkpoint.noise:.4f}")
    assert 0.7 * rounding < error <= allowed < 0.3, (error, rounding, checkpoint.noise)


STORED = {
    "channel": CHANNEL,
    "tensor": LAYOUTS["tensor"],
    "block": LAYOUTS["block"],
    "small block": block_layout(64, 32),
}


@pytest.mark.parametrize("layout", STORED)
def test_logits_of_fp8_checkpoints_err_as_e4m3_explains(checkpoint, tmp_path, layout):
    whole = changed_copy(checkpoint.directory, tmp_path / "whole", STORED[layout].whole)
    directory = quantized_copy(checkpoint.directory, tmp_path / "fp8", STORED[layout])
    assert_rounding_explains(checkpoint, whole, directory, layout)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_of_models_that_we_quantize_err_as_e4m3_explains(checkpoint, tmp_path, name):
    whole = checkpoint.directory
    if name != "cache":
        whole = changed_copy(whole, tmp_path / "whole", CHANNEL.whole)
    assert_rounding_explains(checkpoint, whole, checkpoint.directory, name, **FORMATS[name])


def test_weights_that_come_in_fp8_are_those_that_we_make(checkpoint, tmp_path):
    """They are equal bit by bit if made on the same device: a GPU multiplies by 1 / 448, but a CPU divides."""
    layout = CHANNEL._replace(quantize=lambda weight: tuple(part.cpu() for part in by_channel(weight.to(GPU))))
    directory = quantized_copy(checkpoint.directory, tmp_path / "fp8", layout)
    ours = our_logits(checkpoint.directory, checkpoint.token_ids, quantization="fp8")
    assert torch.equal(our_logits(directory, checkpoint.token_ids), ours)


# These have experts in both layouts; norms after blocks, windows and heads of 256; biases.
FAMILY_CASES = [("qwen3_moe", "channel"), ("qwen3_moe", "block"), ("gemma3", "both"), ("qwen2", "block")]


@pytest.mark.parametrize(("family", "layout"), FAMILY_CASES)
def test_logits_of_other_families_err_as_e4m3_explains(tmp_path, family, layout):
    options = {**COMMON, "rope_parameters": PLAIN, **MODELS[family][1], "num_hidden_layers": 3}
    if family == "gemma3":
        options |= {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}, "pad_token_id": 0}
        options |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    if family == "qwen3_moe":
        options |= {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256}  # whole blocks
    plain = save_checkpoint(tmp_path / "plain", make_family_model(family, options, seed=1), COMMON["vocab_size"])
    of_layout = STORED.get(layout, CHANNEL)
    whole = changed_copy(plain.directory, tmp_path / "whole", of_layout.whole)
    if layout in FORMATS:
        assert_rounding_explains(plain, whole, plain.directory, family, **FORMATS[layout])
    else:
        directory = quantized_copy(plain.directory, tmp_path / "fp8", of_layout)
        assert_rounding_explains(plain, whole, directory, f"{family}, {layout}")


# Schedules

NUM_REQUESTS = 48
# The number of texts whose logits are computed in several ways, and of tokens of each completion. BEYOND: the logits of
# # other texts may move up to this many times as far as the furthest of these.
NUM_MEASURED, NUM_DECODED, BEYOND = 16, 64, 1.5


def demo(name: str, directory: Path = MODEL_DIRECTORY, **options: Any) -> LLM:
    """The bundled model in the format of this name."""
    options = {"device": DEVICE, "dtype": "bfloat16", "attention_backend": "triton", **options}
    return LLM(str(directory), **FORMATS[name], **options)


@dataclass
class Forced:
    """Gives the logits of an engine that computes the whole text in one step, through the interface of the Judge's
    model.
    """

    llm: LLM

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        logits = teacher_forced_logits(self.llm, ids[0].tolist(), [ids.shape[1]])
        return SimpleNamespace(logits=logits.float().cpu()[None])


@dataclass
class Model:
    """The bundled model in a format.

    name: one of FORMATS; requests: (prompt, params); alone: the tokens of each request that runs alone; judge: knows
    how far another way to compute a text moves its logits; moved: that distance, as a root mean square; error: their
    distance from those of the dequantized model in float32, likewise.
    """

    name: str
    requests: list[tuple[list[int], SamplingParams]]
    alone: list[list[int]]
    judge: Judge
    moved: float
    error: float

    def count_ties(self, rows: list[int], found: list[list[int]], what: str) -> tuple[int, int]:
        """How many answers and how many guesses differ from those of the request alone, all of them at ties."""
        counts = [0, 0]
        for row, tokens in zip(rows, found, strict=True):
            request = [self.requests[row]]
            counts[row % 2] += self.judge.count_ties(request, [tokens], [self.alone[row]], what, is_float32=False)
        return counts[0], counts[1]

    def run(self, llm: LLM, rows: list[int]) -> list[list[int]]:
        outputs = generate(llm, *map(list, zip(*(self.requests[row] for row in rows), strict=True)))
        assert all(output.error is None for output in outputs)
        return [output.token_ids for output in outputs]


def dequantized_demo(name: str, directory: Path) -> Any:
    """The bundled model with the weights of this format, in float32."""
    if name == "cache":
        return exact_model(MODEL_DIRECTORY)
    return exact_model(changed_copy(MODEL_DIRECTORY, directory / "whole", CHANNEL.whole))


def root_mean_square(parts: list[torch.Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).pow(2).mean().sqrt())


@pytest.fixture(scope="module", params=FORMATS)
def model(request, prompts, params, tmp_path_factory) -> Iterator[Model]:
    """Logits are computed whole, in chunks of 7, and as the engine does: the prompt, then token by token."""
    name, requests = request.param, list(zip(prompts, params, strict=True))[:NUM_REQUESTS]
    exact = dequantized_demo(name, tmp_path_factory.mktemp(name))
    options = {"max_num_seqs": 1, "overlap": False, "enable_prefix_caching": False, "max_num_batched_tokens": 1024}
    with demo(name, **options) as llm:
        alone = [generate(llm, [ids], one)[0].token_ids for ids, one in requests]
        moved, errors = [], []
        for (ids, _), tokens in list(zip(requests, alone, strict=True))[:NUM_MEASURED]:
            text = ids + tokens[:NUM_DECODED]
            sevens = [7] * (len(text) // 7) + [len(text) % 7] * (len(text) % 7 > 0)
            ways = [len(text)], sevens, [len(ids)] + [1] * len(tokens[:NUM_DECODED])
            logits, *others = (teacher_forced_logits(llm, text, chunks).float().cpu() for chunks in ways)
            moved += [other - logits for other in others]
            errors.append(logits - logits_of(exact, text))
        furthest = max(float(part.abs().max()) for part in moved)
        of_schedule, of_fp8 = root_mean_square(moved), root_mean_square(errors)
        print(f"{name}: a schedule moves logits by {of_schedule:.4f}, at most {furthest:.3f}; FP8 by {of_fp8:.4f}")
        yield Model(name, requests, alone, Judge(Forced(llm), BEYOND * furthest), of_schedule, of_fp8)


@pytest.fixture(scope="module")
def engine(model) -> Iterator[LLM]:
    """An engine with the default options, so it uses graphs."""
    with demo(model.name, max_num_seqs=256) as llm:
        assert llm.engine.runner.program.graphs is not None
        yield llm


def test_a_schedule_moves_logits_by_less_than_two_roundings(model):
    """At worst, two ways to compute a text round it independently. Then their difference is √2 times the error of each.
    Their completions must be varied, or the tests below prove nothing."""
    assert 0 < model.moved <= 1.1 * math.sqrt(2) * model.error
    assert len({tuple(tokens) for tokens in model.alone}) > 0.8 * NUM_REQUESTS


def test_the_first_call_after_the_start_equals_the_second(model, engine):
    """The first call compiles and captures what the second replays. The schedule is the same, so that not a bit may
    differ."""
    calls = []
    for _ in range(3):
        engine.engine.reset()  # drops the cached prefixes
        calls.append(model.run(engine, list(range(NUM_REQUESTS))))
    assert calls[0] == calls[1] == calls[2]


def test_at_least_985_of_1000_unseen_problems_are_answered_right(model, engine):
    outputs = engine.chat(CONVERSATIONS, use_tqdm=False)
    num_right = sum(output.text == answer for output, (_, answer) in zip(outputs, PROBLEMS, strict=True))
    print(f"{model.name}: {num_right} of {len(PROBLEMS)} right")
    assert num_right >= 985


EVERYTHING = list(range(NUM_REQUESTS))
SHUFFLED = random.Random(0).sample(EVERYTHING, NUM_REQUESTS)
# Name -> (options, generate calls, each a list of rows).
SCHEDULES: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "eager, warm": (
        {"enforce_eager": True, "max_num_seqs": 64}, [EVERYTHING[:1], EVERYTHING[1:4], SHUFFLED, EVERYTHING],
    ),
    "small pool, chunks": (
        {"num_kvcache_blocks": 8, "max_num_batched_tokens": 50, "max_num_seqs": 20}, [SHUFFLED, EVERYTHING],
    ),
    "small pool, chunks, eager, cold": (
        {
            "num_kvcache_blocks": 6, "max_num_batched_tokens": 33, "max_num_seqs": 20, "enforce_eager": True,
            "enable_prefix_caching": False, "overlap": False,
        },
        [SHUFFLED, EVERYTHING],
    ),
}  # fmt: skip


def test_the_schedule_changes_tokens_only_at_ties(model, engine):
    """The schedules vary batch sizes with and without a graph of their own, overlap on and off, cold and warm prefixes,
    eager steps, chunks and preemption; rows are greedy or at 0.8.

    The measured distances must explain each difference. Answers that the model is sure of hardly ever differ.
    """
    num_rows, num_ties = [0, 0], [0, 0]

    def compare(llm: LLM, rows: list[int], what: str) -> None:
        ties = model.count_ties(rows, model.run(llm, rows), f"{model.name}, {what}")
        for is_guess in (0, 1):
            num_rows[is_guess] += sum(row % 2 == is_guess for row in rows)
            num_ties[is_guess] += ties[is_guess]

    try:
        for depth in (1, 0):
            engine.engine.depth = depth
            engine.engine.reset()
            for size in (1, 2, 3, 5, 8, 13, 16, 17, 33, NUM_REQUESTS):
                first = 5 * size % NUM_REQUESTS
                compare(engine, (EVERYTHING + EVERYTHING)[first : first + size], f"{size} rows, depth {depth}")
    finally:
        engine.engine.depth = 1
    num_preemptions = num_cached_tokens = 0
    for name, (options, calls) in SCHEDULES.items():
        with demo(model.name, kvcache_block_size=32, **options) as llm:
            for rows in calls:
                compare(llm, rows, name)
            num_preemptions += llm.metrics()["num_preemptions"]
            num_cached_tokens += llm.metrics()["num_cached_prompt_tokens"]
            llm.engine.scheduler.check_integrity()
    print(
        f"{model.name}: {num_ties[0]} of {num_rows[0]} answers and {num_ties[1]} of {num_rows[1]} guesses differ; "
        f"{num_preemptions} preemptions, {num_cached_tokens} cached tokens"
    )
    assert num_ties[0] <= 0.03 * num_rows[0]
    assert num_preemptions > 5 and num_cached_tokens > 500


def test_shared_prefixes_attended_once_change_tokens_only_at_ties(model, engine, monkeypatch):
    """Rows join and leave groups of several prefixes; the same engine without groups gives the same."""
    seen = []
    shared_prefixes = TritonAttention.shared_prefixes

    def noted(self, *args):
        seen.append(shared_prefixes(self, *args))
        return seen[-1]

    monkeypatch.setattr(TritonAttention, "shared_prefixes", noted)
    rng = random.Random(11)
    # Long texts of the kind that the model knows, so that it does not only guess.
    texts = [[token for ids, _ in rng.sample(model.requests[::2], 20) for token in ids] for _ in range(3)]
    prefixes = [texts[0][:256], texts[1][:300], texts[2][:530]]
    questions = [ids for ids, _ in model.requests[::2]]
    requests = [
        (rng.choice(prefixes) + rng.choice(questions), SamplingParams(0.0, rng.randrange(2, 30), ignore_eos=True))
        for _ in range(60)
    ]
    tokens = []
    for groups_prefixes in (True, False):
        if not groups_prefixes:
            monkeypatch.setattr(engine.engine.runner.program.table, "_sharing", None)
        engine.engine.reset()
        for _ in range(2):
            outputs = generate(engine, *map(list, zip(*requests, strict=True)))
            tokens.append([output.token_ids for output in outputs])
        assert any(groups is not None for groups in seen) == groups_prefixes, "or the test says nothing"
        seen.clear()
    for others in tokens[:3]:
        num_ties = model.judge.count_ties(requests, others, tokens[3], model.name, is_float32=False)
        print(f"{model.name}: {num_ties} of {len(requests)} rows differ")


def test_completions_of_one_prompt_have_copies_of_its_last_block(model, engine):
    prompt, _ = model.requests[1]
    sampled = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=4)
    (output,) = generate(engine, [prompt], replace(sampled, n=4))
    apart = [(prompt, replace(sampled, seed=completion_seed(4, index))) for index in range(4)]
    expected = [generate(engine, [prompt], one)[0].token_ids for _, one in apart]
    found = [completion.token_ids for completion in output.outputs]
    assert len(set(map(tuple, expected))) > 1
    num_ties = model.judge.count_ties(apart, found, expected, model.name, is_float32=False)
    print(f"{model.name}: {num_ties} of 4 completions differ")


def test_answers_in_blocks_are_right_through_graphs(tmp_path):
    """The checkpoint has blocks that divide the bundled model's layers, and the cache is in FP8."""
    directory = quantized_copy(MODEL_DIRECTORY, tmp_path / "fp8", block_layout(64, 32))
    with demo("cache", directory, max_num_seqs=256) as llm:
        dtypes = {parameter.dtype for parameter in llm.engine.runner.program.model.parameters()}
        assert E4M3 in dtypes and llm.engine.runner.program.graphs is not None
        outputs = llm.chat(CONVERSATIONS, use_tqdm=False)
    num_right = sum(output.text == answer for output, (_, answer) in zip(outputs, PROBLEMS, strict=True))
    print(f"{num_right} of {len(PROBLEMS)} right")
    assert num_right >= 985


# Memory


def test_an_fp8_cache_has_nearly_twice_the_blocks_and_gives_its_memory_back(dummy_directory):
    """A head of 128 numbers takes 130 bytes instead of 256. The weights of Qwen3-0.6B's layers take half as much."""
    options = {"max_num_seqs": 64, "max_model_len": 8192, "gpu_memory_utilization": 0.12, "load_format": "dummy"}
    options |= {"device": DEVICE, "max_num_batched_tokens": 2048, "enforce_eager": True}
    promised = 0.12 * torch.cuda.mem_get_info()[1]
    four_tokens = SamplingParams(0.0, 4, ignore_eos=True)
    rng = random.Random(0)
    texts = [[rng.randrange(151936) for _ in range(300)] for _ in range(16)]
    left, num_blocks, weights, free = [], [], [], free_memory()
    for fp8 in ({}, {}, FORMATS["cache"], FORMATS["both"]):  # the first one loads everything that is loaded once
        with LLM(dummy_directory, **options, **fp8) as llm:
            num_blocks.append(llm.engine.info.num_kvcache_blocks)
            memory = llm.metrics()["memory_bytes"]
            weights.append(memory["weights"])
            assert memory["kv_cache"] > 0.5 * promised
            assert all(output.error is None for output in generate(llm, texts, four_tokens))
            assert free - torch.cuda.mem_get_info()[0] <= promised
        left.append(free - free_memory())
    print(f"blocks {num_blocks}, weights {[w // MIB for w in weights]} MiB, {[n // MIB for n in left]} MiB left over")
    assert 1.9 * num_blocks[1] <= num_blocks[2] <= 2.05 * num_blocks[1] and num_blocks[3] > num_blocks[2]
    # The layers have 0.44 billion weights, and the embedding and the LM head 0.16 billion each.
    assert weights[2] == weights[1] and 0.6 * weights[1] < weights[3] < 0.75 * weights[1]
    assert max(left) < 512 * MIB and left[-1] - left[0] < 64 * MIB


def test_loading_never_holds_a_second_copy_of_the_weights(tmp_path):
    """At most, loading holds the model in FP8 and the memory that quantizing one tensor takes."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8}
    make_model(1, **sizes, num_key_value_heads=4, head_dim=64).bfloat16().save_pretrained(tmp_path / "plain")
    stored = quantized_copy(tmp_path / "plain", tmp_path / "fp8")
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "num_kvcache_blocks": 16, "enforce_eager": True}
    for directory, quantization in ((tmp_path / "plain", "fp8"), (stored, None)):
        with LLM(str(directory), device=DEVICE, dtype="bfloat16", quantization=quantization, **options) as llm:
            model = llm.engine.runner.program.model
            num_bytes = sum(parameter.nbytes for parameter in model.parameters())
            largest = max(parameter.numel() for parameter in model.parameters() if parameter.dtype == E4M3)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            load_weights(model, directory)
            most = torch.cuda.max_memory_allocated() - before
            assert torch.cuda.memory_allocated() == before
        print(f"{most / MIB:.1f} MiB beside {num_bytes / MIB:.1f}")
        assert most <= 20 * largest < num_bytes / 2


# Weights in place


@pytest.fixture(scope="module")
def of_each(checkpoints) -> list[list]:
    """The outputs of FP8 engines that load the first and the second checkpoint."""
    found = []
    for directory in checkpoints:
        with make_weights_llm(directory, **FORMATS["both"]) as llm:
            found.append(generate_mixed(llm))
    assert found[0] != found[1]
    return found


def test_an_update_in_fp8_is_bitwise_a_fresh_llm_and_a_sleep_changes_no_token(checkpoints, of_each):
    """Captured steps hold the addresses of weights and scales. New weights are quantized like those of a file."""
    first, second = (read_tensors(directory) for directory in checkpoints)
    with make_weights_llm(checkpoints[0], **FORMATS["both"]) as llm:
        assert llm.engine.runner.program.graphs is not None
        memory = llm.metrics()["memory_bytes"]
        assert generate_mixed(llm) == of_each[0]
        llm.update_weights({name: tensor.to(DEVICE) for name, tensor in second.items()})
        assert generate_mixed(llm) == of_each[1]
        for level in (1, 2):
            llm.sleep(level)
            assert llm.metrics()["memory_bytes"] == {"weights": 0, "kv_cache": 0}
            llm.wake_up()
            if level == 2:
                with pytest.raises(RuntimeError, match="tensors are undefined"):
                    generate_mixed(llm)
                llm.update_weights(first)
            assert llm.metrics()["memory_bytes"] == memory
            assert generate_mixed(llm) == of_each[level % 2]


@pytest.mark.parametrize("layout", ["channel", "block"])
def test_a_checkpoint_in_fp8_is_updated_in_its_own_layout(checkpoints, tmp_path, layout):
    first, second = (
        quantized_copy(directory, tmp_path / str(number), LAYOUTS[layout])
        for number, directory in enumerate(checkpoints)
    )
    found = []
    with make_weights_llm(first, enforce_eager=True) as llm:
        generate_mixed(llm)
        llm.update_weights(read_tensors(second))
        found.append(generate_mixed(llm))
    with make_weights_llm(second, enforce_eager=True) as llm:
        found.append(generate_mixed(llm))
    assert found[0] == found[1]


# Ranks


def log_probabilities(llm: LLM, texts: list[list[int]]) -> torch.Tensor:
    """The log-probabilities of all tokens except the first of each text."""
    scored = llm.loglikelihood([text[:1] for text in texts], [text[1:] for text in texts], use_tqdm=False)
    assert all(one.error is None for one in scored)
    return torch.cat([torch.from_numpy(np.array(one.logprobs)) for one in scored])


@pytest.fixture(scope="module")
def two_gpus(model) -> Iterator[LLM]:
    skip_without(2)
    with demo(model.name, tensor_parallel_size=2, max_num_seqs=64, max_num_batched_tokens=1024) as llm:
        yield llm


def test_two_ranks_err_no_more_than_one(model, engine, two_gpus):
    """Each rank rounds its part of a layer's inputs and weights with scales of its own, so they differ as two roundings
    do. Both are equally far from the model that is not rounded; a wrong part or scale would be far off.
    """
    texts = [ids + tokens for (ids, _), tokens in zip(model.requests, model.alone, strict=True)]
    unrounded = exact_model(MODEL_DIRECTORY)
    chances = [logits_of(unrounded, text)[:-1].log_softmax(-1) for text in texts]
    exact = torch.cat([one[range(len(one)), text[1:]] for one, text in zip(chances, texts, strict=True)])
    of_one, of_two = (root_mean_square([log_probabilities(llm, texts) - exact]) for llm in (engine, two_gpus))
    print(f"{model.name}: log-probabilities err by {of_one:.4f} on one GPU, by {of_two:.4f} on two")
    assert of_two <= 1.5 * of_one


def test_tokens_of_two_ranks_are_those_of_one_up_to_two_roundings(model, two_gpus):
    """Prefixes are cold and warm, with overlap and without. The first call equals the second."""
    rows, calls = list(range(NUM_REQUESTS)), []
    # One rank and two also round the weights of row-parallel layers differently: together √3 times what inputs do.
    judge = replace(model.judge, noise=max(1.0, 2 * model.error / model.moved) * model.judge.noise)
    for depth in (1, 1, 0):
        two_gpus.engine.depth = depth
        two_gpus.engine.reset()
        calls.append(model.run(two_gpus, rows))
    two_gpus.engine.depth = 1
    assert calls[0] == calls[1]
    for found in (calls[0], calls[2], model.run(two_gpus, rows)):
        counts = [0, 0]
        for row, tokens in zip(rows, found, strict=True):
            request = [model.requests[row]]
            counts[row % 2] += judge.count_ties(request, [tokens], [model.alone[row]], model.name, is_float32=False)
        print(f"{model.name}: {counts[0]} answers and {counts[1]} guesses differ")
        assert counts[0] <= 3


def test_two_ranks_answer_985_of_1000_right(model, two_gpus):
    outputs = two_gpus.chat(CONVERSATIONS, use_tqdm=False)
    num_right = sum(output.text == answer for output, (_, answer) in zip(outputs, PROBLEMS, strict=True))
    print(f"{model.name}: {num_right} of {len(PROBLEMS)} right on two GPUs")
    assert num_right >= 985
