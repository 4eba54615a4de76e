"""nanovllm as a custom model of Hugging Face's lighteval, written against 0.13.

    model = NanovllmModel(NanovllmConfig(model_name="Qwen/Qwen3-0.6B", options={"max_model_len": 4096}))
    Pipeline(tasks=…, pipeline_parameters=…, evaluation_tracker=…, model=model).evaluate()

`lighteval custom DIRECTORY PATH_OF_THIS_FILE TASKS` is its command line, with LLM's default options.
"""

import logging
from typing import Any

from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc, SamplingMethod
from lighteval.utils.cache_management import SampleCache, cached

from nanovllm import LLM, SamplingParams

logger = logging.getLogger(__name__)


class NanovllmConfig(ModelConfig):
    """lighteval's config with options for LLM. lighteval's cache has separate answers for each config.

    Args:
        model_name: a directory in the Hugging Face layout, or a hub name.
        options: LLM's options, such as {"tensor_parallel_size": 2}.
    """

    options: dict[str, Any] = {}


class NanovllmModel(LightevalModel):
    """A model for lighteval. It gives the LLM all documents in one call. Prompts that are too long lose tokens on the
    left.

    Args:
        config: a NanovllmConfig, or the CustomModelConfig of lighteval's command line.

    Raises:
        TypeError, ValueError, RuntimeError: as LLM; or the model has no tokenizer. A document that cannot run raises
            before any document runs.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.llm = LLM(config.model_name, **getattr(config, "options", {}))
        self._tokenizer = self.llm.get_tokenizer()
        if self._tokenizer is None:
            self.llm.close()
            raise ValueError(
                f"{config.model_name} has no tokenizer, and lighteval gives texts; use options['tokenizer']"
            )
        self.uses_chat_template = self._tokenizer.chat_template is not None
        self.prompt_manager = PromptManager(self.uses_chat_template, self._tokenizer, config.system_prompt)
        # The cache's directory ends with the model's name. An absolute name would replace the whole path.
        self._cache = SampleCache(config.model_copy(update={"model_name": config.model_name.lstrip("/")}))

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return not self.uses_chat_template  # the template writes its own

    @property
    def max_length(self) -> int:
        return self.llm.engine.info.max_model_len

    def cleanup(self) -> None:
        """Frees the model's memory; lighteval calls it before it computes the metrics."""
        self.llm.close()

    @cached(SamplingMethod.GENERATIVE)
    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """One response per document, with `num_samples` completions; greedy unless the config has a temperature."""
        texts = list(map(self._prompt, docs))
        params = [self._sampling_params(doc) for doc in docs]
        prompts = []
        for text, each in zip(texts, params, strict=True):
            room = self.max_length - (each.max_tokens or 1)
            if room < 1:
                raise ValueError(
                    f"{each.max_tokens} new tokens leave no room for a prompt within max_model_len={self.max_length}; "
                    "lower max_new_tokens, or raise options['max_model_len']"
                )
            prompts.append(self.tok_encode(text)[-room:])
        return [
            ModelResponse(
                input=text,
                input_tokens=output.prompt_token_ids,
                text=[completion.text for completion in output.outputs],
                output_tokens=[completion.token_ids for completion in output.outputs],
            )
            for text, output in zip(texts, self.llm.generate(prompts, params, raise_on_error=True), strict=True)
        ]

    def _prompt(self, doc: Doc) -> str:
        if not self.uses_chat_template:
            return self.prompt_manager.prepare_prompt(doc)
        return self.llm.render(self.prompt_manager.prepare_prompt_api(doc))

    def _sampling_params(self, doc: Doc) -> SamplingParams:
        options = self.config.generation_parameters.to_vllm_dict()  # vLLM's names are ours
        size = doc.generation_size if doc.generation_size and doc.generation_size > 0 else None
        max_tokens = options.pop("max_tokens", None) or size
        # Answers in a chat need no stop strings: they end by themselves.
        stop = [*options.pop("stop", ()), *(() if self.uses_chat_template else doc.stop_sequences or ())]
        return SamplingParams(n=doc.num_samples, max_tokens=max_tokens, stop=stop, **options)

    @cached(SamplingMethod.LOGPROBS)
    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """One response per document, with the log-probability of each choice after the document's prompt."""
        texts = list(map(self._prompt, docs))
        pairs, firsts = [], [0]
        for text, doc in zip(texts, docs, strict=True):
            contexts, choices = self.tok_encode_pair(text, doc.choices)
            pairs += [(context or [self._prefix_id], choice) for context, choice in zip(contexts, choices, strict=True)]
            firsts.append(len(pairs))
        scores = self._score(pairs)
        responses = []
        for text, first, end in zip(texts, firsts[:-1], firsts[1:], strict=True):
            of_doc = scores[first:end]
            responses.append(
                ModelResponse(
                    input=text,
                    input_tokens=[score.context_token_ids for score in of_doc],
                    output_tokens=[score.token_ids for score in of_doc],
                    logprobs=[score.total for score in of_doc],
                    argmax_logits_eq_gold=[score.all_greedy for score in of_doc],
                )
            )
        return responses

    # Not cached: lighteval 0.13's cache mistakes such answers for those of choices, and drops them.
    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """One response per document, with the log-probability of its whole query.

        A query that is longer than max_model_len is scored in windows. The last token of a window is the context of the
        next.
        """
        pairs, owners = [], []
        for owner, doc in enumerate(docs):
            token_ids = [self._prefix_id, *self.tok_encode(doc.query, add_special_tokens=False)]
            for first in range(0, len(token_ids) - 1, self.max_length - 1):
                pairs.append((token_ids[first : first + 1], token_ids[first + 1 : first + self.max_length]))
                owners.append(owner)
        responses = [ModelResponse(input=doc.query, logprobs=[0.0], argmax_logits_eq_gold=[True]) for doc in docs]
        for owner, score in zip(owners, self._score(pairs), strict=True):
            responses[owner].logprobs[0] += score.total
            responses[owner].argmax_logits_eq_gold[0] &= score.all_greedy
            responses[owner].output_tokens.append(score.token_ids)
        return responses

    @property
    def _prefix_id(self) -> int:
        """The token before a text without a context."""
        begin = self._tokenizer.bos_token_id
        return self._tokenizer.eos_token_id if begin is None else begin

    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[Any]:
        """The Loglikelihood of each (context, continuation)."""
        excesses = [max(0, len(context) + len(choice) - self.max_length) for context, choice in pairs]
        if num_cut := sum(excess > 0 for excess in excesses):
            logger.warning(
                "%d of %d texts are longer than max_model_len=%d; their contexts lost tokens on the left",
                num_cut, len(pairs), self.max_length,
            )  # fmt: skip
        contexts = [context[excess:] for (context, _), excess in zip(pairs, excesses, strict=True)]
        return self.llm.loglikelihood(contexts, [choice for _, choice in pairs], raise_on_error=True)
