"""Sends arrays from the host to the device without waiting for it."""

import numpy as np
import torch


def upload(arrays: list[np.ndarray], device: torch.device, into: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Copies the arrays to the device, through one pinned buffer and one copy, without waiting for it.

    Args:
        into: contiguous, on the device; its first bytes receive the arrays. None allocates memory for them.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    num_bytes = sum(map(_aligned, arrays))
    pinned = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    sent = torch.empty_like(pinned, device=device) if into is None else into.view(-1).view(torch.uint8)[:num_bytes]
    host, on_device, start = pinned.numpy(), [], 0
    for array in arrays:
        place = slice(start, start + array.nbytes)
        host[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device.append(sent[place].view(getattr(torch, array.dtype.name)).view(array.shape))
        start += _aligned(array)
    sent.copy_(pinned, non_blocking=True)
    return on_device


def _aligned(array: np.ndarray) -> int:
    """The array's bytes, rounded up so that an array of any dtype may follow."""
    return -(-array.nbytes // 16) * 16
