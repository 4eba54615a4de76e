"""The products, the attention and the sampler that deterministic=True uses on GPUs, in Triton's interpreter.

The interpreter shows what they compute. tests/gpu/test_gpu_determinism.py compares bits.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.attention_case import MIXED, make_case, relative_error

from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.choice import make_attention_backend
from nanovllm.attention.ordered_backend import OrderedAttention
from nanovllm.engine.sequence import Sequence
from nanovllm.layers import attention as attention_layer
from nanovllm.layers.context import LayerContext
from nanovllm.layers.embed_head import VocabSlice
from nanovllm.layers.experts import Experts
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.quantization import ChannelFp8
from nanovllm.layers.rotary_embedding import Rotary
from nanovllm.layers.sampler import SampledRows, Sampler, SamplingNeeds
from nanovllm.ops import exchange, library, ordered_product
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.norm import sums_of_squares
from nanovllm.ops.ordered_product import OrderedProducts, triton_ordered_product
from nanovllm.ops.quantize import E4M3
from nanovllm.runner import device as device_module
from nanovllm.runner import model_runner
from nanovllm.runner.device import check_can_be_deterministic
from nanovllm.runner.token_rules import TokenRulesTable
from nanovllm.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities that are meant

CPU = torch.device("cpu")
TILES = [*ordered_product._TILES.values(), ordered_product._LARGEST_TILE]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Products


@pytest.mark.parametrize("tile", [None, *TILES], ids=str)
@pytest.mark.parametrize("num_rows, output_size, input_size", [(1, 1, 8), (3, 70, 130), (33, 64, 128), (140, 33, 64)])
def test_a_product_in_order_is_that_of_the_library(num_rows, output_size, input_size, tile):
    x, weight = random_tensor(num_rows, 2 * input_size)[:, :input_size], random_tensor(output_size, input_size, seed=1)
    bias = random_tensor(output_size, seed=2) if output_size % 2 else None
    out = torch.full((num_rows, output_size + 5), 9.0)
    triton_ordered_product(x, weight, bias, out[:, :output_size], tile)
    torch.testing.assert_close(out[:, :output_size], F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert (out[:, output_size:] == 9).all(), "it wrote beside its outputs"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_in_order_is_rounded_once(dtype):
    x, weight, bias = (random_tensor(*shape, dtype=dtype) for shape in ((5, 48), (20, 48), (20,)))
    if dtype == torch.bfloat16:  # the interpreter multiplies the bits of bfloat16 as integers, which is right for zeros
        x, weight = torch.zeros_like(x), torch.zeros_like(weight)
    found = triton_ordered_product(x, weight, bias, torch.empty(5, 20, dtype=dtype))
    assert torch.equal(found, F.linear(x.double(), weight.double(), bias.double()).float().to(dtype))


@pytest.fixture
def products(monkeypatch):
    """OrderedProducts whose library agrees where `agrees` says so, and the numbers of rows that it multiplied."""
    it = OrderedProducts([6, 40, 3000, 4500], CPU)
    it.sizes_seen, it.agrees = [], lambda num_rows: True
    multiply = it._multiply_by_library

    def noted(x, weight, bias, out):
        it.sizes_seen.append(len(x))
        multiply(x, weight, bias, out)
        if not it.agrees(len(x)):
            out += 1

    # On a CPU the kernel, which is interpreted, has other bits than the library. So one formula replaces both.
    monkeypatch.setattr(
        ordered_product, "triton_ordered_product", lambda x, w, b, out, tile=None: multiply(x, w, b, out)
    )
    monkeypatch.setattr(it, "_multiply_by_library", noted)
    monkeypatch.setattr(ordered_product, "cublas_lt", nullcontext)
    return it


def multiply_rows(products: OrderedProducts, num_rows: int, bias: torch.Tensor | None = None) -> list[int]:
    """Checks a product of `num_rows` rows. Returns the numbers of rows that the library multiplied."""
    x, weight = random_tensor(num_rows, 4, dtype=torch.float16), random_tensor(3, 4, dtype=torch.float16, seed=1)
    products.sizes_seen.clear()
    found = products.linear(x, weight, None, bias=bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias))
    return list(products.sizes_seen)


def test_the_library_multiplies_only_numbers_of_rows_that_were_compared(products):
    weight = torch.empty(3, 4, dtype=torch.float16)
    assert multiply_rows(products, 50) == []  # before `prepare`, our kernel does
    products.prepare(weight, torch.float16, False, 10000)
    compared = set(products.sizes_seen)
    assert max(compared) == 4096 and min(compared) == 32 and {40, 3000, 404} <= compared
    for num_rows, expected in [
        (17, [32]), (39, [40]), (40, [40]), (41, [48]), (100, [112]), (512, [512]), (513, [512]), (600, [512, 96]),
        (2999, [2048, 896, 64]), (3000, [3000]), (4096, [4096]), (4500, [4096, 404]), (9000, [4096, 4096, 768, 40]),
    ]:  # fmt: skip
        assert multiply_rows(products, num_rows) == expected and set(expected) <= compared
    assert (
        multiply_rows(products, 50, torch.ones(3, dtype=torch.float16)) == []
    )  # with a bias the library has other kernels
    products.prepare(weight, torch.float16, True, 10000)
    assert multiply_rows(products, 50, torch.ones(3, dtype=torch.float16)) == [64]


def test_our_kernel_multiplies_few_rows_and_where_the_library_adds_in_another_order(products):
    products.agrees = lambda num_rows: num_rows not in (40, 4096)
    products.prepare(torch.empty(3, 4, dtype=torch.float16), torch.float16, False, 5000)
    assert [multiply_rows(products, num_rows) for num_rows in (1, 2, 16, 39, 40)] == [[]] * 5
    assert multiply_rows(products, 17) == [32] and multiply_rows(products, 4120) == [32]


def test_only_rows_that_a_step_can_have_are_compared(products):
    products.prepare(torch.empty(3, 4, dtype=torch.float16), torch.float16, False, 130)
    assert max(products.sizes_seen) == 144
    assert multiply_rows(products, 150) == []


def test_the_library_gets_rows_that_begin_as_new_tensors_do(products):
    """It chooses its kernels by the alignment too."""
    products.prepare(torch.empty(3, 4, dtype=torch.float16), torch.float16, False, 64)
    begins = []
    multiply = products._multiply_by_library
    products._multiply_by_library = lambda x, w, b, out: (
        begins.append((x.data_ptr(), x.stride())),
        multiply(x, w, b, out),
    )
    weight, x = random_tensor(3, 4, dtype=torch.float16, seed=1), random_tensor(70, 8, dtype=torch.float16)
    for rows in (x[1:33, :4], x[:32, 4:], x[3:35, 1:5]):
        torch.testing.assert_close(products.linear(rows, weight), rows @ weight.T)
        assert begins[-1][1] == (4, 1)
    out = torch.empty(33, 5, dtype=torch.float16)
    assert products.linear(x[:32, :4], weight, out=out[1:, 1:4]).data_ptr() == out[1:, 1:4].data_ptr()
    torch.testing.assert_close(out[1:, 1:4], x[:32, :4] @ weight.T)


def test_a_gpu_whose_tiles_add_in_other_orders_is_refused(products, monkeypatch):
    def by_tile(x, weight, bias, out, tile=None):
        out.copy_(F.linear(x, weight) + (tile == TILES[1]))

    monkeypatch.setattr(ordered_product, "triton_ordered_product", by_tile)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pytest.raises(RuntimeError, match="deterministic=True: on this GPU, a GPU, sums of products depend"):
        products.prepare(torch.empty(3, 4, dtype=torch.float16), torch.float16, False, 64)


def test_numbers_of_32_bits_are_left_to_our_kernel(products):
    """The caller may let the library round them to TF32, also after the start."""
    products.prepare(torch.empty(3, 4), torch.float32, False, 64)
    x, weight = random_tensor(40, 4), random_tensor(3, 4, seed=1)
    torch.testing.assert_close(products.linear(x, weight), x @ weight.T)
    assert products.sizes_seen == []


@pytest.mark.parametrize("input_size", [64, 384, 1024])
def test_the_numbers_that_are_compared_show_another_order(input_size):
    """A library that divides the inputs between three programs must not agree by chance: with independent numbers, one
    once did, at one and two rows of 1,013 outputs."""
    x, weight = ordered_product._cancelling(16, 512, input_size, torch.bfloat16, CPU)
    assert torch.equal(x[:, : input_size // 3], -x[:, -(input_size // 3) :])

    def added(steps: range) -> torch.Tensor:
        """As a matrix unit adds: sixteen products at a time, rounded to float32."""
        total = torch.zeros(16, 512)
        for step in steps:
            part = slice(step, step + 16)
            total = (total.double() + x[:, part].double() @ weight[:, part].double().T).float()
        return total

    whole, third = range(0, input_size, 16), input_size // 48 * 16
    of_parts = added(whole[: third // 16]) + added(whole[third // 16 : third // 8]) + added(whole[third // 8 :])
    assert (added(whole).bfloat16() != of_parts.bfloat16()).float().mean() > 0.003


def test_numbers_of_64_bits_are_multiplied_in_tiles(products):
    x, weight = random_tensor(40, 8).double(), random_tensor(2, 8, seed=1).double()
    torch.testing.assert_close(products.linear(x, weight), x @ weight.T)
    assert products.sizes_seen == []


def test_the_library_is_chosen_until_the_last_context_ends(monkeypatch):
    setting, quiet = ["default"], []

    def preferred(name: str | None = None) -> str:
        setting[0] = name or setting[0]
        return setting[0]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    monkeypatch.setattr(library, "_without_warnings", lambda function: (quiet.append(1), function()))
    contexts = library._Contexts()
    first, second = library.cublas_lt(contexts), library.cublas_lt(contexts)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert setting == ["cublaslt"]
    second.__exit__(None, None, None)
    assert setting == ["default"]
    with library.cublas_lt(contexts):
        assert setting == ["cublaslt"]
    assert setting == ["default"] and len(quiet) == 1, "PyTorch warns once"


def test_a_library_that_cannot_be_chosen_leaves_nothing_open(monkeypatch):
    def preferred(name: str | None = None) -> str:
        if name == "cublaslt":
            raise RuntimeError("no cuBLASLt")
        return "default"

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    contexts = library._Contexts()
    with pytest.raises(RuntimeError, match="no cuBLASLt"), library.cublas_lt(contexts):
        pass
    assert contexts.num_open == 0


# Layers


def test_no_layer_leaves_a_product_unfinished_or_to_the_kernel_of_a_single_row(monkeypatch):
    """Both would be added in another order, at some numbers of rows."""
    products = OrderedProducts([], CPU)
    monkeypatch.setattr(products, "_multiply", lambda x, weight, *rest: F.linear(x, weight) + 100)
    context = LayerContext(torch.float32, CPU, True, row_ops=products.row_ops)
    sums = RMSNorm.accepted_sums(context)
    rows = RowParallelLinear(64, 32, False, context, gives=sums)
    columns = QKVParallelLinear(64, 16, 4, 2, False, context, gives=sums)
    for layer in (rows, columns):
        layer.weight.fill_(0.5)
        for num_rows in (1, 2, 100):
            assert layer.variant_key(num_rows) == 1
            found = layer(torch.ones(num_rows, 64))
            assert torch.equal(getattr(found, "part", found), torch.full((num_rows, len(layer.weight)), 132.0))


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_fp8_come_from_the_products_in_order(monkeypatch, has_bias):
    products, calls = OrderedProducts([], CPU), []

    def multiply(x, weight, bias, out, dtype):
        calls.append((x.dtype, weight.dtype, bias))
        return F.linear(x.float(), weight.float()).to(dtype)

    monkeypatch.setattr(products, "_multiply", multiply)
    results = []
    for row_ops in (products.row_ops, LayerContext(torch.float32, CPU).row_ops):
        context = LayerContext(torch.float32, CPU, True, row_ops=row_ops)
        layer = RowParallelLinear(32, 16, has_bias, context, format=ChannelFp8(Fp8Config(), context))
        layer.weight.copy_(random_tensor(16, 32).to(E4M3))
        layer.weight_scale.copy_(torch.arange(16) + 1.0)
        if has_bias:
            layer.bias.copy_(torch.arange(16))
        results.append(layer(random_tensor(5, 32, seed=1)).part)
    assert calls == [(E4M3, E4M3, None)]
    torch.testing.assert_close(*results)


def test_experts_take_tiles_of_one_size():
    row_ops = OrderedProducts([], CPU).row_ops
    for of_context, is_one in ((row_ops, True), (LayerContext(torch.float32, CPU).row_ops, False)):
        context = LayerContext(torch.float32, CPU, True, row_ops=of_context)
        experts = Experts(32, 16, 4, 2, True, "silu", context)
        assert (len({experts.variant_key(number) for number in (1, 10, 100, 1000)}) == 1) == is_one


@pytest.mark.parametrize("size", [1, 8, 100, 1030])
def test_sums_of_squares_are_those_of_the_library(size):
    x = random_tensor(5, size + 3)[:, 1 : size + 1]
    torch.testing.assert_close(sums_of_squares(x, True), sums_of_squares(x), rtol=1e-6, atol=1e-6)


# The sampler


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_with_rules_changes_nothing_for_the_others(monkeypatch, dtype):
    """With rules, all rows of a step have logits in float32. Kernels add those in another order than 16 bits."""
    seen = []
    monkeypatch.setattr(
        "nanovllm.layers.sampler.sample", lambda logits, *rest: (seen.append(logits), rest[0].long())[1]
    )
    logits, table = random_tensor(4, 60, dtype=dtype)[:, :50], TokenRulesTable(5, 50, CPU)
    params = [SamplingParams()] * 3 + [SamplingParams(logit_bias={3: 2.0})]
    table.admit([Sequence(i, [1, 2], p, 9) for i, p in enumerate(params)], np.arange(4))
    zeros, ones = torch.zeros(4), torch.ones(4)
    rows = SampledRows(torch.arange(4), zeros.long() + 2, zeros.long(), zeros, zeros.int(), ones, zeros, zeros.int())
    sampler = Sampler(VocabSlice.of(50, Parallel()), Parallel(), True, deterministic=True)
    tokens = torch.zeros(5, 9, dtype=torch.int32)
    for version in (0, table.version):
        sampler.sample(logits, rows, SamplingNeeds(rules_version=version), tokens, table.tensors)
    plain, ruled = seen
    assert plain.dtype == ruled.dtype == torch.float32 and plain.stride() == ruled.stride() == (50, 1)
    assert torch.equal(plain[:3], ruled[:3]) and torch.equal(plain, logits.float())
    assert ruled[3, 3] == logits[3, 3].float() + 2


# Attention


def ordered_attention(case, max_num_seqs: int = 16) -> tuple[OrderedAttention, torch.Tensor]:
    (num_heads, head_dim), num_kv_heads = case.queries[0].shape[1:], case.keys[0].shape[1]
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, case.queries[0].dtype, CPU, max_num_seqs, scale=case.scale,
        windows=(case.window,), has_fp8_cache=case.cache.is_fp8, deterministic=True,
    )  # fmt: skip
    backend = OrderedAttention(shape)
    q, k, v = map(case.new, (case.queries, case.keys, case.values))
    backend.store_kvcache(k, v, case.cache, case.metadata)
    case.metadata.plan = backend.plan(case.metadata)
    return backend, backend.attend(q, k, v, case.cache, case.metadata, case.window)


@pytest.mark.grid(2)
@pytest.mark.parametrize("group_size, head_dim", [(1, 32), (2, 64), (3, 40), (4, 128), (65, 16)])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_decodes_attended_as_prompts_are_right(group_size, head_dim, window, is_fp8):
    if is_fp8 and head_dim % 16:
        pytest.skip("the cache in FP8 needs multiples of 16")
    case = make_case(
        [(70, 1), (3, 1), (129, 1), (0, 1), *MIXED[-2:]], 64, 2, group_size, head_dim, window=window, is_fp8=is_fp8
    )
    _, found = ordered_attention(case)
    assert relative_error(case, found) < (2e-2 if is_fp8 else 1e-6)


def test_decodes_with_the_most_keys_come_first_and_padding_last():
    case = make_case([(70, 1), (3, 1), (129, 1), (0, 1), (70, 1), (5, 1)], 16)
    backend, _ = ordered_attention(case)
    case.metadata.num_decodes.fill_(5)  # the last row is padding
    tiles = backend.plan(case.metadata)
    assert tiles.tolist()[:5] == [[2, 1, 129, 2], [0, 1, 70, 0], [4, 1, 70, 4], [1, 1, 3, 1], [3, 1, 0, 3]]
    assert tiles[5, 1] == 0


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_decode_is_normed_by_the_kernel_of_prompts(monkeypatch, is_deterministic):
    """With a cache in FP8, steps with prompts have a kernel that adds in another order than that of decodes alone."""
    asked = []

    def recorded(qkv, weight, eps, cos, sin, rotary_dim, cache, slots, has_prompts):
        asked.append(has_prompts)
        return qkv.unflatten(1, (-1, 16))[:, :-1]

    monkeypatch.setattr(attention_layer, "qk_norm_rotate_store", recorded)
    backend: Any = SimpleNamespace(
        is_deterministic=is_deterministic, reads_new_keys=False, has_fp8_cache=True, attend=lambda q, *rest: q
    )
    cache, metadata = SimpleNamespace(num_kv_heads=1, head_dim=16), SimpleNamespace(query_tiles=None, slot_mapping=None)
    layer = attention_layer.Attention(0, backend, use_kernels=True)
    layer(torch.zeros(1, 64), None, Rotary(torch.zeros(1), torch.zeros(1), 16), [cache], [metadata])
    assert asked == [is_deterministic]


# What is refused


def shape_on(device: str) -> AttentionShape:
    return AttentionShape(4, 2, 64, torch.bfloat16, torch.device(device), deterministic=True)


@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize("block_size", [None, 64, 256])
def test_a_gpu_gets_attention_in_order(name, block_size):
    assert type(make_attention_backend(name, shape_on("cuda"), block_size)) is OrderedAttention


@pytest.mark.parametrize(
    "device, name, block_size, message",
    [
        ("cuda", "sdpa", None, 'with attention_backend="sdpa", .* use "auto" or "triton"'),
        ("cuda", "tiled", None, 'attention_backend="tiled" is for CPUs; use "auto" or "triton"'),
        ("cuda", "auto", 32, "kvcache_block_size to be a multiple of 64 on a GPU, not 32"),
        ("cpu", "triton", None, 'runs in an interpreter on a CPU.* use "auto" or "tiled"'),
        ("cpu", "sdpa", None, 'with attention_backend="sdpa", .* use "auto" or "tiled"'),
    ],
)
def test_attention_that_cannot_keep_the_promise_is_refused(device, name, block_size, message):
    with pytest.raises(ValueError, match=message):
        make_attention_backend(name, shape_on(device), block_size)


def test_more_than_two_gpus_and_a_gpu_without_triton_are_refused(monkeypatch):
    config, gpu = SimpleNamespace(delta_net=None), torch.device("cuda")
    check_can_be_deterministic(config, gpu, 1)
    check_can_be_deterministic(config, gpu, 2)
    check_can_be_deterministic(config, CPU, 4)
    with pytest.raises(ValueError, match="tested on one and on two GPUs, so tensor_parallel_size=4 is refused"):
        check_can_be_deterministic(config, gpu, 4)
    monkeypatch.setattr(device_module, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="needs the triton package"):
        check_can_be_deterministic(config, gpu, 1)


def test_gpus_that_cannot_reach_each_others_memory_are_refused(monkeypatch):
    """NCCL rounds the ranks' sums otherwise than the exchange does."""
    settings = SimpleNamespace(
        parallel=Parallel(0, 2), is_gpu=True, use_kernels=True, dtype=torch.bfloat16, device=torch.device("cuda"),
        model_config=SimpleNamespace(hidden_size=64, vocab_size=96), config=SimpleNamespace(deterministic=True),
    )  # fmt: skip
    monkeypatch.setattr(exchange, "make_exchange", lambda *_: None)
    with pytest.raises(RuntimeError, match="GPUs that can reach each other's memory, and these cannot"):
        model_runner._with_exchanges(settings)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_row_is_sampled_from_its_whole_vocabulary(deterministic):
    """Otherwise a row with filters would change how the others are sampled."""
    parallel = Parallel(0, 2, sampling_exchange="an exchange")
    sampler = Sampler(VocabSlice.of(96, parallel), parallel, use_kernels=True, deterministic=deterministic)
    assert sampler._exchanges_best(SamplingNeeds()) != deterministic
    assert not sampler._exchanges_best(SamplingNeeds(has_filters=True))
