"""From logits to tokens: greedy or Gumbel-max, with top-k, top-p and min-p for the rows that ask.

Noise comes from a counter-based generator keyed by (request seed, position, token id), so a request's tokens
do not depend on its neighbours, its arrival, preemption or the batch.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels import is_fused

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


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits: [num_rows, vocab_size] -> token ids int64 [num_rows], −1 for a row whose logits are not finite.

    Equal scores go to the lowest id.
    """
    if is_fused(logits):
        from nanovllm.kernels.fused_sampler import fused_sample

        return fused_sample(logits, batch.temperatures, batch.seeds, batch.positions)
    largest, token_ids = logits.max(-1)
    random = batch.temperatures.nonzero().squeeze(1)
    if len(random):
        token_ids[random] = _noisy_scores(logits[random].float(), batch, random).argmax(-1)
    return token_ids.where(largest.isfinite(), -1)


def sample_special(logits: torch.Tensor, special: SpecialRows) -> torch.Tensor:
    """logits: [num_special, vocab_size] -> token ids int64 [num_special], like `sample`."""
    is_broken = ~logits.amax(-1).isfinite()
    scores = logits.float()
    scores[special.banned_rows, special.banned_ids] = float("-inf")
    sampling = special.sampling
    # Shifted by the largest logit, so that a tiny temperature cannot overflow the winner.
    by_temperature = (scores - scores.amax(-1, keepdim=True)) / sampling.temperatures.clamp(min=1.2e-38)[:, None]
    kept = filter_scores(by_temperature, special.top_ks, special.top_ps, special.min_ps).isfinite()
    scores.masked_fill_(~kept & (sampling.temperatures > 0)[:, None], float("-inf"))
    token_ids = _noisy_scores(scores, sampling).argmax(-1)
    return token_ids.where(~is_broken & scores.amax(-1).isfinite(), -1)


def _noisy_scores(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """logits − temperature × log E: float32 [num_rows, vocab_size], E exponential noise.

    Its argmax is that of p / E (Gumbel-max), without a softmax and without dividing by a tiny temperature.
    """
    noise = exponential_noise(batch.seeds[rows], batch.positions[rows], logits.shape[-1])
    return logits - batch.temperatures[rows, None] * noise.log_()


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


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Independent Exp(1) noise, float32 [num_rows, vocab_size], from seeds and positions int64 [num_rows].

    Token id t takes word t % 4 of the Philox block whose counter is (t // 4, position, 0, 0).
    """
    counter = torch.arange(-(-vocab_size // 4), device=seeds.device)[None]
    zero = torch.zeros_like(counter)
    words = philox4x32((counter, positions[:, None] & _MASK, zero, zero), (seeds[:, None], seeds[:, None] >> 32))
    bits = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :vocab_size]
    # All 32 bits count, for the winner's E is tiny in a large vocabulary; the largest words would round to 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def philox4x32(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...], num_rounds: int = 10
) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of 32 random bits, in int64, for each counter and key."""
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
