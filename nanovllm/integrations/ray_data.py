"""nanovllm in Ray Data, for jobs over many machines. Written against Ray 2.60.

    dataset = ray.data.read_parquet(…)
    rows = Rows(prompt="question", sampling_params={"max_tokens": 512}, id="id", seed=0)
    generate(dataset, "Qwen/Qwen3-0.6B", rows, concurrency=8).write_parquet(…)

Ray reads, distributes, retries and writes. Each of its actors holds an LLM. An actor computes many of Ray's batches at
a time: while a batch waits for its last row, rows of the others fill the engine's steps.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from nanovllm import (
    LLM,
    NOT_YET,
    CompletionOutput,
    Config,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
)
from nanovllm.pooling_outputs import PooledOutput
from nanovllm.sampling_params import row_seed

_OF_COMPLETION = {"text": pa.string(), "token_ids": pa.list_(pa.int32()), "finish_reason": pa.string()}
# The results that a column can hold, with their types, which must be the same in all of Ray's blocks.
_RESULTS = {
    **_OF_COMPLETION,
    "num_prompt_tokens": pa.int64(),
    "error": pa.string(),
    "outputs": pa.list_(pa.struct(list(_OF_COMPLETION.items()))),
    "embeddings": pa.list_(pa.float32()),
    "label": pa.string(),
    "probs": pa.list_(pa.float32()),
    "score": pa.float64(),
}
_USUAL = {
    "generate": ("text", "finish_reason"), "embed": ("embeddings",), "classify": ("label", "probs"),
    "label": ("label", "probs"), "reward": ("score",), "score": ("score",),
}  # fmt: skip
_OF_ALL = ("num_prompt_tokens", "error")
# The results of rows that generate, and of those that do not.
_GENERATED, _POOLED = {*_OF_COMPLETION, "outputs", *_OF_ALL}, {"embeddings", "label", "probs", "score", *_OF_ALL}
_Params = SamplingParams | PoolingParams
_Output = RequestOutput | PoolingRequestOutput


@dataclass(frozen=True)
class Rows:
    """The columns of a dataset that are read, and those that are added. All columns of a row are kept.

    Args:
        prompt: the column of prompts: strings, or lists of token ids.
        messages: instead of `prompt`, the column of conversations, for the chat template: lists of messages, or JSON.
        task_type: "generate", or the task of PoolingParams that each row computes in one forward pass: "embed",
            "classify", "reward", "score" or "label".
        document: for "score", the column of documents. `prompt` is then that of queries.
        sampling_params: for all rows; None is the model's recommendation. A dict holds SamplingParams' arguments.
        pooling_params: the same for other tasks than "generate", with PoolingParams' arguments.
        sampling_column: the column of arguments that differ by row, of SamplingParams or PoolingParams: dicts, or JSON.
            An Arrow column gives all of its dicts the same keys, so in a dict None counts as absent; in JSON it counts
            as given.
        id: the column of rows' ids, for `seed`.
        seed: gives each row a seed of its own, `row_seed(seed, id)`, unless the sampling column gives one. Then it does
            not matter which actor runs the row, or how often.
        columns: {result: name of its column}; empty means the usual ones of the task. The results are those of
            RequestOutput: "text", "token_ids", "finish_reason", "num_prompt_tokens", "error", which is null for a row
            without an error, and "outputs", which has all completions of a row with `n` above 1. For other tasks than
            "generate" they are "embeddings", which is the `data` of a PoolingRequestOutput, "probs", "label", "score",
            "num_prompt_tokens" and "error". A result that the task does not have is null.
        chat_template_kwargs: for the template, such as {"enable_thinking": False}.

    Raises:
        TypeError, ValueError: options that do not fit together; or an argument that SamplingParams or PoolingParams
            refuses.
    """

    prompt: str | None = None
    messages: str | None = None
    task_type: str = "generate"
    document: str | None = None
    sampling_params: SamplingParams | Mapping[str, Any] | None = None
    pooling_params: PoolingParams | Mapping[str, Any] | None = None
    sampling_column: str | None = None
    id: str | None = None
    seed: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("name one column with the prompts: prompt=… or messages=…")
        if self.seed is not None and self.id is None:
            raise ValueError(f"seed={self.seed} gives each row a seed by its id; name the ids' column: id=…")
        if self.task_type not in _USUAL:
            raise ValueError(f"task_type must be one of {', '.join(_USUAL)}, not {self.task_type!r}")
        if (self.document is None) == (self.task_type == "score") or (self.document and self.messages):
            raise ValueError(
                'task_type="score" reads two columns, prompt=… and document=…; no other task has a document'
            )
        if not self.columns:
            usual = (*_USUAL[self.task_type], *_OF_ALL)
            object.__setattr__(self, "columns", dict(zip(usual, usual, strict=True)))
        results = [name for name in _RESULTS if name in (_GENERATED if self._generates else _POOLED)]
        if unknown := [name for name in self.columns if name not in results]:
            raise ValueError(f"columns names the result {unknown[0]!r}; the results are {', '.join(results)}")
        for name, kind, is_heeded in (
            ("sampling_params", SamplingParams, self._generates), ("pooling_params", PoolingParams, not self._generates)
        ):  # fmt: skip
            if isinstance(params := getattr(self, name), Mapping):
                object.__setattr__(self, name, kind(**params))
            if params is not None and not is_heeded:
                raise ValueError(f"task_type={self.task_type!r} does not read {name}; leave it out")
        if self.seed is not None and not self._generates:
            raise ValueError(f"task_type={self.task_type!r} samples nothing; leave out seed={self.seed}")

    @property
    def _generates(self) -> bool:
        return self.task_type == "generate"

    def default_params(self, llm: LLM) -> _Params:
        """The parameters of rows that give none; a TypeError or ValueError if the model cannot serve the task."""
        if self._generates:
            params = self.sampling_params
            return params if isinstance(params, SamplingParams) else llm.get_default_sampling_params()
        pooled = self.pooling_params if isinstance(self.pooling_params, PoolingParams) else PoolingParams()
        if self.task_type == "label":
            llm.label([], pooled.labels or ("yes", "no"), use_tqdm=False)
        else:
            llm.encode([], pooled, pooling_task=self.task_type, use_tqdm=False)
        return pooled

    def read(self, batch: pa.Table) -> Iterator[tuple[Any, Any, Any]]:
        """(prompt or conversation, its own parameters, id) of each row."""
        names = [self.prompt or self.messages, self.sampling_column, self.id, self.document]
        if missing := [name for name in names if name is not None and name not in batch.column_names]:
            raise ValueError(f"the dataset has no column {missing[0]!r}; it has {', '.join(batch.column_names)}")
        if taken := [name for name in self.columns.values() if name in batch.column_names]:
            raise ValueError(f"the dataset has a column {taken[0]!r}; give the result another name: columns={{…}}")
        none = [None] * len(batch)
        given = [none if name is None else batch[name].to_pylist() for name in names]
        prompts = given[0] if self.document is None else zip(given[0], given[3], strict=True)
        return zip(prompts, *given[1:3], strict=True)

    def params(self, default: _Params, differing: Any, row_id: Any) -> _Params:
        """A row's parameters; a TypeError or ValueError if the row is wrong."""
        changes = {} if differing is None else _from_json(differing)
        if not isinstance(changes, Mapping):
            raise TypeError(f"{self.sampling_column} must hold a dict of parameters, not {differing!r}")
        if not isinstance(differing, str):
            changes = {name: value for name, value in changes.items() if value is not None}
        if self.seed is not None and "seed" not in changes:
            if row_id is None:
                raise ValueError(f"{self.id} is null, and the row's seed comes from it")
            changes = {**changes, "seed": row_seed(self.seed, row_id)}
        if isinstance(default, PoolingParams):
            return replace(default, task=self.task_type, **changes)
        return replace(default, **changes) if changes else default

    def error_row(self, error: str) -> _Output:
        if self._generates:
            return RequestOutput("", None, [], [CompletionOutput(0, "", [], "error")], error=error)
        return PoolingRequestOutput("", None, [], PooledOutput(self.task_type), error=error)

    def add_results(self, batch: pa.Table, outputs: list[_Output]) -> pa.Table:
        for result, name in self.columns.items():
            values = [getattr(output, "data" if result == "embeddings" else result) for output in outputs]
            if result == "label":  # it may be token ids
                values = [None if value is None else str(value) for value in values]
            if result == "outputs":
                values = [[{key: getattr(each, key) for key in _OF_COMPLETION} for each in row] for row in values]
            batch = batch.append_column(name, pa.array(values, _RESULTS[result]))
        return batch


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{value[:100]!r} is not JSON: {error}") from None


class LLMActor:
    """A class for `Dataset.map_batches`, which calls it in several threads with Arrow tables; see `generate`.

    One thread owns the LLM. Each call adds its rows to those that the LLM runs, and waits for them.

    Args:
        model, options: LLM's.
        rows: the columns to read and to add.

    Raises:
        TypeError, ValueError, RuntimeError: as LLM; the model has no chat template for `messages`; a batch lacks a
            column. An exception of the LLM while it runs is raised by all calls that wait.
    """

    def __init__(self, model: str, rows: Rows, options: Mapping[str, Any] | None = None):
        self._rows, self._inbox, ready = rows, SimpleQueue[Any](), Future[LLM]()
        Thread(target=_serve, args=(model, options or {}, self._inbox, ready), daemon=True).start()
        llm = ready.result()
        self._default = rows.default_params(llm)
        if rows.messages and getattr(llm.get_tokenizer(), "chat_template", None) is None:
            raise ValueError(f"{model} has no chat template for messages={rows.messages!r}; use prompt=…")

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = [(Future[_Output](), *row) for row in self._rows.read(table)]
        self._inbox.put([request for row in rows if (request := self._request(*row)) is not None])
        return self._rows.add_results(table, [future.result() for future, *_ in rows])

    def __del__(self):
        self._inbox.put(None)

    def _request(self, future: "Future[_Output]", prompt: Any, differing: Any, row_id: Any) -> "_Request | None":
        """The LLM's request for a row; None if the row is wrong, and then the future has its error row."""
        try:
            params = self._rows.params(self._default, differing, row_id)
            return future, self._prompt_of(prompt), params
        except Exception as error:  # a row may hold anything, and its error must not end the job
            future.set_result(self._rows.error_row(str(error)))
            return None

    def _prompt_of(self, given: Any) -> Any:
        """The prompt in the form that LLM.generate_iter takes."""
        if self._rows.messages is None:
            return given
        messages = _from_json(given)
        if isinstance(messages, list):
            # Arrow gives all messages the same keys, and a template may ask whether a message has one.
            messages = [
                {key: value for key, value in message.items() if value is not None or key == "content"}
                if isinstance(message, dict)
                else message
                for message in messages
            ]
        return {"messages": messages, "chat_template_kwargs": dict(self._rows.chat_template_kwargs)}


# (the future of its output, its prompt, its parameters)
_Request = tuple[Future[_Output], Any, _Params]


def _serve(model: str, options: Mapping[str, Any], inbox: SimpleQueue[Any], ready: Future[LLM]) -> None:
    """Runs in the thread that owns the LLM. The inbox holds lists of requests, and None at the end."""
    try:
        llm = LLM(model, **options)
    except BaseException as error:
        ready.set_exception(error)
        return
    ready.set_result(llm)
    with llm:
        while (requests := inbox.get()) is not None:  # nothing runs while it waits here
            _run(llm, deque(requests), inbox)


def _run(llm: LLM, waiting: deque[_Request], inbox: SimpleQueue[Any]) -> None:
    """Runs the waiting requests, and those that come until all have finished. In any case every future gets a result or
    an exception."""
    running: dict[int, Future[_Output]] = {}  # by prompt_index
    params: deque[_Params] = deque()  # of the prompts that were given

    def prompts() -> Iterator[Any]:
        numbers = count()
        while True:
            while not inbox.empty():
                requests = inbox.get()
                if requests is None:  # no call waits for results any more
                    inbox.put(None)
                    return
                waiting.extend(requests)
            if waiting:
                running[next(numbers)], prompt, of_prompt = waiting.popleft()
                params.append(of_prompt)
                yield prompt
            elif running:
                yield NOT_YET
            else:
                return

    try:
        for output in llm.generate_iter(prompts(), (params.popleft() for _ in count()), ordered=False):
            running.pop(output.prompt_index).set_result(output)
    except BaseException as error:
        for future in (*running.values(), *(future for future, *_ in waiting)):
            future.set_exception(error)


def generate(
    dataset: Dataset,
    model: str,
    rows: Rows,
    *,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 128,
    batches_in_flight: int = 32,
    options: Mapping[str, Any] | None = None,
    num_gpus: float | None = None,
    **ray_remote_args: Any,
) -> Dataset:
    """The dataset with the model's completions, or the results of another task, computed when it is consumed; the rows'
    order may change.

    An actor has up to `batch_size * batches_in_flight` rows. Its steps stay full if these are several times
    `max_num_seqs`: as many times as the longest completion is longer than the mean one. Rows that an actor has not
    returned when it dies are computed again.

    Args:
        model: a directory that all machines can read, or a hub name.
        rows: the columns to read and to add.
        concurrency: number of actors, each with an LLM; or (minimum, maximum).
        batch_size: maximum number of rows per batch, which is one task and one block of Ray's.
        batches_in_flight: maximum number of batches that an actor has at a time.
        options: LLM's options, such as {"max_model_len": 4096}.
        num_gpus: GPUs per actor; None is the option `tensor_parallel_size`, or 0 with the option device="cpu".
        ray_remote_args: arguments for the actors, as in map_batches, such as `num_cpus`, which is 1 for an actor on
            CPUs. Reading and writing need CPUs that no actor occupies.

    Raises:
        TypeError, ValueError: an option of LLM that cannot work, or something other than Rows.
    """
    if not isinstance(rows, Rows):
        raise TypeError(f'rows must say what to read, as Rows(prompt="prompt") does, not {rows!r:.100}')
    config = Config(model, **(options or {}))  # refuses a wrong option before any actor starts
    if num_gpus is None:
        num_gpus = 0 if config.device == "cpu" else config.tensor_parallel_size
    min_size, max_size = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    compute = ActorPoolStrategy(
        min_size=min_size,
        max_size=max_size,
        # A task that waits for one actor cannot move to another. Ray adds actors only if more tasks wait than the
        # actors have calls.
        max_tasks_in_flight_per_actor=batches_in_flight if min_size == max_size else None,
        max_concurrent_calls_per_actor=batches_in_flight,
        enable_true_multi_threading=True,
    )
    # Ray gives an actor the batches of one block one by one, but several blocks at a time. So each batch is a block.
    return dataset.repartition(target_num_rows_per_block=batch_size).map_batches(
        LLMActor,
        fn_constructor_args=(model, rows, options),
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=compute,
        num_gpus=num_gpus,
        **ray_remote_args,
    )
