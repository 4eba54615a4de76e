"""`n`: several completions of one prompt, which is computed once."""

from dataclasses import replace

import pytest
import torch
from support.fake_runner import make_engine, run_to_end
from support.long import long

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.ops.copy_blocks import copy_blocks
from nanovllm.ops.kernel import has_kernels
from nanovllm.sampling_params import completion_seed

PROMPTS = ["Reverse: hello\n", [1, 2, 3] * 30, "+", [7] * 64, [9] * 128]


def make_llm(**options) -> LLM:
    return LLM(MODEL_DIRECTORY, **{"device": "cpu", "num_kvcache_blocks": 256, **options})


def completions(outputs) -> list[list[tuple]]:
    return [[(each.index, each.text, each.token_ids, each.finish_reason) for each in out.outputs] for out in outputs]


EIGHT = SamplingParams(temperature=1.3, top_p=0.98, max_tokens=20, n=8, ignore_eos=True)


@pytest.fixture(scope="module")
def apart() -> list[list]:
    """Eight requests per prompt, with the derived seeds."""
    with make_llm() as llm:
        return [
            llm.generate(
                [prompt] * 8,
                [replace(EIGHT, n=1, seed=completion_seed(11 + row, index)) for index in range(8)],
                use_tqdm=False,
            )
            for row, prompt in enumerate(PROMPTS)
        ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        long({"overlap": False}),
        long({"enable_prefix_caching": False}),
        long({"max_num_seqs": 3, "enable_prefix_caching": False}),
        long({"max_num_batched_tokens": 5}),
        {"num_kvcache_blocks": 14, "kvcache_block_size": 16},
        long({"num_kvcache_blocks": 14, "kvcache_block_size": 16, "enable_prefix_caching": False, "overlap": False}),
        long({"attention_backend": "torch"}),
        long({"tensor_parallel_size": 2}),
    ],
    ids=str,
)
def test_eight_completions_are_eight_requests_with_the_derived_seeds(apart, options):
    with make_llm(**options) as llm:
        together = llm.generate(PROMPTS, [replace(EIGHT, seed=11 + row) for row in range(5)], use_tqdm=False)
        assert [len(out.outputs) for out in together] == [8] * 5
        assert completions(together) == [
            [(index, out.text, out.token_ids, out.finish_reason) for index, out in enumerate(row)] for row in apart
        ]
        if options.get("num_kvcache_blocks"):
            assert llm.metrics()["num_preemptions"] > 0


def test_completions_without_a_seed_differ_and_repeat_with_the_engines_seed():
    params = SamplingParams(temperature=1.5, max_tokens=8, n=4, ignore_eos=True)
    found = []
    for _ in range(2):
        with make_llm(seed=5) as llm:
            found.append(completions(llm.generate(["a", "b"], params, use_tqdm=False)))
    assert found[0] == found[1]
    texts = [tuple(token_ids) for row in found[0] for _, _, token_ids, _ in row]
    assert len(set(texts)) == 8


def test_what_one_request_asks_for_does_not_change_the_seeds_of_those_after_it():
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    found = []
    for n in (1, 3):
        with make_llm(seed=5) as llm:
            outputs = llm.generate(["a", "b"], [replace(params, n=n), params], use_tqdm=False)
            found.append((outputs[0].token_ids, outputs[1].token_ids))
    assert found[0] == found[1]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("budget", [3, 1024])
def test_the_prompt_is_computed_once(caching, overlap, num_tokens, budget):
    engine = make_engine(
        block_size=4, enable_prefix_caching=caching, overlap=overlap, max_num_seqs=16, max_num_batched_tokens=budget
    )
    engine.add_request(list(range(num_tokens)), SamplingParams(max_tokens=5, n=9, ignore_eos=True))
    finished = run_to_end(engine)
    assert len(finished) == 9
    assert engine.step_stats.num_prefill_tokens == num_tokens
    assert engine.step_stats.num_decode_tokens == 9 * 4
    assert engine.runner.num_forks == 8 and engine.runner.num_copies == (8 if num_tokens % 4 else 0)
    assert engine.scheduler_stats.num_prompt_tokens == num_tokens


def test_completions_that_find_no_place_share_the_prompts_full_blocks_without_a_prefix_cache():
    """They share them with a running one: here completions end one after the other."""
    engine = make_engine(block_size=4, enable_prefix_caching=False, max_num_seqs=2)

    def ends_after(num_tokens: int):
        tokens = []
        return lambda token_id: tokens.append(token_id) or len(tokens) == num_tokens

    predicates = [ends_after(num_tokens) for num_tokens in (2, 9, 2, 2, 2)]
    engine.add_request(list(range(21)), SamplingParams(max_tokens=12, n=5, ignore_eos=True), predicates)
    finished = run_to_end(engine)
    assert [len(finished[seq_id].completion_token_ids) for seq_id in range(5)] == [2, 9, 2, 2, 2]
    assert engine.step_stats.num_prefill_tokens < 21 + 2 * 21, "at least two of the three late ones share"


def test_a_request_that_would_be_alone_makes_progress_in_the_smallest_cache():
    engine = make_engine(block_size=4, num_blocks=4, max_model_len=16)
    engine.add_request(list(range(10)), SamplingParams(max_tokens=6, n=6, ignore_eos=True))
    finished = run_to_end(engine)
    assert [len(seq.completion_token_ids) for seq in finished.values()] == [6] * 6


def test_stop_strings_end_each_completion_by_itself():
    params = SamplingParams(temperature=2.0, max_tokens=40, n=12, stop=["a", "e", " "], seed=1)
    with make_llm() as llm:
        (out,) = llm.generate("Tell:", params, use_tqdm=False)
        seeded = [replace(params, n=1, seed=completion_seed(1, index)) for index in range(12)]
        apart = llm.generate(["Tell:"] * 12, seeded, use_tqdm=False)
    assert [(each.text, each.stop_reason) for each in out.outputs] == [
        (each.text, each.outputs[0].stop_reason) for each in apart
    ]
    assert len({len(each.token_ids) for each in out.outputs}) > 2


def test_an_iterator_gives_a_prompt_when_all_its_completions_have_finished():
    params = SamplingParams(temperature=1.5, max_tokens=6, n=3, seed=2)
    with make_llm(max_num_seqs=4) as llm:
        listed = llm.generate(PROMPTS, params, use_tqdm=False)
        given = sorted(llm.generate_iter(iter(PROMPTS), params, ordered=False), key=lambda out: out.prompt_index)
        iterator = llm.generate_iter(iter(PROMPTS * 50), params)
        next(iterator)
        iterator.close()
        assert llm.metrics()["num_unfinished_requests"] == 0
        llm.engine.scheduler.check_integrity()
    assert completions(given) == completions(listed)


def test_the_window_of_an_iterator_counts_completions():
    """Otherwise prompts with a thousand completions each would be read as far ahead as those with one."""
    engine_holds = []
    params = SamplingParams(n=8, max_tokens=1, ignore_eos=True)
    with make_llm(max_num_seqs=4) as llm:
        outputs = llm.generate_iter(iter([[65, 66]] * 10_000), params)
        for _, _ in zip(range(150), outputs, strict=False):
            engine_holds.append(llm.metrics()["num_unfinished_requests"])
        outputs.close()
    assert max(engine_holds[100:]) <= 16 * 4 + 8


def test_a_prompt_that_cannot_run_is_one_error_row():
    with make_llm() as llm:
        outputs = llm.generate([[], "a"], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert outputs[0].error and len(outputs[0].outputs) == 1 and outputs[0].finish_reason == "error"
    assert outputs[1].error is None and len(outputs[1].outputs) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"n": 16385}, "n must be at most 16384, not 16385"),
        ({"n": 2, "temperature": 0}, "n=2 greedy completions would all be equal"),
        ({"best_of": 2}, "best_of cannot be 2; ask for n completions"),
        ({"n": 2, "max_tokens": 0, "prompt_logprobs": 0}, "n=2 completions of no tokens would all be equal"),
    ],
    ids=str,
)
def test_impossible_numbers_are_refused(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**values)


@pytest.mark.skipif(not has_kernels(), reason="needs Triton")
@pytest.mark.parametrize("shape", [(2, 3, 8, 16, 2, 8), (2, 1, 5, 3, 1, 5), (2, 2, 4, 64, 3, 24)], ids=str)
def test_the_kernel_copies_what_its_twin_copies(shape):
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(shape, generator=generator).to(torch.bfloat16)
    copies = ((0, 3), (0, 2), (1, shape[2] - 1)) if shape[2] > 4 else ((0, 3), (1, 2))
    expected, fused = cache.clone(), cache.clone()
    copy_blocks(expected, copies)
    copy_blocks(fused, copies, use_kernels=True)
    assert torch.equal(fused, expected) and not torch.equal(fused, cache)
    for source, target in copies:
        assert torch.equal(fused[:, :, target], cache[:, :, source])
