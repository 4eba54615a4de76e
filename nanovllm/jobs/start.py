"""A job before its rows run: its preflight, its index, and the start of its LLM."""

from collections.abc import Callable
from typing import Any

from nanovllm import LLM, Config, Preflight
from nanovllm.jobs.adapters import requests_of
from nanovllm.jobs.index import Index
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.row_params import RowParams
from nanovllm.jobs.rows import KINDS_WITHOUT_LM_HEAD
from nanovllm.jobs.source import Files
from nanovllm.replicas.replicas import Replicas


def make_llm(model: str, *, data_parallel_size: int | None = None, **engine: Any) -> LLM | Replicas:
    """The LLM of a job, or several of them."""
    if data_parallel_size in (None, 1):
        return LLM(model, **engine)
    return Replicas(model, data_parallel_size=data_parallel_size, **engine)


def started_llm(options: JobOptions, index: Index, make_llm: Callable[..., LLM | Replicas]) -> LLM | Replicas:
    """The LLM that runs the rows of a job."""
    engine = {**options.engine, "seed": options.seed}
    if options.adapters:
        engine["enable_lora"] = True
        if engine.get("max_loras") is None:
            engine["max_loras"] = min(len(options.adapters), Config.max_loras)
    # Without an LM head, the weights and the KV cache take less memory.
    if index.kinds <= KINDS_WITHOUT_LM_HEAD and not (engine.get("runner") or engine.get("task")):
        engine["runner"] = "pooling"
    return make_llm(options.model, **engine)


def preflight_of(options: JobOptions) -> Preflight:
    """The preflight of a job's model."""
    names = (
        "revision", "tokenizer", "max_model_len", "generation_config", "runner", "pooler_config", "hf_overrides",
        "deterministic",
    )  # fmt: skip
    given = {name: value for name, value in options.engine.items() if name in names and value is not None}
    return Preflight(options.model, **given)


def index_of(options: JobOptions, lines: Files, preflight: Preflight) -> Index:
    """A job's rows; see Index. Raises a JobError if an adapter cannot be read."""
    recommended = preflight.get_default_sampling_params()
    adapters = requests_of(options.adapters)
    params = RowParams(recommended, options.params, options.seed, options.columns, adapters)
    return Index(lines, params, preflight.max_model_len, with_data=options.output == "-")
