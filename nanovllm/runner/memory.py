"""Memory budgets: how many blocks the KV cache gets, and which sizes fit.

The number of blocks follows from the memory that a GPU has left after the weights and a trial of the largest step, or
from a CPU's free RAM.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanovllm.config import Config
from nanovllm.engine.block_manager import Snapshots
from nanovllm.ops.collectives import Parallel
from nanovllm.runner.step_sizes import StepSizes

_GIB = 2**30
# A KV cache on a CPU takes at most half of the free memory, and with recurrent states no more than this, unless one
# sequence needs it.
_USUAL_CPU_CACHE_BYTES = 4 * _GIB
# Always left free on a GPU, because kernels are loaded late and other programs grow.
_GPU_MARGIN = _GIB // 2
# More sequences gain little (docs/record.md), and fewer are better than sequences that wait for blocks.
_MAX_SEQS_ON_GPU, _MAX_SEQS_ON_CPU, _MIN_SEQS, _TOKENS_OF_A_SEQUENCE = 1024, 512, 16, 256
_STEPS_OF_KEYS = 4  # Without generation, the cache holds the keys of so many of the largest steps.
# Few prefixes are shared at a time, and a snapshot is as large as the state of a sequence that runs.
_SEQS_PER_SNAPSHOT = 8


@dataclass(frozen=True)
class MemoryUse:
    """The device's memory as it was measured, in bytes.

    total: all of it.
    free_at_start: free before anything was loaded.
    free: free with weights and libraries loaded.
    activations: taken by the largest step while it runs.
    graphs: kept for captured steps.
    states: recurrent states. On a CPU they are part of `free`, because memory is taken when it is first written.
    """

    total: int
    free_at_start: int
    free: int
    activations: int = 0
    graphs: int = 0
    states: int = 0


def num_kvcache_blocks(
    config: Config,
    memory: MemoryUse,
    block_bytes: int,
    blocks_of_longest: int,
    num_useful: int,
    is_gpu: bool,
    num_groups: int = 1,
) -> int:
    """Blocks of the KV cache in all groups of layers: as many per group as the option says, else as many as fit and can
    be used.

    Args:
        block_bytes: bytes of a block in all layers of its group.
        blocks_of_longest: blocks, in all groups, of one sequence of max_model_len tokens.
        num_useful: blocks, in all groups, that the sequences can use.
        num_groups: groups of layers.

    Raises:
        RuntimeError: too little memory; the message says how much is missing and which option to lower.
    """
    if is_gpu:
        allowed = min(config.gpu_memory_utilization * memory.total, memory.free_at_start - _GPU_MARGIN)
        used = memory.free_at_start - memory.free + memory.activations + memory.graphs
        budget = allowed - used
    else:
        allowed = memory.free - memory.states
        budget = min(allowed / 2, max(_USUAL_CPU_CACHE_BYTES - memory.states, blocks_of_longest * block_bytes))
    if config.num_kvcache_blocks is not None:
        limit, wanted = budget if is_gpu else allowed, config.num_kvcache_blocks * num_groups
        missing = wanted * block_bytes - limit
        if missing > 0:
            raise RuntimeError(
                f"num_kvcache_blocks={config.num_kvcache_blocks} needs {missing / _GIB:.2f} GiB more than the "
                f"{max(limit, 0) / _GIB:.2f} GiB there are for it; lower it"
                + (" or raise gpu_memory_utilization" if is_gpu else "")
            )
        return wanted
    num_blocks = min(int(budget // block_bytes), num_useful)
    if num_blocks < blocks_of_longest:
        missing = blocks_of_longest * block_bytes - budget
        raise RuntimeError(
            f"the KV cache of one sequence of {blocks_of_longest} blocks (max_model_len) needs "
            f"{missing / _GIB:.2f} GiB more than the {max(budget, 0) / _GIB:.2f} GiB there are; lower max_model_len"
            + " or max_num_batched_tokens" * (num_groups > 1 and not is_gpu)
            + " or max_num_seqs" * (memory.states > 0 and not is_gpu)
            + (
                f", max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization, or free the "
                f"{(memory.total - memory.free_at_start) / _GIB:.2f} GiB that other programs hold on the GPU"
                if is_gpu
                else ""
            )
        )
    return num_blocks


def num_useful_blocks(
    blocks_of_longest: int, block_size: int, num_groups: int, max_step_tokens: int, max_num_seqs: int, generates: bool
) -> int:
    """Blocks, in all groups, that the sequences can use.

    Without generation these are the prompts of two steps in flight, each with a last block that is partly used, and as
    much for prefixes that later prompts share.
    """
    if generates:
        return max_num_seqs * blocks_of_longest
    of_steps = _STEPS_OF_KEYS * -(-max_step_tokens // block_size)
    return blocks_of_longest + (of_steps + max_num_seqs // 2) * num_groups


def graph_bytes(
    activations: int, num_tokens: int, sizes: StepSizes, vocab_size: int, itemsize: int, parallel: Parallel
) -> int:
    """Bytes to set aside for captured steps: kernels' code, memory that the steps keep, memory of logits processors,
    and the largest step's activations twice (trial and capture).

    activations: bytes of a step of `num_tokens` tokens.
    """
    if not sizes.are_captured:
        return 0
    # Per logit: itself, the float32 copy of the logits processors, and their int32 count of tokens. NCCL receives
    # another rank's columns before they are put in order.
    logit_bytes = (3 if parallel.calls_nccl else 1) * itemsize + 4 + 4
    num_rows = sizes.padded_sampled(sizes.max_num_rows) // parallel.size
    num_bytes = _GIB // 2 + num_rows * vocab_size * logit_bytes
    if sizes.prompt_sizes:
        num_bytes += 2 * activations * sizes.prompt_sizes[-1] // num_tokens
    return num_bytes


def check_graphs_fit(min_free: int, free: int) -> None:
    """Raises a RuntimeError if the captured graphs left fewer bytes free than other things need."""
    if free < min_free:
        raise RuntimeError(
            f"CUDA graphs, or another program, took {(min_free - free) / _GIB:.2f} GiB more GPU memory than was set "
            "aside for them; lower max_num_seqs or use enforce_eager=True"
        )


def check_room_to_wake_up(weights: int, kv_cache: int, step: int, free: int, device: torch.device) -> None:
    """Raises a RuntimeError if the sleeping model does not fit; all numbers are bytes."""
    needed = weights + kv_cache + step
    if needed > free:
        raise RuntimeError(
            f"waking up needs {needed / _GIB:.2f} GiB of {device} ({weights / _GIB:.2f} for weights, "
            f"{kv_cache / _GIB:.2f} for the KV cache), but {free / _GIB:.2f} GiB are free; free what others hold "
            "and call wake_up() again"
        )


def check_weights_fit(weight_bytes: int, free: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises a RuntimeError, before anything is allocated, if a rank's weights need more bytes than are free for it."""
    if weight_bytes > free:
        raise RuntimeError(
            f"a rank's weights need about {weight_bytes / _GIB:.2f} GiB of {device} in {dtype}, but {free / _GIB:.2f} "
            "GiB are free for them; take a smaller model or dtype"
            + (" or a higher tensor_parallel_size" if device.type == "cuda" else "")
            + ", or check the sizes in config.json"
        )


def check_states_fit(
    state_bytes: int, max_num_seqs: int, snapshots: Snapshots, free: int, device: torch.device
) -> None:
    """Raises a RuntimeError, before anything is allocated, if the recurrent states need more bytes than are free."""
    needed = num_states(max_num_seqs, snapshots) * state_bytes
    if needed > free:
        raise RuntimeError(
            f"max_num_seqs={max_num_seqs} needs {needed / _GIB:.2f} GiB of {device} for recurrent states, of which "
            f"{snapshots.num_snapshots} are for cached prefixes, but {max(free, 0) / _GIB:.2f} GiB are free beside the "
            f"weights; lower max_num_seqs: each sequence needs {state_bytes / 2**20:.1f} MiB"
        )


def num_states(max_num_seqs: int, snapshots: Snapshots) -> int:
    """The number of recurrent states: one per entry, one for padding rows, and the snapshots."""
    return max_num_seqs + 1 + snapshots.num_snapshots


def num_snapshots(config: Config, max_num_seqs: int) -> int:
    """How many recurrent states the prefix cache keeps."""
    return max(4, max_num_seqs // _SEQS_PER_SNAPSHOT) if config.enable_prefix_caching else 0


def default_max_num_seqs(
    config: Config,
    weight_bytes: int,
    token_bytes: int,
    state_bytes: int,
    free: int,
    is_gpu: bool,
    generates: bool = True,
) -> int:
    """How many sequences run at a time by default: as many as keep the device busy, if the cache holds them. Without
    generation a sequence lasts for one step; two steps overlap, so the number doubles.

    Args:
        weight_bytes: approximate bytes of the model's weights.
        token_bytes: bytes of one token's keys and values.
        state_bytes: bytes of one sequence's recurrent states.
        free: bytes on the device before anything is loaded.
    """
    budget = config.gpu_memory_utilization * free - weight_bytes if is_gpu else min(free / 2, _USUAL_CPU_CACHE_BYTES)
    fitting = int(budget / token_bytes / _TOKENS_OF_A_SEQUENCE)
    largest = _MAX_SEQS_ON_GPU if is_gpu else _MAX_SEQS_ON_CPU
    # A power of two, so that a little more or less memory seldom changes it.
    largest = largest if generates else 2 * largest
    fitting = max(_MIN_SEQS, min(largest, 1 << max(fitting, 1).bit_length() - 1))
    if state_bytes:  # they take at most half of the memory, and all of that half if they limit the number
        with_snapshots = state_bytes * (1 + 1 / _SEQS_PER_SNAPSHOT)
        fitting = max(_MIN_SEQS, min(fitting, int(budget / 2 / with_snapshots) // _MIN_SEQS * _MIN_SEQS))
    return fitting


@contextmanager
def explained_out_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """Context manager that turns a device's lack of memory into a RuntimeError that says that `what` did not fit, and
    how to make room."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise RuntimeError(out_of_memory_message(what, device, str(error))) from None


def out_of_memory_message(what: str, device: torch.device, error: str) -> str:
    place = "the memory"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        place = f"the GPU's memory, of which {free / _GIB:.2f} of {total / _GIB:.2f} GiB are free"
    return (
        f"{what} does not fit into {place}; lower max_num_batched_tokens or max_num_seqs, take a smaller model, or "
        f"free what other programs hold ({error})"
    )
