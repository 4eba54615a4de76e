"""The other engines that bench.py runs the same requests through."""

import gc
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.timing import Timing, errors_as_text, say, timed
from benchmarks.workloads import Requests


@dataclass(frozen=True)
class Task:
    """The requests, model and options that both engines get.

    has_weights: the directory holds weights, not only a config.
    quantization: None if weights keep the checkpoint's dtype.
    """

    requests: Requests
    directory: str
    has_weights: bool
    dtype: str
    device: str
    max_model_len: int
    prefix_caching: bool
    tensor_parallel_size: int
    seed: int
    quantization: str | None
    kv_cache_dtype: str


class Peer(Protocol):
    settings: dict[str, Any]  # its version and options, for the report

    def run(self, requests: Requests) -> list[list[int]]:
        """The completions' token ids."""

    def forget(self) -> None:
        """Empties its prefix cache."""


class TransformersPeer:
    """transformers' `generate` as a script would call it, with one left-padded batch that runs until the longest
    request ends."""

    def __init__(self, task: Task):
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, task.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(task.directory, dtype=dtype)
        self.model = model.to(task.device).eval()
        self.settings = {"version": importlib.metadata.version("transformers"), "threads": torch.get_num_threads()}

    @torch.inference_mode()
    def run(self, requests: Requests) -> list[list[int]]:
        max_length = max(map(len, requests.prompts))
        padded = torch.zeros(len(requests.prompts), max_length, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, prompt in enumerate(requests.prompts):
            padded[row, max_length - len(prompt) :] = torch.tensor(prompt)
            mask[row, max_length - len(prompt) :] = 1
        sampling = dict(requests.sampling)
        if sampling["temperature"]:
            # Its default top_k is 50, and 0 turns it off.
            sampling = {"do_sample": True, **sampling, "top_k": max(sampling.get("top_k", 0), 0)}
        else:
            sampling = {"do_sample": False, "repetition_penalty": sampling.get("repetition_penalty", 1.0)}
        outputs = self.model.generate(
            input_ids=padded.to(self.model.device), attention_mask=mask.to(self.model.device), eos_token_id=None,
            pad_token_id=0, max_new_tokens=max(requests.max_tokens), **sampling,
        )  # fmt: skip
        completions = outputs[:, max_length:].tolist()
        return [completion[:length] for completion, length in zip(completions, requests.max_tokens, strict=True)]

    def forget(self) -> None:
        pass


class VllmPeer:
    """vLLM's `LLM.generate`. All options that `Task` does not name keep vLLM's defaults."""

    def __init__(self, task: Task):
        import vllm

        options: dict[str, Any] = {
            "dtype": task.dtype, "max_model_len": task.max_model_len, "seed": task.seed,
            "enable_prefix_caching": task.prefix_caching, "tensor_parallel_size": task.tensor_parallel_size,
        }  # fmt: skip
        self._more: dict[str, Any] = {}
        if task.quantization is not None:
            options["quantization"] = task.quantization
        if task.kv_cache_dtype != "auto":
            options["kv_cache_dtype"] = task.kv_cache_dtype
        if not task.has_weights:
            options["load_format"] = "dummy"
        if not any(Path(task.directory).glob("tokenizer*")):
            options["skip_tokenizer_init"] = True
            self._more["detokenize"] = False  # nanovllm has no tokenizer there either, so neither engine makes text
        self._sampling_params = vllm.SamplingParams
        self.llm = vllm.LLM(task.directory, **options)
        self.settings = {"version": vllm.__version__, **options}
        with suppress(AttributeError):  # vLLM's own choice, if this version has the attribute
            self.settings["max_num_seqs"] = self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    def run(self, requests: Requests) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in requests.prompts]
        params = requests.sampling_params(self._sampling_params, **self._more)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        self.llm.reset_prefix_cache()


PEERS: dict[str, Callable[[Task], Peer]] = {"transformers": TransformersPeer, "vllm": VllmPeer}


def check_peer(name: str, sampling: dict[str, Any], is_fp8: bool = False) -> None:
    """Ends the script, before anything is measured, if the other engine cannot run these requests."""
    if name == "transformers" and is_fp8:
        raise SystemExit("transformers would not compute in FP8; use --vs vllm, or leave out the options of FP8")
    if importlib.util.find_spec(name) is None:
        raise SystemExit(
            f"--vs {name} needs {name} in this virtual environment: pip install {name}. It may want another PyTorch "
            "than this one; then use a virtual environment made for both"
        )
    unknown = {"presence_penalty", "frequency_penalty", "n", "logprobs"} & set(sampling)
    if name == "transformers" and unknown:
        raise SystemExit(f"transformers has no {' or '.join(sorted(unknown))}; use --vs vllm")


def measure_peer(name: str, task: Task, ours: Timing, repeats: int) -> dict[str, Any]:
    """The other engine's part of the report. Our engine must be closed."""
    if name == "vllm" and torch.device(task.device).type == "cpu" and torch.cuda.is_available():
        raise SystemExit("vLLM would run on the GPU that --device cpu leaves out; use --device cuda")
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    requests = task.requests
    say(f"{name}: loading the model")
    began = time.perf_counter()
    with errors_as_text():
        peer = PEERS[name](task)
    timing = timed(name, lambda: peer.run(requests), peer.forget, repeats, time.perf_counter() - began)
    if [len(completion) for completion in timing.tokens] != requests.max_tokens:
        raise SystemExit(f"{name} returned other numbers of tokens than it was asked for, so the times say nothing")
    report = {"settings": peer.settings, **timing.report(requests)}
    compared: dict[str, Any] = {
        f"ratio_to_{name}": timing.median / ours.median,
        f"ratio_to_{name}_of_first_calls": timing.first_seconds / ours.first_seconds,
    }
    if task.has_weights and not requests.sampling["temperature"]:
        num_equal = sum(a == b for a, b in zip(ours.tokens, timing.tokens, strict=True))
        compared["requests_with_equal_tokens"] = f"{num_equal} of {len(ours.tokens)}"
    return {f"{name}_{key}": value for key, value in report.items()} | compared
