"""A model's directory: where it is, and which of its files hold the weights. No torch."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

from nanovllm.demo import MODEL_DIRECTORY
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
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return path
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"{option} {model[:100]!r}… cannot be a directory: {error.strerror}") from None
    if model == BUNDLED:
        return MODEL_DIRECTORY
    if path.is_absolute() or path.exists() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ValueError(f"{option} {model!r} is not a directory")
    from huggingface_hub import snapshot_download  # slow to import, and needed only for hub names

    patterns = [*_TEXT_FILES, "*.safetensors"] if with_weights else _TEXT_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises dozens of types; all mean that there is no model
        said = re.sub(r" ?\(Request ID: .*?\)", "", " ".join(str(error).split()))
        reason = f"{type(error).__name__}: {shorten(said, 150)}"
        raise ValueError(
            f"{option} {model!r} is not a directory, and the hub does not give it ({reason}); check the name, the "
            "network, the disk and, for a gated model, your login, or give the directory of a downloaded model, or "
            f'"{BUNDLED}", nanovllm\'s own small model'
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
