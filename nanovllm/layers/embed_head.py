"""Token embedding and LM head, divided over the ranks by rows of the vocabulary; and the classification head."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.context import LayerContext
from nanovllm.layers.forms import PartialSum
from nanovllm.layers.linear import Packable
from nanovllm.layers.shard import WHOLE, Shard, Shards, replicated_shards
from nanovllm.ops.collectives import Parallel

# Each rank's part of the vocabulary is a multiple of this, because matrix products are faster at such sizes.
_ROWS = 16


class VocabSlice(NamedTuple):
    """The part of the vocabulary that a rank holds: `num_ids` ids from `first` on, then padding up to `size`, which is
    equal on all ranks."""

    vocab_size: int
    size: int
    first: int
    num_ids: int

    @classmethod
    def of(cls, vocab_size: int, parallel: Parallel) -> "VocabSlice":
        """This rank's slice. All have the same size, with padding if the vocabulary does not divide."""
        size = vocab_size
        if parallel.size > 1:
            size = -(-vocab_size // (parallel.size * _ROWS)) * _ROWS
        first = min(parallel.rank * size, vocab_size)
        return cls(vocab_size, size, first, min(size, vocab_size - first))


class VocabParallel(nn.Module):
    """A weight with a row per id of the vocabulary: each rank holds its VocabSlice, padded with zeros.

    weight: [vocab.size, hidden_size].

    Args:
        weight: that of another layer, to share it; None allocates one.
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext, weight: nn.Parameter | None = None):
        super().__init__()
        self.use_kernels, self.parallel = context.use_kernels, context.parallel
        self.vocab = VocabSlice.of(vocab_size, context.parallel)
        if weight is None:
            weight = context.parameter(self.vocab.size, hidden_size)
            weight[self.vocab.num_ids :].zero_()
        self.weight = weight

    def shards(self, name: str) -> Shards:
        return self._shards_of(self.get_parameter(name))

    def _shards_of(self, weight: torch.Tensor) -> Shards:
        vocab, hidden_size = self.vocab, weight.shape[1]
        source = ((vocab.first, vocab.num_ids), (0, hidden_size))
        return {WHOLE: [Shard((vocab.vocab_size, hidden_size), source, weight[: vocab.num_ids])]}


class VocabParallelEmbedding(VocabParallel):
    """Looks up tokens.

    Args:
        scale: multiplies the embeddings.
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext, scale: float = 1.0):
        super().__init__(vocab_size, hidden_size, context)
        self._scale = scale

    def reduce(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size], whole on every rank."""
        part, exchange = self(token_ids).part, self.parallel.exchange
        if exchange is not None:
            return exchange.sum_add_norm(part, None, None, 0.0, begins_step=True)[0]
        return self.parallel.all_reduce(part)

    def forward(self, token_ids: torch.Tensor) -> PartialSum:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size]; zeros for tokens that another rank holds"""
        if self.parallel.size == 1:
            return PartialSum(self._scaled(F.embedding(token_ids, self.weight)))
        num_ids = self.vocab.num_ids
        local = token_ids - self.vocab.first
        clamped = local.clamp(0, max(num_ids - 1, 0))
        is_ours = clamped == local if num_ids else torch.zeros_like(local, dtype=torch.bool)
        return PartialSum(self._scaled(F.embedding(clamped, self.weight).masked_fill_(~is_ours[:, None], 0)))

    def _scaled(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded if self._scale == 1 else embedded * self._scale


class ParallelLMHead(VocabParallel, Packable):
    """Projects onto the vocabulary. With tied embeddings it shares the embedding's `weight`, and packs a copy of it."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext, weight: nn.Parameter | None = None):
        super().__init__(vocab_size, hidden_size, context, weight)
        self._shares_weight, self._linear = weight is not None, context.row_ops.linear

    def shards(self, name: str) -> Shards:
        return self._shards_of(self.parameter(name))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits, for its slice of the vocabulary.

        Args:
            hidden_states: [num_rows, hidden_size].

        Returns:
            [num_rows, vocab.size]; only the first `vocab.num_ids` columns are ids. If the ranks have a
            `sampling_exchange`, the result is in its memory; see layers/sampler.py.
        """
        exchange = self.parallel.sampling_exchange
        out = None if exchange is None else exchange.columns[: len(hidden_states)]
        return self._linear(hidden_states, self.weight, self.packed, use_kernels=self.use_kernels, out=out)


class ClassificationHead(nn.Module):
    """The head of a …ForSequenceClassification checkpoint, in float32. Each rank holds it whole.

    weight: float32 [num_labels, hidden_size].
    """

    def __init__(self, num_labels: int, hidden_size: int, context: LayerContext):
        super().__init__()
        self.weight = context.parameter(num_labels, hidden_size, dtype=torch.float32)
        self._linear = context.row_ops.linear

    def shards(self, name: str) -> Shards:
        return replicated_shards(self.get_parameter(name))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size] -> scores, float32 [num_rows, num_labels]"""
        # The library may compute products of float32 in TF32, but not those of float64.
        return self._linear(hidden_states.double(), self.weight.double()).float()
