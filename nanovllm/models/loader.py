"""Weights: tensors of safetensors files, or of memory, streamed one by one into the model, every one exactly once.

Nothing is unpickled, and no name in an index may lead out of the model's directory.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.layers.linear import Packable
from nanovllm.layers.shard import Shard
from nanovllm.models.decoder import CausalLM
from nanovllm.models.json_fields import read_json
from nanovllm.ops.quantize import E4M3, LARGEST, quantize_rows

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # config, tokenizer, chat template


def find_model(model: str, revision: str | None, with_weights: bool = True, option: str = "model") -> Path:
    """The directory of a model: `model` itself, or a hub name's files, fetched if they are not there yet.

    with_weights: also fetch the weights. option: the option that holds `model`, for errors.

    Raises:
        ValueError: it is neither a directory nor a name that the hub knows.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or path.exists() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ValueError(f"{option} {model!r} is not a directory")
    from huggingface_hub import snapshot_download  # slow to import, and most models are directories

    patterns = [*_TEXT_FILES, "*.safetensors"] if with_weights else _TEXT_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client has dozens of kinds; all mean that there is no model
        raise ValueError(
            f"{option} {model!r} is not a directory, and the hub does not give it: {type(error).__name__}: {error}"
        ) from error


class Stored:
    """A tensor of a safetensors file; a part of it is read when it is asked for.

    Args:
        what: its name in errors.
        file: from safe_open.
    """

    def __init__(self, what: str, name: str, file: Any):
        self.what, self._name, self._file = what, name, file

    @property
    def shape(self) -> tuple[int, ...]:
        try:
            return tuple(self._file.get_slice(self._name).get_shape())
        except (SafetensorError, RuntimeError) as error:  # a type of number that PyTorch lacks, say
            raise self._unreadable(error) from None

    def part(self, source: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """What a Shard's `source` says of it."""
        try:
            return self._file.get_slice(self._name)[_slices(source)]
        except (SafetensorError, RuntimeError) as error:
            raise self._unreadable(error) from None

    def whole(self) -> torch.Tensor:
        try:
            return self._file.get_tensor(self._name)
        except SafetensorError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> ValueError:
        return ValueError(f"{self.what} cannot be read: {error}")


class Given:
    """A tensor in memory, on any device; otherwise like Stored."""

    def __init__(self, what: str, tensor: torch.Tensor):
        self.what, self._tensor = what, tensor.detach()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def part(self, source: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return self._tensor[_slices(source)]

    def whole(self) -> torch.Tensor:
        return self._tensor


def _slices(source: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in source)


Tensors = Mapping[str, Stored] | Mapping[str, Given]  # by their names in a checkpoint


def given_tensors(weights: Iterable[Any]) -> dict[str, Given]:
    """The tensors of (name, tensor) pairs, whose values can be copied.

    Raises:
        TypeError: something other than such a pair.
        ValueError: a name given twice, or a tensor that is not dense.
    """
    found: dict[str, Given] = {}
    for pair in weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"weights must be pairs of a name and a tensor, not {type(pair).__name__} {pair!r:.100}")
        name, tensor = pair
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise TypeError(
                f"tensor {name} is a {type(tensor).__name__}; give a plain torch.Tensor, such as a DTensor's "
                "full_tensor()"
            )
        if name in found:
            raise ValueError(f"tensor {name} is given twice")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"tensor {name} is on {tensor.device} in layout {tensor.layout}; give one with all values")
        found[name] = Given(f"tensor {name}", tensor)
    return found


def load_weights(model: CausalLM, directory: Path) -> None:
    """Fills `model` from the safetensors files in `directory`; each rank reads only its own slices.

    Raises:
        ValueError: a tensor is missing, unexpected, there twice, misshapen or unreadable, or the index names a
            file outside the directory; the message names the tensor and the file.
    """
    expected = expected_tensors(model)
    seen: dict[str, Path] = {}
    stored: dict[str, Stored] = {}
    with torch.no_grad():
        for path in checkpoint_files(directory):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if name in seen:
                    raise ValueError(f"tensor {name} is in {seen[name].name} and again in {path.name}")
                seen[name], stored[name] = path, Stored(f"tensor {name} in {path}", name, file)
                _check_name(model, expected, name, stored[name])
                for shard in expected.get(name, ()):
                    _fill(stored[name], shard)
        missing = [name for name in expected if name not in seen]
        if missing:
            names = ", ".join(missing[:5])
            number = "a tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
            raise ValueError(f"{number} missing from {directory}: {names}{' …' * (len(missing) > 5)}")
        _check_tied(model, stored)


def check_update(model: CausalLM, tensors: Tensors) -> None:
    """Refuses what `update_weights` could not copy. Changes nothing.

    Raises:
        ValueError: the model has no such tensor, or one of another shape, or numbers of another kind; or a tied model's
            lm_head.weight is not the embedding given with it. The message names the tensor.
    """
    expected = expected_tensors(model)
    for name, tensor in tensors.items():
        _check_name(model, expected, name, tensor)
        for shard in expected.get(name, ()):
            _check_shape(tensor, shard)
            _check_dtype(tensor.what, tensor.part(tuple((0, 0) for _ in shard.source)), shard)
    _check_tied(model, tensors)


def update_weights(model: CausalLM, tensors: Tensors) -> None:
    """Copies tensors that `check_update` accepts into the model's parameters, which stay where they are.

    Packed weights are unpacked for it, one layer at a time, and packed again. An exception leaves some of the tensors'
    parameters with old values and some with new ones.
    """
    with torch.no_grad():
        for prefix, module in model.named_modules():
            touched = [name for name in _expected_of(model, prefix, module) if name in tensors]
            if not touched:
                continue
            if isinstance(module, Packable):
                module.unpack()
            shards_of = _expected_of(model, prefix, module)
            for name in touched:
                for shard in shards_of[name]:
                    _fill(tensors[name], shard)
            if isinstance(module, Packable):
                module.pack()
        if any(name in tensors for name in model.tied_weights.values()):
            model.lm_head.unpack()
            model.lm_head.pack()


def expected_tensors(model: CausalLM) -> dict[str, list[Shard]]:
    """Checkpoint tensor name -> the shards it fills; every parameter of the model is covered.

    The target of a packed weight's shards has no values; see Packable.
    """
    expected: dict[str, list[Shard]] = {}
    for prefix, module in model.named_modules():
        expected.update(_expected_of(model, prefix, module))
    return expected


def _expected_of(model: CausalLM, prefix: str, module: nn.Module) -> dict[str, list[Shard]]:
    """`expected_tensors` of one module's own parameters; `prefix` is the module's name."""
    parent, _, own_name = prefix.rpartition(".")
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
            # A merged parameter's parts stand beside it in the checkpoint, under names of their own.
            path = (f"{parent}.{key}" if parent else key) if key else prefix
            name = f"{path}.{parameter_name}"
            for ours, theirs in model.renames:
                name = name.replace(ours, theirs)
            expected[name] = shards
    return expected


def fill_dummy_weights(model: nn.Module, seed: int) -> None:
    """Small random numbers, and 1 for the weights of norms: for benchmarks without a checkpoint."""
    with torch.no_grad():
        generator = torch.Generator(next(model.parameters()).device).manual_seed(seed % 2**63)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(("weight_scale", "weight_scale_inv")):
                parameter.fill_(0.02 / 100)
            elif parameter.dtype == E4M3:
                for part in parameter.view(-1).split(2**24):  # there is no normal_ for it
                    numbers = torch.empty(part.shape, device=part.device).normal_(0, 100, generator=generator)
                    part.copy_(numbers.clamp_(-LARGEST, LARGEST))
            else:
                parameter.normal_(0, 0.02, generator=generator)


def checkpoint_files(directory: Path) -> Iterator[Path]:
    """The safetensors files of a checkpoint: those that its index names; without an index, or if the index leaves out a
    model.safetensors that exists, that file alone; without either, all there are."""
    index_path, whole = directory / INDEX_FILE, directory / "model.safetensors"
    if not index_path.exists():
        files = [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{directory} holds no .safetensors file{_hint_of_others(directory)}")
        yield from files
        return
    try:
        names = sorted(set(read_json(index_path)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index_path} cannot be read: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index_path} names the file {name!r}, which is not a .safetensors file beside it")
    if whole.exists() and whole.name not in names:
        # As transformers does: the index is left over from an older checkpoint.
        logger.warning("%s does not name %s, which is read instead", index_path, whole.name)
        yield whole
        return
    present = {path.name for path in directory.iterdir()}
    for name in names:
        if name not in present:
            raise ValueError(f"{index_path} names {name[:100]}, which is missing")
        yield directory / name


def _hint_of_others(directory: Path) -> str:
    """What to do with the files that a directory holds in place of safetensors."""
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind))
    if pickled:
        return f", only {', '.join(pickled[:3])}; save them anew with transformers' save_pretrained"
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    return f", only {gguf[0]}; GGUF is not supported, get the model's safetensors" if gguf else ""


def _open(path: Path):
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")  # a pipe would be waited for
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            is_pointer = file.read(24).startswith(b"version https://git-lfs")
        hint = "it is a pointer of Git LFS; run git lfs pull" if is_pointer else str(error)
        raise ValueError(f"{path} is truncated or not a safetensors file: {hint}") from None


def _check_name(model: CausalLM, expected: Mapping[str, Any], name: str, tensor: Stored | Given) -> None:
    """Raises a ValueError for a tensor that has no business in this model's checkpoint."""
    # Old Llama checkpoints store frequencies, which follow from the config.
    if not (name in expected or name in model.tied_weights or name.endswith(".rotary_emb.inv_freq")):
        raise ValueError(f"unexpected {tensor.what}; the model has no such parameter")


def _check_shape(tensor: Stored | Given, shard: Shard) -> None:
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
    """Raises a ValueError if a tied model's LM head comes with other numbers than the embedding that it is."""
    for name, target in model.tied_weights.items():
        if name not in tensors:
            continue
        if target not in tensors:
            raise ValueError(
                f"{tensors[name].what} comes without {target}, which it must equal; give both, or leave it out"
            )
        head, used = tensors[name].whole(), tensors[target].whole()
        is_alike = head.shape == used.shape and head.dtype == used.dtype
        if not is_alike or not torch.equal(_bits(head), _bits(used).to(head.device)):
            raise ValueError(
                f"{tensors[name].what} differs from {target}, but config.json says tie_word_embeddings; "
                "set it to false to use both"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _fill(tensor: Stored | Given, shard: Shard) -> None:
    """The one way of a tensor into a parameter."""
    _check_shape(tensor, shard)
    part = tensor.part(shard.source)
    _check_dtype(tensor.what, part, shard)
    if shard.scales is not None:
        quantized = quantize_rows(part.to(shard.target.device))
        shard.target.copy_(quantized.values)
        shard.scales.copy_(quantized.scales)
        return
    if part.device != shard.target.device:
        part = part.to(shard.target.dtype)  # copied as it is, it would need room beside the parameter
    shard.target.copy_(part)
    if shard.offset:
        shard.target.add_(shard.offset)
