"""The attention backends against the formula in float64, over caches that hold NaN wherever they must not read."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from support.attention_case import (
    MIXED,
    TOLERANCE,
    Case,
    make_case,
    make_metadata,
    relative_error,
    run,
)
from support.batch_factory import make_batch
from support.long import some

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.sampling_params import SamplingParams

# `triton` runs in Triton's interpreter here (see conftest.py).
BACKENDS = ["torch", "sdpa", "tiled", "triton"]
BLOCK_SIZE = {"torch": 4, "sdpa": 4, "tiled": 4, "triton": 16}  # small ones
# The interpreter multiplies the bits of bfloat16 numbers as integers (tl.dot), so the GPU tests have bfloat16.
PAIRS = [
    (backend, dtype)
    for backend in BACKENDS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if (backend, dtype) != ("triton", torch.bfloat16)
]
BACKENDS_AND_DTYPES = pytest.mark.parametrize(("backend", "dtype"), PAIRS, ids=str)


def assert_exact(backend: str, case: Case) -> None:
    error = relative_error(case, run(backend, case))
    assert error <= TOLERANCE[case.queries[0].dtype], error


@pytest.mark.grid(2)
@BACKENDS_AND_DTYPES
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(2, 1), (1, 2), (3, 3), (2, 4), (1, 5), (2, 7), (1, 8)])
def test_grouped_queries_attend_as_the_formula_says(backend, dtype, head_dim, num_kv_heads, group_size):
    """A query head must read the key head of its own group; with a single group, a swapped layout would not show."""
    assert_exact(
        backend, make_case(MIXED, 16, num_kv_heads, group_size, head_dim, dtype, seed=group_size * 1000 + head_dim)
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("backend", "dtype", "block_size"),
    [
        (*pair, size)
        for pair in PAIRS
        for size in ((16, 48, 64, 128) if pair[0] == "triton" else (1, 4, 16, 48, 64, 256))
    ],
    ids=str,
)
def test_page_boundaries_change_nothing(backend, dtype, block_size, count):
    """Lengths are one block ± 1 and two blocks ± 1, in a prefill, a decode, and a chunk that begins or ends there. By
    default large blocks take only the first three: their many keys take long in Triton's interpreter."""
    ends = [block_size, 2 * block_size][: 2 if block_size < 64 else count(1, 2)]
    around = [length for end in ends for length in (end - 1, end, end + 1) if length]
    prefills = [(0, length) for length in around]
    decodes = [(length, 1) for length in around]
    chunks = [(length, 3) for length in around] + [(2, length) for length in around]
    assert_exact(backend, make_case(decodes + prefills + chunks, block_size, dtype=dtype, seed=block_size))


@pytest.mark.grid(1)
@BACKENDS_AND_DTYPES
def test_ragged_decodes_from_1_to_4096(backend, dtype):
    """Decodes of very different lengths share padded buckets; padding must not count."""
    rng = random.Random(1)
    lengths = [0, 1, 2, 4095, 4094, 2047, 2048] + [int(2 ** rng.uniform(0, 11)) for _ in range(40)]
    rng.shuffle(lengths)
    assert_exact(backend, make_case([(length, 1) for length in lengths], 64, 2, 2, 32, dtype))


@pytest.mark.grid(1)
@BACKENDS_AND_DTYPES
def test_long_prompts_and_chunks_of_them(backend, dtype):
    """Prompts of 4,096 tokens run beside decodes, whole and in chunks longer than one mask."""
    sequences = [(0, 4096), (3, 1), (2500, 1596), (4095, 1), (3583, 513)]
    if backend == "triton":  # its tiles are shorter, and the interpreter is slow
        sequences = [(0, 700), (3, 1), (500, 200), (699, 1), (571, 129)]
    assert_exact(backend, make_case(sequences, 16, 1, 1, 32, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", some(range(12), 0, 1, 2))
def test_any_mix_of_prefill_chunk_and_decode(backend, seed):
    """There is one rule: each sequence's queries are its last ones, for any neighbours in the same step."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(rng.randrange(1, 24)):
        cached = rng.choice((0, rng.randrange(200)))
        sequences.append((cached, rng.choice((1, rng.randrange(1, 90)))))
    if seed % 2:  # the order that the scheduler mostly uses
        sequences.sort(key=lambda seq: seq[1] > 1)
    assert_exact(
        backend,
        make_case(
            sequences,
            block_size=rng.choice((16, 32, 48, 64, 256) if backend == "triton" else (1, 3, 4, 16, 64, 256)),
            num_kv_heads=rng.choice((1, 2, 4)),
            group_size=rng.randrange(1, 9),
            head_dim=rng.choice((32, 64, 128)),
            num_blocks_ahead=rng.randrange(4),
            seed=seed,
        ),
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_of_whole_tiles_of_keys(head_dim, group_size, block_size, window):
    """For these shapes, descriptors fetch the tiles of keys, in blocks that are not neighbours, for one head or two of
    a group. All slots after a sequence's keys are NaN, in its last block too.
    """
    sequences = [(0, 150), (64, 64), (130, 70), (200, 1), (0, 3), (190, 2)]
    case = make_case(sequences, block_size, 2, group_size, head_dim, torch.float32, seed=head_dim, window=window)
    assert_exact("triton", case)


@pytest.mark.grid(1)
@BACKENDS_AND_DTYPES
@pytest.mark.parametrize("window", [1, 2, 16, 31, 32, 33, 64, 65, 300, 900])
def test_a_query_sees_the_last_keys_of_its_window(backend, dtype, window):
    """Windows end around tiles and blocks, and are shorter and longer than prompts, chunks and contexts. A tile of
    queries that a window leaves without a key has no largest score.
    """
    sequences = [(250, 1), (256, 1), (600, 1), *MIXED, (30, 100), (0, 150), (290, 40), (300, 70)]
    block_size = 64 if window % 2 else 16
    assert_exact(backend, make_case(sequences, block_size, 2, 2, 32, dtype, seed=window, window=window))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_plan_serves_layers_with_and_without_a_window(backend):
    """Their decodes have different splits, so the lists of splits must not share memory."""
    sequences = [(900, 1), (256, 1), (40, 1), (700, 1), (0, 70), (300, 20)]
    case = make_case(sequences, 16, 2, 2, 32, window=100)
    shared = case.backend(backend)
    metadata = replace(case.metadata, plan=shared.plan(case.metadata))
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)
    shared.store_kvcache(k, v, case.cache, metadata)
    for window in (0, 100, 0):
        out = shared.attend(q, k, v, case.cache, metadata, window)
        assert relative_error(replace(case, window=window), out) < 1e-5


@pytest.mark.grid(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_other_head_sizes_and_scales(backend, head_dim, scale):
    """Gemma has its own scale of scores, and wide heads."""
    assert_exact(backend, make_case(MIXED, 16, 1, 3, head_dim, scale=scale, window=20))
    assert_exact(backend, make_case(MIXED, 16, 2, 1, head_dim, scale=scale))


def test_the_reference_keeps_float64():
    """Computing float64 in float32 would make the reference no better than what it judges."""
    assert_exact("torch", make_case(MIXED, 5, 2, 3, dtype=torch.float64))


@BACKENDS_AND_DTYPES
def test_large_scores_do_not_overflow(backend, dtype):
    """exp of a score of a few hundred is infinite unless the largest is subtracted first."""
    case = make_case(MIXED, BLOCK_SIZE[backend], dtype=dtype)
    case.queries = [q * 60 for q in case.queries]
    assert_exact(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_tokens_go_to_their_slots_and_nowhere_else(backend):
    """A write one slot off reaches a neighbour's block; all slots except those of new tokens stay as they were."""
    case = make_case(MIXED, BLOCK_SIZE[backend])
    before = case.cache.keys.clone(), case.cache.values.clone()
    run(backend, case)
    slots = case.metadata.slot_mapping
    for cache, old, new in zip((case.cache.keys, case.cache.values), before, (case.keys, case.values), strict=True):
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
    backend = make_attention_backend(backend, shape)
    metadata = make_metadata([5], [5], slots.tolist(), torch.zeros(1, 3, dtype=torch.int32), 4)
    is_padded = dict(cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32), context_lens=metadata.context_lens - 2)
    metadata = replace(metadata, **is_padded)
    metadata.plan = backend.plan(metadata)
    backend.store_kvcache(k, v, LayerCache(k_cache, v_cache), metadata)
    for cache, new in ((k_cache.flatten(0, 1), k), (v_cache.flatten(0, 1), v)):
        assert torch.equal(cache[[3, 0, 10]], new[[0, 2, 4]])
        untouched = [slot for slot in range(12) if slot not in (3, 0, 10)]
        assert (cache[untouched] == 7).all()


@pytest.mark.grid(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
def test_a_chunks_attention_ends_at_the_chunk(backend, poison):
    """The blocks for the rest of a chunked prompt are already allocated, and hold another sequence's old keys."""
    sequences = [(9, 1), (0, 6), (6, 3), (11, 1), (3, 14)]
    case = make_case(sequences, BLOCK_SIZE[backend], num_blocks_ahead=3)
    for cache in (case.cache.keys, case.cache.values):
        cache.masked_fill_(cache.isnan(), poison)
    assert_exact(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_in_chunks_attends_as_in_one_piece(backend):
    """Chunks over the cache and one piece over the new keys take different paths; both see the same keys."""
    block_size = BLOCK_SIZE[backend]
    whole = make_case([(0, 50)], block_size, num_kv_heads=2)
    expected = run(backend, whole)
    parts = []
    for start, end in ((0, 13), (13, 14), (14, 40), (40, 50)):
        case = make_case([(start, end - start)], block_size, num_kv_heads=2)
        case.queries, case.keys, case.values = (
            [tensors[0][:end]] for tensors in (whole.queries, whole.keys, whole.values)
        )
        table = case.metadata.block_tables[0].long()
        slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()
        case.cache.write(whole.keys[0][:start], whole.values[0][:start], slots[:start])
        parts.append(run(backend, case))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_may_share_blocks(backend):
    """Prefix caching puts one block into several tables; all of them read the same keys."""
    block_size = BLOCK_SIZE[backend]
    num_shared = 2 * block_size
    case = make_case([(num_shared, 1), (num_shared, 5), (num_shared, 1)], block_size)
    for row in (1, 2):
        case.metadata.block_tables[row, :2] = case.metadata.block_tables[0, :2]
        for tensors in (case.keys, case.values):
            tensors[row][:num_shared] = tensors[0][:num_shared]
    # The copies that no table points to any more must not matter either.
    assert_exact(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_backend_serves_steps_of_every_size(backend):
    """All that a backend keeps between steps must fit the next step, larger or smaller."""
    steps = [MIXED, [(0, 3)], [(300, 1)] * 5, [(2, 1)], [(40, 30), (200, 1)], MIXED]
    half = torch.float16 if backend == "triton" else torch.bfloat16
    for seed, dtype in enumerate((torch.float32, half, torch.float32)):
        attention = None
        for sequences in steps:
            case = make_case(
                sequences, BLOCK_SIZE[backend], 1 + seed, head_dim=32 * (1 + seed % 2), dtype=dtype, seed=seed
            )
            attention = attention or case.backend(backend)
            assert relative_error(case, run(backend, case, attention)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_changed(backend):
    """q, k and v are views of one projection; writing to one of them would corrupt another."""
    case = make_case(MIXED)
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)
    copies = [tensor.clone() for tensor in (q, k, v)]
    attention, metadata = case.backend(backend), case.metadata
    metadata = replace(metadata, plan=attention.plan(metadata))
    attention.store_kvcache(k, v, case.cache, metadata)
    attention.attend(q, k, v, case.cache, metadata)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((q, k, v), copies, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_one_projection_are_attended_like_copies(backend):
    """The model hands over slices of its fused projection, which are not contiguous."""
    case = make_case(MIXED, BLOCK_SIZE[backend], num_kv_heads=2)
    expected = run(backend, case)
    q, k, v = case.new(case.queries), case.new(case.keys), case.new(case.values)
    q, k, v = torch.cat((q, k, v), 1).split((4, 2, 2), 1)
    attention = case.backend(backend)
    metadata = replace(case.metadata, plan=attention.plan(case.metadata))
    attention.store_kvcache(k, v, case.cache, metadata)
    out = attention.attend(q, k, v, case.cache, metadata)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


MAX_LENGTH, NUM_LAYERS = 160, 3


@dataclass
class Running:
    """A sequence of many steps; queries, keys, values: [NUM_LAYERS, MAX_LENGTH, heads, head_dim], the truth."""

    seq_id: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    blocks: list[int]
    num_cached: int = 0
    num_preemptions: int = 0


class Steps:
    """The steps of one engine: one `sdpa` backend over the caches of several layers, NaN in every unused slot.

    Each step is compared with the formula (the `torch` backend in float64), which has caches of its own.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0, num_blocks: int = 1500, block_size: int = 4):
        self.dtype, self.block_size, self.num_kv_heads, self.num_groups = dtype, block_size, 2, 1
        self.generator, self.rng, self.num_admitted = torch.Generator().manual_seed(seed), random.Random(seed), 0
        self.free_blocks = self.rng.sample(range(num_blocks), num_blocks)
        shape = AttentionShape(4, self.num_kv_heads, 16, dtype, torch.device("cpu"), windows=(0, 9))
        self.ours, self.exact = make_attention_backend("sdpa", shape), make_attention_backend("torch", shape)
        # [keys and values, layer, …]
        cache_shape = (2, NUM_LAYERS, num_blocks, block_size, self.num_kv_heads, 16)
        self.cache = torch.full(cache_shape, math.nan, dtype=dtype)
        self.exact_cache = torch.full(cache_shape, math.nan, dtype=torch.float64)

    def admit(self) -> Running:
        qkv = torch.randn(NUM_LAYERS, MAX_LENGTH, 4 + 2 * self.num_kv_heads, 16, generator=self.generator)
        self.num_admitted += 1
        return Running(self.num_admitted, *qkv.to(self.dtype).split((4, self.num_kv_heads, self.num_kv_heads), 2), [])

    def finish(self, seq: Running) -> None:
        """Its blocks are reused next; no sequence may read their old keys."""
        for cache in (self.cache, self.exact_cache):
            cache[:, :, seq.blocks] = math.nan
        self.free_blocks += self.rng.sample(seq.blocks, len(seq.blocks))
        seq.blocks = []

    def move(self, seq: Running) -> None:
        """The sequence returns from preemption as another tenant, to other blocks with the same keys."""
        seq.num_preemptions += 1
        old = Running(0, seq.queries, seq.keys, seq.values, seq.blocks)
        seq.blocks = [self.free_blocks.pop(0) for _ in old.blocks]
        for cache in (self.cache, self.exact_cache):
            cache[:, :, seq.blocks] = cache[:, :, old.blocks]
        self.finish(old)

    def skip(self, seq: Running, num_tokens: int) -> None:
        """Its next keys enter the cache without the backend, like those of another sequence's prefix."""
        slots = self.slots(seq, num_tokens)
        for side, whole in enumerate((seq.keys, seq.values)):
            for cache in (self.cache, self.exact_cache):
                new = whole[:, seq.num_cached : seq.num_cached + num_tokens]
                cache[side].flatten(1, 2)[:, slots] = new.to(cache.dtype)
        seq.num_cached += num_tokens

    def slots(self, seq: Running, num_new: int) -> list[int]:
        """The slots of its next tokens."""
        positions = range(seq.num_cached, seq.num_cached + num_new)
        while len(seq.blocks) * self.block_size < positions.stop:
            seq.blocks.append(self.free_blocks.pop())
        return [seq.blocks[i // self.block_size] * self.block_size + i % self.block_size for i in positions]

    def step(self, work: list[tuple[Running, int]], has_tenants: bool = True) -> bool:
        """Computes the next tokens of each sequence; returns whether keys were kept from the step before."""
        slots = [slot for seq, num_new in work for slot in self.slots(seq, num_new)]
        num_new, lengths = [n for _, n in work], [seq.num_cached + n for seq, n in work]
        tables = torch.zeros(len(work), max(len(seq.blocks) for seq, _ in work), dtype=torch.int32)
        for row, (seq, _) in enumerate(work):
            tables[row, : len(seq.blocks)] = torch.tensor(seq.blocks)
        tenants = [(seq.seq_id, seq.num_preemptions) for seq, _ in work] if has_tenants else None
        metadata = make_metadata(num_new, lengths, slots, tables, self.block_size, tenants=tenants)
        metadata = replace(metadata, plan=self.ours.plan(metadata, self.num_groups))
        for layer in range(NUM_LAYERS):
            q, k, v = (
                torch.cat([getattr(seq, name)[layer, seq.num_cached : seq.num_cached + n] for seq, n in work])
                for name in ("queries", "keys", "values")
            )
            cache, exact_cache = LayerCache(*self.cache[:, layer]), LayerCache(*self.exact_cache[:, layer])
            self.ours.store_kvcache(k, v, cache, metadata)
            window = (0, 9)[layer % 2]
            out = self.ours.attend(q, k, v, cache, metadata, window)
            q, k, v = (x.double() for x in (q, k, v))
            self.exact.store_kvcache(k, v, exact_cache, metadata)
            expected = self.exact.attend(q, k, v, exact_cache, metadata, window)
            assert out.dtype == self.dtype
            assert (out - expected).norm() <= TOLERANCE[self.dtype] * expected.norm(), (layer, lengths)
        for seq, n in work:
            seq.num_cached += n
        return metadata.plan.decodes is not None and metadata.plan.decodes.source_rows is None

    def decode(self, seqs: list[Running], **options) -> bool:
        return self.step([(seq, 1) for seq in seqs], **options)


def prefilled(steps: Steps, *lengths: int) -> list[Running]:
    """Sequences with keys of these lengths."""
    seqs = [steps.admit() for _ in lengths]
    steps.step(list(zip(seqs, lengths, strict=True)))
    return seqs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", some(range(4), 0))
def test_keys_kept_from_step_to_step_are_those_in_the_cache(dtype, seed, count):
    """A kept copy must equal a new gather, for all events between two steps.

    Sequences finish, wait, move to other blocks and grow beyond their room; new ones take their blocks.
    """
    steps, rng, running, num_kept, num_gathered = Steps(dtype, seed), random.Random(seed), [], 0, 0
    num_steps_until_admission = 0
    for _ in range(count(120, 120)):
        for seq in [*running]:
            if rng.random() < 0.008 or seq.num_cached > MAX_LENGTH - 10:
                running.remove(seq)
                steps.finish(seq)
        num_steps_until_admission -= 1
        if num_steps_until_admission < 0 or len(running) < 3:
            num_steps_until_admission = rng.choice((0, 1, 5, 30, 50))
            work = [(seq, 1) for seq in running if rng.random() < 0.8]
            for _ in range(rng.randrange(1, 5)):
                running.append(steps.admit())
                if rng.random() < 0.3:
                    steps.skip(running[-1], rng.randrange(1, 40))
                work.append((running[-1], rng.choice((1, 2, 7, rng.randrange(1, 60)))))
            steps.step(rng.sample(work, len(work)))
            continue
        paused = []
        if rng.random() < 0.1:
            paused = rng.sample(running, rng.randrange(1, 3))
            for seq in paused:
                if rng.random() < 0.5:
                    steps.move(seq)
                if rng.random() < 0.2:
                    steps.skip(seq, rng.choice((1, 2, 5)))
        is_kept = steps.decode(rng.sample([seq for seq in running if seq not in paused], len(running) - len(paused)))
        num_kept, num_gathered = num_kept + is_kept, num_gathered + (not is_kept)
    assert num_kept > 30 and num_gathered > 10, (num_kept, num_gathered)


def test_keys_are_kept_until_there_is_no_room_for_another():
    """A key beyond its sequence's room would overwrite the first key of the next head or sequence."""
    steps = Steps()
    seqs = prefilled(steps, 5, 40, 9, 3)
    kept = []
    for i in range(60):
        kept.append(steps.decode([seqs[(i + j) % 4] for j in range(4)]))
    # The longest has 40 // 4 + 16 more places, and then 66 // 4 + 16.
    assert [i for i, is_kept in enumerate(kept) if not is_kept] == [0, 27]


def test_a_finished_sequence_is_read_on_only_while_most_others_run():
    """One free place in a kept copy is not worth a gather, but the copy of a large batch must not outlive the batch."""
    steps = Steps()
    seqs = prefilled(steps, *range(3, 19))
    kept = []
    for num_running in (16, 16, 13, 12, 11, 10):
        for seq in seqs[num_running:]:
            steps.finish(seq)
        seqs = seqs[:num_running]
        kept.append(steps.decode(seqs))
    assert kept == [False, True, True, True, False, True]


@pytest.mark.parametrize(
    "change",
    [
        "it waits",
        "it was preempted",
        "it skips a key",
        "its blocks are used again",
        "a new one decodes",
        "a mixed step",
    ],
)
def test_kept_keys_know_their_sequence(change):
    """The same number of sequences, of the same lengths, need not be the same sequences."""
    steps = Steps()
    seqs = prefilled(steps, 20, 20, 20, 20, 20)
    assert not steps.decode(seqs) and steps.decode(seqs)
    keeps = True
    if change == "it waits":
        assert steps.decode(seqs[1:])
    elif change == "it was preempted":
        steps.move(seqs[0])
        keeps = False
    elif change == "it skips a key":
        steps.skip(seqs[0], 1)
        keeps = False
    elif change == "its blocks are used again":
        steps.finish(seqs[0])
        seqs[0] = steps.admit()
        steps.skip(seqs[0], 22)
        keeps = False
    elif change == "a new one decodes":
        seqs.append(steps.admit())
        keeps = False
    else:
        # Its prefill ends the copy of the decodes beside it, because the copy lacks a key for the next step.
        steps.step([(steps.admit(), 7), *((seq, 1) for seq in seqs)])
        keeps = False
    assert steps.decode(seqs[::-1]) == keeps
    assert steps.decode(seqs)


@pytest.mark.parametrize(("num_blocks", "num_groups"), [(80, 1), (1500, 1), (1500, 20)])
def test_a_copy_that_would_take_much_of_the_memory_is_not_kept(num_blocks, num_groups):
    """Kept keys are memory beyond the cache; a batch that fills the cache would take it twice. The layers of several
    groups share a part of the cache, and each may keep a copy."""
    steps = Steps(num_blocks=num_blocks)
    steps.num_groups = num_groups
    seqs = prefilled(steps, 60, 50, 40, 30)
    kept = [steps.decode(seqs) for _ in range(6)]
    assert kept == [False, *([(num_blocks, num_groups) == (1500, 1)] * 5)]


def test_nothing_is_kept_of_a_step_without_tenants():
    """The metadata of a captured step has no tenants; equal lengths prove nothing."""
    steps = Steps()
    seqs = prefilled(steps, 12, 12, 12)
    assert not steps.decode(seqs) and steps.decode(seqs)
    assert not any(steps.decode(seqs[::order], has_tenants=False) for order in (1, -1, 1))
    assert not steps.decode(seqs) and steps.decode(seqs)


def test_the_table_describes_the_step_that_the_formula_means():
    """Prefill, chunk and decode in one step: the metadata of scheduled work equals the one written by hand here."""
    case = make_case(MIXED, block_size=4)
    chunks = []
    for row, (cached, num_new) in enumerate(MIXED):
        seq = Sequence(row, list(range(cached + num_new)), SamplingParams(), 100)
        seq.block_table = case.metadata.block_tables[row, : -(-(cached + num_new) // 4) + 1].tolist()
        seq.num_computed_tokens = cached + num_new
        seq.entry = (3 * row) % len(MIXED)
        chunks.append(Chunk(seq, num_new, False))
    batch = make_batch(chunks, 4, 100)
    for name, expected in vars(case.metadata).items():
        actual = getattr(batch.groups[0], name)
        if name == "block_tables":
            actual = actual[:, : expected.shape[1]]
        if isinstance(expected, torch.Tensor):
            assert actual.dtype == expected.dtype and torch.equal(actual, expected), name
        elif name == "entries":
            assert actual.tolist() == [chunk.seq.entry for chunk in chunks]
        elif name == "max_seqlen_k":
            assert actual == 100, "as captured steps have it, no more than an upper bound"
        elif name == "sampled_tiles":
            assert not actual.any(), "no row of this step samples"
        else:
            assert actual == ([(row, 0) for row in range(len(MIXED))] if name == "tenants" else expected), name
    assert batch.positions.tolist() == [i for old, new in MIXED for i in range(old, old + new)]
    assert batch.token_ids.tolist() == batch.positions.tolist()


@pytest.mark.grid(1)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("sequences", [MIXED, [(30, 1), (0, 1)], [(0, 9), (3, 2)]], ids=["mixed", "decodes", "prompts"])
def test_padding_behind_the_rows_and_tokens_changes_nothing(backend, sequences):
    """A padding row has no queries and no keys, a padding token no slot, a padding tile no queries.

    The backends that run captured steps, and the reference. In a captured step with prompts the host knows no more
    than that there are no more decodes than rows.
    """
    case = make_case(sequences, BLOCK_SIZE[backend])
    expected, metadata = run(backend, case), case.metadata
    before = case.cache.keys.clone(), case.cache.values.clone()
    num_rows, num_tokens, more = len(sequences), sum(case.num_new), 3
    metadata.cu_seqlens_q = torch.cat((metadata.cu_seqlens_q, metadata.cu_seqlens_q[-1:].expand(more)))
    metadata.context_lens = torch.cat((metadata.context_lens, torch.zeros(more, dtype=torch.int32)))
    table = torch.full((more, metadata.block_tables.shape[1]), 10**6, dtype=torch.int32)
    metadata.block_tables = torch.cat((metadata.block_tables, table))
    metadata.slot_mapping = torch.cat((metadata.slot_mapping, torch.full((2 * more,), -1)))
    if metadata.query_tiles is not None:
        metadata.query_tiles = torch.cat((metadata.query_tiles, torch.zeros(more, 4, dtype=torch.int32)))
        metadata.max_seqlen_q = num_tokens + 2 * more
    metadata.max_num_decodes = num_rows + more
    attention = case.backend(backend)
    metadata = replace(metadata, plan=attention.plan(metadata))
    new = (case.new(case.queries), case.new(case.keys), case.new(case.values))
    q, k, v = (torch.cat((x, x.new_full((2 * more, *x.shape[1:]), math.nan))) for x in new)
    attention.store_kvcache(k, v, case.cache, metadata)
    out = attention.attend(q, k, v, case.cache, metadata)
    assert out.shape == q.shape and torch.equal(out[:num_tokens], expected)
    for cache, old in zip((case.cache.keys, case.cache.values), before, strict=True):
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)
