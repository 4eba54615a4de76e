"""The methods of LLM that compute each row in one forward pass: embed, classify, reward, score and label."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

from nanovllm.accepted import ACCEPTED_ARGUMENTS, ACCEPTED_POOLING, RENAMED_POOLING
from nanovllm.checks import boolean, takes_keywords
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.lora import LoRARequest, OneOrManyAdapters, adapters_of_call
from nanovllm.pooled_rows import PooledRows
from nanovllm.pooling_outputs import PoolingRequestOutput
from nanovllm.pooling_params import PoolingParams, pooling_params
from nanovllm.prompts import NotYet, as_pairs, as_prompt_list, listed
from nanovllm.row_stream import FIRST_PROMPTS_OF_POOLED, OutputIterator
from nanovllm.sampling_params import with_params
from nanovllm.text import Text

_ACCEPTED = {**ACCEPTED_ARGUMENTS, **ACCEPTED_POOLING}
_takes_vllms_arguments = takes_keywords("argument", {}, _ACCEPTED, {**RENAMED_POOLING, "prompt_token_ids": "prompts"})
Given = PoolingParams | dict[str, Any] | Sequence[Any] | None
UseTqdm = bool | Callable[..., Any]


class OnePass:
    """Rows that are computed in one forward pass each. All methods return one output per row, in order, and a row that
    cannot run is an error row, which is also logged. Prompts that begin alike share the computation of the beginning.
    A conversation {"messages": …} is rendered without the header of a further turn, except by `label`.

    The methods take these arguments:

    Args:
        prompts: one or many, in the forms that LLM.generate takes.
        use_tqdm, lora_request, raise_on_error: as in LLM.generate.
        pooling_params: a PoolingParams, a dict of its parameters, or one per prompt. The other keywords are parameters
            of the same names and override it.

    Raises:
        TypeError, ValueError: an argument of the wrong type, or a task that the model cannot serve.
        RuntimeError: as in LLM.generate.
    """

    engine: LLMEngine
    _text: Text
    _pooled: PooledRows
    _run: Callable[..., list[Any]]
    _iterate: Callable[..., OutputIterator]

    @_takes_vllms_arguments
    def embed(
        self,
        prompts: Any,
        pooling_params: Given = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: OneOrManyAdapters = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        pooling: str | None = None,
        prompt_name: str | None = None,
        hidden_states_layers: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        raise_on_error: bool = False,
    ) -> list[PoolingRequestOutput]:
        """Embeds each prompt: `output.embedding` is a float32 array, of length 1 unless `normalize=False`.

        It is the hidden state of the last token after the final norm, or what the checkpoint's sentence-transformers
        files say; see PoolingParams for the keywords.
        """
        more = {
            "normalize": normalize, "dimensions": dimensions, "pooling": pooling, "prompt_name": prompt_name,
            "hidden_states_layers": hidden_states_layers, "truncate_prompt_tokens": truncate_prompt_tokens,
        }  # fmt: skip
        how = use_tqdm, raise_on_error, lora_request
        return self._pool("embed", as_prompt_list(prompts), pooling_params, how, more)

    @_takes_vllms_arguments
    def embed_iter(
        self,
        prompts: Any | Iterable[Any | NotYet],
        pooling_params: PoolingParams | dict[str, Any] | None = None,
        *,
        lora_request: OneOrManyAdapters | Iterable[LoRARequest | None] = None,
        ordered: bool = True,
        normalize: bool | None = None,
        dimensions: int | None = None,
        pooling: str | None = None,
        prompt_name: str | None = None,
        hidden_states_layers: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> OutputIterator:
        """Embeds prompts as their results are asked for, with flat memory; see LLM.generate_iter."""
        more = {
            "normalize": normalize, "dimensions": dimensions, "pooling": pooling, "prompt_name": prompt_name,
            "hidden_states_layers": hidden_states_layers, "truncate_prompt_tokens": truncate_prompt_tokens,
        }  # fmt: skip
        if isinstance(pooling_params, (list, tuple)):
            raise TypeError("embed_iter takes one pooling_params for all prompts; generate_iter takes one per prompt")
        (params,) = self._params_of("embed", pooling_params, 1, more)
        if not isinstance(prompts, Iterator):
            prompts = as_prompt_list(prompts)
            if isinstance(lora_request, list | tuple):
                lora_request, _ = adapters_of_call(lora_request, len(prompts))
        source = iter(prompts)
        pairs = with_params(source, params, (PoolingParams,))
        is_ordered = boolean("ordered", ordered)
        return self._iterate(pairs, is_ordered, num_first=FIRST_PROMPTS_OF_POOLED, lora_request=lora_request)

    @_takes_vllms_arguments
    def encode(
        self,
        prompts: Any,
        pooling_params: Given = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: OneOrManyAdapters = None,
        pooling_task: str = "token_embed",
        normalize: bool | None = None,
        hidden_states_layers: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        raise_on_error: bool = False,
    ) -> list[PoolingRequestOutput]:
        """Computes any task of one forward pass; `output.data` is its array.

        Args:
            pooling_task: "token_embed" returns the states of all tokens after the final norm, float32 [num_tokens,
                hidden_size]. "embed", "classify" and "reward" are the tasks of the methods of these names.
        """
        more = {
            "normalize": normalize, "hidden_states_layers": hidden_states_layers,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }  # fmt: skip
        if pooling_task not in ("token_embed", "embed", "classify", "reward"):
            raise ValueError(
                "pooling_task must be 'token_embed', 'embed', 'classify' or 'reward', which reads the last token, not "
                f"{pooling_task!r:.100}"
            )
        how = use_tqdm, raise_on_error, lora_request
        return self._pool(pooling_task, as_prompt_list(prompts), pooling_params, how, more)

    @_takes_vllms_arguments
    def classify(
        self,
        prompts: Any,
        pooling_params: Given = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: OneOrManyAdapters = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        raise_on_error: bool = False,
    ) -> list[PoolingRequestOutput]:
        """Classifies each prompt with the head of a …ForSequenceClassification model: `output.probs` has a probability
        per label of the checkpoint's config, and `output.label` is the most probable label."""
        more = {"normalize": normalize, "truncate_prompt_tokens": truncate_prompt_tokens}
        how = use_tqdm, raise_on_error, lora_request
        return self._pool("classify", as_prompt_list(prompts), pooling_params, how, more)

    @_takes_vllms_arguments
    def reward(
        self,
        prompts: Any,
        pooling_params: Given = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: OneOrManyAdapters = None,
        truncate_prompt_tokens: int | None = None,
        raise_on_error: bool = False,
    ) -> list[PoolingRequestOutput]:
        """Computes the numbers of the model's classification head for each prompt: `output.score` if there is one, and
        `output.data` in any case."""
        more = {"truncate_prompt_tokens": truncate_prompt_tokens}
        how = use_tqdm, raise_on_error, lora_request
        return self._pool("reward", as_prompt_list(prompts), pooling_params, how, more)

    @takes_keywords(
        "argument",
        {},
        _ACCEPTED,
        {**RENAMED_POOLING, "data_1": "queries", "data_2": "documents", "text_1": "queries", "text_2": "documents"},
    )
    def score(
        self,
        queries: str | Iterable[str],
        documents: str | Iterable[str],
        use_tqdm: UseTqdm = True,
        pooling_params: Given = None,
        *,
        lora_request: OneOrManyAdapters = None,
        recipe: str | None = None,
        instruction: str | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        raise_on_error: bool = False,
    ) -> list[PoolingRequestOutput]:
        """Scores how well each document fits its query: `output.score`.

        A model with a classification head of one number reads both as a pair (a cross-encoder). An embedder's score is
        the cosine of both embeddings. Qwen3-Reranker needs `recipe="qwen3-reranker"`.

        Args:
            queries, documents: strings. A query that is given alone goes with all documents.
            recipe, instruction, pooling, normalize, truncate_prompt_tokens: see PoolingParams.
        """
        more = {
            "recipe": recipe, "instruction": instruction, "pooling": pooling, "normalize": normalize,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }  # fmt: skip
        pairs = as_pairs(queries, documents, ("queries", "documents"))
        how = use_tqdm, raise_on_error, lora_request
        return self._pool("score", pairs, pooling_params, how, more)

    def label(
        self,
        prompts: Any,
        labels: Sequence[Any],
        use_tqdm: UseTqdm = True,
        *,
        lora_request: OneOrManyAdapters = None,
        raise_on_error: bool = False,
    ) -> list[PoolingRequestOutput]:
        """Computes how probable each label is as the continuation of each prompt: `output.probs` has a probability per
        label, which add up to 1, `output.label` is the most probable one, and `output.logprobs` has the
        log-probability of each whole label.

        It is exact for labels of several tokens: the log-probability of a label is the sum over its tokens, each after
        the prompt and the label's tokens before it. The prompt is computed about once per `max_num_seqs` labels, and
        without prefix caching once per label. A prompt and a label that are both strings are tokenized as one text. All
        labels of a prompt are scored from the same token on: the first in which one of these texts differs from the
        prompt. A label needs its own leading space, if a space is to come between them. If a label begins with another
        one ("not" and "no"), the shorter one counts all continuations that begin with it.

        Args:
            prompts: as in LLM.generate. After a conversation {"messages": …}, a label begins the answer.
            labels: strings or lists of token ids, the same for all prompts; or one list of such labels per prompt.
        """
        prompts, rows = as_prompt_list(prompts), listed(labels)
        if not isinstance(rows, (list, tuple)):
            raise TypeError(f"labels must be a list of labels, or one such list per prompt, not {labels!r:.100}")
        is_per_prompt = bool(rows) and all(_is_label_list(each) for each in rows)
        if is_per_prompt and len(rows) != len(prompts):
            raise ValueError(f"{len(rows)} lists of labels for {len(prompts)} prompts; give one per prompt")
        made: dict[Any, PoolingParams] = {}
        params = []
        for each in rows if is_per_prompt else [rows]:
            key = tuple(tuple(label) if isinstance(label, list) else label for label in map(listed, listed(each)))
            made[key] = found = made.get(key) or PoolingParams("label", labels=key)
            params.append(found)
        params = params if is_per_prompt else params * len(prompts)
        how = use_tqdm, raise_on_error, lora_request
        return self._pool("label", prompts, params, how, {})

    # Calls

    def _params_of(self, task: str, given: Given, num_prompts: int, more: dict[str, Any]) -> list[PoolingParams]:
        self.engine.check_alive()  # before any work
        params = pooling_params(given, task, num_prompts, **more)
        for each in {id(each): each for each in params}.values():
            self._pooled.check(each)
        return params

    def _pool(
        self,
        task: str,
        prompts: list[Any],
        given: Given,
        how: tuple[UseTqdm, bool, OneOrManyAdapters],
        more: dict[str, Any],
    ) -> list[PoolingRequestOutput]:
        is_list = isinstance(given, (list, tuple))
        # Without prompts, a wrong argument is refused too.
        params = self._params_of(task, given, len(prompts) if prompts or is_list else 1, more)
        params = params[: len(prompts)]
        return self._run(prompts, params, self._text.encode, *how)


def _is_label_list(value: Any) -> bool:
    """Whether it is a list of labels, and not a label."""
    value = listed(value)
    return isinstance(value, (list, tuple)) and not all(isinstance(each, Integral) for each in value)
