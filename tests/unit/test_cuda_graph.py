"""Which batch sizes are captured, and what happens when memory ends; the captures themselves: test_gpu_engine.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine import cuda_graph, model_runner
from nanovllm.runner.batch import special_rows
from nanovllm.runner.cuda_graph import CudaGraphs, StepSize, graph_sizes
from nanovllm.runner.model_runner import ModelRunner


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 12, 15, 16, 17, 20, 100, 256, 257, 300, 500, 512, 1024])
def test_every_batch_has_a_captured_size_and_little_padding(largest):
    """Sizes that stopped short of the largest batch once left it without a graph."""
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs.sizes = sizes
    for num_rows in range(1, largest + 1):
        padded = graphs.padded_size(num_rows)
        assert padded in sizes and num_rows <= padded <= max(2 * num_rows - 1, num_rows + 15, int(num_rows * 1.125))


def test_without_memory_for_a_grouped_graph_the_plain_one_serves(monkeypatch):
    """Grouped steps are captured in the middle of a call, which must not end for want of a faster way."""

    class Graph:
        num_replays = 0

        def replay(self) -> None:
            self.num_replays += 1

    def no_memory(self, size: StepSize) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(CudaGraphs, "_capture", no_memory)
    graphs, plain = CudaGraphs.__new__(CudaGraphs), Graph()
    plain_size, grouped_size = StepSize(4), StepSize(4, is_grouped=True)
    graphs._captured, graphs._is_alone = {plain_size: (plain, "outputs")}, True
    assert [graphs.replay(size) for size in (grouped_size, grouped_size, plain_size)] == ["outputs"] * 3
    assert plain.num_replays == 3
    # A step with prompts is then an eager one.
    assert graphs.replay(StepSize(4, num_tokens=64)) is None and plain.num_replays == 3
    # Other ranks would wait in the step that this one gave up.
    graphs._captured, graphs._is_alone = {plain_size: (plain, "outputs")}, False
    for size in (grouped_size, StepSize(4, num_tokens=64)):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            graphs.replay(size)


def test_a_capture_without_memory_is_tried_again_when_the_cache_is_empty(monkeypatch):
    """The allocator gives its cache back by itself, but not during a capture. The trial step is not repeated: other
    ranks take part in it."""
    events = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(cuda_graph, "_cublas_lt", nullcontext)
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs._stream, graphs._device, graphs._captured = stream, torch.device("cpu"), {}
    graphs._parked, graphs._step = nullcontext, lambda size: events.append("try")
    num_failures = 1

    def record(size: StepSize) -> None:
        events.append("record")
        if events.count("record") <= num_failures:
            raise torch.cuda.OutOfMemoryError("out of memory")

    graphs._record = record
    graphs._capture(StepSize(4))
    assert events == ["try", "record", "empty", "record"]
    events.clear()
    num_failures = 2
    with pytest.raises(torch.cuda.OutOfMemoryError):
        graphs._capture(StepSize(4))
    assert events == ["try", "record", "empty", "record"]


@pytest.mark.parametrize("num_missing", [-1, 0, 1])
def test_graphs_that_took_more_than_was_set_aside_are_an_error(monkeypatch, num_missing):
    """The next large step would run out of memory, hours later."""
    runner = ModelRunner.__new__(ModelRunner)
    runner.device, runner._least_free = torch.device("cpu"), 2**30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(model_runner, "free_bytes", lambda device: 2**30 - num_missing * 2**20)
    if num_missing > 0:
        with pytest.raises(RuntimeError, match="lower max_num_seqs or use enforce_eager=True"):
            runner._check_memory_left()
    else:
        runner._check_memory_left()


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "num_tokens"),
    [(64, 2, 61_035_008), (1024, 28, 16_896), (4096, 36, 768), (8192, 80, 512)],
)
def test_a_step_beside_decodes_is_as_large_as_its_arithmetic_allows(hidden_size, num_layers, num_tokens):
    """12 TFLOP, two for each weight and token, in multiples of 256; a large model's steps are not split too small."""
    layers = torch.nn.ModuleList(
        torch.nn.Linear(12 * hidden_size, hidden_size, bias=False, device="meta") for _ in range(num_layers)
    )
    runner = ModelRunner.__new__(ModelRunner)
    runner.model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    runner._captures_prompts = False
    found = runner._most_tokens_beside_decodes()
    num_weights = 12 * hidden_size**2 * num_layers
    assert found % 256 == 0 and (found == 512 or 0 <= 12e12 / (2 * num_weights) - found < 256)
    assert found == num_tokens


@pytest.mark.parametrize(
    ("hidden_size", "num_tokens"), [(64, 49_152), (1024, 3072), (4096, 768), (5120, 512), (8192, 512)]
)
def test_a_captured_step_beside_decodes_fills_its_matrix_products(hidden_size, num_tokens):
    runner = ModelRunner.__new__(ModelRunner)
    runner.model_config, runner._captures_prompts = SimpleNamespace(hidden_size=hidden_size), True
    assert runner._most_tokens_beside_decodes() == num_tokens


def test_memory_for_graphs_covers_logits_and_the_largest_captured_step_twice():
    """Once for the trial and once for the capture; without the latter, graphs of prompts ran out of memory later."""
    runner = ModelRunner.__new__(ModelRunner)
    runner._is_captured, runner.max_num_seqs, runner.dtype, runner.inputs = True, 16, torch.bfloat16, None
    runner.model_config = SimpleNamespace(vocab_size=1000)
    for_decodes = 2**29 + 2 * 16 * 1000 * 2
    assert runner._bytes_for_graphs(activations=6000, num_tokens=100) == for_decodes
    runner.inputs = SimpleNamespace(token_sizes=[25, 50])
    assert runner._bytes_for_graphs(activations=6000, num_tokens=100) == for_decodes + 2 * 3000
    runner._is_captured = False
    assert runner._bytes_for_graphs(activations=6000, num_tokens=100) == 0


def test_a_trial_step_samples_all_its_prompts_with_a_filter_within_one_block(monkeypatch):
    """It measures what a step takes at most, on a cache of a single block."""
    runner = ModelRunner(Config(str(MODEL_DIRECTORY), device="cpu", max_num_seqs=4, num_kvcache_blocks=4))
    launched, launch = [], runner.launch
    monkeypatch.setattr(runner, "launch", lambda work: launched.append(work) or launch(work))
    sizes = [1, 3, 2 * runner.block_size + 1]
    runner._try_step(sizes)
    [work] = launched
    assert [(num_new_tokens, samples) for _, num_new_tokens, samples in work] == [(size, True) for size in sizes]
    assert [seq.block_table for seq, _, _ in work] == [[0], [0], [0, 0, 0]]
    assert [(seq.slot, seq.num_computed_tokens) for seq, _, _ in work] == list(enumerate(sizes))
    [special] = special_rows(work, 1000, runner.device)
    assert special.rows.tolist() == [0, 1, 2] and (special.top_ps < 1).all()
    assert runner.state.last_token_ids[:3].min() >= 0


def test_a_failed_start_keeps_nothing(monkeypatch):
    """The message says to try again with less; what the first try holds would then be missing."""
    runners = []

    def fail(self, *args) -> int:
        assert self.model is not None and self.state is not None
        runners.append(self)
        raise RuntimeError("too little memory")

    monkeypatch.setattr(ModelRunner, "_allocate_kv_cache", fail)
    with pytest.raises(RuntimeError, match="too little memory"):
        ModelRunner(Config(str(MODEL_DIRECTORY), device="cpu"))
    [runner] = runners
    assert runner.model is runner.state is runner.backend is runner.kv_cache is None
