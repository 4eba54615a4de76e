"""The progress bar of a call."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from tqdm.auto import tqdm

from nanovllm.checks import boolean
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestOutput
from nanovllm.pooling_outputs import PoolingRequestOutput

_FORMAT = "{l_bar}{bar}| {n:.1f}/{total} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_SECONDS_BETWEEN_UPDATES = 0.1
# Where there is no terminal, a bar is written once per minute, and not at all in a shorter call.
_IN_A_LOG = {"mininterval": 60, "delay": 60}
# One token of a prompt takes this part of the time of a generated one: a step computes many of them at once.
_PROMPT_TOKEN = 1 / 16


class Progress:
    """The prompts done, with the tokens of each phase per second so far, and the number of error rows.

    A running request counts by the part of its tokens that is computed. Its length is an estimate until it ends. If
    lengths were geometric, their mean would be the number of tokens generated so far per finished completion, and a
    running completion would have that many tokens to come. It never has more to come than its maximum allows.

    Args:
        num_requests: the call's prompts.
        use_tqdm: whether to show tqdm's bar; or a function with tqdm's arguments that makes a bar, which counts whole
            prompts.
    """

    def __init__(self, engine: LLMEngine, num_requests: int, use_tqdm: bool | Callable[..., Any]):
        self._engine, self._at_start = engine, replace(engine.step_stats)
        self._num_finished = self._num_errors = 0
        self._shown: float = 0  # what the bar has got
        self._num_new_tokens = self._num_completions = 0  # of the finished prompts
        self._is_ours = not callable(use_tqdm)
        # The bar may be the caller's, whose code cannot change the engine.
        self._bar = engine.without_changes(_make_bar, use_tqdm, num_requests)
        self._is_shown = not getattr(self._bar, "disable", False)
        self._began = self._updated = time.perf_counter()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, error: object, *more: object) -> None:
        if error is None and self._is_shown:
            self._engine.without_changes(self._update)
        self._engine.without_changes(self._bar.close)

    def add_finished(self, outputs: Collection[RequestOutput | PoolingRequestOutput]) -> None:
        """Is called after each step, with the outputs that it finished."""
        self._num_finished += len(outputs)
        for output in outputs:
            if output.error is not None:
                self._num_errors += 1
            elif not isinstance(output, PoolingRequestOutput):
                self._num_completions += len(output.outputs)
                self._num_new_tokens += sum(len(each.token_ids) for each in output.outputs)
        if self._is_shown and time.perf_counter() - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self._engine.without_changes(self._update)

    def _update(self) -> None:
        self._updated = time.perf_counter()
        seconds = max(self._updated - self._began, 1e-9)
        speeds = [
            f"{phase} {(getattr(self._engine.step_stats, name) - getattr(self._at_start, name)) / seconds:,.0f} tok/s"
            for phase, name in (("prefill", "num_prefill_tokens"), ("decode", "num_decode_tokens"))
        ]
        errors = [f"errors: {self._num_errors}"] if self._num_errors else []
        self._bar.set_postfix_str(", ".join(speeds + errors), refresh=False)
        # Multiples of 1/16 have exact sums, so the bar ends at its total.
        done = max(self._shown, int(16 * self._prompts_done()) / 16) if self._is_ours else self._num_finished
        self._bar.update(done - self._shown)
        self._shown = done

    def _prompts_done(self) -> float:
        running = self._engine.scheduler.running
        num_new = self._num_new_tokens + sum(seq.num_tokens - seq.num_prompt_tokens for seq in running)
        mean = num_new / self._num_completions if self._num_completions else inf
        return self._num_finished + sum(_part_done(seq, mean) for seq in running)


def _part_done(seq: Sequence, mean: float) -> float:
    """The part of a prompt that one of its completions has done, if `mean` tokens are still to come."""
    done = seq.num_tokens - seq.num_prompt_tokens + _PROMPT_TOKEN * min(seq.num_computed_tokens, seq.num_prompt_tokens)
    left = min(seq.max_length - seq.num_tokens, mean)
    left += _PROMPT_TOKEN * max(seq.num_prompt_tokens - seq.num_computed_tokens, 0)
    return done / (done + left) / seq.sampling_params.n


def _make_bar(use_tqdm: Any, num_requests: int) -> Any:
    options = {"total": num_requests, "desc": "Completions", "unit": "prompt"}
    if callable(use_tqdm):
        return use_tqdm(**options)
    if isinstance(use_tqdm, (list, tuple)):
        raise TypeError("the third argument is use_tqdm, not token ids; give those as the prompts")
    is_shown = boolean("use_tqdm", bool(use_tqdm) if use_tqdm in (True, False) else use_tqdm)
    # The rate is the mean since the start. With disable=None, tqdm shows a bar on a terminal and in a notebook.
    make = partial(tqdm, bar_format=_FORMAT, smoothing=0, miniters=0, **options)
    bar = make(disable=None if is_shown else True)
    return make(**_IN_A_LOG) if is_shown and bar.disable else bar
