"""Reads a model's config.json and generation_config.json: the only place that knows Hugging Face's quirks."""

import re
from pathlib import Path
from typing import Any

from nanovllm.layers.delta_net_config import DeltaNetConfig
from nanovllm.layers.rope_config import ROPE_KINDS, RopeConfig
from nanovllm.models.config import ExpertsConfig, Head, LayerConfig, ModelConfig, ScoreActivation
from nanovllm.models.directory import stores_lm_head
from nanovllm.models.families import FAMILIES, Family
from nanovllm.models.json_fields import read_count, read_flag, read_json, read_list, read_number, read_numbers, shown
from nanovllm.models.pooling_config import PoolingConfig, read_pooling_config
from nanovllm.models.read_fp8 import read_fp8
from nanovllm.models.wrappers import TEXT_PREFIXES, WRAPPERS, Wrapper, fields_beside, unwrap

_SUPPORTED: dict[str, Family | Wrapper] = {**FAMILIES, **WRAPPERS}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Fields of some configs that ask for computations that are not implemented.
_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
# Fields that only some architectures read, and their neutral values. transformers ignores these fields in other
# architectures, but a model that was made with another value would answer nonsense.
OPTIONAL: dict[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "query_pre_attn_scalar": None, "hidden_activation": None,
    "partial_rotary_factor": 1, "moe_intermediate_size": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "shared_expert_intermediate_size": None, "clip_qkv": None, "qkv_bias": None,
    "attention_multiplier": None, "embedding_multiplier": 1, "residual_multiplier": 1, "logits_scaling": 1,
    "attention_out_bias": None, "shared_intermediate_size": None, "position_embedding_type": "rope",
    "no_rope_layers": None, "no_rope_layer_interval": None, "llama_4_scaling_beta": None,
    "sliding_window_pattern": None, "layers_block_type": None, "full_attention_interval": None,
    "attn_output_gate": False, "is_causal": True,
}  # fmt: skip
# Larger counts are mistakes; see json_fields.
_MAX_LAYERS = _MAX_EXPERTS = _MAX_HEADS = 1024
_MAX_POSITION = 2**31 - 1
_MAX_LABELS = 2**16
_CLASSIFIER = "ForSequenceClassification"
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta")
_LLAMA3_NUMBERS = ("low_freq_factor", "high_freq_factor")


def load_model_config(directory: Path) -> ModelConfig:
    """Reads the config of the model in `directory`.

    Raises:
        ValueError: the file is missing or not JSON, a field is missing or wrong, or the model needs something
            that is not implemented; the message names the field and the values that work.
    """
    whole = read_json(directory / "config.json")
    architecture, family, raw, placeholders = _fields_of_architecture(whole, directory)
    generation, (pooling, refusal) = read_json(directory / "generation_config.json", default={}), _pooling(directory)
    is_tied = read_flag(raw, "tie_word_embeddings", default=False)
    head = _head(
        read_list(whole, "architectures"), architecture, is_tied, pooling is not None or bool(refusal), directory
    )
    labels = _labels(whole) if head == "score" else ()
    num_heads, num_kv_heads, head_dim = _heads(raw)
    max_position = read_count(raw, "max_position_embeddings", maximum=_MAX_POSITION)
    layers = _layers(raw, family, head_dim, max_position)
    if architecture in WRAPPERS and (beside := fields_beside(whole)):
        _check_beside(beside, raw, family, head_dim, layers)
    max_position, usual_max_position = _max_positions(max_position, {layer.rope for layer in layers}, family)
    size_name = "shared_intermediate_size" if "shared_intermediate_size" in family.reads else "intermediate_size"
    has_bias = read_flag(raw, "attention_bias", default=False)
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=read_count(raw, "vocab_size"),
        hidden_size=read_count(raw, "hidden_size"),
        intermediate_size=read_count(raw, size_name),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        layers=layers,
        experts=_experts(raw, family),
        rms_norm_eps=read_number(raw, "rms_norm_eps", default=1e-6),
        qkv_bias=has_bias if family.qkv_bias is None else read_flag(raw, "qkv_bias", default=family.qkv_bias),
        o_bias=read_flag(raw, "attention_out_bias", default=has_bias and family.qkv_bias is None),
        mlp_bias=read_flag(raw, "mlp_bias", default=False),
        hidden_act=_hidden_act(raw, family),
        attention_scale=read_number(
            raw, "attention_multiplier", default=read_number(raw, "query_pre_attn_scalar", default=head_dim) ** -0.5
        ),
        embedding_multiplier=read_number(raw, "embedding_multiplier", default=1.0),
        residual_multiplier=read_number(raw, "residual_multiplier", default=1.0),
        logits_scaling=read_number(raw, "logits_scaling", default=1.0),
        tie_word_embeddings=is_tied,
        max_position=max_position,
        usual_max_position=usual_max_position,
        dtype=_dtype(raw),
        eos_token_ids=_eos_token_ids(generation) or _eos_token_ids(raw),
        generation=generation,
        fp8=read_fp8(raw, family, TEXT_PREFIXES if architecture in WRAPPERS else ("model.",)),
        placeholders=placeholders,
        delta_net=_delta_net(raw) if any(layer.is_recurrent for layer in layers) else None,
        head=head,
        labels=labels,
        score_activation=_score_activation(whole, len(labels), directory) if labels else "none",
        pooling=pooling,
        pooling_refusal=refusal,
    )


def _pooling(directory: Path) -> tuple[PoolingConfig | None, str]:
    """The checkpoint's pooling, and why it cannot be followed. Such a checkpoint may still serve other calls."""
    try:
        return read_pooling_config(directory), ""
    except ValueError as error:
        return None, str(error)


def _fields_of_architecture(raw: dict[str, Any], directory: Path) -> tuple[str, Family, dict[str, Any], dict[str, int]]:
    """The architecture, its decoder's family and fields with defaults, and a wrapper's placeholder tokens.

    Raises:
        ValueError: the architecture is not supported, or a field that it does not read would change the model.
    """
    found = read_list(raw, "architectures")
    architecture = _architecture(found, raw.get("model_type"))
    if architecture is None:
        remote = "; it needs code of its own (auto_map), which is never run" if raw.get("auto_map") else ""
        kind = f"the architecture {shown(found)}"
        if not found:
            kind = f"no architectures, and model_type {shown(raw.get('model_type'))}"
        known = f"{', '.join(_SUPPORTED)}, and …Model and …{_CLASSIFIER} of the same model_type"
        raise ValueError(f"config.json in {directory} has {kind}{remote}; supported: {known}")
    supported = _SUPPORTED[architecture]
    family, raw, placeholders = (
        unwrap(supported, raw, directory) if isinstance(supported, Wrapper) else (supported, raw, {})
    )
    # null counts as absent. Only for a window it means that there is none.
    given = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    raw = {**family.defaults, **given}
    if "rope_scaling" in given and "rope_parameters" not in given:  # the older name of the same field
        raw.pop("rope_parameters", None)
    for name in _REFUSED:
        if raw.get(name):
            raise ValueError(f"{name}={shown(raw[name])} in config.json is not supported")
    for name, neutral in {**OPTIONAL, **family.needs}.items():
        if name not in family.reads and raw.get(name, neutral) != neutral:
            hint = f"models without {name} are" if neutral is None else f"models with {name}={neutral} are"
            raise ValueError(f"{name}={shown(raw[name])} in config.json is not supported for {architecture}; {hint}")
    return architecture, family, raw, placeholders


def _architecture(found: list[Any], model_type: Any) -> str | None:
    """The first supported one of `found`. If `found` is empty, or names a decoder that was saved alone, such as
    LlamaModel, or one with a classification head, such as LlamaForSequenceClassification, `model_type` decides, as in
    transformers."""
    for name in found:
        if isinstance(name, str) and name in _SUPPORTED:
            return name
    for name, supported in _SUPPORTED.items():
        for ending in ("Model", _CLASSIFIER):
            names = {re.sub("For(CausalLM|ConditionalGeneration)", text + ending, name) for text in ("", "Text")}
            if supported.model_type == model_type and names.issuperset(map(str, found)):
                return name
    return None


def _head(found: list[Any], architecture: str, is_tied: bool, is_embedder: bool, directory: Path) -> Head:
    """The head of a checkpoint whose `architectures` are `found`. An embedder of sentence-transformers may have been
    saved without an LM head, but with the architecture that has one."""
    if architecture not in found and any(name.endswith(_CLASSIFIER) for name in found):
        return "score"
    is_alone = is_embedder or (architecture not in found and found)
    return "none" if is_alone and not is_tied and not stores_lm_head(directory) else "lm"


def _labels(raw: dict[str, Any]) -> tuple[str, ...]:
    """The names of the classification head's rows, with transformers' defaults."""
    given = raw.get("id2label")
    if given is None:
        return tuple(f"LABEL_{index}" for index in range(read_count(raw, "num_labels", 2, maximum=_MAX_LABELS)))
    labels: tuple[Any, ...] = ()
    if isinstance(given, dict):
        labels = tuple(given.get(str(index)) for index in range(len(given)))
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ValueError(f'id2label in config.json must name the labels "0", "1" and so on, not {shown(given)}')
    return labels


def _score_activation(raw: dict[str, Any], num_labels: int, directory: Path) -> ScoreActivation:
    """sentence-transformers names it in one of three places; without them, problem_type and `num_labels` decide."""
    newest, own = (
        read_json(directory / "config_sentence_transformers.json", default={}),
        raw.get("sentence_transformers"),
    )
    names = [fields.get("activation_fn") for fields in (newest, own) if isinstance(fields, dict)]
    names += [raw.get("sbert_ce_default_activation_function"), raw.get("problem_type"), "single_label_classification"]
    given = next(filter(None, names))
    known: dict[str, ScoreActivation] = {
        "torch.nn.modules.linear.Identity": "none", "torch.nn.modules.activation.Sigmoid": "sigmoid",
        "single_label_classification": "softmax" if num_labels > 1 else "sigmoid",
        "multi_label_classification": "sigmoid", "regression": "none",
    }  # fmt: skip
    if given not in list(known):
        raise ValueError(f"the activation_fn or problem_type {shown(given)} is not supported; {', '.join(known)} are")
    return known[given]


def _dtype(raw: dict[str, Any]) -> str | None:
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None and not isinstance(dtype, str):
        raise ValueError(f"dtype in config.json must be a name such as bfloat16, not {shown(dtype)}")
    return dtype


def _hidden_act(raw: dict[str, Any], family: Family) -> str:
    name = "hidden_activation" if "hidden_activation" in family.reads else "hidden_act"
    hidden_act = raw.get(name, "silu")
    if hidden_act not in ACTIVATIONS:
        raise ValueError(f"{name}={shown(hidden_act)} is not supported; {', '.join(ACTIVATIONS)} are")
    return hidden_act


def _heads(raw: dict[str, Any]) -> tuple[int, int, int]:
    """(number of query heads, number of key/value heads, size of a head)."""
    num_heads = read_count(raw, "num_attention_heads", maximum=_MAX_HEADS)
    num_kv_heads = read_count(raw, "num_key_value_heads", default=num_heads)
    hidden_size = read_count(raw, "hidden_size")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    if "head_dim" not in raw and hidden_size % num_heads:
        raise ValueError(f"config.json has no head_dim, and {num_heads} heads do not divide hidden_size={hidden_size}")
    head_dim = read_count(raw, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotary embedding")
    return num_heads, num_kv_heads, head_dim


def _layers(raw: dict[str, Any], family: Family, head_dim: int, max_position: int) -> tuple[LayerConfig, ...]:
    num_layers = read_count(raw, "num_hidden_layers", maximum=_MAX_LAYERS)
    rotates = _rotated_layers(raw, num_layers)
    kinds = _kinds(raw, family, num_layers)
    windows = _windows(raw, family, rotates, kinds)
    ropes = {is_local: _rope(raw, family, is_local, head_dim, max_position) for is_local in set(map(bool, windows))}
    sparse = _sparse_layers(raw, num_layers) if family.num_experts_names else set()
    recurrent = {index for index, kind in enumerate(kinds) if kind == "linear_attention"}
    return tuple(
        LayerConfig(
            window, ropes[window > 0] if rotated else RopeConfig(1.0, head_dim, "none"), i in sparse, i in recurrent
        )
        for i, (window, rotated) in enumerate(zip(windows, rotates, strict=True))
    )


def _check_beside(
    beside: dict[str, Any], raw: dict[str, Any], family: Family, head_dim: int, layers: tuple[LayerConfig, ...]
) -> None:
    """Refuses fields beside text_config that would change the text part in it."""
    max_position, thetas = raw["max_position_embeddings"], [layer.rope.theta for layer in layers]
    is_same = beside.get("max_position_embeddings", max_position) == max_position
    is_same = is_same and beside.get("rope_theta", thetas[0]) in thetas  # rope_parameters hide this field
    try:
        is_same = is_same and _layers({**raw, **beside}, family, head_dim, max_position) == layers
    except ValueError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"{', '.join(beside)} beside text_config in config.json would change the text part, but transformers does "
            "not read them there; move what you want into text_config"
        )


def _max_positions(max_position: int, ropes: set[RopeConfig], family: Family) -> tuple[int, int]:
    """(maximum number of tokens that the model was made for, the maximum by default).

    Args:
        max_position: config.json's max_position_embeddings.
    """
    # The configs of Llama 3 and LongRoPE always give the length after stretching.
    kinds = () if family.names_stretched_length else ("linear", "yarn")
    stretched = [int(rope.original_max_position * rope.factor) for rope in ropes if rope.kind in kinds]
    max_position = max([max_position, *stretched])
    return max_position, min([max_position, *(rope.original_max_position for rope in ropes if rope.kind == "longrope")])


def _rotated_layers(raw: dict[str, Any], num_layers: int) -> list[bool]:
    """Whether each layer has a rotary embedding."""
    kind = raw.get("position_embedding_type", "rope")
    if kind not in ("rope", "nope"):
        raise ValueError(f"position_embedding_type={shown(kind)} in config.json is not supported; rope and nope are")
    if "no_rope_layers" in raw:
        given = read_list(raw, "no_rope_layers")[:num_layers]
        if len(given) < num_layers or any(rotates not in (0, 1) for rotates in given):
            raise ValueError(
                f"no_rope_layers in config.json must hold 1 (rotary embedding) or 0 (none) for each of the "
                f"{num_layers} layers, not {shown(raw['no_rope_layers'])}"
            )
        return list(map(bool, given))
    if "no_rope_layer_interval" in raw:
        interval = read_count(raw, "no_rope_layer_interval")
        return [(index + 1) % interval > 0 for index in range(num_layers)]
    return [kind == "rope"] * num_layers


def _kinds(raw: dict[str, Any], family: Family, num_layers: int) -> list[str]:
    """Each layer's kind, from layer_types or by the family's default; empty if there is neither."""
    kinds, block_types = read_list(raw, "layer_types"), read_list(raw, "layers_block_type")
    if kinds and block_types and kinds != block_types:
        raise ValueError("layer_types and layers_block_type in config.json differ; keep only layer_types")
    kinds = kinds or block_types
    if not kinds and "layers_block_type" in family.reads:
        raise ValueError(
            "config.json has no layer_types; without it all layers are Mamba layers, which are not supported"
        )
    kinds = ["full_attention" if kind == "attention" else kind for kind in kinds]
    other = "sliding_attention"
    if family.full_attention_interval:
        other = "linear_attention"
        interval = read_count(raw, "full_attention_interval", default=family.full_attention_interval)
        kinds = kinds or ["full_attention" if index % interval == 0 else other for index in range(1, num_layers + 1)]
    if kinds and (len(kinds) != num_layers or any(kind not in ("full_attention", other) for kind in kinds)):
        raise ValueError(
            f"layer_types in config.json must say full_attention or {other} for each of the "
            f"{num_layers} layers, not {shown(kinds)}; layers of other kinds are not supported"
        )
    if kinds and other == "linear_attention" and "full_attention" not in kinds:
        raise ValueError(
            "no layer of config.json has full attention; only models with such a layer are supported, so check "
            "layer_types and full_attention_interval"
        )
    return kinds


def _windows(raw: dict[str, Any], family: Family, rotates: list[bool], kinds: list[str]) -> list[int]:
    """Each layer's sliding window, 0 for none.

    Args:
        rotates: whether each layer has a rotary embedding.
        kinds: from `_kinds`.
    """
    num_layers, has_window = len(rotates), raw.get("sliding_window") is not None
    if family.windows in ("upper", "switched", "alternate", "unrotated"):
        has_window = has_window and read_flag(raw, "use_sliding_window", default=False)
    if family.windows == "none" and has_window and read_flag(raw, "use_sliding_window", default=False):
        raise ValueError("use_sliding_window=True in config.json is not supported for this architecture; false is")
    if family.windows == "pattern":
        if not has_window:
            raise ValueError("sliding_window in config.json must be an integer: some layers need it")
        period = read_count(raw, "sliding_window_pattern", default=family.window_period)
        is_local = [(index + 1) % period > 0 for index in range(num_layers)]
    else:
        has_bound = family.windows in ("upper", "alternate")
        bound = read_count(raw, "max_window_layers", minimum=0) if has_bound else 0
        everything = range(num_layers)
        with_window = {
            "none": [],
            "all": everything,
            "listed": everything,
            "switched": everything,
            "upper": range(bound, num_layers),
            "alternate": range(0, bound, 2),
            "unrotated": [index for index in everything if not rotates[index]],
        }[family.windows]
        is_local = [has_window and index in with_window for index in range(num_layers)]
    if kinds:
        given = [kind == "sliding_attention" for kind in kinds]
        # transformers follows layer_types only in these families.
        follows = family.windows in ("listed", "upper", "alternate", "unrotated", "pattern")
        is_followed = follows and (has_window or not any(given))
        if not is_followed and given != is_local:
            raise ValueError(
                f"layer_types={shown(kinds)} in config.json does not fit "
                f"sliding_window={raw.get('sliding_window')} and use_sliding_window={raw.get('use_sliding_window')}"
            )
        is_local = given
    window = read_count(raw, "sliding_window") if any(is_local) else 0
    return [window if local else 0 for local in is_local]


def _experts(raw: dict[str, Any], family: Family) -> ExpertsConfig | None:
    names = family.num_experts_names
    if not names:
        if raw.get("num_local_experts"):
            given = shown(raw["num_local_experts"])
            problem = f"num_local_experts={given} in config.json is not supported for this architecture"
            raise ValueError(f"{problem}; models with num_local_experts=0 are")
        return None
    num_experts = read_count(raw, next((name for name in names if name in raw), names[-1]), maximum=_MAX_EXPERTS)
    has_own_size = "moe_intermediate_size" in family.reads
    size = read_count(raw, "moe_intermediate_size" if has_own_size else "intermediate_size")
    top_k = read_count(raw, "num_experts_per_tok", maximum=num_experts)
    # In families without this field, the weights of a token's experts always add up to 1.
    renormalizes = "norm_topk_prob" not in family.reads or read_flag(raw, "norm_topk_prob", default=False)
    shared_name = "shared_expert_intermediate_size"
    shared_size = read_count(raw, shared_name) if shared_name in family.reads else 0
    return ExpertsConfig(num_experts, top_k, size, renormalizes, shared_size)


def _delta_net(raw: dict[str, Any]) -> DeltaNetConfig:
    num_key_heads, num_value_heads = (
        read_count(raw, f"linear_num_{kind}_heads", maximum=_MAX_HEADS) for kind in ("key", "value")
    )
    if num_value_heads % num_key_heads:
        raise ValueError(
            f"linear_num_value_heads={num_value_heads} is not a multiple of linear_num_key_heads={num_key_heads}"
        )
    sizes = (read_count(raw, f"linear_{name}_dim") for name in ("key_head", "value_head", "conv_kernel"))
    return DeltaNetConfig(num_key_heads, num_value_heads, *sizes)


def _sparse_layers(raw: dict[str, Any], num_layers: int) -> set[int]:
    """Indices of the layers with experts: all layers, unless Qwen's fields exclude some."""
    period = read_count(raw, "decoder_sparse_step", default=1)
    dense = read_list(raw, "mlp_only_layers")
    if any(isinstance(index, bool) or not isinstance(index, int) for index in dense):
        raise ValueError(f"mlp_only_layers in config.json must be a list of layers' numbers, not {shown(dense)}")
    return {index for index in range(num_layers) if (index + 1) % period == 0 and index not in dense}


def _rope(raw: dict[str, Any], family: Family, is_local: bool, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary embedding of layers with a window (`is_local`) or without one.

    transformers 4 writes rope_theta and rope_scaling, transformers 5 writes both in rope_parameters. A config with both
    must say the same twice: transformers 5 reads rope_scaling then, without the rope_theta of rope_parameters.
    """
    names = ("rope_scaling", "rope_parameters")
    layouts = [fields for name in names if (fields := _rope_fields(raw, name, family, is_local))]
    ropes = {_rope_of_fields(fields, raw, family, is_local, head_dim, max_position) for fields in layouts or [{}]}
    if len(ropes) > 1:
        raise ValueError("rope_scaling and rope_parameters in config.json differ; keep only rope_parameters")
    return ropes.pop()


def _rope_fields(raw: dict[str, Any], name: str, family: Family, is_local: bool) -> dict[str, Any]:
    """The fields of `name`, which is rope_scaling or rope_parameters."""
    given = raw.get(name) or {}
    is_nested = isinstance(given, dict) and not given.keys().isdisjoint(("full_attention", "sliding_attention"))
    if is_nested and family.local_theta:
        given = given.get("sliding_attention" if is_local else "full_attention") or {}
    elif is_local and family.local_theta and isinstance(given, dict):
        given = {}  # the fields apply only to layers without a window
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"{name} in config.json must be one object for all layers, not {shown(given)}")
    fields = {"rope_type": given["type"], **given} if "type" in given else given
    if "partial_rotary_factor" not in family.reads and fields.get("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor in config.json is not supported for this architecture")
    return fields


def _rope_of_fields(
    fields: dict[str, Any], raw: dict[str, Any], family: Family, is_local: bool, head_dim: int, max_position: int
) -> RopeConfig:
    """The rotary embedding that `fields` describe, with the other fields of config.json."""
    theta_name = (is_local and family.local_theta) or "rope_theta"
    theta = read_number(fields, "rope_theta") if "rope_theta" in fields else read_number(raw, theta_name, 1e4)
    partial = read_number({**raw, **fields}, "partial_rotary_factor", default=1.0)
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor={partial} of head_dim={head_dim} in config.json must give an even "
            f"number of rotated columns, at least 2 and at most {head_dim}"
        )
    kind = fields.get("rope_type", "default")
    if kind == "su" or kind in family.longrope_names:
        kind = "longrope"
    if kind == "dynamic" or (kind == "mrope" and family.model_type.endswith("vl_text")):
        kind = "default"  # "dynamic" changes nothing up to max_position_embeddings, our limit; "mrope" nothing in text
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {shown(kind)} is not supported; {', '.join(ROPE_KINDS)} and dynamic are")
    if fields.get("llama_4_scaling_beta") and (kind, family.model_type) != ("yarn", "ministral3"):
        raise ValueError(
            f"llama_4_scaling_beta={shown(fields['llama_4_scaling_beta'])} in config.json is supported only in "
            f"Ministral3ForCausalLM with rope type yarn, not {shown(kind)}"
        )
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    name = "original_max_position_embeddings"
    # transformers reads it from the config of a family whose class has it (Phi-3), else from the rotary embedding.
    both = {**fields, **raw} if name in family.defaults else {**raw, **fields}
    original = read_count(both, name, default=max_position, minimum=2, maximum=_MAX_POSITION)
    is_implied = kind == "longrope" or (kind == "yarn" and name in fields)
    factor = read_number(fields, "factor", default=max_position / original if is_implied else None)
    if factor < 1:
        raise ValueError(
            f"rope scaling {kind!r} needs a factor of at least 1, not {factor!r} (max_position_embeddings is "
            f"{max_position}, {name} {original})"
        )
    names = {"yarn": _YARN_NUMBERS, "llama3": _LLAMA3_NUMBERS, "longrope": ("attention_factor",)}.get(kind, ())
    numbers: dict[str, Any] = {
        name: read_number(fields, name) for name in names if fields.get(name) or kind == "llama3"
    }
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta={theta} in config.json must be larger than 1 for yarn")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ValueError(f"low_freq_factor must be smaller than high_freq_factor in config.json, not {numbers}")
    if kind == "longrope":
        numbers.update({name: read_numbers(fields, name, rotary_dim // 2) for name in ("short_factor", "long_factor")})
    truncate = read_flag(fields, "truncate", default=True)
    return RopeConfig(theta, rotary_dim, kind, factor, original, truncate=truncate, **numbers)


def _eos_token_ids(raw: dict[str, Any]) -> frozenset[int]:
    given = raw.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {given!r}")
    return frozenset(ids)
