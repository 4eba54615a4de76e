"""From logits to tokens: greedy, or drawn with noise that depends on the request alone.

The noise comes from a counter-based generator keyed by (request seed, position, token id or group of ids). So a
request's noise does not depend on the other rows, on its arrival, on preemption or on the batch.

Gumbel-max is done in two stages: one group of 16 ids is drawn by its total weight, and then one of its ids. The largest
of a group's noisy scores is distributed like the group's log-sum-exp with noise of its own, and its size does not
depend on which id has it (Maddison et al., 2014, use both for trees). So this is the same distribution, with a
sixteenth of the noise and, in the kernel, a quarter of the generator's blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton

# Sentinels for a row without a token; engine/step.py has the same numbers.
BROKEN_LOGITS, NO_TOKEN_LEFT = -1, -2
# Lower temperatures are raised to this before numbers are divided by them. It is about float32's smallest normal
# number.
COLDEST = 1.2e-38
GROUP = 16  # successive ids that are first drawn as one group
_MASK = 0xFFFFFFFF


def plain_sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    largest, token_ids = logits.max(-1)
    rows = (temperatures > 0).nonzero()[:, 0]
    if rows.numel():
        kept = logits[rows].float()
        if thresholds is not None:
            kept.masked_fill_(kept < thresholds[rows, None], -torch.inf)
        token_ids[rows] = _draw(kept, temperatures[rows, None], seeds[rows], positions[rows])
    token_ids = token_ids.where(largest > -torch.inf, NO_TOKEN_LEFT)
    return token_ids.where(largest < torch.inf, BROKEN_LOGITS)  # the largest is NaN if one is


def _draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """logits: float32 [num_rows, vocab_size], temperatures: [num_rows, 1] -> int64 [num_rows], each row's token.

    Scores are not divided by the temperature, which may be tiny. A group's score is
    m + T × (log Σ exp((logits − m) / T) − log E), where m is its largest logit and E is exponential noise. The score of
    an id in it is logit − T × log E with noise of its own.
    """
    groups = F.pad(logits, (0, -logits.shape[1] % GROUP), value=-torch.inf).unflatten(-1, (-1, GROUP))
    largest = groups.amax(-1)
    base = largest.masked_fill(largest == -torch.inf, 0)
    weights = ((groups - base[..., None]) / temperatures.clamp(min=COLDEST)[..., None]).exp_().sum(-1)
    blocks = torch.arange((groups.shape[1] + 3) // 4, device=logits.device)[None]
    noise = exponential_noise(seeds, positions, blocks, 0)[:, : groups.shape[1]]
    scores = (base + temperatures * (weights.log() - noise.log_())).masked_fill_(weights == 0, -torch.inf)
    group = scores.argmax(-1)
    members = groups.gather(1, group[:, None, None].expand(-1, 1, GROUP)).squeeze(1)
    blocks = group[:, None] * (GROUP // 4) + torch.arange(GROUP // 4, device=logits.device)
    noise = exponential_noise(seeds, positions, blocks, 1)
    return group * GROUP + (members - temperatures * noise.log_()).argmax(-1)


def exponential_noise(seeds: Tensor, positions: Tensor, blocks: Tensor, stream: int) -> Tensor:
    """Independent Exp(1) noise, float32 [num_rows, 4 × n], for the ids 4 × block … 4 × block + 3 of each block.

    An id takes its word of the Philox block with the counter (id // 4, position, stream, 0).

    Args:
        seeds, positions: int64 [num_rows].
        blocks: int64 [num_rows or 1, n].
        stream: 0 for groups of token ids, 1 for token ids.
    """
    counter = (blocks, positions[:, None] & _MASK, torch.full_like(blocks, stream), torch.zeros_like(blocks))
    words = philox4x32(counter, (seeds[:, None], seeds[:, None] >> 32))
    bits = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)
    # All 32 bits are used, because among many ids the winner's E is tiny. The largest words would round to 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...], num_rounds: int = 7) -> tuple[Tensor, ...]:
    """Philox4x32 (Salmon et al., SC 2011): four words of 32 random bits, in int64, for each counter and key.

    Seven is the smallest number of rounds for which the authors report that it passes BigCrush.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(num_rounds):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps at 64 bits, which keeps all that is used
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


# The kernels read the logits once: a program takes a part of a row, scores its groups and reads only the best group
# again. The same seed gives the tokens of the plain twin, up to the rounding of logarithms.
_TOKENS = 4096  # ids of the vocabulary per program
_NO_ID = tl.constexpr(2147483647)
_COLDEST = tl.constexpr(COLDEST)


@jit
def _pick(score, token):
    """(largest score, lowest id that has it) of 1-d tensors."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, _NO_ID), 0)


@jit
def _log_of_noise(ids, position, seed, STREAM: tl.constexpr):
    """log E for int32 ids of a row, E as in exponential_noise."""
    zero = tl.zeros_like(ids).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        seed, (ids // 4).to(tl.uint32), position.to(tl.uint32) + zero, zero + STREAM, zero, n_rounds=7
    )
    which = ids % 4
    word = tl.where(which == 0, word0, tl.where(which == 1, word1, tl.where(which == 2, word2, word3)))
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # −log1p(−u), by its series where 1 − u would round.
    series = 1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform * (1 / 5 + uniform / 6))))
    return tl.log(tl.where(uniform < 0.05, uniform * series, -tl.log(1.0 - uniform)))


@jit
def _load(logits, token, num_ids, threshold, HAS_THRESHOLDS: tl.constexpr):
    """A row's logits in float32, −inf for ids that must not be sampled; NaN and +inf stay."""
    logit = tl.load(logits + token, token < num_ids, float("-inf")).to(tl.float32)
    return tl.where(logit < threshold, float("-inf"), logit) if HAS_THRESHOLDS else logit


@jit
def _best_of_part_kernel(
    logits, temperatures, seeds, positions, thresholds, parts, num_ids, first_id, row_stride,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, HAS_THRESHOLDS: tl.constexpr,
):  # fmt: skip
    """The best token of a part of a row's slice; its score is NaN if a logit there is NaN or +inf."""
    begin()
    part = tl.program_id(0)
    row = tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    if temperature == 0:
        every_token = part * TOKENS + tl.arange(0, TOKENS)
        every_logit = _load(logits, every_token, num_ids, 0.0, False)
        is_broken = tl.max(((every_logit != every_logit) | (every_logit == float("inf"))).to(tl.int32), 0)
        best, best_token = _pick(every_logit, every_token)
    else:
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        threshold = tl.load(thresholds + row) if HAS_THRESHOLDS else 0.0
        group = tl.arange(0, TOKENS // GROUP)
        member = tl.arange(0, GROUP)
        tokens = part * TOKENS + group[:, None] * GROUP + member[None, :]
        of_groups = _load(logits, tokens, num_ids, threshold, HAS_THRESHOLDS)
        largest = tl.max(of_groups, 1)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        scale = 1.4426950408889634 / tl.maximum(temperature, _COLDEST)
        weight = tl.sum(tl.exp2((of_groups - base[:, None]) * scale), 1)
        noise = _log_of_noise((first_id + part * TOKENS) // GROUP + group, position, seed, 0)
        score = tl.where(weight == 0, float("-inf"), base + temperature * (tl.log(weight) - noise))
        is_broken = tl.max((score != score).to(tl.int32), 0)
        best, best_group = _pick(score, group)
        # A broken row has no best group.
        token = part * TOKENS + tl.minimum(best_group, TOKENS // GROUP - 1) * GROUP + member
        logit = _load(logits, token, num_ids, threshold, HAS_THRESHOLDS)
        _, best_token = _pick(logit - temperature * _log_of_noise(first_id + token, position, seed, 1), token)
    if is_broken != 0:
        best = float("nan")
    at = row * tl.num_programs(0) + part
    tl.store(parts + at, best.to(tl.int32, bitcast=True))
    tl.store(parts + tl.num_programs(0) * tl.num_programs(1) + at, first_id + best_token)


@jit(do_not_specialize=["num_rows", "num_parts", "num_all"])
def _best_part_kernel(
    parts, tokens, num_rows, num_parts, num_all, BROKEN_LOGITS: tl.constexpr, NO_TOKEN_LEFT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The best token of a row's `num_all` parts; parts: [slices, 2, num_rows, num_parts]."""
    begin()
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    at = (part // num_parts * 2 * num_rows + row) * num_parts + part % num_parts
    score = tl.load(parts + at, part < num_all, 0).to(tl.float32, bitcast=True)
    score = tl.where(part < num_all, score, float("-inf"))
    token = tl.load(parts + num_rows * num_parts + at, part < num_all, _NO_ID)
    best_score, best_token = _pick(score, token)
    best_token = tl.where(best_score == float("-inf"), NO_TOKEN_LEFT, best_token.to(tl.int64))
    is_broken = tl.max((score != score).to(tl.int32), 0) != 0
    tl.store(tokens + row, tl.where(is_broken, BROKEN_LOGITS, best_token))


def best_of_parts(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    first_id: int = 0,
    num_parts: int | None = None,
) -> Tensor:
    """Each row's best token of each part of its vocabulary, or of a slice of it.

    Args:
        logits: [num_rows, num_ids].
        temperatures, seeds, positions, thresholds: as in `sample`.
        first_id: the id of the slice's first column, a multiple of GROUP.
        num_parts: how many parts to return; parts beyond the ids score −inf. None means as many as the ids fill.

    Returns:
        int32 [2, num_rows, num_parts]: the bits of the float32 scores, and the ids.
    """
    num_rows, num_ids = logits.shape
    num_parts = num_parts or num_parts_of(num_ids)
    parts = torch.empty((2, num_rows, num_parts), dtype=torch.int32, device=logits.device)
    _best_of_part_kernel[(num_parts, num_rows)](
        logits, temperatures, seeds, positions, temperatures if thresholds is None else thresholds,
        parts, num_ids, first_id, logits.stride(0),
        TOKENS=_TOKENS, GROUP=GROUP, HAS_THRESHOLDS=thresholds is not None, num_warps=8, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return parts


def best_part(parts: Tensor) -> Tensor:
    """Chooses from all slices' parts: int32 [num_slices, 2, num_rows, num_parts] -> int64 [num_rows], as `sample`."""
    num_slices, _, num_rows, num_parts = parts.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=parts.device)
    _best_part_kernel[(num_rows,)](
        parts, tokens, num_rows, num_parts, num_slices * num_parts, BROKEN_LOGITS=BROKEN_LOGITS,
        NO_TOKEN_LEFT=NO_TOKEN_LEFT, PARTS=triton.next_power_of_2(num_slices * num_parts), num_warps=1,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return tokens


def num_parts_of(num_ids: int) -> int:
    """The number of parts that `best_of_parts` makes of `num_ids` ids."""
    return -(-num_ids // _TOKENS)


def triton_sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """The grids depend on shapes only."""
    return best_part(best_of_parts(logits, temperatures, seeds, positions, thresholds)[None])


def sample(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    use_kernels: bool = False,
) -> Tensor:
    """Draws one token per row. Equal scores go to the lowest id.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; a row's logits are contiguous.
        temperatures: float32 [num_rows], 0 for greedy rows.
        seeds: int64 [num_rows], 64 bits each.
        positions: int64 [num_rows], the sampled token's position in its sequence.
        thresholds: float32 [num_rows], at most the row's largest logit, −inf for greedy rows: ids with a smaller logit
            are not sampled (ops/filters.py). None if no row has one.
        use_kernels: compute with the kernels.

    Returns:
        int64 [num_rows]: token ids; BROKEN_LOGITS if any logit is NaN or +inf, NO_TOKEN_LEFT if all are −inf.
    """
    draw = triton_sample if use_kernels else plain_sample
    return draw(logits, temperatures, seeds, positions, thresholds)
