"""The sampling parameters of a job's rows."""

import json
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import xxhash

from nanovllm.jobs.openai_rows import OPENAI_DEFAULTS
from nanovllm.jobs.rows import JobRow
from nanovllm.sampling_params import SamplingParams


class RowParams:
    """What the model recommends, then the row's format, then the job, then the row itself.

    Args:
        recommended: by the model.
        params: of the job.
        seed: of the job; a row that samples and gives no seed gets one made of this and its id.

    Raises:
        TypeError, ValueError: the job's parameters are wrong.
    """

    def __init__(self, recommended: SamplingParams, params: dict[str, Any], seed: int):
        values = {each.name: getattr(recommended, each.name) for each in fields(recommended)}
        self._base = {kind: values | OPENAI_DEFAULTS.get(kind, {}) | params for kind in ("plain", *OPENAI_DEFAULTS)}
        self._seed = seed
        SamplingParams(**self._base["plain"])  # the job's own mistakes are not those of each row
        self._made = lru_cache(4096)(lambda kind, own: SamplingParams(**self._base[kind] | json.loads(own)))

    def of(self, row: JobRow) -> SamplingParams:
        """Raises TypeError or ValueError if the row's parameters do not fit the job's."""
        params = self._made(row.kind, json.dumps(row.params) if row.params else "{}")
        if params.seed is not None or params.temperature == 0:
            return params
        return replace(params, seed=xxhash.xxh3_64_intdigest((row.id or "").encode(), self._seed))

    def most_new_tokens(self, row: JobRow, most: int) -> int:
        """The most tokens that a row may generate, if no completion gets more than `most`."""
        values = self._base[row.kind]
        max_tokens, n = (row.params.get(name, values[name]) for name in ("max_tokens", "n"))
        return n * (most if max_tokens is None else min(max_tokens, most))
