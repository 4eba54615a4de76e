"""The attention backends against the formula in float64, over caches that are NaN wherever they must not look."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from model_factory import one_thread  # noqa: F401

from nanovllm.engine.batch import build_batch
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels import AttentionBackend, AttentionShape, make_attention_backend
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import Context

BACKENDS = ["torch", "sdpa"]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Queries of a long prompt that are compared: the formula in float64 is slow.
NUM_COMPARED = 40


@dataclass
class Case:
    """A step's attention.

    queries, keys, values: a tensor [length, heads, head_dim] for each sequence, whole; those are the truth.
    num_new: how many of each sequence's tokens are new.
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the old tokens in their slots, else NaN.
    """

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    num_new: list[int]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    context: Context

    def backend(self, name: str) -> AttentionBackend:
        """A backend for tensors like these."""
        (num_heads, head_dim), num_kv_heads = self.queries[0].shape[1:], self.keys[0].shape[1]
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, self.queries[0].dtype, torch.device("cpu"))
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
) -> Case:
    """A step over `sequences`, each (cached tokens, new tokens), in blocks dealt at random.

    Every sequence holds `num_blocks_ahead` more blocks than it needs yet, as a chunked prompt does.
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
    shape = (sum(table_sizes) + 3, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))

    slot_mapping: list[int] = []
    for row, length in enumerate(lengths):
        slots = [int(tables[row, i // block_size]) * block_size + i % block_size for i in range(length)]
        old = torch.tensor(slots[: num_cached[row]], dtype=torch.int64)
        k_cache.view(-1, num_kv_heads, head_dim)[old] = keys[row][: num_cached[row]]
        v_cache.view(-1, num_kv_heads, head_dim)[old] = values[row][: num_cached[row]]
        slot_mapping += slots[num_cached[row] :]
    context = Context(
        cu_seqlens_q=torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        max_seqlen_q=max(num_new),
        max_seqlen_k=max(lengths),
        slot_mapping=torch.tensor(slot_mapping),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.from_numpy(tables).int(),
        block_size=block_size,
    )
    return Case(queries, keys, values, num_new, k_cache, v_cache, context)


def run(backend_name: str, case: Case, backend: AttentionBackend | None = None) -> torch.Tensor:
    """What a layer does: store the new keys and values, then attend."""
    backend, context = backend or case.backend(backend_name), case.context
    context.plan = backend.plan(context)
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)
    backend.store_kvcache(k, v, case.k_cache, case.v_cache, context.slot_mapping)
    return backend.attend(q, k, v, case.k_cache, case.v_cache, context)


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
    """softmax(q kᵀ / sqrt(d)) v over keys 0 … position; q: [heads, d], k and v: [length, kv_heads, d]."""
    num_heads, head_dim = q.shape
    out = np.empty_like(q)
    for head in range(num_heads):
        kv_head = head // (num_heads // k.shape[1])
        scores = k[: position + 1, kv_head] @ q[head] / math.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[: position + 1, kv_head] / weights.sum()
    return out


def relative_error(case: Case, out: torch.Tensor) -> float:
    """‖out − formula‖ / ‖formula‖, over all new rows of short sequences and the ends and a sample of long ones."""
    assert out.dtype == case.queries[0].dtype and out.isfinite().all()
    ours, exact, start = [], [], 0
    for whole_q, whole_k, whole_v, num_new in zip(case.queries, case.keys, case.values, case.num_new, strict=True):
        q, k, v = (whole.double().numpy() for whole in (whole_q, whole_k, whole_v))
        rows = range(num_new)
        if num_new > NUM_COMPARED:
            sample = random.Random(num_new).sample(rows, NUM_COMPARED - 8)
            rows = sorted({*range(4), *range(num_new - 4, num_new), *sample})
        for row in rows:
            position = len(q) - num_new + row
            ours.append(out[start + row].double().numpy())
            exact.append(formula(q[position], k, v, position))
        start += num_new
    ours, exact = np.stack(ours), np.stack(exact)
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


def assert_exact(backend: str, case: Case) -> None:
    error = relative_error(case, run(backend, case))
    assert error <= TOLERANCE[case.queries[0].dtype], error


MIXED = [(0, 17), (30, 1), (12, 9), (0, 1), (63, 1), (64, 1), (7, 1), (0, 4), (5, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(2, 1), (1, 2), (3, 3), (2, 4), (1, 5), (2, 7), (1, 8)])
def test_grouped_queries_attend_as_the_formula_says(backend, dtype, head_dim, num_kv_heads, group_size):
    """A query head must read the key head of its own group; with one group per test a swapped layout goes unseen."""
    assert_exact(
        backend, make_case(MIXED, 16, num_kv_heads, group_size, head_dim, dtype, seed=group_size * 1000 + head_dim)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
def test_page_boundaries_change_nothing(backend, dtype, block_size):
    """Lengths of one block ± 1 and two blocks ± 1, as prefill, as decode, and as a chunk that begins or ends there."""
    around = [length for n in (1, 2) for length in (n * block_size - 1, n * block_size, n * block_size + 1) if length]
    prefills = [(0, length) for length in around]
    decodes = [(length, 1) for length in around]
    chunks = [(length, 3) for length in around] + [(2, length) for length in around]
    assert_exact(backend, make_case(prefills + decodes + chunks, block_size, dtype=dtype, seed=block_size))


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
def test_ragged_decodes_from_1_to_4096(backend, dtype):
    """Decodes of very different lengths share padded buckets; padding must weigh nothing."""
    rng = random.Random(1)
    lengths = [0, 1, 2, 4095, 4094, 2047, 2048] + [int(2 ** rng.uniform(0, 11)) for _ in range(40)]
    rng.shuffle(lengths)
    assert_exact(backend, make_case([(length, 1) for length in lengths], 64, 2, 2, 32, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
def test_long_prompts_and_chunks_of_them(backend, dtype):
    """Prompts of 4,096 tokens, whole and in chunks longer than one mask holds, beside decodes."""
    assert_exact(backend, make_case([(0, 4096), (3, 1), (2500, 1596), (4095, 1), (3583, 513)], 16, 1, 1, 32, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_prefill_chunk_and_decode(backend, seed):
    """One rule: each sequence's queries are its last ones, whatever its neighbours do in the same step."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(rng.randrange(1, 24)):
        cached = rng.choice((0, rng.randrange(200)))
        sequences.append((cached, rng.choice((1, rng.randrange(1, 90)))))
    assert_exact(
        backend,
        make_case(
            sequences,
            block_size=rng.choice((1, 3, 4, 16, 64, 256)),
            num_kv_heads=rng.choice((1, 2, 4)),
            group_size=rng.randrange(1, 9),
            head_dim=rng.choice((32, 64, 128)),
            num_blocks_ahead=rng.randrange(4),
            seed=seed,
        ),
    )


def test_the_reference_keeps_float64():
    """Computing float64 in float32 would make the reference no better than what it judges."""
    assert_exact("torch", make_case(MIXED, 5, 2, 3, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
def test_large_scores_do_not_overflow(backend, dtype):
    """exp of a score of a few hundred is infinite unless the largest is subtracted first."""
    case = make_case(MIXED, dtype=dtype)
    case.queries = [q * 60 for q in case.queries]
    assert_exact(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_tokens_go_to_their_slots_and_nowhere_else(backend):
    """A write one slot off reaches a neighbour's block; everything that is not a new token's slot stays as it was."""
    case = make_case(MIXED)
    before = case.k_cache.clone(), case.v_cache.clone()
    run(backend, case)
    slots = case.context.slot_mapping
    for cache, old, new in zip((case.k_cache, case.v_cache), before, (case.keys, case.values), strict=True):
        expected = old.flatten(0, 1)
        expected[slots] = case.new(new)
        torch.testing.assert_close(cache.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_of_minus_one_is_not_written(backend):
    """Padding rows of a captured step have slot −1, which as an index is the last slot of the cache."""
    k, v = torch.arange(160.0).view(2, 5, 2, 8).unbind()
    k_cache, v_cache = torch.full((2, 3, 4, 2, 8), 7.0).unbind()
    slots = torch.tensor([3, -1, 0, -1, 10])
    shape = AttentionShape(2, 2, 8, torch.float32, torch.device("cpu"))
    make_attention_backend(backend, shape).store_kvcache(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache.flatten(0, 1), k), (v_cache.flatten(0, 1), v)):
        assert torch.equal(cache[[3, 0, 10]], new[[0, 2, 4]])
        untouched = [slot for slot in range(12) if slot not in (3, 0, 10)]
        assert (cache[untouched] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
def test_a_chunks_attention_ends_at_the_chunk(backend, poison):
    """The blocks of a chunked prompt's rest are allocated already and hold somebody's old keys."""
    case = make_case([(0, 6), (6, 3), (9, 1), (3, 14)], block_size=4, num_blocks_ahead=3)
    for cache in (case.k_cache, case.v_cache):
        cache.masked_fill_(cache.isnan(), poison)
    assert_exact(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_in_chunks_attends_as_in_one_piece(backend):
    """Chunks over the cache and one piece over the new keys take different paths; both see the same keys."""
    whole = make_case([(0, 50)], block_size=4, num_kv_heads=2)
    expected = run(backend, whole)
    parts = []
    for start, end in ((0, 13), (13, 14), (14, 40), (40, 50)):
        case = make_case([(start, end - start)], block_size=4, num_kv_heads=2)
        case.queries, case.keys, case.values = (
            [tensors[0][:end]] for tensors in (whole.queries, whole.keys, whole.values)
        )
        slots = case.context.block_tables[0].long().repeat_interleave(4) * 4 + torch.arange(4).repeat(
            case.context.block_tables.shape[1]
        )
        case.k_cache.flatten(0, 1)[slots[:start]] = whole.keys[0][:start]
        case.v_cache.flatten(0, 1)[slots[:start]] = whole.values[0][:start]
        parts.append(run(backend, case))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_may_share_blocks(backend):
    """Prefix caching puts one block into several tables; all of them read the same keys."""
    case = make_case([(8, 1), (8, 5), (8, 1)], block_size=4)
    for row in (1, 2):
        case.context.block_tables[row, :2] = case.context.block_tables[0, :2]
        for tensors in (case.keys, case.values):
            tensors[row][:8] = tensors[0][:8]
    # The copies that nobody points to any more must not matter either.
    assert_exact(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_backend_serves_steps_of_every_size(backend):
    """Whatever it keeps between steps must fit the next one: larger or smaller."""
    steps = [MIXED, [(0, 3)], [(300, 1)] * 5, [(2, 1)], [(40, 30), (200, 1)], MIXED]
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        attention = None
        for sequences in steps:
            case = make_case(sequences, num_kv_heads=1 + seed, head_dim=32 * (1 + seed % 2), dtype=dtype, seed=seed)
            attention = attention or case.backend(backend)
            assert relative_error(case, run(backend, case, attention)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_changed(backend):
    """q, k and v are views of one projection; writing to one of them would corrupt another."""
    case = make_case(MIXED)
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)
    copies = [tensor.clone() for tensor in (q, k, v)]
    attention, context = case.backend(backend), case.context
    context.plan = attention.plan(context)
    attention.store_kvcache(k, v, case.k_cache, case.v_cache, context.slot_mapping)
    attention.attend(q, k, v, case.k_cache, case.v_cache, context)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((q, k, v), copies, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_one_projection_are_attended_like_copies(backend):
    """The model hands over slices of its fused projection, which are not contiguous."""
    case = make_case(MIXED, num_kv_heads=2)
    expected = run(backend, case)
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)
    q, k, v = torch.cat((q, k, v), 1).split((4, 2, 2), 1)
    attention = case.backend(backend)
    attention.store_kvcache(k, v, case.k_cache, case.v_cache, case.context.slot_mapping)
    out = attention.attend(q, k, v, case.k_cache, case.v_cache, case.context)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_build_batch_describes_the_step_that_the_formula_means():
    """Prefill, chunk and decode in one step: the Context of scheduled work is the one written by hand here."""
    case = make_case(MIXED, block_size=4)
    work = []
    for row, (cached, num_new) in enumerate(MIXED):
        seq = Sequence(row, list(range(cached + num_new)), SamplingParams(), 100)
        seq.block_table = case.context.block_tables[row, : -(-(cached + num_new) // 4) + 1].tolist()
        seq.num_computed_tokens = cached + num_new
        seq.slot = row
        work.append((seq, num_new, False))
    batch = build_batch(work, 4, 100, torch.device("cpu"))
    for name, expected in vars(case.context).items():
        actual = getattr(batch.context, name)
        if name == "block_tables":
            actual = actual[:, : expected.shape[1]]
        if isinstance(expected, torch.Tensor):
            assert actual.dtype == expected.dtype and torch.equal(actual, expected), name
        else:
            assert actual == (list(range(len(MIXED))) if name == "seq_ids" else expected), name
    assert batch.positions.tolist() == [i for old, new in MIXED for i in range(old, old + new)]
    assert batch.token_ids.tolist() == batch.positions.tolist()
