"""Whether kernels in Gluon, the lower-level language of Triton 3.6 and later, can run here."""

import logging
from functools import cache

import torch

from nanovllm.ops.kernel import triton

logger = logging.getLogger(__name__)

# Gluon changes between versions. With versions that are not in this list, other kernels do the same. On a GPU, only 3.6
# ran. With 3.7 to 3.9, the kernels were only compiled, and their barriers and layouts were compared with 3.6's.
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether our kernels in Gluon can run: on Hopper GPUs, with a Triton that we know."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and tuple(map(int, triton.__version__.split(".")[:2])) in VERSIONS
        and _is_complete()
    )


@cache
def _is_complete() -> bool:
    try:
        from nanovllm.ops import hopper_memory, hopper_product  # noqa: F401
    except (ImportError, AttributeError) as error:
        logger.warning("Gluon cannot be imported (%s): prompts use the slower kernels for other GPUs", error)
        return False
    return True
