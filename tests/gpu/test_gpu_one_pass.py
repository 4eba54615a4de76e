"""Rows that are computed in one forward pass, on a GPU in bfloat16: captured and eager steps against transformers."""

import random

import numpy as np
import pytest
import torch
from support.family_factory import make_family_model
from support.gpu_models import COMMON, DEVICE, PLAIN, VOCAB_SIZE

from nanovllm import LLM

pytestmark = pytest.mark.gpu

OPTIONS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, prompts, transformers' hidden states in float32, by prompt, [layers + 1, tokens, hidden size])"""
    directory = tmp_path_factory.mktemp("model")
    model = make_family_model("qwen3", {**COMMON, "rope_parameters": PLAIN, **OPTIONS}, seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.2)  # gives them the spread of trained models of this width
    model.bfloat16().save_pretrained(directory)
    rng = random.Random(7)
    lengths = [1, 2, 63, 64, 65, 700, 1024, *(rng.randrange(1, 40) for _ in range(300)), 300, 128]
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts += [[*prompts[5][:600], 1], [*prompts[5][:600], 2, 3]]  # they share a prefix
    model = type(model).from_pretrained(directory, dtype=torch.float32).eval().to(DEVICE)
    states = []
    with torch.inference_mode():
        for prompt in prompts:
            found = model(torch.tensor([prompt], device=DEVICE), output_hidden_states=True).hidden_states
            states.append(torch.stack(found)[:, 0].cpu().numpy())
    return str(directory), prompts, states


def distances(found: list[np.ndarray], expected: list[np.ndarray]) -> np.ndarray:
    """‖found − expected‖ / ‖expected‖ of each row."""
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)])


@pytest.mark.parametrize("runner", ["pooling", "auto"])
@pytest.mark.parametrize("is_eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("max_num_batched_tokens", [16896, 1024])
def test_embeddings_are_those_of_transformers(checkpoint, runner, is_eager, max_num_batched_tokens):
    directory, prompts, states = checkpoint
    with LLM(
        directory, dtype="bfloat16", device=DEVICE, attention_backend="triton", runner=runner, enforce_eager=is_eager,
        max_num_batched_tokens=max_num_batched_tokens,
    ) as llm:  # fmt: skip
        for _ in range(2):  # the second time, the prefix cache has the prompts
            outputs = llm.embed(prompts, normalize=False, use_tqdm=False, raise_on_error=True)
            found = [output.embedding for output in outputs]
            assert distances(found, [each[-1, -1] for each in states]).max() < 0.03
        [alone] = llm.embed([prompts[3]], normalize=False, use_tqdm=False)
        assert distances([alone.embedding], [states[3][-1, -1]]).max() < 0.03
        assert outputs[5].num_cached_tokens > 0
        means = llm.embed(prompts[:20], pooling="mean", normalize=False, hidden_states_layers=[1], use_tqdm=False)
        assert distances([each.embedding for each in means], [each[-1].mean(0) for each in states[:20]]).max() < 0.03
        of_layers = [each.hidden_states[0] for each in means]
        assert distances(of_layers, [each[1].mean(0) for each in states[:20]]).max() < 0.03
        token_states = [each.data for each in llm.encode(prompts[:20], use_tqdm=False)]
        assert distances(token_states, [each[-1] for each in states[:20]]).max() < 0.03


def test_rows_that_pool_and_rows_that_generate_share_steps(checkpoint):
    """A prompt of max_model_len tokens has no place for the token that a shared step samples after it."""
    from nanovllm import PoolingParams, SamplingParams

    directory, prompts, states = checkpoint
    with LLM(directory, dtype="bfloat16", device=DEVICE, attention_backend="triton") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        alone = llm.generate(prompts[7:60], params, use_tqdm=False)
        mixed = [PoolingParams(normalize=False) if row % 2 else params for row in range(53)]
        found = list(llm.generate_iter(iter([*prompts[7:60], prompts[6]]), iter([*mixed, PoolingParams()])))
        for row, output in enumerate(found[:53]):
            if row % 2:
                assert distances([output.embedding], [states[7 + row][-1, -1]]).max() < 0.03
            else:
                assert len(output.token_ids) == len(alone[row].token_ids) == 8
        expected = states[6][-1, -1]
        assert distances([found[-1].embedding], [expected / np.linalg.norm(expected)]).max() < 0.03
