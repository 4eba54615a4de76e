"""Products of FP8 matrices in blocks: the kernels against their plain twins, and both against float64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_factory import one_thread  # noqa: F401
from test_fp8 import BLOCK, assert_alike, assert_rounded, by_block, completions, plain_model, quantized_copy  # noqa: F401

import nanovllm.layers.quantization
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.quantization import BlockFp8
from nanovllm.ops import block_product as module
from nanovllm.ops.block_product import BlockWeight, block_product, rows_of_tile
from nanovllm.ops.quantize import E4M3, LARGEST, Quantized, quantize_row_blocks


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(output_size: int, input_size: int, rows: int, columns: int) -> BlockWeight:
    """The scales of different blocks differ by up to a thousand times."""
    scales = 1000 ** torch.rand(
        -(-output_size // rows), -(-input_size // columns), generator=torch.Generator().manual_seed(7)
    )
    return BlockWeight((random_tensor(output_size, input_size) * 50).to(E4M3), scales, rows, columns)


def random_rows(num_rows: int, size: int) -> torch.Tensor:
    """Each row and each block of 16 columns has its own size."""
    x = random_tensor(num_rows, size, seed=1) * 100 ** random_tensor(num_rows, 1, seed=2)
    return x * 10 ** random_tensor(1, -(-size // 16), seed=3).repeat_interleave(16, 1)[:, :size]


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])


@FUSED
@pytest.mark.parametrize(("size", "columns"), [(1, 128), (128, 128), (300, 128), (3000, 128), (100, 96), (2100, 1024)])
def test_each_block_of_a_row_is_rounded_by_its_own_peak(size, columns, fused):
    x = random_rows(5, size)
    found = quantize_row_blocks(x, columns, fused)
    assert found.values.is_contiguous() and found.scales.shape == (5, -(-size // columns))
    for number, exact in enumerate(x.split(columns, 1)):
        values = found.values[:, number * columns : number * columns + columns]
        assert_rounded(Quantized(values, found.scales[:, number]), exact)
    whole = [values.float() for values in (found.values[:, :columns], found.values[:, columns:])]
    expected = whole[0] * found.scales[:, :1]
    torch.testing.assert_close(found.whole()[:, :columns].float(), expected)


@FUSED
def test_a_block_of_zeros_stays_one_and_what_is_no_number_stays_in_its_row(fused):
    x = torch.ones(4, 192)
    # Triton's interpreter does not know NaN in e4m3, but the scale of a block with an infinity is one.
    x[0, :128], x[1, 3], x[2, 150] = 0, float("inf" if fused else "nan"), float("inf")
    weight = BlockWeight(torch.ones(40, 192).to(E4M3), torch.ones(1, 2), 128, 128)
    product = block_product(quantize_row_blocks(x, 128, fused), weight, None, torch.float32, fused)
    assert not product[1:3].isfinite().any()
    torch.testing.assert_close(product[[0, 3]], torch.tensor([[64.0], [192.0]]).expand(2, 40))


@FUSED
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize(
    ("output_size", "input_size", "rows", "columns"),
    [(256, 256, 128, 128), (200, 320, 128, 128), (130, 100, 8, 16), (200, 192, 96, 96), (70, 300, 64, 100),
     (150, 500, 256, 256), (70, 90, 1, 1000)],
)  # fmt: skip
def test_a_product_is_that_of_the_rounded_numbers(num_rows, output_size, input_size, rows, columns, fused):
    """Whole tiles and cut ones, tiles with one scale and with many, and blocks of several pieces."""
    weight = random_weight(output_size, input_size, rows, columns)
    x = quantize_row_blocks(random_rows(num_rows, input_size), columns)
    for bias in (None, random_tensor(output_size, seed=4) * 1e4):
        exact = x.whole() @ weight.whole().T + (0 if bias is None else bias.double())
        found = block_product(x, weight, bias, torch.float32, fused)
        assert found.shape == exact.shape and found.dtype == torch.float32
        # Relative to the largest number that each sum adds up.
        largest = x.whole().abs() @ weight.whole().abs().T + (0 if bias is None else bias.abs().double())
        assert ((found - exact).abs() <= 2e-6 * largest).all()


@FUSED
def test_results_are_rounded_once(fused):
    weight, x = random_weight(80, 256, 128, 128), quantize_row_blocks(random_rows(9, 256), 128)
    bias = random_tensor(80).bfloat16()
    found = block_product(x, weight, bias, torch.bfloat16, fused)
    exact = x.whole() @ weight.whole().T + bias.double()
    assert found.dtype == torch.bfloat16
    # Triton's interpreter cuts bits off where a GPU rounds.
    torch.testing.assert_close(found.double(), exact, rtol=2 ** (-7 if fused else -8), atol=1e-2)


def test_tiles_of_rows_go_through_the_outputs_in_groups(monkeypatch):
    """Several groups, and a last one that is not full."""
    monkeypatch.setattr(module, "_ROW_TILES_OF_GROUP", 2)
    weight, x = random_weight(300, 64, 128, 128), quantize_row_blocks(random_rows(600, 64), 128)
    plain, found = (block_product(x, weight, None, torch.float32, fused) for fused in (False, True))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=float(plain.abs().amax()) * 1e-6)


def test_the_tile_is_chosen_by_the_number_of_rows():
    assert [rows_of_tile(rows) for rows in (1, 16, 17, 64, 65, 9999)] == [16, 16, 64, 64, 128, 128]
    layer_format = BlockFp8(Fp8Config("weight_scale_inv", (128, 128)), torch.float32, torch.device("cpu"))
    assert [layer_format.kernels(rows) for rows in (16, 17, 65)] == [16, 64, 128]


def test_a_product_in_blocks_errs_by_what_e4m3_rounds():
    """Of inputs whose columns differ by ten thousand times, which one scale per row would lose."""
    x, weight = random_tensor(20, 256), random_tensor(60, 256, seed=1)
    x[:, :128] *= 1e4
    weight[:, :128] *= 1e-4
    blocks = weight.abs().unflatten(1, (2, 128)).amax((0, 2)) / LARGEST
    values = (weight / blocks.repeat_interleave(128)).to(E4M3)
    for fused in (False, True):
        of_weight = BlockWeight(values, blocks[None], 128, 128)
        found = block_product(quantize_row_blocks(x, 128, fused), of_weight, None, torch.float32, fused)
        exact = F.linear(x.double(), weight.double())
        # Half a unit, 2^-4 of a number at most, is 2.6 % of it on average, in each of two factors.
        assert 0.02 < (found - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("block", [(128, 128), (64, 32)], ids=str)
def test_kernels_give_the_tokens_of_the_plain_engine(plain_model, tmp_path, block, monkeypatch):  # noqa: F811
    """Prompts take the tile of many rows, decodes that of few."""
    rows, columns = block

    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if block == (128, 128):
            return by_block(name, weight)
        blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = blocks.abs().amax((1, 3)) / LARGEST
        values = (blocks / scales[:, None, :, None]).to(E4M3).reshape(weight.shape)
        return {name: values, f"{name}_scale_inv": scales}

    directory: Path = tmp_path / "fp8"
    quantized_copy(plain_model, directory, {**BLOCK, "weight_block_size": list(block)}, quantize)
    plain = completions(directory, attention_backend="torch")
    calls = []
    multiply = block_product

    def spied(x, weight, bias, dtype, fused=False):
        calls.append((fused, rows_of_tile(len(x.values))))
        return multiply(x, weight, bias, dtype, fused)

    monkeypatch.setattr(nanovllm.layers.quantization, "block_product", spied)
    assert_alike(completions(directory, attention_backend="triton", kvcache_block_size=16), plain)
    assert set(calls) >= {(True, 16), (True, 64)} and all(fused for fused, _ in calls)
