"""Log-probabilities of one token per row, its rank, and the most probable ids of the row.

A row takes them from the logits that the model computed (RAW), or from the distribution that it was sampled from
(PROCESSED): after the logits processors, the temperature and the filters. Ranks and the order of ids come from
comparing logits, not log-probabilities, which are rounded. So both are exact, and equal logits are in the order of
their ids.
"""

import torch
from torch import Tensor

from nanovllm.ops.dependent_launch import LAUNCH_OPTIONS, begin
from nanovllm.ops.kernel import jit, tl, triton
from nanovllm.ops.row_invariant import sums_of_rows
from nanovllm.ops.sample import COLDEST

NO_LOGPROBS, RAW, PROCESSED = 0, 1, 2  # the kinds of rows
_NUM_AT_ONCE = 2**18  # logits that the plain twin copies at once: they fit a CPU's cache


def plain_logprobs(
    raw: Tensor, processed: Tensor, token_ids: Tensor, kinds: Tensor, temperatures: Tensor, thresholds: Tensor | None,
    width: int,
) -> Tensor:  # fmt: skip
    num_rows, vocab_size = raw.shape
    result = torch.zeros((num_rows, 1 + 2 * width), dtype=torch.int32, device=raw.device)
    for kind, logits in ((RAW, raw), (PROCESSED, processed)):
        every_row = (kinds == kind).nonzero()[:, 0]
        for rows in every_row.split(max(1, _NUM_AT_ONCE // vocab_size)):
            of_rows = logits[rows].float()
            divisors = torch.ones_like(temperatures[rows])
            if kind == PROCESSED:
                divisors = temperatures[rows].clamp(min=COLDEST).where(temperatures[rows] > 0, 1)
                if thresholds is not None:
                    of_rows.masked_fill_(of_rows < thresholds[rows, None], -torch.inf)
            result[rows] = _logprobs(of_rows, token_ids[rows, None], divisors[:, None], width)
    return result


def _logprobs(logits: Tensor, token_ids: Tensor, divisors: Tensor, width: int) -> Tensor:
    """logits: float32 [num_rows, vocab_size]; token_ids and divisors: [num_rows, 1] -> rows of the result."""
    num_rows, vocab_size = logits.shape
    largest = logits.amax(-1, keepdim=True)
    base = largest.masked_fill(largest == -torch.inf, 0)
    log_sum = sums_of_rows(((logits - base) / divisors).exp_()).log_()
    has_token = (token_ids >= 0) & (token_ids < vocab_size)
    own = logits.gather(1, token_ids.where(has_token, 0)).where(has_token, -torch.inf)
    ranks = ((logits > own).sum(-1, keepdim=True) + 1).where(has_token, 0)

    top_ids = _ids_in_order(logits, min(width - 1, vocab_size))
    found = torch.cat([own, logits.gather(1, top_ids)], 1)
    values = ((found - base) / divisors - log_sum).where(found > -torch.inf, -torch.inf)
    top_ids = top_ids.where(values[:, 1:] > -torch.inf, -1)

    ids = torch.full((num_rows, width), -1, dtype=torch.int32, device=logits.device)
    ids[:, : values.shape[1]] = torch.cat([token_ids.where(has_token, -1), top_ids], 1)
    padded = torch.full((num_rows, width), -torch.inf, device=logits.device)
    padded[:, : values.shape[1]] = values
    return torch.cat([ranks.int(), torch.stack([ids, padded.view(torch.int32)], -1).flatten(1)], 1)


def _ids_in_order(logits: Tensor, count: int) -> Tensor:
    """int64 [num_rows, count]: the ids of the largest logits. The keys are those of the kernels' _key. No two keys of a
    row are equal; among equal numbers, topk could take any."""
    bits = (logits + 0.0).view(torch.int32)  # −0 becomes 0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    return (keys - torch.arange(logits.shape[1], device=logits.device)).topk(count).indices


# The kernels read the logits once: a program takes a part of a row, and lists the part's largest. It keeps the largest
# logit of each group of ids, and reads again only the groups from which it takes an id. A second kernel merges the
# lists of a row's parts. Sums and searches have a fixed order, so the same row always gives the same numbers.
_TOKENS = 4096  # ids of the vocabulary per program
_GROUP = 16  # successive ids of which a program remembers the largest logit
_COLDEST = tl.constexpr(COLDEST)
_RAW = tl.constexpr(RAW)
_NO_KEY = tl.constexpr(-(2**63))


@jit
def _settings(kind, temperatures, thresholds, row, HAS_THRESHOLDS: tl.constexpr):
    """(whether the row takes the raw logits, the divisor of its logits, its threshold)"""
    is_raw = kind == _RAW
    temperature = tl.load(temperatures + row)
    divisor = tl.where(is_raw | (temperature <= 0), 1.0, tl.maximum(temperature, _COLDEST))
    threshold = tl.load(thresholds + row) if HAS_THRESHOLDS else float("-inf")
    return is_raw, divisor, tl.where(is_raw, float("-inf"), threshold)


@jit
def _load(raw, processed, is_raw, ids, vocab_size, threshold):
    """Logits of a row in float32; −inf for ids that cannot be sampled, and for those beyond the vocabulary."""
    if is_raw:
        logit = tl.load(raw + ids, ids < vocab_size, float("-inf")).to(tl.float32)
    else:
        logit = tl.load(processed + ids, ids < vocab_size, float("-inf")).to(tl.float32)
    return tl.where(logit < threshold, float("-inf"), logit)


@jit
def _own_logit(raw, processed, is_raw, token, vocab_size, threshold):
    """The logit of the row's token; −inf if it has none."""
    token = tl.where((token >= 0) & (token < vocab_size), token, vocab_size)
    return _load(raw, processed, is_raw, token, vocab_size, threshold)


@jit
def _key(logit, ids):
    """int64: larger for larger logits, and for the lower of two ids with equal logits; _NO_KEY for −inf and NaN."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # −0 equals 0
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) - ids
    return tl.where(logit > float("-inf"), key, _NO_KEY)


@jit
def _id_of(key):
    return (-key & 0xFFFFFFFF).to(tl.int32)


@jit
def _logit_of(key):
    bits = ((key + 0xFFFFFFFF) >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit(do_not_specialize=["length"])
def _logprobs_of_part_kernel(
    raw, processed, token_ids, kinds, temperatures, thresholds, vocab_size, raw_stride, processed_stride,
    parts, lists, length,
    HAS_THRESHOLDS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """For a part of a row: its largest logit, Σ exp((logit − largest) / T), the number of logits larger than the
    token's, and the keys of its largest logits. A list of fewer than `length` keys ends with _NO_KEY."""
    begin()
    part = tl.program_id(0)
    row = tl.program_id(1)
    num_parts = tl.num_programs(0)
    kind = tl.load(kinds + row)
    if kind != 0:
        raw += row.to(tl.int64) * raw_stride
        processed += row.to(tl.int64) * processed_stride
        is_raw, divisor, threshold = _settings(kind, temperatures, thresholds, row, HAS_THRESHOLDS)
        scale = 1.4426950408889634 / divisor
        own = _own_logit(raw, processed, is_raw, tl.load(token_ids + row), vocab_size, threshold)
        group = tl.arange(0, TOKENS // GROUP)
        member = tl.arange(0, GROUP)
        first = part * TOKENS
        logit = _load(raw, processed, is_raw, first + group[:, None] * GROUP + member[None, :], vocab_size, threshold)
        of_groups = tl.max(logit, 1)
        largest = tl.max(of_groups, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.sum(tl.sum(tl.exp2((logit - base) * scale), 1), 0)
        num_larger = tl.sum(tl.sum((logit > own).to(tl.int32), 1), 0)
        parts += row * 3 * num_parts + part
        tl.store(parts, largest.to(tl.int32, bitcast=True))
        tl.store(parts + num_parts, weight.to(tl.int32, bitcast=True))
        tl.store(parts + 2 * num_parts, num_larger)
        # The key of a group that was not read again is a bound, with the lowest id: groups still compare right.
        lists += (row.to(tl.int64) * num_parts + part) * length
        key = _key(of_groups, first + group * GROUP)
        count = 0
        while count < length:
            bound = tl.max(key, 0)
            best_group = (_id_of(bound) - first) // GROUP
            ids = first + best_group * GROUP + member  # the row's first group if no key is left
            of_members = _key(_load(raw, processed, is_raw, ids, vocab_size, threshold), ids)
            found = tl.max(tl.where(of_members <= bound, of_members, _NO_KEY), 0)
            next_one = tl.max(tl.where(of_members < found, of_members, _NO_KEY), 0)
            key = tl.where(group == best_group, next_one, key)
            tl.store(lists + count, found)
            count = tl.where(found == _NO_KEY, length, count + 1)


@jit(do_not_specialize=["length", "width"])
def _logprobs_of_row_kernel(
    raw, processed, token_ids, kinds, temperatures, thresholds, vocab_size, raw_stride, processed_stride,
    parts, lists, length, result, width, num_parts,
    HAS_THRESHOLDS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A row of the result, from the results of _logprobs_of_part_kernel."""
    begin()
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    part = tl.arange(0, PARTS)
    result += row.to(tl.int64) * (1 + 2 * width)
    if kind == 0:
        for start in range(0, 1 + 2 * width, PARTS):
            tl.store(result + start + part, 0, start + part < 1 + 2 * width)
    else:
        raw += row.to(tl.int64) * raw_stride
        processed += row.to(tl.int64) * processed_stride
        is_raw, divisor, threshold = _settings(kind, temperatures, thresholds, row, HAS_THRESHOLDS)
        token = tl.load(token_ids + row)
        own = _own_logit(raw, processed, is_raw, token, vocab_size, threshold)

        of_parts = parts + row * 3 * num_parts + part
        is_part = part < num_parts
        largest = tl.load(of_parts, is_part, 0).to(tl.float32, bitcast=True)
        largest = tl.where(is_part, largest, float("-inf"))
        weight = tl.load(of_parts + num_parts, is_part, 0).to(tl.float32, bitcast=True)
        num_larger = tl.sum(tl.load(of_parts + 2 * num_parts, is_part, 0), 0)
        base = tl.max(largest, 0)  # if it is −inf, no log-probability is computed from it
        scale = 1.4426950408889634 / divisor
        log_sum = tl.log(tl.sum(weight * tl.exp2((largest - base) * scale), 0))

        has_token = (token >= 0) & (token < vocab_size)
        tl.store(result, tl.where(has_token, 1 + num_larger, 0))
        tl.store(result + 1, tl.where(has_token, token, -1).to(tl.int32))
        value = tl.where(own > float("-inf"), (own - base) / divisor - log_sum, float("-inf"))
        tl.store(result + 2, value.to(tl.int32, bitcast=True))

        of_lists = lists + (row.to(tl.int64) * num_parts + part) * length
        head = tl.zeros([PARTS], tl.int32)  # the place of each part's key in its list
        key = tl.load(of_lists, is_part & (head < length), _NO_KEY)
        for column in range(1, width):
            best = tl.max(key, 0)
            value = tl.where(best == _NO_KEY, float("-inf"), (_logit_of(best) - base) / divisor - log_sum)
            is_there = value > float("-inf")
            value = tl.where(is_there, value, float("-inf"))
            tl.store(result + 1 + 2 * column, tl.where(is_there, _id_of(best), -1))
            tl.store(result + 2 + 2 * column, value.to(tl.int32, bitcast=True))
            is_taken = (key == best) & (key != _NO_KEY)
            head += is_taken.to(tl.int32)
            following = tl.load(of_lists + head, is_taken & (head < length), _NO_KEY)
            key = tl.where(is_taken, following, key)


def triton_logprobs(
    raw: Tensor, processed: Tensor, token_ids: Tensor, kinds: Tensor, temperatures: Tensor, thresholds: Tensor | None,
    width: int,
) -> Tensor:  # fmt: skip
    """Waits for nothing on the host; the grids depend on shapes only."""
    num_rows, vocab_size = raw.shape
    num_parts = triton.cdiv(vocab_size, _TOKENS)
    length = min(width - 1, _TOKENS)
    parts = torch.empty((num_rows, 3, num_parts), dtype=torch.int32, device=raw.device)
    # Not empty even if nothing is listed: an empty tensor has no address.
    lists = torch.empty((num_rows, num_parts, max(length, 1)), dtype=torch.int64, device=raw.device)
    result = torch.empty((num_rows, 1 + 2 * width), dtype=torch.int32, device=raw.device)
    inputs = (
        raw, processed, token_ids, kinds, temperatures, temperatures if thresholds is None else thresholds,
        vocab_size, raw.stride(0), processed.stride(0),
    )  # fmt: skip
    _logprobs_of_part_kernel[(num_parts, num_rows)](
        *inputs, parts, lists, length, HAS_THRESHOLDS=thresholds is not None, TOKENS=_TOKENS, GROUP=_GROUP,
        num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    _logprobs_of_row_kernel[(num_rows,)](
        *inputs, parts, lists, length, result, width, num_parts, HAS_THRESHOLDS=thresholds is not None,
        PARTS=triton.next_power_of_2(num_parts), num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return result


def logprobs(
    raw: Tensor,
    processed: Tensor,
    token_ids: Tensor,
    kinds: Tensor,
    temperatures: Tensor,
    thresholds: Tensor | None,
    width: int,
    use_kernels: bool = False,
) -> Tensor:
    """The log-probability and the rank of each row's token, and the width − 1 most probable ids with theirs.

    Args:
        raw: [num_rows, vocab_size], float32, bfloat16 or float16; a row's logits are contiguous.
        processed: [num_rows, vocab_size], of any of these dtypes; may be `raw`.
        token_ids: int64 [num_rows]; a row has no token if it is negative, or not below vocab_size.
        kinds: int32 [num_rows]: NO_LOGPROBS; RAW for log_softmax(raw); PROCESSED for log_softmax(processed /
            temperature) over the ids whose logit is at least the threshold, and −inf for the others.
        temperatures: float32 [num_rows]; 0, the temperature of greedy rows, counts as 1. RAW rows ignore it.
        thresholds: float32 [num_rows], as ops/filters.py finds them. None if no row has one. RAW rows ignore them.
        width: number of ids and log-probabilities per row of the result, at least 1.
        use_kernels: compute with the kernels.

    Returns:
        int32 [num_rows, 1 + 2 × width], in each row

            rank, id 0, logprob 0, id 1, logprob 1, …, id width − 1, logprob width − 1

        where a logprob is the bits of a float32. In a C-ordered array on the host, `array[:, 0]` are the ranks,
        `array[:, 1::2]` the ids, and `array[:, 2::2].view(np.float32)` the log-probabilities, all of them views.

        rank: 1 + the number of ids with a larger logit than the token; ids that the row cannot sample do not count.
        Column 0 is the token's: its log-probability is −inf if the row cannot sample it. A row that has no token has
        rank 0, id −1 and −inf here; its other columns are like those of any row.
        The others are the most probable ids, in descending order; equal logits are in the order of their ids. No id has
        the log-probability −inf: if too few ids are left, the last columns have id −1 and −inf.
        A row of NO_LOGPROBS is all zeros. If all logits are −inf, all log-probabilities are. If one is NaN or +inf, the
        row has no distribution: its numbers mean nothing, but its ids are still below vocab_size.
    """
    find = triton_logprobs if use_kernels else plain_logprobs
    return find(raw, processed, token_ids, kinds, temperatures, thresholds, width)
