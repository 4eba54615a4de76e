"""The sampling parameters of a job's rows."""

import json
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from nanovllm import SamplingParams
from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.fields import kept_if_short
from nanovllm.jobs.openai_rows import OPENAI_DEFAULTS
from nanovllm.jobs.rows import JobRow, parse_row
from nanovllm.sampling_params import row_seed, with_seed


class RowParams:
    """Makes each row's parameters from the model's, the row format's, the job's and the row's own; later ones take
    precedence.

    Args:
        recommended: the model's recommended parameters.
        params: the job's parameters.
        seed: the job's seed.
        columns: the columns that make the rows.

    Raises:
        TypeError, ValueError: the job's parameters are wrong.
        JobError: later, a row needs a library that is not installed: no row is at fault.
    """

    def __init__(self, recommended: SamplingParams, params: dict[str, Any], seed: int, columns: Columns):
        values = {each.name: getattr(recommended, each.name) for each in fields(recommended)}
        self._base = {kind: values | OPENAI_DEFAULTS.get(kind, {}) | params for kind in ("plain", *OPENAI_DEFAULTS)}
        self._seed, self._columns = seed, columns
        SamplingParams(**self._base["plain"])  # raises if the job's parameters are wrong: no row is at fault
        self._made = kept_if_short(4096, self._make)
        self._has_llguidance = find_spec("llguidance") is not None

    def parse(self, number: int, line: bytes) -> JobRow:
        """Parses a line as a row, which is also an error row if its parameters do not fit the job's."""
        row = parse_row(number, line, self._columns)
        if row.error is None and row.params:
            try:
                self._of(row)
            except (TypeError, ValueError) as problem:
                return replace(row, error=str(problem))
        return row

    def of(self, row: JobRow) -> SamplingParams:
        """The parameters of a row without an error. If the row samples and gives no seed, its seed is derived from the
        job's seed and its id."""
        params = self._of(row)
        if params.seed is not None or params.temperature == 0:
            return params
        return with_seed(params, row_seed(self._seed, row.id))

    def max_num_new_tokens(self, row: JobRow, maximum: int) -> int:
        """How many tokens a row without an error may generate, if each completion gets at most `maximum`."""
        params = self._of(row)
        return params.n * (maximum if params.max_tokens is None else min(params.max_tokens, maximum))

    def _make(self, kind: str, own: str) -> SamplingParams:
        params = SamplingParams(**self._base[kind] | json.loads(own))
        structured = params.structured_outputs
        if structured is not None and structured.choice is None and not self._has_llguidance:
            raise JobError("structured_outputs need llguidance, which is not installed: pip install llguidance")
        return params

    def _of(self, row: JobRow) -> SamplingParams:
        return self._made(row.kind, json.dumps(row.params) if row.params else "{}")
