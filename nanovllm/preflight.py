"""`Preflight` predicts from tokenizer and config alone which prompts can run, before any weight is loaded."""

import os
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.checks import suggests_names
from nanovllm.config import MEANT_OPTIONS, Config
from nanovllm.engine.block_manager import hash_block
from nanovllm.engine.limits import check_request, max_length
from nanovllm.engine.runner import RunnerInfo
from nanovllm.guides import StructuredOutputs
from nanovllm.models.directory import find_model
from nanovllm.models.read_config import load_model_config
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
        num_prompt_tokens: tokens of the prompt; 0 if it could not be tokenized.
        max_num_new_tokens: maximum number of tokens of its completions together; 0 if it cannot run.
        error: the `error` of its RequestOutput, or None if it can run.
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
    """Checks prompts as `LLM.generate` would, without the model's weights. Its options are LLM's.

    It knows neither the device nor the KV cache. So it cannot find errors that only an LLM can find: a request that
    could outgrow the whole cache, logits that are not finite, bans that leave no token to sample, completions that
    cannot be decoded.

    It assumes a prefix cache with blocks of 64 tokens that never loses a block. An LLM whose cache is too small for the
    prompts serves fewer tokens. Only the first 1,000,000 different blocks are remembered. After more than that, the
    number of prefixes and the hit rate are lower bounds.

    Args:
        model: a directory in the Hugging Face layout, with or without weights, a hub name, whose weights are not
            fetched, or "bundled".
        revision, tokenizer, max_model_len: as in `nanovllm.Config`. The attribute `max_model_len` is that of an LLM
            with these options, and `directory` is the directory of the model's files.

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
    ):
        config = Config(**{name: value for name, value in locals().items() if name != "self"})
        self.directory = directory = find_model(config.model, config.revision, with_weights=False)
        model_config = load_model_config(directory)
        self.max_model_len = model_config.max_model_len(config.max_model_len)
        self._text = Text.of_options(directory, config.tokenizer).limited_to(self.max_model_len)
        eos_token_ids = model_config.eos_token_ids
        self._info = RunnerInfo(
            sys.maxsize, BLOCK_SIZE, self.max_model_len, model_config.vocab_size, eos_token_ids,
            placeholders=model_config.placeholders,
        )  # fmt: skip
        self._structured_outputs = StructuredOutputs(
            self._text.tokenizer, model_config.vocab_size, (*eos_token_ids, *self._text.eos_token_ids)
        )
        self._default_sampling = DefaultSampling(model_config.generation, config.generation_config)
        self._prefixes = _Prefixes()
        self._num_prompts = self._num_errors = self._longest_prompt = 0
        self._num_prompt_tokens = self._max_num_new_tokens = self._num_shared_tokens = 0

    def get_tokenizer(self) -> Any:
        """As LLM.get_tokenizer."""
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As LLM.get_default_sampling_params."""
        return self._default_sampling.params()

    def check(
        self,
        prompts: str | Sequence[int] | Mapping[str, Any] | Iterable[Any],
        sampling_params: OneOrMany | None = None,
    ) -> list[PromptCheck]:
        """Predicts the outcome of `LLM.generate` for each prompt, in order. Call it with one part of a large file at a
        time.

        Args:
            prompts, sampling_params: as in LLM.generate.

        Raises:
            TypeError, ValueError: as in LLM.generate.
        """
        prompts = as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_per_prompt(sampling_params, len(prompts))
        checks: list[PromptCheck] = []
        for start in range(0, len(prompts), PROMPTS_OF_PIECE):
            piece = slice(start, start + PROMPTS_OF_PIECE)
            checks += map(self._check, self._text.encode(prompts[piece]), params[piece])
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

    def _check(self, prompt: EncodedPrompt, params: SamplingParams) -> PromptCheck:
        """Checks and counts one prompt."""
        num_tokens = len(prompt.token_ids)
        self._num_prompts += 1
        try:
            engine_params, _ = without_text(prompt, params, self._text, self._structured_outputs, num_completions=1)
            check_request(prompt.token_ids, engine_params, self._info)
        except ValueError as error:
            self._num_errors += 1
            return PromptCheck(num_tokens, 0, str(error))
        max_num_new_tokens = params.n * (max_length(num_tokens, params, self._info) - num_tokens)
        self._num_prompt_tokens += num_tokens
        self._longest_prompt = max(self._longest_prompt, num_tokens)
        self._max_num_new_tokens += max_num_new_tokens
        # The last token is always computed, and so is the token before the first one that is scored.
        max_shared = (num_tokens if params.prompt_logprobs is None else prompt.first_scored) - 1
        self._num_shared_tokens += self._prefixes.add(prompt.token_ids, max_shared)
        return PromptCheck(num_tokens, max_num_new_tokens, None)


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
