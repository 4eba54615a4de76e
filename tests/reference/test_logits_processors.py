"""SamplingParams.logits_processors: functions that change logits, through the whole engine."""

import re
from dataclasses import replace

import pytest
import torch
from support.fake_runner import make_engine

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
BIAS = {50: 7.0, 52: -9.0, 55: 5.5, 258: 50.0}
PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# They cover steps in flight, chunks of prompts, preemption, and rows that share a prompt.
SCHEDULES = [
    {},
    {"overlap": False, "max_num_batched_tokens": 9},
    {"num_kvcache_blocks": 24, "kvcache_block_size": 8, "max_model_len": 96, "max_num_seqs": 12},
]


def add_bias(token_ids, logits):
    for token_id, bias in BIAS.items():
        logits[token_id] += bias
    return logits


def pairs_of_requests() -> tuple[list[str], list[SamplingParams], list[SamplingParams]]:
    """Prompts, parameters with biases, and parameters with functions that add them; between them, rows of neither."""
    prompts, biased, processed = [], [], []
    for index in range(24):
        prompts.append(f"Q: What is {index} + {index * 3}?\nA:")
        params = replace(PLAIN, temperature=index % 2, n=1 + (index % 4 == 3), seed=index, max_tokens=3 + index % 9)
        if index % 5 == 2:  # the bias is for an end-of-sequence id too
            params = replace(params, ignore_eos=False, min_tokens=2)
        is_changed = index % 3 != 2
        biased.append(replace(params, logit_bias=BIAS) if is_changed else params)
        processed.append(replace(params, logits_processors=[add_bias]) if is_changed else params)
    return prompts, biased, processed


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_a_function_that_adds_a_bias_gives_the_tokens_of_logit_bias(options):
    prompts, biased, processed = pairs_of_requests()
    with LLM(MODEL_DIRECTORY, device="cpu", **options) as llm:
        expected = llm.generate(prompts, biased, use_tqdm=False)
        found = llm.generate(prompts, processed, use_tqdm=False)
        alone = llm.generate(prompts[:1], processed[:1], use_tqdm=False)
    tokens = [[each.token_ids for each in output.outputs] for output in found]
    assert tokens == [[each.token_ids for each in output.outputs] for output in expected]
    assert tokens[0] == [alone[0].token_ids] and not any(output.error for output in found)


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL_DIRECTORY, device="cpu") as llm:
        yield llm


def test_functions_run_in_order_and_see_the_tokens_of_their_own_completion(llm):
    seen = []

    def with_prompt(prompt_token_ids, token_ids, logits):
        seen.append((bytes(prompt_token_ids), [*token_ids], logits.dtype, tuple(logits.shape)))
        token_ids.append(0)  # a list of its own
        return torch.full_like(logits, -torch.inf)

    def allows_next(token_ids, logits, first=60):
        logits[first + len(token_ids)] = 0
        return logits

    params = replace(PLAIN, max_tokens=3, temperature=1, n=2, logits_processors=[with_prompt, allows_next])
    (output,) = llm.generate("Hi", params, use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == [[60, 61, 62]] * 2
    expected = [(b"Hi", [60, 61, 62][:length], torch.float32, (259,)) for length in (0, 0, 1, 1, 2, 2)]
    assert sorted(seen, key=str) == sorted(expected, key=str)


def test_raw_log_probabilities_are_those_of_the_model(llm):
    params = replace(PLAIN, max_tokens=2, logprobs=2)
    (plain,) = llm.generate("Hi", params, use_tqdm=False)

    def forbids_best(token_ids, logits):
        logits[plain.token_ids[0]] = -torch.inf
        return logits

    changed = replace(params, logits_processors=[forbids_best])
    raw, processed = llm.generate(["Hi"] * 2, [changed, replace(changed, logprobs_mode="processed")], use_tqdm=False)
    assert raw.token_ids == processed.token_ids and raw.token_ids[0] != plain.token_ids[0]
    best = plain.outputs[0].logprobs[0]
    assert raw.outputs[0].logprobs[0].items() >= best.items()
    assert plain.token_ids[0] not in processed.outputs[0].logprobs[0]


def test_arguments_that_need_no_value_are_not_the_prompt(llm):
    def open_ended(token_ids, logits, *more):
        assert token_ids == [] and not more
        return logits

    (output,) = llm.generate("Hi", replace(PLAIN, max_tokens=1, logits_processors=open_ended), use_tqdm=False)
    assert output.error is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_changed_in_float32_whatever_the_models_dtype(dtype):
    """10.01 and 10.02 are one number in bfloat16, and float16 has none above 65,504."""

    def prefers_b(token_ids, logits):
        logits[65], logits[66], logits[67] = 1e5, 1e5 + 0.1, -1e6
        return logits

    with LLM(MODEL_DIRECTORY, device="cpu", dtype=dtype) as llm:
        params = replace(PLAIN, max_tokens=2, logits_processors=[prefers_b])
        assert llm.generate("Hi", params, use_tqdm=False)[0].text == "BB"


def fails_later(token_ids, logits):
    if len(token_ids) == 2:
        raise KeyError("no such word")
    return logits


@pytest.mark.parametrize(
    ("function", "reason", "num_tokens"),
    [
        (fails_later, "the logits processor fails_later failed: KeyError: 'no such word'", 3),
        (
            lambda token_ids, logits: logits[:3],
            r"must return a floating-point tensor of shape \[259\], .* shape torch.Size\(\[3\]\)",
            1,
        ),
        (lambda token_ids, logits: None, "must return a floating-point .*, not NoneType", 1),
        (lambda: None, "takes 0 positional arguments", 1),
        (lambda token_ids, logits: logits.fill_(-torch.inf), "no token is left to sample: .* logits_processors", 0),
        (lambda token_ids, logits: logits.fill_(torch.nan), "returned NaN or infinity; use -inf", 1),
        (lambda token_ids, logits: logits.numpy(), "must return a floating-point .*, not dtype float32", 1),
        (lambda token_ids, logits: logits > 0, "not layout torch.strided, dtype torch.bool", 1),
        (lambda token_ids, logits: logits.to_sparse(), "not layout torch.sparse_coo", 1),
    ],
    ids=["raises later", "other shape", "nothing", "other arguments", "no token", "NaN", "NumPy", "bool", "sparse"],
)
def test_a_function_that_fails_is_the_error_of_its_row(llm, function, reason, num_tokens):
    params = replace(PLAIN, logits_processors=[function])
    first, bad, last = llm.generate(["Hi"] * 3, [PLAIN, params, PLAIN], use_tqdm=False)
    assert first.error is None and first == replace(last, prompt_index=0, num_cached_tokens=first.num_cached_tokens)
    assert bad.finish_reason == "error" and len(bad.token_ids) == num_tokens
    assert re.search(reason, bad.error)


def test_stop_strings_count_as_without_functions(llm):
    params = replace(PLAIN, logit_bias=BIAS, stop=["2"], temperature=1, seed=3)
    with_function = replace(params, logit_bias=None, logits_processors=add_bias)
    first, second = llm.generate(["Hi"] * 2, [params, with_function], use_tqdm=False)
    assert (first.token_ids, first.text, first.outputs[0].stop_reason) == (
        second.token_ids, second.text, second.outputs[0].stop_reason,
    )  # fmt: skip


def test_what_cannot_work_is_refused(llm):
    with pytest.raises(TypeError, match="logits_processors must be a list of functions, not 'x'"):
        SamplingParams(logits_processors="x")
    with pytest.raises(ValueError, match="leave out logits_processors"):
        SamplingParams(structured_outputs={"choice": ["a"]}, logits_processors=[add_bias])
    engine = make_engine(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="logits_processors need tensor_parallel_size=1"):
        engine.add_request([1], replace(PLAIN, logits_processors=[add_bias]))
