"""Sampling in one pass over the logits: temperature, Gumbel noise and argmax, no softmax, no sort. Only a part's best
group of ids is read again.

Philox, the counters and the two stages are those of `layers.sampler`, the plain twin: the same seed gives the same
tokens, up to the rounding of logarithms.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.utils.distributed import BROKEN, NOTHING, SAMPLING_GROUP

_TOKENS = 4096  # of the vocabulary, for one program
_BROKEN, _NOTHING = tl.constexpr(BROKEN), tl.constexpr(NOTHING)


def fused_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first: int = 0,
    as_candidates: bool = False,
) -> torch.Tensor:
    """logits: [num_rows, num_ids] -> token ids int64 [num_rows], −1 for a row whose logits are not finite.

    Args:
        temperatures: float32 [num_rows], 0 for greedy rows.
        seeds, positions: int64 [num_rows], of the noise; equal scores go to the lowest id.
        first: the id of the first logit, a multiple of SAMPLING_GROUP.
        as_candidates: return what layers.sampler.candidates makes of scores and ids.
    """
    num_rows, vocab_size = logits.shape
    num_parts = max(1, triton.cdiv(vocab_size, _TOKENS))  # a rank may have no ids at all
    scores = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _best_of_part_kernel[(num_parts, num_rows)](
        logits,
        temperatures,
        seeds,
        positions,
        scores,
        ids,
        vocab_size,
        first,
        logits.stride(0),
        TOKENS=_TOKENS,
        GROUP=SAMPLING_GROUP,
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    _best_kernel[(num_rows,)](
        scores, ids, best, num_parts, first, AS_CANDIDATES=as_candidates, PARTS=triton.next_power_of_2(num_parts),
        num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return best


def fused_winners(best: torch.Tensor) -> torch.Tensor:
    """int64 [num_rows], the ranks' best candidates -> token ids; the plain twin is layers.sampler.winners."""
    tokens = torch.empty_like(best)
    _winners_kernel[(len(best),)](best, tokens, num_warps=1)
    return tokens


@triton.jit
def _pick(score, token):
    """(largest score, lowest id that has it) of 1-d tensors."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 2147483647), 0)


@triton.jit
def _log_of_noise(ids, position, seed, STREAM: tl.constexpr):
    """log E of layers.sampler.exponential_noise for int32 ids of a row."""
    zero = tl.zeros_like(ids).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        seed, (ids // 4).to(tl.uint32), position.to(tl.uint32) + zero, zero + STREAM, zero, n_rounds=7
    )
    which = ids % 4
    word = tl.where(which == 0, word0, tl.where(which == 1, word1, tl.where(which == 2, word2, word3)))
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # −log1p(−u); the series where 1 − u would round.
    series = 1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform * (1 / 5 + uniform / 6))))
    return tl.log(tl.where(uniform < 0.05, uniform * series, -tl.log(1.0 - uniform)))


@triton.jit(do_not_specialize=["first_id"])
def _best_of_part_kernel(
    logits, temperatures, seeds, positions, scores, ids, vocab_size, first_id, row_stride, TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The best token of a part of a row's vocabulary; score NaN if a logit there is NaN or +infinity."""
    begin()
    part = tl.program_id(0)
    row = tl.program_id(1)
    first = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    if temperature == 0:
        every_token = part * TOKENS + tl.arange(0, TOKENS)
        every_logit = tl.load(first + every_token, every_token < vocab_size, float("-inf")).to(tl.float32)
        is_broken = tl.max(((every_logit != every_logit) | (every_logit == float("inf"))).to(tl.int32), 0)
        best, best_token = _pick(every_logit, every_token)
    else:
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        group = tl.arange(0, TOKENS // GROUP)
        member = tl.arange(0, GROUP)
        tokens = part * TOKENS + group[:, None] * GROUP + member[None, :]
        of_groups = tl.load(first + tokens, tokens < vocab_size, float("-inf")).to(tl.float32)
        largest = tl.max(of_groups, 1)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.sum(tl.exp2((of_groups - base[:, None]) * (1.4426950408889634 / temperature)), 1)
        noise = _log_of_noise(first_id // GROUP + part * (TOKENS // GROUP) + group, position, seed, 0)
        score = tl.where(weight == 0, float("-inf"), base + temperature * (tl.log(weight) - noise))
        is_broken = tl.max((score != score).to(tl.int32), 0)
        best, best_group = _pick(score, group)
        # A broken row has no best group.
        token = part * TOKENS + tl.minimum(best_group, TOKENS // GROUP - 1) * GROUP + member
        logit = tl.load(first + token, token < vocab_size, float("-inf")).to(tl.float32)
        _, best_token = _pick(logit - temperature * _log_of_noise(first_id + token, position, seed, 1), token)
    if is_broken != 0:
        best = float("nan")
    at = row * tl.num_programs(0) + part
    tl.store(scores + at, best)
    tl.store(ids + at, best_token)


@triton.jit(do_not_specialize=["num_parts", "first_id"])
def _best_kernel(scores, ids, best, num_parts, first_id, AS_CANDIDATES: tl.constexpr, PARTS: tl.constexpr):
    begin()
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    score = tl.load(scores + row * num_parts + part, part < num_parts, float("-inf"))
    token = tl.load(ids + row * num_parts + part, part < num_parts, 2147483647)
    is_broken = tl.max((score != score).to(tl.int32), 0) != 0
    best_score, best_token = _pick(score, token)
    best_token = first_id + best_token.to(tl.int64)
    if AS_CANDIDATES:
        bits = (best_score + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
        best_token = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (0xFFFFFFFF - (best_token & 0xFFFFFFFF))
        best_token = tl.where(is_broken, _BROKEN, best_token)
    else:
        best_token = tl.where(is_broken | (best_score == float("-inf")), -1, best_token)
    tl.store(best + row, best_token)


@triton.jit
def _winners_kernel(best, tokens):
    candidate = tl.load(best + tl.program_id(0))
    is_broken = (candidate == _BROKEN) | ((candidate >> 32) <= _NOTHING)
    tl.store(tokens + tl.program_id(0), tl.where(is_broken, -1, 0xFFFFFFFF - (candidate & 0xFFFFFFFF)))
