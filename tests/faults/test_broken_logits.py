"""A row whose numbers are not finite ends with an error, and every other row stays as it is, bit for bit.

Each test runs its rows twice. In one run the embedding of a token is NaN, and some rows have this token; in the other
run these rows have a healthy token in its place. All else is equal, so each other row must be equal too.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.family_factory import FAMILIES, save_family_model
from support.long import long
from support.model_factory import TINY, edit_config, read_tensors, save_demo_model, save_model, write_tensors

from nanovllm import LLM, PoolingParams, RequestOutput, SamplingParams, StructuredOutputsParams

SICK, HEALTHY = 60, 59
EVERY_TOKEN = list(range(TINY["vocab_size"]))
NOT_FINITE = "the model's logits were not finite (NaN or infinity)"
OPTIONS: dict[str, Any] = {
    "device": "cpu", "kvcache_block_size": 4, "max_model_len": 96, "max_num_seqs": 16, "num_kvcache_blocks": 200,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3, "logit_bias": {SICK: -100.0}},
    {"temperature": 0.8, "logprobs": 0, "bad_words": [[SICK]], "logprobs_mode": "processed"},
    {"temperature": 0.9, "top_k": 5, "min_p": 0.01, "bad_words": [[SICK]]},
    {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "bad_words": [[SICK]]},
    {"temperature": 0.0, "bad_words": [[3], [7, 9]], "logit_bias": {5: 2.0}, "allowed_token_ids": EVERY_TOKEN[:50]},
    {"temperature": 0.8, "n": 3, "logprobs": 1, "bad_words": [[SICK]]},
    {"temperature": 0.0, "prompt_logprobs": 2, "bad_words": [[SICK]]},
]


@pytest.fixture(scope="module", params=["qwen3", long("qwen3_5"), long("gemma3")])
def directory(request, tmp_path_factory):
    """A checkpoint with a NaN in the embedding of one token."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "qwen3":
        save_model(directory, seed=5)
    else:
        options = FAMILIES[request.param][2](random.Random(3)) | {"vocab_size": TINY["vocab_size"]}
        options |= {"num_hidden_layers": 3, "tie_word_embeddings": False}
        other = "linear_attention" if request.param == "qwen3_5" else "sliding_attention"
        options["layer_types"] = [other, "full_attention", other]
        save_family_model(directory, request.param, options)
    tensors = read_tensors(directory)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][SICK, ::3] = torch.nan
    write_tensors(directory, tensors)
    return str(directory)


def prompt(token: int, length: int, row: int) -> list[int]:
    """The token is the middle one. Prompts of different rows or tokens share nothing."""
    tokens = [(7 * i + 3 * row + 1) % 50 for i in range(length)]
    tokens[0], tokens[length // 2] = token % 50 if token < SICK - 1 else 45, token
    return tokens


def bits(output: Any) -> list[Any]:
    """All that an output says, in a form whose equality is that of bits."""
    numbers = [each.logprobs for each in output.outputs] + [output.prompt_logprobs]
    arrays = [array for each in numbers if each is not None for array in (each.token_ids, each.logprobs, each.ranks)]
    return [
        output.error,
        [(each.token_ids, each.finish_reason) for each in output.outputs],
        [np.asarray(array).tobytes() for array in arrays],
    ]


def ends_at_once(kind: dict[str, Any]) -> SamplingParams:
    """A healthy row ends with its first token, which the engine notices as late as a NaN.

    It has one completion, because others that share a broken prompt compute it again, and it scores nothing, because
    the scores of a chunk show a NaN before the prompt ends. Both would change the schedule.
    """
    return SamplingParams(
        **{
            **kind,
            "n": 1,
            "prompt_logprobs": None,
            "max_tokens": 9,
            "ignore_eos": True,
            "stop_token_ids": EVERY_TOKEN,
            "seed": 3,
        }
    )


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
@pytest.mark.parametrize("backend", ["sdpa", "torch"])
def test_rows_beside_a_broken_one_stay_bit_for_bit(directory, backend, overlap):
    """Greedy and sampled rows, filters, penalties, bans, log-probabilities, forks and scores of prompts: each kind is
    broken once, in chunks too, and each kind is beside it."""
    options = {**OPTIONS, "attention_backend": backend, "overlap": overlap, "max_num_batched_tokens": 40}
    found = []
    for token in (SICK, HEALTHY):
        rows, params = [], []
        for row, kind in enumerate(KINDS):
            rows += [prompt(token, 17, row), prompt(1, 11 + row, row)]
            params += [ends_at_once(kind), SamplingParams(**kind, max_tokens=6, ignore_eos=True, seed=row)]
        with LLM(directory, **options) as llm:
            outputs = llm.generate(rows, params, use_tqdm=False)
            llm.engine.scheduler.check_integrity()
        found.append(outputs)
    broken, healthy = found
    for output in broken[::2]:
        assert output.error == NOT_FINITE and all(each.finish_reason == "error" for each in output.outputs)
        assert all(each.token_ids == [] for each in output.outputs)
    assert all(output.error is None for output in healthy)
    assert [bits(output) for output in broken[1::2]] == [bits(output) for output in healthy[1::2]]


def test_a_completion_that_breaks_ends_alone_and_its_siblings_go_on(directory):
    """They share the blocks of their prompt. The one that samples the sick token breaks with its next one."""
    params = SamplingParams(temperature=2.0, n=6, max_tokens=8, ignore_eos=True, seed=4, logit_bias={SICK: 6.0})
    with LLM(directory, **OPTIONS, overlap=False) as llm:
        (output,) = llm.generate([prompt(1, 10, 0)], params, use_tqdm=False)
        for each in output.outputs:
            is_broken = SICK in each.token_ids[:-1] or (each.finish_reason == "error" and each.token_ids[-1] == SICK)
            assert each.finish_reason == ("error" if is_broken else "length")
            assert len(each.token_ids) == (each.token_ids.index(SICK) + 1 if is_broken else 8)
        reasons = {each.finish_reason for each in output.outputs}
        assert reasons == {"error", "length"}, "some must break, and some must not"
        assert llm.engine.scheduler.block_manager.num_free_blocks == llm.engine.info.num_kvcache_blocks


def test_scores_beside_a_broken_one_stay(directory):
    """Contexts that several continuations share are broken as a whole; a broken continuation is broken alone. The
    others share its context, so they are computed twice, which may change their last bits.
    """
    found = []
    for token in (SICK, HEALTHY):
        contexts = [prompt(token, 9, 0)] * 2 + [prompt(1, 9, 1)] * 4
        continuations = [[1, 2], [3], [token, 7, 8], [4, 5, 6], [8, 9], [token]]
        with LLM(directory, **OPTIONS) as llm:
            found.append(llm.loglikelihood(contexts, continuations, use_tqdm=False))
            llm.engine.scheduler.check_integrity()
    broken, healthy = found
    assert [each.error for each in broken] == [NOT_FINITE, NOT_FINITE, NOT_FINITE, None, None, None]
    assert np.isfinite(broken[5].logprobs).all(), "the last token of a continuation is never embedded"
    for index in (3, 4):
        np.testing.assert_allclose(broken[index].logprobs, healthy[index].logprobs, rtol=1e-5)
    assert all(each.error is None for each in healthy)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_pooled_rows_beside_a_broken_one_stay_bit_for_bit(directory, overlap):
    kinds = [
        PoolingParams(), PoolingParams(pooling="mean"), PoolingParams("token_embed"),
        PoolingParams(hidden_states_layers=[1]), PoolingParams("label", labels=((1,), (2, 3))),
    ]  # fmt: skip
    found = []
    for token in (SICK, HEALTHY):
        rows = [(prompt(each, 9 + row, row), kind) for row, kind in enumerate(kinds) for each in (token, 1)]
        with LLM(directory, **OPTIONS, overlap=overlap) as llm:
            found.append([*llm.generate_iter(*map(iter, zip(*rows, strict=True)))])
    broken, healthy = found
    assert all("not finite" in output.error and output.data is None for output in broken[::2])
    assert [output.error for output in broken[1::2]] == [None] * len(kinds)
    assert [output.data.tobytes() for output in broken[1::2]] == [output.data.tobytes() for output in healthy[1::2]]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_rows_that_share_the_beginning_of_a_broken_prompt_are_computed_again(directory, overlap):
    """In a row with a NaN, attention makes the keys of the tokens before it NaN too. Rows that shared these, in the
    same step or while it was in flight, once ended with the same error. Here some generate, fork, score and pool."""
    beginning = [(7 * i + 1) % 50 for i in range(13)]
    kinds: list[Any] = [
        SamplingParams(**kind, max_tokens=4, ignore_eos=True, seed=row) for row, kind in enumerate(KINDS)
    ]
    kinds += [PoolingParams(), PoolingParams("token_embed")]
    rows = [[*beginning, SICK, 1, 2], *([*beginning, row, 3] for row in range(len(kinds)))]
    params = [SamplingParams(temperature=0, max_tokens=20), *kinds]
    options = {**OPTIONS, "overlap": overlap, "max_num_batched_tokens": 30}  # so that some rows are admitted later
    with LLM(directory, **options) as llm:
        expected = [*llm.generate_iter(iter(rows[1:]), iter(kinds))]
        llm.reset_prefix_cache()
        found = [*llm.generate_iter(iter(rows), iter(params))]
        scores = llm.loglikelihood([*beginning, SICK], [[1], [2, 3]], use_tqdm=False)
        llm.engine.scheduler.check_integrity()
        num_again = llm.metrics()["num_preemptions"]
    assert [output.error for output in found] == [NOT_FINITE] + [None] * len(kinds)
    assert [each.error for each in scores] == [NOT_FINITE] * 2
    # States are shared only where that saves 64 tokens.
    assert num_again > 3 or llm.engine.info.snapshots.has_states, "no row shared the broken beginning"
    for output, same in zip(found[1:], expected, strict=True):
        if isinstance(output, RequestOutput):
            assert [each.token_ids for each in output.outputs] == [each.token_ids for each in same.outputs]
            numbers = [each.prompt_logprobs.logprobs for each in (output, same) if each.prompt_logprobs is not None]
        else:
            numbers = [output.data, same.data]
        if numbers:
            np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "torch", long("triton")])
def test_the_keys_of_a_broken_row_are_neither_served_nor_read_again(directory, backend):
    """The row's entry, blocks and state go to other rows, and its prefix to none."""
    options = {**OPTIONS, "attention_backend": backend, "max_num_seqs": 2, "num_kvcache_blocks": 12}
    if backend == "triton":
        options |= {"kvcache_block_size": 16, "num_kvcache_blocks": 8}
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    clean = [[(3 * i + 7 * row) % 50 for i in range(19)] for row in range(4)]
    beginning = prompt(1, 8, 0)
    with LLM(directory, **options) as llm:
        expected = llm.generate(clean, greedy, use_tqdm=False)
        llm.reset_prefix_cache()
        for _ in range(3):  # so that every block and entry has held a NaN
            sick = [[SICK] * 16, [*beginning, SICK, 1, 2, 3, 4, 5, 6, 7]]
            assert [output.error for output in llm.generate(sick, greedy, use_tqdm=False)] == [NOT_FINITE] * 2
        (again,) = llm.generate([[*beginning, 5]], greedy, use_tqdm=False)
        assert again.num_cached_tokens == 0 and again.error is None
        llm.reset_prefix_cache()
        found = llm.generate(clean, greedy, use_tqdm=False)
    assert [bits(output) for output in found] == [bits(output) for output in expected]


def test_a_constrained_row_that_breaks_ends_alone(tmp_path):
    """So does a row with a function that changes logits."""
    pytest.importorskip("llguidance")
    save_demo_model(tmp_path, 2)
    tensors = read_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][ord("~")] = torch.nan
    write_tensors(tmp_path, tensors)
    edit_config(tmp_path, tie_word_embeddings=False)
    digits = StructuredOutputsParams(regex="[0-9]{4}")
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": digits}, {"logits_processors": [lambda tokens, logits: logits]}, {},
        {"temperature": 0.9},
    ]  # fmt: skip
    found = []
    for letter in "~x":
        texts, params = [], []
        for row, kind in enumerate(kinds):
            texts += [f"12 {letter} 3{row}", f"12 + 3{row}"]
            kind = {"temperature": 0.0, **kind}
            once = {"max_tokens": 4, "stop_token_ids": list(range(256)), "ignore_eos": True, "seed": 1}
            params += [SamplingParams(**kind, **once), SamplingParams(**kind, max_tokens=5, ignore_eos=True, seed=1)]
        with LLM(str(tmp_path), device="cpu", overlap=False) as llm:
            found.append(llm.generate(texts, params, use_tqdm=False))
    broken, healthy = found
    assert [output.error for output in broken] == [NOT_FINITE, None] * len(kinds)
    assert [output.error for output in healthy] == [None] * len(healthy)
    assert [bits(output) for output in broken[1::2]] == [bits(output) for output in healthy[1::2]]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_function_that_returns_no_numbers_ends_its_row_alone(directory, number):
    """Its reason names the function. The rows beside it have a function too, or none."""

    def spoils(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.clone().index_fill_(0, torch.tensor([5]), number if len(token_ids) == 2 else 0.0)

    def keeps(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.clone().index_fill_(0, torch.tensor([5]), 0.0)

    found = []
    for function in (spoils, keeps):
        # A function that fails lets its row end with one more token.
        lengths, functions = [3 if function is keeps else 6, 6, 6], [[function], [keeps], None]
        params = [
            SamplingParams(temperature=0.8, max_tokens=length, ignore_eos=True, seed=9, logits_processors=each)
            for length, each in zip(lengths, functions, strict=True)
        ]
        with LLM(directory, **OPTIONS, overlap=False) as llm:
            found.append(llm.generate([prompt(1, 7, row) for row in range(3)], params, use_tqdm=False))
    (broken, *others), (_, *expected) = found
    assert "the logits processor spoils failed: ValueError: it returned NaN or infinity" in broken.error
    assert broken.outputs[0].finish_reason == "error"
    assert [bits(output) for output in others] == [bits(output) for output in expected]


@pytest.mark.long
def test_ranks_agree_on_a_broken_row(tmp_path):
    """Each rank sees only some columns of the logits. Their caches have canaries."""
    save_model(tmp_path, seed=5)
    tensors = read_tensors(tmp_path)
    tensors["model.embed_tokens.weight"][SICK] = torch.nan
    write_tensors(tmp_path, tensors)
    found = []
    for token in (SICK, HEALTHY):
        rows, params = [], []
        for row, kind in enumerate(KINDS):
            rows += [prompt(token, 9, row), prompt(1, 5 + row, row)]
            params += [ends_at_once(kind), SamplingParams(**kind, max_tokens=4, ignore_eos=True, seed=row)]
        with LLM(str(tmp_path), **OPTIONS, tensor_parallel_size=2, cache_canary=True) as llm:
            found.append(llm.generate(rows, params, use_tqdm=False))
    broken, healthy = found
    assert [output.error for output in broken] == [NOT_FINITE, None] * len(KINDS)
    assert [bits(output) for output in broken[1::2]] == [bits(output) for output in healthy[1::2]]
