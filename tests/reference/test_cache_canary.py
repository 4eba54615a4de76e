"""The canaries of the KV cache: the kernels against their twin, planted faults of the cache, and workloads without any.

test_cuda_graph.py has them in captured and padded steps, test_schedule_invariance.py in all schedules.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.family_factory import FAMILIES, save_family_model
from support.long import long
from support.model_factory import TINY, save_model

from nanovllm import LLM, PoolingParams, SamplingParams
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import CorruptCacheError, Step, StepOutput
from nanovllm.ops.cache_canary import NONE_WRONG, guard_cache, mix
from nanovllm.ops.expand_rows import Expanded, ExpandedSamples, Table, expand_rows
from nanovllm.ops.kernel import has_kernels
from nanovllm.runner.step_in_flight import StepInFlight

MASK = 2**64 - 1
OPTIONS: dict[str, Any] = {
    "device": "cpu", "kvcache_block_size": 4, "max_model_len": 96, "max_num_seqs": 6, "max_num_batched_tokens": 48,
    "num_kvcache_blocks": 60, "cache_canary": True,
}  # fmt: skip


def mixed(token_id: int, position: int) -> int:
    number = (position << 32 | token_id) + 0x9E3779B97F4A7C15 & MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def test_mix_is_the_finalizer_of_splitmix64():
    """The first number of SplitMix64 with the seed 0, and the same arithmetic with Python's integers."""
    assert mixed(0, 0) == 0xE220A8397B1DCDAF
    pairs = [(0, 0), (1, 0), (0, 1), (2**31 - 1, 5), (151_000, 2**20), (7, 2**31 - 1)]
    found = mix(*torch.tensor(pairs).T.contiguous())
    assert [number & MASK for number in found.tolist()] == [mixed(*pair) for pair in pairs]


class Cache:
    """Sequences of random lengths with blocks of their own, as two steps see them: all but the last tokens, then these.

    The second sequence shares the first two blocks of the first one, whose tokens it begins with.
    """

    def __init__(self, rng: random.Random, block_size: int, num_groups: int, longest: int):
        self.block_size, self.num_rows = block_size, 4
        self.lengths = [2 * block_size + rng.randint(1, longest), 2 * block_size + 1, 1, rng.randint(2, longest)]
        max_blocks = -(-max(self.lengths) // block_size) + 1
        num_entries, num_blocks = self.num_rows + 1, num_groups * (self.num_rows + 1) * max_blocks + 3
        blocks = torch.tensor(rng.sample(range(num_blocks), num_groups * num_entries * max_blocks), dtype=torch.int32)
        tables = blocks.view(num_groups, num_entries, max_blocks)
        tables[:, 1, :2] = tables[:, 0, :2]
        tokens = torch.randint(2**17, (num_entries, max_blocks * block_size), dtype=torch.int32)
        tokens[1, : 2 * block_size] = tokens[0, : 2 * block_size]
        settings, seeds = torch.zeros(1, num_entries, dtype=torch.int32), torch.zeros(num_entries, dtype=torch.int64)
        self.table = Table(tokens, tables, settings, seeds)
        self.canaries = torch.randint(-(2**62), 2**62, (num_blocks, block_size))

    def step(self, num_new: list[int], num_padding: int, window: int, use_kernels: bool) -> torch.Tensor:
        """Computes a step in which the rows reach these lengths; returns its wrong slots."""
        rows = torch.zeros(self.num_rows + num_padding + 1, 4, dtype=torch.int32)
        rows[:, 0], rows[:, 2] = len(self.table.tokens) - 1, sum(num_new)
        for row, length in enumerate(self.lengths):
            rows[row, :3] = torch.tensor([row, length, sum(num_new[:row])])
        samples = ExpandedSamples.empty(1, 1, rows.device)
        num_rows, num_tokens = len(rows) - 1, sum(num_new) + 2 * num_padding
        made: Expanded = expand_rows(rows, self.table, num_rows, num_tokens, samples, self.block_size, use_kernels)
        wrong = torch.zeros(num_rows, dtype=torch.int64)
        guard_cache(self.canaries, self.table.tokens, rows[:num_rows, 0], made, window, wrong, use_kernels)
        return wrong


@pytest.mark.skipif(not has_kernels(), reason="needs Triton")
@pytest.mark.parametrize(
    ("block_size", "num_groups", "longest"), [(16, 1, 60), (3, 3, 40), long(64, 2, 2500), long(16, 1, 5000)]
)
def test_the_kernels_write_and_find_what_their_twin_does(block_size, num_groups, longest, count):
    """Rows of one step share blocks that the first of them writes. Then a slot, or a block table, is spoilt."""
    rng = random.Random(longest)
    torch.manual_seed(longest)
    cache, window = Cache(rng, block_size, num_groups, longest), 7
    before = cache.canaries.clone()
    whole = [cache.lengths[0], 1, 1, cache.lengths[3]]
    for num_new in (whole, [1, 1, 1, 2]):
        found = []
        for use_kernels in (False, True):
            cache.canaries.copy_(before)
            assert (cache.step(num_new, 2, window, use_kernels) == NONE_WRONG).all()
            found.append(cache.canaries.clone())
        assert torch.equal(*found), "canaries differ"
        before = found[0]
        for row, length in enumerate(cache.lengths):
            sums = 0
            for position in range(length):
                sums = sums + mixed(int(cache.table.tokens[row, position]), position) & MASK
                block = cache.table.block_tables[0, row, position // block_size]
                assert int(found[0][block, position % block_size]) & MASK == sums
    for _ in range(count(6, 30)):
        row = rng.choice([0, 0, 3])
        group, position = rng.randrange(num_groups), rng.randrange(cache.lengths[row] - 2)
        index, old = position // block_size, cache.table.block_tables.clone()
        slot = cache.table.block_tables[group, row, index].item(), position % block_size
        num_new = 2 if row == 3 else 1
        # A step cannot write its new tokens to a block that the cache lacks.
        is_written = (cache.lengths[row] - num_new) // block_size <= index
        kind = rng.choice(["slot", "table"] if is_written else ["slot", "table", "outside"])
        if kind == "slot":
            cache.canaries[slot] += rng.choice([1, -1, 2**40])
        else:
            position, wrong_block = index * block_size, rng.choice([len(cache.canaries) + 9, -5])
            other = cache.table.block_tables[group, 2, -1] if kind == "table" else wrong_block
            cache.table.block_tables[group, row, index] = other
            slot = int(other), 0
        spoilt = cache.canaries.clone()
        found = []
        for use_kernels in (False, True):
            cache.canaries.copy_(spoilt)
            found.append(cache.step([1, 1, 1, 2], 2, window, use_kernels))
        assert torch.equal(*found)
        first_seen = max(0, cache.lengths[row] - num_new - window + 1) if group else 0
        if kind != "slot":
            position = max(position, first_seen)
        if position >= first_seen and (kind == "slot" or index * block_size + block_size > first_seen):
            assert found[0][row] == position << 32 | slot[0] & 0xFFFFFFFF
        else:
            assert found[0][row] == NONE_WRONG, "keys behind the window are not read"
        cache.canaries.copy_(before)
        cache.table.block_tables.copy_(old)


# Planted faults


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, num_hidden_layers=1)
    return str(directory)


BEGINNING = [7 * i % 60 for i in range(12)]
PROMPTS = [[*BEGINNING, 1, 2, 3], [5 * i % 61 for i in range(11)], [*BEGINNING, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def fault_before(llm: LLM, number: int, spoil: Callable[[Step], Any]) -> list[int]:
    """Spoils something before the launch of a step. Returns a list, to which each commit appends its step's number."""
    runner, launched, committed = llm.engine.runner, [0], []
    launch = runner.launch

    def counting(step: Step):
        launched[0] += 1
        if launched[0] == number:
            spoil(step)
        this, result = launched[0], launch(step)
        wait = result.wait

        def wait_and_note():
            committed.append(this)
            return wait()

        result.wait = wait_and_note
        return result

    runner.launch = counting
    return committed


def table_of(llm: LLM) -> torch.Tensor:
    return llm.engine.runner.program.table._table.block_tables[0]


def victim_of(step: Step) -> Sequence:
    """That of the prompt 1, which shares no block."""
    return next(seq for seq, *_ in step.chunks if list(seq.token_ids[:11]) == PROMPTS[1])


def corrupt_a_table(llm: LLM, step: Step) -> tuple[int, int, int]:
    victim = victim_of(step)
    block = next(b for b in range(60) if b not in victim.block_table)
    table_of(llm)[victim.entry, 1] = block
    return 1, 4, block


def swap_two_blocks(llm: LLM, step: Step) -> tuple[int, int, int]:
    victim = victim_of(step)
    first, second = victim.block_table[:2]
    table_of(llm)[victim.entry, :2] = torch.tensor([second, first])
    return 1, 0, second


def overwrite_a_slot(llm: LLM, step: Step) -> tuple[int, int, int]:
    """As a store to a wrong slot would."""
    victim = victim_of(step)
    llm.engine.runner.program.kv_cache.canaries[victim.block_table[1], 2] = 5
    return 1, 6, victim.block_table[1]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
@pytest.mark.parametrize("fault", [corrupt_a_table, swap_two_blocks, overwrite_a_slot])
def test_a_wrong_key_is_found_in_the_step_that_reads_it(directory, fault, overlap):
    places = []
    with LLM(directory, overlap=overlap, **OPTIONS) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        llm.reset_prefix_cache()
        committed = fault_before(llm, 5, lambda step: places.append(fault(llm, step)))
        with pytest.raises(CorruptCacheError) as found:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        ((prompt, position, block),) = places
        assert f"prompt {prompt}: sequence" in str(found.value), "the prompt is named"
        assert f"read wrong keys at position {position}, in block {block} of rank 0's KV cache" in str(found.value)
        assert committed[4] == 5 and committed[5:] in ([], [6]), "the step in flight may be drained"
        assert llm.engine.is_finished(), "nothing of the call remains"
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in again] == expected, "the LLM stays usable"


def test_a_wrong_hit_of_the_prefix_cache_is_found(directory, monkeypatch):
    """As if two prefixes had one hash, and nothing compared their tokens."""
    with LLM(directory, **OPTIONS) as llm:
        llm.generate([[*range(20, 36)]], GREEDY, use_tqdm=False)

        def not_compared(manager: BlockManager, seq: Sequence) -> list[Block]:
            num_blocks = (seq.num_prompt_tokens - 1) // 4 if seq.seq_id > 1 else 0
            return [*manager._registered.values()][:num_blocks]

        monkeypatch.setattr(BlockManager, "registered_prefix", not_compared)
        committed = fault_before(llm, 0, lambda step: None)
        with pytest.raises(CorruptCacheError, match=r"^prompt 1: sequence 2 read wrong keys at position 0, in block"):
            llm.generate([[1, 2, 3], [3] * 9], GREEDY, use_tqdm=False)
    assert committed[0] == 1 and len(committed) <= 2


def test_a_wrong_hit_that_begins_right_is_found_at_its_first_wrong_token(directory, monkeypatch):
    with LLM(directory, **OPTIONS) as llm:
        llm.generate([[*range(20, 36)]], GREEDY, use_tqdm=False)
        monkeypatch.setattr(BlockManager, "registered_prefix", lambda self, seq: [*self._registered.values()][:2])
        with pytest.raises(CorruptCacheError, match=r"prompt 0: .* at position 6, in block"):
            llm.generate([[*range(20, 26), 5, 5, 5, 5]], GREEDY, use_tqdm=False)


def test_a_block_that_is_freed_too_early_is_found_once_another_sequence_has_written_to_it(directory):
    with LLM(directory, overlap=False, **OPTIONS) as llm:
        engine, manager = llm.engine, llm.engine.scheduler.block_manager
        seq_id = engine.add_request(PROMPTS[1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        for _ in range(3):
            engine.step()
        (victim,) = engine.scheduler.running
        manager._release(victim, victim.block_table[1:2])
        engine.step()  # the block still holds the victim's keys
        manager._free.move_to_end(victim.block_table[1], last=False)
        engine.add_request([1, 2], GREEDY)
        with pytest.raises(CorruptCacheError, match=f"^sequence {seq_id} read wrong keys at position 4") as found:
            engine.step()
        assert found.value.seq_id == seq_id


@pytest.mark.skipif(not has_kernels(), reason="needs Triton")
def test_the_kernels_find_a_fault_of_a_running_engine(directory):
    options = {**OPTIONS, "kvcache_block_size": 16, "attention_backend": "triton", "max_num_seqs": 2}
    prompts = [[3 * i % 61 for i in range(18)], [5, 6]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(directory, **options) as llm:
        assert all(output.error is None for output in llm.generate(prompts, params, use_tqdm=False))
        llm.reset_prefix_cache()

        def confuse(step: Step) -> None:
            first, second = step.chunks
            table_of(llm)[first.seq.entry, 0] = second.seq.block_table[0]

        fault_before(llm, 3, confuse)
        with pytest.raises(CorruptCacheError, match=r"^prompt 0: .* at position 0, in block"):
            llm.generate(prompts, params, use_tqdm=False)


# Workloads without a fault


def random_rows(rng: random.Random, num_rows: int) -> list[tuple[list[int], Any]]:
    """Prompts with shared beginnings; rows that sample, fork, score and pool."""
    beginnings = [[rng.randrange(TINY["vocab_size"]) for _ in range(length)] for length in (3, 8, 21, 40)]

    def prompt() -> list[int]:
        return rng.choice(beginnings) + [rng.randrange(TINY["vocab_size"]) for _ in range(rng.randint(1, 20))]

    kinds = [
        {"temperature": 0.9}, {"temperature": 0.8, "n": 3}, {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0.7, "frequency_penalty": 0.5},
    ]  # fmt: skip
    pooled = [PoolingParams(), PoolingParams(pooling="mean"), PoolingParams("token_embed")]
    return [
        (prompt(), rng.choice(pooled))
        if rng.random() < 0.2
        else (prompt(), SamplingParams(**rng.choice(kinds), max_tokens=rng.randint(1, 24), ignore_eos=True, seed=row))
        for row in range(num_rows)
    ]


def run_rows(llm: LLM, rows: list[tuple[list[int], Any]]) -> None:
    outputs = [*llm.generate_iter(iter([prompt for prompt, _ in rows]), iter([params for _, params in rows]))]
    assert [output.error for output in outputs] == [None] * len(rows)
    scored = [prompt[:40] for prompt, _ in rows[:6]]
    assert all(each.error is None for each in llm.loglikelihood(scored[:1] * len(scored), scored, use_tqdm=False))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", long("qwen3_5")])
def test_a_workload_without_faults_never_fires(family, tmp_path, count):
    """Hits, forks, copied blocks, chunks, preemption, blocks behind windows, snapshots, sleep."""
    rng = random.Random(family)
    options = FAMILIES[family][2](random.Random(3)) | {"vocab_size": TINY["vocab_size"], "num_hidden_layers": 3}
    if family == "gemma3":
        options |= {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    if family == "qwen3_5":
        options |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    save_family_model(tmp_path, family, options)
    num_preemptions = num_cached = 0
    for number in range(count(2, 40)):
        options = {
            **OPTIONS, "overlap": number % 2 == 0, "max_num_seqs": 6 if number == 0 else rng.choice([3, 6]),
            "kvcache_block_size": rng.choice([1, 2, 4, 16]), "max_num_batched_tokens": rng.choice([9, 48]),
        }  # fmt: skip
        options["num_kvcache_blocks"] = 88 // options["kvcache_block_size"] + 2
        with LLM(str(tmp_path), **options) as llm:
            assert (llm.engine.info.num_groups > 1) == (family == "gemma3")
            rows = random_rows(rng, count(14, 40))
            run_rows(llm, rows)
            llm.sleep()
            llm.wake_up()
            run_rows(llm, rows[:6])
            llm.engine.scheduler.check_integrity()
            num_preemptions += llm.metrics()["num_preemptions"]
            num_cached += llm.metrics()["num_cached_prompt_tokens"]
    assert num_preemptions > 0 and num_cached > 50


def test_without_the_option_no_step_carries_wrong_slots(directory, monkeypatch):
    """Each step once copied an empty tensor to the host, and searched it."""
    carried = []

    class Noted(StepInFlight):
        def wait(self) -> StepOutput:
            output = super().wait()
            carried.append(len(self._results))
            return output

    monkeypatch.setattr("nanovllm.runner.step_program.StepInFlight", Noted)
    for has_canaries in (False, True):
        with LLM(directory, **{**OPTIONS, "cache_canary": has_canaries}) as llm:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert set(carried) == {3 + has_canaries}, "tokens, their log-probabilities, and those of prompts"
        carried.clear()


def test_without_the_option_the_cache_has_no_canaries(directory):
    with LLM(directory, **{**OPTIONS, "cache_canary": False}) as plain, LLM(directory, **OPTIONS) as guarded:
        caches = [llm.engine.runner.program.kv_cache for llm in (plain, guarded)]
        assert caches[0].canaries is None and len(caches[0].tensors) == 1
        assert caches[1].nbytes - caches[0].nbytes == 8 * 4 * 60
        found = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for llm in (plain, guarded)]
    assert [output.token_ids for output in found[0]] == [output.token_ids for output in found[1]]
