"""LoRA adapters beside the weights: the kernels against their plain twin, and models whose steps mix rows of several
adapters against models whose weights have an adapter added."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.family_factory import FAMILIES, RECURRENT, make_family_model, save_divisible_model, save_family_model
from support.interpreter import multiply_bfloat16, shuffle_programs
from support.long import long, some
from support.model_factory import make_model, read_tensors, save_model
from support.slot_adapters import (
    changed_names,
    completed_in_slots,
    load_slots,
    random_adapter,
    with_adapter,
)
from support.thread_ranks import logits_of, on_ranks

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import BASE, Adapter, Pooling, Sequence, completions_of
from nanovllm.layers import linear
from nanovllm.layers.context import LayerContext
from nanovllm.layers.forms import Form, PendingProduct
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantization import BlockFp8, ChannelFp8
from nanovllm.layers.shard import Rows
from nanovllm.logprobs import TokenLogprobs
from nanovllm.models.adapter_slots import check_fits_beside
from nanovllm.models.loader import expected_tensors
from nanovllm.ops import low_rank
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.low_rank import AdapterRows, Factors, add_low_rank
from nanovllm.ops.quantize import Quantized, plain_quantize_rows
from nanovllm.ops.row_invariant import ROW_INVARIANT
from nanovllm.runner import settings, warm_up

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


# Kernels


def make_factors(
    num_slots: int, size: int, parts: list[int], rank: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Factors:
    """parts: the part of each output."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num_parts = max(parts) + 1
    return Factors(
        (numbers(num_slots, num_parts * rank, size) / size**0.5).to(dtype),
        (numbers(num_slots, len(parts), rank) / rank**0.5).to(dtype),
        numbers(num_slots, num_parts),
        torch.tensor(parts, dtype=torch.int32),
        torch.zeros(8, dtype=torch.int32),  # fewer than large steps need
    )


def defined_sum(out: torch.Tensor, x: torch.Tensor, factors: Factors, slots: torch.Tensor) -> torch.Tensor:
    """The definition, token by token in float64."""
    total, rank = out.double().clone(), factors.b.shape[2]
    for token, slot in enumerate(slots.tolist()):
        for output, part in enumerate(factors.parts.tolist() if slot else ()):
            a = factors.a[slot - 1, part * rank : (part + 1) * rank].double()
            inner = a @ x[token].double()
            total[token, output] += factors.scales[slot - 1, part].double() * (
                factors.b[slot - 1, output].double() @ inner
            )
    return total


# The parts of a layer's outputs: one weight; gate and up; queries, keys, values and the gates of the queries.
ONE, TWO, GATED = [0] * 21, [0] * 20 + [1] * 20, [0] * 18 + [1] * 6 + [2] * 6 + [0] * 18
SLOTS = {
    "ragged": [0, 2, 1, 1, 0, 3, 2, 2, 2, 0, 1, 3, 3, 3, 0, 0, 2, 1, 3, 0, 2],
    "one slot": [2] * 19,
    "one token": [3],
    "all base": [0] * 18,
    "base beyond a tile": [0] * 40 + [1, 3] * 3,
}


@pytest.mark.parametrize(("slots", "parts", "size", "rank"), [
    ("ragged", GATED, 70, 16), ("one slot", TWO, 128, 32), ("one token", ONE, 33, 16), ("all base", ONE, 16, 16),
    ("base beyond a tile", TWO, 150, 48), long("ragged", TWO, 600, 64), long("one slot", GATED, 300, 80),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_add_what_the_definition_says(monkeypatch, slots, parts, size, rank, dtype):
    """Padding tokens have slot 0. Rows of slot 0 keep their bits, and no kernel writes beside its rows."""
    multiply_bfloat16(monkeypatch)
    slots = torch.tensor(SLOTS[slots], dtype=torch.int32)
    factors, generator = make_factors(3, size, parts, rank, dtype), torch.Generator().manual_seed(1)
    x, out = (torch.randn(len(slots), width, generator=generator).to(dtype) for width in (size, len(parts)))
    expected, rows = defined_sum(out, x, factors, slots), AdapterRows.of(slots)
    for use_kernels in (False, True):
        around = torch.full((len(slots) + 2, len(parts)), 7.0, dtype=dtype)
        around[1:-1] = out
        found = add_low_rank(around[1:-1], x, factors, rows, use_kernels)
        assert found.data_ptr() == around[1:-1].data_ptr() and (around[[0, -1]] == 7).all()
        # The twin rounds once; the kernels also round A @ x.
        eps = torch.finfo(dtype).eps * (1 + 2 * use_kernels) if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)
        assert torch.equal(found[slots == 0], out[slots == 0])
        assert not factors.counters.any()
        assert not (found[slots > 0] == out[slots > 0]).all(1).any()


@pytest.mark.parametrize("num_tokens", [3, 65, 513, long(2049)])
def test_tiles_of_all_sizes_add_the_same(num_tokens):
    """Few tokens share their inputs among many programs, whose sums are added in order."""
    factors, generator = make_factors(2, 200, TWO, 16), torch.Generator().manual_seed(num_tokens)
    slots = torch.zeros(num_tokens, dtype=torch.int32)
    slots[torch.randperm(num_tokens, generator=generator)[:9]] = torch.tensor(
        [1, 2, 1, 2, 2, 1, 1, 2, 2][:num_tokens], dtype=torch.int32
    )
    x, out = (torch.randn(num_tokens, width, generator=generator) for width in (200, 40))
    plain, found = (add_low_rank(out.clone(), x, factors, AdapterRows.of(slots), kernels) for kernels in (False, True))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert len({low_rank.low_rank_variant(number) for number in (1, 64, 65, 512, 513, 2048, 2049, 10**5)}) == 4
    assert low_rank.low_rank_variant(1) == low_rank.low_rank_variant(64)


@pytest.mark.parametrize("seed", [0, 1])
def test_programs_may_run_in_any_order(monkeypatch, seed):
    """Three tiles of tokens, two of ranks and ten splits: each tile counts for itself, and the sum has an order of its
    own."""
    factors, generator = make_factors(2, 600, TWO, 48), torch.Generator().manual_seed(seed)
    rows = AdapterRows.of(torch.randint(0, 3, (40,), generator=generator, dtype=torch.int32))
    x, out = (torch.randn(40, width, generator=generator) for width in (600, 40))
    expected = add_low_rank(out.clone(), x, factors, rows, use_kernels=True)
    shuffle_programs(monkeypatch, seed)
    assert torch.equal(add_low_rank(out.clone(), x, factors, rows, use_kernels=True), expected)


def test_a_nan_stays_in_its_row():
    factors = make_factors(2, 64, TWO, 16)
    factors.a[0, 3, 5] = factors.b[0, 2, 1] = torch.nan
    x, slots = torch.ones(6, 64), torch.tensor([0, 2, 1, 2, 0, 1], dtype=torch.int32)
    x[1] = torch.nan
    for use_kernels in (False, True):
        out = add_low_rank(torch.zeros(6, 40), x, factors, AdapterRows.of(slots), use_kernels)
        assert out.isnan().any(1).tolist() == [False, True, True, False, False, True]


def test_inputs_in_fp8_are_multiplied_as_the_numbers_that_they_are(monkeypatch):
    multiply_bfloat16(monkeypatch)
    slots = torch.tensor(SLOTS["ragged"], dtype=torch.int32)
    factors, generator = make_factors(3, 96, TWO, 16, torch.bfloat16), torch.Generator().manual_seed(2)
    x = plain_quantize_rows(torch.randn(len(slots), 96, generator=generator))
    out = torch.zeros(len(slots), 40, dtype=torch.bfloat16)
    expected = defined_sum(out, x.whole(), factors, slots)
    for use_kernels in (False, True):
        found = add_low_rank(out.clone(), x, factors, AdapterRows.of(slots), use_kernels)
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_invariant_rows_do_not_depend_on_other_rows():
    """The kernels have tiles of one size then, whatever the number of tokens."""
    factors, slots = make_factors(2, 70, GATED, 16), torch.tensor([0, 2, 1, 1, 2, 0, 1] * 9, dtype=torch.int32)
    x, out = (torch.randn(len(slots), width, generator=torch.Generator().manual_seed(3)) for width in (70, 48))
    together = add_low_rank(out.clone(), x, factors, AdapterRows.of(slots), row_ops=ROW_INVARIANT)
    for row in (0, 1, 2, 60):
        rows = slice(row, row + 1)
        alone = add_low_rank(out[rows].clone(), x[rows], factors, AdapterRows.of(slots[rows]), row_ops=ROW_INVARIANT)
        assert torch.equal(alone, together[rows])
    assert len({low_rank._tiles(number, deterministic=True) for number in (1, 100, 1000, 10**5)}) == 1


# Layers


def make_context(fp8: bool, **more: Any) -> LayerContext:
    return LayerContext(torch.bfloat16 if fp8 else torch.float32, CPU, max_loras=2, max_lora_rank=5, **more)


def fill_randomly(layer: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in layer.named_parameters():
        if "scale" in name and "slots" not in name:
            parameter.fill_(0.05)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


@pytest.mark.parametrize("format_of", [None, ChannelFp8, BlockFp8])
@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_a_layer_gives_a_plain_product_in_steps_with_adapters(monkeypatch, format_of, use_kernels, kind):
    """Nothing can be added to the other forms. Steps without adapters still get these."""
    multiply_bfloat16(monkeypatch)
    if use_kernels and kind == "columns":  # as on a Hopper GPU with many rows
        monkeypatch.setattr(linear, "has_fused_product", lambda num_rows, weight: True)
    context = make_context(format_of is not None, use_kernels=use_kernels)
    config = Fp8Config("weight_scale", block=(32, 32) if format_of is BlockFp8 else None)
    format = None if format_of is None else format_of(config, context)
    every_form = Form.SCALED | Form.UNFINISHED
    if kind == "columns":
        rows = [Rows("gate_proj", 32, 0, 32), Rows("up_proj", 32, 0, 32)]
        layer = MergedColumnParallelLinear(64, rows, False, context, format=format, gives=every_form)
    else:
        layer = RowParallelLinear(64, 64, False, context, format=format, gives=every_form)
    assert layer.adapter_slots is not None and all((each == 0).all() for each in layer.adapter_slots.parameters())
    fill_randomly(layer)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)).to(context.dtype)
    slots = torch.tensor([0, 2, 1], dtype=torch.int32)
    given: torch.Tensor | Quantized = plain_quantize_rows(x) if Form.QUANTIZED in layer.accepts else x

    def plain(product: Any) -> torch.Tensor:
        part = getattr(product, "part", product)
        if isinstance(part, PendingProduct):
            return part.x @ part.weight.T
        part = part.whole() if hasattr(part, "whole") else part
        return part.sum(0) if part.ndim == 3 else part

    base, found = layer(given), layer(given, AdapterRows.of(slots))
    found = getattr(found, "part", found)
    assert isinstance(found, torch.Tensor) and found.ndim == 2 and found.dtype == context.dtype
    tolerance = 1e-4 if format is None else 0.02
    torch.testing.assert_close(found[:1].float(), plain(base)[:1].float(), rtol=tolerance, atol=tolerance)
    held, inputs = layer.adapter_slots, (given.whole() if isinstance(given, Quantized) else x)
    expected = defined_sum(
        plain(base), inputs, Factors(held.a, held.b, held.scales, held._parts, held._counters), slots
    )
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("max_loras", [0, 2])
def test_deterministic_layers_give_one_form_in_all_steps(max_loras):
    """A row of the base must not get other bits from a step with adapters. Without room for them, nothing changes."""
    context = replace(make_context(True, use_kernels=True, row_ops=ROW_INVARIANT), max_loras=max_loras)
    format = ChannelFp8(Fp8Config("weight_scale"), context)
    layer = RowParallelLinear(64, 64, False, context, format=format, gives=Form.SCALED)
    assert layer.gives == (Form.PLAIN if max_loras else Form.SCALED) and layer.accepts == Form.QUANTIZED


@pytest.mark.parametrize("has_room", [False, True])
def test_the_trial_of_the_largest_step_has_adapters_too(tmp_path, monkeypatch, has_room):
    """Such a step has larger activations. The table must not take the second trial's sequences for the first one's."""
    save_model(tmp_path, seed=2)
    with LLM(str(tmp_path), **(OPTIONS if has_room else {"device": "cpu", "max_model_len": 64})) as llm:
        program, sizes = llm.engine.runner.program, []
        batch = program.table.batch
        monkeypatch.setattr(program.table, "batch", lambda sent: sizes.append(sent.size) or batch(sent))
        warm_up.try_step(program, [3, 1, 5])
    assert [size.has_adapters for size in sizes] == [False, True][: 1 + has_room]


def test_a_model_without_room_for_adapters_has_none(tmp_path):
    save_model(tmp_path, seed=1)
    with LLM(str(tmp_path), device="cpu", max_model_len=64) as llm:
        program = llm.engine.runner.program
        assert not any("adapter" in name for name, _ in program.model.named_parameters())
        assert not program.table.has_adapters and "adapters" not in llm.engine.runner.memory()


# Models

OPTIONS = {
    "device": "cpu", "dtype": "float32", "max_model_len": 64, "kvcache_block_size": 4, "max_num_batched_tokens": 13,
    "enable_lora": True, "max_loras": 3, "max_lora_rank": 5,
}  # fmt: skip
FAMILIES_HERE = ["qwen3", "qwen2", "phi3", "gemma3", "qwen3_moe", "qwen2_moe", "qwen3_5", "qwen3_next", "olmo2"]


def adapters_of(directory: Path) -> list[dict]:
    """Three adapters: of all weights, of half of them, and of one."""
    tensors = read_tensors(directory)
    names = changed_names(tensors)
    half = random.Random(5).sample(names, len(names) // 2)
    return [random_adapter(tensors, some, 5, seed) for seed, some in enumerate((names, half, names[-1:]), 1)]


def rows_of(vocab_size: int, max_tokens: int = 5) -> list[tuple[list[int], SamplingParams, int]]:
    """Rows of every slot and of the base, some of which begin alike, scored and generated. The first token shows
    the slot, so that the prefix cache, which does not know of slots here, finds only prefixes of the same slot."""
    rng, rows = random.Random(9), []
    for index in range(10):
        slot = index % 4
        beginning = [slot, *((7 * slot + place) % vocab_size for place in range(8))]
        prompt = beginning + [rng.randrange(vocab_size) for _ in range(rng.choice((1, 3, 14)))]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        if index % 3 == 0:
            params.prompt_logprobs = 0
        rows.append((prompt, params, slot))
    return rows


@pytest.mark.parametrize("level", [1, 2])
def test_factors_are_no_weights(tmp_path, level):
    """They have memory of their own, no digest, and no checkpoint. A deep sleep drops them."""
    save_model(tmp_path, seed=2)
    adapter, rows = adapters_of(tmp_path)[0], rows_of(61)[1:2]
    with LLM(str(tmp_path), device="cpu", max_model_len=64) as llm:
        digest, memory = llm.weights_digest(), llm.engine.runner.memory()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        load_slots(llm, [adapter])
        # For each slot: factors of rank 16 for 7 weights per layer, and a scale for each weight.
        widths = (32 + 64) + 2 * (32 + 32) + (64 + 32) + 2 * (32 + 40) + (40 + 32)
        found = llm.engine.runner.memory()
        assert found["adapters"] == 3 * 2 * 4 * (16 * widths + 7) and found["weights"] == memory["weights"]
        before = [bytes(seq.logprobs) for seq in completed_in_slots(llm, rows)]
        assert llm.weights_digest() == digest
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            slots = llm.engine.runner.program.model.model.layers[0].mlp.down_proj.adapter_slots
            assert not any(parameter.any() for parameter in slots.parameters())
            llm.update_weights(read_tensors(tmp_path))
            load_slots(llm, [adapter])
        assert [bytes(seq.logprobs) for seq in completed_in_slots(llm, rows)] == before
    with LLM(str(tmp_path), **OPTIONS, load_format="dummy") as llm:
        parameters = llm.engine.runner.program.model.named_parameters()
        slots = [parameter for name, parameter in parameters if "adapter_slots" in name]
        assert len(slots) == 2 * 4 * 3 and not any(parameter.any() for parameter in slots)


@torch.inference_mode()
def expected_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The log-probability of each token but the first."""
    logits = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(token_ids)[1:, None])[:, 0]


def difference(numbers: bytearray, expected: torch.Tensor) -> float:
    """The largest difference of a sequence's log-probabilities from the expected ones."""
    found = torch.from_numpy(TokenLogprobs.of(numbers, 0).logprobs[:, 0].copy()).double()
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize("family", some(FAMILIES_HERE, "qwen3", "qwen2", "phi3", "gemma3", "qwen2_moe", "qwen3_5"))
def test_rows_beside_each_other_are_computed_each_with_its_own_adapter(tmp_path, family, monkeypatch):
    """Chunks, prefix hits and decodes mix rows of three adapters and of the base. Each row's log-probabilities are
    those of transformers' model whose weights have the row's adapter added."""
    monkeypatch.setattr(settings, "_MIN_SAVED_TOKENS", {"cpu": 1})
    options = FAMILIES[family][2](random.Random(family)) | {"vocab_size": 61}
    if family in RECURRENT:  # the last layer has a state, and then one without
        kinds = ["full_attention", "linear_attention"]
        options |= {"num_hidden_layers": 2, "layer_types": kinds if family == "qwen3_5" else kinds[::-1]}
    tensors = {
        name: tensor.clone() for name, tensor in save_family_model(tmp_path, family, options, 3).state_dict().items()
    }
    adapters = adapters_of(tmp_path)
    with LLM(str(tmp_path), **OPTIONS, max_num_seqs=4) as llm:
        load_slots(llm, adapters)
        rows = rows_of(61)
        found = completed_in_slots(llm, rows) + completed_in_slots(llm, rows[:4])
    assert sum(seq.num_cached_tokens for seq in found) > 20
    errors, of_adapters = [0.0] * 4, []
    for slot in range(4):
        model = make_family_model(family, options, 3).double()
        model.load_state_dict(with_adapter(tensors, adapters[slot - 1] if slot else {}))
        for seq, (prompt, params, of_row) in zip(found, rows + rows[:4], strict=True):
            if of_row == slot:
                expected = expected_logprobs(model, seq.token_ids.tolist())
                assert len(expected) == len(prompt) + params.max_tokens - 1
                errors[slot] = max(errors[slot], difference(seq.logprobs, expected[len(prompt) - 1 :]))
                if params.prompt_logprobs is not None:
                    errors[slot] = max(errors[slot], difference(seq.prompt_logprobs, expected[: len(prompt) - 1]))
        of_adapters.append(expected_logprobs(model, found[0].token_ids.tolist()))
    assert all(float((each - of_adapters[0]).abs().max()) > 0.01 for each in of_adapters[1:]), "adapters change nothing"
    # The base rows show what float32 rounds.
    assert max(errors) < 1e-5 + 10 * errors[0] < 1e-3, errors


def test_a_slot_takes_another_adapter(tmp_path):
    """Nothing of the one before is left, not even where the new one changes nothing or has a smaller rank."""
    save_model(tmp_path, seed=2)
    first, second, third = adapters_of(tmp_path)
    rows = [(prompt, params, 1) for prompt, params, slot in rows_of(61) if slot == 1]
    found = []
    with LLM(str(tmp_path), **OPTIONS, enable_prefix_caching=False) as llm:
        for adapter in (first, second, third, {}, second):
            load_slots(llm, [adapter])
            found.append([bytes(seq.logprobs) for seq in completed_in_slots(llm, rows)])
        base = [bytes(seq.logprobs) for seq in completed_in_slots(llm, [(*row[:2], 0) for row in rows])]
    assert found[1] == found[4] and found[3] == base and len({str(each) for each in found}) == 4


def test_all_completions_of_a_request_have_its_adapter():
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4)
    first = Sequence(5, [1, 2], params, 6, adapter=Adapter(7, 2))
    assert [seq.adapter for seq in completions_of(first)] == [Adapter(7, 2)] * 3
    assert first.begun_again().adapter == Adapter(7, 2) and Sequence(9, [1], params, 5).adapter == BASE


def test_base_rows_and_steps_without_adapters_keep_their_bits(tmp_path):
    """An engine with room for adapters computes them as one without, also beside rows with adapters."""
    save_model(tmp_path, seed=2)
    rows, found = rows_of(61), []
    base = [row for row in rows if row[2] == 0]
    plain = {name: value for name, value in OPTIONS.items() if "lora" not in name}
    with LLM(str(tmp_path), **plain, deterministic=True) as llm:
        expected = [bytes(seq.logprobs) for seq in completed_in_slots(llm, base)]
    with LLM(str(tmp_path), **OPTIONS, deterministic=True) as llm:
        load_slots(llm, adapters_of(tmp_path))
        for some_rows in (base, rows):
            completed = completed_in_slots(llm, some_rows)
            found.append([bytes(seq.logprobs) for seq, row in zip(completed, some_rows, strict=True) if row[2] == 0])
        alone = [bytes(completed_in_slots(llm, [row])[0].logprobs) for row in rows]
        assert alone == [bytes(seq.logprobs) for seq in completed_in_slots(llm, rows)]
    assert found == [expected, expected]


def test_prompts_pool_with_their_adapters(tmp_path):
    """States of several layers go another way through the step."""
    tensors = save_model(tmp_path, seed=2).state_dict()
    adapters, kinds = adapters_of(tmp_path), (Pooling("all", (1, 2)), Pooling("mean"), Pooling("last"))
    prompts = [[slot, *range(10, 10 + length)] for slot, length in ((0, 5), (1, 14), (2, 3), (1, 6))]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        load_slots(llm, adapters)
        for kind in kinds:
            seqs = completed_in_slots(llm, [(prompt, kind, prompt[0]) for prompt in prompts])
            for seq, prompt in zip(seqs, prompts, strict=True):
                model = make_model(seed=2).double()
                model.load_state_dict(with_adapter(tensors, adapters[prompt[0] - 1] if prompt[0] else {}))
                with torch.inference_mode():
                    states = model.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
                expected = torch.cat([states[layer][0] for layer in kind.layers or (-1,)], 1)
                expected = {"all": expected, "mean": expected.sum(0, keepdim=True), "last": expected[-1:]}[kind.tokens]
                found = torch.from_numpy(np.concatenate(seq.states)).double()
                found = found.sum(0, keepdim=True) if kind.tokens == "mean" else found
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


IN_TOKENS = [5 * place % 61 for place in range(22)], torch.tensor([place % 3 for place in range(22)], dtype=torch.int32)


@pytest.mark.parametrize("family", some(["qwen3", "phi3", "qwen3_5", "qwen2_moe"], "phi3", "qwen3_5"))
def test_ranks_add_their_parts(tmp_path, family):
    """Each rank has A's columns or B's rows as it has the weight's."""
    save_divisible_model(tmp_path, family, random.Random(family), vocab_size=64)
    (token_ids, slots), adapters = IN_TOKENS, adapters_of(tmp_path)[:2]
    whole = logits_of(tmp_path, token_ids, Parallel(), adapted=(adapters, slots))
    base = logits_of(tmp_path, token_ids, Parallel())
    assert float((whole - base)[slots > 0].abs().max()) > 0.1
    for found in on_ranks(2, lambda parallel: logits_of(tmp_path, token_ids, parallel, adapted=(adapters, slots))):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("family", some(["qwen3", "phi3", "qwen3_5", "qwen2_moe"], "phi3"))
def test_a_model_with_kernels_adds_the_same(tmp_path, family):
    """Its layers pass products in other forms to each other, but not in steps with adapters."""
    save_family_model(tmp_path, family, FAMILIES[family][2](random.Random(family)) | {"vocab_size": 61}, 1)
    adapted = adapters_of(tmp_path)[:2], IN_TOKENS[1]
    plain, found = (logits_of(tmp_path, IN_TOKENS[0], Parallel(), fused, adapted) for fused in (False, True))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


def test_what_has_no_room_is_refused_by_name(tmp_path):
    options = FAMILIES["qwen3_moe"][2](random.Random(1)) | {"mlp_only_layers": [], "decoder_sparse_step": 1}
    save_family_model(tmp_path, "qwen3_moe", options)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        model = llm.engine.runner.program.model
        tensors = {name: torch.empty(shards[0].shape) for name, shards in expected_tensors(model).items()}
        names = changed_names(tensors)
        check_fits_beside(model, random_adapter(tensors, names, 5, 1), "mine")
        for name in ("model.layers.0.mlp.experts.0.up_proj.weight", "model.embed_tokens.weight"):
            with pytest.raises(ValueError, match=f"^mine changes {name}, which takes no adapter beside others"):
                check_fits_beside(model, random_adapter(tensors, [*names, name], 1, 1), "mine")
        wide = random_adapter(tensors, names[:1], 5, 1)
        factor = torch.zeros(6, tensors[names[0]].shape[1])
        wide[names[0]] = wide[names[0]]._replace(a=type(wide[names[0]].a)("A", factor))
        with pytest.raises(
            ValueError,
            match=rf"^mine changes {names[0]} with rank 6, .* set max_lora_rank=6, or give it a call of its own",
        ):
            check_fits_beside(model, wide, "mine")
