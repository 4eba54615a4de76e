"""Every family's tokens and logits are those of transformers, in float32 on the CPU."""

import random
from functools import partial

import pytest
import torch
from support.against_transformers import (
    TIE,
    Tally,
    compare,
    logit_gap,
    ragged_prompts,
    reference_completions,
    teacher_forced_logits,
)
from support.family_factory import FAMILIES, save_family_model
from support.long import some
from support.thread_ranks import logits_of, on_ranks

from nanovllm import LLM, SamplingParams
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.layers.forms import Form
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.norm import QKNorm
from nanovllm.models.decoder import CausalLM
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.collectives import Parallel
from nanovllm.runner import settings

CPU = torch.device("cpu")
# Families in which ranks sum, norm or read their parts in ways of their own.
RANKS_DIFFER = [
    "gemma3", "granite", "granite4", "olmo3", "olmoe", "phi3", "qwen2_moe", "qwen3_5", "qwen3_moe", "qwen3_next",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.mark.grid(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("backend", "overlap"), [("sdpa", True), ("sdpa", False), ("torch", True)])
def test_greedy_completions_are_those_of_transformers(tmp_path, family, backend, overlap, count, monkeypatch):
    """They use paging, chunks, prefix hits, preemption and overlap, with windows shorter and longer than these."""
    monkeypatch.setattr(settings, "_MIN_SAVED_TOKENS", {"cpu": 1})  # short prompts are worth a snapshot of their states
    rng = random.Random(f"{family} {backend} {overlap}")
    tally = Tally()
    for index in range(count(3, 20)):
        options = FAMILIES[family][2](rng)
        directory = tmp_path / str(index)
        model = save_family_model(directory, family, options, seed=rng.randrange(10**6))
        compare(model, directory, ragged_prompts(rng, options["vocab_size"]), rng, backend, overlap, tally)
    print(tally)  # pytest -rP shows it
    assert tally.num_ties <= tally.num_rows / 100
    # The comparison proves something only if completions vary and the schedules were not trivial.
    assert tally.num_repeating <= tally.num_rows / 3
    assert tally.num_cached_tokens > tally.num_rows
    assert tally.num_chunked_prompts + tally.num_preemptions > 0
    assert tally.num_chunked_prompts > count(-1, 5)
    assert tally.num_preemptions > count(-1, 5)


@pytest.mark.grid(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["sdpa", "torch"])
def test_teacher_forced_logits_are_those_of_transformers(tmp_path, family, backend, count):
    """Tokens hide errors that are smaller than the gap between candidates; logits do not."""
    for seed in (1, 0, 2, 3)[: count(1, 4)]:
        rng = random.Random(seed)
        options = FAMILIES[family][2](rng)
        directory = tmp_path / str(seed)
        model = save_family_model(directory, family, options, seed=seed)
        chunks = [33, 1, 1, 20, 1, 7, 1, 40, 1]
        token_ids = [rng.randrange(options["vocab_size"]) for _ in range(sum(chunks))]
        with LLM(str(directory), device="cpu", attention_backend=backend, kvcache_block_size=5) as llm:
            ours = teacher_forced_logits(llm, token_ids, chunks)
        with torch.inference_mode():
            theirs = model(torch.tensor([token_ids])).logits[0]
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error < 1e-4, (error, options)


def test_embeddings_are_scaled_as_by_transformers(tmp_path):
    """Gemma was trained with sqrt(hidden_size) rounded to bfloat16. Granite's factor is not rounded, and the residual
    is divided by its multiplier."""
    token_ids = torch.arange(31)
    for family, more in (("gemma3", {}), ("granite", {"embedding_multiplier": 12, "residual_multiplier": 0.22})):
        options = FAMILIES[family][2](random.Random(3)) | {"hidden_size": 120, "vocab_size": 31} | more
        theirs = save_family_model(tmp_path, family, options).bfloat16().model.embed_tokens
        config, backend = load_model_config(tmp_path), TorchAttention(AttentionShape(1, 1, 2, torch.bfloat16, CPU))
        embed = CausalLM(config, 64, backend, Parallel(), torch.bfloat16, CPU).model.embed_tokens
        embed.weight.data.copy_(theirs.weight)
        expected = theirs(token_ids)
        if family == "granite":
            expected = (theirs.weight.float() * (12 / 0.22)).bfloat16()
        assert torch.equal(embed(token_ids).part, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_fused_model_is_fused(tmp_path, family):
    """A layer that is not fused gives the same tokens, only later: attention's projections once missed the kernel for
    one row.
    """
    save_family_model(tmp_path, family, FAMILIES[family][2](random.Random(family)), seed=0)
    config, backend = load_model_config(tmp_path), TorchAttention(AttentionShape(1, 1, 2, torch.float32, CPU))
    for fused in (True, False):
        model = CausalLM(config, 64, backend, Parallel(), torch.float32, CPU, fused)
        found = {
            name: getattr(module, "use_kernels", getattr(module, "_use_kernels", None))
            for name, module in model.named_modules()
            if not isinstance(module, QKNorm)  # Attention's kernel does its work
        }
        assert {name for name, is_fused in found.items() if is_fused is not None and is_fused is not fused} == set()
        kinds = {name.rsplit(".", 1)[-1] for name, is_fused in found.items() if is_fused is not None}
        assert {"embed_tokens", "qkv_proj", "o_proj", "attn", "norm", "lm_head"} <= kinds
        assert ("input_layernorm" in kinds) is config.family.has_pre_norms
        # A norm after a block takes no products in parts, and neither does the sum of a shared expert and the others.
        may_split = fused and not config.family.has_post_norms
        products = [
            module
            for name, module in model.named_modules()
            if isinstance(module, RowParallelLinear) and "shared_expert" not in name
        ]
        assert products and all(
            (Form.UNFINISHED in each.gives) == (may_split and each.bias is None) for each in products
        )


def divisible_models(tmp_path, family: str, rng: random.Random, number: int):
    """Checkpoints of a family that two ranks can share: (directory, options, model)."""
    while number:
        options = FAMILIES[family][2](rng)
        directory = tmp_path / str(rng.random())
        model = save_family_model(directory, family, options, seed=number)
        config = load_model_config(directory)
        try:
            config.check_parallel_size(2)
        except ValueError:
            continue
        number -= 1
        yield directory, options, model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_over_two_ranks_are_those_of_transformers(tmp_path, family, count):
    """Every rank reads its part of packed tensors, of biases and of each expert."""
    rng = random.Random(family)
    for directory, options, model in divisible_models(tmp_path, family, rng, count(2, 6)):
        token_ids = [rng.randrange(options["vocab_size"]) for _ in range(40)]
        logits = on_ranks(2, partial(logits_of, directory, token_ids))
        with torch.inference_mode():
            theirs = model(torch.tensor([token_ids])).logits[0]
        for ours in logits:
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4, options


def test_the_option_counts_blocks_per_group_of_layers(tmp_path):
    """A CPU's steps have at most 2,048 tokens. The bound of a request once assumed more, and refused what fits."""
    options = FAMILIES["gemma3"][2](random.Random(0)) | {
        "num_hidden_layers": 4, "sliding_window": 9, "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
    }  # fmt: skip
    save_family_model(tmp_path, "gemma3", options)
    with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=30, kvcache_block_size=4, max_model_len=100) as llm:
        info, cache = llm.engine.info, llm.engine.runner.program.kv_cache
        assert info.windows.num_groups == 3 and info.windows.max_num_new_tokens == 2048
        assert cache.num_blocks == info.num_kvcache_blocks == 4 * 30
        assert llm.metrics()["num_kvcache_blocks"] == llm.metrics()["num_free_kvcache_blocks"] == 30


def test_a_window_that_no_sequence_outgrows_costs_nothing(tmp_path):
    """Phi-3's windows are longer than its contexts. Layers with windows share no prefixes."""
    options = {**FAMILIES["mistral"][2](random.Random(0)), "sliding_window": 50}
    save_family_model(tmp_path, "mistral", options)
    for max_model_len, window in ((50, 0), (51, 50)):
        with LLM(str(tmp_path), device="cpu", attention_backend="triton", max_model_len=max_model_len) as llm:
            assert {layer.self_attn.attn.window for layer in llm.engine.runner.program.model.model.layers} == {window}
            assert llm.engine.runner.program.table.groups_prefixes == (window == 0)
    # The table does not ask a backend that reads every key by itself.
    with LLM(str(tmp_path), device="cpu", attention_backend="sdpa", max_model_len=50) as llm:
        assert not llm.engine.runner.program.table.groups_prefixes


@pytest.mark.parametrize("family", some(RANKS_DIFFER, "qwen3_moe"))
def test_two_ranks_give_the_tokens_of_transformers(tmp_path, family):
    """These are whole engines over gloo, with chunks, prefix hits and preemption."""
    rng, tally = random.Random(family), Tally()
    ((directory, options, model),) = divisible_models(tmp_path, family, rng, 1)
    prompts = ragged_prompts(rng, options["vocab_size"])
    compare(model, directory, prompts, rng, "sdpa", True, tally, tensor_parallel_size=2)
    assert tally.num_ties == 0


@pytest.mark.parametrize("family", some(FAMILIES, "phi3", "qwen3_moe"))
def test_an_engine_of_our_kernels_gives_the_tokens_of_the_plain_one(tmp_path, family):
    """They have windows, wide and partly rotated heads, experts and norms after blocks, in Triton's interpreter."""
    rng = random.Random(family)
    options = FAMILIES[family][2](rng)
    model = save_family_model(tmp_path, family, options, seed=1)
    prompts = [prompt[:20] for prompt in ragged_prompts(rng, options["vocab_size"])[:4]]
    expected = reference_completions(model, prompts, 6)
    engine = {"device": "cpu", "kvcache_block_size": 16, "max_num_batched_tokens": 24, "max_model_len": 64}
    with LLM(str(tmp_path), attention_backend="triton", **engine) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    for prompt, output, theirs in zip(prompts, outputs, expected, strict=True):
        if output.token_ids != theirs:
            assert logit_gap(model, prompt, output.token_ids, theirs) < TIE, options
