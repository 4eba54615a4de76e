"""Checks at the start that a row's results depend on that row alone on this machine, with this model's sizes.

`deterministic=True` is built on properties of PyTorch's libraries that their documentation does not promise: see
ops/row_invariant.py. So each start compares bits, and refuses where they differ.
"""

from collections.abc import Iterator
from itertools import accumulate, count, pairwise

import torch

from nanovllm.engine.sequence import Pooling, Sequence
from nanovllm.engine.step import Chunk, Scored, Step
from nanovllm.runner.step_program import StepProgram
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

_NUM_ROWS = 37  # more than ops/row_invariant.py multiplies at a time
_CHUNKS = (17, 2, 1)  # of a prompt that is also computed whole


def check_rows_are_independent(program: StepProgram) -> None:
    """Compares the numbers of equal rows in several places and steps. Overwrites some blocks.

    Raises:
        RuntimeError: their bits differ.
    """
    num_entries, max_model_len = program.table.tokens.shape
    num_blocks = program.kv_cache.num_blocks // (1 + program.table.windows.num_groups)  # per group of layers
    num_rows = min(_NUM_ROWS, num_entries - 1, num_blocks)
    num_tokens = min(sum(_CHUNKS), max_model_len - 1, num_blocks * program.kv_cache.block_size)
    vocab_size = program.model.model.embed_tokens.vocab.vocab_size
    tokens = [7919 * (place + 1) % vocab_size for place in range(max(num_rows, num_tokens))]
    # Rows with different numbers: where only a place's rounding differs, some rows do not show it.
    rows, ids = [[token] for token in tokens[:num_rows]], count(-1, -1)
    together = _numbers(program, rows, 0, 1, ids)
    if _numbers(program, rows[::-1], 0, 1, ids) != together[::-1]:
        raise _problem(f"{num_rows} rows in another order")
    if _numbers(program, rows[:1], 0, 1, ids) != together[:1]:
        raise _problem(f"a row alone and with {num_rows - 1} others")
    prompt, ends = tokens[:num_tokens], [min(end, num_tokens) for end in (0, *accumulate(_CHUNKS))]
    whole = _numbers(program, [prompt], 0, num_tokens, ids)
    in_chunks = [_numbers(program, [prompt], start, end, ids) for start, end in pairwise(ends) if start < end]
    if whole != in_chunks[-1]:
        raise _problem(f"a prompt of {num_tokens} tokens and its chunks")


def _numbers(program: StepProgram, prompts: list[list[int]], start: int, end: int, ids: Iterator[int]) -> list[bytes]:
    """Each prompt's results after its tokens up to `end`, of which those before `start` are in the cache already: the
    largest log-probabilities, or the final state without an LM head.

    ids: of sequences. The table takes two with the same id for the same, and requests have none below 0.
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
        "another build of PyTorch, or leave deterministic out"
    )
