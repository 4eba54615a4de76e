"""The gated delta rule (Yang, Kautz, Hatamizadeh, 2024), with the short convolution before it and the gated norm after
it. A gated DeltaNet layer computes this between its projections.

Each value head of a sequence has a state S, a matrix [value_dim, key_dim]. A token has a query q, a key k and a value
v, which come from a causal convolution over the inputs of the last few tokens; q and k are scaled to length 1. With
the decay α = exp(g) and the step β, the token does

    S ← α S,  S ← S + β (v − S k) ⊗ k,  output = S q / sqrt(key_dim).

Neighbouring value heads share a query and a key head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.ops.delta_decodes import triton_delta_decodes
from nanovllm.ops.delta_prompts import TILE, triton_delta_prompts
from nanovllm.ops.layer_state import DeltaWeights, LayerState, StateRows


class _Heads(NamedTuple):
    """The inputs of the delta rule: queries and keys [..., num_v_heads, key_dim], values [..., num_v_heads, value_dim],
    log of the decay and step [..., num_v_heads]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def plain_delta_net(
    qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState, rows: StateRows
) -> torch.Tensor:
    num_channels, dtype = state.inputs.shape[2], state.recurrent.dtype
    out = torch.empty((len(qkvz), *state.recurrent.shape[1:3]), dtype=dtype, device=qkvz.device)
    num_decodes = int(rows.num_decodes)
    if num_decodes:
        out[:num_decodes] = _plain_decodes(qkvz[:num_decodes, :num_channels], ba[:num_decodes], weights, state, rows)
    bounds = rows.cu_seqlens.tolist()
    for row in range(num_decodes, len(rows.entries)):
        start, end = bounds[row : row + 2]
        if start < end:
            entry, position = int(rows.entries[row]), int(rows.context_lens[row]) - (end - start)
            new = qkvz[start:end, :num_channels], ba[start:end]
            out[start:end] = _plain_prompt(*new, weights, state, entry, position)
    gates = qkvz[:, num_channels:].view(out.shape).to(dtype)
    normed = F.rms_norm(out, out.shape[-1:], weights.norm.to(dtype), weights.eps)
    return (normed * F.silu(gates)).to(qkvz.dtype).flatten(1)


def _plain_decodes(
    inputs: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState, rows: StateRows
) -> torch.Tensor:
    """One token of each of the first rows. inputs: [num_decodes, num_channels]"""
    entries, kernel_size = rows.entries[: len(inputs)].long(), state.inputs.shape[1]
    position = rows.context_lens[: len(inputs)].long() - 1
    before = position[:, None] - torch.arange(kernel_size - 1, 0, -1, device=inputs.device)
    earlier = state.inputs[entries[:, None], before % kernel_size].masked_fill_((before < 0)[..., None], 0)
    window = torch.cat((earlier, inputs[:, None]), 1)
    state.inputs[entries, position % kernel_size] = inputs
    convolved = (window.to(state.recurrent.dtype) * weights.convolution.t()).sum(1)
    q, k, v, log_decay, beta = _heads(F.silu(convolved), ba, weights, state)
    s = state.recurrent[entries].masked_fill_((position == 0)[:, None, None, None], 0)
    s *= log_decay.exp()[..., None, None]
    change = beta[..., None] * (v - torch.einsum("nhvk,nhk->nhv", s, k))
    s += change[..., None] * k[..., None, :]
    state.recurrent[entries] = s
    return torch.einsum("nhvk,nhk->nhv", s, q)


def _plain_prompt(
    inputs: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState, entry: int, position: int
) -> torch.Tensor:
    """New tokens of one sequence, from `position` on. inputs: [num_tokens, num_channels]"""
    kernel_size, device = state.inputs.shape[1], inputs.device
    places = (torch.arange(kernel_size, device=device) + position) % kernel_size
    earlier = state.inputs[entry, places[1:]]  # of the positions before, the oldest first
    if position < kernel_size - 1:
        earlier[: kernel_size - 1 - position] = 0
    window = torch.cat((earlier, inputs))
    state.inputs[entry, (places + len(inputs)) % kernel_size] = window[-kernel_size:]
    kernels = weights.convolution.to(state.recurrent.dtype)[:, None]
    convolved = F.conv1d(window.t().to(kernels.dtype), kernels, groups=len(kernels)).t()
    heads = _heads(F.silu(convolved), ba, weights, state)
    s = torch.zeros_like(state.recurrent[entry]) if position == 0 else state.recurrent[entry]
    out = []
    for tile in zip(*(values.split(TILE) for values in heads), strict=True):
        of_tile, s = _plain_tile(_Heads(*(values.transpose(0, 1) for values in tile)), s)
        out.append(of_tile.transpose(0, 1))
    state.recurrent[entry] = s
    return torch.cat(out)


def _plain_tile(heads: _Heads, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunked form: (outputs [num_v_heads, num_tokens, value_dim], new states) of tokens that begin with states s.

    heads: with the dimension of the tokens after that of the heads. The changes β (v − S k) of the tokens depend on
    each other; they solve a triangular system.
    """
    q, k, v, log_decay, beta = heads
    since_start = log_decay.cumsum(1)
    between = (since_start[:, :, None] - since_start[:, None]).exp().tril()
    decay = since_start.exp()[..., None]
    system = beta[..., None] * (k @ k.mT) * between
    missing = beta[..., None] * (v - decay * (k @ s.mT))
    changes = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
    out = decay * (q @ s.mT) + (q @ k.mT * between) @ changes
    until_end = (since_start[:, -1:] - since_start).exp()[..., None]
    return out, decay[:, -1:] * s + changes.mT @ (until_end * k)


def _heads(convolved: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState) -> _Heads:
    """convolved: [num_tokens, num_channels] after silu; ba: [num_tokens, 2 × num_v_heads]"""
    _, num_v_heads, value_dim, key_dim = state.recurrent.shape
    num_key_heads = state.num_key_heads
    width = num_key_heads * key_dim
    q, k, v = convolved.split((width, width, num_v_heads * value_dim), -1)
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(num_v_heads // num_key_heads, -2)
        for x in (q.unflatten(-1, (num_key_heads, key_dim)), k.unflatten(-1, (num_key_heads, key_dim)))
    )
    b, a = ba.to(convolved.dtype).chunk(2, -1)
    log_decay = -weights.a_log.exp() * F.softplus(a + weights.dt_bias)
    return _Heads(q * key_dim**-0.5, k, v.unflatten(-1, (num_v_heads, value_dim)), log_decay, b.sigmoid())


def triton_delta_net(
    qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState, rows: StateRows
) -> torch.Tensor:
    out = qkvz.new_empty((len(qkvz), qkvz.shape[1] - state.inputs.shape[2]))
    triton_delta_decodes(qkvz, ba, weights, state, rows, out)
    triton_delta_prompts(qkvz, ba, weights, state, rows, out)
    return out


def delta_net(
    qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, state: LayerState, rows: StateRows,
    use_kernels: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The outputs of a step's tokens: [num_tokens, num_v_heads × value_dim]. The states of its rows advance.

    Args:
        qkvz: [num_tokens, num_channels + num_v_heads × value_dim], the convolution's inputs of queries, keys and
            values, then the gates of the norm. The results have its dtype.
        ba: [num_tokens, 2 × num_v_heads], β before the sigmoid, then the input of the decay.
        use_kernels: compute with the kernels.
    """
    return (triton_delta_net if use_kernels else plain_delta_net)(qkvz, ba, weights, state, rows)
