"""Turns the ranks' columns of the logits into one token per row: logits processors, filters, the draw, and its
log-probability."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.layers.embed_head import VocabSlice
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.filters import filter_thresholds
from nanovllm.ops.logprobs import RAW, logprobs
from nanovllm.ops.process_logits import TokenRules, process_logits
from nanovllm.ops.sample import BROKEN_LOGITS, best_of_parts, best_part, num_parts_of, sample


class SampledRows(NamedTuple):
    """How to sample each row, [num_rows] each.

    entries, lengths: int64, the table's entry that gets the token, and the token's position in its sequence.
    seeds: int64; temperatures, top_ps, min_ps: float32; top_ks: int32; see ops/sample.py and ops/filters.py.
    kinds: int32, the distribution whose log-probabilities are returned, see ops/logprobs.py.
    """

    entries: torch.Tensor
    lengths: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    kinds: torch.Tensor


class Sampled(NamedTuple):
    """The results of sampling, on the device.

    tokens: int64 [num_rows], see ops/sample.py.
    logprobs: int32 [num_rows, 1 + 2 × width], as ops/logprobs.py lays them out; no columns if no row asks for them.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor

    def first(self, num_rows: int) -> "Sampled":
        return Sampled(self.tokens[:num_rows], self.logprobs[:num_rows])


# A function from a row's logits, float32 [vocab_size], to its new ones.
LogitsChange = Callable[[torch.Tensor], torch.Tensor]


class SamplingNeeds(NamedTuple):
    """The requirements of a step's rows beyond a temperature. Anything that no row needs is not computed.

    has_filters: whether a row has a top-k, top-p or min-p.
    rules_version: version of the tensors with the penalties, biases and bans of these rows; 0 if they have none.
    logprobs_width: number of ids and log-probabilities to return per row, see ops/logprobs.py; 0 if no row asks for
        them.
    changes: (row, function that changes its logits before all else); only on a single rank, and never captured.
    """

    has_filters: bool = False
    rules_version: int = 0
    logprobs_width: int = 0
    changes: tuple[tuple[int, LogitsChange], ...] = ()


def row_multiple(parallel: Parallel) -> int:
    """The number of rows must be a multiple of this, so that every rank gets an equal share.

    A share begins at an address that is a multiple of 16 bytes, because Triton compiles another kernel for other
    alignments.
    """
    return 1 if parallel.size == 1 else 4 * parallel.size


class Sampler:
    """Samples rows of logits. Each rank holds some of their columns.

    Filters and log-probabilities need a row's whole vocabulary. So each rank then takes a share of the rows, with all
    their columns. In other steps, ranks with a `sampling_exchange` each find the best of their own columns and exchange
    only those. Ranks without one, and deterministic ones, divide the rows in these steps too.

    Args:
        vocab: this rank's columns.
        parallel: this rank's place.
        use_kernels: compute with our kernels.
        deterministic: a row's results depend on that row alone, bit for bit, not on what other rows ask for.
    """

    def __init__(self, vocab: VocabSlice, parallel: Parallel, use_kernels: bool = False, deterministic: bool = False):
        self._vocab, self._parallel, self._use_kernels = vocab, parallel, use_kernels
        self._always_float32 = deterministic and use_kernels

    def sample(
        self,
        columns: torch.Tensor,
        rows: SampledRows,
        needs: SamplingNeeds,
        tokens: torch.Tensor,
        rules: TokenRules,
    ) -> Sampled:
        """The tokens of all rows, and their log-probabilities if asked for; the same on every rank.

        Args:
            columns: [num_rows, vocab.size], see ParallelLMHead; num_rows is a multiple of `row_multiple`.
            tokens: int32 [num_entries, max_model_len], the tokens of the table's entries.
            rules: the rules of the table's entries.
        """
        parallel, exchange = self._parallel, self._parallel.sampling_exchange
        if self._exchanges_best(needs):
            best = exchange.all_gather(self._best_of_columns(columns, rows, needs, tokens, rules)[None])
            return Sampled(best_part(best), columns.new_empty((len(columns), 0), dtype=torch.int32))
        num_rows = len(columns) // parallel.size
        ours = SampledRows(*(value.narrow(0, parallel.rank * num_rows, num_rows) for value in rows))
        logits = columns
        if parallel.size > 1:
            logits = (exchange or parallel).rows_of_columns(columns)[:, : self._vocab.vocab_size]
        sampled = self._sample_rows(logits, ours, needs, tokens, rules)
        if parallel.size == 1:
            return sampled
        if not needs.logprobs_width:
            gathered = (exchange or parallel).all_gather(sampled.tokens)
            return Sampled(gathered, sampled.logprobs.new_empty((len(gathered), 0)))
        # In one exchange: a second one would overwrite the result of the first.
        packed = torch.cat([sampled.tokens[:, None].view(torch.int32), sampled.logprobs], 1)
        gathered = (exchange or parallel).all_gather(packed)
        return Sampled(gathered[:, :2].contiguous().view(torch.int64)[:, 0], gathered[:, 2:])

    def score(self, columns: torch.Tensor, targets: torch.Tensor, width: int) -> torch.Tensor:
        """The raw log-probabilities of given tokens: int32 [num_rows, 1 + 2 × width], as ops/logprobs.py lays them out,
        with rank BROKEN_LOGITS where a logit is NaN or +inf; the same on every rank.

        Args:
            columns: as in `sample`.
            targets: int64 [num_rows], the tokens.
        """
        parallel = self._parallel
        num_rows = len(columns) // parallel.size
        logits = parallel.rows_of_columns(columns)[:, : self._vocab.vocab_size]
        ours = targets.narrow(0, parallel.rank * num_rows, num_rows)
        kinds, ones = torch.full_like(ours, RAW, dtype=torch.int32), torch.ones_like(ours, dtype=torch.float32)
        scores = logprobs(logits, logits, ours, kinds, ones, None, width, self._use_kernels)
        is_broken = ~(logits.amax(-1) < torch.inf)  # the largest is NaN if one is
        scores[:, 0].masked_fill_(is_broken, BROKEN_LOGITS)
        return parallel.all_gather(scores)

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
        is_plain = not needs.has_filters and not needs.logprobs_width and not self._always_float32
        return self._parallel.sampling_exchange is not None and is_plain

    def _best_of_columns(
        self, columns: torch.Tensor, rows: SampledRows, needs: SamplingNeeds, tokens: torch.Tensor, rules: TokenRules
    ) -> torch.Tensor:
        """`best_of_parts` of this rank's columns, int32 [2, num_rows, num_parts], which it sends to the others."""
        vocab = self._vocab
        logits = self._processed(columns[:, : vocab.num_ids], rows, needs, tokens, rules, vocab.first)
        settings, num_parts = (rows.temperatures, rows.seeds, rows.lengths), num_parts_of(vocab.size)
        return best_of_parts(logits, *settings, first_id=vocab.first, num_parts=num_parts)

    def _sample_rows(
        self, logits: torch.Tensor, rows: SampledRows, needs: SamplingNeeds, tokens: torch.Tensor, rules: TokenRules
    ) -> Sampled:
        """Samples whole rows, logits: [num_rows, vocab_size], without other ranks."""
        raw, logits = logits, self._processed(logits, rows, needs, tokens, rules)
        thresholds = None
        if needs.has_filters:
            settings = rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps
            thresholds = filter_thresholds(logits, *settings, use_kernels=self._use_kernels)
        token_ids = sample(logits, rows.temperatures, rows.seeds, rows.lengths, thresholds, self._use_kernels)
        if not needs.logprobs_width:
            return Sampled(token_ids, raw.new_empty((len(raw), 0), dtype=torch.int32))
        of_tokens = logprobs(
            raw, logits, token_ids, rows.kinds, rows.temperatures, thresholds, needs.logprobs_width, self._use_kernels
        )
        return Sampled(token_ids, of_tokens)

    def _processed(self, logits, rows: SampledRows, needs: SamplingNeeds, tokens, rules, first_id: int = 0):
        if self._always_float32:  # kernels add numbers of other dtypes, or with other strides, in another order
            logits = logits.float().contiguous()
        if needs.changes:
            logits = logits.to(torch.float32, copy=True)  # the raw ones stay as they are
            for row, change in needs.changes:
                logits[row] = change(logits[row].clone())  # how a view is aligned depends on the row
        if not needs.rules_version:
            return logits
        return process_logits(logits, rows.entries, rows.lengths, tokens, rules, first_id, self._use_kernels)
