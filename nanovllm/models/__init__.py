"""The architectures and the one reader of their configuration."""

from torch import nn

from nanovllm.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[str, type[nn.Module]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
