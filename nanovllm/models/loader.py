"""Weights: streams a checkpoint's tensors one by one into the model, each exactly once."""

from pathlib import Path

import torch
from torch import nn

from nanovllm.layers.linear import Packable
from nanovllm.layers.shard import Shard
from nanovllm.models.decoder import CausalLM
from nanovllm.models.directory import checkpoint_files
from nanovllm.models.tensor_names import named_as_expected
from nanovllm.models.tensors import AnyTensor, Tensors, stored_tensors
from nanovllm.ops.quantize import E4M3, LARGEST, quantize_rows


def load_weights(model: CausalLM, directory: Path) -> None:
    """Fills `model` from the safetensors files in `directory`; each rank reads only its own slices.

    Raises:
        ValueError: a tensor is missing, unexpected, stored twice, misshapen or unreadable, or the index names a file
            outside the directory; the message names the tensor and the file.
    """
    expected = expected_tensors(model)
    pairs = [pair for path in checkpoint_files(directory) for pair in stored_tensors(path).items()]
    stored = named_as_expected(model, expected, pairs)
    if not stored and model.is_wrapped:
        raise ValueError(f"{directory} has no tensor of the text part")
    with torch.no_grad():
        for name, tensor in stored.items():
            for shard in expected.get(name, ()):
                _fill(tensor, shard)
    missing = [name for name in expected if name not in stored]
    if missing:
        names = ", ".join(missing[:5])
        number = "a tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
        is_tied = "lm_head.weight" in missing and "model.embed_tokens.weight" in stored
        hint = "; if the embedding is the LM head too, set tie_word_embeddings to true in config.json" * is_tied
        raise ValueError(f"{number} missing from {directory}: {names}{' …' * (len(missing) > 5)}{hint}")
    _check_tied(model, stored)


def check_update(model: CausalLM, tensors: Tensors) -> Tensors:
    """Checks that `update_weights` can copy these tensors. Changes nothing.

    Returns:
        The tensors by the names that `update_weights` takes: those of `expected_tensors`.

    Raises:
        ValueError: the model has no such tensor, or it has another shape or another kind of numbers; or a tensor is
            given twice; or a tied model's LM head differs from the embedding given with it. The message names the
            tensor.
    """
    expected = expected_tensors(model)
    tensors = named_as_expected(model, expected, tensors.items())
    for name, tensor in tensors.items():
        for shard in expected.get(name, ()):
            _check_shape(tensor, shard)
            _check_dtype(tensor.what, tensor.part(tuple((0, 0) for _ in shard.source)), shard)
    _check_tied(model, tensors)
    return tensors


def update_weights(model: CausalLM, tensors: Tensors) -> None:
    """Copies the tensors that `check_update` returns into the model's parameters, which keep their memory.

    For this it unpacks packed weights, one layer at a time, and packs them again. After an exception, some of the
    tensors' parameters have old values and some have new ones.
    """
    with torch.no_grad():
        for prefix, module in model.named_modules():
            touched = [name for name in expected_of(model, prefix, module) if name in tensors]
            if not touched:
                continue
            if isinstance(module, Packable):
                module.unpack()
            shards_of = expected_of(model, prefix, module)
            for name in touched:
                for shard in shards_of[name]:
                    _fill(tensors[name], shard)
            if isinstance(module, Packable):
                module.pack()
        if model.lm_head is not None and any(name in tensors for name in model.tied_weights.values()):
            model.lm_head.unpack()
            model.lm_head.pack()


def expected_tensors(model: CausalLM) -> dict[str, list[Shard]]:
    """Checkpoint tensor name -> the shards it fills; every parameter of the model is covered.

    For a packed weight, the shards' target has no values; see Packable.
    """
    expected: dict[str, list[Shard]] = {}
    for prefix, module in model.named_modules():
        expected.update(expected_of(model, prefix, module))
    return expected


def expected_of(model: CausalLM, prefix: str, module: nn.Module) -> dict[str, list[Shard]]:
    """`expected_tensors` of one module's own parameters; `prefix` is the module's name."""
    own_name = prefix.rpartition(".")[2]
    rule = getattr(module, "shards", None)
    if rule is None:
        return {}
    if own_name == "lm_head" and "lm_head.weight" in model.tied_weights:
        return {}
    expected: dict[str, list[Shard]] = {}
    parameter_names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(module, Packable) and module.weight is None:
        parameter_names.append("weight")
    for parameter_name in parameter_names:
        for key, shards in rule(parameter_name).items():
            expected[tensor_name(model, prefix, key, parameter_name)] = shards
    return expected


def tensor_name(model: CausalLM, prefix: str, key: str, parameter_name: str) -> str:
    """The checkpoint's name of a tensor.

    prefix: the name of the module that has the parameter; key: the key in Shards of the part that the tensor fills.
    """
    # In the checkpoint, the parts of a merged parameter have their own names beside it.
    parent = prefix.rpartition(".")[0]
    path = (f"{parent}.{key}" if parent else key) if key else prefix
    name = f"{path}.{parameter_name}"
    for ours, theirs in model.renames:
        name = name.replace(ours, theirs)
    return name


def fill_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fills the model with small random numbers, and the weights of norms with 1, for benchmarks without a
    checkpoint."""
    with torch.no_grad():
        generator = torch.Generator(next(model.parameters()).device).manual_seed(seed % 2**63)
        for name, parameter in model.named_parameters():
            if ".adapter_slots." in name:
                continue  # zeros change nothing
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(("weight_scale", "weight_scale_inv")):
                parameter.fill_(0.02 / 100)
            elif parameter.dtype == E4M3:
                for part in parameter.view(-1).split(2**24):  # this dtype has no normal_
                    numbers = torch.empty(part.shape, device=part.device).normal_(0, 100, generator=generator)
                    part.copy_(numbers.clamp_(-LARGEST, LARGEST))
            else:
                parameter.normal_(0, 0.02, generator=generator)


def _check_shape(tensor: AnyTensor, shard: Shard) -> None:
    shape = tensor.shape
    if shape != shard.shape:
        raise ValueError(f"{tensor.what} has shape {list(shape)}, the model needs {list(shard.shape)}")


def _check_dtype(what: str, tensor: torch.Tensor, shard: Shard) -> None:
    if shard.target.dtype == E4M3 and shard.scales is None:
        if tensor.dtype != E4M3:
            raise ValueError(f"{what} is {tensor.dtype}, but quantization_config in config.json says float8_e4m3fn")
    elif not tensor.is_floating_point() or tensor.itemsize < 2:
        hint = "; FP8 is read only for the decoder's linear layers that quantization_config in config.json covers"
        hint *= tensor.dtype == E4M3
        raise ValueError(f"{what} is {tensor.dtype}; only floating-point weights of 16 bits and more are read{hint}")


def _check_tied(model: CausalLM, tensors: Tensors) -> None:
    """Raises a ValueError if a tied model's LM head differs from the embedding that it shares."""
    for name, target in model.tied_weights.items():
        if name not in tensors:
            continue
        head, used = tensors[name].whole(), tensors[target].whole()
        is_alike = head.shape == used.shape and head.dtype == used.dtype
        if not is_alike or not torch.equal(_bits(head), _bits(used).to(head.device)):
            raise ValueError(
                f"{tensors[name].what} differs from {target}, but config.json says tie_word_embeddings; "
                "set it to false to use both"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _fill(tensor: AnyTensor, shard: Shard) -> None:
    """Copies the shard's part of a tensor into the parameter; every load and update ends here."""
    _check_shape(tensor, shard)
    part = tensor.part(shard.source)
    _check_dtype(tensor.what, part, shard)
    if shard.scales is not None:
        quantized = quantize_rows(part.to(shard.target.device))
        shard.target.copy_(quantized.values)
        shard.scales.copy_(quantized.scales)
        return
    if part.device != shard.target.device:
        part = part.to(shard.target.dtype)  # if it were copied as it is, the copy would need more memory
    shard.target.copy_(part)
    if shard.offset:
        shard.target.add_(shard.offset)
