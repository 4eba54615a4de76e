"""Before the first request: kernels are compiled, the largest step is tried, and steps are captured."""

import logging
import time
from collections.abc import Callable
from functools import partial
from threading import Thread

import torch

from nanovllm.engine.sequence import BASE, Adapter, Pooling, Sequence
from nanovllm.engine.step import Chunk, Scored, Step
from nanovllm.layers.sampler import Sampler, SamplingNeeds
from nanovllm.ops.low_rank import low_rank_variant
from nanovllm.runner.memory import MemoryUse, explained_out_of_memory
from nanovllm.runner.sequence_table import SequenceTable
from nanovllm.runner.step_program import StepProgram, on_device
from nanovllm.runner.step_sizes import StepSize, StepSizes
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

logger = logging.getLogger(__name__)


class Compiling:
    """Threads that compile kernels beforehand. The `with` block ends once all of them have ended."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []

    def start(self, function: Callable[[], None]) -> None:
        """Calls the function in a thread of its own. An error is only logged: the step that needs the kernel meets the
        error again, where it can be reported."""

        def logged() -> None:
            try:
                function()
            except Exception:
                logger.debug("a kernel could not be compiled beforehand", exc_info=True)

        thread = Thread(target=logged, daemon=True)
        thread.start()
        self._threads.append(thread)

    def __enter__(self) -> "Compiling":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._join()
        except BaseException:  # Ctrl-C: the threads still launch kernels and hold the model
            self._join()
            raise

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()


def compile_sampling(compiling: Compiling, sampler: Sampler, table: SequenceTable, dtype: torch.dtype) -> None:
    """Compiles the kernels of every kind of sampling while the model loads.

    Without cached kernels that takes seconds, and the first request may need any of them.

    dtype: dtype of the logits.
    """

    @torch.inference_mode()
    def compile_both(rules_version: int) -> None:
        # Every thread stays on the stream of the steps. After another stream had launched kernels, kernels of captured
        # steps no longer started before the preceding one had ended: 2% slower (H200, CUDA 13.0).
        with on_device(table.tokens.device):
            for has_filters, width in ((True, 0), (False, 0), (True, 1), (False, 1)):
                row, needs = table.padding_row(), SamplingNeeds(has_filters, rules_version, width)
                sampler.compile(row, needs, table.tokens, table.rules.tensors, dtype)

    for rules_version in (0, table.rules.version):
        compiling.start(partial(compile_both, rules_version))


@torch.inference_mode()
def try_forwards(program: StepProgram, sizes: StepSizes) -> None:
    """Compiles and loads the layers' kernels: runs each kind of step once, on weights that may not be loaded yet."""
    with on_device(program.device), program.table.parked():
        halves = map(program.forward_half, forwards_to_capture(program, sizes))
        for function in {half.kind: half.function for half in halves}.values():
            function()


def forwards_to_capture(program: StepProgram, sizes: StepSizes) -> list[StepSize]:
    """The sizes of the first requests' steps, largest first, and sizes that compile the kernels of later ones: one with
    prefix groups, and one for each kind of product with adapters."""
    plain = sizes.sizes_to_capture()
    groups = [
        sizes.decode_size(size, is_grouped=True) for size in sizes.decode_sizes[-1:] if program.table.groups_prefixes
    ]
    # The largest size of each kind, the largest first.
    kinds = {(low_rank_variant(size.num_tokens), low_rank_variant(size.num_sampled)): size for size in plain[::-1]}
    adapters = [size._replace(has_adapters=True) for size in kinds.values() if program.table.has_adapters]
    return plain + groups + adapters[::-1]


def capture(program: StepProgram) -> None:
    """Captures the steps that the first requests will need.

    The largest step comes first: smaller ones then fit into its memory. Other steps with prefix groups or adapters, and
    sampling halves with rules, are captured when they are first needed, which takes milliseconds. Their kernels are
    compiled here; `compile_sampling` compiles those of rules.
    """
    graphs = program.graphs
    assert graphs is not None, "nothing is captured on this device"
    began = time.perf_counter()
    for size in forwards_to_capture(program, program.sizes):
        graphs.capture(*program.forward_half(size))
    for num_sampled in program.sizes.sampled_to_capture():
        for has_filters in (True, False):
            graphs.capture(*program.sampling_half(num_sampled, SamplingNeeds(has_filters)))
    torch.cuda.synchronize(program.device)
    logger.info("captured %d CUDA graphs in %.1f s", len(graphs), time.perf_counter() - began)


def measure_memory(
    run_step: Callable[[list[int]], None], num_tokens: int, max_num_seqs: int, free_at_start: int, device: torch.device
) -> MemoryUse:
    """Runs the largest step, in tokens and in sampled rows, on a GPU with a cache of one block.

    Args:
        run_step: computes prompts of these lengths, as `try_step` does.
        num_tokens, max_num_seqs: tokens and sequences of the largest step.
        free_at_start: bytes that were free before anything was loaded.

    Returns:
        The memory that the step took; nothing is set aside for graphs yet.

    Raises:
        RuntimeError: the step does not fit.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    num_seqs = min(max_num_seqs, num_tokens)
    if num_tokens > num_seqs > 1:  # so that two tokens fit into a sequence
        run_step([1, 2])  # compiles the kernels of decodes beside prompts
    torch.cuda.reset_peak_memory_stats(device)
    with explained_out_of_memory(f"a step of {num_tokens} tokens and {num_seqs} sampled rows", device):
        run_step([num_tokens // num_seqs + (index < num_tokens % num_seqs) for index in range(num_seqs)])
    activations = torch.cuda.max_memory_allocated(device) - allocated
    torch.cuda.empty_cache()
    # The libraries' and kernels' own memory stays allocated after the step.
    free = min(free, torch.cuda.mem_get_info(device)[0])
    return MemoryUse(total, free_at_start, free, activations)


@torch.inference_mode()
def try_step(program: StepProgram, lengths: list[int], generates: bool = True) -> None:
    """Computes prompts of these lengths, all in the same block of the cache, and throws their results away.

    All of them sample with penalties, a top-p and log-probabilities, and a prompt is scored, which takes the most
    memory. If sequences may have adapters, the prompts are computed once more with one, because such a step has larger
    activations.

    generates: the model has an LM head. Otherwise the states of all tokens are pooled.
    """
    for adapter in (BASE, Adapter(slot=1))[: 1 + program.table.has_adapters]:
        _try_step(program, lengths, generates, adapter)


def _try_step(program: StepProgram, lengths: list[int], generates: bool, adapter: Adapter) -> None:
    pooling = None if generates else Pooling("all", uses_head=program.model.score is not None)
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, prompt_logprobs=0)
    block_size, max_model_len = program.kv_cache.block_size, program.table.tokens.shape[1]
    chunks = []
    for entry, num_new_tokens in enumerate(lengths):
        # Requests have no ids below 0, so the table cannot confuse them with these sequences.
        seq = Sequence(-1 - entry, [0] * num_new_tokens, params, max_model_len, pooling=pooling, adapter=adapter)
        seq.num_preemptions = adapter.slot  # so that the table sees another admission
        seq.block_table = [0] * -(-num_new_tokens // block_size)
        seq.window_table = [(0,) * program.table.windows.num_groups] * len(seq.block_table)
        seq.num_computed_tokens, seq.num_tokens, seq.entry = num_new_tokens, num_new_tokens + 1, entry
        chunks.append(Chunk(seq, num_new_tokens, generates))
    longest = max((chunk.seq for chunk in chunks), key=lambda seq: seq.num_prompt_tokens)
    num_scored = min(program.sizes.max_num_scored, longest.num_prompt_tokens - 1)
    scored = [Scored(longest, 1, 1 + num_scored, False)] if num_scored else []
    if not generates:
        scored = [Scored(chunk.seq, 1, 1 + chunk.num_new_tokens, True) for chunk in chunks]
    # A block or state copied over itself stays as it is, and the kernel that copies is compiled.
    program.launch(Step.of(chunks, copies=[(0, 0)], scored=scored, state_copies=[(0, 0)])).wait()
