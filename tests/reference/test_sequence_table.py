"""From a step to tensors: worked examples, and every step of random runs against plain loops."""

import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.batch_factory import OneSize, expanded
from support.batch_factory import send as send_step
from support.fake_runner import FakeRunner, make_engine, run_to_end
from support.steps import GREEDY, random_rows, scheduled, step_of

from nanovllm.attention.metadata import QUERY_TILE, query_tiles
from nanovllm.attention.prefix_groups import PrefixGroups
from nanovllm.engine.block_manager import NO_WINDOWS, WindowGroups
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampler import SampledRows, SamplingNeeds
from nanovllm.models.cost import token_kv_bytes
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.process_logits import ALWAYS, TokenRules
from nanovllm.ops.write_tokens import write_tokens
from nanovllm.runner import sequence_table, token_rules
from nanovllm.runner.sequence_table import Batch, SentStep, SequenceTable
from nanovllm.runner.step_sizes import StepSize
from nanovllm.runner.token_rules import TokenRulesTable
from nanovllm.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 1000
# The kernel runs in Triton's interpreter here (see conftest.py).
TWINS = pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])


def decode_on(seq: Sequence, block_size: int, token: int | None = None) -> Sequence:
    """The same sequence one step later; `token` is the one that the host got from the step before."""
    if token is not None:
        seq.token_ids.append(token)
    seq.num_computed_tokens += 1
    if seq.num_computed_tokens > len(seq.block_table) * block_size:
        seq.block_table.append(seq.block_table[-1] + 1)
    return seq


def make_table(max_num_seqs: int = 5, max_model_len: int = 1024, block_size: int = 256, **options) -> SequenceTable:
    options = {"vocab_size": VOCAB_SIZE, "max_num_tokens": 1024, "device": CPU, **options}
    return SequenceTable(max_num_seqs, max_model_len, block_size, **options)


def exact_size(step: Step, num_ranks: int = 1) -> StepSize:
    """The size of an eager step."""
    num_new = [chunk.num_new_tokens for chunk in step.chunks]
    num_sampled = sum(chunk.samples for chunk in step.chunks)
    num_tiles = sum(-(-n // QUERY_TILE) for n in num_new[step.num_decodes :])
    padded = -(-num_sampled // num_ranks) * num_ranks
    return StepSize(len(num_new), sum(num_new), padded, num_tiles, step.num_decodes, max(num_new), False)


def decode_size(num_rows: int, num_sampled: int | None = None) -> StepSize:
    """The size of a captured step of decodes."""
    return StepSize(num_rows, num_rows, num_rows if num_sampled is None else num_sampled, 0, num_rows, 1, False)


def send(table: SequenceTable, step: Step, size: StepSize | None = None) -> SamplingNeeds:
    return send_step(table, step, size or exact_size(step))


@dataclass
class WholeBatch(Batch):
    """A Batch, and the table's data about its rows that sample."""

    sampled_tokens: torch.Tensor
    sampled: SampledRows


def batch_of(table: SequenceTable, step: StepSize | SentStep) -> WholeBatch:
    sent = step if isinstance(step, SentStep) else SentStep(step)
    return WholeBatch(**vars(table.batch(sent)), **dict(zip(
        ("sampled_tokens", "sampled"), table.sampled(sent.size.num_sampled), strict=True,
    )))  # fmt: skip


def build(table: SequenceTable, step: Step, size: StepSize | None = None) -> WholeBatch:
    send(table, step, size)
    return batch_of(table, size or exact_size(step))


def sample(table: SequenceTable, batch: WholeBatch, token_ids: list[int], use_kernels: bool = False) -> None:
    """Writes the step's sampled tokens to the table, as the runner does; padding samples tokens too."""
    padding = [77] * (len(batch.sampled.entries) - len(token_ids))
    write_tokens(
        table.tokens, batch.sampled.entries, batch.sampled.lengths, torch.tensor(token_ids + padding), use_kernels
    )


def tensors_of(batch: WholeBatch) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by name, except shared prefixes."""
    found = {**vars(batch), **vars(batch.groups[0]), **batch.sampled._asdict()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


# Worked examples


@TWINS
def test_prompts_of_three_and_four_tokens_begin_at_0_3_and_7(fused):
    first, second = scheduled([1, 2, 3], [0], entry=4), scheduled([4, 5, 6, 7], [1], entry=2)
    batch = build(make_table(use_kernels=fused), step_of((first, 3, True), (second, 4, True)))
    metadata = batch.groups[0]
    assert metadata.cu_seqlens_q.tolist() == [0, 3, 7] and metadata.max_seqlen_q == 4
    assert metadata.context_lens.tolist() == [3, 4] and metadata.max_seqlen_k >= 4
    assert metadata.num_decodes.tolist() == [0] and metadata.max_num_decodes == 0
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.sampled_tokens.tolist() == [2, 6]
    assert batch.sampled.entries.tolist() == [4, 2] and batch.sampled.lengths.tolist() == [3, 4]


@TWINS
def test_a_hundred_tokens_in_block_5_of_256_go_to_slots_1280_to_1379(fused):
    batch = build(make_table(use_kernels=fused), step_of((scheduled(range(100), [5]), 100, True)))
    assert batch.groups[0].slot_mapping.tolist() == list(range(1280, 1380))


@TWINS
def test_the_block_table_maps_logical_to_physical_blocks(fused):
    batch = build(make_table(use_kernels=fused), step_of((scheduled(range(600), [5, 12, 3]), 600, True)))
    slots = batch.groups[0].slot_mapping.tolist()
    assert slots == [block * 256 + offset for block in (5, 12, 3) for offset in range(256)][:600]
    assert batch.groups[0].block_tables.tolist() == [[5, 12, 3, 0]]


@TWINS
def test_the_attention_of_a_chunk_ends_at_the_chunk(fused):
    """Keys were once counted to the prompt's end, where the cache still held those of another sequence."""
    chunk, prompt = scheduled(range(100, 120), [7, 2, 9], num_computed_tokens=16), scheduled([1, 2], [4], entry=1)
    batch = build(make_table(block_size=8, use_kernels=fused), step_of((chunk, 8, False), (prompt, 2, True)))
    assert batch.groups[0].cu_seqlens_q.tolist() == [0, 8, 10]
    assert batch.groups[0].context_lens.tolist() == [16, 2]
    assert batch.token_ids.tolist() == [*range(108, 116), 1, 2]
    assert batch.positions.tolist() == [*range(8, 16), 0, 1]
    assert batch.groups[0].slot_mapping.tolist() == [*range(16, 24), 32, 33]
    assert batch.sampled_tokens.tolist() == [9], "only what reaches its end samples"


@TWINS
def test_a_step_that_samples_nothing_has_no_sampled_rows(fused):
    """The step has a chunk in the middle of a long prompt, and the last token but one of another, which is a decode."""
    one, chunk = scheduled(range(9), [0], 8, entry=1), scheduled(range(100), [1], 50, entry=0)
    table = make_table(use_kernels=fused)
    batch = build(table, step_of((one, 1, False), (chunk, 40, False)))
    assert all(len(values) == 0 for values in (batch.sampled_tokens, *batch.sampled))
    assert batch.groups[0].num_decodes.tolist() == [1] and batch.token_ids.tolist() == [7, *range(10, 50)]
    before = table.tokens.clone()
    sample(table, batch, [], fused)
    assert torch.equal(table.tokens, before)


@TWINS
def test_a_token_in_flight_is_read_from_where_the_step_before_left_it(fused):
    """The host learns of a token a step late. A row without a token leaves 0, since −1 is no index."""
    table = make_table(block_size=4, use_kernels=fused)
    known, one, two = (scheduled(tokens, [i], entry=i) for i, tokens in enumerate(([1, 2, 3], [4, 5, 6], [9])))
    sample(table, build(table, step_of((one, 3, True), (two, 1, True))), [55, -1], fused)
    batch = build(
        table,
        step_of((decode_on(one, 4), 1, True), (decode_on(two, 4), 1, True), (known, 3, True)),
    )
    assert batch.token_ids.tolist() == [55, 0, 1, 2, 3]
    assert batch.positions.tolist() == [3, 1, 0, 1, 2]
    assert batch.groups[0].slot_mapping.tolist() == [7, 9, 0, 1, 2]


@TWINS
@pytest.mark.parametrize("max_num_blocks", [1, 2, 128, 300])
def test_block_tables_hold_one_block_or_the_most(max_num_blocks, fused):
    """Tables are as wide as the longest sequence may become; a kernel copies them 128 blocks at a time."""
    long = scheduled(range(4 * max_num_blocks), list(range(10, 10 + max_num_blocks)), entry=1)
    table = make_table(
        max_model_len=4 * max_num_blocks, block_size=4, vocab_size=5000, max_num_tokens=2000, use_kernels=fused
    )
    batch = build(table, step_of((scheduled([1], [3]), 1, False), (long, 1, False)))
    assert batch.groups[0].block_tables.tolist() == [[3] + [0] * (max_num_blocks - 1), long.block_table]
    assert batch.groups[0].slot_mapping.tolist() == [12, 4 * (9 + max_num_blocks) + 3]


@TWINS
def test_slots_beyond_32_bits_do_not_wrap(fused):
    block = 2**31 // 256 + 3
    batch = build(make_table(use_kernels=fused), step_of((scheduled([1, 2], [block]), 2, False)))
    assert batch.groups[0].slot_mapping.tolist() == [block * 256, block * 256 + 1]


@TWINS
def test_tensors_have_the_types_that_kernels_expect(fused):
    batch = build(
        make_table(use_kernels=fused), step_of((scheduled([7], [1]), 1, True), (scheduled([1, 2], [0]), 2, True))
    )
    metadata, rows = batch.groups[0], batch.sampled
    types = {
        torch.int32: (
            metadata.cu_seqlens_q, metadata.context_lens, metadata.block_tables, metadata.num_decodes,
            metadata.query_tiles, rows.top_ks,
        ),
        torch.int64: (
            batch.token_ids, batch.positions, metadata.slot_mapping, batch.sampled_tokens, rows.entries, rows.lengths,
            rows.seeds,
        ),
        torch.float32: (rows.temperatures, rows.top_ps, rows.min_ps),
    }  # fmt: skip
    for dtype, tensors in types.items():
        for tensor in tensors:
            # Rows of block tables are padded, so that the table of each group begins at an aligned address.
            assert tensor.dtype == dtype and (tensor.is_contiguous() or tensor is metadata.block_tables)


@TWINS
def test_each_sampled_row_has_its_own_settings(fused):
    params = [
        SamplingParams(temperature=0.5, max_tokens=9),
        GREEDY,
        SamplingParams(temperature=1.5, top_k=7, min_p=0.25),
        SamplingParams(temperature=2.0, top_p=0.5),
    ]
    seqs = [scheduled([1] * (2 + i), [i], params=p, entry=4 - i, seed=2**64 - 1 - i) for i, p in enumerate(params)]
    chunk = scheduled(range(9), [9], num_computed_tokens=4, params=SamplingParams(top_k=3), entry=0)
    table = make_table(block_size=16, use_kernels=fused)
    step = step_of((chunk, 4, False), *((seq, 1, True) for seq in seqs))
    rows = build(table, step).sampled
    assert rows.temperatures.tolist() == [0.5, 0.0, 1.5, 2.0]
    assert [seed % 2**64 for seed in rows.seeds.tolist()] == [2**64 - 1 - i for i in range(4)]
    assert rows.lengths.tolist() == [2, 3, 4, 5], "where the sampled token will stand"
    assert rows.entries.tolist() == [4, 3, 2, 1]
    assert rows.top_ks.tolist() == [0, 0, 7, 0] and rows.top_ps.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert rows.min_ps.tolist() == [0.0, 0.0, 0.25, 0.0]


@TWINS
def test_a_temperature_stays_within_the_normal_range_of_float32(fused):
    """float32 would turn 1e-300 into 0, which is greedy, and 1e300 into infinity, which makes every logit 0 or NaN."""
    seqs = [
        scheduled([1], [i], params=SamplingParams(temperature=temperature), entry=i)
        for i, temperature in enumerate((1e-300, 1e300, 0.0))
    ]
    temperatures = build(make_table(use_kernels=fused), step_of(*((seq, 1, True) for seq in seqs))).sampled.temperatures
    coldest, hottest, greedy = temperatures.tolist()
    assert torch.finfo(torch.float32).tiny <= coldest < 1e-37 and 1e29 < hottest < 1e31 and greedy == 0.0


def test_a_token_of_qwen3_0_6b_takes_112_kib_in_bf16(tmp_path):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 151645,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_config = load_model_config(tmp_path)
    assert token_kv_bytes(model_config, torch.bfloat16.itemsize) == 112 * 1024


# Tiles


def test_tiles_are_every_query_once():
    """Lengths are around a tile's; decodes have no tiles, and chunks begin where the cached keys end."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_new = np.array(
            [1] * rng.integers(4) + rng.choice([1, 2, 63, 64, 65, 128, 200], rng.integers(5)).tolist(), int
        )
        num_decodes = next((i for i, n in enumerate(num_new) if n > 1), len(num_new))
        context_lens = num_new + rng.integers(0, 300, len(num_new))
        expected, token = set(), 0
        for seq, (n, length) in enumerate(zip(num_new.tolist(), context_lens.tolist(), strict=True)):
            if seq >= num_decodes:
                expected |= {(token + i, length - n + i, seq) for i in range(n)}
            token += n
        tiles = query_tiles(num_new, context_lens, num_decodes).tolist()
        found = [(first + i, position + i, seq) for first, n, position, seq in tiles for i in range(n)]
        assert len(found) == len(expected) and set(found) == expected
        assert all(0 < n <= QUERY_TILE for _, n, _, _ in tiles)


def test_tiles_that_see_most_keys_come_first():
    """They take longest; if they began last, the rest of the GPU would be idle."""
    tiles = query_tiles(np.array([200, 10, 70]), np.array([200, 500, 70]), 0)
    num_keys = (tiles[:, 2] + tiles[:, 1]).tolist()
    assert num_keys == sorted(num_keys, reverse=True) and num_keys[0] == 500


# Padding


@TWINS
def test_padding_leaves_no_trace(fused):
    """Rows that pad a step have no queries and no keys, tokens that pad it no slot, and what padding samples goes to
    an entry that no sequence gets. An earlier step had more of everything."""
    table = make_table(block_size=16, use_kernels=fused)
    before = step_of(*((scheduled(range(60), [1, 2, 3, 4], entry=i), 60, True) for i in range(5)))
    build(table, before, StepSize(5, 300, 5, 8, 5, 300, False))
    parts = [(0, 1, 9), (3, 30, 2), (1, 1, 7)]
    step = step_of(*((scheduled(range(new + old), [5, 6, 7], entry=i), new, True) for i, new, old in parts))
    batch = build(table, step, StepSize(5, 64, 5, 4, 5, 64, False))
    metadata = batch.groups[0]
    assert metadata.context_lens.tolist() == [10, 32, 8, 0, 0]
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 31, 32, 32, 32]
    assert metadata.num_decodes.tolist() == [1] and metadata.max_num_decodes == 5
    assert metadata.query_tiles.tolist() == [[1, 30, 2, 1], [31, 1, 7, 2], [0] * 4, [0] * 4]
    assert torch.equal(metadata.sampled_tiles, metadata.query_tiles)
    assert metadata.slot_mapping[32:].tolist() == [-1] * 32
    assert batch.token_ids[32:].tolist() == batch.positions[32:].tolist() == [0] * 32
    assert not metadata.block_tables[3:].any()
    assert batch.sampled.entries.tolist() == [0, 3, 1, 5, 5] and batch.sampled.lengths.tolist() == [10, 32, 8, 0, 0]
    assert batch.sampled_tokens.tolist() == [0, 30, 31, 0, 0]
    assert not batch.sampled.temperatures[3:].any() and not batch.sampled.seeds[3:].any()
    tokens = table.tokens[:5].clone()
    write_tokens(table.tokens, *batch.sampled[:2], torch.tensor([1, 2, 3, 444, 555]), fused)
    for entry, length, token in ((0, 10, 1), (3, 32, 2), (1, 8, 3)):
        tokens[entry, length] = token
    assert torch.equal(table.tokens[:5], tokens)


@TWINS
@pytest.mark.parametrize("num_rows", [3, 4, 5])
def test_decodes_are_padded_to_the_rows_of_a_captured_step(num_rows, fused):
    table = make_table(block_size=4, use_kernels=fused)
    step = step_of(*((scheduled([7] * (5 + i), [2 * i, 2 * i + 1], entry=4 - i), 1, True) for i in range(3)))
    batch = build(table, step, decode_size(num_rows))
    num_padding = num_rows - 3
    assert batch.token_ids.tolist() == [7, 7, 7] + [0] * num_padding
    assert batch.positions.tolist() == [4, 5, 6] + [0] * num_padding
    assert batch.groups[0].cu_seqlens_q.tolist() == [0, 1, 2, 3] + [3] * num_padding
    assert batch.groups[0].context_lens.tolist() == [5, 6, 7] + [0] * num_padding
    assert batch.groups[0].slot_mapping.tolist() == [4, 13, 22] + [-1] * num_padding
    assert batch.groups[0].num_decodes.tolist() == [3] and batch.groups[0].query_tiles is None
    assert batch.sampled.entries.tolist() == [4, 3, 2] + [5] * num_padding
    assert batch.sampled_tokens.tolist() == [0, 1, 2] + [0] * num_padding


@TWINS
@pytest.mark.parametrize(
    ("num_ranks", "max_num_seqs", "num_rows", "num_sampled"),
    [(2, 3, 3, 4), (4, 1, 1, 4), (4, 3, 2, 4), (4, 5, 5, 8), (2, 4, 4, 4)],
)
def test_sampled_rows_are_padded_to_a_multiple_of_the_ranks(num_ranks, max_num_seqs, num_rows, num_sampled, fused):
    """There may then be more sampled rows than rows; the extra ones belong to no sequence."""
    table = make_table(max_num_seqs, block_size=4, sampled_multiple=num_ranks, use_kernels=fused)
    seqs = [scheduled([9] * (1 + i), [i], params=SamplingParams(), seed=i, entry=i) for i in range(num_rows)]
    step = step_of(*((seq, 1, True) for seq in seqs))
    assert exact_size(step, num_ranks).num_sampled == num_sampled
    for size in (exact_size(step, num_ranks), decode_size(num_rows, num_sampled)):
        batch = build(table, step, size)
        num_padding = num_sampled - num_rows
        assert batch.sampled.entries.tolist() == [*range(num_rows)] + [max_num_seqs] * num_padding
        assert batch.sampled.lengths.tolist() == [*range(1, num_rows + 1)] + [0] * num_padding
        assert batch.sampled.temperatures.tolist() == [1.0] * num_rows + [0.0] * num_padding
        assert batch.sampled_tokens.tolist() == [*range(num_rows)] + [0] * num_padding
        sample(table, batch, list(range(50, 50 + num_rows)), fused)
        assert [int(table.tokens[i, 1 + i]) for i in range(num_rows)] == [*range(50, 50 + num_rows)]


def test_a_table_has_room_for_the_largest_step():
    """The largest step has the most sequences, each with its own tile, or the most tokens, with sampled rows for 8
    ranks.
    """
    for max_num_seqs, max_num_tokens in ((1, 1), (9, 9), (9, 700), (700, 9), (3, 64)):
        table = make_table(max_num_seqs, 1024, 16, max_num_tokens=max_num_tokens, sampled_multiple=8)
        num_seqs = min(max_num_seqs, max_num_tokens)
        for length in {1, max_num_tokens // num_seqs}:
            seqs = [scheduled([1] * length, list(range(64)), entry=i) for i in range(num_seqs)]
            step = step_of(*((seq, length, True) for seq in seqs))
            batch = build(table, step, exact_size(step, 8))
            assert batch.sampled.entries[:num_seqs].tolist() == list(range(num_seqs))
            found = 0 if batch.groups[0].query_tiles is None else int(batch.groups[0].query_tiles[:, 1].sum())
            assert found == (0 if step.num_decodes else num_seqs * length)


@TWINS
@pytest.mark.parametrize(
    "size", [None, StepSize(5, 64, 5, 4, 5, 64, False), decode_size(5)], ids=["eager", "padded", "decodes"]
)
def test_parked_rows_leave_no_trace_and_come_back(size, fused):
    """A step is tried before its capture. It must neither write keys or tokens, nor read keys that it would have to
    skip.
    """
    groups = PrefixGroups(np.ones((2, 3), np.int32), np.ones(2, np.int32), np.ones(2, np.int32))
    sharing = SimpleNamespace(
        max_num_shared_splits=8, split_lengths=lambda keys: keys, shared_prefixes=lambda *arguments: groups
    )
    table = make_table(block_size=16, sharing=sharing, use_kernels=fused)
    step = step_of((scheduled(range(10), [3]), 1, True), (scheduled(range(32), [5, 6], entry=2), 30, True))
    size = size or exact_size(step)
    step = step if size.num_tiles else step_of((step.chunks[0].seq, 1, True))
    step.chunks[0].seq.num_cached_tokens = 4
    size = table.send(step, OneSize(size)).size
    assert size.is_grouped
    before = {name: tensor.clone() for name, tensor in tensors_of(batch_of(table, size)).items()}
    with table.parked():
        # The sampling half is tried by itself: the rows of the last forward half must not be sampled.
        after, rows = table.sampled(size.num_sampled)
        assert not after.any() and (rows.entries == 5).all() and not rows.lengths.any()
        batch = batch_of(table, size)
        metadata = batch.groups[0]
        assert (metadata.slot_mapping == -1).all() and (batch.sampled.entries == 5).all()
        unset = [batch.token_ids, batch.positions, batch.sampled_tokens, batch.sampled.lengths, metadata.context_lens]
        unset += [metadata.cu_seqlens_q, metadata.num_decodes, metadata.block_tables]
        assert not any(tensor.any() for tensor in unset)
        assert metadata.query_tiles is None or not (metadata.query_tiles.any() or metadata.sampled_tiles.any())
        # Only real rows have a known place for their partial results.
        assert metadata.shared_prefixes.num_items.tolist() == [0]
        tokens = table.tokens[:5].clone()
        sample(table, batch, [8] * size.num_sampled, fused)
        assert torch.equal(table.tokens[:5], tokens)
    after, rows = table.sampled(size.num_sampled)
    assert torch.equal(after, before["sampled_tokens"]) and torch.equal(rows.entries, before["entries"])
    batch = batch_of(table, size)
    assert before.keys() == tensors_of(batch).keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(batch).items())
    assert batch.groups[0].shared_prefixes.num_items.tolist() == [2]


def test_parked_rows_come_back_after_an_error():
    table = make_table(block_size=16)
    step = step_of((scheduled(range(10), [3]), 1, True))
    send(table, step)
    with suppress(ZeroDivisionError), table.parked():
        raise ZeroDivisionError
    assert batch_of(table, exact_size(step)).token_ids.tolist() == [9]


# The kernels in more than one program


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_sampled", "max_blocks"),
    [(1, 1, 1, 1), (127, 128, 129, 130), (300, 900, 260, 3), (3, 700, 0, 129), (40, 256, 400, 2)],
)
def test_the_kernel_expands_rows_as_its_twin_does(num_rows, num_tokens, num_sampled, max_blocks):
    """A program takes 128 tokens, sampled rows or blocks at a time; a row's tokens are in several programs."""
    rows, table = random_rows(num_rows, num_tokens, num_sampled, max_blocks)
    plain, fused = (
        expanded(rows, table, num_rows, num_tokens, num_sampled, 16, fused)._asdict() for fused in (False, True)
    )
    for name, expected in plain.items():
        assert fused[name].dtype == expected.dtype and torch.equal(fused[name], expected), name


def test_more_sampled_rows_than_rows_and_tokens_are_all_expanded():
    """For many ranks, the number of sampled rows is padded far beyond the step's."""
    rows, table = random_rows(2, 3, 500, 2)
    plain, fused = (expanded(rows, table, 2, 3, 500, 16, fused)._asdict() for fused in (False, True))
    assert all(torch.equal(fused[name], expected) for name, expected in plain.items())


@TWINS
@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 129, 300])
def test_what_a_step_sampled_is_written_behind_each_sequence(num_rows, fused):
    """−1 and −2 stand for no token. A step that follows before the host has seen them reads 0."""
    rng = np.random.default_rng(num_rows)
    tokens = torch.full((num_rows + 1, 50), 7, dtype=torch.int32)
    entries, lengths = torch.from_numpy(rng.permutation(num_rows)), torch.from_numpy(rng.integers(0, 50, num_rows))
    sampled = torch.from_numpy(rng.integers(-2, 100_000, num_rows))
    sampled[::9] = -2
    expected = tokens.clone()
    for entry, length, token in zip(entries.tolist(), lengths.tolist(), sampled.tolist(), strict=True):
        expected[entry, length] = max(token, 0)
    write_tokens(tokens, entries, lengths, sampled, fused)
    assert torch.equal(tokens, expected)


# Data that is already on the device


@pytest.fixture
def uploads(monkeypatch) -> list[list[np.ndarray]]:
    """The data that is sent to the device, one list per upload."""
    found: list[list[np.ndarray]] = []

    def noted(module) -> Callable:
        upload = module.upload

        def upload_and_note(arrays: list[np.ndarray], *args, **options) -> Any:
            found.append(arrays)
            return upload(arrays, *args, **options)

        return upload_and_note

    for module in (sequence_table, token_rules):
        monkeypatch.setattr(module, "upload", noted(module))
    return found


def num_bytes(uploads: list[list[np.ndarray]]) -> int:
    return sum(array.nbytes for arrays in uploads for array in arrays)


def test_a_decode_that_goes_on_sends_only_rows_and_new_blocks(uploads):
    """Tokens and settings stay on the device. The table exists so that steps do not send them again."""
    table = make_table(4, 64, 4)
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={5: 1.0})
    seqs = [scheduled([7] * (5 + i), [10 * i, 10 * i + 1], params=params, entry=i) for i in range(3)]
    lines = (1 + 4) * 16  # the number of decodes, three rows, and the one that ends them
    sent = []
    for step in range(9):
        uploads.clear()
        batch = build(table, step_of(*((decode_on(seq, 4) if step else seq, 1, True) for seq in seqs)))
        sent.append(num_bytes(uploads) - lines)
        slots = [seq.block_table[-1] * 4 + (seq.num_computed_tokens - 1) % 4 for seq in seqs]
        assert batch.groups[0].slot_mapping.tolist() == slots
    # Lengths are 5, 6 and 7 at first. A block is an index and a number.
    assert sent[0] > 1000 and sent[1:] == [0, 12, 12, 12, 0, 12, 12, 12]


def test_a_mixed_step_between_sends_only_what_is_new(uploads):
    """Rows that come, go and come again are known by their entry, at any place of the step."""
    table = make_table(4, 64, 4)
    a, b, c = (scheduled([7] * 6, [10 * i, 10 * i + 1], entry=i) for i in range(3))
    build(table, step_of((a, 1, True), (b, 1, True)))

    def sent(*chunks: tuple[Sequence, int, bool]) -> int:
        uploads.clear()
        step = step_of(*chunks)
        build(table, step)
        return num_bytes(uploads) - 16 * (2 + len(chunks)) - 32 * exact_size(step).num_tiles

    assert sent((a, 1, True), (b, 1, True)) == 0
    assert sent((b, 1, True), (a, 1, True)) == 0, "in another order"
    assert sent((b, 1, True)) == 0, "one alone"
    admission = sent((b, 1, True), (c, 6, True))
    # Places and ids of tokens, places and numbers of blocks, the entry, five settings and a seed.
    assert admission == 6 * (8 + 4) + 2 * (8 + 4) + 8 + 5 * 4 + 8
    assert sent((a, 1, True), (b, 1, True), (c, 1, True)) == 0


def test_a_chunk_sends_its_new_blocks_once(uploads):
    """A chunk of a long prompt takes several blocks at once."""
    table = make_table(4, 64, 4)
    seq = scheduled(range(40), [9, 8], num_computed_tokens=8)
    build(table, step_of((seq, 8, False)))
    seq.block_table += [7, 6, 5, 4, 3]
    seq.num_computed_tokens = 27
    uploads.clear()
    batch = build(table, step_of((seq, 19, False)))
    assert num_bytes(uploads) == 5 * (8 + 4) + 3 * 16 + 2 * 16
    assert batch.groups[0].block_tables[0, :7].tolist() == [9, 8, 7, 6, 5, 4, 3]
    expected = [block * 4 + offset for block in (7, 6, 5, 4, 3) for offset in range(4)][:19]
    assert batch.groups[0].slot_mapping.tolist() == expected


@TWINS
def test_an_entrys_last_tenant_is_forgotten(fused):
    """Two requests use one entry, one after the other: blocks, tokens, seed and settings are the second's."""
    table = make_table(4, 20, 4, use_kernels=fused)
    params = SamplingParams(temperature=2.0, top_k=4, top_p=0.5, min_p=0.25)
    for blocks, token, params in (([4, 2, 1], 3, params), ([3, 0], 8, GREEDY)):  # noqa: B020
        seq = scheduled([token] * (len(blocks) * 4), blocks, entry=2, params=params, seed=token)
        step = step_of((seq, 1, True))
        needs, batch = send(table, step), batch_of(table, exact_size(step))
        rows = batch.sampled
        assert batch.token_ids.tolist() == [token] and rows.seeds.tolist() == [token]
        assert batch.groups[0].block_tables[0, : len(blocks)].tolist() == blocks
        assert batch.groups[0].slot_mapping.tolist() == [blocks[-1] * 4 + 3]
        found = [float(value) for value in (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps)]
        assert found == [params.temperature, params.top_k, params.top_p, params.min_p]
        assert needs.has_filters == (params is not GREEDY)


@TWINS
def test_a_tenant_is_named_by_its_id_and_its_preemptions(fused):
    """A sequence may return at once to the entry it left, with other blocks. Its list of blocks was once the same
    object as before, so the device kept the old blocks, which held another sequence's keys.
    """
    table = make_table(4, 20, 4, use_kernels=fused)
    seq = scheduled([1, 2, 3, 4, 5], [4, 2], seq_id=9)
    build(table, step_of((seq, 5, True)))
    blocks = seq.block_table
    blocks[:] = [2, 3]  # the very object
    seq.token_ids.append(6)
    seq.num_preemptions, seq.num_computed_tokens = 1, 6
    batch = build(table, step_of((seq, 6, True)))
    assert batch.groups[0].block_tables[0, :2].tolist() == [2, 3]
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("where", range(4))
def test_what_was_not_sent_because_of_an_error_is_sent_again(monkeypatch, where):
    """Ctrl-C may come between any two uploads; the next step must not assume that the data arrived."""
    table = make_table(4, 20, 4)
    build(table, step_of((scheduled([9] * 10, [4, 2, 1]), 10, True), (scheduled([9] * 5, [0, 3], entry=1), 5, True)))
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0})
    one, two = scheduled([1, 2, 3, 4, 5], [7, 8], params=params), scheduled([6], [5], entry=1, params=params)
    num_left, upload = where, sequence_table.upload

    def failing(*args, **options) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == -1:
            raise KeyboardInterrupt
        return upload(*args, **options)

    for module in (sequence_table, token_rules):
        monkeypatch.setattr(module, "upload", failing)
    step = step_of((two, 1, True), (one, 5, True))
    with pytest.raises(KeyboardInterrupt):
        send(table, step)
    needs, batch = send(table, step), batch_of(table, exact_size(step))
    assert needs.rules_version and batch.token_ids.tolist() == [6, 1, 2, 3, 4, 5]
    assert batch.groups[0].slot_mapping.tolist() == [20, 28, 29, 30, 31, 32]
    assert batch.sampled.temperatures.tolist() == [0.5, 0.5]
    assert all(rules_in(table.rules.tensors, entry) == rules_of(one) for entry in (0, 1))


def test_an_equal_sequence_in_another_object_is_the_same_tenant(uploads):
    """State is named by values: a rank, for example, may hold the same request in another object."""
    table = make_table(4, 20, 4)
    build(table, step_of((scheduled([1, 2, 3, 4, 5], [4, 2], seq_id=9), 5, True)))
    uploads.clear()
    twin = scheduled([1, 2, 3, 4, 5], [4, 2], seq_id=9)
    build(table, step_of((twin, 1, True)))
    assert num_bytes(uploads) == 3 * 16


@TWINS
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_the_batch_of_a_step_stays_when_the_table_moves_on(num_rows, fused):
    """With one row, a transposed view is already contiguous, so lengths once grew while a step was using them."""
    table = make_table(4, 20, 4, use_kernels=fused)
    seq = scheduled([7] * 5, [3, 4], entry=1, seed=9, params=SamplingParams(temperature=0.25))
    batch = build(table, step_of((seq, 1, True)), decode_size(num_rows))
    # The next step puts its own tensors in the same place, in the order of the device's work.
    moving = {"num_decodes", "sampled_tokens", *SampledRows._fields}
    tensors = {name: tensor for name, tensor in tensors_of(batch).items() if name not in moving}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    assert [before[name][0].item() for name in ("positions", "context_lens")] == [4, 5]
    sample(table, batch, [11], fused)
    build(table, step_of((decode_on(seq, 4), 1, True)), decode_size(num_rows))
    other = scheduled([8] * 9, [1, 2, 0], entry=1, seed=4)
    build(table, step_of((other, 1, True)), decode_size(num_rows))
    for place in (table._lines, table._tiles, *table._table):
        place.fill_(77)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


# Penalties, biases and bans


def rules_of(seq: Sequence) -> tuple:
    """(penalties, allowed ids, edits) of a sequence's parameters, edits as (id, value, until, prefix)."""
    params = seq.sampling_params
    edits = [(token_id, value, ALWAYS, ()) for token_id, value in params.logit_bias.items()]
    edits += [(word[-1], -np.inf, ALWAYS, tuple(word[:-1])) for word in params.bad_words]
    if params.min_tokens:
        edits += [(token_id, -np.inf, params.min_tokens, ()) for token_id in seq.stop_token_ids]
    penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
    allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
    return np.array(penalties, np.float32).tolist(), allowed, sorted(edits)


def rules_in(tensors: TokenRules, entry: int) -> tuple:
    """The same, as it is on the device."""
    bits = np.unpackbits(tensors.allowed[entry].numpy().view(np.uint8), bitorder="little")
    allowed = None if bits.all() else set(np.flatnonzero(bits).tolist())
    edits = []
    for token_id, value, until, (start, length) in zip(
        tensors.edit_ids[entry].tolist(), tensors.edit_values[entry].tolist(), tensors.edit_until[entry].tolist(),
        tensors.edit_prefix[entry].tolist(), strict=True,
    ):  # fmt: skip
        if token_id >= 0:
            edits.append((token_id, value, until, tuple(tensors.prefix_tokens[entry, start : start + length].tolist())))
    return tensors.penalties[entry].tolist(), allowed, sorted(edits)


NEUTRAL = rules_of(scheduled([1], [0]))


def is_ruled(seq: Sequence) -> bool:
    """Whether the sequence's rules may change the token that its last computed one leads to."""
    penalties, allowed, edits = rules_of(seq)
    if penalties != NEUTRAL[0] or allowed is not None or any(until == ALWAYS for _, _, until, _ in edits):
        return True
    return bool(edits) and seq.num_computed_tokens - seq.num_prompt_tokens < seq.sampling_params.min_tokens


def needs_of(table: SequenceTable, *chunks: tuple[Sequence, int, bool]) -> SamplingNeeds:
    return send(table, step_of(*chunks))


def test_a_step_without_filters_and_rules_needs_neither():
    """Each takes one or several passes over the logits: a part that no row asks for costs nothing."""
    table = make_table()
    plain = SamplingParams(top_k=VOCAB_SIZE, min_tokens=3)
    filtered_but_greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5)
    seqs = [scheduled([1 + i], [i], params=p, entry=i) for i, p in enumerate((plain, filtered_but_greedy, GREEDY))]
    assert needs_of(table, *((seq, 1, True) for seq in seqs)) == SamplingNeeds(False, 0)
    assert all(rules_in(table.rules.tensors, entry) == NEUTRAL for entry in range(6))


@pytest.mark.parametrize("options", [{"top_k": VOCAB_SIZE - 1}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
def test_a_step_needs_filters_if_a_row_that_samples_has_one(options):
    table = make_table()
    seq, other = scheduled([1, 2], [0], params=SamplingParams(**options), entry=2), scheduled([5], [1], entry=1)
    assert needs_of(table, (other, 1, True), (seq, 1, False)) == SamplingNeeds(False, 0)
    assert needs_of(table, (other, 1, True), (seq, 1, True)) == SamplingNeeds(True, 0)
    assert needs_of(table, (other, 1, True)) == SamplingNeeds(False, 0)


def test_stop_tokens_are_banned_until_min_tokens_have_been_generated():
    """A step in which no row is below its min_tokens any more needs no rules."""
    table = make_table()
    params, stops = SamplingParams(temperature=0, min_tokens=2), frozenset([8, 9])
    seq, other = scheduled([1, 2, 3], [0], params=params, stop_token_ids=stops), scheduled([5], [1], entry=1)
    versions = []
    for _ in range(4):
        versions.append(needs_of(table, (seq, 1, True), (other, 1, True)).rules_version)
        decode_on(seq, 256, token=5)
    assert versions == [1, 1, 0, 0]
    penalties, allowed, edits = rules_in(table.rules.tensors, 0)
    assert edits == [(8, -np.inf, 2, ()), (9, -np.inf, 2, ())] and table.rules.tensors.num_prompt_tokens[0] == 3
    assert (penalties, allowed) == NEUTRAL[:2] and rules_in(table.rules.tensors, 1) == NEUTRAL
    # Without a stop token there is no token to ban. A sequence that returns has already generated its tokens.
    assert not needs_of(table, (scheduled([1], [0], params=params, entry=2), 1, True)).rules_version
    returned = scheduled([1, 2, 3], [0], params=params, stop_token_ids=stops, entry=3)
    returned.token_ids.extend([5, 5])
    returned.num_tokens = returned.num_computed_tokens = 5
    assert not needs_of(table, (returned, 5, True)).rules_version


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"logit_bias": {7: -3.0}},
        {"bad_words": [[4], [5, 6, 7]]}, {"allowed_token_ids": [0, 31, 32, 999]},
        {"logit_bias": {7: 2.0}, "bad_words": [[7]], "allowed_token_ids": [3], "presence_penalty": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_rules_hold_for_their_request_alone_and_for_all_of_its_life(options):
    table = make_table()
    seq, other = scheduled([1, 2, 3], [0], params=SamplingParams(**options), entry=2), scheduled([5], [1], entry=1)
    for _ in range(3):
        assert needs_of(table, (other, 1, True), (seq, 1, True)).rules_version == 1
        decode_on(seq, 256, token=5)
    assert needs_of(table, (other, 1, True)).rules_version == 0, "of the rows of this step nobody asks"
    assert needs_of(table, (other, 1, True), (seq, 1, False)).rules_version == 0, "it does not sample in this step"
    for entry in range(6):
        assert rules_in(table.rules.tensors, entry) == (rules_of(seq) if entry == 2 else NEUTRAL)
    # The next tenant has none.
    heir = scheduled([9, 9], [3], params=SamplingParams(), entry=2)
    assert needs_of(table, (heir, 2, True)).rules_version == 0 and rules_in(table.rules.tensors, 2) == NEUTRAL


def test_rules_that_need_more_room_get_tensors_of_a_new_version():
    """A captured step reads the tensors of its capture, so it must not be replayed with other tensors."""
    table = make_table()
    few = scheduled([1], [0], params=SamplingParams(logit_bias={1: 1.0}, bad_words=[[1, 2]], presence_penalty=1.0))
    assert needs_of(table, (few, 1, True)).rules_version == 1
    small = table.rules.tensors
    eight = scheduled([1], [0], params=SamplingParams(logit_bias=dict.fromkeys(range(8), 1.0)), entry=1)
    assert needs_of(table, (eight, 1, True)).rules_version == 1 and table.rules.tensors is small
    nine = scheduled([1], [0], params=SamplingParams(logit_bias=dict.fromkeys(range(9), 2.0)), entry=2)
    assert needs_of(table, (nine, 1, True)).rules_version == 2 and table.rules.tensors is not small
    long = scheduled([1], [0], params=SamplingParams(bad_words=[list(range(60))]), entry=3)
    assert needs_of(table, (long, 1, True)).rules_version == 3
    again = scheduled([1], [0], params=SamplingParams(logit_bias=dict.fromkeys(range(16), 2.0)), entry=4)
    assert needs_of(table, (again, 1, True)).rules_version == 3, "widths are powers of two, so that they seldom grow"
    for entry, seq in enumerate((few, eight, nine, long, again)):
        assert rules_in(table.rules.tensors, entry) == rules_of(seq)
    assert rules_in(table.rules.tensors, 5) == NEUTRAL, "that of padding"


def test_rules_are_sent_with_the_admission_and_not_again(uploads):
    rules = TokenRulesTable(5, VOCAB_SIZE, CPU)
    ruled = scheduled([1], [0], params=SamplingParams(logit_bias={1: 1.0}), entry=3)
    plain = scheduled([1], [0], entry=1)
    assert rules.admit([plain], np.array([1])).tolist() == [0] and not uploads
    assert rules.admit([plain, ruled], np.array([1, 3])).tolist() == [0, ALWAYS]
    assert len(uploads) == 1 and uploads[0][0].tolist() == [3], "of the one that has some"
    uploads.clear()
    assert rules.admit([plain], np.array([1])).tolist() == [0] and not uploads
    assert rules.admit([plain], np.array([3])).tolist() == [0] and uploads[0][0].tolist() == [3]
    uploads.clear()
    assert rules.admit([plain], np.array([3])).tolist() == [0] and not uploads


def test_rules_that_were_being_sent_when_an_error_came_are_not_the_next_tenants(monkeypatch):
    """Ctrl-C once came after the rules had reached the device and before the host had noted it. The next request in
    that entry had no rules, so none were sent, and it inherited the old ones.
    """
    table, send_rules = make_table(), TokenRulesTable._send
    ruled = scheduled([1], [0], params=SamplingParams(logit_bias={7: 5.0}, repetition_penalty=2.0), entry=2)
    plain, other = scheduled([1], [0], entry=2), scheduled([1], [1], params=SamplingParams(bad_words=[[3]]), entry=1)

    def interrupted(self, *args) -> None:
        send_rules(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TokenRulesTable, "_send", interrupted)
        send(table, step_of((ruled, 1, True)))
    assert needs_of(table, (plain, 1, True), (other, 1, True)).rules_version
    assert rules_in(table.rules.tensors, 2) == NEUTRAL and rules_in(table.rules.tensors, 1) == rules_of(other)


def is_interrupted(run: Callable[[], Any], num_lines: int) -> bool:
    """Runs it until that line of the table's files, where Ctrl-C comes. Returns False if it runs fewer lines."""

    def on_line(frame, event, argument):
        nonlocal num_lines
        if frame.f_code.co_filename not in (sequence_table.__file__, token_rules.__file__):
            return None
        num_lines -= event == "line"
        if num_lines == 0:
            raise KeyboardInterrupt
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_tensors_never_go_by_the_version_of_others():
    """Ctrl-C may come at any line while they are made wider. A step that was captured for the old ones must not be
    replayed.
    """
    nine = scheduled([1], [0], params=SamplingParams(logit_bias=dict.fromkeys(range(9), 2.0)), entry=2)
    few = scheduled([1], [0], params=SamplingParams(logit_bias={1: 1.0}, bad_words=[[1, 2]]))
    for num_lines in count(1):
        rules = TokenRulesTable(6, VOCAB_SIZE, CPU)
        rules.admit([few], np.array([0]))
        of_version = {rules.version: rules.tensors}
        was_interrupted = is_interrupted(lambda: rules.admit([nine], np.array([2])), num_lines)  # noqa: B023
        assert of_version.setdefault(rules.version, rules.tensors) is rules.tensors
        assert rules.admit([nine], np.array([2])).tolist() == [ALWAYS]
        assert of_version.setdefault(rules.version, rules.tensors) is rules.tensors
        assert rules_in(rules.tensors, 0) == rules_of(few) and rules_in(rules.tensors, 2) == rules_of(nine)
        if not was_interrupted:
            break
    assert num_lines > 20, "or the test says nothing"


def test_ctrl_c_at_any_line_leaves_a_table_that_the_next_step_puts_right():
    """That step may have the same sequences, or others in their entries after the engine was emptied."""
    ruled = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, top_k=4)
    one, two = scheduled([1, 2, 3, 4, 5], [7, 8], params=ruled), scheduled([6], [5], params=ruled, entry=1)
    next_one = scheduled([9, 9], [1], params=SamplingParams(temperature=0.25), entry=0)
    step = step_of((two, 1, True), (one, 5, True))
    followers = [step, step_of((two, 1, True), (next_one, 2, True)), step_of((next_one, 2, True))]
    for num_lines in count(1):
        for follower in followers:
            table = make_table(4, 20, 4)
            build(
                table,
                step_of((scheduled([9] * 10, [4, 2, 1]), 10, True), (scheduled([9] * 5, [0, 3], entry=1), 5, True)),
            )
            was_interrupted = is_interrupted(lambda: send(table, step), num_lines)  # noqa: B023
            fresh = make_table(4, 20, 4)
            needs, expected = send(fresh, follower), batch_of(fresh, exact_size(follower))
            assert send(table, follower) == needs
            found = batch_of(table, exact_size(follower))
            for name in ("token_ids", "positions", "sampled_tokens"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), (num_lines, name)
            assert torch.equal(found.groups[0].slot_mapping, expected.groups[0].slot_mapping), num_lines
            assert all(map(torch.equal, found.sampled, expected.sampled)), num_lines
            for chunk in follower.chunks:
                assert rules_in(table.rules.tensors, chunk.seq.entry) == rules_of(chunk.seq), num_lines
        if not was_interrupted:
            break
    assert num_lines > 50, "or the test says nothing"


# Random runs


class LostError(Exception):
    """A planted error of the device."""


class TableRunner(FakeRunner):
    """Keeps a SequenceTable as a ModelRunner does, and compares each step's Batch with plain loops.

    `fail_at_upload` raises in the middle of an upload, and `fail_when_sent` before the step runs, once each.
    """

    def __init__(self, info, config, rng: random.Random | None, use_kernels: bool, num_ranks: int):
        super().__init__(info, config.max_num_seqs)
        self.max_num_seqs, self.max_num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.num_ranks = num_ranks
        self.table = make_table(
            config.max_num_seqs, info.max_model_len, info.kvcache_block_size, use_kernels=use_kernels,
            sampled_multiple=num_ranks,
            max_num_tokens=self.max_num_tokens, windows=info.windows,
        )  # fmt: skip
        self.rng, self.use_kernels = rng, use_kernels  # sizes are exact without rng
        self.fail_at_upload, self.fail_when_sent = 0, False
        self.last_tenants: dict[int, tuple[int, int]] = {}  # by entry
        # (has decodes, has others, those have cached keys, has chunks that do not sample)
        self.kinds_seen: set[tuple[bool, bool, bool, bool]] = set()
        self.needs_seen: set[tuple[bool, bool]] = set()
        self.num_in_flight = self.num_padding = self.num_returned = 0

    def launch(self, step: Step):
        size = exact_size(step, self.num_ranks)
        if self.rng is not None:
            size = self.padded(size)
        sent = self.table.send(step, OneSize(size))
        if self.fail_when_sent:
            self.fail_when_sent = False
            raise LostError
        tenants = [(chunk.seq.seq_id, chunk.seq.num_preemptions) for chunk in step.chunks]
        batch = batch_of(self.table, sent)
        self.check(step, size, batch)
        self.check_needs(step, sent.needs)
        assert batch.groups[0].tenants == tenants
        launched = super().launch(step)
        sample(self.table, batch, launched._token_ids, self.use_kernels)
        return launched

    def padded(self, size: StepSize) -> StepSize:
        """A captured size that the step fits into, for decodes alone or for any rows."""
        rng = self.rng
        num_rows = rng.randint(size.num_rows, self.max_num_seqs)
        if size.num_tiles == 0 and rng.random() < 0.5:
            return decode_size(num_rows, -(-num_rows // self.num_ranks) * self.num_ranks)
        num_tokens = rng.randint(size.num_tokens, self.max_num_tokens)
        num_sampled = max(size.num_sampled, -(-rng.randint(0, self.max_num_seqs) // self.num_ranks) * self.num_ranks)
        max_num_tiles = self.max_num_tokens // QUERY_TILE + min(self.max_num_seqs, self.max_num_tokens) + 1
        num_tiles = rng.randint(max(size.num_tiles, 1), max_num_tiles)
        return StepSize(num_rows, num_tokens, num_sampled, num_tiles, num_rows, num_tokens, False)

    def token_at(self, seq: Sequence, position: int) -> int:
        if position < len(seq.token_ids):
            return seq.token_ids[position]
        self.num_in_flight += 1
        return self._in_flight_token(seq, position)

    def check(self, step: Step, size: StepSize, batch: WholeBatch) -> None:
        block_size, metadata, rows = self.info.kvcache_block_size, batch.groups[0], batch.sampled
        assert [of_group.group for of_group in batch.groups] == list(range(1 + self.info.windows.num_groups))
        tokens, positions, starts, tiles = [], [], [0], []
        slots = [[] for _ in batch.groups]
        sampled: list[tuple[int, Sequence]] = []
        for row, (seq, num_new_tokens, samples) in enumerate(step.chunks):
            for position in range(seq.num_computed_tokens - num_new_tokens, seq.num_computed_tokens):
                if row >= step.num_decodes:
                    tiles.append((len(tokens), position, row))
                tokens.append(self.token_at(seq, position))
                positions.append(position)
                for group, of_group in enumerate(slots):
                    of_group.append(self._slot(seq, group, position))
            starts.append(len(tokens))
            if samples:
                sampled.append((len(tokens) - 1, seq))
            assert metadata.block_tables[row, : len(seq.block_table)].tolist() == seq.block_table
            kept = seq.window_table[seq.num_behind_window :]
            for index, of_group in enumerate(batch.groups[1:]):
                found = of_group.block_tables[row, seq.num_behind_window : len(seq.window_table)].tolist()
                assert found == [blocks[index] for blocks in kept]
        num_seqs, seqs = len(step.chunks), [seq for _, seq in sampled]
        params, padding_entry = [seq.sampling_params for seq in seqs], self.max_num_seqs
        assert metadata.block_tables.shape == (size.num_rows, -(-self.info.max_model_len // block_size))
        assert not metadata.block_tables[num_seqs:].any()
        pairs = [
            # what it is, how many there are, what comes first, what pads it
            (batch.token_ids, size.num_tokens, tokens, 0),
            (batch.positions, size.num_tokens, positions, 0),
            *(
                (of.slot_mapping, size.num_tokens, expected, -1)
                for of, expected in zip(batch.groups, slots, strict=True)
            ),
            (metadata.cu_seqlens_q, size.num_rows + 1, starts, len(tokens)),
            (metadata.context_lens, size.num_rows, [chunk.seq.num_computed_tokens for chunk in step.chunks], 0),
            (metadata.num_decodes, 1, [step.num_decodes], 0),
            (batch.sampled_tokens, size.num_sampled, [token for token, _ in sampled], 0),
            (rows.entries, size.num_sampled, [seq.entry for seq in seqs], padding_entry),
            (rows.lengths, size.num_sampled, [seq.num_computed_tokens for seq in seqs], 0),
            (rows.seeds, size.num_sampled, [seq.seed - 2**64 * (seq.seed >= 2**63) for seq in seqs], 0),
            (rows.temperatures, size.num_sampled, np.float32([p.temperature for p in params]).tolist(), 0),
            (rows.top_ks, size.num_sampled, [p.top_k * (p.top_k < VOCAB_SIZE) for p in params], 0),
        ]
        for found, length, expected, padding in pairs:
            assert found.tolist() == expected + [padding] * (length - len(expected)) and found.is_contiguous()
        for found, name in ((rows.top_ps, "top_p"), (rows.min_ps, "min_p")):
            assert found[: len(seqs)].tolist() == np.float32([getattr(p, name) for p in params]).tolist()
        assert metadata.max_num_decodes == size.max_num_decodes >= step.num_decodes
        assert metadata.max_seqlen_q >= max(chunk.num_new_tokens for chunk in step.chunks)
        assert metadata.max_seqlen_k >= max(chunk.seq.num_computed_tokens for chunk in step.chunks)
        assert metadata.block_size == block_size
        if size.num_tiles:
            assert metadata.query_tiles.shape == (size.num_tiles, 4) and metadata.query_tiles.is_contiguous()
            found = [
                (token + i, position + i, row)
                for token, num_queries, position, row in metadata.query_tiles.tolist()
                for i in range(num_queries)
            ]
            assert sorted(found) == tiles
            # The tiles that the last layer attends: those with tokens after which a row samples.
            all_tiles, last = metadata.query_tiles.tolist(), [token for token, _ in sampled]
            expected = [tile for tile in all_tiles if any(tile[0] <= token < tile[0] + tile[1] for token in last)]
            assert metadata.sampled_tiles.tolist() == expected + [[0] * 4] * (size.num_tiles - len(expected))
        else:
            assert metadata.query_tiles is None and metadata.sampled_tiles is None
        later = step.chunks[step.num_decodes :]
        self.kinds_seen.add((
            step.num_decodes > 0, bool(later),
            any(seq.num_computed_tokens > num_new for seq, num_new, _ in later), len(sampled) < num_seqs,
        ))  # fmt: skip
        self.num_padding += size.num_rows - num_seqs

    def check_needs(self, step: Step, needs: SamplingNeeds) -> None:
        seqs = [chunk.seq for chunk in step.chunks if chunk.samples]
        params = [seq.sampling_params for seq in seqs]
        has_filters = any(
            p.temperature > 0 and (0 < p.top_k < VOCAB_SIZE or p.top_p < 1 or p.min_p > 0) for p in params
        )
        rules = self.table.rules
        assert needs[:3] == (has_filters, rules.version if any(map(is_ruled, seqs)) else 0, 0)
        self.needs_seen.add((has_filters, needs.rules_version > 0))
        for seq in seqs:
            if needs.rules_version:
                # Bans that have ended may be gone or still there: the number of generated tokens shows that they are
                # over.
                found = rules_in(rules.tensors, seq.entry)
                assert found == rules_of(seq) or (not is_ruled(seq) and found == NEUTRAL)
                assert not is_ruled(seq) or rules.tensors.num_prompt_tokens[seq.entry] == seq.num_prompt_tokens
        assert rules_in(rules.tensors, self.max_num_seqs) == NEUTRAL
        for seq in (chunk.seq for chunk in step.chunks):
            tenant = seq.seq_id, seq.num_preemptions
            last_id, last_preemptions = self.last_tenants.get(seq.entry, (None, 0))
            self.num_returned += last_id == seq.seq_id and last_preemptions != seq.num_preemptions
            self.last_tenants[seq.entry] = tenant


def table_engine(sizes: random.Random | None, use_kernels: bool = False, num_ranks: int = 1, **options) -> LLMEngine:
    plain = make_engine(keep_log=False, **options)
    return LLMEngine(plain.config, runner=TableRunner(plain.info, plain.config, sizes, use_kernels, num_ranks))


def random_params(rng: random.Random, max_num_tokens: int = 19) -> SamplingParams:
    """A third of the requests is plain, a third has filters, and a third has rules."""
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.5, 1.25)),
        "max_tokens": rng.randint(1, max_num_tokens),
        "seed": rng.choice((0, 2**64 - 1, 2**63, rng.getrandbits(64))),
    }
    kind = rng.randrange(3)
    if kind == 1:
        options |= {"top_k": rng.choice((0, 5, VOCAB_SIZE)), "top_p": rng.choice((0.5, 1.0)), "min_p": rng.random() / 2}
    if kind == 2:
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 4, 12)))]
        options |= rng.choice((
            {"repetition_penalty": 1.5}, {"frequency_penalty": 0.25, "presence_penalty": -1.0},
            {"logit_bias": dict.fromkeys(ids, 0.5)}, {"bad_words": [ids, ids[:1]]}, {"allowed_token_ids": ids},
            {"min_tokens": rng.randint(0, options["max_tokens"]), "stop_token_ids": ids},
        ))  # fmt: skip
    return SamplingParams(**options)


OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


@pytest.mark.grid(2)
@OVERLAP
@pytest.mark.parametrize("is_padded", [False, True], ids=["eager", "padded"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_batch_of_a_random_run_is_what_plain_loops_make(overlap, is_padded, num_ranks):
    rng = random.Random(5)
    engine = table_engine(
        random.Random(0) if is_padded else None, num_ranks=num_ranks, num_blocks=60 if num_ranks == 2 else 30,
        block_size=4, max_model_len=40, max_num_batched_tokens=24, max_num_seqs=8, overlap=overlap,
        eos_token_ids=frozenset(range(0, 1000, 30)),
        windows=WindowGroups(2, 9, 1, 24) if num_ranks == 2 else NO_WINDOWS,
    )  # fmt: skip
    for _ in range(100):
        prompt = [3] * rng.randint(0, 9) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        engine.add_request(prompt, random_params(rng))
    assert len(run_to_end(engine)) == 100
    runner = engine.runner
    assert runner.num_steps > 100 and runner.num_chunks > 0
    kinds = {kind[:3] for kind in runner.kinds_seen}
    assert kinds >= {(True, False, False), (True, True, False), (True, True, True)}
    assert {kind[3] for kind in runner.kinds_seen} == {False, True}
    assert runner.needs_seen >= {(False, False), (True, False), (False, True), (True, True)}
    assert engine.metrics()["num_preemptions"] > 0 and engine.metrics()["num_cached_prompt_tokens"] > 0
    assert (runner.num_in_flight > 0) == overlap and (runner.num_padding > 0) == is_padded


@pytest.mark.grid(1)
@OVERLAP
@pytest.mark.parametrize("is_padded", [False, True], ids=["eager", "padded"])
def test_every_batch_of_the_kernel_is_what_plain_loops_make(overlap, is_padded):
    """This run is shorter, because the interpreter is slow."""
    rng = random.Random(6)
    engine = table_engine(
        random.Random(0) if is_padded else None, use_kernels=True, num_ranks=2, num_blocks=28 if is_padded else 24,
        block_size=4, max_model_len=40, max_num_batched_tokens=150, max_num_seqs=6, overlap=overlap,
        windows=WindowGroups(1, 6, 1, 150) if is_padded else NO_WINDOWS,
    )  # fmt: skip
    for _ in range(14):
        prompt = [3] * rng.randint(0, 9) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        engine.add_request(prompt, random_params(rng, 12))
    assert len(run_to_end(engine)) == 14
    runner = engine.runner
    kinds = {kind[:2] for kind in runner.kinds_seen}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert is_padded or engine.metrics()["num_preemptions"] > 0
    assert (runner.num_in_flight > 0) == overlap and (runner.num_padding > 0) == is_padded


@pytest.mark.grid(2)
@OVERLAP
@pytest.mark.parametrize("is_padded", [False, True], ids=["eager", "padded"])
@pytest.mark.parametrize("seed", range(6))
def test_the_device_knows_of_every_sequence_what_the_host_would_send(overlap, is_padded, seed, count, monkeypatch):
    """Entries and blocks change hands, rows come and go, prompts run as decodes, and steps fail half-way."""
    fail_at: list[TableRunner] = []

    def failing(module) -> Callable:
        upload = module.upload

        def maybe_upload(*args, **options) -> Any:
            runner = fail_at[-1]
            runner.fail_at_upload -= 1
            if runner.fail_at_upload == 0:
                raise LostError
            return upload(*args, **options)

        return maybe_upload

    for module in (sequence_table, token_rules):
        monkeypatch.setattr(module, "upload", failing(module))
    num_steps = num_in_flight = num_padding = num_preemptions = num_lost = 0
    for run_seed in range(count(3, 3) * seed, count(3, 3) * (seed + 1)):
        rng = random.Random(run_seed)
        block_size = rng.choice((1, 2, 4))
        engine = table_engine(
            random.Random(run_seed) if is_padded else None,
            num_ranks=rng.choice((1, 2, 4)),
            num_blocks=20 // block_size + rng.randint(1, 8),
            block_size=block_size,
            max_model_len=20,
            max_num_batched_tokens=rng.choice((5, 24)),
            max_num_seqs=6,
            enable_prefix_caching=rng.random() < 0.7,
            overlap=overlap,
        )
        runner = engine.runner
        runner.is_broken = lambda seq: seq.seq_id % 11 == 5 and len(seq.token_ids) > 9
        fail_at.append(runner)
        is_alike = rng.random() < 0.5  # prompts that share all their blocks, and those of their completions
        for _ in range(100):
            if rng.random() < 0.3:
                for _ in range(rng.choice((1, 1, 3, 7))):
                    prompt = [5, 6, 7] if is_alike else [rng.randrange(9) for _ in range(rng.choice((1, 1, 3, 7)))]
                    engine.add_request(prompt, random_params(rng))
            if rng.random() < 0.08:
                where = rng.randrange(3)
                runner.launch_error = LostError() if where == 0 else None
                runner.fail_when_sent = where == 1
                runner.fail_at_upload = rng.randint(1, 6) if where == 2 else 0
            try:
                engine.step()
            except LostError:
                num_lost += 1
            engine.scheduler.check_integrity()
        runner.launch_error, runner.fail_when_sent, runner.fail_at_upload = None, False, 0
        run_to_end(engine)
        num_steps += runner.num_steps
        num_in_flight += runner.num_in_flight
        num_padding += runner.num_padding
        num_preemptions += engine.metrics()["num_preemptions"]
    assert num_steps > 100 and num_preemptions > 0 and num_lost > 5
    assert (num_in_flight > 0) == overlap and (num_padding > 0) == is_padded


@OVERLAP
@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_that_comes_back_to_its_entry_brings_its_new_blocks(overlap, seed):
    """Twins share blocks, so a preempted one may return at once to the entry that it left, with other blocks."""
    rng = random.Random(seed)
    engine = table_engine(
        None, num_blocks=rng.randint(12, 20), block_size=2, max_model_len=24, max_num_seqs=4, overlap=overlap
    )
    for _ in range(20):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=rng.randint(1, 19)))
    assert len(run_to_end(engine)) == 20
    assert engine.metrics()["num_preemptions"] > 3 and engine.runner.num_returned > 0
