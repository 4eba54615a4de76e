"""The checked numbers of one model's architecture, which `read_config.py` makes. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, NamedTuple

from nanovllm.layers.delta_net_config import DeltaNetConfig
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.rope_config import RopeConfig
from nanovllm.models.families import Family
from nanovllm.models.pooling_config import PoolingConfig
from nanovllm.models.wrappers import WRAPPERS

_MAX_DEFAULT_MODEL_LEN = 32768


# "lm": an LM head. "score": the head of a …ForSequenceClassification checkpoint. "none": only hidden states.
Head = Literal["lm", "score", "none"]
# What turns the scores of a classification head into probabilities; "none" keeps them.
ScoreActivation = Literal["softmax", "sigmoid", "none"]


class CachePlace(NamedTuple):
    """Where a layer's keys are in the KV cache.

    group: the group of layers whose block table it reads.
    part: its part of the group's blocks.
    """

    group: int
    part: int


def one_group(num_layers: int) -> tuple[CachePlace, ...]:
    """The places of layers that all have the same block table."""
    return tuple(CachePlace(0, part) for part in range(num_layers))


def cache_places(windows: Sequence[int]) -> tuple[CachePlace, ...]:
    """The places of layers with these windows; engine/block_manager.py says what a group is.

    Group 0 has all layers without a window, and each other group has at most as many layers with one. If all layers
    have a window, or more than half have none, there is one group, which keeps all keys.
    """
    num_full = sum(window == 0 for window in windows)
    num_windows = len(windows) - num_full
    if not 0 < num_full <= num_windows:
        return one_group(len(windows))
    # The fewest parts of blocks at a context of two windows. Some parts have no layer.
    sizes = [max(num_full, -(-num_windows // num_groups)) for num_groups in range(1, num_windows + 1)]
    size = min(sizes, key=lambda size: (2 + -(-num_windows // size)) * size)
    numbers = {False: count(), True: count(size)}
    return tuple(CachePlace(*divmod(next(numbers[window > 0]), size)) for window in windows)


class LayerConfig(NamedTuple):
    """The properties in which the layers of one model may differ.

    window: how many keys a query sees, its own included; 0 means all.
    has_experts: the layer has a mixture of experts instead of an MLP.
    is_recurrent: the layer is a gated DeltaNet instead of attention; see DeltaNetConfig.
    """

    window: int
    rope: RopeConfig
    has_experts: bool = False
    is_recurrent: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts in a model's layers.

    top_k: how many experts each token chooses.
    size: intermediate size of one expert's MLP.
    renormalizes: the weights of a token's experts are divided by their sum.
    shared_size: intermediate size of the expert that all tokens go through; 0 if there is none.
    """

    num_experts: int
    top_k: int
    size: int
    renormalizes: bool
    shared_size: int = 0


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
    attention_scale: float  # factor of the attention scores
    embedding_multiplier: float
    residual_multiplier: float  # factor of each block's output
    logits_scaling: float  # divisor of the logits
    tie_word_embeddings: bool
    max_position: int  # maximum number of tokens that the model was made for, scaling included
    usual_max_position: int  # the maximum that is used by default: beyond it, LongRoPE has other factors
    dtype: str | None  # dtype of the checkpoint, such as "bfloat16"
    eos_token_ids: frozenset[int]
    generation: dict[str, Any]  # generation_config.json, for the recommended sampling
    fp8: Fp8Config | None = None  # None if no weight is in FP8
    placeholders: Mapping[str, int] = field(default_factory=dict)  # see Wrapper
    delta_net: DeltaNetConfig | None = None  # None if no layer is recurrent
    head: Head = "lm"
    labels: tuple[str, ...] = ()  # of the classification head's rows; empty without one
    score_activation: ScoreActivation = "none"
    pooling: PoolingConfig | None = None  # None if the checkpoint is not an embedder of sentence-transformers
    pooling_refusal: str = ""  # why that part of the checkpoint cannot be followed

    @property
    def is_wrapped(self) -> bool:
        """The checkpoint may also have other parts than this text model."""
        return self.architecture in WRAPPERS or self.family.has_other_parts

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def num_recurrent_layers(self) -> int:
        return sum(layer.is_recurrent for layer in self.layers)

    @property
    def num_attention_layers(self) -> int:
        return self.num_hidden_layers - self.num_recurrent_layers

    @property
    def cache_places(self) -> tuple[CachePlace | None, ...]:
        """Each layer's place in the KV cache; None for a recurrent layer, which keeps no keys."""
        places = iter(cache_places([layer.window for layer in self.layers if not layer.is_recurrent]))
        return tuple(None if layer.is_recurrent else next(places) for layer in self.layers)

    def max_model_len(self, wanted: int | None) -> int:
        """Maximum number of tokens of prompt and completion together: `wanted`, or a default.

        Raises:
            ValueError: the model was made for fewer tokens.
        """
        if wanted is None:
            return min(self.usual_max_position, _MAX_DEFAULT_MODEL_LEN)
        if wanted > self.max_position:
            raise ValueError(
                f"max_model_len={wanted} exceeds the {self.max_position} tokens that the model was made for"
            )
        return wanted

    def for_runner(self, runner: str) -> "ModelConfig":
        """The config as the option `runner` wants it: "pooling" has no LM head.

        Raises:
            ValueError: the model has no LM head, and the runner is "generate".
        """
        if runner == "generate" and self.head != "lm":
            raise ValueError('runner="generate" needs a checkpoint with an LM head; leave it out to embed or classify')
        return self.without_lm_head() if runner == "pooling" else self

    def without_lm_head(self) -> "ModelConfig":
        """The same config, but an LM head is neither made nor loaded. A classification head stays."""
        return replace(self, head="none") if self.head == "lm" else self

    def without_idle_windows(self, max_model_len: int) -> "ModelConfig":
        """The same config, but windows that no sequence of `max_model_len` tokens can outgrow become 0."""
        layers = (layer if layer.window < max_model_len else layer._replace(window=0) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def check_parallel_size(self, size: int) -> None:
        """Checks that the model can be divided over `size` ranks.

        Raises:
            ValueError: it cannot; the message names the sizes that work.
        """
        of_experts = () if self.experts is None else (self.experts.size, self.experts.shared_size)
        mlp_sizes = {
            size
            for layer in self.layers
            for size in (filter(None, of_experts) if layer.has_experts else (self.intermediate_size,))
        }
        heads = {"attention heads": self.num_attention_heads}
        if self.delta_net is not None:
            heads["key heads of DeltaNets"] = self.delta_net.num_key_heads

        def divides(n: int) -> bool:
            num_kv_heads = self.num_key_value_heads  # several ranks may hold the same key/value head
            is_even = all(size % n == 0 for size in (*heads.values(), *mlp_sizes))
            return is_even and (num_kv_heads % n == 0 or n % num_kv_heads == 0)

        if not divides(size):
            sizes = ", ".join(str(n) for n in range(1, min(self.num_attention_heads, 64) + 1) if divides(n))
            numbers = ", ".join(f"{number} {name}" for name, number in heads.items())
            raise ValueError(
                f"the model cannot be divided over tensor_parallel_size={size}: it has {numbers}, "
                f"{self.num_key_value_heads} key/value heads and MLPs of size "
                f"{' and '.join(map(str, sorted(mlp_sizes)))}; sizes that work: {sizes}"
            )
