"""`Preflight` predicts from tokenizer and config alone which prompts can run, before any weight is loaded."""

import os
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nanovllm.checks import suggests_names
from nanovllm.config import MEANT_OPTIONS, Config
from nanovllm.engine.block_manager import hash_block
from nanovllm.engine.limits import check_pooled, check_request, max_length
from nanovllm.engine.runner import RunnerInfo
from nanovllm.engine.sequence import Pooling
from nanovllm.guides import StructuredOutputs
from nanovllm.models.directory import find_model
from nanovllm.models.read_config import load_model_config
from nanovllm.pooled_rows import PooledRows, PoolingFacts
from nanovllm.pooling_params import PoolingParams, RowParams
from nanovllm.prompts import EncodedPrompt, as_prompt_list
from nanovllm.recommended_sampling import DefaultSampling
from nanovllm.row_stream import PROMPTS_OF_PIECE, without_text
from nanovllm.sampling_params import OneOrMany, SamplingParams, one_per_prompt
from nanovllm.text import Text

# The default block size of all backends but `flash`.
BLOCK_SIZE = 64
# Blocks whose hashes are kept: they take 70 MB, and represent 64 million different tokens.
MAX_KNOWN_BLOCKS = 1_000_000
_MEANT = {theirs: ours for theirs, ours in MEANT_OPTIONS.items() if ours == "max_model_len"}


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """The prediction for one prompt.

    Args:
        num_prompt_tokens: tokens of the prompt, or of all prompts of a row that pools, such as a query and a document;
            0 if it could not be tokenized.
        max_num_new_tokens: maximum number of tokens of its completions together; 0 if it cannot run or only pools.
        error: the `error` of its output, or None if it can run.
    """

    num_prompt_tokens: int
    max_num_new_tokens: int
    error: str | None


@dataclass(frozen=True, slots=True)
class PreflightSummary:
    """The predictions for many prompts. Prompts that cannot run count only where stated.

    Args:
        num_prompts: all prompts, including those that cannot run.
        num_errors: prompts that cannot run.
        num_prompt_tokens: tokens of the prompts.
        longest_prompt: tokens of the longest prompt.
        max_num_new_tokens: maximum number of tokens of all completions together.
        num_distinct_prefixes: different first blocks of 64 tokens; shorter prompts have none.
        num_shared_tokens: tokens that the prefix cache can serve.
        expected_hit_rate: num_shared_tokens / num_prompt_tokens, or 0 without prompts.
    """

    num_prompts: int
    num_errors: int
    num_prompt_tokens: int
    longest_prompt: int
    max_num_new_tokens: int
    num_distinct_prefixes: int
    num_shared_tokens: int
    expected_hit_rate: float


@suggests_names("option", _MEANT)
class Preflight:
    """Checks prompts as `LLM.generate` and the methods for one forward pass would, without the model's weights. Its
    options are LLM's.

    It knows neither the device nor the KV cache. So it cannot find errors that only an LLM can find: a request that
    could outgrow the whole cache, logits that are not finite, bans that leave no token to sample, completions that
    cannot be decoded.

    It assumes a prefix cache with blocks of 64 tokens that never loses a block. An LLM whose cache is too small for the
    prompts serves fewer tokens. Only the first 1,000,000 different blocks are remembered. After more than that, the
    number of prefixes and the hit rate are lower bounds.

    Args:
        model: a directory in the Hugging Face layout, with or without weights, a hub name, whose weights are not
            fetched, or "bundled".
        revision, tokenizer, max_model_len, generation_config, runner, pooler_config, hf_overrides, deterministic: as
            in `nanovllm.Config`. The attribute `max_model_len` is that of an LLM with these options, and `directory` is
            the directory of the model's files.

    Raises:
        TypeError, ValueError: an option or a model that cannot work; the message names the fix.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        max_model_len: int | None = None,
        generation_config: str = "auto",
        runner: str = "auto",
        pooler_config: Any = None,
        hf_overrides: Mapping[str, Any] | None = None,
        deterministic: bool = False,
    ):
        config = Config(**{name: value for name, value in locals().items() if name != "self"})
        self.directory = directory = find_model(config.model, config.revision, with_weights=False)
        model_config = load_model_config(directory).for_runner(config.runner)
        self.max_model_len = model_config.max_model_len(config.max_model_len)
        self._text = Text.of_options(directory, config.tokenizer).limited_to(self.max_model_len)
        self._tokenizer = config.tokenizer
        eos_token_ids = model_config.eos_token_ids
        self._info = RunnerInfo(
            sys.maxsize, BLOCK_SIZE, self.max_model_len, model_config.vocab_size, eos_token_ids,
            placeholders=model_config.placeholders, head=model_config.head, num_layers=model_config.num_hidden_layers,
        )  # fmt: skip
        self._pooled = PooledRows(self._text, PoolingFacts.of(model_config, self._info, config))
        self._structured_outputs = StructuredOutputs(
            self._text.tokenizer, model_config.vocab_size, (*eos_token_ids, *self._text.eos_token_ids)
        )
        self._default_sampling = DefaultSampling(model_config.generation, config.generation_config)
        self._prefixes = _Prefixes()
        self._num_prompts = self._num_errors = self._longest_prompt = 0
        self._num_prompt_tokens = self._max_num_new_tokens = self._num_shared_tokens = 0

    @property
    def tokenizer_directory(self) -> Path:
        """The directory of the tokenizer's files."""
        name = self._tokenizer
        return self.directory if name is None else find_model(name, None, with_weights=False, option="tokenizer")

    def get_tokenizer(self) -> Any:
        """As LLM.get_tokenizer."""
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As LLM.get_default_sampling_params."""
        return self._default_sampling.params()

    def check(
        self,
        prompts: str | Sequence[int] | Mapping[str, Any] | Iterable[Any],
        sampling_params: OneOrMany | Sequence[RowParams] | PoolingParams | None = None,
    ) -> list[PromptCheck]:
        """Predicts the outcome of `LLM.generate` for each prompt, in order. Call it with one part of a large file at a
        time.

        Args:
            prompts: as in LLM.generate, or pairs of a query and a document for the task "score".
            sampling_params: as in LLM.generate; PoolingParams predict the outcome of the method for their task.

        Raises:
            TypeError, ValueError: as in LLM.generate.
        """
        prompts = as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_per_prompt(sampling_params, len(prompts), (PoolingParams,))
        checks: list[PromptCheck] = []
        for start in range(0, len(prompts), PROMPTS_OF_PIECE):
            end = start + PROMPTS_OF_PIECE
            for pools, some in groupby(zip(prompts[start:end], params[start:end], strict=True), _pools):
                rows = list(some)
                encoded = self._pooled.encode(rows) if pools else self._text.encode([prompt for prompt, _ in rows])
                checks += [self._check(prompt, each) for prompt, (_, each) in zip(encoded, rows, strict=True)]
        return checks

    def summary(self) -> PreflightSummary:
        """The summary of all prompts checked so far."""
        return PreflightSummary(
            self._num_prompts,
            self._num_errors,
            self._num_prompt_tokens,
            self._longest_prompt,
            self._max_num_new_tokens,
            self._prefixes.num_distinct,
            self._num_shared_tokens,
            self._num_shared_tokens / max(self._num_prompt_tokens, 1),
        )

    def _check(self, prompt: EncodedPrompt, params: RowParams) -> PromptCheck:
        """Checks and counts one prompt."""
        prompts = (prompt, *prompt.others)
        lengths = [len(each.token_ids) for each in prompts]
        num_tokens = sum(lengths)
        self._num_prompts += 1
        try:
            max_shared = self._checked(prompts, params)
        except ValueError as error:
            self._num_errors += 1
            return PromptCheck(num_tokens, 0, str(error))
        max_num_new_tokens = 0
        if isinstance(params, SamplingParams):
            max_num_new_tokens = params.n * (max_length(num_tokens, params, self._info) - num_tokens)
        self._num_prompt_tokens += num_tokens
        self._longest_prompt = max(self._longest_prompt, *lengths)
        self._max_num_new_tokens += max_num_new_tokens
        for each, maximum in zip(prompts, max_shared, strict=True):
            self._num_shared_tokens += self._prefixes.add(each.token_ids, maximum)
        return PromptCheck(num_tokens, max_num_new_tokens, None)

    def _checked(self, prompts: Sequence[EncodedPrompt], params: RowParams) -> list[int]:
        """How many tokens of each prompt the prefix cache may serve; a ValueError if the row cannot run."""
        first = prompts[0]
        how: SamplingParams | Pooling
        if isinstance(params, SamplingParams):
            how, _ = without_text(first, params, self._text, self._structured_outputs, num_completions=1)
        elif first.error is not None:
            raise first.error
        else:
            how = self._pooled.request(params)
        # The last token is always computed, and so is the token before the first one that is scored.
        if isinstance(how, Pooling):
            for each in prompts:
                check_pooled(each.token_ids, how, self._info)
            return [len(each.token_ids) - 1 if how.tokens == "last" else 0 for each in prompts]
        for each in prompts:
            check_request(each.token_ids, how, self._info, each.first_scored)
        return [(len(each.token_ids) if how.prompt_logprobs is None else each.first_scored) - 1 for each in prompts]


def _pools(row: tuple[Any, RowParams]) -> bool:
    return isinstance(row[1], PoolingParams)


class _Prefixes:
    """The full blocks of all prompts, each known by a hash of all tokens up to its end.

    num_distinct: number of known first blocks.
    """

    def __init__(self) -> None:
        self.num_distinct = 0
        self._known: set[int] = set()

    def add(self, token_ids: list[int], max_shared: int) -> int:
        """Adds a prompt's blocks; returns how many of its leading tokens, at most `max_shared`, are in blocks that were
        known before."""
        num_shared = parent = 0
        known = array("i", token_ids)
        for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            parent = hash_block(parent, known[end - BLOCK_SIZE : end])
            if parent in self._known:
                if end <= max_shared:
                    num_shared = end
            elif len(self._known) < MAX_KNOWN_BLOCKS:
                self._known.add(parent)
                self.num_distinct += end == BLOCK_SIZE
            else:
                break  # the blocks after an unknown one are not known either
        return num_shared
