"""Weights in FP8: each kernel against its plain twin."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.family_factory import FAMILIES, save_family_model
from support.fp8_factory import (
    LAYOUTS,
    assert_alike,
    assert_rounded,
    completions,
    quantized_copy,
    random_product,
    random_tensor,
)
from support.long import some

from nanovllm.layers.context import LayerContext
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.quantization import BlockFp8, ChannelFp8
from nanovllm.layers.shard import Shard
from nanovllm.ops import block_product as block_module
from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.block_product import BlockWeight, block_product, rows_of_tile
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.norm import add_rms_norm, rms_norm
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.quantize import (
    E4M3,
    Quantized,
    quantize_row_blocks,
    quantize_rows,
    scaled_product,
)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("size", [1, 7, 96, 1000])
def test_a_row_is_rounded_to_e4m3_by_its_own_peak(size, fused):
    x = random_tensor(5, size) * torch.tensor([1e-9, 1e-3, 1, 1e3, 1e9])[:, None]
    assert_rounded(quantize_rows(x, fused), x)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
def test_a_row_of_zeros_is_a_row_of_zeros(fused):
    """Its peak cannot be a divisor."""
    x = torch.zeros(3, 40)
    x[1] = 1
    found = quantize_rows(x, fused)
    assert torch.equal(found.whole(), x) and (found.scales > 0).all()


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
    assert_rounded(act_and_mul(product, activation, use_kernels=True), act_and_mul(product.whole(), activation))


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


def test_a_rows_product_does_not_depend_on_how_many_rows_there_are():
    """On a CPU it is exact. A last bit that differs may decide what a later layer's input is rounded to."""
    x, weight = quantize_rows(random_tensor(50, 3000)), quantize_rows(random_tensor(20, 3000, seed=1))
    one, together = torch.ones(()), x.values.double() @ weight.values.double().T
    for rows in (slice(0, 1), slice(0, 7), slice(0, 50)):
        part = Quantized(x.values[rows], x.scales[rows])
        assert torch.equal(scaled_product(part, *weight, one, torch.float32).product, together[rows].float())


@pytest.mark.grid(1)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize(("size", "columns"), [(1, 32), (128, 128), (300, 128), (1500, 128), (100, 96), (2100, 1024)])
def test_each_block_of_a_row_is_rounded_by_its_own_peak(size, columns, fused):
    x = random_tensor(5, size) * torch.tensor([1e-9, 1e-3, 1, 1e3, 1e9])[:, None]
    found = quantize_row_blocks(x, columns, fused)
    assert found.values.is_contiguous() and found.scales.shape == (5, -(-size // columns))
    for number, block in enumerate(x.split(columns, 1)):
        values = found.values[:, number * columns : (number + 1) * columns]
        assert_rounded(Quantized(values, found.scales[:, number]), block)
    assert torch.equal(found.whole()[:, :columns].float(), quantize_rows(x[:, :columns]).whole())


def test_a_block_of_zeros_is_one_of_zeros_and_what_is_no_number_stays_in_its_row():
    """The kernels are not tested with NaN, because Triton's interpreter does not know NaN in e4m3."""
    x = torch.ones(4, 192)
    x[0, :128], x[1, 3], x[2, 150] = 0, float("nan"), float("inf")
    weight = BlockWeight(torch.ones(40, 192).to(E4M3), torch.ones(1, 2), 128, 128)
    product = block_product(quantize_row_blocks(x, 128), weight, None, torch.float32)
    assert product[1:3].isnan().all()
    torch.testing.assert_close(product[[0, 3]], torch.tensor([[64.0], [192.0]]).expand(2, 40))
    assert torch.equal(
        quantize_row_blocks(x[:1], 128, use_kernels=True).whole(), quantize_row_blocks(x[:1], 128).whole()
    )


@pytest.mark.grid(1)
@pytest.mark.parametrize("num_rows", [1, 17, 40, 65, 300])
@pytest.mark.parametrize(
    ("output_size", "input_size", "rows", "columns"),
    [(256, 256, 128, 128), (136, 200, 128, 128), (60, 100, 8, 32), (200, 192, 96, 96), (70, 300, 1, 256)],
)
def test_a_product_of_blocks_is_that_of_the_rounded_numbers(num_rows, output_size, input_size, rows, columns):
    """There are whole tiles and cut ones, tiles of several blocks, and blocks of several tiles."""
    scales = random_tensor(-(-output_size // rows), -(-input_size // columns), seed=2).abs() + 0.1
    weight = BlockWeight(
        random_tensor(output_size, input_size).mul(100).clamp(-448, 448).to(E4M3), scales, rows, columns
    )
    x = quantize_row_blocks(random_tensor(num_rows, input_size, seed=1), columns)
    bias = random_tensor(output_size, seed=3)
    exact = x.whole() @ weight.whole().T
    for given in (None, bias):
        for fused in (False, True):
            found = block_product(x, weight, given, torch.float32, fused)
            error = found - exact - (0 if given is None else given.double())
            assert error.norm() <= 1e-6 * exact.norm()


def test_many_rows_are_computed_in_groups(monkeypatch):
    """The last group may be cut off."""
    monkeypatch.setattr(block_module, "_ROW_TILES_OF_GROUP", 2)
    weight = BlockWeight(random_tensor(130, 64).mul(100).to(E4M3), torch.rand(2, 1), 128, 128)
    x = quantize_row_blocks(random_tensor(520, 64, seed=1), 128)
    found, plain = (block_product(x, weight, None, torch.float32, fused) for fused in (True, False))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-4)


def test_a_tile_has_about_as_many_rows_as_there_are():
    """A layer says so in `variant_key`, because each tile size is another kernel."""
    numbers, expected = (1, 16, 17, 33, 65, 9999), [16, 16, 32, 64, 128, 128]
    assert [rows_of_tile(rows) for rows in numbers] == expected
    for fused in (False, True):
        context = LayerContext(torch.float32, torch.device("cpu"), fused)
        blocks = BlockFp8(Fp8Config("weight_scale_inv", (128, 128)), context)
        layer = RowParallelLinear(128, 128, False, context, format=blocks, gives=RMSNorm.accepted_sums(context))
        assert [layer.variant_key(rows) for rows in numbers] == (expected if fused else [1] * 6)


@pytest.mark.parametrize("sizes", [(96, 100), (100, 96)])
def test_sizes_that_a_gpu_cannot_multiply_are_named(sizes):
    formats = ChannelFp8(Fp8Config(), LayerContext(torch.bfloat16, torch.device("cpu")))
    formats.check(*sizes)  # a CPU can
    formats._one = SimpleNamespace(is_cuda=True)
    formats.check(96, 112)
    with pytest.raises(ValueError, match="multiples of 16"):
        formats.check(*sizes)


@pytest.mark.long
def test_kernels_compile_for_hopper(tmp_path):
    """One that the interpreter accepted once did not. Shared memory must suffice, and FP8 must be multiplied as FP8."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # compiles everything again
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert all(int(shared) <= 227 * 1024 and num_twice == "0" for _, shared, _, _, num_twice, _ in found)
    stores = {"_qk_norm_rotate_store_kernel", "_store_fp8_kernel"}
    assert all(num_otherwise == "0" for name, *_, num_otherwise in found if name in stores)
    in_e4m3 = {"decode_fp8_kernel", "_quantize_rows_kernel", "_sum_add_norm_kernel"}
    assert all(int(num_pairs) > 0 for name, _, _, num_pairs, *_ in found if name in in_e4m3)
    assert {products for name, _, products, *_ in found if name == "_block_product_kernel"} == {"wgmma.e4m3"}
    numbers = Counter(name for name, *_ in found)
    assert numbers["_weights_sum_kernel"] == 6, "for units of one and two bytes, of three shapes"
    assert numbers["_delta_decode_kernel"] == numbers["_delta_rows_kernel"] == 3
    assert numbers["_sum_add_norm_kernel"] == 2, "directly, and by owner"
    assert numbers["_rms_norm_kernel"] == 6 and numbers["_block_product_kernel"] == 5
    assert numbers["_shrink_kernel"] == 8 and numbers["_expand_kernel"] == 3
    assert numbers["_gate_up_kernel"] == numbers["_down_kernel"] == 5
    of_decodes = Counter(products for name, _, products, *_ in found if name == "decode_fp8_kernel")
    assert of_decodes == {"wgmma.e4m3.s8": 8, "mma.s8": 1}, "heads of 16 in blocks of 32 are too small"
    assert numbers["_qk_norm_rotate_store_kernel"] == 36 and numbers["_store_fp8_kernel"] == 27
    # Values become e4m3: in the first kernel if a step has no prompts, otherwise in the second.
    of_values = Counter(name for name, _, _, num_pairs, *_ in found if int(num_pairs) > 0)
    assert of_values["_qk_norm_rotate_store_kernel"] == 18 and of_values["_store_fp8_kernel"] == 18


@pytest.mark.parametrize("family", some(FAMILIES, "qwen3_moe"))
def test_kernels_give_the_tokens_of_the_plain_engine_in_fp8(tmp_path, family):
    save_family_model(tmp_path, family, FAMILIES[family][2](random.Random(family)), seed=1)
    fused = completions(tmp_path, quantization="fp8", attention_backend="triton", kvcache_block_size=16)
    assert_alike(fused, completions(tmp_path, quantization="fp8", attention_backend="torch"))


@pytest.mark.parametrize(
    ("rows", "columns", "first_row", "fits"),
    [
        ((0, 128), (0, 256), 0, True),
        ((128, 72), (128, 172), 128, True),  # cut off where the weight ends
        ((0, 200), (0, 300), 0, True),
        ((0, 64), (0, 300), 0, False),
        ((64, 136), (0, 300), 0, False),
        ((0, 128), (0, 150), 0, False),
        ((0, 128), (150, 150), 0, False),
        ((0, 128), (0, 256), 200, False),
    ],
)
def test_a_part_of_a_weight_is_of_whole_blocks(rows, columns, first_row, fits):
    """[200, 300] has 2 × 3 blocks of 128 × 128."""
    context = LayerContext(torch.float32, torch.device("cpu"))
    blocks = BlockFp8(Fp8Config("weight_scale_inv", (128, 128)), context)
    scales = torch.arange(5)[:, None] + torch.zeros(1, 3)
    shard = Shard((200, 300), (rows, columns), torch.empty(rows[1], columns[1]))
    if not fits:
        with pytest.raises(ValueError, match=r"blocks of 128 × 128: .* whole blocks, but has"):
            blocks.scales_shard(shard, scales, first_row)
        return
    found = blocks.scales_shard(shard, scales, first_row)
    assert found.shape == (2, 3)
    assert found.source == tuple((start // 128, -(-length // 128)) for start, length in (rows, columns))
    assert found.target[:, 0].tolist() == list(range(first_row // 128, first_row // 128 + found.source[0][1]))


@pytest.mark.parametrize("family", some(["llama", "qwen2", "phi3", "qwen3_moe", "gemma3"], "llama"))
def test_kernels_give_the_tokens_of_the_plain_engine_in_blocks(tmp_path, family):
    """The blocks divide every part of every layer."""
    options = FAMILIES[family][2](random.Random(family)) | {"num_attention_heads": 4, "num_key_value_heads": 2}
    options |= {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 1}
    options |= {"moe_intermediate_size": 40} if family == "qwen3_moe" else {}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": rope, "sliding_attention": rope}
    options["rope_parameters"] = ropes if family == "gemma3" else rope
    options |= {} if family == "phi3" else {"head_dim": 16, "layer_types": None}
    (tmp_path / "plain").mkdir()
    # With seed 1, Qwen2 has an input between two numbers of e4m3, which a last bit rounds to one or the other.
    save_family_model(tmp_path / "plain", family, options, seed=2)
    directory = quantized_copy(tmp_path / "plain", tmp_path / "fp8", LAYOUTS["small block"])
    fused = completions(directory, attention_backend="triton", kvcache_block_size=16)
    assert_alike(fused, completions(directory, attention_backend="torch"))
