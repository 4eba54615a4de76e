"""Reads from a checkpoint of sentence-transformers how an embedding is made of hidden states. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanovllm.models.json_fields import read_json, shown

PooledTokens = Literal["last", "mean", "first"]
# Values of pooling_mode in a Pooling module's config.json, and the flags that versions before 5.4 write instead.
_TOKENS: dict[str, PooledTokens] = {
    "lasttoken": "last", "mean": "mean", "cls": "first",
    "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first",
}  # fmt: skip


@dataclass(frozen=True)
class PoolingConfig:
    """How sentence-transformers makes the embedding of a text with this checkpoint.

    tokens: the tokens whose hidden states, after the final norm, are pooled.
    normalizes: the embedding is divided by its L2 norm.
    max_length: sentence-transformers cuts prompts to this number of tokens; None if only the model limits them.
    prompts: texts to put before a text, by name; "query" and "document" are always among them.
    default_prompt: the one that a text gets if no other is asked for; may be "".
    dimensions: the embedding is cut to this number of columns, after it is normalized; None for all.
    similarity: how two embeddings are compared.
    """

    tokens: PooledTokens
    normalizes: bool
    max_length: int | None
    prompts: Mapping[str, str]
    default_prompt: str
    dimensions: int | None
    similarity: Literal["cosine", "dot"] = "cosine"


def read_pooling_config(directory: Path) -> PoolingConfig | None:
    """The pooling of the checkpoint in `directory`. None if it has no modules.json, or that of a cross-encoder.

    Raises:
        ValueError: a file cannot be read, or asks for something that is not implemented; the message names the file
            and the field.
    """
    modules_path, whole_path = directory / "modules.json", directory / "config_sentence_transformers.json"
    whole = read_json(whole_path, default={})
    if not modules_path.exists() or whole.get("model_type") == "CrossEncoder":
        return None
    transformer_folder, pooling_folder, normalizes = _modules(modules_path)
    given = _read(whole_path, whole, "prompts", dict) or {}
    prompts = {name: text or "" for name, text in ({"query": "", "document": ""} | given).items()}
    default_name = whole.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()) or default_name not in (None, *prompts):
        raise ValueError(f"prompts in {whole_path} must be texts by name, with default_prompt_name among the names")
    pooling_path, settings_path = pooling_folder / "config.json", transformer_folder / "sentence_bert_config.json"
    pooling, settings = read_json(pooling_path), read_json(settings_path, default={})
    is_chat = "message" in (_read(settings_path, settings, "modality_config", dict) or {})
    refused = {
        f"include_prompt=false in {pooling_path}": any(prompts.values()) and pooling.get("include_prompt") is False,
        f"do_lower_case in {settings_path}": settings.get("do_lower_case"),
        f"similarity_fn_name in {whole_path}": whole.get("similarity_fn_name") not in (None, "cosine", "dot"),
        f"processing_kwargs in {settings_path}": settings.get("processing_kwargs"),
        f"transformer_task in {settings_path}": settings.get("transformer_task") not in (None, "feature-extraction"),
        f"message in modality_config of {settings_path}, which puts texts into the chat template,": is_chat,
    }
    if found := [name for name, is_given in refused.items() if is_given]:
        raise ValueError(f"{found[0]} is not supported; remove it if you want embeddings without it")
    max_length = _read(settings_path, settings, "max_seq_length", int)
    if max_length is None:  # version 5.4 moved it to the tokenizer, where a very large number means none
        max_length = read_json(directory / "tokenizer_config.json", default={}).get("model_max_length")
        max_length = max_length if isinstance(max_length, int) and 0 < max_length < 2**31 else None
    return PoolingConfig(
        _tokens(pooling_path, pooling), normalizes, max_length, prompts, prompts.get(default_name, ""),
        _read(whole_path, whole, "truncate_dim", int), whole.get("similarity_fn_name") or "cosine",
    )  # fmt: skip


def _modules(path: Path) -> tuple[Path, Path, bool]:
    """(the Transformer's folder, that of the Pooling, whether embeddings are normalized), from modules.json."""
    try:
        modules = [(str(module["type"]), path.parent / Path(module["path"]).name) for module in read_json(path, list)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from None
    # Versions before 5.4 have all modules in sentence_transformers.models.
    kinds = [re.sub(r"^sentence_transformers\..*\.", "", kind) for kind, _ in modules]
    are_inside = ".." not in [folder.name for _, folder in modules]
    if not are_inside or kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ValueError(
            f"{path} lists the modules {shown(kinds)}, which are not supported; Transformer, Pooling and optionally "
            "Normalize of sentence_transformers are, in folders of the checkpoint"
        )
    return modules[0][1], modules[1][1], len(kinds) > 2


def _tokens(path: Path, pooling: dict[str, Any]) -> PooledTokens:
    """The tokens that a Pooling module pools, whose config is in `path`."""
    modes = pooling.get("pooling_mode")
    if modes is None:
        modes = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in list(_TOKENS):
        raise ValueError(f"{path} asks for the pooling {shown(modes)}; one of {', '.join(_TOKENS)} is supported")
    return _TOKENS[modes[0]]


def _read(path: Path, fields: dict[str, Any], name: str, kind: type) -> Any:
    """The field of a file; None if it is missing or null. A number must be positive."""
    value = fields.get(name)
    if value is not None and (type(value) is not kind or (type(value) is int and value < 1)):
        raise ValueError(f"{name} in {path} must be a {'positive ' * (kind is int)}{kind.__name__}, not {shown(value)}")
    return value
