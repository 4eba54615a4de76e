"""LoRA adapters on a GPU: merged and side by side, captured and eager, in FP8, on two ranks."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.adapters import save_adapter
from support.gpu_engines import skip_without
from support.gpu_models import VOCAB_SIZE, save_gpu_model
from support.long import some

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.ops.low_rank import AdapterRows, Factors, add_low_rank
from nanovllm.ops.quantize import quantize_rows

pytestmark = pytest.mark.gpu

SIZES = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
SHAPES = {
    "self_attn.q_proj": (768, 384), "self_attn.k_proj": (256, 384), "self_attn.v_proj": (256, 384),
    "self_attn.o_proj": (384, 768), "mlp.gate_proj": (512, 384), "mlp.up_proj": (512, 384),
    "mlp.down_proj": (384, 512),
}  # fmt: skip
NAMES = (None, "a", "b", "c")
OPTIONS: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 64, "gpu_memory_utilization": 0.5, "enable_lora": True, "max_loras": 3,
    "max_lora_rank": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, dict[str | None, LoRARequest | None]]:
    directory = tmp_path_factory.mktemp("model")
    save_gpu_model(directory / "base", "qwen3", SIZES)
    adapters: dict[str | None, LoRARequest | None] = {None: None}
    for number, (name, rank) in enumerate((("a", 8), ("b", 32), ("c", 1)), 1):
        generator, tensors = torch.Generator().manual_seed(number), {}
        for layer in range(3):
            for module, (outputs, inputs) in SHAPES.items():
                prefix = f"base_model.model.model.layers.{layer}.{module}.lora_"
                tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                tensors[f"{prefix}B.weight"] = torch.randn(outputs, rank, generator=generator) / rank**0.5
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
        path = save_adapter(Path(directory / name), tensors, config)
        adapters[name] = LoRARequest(name, number, str(path))
    return str(directory / "base"), adapters


def requests() -> tuple[list[list[int]], list[SamplingParams], list[str | None]]:
    rng = random.Random(2)
    beginning = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
    prompts = [beginning[: rng.randrange(150)] + [rng.randrange(VOCAB_SIZE)] * rng.randrange(1, 40) for _ in range(60)]
    params = [SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True) for _ in prompts]
    return prompts, params, [NAMES[row % 4] for row in range(60)]


def numbers(llm: LLM, rows: list[int], names: list[str | None], adapters) -> list[tuple[list[int], np.ndarray]]:
    prompts, params, _ = requests()
    outputs = llm.generate(
        [prompts[row] for row in rows], [params[row] for row in rows], use_tqdm=False,
        lora_request=[adapters[names[row]] for row in rows],
    )  # fmt: skip
    assert all(output.error is None for output in outputs)
    return [(output.token_ids, output.outputs[0].logprobs.of_tokens) for output in outputs]


def in_turn(llm: LLM, names: list[str | None], adapters) -> list[tuple[list[int], np.ndarray]]:
    """Each row in a call whose rows have the same adapter."""
    found: dict[int, tuple[list[int], np.ndarray]] = {}
    for name in NAMES:
        rows = [row for row in range(len(names)) if names[row] == name]
        found.update(zip(rows, numbers(llm, rows, names, adapters), strict=True))
    return [found[row] for row in range(len(names))]


def num_close(found, expected, tolerance: float) -> int:
    """Rows whose log-probabilities agree up to the first token that differs, or after at least one token."""
    num_rows = 0
    for (ours, ours_logprobs), (theirs, theirs_logprobs) in zip(found, expected, strict=True):
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
        num_rows += same > 0 and np.allclose(ours_logprobs[:same], theirs_logprobs[:same], atol=tolerance)
    return num_rows


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_both_ways_give_what_a_cpu_gives(model, enforce_eager):
    """In float32, each row beside others, and each in a call of its adapter."""
    directory, adapters = model
    names = requests()[2]
    rows = list(range(len(names)))
    with LLM(directory, device="cpu", dtype="float32", **OPTIONS) as llm:
        expected = in_turn(llm, names, adapters)
    with LLM(directory, dtype="float32", enforce_eager=enforce_eager, **OPTIONS) as llm:
        mixed, turns = numbers(llm, rows, names, adapters), in_turn(llm, names, adapters)
        again = numbers(llm, rows, names, adapters)
    for what, found in (("mixed", mixed), ("in turn", turns), ("mixed, warm", again)):
        num_same = sum(ours[0] == theirs[0] for ours, theirs in zip(found, expected, strict=True))
        print(f"{what}: {num_same} of {len(rows)} rows have the same tokens")
        assert num_close(found, expected, 2e-3) == len(rows) and num_same >= len(rows) - 2
    base = [row for row in rows if names[row] is None]
    others = [expected[row][0] for row in rows if names[row] == "a"]
    assert not any(tokens == expected[row][0] for row, tokens in zip(base, others, strict=True))


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_both_ways_agree_in_bfloat16(model, options):
    directory, adapters = model
    names = requests()[2]
    rows = list(range(len(names)))
    with LLM(directory, dtype="bfloat16", **OPTIONS, **options) as llm:
        mixed, turns = numbers(llm, rows, names, adapters), in_turn(llm, names, adapters)
    with LLM(directory, dtype="float32", **OPTIONS) as llm:
        exact = numbers(llm, rows, names, adapters)
    firsts = [[found[row][0][0] == exact[row][0][0] for row in rows] for found in (mixed, turns)]
    print(f"{options}: first tokens as in float32: {[sum(each) for each in firsts]} of {len(rows)}")
    tolerance = 0.5 if options else 0.15
    assert num_close(mixed, turns, tolerance) >= 0.9 * len(rows)
    assert all(sum(each) >= (0.75 if options else 0.9) * len(rows) for each in firsts)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["bfloat16", "fp8"])
def test_no_schedule_changes_a_byte_of_a_row_with_an_adapter(model, options):
    directory, adapters = model
    names = requests()[2]
    rows = list(range(len(names)))
    common = {**OPTIONS, "dtype": "bfloat16", "deterministic": True, **options}
    with LLM(directory, **common) as llm:
        found = [numbers(llm, rows, names, adapters), in_turn(llm, names, adapters)]
        found.append([numbers(llm, [row], names, adapters)[0] for row in rows[:12]])
    more = {"enforce_eager": True, "max_num_batched_tokens": 60, "enable_prefix_caching": False, "max_num_seqs": 9}
    with LLM(directory, **{**common, **more}) as llm:
        found.append(numbers(llm, rows, names, adapters))
    for each in found[1:]:
        for (tokens, logprobs), (expected, expected_logprobs) in zip(each, found[0], strict=False):
            assert tokens == expected and logprobs.tobytes() == expected_logprobs.tobytes()


def test_two_ranks_give_what_one_gives(model):
    skip_without(2)
    directory, adapters = model
    names = requests()[2]
    rows = list(range(len(names)))
    with LLM(directory, dtype="float32", **OPTIONS) as llm:
        expected = numbers(llm, rows, names, adapters)
    with LLM(directory, dtype="float32", tensor_parallel_size=2, **OPTIONS) as llm:
        found, turns = numbers(llm, rows, names, adapters), in_turn(llm, names, adapters)
    for each in (found, turns):
        assert num_close(each, expected, 2e-3) == len(rows)


@pytest.mark.parametrize("num_tokens", some([1, 7, 64, 65, 256, 700, 3000], 7, 256, 700))
@pytest.mark.parametrize("is_quantized", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("size, outputs, parts", [(4096, (4096, 1024, 1024), 3), (12288, (4096,), 1)])
def test_kernels_add_what_their_twin_adds(num_tokens, is_quantized, size, outputs, parts):
    torch.manual_seed(num_tokens)
    num_slots, rank, total = 8, 16, sum(outputs)
    made = {"device": "cuda", "dtype": torch.bfloat16}
    factors = Factors(
        torch.randn(num_slots, parts * rank, size, **made) / size**0.5,
        torch.randn(num_slots, total, rank, **made) / rank**0.5,
        torch.rand(num_slots, parts, device="cuda") + 0.5,
        torch.repeat_interleave(torch.arange(parts), torch.tensor(outputs)).int().cuda(),
        torch.zeros(2048, dtype=torch.int32, device="cuda"),
    )
    slots = torch.randint(0, num_slots + 1, (num_tokens,), device="cuda", dtype=torch.int32)
    rows, x = AdapterRows.of(slots), torch.randn(num_tokens, size, **made)
    x = quantize_rows(x) if is_quantized else x
    base = torch.randn(num_tokens, total, **made)
    add_low_rank(base.clone(), x, factors, rows, use_kernels=True)
    assert not factors.counters.any()  # as the next call finds them
    found = add_low_rank(base.clone(), x, factors, rows, use_kernels=True)
    expected = add_low_rank(base.clone(), x, factors, rows)
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
    assert torch.equal(found[slots == 0], base[slots == 0])
    assert not torch.equal(found[slots > 0], base[slots > 0]) or not (slots > 0).any()
