"""The GPU's kernels: attention against the formula in float64, all other kernels against their plain twins.

The logits processors: test_gpu_process_logits.py. The filters: test_gpu_filters.py.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.attention_case import TOLERANCE, Case, run
from support.batch_factory import expanded
from support.gpu_kernels import (
    GPU,
    MIXED,
    assert_close_to_formula,
    captured,
    formula,
    make_backend,
    make_gpu_case,
    part,
    randn,
)
from support.model_factory import perturbed
from support.steps import random_rows

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.layers.context import LayerContext
from nanovllm.layers.norm import QKNorm
from nanovllm.layers.rope_config import RopeConfig
from nanovllm.layers.rotary_embedding import Rotary, RotaryEmbedding
from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.expand_rows import Table
from nanovllm.ops.filters import plain_filter_thresholds, triton_filter_thresholds
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.linear import linear, linear_in_parts
from nanovllm.ops.norm import add_rms_norm, rms_norm
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.sample import BROKEN_LOGITS, NO_TOKEN_LEFT, plain_sample, triton_sample
from nanovllm.ops.write_tokens import write_tokens

pytestmark = pytest.mark.gpu

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
ON_GPUS_ONLY = ["triton", "flash"]
BACKEND_DTYPES = [
    (backend, dtype)
    for backend in ("triton", "flash", "sdpa", "torch")
    for dtype in FLOATS
    if (backend, dtype) != ("flash", torch.float32)
]
BACKENDS = pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES, ids=lambda value: str(value))
BLOCK_SIZE = {"triton": 64, "flash": 256, "sdpa": 16, "torch": 16}
# Each shape has to be compiled, so only some are tried: (head_dim, group size).
SHAPES = {
    torch.bfloat16: [*((128, group) for group in range(1, 9)), (32, 1), (32, 5), (64, 2), (64, 8)],
    torch.float16: [(32, 3), (64, 7), (128, 4)],
    torch.float32: [(32, 8), (64, 2), (128, 1), (128, 6)],
}


def assert_exact(name: str, case: Case, **options) -> None:
    assert_close_to_formula(case, run(name, case, make_backend(name, case, **options)))


# Attention


@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "group_size"),
    [(backend, dtype, *shape) for backend, dtype in BACKEND_DTYPES for shape in SHAPES[dtype]],
    ids=lambda value: str(value),
)
def test_grouped_queries_attend_as_the_formula_says(backend, dtype, head_dim, group_size):
    """A query head must read the key head of its own group, in decodes, prompts and chunks; unused slots are NaN."""
    options = {"num_kv_heads": 1 + group_size % 3, "group_size": group_size, "head_dim": head_dim, "dtype": dtype}
    assert_exact(backend, make_gpu_case(MIXED, BLOCK_SIZE[backend], seed=head_dim + group_size, **options))


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [0, 1, 20, 64, 100, 500])
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES, ids=lambda value: str(value))
def test_windows_scales_and_head_sizes_of_every_family(backend, dtype, window, head_dim, group_size):
    """A window leaves some tiles without a key for some of their queries. Gemma's heads are 256 wide."""
    sequences = [(250, 1), (256, 1), (900, 1), *MIXED, (30, 100), (0, 150), (290, 40), (500, 70)]
    options = {"num_kv_heads": 2, "group_size": group_size, "head_dim": head_dim, "dtype": dtype, "scale": 0.1}
    assert_exact(backend, make_gpu_case(sequences, BLOCK_SIZE[backend], window=window, **options))


@pytest.mark.parametrize(
    ("backend", "dtype", "block_size"),
    [
        (backend, dtype, size)
        for backend, dtype in BACKEND_DTYPES
        for size in ((256, 512) if backend == "flash" else (16, 64, 256))
    ],
    ids=lambda value: str(value),
)
def test_page_boundaries_change_nothing(backend, dtype, block_size):
    """Lengths are one block ± 1 and two blocks ± 1, in a prefill, a decode, and a chunk that begins or ends there."""
    around = [length for n in (1, 2) for length in (n * block_size - 1, n * block_size, n * block_size + 1)]
    decodes = [(length, 1) for length in around]
    prefills = [(0, length) for length in around]
    chunks = [(length, 3) for length in around] + [(2, length) for length in around]
    options = {"head_dim": 64, "dtype": dtype, "seed": block_size}
    assert_exact(backend, make_gpu_case(decodes + prefills + chunks, block_size, **options))
    # Without cached keys a prompt may be read from the new keys instead of the cache, and decodes may run alone.
    assert_exact(backend, make_gpu_case(decodes + prefills, block_size, **options))
    assert_exact(backend, make_gpu_case(prefills, block_size, **options))
    assert_exact(backend, make_gpu_case(decodes, block_size, **options))


@BACKENDS
def test_ragged_decodes_from_1_to_4096(backend, dtype):
    """Decodes of very different lengths are split differently; each must see all of its keys and no other."""
    rng = random.Random(1)
    lengths = [0, 1, 2, 255, 256, 257, 511, 512, 4095, 4094, 2047, 2048]
    lengths += [int(2 ** rng.uniform(0, 12)) for _ in range(80)]
    rng.shuffle(lengths)
    assert_exact(backend, make_gpu_case([(length, 1) for length in lengths], BLOCK_SIZE[backend], dtype=dtype))


@BACKENDS
def test_long_prompts_and_chunks_of_them(backend, dtype):
    """Prompts of 4,096 tokens run whole and in chunks, with decodes before and after them."""
    sequences = [(3, 1), (4095, 1), (0, 4096), (2500, 1596), (9, 1), (3583, 513), (4000, 2), (0, 129), (0, 127)]
    assert_exact(backend, make_gpu_case(sequences, BLOCK_SIZE[backend], dtype=dtype))


@BACKENDS
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_decode_prefill_and_chunk(backend, dtype, seed):
    """There is one rule: each sequence's queries are its last ones, for any neighbours in the same step."""
    rng = random.Random(seed)
    decodes = [(rng.randrange(1000), 1) for _ in range(rng.randrange(40))]
    others = [(rng.choice((0, rng.randrange(600))), rng.choice((1, rng.randrange(1, 400)))) for _ in range(20)]
    case = make_gpu_case(
        decodes + others, BLOCK_SIZE[backend], dtype=dtype, num_blocks_ahead=rng.randrange(4), seed=seed
    )
    assert_exact(backend, case)


@pytest.mark.parametrize("backend", ON_GPUS_ONLY)
def test_contexts_of_32768_tokens(backend):
    """Splits of a long context are longer than usual ones, and prompts are much longer than a tile."""
    decodes = [(length - 1, 1) for length in (1, 2047, 2048, 2049, 20000, 32768)]
    case = make_gpu_case([*decodes, (32768 - 150, 150)], 256, head_dim=128, dtype=torch.bfloat16)
    assert_exact(backend, case, max_model_len=32768)


@BACKENDS
def test_large_scores_do_not_overflow(backend, dtype):
    """exp of a score of a few hundred is infinite unless the largest is subtracted first."""
    case = make_gpu_case(MIXED, BLOCK_SIZE[backend], dtype=dtype)
    case.queries = [q * 60 for q in case.queries]
    out = run(backend, case, make_backend(backend, case))
    exact = formula(case)
    assert out.isfinite().all()
    # Scores of hundreds have few digits left after the point in float32.
    assert (out.double() - exact).norm() <= max(TOLERANCE[dtype], 5e-5) * exact.norm()


@BACKENDS
def test_views_of_one_projection_are_attended_like_copies(backend, dtype):
    """The model passes slices of its fused projection; a kernel that assumes dense rows would read other heads."""
    case = make_gpu_case(MIXED, BLOCK_SIZE[backend], num_kv_heads=2, dtype=dtype)
    q, k, v = torch.cat([case.new(x) for x in (case.queries, case.keys, case.values)], 1).split((4, 2, 2), 1)
    attention, metadata = make_backend(backend, case), case.metadata
    metadata = replace(metadata, plan=attention.plan(metadata))
    attention.store_kvcache(k, v, case.cache, metadata)
    assert_close_to_formula(case, attention.attend(q, k, v, case.cache, metadata))


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_new_tokens_go_to_their_slots_and_nowhere_else(backend):
    """A write one slot off reaches a neighbour's block, and a padding row's slot −1 is the last slot of the cache."""
    case = make_gpu_case(MIXED, BLOCK_SIZE[backend], num_kv_heads=3, dtype=torch.bfloat16)
    slots = case.metadata.slot_mapping
    slots[::5] = -1
    before = case.cache.keys.clone(), case.cache.values.clone()
    k, v = case.new(case.keys), case.new(case.values)
    make_backend(backend, case).store_kvcache(k, v, case.cache, case.metadata)
    for cache, old, new in zip(case.cache[:2], before, (k, v), strict=True):
        expected = old.flatten(0, 1)
        expected[slots[slots >= 0]] = new[slots >= 0]
        torch.testing.assert_close(cache.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ON_GPUS_ONLY)
@pytest.mark.parametrize("num_padding", [1, 13])
def test_padding_rows_change_nothing(backend, num_padding):
    """A captured step is padded with rows of length 0, slot −1 and a table of zeros, although a sequence may own block
    0.
    """
    lengths = [1, 64, 256, 257, 700, 1024, 3000]
    case = make_gpu_case([(length - 1, 1) for length in lengths], 256, dtype=torch.bfloat16)
    attention = make_backend(backend, case)
    expected = run(backend, case, attention)
    before = case.cache.keys.clone(), case.cache.values.clone()

    def padded(tensor: torch.Tensor, value: float = 0) -> torch.Tensor:
        return torch.cat((tensor, torch.full((num_padding, *tensor.shape[1:]), value, dtype=tensor.dtype, device=GPU)))

    num_rows = len(lengths) + num_padding
    metadata = replace(
        case.metadata,
        cu_seqlens_q=padded(case.metadata.cu_seqlens_q, len(lengths)),
        slot_mapping=padded(case.metadata.slot_mapping, -1),
        context_lens=padded(case.metadata.context_lens),
        block_tables=padded(case.metadata.block_tables),
        max_num_decodes=num_rows,
    )
    metadata = replace(metadata, plan=attention.plan(metadata))
    q, k, v = (padded(case.new(x), 3.0) for x in (case.queries, case.keys, case.values))
    attention.store_kvcache(k, v, case.cache, metadata)
    out = attention.attend(q, k, v, case.cache, metadata)
    assert_close_to_formula(case, out[: len(lengths)])
    if backend == "triton":
        assert torch.equal(out[: len(lengths)], expected)
    for cache, old in zip(case.cache[:2], before, strict=True):
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


@DTYPES
def test_a_triton_row_is_bitwise_the_same_whatever_its_neighbours(dtype):
    """If splits depended on the batch, they would round differently, and a near tie could go the other way."""
    rng = random.Random(2)
    lengths = [0, 1, 255, 256, 257, 1000, 4095, *(int(2 ** rng.uniform(0, 12)) for _ in range(24))]
    case = make_gpu_case([(length, 1) for length in lengths], 64, num_kv_heads=2, dtype=dtype)
    attention = make_backend("triton", case)
    together = run("triton", case, attention)
    for row in range(len(lengths)):
        assert torch.equal(run("triton", part(case, [row]), attention)[0], together[row]), lengths[row]
    shuffled = rng.sample(range(len(lengths)), 20)
    assert torch.equal(run("triton", part(case, shuffled), attention), together[shuffled])


@DTYPES
def test_a_triton_prompt_is_bitwise_the_same_whatever_its_neighbours(dtype):
    """The same chunk over the same keys runs alone or in a mixed step."""
    sequences = [(40, 1), (900, 1), (0, 300), (100, 77), (513, 200), (0, 5), (0, 128), (2000, 33)]
    case = make_gpu_case(sequences, 64, num_kv_heads=2, dtype=dtype)
    attention = make_backend("triton", case)
    together = run("triton", case, attention).split([new for _, new in sequences])
    for row, expected in enumerate(together):
        assert torch.equal(run("triton", part(case, [row]), attention), expected), sequences[row]


@pytest.mark.parametrize("backend", ON_GPUS_ONLY)
def test_a_captured_decode_serves_lengths_other_than_those_it_was_captured_with(backend):
    """A grid, a split or a length fixed at capture loses the keys that come later."""
    lengths = [1, 3000, 64, 256, 4096, 700]
    case = make_gpu_case([(length - 1, 1) for length in lengths], 256, dtype=torch.bfloat16, num_kv_heads=2)
    attention, metadata = make_backend(backend, case), case.metadata
    metadata = replace(metadata, max_seqlen_k=metadata.block_tables.shape[1] * metadata.block_size)
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)

    def step() -> torch.Tensor:
        planned = replace(metadata, plan=attention.plan(metadata))
        return attention.attend(q, k, v, case.cache, planned)

    attention.store_kvcache(k, v, case.cache, metadata)
    final_lengths = metadata.context_lens.clone()
    metadata.context_lens.zero_()  # as all rows are padding when the engine captures
    metadata.num_decodes.zero_()
    graph, out = captured(step)
    metadata.context_lens.copy_(final_lengths)
    metadata.num_decodes.fill_(len(lengths))
    graph.replay()
    assert_close_to_formula(case, out)
    shorter = [1, 2, 64, 1, 257, 699]
    metadata.context_lens.copy_(torch.tensor(shorter))
    graph.replay()
    first = [[x[:n] for x, n in zip(whole, shorter, strict=True)] for whole in (case.keys, case.values)]
    # The formula's query comes last, which is now the place of the captured one.
    queries = [last[None].expand(n, -1, -1) for last, n in zip(q, shorter, strict=True)]
    assert_close_to_formula(replace(case, queries=queries, keys=first[0], values=first[1]), out)


def test_auto_is_a_gpu_backend_for_every_dtype_and_block_size():
    """Falling back to gathered keys on a GPU costs most of the speed, silently."""
    for dtype in FLOATS:
        for block_size in (None, 16, 64, 256):
            shape = AttentionShape(4, 2, 64, dtype, GPU)
            assert make_attention_backend("auto", shape, block_size).name in ON_GPUS_ONLY
    # A block size that only gathering can serve still runs.
    assert make_attention_backend("auto", shape, 5).name == "sdpa"


# Fused kernels


def error_of(actual: torch.Tensor, exact: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - exact).norm() / exact.norm())


def assert_no_worse(fused: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor) -> None:
    """The fused result's error is at most the twin's, up to a tenth and a rounding of float32."""
    assert fused.dtype == twin.dtype and fused.shape == twin.shape == exact.shape
    ours, theirs = error_of(fused, exact), error_of(twin, exact)
    assert ours <= 1.1 * theirs + 1e-7, (ours, theirs)
    # No single number is off by more than a few roundings either.
    tolerance = 4 * torch.finfo(fused.dtype).eps
    assert ((fused.double() - exact).abs() <= tolerance * (exact.abs() + exact.abs().mean())).all()


NORM_SHAPES = pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 1024), (7, 160), (300, 1024), (65, 2560), (33, 5120), (5, 7)]
)


@DTYPES
@NORM_SHAPES
def test_fused_norm_is_no_worse_than_its_twin(dtype, num_tokens, size):
    """Sizes that are not powers of two are padded, and padding must not count in the mean."""
    weight = (1 + 0.3 * randn(size, dtype=torch.float32, seed=1)).to(dtype)
    for scale in (1e-3, 1.0, 300.0):
        x = randn(num_tokens, size, dtype=torch.float32).mul(scale).to(dtype)
        copy = x.clone()
        fused, twin = (rms_norm(x, weight, 1e-6, fused) for fused in (True, False))
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        assert_no_worse(fused, twin, exact)
        assert torch.equal(x, copy)


@DTYPES
@NORM_SHAPES
def test_fused_add_and_norm_is_no_worse_than_its_twin(dtype, num_tokens, size):
    """The kernel norms the same rounded sum that becomes the residual; the inputs stay as they are."""
    weight = (1 + 0.3 * randn(size, dtype=torch.float32, seed=1)).to(dtype)
    x, residual = randn(num_tokens, size, dtype=dtype, seed=2), 5 * randn(num_tokens, size, dtype=dtype, seed=3)
    copies = x.clone(), residual.clone()
    (fused, total), (twin, twin_total) = (add_rms_norm(x, residual, weight, 1e-6, fused) for fused in (True, False))
    assert torch.equal(total, twin_total)
    exact = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_no_worse(fused, twin, exact)
    assert torch.equal(x, copies[0]) and torch.equal(residual, copies[1])


@DTYPES
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 3072), (300, 448), (33, 1024), (5, 1025), (64, 7)])
def test_fused_act_and_mul_is_no_worse_than_its_twin(dtype, num_tokens, size):
    """Some gates are far from 0: exp must not overflow to NaN."""
    gate_up = randn(num_tokens, 2 * size, dtype=torch.float32).mul(4).to(dtype)
    gate_up[:, 0], gate_up[:, 1] = -200.0, 200.0
    fused, twin = act_and_mul(gate_up, use_kernels=True), act_and_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    assert_no_worse(fused, twin, gate * gate.sigmoid() * up)


@DTYPES
@pytest.mark.parametrize(
    ("output_size", "input_size"), [(4096, 1024), (1024, 3072), (7, 33), (1001, 2049), (151936, 1024)]
)
def test_a_single_row_is_multiplied_no_worse_than_by_pytorch(dtype, output_size, input_size):
    """Sums of thousands of bfloat16 products must be kept in float32."""
    x, weight = randn(1, input_size, dtype=dtype), randn(output_size, input_size, dtype=dtype, seed=1)
    place = torch.full((3, output_size), 7.0, dtype=dtype, device=GPU)
    fused, twin = linear(x, weight, None, use_kernels=True, out=place[1:2]), linear(x, weight, None)
    assert_no_worse(fused, twin, x.double() @ weight.double().T)
    assert torch.equal(place[1:2], fused) and (place[::2] == 7).all()
    assert torch.equal(linear(x, weight, None, use_kernels=True), fused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("output_size", "input_size"), [(1024, 3072), (2048, 768), (3584, 18944), (96, 64)])
@pytest.mark.parametrize("num_rows", [2, 7, 66, 256])
def test_a_product_in_parts_is_no_worse_than_a_whole_one(dtype, output_size, input_size, num_rows):
    """The parts are kept in float32, and rounded once with the residual."""
    x, weight = randn(num_rows, input_size, dtype=dtype), randn(output_size, input_size, dtype=dtype, seed=1)
    residual = randn(num_rows, output_size, dtype=dtype, seed=2)
    ones = torch.ones(output_size, dtype=dtype, device=GPU)
    product = x.double() @ weight.double().T
    for num_parts in (2, 4):
        parts = linear_in_parts(x, weight, num_parts)
        assert parts.shape == (num_parts, num_rows, output_size) and parts.dtype == torch.float32
        assert_no_worse(parts.sum(0).to(dtype), linear(x, weight, None), product)
        totals = [add_rms_norm(part, residual, ones, 1e-6, True)[1] for part in (parts, linear(x, weight, None))]
        assert_no_worse(*totals, product + residual)


@DTYPES
def test_several_rows_are_put_where_they_are_wanted(dtype):
    """The logits of captured steps are always in the same place, for any number of rows."""
    x, weight = randn(5, 96, dtype=dtype), randn(1001, 96, dtype=dtype, seed=1)
    place = torch.full((8, 1001), 7.0, dtype=dtype, device=GPU)
    out = linear(x, weight, None, use_kernels=True, out=place[:5])
    assert out.data_ptr() == place.data_ptr() and torch.equal(out, linear(x, weight, None)) and (place[5:] == 7).all()


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (8, 4, 32), (9, 3, 64), (4, 1, 96), (5, 5, 16)]
)
def test_fused_norm_rotation_and_store_is_no_worse_than_its_twins(dtype, num_heads, num_kv_heads, head_dim):
    """Padding heads must not be written, queries must not go to the cache, and slot −1 must not be stored."""
    num_tokens, num_normed = 45, num_heads + num_kv_heads
    norm = QKNorm(num_heads, num_kv_heads, head_dim, 1e-6, LayerContext(dtype, GPU))
    norm.weight.data.copy_(1 + 0.3 * randn(num_normed, head_dim, dtype=torch.float32, seed=1))
    rotary = RotaryEmbedding(head_dim, 4096, RopeConfig(1e6, head_dim), dtype, GPU)
    generator = torch.Generator().manual_seed(0)
    rotations = rotary.lookup(torch.randint(4096, (num_tokens,), generator=generator).to(GPU))
    qkv = 3 * randn(num_tokens, num_normed + num_kv_heads, head_dim, dtype=dtype, seed=2)
    copy = qkv.clone()
    caches = [torch.full((6, 16, num_kv_heads, head_dim), 7.0, dtype=dtype, device=GPU) for _ in range(2)]
    slots = torch.randperm(96, generator=generator)[:num_tokens].to(GPU)
    slots[::7] = -1
    fused = qk_norm_rotate_store(qkv, norm.weight, 1e-6, *rotations[:3], LayerCache(*caches), slots)
    qk = qkv[:, :num_normed]
    twin = rotations.rotate(norm(qk))
    exact = qk.double() / (qk.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    exact = Rotary(rotations.cos.double(), rotations.sin.double(), rotations.rotary_dim).rotate(exact)
    assert error_of(fused, exact) <= 1.1 * error_of(twin, exact) + 1e-7
    # A rotated number is a sum of two products, so what counts is the size of its head, not its own.
    assert ((fused.double() - exact).abs() <= 8 * torch.finfo(dtype).eps * exact.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(qkv, copy)
    for cache, new in zip(caches, (fused[:, num_heads:], qkv[:, num_normed:]), strict=True):
        expected = torch.full_like(cache, 7.0).flatten(0, 1)
        expected[slots[slots >= 0]] = new[slots >= 0]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_rows_beyond_2_to_the_31_numbers_are_reached():
    """An offset of 32 bits wraps around and reads the first rows again, or faults."""
    weight = torch.ones(4096, dtype=torch.bfloat16, device=GPU)
    x = torch.zeros((2**19 + 32, 4096), dtype=torch.bfloat16, device=GPU)
    x[-32:] = randn(32, 4096, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, 1e-6, True)[-32:], rms_norm(x[-32:].clone(), weight, 1e-6, True))
    assert torch.equal(act_and_mul(x, use_kernels=True)[-32:], act_and_mul(x[-32:].clone(), use_kernels=True))
    logits = x.view(-1, 4096 * 32)
    for token_id in (99, 131000):
        logits[:-1, token_id] += 50 + token_id // 1000
        logits[-1, token_id - 22] = 60 + token_id // 1000
        expected = [token_id] * (len(logits) - 1) + [token_id - 22]
        assert triton_sample(logits, *sampled_rows(len(logits), 0.0)).tolist() == expected


# The sequence table


def on_device(table: Table) -> Table:
    return Table(*(tensor.to(GPU) for tensor in table))


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_sampled", "max_blocks"),
    [
        (1, 1, 1, 1), (127, 128, 129, 130), (300, 900, 260, 3), (3, 700, 0, 129), (40, 256, 400, 2),
        (1024, 4096, 1024, 64),
    ],
)  # fmt: skip
def test_rows_are_expanded_as_by_the_twin(num_rows, num_tokens, num_sampled, max_blocks):
    rows, table = random_rows(num_rows, num_tokens, num_sampled, max_blocks)
    size = (num_rows, num_tokens, num_sampled, 16)
    expected = expanded(rows, table, *size)
    for fused in (True, False):
        found = expanded(rows.to(GPU), on_device(table), *size, fused)
        for name, tensor in expected._asdict().items():
            assert found._asdict()[name].dtype == tensor.dtype, (name, fused)
            assert torch.equal(found._asdict()[name].cpu(), tensor), (name, fused)


def test_a_captured_expansion_follows_the_rows_and_the_table():
    """The graph must hold nothing that the host knew at the capture, when all rows are padding."""
    size = (40, 200, 30, 16)
    cases = [random_rows(40, 200, 30, 5, seed) for seed in range(4)]
    rows = torch.zeros_like(cases[0][0], device=GPU)
    rows[:, 0] = len(cases[0][1].tokens) - 1
    table = on_device(Table(*map(torch.zeros_like, cases[0][1])))
    sampled = torch.arange(100, 130, device=GPU)
    expanded(rows, table, *size, True)
    write_tokens(table.tokens, *expanded(rows, table, *size, True)[7:9], sampled, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = expanded(rows, table, *size, True)
        write_tokens(table.tokens, found.entries, found.lengths.clamp(max=table.tokens.shape[1] - 1), sampled, True)
    for new_rows, new_table in cases:
        rows.copy_(new_rows)
        for place, new in zip(table, new_table, strict=True):
            place.copy_(new)
        graph.replay()
        expected = expanded(new_rows, new_table, *size)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
        tokens = new_table.tokens.clone()
        lengths = expected.lengths.clamp(max=tokens.shape[1] - 1)
        # All padding rows write to one place, in any order.
        tokens[expected.entries, lengths] = sampled.cpu().int()
        assert torch.equal(table.tokens[:-1].cpu(), tokens[:-1])


@pytest.mark.parametrize("num_rows", [0, 1, 128, 129, 1000])
def test_sampled_tokens_are_written_as_by_the_twin(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    entries, lengths = (
        torch.randperm(num_rows, generator=generator),
        torch.randint(300, (num_rows,), generator=generator),
    )
    sampled = torch.randint(-2, 200_000, (num_rows,), generator=generator)
    expected = torch.full((num_rows + 1, 300), 7, dtype=torch.int32)
    tokens = expected.to(GPU)
    write_tokens(expected, entries, lengths, sampled)
    write_tokens(tokens, entries.to(GPU), lengths.to(GPU), sampled.to(GPU), use_kernels=True)
    assert torch.equal(tokens.cpu(), expected)


# Sampling


def sampled_rows(num_rows: int, temperature: float | torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(temperatures, seeds, positions); 64 random bits of seed per row, so that both halves and the sign count."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator).to(GPU)
    positions = torch.randint(0, 40000, (num_rows,), generator=generator).to(GPU)
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(num_rows).contiguous().to(GPU)
    return temperatures, seeds, positions


def in_parts(draw, logits: torch.Tensor, *rows: torch.Tensor, size: int = 250) -> torch.Tensor:
    """Samples a few rows at a time: the twin holds all noise, and a grid has at most 65,535 rows."""
    parts = [slice(first, first + size) for first in range(0, len(logits), size)]
    return torch.cat([draw(logits[part], *(values[part] for values in rows)) for part in parts])


@pytest.mark.parametrize(
    ("dtype", "num_rows", "vocab_size"),
    [
        (torch.bfloat16, 2000, 151936), (torch.float16, 300, 151936), (torch.float32, 300, 151936),
        (torch.bfloat16, 500, 259), (torch.float32, 500, 4097), (torch.float32, 500, 2), (torch.float32, 1, 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_filtered", [False, True], ids=["all ids", "filtered"])
def test_the_fused_sampler_gives_the_tokens_of_its_twin(dtype, num_rows, vocab_size, is_filtered):
    """Greedy rows equal ones among thousands of ties; sampled rows differ only where rounding decides."""
    logits = randn(num_rows, vocab_size, dtype=torch.float32).mul(3).to(dtype)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 1.7]).repeat(num_rows // 4 + 1)[:num_rows]
    rows = temperatures, seeds, positions = sampled_rows(num_rows, temperatures)
    if is_filtered:  # keeps the more probable half of the ids, except in greedy rows
        medians = logits.float().median(-1).values
        rows = *rows, medians.masked_fill(temperatures == 0, -math.inf)
    ours, theirs = triton_sample(logits, *rows), in_parts(plain_sample, logits, *rows)
    assert ours.dtype == theirs.dtype == torch.int64
    is_greedy = temperatures == 0
    assert torch.equal(ours[is_greedy], theirs[is_greedy])
    if is_filtered:
        assert (logits.gather(1, ours[:, None]).float()[:, 0] >= rows[-1]).all()
        logits = logits.masked_fill(logits.float() < rows[-1][:, None], -math.inf)
    differing = (ours != theirs).nonzero().squeeze(1)
    print(f"{len(differing)} of {num_rows} rows differ")
    assert len(differing) <= num_rows / 1000
    for row in differing.tolist():
        one = slice(row, row + 1)
        scores = perturbed(logits[one], float(temperatures[row]), seeds[one], positions[one])[0]
        assert abs(float(scores[ours[row]] - scores[theirs[row]])) < 1e-4, (row, ours[row], theirs[row])


def test_rows_of_a_wider_matrix_are_sampled_like_copies():
    """Logits of a padded vocabulary are a view; its row stride is not the vocabulary's size."""
    wide = randn(64, 5000, dtype=torch.bfloat16)
    wide[:, 4990:] = 100
    rows = sampled_rows(64, torch.tensor([0.0, 1.0]).repeat(32))
    view = wide[:, :4990]
    assert torch.equal(triton_sample(view, *rows), triton_sample(view.contiguous(), *rows))
    settings = torch.full((64,), 20, device=GPU).int(), torch.full((64,), 0.9, device=GPU), torch.zeros(64, device=GPU)
    thresholds = triton_filter_thresholds(view, rows[0], *settings)
    assert torch.equal(thresholds, triton_filter_thresholds(view.contiguous(), rows[0], *settings))
    assert torch.equal(triton_sample(view, *rows, thresholds), triton_sample(view.contiguous(), *rows, thresholds))


def test_a_row_is_sampled_alike_alone_and_in_any_batch():
    """The noise belongs to seed and position, not to the row's number."""
    logits, rows = randn(300, 4999, dtype=torch.bfloat16), sampled_rows(300, 1.0)
    together = triton_sample(logits, *rows)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(GPU)[:100]
    assert torch.equal(triton_sample(logits[order], *(values[order] for values in rows)), together[order])
    assert together.unique().numel() > 200


@pytest.mark.parametrize("varies", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_are_the_softmax(varies, temperature):
    """Noise that repeats, is biased or is shared among tokens would shift them; chi-square over 200,000 draws."""
    num_rows, vocab_size = 200_000, 50
    row = randn(vocab_size, dtype=torch.float32).mul(1.5)
    number, same = torch.arange(num_rows, device=GPU), torch.full((num_rows,), 12345, device=GPU)
    seeds, positions = (number, same) if varies == "seeds" else (same, number)
    temperatures = torch.full((num_rows,), temperature, device=GPU)
    tokens = in_parts(triton_sample, row.expand(num_rows, -1), temperatures, seeds, positions, size=50_000)
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    expected = (row.double() / temperature).softmax(-1) * num_rows
    rare = expected < 10
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    expected, observed = expected[expected > 0], observed[expected > 0]
    chi_square, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    print(f"chi-square {chi_square:.1f} with {freedom} degrees of freedom")
    assert len(expected) > 20
    assert freedom - 4.5 * math.sqrt(2 * freedom) < chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("vocab_size", [259, 20000])
def test_broken_rows_are_marked_and_spare_the_others(temperature, vocab_size):
    """NaN loses every comparison, so a plain argmax would return some token for a broken row."""
    logits, rows = randn(40, vocab_size, dtype=torch.bfloat16), sampled_rows(40, temperature)
    healthy = triton_sample(logits, *rows)
    logits[3, 0] = math.nan
    logits[5, vocab_size - 1] = math.nan
    logits[8, 100] = math.inf
    logits[11] = math.nan
    logits[9] = -math.inf
    logits[12], logits[12, 7] = -math.inf, math.nan
    expected = healthy.clone()
    expected[[3, 5, 8, 11, 12]] = BROKEN_LOGITS
    expected[9] = NO_TOKEN_LEFT
    # Banned tokens are no breakage.
    logits[20, : vocab_size // 2] = -math.inf
    tokens = triton_sample(logits, *rows)
    assert tokens[20] >= vocab_size // 2
    expected[20] = tokens[20]
    assert torch.equal(tokens, expected)
    assert torch.equal(tokens, plain_sample(logits, *rows))


def test_no_rows_are_sampled_as_no_tokens():
    """If all chunks of a step go on, it samples no token; CUDA does not allow a launch of no programs."""
    tokens = triton_sample(randn(0, 259, dtype=torch.bfloat16), *sampled_rows(0, 1.0))
    assert tokens.shape == (0,) and tokens.dtype == torch.int64


def test_filtered_rows_are_sampled_as_on_a_cpu():
    """With top-k, top-p and min-p mixed, thresholds and tokens are equal, though the GPU sums in another order."""
    num_rows, vocab_size = 400, 997
    logits = randn(num_rows, vocab_size, dtype=torch.float32).mul(2)
    rng = random.Random(0)
    rows = sampled_rows(num_rows, torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(num_rows // 4))
    settings = (
        torch.tensor([rng.choice((0, 1, 5, 50, vocab_size)) for _ in range(num_rows)], dtype=torch.int32),
        torch.tensor([rng.choice((0.1, 0.9, 1.0)) for _ in range(num_rows)]),
        torch.tensor([rng.choice((0.0, 0.1)) for _ in range(num_rows)]),
    )
    ours = triton_filter_thresholds(logits, rows[0], *(values.to(GPU) for values in settings))
    theirs = plain_filter_thresholds(logits.cpu(), rows[0].cpu(), *settings)
    assert (ours.cpu() != theirs).sum() <= num_rows / 100
    found = triton_sample(logits, *rows, ours)
    expected = plain_sample(logits.cpu(), *(values.cpu() for values in rows), theirs)
    assert (found >= 0).all() and (found.cpu() != expected).sum() <= num_rows / 100
    assert (logits.gather(1, found[:, None])[:, 0] >= ours).all()
