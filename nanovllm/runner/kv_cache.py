"""The KV cache: its tensors, and how many blocks it gets. The number follows from what a GPU has left after the weights
and a trial of the largest step, or from a CPU's free RAM."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanovllm.config import Config
from nanovllm.models.cost import head_kv_bytes
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.quantize import E4M3

_GIB = 2**30
# A KV cache on a CPU takes at most half of the free memory, and no more than this unless one sequence needs it.
_USUAL_CPU_CACHE_BYTES = 4 * _GIB
# Left free on a GPU whatever else holds: kernels are loaded late, and other programs grow.
_GPU_MARGIN = _GIB // 2
# More sequences bring little (docs/performance.md), and fewer are better than ones that wait for blocks.
_MAX_SEQS_ON_GPU, _MAX_SEQS_ON_CPU, _MIN_SEQS, _TOKENS_OF_A_SEQUENCE = 1024, 512, 16, 256


@dataclass(frozen=True)
class KVCache:
    """The memory of all blocks, and the part of each layer.

    tensors: all there is, contiguous, each [num_parts, num_layers, num_blocks, …].
    layers: views of them.
    """

    tensors: tuple[torch.Tensor, ...]
    layers: list[LayerCache]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def zero_(self) -> "KVCache":
        for tensor in self.tensors:
            tensor.zero_()
        return self


@dataclass(frozen=True)
class KVCacheLayout:
    """The shape and dtype of a cache, except its number of blocks; `num_kv_heads` counts this rank's heads.

    dtype: float8_e4m3fn for a cache in FP8, whose keys are int8.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        return self.dtype == E4M3

    @property
    def block_bytes(self) -> int:
        head_bytes = head_kv_bytes(self.head_dim, self.dtype.itemsize)
        return self.num_layers * self.block_size * self.num_kv_heads * head_bytes

    def empty(self, num_blocks: int, device: torch.device) -> KVCache:
        """Keys, then values, then in FP8 their scales; LayerCache has the shapes. In FP8, keys and values begin as
        zeros, because an uninitialised byte may be NaN in e4m3. All else is uninitialised."""
        blocks, heads = (self.num_layers, num_blocks), self.num_kv_heads
        if not self.is_fp8:
            shape = 2, *blocks, self.block_size, heads, self.head_dim
            whole = torch.empty(shape, dtype=self.dtype, device=device)
            return KVCache((whole,), [LayerCache(*of_layer) for of_layer in zip(*whole, strict=True)])
        numbers = torch.zeros((2, *blocks, heads, self.block_size * self.head_dim), dtype=torch.int8, device=device)
        scales = torch.empty((1, *blocks, heads, self.block_size), dtype=torch.int32, device=device)
        keys = numbers[0].unflatten(-1, (self.block_size, self.head_dim))
        values = numbers[1].view(E4M3).unflatten(-1, (self.head_dim, self.block_size))
        of_layers = zip(keys, values, scales[0], strict=True)
        return KVCache((numbers, scales), [LayerCache(*of_layer) for of_layer in of_layers])


@dataclass(frozen=True)
class MemoryUse:
    """What was seen of the device's memory, in bytes.

    total: all there is; free_at_start: before anything was loaded; free: with weights and libraries loaded;
    activations: what the largest step takes while it runs; graphs: kept for captured steps.
    """

    total: int
    free_at_start: int
    free: int
    activations: int = 0
    graphs: int = 0


def num_kvcache_blocks(
    config: Config, memory: MemoryUse, block_bytes: int, blocks_of_longest: int, max_num_seqs: int, is_gpu: bool
) -> int:
    """Blocks of the KV cache: those asked for if they fit, else as many as fit and can be used.

    Args:
        block_bytes: of a block in all layers.
        blocks_of_longest: blocks of one sequence of max_model_len tokens.
        max_num_seqs: most sequences that run at a time.

    Raises:
        RuntimeError: too little memory; says how much is missing and what to lower.
    """
    if is_gpu:
        allowed = min(config.gpu_memory_utilization * memory.total, memory.free_at_start - _GPU_MARGIN)
        used = memory.free_at_start - memory.free + memory.activations + memory.graphs
        budget = allowed - used
    else:
        allowed = memory.free
        budget = min(allowed / 2, max(_USUAL_CPU_CACHE_BYTES, blocks_of_longest * block_bytes))
    wanted = config.num_kvcache_blocks
    if wanted is not None:
        limit = budget if is_gpu else allowed
        if wanted * block_bytes > limit:
            raise RuntimeError(
                f"num_kvcache_blocks={wanted} needs {(wanted * block_bytes - limit) / _GIB:.2f} GiB more than the "
                f"{max(limit, 0) / _GIB:.2f} GiB there are for it; lower it"
                + (" or raise gpu_memory_utilization" if is_gpu else "")
            )
        return wanted
    num_blocks = min(int(budget // block_bytes), max_num_seqs * blocks_of_longest)
    if num_blocks < blocks_of_longest:
        missing = blocks_of_longest * block_bytes - budget
        raise RuntimeError(
            f"the KV cache of one sequence of {blocks_of_longest} blocks (max_model_len) needs "
            f"{missing / _GIB:.2f} GiB more than the {max(budget, 0) / _GIB:.2f} GiB there are; lower max_model_len"
            + (
                f", max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization, or free the "
                f"{(memory.total - memory.free_at_start) / _GIB:.2f} GiB that other programs hold on the GPU"
                if is_gpu
                else ""
            )
        )
    return num_blocks


def check_weights_fit(weight_bytes: int, free: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises a RuntimeError, before anything is allocated, if a rank's weights need more bytes than are free for it."""
    if weight_bytes > free:
        raise RuntimeError(
            f"a rank's weights need about {weight_bytes / _GIB:.2f} GiB of {device} in {dtype}, but {free / _GIB:.2f} "
            "GiB are free for them; take a smaller model or dtype"
            + (" or a higher tensor_parallel_size" if device.type == "cuda" else "")
            + ", or check the sizes in config.json"
        )


def default_max_num_seqs(config: Config, weight_bytes: int, token_bytes: int, free: int, is_gpu: bool) -> int:
    """How many sequences run at a time by default: as many as keep the device busy, if the cache holds them.

    Args:
        weight_bytes: of the model, about.
        token_bytes: of one token's keys and values.
        free: bytes on the device before anything is loaded.
    """
    budget = config.gpu_memory_utilization * free - weight_bytes if is_gpu else min(free / 2, _USUAL_CPU_CACHE_BYTES)
    fitting = int(budget / token_bytes / _TOKENS_OF_A_SEQUENCE)
    most = _MAX_SEQS_ON_GPU if is_gpu else _MAX_SEQS_ON_CPU
    # A power of two, so that a little more or less memory seldom changes it.
    return max(_MIN_SEQS, min(most, 1 << max(fitting, 1).bit_length() - 1))


def measure_memory(
    run_step: Callable[[list[int]], None], num_tokens: int, max_num_seqs: int, free_at_start: int, device: torch.device
) -> MemoryUse:
    """Runs a step that is as large as any in tokens and in sampled rows, on a GPU with a cache of one block.

    Args:
        run_step: computes prompts of the given lengths and waits for them.
        num_tokens, max_num_seqs: most tokens and most sequences of a step.
        free_at_start: bytes that were free before anything was loaded.

    Returns:
        What it took; nothing is set aside for graphs yet.

    Raises:
        RuntimeError: the step does not fit.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    num_seqs = min(max_num_seqs, num_tokens)
    if num_tokens > num_seqs > 1:  # so that two tokens fit into a sequence
        run_step([1, 2])  # compiles what decodes beside prompts need
    torch.cuda.reset_peak_memory_stats(device)
    with explained_out_of_memory(f"a step of {num_tokens} tokens and {num_seqs} sampled rows", device):
        run_step([num_tokens // num_seqs + (index < num_tokens % num_seqs) for index in range(num_seqs)])
    activations = torch.cuda.max_memory_allocated(device) - allocated
    torch.cuda.empty_cache()
    # What libraries and kernels allocated during the step stays allocated.
    free = min(free, torch.cuda.mem_get_info(device)[0])
    return MemoryUse(total, free_at_start, free, activations)


@contextmanager
def explained_out_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """While this lasts, a GPU's lack of memory becomes a RuntimeError that says `what` did not fit, and what to do."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise RuntimeError(
            f"{what} does not fit into the GPU's memory, of which {free / _GIB:.2f} of {total / _GIB:.2f} GiB are "
            "free; lower max_num_batched_tokens or max_num_seqs, take a smaller model, or free what other "
            f"programs hold ({error})"
        ) from None
