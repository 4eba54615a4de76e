"""The sampling parameters of a job's rows."""

import json
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from nanovllm import SamplingParams
from nanovllm.jobs.openai_rows import OPENAI_DEFAULTS
from nanovllm.jobs.rows import JobRow, parse_row
from nanovllm.sampling_params import row_seed, with_seed


class RowParams:
    """What the model recommends, then the row's format, then the job, then the row itself: the last one counts.

    Args:
        recommended: by the model.
        params: of the job.
        seed: of the job.

    Raises:
        TypeError, ValueError: the job's parameters are wrong.
    """

    def __init__(self, recommended: SamplingParams, params: dict[str, Any], seed: int):
        values = {each.name: getattr(recommended, each.name) for each in fields(recommended)}
        self._base = {kind: values | OPENAI_DEFAULTS.get(kind, {}) | params for kind in ("plain", *OPENAI_DEFAULTS)}
        self._seed = seed
        SamplingParams(**self._base["plain"])  # the job's own mistakes are not those of each row
        # Most rows of a job have equal parameters.
        self._made = lru_cache(4096)(lambda kind, own: SamplingParams(**self._base[kind] | json.loads(own)))

    def parse(self, number: int, line: bytes) -> JobRow:
        """The row of a line; an error row also if its parameters do not fit the job's."""
        row = parse_row(number, line)
        if row.error is None and row.params:
            try:
                self._of(row)
            except (TypeError, ValueError) as problem:
                return replace(row, error=str(problem))
        return row

    def of(self, row: JobRow) -> SamplingParams:
        """Of a row without an error. If it samples and gives no seed, its seed is derived from the job's and its id."""
        params = self._of(row)
        if params.seed is not None or params.temperature == 0:
            return params
        return with_seed(params, row_seed(self._seed, row.id))

    def max_num_new_tokens(self, row: JobRow, maximum: int) -> int:
        """The most tokens that a row without an error may generate, if no completion gets more than `maximum`."""
        params = self._of(row)
        return params.n * (maximum if params.max_tokens is None else min(params.max_tokens, maximum))

    def _of(self, row: JobRow) -> SamplingParams:
        own = json.dumps(row.params) if row.params else "{}"
        # Large parameters, such as schemas, would fill the memory if each row had its own.
        return (self._made if len(own) < 1024 else self._made.__wrapped__)(row.kind, own)
