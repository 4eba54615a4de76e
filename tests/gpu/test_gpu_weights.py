"""Weights in place on a GPU: captured steps read the new weights, and an LLM that sleeps gives its memory to the
driver.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_weights import generate, make_llm
from support.model_factory import edit_config, read_tensors, save_model

from nanovllm.ops.quantize import E4M3
from nanovllm.ops.weights_sum import Keys, units_of, weights_sum

pytestmark = pytest.mark.gpu

MIB = 2**20
# Memory that a process keeps: kernels' code, libraries' workspaces, the table of sequences, rotary tables.
KEPT = 512 * MIB


RANKS = [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    free_memory()


def free_memory() -> int:
    """Bytes that the driver can give to any process."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def eager(request) -> bool:
    return request.param


@pytest.fixture(scope="module", params=RANKS, ids=lambda size: f"{size} GPUs")
def options(request, eager) -> dict[str, Any]:
    return {"tensor_parallel_size": request.param, "enforce_eager": eager}


@pytest.fixture(scope="module")
def expected(checkpoints, options) -> list[list]:
    found = []
    for directory in checkpoints:
        with make_llm(directory, **options) as llm:
            found.append(generate(llm))
    assert found[0] != found[1]
    return found


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_is_bitwise_a_fresh_llm(checkpoints, options, expected, where, dtype):
    """Captured steps hold the parameters' addresses. The checkpoints are float32, and rounded once."""
    second = {name: tensor.to(dtype).to(where) for name, tensor in read_tensors(checkpoints[1]).items()}
    with make_llm(checkpoints[0], **options) as llm:
        assert generate(llm) == expected[0]
        llm.update_weights(second)
        for tensor in second.values():
            tensor.fill_(float("nan"))
        assert generate(llm) == expected[1]
        with pytest.raises(ValueError, match="unexpected tensor x"):
            llm.update_weights({**read_tensors(checkpoints[0]), "x": torch.zeros(1, device=where)})
        assert [row[0] for row in generate(llm)] == [row[0] for row in expected[1]]


def test_parameters_and_graphs_stay_where_they_are(checkpoints):
    with make_llm(checkpoints[0]) as llm:
        runner = llm.engine.runner
        generate(llm)
        places = [parameter.data_ptr() for parameter in runner.program.model.parameters()]
        graphs = dict(runner.program.graphs._captured)
        assert graphs
        llm.update_weights(read_tensors(checkpoints[1]))
        assert [parameter.data_ptr() for parameter in runner.program.model.parameters()] == places
        assert all(runner.program.graphs._captured[key] is graph for key, graph in graphs.items())


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_changes_no_token(checkpoints, options, expected, level):
    first = read_tensors(checkpoints[0])
    with make_llm(checkpoints[0], **options) as llm:
        memory = llm.metrics()["memory_bytes"]
        for _ in range(2):
            assert generate(llm) == expected[0]
            llm.sleep(level)
            assert llm.metrics()["memory_bytes"] == {"weights": 0, "kv_cache": 0}
            llm.wake_up()
            if level == 2:
                with pytest.raises(RuntimeError, match="tensors are undefined"):
                    generate(llm)
                llm.update_weights(first)
            assert llm.metrics()["memory_bytes"] == memory
        assert generate(llm) == expected[0]


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleeps_gives_its_memory_to_the_driver(tmp_path, eager, level):
    """Weights and cache take a GiB together, and the graphs have a pool. It sleeps ten times, so that a leak would
    show.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
    save_model(tmp_path, num_hidden_layers=1, **{**sizes, "vocab_size": 512})
    edit_config(tmp_path, num_hidden_layers=8, remove=("layer_types",))
    with make_llm(tmp_path, load_format="dummy", enforce_eager=eager) as llm:  # loads everything that is loaded once
        generate(llm)
    before = free_memory()
    with make_llm(tmp_path, load_format="dummy", enforce_eager=eager) as llm:
        if level == 1:
            expected = generate(llm)
        awake = before - free_memory()
        memory = llm.metrics()["memory_bytes"]
        assert awake > sum(memory.values()) > 900 * MIB
        asleep, parameters, places = [], list(llm.engine.runner.program.model.parameters()), set()
        for _ in range(10):
            llm.sleep(level)
            if level == 1:
                assert all(parameter.is_pinned() for parameter in parameters)
                places.add(tuple(parameter.data_ptr() for parameter in parameters))
            asleep.append(before - free_memory())
            llm.wake_up()
        print(f"{awake / MIB:.0f} MiB awake, {[round(used / MIB) for used in asleep]} MiB asleep")
        assert max(asleep) < KEPT and asleep[-1] <= asleep[1] + 32 * MIB
        assert before - free_memory() < awake + 64 * MIB
        if level == 1:
            assert len(places) == 1  # the host's memory is pinned once
            assert [row[0] for row in generate(llm)] == [row[0] for row in expected]


@pytest.mark.parametrize("level", [1, 2])
def test_without_room_it_sleeps_on_and_can_be_woken_later(checkpoints, expected, options, level):
    if options["tensor_parallel_size"] > 1:
        pytest.skip("the memory is taken from the first GPU alone")
    with make_llm(checkpoints[0], **options) as llm:
        needed = sum(llm.metrics()["memory_bytes"].values())
        assert needed > 100 * MIB
        llm.sleep(level)
        taken = torch.empty(free_memory() - needed // 2, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="waking up needs"):
                llm.wake_up()
            assert llm.is_sleeping and llm.metrics()["memory_bytes"] == {"weights": 0, "kv_cache": 0}
        del taken
        llm.wake_up()
        llm.update_weights(read_tensors(checkpoints[0]))
        assert generate(llm) == expected[0]


# Digests


def digest(directory: Path, **options) -> dict[str, str]:
    with make_llm(directory, **options) as llm:
        return llm.weights_digest(per_tensor=True)


@pytest.fixture(scope="module")
def digests_on_cpu(checkpoints) -> list[dict[str, str]]:
    on_cpu = {"device": "cpu", "num_kvcache_blocks": 64}
    return [digest(directory, **on_cpu) for directory in checkpoints]


def test_the_digest_is_that_of_one_rank_on_a_cpu(checkpoints, options, digests_on_cpu):
    """After loading, updates, steps and a sleep; and between two results."""
    first, second = map(read_tensors, checkpoints)
    with make_llm(checkpoints[0], **options) as llm:
        assert llm.weights_digest(per_tensor=True) == digests_on_cpu[0]
        whole = llm.weights_digest()
        generate(llm)
        for _ in llm.generate_iter([[1, 2, 3]] * 4):
            assert llm.weights_digest() == whole
        llm.sleep(1)
        llm.wake_up()
        assert llm.weights_digest() == whole
        llm.update_weights(second)
        assert llm.weights_digest(per_tensor=True) == digests_on_cpu[1]
        llm.update_weights(first)
        assert llm.weights_digest() == whole


def test_the_digest_of_weights_rounded_to_fp8_is_that_of_the_plain_engine(checkpoints):
    plain = digest(checkpoints[0], quantization="fp8", attention_backend="torch")
    assert digest(checkpoints[0], quantization="fp8") == plain


def test_a_flipped_bit_of_any_parameter_is_found(checkpoints, digests_on_cpu):
    with make_llm(checkpoints[0], enforce_eager=True) as llm:
        for name, parameter in llm.engine.runner.program.model.named_parameters():
            memory = parameter.data.view(-1).view(torch.uint8)
            place = len(memory) // 3  # no padding of the vocabulary
            memory[place] ^= 16
            if name.endswith("qk_norm.weight"):  # has copies
                with pytest.raises(RuntimeError, match=r"copies in memory differ, .*_norm.weight \(rank 0\)"):
                    llm.weights_digest()
            else:
                found = llm.weights_digest(per_tensor=True)
                changed = [each for each in found if found[each] != digests_on_cpu[0][each]]
                assert len(changed) == 1 and changed[0].rpartition(".")[2] == name.rpartition(".")[2]
            memory[place] ^= 16
        assert llm.weights_digest(per_tensor=True) == digests_on_cpu[0]


def sum_of(tensor: torch.Tensor, use_kernels: bool) -> int:
    units, total = units_of(tensor), torch.zeros((), dtype=torch.int64, device=tensor.device)
    keys = Keys.of(len(units) + 3, units.shape[1] + 8, tensor.device)
    weights_sum(units, keys.part(3, 8, units), total, use_kernels)
    return total.item()


@pytest.mark.parametrize("before", [0, 3, 16])
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 5000), (2, 63), (35, 1030), (300, 4096), (70_000, 2), (3, 70_000)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3, torch.int8], ids=str)
def test_the_kernel_of_sums_equals_its_twin(dtype, size, before):
    """The twin also computes on the GPU, for `attention_backend="torch"`."""
    num_rows, num_columns = size
    num_bytes = (before + num_columns) * dtype.itemsize
    whole = torch.randint(256, (num_rows, num_bytes), dtype=torch.uint8, device="cuda").view(dtype)
    tensor = whole[:, before:]
    assert sum_of(tensor, True) == sum_of(tensor, False) == sum_of(tensor.cpu(), False)


def test_offsets_of_sums_may_exceed_31_bits():
    memory = torch.zeros(5 * 2**30, dtype=torch.uint8, device="cuda")
    far = memory.as_strided((3, 4096), (2**31, 1))
    far.random_(256)
    assert sum_of(far, True) == sum_of(far.clone(), False)
    many = memory.view(-1, 64)  # the index of a row times 64 exceeds 31 bits
    assert sum_of(many, True) == sum_of(many, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=str)
def test_sums_are_as_fast_as_the_memory(dtype):
    """A copy reads and writes each byte, so at the speed of memory the sum takes half of its time."""
    shape = (2**31 // dtype.itemsize // 4096, 4096)
    x = torch.randint(256, (shape[0], shape[1] * dtype.itemsize), dtype=torch.uint8, device="cuda").view(dtype)
    units, total, target = units_of(x), torch.zeros((), dtype=torch.int64, device="cuda"), torch.empty_like(x)
    keys = Keys.of(*units.shape, x.device)

    def seconds(launch) -> float:
        best = float("inf")
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1000)
        return best

    of_copy, of_sum = seconds(lambda: target.copy_(x)), seconds(lambda: weights_sum(units, keys, total, True))
    print(f"{dtype}: {x.nbytes / of_sum / 1e9:.0f} GB/s; a copy moves {2 * x.nbytes / of_copy / 1e9:.0f} GB/s")
    assert of_sum < of_copy
