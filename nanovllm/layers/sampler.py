"""From logits to tokens: greedy or Gumbel-max, with top-k, top-p and min-p for the rows that ask.

Noise comes from a counter-based generator keyed by (request seed, position, token id or group of ids), so a request's
tokens do not depend on its neighbours, its arrival, preemption or the batch.

Gumbel-max is done in two stages: of the groups of 16 ids one is drawn by its total weight, and then one of its ids. The
largest of a group's noisy scores is distributed as the group's log-sum-exp with noise of its own, and which id has it
does not depend on how large it is (Maddison et al., 2014, use both for trees). So this is the same distribution, with a
sixteenth of the noise and, in the kernel, a quarter of the generator's blocks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.ops.kernel import is_fused
from nanovllm.ops.collectives import Parallel
BROKEN, NOTHING = 2**63 - 1, -0x7F800001
GROUP = 16

# As good as the least normal number of float32; also what divides where the temperature is 0.
COLDEST = 1.2e-38
_MASK = 0xFFFFFFFF


@dataclass
class SamplingBatch:
    """How each row of logits is sampled.

    Args:
        temperatures: float32 [num_rows], 0 for greedy rows.
        seeds: int64 [num_rows], 64 bits each.
        positions: int64 [num_rows], where in its sequence the sampled token will stand.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass
class SpecialRows:
    """The few rows of a step that want more than a temperature.

    Args:
        rows: int64 [num_special], which of the sampled rows they are; the following stand for those alone.
        slots: int64 [num_special], where to leave what they sample.
        sampling: their temperatures, seeds and positions.
        top_ks: int64 [num_special], vocabulary size where off.
        top_ps, min_ps: float32 [num_special], 1 and 0 where off.
        banned_rows, banned_ids: int64 [num_banned], pairs of a special row and a token id it must not sample.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    sampling: SamplingBatch
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    banned_rows: torch.Tensor
    banned_ids: torch.Tensor


@dataclass(frozen=True)
class VocabSlice:
    """The ids that a rank has logits of: those from `first` on, a multiple of GROUP."""

    first: int = 0
    parallel: Parallel = Parallel()  # noqa: RUF009 (frozen)


def sample(logits: torch.Tensor, batch: SamplingBatch, vocab: VocabSlice = VocabSlice()) -> torch.Tensor:
    """logits: [num_rows, ids of the slice] -> token ids int64 [num_rows], −1 for a row whose logits are not finite.

    Equal scores go to the lowest id. Ranks exchange one candidate a row, never the logits.
    """
    first, is_alone = vocab.first, vocab.parallel.size == 1
    if is_fused(logits):
        from nanovllm.kernels.fused_sampler import fused_sample, fused_winners

        found = fused_sample(logits, batch.temperatures, batch.seeds, batch.positions, first, not is_alone)
        return found if is_alone else fused_winners(vocab.parallel.maximum(found))
    scores, token_ids = _best_of_slice(logits, batch, first)
    return token_ids if is_alone else winners(vocab.parallel.maximum(candidates(scores, token_ids)))


def _best_of_slice(logits: torch.Tensor, batch: SamplingBatch, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(score float32, id int64 or −1 if the score is not finite) of what each row samples: [num_rows] each.

    A sampled id has its group's score; NaN beats everything.
    """
    if logits.shape[1] == 0:  # the vocabulary ended with the ranks before
        nothing = torch.full_like(batch.temperatures, float("-inf"))
        return nothing, torch.full_like(batch.seeds, -1)
    largest, token_ids = logits.float().max(-1)
    random = batch.temperatures.nonzero().squeeze(1)
    if len(random):
        largest[random], token_ids[random] = _draw(logits[random].float(), batch, random, first)
    return largest, (token_ids + first).where(largest.isfinite(), -1)


def candidates(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 and int64 [num_rows] -> one int64 a row, largest where the score is, and of equal ones where the id is
    lowest: above, the score's bits in an order that integers share with floats, below, the id counted down."""
    bits = (scores + 0.0).view(torch.int32).long()  # −0 becomes 0
    packed = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (_MASK - token_ids.clamp(min=0))
    return packed.masked_fill_(~(scores < float("inf")), BROKEN)


def winners(best: torch.Tensor) -> torch.Tensor:
    """The largest of each row's candidates -> token ids, −1 if one of them was broken or none is above −inf."""
    return (_MASK - (best & _MASK)).masked_fill_((best == BROKEN) | (best >> 32 <= NOTHING), -1)


def sample_special(logits: torch.Tensor, special: SpecialRows) -> torch.Tensor:
    """logits: [num_special, vocab_size] -> token ids int64 [num_special], like `sample`."""
    is_broken = ~logits.amax(-1).isfinite()
    scores = logits.float()
    scores[special.banned_rows, special.banned_ids] = float("-inf")
    sampling = special.sampling
    # Shifted by the largest logit, so that a tiny temperature cannot overflow the winner.
    by_temperature = (scores - scores.amax(-1, keepdim=True)) / sampling.temperatures.clamp(min=COLDEST)[:, None]
    kept = filter_scores(by_temperature, special.top_ks, special.top_ps, special.min_ps).isfinite()
    scores.masked_fill_(~kept & (sampling.temperatures > 0)[:, None], float("-inf"))
    _, token_ids = _draw(scores, sampling)
    return token_ids.where(~is_broken & scores.amax(-1).isfinite(), -1)


def _draw(
    logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor | slice = slice(None), first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: float32 [num_rows, num_ids] -> (score float32, index int64), [num_rows] each, of what each row samples.

    Scores are not divided by the temperature, which may be tiny: that of a group is
    m + T × (log Σ exp((logits − m) / T) − log E), m its largest logit and E exponential noise; that of an id in it is
    logit − T × log E with noise of its own. Equal scores go to the lowest id. A row that is not finite has a score that
    is not.
    """
    temperature, seeds, positions = batch.temperatures[rows, None], batch.seeds[rows], batch.positions[rows]
    groups = F.pad(logits, (0, -logits.shape[1] % GROUP), value=float("-inf")).unflatten(-1, (-1, GROUP))
    largest = groups.amax(-1)
    base = largest.masked_fill(largest == float("-inf"), 0)
    weights = ((groups - base[..., None]) / temperature.clamp(min=COLDEST)[..., None]).exp_().sum(-1)
    first_block, offset = divmod(first // GROUP, 4)
    blocks = torch.arange(first_block, first_block + (offset + groups.shape[1] + 3) // 4, device=logits.device)[None]
    noise = exponential_noise(seeds, positions, blocks, 0)[:, offset : offset + groups.shape[1]]
    scores = (base + temperature * (weights.log() - noise.log_())).masked_fill_(weights == 0, float("-inf"))
    best, group = scores.max(-1)
    members = groups.gather(1, group[:, None, None].expand(-1, 1, GROUP)).squeeze(1)
    blocks = (first + group[:, None] * GROUP) // 4 + torch.arange(GROUP // 4, device=logits.device)
    noise = exponential_noise(seeds, positions, blocks, 1)
    member = (members - temperature * noise.log_()).argmax(-1)
    return best, group * GROUP + member


def filter_scores(
    scores: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """−inf for the tokens that top-k, then top-p over the rest, then min-p remove.

    Args:
        scores: float32 [num_rows, vocab_size], logits over temperature.
        top_ks, top_ps, min_ps: [num_rows]. Top-p keeps the token that crosses p.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    is_kept = rank < top_ks[:, None]
    probs = ordered.masked_fill(~is_kept, float("-inf")).softmax(-1)
    # The mass before a token decides, so the one that crosses p stays; p = 1 is off, whatever rounding says.
    mass_before = probs.cumsum(-1) - probs
    is_kept &= (mass_before < top_ps[:, None]) | (top_ps[:, None] >= 1)
    is_kept &= probs >= min_ps[:, None] * probs[:, :1]
    is_kept[:, 0] = True
    return scores.masked_fill(~torch.empty_like(is_kept).scatter_(-1, order, is_kept), float("-inf"))


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, stream: int) -> torch.Tensor:
    """Independent Exp(1) noise, float32 [num_rows, 4 × n], of the ids 4 × block … 4 × block + 3 of each of `blocks`:
    int64 [num_rows or 1, n]; seeds and positions: int64 [num_rows].

    An id takes its word of the Philox block whose counter is (id // 4, position, stream, 0). Stream 0 is of groups of
    token ids, 1 of token ids.
    """
    counter = (blocks, positions[:, None] & _MASK, torch.full_like(blocks, stream), torch.zeros_like(blocks))
    words = philox4x32(counter, (seeds[:, None], seeds[:, None] >> 32))
    bits = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)
    # All 32 bits count, for the winner's E is tiny among many; the largest words would round to 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def philox4x32(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...], num_rounds: int = 7
) -> tuple[torch.Tensor, ...]:
    """Philox4x32 (Salmon et al., SC 2011): four words of 32 random bits, in int64, for each counter and key.

    Seven rounds are the fewest that they report to pass BigCrush.
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
