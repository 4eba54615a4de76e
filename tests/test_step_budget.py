"""What the floor and a step's time budget count: bench.py and docs/step_budget.py."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels import AttentionShape, make_attention_backend
from nanovllm.models import ARCHITECTURES
from nanovllm.models.config import load_model_config
from nanovllm.utils.distributed import Parallel

ROOT = Path(__file__).parent.parent


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench, step_budget = load(ROOT / "bench.py"), load(ROOT / "docs" / "step_budget.py")


def event(name: str, begin: float, end: float, category: str = "kernel") -> dict:
    return {"cat": category, "name": name, "ts": begin, "dur": end - begin}


def test_overlapping_kernels_count_once_and_gaps_are_idle():
    """A kernel that waits for the one before has begun long before it works; its whole duration would count twice."""
    times = step_budget.times_of_parts([
        event("_merge_kernel", 30, 60),
        event("nvjet_sm90", 0, 10),
        event("_decode_kernel", 10, 50),
        event("launch", 0, 1000, "cpu_op"),
        event("_rms_norm_kernel", 65, 70),
        event("Memcpy DtoH", 70, 72, "gpu_memcpy"),
    ])  # fmt: skip
    assert sum(times.values()) == 72
    assert times["attention"] == 50 and times["matrix products"] == 10
    assert times["norms, rotation, store, SiLU"] == 5 and times["idle"] == 5 and times["the rest"] == 2


def test_a_kernel_is_found_in_its_part():
    """`_decode_inputs_kernel` prepares a step, `_decode_kernel` attends."""
    assert step_budget.part_of("_decode_inputs_kernel") == step_budget.part_of("_plan_kernel") == "the rest"
    assert step_budget.part_of("_decode_kernel") == "attention"
    assert step_budget.part_of("void cublasLt::splitKreduce_kernel<32>") == "matrix products"


@pytest.mark.parametrize("size", ["40M", "8B"])
def test_the_floor_counts_every_matrix_once(tmp_path, size):
    """Tied embeddings are multiplied with once, untied ones are not multiplied with but for the LM head."""
    bench.write_config(size, tmp_path)
    config = load_model_config(tmp_path, list(ARCHITECTURES))
    meta = torch.device("meta")
    shape = AttentionShape(8, 8, 64, torch.float32, torch.device("cpu"), 1, 64)
    backend = make_attention_backend("torch", shape)
    model = ARCHITECTURES[config.architecture](config, 64, backend, Parallel(), dtype=torch.bfloat16, device=meta)
    matrices = {name: weight for name, weight in model.named_parameters() if name.endswith("proj.weight")}
    assert len(matrices) == 4 * config.num_hidden_layers
    expected = sum(weight.numel() for weight in matrices.values()) + model.lm_head.weight.numel()
    assert bench.num_weights(config) == expected
