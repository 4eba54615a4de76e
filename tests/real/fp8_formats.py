"""Measures what other ways to round to eight bits would change in a trained model: the tables of docs/quantization.md.

    python tests/real/fp8_formats.py DIRECTORY [--tokens 4000]

DIRECTORY is what make_smollm2.py makes. This runs on a CPU, in float32. Weights, inputs of linear layers, keys and
values are rounded and become float32 again. Each line has the mean divergence from the unchanged model, over parts of
1,000 tokens, and the growth of this text's perplexity.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.against_transformers import teacher_forced_logits  # noqa: E402
from support.real_text import text_ids  # noqa: E402

from nanovllm import LLM  # noqa: E402
from nanovllm.layers.linear import LinearBase  # noqa: E402
from nanovllm.ops.layer_cache import rounded_keys, rounded_values  # noqa: E402
from nanovllm.ops.quantize import E4M3, LARGEST  # noqa: E402

Round = Callable[[torch.Tensor], torch.Tensor]
PART = 1000


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def by_row(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """A scale per row."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST * factor
    return (x / scales).to(E4M3).float() * scales


def by_tensor(x: torch.Tensor) -> torch.Tensor:
    return by_row(x.reshape(1, -1)).reshape(x.shape)


def by_blocks(x: torch.Tensor, rows: int, columns: int = 128) -> torch.Tensor:
    height, width = x.shape
    padded = F.pad(x, (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2)
    rounded = by_row(blocks.flatten(2)).unflatten(2, (rows, columns)).transpose(1, 2)
    return rounded.flatten(2).flatten(0, 1)[:height, :width]


def by_best_scale(x: torch.Tensor, number: int) -> torch.Tensor:
    """Rounds by the one of `number` scales per row that has the smallest sum of squared errors."""
    best, least = x, torch.full_like(x[..., :1], torch.inf)
    for index in range(number):
        rounded = by_row(x, 1 + index / number)
        error = (rounded - x).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, rounded, best), torch.minimum(error, least)
    return best


def by_integers(x: torch.Tensor) -> torch.Tensor:
    """Integers of 8 bits with a scale per row."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scales).round() * scales


def peak_of_rows(x: torch.Tensor) -> float:
    """The median of largest absolute number / root mean square."""
    return float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).median())


class Model:
    """A model whose numbers are rounded on the way.

    losses, divergences: after `measure`.
    """

    def __init__(self, llm: LLM, num_tokens: int):
        self.llm, self.runner = llm, llm.engine.runner
        self.ids = text_ids(llm, num_tokens)
        self.linears = [module for module in self.runner.program.model.modules() if isinstance(module, LinearBase)]
        for linear in self.linears:
            linear.unpack()
        self.weights = [linear.get_parameter("weight").clone() for linear in self.linears]
        self.logits = self._logits()

    def _logits(self) -> torch.Tensor:
        """Log-probabilities, [num_tokens, vocab_size]"""
        parts = [self.ids[first : first + PART] for first in range(0, len(self.ids), PART)]
        return torch.cat([teacher_forced_logits(self.llm, part, [len(part)]).log_softmax(-1) for part in parts])

    def print_peaks(self) -> None:
        """Prints the medians of a row's largest number divided by its root mean square."""
        peaks = {"inputs": [], "weights": [peak_of_rows(weight) for weight in self.weights]}
        for linear in self.linears:
            multiply = type(linear)._multiply
            linear._multiply = lambda x, bias, adapters, multiply=multiply, linear=linear: (
                peaks["inputs"].append(peak_of_rows(x)) or multiply(linear, x, bias, adapters)
            )
        self._logits()
        for linear in self.linears:
            del linear._multiply
        for name, found in peaks.items():
            print(f"largest number of a row of {name}: {min(found):.1f} to {max(found):.1f}, by layer", flush=True)

    def measure(self, name: str, of_weights: Round, of_inputs: Round, of_keys: Round, of_values: Round, last: int = 0):
        """last: the number of last linear layers that stay as they are."""
        num_rounded = len(self.linears) - last
        for linear, weight in list(zip(self.linears, self.weights, strict=True))[:num_rounded]:
            linear.get_parameter("weight").copy_(of_weights(weight))
            multiply = type(linear)._multiply
            linear._multiply = lambda x, bias, adapters, multiply=multiply, linear=linear: multiply(
                linear, of_inputs(x), bias, adapters
            )
        backend = self.runner.program.backend
        store, attend = backend.store_kvcache, backend.attend
        backend.store_kvcache = lambda k, v, *rest: store(of_keys(k), of_values(v), *rest)
        backend.attend = lambda q, k, v, *rest: attend(q, of_keys(k), of_values(v), *rest)
        found = self._logits()
        del backend.store_kvcache, backend.attend
        for linear, weight in zip(self.linears, self.weights, strict=True):
            linear.get_parameter("weight").copy_(weight)
            vars(linear).pop("_multiply", None)
        divergence = (self.logits.exp() * (self.logits - found)).sum(-1).mean()
        following = torch.tensor([*self.ids[1:], 0])[:, None]
        is_counted = torch.arange(len(self.ids)) % PART < PART - 1  # the part has a next token
        worse = (self.logits - found).gather(1, following)[is_counted, 0].mean()
        print(
            f"{name:60} divergence {float(divergence):.4f}, perplexity {100 * (float(worse.exp()) - 1):+.2f}%",
            flush=True,
        )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--tokens", type=int, default=4000)
    arguments = parser.parse_args()
    options = {"device": "cpu", "dtype": "float32", "max_model_len": PART, "num_kvcache_blocks": 80}
    with LLM(arguments.directory, attention_backend="sdpa", enable_prefix_caching=False, **options) as llm:
        model = Model(llm, arguments.tokens)
        model.print_peaks()
        plain = same, same
        model.measure("nothing", same, same, *plain)
        model.measure("weights by channel (ours)", by_row, same, *plain)
        model.measure("inputs by token (ours)", same, by_row, *plain)
        model.measure("both (ours)", by_row, by_row, *plain)
        model.measure("weights by tensor, inputs by token", by_tensor, by_row, *plain)
        model.measure("weights by tensor, inputs by tensor", by_tensor, by_tensor, *plain)
        blocks = partial(by_blocks, rows=128), partial(by_blocks, rows=1)
        model.measure("blocks of 128 × 128, and of 1 × 128", *blocks, *plain)
        model.measure("weights by the best of 32 scales", partial(by_best_scale, number=32), by_row, *plain)
        model.measure("ours, but the last layer as it is", by_row, by_row, *plain, last=4)
        model.measure("weights as integers", by_integers, same, *plain)
        model.measure("inputs as integers", same, by_integers, *plain)
        model.measure("weights and inputs as integers", by_integers, by_integers, *plain)
        model.measure("keys as integers, values in e4m3 (ours)", same, same, rounded_keys, rounded_values)
        model.measure("keys as integers (ours)", same, same, rounded_keys, same)
        model.measure("values in e4m3 (ours)", same, same, same, rounded_values)
        model.measure("keys in e4m3", same, same, rounded_values, same)
        model.measure("keys and values in e4m3", same, same, rounded_values, rounded_values)
        best = partial(by_best_scale, number=16)
        model.measure("keys in e4m3 by the best of 16 scales, values in e4m3", same, same, best, rounded_values)
        model.measure("keys and values as integers", same, same, by_integers, by_integers)
        model.measure("all (ours)", by_row, by_row, rounded_keys, rounded_values)


if __name__ == "__main__":
    main()
