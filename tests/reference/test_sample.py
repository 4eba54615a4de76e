"""Sampling: the right distribution, from noise that belongs to the request alone; the kernel gives the twin's tokens.

The kernel runs in Triton's interpreter here, and tests/gpu/test_gpu_filters.py has it on a GPU.
"""

import math

import numpy as np
import pytest
import torch
from support.long import some

from nanovllm.engine import step
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.embed_head import VocabSlice
from nanovllm.layers.sampler import SampledRows, Sampler, SamplingNeeds
from nanovllm.ops import sample as sampling
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.filters import filter_thresholds
from nanovllm.ops.kernel import has_kernels
from nanovllm.ops.sample import (
    BROKEN_LOGITS,
    NO_TOKEN_LEFT,
    best_part,
    exponential_noise,
    philox4x32,
    plain_sample,
    triton_sample,
)
from nanovllm.runner.token_rules import TokenRulesTable
from nanovllm.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities that are meant

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="needs Triton")
BOTH = pytest.mark.parametrize(
    "draw", [plain_sample, pytest.param(triton_sample, marks=needs_kernels)], ids=["plain", "kernel"]
)


def philox_reference(counter: list[int], key: list[int], num_rounds: int = 7) -> list[int]:
    """Philox4x32 in Python's integers, after Salmon et al."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(num_rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def draw_rows(draw, logits, temperature=1.0, seeds=None, positions=None, thresholds=None) -> list[int]:
    """The tokens of `logits`: [num_rows, vocab_size]; the temperature is one for all, or one per row."""
    num_rows = len(logits)
    temperatures = torch.full((num_rows,), temperature) if isinstance(temperature, float | int) else temperature
    seeds = torch.arange(num_rows) if seeds is None else torch.as_tensor(seeds)
    positions = torch.full((num_rows,), 5) if positions is None else torch.as_tensor(positions)
    tokens = draw(logits, temperatures.float(), seeds, positions, thresholds)
    assert tokens.dtype == torch.int64 and tokens.shape == (num_rows,)
    return tokens.tolist()


def thresholds_of(logits, temperature: float, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    settings = (torch.tensor([float(value)]).expand(len(logits)) for value in (temperature, top_k, top_p, min_p))
    temperatures, top_ks, top_ps, min_ps = settings
    return filter_thresholds(logits, temperatures, top_ks.int(), top_ps, min_ps)


def assert_distributed(tokens: list[int], probs: np.ndarray) -> None:
    """Chi-square; nothing outside the support. The seeds are fixed, so it passes always or never."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs) and counts[probs == 0].sum() == 0, "a token that cannot be sampled"
    expected = probs[probs > 0] * len(tokens)
    assert expected.min() > 5, "too few samples for a chi-square test"
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4, (statistic, freedom)


# The generator


@pytest.mark.parametrize(
    ("num_rounds", "counter", "key", "expected"),
    [
        (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
        (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(num_rounds, counter, key, expected):
    """A generator that only looks random passes every test except this one."""
    words = [[int(word, 16) for word in text.split()] for text in (counter, key)]
    tensors = [tuple(torch.tensor([word]) for word in group) for group in words]
    result = philox4x32(*tensors, num_rounds)
    assert [f"{int(word):08x}" for word in result] == expected.split()
    assert [f"{word:08x}" for word in philox_reference(*words, num_rounds)] == expected.split()


def test_a_token_takes_its_own_word_of_its_own_block():
    """E = −log1p(−u) from word i % 4 of the block (i // 4, position, stream) under the request's 64-bit seed."""
    rows = [(0, 0), (1, 0), (2**32, 0), (2**64 - 1, 3), (0x123456789ABCDEF0, 40000)]
    seeds = torch.from_numpy(np.array([seed for seed, _ in rows], np.uint64).view(np.int64))
    positions = torch.tensor([position for _, position in rows])
    of_rows = torch.arange(len(rows))[:, None] * 1000 + torch.tensor([0, 5, 90001])
    for blocks in (torch.arange(3)[None], of_rows):
        for stream in (0, 1):
            noise = exponential_noise(seeds, positions, blocks, stream)
            assert noise.shape == (len(rows), 4 * blocks.shape[1]) and noise.dtype == torch.float32
            for index, (seed, position) in enumerate(rows):
                for block, ours in zip(blocks[index % len(blocks)].tolist(), noise[index].view(-1, 4), strict=True):
                    words = philox_reference([block, position, stream, 0], [seed % 2**32, seed >> 32])
                    exact = [-math.log1p(-(word + 0.5) / 2**32) for word in words]
                    # Near 1 a float32 has no more than 24 bits of u, of which log1p magnifies the rounding.
                    assert ours.tolist() == pytest.approx(exact, rel=1e-5), (seed, position, block)


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1])
def test_noise_is_positive_and_finite_at_the_extreme_words(monkeypatch, word):
    """A uniform that rounds to 1 makes E infinite and the token impossible; one that is 0 makes it certain."""
    words = (torch.full((1, 8), word),) * 4
    monkeypatch.setattr(sampling, "philox4x32", lambda counter, key: words)
    noise = exponential_noise(torch.tensor([7]), torch.tensor([1]), torch.arange(8)[None], 0)
    assert (noise > 0).all() and noise.isfinite().all() and noise.log().isfinite().all()
    assert float(noise[0, 0]) == pytest.approx(-math.log1p(-(word + 0.5) / 2**32), rel=0.3)


def test_the_smallest_noise_is_resolved():
    """In a large vocabulary the smallest E wins. With 24 random bits the smallest would tie, and low ids win ties."""
    noise = exponential_noise(torch.tensor([1]), torch.tensor([1]), torch.arange(2**20)[None], 0)[0]
    smallest = noise.sort().values[:100].double()
    assert smallest.unique().numel() == 100
    assert smallest[0] < 2.0**-20 and smallest[-1] == pytest.approx(100 / 2**22, rel=0.4)


def test_the_tokens_of_a_seed_never_change():
    """Users keep seeds; these tokens are those of the first release."""
    logits = (torch.arange(3000).remainder(97) / 20).repeat(6, 1)
    seeds, positions = [0, 1, 2**40, -1, 12345, 7], [1, 2, 3, 5000, 1, 0]
    assert draw_rows(plain_sample, logits, 0.8, seeds, positions) == [1149, 2116, 766, 2015, 47, 2068]


# The distribution

LOGITS = [2.0, -1.0, 0.5, 0.5, 1.7, -0.3, 0.0, 1.1, -2.0, 0.9, 1.3]


@pytest.mark.grid(1)
@pytest.mark.parametrize("varying", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
def test_tokens_have_exactly_the_probabilities_asked_for(temperature, varying):
    """Over many requests at one position, and over many positions of one request."""
    count, fixed = torch.arange(20000), torch.full((20000,), 12345)
    seeds, positions = (count, fixed) if varying == "seeds" else (fixed, count)
    tokens = draw_rows(plain_sample, torch.tensor(LOGITS).repeat(20000, 1), temperature, seeds, positions)
    assert_distributed(tokens, (torch.tensor(LOGITS).double() / temperature).softmax(0).numpy())


FILTERS = [
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.25},
]


@pytest.mark.parametrize(
    ("draw", "filters"),
    [
        *((plain_sample, filters) for filters in FILTERS),
        pytest.param(triton_sample, FILTERS[-1], marks=needs_kernels),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.__name__,
)
def test_filtered_tokens_have_the_probabilities_of_the_kept_set(draw, filters):
    """The definition is written out: sort, keep, renormalise. The two ids with equal logits stay or go together."""
    num_rows, temperature = (20000 if draw is plain_sample else 110), 1.2
    probs = (torch.tensor(LOGITS).double() / temperature).softmax(0).numpy()
    kept = probs >= np.sort(probs)[::-1][filters.get("top_k", 11) - 1]
    probs = np.where(kept, probs, 0) / probs[kept].sum()
    mass_before = np.array([probs[probs > prob].sum() for prob in probs])
    probs[(mass_before >= filters.get("top_p", 1.0)) | (probs < filters.get("min_p", 0) * probs.max())] = 0
    logits = torch.tensor(LOGITS).repeat(num_rows, 1)
    thresholds = thresholds_of(logits, temperature, **filters)
    tokens = draw_rows(draw, logits, temperature, torch.arange(num_rows) * 13, thresholds=thresholds)
    assert_distributed(tokens, probs / probs.sum())


@pytest.mark.grid(1)
@pytest.mark.parametrize("num_members", [1, 16])
@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (2**32, 0)])
def test_neighbouring_tokens_are_independent(seed_step, position_step, num_members):
    """If the key were seed plus position, a request would repeat the tokens of the previous one, shifted by one place.

    This checks ids of one group, and groups of 16 equal ids.
    """
    num_rows, logits = 20000, torch.tensor([0.3, 0.0, -0.2, 0.6])
    seeds, positions = torch.arange(num_rows) * 7919, torch.arange(num_rows) * 13
    rows = logits.repeat_interleave(num_members).repeat(num_rows, 1)
    first, second = (
        np.array(draw_rows(plain_sample, rows, 1.0, seeds + step * seed_step, positions + step * position_step))
        for step in (0, 1)
    )
    probs = logits.double().softmax(0).numpy()
    assert_distributed((first // num_members * 4 + second // num_members).tolist(), np.outer(probs, probs).ravel())


def test_a_large_vocabulary_is_sampled_evenly():
    """This covers every part of it, every place in a group, and every word of the generator's blocks."""
    num_rows, vocab_size = 600, 2**13 - 3
    tokens = draw_rows(plain_sample, torch.zeros(num_rows, vocab_size))
    assert_distributed([token * 8 // vocab_size for token in tokens], np.full(8, 1 / 8))
    assert_distributed([token % 16 for token in tokens], np.full(16, 1 / 16))
    assert_distributed([token // 16 % 4 for token in tokens], np.full(4, 1 / 4))


@pytest.mark.grid(1)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [16, 17, 83])
def test_groups_are_drawn_by_their_weight_and_ids_within_them(vocab_size, temperature):
    """There are full groups, one with a single id, one far above the others, one half banned and one banned."""
    num_rows = 40000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[: vocab_size // 3] += 1
    logits[48:64] += 3
    logits[16:24] = logits[32:48] = -math.inf
    count = torch.arange(num_rows)
    tokens = draw_rows(plain_sample, logits.repeat(num_rows, 1), temperature, count * 31, count % 7)
    weights = (logits.double() / temperature).softmax(0).numpy()
    rare = weights * num_rows < 8
    probs = np.append(np.where(rare, 0, weights), weights[rare].sum())
    if probs[-1] * num_rows < 8:
        probs[-1] = 0
    counted = [vocab_size if rare[token] else token for token in tokens]
    assert all(weights[token] > 0 for token in tokens)
    assert_distributed([token for token in counted if probs[token] > 0], probs / probs.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_every_dtype_are_sampled_in_float32(dtype):
    """Scores rounded to bfloat16 would tie and shift probabilities."""
    logits = torch.tensor(LOGITS).to(dtype).repeat(6000, 1)
    assert_distributed(draw_rows(plain_sample, logits, 0.9), (logits[0].double() / 0.9).softmax(0).numpy())


# Thresholds


def random_case(vocab_size: int, num_rows: int, dtype=torch.float32):
    """Logits, temperatures, seeds, positions and thresholds of rows that differ in everything; some are greedy."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    temperatures = torch.rand(num_rows, generator=generator) * 2
    temperatures[::4], temperatures[1::4] = 0, 1e-30
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    positions = torch.randint(0, 5000, (num_rows,), generator=generator)
    top_ks = torch.randint(0, 9, (num_rows,), generator=generator, dtype=torch.int32)
    top_ps = torch.tensor([1.0, 0.7, 0.95]).repeat(num_rows)[:num_rows]
    thresholds = filter_thresholds(logits, temperatures, top_ks, top_ps, torch.zeros(num_rows))
    return logits, temperatures, seeds, positions, thresholds


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_threshold_is_a_mask_over_the_same_noise(draw, dtype):
    """Kept ids are drawn with their own noise, as if the rest were −inf; a renumbered set would draw other tokens."""
    for vocab_size in (45, 5001):
        *case, thresholds = random_case(vocab_size, 6, dtype)
        masked = case[0].masked_fill(case[0].float() < thresholds[:, None], -math.inf)
        assert torch.equal(draw(*case, thresholds), draw(masked, *case[1:]))


@BOTH
def test_what_lies_below_the_threshold_is_never_sampled(draw):
    """The temperature makes every id equally likely; the threshold's own logit stays."""
    logits = torch.arange(40).float().repeat(30, 1)
    thresholds = torch.full((30,), 37.0)
    assert set(draw_rows(draw, logits, 1e6, thresholds=thresholds)) == {37, 38, 39}


@BOTH
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_of_broken_logits_is_flagged_and_its_neighbours_stay(draw, temperature):
    """NaN or +inf anywhere in a row, also where the threshold would hide it, must not turn into a token."""
    logits = torch.randn(4, 4200, generator=torch.Generator().manual_seed(1))
    thresholds = torch.full((4,), 1.0 if temperature else -math.inf)
    expected = draw_rows(draw, logits, temperature, thresholds=thresholds)
    for poison, place in ((math.nan, 11), (math.inf, 4199)):
        broken = logits.clone()
        broken[2, place], broken[3] = poison, poison
        tokens = draw_rows(draw, broken, temperature, thresholds=thresholds)
        assert tokens == [*expected[:2], BROKEN_LOGITS, BROKEN_LOGITS]
        assert draw_rows(draw, broken[2:3], temperature) == [BROKEN_LOGITS]


@BOTH
@pytest.mark.parametrize("temperature", [0, 1.0, 1e-30])
def test_a_row_with_nothing_left_says_so(draw, temperature):
    """All logits are −inf, so argmax would say token 0. NaN or +inf beside them breaks the row."""
    logits = torch.full((4, 50), -math.inf)
    logits[1, 33], logits[2, 7], logits[3, 8] = -5.0, math.nan, math.inf
    thresholds = thresholds_of(logits, temperature, top_p=0.5)
    for given in (None, thresholds):
        tokens = draw_rows(draw, logits, temperature, thresholds=given)
        assert tokens == [NO_TOKEN_LEFT, 33, BROKEN_LOGITS, BROKEN_LOGITS]
    assert (BROKEN_LOGITS, NO_TOKEN_LEFT) == (step.BROKEN_LOGITS, step.NO_TOKEN_LEFT)


# Greedy, temperatures, ties


@BOTH
def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals(draw):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1e30, -1e38, -2e30, -1e30]])
    assert draw_rows(draw, logits, 0) == [1, 0, 0]
    wide = torch.zeros(4, 9000)
    wide[0, [77, 78, 4999]] = wide[1, [2048, 4096]] = wide[2, [4095, 4096, 8200]] = 1
    assert draw_rows(draw, wide, 0) == [77, 2048, 4095, 0]


def test_equal_scores_go_to_the_lowest_id_when_sampled_too(monkeypatch):
    """With equal noise for all, equal logits tie; the result must not depend on the order of a sort."""
    ones = lambda seeds, positions, blocks, stream: torch.ones(len(seeds), 4 * blocks.shape[1])  # noqa: E731
    monkeypatch.setattr(sampling, "exponential_noise", ones)
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]] * 4)
    assert draw_rows(plain_sample, logits, thresholds=torch.tensor([-math.inf, 0.5, 1.0, 2.0])) == [1, 1, 1, 1]


@BOTH
@pytest.mark.parametrize("temperature", [5e-45, 1e-38, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(draw, temperature):
    """Logits over 1e-30 overflow to infinity, and infinity − infinity is no token."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 100
    for filters in ({}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
        thresholds = thresholds_of(logits, temperature, **filters)
        assert draw_rows(draw, logits, temperature, thresholds=thresholds) == logits.argmax(-1).tolist()


def test_a_huge_temperature_is_uniform_over_what_is_allowed():
    logits = torch.tensor([*LOGITS, -math.inf]).repeat(3000, 1)
    assert_distributed(draw_rows(plain_sample, logits, 1e30), np.array([1 / 11] * 11 + [0]))


# Rows


@BOTH
@pytest.mark.parametrize("vocab_size", [1001])
def test_a_rows_token_does_not_depend_on_its_neighbours(draw, vocab_size):
    """Greedy, sampled and filtered rows, each alone, reversed, and in batches of every kind."""
    case = random_case(vocab_size, 12)
    together = draw(*case).tolist()
    for rows in ([3], [4], list(range(12))[::-1], [5] * 3):
        assert draw(*(tensor[rows] for tensor in case)).tolist() == [together[row] for row in rows]


@BOTH
def test_the_same_seed_gives_the_same_tokens_and_another_seed_gives_others(draw):
    """Also when seeds differ only in their upper 32 bits, or positions only by one."""
    seeds = [3, 3, 4, 3 + 2**32, 3 - 2**63, -1, 3]
    tokens = draw_rows(draw, torch.zeros(7, 5000), seeds=seeds, positions=[9] * 6 + [10])
    assert tokens[0] == tokens[1] and len(set(tokens)) == 6


@BOTH
def test_rows_may_lie_apart(draw):
    """Padding behind a row is not sampled, even if it is NaN or larger than all."""
    padded = torch.full((6, 300), math.nan)
    padded[:, 280:] = 1e9
    logits, *others = random_case(250, 6)
    padded[:, :250] = logits
    assert torch.equal(draw(padded[:, :250], *others), draw(logits, *others))
    assert draw(padded[:0, :250], *(tensor[:0] for tensor in others)).shape == (0,)


@needs_kernels
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16), ids=str)
def test_the_kernel_gives_the_tokens_of_its_twin(dtype):
    """There are several full parts, a last one with a single id, and a vocabulary smaller than a group."""
    for vocab_size in (1, 15, 4097, 9000):
        case = random_case(vocab_size, 8, dtype)
        assert torch.equal(triton_sample(*case), plain_sample(*case))
        without = case[:4]
        assert torch.equal(triton_sample(*without), plain_sample(*without))


@pytest.mark.grid(1)
@needs_kernels
@pytest.mark.parametrize(("vocab_size", "size"), [(9000, 2), (8193, 4), (40, 4), (70, 2)])
@pytest.mark.parametrize("has_rules", [False, True], ids=["plain", "rules"])
def test_the_best_of_all_ranks_columns_are_one_ranks_tokens(vocab_size, size, has_rules):
    """Slices may have several parts, and the last slice may be shorter or empty. Padding is never sampled, and each
    rule applies to its own id."""
    logits, temperatures, seeds, positions, _ = random_case(vocab_size, 8, torch.float32)
    num_rows = len(logits)
    logits[1, vocab_size - 1] = torch.nan
    logits[2] = -torch.inf
    zeros, ones = torch.zeros(num_rows), torch.ones(num_rows)
    entries, positions = torch.arange(num_rows).flip(0), torch.arange(num_rows) % 3 + 2
    rows = SampledRows(entries, positions, seeds, temperatures, zeros.int(), ones, zeros, zeros.int())
    table = TokenRulesTable(num_rows + 1, vocab_size, torch.device("cpu"))
    params = [
        SamplingParams(repetition_penalty=1.5, logit_bias={vocab_size - 1: 9.0, 0: -9.0}, allowed_token_ids=allowed)
        for allowed in [None, list(range(vocab_size // 2, vocab_size))] * (num_rows // 2)
    ]
    tokens = (torch.arange(num_rows * 9).view(num_rows, 9) * 7 % vocab_size).int()
    table.admit([Sequence(i, [1, 2], p, 9) for i, p in enumerate(params)], np.arange(num_rows))
    needs = SamplingNeeds(rules_version=table.version if has_rules else 0)
    alone = Sampler(VocabSlice.of(vocab_size, Parallel()), Parallel(), use_kernels=True)
    expected = alone.sample(logits, rows, needs, tokens, table.tensors).tokens
    found = []
    for rank in range(size):  # one after the other: Triton's interpreter does not run in several threads
        parallel = Parallel(rank, size, None, None, "an exchange")
        vocab = VocabSlice.of(vocab_size, parallel)
        columns = torch.full((num_rows, vocab.size), 99.0)
        columns[:, : vocab.num_ids] = logits[:, vocab.first : vocab.first + vocab.num_ids]
        found.append(
            Sampler(vocab, parallel, use_kernels=True)._best_of_columns(columns, rows, needs, tokens, table.tensors)
        )
    assert torch.equal(best_part(torch.stack(found)), expected)
    assert expected[1] == BROKEN_LOGITS and expected[2] == NO_TOKEN_LEFT and (expected >= 0).sum() == num_rows - 2
