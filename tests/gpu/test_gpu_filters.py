"""The filters' and the sampler's kernels on a GPU: large vocabularies and batches, graphs; tests/unit has the laws."""

import numpy as np
import pytest
import torch

from nanovllm.ops.filters import plain_filter_thresholds, triton_filter_thresholds
from nanovllm.ops.sample import BROKEN_LOGITS, NO_TOKEN_LEFT, plain_sample, triton_sample

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
NEAR = 1e-6  # of the mass: if a token is this near to p, float32 may keep or drop it
# (temperature, top_k, top_p, min_p)
SETTINGS = [
    (0.6, 20, 0.95, 0), (0.6, 0, 0.95, 0), (1, 0, 0.5, 0), (1, 0, 0.999, 0), (1, 50, 1, 0), (1, 1, 1, 0),
    (1, 3000, 1, 0), (1, 10000, 0.9, 0), (1, 100000, 1, 0), (2, 0, 0.9, 0.01), (1, 0, 1, 0.05), (1e-30, 0, 0.9, 0),
    (1e3, 0, 0.9, 0), (1e3, 500, 0.9, 0.5), (0.7, 1000, 0.99, 0.001), (1, 0, 1e-6, 0), (0, 5, 0.5, 0.5), (1, 0, 1, 0),
]  # fmt: skip


def make_logits(kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(vocab_size + len(kind))
    logits = torch.randn(num_rows, vocab_size, device="cuda", generator=generator)
    if kind == "flat":
        logits *= 0.6
    elif kind == "peaked":
        logits *= 3
    elif kind == "likely few":  # a broad bulk and some tens of likely tokens
        ids = torch.randint(0, vocab_size, (num_rows, 40), device="cuda", generator=generator)
        logits = (logits * 2.2).scatter_(1, ids, 12 + 3 * torch.randn(num_rows, 40, device="cuda", generator=generator))
    elif kind == "tied":
        logits = (logits * 1.5).round() / 2
    elif kind == "equal":
        logits = torch.full_like(logits, 1.5)
    else:
        assert kind == "in steps of one bit"
        steps = torch.randint(0, 50, logits.shape, device="cuda", generator=generator, dtype=torch.int32)
        logits = (torch.full_like(logits, 2.0).view(torch.int32) + steps).view(torch.float32)
    return logits.to(dtype)


def tensors_of(settings) -> list[torch.Tensor]:
    columns = zip(*settings, strict=True)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [torch.tensor(column, dtype=dtype, device="cuda") for column, dtype in zip(columns, dtypes, strict=True)]


def num_kept_by_definition(logits, temperatures, top_ks, top_ps, min_ps, shift: float = 0.0) -> torch.Tensor:
    """int64 [num_rows]: how many tokens a sort in float64 keeps; shift: the part of the mass that is added to top_p."""
    vocab_size = logits.shape[1]
    ordered = logits.double().sort(-1, descending=True).values
    weights = ((ordered - ordered[:, :1]) / temperatures.double().clamp(min=1.2e-38)[:, None]).exp()
    last_place = torch.where((top_ks > 0) & (top_ks < vocab_size), top_ks, vocab_size).long() - 1
    is_kept = ordered >= ordered.gather(1, last_place[:, None])
    is_likely = weights >= min_ps.double()[:, None]
    weights = weights.masked_fill(~is_kept, 0)
    first_of_equals = torch.searchsorted(-ordered, -ordered)
    mass_before = torch.nn.functional.pad(weights.cumsum(1), (1, 0)).gather(1, first_of_equals)
    is_nucleus = mass_before < (top_ps.double()[:, None] + shift) * weights.sum(1, keepdim=True)
    is_kept &= (is_nucleus | (top_ps[:, None] >= 1)) & is_likely
    is_kept[:, 0] = True
    return torch.where(temperatures > 0, is_kept.sum(1), vocab_size)


@DTYPES
@pytest.mark.parametrize("kind", ["flat", "peaked", "likely few", "tied", "equal", "in steps of one bit"])
def test_the_kernel_keeps_what_a_float64_sort_keeps(kind, dtype):
    """A second run and each row alone give the same bits; a changed order of sums would show here."""
    num_near = 0
    for vocab_size in (8191, 50257, 151936, 262144):
        logits = make_logits(kind, len(SETTINGS), vocab_size, dtype)
        settings = tensors_of(SETTINGS)
        thresholds = triton_filter_thresholds(logits, *settings)
        assert torch.equal(triton_filter_thresholds(logits, *settings), thresholds)
        for row in range(0, len(SETTINGS), 3):
            alone = (tensor[row : row + 1] for tensor in (logits, *settings))
            assert torch.equal(triton_filter_thresholds(*alone), thresholds[row : row + 1])
        num_kept = (logits.float() >= thresholds[:, None]).sum(1)
        exact, fewest, most = (num_kept_by_definition(logits, *settings, shift) for shift in (0, -NEAR, NEAR))
        wrong = (num_kept < fewest) | (num_kept > most)
        assert not wrong.any(), [
            (vocab_size, SETTINGS[row], int(num_kept[row]), int(exact[row])) for row in wrong.nonzero()[:, 0]
        ]
        num_near += int((num_kept != exact).sum())
        twins = (logits.float() >= plain_filter_thresholds(logits, *settings)[:, None]).sum(1)
        assert ((twins >= fewest) & (twins <= most)).all()
    assert num_near <= 3


def test_a_graph_follows_the_settings_and_logits_of_each_replay():
    """The grid is fixed and the kernel does not ask the host, so one graph serves rows with and without filters."""
    logits = torch.empty(len(SETTINGS), 50257, device="cuda", dtype=torch.bfloat16)
    settings = tensors_of(SETTINGS)
    seeds, positions = torch.arange(len(SETTINGS), device="cuda"), torch.full((len(SETTINGS),), 3, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        thresholds = triton_filter_thresholds(logits, *settings)
        return thresholds, triton_sample(logits, settings[0], seeds, positions, thresholds)

    logits.copy_(make_logits("flat", *logits.shape, torch.bfloat16))
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        thresholds, tokens = step()
    for kind, shift in (("flat", 0), ("peaked", 5), ("tied", 11)):
        logits.copy_(make_logits(kind, *logits.shape, torch.bfloat16))
        for tensor, values in zip(settings, tensors_of(SETTINGS[shift:] + SETTINGS[:shift]), strict=True):
            tensor.copy_(values)
        graph.replay()
        eager = step()
        assert torch.equal(thresholds, eager[0]) and torch.equal(tokens, eager[1])


@DTYPES
def test_thresholds_are_masks_and_the_kernel_gives_the_tokens_of_its_twin(dtype):
    """Logarithms round differently on a GPU, so one token in hundreds may differ from the twin's."""
    logits = make_logits("likely few", 256, 151936, dtype)
    temperatures, *filters = tensors_of([(0.0, 20, 0.9, 0), *[(0.7, 20, 0.95, 0.01), (1.1, 0, 0.9, 0)] * 128][:256])
    seeds, positions = torch.arange(256, device="cuda") * 2**33, torch.arange(256, device="cuda")
    thresholds = triton_filter_thresholds(logits, temperatures, *filters)
    tokens = triton_sample(logits, temperatures, seeds, positions, thresholds)
    masked = logits.masked_fill(logits.float() < thresholds[:, None], -torch.inf)
    assert torch.equal(tokens, triton_sample(masked, temperatures, seeds, positions))
    assert (logits.gather(1, tokens[:, None])[:, 0].float() >= thresholds).all()
    assert (tokens != plain_sample(logits, temperatures, seeds, positions, thresholds)).sum() <= 2


def test_filtered_draws_have_the_probabilities_of_the_kept_set():
    """Chi-square over 60,000 draws from a vocabulary of several parts, in which a few tokens are likely."""
    num_rows = 60_000
    logits = torch.full((9000,), -8.0, device="cuda")
    ids = torch.tensor([0, 17, 4095, 4096, 8999], device="cuda")
    logits[ids] = torch.tensor([1.0, 2.0, 0.5, 1.5, -1.0], device="cuda")
    rows = logits.expand(num_rows, -1)
    settings = (column.expand(num_rows).contiguous() for column in tensors_of([(0.8, 0, 0.9, 0)]))
    temperatures, *filters = settings
    thresholds = triton_filter_thresholds(rows, temperatures, *filters)
    seeds = torch.arange(num_rows, device="cuda")
    tokens = triton_sample(rows, temperatures, seeds, torch.zeros_like(seeds), thresholds)
    kept = logits >= thresholds[0]
    assert (thresholds == thresholds[0]).all() and int(kept.sum()) == 4
    probs = (logits.double() / 0.8).masked_fill(~kept, -torch.inf).softmax(0).cpu().numpy()
    counts = np.bincount(tokens.cpu(), minlength=9000)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * num_rows
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert expected.min() > 5 and statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4


@DTYPES
def test_broken_and_empty_rows_are_flagged(dtype):
    logits = make_logits("flat", 6, 50257, dtype)
    logits[1, 50256], logits[2, 0], logits[3], logits[4] = torch.nan, torch.inf, -torch.inf, torch.nan
    for setting in [(0.7, 20, 0.9, 0.01), (0.7, 0, 0.9, 0), (0.0, 5, 1, 0)]:
        temperatures, *filters = tensors_of([setting] * 6)
        thresholds = triton_filter_thresholds(logits, temperatures, *filters)
        assert thresholds[1:5].tolist() == [-torch.inf] * 4
        seeds = torch.arange(6, device="cuda")
        for given in (thresholds, None):
            tokens = triton_sample(logits, temperatures, seeds, seeds, given)
            assert tokens[1:5].tolist() == [BROKEN_LOGITS, BROKEN_LOGITS, NO_TOKEN_LEFT, BROKEN_LOGITS]
            assert tokens[0] >= 0 and tokens[5] >= 0


def test_no_rows_launch_nothing():
    logits, empty = torch.zeros(0, 300, device="cuda"), [tensor[:0] for tensor in tensors_of(SETTINGS)]
    thresholds = triton_filter_thresholds(logits, *empty)
    seeds = torch.zeros(0, dtype=torch.int64, device="cuda")
    assert triton_sample(logits, empty[0], seeds, seeds, thresholds).shape == (0,)
    torch.cuda.synchronize()
