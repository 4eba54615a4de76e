"""Weights with a merged LoRA adapter are those that peft merges."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import (
    Tensors,
    are_packed,
    assert_same_bits,
    fitting,
    load_model,
    names_of,
    random_tensors,
    read_adapter,
    save_peft_adapter,
    weights_of,
)
from support.family_factory import FAMILIES, WRAPPED, save_family_model
from support.long import some
from support.model_factory import read_tensors

from nanovllm import LLM, SamplingParams
from nanovllm.lora import LoRARequest
from nanovllm.models.adapter import check_fits
from nanovllm.models.loader import check_update, update_weights
from nanovllm.models.merge import MergedWeights
from nanovllm.models.tensors import given_tensors

pytest.importorskip("peft")

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
FILE = "adapter_model.safetensors"
TARGETS: dict[str, Any] = {
    **{name: [name] for name in (*ATTENTION, *MLP)}, "attention": ATTENTION, "mlp": MLP, "all-linear": "all-linear",
    "expression": r".*layers\.0\..*(q|v)_proj",
}  # fmt: skip
BESIDE_EXPERTS = r".*(_attn|shared_expert)\.\w+_proj\w*|.*\.shared_expert_gate"
KINDS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1},
    "rank 8": {"r": 8, "lora_alpha": 16},
    "rank 256": {"r": 256, "lora_alpha": 3},
    "rslora": {"r": 4, "lora_alpha": 5, "use_rslora": True},
    "patterns": {
        "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2, r"layers\.0\.mlp\.(up|gate)_proj": 7, "down_proj": 3},
        "alpha_pattern": {"model.layers.0.self_attn.v_proj": 1, "(up|down)_proj": 64, "layers.0": 1000},
    },
    "patterns and rslora": {"r": 4, "use_rslora": True, "rank_pattern": {"o_proj": 9}, "alpha_pattern": {"o_proj": 2}},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, tuple[Path, Any]]:
    """Family -> a checkpoint's directory and the model of transformers; filled by `of_family`."""
    return {"": (tmp_path_factory.mktemp("families"), None)}


def of_family(saved: dict[str, tuple[Path, Any]], family: str) -> tuple[Path, Any]:
    if family not in saved:
        directory = saved[""][0] / family
        directory.mkdir()
        options = {**FAMILIES, **WRAPPED}[family][2](random.Random(f"{family} adapters"))
        if family.startswith(("qwen3_5", "qwen3_next")):
            options |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        if family == "qwen3":
            options |= {"num_hidden_layers": 2, "layer_types": None}
        saved[family] = directory, save_family_model(directory, family, options)
    return saved[family]


def with_weights(directory: Path, tensors: Tensors) -> Tensors:
    """Our weights of a checkpoint with these tensors in place of its own."""
    model = load_model(directory)
    update_weights(model, check_update(model, given_tensors(tensors.items())))
    return weights_of(model)


def assert_merged_as_by_peft(family_model: tuple[Path, Any], directory: Path, **config: Any) -> set[str]:
    """Returns the layers that the adapter changes."""
    base, theirs = family_model
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    by_peft = save_peft_adapter(theirs, directory, **config)
    expected = with_weights(base, {name: it for name, it in by_peft.items() if not torch.equal(it, weights[name])})
    model = load_model(base)
    before, packed = weights_of(model), are_packed(model)
    merged = MergedWeights(model)
    merged.merge(check_fits(read_adapter(directory), model, "it", {}))
    found = weights_of(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-6, atol=1e-5, msg=lambda it, name=name: f"{name} {it}"
        )
    assert any((found[name] - before[name]).abs().max() > 0.05 for name in found)
    merged.merge(None)
    assert_same_bits(weights_of(model), before)
    assert are_packed(model) == packed
    return names_of(read_tensors(directory, FILE))


@pytest.mark.parametrize("targets", TARGETS)
def test_every_set_of_layers_merges_as_by_peft(saved, tmp_path, targets):
    layers = assert_merged_as_by_peft(
        of_family(saved, "qwen3"), tmp_path, r=4, lora_alpha=8, target_modules=TARGETS[targets]
    )
    assert len(layers) == {"attention": 8, "mlp": 6, "all-linear": 14}.get(targets, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_and_scale_merges_as_by_peft(saved, tmp_path, kind):
    assert_merged_as_by_peft(of_family(saved, "qwen3"), tmp_path, target_modules="all-linear", **KINDS[kind])


@pytest.mark.parametrize(
    "family", some([*FAMILIES, *WRAPPED], "phi3", "qwen3_5", "qwen3_next", "qwen2_moe", "gemma3_wrapped", "granite4")
)
def test_every_family_merges_as_by_peft(saved, tmp_path, family):
    """Checkpoints name and merge their layers in many ways. A vision tower's layers are left out. Those of experts are
    parameters of transformers' modules, which is another kind of adapter."""
    has_experts = "moe" in family or family in ("mixtral", "qwen3_next")
    targets = BESIDE_EXPERTS if has_experts else "all-linear"
    if family == "qwen3_next":
        targets = targets.replace("|shared_expert)", ")")  # peft would add the experts
    layers = assert_merged_as_by_peft(of_family(saved, family), tmp_path, r=3, target_modules=targets)
    assert any("vision" in layer or "visual" in layer for layer in layers) == (family in WRAPPED and not has_experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_sum_is_rounded_once(saved, tmp_path, dtype):
    base, theirs = of_family(saved, "llama")
    save_peft_adapter(theirs, tmp_path, r=8, lora_alpha=3, target_modules="all-linear")
    factors = read_tensors(tmp_path, FILE)
    expected = {name: tensor.to(dtype) for name, tensor in theirs.state_dict().items()}
    for layer in names_of(factors):
        a, b = (factors[f"base_model.model.{layer}.lora_{factor}.weight"].double() for factor in "AB")
        weight = expected[f"{layer}.weight"]
        expected[f"{layer}.weight"] = (weight.double() + 3 / 8 * (b @ a)).float().to(dtype)
    model, reference = load_model(base, dtype), load_model(base, dtype)
    update_weights(reference, check_update(reference, given_tensors(expected.items())))
    MergedWeights(model).merge(check_fits(read_adapter(tmp_path), model, "it", {}))
    assert_same_bits(weights_of(model), weights_of(reference))


def test_experts_with_matrices_of_their_own_are_merged(saved):
    """transformers 4 has them, and its adapters. The formula is the reference, since peft wants transformers 5."""
    base, _ = of_family(saved, "qwen3_moe")
    model = load_model(base)
    weights = read_tensors(base)
    layers = {
        name.removeprefix("model.layers.").removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in weights.items()
        if ".experts." in name or name.endswith(("mlp.gate.weight", "k_proj.weight"))
    }
    assert any(".experts.0.up_proj" in layer for layer in layers) and any(".mlp.gate" in layer for layer in layers)
    tensors = random_tensors(layers, rank=3)
    for layer in layers:
        a, b = (tensors[f"base_model.model.model.layers.{layer}.lora_{factor}.weight"] for factor in "AB")
        weights[f"model.layers.{layer}.weight"] += 5 / 3 * (b @ a)
    MergedWeights(model).merge(fitting(model, {"r": 3, "lora_alpha": 5}, tensors))
    expected = with_weights(base, weights)
    for name, tensor in weights_of(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-5)


def test_an_llm_generates_the_tokens_of_pefts_model(saved, tmp_path):
    """In turn: the base, an adapter from files, the base, another one from memory, the first again."""
    base, theirs = of_family(saved, "qwen3")
    options: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 40, "kvcache_block_size": 4}
    params, prompts = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), [[1, 2, 3], [7] * 9]
    weights = {0: {name: tensor.clone() for name, tensor in theirs.state_dict().items()}}
    for number in (1, 2):
        weights[number] = save_peft_adapter(theirs, tmp_path / str(number), number, r=8, target_modules="all-linear")
    expected = {}
    for number in (1, 2, 0):
        theirs.load_state_dict(weights[number])
        outputs = [theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False) for prompt in prompts]
        expected[number] = [tokens[0, len(prompt) :].tolist() for prompt, tokens in zip(prompts, outputs, strict=True)]
    with LLM(base, **options) as llm:
        assert len({str(tokens) for tokens in expected.values()}) == 3
        config = {"r": 8, "target_modules": {"q_proj", "k_proj", "v_proj", "o_proj", *MLP}}
        requests = {
            0: None,
            1: LoRARequest("files", 1, tmp_path / "1"),
            2: LoRARequest("memory", 2, tensors=read_tensors(tmp_path / "2", FILE), config=config),
        }
        for number in (0, 1, 0, 2, 1, 1):
            llm.engine.runner.set_adapter(0, requests[number])
            llm.reset_prefix_cache()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.token_ids for output in outputs] == expected[number]
