"""The options of a job and of a verification, as frozen values."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from nanovllm import Config
from nanovllm.jobs.columns import Columns
from nanovllm.jobs.errors import JobError

OnError = Literal["row", "stop"]
PreflightKind = Literal["full", "sample", "off"]
_SAMPLE = 20  # rows that a verification runs


@dataclass(frozen=True)
class JobOptions:
    """The options of a job.

    Args:
        input: a file of JSON Lines, or of Parquet if its name ends in ".parquet"; "-" is standard input. Several files
            and patterns such as "data/*.jsonl" are one input.
        output: the output file, in the input's order, written when all rows have finished; Parquet if its name ends in
            ".parquet". "-" is standard output, which gets rows as they finish; such a job cannot be resumed.
        model: a directory, a hub name, or "bundled".
        engine: other options of LLM, and `data_parallel_size`: how many LLMs, each in a process with GPUs of its own.
        params: SamplingParams for all rows that generate text; or, with a "task" such as "embed", PoolingParams for all
            rows of this task, which is then that of each row without a task of its own. A row's own parameters take
            precedence. Parameters that neither sets come from the model's generation_config.json, or else from
            SamplingParams' defaults.
        seed: the job's seed. A row that samples and has no seed of its own gets one derived from this and its id.
        on_error: "row" makes an error row of each row that cannot run; "stop" refuses the job before it starts.
        restart: delete the output, the journal and the proof of an earlier run, and start over.
        dry_run: check the rows and stop; no weights are loaded.
        estimate: in a dry run, also load the model, complete a sample of the rows, and estimate how long the whole job
            takes.
        preflight: how many rows to tokenize before the weights are loaded. "full" is all; "sample" is at most 5,000,
            spread evenly; "off" is 16, to see whether any row can run, or none in a dry run. By default (None) it is
            "full" in a dry run and with on_error "stop", else "sample".
        seconds_between_syncs: seconds between syncs to the disk; after a power failure, rows that finished after the
            last sync run again.
        price_per_hour: the machine's price, in any currency, for the report.
        report: the file that the report is written to: as JSON, or, if its name ends in ".html" or ".htm", as a page
            with figures, which needs matplotlib.
        prompt_column: the column with the prompts: strings, or lists of token ids. By default (None) it is "prompt".
        messages_column: the column with conversations, each a list of messages.
        id_column: the column with the ids. By default (None) it is "id", and a row without one gets its number.
        prompt: a template of prompts, such as "Translate: {text}", where {text} is the value of the column "text".
        chat: make each prompt the user's message of a conversation, so that the model's chat template applies.
        chat_template_kwargs: arguments of the chat template for all conversations, such as {"enable_thinking": false};
            with chat or messages_column.
        query_column, document_column: the columns with both texts of a score, for the task "score". By default (None)
            they are "query" and "document".
        adapters: the directories of LoRA adapters, by the names that rows give in their key "adapter"; see
            docs/lora.md. They turn `enable_lora` on. By default, `max_loras` is their number, at most 8.
        adapter_column: the column with the names of adapters.

    Raises:
        ValueError: an option has no such value, or two contradict each other.
    """

    input: str | Sequence[str]
    output: str
    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    on_error: OnError = "row"
    restart: bool = False
    dry_run: bool = False
    estimate: bool = False
    preflight: PreflightKind | None = None
    seconds_between_syncs: float = 10.0
    price_per_hour: float | None = None
    report: Path | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    prompt: str | None = None
    chat: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    query_column: str | None = None
    document_column: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    adapter_column: str | None = None

    @property
    def columns(self) -> Columns:
        """The columns that make the rows."""
        named = {each.name: getattr(self, each.name) for each in fields(Columns) if each.name != "task"}
        return Columns(**named, task=self.params.get("task") or "generate")

    @property
    def is_deterministic(self) -> bool:
        """Whether the job's rows do not depend on each other. Then a manifest proves them, if there is an output."""
        return bool(self.engine.get("deterministic"))

    @property
    def has_proof(self) -> bool:
        """Whether the job writes a manifest."""
        return self.is_deterministic and self.output != "-" and not self.dry_run

    def __post_init__(self) -> None:
        for name, values in (("on_error", get_args(OnError)), ("preflight", (None, *get_args(PreflightKind)))):
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, not {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, not {self.seed!r}")
        for name in ("seconds_between_syncs", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
        if not self.input:
            raise ValueError("input must name at least one file")
        self._check_adapters(self.columns)  # `columns` refuses options that contradict each other
        # Refuses a wrong option of the engine before the rows are read.
        Config(self.model, **{name: value for name, value in self.engine.items() if name != "data_parallel_size"})
        if self.restart and self.dry_run:
            raise ValueError("restart deletes the output, and dry_run changes nothing; leave one of them out")
        if self.estimate and (not self.dry_run or self.preflight == "off"):
            raise ValueError('estimate needs dry_run (--dry-run), and a preflight other than "off"')

    def _check_adapters(self, columns: Columns) -> None:
        if not self.adapters:
            return
        if self.is_deterministic:
            raise ValueError(
                "a deterministic job takes no adapters (--adapter), because its manifest has no hash of them; leave "
                "one out, or run a merged model"
            )
        if self.engine.get("enable_lora") is False:
            raise ValueError("adapters need enable_lora (--enable-lora); leave out --no-enable-lora")
        if columns.given and self.adapter_column is None:
            raise ValueError(
                "rows of named columns have an adapter only if adapter_column (--adapter-column) names its column"
            )


@dataclass(frozen=True)
class VerifyOptions:
    """The options of a verification.

    Args:
        output: the output of a job that ran with --deterministic. Its manifest and the hashes of its rows are beside
            it.
        rows: numbers of the rows to run again, from 1. By default (None), a sample is chosen.
        sample: how many rows to run again, chosen at random. By default (None), 20. With 0, no model is loaded, and its
            weights and the device are not compared.
        seed: the seed from which the sample is chosen. By default (None) it is a new one each time, which the result
            names.
        model: the model's directory or name. By default (None), the one that the job was given. A relative path is one
            from the current directory.
        input: the input's files or patterns. By default (None), those that the job was given.
        anyway: run the rows even if the input, a file of the model, a weight, a version or the device differs.

    Raises:
        TypeError, ValueError: an option has no such value, or two contradict each other.
    """

    output: str
    rows: list[int] | tuple[int, ...] | None = None
    sample: int | None = None
    seed: int | None = None
    model: str | None = None
    input: str | Sequence[str] | None = None
    anyway: bool = False

    def __post_init__(self) -> None:
        rows = [] if self.rows is None else self.rows
        if not isinstance(rows, (list, tuple)):
            raise TypeError(f"rows must be a list or a tuple of integers, such as [5, 71203], not {rows!r}")
        given = {name: [value] for name in ("sample", "seed") if (value := getattr(self, name)) is not None}
        if self.rows is not None and given:
            raise ValueError(f"rows names the rows, and {' and '.join(given)} would choose them; leave one of them out")
        for name, values, minimum in (*((name, value, 0) for name, value in given.items()), ("rows", rows, 1)):
            said = "rows must be integers" if name == "rows" else f"{name} must be an integer"
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"{said}, not {value!r}")
                if value < minimum:
                    raise ValueError(f"{name} must be at least {minimum}, not {value}")

    def chosen(self, num_rows: int) -> list[int]:
        """The rows to run, from 0, in order.

        Raises:
            JobError: the job has no such row.
        """
        if self.rows is None:
            size = _SAMPLE if self.sample is None else self.sample
            return sorted(random.Random(self.seed).sample(range(num_rows), min(size, num_rows)))
        if too_large := [number for number in self.rows if number > num_rows]:
            raise JobError(f"there is no row {too_large[0]:,}: the job has {num_rows:,} rows, numbered from 1")
        return sorted({number - 1 for number in self.rows})
