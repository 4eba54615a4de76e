"""The results of a launched step, and their transfer from the device to the host."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from nanovllm.engine.step import StepOutput, TokenNumbers, WrongSlot
from nanovllm.layers.sampler import LogitsChange, Sampled
from nanovllm.ops.cache_canary import NONE_WRONG


class StepInFlight:
    """The results of a launched step: on the device at first, on the host once `wait` returns.

    Args:
        sampled: the sampled tokens; or, while the step waits for its constrained rows, a function that takes the
            arguments of LaunchedStep.constrain and samples.
        scores: the numbers of the prompts' tokens that are scored, as `Sampled.logprobs`.
        states: what the step pools, see StepOutput; in any dtype.
        wrong_slots: int64 [num_rows], see ops/cache_canary.py; None if nothing was checked.
    """

    def __init__(
        self,
        sampled: Sampled | Callable[..., Sampled],
        scores: torch.Tensor,
        states: Sequence[torch.Tensor],
        wrong_slots: torch.Tensor | None,
    ):
        self._sampled, self._scores, self._states = sampled, scores, states
        self._checked = [] if wrong_slots is None else [wrong_slots]
        self._results: list[torch.Tensor] = []
        self._event = torch.cuda.Event() if scores.is_cuda else None
        if isinstance(sampled, Sampled):
            self._take(sampled)
        else:
            self._record()

    def constrain(self, masks: np.ndarray, rows: list[int], changes: Mapping[int, LogitsChange]) -> None:
        assert not isinstance(self._sampled, Sampled), "the step has sampled already"
        self._sampled = self._sampled(masks, rows, changes)
        self._take(self._sampled)

    def _take(self, sampled: Sampled) -> None:
        self._results = [*sampled, self._scores, *self._states, *self._checked]
        if self._event is not None:
            self._results = [_to_host(each) if each.numel() else each.cpu() for each in self._results]
        self._record()

    def _record(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._scores.device))

    def wait(self) -> StepOutput:
        if self._event is not None:
            self._event.synchronize()
        if not self._results:  # it never got its masks: it is thrown away
            return StepOutput([])
        token_ids, logprobs, scores, *states = self._results
        wrong_slot = _first_wrong(states.pop().numpy()) if self._checked else None
        pooled = tuple(each.float().numpy() for each in states)
        return StepOutput(token_ids.tolist(), _numbers(logprobs), _numbers(scores), pooled, wrong_slot)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is complete once the stream is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _numbers(rows: torch.Tensor) -> TokenNumbers:
    return TokenNumbers(rows.numpy().tobytes(), 4 * rows.shape[1]) if rows.numel() else TokenNumbers()


def _first_wrong(found: np.ndarray) -> WrongSlot | None:
    rows = np.flatnonzero(found != NONE_WRONG).tolist()
    return WrongSlot(rows[0], int(found[rows[0]]) >> 32, int(found[rows[0]]) & 0xFFFFFFFF) if rows else None
