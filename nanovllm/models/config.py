"""Reads a model's config.json and generation_config.json: the only place that knows Hugging Face's quirks."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.rope_config import ROPE_KINDS, RopeConfig


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama.

    Args:
        defaults: transformers' defaults of fields that config.json may leave out, where `load_model_config` has
            others. It must name max_position_embeddings.
        windows: which layers have a sliding window if layer_types does not say: "none", "all" (if there is a
            sliding_window), "switched" (all, if use_sliding_window), "upper" (from max_window_layers on, if
            use_sliding_window), or "pattern" (all layers but every sixth).
        has_local_rope: layers with a window have a rotary embedding of their own.
        names_stretched_length: max_position_embeddings is the length after linear stretching.
        longrope_names: other names of LongRoPE, beside su.
        qkv_bias: True: queries, keys and values have a bias, and the attention's output has none. None: attention_bias
            decides for all four.
        qk_norm: every query and key head is normed by itself.
        stores_merged: the checkpoint holds queries, keys and values as one tensor, and gate and up as another.
        norm_offset: is added to the stored weights of norms.
        has_post_norms: the outputs of attention and MLP are normed too, before they are added.
        scales_embedding: embeddings are multiplied by sqrt(hidden_size).
        num_experts_names: layers have a mixture of experts instead of an MLP, and config.json says with one of these
            names how many there are. Qwen's models can have layers with MLPs too.
        renames: parts of our tensors' names, and what the checkpoint calls them.
        reads: which fields of _OPTIONAL the architecture reads, or has and ignores, as Qwen2 its attention_bias.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"
    has_local_rope: bool = False
    names_stretched_length: bool = False
    longrope_names: tuple[str, ...] = ()
    qkv_bias: bool | None = None
    qk_norm: bool = False
    stores_merged: bool = False
    norm_offset: float = 0.0
    has_post_norms: bool = False
    scales_embedding: bool = False
    num_experts_names: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    reads: tuple[str, ...] = ()


FAMILIES = {
    "Gemma3ForCausalLM": Family(
        {
            "head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_theta": 1e6,
        },
        windows="pattern", has_local_rope=True, names_stretched_length=True, qk_norm=True, norm_offset=1.0,
        has_post_norms=True, scales_embedding=True,
        reads=("attention_bias", "query_pre_attn_scalar", "hidden_activation"),
    ),
    "LlamaForCausalLM": Family({"max_position_embeddings": 2048}, reads=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family(
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}, windows="all"
    ),
    "MixtralForCausalLM": Family(
        {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_experts_per_tok": 2, "num_local_experts": 8,
        },
        windows="all", num_experts_names=("num_local_experts",),
        renames=(
            (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."),
        ),
    ),
    "Phi3ForCausalLM": Family(
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        windows="all", longrope_names=("yarn",), stores_merged=True, reads=("partial_rotary_factor",),
    ),
    "Qwen2ForCausalLM": Family(
        {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        windows="upper", qkv_bias=True, reads=("attention_bias",),
    ),
    "Qwen3ForCausalLM": Family(
        {"head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        windows="upper", qk_norm=True, reads=("attention_bias",),
    ),
    "Qwen3MoeForCausalLM": Family(
        {"max_position_embeddings": 32768, "sliding_window": 4096, "moe_intermediate_size": 768},
        windows="switched", qk_norm=True, num_experts_names=("num_experts", "num_local_experts"),
        reads=(
            "attention_bias", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob",
        ),
    ),
}  # fmt: skip
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# What some configs ask for and nothing here does.
_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
# Fields that only some architectures read, and their values that change nothing. transformers ignores them elsewhere; a
# model that was made with another value would answer nonsense.
_OPTIONAL: dict[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "query_pre_attn_scalar": None, "hidden_activation": None,
    "partial_rotary_factor": 1, "moe_intermediate_size": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip
# Numbers beyond these are mistakes. They would exhaust the memory or take minutes, and no error would name the field.
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-12, 1e18
_MAX_LAYERS = _MAX_EXPERTS = _MAX_HEADS = 1024
_LARGEST_SIZE, _LARGEST_POSITION = 2**24, 2**31 - 1
_LONGEST_DEFAULT_MODEL_LEN = 32768
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_LLAMA3_NUMBERS = ("low_freq_factor", "high_freq_factor")


class LayerConfig(NamedTuple):
    """What layers of one model may differ in.

    window: how many keys a query sees, its own included; 0 is all.
    rope: the rotary embedding.
    has_experts: a mixture of experts instead of an MLP.
    """

    window: int
    rope: RopeConfig
    has_experts: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts of a model's layers.

    num_experts, top_k: how many there are, and how many a token chooses.
    size: of an expert's MLP.
    renormalizes: a token's weights add up to 1.
    """

    num_experts: int
    top_k: int
    size: int
    renormalizes: bool


class Matrix(NamedTuple):
    """A weight matrix of a layer, or several alike: the gates and ups, or the downs, of its experts.

    name: of the layer that holds it; of several, the first one's.
    num_read: how many of them a step reads.
    fp8: None if it stays as it is.
    """

    name: str
    num_rows: int
    num_columns: int
    num_read: float = 1
    fp8: Fp8Config | None = None

    @property
    def num_parameters(self) -> int:
        """Numbers that are read."""
        return round(self.num_read * self.num_rows * self.num_columns)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes that are read, scales included; itemsize: of numbers that are not in FP8."""
        if self.fp8 is None:
            return self.num_parameters * itemsize
        rows, columns = self.fp8.block or (1, self.num_columns)
        num_scales = -(-self.num_rows // rows) * -(-self.num_columns // columns)
        return self.num_parameters + round(4 * self.num_read * num_scales)


@dataclass(frozen=True)
class ModelConfig:
    """The checked numbers of one model. Fields that config.json also has keep their Hugging Face names."""

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    experts: ExpertsConfig | None
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    hidden_act: str
    attention_scale: float  # of the scores
    tie_word_embeddings: bool
    max_position: int  # most tokens the model was made for, scaling included
    usual_max_position: int  # most tokens by default: LongRoPE has other factors for more
    dtype: str | None  # of the checkpoint, as "bfloat16"
    eos_token_ids: frozenset[int]
    generation: dict[str, Any]  # generation_config.json, for the recommended sampling
    fp8: Fp8Config | None = None  # None if no weight is in FP8

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Numbers in all weight matrices."""
        num_embeddings = 2 - self.tie_word_embeddings
        return self.num_layer_parameters(2**31) + num_embeddings * self.vocab_size * self.hidden_size

    def num_layer_parameters(self, num_tokens: int) -> int:
        """Numbers in the layers' weight matrices that a step of so many tokens reads; see `matrices`."""
        return sum(matrix.num_parameters for matrix in self.matrices(num_tokens))

    def matrices(self, num_tokens: int) -> Iterator[Matrix]:
        """The layers' weight matrices that a step of so many tokens reads.

        Of a layer's experts it counts those that the tokens choose if each expert is as likely as the others: one token
        chooses `top_k`. So with one token these are also what a token is multiplied with.
        """
        for index, layer in enumerate(self.layers):
            routed = self.experts if layer.has_experts else None
            for matrix in (*self._attention_matrices(), *self._mlp_matrices(routed, num_tokens)):
                name = f"model.layers.{index}.{matrix.name}"
                is_fp8 = self.fp8 is not None and name.endswith("_proj") and self.fp8.applies_to(name)
                yield matrix._replace(name=name, fp8=self.fp8 if is_fp8 else None)

    def _attention_matrices(self) -> list[Matrix]:
        num_q, num_kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        sizes = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
        if self.family.stores_merged:
            sizes = {"qkv_proj": num_q + 2 * num_kv}
        of_inputs = [Matrix(f"self_attn.{name}", size, self.hidden_size) for name, size in sizes.items()]
        return [*of_inputs, Matrix("self_attn.o_proj", self.hidden_size, num_q)]

    def _mlp_matrices(self, routed: ExpertsConfig | None, num_tokens: int) -> list[Matrix]:
        hidden_size, size = self.hidden_size, self.intermediate_size
        if routed is not None:
            num_chosen = routed.num_experts * (1 - (1 - routed.top_k / routed.num_experts) ** num_tokens)
            return [
                Matrix("mlp.gate", routed.num_experts, hidden_size),
                Matrix("mlp.experts.0.gate_proj", routed.size, hidden_size, 2 * num_chosen),
                Matrix("mlp.experts.0.down_proj", hidden_size, routed.size, num_chosen),
            ]
        down = Matrix("mlp.down_proj", hidden_size, size)
        if self.family.stores_merged:
            return [Matrix("mlp.gate_up_proj", 2 * size, hidden_size), down]
        return [Matrix("mlp.gate_proj", size, hidden_size), Matrix("mlp.up_proj", size, hidden_size), down]

    def max_model_len(self, wanted: int | None) -> int:
        """Most tokens of prompt + completion: `wanted`, or a default; a ValueError if the model was made for fewer."""
        if wanted is None:
            return min(self.usual_max_position, _LONGEST_DEFAULT_MODEL_LEN)
        if wanted > self.max_position:
            raise ValueError(
                f"max_model_len={wanted} exceeds the {self.max_position} tokens that the model was made for"
            )
        return wanted

    def without_idle_windows(self, max_model_len: int) -> "ModelConfig":
        """The same config, but a window that no sequence of `max_model_len` tokens outgrows becomes 0."""
        layers = (layer if layer.window < max_model_len else layer._replace(window=0) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def check_parallel_size(self, size: int) -> None:
        """Raises a ValueError that names the sizes that work, unless the model can be split over `size` ranks."""

        mlp_sizes = {
            self.experts.size if self.experts is not None and layer.has_experts else self.intermediate_size
            for layer in self.layers
        }

        def divides(n: int) -> bool:
            num_kv_heads = self.num_key_value_heads  # of which several ranks may hold the same
            is_even = all(size % n == 0 for size in (self.num_attention_heads, *mlp_sizes))
            return is_even and (num_kv_heads % n == 0 or n % num_kv_heads == 0)

        if not divides(size):
            sizes = ", ".join(str(n) for n in range(1, min(self.num_attention_heads, 64) + 1) if divides(n))
            raise ValueError(
                f"the model cannot be divided over tensor_parallel_size={size}: it has {self.num_attention_heads} "
                f"attention heads, {self.num_key_value_heads} key/value heads and MLPs of size "
                f"{' and '.join(map(str, sorted(mlp_sizes)))}; sizes that work: {sizes}"
            )


def load_model_config(directory: Path) -> ModelConfig:
    """Reads the config of the model in `directory`.

    Raises:
        ValueError: the file is missing or not JSON, a field is missing or wrong, or the model needs something
            that is not implemented; the message says which and what there is.
    """
    architecture, raw = _fields_of_architecture(read_json(directory / "config.json"), directory)
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    family = FAMILIES[architecture]
    act_name = "hidden_activation" if "hidden_activation" in family.reads else "hidden_act"
    hidden_act = raw.get(act_name, "silu")
    if hidden_act not in ACTIVATIONS:
        raise ValueError(f"{act_name}={_shown(hidden_act)} is not supported; {', '.join(ACTIVATIONS)} are")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None and not isinstance(dtype, str):
        raise ValueError(f"dtype in config.json must be a name such as bfloat16, not {_shown(dtype)}")

    num_heads = _count(raw, "num_attention_heads", maximum=_MAX_HEADS)
    num_kv_heads = _count(raw, "num_key_value_heads", default=num_heads)
    hidden_size = _count(raw, "hidden_size")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    if "head_dim" not in raw and hidden_size % num_heads:
        raise ValueError(f"config.json has no head_dim, and {num_heads} heads do not divide hidden_size={hidden_size}")
    head_dim = _count(raw, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotary embedding")
    max_position = _count(raw, "max_position_embeddings", maximum=_LARGEST_POSITION)
    windows = _windows(raw, family, _count(raw, "num_hidden_layers", maximum=_MAX_LAYERS))
    ropes = {is_local: _rope(raw, family, is_local, head_dim, max_position) for is_local in set(map(bool, windows))}
    longest, usual = _lengths(max_position, set(ropes.values()), family)
    has_bias = _flag(raw, "attention_bias", default=False)
    experts = _experts(raw, family)
    sparse = _sparse_layers(raw, len(windows)) if experts is not None else set()
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerConfig(window, ropes[window > 0], i in sparse) for i, window in enumerate(windows)),
        experts=experts,
        rms_norm_eps=_number(raw, "rms_norm_eps", default=1e-6),
        qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=has_bias if family.qkv_bias is None else False,
        mlp_bias=_flag(raw, "mlp_bias", default=False),
        hidden_act=hidden_act,
        attention_scale=_number(raw, "query_pre_attn_scalar", default=head_dim) ** -0.5,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", default=False),
        max_position=longest,
        usual_max_position=usual,
        dtype=dtype,
        eos_token_ids=_eos_token_ids(generation) or _eos_token_ids(raw),
        generation=generation,
        fp8=_fp8(raw, family),
    )


def _fields_of_architecture(raw: dict[str, Any], directory: Path) -> tuple[str, dict[str, Any]]:
    """The architecture, and its fields with defaults. Raises a ValueError if a field that this architecture does not
    read would change the model."""
    found = _list(raw, "architectures")
    if not found:
        raise ValueError(f"config.json in {directory} has no architectures")
    architecture = next((name for name in found if isinstance(name, str) and name in FAMILIES), None)
    if architecture is None:
        remote = "; it needs code of its own (auto_map), which is never run" if raw.get("auto_map") else ""
        raise ValueError(
            f"{directory} holds the architecture {_shown(found)}{remote}; supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[architecture]
    # null is absent, except for a window: there it means none.
    given = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    raw = {**family.defaults, **given}
    for name in _REFUSED:
        if raw.get(name):
            raise ValueError(f"{name}={_shown(raw[name])} in config.json is not supported")
    for name, neutral in _OPTIONAL.items():
        if name not in family.reads and raw.get(name, neutral) != neutral:
            raise ValueError(f"{name}={_shown(raw[name])} in config.json is not supported for {architecture}")
    return architecture, raw


def _lengths(max_position: int, ropes: set[RopeConfig], family: Family) -> tuple[int, int]:
    """(most tokens that the model was made for, most tokens by default), where config.json says `max_position`."""
    # Llama 3's and LongRoPE's configs always name the length after stretching.
    kinds = () if family.names_stretched_length else ("linear", "yarn")
    longest = max(
        [max_position, *(int(rope.original_max_position * rope.factor) for rope in ropes if rope.kind in kinds)]
    )
    return longest, min([longest, *(rope.original_max_position for rope in ropes if rope.kind == "longrope")])


def _windows(raw: dict[str, Any], family: Family, num_layers: int) -> list[int]:
    """Each layer's sliding window, 0 for none."""
    has_window = raw.get("sliding_window") is not None
    if family.windows in ("upper", "switched"):
        has_window = has_window and _flag(raw, "use_sliding_window", default=False)
    if family.windows == "pattern":
        if not has_window:
            raise ValueError("sliding_window in config.json must be an integer: some layers need it")
        period = _count(raw, "sliding_window_pattern", default=6)
        is_local = [(index + 1) % period > 0 for index in range(num_layers)]
    else:
        first = {"none": num_layers, "all": 0, "switched": 0}.get(family.windows)
        if first is None:
            first = _count(raw, "max_window_layers", minimum=0)
        is_local = [has_window and index >= first for index in range(num_layers)]
    kinds = _list(raw, "layer_types")
    if kinds:
        if len(kinds) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
            raise ValueError(
                f"layer_types in config.json must say full_attention or sliding_attention for each of the "
                f"{num_layers} layers, not {_shown(kinds)}"
            )
        given = [kind == "sliding_attention" for kind in kinds]
        # transformers follows layer_types in these families alone.
        is_followed = family.windows in ("upper", "pattern") and (has_window or not any(given))
        if not is_followed and given != is_local:
            raise ValueError(
                f"layer_types={_shown(kinds)} in config.json does not fit "
                f"sliding_window={raw.get('sliding_window')} and use_sliding_window={raw.get('use_sliding_window')}"
            )
        is_local = given
    window = _count(raw, "sliding_window") if any(is_local) else 0
    return [window if local else 0 for local in is_local]


def _experts(raw: dict[str, Any], family: Family) -> ExpertsConfig | None:
    names = family.num_experts_names
    if not names:
        return None
    num_experts = _count(raw, next((name for name in names if name in raw), names[0]), maximum=_MAX_EXPERTS)
    has_own_size = "moe_intermediate_size" in family.reads
    size = _count(raw, "moe_intermediate_size" if has_own_size else "intermediate_size")
    top_k = _count(raw, "num_experts_per_tok", maximum=num_experts)
    # In families without this field a token's weights always add up to 1.
    renormalizes = "norm_topk_prob" not in family.reads or _flag(raw, "norm_topk_prob", default=False)
    return ExpertsConfig(num_experts, top_k, size, renormalizes)


def _sparse_layers(raw: dict[str, Any], num_layers: int) -> set[int]:
    """The layers with experts: all, unless Qwen's fields say otherwise."""
    period = _count(raw, "decoder_sparse_step", default=1)
    dense = _list(raw, "mlp_only_layers")
    if any(isinstance(index, bool) or not isinstance(index, int) for index in dense):
        raise ValueError(f"mlp_only_layers in config.json must be a list of layers' numbers, not {_shown(dense)}")
    return {index for index in range(num_layers) if (index + 1) % period == 0 and index not in dense}


def _rope_fields(raw: dict[str, Any], family: Family, is_local: bool) -> dict[str, Any]:
    """What config.json says of the rotary embedding of layers with or without a window.

    transformers 4: rope_theta and rope_scaling; 5: both in rope_parameters.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        is_nested = isinstance(given, dict) and not given.keys().isdisjoint(("full_attention", "sliding_attention"))
        if is_nested and family.has_local_rope:
            given = given.get("sliding_attention" if is_local else "full_attention") or {}
        elif is_local and family.has_local_rope and isinstance(given, dict):
            given = {}  # it speaks of the layers without a window
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise ValueError(f"{name} in config.json must be one object for all layers, not {_shown(given)}")
        found[name] = {"rope_type" if key == "type" else key: value for key, value in given.items()}
    fields = {**found["rope_parameters"], **found["rope_scaling"]}
    if found["rope_parameters"] and fields != found["rope_parameters"]:
        raise ValueError("rope_scaling and rope_parameters in config.json differ; keep only rope_parameters")
    if "partial_rotary_factor" not in family.reads and fields.get("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor in config.json is not supported for this architecture")
    return fields


def _rope(raw: dict[str, Any], family: Family, is_local: bool, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary embedding of layers with or without a window."""
    fields, has_own = _rope_fields(raw, family, is_local), is_local and family.has_local_rope
    theta_name = "rope_local_base_freq" if has_own else "rope_theta"
    theta = _number(fields, "rope_theta") if "rope_theta" in fields else _number(raw, theta_name, 1e4)
    partial = _number({**raw, **fields}, "partial_rotary_factor", default=1.0)
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor={partial} of head_dim={head_dim} in config.json must give an even "
            f"number of rotated columns, at least 2 and at most {head_dim}"
        )
    kind = fields.get("rope_type", "default")
    if kind == "su" or kind in family.longrope_names:
        kind = "longrope"
    if kind == "dynamic":
        kind = "default"  # changes nothing up to max_position_embeddings, and we go no further
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {_shown(kind)} is not supported; {', '.join(ROPE_KINDS)} and dynamic are")
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    name = "original_max_position_embeddings"
    original = _count({**fields, **raw}, name, default=max_position, minimum=2, maximum=_LARGEST_POSITION)
    is_implied = kind == "longrope" or (kind == "yarn" and name in fields)
    factor = _number(fields, "factor", default=max_position / original if is_implied else None)
    if factor < 1:
        raise ValueError(
            f"rope scaling {kind!r} needs a factor of at least 1, not {factor!r} (max_position_embeddings is "
            f"{max_position}, {name} {original})"
        )
    names = {"yarn": _YARN_NUMBERS, "llama3": _LLAMA3_NUMBERS, "longrope": ("attention_factor",)}.get(kind, ())
    numbers: dict[str, Any] = {name: _number(fields, name) for name in names if fields.get(name) or kind == "llama3"}
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta={theta} in config.json must be larger than 1 for yarn")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ValueError(f"low_freq_factor must be smaller than high_freq_factor in config.json, not {numbers}")
    if kind == "longrope":
        numbers.update({name: _numbers(fields, name, rotary_dim // 2) for name in ("short_factor", "long_factor")})
    truncate = _flag(fields, "truncate", default=True)
    return RopeConfig(theta, rotary_dim, kind, factor, original, truncate=truncate, **numbers)


def _fp8(raw: dict[str, Any], family: Family) -> Fp8Config | None:
    """What quantization_config says. Two kinds of FP8 are read: quant_method "fp8" with blocks, as Qwen and DeepSeek
    publish it, and compressed-tensors with a scale per channel or tensor and inputs that are quantized by row."""
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
            config = f"quant_method {_shown(method)} {problem}"
        if isinstance(config, Fp8Config):
            return replace(config, renames=family.renames)
        problem = config
    raise ValueError(
        f"quantization_config={_shown(given)} in config.json is not supported: {problem}; take weights that are not "
        'quantized (quantization="fp8" makes them FP8 while they load), or a checkpoint in an FP8 layout that '
        "docs/quantization.md lists"
    )


def _block_fp8(given: dict[str, Any]) -> Fp8Config | str:
    """The config, or what is wrong with it."""
    block = given.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(n) is int and 0 < n <= _LARGEST_SIZE for n in block)
        or block[1] % 32
    ):
        return (
            "weight_block_size must be two numbers such as [128, 128], the second a multiple of 32, not "
            f"{_shown(block)}; quant_method fp8 with one scale per tensor is not supported"
        )
    if (scheme := given.get("activation_scheme", "dynamic")) != "dynamic":
        return f"activation_scheme must be dynamic, not {_shown(scheme)}"
    if (kind := given.get("fmt", "e4m3")) != "e4m3":
        return f"fmt must be e4m3, not {_shown(kind)}"
    # transformers looks for these names anywhere at a dot, as parts of layers' names.
    ignored = tuple(rf"(^|\.){re.escape(name)}(\.|$)" for name in _names(given, "modules_to_not_convert"))
    return Fp8Config("weight_scale_inv", (block[0], block[1]), ignored=ignored)


def _compressed_fp8(given: dict[str, Any]) -> Fp8Config | str:
    """The config, or what is wrong with it."""
    if (kind := given.get("format")) not in ("float-quantized", None):
        return f"format {_shown(kind)} is not float-quantized"
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := next(iter(groups.values())), dict):
        return "config_groups must hold one group"
    if given.get("transform_config"):
        return "transform_config is set"
    sparsity = given.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        return "sparsity_config is set"
    if (kind := group.get("format")) not in ("float-quantized", None):
        return f"a group's format {_shown(kind)} is not float-quantized"
    if group.get("output_activations") is not None:
        return "output_activations are set"
    if given.get("kv_cache_scheme") is not None:
        return 'kv_cache_scheme asks for stored scales of keys and values; kv_cache_dtype="fp8" computes its own'
    if (targets := group.get("targets")) != ["Linear"]:
        return f'targets must be ["Linear"], not {_shown(targets)}'
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        return "a group must have weights and input_activations"
    for name, part in (("weights", weights), ("input_activations", inputs)):
        if (part.get("num_bits"), part.get("type")) != (8, "float") or part.get("symmetric") is not True:
            return f"{name} must be symmetric floats of 8 bits"
    if (strategy := weights.get("strategy")) not in ("channel", "tensor"):
        return f"the weights' strategy must be channel or tensor, not {_shown(strategy)}"
    if inputs.get("strategy") != "token" or inputs.get("dynamic") is not True:
        return "input_activations must be dynamic with the strategy token"
    ignored = tuple(
        name.removeprefix("re:") if name.startswith("re:") else rf"^{re.escape(name)}$"
        for name in _names(given, "ignore")
    )
    for pattern in ignored:
        try:
            re.compile(pattern)
        except re.error:
            return f"ignore holds {_shown(pattern)}, which is no regular expression"
    return Fp8Config("weight_scale", is_per_tensor=strategy == "tensor", ignored=ignored)


def _names(raw: dict[str, Any], name: str) -> list[str]:
    names = _list(raw, name)
    if not all(isinstance(each, str) for each in names):
        raise ValueError(f"{name} in config.json must be a list of layers' names, not {_shown(names)}")
    return names


def _eos_token_ids(raw: dict[str, Any]) -> frozenset[int]:
    given = raw.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {given!r}")
    return frozenset(ids)


def _list(raw: dict[str, Any], name: str) -> list[Any]:
    value = raw.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} in config.json must be a list, not {_shown(value)}")
    return value


def _given(raw: dict[str, Any], name: str, default: Any) -> Any:
    value = raw.get(name)
    return default if value is None else value


def _flag(raw: dict[str, Any], name: str, default: bool) -> bool:
    value = _given(raw, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} in config.json must be true or false, not {_shown(value)}")
    return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _given(raw, name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not _SMALLEST_NUMBER <= value <= _LARGEST_NUMBER
    ):
        limits = f"{_SMALLEST_NUMBER:g} to {_LARGEST_NUMBER:g}"
        raise ValueError(f"{name} in config.json must be a number from {limits}, not {_shown(value)}")
    return float(value)


def _numbers(raw: dict[str, Any], name: str, length: int) -> tuple[float, ...]:
    values = _list(raw, name)
    if len(values) != length:
        raise ValueError(f"{name} in config.json must hold {length} numbers, not {len(values)}")
    return tuple(_number({name: value}, name) for value in values)


def _count(
    raw: dict[str, Any], name: str, default: int | None = None, minimum: int = 1, maximum: int = _LARGEST_SIZE
) -> int:
    value = _given(raw, name, default)
    if value is None:
        raise ValueError(f"config.json has no {name}")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{name} in config.json must be an integer from {minimum} to {maximum}, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 100 else f"{shown[:40]}… ({len(shown)} characters)"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a ValueError that names the file if there is none."""
    if not path.exists():
        raise ValueError(f"{path} is missing; model must be a directory in the Hugging Face layout")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")  # a pipe would be waited for
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # unreadable, not UTF-8, not JSON, or nested too deep
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content
