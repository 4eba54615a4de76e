"""Loads the tokenizer in a model's directory, without transformers' auto class where possible.

Importing the auto class and the config of a model takes as long as importing torch.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanovllm.models.json_fields import read_json

_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json"}
# For these types of models, the auto class takes the class that tokenizer_config.json names. The name is without
# "Fast", and "" means no type. For other types it may take another class, which depends on transformers' version.
_TYPES = {
    "PreTrainedTokenizer": ("", "gemma3_text", "llama", "mistral", "mistral3", "mixtral", "phi3", "qwen3", "qwen3_moe"),
    "Qwen2Tokenizer": ("qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"),
    "GemmaTokenizer": ("gemma3", "gemma3_text"),
}


def load_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer of the files in `directory`; None if there are none.

    It is the one that `AutoTokenizer` loads. For a tekken.json alone it has mistral-common's ids and chat template.
    If it has no chat template, it gets that of chat_template.json, where multimodal checkpoints may have it.

    Raises:
        ValueError: it cannot be loaded.
    """
    files = {path.name for path in directory.iterdir()}
    is_tekken = "tekken.json" in files and files.isdisjoint(_FILES)
    if not is_tekken and files.isdisjoint({*_FILES, "tokenizer_config.json"}):
        return None
    if is_tekken and find_spec("mistral_common") is None:
        hint = 'pip install mistral-common, or nanovllm with its extra "mistral"'
        raise ValueError(f"the tokenizer in {directory} is a tekken.json, which needs mistral-common: {hint}")
    try:
        tokenizer = _of_tekken(directory / "tekken.json") if is_tekken else _of_transformers(directory)
    except Exception as error:  # a broken file makes transformers raise all kinds of errors
        raise ValueError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = _template_of_processor(directory / "chat_template.json")
    return tokenizer


def _template_of_processor(path: Path) -> str | dict[str, str] | None:
    """The template, or templates by name, which may be a list of objects with a name and a template."""
    found: Any = _read(path).get("chat_template")
    if isinstance(found, list) and all(isinstance(row, dict) for row in found):
        found = {str(row.get("name")): row.get("template") for row in found}
    texts = found.values() if isinstance(found, dict) else [found]
    if found is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError(f"chat_template in {path} must be a string, or a list of objects with a name and a template")
    return found


def _of_transformers(directory: Path) -> Any:
    if (name := _class_name(directory)) is not None:
        import transformers  # slow to import

        return getattr(transformers, name).from_pretrained(directory)
    from transformers import AutoTokenizer

    # With mistral-common, transformers would prefer a tekken.json to a tokenizer.json beside it.
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, mistral_format=False)


def _class_name(directory: Path) -> str | None:
    """The name of the class that the auto class would take, or None if only the auto class knows."""
    model, fields = (_read(directory / name) for name in ("config.json", "tokenizer_config.json"))
    name = str(fields.get("tokenizer_class")).removesuffix("Fast").replace("TokenizersBackend", "PreTrainedTokenizer")
    is_known = model.get("model_type", "") in _TYPES.get(name, ())
    is_plain = "auto_map" not in fields and "model_name" not in model and (directory / "tokenizer.json").exists()
    return f"{name}Fast" if is_known and is_plain else None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _of_tekken(path: Path) -> Any:
    """A tokenizer of the tokenizers library from a tekken.json, with mistral-common's ids and chat template."""
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.mistral import convert_tekken_tokenizer

    tokenizer = convert_tekken_tokenizer(str(path))
    # mistral-common begins every text with this token; the conversion leaves that out.
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return tokenizer
