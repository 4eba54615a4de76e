"""Which steps are captured, in which sizes, and what follows if memory runs out. On a CPU, a graph is the function
itself.

The captures on a GPU: test_gpu_engine.py.
"""

import gc
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.long import long
from support.model_factory import read_tensors, save_model
from support.slot_adapters import changed_names, completed_in_slots, load_slots, random_adapter
from support.steps import scheduled, step_of

from nanovllm import LLM, SamplingParams
from nanovllm.attention.prefix_groups import PrefixGroups
from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampler import Sampled, SamplingNeeds, row_multiple
from nanovllm.models.decoder import CausalLM
from nanovllm.ops import library
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.low_rank import low_rank_variant
from nanovllm.runner import cuda_graph, model_runner, settings, step_program, warm_up
from nanovllm.runner.cuda_graph import CudaGraphs
from nanovllm.runner.memory import check_graphs_fit, graph_bytes
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.sequence_table import SentStep, SequenceTable
from nanovllm.runner.step_in_flight import StepInFlight
from nanovllm.runner.step_program import StepProgram
from nanovllm.runner.step_sizes import (
    StepRows,
    StepSize,
    StepSizes,
    decode_ladder,
    max_tokens_beside_decodes,
    prompt_ladder,
)
from nanovllm.sampling_params import MAX_LOGPROBS

# Sizes


def make_sizes(
    max_num_seqs: int,
    max_num_tokens: int = 2**20,
    captures_prompts: bool = True,
    num_ranks: int = 1,
    max_model_len: int = 4096,
) -> StepSizes:
    multiple = row_multiple(Parallel(0, num_ranks))
    return StepSizes.of(max_num_seqs, max_num_tokens, max_model_len, 1024, 1e9, True, captures_prompts, multiple)


def make_program(sizes: StepSizes, parallel: Parallel = Parallel(), **parts: Any) -> StepProgram:  # noqa: B008 (frozen)
    """A program whose halves have names, but cannot be called."""
    parts = {
        "model": SimpleNamespace(variant_key=lambda num_tokens: num_tokens > 64),
        "backend": SimpleNamespace(variant_key=lambda max_num_decodes, has_prompts: max_num_decodes > 256),
        "table": SimpleNamespace(groups_prefixes=False, has_adapters=False),
        "sampler": None,
        "kv_cache": None,
        "graphs": None,
        **parts,
    }
    hidden_states = torch.zeros(sizes.padded_sampled(sizes.max_num_rows), 1024, dtype=torch.bfloat16)
    return StepProgram(sizes=sizes, hidden_states=hidden_states, parallel=parallel, use_kernels=False, **parts)


def size_of(sizes: StepSizes, *parts: tuple[int, int], num_sampled: int | None = None) -> tuple[StepSize, bool]:
    """The size of a step of sequences with (new tokens, tokens before them). The first `num_sampled` sample."""
    num_sampled = len(parts) if num_sampled is None else num_sampled
    step = step_of(*(
        (scheduled([1] * (new + before), [0], entry=row), new, row < num_sampled)
        for row, (new, before) in enumerate(parts)
    ))  # fmt: skip
    return sizes.size_of(StepRows.of(step), step.num_decodes)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 12, 15, 16, 17, 20, 100, 256, 257, 300, 500, 512, 1024])
def test_every_batch_has_a_captured_size_and_little_padding(largest):
    """The largest batch once had no graph, because the sizes stopped below it."""
    ladder = decode_ladder(largest)
    assert ladder == sorted(set(ladder)) and ladder[0] == 1 and ladder[-1] == largest
    sizes = make_sizes(largest)
    for num_rows in {*range(1, min(largest, 300) + 1), largest - 1 or 1, largest}:
        size, is_captured = size_of(sizes, *[(1, 3)] * num_rows)
        padded = size.num_rows
        assert is_captured and size == StepSize(padded, padded, padded, 0, padded, 1, False)
        assert padded in ladder and num_rows <= padded <= max(2 * num_rows - 1, num_rows + 15, int(num_rows * 1.125))


def test_a_kernel_that_cannot_be_compiled_beforehand_is_only_noted(caplog, capsys):
    """The step that needs it raises the error again. The thread itself must not print one."""

    def fails() -> None:
        raise RuntimeError("no such instruction")

    with caplog.at_level("DEBUG", logger="nanovllm"), warm_up.Compiling() as compiling:
        compiling.start(fails)
    assert "no such instruction" in caplog.text
    assert capsys.readouterr().err == ""


def test_ctrl_c_leaves_no_kernel_being_compiled(monkeypatch):
    """The threads hold the model and launch kernels, so they must end before its memory is given back."""
    started, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def compiles() -> None:
        started.set()
        may_end.wait()
        ended.set()

    join, joins = threading.Thread.join, []

    def interrupted_once(thread: threading.Thread) -> None:
        joins.append(thread)
        may_end.set()
        if len(joins) == 1:
            raise KeyboardInterrupt
        join(thread)

    with pytest.raises(KeyboardInterrupt), warm_up.Compiling() as compiling:
        compiling.start(compiles)
        started.wait()
        monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    assert ended.is_set() and len(joins) == 2


def test_no_more_rows_are_captured_than_a_step_has_tokens():
    sizes = make_sizes(500, max_num_tokens=20)
    assert sizes.decode_sizes[-1] == 20
    size, _ = size_of(sizes, (1, 3), (19, 0))
    assert size.num_rows == size.num_tokens == 20


@pytest.mark.parametrize(
    ("usual", "largest"), [(1, 1), (5, 5), (63, 64), (256, 256), (768, 2048), (512, 2048), (3072, 3072), (1000, 1001)]
)
def test_steps_with_prompts_have_few_sizes_and_little_padding(usual, largest):
    """A model with large layers once had its usual step of 768 tokens padded to 1,024, because the sizes were quarters
    of the size for very many sequences.
    """
    sizes = prompt_ladder(usual, largest)
    assert sizes == sorted(set(sizes)) and usual in sizes and sizes[-1] == largest and len(sizes) <= 20
    assert all(size % 64 == 0 for size in sizes if size not in (usual, largest))
    assert all(after - before <= max(64, usual / 16 + 63) for before, after in pairwise(sizes) if after <= usual)


def test_a_step_with_prompts_takes_the_next_larger_size():
    """There are as many rows as the step may have, because an unused row costs only its attention. The tiles suffice
    for prompts of 32 tokens and more."""
    sizes = make_sizes(8, max_num_tokens=256)
    assert size_of(sizes, (1, 9), (30, 0)) == (StepSize(8, 64, 8, 4, 8, 64, False), True)
    assert size_of(sizes, (1, 9), (63, 0)) == (StepSize(8, 64, 8, 4, 8, 64, False), True)
    assert size_of(sizes, (1, 9), (64, 0)) == (StepSize(8, 128, 8, 7, 8, 128, False), True)
    assert size_of(sizes, (256, 0)) == (StepSize(8, 256, 8, 12, 8, 256, False), True)
    # A larger one is not captured, and not padded.
    assert size_of(sizes, (1, 9), (256, 0)) == (StepSize(2, 257, 2, 4, 1, 256, False), False)
    # 64 tokens have a tile of 64 queries and 3 prompts of 32 tokens or less; more of those take a larger size.
    many = make_sizes(100, max_num_tokens=256)
    assert size_of(many, *[(2, 0)] * 4) == (StepSize(64, 64, 64, 4, 64, 64, False), True)
    assert size_of(many, *[(2, 0)] * 5) == (StepSize(100, 128, 100, 7, 100, 128, False), True)
    assert size_of(many, *[(2, 0)] * 13) == (StepSize(100, 256, 100, 13, 100, 256, False), True)
    assert size_of(many, *[(2, 0)] * 14) == (StepSize(14, 28, 14, 14, 0, 2, False), False)
    assert size_of(many, *[(1, 9)] * 70, (2, 0)) == (StepSize(100, 128, 100, 7, 100, 128, False), True)


def test_sampled_rows_are_padded_to_a_multiple_of_the_ranks():
    """Each rank samples an equal share, which begins at a multiple of 16 bytes in every tensor. With another alignment
    it would need its own kernels, which were once compiled in the middle of a call.
    """
    sizes = make_sizes(20, max_num_tokens=256, num_ranks=4)
    for num_rows, expected in ((1, 16), (2, 16), (16, 16), (17, 32), (20, 32)):
        size, is_captured = size_of(sizes, *[(1, 3)] * num_rows)
        assert is_captured and size.num_sampled == expected
    assert size_of(sizes, (1, 9), (30, 0))[0].num_sampled == 32, "as many as may sample"
    sizes = sizes.eager()
    for num_sampled, expected in ((0, 16), (1, 16), (3, 16)):
        assert size_of(sizes, *[(1, 9)] * 3, num_sampled=num_sampled)[0].num_sampled == expected


def test_steps_are_not_padded_where_nothing_is_captured():
    """This holds before the captures too, for the step that measures memory."""
    sizes = make_sizes(8, max_num_tokens=256)
    sizes = sizes.eager()
    assert size_of(sizes, (1, 9), (1, 3), (1, 3)) == (StepSize(3, 3, 3, 0, 3, 1, False), False)
    assert size_of(sizes, (1, 9), (70, 0), num_sampled=1) == (StepSize(2, 71, 1, 2, 1, 70, False), False)
    # A backend whose graphs hold decodes alone.
    sizes = make_sizes(8, max_num_tokens=256, captures_prompts=False)
    assert size_of(sizes, (1, 9), (1, 3), (1, 3)) == (StepSize(4, 4, 4, 0, 4, 1, False), True)
    assert size_of(sizes, (1, 9), (30, 0)) == (StepSize(2, 31, 2, 1, 1, 30, False), False)


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "num_tokens"),
    [(64, 2, 61_035_008), (1024, 28, 16_896), (4096, 36, 768), (8192, 80, 512)],
)
def test_a_step_beside_decodes_is_as_large_as_its_arithmetic_allows(monkeypatch, hidden_size, num_layers, num_tokens):
    """12 TFLOP, two for each weight and token, in multiples of 256; a large model's steps are not split too small."""
    num_weights = 12 * hidden_size**2 * num_layers
    found = max_tokens_beside_decodes(hidden_size, num_weights, captures_prompts=False)
    assert found % 256 == 0 and (found == 512 or 0 <= 12e12 / (2 * num_weights) - found < 256)
    assert found == num_tokens


@pytest.mark.parametrize(
    ("hidden_size", "num_tokens"), [(64, 49_152), (1024, 3072), (4096, 768), (5120, 512), (8192, 512)]
)
def test_a_captured_step_beside_decodes_fills_its_matrix_products(hidden_size, num_tokens):
    assert max_tokens_beside_decodes(hidden_size, 1e9, captures_prompts=True) == num_tokens


# Captures


def tensors_in(outputs: torch.Tensor | Sampled | None) -> list[torch.Tensor]:
    return [] if outputs is None else list(outputs) if isinstance(outputs, tuple) else [outputs]


class Recording:
    """Takes the place of a CUDA graph: a replay calls the captured function, and leaves its results in one place."""

    def __init__(self, function: Callable[[], Any], outputs: Any):
        self._function, self._outputs = function, outputs
        for output in tensors_in(outputs):  # which a capture does not compute
            output.fill_(-77)
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for place, result in zip(tensors_in(self._outputs), tensors_in(self._function()), strict=True):
            place.copy_(result)


def copied(sampled: Sampled, *others: Any) -> StepInFlight:
    """A GPU's results are copied to the host before the next step writes over them."""
    return StepInFlight(Sampled(*(each.clone() for each in sampled)), *others)


class Recorder(CudaGraphs):
    """CudaGraphs without a GPU. `events` lists (what was done, key); `fails` says what memory is too short for."""

    def __init__(
        self,
        parked=nullcontext,
        is_alone: bool = True,
        tries_all: bool = False,
        fails: Callable[[Hashable], bool] = lambda key: False,
    ):
        self._parked, self._is_alone, self._tries_all, self._fails = parked, is_alone, tries_all, fails
        self._captured, self._tried = {}, set()
        self.events: list[tuple[str, Hashable]] = []
        self._key: Hashable = None

    def capture(self, key, function, kind=None) -> None:
        self._key = key
        super().capture(key, function, kind)

    def _try(self, function) -> None:
        self.events.append(("try", self._key))
        with self._parked():
            function()

    def _record(self, function):
        self.events.append(("record", self._key))
        if self._fails(self._key):
            raise torch.cuda.OutOfMemoryError("out of memory")
        with self._parked():
            outputs = function()
        return Recording(function, outputs), outputs


def holds(graphs: CudaGraphs, key: Hashable) -> bool:
    return graphs._captured.get(key) is not None


class Counter:
    """A function to capture: it counts its calls and returns how many there were."""

    num_calls = 0

    def __call__(self) -> torch.Tensor:
        self.num_calls += 1
        return torch.tensor(self.num_calls)


def test_a_function_is_captured_once_and_then_replayed():
    graphs, function = Recorder(), Counter()
    outputs = [graphs.run("four", function) for _ in range(3)]
    assert graphs.events == [("try", "four"), ("record", "four")] and len(graphs) == 1 and holds(graphs, "four")
    assert function.num_calls == 2 + 3, "the trial, the recording and three replays"
    assert outputs[0] is outputs[1] is outputs[2], "which a replay writes over"
    assert outputs[0].item() == 5


def test_a_capture_alone_computes_nothing():
    """Steps of decodes are captured at the start, when there is nothing to compute."""
    graphs, function = Recorder(), Counter()
    assert not holds(graphs, "four")
    assert graphs.capture("four", function) is None
    [(recording, outputs)] = graphs._captured.values()
    assert recording.num_replays == 0 and outputs.item() == -77
    graphs.run("four", function)
    assert recording.num_replays == 1 and len(graphs.events) == 2


def test_of_functions_of_one_kind_only_the_first_is_tried():
    """A trial compiles kernels, which a capture may not; a second trial of the same kernels would only take time."""
    graphs = Recorder()
    for key, kind in ((1, "a"), (2, "a"), (3, "b"), (4, "a"), (3, "b")):
        graphs.run(key, Counter(), kind)
    assert [key for what, key in graphs.events if what == "try"] == [1, 3]
    assert [key for what, key in graphs.events if what == "record"] == [1, 2, 3, 4]


def test_with_nccl_every_function_is_tried():
    """In a trial the ranks first use a collective of this size, which NCCL may have to set up."""
    graphs = Recorder(is_alone=False, tries_all=True)
    for key in (1, 2, 1):
        graphs.run(key, Counter(), "one kind")
    assert [key for what, key in graphs.events if what == "try"] == [1, 2]


def test_a_trial_that_failed_is_tried_again():
    """The kernels that it should have compiled are not compiled."""

    def fail() -> None:
        raise ZeroDivisionError

    graphs = Recorder()
    with pytest.raises(ZeroDivisionError):
        graphs.run(1, fail, "kind")
    assert len(graphs) == 0 and not holds(graphs, 1)
    graphs.run(1, Counter(), "kind")
    assert [what for what, _ in graphs.events] == ["try", "try", "record"]


def test_a_call_without_warnings_stops_only_its_own_and_passes_errors_on(recwarn):
    """test_gpu_engine.py has the warning that PyTorch writes past Python."""
    calls = []

    def warns() -> None:
        calls.append("called")
        warnings.warn("experimental", UserWarning, stacklevel=1)

    with torch.inference_mode():
        library._without_warnings(warns)
    assert calls == ["called"] and not recwarn.list
    warnings.warn("another", UserWarning, stacklevel=1)
    assert [str(each.message) for each in recwarn.list] == ["another"]
    with pytest.raises(ZeroDivisionError):
        library._without_warnings(lambda: 1 / 0)


def test_a_call_without_warnings_is_made_below_a_method_of_a_tensor():
    """Only there does PyTorch turn a binding's warnings into Python's. No binding warns on a CPU."""
    entered, before = [], []

    def profile(frame: object, event: str, argument: Any) -> None:
        if event in ("c_call", "c_return"):
            (entered.append if event == "c_call" else entered.remove)(argument.__name__)

    sys.setprofile(profile)
    try:
        library._without_warnings(lambda: before.extend(entered))
    finally:
        sys.setprofile(None)
    assert "apply_" in before


def test_a_trial_leaves_no_trace_and_works_on_parked_state(monkeypatch):
    """The real trial runs on its own stream, which waits for the work before it; later work waits for it."""
    events = []
    current, own = (
        SimpleNamespace(name=name, wait_stream=lambda other, name=name: events.append(f"{name} waits for {other.name}"))
        for name in ("current", "own")
    )

    class Entered(nullcontext):
        def __init__(self, name: str):
            self._name = name

        def __enter__(self) -> None:
            events.append(f"enter {self._name}")

        def __exit__(self, *exception: object) -> None:
            events.append(f"leave {self._name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Entered(stream.name))
    monkeypatch.setattr(cuda_graph, "cublas_lt", lambda: Entered("cuBLASLt"))
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs._stream, graphs._device, graphs._parked = own, torch.device("cpu"), lambda: Entered("parked")

    def fail() -> None:
        events.append("run")
        raise ZeroDivisionError

    expected = [
        "enter parked", "own waits for current", "enter own", "enter cuBLASLt", "run", "leave cuBLASLt", "leave own",
        "current waits for own", "leave parked",
    ]  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        graphs._try(fail)
    assert events == expected
    events.clear()
    graphs._try(lambda: events.append("run"))
    assert events == expected


def test_a_capture_without_memory_is_tried_again_when_the_cache_is_empty(monkeypatch):
    """The allocator gives its cache back by itself, but not during a capture. The trial is not repeated: other ranks
    take part in it."""
    num_failures = 1

    def fails(key: Hashable) -> bool:
        return [what for what, _ in graphs.events].count("record") <= num_failures

    graphs = Recorder(is_alone=False, tries_all=True, fails=fails)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: graphs.events.append(("empty", None)))
    graphs.capture("key", Counter())
    assert [what for what, _ in graphs.events] == ["try", "record", "empty", "record"] and holds(graphs, "key")
    graphs.events.clear()
    num_failures = 2
    with pytest.raises(torch.cuda.OutOfMemoryError, match="lower gpu_memory_utilization or max_num_seqs"):
        graphs.capture("other", Counter())
    assert [what for what, _ in graphs.events] == ["try", "record", "empty", "record"] and not holds(graphs, "other")


def test_without_memory_for_a_graph_the_function_itself_serves(monkeypatch, caplog):
    """Steps are captured in the middle of a call, which must not fail only because a graph does not fit."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    graphs, function = Recorder(fails=lambda key: key == "large"), Counter()
    with caplog.at_level(logging.WARNING, "nanovllm"):
        outputs = [graphs.run("large", function, "kind") for _ in range(3)]
    assert [output.item() for output in outputs] == [2, 3, 4], "each of its own, after the trial"
    assert not holds(graphs, "large") and len(graphs.events) == 3, "it is not tried again with every step"
    assert caplog.text.count("too little GPU memory") == 1 and "enforce_eager=True" in caplog.text
    assert graphs.run("small", Counter(), "kind").item() == 2
    # Other ranks would wait in a step that this one gave up.
    graphs = Recorder(is_alone=False, fails=lambda key: key == "large")
    with pytest.raises(torch.cuda.OutOfMemoryError, match="large"):
        graphs.run("large", function)


def test_a_trial_without_memory_leaves_the_function_itself():
    def fail() -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    graphs, function = Recorder(), Counter()
    graphs.capture("large", fail)
    assert not holds(graphs, "large") and graphs.run("large", function).item() == 1


# Steps


def make_captured(runner: ModelRunner, is_alone: bool, fails: Callable[[Hashable], bool]) -> Recorder:
    """Makes a runner on a CPU work as with CUDA graphs."""
    config, program = runner.settings.config, runner.program
    sizes = StepSizes.of(
        runner.settings.max_num_seqs, config.max_num_batched_tokens, runner.settings.max_model_len,
        runner.settings.model_config.hidden_size, 1e9, True, True,
    )  # fmt: skip
    graphs = Recorder(program.table.parked, is_alone, not is_alone, fails)
    hidden_states = torch.full((8, runner.settings.model_config.hidden_size), float("nan"))
    runner.program = replace(program, sizes=sizes, graphs=graphs, hidden_states=hidden_states)
    for tensor in program.kv_cache.tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)  # padding must not read them
    return graphs


@pytest.mark.parametrize(
    ("backend", "overlap", "num_blocks", "is_alone", "fails"),
    [
        ("torch", True, 9, True, None), ("torch", False, 9, False, None), ("torch", True, 24, True, "sample"),
        long("torch", True, 24, True, None), long("torch", True, 9, True, "forward"),
        long("triton", True, 24, True, None),
    ],
)  # fmt: skip
def test_padded_steps_give_the_tokens_of_eager_ones(
    tmp_path, monkeypatch, backend, overlap, num_blocks, is_alone, fails
):
    """Chunks, hits, tokens in flight, rows that sample and rows that do not, filters and rules that some rows have;
    preemption where there are few blocks, shared prefixes where there are many; memory that runs out for some sizes.
    Captured steps once always read the rows of the first step, if each step had its rows in another place.
    """
    monkeypatch.setattr("nanovllm.attention.splits.SHORTEST_SPLIT", 64)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(step_program, "StepInFlight", copied)
    save_model(tmp_path, seed=3, num_hidden_layers=1)
    max_num_tokens = 16 if backend == "torch" else 8  # the interpreter is slow
    prefix = [7 * i % 50 for i in range(68)]
    prompts = [[*prefix, i, 2 * i] for i in range(2)]  # the first to run, as they are to generate most
    prompts += [[i * j % 40 for j in range(1, length)] for i, length in enumerate((13, 36, 3, 20), 1)]
    kinds = [{}, {"top_k": 5, "min_p": 0.02}, {"repetition_penalty": 1.3}, {"logit_bias": {7: 4.0}, "top_p": 0.9}]
    params = [
        SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=max_num_tokens - i, ignore_eos=True, **kinds[i % 4])
        for i in range(len(prompts))
    ]
    options = {
        "device": "cpu", "kvcache_block_size": 16, "max_num_batched_tokens": 32, "max_model_len": 96,
        "max_num_seqs": 5, "num_kvcache_blocks": num_blocks, "overlap": overlap, "attention_backend": backend,
        "cache_canary": True,
    }  # fmt: skip

    def tokens(is_captured: bool) -> tuple[list[list[int]], Recorder | None]:
        with LLM(str(tmp_path), **options) as llm:
            runner, graphs = llm.engine.runner, None
            runner.program.backend._num_programs = 2  # few, because the interpreter runs programs one after the other
            if is_captured:
                which = {"forward": "num_tokens=32", "sample": "('sample', 4,"}.get(fails)
                short_of = (lambda key: which in repr(key)) if which else (lambda key: False)
                graphs = make_captured(runner, is_alone, short_of)
            found = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            found += [output.token_ids for output in llm.generate(prompts[:1], params[-1:], use_tqdm=False)]
            assert (llm.metrics()["num_preemptions"] > 0) == (num_blocks == 9)
        return found, graphs

    expected, _ = tokens(False)
    found, graphs = tokens(True)
    assert found == expected
    forwards = {key[1] for key in graphs._captured if key[0] == "forward"}
    with_prompts = {size for size in forwards if size.num_tiles}
    assert {size.num_tokens for size in with_prompts} == {32}
    assert any(size.is_grouped for size in with_prompts) == (backend == "triton")
    samplings = [key[1:] for key in graphs._captured if key[0] == "sample"]
    assert len({(needs.has_filters, needs.rules_version > 0) for _, needs in samplings}) > 1
    assert len({num_sampled for num_sampled, _ in samplings}) > 2
    replays = [captured[0].num_replays for captured in graphs._captured.values() if captured]
    assert max(replays) > 2 and (None in graphs._captured.values()) == (fails is not None)


def test_only_steps_with_adapters_have_graphs_with_adapters(tmp_path, monkeypatch):
    """Steps whose rows are all of the base replay the graphs of an engine without adapters. Mixed steps give the tokens
    of eager ones."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(step_program, "StepInFlight", copied)
    tensors = save_model(tmp_path, seed=3).state_dict()
    adapters = [random_adapter(tensors, changed_names(tensors), 4, seed) for seed in (1, 2)]
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_model_len": 96, "kvcache_block_size": 4}
    options["attention_backend"] = "torch"  # which may be captured
    params = [SamplingParams(temperature=0, max_tokens=7 + index, ignore_eos=True) for index in range(7)]
    rows = [([slot, *range(3 * index)], params[index], slot) for index, slot in enumerate((0, 1, 2, 0, 2, 1, 0))]
    found, graphs = [], []
    for is_captured in (False, True):
        with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=99, enable_lora=True, max_loras=2, **options) as llm:
            load_slots(llm, adapters)
            if is_captured:
                graphs = make_captured(llm.engine.runner, True, lambda key: False)
            found.append([completed_in_slots(llm, [row for row in rows if not row[2]])])
            if is_captured:
                of_base = {key[1] for key in graphs._captured if key[0] == "forward"}
                assert of_base and not any(size.has_adapters for size in of_base)
            found[-1].append(completed_in_slots(llm, rows))
    eager, captured = ([seq.token_ids for seqs in each for seq in seqs] for each in found)
    assert captured == eager
    with_adapters = [key for key in graphs._captured if key[0] == "forward" and key[1].has_adapters]
    assert {bool(size.num_tiles) for _, size in with_adapters} == {True, False}
    assert max(graphs._captured[key][0].num_replays for key in with_adapters) > 2


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_steps_are_captured_anew(tmp_path, monkeypatch, level):
    """Graphs hold addresses of the weights and of the cache, and their own memory. Kernels are not tried again."""
    for name in ("empty_cache", "synchronize", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    save_model(tmp_path, seed=3, num_hidden_layers=1)
    prompts = [[i, 2 * i, 3] for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 9, "max_num_seqs": 5, "attention_backend": "torch"}
    with LLM(str(tmp_path), device="cpu", max_model_len=64, max_num_batched_tokens=32, **options) as llm:
        runner = llm.engine.runner
        graphs = make_captured(runner, True, lambda key: False)
        runner.capture()
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        captured, num_tries = set(graphs._captured), len([key for what, key in graphs.events if what == "try"])
        llm.sleep(level)
        assert len(graphs) == 0 and runner.program.kv_cache.nbytes_released > 0
        graphs.events.clear()
        llm.wake_up()
        assert runner.program.graphs is graphs and set(graphs._captured) == captured and num_tries > 0
        assert {key for what, key in graphs.events} == captured and {what for what, _ in graphs.events} == {"record"}
        if level == 2:
            llm.update_weights(read_tensors(tmp_path))
        assert [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == expected
        assert max(recording.num_replays for recording, _ in graphs._captured.values()) > 2


def test_graphs_that_leave_too_little_memory_let_the_llm_sleep_on(tmp_path, monkeypatch):
    for name in ("empty_cache", "synchronize", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    save_model(tmp_path, seed=3, num_hidden_layers=1)
    with LLM(str(tmp_path), device="cpu", max_num_seqs=5, num_kvcache_blocks=9) as llm:
        runner = llm.engine.runner
        graphs = make_captured(runner, True, lambda key: False)
        llm.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(settings, "free_bytes", lambda device: 2**30 if not len(graphs) else 2**20)
            runner._bytes_of_step = 2**21
            with pytest.raises(RuntimeError, match=r"another program, took .* more GPU memory than was set"):
                llm.wake_up()
        assert llm.is_sleeping and len(graphs) == 0 and runner.program.kv_cache.nbytes_released > 0
        llm.wake_up()
        assert llm.generate([[1, 2]], use_tqdm=False)[0].error is None


def test_the_rows_that_sample_lie_in_one_place(tmp_path):
    """A graph always reads the places of its capture. Sampling graphs once read the rows of the step in which they were
    captured."""
    program = ModelRunner(Config(str(MODEL_DIRECTORY), device="cpu", max_num_seqs=4, num_kvcache_blocks=4)).program
    places = []
    for tokens in ([1, 2, 3], [4]):
        step = step_of((scheduled(tokens, [0], entry=1), len(tokens), True))
        program.table.batch(program.table.send(step, program.sizes))
        after, rows = program.table.sampled(1)
        assert after.tolist() == [len(tokens) - 1] and rows.lengths.tolist() == [len(tokens)]
        places.append([tensor.data_ptr() for tensor in (after, *rows)])
    assert places[0] == places[1]


class Captures(dict):
    """Takes the place of CudaGraphs: notes the kind of each function and calls none of them."""

    def capture(self, key, function, kind) -> None:
        self[key] = kind


def captured_at_start(sizes: StepSizes, groups_prefixes: bool, has_adapters: bool = False) -> Captures:
    captures = Captures()
    table = SimpleNamespace(groups_prefixes=groups_prefixes, has_adapters=has_adapters)
    warm_up.capture(make_program(sizes, table=table, graphs=captures))
    return captures


def test_what_the_first_requests_want_is_captured_at_the_start_the_largest_first(monkeypatch):
    """Smaller steps then fit into the memory of larger ones. Other steps with groups, and samplings with rules, are
    captured when they are first needed; the kernels of a step with groups are compiled here."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for captures_prompts, groups_prefixes in ((False, True), (False, False), (True, True), (True, False)):
        step_sizes = make_sizes(20, max_num_tokens=256, captures_prompts=captures_prompts)
        captures = captured_at_start(step_sizes, groups_prefixes)
        sizes = [key[1] for key in captures if key[0] == "forward"]
        plain = [size for size in sizes if not size.is_grouped]
        assert [size.num_tokens for size in plain] == sorted((size.num_tokens for size in plain), reverse=True)
        assert {size for size in plain if not size.num_tiles} == {
            step_sizes.decode_size(num_rows) for num_rows in (1, 2, 4, 8, 16, 20)
        }
        with_prompts = {size for size in plain if size.num_tiles}
        assert {size.num_tokens for size in with_prompts} == ({64, 128, 192, 256} if captures_prompts else set())
        grouped = [step_sizes.decode_size(20, True)] if groups_prefixes else []
        assert [size for size in sizes if size.is_grouped] == grouped and sizes[len(plain) :] == grouped
        samplings = [key[1:] for key in captures if key[0] == "sample"]
        assert samplings == [(n, SamplingNeeds(f)) for n in (20, 16, 8, 4, 2, 1) for f in (True, False)]
        assert len(sizes) + len(samplings) == len(captures)


def test_a_size_of_each_kind_of_steps_with_adapters_is_captured_at_the_start(monkeypatch):
    """This compiles the kernels of all such steps. Without adapters nothing is captured for them."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    step_sizes = make_sizes(600, max_num_tokens=4096)
    without, captures = (captured_at_start(step_sizes, False, has_adapters) for has_adapters in (False, True))
    with_adapters = [key[1] for key in captures if key[0] == "forward" and key[1].has_adapters]
    assert list(without) == [key for key in captures if key[0] == "sample" or not key[1].has_adapters]

    def kernels(size: StepSize) -> tuple[Hashable, Hashable]:
        return low_rank_variant(size.num_tokens), low_rank_variant(size.num_sampled)

    largest: dict[tuple[Hashable, Hashable], StepSize] = {}
    for size in step_sizes.sizes_to_capture():  # the largest first
        largest.setdefault(kernels(size), size._replace(has_adapters=True))
    assert set(with_adapters) == set(largest.values()) and len(with_adapters) > 2
    assert with_adapters[0].num_tokens == max(size.num_tokens for size in with_adapters)


def test_every_step_with_prompts_has_one_of_the_sizes_captured_at_the_start(monkeypatch):
    """A size that first occurs later would be captured in the middle of a call."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for max_num_seqs, max_num_tokens in ((1, 100), (5, 3), (20, 256), (100, 256), (300, 256), (150, 256)):
        sizes = make_sizes(max_num_seqs, max_num_tokens)
        at_start = set(captured_at_start(sizes, False))
        for num_rows in range(1, min(max_num_seqs, max_num_tokens), 6):
            for num_new in {2, 16}:
                size, is_captured = size_of(sizes, *[(1, 2)] * (num_rows - 1), (num_new, 0))
                assert not is_captured or ("forward", size) in at_start, (num_rows, num_new)


def test_what_needs_other_kernels_is_of_another_kind():
    """A single row, sizes that 16 divides and groups have kernels of their own; a capture may not compile."""
    step_sizes = make_sizes(100)
    program = make_program(step_sizes)

    sizes = [
        StepSize(1, 1, 1, 0, 1, 1, False), StepSize(17, 17, 17, 0, 17, 1, False), StepSize(16, 16, 16, 0, 16, 1, False),
        StepSize(16, 16, 16, 0, 16, 1, True), StepSize(16, 16, 16, 4, 16, 16, False), StepSize(8, 8, 8, 0, 8, 1, False),
    ]  # fmt: skip
    keys, _, kinds = zip(*map(program.forward_half, sizes), strict=True)
    assert keys == tuple(("forward", size) for size in sizes) and len(set(kinds)) == len(sizes)
    assert program.forward_half(StepSize(32, 32, 32, 0, 32, 1, False))[2] == kinds[2]
    # Narrow products of few rows come in parts, and attention of few decodes has more stages.
    large = [program.forward_half(StepSize(n, n, n, 0, n, 1, False))[2] for n in (64, 80, 256, 272)]
    assert large[0] == kinds[2] != large[1] == large[2] != large[3] and large[3] != kinds[2]
    # In a step with prompts, the last layer has as many rows as may sample.
    few, many = (program.forward_half(StepSize(n, 512, n, 8, n, 512, False))[2] for n in (64, 80))
    assert few != many
    # Steps with adapters have other forms of products, and tiles that depend on the numbers of tokens and of samples.
    adapted = [program.forward_half(size._replace(has_adapters=True)) for size in sizes]
    all_keys, all_kinds = {*keys, *(half.key for half in adapted)}, {*kinds, *(half.kind for half in adapted)}
    assert len(all_keys) == len(all_kinds) == 2 * len(sizes)
    of_tiles = [program.forward_half(StepSize(n, n, n, 0, n, 1, False, True)).kind for n in (96, 160, 528)]
    assert of_tiles[0] == of_tiles[1] != of_tiles[2]
    needs = [SamplingNeeds(), SamplingNeeds(True, 0), SamplingNeeds(True, 1), SamplingNeeds(True, 2)]
    samplings = [(16, need) for need in needs] + [(1, needs[0]), (17, needs[0])]
    keys, _, kinds = zip(*(program.sampling_half(*sampling) for sampling in samplings), strict=True)
    assert keys == tuple(("sample", *sampling) for sampling in samplings) and len(set(kinds)) == len(samplings)
    assert program.sampling_half(32, needs[0])[2] == kinds[0]
    # The ranks' sums take other kernels for other ways to exchange.
    exchange = SimpleNamespace(sends_directly=lambda num_rows, num_bytes: num_bytes <= 100 * 2048)
    program = make_program(step_sizes, Parallel(0, 4, None, exchange))
    small, large = (StepSize(n, n, n, 0, n, 1, False) for n in (96, 112))
    assert program.forward_half(small)[2] != program.forward_half(large)[2]


def test_no_step_is_captured_that_is_larger_than_any():
    """Memory was once reserved for graphs of thousands of tokens, although sequences had room for two."""
    assert make_sizes(2, 16384, max_model_len=3).prompt_sizes == (4,)


def test_no_more_rows_are_sampled_than_may_sample():
    """After the rows that may sample, the table holds rows of an earlier step, which would get tokens."""
    for max_num_seqs in (*range(1, 40), 100, 255, 300, 1000):
        for max_num_tokens in (1, 3, 50, 64, 100, 1000, 2**20):
            for num_ranks in (1, 2, 8):
                sizes = make_sizes(max_num_seqs, max_num_tokens, num_ranks=num_ranks)
                for size in sizes.sizes_to_capture():
                    padded = sizes.padded_sampled(sizes.padded_rows(size.num_rows))
                    assert padded <= size.num_sampled, (max_num_seqs, max_num_tokens, num_ranks, size)


def make_table(**backend: Callable) -> SequenceTable:
    """A table of 8 entries that asks a backend with these functions for shared keys."""
    return SequenceTable(
        8, 64, 4, 100, 64, torch.device("cpu"), sharing=SimpleNamespace(max_num_shared_splits=4, **backend)
    )


def test_shared_keys_are_looked_for_once_while_rows_go_on(monkeypatch):
    """The search walks through all block tables, which takes the host up to half a millisecond per step."""
    asked: list[list[int]] = []

    def shared_prefixes(tables, context_lens, block_size) -> PrefixGroups | None:
        asked.append(context_lens.tolist())
        groups = PrefixGroups(np.zeros((1, 3), np.int32), np.zeros(1, np.int32), np.zeros(len(tables), np.int32))
        return groups if len(tables) > 1 else None

    table = make_table(shared_prefixes=shared_prefixes, split_lengths=lambda keys: keys // 100)
    num_sent, send_groups = 0, table._send_shared_prefixes

    def counted(groups: PrefixGroups) -> None:
        nonlocal num_sent
        num_sent += 1
        send_groups(groups)

    monkeypatch.setattr(table, "_send_shared_prefixes", counted)
    one, two, other = (scheduled([1] * (5 + i), [0, 1], entry=i) for i in range(3))
    sizes = make_sizes(8).eager()

    def is_grouped(*seqs: Sequence) -> bool:
        sent = table.send(step_of(*((seq, 1, True) for seq in seqs)), sizes)
        return sent.size.is_grouped

    assert not is_grouped(one, two) and not asked, "sequences without a hit share nothing"
    one.num_cached_tokens = 4
    assert [is_grouped(one, two) for _ in range(3)] == [True] * 3 and asked == [[5, 6]] and num_sent == 1
    assert is_grouped(two, one) and is_grouped(one, two, other) and len(asked) == num_sent == 3, "other rows"
    two.num_preemptions += 1  # and so has other blocks
    assert is_grouped(one, two, other) and len(asked) == 4
    assert not is_grouped(one) and not is_grouped(one) and len(asked) == 5 and num_sent == 4
    table._sharing = None
    assert not is_grouped(one, two, other) and len(asked) == 5


def test_shared_keys_are_looked_for_again_when_a_row_is_split_otherwise():
    """Otherwise its number of shared splits would count splits of another length."""
    asked: list[list[int]] = []
    table = make_table(
        shared_prefixes=lambda tables, context_lens, block_size: asked.append(context_lens.tolist()),
        split_lengths=lambda keys: np.where(keys > 7, 8, 4),
    )
    seqs = [scheduled([1] * (5 + i), [0, 1], entry=i) for i in range(2)]
    seqs[0].num_cached_tokens = 4
    for _ in range(3):
        table.send(step_of(*((seq, 1, True) for seq in seqs)), make_sizes(8).eager())
        for seq in seqs:
            seq.num_computed_tokens += 1
    assert asked == [[5, 6], [7, 8]]


# Memory


@pytest.mark.parametrize("num_missing", [-1, 0, 1])
def test_graphs_that_took_more_than_was_set_aside_are_an_error(num_missing):
    """The next large step would run out of memory, hours later."""
    free = 2**30 - num_missing * 2**20
    if num_missing > 0:
        with pytest.raises(RuntimeError, match="lower max_num_seqs or use enforce_eager=True"):
            check_graphs_fit(2**30, free)
    else:
        check_graphs_fit(2**30, free)


def test_memory_for_graphs_covers_logits_and_the_largest_captured_step_twice():
    """It counts once for the trial and once for the capture. Without the latter, graphs of prompts once ran out of
    memory.

    Logits processors copy a rank's logits to float32 and count tokens in as many integers.
    """
    sizes = make_sizes(16, max_num_tokens=100)
    for_decodes = 2**29 + 16 * 1000 * (2 + 4 + 4)
    assert sizes.prompt_sizes == (64, 100)
    assert graph_bytes(6000, 200, sizes, 1000, 2, Parallel()) == for_decodes + 2 * 3000
    assert graph_bytes(6000, 100, replace(sizes, prompt_sizes=()), 1000, 2, Parallel()) == for_decodes
    sizes = make_sizes(16, max_num_tokens=100, num_ranks=4, captures_prompts=False)
    assert graph_bytes(6000, 100, sizes, 1000, 2, Parallel(1, 4)) == 2**29 + 4 * 1000 * (3 * 2 + 4 + 4)
    assert graph_bytes(6000, 100, sizes.eager(), 1000, 2, Parallel(1, 4)) == 0


def test_a_trial_step_samples_all_its_prompts_with_all_there_is_within_one_block(monkeypatch):
    """It measures the most memory that a step takes, on a cache of a single block. It leaves no keys to the first
    requests.
    """
    runner = ModelRunner(Config(str(MODEL_DIRECTORY), device="cpu", max_num_seqs=4, num_kvcache_blocks=4))
    table = runner.program.table
    launched: list[Step] = []
    needs: list[SamplingNeeds] = []
    send = SequenceTable.send

    def noted(table: SequenceTable, step: Step, sizes: StepSizes) -> SentStep:
        launched.append(step)
        sent = send(table, step, sizes)
        needs.append(sent.needs)
        return sent

    monkeypatch.setattr(SequenceTable, "send", noted)
    sizes = [1, 3, 2 * runner.info.kvcache_block_size + 1]
    warm_up.try_step(runner.program, sizes)
    [step] = launched
    assert [(num_new_tokens, samples) for _, num_new_tokens, samples in step.chunks] == [(size, True) for size in sizes]
    assert [seq.block_table for seq, _, _ in step.chunks] == [[0], [0], [0, 0, 0]]
    assert [(seq.entry, seq.num_computed_tokens) for seq, _, _ in step.chunks] == list(enumerate(sizes))
    assert needs == [SamplingNeeds(True, table.rules.version, 1 + MAX_LOGPROBS)]
    [scored] = step.scored
    assert (scored.seq, scored.start, scored.end) == (step.chunks[2].seq, 1, sizes[2])
    params = step.chunks[0].seq.sampling_params
    assert params.top_p < 1 and params.repetition_penalty != 1 and params.temperature > 0
    # A request of the same number and length, in the same place.
    first = scheduled([5, 6, 7], [0], entry=1, seq_id=1, params=SamplingParams(temperature=0))
    assert runner.launch(step_of((first, 3, True))).wait().token_ids[0] >= 0
    assert needs[-1] == SamplingNeeds(False, 0) and table.tokens[1, :3].tolist() == [5, 6, 7]
    assert table.rules.tensors.penalties[1].tolist() == [1.0, 0.0, 0.0]


def test_a_failed_start_keeps_nothing(monkeypatch):
    """The message says to try again with less; memory that the first try still held would then be missing."""
    models = []
    init = CausalLM.__init__

    def noted(self, *arguments: Any) -> None:
        init(self, *arguments)
        models.append(weakref.ref(self))

    def fail(*arguments: Any) -> int:
        assert models[0]() is not None
        raise RuntimeError("too little memory")

    monkeypatch.setattr(CausalLM, "__init__", noted)
    monkeypatch.setattr(model_runner, "num_kvcache_blocks", fail)
    with pytest.raises(RuntimeError, match="too little memory") as raised:
        ModelRunner(Config(str(MODEL_DIRECTORY), device="cpu"))
    gc.collect()
    assert raised.value.__traceback__ is not None and [model() for model in models] == [None]
