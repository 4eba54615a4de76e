"""The kernels around a step, in Triton's interpreter: one expands its rows, and one writes its tokens to the table.

Each against its plain twin; test_sequence_table.py compares both with plain loops.
"""

import random

import pytest
import torch
from support.batch_factory import WholeExpansion, expanded

from nanovllm.ops import expand_rows as module
from nanovllm.ops.expand_rows import Table
from nanovllm.ops.kernel import has_kernels
from nanovllm.ops.write_tokens import write_tokens

pytestmark = pytest.mark.skipif(not has_kernels(), reason="needs Triton")


def random_table(num_entries: int, max_model_len: int, block_size: int, seed: int = 0) -> Table:
    """A table in which all numbers differ."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)

    max_blocks = -(-max_model_len // block_size)
    return Table(
        tokens=torch.randint(2**31 - 1, (num_entries, max_model_len), generator=generator).int(),
        block_tables=torch.randint(2**31 - 1, (1 + seed % 3, num_entries, max_blocks), generator=generator).int(),
        settings=numbers(torch.int32, 4, num_entries),
        seeds=numbers(torch.int64, num_entries),
    )


def random_rows(
    rng: random.Random, table: Table, num_decodes: int, num_prompts: int, num_padding: tuple[int, int, int]
) -> tuple[torch.Tensor, int, int, int]:
    """Rows of decodes, then of chunks, and padding of (rows, tokens, sampled rows): the rows, and the three sizes."""
    num_entries, max_model_len = table.tokens.shape
    num_real, (more_rows, more_tokens, more_sampled) = num_decodes + num_prompts, num_padding
    num_new = [1] * num_decodes + [rng.choice((1, 2, rng.randint(1, max_model_len))) for _ in range(num_prompts)]
    keys = [n + rng.choice((0, max_model_len - n, rng.randint(0, max_model_len - n))) for n in num_new]
    entries = rng.sample(range(num_entries - 1), num_real)
    sampled = [row for row in range(num_real) if row < num_decodes or rng.random() < 0.5]
    num_rows, num_sampled = num_real + more_rows, len(sampled) + more_sampled
    rows = torch.full((max(num_rows + 1, num_sampled) + 3, 4), -(2**30), dtype=torch.int32)  # no kernel reads the rest
    rows[: num_rows + 1] = torch.tensor([num_entries - 1, 0, sum(num_new), 0], dtype=torch.int32)
    for row in range(num_real):
        rows[row, :3] = torch.tensor([entries[row], keys[row], sum(num_new[:row])])
    rows[:num_sampled, 3] = torch.tensor(sampled + [num_rows] * more_sampled)
    return rows, num_rows, sum(num_new) + more_tokens, num_sampled


def assert_same(ours: WholeExpansion, expected: WholeExpansion) -> None:
    for name, actual, twin in zip(WholeExpansion._fields, ours, expected, strict=True):
        assert actual.dtype == twin.dtype and torch.equal(actual, twin), name


@pytest.mark.grid(1)
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("num_padding", [(0, 0, 0), (1, 1, 1), (3, 0, 2), (0, 40, 0), (9, 200, 150)], ids=str)
def test_the_kernel_expands_rows_as_its_twin_does(block_size, num_padding, count):
    """Decodes alone, prompts alone and both, padded or not; sizes beyond what one program expands."""
    rng = random.Random(f"{block_size} {num_padding}")
    for trial, (num_decodes, num_prompts) in enumerate(
        [(1, 0), (0, 1), (7, 0), (0, 4), (5, 3), (150, 4)] * count(1, 1)
    ):
        max_model_len = rng.choice((5, 33, 200))
        table = random_table(num_decodes + num_prompts + 3, max_model_len, block_size, trial)
        case = random_rows(rng, table, num_decodes, num_prompts, num_padding)
        before = [tensor.clone() for tensor in (case[0], *table)]
        rows, *sizes = case
        expected = expanded(rows, table, *sizes, block_size)
        assert_same(expanded(rows, table, *sizes, block_size, use_kernels=True), expected)
        assert all(map(torch.equal, (rows, *table), before)), "what is read is not changed"
        # The meaning of padding, for all contents of the entries.
        num_tokens = int(expected.cu_seqlens_q[-1])
        slots = expected.slot_mapping
        assert (slots[:, num_tokens:] == -1).all() and (slots[:, :num_tokens] >= 0).all()
        assert not expected.token_ids[num_tokens:].any() and not expected.positions[num_tokens:].any()
        more_rows, _, more_sampled = num_padding
        last = len(expected.context_lens) - more_rows
        assert not expected.context_lens[last:].any() and (expected.context_lens[:last] > 0).all()
        is_padding = torch.arange(sizes[2]) >= sizes[2] - more_sampled
        assert ((expected.entries == table.tokens.shape[0] - 1) == is_padding).all()
        assert ((expected.lengths == 0) == is_padding).all()


def test_the_kernel_expands_rows_that_are_all_padding():
    """While a step is tried before its capture, rows have no keys, no tokens, and the entry that no sequence gets."""
    table = random_table(6, 40, 4)
    rows = torch.tensor([[5, 0, 0, 0]], dtype=torch.int32).repeat(20, 1)
    for sizes in ((4, 4, 4), (5, 150, 3), (1, 1, 1), (3, 7, 0)):
        ours = expanded(rows, table, *sizes, 4, use_kernels=True)
        assert_same(ours, expanded(rows, table, *sizes, 4))
        assert (ours.slot_mapping == -1).all() and not ours.token_indices.any() and (ours.entries == 5).all()


def test_the_outputs_of_two_steps_do_not_share_memory():
    """A step that was launched reads its inputs while the next one is expanded."""
    table = random_table(6, 40, 4)
    rows, *sizes = random_rows(random.Random(0), table, 2, 1, (1, 5, 1))
    first = expanded(rows, table, *sizes, 4, use_kernels=True)
    copies = [tensor.clone() for tensor in first]
    others, *_ = random_rows(random.Random(1), table, 2, 1, (1, 5, 1))
    expanded(others, table, *sizes, 4, use_kernels=True)
    assert all(map(torch.equal, first, copies))


def test_slots_and_places_beyond_32_bits_do_not_wrap():
    """Blocks × block size, and entries × max_model_len, are more than 2³¹ in a large cache and a large table."""
    table = random_table(3, 8, 64)
    table.block_tables[:] = 2**31 - 1
    rows = torch.tensor([[1, 6, 0, 0], [0, 3, 2, 1], [2, 0, 5, 0]], dtype=torch.int32)
    ours = expanded(rows, table, 2, 5, 2, 64, use_kernels=True)
    assert_same(ours, expanded(rows, table, 2, 5, 2, 64))
    assert ours.slot_mapping[0].tolist() == [(2**31 - 1) * 64 + position for position in (4, 5, 0, 1, 2)]


def test_tokens_and_sampled_rows_fill_more_than_one_program():
    """The twin has no programs; a step of few rows and many tokens needs more of them than rows."""
    assert module._WIDTH == 128
    table = random_table(4, 400, 16)
    rows = torch.tensor([[2, 400, 0, 0], [0, 390, 390, 1], [3, 0, 520, 0]], dtype=torch.int32)
    assert_same(expanded(rows, table, 2, 520, 2, 16, use_kernels=True), expanded(rows, table, 2, 520, 2, 16))


@pytest.mark.grid(1)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 128, 129, 300])
@pytest.mark.parametrize("num_padding", [0, 1, 3])
def test_the_kernel_writes_tokens_where_its_twin_does(num_rows, num_padding):
    """Rows without a token leave a 0, which the next step may read; padding writes only to the entry that no sequence
    gets.
    """
    rng = random.Random(num_rows)
    ours = torch.full((num_rows + 2, 30), 9, dtype=torch.int32)
    expected = ours.clone()
    entries = [*rng.sample(range(num_rows + 1), num_rows), *[num_rows + 1] * num_padding]
    lengths = [*(rng.randrange(1, 30) for _ in range(num_rows)), *[0] * num_padding]
    sampled = [rng.choice((-2, -1, 0, 2**31 - 1, rng.randrange(1000))) for _ in lengths]
    # Padding rows may sample any token, and all of them write to one place.
    sampled[num_rows:] = [-1] * num_padding
    tensors = [torch.tensor(values, dtype=torch.int64) for values in (entries, lengths, sampled)]
    write_tokens(ours, *tensors, use_kernels=True)
    write_tokens(expected, *tensors)
    assert torch.equal(ours, expected)
    for row in range(num_rows):
        assert ours[entries[row], lengths[row]] == max(sampled[row], 0)
    assert int((ours != 9).sum()) <= num_rows + min(num_padding, 1)
