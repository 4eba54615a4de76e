"""Top-k, top-p and min-p: a threshold per row of logits, below which no token may be sampled.

The temperature comes first, then top-k, then top-p over the tokens that top-k left, then min-p relative to the most
probable token. Top-p keeps the token that crosses p: a token stays while the tokens that are strictly more probable
hold less than p of the mass. The filters see logits, not positions: **tokens exactly as probable as the last one kept
are kept too**, as in transformers' and vLLM's top-k. The largest logit always stays. −inf stays only if all are −inf.

So a row keeps {i: float32(logits[i]) ≥ threshold}, and the sampler needs one number per row, no sorted copy.
"""

import torch
from torch import Tensor

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl
from nanovllm.ops.sample import COLDEST

_NUM_SORTED = 2**18  # logits that the plain twin sorts at once: if they fit a CPU's cache, it takes half the time


def plain_filter_thresholds(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Sorts, sums up, and finds where the sum reaches p."""
    thresholds = torch.full_like(temperatures, -torch.inf)
    largest = logits.amax(-1).float()
    limits = torch.where(top_ks > 0, top_ks, logits.shape[1]).clamp(max=logits.shape[1]).long()
    is_sorted = (limits < logits.shape[1]) | (top_ps < 1)
    is_filtered = (temperatures > 0) & (is_sorted | (min_ps > 0)) & largest.isfinite()
    temperatures = temperatures.clamp(min=COLDEST)
    minimum = largest.double() + temperatures * min_ps.double().log()
    rounded = minimum.float()
    rounded = rounded.where(rounded >= minimum, rounded.nextafter(largest))  # rounded up, never to below the bound
    thresholds[is_filtered] = rounded.clamp(min=torch.finfo(torch.float32).min).minimum(largest)[is_filtered]
    every_row = (is_filtered & is_sorted).nonzero()[:, 0]
    for rows in every_row.split(max(1, _NUM_SORTED // logits.shape[1])) if every_row.numel() else ():
        limit, temperature, top_p = limits[rows, None], temperatures[rows, None], top_ps[rows, None]
        ordered = _negated_in_order(logits[rows].float(), limit)
        last = ordered.gather(1, limit.clamp(max=ordered.shape[1]) - 1)
        mass = ((ordered[:, :1] - ordered) / temperature).exp_().cumsum(1, dtype=torch.float64)
        total = mass.gather(1, torch.searchsorted(ordered, last, right=True) - 1)
        crossing = torch.searchsorted(mass, top_p * total).clamp_(max=ordered.shape[1] - 1)
        found = -ordered.gather(1, crossing).where(top_p < 1, last)[:, 0]
        thresholds[rows] = thresholds[rows].maximum(found)
    return thresholds


def _negated_in_order(logits: Tensor, limits: Tensor) -> Tensor:
    """logits: float32 [num_rows, vocab_size], limits: int64 [num_rows, 1] -> each row's negated logits, ascending: all
    that its top-k keeps, and maybe more."""
    num_enough = 2 * int(limits.max())
    if num_enough < logits.shape[1] // 16:
        ordered = logits.topk(num_enough).values.neg_()
        if bool((ordered[:, -1:] > ordered.gather(1, limits - 1)).all()):  # no tie with the last one is missing
            return ordered
    if logits.device.type != "cpu":
        return logits.neg().sort(-1).values
    # NumPy sorts the values alone, with vector instructions: 18 times as fast as PyTorch, which also sorts positions.
    ordered = logits.neg()
    ordered.numpy().sort(-1)
    return ordered


# The kernel: one program per row. A first pass notes the largest logit of each of _LANES lanes, which gives a lower
# bound of the threshold. The logits above the bound are copied to a small scratch row, and searched there. If too many
# are above it, further passes over all logits narrow the range first. Both filters are the same search, for the
# largest key at which the weights of the logits from there on reach a target: with weight 1 for top-k, and
# exp((logit − largest) / temperature) for top-p. Every loop ends by its count or because a range of integers shrinks,
# even if sums are not numbers; every sum has a fixed order, so the same row always gives the same threshold.
_LANES = 4096  # logits that a program reads at once
_SLOTS = 16  # copies per group of four lanes that the scratch row has room for
_COLDEST = tl.constexpr(COLDEST)


@jit
def _key(value, SHIFT):
    """float32 -> int64, in the same order. The SHIFT loses nothing of a number of the logits' dtype."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit
def _value(key, SHIFT):
    """The number of the logits' dtype with this key, in float32."""
    key = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def _masses(logits, length, places, cut1, cut2, cut3, cut4, top, scale):
    """float64 [2, 2]: the weights of the logits from each cut on, in any order. A thread reads a whole group of
    `places`: [num_groups, 4], and adds up its weights without the other threads."""
    mass1 = tl.zeros([places.shape[0]], tl.float32)
    mass2, mass3, mass4 = mass1, mass1, mass1
    for start in range(0, length, places.shape[0] * 4):
        logit = tl.load(logits + start + places, start + places < length, float("-inf")).to(tl.float32)
        weight = tl.exp2(tl.maximum(logit - top, -3.4028234663852886e38) * scale)
        mass1 += tl.sum(tl.where(logit >= cut1, weight, 0.0), 1)
        mass2 += tl.sum(tl.where(logit >= cut2, weight, 0.0), 1)
        mass3 += tl.sum(tl.where(logit >= cut3, weight, 0.0), 1)
        mass4 += tl.sum(tl.where(logit >= cut4, weight, 0.0), 1)
    return tl.sum(tl.join(tl.join(mass1, mass2), tl.join(mass3, mass4)).to(tl.float64), 0)


@jit
def _between(low, high, fraction, SHIFT):
    """The key of the number that is `fraction` of the way from low's number to high's."""
    first = _value(low, SHIFT)
    key = _key(first + (_value(high, SHIFT) - first) * fraction, SHIFT)
    return tl.minimum(tl.maximum(key, low), high)


@jit
def _narrow(logits, length, places, low, high, above, target, by_value, top, scale, SHIFT):
    """One pass: the fifth of low … high in which the mass reaches the target, and the mass from its end on."""
    width = high - low
    key1, key2, key3, key4 = low + width // 5, low + width * 2 // 5, low + width * 3 // 5, low + width * 4 // 5
    if by_value:
        key1, key2 = _between(low, high, 0.2, SHIFT), _between(low, high, 0.4, SHIFT)
        key3, key4 = _between(low, high, 0.6, SHIFT), _between(low, high, 0.8, SHIFT)
    cut1, cut2, cut3, cut4 = _value(key1, SHIFT), _value(key2, SHIFT), _value(key3, SHIFT), _value(key4, SHIFT)
    masses = _masses(logits, length, places, cut1, cut2, cut3, cut4, top, scale)
    above = tl.maximum(above, tl.max(tl.where(masses < target, masses, 0.0)))
    part = tl.sum((masses >= target).to(tl.int32))
    new_low = tl.where(part == 0, low, tl.where(part == 1, key1, tl.where(part == 2, key2, key3)))
    new_high = tl.where(part == 0, key1, tl.where(part == 1, key2, tl.where(part == 2, key3, key4)))
    return tl.where(part == 4, key4, new_low), tl.where(part == 4, high, new_high), above


@jit
def _search(logits, length, places, low, high, target, by_value, max_num_steps, top, scale, SHIFT):
    """The largest key below high at which the mass reaches the target, or low; after max_num_steps, a bound for it."""
    step = 0
    while (high - low > 1) & (step < max_num_steps):
        low, high, _ = _narrow(logits, length, places, low, high, target - target, target, by_value, top, scale, SHIFT)
        step += 1
    return low


@jit
def _append(found, logit, first, end, count, SLOTS):
    """Appends each group's logit to the group's copies if it is wanted; returns the number of copies of each group."""
    is_wanted = (logit.to(tl.float32) >= first) & (logit.to(tl.float32) < end)
    group = tl.arange(0, count.shape[0])
    tl.store(found + count * count.shape[0] + group, logit, is_wanted & (count < SLOTS))
    return count + is_wanted.to(tl.int32)


@jit
def _collect(logits, length, places, low, high, found, SLOTS, SHIFT):
    """Copies the logits from low on that are below high; returns the maximum number of copies per group, or 0 if that
    exceeds SLOTS."""
    first, end = _value(low, SHIFT), _value(high, SHIFT)
    count = tl.zeros([places.shape[0]], tl.int32)
    for start in range(0, length, places.shape[0] * 4):
        logit = tl.load(logits + start + places, start + places < length, float("-inf"))
        pair1, pair2 = tl.split(tl.reshape(logit, [places.shape[0], 2, 2]))
        logit1, logit2 = tl.split(pair1)
        logit3, logit4 = tl.split(pair2)
        count = _append(found, logit1, first, end, count, SLOTS)
        count = _append(found, logit2, first, end, count, SLOTS)
        count = _append(found, logit3, first, end, count, SLOTS)
        count = _append(found, logit4, first, end, count, SLOTS)
    num_slots = tl.maximum(tl.max(count), 1)
    num_slots = tl.where(num_slots <= SLOTS, num_slots, 0)
    for _ in range(num_slots):  # clears the previous row's copies where this row has none
        tl.store(found + count * places.shape[0] + tl.arange(0, places.shape[0]), float("-inf"), count < num_slots)
        count += 1
    tl.debug_barrier()
    return num_slots


@jit
def _filter(logits, length, places, low, high, target, num_slots, lanes, found, top, scale, SLOTS, SHIFT):
    """Returns (the largest key from low on at which the mass reaches the target, `num_slots` for the logits from that
    key on). num_slots is the maximum number of copies per group if `found` has all logits from low on; otherwise it is
    0."""
    above = target - target
    all_slots = num_slots
    if num_slots == 0:
        bound = _search(lanes, places.shape[0] * 4, places, low, high, target, True, 3, top, scale, SHIFT)
        step = tl.where(bound > low, 0, 1)
        low = bound
        end = high
        while (high - low > 1) & (num_slots == 0):
            if step % 4 == 0:
                num_slots = _collect(logits, length, places, low, high, found, SLOTS, SHIFT)
            else:
                low, high, above = _narrow(
                    logits, length, places, low, high, above, target, step < 8, top, scale, SHIFT
                )
            step += 1
        all_slots = tl.where(high == end, num_slots, 0)
    if num_slots != 0:
        size = num_slots * places.shape[0]
        low = _search(found, size, places, low, high, target - above, False, 32, top, scale, SHIFT)
    return low, all_slots


@jit
def _largest_of_lanes(logits, length, places, lanes):
    """Stores each lane's largest logit in `lanes`; returns (the largest, the smallest of them, whether one is NaN)."""
    largest = tl.full(places.shape, float("-inf"), tl.float32)
    for start in range(0, length, places.shape[0] * 4):
        logit = tl.load(logits + start + places, start + places < length, float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, logit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(lanes + places, largest)
    tl.debug_barrier()
    return tl.max(largest), tl.min(largest), tl.max((largest != largest).to(tl.int32)) != 0


@jit
def _filter_row(logits, length, temperature, top_k, top_p, min_p, lanes, places, threshold, SLOTS, SHIFT):
    """Stores the threshold of a row, unless it is broken. lanes: scratch for the lanes' largest logits and copies."""
    found = lanes + places.shape[0] * 4
    top, min_of_lanes, is_broken = _largest_of_lanes(logits, length, places, lanes)
    if (top > float("-inf")) & (top < float("inf")) & (is_broken == 0):
        temperature = tl.maximum(temperature, _COLDEST)
        low = _key(tl.full([], -3.4028234663852886e38, tl.float32), SHIFT)
        high = _key(top, SHIFT) + 1
        num_slots = 0
        for by_mass in range(2):
            if tl.where(by_mass == 0, (top_k > 0) & (top_k < length), top_p < 1):
                scale = tl.where(by_mass == 0, 0.0, 1.4426950408889634 / temperature)
                target = top_k.to(tl.float64)
                bound = tl.where(top_k <= places.shape[0] * 4, min_of_lanes, float("-inf"))
                if by_mass == 1:
                    cut, unseen = _value(low, SHIFT), tl.where(num_slots == 0, length, 0)
                    masses = _masses(found, num_slots * places.shape[0], places, cut, cut, cut, cut, top, scale)
                    masses += _masses(logits, unseen, places, cut, cut, cut, cut, top, scale)
                    total = tl.max(masses)
                    target = top_p.to(tl.float64) * total
                    # Even if all tokens were below this bound, they would weigh less than the mass that top-p drops.
                    spare = tl.log(0.5 * (1 - top_p.to(tl.float64)) * total / length)
                    bound = (top + temperature * spare).to(tl.float32)
                low = tl.maximum(low, _key(bound, SHIFT))
                low, num_slots = _filter(
                    logits, length, places, low, high, target, num_slots, lanes, found, top, scale, SLOTS, SHIFT
                )
        # Rounded up, so that no logit below the exact bound of min-p passes.
        minimum = top + temperature * tl.log(min_p.to(tl.float64))
        rounded = tl.maximum(minimum, -3.4028234663852886e38).to(tl.float32)
        rounded = tl.where(rounded < minimum, _value(_key(rounded, 0) + 1, 0), rounded)
        tl.store(threshold, tl.minimum(tl.maximum(rounded, _value(low, SHIFT)), top))


@jit
def _filter_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, scratch, thresholds, vocab_size, row_stride, GROUPS: tl.constexpr,
    SLOTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    tl.store(thresholds + row, float("-inf"))
    if (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)):
        places = tl.arange(0, GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]
        lanes = scratch + row * (GROUPS * (4 + SLOTS))
        _filter_row(
            logits + row * row_stride, vocab_size, temperature, top_k, top_p, min_p, lanes, places, thresholds + row,
            SLOTS, SHIFT,
        )  # fmt: skip


def triton_filter_thresholds(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """The grid depends on shapes only."""
    num_rows, vocab_size = logits.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    scratch = torch.empty((num_rows, _LANES + _LANES // 4 * _SLOTS), dtype=logits.dtype, device=logits.device)
    shift = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[logits.dtype]
    _filter_kernel[(num_rows,)](
        logits, temperatures, top_ks, top_ps, min_ps, scratch, thresholds, vocab_size, logits.stride(0),
        GROUPS=_LANES // 4, SLOTS=_SLOTS, SHIFT=shift, num_warps=16, maxnreg=64, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return thresholds


def filter_thresholds(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor,
    use_kernels: bool = False,
) -> Tensor:  # fmt: skip
    """The smallest logit that each row may sample.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; a row's logits are contiguous.
        temperatures: float32 [num_rows]; a row with 0 is greedy, and not filtered.
        top_ks: int32 [num_rows]; off at 0, and at vocab_size or more.
        top_ps: float32 [num_rows]; off at 1.
        min_ps: float32 [num_rows], relative to the largest probability; off at 0.
        use_kernels: compute with the kernel.

    Returns:
        float32 [num_rows]; −inf for a row that is not filtered, or whose logits hold NaN or +inf, or only −inf. Sums in
        float32 are rounded: a token at which the mass reaches p to within about 1e-6 may be kept or not.
    """
    find = triton_filter_thresholds if use_kernels else plain_filter_thresholds
    return find(logits, temperatures, top_ks, top_ps, min_ps)
