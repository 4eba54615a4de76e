"""Offline LLM inference: a list of prompts in, every completion out, in order."""

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
