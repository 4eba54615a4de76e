"""Top-k, top-p and min-p keep exactly what a sort in float64 keeps; in Triton's interpreter, the kernel does too.

tests/gpu/test_gpu_filters.py has the kernel on a GPU, with large batches and vocabularies.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.long import some

from nanovllm.ops import filters
from nanovllm.ops.filters import plain_filter_thresholds, triton_filter_thresholds
from nanovllm.ops.kernel import has_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities that are meant

NEAR = 1e-6  # of the mass: if a token is this near to p, float32 may keep or drop it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


# The definition


def kept_by_definition(logits: np.ndarray, setting: Setting, shift: float = 0.0) -> np.ndarray:
    """bool [vocab_size]: what temperature, top-k, top-p and min-p keep, in this order, by sorting in float64.

    shift: the part of the mass that is added to top_p.
    """
    logits, vocab_size = logits.astype(np.float64), len(logits)
    temperature, top_p, min_p = (float(np.float32(x)) for x in (setting.temperature, setting.top_p, setting.min_p))
    largest = logits.max()
    if temperature == 0 or largest == -math.inf:
        return np.ones(vocab_size, bool)
    if not (0 < setting.top_k < vocab_size or top_p < 1 or min_p > 0):
        return np.ones(vocab_size, bool)
    weights = np.exp((logits - largest) / max(temperature, 1.2e-38))
    kept = logits > -math.inf
    if 0 < setting.top_k < vocab_size:
        kept &= logits >= np.sort(logits)[-setting.top_k]
    if top_p < 1:
        values = np.unique(logits[kept])[::-1]
        masses = np.zeros(len(values))
        np.add.at(masses, np.searchsorted(-values, -logits[kept]), weights[kept])
        mass_before = np.concatenate([[0.0], np.cumsum(masses)[:-1]])
        is_kept = mass_before < (top_p + shift) * masses.sum()
        is_kept[0] = True
        kept &= logits >= values[is_kept].min()
    return kept & (weights >= min_p)


def run(find, logits: torch.Tensor, settings: list[Setting]) -> torch.Tensor:
    return find(
        logits,
        torch.tensor([setting.temperature for setting in settings]),
        torch.tensor([setting.top_k for setting in settings], dtype=torch.int32),
        torch.tensor([setting.top_p for setting in settings]),
        torch.tensor([setting.min_p for setting in settings]),
    )


def kept_by_threshold(logits: torch.Tensor, thresholds: torch.Tensor) -> np.ndarray:
    assert thresholds.dtype == torch.float32 and thresholds.shape == logits.shape[:1]
    return (logits.float() >= thresholds[:, None]).numpy()


class Tally:
    """Compares kept sets with the definition. A set that differs by one token passes only within NEAR of p, and is
    counted.
    """

    def __init__(self):
        self.num_rows = self.num_near = 0

    def check(self, logits: torch.Tensor, settings: list[Setting], thresholds: torch.Tensor) -> None:
        kept = kept_by_threshold(logits, thresholds)
        for row, setting in enumerate(settings):
            values = logits[row].float().numpy()
            self.num_rows += 1
            exact = kept_by_definition(values, setting)
            if np.array_equal(kept[row], exact):
                continue
            fewest, most = (kept_by_definition(values, setting, shift) for shift in (-NEAR, NEAR))
            where = f"row {row} of {tuple(logits.shape)} {logits.dtype}, {setting}: {kept[row].sum()} kept"
            assert not (fewest & ~kept[row]).any() and not (kept[row] & ~most).any(), f"{where}, not {exact.sum()}"
            assert not np.array_equal(fewest, most), where
            self.num_near += 1

    def assert_exact(self, num_rows: int, at_most_near: float = 0.01) -> None:
        assert self.num_rows >= num_rows
        assert self.num_near <= at_most_near * self.num_rows, (self.num_near, self.num_rows)


# Logits


def make_logits(kind: str, num_rows: int, vocab_size: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size * 31 + len(kind))
    normal = torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "flat":
        logits = normal * 0.6
    elif kind == "peaked":
        logits = normal * 5
    elif kind == "one token":
        logits = normal
        logits[:, vocab_size // 2] += 30
    elif kind == "tied":
        logits = (normal * 1.5).round() / 2
    elif kind == "equal":
        logits = torch.full_like(normal, -3.25)
    elif kind == "tied at the top":
        logits = normal.minimum(torch.tensor(0.5))
    elif kind == "mostly banned":
        logits = normal.masked_fill(torch.rand(normal.shape, generator=generator) < 0.9, -math.inf)
        logits[:, 0] = 0.125
    elif kind == "one left":
        logits = torch.full_like(normal, -math.inf)
        logits[:, -1] = -5.0
    elif kind == "huge":
        logits = normal * (1e4 if dtype == torch.float16 else 1e30)
    else:
        assert kind == "in steps of one bit"  # neighbouring numbers of float32: only the whole key tells them apart
        places = torch.randint(0, 50, normal.shape, generator=generator)
        logits = (torch.tensor(2.0).view(torch.int32) + places.int()).view(torch.float32)
    return logits.to(dtype)


KINDS = (
    "flat", "peaked", "one token", "tied", "equal", "tied at the top", "mostly banned", "one left", "huge",
    "in steps of one bit",
)  # fmt: skip
SETTINGS = [
    Setting(),
    Setting(temperature=0, top_k=3, top_p=0.5, min_p=0.5),
    *(Setting(top_k=k) for k in (1, 2, 20, 1000, 2**31 - 1)),
    Setting(temperature=0.1, top_k=50),
    *(Setting(top_p=p) for p in (1e-6, 0.1, 0.5, 0.95, 0.999, 1 - 2**-24)),
    *(Setting(temperature=0.6, top_p=p) for p in (0.3, 0.9)),
    *(Setting(min_p=p) for p in (1e-6, 0.05, 0.5, 1.0)),
    Setting(temperature=1e3, min_p=0.999),
    *(Setting(temperature=t, top_p=0.9) for t in (1e-30, 1e-6, 0.01, 30.0, 1e3)),
    *(Setting(temperature=t, top_k=7, min_p=0.3) for t in (1e-30, 1e-3, 1e3)),
    Setting(temperature=0.6, top_k=20, top_p=0.95),
    Setting(temperature=2.0, top_k=300, top_p=0.8, min_p=0.01),
    Setting(top_k=5, top_p=0.999, min_p=0.2),
    Setting(temperature=0.7, top_p=0.7, min_p=0.1),
    Setting(temperature=1.3, top_k=2**20, top_p=0.5),
]


# The plain twin


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_set_of_a_float64_sort_is_kept(kind):
    """Vocabularies have awkward sizes; each row has its own setting."""
    tally = Tally()
    for vocab_size in (1, 2, 17, 601, 10007):
        for dtype in DTYPES if vocab_size < 10000 else DTYPES[:2]:
            logits = make_logits(kind, len(SETTINGS), vocab_size, dtype)
            tally.check(logits, SETTINGS, run(plain_filter_thresholds, logits, SETTINGS))
    tally.assert_exact(len(SETTINGS) * 14)


@pytest.mark.parametrize("vocab_size", some([151936, 262144], 262144))
def test_large_vocabularies_are_filtered_exactly(vocab_size):
    """A sum of this many float32 numbers, one after the other, would be wrong in its third digit."""
    settings = [
        Setting(top_p=0.95), Setting(temperature=0.6, top_p=0.5), Setting(top_k=20, top_p=0.9), Setting(top_k=100000),
        Setting(temperature=5.0, top_k=vocab_size - 1, top_p=0.99), Setting(min_p=0.2),
    ]  # fmt: skip
    tally = Tally()
    for kind in ("flat", "peaked"):
        logits = make_logits(kind, len(settings), vocab_size)
        tally.check(logits, settings, run(plain_filter_thresholds, logits, settings))
    tally.assert_exact(12, at_most_near=0.34)  # one token has 4e-6 of the mass here


@pytest.mark.parametrize("find", [plain_filter_thresholds, triton_filter_thresholds], ids=["plain", "kernel"])
class TestBoth:
    """Laws of the twin and of the kernel; the kernel with few lanes, so that a short row takes several passes."""

    @pytest.fixture(autouse=True)
    def _small_lanes(self, monkeypatch, find):
        if find is triton_filter_thresholds:
            if not has_kernels():
                pytest.skip("needs Triton")
            monkeypatch.setattr(filters, "_LANES", 64)

    @pytest.mark.parametrize(
        ("setting", "kept"),
        [
            (Setting(top_p=0.5), {0, 1}),
            (Setting(top_p=0.51), {0, 1, 2, 3}),
            (Setting(top_p=0.25), {0, 1}),
            (Setting(top_k=1), {0, 1}),
            (Setting(top_k=3), {0, 1, 2, 3}),
            (Setting(top_k=3, top_p=0.68), {0, 1, 2, 3}),
            (Setting(top_k=3, top_p=0.5), {0, 1}),
            (Setting(min_p=1.0), {0, 1}),
        ],
    )
    def test_top_p_keeps_what_crosses_p_and_ties_with_it_stay(self, find, setting, kept):
        """There are two pairs: the first has a weight of 1 each, and the second nearly so."""
        logits = torch.tensor([[1.0, 1.0, 1.0 - 1e-6, 1.0 - 1e-6, -90.0]])
        assert set(np.flatnonzero(kept_by_threshold(logits, run(find, logits, [setting]))[0])) == kept

    def test_top_k_and_top_p_together_renormalise(self, find):
        """The first has 0.6 of the two that top-k leaves, so it alone reaches p. It has 0.4 of all four."""
        logits = torch.tensor([[0.4, 0.8 / 3, 0.2, 0.4 / 3]]).log()
        kept = kept_by_threshold(logits, run(find, logits, [Setting(top_k=2, top_p=0.55)]))
        assert kept[0].tolist() == [True, False, False, False]

    def test_a_row_that_filters_nothing_has_minus_infinity(self, find):
        """So has a greedy row with any filters, and a broken one, which the sampler flags."""
        logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1))
        logits[3, 5], logits[4, 299], logits[5] = math.nan, math.inf, -math.inf
        logits[6], logits[7] = math.nan, math.inf
        filtered = Setting(0.7, 5, 0.9, 0.1)
        settings = [Setting(), Setting(0, 5, 0.9, 0.1), Setting(top_k=300), *[filtered] * 5, Setting(top_k=2**31 - 1)]
        assert run(find, logits, settings).tolist() == [-math.inf] * 9

    def test_a_broken_row_ends_and_leaves_its_neighbours(self, find):
        """Comparisons with NaN are false, so a search that trusts them would never end."""
        setting = Setting(0.5, 30, 0.99, 1e-9)
        logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(2))
        expected = run(find, logits[::2], [setting] * 3)
        logits[1, 77], logits[3] = math.nan, math.inf
        thresholds = run(find, logits, [setting] * 5)
        assert torch.equal(thresholds[::2], expected) and expected.isfinite().all()
        assert thresholds[1::2].tolist() == [-math.inf] * 2

    def test_minus_infinity_is_kept_only_where_nothing_else_is(self, find):
        """A top-k larger than the number of tokens left once kept banned tokens, whose probability is 0."""
        logits = make_logits("mostly banned", 4, 200)
        settings = [Setting(top_k=150), Setting(0.7, 150, min_p=1e-30), Setting(min_p=1e-30), Setting(1e30, min_p=0.5)]
        kept = kept_by_threshold(logits, run(find, logits, settings))
        assert np.array_equal(kept, logits.isfinite().numpy())

    def test_the_same_row_gives_the_same_threshold_beside_any_neighbours(self, find):
        settings = [Setting(0.6, 20, 0.95), Setting(0, 3), Setting(top_p=0.9), Setting(min_p=0.1)]
        logits = make_logits("flat", len(settings), 217)
        together = run(find, logits, settings)
        order = torch.randperm(len(settings), generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = run(find, logits[order], [settings[row] for row in order])
        assert torch.equal(shuffled, together[order])
        assert torch.equal(run(find, logits[:1], settings[:1]), together[:1])

    def test_rows_may_lie_apart(self, find):
        """Padding behind a row is not part of it, even if it holds the largest numbers."""
        padded = torch.full((3, 120), 1e9)
        padded[:, :101] = make_logits("flat", 3, 101)
        settings = [Setting(top_k=4), Setting(top_p=0.4), Setting(min_p=0.5)]
        assert torch.equal(run(find, padded[:, :101], settings), run(find, padded[:, :101].contiguous(), settings))

    def test_min_p_is_exact_where_float32_cannot_tell_the_bound_from_a_logit(self, find):
        """largest + T × log(min_p), rounded to the nearest float32, once kept a logit below the bound."""
        logits = (20.0 - torch.arange(8, dtype=torch.float64) * 2.0**-19).float().repeat(12, 1)
        settings = [Setting(t, min_p=min_p) for t in (1e-6, 3e-6, 1e-5) for min_p in (0.02, 0.05, 0.3, 0.9)]
        tally = Tally()
        tally.check(logits, settings, run(find, logits, settings))
        tally.assert_exact(12, at_most_near=0)

    def test_no_rows_have_no_thresholds(self, find):
        assert run(find, torch.zeros(0, 50), []).shape == (0,)


def test_ties_with_the_last_token_of_a_small_top_k_are_all_found():
    """For a small top-k, the twin looks only at some of the largest logits; it once missed ties after them."""
    settings = [Setting(top_k=3), Setting(top_k=2, top_p=0.5), Setting(top_k=5, top_p=0.3), Setting(0.2, 4, 0.99, 0.1)]
    tally = Tally()
    for kind in ("tied at the top", "tied", "equal", "flat"):
        logits = make_logits(kind, len(settings), 901)
        logits[1:, 450] = 4.0  # above ties that weigh more than it, together
        tally.check(logits, settings, run(plain_filter_thresholds, logits, settings))
    tally.assert_exact(16)


# The kernel

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="needs Triton")


KERNEL_SETTINGS = [
    Setting(0.6, 20, 0.95),
    Setting(top_p=0.95),
    Setting(1e-30, 3, 0.9, 0.2),
    Setting(2.0, 130, 0.8, 0.01),
    Setting(1e3, 0, 0.3),
    Setting(1.0, 200, 0.9),
]


@needs_kernels
@pytest.mark.parametrize("kind", some(KINDS, "flat", "peaked", "tied", "in steps of one bit"))
def test_the_kernel_keeps_the_same_set(kind, monkeypatch):
    """Lanes and the scratch row are small, so that a few hundred logits take every path that a large row takes."""
    monkeypatch.setattr(filters, "_LANES", 64)
    monkeypatch.setattr(filters, "_SLOTS", 2)
    dtype = DTYPES[KINDS.index(kind) % 3] if kind != "in steps of one bit" else torch.float32
    logits = make_logits(kind, len(KERNEL_SETTINGS), 217, dtype)
    thresholds = run(triton_filter_thresholds, logits, KERNEL_SETTINGS)
    tally = Tally()
    tally.check(logits, KERNEL_SETTINGS, thresholds)
    tally.assert_exact(6, at_most_near=0.17)
    twins = run(plain_filter_thresholds, logits, KERNEL_SETTINGS)
    same = (kept_by_threshold(logits, thresholds) == kept_by_threshold(logits, twins)).all(1)
    assert same.sum() >= 5


@needs_kernels
@pytest.mark.parametrize("vocab_size", [1, 9001])
def test_the_kernel_as_it_is_launched_keeps_the_same_set(vocab_size):
    tally = Tally()
    settings = [Setting(0.6, 20, 0.95), Setting(top_p=0.9), Setting(0.7, min_p=0.05), Setting(top_k=6000, top_p=0.5)]
    for kind in ("flat", "peaked"):
        logits = make_logits(kind, len(settings), vocab_size, torch.bfloat16)
        tally.check(logits, settings, run(triton_filter_thresholds, logits, settings))
    tally.assert_exact(8, at_most_near=0.2)
