"""The table of penalties, biases and bans: which tenant's rules an entry holds as tenants come and go."""

import random

import numpy as np
import pytest
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.ops.process_logits import ALWAYS, process_logits
from nanovllm.runner.token_rules import TokenRulesTable
from nanovllm.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE, NUM_ENTRIES = 70, 6
PLAIN = SamplingParams()


def sequence(seq_id: int = 0, num_prompt_tokens: int = 3, **options) -> Sequence:
    prompt = [(seq_id + position) % VOCAB_SIZE for position in range(num_prompt_tokens)]
    params = SamplingParams(**options)
    return Sequence(seq_id, prompt, params, 100, frozenset(params.stop_token_ids))


def admit(table: TokenRulesTable, tenants: dict[int, Sequence]) -> list[int]:
    """Admits sequences to entries. Returns the lengths until which their rules matter."""
    return table.admit(list(tenants.values()), np.array(list(tenants))).tolist()


def processed(table: TokenRulesTable, tenants: dict[int, Sequence]) -> dict[int, torch.Tensor]:
    """Random logits after the rules that each entry holds, as a step of all of them computes them."""
    logits = torch.randn(len(tenants), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    tokens = torch.zeros(NUM_ENTRIES, 100, dtype=torch.int32)
    for entry, seq in tenants.items():
        tokens[entry, : len(seq.token_ids)] = torch.tensor(seq.token_ids)
    lengths = torch.tensor([len(seq.token_ids) for seq in tenants.values()])
    rows = process_logits(logits, torch.tensor(list(tenants)), lengths, tokens, table.tensors)
    return dict(zip(tenants, rows, strict=True))


def alone(entry: int, seq: Sequence, row: int, num_rows: int) -> torch.Tensor:
    """The same by a table that has never seen another sequence; `row` is its row of the random logits."""
    table = TokenRulesTable(NUM_ENTRIES, VOCAB_SIZE, CPU)
    admit(table, {entry: seq})
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[row : row + 1]
    tokens = torch.zeros(NUM_ENTRIES, 100, dtype=torch.int32)
    tokens[entry, : len(seq.token_ids)] = torch.tensor(seq.token_ids)
    return process_logits(logits, torch.tensor([entry]), torch.tensor([len(seq.token_ids)]), tokens, table.tensors)[0]


def assert_everybody_has_their_own(table: TokenRulesTable, tenants: dict[int, Sequence]) -> None:
    for row, (entry, found) in enumerate(processed(table, tenants).items()):
        assert torch.equal(found, alone(entry, tenants[entry], row, len(tenants))), (entry, tenants[entry])


RULED = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.5, "frequency_penalty": -1.0},
    {"logit_bias": {token_id: 1.0 + token_id for token_id in range(5)}},
    {"bad_words": [[4], [5, 6], [1, 2, 3, 4]]},
    {"allowed_token_ids": [1, 31, 32, 69]},
    {"min_tokens": 4, "stop_token_ids": [2, 3]},
]


@pytest.mark.parametrize("options", RULED, ids=str)
def test_an_entry_whose_tenant_had_rules_loses_them(options):
    """The next tenant has none, and a neighbour that has some keeps the whole step processed."""
    table = TokenRulesTable(NUM_ENTRIES, VOCAB_SIZE, CPU)
    ruled = sequence(1, **options)
    neighbour = sequence(2, logit_bias={9: 5.0})
    admit(table, {3: ruled, 1: neighbour})
    assert_everybody_has_their_own(table, {3: ruled, 1: neighbour})
    plain = sequence(4)
    assert admit(table, {3: plain}) == [0]
    assert_everybody_has_their_own(table, {3: plain, 1: neighbour})
    found = processed(table, {3: plain})[3]
    assert torch.equal(found, torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[0])


@pytest.mark.parametrize("first", RULED, ids=str)
@pytest.mark.parametrize("second", RULED, ids=str)
def test_the_rules_of_an_entrys_next_tenant_replace_its_last_ones(first, second):
    """If there are fewer edits than before, none of the old ones stay."""
    table = TokenRulesTable(NUM_ENTRIES, VOCAB_SIZE, CPU)
    admit(table, {0: sequence(1, **first)})
    seq = sequence(2, 5, **second)
    admit(table, {0: seq})
    assert_everybody_has_their_own(table, {0: seq})


@pytest.mark.parametrize(
    "more",
    [{"logit_bias": {token_id: -2.0 for token_id in range(40)}}, {"bad_words": [[*range(30)], [5, *range(9)]]}],
    ids=["edits", "prefixes"],
)
def test_the_tensors_widen_and_neighbours_keep_their_rules(more):
    """A captured step is valid for the tensors of its capture, so new tensors have a new version."""
    table = TokenRulesTable(NUM_ENTRIES, VOCAB_SIZE, CPU)
    tenants = {entry: sequence(entry, **RULED[entry]) for entry in range(5)}
    admit(table, tenants)
    version, tensors = table.version, table.tensors
    assert version > 0, "0 is a step without rules"
    tenants[4] = sequence(9, num_prompt_tokens=20, **more)
    admit(table, {4: tenants[4]})
    assert table.version == version + 1 and table.tensors is not tensors
    assert_everybody_has_their_own(table, tenants)
    # They never become narrower, and are replaced only if needed.
    tensors = table.tensors
    for entry in (4, 2):
        tenants[entry] = sequence(10, **RULED[3])
        admit(table, {entry: tenants[entry]})
    assert table.version == version + 1 and table.tensors is tensors
    assert_everybody_has_their_own(table, tenants)


def test_the_padding_entry_stays_without_rules():
    """Padding rows of a step with rules are processed like the others."""
    table = TokenRulesTable(NUM_ENTRIES, VOCAB_SIZE, CPU)
    for turn in range(3):
        admit(table, {entry: sequence(entry, **RULED[(entry + turn) % 6]) for entry in range(NUM_ENTRIES - 1)})
        admit(table, {0: sequence(20, logit_bias={token_id: 1.0 for token_id in range(8 << turn)})})
        padding = Sequence(0, [], PLAIN, 1)
        assert_everybody_has_their_own(table, {NUM_ENTRIES - 1: padding})


@pytest.mark.parametrize(
    ("options", "num_generated", "until"),
    [
        ({}, 0, 0),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5}, 0, 0),
        ({"min_tokens": 4}, 0, 0),  # of no stop token
        ({"min_tokens": 4, "stop_token_ids": [2]}, 0, 3 + 4),
        ({"min_tokens": 4, "stop_token_ids": [2]}, 2, 3 + 4),  # it comes back from preemption
        ({"stop_token_ids": [2]}, 0, 0),
        ({"min_tokens": 4, "stop_token_ids": [2], "presence_penalty": 0.1}, 0, ALWAYS),
        ({"allowed_token_ids": [0]}, 0, ALWAYS),
        ({"logit_bias": {}, "bad_words": []}, 0, 0),
    ],
    ids=str,
)
def test_a_table_says_how_long_rules_matter(options, num_generated, until):
    """A step in which no row's rules matter any more does not run the logits processors."""
    table = TokenRulesTable(NUM_ENTRIES, VOCAB_SIZE, CPU)
    seq = sequence(0, **options)
    seq.token_ids.extend([7] * num_generated)
    assert admit(table, {2: seq}) == [until]


def test_entries_that_change_hands_at_random_always_hold_their_tenants_rules(count):
    rng = random.Random(0)
    for _ in range(count(10, 10)):
        table, tenants = TokenRulesTable(NUM_ENTRIES, VOCAB_SIZE, CPU), {}
        for number in range(12):
            new = {}
            for entry in rng.sample(range(NUM_ENTRIES - 1), rng.randint(1, 3)):
                options = {**rng.choice([{}, {}, *RULED]), **rng.choice([{}, {}, *RULED[:5]])}
                if rng.random() < 0.2:
                    options["logit_bias"] = {token_id: 0.5 for token_id in range(rng.randint(1, 60))}
                new[entry] = sequence(number, rng.randint(1, 9), **options)
                new[entry].token_ids.extend(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 6)))
            admit(table, new)
            tenants |= new
            assert_everybody_has_their_own(table, tenants)


def test_min_tokens_beyond_every_integer_of_the_device_is_for_ever():
    """A value of 2**63 or more once ended the whole call."""
    table = TokenRulesTable(3, 100, torch.device("cpu"))
    params = SamplingParams(min_tokens=2**70, max_tokens=2**70)
    until = table.admit([Sequence(0, [1, 2], params, 9, frozenset([5]))], np.arange(1))
    assert until.tolist() == [2 + 2**31 - 1]
