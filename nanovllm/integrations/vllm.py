"""vLLM's module names, so that a script written for vLLM runs as it is.

    python -m nanovllm.integrations.vllm script.py arguments…

runs a script in which `vllm` is nanovllm. `import nanovllm.integrations.vllm` does the same for the imports after it,
where vLLM is not installed; `install(replace=True)` does it where vLLM is. docs/vllm.md says which keywords work.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import nanovllm
from nanovllm import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams, StructuredOutputsParams


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


class LoRARequest:
    """Refuses adapters, which nanovllm does not load."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise ValueError("nanovllm loads no adapters; merge it into the model's weights and load the merged model")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """vLLM's functions that end its processes; `LLM.close` and the LLM's end do that here."""


_NAMES: dict[str, dict[str, Any]] = {
    "vllm": {
        "LLM": LLM, "SamplingParams": SamplingParams, "RequestOutput": RequestOutput, "TextPrompt": TextPrompt,
        "CompletionOutput": CompletionOutput, "TokensPrompt": TokensPrompt, "__version__": nanovllm.__version__,
    },
    "vllm.sampling_params": {
        "SamplingParams": SamplingParams, "StructuredOutputsParams": StructuredOutputsParams,
        "GuidedDecodingParams": StructuredOutputsParams,
    },
    "vllm.inputs": {"TextPrompt": TextPrompt, "TokensPrompt": TokensPrompt},
    "vllm.outputs": {"RequestOutput": RequestOutput, "CompletionOutput": CompletionOutput},
    "vllm.logprobs": {"Logprob": Logprob},
    "vllm.sequence": {"Logprob": Logprob},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": {"LLM": LLM},
    "vllm.distributed": {"cleanup_dist_env_and_memory": _nothing},
    "vllm.distributed.parallel_state": {
        "destroy_model_parallel": _nothing, "destroy_distributed_environment": _nothing,
        "cleanup_dist_env_and_memory": _nothing,
    },
}  # fmt: skip


class _Module(ModuleType):
    """A module of `_NAMES`. Importing any other name of vLLM's from it fails, and says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"nanovllm has no {self.__name__}.{name}; docs/vllm.md lists what a script may import")


def is_installed() -> bool:
    """Whether `vllm` is nanovllm."""
    return isinstance(sys.modules.get("vllm"), _Module)


def install(replace: bool = False) -> None:
    """Makes `vllm` and its modules nanovllm, for this process.

    Args:
        replace: even if vLLM is installed.

    Raises:
        ImportError: vLLM is installed or imported, and `replace` is False.
    """
    if is_installed():
        return
    if not replace and ("vllm" in sys.modules or find_spec("vllm") is not None):
        raise ImportError("vLLM is installed; nanovllm.integrations.vllm.install(replace=True) takes its place")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    for name, values in _NAMES.items():
        module = _Module(name, "nanovllm, by vLLM's names.")
        vars(module).update(values)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[child] = module


def main(arguments: Sequence[str]) -> None:
    """Runs a script with its arguments, as `python script.py arguments…` would."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m nanovllm.integrations.vllm script.py [arguments …]")
    if not Path(arguments[0]).is_file():
        sys.exit(f"there is no script {arguments[0]}")
    install(replace=True)
    sys.argv = [*arguments]
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
elif not is_installed() and "vllm" not in sys.modules and find_spec("vllm") is None:
    install()
