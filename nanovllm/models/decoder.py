"""Every decoder, on one page: Llama's, with the differences that a Family's flags describe."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import LayerContext
from nanovllm.layers.delta_net import GatedDeltaNet
from nanovllm.layers.embed_head import ClassificationHead, ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.forms import Form, PendingProduct
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.norm import ProjectionNorm, QKNorm, ResidualAdd, RMSNorm
from nanovllm.layers.quantization import Formats
from nanovllm.layers.rope_config import RopeConfig
from nanovllm.layers.rotary_embedding import Rotary, RotaryEmbedding
from nanovllm.layers.shard import Rows, in_one_tensor
from nanovllm.models.config import ModelConfig
from nanovllm.ops.act_and_mul import triton_act_and_mul
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.fused_product import gated_product
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.low_rank import AdapterRows
from nanovllm.ops.row_invariant import PLAIN, RowOps


def residual_norm(config: ModelConfig, context: LayerContext, gives: Form = Form.PLAIN) -> RMSNorm:
    """A norm of the residual. The model keeps the residual divided by m, the residual multiplier. Then the outputs of
    blocks are added as they are. Norming x / m gives the same as norming x if eps is divided by m²."""
    eps = config.rms_norm_eps / config.residual_multiplier**2
    return RMSNorm(config.hidden_size, eps, context, config.family.norm_offset, gives)


class DecoderAttention(nn.Module):
    """accepts: the forms of inputs that it takes; gives: the forms of sums that the norm after it accepts."""

    def __init__(
        self, config: ModelConfig, layer_index: int, backend: AttentionBackend, formats: Formats, gives: Form,
        context: LayerContext,
    ):  # fmt: skip
        super().__init__()
        name, family = f"model.layers.{layer_index}.self_attn", config.family
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        stored_as = "qkv_proj" if "qkv_proj" in family.stores_merged else None
        stored = [stored_as] if stored_as else ["q_proj", "k_proj", "v_proj"]
        window, place = config.layers[layer_index].window, config.cache_places[layer_index]
        assert place is not None, "a layer with attention keeps keys"
        may_fuse = head_dim == config.layers[layer_index].rope.rotary_dim == 128
        self.attn = Attention(layer_index, backend, window, context.use_kernels, place.group, may_fuse)
        needs_plain = family.has_gates or family.qk_norm == "projection"
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, heads, kv_heads, config.qkv_bias, context, family.has_gates, stored_as,
            format=formats.of(name, *stored), gives=Form.PLAIN if needs_plain else self.attn.accepts,
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            heads * head_dim, config.hidden_size, config.o_bias, context, format=formats.of(name, "o_proj"),
            gives=gives,
        )  # fmt: skip
        self.accepts = self.qkv_proj.accepts
        self.qk_norm = self.projection_norm = None
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # of this rank
        self._sigmoid = context.row_ops.sigmoid
        self.has_gates, self.num_columns = family.has_gates, (num_heads + 2 * num_kv_heads) * head_dim
        if family.qk_norm == "head":
            self.qk_norm = QKNorm(num_heads, num_kv_heads, head_dim, config.rms_norm_eps, context, family.norm_offset)
        elif family.qk_norm == "projection":
            self.projection_norm = ProjectionNorm(self.qkv_proj.rows[:2], config.rms_norm_eps, context)

    def forward(self, hidden_states, rotary, kv_cache, metadata, needed=None, adapters=None, needed_adapters=None):
        qkv = self.qkv_proj(hidden_states, adapters)
        if self.projection_norm is not None:
            qkv = self.projection_norm(qkv)
        if self.has_gates:
            qkv, gates = qkv[:, : self.num_columns], qkv[:, self.num_columns :]
        attended = self.attn(qkv, self.qk_norm, rotary, kv_cache, metadata).flatten(1)
        if self.has_gates:
            attended = attended * self._sigmoid(gates)
        return self.o_proj(attended if needed is None else attended.index_select(0, needed), needed_adapters)


class DecoderMLP(nn.Module):
    """accepts: the forms of inputs that it takes; gives: the forms of sums that the norm after it accepts."""

    def __init__(self, config: ModelConfig, name: str, size: int, formats: Formats, gives: Form, context: LayerContext):
        super().__init__()
        hidden_size, bias = config.hidden_size, config.mlp_bias
        part = context.parallel.shard(size, "intermediate_size")
        rows = [Rows(key, size, *part) for key in ("gate_proj", "up_proj")]
        if "gate_up_proj" in config.family.stores_merged:
            rows = in_one_tensor("gate_up_proj", rows)
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias, context, format=formats.of(name, "down_proj"), gives=gives
        )
        # act_and_mul turns a ScaledProduct into rows in FP8, and gated_product makes plain rows.
        of_gate_up = Form.SCALED if Form.QUANTIZED in self.down_proj.accepts else Form.UNFINISHED
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, rows, bias, context, format=formats.of(name, *dict.fromkeys(each.key for each in rows)),
            gives=of_gate_up,
        )  # fmt: skip
        self.accepts = self.gate_up_proj.accepts
        self.hidden_act = config.hidden_act
        self._act_and_mul = triton_act_and_mul if context.use_kernels else context.row_ops.act_and_mul

    def forward(self, hidden_states, adapters=None):
        gate_up = self.gate_up_proj(hidden_states, adapters)
        if isinstance(gate_up, PendingProduct):
            return self.down_proj(gated_product(*gate_up, self.hidden_act))
        return self.down_proj(self._act_and_mul(gate_up, self.hidden_act), adapters)


class DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_index: int, backend: AttentionBackend, formats: Formats, context: LayerContext
    ):
        super().__init__()

        def norm_before(block: DecoderAttention | GatedDeltaNet | DecoderMLP | Experts) -> RMSNorm:
            return residual_norm(config, context, block.accepts)

        def norm_after() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, context, config.family.norm_offset)

        self.rope, self.is_recurrent = config.layers[layer_index].rope, config.layers[layer_index].is_recurrent
        self.has_post_norms = config.family.has_post_norms
        sums = Form.PLAIN if self.has_post_norms else RMSNorm.accepted_sums(context)
        mixer: DecoderAttention | GatedDeltaNet
        if self.is_recurrent:
            assert config.delta_net is not None
            mixer = self.linear_attn = GatedDeltaNet(
                layer_index, f"model.layers.{layer_index}.linear_attn", config.delta_net, config.hidden_size,
                config.rms_norm_eps, formats, sums, context, "in_proj_qkvz" in config.family.stores_merged,
            )  # fmt: skip
        else:
            mixer = self.self_attn = DecoderAttention(config, layer_index, backend, formats, sums, context)
        self.mlp = self._make_mlp(config, layer_index, formats, sums, context)
        has_pre_norms = config.family.has_pre_norms
        self.input_layernorm = norm_before(mixer) if has_pre_norms else ResidualAdd()
        if self.has_post_norms:  # the checkpoint's names: post_attention_layernorm comes before the addition then
            self.post_attention_layernorm, self.post_feedforward_layernorm = norm_after(), norm_after()
            self.pre_feedforward_layernorm = norm_before(self.mlp) if has_pre_norms else ResidualAdd()
        else:
            self.post_attention_layernorm = norm_before(self.mlp)

    @staticmethod
    def _make_mlp(
        config: ModelConfig, layer_index: int, formats: Formats, gives: Form, context: LayerContext
    ) -> DecoderMLP | Experts:
        name, experts, shared = f"model.layers.{layer_index}.mlp", config.experts, None
        if experts is None or not config.layers[layer_index].has_experts:
            return DecoderMLP(config, name, config.intermediate_size, formats, gives, context)
        if experts.shared_size:  # its output is added to that of the others before the ranks' sum
            shared = DecoderMLP(config, f"{name}.shared_expert", experts.shared_size, formats, Form.PLAIN, context)
        format = formats.of(f"{name}.experts.0", "gate_proj", "up_proj", "down_proj")  # all experts have the same
        return Experts(
            config.hidden_size, experts.size, experts.num_experts, experts.top_k, experts.renormalizes,
            config.hidden_act, context, format, shared,
        )  # fmt: skip

    def forward(self, output, residual, rotary, kv_cache, metadata, adapters=None, needed=None, keep=None):
        """(output of the layer before, residual) -> the same of this layer; see RMSNorm.reduce_add.

        adapters: the AdapterRows of all tokens; None if no token has an adapter.
        needed: int64 [num_needed], the tokens whose results are read; the results then have one row per needed token.
            None for all tokens. The cache always gets the keys and values, or the states, of all tokens.
        keep: a function that gets the layer's input, which may be overwritten later, or None.
        """
        hidden_states, residual = self.input_layernorm.reduce_add(output, residual)
        if keep is not None:
            keep(residual)
        mixer = self.linear_attn if self.is_recurrent else self.self_attn
        needed_adapters = None if adapters is None else adapters.at(needed)
        output = mixer(hidden_states, rotary[self.rope], kv_cache, metadata, needed, adapters, needed_adapters)
        if needed is not None:
            residual = residual.index_select(0, needed)
        if not self.has_post_norms:
            hidden_states, residual = self.post_attention_layernorm.reduce_add(output, residual)
            return self.mlp(hidden_states, needed_adapters), residual
        output = self.post_attention_layernorm.reduce(output)
        hidden_states, residual = self.pre_feedforward_layernorm.reduce_add(output, residual)
        return self.post_feedforward_layernorm.reduce(self.mlp(hidden_states, needed_adapters)), residual


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, context: LayerContext):
        super().__init__()
        family, hidden_size = config.family, config.hidden_size
        scale = config.embedding_multiplier / config.residual_multiplier  # see residual_norm
        if family.scales_embedding:
            scale *= torch.tensor(hidden_size**0.5, dtype=context.dtype, device="cpu").item()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden_size, context, scale)
        formats = Formats(config.fp8, context)
        layers = [DecoderLayer(config, index, backend, formats, context) for index in range(config.num_hidden_layers)]
        with_attention = next(layer for layer in layers if not layer.is_recurrent)
        self.num_kv_heads = with_attention.self_attn.qkv_proj.num_kv_heads  # of this rank
        self.layers = nn.ModuleList(layers)
        self.norm = residual_norm(config, context)
        self.has_post_norms = family.has_post_norms

    def forward(self, token_ids, rotary, kv_cache, metadata, adapters=None, needed=None, keeps=MappingProxyType({})):
        # The result of a norm after a block is whole, so the residual that it is added to must be whole too.
        embed = self.embed_tokens.reduce if self.has_post_norms else self.embed_tokens
        output, residual = embed(token_ids), None
        *others, last = self.layers
        for index, layer in enumerate(others):
            output, residual = layer(output, residual, rotary, kv_cache, metadata, adapters, keep=keeps.get(index))
        if needed is not None and not last.is_recurrent:
            metadata = [replace(of_group, query_tiles=of_group.sampled_tiles) for of_group in metadata]
        keep = keeps.get(len(others))
        output, residual = last(output, residual, rotary, kv_cache, metadata, adapters, needed, keep)
        return self.norm.reduce_add(output, residual)[0]


class CausalLM(nn.Module):
    """The model: a step calls `forward` on its tokens. On the hidden states of some, it calls `compute_logits` if the
    model's head is an LM head, and `score` if it is a ClassificationHead.

    Args:
        config: the architecture's numbers.
        max_position: positions are below it.
        backend: the attention backend.
        parallel, dtype, device, use_kernels, row_ops, max_loras, max_lora_rank: see LayerContext. Parameters are left
            uninitialised.
    """

    lm_head: ParallelLMHead | None
    score: ClassificationHead | None

    def __init__(
        self,
        config: ModelConfig,
        max_position: int,
        backend: AttentionBackend,
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        use_kernels: bool = False,
        row_ops: RowOps = PLAIN,
        max_loras: int = 0,
        max_lora_rank: int = 0,
    ):
        super().__init__()
        context = LayerContext(dtype, device, use_kernels, parallel, row_ops, max_loras, max_lora_rank)
        self.model = Decoder(config, backend, context)
        self.rotary_embs = {
            rope: RotaryEmbedding(config.head_dim, max_position, rope, dtype, device)
            for rope in dict.fromkeys(layer.rope for layer in config.layers)
        }
        self.num_kv_heads = self.model.num_kv_heads
        tied, self.head, self.lm_head, self.score = config.tie_word_embeddings, config.head, None, None
        if self.head == "lm":
            weight = self.model.embed_tokens.weight if tied else None
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context, weight)
        elif self.head == "score":
            self.score = ClassificationHead(len(config.labels), config.hidden_size, context)
        self.logits_scaling, self.residual_multiplier = config.logits_scaling, config.residual_multiplier
        self.renames, self.is_wrapped = config.family.renames, config.is_wrapped
        # Checkpoint tensor -> the tensor that it must equal if a tied model's checkpoint has both.
        self.tied_weights = {"lm_head.weight": "model.embed_tokens.weight"} if tied and self.head != "score" else {}

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: list[LayerCache],
        metadata: list[AttentionMetadata],
        adapters: AdapterRows | None = None,
        needed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: [num_tokens] -> hidden states [num_tokens, hidden_size]

        metadata: one per group of layers.
        adapters: those of the tokens; None if no token has one.
        needed: int64 [num_needed], indices of tokens; those of prompts must be in the `sampled_tiles`. The last
            layer computes results for them alone, and the hidden states are [num_needed, hidden_size]. None for all
            tokens. Must be None for ranks with an Exchange, whose residuals lack rows.
        """
        return self.model(token_ids, self._rotary(positions), kv_cache, metadata, adapters, needed)

    def states_of_layers(
        self,
        layers: Iterable[int],
        places: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: list[LayerCache],
        metadata: list[AttentionMetadata],
        adapters: AdapterRows | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The hidden states of all tokens, and the states [len(places), hidden_size] of layers before the final norm,
        numbered as in Pooling. Not for ranks with an Exchange, whose residuals lack rows.

        places: int64 [num_places], indices of tokens.
        """
        of_layers: dict[int, torch.Tensor] = {}

        def keep(layer: int, residual: torch.Tensor) -> None:
            states = residual.index_select(0, places)
            of_layers[layer] = states if self.residual_multiplier == 1 else states * self.residual_multiplier

        keeps = {layer: partial(keep, layer) for layer in layers}
        return self.model(token_ids, self._rotary(positions), kv_cache, metadata, adapters, keeps=keeps), of_layers

    def _rotary(self, positions: torch.Tensor) -> dict[RopeConfig, Rotary]:
        return {rope: embedding.lookup(positions) for rope, embedding in self.rotary_embs.items()}

    def variant_key(self, num_tokens: int) -> tuple[int, ...]:
        """A hashable key: steps whose keys differ need different compiled kernels."""
        choosers = (getattr(module, "variant_key", None) for module in self.model.modules())
        return tuple(choose(num_tokens) for choose in choosers if choose is not None)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size] -> this rank's columns of the logits; see ParallelLMHead."""
        assert self.lm_head is not None, "only a model with an LM head computes logits"
        return self.lm_head(hidden_states if self.logits_scaling == 1 else hidden_states / self.logits_scaling)
