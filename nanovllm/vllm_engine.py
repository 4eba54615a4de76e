"""`llm.llm_engine`: the attributes of vLLM's engine that scripts read, under vLLM's names."""

from types import SimpleNamespace
from typing import Any

from nanovllm.accepted import ADAPTERS, UPDATE_WEIGHTS, missing_attribute
from nanovllm.lora import LoRARequest

# Attributes of vLLM's engine that are missing here, by what to do instead.
_REFUSED = {
    "llm.generate_iter() reads requests as they come": "add_request step abort_request",
    ADAPTERS: "add_lora list_loras pin_lora remove_lora",
    UPDATE_WEIGHTS: "collective_rpc named_parameters state_dict",
}


class _Attributes(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        raise missing_attribute("nanovllm's stand-in for vLLM's engine", name, _REFUSED)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{name} of llm.llm_engine cannot be set; give LLM its options, or use llm.set_tokenizer()"
        )


class _TokenizerGroup:
    """A tokenizer whose attribute `tokenizer` is the tokenizer itself, as vLLM's once was."""

    def __init__(self, tokenizer: Any):
        vars(self)["tokenizer"] = tokenizer

    def get_lora_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        return self.tokenizer  # no adapter has tokens of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tokenizer":
            raise AttributeError("llm.llm_engine's tokenizer cannot be set; use llm.set_tokenizer()")
        setattr(self.tokenizer, name, value)


class _ModelConfig(_Attributes):
    @property
    def hf_config(self) -> Any:
        from transformers import AutoConfig  # slow to import

        return AutoConfig.from_pretrained(self.model)


def engine_attributes(llm: Any) -> Any:
    """The object that `llm.llm_engine` returns, with the current values."""
    import torch

    info, config, tokenizer = llm.engine.info, llm.engine.config, llm.get_tokenizer()
    configs = {
        "model_config": _ModelConfig(
            model=config.model,
            max_model_len=info.max_model_len,
            dtype=getattr(torch, info.dtype),
            quantization=config.quantization,
            get_vocab_size=lambda: info.vocab_size,
        ),
        "scheduler_config": _Attributes(
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=info.max_model_len,
        ),
        "cache_config": _Attributes(
            block_size=info.kvcache_block_size,
            num_gpu_blocks=info.num_blocks_per_group,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        "parallel_config": _Attributes(
            tensor_parallel_size=config.tensor_parallel_size, pipeline_parallel_size=1, data_parallel_size=1
        ),
    }
    runner = _Attributes(model=_Attributes(load_weights=llm.update_weights))
    worker = _Attributes(model_runner=runner, worker=_Attributes(model_runner=runner))

    def shutdown(timeout: float | None = None) -> None:
        llm.close()

    return _Attributes(
        **configs,
        vllm_config=_Attributes(**configs),
        tokenizer=_TokenizerGroup(tokenizer),
        get_tokenizer=llm.get_tokenizer,
        get_tokenizer_group=lambda: _TokenizerGroup(tokenizer),
        model_executor=_Attributes(driver_worker=worker),
        engine_core=_Attributes(shutdown=shutdown),
        shutdown=shutdown,
        reset_prefix_cache=llm.reset_prefix_cache,
        has_unfinished_requests=lambda: not llm.engine.is_finished(),
    )
