"""Offline LLM inference: a list of prompts in, every completion out, in order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.llm import LLM
    from nanovllm.loglikelihood import Loglikelihood
    from nanovllm.logprobs import Logprob, TokenLogprobs
    from nanovllm.lora import LoRARequest
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.pooling_outputs import PoolingRequestOutput
    from nanovllm.pooling_params import PoolingParams
    from nanovllm.preflight import Preflight, PreflightSummary, PromptCheck
    from nanovllm.prompts import NOT_YET
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "NOT_YET",
    "CompletionOutput",
    "Config",
    "LoRARequest",
    "Logprob",
    "Loglikelihood",
    "PoolingParams",
    "PoolingRequestOutput",
    "Preflight",
    "PreflightSummary",
    "PromptCheck",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenLogprobs",
]
__version__ = "0.2.0"

# The public names by module.
_NAMES = {
    "config": ("Config",),
    "llm": ("LLM",),
    "loglikelihood": ("Loglikelihood",),
    "logprobs": ("Logprob", "TokenLogprobs"),
    "lora": ("LoRARequest",),
    "outputs": ("CompletionOutput", "RequestOutput"),
    "pooling_outputs": ("PoolingRequestOutput",),
    "pooling_params": ("PoolingParams",),
    "preflight": ("Preflight", "PreflightSummary", "PromptCheck"),
    "prompts": ("NOT_YET",),
    "sampling_params": ("SamplingParams",),
    "structured_outputs": ("StructuredOutputsParams",),
}


def __getattr__(name: str) -> Any:
    """Imports a public name, or a module of one, when it is used. `import nanovllm` is quick then, and the command can
    take Ctrl-C before the imports that take time."""
    module = name if name in _NAMES else next((each for each in _NAMES if name in _NAMES[each]), None)
    if module is None:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    try:
        found = import_module(f"nanovllm.{module}")
    except AttributeError as error:  # `from nanovllm import LLM` would hide it
        raise ImportError(f"nanovllm.{module} cannot be imported: {error}") from error
    return globals().setdefault(name, found if name == module else getattr(found, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
