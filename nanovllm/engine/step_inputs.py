"""The inputs of captured steps that hold prompts, in one place on the device, padded to one of a few sizes."""

import bisect
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from nanovllm.engine.batch import Batch, step_arrays, step_lengths
from nanovllm.engine.cuda_graph import StepSize
from nanovllm.engine.scheduler import Work
from nanovllm.layers.sampler import SamplingBatch
from nanovllm.utils.context import QUERY_TILE, Context
from nanovllm.utils.upload import upload, upload_size


class StepInputs:
    """What `step_arrays` gives, for steps of up to `most_tokens` tokens of `most_seqs` sequences.

    Padding tokens have no slot in the cache, padding tiles no queries, sequences that are no decodes no keys as such,
    and what a padding row samples goes to `padding_slot`.

    Args:
        max_num_blocks: of a sequence.
        padding_slot: the DeviceState's.
    """

    def __init__(
        self,
        most_tokens: int,
        most_seqs: int,
        max_num_blocks: int,
        block_size: int,
        padding_slot: int,
        device: torch.device,
    ):
        most_seqs = min(most_seqs, most_tokens)
        self.token_sizes = quarters(most_tokens)
        # A chunk in the middle of a prompt samples nothing.
        self.sampled_sizes = sorted({min(16, most_seqs), *quarters(most_seqs)})
        self._block_size, self._device = block_size, device
        # Prompts of 32 tokens and longer ones; every tile costs a program a head, whether it is used or not.
        self._most_tiles = most_tokens // QUERY_TILE + min(most_seqs, most_tokens // 32 + 1)
        tokens, rows = np.zeros(most_tokens, np.int64), np.zeros(most_seqs, np.int64)
        self._padding = {
            "token_ids": tokens,
            "in_flight_slots": tokens - 1,
            "positions": tokens,
            "slot_mapping": tokens - 1,
            "query_tiles": np.zeros((self._most_tiles, 4), np.int32),
            "sampled_rows": rows,
            "sampled_slots": rows + padding_slot,
            "temperatures": rows.astype(np.float32),
            "seeds": rows,
            "sampled_positions": rows,
            "context_lens": np.zeros(most_seqs, np.int32),
            # The last and by far the largest, of which only the rows of a step's sequences are sent.
            "block_tables": np.zeros((most_seqs, max_num_blocks), np.int32),
        }
        self._buffer = torch.zeros(upload_size(list(self._padding.values())), dtype=torch.uint8, device=device)
        self._inputs = self._send(self._padding)

    def _send(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays are as large as the padding, but for the last, so that each comes to lie where it was before."""
        return dict(zip(arrays, upload(list(arrays.values()), self._device, self._buffer), strict=True))

    def send(self, work: Work, is_grouped: bool) -> StepSize | None:
        """Makes the inputs those of `work`, the rest padding.

        Returns:
            Which captured step it fits into; None if there is none so large, and then nothing is sent.
        """
        num_new_tokens, context_lens, num_decodes = step_lengths(work)
        num_tokens, num_tiles = num_new_tokens.sum(), (-(-num_new_tokens[num_decodes:] // QUERY_TILE)).sum()
        if num_tokens > self.token_sizes[-1] or num_tiles > self._most_tiles:
            return None
        arrays = step_arrays(work, self._block_size) | {"context_lens": context_lens[:num_decodes]}
        padded = self._padding | {"block_tables": self._padding["block_tables"][: len(work)]}
        padded = {name: padding.copy() for name, padding in padded.items()}
        for name, array in arrays.items():
            padded[name][tuple(map(slice, array.shape))] = array
        self._send(padded)
        return StepSize(
            self.sampled_sizes[bisect.bisect_left(self.sampled_sizes, len(arrays["sampled_rows"]))],
            is_grouped,
            self.token_sizes[bisect.bisect_left(self.token_sizes, num_tokens)],
        )

    @contextmanager
    def parked(self) -> Iterator[None]:
        """All is padding meanwhile, so that a step may be tried without a trace."""
        inputs = self._buffer.clone()
        self._send(self._padding)
        try:
            yield
        finally:
            self._buffer.copy_(inputs)

    def batch(self, size: StepSize) -> Batch:
        """The Batch of the inputs' first `size`."""
        inputs, num_seqs = self._inputs, min(len(self._inputs["context_lens"]), size.num_tokens)
        return Batch(
            token_ids=inputs["token_ids"][: size.num_tokens],
            in_flight_slots=inputs["in_flight_slots"][: size.num_tokens],
            positions=inputs["positions"][: size.num_tokens],
            context=Context(
                cu_seqlens_q=None,
                cu_seqlens_k=None,
                max_seqlen_q=size.num_tokens,
                max_seqlen_k=inputs["block_tables"].shape[1] * self._block_size,
                slot_mapping=inputs["slot_mapping"][: size.num_tokens],
                context_lens=inputs["context_lens"][:num_seqs],
                block_tables=inputs["block_tables"],
                block_size=self._block_size,
                num_decodes=num_seqs,
                is_grouped=size.is_grouped,
                query_tiles=inputs["query_tiles"],
            ),
            sampled_rows=inputs["sampled_rows"][: size.num_sampled],
            sampled_slots=inputs["sampled_slots"][: size.num_sampled],
            sampling=SamplingBatch(
                inputs["temperatures"][: size.num_sampled],
                inputs["seeds"][: size.num_sampled],
                inputs["sampled_positions"][: size.num_sampled],
            ),
        )


def quarters(largest: int) -> list[int]:
    """The multiples of a quarter of `largest`, rounded up to multiples of 16, and it itself last."""
    quarter = -(-largest // 64) * 16
    return [*range(quarter, largest, quarter), largest]
