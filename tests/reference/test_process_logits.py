"""Logits processors against their definitions, written plainly for one row; the kernels against the plain twin."""

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from support.logits_case import (
    INF,
    Request,
    Settings,
    assert_same,
    definition,
    make_case,
    make_rules,
    random_case,
)
from support.long import some

from nanovllm.ops import process_logits as module
from nanovllm.ops.kernel import has_kernels
from nanovllm.ops.process_logits import (
    ALWAYS,
    edits_of,
    pack_allowed,
    plain_process_logits,
    process_logits,
    triton_process_logits,
)

# numpy's, in the definitions and in Triton's interpreter, of infinities that are meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NEEDS_TRITON = pytest.mark.skipif(not has_kernels(), reason="needs Triton")


@pytest.fixture(params=["plain", pytest.param("kernels", marks=NEEDS_TRITON)])
def process(request: pytest.FixtureRequest) -> Callable:
    """process_logits, computed by the plain twin or by the kernels."""
    return partial(process_logits, use_kernels=request.param == "kernels")


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70, 128, 333])
def test_processed_logits_equal_the_definitions(process, vocab_size, count):
    rng = random.Random(vocab_size)
    for _ in range(count(3, 15)):
        case = random_case(rng, vocab_size, num_rows=rng.randint(1, 7), max_len=rng.choice([1, 6, 40]))
        before = case.logits.clone()
        assert_same(case.run(process), case.expected())
        assert case.logits.equal(before) or not before.isfinite().all(), "the logits given are not changed"


@NEEDS_TRITON
def test_kernels_give_the_twins_bits_when_their_programs_stride(monkeypatch, count):
    """Programs are small and few: each handles several parts of a history and of the edits, and several dense parts."""
    monkeypatch.setattr(module, "_IDS", 16)
    monkeypatch.setattr(module, "_POSITIONS", 4)
    rng = random.Random(5)
    for _ in range(count(5, 25)):
        monkeypatch.setattr(module, "_PROGRAMS", rng.choice([1, 8, 64]))
        case = random_case(rng, rng.choice([5, 50]), num_rows=rng.randint(1, 4), max_len=60)
        assert_same(case.run(triton_process_logits), case.run(plain_process_logits))


@NEEDS_TRITON
def test_kernels_need_no_cleared_memory(monkeypatch):
    """Counters are cleared only where the history points to; a result is written everywhere."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(77))
    rng = random.Random(3)
    for _ in range(10):
        case = random_case(rng, 40, num_rows=4, max_len=30)
        assert_same(case.run(triton_process_logits), case.expected())


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_equals_transformers(process, penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, ids = random_logits(3, 50), torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(1))
    requests = [Request(row[:8], row[8:], Settings(repetition=penalty)) for row in ids.tolist()]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert_same(make_case(requests, logits).run(process), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_rules_is_its_logits_in_float32(process, dtype):
    logits = random_logits(3, 65).to(dtype)
    requests = [Request([1, 2], [3], Settings()), Request([1], [2], Settings(repetition=2.0))]
    out = make_case(requests, logits, entries=[0, 1, -1]).run(process)
    assert_same(out[[0, 2]], logits[[0, 2]].float())
    assert not out[1].equal(logits[1].float())


def test_neighbours_do_not_matter(process):
    rng = random.Random(11)
    for _ in range(6):
        case = random_case(rng, 60, num_rows=5, max_len=20)
        together = case.run(process)
        for row in range(5):
            one = slice(row, row + 1)
            alone = process(case.logits[one], case.entries[one], case.lengths[one], case.tokens, case.rules)
            assert_same(alone, together[one])


def test_two_rows_of_one_entry_are_counted_apart(process):
    """Rows of one sequence at successive positions, as a step that verifies drafted tokens has them."""
    request = Request([1, 2], [3, 3, 4], Settings(repetition=1.5, frequency=0.5, bad_words=[[3, 3, 7]], min_tokens=3))
    request.settings.stop_token_ids = [9]
    case = make_case([request], random_logits(3, 40), entries=[0, 0, 0])
    case.lengths = torch.tensor([3, 4, 5], dtype=torch.int32)
    expected = [
        definition(logits, Request([1, 2], [3, 3, 4][: length - 2], request.settings))
        for logits, length in zip(case.logits, (3, 4, 5), strict=True)
    ]
    assert_same(case.run(process), np.stack(expected))


@pytest.mark.parametrize("num_tokens", some([1, 2, 3, 4], 1, 4))
def test_a_bad_word_is_banned_where_the_completion_ends_with_its_prefix(process, num_tokens):
    """A prefix was once found in the prompt too, or across its end."""
    known, prefix = [5, 6, 7, 5, 6, 7, 5, 6, 7, 8, 7, 5, 6], [5, 6, 7][3 - (num_tokens - 1) :]
    settings = Settings(bad_words=[[*prefix, 20], [9, *prefix, 21]])
    ends = [(start, end) for start in range(len(known) + 1) for end in range(start, len(known) + 1)]
    requests = [Request(known[:start], known[start:end], settings) for start, end in ends]
    case = make_case(requests, random_logits(len(requests), 33))
    out = case.run(process)
    is_banned = [known[start:end][max(0, end - start - len(prefix)) :] == prefix for start, end in ends]
    assert (out[:, 20] == -INF).tolist() == is_banned and True in is_banned
    assert num_tokens == 1 or False in is_banned
    out[:, 20] = case.logits[:, 20]
    assert_same(out, case.logits)


def test_stop_tokens_are_banned_until_min_tokens_were_generated(process):
    """The token being sampled may be a stop token if it is the min_tokens-th; it need not come after that."""
    settings = Settings(stop_token_ids=[4, 30], min_tokens=3)
    requests = [Request([1] * num_prompt, [2] * num, settings) for num_prompt in (0, 1, 7) for num in range(6)]
    out = make_case(requests, random_logits(len(requests), 31)).run(process)
    for token in (4, 30):
        assert (out[:, token] == -INF).tolist() == [num < 3 for _ in range(3) for num in range(6)]
    assert out.isneginf().sum() == 3 * 3 * 2


def test_edits_of_one_id_add_up(process):
    rules = make_rules([Request([], [], Settings(logit_bias={1: 0.5, 2: 2.0, 3: 1.0}))] * 2, 8)
    rules.edit_ids[0] = torch.tensor([1, 1, 1])
    rules.edit_values[1, 1] = -INF
    rules.edit_ids[1] = torch.tensor([6, 6, -1])
    lengths, tokens = torch.zeros(2, dtype=torch.int32), torch.zeros((2, 1), dtype=torch.int32)
    out = process(torch.zeros(2, 8), torch.arange(2), lengths, tokens, rules)
    assert out[0].tolist() == [0, 3.5, 0, 0, 0, 0, 0, 0]
    assert out[1].tolist() == [0, 0, 0, 0, 0, 0, -INF, 0]


def test_nothing_revives_a_banned_id(process):
    """Neither a bias nor a negative penalty revives it; a row whose bans leave no token has only −inf."""
    bonus = {"repetition": 0.5, "presence": -2.0, "frequency": -2.0}
    everything = list(range(40))
    settings = [
        Settings(**bonus, allowed=[], logit_bias={3: 100.0}),
        Settings(**bonus, logit_bias={3: 100.0}, bad_words=[[token] for token in everything]),
        Settings(**bonus, stop_token_ids=everything, min_tokens=100),
    ]
    out = make_case([Request([3, 4], [3, 3, 5], each) for each in settings], random_logits(3, 40)).run(process)
    assert out.isneginf().all()


def test_a_broken_logit_stays_visible(process):
    """A NaN or +inf logit breaks its row, which the sampler must still see behind a ban, a bias or a penalty."""
    settings = Settings(repetition=1.5, presence=0.5, frequency=0.5, logit_bias={1: 2.0, 2: -INF}, allowed=[0, 1, 2, 3])
    for value in (float("nan"), INF):
        case = make_case([Request([3], [0, 0, 5], settings)] * 6, random_logits(6, 6))
        case.logits.fill_diagonal_(value)
        out = case.run(process).diagonal()
        assert (out.isnan() | out.isposinf()).all()
    case.logits.fill_diagonal_(-INF)
    assert case.run(process).diagonal().isneginf().all()


def test_penalties_look_at_prompt_and_completion_as_vllm_does(process):
    """Repetition looks at both and not at how often; presence and frequency look at the completion only."""
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0, 4.0]])
    requests = [Request([0, 0, 1, 2], [2, 3, 3], Settings(repetition=2.0))]
    assert make_case(requests, logits).run(process).tolist() == [[2, -8, 2, -8, 4]]
    requests[0].settings = Settings(presence=0.5)
    assert make_case(requests, logits).run(process).tolist() == [[4, -4, 3.5, -4.5, 4]]
    requests[0].settings = Settings(frequency=0.5)
    assert make_case(requests, logits).run(process).tolist() == [[4, -4, 3.5, -5, 4]]
    requests[0].settings = Settings(2.0, 0.25, 0.5, logit_bias={2: -5.0})  # the bias comes first, the repetition next
    assert make_case(requests, logits).run(process).tolist() == [[2, -8, -2.75, -9.25, 4]]


def test_a_part_of_the_vocabulary_gives_its_part_of_the_logits(process):
    """Every rule names ids of the whole vocabulary, for any beginning and end of a rank's part."""
    rng = random.Random(2)
    bias = {token: token / 8 for token in range(0, 100, 3)}
    words = [[token, token + 1, token + 2] for token in range(0, 98, 5)]
    requests = []
    for _ in range(4):
        settings = Settings(1.3, 0.5, 0.25, rng.sample(range(100), 60), bias, words, [0, 44, 45, 99], 30)
        requests.append(Request(rng.choices(range(100), k=30), [*rng.choices(range(100), k=28), 40, 41], settings))
    case = make_case(requests, random_logits(4, 100))
    whole, logits = case.run(process), case.logits
    assert_same(whole, case.expected())
    for first, end in ((0, 45), (1, 3), (32, 64), (45, 100), (99, 100), (100, 100)):
        case.logits = logits[:, first:end]
        assert_same(case.run(process, first_id=first), whole[:, first:end])


def test_a_step_without_rows_or_edits_is_processed_too(process):
    case = make_case([Request([1], [2], Settings())], random_logits(1, 9))
    assert case.rules.edit_ids.shape == (2, 0) and case.rules.prefix_tokens.shape == (2, 0)
    assert_same(case.run(process), case.logits)
    case.logits, case.entries, case.lengths = case.logits[:0], case.entries[:0], case.lengths[:0]
    assert case.run(process).shape == (0, 9)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
def test_pack_allowed_sets_exactly_the_bits_of_the_allowed_ids(vocab_size):
    rng = random.Random(vocab_size)
    for ids in ([], [0], [vocab_size - 1] * 2, rng.sample(range(vocab_size), rng.randint(1, vocab_size))):
        words = pack_allowed(ids, vocab_size)
        assert words.dtype == np.int32 and words.shape == (-(-vocab_size // 32),)
        assert {id for id in range(32 * len(words)) if int(words[id // 32]) >> id % 32 & 1} == set(ids)
    assert (pack_allowed(None, vocab_size) == -1).all()


@pytest.mark.parametrize("ids", [[-1], [0, 40], [2**40]], ids=str)
def test_pack_allowed_refuses_ids_that_are_not_in_the_vocabulary(ids):
    with pytest.raises(ValueError, match="from 0 to 39"):
        pack_allowed(ids, 40)


def test_edits_of_names_each_bias_bad_word_and_stop_token():
    edits = edits_of({3: 1.5, 4: -INF}, [[7], [1, 2, 8], [5, 9]], {0}, min_tokens=6)
    assert edits.ids.tolist() == [3, 4, 7, 8, 9, 0]
    assert edits.values.tolist() == [1.5] + [-INF] * 5
    assert edits.until.tolist() == [ALWAYS] * 5 + [6]
    assert edits.prefixes.tolist() == [[0, 0], [0, 0], [0, 0], [0, 2], [2, 1], [0, 0]]
    assert edits.prefix_tokens.tolist() == [1, 2, 5]
    assert [array.dtype for array in edits] == [np.int32, np.float32, np.int32, np.int32, np.int32]


def test_edits_of_nothing_are_empty():
    edits = edits_of({}, [], [1, 2], min_tokens=0)
    assert [array.shape for array in edits] == [(0,), (0,), (0,), (0, 2), (0,)]
    assert edits_of({}, [], [1], min_tokens=2**40).until.tolist() == [ALWAYS]
