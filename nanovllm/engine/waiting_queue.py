"""The order in which requests are admitted. Plain Python like the scheduler, and the same in every process."""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from nanovllm.engine.sequence import Sequence


class WaitingQueue:
    """Preempted sequences come first, then those that may generate more tokens; among equals, first come, first served.

    The longest go first so that a run does not end with a few of them decoding alone (the LPT rule: Graham, 1969).
    Sequences that share their first block are a group, which has the place of its longest member. Once the first member
    of a group is admitted, its other members follow, and it takes no new members. Offline, no user waits for a single
    request, so a short one may wait as long as longer ones keep coming.
    """

    def __init__(self):
        self._returned: deque[Sequence] = deque()  # preempted, oldest first
        # Heaps of (− maximum number of tokens to generate, id, sequence or group). Entries of sequences that have left
        # are dropped when they come to the top. The id of a group is that of its first member.
        self._groups: dict[int, list[tuple[int, int, Sequence]]] = {}
        self._order: list[tuple[int, int, int]] = []
        self._group_of: dict[int, int] = {}  # member -> group
        self._open_groups: dict[int, int] = {}  # prefix key -> group that still takes members
        self._key_of: dict[int, int] = {}  # such a group -> its prefix key
        self._served_group: int | None = None

    def push(self, seq: Sequence, prefix_key: int | None) -> None:
        group_id = seq.seq_id if prefix_key is None else self._open_groups.setdefault(prefix_key, seq.seq_id)
        if prefix_key is not None:
            self._key_of[group_id] = prefix_key
        rank = seq.num_prompt_tokens - seq.max_length
        heappush(self._groups.setdefault(group_id, []), (rank, seq.seq_id, seq))
        heappush(self._order, (rank, seq.seq_id, group_id))
        self._group_of[seq.seq_id] = group_id

    def push_front(self, seq: Sequence) -> None:
        self._returned.appendleft(seq)

    def peek(self) -> Sequence:
        if self._returned:
            return self._returned[0]
        group_id = self._served_group if self._served_group in self._groups else self._order[0][2]
        return self._groups[group_id][0][2]

    def pop(self) -> Sequence:
        seq = self.peek()
        if not self._returned:
            self._served_group = self._group_of[seq.seq_id]
            self._close(self._served_group)
        self.remove(seq)
        return seq

    def rest_of_group(self) -> Iterator[Sequence]:
        """The waiting members of the group that is served, in the order of `pop`."""
        if self._served_group in self._groups:
            heap = self._groups[self._served_group]
            found = [(heap[0], 0)]
            while found:  # in a heap, no element comes before its parent
                (_, seq_id, seq), index = heappop(found)
                if seq_id in self._group_of:
                    yield seq
                for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                    heappush(found, (heap[child], child))

    def remove(self, seq: Sequence) -> None:
        group_id = self._group_of.pop(seq.seq_id, None)
        if group_id is None:
            self._returned.remove(seq)
            return
        self._drop_departed(self._order)
        self._drop_departed(self._groups[group_id])
        if not self._groups[group_id]:
            del self._groups[group_id]
            self._close(group_id)

    def _drop_departed(self, heap: list) -> None:
        while heap and heap[0][1] not in self._group_of:
            heappop(heap)

    def _close(self, group_id: int) -> None:
        if group_id in self._key_of:
            del self._open_groups[self._key_of.pop(group_id)]

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        for group in self._groups.values():
            yield from (seq for _, seq_id, seq in group if seq_id in self._group_of)

    def __len__(self) -> int:
        return len(self._returned) + len(self._group_of)
