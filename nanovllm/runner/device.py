"""Turns options into the device and the dtypes that they mean on this machine."""

import torch

from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.models.config import ModelConfig
from nanovllm.ops.kernel import has_triton
from nanovllm.ops.quantize import E4M3


def rank_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """The device that `name` means to a rank; a RuntimeError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f'device={name!r}, but PyTorch finds no GPU; use device="cpu"')
        if size > torch.cuda.device_count():
            raise RuntimeError(
                f"tensor_parallel_size={size}, but there are {torch.cuda.device_count()} GPUs; lower it, or let "
                "CUDA_VISIBLE_DEVICES name more"
            )
        if size > 1:
            return torch.device("cuda", rank)
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise RuntimeError(f"device={name!r}, but there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def dtype_of(wanted: str, of_checkpoint: str | None, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; a ValueError if we cannot compute in the checkpoint's."""
    if wanted == "auto":
        # CPUs compute bfloat16 slowly, and float32 loses nothing.
        wanted = "float32" if device.type == "cpu" else of_checkpoint or "bfloat16"
    dtype = getattr(torch, wanted, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f'the checkpoint\'s dtype is {wanted!r}; name float32, bfloat16 or float16 with dtype="…"')
    return dtype


def fp8_of(
    wanted: str | None, of_checkpoint: Fp8Config | None, dtype: torch.dtype, device: torch.device
) -> Fp8Config | None:
    """How linear layers get weights in FP8, or None; a ValueError if FP8 cannot be computed here."""
    fp8 = Fp8Config() if wanted == "fp8" and of_checkpoint is None else of_checkpoint
    if fp8 is None:
        return None
    what = f"quantization={wanted!r}" if of_checkpoint is None else "a checkpoint in FP8"
    if dtype == torch.float16:
        other = "" if device.type == "cuda" else ' or "float32"'
        raise ValueError(f'{what} needs dtype="bfloat16"{other}; products in FP8 exceed the range of float16')
    if device.type == "cuda":
        if dtype != torch.bfloat16:
            raise ValueError(f'{what} needs dtype="bfloat16" on a GPU, not {dtype}')
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError(f"{what} needs a GPU of compute capability 8.9 or newer; use weights that are not in FP8")
    return fp8


def kv_cache_dtype_of(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache of a model that computes in `dtype`; a ValueError if the device has no FP8."""
    if wanted == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f'kv_cache_dtype={wanted!r} needs a GPU of compute capability 8.9 or newer; use kv_cache_dtype="auto"'
        )
    return E4M3


def check_can_be_deterministic(config: ModelConfig, device: torch.device, num_ranks: int) -> None:
    """Raises a ValueError if, with this model or on this device, a row's results may depend on the other rows of its
    step."""
    if device.type != "cpu" and not has_triton():
        raise ValueError(f"deterministic=True on {device} needs the triton package: pip install triton")
    if device.type != "cpu" and num_ranks > 2:
        raise ValueError(
            f"deterministic=True was tested on one and on two GPUs, so tensor_parallel_size={num_ranks} is refused; "
            "use 1 or 2 (a job's --data-parallel-size may be more), or leave deterministic out"
        )
    if config.delta_net is not None:
        raise ValueError(
            "deterministic=True cannot run a model with recurrent states, such as Qwen3.5: the chunks of a prompt "
            "change the last bits of its states; leave deterministic out"
        )
