"""Layers against their formulas and transformers, and their shards against the whole, also over real collectives."""

import math
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.long import some
from support.model_factory import make_model, save_model
from support.thread_ranks import CPU, FP32, Exchange, ThreadRank, logits_of

import nanovllm
from nanovllm.layers.context import LayerContext
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding, VocabSlice
from nanovllm.layers.forms import Form, PartialSum, PendingProduct
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.norm import ProjectionNorm, QKNorm, RMSNorm
from nanovllm.layers.quantization import ChannelFp8
from nanovllm.layers.rotary_embedding import RopeConfig, Rotary, RotaryEmbedding
from nanovllm.layers.shard import WHOLE, Rows
from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.exchange import made_by_all
from nanovllm.ops.linear import num_input_parts
from nanovllm.ops.quantize import ScaledProduct, quantize_rows
from nanovllm.ops.sampling_exchange import SamplingExchange


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every run, for any selection of tests."""
    torch.manual_seed(0)


def exactly(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def closely(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# RMSNorm


def make_norm(size: int, dtype: torch.dtype, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(size, eps, LayerContext(dtype, CPU))
    norm.weight.normal_(1, 0.3)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (7, 64), (5, 3, 16)])
def test_rmsnorm_is_the_formula_and_that_of_transformers(dtype, shape):
    """The result is rounded before the weight is applied, as in transformers. Inputs are small and large."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm  # slow to import

    norm = make_norm(shape[-1], dtype, eps=1e-3)
    theirs = Qwen3RMSNorm(shape[-1], eps=1e-3).to(dtype)
    theirs.weight.data.copy_(norm.weight)
    for scale in (1e-3, 1.0, 300.0):
        x = (torch.randn(shape) * scale).to(dtype)
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
        y = norm(x)
        assert y.dtype == dtype and y.shape == x.shape
        tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert ((y.double() - exact).abs() <= tolerance * exact.abs() + 1e-6).all()
        torch.testing.assert_close(y, theirs(x), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rmsnorm_leaves_its_input_alone(dtype):
    """An in-place square of the caller's tensor would corrupt the residual of the whole model."""
    norm = make_norm(32, dtype)
    x, residual = torch.randn(2, 6, 32).to(dtype).unbind()
    copies = x.clone(), residual.clone()
    norm(x)
    norm.reduce_add(PartialSum(x), residual)
    norm.reduce_add(PartialSum(x), None)
    exactly(x, copies[0])
    exactly(residual, copies[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_residual_form_returns_the_norm_of_the_sum_and_the_sum(dtype):
    norm = make_norm(32, dtype)
    x, residual = torch.randn(2, 6, 32).to(dtype).unbind()
    normed, total = norm.reduce_add(PartialSum(x), residual)
    exactly(total, x + residual)
    exactly(normed, norm(x + residual))
    assert normed.data_ptr() != total.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_residual_the_sum_is_its_own(dtype):
    """This is the case of the embedding, which begins the residual."""
    norm, x = make_norm(32, dtype), torch.randn(6, 32).to(dtype)
    normed, total = norm.reduce_add(PartialSum(x), None)
    exactly(total, x)
    exactly(normed, norm(x))
    assert normed.data_ptr() != total.data_ptr()


def test_the_residual_form_sums_the_parts_of_all_ranks_before_it_norms():
    """A norm of a part is not a part of the norm."""

    class Two(Parallel):
        def all_reduce(self, tensor):
            return tensor + 100 * torch.arange(32.0)

    norm = RMSNorm(32, 1e-6, on(Two(0, 2)))
    norm.weight.normal_(1, 0.3)
    x, residual = torch.randn(2, 6, 32).unbind()
    for of_call in (residual, None):
        normed, total = norm.reduce_add(PartialSum(x), of_call)
        expected = x + 100 * torch.arange(32.0)
        expected = expected if of_call is None else expected + residual
        exactly(total, expected)
        exactly(normed, norm(expected))


def test_rmsnorm_works_on_views_of_heads():
    """QK-norm gets slices of the fused projection, which are not contiguous."""
    norm = make_norm(16, torch.float32)
    q = torch.randn(5, 8, 16)[:, 2:5]
    exactly(norm(q), norm(q.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_head_is_normed_by_itself_with_the_weight_of_its_kind(dtype):
    """The result is that of one RMSNorm for the queries and one for the keys; the loader fills one row per head."""
    qk_norm, q_norm, k_norm = (
        QKNorm(6, 2, 16, 1e-6, LayerContext(dtype, CPU)),
        make_norm(16, dtype),
        make_norm(16, dtype),
    )
    for key, (shard,) in qk_norm.shards("weight").items():
        assert shard.shape == (16,)
        shard.target.copy_({"q_norm": q_norm, "k_norm": k_norm}[key].weight)
    qk = torch.randn(5, 10, 16).to(dtype)[:, 1:9]
    copy = qk.clone()
    normed = qk_norm(qk)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(normed[:, :6], q_norm(qk[:, :6]), rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(normed[:, 6:], k_norm(qk[:, 6:]), rtol=tolerance, atol=1e-6)
    exactly(qk, copy)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_queries_of_all_ranks_are_normed_together_and_so_are_their_keys(num_kv_heads, size):
    """With fewer key heads than ranks, several ranks hold the same head, which counts once."""
    torch.manual_seed(size)
    head_dim, num_heads, exchange, found = 6, 8, Exchange(size), [None] * size
    widths = num_heads * head_dim, num_kv_heads * head_dim
    whole = {"q": torch.randn(5, widths[0]), "k": torch.randn(5, widths[1]) * 3, "v": torch.randn(5, widths[1])}
    weights = {"q_norm": torch.randn(widths[0]), "k_norm": torch.randn(widths[1])}

    def run_rank(rank: int) -> None:
        context = LayerContext(torch.float32, CPU, False, ThreadRank(rank, size, exchange))
        of_qkv = QKVParallelLinear(8, head_dim, num_heads, num_kv_heads, False, context)
        norm = ProjectionNorm(of_qkv.rows[:2], 1e-5, context)
        for key, (shard,) in norm.shards("weight").items():
            assert shard.shape == weights[key].shape
            ((start, length),) = shard.source
            shard.target.copy_(weights[key][start : start + length])
        parts = {key[0]: slice(start, start + length) for key, _, start, length in of_qkv.rows}
        found[rank] = parts, norm(torch.cat([whole[name][:, part] for name, part in parts.items()], 1))

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = {"v": whole["v"]}
    for name, weight in zip("qk", weights.values(), strict=True):
        expected[name] = F.rms_norm(whole[name], weight.shape, weight, 1e-5)
    for parts, normed in found:
        slices = [expected[name][:, part] for name, part in parts.items()]
        torch.testing.assert_close(normed, torch.cat(slices, 1), rtol=1e-5, atol=1e-5)


def test_ranks_that_sum_inside_a_layer_try_every_step_before_its_capture():
    """That sum is NCCL's, which initialises itself for each new size."""
    exchanges = {"exchange": "an exchange", "sampling_exchange": "another"}
    assert [Parallel(0, 2, **exchanges, reduces_in_layers=reduces).calls_nccl for reduces in (False, True)] == [0, 1]
    assert not Parallel(reduces_in_layers=True).calls_nccl


# Rotary embedding and activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10000.0), (64, 1e6), (10, 77.0)])
def test_rotary_embedding_is_that_of_transformers(dtype, head_dim, theta):
    """Pairs are (i, i + d/2), not interleaved. Far positions are tested too; ours is never less exact than theirs."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb  # slow to import

    rope = {"rope_type": "default", "rope_theta": theta}
    config = make_model(rope=rope, head_dim=head_dim, num_hidden_layers=1, max_position_embeddings=4096).config
    positions = torch.tensor([0, 1, 2, 77, 4095, 3, 3])
    q, k = torch.randn(1, 8, 7, head_dim).to(dtype), torch.randn(1, 2, 7, head_dim).to(dtype)
    cos, sin = Qwen3RotaryEmbedding(config)(q.float(), positions[None])
    exact = apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())
    expected = apply_rotary_pos_emb(q, k, cos.to(dtype), sin.to(dtype))
    rotary = RotaryEmbedding(head_dim, 4096, RopeConfig(theta, head_dim), dtype, CPU)
    for x, truth, theirs in zip((q, k), exact, expected, strict=True):
        ours = rotary.lookup(positions).rotate(x[0].transpose(0, 1)).transpose(0, 1)
        assert ours.dtype == dtype
        our_error, their_error = ((y.double() - truth[0]).norm() for y in (ours, theirs[0]))
        assert our_error <= 1.1 * their_error + 1e-6 * truth.norm(), (our_error, their_error)


def test_rotation_leaves_its_input_alone():
    """It reads both halves of every head to write either."""
    rotary = RotaryEmbedding(16, 50, RopeConfig(10000.0, 16), torch.float32, CPU)
    x = torch.randn(5, 3, 16)
    copy = x.clone()
    rotations = rotary.lookup(torch.arange(5) + 7)
    first = rotations.rotate(x)
    exactly(x, copy)
    exactly(rotations.rotate(x), first)


def test_queries_have_factors_only_beyond_the_original_context():
    """Llama 4's formula. Nothing is computed if no position reaches the end of the original context."""
    rope = RopeConfig(1e4, 8, "yarn", 4.0, original_max_position=10, llama_4_scaling_beta=0.1)
    short, long = (RotaryEmbedding(8, length, rope, torch.float32, CPU) for length in (10, 35))
    assert short.lookup(torch.arange(10)).query_scales is None
    factors = long.lookup(torch.tensor([0, 9, 10, 19, 20, 34])).query_scales
    expected = [1 + 0.1 * math.log(1 + num_contexts) for num_contexts in (0, 0, 1, 1, 2, 3)]
    assert factors.flatten().tolist() == pytest.approx(expected) and factors.shape == (6, 1, 1)


def test_a_rope_of_no_kind_changes_nothing():
    rotations = RotaryEmbedding(16, 50, RopeConfig(1.0, 16, "none"), torch.bfloat16, CPU).lookup(torch.arange(40))
    x = torch.randn(40, 3, 16, dtype=torch.bfloat16)
    exactly(rotations.rotate(x), x)


def test_rotation_keeps_lengths_and_relative_positions():
    """The score of q at m and k at n depends only on m − n."""
    rotary = RotaryEmbedding(32, 500, RopeConfig(10000.0, 32), torch.float32, CPU)
    q, k = torch.randn(2, 1, 1, 32).double().unbind()

    def rotated(x, position):
        cos, sin, rotary_dim, _ = rotary.lookup(torch.tensor([position]))
        return Rotary(cos.double(), sin.double(), rotary_dim).rotate(x)

    assert rotated(q, 333).norm() == pytest.approx(float(q.norm()), rel=1e-6)
    near, far = ((rotated(q, m) * rotated(k, n)).sum() for m, n in ((17, 5), (412, 400)))
    assert float(near) == pytest.approx(float(far), rel=1e-4)


def test_act_and_mul_gates_with_the_first_half():
    """Gate and up projections are merged in this order; swapped halves would still look plausible."""
    gate, up = torch.randn(2, 9, 24).unbind()
    closely(act_and_mul(torch.cat((gate, up), -1)), gate / (1 + (-gate).exp()) * up)


# Shards. A rank whose collectives do nothing shows its own part, which the tests put together.


@dataclass(frozen=True)
class LonelyRank(Parallel):
    def all_reduce(self, tensor):
        return tensor

    def all_gather(self, tensor):
        return tensor


def load(layer: torch.nn.Module, whole: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Fills a layer from whole tensors (by shard key and parameter name), as the loader does."""
    for name, parameter in layer.named_parameters():
        parameter.fill_(float("nan"))
        for key, shards in layer.shards(name).items():
            tensor = whole[f"{key}.{name}" if key else name]
            for shard in shards:
                assert tuple(tensor.shape) == shard.shape, (key, name)
                part = tensor[tuple(slice(start, start + length) for start, length in shard.source)]
                shard.target.copy_(part)
    return layer


def on(rank: Parallel) -> LayerContext:
    return replace(FP32, parallel=rank)


def ranks(size: int) -> list[LonelyRank]:
    return [LonelyRank(rank, size) for rank in range(size)]


def columns(sizes: dict[str, int], bias: bool, rank: Parallel, input_size: int) -> MergedColumnParallelLinear:
    rows = [Rows(key, size, *rank.shard(size, key)) for key, size in sizes.items()]
    return MergedColumnParallelLinear(input_size, rows, bias, on(rank))


SIZES = pytest.mark.parametrize("size", [1, 2, 4])
BIAS = pytest.mark.parametrize("bias", [False, True])


@SIZES
@BIAS
def test_column_parallel_outputs_side_by_side_are_the_whole(size, bias):
    whole = {"weight": torch.randn(12, 10), "bias": torch.randn(12)}
    x = torch.randn(3, 10)
    parts = [load(columns({WHOLE: 12}, bias, rank, 10), whole)(x) for rank in ranks(size)]
    closely(torch.cat(parts, -1), F.linear(x, whole["weight"], whole["bias"] if bias else None))


@SIZES
@BIAS
def test_merged_outputs_are_divided_one_by_one(size, bias):
    """Cutting the merged output into equal pieces would give rank 0 all of gate and rank 1 all of up."""
    sizes = {"gate_proj": 8, "up_proj": 12}
    whole = {f"{key}.weight": torch.randn(rows, 10) for key, rows in sizes.items()}
    whole |= {f"{key}.bias": torch.randn(rows) for key, rows in sizes.items()}
    x = torch.randn(3, 10)
    parts = [load(columns(sizes, bias, rank, 10), whole)(x) for rank in ranks(size)]
    gates, ups = zip(*(part.split((8 // size, 12 // size), -1) for part in parts), strict=True)
    for key, shards in (("gate_proj", gates), ("up_proj", ups)):
        expected = F.linear(x, whole[f"{key}.weight"], whole[f"{key}.bias"] if bias else None)
        closely(torch.cat(shards, -1), expected)


@SIZES
@BIAS
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 4), (4, 2), (8, 1), (12, 2)])
def test_every_rank_gets_its_heads_and_the_key_heads_they_read(size, bias, num_heads, num_kv_heads):
    """With fewer key heads than ranks, neighbours share one; dealing them round robin would pair the wrong heads."""
    head_dim, hidden_size = 6, 10
    heads = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    whole = {f"{key}.weight": torch.randn(n * head_dim, hidden_size) for key, n in heads.items()}
    whole |= {f"{key}.bias": torch.randn(n * head_dim) for key, n in heads.items()}
    x = torch.randn(3, hidden_size)
    q, k, v = (
        F.linear(x, whole[f"{key}.weight"], whole[f"{key}.bias"] if bias else None).unflatten(-1, (n, head_dim))
        for key, n in heads.items()
    )
    group_size = num_heads // num_kv_heads
    head = 0
    for rank in ranks(size):
        layer = load(QKVParallelLinear(hidden_size, head_dim, num_heads, num_kv_heads, bias, on(rank)), whole)
        sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        assert layer.num_heads == num_heads // size and layer.num_kv_heads == max(1, num_kv_heads // size)
        ours = layer(x).unflatten(-1, (-1, head_dim)).split(sizes, 1)
        for local in range(layer.num_heads):
            local_kv = local // (layer.num_heads // layer.num_kv_heads)
            closely(ours[0][:, local], q[:, head])
            closely(ours[1][:, local_kv], k[:, head // group_size])
            closely(ours[2][:, local_kv], v[:, head // group_size])
            head += 1
    assert head == num_heads


@SIZES
@BIAS
def test_row_parallel_outputs_add_up_and_the_bias_counts_once(size, bias):
    """If every rank added the bias, the all-reduce would add it `size` times."""
    whole = {"weight": torch.randn(6, 12), "bias": torch.randn(6)}
    x = torch.randn(3, 12)
    layers = [load(RowParallelLinear(12, 6, bias, on(rank)), whole) for rank in ranks(size)]
    sums = [layer(part) for layer, part in zip(layers, x.chunk(size, -1), strict=True)]
    assert all(isinstance(partial, PartialSum) for partial in sums), "it still lacks the other ranks' parts"
    closely(sum(partial.part for partial in sums), F.linear(x, whole["weight"], whole["bias"] if bias else None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_product_of_few_rows_comes_in_parts_for_the_norm(dtype):
    """It does not come in parts for: a single row, which has its own kernel; many rows; inputs that do not divide; a
    bias, which only one part may count; packed weights; ranks, whose exchange sums one part of each; norms that take no
    parts.
    """
    context = LayerContext(dtype, CPU, use_kernels=True)
    layer = RowParallelLinear(64, 24, False, context, gives=RMSNorm.accepted_sums(context))
    layer.weight.normal_()
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 24).to(dtype)
    part = layer(x).part
    assert part.shape == (4, 5, 24) and part.dtype == torch.float32
    exact = x.double() @ layer.weight.double().T
    torch.testing.assert_close(part.double().sum(0), exact, rtol=0, atol=1e-5)
    for index in range(4):
        inputs = slice(16 * index, 16 * index + 16)
        torch.testing.assert_close(part[index], x[:, inputs].float() @ layer.weight[:, inputs].float().T)
    norm = make_norm(24, dtype)
    normed, total = norm.reduce_add(PartialSum(part), residual)
    exactly(total, (part.sum(0) + residual).to(dtype))
    exactly(normed, norm(total))

    def num_dims(rows: int, inputs: int = 64, bias: bool = False, gives: Form | None = None, **changes) -> int:
        of_layer = replace(context, **changes)
        layer = RowParallelLinear(
            inputs, 24, bias, of_layer, gives=RMSNorm.accepted_sums(of_layer) if gives is None else gives
        )
        layer.weight.normal_()
        return layer(torch.randn(rows, layer.weight.shape[1]).to(dtype)).part.ndim

    assert num_dims(256) == 3 and num_dims(2) == 3
    assert [layer.variant_key(rows) for rows in (1, 2, 256, 257)] == [1, 4, 4, 0]
    assert num_dims(5, 72) == num_dims(5, bias=True) == num_dims(5, parallel=LonelyRank(0, 2)) == 2
    assert num_dims(5, gives=Form.PLAIN) == num_dims(5, use_kernels=False) == 2
    if dtype == torch.float32:
        layer.pack()
        assert layer.packed is None or layer(x).part.ndim == 2


def test_ranks_with_an_exchange_leave_scales_and_rounding_to_it():
    """NCCL sums only scaled products, and so does a norm after a block. A bias is added after the scales."""
    calls = []

    def sum_add_norm(product, residual, weight, eps, begins_step, quantizes=False):
        calls.append((product, quantizes))
        return product, product

    exchange = SimpleNamespace(sum_add_norm=sum_add_norm)

    def on_two(exchange: Any) -> LayerContext:
        return LayerContext(torch.float32, CPU, True, LonelyRank(0, 2, exchange=exchange))

    def part_of(exchange: Any, bias: bool = False, gives: Form | None = None) -> torch.Tensor | ScaledProduct:
        context = on_two(exchange)
        gives = RMSNorm.accepted_sums(context) if gives is None else gives
        layer = RowParallelLinear(64, 24, bias, context, format=ChannelFp8(Fp8Config(), context), gives=gives)
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape))
        return layer(quantize_rows(torch.rand(3, 32))).part

    product = part_of(exchange)
    assert isinstance(product, ScaledProduct)
    for other in (part_of(None), part_of(exchange, bias=True), part_of(exchange, gives=Form.PLAIN)):
        assert isinstance(other, torch.Tensor)
    for gives in (Form.PLAIN, Form.QUANTIZED):
        norm = RMSNorm(24, 1e-6, on_two(exchange), gives=gives)
        norm.reduce_add(PartialSum(product), torch.zeros(3, 24))
    assert calls == [(product, False), (product, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_fused_product_is_added_to_the_residual_while_it_is_multiplied(dtype):
    """The norm then reads one tensor instead of two. The sum is rounded once, not twice."""

    def made(bias: bool = False, gives: Form | None = None, **changes) -> RowParallelLinear:
        context = replace(LayerContext(dtype, CPU, use_kernels=True), **changes)
        layer = RowParallelLinear(
            64, 24, bias, context, gives=RMSNorm.accepted_sums(context) if gives is None else gives
        )
        layer.weight.normal_()
        return layer

    layer, x = made(), torch.randn(257, 64).to(dtype)
    residual = torch.randn(257, 24).to(dtype)
    exact = x.double() @ layer.weight.double().T + residual.double()
    norm, pending = make_norm(24, dtype), layer(x)
    assert isinstance(pending, PendingProduct)
    normed, total = norm.reduce_add(pending, residual)
    torch.testing.assert_close(total.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    exactly(normed, norm(total))
    # With a bias, several ranks or packed weights, the product is computed at once. A product of few rows comes in
    # parts.
    others = [made(bias=True), made(parallel=LonelyRank(0, 2)), made(gives=Form.PLAIN), made(use_kernels=False)]
    assert not any(isinstance(other(x[:, : other.weight.shape[1]]), PendingProduct) for other in others)
    assert isinstance(layer(x[:256]), PartialSum)
    if dtype == torch.float32:
        layer.pack()
        assert layer.packed is None or isinstance(layer(x), PartialSum)


@pytest.mark.parametrize(
    "outputs, rows, num_parts",
    [(1024, 1, 1), (1024, 2, 4), (2048, 256, 4), (2048, 257, 1), (2049, 2, 2), (3072, 256, 2), (3584, 64, 1),
     (4096, 65, 2), (5120, 192, 1), (5120, 193, 2), (5121, 256, 1)],
)  # fmt: skip
def test_parts_of_products_where_they_pay(outputs, rows, num_parts):
    assert num_input_parts(rows, 4096, outputs) == num_parts
    assert num_input_parts(rows, 4096 + 8, outputs) == 1


@SIZES
@pytest.mark.parametrize("vocab_size", [1, 5, 7, 16, 61])
def test_a_vocabulary_of_any_size_is_divided(size, vocab_size):
    """It may not divide, and the last ranks may get no ids: padding is neither read nor sampled."""
    whole = {"weight": torch.randn(vocab_size, 10)}
    token_ids = torch.arange(vocab_size).repeat(2)
    embedded = [load(VocabParallelEmbedding(vocab_size, 10, on(rank)), whole)(token_ids) for rank in ranks(size)]
    hidden_states = torch.randn(3, 10)
    # The loader leaves padding rows alone, so NaN stays in them and must not reach any result.
    exactly(sum(partial.part for partial in embedded), F.embedding(token_ids, whole["weight"]))
    heads = [load(ParallelLMHead(vocab_size, 10, on(rank)), whole) for rank in ranks(size)]
    logits = torch.cat([F.linear(hidden_states, head.weight) for head in heads], -1)[:, :vocab_size]
    closely(logits, F.linear(hidden_states, whole["weight"]))


def test_padding_rows_of_the_vocabulary_start_as_zeros():
    """Uninitialised memory may hold NaN, which no mask stops in a product."""
    head = ParallelLMHead(5, 4, on(LonelyRank(3, 4)))
    assert head.vocab.num_ids == 0 and torch.equal(head.weight, torch.zeros(16, 4))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda rank: QKVParallelLinear(8, 4, 6, 2, False, on(rank)), "num_attention_heads"),
        (lambda rank: QKVParallelLinear(8, 4, 12, 6, False, on(rank)), "num_key_value_heads"),
        (lambda rank: QKVParallelLinear(8, 4, 12, 3, False, on(rank)), "num_key_value_heads"),
        (lambda rank: RowParallelLinear(10, 8, False, on(rank)), "10"),
    ],
)
def test_what_does_not_divide_over_the_ranks_is_an_error_with_the_numbers(make, named):
    with pytest.raises(ValueError, match=named) as error:
        make(LonelyRank(0, 4))
    assert "4 ranks" in str(error.value)


# Whole models over several ranks, each rank a thread


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("tied", "exchanges"), [(False, False), (True, False), (False, True)])
def test_a_model_over_several_ranks_is_the_model(tmp_path, size, tied, exchanges):
    """With biases, replicated key heads and a vocabulary that does not divide; every rank reads one checkpoint.
    The ranks that do not add the row-parallel bias once called it an unexpected tensor."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 61, "intermediate_size": 40}
    model = save_model(tmp_path, attention_bias=True, tie_word_embeddings=tied, **shape)
    token_ids = [int(token) for token in torch.randint(61, (40,), generator=torch.Generator().manual_seed(0))]
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    exchange, logits, errors = Exchange(size), [None] * size, []
    columns = [torch.full((48, VocabSlice.of(61, Parallel(0, size)).size), float("nan")) for _ in range(size)]
    gathered = [torch.full((48,), -7) for _ in range(size)]

    def run_rank(rank: int) -> None:
        try:
            parallel = ThreadRank(rank, size, exchange)
            if exchanges:
                own = SamplingExchange(parallel, columns, gathered, exchange.barrier.wait)
                parallel = replace(parallel, sampling_exchange=own)
            logits[rank] = logits_of(tmp_path, token_ids, parallel)
            if exchanges:
                exchange.barrier.wait()  # like the layers' sums of the next step
                for num_rows in (3, 1, 0):
                    found = own.all_gather(torch.arange(num_rows) + 10 * rank)
                    assert found.tolist() == [10 * r + i for r in range(size) for i in range(num_rows)]
                    exchange.barrier.wait()
                    pairs = torch.full((1, num_rows, 2), rank, dtype=torch.int32)
                    found = own.all_gather(pairs)
                    assert found.shape == (size, num_rows, 2) and found.dtype == torch.int32
                    assert all((found[r] == r).all() for r in range(size))
                    exchange.barrier.wait()
        except BaseException as error:  # the test reports it; the others must not wait
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    for rank in range(size):
        torch.testing.assert_close(logits[rank], expected, rtol=1e-4, atol=1e-4)
        exactly(logits[rank], logits[0])


def test_a_rank_gathers_what_a_slow_rank_sends():
    """A rank that read before the barrier once found the numbers of the previous step."""
    gathered = [torch.full((2,), -7) for _ in range(2)]

    def barrier() -> None:  # the other rank sends at the last moment
        gathered[0][1] = 11

    own = SamplingExchange(Parallel(0, 2), [], gathered, barrier)
    assert own.all_gather(torch.tensor([10])).tolist() == [10, 11]
    assert gathered[1].tolist() == [10, -7]


def test_what_one_rank_cannot_make_no_rank_has(caplog):
    """The others would wait for it in their first exchange."""

    class Lonely(Parallel):
        def minimum(self, value: int, device: torch.device) -> int:
            return min(value, others)

    def fail() -> str:
        raise RuntimeError("no link")

    for others in (0, 1):
        assert made_by_all(lambda: "an exchange", Lonely(), CPU) == ("an exchange" if others else None)
        assert made_by_all(fail, Lonely(), CPU) is None
    assert "no link" in caplog.text

    def lack_memory() -> str:
        raise torch.cuda.OutOfMemoryError("out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        made_by_all(lack_memory, Lonely(), CPU)


# The collectives


def test_collectives_do_nothing_at_size_1():
    """A single process has no process group, and must not need one."""
    alone, x = Parallel(), torch.randn(3, 4)
    assert alone.all_reduce(x) is x and alone.all_gather(x) is x and alone.rows_of_columns(x) is x
    assert alone.minimum(3, torch.device("cpu")) == 3 and alone.shard(7, "heads") == (0, 7)


# The package that is tested here, even if it is a copy.
RANK_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(nanovllm.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
if sys.platform == "linux":
    RANK_ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"
GLOO_RANK = """
    import datetime, sys
    import torch
    import torch.distributed as dist
    from nanovllm.layers.context import LayerContext
    from nanovllm.layers.embed_head import ParallelLMHead
    from nanovllm.layers.sampler import SampledRows, Sampler, SamplingNeeds
    from nanovllm.ops.collectives import Parallel

    rank, size, meeting_point = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=size, timeout=timeout)
    parallel = Parallel(rank, size, dist.new_group(list(range(size))))
    own = torch.arange(6.0).view(2, 3) + 100 * rank
    every = [torch.arange(6.0).view(2, 3) + 100 * r for r in range(size)]

    x = own.clone()
    assert parallel.all_reduce(x) is x and torch.equal(x, sum(every))
    assert torch.equal(parallel.all_gather(own), torch.cat(every))
    assert torch.equal(parallel.all_gather(own.T), torch.cat([e.T for e in every]))
    assert torch.equal(parallel.all_gather(torch.tensor([7, rank])).view(-1, 2)[:, 1], torch.arange(size))
    assert parallel.minimum(5 - rank, torch.device("cpu")) == 5 - (size - 1)
    assert parallel.shard(size * 5, "heads") == (rank * 5, 5)

    def ours_of(whole):
        return whole.chunk(size)[rank]

    for num_rows, num_columns in ((size, 1), (3 * size, 5), (0, 4)):
        whole = torch.arange(float(num_rows * size * num_columns)).view(num_rows, size * num_columns)
        columns = whole[:, rank * num_columns : (rank + 1) * num_columns]
        rows = parallel.rows_of_columns(columns)
        assert torch.equal(rows, whole[len(rows) * rank : len(rows) * (rank + 1)]) and len(rows) == num_rows // size

    # The vocabularies: of slices that are full, that are not, and of ranks that hold nothing.
    for vocab_size in (16 * size, 61, 20, 7):
        weight = torch.randn(vocab_size, 10, generator=torch.Generator().manual_seed(vocab_size))
        one = ParallelLMHead(vocab_size, 10, LayerContext(torch.float32, torch.device("cpu")))
        head = ParallelLMHead(vocab_size, 10, LayerContext(torch.float32, torch.device("cpu"), parallel=parallel))
        one.weight.copy_(weight)
        for (shard,) in head.shards("weight").values():
            (first, length), _ = shard.source
            shard.target.copy_(weight[first : first + length])
        for is_packed in (False, True):
            if is_packed:
                head.pack()
            for num_rows in (size, 5 * size, 8 * size):
                hidden_states = torch.randn(num_rows, 10, generator=torch.Generator().manual_seed(num_rows))
                whole = one(hidden_states)
                columns = head(hidden_states)
                assert columns.shape == (num_rows, head.vocab.size)
                logits = parallel.rows_of_columns(columns)[:, :vocab_size]
                torch.testing.assert_close(logits, ours_of(whole), rtol=1e-5, atol=1e-5)
                seeds, temperatures = torch.arange(num_rows), torch.arange(num_rows) % 3 / 2
                zeros, ones = torch.zeros(num_rows), torch.ones(num_rows)
                kinds = (seeds % 3).int()
                rows = SampledRows(seeds, seeds, seeds, temperatures, (seeds % 4).int(), ones, zeros, kinds)
                for needs in map(SamplingNeeds, (False, True, True, False), (0, 0, 0, 0), (0, 0, 3, 1)):
                    found, expected = (
                        Sampler(it.vocab, it.parallel).sample(logits, rows, needs, None, None)
                        for it, logits in ((head, columns), (one, whole))
                    )
                    assert torch.equal(found.tokens, expected.tokens), (vocab_size, num_rows, needs)
                    assert found.logprobs.shape == expected.logprobs.shape == (num_rows, expected.logprobs.shape[1])
                    for column in range(expected.logprobs.shape[1]):
                        pair = [sampled.logprobs[:, column].contiguous() for sampled in (found, expected)]
                        is_value = column > 0 and column % 2 == 0
                        pair = [each.view(torch.float32) for each in pair] if is_value else pair
                        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
                pair = (
                    Sampler(it.vocab, it.parallel).score(logits, seeds % vocab_size, 2)
                    for it, logits in ((head, columns), (one, whole))
                )
                torch.testing.assert_close(*(each[:, 2].contiguous().view(torch.float32) for each in pair))
    dist.destroy_process_group()
    print("rank", rank, "agrees")
"""


@pytest.mark.parametrize("size", some([2, 4], 2))
def test_collectives_and_the_lm_head_over_real_processes(tmp_path, size):
    """All of them run on gloo, in their own group. Every rank gets whole rows of logits from the LM head, and the rows
    of all ranks equal one rank's: they are sliced by rows of the weight, exchanged, and cut where the vocabulary ends.

    A deprecated name of PyTorch's once wrote a warning per rank to the user's screen."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(GLOO_RANK))
    meeting_point = (tmp_path / "meeting_point").as_uri()
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::FutureWarning", str(script), str(rank), str(size), meeting_point],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=RANK_ENVIRONMENT,
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0 and f"rank {rank} agrees" in output, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
