"""Puts what a step sampled into the table, where the next step reads it."""

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

_WIDTH = 128


def write_tokens(
    tokens: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor, sampled: torch.Tensor, use_kernels: bool = False
) -> None:
    """`tokens[entries, lengths] = sampled`, with 0 for a row that has no token.

    Such a row will end with an error, but the step after this one may be launched before the host knows.

    Args:
        tokens: int32 [num_entries, max_model_len], changed.
        entries, lengths, sampled: int64 [num_rows]; what is below 0 in `sampled` is no token.
        use_kernels: compute with the kernel.
    """
    if not use_kernels:
        tokens[entries, lengths] = sampled.clamp(min=0).int()
    elif len(sampled):
        _write_tokens_kernel[(triton.cdiv(len(sampled), _WIDTH),)](
            tokens, entries, lengths, sampled, tokens.shape[1], len(sampled), WIDTH=_WIDTH, num_warps=4,
            **LAUNCH_OPTIONS,
        )  # fmt: skip


@jit(do_not_specialize=["max_model_len", "num_rows"])
def _write_tokens_kernel(tokens, entries, lengths, sampled, max_model_len, num_rows, WIDTH: tl.constexpr):
    begin()
    row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_row = row < num_rows
    place = tl.load(entries + row, is_row, 0) * max_model_len + tl.load(lengths + row, is_row, 0)
    tl.store(tokens + place, tl.maximum(tl.load(sampled + row, is_row, 0), 0).to(tl.int32), is_row)
