"""The digest of an LLM's weights is equal for equal weights, in any number of ranks, and for no others."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_runner import make_engine
from support.family_factory import FAMILIES, WRAPPED, save_divisible_model
from support.fp8_factory import LAYOUTS, quantized_copy
from support.long import long, some
from support.model_factory import read_tensors, save_demo_classifier, save_model, write_tensors
from support.thread_ranks import CPU, on_ranks
from support.weight_updates import EMBEDDING, HEAD, PROMPTS, Q_PROJ, make_llm, save_checkpoints

from nanovllm import LLM, SamplingParams
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.linear import Packable
from nanovllm.models.decoder import CausalLM
from nanovllm.models.digest import weight_parts
from nanovllm.models.loader import load_weights
from nanovllm.models.read_config import load_model_config
from nanovllm.models.weight_parts import WeightPart, tensor_digests, whole_digest
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.quantize import E4M3
from nanovllm.ops.weights_sum import Keys, splitmix64, units_of, weights_sum
from nanovllm.runner.model_runner import pack_weights

PROJECTION = "model.layers.0.self_attn.q_proj.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, E4M3, torch.int8]

# The sum of one tensor


def sum_of(tensor: torch.Tensor, use_kernels: bool = False, first: tuple[int, int] = (0, 0)) -> int:
    """The sum of a matrix, or of one that is a part of another and begins there at `first`."""
    units, total = units_of(tensor), torch.zeros((), dtype=torch.int64)
    first_unit = first[1] * units.shape[1] // tensor.shape[1]
    keys = Keys.of(first[0] + len(units), first_unit + units.shape[1], CPU).part(first[0], first_unit, units)
    weights_sum(units, keys, total, use_kernels)
    return total.item() % 2**64


def random_bits(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """All bits are random, so there are NaNs too."""
    size = (num_rows, num_columns * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(dtype)


def test_keys_are_the_numbers_of_splitmix64():
    """Those that its reference implementation generates from the seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert [number % 2**64 for number in splitmix64(torch.arange(5)).tolist()] == expected
    numbers = splitmix64(torch.arange(100))
    keys = Keys.of(50, 50, CPU)
    for found, given in ((keys.rows, numbers[::2]), (keys.columns, numbers[1::2])):
        assert torch.equal(found, given | 1) and not torch.equal(found, given)


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_its_definition(dtype, use_kernels):
    tensor = random_bits(3, 5, dtype)
    width = min(2, dtype.itemsize)
    raw = tensor.view(torch.uint8).numpy().tobytes()
    numbers = [int.from_bytes(raw[place : place + width], "little") for place in range(0, len(raw), width)]
    num_columns = len(numbers) // 3
    keys = Keys.of(10, 2 * num_columns + 20, CPU)
    first_unit = 7 * num_columns // 5
    expected = sum(
        keys.rows[4 + place // num_columns].item()
        * keys.columns[first_unit + place % num_columns].item()
        * (number + 1)
        for place, number in enumerate(numbers)
    )
    assert sum_of(tensor, use_kernels, (4, 7)) == expected % 2**64


@pytest.mark.grid(2)
@pytest.mark.parametrize("columns", [(0, 0), (3, 2), (16, 0)], ids=str)
@pytest.mark.parametrize("num_columns", [1, 63, 1030, 2048])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 35])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_equals_its_twin(dtype, num_rows, num_columns, columns):
    """The matrix may be rows and columns of another one."""
    before, after = columns
    whole = random_bits(num_rows + 2, before + num_columns + after, dtype)
    tensor = whole[1 : 1 + num_rows, before : before + num_columns]
    assert sum_of(tensor, True, (3, 11)) == sum_of(tensor, False, (3, 11)) == sum_of(tensor.clone(), False, (3, 11))


@pytest.mark.parametrize("use_kernels", [False, True])
def test_offsets_may_exceed_31_bits(use_kernels):
    """Most of this memory is never touched, so that the system does not give it."""
    memory = torch.empty(3 * 2**30 + 64, dtype=torch.uint8)
    tensor = memory.as_strided((3, 64), (3 * 2**29, 1))
    tensor.copy_(random_bits(3, 64, torch.int8).view(torch.uint8))
    assert sum_of(tensor, use_kernels) == sum_of(tensor.clone(), False)


@pytest.mark.parametrize("use_kernels", [False, True])
def test_sums_of_parts_add_up_to_that_of_the_whole(use_kernels):
    tensor = random_bits(37, 50, torch.float32)
    parts = [(0, 0, 20, 17), (20, 0, 17, 17), (0, 17, 37, 1), (0, 18, 37, 32)]
    sums = [
        sum_of(tensor[row : row + height, column : column + width], use_kernels, (row, column))
        for row, column, height, width in parts
    ]
    assert sum(sums) % 2**64 == sum_of(tensor)


def signs_changed(x: torch.Tensor) -> torch.Tensor:
    changed = x.clone()
    changed[3, 4].neg_()
    changed[7, 2].neg_()
    return changed


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two rows are swapped": lambda x: x[[1, 0, *range(2, len(x))]],
    "two columns are swapped": lambda x: x[:, [0, 9, *range(2, 9), 1, *range(10, len(x))]],
    "it is transposed": lambda x: x.T.contiguous(),
    "all is one place late": lambda x: x.roll(1),
    "a row is missing": lambda x: torch.cat([x[1:], x[:1]]),
    "a row is 0": lambda x: torch.cat([x[:-1], 0 * x[-1:]]),
    "all is 0": torch.zeros_like,
    "all signs are changed": torch.neg,
    "two signs are changed": signs_changed,
    "two numbers are swapped": lambda x: x.flatten()[[5, *range(1, 5), 0, *range(6, x.numel())]].view_as(x),
    "it is rounded": lambda x: x.to(torch.float8_e5m2).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_the_sum(fault, dtype):
    tensor = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = FAULTS[fault](tensor)
    assert changed.shape == tensor.shape and not torch.equal(changed, tensor)
    assert sum_of(changed) != sum_of(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_flipped_bit_changes_the_sum(dtype):
    tensor = random_bits(3, 6, dtype)
    before, bits = sum_of(tensor), tensor.view(torch.uint8)
    for row, column in ((0, 0), (1, 3), (2, bits.shape[1] - 1)):
        for bit in range(8):
            bits[row, column] ^= 1 << bit
            assert sum_of(tensor) != before
            bits[row, column] ^= 1 << bit
    assert sum_of(tensor) == before


# The digests of a model


def load(directory: Path, parallel: Parallel, is_quantized: bool = False) -> CausalLM:
    """A rank's part of a model, packed as in an LLM."""
    config = load_model_config(directory)
    config = replace(config, fp8=Fp8Config()) if is_quantized else config
    backend = TorchAttention(AttentionShape(1, 1, config.head_dim, torch.float32, CPU, scale=config.attention_scale))
    model = CausalLM(config, 64, backend, parallel, torch.float32, CPU)
    load_weights(model, directory)
    pack_weights(model)
    return model


def digests_of(directory: Path, size: int, **options: Any) -> dict[str, str]:
    return tensor_digests(on_ranks(size, lambda rank: weight_parts(load(directory, rank, **options))))


def differing(found: dict[str, str], expected: dict[str, str]) -> set[str]:
    assert found.keys() == expected.keys()
    return {name for name in found if found[name] != expected[name]}


def flipped(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The tensor with one bit of one number flipped. The bit is such that rounding and adding 1 keep the change."""
    changed = tensor.clone()
    bits = changed.view(torch.int32 if tensor.itemsize == 4 else torch.uint8).view(-1)
    bits[rng.randrange(bits.numel())] ^= 1 << (22 if tensor.itemsize == 4 else rng.randrange(8))
    return changed


@pytest.mark.parametrize(
    "family", some([*FAMILIES, *WRAPPED], "phi3", "gemma3", "qwen3_5", "qwen3_next", "olmo2", "mixtral", "qwen3_vl_moe")
)
def test_the_digests_do_not_depend_on_the_number_of_ranks(tmp_path, family):
    """Names are those of the checkpoint, and each number of each tensor counts once."""
    save_divisible_model(tmp_path, family, random.Random(family))
    digests = digests_of(tmp_path, 1)
    assert digests_of(tmp_path, 2) == digests
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests.values())
    stored = {name for name in read_tensors(tmp_path) if ".experts." not in name}
    ours = {name for name in digests if ".experts." not in name}
    if family in FAMILIES:
        assert ours == {name for name in stored if name != HEAD or HEAD in digests}
    assert list(digests) == sorted(digests) and not any("qkv_proj.weight" in name for name in ours - stored)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_hold_the_same_key_heads_count_them_once(tmp_path, size, tied):
    """The vocabulary is so small that the last rank holds none of it."""
    save_model(tmp_path, num_key_value_heads=1, attention_bias=True, vocab_size=40, tie_word_embeddings=tied)
    assert digests_of(tmp_path, size) == digests_of(tmp_path, 1)


@pytest.mark.parametrize("family", some(FAMILIES, "phi3", "gemma3", "qwen3_5_moe", "olmo2"))
def test_a_flipped_bit_of_any_tensor_is_found_under_its_name(tmp_path, family):
    rng = random.Random(family)
    save_divisible_model(tmp_path, family, rng, tie_word_embeddings=False)
    model, tensors = load(tmp_path, Parallel()), read_tensors(tmp_path)
    before = tensor_digests([weight_parts(model)])
    plain = [name for name in tensors if name in before]
    for name in rng.sample(plain, min(8, len(plain))):
        write_tensors(tmp_path, tensors | {name: flipped(tensors[name], rng)})
        assert differing(digests_of(tmp_path, 2), before) == {name}


# Our layers, and the checkpoint's names for their parts.
PARTS = {"qkv_proj": {"q_proj", "k_proj", "v_proj"}, "gate_up_proj": {"gate_proj", "up_proj"}}
PARTS |= {"qk_norm": {"q_norm", "k_norm"}}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_flipped_bit_in_the_memory_of_any_parameter_is_found(tmp_path, is_quantized, rank):
    """If a parameter holds copies of a part, or several ranks do, then the copies differ, which is an error."""
    save_model(tmp_path, attention_bias=True, num_hidden_layers=1, vocab_size=64)
    models, rng, num_refused = on_ranks(2, partial(load, tmp_path, is_quantized=is_quantized)), random.Random(rank), 0
    for module in (module for model in models for module in model.modules() if isinstance(module, Packable)):
        module.unpack()
    before = tensor_digests(map(weight_parts, models))
    parameters = dict(models[rank].named_parameters())
    assert len(parameters) == 12 + 4 * is_quantized
    for name, parameter in parameters.items():
        memory, mask = parameter.data.view(-1).view(torch.uint8), 1 << rng.randrange(8)
        place = rng.randrange(len(memory))
        memory[place] ^= mask
        try:
            [found] = differing(tensor_digests(map(weight_parts, models)), before)
        except RuntimeError as error:
            found, num_refused = str(error).partition("1 tensor: ")[2].partition(" ")[0], num_refused + 1
        memory[place] ^= mask
        *module, layer, kind = name.split(".")
        assert found.startswith(".".join(module)) and found.endswith(kind.removesuffix("_scale"))
        assert found.split(".")[-2] in PARTS.get(layer, {layer})
    assert num_refused == 5, "the norms, and the bias of o_proj"
    assert tensor_digests(map(weight_parts, models)) == before


def test_a_packed_copy_of_a_tied_embedding_counts_too(tmp_path):
    """Logits are computed with that copy alone, so a stale one must not go unseen."""
    save_model(tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    model = load(tmp_path, Parallel())
    before = tensor_digests([weight_parts(model)])
    assert model.lm_head.packed is not None and HEAD not in before
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 4] += 1
    with pytest.raises(RuntimeError, match=rf"of 1 tensor: {EMBEDDING} \(rank 0\)"):
        tensor_digests([weight_parts(model)])
    model.lm_head.pack()
    assert differing(tensor_digests([weight_parts(model)]), before) == {EMBEDDING}


# Weights in FP8


def is_divided_by_inputs(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))


@pytest.mark.parametrize("family", some(["llama", "phi3", "qwen3_moe", "qwen3_5"], "qwen3_moe"))
def test_weights_rounded_while_they_load_depend_on_ranks_only_where_their_scales_do(tmp_path, family):
    """A row has a scale for each rank's inputs."""
    save_divisible_model(tmp_path, family, random.Random(family))
    plain, one, two = digests_of(tmp_path, 1), *(digests_of(tmp_path, size, is_quantized=True) for size in (1, 2))
    by_inputs = {name for name in plain if is_divided_by_inputs(name)}
    assert differing(one, two) == by_inputs and by_inputs
    assert by_inputs < differing(one, plain) and not any("norm" in name for name in differing(one, plain))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_in_fp8_have_digests_of_values_and_of_scales(tmp_path, layout):
    """They do not depend on the number of ranks. A scale per tensor has a copy for each row."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 2}
    save_model(tmp_path / "plain", num_hidden_layers=1, **sizes)
    directory = quantized_copy(tmp_path / "plain", tmp_path / "fp8", LAYOUTS[layout])
    digests, tensors, rng = digests_of(directory, 1), read_tensors(directory), random.Random(layout)
    assert digests.keys() == tensors.keys() and digests_of(directory, 2) == digests
    for name in (PROJECTION, PROJECTION + LAYOUTS[layout].scale_name):
        write_tensors(directory, tensors | {name: flipped(tensors[name], rng)})
        assert differing(digests_of(directory, 1), digests) == {name}


# The digest of an LLM


def digest_of_fresh_llm(directory: Path, **options: Any) -> dict[str, str]:
    with make_llm(directory, **options) as llm:
        return llm.weights_digest(per_tensor=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return save_checkpoints(tmp_path_factory)


KERNELS = {"attention_backend": "triton", "kvcache_block_size": 16}
UPDATED = [{}, {"dtype": "bfloat16"}, {"quantization": "fp8"}, long(KERNELS), long({"tensor_parallel_size": 2})]


@pytest.mark.parametrize("options", UPDATED, ids=str)
def test_an_update_leaves_the_digest_of_a_fresh_llm(checkpoints, options):
    first, second = (read_tensors(directory) for directory in checkpoints)
    expected = [digest_of_fresh_llm(directory, **options) for directory in checkpoints]
    assert differing(*expected) == expected[0].keys() == first.keys()
    with make_llm(checkpoints[0], **options) as llm:
        assert llm.weights_digest(per_tensor=True) == expected[0]
        before = llm.weights_digest()
        assert len(before) == 64 and int(before, 16) and llm.weights_digest(False) == before
        llm.update_weights(first)
        assert llm.weights_digest() == before
        llm.update_weights({Q_PROJ: second[Q_PROJ]})
        assert differing(llm.weights_digest(per_tensor=True), expected[0]) == {Q_PROJ}
        assert llm.weights_digest() != before
        llm.update_weights(second)
        assert llm.weights_digest(per_tensor=True) == expected[1]
        llm.update_weights(first)
        assert llm.weights_digest() == before


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
def test_two_processes_have_the_digest_of_one(checkpoints, options):
    assert digest_of_fresh_llm(checkpoints[0], tensor_parallel_size=2, **options) == digest_of_fresh_llm(
        checkpoints[0], **options
    )


def test_kernels_make_the_digest_of_their_twins(checkpoints):
    plain = KERNELS | {"attention_backend": "torch"}
    assert digest_of_fresh_llm(checkpoints[0], **KERNELS) == digest_of_fresh_llm(checkpoints[0], **plain)


def test_numbers_in_another_dtype_are_others(checkpoints):
    digests = [digest_of_fresh_llm(checkpoints[0], dtype=dtype) for dtype in ("float32", "bfloat16", "float16")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert differing(digests[one], digests[other]) == digests[0].keys()


def test_a_swap_of_two_rows_is_found(checkpoints):
    """A trainer once sent the rows of a vocabulary in another order."""
    with make_llm(checkpoints[0]) as llm:
        before = llm.weights_digest(per_tensor=True)
        for name in (Q_PROJ, HEAD, EMBEDDING):
            tensor = read_tensors(checkpoints[0])[name]
            llm.update_weights({name: tensor[[1, 0, *range(2, len(tensor))]]})
            assert differing(llm.weights_digest(per_tensor=True), before) == {name}
            llm.update_weights({name: tensor})
        assert llm.weights_digest(per_tensor=True) == before


def test_without_an_lm_head_there_is_a_digest_too(tmp_path):
    """A classification head has one, an LM head that was left out has none."""
    with LLM(save_demo_classifier(tmp_path, 3), device="cpu", num_kvcache_blocks=8) as llm:
        assert "score.weight" in llm.weights_digest(per_tensor=True)
    with LLM("bundled", device="cpu", num_kvcache_blocks=8, runner="pooling") as llm:
        digests = llm.weights_digest(per_tensor=True)
    assert digests == digest_of_fresh_llm("bundled") and HEAD not in digests


def test_undefined_weights_have_no_digest(checkpoints):
    first = read_tensors(checkpoints[0])
    with make_llm(checkpoints[0]) as llm:
        before = llm.weights_digest()
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(RuntimeError, match=r"sleeps; call wake_up\(\) first"):
                llm.weights_digest()
            llm.wake_up()
            if level == 2:
                llm.update_weights({name: tensor for name, tensor in first.items() if name != Q_PROJ})
                with pytest.raises(RuntimeError, match=f"^1 tensors are undefined, .*: {Q_PROJ}; give them to update"):
                    llm.weights_digest(per_tensor=True)
                llm.update_weights({Q_PROJ: first[Q_PROJ]})
            assert llm.weights_digest() == before
        with pytest.raises(TypeError, match="per_tensor must be True or False, not 1"):
            llm.weights_digest(per_tensor=1)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.weights_digest()
    with pytest.raises(RuntimeError, match="no weights"):
        make_engine().weight_digests()


def test_a_digest_between_two_results_changes_none_of_them(checkpoints):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make_llm(checkpoints[0]) as llm:
        before = llm.weights_digest()
        expected = [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        found = []
        for output in llm.generate_iter(PROMPTS, params):
            found.append(output.token_ids)
            assert llm.weights_digest() == before
        assert found == expected


def test_copies_that_differ_are_an_error():
    part = WeightPart("a", [2, 3], "torch.float32", [0, 2, 0, 3], [5])
    other = part._replace(name="b", shape=[4], region=[0, 1, 0, 4])
    same = tensor_digests([[part, other], [list(part)]])
    assert same == tensor_digests([[other, part._replace(sums=[5, 5])]])
    with pytest.raises(RuntimeError, match=r"^copies in memory differ, of 1 tensor: a \(rank 1\); .*update_wei"):
        tensor_digests([[part, other], [part._replace(sums=[6])]])
    with pytest.raises(RuntimeError, match=r"b \(rank 0\)"):
        tensor_digests([[part, other._replace(sums=[5, 6])]])
    with pytest.raises(RuntimeError, match=r", of 2 tensors: a \(rank 0\), b \(rank 0\); only some"):
        tensor_digests([[part._replace(sums=[5, 6]), other._replace(sums=[5, 6])]])
    for changed in (part._replace(dtype="torch.int32"), part._replace(shape=[3, 2]), part._replace(name="c")):
        assert whole_digest(tensor_digests([[changed, other]])) != whole_digest(same)
