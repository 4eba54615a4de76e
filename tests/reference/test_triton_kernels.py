"""Our Triton kernels, run by Triton's interpreter on the CPU, against their plain twins.

The interpreter shows what a kernel computes, not how a GPU rounds it; tests/gpu/test_gpu_kernels.py has the rest. It
multiplies the bits of bfloat16 numbers as integers (tl.dot), so attention is in float32 and float16 here. Kernels of
sampling: test_sample.py, test_filters.py and test_process_logits.py; of a step's inputs: test_step_kernels.py.
"""

import importlib
import itertools
import math
import os
import pkgutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.attention_case import MIXED, Case, make_case, relative_error
from support.attention_case import run as run_case
from support.fp8_factory import assert_rounded
from support.long import some
from support.model_factory import save_model
from support.thread_ranks import logits_of

import nanovllm.attention
import nanovllm.ops
from nanovllm import LLM, SamplingParams
from nanovllm.attention import splits, triton_backend, triton_prompts
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.layers import linear as of_layers
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import LayerContext
from nanovllm.layers.forms import Form, PartialSum
from nanovllm.layers.norm import QKNorm, RMSNorm
from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding
from nanovllm.ops import gluon
from nanovllm.ops.act_and_mul import act_and_mul
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.exchange import Exchange, _is_direct, mail_shape
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.linear import linear, triton_single_row_linear
from nanovllm.ops.norm import add_rms_norm, rms_norm
from nanovllm.ops.qk_norm_rotate_store import qk_norm_rotate_store
from nanovllm.ops.quantize import E4M3, Quantized, ScaledProduct, quantize_rows
from nanovllm.ops.store_kvcache import store_kvcache

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities that are meant

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# The kernels round once, but the twins may round in between. Tolerances are in units in the last place of the largest
# number.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == expected.dtype and ours.shape == expected.shape and ours.isfinite().all()
    error = (ours.double() - expected.double()).abs()
    limit = TOLERANCE[ours.dtype] * (1 + expected.double().abs())
    assert (error <= limit).all(), float((error - limit).max())


# Attention


@pytest.mark.parametrize("num_kv_heads, head_dim", [(1, 32), (2, 64), (3, 40), (8, 128)])
@DTYPES
def test_keys_and_values_go_to_their_slots_bit_by_bit(num_kv_heads, head_dim, dtype):
    """Rows of a fused projection are not contiguous, widths are no powers of 2, and padding rows are not written."""
    qkv = random_tensor(9, 5 + 2 * num_kv_heads, head_dim, dtype=dtype)
    _, k, v = qkv.split((5, num_kv_heads, num_kv_heads), 1)
    slots = torch.tensor([7, -1, 0, 39, -1, 12, 13, 1, -1])
    ours, expected = (
        [torch.full((5, 8, num_kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)] for _ in range(2)
    )
    store_kvcache(k, v, LayerCache(*ours), slots, use_kernels=True)
    LayerCache(*expected).write(k, v, slots)
    for our_cache, cache in zip(ours, expected, strict=True):
        assert torch.equal(our_cache, cache)
        assert (our_cache.flatten(0, 1)[[2, 38]] == 7).all()


def take_rows(case: Case, rows: list[int]) -> Case:
    """The decodes `rows` alone, over the same cache."""
    metadata = case.metadata
    lists = ([whole[row] for row in rows] for whole in (case.queries, case.keys, case.values, case.num_new))
    lengths = metadata.context_lens[rows]
    return Case(
        *lists,
        case.cache,
        AttentionMetadata(
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32),
            context_lens=lengths,
            num_decodes=torch.tensor([len(rows)], dtype=torch.int32),
            max_num_decodes=len(rows),
            max_seqlen_q=1,
            max_seqlen_k=int(lengths.max()),
            slot_mapping=metadata.slot_mapping[rows],
            block_tables=metadata.block_tables[rows],
            block_size=metadata.block_size,
        ),
        case.window,
    )


@pytest.mark.grid(1)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_decode_is_bitwise_independent_of_its_neighbours(dtype, window):
    """Only a row's own length may decide where it is split; otherwise a neighbour's arrival would change a request's
    tokens.
    """
    lengths = [255, 3, 256, 257, 0, 700, 511, 512, 63, 1200]
    case = make_case([(length, 1) for length in lengths], 16, 2, 3, 32, dtype, window=window)
    together = run_case("triton", case)
    assert relative_error(case, together) < 1e-3
    for rows in ([[row] for row in range(len(lengths))], [[9, 0, 5]], [list(range(10))[::-1]]):
        for chosen in rows:
            assert torch.equal(run_case("triton", take_rows(case, chosen)), together[chosen]), chosen
    # The same decodes beside a prefill.
    mixed = make_case([(length, 1) for length in lengths] + [(20, 30)], 16, 2, 3, 32, dtype, window=window)
    out = run_case("triton", mixed)
    alone = run_case("triton", take_rows(mixed, list(range(10))))
    assert torch.equal(out[:10], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_that_are_not_decodes_are_left_to_the_other_kernel(dtype, monkeypatch):
    """Only the device knows how many decodes a captured step with prompts has. The rows after them have keys too; the
    kernel for prompts attends those, perhaps earlier.
    """
    case = make_case([(300, 1), (17, 1), (40, 1), (5, 1)], 16, 1, 2, 32, dtype)
    metadata = case.metadata
    expected = run_case("triton", take_rows(case, [0, 1]))
    metadata.num_decodes[0] = 2
    metadata.slot_mapping[2:] = -1
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(7))
    out = run_case("triton", case)
    assert (out[2:] == 7).all()
    assert torch.equal(out[:2], expected)
    metadata.num_decodes[0] = 0
    assert (run_case("triton", case) == 7).all()


def test_a_captured_step_with_prompts_attends_every_row_once():
    """The host knows of no more than `max_num_decodes` rows; the device, how many of them are decodes."""
    case = make_case([(300, 1), (17, 1), (0, 1), (0, 40), (5, 70), (30, 1)], 16, 2, 2, 32)
    expected = run_case("triton", case)
    assert relative_error(case, expected) < 1e-5
    case.metadata.max_num_decodes = 6
    assert torch.equal(run_case("triton", case), expected)


@pytest.mark.parametrize("window", some([0, 700], 0))
def test_long_sequences_have_longer_splits(monkeypatch, window):
    """Lengths are a sixteenth of the real ones: splits have 16 keys up to key 64, then 32 up to 1,024, and 64 up to
    2,048.
    """
    monkeypatch.setattr(splits, "SHORTEST_SPLIT", 16)
    edges = {16: 16, 64: 16, 1024: 32, 2048: 64, 4096: 128}  # the last length with splits of so many keys
    lengths = [edge + more for edge in edges for more in (-1, 0, 1)] + [1, 33, 1500, 5000]
    case = make_case([(length - 1, 1) for length in lengths], 16, 1, 2, 32, window=window)
    backend = TritonAttention(AttentionShape(2, 1, 32, torch.float32, CPU, len(lengths), 5000, windows=(window,)))
    assert relative_error(case, run_case("triton", case, backend)) < 1e-6
    split_lengths = [next((keys for edge, keys in edges.items() if length <= edge), 256) for length in lengths]
    assert backend.split_lengths(np.array(lengths)).tolist() == split_lengths
    plan = backend.plan(case.metadata)[window]
    found = list(zip(plan.item_rows.tolist(), plan.item_splits.tolist(), strict=True))[: int(plan.num_items)]
    assert sorted(found) == [
        (row, split)
        for row, (length, keys) in enumerate(zip(lengths, split_lengths, strict=True))
        for split in range(max(length - window, 0) // keys if window else 0, -(-length // keys))
    ]


@pytest.mark.grid(2)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_prompts_are_launched_as_was_measured_only_where_it_was(monkeypatch, capability, head_dim, dtype):
    """Other GPUs may have no copy engine, or too little shared memory for these tiles."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch_of = triton_prompts.prompt_launch.__wrapped__
    for num_heads, num_kv_heads in ((8, 8), (8, 4), (12, 4), (8, 2)):
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype, torch.device("cuda"))
        is_known = capability[0] == 9 and head_dim in (64, 128, 256) and dtype != torch.float32
        for block_size in (16, 32, 48, 64, 256):
            launch = launch_of(shape, block_size)
            assert (num_heads // num_kv_heads) % launch.heads == 0
            assert not launch.has_descriptors or (is_known and block_size % launch.keys == 0)
        assert launch_of(shape, 64).has_descriptors == is_known


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("version", ["3.5.1", "3.6.0.post1", "3.7.1", "3.8.0+git12ab34", "3.9.0", "3.10.0", "4.0.0"])
def test_the_kernel_of_hopper_gets_what_it_can_attend(monkeypatch, capability, version):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gluon, "_is_complete", lambda: True)
    monkeypatch.setattr(triton_prompts.triton, "__version__", version)
    monkeypatch.setattr(triton_prompts, "has_gluon", gluon.has_gluon.__wrapped__)
    has_kernel = triton_prompts.has_hopper_kernel.__wrapped__
    for dtype, head_dim, (num_heads, num_kv_heads), block_size in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), (64, 96, 128, 256), ((8, 8), (8, 4), (12, 4), (8, 2)),
        (16, 32, 64, 96, 128, 256),
    ):  # fmt: skip
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype, torch.device("cuda"))
        assert has_kernel(shape, block_size) == (
            capability == (9, 0)
            and version[:3] in ("3.6", "3.7", "3.8", "3.9")
            and dtype != torch.float32
            and head_dim == 128
            and num_heads > num_kv_heads
            and block_size in (64, 128, 256)
        )


def test_a_triton_without_gluon_takes_the_other_kernel_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nanovllm.ops.hopper_memory", None)
    monkeypatch.delattr(nanovllm.ops, "hopper_memory", raising=False)
    assert not gluon._is_complete.__wrapped__()
    assert "Gluon cannot be imported" in caplog.text


@pytest.mark.parametrize("window", [0, 20])
def test_layers_without_a_window_get_the_kernel_of_hopper(monkeypatch, window):
    """It knows no windows."""
    calls = []
    stub = SimpleNamespace(attend_prompts=lambda *args: calls.append(args))
    monkeypatch.setitem(sys.modules, "nanovllm.attention.hopper_prompts", stub)
    monkeypatch.setattr(nanovllm.attention, "hopper_prompts", stub, raising=False)
    monkeypatch.setattr(triton_prompts, "has_hopper_kernel", lambda *_: True)
    case = make_case(MIXED, 16, window=window, scale=0.3)
    found = run_case("triton", case)
    if window:
        assert not calls and relative_error(case, found) < 1e-6
    else:
        ((q, cache, _, metadata, scale),) = calls
        assert len(q) == sum(new for _, new in MIXED) and cache is case.cache
        assert metadata.query_tiles is case.metadata.query_tiles and scale == pytest.approx(0.3 / math.log(2))


@pytest.mark.parametrize("may_fuse", [True, False])
@pytest.mark.parametrize("has_fp8_cache", [True, False])
def test_a_product_is_left_to_attention_only_for_a_cache_in_16_bits(may_fuse, has_fp8_cache):
    backend = TritonAttention(AttentionShape(2, 1, 128, torch.bfloat16, CPU, has_fp8_cache=has_fp8_cache))
    accepts = Attention(0, backend, use_kernels=True, may_fuse=may_fuse).accepts
    assert (Form.UNFINISHED in accepts) == (may_fuse and not has_fp8_cache) and Form.SCALED in accepts
    assert Attention(0, backend, use_kernels=False, may_fuse=may_fuse).accepts == Form.PLAIN


COMPILING = """
import sys
import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_capability = lambda *_: (9, 0)
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from nanovllm.attention import hopper_prompts
from nanovllm.attention.hopper_prompts import _attend_prompts_kernel as kernel

DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "i8": gl.int8, "fp8e4nv": gl.float8e4nv}

def descriptor(dtype, columns):
    return f"tensordesc<{dtype}[64,{columns}],{gl.NVMMASharedLayout.get_default_for([64, 64], DTYPES[dtype])!r}>"

for dtype, of_cache, (num_heads, num_kv_heads), block_size, of_launch in (
    ("bf16", "bf16", (16, 8), 64, "CONSTANTS"), ("fp16", "fp16", (28, 4), 256, "CONSTANTS"),
    ("bf16", "fp8e4nv", (16, 8), 64, "FP8_CONSTANTS"), ("fp16", "fp8e4nv", (28, 4), 128, "FP8_CONSTANTS"),
    ("bf16", "bf16", (16, 8), 64, "DECODE_CONSTANTS"), ("bf16", "fp8e4nv", (16, 8), 64, "FP8_DECODE_CONSTANTS"),
):
    of_keys = "i8" if of_cache == "fp8e4nv" else of_cache
    types = {"keys_by_row": descriptor(of_keys, 64), "values_by_row": descriptor(of_cache, 64)}
    types["q_by_row"] = descriptor(dtype, 128)
    if of_cache == "fp8e4nv":
        scales = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        types["scales_by_row"] = f"tensordesc<i32[1,64],{scales!r}>"
    types |= {"out": f"*{dtype}", "block_tables": "*i32", "query_tiles": "*i32", "scale": "fp32", "num_items": "i32"}
    constants = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": 128, "BLOCK_SIZE": block_size}
    constants |= getattr(hopper_prompts, of_launch)
    if "scales_by_row" not in types:
        constants["scales_by_row"] = None
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name][0] == "*"}
    placed = {(names.index(name),): constant for name, constant in constants.items()}
    source = GluonASTSource(kernel, signature, placed, aligned)
    options = {"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    # The kernel after this one may start only when this one knows that all before it is done.
    waits, lets_next_come = (ptx.find(f"griddepcontrol.{each}") for each in ("wait", "launch_dependents"))
    print(compiled.metadata.shared, "wgmma" in ptx and "setmaxnreg" in ptx, 0 < waits < lets_next_come)

from nanovllm.ops.hopper_product import _fused_product_kernel as kernel

for dtype, activation, norm in (("bf16", "silu", 0), ("fp16", "gelu_pytorch_tanh", 0), ("bf16", None, "*fp32"),
                                ("fp16", None, "constexpr")):
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPES[dtype])
    tile, result = (f"tensordesc<{dtype}[{rows},{columns}],{layout!r}>" for rows, columns in ((128, 64), (64, 128)))
    types = {"x": tile, "weight": tile, "out": result}
    constants = {"INPUT_SIZE": 1024, "NUM_COLUMNS": 16, "NUM_HEADS": 16, "NUM_KV_HEADS": 8, "ACTIVATION": activation}
    if activation is None:
        types["heads"] = norm, "fp32", *[f"*{dtype}"] * 4, "*i64"
    else:
        constants["heads"] = None
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    placed = {(names.index(name),): constant for name, constant in constants.items()}
    if norm == "constexpr":
        placed[names.index("heads"), 0] = None
    source = GluonASTSource(kernel, signature, placed, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    print(compiled.metadata.shared, "wgmma" in ptx and "setmaxnreg" in ptx, "griddepcontrol.wait" in ptx)
"""


@pytest.mark.long
def test_the_kernels_of_hopper_compile_with_this_triton(tmp_path):
    """They cannot be interpreted. tests/gpu/test_gpu_hopper_prompts.py and test_gpu_hopper_product.py check their
    results."""
    if tuple(map(int, triton_prompts.triton.__version__.split(".")[:2])) not in gluon.VERSIONS:
        pytest.skip("this Triton's Gluon is not used")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # compiles everything again
    done = subprocess.run(
        [sys.executable, "-c", COMPILING], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        shared, is_hoppers, waits = line.split()
        assert int(shared) <= 227 * 1024 and is_hoppers == waits == "True"
    assert len(done.stdout.splitlines()) == 10


@pytest.mark.parametrize(
    "head_dim, dtype, num_bytes, num_stages",
    [(128, torch.bfloat16, 232448, 5), (128, torch.bfloat16, 166912, 5), (128, torch.bfloat16, 101376, 2),
     (256, torch.bfloat16, 232448, 2), (128, torch.float32, 232448, 2), (64, torch.float16, 101376, 5)],
)  # fmt: skip
def test_few_decodes_are_attended_in_more_stages_where_they_fit(monkeypatch, head_dim, dtype, num_bytes, num_stages):
    """The numbers are the shared memory of an H200, an A100 and a consumer's card."""
    monkeypatch.setattr(triton_backend, "shared_memory", lambda device: num_bytes)
    backend = TritonAttention(AttentionShape(8, 1, head_dim, dtype, CPU))
    assert [backend.variant_key(rows, False) for rows in (1, 256, 257)] == [num_stages, num_stages, 2]
    assert backend.variant_key(1, True) == 2


@pytest.mark.parametrize("max_model_len", some([1, 16, 17, 65, 100, 129, 700, 1024, 1025, 3000], 1, 65, 700))
def test_the_longest_context_has_as_many_splits_as_there_is_room_for(monkeypatch, max_model_len):
    """One more would be lost, or written into the next row's."""
    monkeypatch.setattr(splits, "SHORTEST_SPLIT", 16)
    lengths = np.arange(1, max_model_len + 1)
    num_splits = -(-lengths // splits.split_lengths(lengths))
    assert splits.max_num_splits(max_model_len) == num_splits.max()
    rows = [(max_model_len - 1, 1), (int(lengths[num_splits.argmax()]) - 1, 1)] * 2
    case = make_case(rows, 16, 1, 2, 32)
    backend = TritonAttention(AttentionShape(2, 1, 32, torch.float32, CPU, len(rows), max_model_len))
    assert relative_error(case, run_case("triton", case, backend)) < 1e-6


def test_a_full_engine_has_room_for_all_its_splits():
    """It holds max_num_seqs sequences of max_model_len each; their partial results are side by side."""
    case = make_case([(599, 1)] * 5, 16, 2, 1, 32)
    shape = AttentionShape(2, 2, 32, torch.float32, CPU, max_num_seqs=5, max_model_len=600)
    assert relative_error(case, run_case("triton", case, make_attention_backend("triton", shape, 16))) < 1e-6


def test_a_table_wider_than_needed_changes_nothing():
    """The device's own tables are as wide as the longest sequence could be, and hold old blocks after the new ones."""
    case = make_case(MIXED, 16)
    expected = run_case("triton", case)
    tables = torch.full((len(MIXED), 64), 10**6, dtype=torch.int32)
    for row, length in enumerate(case.metadata.context_lens.tolist()):
        num_blocks = -(-length // 16)
        tables[row, :num_blocks] = case.metadata.block_tables[row, :num_blocks]
    case.metadata.block_tables = tables[:, :40]  # a view with a stride of its own
    assert torch.equal(run_case("triton", case), expected)


# Norms, activation, rotation


@pytest.mark.grid(2)
@DTYPES
@pytest.mark.parametrize("size", [1, 7, 32, 160, 1000, 2560])
def test_norms_are_those_of_the_layer(size, dtype):
    norm = RMSNorm(size, 1e-6, LayerContext(dtype, CPU))
    norm.weight.data.copy_(random_tensor(size, seed=1) + 1)
    x, residual = random_tensor(5, size, dtype=dtype, seed=2), random_tensor(5, size, dtype=dtype, seed=3) * 3
    x[2], residual[2] = 0, 0
    before = x.clone(), residual.clone()
    assert_near(rms_norm(x, norm.weight, norm.eps, use_kernels=True), norm(x))
    normed, total = add_rms_norm(x, residual, norm.weight, norm.eps, use_kernels=True)
    expected, expected_total = norm.reduce_add(PartialSum(x), residual)
    if dtype == torch.bfloat16:  # to which the interpreter truncates
        assert_near(total, expected_total)
    else:
        assert torch.equal(total, expected_total), "the residual is rounded as a plain sum is"
    assert_near(normed, expected)
    fused = RMSNorm(size, 1e-6, LayerContext(dtype, CPU, use_kernels=True))
    fused.weight.data.copy_(norm.weight)
    assert torch.equal(fused(x), rms_norm(x, norm.weight, norm.eps, use_kernels=True))
    assert all(map(torch.equal, fused.reduce_add(PartialSum(x), residual), (normed, total)))
    first, x_itself = fused.reduce_add(PartialSum(x), None)
    assert torch.equal(first, fused(x)) and torch.equal(x_itself, x)
    assert torch.equal(fused(x[None]), norm(x[None])), "the kernel takes rows alone"
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@DTYPES
@pytest.mark.parametrize("num_parts, size", [(2, 160), (4, 7), (3, 1000)])
def test_the_parts_of_a_product_are_summed_by_the_norm(num_parts, size, dtype):
    """Only their sum with the residual is rounded: the parts may be large where the sum is small."""
    weight = random_tensor(size, dtype=dtype, seed=1) + 1
    parts, residual = 30 * random_tensor(num_parts, 5, size, seed=2), random_tensor(5, size, dtype=dtype, seed=3)
    parts[1] = 0.5 - parts[0]
    copies = parts.clone(), residual.clone()
    (ours, total), (expected, exact) = (add_rms_norm(parts, residual, weight, 1e-6, fused) for fused in (True, False))
    assert total.dtype == ours.dtype == dtype
    assert_near(total, exact)
    assert_near(ours, expected)
    assert_near(exact, (parts.double().sum(0) + residual.double()).to(dtype))
    assert torch.equal(parts, copies[0]) and torch.equal(residual, copies[1])


@DTYPES
@pytest.mark.parametrize("size", [1, 3, 40, 1024, 1025, 3000])
def test_the_gate_is_that_of_the_layer(size, dtype):
    """Sizes around the 1,024 columns of a program, and gates so large that their exp overflows."""
    gate_up = random_tensor(4, 2 * size, dtype=dtype) * 4
    gate_up[1, 0], gate_up[2, 0] = -300, 300
    assert_near(act_and_mul(gate_up, use_kernels=True), act_and_mul(gate_up))


@pytest.mark.grid(2)
@DTYPES
@pytest.mark.parametrize("output_size, input_size", [(1, 1), (8, 1024), (13, 700), (40, 1024), (21, 3000), (9, 1025)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_single_row_is_multiplied_as_by_pytorch(output_size, input_size, has_bias, dtype):
    """Neither the last outputs, which do not fill a program, nor the last inputs may be lost or read twice."""
    x, weight = random_tensor(1, input_size, dtype=dtype), random_tensor(output_size, input_size, dtype=dtype, seed=1)
    bias = random_tensor(output_size, dtype=dtype, seed=2) if has_bias else None
    ours = triton_single_row_linear(x, weight, bias)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert ours.dtype == dtype and ours.shape == expected.shape
    # The error of rounding the result, and a little for the sum.
    limit = torch.finfo(dtype).eps * expected.abs() + 1e-6 * input_size
    assert ((ours.double() - expected).abs() <= limit).all()
    memory = torch.full((3, output_size), 7.0, dtype=dtype)
    given = triton_single_row_linear(x, weight, bias, memory[1:2])
    assert torch.equal(given, ours) and given.data_ptr() == memory[1].data_ptr() and (memory[[0, 2]] == 7).all()


def test_only_a_single_row_takes_the_kernel_for_it(monkeypatch):
    """The kernel computes one row."""
    weight, bias = random_tensor(6, 32), random_tensor(6, seed=1)
    asked = []

    def counted(x, weight, bias, out=None):
        asked.append((tuple(x.shape), bias is not None, out is not None))
        return torch.nn.functional.linear(x, weight, bias) if out is None else torch.mm(x, weight.T, out=out)

    monkeypatch.setattr(sys.modules["nanovllm.ops.linear"], "triton_single_row_linear", counted)
    for shape in [(1, 32), (2, 32), (3, 32), (1, 2, 32)]:
        x = random_tensor(*shape, seed=3)
        for of_call in (None, bias):
            expected = torch.nn.functional.linear(x, weight, of_call)
            for is_fused in (True, False):
                torch.testing.assert_close(linear(x, weight, None, of_call, is_fused), expected)
        if x.ndim == 2:
            memory = torch.empty(len(x), 6)
            assert linear(x, weight, None, use_kernels=True, out=memory) is memory
            torch.testing.assert_close(memory, x @ weight.T)
    assert asked == [((1, 32), False, False), ((1, 32), True, False), ((1, 32), False, True)]


@pytest.mark.grid(2)
@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 32, 32), (3, 1, 40, 40), (5, 5, 64, 64), (16, 8, 128, 128), (6, 3, 10, 10), (4, 2, 96, 72), (2, 1, 80, 2)],
)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0], ids=["no norm", "norm", "norm + 1"])
def test_queries_and_keys_are_normed_rotated_and_stored_as_by_the_layers(
    num_heads, num_kv_heads, head_dim, rotary_dim, offset, dtype
):
    """One kernel does four steps of the layer. Numbers and sizes of heads are not powers of 2, and some heads are only
    partly rotated.
    """
    num_tokens, block_size, num_all_heads = 7, 4, num_heads + 2 * num_kv_heads
    weight, eps, norm = None, 0.0, lambda qk: qk
    if offset is not None:
        norm = QKNorm(num_heads, num_kv_heads, head_dim, 1e-6, LayerContext(dtype, CPU), offset)
        weights = random_tensor(2, head_dim, seed=1) + 1
        norm.weight.data[:num_heads], norm.weight.data[num_heads:] = weights
        weight, eps = norm.weight, norm.eps
    rope = RotaryEmbedding(head_dim, 5000, RopeConfig(10000.0, rotary_dim), dtype, CPU)
    rotary = rope.lookup(torch.tensor([0, 1, 2, 17, 4999, 300, 0]))
    # A wider projection may hold more than queries, keys and values.
    qkv = (random_tensor(num_tokens, num_all_heads + 1, head_dim, dtype=dtype, seed=2) * 3)[:, :num_all_heads]
    slots = torch.tensor([5, 11, -1, 0, 1, 4, -1])
    shape = (3, block_size, num_kv_heads, head_dim)
    k_cache, v_cache, exact_k_cache, exact_v_cache = (torch.full(shape, 7.0, dtype=dtype) for _ in range(4))
    before = qkv.clone()
    out = qk_norm_rotate_store(qkv, weight, eps, *rotary[:3], LayerCache(k_cache, v_cache), slots)
    assert torch.equal(qkv, before)
    expected = rotary.rotate(norm(qkv[:, :-num_kv_heads]))
    LayerCache(exact_k_cache, exact_v_cache).write(expected[:, num_heads:], qkv[:, -num_kv_heads:], slots)
    assert_near(out, expected)
    assert_near(k_cache, exact_k_cache)
    assert torch.equal(v_cache, exact_v_cache)
    is_written = torch.zeros(3 * block_size, dtype=torch.bool)
    is_written[slots[slots >= 0]] = True
    assert (k_cache.flatten(0, 1)[~is_written] == 7).all(), "a padding row has no slot"
    assert torch.equal(k_cache.flatten(0, 1)[slots[slots >= 0]], out[slots >= 0][:, num_heads:])


# Sums over ranks


class Peers(threading.Thread):
    """All ranks of an exchange except `rank`, in plain PyTorch, for one call. They send half of a part's numbers at
    once, so that a rank that does not wait for all of them sums or keeps too little. They send the rest row by row,
    once they have received that rank's numbers.

    Args:
        parts: mailbox and rows of each part of the call.
        products: the product of each rank.
        normed: the right results for all rows.
    """

    def __init__(self, mails, rank, parts, products, normed, is_direct):
        super().__init__(daemon=True)
        self.mails, self.rank, self.parts, self.is_direct = mails, rank, parts, is_direct
        self.products, self.normed = products, normed
        self.others = [other for other in range(len(mails)) if other != rank]
        self.compared, self.is_late, self.is_over = [], False, threading.Event()

    def __enter__(self):
        # After nearly every operation, each thread waits this long for the lock of the interpreter. With the default of
        # 5 ms, one call can take minutes on some machines.
        self.switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self.start()
        return self

    def __exit__(self, *exception):
        self.is_over.set()
        self.join()
        sys.setswitchinterval(self.switch_interval)
        assert not self.is_late, "somebody waited for ever"

    def run(self):
        for mailbox, part in self.parts:
            self._run_part([mail[mailbox] for mail in self.mails], part)
        deadline = _deadline()
        while not self.is_over.wait(0.01):
            if time.process_time() > deadline:
                self._give_up()

    def _run_part(self, mails, part):
        num_rows, normed = len(self.normed[part]), self.normed[part]
        num_programs = num_rows if self.is_direct else -(-num_rows // len(mails))
        products = [product[part] for product in self.products]
        flat = mails[self.rank].flatten(0, 1)

        def send(program, columns):
            own = self.rank * num_programs + program
            for other in self.others:
                number = other * num_programs + program
                if self.is_direct:
                    flat[number, columns] = products[other][program, columns] + 0.0
                elif own < num_rows:
                    flat[number, columns] = products[other][own, columns] + 0.0
                if not self.is_direct and number < num_rows:
                    mails[self.rank][1, number, columns] = normed[number, columns] + 0.0

        for program in range(num_programs):
            send(program, slice(0, None, 2))
        for program in range(num_programs):
            own = self.rank * num_programs + program
            for other in self.others:
                row = program if self.is_direct else other * num_programs + program
                if row < num_rows:
                    self.compared.append((self._take(mails[other].flatten(0, 1)[own]), products[self.rank][row]))
            send(program, slice(1, None, 2))
            if not self.is_direct and own < num_rows:
                self.compared += [(self._take(mails[other][1, own]), normed[own]) for other in self.others]

    def _take(self, row):
        deadline = _deadline()
        while is_nothing(row).any() and not self.is_over.is_set():
            os.sched_yield()
            if time.process_time() > deadline:
                self._give_up()
        taken = row.clone()
        row.fill_(-0.0)
        return taken

    def _give_up(self):
        self.is_late = True
        while not self.is_over.wait(0.1):  # so that the kernel ends at any wait
            self.mails[self.rank].fill_(math.nan)


def _deadline() -> float:
    """In seconds of this process's processor time. Threads that wait for mail spin, so it passes while they wait. On a
    busy machine, a deadline by the clock could pass while these threads hardly run."""
    return time.process_time() + 6


def is_nothing(mail: torch.Tensor) -> torch.Tensor:
    return (mail == 0) & mail.signbit()


def scaled_by_powers_of_two(product: torch.Tensor) -> ScaledProduct:
    """`product` as a ScaledProduct, without rounding."""
    num_rows, width = product.shape
    row_scales, column_scales = torch.exp2(torch.arange(num_rows) % 5 - 2.0), torch.exp2(torch.arange(width) % 3 - 1.0)
    return ScaledProduct((product / row_scales[:, None] / column_scales).to(product.dtype), row_scales, column_scales)


def check_exchange(
    monkeypatch, rank, calls, is_direct, max_num_rows=8, eps=1e-6, has_post_norms=False, is_fp8=False
) -> None:
    """Makes the calls of one step as `rank`, beside plain peers. Each call has every rank's products.

    has_post_norms: the first call only sums, and no call has a residual, as in models with norms after their blocks.
    is_fp8: this rank's products keep their scales, and its results are in FP8.
    """
    size, dtype, (num_rows, width) = len(calls[0]), calls[0][0].dtype, calls[0][0].shape
    weight = torch.linspace(0.5, 2, width).to(dtype)
    weight[:2] = torch.tensor([-1.0, 0.0])  # which make −0.0 of 0.0 and of a number below 0
    mails = [torch.empty(mail_shape(width), dtype=dtype) for _ in range(size)]
    addresses = [mail.data_ptr() for mail in mails]
    exchange = [Exchange(Parallel(other, size), mails[other], addresses) for other in range(size)][rank]
    mailboxes = itertools.chain((2,), itertools.cycle((0, 1)))
    exact, residual = torch.zeros(num_rows, width), None
    for index, products in enumerate(calls):
        before = torch.zeros(num_rows, width) if has_post_norms else exact
        exact = (before + sum(product.float() for product in products)).to(dtype).float()
        of_call, results = None if has_post_norms and index == 0 else weight, []
        expected = exact if of_call is None else torch.nn.functional.rms_norm(exact, (width,), weight.float(), eps)
        expected = expected.to(dtype)

        def guarded(tensor, results=results):
            results.append(torch.full((len(tensor) + 4, width), math.nan, dtype=dtype))
            return results[-1][: len(tensor)]

        parts = [(next(mailboxes), slice(first, first + max_num_rows)) for first in range(0, num_rows, max_num_rows)]

        def guarded_quantized(num_rows, width, device, results=results):
            values = torch.full((num_rows + 4, width), math.nan).to(E4M3)
            scales = torch.full((num_rows + 4, 1), math.nan)
            results.extend((values, scales))
            return Quantized(values[:num_rows], scales[:num_rows, 0])

        with monkeypatch.context() as patch, Peers(mails, rank, parts, products, expected, is_direct) as peers:
            patch.setattr(torch, "empty_like", guarded)
            patch.setattr("nanovllm.ops.exchange.empty_quantized", guarded_quantized)
            given = None if has_post_norms else residual
            product = scaled_by_powers_of_two(products[rank]) if is_fp8 else products[rank]
            normed, residual = exchange.sum_add_norm(product, given, of_call, eps, index == 0, is_fp8)
        if is_fp8:
            twin = quantize_rows(expected)
            torch.testing.assert_close(normed.scales, twin.scales, rtol=1e-5, atol=0)
            # A last bit of the norm sometimes decides which of two neighbours a number is rounded to.
            assert (normed.values.float() != twin.values.float()).float().mean() < 0.02
            assert_rounded(normed, expected.float())
        for sent, right in [*peers.compared, *([] if is_fp8 else [(normed, expected)])]:
            assert_near(sent, right)
        for _, part in parts:
            num_rows_of_rank = -(-len(exact[part]) // size)
            own = slice(None) if is_direct else slice(rank * num_rows_of_rank, (rank + 1) * num_rows_of_rank)
            assert torch.equal(residual[part][own].float(), exact[part][own]), "the sum is rounded once"
        assert all(result[num_rows:].float().isnan().all() for result in results), "a row past the last is written"
        assert all(is_nothing(mail).all() for mail in mails), "something is sent that nobody reads"


EXCHANGED = [(torch.float32, size, num_rows) for size in (2, 4) for num_rows in (1, 3, 11)]
EXCHANGED += [(torch.float16, 4, 3), (torch.bfloat16, 4, 3)]


@pytest.mark.grid(2)
@pytest.mark.parametrize(("dtype", "size", "num_rows"), EXCHANGED, ids=str)
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "by owner"])
def test_the_exchange_is_the_sum_and_the_norm(monkeypatch, is_direct, dtype, size, num_rows):
    """This finds a row that no rank or two ranks sum, a row past the last, a residual that every rank counts, half a
    row taken for a whole one, a zero taken for an empty place, and a mailbox used again before all ranks have emptied
    it.
    """
    monkeypatch.setattr("nanovllm.ops.exchange._MAX_ROWS", 8)  # so that 11 rows are two parts
    monkeypatch.setattr("nanovllm.ops.exchange._BYTES_OF_A_TRIP", 2**20 if is_direct else -1)
    is_direct = is_direct and size * min(num_rows, 8) <= 16  # a mailbox has 16 rows
    for rank in range(size):
        # Multiples of 1/8, whose sums float32 knows exactly.
        calls = [
            [
                (random_tensor(num_rows, 72, seed=10 * call + other) * 8).round().div(8).to(dtype)
                for other in range(size)
            ]
            for call in range(2)
        ]
        for product in itertools.chain(*calls):
            product[0, :5] = -0.0
        check_exchange(monkeypatch, rank, calls, is_direct, eps=0.1)


@pytest.mark.grid(2)
@pytest.mark.parametrize(("size", "num_rows"), [(2, 1), (2, 3), (2, 11), (4, 3)])
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "by owner"])
def test_the_exchange_takes_scaled_products_and_gives_fp8(monkeypatch, is_direct, size, num_rows):
    """It catches scales of another row, or of a row in another part. It also catches a scale of the rows sent instead
    of those received."""
    monkeypatch.setattr("nanovllm.ops.exchange._MAX_ROWS", 8)
    monkeypatch.setattr("nanovllm.ops.exchange._BYTES_OF_A_TRIP", 2**20 if is_direct else -1)
    for rank in range(size):
        calls = [
            [(random_tensor(num_rows, 72, seed=10 * call + other) * 8).round().div(8) for other in range(size)]
            for call in range(2)
        ]
        for product in itertools.chain(*calls):
            product *= torch.exp2(torch.arange(num_rows) % 7.0)[:, None]  # so that rows have scales of their own
        check_exchange(monkeypatch, rank, calls, is_direct, eps=100.0, is_fp8=True)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "by owner"])
def test_norms_after_blocks_are_sums_without_residuals(monkeypatch, is_direct):
    """A call without a residual once began a step, so all sums of such a model would have used the first mailbox."""
    monkeypatch.setattr("nanovllm.ops.exchange._MAX_ROWS", 8)
    monkeypatch.setattr("nanovllm.ops.exchange._BYTES_OF_A_TRIP", 2**20 if is_direct else -1)
    for rank in range(2):
        calls = [
            [(random_tensor(3, 72, seed=10 * call + other) * 8).round().div(8) for other in range(2)]
            for call in range(4)
        ]
        check_exchange(monkeypatch, rank, calls, is_direct, eps=0.1, has_post_norms=True)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "by owner"])
def test_ranks_sum_in_float32_and_norm_the_sum_as_it_is_kept(monkeypatch, is_direct):
    """float16 keeps no odd number beyond 2048: 2048 + 3 is kept as 2052, and 2048 + 1 + 1 is 2050 only in float32."""
    monkeypatch.setattr("nanovllm.ops.exchange._BYTES_OF_A_TRIP", 2**20 if is_direct else -1)
    products = [torch.full((1, 72), value, dtype=torch.float16) for value in (2048, 0, 0, 0)]
    products[1][0, 3:40], products[1][0, 50], products[2][0, 50] = 3, 1, 1
    sent = []
    monkeypatch.setattr(sys.modules[__name__], "assert_near", lambda ours, expected: sent.append((ours, expected)))
    check_exchange(monkeypatch, 0, [products], is_direct, max_num_rows=2048)
    assert sent and all(torch.equal(ours, expected) for ours, expected in sent)


def test_the_way_is_the_one_that_takes_less_time():
    """Two ranks send as much either way; with four ranks, 85 rows of 8 KiB cost less than a second trip."""
    assert all(_is_direct(2, num_rows, num_rows * 8192) for num_rows in (1, 85, 16384))
    assert [_is_direct(4, num_rows, num_rows * 8192) for num_rows in (1, 85, 86, 16384)] == [True, True, False, False]
    assert [_is_direct(8, num_rows, num_rows * 64) for num_rows in (512, 513)] == [True, False], "a mailbox is full"


# Whole engines


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launched: set[str]):
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid):
        self._launched.add(self._kernel.__name__)
        return self._kernel[grid]


@pytest.fixture
def launched(monkeypatch) -> set[str]:
    """The names of the kernels that were launched."""
    names: set[str] = set()
    names_of_modules = [each.name for each in pkgutil.iter_modules(nanovllm.ops.__path__)]
    # Kernels in Gluon cannot be interpreted, nor imported with every Triton.
    modules = [importlib.import_module(f"nanovllm.ops.{it}") for it in names_of_modules if "hopper" not in it]
    for module in (*modules, triton_backend, triton_prompts):
        for name, kernel in vars(module).copy().items():
            if name.endswith("_kernel") and not name.startswith("has_"):
                monkeypatch.setattr(module, name, Counted(kernel, names))
    return names


@pytest.mark.parametrize("head_dim", [128, 64])
def test_large_products_are_left_to_the_layers_that_read_them(tmp_path, monkeypatch, head_dim):
    """The kernel in hopper_product.py cannot be interpreted, so its plain twins take its place here. It stores heads of
    128 columns alone."""
    calls = []

    def gated_product(x, weight, activation):
        calls.append("gated")
        return act_and_mul(F.linear(x, weight), activation)

    def stored_product(x, weight, norm, eps, cos, sin, cache, slots):
        calls.append("stored")
        qk = qk_norm_rotate_store(F.linear(x, weight), norm, eps, cos, sin, cache.head_dim, cache, slots)
        return qk[:, : -cache.num_kv_heads].contiguous()

    stub = SimpleNamespace(gated_product=gated_product, stored_product=stored_product)
    monkeypatch.setitem(sys.modules, "nanovllm.ops.hopper_product", stub)
    monkeypatch.setattr(nanovllm.ops, "hopper_product", stub, raising=False)
    monkeypatch.setattr(of_layers, "pack_weight", lambda weight: None)
    save_model(tmp_path, head_dim=head_dim, attention_bias=False, num_hidden_layers=2)
    token_ids = list(range(1, 31))
    expected = logits_of(tmp_path, token_ids, Parallel(), use_kernels=True)
    assert not calls
    monkeypatch.setattr(of_layers, "has_fused_product", lambda num_rows, weight: num_rows >= 30)
    found = logits_of(tmp_path, token_ids, Parallel(), use_kernels=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert calls == (["stored", "gated"] if head_dim == 128 else ["gated"]) * 2
    logits_of(tmp_path, token_ids[1:], Parallel(), use_kernels=True)
    logits_of(tmp_path, token_ids, Parallel())  # without kernels
    assert len(calls) == (4 if head_dim == 128 else 2)


@pytest.mark.parametrize("overlap", some([True, False], True))
def test_an_engine_of_triton_kernels_gives_the_tokens_of_the_plain_one(tmp_path, overlap, launched):
    """Our attention and every fused kernel run prefill, chunks, cached prefixes, decodes and preemption. The plain
    backend uses no kernel at all, so that the comparison means something.
    """
    save_model(tmp_path, seed=3, num_attention_heads=2, num_key_value_heads=1)
    prompts = [[5, 6, 7], [8], list(range(1, 40)), [*range(1, 33), 50], [9, 9, 9, 9]]
    params = [
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=9, ignore_eos=True, seed=4),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, top_k=5, max_tokens=5, ignore_eos=True, seed=8),
        SamplingParams(temperature=1.1, max_tokens=17, ignore_eos=True, seed=9),
    ]
    options = {"device": "cpu", "kvcache_block_size": 16, "max_num_batched_tokens": 24, "max_model_len": 64}

    def tokens(**more) -> list[list[int]]:
        with LLM(str(tmp_path), **options, **more) as llm:
            found = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            assert llm.metrics()["num_preemptions"] > 0 or "num_kvcache_blocks" not in more
        return found

    expected = tokens(attention_backend="torch")
    assert not launched
    assert tokens(attention_backend="triton", overlap=overlap, num_kvcache_blocks=3) == expected
    assert launched == {
        "_rms_norm_kernel", "_act_and_mul_kernel", "_qk_norm_rotate_store_kernel", "_expand_rows_kernel",
        "_write_tokens_kernel", "plan_kernel", "decode_kernel", "merge_kernel", "_prefill_kernel",
        "_allow_kernel", "_edit_and_count_kernel", "_penalise_kernel", "_filter_kernel", "_best_of_part_kernel",
        "_best_part_kernel",
    }  # fmt: skip
