"""`LLM`: prompts in, completions out, in order."""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from tqdm.auto import tqdm

from nanovllm.checks import boolean, is_running, suggests_names
from nanovllm.config import MEANT_OPTIONS, Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.runner import Runner
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.outputs import CompletionOutput, FinishReason, RequestOutput, describe_errors
from nanovllm.process import COLLECTOR, FORKS
from nanovllm.prompts import Row, as_conversation_list, as_prompt_list
from nanovllm.recommended_sampling import recommended_sampling
from nanovllm.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams, one_per_prompt
from nanovllm.text import Text

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@suggests_names("option", MEANT_OPTIONS)
class LLM:
    """A model, ready to complete prompts.

    Args:
        model: a directory in the Hugging Face layout, or a hub name such as "Qwen/Qwen3-0.6B".
        revision, dtype, …: the options; `nanovllm.Config` describes each.

    Raises:
        TypeError, ValueError: an option or a model that cannot work; the message names the fix.
        RuntimeError: too little memory, or no such device.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        dtype: "str | torch.dtype" = "auto",
        device: "str | torch.device" = "auto",
        attention_backend: str = "auto",
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 16384,
        max_num_seqs: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kvcache_block_size: int | None = None,
        num_kvcache_blocks: int | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        overlap: bool = True,
        enable_prefix_caching: bool = True,
        prefix_grouping: bool = True,
        deterministic: bool = False,
        seed: int = 0,
    ):
        # All options by name; a test checks that they are Config's.
        config = Config(**{name: value for name, value in locals().items() if name != "self"})
        # Imported here because they import torch: a wrong option fails without loading it.
        from nanovllm.cpu_threads import CpuThreads
        from nanovllm.models.config import load_model_config
        from nanovllm.models.loader import find_model

        if config.tensor_parallel_size == 1:
            FORKS.check()
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        # transformers reads the same file for the tokenizer; a mistake in it should be named by us.
        load_model_config(directory)
        if config.tokenizer is None:
            self._text = Text.of_model(directory)
        else:
            self._text = Text.of_model(find_model(config.tokenizer, None, with_weights=False, option="tokenizer"))
            if self._text.tokenizer is None:
                raise ValueError(f"tokenizer={config.tokenizer!r} holds no tokenizer")
        threads = CpuThreads()  # measures the machine's load while the model is loaded
        config = replace(config, model=str(directory))
        self.engine = LLMEngine(config, make_runner(config), self._text.eos_token_ids)
        # Several ranks compute in processes of their own.
        FORKS.has_computed |= config.tensor_parallel_size == 1
        computes_here = self.engine.info.device == "cpu" and config.tensor_parallel_size == 1
        self._cpu_threads = threads if computes_here else CpuThreads(is_used=False)
        self._has_warned_of_recommendations = False
        # Reentrant: Ctrl-C between taking it and the `try` that gives it back must not lock its own thread out.
        self._lock = threading.RLock()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        split_special_tokens: bool = False,
        use_tqdm: bool = True,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Completes every prompt; the results are in the prompts' order. Error rows are also logged, once per call.

        Args:
            prompts: one or many, each a string, a list of token ids, or a dict {"prompt": string} or
                {"prompt_token_ids": list}.
            sampling_params: one for all, one per prompt, or None for what the model recommends.
            split_special_tokens: treat special tokens in the prompts' text, such as "<|im_end|>", as ordinary text.
            use_tqdm: show a progress bar.
            raise_on_error: raise for a prompt that cannot run, instead of returning it as an error row.

        Raises:
            TypeError, ValueError: arguments of the wrong type, or not as many sampling_params as prompts.
            RuntimeError: the engine is closed, or busy with another call; or this process is a fork of the LLM's.
        """
        prompts = as_prompt_list(prompts)
        params = self._params_for(sampling_params, len(prompts))
        rows = self._text.encode(prompts, splits_special=boolean("split_special_tokens", split_special_tokens))
        return self._run(rows, params, use_tqdm, raise_on_error)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        split_special_tokens: bool = False,
        use_tqdm: bool = True,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Answers every conversation, through the tokenizer's chat template.

        Args:
            conversations: one or many, each a list of messages {"role": …, "content": …}.
            add_generation_prompt: end with the header of the assistant's turn.
            chat_template_kwargs: for the template, such as {"enable_thinking": False}.
            split_special_tokens: treat special tokens in the messages' text as ordinary text, except the template's.
            sampling_params, use_tqdm, raise_on_error: as in `generate`, which also lists the errors.
        """
        conversations = as_conversation_list(conversations)
        params = self._params_for(sampling_params, len(conversations))
        splits_special = boolean("split_special_tokens", split_special_tokens)
        rows = self._text.encode_conversations(
            conversations, add_generation_prompt, chat_template_kwargs, splits_special
        )
        return self._run(rows, params, use_tqdm, raise_on_error)

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer: that of the option `tokenizer`, else the model's own; None if it has none."""
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config recommends: the sampling of `sampling_params=None`.

        Settings that change sampling and that we cannot follow are named in a warning, once per LLM.

        Raises:
            ValueError: a recommended value is out of range.
        """
        values, others = recommended_sampling(self.engine.info.generation_config)
        if others and not self._has_warned_of_recommendations:
            self._has_warned_of_recommendations = True
            settings = ", ".join(f"{name}={value!r}" for name, value in others.items())
            logger.warning("generation_config.json asks for sampling that is not available: %s", settings)
        try:
            if "min_tokens" in values:
                values.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, values["min_tokens"]))
            return SamplingParams(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation_config.json: {error}; give sampling_params of your own") from None

    def metrics(self) -> dict[str, Any]:
        """Counters since start: tokens, prefix cache hits, preemptions, batch sizes, memory, time by phase."""
        return self.engine.metrics()

    def close(self) -> None:
        """Frees the model's memory; the LLM cannot be used afterwards. Calling it again does nothing.

        Raises:
            RuntimeError: a call is still running: in another thread, or interrupted by the signal handler at work.
        """
        with self._locked():
            self.engine.exit()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM cannot be pickled or copied; make one in each process from the same options")

    # Running rows

    def _params_for(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        self.engine.check_alive()  # before any work
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return one_per_prompt(sampling_params, num_prompts)

    def _run(
        self, rows: list[Row], params: list[SamplingParams], use_tqdm: bool, raise_on_error: bool
    ) -> list[RequestOutput]:
        with self._locked():
            if not self.engine.is_finished():
                raise RuntimeError("the engine has requests that were added by hand; finish or abort them first")
            outputs: dict[int, RequestOutput] = {}
            try:
                with COLLECTOR.eased(self):
                    self._run_locked(rows, params, use_tqdm, raise_on_error, outputs)
            except BaseException:
                self.engine.reset()
                raise
            finally:
                if errors := describe_errors(outputs, len(rows)):
                    logger.warning(errors)
            return [outputs[index] for index in range(len(rows))]

    def _run_locked(
        self,
        rows: list[Row],
        params: list[SamplingParams],
        use_tqdm: bool,
        raise_on_error: bool,
        outputs: dict[int, RequestOutput],
    ) -> None:
        """Puts the output of every row into `outputs`, those of the rows that cannot run first."""
        index_of = self._add_requests(rows, params, raise_on_error, outputs)
        finished: dict[int, EngineSequence] = {}
        with _Progress(self.engine, len(rows), use_tqdm) as progress, self._cpu_threads as threads:
            progress.add_finished(len(outputs), num_errors=len(outputs))
            while not self.engine.is_finished():
                threads.adapt()
                sequences = self.engine.step()
                finished.update((index_of[seq.seq_id], seq) for seq in sequences)
                progress.add_finished(len(sequences), sum(seq.finish_reason == "error" for seq in sequences))
        texts = self._text.complete([(seq.completion_token_ids, seq.sampling_params) for seq in finished.values()])
        for (index, seq), (text, stop) in zip(finished.items(), texts, strict=True):
            reason = cast(FinishReason, seq.finish_reason)
            completion = CompletionOutput(0, text, seq.completion_token_ids, reason, self._stop_reason(seq, stop))
            outputs[index] = _output(index, rows[index], completion, seq.num_cached_tokens, seq.error)

    def _stop_reason(self, seq: EngineSequence, stop: str | None) -> int | str | None:
        """See CompletionOutput; `stop` is the stop string in the text."""
        if seq.finish_reason != "stop":
            return None
        last, params = seq.token_ids[-1], seq.sampling_params
        if last not in seq.stop_token_ids:
            return stop
        is_models_own = last in self.engine.eos_token_ids and not params.ignore_eos
        return None if is_models_own else last

    @contextmanager
    def _locked(self):
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this LLM is busy with another call; call it from one thread at a time")
        try:
            # The lock does not refuse its own thread: a signal handler's call, or a stop predicate's.
            if is_running(self, LLM._run_locked):
                raise RuntimeError("this LLM is in the middle of a call, so a signal handler cannot call or close it")
            yield
        finally:
            self._lock.release()

    def _add_requests(
        self, rows: list[Row], params: list[SamplingParams], raise_on_error: bool, outputs: dict[int, RequestOutput]
    ) -> dict[int, int]:
        """Adds every row's request and returns request id -> row; a row that cannot run gets its output."""
        index_of: dict[int, int] = {}
        for index, (row, row_params) in enumerate(zip(rows, params, strict=True)):
            error, predicate = row.error, None
            try:
                predicate = self._text.stop_strings(row_params)
                if row_params.bad_words:
                    row_params = replace(row_params, bad_words=self._text.bad_words_as_ids(row_params.bad_words))
            except ValueError as problem:
                error = error or problem
            try:
                # A row that cannot run goes to the engine as an empty prompt, so that it uses up its number too.
                token_ids = row.token_ids if error is None else []
                index_of[self.engine.add_request(token_ids, row_params, predicate)] = index
            except ValueError as problem:
                reason = str(error or problem)
                if raise_on_error:
                    raise ValueError(f"prompt {index}: {reason}") from None
                outputs[index] = _output(index, row, CompletionOutput(0, "", [], "error"), 0, reason)
        return index_of


def _output(
    index: int, row: Row, completion: CompletionOutput, num_cached_tokens: int, error: str | None
) -> RequestOutput:
    return RequestOutput(str(index), row.text, row.token_ids, [completion], num_cached_tokens, error)


def make_runner(config: Config) -> Runner:
    """The runner of an LLMEngine with these options: on one device, or on several.

    Raises:
        ValueError, RuntimeError: from loading the model or sizing the cache.
    """
    # Imported here because each imports torch: a wrong option fails without loading it.
    if config.tensor_parallel_size > 1:
        from nanovllm.parallel.parallel_runner import TensorParallelRunner

        return TensorParallelRunner(config)
    from nanovllm.runner.model_runner import ModelRunner

    return ModelRunner(config)


class _Progress(tqdm):
    """The progress bar: the tokens of each phase per second of the run so far, and the rows that failed."""

    def __init__(self, engine: LLMEngine, num_requests: int, is_shown: bool):
        self._stats, self._at_start, self._began = engine.step_stats, replace(engine.step_stats), time.perf_counter()
        self._num_errors = 0
        super().__init__(total=num_requests, desc="Completions", unit="prompt", disable=not is_shown)

    def add_finished(self, num_finished: int, num_errors: int = 0) -> None:
        if self.disable:
            return
        seconds = time.perf_counter() - self._began
        self._num_errors += num_errors
        speeds = [
            f"{phase} {(getattr(self._stats, name) - getattr(self._at_start, name)) / seconds:,.0f} tok/s"
            for phase, name in (("prefill", "num_prefill_tokens"), ("decode", "num_decode_tokens"))
        ]
        errors = [f"errors: {self._num_errors}"] if self._num_errors else []
        self.set_postfix_str(", ".join(speeds + errors), refresh=False)
        self.update(num_finished)
