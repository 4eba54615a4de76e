"""Which blocks of the KV cache hold which tokens: paging, sharing and prefix caching. Plain Python, no torch.

The cache is a pool of blocks of `block_size` tokens. A sequence's block table maps its logical blocks to physical ones.
A full block whose tokens are known can be *registered* under a hash that names the whole prefix up to its end; later
sequences that begin with the same tokens then share it. Only full blocks before the last token are ever shared, so no
sequence writes to a block that another one reads.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

import xxhash

from nanovllm.engine.sequence import Sequence

BlockHash = Callable[[int, "array[int]"], int]
_NO_TOKENS = array("i")


def hash_block(parent_hash: int, token_ids: "array[int]") -> int:
    """64-bit chained hash (XXH3) of a block's tokens and, through the seed, of everything before them."""
    return xxhash.xxh3_64_intdigest(token_ids, seed=parent_hash)


class Block:
    """A physical block. `ref_count` is 0 while free; `hash` is None unless registered."""

    __slots__ = ("block_id", "hash", "parent", "ref_count", "serial", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.token_ids = _NO_TOKENS
        self.parent = 0  # serial of the registration before this one in the prefix, 0 for the first block
        self.serial = 0  # serial of this registration; never used twice, unlike a block id


class BlockManager:
    """Allocates the blocks of one KV cache. Every operation is O(1) per block.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        enable_prefix_caching: whether equal prefixes share blocks.
        block_hash: (hash of the previous block, tokens) -> hash of the block; tests pass a weak one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        block_hash: BlockHash = hash_block,
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently freed first
        self._registered: dict[int, Block] = {}
        self._last_serial = 0
        self._block_hash = block_hash

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, including those with cached content."""
        return len(self._free)

    # Admission

    def can_allocate(self, seq: Sequence, num_reserved_blocks: int = 0) -> bool:
        """Whether `allocate` would leave at least `num_reserved_blocks` free.

        A shared block that is in use costs nothing; a cached one that no sequence holds costs a free block.
        """
        num_needed = self._num_blocks_for(_num_to_compute(seq))
        num_available = len(self._free) - num_reserved_blocks
        if num_needed <= num_available:
            return True
        num_shared = sum(block.ref_count > 0 for block in self._cached_prefix(seq))
        return num_needed - num_shared <= num_available

    def allocate(self, seq: Sequence) -> None:
        """Gives `seq` blocks for its tokens, shared ones first, and counts the tokens of shared blocks as computed."""
        if seq.block_table:
            raise RuntimeError(f"{seq} already has blocks")
        prefix = self._cached_prefix(seq)
        for block in prefix:
            if block.ref_count == 0:
                del self._free[block.block_id]
            block.ref_count += 1
            seq.block_table.append(block.block_id)
        seq.num_computed_tokens = len(prefix) * self.block_size
        seq.num_registered_blocks = len(prefix)
        seq.last_registration = prefix[-1].serial if prefix else 0
        while len(seq.block_table) < self._num_blocks_for(_num_to_compute(seq)):
            seq.block_table.append(self._take_free_block())

    def can_fork(self, num_tokens: int, num_reserved_blocks: int = 0) -> bool:
        """Whether `fork` would leave at least `num_reserved_blocks` free."""
        has_partial_block = num_tokens % self.block_size > 0
        return len(self._free) - has_partial_block >= num_reserved_blocks

    def fork(self, source: Sequence, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Gives `seq` the first `num_tokens` tokens, which are the same in both, of those that `source` has computed:
        its full blocks, shared, and a new block for the tokens after them.

        Returns:
            A list of the (source, copy) pair that fills the new block; empty if there is no new block.
        """
        if seq.block_table:
            raise RuntimeError(f"{seq} already has blocks")
        num_full = num_tokens // self.block_size
        seq.block_table = source.block_table[:num_full]
        for block_id in seq.block_table:
            self.blocks[block_id].ref_count += 1
        seq.block_hashes = source.block_hashes[:num_full]
        seq.num_computed_tokens = num_tokens
        if source.num_registered_blocks <= num_full:  # else `append` finds these blocks in the prefix cache
            seq.num_registered_blocks, seq.last_registration = source.num_registered_blocks, source.last_registration
        if num_tokens % self.block_size == 0:
            return []
        seq.block_table.append(self._take_free_block())
        return [(source.block_table[num_full], seq.block_table[num_full])]

    # Growth

    def can_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether there are blocks for `num_new_tokens` more computed tokens."""
        num_needed = self._num_blocks_for(seq.num_computed_tokens + num_new_tokens)
        return num_needed - len(seq.block_table) <= len(self._free)

    def append(self, seq: Sequence, num_new_tokens: int) -> None:
        """Advances `num_computed_tokens`, with new blocks where needed; blocks that became full are registered.

        The step that computes the tokens must be certain to be launched: from now on later sequences, also those of
        the same step, may share the registered blocks.
        """
        seq.num_computed_tokens += num_new_tokens
        while seq.num_computed_tokens > len(seq.block_table) * self.block_size:
            seq.block_table.append(self._take_free_block())
        self.register_full_blocks(seq)

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
            if found is not None and found.parent == seq.last_registration and found.token_ids == token_ids:
                seq.last_registration = found.serial  # an equal block is there already; this one stays private
            else:
                if found is not None:  # same hash, other content or an unreachable parent: the newer one wins
                    self._unregister(found)
                block = self.blocks[seq.block_table[index]]
                self._last_serial += 1
                block.hash, block.token_ids = block_hash, token_ids
                block.parent, block.serial = seq.last_registration, self._last_serial
                self._registered[block_hash] = block
                seq.last_registration = block.serial
            index += 1
        seq.num_registered_blocks = index

    # Release

    def deallocate(self, seq: Sequence) -> None:
        """Frees all blocks, last first, so that the front of a prefix is reused last.

        Their content stays in the prefix cache until they are reused.
        """
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            if block.ref_count < 1:
                raise RuntimeError(f"block {block_id} of {seq} is freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
        seq.block_table = []
        seq.num_computed_tokens = seq.num_registered_blocks = seq.last_registration = 0

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
        return len(self._cached_prefix(seq)) * self.block_size

    def _cached_prefix(self, seq: Sequence) -> list[Block]:
        """The registered blocks that hold the beginning of `seq`, but never its last token."""
        prefix: list[Block] = []
        if not self.enable_prefix_caching:
            return self._prompt_of_siblings(seq)
        parent, block_size = 0, self.block_size
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

    def _prompt_of_siblings(self, seq: Sequence) -> list[Block]:
        """The full blocks of its prompt that a running sibling holds, without the prompt's last token."""
        num_tokens = min(_max_num_cached(seq), seq.num_prompt_tokens - 1) // self.block_size * self.block_size
        source = next((other for other in seq.siblings if 0 < num_tokens <= other.num_computed_tokens), None)
        return [] if source is None else [self.blocks[i] for i in source.block_table[: num_tokens // self.block_size]]

    def _hash(self, seq: Sequence, index: int) -> int:
        """Hash of the full block `index`, computed once per request."""
        hashes, block_size = seq.block_hashes, self.block_size
        while len(hashes) <= index:
            start = len(hashes) * block_size
            hashes.append(self._block_hash(hashes[-1] if hashes else 0, seq.token_ids[start : start + block_size]))
        return hashes[index]

    def _take_free_block(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if block.hash is not None:
            self._unregister(block)
        block.ref_count = 1
        return block_id

    def _unregister(self, block: Block) -> None:
        assert block.hash is not None, "only registered blocks come here"
        del self._registered[block.hash]
        block.hash, block.token_ids, block.parent, block.serial = None, _NO_TOKENS, 0, 0

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent; `sequences` are all that may hold blocks."""
        held = [0] * len(self.blocks)
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq} holds a block twice"
            for block_id in seq.block_table:
                held[block_id] += 1
        for block in self.blocks:
            assert block.ref_count == held[block.block_id], (
                f"block {block.block_id}: ref count {block.ref_count}, in {held[block.block_id]} block tables"
            )
            assert (block.ref_count == 0) == (block.block_id in self._free), f"block {block.block_id}: free or not?"
            if block.hash is not None:
                assert self._registered.get(block.hash) is block, f"block {block.block_id} has a hash of another"
                assert len(block.token_ids) == self.block_size
        assert len(self._free) + sum(count > 0 for count in held) == len(self.blocks), "a block is lost"
        for block_hash, block in self._registered.items():
            assert block.hash == block_hash, f"hash {block_hash} leads to a block that has another"


def _num_to_compute(seq: Sequence) -> int:
    """How many leading tokens will get keys. The keys of the last possible token are never read."""
    return min(seq.num_tokens, seq.max_length - 1)


def _max_num_cached(seq: Sequence) -> int:
    """How many leading tokens may come from the cache: the last one must be computed, and so must the one before the
    first whose log-probability is asked for."""
    num_tokens = len(seq.token_ids)
    return (seq.next_scored if seq.next_scored < seq.num_prompt_tokens else num_tokens) - 1
