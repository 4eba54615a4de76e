"""Every family on a GPU in bfloat16: logits as good as those of transformers, and greedy tokens through graphs."""

import random
from typing import Any

import pytest
import torch
from support.against_transformers import teacher_forced_logits
from support.experts import exact_mlp
from support.gpu_models import DEVICE, MODELS, VOCAB_SIZE, make_gpu_model

from nanovllm import LLM, SamplingParams
from nanovllm.ops.grouped_mlp import ExpertWeights, grouped_mlp
from nanovllm.ops.route import route

pytestmark = pytest.mark.gpu

CHUNKS = {"one prefill": [700], "chunks": [100, 1, 256, 3, 200, 140], "decodes": [20] + [1] * 380}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    """(directory, token ids, transformers' model in float32, its logits, and those in bfloat16)"""
    family, options = MODELS[request.param]
    directory = tmp_path_factory.mktemp("model")
    model = make_gpu_model(family, options)
    model.bfloat16().save_pretrained(directory)
    rng = random.Random(request.param)
    token_ids = [rng.randrange(VOCAB_SIZE - 2) for _ in range(700)]  # the last ids may be those of images
    logits = []
    for dtype in (torch.bfloat16, torch.float32):  # float32 widens the same weights
        model = type(model).from_pretrained(directory, dtype=dtype).eval().to(DEVICE)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        with torch.inference_mode():
            logits.append(model(torch.tensor([token_ids], device=DEVICE)).logits[0].float())
    return str(directory), token_ids, model, logits[1], logits[0]


def make_llm(directory: str, backend: str, **options: Any) -> LLM:
    try:
        return LLM(directory, dtype="bfloat16", device=DEVICE, attention_backend=backend, **options)
    except ValueError as error:
        if "needs another build of flash-attn" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("backend", ["triton", "flash", "sdpa"])
@pytest.mark.parametrize("path", CHUNKS)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(checkpoint, backend, path):
    directory, token_ids, _, exact, theirs = checkpoint
    token_ids = token_ids[: sum(CHUNKS[path])]
    options = {"kvcache_block_size": 256, "max_num_seqs": 4}
    with make_llm(directory, backend, enforce_eager=True, **options) as llm:
        ours = teacher_forced_logits(llm, token_ids, CHUNKS[path]).float()
    exact, theirs = exact[: len(ours)], theirs[: len(ours)]
    our_error, their_error = (float((x - exact).norm() / exact.norm()) for x in (ours, theirs))
    print(f"{backend}, {path}: relative error {our_error:.5f}, transformers {their_error:.5f}")
    assert our_error <= 1.1 * their_error


def test_greedy_tokens_through_graphs_are_best_up_to_noise(checkpoint):
    """This covers captured decodes and prompts, chunks and preemption."""
    directory, _, model, exact, theirs = checkpoint
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB_SIZE - 2) for _ in range(rng.randrange(1, 400))] for _ in range(23)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    noise = 2 * float((theirs - exact).abs().max())
    options = {"device": DEVICE, "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512}
    with LLM(directory, dtype="bfloat16", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + output.token_ids], device=DEVICE)
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        ours = logits.gather(1, torch.tensor(output.token_ids, device=DEVICE)[:, None])[:, 0]
        assert float((logits.amax(1) - ours).max()) <= noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 300, 2000])
@pytest.mark.parametrize(("num_experts", "top_k", "size"), [(128, 8, 96), (8, 2, 200), (60, 4, 72), (512, 10, 24)])
def test_experts_compute_what_the_formula_says(dtype, num_tokens, num_experts, top_k, size):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_size = 320

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)

    x, weight = randn(num_tokens, hidden_size), randn(num_experts, hidden_size, scale=0.1)
    gate_up = randn(num_experts, 2 * size, hidden_size, scale=0.05)
    down = randn(num_experts, hidden_size, size, scale=0.05)
    routes, plain = (route(x, weight, top_k, True, fused) for fused in (True, False))
    torch.testing.assert_close(routes.weights, plain.weights, rtol=2e-3, atol=1e-5)
    rows = torch.randperm(num_tokens, generator=generator)[:50].to(DEVICE)
    chosen = type(routes)(routes.experts[rows], routes.weights[rows])
    exact = exact_mlp(x[rows].cpu(), chosen._replace(experts=chosen.experts.cpu(), weights=chosen.weights.cpu()),
                      gate_up.cpu(), down.cpu(), "silu").to(DEVICE)  # fmt: skip
    fused, twin = (
        grouped_mlp(x, routes, ExpertWeights(gate_up), ExpertWeights(down), "silu", is_fused)[rows].double()
        for is_fused in (True, False)
    )
    our_error, twin_error = (float((out - exact).norm() / exact.norm()) for out in (fused, twin))
    assert our_error <= 1.1 * twin_error + 1e-6, (our_error, twin_error)
