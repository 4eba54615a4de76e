"""The parts of a start that `deterministic=True` adds: how layers compute rows, and checks that a row's results depend
on that row alone on this machine, with this model's sizes.

The option is built on properties of PyTorch's libraries and of GPUs that no documentation promises: see
ops/row_invariant.py and ops/ordered_product.py. So each start compares bits, and refuses where they differ.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, count, pairwise

import torch

from nanovllm.engine.sequence import Pooling, Sequence
from nanovllm.engine.step import Chunk, Scored, Step
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.quantization import BlockFp8
from nanovllm.models.decoder import CausalLM
from nanovllm.ops.ordered_product import OrderedProducts
from nanovllm.ops.row_invariant import PLAIN, ROW_INVARIANT, RowOps
from nanovllm.runner.settings import Settings
from nanovllm.runner.step_program import StepProgram
from nanovllm.runner.step_sizes import MAX_SCORED, StepSizes
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

# Numbers of rows that are compared, the largest first: on a CPU more and fewer than ops/row_invariant.py takes at a
# time; on a GPU, numbers for which library and kernels have different tiles.
_NUMBERS_OF_ROWS = {"cpu": (37, 1), "cuda": (520, 257, 100, 37, 17, 2, 1)}
_CHUNKS = {"cpu": (17, 2, 1), "cuda": (150, 64, 65, 20, 1)}  # of a prompt that is also computed whole


def row_ops_of(settings: Settings, sizes: StepSizes) -> RowOps:
    if not settings.config.deterministic:
        return PLAIN
    if not settings.use_kernels:
        return ROW_INVARIANT
    return OrderedProducts(sizes.numbers_of_rows(), settings.device).row_ops


@torch.inference_mode()
def prepare_products(row_ops: RowOps, model: CausalLM, settings: Settings) -> None:
    """Prepares the products of the model's layers, whose weights need not be loaded."""
    for layer in model.modules():
        if isinstance(layer, LinearBase) and not isinstance(layer.format, BlockFp8):
            max_rows, has_bias = settings.max_step_tokens, layer.bias is not None and layer.format is None
        elif isinstance(layer, ParallelLMHead):
            max_rows, has_bias = max(settings.max_num_seqs, MAX_SCORED), False
        else:
            continue
        row_ops.prepare(layer.get_parameter("weight"), settings.dtype, has_bias, max_rows)


def check_rows_are_independent(program: StepProgram, max_step_tokens: int) -> None:
    """Compares the numbers of equal rows in several places and steps, captured and eager. Overwrites some blocks.

    Args:
        max_step_tokens: tokens of the largest step.

    Raises:
        RuntimeError: their bits differ.
    """
    num_entries, max_model_len = program.table.tokens.shape
    num_blocks = program.kv_cache.num_blocks // (1 + program.table.windows.num_groups)  # per group of layers
    # The table knows a sequence by its id. Those of requests are at least 0, and the trial of the largest step used the
    # first ones below 0.
    kind, ids = program.device.type, count(-1 - num_entries, -1)
    numbers = [min(number, program.sizes.max_num_rows, num_blocks) for number in _NUMBERS_OF_ROWS[kind]]
    chunks = _CHUNKS[kind if max_step_tokens >= sum(_CHUNKS[kind]) else "cpu"]
    num_tokens = min(sum(chunks), max_model_len - 1, max_step_tokens, num_blocks * program.kv_cache.block_size)
    vocab_size = program.model.model.embed_tokens.vocab.vocab_size
    tokens = [7919 * (place + 1) % vocab_size for place in range(max(*numbers, num_tokens))]
    # Rows with different numbers: where only a place's rounding differs, some rows do not show it.
    rows, prompt = [[token] for token in tokens[: numbers[0]]], tokens[:num_tokens]
    ends = [min(end, num_tokens) for end in (0, *accumulate(chunks))]
    together, [whole] = _numbers(program, rows, 0, 1, ids), _numbers(program, [prompt], 0, num_tokens, ids)
    for each in (program, replace(program, sizes=program.sizes.eager()))[: 1 + program.sizes.are_captured]:
        if _numbers(each, rows[::-1], 0, 1, ids) != together[::-1]:
            raise _problem(f"{len(rows)} rows in another order")
        for number in numbers:
            if _numbers(each, rows[:number], 0, 1, ids) != together[:number]:
                raise _problem(f"{number} of {len(rows)} rows by themselves and together")
        in_chunks = [_numbers(each, [prompt], start, end, ids) for start, end in pairwise(ends) if start < end]
        if in_chunks[-1] != [whole]:
            raise _problem(f"a prompt of {num_tokens} tokens and its chunks")


def _numbers(program: StepProgram, prompts: list[list[int]], start: int, end: int, ids: Iterator[int]) -> list[bytes]:
    """Each prompt's results after its tokens up to `end`, of which those before `start` are in the cache already: the
    largest log-probabilities, or the final state without an LM head.

    ids: of sequences, each used once.
    """
    block_size, max_model_len = program.kv_cache.block_size, program.table.tokens.shape[1]
    num_blocks, num_groups = -(-end // block_size), program.table.windows.num_groups
    params, pooling = SamplingParams(temperature=0, logprobs=MAX_LOGPROBS), None
    if program.model.lm_head is None:
        pooling = Pooling("last")
    chunks = []
    for entry, prompt in enumerate(prompts):
        seq = Sequence(next(ids), prompt, params, max_model_len, pooling=pooling)
        seq.block_table = [(entry + block) * (1 + num_groups) for block in range(num_blocks)]
        seq.window_table = [tuple(block + 1 + group for group in range(num_groups)) for block in seq.block_table]
        seq.num_computed_tokens, seq.num_tokens, seq.entry = end, end + 1, entry
        chunks.append(Chunk(seq, end - start, True))
    scored = [] if pooling is None else [Scored(chunk.seq, end, end + 1, True) for chunk in chunks]
    output = program.launch(Step.of(chunks, scored=scored)).wait()
    data = output.logprobs.data if pooling is None else output.states[0].tobytes()
    size = len(data) // len(prompts)
    return [data[first : first + size] for first in range(0, len(data), size)]


def _problem(what: str) -> RuntimeError:
    return RuntimeError(
        f"deterministic=True: {what} differ in their last bits on this machine, with PyTorch {torch.__version__}; use "
        "another version of PyTorch (and of Triton, on a GPU), or leave deterministic out"
    )
