"""Attention of prompts on Hopper GPUs, in Gluon. Here each program attends many items, with all kinds of blocks,
padding and steps. test_gpu_kernels.py tests the same kernel with few items per program, beside all other backends.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.attention_case import Case, run
from support.gpu_kernels import GPU, assert_close_to_formula, captured, make_backend, make_gpu_case, part, randn

from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.attention.triton_prompts import attend_prompts, has_hopper_kernel
from nanovllm.layers.rope_config import RopeConfig
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="not a Hopper GPU"
    ),
]

# (cached, new): decodes, then prompts and chunks with ends around tiles of 64 queries and of 128 keys.
MIXED = [
    (40, 1), (1000, 1), (0, 63), (0, 64), (0, 65), (0, 127), (0, 128), (0, 129), (1, 63), (64, 64), (127, 2), (128, 3),
    (200, 300), (511, 130), (0, 1), (0, 700), (1500, 257), (3, 2),
]  # fmt: skip


def make_hopper_case(sequences: list[tuple[int, int]], block_size: int = 64, **options) -> Case:
    options = {"head_dim": 128, "num_kv_heads": 2, "dtype": torch.bfloat16, **options}
    return make_gpu_case(sequences, block_size, **options)


def make_hopper_backend(case: Case) -> TritonAttention:
    backend = make_backend("triton", case)
    assert isinstance(backend, TritonAttention) and has_hopper_kernel(backend._shape, case.metadata.block_size)
    return backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [2, 3, 6, 7])
@pytest.mark.parametrize("block_size", [64, 128, 192, 256])
def test_prompts_attend_as_the_formula_says(num_programs, block_size, group_size, dtype):
    case = make_hopper_case(MIXED, block_size, group_size=group_size, dtype=dtype, seed=block_size, scale=0.1)
    assert_close_to_formula(case, run("triton", case, make_hopper_backend(case)))


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_attends_as_the_formula_says(num_programs, seed):
    rng = random.Random(seed)
    decodes = [(rng.randrange(1000), 1) for _ in range(rng.randrange(20))]
    others = [(rng.choice((0, rng.randrange(900))), rng.randrange(1, rng.choice((5, 70, 600)))) for _ in range(25)]
    case = make_hopper_case(decodes + others, num_blocks_ahead=rng.randrange(4), seed=seed)
    assert_close_to_formula(case, run("triton", case, make_hopper_backend(case)))


def test_long_prompts_and_chunks_of_them(num_programs):
    case = make_hopper_case([(4000, 1), (0, 4096), (3000, 1000), (2500, 1596)], num_kv_heads=4)
    assert_close_to_formula(case, run("triton", case, make_hopper_backend(case)))


def test_a_prompt_is_bitwise_the_same_whatever_its_neighbours(num_programs):
    case = make_hopper_case(MIXED)
    backend = make_hopper_backend(case)
    together = run("triton", case, backend).split([new for _, new in MIXED])
    for row, expected in enumerate(together):
        assert torch.equal(run("triton", part(case, [row]), backend), expected), MIXED[row]


def test_queries_of_a_projection_are_attended_like_copies(num_programs):
    case = make_hopper_case(MIXED)
    backend, metadata = make_hopper_backend(case), case.metadata
    qkv = torch.cat([case.new(whole) for whole in (case.queries, case.keys, case.values)], 1)
    q, k, v = qkv.split((4, 2, 2), 1)
    metadata = replace(metadata, plan=backend.plan(metadata))
    backend.store_kvcache(k, v, case.cache, metadata)
    assert_close_to_formula(case, backend.attend(q, k, v, case.cache, metadata))


def test_queries_behind_the_last_one_of_a_tile_change_nothing(num_programs):
    """They belong to the next sequence, or to none."""
    case = make_hopper_case([(0, 70), (100, 30), (0, 65)])
    backend, expected = make_hopper_backend(case), None
    run("triton", case, backend)  # This run writes the keys and values that the next runs read.
    for number in (0.0, math.nan):
        q = torch.cat((case.new(case.queries), randn(64, 4, 128, dtype=torch.bfloat16, seed=1) * 0 + number))
        q[70:100] = number
        out = torch.zeros_like(q)
        attend_prompts(backend._shape, q, case.cache, out, case.metadata, 0)
        others = torch.cat((out[:70], out[100:165]))
        assert expected is None or torch.equal(others, expected)
        expected = others
    assert expected.abs().max() > 0.1 and not expected.isnan().any()


@pytest.mark.parametrize("where", ["between", "behind", "alone"])
def test_tiles_of_padding_change_nothing(num_programs, where):
    case = make_hopper_case([(0, 700), (300, 200), (0, 64)])
    backend = make_hopper_backend(case)
    expected, tiles = run("triton", case, backend), case.metadata.query_tiles
    assert tiles is not None
    padding = torch.zeros(150, 4, dtype=torch.int32, device=GPU)
    if where == "alone":
        out = torch.full_like(expected, 7.0)
        q = case.new(case.queries)
        metadata = replace(case.metadata, query_tiles=padding)
        attend_prompts(backend._shape, q, case.cache, out, metadata, 0)
        assert (out == 7.0).all()
        return
    num_before = len(tiles) if where == "behind" else 3
    padded = torch.cat((tiles[:num_before], padding, tiles[num_before:]))
    case = replace(case, metadata=replace(case.metadata, query_tiles=padded))
    assert torch.equal(run("triton", case, backend), expected)


def test_a_captured_step_follows_its_tiles_and_tables(num_programs):
    """The step is captured while all tiles are padding, as in the engine."""
    case = make_hopper_case([(900, 1), (0, 500), (130, 333), (0, 65)])
    backend, metadata = make_hopper_backend(case), case.metadata
    expected = run("triton", case, backend)
    tiles = metadata.query_tiles
    assert tiles is not None
    final, lengths = tiles.clone(), metadata.context_lens.clone()
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)

    def step() -> torch.Tensor:
        planned = replace(metadata, plan=backend.plan(metadata))
        return backend.attend(q, k, v, case.cache, planned)

    tiles.zero_()
    metadata.context_lens.zero_()
    graph, out = captured(step)
    tiles.copy_(final)
    metadata.context_lens.copy_(lengths)
    graph.replay()
    assert torch.equal(out, expected)
    half = len(final) // 2
    tiles[half:].zero_()
    out.fill_(7.0)
    graph.replay()
    attended = torch.zeros(len(q), dtype=torch.bool, device=GPU)
    attended[0] = True  # the decode
    for token, number, _, _ in final[:half].tolist():
        attended[token : token + number] = True
    assert torch.equal(out[attended], expected[attended]) and (out[~attended] == 7.0).all()


def test_layers_back_to_back_never_read_what_is_not_written_yet():
    """Each kernel may start before the one before it has ended."""
    sequences = [(900, 1), (1500, 1), *[(0, 200)] * 40, (500, 700)]
    case = make_hopper_case(sequences, num_kv_heads=8)
    backend, num_tokens = make_hopper_backend(case), sum(new for _, new in sequences)
    metadata = replace(case.metadata, plan=backend.plan(case.metadata))
    rotary = RotaryEmbedding(128, 4096, RopeConfig(1e6, 128), torch.bfloat16, GPU)
    rotations = rotary.lookup(torch.arange(num_tokens, device=GPU) % 4096)
    weight = torch.ones(24, 128, dtype=torch.bfloat16, device=GPU)
    inputs = [randn(num_tokens, 32, 128, dtype=torch.bfloat16, seed=seed) for seed in range(3)]

    def layer(qkv: torch.Tensor, is_awaited: bool = False) -> torch.Tensor:
        qk = qk_norm_rotate_store(qkv, weight, 1e-6, *rotations[:3], case.cache, metadata.slot_mapping)
        if is_awaited:
            torch.cuda.synchronize()
        return backend.attend(qk[:, :16], qk[:, 16:], qkv[:, 24:], case.cache, metadata)

    expected = []
    for qkv in inputs:
        expected.append(layer(qkv, is_awaited=True))
        torch.cuda.synchronize()
    for number in range(300):
        out = layer(inputs[number % 3])
        if number % 7 == 0:  # seldom, so that several layers are under way
            assert torch.equal(out, expected[number % 3]), number
