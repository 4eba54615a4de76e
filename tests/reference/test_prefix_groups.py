"""Shared prefixes: which ones are found, and that attending them once changes no result."""

import random

import numpy as np
import pytest
import torch
from support.attention_case import make_case, relative_error, run, share
from support.long import long, some
from support.model_factory import save_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention.metadata import SharedPrefixes
from nanovllm.attention.prefix_groups import PrefixGroups, find_prefix_groups


def groups_of(tables: list[list[int]], lengths: list[int], block_size: int, split_lengths, maximum: int):
    width = max(map(len, tables), default=0)
    padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32).reshape(len(tables), width)
    return find_prefix_groups(padded, np.array(lengths, int), block_size, np.array(split_lengths, int), maximum)


def rows_of_splits(groups: PrefixGroups) -> list[tuple[int, list[int]]]:
    """The split and rows of each item."""
    rows = groups.members.tolist()
    return sorted((split, rows[first : first + count]) for split, first, count in groups.items.tolist())


def test_nothing_shared_gives_nothing():
    """A step without groups must take the path without them."""
    assert groups_of([[0, 1, 2], [3, 4, 5]], [12, 12], 4, [4, 4], 8) is None
    assert groups_of([], [], 4, [], 8) is None


def test_only_whole_splits_of_written_keys_are_shared():
    """A row still writes to its last block, and a chunked prompt holds blocks that no row has written yet."""
    tables = [[7, 8, 9, 1], [7, 8, 9, 2]]
    groups = groups_of(tables, [11, 12], 4, [4, 4], 8)
    assert groups.items.tolist() == [[0, 0, 2], [1, 2, 2]] and groups.members.tolist() == [0, 1, 0, 1]
    assert groups.num_shared.tolist() == [2, 2]
    assert groups_of(tables, [15, 15], 4, [8, 8], 8).num_shared.tolist() == [1, 1]
    assert groups_of(tables, [7, 7], 4, [8, 8], 8) is None


def test_prefixes_may_branch_and_groups_may_be_larger_than_a_tile():
    """All share a system prompt, some more of it; one tile holds three rows here."""
    tables = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7], [1, 8, 9], [10, 11, 12]]
    groups = groups_of(tables, [12] * 6, 4, [4] * 6, 3)
    assert rows_of_splits(groups) == [(0, [0, 1, 2]), (0, [3, 4]), (1, [0, 1]), (1, [2, 3])]
    assert groups.num_shared.tolist() == [2, 2, 2, 2, 1, 0]


def test_a_split_is_shared_only_with_all_before_it():
    """A private twin may come before a shared block. The splits before it were once left out for both rows."""
    assert groups_of([[0, 1, 2], [3, 1, 4]], [12, 12], 4, [4, 4], 8) is None
    groups = groups_of([[0, 1, 2], [3, 1, 2], [0, 1, 4]], [12, 12, 12], 4, [4, 4, 4], 8)
    assert groups.items.tolist() == [[0, 0, 2], [1, 2, 2]] and groups.num_shared.tolist() == [2, 0, 2]
    groups = groups_of([[0, 1], [3, 1], [0, 1], [3, 1]], [8] * 4, 4, [4] * 4, 8)
    assert rows_of_splits(groups) == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
    # Nor does its last block alone make a split of two blocks.
    assert groups_of([[0, 1], [2, 1]], [8, 8], 4, [8, 8], 8) is None


def test_a_split_is_shared_only_by_rows_that_are_split_alike():
    """Longer rows have longer splits, so they divide the same blocks into other splits."""
    tables = [[1, 2, 3, 4, row] for row in range(5, 9)]
    groups = groups_of(tables, [17, 17, 18, 18], 4, [4, 4, 8, 8], 8)
    assert rows_of_splits(groups) == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3]), (2, [0, 1]), (3, [0, 1])]
    assert groups.num_shared.tolist() == [4, 4, 2, 2]
    assert groups_of(tables[:2], [17, 18], 4, [4, 8], 8) is None


@pytest.mark.parametrize("seed", range(40))
def test_the_groups_are_those_that_a_look_at_all_rows_finds(seed):
    """The blocks after a row's keys may be any. There are few different blocks, so many rows begin alike."""
    rng = random.Random(seed)
    num_rows, num_blocks, most = rng.randrange(1, 60), rng.randrange(1, 9), rng.randrange(1, 9)
    tables = [[rng.randrange(rng.choice((1, 2, 50))) for _ in range(num_blocks)] for _ in range(num_rows)]
    lengths = [rng.randrange(1, 4 * num_blocks + 1) for _ in tables]
    split_lengths = [rng.choice((4, 8)) for _ in tables]
    rows_of_prefix: dict[tuple, list[int]] = {}
    for row, (table, length, split_length) in enumerate(zip(tables, lengths, split_lengths, strict=True)):
        for split in range(length // split_length):
            prefix = tuple(table[: (split + 1) * split_length // 4])
            rows_of_prefix.setdefault((split, split_length, prefix), []).append(row)
    shared = [(split, rows) for (split, _, _), rows in rows_of_prefix.items() if len(rows) > 1]
    pieces = [(split, rows[at : at + most]) for split, rows in shared for at in range(0, len(rows), most)]
    groups = groups_of(tables, lengths, 4, split_lengths, most)
    assert (groups is None) == (not shared)
    if groups is not None:
        assert rows_of_splits(groups) == sorted(pieces)
        num_shared = [max((split + 1 for split, rows in shared if row in rows), default=0) for row in range(num_rows)]
        assert groups.num_shared.tolist() == num_shared
        assert (groups.items.dtype, groups.members.dtype, groups.num_shared.dtype) == (np.int32,) * 3


@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "is_fp8"),
    [(2, 2, False), (1, 8, True), long(2, 2, True), long(1, 8, False)]
    + [long(1, group_size, is_fp8) for group_size in (5, 80) for is_fp8 in (False, True)],
)
@pytest.mark.parametrize("block_size", some([64, 256], 64))
def test_shared_splits_attended_once_change_nothing(num_kv_heads, group_size, block_size, is_fp8):
    """Prefixes of different lengths, rows that share nothing, a group larger than a tile (8 rows with 8 heads). With a
    cache in FP8, only the kernel of decodes rounds queries and weights."""
    lengths = [700, 530, 520, 300, 800, 90, 1030, *range(520, 530)]
    case = make_case([(length, 1) for length in lengths], block_size, num_kv_heads, group_size, 32, is_fp8=is_fp8)
    for row, source, num_keys in ((1, 0, 512), (2, 0, 512), (4, 0, 512), (3, 0, 256)):
        share(case, row, source, num_keys)
    for row in range(8, len(lengths)):
        share(case, row, 7, 512)
    backend, metadata = case.backend("triton"), case.metadata
    groups = backend.shared_prefixes(metadata.block_tables.numpy(), np.array(lengths) + 1, block_size)
    assert len(groups.items) <= backend.max_num_shared_splits >= len(groups.members)
    # In the table they replace older ones, of which there were more.
    on_device = [groups.items, groups.members, groups.num_shared]
    items, members, num_shared = (torch.cat((torch.from_numpy(x), torch.from_numpy(x))) for x in on_device)
    metadata.shared_prefixes = SharedPrefixes(torch.tensor([len(groups.items)]).int(), items, members, num_shared)
    grouped = run("triton", case, backend)
    error = relative_error(case, grouped)
    metadata.shared_prefixes = None
    plain = run("triton", case, backend)
    if is_fp8:
        assert error < relative_error(case, plain) < 1.5e-3
    else:
        assert error <= 1e-5
        torch.testing.assert_close(plain, grouped, rtol=1e-5, atol=1e-6)


def test_the_engine_groups_and_its_tokens_stay(tmp_path, monkeypatch):
    """Rows join and leave the groups while two prefixes are decoded, and get longer splits; the plain path gives the
    same tokens."""
    from nanovllm.attention.triton_backend import TritonAttention

    for name in ("splits.SHORTEST_SPLIT", "triton_backend._KEYS"):  # rows of more than 64 keys have splits of 32
        monkeypatch.setattr(f"nanovllm.attention.{name}", 16)
    # One head is cheap in Triton's interpreter.
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_model(tmp_path, seed=1, max_position_embeddings=512, **sizes)
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
