"""The CPU's packed linear layer against its plain twin."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.ops import fused_product
from nanovllm.ops.linear import linear, pack_weight


@pytest.mark.parametrize("num_rows", [0, 1, 3, 64, 300])
@pytest.mark.parametrize("shape", [(5, 7), (259, 160), (896, 160), (160, 448)])
@torch.inference_mode()
def test_a_packed_weight_gives_the_plain_product(num_rows, shape):
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(num_rows, 2 * shape[1])[:, ::2]
    packed = pack_weight(weight)
    assert packed is not None, "this PyTorch has no oneDNN"
    for bias_or_none in (bias, None):
        expected = F.linear(x.double(), weight.double(), None if bias_or_none is None else bias.double())
        for form in (packed, None):
            found = linear(x, weight, form, bias_or_none)
            assert found.shape == expected.shape
            assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_what_has_no_packed_form_stays_plain():
    """A float64 or bfloat16 weight once went through an operator made for float32."""
    for dtype in (torch.float64, torch.bfloat16):
        assert pack_weight(torch.ones(4, 4, dtype=dtype)) is None


@torch.inference_mode()
def test_bfloat16_is_computed_in_few_sizes_too(monkeypatch):
    """900 different lengths once left 1.5 GB of kernels behind."""
    compute, sizes = F.linear, set()

    def recording(x, *args):
        sizes.add(x.shape[0])
        return compute(x, *args)

    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((5, 7), (5,), (3000, 7)))
    expected = F.linear(x, weight, bias)
    monkeypatch.setattr(F, "linear", recording)
    for num_rows in range(1, 3001, 7):
        found = linear(x[:num_rows], weight, None, bias)
        torch.testing.assert_close(found, expected[:num_rows], rtol=2e-2, atol=2e-2)
    assert len(sizes) <= 24 and max(sizes) == 1024


@torch.inference_mode()
def test_any_number_of_rows_is_computed_in_few_sizes(monkeypatch):
    """oneDNN keeps half a megabyte for every number of rows that it has seen: prefills of all lengths once took
    gigabytes.
    """
    compute, sizes = torch.ops.mkldnn._linear_pointwise, []

    def recording(x, *args):
        sizes.append(x.shape[0])
        return compute(x, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recording)
    weight, bias, x = torch.randn(5, 7), torch.randn(5), torch.randn(3000, 7)
    packed, expected = pack_weight(weight), F.linear(x, weight, bias)
    for num_rows in range(1, 3001):
        sizes_before = len(sizes)
        found = linear(x[:num_rows], weight, packed, bias)
        torch.testing.assert_close(found, expected[:num_rows], rtol=1e-5, atol=1e-6)
        # Padding adds little work, and a long prompt is not cut into many small products.
        assert num_rows <= sum(sizes[sizes_before:]) <= max(2 * num_rows, 8)
        assert len(sizes) - sizes_before == -(-num_rows // 1024)
    assert len(set(sizes)) <= 24 and max(sizes) == 1024


@pytest.mark.parametrize(
    ("input_size", "output_size", "rows"),
    [
        (1024, 6144, {1152: True, 1408: True, 2048: True, 3072: True, 8192: True, 16384: True, 1: False, 512: False,
                      768: False, 1024: False, 1536: False}),
        (1024, 4096, {1024: True, 2048: True, 3072: True, 16384: True, 512: False, 768: False, 1280: False,
                      1536: False}),
        (4096, 24576, {512: True, 1024: True, 8192: True, 256: False, 384: False, 768: False}),
        (4096, 6144, {8192: True, 256: False, 512: False, 1024: False, 3072: False}),
        (3584, 37888, {768: True, 4096: True, 384: False}), (3584, 4608, {1024: False, 3072: False}),
        (2560, 19456, {640: True, 1024: True, 4096: True}), (2048, 4096, {1024: True, 3072: True}),
        (5120, 65536, {1: False, 16: False, 256: False, 2048: True}),  # not measured below 512
    ],
)  # fmt: skip
def test_a_product_is_fused_where_that_was_faster_on_an_h100(monkeypatch, input_size, output_size, rows):
    """docs/record.md has some of the times."""
    monkeypatch.setattr(fused_product, "has_gluon", lambda device: True)
    monkeypatch.setattr(fused_product, "num_processors", lambda device: 132)
    weight = torch.empty(output_size, input_size, dtype=torch.bfloat16, device="meta")
    assert {number: fused_product.has_fused_product(number, weight) for number in rows} == rows
    assert not fused_product.has_fused_product(8192, weight.float())
    assert not any(fused_product.has_fused_product(8192, part) for part in (weight[:-128], weight[:, :-32]))
    monkeypatch.setattr(fused_product, "has_gluon", lambda device: False)
    assert not fused_product.has_fused_product(8192, weight)
