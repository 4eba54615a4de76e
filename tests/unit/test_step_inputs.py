"""Captured steps that hold prompts: their padding, on a CPU with the kernels interpreted and no graph to replay.

The graphs themselves: test_gpu_engine.py.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from model_factory import save_model
from test_batch import sampling, scheduled

from nanovllm import LLM, SamplingParams
from nanovllm.runner.cuda_graph import StepSize
from nanovllm.runner.step_inputs import StepInputs, quarters
from nanovllm.attention.metadata import QUERY_TILE, query_tiles

CPU = torch.device("cpu")


def make_inputs(most_tokens: int = 256, most_seqs: int = 8) -> StepInputs:
    return StepInputs(most_tokens, most_seqs, 20, 16, most_seqs, CPU)


def work_of(*parts: tuple[int, int]) -> list:
    """(new tokens, tokens before them) of each sequence, all of which sample."""
    sequences = (
        scheduled(list(range(num_new + before)), list(range(20)), slot=slot)
        for slot, (num_new, before) in enumerate(parts)
    )
    return [(sampling(seq), num_new, True) for seq, (num_new, _) in zip(sequences, parts, strict=True)]


def test_tiles_are_every_query_once():
    """At lengths around a tile's; decodes have none, and chunks begin where the cached keys end."""
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


@pytest.mark.parametrize("largest", [1, 5, 16, 63, 64, 100, 256, 768, 3072])
def test_sizes_are_few_and_reach_the_largest(largest):
    sizes = quarters(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and len(sizes) <= 4
    assert all(size % 16 == 0 for size in sizes[:-1]) and sizes[0] <= largest // 4 + 16


def test_a_step_takes_the_next_larger_size():
    inputs = make_inputs()
    assert inputs.send(work_of((1, 9), (30, 0)), False) == StepSize(8, False, 64)
    assert inputs.send(work_of((1, 9), (63, 0)), True) == StepSize(8, True, 64)
    assert inputs.send(work_of((1, 9), (64, 0)), False) == StepSize(8, False, 128)
    assert inputs.send(work_of((256, 0)), False) == StepSize(8, False, 256)
    assert inputs.send(work_of((1, 9), (256, 0)), False) is None
    # 4 tiles of 64 queries and 9 prompts of 32 tokens or less; more of those take more tiles.
    many = make_inputs(most_seqs=100)
    assert many.send(work_of(*[(2, 0)] * 13), False) == StepSize(16, False, 64)
    assert many.send(work_of(*[(2, 0)] * 14), False) is None
    assert many.send(work_of(*[(1, 9)] * 17, (2, 0)), False) == StepSize(32, False, 64)
    # What samples nothing has few logits.
    [(seq, num_new, _)] = work_of((30, 0))
    assert many.send([(seq, num_new, False)], False) == StepSize(16, False, 64)


def test_padding_leaves_no_trace():
    """What is no decode has no keys as such, or the kernel for decodes would attend its tokens over keys to come."""
    inputs = make_inputs()
    inputs.send(work_of((1, 40), (1, 3), (1, 8)), False)
    batch = inputs.batch(inputs.send(work_of((1, 9), (30, 2), (1, 7)), False))
    assert batch.context.context_lens.tolist() == [10, *[0] * 7] and batch.context.num_decodes == 8
    tiles = batch.context.query_tiles.tolist()
    assert tiles[:2] == [[1, 30, 2, 1], [31, 1, 7, 2]] and not any(map(any, tiles[2:]))
    assert batch.context.slot_mapping[32:].tolist() == batch.in_flight_slots[32:].tolist() == [-1] * 32
    assert batch.sampled_slots.tolist() == [0, 1, 2, *[8] * 5]


def test_a_parked_step_comes_back():
    inputs = make_inputs()
    work = work_of((1, 9), (30, 2))
    batch = inputs.batch(inputs.send(work, False))
    tensors = [batch.token_ids, batch.context.context_lens, batch.sampled_slots, batch.context.query_tiles]
    before = [tensor.clone() for tensor in tensors]
    with inputs.parked():
        token_ids, context_lens, slots, tiles = tensors
        assert not token_ids.any() and not tiles.any() and not context_lens.any() and (slots == 8).all()
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


class Uncaptured:
    """In place of CudaGraphs: tries and runs each step of a size as it would be captured, and counts them."""

    def __init__(self, runner):
        self.runner, self.sizes = runner, Counter()

    def padded_size(self, num_rows: int) -> int:
        return min(num_rows + 2, self.runner.state.padding_slot)

    def replay(self, size: StepSize):
        if size not in self.sizes:  # is captured first, which tries the step
            with self.runner._parked():
                self.runner._captured_step(size)
        self.sizes[size] += 1
        if size.num_tokens == 16 and self.sizes[size] % 3 == 0:
            return None  # as if there were no memory for it: an eager step takes its place
        return self.runner._captured_step(size)


@pytest.mark.parametrize(("overlap", "num_blocks"), [(True, 9), (False, 9), (True, 24)])
def test_padded_steps_give_the_tokens_of_eager_ones(tmp_path, monkeypatch, overlap, num_blocks):
    """Chunks, hits, tokens in flight, rows that sample and rows that do not; preemption where there are few blocks,
    shared prefixes where there are many."""
    monkeypatch.setattr("nanovllm.attention.triton_backend._SHORTEST_SPLIT", 64)
    save_model(tmp_path, seed=3, num_hidden_layers=1)
    prefix = [7 * i % 50 for i in range(68)]
    prompts = [[*prefix, i, 2 * i] for i in range(2)]  # the first to run, as they are to generate most
    prompts += [[i * j % 40 for j in range(1, length)] for i, length in enumerate((13, 36, 3, 20), 1)]
    params = [
        SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=16 - i, ignore_eos=True, top_k=5 * (i % 4 == 1))
        for i in range(len(prompts))
    ]
    options = {
        "device": "cpu", "kvcache_block_size": 16, "max_num_batched_tokens": 32, "max_model_len": 96,
        "max_num_seqs": 5, "num_kvcache_blocks": num_blocks, "overlap": overlap, "attention_backend": "triton",
    }  # fmt: skip

    def tokens(is_captured: bool) -> tuple[list[list[int]], Counter]:
        with LLM(str(tmp_path), **options) as llm:
            runner = llm.engine.runner
            graphs = Uncaptured(runner)
            runner.backend._num_programs = 2  # few, for the interpreter runs one after the other
            if is_captured:
                runner.graphs = graphs
                runner.inputs = StepInputs(32, 5, 6, 16, runner.state.padding_slot, CPU)
                runner.kv_cache.fill_(float("nan"))  # of which padding must not read
            found = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            found += [output.token_ids for output in llm.generate(prompts[:1], params[-1:], use_tqdm=False)]
            assert (llm.metrics()["num_preemptions"] > 0) == (num_blocks == 9)
        return found, graphs.sizes

    expected, _ = tokens(False)
    found, sizes = tokens(True)
    assert found == expected
    with_prompts = [size for size in sizes if size.num_tokens]
    assert {size.num_tokens for size in with_prompts} == {16, 32}
    assert any(size.is_grouped for size in with_prompts) == (num_blocks == 24)
