"""Token embedding and LM head, divided over the ranks by rows of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.packed_linear import linear, pack_weight
from nanovllm.layers.linear import WHOLE, Shards, empty_parameter
from nanovllm.layers.sampler import VocabSlice
from nanovllm.utils.distributed import SAMPLING_GROUP, Parallel
from nanovllm.utils.loader import Shard


class VocabParallelEmbedding(nn.Module):
    """Each rank holds an equal slice of the vocabulary, padded with zeros where it does not divide."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel, weight: nn.Parameter | None = None, **kw):
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = parallel
        slice_size = -(-vocab_size // parallel.size)
        if parallel.size > 1:  # ids are sampled in groups, and products like such sizes too
            slice_size = -(-slice_size // SAMPLING_GROUP) * SAMPLING_GROUP
        self.slice_size = slice_size
        self.first = parallel.rank * slice_size
        self.num_rows = max(0, min(slice_size, vocab_size - self.first))  # real rows of this rank
        if weight is None:
            weight = empty_parameter(slice_size, hidden_size, **kw)
            weight[self.num_rows :].zero_()
        self.weight = weight

    def shards(self, name: str) -> Shards:
        hidden_size = self.weight.shape[1]
        source = ((min(self.first, self.vocab_size), self.num_rows), (0, hidden_size))
        return {WHOLE: Shard((self.vocab_size, hidden_size), source, self.weight[: self.num_rows])}

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size], of several ranks zeros but for their tokens"""
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        clamped = local.clamp(0, max(self.num_rows - 1, 0))
        is_ours = clamped == local if self.num_rows else torch.zeros_like(local, dtype=torch.bool)
        return F.embedding(clamped, self.weight).masked_fill_(~is_ours[:, None], 0)


class ParallelLMHead(VocabParallelEmbedding):
    """Projects onto the vocabulary; with tied embeddings it is given the embedding's `weight`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.packed: torch.Tensor | None = None
        self.slice = VocabSlice(self.first, self.parallel)

    def pack(self) -> None:
        """Like LinearBase.pack; a tied weight stays, for the embedding reads it."""
        self.packed = pack_weight(self.weight)
        if self.packed is not None:
            self.weight = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size] -> logits [num_rows, ids of this rank]"""
        return linear(hidden_states, self.weight, self.packed)[:, : self.num_rows]

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The ranks' logits -> [num_rows, vocab_size]"""
        if self.parallel.size == 1:
            return logits
        logits = F.pad(logits, (0, self.slice_size - self.num_rows))
        return self.parallel.all_gather(logits)[:, : self.vocab_size]
