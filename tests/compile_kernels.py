"""Compiles kernels for a GPU of compute capability 9.0 without one: `python compile_kernels.py`, with PyTorch for a CPU.

It calls the functions that launch the kernels. What they would launch is compiled with their own options and not run. It
prints each kernel's name, the bytes that a program shares, and the instruction that it multiplies matrices with. Triton
must not be interpreted, so this is a process of its own.
"""

import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_capability = lambda *_: (9, 0)

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import nanovllm.ops.kernel  # noqa: E402

SHARED_MEMORY = 227 * 1024
nanovllm.ops.kernel.shared_memory = lambda device: SHARED_MEMORY

from nanovllm.ops.act_and_mul import act_and_mul  # noqa: E402
from nanovllm.ops.block_product import BlockWeight, block_product  # noqa: E402
from nanovllm.ops.grouped_mlp import ExpertWeights, grouped_mlp  # noqa: E402
from nanovllm.ops.norm import add_rms_norm, rms_norm  # noqa: E402
from nanovllm.ops.quantize import E4M3, ScaledProduct, quantize_row_blocks, quantize_rows  # noqa: E402
from nanovllm.ops.route import Routes  # noqa: E402


class Driver:
    """Of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


seen: set[str] = set()
run = triton.JITFunction.run


def compile_only(self: triton.JITFunction, *arguments, grid, warmup, **options):
    compiled = run(self, *arguments, grid=grid, warmup=True, **options)
    if compiled is not None and compiled.hash not in seen:
        seen.add(compiled.hash)
        ptx = compiled.asm["ptx"]
        products = "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else "none"
        print(self.__name__, compiled.metadata.shared, f"{products}{'.e4m3' * ('e4m3.e4m3' in ptx)}", flush=True)
    return compiled


def launch_all() -> None:
    size, dtype = 4096, torch.bfloat16

    def weight(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=E4M3)

    def scaled(columns: int) -> ScaledProduct:
        return ScaledProduct(torch.zeros((16, columns), dtype=dtype), torch.ones(16), torch.ones(columns))

    x, norm = torch.zeros((16, size), dtype=dtype), torch.ones(size, dtype=dtype)
    quantize_rows(x, fused=True)
    quantize_row_blocks(x, 128, fused=True)
    for quantizes in (False, True):
        rms_norm(x, norm, 1e-6, True, quantizes)
        for given in (x, scaled(size)):
            add_rms_norm(given, x, norm, 1e-6, True, quantizes)
    for gate_up in (torch.zeros((16, 24576), dtype=dtype), scaled(24576)):
        act_and_mul(gate_up, fused=True)
    act_and_mul(scaled(1024), "gelu_pytorch_tanh", fused=True)
    blocks = BlockWeight(weight(6144, size), torch.ones(48, 32), 128, 128)
    for num_rows in (1, 32, 64, 2048):
        inputs = torch.zeros((num_rows, size), dtype=dtype)
        block_product(quantize_row_blocks(inputs, 128, fused=True), blocks, None, dtype, fused=True)
    cut = BlockWeight(weight(200, 192), torch.ones(3, 2), 96, 96)
    block_product(
        quantize_row_blocks(x[:, :192].contiguous(), 96, fused=True),
        cut,
        torch.ones(200, dtype=dtype),
        dtype,
        fused=True,
    )
    for num_tokens in (16, 2048):
        experts = torch.zeros((num_tokens, 8), dtype=torch.int32)
        routes, inputs = Routes(experts, torch.ones((num_tokens, 8))), torch.zeros((num_tokens, 2048), dtype=dtype)
        gate_up, down = torch.zeros((128, 1536, 2048), dtype=E4M3), torch.zeros((128, 2048, 768), dtype=E4M3)
        of_channels = (ExpertWeights(gate_up, torch.ones(128, 1536, 1), 1, 2048),
                       ExpertWeights(down, torch.ones(128, 2048, 1), 1, 768))  # fmt: skip
        of_blocks = (ExpertWeights(gate_up, torch.ones(128, 12, 16), 128, 128),
                     ExpertWeights(down, torch.ones(128, 16, 6), 128, 128))  # fmt: skip
        plain = (ExpertWeights(gate_up.to(dtype)), ExpertWeights(down.to(dtype)))
        for weights in (of_channels, of_blocks, plain)[num_tokens > 16 :]:
            grouped_mlp(inputs, routes, *weights, fused=True)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    triton.JITFunction.run = compile_only
    launch_all()
