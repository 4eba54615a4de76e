"""In a step with prompts, the last layer writes the keys and values of all tokens. It computes results only for the
tokens after which a row samples."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.family_factory import FAMILIES, save_family_model
from support.long import some
from support.model_factory import save_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention import metadata as attention_metadata
from nanovllm.attention import triton_backend, triton_prompts
from nanovllm.layers import delta_net as delta_net_layer
from nanovllm.models.decoder import CausalLM
from nanovllm.runner import sequence_table, step_sizes

PROMPTS = [list(range(1, length + 1)) for length in (1, 2, 29, 5, 23, 1, 14)]


@pytest.fixture
def steps(monkeypatch) -> list[tuple[int, int | None]]:
    """(tokens, results of the last layer) of each step; the second is None where the layer computes all tokens. The
    fixture compares each result with that of a last layer that computes everything."""
    noted: list[tuple[int, int | None]] = []
    forward = CausalLM.forward

    def compared(self, token_ids, positions, kv_cache, metadata, adapters=None, needed=None):
        whole_cache = [tensor for layer in kv_cache for tensor in layer if tensor is not None]
        before = [tensor.clone() for tensor in whole_cache]
        whole = forward(self, token_ids, positions, kv_cache, metadata, adapters)
        if needed is None:
            noted.append((len(token_ids), None))
            return whole
        cache_of_whole, shapes = [tensor.clone() for tensor in whole_cache], []
        for tensor, old in zip(whole_cache, before, strict=True):
            tensor.copy_(old)  # so that a key that is not written again would be missing
        handle = self.model.layers[-1].mlp.register_forward_pre_hook(lambda _, inputs: shapes.append(len(inputs[0])))
        result = forward(self, token_ids, positions, kv_cache, metadata, adapters, needed)
        handle.remove()
        assert shapes == [len(needed)]
        torch.testing.assert_close(result, whole[needed], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole_cache, cache_of_whole, rtol=0, atol=0, equal_nan=True)
        noted.append((len(token_ids), len(needed)))
        return result

    monkeypatch.setattr(CausalLM, "forward", compared)
    return noted


@pytest.mark.parametrize("family", some(FAMILIES, "qwen3", "gemma3", "qwen3_moe", "qwen3_5"))
def test_of_prompts_only_the_last_tokens_pass_the_last_layer(tmp_path, family, steps):
    save_family_model(tmp_path, family, FAMILIES[family][2](random.Random(family)), seed=1)
    params = [SamplingParams(temperature=0, max_tokens=1 + index, ignore_eos=True) for index in range(len(PROMPTS))]
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=12, max_model_len=64) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False, raise_on_error=True)
    with_prompts = [step for step in steps if step[1] is not None]
    # Steps of at most 12 tokens. In some steps no row samples, in others one to four rows do.
    assert (12, 1) in with_prompts and max(needed for _, needed in with_prompts) > 1
    assert all(0 < needed < num_tokens for num_tokens, needed in with_prompts if num_tokens == 12)
    assert (1, None) in steps, "decodes alone need all of their tokens"


def test_our_kernel_attends_only_tiles_with_tokens_that_are_read(tmp_path, steps, monkeypatch):
    """The first step takes whole prompts of 5 and 18 tokens and 2 tokens of the third: four tiles of queries. Only the
    last tiles of the two whole prompts hold a token that is read."""
    for module in (attention_metadata, sequence_table, step_sizes, triton_prompts):
        monkeypatch.setattr(module, "QUERY_TILE", 16)  # few tokens: Triton's interpreter is slow
    attend, numbers = triton_backend.attend_prompts, []

    def counted(shape, q, cache, out, metadata, window):
        numbers.append((cache.keys.data_ptr(), int((metadata.query_tiles[:, 1] > 0).sum())))
        attend(shape, q, cache, out, metadata, window)

    monkeypatch.setattr(triton_backend, "attend_prompts", counted)
    save_model(tmp_path, seed=4, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 25}
    prompts = [list(range(38)), [7] * 5, [5] * 18]
    params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in (1, 4, 2)]
    with LLM(str(tmp_path), device="cpu", max_model_len=256, **options) as llm:
        llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)
    assert steps == [(25, 2), (25, 2), (14, 2), (1, None)]
    # Each step calls the model twice, with two layers each. The first call computes everything, for comparison. In the
    # second, the last layer attends only the tiles that are read.
    (first, _), (last, _) = numbers[:2]
    assert [cache for cache, _ in numbers] == [first, last] * 6
    of_steps = [[number for _, number in numbers[at : at + 4]] for at in (0, 4, 8)]
    assert of_steps == [[4, 4, 4, 2], [2, 2, 2, 0], [1, 1, 1, 1]]


def test_a_last_layer_with_states_gets_all_tokens(tmp_path, steps, monkeypatch):
    """Its states advance by tokens that nothing reads. The fixture computes each step twice."""
    options = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    save_family_model(tmp_path, "qwen3_5", FAMILIES["qwen3_5"][2](random.Random(1)) | options)
    delta_net, numbers = delta_net_layer.delta_net, []

    def counted(qkvz, ba, weights, state, rows, use_kernels=False):
        num_tokens = int(rows.cu_seqlens[-1]) - int(rows.num_decodes)
        numbers.append((num_tokens, 0 if rows.tiles is None else int(rows.tiles[:, 1].sum())))
        return delta_net(qkvz, ba, weights, state, rows, use_kernels)

    monkeypatch.setattr(delta_net_layer, "delta_net", counted)
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=100, max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        llm.generate([[1] * 70, [2] * 130], params, use_tqdm=False, raise_on_error=True)
    assert numbers[:4] == [(100, 100)] * 2 + [(99, 99)] * 2  # the second step has a decode too
    assert steps[:2] == [(100, 1)] * 2
    assert all(in_tiles == num_tokens for num_tokens, in_tiles in numbers)


def test_ranks_with_an_exchange_compute_all_of_the_last_layer(tmp_path, steps):
    """Each has the residual of its own rows alone."""
    save_model(tmp_path, seed=4)
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=12, max_model_len=64) as llm:
        runner = llm.engine.runner
        parallel = replace(runner.program.parallel, exchange=SimpleNamespace(sends_directly=lambda *_: False))
        runner.program = replace(runner.program, parallel=parallel)
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False, raise_on_error=True)
    assert {needed for _, needed in steps} == {None} and (12, None) in steps


def test_scored_prompts_pass_the_last_layer_whole(tmp_path, steps):
    save_model(tmp_path, seed=4)
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=12, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, raise_on_error=True)
    assert all(len(output.prompt_logprobs) == len(prompt) for output, prompt in zip(outputs, PROMPTS, strict=True))
    assert (12, None) in steps
