"""Sends arrays from the host to the device without waiting for it."""

import numpy as np
import torch


def upload(arrays: list[np.ndarray], device: torch.device, into: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The arrays on the device, through one pinned buffer and one copy that nobody waits for.

    Args:
        into: uint8, at least [upload_size(arrays)], on the device, where to put them; else in memory of their own.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    pinned = torch.empty(upload_size(arrays), dtype=torch.uint8, pin_memory=device.type == "cuda")
    sent = torch.empty_like(pinned, device=device) if into is None else into[: len(pinned)]
    host, on_device, start = pinned.numpy(), [], 0
    for array in arrays:
        place = slice(start, start + array.nbytes)
        host[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device.append(sent[place].view(getattr(torch, array.dtype.name)).view(array.shape))
        start += _aligned(array)
    sent.copy_(pinned, non_blocking=True)
    return on_device


def upload_size(arrays: list[np.ndarray]) -> int:
    return sum(map(_aligned, arrays))


def _aligned(array: np.ndarray) -> int:
    """Bytes up to a place where any dtype may begin."""
    return -(-array.nbytes // 16) * 16
