"""Shared prefixes: which are found, and that attending them once changes nothing."""

import random

import pytest
import torch
from model_factory import save_model
from test_attention import Case, make_case, relative_error, run

from nanovllm import LLM, SamplingParams
from nanovllm.attention.metadata import SharedPrefixes
from nanovllm.attention.prefix_groups import find_prefix_groups


def test_nothing_shared_gives_nothing():
    """A step without groups must take the path without them."""
    assert find_prefix_groups([[0, 1, 2], [3, 4, 5]], [12, 12], 4, [4, 4], 8) is None
    assert find_prefix_groups([], [], 4, [], 8) is None


def test_only_whole_splits_of_written_keys_are_shared():
    """A row still writes to its last block, and a chunked prompt holds blocks that nobody has written yet."""
    tables = [[7, 8, 9, 1], [7, 8, 9, 2]]
    groups = find_prefix_groups(tables, [11, 12], 4, [4, 4], 8)
    assert groups.items.tolist() == [[0, 0, 2], [1, 2, 2]] and groups.members.tolist() == [0, 1, 0, 1]
    assert groups.num_shared.tolist() == [2, 2]
    assert find_prefix_groups(tables, [15, 15], 4, [8, 8], 8).num_shared.tolist() == [1, 1]
    assert find_prefix_groups(tables, [7, 7], 4, [8, 8], 8) is None


def test_prefixes_may_branch_and_groups_may_be_larger_than_a_tile():
    """All share a system prompt, some more of it; one tile holds three rows here."""
    tables = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7], [1, 8, 9], [10, 11, 12]]
    groups = find_prefix_groups(tables, [12] * 6, 4, [4] * 6, 3)
    found = {}
    for split, first, count in groups.items.tolist():
        found.setdefault(split, []).append(groups.members[first : first + count].tolist())
    assert found == {0: [[0, 1, 2], [3, 4]], 1: [[0, 1], [2, 3]]}
    assert groups.num_shared.tolist() == [2, 2, 2, 2, 1, 0]


def test_a_split_is_shared_only_with_all_before_it():
    """A private twin may stand before a shared block. The splits before it were once left out for both rows."""
    assert find_prefix_groups([[0, 1, 2], [3, 1, 4]], [12, 12], 4, [4, 4], 8) is None
    groups = find_prefix_groups([[0, 1, 2], [3, 1, 2], [0, 1, 4]], [12, 12, 12], 4, [4, 4, 4], 8)
    assert groups.items.tolist() == [[0, 0, 2], [1, 2, 2]] and groups.num_shared.tolist() == [2, 0, 2]
    # Nor does its last block alone make a split of two blocks.
    assert find_prefix_groups([[0, 1], [2, 1]], [8, 8], 4, [8, 8], 8) is None


def test_a_split_is_shared_only_by_rows_that_are_split_alike():
    """Longer rows have longer splits, so the same blocks are other splits of theirs."""
    tables = [[1, 2, 3, 4, row] for row in range(5, 9)]
    groups = find_prefix_groups(tables, [17, 17, 18, 18], 4, [4, 4, 8, 8], 8)
    found = sorted((split, groups.members[first : first + n].tolist()) for split, first, n in groups.items.tolist())
    assert found == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3]), (2, [0, 1]), (3, [0, 1])]
    assert groups.num_shared.tolist() == [4, 4, 2, 2]
    assert find_prefix_groups(tables[:2], [17, 18], 4, [4, 8], 8) is None


def share(case: Case, row: int, source: int, num_keys: int) -> None:
    """Makes the first keys of `row` those of `source`, in the same blocks."""
    num_blocks, tables = num_keys // case.metadata.block_size, case.metadata.block_tables
    tables[row, :num_blocks] = tables[source, :num_blocks]
    for tensors in (case.keys, case.values):
        tensors[row][:num_keys] = tensors[source][:num_keys]


@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(2, 2), (1, 5), (1, 8), (1, 80)])
@pytest.mark.parametrize("block_size", [64, 256])
def test_shared_splits_attended_once_change_nothing(num_kv_heads, group_size, block_size):
    """Prefixes of different lengths, rows that share nothing, a group larger than a tile (8 rows with 8 heads)."""
    lengths = [700, 530, 520, 300, 800, 90, 1030, *range(520, 530)]
    case = make_case([(length, 1) for length in lengths], block_size, num_kv_heads, group_size, 32)
    for row, source, num_keys in ((1, 0, 512), (2, 0, 512), (4, 0, 512), (3, 0, 256)):
        share(case, row, source, num_keys)
    for row in range(8, len(lengths)):
        share(case, row, 7, 512)
    backend, metadata = case.backend("triton"), case.metadata
    tables = [metadata.block_tables[row, : length // block_size + 1].tolist() for row, length in enumerate(lengths)]
    groups = backend.shared_prefixes(tables, [length + 1 for length in lengths], block_size)
    assert len(groups.items) <= backend.most_shared_splits >= len(groups.members)
    # In the table they stand in place of older ones, which were more.
    on_device = [groups.items, groups.members, groups.num_shared]
    items, members, num_shared = (torch.cat((torch.from_numpy(x), torch.from_numpy(x))) for x in on_device)
    metadata.shared_prefixes = SharedPrefixes(torch.tensor([len(groups.items)]).int(), items, members, num_shared)
    grouped = run("triton", case, backend)
    assert relative_error(case, grouped) <= 1e-5
    metadata.shared_prefixes = None
    torch.testing.assert_close(run("triton", case, backend), grouped, rtol=1e-5, atol=1e-6)


def test_the_engine_groups_and_its_tokens_stay(tmp_path, monkeypatch):
    """Rows join and leave the groups while two prefixes are decoded, and get longer splits; the plain path gives the
    same tokens."""
    from nanovllm.attention.triton_backend import TritonAttention

    for name in ("_SHORTEST_SPLIT", "_KEYS"):  # the interpreter is slow; rows of more than 64 keys have splits of 32
        monkeypatch.setattr(f"nanovllm.attention.triton_backend.{name}", 16)
    save_model(tmp_path, seed=1, num_hidden_layers=1, max_position_embeddings=512)
    rng = random.Random(3)
    prefixes = [[rng.randrange(50) for _ in range(length)] for length in (60, 130)]
    prompts = [prefixes[row % 2] + [rng.randrange(50) for _ in range(rng.randrange(1, 9))] for row in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=2 + row % 4, ignore_eos=True) for row in range(6)]
    seen = []
    shared_prefixes = TritonAttention.shared_prefixes

    def noted(self, *args):
        seen.append(shared_prefixes(self, *args))
        return seen[-1]

    monkeypatch.setattr(TritonAttention, "shared_prefixes", noted)
    tokens = []
    for prefix_grouping in (True, False):
        options = {"attention_backend": "triton", "device": "cpu", "max_model_len": 160, "max_num_seqs": 4}
        with LLM(str(tmp_path), prefix_grouping=prefix_grouping, kvcache_block_size=16, **options) as llm:
            tokens.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        assert any(groups is not None for groups in seen) == prefix_grouping
        assert not prefix_grouping or max(groups.num_shared.max() for groups in seen if groups is not None) == 4
        seen.clear()
    assert tokens[0] == tokens[1]
    with LLM(str(tmp_path), attention_backend="torch", device="cpu", max_model_len=160) as llm:
        assert tokens[0] == [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
