"""Owns the device, the weights, the KV cache and the step."""

import logging
import os
from pathlib import Path

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, build_batch
from nanovllm.engine.runner import RunnerInfo
from nanovllm.engine.scheduler import Work
from nanovllm.kernels import AttentionShape, make_attention_backend
from nanovllm.layers.sampler import sample
from nanovllm.models import ARCHITECTURES
from nanovllm.models.config import load_model_config
from nanovllm.utils.distributed import Parallel
from nanovllm.utils.loader import fill_dummy_weights, find_model, load_weights

logger = logging.getLogger(__name__)

_GIB = 2**30
# A KV cache on a CPU takes at most half of the free memory, and no more than this unless one sequence needs it.
_USUAL_CPU_CACHE_BYTES = 4 * _GIB
# Larger steps only push the activations out of a CPU's caches.
_USEFUL_CPU_TOKENS = 2048
_LONGEST_DEFAULT_MODEL_LEN = 32768


class StepResult:
    """The tokens of a launched step: on the device now, on the host once `wait` returns."""

    def __init__(self, token_ids: torch.Tensor):
        self._event = None
        self._token_ids = token_ids
        if token_ids.is_cuda:
            self._token_ids = torch.empty_like(token_ids, device="cpu", pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._token_ids.tolist()


class ModelRunner:
    """Loads a model and runs its steps on one device.

    Raises:
        ValueError: an unknown or broken model, or an option that the model or the device cannot meet.
        RuntimeError: too little memory, or a device that is not there.
    """

    def __init__(self, config: Config, parallel: Parallel = Parallel()):  # noqa: B008 (frozen)
        self.device = _device(config.device)
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        self.model_config = model_config = load_model_config(directory, list(ARCHITECTURES))
        max_model_len = _max_model_len(config.max_model_len, model_config.max_position)
        self.dtype = _dtype(config.dtype, model_config.dtype, self.device)
        shape = AttentionShape(
            num_heads=model_config.num_attention_heads // parallel.size,
            num_kv_heads=max(1, model_config.num_key_value_heads // parallel.size),
            head_dim=model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self.backend = make_attention_backend(config.attention_backend, shape)
        self.block_size = config.kvcache_block_size or self.backend.default_block_size
        self.model = ARCHITECTURES[model_config.architecture](
            model_config, max_model_len, self.backend, parallel, self.dtype, self.device
        )
        if config.load_format == "dummy":
            fill_dummy_weights(self.model, config.seed)
        else:
            load_weights(self.model, directory)
        self._pack_weights()
        num_blocks = self._num_blocks(config, max_model_len)
        self.kv_cache = torch.empty(
            (
                2, model_config.num_hidden_layers, num_blocks, self.block_size,
                self.model.num_kv_heads, model_config.head_dim,
            ),
            dtype=self.dtype,
            device=self.device,
        )  # fmt: skip
        # The token that each running sequence sampled last, by slot: the next step reads it from here, so that
        # it need not wait for the host.
        self.last_token_ids = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self.info = RunnerInfo(
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=self.block_size,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            generation_config=model_config.generation,
            most_useful_batched_tokens=_USEFUL_CPU_TOKENS if self.device.type == "cpu" else 2**31,
        )
        logger.info(
            "%s on %s in %s, attention %s, %d KV cache blocks of %d tokens (%.2f GiB), max_model_len %d",
            model_config.architecture, self.device, self.dtype, self.backend.name, num_blocks, self.block_size,
            self.kv_cache.nbytes / _GIB, max_model_len,
        )  # fmt: skip

    @torch.inference_mode()
    def launch(self, work: Work) -> StepResult:
        """Starts the step that computes `work` and returns without waiting for the device."""
        batch = build_batch(work, self.block_size, self.info.vocab_size, self.device)
        batch.context.plan = self.backend.plan(batch.context)
        return StepResult(self.step(batch))

    def step(self, batch: Batch) -> torch.Tensor:
        """Embeds, runs the layers, projects the rows that sample, and samples: int64 [num_sampled]."""
        token_ids = batch.token_ids
        if batch.in_flight_rows is not None:
            token_ids[batch.in_flight_rows] = self.last_token_ids[batch.in_flight_slots]
        hidden_states = self.model(token_ids, batch.positions, self.kv_cache, batch.context)
        logits = self.model.compute_logits(hidden_states[batch.sampled_rows])
        sampled = sample(logits, batch.sampling)
        # A row without a token is −1, which is no index for the step that may follow before the host has seen it.
        self.last_token_ids[batch.sampled_slots] = sampled.clamp(min=0)
        return sampled

    def memory(self) -> dict[str, int]:
        """Bytes on the device by use."""
        weights = {parameter.data_ptr(): parameter.nbytes for parameter in self.model.parameters()}
        packed = sum(
            module.packed.nbytes for module in self.model.modules() if getattr(module, "packed", None) is not None
        )
        return {"weights": sum(weights.values()) + packed, "kv_cache": self.kv_cache.nbytes}

    def close(self) -> None:
        """Gives the device's memory back; calling it again does nothing."""
        self.model = self.kv_cache = self.last_token_ids = self.backend = None
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def _pack_weights(self) -> None:
        """Lets the linear layers trade their weights for a layout that the device multiplies faster."""
        for module in self.model.modules():
            if hasattr(module, "pack"):
                module.pack()

    def _num_blocks(self, config: Config, max_model_len: int) -> int:
        num_values = self.model_config.num_kv_values_per_token * self.model.num_kv_heads
        token_bytes = num_values // self.model_config.num_key_value_heads * self.dtype.itemsize
        block_bytes = self.block_size * token_bytes
        free_bytes = _free_bytes(self.device)
        if config.num_kvcache_blocks is not None:
            missing = config.num_kvcache_blocks * block_bytes - free_bytes
            if missing > 0:
                raise RuntimeError(
                    f"num_kvcache_blocks={config.num_kvcache_blocks} needs {missing / _GIB:.2f} GiB more than the "
                    f"{free_bytes / _GIB:.2f} GiB that are free; lower it"
                )
            return config.num_kvcache_blocks
        blocks_of_longest = -(-max_model_len // self.block_size)
        if self.device.type == "cuda":
            total_bytes = torch.cuda.mem_get_info(self.device)[1]
            # What a large step needs for its activations stays free.
            budget = (
                min(free_bytes, config.gpu_memory_utilization * total_bytes - (total_bytes - free_bytes)) - 2 * _GIB
            )
        else:
            budget = min(free_bytes / 2, max(_USUAL_CPU_CACHE_BYTES, blocks_of_longest * block_bytes))
        num_blocks = min(int(budget // block_bytes), config.max_num_seqs * blocks_of_longest)
        if num_blocks < blocks_of_longest:
            missing = blocks_of_longest * block_bytes - budget
            raise RuntimeError(
                f"the KV cache of one sequence of max_model_len={max_model_len} tokens needs {missing / _GIB:.2f} GiB "
                f"more than the {max(budget, 0) / _GIB:.2f} GiB there are for it; lower max_model_len"
                + (" or raise gpu_memory_utilization" if self.device.type == "cuda" else "")
            )
        return num_blocks


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f'device={name!r}, but PyTorch finds no GPU; use device="cpu"')
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise RuntimeError(f"device={name!r}, but there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _dtype(wanted: str, of_checkpoint: str | None, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        # CPUs compute bfloat16 slowly, and float32 loses nothing.
        wanted = "float32" if device.type == "cpu" else of_checkpoint or "bfloat16"
    dtype = getattr(torch, wanted, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f'the checkpoint\'s dtype is {wanted!r}; name float32, bfloat16 or float16 with dtype="…"')
    return dtype


def _max_model_len(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return min(limit, _LONGEST_DEFAULT_MODEL_LEN)
    if wanted > limit:
        raise ValueError(f"max_model_len={wanted} exceeds the {limit} tokens that the model was made for")
    return wanted


def _free_bytes(device: torch.device) -> int:
    """Memory that is free on the device; on a CPU, what the system and its control group (version 2) leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = min(free, int(fields["MemAvailable"].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup")
    limit, used, stat = (group / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        # Cached file pages, such as the checkpoint just read, are given up when memory is wanted.
        lines = stat.read_text().splitlines() if stat.exists() else []
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        free = min(free, int(limit.read_text()) - int(used.read_text()) + cached)
    return max(free, 0)
