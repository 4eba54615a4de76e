"""How requests are sampled: from their SamplingParams to tokens, as a step does it, and through the whole engine.

test_process_logits.py, test_filters.py and test_sample.py test each function that a step calls.
"""

import math

import numpy as np
import pytest
import torch
from support.batch_factory import send
from support.model_factory import save_model

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import BROKEN_LOGITS, NO_TOKEN_LEFT, Chunk, Step
from nanovllm.layers.embed_head import VocabSlice
from nanovllm.layers.sampler import SampledRows, Sampler, SamplingNeeds
from nanovllm.ops.collectives import Parallel
from nanovllm.runner.sequence_table import SentStep, SequenceTable
from nanovllm.runner.step_sizes import StepSize

CPU = torch.device("cpu")


def table_of(
    vocab_size: int, params: list[SamplingParams], seeds, prompts: list[list[int]], stop_token_ids=frozenset()
) -> tuple[SequenceTable, SampledRows, SamplingNeeds]:
    """A step that samples the first token after each of `prompts`: the table, its sampled rows, and their needs."""
    chunks = []
    for row, prompt in enumerate(prompts):
        seq = Sequence(row, prompt, params[row], len(prompt) + 9, stop_token_ids, seeds[row])
        # Entries are not in the order of the rows.
        seq.block_table, seq.entry, seq.num_computed_tokens = [0], len(prompts) - 1 - row, len(prompt)
        seq.num_tokens += 1
        chunks.append(Chunk(seq, 1, True))
    num_rows, longest = len(chunks), max(map(len, prompts)) + 1
    step, size = Step.of(chunks), StepSize(num_rows, num_rows, num_rows, 0, num_rows, 1, False)
    table = SequenceTable(num_rows, longest, longest, vocab_size, num_rows, CPU)
    needs = send(table, step, size)
    table.batch(SentStep(size))
    return table, table.sampled(num_rows)[1], needs


def sample_rows(logits: torch.Tensor, params, seeds=None, prompts=None, stop_token_ids=frozenset()) -> list[int]:
    """The tokens of `logits`: [num_rows, vocab_size], as a ModelRunner samples them."""
    num_rows, vocab_size = logits.shape
    params = [params] * num_rows if isinstance(params, SamplingParams) else params
    seeds = list(range(num_rows)) if seeds is None else seeds
    prompts = [[0] * 5] * num_rows if prompts is None else prompts
    table, rows, needs = table_of(vocab_size, params, seeds, prompts, stop_token_ids)
    return sampled(table, logits.clone(), rows, needs).tolist()


def sampled(table: SequenceTable, logits: torch.Tensor, rows: SampledRows, needs: SamplingNeeds) -> torch.Tensor:
    """The tokens that a ModelRunner on a CPU samples."""
    parallel = Parallel()
    sampler = Sampler(VocabSlice.of(logits.shape[1], parallel), parallel)
    return sampler.sample(logits, rows, needs, table.tokens, table.rules.tensors).tokens


def exact_probabilities(logits: list[float], params: SamplingParams) -> np.ndarray:
    """The definition by the documentation of SamplingParams and of ops/filters.py, in float64. Tokens that are as
    probable as the last one kept are kept too.
    """
    weights = np.exp((np.array(logits) - max(logits)) / params.temperature)
    if 0 < params.top_k < len(weights):
        weights[weights < np.sort(weights)[-params.top_k]] = 0
    if params.top_p < 1:
        mass_before = np.array([weights[weights > weight].sum() for weight in weights])
        weights[mass_before >= params.top_p * weights.sum()] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


def assert_distributed(tokens: list[int], probs: np.ndarray) -> None:
    """Chi-square; nothing outside the support. The seeds are fixed, so it passes always or never."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs) and counts[probs == 0].sum() == 0, "a token that the filters remove"
    expected = probs[probs > 0] * len(tokens)
    assert expected.min() > 5, "too few samples for a chi-square test"
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4, (statistic, freedom)


# From settings to tokens

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
# Each changes the result for a prompt of zeros, and some need the tokens before.
RULES = [
    {"repetition_penalty": 1.7},
    {"logit_bias": {1: 2.0, 3: -100.0}},
    {"bad_words": [[0], [0, 4]]},
    {"allowed_token_ids": [0, 2, 4]},
]


def describe(params) -> str | None:
    if not isinstance(params, SamplingParams):
        return None
    return f"t={params.temperature},k={params.top_k},p={params.top_p},min_p={params.min_p}"


@pytest.mark.parametrize("params", SETTINGS, ids=describe)
def test_tokens_have_exactly_the_probabilities_asked_for(params):
    """This holds over many requests, and over many positions of one. The settings reach the sampler as given."""
    table, one, needs = table_of(len(LOGITS), [params], [0], [[0]])
    num_rows = 20000
    count, fixed = torch.arange(num_rows), torch.full((num_rows,), 12345)
    for numbers in ({"seeds": count, "lengths": fixed}, {"seeds": fixed, "lengths": count}):
        rows = SampledRows(*(value.expand(num_rows) for value in one))._replace(**numbers)
        logits = torch.tensor(LOGITS).repeat(num_rows, 1)
        assert_distributed(sampled(table, logits, rows, needs).tolist(), exact_probabilities(LOGITS, params))


def test_a_filter_larger_than_the_vocabulary_is_off():
    """A top_k beyond the vocabulary, even beyond 64 bits, with other filters on or off."""
    logits = torch.tensor(LOGITS).repeat(50, 1)
    for top_k in (len(LOGITS), 10**6, 2**63, 2**70):
        for others in ({}, {"top_p": 0.8}):
            with_k = sample_rows(logits, SamplingParams(top_k=top_k, **others))
            assert with_k == sample_rows(logits, SamplingParams(**others))


@pytest.mark.parametrize("temperature", [5e-324, 5e-45, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_greedy(temperature, filters):
    """Logits over 1e-30 overflow to infinity, and infinity − infinity is no token; 5e-45 in float32 is 0."""
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * 100
    tokens = sample_rows(logits, SamplingParams(temperature=temperature, **filters))
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e30, 3e38, 1e39, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature):
    """A temperature that is infinite in float32 turns a banned token's logit into −inf / inf, which is NaN; argmax
    prefers it.
    """
    logits = torch.tensor(LOGITS).repeat(2000, 1)
    uniform = np.full(len(LOGITS), 1 / len(LOGITS))
    assert_distributed(sample_rows(logits, SamplingParams(temperature=temperature)), uniform)
    without = np.array([0.0 if token_id in (3, 7) else 1 / 9 for token_id in range(11)])
    for params, stop_token_ids in (
        (SamplingParams(temperature=temperature, min_tokens=1), frozenset((3, 7))),
        (SamplingParams(temperature=temperature, bad_words=[[3], [7]]), frozenset()),
        (SamplingParams(temperature=temperature, bad_words=[[3], [7]], top_k=9), frozenset()),
    ):
        assert_distributed(sample_rows(logits, params, stop_token_ids=stop_token_ids), without)


# Rows


def mixed_rows(vocab_size: int = 40, num_rows: int = 34):
    """Logits, params, seeds and prompts of rows that differ in everything."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=1e-30), *SETTINGS]
    kinds += [SamplingParams(temperature=t, top_k=k, **rules) for rules in RULES for t, k in ((0, 0), (0.9, 3))]
    if vocab_size < 5:  # the rules name ids up to 4
        kinds = kinds[:-8]
    params = [kinds[row % len(kinds)] for row in range(num_rows)]
    seeds = [(row * 0x9E3779B97F4A7C15) % 2**64 for row in range(num_rows)]
    return logits, params, seeds, [[0] * (1 + row * 17 % 11) for row in range(num_rows)]


def pick(rows: list[int], logits, *lists):
    return [logits[rows], *([values[row] for row in rows] for values in lists)]


@pytest.mark.parametrize("vocab_size", [1, 5, 40, 1001])
def test_a_rows_token_does_not_depend_on_its_neighbours(vocab_size):
    """Greedy, sampled, filtered and ruled rows, each alone, reversed, and in batches of every kind."""
    case = mixed_rows(vocab_size)
    together = sample_rows(*case)
    num_rows = len(together)
    for row in range(num_rows):
        assert sample_rows(*pick([row], *case)) == [together[row]], row
    for rows in (list(range(num_rows))[::-1], list(range(0, num_rows, 2)), [5] * 7, [2, 20, 2, 20], list(range(9))):
        assert sample_rows(*pick(rows, *case)) == [together[row] for row in rows]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("whole_row", [True, False])
def test_a_row_of_broken_logits_says_so_and_its_neighbours_stay(poison, whole_row):
    """One row of NaN must not turn into token 0, nor reach the others; not even where bans hide it."""
    case = mixed_rows()
    expected = sample_rows(*case)
    for row in range(len(expected)):
        logits = case[0].clone()
        logits[row, slice(None) if whole_row else 11] = poison
        assert sample_rows(logits, *case[1:]) == [*expected[:row], BROKEN_LOGITS, *expected[row + 1 :]]
    everything = torch.full_like(case[0], poison)
    assert sample_rows(everything, *case[1:]) == [BROKEN_LOGITS] * len(expected)


def test_a_row_with_nothing_left_says_so_and_its_neighbours_stay():
    """All logits are −inf, so argmax would say token 0. The bans may cause this, or the model."""
    logits = torch.zeros(4, 6)
    logits[1] = -math.inf
    bans = {"allowed_token_ids": [2, 3], "bad_words": [[2], [3]]}
    for given in ({"temperature": 0}, {}, {"top_p": 0.5}, {"min_p": 0.5, "top_k": 2}):
        params = [SamplingParams(**given)] * 3 + [SamplingParams(**given, **bans)]
        tokens = sample_rows(logits, params)
        assert tokens[1] == tokens[3] == NO_TOKEN_LEFT and min(tokens[0], tokens[2]) >= 0
        assert sample_rows(logits[:3], params[:3])[::2] == tokens[:3:2]


def test_banned_tokens_are_never_sampled_and_only_where_banned():
    """min_tokens bans stop tokens before the choice; if they were removed afterwards, a token would be lost."""
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]]).repeat(6, 1)
    stop = frozenset((1, 2))
    banned = SamplingParams(temperature=0, min_tokens=1)
    free = SamplingParams(temperature=0)
    sampled = SamplingParams(temperature=1.0, min_tokens=1)
    filtered = SamplingParams(temperature=1.0, min_tokens=1, top_k=1)
    tokens = sample_rows(logits, [banned, free, sampled, filtered, free, banned], stop_token_ids=stop)
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


def test_filters_see_what_the_rules_leave():
    """Top-k of banned tokens would keep nothing, or less than k."""
    logits = torch.arange(10.0).repeat(200, 1) / 10
    params = SamplingParams(top_k=2, bad_words=[[9], [8]], logit_bias={0: 100.0})
    assert set(sample_rows(logits, params)) == {0}
    params = SamplingParams(top_k=2, bad_words=[[9], [8]])
    assert set(sample_rows(logits, params)) == {7, 6}


# Seeds


def test_the_same_seed_gives_the_same_tokens_and_another_seed_gives_others():
    """Also when seeds differ only in their upper 32 bits, on their way to the device."""
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
    """This includes filtered, banned and penalised rows: the next step goes on from the token that was sampled last."""
    greedy = tokens_of(model_dir, [(PROMPTS, SamplingParams(temperature=0, max_tokens=9))])[0]
    settings = [
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 0, "stop_token_ids": sorted({token_id for row in greedy for token_id in row})},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.2, "stop_token_ids": [1, 2, 3]},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 1.5, "repetition_penalty": 0.7, "logit_bias": {5: 4.0}, "top_k": 9},
        {"temperature": 0, "bad_words": [[token_id] for token_id in greedy[2]]},
        {"temperature": 1.2, "allowed_token_ids": [4, 7, 11, 30, 31, 60]},
    ]
    params = [SamplingParams(max_tokens=9, min_tokens=9, seed=row, **given) for row, given in enumerate(settings)]
    all_prompts = [*PROMPTS, *PROMPTS[:4]]
    completions = tokens_of(model_dir, [(all_prompts, params)], overlap=overlap)[0]
    assert not set(completions[1]) & set(settings[1]["stop_token_ids"]) and not set(completions[7]) & set(greedy[2])
    assert len(set(completions[5])) == 9 > len(set(greedy[0])), "nothing is repeated"
    prompts, one_token = [], []
    for row, completion in enumerate(completions):
        for i in range(9):
            prompts.append(all_prompts[row] + completion[:i])
            one_token.append(SamplingParams(max_tokens=1, min_tokens=1, seed=row, **settings[row]))
    one_by_one = tokens_of(model_dir, [(prompts, one_token)], enable_prefix_caching=False)[0]
    assert [row[0] for row in one_by_one] == [token_id for completion in completions for token_id in completion]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_new_tokens", [1, 4])
def test_a_prompt_that_passes_through_in_a_step_does_not_stop_the_decodes_beside_it(model_dir, overlap, num_new_tokens):
    """The decodes before and after the prompt are the same rows, but they also ran beside it."""
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
    """A row that cannot run uses up its number, so that the rows after it keep their seeds."""
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
        llm.engine.runner.program.model.model.embed_tokens.weight[60] = math.nan
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
