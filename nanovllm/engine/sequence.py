"""One completion of a request as the engine sees it: its tokens, how far they are computed, where their keys live."""

from array import array
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Protocol

import numpy as np

from nanovllm.sampling_params import SamplingParams, completion_seed


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


class Sequence:
    """One completion of a request.

    `num_tokens` counts a placeholder for every token that is being sampled by a step in flight;
    `token_ids` holds only the tokens that are known. The Scheduler moves `num_computed_tokens` towards
    `num_tokens`; the BlockManager keeps the block fields.
    """

    __slots__ = (
        "seq_id",
        "siblings",  # all completions of its request, itself among them; empty if it is the only one
        "token_ids",  # prompt + completion, as far as known: an array of 32-bit integers, which C code reads as it is
        "num_prompt_tokens",
        "num_tokens",  # len(token_ids) + tokens in flight
        "num_computed_tokens",  # leading tokens whose keys and values are in the cache (or will be: launched)
        "next_scored",  # first prompt token whose log-probability no step was launched for; the prompt's length if none
        "logprobs",  # of its tokens, one row of numbers each as ops/logprobs.py lays them out; empty if not asked for
        "prompt_logprobs",  # the same of its prompt's tokens
        "num_cached_tokens",  # prompt tokens that the prefix cache served when the request was first admitted
        "max_length",  # most tokens of prompt + completion
        "sampling_params",
        "seed",  # 64 bits, keys the sampling noise
        "stop_token_ids",  # every id that ends this request
        "stop_predicate",  # the caller's: called with each new token, True ends the completion
        "is_constrained",  # whether masks say which tokens may come next; its stop predicate is a TokenGuide then
        "status",
        "finish_reason",
        "error",
        "entry",  # its place in the SequenceTable while running, else -1
        "num_preemptions",  # with seq_id, names one admission
        "block_table",  # logical block -> physical block
        "block_hashes",  # chained hashes of the leading full blocks, as far as they were needed
        "num_registered_blocks",  # leading blocks that are in the prefix cache, or have an equal there
        "last_registration",  # serial number of the last of those, 0 for none
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Iterable[int],
        sampling_params: SamplingParams,
        max_length: int,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        stop_predicate: Callable[[int], bool] | None = None,
    ):
        self.seq_id = seq_id
        self.siblings: list[Sequence] = []
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = self.num_cached_tokens = 0
        self.next_scored = self.num_prompt_tokens
        self.logprobs, self.prompt_logprobs = bytearray(), bytearray()
        self.max_length = max_length
        self.sampling_params = sampling_params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.stop_predicate = stop_predicate
        self.is_constrained = False
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.entry = -1
        self.num_preemptions = self.num_registered_blocks = self.last_registration = 0
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def has_token_in_flight(self) -> bool:
        return self.num_tokens > len(self.token_ids)

    @property
    def only_scores(self) -> bool:
        """Whether it ends with the log-probabilities of its prompt, and generates nothing."""
        return self.max_length == self.num_prompt_tokens

    @property
    def is_all_launched(self) -> bool:
        """Whether all that is left is to commit steps in flight."""
        return self.has_token_in_flight or (self.only_scores and self.next_scored == self.num_prompt_tokens)

    @property
    def waits_for_prompt(self) -> bool:
        """Whether it has neither blocks nor a token yet, and nothing to score."""
        is_new = self.num_tokens == self.num_prompt_tokens == self.next_scored
        return is_new and self.status is SequenceStatus.WAITING

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed, blocks {self.block_table})"
        )


def make_sequences(
    first_id: int,
    prompt_token_ids: Iterable[int],
    sampling_params: SamplingParams,
    max_length: int,
    stop_token_ids: frozenset[int],
    seed: int,
    first_scored: int,
    is_constrained: bool,
) -> list[Sequence]:
    """The completions of one request: their ids follow `first_id`, their seeds derive from the request's, and the first
    one scores the prompt, from token `first_scored` on."""
    sequences = [
        Sequence(
            first_id + index,
            prompt_token_ids,
            sampling_params,
            max_length,
            stop_token_ids,
            completion_seed(seed, index),
        )
        for index in range(sampling_params.n)
    ]
    for seq in sequences:
        seq.is_constrained = is_constrained
    if sampling_params.prompt_logprobs is not None:
        sequences[0].next_scored = first_scored
    if len(sequences) > 1:
        for seq in sequences:
            seq.siblings = sequences
    return sequences
