"""Ranks of one model as threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk
from nanovllm.layers.context import LayerContext
from nanovllm.models.adapter_slots import load_slot
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_weights
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.low_rank import AdapterRows
from nanovllm.ops.row_invariant import PLAIN
from nanovllm.runner.kv_cache import KVCacheLayout, empty_states
from nanovllm.sampling_params import SamplingParams
from support.batch_factory import make_batch

CPU = torch.device("cpu")
Result = TypeVar("Result")
FP32 = LayerContext(torch.float32, CPU)


class Exchange:
    """Where the threads meet."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[Any] = [None] * size


@dataclass(frozen=True)
class ThreadRank(Parallel):
    """A rank that is a thread; its collectives are sums and concatenations over an Exchange."""

    def _meet(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.group.tensors[self.rank] = tensor.clone()
        self.group.barrier.wait()
        tensors = list(self.group.tensors)
        self.group.barrier.wait()
        return tensors

    def all_reduce(self, tensor):
        return tensor.copy_(sum(self._meet(tensor)))

    def all_gather(self, tensor):
        return torch.cat(self._meet(tensor), 0)

    def rows_of_columns(self, columns):
        return torch.cat(self._meet(columns), 1).chunk(self.size)[self.rank]


def on_ranks(size: int, compute: Callable[[Parallel], Result]) -> list[Result]:
    """What `compute` returns on each rank. The first failure of a rank is raised."""
    exchange = Exchange(size)

    def on_rank(rank: int) -> Result:
        try:
            return compute(ThreadRank(rank, size, exchange))
        except BaseException:
            exchange.barrier.abort()  # so that the other ranks do not wait
            raise

    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(on_rank, rank) for rank in range(size)]
    errors = [error for error in map(Future.exception, results) if error is not None]
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return [each.result() for each in results]


@torch.inference_mode()
def hidden_states_of(
    directory: Path,
    token_ids: list[int],
    parallel: Parallel = Parallel(),  # noqa: B008 (frozen)
    use_kernels: bool = False,
    adapted: tuple[list[dict], torch.Tensor] | None = None,
) -> tuple[CausalLM, torch.Tensor]:
    """The model, and a prompt's hidden states, from this rank's shard of the checkpoint and of the cache, and from the
    others'.

    adapted: adapters for the slots 1, 2, …, of rank 5 and less, and each token's slot, int32 [num_tokens].
    """
    config = load_model_config(directory)
    backend = TorchAttention(AttentionShape(1, 1, config.head_dim, torch.float32, CPU, scale=config.attention_scale))
    room = (0, 0) if adapted is None else (len(adapted[0]), 5)
    model = CausalLM(config, 64, backend, parallel, torch.float32, CPU, use_kernels, PLAIN, *room)
    load_weights(model, directory)
    for slot, adapter in enumerate(() if adapted is None else adapted[0], 1):
        load_slot(model, slot, adapter)
    rows = None if adapted is None else AdapterRows.of(adapted[1])
    num_tokens = len(token_ids)
    seq = Sequence(0, token_ids, SamplingParams(), 64)
    seq.block_table, seq.num_computed_tokens, seq.entry = [3, 0, 2, 1], num_tokens, 0
    layout = KVCacheLayout(config.cache_places, 16, model.num_kv_heads, config.head_dim, torch.float32)
    num_blocks = 4 * layout.num_groups
    seq.window_table = [tuple(range(block, num_blocks, 4)) for block in range(4, 4 + -(-num_tokens // 16))]
    batch = make_batch([Chunk(seq, num_tokens, False)], 16, 64, num_window_groups=layout.num_groups - 1)
    kv_cache = layout.empty(num_blocks, CPU, empty_states(config, 1, parallel.size, torch.float32, CPU))
    for tensor in (*kv_cache.tensors, *kv_cache.states):
        tensor.fill_(float("nan"))
    return model, model(batch.token_ids, batch.positions, kv_cache.layers, batch.groups, rows)


@torch.inference_mode()
def logits_of(
    directory: Path,
    token_ids: list[int],
    parallel: Parallel,
    use_kernels: bool = False,
    adapted: tuple[list[dict], torch.Tensor] | None = None,
) -> torch.Tensor:
    """A prompt's logits, from all ranks; for the arguments see `hidden_states_of`."""
    model, hidden_states = hidden_states_of(directory, token_ids, parallel, use_kernels, adapted)
    columns = model.compute_logits(hidden_states)
    assert columns.shape == (len(token_ids), model.lm_head.vocab.size)
    rows = (parallel.sampling_exchange or parallel).rows_of_columns(columns)
    assert len(rows) == len(token_ids) // parallel.size
    return parallel.all_gather(rows[:, : model.lm_head.vocab.vocab_size])
