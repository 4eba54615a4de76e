"""`LLM`: prompts in, completions out, in order."""

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.accepted import (
    ACCEPTED_ARGUMENTS,
    ACCEPTED_BY_RESET,
    ACCEPTED_OPTIONS,
    RENAMED_ARGUMENTS,
    RENAMED_OPTIONS,
    missing_attribute,
)
from nanovllm.checks import boolean, suggests_names, takes_keywords
from nanovllm.config import MEANT_OPTIONS, Config, options_as_text
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.runner import Runner
from nanovllm.forks import FORKS
from nanovllm.garbage_collector import COLLECTOR
from nanovllm.guard import ExclusiveGuard
from nanovllm.guides import StructuredOutputs, check_installed
from nanovllm.loglikelihood import Loglikelihood
from nanovllm.lora import LoRARequest, OneOrManyAdapters, adapters_of_call, checked_adapter, one_per_row
from nanovllm.machine import device_kind
from nanovllm.models.directory import find_model
from nanovllm.models.pooling_config import PoolingConfig
from nanovllm.models.read_config import load_model_config
from nanovllm.models.weight_parts import whole_digest
from nanovllm.one_pass import OnePass
from nanovllm.outputs import RequestOutput, keep_outputs
from nanovllm.pooled_rows import PooledRows, PoolingFacts
from nanovllm.pooling_params import PoolingParams, RowParams
from nanovllm.progress import Progress
from nanovllm.prompts import EncodedPrompt, NotYet, as_conversation_list, as_pairs, as_prompt_list, key_of
from nanovllm.recommended_sampling import DefaultSampling
from nanovllm.row_stream import FIRST_PROMPTS_OF_POOLED, PROMPTS_OF_PIECE, Output, OutputIterator, RowStream
from nanovllm.sampling_params import AS_ARGUMENT, OneOrMany, SamplingParams, checked_params, one_per_prompt, with_params
from nanovllm.text import Text
from nanovllm.vllm_engine import engine_attributes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_takes_vllms_arguments = takes_keywords("argument", AS_ARGUMENT, ACCEPTED_ARGUMENTS, RENAMED_ARGUMENTS)
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@suggests_names("option", MEANT_OPTIONS, ACCEPTED_OPTIONS, RENAMED_OPTIONS)
class LLM(OnePass):
    """A model, ready to complete prompts.

    Args:
        {options}

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
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 16896,
        max_num_seqs: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kvcache_block_size: int | None = None,
        num_kvcache_blocks: int | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        overlap: bool = True,
        enable_prefix_caching: bool = True,
        prefix_grouping: bool = True,
        runner: str = "auto",
        pooler_config: Any = None,
        hf_overrides: Mapping[str, Any] | None = None,
        generation_config: str = "auto",
        queue_calls: bool = False,
        deterministic: bool = False,
        enable_lora: bool = False,
        max_loras: int = 8,
        max_lora_rank: int = 16,
        cache_canary: bool = False,
        seed: int = 0,
    ):
        # All options by name; a test checks that they are Config's.
        config = Config(**{name: value for name, value in locals().items() if name != "self"})
        from nanovllm.cpu_threads import CpuThreads  # imports torch: a wrong option fails without loading it

        if config.tensor_parallel_size == 1:
            FORKS.check()
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        # transformers reads the same file for the tokenizer, but our error for a mistake in it is clearer.
        self._model_config = load_model_config(directory)
        self._text = Text.of_options(directory, config.tokenizer)
        threads = CpuThreads()  # measures the machine's load while the model is loaded
        config = replace(config, model=str(directory))
        self.engine = LLMEngine(config, make_runner(config))
        self._use(self._text)
        # Several ranks compute in processes of their own.
        FORKS.has_computed |= config.tensor_parallel_size == 1
        computes_here = self.engine.info.device == "cpu" and config.tensor_parallel_size == 1
        self._cpu_threads = threads if computes_here else CpuThreads(is_used=False)
        self._default_sampling = DefaultSampling(self.engine.info.generation_config, config.generation_config)
        self._guard = ExclusiveGuard(
            "this LLM is in the middle of a call, so a signal handler or a source of prompts cannot call or close it",
            "this LLM is busy with another call; call it from one thread at a time, or make it with queue_calls=True",
            waits=config.queue_calls,
        )
        # The unfinished iterator and its stream. The reference is weak, because the user may drop the iterator.
        self._iterated: tuple[weakref.ref[OutputIterator], RowStream] | None = None

    @_takes_vllms_arguments
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: OneOrMany | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: OneOrManyAdapters = None,
        *,
        split_special_tokens: bool = False,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Completes all prompts; the results are in the prompts' order. Error rows are also logged, once per call.

        Args:
            prompts: one or many, each a string, a list of token ids, or a dict: {"prompt": string},
                {"prompt_token_ids": list}, or {"messages": conversation} with or without "chat_template_kwargs", which
                is answered as by `chat`. Without a chat template such a dict is an error row.
            sampling_params: one for all, one per prompt, or None for the model's recommendation. A dict of parameters
                may take the place of a SamplingParams. Without a `max_tokens` a completion has at most 64 tokens, and a
                warning says how many prompts this cut.
            use_tqdm: show a progress bar, which is a line per minute if stderr is no terminal. A callable with tqdm's
                arguments makes another bar.
            lora_request: the LoRA adapter of all prompts, or a list with one (or None) per prompt; see docs/lora.md. It
                needs LLM(enable_lora=True). If an adapter in a list cannot be used, its rows are error rows.
            split_special_tokens: treat special tokens in the prompts' text, such as "<|im_end|>", as ordinary text,
                except those that the chat template writes.
            raise_on_error: raise for a prompt that cannot run, instead of returning it as an error row.

        Raises:
            TypeError, ValueError: arguments of the wrong type, not as many sampling_params as prompts, or an adapter
                for all prompts that cannot be used.
            ImportError: structured outputs need llguidance, and it is not installed.
            RuntimeError: the engine is closed, or busy with another call; or this process is a fork of the LLM's
                process.
        """
        prompts = as_prompt_list(prompts)
        params = self._params_for(sampling_params, len(prompts))
        encode = partial(self._text.encode, splits_special=boolean("split_special_tokens", split_special_tokens))
        return self._run(prompts, params, encode, use_tqdm, raise_on_error, lora_request)

    @takes_keywords("argument", AS_ARGUMENT)
    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt | NotYet],
        sampling_params: OneOrMany | Iterable[RowParams] | None = None,
        *,
        lora_request: OneOrManyAdapters | Iterable[LoRARequest | None] = None,
        ordered: bool = True,
        split_special_tokens: bool = False,
    ) -> OutputIterator:
        """Completes prompts as their results are asked for, and reads the prompts as they are needed.

        An iterator of prompts may be endless. Memory stays flat: prompts are read at most a fixed number ahead of the
        oldest unfinished one. Until the iterator is exhausted, dropped or closed, the LLM refuses other calls. The
        iterator's `drain()` stops reading prompts and lets only the started requests finish. A prompt that cannot run
        is an error row; error rows are also logged at the end.

        Args:
            prompts: as in `generate`, or an iterator of such prompts. Running requests wait while it makes a prompt. An
                iterator that would have to wait for a prompt gives `nanovllm.NOT_YET` instead, and is asked again after
                the next step. If all of its prompts have finished, no step runs; then it should wait, or end.
            sampling_params: one for all, an iterable with one per prompt, or None for the model's recommendation. If an
                iterator gives them, a missing llguidance is the error of each row that needs it. A PoolingParams
                computes its task for the prompt, and the output is a PoolingRequestOutput.
            lora_request: as in `generate`, or an iterable with one (or None) per prompt.
            ordered: give the results in the prompts' order; False gives them as they finish, and `prompt_index` is
                the prompt's number.
            split_special_tokens: as in `generate`.

        Raises:
            TypeError, ValueError, ImportError, RuntimeError: as in `generate`. An error that shows up during the
                iteration, such as too few sampling_params, is raised there. The exception's `finished_outputs` holds
                the results that had finished and were not yet returned, by the prompt's number.
        """
        self.engine.check_alive()
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            self._check_generates()
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        sampling_params = checked_params(sampling_params, (PoolingParams,))
        check_installed(sampling_params if isinstance(sampling_params, list) else [sampling_params])
        is_ordered = boolean("ordered", ordered)
        encode = partial(self._text.encode, splits_special=boolean("split_special_tokens", split_special_tokens))
        if not isinstance(prompts, Iterator):
            prompts = as_prompt_list(prompts)
            if isinstance(sampling_params, list):
                sampling_params = one_per_prompt(sampling_params, len(prompts), (PoolingParams,))
            if isinstance(lora_request, list | tuple):
                lora_request, _ = adapters_of_call(lora_request, len(prompts))
        pooled = self._pooled.splitting_special() if split_special_tokens else None
        source = with_params(iter(prompts), sampling_params, (PoolingParams,))
        return self._iterate(source, is_ordered, encode, pooled=pooled, lora_request=lora_request)

    @_takes_vllms_arguments
    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: OneOrMany | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: OneOrManyAdapters = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        split_special_tokens: bool = False,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Answers every conversation, through the tokenizer's chat template.

        Args:
            conversations: one or many, each a list of messages {"role": …, "content": …}.
            chat_template: the Jinja template to use; None is the tokenizer's own.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end within the last message, so that the completion continues it. It needs
                add_generation_prompt=False.
            tools, documents: for the template, in the forms that transformers' apply_chat_template takes. If the
                template does not write them, that is the conversation's error.
            chat_template_kwargs: more for the template, such as {"enable_thinking": False}.
            split_special_tokens: treat special tokens in the messages' text as ordinary text, except the template's.
            sampling_params, use_tqdm, lora_request, raise_on_error: as in `generate`, which also lists the errors.
        """
        conversations = as_conversation_list(conversations)
        params = self._params_for(sampling_params, len(conversations))
        splits_special = boolean("split_special_tokens", split_special_tokens)
        options: dict[str, Any] = {"chat_template": chat_template, "tools": tools, "documents": documents}
        if boolean("continue_final_message", continue_final_message):
            options["continue_final_message"] = True
        encode = partial(
            self._text.encode_conversations,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=chat_template_kwargs,
            splits_special=splits_special,
            options={name: value for name, value in options.items() if value is not None},
        )
        encode([])  # raises an error that every conversation would have
        return self._run(conversations, params, encode, use_tqdm, raise_on_error, lora_request)

    def render(
        self,
        conversation: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of one conversation, for which `chat` computes an answer. `chat_template_kwargs` may hold `tools`,
        `documents` and `chat_template` too.

        Raises:
            TypeError, ValueError: the chat template cannot render it.
        """
        given: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            given["continue_final_message"] = True
        return self._text.render(conversation, chat_template_kwargs, given)

    def loglikelihood(
        self,
        contexts: Prompt | Iterable[Prompt],
        continuations: Prompt | Iterable[Prompt],
        *,
        use_tqdm: bool = True,
        lora_request: OneOrManyAdapters = None,
        raise_on_error: bool = False,
    ) -> list[Loglikelihood]:
        """Computes the log-probability of each continuation after its context, in order. Nothing is generated.

        Equal contexts are computed about once per `max_num_seqs` continuations if the KV cache has room, and each time
        without prefix caching. Contexts that begin alike share all blocks before the one in which they differ. Only the
        continuations are projected onto the vocabulary.

        Args:
            contexts: one or many, each a string or a list of token ids. With an empty string, the continuation begins
                the text. A conversation is an error row.
            continuations: one per context, each at least one token. A context that is given alone goes with all
                continuations, and vice versa. A context and a continuation that are both strings are tokenized as one
                text, by lm-evaluation-harness's rules; see Text.encode_pairs.
            use_tqdm, lora_request, raise_on_error: as in `generate`, which also lists the errors; a row is a pair.
        """
        pairs = as_pairs(contexts, continuations)
        params = self._params_for(SamplingParams(max_tokens=0, prompt_logprobs=1), len(pairs))
        # The scheduler shares a context with the pairs that come right after it.
        first: dict[Any, int] = {}
        places = [first.setdefault(key_of(context), place) for place, (context, _) in enumerate(pairs)]
        order = sorted(range(len(pairs)), key=places.__getitem__)
        pairs = [pairs[place] for place in order]
        if isinstance(lora_request, list | tuple):
            adapters = one_per_row(lora_request, len(pairs))
            lora_request = [adapters[place] for place in order]
        outputs = self._run(pairs, params, self._text.encode_pairs, use_tqdm, raise_on_error, lora_request, order)
        return list(map(Loglikelihood.of, outputs))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """Makes an LLM whose options are the attributes of `engine_args`, as in vLLM."""
        if not hasattr(engine_args, "__dict__"):
            raise TypeError(f"engine_args must be vLLM's EngineArgs, not {engine_args!r:.100}; LLM takes keywords")
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer: that of the option `tokenizer`, else the model's own; None if it has none."""
        return self._text.tokenizer

    @property
    def pooling_config(self) -> PoolingConfig | None:
        """How embeddings are made where a call does not say it, by `pooler_config` and the checkpoint's
        sentence-transformers files: pooling, prompts by name, length, dimensions and similarity. None without either,
        or if the files cannot be followed."""
        return self._pooled.facts.embedder

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replaces the tokenizer. Later calls use its texts, its chat template and its end-of-sequence id.

        Raises:
            TypeError: this is not one of transformers' tokenizers.
            RuntimeError: the LLM is closed or busy with another call.
        """
        if isinstance(tokenizer, type) or not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise TypeError(f"set_tokenizer takes one of transformers' tokenizers, not {tokenizer!r:.100}")
        self._alter(self._use, Text(tokenizer))

    def _use(self, text: Text) -> None:
        self._text, info = text.limited_to(self.engine.info.max_model_len), self.engine.info
        self._pooled = PooledRows(self._text, PoolingFacts.of(self._model_config, info, self.engine.config))
        self.engine.set_eos_token_ids(text.eos_token_ids)
        self._structured_outputs = StructuredOutputs(text.tokenizer, info.vocab_size, self.engine.eos_token_ids)

    @property
    def llm_engine(self) -> Any:
        """The attributes of vLLM's engine that scripts read, such as `llm.llm_engine.model_config.max_model_len`;
        docs/vllm.md lists them."""
        return engine_attributes(self)

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("nanovllm's LLM", name)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config recommends, which `sampling_params=None` uses.

        A warning names settings there that would change sampling and are not supported, once per LLM.

        Raises:
            ValueError: a recommended value is out of range.
        """
        return self._default_sampling.params()

    # Weights and memory

    @property
    def weight_version(self) -> int:
        """How many times `update_weights` has changed the weights. A RequestOutput has the version that computed it."""
        return self.engine.weight_version

    @property
    def is_sleeping(self) -> bool:
        """Whether the LLM sleeps; see `sleep`."""
        return self.engine.is_sleeping

    def update_weights(self, weights: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]") -> None:
        """Copies new values into the model, and empties the prefix cache.

        All tensors are checked before the first one is copied: if one is refused, the weights stay as they were.
        Tensors that are not given keep their values. An iterator is read to its end first, so all of its tensors are
        alive at once; if that is too much, call this several times with a part each. The tensors may be changed or
        freed once the call returns. The call does not wait for other CUDA streams than the current one of each device.

        Args:
            weights: tensors by their names in a Hugging Face checkpoint of the model, or (name, tensor) pairs. The
                names may have the prefix of a model that wraps this one. A tensor has the checkpoint's whole shape, for
                any `tensor_parallel_size`, a floating-point dtype of at least 16 bits, which is rounded to the model's,
                and may be on any device. A tied model takes the embedding, `lm_head.weight`, or both if they are equal.

        Raises:
            TypeError: something other than names and plain tensors.
            ValueError: a tensor that the model does not have, or of another shape or dtype; or a name given twice.
            RuntimeError: the LLM sleeps, is closed or is busy with another call; or the tensors cannot be sent to the
                ranks.
        """
        if not isinstance(weights, Iterable):
            raise TypeError(f"weights must be a dict or an iterable of (name, tensor) pairs, not {weights!r:.100}")
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        self._alter(self.engine.update_weights, pairs)

    def weights_digest(self, per_tensor: bool = False) -> str | dict[str, str]:
        """A hash of the weights that the model computes with. It is equal for equal weights: after loading and after
        `update_weights`, and for any `tensor_parallel_size`. docs/weights.md says what else must be equal.

        It reads the weights once, where they are, without a LoRA adapter. An iterator of `generate_iter` may be open,
        unless it computes with a merged adapter.

        Args:
            per_tensor: return a digest of each tensor, to find the one that differs.

        Returns:
            64 hex digits; with `per_tensor`, a dict of 16 hex digits by name, in the order of the names. The names are
            those of the checkpoint, without the prefix of a model that wraps this one, and each expert has its own.

        Raises:
            TypeError: `per_tensor` is not a bool.
            RuntimeError: the LLM sleeps, is closed or is busy with another call; some weights are undefined; or copies
                of one tensor differ, on two ranks or in one. The message names the tensors.
        """
        boolean("per_tensor", per_tensor)
        digests = self._weight_digests()
        return digests if per_tensor else whole_digest(digests)

    def _weight_digests(self) -> dict[str, str]:
        self.engine.check_alive()
        with self._cpu_threads:
            return self._guard.run(self._digest)

    def _digest(self) -> dict[str, str]:
        self.engine.check_awake()
        if self._iterated is None and self.engine.is_finished():
            self.engine.merge_adapter(None)
        return self.engine.weight_digests()

    @takes_keywords("argument", {}, ACCEPTED_BY_RESET)
    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, and returns True.

        Raises:
            RuntimeError: the LLM is closed or busy with another call.
        """
        self._alter(self.engine.reset_prefix_cache)
        return True

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache, the weights and the captured steps until `wake_up`.

        A sleeping LLM refuses to generate. It can be put to sleep again at a deeper level.

        Args:
            level: 1 moves the weights to the host's memory, which is pinned if they were on a GPU and stays reserved
                until a sleep of level 2. 2 drops the weights: after `wake_up`, `update_weights` must give all of them
                before the LLM can generate. On a CPU, level 1 leaves the weights where they are.

        Raises:
            TypeError, ValueError: another level.
            RuntimeError: the LLM is closed or busy with another call.
        """
        self._alter(self.engine.sleep, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends `sleep`: brings the weights back, with an empty cache of as many blocks as before. If the LLM is awake,
        it does nothing.

        Args:
            tags: "weights", "kv_cache" or both, as in vLLM. Either brings both back.

        Raises:
            ValueError: another tag.
            RuntimeError: there is too little memory, and the LLM still sleeps: free some, and call this again. Or the
                LLM is closed or busy with another call.
        """
        if any(tag not in ("weights", "kv_cache") for tag in tags or ()):
            raise ValueError(f'tags must be a list of "weights" and "kv_cache", or None, not {tags!r}')
        self._alter(self.engine.wake_up)

    def metrics(self) -> dict[str, Any]:
        """Counters since start: tokens, prefix cache hits, preemptions, batch sizes, memory, time by phase."""
        return self.engine.metrics()

    def provenance(self) -> dict[str, Any]:
        """All that the results of deterministic=True depend on, besides the prompts, their parameters, the tokenizer's
        files and the versions of packages: the digests of the weights, the kind of device, and how it computes.

        Returns:
            A dict of JSON's values. "weights" has the digest of "all" and a dict of "tensors".

        Raises:
            RuntimeError: as `weights_digest`.
        """
        info, digests = self.engine.info, self._weight_digests()
        return {
            "weights": {"all": whole_digest(digests), "tensors": digests},
            "device": device_kind(info.device),
            "dtype": info.dtype,
            "attention_backend": info.attention_backend,
            "num_ranks": self.engine.config.tensor_parallel_size,
            **({"enable_lora": True} if self.engine.config.enable_lora else {}),
        }

    def close(self) -> None:
        """Frees the model's memory; the LLM cannot be used afterwards. Calling it again does nothing.

        Raises:
            RuntimeError: a call is still running: in another thread, or interrupted by a signal handler that calls
                this.
        """
        self._guard.run(self.engine.exit)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        info, state = self.engine.info, "closed " if self.engine.is_closed else ""
        return (
            f"<{state}LLM {self.engine.config.model!r}, dtype={info.dtype}, device={info.device}, "
            f"max_model_len={info.max_model_len}, num_kvcache_blocks={info.num_blocks_per_group}>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("an LLM cannot be pickled or copied; make one in each process from the same options")

    # Calls

    def _params_for(self, sampling_params: OneOrMany | None, num_prompts: int) -> list[SamplingParams]:
        self.engine.check_alive()  # before any work
        self._check_generates()
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_per_prompt(sampling_params, num_prompts)
        check_installed(params)
        return params

    def _check_generates(self) -> None:
        head = self.engine.info.head
        if head != "lm":
            is_left_out = self._model_config.head == "lm"
            advice = 'leave out runner="pooling"' if is_left_out else "load one of …ForCausalLM"
            served = "embed, encode, classify, reward and score" if head == "score" else "embed and encode"
            raise ValueError(
                f"this LLM has no LM head, so it can neither generate nor score text: {advice}. It serves {served}"
            )

    def _stream(
        self,
        source: Iterator,
        encode: Callable[[list[Any]], list[EncodedPrompt]],
        raises: bool = False,
        order: Sequence[int] | None = None,
        num_first: int = PROMPTS_OF_PIECE,
        pooled: PooledRows | None = None,
        adapters: LoRARequest | Iterator[LoRARequest | None] | None = None,
    ) -> RowStream:
        if adapters is not None and not self.engine.config.enable_lora:
            raise ValueError("lora_request needs LLM(enable_lora=True)")
        return RowStream(
            self.engine, self._text, source, encode, self._structured_outputs, self._cpu_threads.adapt, raises, order,
            pooled or self._pooled, num_first, adapters,
        )  # fmt: skip

    def _iterate(
        self,
        source: Iterator,
        is_ordered: bool,
        encode: Callable[[list[Any]], list[EncodedPrompt]] | None = None,
        num_first: int = PROMPTS_OF_PIECE,
        pooled: PooledRows | None = None,
        lora_request: Any = None,
    ) -> OutputIterator:
        is_per_row = isinstance(lora_request, Iterable) and not isinstance(lora_request, str | Mapping)
        adapters = map(checked_adapter, lora_request) if is_per_row else checked_adapter(lora_request)
        encode = encode or self._text.encode
        stream = self._stream(source, encode, num_first=num_first, pooled=pooled, adapters=adapters)
        return self._guard.run(self._begin_iteration, stream, is_ordered)

    def _run(
        self,
        prompts: list[Any],
        params: Sequence[RowParams],
        encode: Callable[[list[Any]], list[EncodedPrompt]],
        use_tqdm: bool | Callable[..., Any],
        raise_on_error: bool,
        lora_request: OneOrManyAdapters = None,
        order: Sequence[int] | None = None,
    ) -> list[Any]:
        """order: the rows' numbers, if the rows are not in the order of their numbers."""
        pools = len(params) > 0 and isinstance(params[0], PoolingParams)
        num_first = FIRST_PROMPTS_OF_POOLED if pools else PROMPTS_OF_PIECE
        adapters, rows = adapters_of_call(lora_request, len(prompts), self.engine.config.max_loras)
        if rows is not None:
            prompts, params = ([of_rows[row] for row in rows] for of_rows in (prompts, params))
            order = rows if order is None else [order[row] for row in rows]
        source = zip(prompts, params, strict=True)
        stream = self._stream(source, encode, raise_on_error, order, num_first, adapters=adapters)
        return self._guard.run(self._complete, stream, len(prompts), use_tqdm)

    def _complete(self, stream: RowStream, num_prompts: int, use_tqdm: bool | Callable[..., Any]) -> list[Output]:
        self._check_idle()
        self.engine.check_awake()
        stream.merge_adapter()
        outputs: dict[int, Output] = {}
        try:
            with COLLECTOR.eased(self), Progress(self.engine, num_prompts, use_tqdm) as progress, self._cpu_threads:
                for finished in stream.run():
                    outputs.update(finished)
                    progress.add_finished(finished.values())
        except BaseException as error:
            self.engine.reset()
            keep_outputs(error, outputs)
            raise
        finally:
            _log_summary(stream, num_prompts)
        return [outputs[index] for index in range(num_prompts)]

    def _begin_iteration(self, stream: RowStream, is_ordered: bool) -> OutputIterator:
        self._check_idle()
        self.engine.check_awake()
        stream.merge_adapter()
        run = partial(self._guard.run, self._advance, stream)
        iterator = OutputIterator(stream, run, self._end_iteration, is_ordered)
        self._iterated = weakref.ref(iterator), stream
        return iterator

    def _advance(self, stream: RowStream, work: Callable[[], None]) -> None:
        """Does a part of an iterator's work."""
        self._check_iterated(stream)
        with COLLECTOR.eased(self), self._cpu_threads:
            work()

    def _end_iteration(self, was_cut: bool) -> None:
        iterated, self._iterated = self._iterated, None
        if was_cut:
            self.engine.reset()
        if iterated is not None:
            _log_summary(iterated[1], iterated[1].num_read)

    def _alter(self, alteration: Callable[..., None], *arguments: Any) -> None:
        """Calls a method of the engine that changes weights or memory."""
        self.engine.check_alive()
        self._guard.run(self._alter_idle, alteration, *arguments)

    def _alter_idle(self, alteration: Callable[..., None], *arguments: Any) -> None:
        self._check_idle()
        alteration(*arguments)

    def _check_idle(self) -> None:
        self._check_iterated()
        if not self.engine.is_finished():
            raise RuntimeError("the engine has requests that were added by hand; finish or abort them first")

    def _check_iterated(self, own: RowStream | None = None) -> None:
        """Refuses a call while an iterator has not finished, unless the call is that iterator's `own`."""
        if self._iterated is not None and self._iterated[1] is not own:
            if self._iterated[0]() is not None:
                raise RuntimeError("an iterator of generate_iter has not finished: exhaust it, or close() it")
            self._end_iteration(was_cut=True)  # it was dropped while another thread had the lock


LLM.__doc__ = (inspect.getdoc(LLM) or "").replace("    {options}", options_as_text())


def _log_summary(stream: RowStream, num_prompts: int) -> None:
    """Logs the error rows of a call, and how many rows the default max_tokens cut."""
    if errors := stream.errors.describe(num_prompts):
        logger.warning(errors)
    if stream.num_cut:
        default = SamplingParams().max_tokens
        logger.warning(
            f"the default of max_tokens, {default}, cut completions of {stream.num_cut} of {num_prompts} prompts; set "
            "max_tokens to another number, or to None for as many tokens as fit"
        )


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
