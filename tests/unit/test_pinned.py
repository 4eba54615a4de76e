"""Pinned memory of the host, with a driver that counts."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.weight_updates import make_llm
from torch import nn

from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.ops.pinned import host_like
from nanovllm.runner.weights_in_place import to_host


class Driver:
    """pinned: bytes by address. It refuses to pin when `num_left` is 0."""

    def __init__(self, num_left: int = 100):
        self.pinned: dict[int, int] = {}
        self.num_left, self.num_synchronized = num_left, 0

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        if not self.num_left:
            return 2
        self.num_left -= 1
        self.pinned[pointer] = num_bytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> None:
        assert is_mapped(pointer), "unmapped while it was pinned"
        assert self.num_synchronized, "copies may still run"
        del self.pinned[pointer]

    def check_error(self, error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def synchronize(self, device: str) -> None:
        self.num_synchronized += 1


def is_mapped(pointer: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= pointer < int(end, 16) for start, end in ranges)


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    for name in ("check_error", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(driver, name))
    return driver


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    real = torch.empty(shape, dtype=dtype)
    return SimpleNamespace(is_cuda=True, shape=real.shape, dtype=dtype, nbytes=real.nbytes, device="cpu")


def test_memory_is_pinned_while_a_tensor_of_it_lives(driver):
    """It was once unmapped before the driver let it go."""
    tensors = [host_like(on_gpu(3, 5)), host_like(on_gpu(7, dtype=torch.float32)), host_like(on_gpu(0, 4))]
    assert [(tensor.shape, tensor.dtype) for tensor in tensors] == [
        ((3, 5), torch.bfloat16), ((7,), torch.float32), ((0, 4), torch.bfloat16),
    ]  # fmt: skip
    # Two registrations must not share a page.
    assert driver.pinned == {tensors[0].data_ptr(): 30, tensors[1].data_ptr(): 28}
    assert all(pointer % 4096 == 0 for pointer in driver.pinned)
    part = tensors[0][1].fill_(2)
    del tensors[0]
    assert len(driver.pinned) == 2 and part.tolist() == [2] * 5
    del part
    assert list(driver.pinned.values()) == [28]
    pointer = tensors[0].data_ptr()
    del tensors
    assert not driver.pinned and not is_mapped(pointer)


def test_a_fork_may_free_the_memory(driver):
    """Memory that a fork does not have was once unmapped in it, with whatever it had put there."""
    tensor = host_like(on_gpu(2**20)).fill_(1)
    child = os.fork()
    if not child:
        try:  # without PyTorch's threads, which a fork does not have
            assert not tensor.view(torch.uint8).numpy().any()
            others = [bytearray(b"1" * 2**21) for _ in range(8)]
            del tensor
            os._exit(any(other.count(b"1") != 2**21 for other in others))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0 and tensor.all()


def test_memory_that_cannot_be_pinned_is_an_error(driver):
    driver.num_left = 1
    kept = host_like(on_gpu(3))
    with pytest.raises(RuntimeError, match=r"cannot pin 2,000,000 bytes of memory; free some \(CUDA error 2\)"):
        host_like(on_gpu(1000, 1000))
    assert list(driver.pinned) == [kept.data_ptr()]


def test_memory_that_the_host_does_not_have_is_an_error(driver):
    with pytest.raises(RuntimeError, match=r"cannot pin 2,251,799,813,685,248 bytes of memory; free some \(.*Errno 12"):
        host_like(SimpleNamespace(is_cuda=True, nbytes=2**51, device="cpu"))


def test_memory_for_a_tensor_of_a_cpu_is_not_pinned():
    tensor = torch.ones(2, 3)
    copy = host_like(tensor)
    assert copy.shape == (2, 3) and copy.dtype == tensor.dtype and copy.data_ptr() != tensor.data_ptr()


# Parameters of a model that sleeps


class OnGpu(nn.Parameter):
    """A parameter that says that it is on a GPU, also after its data have moved."""

    is_cuda = True


def two_parameters() -> nn.Module:
    model = nn.Module()
    model.first, model.second = OnGpu(torch.ones(3)), OnGpu(torch.full((2, 2), 2.0))
    return model


def test_a_second_sleep_takes_the_memory_of_the_first(driver):
    model, reserved = two_parameters(), {}
    to_host(model, reserved)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert set(places.values()) == set(driver.pinned)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1  # awake, with other values
    assert len(driver.pinned) == 2, "the memory stays reserved"
    to_host(model, reserved)
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert model.first.tolist() == [2, 2, 2] and model.second.tolist() == [[3, 3], [3, 3]]


def test_a_sleep_that_could_not_pin_all_memory_can_be_repeated(driver):
    model, reserved = two_parameters(), {}
    driver.num_left = 1
    with pytest.raises(RuntimeError, match="cannot pin 16 bytes"):
        to_host(model, reserved)
    driver.num_left = 1
    to_host(model, reserved)
    assert model.first.tolist() == [1, 1, 1] and model.second.tolist() == [[2, 2], [2, 2]]
    assert {parameter.data_ptr() for parameter in model.parameters()} == set(driver.pinned)


def test_a_deep_sleep_and_a_close_free_the_reserved_memory():
    with make_llm(MODEL_DIRECTORY) as llm:
        runner = llm.engine.runner
        runner._on_host["a parameter"] = torch.ones(1)
        llm.sleep()
        assert runner._on_host
        llm.sleep(2)
        assert not runner._on_host
        runner._on_host["a parameter"] = torch.ones(1)
    assert not runner._on_host
