"""Log-probabilities of completions, prompts and continuations, compared with transformers' log_softmax in float32."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.family_factory import FAMILIES, save_family_model
from support.long import some
from support.model_factory import read_tensors, save_model, write_tensors

from nanovllm import LLM, SamplingParams, TokenLogprobs
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.ops.filters import plain_filter_thresholds

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
TOLERANCE = 1e-4
DEFAULTS = {"num_kvcache_blocks": 120, "kvcache_block_size": 8}
# Chunks, preemption, prefix hits, no prefix hits, two ranks, the plain backend, the kernels.
SCHEDULES = [
    {},
    {"overlap": False, "max_num_batched_tokens": 7},
    {"num_kvcache_blocks": 10, "max_num_seqs": 6},
    {"enable_prefix_caching": False, "kvcache_block_size": 4},
    {"kvcache_block_size": 4, "num_kvcache_blocks": 200},
    {"attention_backend": "torch", "max_num_batched_tokens": 13},
    {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 40},
    {"tensor_parallel_size": 2, "max_num_batched_tokens": 16},
]


@torch.inference_mode()
def log_softmax(model, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size]: row i is that of the token after token i."""
    return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def check(found: TokenLogprobs, expected: torch.Tensor, token_ids: list[int]) -> None:
    """expected: [num_tokens, vocab_size], the distribution that each token comes from."""
    assert len(token_ids) == len(expected) == len(found.token_ids) == len(found.ranks)
    num_logprobs = found.token_ids.shape[1] - 1
    assert found.token_ids[:, 0].tolist() == token_ids
    targets = torch.tensor(token_ids)[:, None]
    own = expected.gather(1, targets)[:, 0]
    assert np.abs(found.of_tokens - own.numpy()).max(initial=0) < TOLERANCE
    below, above = ((expected > own[:, None] + sign * TOLERANCE).sum(1).numpy() + 1 for sign in (1, -1))
    assert ((found.ranks >= below) & (found.ranks <= above)).all()
    best = expected.topk(num_logprobs).values.numpy()
    assert np.abs(found.logprobs[:, 1:] - best).max(initial=0) < TOLERANCE
    of_ids = expected.gather(1, torch.from_numpy(found.token_ids[:, 1:].astype(np.int64))).numpy()
    assert np.abs(of_ids - best).max(initial=0) < TOLERANCE


def make_prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    shared = [rng.randrange(vocab_size) for _ in range(26)]
    lengths = [2, 3, 9, 16, 17, 30, 41]
    own = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return own + [shared + ids[:7] for ids in own]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, save_model(directory, seed=3, vocab_size=157)


@pytest.mark.parametrize("options", some(SCHEDULES, *SCHEDULES[:3]), ids=str)
def test_completions_and_prompts_have_transformers_log_probabilities(checkpoint, options):
    directory, model = checkpoint
    rng = random.Random(str(options))
    prompts = make_prompts(rng, 157)
    if options.get("attention_backend") == "triton":
        prompts = prompts[3:6]  # the interpreter is slow
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.5]),
            max_tokens=rng.choice([1, 2, 23]),
            seed=row,
            logprobs=rng.choice([None, 0, 1, 5, 20]),
            prompt_logprobs=rng.choice([None, 0, 3]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            ignore_eos=True,
        )
        for row in range(len(prompts))
    ]
    with LLM(directory, device="cpu", max_model_len=64, **{**DEFAULTS, **options}) as llm:
        for _ in range(2):  # the second time, the cache is warm
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, each, out in zip(prompts, params, outputs, strict=True):
                expected = log_softmax(model, prompt + out.token_ids)
                (completion,) = out.outputs
                assert (completion.logprobs is None) == (each.logprobs is None)
                assert (out.prompt_logprobs is None) == (each.prompt_logprobs is None)
                if completion.logprobs is not None:
                    check(completion.logprobs, expected[len(prompt) - 1 : -1], out.token_ids)
                    assert completion.logprobs.token_ids.shape[1] == each.logprobs + 1
                    assert completion.cumulative_logprob == pytest.approx(completion.logprobs.of_tokens.sum(), abs=1e-4)
                else:
                    assert completion.cumulative_logprob is None
                if out.prompt_logprobs is not None:
                    assert out.prompt_logprobs.first == 1 and len(out.prompt_logprobs) == len(prompt)
                    check(out.prompt_logprobs, expected[: len(prompt) - 1], prompt[1:])
        if options.get("num_kvcache_blocks") == 10:
            assert llm.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "options",
    some([each for each in SCHEDULES if each.get("attention_backend") != "triton"], SCHEDULES[1], SCHEDULES[4]),
    ids=str,
)
def test_loglikelihood_is_that_of_transformers_and_of_teacher_forced_decodes(checkpoint, options):
    directory, model = checkpoint
    rng = random.Random(str(options))
    rows = []
    for prompt in make_prompts(rng, 157) * 3:
        cut = rng.randrange(1, len(prompt))
        rows.append((prompt[:cut], prompt[cut:]))
        rows += [(prompt[:cut], [rng.randrange(157) for _ in range(length)]) for length in (1, 4)]
    rng.shuffle(rows)
    with LLM(directory, device="cpu", max_model_len=64, **{**DEFAULTS, **options}) as llm:
        found = llm.loglikelihood(*map(list, zip(*rows, strict=True)), use_tqdm=False)
        for (context, continuation), row in zip(rows, found, strict=True):
            expected = log_softmax(model, context + continuation)[len(context) - 1 : -1]
            own = expected.gather(1, torch.tensor(continuation)[:, None])[:, 0].numpy()
            assert row.error is None and row.context_token_ids == context and row.token_ids == continuation
            assert np.abs(row.logprobs - own).max() < TOLERANCE
            assert row.total == pytest.approx(own.sum(dtype=np.float64), abs=TOLERANCE * len(own))
            gap = expected.max(-1).values.numpy() - own
            assert ((row.is_greedy == (gap == 0)) | (gap < TOLERANCE)).all()
        # A decode whose every token but one is banned says the same.
        context, continuation = rows[3]
        decoded = []
        for index, token_id in enumerate(continuation):
            forced = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[token_id], logprobs=0)
            (out,) = llm.generate([context + continuation[:index]], forced, use_tqdm=False)
            decoded.append(out.outputs[0].logprobs.of_tokens[0])
        assert np.abs(np.array(decoded) - found[3].logprobs).max() < TOLERANCE
        metrics = llm.metrics()
        assert (metrics["num_cached_prompt_tokens"] > 0) == options.get("enable_prefix_caching", True)
        assert metrics["num_output_tokens"] == len(continuation)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_transformers_log_probabilities(tmp_path, family):
    for seed in range(2):
        rng = random.Random(seed)
        options = FAMILIES[family][2](rng)
        directory = tmp_path / str(seed)
        model = save_family_model(directory, family, options, seed=seed)
        prompts = make_prompts(rng, options["vocab_size"])
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=4, logprobs=2, prompt_logprobs=2, ignore_eos=True)
        with LLM(directory, device="cpu", num_kvcache_blocks=64, max_model_len=64, max_num_batched_tokens=32) as llm:
            for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
                expected = log_softmax(model, prompt + out.token_ids)
                check(out.outputs[0].logprobs, expected[len(prompt) - 1 : -1], out.token_ids)
                check(out.prompt_logprobs, expected[: len(prompt) - 1], prompt[1:])


@pytest.mark.parametrize("options", some([{}, {"tensor_parallel_size": 2}], {"tensor_parallel_size": 2}), ids=str)
def test_processed_log_probabilities_are_of_what_was_drawn_from(checkpoint, options):
    """They come after penalties and bans, divide by the temperature, cover the tokens that filters keep, and sum to
    one.
    """
    directory, model = checkpoint
    rng = random.Random(7)
    prompts = make_prompts(rng, 157)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 3.0]), top_k=rng.choice([0, 5, 40]), top_p=rng.choice([1.0, 0.6]),
            min_p=rng.choice([0.0, 0.1]), logit_bias={4: 2.5, 9: -100}, max_tokens=5, seed=row, ignore_eos=True,
            logprobs=128, logprobs_mode=rng.choice(["raw", "processed", "processed"]),
        )
        for row in range(len(prompts))
    ]  # fmt: skip
    num_filtered = 0
    with LLM(directory, device="cpu", num_kvcache_blocks=64, max_model_len=64, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, each, out in zip(prompts, params, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + out.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        logits = logits.clone()
        found = out.outputs[0].logprobs
        if each.logprobs_mode == "raw":
            check(found, logits.log_softmax(-1), out.token_ids)
            continue
        logits[:, 4] += 2.5
        logits[:, 9] -= 100
        settings = ([each.temperature], [each.top_k], [each.top_p], [each.min_p])
        tensors = [torch.tensor(value * 5, dtype=torch.float32) for value in settings]
        thresholds = plain_filter_thresholds(logits, tensors[0], tensors[1].int(), *tensors[2:])
        kept = logits.masked_fill(logits < thresholds[:, None], -torch.inf) / (each.temperature or 1.0)
        expected = kept.log_softmax(-1)
        own = expected.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0].numpy()
        assert np.abs(found.of_tokens - own).max() < TOLERANCE
        for row in range(5):
            is_kept = found.token_ids[row, 1:] >= 0
            num_kept = int((expected[row] > -torch.inf).sum())
            assert is_kept.sum() == min(num_kept, 128)
            if num_kept <= 128:
                num_filtered += 1
                assert np.exp(found.logprobs[row, 1:][is_kept]).sum() == pytest.approx(1, abs=1e-4)
                assert found.token_ids[row, 0] in found.token_ids[row, 1:]
    assert num_filtered > 15


def test_siblings_have_log_probabilities_of_their_own_and_share_the_prompts(checkpoint):
    directory, model = checkpoint
    prompt = list(range(40))
    params = SamplingParams(n=5, max_tokens=6, seed=1, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    with LLM(directory, device="cpu", num_kvcache_blocks=64, max_model_len=64) as llm:
        (out,) = llm.generate([prompt], params, use_tqdm=False)
        assert llm.metrics()["num_prefill_tokens"] == 40
    for completion in out.outputs:
        expected = log_softmax(model, prompt + completion.token_ids)
        check(completion.logprobs, expected[39:-1], completion.token_ids)
    check(out.prompt_logprobs, expected[:39], prompt[1:])


def test_log_probabilities_change_no_token(checkpoint):
    directory, _ = checkpoint
    prompts = make_prompts(random.Random(5), 157)
    params = [SamplingParams(temperature=0.9, max_tokens=10, seed=row, top_k=row * 3) for row in range(len(prompts))]
    with LLM(directory, device="cpu", num_kvcache_blocks=64, max_model_len=64) as llm:
        expected = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        asked = [replace(each, logprobs=3, prompt_logprobs=0) for each in params]
        assert [out.token_ids for out in llm.generate(prompts, asked, use_tqdm=False)] == expected


@pytest.mark.parametrize("overlap", [True, False])
def test_an_end_by_a_stop_token_leaves_one_row_per_token(checkpoint, overlap):
    """With a step in flight, one more token is sampled than counts."""
    directory, model = checkpoint
    prompts = make_prompts(random.Random(4), 157)
    stops = list(range(0, 157, 5))
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=30, logprobs=0, stop_token_ids=stops)
    with LLM(directory, device="cpu", num_kvcache_blocks=64, max_model_len=128, overlap=overlap) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(out.finish_reason == "stop" for out in outputs) > 8
    for prompt, out in zip(prompts, outputs, strict=True):
        expected = log_softmax(model, prompt + out.token_ids)[len(prompt) - 1 : -1]
        check(out.outputs[0].logprobs, expected, out.token_ids)


def test_a_prompt_whose_beginning_is_cached_is_scored_all_the_same(checkpoint):
    """Cached tokens are not computed, so they would have no logits."""
    directory, model = checkpoint
    prompt = [random.Random(1).randrange(157) for _ in range(60)]
    with LLM(directory, device="cpu", num_kvcache_blocks=64, kvcache_block_size=8) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        (out,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        (row,) = llm.loglikelihood([prompt[:45]], [prompt[45:]], use_tqdm=False)
    assert out.num_cached_tokens == 0 and row.num_cached_tokens == 40
    check(out.prompt_logprobs, log_softmax(model, prompt)[:-1], prompt[1:])


def test_only_prompts_that_are_scored_are_computed_once_more(checkpoint):
    """Few-shot prefixes are computed once, for any number of rows."""
    directory, _ = checkpoint
    rng = random.Random(2)
    shared = [rng.randrange(157) for _ in range(40)]
    contexts = [[*shared, row] for row in range(30)]
    with LLM(directory, device="cpu", num_kvcache_blocks=256, kvcache_block_size=8, max_num_seqs=8) as llm:
        rows = llm.loglikelihood(contexts, [[7, 8]] * 30, use_tqdm=False)
        assert llm.metrics()["num_prefill_tokens"] == 40 + 30 * 2  # the last token need not be computed
    assert sum(row.num_cached_tokens for row in rows) == 29 * 40


@pytest.mark.parametrize("options", [{}, {"kvcache_block_size": 64}, {"overlap": False, "max_num_batched_tokens": 40}])
def test_a_context_of_several_continuations_is_computed_once(checkpoint, options):
    """Contexts end within a block: with blocks of 64, equal contexts of 57 tokens were computed for each label."""
    directory, _ = checkpoint
    rng = random.Random(3)
    contexts = [[first, *(rng.randrange(157) for _ in range(rng.choice([1, 7, 8, 30])))] for first in range(20)]
    pairs = [(context, ids) for ids in ([5], [6, 7, 8], [5, 9], [1] * 20) for context in contexts]
    with LLM(directory, device="cpu", max_num_seqs=128, **{**DEFAULTS, "num_kvcache_blocks": 700, **options}) as llm:
        rows = llm.loglikelihood(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
        num_tokens = llm.metrics()["num_prefill_tokens"]
    assert num_tokens == sum(len(each) - 1 for each in contexts) + sum(len(ids) for _, ids in pairs)
    assert [(row.context_token_ids, row.token_ids) for row in rows] == pairs
    served = sum(row.num_cached_tokens for row in rows)
    assert served == 3 * sum(len(each) - 1 for each in contexts)


def test_prefix_caching_that_is_off_shares_no_context(checkpoint):
    with LLM(checkpoint[0], device="cpu", enable_prefix_caching=False, **DEFAULTS) as llm:
        llm.loglikelihood([1, 2, 3, 4], [[5], [6]], use_tqdm=False)
        assert llm.metrics()["num_prefill_tokens"] == 8


def test_a_continuation_behind_a_shared_context_is_cached(checkpoint):
    """Its blocks were registered behind those of the other continuation, where no prefix leads."""
    context, first, second = list(range(10)), list(range(30, 60)), list(range(60, 90))
    with LLM(checkpoint[0], device="cpu", **DEFAULTS) as llm:
        rows = llm.loglikelihood(context, [first, second], use_tqdm=False)
        again = llm.generate([context + first, context + second], SamplingParams(max_tokens=1), use_tqdm=False)
    assert [row.num_cached_tokens for row in rows] == [0, 9]
    assert [output.num_cached_tokens for output in again] == [32, 32]


def test_one_context_goes_with_many_continuations_and_vice_versa(checkpoint):
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        for one, many in (("A: ", ["b", "c"]), ([7, 8], [[1], [2], [3]]), ({"prompt": "A: "}, ["b"])):
            among = llm.loglikelihood([one] * len(many), many, use_tqdm=False)
            assert llm.loglikelihood(one, many, use_tqdm=False) == among
            before = llm.loglikelihood(many, [one] * len(many), use_tqdm=False)
            assert llm.loglikelihood(many, one, use_tqdm=False) == before and len(before) == len(many)
        with pytest.raises(ValueError, match="1 contexts for 2 continuations"):
            llm.loglikelihood(["A"], ["b", "c"])
        with pytest.raises(ValueError, match="prompt 3: "):  # its number in the call; equal contexts are read first
            llm.loglikelihood(["A", "B", "A", "C"], ["b", "b", "b", ""], raise_on_error=True)
        with pytest.raises(ValueError, match="prompt 2: "):
            llm.loglikelihood(["A", "B", "A", "C"], ["b", "b", "", "b"], raise_on_error=True)


def test_texts_are_tokenized_as_lm_evaluation_harness_does():
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        tokenizer = llm.get_tokenizer()
        contexts = ["Sum: 1+2 ", "Sum: 1+2", "", "a b", [1, 2], " \n", {"prompt": "Sum: 1+2 "}, np.array([1, 2])]
        continuations = ["= 3", " = 3", "Sum", [3, 4], "x", "x", "= 3", np.array([3])]
        rows = llm.loglikelihood(contexts, continuations, use_tqdm=False)
    assert [row.error for row in rows] == [None] * 8
    assert rows[6] == rows[0] and rows[7].token_ids == [3] and rows[5].token_ids == tokenizer.encode(" \nx")
    encode = tokenizer.encode
    assert rows[0].context_token_ids == rows[1].context_token_ids == encode("Sum: 1+2")
    assert rows[0].token_ids == rows[1].token_ids == encode("Sum: 1+2 = 3")[len(encode("Sum: 1+2")) :]
    assert rows[2].context_token_ids == [tokenizer.bos_token_id or tokenizer.eos_token_id]
    assert rows[2].token_ids == encode("Sum")
    assert (rows[3].context_token_ids, rows[3].token_ids) == (encode("a b"), [3, 4])
    assert (rows[4].context_token_ids, rows[4].token_ids) == ([1, 2], encode("x"))


def test_bad_pairs_are_error_rows_and_the_others_are_scored(checkpoint):
    directory, _ = checkpoint
    long = list(range(40))
    with LLM(directory, device="cpu", num_kvcache_blocks=64, max_model_len=64) as llm:
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        contexts = [[1], [], [1], long, long, [1], [999], "text", chat, [1], "text"]
        continuations = [[2], [2], [], long, long[:24], None, [2], "text", [2], chat, chat]
        rows = llm.loglikelihood(contexts, continuations, use_tqdm=False)
        with pytest.raises(ValueError, match="2 contexts for 1 continuations"):
            llm.loglikelihood([[1], [2]], [[3]])
        with pytest.raises(ValueError, match="prompt 0: the continuation has no tokens"):
            llm.loglikelihood([[1]], [[]], raise_on_error=True)
    errors = [
        None,
        "the context is empty; a continuation's first token needs a token before it",
        "the continuation has no tokens; there is nothing to score",
        "the 80 tokens to score are more than max_model_len=64",
        None,
        "a prompt must be a string or a list of token ids",
        "token id 999 is outside the vocabulary",
        "the model has no tokenizer",
        *["a conversation cannot be scored; give its text"] * 2,
        "the model has no tokenizer",
    ]
    for row, error in zip(rows, errors, strict=True):
        assert (row.error is None) if error is None else row.error.startswith(error), (row, error)
        assert (row.total < 0) if error is None else np.isnan(row.total) and not row.all_greedy
    assert len(rows[4].logprobs) == 24


@pytest.mark.parametrize(
    "options", some([{}, {"overlap": False, "max_num_batched_tokens": 4}, {"tensor_parallel_size": 2}], {})
)
def test_a_score_from_logits_that_are_not_finite_is_an_error_row(tmp_path, options):
    """A broken checkpoint once scored as −inf, which an evaluation takes for a wrong answer."""
    save_model(tmp_path, seed=3, vocab_size=61)
    tensors = read_tensors(tmp_path)
    tensors["model.embed_tokens.weight"][7] = float("nan")
    write_tensors(tmp_path, tensors)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    with LLM(tmp_path, device="cpu", num_kvcache_blocks=64, **options) as llm:
        rows = llm.loglikelihood([[1, 2, 3], [1, 7, 3, 4, 5, 6], [5]], [[4, 5, 6], [1, 2], [9]], use_tqdm=False)
        outputs = llm.generate([[1, 2, 7, 4, 5, 6, 7, 1, 2], [1, 2, 3]], params, use_tqdm=False)
        again = llm.loglikelihood([[1, 2, 3]], [[4, 5, 6]], use_tqdm=False)
        (broken,) = llm.generate([[1, 7]], SamplingParams(logprobs=0), use_tqdm=False)
        assert llm.metrics()["finish_reasons"]["error"] == 3
    assert broken.error and len(broken.token_ids) == len(broken.outputs[0].logprobs) == 0
    assert [row.error is None for row in rows] == [True, False, True] and "not finite" in rows[1].error
    assert np.isnan(rows[1].total) and again == rows[:1]
    assert "not finite" in outputs[0].error and outputs[1].error is None


def test_log_probabilities_read_as_vllms_list_of_dicts(checkpoint):
    params = SamplingParams(temperature=1.5, max_tokens=6, seed=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        (out,) = llm.generate("Sum:", params, use_tqdm=False)
    logprobs = out.outputs[0].logprobs
    assert len(logprobs) == len(list(logprobs)) == 6 and len(logprobs[1:3]) == 2
    for token_id, found in zip(out.token_ids, logprobs, strict=True):
        assert next(iter(found)) == token_id and len(found) in (2, 3)
        assert sorted(each.logprob for each in found.values())[-1] == max(each.logprob for each in found.values())
        assert {each.rank for each in found.values()} >= {1, 2}
        assert all(isinstance(each.decoded_token, str) for each in found.values())
    assert out.prompt_logprobs[0] is None and set(out.prompt_logprobs[1]) >= {out.prompt_token_ids[1]}
    assert out["prompt_logprobs"] is out.prompt_logprobs
    with pytest.raises(IndexError):
        logprobs[6]
    again = pickle.loads(pickle.dumps(out))
    assert again == out and again.outputs[0].logprobs[0] == logprobs[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logprobs": -1}, "logprobs must be at least 0, not -1"),
        ({"logprobs": 129}, "logprobs must be at most 128, not 129"),
        ({"prompt_logprobs": 129}, "prompt_logprobs must be at most 128"),
        ({"logprobs": True}, "logprobs must be an integer"),
        ({"logprobs_mode": "cooked"}, 'logprobs_mode must be "raw" or "processed"'),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
    ids=str,
)
def test_impossible_log_probabilities_are_refused(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**values)
