"""Weights in FP8: each kernel against its plain twin."""

import random
from typing import Any

import pytest
import torch
from family_factory import FAMILIES, save_family_model
from fp8_factory import assert_alike, completions
from model_factory import one_thread  # noqa: F401

from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.norm import add_rms_norm, rms_norm
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.quantize import E4M3, LARGEST, Quantized, ScaledProduct, quantize_rows, scaled_product

# Half a unit in the last place of e4m3, relative to a number and, for the smallest ones, to the row's scale.
HALF_ULP, HALF_LEAST = 2**-4, 2**-10


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_product(num_rows: int, size: int) -> ScaledProduct:
    scales = (random_tensor(number, seed=seed).abs() * 0.01 for seed, number in ((1, num_rows), (2, size)))
    return ScaledProduct(random_tensor(num_rows, size) * 1e4, *scales)


def assert_rounded(found: Any, exact: torch.Tensor) -> None:
    """Each number of `found` is at most half a unit of e4m3 from that of `exact`, and a hair for the scale."""
    assert isinstance(found, Quantized) and found.values.dtype == E4M3
    limit = HALF_ULP * exact.abs() + HALF_LEAST * found.scales[:, None]
    assert ((found.whole() - exact).abs() <= 1.001 * limit).all()
    # The peak is the largest number of e4m3, or the range is not used.
    assert (found.values.float().abs().amax(1) == LARGEST).all()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("size", [1, 7, 96, 1000])
def test_a_row_is_rounded_to_e4m3_by_its_own_peak(size, fused):
    x = random_tensor(5, size) * torch.tensor([1e-9, 1e-3, 1, 1e3, 1e9])[:, None]
    assert_rounded(quantize_rows(x, fused), x)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
def test_a_row_of_zeros_is_a_row_of_zeros(fused):
    """Its peak is no divisor."""
    x = torch.zeros(3, 40)
    x[1] = 1
    assert torch.equal(quantize_rows(x, fused).whole(), x)


def test_what_is_no_number_stays_in_its_row():
    x = torch.ones(4, 8)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    weight = quantize_rows(random_tensor(6, 8))
    product = scaled_product(quantize_rows(x), *weight, torch.ones(()), torch.float32).whole()
    assert product[1:3].isnan().all() and product[[0, 3]].isfinite().all()


@pytest.mark.parametrize(("size", "num_rows"), [(96, 5), (33, 1), (1025, 2)])
def test_norms_read_and_write_fp8(size, num_rows):
    x, residual, weight = random_tensor(num_rows, size), random_tensor(num_rows, size, seed=1), torch.rand(size) + 0.5
    assert_rounded(rms_norm(x, weight, 1e-6, True, True), rms_norm(x, weight, 1e-6))
    product = random_product(num_rows, size)
    expected, expected_total = add_rms_norm(product.whole(), residual, weight, 1e-6)
    found, total = add_rms_norm(product, residual, weight, 1e-6, True, True)
    assert_rounded(found, expected)
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(add_rms_norm(product, residual, weight, 1e-6, True)[0], expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [1, 80, 4096, 5000])
def test_the_gate_reads_and_writes_fp8(size, activation):
    """A long row is computed in several pieces, whose largest number is that of the row."""
    product = random_product(3, 2 * size)
    assert_rounded(act_and_mul(product, activation, fused=True), act_and_mul(product.whole(), activation))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (40, 24)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_keys_and_values_are_read_in_fp8(head_dim, rotary_dim, has_norm):
    product = random_product(5, 8 * head_dim)
    weight = torch.rand(6, head_dim) + 0.5 if has_norm else None
    cos, sin = random_tensor(5, 1, head_dim, seed=3), random_tensor(5, 1, head_dim, seed=4)
    results = []
    for qkv in (product, product.whole()):
        k_cache, v_cache = torch.zeros(2, 4, 2, head_dim), torch.zeros(2, 4, 2, head_dim)
        out = qk_norm_rotate_store(
            qkv, weight, 1e-6, cos, sin, rotary_dim, LayerCache(k_cache, v_cache), torch.tensor([3, 0, 7, -1, 5])
        )
        results.append((out, k_cache, v_cache))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_product_is_that_of_the_rounded_numbers():
    x, weight = quantize_rows(random_tensor(9, 48)), quantize_rows(random_tensor(20, 48, seed=1))
    found = scaled_product(x, *weight, torch.ones(()), torch.float32)
    torch.testing.assert_close(found.whole(), x.whole() @ weight.whole().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_give_the_tokens_of_the_plain_engine_in_fp8(tmp_path, family):
    save_family_model(tmp_path, family, FAMILIES[family][2](random.Random(family)), seed=1)
    fused = completions(tmp_path, quantization="fp8", attention_backend="triton", kvcache_block_size=16)
    assert_alike(fused, completions(tmp_path, quantization="fp8", attention_backend="torch"))
