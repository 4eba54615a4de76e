"""A mixture of experts, written plainly in float64."""

import torch

from nanovllm.ops.route import Routes


def exact_mlp(x, routes: Routes, gate_up, down, activation: str) -> torch.Tensor:
    """Computes the MLP token by token and expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    act = (
        torch.nn.functional.silu if activation == "silu" else lambda g: torch.nn.functional.gelu(g, approximate="tanh")
    )
    for token, (experts, weights) in enumerate(zip(*routes, strict=True)):
        for expert, weight in zip(experts.tolist(), weights.double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (act(gate) * up))
    return out
