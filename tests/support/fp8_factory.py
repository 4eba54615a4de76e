"""Checkpoints in FP8 of each layout, made from plain ones, and an engine's completions with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from nanovllm import LLM, SamplingParams
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from nanovllm.ops.quantize import (
    E4M3,
    LARGEST,
    Quantized,
    ScaledProduct,
    quantize_rows,
)
from support.model_factory import read_tensors, write_tensors

PROMPTS = [list(range(1, length + 1)) for length in (1, 2, 29, 5, 23)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
# A completion's tokens and their log-probabilities.
Completion = tuple[list[int], list[float]]


def open_llm(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), **{"device": "cpu", "dtype": "float32", "max_model_len": 64, **options})


def completed(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Completion]:
    """The greedy completion of each prompt."""
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, raise_on_error=True)
    of_each = [output.outputs[0] for output in outputs]
    return [
        (one.token_ids, [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)])
        for one in of_each
    ]


def completions(directory: Path, **options: Any) -> list[Completion]:
    with open_llm(directory, **options) as llm:
        return completed(llm)


def assert_alike(found: list[Completion], expected: list[Completion], tolerance: float = 1e-3) -> None:
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected_logprobs), rtol=0, atol=tolerance)


Tensors = dict[str, torch.Tensor]


class Layout(NamedTuple):
    """How a checkpoint holds weights in FP8.

    config: its quantization_config.
    quantize: a weight -> its values in e4m3, and its scales as stored.
    scale_name: the suffix that turns a weight's name into its scales' name.
    block: rows and columns that share a scale; 0 is all.
    """

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    scale_name: str = "_scale"
    block: tuple[int, int] = (1, 0)

    def stored(self, name: str, weight: torch.Tensor) -> Tensors:
        values, scales = self.quantize(weight)
        return {name: values, f"{name}{self.scale_name}": scales}

    def whole(self, name: str, weight: torch.Tensor) -> Tensors:
        """The numbers that the checkpoint holds for a weight, dequantized."""
        values, scales = self.quantize(weight)
        rows, columns = (size or length for size, length in zip(self.block, weight.shape, strict=True))
        scales = scales.reshape(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        of_rows = scales.repeat_interleave(rows, 0)[: weight.shape[0]]
        return {name: values.float() * of_rows.repeat_interleave(columns, 1)[:, : weight.shape[1]]}


def compressed(strategy: str = "channel", **changes: Any) -> dict[str, Any]:
    """The layout that llm-compressor writes for FP8_DYNAMIC."""
    part = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**part, "strategy": strategy, "dynamic": False},
        "input_activations": {**part, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*in_proj_(a|b|ba)$"], "kv_cache_scheme": None,
    } | changes  # fmt: skip


def blockwise(rows: int = 128, columns: int = 128, **changes: Any) -> dict[str, Any]:
    """The layout that Qwen and DeepSeek publish."""
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns],
        "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba"],
    } | changes  # fmt: skip


def by_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantize_rows(weight)
    return values, scales[:, None]


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantize_rows(weight.reshape(1, -1))
    return values.view(weight.shape), scales


def by_block(rows: int, columns: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_columns = weight.shape
        padded = F.pad(weight, (0, -num_columns % columns, 0, -num_rows % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2)
        scales = blocks.abs().amax((2, 3)) / LARGEST
        values = (blocks / scales[:, :, None, None]).to(E4M3).transpose(1, 2).reshape(padded.shape)
        return values[:num_rows, :num_columns].contiguous(), scales

    return quantize


def block_layout(rows: int, columns: int) -> Layout:
    return Layout(blockwise(rows, columns), by_block(rows, columns), "_scale_inv", (rows, columns))


CHANNEL, TENSOR = Layout(compressed(), by_channel), Layout(compressed("tensor"), by_tensor, block=(0, 0))
LAYOUTS = {"channel": CHANNEL, "tensor": TENSOR, "block": block_layout(128, 128), "small block": block_layout(8, 32)}


def is_linear(name: str) -> bool:
    """Whether FP8 changes this tensor: it changes all weights that layers multiply with, except routers."""
    ends = ("proj", ".w1", ".w2", ".w3", "in_proj_qkv", "in_proj_z", "in_proj_qkvz")
    return ".layers." in name and name.endswith(tuple(f"{end}.weight" for end in ends))


def changed_copy(directory: Path, target: Path, change: Callable[[str, torch.Tensor], Tensors], **fields: Any) -> Path:
    """A copy of a checkpoint with linear layers' weights replaced by `change`, and these fields in config.json."""
    shutil.copytree(directory, target)
    tensors: Tensors = {}
    for name, tensor in read_tensors(directory).items():
        tensors |= change(name, tensor) if is_linear(name) else {name: tensor}
    write_tensors(target, tensors)
    raw = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(raw))
    return target


def quantized_copy(directory: Path, target: Path, layout: Layout = CHANNEL, **changes: Any) -> Path:
    """A copy of the checkpoint in FP8; changes: those of its quantization_config."""
    return changed_copy(directory, target, layout.stored, quantization_config=layout.config | changes)


def round_inputs(monkeypatch: pytest.MonkeyPatch, layout: Layout, num_ranks: int = 1) -> None:
    """Makes plain linear layers, but not experts and a DeltaNet's small projections, round each row of their inputs as
    the layout's do on this many ranks. Their sums are in float64, because a last bit sometimes decides what a later
    layer's input is rounded to.
    """

    def rounded(self: LinearBase, x: torch.Tensor, bias: torch.Tensor | None, adapters: None) -> torch.Tensor:
        columns = layout.block[1] or x.shape[1] // (num_ranks if isinstance(self, RowParallelLinear) else 1)
        is_small = isinstance(self, MergedColumnParallelLinear) and self.rows[0].key in ("in_proj_b", "in_proj_ba")
        whole = x if is_small else torch.cat([quantize_rows(part).whole() for part in x.split(columns, 1)], 1)
        weight = self.packed.to_dense() if self.weight is None else self.weight
        product = F.linear(whole.double(), weight.double()).float()
        return product if bias is None else product + bias

    monkeypatch.setattr(LinearBase, "_multiply", rounded)


# Half a unit in the last place of e4m3, relative to a number and, for the smallest ones, to the row's scale.
HALF_ULP, HALF_MIN = 2**-4, 2**-10


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_product(num_rows: int, size: int) -> ScaledProduct:
    scales = (random_tensor(number, seed=seed).abs() * 0.01 for seed, number in ((1, num_rows), (2, size)))
    return ScaledProduct(random_tensor(num_rows, size) * 1e4, *scales)


def assert_rounded(found: Any, exact: torch.Tensor) -> None:
    """Asserts that each number of `found` is within half a unit of e4m3, plus a little for the scale, of that of
    `exact`.
    """
    assert isinstance(found, Quantized) and found.values.dtype == E4M3
    limit = HALF_ULP * exact.abs() + HALF_MIN * found.scales[:, None]
    assert ((found.whole() - exact).abs() <= 1.001 * limit).all()
    # The peak must be the largest number of e4m3, so that the whole range is used.
    assert (found.values.float().abs().amax(1) == LARGEST).all()
