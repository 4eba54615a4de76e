"""Random workloads run through the engine's loop, and a reference without a cache checks every token."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.fake_runner import (
    FakeRunner,
    Predicate,
    add_pooled,
    expected_completion,
    expected_scores,
    expected_states,
    make_engine,
)

from nanovllm.engine.block_manager import (
    NO_STATES,
    NO_WINDOWS,
    Block,
    BlockManager,
    Snapshots,
    WindowGroups,
    hash_block,
)
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Pooling, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

# The least that a run of a million tokens must meet, which is about half of what it does meet.
AT_LEAST = {
    "hits": 14_000, "cached tokens": 300_000, "preemptions": 700, "chunks": 50_000, "evictions": 30_000,
    "same-step hits": 250, "refused": 4_000, "aborted": 600, "stop": 10_000, "length": 16_000,
    "error": 200, "stopped by a predicate": 1_500, "ended by max_model_len": 5_000,
    "forks": 3_500, "copies": 2_000, "scored": 20_000, "contexts": 150, "pooled": 20_000,
    "pooled in chunks": 200, "preempted while it pooled": 5, "pooled nothing finite": 50,
    "given back": 9_000, "shortened hits": 400,
    "snapshots": 1_000, "loads": 3_000, "reused snapshots": 350, "skipped snapshots": 50, "lost snapshots": 500,
    "waits for a snapshot": 400, "broken by sharing": 500,
}  # fmt: skip


class CountingBlockManager(BlockManager):
    """Counts the registered blocks that were reused for something else, the contexts that were shared, the logical
    blocks of window groups that were given back, the prefixes that could be shared only in part, because a window was
    gone, and what became of snapshots."""

    num_evictions = num_contexts = num_given_back = num_shortened = 0
    num_reused = num_skipped = num_waits = num_lost = 0

    def take_snapshot(self, seq: Sequence, copies: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self.num_reused += all(block is not None for block in self._snapshot_owners.values())
        pairs = super().take_snapshot(seq, copies)
        self.num_skipped += not pairs
        return pairs

    def begins_too_early(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        waits = super().begins_too_early(seq, copies)
        self.num_waits += waits
        return waits

    def _unregister(self, block: Block) -> None:
        self.num_lost += block.snapshot < 0
        super()._unregister(block)

    def free_behind_window(self, seq: Sequence) -> None:
        before = seq.num_behind_window
        super().free_behind_window(seq)
        self.num_given_back += seq.num_behind_window - before

    def allocate(self, seq: Sequence) -> list[tuple[int, int]]:
        loads = super().allocate(seq)
        windows, self.windows = self.windows, NO_WINDOWS
        self.num_shortened += self.num_cached_tokens(seq) > seq.num_computed_tokens
        self.windows = windows
        return loads

    def fork(self, source: Sequence, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        self.num_contexts += source not in seq.siblings
        return super().fork(source, seq, num_tokens)

    def _take_free_block(self) -> int:
        self.num_evictions += self.blocks[next(iter(self._free))].hash is not None
        return super()._take_free_block()


@dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    modulus: int  # the stop predicate's; 0 for none
    first_scored: int = 1
    pooling: Pooling | None = None
    expected: tuple[list[int], str] = field(default_factory=lambda: ([], ""))

    def stop_predicate(self) -> Predicate | None:
        """Depends on every token in order, as stop strings do."""
        if not self.modulus:
            return None
        state = 1

        def stops(token_id: int) -> bool:
            nonlocal state
            state = (state * 31 + token_id + 1) % 65537
            return state % self.modulus == 0

        return stops


class Workload:
    """One engine of random shape and the random requests it is given."""

    def __init__(self, seed: str, overlap: bool):
        self.seed, self.overlap = seed, overlap
        self.rng = rng = random.Random(seed)
        self.vocab_size = rng.choice([2, 5, 30, 1000])
        block_size = rng.randint(1, 16)
        max_model_len = rng.randint(2, 80)
        max_num_batched_tokens = rng.choice([1, 2, 3, 7, 16, 64, 256])
        windows, snapshots = NO_WINDOWS, NO_STATES
        if rng.random() < 1 / 3:
            snapshots = Snapshots(True, rng.randint(0, 4), rng.choice([0, 1, 2, 8]))
        elif rng.random() < 0.5:
            windows = WindowGroups(rng.randint(1, 3), rng.randint(1, 24), rng.choice([1, 1, 4]), max_num_batched_tokens)
        longest = windows.max_num_blocks(max_model_len - 1, block_size)
        num_blocks = rng.choice([max(1, longest // 2), longest, longest + rng.randint(0, 5), 2 * longest, 8 * longest])
        max_num_seqs = rng.choice([1, 2, 3, 5, 8, 16, 64])
        self.engine = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=frozenset(rng.sample(range(self.vocab_size), min(rng.randint(0, 2), self.vocab_size - 1))),
            keep_log=False,
            max_num_batched_tokens=max_num_batched_tokens,
            windows=windows,
            snapshots=snapshots,
            max_num_seqs=max_num_seqs,
            overlap=overlap,
            enable_prefix_caching=rng.random() < 0.9,
            max_tokens_beside_decodes=rng.choice([1, 4, 32, 2**31]),
            is_mirrored=rng.random() < 0.6,
        )
        self.runner: FakeRunner = self.engine.runner
        _replace_block_manager(
            self.engine,
            CountingBlockManager(
                num_blocks, block_size, self.engine.config.enable_prefix_caching, windows=windows, snapshots=snapshots
            ),
        )
        # Short prompts that grow long meet preemption, long ones that differ in their ends meet the cache.
        self.grows = rng.random() < 0.5
        longest_prefix = max_model_len // 8 if self.grows else max_model_len - 2
        self.prefixes = [self.random_tokens(rng.randint(0, longest_prefix)) for _ in range(rng.randint(1, 4))]
        self.context: list[int] = []  # of the request before, if its continuation is scored
        self.break_rate = rng.choice([0, 0, 0, 0, 100])
        self.sharing_break_rate = random.Random(f"{seed} sharing").choice([0, 0, 30])
        self.runner.is_broken = lambda seq: (
            self.is_broken(seq.seq_id, 0 if seq.pooling else seq.num_computed_tokens) or self.breaks_by_sharing(seq)
        )
        self.unfinished: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:  # pytest prints it beside a failure
        return f"Workload({self.seed!r}, {self.overlap})"

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]

    def is_broken(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the logits after that many tokens of a request are NaN; 0 asks about all states of one that pools."""
        rate = self.break_rate if num_tokens else self.break_rate // 10
        return rate > 0 and hash((seq_id, num_tokens)) % rate == 0

    def breaks_by_sharing(self, seq: Sequence) -> bool:
        """Whether the keys that others computed for a sequence make its logits NaN. Then it must begin again."""
        rate = self.sharing_break_rate
        is_broken = rate > 0 and seq.num_shared_tokens > 0 and hash((seq.seq_id, seq.num_computed_tokens)) % rate == 0
        self.counts["broken by sharing"] += is_broken
        return is_broken

    def random_request(self) -> Request:
        rng, info = self.rng, self.engine.info
        prefix = rng.choice(self.prefixes)
        prompt = prefix[: rng.randint(0, len(prefix))] if rng.random() < 0.3 else prefix
        prompt = (prompt + self.random_tokens(rng.randint(1, 8)))[: info.max_model_len + 1]
        if rng.random() < 0.9:  # the rest may not fit
            prompt = prompt[: max(1, info.max_model_len - rng.randint(1, 16))]
        max_tokens = rng.randint(1, 80) if self.grows else rng.choice([1, 2, rng.randint(1, 12)])
        if rng.random() < 0.2:
            tokens, layers = rng.choice(["last", "last", "first", "mean", "all"]), rng.choice([(), (), (1, 2)])
            prompt = (prompt + self.random_tokens(rng.choice([0, 0, 40])))[: info.max_model_len]
            return Request(prompt, SamplingParams(max_tokens=1), 0, pooling=Pooling(tokens, layers))
        is_scored = rng.random() < (0.5 if self.context else 0.1)
        if is_scored and self.context:  # another continuation
            prompt = (self.context + self.random_tokens(rng.randint(1, 20)))[: info.max_model_len]
        first_scored = rng.randint(1, max(1, len(prompt) - 1))
        if is_scored and self.context and rng.random() < 0.9:
            first_scored = min(len(self.context), len(prompt) - 1)
        self.context = prompt[:first_scored] if is_scored and len(prompt) > 1 else []
        if self.context and rng.random() < 0.7:
            max_tokens = 0
        return Request(
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
                stop_token_ids=self.random_tokens(rng.randint(0, 2)),
                ignore_eos=rng.random() < 0.5,
                n=rng.choice([2, 3, 9]) if rng.random() < 0.1 and max_tokens else 1,
                prompt_logprobs=0 if is_scored else None,
            ),
            first_scored=first_scored,
            modulus=rng.randint(2, 30) if rng.random() < 0.3 else 0,
        )

    def run(self) -> Counter[str]:
        rng, engine = self.rng, self.engine
        num_to_come, rate = rng.randint(20, 120), rng.choice([0.5, 3, 1000])
        while num_to_come or not engine.is_finished():
            while num_to_come and rng.random() < rate / (1 + rate):
                num_to_come -= 1
                self.add(self.random_request())
            for seq in engine.step():
                self.check(seq)
            if rng.random() < 0.01:
                self.abort(rng.randrange(engine._num_sequences + 1))
            if self.runner.num_steps % 8 == 0:
                engine.scheduler.check_integrity()
        self.check_idle()
        return self.count()

    def add(self, request: Request) -> None:
        info = self.engine.info
        num_generated = 0 if request.pooling else request.params.max_tokens
        max_num_tokens = min(len(request.prompt) + num_generated, info.max_model_len) - (request.pooling is None)
        longest = info.max_model_len - (num_generated > 0)
        num_blocks = info.windows.max_num_blocks(max_num_tokens, info.kvcache_block_size)
        if len(request.prompt) > longest or num_blocks > info.num_kvcache_blocks:
            with pytest.raises(ValueError):
                self.submit(request)
            self.counts["refused"] += 1
            return
        if request.pooling is not None:
            seq_id = self.submit(request)
            self.unfinished[seq_id] = replace(
                request, expected=([], "error" if self.is_broken(seq_id, 0) else "length")
            )
            return
        tokens, reason = expected_completion(request.prompt, request.params, info, request.stop_predicate())
        if self.rng.random() < 0.2:  # the next turn of a conversation begins with this one
            self.prefixes[self.rng.randrange(len(self.prefixes))] = request.prompt + tokens
        n = request.params.n
        predicates = [request.stop_predicate() for _ in range(n)] if request.modulus else None
        first_id = self.submit(request, predicates)
        for seq_id in range(first_id, first_id + n):
            expected = tokens, reason
            for index in range(len(tokens)):
                if self.is_broken(seq_id, len(request.prompt) + index):
                    expected = tokens[:index], "error"
                    break
            self.unfinished[seq_id] = replace(request, expected=expected)

    def submit(self, request: Request, predicates: list[Predicate | None] | None = None) -> int:
        if request.pooling is not None:
            return add_pooled(self.engine, request.prompt, request.pooling)
        return self.engine.add_request(request.prompt, request.params, predicates, request.first_scored)

    def abort(self, seq_id: int) -> None:
        seq = self.engine.abort(seq_id)
        request = self.unfinished.pop(seq_id, None)
        assert (seq is None) == (request is None)
        if seq is not None:
            tokens, _ = request.expected
            assert seq.finish_reason == "abort"
            assert seq.completion_token_ids == tokens[: len(seq.completion_token_ids)]
            self.counts["aborted"] += 1

    def check(self, seq: Sequence) -> None:
        request = self.unfinished.pop(seq.seq_id)
        assert list(seq.token_ids[: seq.num_prompt_tokens]) == request.prompt
        assert (seq.completion_token_ids, seq.finish_reason) == request.expected, seq
        is_scored = request.params.prompt_logprobs is not None and seq.seq_id == (seq.siblings or [seq])[0].seq_id
        info = self.engine.info
        assert seq.prompt_logprobs == (
            expected_scores(request.prompt, request.first_scored, info) if is_scored else b""
        )
        assert (seq.error is None) == (seq.finish_reason != "error")
        assert seq.status is SequenceStatus.FINISHED and seq.num_tokens == len(seq.token_ids)
        assert seq.num_cached_tokens < seq.num_prompt_tokens or seq.siblings, "nothing was left to compute"
        self.counts[seq.finish_reason] += 1
        self.counts["hits"] += seq.num_cached_tokens > 0
        self.counts["cached tokens"] += seq.num_cached_tokens
        self.counts["generated"] += len(seq.completion_token_ids)
        if seq.pooling is not None:
            self.check_states(seq, request)
        elif seq.finish_reason == "stop":
            self.counts["stopped by a predicate"] += seq.token_ids[-1] not in seq.stop_token_ids
        elif seq.finish_reason == "length":
            self.counts["ended by max_model_len"] += len(seq.completion_token_ids) < request.params.max_tokens

    def check_states(self, seq: Sequence, request: Request) -> None:
        self.counts["pooled in chunks"] += len(seq.states) > 1
        self.counts["preempted while it pooled"] += seq.num_preemptions > 0
        if seq.error is not None:
            self.counts["pooled nothing finite"] += 1
            return
        states = np.concatenate(seq.states)
        states = states.sum(0, keepdims=True) if request.pooling.tokens == "mean" else states
        assert np.array_equal(states, expected_states(request.prompt, request.pooling, self.engine.info)), seq

    def check_idle(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        assert not self.unfinished and not scheduler.running and not scheduler.waiting and not self.runner.in_flight
        assert scheduler.block_manager.num_free_blocks == self.engine.info.num_kvcache_blocks

    def count(self) -> Counter[str]:
        self.counts.update(
            {
                "computed": self.runner.num_computed_tokens,
                "chunks": self.runner.num_chunks,
                "same-step hits": self.runner.num_same_step_hits,
                "forks": self.runner.num_forks,
                "copies": self.runner.num_copies,
                "scored": self.runner.num_scored,
                "pooled": self.runner.num_pooled,
                "contexts": self.engine.scheduler.block_manager.num_contexts,
                "preemptions": self.engine.scheduler_stats.num_preemptions,
                "evictions": self.engine.scheduler.block_manager.num_evictions,
                "given back": self.engine.scheduler.block_manager.num_given_back,
                "shortened hits": self.engine.scheduler.block_manager.num_shortened,
                "snapshots": self.runner.num_snapshots,
                "loads": self.runner.num_loads,
                "reused snapshots": self.engine.scheduler.block_manager.num_reused,
                "skipped snapshots": self.engine.scheduler.block_manager.num_skipped,
                "waits for a snapshot": self.engine.scheduler.block_manager.num_waits,
                "lost snapshots": self.engine.scheduler.block_manager.num_lost,
            }
        )
        return self.counts


def _replace_block_manager(engine: LLMEngine, block_manager: BlockManager) -> None:
    old = engine.scheduler
    engine.scheduler = Scheduler(
        block_manager,
        old.max_num_batched_tokens,
        old.max_num_seqs,
        engine.scheduler_stats,
        old.max_tokens_beside_decodes,
    )


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_every_token_is_the_one_its_true_prefix_gives(overlap, count):
    """Each wrong slot, stale block, lost token or wrong hit changes a token here."""
    counts: Counter[str] = Counter()
    index, num_tokens = 0, count(100_000, 1_000_000)  # computed and generated
    while counts["computed"] + counts["generated"] < num_tokens:
        counts += Workload(f"{overlap} {index}", overlap).run()
        index += 1
    print(f"\n{index} workloads: {dict(counts)}")
    expected = {name: least * num_tokens / 1e6 for name, least in AT_LEAST.items()}
    missed = {name: counts[name] for name, number in expected.items() if counts[name] < number - 2 * number**0.5}
    assert not missed, f"the workloads met too little of {missed}"


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_a_weak_hash_never_makes_a_wrong_hit(overlap, count):
    """A hash proves nothing: with 256 hashes for thousands of prefixes, only the tokens and the parent decide."""
    rng = random.Random(overlap)
    engine = make_engine(
        num_blocks=160, block_size=2, vocab_size=3, max_num_seqs=32, max_num_batched_tokens=64, overlap=overlap,
        keep_log=False,
    )  # fmt: skip
    _replace_block_manager(engine, BlockManager(160, 2, block_hash=lambda *block: hash_block(*block) & 0xFF))
    expected: dict[tuple[int, ...], list[int]] = {}
    params = SamplingParams(max_tokens=2)
    num_hits = 0
    num_requests = count(10_000, 100_000)
    for _ in range(num_requests // 50):
        for _ in range(50):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 10))]
            if tuple(prompt) not in expected:
                expected[tuple(prompt)] = expected_completion(prompt, params, engine.info)[0]
            engine.add_request(prompt, params)
        while not engine.is_finished():
            for seq in engine.step():
                assert seq.completion_token_ids == expected[tuple(seq.token_ids[: seq.num_prompt_tokens])], seq
                num_hits += seq.num_cached_tokens > 0
        engine.scheduler.check_integrity()
    assert len(expected) > num_requests / 10 and num_hits > 0.3 * num_requests, (len(expected), num_hits)
