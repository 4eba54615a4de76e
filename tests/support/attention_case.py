"""One step's attention over random caches, and the formula in float64."""

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.attention.metadata import AttentionMetadata, query_tiles
from nanovllm.models.config import one_group
from nanovllm.ops.layer_cache import LayerCache, rounded_keys, rounded_values
from nanovllm.ops.quantize import E4M3
from nanovllm.runner.kv_cache import KVCache, KVCacheLayout

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}
# Queries of a long prompt that are compared: the formula in float64 is slow.
NUM_COMPARED = 40


@dataclass
class Case:
    """A step's attention.

    queries, keys, values: a whole tensor [length, heads, head_dim] for each sequence; these are the truth.
    num_new: the number of new tokens of each sequence.
    cache: the old tokens in their slots, else NaN.
    window: how many keys a query sees; 0 is all. scale: the scores' factor; None is 1 / sqrt(head_dim).
    """

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    num_new: list[int]
    cache: LayerCache
    metadata: AttentionMetadata
    window: int = 0
    scale: float | None = None

    def backend(self, name: str) -> AttentionBackend:
        """A backend for tensors of these shapes."""
        (num_heads, head_dim), num_kv_heads = self.queries[0].shape[1:], self.keys[0].shape[1]
        options = {"scale": self.scale, "windows": tuple({0, self.window}), "has_fp8_cache": self.cache.is_fp8}
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, self.queries[0].dtype, torch.device("cpu"), **options)
        return make_attention_backend(name, shape)

    def new(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        """The new tokens' rows, flat."""
        return torch.cat([whole[len(whole) - n :] for whole, n in zip(sequences, self.num_new, strict=True)])


def make_case(
    sequences: list[tuple[int, int]],
    block_size: int = 4,
    num_kv_heads: int = 1,
    group_size: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    num_blocks_ahead: int = 1,
    seed: int = 0,
    window: int = 0,
    scale: float | None = None,
    is_fp8: bool = False,
) -> Case:
    """A step over `sequences`, each (cached tokens, new tokens), in blocks dealt at random.

    Every sequence holds `num_blocks_ahead` more blocks than it needs so far, as a chunked prompt does.
    """
    generator = torch.Generator().manual_seed(seed)
    num_cached, num_new = ([seq[i] for seq in sequences] for i in (0, 1))
    lengths = [old + new for old, new in sequences]

    def tokens(num_heads: int) -> list[torch.Tensor]:
        return [torch.randn(length, num_heads, head_dim, generator=generator).to(dtype) for length in lengths]

    queries, keys, values = tokens(num_kv_heads * group_size), tokens(num_kv_heads), tokens(num_kv_heads)
    table_sizes = [-(-length // block_size) + num_blocks_ahead for length in lengths]
    blocks = torch.randperm(sum(table_sizes) + 3, generator=generator).tolist()
    tables = np.zeros((len(sequences), max(table_sizes)), np.int64)
    for row, size in enumerate(table_sizes):
        tables[row, :size] = [blocks.pop() for _ in range(size)]
    layout = KVCacheLayout(one_group(1), block_size, num_kv_heads, head_dim, E4M3 if is_fp8 else dtype)
    cache = filled_with_nan(layout.empty(sum(table_sizes) + 3, torch.device("cpu"))).layers[0]

    slot_mapping: list[int] = []
    for row, length in enumerate(lengths):
        slots = [int(tables[row, i // block_size]) * block_size + i % block_size for i in range(length)]
        old = torch.tensor(slots[: num_cached[row]], dtype=torch.int64)
        cache.write(keys[row][: num_cached[row]], values[row][: num_cached[row]], old)
        slot_mapping += slots[num_cached[row] :]
    metadata = make_metadata(num_new, lengths, slot_mapping, torch.from_numpy(tables).int(), block_size)
    return Case(queries, keys, values, num_new, cache, metadata, window, scale)


def filled_with_nan(cache: KVCache) -> KVCache:
    """In FP8, no number is NaN, but scales may be infinite."""
    for tensor in cache.tensors:
        if tensor.dtype == torch.int8:
            tensor.fill_(0x7E)  # keys of 126, and values of 448
        else:
            tensor.fill_(math.nan if tensor.is_floating_point() else 0x7F807F80)
    return cache


def make_metadata(
    num_new: list[int], lengths: list[int], slots: list[int], block_tables: torch.Tensor, block_size: int, **fields
) -> AttentionMetadata:
    num_decodes = next((row for row, new in enumerate(num_new) if new > 1), len(num_new))
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        num_decodes=torch.tensor([num_decodes], dtype=torch.int32),
        max_num_decodes=num_decodes,
        max_seqlen_q=max(num_new),
        max_seqlen_k=max(lengths),
        slot_mapping=torch.tensor(slots),
        block_tables=block_tables,
        block_size=block_size,
        query_tiles=tiles(num_new, lengths, num_decodes),
        **fields,
    )


def tiles(num_new: list[int], lengths: list[int], num_decodes: int) -> torch.Tensor | None:
    if num_decodes == len(num_new):
        return None
    return torch.from_numpy(query_tiles(np.array(num_new), np.array(lengths), num_decodes))


def run(backend_name: str, case: Case, backend: AttentionBackend | None = None) -> torch.Tensor:
    """Does the work of a layer: stores the new keys and values, then attends. Keys behind the window are gone."""
    backend, metadata = backend or case.backend(backend_name), case.metadata
    cache = case.cache
    if case.window:  # the layer is in a group of layers with a window
        cache, metadata = without_keys_behind_windows(case, backend.num_keys_per_tile), replace(metadata, group=1)
    metadata = replace(metadata, plan=backend.plan(metadata))
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)
    backend.store_kvcache(k, v, cache, metadata)
    return backend.attend(q, k, v, cache, metadata, case.window)


def without_keys_behind_windows(case: Case, num_keys_per_tile: int) -> LayerCache:
    """A copy of the cache in which whole tiles of keys that no query sees are NaN."""
    tensors = [None if tensor is None else tensor.clone() for tensor in case.cache]
    cache, block_size = LayerCache(*tensors), case.cache.block_size
    nothing = filled_with_nan(KVCache(tuple(tensor.clone() for tensor in case.cache if tensor is not None), []))
    for row, table in enumerate(case.metadata.block_tables.tolist()):
        first_query = len(case.keys[row]) - case.num_new[row]
        num_gone = max(0, first_query + 1 - case.window) // num_keys_per_tile * num_keys_per_tile
        for position in range(num_gone):
            block, place = table[position // block_size], position % block_size
            for tensor, poison in zip(cache, nothing.tensors, strict=False):
                at = (block, place) if not cache.is_fp8 else (block, slice(None), place)
                if cache.is_fp8 and tensor is cache.values:
                    at = block, slice(None), slice(None), place
                tensor[at] = poison[at]
    return cache


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, case: Case) -> np.ndarray:
    """softmax(scale × q kᵀ) v over keys 0 … position; q: [heads, d], k and v: [length, kv_heads, d]."""
    num_heads, head_dim = q.shape
    out = np.empty_like(q)
    seen = slice(max(0, position + 1 - (case.window or position + 1)), position + 1)
    scale = 1 / math.sqrt(head_dim) if case.scale is None else case.scale
    for head in range(num_heads):
        kv_head = head // (num_heads // k.shape[1])
        scores = k[seen, kv_head] @ q[head] * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[seen, kv_head] / weights.sum()
    return out


def relative_error(case: Case, out: torch.Tensor) -> float:
    """‖out − formula‖ / ‖formula‖, over all new rows of short sequences, both ends and a sample of long ones."""
    assert out.dtype == case.queries[0].dtype and out.isfinite().all()
    ours, exact, start = [], [], 0
    for whole_q, whole_k, whole_v, num_new in zip(case.queries, case.keys, case.values, case.num_new, strict=True):
        if case.cache.is_fp8:
            whole_k, whole_v = rounded_keys(whole_k), rounded_values(whole_v)
        q, k, v = (whole.double().numpy() for whole in (whole_q, whole_k, whole_v))
        rows = range(num_new)
        if num_new > NUM_COMPARED:
            sample = random.Random(num_new).sample(rows, NUM_COMPARED - 8)
            rows = sorted({*range(4), *range(num_new - 4, num_new), *sample})
        for row in rows:
            position = len(q) - num_new + row
            ours.append(out[start + row].double().numpy())
            exact.append(formula(q[position], k, v, position, case))
        start += num_new
    ours, exact = np.stack(ours), np.stack(exact)
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


# Decodes that lead the batch and decodes after longer chunks may take different paths.
MIXED = [(30, 1), (63, 1), (1, 1), (0, 17), (12, 9), (0, 1), (64, 1), (7, 1), (0, 4), (5, 2)]


def share(case: Case, row: int, source: int, num_keys: int) -> None:
    """Makes the first keys of `row` those of `source`, in the same blocks."""
    num_blocks, tables = num_keys // case.metadata.block_size, case.metadata.block_tables
    tables[row, :num_blocks] = tables[source, :num_blocks]
    for tensors in (case.keys, case.values):
        tensors[row][:num_keys] = tensors[source][:num_keys]
