"""From logits to tokens: greedy or Gumbel-max, with top-k, top-p and min-p for the rows that ask.

Noise comes from a counter-based generator keyed by (request seed, position, token id), so a request's tokens
do not depend on its neighbours, its arrival, preemption or the batch.
"""

from dataclasses import dataclass

import torch

_MASK = 0xFFFFFFFF


@dataclass
class SamplingBatch:
    """How each of `num_rows` logits rows is sampled. A part that no row needs is None.

    Args:
        banned_rows, banned_ids: int64 [num_banned], pairs of a row and a token id it must not sample.
        random_rows: int64 [num_random], the rows that are not greedy; the following stand for those alone.
        temperatures: float32 [num_random].
        seeds: int64 [num_random], 64 bits each.
        positions: int64 [num_random], where in its sequence the sampled token will stand.
        filtered: int64 [num_filtered], which of the random rows have a top-k, top-p or min-p.
        top_ks: int64 [num_filtered], vocabulary size where off.
        top_ps, min_ps: float32 [num_filtered].
    """

    banned_rows: torch.Tensor | None = None
    banned_ids: torch.Tensor | None = None
    random_rows: torch.Tensor | None = None
    temperatures: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    filtered: torch.Tensor | None = None
    top_ks: torch.Tensor | None = None
    top_ps: torch.Tensor | None = None
    min_ps: torch.Tensor | None = None


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits: [num_rows, vocab_size] -> token ids int64 [num_rows], −1 for a row whose logits are not finite.

    The logits may be overwritten. Equal scores go to the lowest id.
    """
    if batch.banned_rows is not None:
        logits[batch.banned_rows, batch.banned_ids] = float("-inf")
    largest, token_ids = logits.max(-1)
    if batch.random_rows is not None:
        # Shifted by the largest logit, so that a tiny temperature cannot overflow the winner.
        scores = (logits[batch.random_rows].float() - largest[batch.random_rows, None].float()) / batch.temperatures[
            :, None
        ]
        if batch.filtered is not None:
            scores[batch.filtered] = filter_scores(scores[batch.filtered], batch.top_ks, batch.top_ps, batch.min_ps)
        # argmax(p / E) with E exponential, taken in logarithms: no softmax is needed.
        scores -= exponential_noise(batch.seeds, batch.positions, logits.shape[-1]).log_()
        token_ids[batch.random_rows] = scores.argmax(-1)
    return token_ids.where(largest.isfinite(), -1)


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
