"""Writes the tokens that a step sampled into the table, where the next step reads them."""

import torch

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

_WIDTH = 128  # rows per program


def plain_write_tokens(
    tokens: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor, sampled: torch.Tensor
) -> None:
    is_inside = lengths < tokens.shape[1]
    entries = entries.where(is_inside, len(tokens) - 1)  # the entry of padding, so that nothing is counted
    tokens[entries, lengths.clamp(max=tokens.shape[1] - 1)] = sampled.clamp(min=0).int()


@jit(do_not_specialize=["max_model_len", "num_rows"])
def _write_tokens_kernel(tokens, entries, lengths, sampled, max_model_len, num_rows, WIDTH: tl.constexpr):
    begin()
    row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_row = row < num_rows
    length = tl.load(lengths + row, is_row, 0)
    place = tl.load(entries + row, is_row, 0) * max_model_len + length
    is_inside = is_row & (length < max_model_len)
    tl.store(tokens + place, tl.maximum(tl.load(sampled + row, is_row, 0), 0).to(tl.int32), is_inside)


def triton_write_tokens(
    tokens: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor, sampled: torch.Tensor
) -> None:
    if len(sampled):
        _write_tokens_kernel[(triton.cdiv(len(sampled), _WIDTH),)](
            tokens, entries, lengths, sampled, tokens.shape[1], len(sampled), WIDTH=_WIDTH, num_warps=4,
            **LAUNCH_OPTIONS,
        )  # fmt: skip


def write_tokens(
    tokens: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor, sampled: torch.Tensor, use_kernels: bool = False
) -> None:
    """`tokens[entries, lengths] = sampled`, with 0 for a row without a token.

    Such a row will end with an error, but the next step may be launched before the host knows. A row whose length is
    max_model_len pools a prompt of that length, and its token is dropped.

    Args:
        tokens: int32 [num_entries, max_model_len], changed.
        entries, lengths, sampled: int64 [num_rows]; a number below 0 in `sampled` is not a token.
        use_kernels: compute with the kernel.
    """
    (triton_write_tokens if use_kernels else plain_write_tokens)(tokens, entries, lengths, sampled)
