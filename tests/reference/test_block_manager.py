"""The block manager against a model of it without hashes: random operations, and every state of a small pool."""

import pickle
import time
from array import array
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.long import some

from nanovllm.engine.block_manager import NO_STATES, NO_WINDOWS, BlockManager, Snapshots, WindowGroups, hash_block
from nanovllm.engine.sequence import Sequence
from nanovllm.models.config import cache_places


def make_sequence(tokens, seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, list(tokens), None, max_length=1000)


@dataclass(eq=False)
class Registration:
    """An entry that the cache should have: `block` holds `prefix`'s last tokens, and was reached through `parent`.
    `window` are the window groups' blocks for these tokens, `snapshot` is the number of the state after them."""

    prefix: bytes
    block: int
    parent: "Registration | None"
    window: tuple[int, ...] = ()
    snapshot: int = 0


class Books:
    """A BlockManager, and beside it the state that it should have, kept in the plainest way.

    `cache` knows prefixes by themselves (by `key_of`, which a weak hash makes ambiguous), `free` is a list, and
    `memory` says for each slot which prefix's last token was written there. `pool` has the snapshots and the entries
    that own them, least recently used first. `states` says which prefix a snapshot covers. `copies` are the copies of
    states in the step under construction. Tokens are below 256.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        has_weak_hash: bool = False,
        windows: WindowGroups = NO_WINDOWS,
        snapshots: Snapshots = NO_STATES,
    ):
        self.block_size, self.windows, self.snapshots = block_size, windows, snapshots
        self.block_hash = weak_hash if has_weak_hash else hash_block
        self.manager = BlockManager(num_blocks, block_size, True, self.block_hash, windows, snapshots)
        self.free = list(range(num_blocks))
        self.cache: dict[object, Registration] = {}
        self.memory: dict[int, bytes] = {}
        self.pool: list[tuple[int, Registration | None]] = [(n, None) for n in range(-snapshots.num_snapshots, 0)]
        self.states: dict[int, bytes] = {}
        self.copies: list[tuple[int, int]] = []
        self.sequences: list[Sequence] = []
        self.tokens: dict[int, bytes] = {}  # includes tokens in flight, which the manager does not know
        self.registered: dict[int, list[Registration]] = {}  # of each sequence's leading full blocks

    # Operations

    def add(self, tokens: bytes) -> Sequence:
        seq_id = next(number for number in range(len(self.tokens) + 1) if number not in self.tokens)
        seq = make_sequence(tokens, seq_id)
        self.sequences.append(seq)
        seq.entry = seq_id
        self.tokens[seq_id] = bytes(tokens)
        self.registered[seq_id] = []
        return seq

    def admit(self, seq: Sequence) -> bool:
        tokens = self.tokens[seq.seq_id]
        shared, parent = [], None
        for end in range(self.block_size, len(tokens), self.block_size):
            found = self.cache.get(self.key_of(tokens[:end]))
            if found is None or not self.is_equal(found, tokens[:end], parent):
                break
            shared.append(found)
            parent = found
        while not all(found.window for found in shared[self.first_seen(len(shared)) :]) and self.windows.num_groups:
            shared.pop()
        while self.snapshots.has_states and shared and not shared[-1].snapshot:
            shared.pop()
        snapshot = shared[-1].snapshot if shared else 0
        is_too_early = snapshot in [target for _, target in self.copies if target < 0]
        assert self.manager.begins_too_early(seq, self.copies) == is_too_early
        if is_too_early:
            return False
        blocks = [registration.block for registration in shared]
        first = self.first_seen(len(shared))
        window = [found.window if index >= first else () for index, found in enumerate(shared)]
        held = {*blocks, *(block for of_tokens in window for block in of_tokens)}
        num_blocks = -(-len(tokens) // self.block_size)
        num_groups = 1 + self.windows.num_groups
        num_taken = num_groups * (num_blocks - len(blocks)) + sum(block in self.free for block in held)
        can_allocate = num_taken <= len(self.free)
        assert self.manager.can_allocate(seq) == can_allocate
        for num_reserved in (1, 2):
            can_reserve = num_taken <= len(self.free) - num_reserved * num_groups
            assert self.manager.can_allocate(seq, num_reserved) == can_reserve
        if not can_allocate:
            return False
        assert self.manager.allocate(seq) == ([(snapshot, seq.entry)] if snapshot else [])
        self.free = [block for block in self.free if block not in held]
        assert seq.block_table == blocks + [self.take() for _ in range(num_blocks - len(blocks))]
        assert seq.window_table == (window if self.windows.num_groups else [])
        assert seq.num_computed_tokens == len(blocks) * self.block_size < seq.num_tokens, "nothing left to compute"
        self.registered[seq.seq_id] = shared
        if snapshot:
            assert self.states[snapshot] == tokens[: seq.num_computed_tokens], "a wrong state is loaded"
            self.use(snapshot, shared[-1])
        return True

    def advance(self, seq: Sequence, num_new_tokens: int) -> bool:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new_tokens
        num_taken = max(0, -(-end // self.block_size) - len(seq.block_table))
        num_logical, num_groups = -(-end // self.block_size) - len(seq.window_table), self.windows.num_groups
        can_append = num_taken + num_groups * num_logical <= len(self.free)
        assert self.manager.can_append(seq, num_new_tokens) == can_append
        if not can_append:
            return False
        table = seq.block_table + [self.take() for _ in range(num_taken)]
        window_table = list(seq.window_table)
        for _ in range(num_logical if num_groups else 0):
            window_table.append(tuple(self.take() for _ in range(num_groups)))
        self.manager.append(seq, num_new_tokens)
        assert seq.block_table == table and seq.window_table == window_table and seq.num_computed_tokens == end
        for position in range(start, end):
            index = position // self.block_size
            for block in (table[index], *(window_table[index] if num_groups else ())):
                assert self.manager.blocks[block].ref_count == 1, "a shared block is written"
                slot = block * self.block_size + position % self.block_size
                self.memory[slot] = self.tokens[seq.seq_id][: position + 1]
        self.register(seq)
        return True

    def take_snapshot(self, seq: Sequence) -> None:
        """Takes one of the state after the computed tokens. They must end a block, as directly after `advance`."""
        done = self.registered[seq.seq_id]
        if not self.snapshots.num_snapshots or len(done) * self.block_size != seq.num_computed_tokens:
            return
        entry, (snapshot, owner), pairs = done[-1], self.pool[0], []
        if not entry.snapshot and snapshot not in [target for _, target in self.copies]:
            if owner is not None:
                owner.snapshot = 0
            entry.snapshot, pairs = snapshot, [(seq.entry, snapshot)]
            self.states[snapshot] = self.tokens[seq.seq_id][: seq.num_computed_tokens]
            self.use(snapshot, entry)
        assert self.manager.take_snapshot(seq, self.copies) == pairs
        self.copies += pairs

    def launch_sampling(self, seq: Sequence, token: int) -> None:
        seq.num_tokens += 1
        self.tokens[seq.seq_id] += bytes([token])

    def commit(self, seq: Sequence) -> None:
        seq.token_ids.append(self.tokens[seq.seq_id][len(seq.token_ids)])
        self.manager.register_full_blocks(seq)
        self.register(seq)

    def give_back(self, seq: Sequence) -> None:
        """Frees what no later query sees."""
        end = max(seq.num_behind_window, self.first_seen(0, seq.num_computed_tokens))
        table = [() if index < end else blocks for index, blocks in enumerate(seq.window_table)]
        others = self.held_by([other for other in self.sequences if other is not seq])
        for index in range(seq.num_behind_window, end):
            blocks = [block for block in seq.window_table[index] if block not in others]
            if index * self.block_size < seq.num_prompt_tokens:
                self.free += reversed(blocks)
            else:  # reused first
                self.free[:0] = reversed(blocks)
        self.manager.free_behind_window(seq)
        assert seq.window_table == table

    def release(self, seq: Sequence) -> None:
        others = self.held_by([other for other in self.sequences if other is not seq])
        blocks = [block for of_tokens in reversed(seq.window_table) for block in reversed(of_tokens)]
        self.free += [block for block in [*blocks, *reversed(seq.block_table)] if block not in others]
        self.manager.deallocate(seq)
        assert not seq.block_table and not seq.window_table and seq.num_computed_tokens == 0
        self.registered[seq.seq_id] = []

    def forget(self, seq: Sequence) -> None:
        self.manager.forget(seq)
        if len(seq.token_ids) >= self.block_size:
            self.drop(self.cache.pop(self.key_of(self.tokens[seq.seq_id][: self.block_size]), None))

    def remove(self, seq: Sequence) -> None:
        self.sequences.remove(seq)
        del self.tokens[seq.seq_id], self.registered[seq.seq_id]

    # The model

    def first_seen(self, num_blocks: int, num_tokens: int = 0) -> int:
        """The first block that a query after some full blocks and tokens sees."""
        position = num_blocks * self.block_size + num_tokens
        tile = self.windows.num_keys_per_tile
        return max(0, position - self.windows.window + 1) // tile * tile // self.block_size

    def held_by(self, sequences: list[Sequence]) -> list[int]:
        tables = [seq.block_table for seq in sequences] + [blocks for seq in sequences for blocks in seq.window_table]
        return [block for table in tables for block in table]

    def key_of(self, prefix: bytes) -> object:
        return prefix if self.block_hash is hash_block else self.hash_of(prefix)

    def hash_of(self, prefix: bytes) -> int:
        value = 0
        for start in range(0, len(prefix), self.block_size):
            value = self.block_hash(value, array("i", list(prefix[start : start + self.block_size])))
        return value

    def is_equal(self, found: Registration, prefix: bytes, parent: Registration | None) -> bool:
        return found.parent is parent and found.prefix[-self.block_size :] == prefix[-self.block_size :]

    def take(self) -> int:
        block = self.free.pop(0)
        for key, entry in list(self.cache.items()):
            if entry.block == block:
                self.drop(self.cache.pop(key))
        for entry in self.cache.values():
            entry.window = () if block in entry.window else entry.window
        return block

    def use(self, snapshot: int, entry: Registration) -> None:
        self.pool = [each for each in self.pool if each[0] != snapshot] + [(snapshot, entry)]

    def drop(self, entry: Registration | None) -> None:
        """The cache no longer has this entry."""
        if entry is not None and entry.snapshot:
            self.pool = [(entry.snapshot, None)] + [each for each in self.pool if each[0] != entry.snapshot]
            entry.snapshot = 0

    def register(self, seq: Sequence) -> None:
        done, tokens = self.registered[seq.seq_id], self.tokens[seq.seq_id]
        num_known = min(seq.num_computed_tokens, len(seq.token_ids))
        for index in range(len(done), num_known // self.block_size):
            prefix, parent = tokens[: (index + 1) * self.block_size], done[-1] if done else None
            found = self.cache.get(self.key_of(prefix))
            if found is None or not self.is_equal(found, prefix, parent):
                self.drop(found)
                found = self.cache[self.key_of(prefix)] = Registration(prefix, seq.block_table[index], parent)
            if self.windows.num_groups:
                found.window = found.window or seq.window_table[index]
            done.append(found)

    # The laws

    def check(self) -> None:
        manager, size = self.manager, self.block_size
        manager.check_integrity(self.sequences)
        tables = self.held_by(self.sequences)
        assert list(manager._free) == self.free, "the free list is not in the order of release"
        assert not set(self.free) & set(tables)
        assert manager.num_free_blocks + len(set(tables)) == len(manager.blocks), "free + used is not the total"
        for block in manager.blocks:
            assert block.ref_count == tables.count(block.block_id)
        self.check_cache()
        for seq in self.sequences:
            tokens = self.tokens[seq.seq_id]
            for position in range(seq.num_computed_tokens):
                slot = seq.block_table[position // size] * size + position % size
                assert self.memory[slot] == tokens[: position + 1], f"{seq} reads a wrong slot at {position}"
                is_seen = position > seq.num_computed_tokens - self.windows.window
                if is_seen and self.windows.num_groups:
                    assert len(seq.window_table[position // size]) == self.windows.num_groups, "a window is gone"
                for block in seq.window_table[position // size] if is_seen and self.windows.num_groups else ():
                    found = self.memory[block * size + position % size]
                    assert found == tokens[: position + 1], f"{seq} reads a wrong slot of a window at {position}"

    def check_cache(self) -> None:
        """Every registered hash leads to a block that holds exactly the chain of tokens it names."""
        blocks, size = self.manager.blocks, self.block_size
        entries = {entry.block: entry for entry in self.cache.values()}
        owners = [(number, entry.block if entry else None) for number, entry in self.pool]
        assert [(n, block.block_id if block else None) for n, block in self.manager._snapshot_owners.items()] == owners
        assert {block.block_id for block in blocks if block.hash is not None} == set(entries)
        assert len(self.manager._registered) == len(entries) == len(self.cache)
        by_serial = {block.serial: block for block in blocks if block.hash is not None}
        assert len(by_serial) == len(entries), "a serial number was used twice"
        for block_id, entry in entries.items():
            block, prefix = blocks[block_id], entry.prefix
            assert block.hash == self.hash_of(prefix)
            for offset in range(size):
                end = len(prefix) - size + offset + 1
                for cached in (block_id, *entry.window):
                    assert self.memory[cached * size + offset] == prefix[:end], "a cached block was overwritten"
            assert block.window == entry.window and block.snapshot == entry.snapshot
            assert not block.snapshot or self.states[block.snapshot] == prefix, "a snapshot of another prefix"
            chain = block.token_ids
            while block.parent in by_serial:
                block = by_serial[block.parent]
                chain = block.token_ids + chain
            # A chain whose beginning was reused can no longer be reached, but its entries must still be true.
            assert bytes(list(chain)) == prefix[-len(chain) :]
            assert block.parent or len(chain) == len(prefix)


def weak_hash(parent_hash: int, token_ids: array) -> int:
    return hash_block(parent_hash, token_ids) & 3


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences come, grow, share, are preempted and leave, in any order."""

    has_weak_hash, windows, has_states = False, NO_WINDOWS, False

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), num_snapshots=st.integers(1, 3))
    def start(self, num_blocks, block_size, num_snapshots):
        num_blocks *= 1 + self.windows.num_groups
        snapshots = Snapshots(True, num_snapshots) if self.has_states else NO_STATES
        self.books = Books(num_blocks, block_size, self.has_weak_hash, self.windows, snapshots)

    def pick(self, index: int, is_admitted: bool | None = None) -> Sequence | None:
        found = [seq for seq in self.books.sequences if is_admitted in (None, bool(seq.block_table))]
        return found[index % len(found)] if found else None

    @rule(num_shared=st.integers(0, 12), pattern=st.integers(0, 1), tail=st.binary(min_size=1, max_size=4))
    @precondition(lambda self: len(self.books.sequences) < 6)
    def add(self, num_shared, pattern, tail):
        shared = bytes([pattern, 1] * 6)[:num_shared]
        seq = self.books.add(shared + bytes(token % 2 for token in tail))
        self.books.admit(seq)

    @rule(index=st.integers(0, 5))
    def readmit(self, index):
        seq = self.pick(index, is_admitted=False)
        if seq is not None and not seq.has_token_in_flight:
            self.books.admit(seq)

    @rule(index=st.integers(0, 5), num_new_tokens=st.integers(1, 12), begins_step=st.booleans())
    def advance(self, index, num_new_tokens, begins_step):
        if begins_step:
            self.books.copies.clear()
        seq = self.pick(index, is_admitted=True)
        if seq is not None and seq.num_computed_tokens < seq.num_tokens:
            if self.windows.num_groups and num_new_tokens % 2:  # a late return is allowed
                self.books.give_back(seq)
            if self.books.advance(seq, min(num_new_tokens, seq.num_tokens - seq.num_computed_tokens)):
                self.books.take_snapshot(seq)

    @rule(index=st.integers(0, 5), token=st.integers(0, 1))
    def sample(self, index, token):
        seq = self.pick(index, is_admitted=True)
        # One step is in flight and one more is being launched, so at most two tokens are unknown.
        if seq is not None and seq.num_computed_tokens == seq.num_tokens < len(seq.token_ids) + 2:
            self.books.launch_sampling(seq, token)

    @rule(index=st.integers(0, 5))
    def commit(self, index):
        seq = self.pick(index)
        if seq is not None and seq.has_token_in_flight:
            self.books.commit(seq)

    @rule(index=st.integers(0, 5))
    def preempt(self, index):
        seq = self.pick(index, is_admitted=True)
        if seq is not None:
            self.books.release(seq)

    @rule(index=st.integers(0, 5), forget=st.booleans())
    def finish(self, index, forget):
        seq = self.pick(index)
        if seq is not None:
            self.books.release(seq)
            if forget:
                self.books.forget(seq)
            self.books.remove(seq)

    @invariant()
    def laws_hold(self):
        self.books.check()

    def teardown(self):
        if hasattr(self, "books"):
            for seq in list(self.books.sequences):
                self.books.release(seq)
            assert self.books.manager.num_free_blocks == len(self.books.manager.blocks), "idle, but not all free"
            self.books.check()


class WeakHashMachine(BlockManagerMachine):
    has_weak_hash = True


class WindowMachine(BlockManagerMachine):
    windows = WindowGroups(2, 3)


class WeakHashWindowMachine(BlockManagerMachine):
    has_weak_hash, windows = True, WindowGroups(1, 5, 2)


class StateMachine(BlockManagerMachine):
    has_states = True


class WeakHashStateMachine(StateMachine):
    has_weak_hash = True


MACHINES = [
    BlockManagerMachine, WeakHashMachine, WindowMachine, WeakHashWindowMachine, StateMachine, WeakHashStateMachine,
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_the_books_balance_after_any_operations(machine, count, request):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count(60, 300),
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=request.config.option.runs == 1,
        ),
    )


# The small alphabet of the exhaustive search. Block size 2; the second and third share one block, the third and
# fourth have equal second blocks behind different first ones.
PROMPTS = (b"\0", b"\0\0\0", b"\0\0\1\1\0", b"\1\1\1\1\0")


def launch(books: Books, seq: Sequence, num_new_tokens: int, max_length: int) -> bool:
    if not books.advance(seq, num_new_tokens):
        return False
    if seq.num_computed_tokens == seq.num_tokens < max_length:
        books.launch_sampling(seq, sum(books.tokens[seq.seq_id]) % 2)
    return True


def next_states(state: bytes, num_sequences: int, prompts: tuple[bytes, ...], max_length: int):
    """Every state that one operation leads to, each checked."""
    books = pickle.loads(state)
    operations = [("add", prompt) for prompt in prompts if len(books.sequences) < num_sequences]
    for index, seq in enumerate(books.sequences):
        operations.append(("finish", index))
        if seq.has_token_in_flight:
            operations.append(("commit", index))
        if not seq.block_table:
            operations += [("admit", index)] if not seq.has_token_in_flight else []
            continue
        operations.append(("preempt", index))
        num_left = seq.num_tokens - seq.num_computed_tokens
        operations += [("launch", index, num_new_tokens) for num_new_tokens in {1, num_left} if num_left > 0]
    for name, *arguments in operations:
        books = pickle.loads(state)
        if name == "add":
            happened = books.admit(books.add(arguments[0]))
        else:
            seq, happened = books.sequences[arguments[0]], True
            if name == "admit":
                happened = books.admit(seq)
            elif name == "launch":
                happened = launch(books, seq, arguments[1], max_length)
            elif name == "commit":
                books.commit(seq)
            else:
                books.release(seq)
                if name == "finish":
                    books.remove(seq)
        if happened:
            books.check()
            yield books


def signature(books: Books) -> tuple:
    """Equal for states that differ only in the names of sequences, registrations and blocks."""
    names: dict[int, int] = {}
    serials: dict[int, int] = {0: 0}

    def name(block: int) -> int:
        return names.setdefault(block, len(names))

    def rank(serial: int) -> int:
        return serials.setdefault(serial, len(serials))

    sequences = sorted(
        books.sequences, key=lambda seq: (books.tokens[seq.seq_id], seq.token_ids, seq.num_computed_tokens)
    )
    parts = [
        (
            books.tokens[seq.seq_id], len(seq.token_ids), seq.num_computed_tokens, seq.num_registered_blocks,
            rank(seq.last_registration), *map(name, seq.block_table),
        )
        for seq in sequences
    ]  # fmt: skip
    free = [name(block) for block in books.free]
    cache = sorted((name(entry.block), entry.prefix) for entry in books.cache.values())
    by_name = sorted((names[block.block_id], block) for block in books.manager.blocks)
    registrations = [(rank(block.serial), rank(block.parent)) for _, block in by_name]
    return tuple(parts), tuple(free), tuple(cache), tuple(registrations)


@pytest.mark.parametrize("num_sequences", some([1, 2, 3], 1, 2))
@pytest.mark.parametrize("num_blocks", some([1, 2, 3, 4], 1, 2, 3))
def test_every_state_of_a_small_pool_is_sound(num_blocks, num_sequences, request):
    """Without --long, sequences in the largest pool have one token less."""
    prompts, max_length = (PROMPTS, 6) if num_sequences < 3 else (PROMPTS[1:], 5)
    max_length -= num_blocks == 3 and num_sequences == 2 and not request.config.option.long
    start = Books(num_blocks, 2)
    seen, queue = {signature(start)}, deque([pickle.dumps(start)])
    max_shared = 0
    while queue:
        for books in next_states(queue.popleft(), num_sequences, prompts, max_length):
            max_shared = max(max_shared, *(block.ref_count for block in books.manager.blocks))
            state = signature(books)
            if state not in seen:
                seen.add(state)
                queue.append(pickle.dumps(books))
    # A sequence that shares a block also needs one of its own, except one sequence that is no longer than the block.
    num_sharers = num_blocks if b"\0" in prompts else num_blocks - 1
    assert max_shared == min(num_sequences, num_sharers), "the search met too little"


def compute(manager: BlockManager, seq: Sequence) -> Sequence:
    """As the scheduler does: gives blocks to a new sequence and launches all of it."""
    manager.allocate(seq)
    manager.append(seq, seq.num_tokens - seq.num_computed_tokens)
    return seq


def grow(manager: BlockManager, seq: Sequence, token: int) -> None:
    seq.token_ids.append(token)
    seq.num_tokens += 1
    manager.append(seq, 1)


def test_two_prompts_share_the_full_blocks_they_have_in_common():
    manager = BlockManager(8, 256)
    first = compute(manager, make_sequence(range(600)))
    a, b, d1 = first.block_table
    second = make_sequence([*range(512), *range(1000, 1008)])
    manager.allocate(second)
    assert second.num_tokens == 520 and second.num_computed_tokens == 512
    assert second.block_table[:2] == [a, b] and second.block_table[2] not in (a, b, d1)
    assert [manager.blocks[block].ref_count for block in (a, b, d1, second.block_table[2])] == [2, 2, 1, 1]


def test_a_block_is_closed_when_it_is_full_and_the_next_appended_when_it_is_needed():
    manager = BlockManager(8, 4)
    seq = compute(manager, make_sequence([7, 7, 7]))
    history = []
    for token in range(6):
        grow(manager, seq, token)
        closed = [block for block in seq.block_table if manager.blocks[block].hash is not None]
        history.append((seq.num_tokens, list(seq.block_table), closed))
    assert history == [
        (4, [0], [0]),
        (5, [0, 1], [0]),
        (6, [0, 1], [0]),
        (7, [0, 1], [0]),
        (8, [0, 1], [0, 1]),
        (9, [0, 1, 2], [0, 1]),
    ]
    assert list(manager.blocks[1].token_ids) == [1, 2, 3, 4]


def test_growth_takes_as_many_blocks_as_any_number_of_tokens_needs():
    """An engine that asks whether length % block_size == 1 takes one block, and only for one token."""
    manager = BlockManager(8, 4)
    seq = compute(manager, make_sequence([1, 2, 3]))
    seq.token_ids.extend(range(14))
    seq.num_tokens += 14
    assert manager.can_append(seq, 14)
    manager.append(seq, 14)
    assert len(seq.block_table) == 5
    assert manager.can_append(seq, 3 + 12) and not manager.can_append(seq, 3 + 12 + 1)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_wholly_cached_prompt_of_full_blocks_leaves_its_last_block_to_compute(num_blocks):
    """All blocks were hits, so no token was left to compute, and none could be sampled."""
    manager = BlockManager(16, 4)
    compute(manager, make_sequence(range(4 * num_blocks)))
    seq = make_sequence(range(4 * num_blocks))
    manager.allocate(seq)
    assert seq.num_computed_tokens == 4 * (num_blocks - 1)


def test_a_reused_block_loses_its_old_hash():
    """The old hash still led to the block, which held other tokens by then."""
    manager = BlockManager(2, 4)
    manager.deallocate(compute(manager, make_sequence([1, 2, 3, 4, 5])))
    manager.deallocate(compute(manager, make_sequence([6] * 8)))
    again = make_sequence([1, 2, 3, 4, 5])
    manager.allocate(again)
    assert again.num_computed_tokens == 0
    manager.check_integrity([again])


def test_blocks_are_reused_least_recently_freed_first_and_the_front_of_a_prefix_last():
    """When blocks were freed front first, the front of a prefix was reused first, and the rest was useless."""
    manager = BlockManager(6, 2)
    older, newer = compute(manager, make_sequence(range(6))), compute(manager, make_sequence(range(10, 16)))
    order = older.block_table[::-1] + newer.block_table[::-1]
    manager.deallocate(older)
    manager.deallocate(newer)
    assert compute(manager, make_sequence([99])).block_table == order[:1]
    again = make_sequence(range(7))
    manager.allocate(again)
    assert again.num_computed_tokens == 4, "the end of the prefix is gone, its front is not"
    assert again.block_table[2:] == order[3:5]


def test_shared_blocks_in_use_cost_nothing_and_revived_ones_a_free_block():
    manager = BlockManager(4, 4)
    first = compute(manager, make_sequence(range(9)))
    second = make_sequence(range(9))
    assert manager.can_allocate(second) and not manager.can_allocate(second, num_reserved=1)
    other = compute(manager, make_sequence([50]))
    assert not manager.can_allocate(second)
    manager.deallocate(first)
    assert manager.num_free_blocks == 3 and manager.can_allocate(second)
    assert not manager.can_allocate(second, num_reserved=1)
    manager.allocate(second)
    assert second.num_computed_tokens == 8 and manager.num_free_blocks == 0
    manager.check_integrity([second, other])


def test_a_block_is_known_by_everything_before_it():
    """Equal blocks behind different prefixes have different keys, and both can be cached at once."""
    manager = BlockManager(16, 2)
    for front in (1, 2):
        manager.deallocate(compute(manager, make_sequence([front, front, 7, 7, 9])))
    for front, num_cached in [(1, 4), (2, 4), (3, 0)]:
        seq = make_sequence([front, front, 7, 7, 9])
        manager.allocate(seq)
        assert seq.num_computed_tokens == num_cached
        manager.deallocate(seq)


def test_a_match_needs_its_own_tokens_and_the_very_registration_before_it():
    """Here the hash says only how many blocks come before; [7, 7] was cached behind [1, 1], not behind [2, 2]."""
    manager = BlockManager(16, 2, block_hash=lambda parent_hash, token_ids: parent_hash + 1)
    manager.deallocate(compute(manager, make_sequence([1, 1, 7, 7, 9])))
    manager.deallocate(compute(manager, make_sequence([2, 2, 8])))
    for prompt, num_cached in [([2, 2, 7, 7, 9], 2), ([1, 1, 7, 7, 9], 0), ([2, 2, 8, 8, 9], 2)]:
        seq = make_sequence(prompt)
        manager.allocate(seq)
        assert seq.num_computed_tokens == num_cached
        manager.deallocate(seq)


def test_a_block_is_not_registered_behind_the_equal_of_its_parent_in_another_prefix():
    """Here all but first blocks collide; [8, 8] came behind [2, 2, 7, 7] and must not be found behind [1, 1, 7, 7]."""
    manager = BlockManager(
        16, 2, block_hash=lambda parent, token_ids: token_ids[0] if parent == 0 else max(parent + 1, 100)
    )
    manager.deallocate(compute(manager, make_sequence([1, 1, 7, 7, 9])))
    manager.deallocate(compute(manager, make_sequence([2, 2, 7, 7, 8, 8, 9])))
    seq = make_sequence([1, 1, 7, 7, 8, 8, 9])
    manager.allocate(seq)
    assert seq.num_computed_tokens == 2


def test_each_prefix_is_hashed_once_a_request():
    """Every question about a waiting request once hashed its whole prompt again."""
    asked = []

    def block_hash(parent: int, token_ids: array) -> int:
        asked.append(list(token_ids))
        return hash_block(parent, token_ids)

    manager = BlockManager(4, 2, block_hash=block_hash)
    blocker = compute(manager, make_sequence([5]))
    seq = make_sequence(range(7))
    for _ in range(3):
        assert manager.prefix_key(seq) is not None
        assert not manager.can_allocate(seq)
    manager.deallocate(blocker)
    compute(manager, seq)
    manager.deallocate(seq)
    compute(manager, seq)
    assert asked == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("num_tokens", [2, 5, 6])
@pytest.mark.parametrize("is_held", [False, True])
def test_what_is_forgotten_is_never_served_again(is_held, num_tokens):
    manager = BlockManager(16, 2)
    seq, other = compute(manager, make_sequence(range(num_tokens))), compute(manager, make_sequence([9, 9, 9]))
    if not is_held:
        manager.deallocate(seq)
    manager.forget(seq)
    again, unharmed = make_sequence(range(num_tokens + 1)), make_sequence([9, 9, 9])
    manager.allocate(again)
    manager.allocate(unharmed)
    assert again.num_computed_tokens == 0 and unharmed.num_computed_tokens == 2
    manager.check_integrity([seq, other, again, unharmed])


def test_without_prefix_caching_nothing_is_shared():
    manager = BlockManager(8, 2, enable_prefix_caching=False)
    first = compute(manager, make_sequence(range(5)))
    second = make_sequence(range(5))
    assert manager.prefix_key(second) is None
    manager.allocate(second)
    assert second.num_computed_tokens == 0 and not set(first.block_table) & set(second.block_table)


def test_giving_back_or_taking_what_is_not_there_is_refused():
    manager = BlockManager(4, 2)
    seq = compute(manager, make_sequence(range(3)))
    with pytest.raises(RuntimeError, match="already has blocks"):
        manager.allocate(seq)
    table = list(seq.block_table)
    manager.deallocate(seq)
    seq.block_table += table
    with pytest.raises(RuntimeError, match="freed twice"):
        manager.deallocate(seq)


def test_reviving_a_block_does_not_search_the_pool():
    """A list of free blocks made every hit as slow as the pool is large."""
    num_blocks = 50_000
    manager = BlockManager(num_blocks, 1)
    everything = compute(manager, make_sequence(range(num_blocks)))
    manager.deallocate(everything)
    began = time.process_time()
    manager.allocate(everything)
    assert everything.num_computed_tokens == num_blocks - 1
    assert time.process_time() - began < 2, "a search a block would take far longer"


def test_windows_take_a_quarter_of_the_cache_at_gemmas_shape():
    """Five of 34 layers have no window. The blocks have five layers; the seventh group lacks one layer."""
    places = cache_places([1024, 1024, 1024, 1024, 1024, 0] * 5 + [1024] * 4)
    num_groups = 1 + max(place.group for place in places)
    assert sorted(places) == [(group, part) for group in range(7) for part in range(5)][:34]
    windows = WindowGroups(num_groups - 1, 1024, 64, max_num_new_tokens=16384)
    manager, seq = BlockManager(2000, 64, windows=windows), Sequence(0, [1] * 8192, None, 9000)
    manager.allocate(seq)
    for num_new_tokens in (2048, 2048, 4096, 1, 1):
        seq.num_tokens = max(seq.num_tokens, seq.num_computed_tokens + num_new_tokens)
        manager.free_behind_window(seq)
        assert manager.can_append(seq, num_new_tokens)
        manager.append(seq, num_new_tokens)
        num_held = len(manager.blocks) - manager.num_free_blocks
        num_in_window = num_held - len(seq.block_table)
        assert num_in_window == 6 * len([blocks for blocks in seq.window_table if blocks])
        assert num_held <= windows.max_num_blocks(len(seq.block_table) * 64, 64)
    assert 5 * num_held <= 0.27 * 34 * len(seq.block_table)
