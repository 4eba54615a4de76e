"""Weights in FP8: each kernel against its plain twin, and checkpoints of each layout against what they stand for."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_factory import FAMILIES, save_family_model
from model_factory import one_thread, save_model  # noqa: F401
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.layers.linear import LinearBase
from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.norm import add_rms_norm, rms_norm
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.quantize import E4M3, LARGEST, Quantized, ScaledProduct, quantize_rows, scaled_product

PROMPTS = [list(range(1, length + 1)) for length in (1, 2, 29, 5, 23)]
# Half a unit in the last place of e4m3, relative to a number and, for the smallest ones, to the row's scale.
HALF_ULP, HALF_LEAST = 2**-4, 2**-10


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_product(num_rows: int, size: int) -> ScaledProduct:
    scales = (random_tensor(number, seed=seed).abs() * 0.01 for seed, number in ((1, num_rows), (2, size)))
    return ScaledProduct(random_tensor(num_rows, size) * 1e4, *scales)


def assert_rounded(found: Any, exact: torch.Tensor) -> None:
    """Each number of `found` is at most half a unit of e4m3 from that of `exact`, and a hair for the scale."""
    assert isinstance(found, Quantized) and found.values.dtype == E4M3
    limit = HALF_ULP * exact.abs() + HALF_LEAST * found.scales[:, None]
    assert ((found.whole() - exact).abs() <= 1.001 * limit).all()
    # The peak is the largest number of e4m3, or the range is not used.
    assert (found.values.float().abs().amax(1) == LARGEST).all()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("size", [1, 7, 96, 1000])
def test_a_row_is_rounded_to_e4m3_by_its_own_peak(size, fused):
    x = random_tensor(5, size) * torch.tensor([1e-9, 1e-3, 1, 1e3, 1e9])[:, None]
    assert_rounded(quantize_rows(x, fused), x)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
def test_a_row_of_zeros_is_a_row_of_zeros(fused):
    """Its peak is no divisor."""
    x = torch.zeros(3, 40)
    x[1] = 1
    assert torch.equal(quantize_rows(x, fused).whole(), x)


def test_what_is_no_number_stays_in_its_row():
    x = torch.ones(4, 8)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    weight = quantize_rows(random_tensor(6, 8))
    product = scaled_product(quantize_rows(x), *weight, torch.ones(()), torch.float32).whole()
    assert product[1:3].isnan().all() and product[[0, 3]].isfinite().all()


@pytest.mark.parametrize(("size", "num_rows"), [(96, 5), (33, 1), (1025, 2)])
def test_norms_read_and_write_fp8(size, num_rows):
    x, residual, weight = random_tensor(num_rows, size), random_tensor(num_rows, size, seed=1), torch.rand(size) + 0.5
    assert_rounded(rms_norm(x, weight, 1e-6, True, True), rms_norm(x, weight, 1e-6))
    product = random_product(num_rows, size)
    expected, expected_total = add_rms_norm(product.whole(), residual, weight, 1e-6)
    found, total = add_rms_norm(product, residual, weight, 1e-6, True, True)
    assert_rounded(found, expected)
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(add_rms_norm(product, residual, weight, 1e-6, True)[0], expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [1, 80, 4096, 5000])
def test_the_gate_reads_and_writes_fp8(size, activation):
    """A long row is computed in several pieces, whose largest number is that of the row."""
    product = random_product(3, 2 * size)
    assert_rounded(act_and_mul(product, activation, fused=True), act_and_mul(product.whole(), activation))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (40, 24)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_keys_and_values_are_read_in_fp8(head_dim, rotary_dim, has_norm):
    product = random_product(5, 8 * head_dim)
    weight = torch.rand(6, head_dim) + 0.5 if has_norm else None
    cos, sin = random_tensor(5, 1, head_dim, seed=3), random_tensor(5, 1, head_dim, seed=4)
    results = []
    for qkv in (product, product.whole()):
        k_cache, v_cache = torch.zeros(2, 4, 2, head_dim), torch.zeros(2, 4, 2, head_dim)
        out = qk_norm_rotate_store(
            qkv, weight, 1e-6, cos, sin, rotary_dim, LayerCache(k_cache, v_cache), torch.tensor([3, 0, 7, -1, 5])
        )
        results.append((out, k_cache, v_cache))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_product_is_that_of_the_rounded_numbers():
    x, weight = quantize_rows(random_tensor(9, 48)), quantize_rows(random_tensor(20, 48, seed=1))
    found = scaled_product(x, *weight, torch.ones(()), torch.float32)
    torch.testing.assert_close(found.whole(), x.whole() @ weight.whole().T, rtol=1e-5, atol=1e-5)


# Engines


def completions(directory: Path, **options: Any) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log-probabilities) of each prompt, greedy."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    with LLM(str(directory), device="cpu", dtype="float32", max_model_len=64, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, raise_on_error=True)
    of_each = [output.outputs[0] for output in outputs]
    return [
        (one.token_ids, [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)])
        for one in of_each
    ]


def assert_alike(found, expected, tolerance: float = 1e-3) -> None:
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected_logprobs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_give_the_tokens_of_the_plain_engine_in_fp8(tmp_path, family):
    save_family_model(tmp_path, family, FAMILIES[family][2](random.Random(family)), seed=1)
    fused = completions(tmp_path, quantization="fp8", attention_backend="triton", kvcache_block_size=16)
    assert_alike(fused, completions(tmp_path, quantization="fp8", attention_backend="torch"))


def quantized_copy(directory: Path, target: Path, config: dict[str, Any], quantize, skips=lambda name: False) -> None:
    """A checkpoint whose linear layers are in FP8.

    quantize: the weight's name and its values -> what the checkpoint has in place of it.
    """
    shutil.copytree(directory, target)
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        is_linear = ".layers." in name and name.endswith("_proj.weight") and not skips(name)
        tensors |= quantize(name, tensor) if is_linear else {name: tensor}
    save_file(tensors, target / "model.safetensors")
    config_file = target / "config.json"
    raw = json.loads(config_file.read_text()) | {"quantization_config": config}
    config_file.write_text(json.dumps(raw))


def compressed(strategy: str = "channel", **changes: Any) -> dict[str, Any]:
    """What llm-compressor writes for FP8_DYNAMIC."""
    part = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**part, "strategy": strategy, "dynamic": False},
        "input_activations": {**part, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None,
    } | changes  # fmt: skip


def by_channel(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values, scales = quantize_rows(weight)
    return {name: values, f"{name}_scale": scales[:, None]}


def by_tensor(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values, scales = quantize_rows(weight.reshape(1, -1))
    return {name: values.view(weight.shape), f"{name}_scale": scales}


BLOCK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def by_block(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    num_rows, num_columns = weight.shape
    padded = F.pad(weight, (0, -num_columns % 128, 0, -num_rows % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2)
    scales = blocks.abs().amax((2, 3)) / LARGEST
    values = (blocks / scales[:, :, None, None]).to(E4M3).transpose(1, 2).reshape(padded.shape)
    return {name: values[:num_rows, :num_columns].contiguous(), f"{name}_scale_inv": scales}


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "model"
    directory.mkdir()
    sizes = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}  # 192: the last block is cut off
    save_model(directory, seed=5, **sizes)
    return directory


def test_weights_that_come_in_fp8_are_those_that_we_make(plain_model, tmp_path):
    quantized_copy(plain_model, tmp_path / "fp8", compressed(), by_channel)
    assert completions(tmp_path / "fp8") == completions(plain_model, quantization="fp8")
    assert completions(tmp_path / "fp8", quantization="fp8") == completions(tmp_path / "fp8")


def rounded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Each row's numbers, `columns` at a time, as they are after rounding to e4m3 by their peak."""
    return torch.cat([quantize_rows(part).whole() for part in x.split(columns, 1)], 1)


@pytest.mark.parametrize("layout", ["tensor", "block"])
def test_a_checkpoint_in_fp8_completes_as_the_model_that_it_stands_for(plain_model, tmp_path, monkeypatch, layout):
    """A model with the same weights in float32, the inputs of whose linear layers are rounded as FP8 rounds them."""
    config, quantize = {"tensor": (compressed("tensor"), by_tensor), "block": (BLOCK, by_block)}[layout]
    quantized_copy(plain_model, tmp_path / "fp8", config, quantize)
    shutil.copytree(plain_model, tmp_path / "whole")

    def whole(name: str, weight: torch.Tensor) -> torch.Tensor:
        values, scales = quantize(name, weight).values()
        if layout == "block":
            scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
        return values.float() * scales

    tensors = load_file(plain_model / "model.safetensors")
    tensors = {n: whole(n, t) if ".layers." in n and n.endswith("_proj.weight") else t for n, t in tensors.items()}
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    found, unrounded = completions(tmp_path / "fp8"), completions(tmp_path / "whole")
    multiply, columns = LinearBase._multiply, 128 if layout == "block" else 10**9
    monkeypatch.setattr(LinearBase, "_multiply", lambda self, x, bias: multiply(self, rounded(x, columns), bias))
    # Sums of another order change a number in its last bits, and now and then the number that it is rounded to.
    assert_alike(found, completions(tmp_path / "whole"), tolerance=0.1)
    assert found != unrounded


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        (compressed(ignore=["lm_head", "model.layers.1.self_attn.o_proj"]), "layers.1.self_attn.o_proj"),
        (compressed(ignore=["re:.*mlp.*"]), ".mlp."),
    ],
)
def test_ignored_layers_stay_as_they_are(plain_model, tmp_path, config, ignored):
    quantized_copy(plain_model, tmp_path / "some", config, by_channel, skips=lambda name: ignored in name)
    some = completions(tmp_path / "some")
    assert some != completions(plain_model) and some != completions(plain_model, quantization="fp8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' is neither"),
        ({**BLOCK, "weight_block_size": None}, "weight_block_size must be two numbers"),
        ({**BLOCK, "activation_scheme": "static"}, "activation_scheme must be dynamic"),
        (compressed(format="pack-quantized"), "format 'pack-quantized'"),
        (compressed("group"), "strategy must be channel or tensor"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(ignore=["re:("]), "no regular expression"),
        ("fp8", "neither"),
    ],
)
def test_other_quantizations_are_named(plain_model, tmp_path, config, message):
    quantized_copy(plain_model, tmp_path / "other", config, by_channel)
    with pytest.raises(ValueError, match=message):
        completions(tmp_path / "other")


def test_what_a_checkpoint_in_fp8_lacks_is_named(plain_model, tmp_path):
    o_proj = "model.layers.0.self_attn.o_proj.weight"

    def without_scale(name, weight):
        found = by_channel(name, weight)
        return {name: found[name]} if name == o_proj else found

    def with_short_scale(name, weight):
        found = by_channel(name, weight)
        return found | {f"{name}_scale": found[f"{name}_scale"][1:]} if name == o_proj else found

    def not_in_fp8(name, weight):
        return by_channel(name, weight) | ({name: weight} if name == o_proj else {})

    for case, (quantize, message) in enumerate(
        [
            (without_scale, f"a tensor is missing .*{o_proj}_scale"),
            (with_short_scale, rf"{o_proj}_scale in .* has shape \[191, 1\], the model needs \[192, 1\]"),
            (not_in_fp8, f"{o_proj} in .* is torch.float32, but quantization_config"),
        ]
    ):
        quantized_copy(plain_model, tmp_path / str(case), compressed(), quantize)
        with pytest.raises(ValueError, match=message):
            completions(tmp_path / str(case))


def test_options_that_cannot_be_are_named(plain_model):
    with pytest.raises(ValueError, match="quantization must be one of fp8, not 'int4'"):
        LLM(str(plain_model), quantization="int4")
    with pytest.raises(ValueError, match='needs dtype="bfloat16" or "float32"'):
        LLM(str(plain_model), quantization="fp8", dtype="float16", device="cpu")
