"""Weights: safetensors streamed tensor by tensor into the model, every one exactly once.

Nothing is unpickled, and no name in an index may lead out of the model's directory.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.layers.linear import Shard
from nanovllm.models.config import read_json
from nanovllm.models.decoder import CausalLM

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


def load_weights(model: CausalLM, directory: Path) -> None:
    """Fills `model` from the safetensors files in `directory`; each rank reads only its own slices.

    Raises:
        ValueError: a tensor is missing, unexpected, there twice, misshapen or unreadable, or the index names a
            file outside the directory; the message names the tensor and the file.
    """
    expected = expected_tensors(model)
    seen: dict[str, Path] = {}
    with ExitStack() as stack, torch.no_grad():
        tied: list[tuple[str, str, object, Path]] = []
        files = {}
        for path in checkpoint_files(directory):
            files[path] = stack.enter_context(_open(path))
            for name in files[path].keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if name in seen:
                    raise ValueError(f"tensor {name} is in {seen[name].name} and again in {path.name}")
                seen[name] = path
                if name in expected:
                    for shard in expected[name]:
                        _load(name, shard, files[path], path)
                elif name.endswith(".rotary_emb.inv_freq"):
                    continue  # old Llama checkpoints store what follows from the config
                elif name in model.tied_weights:
                    tied.append((name, model.tied_weights[name], files[path], path))
                else:
                    raise ValueError(f"unexpected tensor {name} in {path}; the model has no such parameter")
        missing = [name for name in expected if name not in seen]
        if missing:
            names = ", ".join(missing[:5])
            number = "a tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
            raise ValueError(f"{number} missing from {directory}: {names}{' …' * (len(missing) > 5)}")
        for name, target, file, path in tied:
            stored, used = _read(name, file, path), _read(target, files[seen[target]], seen[target])
            is_alike = stored.shape == used.shape and stored.dtype == used.dtype
            if not is_alike or not torch.equal(stored.view(torch.uint8), used.view(torch.uint8)):
                raise ValueError(
                    f"{name} in {path} differs from {target}, but config.json says tie_word_embeddings; "
                    "set it to false to use both"
                )


def expected_tensors(model: CausalLM) -> dict[str, list[Shard]]:
    """Checkpoint tensor name -> the shards it fills; every parameter of the model is covered."""
    expected: dict[str, list[Shard]] = {}
    for prefix, module in model.named_modules():
        if not hasattr(module, "shards"):
            continue
        parent, _, own_name = prefix.rpartition(".")
        if own_name == "lm_head" and "lm_head.weight" in model.tied_weights:
            continue
        for parameter_name, _ in module.named_parameters(recurse=False):
            for key, shards in module.shards(parameter_name).items():
                # A fused parameter's parts stand beside it in the checkpoint, under names of their own.
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


def _load(name: str, shard: Shard, file, path: Path) -> None:
    try:
        whole = file.get_slice(name)
        shape = tuple(whole.get_shape())
        if shape != shard.shape:
            raise ValueError(f"tensor {name} in {path} has shape {list(shape)}, the model needs {list(shard.shape)}")
        tensor = whole[tuple(slice(start, start + length) for start, length in shard.source)]
    except (SafetensorError, RuntimeError) as error:  # a type of number that PyTorch lacks, say
        raise ValueError(f"tensor {name} in {path} cannot be read: {error}") from None
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise ValueError(
            f"tensor {name} in {path} is {tensor.dtype}; only floating-point weights of 16 bits and more are read"
        )
    shard.target.copy_(tensor)
    if shard.offset:
        shard.target.add_(shard.offset)


def _read(name: str, file, path: Path) -> torch.Tensor:
    try:
        return file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"tensor {name} in {path} cannot be read: {error}") from None
