"""A model's directory: where it is, and which of its files hold the weights. No torch."""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.lora import ADAPTER_FILES, LoRARequest
from nanovllm.models.json_fields import read_json

logger = logging.getLogger(__name__)

BUNDLED = "bundled"  # the name of the model in nanovllm/demo
INDEX_FILE = "model.safetensors.index.json"
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # config, tokenizer, chat template


def find_model(model: str, revision: str | None, with_weights: bool = True, option: str = "model") -> Path:
    """The directory of a model: `model` itself, that of the bundled model, or that of a hub name's files, which are
    fetched if they are missing. A local directory named "bundled" precedes the bundled model.

    Args:
        with_weights: also fetch the weights.
        option: the option that holds `model`, for errors.

    Raises:
        ValueError: it is neither a directory nor a name that the hub knows.
    """
    local = _local_directory(model, option)
    if local is not None:
        return local
    if model == BUNDLED:
        return MODEL_DIRECTORY
    patterns = [*_TEXT_FILES, "*.safetensors"] if with_weights else _TEXT_FILES
    advice = f'the directory of a downloaded model, or "{BUNDLED}", nanovllm\'s own small model'
    return _fetched(model, revision, patterns, option, advice)


def find_adapter(request: LoRARequest) -> Path:
    """The directory of a LoRA adapter: its `lora_path`, or that of a hub name's files, which are fetched if they are
    missing.

    Raises:
        ValueError: `lora_path` is neither a directory nor a name that the hub knows.
    """
    option, adapter = f"lora_path of adapter {request.lora_name!r}:", os.fspath(request.lora_path)
    local = _local_directory(adapter, option)
    advice = "the directory of a downloaded adapter"
    return local if local is not None else _fetched(adapter, None, [*ADAPTER_FILES], option, advice)


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """The config and the tensors of a LoRA adapter, as peft's save_pretrained writes them.

    Raises:
        ValueError: a file is missing.
    """
    config, tensors = (directory / name for name in ADAPTER_FILES)
    try:
        if not config.is_file():
            raise ValueError(f"{directory} has no {config.name}; give the directory that peft's save_pretrained wrote")
        if not tensors.is_file():
            hint = "; it has adapter_model.bin, which is not read: load it with peft and save it as safetensors"
            hint *= (directory / "adapter_model.bin").exists()
            raise ValueError(f"{directory} has no {tensors.name}{hint}")
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error.strerror}") from None
    return config, tensors


def _local_directory(name: str, option: str) -> Path | None:
    """The directory of this name, or None; a ValueError if no path can have this name."""
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return path
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"{option} {name[:100]!r}… cannot be a directory: {error.strerror}") from None
    return None


def _fetched(name: str, revision: str | None, patterns: list[str], option: str, advice: str) -> Path:
    """The directory of a hub name's files. `advice` says what the user may give instead."""
    path = Path(name).expanduser()
    if path.is_absolute() or path.exists() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"{option} {name!r} is not a directory")
    from huggingface_hub import snapshot_download  # slow to import, and needed only for hub names

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises dozens of types; all mean that there is no model
        said = re.sub(r" ?\(Request ID: .*?\)", "", " ".join(str(error).split()))
        reason = f"{type(error).__name__}: {shorten(said, 150)}"
        raise ValueError(
            f"{option} {name!r} is not a directory, and the hub does not give it ({reason}); check the name, the "
            f"network, the disk and, for a gated model, your login, or give {advice}"
        ) from None


def checkpoint_files(directory: Path) -> Iterator[Path]:
    """The safetensors files of a checkpoint.

    These are the files that its index names. Without an index, or if the index leaves out an existing
    model.safetensors, it is that file alone. Without both, it is all .safetensors files.

    Raises:
        ValueError: there is no such file, or the index cannot be read, or it names a missing file or a file outside
            the directory.
    """
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


def stores_lm_head(directory: Path) -> bool:
    """Whether a checkpoint has an LM head of its own; False without readable weights."""
    from safetensors import SafetensorError, safe_open

    try:
        for path in filter(Path.is_file, checkpoint_files(directory)):
            with safe_open(path, "np") as file:
                if any(name.endswith("lm_head.weight") for name in file.keys()):  # noqa: SIM118 (not a mapping)
                    return True
    except (ValueError, OSError, SafetensorError):
        pass  # a config alone, or files that the loader will refuse
    return False


def _hint_of_others(directory: Path) -> str:
    """Advice for a directory that holds other formats than safetensors."""
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind))
    if pickled:
        return f", only {', '.join(pickled[:3])}; save them again with transformers' save_pretrained"
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    return f", only {gguf[0]}; GGUF is not supported, get the model's safetensors" if gguf else ""
