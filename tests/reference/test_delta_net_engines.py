"""Models with gated DeltaNets: their states through forks, cached prefixes, sleep and scores, beside transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.against_transformers import Tally, compare, ragged_prompts, reference_completions
from support.family_factory import FAMILIES, RECURRENT, save_family_model

from nanovllm import LLM, SamplingParams
from nanovllm.layers import delta_net as delta_net_layer
from nanovllm.runner import settings

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 4, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def short_prompts_are_worth_a_snapshot(monkeypatch):
    monkeypatch.setattr(settings, "_MIN_SAVED_TOKENS", {"cpu": 1})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Any, Path, list[list[int]]]:
    """A model of transformers, its checkpoint, and prompts that continue one beginning of 30 tokens."""
    directory, rng = tmp_path_factory.mktemp("model"), random.Random(7)
    options = FAMILIES["qwen3_5"][2](rng) | {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "vocab_size": 150, "tie_word_embeddings": False,
    }  # fmt: skip
    model = save_family_model(directory, "qwen3_5", options, seed=2)
    beginning = [rng.randrange(150) for _ in range(30)]
    return model, directory, [beginning + [rng.randrange(150) for _ in range(5 + i)] for i in range(6)]


def token_ids(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("family", RECURRENT)
def test_forks_in_chunks_of_any_size_are_those_of_transformers(tmp_path, family, count):
    """Three completions per prompt, sometimes more than find a place, in steps of 1 token and more."""
    rng, tally = random.Random(family), Tally()
    for index in range(count(1, 60)):
        options = FAMILIES[family][2](rng)
        model = save_family_model(tmp_path / str(index), family, options, seed=rng.randrange(10**6))
        prompts, num_tokens = ragged_prompts(rng, options["vocab_size"]), rng.choice((1, 2, 3, 8, 30))
        more = {"n": 3, "max_num_batched_tokens": num_tokens}
        compare(model, tmp_path / str(index), prompts, rng, "sdpa", index % 2 == 0, tally, **more)
    assert tally.num_ties <= 3 * tally.num_rows / 100 and tally.num_cached_tokens > 0


def test_tokens_depend_on_the_states(model, monkeypatch):
    """If they did not, the other tests could not see that a state is lost."""
    theirs, directory, prompts = model
    expected = reference_completions(theirs, prompts, 8)
    delta_net = delta_net_layer.delta_net

    def forgetful(qkvz, ba, weights, state, rows, use_kernels=False):
        state.recurrent.zero_()
        return delta_net(qkvz, ba, weights, state, rows, use_kernels)

    with LLM(str(directory), **OPTIONS) as llm:
        assert token_ids(llm, prompts) == expected
        monkeypatch.setattr(delta_net_layer, "delta_net", forgetful)
        found = token_ids(llm, prompts)
    assert all(ours != right for ours, right in zip(found, expected, strict=True))


def test_completions_of_one_prompt_continue_from_copies_of_its_state(model):
    """Each has an entry, and thus a state, of its own."""
    _, directory, prompts = model
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)
    with LLM(str(directory), **OPTIONS, max_num_seqs=1, enable_prefix_caching=False, overlap=False) as llm:
        one_by_one = token_ids(llm, prompts, params)
    assert len(set(map(tuple, one_by_one))) == 3 * len(prompts)
    for more in ({}, {"max_num_batched_tokens": 9}, {"enable_prefix_caching": False}):
        with LLM(str(directory), **OPTIONS, **more) as llm:
            assert token_ids(llm, prompts, params) == one_by_one


def test_a_cached_prefix_goes_on_from_its_snapshot(model):
    """A prompt that begins as two others takes 28 tokens from the cache: the full blocks of the 30 that they share."""
    theirs, directory, prompts = model
    expected = reference_completions(theirs, prompts, 8)
    with LLM(str(directory), **OPTIONS) as llm:
        outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, *[28] * 4]
    assert min(output.num_cached_tokens for output in again) >= 28
    assert [output.token_ids for output in (*outputs, *again)] == expected * 2


def test_states_are_gone_after_sleep_and_new_weights(model, tmp_path):
    theirs, directory, prompts = model
    expected = reference_completions(theirs, prompts, 8)
    ids = ("bos_token_id", "eos_token_id")
    options = {name: value for name, value in theirs.config.to_dict().items() if name not in ids}
    other = save_family_model(tmp_path, "qwen3_5", options, seed=3)
    with LLM(str(directory), **OPTIONS) as llm:
        assert token_ids(llm, prompts * 2) == expected * 2
        llm.sleep(1)
        llm.wake_up()
        assert token_ids(llm, prompts) == expected
        llm.update_weights({name: parameter.detach() for name, parameter in other.named_parameters()})
        assert token_ids(llm, prompts) == reference_completions(other, prompts, 8)


def test_scores_are_those_of_transformers(model):
    """Contexts that pairs share are computed up to the last block that they share."""
    theirs, directory, prompts = model
    contexts, continuations = prompts[:3], [[5, 6, 7], [8], [9, 3]]
    with LLM(str(directory), **OPTIONS) as llm:
        scores = llm.loglikelihood(contexts * 3, [each for each in continuations for _ in range(3)], use_tqdm=False)
    pairs = [(context, continuation) for continuation in continuations for context in contexts]
    for score, (context, continuation) in zip(scores, pairs, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(continuation)), continuation]
        torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=1e-4, atol=1e-4)
    assert sum(score.num_cached_tokens > 0 for score in scores) >= 6
