"""The router's and the experts' kernels, interpreted, against their plain twins, and the twins against the formula."""

import sys

import pytest
import torch
from support.experts import exact_mlp

from nanovllm.ops.grouped_mlp import ExpertWeights, grouped_mlp
from nanovllm.ops.route import Routes, route

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def randn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


SHAPES = [(1, 1, 1), (8, 3, 2), (16, 16, 8), (17, 5, 1), (37, 11, 4), (3, 128, 8)]  # tokens, experts, top_k


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
@pytest.mark.parametrize("renormalizes", [False, True])
def test_the_likeliest_experts_are_chosen(num_tokens, num_experts, top_k, renormalizes):
    x, weight = randn(num_tokens, 300, seed=1), randn(num_experts, 300, seed=2, scale=0.1)
    plain, fused = (route(x, weight, top_k, renormalizes, is_fused) for is_fused in (False, True))
    chances = (x.double() @ weight.double().T).softmax(-1)
    expected, experts = chances.topk(top_k, -1)
    if renormalizes:
        expected = expected / expected.sum(-1, keepdim=True)
    for routes in (plain, fused):
        assert routes.experts.dtype == torch.int32 and torch.equal(routes.experts.long(), experts)
        torch.testing.assert_close(routes.weights.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_equals_are_chosen_in_order_and_broken_tokens_choose_experts(fused):
    """A row of NaN must neither read outside the weights' memory nor change its neighbours."""
    x, weight = torch.zeros(4, 32), randn(6, 32, seed=3)
    x[1, 5], x[2, 7], x[3] = float("nan"), float("inf"), randn(32, seed=4)
    routes = route(x, weight, 4, True, fused)
    assert routes.experts[0].tolist() == [0, 1, 2, 3]
    assert torch.equal(routes.weights[0], torch.full((4,), 0.25))
    for broken in (1, 2):
        chosen = routes.experts[broken].tolist()
        assert len(set(chosen)) == 4 and all(0 <= expert < 6 for expert in chosen)
        assert routes.weights[broken].isnan().all()
    alone = route(x[3:], weight, 4, True, fused)
    assert torch.equal(routes.experts[3:], alone.experts)
    torch.testing.assert_close(routes.weights[3:], alone.weights)


@pytest.mark.grid(1)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
@pytest.mark.parametrize(("hidden_size", "size", "activation"), [(40, 24, "silu"), (130, 70, "gelu_pytorch_tanh")])
def test_experts_compute_what_the_formula_says(num_tokens, num_experts, top_k, hidden_size, size, activation):
    """Sizes that no tile divides, experts without tokens, and more experts than tokens."""
    x = randn(num_tokens, hidden_size, seed=5)
    gate_up = randn(num_experts, 2 * size, hidden_size, seed=6, scale=0.1)
    down = randn(num_experts, hidden_size, size, seed=7, scale=0.1)
    routes = route(x, randn(num_experts, hidden_size, seed=8), top_k, True)
    exact = exact_mlp(x, routes, gate_up, down, activation)
    for fused in (False, True):
        out = grouped_mlp(x, routes, ExpertWeights(gate_up), ExpertWeights(down), activation, fused)
        assert out.shape == x.shape and out.dtype == x.dtype
        assert (out.double() - exact).norm() <= 1e-5 * exact.norm()


def test_one_expert_may_have_all_tokens():
    """Its pairs take many tiles, and the other experts take none."""
    num_tokens = 150
    x, gate_up, down = randn(num_tokens, 32, seed=1), randn(4, 32, 32, seed=2), randn(4, 32, 16, seed=3)
    experts = torch.full((num_tokens, 2), 2, dtype=torch.int32)
    experts[:, 1] = torch.arange(num_tokens) % 2 * 3
    routes = Routes(experts, torch.rand(num_tokens, 2, generator=torch.Generator().manual_seed(1)))
    exact = exact_mlp(x, routes, gate_up, down, "silu")
    assert (
        grouped_mlp(x, routes, ExpertWeights(gate_up), ExpertWeights(down), use_kernels=True).double() - exact
    ).norm() <= 1e-5 * exact.norm()


def test_a_router_of_many_experts_reads_fewer_inputs_at_a_time(monkeypatch):
    """The weights of 512 experts once did not fit into what a program can share."""
    x, weight = randn(5, 300, seed=1), randn(40, 300, seed=2)
    plain = route(x, weight, 3, True)
    for limit in (2**20, 2**15):
        monkeypatch.setattr(sys.modules["nanovllm.ops.route"], "shared_memory", lambda device, limit=limit: limit)
        routes = route(x, weight, 3, True, use_kernels=True)
        assert torch.equal(routes.experts, plain.experts)
        torch.testing.assert_close(routes.weights, plain.weights)


def test_experts_take_more_pairs_than_one_chunk(monkeypatch):
    """The kernel that lists pairs reads a chunk of them at a time."""
    monkeypatch.setattr(sys.modules["nanovllm.ops.grouped_mlp"], "_PAIRS_OF_CHUNK", 1024)
    num_tokens = 700
    x, gate_up, down = randn(num_tokens, 16, seed=1), randn(3, 16, 16, seed=2), randn(3, 16, 8, seed=3)
    routes = route(x, randn(3, 16, seed=4), 2, False)
    exact = exact_mlp(x, routes, gate_up, down, "silu")
    assert (
        grouped_mlp(x, routes, ExpertWeights(gate_up), ExpertWeights(down), use_kernels=True).double() - exact
    ).norm() <= 1e-5 * exact.norm()


def test_a_token_does_not_depend_on_what_its_neighbours_choose():
    x, gate_up, down = randn(20, 32, seed=1), randn(6, 32, 32, seed=2), randn(6, 32, 16, seed=3)
    routes = route(x, randn(6, 32, seed=4), 3, True)
    together = grouped_mlp(x, routes, ExpertWeights(gate_up), ExpertWeights(down), use_kernels=True)
    for token in (0, 7, 19):
        alone = Routes(routes.experts[[token]], routes.weights[[token]])
        out = grouped_mlp(x[[token]], alone, ExpertWeights(gate_up), ExpertWeights(down), use_kernels=True)
        # The interpreter multiplies with BLAS, whose order of sums depends on the number of rows on some processors.
        torch.testing.assert_close(out[0], together[token], rtol=1e-5, atol=1e-5)
