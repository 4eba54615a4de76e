"""Settings: all that a runner knows of its model and its device before it allocates anything."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanovllm.config import Config
from nanovllm.engine.block_manager import NO_STATES, Snapshots
from nanovllm.machine import free_bytes
from nanovllm.models.config import ModelConfig
from nanovllm.models.cost import state_bytes, token_kv_bytes, weight_bytes
from nanovllm.models.directory import find_model
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.kernel import has_kernels
from nanovllm.runner.device import check_can_be_deterministic, dtype_of, fp8_of, kv_cache_dtype_of, rank_device
from nanovllm.runner.memory import (
    check_states_fit,
    check_weights_fit,
    default_max_num_seqs,
    num_snapshots,
    num_states,
)

# A chunk that ends at a snapshot may cost one more step. It takes as long as some hundred tokens of a prompt on a GPU,
# and as some tens on a CPU.
_MIN_SAVED_TOKENS = {"cuda": 512, "cpu": 64}


@dataclass(frozen=True)
class Settings:
    """The options, the checkpoint's config and the machine, brought together.

    config: the options.
    parallel: this rank's place.
    directory: the model's directory.
    model_config: with the weights' format that was asked for, and without windows that no sequence outgrows.
    device, dtype: those of weights and activations.
    kv_cache_dtype: see KVCacheLayout.
    max_model_len, max_num_seqs: the limits that the engine keeps to.
    snapshots: how the prefix cache keeps recurrent states.
    use_kernels: compute with our kernels.
    """

    config: Config
    parallel: Parallel
    directory: Path
    model_config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    snapshots: Snapshots
    use_kernels: bool

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def generates(self) -> bool:
        """Whether the model has an LM head. Without it, steps only pool."""
        return self.model_config.head == "lm"

    @property
    def num_states(self) -> int:
        """The number of recurrent states: one per entry, one for padding rows, and the snapshots."""
        return num_states(self.max_num_seqs, self.snapshots)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step: no sequence computes its last possible token."""
        return min(self.config.max_num_batched_tokens, self.max_num_seqs * (self.max_model_len - 1))

    @property
    def adapter_room(self) -> tuple[int, int]:
        """`max_loras` and `max_lora_rank`, as LayerContext has them."""
        return (self.config.max_loras, self.config.max_lora_rank) if self.config.enable_lora else (0, 0)

    def free_bytes(self) -> int:
        """This rank's share of the memory that is free."""
        return _free_share(self.device, self.parallel)


def read_settings(config: Config, parallel: Parallel) -> Settings:
    """The settings of one rank.

    Raises:
        ValueError: an unknown or broken model, or an option that the model or the device cannot meet.
        RuntimeError: the weights do not fit, or the device is not there.
    """
    device = rank_device(config.device, parallel.rank, parallel.size)
    is_gpu = device.type == "cuda"
    directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
    model_config = load_model_config(directory).for_runner(config.runner)
    max_model_len = model_config.max_model_len(config.max_model_len)
    dtype = dtype_of(config.dtype, model_config.dtype, device)
    kv_cache_dtype = kv_cache_dtype_of(config.kv_cache_dtype, dtype, device)
    if config.deterministic:
        check_can_be_deterministic(model_config, device, parallel.size)
    fp8 = fp8_of(config.quantization, model_config.fp8, dtype, device)
    model_config = replace(model_config.without_idle_windows(max_model_len), fp8=fp8)
    num_bytes = weight_bytes(model_config, dtype.itemsize, parallel.size)
    check_weights_fit(num_bytes, _free_share(device, parallel), dtype, device)
    of_states = state_bytes(model_config, dtype.itemsize) // parallel.size
    max_num_seqs = config.max_num_seqs
    if max_num_seqs is None:
        token_bytes = -(-token_kv_bytes(model_config, kv_cache_dtype.itemsize) // parallel.size)
        free = _free_share(device, parallel)
        generates = model_config.head == "lm"
        chosen = default_max_num_seqs(config, num_bytes, token_bytes, of_states, free, is_gpu, generates)
        max_num_seqs = parallel.minimum(chosen, device)
    snapshots = NO_STATES
    if of_states:
        snapshots = Snapshots(True, num_snapshots(config, max_num_seqs), _MIN_SAVED_TOKENS[device.type])
        check_states_fit(of_states, max_num_seqs, snapshots, _free_share(device, parallel) - num_bytes, device)
    # On a CPU, Triton's interpreter runs the kernels, for tests. The plain backend is plain all the way through.
    wanted = config.attention_backend
    use_kernels = has_kernels() and (wanted == "triton" or (is_gpu and wanted != "torch"))
    return Settings(
        config, parallel, directory, model_config, device, dtype, kv_cache_dtype, max_model_len, max_num_seqs,
        snapshots, use_kernels,
    )  # fmt: skip


def _free_share(device: torch.device, parallel: Parallel) -> int:
    """Free bytes for this rank: each rank has its own GPU, or all ranks share one CPU."""
    return free_bytes(device) // (1 if device.type == "cuda" else parallel.size)
