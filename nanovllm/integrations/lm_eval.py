"""nanovllm as a model of EleutherAI's lm-evaluation-harness.

    python -m nanovllm.integrations.lm_eval --model nanovllm --model_args pretrained=DIRECTORY --tasks arc_easy

is the harness's own command with this model registered. In Python, importing this module registers the model:
`lm_eval.simple_evaluate(model="nanovllm", model_args={"pretrained": …}, tasks=…)`. An instance works as `model` too.
"""

import logging
from functools import lru_cache
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm import LLM, SamplingParams

logger = logging.getLogger(__name__)

# Tasks' names for the maximum number of tokens to generate. The first one that is given counts, as in the harness.
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("nanovllm")
class NanovllmLM(TemplateLM):
    """A model for the harness. It gives the LLM all of a task's requests in one call.

    Tokens, windows and truncation are those of the harness's `hf` model with a `max_length` of `max_model_len - 1`:
    context and continuation have room for `max_model_len` tokens together.

    Args:
        pretrained: a directory in the Hugging Face layout, or a hub name.
        max_gen_toks: maximum number of tokens to generate, for tasks that do not set it.
        add_bos_token: whether texts begin with the tokenizer's special tokens; None is True, unless a text holds them.
        prefix_token_id: the token in place of an empty context; None is the token that begins texts, else the one that
            ends them.
        enable_thinking: for the chat template; None leaves it out.
        think_end_token: the end of a model's thoughts, such as "</think>". The answer is the text after it, and stop
            strings count only there.
        batch_size, max_batch_size: ignored. The harness always gives them, but the LLM fills its steps itself.
        options: LLM's options, such as `tensor_parallel_size=2`.

    Raises:
        TypeError, ValueError, RuntimeError: as LLM; or the model has no tokenizer. A request that cannot run raises
            before any request runs.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ):
        super().__init__()
        self.llm = LLM(pretrained, **options)
        self.tokenizer = self.llm.get_tokenizer()
        if self.tokenizer is None:
            self.llm.close()
            raise ValueError(f"{pretrained} has no tokenizer, and the harness gives texts; add tokenizer=DIRECTORY")
        ids = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((token_id for token_id in ids if token_id is not None), None)
        if found is None:
            self.llm.close()
            raise ValueError("the tokenizer has no token that begins or ends a text; add prefix_token_id=ID")
        self._prefix_token_id, self._prefix = found, self.tokenizer.decode([found])
        self.max_gen_toks = max_gen_toks
        self._max_model_len = self.llm.engine.info.max_model_len
        self._adds_special = add_bos_token is not False
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._think_end = think_end_token
        added = self.tokenizer.added_tokens_decoder
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        # The choices of a question share its context, and come one after the other.
        self._encode = lru_cache(maxsize=64)(self.tokenizer.encode)

    # Properties that the harness reads

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model reads to score a text; it does not read the text's last token."""
        return self._max_model_len - 1

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.llm.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            chat_template_kwargs=self._template_options,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; `add_special_tokens=None` adds special tokens unless the text begins with one."""
        if add_special_tokens is None:
            begins = self._prefix != "" and string.startswith(self._prefix)
            add_special_tokens = self._adds_special and not begins
        return list(self._encode(string, add_special_tokens=add_special_tokens))

    # Scoring

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any) -> list[Any]:
        """(log-probability, whether greedy) for each (cache key, context ids, continuation ids)."""
        contexts, num_cut = [], 0
        for _, context, continuation in requests:
            excess = len(context) + len(continuation) - self._max_model_len
            if excess >= len(context):
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens leaves no room for a context within max_model_len="
                    f"{self._max_model_len}; raise max_model_len if the model was made for more"
                )
            num_cut += excess > 0
            contexts.append(context[max(excess, 0) :])
        self._warn_of_cuts(num_cut, len(requests))
        scores = self.llm.loglikelihood(
            contexts, [continuation for *_, continuation in requests], use_tqdm=not disable_tqdm, raise_on_error=True
        )
        answers = [(score.total, score.all_greedy) for score in scores]
        for (key, *_), answer in zip(requests, answers, strict=True):
            if key is not None:  # a window of loglikelihood_rolling has none
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows that score different tokens."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            token_ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(token_ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Generating

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params, stops, num_cut = [], [], [], 0
        for context, gen_kwargs in (request.args for request in requests):
            each, until = self._sampling_params(gen_kwargs)
            assert each.max_tokens is not None
            room = self._max_model_len - each.max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={each.max_tokens} leaves no room for a prompt within max_model_len="
                    f"{self._max_model_len}; lower it, or raise max_model_len if the model was made for more"
                )
            token_ids = self.tok_encode(context)
            num_cut += len(token_ids) > room
            prompts.append(token_ids[-room:])
            params.append(each)
            stops.append(until)
        self._warn_of_cuts(num_cut, len(requests))
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm, raise_on_error=True)
        texts = [self._answer(output.text, until) for output, until in zip(outputs, stops, strict=True)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling_params(self, gen_kwargs: dict[str, Any]) -> tuple[SamplingParams, list[str]]:
        """A task's settings as SamplingParams, and the stop strings. SamplingParams' error names unknown settings."""
        options = dict(gen_kwargs)
        until = options.pop("until", None) or []
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        limits = [options.pop(name, None) for name in _MAX_TOKENS]
        max_tokens = next((limit for limit in limits if limit is not None), self.max_gen_toks)
        samples = options.pop("do_sample", None)
        options.setdefault("temperature", 1.0 if samples else 0.0)
        if samples is False:
            options["temperature"] = 0.0
        if options.get("num_beams") == 1:  # one beam is not a beam search
            del options["num_beams"]
        # Special tokens are not part of the text, so their ids stop. The model's own end always stops.
        special = [self._special_ids[stop] for stop in until if stop in self._special_ids]
        stop = [] if self._think_end else until
        return SamplingParams(max_tokens=int(max_tokens), stop=stop, stop_token_ids=special, **options), until

    def _answer(self, text: str, until: list[str]) -> str:
        """The text after the thoughts, up to the first stop string."""
        if self._think_end:
            text = text.split(self._think_end)[-1].lstrip()
        return text[: min((end for stop in until if (end := text.find(stop)) >= 0), default=len(text))]

    def _warn_of_cuts(self, num_cut: int, num_requests: int) -> None:
        if num_cut:
            logger.warning(
                "%d of %d requests are longer than max_model_len=%d; their contexts lost tokens on the left",
                num_cut, num_requests, self._max_model_len,
            )  # fmt: skip


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
