"""Offline LLM inference: a list of prompts in, every completion out, in order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.llm import LLM
    from nanovllm.loglikelihood import Loglikelihood
    from nanovllm.logprobs import Logprob, TokenLogprobs
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.preflight import Preflight, PreflightSummary, PromptCheck
    from nanovllm.prompts import NOT_YET
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "NOT_YET",
    "CompletionOutput",
    "Config",
    "Logprob",
    "Loglikelihood",
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
    "outputs": ("CompletionOutput", "RequestOutput"),
    "preflight": ("Preflight", "PreflightSummary", "PromptCheck"),
    "prompts": ("NOT_YET",),
    "sampling_params": ("SamplingParams",),
    "structured_outputs": ("StructuredOutputsParams",),
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is used. `import nanovllm` is quick then, and the command can take Ctrl-C before
    the imports that take time."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"nanovllm.{module}"), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
