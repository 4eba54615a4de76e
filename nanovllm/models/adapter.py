"""LoRA adapters in peft's files: for each weight that an adapter changes, the two factors of the change.

A weight W [output_size, input_size] becomes W + scale × B @ A (Hu et al., 2021), with A [rank, input_size], B
[output_size, rank] and scale = alpha / rank, or alpha / √rank for rank-stabilized LoRA (Kalajdzievski, 2023).
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from nanovllm.layers.experts import ExpertLinear, Router
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.shard import Shard
from nanovllm.models.decoder import CausalLM
from nanovllm.models.directory import adapter_files
from nanovllm.models.loader import expected_of
from nanovllm.models.tensor_names import by_model_names
from nanovllm.models.tensors import AnyTensor, Given, Tensors, stored_tensors

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
# Fields of adapter_config.json that would change the result, each with the values that change nothing.
_PLAIN_FIELDS: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False), "bias": (None, "none"), "modules_to_save": (None, []), "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}), "megatron_config": (None,), "layer_replication": (None, []),
    "alora_invocation_tokens": (None,), "use_qalora": (None, False), "target_parameters": (None, []),
    "use_bdlora": (None,), "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
}  # fmt: skip
# With these, peft changes the base weights before it trains.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_MAX_ALPHA = 1e30
_NO_LINEAR_LAYERS = ("embed_tokens", "lm_head", "score")


class LowRank(NamedTuple):
    """The change of one weight: scale × b @ a.

    a: [rank, input_size]; b: [output_size, rank].
    """

    a: AnyTensor
    b: AnyTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def what(self) -> str:
        return self.a.what


def stored_adapter(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """The config and the tensors, by peft's names, in a directory.

    Raises:
        ValueError: a file is missing or unreadable.
    """
    path, weights = adapter_files(directory)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return config, stored_tensors(weights)


def adapter_of(config: Mapping[str, Any], tensors: Tensors, what: str) -> dict[str, LowRank]:
    """The changes by the name of the weight in a checkpoint, such as "model.layers.0.self_attn.q_proj.weight". All
    factors are in memory.

    Args:
        config: peft's LoraConfig.
        tensors: by peft's names.
        what: the adapter's name for errors.

    Raises:
        ValueError: another kind of adapter, a tensor that is no factor, a factor without its other half or of another
            rank, or numbers that are not finite. The message names it.
    """
    _check_kind(config, what)
    factors: dict[str, dict[str, AnyTensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ValueError(
                f"{what}: {tensor.what} is not a factor of LoRA (lora_A or lora_B of a linear layer); pass the tensors "
                "of peft's save_pretrained or get_peft_model_state_dict, and leave out embeddings and the LM head"
            )
        of_layer = factors.setdefault(match["layer"], {})
        if match["factor"] in of_layer:
            other = of_layer[match["factor"]].what
            raise ValueError(f"{what}: {tensor.what} and {other} are the same factor; keep one")
        of_layer[match["factor"]] = tensor
    if not factors:
        raise ValueError(f"{what} has no tensors")
    return {f"{layer}.weight": _low_rank(config, layer, of_layer, what) for layer, of_layer in factors.items()}


def _check_kind(config: Mapping[str, Any], what: str) -> None:
    """Raises a ValueError if the config is that of another kind of adapter."""
    kind = config.get("peft_type")
    if kind not in (None, "LORA"):
        raise ValueError(f"{what} is an adapter of peft's type {kind}; only LORA is supported")
    for name, plain in _PLAIN_FIELDS.items():
        if config.get(name) not in plain:
            raise ValueError(
                f"{what} has {name}={config[name]!r:.100}, which nanovllm does not support; load a model into which "
                "peft has merged it (merge_and_unload)"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{what} has init_lora_weights={start!r}, so it belongs to other base weights than the model's; let peft "
            "convert it: save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ValueError(f"{what} has use_rslora={config['use_rslora']!r:.100}; it must be true or false")


def _low_rank(config: Mapping[str, Any], layer: str, factors: Tensors, what: str) -> LowRank:
    if len(factors) < 2:
        (found,) = factors.values()
        raise ValueError(f"{what}: {found.what} has no other half; lora_A and lora_B of {layer} go together")
    if not _is_targeted(config.get("target_modules"), layer, what):
        # peft would leave it out.
        raise ValueError(f"{what}: target_modules={config['target_modules']!r:.200} does not name {factors['A'].what}")
    a, b = factors["A"], factors["B"]
    rank = _of_layer(config, "rank_pattern", layer, config.get("r", 8), what)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{what}: the rank of {layer} must be an integer of at least 1, not {rank!r:.100}")
    alpha = _of_layer(config, "alpha_pattern", layer, config.get("lora_alpha", 8), what)
    # float32 holds the scale.
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -_MAX_ALPHA <= alpha <= _MAX_ALPHA:
        raise ValueError(f"{what}: lora_alpha of {layer} must be a number up to {_MAX_ALPHA:g}, not {alpha!r:.100}")
    if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
        raise ValueError(
            f"{what}: {a.what} and {b.what} have shapes {list(a.shape)} and {list(b.shape)}, but the rank of {layer} "
            f"is {rank}"
        )
    return LowRank(_in_memory(a, what), _in_memory(b, what), alpha / (sqrt(rank) if config.get("use_rslora") else rank))


def _of_layer(config: Mapping[str, Any], field: str, layer: str, default: Any, what: str) -> Any:
    """The value of the first key of a pattern that matches the layer's name or its end, as peft reads it."""
    pattern = config.get(field) or {}
    if not isinstance(pattern, Mapping):
        raise ValueError(f"{what}: {field} must be an object, not {pattern!r:.100}")
    matches = (value for key, value in pattern.items() if _matches(rf"(.*\.)?({key})", layer, f"{what}: {field}"))
    return next(matches, default)


def _is_targeted(targets: Any, layer: str, what: str) -> bool:
    """Whether peft's target_modules names the layer; it ignores layers_to_transform and exclude_modules."""
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return _matches(targets, layer, f"{what}: target_modules")
    if not isinstance(targets, Collection):
        raise ValueError(f"{what}: target_modules must be a list or a regular expression, not {targets!r:.100}")
    return any(f".{layer}".endswith(f".{target}") for target in targets)


def _matches(pattern: str, name: str, field: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{field} has the regular expression {pattern!r:.100}, which is wrong: {error}") from None


def _in_memory(tensor: AnyTensor, what: str) -> Given:
    """The whole tensor; a ValueError if it holds something other than finite floating-point numbers."""
    values = tensor.whole()
    if not values.is_floating_point() or values.itemsize < 2:
        raise ValueError(
            f"{what}: {tensor.what} is {values.dtype}; only floating-point numbers of 16 bits and more are read"
        )
    if values.numel() and not all(extreme.isfinite() for extreme in values.aminmax()):
        raise ValueError(f"{what}: {tensor.what} holds numbers that are infinite or not a number; train it again")
    return Given(tensor.what, values)


def linear_layers(model: CausalLM) -> Iterator[tuple[str, nn.Module, dict[str, list[Shard]]]]:
    """The modules that an adapter can change, and the shards of the weights that a checkpoint has for them.

    Yields:
        A module's name, the module, and checkpoint tensor name -> shards; see `loader.expected_of`.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, LinearBase | ExpertLinear | Router):
            shards_of = expected_of(model, prefix, module)
            yield prefix, module, {name: each for name, each in shards_of.items() if name.endswith(".weight")}


def check_fits(
    adapter: Mapping[str, LowRank], model: CausalLM, what: str, config: Mapping[str, Any]
) -> dict[str, LowRank]:
    """Checks that each change is of a linear layer of a model. Leaves out changes of vision towers.

    Args:
        config: peft's LoraConfig. The layers that it lists must have tensors.

    Returns:
        The changes by the names of `loader.expected_tensors`, which lack the prefixes of wrapping models.

    Raises:
        ValueError: the model has no such layer, the layer has another size or cannot be changed, or a listed layer has
            no tensors. The message names the layer.
    """
    shapes = {name: of_name[0].shape for *_, shards in linear_layers(model) for name, of_name in shards.items()}
    for name, change in adapter.items():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if layer in _NO_LINEAR_LAYERS:
            raise ValueError(f"{what}: {change.what} changes {layer}; only linear layers of the decoder can be changed")
    found: dict[str, LowRank] = {}
    try:
        named = by_model_names(model, shapes, adapter.items(), "linear layer")
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    for name, change in named:
        if name in found:
            raise ValueError(f"{what}: {found[name].what} and {change.what} are of the same layer; keep one of them")
        if change.shape != shapes[name]:
            raise ValueError(
                f"{what}: {change.what} and its other half change a weight {list(change.shape)}, but the model's is "
                f"{list(shapes[name])}; it is an adapter of another model"
            )
        found[name] = change
    if not found:
        raise ValueError(f"{what} changes no linear layer of the text part")
    _check_is_whole(found, model, config, what)
    return found


def _check_is_whole(adapter: Mapping[str, LowRank], model: CausalLM, config: Mapping[str, Any], what: str) -> None:
    """Raises a ValueError if target_modules lists layers that have no tensors."""
    targets, narrows = config.get("target_modules"), ("layers_to_transform", "exclude_modules")
    if targets is None or isinstance(targets, str) or any(config.get(name) is not None for name in narrows):
        return
    missing = [
        name.removesuffix(".weight")
        for _, module, shards in linear_layers(model)
        for name in shards
        if isinstance(module, LinearBase) and name not in adapter
        if _is_targeted(targets, name.removesuffix(".weight"), what)
    ]
    if missing:
        raise ValueError(
            f"{what} has no tensors for {missing[0]}, one of {len(missing)} such layers that target_modules names; to "
            "leave them unchanged, set target_modules to null in the adapter's config"
        )
