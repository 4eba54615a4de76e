"""Sampling: the right distribution, from noise that belongs to the request alone."""

import math

import numpy as np
import pytest
import torch
from model_factory import one_thread, save_model  # noqa: F401

from nanovllm import LLM, SamplingParams
from nanovllm.runner.batch import build_batch, special_rows
from nanovllm.engine.scheduler import Work
from nanovllm.engine.sequence import Sequence
from nanovllm.layers import sampler
from nanovllm.layers.sampler import (
    SamplingBatch,
    SpecialRows,
    exponential_noise,
    filter_scores,
    philox4x32,
    sample,
    sample_special,
)

CPU = torch.device("cpu")


def philox_reference(counter: list[int], key: list[int], num_rounds: int = 7) -> list[int]:
    """Philox4x32 in Python's integers, after Salmon et al."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(num_rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def exact_probabilities(logits: list[float], params: SamplingParams) -> np.ndarray:
    """What the documentation of SamplingParams says, token by token in float64."""
    scores = [logit / params.temperature for logit in logits]
    most_probable_first = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = most_probable_first[: params.top_k or None]
    weights = {i: math.exp(scores[i] - scores[kept[0]]) for i in kept}
    if params.top_p < 1:
        total, mass, nucleus = sum(weights.values()), 0.0, []
        for i in kept:
            nucleus.append(i)
            mass += weights[i] / total
            if mass >= params.top_p:
                break
        kept = nucleus
    kept = [i for i in kept if weights[i] >= params.min_p * weights[kept[0]]]
    probs = np.zeros(len(scores))
    probs[kept] = [weights[i] for i in kept]
    return probs / probs.sum()


def sampling_work(params, seeds, positions, stop_token_ids=frozenset()) -> Work:
    """One row for each of `params`, sampling the token at `positions`."""
    work = []
    for row, row_params in enumerate(params):
        seq = Sequence(row, [0] * positions[row], row_params, positions[row] + 9, stop_token_ids, seeds[row])
        seq.block_table, seq.slot, seq.num_computed_tokens = [0], row, positions[row]
        seq.num_tokens += 1
        work.append((seq, 1, True))
    return work


def sample_rows(
    logits: torch.Tensor, params, seeds=None, positions=None, stop_token_ids=frozenset(), part_size: int = 64
) -> list[int]:
    """The tokens of `logits`: [rows, vocab_size], as the engine samples them, special rows in parts."""
    num_rows = len(logits)
    params = [params] * num_rows if isinstance(params, SamplingParams) else params
    seeds = list(range(num_rows)) if seeds is None else seeds
    positions = [5] * num_rows if positions is None else positions
    work, vocab_size = sampling_work(params, seeds, positions, stop_token_ids), logits.shape[1]
    tokens = sample(logits.clone(), build_batch(work, 10**6, CPU).sampling)
    for part in special_rows(work, vocab_size, CPU, part_size):
        tokens[part.rows] = sample_special(logits[part.rows], part)
    return tokens.tolist()


def assert_distributed(tokens: list[int], probs: np.ndarray) -> None:
    """Chi-square; nothing outside the support. The seeds are fixed, so it passes always or never."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs) and counts[probs == 0].sum() == 0, "a token that the filters remove"
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
    """A generator that only looks random has passed every test but this one."""
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
    monkeypatch.setattr(sampler, "philox4x32", lambda counter, key: words)
    noise = exponential_noise(torch.tensor([7]), torch.tensor([1]), torch.arange(8)[None], 0)
    assert (noise > 0).all() and noise.isfinite().all() and noise.log().isfinite().all()
    assert float(noise[0, 0]) == pytest.approx(-math.log1p(-(word + 0.5) / 2**32), rel=0.3)


# The distribution

LOGITS = [2.0, -1.0, 0.5, 0.5, 1.7, -0.3, 0.0, 1.1, -2.0, 0.9, 1.3]
SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=3.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=4),
    SamplingParams(top_k=len(LOGITS) + 5),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.3),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=6, top_p=0.7),
    SamplingParams(temperature=2.0, top_k=9, top_p=0.9, min_p=0.25),
]


def describe(params) -> str | None:
    if not isinstance(params, SamplingParams):
        return None
    return f"t={params.temperature},k={params.top_k},p={params.top_p},min_p={params.min_p}"


@pytest.mark.parametrize("varying", ["seeds", "positions"])
@pytest.mark.parametrize("params", SETTINGS, ids=describe)
def test_tokens_have_exactly_the_probabilities_asked_for(params, varying):
    """Over many requests at one position, and over many positions of one request."""
    num_rows = 20000
    count, fixed = torch.arange(num_rows), torch.full((num_rows,), 12345)
    batch = SamplingBatch(
        temperatures=torch.full((num_rows,), params.temperature),
        seeds=count if varying == "seeds" else fixed,
        positions=count if varying == "positions" else fixed,
    )
    logits = torch.tensor(LOGITS).repeat(num_rows, 1)
    one = special_rows(sampling_work([params], [0], [1]), len(LOGITS), CPU)
    if not one:
        tokens = sample(logits, batch)
    else:
        [one] = one
        filters = (part.expand(num_rows) for part in (one.top_ks, one.top_ps, one.min_ps))
        nothing = torch.tensor([], dtype=torch.int64)
        tokens = sample_special(logits, SpecialRows(count, count, batch, *filters, nothing, nothing))
    assert_distributed(tokens.tolist(), exact_probabilities(LOGITS, params))


@pytest.mark.parametrize("num_members", [1, 16])
@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (2**32, 0)])
def test_neighbouring_tokens_are_independent(seed_step, position_step, num_members):
    """A key that mixes seed and position by adding them repeats a request's tokens one place on in the next.

    Of ids of one group, and of groups of 16 equal ids.
    """
    num_rows, logits = 20000, torch.tensor([0.3, 0.0, -0.2, 0.6])
    seeds, positions = torch.arange(num_rows) * 7919, torch.arange(num_rows) * 13
    pairs = []
    for step in (0, 1):
        batch = SamplingBatch(
            temperatures=torch.ones(num_rows),
            seeds=seeds + step * seed_step,
            positions=positions + step * position_step,
        )
        tokens = sample(logits.repeat_interleave(num_members).repeat(num_rows, 1), batch)
        pairs.append(tokens // num_members)
    probs = exact_probabilities(logits.tolist(), SamplingParams())
    assert_distributed((pairs[0] * 4 + pairs[1]).tolist(), np.outer(probs, probs).ravel())


def test_the_smallest_noise_is_resolved():
    """In a large vocabulary the smallest E wins: from 24 random bits the smallest would tie, and low ids win ties."""
    noise = exponential_noise(torch.tensor([1]), torch.tensor([1]), torch.arange(2**20)[None], 0)[0]
    smallest = noise.sort().values[:100].double()
    assert smallest.unique().numel() == 100
    assert smallest[0] < 2.0**-20 and smallest[-1] == pytest.approx(100 / 2**22, rel=0.4)


def test_a_large_vocabulary_is_sampled_evenly():
    """Every part of it, every place in a group, and every word of the generator's blocks."""
    num_rows, vocab_size = 600, 2**13 - 3
    tokens = sample_rows(torch.zeros(num_rows, vocab_size), SamplingParams())
    assert_distributed([token * 8 // vocab_size for token in tokens], np.full(8, 1 / 8))
    assert_distributed([token % 16 for token in tokens], np.full(16, 1 / 16))
    assert_distributed([token // 16 % 4 for token in tokens], np.full(4, 1 / 4))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [16, 17, 45, 64, 83])
def test_groups_are_drawn_by_their_weight_and_ids_within_them(vocab_size, temperature):
    """Of full groups, of one with a single id, of one far above the others, half a group and a whole one banned."""
    num_rows = 40000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[: vocab_size // 3] += 1
    logits[48:64] += 3
    logits[16:24] = logits[32:48] = -math.inf
    count = torch.arange(num_rows)
    batch = SamplingBatch(torch.full((num_rows,), temperature), count * 31, count % 7)
    tokens = sample(logits.repeat(num_rows, 1), batch).tolist()
    weights = (logits.double() / temperature).softmax(0).numpy()
    rare = weights * num_rows < 8
    probs = np.append(np.where(rare, 0, weights), weights[rare].sum())
    if probs[-1] * num_rows < 8:
        probs[-1] = 0
    counted = [vocab_size if rare[token] else token for token in tokens]
    assert all(weights[token] > 0 for token in tokens)
    assert_distributed([token for token in counted if probs[token] > 0], probs / probs.sum())


# The filters


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_p=0.5), {0, 1}),
        (SamplingParams(top_p=0.51), {0, 1, 2}),
        (SamplingParams(top_p=0.74), {0, 1, 2}),
        (SamplingParams(top_p=0.25), {0}),
        (SamplingParams(top_p=1e-6), {0}),
        (SamplingParams(top_k=3, top_p=0.66), {0, 1}),
        (SamplingParams(top_k=3, top_p=0.67), {0, 1, 2}),
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(min_p=1.0), {0, 1, 2, 3}),
    ],
    ids=describe,
)
def test_top_p_keeps_the_token_that_crosses_p_and_ties_go_to_the_lowest_id(params, kept):
    """Four tokens of exactly a quarter each; keeping only what lies below p drops the crossing token."""
    tokens = sample_rows(torch.zeros(300, 4), params)
    assert set(tokens) == kept


def test_top_p_of_almost_one_still_cuts_the_tail():
    """p = 0.999 is not 1: only p = 1 is off."""
    logits = torch.tensor([0.0, -4.0, -9.0]).repeat(20000, 1)
    assert set(sample_rows(logits, SamplingParams(top_p=0.999))) == {0, 1}
    assert set(sample_rows(logits, SamplingParams(top_p=1.0))) == {0, 1, 2}


def test_top_p_of_one_keeps_everything_that_top_k_keeps():
    """Rounded sums reach 1 long before the tail of a peaked distribution, and p = 1 would drop the rest."""
    scores = torch.full((1, 200), -25.0)
    scores[0, 7] = 0
    kept = filter_scores(scores, torch.tensor([199]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert kept.isfinite().sum() == 199 and kept[0, 199] == -math.inf


def test_ties_in_a_large_vocabulary_go_to_the_lowest_ids():
    """Short rows are sorted by insertion, which is stable by itself; long ones are not."""
    assert set(sample_rows(torch.zeros(60, 20000), SamplingParams(top_k=3))) == {0, 1, 2}


def test_a_filter_larger_than_the_vocabulary_is_off():
    """A top_k beyond the vocabulary, even beyond 64 bits, with other filters on or off."""
    logits = torch.tensor(LOGITS).repeat(50, 1)
    for top_k in (len(LOGITS), 10**6, 2**63, 2**70):
        for others in ({}, {"top_p": 0.8}):
            with_k = sample_rows(logits, SamplingParams(top_k=top_k, **others))
            assert with_k == sample_rows(logits, SamplingParams(**others))


# Greedy, temperatures, ties


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1e30, -1e38, -2e30, -1e30]])
    assert sample_rows(logits, SamplingParams(temperature=0)) == [1, 0, 0]
    wide = torch.zeros(3, 5000)
    wide[0, [77, 78, 4999]] = wide[1, [2048, 4096]] = 1
    assert sample_rows(wide, SamplingParams(temperature=0)) == [77, 2048, 0]


def test_equal_scores_go_to_the_lowest_id_when_sampled_too(monkeypatch):
    """With equal noise for all, equal logits tie; the result must not depend on the order of a sort."""
    monkeypatch.setattr(
        sampler,
        "exponential_noise",
        lambda seeds, positions, blocks, stream: torch.ones(len(seeds), 4 * blocks.shape[1]),
    )
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]] * 4)
    params = [SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.9), SamplingParams(min_p=0.9)]
    assert sample_rows(logits, params) == [1, 1, 1, 1]


@pytest.mark.parametrize("temperature", [5e-324, 5e-45, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_greedy(temperature, filters):
    """Logits over 1e-30 overflow to infinity, and infinity − infinity is no token; 5e-45 in float32 is 0."""
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * 100
    tokens = sample_rows(logits, SamplingParams(temperature=temperature, **filters))
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e30, 3e38, 1e39, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature):
    """A temperature that is infinite in float32 makes −inf / inf of a banned token: NaN, which argmax prefers."""
    logits = torch.tensor(LOGITS).repeat(2000, 1)
    uniform = np.full(len(LOGITS), 1 / len(LOGITS))
    assert_distributed(sample_rows(logits, SamplingParams(temperature=temperature)), uniform)
    params = SamplingParams(temperature=temperature, min_tokens=1)
    without = np.array([0.0 if token_id in (3, 7) else 1 / 9 for token_id in range(11)])
    assert_distributed(sample_rows(logits, params, stop_token_ids=frozenset((3, 7))), without)


# Rows


def mixed_rows(vocab_size: int = 40, num_rows: int = 24):
    """Logits, params, seeds and positions of rows that differ in everything."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=1e-30), *SETTINGS]
    params = [kinds[row % len(kinds)] for row in range(num_rows)]
    seeds = [(row * 0x9E3779B97F4A7C15) % 2**64 for row in range(num_rows)]
    return logits, params, seeds, [1 + row * 17 % 11 for row in range(num_rows)]


def pick(rows: list[int], logits, *lists):
    return [logits[rows], *([values[row] for row in rows] for values in lists)]


@pytest.mark.parametrize("vocab_size", [1, 5, 40, 1001])
def test_a_rows_token_does_not_depend_on_its_neighbours(vocab_size):
    """Greedy, sampled and filtered rows, each alone, reversed, and in batches of every kind."""
    case = mixed_rows(vocab_size)
    together = sample_rows(*case)
    for row in range(len(together)):
        assert sample_rows(*pick([row], *case)) == [together[row]], row
    for rows in (list(range(24))[::-1], list(range(0, 24, 2)), [5] * 7, [2, 3, 2, 3], list(range(9))):
        assert sample_rows(*pick(rows, *case)) == [together[row] for row in rows]
    for part_size in (1, 2, 5):
        assert sample_rows(*case, part_size=part_size) == together


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("whole_row", [True, False])
def test_a_row_of_broken_logits_is_minus_one_and_its_neighbours_stay(poison, whole_row):
    """One row of NaN must not turn into token 0, nor reach the others."""
    case = mixed_rows()
    expected = sample_rows(*case)
    for row in range(len(expected)):
        logits = case[0].clone()
        logits[row, slice(None) if whole_row else 11] = poison
        assert sample_rows(logits, *case[1:]) == [*expected[:row], -1, *expected[row + 1 :]]
    everything = torch.full_like(case[0], poison)
    assert sample_rows(everything, *case[1:]) == [-1] * len(expected)


def test_a_row_with_nothing_left_is_minus_one():
    """All −inf: argmax would say token 0."""
    logits = torch.zeros(3, 6)
    logits[1] = -math.inf
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)):
        tokens = sample_rows(logits, params)
        assert tokens[1] == -1 and min(tokens[0], tokens[2]) >= 0


def test_banned_tokens_are_never_sampled_and_only_where_banned():
    """min_tokens bans stop tokens before the choice; taking them back afterwards would lose a token."""
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]]).repeat(6, 1)
    stop = frozenset((1, 2))
    banned = SamplingParams(temperature=0, min_tokens=1)
    free = SamplingParams(temperature=0)
    sampled = SamplingParams(temperature=1.0, min_tokens=1)
    filtered = SamplingParams(temperature=1.0, min_tokens=1, top_k=1)
    for part_size in (64, 3, 2, 1):
        tokens = sample_rows(
            logits, [banned, free, sampled, filtered, free, banned], stop_token_ids=stop, part_size=part_size
        )
        assert tokens[:2] == [3, 1] and tokens[2] in (0, 3) and tokens[3:] == [3, 1, 3]


@pytest.mark.parametrize("vocab_size", [50, 64, 100])
def test_greedy_rows_with_banned_tokens_take_the_largest_of_the_rest(vocab_size):
    """Temperature 0 divides in every group of ids; 0 / 0 and 0 × infinity once made others win than the largest."""
    logits = torch.randn(30, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 5
    logits[10:20, 16:32] = -math.inf
    logits[20:, 8:] = -math.inf
    banned = frozenset({*logits[:3].argmax(-1).tolist(), *range(32, 48)})
    rest = logits.clone()
    rest[:, list(banned)] = -math.inf
    params = SamplingParams(temperature=0, min_tokens=1)
    assert sample_rows(logits, params, stop_token_ids=banned) == rest.argmax(-1).tolist()


def test_a_part_of_the_special_rows_bans_its_own_tokens():
    """Banned pairs name rows of the whole; in a later part they once meant rows beyond its end, or a neighbour."""
    params = [SamplingParams(temperature=0, min_tokens=1 if row % 3 else 0, top_k=row % 2) for row in range(9)]
    work = sampling_work(params, range(9), [2] * 9, frozenset((4, 7)))
    [whole] = special_rows(work, 10, CPU)
    assert whole.rows.tolist() == [1, 2, 4, 5, 7, 8], "greedy rows are special only for what they must not sample"
    for size in (1, 2, 4, 5, 6):
        parts = special_rows(work, 10, CPU, size)
        assert [len(part.rows) for part in parts] == [size] * (6 // size) + [6 % size] * (6 % size > 0)
        pairs = []
        for part in parts:
            assert part.banned_rows.tolist() == sorted(part.banned_rows.tolist())
            pairs += zip(part.rows[part.banned_rows].tolist(), part.banned_ids.tolist(), strict=True)
        assert sorted(pairs) == [(row, token_id) for row in whole.rows.tolist() for token_id in (4, 7)]
        for name in ("rows", "slots", "top_ks", "top_ps", "min_ps"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
        for name in ("temperatures", "seeds", "positions"):
            of_parts = torch.cat([getattr(part.sampling, name) for part in parts])
            assert torch.equal(of_parts, getattr(whole.sampling, name)), name


def test_rows_without_filters_are_not_special():
    """Nobody pays for a neighbour's option, and nothing is sampled twice that need not be."""
    plain = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=9), SamplingParams(top_k=2**70)]
    greedy = [SamplingParams(temperature=0, top_k=2, top_p=0.5, min_p=0.5)]
    assert special_rows(sampling_work(plain + greedy, range(5), [1] * 5), 9, CPU) == []
    # A minimum without any stop token bans nothing.
    assert special_rows(sampling_work([SamplingParams(min_tokens=3)], [0], [1]), 9, CPU) == []
    params = [*plain, SamplingParams(top_k=8), *greedy, SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
    [special] = special_rows(sampling_work(params, range(8), [1] * 8), 9, CPU)
    assert special.rows.tolist() == [4, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_every_dtype_are_sampled_in_float32(dtype):
    """Scores rounded to bfloat16 would tie and shift probabilities."""
    logits = torch.tensor(LOGITS).to(dtype).repeat(4000, 1)
    tokens = sample_rows(logits, SamplingParams(temperature=0.9))
    assert_distributed(tokens, exact_probabilities(logits[0].double().tolist(), SamplingParams(temperature=0.9)))


# Seeds


def test_the_same_seed_gives_the_same_tokens_and_another_seed_gives_others():
    """Also when seeds differ only in their upper 32 bits."""
    logits = torch.zeros(1, 5000).repeat(6, 1)
    tokens = sample_rows(logits, SamplingParams(), seeds=[3, 3, 4, 3 + 2**32, 3 + 2**63, 2**64 - 1])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[1:])) == 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, seed=1)
    return str(directory)


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 6, 7], [1, 2]]


def tokens_of(model_dir: str, calls, **options) -> list[list[list[int]]]:
    """Completions of several generate calls on one engine, each (prompts, params)."""
    with LLM(model_dir, device="cpu", **options) as llm:
        return [[output.token_ids for output in llm.generate(*call, use_tqdm=False)] for call in calls]


def test_the_same_script_gives_the_same_tokens(model_dir):
    """Requests without a seed take theirs from the engine's seed and their number, not from a clock."""
    params = SamplingParams(temperature=1.5, max_tokens=12)
    calls = [(PROMPTS, params), (PROMPTS, params)]
    first = tokens_of(model_dir, calls)
    assert first == tokens_of(model_dir, calls, overlap=False, max_num_seqs=2)
    assert first[0][0] != first[0][3], "two requests with one prompt must not be twins"
    assert first[0] != first[1], "a second call must not repeat the first"
    assert first != tokens_of(model_dir, calls, seed=1)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_completion_is_what_its_tokens_are_one_by_one(model_dir, overlap):
    """A filtered or banned row is sampled twice; the next step must go on from the second token, not the first."""
    greedy = tokens_of(model_dir, [(PROMPTS, SamplingParams(temperature=0, max_tokens=9))])[0]
    settings = [
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 0, "stop_token_ids": sorted({token_id for row in greedy for token_id in row})},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.2, "stop_token_ids": [1, 2, 3]},
    ]
    params = [SamplingParams(max_tokens=9, min_tokens=9, seed=row, **given) for row, given in enumerate(settings)]
    completions = tokens_of(model_dir, [(PROMPTS, params)], overlap=overlap)[0]
    assert not set(completions[1]) & set(settings[1]["stop_token_ids"])
    prompts, one_token = [], []
    for row, completion in enumerate(completions):
        for i in range(9):
            prompts.append(PROMPTS[row] + completion[:i])
            one_token.append(SamplingParams(max_tokens=1, min_tokens=1, seed=row, **settings[row]))
    one_by_one = tokens_of(model_dir, [(prompts, one_token)], enable_prefix_caching=False)[0]
    assert [row[0] for row in one_by_one] == [token_id for completion in completions for token_id in completion]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_new_tokens", [1, 4])
def test_a_prompt_that_passes_through_in_a_step_does_not_stop_the_decodes_beside_it(model_dir, overlap, num_new_tokens):
    """The decodes before and after it are the same, but they went on with it: their rows on the device are old."""
    params = SamplingParams(temperature=0, max_tokens=14)
    expected = tokens_of(model_dir, [([PROMPTS[0], PROMPTS[2]], params)])[0]
    with LLM(model_dir, device="cpu", overlap=overlap) as llm:
        engine, finished = llm.engine, []
        for prompt in (PROMPTS[0], PROMPTS[2]):
            engine.add_request(prompt, params)
        while not engine.is_finished():
            if engine.metrics()["num_steps"] in (4, 8):
                engine.add_request([7] * num_new_tokens, SamplingParams(temperature=0, max_tokens=1))
            finished += engine.step()
    completions = {tuple(seq.token_ids[: seq.num_prompt_tokens]): seq.completion_token_ids for seq in finished}
    assert len(finished) == 4
    assert [completions[tuple(prompt)] for prompt in (PROMPTS[0], PROMPTS[2])] == expected


def test_a_requests_seed_is_its_own(model_dir):
    """An explicit seed gives the same tokens beside any neighbours, in any place, under any engine seed."""

    def seeded(seed):
        return SamplingParams(temperature=1.5, max_tokens=12, seed=seed)

    ((alone,),) = tokens_of(model_dir, [([PROMPTS[2]], seeded(7))])
    calls = [(PROMPTS[:2], seeded(1)), (PROMPTS, [seeded(seed) for seed in (1, 7, 7, 8, 9)])]
    later = tokens_of(model_dir, calls, seed=99)[1]
    assert later[2] == alone
    ((other,),) = tokens_of(model_dir, [([PROMPTS[2]], seeded(8))])
    assert other != alone


@pytest.mark.parametrize("bad_prompt", [[], None, [10**6], [-1], "text", [1.5], [0] * 4000])
def test_a_bad_row_does_not_change_the_other_rows_tokens(model_dir, bad_prompt):
    """A row that cannot run uses up its number, so that the rows behind it keep their seeds."""
    params = SamplingParams(temperature=1.5, max_tokens=12)
    good = tokens_of(model_dir, [(PROMPTS, params)])[0]
    prompts = [*PROMPTS[:2], bad_prompt, *PROMPTS[3:]]
    bad = tokens_of(model_dir, [(prompts, params)])[0]
    assert bad[2] == []
    assert bad[:2] + bad[3:] == good[:2] + good[3:]


@pytest.mark.parametrize("overlap", [True, False])
def test_logits_with_nan_end_that_row_and_leave_no_trace(model_dir, overlap):
    """Its keys are NaN in blocks that others take over; neither they nor the prefix cache may pass them on."""
    params = [SamplingParams(temperature=t, max_tokens=10, seed=i) for i, t in enumerate((0, 1, 0.7, 1, 0))]
    options = {"kvcache_block_size": 2, "num_kvcache_blocks": 24, "max_num_seqs": 3, "overlap": overlap}
    good = tokens_of(model_dir, [(PROMPTS, params)], **options)[0]
    with LLM(model_dir, device="cpu", **options) as llm:
        llm.engine.runner.model.model.embed_tokens.weight[60] = math.nan
        outputs = llm.generate(
            [[60, 3, 3], *PROMPTS, [4, 4, 4, 4, 60]], [params[0], *params, params[1]], use_tqdm=False
        )
        again = llm.generate(PROMPTS, params, use_tqdm=False)
    for output in (outputs[0], outputs[-1]):
        assert output.finish_reason == "error" and "finite" in output.error and output.token_ids == []
    for rows in (outputs[1:-1], again):
        for row, expected in zip(rows, good, strict=True):
            # Only a row that came upon the poisoned token itself may end early.
            until = expected.index(60) + 1 if 60 in expected else len(expected)
            assert row.token_ids == expected[:until] and (row.error is None) == (60 not in expected[:-1])


def test_an_end_token_outside_the_vocabulary_is_harmless(tmp_path):
    """Configs name ids that a cut vocabulary lacks; banning such an id for min_tokens wrote out of bounds."""
    model = save_model(tmp_path, seed=1, eos_token_id=[1000, 3])
    model.generation_config.eos_token_id = [1000, 3]
    model.generation_config.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
    with LLM(str(tmp_path), device="cpu") as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            assert output.error is None and len(output.token_ids) == 8 and 3 not in output.token_ids
