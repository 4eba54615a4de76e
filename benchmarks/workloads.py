"""The requests that bench.py measures, and models of random weights in the shapes of real ones."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm import SamplingParams

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "max_position_embeddings": 131072,
    "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
_GRANITE = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}  # fmt: skip
_OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 65536,
    "sliding_window": 4096,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    },
}  # fmt: skip
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "max_position_embeddings": 262144,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
_QWEN3_5_MOE = {
    **_QWEN3_5, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# Hidden size, layers, heads, key/value heads, head_dim, intermediate size, vocabulary, tied embeddings; then the fields
# that differ from Qwen3.
SIZES: dict[str, tuple[Any, ...]] = {
    "40M": (512, 8, 8, 4, 64, 1536, 32000, True),  # no published model; small enough for a CPU
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True),
    "4B": (2560, 36, 32, 8, 128, 9728, 151936, True),
    "8B": (4096, 36, 32, 8, 128, 12288, 151936, False),
    "14B": (5120, 40, 40, 8, 128, 17408, 151936, False),
    "32B": (5120, 64, 64, 8, 128, 25600, 151936, False),
    "30B-A3B": (2048, 48, 32, 4, 128, 6144, 151936, False, _QWEN3_MOE),
    "llama-1B": (2048, 16, 32, 8, 64, 8192, 128256, True, {**_LLAMA, "rope_parameters": {**_LLAMA3, "factor": 32.0}}),
    "llama-8B": (4096, 32, 32, 8, 128, 14336, 128256, False, {**_LLAMA, "rope_parameters": {**_LLAMA3, "factor": 8.0}}),
    "gemma3-4B": (2560, 34, 8, 4, 256, 10240, 262208, True, _GEMMA3),
    "granite-8B": (4096, 40, 32, 8, 128, 12800, 49159, True, _GRANITE),
    "olmo3-7B": (4096, 32, 32, 32, 128, 11008, 100278, False, _OLMO3),
    "qwen2.5-7B": (3584, 28, 28, 4, 128, 18944, 152064, False, _QWEN2),
    "qwen3.5-4B": (2560, 32, 16, 4, 256, 9216, 248320, True, _QWEN3_5),
    "qwen3.5-27B": (5120, 64, 24, 4, 256, 17408, 248320, False, {**_QWEN3_5, "linear_num_value_heads": 48}),
    "qwen3.5-35B-A3B": (2048, 40, 16, 2, 256, 512, 248320, False, _QWEN3_5_MOE),
}
# Options of bench.py that apply to the sampling of every request, by the names of SamplingParams.
SAMPLING_OPTIONS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "n": int,
    "logprobs": int,
}
_PREFIX_LENGTH = 1024


class Workload(NamedTuple):
    """The shape of some requests.

    prompt_lengths, output_lengths: minimum and maximum, both possible.
    num_prefixes: how many prefixes of 1,024 tokens the prompts share.
    max_model_len: for random weights; a real model has its own.
    n: completions per prompt.
    """

    num_seqs: int
    seed: int
    prompt_lengths: tuple[int, int]
    output_lengths: tuple[int, int]
    temperature: float = 0.6
    num_prefixes: int = 0
    max_model_len: int = 4096
    prefix_caching: bool = True
    n: int = 1


WORKLOADS = {
    "demo": Workload(64, 0, (8, 200), (8, 200), temperature=0.0),
    "nano": Workload(256, 0, (100, 1024), (100, 1024)),
    "big": Workload(2048, 7, (100, 1024), (100, 1024)),
    "prefix": Workload(2048, 1, (16, 128), (64, 256), num_prefixes=32),
    "short": Workload(8192, 5, (16, 64), (16, 64)),
    "one": Workload(1, 3, (128, 128), (512, 512)),
    "classify": Workload(2048, 31, (300, 1500), (1, 1)),
    "queries": Workload(65536, 41, (32, 32), (1, 1)),
    "samples": Workload(32, 35, (300, 900), (200, 400), n=32),
    "docs": Workload(64, 33, (8000, 16000), (32, 96), max_model_len=20000, prefix_caching=False),
    "ctx4k": Workload(384, 37, (2800, 3000), (200, 1000)),
}


@dataclass(frozen=True)
class Requests:
    """Prompts as token ids, the length of each completion, and the sampling of all, by the names of SamplingParams."""

    prompts: list[list[int]]
    max_tokens: list[int]
    sampling: dict[str, Any]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens) * self.sampling.get("n", 1)

    def sampling_params(self, make: Callable[..., Any] = SamplingParams, **more: Any) -> list[Any]:
        """The sampling of each request. Other engines have a class with the same names (`make`)."""
        options = {**self.sampling, "ignore_eos": True, **more}
        return [make(max_tokens=max_tokens, **options) for max_tokens in self.max_tokens]


def make_requests(
    workload: str, vocab_size: int, sampling: dict[str, Any] | None = None, embeds: bool = False
) -> Requests:
    """The requests of a workload. One seeded generator draws all prompts first, then all output lengths.

    embeds: the prompts are embedded, and nothing is generated.
    """
    shape = WORKLOADS[workload]
    max_id = min(10000, vocab_size - 1)
    rng = random.Random(shape.seed)

    def draw(length: int) -> list[int]:
        return [rng.randint(0, max_id) for _ in range(length)]

    prefixes = [draw(_PREFIX_LENGTH) for _ in range(shape.num_prefixes)]
    prompts = []
    for _ in range(shape.num_seqs):
        prefix = rng.choice(prefixes) if prefixes else []
        prompts.append(prefix + draw(rng.randint(*shape.prompt_lengths)))
    max_tokens = [rng.randint(*shape.output_lengths) for _ in range(shape.num_seqs)]
    max_tokens = [0] * shape.num_seqs if embeds else max_tokens
    several = {"n": shape.n} if shape.n > 1 else {}
    return Requests(prompts, max_tokens, {"temperature": shape.temperature, **several, **(sampling or {})})


def write_config(size: str, directory: Path) -> None:
    """Writes a config.json of the size's shape. load_format="dummy" needs no other file."""
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied, *more = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "intermediate_size": intermediate, "vocab_size": vocab, "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 40960, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }  # fmt: skip
    for fields in more:
        config |= fields
    (directory / "config.json").write_text(json.dumps(config))


def write_random_checkpoint(size: str, directory: Path) -> None:
    """Writes a checkpoint with random weights, for two engines that must load the same ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(size, directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    model.save_pretrained(directory)
