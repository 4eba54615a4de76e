"""Products of many rows on Hopper GPUs together with what comes after them, in Gluon, against float64 and against the
kernels that do the same one after the other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gpu_kernels import GPU, captured, randn

from nanovllm.layers.rope_config import RopeConfig
from nanovllm.layers.rotary_embedding import Rotary, RotaryEmbedding
from nanovllm.ops.act_and_mul import ACTIVATIONS, act_and_mul
from nanovllm.ops.fused_product import gated_product, stored_product
from nanovllm.ops.gluon import has_gluon
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_gluon(GPU), reason="no Hopper GPU, or no Gluon"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Rows: less than a group's 64, ends of tiles of 128, more tiles than there are in a row of programs.
ROWS = pytest.mark.parametrize("num_rows", [1, 64, 127, 129, 1100, 3000])


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@DTYPES
@ROWS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("input_size", "size"), [(64, 128), (1024, 3072), (192, 640)])
def test_gate_and_up_are_no_worse_than_in_two_kernels(num_programs, dtype, num_rows, activation, input_size, size):
    """Some gates are far from 0: exp must not overflow to NaN."""
    x, weight = randn(num_rows, input_size, dtype=dtype), randn(2 * size, input_size, dtype=dtype, seed=1)
    weight *= 4 * input_size**-0.5
    weight[0] *= 50
    fused, twin = gated_product(x, weight, activation), act_and_mul(F.linear(x, weight), activation, True)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    exact = ACTIVATIONS[activation](gate) * up
    assert fused.isfinite().all() and error_of(fused, exact) <= 1.1 * error_of(twin, exact) + 1e-7
    # A lost row would not show in the whole.
    assert ((fused.double() - exact).norm(dim=1) <= 0.02 * exact.norm(dim=1)).all()


def make_heads(num_rows: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, norms: bool) -> tuple[Any, ...]:
    """(norm, eps, cos, sin, cache, slots) for stored_product: every seventh token has no slot."""
    rotary = RotaryEmbedding(128, 4096, RopeConfig(1e6, 128), dtype, GPU)
    generator = torch.Generator().manual_seed(0)
    rotations = rotary.lookup(torch.randint(4096, (num_rows,), generator=generator).to(GPU))
    norm = 1 + 0.3 * randn(num_heads + num_kv_heads, 128, dtype=dtype, seed=2) if norms else None
    num_blocks = num_rows // 64 + 2
    caches = (torch.full((num_blocks, 64, num_kv_heads, 128), 7.0, dtype=dtype, device=GPU) for _ in range(2))
    slots = torch.randperm(64 * num_blocks, generator=generator)[:num_rows].to(GPU)
    slots[::7] = -1
    return norm, 1e-6, rotations.cos, rotations.sin, LayerCache(*caches), slots


@DTYPES
@ROWS
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "norms"), [(16, 8, True), (28, 4, False), (6, 3, True), (2, 1, False)]
)
def test_heads_are_no_worse_than_in_two_kernels(num_programs, dtype, num_rows, num_heads, num_kv_heads, norms):
    """A tile may hold a key and a value. Slots of no token keep what they held."""
    num_normed = num_heads + num_kv_heads
    x, weight = randn(num_rows, 512, dtype=dtype), randn((num_normed + num_kv_heads) * 128, 512, dtype=dtype, seed=1)
    weight *= 3 * 512**-0.5
    norm, eps, cos, sin, cache, slots = make_heads(num_rows, num_heads, num_kv_heads, dtype, norms)
    other = LayerCache(cache.keys.clone(), cache.values.clone())
    fused = stored_product(x, weight, norm, eps, cos, sin, cache, slots)
    product = F.linear(x, weight)
    twin = qk_norm_rotate_store(product, norm, eps, cos, sin, 128, other, slots)
    heads = (x.double() @ weight.double().T).unflatten(1, (-1, 128))
    qk, v = heads[:, :num_normed], heads[:, num_normed:]
    if norm is not None:
        qk = qk / (qk.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    qk = Rotary(cos.double(), sin.double(), 128).rotate(qk)
    q, k = qk[:, :num_heads], qk[:, num_heads:]
    assert error_of(fused, q) <= 1.1 * error_of(twin[:, :num_heads], q) + 1e-7
    assert ((fused.double() - q).abs() <= 8 * torch.finfo(dtype).eps * q.abs().amax(-1, keepdim=True)).all()
    is_kept, kept = slots >= 0, slots[slots >= 0]
    for found, of_twin, exact in ((cache.keys, other.keys, k), (cache.values, other.values, v)):
        if len(kept):
            found_rows, twin_rows = found.flatten(0, 1)[kept], of_twin.flatten(0, 1)[kept]
            assert error_of(found_rows, exact[is_kept]) <= 1.1 * error_of(twin_rows, exact[is_kept]) + 1e-7
        found.flatten(0, 1)[kept] = 7.0
        assert (found == 7).all()


def test_captured_products_follow_their_inputs():
    """A graph keeps the descriptors, which hold addresses, not contents."""
    x, weight = randn(300, 256, dtype=torch.bfloat16), randn(1024, 256, dtype=torch.bfloat16, seed=1)
    heads = make_heads(300, 4, 2, torch.bfloat16, True)

    def step() -> torch.Tensor:
        return torch.cat((gated_product(x, weight, "silu"), stored_product(x, weight, *heads).flatten(1)), 1)

    graph, out = captured(step)
    for seed in (2, 3):
        x.copy_(randn(300, 256, dtype=torch.bfloat16, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, step())
