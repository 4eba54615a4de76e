"""Chooses the attention backend of a model.

`torch` is the plain reference. `sdpa` is fast on a CPU, and `tiled` gives the same bits in every batch there. `triton`
(our own kernels) and `flash` (FlashAttention 2) are for GPUs. With `deterministic=True`, `triton` is OrderedAttention.
"""

import logging

from nanovllm.attention.backend import AttentionBackend, AttentionShape
from nanovllm.attention.flash_backend import FlashAttention
from nanovllm.attention.ordered_backend import OrderedAttention
from nanovllm.attention.sdpa_backend import SDPAAttention
from nanovllm.attention.tiled_backend import TiledAttention
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.attention.triton_backend import TritonAttention

logger = logging.getLogger(__name__)

_FASTEST_FIRST: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, SDPAAttention)
_ALL: tuple[type[AttentionBackend], ...] = (*_FASTEST_FIRST, TiledAttention, TorchAttention)
_BACKENDS = {backend.name: backend for backend in _ALL}


def make_attention_backend(name: str, shape: AttentionShape, block_size: int | None = None) -> AttentionBackend:
    """The backend of this name; "auto" is the fastest that can run here.

    Args:
        block_size: tokens per block; None is the backend's default.

    Raises:
        ValueError: the backend cannot run this model, dtype or block size here; the message names alternatives.
        RuntimeError: it needs a GPU or a package that is missing.
    """
    if name == "auto" and not shape.deterministic:
        return _fastest(shape, block_size)(shape)
    backend = _deterministic(name, shape) if shape.deterministic else _BACKENDS[name]
    if (problem := backend.problem(shape, block_size)) is not None:
        raise problem
    return backend(shape)


def _deterministic(name: str, shape: AttentionShape) -> type[AttentionBackend]:
    usual = "tiled" if shape.device.type == "cpu" else "triton"
    name = usual if name == "auto" else name
    backend = OrderedAttention if name == "triton" else _BACKENDS[name]
    if not backend.is_deterministic:
        raise ValueError(
            f'with attention_backend="{name}", the last bits depend on the batch; for deterministic=True, use "auto" '
            f'or "{usual}"'
        )
    return backend


def _fastest(shape: AttentionShape, block_size: int | None) -> type[AttentionBackend]:
    if shape.device.type == "cpu":
        return SDPAAttention
    for backend in _FASTEST_FIRST:
        problem = backend.problem(shape, block_size)
        if problem is None:
            level = logging.WARNING if backend is SDPAAttention else logging.INFO
            logger.log(level, "attention_backend %s is the fastest that can run here", backend.name)
            return backend
        logger.info("attention_backend %s is not used: %s", backend.name, problem)
    raise AssertionError("sdpa runs everywhere")
