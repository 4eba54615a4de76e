"""Attention cases on a GPU, and how close a kernel must come to the formula."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.ops.layer_cache import LayerCache
from support.attention_case import TOLERANCE, Case, make_case, make_metadata

GPU = torch.device("cuda")
# (cached, new): decodes come first, as in the scheduler's steps, except one.
MIXED = [
    (30, 1), (0, 1), (63, 1), (64, 1), (255, 1), (700, 1), (0, 17), (12, 9), (5, 2), (300, 1), (0, 200), (513, 130)
]  # fmt: skip


def on_gpu(case: Case) -> Case:
    """The case on the GPU."""
    tensors = {name: value.to(GPU) for name, value in vars(case.metadata).items() if isinstance(value, torch.Tensor)}
    sequences = ([tensor.to(GPU) for tensor in whole] for whole in (case.queries, case.keys, case.values))
    cache = LayerCache(*(None if tensor is None else tensor.to(GPU) for tensor in case.cache))
    return Case(*sequences, case.num_new, cache, replace(case.metadata, **tensors), case.window, case.scale)


def make_gpu_case(sequences: list[tuple[int, int]], block_size: int, **options) -> Case:
    return on_gpu(make_case(sequences, block_size, **options))


def part(case: Case, rows: list[int]) -> Case:
    """A step of these sequences only, over the same cache."""
    old, num_new = case.metadata, [case.num_new[row] for row in rows]
    sequences = [[whole[row] for row in rows] for whole in (case.queries, case.keys, case.values)]
    ends, all_slots = np.cumsum(case.num_new), old.slot_mapping.tolist()
    slots = [slot for row in rows for slot in all_slots[ends[row] - case.num_new[row] : ends[row]]]
    lengths = [len(keys) for keys in sequences[1]]
    metadata = make_metadata(num_new, lengths, slots, old.block_tables[rows].cpu(), old.block_size)
    return on_gpu(Case(*sequences, num_new, case.cache, metadata, case.window, case.scale))


def make_backend(name: str, case: Case, max_model_len: int = 4096) -> AttentionBackend:
    (num_heads, head_dim), num_kv_heads = case.queries[0].shape[1:], case.keys[0].shape[1]
    dtype = case.queries[0].dtype
    windows = tuple({0, case.window})
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype, GPU, 128, max_model_len, case.scale, windows)
    try:
        return make_attention_backend(name, shape, case.metadata.block_size)
    except ValueError as error:
        if "needs another build of flash-attn" in str(error):
            pytest.skip(str(error))
        raise


def formula(case: Case) -> torch.Tensor:
    """softmax(scale × q kᵀ) v in float64: [num_tokens, num_heads, head_dim]."""
    out = []
    for q, k, v, num_new in zip(case.queries, case.keys, case.values, case.num_new, strict=True):
        group_size = q.shape[1] // k.shape[1]
        q, k, v = q[len(q) - num_new :].double(), *(x.double().repeat_interleave(group_size, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if case.scale is None else case.scale)
        key = torch.arange(len(k), device=q.device)
        distance = key[len(k) - num_new :, None] - key
        scores.masked_fill_((distance < 0) | (distance >= (case.window or len(k))), float("-inf"))
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)


def assert_close_to_formula(case: Case, out: torch.Tensor) -> None:
    """Within TOLERANCE as a whole, and within three times that per row; otherwise one lost key of thousands would not
    show.
    """
    dtype = case.queries[0].dtype
    assert out.dtype == dtype and out.isfinite().all()
    exact = formula(case)
    error = out.double() - exact
    assert error.norm() <= TOLERANCE[dtype] * exact.norm(), float(error.norm() / exact.norm())
    of_rows = error.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert of_rows.max() <= 3 * TOLERANCE[dtype], (int(of_rows.argmax()), float(of_rows.max()))


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The step's graph, and what each replay overwrites. The step runs once before the capture, as in the engine."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, out


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)
