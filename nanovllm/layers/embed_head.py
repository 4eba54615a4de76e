"""Token embedding and LM head, divided over the ranks by rows of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import WHOLE, PartialSum, Shard, Shards, empty_parameter
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.linear import linear, pack_weight

# Each rank's part of the vocabulary is a multiple of this, because matrix products are faster at such sizes.
_ROWS = 16


class VocabParallel(nn.Module):
    """A weight by rows of the vocabulary: each rank holds an equal slice, padded with zeros where it does not divide.

    weight: [slice_size, hidden_size].
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        parallel: Parallel,
        weight: nn.Parameter | None = None,
        fused: bool = False,
        **kw,
    ):
        super().__init__()
        self.fused = fused
        self.vocab_size = vocab_size
        self.parallel = parallel
        slice_size = -(-vocab_size // parallel.size)
        if parallel.size > 1:
            slice_size = -(-slice_size // _ROWS) * _ROWS
        self.slice_size = slice_size
        self.first = parallel.rank * slice_size
        self.num_rows = max(0, min(slice_size, vocab_size - self.first))  # real rows of this rank
        if weight is None:
            weight = empty_parameter(slice_size, hidden_size, **kw)
            weight[self.num_rows :].zero_()
        self.weight = weight

    def shards(self, name: str) -> Shards:
        weight = self.get_parameter(name)
        hidden_size = weight.shape[1]
        source = ((min(self.first, self.vocab_size), self.num_rows), (0, hidden_size))
        return {WHOLE: Shard((self.vocab_size, hidden_size), source, weight[: self.num_rows])}


class VocabParallelEmbedding(VocabParallel):
    """Looks up tokens."""

    weight: nn.Parameter

    def forward(self, token_ids: torch.Tensor) -> PartialSum:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size]; zeros for tokens that another rank holds"""
        if self.parallel.size == 1:
            return PartialSum(F.embedding(token_ids, self.weight))
        local = token_ids - self.first
        clamped = local.clamp(0, max(self.num_rows - 1, 0))
        is_ours = clamped == local if self.num_rows else torch.zeros_like(local, dtype=torch.bool)
        return PartialSum(F.embedding(clamped, self.weight).masked_fill_(~is_ours[:, None], 0))


class ParallelLMHead(VocabParallel):
    """Projects onto the vocabulary. With tied embeddings it shares the embedding's `weight` until it packs its own."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Like LinearBase.pack; a tied weight stays in memory, because the embedding reads it."""
        self.packed = pack_weight(self.get_parameter("weight"))
        if self.packed is not None:
            self.weight = None

    def empty_logits(self, num_rows: int) -> torch.Tensor:
        """Memory for the logits of up to `num_rows` rows, to be given as `out`."""
        size = self.parallel.size
        return self.get_parameter("weight").new_empty(num_rows // size, size * self.slice_size)

    def forward(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of this rank's part of the rows.

        Args:
            hidden_states: [num_rows, hidden_size]; the number of ranks divides num_rows.
            out: where to put them, from `empty_logits`; None takes new memory.

        Returns:
            [num_rows / ranks, vocab_size]: rank r has the r-th part of the rows, each with its whole vocabulary. So no
            rank holds all logits, and whatever samples knows nothing of ranks.
        """
        size = self.parallel.size
        out = None if out is None else out[: len(hidden_states) // size]
        if size == 1:
            return linear(hidden_states, self.weight, self.packed, fused=self.fused, out=out)
        rows = self.parallel.rows_of_columns(linear(hidden_states, self.weight, self.packed, fused=self.fused), out)
        return rows[:, : self.vocab_size]
