"""Adapters merged into weights on a GPU: captured steps read them, and the base comes back bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import PREFIX, Tensors, random_tensors
from support.gpu_weights import generate, make_llm
from support.model_factory import edit_config, read_tensors, write_tensors

from nanovllm.lora import LoRARequest

pytestmark = pytest.mark.gpu

CONFIG: dict[str, Any] = {"r": 8, "lora_alpha": 4}
RANKS = [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]


@pytest.fixture(scope="module")
def merged(checkpoints, tmp_path_factory) -> list[tuple[Path, LoRARequest]]:
    """Checkpoints in bfloat16 of the first one with an adapter, and the adapters; computed on a CPU."""
    base = {name: tensor.bfloat16() for name, tensor in read_tensors(checkpoints[0]).items()}
    projections = {name: tensor for name, tensor in base.items() if name.endswith("_proj.weight")}
    shapes = {name[len("model.layers.") : -len(".weight")]: tuple(it.shape) for name, it in projections.items()}
    found = []
    for seed, layers in enumerate([shapes, dict(list(shapes.items())[::2])]):
        tensors = random_tensors(layers, rank=8, seed=seed)
        weights: Tensors = dict(base)
        for layer in layers:
            a, b = (tensors[f"{PREFIX}.{layer}.lora_{factor}.weight"].double() for factor in "AB")
            name = f"model.layers.{layer}.weight"
            weights[name] = (base[name].double() + 0.5 * (b @ a)).float().bfloat16()
        directory = tmp_path_factory.mktemp("merged")
        for path in checkpoints[0].glob("*.json"):
            (directory / path.name).write_text(path.read_text())
        edit_config(directory, dtype="bfloat16")
        write_tensors(directory, weights)
        on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()} if seed else tensors
        found.append((directory, LoRARequest(f"adapter {seed}", 1 + seed, tensors=on_gpu, config=CONFIG)))
    return found


@pytest.fixture
def rounds_to_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("size", RANKS)
def test_captured_steps_compute_with_the_merged_weights(checkpoints, merged, rounds_to_tf32, size):
    """The products of the factors keep their digits although the program lets the library round to TF32."""
    expected = {}
    for number, directory in enumerate([checkpoints[0], *(each for each, _ in merged)]):
        with make_llm(directory, tensor_parallel_size=size) as llm:
            expected[number] = generate(llm), llm.weights_digest()
    assert len({digest for _, digest in expected.values()}) == 3
    with make_llm(checkpoints[0], tensor_parallel_size=size) as llm:
        memory = llm.metrics()["memory_bytes"]
        for number in (0, 1, 0, 2, 1, 1, 2, 0):
            llm.engine.runner.set_adapter(0, merged[number - 1][1] if number else None)
            llm.reset_prefix_cache()
            assert (generate(llm), llm.weights_digest()) == expected[number]
        assert llm.metrics()["memory_bytes"] == memory


def test_copies_are_pinned_and_parameters_keep_their_memory(checkpoints, merged):
    with make_llm(checkpoints[0]) as llm:
        runner = llm.engine.runner
        places = {name: it.data_ptr() for name, it in runner.program.model.named_parameters()}
        digest = llm.weights_digest()
        for number in range(20):
            runner.set_adapter(0, merged[number % 2][1])
        copies = [copy for of_name in runner._merged._copies.values() for copy in of_name]
        assert copies and all(copy.is_pinned() for copy in copies)
        runner.set_adapter(0, None)
        assert llm.weights_digest() == digest
        assert places == {name: it.data_ptr() for name, it in runner.program.model.named_parameters()}


def test_without_memory_for_a_change_the_next_switch_is_exact(checkpoints, merged, monkeypatch):
    with make_llm(checkpoints[0]) as llm:
        runner, digest = llm.engine.runner, llm.weights_digest()
        add, num_calls = torch.Tensor.addmm_, 0

        def failing(*arguments, **kw):
            nonlocal num_calls
            num_calls += 1
            if num_calls == 5:
                torch.empty(2**50, device="cuda")
            return add(*arguments, **kw)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "addmm_", failing)
            with pytest.raises(RuntimeError, match="the adapter does not fit into the GPU's memory"):
                runner.set_adapter(0, merged[0][1])
        assert llm.weights_digest() != digest
        runner.set_adapter(0, None)
        assert llm.weights_digest() == digest
