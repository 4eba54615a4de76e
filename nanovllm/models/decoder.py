"""Every decoder, on one page. Today that is Qwen3 (dense) as transformers has it: pre-norm, QK-norm on every head,
grouped queries, SwiGLU.

`kw` is where and how layers compute: dtype and device of parameters, and whether with our kernels (`fused`).
"""

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.norm import QKNorm, RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import ModelConfig
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.silu_and_mul import silu_and_mul


class DecoderAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, backend: AttentionBackend, parallel: Parallel, **kw):
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim = head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, heads, kv_heads, config.attention_bias, parallel, **kw
        )
        self.o_proj = RowParallelLinear(heads * head_dim, config.hidden_size, config.attention_bias, parallel, **kw)
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # of this rank
        self.qk_norm = QKNorm(num_heads, num_kv_heads, head_dim, config.rms_norm_eps, **kw)
        self.attn = Attention(layer_index, backend)

    def forward(self, hidden_states, rotary, kv_cache, metadata):
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # [num_tokens, all heads, head_dim]
        return self.o_proj(self.attn(qkv, self.qk_norm, rotary, kv_cache, metadata).flatten(1))


class DecoderMLP(nn.Module):
    def __init__(self, config: ModelConfig, parallel: Parallel, **kw):
        super().__init__()
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, sizes, False, parallel, **kw)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, False, parallel, **kw)

    def forward(self, hidden_states):
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden_states), self.gate_up_proj.fused))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, backend: AttentionBackend, parallel: Parallel, **kw):
        super().__init__()
        self.self_attn = DecoderAttention(config, layer_index, backend, parallel, **kw)
        self.mlp = DecoderMLP(config, parallel, **kw)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, parallel=parallel, **kw)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, parallel=parallel, **kw)

    def forward(self, partial, residual, rotary, kv_cache, metadata):
        """(output of the layer before, residual) -> the same of this layer; an output is a PartialSum."""
        hidden_states, residual = self.input_layernorm.reduce_add(partial, residual)
        partial = self.self_attn(hidden_states, rotary, kv_cache, metadata)
        hidden_states, residual = self.post_attention_layernorm.reduce_add(partial, residual)
        return self.mlp(hidden_states), residual


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, parallel: Parallel, **kw):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel, **kw)
        layers = [DecoderLayer(config, index, backend, parallel, **kw) for index in range(config.num_hidden_layers)]
        self.num_kv_heads = layers[0].self_attn.qkv_proj.num_kv_heads  # of this rank
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, parallel=parallel, **kw)

    def forward(self, token_ids, rotary, kv_cache, metadata):
        partial, residual = self.embed_tokens(token_ids), None
        for layer in self.layers:
            partial, residual = layer(partial, residual, rotary, kv_cache, metadata)
        return self.norm.reduce_add(partial, residual)[0]


class CausalLM(nn.Module):
    """The model: a step calls `forward` on its tokens and `compute_logits` on the rows that sample.

    Args:
        config: the architecture's numbers.
        max_position: positions are below it.
        backend: the attention backend.
        parallel: this rank's place.
        dtype, device: of every parameter, which is left uninitialised.
        fused: compute with our kernels instead of their plain twins.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_position: int,
        backend: AttentionBackend,
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool = False,
    ):
        super().__init__()
        kw = {"dtype": dtype, "device": device, "fused": fused}
        self.model = Decoder(config, backend, parallel, **kw)
        self.rotary_emb = RotaryEmbedding(config.head_dim, max_position, config.rope, dtype, device)
        self.num_kv_heads = self.model.num_kv_heads
        tied = config.tie_word_embeddings
        weight = self.model.embed_tokens.weight if tied else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, parallel, weight, **kw)
        # Checkpoint tensor -> the one it must equal when a tied model stores it all the same.
        self.tied_weights = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids, positions: [num_tokens] -> hidden_states [num_tokens, hidden_size]"""
        return self.model(token_ids, self.rotary_emb.lookup(positions), kv_cache, metadata)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size] -> this rank's columns of the logits; see ParallelLMHead."""
        return self.lm_head(hidden_states)
