"""Log-probabilities equal log_softmax in float64, ranks and ids equal a sort; the kernels equal their twin.

The kernels run in Triton's interpreter here.
"""

import math

import numpy as np
import pytest
import torch
from support.long import some

from nanovllm.ops import logprobs as ops
from nanovllm.ops.filters import plain_filter_thresholds
from nanovllm.ops.kernel import has_kernels
from nanovllm.ops.logprobs import NO_LOGPROBS, PROCESSED, RAW, logprobs, plain_logprobs, triton_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities that are meant

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="needs Triton")
BOTH = pytest.mark.parametrize(
    "find", [plain_logprobs, pytest.param(triton_logprobs, marks=needs_kernels)], ids=["plain", "kernel"]
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR = 1e-5  # of log-probabilities


@pytest.fixture(autouse=True)
def _dirty_memory(monkeypatch):
    """New memory holds large numbers, which would show as results, and would win as keys."""
    full = torch.full

    def dirty(shape, *, dtype, device):
        return full(shape, 2**62 + 7 if dtype == torch.int64 else 2**30 + 7, dtype=dtype, device=device)

    monkeypatch.setattr(ops.torch, "empty", dirty)


def run(find, raw, token_ids, kinds=RAW, temperatures=1.0, thresholds=None, width=1, processed=None):
    """(ranks [num_rows], ids, float32 log-probabilities [num_rows, width]) as views; a single number counts for all
    rows.
    """
    num_rows = len(raw)
    kinds = torch.full((num_rows,), kinds) if isinstance(kinds, int) else torch.as_tensor(kinds)
    temperatures = torch.as_tensor(temperatures, dtype=torch.float32).expand(num_rows).contiguous()
    result = find(
        raw, raw if processed is None else processed, torch.as_tensor(token_ids).long(), kinds.int(), temperatures,
        thresholds, width,
    )  # fmt: skip
    assert result.dtype == torch.int32 and result.shape == (num_rows, 1 + 2 * width)
    array = result.numpy()
    ranks, ids, values = array[:, 0], array[:, 1::2], array[:, 2::2].view(np.float32)
    assert all(np.shares_memory(array, view) for view in (ranks, ids, values)) or not num_rows
    return ranks, ids, values


def by_definition(logits: torch.Tensor, token: int, temperature=1.0, threshold=-math.inf, width=1):
    """(rank, ids, log-probabilities) of a row, from a sort in float64; −inf where a float32 has no smaller number."""
    logits = logits.double().numpy()
    logits = np.where(logits < threshold, -math.inf, logits)
    temperature = max(float(np.float32(temperature)), 1.2e-38) if temperature else 1.0
    values = torch.from_numpy((logits - logits.max()) / temperature).log_softmax(0).float().numpy()
    order = np.lexsort((np.arange(len(logits)), -logits))[: width - 1]
    order = order[values[order] > -math.inf]
    missing = width - 1 - len(order)
    own = [token, values[token]] if 0 <= token < len(logits) else [-1, -math.inf]
    rank = 1 + int((logits > logits[token]).sum()) if own[0] >= 0 else 0
    return rank, [own[0], *order, *[-1] * missing], [own[1], *values[order], *[-math.inf] * missing]


def assert_as_defined(result, logits, tokens, temperatures, thresholds, width) -> None:
    for row in range(len(logits)):
        rank, ids, values = by_definition(
            logits[row], int(tokens[row]), float(temperatures[row]), float(thresholds[row]), width
        )
        assert result[0][row] == rank, row
        assert result[1][row].tolist() == ids, row
        np.testing.assert_allclose(result[2][row], values, rtol=1e-6, atol=NEAR)


def random_case(vocab_size: int, dtype=torch.float32):
    """Arguments of `run` whose rows differ in everything; raw and processed logits, and their dtypes, differ too."""
    generator = torch.Generator().manual_seed(vocab_size)
    raw = (torch.randn(8, vocab_size, generator=generator) * 3).to(dtype)
    processed = torch.randn(8, vocab_size, generator=generator) * 3
    processed[processed < -5] = -math.inf
    processed[:, vocab_size // 2] = processed[:, 0] = 1.5
    tokens = torch.randint(0, vocab_size, (8,), generator=generator)
    tokens[0], tokens[1], tokens[2] = 0, vocab_size - 1, -1
    kinds = torch.tensor([PROCESSED, RAW, PROCESSED, NO_LOGPROBS, PROCESSED, RAW, PROCESSED, PROCESSED])
    temperatures = torch.tensor([0.7, 0.3, 1.0, 1.0, 0.0, 0.0, 1e-30, 2.5])
    top_ks = torch.tensor([9, 3, 0, 0, 3, 0, 0, 4000]).int()
    top_ps = torch.tensor([1.0, 0.5, 0.95, 0.9, 0.5, 1.0, 0.9, 0.999])
    thresholds = plain_filter_thresholds(processed, temperatures, top_ks, top_ps, torch.zeros(8))
    return {
        "raw": raw, "processed": processed, "token_ids": tokens, "kinds": kinds, "temperatures": temperatures,
        "thresholds": thresholds,
    }  # fmt: skip


# The values


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_rows_have_the_log_softmax_of_the_raw_logits(find, dtype):
    """This holds for all temperatures, thresholds and processed logits. Logits up to 50 keep five decimals."""
    for vocab_size in (1, 37, 5001):
        raw = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).mul(14).clamp(-50, 50)
        raw = raw.to(dtype)
        tokens = raw.argmin(-1)
        tokens[1] = 0
        others = {"temperatures": [0.0, 0.5, 3.0, 1e-38], "thresholds": torch.full((4,), 60.0)}
        ranks, ids, values = run(find, raw, tokens, RAW, width=4, processed=torch.zeros_like(raw), **others)
        exact = raw.double().log_softmax(-1).numpy()
        places = np.where(ids >= 0, ids, 0)
        expected = np.where(ids >= 0, np.take_along_axis(exact, places, 1), -math.inf)
        np.testing.assert_allclose(values, expected, rtol=0, atol=NEAR)
        assert ids[:, 0].tolist() == tokens.tolist() and (ids >= 0).sum() == 4 * (1 + min(3, vocab_size))
        assert ranks.tolist() == [int((row > row[token]).sum()) + 1 for row, token in zip(raw, tokens, strict=True)]


@pytest.mark.grid(1)
@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_processed_rows_have_the_distribution_that_is_sampled(find, dtype, monkeypatch):
    """The whole kept set is listed and no other id, and its probabilities sum to one."""
    monkeypatch.setattr(ops, "_TOKENS", 64)
    vocab_size, temperatures = 141, torch.tensor([0.6, 1.0, 3.0, 0.0, 1.3])
    logits = (torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    top_ks, top_ps = torch.tensor([0, 20, 0, 5, 0]).int(), torch.tensor([0.95, 1.0, 0.9, 0.5, 1.0])
    thresholds = plain_filter_thresholds(logits, temperatures, top_ks, top_ps, torch.tensor([0, 0, 0.01, 0, 1e-4]))
    tokens = logits.argmax(-1)
    raw = torch.zeros_like(logits)
    _, ids, values = run(find, raw, tokens, PROCESSED, temperatures, thresholds, vocab_size + 1, logits)
    for row in range(5):
        kept = np.flatnonzero(logits[row].float() >= thresholds[row])
        listed = ids[row, 1:][ids[row, 1:] >= 0]
        assert set(listed) == set(kept) and len(listed) == len(kept)
        assert np.isneginf(values[row, 1 + len(kept) :]).all()
        assert np.exp(values[row, 1 : 1 + len(kept)].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    assert_as_defined((tokens * 0 + 1, ids, values), logits, tokens, temperatures, thresholds, vocab_size + 1)


@BOTH
def test_a_token_that_cannot_be_sampled_has_minus_infinity_and_the_rank_after_all_that_can(find):
    """Its logit is below the threshold, or −inf itself; its raw log-probability stays finite."""
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0, -math.inf]]).repeat(3, 1)
    thresholds = torch.tensor([2.0, 1.0, 2.0])
    ranks, ids, values = run(find, logits, [0, 4, 0], [PROCESSED, PROCESSED, RAW], 1.0, thresholds, 5)
    assert ranks.tolist() == [3, 4, 4]
    assert np.isneginf(values[:2, 0]).all() and values[2, 0] > -4
    assert ids.tolist() == [[0, 1, 2, -1, -1], [4, 1, 2, 3, -1], [0, 1, 2, 3, 0]]


@BOTH
@pytest.mark.parametrize("temperature", [5e-45, 1e-41, 1.2e-38, 1e-30])
def test_a_tiny_temperature_leaves_the_largest_alone(find, temperature):
    """Logits over 1e-38 overflow to infinity, and infinity − infinity is no probability."""
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(3)) * 100 - 500
    logits[1, [9, 150]] = 7.0
    logits[2, [5, 6]] = torch.tensor([3e38, -3e38])
    tokens = [int(logits[0].argmin()), 150, 5]
    result = run(find, logits, tokens, PROCESSED, temperature, None, 4)
    assert_as_defined(result, logits, tokens, [temperature] * 3, [-math.inf] * 3, 4)
    ranks, ids, values = result
    assert ranks.tolist() == [200, 1, 1] and ids[:, 1].tolist() == [int(logits[0].argmax()), 9, 5]
    np.testing.assert_allclose(values[:, 1], [0, -math.log(2), 0], rtol=0, atol=1e-6)
    assert (values[:, 3] < -1e29).all()


@BOTH
def test_a_temperature_of_zero_counts_as_one(find):
    """A greedy row's distribution is that of its logits; dividing by a tiny number would leave one token."""
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(4))
    thresholds = torch.full((2,), -math.inf)
    result = run(find, logits, [3, 4], PROCESSED, [0.0, 1.0], thresholds, 5)
    assert_as_defined(result, logits, [3, 4], [1.0, 1.0], thresholds, 5)
    assert np.isfinite(result[2]).all()


@BOTH
@pytest.mark.parametrize("shift", [-500.0, 500.0])
def test_a_number_added_to_all_logits_changes_nothing(find, shift):
    """Here the sums are exact. exp(500) overflows, exp(−500) is 0; padding of a row's last part must not count."""
    logits = torch.randint(-40, 40, (2, 9000), generator=torch.Generator().manual_seed(7)) / 8
    for ours, theirs in zip(run(find, logits + shift, [3, 8999]), run(find, logits, [3, 8999]), strict=True):
        assert np.array_equal(ours, theirs)


# Order, ranks, ties


@BOTH
def test_of_equal_logits_the_lowest_id_comes_first(find):
    """This holds within a group of ids, across groups and across parts; −0 equals 0. A rank does not count equals."""
    zeros = torch.zeros(4, 9000)
    zeros[1, [8999, 77, 4095, 4096, 78]] = 1
    zeros[2, ::2] = -0.0
    zeros[3, 4097:] = torch.arange(4903) % 3 - 1.0
    ranks, ids, _ = run(find, zeros, [8000, 5, 17, 4096], width=8)
    assert ids[:, 0].tolist() == [8000, 5, 17, 4096]
    assert ids[0, 1:].tolist() == ids[2, 1:].tolist() == list(range(7))
    assert ids[1, 1:].tolist() == [77, 78, 4095, 4096, 8999, 0, 1]
    assert ids[3, 1:].tolist() == list(range(4099, 4120, 3))
    assert ranks.tolist() == [1, 6, 1, 1 + 4903 // 3]


@BOTH
def test_logits_are_told_apart_where_their_log_probabilities_are_equal(find):
    """For logits 100 below the largest, log-probabilities are multiples of 2^-17."""
    logits = torch.tensor([[100.0, 1e-7, 3e-7, 2e-7, -1e-7, -2e-7, 0.0]])
    ranks, ids, values = run(find, logits.repeat(3, 1), [1, 4, 0], width=8)
    assert ranks.tolist() == [4, 6, 1]
    assert ids[0, 1:].tolist() == [0, 2, 3, 1, 6, 4, 5]
    assert len(set(values[0, 2:].tolist())) == 1


@BOTH
def test_columns_beyond_what_can_be_sampled_are_empty(find):
    """This holds even if whole parts of the vocabulary are banned; if all ids are banned, all columns are empty."""
    logits = torch.full((3, 9000), -math.inf)
    logits[0, [4500, 8999]] = torch.tensor([1.0, 2.0])
    logits[1, 0] = -7.5
    ranks, ids, values = run(find, logits, [4500, 3, 3], width=4)
    assert ranks.tolist() == [2, 2, 1]
    assert ids.tolist() == [[4500, 8999, 4500, -1], [3, 0, -1, -1], [3, -1, -1, -1]]
    low, high = -math.log1p(math.e), -math.log1p(1 / math.e)
    empty = -math.inf
    expected = [[low, high, low, empty], [empty, 0, empty, empty], [empty] * 4]
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6)


# Rows


@BOTH
def test_rows_without_logprobs_are_zeros(find):
    case = random_case(61)
    case["kinds"][:] = NO_LOGPROBS
    for width in (1, 2, 50):
        ranks, ids, values = run(find, **case, width=width)
        assert not ranks.any() and not ids.any() and not values.any()


@BOTH
@pytest.mark.parametrize("token", [-1, -2, -(2**31), 50, 2**31, 2**40])
@pytest.mark.parametrize("kind", [RAW, PROCESSED])
def test_a_row_without_a_token_has_rank_zero_and_its_most_probable_ids(find, token, kind):
    """The logits next to the row in memory are larger, and must not be found."""
    memory = torch.full((5, 50), 99.0)
    logits = memory[2:3]
    logits[:] = torch.randn(50, generator=torch.Generator().manual_seed(5))
    ranks, ids, values = run(find, logits, [token], kind, width=3)
    _, usual_ids, usual = run(find, logits, [7], kind, width=3)
    assert ranks[0] == 0 and ids[0, 0] == -1 and values[0, 0] == -math.inf
    assert np.array_equal(ids[:, 1:], usual_ids[:, 1:]) and np.array_equal(values[:, 1:], usual[:, 1:])


@BOTH
def test_rows_may_lie_apart(find):
    """Padding behind a row is not part of it, even if it is NaN or larger than all. Strides of the two may differ."""
    case = random_case(250)
    padded = torch.full((8, 300), math.nan)
    padded[:, 280:] = 1e9
    wider = torch.full((8, 777), 1e9)
    padded[:, :250], wider[:, :250] = case["raw"], case["processed"]
    expected = run(find, **case, width=6)
    case |= {"raw": padded[:, :250], "processed": wider[:, :250]}
    for ours, theirs in zip(run(find, **case, width=6), expected, strict=True):
        assert np.array_equal(ours, theirs)


@BOTH
def test_a_row_does_not_depend_on_its_neighbours(find):
    """Each alone, reversed, and repeated: bit for bit the same."""
    case = random_case(4100)
    together = run(find, **case, width=3)
    for rows in ([0], [1], list(range(8))[::-1], [7] * 3):
        alone = run(find, **{name: tensor[rows] for name, tensor in case.items()}, width=3)
        for ours, theirs in zip(alone, together, strict=True):
            assert np.array_equal(ours, theirs[rows])


@pytest.mark.grid(1)
@BOTH
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
def test_a_broken_row_ends_and_leaves_its_neighbours(find, poison):
    """All comparisons with NaN are false, so a loop or an index that trusts them would go wrong."""
    logits = torch.randn(4, 4200, generator=torch.Generator().manual_seed(6))
    tokens, kinds = [5, 11, 4199, 7], [RAW, PROCESSED, RAW, PROCESSED]
    expected = run(find, logits, tokens, kinds, 0.7, width=20)
    logits[1, [11, 40, 4199]], logits[2] = poison, poison
    result = run(find, logits, tokens, kinds, 0.7, width=20)
    for ours, theirs in zip(result, expected, strict=True):
        assert np.array_equal(ours[::3], theirs[::3])
    assert result[1].min() >= -1 and result[1].max() < 4200


@BOTH
def test_no_rows_have_no_logprobs(find):
    ranks, ids, values = run(find, torch.zeros(0, 50), [], width=3)
    assert ranks.shape == (0,) and ids.shape == values.shape == (0, 3)


# The twin and the kernels


@BOTH
@pytest.mark.parametrize("vocab_size", [1, 15, 61, 4095, 4096, 4097, 9000])
def test_rows_of_all_kinds_are_as_a_sort_in_float64_has_them(find, vocab_size):
    case = random_case(vocab_size, DTYPES[vocab_size % 3])
    is_raw = case["kinds"] == RAW
    logits = torch.where(is_raw[:, None], case["raw"].float(), case["processed"])
    temperatures = torch.where(is_raw, 1, case["temperatures"])
    thresholds = torch.where(is_raw, -math.inf, case["thresholds"])
    rows = (case["kinds"] != NO_LOGPROBS).nonzero()[:, 0]
    result = [array[rows] for array in run(find, **case, width=6)]
    tokens = case["token_ids"][rows]
    assert_as_defined(result, logits[rows], tokens, temperatures[rows], thresholds[rows], 6)


@pytest.mark.grid(1)
@needs_kernels
@pytest.mark.parametrize("width", [1, 2, 6, 21])
@pytest.mark.parametrize("vocab_size", [1, 15, 61, 4095, 4096, 4097, 9000])
def test_the_kernels_do_as_their_twin(vocab_size, width):
    for dtype in DTYPES if width < 21 else DTYPES[1:2]:
        case = random_case(vocab_size, dtype)
        variants = [case, case | {"thresholds": None}, case | {"processed": case["raw"]}]
        for variant in variants if dtype == torch.bfloat16 else variants[:1]:
            ours, theirs = run(triton_logprobs, **variant, width=width), run(plain_logprobs, **variant, width=width)
            assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])
            np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-6, atol=NEAR)


@needs_kernels
@pytest.mark.parametrize("num_values", some([1, 2, 40], 2))
def test_the_kernels_list_more_ids_than_a_part_has(num_values, monkeypatch):
    """Parts are small, so that lists end early and parts run out one after the other; most logits are equal."""
    monkeypatch.setattr(ops, "_TOKENS", 32)
    generator = torch.Generator().manual_seed(num_values)
    logits = torch.randint(0, num_values, (2, 117), generator=generator).bfloat16() / 8
    logits[1, 64:100] = -math.inf
    for width in (33, 34, 120):
        ours, theirs = (run(find, logits, [5, 70], width=width) for find in (triton_logprobs, plain_logprobs))
        assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])
        np.testing.assert_allclose(ours[2], theirs[2], rtol=0, atol=NEAR)
        expected = by_definition(logits[1], 70, width=width)
        assert ours[0][1] == expected[0] and ours[1][1].tolist() == expected[1]


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_the_twin_converts_a_few_rows_at_once(num_rows, monkeypatch):
    """A float32 copy of all rows of a large batch would not fit into memory; rows must not be mixed up."""
    case = random_case(61, torch.bfloat16)
    expected = run(plain_logprobs, **case, width=6)
    sizes, of_rows = [], ops._logprobs

    def spy(logits, *others):
        sizes.append(logits.numel())
        return of_rows(logits, *others)

    monkeypatch.setattr(ops, "_logprobs", spy)
    monkeypatch.setattr(ops, "_NUM_AT_ONCE", 61 * num_rows + 60)
    for ours, theirs in zip(run(plain_logprobs, **case, width=6), expected, strict=True):
        assert np.array_equal(ours, theirs)
    assert max(sizes) == 61 * min(num_rows, 5) and sum(sizes) == 61 * 7


@needs_kernels
def test_the_kernels_run_where_they_are_asked_for(monkeypatch):
    """On a CPU they run only then."""
    calls = []
    monkeypatch.setattr(ops, "triton_logprobs", lambda *arguments: calls.append("kernel"))
    monkeypatch.setattr(ops, "plain_logprobs", lambda *arguments: calls.append("plain"))
    ones = torch.ones(1)
    for fused in (None, False, True):
        logprobs(torch.zeros(1, 3), torch.zeros(1, 3), ones.long(), ones.int(), ones, None, 1, fused)
    assert calls == ["plain", "plain", "kernel"]
