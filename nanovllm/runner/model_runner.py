"""One device's life cycle: start, weights, sleep, close. The StepProgram computes the steps."""

import logging
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.config import Config
from nanovllm.engine.block_manager import WindowGroups
from nanovllm.engine.runner import LaunchedStep, Runner, RunnerInfo, StepTooLargeError
from nanovllm.engine.step import Step
from nanovllm.layers.adapters import AdapterSlots
from nanovllm.layers.embed_head import VocabSlice
from nanovllm.layers.linear import Packable
from nanovllm.layers.sampler import Sampler, row_multiple
from nanovllm.lora import LoRARequest
from nanovllm.models import loader
from nanovllm.models.adapter import LowRank, adapter_of, check_fits, stored_adapter
from nanovllm.models.adapter_slots import check_fits_beside, load_slot
from nanovllm.models.cost import num_layer_parameters
from nanovllm.models.decoder import CausalLM
from nanovllm.models.digest import weight_parts
from nanovllm.models.directory import find_adapter
from nanovllm.models.merge import MergedWeights
from nanovllm.models.tensors import Tensors, given_tensors
from nanovllm.models.weight_parts import WeightPart, tensor_digests
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.library import cublas_lt
from nanovllm.runner import warm_up
from nanovllm.runner.cuda_graph import CudaGraphs
from nanovllm.runner.determinism import check_rows_are_independent, prepare_products, row_ops_of
from nanovllm.runner.kv_cache import KVCacheLayout, empty_states, num_bytes_held
from nanovllm.runner.memory import (
    MemoryUse,
    check_graphs_fit,
    check_room_to_wake_up,
    explained_out_of_memory,
    graph_bytes,
    num_kvcache_blocks,
    num_useful_blocks,
    out_of_memory_message,
)
from nanovllm.runner.sequence_table import SequenceTable
from nanovllm.runner.settings import Settings, read_settings
from nanovllm.runner.step_program import StepProgram, on_device
from nanovllm.runner.step_sizes import StepSizes
from nanovllm.runner.weights_in_place import drop, num_bytes_away, num_bytes_there, to_device, to_host
from nanovllm.sampling_params import MAX_LOGPROBS

logger = logging.getLogger(__name__)

_GIB = 2**30
# Larger steps only push the activations out of a CPU's caches.
_USEFUL_CPU_TOKENS = 2048


class ModelRunner(Runner):
    """Loads a model, or one rank's part of it, and runs its steps on one device.

    settings: see Settings.
    program: computes the steps; gone after `close`.

    Raises:
        ValueError: an unknown or broken model, or an option that the model or the device cannot meet.
        RuntimeError: too little memory, or a device that is not there.
    """

    def __init__(self, config: Config, parallel: Parallel = Parallel()):  # noqa: B008 (frozen)
        self.settings = settings = read_settings(config, parallel)
        self._sleep_level = 0  # of the last `sleep`, until it is undone
        self._undefined: set[str] = set()  # tensors of the checkpoint whose parameters lack values or mix old and new
        self._on_host: dict[str, torch.Tensor] = {}  # reserved for the parameters during a sleep
        handled = sys.exc_info()[1]  # the caller may make an LLM in an `except` block
        try:
            with on_device(settings.device), explained_out_of_memory("the engine", settings.device):
                self.program, self._bytes_of_step = start(settings)
        except BaseException as error:
            _release_locals(error, handled)  # so that another attempt finds the memory free
            _empty_cache(settings.device)
            raise
        program, model_config, cache = self.program, settings.model_config, self.program.kv_cache
        self._merged = MergedWeights(program.model)
        self.info = RunnerInfo(
            cache.num_blocks, cache.block_size, settings.max_model_len, model_config.vocab_size,
            model_config.eos_token_ids, model_config.generation, settings.max_num_seqs,
            max_useful_batched_tokens=max_useful_batched_tokens(settings),
            max_tokens_beside_decodes=program.sizes.max_tokens_beside_decodes if settings.is_gpu else 2**31,
            placeholders=model_config.placeholders, device=str(settings.device),
            dtype=str(settings.dtype).removeprefix("torch."), attention_backend=program.backend.name,
            head=model_config.head, num_layers=model_config.num_hidden_layers, windows=program.table.windows,
            snapshots=settings.snapshots,
            # A deterministic row must not depend on whether others have the same adapter.
            may_merge_adapters=model_config.fp8 is None and not config.deterministic,
        )  # fmt: skip
        logger.info(
            "%s on %s in %s%s, attention %s%s, %d KV cache blocks of %d tokens (%.2f GiB of %s), max_model_len %d",
            model_config.architecture, settings.device, settings.dtype,
            "" if model_config.fp8 is None else " with FP8 weights", program.backend.name,
            " with CUDA graphs" if program.graphs else "", self.info.num_blocks_per_group, cache.block_size,
            cache.nbytes / _GIB,
            "int8 keys and e4m3 values" if cache.is_fp8 else settings.kv_cache_dtype, settings.max_model_len,
        )  # fmt: skip
        if cache.states:
            logger.info(
                "recurrent states of %d sequences and %d cached prefixes (%.2f GiB); prompts share a prefix only where "
                "that saves %d tokens",
                settings.max_num_seqs, settings.snapshots.num_snapshots,
                sum(tensor.nbytes for tensor in cache.states) / _GIB, settings.snapshots.min_saved_tokens,
            )  # fmt: skip

    def launch(self, step: Step) -> LaunchedStep:
        try:
            return self.program.launch(step)
        except torch.OutOfMemoryError as error:
            # Other ranks would wait in a collective for this one. Recurrent states may have taken the tokens already.
            if self.settings.parallel.size > 1 or self.program.kv_cache.states:
                raise
            traceback.clear_frames(error.__traceback__)  # which hold the activations
            cause = str(error)
        what, device, program = f"a step of {step.num_tokens} tokens", self.settings.device, self.program
        with explained_out_of_memory(what, device):
            if program.graphs is None:  # graphs hold the addresses of the buffers
                program.backend.keep_buffers(False)
            _empty_cache(device)
            if program.graphs is None:
                program.backend.keep_buffers(True)
        raise StepTooLargeError(out_of_memory_message(what, device, cause))

    def mask_buffer(self, num_rows: int) -> np.ndarray:
        return self.program.table.rules.mask_buffer(num_rows)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by use."""
        cache, model, device = self.program.kv_cache, self.program.model, self.settings.device
        uses = {"weights": num_bytes_there(model, device)}
        if self.settings.config.enable_lora:
            slots = (module for module in model.modules() if isinstance(module, AdapterSlots))
            uses["adapters"] = sum(num_bytes_there(each, device) for each in slots)
            uses["weights"] -= uses["adapters"]
        tensors = {"kv_cache": cache.tensors} | ({"states": cache.states} if cache.states else {})
        return uses | {use: sum(map(num_bytes_held, of_use)) for use, of_use in tensors.items()}

    def close(self) -> None:
        """Gives the device's memory back; calling it again does nothing."""
        if hasattr(self, "program"):
            del self.program
        if hasattr(self, "_merged"):
            del self._merged
        self._on_host.clear()
        _empty_cache(self.settings.device)

    # Weights in place

    def update_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.load_update(self.check_update(given_tensors(weights)))

    def check_update(self, tensors: Tensors) -> Tensors:
        """Returns the tensors as `load_update` takes them; a ValueError if it could not copy them. This lets all ranks
        check before any rank copies.

        Raises:
            RuntimeError: an adapter is merged into the weights.
        """
        if self._merged.is_merged:
            raise RuntimeError("an adapter is merged into the weights; call set_adapter(0, None) before update_weights")
        return loader.check_update(self.program.model, tensors)

    def load_update(self, tensors: Tensors) -> None:
        """Copies tensors that `check_update` returned. An interrupted copy leaves them undefined."""
        names = loader.expected_tensors(self.program.model).keys() & tensors.keys()
        self._undefined |= names
        self._merged.forget(names)
        with on_device(self.settings.device):
            loader.update_weights(self.program.model, tensors)
            if self.settings.is_gpu:  # the caller may overwrite the tensors now
                torch.cuda.synchronize(self.settings.device)
        self._undefined -= names

    def set_adapter(self, slot: int, request: LoRARequest | None) -> None:
        self.load_adapter(slot, self.check_adapter(slot, request))

    def check_adapter(self, slot: int, request: LoRARequest | None) -> dict[str, LowRank]:
        """Returns the adapter as `load_adapter` takes it; raises if it cannot be loaded. This lets all ranks check
        before any rank changes."""
        if request is None:
            return {}
        model, what = self.program.model, f"adapter {request.lora_name!r}"
        config: Mapping[str, Any]
        tensors: Tensors
        if request.tensors is None or request.config is None:
            config, tensors = stored_adapter(find_adapter(request))
        else:
            try:
                config, tensors = request.config, given_tensors(request.tensors.items())
            except (TypeError, ValueError) as error:
                raise type(error)(f"{what}: {error}") from None
        adapter = check_fits(adapter_of(config, tensors, what), model, what, config)
        if slot == 0:
            self._merged.check()
        else:
            check_fits_beside(model, adapter, what)
        return adapter

    def load_adapter(self, slot: int, adapter: Mapping[str, LowRank]) -> None:
        """Loads what `check_adapter` returned. After a failed call for slot 0, the weights are undefined until a call
        succeeds."""
        with on_device(self.settings.device), explained_out_of_memory("the adapter", self.settings.device):
            if slot == 0:
                self._merged.merge(adapter)
            else:
                load_slot(self.program.model, slot, adapter)
            if self.settings.is_gpu:  # the caller may overwrite the tensors now
                torch.cuda.synchronize(self.settings.device)

    def undefined_weights(self) -> list[str]:
        return sorted(self._undefined)

    def weight_digests(self) -> dict[str, str]:
        return tensor_digests([self.weight_parts()])

    def weight_parts(self) -> list[WeightPart]:
        """This rank's parts of the checkpoint's tensors, with their sums."""
        with on_device(self.settings.device):
            return weight_parts(self.program.model, self.settings.use_kernels)

    # Sleep

    def sleep(self, level: int) -> None:
        program = self.program
        self._sleep_level = level = max(level, self._sleep_level)
        if level == 2:
            self._undefined = set(loader.expected_tensors(program.model))
            self._merged.forget(self._undefined)
        with on_device(self.settings.device), torch.no_grad():
            if self.settings.is_gpu:
                torch.cuda.synchronize(self.settings.device)
            if program.graphs is not None:
                program.graphs.clear()
            program.backend.keep_buffers(False)
            program.kv_cache.release()
            if level == 2:
                drop(program.model)
                self._on_host.clear()
            else:
                to_host(program.model, self._on_host)
        _empty_cache(self.settings.device)

    def wake_up(self) -> None:
        self.restore()
        try:
            self.capture()
        except BaseException:
            self.sleep(self._sleep_level)
            raise

    def restore(self) -> None:
        """Brings back the memory that `sleep` freed, except the captured steps. After an exception the runner sleeps as
        before."""
        settings, program = self.settings, self.program
        try:
            with on_device(settings.device), torch.no_grad(), explained_out_of_memory("what slept", settings.device):
                check_room_to_wake_up(
                    num_bytes_away(program.model, settings.device),
                    program.kv_cache.nbytes_released,
                    self._bytes_of_step,
                    settings.free_bytes(),
                    settings.device,
                )
                to_device(program.model, settings.device)
                program.backend.keep_buffers(True)
                program.kv_cache.restore()
                if settings.is_gpu:
                    torch.cuda.synchronize(settings.device)
        except BaseException:
            self.sleep(self._sleep_level)
            raise

    def capture(self) -> None:
        """Captures steps again after `restore`. Then the runner is awake."""
        _capture(self.settings, self.program, self._bytes_of_step)
        self._sleep_level = 0


def start(settings: Settings) -> tuple[StepProgram, int]:
    """Loads the model, makes the KV cache and captures steps.

    Returns:
        The program, and the bytes that its largest step takes while it runs.
    """
    config, device, is_gpu, max_num_seqs = settings.config, settings.device, settings.is_gpu, settings.max_num_seqs
    free_at_start = settings.free_bytes()
    program, sizes, layout = _load(settings)
    if sizes.are_captured and program.parallel.size > 1:
        # Before memory is measured: a loaded kernel keeps memory, some GiB if it has too few registers.
        warm_up.try_forwards(program, sizes)
    states = program.kv_cache.states
    of_states = sum(tensor.nbytes for tensor in states)
    use = MemoryUse(total=0, free_at_start=0, free=settings.free_bytes(), states=of_states)
    if is_gpu:
        use = warm_up.measure_memory(
            partial(warm_up.try_step, program, generates=settings.generates),
            settings.max_step_tokens,
            max_num_seqs,
            free_at_start,
            device,
        )
        vocab_size = settings.model_config.vocab_size * settings.generates
        itemsize, parallel = settings.dtype.itemsize, program.parallel
        for_graphs = graph_bytes(use.activations, settings.max_step_tokens, sizes, vocab_size, itemsize, parallel)
        use = replace(use, graphs=for_graphs)
    longest = program.table.windows.max_num_blocks(settings.max_model_len, layout.block_size)
    num_useful = num_useful_blocks(
        longest, layout.block_size, layout.num_groups, settings.max_step_tokens, max_num_seqs, settings.generates
    )
    num_blocks = num_kvcache_blocks(config, use, layout.block_bytes, longest, num_useful, is_gpu, layout.num_groups)
    num_blocks = program.parallel.minimum(num_blocks, device)
    program = replace(program, kv_cache=layout.empty(num_blocks, device, states))
    if sizes.are_captured:
        graphs = CudaGraphs(program.table.parked, device, program.parallel.size == 1, program.parallel.calls_nccl)
        program = replace(program, sizes=sizes, graphs=graphs)
    if config.deterministic:
        check_rows_are_independent(program, settings.max_step_tokens)
    # After the captures, the memory for activations and for other programs must still be free.
    _capture(settings, program, settings.free_bytes() - use.graphs)
    return program, use.activations


def attention_shape(settings: Settings) -> AttentionShape:
    """This rank's shape of the model's attention."""
    config, model_config, num_ranks = settings.config, settings.model_config, settings.parallel.size
    return AttentionShape(
        model_config.num_attention_heads // num_ranks, max(1, model_config.num_key_value_heads // num_ranks),
        model_config.head_dim, settings.dtype, settings.device, settings.max_num_seqs, settings.max_model_len,
        model_config.attention_scale, windows=tuple({layer.window: None for layer in model_config.layers}),
        has_fp8_cache=config.kv_cache_dtype == "fp8", deterministic=config.deterministic,
    )  # fmt: skip


def windows_of(settings: Settings, backend: AttentionBackend) -> WindowGroups:
    """The groups of layers whose blocks are given back."""
    config = settings.model_config
    num_groups = max(place.group for place in config.cache_places if place is not None)
    window = max(layer.window for layer in config.layers)
    max_num_new_tokens = min(settings.config.max_num_batched_tokens, max_useful_batched_tokens(settings))
    return WindowGroups(num_groups, window, backend.num_keys_per_tile, max_num_new_tokens)


def max_useful_batched_tokens(settings: Settings) -> int:
    return 2**31 if settings.is_gpu else _USEFUL_CPU_TOKENS


def _load(settings: Settings) -> tuple[StepProgram, StepSizes, KVCacheLayout]:
    """Loads the model, and compiles kernels during that time.

    Returns:
        A program for the trial of the largest step, with a cache of one block and no captures; the sizes of steps once
        they are captured; and the layout of the KV cache.
    """
    config, model_config, device, dtype = settings.config, settings.model_config, settings.device, settings.dtype
    max_num_seqs, max_model_len, use_kernels = settings.max_num_seqs, settings.max_model_len, settings.use_kernels
    parallel = _with_exchanges(settings)
    shape = attention_shape(settings)
    backend = make_attention_backend(config.attention_backend, shape, config.kvcache_block_size)
    block_size = config.kvcache_block_size or backend.default_block_size
    # A captured step must not ask the device for a count; only our kernels sample without one.
    may_capture = settings.is_gpu and use_kernels and not config.enforce_eager and backend.can_be_captured
    sizes = StepSizes.of(
        max_num_seqs, config.max_num_batched_tokens, max_model_len, model_config.hidden_size,
        num_layer_parameters(model_config, num_tokens=1) / parallel.size, may_capture,
        may_capture and backend.can_capture_prompts, row_multiple(parallel), settings.generates,
    )  # fmt: skip
    # Layers with a window share no keys for long.
    may_share = backend.max_num_shared_splits > 0 and 0 in shape.windows
    table = SequenceTable(
        max_num_seqs, max_model_len, block_size, model_config.vocab_size,
        min(config.max_num_batched_tokens, max_num_seqs * max_model_len), device,
        backend if config.prefix_grouping and may_share else None, sizes.sampled_multiple, use_kernels,
        windows_of(settings, backend), config.enable_lora,
    )  # fmt: skip
    vocab = VocabSlice.of(model_config.vocab_size, parallel)
    sampler = Sampler(vocab, parallel, use_kernels, config.deterministic)
    row_ops = row_ops_of(settings, sizes)
    num_rows = sizes.padded_sampled(sizes.max_num_rows) if sizes.are_captured else 0
    hidden_states = torch.zeros(num_rows, model_config.hidden_size, dtype=dtype, device=device)
    with warm_up.Compiling() as compiling:
        if settings.is_gpu and use_kernels and settings.generates:
            warm_up.compile_sampling(compiling, sampler, table, dtype)
        with explained_out_of_memory("the model", device):
            how = parallel, dtype, device, use_kernels, row_ops, *settings.adapter_room
            model = CausalLM(model_config, max_model_len, backend, *how)
            prepare_products(row_ops, model, settings)
        layout = KVCacheLayout(
            model_config.cache_places, block_size, model.num_kv_heads, model_config.head_dim, settings.kv_cache_dtype,
            config.cache_canary,
        )  # fmt: skip
        with explained_out_of_memory("the recurrent states", device):
            states = empty_states(model_config, settings.num_states, parallel.size, dtype, device)
        program = StepProgram(
            model, backend, table, sampler, layout.empty(1, device, states).zero_(), sizes.eager(), None, hidden_states,
            parallel, use_kernels, cublas_lt if use_kernels and config.deterministic else nullcontext,
        )  # fmt: skip
        # Not with several ranks: their kernels wait for each other, and the ranks load at different speeds.
        if sizes.are_captured and parallel.size == 1:
            compiling.start(partial(warm_up.try_forwards, program, sizes))
        if config.load_format == "dummy":
            loader.fill_dummy_weights(model, config.seed)
        else:
            loader.load_weights(model, settings.directory)
        pack_weights(model)
    return program, sizes, layout


def _capture(settings: Settings, program: StepProgram, min_free: int) -> None:
    """Captures steps; a RuntimeError if they leave fewer than `min_free` bytes."""
    if program.graphs is not None:
        with on_device(settings.device), torch.inference_mode():
            with explained_out_of_memory("capturing CUDA graphs", settings.device):
                warm_up.capture(program)
            check_graphs_fit(min_free, settings.free_bytes())


def _with_exchanges(settings: Settings) -> Parallel:
    """The same ranks, but they reach each other's memory directly, without NCCL, if the GPUs can."""
    parallel = settings.parallel
    if parallel.size == 1 or not settings.is_gpu or not settings.use_kernels:
        return parallel
    from nanovllm.ops.exchange import make_exchange
    from nanovllm.ops.sampling_exchange import make_sampling_exchange

    width, vocab = settings.model_config.hidden_size, VocabSlice.of(settings.model_config.vocab_size, parallel)
    exchange = make_exchange(parallel, width, settings.dtype, settings.device)
    if exchange is None and settings.config.deterministic:
        raise RuntimeError(
            "deterministic=True on several GPUs needs GPUs that can reach each other's memory, and these cannot; use "
            "tensor_parallel_size=1, or leave deterministic out"
        )
    multiple = row_multiple(parallel)
    max_num_rows = -(-settings.max_num_seqs // multiple) * multiple
    return replace(
        parallel,
        exchange=exchange,
        sampling_exchange=make_sampling_exchange(
            parallel, max_num_rows, vocab.size, settings.dtype, settings.device, max_row_size=5 + 2 * MAX_LOGPROBS
        ),
        reduces_in_layers=settings.model_config.family.qk_norm == "projection",
    )


@torch.inference_mode()
def pack_weights(model: CausalLM) -> None:
    """Replaces the linear layers' weights by a layout that the device multiplies faster, where there is one."""
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack()


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _release_locals(error: BaseException, outer: BaseException | None) -> None:
    """Clears the variables of the functions that ended with this exception. Its traceback would keep them.

    outer: an exception that was being handled before; its functions are the caller's.
    """
    chain: BaseException | None = error
    while chain is not None and chain is not outer:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__context__
