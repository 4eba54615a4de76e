"""Chooses each token's experts: the router of a mixture of experts (Shazeer et al., 2017), in float32."""

from typing import NamedTuple

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, shared_memory, tl, triton
from nanovllm.ops.row_invariant import PLAIN, RowOps

# Tokens, and the maximum number of inputs, per program that multiplies with the router's weights.
_TOKENS, _MAX_INPUTS = 16, 256


class Routes(NamedTuple):
    """Each token's experts, most probable first; among equally probable ones, the lower number first. Both tensors are
    contiguous.

    experts: int32 [num_tokens, top_k]; a token's experts are all different.
    weights: float32 [num_tokens, top_k].
    """

    experts: torch.Tensor
    weights: torch.Tensor


def plain_route(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, renormalizes: bool, row_ops: RowOps = PLAIN
) -> Routes:
    probabilities = row_ops.linear(x.float(), weight.float()).softmax(-1)
    weights, experts = (part[:, :top_k] for part in probabilities.sort(dim=-1, descending=True, stable=True))
    if renormalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(experts.int(), weights.contiguous())


@jit(do_not_specialize=["num_tokens"])
def _router_kernel(
    x, weight, parts, num_tokens, NUM_EXPERTS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens and part of the inputs; it computes a summand of the logits of all experts."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    column = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    is_token, is_expert, is_real = token < num_tokens, expert < NUM_EXPERTS, column < SIZE
    weights = tl.load(weight + expert[None, :] * SIZE + column[:, None], is_real[:, None] & is_expert[None, :], 0.0)
    begin()
    at = x + token[:, None].to(tl.int64) * SIZE + column[None, :]
    values = tl.load(at, is_token[:, None] & is_real[None, :], 0.0)
    logits = tl.dot(values, weights, input_precision="ieee")
    first = (tl.program_id(1).to(tl.int64) * num_tokens + token[:, None]) * NUM_EXPERTS
    tl.store(parts + first + expert[None, :], logits, is_token[:, None] & is_expert[None, :])


@jit(do_not_specialize=["num_tokens"])
def _top_experts_kernel(
    parts, experts, weights, num_tokens, NUM_PARTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, PLACES: tl.constexpr, RENORMALIZES: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    place = tl.arange(0, PLACES)
    is_expert = expert < NUM_EXPERTS
    begin()
    logits = tl.zeros([EXPERTS], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        logits += tl.load(parts + (part * num_tokens + token) * NUM_EXPERTS + expert, is_expert, 0.0)
    is_broken = tl.sum((is_expert & (logits != logits)).to(tl.int32), 0) > 0
    # Even if the logits are broken, the experts must be valid and different.
    left = tl.where(is_expert, tl.where(logits == logits, tl.maximum(logits, -3e38), -3e38), float("-inf"))
    chances = tl.exp(left - tl.max(left, 0))
    chances /= tl.sum(tl.where(is_expert, chances, 0.0), 0)
    chosen = tl.zeros([PLACES], tl.int32)
    chosen_weights = tl.zeros([PLACES], tl.float32)
    for index in tl.static_range(TOP_K):
        largest = tl.max(left, 0)
        best = tl.min(tl.where(left == largest, expert, EXPERTS), 0)
        chosen = tl.where(place == index, best, chosen)
        chosen_weights = tl.where(place == index, tl.sum(tl.where(expert == best, chances, 0.0), 0), chosen_weights)
        left = tl.where(expert == best, float("-inf"), left)
    if RENORMALIZES:
        chosen_weights /= tl.sum(chosen_weights, 0)
    chosen_weights = tl.where(is_broken, float("nan"), chosen_weights)
    tl.store(experts + token * TOP_K + place, chosen, place < TOP_K)
    tl.store(weights + token * TOP_K + place, chosen_weights, place < TOP_K)


def triton_route(x: torch.Tensor, weight: torch.Tensor, top_k: int, renormalizes: bool) -> Routes:
    (num_tokens, size), num_experts, device = x.shape, len(weight), x.device
    padded, num_inputs = max(16, triton.next_power_of_2(num_experts)), _MAX_INPUTS
    while (_TOKENS + padded) * num_inputs * x.itemsize > shared_memory(device):
        num_inputs //= 2
    num_parts = triton.cdiv(size, num_inputs)
    parts = torch.empty((num_parts, num_tokens, num_experts), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    _router_kernel[(triton.cdiv(num_tokens, _TOKENS), num_parts)](
        x, weight, parts, num_tokens, NUM_EXPERTS=num_experts, SIZE=size, TOKENS=_TOKENS, EXPERTS=padded,
        INPUTS=num_inputs, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    _top_experts_kernel[(num_tokens,)](
        parts, experts, weights, num_tokens, NUM_PARTS=num_parts, NUM_EXPERTS=num_experts, TOP_K=top_k, EXPERTS=padded,
        PLACES=triton.next_power_of_2(top_k), RENORMALIZES=renormalizes, num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return Routes(experts, weights)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    renormalizes: bool,
    use_kernels: bool = False,
    row_ops: RowOps = PLAIN,
) -> Routes:
    """The `top_k` largest of softmax(x @ weight.T). If a token's logits hold NaN or +∞, its weights are NaN, but its
    experts are still valid and different.

    Args:
        x: [num_tokens, hidden_size].
        weight: [num_experts, hidden_size].
        renormalizes: make a token's weights add up to 1.
        use_kernels: compute with the kernels, or else with `row_ops`.
    """
    if use_kernels:
        return triton_route(x, weight, top_k, renormalizes)
    return plain_route(x, weight, top_k, renormalizes, row_ops)
