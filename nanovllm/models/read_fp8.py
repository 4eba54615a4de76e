"""Reads quantization_config of config.json: the FP8 layouts of checkpoints."""

import re
from dataclasses import replace
from typing import Any

from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.models.families import Family
from nanovllm.models.json_fields import MAX_SIZE, read_list, shown


def read_fp8(raw: dict[str, Any], family: Family, prefixes: tuple[str, ...] = ("model.",)) -> Fp8Config | None:
    """The FP8 layout that quantization_config describes; None if there is no quantization_config.

    Two layouts are read: quant_method "fp8" with a scale per block, as Qwen and DeepSeek publish it, and
    compressed-tensors with a scale per channel or per tensor and inputs that are quantized per row.

    Args:
        prefixes: see Fp8Config.

    Raises:
        ValueError: another layout; the message says which property is not supported.
    """
    given = raw.get("quantization_config")
    if not given:
        return None
    problem = "is neither fp8 nor compressed-tensors"
    if isinstance(given, dict):
        method = given.get("quant_method")
        if method == "fp8":
            config = _block_fp8(given)
        elif method == "compressed-tensors":
            config = _compressed_fp8(given)
        else:
            config = f"quant_method {shown(method)} {problem}"
        if isinstance(config, Fp8Config):
            return replace(config, renames=family.renames, prefixes=prefixes)
        problem = config
    raise ValueError(
        f"quantization_config={shown(given)} in config.json is not supported: {problem}; take weights that are not "
        'quantized (quantization="fp8" makes them FP8 while they load), or a checkpoint in an FP8 layout that '
        "docs/quantization.md lists"
    )


def _block_fp8(given: dict[str, Any]) -> Fp8Config | str:
    """The config, or a text that says what is not supported."""
    block = given.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(n) is int and 0 < n <= MAX_SIZE for n in block)
        or block[1] % 32
    ):
        return (
            "weight_block_size must be two numbers such as [128, 128], the second a multiple of 32, not "
            f"{shown(block)}; quant_method fp8 with one scale per tensor is not supported"
        )
    if (scheme := given.get("activation_scheme", "dynamic")) != "dynamic":
        return f"activation_scheme must be dynamic, not {shown(scheme)}"
    if (kind := given.get("fmt", "e4m3")) != "e4m3":
        return f"fmt must be e4m3, not {shown(kind)}"
    # As in transformers, a layer is ignored if the name occurs anywhere in the layer's name, between dots.
    ignored = tuple(rf"(^|\.){re.escape(name)}(\.|$)" for name in _read_names(given, "modules_to_not_convert"))
    return Fp8Config("weight_scale_inv", (block[0], block[1]), ignored=ignored)


def _compressed_fp8(given: dict[str, Any]) -> Fp8Config | str:
    """The config, or a text that says what is not supported."""
    if (kind := given.get("format")) not in ("float-quantized", None):
        return f"format {shown(kind)} is not float-quantized"
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := next(iter(groups.values())), dict):
        return "config_groups must hold one group"
    if given.get("transform_config"):
        return "transform_config is set"
    sparsity = given.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        return "sparsity_config is set"
    if (kind := group.get("format")) not in ("float-quantized", None):
        return f"a group's format {shown(kind)} is not float-quantized"
    if group.get("output_activations") is not None:
        return "output_activations are set"
    if given.get("kv_cache_scheme") is not None:
        return 'kv_cache_scheme asks for stored scales of keys and values; kv_cache_dtype="fp8" computes its own'
    if (targets := group.get("targets")) != ["Linear"]:
        return f'targets must be ["Linear"], not {shown(targets)}'
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        return "a group must have weights and input_activations"
    for name, part in (("weights", weights), ("input_activations", inputs)):
        if (part.get("num_bits"), part.get("type")) != (8, "float") or part.get("symmetric") is not True:
            return f"{name} must be symmetric floats of 8 bits"
    if (strategy := weights.get("strategy")) not in ("channel", "tensor"):
        return f"the weights' strategy must be channel or tensor, not {shown(strategy)}"
    if inputs.get("strategy") != "token" or inputs.get("dynamic") is not True:
        return "input_activations must be dynamic with the strategy token"
    ignored = tuple(
        name.removeprefix("re:") if name.startswith("re:") else rf"^{re.escape(name)}$"
        for name in _read_names(given, "ignore")
    )
    for pattern in ignored:
        try:
            re.compile(pattern)
        except re.error:
            return f"ignore holds {shown(pattern)}, which is not a regular expression"
    return Fp8Config("weight_scale", is_per_tensor=strategy == "tensor", ignored=ignored)


def _read_names(raw: dict[str, Any], name: str) -> list[str]:
    names = read_list(raw, name)
    if not all(isinstance(each, str) for each in names):
        raise ValueError(f"{name} in config.json must be a list of layers' names, not {shown(names)}")
    return names
