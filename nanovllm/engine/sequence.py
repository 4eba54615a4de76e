"""One completion of a request in the engine: its tokens, how far they are computed, and where their keys are."""

from array import array
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanovllm.sampling_params import SamplingParams, completion_seed

NO_STOP = 2**31  # more tokens than any sequence has


POOLED = SamplingParams(temperature=0, max_tokens=1)  # of sequences that pool; nothing is sampled with it


class Pooling(NamedTuple):
    """The numbers that a sequence returns instead of generating tokens.

    tokens: whose hidden states: those of the "last" or the "first" token of the prompt, the "mean" of all, or "all".
    layers: () for the states after the final norm. Else numbers as in transformers' output_hidden_states: 0 is the
        embedding, i the output of the layer i, counted from 1, and the number of layers is the final norm's.
    uses_head: the outputs of the classification head for these states, instead of the states.
    """

    tokens: str
    layers: tuple[int, ...] = ()
    uses_head: bool = False

    @property
    def needs_row_only(self) -> bool:
        """Whether it pools only the last token's final state."""
        return self.tokens == "last" and not self.layers


class Adapter(NamedTuple):
    """Says whether a sequence is computed with the model's own weights or with a LoRA adapter.

    version: names the adapter's values; 0 for the model's own weights. No two adapters of an engine have the same
        version, and sequences of other versions share no keys.
    slot: the adapter's slot in the linear layers; 0 if there is no adapter, or it is merged into the weights.
    """

    version: int = 0
    slot: int = 0


BASE = Adapter()


class TokenGuide(Protocol):
    """A stop predicate that also says which tokens may come next. The engine itself knows no text."""

    def __call__(self, token_id: int) -> bool:
        """Takes the token that was generated next; True ends the completion."""
        ...

    @staticmethod
    def fill_masks(guides: list[Any], masks: np.ndarray) -> None:
        """Writes the mask of each guide's next token.

        masks: int32 [len(guides), ceil(vocab_size / 32)], contiguous; bit `id & 31` of word `id >> 5` says whether the
            id may come next.
        """
        ...


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One completion of a request.

    `num_tokens` counts a placeholder for every token that a step in flight samples; `token_ids` holds only the tokens
    that are known. The Scheduler moves `num_computed_tokens` towards `num_tokens`; the BlockManager keeps the block
    fields.
    """

    seq_id: int
    prompt_token_ids: InitVar[Iterable[int]]
    sampling_params: SamplingParams
    max_length: int  # maximum number of tokens of prompt + completion
    stop_token_ids: frozenset[int] = frozenset()  # all ids that end this request
    seed: int = 0  # 64 bits, keys the sampling noise
    stop_predicate: Callable[[int], bool] | None = None  # called with each new token; True ends the completion
    pooling: Pooling | None = None  # what it returns if it generates nothing
    adapter: Adapter = BASE
    # Its stop predicate decides what may come next: a TokenGuide by a mask, LogitsProcessors by changing the logits.
    is_constrained: bool = False
    # All completions of its request, itself among them; empty if it is the only one.
    siblings: "list[Sequence]" = field(default_factory=list)
    # Prompt + completion, as far as known: 32-bit integers, which C code reads as they are.
    token_ids: "array[int]" = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # len(token_ids) + tokens in flight
    num_computed_tokens: int = 0  # leading tokens whose keys and values are in the cache, or will be: launched
    first_token_time: float | None = None  # when its first token was committed, in seconds since the epoch
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served when the request was first admitted
    max_num_computed: int = field(
        init=False
    )  # maximum number of tokens to compute; the last generated one needs no keys
    # The next prompt token to score, the end of those to score, and the first of them, from which a sequence that
    # begins again scores. A pooled state is named by the token after it.
    next_scored: int = field(init=False)
    end_scored: int = field(init=False)
    first_scored: int = field(init=False)
    # Its tokens' log-probabilities, one row of numbers each, as in TokenNumbers; empty if they are not asked for.
    logprobs: bytearray = field(default_factory=bytearray)
    prompt_logprobs: bytearray = field(default_factory=bytearray)  # the same for its prompt's tokens
    states: list[np.ndarray] = field(default_factory=list)  # what it pools, float32 [num_rows, width] per step
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    error: str | None = None
    entry: int = -1  # its place in the SequenceTable while it runs, else -1
    num_preemptions: int = 0  # with seq_id, names one admission
    block_table: list[int] = field(default_factory=list)  # logical block -> physical block
    # The same for the window groups, a block of each per logical block; () where they were given back.
    window_table: list[tuple[int, ...]] = field(default_factory=list)
    num_behind_window: int = 0  # leading logical blocks whose window groups' blocks were given back
    block_hashes: list[int] = field(default_factory=list)  # chained hashes of the leading full blocks, as far as needed
    num_registered_blocks: int = 0  # leading blocks that are in the prefix cache, or equal a block there
    last_registration: int = 0  # serial number of the last of those, 0 for none
    num_shared_tokens: int = 0  # leading tokens whose keys others had computed when it was last admitted
    may_share: bool = True  # whether it may get keys that others computed
    next_stop: int = NO_STOP  # leading tokens after which a chunk ends, because its state there is copied

    def __post_init__(self, prompt_token_ids: Iterable[int]) -> None:
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = length = len(self.token_ids)
        self.next_scored = self.first_scored = self.end_scored = length
        self.max_num_computed = self.max_length - 1
        if self.pooling is not None:
            self.max_length = self.max_num_computed = length
            self.next_scored = self.first_scored = length if self.pooling.tokens == "last" else 1
            self.end_scored = 2 if self.pooling.tokens == "first" else length + 1

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def has_token_in_flight(self) -> bool:
        return self.num_tokens > len(self.token_ids)

    @property
    def only_scores(self) -> bool:
        """Whether it ends with the numbers of its prompt, without a generated token."""
        return self.max_length == self.num_prompt_tokens

    def scores_context_of(self, other: "Sequence") -> bool:
        """Whether both score a continuation of the same context."""
        end = self.next_scored - 1
        both_score = other.next_scored == self.next_scored < min(self.num_prompt_tokens, other.num_prompt_tokens)
        return both_score and other.begins_as(self, end)

    def begins_as(self, other: "Sequence", num_tokens: int) -> bool:
        """Whether the keys of the first `num_tokens` tokens are the same."""
        return self.adapter == other.adapter and self.token_ids[:num_tokens] == other.token_ids[:num_tokens]

    @property
    def is_all_launched(self) -> bool:
        """Whether no more steps need be launched for it."""
        return self.has_token_in_flight or (self.only_scores and self.next_scored == self.end_scored)

    @property
    def waits_for_prompt(self) -> bool:
        """Whether it has neither blocks nor a token yet, and nothing to score."""
        is_new = self.num_tokens == self.num_prompt_tokens == self.next_scored
        return is_new and self.may_share and self.status is SequenceStatus.WAITING

    def begun_again(self) -> "Sequence":
        """A sequence that takes the place of this one, which is FINISHED from here on. It computes all tokens that are
        known by itself, as after a preemption, and so does not depend on keys of others."""
        again = copy(self)
        again.status, again.entry, again.next_stop, again.may_share = SequenceStatus.WAITING, -1, NO_STOP, False
        again.block_table, again.window_table, again.states, again.prompt_logprobs = [], [], [], bytearray()
        again.num_tokens, again.num_computed_tokens, again.next_scored = len(self.token_ids), 0, self.first_scored
        again.num_behind_window = again.num_registered_blocks = again.last_registration = again.num_shared_tokens = 0
        again.num_preemptions += 1
        if self.siblings:
            self.siblings[self.siblings.index(self)] = again
        self.status = SequenceStatus.FINISHED
        return again

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed, blocks {self.block_table})"
        )


def completions_of(first: Sequence) -> list[Sequence]:
    """All completions of the request whose first one is given. Their ids follow its id, their seeds derive from its
    seed, and only the first one scores the prompt."""
    others = [
        Sequence(
            first.seq_id + index, first.token_ids, first.sampling_params, first.max_length, first.stop_token_ids,
            completion_seed(first.seed, index), adapter=first.adapter, is_constrained=first.is_constrained,
        )
        for index in range(1, first.sampling_params.n)
    ]  # fmt: skip
    sequences = [first, *others]
    if others:
        for seq in sequences:
            seq.siblings = sequences
    return sequences
