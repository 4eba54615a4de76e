"""A Runner without a model, and the reference for the answers of an engine on top of it. It needs no torch.

Its "KV cache" holds one number per slot, the key of the token written there. The key depends on every token before it,
read through the block table. Its "logits" are a hash of all keys of the prefix, read in the same way, and a "hidden
state" is made of the token's key. Any wrong slot, stale block, lost token or wrong hit changes the answer.

In a model with window groups, each of them has a key per token too. The key of a token also depends on the first keys
in its windows, and the logits on all keys in the last token's windows.

In a model with recurrent states, each entry and each snapshot has a state, a number that each token extends. The key of
a token also depends on the state after it. So a stale, wrong or lost state, or one that was extended twice, changes the
answer too.

An adapter is a number, in place of a LoRARequest's path or the only one of its tensors. Tokens that are computed with
it have the keys and states that `with_adapter` of the tokens would have.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.block_manager import NO_STATES, NO_WINDOWS, Snapshots, WindowGroups
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.runner import Runner, RunnerInfo
from nanovllm.engine.sequence import Pooling, Sequence
from nanovllm.engine.step import Chunk, Step, StepOutput, TokenNumbers
from nanovllm.lora import LoRARequest
from nanovllm.parallel.worker import Worker, fingerprint
from nanovllm.sampling_params import SamplingParams

Predicate = Callable[[int], bool]


class FakeStep:
    def __init__(
        self, runner: "FakeRunner", token_ids: list[int], scores: TokenNumbers, states: tuple[np.ndarray, ...],
        sequences: list[Sequence],
    ):  # fmt: skip
        self._runner, self._token_ids, self._scores, self._states = runner, token_ids, scores, states
        self.sequences = sequences

    def wait(self) -> StepOutput:
        assert self._runner.in_flight.popleft() is self, "steps must be committed in the order of their launch"
        if self._runner.wait_error is not None:
            error, self._runner.wait_error = self._runner.wait_error, None
            raise error
        return StepOutput(self._token_ids, prompt_logprobs=self._scores, states=self._states)


class FakeRunner(Runner):
    """Computes each step when it is launched, as a device would in stream order.

    Attributes for tests to set: `launch_error` and `wait_error`, raised once by the next launch or wait; `is_broken`,
    which says whose logits or hidden states are NaN. `log`, if asked for, holds one list per step, with (seq_id, number
    of new tokens, samples) per row.
    """

    def __init__(self, info: RunnerInfo, max_num_seqs: int, keep_log: bool = False):
        self.info = info
        self.keys: list[int | None] = [None] * (info.num_kvcache_blocks * info.kvcache_block_size)
        self.last_token_ids: list[int | None] = [None] * max_num_seqs
        self.adapters: dict[int, int] = {}  # the adapter in each slot; slot 0 is the weights
        self.num_loaded = 0
        self.states: list[int] = [-1] * (max_num_seqs + 1 + info.snapshots.num_snapshots)
        self.saved_snapshots: set[int] = set()
        self.in_flight: deque[FakeStep] = deque()
        self.log: list[list[tuple[int, int, bool]]] | None = [] if keep_log else None
        self.launch_error: BaseException | None = None
        self.wait_error: BaseException | None = None
        self.is_broken: Callable[[Sequence], bool] = lambda seq: False
        self.is_closed = False
        self.num_steps = self.num_computed_tokens = self.num_sampled_tokens = 0
        self.num_chunks = self.num_same_step_hits = self.num_copies = self.num_forks = 0
        self.num_scored = self.num_pooled = self.num_loads = self.num_snapshots = 0

    def scheduler_renewed(self) -> None:
        self.saved_snapshots.clear()

    def set_adapter(self, slot: int, request: LoRARequest | None) -> None:
        number = 0 if request is None else number_of_adapter(request)
        if number < 0:
            raise ValueError(f"adapter {request.lora_name!r} does not fit")
        in_use = {seq.adapter.slot for step in self.in_flight for seq in step.sequences}
        assert slot not in in_use and not (slot == 0 and self.in_flight), f"slot {slot} is in use"
        self.adapters[slot] = number
        self.num_loaded += 1

    def launch(self, step: Step) -> FakeStep:
        work = step.chunks
        if self.launch_error is not None:
            error, self.launch_error = self.launch_error, None
            raise error
        assert work, "an empty step was launched"
        entries = [seq.entry for seq, _, _ in work]
        assert len(set(entries)) == len(entries) and min(entries) >= 0, f"two sequences in one entry: {entries}"
        num_single = [chunk.num_new_tokens == 1 for chunk in work] + [False]
        assert num_single.index(False) == step.num_decodes, "decodes are the leading chunks of a single new token"
        if self.log is not None:
            self.log.append([(seq.seq_id, num_new_tokens, samples) for seq, num_new_tokens, samples in work])
        self._check_forks(work)
        self._load_states(step)
        self._store(work)
        self._copy(step)
        self._copy_states(step)
        sampled, leader = [], work[0].seq
        for seq, num_new_tokens, samples in work:
            leader = seq if num_new_tokens else leader
            if samples:
                # The engine does not read the number of a row that pools.
                sampled.append(self._sample(seq, leader) if seq.pooling is None else -1)
        self.num_steps += 1
        self.num_sampled_tokens += len(sampled)
        self.num_chunks += len(work) - len(sampled)
        launched = FakeStep(self, sampled, self._score(step), self._pool(step), [chunk.seq for chunk in work])
        self.in_flight.append(launched)
        return launched

    def _check_forks(self, work: list[Chunk]) -> None:
        """A row that computes no token samples from the row before it, which must have the same prompt."""
        leader = None
        for seq, num_new_tokens, samples in work:
            if num_new_tokens > 0:
                leader = seq if samples else None
                continue
            self.num_forks += 1
            assert samples and leader is not None and seq in leader.siblings, f"{seq} samples from another's logits"
            assert seq.num_computed_tokens == leader.num_computed_tokens == seq.num_prompt_tokens

    def _store(self, work: list[Chunk]) -> None:
        """All keys are written before anything is sampled, as every layer stores keys before it attends.

        A key is made from the one before it, so a row that shares a block of this step must come after the row that
        writes it. The order of admission ensures that.
        """
        keys, block_size = self.keys, self.info.kvcache_block_size
        written_blocks: set[int] = set()
        # A layer of the model writes all keys of the step before it reads any, in any order.
        for seq, num_new_tokens, _ in work:
            for position in range(seq.num_computed_tokens - num_new_tokens, seq.num_computed_tokens):
                for group in range(1 + self.info.windows.num_groups):
                    keys[self._slot(seq, group, position)] = None
        for seq, num_new_tokens, _ in work:
            table, token_ids, end = seq.block_table, seq.token_ids, seq.num_computed_tokens
            start = end - num_new_tokens
            assert num_new_tokens >= 0 and start >= 0, f"{num_new_tokens} new tokens for {seq}"
            if num_new_tokens == 0:
                continue
            key = state = 0
            if start > 0:
                state = self.states[seq.entry]
                block = table[(start - 1) // block_size]
                key = keys[block * block_size + (start - 1) % block_size]
                self.num_same_step_hits += block in written_blocks
            assert seq.adapter.slot == 0 or not self.adapters.get(0), "slots add to the model's own weights"
            adapter = self.adapters.get(seq.adapter.slot, 0)
            for position in range(start, end):
                token_id = token_ids[position] if position < len(token_ids) else self._in_flight_token(seq, position)
                token_id = with_adapter(token_id, adapter)
                state = next_state(state, token_id, self.info)
                key = hash((key, token_id, state, *self._first_in_windows(seq, position)))
                for group in range(1 + self.info.windows.num_groups):
                    keys[self._slot(seq, group, position)] = key_of_group(key, group)
            self.states[seq.entry] = state
            written_blocks.update(table[start // block_size : (end - 1) // block_size + 1])
            self.num_computed_tokens += num_new_tokens

    def _slot(self, seq: Sequence, group: int, position: int) -> int:
        block_size = self.info.kvcache_block_size
        index = position // block_size
        block = seq.window_table[index][group - 1] if group else seq.block_table[index]
        return block * block_size + position % block_size

    def _first_in_windows(self, seq: Sequence, position: int) -> list[int | None]:
        """The first key that a query at `position` sees in each window group, before its own."""
        first = max(0, position + 1 - self.info.windows.window)
        groups = range(1, 1 + self.info.windows.num_groups) if first < position else ()
        return [self.keys[self._slot(seq, group, first)] for group in groups]

    def _copy(self, step: Step) -> None:
        keys, block_size = self.keys, self.info.kvcache_block_size
        for source, target in step.copies:
            assert source != target
            start = target * block_size
            keys[start : start + block_size] = keys[source * block_size : (source + 1) * block_size]
        self.num_copies += len(step.copies)

    def _load_states(self, step: Step) -> None:
        starts = {seq.entry: seq.num_computed_tokens - num_new_tokens for seq, num_new_tokens, _ in step.chunks}
        for snapshot, entry in step.state_loads:
            assert snapshot < 0 < starts[entry], f"{snapshot} is no snapshot, or {entry} begins from zero"
            assert snapshot in self.saved_snapshots, f"no earlier step saved snapshot {snapshot}"
        self._copy_states_of(step.state_loads)
        self.num_loads += len(step.state_loads)

    def _copy_states(self, step: Step) -> None:
        self._copy_states_of(step.state_copies)
        snapshots = [target for _, target in step.state_copies if target < 0]
        self.saved_snapshots.update(snapshots)
        self.num_snapshots += len(snapshots)

    def _copy_states_of(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """The device copies all pairs at once."""
        assert self.info.snapshots.has_states or not pairs, "the model has no states"
        sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
        assert len(targets) == len(pairs) and not targets & sources, (
            f"two copies to one place, or from a target: {pairs}"
        )
        assert all(
            -self.info.snapshots.num_snapshots <= place < len(self.last_token_ids) for place in targets | sources
        )
        for source, target in pairs:
            self.states[target] = self.states[source]

    def _score(self, step: Step) -> TokenNumbers:
        """A prompt token's numbers are made of the token and the key before it, which this step must compute."""
        keys, block_size = self.keys, self.info.kvcache_block_size
        computed_of = _computed_positions(step)
        data = b""
        for seq, start, end, ends in step.scored:
            if seq.pooling is not None:
                continue
            computed = computed_of[seq.seq_id]
            assert start < end <= seq.num_prompt_tokens and not (ends and seq.num_tokens > len(seq.token_ids))
            for position in range(start, end):
                assert position - 1 in computed, f"{seq} has no logits for token {position}"
                block = seq.block_table[(position - 1) // block_size]
                data += score_numbers(keys[block * block_size + (position - 1) % block_size], seq.token_ids[position])
            self.num_scored += end - start
        return TokenNumbers(data, 12)

    def _pool(self, step: Step) -> tuple[np.ndarray, ...]:
        """See StepOutput.states. The step must compute the tokens; if it pools only rows' last tokens, these rows must
        be among those that it samples from."""
        computed_of, samples = _computed_positions(step), {seq.seq_id: samples for seq, _, samples in step.chunks}
        every = []
        for kind, of_kind in step.pooled.items():
            rows = []
            for seq, start, end, ends in of_kind:
                computed, positions = computed_of[seq.seq_id], range(start - 1, end - 1)
                assert positions and positions[0] in computed and positions[-1] in computed
                assert samples[seq.seq_id] == kind.needs_row_only and ends == (end == seq.end_scored)
                states = np.stack([state_of(self.keys[self._slot(seq, 0, position)], kind) for position in positions])
                states = states.sum(0, keepdims=True) if kind.tokens == "mean" else states
                rows.append(np.full_like(states, np.nan) if self.is_broken(seq) else states)
                self.num_pooled += end - start
            every.append(np.concatenate(rows))
        return tuple(every)

    def _in_flight_token(self, seq: Sequence, position: int) -> int:
        """The token that the host does not know yet, from where the step before left it."""
        assert position == seq.num_computed_tokens - 1 == len(seq.token_ids), f"{seq} skips a token at {position}"
        return self.last_token_ids[seq.entry]

    def _sample(self, seq: Sequence, leader: Sequence) -> int:
        """leader: the sequence whose logits are sampled. A forked sibling has only the windows of its next query, and
        its last block may be copied later."""
        keys, block_size, num_keys = self.keys, self.info.kvcache_block_size, seq.num_computed_tokens
        prefix: list[int] = []
        for block in leader.block_table:
            prefix += keys[block * block_size : (block + 1) * block_size]
        windows = [
            keys[self._slot(leader, group, position)]
            for group in range(1, 1 + self.info.windows.num_groups)
            for position in range(max(0, num_keys - self.info.windows.window), num_keys)
        ]
        token_id = -1 if self.is_broken(seq) else _answer(prefix[:num_keys], windows, self.info)
        self.last_token_ids[seq.entry] = max(token_id, 0)
        return token_id

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.is_closed = True


def _computed_positions(step: Step) -> dict[int, range]:
    """The positions that a step computes of each sequence. In half a row, the chunk's copy of the sequence has them."""
    return {
        seq.seq_id: range(seq.num_computed_tokens - num_new_tokens, seq.num_computed_tokens)
        for seq, num_new_tokens, _ in step.chunks
    }


class MirroredRunner(FakeRunner):
    """Tells a Worker, as the driver of several ranks does, of all changes of the schedule. The worker notices if it
    would schedule other work."""

    def __init__(self, info: RunnerInfo, config: Config, max_num_seqs: int):
        super().__init__(info, max_num_seqs)
        self.of_worker = FakeRunner(info, max_num_seqs)
        self.worker = Worker(config, self.of_worker, rank=1)
        self.num_launched = self.num_committed = self.num_nothing = 0

    def launch(self, step: Step) -> FakeStep:
        self.num_launched += 1
        self.of_worker.is_broken = self.is_broken
        self.worker._launch(self.num_launched, fingerprint(step))
        return super().launch(step)

    def set_adapter(self, slot: int, request: LoRARequest | None) -> None:
        super().set_adapter(slot, request)
        self.of_worker.set_adapter(slot, request)

    def request_added(self, sequences: list[Sequence]) -> None:
        seq = sequences[0]
        self.worker._add(
            seq.seq_id, seq.token_ids, vars(seq.sampling_params), seq.max_length, seq.stop_token_ids, seq.seed,
            seq.next_scored, seq.is_constrained, seq.pooling, seq.adapter,
        )  # fmt: skip

    def request_aborted(self, seq: Sequence) -> None:
        self.worker._abort(seq.seq_id)

    def nothing_scheduled(self) -> None:
        self.num_nothing += 1
        self.worker._schedule_nothing()

    def step_committed(self, stopped: list[int], broken: list[int]) -> None:
        self.num_committed += 1
        self.worker._wait(self.num_committed)
        self.worker._commit(self.num_committed, stopped, broken)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    vocab_size: int = 1000,
    eos_token_ids: frozenset[int] = frozenset(),
    max_tokens_beside_decodes: int = 2**31,
    windows: WindowGroups = NO_WINDOWS,
    snapshots: Snapshots = NO_STATES,
    keep_log: bool = True,
    head: str = "lm",
    is_mirrored: bool = False,
    **options,
) -> LLMEngine:
    """An LLMEngine on a FakeRunner; `options` are Config's."""
    config = Config("fake", **options)
    info = RunnerInfo(num_blocks, block_size, max_model_len, vocab_size, eos_token_ids)
    info = replace(
        info,
        max_tokens_beside_decodes=max_tokens_beside_decodes,
        windows=windows,
        snapshots=snapshots,
        head=head,
        num_layers=2,
    )
    max_num_seqs = config.max_num_seqs or info.max_num_seqs
    runner = MirroredRunner(info, config, max_num_seqs) if is_mirrored else FakeRunner(info, max_num_seqs, keep_log)
    return LLMEngine(config, runner=runner)


def add_pooled(engine: LLMEngine, prompt: list[int], kind: Pooling) -> int:
    """Queues a request that pools, and returns its id."""
    return engine.add_pooled(prompt, kind)


def run_to_end(engine: LLMEngine) -> dict[int, Sequence]:
    """Steps until no request is left, and checks the books after every step. Returns the finished sequences by id."""
    finished: dict[int, Sequence] = {}
    while not engine.is_finished():
        for seq in engine.step():
            assert seq.seq_id not in finished
            finished[seq.seq_id] = seq
        engine.scheduler.check_integrity()
    block_manager = engine.scheduler.block_manager
    assert block_manager.num_free_blocks == len(block_manager.blocks), "idle, but not all blocks are free"
    assert not engine.scheduler.running and not engine.scheduler.waiting
    return finished


def expected_completion(
    prompt: list[int], params: SamplingParams, info: RunnerInfo, stop_predicate: Predicate | None = None,
    adapter: int = 0,
) -> tuple[list[int], str]:  # fmt: skip
    """The right completion of a request, computed alone and without a cache: (token ids, finish reason)."""
    prompt = [with_adapter(token_id, adapter) for token_id in prompt]
    stop_token_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else info.eos_token_ids)
    keys, state = keys_of(prompt, info), states_of(prompt, info)[-1]
    completion: list[int] = []
    if params.max_tokens == 0:
        return completion, "length"
    while True:
        groups = range(1, 1 + info.windows.num_groups)
        in_windows = [key_of_group(key, group) for group in groups for key in keys[-info.windows.window :]]
        token_id = _answer(keys, in_windows, info)
        completion.append(token_id)
        computed = with_adapter(token_id, adapter)
        state = next_state(state, computed, info)
        _extend(keys, computed, state, info)
        says_stop = stop_predicate is not None and stop_predicate(token_id)
        if token_id in stop_token_ids and len(completion) > params.min_tokens:
            return completion, "stop"
        if says_stop:
            return completion, "stop"
        if len(completion) == params.max_tokens or len(prompt) + len(completion) == info.max_model_len:
            return completion, "length"


def score_numbers(key: int, token_id: int) -> bytes:
    """The numbers that take the place of the log-probability of a token after a prefix with this key."""
    return np.array([hash((key, token_id)) % 2**31, token_id, 0], np.int32).tobytes()


def expected_scores(prompt: list[int], first: int, info: RunnerInfo, adapter: int = 0) -> bytes:
    """The numbers of a prompt's tokens from `first` on."""
    keys = [0, *keys_of([with_adapter(token_id, adapter) for token_id in prompt], info)]
    return b"".join(score_numbers(keys[position], prompt[position]) for position in range(first, len(prompt)))


def state_of(key: int, kind: Pooling) -> np.ndarray:
    """The numbers that take the place of the hidden state of a token with this key. Sums of them are exact."""
    number = hash((key, kind.layers, kind.uses_head))
    return np.array([number % 1000, number // 1000 % 1000], np.float32)


def expected_states(prompt: list[int], kind: Pooling, info: RunnerInfo) -> np.ndarray:
    """What a request that pools should return, with a sum for the mean."""
    states = np.stack([state_of(key, kind) for key in keys_of(prompt, info)])
    return {"last": states[-1:], "first": states[:1], "mean": states.sum(0, keepdims=True), "all": states}[kind.tokens]


def number_of_adapter(request: LoRARequest) -> int:
    return int(request.lora_path) if request.tensors is None else request.tensors["number"]


def with_adapter(token_id: int, adapter: int) -> int:
    return token_id + 2**20 * adapter


def key_of_group(key: int, group: int) -> int:
    return hash((key, group)) if group else key


def keys_of(token_ids: list[int], info: RunnerInfo) -> list[int]:
    """The keys of group 0."""
    keys: list[int] = []
    for token_id, state in zip(token_ids, states_of(token_ids, info), strict=True):
        _extend(keys, token_id, state, info)
    return keys


def states_of(token_ids: list[int], info: RunnerInfo) -> list[int]:
    """The recurrent state after each token."""
    return list(accumulate(token_ids, lambda state, token_id: next_state(state, token_id, info), initial=0))[1:]


def next_state(state: int, token_id: int, info: RunnerInfo) -> int:
    return hash((state, token_id)) if info.snapshots.has_states else 0


def _extend(keys: list[int], token_id: int, state: int, info: RunnerInfo) -> None:
    first = max(0, len(keys) + 1 - info.windows.window)
    groups = range(1, 1 + info.windows.num_groups) if first < len(keys) else ()
    keys.append(
        hash((keys[-1] if keys else 0, token_id, state, *(key_of_group(keys[first], group) for group in groups)))
    )


def _answer(keys: list[int], in_windows: list[int], info: RunnerInfo) -> int:
    """The token after a prefix with these keys."""
    return hash((*keys, *in_windows)) % info.vocab_size
