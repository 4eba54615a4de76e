"""A gated DeltaNet layer's operation token by token in float64, and random steps of it."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from nanovllm.attention.metadata import query_tiles
from nanovllm.ops.delta_net import delta_net
from nanovllm.ops.layer_state import DeltaWeights, LayerState, StateRows

# (sequence, position of the first new token, number of new tokens); sequence i has entry i + 1.
Chunk = tuple[int, int, int]


@dataclass
class DeltaShape:
    num_key_heads: int = 1
    heads_per_key: int = 2
    key_dim: int = 8
    value_dim: int = 8
    kernel_size: int = 4

    @property
    def num_v_heads(self) -> int:
        return self.num_key_heads * self.heads_per_key

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_v_heads * self.value_dim


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def unit(x: np.ndarray) -> np.ndarray:
    return x / math.sqrt(x @ x + 1e-6)


def reference(
    qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, shape: DeltaShape
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of one sequence: (outputs [num_tokens, num_v_heads, value_dim], the state after each token
    [num_tokens, num_v_heads, key_dim, value_dim])."""
    numbers, gates = qkvz.double().cpu().numpy(), ba.double().cpu().numpy()
    kernel, a_log, dt_bias, norm = (tensor.double().cpu().numpy() for tensor in weights[:4])
    inputs, z = numbers[:, : shape.num_channels], numbers[:, shape.num_channels :]
    num_heads, key_dim, value_dim = shape.num_v_heads, shape.key_dim, shape.value_dim
    s = np.zeros((num_heads, key_dim, value_dim))
    outputs, states = [], []
    for position in range(len(inputs)):
        convolved = np.zeros(shape.num_channels)
        for back in range(min(shape.kernel_size, position + 1)):
            convolved += kernel[:, shape.kernel_size - 1 - back] * inputs[position - back]
        channels = silu(convolved)
        queries, keys, values = np.split(channels, np.cumsum([shape.num_key_heads * key_dim] * 2))
        for head in range(num_heads):
            key_head = head // shape.heads_per_key
            q = unit(queries[key_head * key_dim :][:key_dim]) / math.sqrt(key_dim)
            k = unit(keys[key_head * key_dim :][:key_dim])
            v = values[head * value_dim :][:value_dim]
            beta = sigmoid(gates[position, head])
            a = gates[position, num_heads + head] + dt_bias[head]
            s[head] *= math.exp(-math.exp(a_log[head]) * np.logaddexp(0, a))
            s[head] += beta * np.outer(k, v - k @ s[head])
            x = q @ s[head]
            x = x / math.sqrt(np.mean(x * x) + weights.eps) * norm
            outputs.append(x * silu(z[position, head * value_dim :][:value_dim]))
        states.append(s.copy())
    return np.array(outputs).reshape(-1, num_heads, value_dim), np.array(states)


@dataclass
class DeltaCase:
    """Sequences [length, …], their weights, and their states on the device, which `run` advances.

    outputs, states: of each sequence, by the reference, if asked for.
    """

    shape: DeltaShape
    qkvz: list[torch.Tensor]
    ba: list[torch.Tensor]
    weights: DeltaWeights
    state: LayerState
    outputs: list[np.ndarray]
    states: list[np.ndarray]

    def inputs(self, chunks: list[Chunk], num_padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(qkvz, ba) of a step; that of padding tokens is NaN."""
        of_step = []
        for whole in (self.qkvz, self.ba):
            padding = torch.full_like(whole[0][:1], math.nan).expand(num_padding, -1)
            of_step.append(torch.cat([*(whole[row][start : start + new] for row, start, new in chunks), padding]))
        return of_step[0], of_step[1]

    def run(
        self, chunks: list[Chunk], use_kernels: bool, num_padding: tuple[int, int, int] = (0, 0, 0)
    ) -> torch.Tensor:
        """One step. num_padding: rows, tokens and tiles."""
        rows = self.rows(chunks, num_padding)
        return delta_net(*self.inputs(chunks, num_padding[1]), self.weights, self.state, rows, use_kernels)

    def rows(self, chunks: list[Chunk], num_padding: tuple[int, int, int] = (0, 0, 0)) -> StateRows:
        num_rows, num_tiles, device = len(chunks) + num_padding[0], num_padding[2], self.state.inputs.device
        num_new = np.array([num_new for *_, num_new in chunks] + [0] * num_padding[0])
        lengths = np.array([start + num_new for _, start, num_new in chunks] + [0] * num_padding[0])
        num_decodes = next((row for row, new in enumerate(num_new) if new != 1), num_rows)
        tiles = query_tiles(num_new, lengths, num_decodes)
        tiles = np.concatenate([tiles, np.zeros((num_tiles, 4), np.int32)])
        # As in a step's rows, entries are a column.
        entries = torch.full((num_rows, 4), len(self.state.inputs) - 1, dtype=torch.int32)
        entries[: len(chunks), 0] = torch.tensor([row + 1 for row, *_ in chunks])
        return StateRows(
            entries=entries.to(device)[:, 0],
            cu_seqlens=torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32, device=device),
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            num_decodes=torch.tensor([num_decodes], dtype=torch.int32, device=device),
            max_num_decodes=num_rows if num_padding[0] else num_decodes,
            tiles=torch.tensor(tiles, device=device) if len(tiles) else None,
        )

    def expected(self, chunks: list[Chunk]) -> np.ndarray:
        """[num_tokens, num_v_heads × value_dim]"""
        return np.concatenate([self.outputs[row][start : start + new] for row, start, new in chunks]).reshape(
            sum(new for *_, new in chunks), -1
        )

    def assert_states(self, lengths: list[int], tolerance: float) -> None:
        """The states are those after so many tokens of each sequence; states of 0 tokens are not compared."""
        for row, length in enumerate(lengths):
            if length:
                found = self.state.recurrent[row + 1].mT.double().cpu().numpy()
                assert relative(found, self.states[row][length - 1]) <= tolerance, (row, length)
                for position in range(max(0, length - self.shape.kernel_size), length):
                    place = self.state.inputs[row + 1, position % self.shape.kernel_size]
                    assert torch.equal(place, self.qkvz[row][position, : self.shape.num_channels]), (row, position)

    def make_keys_equal(self) -> None:
        """Each token overwrites the last one's value, and nothing decays. The reference is computed again."""
        width = self.shape.num_key_heads * self.shape.key_dim
        self.weights.convolution[width : 2 * width, :-1] = 0
        self.weights.dt_bias.fill_(-20)
        for qkvz, ba in zip(self.qkvz, self.ba, strict=True):
            qkvz[:, width : 2 * width] = qkvz[:1, width : 2 * width]
            ba[:, : self.shape.num_v_heads] = 6
        for sequence in range(len(self.outputs)):
            exact = reference(self.qkvz[sequence], self.ba[sequence], self.weights, self.shape)
            self.outputs[sequence], self.states[sequence] = exact

    def on(self, device: torch.device) -> "DeltaCase":
        return replace(
            self,
            qkvz=[x.to(device) for x in self.qkvz],
            ba=[x.to(device) for x in self.ba],
            weights=DeltaWeights(*(x.to(device) for x in self.weights[:4]), self.weights.eps),
            state=LayerState(*(x.to(device) for x in self.state)),
        )


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def make_delta_case(
    lengths: list[int],
    shape: DeltaShape | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    has_reference: bool = True,
) -> DeltaCase:
    """Sequences of these lengths. All states are NaN, those of entry 0 and of the padding's entry too."""
    shape = shape or DeltaShape()
    generator = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    num_heads, width = shape.num_v_heads, shape.num_channels + shape.num_v_heads * shape.value_dim
    # Neighbouring inputs are alike, so that the keys of a tile are far from orthogonal.
    qkvz = [(randn(length, width) + 1.5 * randn(1, width)).to(dtype) for length in lengths]
    ba = [(2 * randn(length, 2 * num_heads)).to(dtype) for length in lengths]
    weights = DeltaWeights(
        (randn(shape.num_channels, shape.kernel_size) / shape.kernel_size**0.5).to(dtype),
        torch.rand(num_heads, generator=generator) * 4 - 3,
        randn(num_heads) - 3,
        (1 + 0.3 * randn(shape.value_dim)).to(dtype),
        1e-6,
    )
    num_states = len(lengths) + 2
    state = LayerState(
        torch.full((num_states, num_heads, shape.value_dim, shape.key_dim), math.nan),
        torch.full((num_states, shape.kernel_size, shape.num_channels), math.nan, dtype=dtype),
    )
    exact = [reference(*each, weights, shape) for each in zip(qkvz, ba, strict=True)] if has_reference else []
    return DeltaCase(shape, qkvz, ba, weights, state, [out for out, _ in exact], [states for _, states in exact])
