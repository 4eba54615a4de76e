"""Steps and their results: the values that pass between the Scheduler and the runner. No torch.

A step moves some sequences forward. `num_computed_tokens` of each sequence already counts the step's new tokens when
the Scheduler returns it.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from nanovllm.engine.sequence import Pooling, Sequence

# Sentinels for a row without a token; both are below every token id.
BROKEN_LOGITS, NO_TOKEN_LEFT = -1, -2


class Chunk(NamedTuple):
    """One sequence's share of a step.

    Args:
        seq: the sequence.
        num_new_tokens: how many tokens are computed; they end at `seq.num_computed_tokens`. It is 0 for a sibling that
            was just forked, which samples from the same logits as the nearest chunk before it that has tokens.
        samples: whether the state after them is needed, to sample the next token or to pool it.
    """

    seq: Sequence
    num_new_tokens: int
    samples: bool


class Scored(NamedTuple):
    """Tokens of a prompt, from `start` up to `end`, whose log-probabilities a step computes. If the sequence pools, it
    gets the hidden states before these tokens instead, and `end` may be one more than the prompt's length.

    ends: whether the sequence ends with them.
    """

    seq: Sequence
    start: int
    end: int
    ends: bool


class Step(NamedTuple):
    """The work of one forward pass.

    Args:
        chunks: one per sequence.
        num_decodes: how many *decodes* it has: the chunks of a single new token that come before all others. The device
            treats them alike, so the last token of a prompt can be a decode.
        copies: blocks to copy once the step's keys are stored, as (source, copy).
        state_loads: recurrent states to copy before the layers run, as (snapshot, entry).
        state_copies: recurrent states to copy after the layers, as (entry, entry of a sibling) and (entry, snapshot).
            Snapshots have negative numbers. No target occurs twice in a list, or is also a source there.
        scored: the prompt tokens whose log-probabilities or states it computes.
        constrained: the sequences that sample among the tokens of a mask, or from logits that a function changes.
        num_tokens: new tokens of all chunks.
        num_generated_tokens: how many of them were generated and are alone in their chunk. Statistics count these as
            decoded, because to a user each token of a prompt is prefill.
        first_tokens: the sequences whose first token it samples.
        pooled: those of `scored` that pool, by kind.
        needs_all_states: whether it needs the states of other tokens than those after which a row samples.
    """

    chunks: list[Chunk]
    num_decodes: int
    copies: tuple[tuple[int, int], ...] = ()
    state_loads: tuple[tuple[int, int], ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()
    scored: tuple[Scored, ...] = ()
    constrained: tuple[Sequence, ...] = ()
    num_tokens: int = 0
    num_generated_tokens: int = 0
    first_tokens: tuple[Sequence, ...] = ()
    pooled: Mapping[Pooling, list[Scored]] = MappingProxyType({})
    needs_all_states: bool = False

    @classmethod
    def of(
        cls,
        chunks: list[Chunk],
        copies: Iterable[tuple[int, int]] = (),
        state_loads: Iterable[tuple[int, int]] = (),
        state_copies: Iterable[tuple[int, int]] = (),
        scored: Iterable[Scored] = (),
        constrained: Iterable[Sequence] = (),
        first_tokens: Iterable[Sequence] = (),
    ) -> "Step":
        """Makes the step of these chunks. The counters of their sequences must already include it."""
        num_decodes = num_tokens = num_generated = 0
        for index, (seq, num_new_tokens, _) in enumerate(chunks):
            num_tokens += num_new_tokens
            if num_new_tokens == 1:
                num_decodes += num_decodes == index
                num_generated += seq.num_computed_tokens > seq.num_prompt_tokens
        lists = tuple(copies), tuple(state_loads), tuple(state_copies), tuple(scored), tuple(constrained)
        pooled: dict[Pooling, list[Scored]] = {}
        for each in lists[3]:
            if (kind := each.seq.pooling) is not None:
                pooled.setdefault(kind, []).append(each)
        has_scores = len(lists[3]) > sum(map(len, pooled.values()))
        needs_all_states = has_scores or not all(kind.needs_row_only for kind in pooled)
        numbers = num_tokens, num_generated
        return cls(chunks, num_decodes, *lists, *numbers, tuple(first_tokens), pooled, needs_all_states)


@dataclass(slots=True)
class StepBuilder:
    """A step under construction; see Step.

    leaders: indices of the chunks that end the prompt of a request with several completions.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    constrained: list[Sequence] = field(default_factory=list)
    leaders: list[int] = field(default_factory=list)
    first_tokens: list[Sequence] = field(default_factory=list)

    def build(self) -> Step:
        lists = self.copies, self.state_loads, self.state_copies, self.scored, self.constrained
        return Step.of(self.chunks, *lists, self.first_tokens)


@dataclass(frozen=True)
class TokenNumbers:
    """The numbers that ops/logprobs.py computes for some tokens, a row per token: the rank of the token, then pairs of
    an id and the bits of its log-probability, the token's own first. All are 32 bits.

    data: the rows.
    row_bytes: bytes of a row.
    """

    data: bytes = b""
    row_bytes: int = 0

    def has_broken(self, first: int, num_rows: int) -> bool:
        """Whether one of these rows has rank BROKEN_LOGITS."""
        ranks = np.frombuffer(self.data, np.int32).reshape(-1, self.row_bytes // 4)[first : first + num_rows, 0]
        return bool((ranks == BROKEN_LOGITS).any())

    def row(self, index: int, num_logprobs: int) -> bytes:
        """A row, cut to `num_logprobs` of the most probable tokens."""
        start = index * self.row_bytes
        return self.data[start : start + bytes_of_numbers(num_logprobs)]


def bytes_of_numbers(num_logprobs: int) -> int:
    """Bytes of one token's numbers, with `num_logprobs` of the most probable tokens."""
    return 4 * (1 + 2 * (1 + num_logprobs))


class WrongSlot(NamedTuple):
    """A slot that a step read as the keys of a token, but that was written for another prefix.

    row: index of the chunk.
    position: the token's position in its sequence.
    block: the block of the cache.
    rank: the rank whose cache it is.
    """

    row: int
    position: int
    block: int
    rank: int = 0


class CorruptCacheError(RuntimeError):
    """A step read keys that were computed for other tokens.

    seq_id: the sequence that read them.
    """

    def __init__(self, message: str, seq_id: int):
        super().__init__(message)
        self.seq_id = seq_id


@dataclass(frozen=True)
class StepOutput:
    """The result of a step.

    Args:
        token_ids: one per chunk that samples, in the step's order; BROKEN_LOGITS where the model's logits were not
            finite, NO_TOKEN_LEFT where the request's bans leave no token. Undefined for chunks that pool.
        logprobs: a row per chunk that samples; empty if none of them asks for log-probabilities.
        prompt_logprobs: a row per token of `Step.scored`, with rank BROKEN_LOGITS where the logits were not finite.
        states: for each kind of `Step.pooled`, float32 [num_rows, width]: a row per token, or a sum of them for "mean".
        wrong_slot: the first wrong slot of the first row that has one, if the cache has canaries.
    """

    token_ids: list[int]
    logprobs: TokenNumbers = TokenNumbers()
    prompt_logprobs: TokenNumbers = TokenNumbers()
    states: tuple[np.ndarray, ...] = ()
    wrong_slot: WrongSlot | None = None

    def check_cache(self, step: Step) -> None:
        """Raises a CorruptCacheError if `step` read a wrong slot. None of its results may be used then."""
        if self.wrong_slot is not None:
            row, position, block, rank = self.wrong_slot
            seq = step.chunks[row].seq
            raise CorruptCacheError(
                f"sequence {seq.seq_id} read wrong keys at position {position}, in block {block} of rank {rank}'s KV "
                "cache: they were computed for other tokens. Either nanovllm's bookkeeping of blocks has a bug, or the "
                "memory is faulty; please report it",
                seq.seq_id,
            )


def halves(step: Step) -> tuple[Step, Step] | None:
    """Two steps that compute one after the other what `step` computes at once, with about as many tokens each.

    Rows only read keys that earlier rows write. A sibling that was just forked stays behind the row from whose logits
    it samples. Copies of blocks come last, when all keys are stored. If only one row has tokens, they are divided.

    Returns None for a single token, for a single row that pools the mean of its tokens, and for steps whose rows sample
    later (constrained ones) or that copy recurrent states.
    """
    if step.constrained or step.state_loads or step.state_copies:
        return None
    ends = list(accumulate(chunk.num_new_tokens for chunk in step.chunks))
    cuts = [index for index, chunk in enumerate(step.chunks) if index and chunk.num_new_tokens]
    if not cuts:
        return _halves_of_row(step)
    cut = min(cuts, key=lambda index: abs(2 * ends[index - 1] - ends[-1]))
    ids = {chunk.seq.seq_id for chunk in step.chunks[:cut]}
    scored = [[each for each in step.scored if (each.seq.seq_id in ids) is is_first] for is_first in (True, False)]
    first_tokens = [[seq for seq in step.first_tokens if (seq.seq_id in ids) is is_first] for is_first in (True, False)]
    return (
        Step.of(step.chunks[:cut], scored=scored[0], first_tokens=first_tokens[0]),
        Step.of(step.chunks[cut:], step.copies, scored=scored[1], first_tokens=first_tokens[1]),
    )


def _halves_of_row(step: Step) -> tuple[Step, Step] | None:
    """The halves of a step whose first row has all tokens."""
    (seq, num_new_tokens, samples), *forked = step.chunks
    if num_new_tokens == 1 or any(kind.tokens == "mean" for kind in step.pooled):
        return None
    num_left = num_new_tokens // 2
    begun = copy(seq)
    begun.num_computed_tokens = end = seq.num_computed_tokens - num_left
    # The state after a token scores the next one.
    begun_scored = [each for each in step.scored if each.start <= end]
    scored = [each if each.end <= end + 1 else each._replace(end=end + 1, ends=False) for each in begun_scored]
    others = [each._replace(start=max(each.start, end + 1)) for each in step.scored if each.end > end + 1]
    return (
        Step.of([Chunk(begun, num_new_tokens - num_left, False)], scored=scored),
        Step.of([Chunk(seq, num_left, samples), *forked], step.copies, scored=others, first_tokens=step.first_tokens),
    )
