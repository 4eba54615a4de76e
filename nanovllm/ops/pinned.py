"""Large pinned memory of the host."""

import mmap
import weakref
from contextlib import suppress

import torch

_MADV_WIPEONFORK = 18  # of Linux; Python has no name for it


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and dtype on the host, contiguous, in pinned memory if the given one is on a GPU.

    PyTorch's allocator of pinned memory rounds sizes up to powers of two, and the driver then maps the memory page by
    page. Here the memory has huge pages, if the kernel has them, and threads touch them before the driver pins them.

    Raises:
        RuntimeError: the host cannot give or pin the memory.
    """
    if not tensor.is_cuda or not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    cuda = torch.cuda.cudart()
    try:
        memory = mmap.mmap(-1, tensor.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # After a fork that shares pages, this process's next write would go to new pages, which are not pinned.
        memory.madvise(_MADV_WIPEONFORK)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        touched = torch.frombuffer(view, dtype=torch.uint8).zero_()
        torch.cuda.check_error(cuda.cudaHostRegister(touched.data_ptr(), tensor.nbytes, 0))
    except (OSError, RuntimeError) as error:
        with suppress(RuntimeError):
            torch.ones(1, device=tensor.device)  # reports the driver's error once more, and so clears it
        raise RuntimeError(f"the host cannot pin {tensor.nbytes:,} bytes of memory; free some ({error})") from error
    # Not at the end of the process: the driver may be gone by then.
    weakref.finalize(view, _unpin, touched.data_ptr(), tensor.device, memory).atexit = False
    return touched.view(tensor.dtype).view(tensor.shape)


def _unpin(pointer: int, device: torch.device, memory: mmap.mmap) -> None:
    """The memory is unmapped after this call, which holds it."""
    with suppress(RuntimeError):  # a fork of the process, or a driver that has failed
        torch.cuda.synchronize(device)  # copies may still run
        torch.cuda.cudart().cudaHostUnregister(pointer)
