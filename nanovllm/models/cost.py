"""Bytes and arithmetic of a model. Memory budgets, reports and rooflines all use these functions. No torch.

An `itemsize` is the number of bytes of one weight, and a `kv_itemsize` that of one number in the KV cache. A
`kv_itemsize` of 1 is a cache in FP8, which also holds scales. FLOP are floating-point operations: a multiplication and
an addition are two.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.models.config import ExpertsConfig, ModelConfig

_SCALE_BYTES = 4
# The ends of the names of layers whose weights may be in FP8.
_FP8_NAMES = ("_proj", ".in_proj_qkv", ".in_proj_z", ".in_proj_qkvz")
_MANY_TOKENS = 2**31  # a step of this many tokens reads every expert


class Matrix(NamedTuple):
    """A weight matrix of a layer, or several of the same shape: the gates and ups, or the downs, of its experts.

    name: our name of the layer that holds it, such as model.layers.0.self_attn.q_proj; for several, the first one's.
    num_read: how many of them a step reads.
    fp8: None if the matrix is not in FP8.
    """

    name: str
    num_rows: int
    num_columns: int
    num_read: float = 1
    fp8: Fp8Config | None = None

    @property
    def num_parameters(self) -> int:
        """How many numbers a step reads."""
        return round(self.num_read * self.num_rows * self.num_columns)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes that a step reads, scales included."""
        if self.fp8 is None:
            return self.num_parameters * itemsize
        rows, columns = self.fp8.block or (1, self.num_columns)
        num_scales = -(-self.num_rows // rows) * -(-self.num_columns // columns)
        return self.num_parameters + round(_SCALE_BYTES * self.num_read * num_scales)


# Weights


def layer_matrices(config: ModelConfig, num_tokens: int = _MANY_TOKENS) -> Iterator[Matrix]:
    """The weight matrices of the layers that a step of `num_tokens` tokens reads.

    The number of experts that a step reads is the mean if each expert is equally likely. One token chooses `top_k`, so
    with one token these are also the matrices that one token is multiplied with.
    """
    for index, layer in enumerate(config.layers):
        experts = config.experts if layer.has_experts else None
        mixer = _delta_net_matrices(config) if layer.is_recurrent else _attention_matrices(config)
        for matrix in (*mixer, *_mlp_matrices(config, experts, num_tokens)):
            name = f"model.layers.{index}.{matrix.name}"
            is_fp8 = config.fp8 is not None and name.endswith(_FP8_NAMES) and config.fp8.applies_to(name)
            yield matrix._replace(name=name, fp8=config.fp8 if is_fp8 else None)


def _attention_matrices(config: ModelConfig) -> list[Matrix]:
    num_q, num_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"q_proj": num_q * (1 + config.family.has_gates), "k_proj": num_kv, "v_proj": num_kv}
    if "qkv_proj" in config.family.stores_merged:
        sizes = {"qkv_proj": num_q + 2 * num_kv}
    inputs = [Matrix(f"self_attn.{name}", size, config.hidden_size) for name, size in sizes.items()]
    return [*inputs, Matrix("self_attn.o_proj", config.hidden_size, num_q)]


def _delta_net_matrices(config: ModelConfig) -> list[Matrix]:
    net, hidden_size = config.delta_net, config.hidden_size
    assert net is not None, "only a model with a DeltaNet has recurrent layers"
    num_values = net.num_value_heads * net.value_dim
    sizes = {"in_proj_qkv": net.num_channels, "in_proj_z": num_values}
    sizes |= {"in_proj_b": net.num_value_heads, "in_proj_a": net.num_value_heads}
    if "in_proj_qkvz" in config.family.stores_merged:
        sizes = {"in_proj_qkvz": net.num_channels + num_values, "in_proj_ba": 2 * net.num_value_heads}
    return [
        *(Matrix(f"linear_attn.{name}", size, hidden_size) for name, size in sizes.items()),
        Matrix("linear_attn.conv1d", net.num_channels, net.kernel_size),
        Matrix("linear_attn.out_proj", hidden_size, num_values),
    ]


def _mlp_matrices(config: ModelConfig, experts: ExpertsConfig | None, num_tokens: int) -> list[Matrix]:
    hidden_size = config.hidden_size
    if experts is not None:
        num_chosen = experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** num_tokens)
        return [
            Matrix("mlp.gate", experts.num_experts, hidden_size),
            Matrix("mlp.experts.0.gate_proj", experts.size, hidden_size, 2 * num_chosen),
            Matrix("mlp.experts.0.down_proj", hidden_size, experts.size, num_chosen),
            *_shared_matrices(hidden_size, experts.shared_size),
        ]
    if "gate_up_proj" in config.family.stores_merged:
        size = config.intermediate_size
        return [Matrix("mlp.gate_up_proj", 2 * size, hidden_size), Matrix("mlp.down_proj", hidden_size, size)]
    return _gated_mlp("mlp", hidden_size, config.intermediate_size)


def _shared_matrices(hidden_size: int, size: int) -> list[Matrix]:
    if not size:
        return []
    return [Matrix("mlp.shared_expert_gate", 1, hidden_size), *_gated_mlp("mlp.shared_expert", hidden_size, size)]


def _gated_mlp(name: str, hidden_size: int, size: int) -> list[Matrix]:
    inputs = [Matrix(f"{name}.{part}", size, hidden_size) for part in ("gate_proj", "up_proj")]
    return [*inputs, Matrix(f"{name}.down_proj", hidden_size, size)]


def num_layer_parameters(config: ModelConfig, num_tokens: int = _MANY_TOKENS) -> int:
    """How many numbers of the layers' weight matrices a step of `num_tokens` tokens reads."""
    return sum(matrix.num_parameters for matrix in layer_matrices(config, num_tokens))


def num_parameters(config: ModelConfig) -> int:
    """How many numbers all weight matrices hold, embedding and head included."""
    return num_layer_parameters(config) + _num_embedded(config) + _num_scoring(config)


def _num_embedded(config: ModelConfig) -> int:
    has_own_head = config.head == "lm" and not config.tie_word_embeddings
    return (1 + has_own_head) * config.vocab_size * config.hidden_size


def _num_projecting(config: ModelConfig) -> int:
    """How many numbers an LM head multiplies with."""
    return (config.head == "lm") * config.vocab_size * config.hidden_size


def _num_scoring(config: ModelConfig) -> int:
    """How many numbers a classification head has. They are float32, and each rank has them all."""
    return len(config.labels) * config.hidden_size


def weight_bytes(config: ModelConfig, itemsize: int, num_ranks: int = 1) -> int:
    """Bytes of the weight matrices of one rank."""
    in_layers = sum(matrix.num_bytes(itemsize) for matrix in layer_matrices(config))
    return (in_layers + _num_embedded(config) * itemsize) // num_ranks + _num_scoring(config) * 4


def step_weight_bytes(config: ModelConfig, itemsize: int, num_tokens: int) -> int:
    """Bytes of the weight matrices that a step of `num_tokens` tokens reads: those of the layers and the head."""
    in_layers = sum(matrix.num_bytes(itemsize) for matrix in layer_matrices(config, num_tokens))
    return in_layers + _num_projecting(config) * itemsize + _num_scoring(config) * 4


# Keys and values


def head_kv_bytes(head_dim: int, kv_itemsize: int) -> int:
    """Bytes of one token's key and value in one head, with their scales in FP8."""
    return 2 * head_dim * kv_itemsize + (_SCALE_BYTES if kv_itemsize == 1 else 0)


def token_kv_bytes(config: ModelConfig, kv_itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return config.num_attention_layers * config.num_key_value_heads * head_kv_bytes(config.head_dim, kv_itemsize)


def state_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one sequence's recurrent states and inputs of convolutions in all layers; see ops/delta_net.py."""
    if (net := config.delta_net) is None:
        return 0
    of_layer = 4 * net.num_value_heads * net.key_dim * net.value_dim + itemsize * net.kernel_size * net.num_channels
    return config.num_recurrent_layers * of_layer


def num_query_key_pairs(num_tokens: int, window: int = 0) -> int:
    """Query-key pairs of a prompt: each token sees itself and all tokens before it, or the last `window` of these."""
    growing = min(num_tokens, window or num_tokens)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * growing


def attention_flop(num_heads: int, head_dim: int, num_pairs: float) -> float:
    """FLOP of one layer's attention: per query-key pair and head, a product with the key and one with the value."""
    return 4 * num_heads * head_dim * num_pairs


# Steps


class StepWork(NamedTuple):
    """The numbers of one step that its cost depends on.

    num_tokens: new tokens of all rows.
    num_sampled: tokens that the head reads: those of rows that sample or are classified.
    num_keys: different keys that the rows with one new token attend to; the mean of the layers with attention.
    num_pairs: query-key pairs of the other rows; the mean of the layers with attention.
    num_states: sequences whose recurrent states are read, plus those whose states are written.
    """

    num_tokens: int
    num_sampled: int
    num_keys: float
    num_pairs: float
    num_states: int


class Rates(NamedTuple):
    """Rates of a chip, per second.

    bandwidth: bytes that are read or written.
    products, fp8_products: FLOP of matrix products in 16 bits and in FP8.
    """

    bandwidth: float
    products: float
    fp8_products: float

    def times(self, num_gpus: int) -> "Rates":
        return Rates(*(num_gpus * rate for rate in self))


class StepCost(NamedTuple):
    """Bytes and FLOP of one step.

    weight_bytes: see `step_weight_bytes`.
    kv_bytes: keys and values that the rows with one new token read.
    product_flop, fp8_product_flop: matrix products in 16 bits and more, and in FP8.
    attention_flop: attention of the other rows.
    state_bytes: recurrent states that the rows read and write, without the inputs of convolutions.
    """

    weight_bytes: float
    kv_bytes: float
    product_flop: float
    fp8_product_flop: float
    attention_flop: float
    state_bytes: float

    def product_seconds(self, rates: Rates) -> float:
        return self.product_flop / rates.products + self.fp8_product_flop / rates.fp8_products

    def seconds(self, rates: Rates) -> float:
        """The roofline: the time that the step takes at least on a chip of these rates.

        The step reads the keys and values, and reads and writes the states. It also reads the weights or computes,
        whichever takes longer.
        """
        arithmetic = self.product_seconds(rates) + self.attention_flop / rates.products
        return (self.kv_bytes + self.state_bytes) / rates.bandwidth + max(
            self.weight_bytes / rates.bandwidth, arithmetic
        )


def step_costs(config: ModelConfig, itemsize: int, kv_itemsize: int, steps: Sequence[StepWork]) -> list[StepCost]:
    """The cost of each step on all ranks together.

    Attention counts all queries in the last layer too, although the engine skips tiles of queries whose results are
    not needed. DeltaNets count their projections and convolutions.
    """
    last_layer = f"model.layers.{config.num_hidden_layers - 1}."
    inputs = ("q_proj", "k_proj", "v_proj", "qkv_proj", "conv1d")
    # Weights that each token is multiplied with, and further weights that each token that samples is multiplied with:
    # after the attention or DeltaNet of the last layer, a step computes only tokens that sample. The keys say whether
    # the weights are in FP8.
    by_token, by_sampled = Counter[bool](), Counter({False: _num_projecting(config) + _num_scoring(config)})
    for matrix in layer_matrices(config, 1):
        is_input = matrix.name.endswith(inputs) or ".in_proj_" in matrix.name
        is_of_sampled = matrix.name.startswith(last_layer) and not is_input
        (by_sampled if is_of_sampled else by_token)[matrix.fp8 is not None] += matrix.num_parameters
    num_bytes = {n: step_weight_bytes(config, itemsize, n) for n in {step.num_tokens for step in steps}}
    kv_bytes = token_kv_bytes(config, kv_itemsize)
    flop_per_pair = config.num_attention_layers * attention_flop(config.num_attention_heads, config.head_dim, 1)

    def product_flop(step: StepWork, is_fp8: bool) -> int:
        return 2 * (step.num_tokens * by_token[is_fp8] + step.num_sampled * by_sampled[is_fp8])

    return [
        StepCost(
            num_bytes[step.num_tokens],
            step.num_keys * kv_bytes,
            product_flop(step, False),
            product_flop(step, True),
            step.num_pairs * flop_per_pair,
            step.num_states * state_bytes(config, 0),
        )
        for step in steps
    ]


def roofline_seconds(costs: Iterable[StepCost], rates: Rates) -> float:
    """The time that steps of these costs take at least, one after the other."""
    return sum(cost.seconds(rates) for cost in costs)
