"""The engine's options: one frozen value, checked once. Start-up does not write its findings back here."""

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from nanovllm.accepted import EDIT_CONFIG
from nanovllm.checks import boolean, integer, real, seed_number, suggests_names
from nanovllm.pooling_params import pooler_config

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_NAMES = {
    "float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip
ATTENTION_BACKENDS = ("auto", "triton", "flash", "sdpa", "tiled", "torch")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("fp8",)
KV_CACHE_DTYPES = ("auto", "fp8")
RUNNERS = ("auto", "generate", "pooling")
# vLLM's earlier names, values of its option `task`.
_POOLING_TASKS = ("embed", "embedding", "classify", "reward", "score", "encode", "token_embed", "token_classify")
# The only hf_overrides that are taken.
_YES_OR_NO = {
    "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}  # fmt: skip
_MAX_LORAS, _MAX_LORA_RANK = 256, 512
_MAX_SIZE = 65535  # larger values gain nothing, and they set the sizes of memory and grids

# Other libraries' names for our options, or advice on options that we lack.
MEANT_OPTIONS = {
    "max_seq_len": "max_model_len",
    "max_length": "max_model_len",
    "max_seq_length": "max_model_len",
    "context_length": "max_model_len",
    "n_ctx": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "torch_dtype": "dtype",
    "cache_dtype": "kv_cache_dtype",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "num_gpus": "tensor_parallel_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "random_seed": "seed",
    "disable_cuda_graph": "enforce_eager",
    **dict.fromkeys(("max_tokens", "temperature", "top_p", "top_k", "stop"), "it is a parameter of SamplingParams"),
}


@suggests_names("option", MEANT_OPTIONS)
@dataclass(frozen=True)
class Config:
    """Options of an engine.

    Args:
        model: a directory in the Hugging Face layout, a hub name such as "Qwen/Qwen3-0.6B", or "bundled" for the small
            model that comes with nanovllm.
        tokenizer: directory or hub name of the tokenizer; None is the model's own.
        revision: branch, tag or commit of the model's hub name; it does not apply to a directory or to `tokenizer`.
        dtype: dtype of weights, activations and, by default, KV cache: "float32" ("float", "fp32"), "bfloat16"
            ("bf16"), "float16" ("half", "fp16"), or one of torch's; "auto" is the checkpoint's on a GPU, float32 on a
            CPU.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".
        attention_backend: "triton" (our own kernels, GPUs), "flash" (FlashAttention 2, GPUs, needs flash-attn),
            "sdpa" (PyTorch's own operators over gathered blocks, the fast one on a CPU), "tiled" (for CPUs, the
            same bits in every batch, see `deterministic`), "torch" (the plain reference) or "auto" (the fastest that
            can run).
        load_format: "auto" and "safetensors" read safetensors; "dummy" needs only config.json and makes random weights.
        quantization: "fp8" rounds the weights of linear layers to FP8 (e4m3) while they load, with a scale per output
            channel; their inputs are rounded too, with a scale per token. None takes the weights as they are stored,
            which may be FP8.
        kv_cache_dtype: "fp8" stores keys as int8 and values as e4m3, with one scale per token and head for each, in
            about half the bytes of 16-bit numbers; "auto" keeps them in `dtype`.
        max_model_len: maximum number of tokens of prompt + completion; None is the model's own limit, at most 32,768,
            and with LongRoPE at most the original length.
        max_num_batched_tokens: maximum number of tokens computed in one step; longer prompts are computed in chunks.
        max_num_seqs: maximum number of sequences that run at a time; None is 1,024 on a GPU and 512 on a CPU, or fewer
            if the KV cache is too small to hold 256 tokens of each.
        gpu_memory_utilization: fraction of a GPU's memory that weights, activations and KV cache may take.
        kvcache_block_size: tokens per block of the KV cache; None is the backend's own choice.
        num_kvcache_blocks: blocks in the KV cache per group of layers; None is as many as fit.
        tensor_parallel_size: GPUs of this host that one model is split over (on a CPU: processes).
        enforce_eager: never capture steps in CUDA graphs; starts sooner, runs slower.
        overlap: let the device run one step ahead of the host.
        enable_prefix_caching: share the KV blocks of equal prompt beginnings.
        prefix_grouping: attend a shared prefix once for all decodes that share it, if the backend can (triton, but not
            with `deterministic`).
        runner: "pooling" leaves out all that only generation needs: the LM head, captured decodes, and most of the KV
            cache; such an LLM embeds, classifies and scores. "auto" and "generate" keep it, so an LLM can do both.
            vLLM's names of tasks that pool, such as "embed", mean "pooling".
        pooler_config: how embeddings are made where a call does not say it, as in vLLM: {"pooling_type": "MEAN",
            "normalize": False}. None is what the checkpoint says.
        hf_overrides: only vLLM's way to load Qwen3-Reranker, {"architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}: `score` then joins query and
            document as they are, and asks for "yes" or "no" after them; the runner is "auto" then. Fields that only
            permit other `dimensions` are accepted.
        generation_config: what `sampling_params=None` means: "auto" is the recommendation of the model's
            generation_config.json, "vllm" the defaults of SamplingParams.
        queue_calls: let a call wait while another thread's call runs, instead of refusing it.
        deterministic: a request's tokens and log-probabilities depend on the weights, its prompt, its parameters and
            its seed alone, bit for bit, on one kind of device with the same versions and number of ranks; see
            docs/correctness.md. Slower.
        enable_lora: let calls take LoRA adapters; see docs/lora.md.
        max_loras: maximum number of adapters that one step computes side by side, each for its own rows. They take
            memory from the start. A call with one adapter merges it into the weights instead.
        max_lora_rank: maximum rank of adapters that are computed side by side. A merged adapter may have any rank.
        cache_canary: check in each step that every key a row reads was computed for that row's own tokens; see
            docs/correctness.md. A wrong one ends the call with an error. Takes 8 bytes more per token of the cache.
        seed: the seed from which requests without a seed derive theirs; −1 is 0.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of range, named with the range.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    # 132 processors (H100, H200) × 128 rows per tile: each has a tile in a product's last turn too.
    max_num_batched_tokens: int = 16896
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    overlap: bool = True
    enable_prefix_caching: bool = True
    prefix_grouping: bool = True
    runner: str = "auto"
    pooler_config: Any = None
    hf_overrides: Mapping[str, Any] | None = None
    generation_config: str = "auto"
    queue_calls: bool = False
    deterministic: bool = False
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    cache_canary: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, os.PathLike)) or not os.fspath(self.model):
            raise TypeError(f"model must be a directory or a hub name, not {self.model!r}")
        self._set("model", os.fspath(self.model))
        if self.tokenizer is not None:
            if not isinstance(self.tokenizer, (str, os.PathLike)) or not os.fspath(self.tokenizer):
                raise TypeError(f"tokenizer must be a directory or a hub name, not {self.tokenizer!r}")
            self._set("tokenizer", os.fspath(self.tokenizer))
        dtype = str(self.dtype).removeprefix("torch.")  # torch.bfloat16 and its like, without importing torch
        self._set("dtype", _DTYPE_NAMES.get(dtype, dtype))
        self._check_choice("dtype", DTYPES)
        self._check_choice("attention_backend", ATTENTION_BACKENDS)
        self._check_choice("load_format", LOAD_FORMATS)
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ValueError(f'quantization must be None or "fp8", not {self.quantization!r}; load another checkpoint')
        self._check_choice("kv_cache_dtype", KV_CACHE_DTYPES)
        self._check_choice("generation_config", ("auto", "vllm"))
        self._set("runner", "pooling" if self.runner in _POOLING_TASKS else self.runner)
        self._check_choice("runner", RUNNERS)
        if self.pooler_config is not None:
            self._set("pooler_config", pooler_config(self.pooler_config))
        if isinstance(self.hf_overrides, Mapping):
            # These only permit `dimensions`, which nanovllm always does.
            permits = ("is_matryoshka", "matryoshka_dimensions")
            self._set("hf_overrides", {key: each for key, each in self.hf_overrides.items() if key not in permits})
        if self.hf_overrides not in (None, {}, _YES_OR_NO):
            raise ValueError(f"hf_overrides cannot be {self.hf_overrides!r:.200}; {EDIT_CONFIG}")
        if self.hf_overrides:
            self._set("runner", "auto")  # it reads the LM head
        device = self.device if isinstance(self.device, str) else str(self.device)
        if device not in ("auto", "cpu", "cuda") and not re.fullmatch("cuda:[0-9]{1,3}", device):
            raise ValueError(f'device must be "auto", "cpu", "cuda" or "cuda:N", not {self.device!r}')
        self._set("device", device)
        if self.revision is not None and not isinstance(self.revision, str):
            raise TypeError(f"revision must be a string, not {self.revision!r}")
        for name in ("max_num_batched_tokens", "tensor_parallel_size", "max_loras", "max_lora_rank"):
            self._set(name, integer(name, getattr(self, name), minimum=1))
        for name in ("max_model_len", "max_num_seqs", "kvcache_block_size", "num_kvcache_blocks"):
            if getattr(self, name) is not None:
                self._set(name, integer(name, getattr(self, name), minimum=1))
        for name in ("max_num_seqs", "kvcache_block_size"):
            if (getattr(self, name) or 0) > _MAX_SIZE:
                raise ValueError(f"{name} must be at most {_MAX_SIZE}, not {getattr(self, name)}")
        for each in fields(self):
            if isinstance(each.default, bool):
                boolean(each.name, getattr(self, each.name))
        self._set("gpu_memory_utilization", real("gpu_memory_utilization", self.gpu_memory_utilization))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}")
        self._set("seed", 0 if integer("seed", self.seed) == -1 else seed_number(self.seed))
        for name, largest in (("max_loras", _MAX_LORAS), ("max_lora_rank", _MAX_LORA_RANK)):
            if getattr(self, name) > largest:
                raise ValueError(f"{name} must be at most {largest}, not {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2: one token of prompt and one of completion")
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise ValueError(
                f"device={self.device!r} is one GPU, but tensor_parallel_size={self.tensor_parallel_size} takes that "
                'many GPUs from the first on; use device="cuda", and CUDA_VISIBLE_DEVICES to choose which those are'
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")


def options_as_text() -> str:
    """The options with their meanings and defaults, as an indented part of a docstring."""
    text = (inspect.getdoc(Config) or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
    for each in fields(Config):
        if each.default is not MISSING:
            text = re.sub(f"(?m)^    {each.name}:", f"    {each.name} (default {each.default!r}):", text)
    return text
