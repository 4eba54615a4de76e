"""Every decoder, on one page: Llama's, and where a Family's flags say so, something else.

`kw` is where and how layers compute: dtype and device of parameters, and whether with our kernels (`use_kernels`).
`formats` says which layers have weights in FP8.
"""

from dataclasses import replace

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.norm import QKNorm, RMSNorm
from nanovllm.layers.quantization import Formats
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import ModelConfig
from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.layer_cache import LayerCache


class DecoderAttention(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        backend: AttentionBackend,
        parallel: Parallel,
        formats: Formats,
        use_kernels: bool,
        **kw,
    ):
        super().__init__()
        name = f"model.layers.{layer_index}.self_attn"
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        stored_as = "qkv_proj" if config.family.stores_merged else None
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, heads, kv_heads, config.qkv_bias, parallel, stored_as,
            use_kernels=use_kernels,
            format=formats.of(*(f"{name}.{x}" for x in ([stored_as] if stored_as else ["q_proj", "k_proj", "v_proj"]))),
            keeps_scales=not backend.reads_new_keys, **kw,
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            heads * head_dim, config.hidden_size, config.o_bias, parallel,
            takes_unfinished=not config.family.has_post_norms, use_kernels=use_kernels,
            format=formats.of(f"{name}.o_proj"), **kw,
        )  # fmt: skip
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # of this rank
        self.attn = Attention(layer_index, backend, config.layers[layer_index].window, use_kernels)
        self.qk_norm = None
        if config.family.qk_norm:  # Attention's kernel does its work, so it gets no use_kernels
            offset = config.family.norm_offset
            self.qk_norm = QKNorm(num_heads, num_kv_heads, head_dim, config.rms_norm_eps, offset=offset, **kw)

    def forward(self, hidden_states, rotary, kv_cache, metadata, needed=None):
        attended = self.attn(self.qkv_proj(hidden_states), self.qk_norm, rotary, kv_cache, metadata).flatten(1)
        return self.o_proj(attended if needed is None else attended.index_select(0, needed))


class DecoderMLP(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, parallel: Parallel, formats: Formats, **kw):
        super().__init__()
        name = f"model.layers.{layer_index}.mlp"
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        stored_as = "gate_up_proj" if config.family.stores_merged else None
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias, parallel, takes_unfinished=not config.family.has_post_norms,
            format=formats.of(f"{name}.down_proj"), **kw,
        )  # fmt: skip
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": size, "up_proj": size}, bias, parallel, stored_as=stored_as,
            format=formats.of(*(f"{name}.{x}" for x in ([stored_as] if stored_as else ["gate_proj", "up_proj"]))),
            keeps_scales=self.down_proj.takes_quantized, **kw,
        )  # fmt: skip
        self.takes_quantized = self.gate_up_proj.takes_quantized
        self.hidden_act = config.hidden_act

    def forward(self, hidden_states):
        gate_up = self.gate_up_proj(hidden_states)
        return self.down_proj(act_and_mul(gate_up, self.hidden_act, self.gate_up_proj.use_kernels))


class DecoderLayer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        backend: AttentionBackend,
        parallel: Parallel,
        formats: Formats,
        **kw,
    ):
        super().__init__()

        def norm(quantizes: bool = False) -> RMSNorm:
            size, eps, offset = config.hidden_size, config.rms_norm_eps, config.family.norm_offset
            return RMSNorm(size, eps, parallel=parallel, offset=offset, quantizes=quantizes, **kw)

        self.rope = config.layers[layer_index].rope
        self.self_attn = DecoderAttention(config, layer_index, backend, parallel, formats, **kw)
        self.mlp = self._make_mlp(config, layer_index, parallel, formats, **kw)
        self.has_post_norms = config.family.has_post_norms
        before_mlp = norm(quantizes=getattr(self.mlp, "takes_quantized", False))
        self.input_layernorm = norm(quantizes=self.self_attn.qkv_proj.takes_quantized)
        if self.has_post_norms:  # the checkpoint's names: post_attention_layernorm comes before the addition then
            self.post_attention_layernorm, self.post_feedforward_layernorm = norm(), norm()
            self.pre_feedforward_layernorm = before_mlp
        else:
            self.post_attention_layernorm = before_mlp

    @staticmethod
    def _make_mlp(config: ModelConfig, layer_index: int, parallel: Parallel, formats: Formats, **kw) -> nn.Module:
        experts = config.experts
        if experts is None or not config.layers[layer_index].has_experts:
            return DecoderMLP(config, layer_index, parallel, formats, **kw)
        name = f"model.layers.{layer_index}.mlp.experts.0"  # a checkpoint's experts are alike
        return Experts(
            config.hidden_size, experts.size, experts.num_experts, experts.top_k, experts.renormalizes,
            config.hidden_act, parallel, format=formats.of(*(f"{name}.{x}_proj" for x in ("gate", "up", "down"))), **kw,
        )  # fmt: skip

    def forward(self, output, residual, rotary, kv_cache, metadata, needed=None):
        """(output of the layer before, residual) -> the same of this layer; see RMSNorm.reduce_add.

        needed: int64 [num_needed], the tokens whose results are read; None for all. Results have one row per needed
            token then. The cache gets the keys and values of all tokens.
        """
        hidden_states, residual = self.input_layernorm.reduce_add(output, residual)
        output = self.self_attn(hidden_states, rotary[self.rope], kv_cache, metadata, needed)
        if needed is not None:
            residual = residual.index_select(0, needed)
        if not self.has_post_norms:
            hidden_states, residual = self.post_attention_layernorm.reduce_add(output, residual)
            return self.mlp(hidden_states), residual
        output = self.post_attention_layernorm.reduce(output)
        hidden_states, residual = self.pre_feedforward_layernorm.reduce_add(output, residual)
        return self.post_feedforward_layernorm.reduce(self.mlp(hidden_states)), residual


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, parallel: Parallel, **kw):
        super().__init__()
        family, hidden_size = config.family, config.hidden_size
        scale = hidden_size**0.5 if family.scales_embedding else 1.0
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden_size, parallel, scale=scale, **kw)
        formats = Formats(config.fp8, kw["dtype"], kw["device"])
        layers = [
            DecoderLayer(config, index, backend, parallel, formats, **kw) for index in range(config.num_hidden_layers)
        ]
        self.num_kv_heads = layers[0].self_attn.qkv_proj.num_kv_heads  # of this rank
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps, parallel=parallel, offset=family.norm_offset, **kw)
        self.has_post_norms = family.has_post_norms

    def forward(self, token_ids, rotary, kv_cache, metadata, needed=None):
        # What a norm after a block gives is whole, so the residual that it is added to must be whole too.
        embed = self.embed_tokens.reduce if self.has_post_norms else self.embed_tokens
        output, residual = embed(token_ids), None
        *layers, last = self.layers
        for layer in layers:
            output, residual = layer(output, residual, rotary, kv_cache, metadata)
        if needed is not None:
            metadata = replace(metadata, query_tiles=metadata.sampled_tiles)
        output, residual = last(output, residual, rotary, kv_cache, metadata, needed)
        return self.norm.reduce_add(output, residual)[0]


class CausalLM(nn.Module):
    """The model: a step calls `forward` on its tokens and `compute_logits` on the rows that sample.

    Args:
        config: the architecture's numbers.
        max_position: positions are below it.
        backend: the attention backend.
        parallel: this rank's place.
        dtype, device: of every parameter, which is left uninitialised.
        use_kernels: compute with our kernels instead of their plain twins.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_position: int,
        backend: AttentionBackend,
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        use_kernels: bool = False,
    ):
        super().__init__()
        kw = {"dtype": dtype, "device": device, "use_kernels": use_kernels}
        self.model = Decoder(config, backend, parallel, **kw)
        self.rotary_embs = {
            rope: RotaryEmbedding(config.head_dim, max_position, rope, dtype, device)
            for rope in dict.fromkeys(layer.rope for layer in config.layers)
        }
        self.num_kv_heads = self.model.num_kv_heads
        tied = config.tie_word_embeddings
        weight = self.model.embed_tokens.weight if tied else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, parallel, weight, **kw)
        self.renames = config.family.renames
        # Checkpoint tensor -> the one it must equal when a tied model stores it all the same.
        self.tied_weights = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: list[LayerCache],
        metadata: AttentionMetadata,
        needed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: [num_tokens] -> hidden states [num_tokens, hidden_size]

        needed: int64 [num_needed], indices of tokens; those of prompts must lie in `metadata.sampled_tiles`. The last
            layer computes results for them alone, and the hidden states are [num_needed, hidden_size]. None for all
            tokens. Must be None for ranks with an Exchange, whose residuals lack rows.
        """
        rotary = {rope: embedding.lookup(positions) for rope, embedding in self.rotary_embs.items()}
        return self.model(token_ids, rotary, kv_cache, metadata, needed)

    def variant_key(self, num_tokens: int) -> tuple[int, ...]:
        """What the layers choose by the number of tokens: steps in which it differs need different kernels."""
        choosers = (getattr(module, "variant_key", None) for module in self.model.modules())
        return tuple(choose(num_tokens) for choose in choosers if choose is not None)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size] -> this rank's columns of the logits; see ParallelLMHead."""
        return self.lm_head(hidden_states)
