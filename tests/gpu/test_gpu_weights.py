"""Weights in place on a GPU: captured steps read the new weights, and an LLM that sleeps gives its memory to the
driver.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.gpu_weights import generate, make_llm
from support.model_factory import edit_config, read_tensors, save_model

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
        asleep = []
        for _ in range(10):
            llm.sleep(level)
            asleep.append(before - free_memory())
            llm.wake_up()
        print(f"{awake / MIB:.0f} MiB awake, {[round(used / MIB) for used in asleep]} MiB asleep")
        assert max(asleep) < KEPT and asleep[-1] <= asleep[1] + 32 * MIB
        assert before - free_memory() < awake + 64 * MIB
        if level == 1:
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
