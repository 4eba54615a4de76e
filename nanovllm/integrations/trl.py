"""nanovllm as the generator of TRL's GRPOTrainer. Written against TRL 1.16, which calls `rollout_func` experimental.

    llm = LLM("Qwen/Qwen3-0.6B", gpu_memory_utilization=0.3, max_model_len=4096)
    trainer = GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=…, train_dataset=…, rollout_func=Rollout(llm))

One process trains and generates; the LLM has memory of its own. If the trainer trains an adapter of peft, the LLM needs
`enable_lora=True`: it then gets only the adapter, and its own weights stay the same. This module does not import TRL.
"""

from itertools import groupby
from typing import Any

from nanovllm import LLM, LoRARequest, SamplingParams


class Rollout:
    """A `rollout_func`. Before it generates, it gives the LLM the trainer's weights, or the adapter that the trainer
    trains, once per step of the optimizer.

    Temperature, filters, repetition penalty and length come from the trainer's GRPOConfig.

    Args:
        llm: an LLM of the trainer's model, with its tokenizer.
        options: further arguments of SamplingParams, such as `stop_token_ids`.
    """

    def __init__(self, llm: LLM, **options: Any):
        self.llm = llm
        self._options = options
        self._loaded_step: int | None = None
        self._adapter: LoRARequest | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list]:
        """One completion per prompt; the trainer repeats a prompt for each completion that it wants.

        Args:
            prompts: strings, or conversations as lists of messages.
            trainer: the GRPOTrainer.

        Returns:
            For each completion, `prompt_ids` and `completion_ids`, lists of ids, and `logprobs`, those of the
            completion's tokens in the distribution that they were drawn from.

        Raises:
            ValueError: the trainer has tools; it trains an adapter, and the LLM refuses it or lacks `enable_lora`; a
                prompt cannot run; or `update_weights` refuses a tensor.
        """
        if getattr(trainer, "tools", None):
            raise ValueError("tools need the trainer's own generation; leave out tools or rollout_func")
        self._load_weights(trainer)
        groups = [(prompt, len(list(equal))) for prompt, equal in groupby(prompts)]
        params = [self._params(trainer.args, num_completions) for _, num_completions in groups]
        outputs = self._generate([prompt for prompt, _ in groups], params, trainer)
        rollout: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for output in outputs:
            for completion in output.outputs:
                assert completion.logprobs is not None
                rollout["prompt_ids"].append(output.prompt_token_ids)
                rollout["completion_ids"].append(completion.token_ids)
                rollout["logprobs"].append(completion.logprobs.of_tokens.tolist())
        return rollout

    def _load_weights(self, trainer: Any) -> None:
        if trainer.state.global_step == self._loaded_step:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            self._adapter = _adapter_of(model)
        else:
            self.llm.update_weights(model.named_parameters())
        self._loaded_step = trainer.state.global_step

    def _params(self, args: Any, num_completions: int) -> SamplingParams:
        """args: the GRPOConfig."""
        # Processed log-probabilities include the temperature, as the trainer's own do.
        return SamplingParams(
            n=num_completions,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
            max_tokens=args.max_completion_length,
            logprobs=0,
            logprobs_mode="processed",
            **self._options,
        )

    def _generate(self, prompts: list[Any], params: list[SamplingParams], trainer: Any) -> list[Any]:
        how: dict[str, Any] = {"use_tqdm": False, "raise_on_error": True, "lora_request": self._adapter}
        if isinstance(prompts[0], str):
            return self.llm.generate(prompts, params, **how)
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        return self.llm.chat(prompts, params, chat_template_kwargs=template, **how)


def _adapter_of(model: Any) -> LoRARequest:
    """The active adapter of a PeftModel, with its present values. The optimizer changes these values, so each of its
    steps needs a new LoRARequest."""
    from peft import get_peft_model_state_dict  # slow to import

    name = model.active_adapter
    # Otherwise peft asks the hub, at each step, whether the vocabulary has changed.
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return LoRARequest("policy", 1, tensors=tensors, config=model.peft_config[name].to_dict())
