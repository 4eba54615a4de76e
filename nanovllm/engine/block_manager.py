"""Which blocks of the KV cache hold which tokens: paging, sharing and prefix caching. Plain Python, no torch.

The cache is a pool of blocks of `block_size` tokens. A sequence's block table maps its logical blocks to physical ones.
A full block whose tokens are known can be *registered* under a hash that names the whole prefix up to its end; later
sequences that begin with the same tokens then share it. Only full blocks before the last token are ever shared, so no
sequence writes to a block that another one reads.

In a model that mixes layers with a sliding window and layers without one, a block holds the keys of one *group* of
layers. Group 0 has all layers without a window. The others are *window groups* of at most as many layers, so all blocks
have the same size and come from one pool. A sequence has a block per group for its tokens, and gives those of the
window groups back once no later query sees them. They stay in the prefix cache, attached to the registered block of
group 0 that holds the same tokens. A prefix can be shared only if the window before its end is there too.

In a model with recurrent layers, a sequence that shares a prefix also needs the state after it. Copies of such states,
the *snapshots*, have a pool of their own. A snapshot belongs to the registered block at whose end it was taken. A
prefix can be shared only up to a block that has a snapshot.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import xxhash

from nanovllm.engine.sequence import Sequence

BlockHash = Callable[[int, "array[int]"], int]
_NO_TOKENS = array("i")
WindowBlocks = tuple[int, ...]  # the blocks of all window groups for the same tokens; () once they are given back


def hash_block(parent_hash: int, token_ids: "array[int]") -> int:
    """64-bit chained hash (XXH3) of a block's tokens and, through the seed, of everything before them."""
    return xxhash.xxh3_64_intdigest(token_ids, seed=parent_hash)


class WindowGroups(NamedTuple):
    """The groups of layers with a sliding window whose blocks are given back.

    num_groups: how many there are; 0 if all layers keep all keys.
    window: how many keys a query of these layers sees, its own included.
    num_keys_per_tile: attention reads keys in tiles that begin at multiples of this number.
    max_num_new_tokens: maximum number of tokens of a step.
    """

    num_groups: int = 0
    window: int = 0
    num_keys_per_tile: int = 1
    max_num_new_tokens: int = 0

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that a query at `position` reads. Later queries read no earlier ones."""
        first = max(0, position + 1 - self.window)
        return first // self.num_keys_per_tile * self.num_keys_per_tile // block_size

    def max_num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Maximum number of blocks, of all groups, that a sequence of `num_tokens` tokens holds at a time."""
        num_blocks = -(-num_tokens // block_size)
        return num_blocks + self.num_groups * min(num_blocks, self.num_kept(self.max_num_new_tokens, block_size))

    def num_kept(self, num_new_tokens: int, block_size: int) -> int:
        """Maximum number of a group's blocks that a step of `num_new_tokens` tokens of a sequence reads and writes."""
        return -(-(self.window + self.num_keys_per_tile + num_new_tokens) // block_size) + 1


NO_WINDOWS = WindowGroups()


class Snapshots(NamedTuple):
    """The snapshots of recurrent states in the prefix cache. They have the numbers −1, −2, …, −num_snapshots.

    has_states: whether the model has layers with a recurrent state.
    num_snapshots: how many there are; 0 if no prefix can be shared.
    min_saved_tokens: a snapshot is taken only if it saves the computation of at least that many tokens.
    """

    has_states: bool = False
    num_snapshots: int = 0
    min_saved_tokens: int = 0


NO_STATES = Snapshots()


class Block:
    """A physical block. `ref_count` is 0 while free; `hash` is None unless registered."""

    __slots__ = ("block_id", "hash", "owner", "parent", "ref_count", "serial", "snapshot", "token_ids", "window")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.token_ids = _NO_TOKENS
        self.parent = 0  # serial of the registration before this one in the prefix; for the first block, its `_root`
        self.serial = 0  # serial of this registration; never used twice, unlike a block id
        self.snapshot = 0  # if registered: the number of its snapshot, the state at its end; 0 for none
        self.window: WindowBlocks = ()  # if registered: the window groups' blocks for its tokens, () if they are gone
        self.owner: Block | None = None  # if in a window group: the registered block whose `window` it is in


class BlockManager:
    """Allocates the blocks of one KV cache. Every operation is O(1) per block.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        enable_prefix_caching: whether equal prefixes share blocks.
        block_hash: (hash of the previous block, tokens) -> hash of the block; tests pass a weak one.
        windows: the groups of layers whose blocks are given back.
        snapshots: whether layers have recurrent states, and the pool of their snapshots.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        block_hash: BlockHash = hash_block,
        windows: WindowGroups = NO_WINDOWS,
        snapshots: Snapshots = NO_STATES,
    ):
        self.block_size = block_size
        self.windows, self.num_window_groups = windows, windows.num_groups
        self.snapshots = snapshots
        # A model with states can share a prefix only through a snapshot.
        self.enable_prefix_caching = enable_prefix_caching and (not snapshots.has_states or snapshots.num_snapshots > 0)
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently freed first
        self._registered: dict[int, Block] = {}
        # The block of each snapshot, least recently used first.
        self._snapshot_owners: OrderedDict[int, Block | None] = OrderedDict.fromkeys(range(-snapshots.num_snapshots, 0))
        self._last_serial = 0
        self._block_hash = block_hash

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, including those with cached content."""
        return len(self._free)

    @property
    def use(self) -> float:
        """The share of the blocks that sequences hold, 0 to 1; 0 without blocks."""
        return 1 - len(self._free) / len(self.blocks) if self.blocks else 0.0

    # Admission

    def can_allocate(self, seq: Sequence, num_reserved: int = 0, max_num_new_tokens: int = 2**31) -> bool:
        """Whether `allocate`, and then `append` in chunks of up to `max_num_new_tokens` tokens, would leave
        `num_reserved` blocks per group free.

        A shared block that is in use costs nothing; a cached one that no sequence holds costs a free block.
        """
        num_tokens = _num_to_compute(seq)
        num_needed, num_groups = self._num_blocks_for(num_tokens), self.num_window_groups
        num_available = len(self._free) - num_reserved * (1 + num_groups)
        if num_groups == 0 and num_needed <= num_available:
            return True
        prefix, window = self._cached_prefix(seq)
        num_needed -= sum(block.ref_count > 0 for block in prefix)
        num_seen = self._num_blocks_for(num_tokens) - sum(not blocks for blocks in window)
        num_needed += num_groups * min(num_seen, self.windows.num_kept(max_num_new_tokens, self.block_size))
        num_needed -= sum(self.blocks[block_id].ref_count > 0 for blocks in window for block_id in blocks)
        return num_needed <= num_available

    def allocate(self, seq: Sequence) -> list[tuple[int, int]]:
        """Gives `seq` blocks for its tokens, shared ones first, and counts the tokens of shared blocks as computed. New
        blocks of window groups come with `append`.

        Returns:
            [(snapshot, entry)], the copy that its state begins from; [] if it begins from zero.
        """
        if seq.block_table:
            raise RuntimeError(f"{seq} already has blocks")
        prefix, seq.window_table = self._cached_prefix(seq)
        seq.block_table = [block.block_id for block in prefix]
        seq.num_computed_tokens = seq.num_shared_tokens = len(prefix) * self.block_size
        seq.num_registered_blocks = len(prefix)
        seq.last_registration = prefix[-1].serial if prefix else 0
        self._hold(seq)
        while len(seq.block_table) < self._num_blocks_for(_num_to_compute(seq)):
            seq.block_table.append(self._take_free_block())
        if not prefix or not prefix[-1].snapshot:
            return []
        self._snapshot_owners.move_to_end(prefix[-1].snapshot)
        return [(prefix[-1].snapshot, seq.entry)]

    def can_fork(self, num_tokens: int, num_reserved: int = 0) -> bool:
        """Whether `fork` would leave at least `num_reserved` blocks per group free."""
        has_partial_block = num_tokens % self.block_size > 0
        return len(self._free) >= (has_partial_block + num_reserved) * (1 + self.num_window_groups)

    def has_window(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `seq` still holds the keys that a query after its first `num_tokens` tokens sees."""
        return seq.num_behind_window <= self.windows.first_block(num_tokens, self.block_size)

    def fork(self, source: Sequence, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Gives `seq` the first `num_tokens` tokens of `source`: its full blocks, shared, and new blocks for the tokens
        after them.

        Both begin with these tokens. `source` has computed them, and has the window after them (see `has_window`).

        Returns:
            A list of the (source, copy) pairs that fill the new blocks; empty if there are none.
        """
        if seq.block_table:
            raise RuntimeError(f"{seq} already has blocks")
        num_full = num_tokens // self.block_size
        seq.block_table = source.block_table[:num_full]
        seq.window_table = self._window_of(source.window_table[:num_full], num_tokens)
        self._hold(seq)
        seq.block_hashes = source.block_hashes[:num_full]
        seq.num_computed_tokens = seq.num_shared_tokens = num_tokens
        if source.num_registered_blocks <= num_full:  # else `append` finds these blocks in the prefix cache
            seq.num_registered_blocks, seq.last_registration = source.num_registered_blocks, source.last_registration
        if num_tokens % self.block_size == 0:
            return []
        seq.block_table.append(self._take_free_block())
        copies = [(source.block_table[num_full], seq.block_table[num_full])]
        if self.num_window_groups:
            seq.window_table.append(self._take_window_blocks())
            copies += zip(source.window_table[num_full], seq.window_table[num_full], strict=True)
        return copies

    def _hold(self, seq: Sequence) -> None:
        """Counts a new reference to each block in the tables of `seq`."""
        seq.num_behind_window = sum(not blocks for blocks in seq.window_table)
        for block_id in (*seq.block_table, *(block_id for blocks in seq.window_table for block_id in blocks)):
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1

    # Growth

    def can_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether there are blocks for `num_new_tokens` more computed tokens."""
        num_blocks = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        num_needed = num_blocks - len(seq.block_table)
        if self.num_window_groups:
            num_needed = max(num_needed, 0) + self.num_window_groups * (num_blocks - len(seq.window_table))
        return num_needed <= len(self._free)

    def append(self, seq: Sequence, num_new_tokens: int) -> None:
        """Advances `num_computed_tokens`, with new blocks where needed; blocks that became full are registered.

        The step that computes the tokens must be certain to be launched: from now on later sequences, also those of
        the same step, may share the registered blocks.
        """
        seq.num_computed_tokens += num_new_tokens
        while seq.num_computed_tokens > len(seq.block_table) * self.block_size:
            seq.block_table.append(self._take_free_block())
        if self.num_window_groups:
            while seq.num_computed_tokens > len(seq.window_table) * self.block_size:
                seq.window_table.append(self._take_window_blocks())
        self.register_full_blocks(seq)

    def free_behind_window(self, seq: Sequence) -> None:
        """Gives back the window groups' blocks that no query sees after the tokens that `seq` has computed.

        The step that computes those tokens must have been launched, because the next one may write other keys to these
        blocks.
        """
        end = self.windows.first_block(seq.num_computed_tokens, self.block_size)
        for index in range(seq.num_behind_window, end):
            blocks, seq.window_table[index] = seq.window_table[index], ()
            self._release(seq, reversed(blocks))
            if index * self.block_size >= seq.num_prompt_tokens:
                # No prompt is likely to end there, so these blocks must not push others out of the cache.
                for block_id in blocks:
                    if block_id in self._free:
                        self._free.move_to_end(block_id, last=False)
        seq.num_behind_window = max(seq.num_behind_window, end)

    def register_full_blocks(self, seq: Sequence) -> None:
        """Puts the blocks whose tokens are all computed and known into the prefix cache."""
        if not self.enable_prefix_caching:
            return
        block_size, index = self.block_size, seq.num_registered_blocks
        end = min(seq.num_computed_tokens, len(seq.token_ids))
        while (index + 1) * block_size <= end:
            block_hash = self._hash(seq, index)
            token_ids = seq.token_ids[index * block_size : (index + 1) * block_size]
            found = self._registered.get(block_hash)
            parent = seq.last_registration or _root(seq)
            if found is not None and found.parent == parent and found.token_ids == token_ids:
                block = found  # an equal block is there already; this one stays private
            else:
                if found is not None:  # same hash, other content or an unreachable parent: the newer one wins
                    self._unregister(found)
                block = self.blocks[seq.block_table[index]]
                self._last_serial += 1
                block.hash, block.token_ids = block_hash, token_ids
                block.parent, block.serial = parent, self._last_serial
                self._registered[block_hash] = block
            if self.num_window_groups and not block.window:
                self._attach(block, seq.window_table[index])
            seq.last_registration = block.serial
            index += 1
        seq.num_registered_blocks = index

    def _attach(self, block: Block, window: WindowBlocks) -> None:
        block.window = window
        for block_id in window:
            self.blocks[block_id].owner = block

    def _detach(self, block: Block) -> None:
        for block_id in block.window:
            self.blocks[block_id].owner = None
        block.window = ()

    # Snapshots

    def begins_too_early(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Whether `seq` would begin from a snapshot that only this step takes. `copies` are its copies of
        states; its loads come before them."""
        prefix = self._cached_prefix(seq)[0] if copies else []
        return bool(prefix) and any(target == prefix[-1].snapshot for _, target in copies)

    def take_snapshot(self, seq: Sequence, copies: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Gives the least recently used snapshot to the last block of `seq`, if it was just filled.

        Returns:
            [(entry, snapshot)], a copy to add to `copies`, the step's other copies of states. [] if the block already
            has a snapshot, or if `copies` already write the least recently used one.
        """
        if seq.num_computed_tokens % self.block_size:
            return []
        block = self._registered[self._hash(seq, seq.num_registered_blocks - 1)]
        snapshot, owner = next(iter(self._snapshot_owners.items()))
        if block.snapshot or any(target == snapshot for _, target in copies):
            return []
        if owner is not None:
            owner.snapshot = 0
        block.snapshot = snapshot
        self._snapshot_owners[snapshot] = block
        self._snapshot_owners.move_to_end(snapshot)
        return [(seq.entry, snapshot)]

    # Release

    def deallocate(self, seq: Sequence) -> None:
        """Frees all blocks, last first, so that the front of a prefix is reused last.

        Their content stays in the prefix cache until they are reused.
        """
        for blocks in reversed(seq.window_table):
            self._release(seq, reversed(blocks))
        self._release(seq, reversed(seq.block_table))
        seq.block_table, seq.window_table = [], []
        seq.num_computed_tokens = seq.num_registered_blocks = seq.last_registration = seq.num_behind_window = 0

    def _release(self, seq: Sequence, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count < 1:
                raise RuntimeError(f"block {block_id} of {seq} is freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None

    def forget(self, seq: Sequence) -> None:
        """Removes all prefixes that begin as `seq` does from the prefix cache, whether or not `seq` holds blocks."""
        if self.enable_prefix_caching and len(seq.token_ids) >= self.block_size:
            first = self._registered.get(self._hash(seq, 0))
            if first is not None:  # without it, no block after it can be reached
                self._unregister(first)

    # Prefixes

    def prefix_key(self, seq: Sequence) -> int | None:
        """A key that is equal for sequences that can share at least their first block; None for a sequence that cannot
        share."""
        if not self.enable_prefix_caching or len(seq.token_ids) <= self.block_size:
            return None
        return self._hash(seq, 0)

    def num_cached_tokens(self, seq: Sequence) -> int:
        """How many leading tokens of `seq`, which waits, `allocate` would find in the cache."""
        return len(self._cached_prefix(seq)[0]) * self.block_size

    def num_common_tokens(self, seq: Sequence, other: Sequence) -> int:
        """How many leading tokens `other` could share once `seq` has computed its prompt."""
        end = min(seq.num_prompt_tokens, seq.max_num_computed, _max_num_cached(other)) // self.block_size
        num_blocks = 0
        while num_blocks < end and self._hash(seq, num_blocks) == self._hash(other, num_blocks):
            num_blocks += 1
        return num_blocks * self.block_size

    def registered_prefix(self, seq: Sequence) -> list[Block]:
        """The registered blocks that hold the beginning of `seq`, but never its last token."""
        prefix: list[Block] = []
        parent, block_size = _root(seq), self.block_size
        for index in range(_max_num_cached(seq) // block_size):
            block = self._registered.get(self._hash(seq, index))
            if (
                block is None
                or block.parent != parent
                or block.token_ids != seq.token_ids[index * block_size : (index + 1) * block_size]
            ):
                break
            prefix.append(block)
            parent = block.serial
        return prefix

    def _cached_prefix(self, seq: Sequence) -> tuple[list[Block], list[WindowBlocks]]:
        """The cached blocks with the beginning of `seq` that it can share, and the blocks of window groups for the same
        tokens, without those behind the window."""
        if not seq.may_share:
            return [], []
        if not self.enable_prefix_caching:  # the siblings' states have moved past these blocks
            return ([], []) if self.snapshots.has_states else self._prompt_of_siblings(seq)
        prefix, block_size = self.registered_prefix(seq), self.block_size
        if self.snapshots.has_states:
            while prefix and not prefix[-1].snapshot:
                prefix.pop()
        if self.num_window_groups == 0:
            return prefix, []
        num_usable = num_with_window = 0  # blocks that can be shared; blocks in a row, up to this one, with a window
        for num_blocks, block in enumerate(prefix, 1):
            num_with_window = num_with_window + 1 if block.window else 0
            first = self.windows.first_block(num_blocks * block_size, block_size)
            num_usable = num_blocks if num_with_window >= num_blocks - first else num_usable
        del prefix[num_usable:]
        return prefix, self._window_of([block.window for block in prefix], num_usable * block_size)

    def _window_of(self, table: list[WindowBlocks], num_tokens: int) -> list[WindowBlocks]:
        """`table` with () in place of the blocks that no query after `num_tokens` tokens sees."""
        first = min(self.windows.first_block(num_tokens, self.block_size), len(table))
        return [()] * first + table[first:]

    def _prompt_of_siblings(self, seq: Sequence) -> tuple[list[Block], list[WindowBlocks]]:
        """The full blocks of its prompt that a running sibling holds, without the prompt's last token."""
        num_tokens = min(_max_num_cached(seq), seq.num_prompt_tokens - 1) // self.block_size * self.block_size
        for source in seq.siblings:
            if 0 < num_tokens <= source.num_computed_tokens and self.has_window(source, num_tokens):
                num_blocks = num_tokens // self.block_size
                window = self._window_of(source.window_table[:num_blocks], num_tokens)
                return [self.blocks[block_id] for block_id in source.block_table[:num_blocks]], window
        return [], []

    def _hash(self, seq: Sequence, index: int) -> int:
        """Hash of the full block `index`, computed once per request."""
        hashes, block_size = seq.block_hashes, self.block_size
        while len(hashes) <= index:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else seq.adapter.version
            hashes.append(self._block_hash(parent, seq.token_ids[start : start + block_size]))
        return hashes[index]

    def _take_free_block(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if block.hash is not None:
            self._unregister(block)
        if block.owner is not None:
            self._detach(block.owner)
        block.ref_count = 1
        return block_id

    def _take_window_blocks(self) -> WindowBlocks:
        return tuple(self._take_free_block() for _ in range(self.num_window_groups))

    def _unregister(self, block: Block) -> None:
        assert block.hash is not None, "only registered blocks come here"
        del self._registered[block.hash]
        self._detach(block)
        if block.snapshot:
            self._snapshot_owners[block.snapshot] = None
            self._snapshot_owners.move_to_end(block.snapshot, last=False)
            block.snapshot = 0
        block.hash, block.token_ids, block.parent, block.serial = None, _NO_TOKENS, 0, 0

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent; `sequences` are all that may hold blocks."""
        held = [0] * len(self.blocks)
        for seq in sequences:
            blocks = [*seq.block_table, *(block_id for of_tokens in seq.window_table for block_id in of_tokens)]
            assert len(set(blocks)) == len(blocks), f"{seq} holds a block twice"
            is_kept = [len(of_tokens) == self.num_window_groups for of_tokens in seq.window_table]
            assert is_kept == [index >= seq.num_behind_window for index in range(len(is_kept))], f"{seq} lacks blocks"
            for block_id in blocks:
                held[block_id] += 1
        for block in self.blocks:
            assert block.ref_count == held[block.block_id], (
                f"block {block.block_id}: ref count {block.ref_count}, in {held[block.block_id]} block tables"
            )
            assert (block.ref_count == 0) == (block.block_id in self._free), f"block {block.block_id}: free or not?"
            if block.hash is not None:
                assert self._registered.get(block.hash) is block, f"block {block.block_id} has a hash of another"
                assert len(block.token_ids) == self.block_size
            assert block.hash is not None or not block.window, f"block {block.block_id} is not registered"
            assert all(self.blocks[block_id].owner is block for block_id in block.window), "a window has another owner"
            assert block.owner is None or block.block_id in block.owner.window, f"block {block.block_id} is lost"
        assert len(self._free) + sum(count > 0 for count in held) == len(self.blocks), "a block is lost"
        for block_hash, block in self._registered.items():
            assert block.hash == block_hash, f"hash {block_hash} leads to a block that has another"
        claimed = {(block.snapshot, block.block_id) for block in self._registered.values() if block.snapshot}
        owned = {(number, owner.block_id) for number, owner in self._snapshot_owners.items() if owner is not None}
        assert claimed == owned, f"blocks claim snapshots {claimed}, but own {owned}"


def _root(seq: Sequence) -> int:
    """The `parent` of a sequence's first block. It differs between adapters, and is at most 0, unlike a serial."""
    return -seq.adapter.version


def _num_to_compute(seq: Sequence) -> int:
    """How many leading tokens will get keys. The keys of the last possible token are never read."""
    return min(seq.num_tokens, seq.max_num_computed)


def _max_num_cached(seq: Sequence) -> int:
    """How many leading tokens may come from the cache: the last one must be computed, and so must the one before the
    first whose log-probability is asked for."""
    num_tokens = len(seq.token_ids)
    return (seq.next_scored if seq.next_scored < seq.end_scored else num_tokens) - 1
