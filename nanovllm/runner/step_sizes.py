"""A step's rows, how large it is, and the ladders of sizes that captured steps are padded to. No device."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nanovllm.attention.metadata import QUERY_TILE
from nanovllm.engine.step import Step

MAX_SCORED = 256  # rows of logits that are made at a time to score prompts
# Arithmetic of an eager step that decodes beside prompts: enough to keep a fast GPU busy while the host launches the
# next.
_FLOP_BESIDE_DECODES = 12e12
# Tokens × hidden size of a captured step that decodes beside prompts: enough that its matrix products fill the GPU.
_TOKEN_WIDTH_BESIDE_DECODES = 768 * 4096
# Captured steps have tiles for prompts of this length. Without generation, steps of each number of tokens are captured
# for several lengths, because large steps with long prompts would have many idle tiles.
_USUAL_LENGTH, _LENGTHS_OF_POOLED = 32, (256, 64, 16)
_MIN_TOKENS_BESIDE_DECODES = 512  # matrix products of fewer rows waste a GPU


class StepRows(NamedTuple):
    """A step's chunks as columns, int64 [num_rows] each: all that the host says about it, gathered in one pass.

    tenants: [num_rows, 2], the request's id and how often it was preempted, which together identify one admission.
    entries: the row's place in the SequenceTable.
    num_new_tokens, context_lens: number of tokens to compute, and of keys after the step.
    samples: 1 for rows that sample.
    num_blocks: number of blocks in the row's block table.
    num_cached: prompt tokens that the prefix cache served.
    """

    tenants: np.ndarray
    entries: np.ndarray
    num_new_tokens: np.ndarray
    context_lens: np.ndarray
    samples: np.ndarray
    num_blocks: np.ndarray
    num_cached: np.ndarray

    @classmethod
    def of(cls, step: Step) -> "StepRows":
        """The rows of a step that was just scheduled."""
        numbers = (
            number
            for seq, num_new, samples in step.chunks
            for number in (
                seq.seq_id, seq.num_preemptions, seq.entry, num_new, seq.num_computed_tokens, samples,
                len(seq.block_table), seq.num_cached_tokens,
            )
        )  # fmt: skip
        columns = np.fromiter(numbers, np.int64, 8 * len(step.chunks)).reshape(-1, 8).T
        return cls(columns[:2].T, *columns[2:])

    @property
    def num_sampled(self) -> int:
        return int(self.samples.sum())


NO_ROWS = StepRows.of(Step.of([]))


class StepSize(NamedTuple):
    """How large a step is, padding included. Eager, padded and captured steps differ in nothing else.

    num_rows, num_tokens, num_sampled: rows, their new tokens, and how many of the rows may sample.
    num_tiles: tiles of the queries of prompts; 0 for decodes alone.
    max_num_decodes, max_seqlen_q: as in AttentionMetadata.
    is_grouped: whether keys that decodes share are read once for all of them.
    has_adapters: whether any row has an adapter in a slot.
    """

    num_rows: int
    num_tokens: int
    num_sampled: int
    num_tiles: int
    max_num_decodes: int
    max_seqlen_q: int
    is_grouped: bool
    has_adapters: bool = False


@dataclass(frozen=True)
class StepSizes:
    """Chooses the size of each step.

    max_num_rows: rows of a captured step. Only a step with forked siblings, which are rows without tokens, has more.
    sampled_multiple: the number of rows that may sample is padded to a multiple of it.
    max_num_scored: rows of logits that are made at a time to score prompts.
    max_tokens_beside_decodes: see Scheduler.
    decode_sizes: numbers of rows of captured decodes, ascending; empty if nothing is captured.
    prompt_sizes: numbers of tokens of captured steps with prompts, ascending.
    generates: the model has an LM head. Without it, no row of a step is treated as a decode.
    """

    max_num_rows: int
    sampled_multiple: int
    max_num_scored: int
    max_tokens_beside_decodes: int
    decode_sizes: tuple[int, ...]
    prompt_sizes: tuple[int, ...]
    generates: bool = True

    @classmethod
    def of(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        hidden_size: int,
        num_layer_parameters: float,
        captures_decodes: bool,
        captures_prompts: bool,
        sampled_multiple: int = 1,
        generates: bool = True,
    ) -> "StepSizes":
        """The sizes of one engine.

        num_layer_parameters: numbers in this rank's layers that one token is multiplied with.
        generates: the model has an LM head. Otherwise steps have only prompts, and nearly all are as large as possible.
        sampled_multiple: more than 1 if there are several ranks.
        """
        max_num_rows = min(max_num_seqs, max_num_batched_tokens)
        max_scored = MAX_SCORED // sampled_multiple * sampled_multiple
        if sampled_multiple > 1:  # the exchange has room for as many rows of logits as can sample
            max_scored = min(max_scored, _padded(max_num_rows, sampled_multiple))
        beside_decodes = max_tokens_beside_decodes(hidden_size, num_layer_parameters, captures_prompts)
        prompts: list[int] = []
        if captures_prompts:
            limit = min(max_num_batched_tokens, max_num_seqs * max(1, max_model_len - 1))
            usual = min(beside_decodes, limit)
            largest = min(max(usual, 2 * max_num_seqs), limit)
            prompts = prompt_ladder(usual, largest) if generates else doubling_ladder(limit)
        decodes = decode_ladder(max_num_rows) if captures_decodes and generates else []
        return cls(
            max_num_rows, sampled_multiple, max_scored, beside_decodes, tuple(decodes), tuple(prompts), generates
        )

    @property
    def are_captured(self) -> bool:
        return bool(self.decode_sizes or self.prompt_sizes)

    def eager(self) -> "StepSizes":
        """The same engine's sizes if it captures nothing."""
        return replace(self, decode_sizes=(), prompt_sizes=())

    def size_of(self, rows: StepRows, num_decodes: int, is_scored: bool = False) -> tuple[StepSize, bool]:
        """The size of a step without shared prefixes, and whether the step is one of those that are captured.

        is_scored: it needs the hidden states of tokens that do not sample, which captured steps do not keep.
        """
        num_rows, num_tokens = len(rows.entries), int(rows.num_new_tokens.sum())
        if self.decode_sizes and not is_scored and num_decodes == num_rows:
            return self.decode_size(self.padded_rows(num_rows)), True
        num_tiles = int((-(-rows.num_new_tokens[num_decodes:] // QUERY_TILE)).sum())
        if not is_scored:
            for size in self._all_prompt_sizes(self.prompt_sizes[bisect_left(self.prompt_sizes, num_tokens) :]):
                if num_tiles <= size.num_tiles and num_rows <= size.num_rows:
                    return size, True
        # At least one row, real or of padding, so that no kernel gets an empty tensor.
        num_sampled, longest = self.padded_sampled(max(rows.num_sampled, 1)), int(rows.num_new_tokens.max())
        return StepSize(num_rows, num_tokens, num_sampled, num_tiles, num_decodes, longest, False), False

    def decode_size(self, num_rows: int, is_grouped: bool = False) -> StepSize:
        """The size of a captured step of decodes alone."""
        return StepSize(num_rows, num_rows, self.padded_sampled(num_rows), 0, num_rows, 1, is_grouped)

    def _all_prompt_sizes(self, numbers: Iterable[int]) -> Iterator[StepSize]:
        lengths = (_USUAL_LENGTH,) if self.generates else _LENGTHS_OF_POOLED
        return (self.prompt_size(num_tokens, length) for num_tokens in numbers for length in lengths)

    def prompt_size(self, num_tokens: int, length: int = _USUAL_LENGTH) -> StepSize:
        """The size of a captured step with prompts: all its rows may be decodes, or prompts of any length.

        length: there are tiles enough if prompts have at least so many tokens on average.
        """
        num_rows = min(self.max_num_rows, num_tokens)
        # Every tile costs each head a program, or a turn of a program in hopper_prompts.py, whether it is used or not.
        num_tiles = num_tokens // QUERY_TILE + min(num_rows, num_tokens // length + 1)
        max_num_decodes = num_rows if self.generates else 0
        return StepSize(
            num_rows, num_tokens, self.padded_sampled(num_rows), num_tiles, max_num_decodes, num_tokens, False
        )

    def numbers_of_rows(self) -> set[int]:
        """The numbers of rows that captured steps multiply."""
        return {number for size in self.sizes_to_capture() for number in (size.num_tokens, size.num_sampled)}

    def padded_sampled(self, num_sampled: int) -> int:
        """The number of rows, rounded up so that the ranks can share them evenly."""
        return _padded(num_sampled, self.sampled_multiple)

    def padded_rows(self, num_rows: int) -> int:
        """The number of rows of the smallest captured decode step that has room for this many."""
        return self.decode_sizes[bisect_left(self.decode_sizes, num_rows)]

    def sizes_to_capture(self) -> list[StepSize]:
        """The sizes of forward halves that the first requests will need, largest first."""
        sizes = [*self._all_prompt_sizes(self.prompt_sizes), *map(self.decode_size, self.decode_sizes)]
        return sorted(sizes, key=lambda size: size.num_tokens, reverse=True)

    def sampled_to_capture(self) -> list[int]:
        """The numbers of rows of sampling halves that the first requests will need, largest first."""
        return list(dict.fromkeys(map(self.padded_sampled, reversed(self.decode_sizes))))


def decode_ladder(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, every 16 up to 256, every 32 up to 512, then every 64, and the
    largest."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, largest + 1, 64)]
    return sorted({size for size in sizes if size < largest} | {largest})


def prompt_ladder(usual: int, largest: int) -> list[int]:
    """Numbers of tokens to capture, ascending: `usual` and the smaller multiples of its sixteenth, then `largest` and
    the multiples of its quarter. Sixteenth and quarter are rounded up to multiples of 64, the tile of matrix
    products."""
    part, quarter = -(-usual // 1024) * 64, -(-largest // 256) * 64
    beyond = [size for size in (*range(quarter, largest, quarter), largest) if size > usual]
    return [*range(part, usual, part), usual, *beyond]


def doubling_ladder(largest: int) -> list[int]:
    """Numbers of tokens to capture if a model only pools, ascending: `largest`, its half, and so on to about 1024."""
    return [largest >> shift for shift in range(4, -1, -1) if shift == 0 or largest >> shift >= 1024]


def max_tokens_beside_decodes(hidden_size: int, num_layer_parameters: float, captures_prompts: bool) -> int:
    """How many tokens a step with decodes and prompts has on a GPU, so that it is just large enough; see Scheduler.

    num_layer_parameters: numbers in this rank's layers that one token is multiplied with.
    """
    if captures_prompts:
        num_tokens = _TOKEN_WIDTH_BESIDE_DECODES // hidden_size
    else:
        num_tokens = int(_FLOP_BESIDE_DECODES / (2 * num_layer_parameters))
    # A multiple of 256 fills the tiles of a matrix product.
    return max(num_tokens // 256 * 256, _MIN_TOKENS_BESIDE_DECODES)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
