"""The parameters of a job's rows."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from nanovllm import LoRARequest, PoolingParams, SamplingParams
from nanovllm.jobs.adapters import check_known
from nanovllm.jobs.columns import LABELS_ADVICE, POOLING_KEYS, Columns
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.fields import kept_if_short
from nanovllm.jobs.openai_pooling import TASKS
from nanovllm.jobs.openai_rows import OPENAI_DEFAULTS
from nanovllm.jobs.rows import TEXT_KINDS, JobRow, parse_row
from nanovllm.sampling_params import row_seed, with_seed


class RowParams:
    """Makes each row's parameters from the model's, the row format's, the job's and the row's own; later ones take
    precedence. The model's defaults apply to rows that generate; the job's apply to rows of its task.

    Args:
        recommended: the model's recommended parameters.
        params: the job's parameters; see JobOptions.
        seed: the job's seed.
        columns: the columns that make the rows.
        adapters: the job's adapters by name.

    Raises:
        TypeError, ValueError: the job's parameters are wrong.
        JobError: later, a row needs a library that is not installed: no row is at fault.
    """

    def __init__(
        self,
        recommended: SamplingParams,
        params: dict[str, Any],
        seed: int,
        columns: Columns,
        adapters: Mapping[str, LoRARequest] = MappingProxyType({}),
    ):
        self.adapters = adapters
        values = {each.name: getattr(recommended, each.name) for each in fields(recommended)}
        self._base = {kind: values | OPENAI_DEFAULTS.get(kind, {}) for kind in TEXT_KINDS}
        self._seed, self._columns = seed, columns
        self._params = {name: value for name, value in params.items() if name != "task"}
        self._check_params(columns.task)
        self._made = kept_if_short(4096, self._make)
        self._has_llguidance = find_spec("llguidance") is not None

    def parse(self, number: int, line: bytes) -> JobRow:
        """Parses a line as a row, which is also an error row if its parameters do not fit the job's, or the job lacks
        its adapter."""
        row = parse_row(number, line, self._columns)
        if row.error is None:
            try:
                row = self._with_adapter(row)
                self._of(row)
            except (TypeError, ValueError) as problem:
                return replace(row, error=str(problem))
        return row

    def of(self, row: JobRow) -> SamplingParams | PoolingParams:
        """The parameters of a row without an error. If the row samples and gives no seed, its seed is derived from the
        job's seed and its id."""
        params = self._of(row)
        if isinstance(params, PoolingParams) or params.seed is not None or params.temperature == 0:
            return params
        return with_seed(params, row_seed(self._seed, row.id))

    def adapter_of(self, row: JobRow) -> LoRARequest | None:
        """The adapter of a row without an error."""
        return None if row.adapter is None else self.adapters[row.adapter]

    def dimensions(self, row: JobRow) -> int | None:
        """The length of the embedding of a row without an error; None: the model's."""
        params = self._of(row)
        return params.dimensions if isinstance(params, PoolingParams) else None

    def max_num_new_tokens(self, row: JobRow, maximum: int) -> int:
        """How many tokens a row without an error may generate, if each completion gets at most `maximum`."""
        params = self._of(row)
        if isinstance(params, PoolingParams):
            return 0
        return params.n * (maximum if params.max_tokens is None else min(params.max_tokens, maximum))

    def _with_adapter(self, row: JobRow) -> JobRow:
        check_known(row.adapter, self.adapters)
        if row.model not in self.adapters:
            return row
        # vLLM's server takes the name of an adapter as that of a model.
        if row.adapter not in (None, row.model):
            raise ValueError(f'"adapter" is {row.adapter!r}, and "model" is the adapter {row.model!r}; leave one out')
        return replace(row, adapter=row.model)

    def _check_params(self, task: str) -> None:
        """Raises if the job's parameters are wrong: no row is at fault."""
        if task == "generate":
            if name := next((name for name in POOLING_KEYS if name in self._params), None):
                raise ValueError(f"{name} is a parameter of a task; give the task too, such as embed (--task embed)")
            SamplingParams(**self._base["plain"] | self._params)
        else:  # each row may have labels of its own
            PoolingParams(None if task == "label" and "labels" not in self._params else task, **self._params)

    def _make(self, kind: str, own: str) -> SamplingParams | PoolingParams:
        task = "generate" if kind in TEXT_KINDS else TASKS.get(kind, kind)
        given = (self._params if task == self._columns.task else {}) | json.loads(own)
        if task != "generate":
            if task == "label" and "labels" not in given:
                raise ValueError(f"task 'label' needs labels: {LABELS_ADVICE}, or a key \"labels\" of each plain row")
            pooling = PoolingParams(task=task, **given)
            if pooling.hidden_states_layers:
                raise ValueError("a job has no output for hidden_states_layers; LLM.embed has")
            return pooling
        params = SamplingParams(**self._base[kind] | given)
        structured = params.structured_outputs
        if structured is not None and structured.choice is None and not self._has_llguidance:
            raise JobError("structured_outputs need llguidance, which is not installed: pip install llguidance")
        return params

    def _of(self, row: JobRow) -> SamplingParams | PoolingParams:
        return self._made(row.kind, json.dumps(row.params) if row.params else "{}")
