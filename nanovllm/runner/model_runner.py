"""Owns the device, the weights, the KV cache and the step."""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.attention.metadata import QUERY_TILE
from nanovllm.config import Config
from nanovllm.engine.runner import Runner, RunnerInfo
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk, Scored, Step
from nanovllm.layers.embed_head import VocabSlice
from nanovllm.layers.linear import Packable
from nanovllm.layers.sampler import Sampled, Sampler, SamplingNeeds, row_multiple
from nanovllm.machine import free_bytes
from nanovllm.models.cost import num_layer_parameters, token_kv_bytes, weight_bytes
from nanovllm.models.decoder import CausalLM
from nanovllm.models.directory import find_model
from nanovllm.models.loader import (
    check_update,
    expected_tensors,
    fill_dummy_weights,
    load_weights,
    update_weights,
)
from nanovllm.models.read_config import load_model_config
from nanovllm.models.tensors import Tensors, given_tensors
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.copy_blocks import copy_blocks
from nanovllm.ops.kernel import has_kernels
from nanovllm.ops.upload import upload
from nanovllm.ops.write_tokens import write_tokens
from nanovllm.runner.cuda_graph import CudaGraphs, graph_sizes, prompt_sizes
from nanovllm.runner.device import dtype_of, fp8_of, kv_cache_dtype_of, rank_device
from nanovllm.runner.kv_cache import (
    KVCache,
    KVCacheLayout,
    MemoryUse,
    check_weights_fit,
    default_max_num_seqs,
    explained_out_of_memory,
    measure_memory,
    num_kvcache_blocks,
)
from nanovllm.runner.sequence_table import SequenceTable, StepRows, StepSize, logprobs_width
from nanovllm.runner.step_in_flight import StepInFlight
from nanovllm.runner.weights_in_place import drop, num_bytes_away, num_bytes_there, to_device, to_host
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

logger = logging.getLogger(__name__)

_GIB = 2**30
_ON_DEVICE = ("model", "backend", "table", "kv_cache", "graphs", "sampler", "_hidden_states", "_nothing")
# Larger steps only push the activations out of a CPU's caches.
_USEFUL_CPU_TOKENS = 2048
# Arithmetic of an eager step that decodes beside prompts: enough to keep a fast GPU busy while the host launches the
# next.
_FLOP_BESIDE_DECODES = 12e12
# Tokens × hidden size of a captured step that decodes beside prompts: enough that its matrix products fill the GPU.
_TOKEN_WIDTH_BESIDE_DECODES = 768 * 4096
_MAX_SCORED = 256  # rows of logits that are made at a time to score prompts
_MIN_TOKENS_BESIDE_DECODES = 512  # matrix products of fewer rows waste a GPU


class ModelRunner(Runner):
    """Loads a model, or one rank's part of it, and runs its steps on one device.

    Raises:
        ValueError: an unknown or broken model, or an option that the model or the device cannot meet.
        RuntimeError: too little memory, or a device that is not there.
    """

    # What lies on the device; None before the start and after `close`, when nobody asks for it.
    model: CausalLM
    backend: AttentionBackend
    table: SequenceTable
    kv_cache: KVCache  # None also during sleep
    graphs: CudaGraphs | None
    sampler: Sampler
    _hidden_states: torch.Tensor
    _nothing: Sampled

    def __init__(self, config: Config, parallel: Parallel = Parallel()):  # noqa: B008 (frozen)
        self.device = rank_device(config.device, parallel.rank, parallel.size)
        self._parallel = parallel
        self._is_gpu = self.device.type == "cuda"
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        self.model_config = model_config = load_model_config(directory)
        self.max_model_len = model_config.max_model_len(config.max_model_len)
        self.model_config = model_config = model_config.without_idle_windows(self.max_model_len)
        self.dtype = dtype_of(config.dtype, model_config.dtype, self.device)
        self._kv_cache_dtype = kv_cache_dtype_of(config.kv_cache_dtype, self.dtype, self.device)
        fp8 = fp8_of(config.quantization, model_config.fp8, self.dtype, self.device)
        self.model_config = model_config = replace(model_config, fp8=fp8)
        check_weights_fit(self._weight_bytes(), self._free_bytes(), self.dtype, self.device)
        self.max_num_seqs = config.max_num_seqs or self._default_max_num_seqs(config)
        self._compiling: list[Thread] = []
        self._sleep_level = 0  # of the last `sleep`, until it is undone
        self._undefined: set[str] = set()  # tensors of the checkpoint whose parameters hold no or mixed values
        vars(self).update(dict.fromkeys(_ON_DEVICE))
        try:
            with self._on_device(), explained_out_of_memory("the engine", self.device):
                num_blocks = self._start(config, parallel, directory)
        except BaseException:
            self.close()  # so that another try finds the memory
            raise
        self.info = RunnerInfo(
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            generation_config=model_config.generation,
            max_useful_batched_tokens=2**31 if self._is_gpu else _USEFUL_CPU_TOKENS,
            max_tokens_beside_decodes=self._max_tokens_beside_decodes() if self._is_gpu else 2**31,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention_backend=self.backend.name,
        )
        logger.info(
            "%s on %s in %s%s, attention %s%s, %d KV cache blocks of %d tokens (%.2f GiB of %s), max_model_len %d",
            model_config.architecture, self.device, self.dtype,
            "" if model_config.fp8 is None else " with FP8 weights", self.backend.name,
            " with CUDA graphs" if self.graphs else "", num_blocks, self.block_size,
            self._layout.block_bytes * num_blocks / _GIB,
            "int8 keys and e4m3 values" if self._layout.is_fp8 else self._kv_cache_dtype, self.max_model_len,
        )  # fmt: skip

    def _start(self, config: Config, parallel: Parallel, directory: Path) -> int:
        """Loads the model, makes the KV cache and captures graphs; returns the number of blocks."""
        model_config = self.model_config
        free_at_start = free_bytes(self.device)
        # The plain backend is plain all the way through.
        self._use_kernels = has_kernels() and config.attention_backend != "torch"
        self._use_kernels &= self._is_gpu or config.attention_backend == "triton"  # interpreted, on a CPU
        if self._use_kernels and self._is_gpu and parallel.size > 1:
            self._parallel = parallel = self._with_exchanges(parallel)
        shape = AttentionShape(
            num_heads=model_config.num_attention_heads // parallel.size,
            num_kv_heads=max(1, model_config.num_key_value_heads // parallel.size),
            head_dim=model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            scale=model_config.attention_scale,
            windows=tuple({layer.window: None for layer in model_config.layers}),
            has_fp8_cache=config.kv_cache_dtype == "fp8",
        )
        self.backend = make_attention_backend(config.attention_backend, shape, config.kvcache_block_size)
        self.block_size = config.kvcache_block_size or self.backend.default_block_size
        self.table = SequenceTable(
            self.max_num_seqs, self.max_model_len, self.block_size, model_config.vocab_size,
            min(config.max_num_batched_tokens, self.max_num_seqs * self.max_model_len), self.device,
            self.backend.max_num_shared_splits, row_multiple(parallel), self._use_kernels,
        )  # fmt: skip
        self.sampler = Sampler(VocabSlice.of(model_config.vocab_size, parallel), parallel, self._use_kernels)
        no_numbers = torch.empty((0, 0), dtype=torch.int32, device=self.device)
        self._nothing = Sampled(torch.empty(0, dtype=torch.int64, device=self.device), no_numbers)
        self._compile_sampling()
        with explained_out_of_memory("the model", self.device):
            self.model = CausalLM(
                model_config, self.max_model_len, self.backend, parallel, self.dtype, self.device, self._use_kernels
            )
        # A captured step must not ask the device for a count; only our kernels sample without one.
        self._is_captured = (
            self._is_gpu and self._use_kernels and self.backend.can_be_captured and not config.enforce_eager
        )
        self._captures_prompts = self._is_captured and self.backend.can_capture_prompts
        # Layers with a window share no keys for long.
        may_share = self.backend.max_num_shared_splits > 0 and 0 in shape.windows
        self._groups_prefixes = config.prefix_grouping and may_share
        self._grouped = np.zeros((0, 3), np.int64)  # tenants and split lengths of the decodes last looked at
        self._is_grouped = False
        self._choose_sizes(config)
        if self._is_captured:
            num_rows, width = self._padded_sampled(self._max_num_rows), model_config.hidden_size
            self._hidden_states = torch.zeros(num_rows, width, dtype=self.dtype, device=self.device)
        self._layout = KVCacheLayout(
            model_config.num_hidden_layers, self.block_size, self.model.num_kv_heads, model_config.head_dim,
            self._kv_cache_dtype,
        )  # fmt: skip
        self._compile_forward()
        if config.load_format == "dummy":
            fill_dummy_weights(self.model, config.seed)
        else:
            load_weights(self.model, directory)
        self._pack_weights()
        num_blocks = self._allocate_kv_cache(config, free_at_start)
        self.capture()
        return num_blocks

    def _with_exchanges(self, parallel: Parallel) -> Parallel:
        """The same ranks, which reach each other's memory without NCCL where the GPUs can."""
        from nanovllm.ops.exchange import make_exchange
        from nanovllm.ops.sampling_exchange import make_sampling_exchange

        width, vocab = self.model_config.hidden_size, VocabSlice.of(self.model_config.vocab_size, parallel)
        max_num_rows = self._padded_sampled(self.max_num_seqs)
        return replace(
            parallel,
            exchange=make_exchange(parallel, width, self.dtype, self.device),
            sampling_exchange=make_sampling_exchange(
                parallel, max_num_rows, vocab.size, self.dtype, self.device, max_num_numbers=5 + 2 * MAX_LOGPROBS
            ),
        )

    def _compile_sampling(self) -> None:
        """Starts threads that compile the kernels of every kind of sampling while the model loads.

        Without cached kernels that takes seconds, and the first request may want any of them.
        """

        @torch.inference_mode()
        def compile_both(rules_version: int) -> None:
            # Every thread stays on the stream of the steps. After another stream had launched kernels, kernels of
            # captured steps no longer started before the preceding one had ended: 2% slower (H200, CUDA 13.0).
            with self._on_device():
                for has_filters, width in ((True, 0), (False, 0), (True, 1), (False, 1)):
                    row, needs = self.table.padding_row(), SamplingNeeds(has_filters, rules_version, width)
                    self.sampler.compile(row, needs, self.table.tokens, self.table.rules.tensors, self.dtype)

        if self._is_gpu and self._use_kernels:
            for rules_version in (0, self.table.rules.version):
                self._compile(partial(compile_both, rules_version))

    def _compile_forward(self) -> None:
        """Starts a thread that compiles the layers' kernels. It runs each kind of step once, on weights that may not be
        loaded yet."""

        @torch.inference_mode()
        def try_each_kind() -> None:
            with self._on_device(), self.table.parked():
                functions = {kind: function for _, function, kind in map(self._forward_half, self._sizes_to_capture())}
                for function in functions.values():
                    function()

        # Not with several ranks: their kernels wait for each other, and the ranks compile at different speeds.
        if self._is_captured and self._parallel.size == 1:
            self.kv_cache = self._layout.empty(1, self.device).zero_()
            self._compile(try_each_kind)

    def _compile(self, function: Callable[[], None]) -> None:
        def logged() -> None:
            try:
                function()
            except Exception:  # whoever needs the kernel meets the error again, where it can be reported
                logger.debug("a kernel could not be compiled beforehand", exc_info=True)

        thread = Thread(target=logged, daemon=True)
        thread.start()
        self._compiling.append(thread)

    def _await_compiling(self) -> None:
        while self._compiling:
            self._compiling.pop().join()

    def _choose_sizes(self, config: Config) -> None:
        """The sizes that steps are padded to where they are captured."""
        # Only a step with forked siblings, which are rows without tokens, has more rows. It is not captured.
        self._max_num_rows = min(self.max_num_seqs, config.max_num_batched_tokens)
        self._row_sizes = graph_sizes(self._max_num_rows)
        # The exchange has room for as many rows of logits as can sample.
        multiple = row_multiple(self._parallel)
        max_num_exchanged = _MAX_SCORED if self._parallel.size == 1 else self._padded_sampled(self._max_num_rows)
        self._max_num_scored = min(_MAX_SCORED // multiple * multiple, max_num_exchanged)
        self._token_sizes: list[int] = []
        self._kernels_of: dict[StepSize, Hashable] = {}
        if self._captures_prompts:
            limit = min(config.max_num_batched_tokens, self.max_num_seqs * max(1, self.max_model_len - 1))
            usual = min(self._max_tokens_beside_decodes(), limit)
            most = min(max(usual, 2 * self.max_num_seqs), limit)
            self._token_sizes = prompt_sizes(usual, most)

    def _capture(self) -> None:
        """Captures what the first requests will want.

        The largest step comes first: smaller ones then fit into its memory. Other steps with prefix groups, and
        sampling halves with rules, are captured when they are first wanted, which takes milliseconds. The kernels of
        grouped decodes are compiled here; `_compile_sampling` compiles those of rules.
        """
        began, parallel = time.perf_counter(), self._parallel
        graphs = self.graphs
        if graphs is None:
            self.graphs = graphs = CudaGraphs(self.table.parked, self.device, parallel.size == 1, parallel.calls_nccl)
        for size in self._sizes_to_capture():
            graphs.capture(*self._forward_half(size))
        for num_sampled in dict.fromkeys(map(self._padded_sampled, reversed(self._row_sizes))):
            for has_filters in (True, False):
                graphs.capture(*self._sampling_half(num_sampled, SamplingNeeds(has_filters)))
        torch.cuda.synchronize(self.device)
        logger.info("captured %d CUDA graphs in %.1f s", len(graphs), time.perf_counter() - began)

    def _sizes_to_capture(self) -> list[StepSize]:
        sizes = [self._prompt_size(num_tokens) for num_tokens in self._token_sizes]
        sizes += [self._decode_size(num_rows) for num_rows in self._row_sizes]
        sizes.sort(key=lambda size: size.num_tokens, reverse=True)
        return sizes + [self._decode_size(self._row_sizes[-1], True)] * self._groups_prefixes

    @torch.inference_mode()
    def launch(self, step: Step) -> StepInFlight:
        """Starts a step and returns without waiting for the device; see Runner."""
        with self._on_device():
            rows = StepRows.of(step)
            num_sampled = int(rows.samples.sum())
            self.table.send_sequences(step, rows)
            is_grouped = self._group_prefixes(rows, step.num_decodes)
            size, is_captured = self._size(rows, step.num_decodes, num_sampled, is_grouped, bool(step.scored))
            needs = self.table.send_rows(rows, size, step.num_decodes)
            scores = self._nothing.logprobs
            if is_captured and self.graphs is not None:
                self.graphs.run(*self._forward_half(size))
                self._copy_blocks(step)
                num_padded = self._padded_sampled(_next(self._row_sizes, num_sampled)) if num_sampled else 0
                sample = partial(self.graphs.run, *self._sampling_half(num_padded, needs))
            else:
                tenants = list(map(tuple, rows.tenants.tolist()))
                if step.scored:
                    of_tokens = self._hidden_states_of_tokens(size, tenants)
                    scores = self._score(step, rows, of_tokens)
                    of_rows = of_tokens.index_select(0, self.table.sampled(size.num_sampled)[0])
                else:
                    of_rows = self._rows_that_sample(size, tenants)
                self._copy_blocks(step)
                sample = partial(self._sample, of_rows, needs)
            if not step.constrained:
                return StepInFlight(sample().first(num_sampled) if num_sampled else self._nothing, scores)
        entries = np.array([seq.entry for seq in step.constrained], np.int64)
        return StepInFlight(partial(self._constrain_and_sample, sample, entries, num_sampled), scores)

    @torch.inference_mode()
    def _constrain_and_sample(
        self, sample: Callable[[], Sampled], entries: np.ndarray, num_sampled: int, masks: np.ndarray, rows: list[int]
    ) -> Sampled:
        """The second half of a step with constrained rows; `entries` are theirs, masks and rows as LaunchedStep's."""
        with self._on_device():
            self.table.rules.constrain(entries[rows], masks)
            return sample().first(num_sampled)

    def mask_buffer(self, num_rows: int) -> np.ndarray:
        return self.table.rules.mask_buffer(num_rows)

    def _copy_blocks(self, step: Step) -> None:
        if step.copies:
            for tensor in self.kv_cache.tensors:
                copy_blocks(tensor, step.copies, self._use_kernels)

    def _size(
        self, rows: StepRows, num_decodes: int, num_sampled: int, is_grouped: bool, is_scored: bool = False
    ) -> tuple[StepSize, bool]:
        """How large the step is to be, and whether it is one of those that are captured.

        is_scored: it needs the hidden states of tokens that do not sample, which captured steps do not keep.
        """
        num_rows, num_tokens = len(rows.entries), int(rows.num_new_tokens.sum())
        may_be_captured = self.graphs is not None and not is_scored
        if may_be_captured and num_decodes == num_rows:
            return self._decode_size(_next(self._row_sizes, num_rows), is_grouped), True
        num_tiles = int((-(-rows.num_new_tokens[num_decodes:] // QUERY_TILE)).sum())
        if may_be_captured:
            for size in map(self._prompt_size, self._token_sizes[bisect_left(self._token_sizes, num_tokens) :]):
                if num_tiles <= size.num_tiles and num_rows <= size.num_rows:
                    return size._replace(is_grouped=is_grouped), True
        # At least one row, real or of padding, so that no kernel gets an empty tensor.
        num_sampled, longest = self._padded_sampled(max(num_sampled, 1)), int(rows.num_new_tokens.max())
        return StepSize(num_rows, num_tokens, num_sampled, num_tiles, num_decodes, longest, is_grouped), False

    def _decode_size(self, num_rows: int, is_grouped: bool = False) -> StepSize:
        """The size of a captured step of decodes alone."""
        return StepSize(num_rows, num_rows, self._padded_sampled(num_rows), 0, num_rows, 1, is_grouped)

    def _prompt_size(self, num_tokens: int) -> StepSize:
        """The size of a captured step with prompts: all its rows may be decodes, or prompts of any length."""
        num_rows = min(self._max_num_rows, num_tokens)
        # Enough for prompts of 32 tokens and more. Every tile costs each head a program, or a turn of a program in
        # hopper_prompts.py, whether it is used or not.
        num_tiles = num_tokens // QUERY_TILE + min(num_rows, num_tokens // 32 + 1)
        return StepSize(num_rows, num_tokens, self._padded_sampled(num_rows), num_tiles, num_rows, num_tokens, False)

    def _padded_sampled(self, num_sampled: int) -> int:
        """The next number of rows that the ranks can share evenly."""
        multiple = row_multiple(self._parallel)
        return -(-num_sampled // multiple) * multiple

    # A step has two halves, which are captured apart: there are many sizes of the first and many kinds of the second.

    def _forward_half(self, size: StepSize) -> tuple[Hashable, Callable[[], None], Hashable]:
        """(key, function, kind) for CudaGraphs.run. The function writes the hidden states of all rows that may sample
        to `_hidden_states`."""

        def forward() -> None:
            self._rows_that_sample(size, out=self._hidden_states[: size.num_sampled])

        remainders = tuple(number % 16 for number in size[:3])  # kernels differ by how their tensors are aligned
        exchange, row_bytes = self._parallel.exchange, self.model_config.hidden_size * self.dtype.itemsize
        is_direct = exchange is not None and exchange.sends_directly(size.num_tokens, size.num_tokens * row_bytes)
        kind = "forward", size.num_rows == 1, size.is_grouped, is_direct, remainders, self._kernels(size)
        return ("forward", size), forward, kind

    def _kernels(self, size: StepSize) -> Hashable:
        """What layers and attention choose by the size."""
        if size not in self._kernels_of:
            has_prompts = size.num_tiles > 0
            attention = self.backend.variant_key(size.max_num_decodes, has_prompts)
            layers = self.model.variant_key(size.num_tokens), self.model.variant_key(size.num_sampled)
            self._kernels_of[size] = has_prompts, attention, *layers
        return self._kernels_of[size]

    def _sampling_half(
        self, num_sampled: int, needs: SamplingNeeds
    ) -> tuple[Hashable, Callable[[], Sampled], Hashable]:
        """(key, function, kind) for CudaGraphs.run. The function samples from what the forward half left."""
        key, kind = ("sample", num_sampled, needs), ("sample", num_sampled == 1, num_sampled % 16, needs)
        return key, lambda: self._sample(self._hidden_states[:num_sampled], needs), kind

    def _hidden_states_of_tokens(
        self, size: StepSize, tenants: list[tuple[int, int]] | None = None, needed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embeds the tokens and runs the layers: [size.num_tokens or len(needed), hidden_size].

        tenants: see AttentionMetadata.
        needed: see CausalLM.
        """
        batch = self.table.batch(size, tenants)
        metadata = replace(batch.metadata, plan=self.backend.plan(batch.metadata))
        return self.model(batch.token_ids, batch.positions, self.kv_cache.layers, metadata, needed)

    def _rows_that_sample(
        self, size: StepSize, tenants: list[tuple[int, int]] | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The hidden states of the rows that may sample: [size.num_sampled, hidden_size].

        tenants: see AttentionMetadata.
        out: where to put them, or None.
        """
        last_tokens, _ = self.table.sampled(size.num_sampled)
        if size.num_tiles and self._parallel.exchange is None:
            # For most tokens of prompts, nobody reads more of the last layer than its keys and values.
            hidden_states = self._hidden_states_of_tokens(size, tenants, last_tokens)
            return hidden_states if out is None else out.copy_(hidden_states)
        return torch.index_select(self._hidden_states_of_tokens(size, tenants), 0, last_tokens, out=out)

    def _score(self, step: Step, rows: StepRows, hidden_states: torch.Tensor) -> torch.Tensor:
        """The numbers of the tokens in `step.scored`, int32 [num_scored, 1 + 2 × width].

        hidden_states: [num_tokens, hidden_size]. Few rows are projected at a time, because a row of logits is far
        larger than a row of hidden states.
        """
        # Of each sequence of the step: what to add to a position for its index in the flat batch.
        offsets = (np.cumsum(rows.num_new_tokens) - rows.keys).tolist()
        offset_of = {chunk.seq.seq_id: offset for chunk, offset in zip(step.chunks, offsets, strict=True)}
        # The hidden state before a token scores it.
        places = [np.arange(start, end) - 1 + offset_of[seq.seq_id] for seq, start, end, _ in step.scored]
        targets = [seq.token_ids[start:end] for seq, start, end, _ in step.scored]
        width = max(logprobs_width(seq.sampling_params.prompt_logprobs or 0) for seq, *_ in step.scored)
        num_scored, multiple = sum(map(len, targets)), row_multiple(self._parallel)
        padding = -num_scored % multiple
        place, target = upload(
            [
                np.pad(np.concatenate(places), (0, padding)),
                np.pad(np.concatenate(targets, dtype=np.int64), (0, padding)),
            ],
            self.device,
        )
        scores = []
        for some, expected in zip(place.split(self._max_num_scored), target.split(self._max_num_scored), strict=True):
            columns = self.model.compute_logits(hidden_states.index_select(0, some))
            scores.append(self.sampler.score(columns, expected, width))
        return torch.cat(scores)[:num_scored]

    def _sample(self, hidden_states: torch.Tensor, needs: SamplingNeeds) -> Sampled:
        """Samples from hidden states [num_sampled, hidden_size], and writes the tokens to the table."""
        _, rows = self.table.sampled(len(hidden_states))
        columns = self.model.compute_logits(hidden_states)
        sampled = self.sampler.sample(columns, rows, needs, self.table.tokens, self.table.rules.tensors)
        write_tokens(self.table.tokens, rows.entries, rows.lengths, sampled.tokens, self._use_kernels)
        return sampled

    def _group_prefixes(self, rows: StepRows, num_decodes: int) -> bool:
        """Whether the step's decodes share keys that are read once for all of them; the table then knows which."""
        decodes = slice(num_decodes)
        # Without a hit when they were admitted, sequences seldom share keys. One that came back after preemption may;
        # it is not looked for.
        if not self._groups_prefixes or not rows.num_cached[decodes].any():
            return False
        # What was found for some rows holds while they go on decoding, until one of them gets longer splits.
        context_lens = rows.keys[decodes]
        grouped = np.column_stack((rows.tenants[decodes], self.backend.split_lengths(context_lens)))
        if not np.array_equal(grouped, self._grouped):
            tables = self.table.block_tables_of(rows.entries[decodes], context_lens.max())
            groups = self.backend.shared_prefixes(tables, context_lens, self.block_size)
            if groups is not None:
                self.table.send_shared_prefixes(groups)
            self._grouped, self._is_grouped = grouped, groups is not None
        return self._is_grouped

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        # Triton launches on the current device, whatever its tensors say. Autocast is the caller's, not ours.
        device = torch.cuda.device(self.device) if self._is_gpu else nullcontext()
        with torch.autocast(self.device.type, enabled=False), device:
            yield

    def _allocate_kv_cache(self, config: Config, free_at_start: int) -> int:
        """Makes the cache as large as memory allows and returns its number of blocks."""
        layout, blocks_of_longest = self._layout, -(-self.max_model_len // self.block_size)
        if self._is_gpu:
            self._await_compiling()
            self.kv_cache = layout.empty(1, self.device).zero_()
            num_tokens = min(config.max_num_batched_tokens, self.max_num_seqs * (self.max_model_len - 1))
            memory = measure_memory(self._try_step, num_tokens, self.max_num_seqs, free_at_start, self.device)
            memory = replace(memory, graphs=self._bytes_for_graphs(memory.activations, num_tokens))
            del self.kv_cache
            torch.cuda.empty_cache()
        else:
            memory = MemoryUse(total=0, free_at_start=0, free=self._free_bytes())
        self._bytes_of_step = memory.activations
        num_blocks = num_kvcache_blocks(
            config, memory, layout.block_bytes, blocks_of_longest, self.max_num_seqs, self._is_gpu
        )
        num_blocks = self._parallel.minimum(num_blocks, self.device)
        self.kv_cache = layout.empty(num_blocks, self.device)
        if self._is_gpu:
            # Once the graphs are captured, this must still be free: for activations, and what is not ours to take.
            self._min_free = free_bytes(self.device) - memory.graphs
        return num_blocks

    def _default_max_num_seqs(self, config: Config) -> int:
        of_token = -(-token_kv_bytes(self.model_config, self._kv_cache_dtype.itemsize) // self._parallel.size)
        chosen = default_max_num_seqs(config, self._weight_bytes(), of_token, self._free_bytes(), self._is_gpu)
        return self._parallel.minimum(chosen, self.device)

    def _weight_bytes(self) -> int:
        """About what this rank's weights take."""
        return weight_bytes(self.model_config, self.dtype.itemsize, self._parallel.size)

    def _free_bytes(self) -> int:
        """This rank's share of the memory that is free: the ranks have a GPU each, or one CPU together."""
        return free_bytes(self.device) // (1 if self._is_gpu else self._parallel.size)

    def _bytes_for_graphs(self, activations: int, num_tokens: int) -> int:
        """Bytes to set aside for captured steps, if a step of `num_tokens` takes `activations`: kernels' code, what the
        steps keep, what logits processors need, and the largest step's activations twice (trial and capture)."""
        if not self._is_captured:
            return 0
        # Per logit: itself, the float32 copy of the logits processors, and their int32 count of tokens. NCCL receives
        # another rank's columns before they are put in order.
        logit_bytes = (3 if self._parallel.calls_nccl else 1) * self.dtype.itemsize + 4 + 4
        num_rows = self._padded_sampled(self._max_num_rows) // self._parallel.size
        num_bytes = _GIB // 2 + num_rows * self.model_config.vocab_size * logit_bytes
        if self._token_sizes:
            num_bytes += 2 * activations * self._token_sizes[-1] // num_tokens
        return num_bytes

    @torch.inference_mode()
    def _try_step(self, sizes: list[int]) -> None:
        """Computes prompts of these lengths, all in the same block of the cache, as their results are thrown away.

        All of them sample with penalties, a top-p and log-probabilities, and a prompt is scored, which takes the most
        memory.
        """
        params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, prompt_logprobs=0)
        chunks = []
        for entry, num_new_tokens in enumerate(sizes):
            # Ids below 0 are nobody's, so that the table does not take a request for one of these.
            seq = Sequence(-1 - entry, [0] * num_new_tokens, params, self.max_model_len)
            seq.block_table = [0] * -(-num_new_tokens // self.block_size)
            seq.num_computed_tokens, seq.num_tokens, seq.entry = num_new_tokens, num_new_tokens + 1, entry
            chunks.append(Chunk(seq, num_new_tokens, True))
        longest = max((chunk.seq for chunk in chunks), key=lambda seq: seq.num_prompt_tokens)
        num_scored = min(self._max_num_scored, longest.num_prompt_tokens - 1)
        scored = [Scored(longest, 1, 1 + num_scored, False)] if num_scored else []
        # A block copied over itself stays as it is, and the kernel that copies is compiled.
        self.launch(Step.of(chunks, copies=[(0, 0)], scored=scored)).wait()

    def _check_memory_left(self) -> None:
        """Raises a RuntimeError if the captured graphs took more than was set aside for them."""
        missing = self._min_free - free_bytes(self.device)
        if missing > 0:
            raise RuntimeError(
                f"CUDA graphs, or another program, took {missing / _GIB:.2f} GiB more GPU memory than was set aside "
                "for them; lower max_num_seqs or use enforce_eager=True"
            )

    def _max_tokens_beside_decodes(self) -> int:
        if self._captures_prompts:
            num_tokens = _TOKEN_WIDTH_BESIDE_DECODES // self.model_config.hidden_size
        else:
            num_weights = num_layer_parameters(self.model_config, 1) / self._parallel.size
            num_tokens = int(_FLOP_BESIDE_DECODES / (2 * num_weights))
        # A multiple of what fills the tiles of a matrix product.
        return max(num_tokens // 256 * 256, _MIN_TOKENS_BESIDE_DECODES)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by use."""
        kv_cache = self.kv_cache
        return {
            "weights": num_bytes_there(self.model, self.device),
            "kv_cache": 0 if kv_cache is None else kv_cache.nbytes,
        }

    # Weights in place

    def update_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        tensors = given_tensors(weights)
        self.check_update(tensors)
        self.load_update(tensors)

    def check_update(self, tensors: Tensors) -> None:
        """Raises a ValueError if `load_update` could not copy these. Ranks may check all before one of them copies."""
        check_update(self.model, tensors)

    def load_update(self, tensors: Tensors) -> None:
        """Copies tensors that were checked. What is cut off leaves them undefined."""
        names = expected_tensors(self.model).keys() & tensors.keys()
        self._undefined |= names
        with self._on_device():
            update_weights(self.model, tensors)
            if self._is_gpu:  # whoever gave the tensors may overwrite them now
                torch.cuda.synchronize(self.device)
        self._undefined -= names

    def undefined_weights(self) -> list[str]:
        return sorted(self._undefined)

    # Sleep

    def sleep(self, level: int) -> None:
        self._await_compiling()
        self._sleep_level = level = max(level, self._sleep_level)
        if level == 2:
            self._undefined = set(expected_tensors(self.model))
        with self._on_device(), torch.no_grad():
            if self._is_gpu:
                torch.cuda.synchronize(self.device)
            if self.graphs is not None:
                self.graphs.clear()
            self.backend.keep_buffers(False)
            vars(self)["kv_cache"] = None
            (drop if level == 2 else to_host)(self.model)
            if self._is_gpu:
                torch.cuda.empty_cache()

    def wake_up(self) -> None:
        self.restore()
        try:
            self.capture()
        except BaseException:
            self.sleep(self._sleep_level)
            raise

    def restore(self) -> None:
        """Brings back what `sleep` took, all but the captured steps. After an exception the runner sleeps as before."""
        try:
            with self._on_device(), torch.no_grad(), explained_out_of_memory("what slept", self.device):
                self._check_room_to_wake_up()
                to_device(self.model, self.device)
                self.backend.keep_buffers(True)
                if self.kv_cache is None:
                    self.kv_cache = self._layout.empty(self.info.num_kvcache_blocks, self.device)
                if self._is_gpu:
                    torch.cuda.synchronize(self.device)
        except BaseException:
            self.sleep(self._sleep_level)
            raise
        self._min_free = self._bytes_of_step

    def capture(self) -> None:
        """Captures the steps that are to be captured, after which the runner is awake."""
        if self._is_captured:
            with self._on_device(), torch.inference_mode():
                with explained_out_of_memory("capturing CUDA graphs", self.device):
                    self._capture()
                self._check_memory_left()
        self._sleep_level = 0

    def _check_room_to_wake_up(self) -> None:
        weights = num_bytes_away(self.model, self.device)
        kv_cache = 0 if self.kv_cache is not None else self._layout.block_bytes * self.info.num_kvcache_blocks
        needed, free = weights + kv_cache + self._bytes_of_step, self._free_bytes()
        if needed > free:
            raise RuntimeError(
                f"waking up needs {needed / _GIB:.2f} GiB of {self.device} ({weights / _GIB:.2f} for weights, "
                f"{kv_cache / _GIB:.2f} for the KV cache), but {free / _GIB:.2f} GiB are free; free what others hold "
                "and call wake_up() again"
            )

    def close(self) -> None:
        """Gives the device's memory back; calling it again does nothing."""
        self._await_compiling()
        vars(self).update(dict.fromkeys(_ON_DEVICE))
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def _pack_weights(self) -> None:
        """Lets the linear layers trade their weights for a layout that the device multiplies faster."""
        for module in self.model.modules():
            if isinstance(module, Packable):
                module.pack()


def _next(sizes: list[int], size: int) -> int:
    """The smallest of the ascending sizes that is not below `size`."""
    return sizes[bisect_left(sizes, size)]
