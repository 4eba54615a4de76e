"""Turns the ranks' columns of the logits into one token per row: logits processors, filters, and the draw."""

from typing import NamedTuple

import torch

from nanovllm.layers.embed_head import VocabSlice
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.filters import filter_thresholds
from nanovllm.ops.process_logits import TokenRules, process_logits
from nanovllm.ops.sample import best_of_parts, best_part, num_parts_of, sample


class SampledRows(NamedTuple):
    """How to sample each row, [num_rows] each.

    entries, lengths: int64, the table's entry that gets the token, and the token's position in its sequence.
    seeds: int64; temperatures, top_ps, min_ps: float32; top_ks: int32; as ops/sample.py and ops/filters.py have them.
    """

    entries: torch.Tensor
    lengths: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor


class SamplingNeeds(NamedTuple):
    """What the rows of a step ask for beyond a temperature. What nobody asks for is not computed.

    has_filters: whether some have a top-k, top-p or min-p.
    rules_version: which tensors hold the penalties, biases and bans of these rows; 0 if they have none.
    """

    has_filters: bool = False
    rules_version: int = 0


def row_multiple(parallel: Parallel) -> int:
    """The number of rows must be a multiple of this, so that every rank gets an equal share.

    Each share begins at an address that is a multiple of 16 bytes, because Triton compiles another kernel for other
    alignments.
    """
    return 1 if parallel.size == 1 else 4 * parallel.size


class Sampler:
    """Samples rows of logits of which each rank holds some columns.

    Filters look at a row's whole vocabulary, so each rank then takes a share of the rows, with all their columns.
    Without filters, ranks that have a `sampling_exchange` each find the best of their own columns and exchange only
    those; ranks that have none share the rows here too.

    Args:
        vocab: this rank's columns.
        parallel: this rank's place.
        fused: compute with our kernels.
    """

    def __init__(self, vocab: VocabSlice, parallel: Parallel, fused: bool = False):
        self._vocab, self._parallel, self._fused = vocab, parallel, fused

    def sample(
        self,
        columns: torch.Tensor,
        rows: SampledRows,
        needs: SamplingNeeds,
        tokens: torch.Tensor,
        rules: TokenRules,
    ) -> torch.Tensor:
        """The tokens of all rows, int64 [num_rows], as ops/sample.py has them; the same on every rank.

        Args:
            columns: [num_rows, vocab.size], see ParallelLMHead; num_rows is a multiple of `row_multiple`.
            rows: how to sample each.
            needs: what they ask for.
            tokens: int32 [num_entries, max_model_len], the table's.
            rules: of the table's entries.
        """
        parallel, exchange = self._parallel, self._parallel.sampling_exchange
        if self._exchanges_best(needs):
            return best_part(exchange.all_gather(self._best_of_columns(columns, rows, needs, tokens, rules)[None]))
        num_rows = len(columns) // parallel.size
        ours = SampledRows(*(value.narrow(0, parallel.rank * num_rows, num_rows) for value in rows))
        logits = columns
        if parallel.size > 1:
            logits = (exchange or parallel).rows_of_columns(columns)[:, : self._vocab.vocab_size]
        return (exchange or parallel).all_gather(self._sample_rows(logits, ours, needs, tokens, rules))

    def compile(
        self, row: SampledRows, needs: SamplingNeeds, tokens: torch.Tensor, rules: TokenRules, dtype: torch.dtype
    ) -> None:
        """Compiles the kernels that `sample` calls for such needs, by sampling one row of zeros without other ranks."""
        columns = torch.zeros(1, self._parallel.size * self._vocab.size, dtype=dtype, device=tokens.device)
        if self._exchanges_best(needs):
            best_part(self._best_of_columns(columns[:, : self._vocab.size], row, needs, tokens, rules)[None])
        else:
            self._sample_rows(columns[:, : self._vocab.vocab_size], row, needs, tokens, rules)

    def _exchanges_best(self, needs: SamplingNeeds) -> bool:
        return self._parallel.sampling_exchange is not None and not needs.has_filters

    def _best_of_columns(
        self, columns: torch.Tensor, rows: SampledRows, needs: SamplingNeeds, tokens: torch.Tensor, rules: TokenRules
    ) -> torch.Tensor:
        """What this rank sends the others when no row has a filter: `best_of_parts` of its columns, int32 [2, num_rows,
        num_parts]."""
        vocab = self._vocab
        logits = self._processed(columns[:, : vocab.num_ids], rows, needs, tokens, rules, vocab.first)
        settings, num_parts = (rows.temperatures, rows.seeds, rows.lengths), num_parts_of(vocab.size)
        return best_of_parts(logits, *settings, first_id=vocab.first, num_parts=num_parts)

    def _sample_rows(
        self, logits: torch.Tensor, rows: SampledRows, needs: SamplingNeeds, tokens: torch.Tensor, rules: TokenRules
    ) -> torch.Tensor:
        """logits [num_rows, vocab_size] -> int64 [num_rows], without other ranks."""
        logits = self._processed(logits, rows, needs, tokens, rules)
        thresholds = None
        if needs.has_filters:
            settings = rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps
            thresholds = filter_thresholds(logits, *settings, fused=self._fused)
        return sample(logits, rows.temperatures, rows.seeds, rows.lengths, thresholds, self._fused)

    def _processed(self, logits, rows: SampledRows, needs: SamplingNeeds, tokens, rules, first_id: int = 0):
        if not needs.rules_version:
            return logits
        return process_logits(logits, rows.entries, rows.lengths, tokens, rules, first_id, self._fused)
