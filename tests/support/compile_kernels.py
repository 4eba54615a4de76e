"""Compiles kernels for a GPU of compute capability 9.0 without one: `python tests/support/compile_kernels.py`.

It calls the functions that launch kernels. Each kernel is compiled with its own options and not run. It prints each
kernel's name, the bytes that a program shares, the instruction that it multiplies matrices with, how many pairs of
numbers in e4m3 it makes, how many of these it uses in two ways, which ptxas compiles wrongly, and how many keys it may
round differently from their plain twin. Triton must not be interpreted, so this is a process of its own.
"""

import re

import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_capability = lambda *_: (9, 0)

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import nanovllm.ops.kernel  # noqa: E402

SHARED_MEMORY = 227 * 1024
nanovllm.ops.kernel.shared_memory = lambda device: SHARED_MEMORY

from nanovllm.attention.backend import AttentionShape  # noqa: E402
from nanovllm.attention.metadata import AttentionMetadata  # noqa: E402
from nanovllm.attention.triton_backend import TritonAttention  # noqa: E402
from nanovllm.ops.act_and_mul import act_and_mul  # noqa: E402
from nanovllm.ops.block_product import BlockWeight, block_product  # noqa: E402
from nanovllm.ops.collectives import Parallel  # noqa: E402
from nanovllm.ops.delta_net import delta_net  # noqa: E402
from nanovllm.ops.exchange import Exchange, mail_shape  # noqa: E402
from nanovllm.ops.grouped_mlp import ExpertWeights, grouped_mlp  # noqa: E402
from nanovllm.ops.layer_cache import LayerCache  # noqa: E402
from nanovllm.ops.layer_state import DeltaWeights, LayerState, StateRows  # noqa: E402
from nanovllm.ops.low_rank import AdapterRows, Factors, add_low_rank  # noqa: E402
from nanovllm.ops.norm import add_rms_norm, rms_norm  # noqa: E402
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store  # noqa: E402
from nanovllm.ops.quantize import E4M3, ScaledProduct, quantize_row_blocks, quantize_rows  # noqa: E402
from nanovllm.ops.route import Routes  # noqa: E402
from nanovllm.ops.store_kvcache import store_kvcache  # noqa: E402
from nanovllm.ops.weights_sum import Keys, units_of, weights_sum  # noqa: E402


class Driver:
    """Triton's driver of a GPU that is not there."""

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
        kind = products + "".join(f".{each}" for each in ("e4m3", "s8") if f"{each}.{each}" in ptx)
        numbers = len(pairs_in_e4m3(ptx)), num_used_twice(ptx), num_rounded_otherwise(ptx)
        print(self.__name__, compiled.metadata.shared, kind, *numbers, flush=True)
    return compiled


def pairs_in_e4m3(ptx: str) -> set[str]:
    """The registers in which pairs of numbers in e4m3 are made."""
    made = re.findall(r"cvt\.\S*e4m3x2\.\w+\s+(%rs\d+), (%r\d+), (%r\d+)", ptx)
    return {pair for pair, first, second in made if first != second}  # twice the same is a constant


def num_used_twice(ptx: str) -> int:
    """Pairs of numbers in e4m3 that fill a 32-bit word with another such pair, and are used elsewhere too. See
    `to_e4m3`."""
    pairs = pairs_in_e4m3(ptx)
    words = re.findall(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}", ptx)
    in_words = {pair for word in words for pair in word if pairs.issuperset(word)}
    # Once where it is made, and once in a word.
    return sum(len(re.findall(rf"{pair}\b", ptx)) > 2 for pair in in_words)


def num_rounded_otherwise(ptx: str) -> int:
    """Additions of TO_INTEGER that are fused with a multiplication, and inverses of scales that are not rounded as IEEE
    754 says. See STORE_OPTIONS and `scale_of_keys`. The interpreter does neither."""
    ones = set(re.findall(r"mov\.\S+\s+(%r\d+), 0f3F800000", ptx))
    inverses = [dividend for dividend in re.findall(r"div\.full\S*\s+%r\d+, (%r\d+)", ptx) if dividend in ones]
    return len(re.findall(r"fma\.\S+\s+.*0f4B400000", ptx)) + len(inverses)


def launch_all() -> None:
    size, dtype = 4096, torch.bfloat16

    def weight(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=E4M3)

    def scaled(columns: int) -> ScaledProduct:
        return ScaledProduct(torch.zeros((16, columns), dtype=dtype), torch.ones(16), torch.ones(columns))

    x, norm = torch.zeros((16, size), dtype=dtype), torch.ones(size, dtype=dtype)
    quantize_rows(x, use_kernels=True)
    quantize_row_blocks(x, 128, use_kernels=True)
    for quantizes in (False, True):
        rms_norm(x, norm, 1e-6, True, quantizes)
        for given in (x, scaled(size)):
            add_rms_norm(given, x, norm, 1e-6, True, quantizes)
    for gate_up in (torch.zeros((16, 24576), dtype=dtype), scaled(24576)):
        act_and_mul(gate_up, use_kernels=True)
    act_and_mul(scaled(1024), "gelu_pytorch_tanh", use_kernels=True)
    exchange = Exchange(Parallel(0, 4), torch.zeros(mail_shape(size), dtype=dtype), [0] * 4)
    for num_rows in (16, 4096):  # directly, and by owner
        product = ScaledProduct(torch.zeros((num_rows, size), dtype=dtype), torch.ones(num_rows), torch.ones(size))
        exchange.sum_add_norm(product, torch.zeros_like(product.product), norm, 1e-6, False, quantizes=True)
    blocks = BlockWeight(weight(6144, size), torch.ones(48, 32), 128, 128)
    for num_rows in (1, 32, 64, 2048):
        inputs = torch.zeros((num_rows, size), dtype=dtype)
        block_product(quantize_row_blocks(inputs, 128, use_kernels=True), blocks, None, dtype, use_kernels=True)
    cut = BlockWeight(weight(200, 192), torch.ones(3, 2), 96, 96)
    block_product(
        quantize_row_blocks(x[:, :192].contiguous(), 96, use_kernels=True),
        cut,
        torch.ones(200, dtype=dtype),
        dtype,
        use_kernels=True,
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
            grouped_mlp(inputs, routes, *weights, use_kernels=True)


def launch_weights_sum() -> None:
    for dtype in (torch.bfloat16, E4M3):
        for shape in ((64, 4096), (64, 4), (1, 4096)):
            units = units_of(torch.zeros(shape, dtype=dtype))
            weights_sum(units, Keys.of(*units.shape, units.device), torch.zeros((), dtype=torch.int64), True)


def launch_delta_net(dtype: torch.dtype, dim: int) -> None:
    """Launches the kernels of one decode and one prompt."""
    num_channels, ints = 4 * dim, torch.zeros((2, 4), dtype=torch.int32)
    weights = DeltaWeights(
        torch.zeros((num_channels, 4), dtype=dtype), torch.zeros(2), torch.zeros(2), torch.ones(dim, dtype=dtype), 1e-6
    )
    state = LayerState(torch.zeros((2, 2, dim, dim)), torch.zeros((2, 4, num_channels), dtype=dtype))
    rows = StateRows(ints[:, 0], ints[0], ints[0], ints[0, :1], 1, ints)
    delta_net(torch.zeros((8, 6 * dim), dtype=dtype), torch.zeros((8, 4), dtype=dtype), weights, state, rows, True)


def launch_low_rank() -> None:
    """Launches each tile on the projections of Qwen3-8B, and on inputs in FP8."""
    dtype, parts, slots = torch.bfloat16, torch.zeros(6144, dtype=torch.int32), torch.zeros(4096, dtype=torch.int32)
    factors = Factors(
        torch.zeros((8, 48, 4096), dtype=dtype), torch.zeros((8, 6144, 16), dtype=dtype), torch.ones(8, 3), parts,
        torch.zeros(2048, dtype=torch.int32),
    )  # fmt: skip
    for num_tokens in (1, 256, 1024, 4096):
        rows = AdapterRows.of(slots[:num_tokens])
        x, out = (torch.zeros((num_tokens, width), dtype=dtype) for width in (4096, 6144))
        for inputs in (x, quantize_rows(x, use_kernels=True)):
            add_low_rank(out, inputs, factors, rows, use_kernels=True)


def launch_over_fp8_cache(head_dim: int, group_size: int, block_size: int, window: int, num_kv_heads: int = 2) -> None:
    """Launches the kernels of two decodes, and those that store keys and values with and without prompts."""
    num_heads, dtype = num_kv_heads * group_size, torch.bfloat16
    cache = LayerCache(
        torch.zeros((4, num_kv_heads, block_size, head_dim), dtype=torch.int8),
        torch.zeros((4, num_kv_heads, head_dim, block_size), dtype=E4M3),
        torch.zeros((4, num_kv_heads, block_size), dtype=torch.int32),
    )
    slots, lengths = torch.tensor([0, block_size]), torch.ones(2, dtype=torch.int32)
    qkv = torch.zeros((2, (num_heads + 2 * num_kv_heads) * head_dim), dtype=dtype)
    cos = torch.ones((2, 1, head_dim), dtype=dtype)
    norm = torch.ones((num_heads + num_kv_heads, head_dim), dtype=dtype)
    for given in (qkv, ScaledProduct(qkv, torch.ones(2), torch.ones(qkv.shape[1]))):
        for has_prompts in (False, True):
            qk = qk_norm_rotate_store(given, norm, 1e-6, cos, cos, head_dim, cache, slots, has_prompts)
    q, k = qk.split((num_heads, num_kv_heads), 1)
    store_kvcache(k, k, cache, slots, use_kernels=True)
    backend = TritonAttention(
        AttentionShape(
            num_heads, num_kv_heads, head_dim, dtype, torch.device("cpu"), windows=(window,), has_fp8_cache=True
        )
    )
    tables = torch.arange(2, dtype=torch.int32)[:, None]
    metadata = AttentionMetadata(lengths, lengths, lengths[:1], 2, 1, 1, slots, tables, block_size)
    metadata.plan = backend.plan(metadata)
    backend.attend(q, k, k, cache, metadata, window)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    triton.JITFunction.run = compile_only
    launch_all()
    launch_weights_sum()
    launch_low_rank()
    for dtype, dim in ((torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 64)):
        launch_delta_net(dtype, dim)
    for head_dim, group_size, block_size, window in (
        (128, 2, 64, 0), (128, 8, 128, 0), (64, 3, 64, 0), (256, 4, 64, 100), (80, 12, 96, 0), (128, 4, 32, 0),
        (16, 2, 32, 0), (48, 1, 64, 0), (112, 7, 64, 0),
    ):  # fmt: skip
        launch_over_fp8_cache(head_dim, group_size, block_size, window)
