"""`LLM`: prompts in, completions out, in order. The only place that knows text."""

import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Number
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
# What a row became before anything runs: token ids, or why it cannot run.
Row = list[int] | ValueError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class LLM:
    """A model, ready to complete prompts.

    Args:
        model: a directory in the Hugging Face layout, or a hub name such as "Qwen/Qwen3-0.6B".
        options: the fields of Config, such as `max_model_len=4096`.

    Raises:
        TypeError, ValueError: an option or a model that cannot work; the message names the fix.
        RuntimeError: too little memory, or no such device.
    """

    def __init__(self, model: str, **options):
        config = Config.from_options(model, **options)
        # These import torch; wrong options fail without it.
        from nanovllm.models import ARCHITECTURES
        from nanovllm.models.config import load_model_config
        from nanovllm.utils.loader import find_model

        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        # transformers reads the same file for the tokenizer; a mistake in it should be named by us.
        load_model_config(directory, list(ARCHITECTURES))
        self._tokenizer = _load_tokenizer(directory)
        eos_token_id = getattr(self._tokenizer, "eos_token_id", None)
        self.engine = LLMEngine(replace(config, model=str(directory)), () if eos_token_id is None else (eos_token_id,))
        # Reentrant: Ctrl-C between taking it and the `try` that gives it back must not lock its own thread out.
        self._lock = threading.RLock()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Completes every prompt; the results are in the prompts' order.

        Args:
            prompts: one or many, each a string or a list of token ids.
            sampling_params: one for all, one a prompt, or None for what the model recommends.
            use_tqdm: show a progress bar.
            raise_on_error: raise for a prompt that cannot run, instead of returning it as an error row.

        Raises:
            TypeError, ValueError: arguments of the wrong type, or another number of sampling_params than prompts.
            RuntimeError: the engine is closed, or busy with another call.
        """
        prompts = _as_prompt_list(prompts)
        params = self._params_for(sampling_params, len(prompts))
        return self._run(self._tokenize(prompts), params, use_tqdm, raise_on_error)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Answers every conversation, through the tokenizer's chat template.

        Args:
            conversations: one or many, each a list of messages {"role": …, "content": …}.
            add_generation_prompt: end with the header of the assistant's turn.
            chat_template_kwargs: for the template, such as {"enable_thinking": False}.
            sampling_params, use_tqdm, raise_on_error: as in `generate`, which also lists the errors.
        """
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise ValueError("the model's tokenizer has no chat template; use generate with a prompt of your own")
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise TypeError(f"chat_template_kwargs must be a dict, not {chat_template_kwargs!r}")
        taken = {"conversation", "tokenize", "add_generation_prompt"} & set(chat_template_kwargs or ())
        if taken:
            raise TypeError(f"chat_template_kwargs must not hold {', '.join(sorted(taken))}; chat sets that itself")
        conversations = _as_conversation_list(conversations)
        params = self._params_for(sampling_params, len(conversations))
        options = {**(chat_template_kwargs or {}), "tokenize": False, "add_generation_prompt": add_generation_prompt}
        texts: list[str | ValueError] = []
        for messages in conversations:
            try:
                _check_messages(messages)
                text = self._tokenizer.apply_chat_template(messages, **options)
            except Exception as error:  # templates raise what they like
                text = ValueError(f"the chat template cannot render the conversation: {error}")
            texts.append(text)
        # The template writes its special tokens itself.
        return self._run(self._tokenize(texts, add_special_tokens=False), params, use_tqdm, raise_on_error)

    def get_tokenizer(self):
        """The model's transformers tokenizer, or None if its directory has none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config recommends: the sampling of `sampling_params=None`."""
        recommended = self.engine.info.generation_config
        names = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        names["max_new_tokens"] = "max_tokens"
        values = {names[key]: value for key, value in recommended.items() if key in names and value is not None}
        if values.get("top_k") == -1:  # another way to write "off"
            values["top_k"] = 0
        if recommended.get("do_sample") is False:
            values = {"temperature": 0.0, **{key: values[key] for key in values if key == "max_tokens"}}
        try:
            return SamplingParams(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation_config.json: {error}; give sampling_params of your own") from None

    def metrics(self) -> dict[str, Any]:
        """Counters since start: tokens, prefix cache hits, preemptions, batch sizes, memory, time by phase."""
        return self.engine.metrics()

    def close(self) -> None:
        """Frees the model's memory; the LLM cannot be used afterwards. Calling it again does nothing.

        Raises:
            RuntimeError: another thread's call is not at its end.
        """
        with self._locked():
            self.engine.exit()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # From prompts to rows

    def _params_for(self, sampling_params, num_prompts: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * num_prompts
        if not isinstance(sampling_params, (list, tuple)) or not all(
            isinstance(params, SamplingParams) for params in sampling_params
        ):
            raise TypeError(f"sampling_params must be a SamplingParams or a list of them, not {sampling_params!r}")
        if len(sampling_params) != num_prompts:
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {num_prompts} prompts; give one for all, or one a prompt"
            )
        return list(sampling_params)

    def _tokenize(self, prompts: list[Any], add_special_tokens: bool = True) -> list[Row]:
        """Token ids of every prompt; a ValueError stays one, and so becomes whatever cannot be a prompt."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._encode(texts, add_special_tokens) if texts else ())
        return [next(encoded) if isinstance(prompt, str) else _as_token_ids(prompt) for prompt in prompts]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[Row]:
        if self._tokenizer is None:
            error = ValueError("the model has no tokenizer; give the prompt as token ids")
            return [error] * len(texts)
        options = {"add_special_tokens": add_special_tokens, "return_attention_mask": False, "verbose": False}
        try:
            return self._tokenizer(texts, **options)["input_ids"]
        except (UnicodeError, TypeError, ValueError) as error:
            if len(texts) == 1:
                return [ValueError(f"the prompt cannot be tokenized: {_why_no_text(texts[0]) or error}")]
            return [self._encode([text], add_special_tokens)[0] for text in texts]

    # Running them

    def _run(
        self, rows: list[Row], params: list[SamplingParams], use_tqdm: bool, raise_on_error: bool
    ) -> list[RequestOutput]:
        with self._locked():
            if not self.engine.is_finished():
                raise RuntimeError("the engine has requests that were added by hand; finish or abort them first")
            try:
                index_of, outputs = self._add_requests(rows, params, raise_on_error)
                finished: dict[int, EngineSequence] = {}
                with _Progress(self.engine, len(rows), use_tqdm) as progress:
                    progress.add_finished(len(outputs))
                    while not self.engine.is_finished():
                        sequences = self.engine.step()
                        for seq in sequences:
                            finished[index_of[seq.seq_id]] = seq
                        progress.add_finished(len(sequences))
            except BaseException:
                self.engine.reset()
                raise
            outputs.update(self._outputs(finished))
            return [outputs[index] for index in range(len(rows))]

    @contextmanager
    def _locked(self):
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this LLM is busy with another call; call it from one thread at a time")
        try:
            yield
        finally:
            self._lock.release()

    def _add_requests(
        self, rows: list[Row], params: list[SamplingParams], raise_on_error: bool
    ) -> tuple[dict[int, int], dict[int, RequestOutput]]:
        """(request id -> row, row -> output of the rows that cannot run)"""
        index_of: dict[int, int] = {}
        outputs: dict[int, RequestOutput] = {}
        for index, (row, row_params) in enumerate(zip(rows, params, strict=True)):
            num_tokens = 0 if isinstance(row, ValueError) else len(row)
            predicate = None
            if row_params.stop and self._tokenizer is None:
                row = ValueError("the model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
            elif row_params.stop:
                predicate = _StopStrings(self._tokenizer, row_params)
            try:
                # A row that cannot run goes to the engine as an empty prompt, so that it uses up its number too.
                token_ids = [] if isinstance(row, ValueError) else row
                index_of[self.engine.add_request(token_ids, row_params, predicate)] = index
            except ValueError as error:
                reason = str(row if isinstance(row, ValueError) else error)
                if raise_on_error:
                    raise ValueError(f"prompt {index}: {reason}") from None
                outputs[index] = RequestOutput("", [], "error", num_tokens, 0, reason)
        return index_of, outputs

    def _outputs(self, finished: dict[int, EngineSequence]) -> dict[int, RequestOutput]:
        texts: dict[int, str] = {}
        for skips in (True, False) if self._tokenizer is not None else ():
            indices = [i for i, seq in finished.items() if seq.sampling_params.skip_special_tokens is skips]
            if indices:
                completions = [finished[i].completion_token_ids for i in indices]
                texts.update(zip(indices, _decode(self._tokenizer, completions, skips), strict=True))
        return {
            index: RequestOutput(
                text=self._cut(texts.get(index, ""), seq),
                token_ids=seq.completion_token_ids,
                finish_reason=seq.finish_reason,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_cached_tokens=seq.num_cached_tokens,
                error=seq.error,
            )
            for index, seq in finished.items()
        }

    def _cut(self, text: str, seq: EngineSequence) -> str:
        """The text before the first stop string that could count."""
        params = seq.sampling_params
        if not params.stop:
            return text
        before = seq.completion_token_ids[: params.min_tokens]
        start = len(_decode(self._tokenizer, [before], params.skip_special_tokens)[0]) if before else 0
        ends = [end for end in (text.find(stop, start) for stop in params.stop) if end >= 0]
        return text[: min(ends)] if ends else text


class _StopStrings:
    """Says after each token whether the text since `min_tokens` holds a stop string.

    Every token adds at least a byte to the text, so a string that the newest token completes lies within as
    many tokens as it has bytes; four more make the first character of that window whole.
    """

    def __init__(self, tokenizer, params: SamplingParams):
        self._tokenizer = tokenizer
        self._params = params
        self._skipped = frozenset(tokenizer.all_special_ids) if params.skip_special_tokens else frozenset()
        self._window_size = max(len(stop.encode()) for stop in params.stop) + 4
        self._window: list[int] = []
        self._num_tokens = 0

    def __call__(self, token_id: int) -> bool:
        self._num_tokens += 1
        if self._num_tokens <= self._params.min_tokens or token_id in self._skipped:
            return False
        self._window = [*self._window[1 - self._window_size :], token_id]
        text = _decode(self._tokenizer, [self._window], self._params.skip_special_tokens)[0]
        return any(stop in text for stop in self._params.stop)


class _Progress(tqdm):
    """The progress bar, with prefill and decode speed averaged over the run so far."""

    def __init__(self, engine: LLMEngine, num_requests: int, is_shown: bool):
        self._stats, self._at_start = engine.step_stats, replace(engine.step_stats)
        super().__init__(total=num_requests, desc="Completions", unit="prompt", disable=not is_shown)

    def add_finished(self, num_finished: int) -> None:
        if not self.disable:
            speeds = ", ".join(f"{phase} {self._speed(phase):,.0f} tok/s" for phase in ("prefill", "decode"))
            self.set_postfix_str(speeds, refresh=False)
            self.update(num_finished)

    def _speed(self, phase: str) -> float:
        names = f"num_{phase}_tokens", f"{phase}_seconds"
        num_tokens, seconds = (getattr(self._stats, name) - getattr(self._at_start, name) for name in names)
        return num_tokens / max(seconds, 1e-9)


def _load_tokenizer(directory: Path):
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to import

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes transformers raise
        raise ValueError(f"the tokenizer in {directory} cannot be loaded: {error}") from error


def _why_no_text(text: str) -> str | None:
    """What is wrong with a string that has no UTF-8 form; the tokenizer would only speak of its own types."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!r} at position {error.start} is half a surrogate pair, not a character"
    return None


def _decode(tokenizer, completions: list[list[int]], skip_special_tokens: bool) -> list[str]:
    return tokenizer.batch_decode(
        completions, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def _as_prompt_list(prompts: Any) -> list[Any]:
    if hasattr(prompts, "tolist"):  # an array or tensor of token ids, or a column of strings
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (Mapping, Set, bytes, bytearray)):
        raise TypeError(f"prompts must be a string, a list of token ids, or a list of those, not {prompts!r}")
    prompts = list(prompts)
    if prompts and all(_is_token_id(prompt) for prompt in prompts):
        return [prompts]
    if prompts and all(isinstance(prompt, Number) for prompt in prompts):
        raise TypeError(f"a prompt of token ids must hold integers only, not {prompts[:8]!r}")
    return prompts


def _as_token_ids(prompt: Any) -> Row:
    if isinstance(prompt, ValueError):
        return prompt
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, (list, tuple, range)):
        return ValueError(f"a prompt must be a string or a list of token ids, not {prompt!r}"[:200])
    if set(map(type, prompt)) == {int}:  # nearly always, and prompts can be long
        return list(prompt)
    bad = next((token_id for token_id in prompt if not _is_token_id(token_id)), None)
    if bad is not None or None in prompt:
        return ValueError(f"token ids must be integers, not {bad!r}"[:200])
    return [int(token_id) for token_id in prompt]


def _is_token_id(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _as_conversation_list(conversations: Any) -> list[Any]:
    if not isinstance(conversations, (list, tuple)):
        raise TypeError(
            f"conversations must be a list of messages or a list of such lists, not {type(conversations).__name__}"
        )
    if conversations and all(isinstance(message, Mapping) for message in conversations):
        return [conversations]
    return list(conversations)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError("a conversation must be a list of at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'a message must be a dict with "role" and "content", not {message!r}')
