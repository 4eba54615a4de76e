"""vLLM's module names, so that a script written for vLLM runs as it is.

    python -m nanovllm.integrations.vllm script.py arguments…

runs a script with nanovllm in place of `vllm`. `import nanovllm.integrations.vllm` does the same for the imports after
it if vLLM is not installed; `install(replace=True)` does it even if vLLM is. docs/vllm.md says which names and keywords
work.
"""

import argparse
import inspect
import itertools
import json
import logging
import random
import runpy
import sys
import uuid
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

import nanovllm
from nanovllm import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams, StructuredOutputsParams
from nanovllm.accepted import (
    ACCEPTED_OPTIONS,
    CHOOSE,
    GENERATES_TEXT,
    MERGE,
    NO_TRANSFERS,
    RENAMED_OPTIONS,
    REPLICAS,
    TEXT_ONLY,
    UPDATE_WEIGHTS,
)

_OFFLINE = "llm.generate() takes all prompts at once, and llm.generate_iter() gives results as they finish"

# Names that fail when a script uses them, by what to do instead: classes, and imports.
REFUSED_CLASSES = {
    _OFFLINE: "AsyncLLM AsyncLLMEngine LLMEngine",
    CHOOSE: "BeamSearchParams",
    GENERATES_TEXT: "PoolingParams PoolerConfig PoolingRequestOutput EmbeddingRequestOutput "
    "ClassificationRequestOutput ScoringRequestOutput",
    MERGE: "LoRARequest",
    UPDATE_WEIGHTS: "Worker",
    NO_TRANSFERS: "KVTransferConfig",
    "docs/models.md lists the architectures, and says how to add one": "ModelRegistry",
}
REFUSED_IMPORTS = {
    TEXT_ONLY: "vllm.assets vllm.multimodal",
    "nanovllm serves no API; `nanovllm run-batch` answers the requests of a file": "vllm.entrypoints",
    "nanovllm reads no environment variable of vLLM's; leave it out": "vllm.envs",
    MERGE: "vllm.lora",
    UPDATE_WEIGHTS: "vllm.model_executor",
    REPLICAS: "vllm.utils.get_ip vllm.utils.get_open_port vllm.utils.network_utils",
}


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


class _Refused(type):
    """A class that a script may import and name in types. Calling it, or reading an attribute, fails."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"nanovllm has no {cls.__name__}; {cls.__doc__}")

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"nanovllm has no {cls.__name__}.{name}; {cls.__doc__}")


class _Option(argparse.Action):
    """`--name value`, `--name` for True, or `--no-name` for False."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, value if not str(option_string).startswith("--no-") else False)


class _EngineArgs:
    """The options of LLM, from keywords or from a command line. None is an option's default."""

    @staticmethod
    def add_cli_args(parser: Any, async_args_only: bool = False) -> Any:
        for name in _OPTIONS:
            dashed = name.replace("_", "-")
            names = [*_SHORT_OPTIONS.get(name, ()), f"--{dashed}", f"--no-{dashed}"]
            parser.add_argument(*names, action=_Option, dest=name, nargs="?", const=True, type=_read)
        parser.set_defaults(model=_MODEL)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        return cls(**{name: value for name, value in vars(args).items() if name in _OPTIONS})


def _read(text: str) -> Any:
    """The value of an option: JSON, "None", or else a string."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text


_MODEL = "Qwen/Qwen3-0.6B"
_SHORT_OPTIONS = {"tensor_parallel_size": ["-tp"], "pipeline_parallel_size": ["-pp"], "quantization": ["-q"]}
_OPTIONS = [*dict.fromkeys([*inspect.signature(LLM).parameters, *RENAMED_OPTIONS, *ACCEPTED_OPTIONS])]
_FIELDS = [(name, Any, field(default=_MODEL if name == "model" else None)) for name in _OPTIONS]
EngineArgs = make_dataclass("EngineArgs", _FIELDS, bases=(_EngineArgs,))


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser whose options may be written with "_" in place of "-"."""

    def __init__(self, *args: Any, **kwargs: Any):
        # A script's own option takes the place of one of LLM's that not every version of vLLM has.
        super().__init__(*args, **{"conflict_handler": "resolve", **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(list(map(self._spelled, sys.argv[1:] if args is None else args)), namespace)

    def _spelled(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        dashed = name.replace("_", "-")
        options = self._option_string_actions
        return dashed + equals + value if name not in options and dashed in options else argument


def get_tokenizer(tokenizer_name: str, *, tokenizer_mode: str = "auto", **options: Any) -> Any:
    """transformers' tokenizer. Code of the model's directory is never run."""
    from transformers import AutoTokenizer

    if tokenizer_mode == "mistral":
        raise ValueError(f"tokenizer_mode cannot be 'mistral'; {ACCEPTED_OPTIONS['tokenizer_mode'].reason}")
    options |= {"use_fast": tokenizer_mode != "slow", "cache_dir": options.pop("download_dir", None)}
    return AutoTokenizer.from_pretrained(tokenizer_name, **{**options, "trust_remote_code": False})


def set_random_seed(seed: int | None) -> None:
    """Seeds the generators of Python, NumPy and PyTorch."""
    import numpy
    import torch

    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)


_ENDS = "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """vLLM's functions that end its processes; `LLM.close` and the LLM's end do that here."""


_VALUES: dict[str, Any] = {
    **{name: _Refused(name, (), {"__doc__": advice}) for advice in REFUSED_CLASSES
       for name in REFUSED_CLASSES[advice].split()},
    **{each.__name__: each for each in (
        LLM, SamplingParams, StructuredOutputsParams, RequestOutput, CompletionOutput, Logprob, TextPrompt,
        TokensPrompt, EngineArgs, FlexibleArgumentParser, get_tokenizer, set_random_seed,
    )},
    "AsyncEngineArgs": EngineArgs,
    "CompilationConfig": SimpleNamespace,
    "Counter": itertools.count,
    "GuidedDecodingParams": StructuredOutputsParams,
    "PromptType": Any,
    "RequestOutputKind": Enum("RequestOutputKind", {"CUMULATIVE": 0, "DELTA": 1, "FINAL_ONLY": 2}),
    "StructuredOutputsConfig": SimpleNamespace,
    # Scripts compare the version of vLLM before they choose names and keywords.
    "__version__": f"0.11.0+nanovllm.{nanovllm.__version__}",
    **dict.fromkeys(_ENDS.split(), _nothing),
    "init_logger": logging.getLogger,
    "random_uuid": lambda: uuid.uuid4().hex,
}  # fmt: skip
# Scripts that train beside vLLM replace this check with a mock before they make the LLM.
_VALUES["Worker"]._assert_memory_footprint_increased_during_profiling = _nothing

MODULES = {
    "vllm": "LLM SamplingParams RequestOutput CompletionOutput TextPrompt TokensPrompt EngineArgs AsyncEngineArgs "
    "__version__ LLMEngine AsyncLLMEngine PoolingParams PoolingRequestOutput ModelRegistry",
    "vllm.config": "CompilationConfig StructuredOutputsConfig KVTransferConfig PoolerConfig",
    "vllm.distributed": _ENDS,
    "vllm.distributed.parallel_state": _ENDS,
    "vllm.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "vllm.engine.llm_engine": "LLMEngine",
    "vllm.entrypoints.llm": "LLM",
    "vllm.envs": "",
    "vllm.inputs": "TextPrompt TokensPrompt PromptType",
    "vllm.inputs.data": "TextPrompt TokensPrompt PromptType",
    "vllm.logger": "init_logger",
    "vllm.logprobs": "Logprob",
    "vllm.lora.request": "LoRARequest",
    "vllm.model_executor": "set_random_seed",
    "vllm.model_executor.parallel_utils.parallel_state": "destroy_model_parallel",
    "vllm.model_executor.utils": "set_random_seed",
    "vllm.outputs": "RequestOutput CompletionOutput PoolingRequestOutput EmbeddingRequestOutput "
    "ClassificationRequestOutput ScoringRequestOutput",
    "vllm.pooling_params": "PoolingParams",
    "vllm.sampling_params": "SamplingParams StructuredOutputsParams GuidedDecodingParams RequestOutputKind "
    "BeamSearchParams",
    "vllm.sequence": "Logprob",
    "vllm.tokenizers": "get_tokenizer",
    "vllm.transformers_utils.tokenizer": "get_tokenizer",
    "vllm.utils": "FlexibleArgumentParser Counter random_uuid",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.utils.torch_utils": "set_random_seed",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.version": "__version__",
    "vllm.worker.worker": "Worker",
}


def _missing(name: str) -> str:
    """The message of an import of `name`, a module or a module's name, that has no counterpart."""
    for advice, names in REFUSED_IMPORTS.items():
        if any(f"{name}.".startswith(f"{refused}.") for refused in names.split()):
            return f"nanovllm has no {name}; {advice}"
    return f"nanovllm has no {name}; docs/vllm.md lists what a script may import"


class _Module(ModuleType):
    """A module of `MODULES`. Importing any other name of vLLM's from it fails, and says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(_missing(f"{self.__name__}.{name}"))


class _Finder:
    """Says why a module of vLLM's is missing. It is the last finder, and finds nothing."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("vllm.") and is_installed():
            raise ModuleNotFoundError(_missing(name), name=name)


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
    for name in sorted({part for each in MODULES for part in itertools.accumulate(each.split("."), "{}.{}".format)}):
        module = _Module(name, "nanovllm, by vLLM's names.")
        vars(module).update({each: _VALUES[each] for each in MODULES.get(name, "").split()})
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[child] = module
    sys.meta_path.append(_Finder)


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
