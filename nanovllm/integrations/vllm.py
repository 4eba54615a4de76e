"""vLLM's module names, so that a script written for vLLM runs as it is.

    python -m nanovllm.integrations.vllm script.py arguments…
    python -m nanovllm.integrations.vllm -m package.module arguments…

runs a script with nanovllm in place of `vllm`, also in the Python processes that it starts.
`import nanovllm.integrations.vllm` does the same for the imports after it if vLLM is not installed;
`install(replace=True)` does it even if vLLM is. docs/vllm.md says which names and keywords work.
"""

import argparse
import functools
import inspect
import itertools
import json
import logging
import os
import random
import runpy
import sys
import uuid
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from enum import IntEnum
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

from nanovllm import (
    LLM,
    CompletionOutput,
    Logprob,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.accepted import (
    ACCEPTED_OPTIONS,
    ADAPTERS,
    CHOOSE,
    NO_TRANSFERS,
    RENAMED_OPTIONS,
    REPLICAS,
    TEXT_ONLY,
    UPDATE_WEIGHTS,
)
from nanovllm.outputs import RequestMetrics
from nanovllm.pooling_outputs import PooledOutput

# Scripts compare the version of vLLM before they choose names and keywords.
VERSION = "0.11.0"
# On the path of child processes, where `import vllm` then finds a file that calls `install`.
_FOR_CHILDREN = Path(__file__).parent / "for_child_processes"

_OFFLINE = "llm.generate() takes all prompts at once, and llm.generate_iter() gives results as they finish"

# Names that fail when a script uses them, by what to do instead: classes, and imports.
REFUSED_CLASSES = {
    _OFFLINE: "AsyncLLM AsyncLLMEngine LLMEngine",
    CHOOSE: "BeamSearchParams",
    UPDATE_WEIGHTS: "Worker",
    NO_TRANSFERS: "KVTransferConfig",
    "LLM takes each option as a keyword": "ModelConfig VllmConfig",
    "docs/models.md lists the architectures, and says how to add one": "ModelRegistry",
}
REFUSED_IMPORTS = {
    TEXT_ONLY: "vllm.assets vllm.multimodal",
    "nanovllm serves no API; `nanovllm run-batch` answers the requests of a file": "vllm.entrypoints",
    ADAPTERS: "vllm.lora",
    "SamplingParams(logits_processors=[…]) takes functions": "vllm.v1.sample",
    "use SamplingParams(structured_outputs=StructuredOutputsParams(…))": "vllm.model_executor.guided_decoding",
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


def text(value: str) -> str | None:
    return None if value == "None" else value


def number(value: str) -> int | float | None:
    """`value` as a number. "8k" is 8,000 and "8K" is 8,192, as in vLLM."""
    if value == "None":
        return None
    if scale := {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}.get(value[-1:]):
        return int(float(value[:-1]) * scale)
    return int(value) if value.strip("+-").isdigit() else float(value)


def json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return text(value)


_PARAMETERS = inspect.signature(LLM).parameters
# The options' defaults. Scripts read these; None means the default of any other option that LLM accepts.
_OPTIONS: dict[str, Any] = {
    **{name: parameter.default for name, parameter in _PARAMETERS.items()},
    **dict.fromkeys([*RENAMED_OPTIONS, *ACCEPTED_OPTIONS]),
    "model": "Qwen/Qwen3-0.6B",
    **dict(pipeline_parallel_size=1, data_parallel_size=1, swap_space=4, trust_remote_code=False),
}
_SHORT = dict(tensor_parallel_size="-tp", pipeline_parallel_size="-pp", quantization="-q", compilation_config="-O")
# How the names of switches begin, among the options that accept any value.
_SWITCHES = "async_ disable_ enable_ guided_decoding_disable_ language_ multi_ skip_ trust_ use_ worker_use_"


def _reading(name: str) -> dict[str, Any]:
    """How argparse reads an option: `--name` and `--no-name`, or `--name value`."""
    switch, parameter = {"action": argparse.BooleanOptionalAction}, _PARAMETERS.get(RENAMED_OPTIONS.get(name, name))
    if parameter is not None:
        kind = str(parameter.annotation)
        if name in ("hf_overrides", "pooler_config", "override_pooler_config"):
            return {"type": json_or_text}
        return switch if "bool" in kind else {"type": number if "int" in kind or "float" in kind else text}
    values = ACCEPTED_OPTIONS[name].values
    is_switch = name.startswith(tuple(_SWITCHES.split())) if values is None else any(each is False for each in values)
    return switch if is_switch else {"type": json_or_text}


class _EngineArgs:
    """The options of LLM, from keywords or from a command line."""

    @staticmethod
    def add_cli_args(parser: Any, async_args_only: bool = False) -> Any:
        for name, default in _OPTIONS.items():
            names = [*_SHORT.get(name, "").split(), f"--{name.replace('_', '-')}"]
            parser.add_argument(*names, dest=name, default=default, **_reading(name))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        return cls(**{name: value for name, value in vars(args).items() if name in _OPTIONS})


_FIELDS = [(name, Any, field(default=default)) for name, default in _OPTIONS.items()]
EngineArgs = make_dataclass("EngineArgs", _FIELDS, bases=(_EngineArgs,), namespace={"__module__": __name__})


def _refuse_file(value: str) -> None:
    raise argparse.ArgumentTypeError("configuration files are not read; write the file's options on the command line")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser whose options may be written with "_" in place of "-"."""

    def __init__(self, *args: Any, **kwargs: Any):
        # A script's own option takes the place of one of LLM's that not every version of vLLM has.
        super().__init__(*args, **{"conflict_handler": "resolve", "allow_abbrev": False, **kwargs})
        self.add_argument("--config", type=_refuse_file, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

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


class Counter:
    """Counts up from `start`."""

    def __init__(self, start: int = 0):
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        self.counter = 0


class CompilationConfig(SimpleNamespace):
    """Only holds its arguments."""

    def __init__(self, level: int | None = None, **options: Any):
        super().__init__(level=level, **options)


class _Platform:
    """The device that `LLM(device="auto")` chooses."""

    seed_everything = staticmethod(set_random_seed)
    device_type = property(lambda self: "cuda" if import_module("torch").cuda.is_available() else "cpu")

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False


def init_logger(name: str) -> logging.Logger:
    """Python's logger of this name. Its `info_once` and the like log each message once."""
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        vars(logger).setdefault(f"{level}_once", functools.cache(getattr(logger, level)))
    return logger


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Prints the first numbers, and how many there are."""
    numbers = ", ".join(f"{number:.4f}" for number in embeds[:16]) + ", ..." * (len(embeds) > 16)
    print(f"{prefix}: [{numbers}] (size={len(embeds)})")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """vLLM's functions that end its processes; `LLM.close` and the LLM's end do that here."""


_ENDS = "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel"
_TYPES = "PromptType PromptInputs AnyTokenizer PromptLogprobs SampleLogprobs ChatCompletionMessageParam"
_POOLED_REQUESTS = "EmbeddingRequestOutput ClassificationRequestOutput ScoringRequestOutput"
_POOLED = "PoolingOutput EmbeddingOutput ClassificationOutput ScoringOutput"
_ENUMS = {
    "CompilationLevel": "NO_COMPILATION DYNAMO_AS_IS DYNAMO_ONCE PIECEWISE",
    "CompilationMode": "NONE STOCK_TORCH_COMPILE DYNAMO_TRACE_ONCE VLLM_COMPILE",
    "RequestOutputKind": "CUMULATIVE DELTA FINAL_ONLY",
    "SamplingType": "GREEDY RANDOM RANDOM_SEED",
    "UsageContext": "UNKNOWN_CONTEXT LLM_CLASS API_SERVER OPENAI_API_SERVER OPENAI_BATCH_RUNNER ENGINE_CONTEXT",
}
_VALUES: dict[str, Any] = {
    **{name: _Refused(name, (), {"__doc__": advice}) for advice in REFUSED_CLASSES
       for name in REFUSED_CLASSES[advice].split()},
    **{name: IntEnum(name, members, start=0, module=__name__) for name, members in _ENUMS.items()},
    **{each.__name__: each for each in (
        LLM, SamplingParams, StructuredOutputsParams, RequestOutput, CompletionOutput, RequestMetrics, Logprob,
        LoRARequest, PoolingParams, PoolingRequestOutput, TextPrompt, TokensPrompt, EngineArgs, FlexibleArgumentParser,
        CompilationConfig, Counter, get_tokenizer, init_logger, print_embeddings, set_random_seed,
    )},
    **dict.fromkeys(_POOLED_REQUESTS.split(), PoolingRequestOutput),
    **dict.fromkeys(_POOLED.split(), PooledOutput),
    **dict.fromkeys(_TYPES.split(), Any),
    **dict.fromkeys(_ENDS.split(), _nothing),
    "AsyncEngineArgs": EngineArgs,
    "GuidedDecodingParams": StructuredOutputsParams,
    "StructuredOutputsConfig": SimpleNamespace,
    "PoolerConfig": SimpleNamespace,
    "__version__": VERSION,
    "__version_tuple__": tuple(map(int, VERSION.split("."))),
    "current_platform": _Platform(),
    "random_uuid": lambda: uuid.uuid4().hex,
}  # fmt: skip
# Scripts that train beside vLLM replace this check with a mock before they make the LLM.
_VALUES["Worker"]._assert_memory_footprint_increased_during_profiling = _nothing

MODULES = {
    "vllm": "LLM SamplingParams RequestOutput CompletionOutput TextPrompt TokensPrompt EngineArgs AsyncEngineArgs "
    "__version__ __version_tuple__ LLMEngine AsyncLLMEngine PoolingParams PoolingRequestOutput "
    "EmbeddingRequestOutput ClassificationRequestOutput ScoringRequestOutput EmbeddingOutput ClassificationOutput "
    "ScoringOutput PoolingOutput ModelRegistry",
    "vllm.config": "CompilationConfig CompilationLevel CompilationMode StructuredOutputsConfig KVTransferConfig "
    "ModelConfig PoolerConfig VllmConfig",
    "vllm.config.pooler": "PoolerConfig",
    "vllm.distributed": _ENDS,
    "vllm.distributed.parallel_state": _ENDS,
    "vllm.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "vllm.engine.llm_engine": "LLMEngine",
    "vllm.entrypoints.chat_utils": "ChatCompletionMessageParam",
    "vllm.entrypoints.llm": "LLM",
    "vllm.envs": "",
    "vllm.inputs": "TextPrompt TokensPrompt PromptType PromptInputs",
    "vllm.inputs.data": "TextPrompt TokensPrompt PromptType PromptInputs",
    "vllm.logger": "init_logger",
    "vllm.logprobs": "Logprob PromptLogprobs SampleLogprobs",
    "vllm.lora.request": "LoRARequest",
    "vllm.model_executor": "set_random_seed",
    "vllm.model_executor.parallel_utils.parallel_state": "destroy_model_parallel",
    "vllm.model_executor.utils": "set_random_seed",
    "vllm.outputs": f"RequestOutput CompletionOutput PoolingRequestOutput {_POOLED_REQUESTS} {_POOLED}",
    "vllm.platforms": "current_platform",
    "vllm.pooling_params": "PoolingParams",
    "vllm.sampling_params": "SamplingParams StructuredOutputsParams GuidedDecodingParams RequestOutputKind "
    "SamplingType BeamSearchParams",
    "vllm.sequence": "Logprob PromptLogprobs SampleLogprobs RequestMetrics",
    "vllm.tokenizers": "get_tokenizer",
    "vllm.transformers_utils.tokenizer": "get_tokenizer AnyTokenizer",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.utils": "FlexibleArgumentParser Counter random_uuid set_random_seed",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.utils.print_utils": "print_embeddings",
    "vllm.utils.torch_utils": "set_random_seed",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.engine.llm_engine": "LLMEngine",
    "vllm.version": "__version__ __version_tuple__",
    "vllm.worker.worker": "Worker",
}
# A class is of the first module that has its name, where a child process finds it again.
for _module, _name in [(module, name) for module in reversed(MODULES) for name in MODULES[module].split()]:
    if getattr(_VALUES[_name], "__module__", None) in (__name__, *MODULES):
        _VALUES[_name].__module__ = _module


def _missing(name: str) -> str:
    """The message of an import of `name`, a module or a module's name, that has no counterpart."""
    for advice, names in REFUSED_IMPORTS.items():
        if any(f"{name}.".startswith(f"{refused}.") for refused in names.split()):
            return f"nanovllm has no {name}; {advice}"
    return f"nanovllm has no {name}; docs/vllm.md lists what a script may import"


class _Module(ModuleType):
    """A module of `MODULES`. It has no other name of vLLM's, except that vllm.envs has the environment's variables."""

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == "vllm.envs" and name.isupper():
            return os.environ.get(name)
        raise AttributeError(name if name.startswith("__") else _missing(f"{self.__name__}.{name}"))


class _Metadata(Distribution):
    """The installed package `vllm`, for `importlib.metadata.version`."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return _FOR_CHILDREN / path


class _Finder:
    """Says why a module or a name of vLLM's is missing, and finds no module."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("vllm.") and is_installed():
            # Without the error's `name`: `from vllm import name` would drop the message of an error that has it.
            raise ModuleNotFoundError(_missing(name))

    @staticmethod
    def find_distributions(context: Any) -> list[Distribution]:
        return [_Metadata()] if context.name == "vllm" and is_installed() else []


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
    sys.meta_path.insert(0, _Finder)


def main(arguments: Sequence[str]) -> None:
    """Runs a script with its arguments as `python script.py arguments…` would, or a module as `python -m` would."""
    is_module = arguments[:1] == ["-m"]
    words = [*arguments[is_module:]]
    if not words or words[0].startswith("-"):
        sys.exit("usage: python -m nanovllm.integrations.vllm (script.py | -m module) [arguments …]")
    script = words[0]
    if not is_module and not Path(script).is_file():
        sys.exit(f"there is no script {script}")
    install(replace=True)
    sys.argv = words
    # First the script's directory, or for a module the working directory. multiprocessing's spawn passes on the path;
    # other child processes read the environment.
    sys.path[:1] = [str(Path(script).resolve().parent), str(_FOR_CHILDREN)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_FOR_CHILDREN), os.environ.get("PYTHONPATH")]))
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    import_module("nanovllm.integrations.vllm").main(sys.argv[1:])  # so that a script's import of it finds the same
elif not is_installed() and "vllm" not in sys.modules and find_spec("vllm") is None:
    install()
