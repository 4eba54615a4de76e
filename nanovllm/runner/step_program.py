"""One step as the device computes it: send, forward, score, sample; eager or captured."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.engine.sequence import Pooling
from nanovllm.engine.step import Scored, Step
from nanovllm.layers.sampler import LogitsChange, Sampled, Sampler, SamplingNeeds
from nanovllm.models.decoder import CausalLM
from nanovllm.ops.cache_canary import guard_cache
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.copy_blocks import copy_blocks
from nanovllm.ops.low_rank import low_rank_variant
from nanovllm.ops.upload import upload
from nanovllm.ops.write_tokens import write_tokens
from nanovllm.runner.cuda_graph import CudaGraphs
from nanovllm.runner.kv_cache import KVCache
from nanovllm.runner.sequence_table import SentStep, SequenceTable, logprobs_width
from nanovllm.runner.step_in_flight import StepInFlight
from nanovllm.runner.step_sizes import StepRows, StepSize, StepSizes


class Half(NamedTuple):
    """One half of a step, as CudaGraphs captures it. There are many sizes of the first half, and many kinds of the
    second.

    key: names the half, with its size.
    function: computes it.
    kind: halves of one kind need the same compiled kernels.
    """

    key: Hashable
    function: Callable[[], Any]
    kind: Hashable


@dataclass(frozen=True, eq=False)
class StepProgram:
    """Computes steps.

    Args:
        model, backend, table, sampler, kv_cache: the parts of a step, on one device.
        sizes: chooses how large each step is.
        graphs: holds the captured halves; None if nothing is captured.
        hidden_states: [num_rows, hidden_size], where captured forward halves leave the rows that may sample.
        parallel: this rank's place.
        use_kernels: compute with our kernels.
        library: makes the context of a step, in which products come from the library that `OrderedProducts` compared.
    """

    model: CausalLM
    backend: AttentionBackend
    table: SequenceTable
    sampler: Sampler
    kv_cache: KVCache
    sizes: StepSizes
    graphs: CudaGraphs | None
    hidden_states: torch.Tensor
    parallel: Parallel
    use_kernels: bool
    library: Callable[[], AbstractContextManager] = nullcontext
    _variant_keys: dict[StepSize, Hashable] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.hidden_states.device

    @cached_property
    def _no_numbers(self) -> torch.Tensor:
        return torch.empty((0, 0), dtype=torch.int32, device=self.device)

    @cached_property
    def _wrong_slots(self) -> torch.Tensor | None:
        """int64 [num_rows], where a step puts the wrong slots of its rows (ops/cache_canary.py), captured or not; None
        if the cache has no canaries."""
        if self.kv_cache.canaries is None:
            return None
        return torch.zeros(len(self.table.tokens), dtype=torch.int64, device=self.device)

    def _no_tokens(self, num_rows: int) -> Sampled:
        """The result of a step whose rows pool instead of sampling."""
        return Sampled(torch.zeros(num_rows, dtype=torch.int64), self._no_numbers)

    @torch.inference_mode()
    def launch(self, step: Step) -> StepInFlight:
        """Starts a step and returns without waiting for the device; see Runner."""
        with on_device(self.device), self.library():
            sent = self.table.send(step, self.sizes)
            self._copy_states(step.state_loads)
            num_sampled = sent.rows.num_sampled
            scores, states = self._no_numbers, list[torch.Tensor]()
            sample: Callable[[SamplingNeeds], Sampled]
            if sent.is_captured and self.graphs is not None:
                self.graphs.run(*self.forward_half(sent.size))
                of_rows, sample = self.hidden_states, partial(self._sample_captured, num_sampled)
            else:
                if step.needs_all_states:
                    of_tokens, states = self._forward_and_pool(step, sent)
                    scores = self._score(step, sent.rows, of_tokens)
                    of_rows = of_tokens.index_select(0, self.table.sampled(sent.size.num_sampled)[0])
                else:
                    of_rows = self._forward_rows(sent)
                sample = partial(self._sample, of_rows)
            if step.scored and not step.needs_all_states:
                states = self._pool_rows(step, of_rows)
            for tensor in self.kv_cache.tensors if step.copies else ():
                copy_blocks(tensor, step.copies, self.use_kernels)
            self._copy_states(step.state_copies)
            # Copied, because the next step may be launched before the host reads them.
            wrong_slots = None if self._wrong_slots is None else self._wrong_slots[: len(step.chunks)].clone()
            if not step.constrained:
                has_tokens = any(chunk.samples and chunk.seq.pooling is None for chunk in step.chunks)
                sampled = sample(sent.needs).first(num_sampled) if has_tokens else self._no_tokens(num_sampled)
                return StepInFlight(sampled, scores, states, wrong_slots)
        entries = np.array([seq.entry for seq in step.constrained], np.int64)
        sample_later = partial(self._constrain_and_sample, step, entries, sample, sent.needs)
        return StepInFlight(sample_later, scores, states, wrong_slots)

    def _copy_states(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies recurrent states, as (source, target)."""
        for tensor in self.kv_cache.states if copies else ():
            copy_blocks(tensor, copies, self.use_kernels)

    # The two halves, which are captured separately

    def forward_half(self, size: StepSize) -> Half:
        """Writes the hidden states of all rows that may sample to `hidden_states`."""
        remainders = tuple(number % 16 for number in size[:3])  # kernels differ by how their tensors are aligned
        exchange, row_bytes = self.parallel.exchange, self.hidden_states.shape[1] * self.hidden_states.itemsize
        is_direct = exchange is not None and exchange.sends_directly(size.num_tokens, size.num_tokens * row_bytes)
        kind = "forward", size.num_rows == 1, size.is_grouped, is_direct, remainders, self._variant_key(size)
        out = self.hidden_states[: size.num_sampled]
        return Half(("forward", size), partial(self._forward_rows, SentStep(size), out), kind)

    def sampling_half(self, num_sampled: int, needs: SamplingNeeds) -> Half:
        """Samples from the hidden states that the forward half wrote."""
        hidden_states = self.hidden_states[:num_sampled]
        kind = "sample", num_sampled == 1, num_sampled % 16, needs
        return Half(("sample", num_sampled, needs), partial(self._sample, hidden_states, needs), kind)

    def _variant_key(self, size: StepSize) -> Hashable:
        """A key that is equal for sizes at which layers and attention choose the same kernels."""
        if size not in self._variant_keys:
            has_prompts = size.num_tiles > 0
            attention = self.backend.variant_key(size.max_num_decodes, has_prompts)
            layers = self.model.variant_key(size.num_tokens), self.model.variant_key(size.num_sampled)
            numbers = (size.num_tokens, size.num_sampled) if size.has_adapters else ()
            self._variant_keys[size] = has_prompts, attention, *layers, *map(low_rank_variant, numbers)
        return self._variant_keys[size]

    # Forward

    def _inputs(self, sent: SentStep) -> tuple[Any, ...]:
        """The model's arguments."""
        batch = self.table.batch(sent)
        entries, canaries, wrong = batch.groups[0].entries, self.kv_cache.canaries, self._wrong_slots
        if canaries is not None and wrong is not None and entries is not None:
            wrong, window = wrong[: sent.size.num_rows], self.table.windows.window
            guard_cache(canaries, self.table.tokens, entries, batch.rows, window, wrong, self.use_kernels)
        plans = self.backend.plans(batch.groups)
        metadata = [replace(each, plan=plan) for each, plan in zip(batch.groups, plans, strict=True)]
        return batch.token_ids, batch.positions, self.kv_cache.layers, metadata, batch.adapters

    def _forward(self, sent: SentStep, needed: torch.Tensor | None = None) -> torch.Tensor:
        """Embeds the tokens and runs the layers: [size.num_tokens or len(needed), hidden_size].

        needed: see CausalLM.
        """
        return self.model(*self._inputs(sent), needed)

    def _forward_rows(self, sent: SentStep, out: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states of the rows that may sample: [size.num_sampled, hidden_size].

        out: where to put them, or None.
        """
        last_tokens, _ = self.table.sampled(sent.size.num_sampled)
        if sent.size.num_tiles and self.parallel.exchange is None:
            # For most prompt tokens, only the last layer's keys and values are read later.
            hidden_states = self._forward(sent, last_tokens)
            return hidden_states if out is None else out.copy_(hidden_states)
        return torch.index_select(self._forward(sent), 0, last_tokens, out=out)

    # Score and pool

    @staticmethod
    def _places(step: Step, rows: StepRows, scored: list[Scored]) -> list[np.ndarray]:
        """Per item: the indices, in the flat batch, of the tokens just before its tokens."""
        # For each sequence of the step: the index of a token in the flat batch, less the token's position.
        offsets = (np.cumsum(rows.num_new_tokens) - rows.context_lens).tolist()
        offset_of = {chunk.seq.seq_id: offset for chunk, offset in zip(step.chunks, offsets, strict=True)}
        return [np.arange(start, end) - 1 + offset_of[seq.seq_id] for seq, start, end, _ in scored]

    def _forward_and_pool(self, step: Step, sent: SentStep) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The hidden states of all tokens, and what the step pools, see StepOutput.states."""
        if not step.pooled:
            return self._forward(sent), []
        places = [self._places(step, sent.rows, of_kind) for of_kind in step.pooled.values()]
        lengths = [sum(map(len, of_kind)) for of_kind in places]
        (place,) = upload([np.concatenate([each for of_kind in places for each in of_kind])], self.device)
        norm = len(self.model.model.layers)  # the number of the final norm's states
        layers = {layer for kind in step.pooled for layer in kind.layers} - {norm}
        if layers:
            of_tokens, of_layers = self.model.states_of_layers(layers, place, *self._inputs(sent))
        else:
            of_tokens, of_layers = self._forward(sent), {}
        of_layers[norm] = of_tokens.index_select(0, place)
        parts, pooled = {layer: states.split(lengths) for layer, states in of_layers.items()}, []
        for index, (kind, places_of_kind) in enumerate(zip(step.pooled, places, strict=True)):
            wanted = [parts[layer][index] for layer in kind.layers or (norm,)]
            states = self._with_head(wanted[0] if len(wanted) == 1 else torch.cat(wanted, 1), kind)
            if kind.tokens == "mean":
                of_rows = states.split([len(each) for each in places_of_kind])
                states = torch.stack([of_row.sum(0, dtype=torch.float32) for of_row in of_rows])
            pooled.append(states)
        return of_tokens, pooled

    def _pool_rows(self, step: Step, of_rows: torch.Tensor) -> list[torch.Tensor]:
        """What the step pools if no row needs more than its last token's state.

        of_rows: [num_rows, hidden_size], of the rows that may sample.
        """
        pooled, kinds = [], [chunk.seq.pooling for chunk in step.chunks if chunk.samples]
        for kind in step.pooled:
            states = of_rows[: len(kinds)]
            if kinds.count(kind) < len(kinds):
                (place,) = upload([np.flatnonzero([each == kind for each in kinds])], self.device)
                states = states.index_select(0, place)
            pooled.append(self._with_head(states, kind))
        return pooled

    def _with_head(self, states: torch.Tensor, kind: Pooling) -> torch.Tensor:
        if not kind.uses_head:
            return states
        assert self.model.score is not None, "the engine refuses requests that need a head that is not there"
        return self.model.score(states)

    def _score(self, step: Step, rows: StepRows, hidden_states: torch.Tensor) -> torch.Tensor:
        """The numbers of the scored tokens, int32 [num_scored, 1 + 2 × width].

        hidden_states: [num_tokens, hidden_size]. Few rows are projected at a time, because a row of logits is far
        larger than a row of hidden states.
        """
        scored = [each for each in step.scored if each.seq.pooling is None]
        if not scored:
            return self._no_numbers
        places = self._places(step, rows, scored)
        targets = [seq.token_ids[start:end] for seq, start, end, _ in scored]
        width = max(logprobs_width(seq.sampling_params.prompt_logprobs or 0) for seq, *_ in scored)
        num_scored, at_a_time = sum(map(len, targets)), self.sizes.max_num_scored
        padding = self.sizes.padded_sampled(num_scored) - num_scored
        place, target = upload(
            [
                np.pad(np.concatenate(places), (0, padding)),
                np.pad(np.concatenate(targets, dtype=np.int64), (0, padding)),
            ],
            self.device,
        )
        scores = []
        for some, expected in zip(place.split(at_a_time), target.split(at_a_time), strict=True):
            columns = self.model.compute_logits(hidden_states.index_select(0, some))
            scores.append(self.sampler.score(columns, expected, width))
        return torch.cat(scores)[:num_scored]

    # Sample

    def _sample(self, hidden_states: torch.Tensor, needs: SamplingNeeds) -> Sampled:
        """Samples from hidden states [num_sampled, hidden_size], and writes the tokens to the table."""
        _, rows = self.table.sampled(len(hidden_states))
        columns = self.model.compute_logits(hidden_states)
        sampled = self.sampler.sample(columns, rows, needs, self.table.tokens, self.table.rules.tensors)
        write_tokens(self.table.tokens, rows.entries, rows.lengths, sampled.tokens, self.use_kernels)
        return sampled

    def _sample_captured(self, num_sampled: int, needs: SamplingNeeds) -> Sampled:
        assert self.graphs is not None
        num_padded = self.sizes.padded_sampled(self.sizes.padded_rows(num_sampled))
        if needs.changes:
            return self._sample(self.hidden_states[:num_padded], needs)
        return self.graphs.run(*self.sampling_half(num_padded, needs))

    @torch.inference_mode()
    def _constrain_and_sample(
        self,
        step: Step,
        entries: np.ndarray,
        sample: Callable[[SamplingNeeds], Sampled],
        needs: SamplingNeeds,
        masks: np.ndarray,
        rows: list[int],
        changes: Mapping[int, LogitsChange],
    ) -> Sampled:
        """The second half of a step with constrained rows, whose entries are `entries`; for the last three see
        LaunchedStep."""
        sampled = [chunk.seq for chunk in step.chunks if chunk.samples]
        places = [(sampled.index(step.constrained[row]), change) for row, change in changes.items()]
        with on_device(self.device), self.library():
            if rows:
                self.table.rules.constrain(entries[rows], masks)
            return sample(needs._replace(changes=tuple(places))).first(len(sampled))


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Context manager in which a step may be launched on `device`."""
    # Triton launches on the current device, even if its tensors are on another. The caller's autocast must not change
    # steps.
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.autocast(device.type, enabled=False), current:
        yield
