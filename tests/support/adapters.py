"""LoRA adapters with random factors, and models that they are merged into."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.layers.linear import Packable
from nanovllm.models.adapter import LowRank, adapter_of, check_fits, stored_adapter
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_weights
from nanovllm.models.read_config import load_model_config
from nanovllm.models.tensors import given_tensors
from nanovllm.ops.collectives import Parallel
from nanovllm.runner.model_runner import pack_weights
from support.model_factory import write_tensors
from support.thread_ranks import CPU

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model.model.layers"


def load_model(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    parallel: Parallel = Parallel(),  # noqa: B008 (frozen)
) -> CausalLM:
    """A rank's part of a model, packed as in an LLM."""
    config = load_model_config(directory)
    backend = TorchAttention(AttentionShape(1, 1, config.head_dim, dtype, CPU, scale=config.attention_scale))
    model = CausalLM(config, 64, backend, parallel, dtype, CPU)
    load_weights(model, directory)
    pack_weights(model)
    return model


def weights_of(model: CausalLM) -> Tensors:
    """Copies of all weights; packed ones are unpacked."""
    packed = {
        f"{name}.weight": module.packed.to_dense()
        for name, module in model.named_modules()
        if isinstance(module, Packable) and module.packed is not None
    }
    return {**{name: parameter.clone() for name, parameter in model.named_parameters()}, **packed}


def are_packed(model: CausalLM) -> list[bool]:
    return [module.packed is not None for module in model.modules() if isinstance(module, Packable)]


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


def random_tensors(layers: dict[str, tuple[int, int]], rank: int = 4, seed: int = 0) -> Tensors:
    """Factors by peft's names. layers: [output_size, input_size] of layers such as "0.self_attn.q_proj"."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer, (output_size, input_size) in layers.items():
        found[f"{PREFIX}.{layer}.lora_A.weight"] = torch.randn(rank, input_size, generator=generator) / 4
        found[f"{PREFIX}.{layer}.lora_B.weight"] = torch.randn(output_size, rank, generator=generator) / 4
    return found


def save_adapter(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """Writes the files of an adapter; returns the directory."""
    directory.mkdir(exist_ok=True)
    write_tensors(directory, tensors, "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def read_adapter(directory: Path) -> dict[str, LowRank]:
    """The changes in the files of a directory."""
    return adapter_of(*stored_adapter(directory), str(directory))


def fitting(model: CausalLM, config: dict[str, Any], tensors: Tensors) -> dict[str, LowRank]:
    return check_fits(adapter_of(config, given_tensors(tensors.items()), "it"), model, "it", config)


def save_peft_adapter(model: Any, directory: Path, seed: int = 0, **config: Any) -> Tensors:
    """Writes an adapter of a model of transformers with random factors, as peft writes it.

    Args:
        config: fields of LoraConfig.

    Returns:
        The state dict of the model with the adapter merged by peft; the model itself is not changed.
    """
    from peft import LoraConfig, get_peft_model  # slow to import

    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = get_peft_model(model, LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.25, generator=generator)
    wrapped.save_pretrained(directory)
    merged = wrapped.merge_and_unload()
    found = {name: tensor.clone() for name, tensor in merged.state_dict().items()}
    merged.load_state_dict(base)
    return found


def names_of(tensors: Iterable[str]) -> set[str]:
    """The layers' names in those of factors."""
    return {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
