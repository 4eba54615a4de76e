"""Moves a model's parameters to the host and back, or frees them, while the model sleeps.

The parameters stay the same objects, and only their data moves, so tied layers keep sharing their data. The parameters
move one by one, so neither side needs memory for a second copy of the model.
"""

import torch
from torch import nn

from nanovllm.layers.linear import Packable
from nanovllm.ops.pinned import host_like


def to_host(model: nn.Module, reserved: dict[str, torch.Tensor]) -> None:
    """Moves parameters on a GPU to pinned memory of the host, which stays in `reserved` for the next time."""
    for name, parameter in model.named_parameters():
        if parameter.is_cuda:
            if name not in reserved:
                reserved[name] = host_like(parameter)
            parameter.data = reserved[name].copy_(parameter)


def drop(model: nn.Module) -> None:
    """Frees all parameters, packed ones too. Shapes and dtypes remain."""
    for module in model.modules():
        if isinstance(module, Packable):
            module.unpack()
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)


def to_device(model: nn.Module, device: torch.device) -> None:
    """Moves back the parameters that `to_host` moved, and allocates those that `drop` freed, filled with zeros."""
    for parameter in model.parameters():
        if _is_dropped(parameter):
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        elif parameter.device.type != device.type:
            parameter.data = parameter.data.to(device, non_blocking=True)


def num_bytes_away(model: nn.Module, device: torch.device) -> int:
    """Bytes that `to_device` would allocate."""
    return sum(
        parameter.nbytes
        for parameter in model.parameters()
        if _is_dropped(parameter) or parameter.device.type != device.type
    )


def num_bytes_there(model: nn.Module, device: torch.device) -> int:
    """Bytes of parameters that are on the device, packed ones included."""
    tensors = [parameter.data for parameter in model.parameters() if not _is_dropped(parameter)]
    tensors = [tensor for tensor in tensors if tensor.device.type == device.type]
    packed = (module.packed for module in model.modules() if isinstance(module, Packable))
    return sum(tensor.nbytes for tensor in (*tensors, *packed) if tensor is not None)


def _is_dropped(parameter: torch.Tensor) -> bool:
    return parameter.untyped_storage().nbytes() < parameter.nbytes
