"""The whole engine on a GPU: against transformers, under every schedule, with graphs, and within its memory."""

import gc
import itertools
import json
import logging
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.against_transformers import teacher_forced_logits
from support.demo_problems import CONVERSATIONS, PROBLEMS
from support.gpu_engines import DEVICE, MIB, NUM_REQUESTS, Judge, free_memory, generate, num_different
from support.interrupts import Fault
from support.model_factory import make_model, save_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.layers.sampler import SamplingNeeds
from nanovllm.outputs import RequestOutput
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.sequence_table import SentStep, StepSize
from nanovllm.runner.step_in_flight import StepInFlight

pytestmark = pytest.mark.gpu

BLOCK_SIZE = {"triton": 16, "flash": 256}


def demo(backend: str = "triton", dtype: str = "float32", **options) -> LLM:
    options = {"max_num_seqs": 64, "kvcache_block_size": BLOCK_SIZE.get(backend), **options}
    return LLM(str(MODEL_DIRECTORY), device=DEVICE, attention_backend=backend, dtype=dtype, **options)


def captured_forwards(llm: LLM) -> list[StepSize]:
    """The sizes of the steps that are captured."""
    captured = llm.engine.runner.program.graphs._captured
    return [key[1] for key, graph in captured.items() if key[0] == "forward" and graph is not None]


def captured_samplings(llm: LLM) -> set[SamplingNeeds]:
    """The kinds of sampling that are captured."""
    captured = llm.engine.runner.program.graphs._captured
    return {key[2] for key, graph in captured.items() if key[0] == "sample" and graph is not None}


@pytest.fixture(autouse=True)
def memory_given_back():
    """Memory that a failed test's traceback holds must not make the next test fail."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def judge(prompts) -> Judge:
    from transformers import AutoModelForCausalLM

    model, rough = (
        AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.inference_mode():
        noise = max(
            float((model(ids).logits - rough(ids).logits.float()).abs().max())
            for ids in (torch.tensor([prompt]) for prompt in prompts[:48])
        )
    print(f"bfloat16 moves a logit by up to {noise:.3f}")
    return Judge(model, noise)


@pytest.fixture(scope="module")
def eager(prompts, params) -> list[list[int]]:
    """Every request's tokens in float32 without graphs and without overlap."""
    with demo(enforce_eager=True, overlap=False) as llm:
        return [output.token_ids for output in generate(llm, prompts, params)]


# Against transformers


@dataclass
class Checkpoint:
    """directory: where a bfloat16 checkpoint is; token_ids: some text; exact, theirs: transformers' logits for it in
    float32 and in bfloat16, [num_tokens, vocab_size].
    """

    directory: str
    model: Any
    token_ids: list[int]
    exact: torch.Tensor
    theirs: torch.Tensor


@pytest.fixture(scope="module", params=[(64, 6, 2, False), (128, 8, 4, True)], ids=["head_dim 64", "head_dim 128"])
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    from transformers import AutoModelForCausalLM

    head_dim, num_heads, num_kv_heads, is_tied = request.param
    directory = tmp_path_factory.mktemp("model")
    make_model(
        head_dim, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, head_dim=head_dim, vocab_size=1013, max_position_embeddings=1024,
        tie_word_embeddings=is_tied,
    ).bfloat16().save_pretrained(directory)  # fmt: skip
    rng = random.Random(head_dim)
    token_ids = [rng.randrange(1013) for _ in range(700)]
    logits = []
    for dtype in (torch.bfloat16, torch.float32):  # float32 widens the same weights
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(DEVICE)
        with torch.inference_mode():
            logits.append(model(torch.tensor([token_ids], device=DEVICE)).logits[0].float())
    theirs, exact = logits
    return Checkpoint(str(directory), model, token_ids, exact, theirs)


CHUNKS = {
    "one prefill": [700],
    "chunks": [100, 1, 256, 3, 200, 140],
    "decodes": [20] + [1] * 680,
}


@pytest.mark.parametrize("backend", ["triton", "flash"])
@pytest.mark.parametrize("path", CHUNKS)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(checkpoint, backend, path):
    """An operation rounded once too often, or a slightly wrong scale, leaves most tokens right and every logit worse.

    An argmax may differ from float32's only where its gap is below the noise of bfloat16.
    """
    options = {"device": DEVICE, "attention_backend": backend, "kvcache_block_size": 256, "max_num_seqs": 4}
    with LLM(checkpoint.directory, dtype="bfloat16", enforce_eager=True, **options) as llm:
        ours = teacher_forced_logits(llm, checkpoint.token_ids, CHUNKS[path]).float()
    exact, theirs = checkpoint.exact, checkpoint.theirs
    our_error, their_error = (float((x - exact).norm() / exact.norm()) for x in (ours, theirs))
    print(f"{backend}, {path}: relative error {our_error:.5f}, transformers {their_error:.5f}")
    assert ours.shape == exact.shape
    assert our_error <= 1.1 * their_error
    # Each position is compared too: one broken page would not show in the whole.
    of_rows = (ours - exact).norm(dim=1) / exact.norm(dim=1)
    assert of_rows.max() <= 3 * ((theirs - exact).norm(dim=1) / exact.norm(dim=1)).max()
    noise = 2 * float((theirs - exact).abs().max())
    gaps = exact.max(-1).values - exact.gather(1, ours.argmax(-1, keepdim=True)).squeeze(1)
    assert gaps.max() <= noise
    print(f"{int((gaps > 0).sum())} of {len(gaps)} argmaxes differ, by up to {float(gaps.max()):.3f} of {noise:.3f}")


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_greedy_tokens_through_graphs_are_best_up_to_noise(checkpoint, backend):
    """The engine's own decode steps, captured: each token is the best in float32, or ties with it in bfloat16."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1013) for _ in range(rng.randrange(1, 400))] for _ in range(23)]
    options = {"device": DEVICE, "attention_backend": backend, "max_num_seqs": 20}
    with LLM(checkpoint.directory, dtype="bfloat16", **options) as llm:
        assert llm.engine.runner.program.graphs is not None
        outputs = generate(llm, prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    noise = 2 * float((checkpoint.theirs - checkpoint.exact).abs().max())
    num_exact = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None and len(output.token_ids) == 40
        with torch.inference_mode():
            ids = torch.tensor([prompt + output.token_ids], device=DEVICE)
            logits = checkpoint.model(ids).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits[range(40), output.token_ids]
        assert gaps.max() <= noise, (gaps, noise)
        num_exact += int((gaps == 0).sum())
    print(f"{num_exact} of {23 * 40} tokens are float32's")
    assert num_exact > 0.8 * 23 * 40


# The schedule


def schedules(backend: str, num_rows: int) -> dict[str, tuple[dict[str, Any], list[list[int]]]]:
    """Name -> (options, generate calls, each a list of rows)."""
    everything = list(range(num_rows))
    first, second = (random.Random(seed).sample(everything, num_rows) for seed in range(2))
    sizes = (1, 2, 3, 5, 8, 13, 20, 33, 64, 100, 256)
    calls = [everything[start : start + size] for size in sizes for start in range(0, min(num_rows, 4 * size), size)]
    found = {
        "calls of 1 to 256": ({"max_num_seqs": 256}, calls),
        "eager, no overlap": ({"enforce_eager": True, "overlap": False, "max_num_seqs": 100}, [first]),
        "chunks of 50, warm": ({"max_num_batched_tokens": 50}, [first, second]),
    }
    if backend == "triton":
        found |= {
            "no overlap": ({"overlap": False}, [second]),
            "eager": ({"enforce_eager": True}, [first]),
            "cache off": ({"enable_prefix_caching": False, "max_num_seqs": 200}, [second]),
            "cache warm": ({"kvcache_block_size": 32}, [first, second]),
            "chunks of 7": ({"max_num_batched_tokens": 7, "max_num_seqs": 20}, [first[:64]]),
            "3 at a time": ({"max_num_seqs": 3}, [first[:64]]),
            "small pool": ({"num_kvcache_blocks": 20, "max_num_seqs": 20}, [second]),
            "small pool, no cache, chunks": (
                {
                    "num_kvcache_blocks": 14, "enable_prefix_caching": False, "max_num_batched_tokens": 33,
                    "enforce_eager": True,
                },
                [first],
            ),
        }  # fmt: skip
    return found


@pytest.mark.parametrize(("backend", "dtype"), [("triton", "float32"), ("triton", "bfloat16"), ("flash", "bfloat16")])
def test_the_schedule_changes_hardly_a_token(prompts, params, judge, backend, dtype):
    """Batch sizes, order of arrival, chunks, cache off, cold and warm, preemption, graphs and overlap on and off.

    A row may differ from the one alone only where its candidates tie, which answers that the model is sure of never do.
    """
    options = {"max_num_seqs": 1, "overlap": False, "enable_prefix_caching": False}
    with demo(backend, dtype, **options) as llm:
        alone = [generate(llm, [ids], one)[0].token_ids for ids, one in zip(prompts, params, strict=True)]
    # If the completions varied little, most faults would not show.
    assert len({tuple(tokens) for tokens in alone}) > 0.8 * NUM_REQUESTS
    num_rows, num_ties = [0, 0], [0, 0]  # sure rows and guessing rows
    num_answers = num_right = num_preemptions = num_cached_tokens = 0
    for name, (options, calls) in schedules(backend, NUM_REQUESTS).items():
        with demo(backend, dtype, **options) as llm:
            for rows in calls:
                outputs = generate(llm, [prompts[row] for row in rows], [params[row] for row in rows])
                assert all(output.error is None for output in outputs), name
                for row, output in zip(rows, outputs, strict=True):
                    request, is_guess = [(prompts[row], params[row])], row % 2
                    ours = [output.token_ids]
                    num_rows[is_guess] += 1
                    num_ties[is_guess] += judge.count_ties(request, ours, [alone[row]], name, dtype == "float32")
                    if not is_guess:
                        num_answers += 1
                        num_right += output.text == PROBLEMS[row][1]
                num_cached_tokens += sum(output.num_cached_tokens for output in outputs)
            num_preemptions += llm.metrics()["num_preemptions"]
            llm.engine.scheduler.check_integrity()
    print(
        f"{backend} {dtype}: {num_ties[0]} of {num_rows[0]} answers and {num_ties[1]} of {num_rows[1]} guesses differ; "
        f"{num_right} of {num_answers} right; {num_preemptions} preemptions, {num_cached_tokens} cached tokens"
    )
    assert num_ties[0] <= (0.005 if dtype == "float32" else 0.02) * num_rows[0]
    assert dtype != "float32" or num_ties[1] <= 0.005 * num_rows[1]
    assert num_right >= 0.99 * num_answers
    if backend == "triton":
        assert num_preemptions > 10 and num_cached_tokens > 5000


@pytest.mark.parametrize(
    ("backend", "enforce_eager", "overlap"),
    [*itertools.product(("triton", "flash"), (False, True), (False, True)), ("sdpa", False, True)],
)
def test_at_least_99_percent_of_unseen_problems_are_answered_right(backend, enforce_eager, overlap):
    """This holds in the checkpoint's own bfloat16, for each attention backend and each way to launch steps."""
    options = {"max_num_seqs": 256, "enforce_eager": enforce_eager, "overlap": overlap, "kvcache_block_size": None}
    with demo(backend, "auto", **options) as llm:
        assert llm.engine.runner.settings.dtype == torch.bfloat16
        assert (llm.engine.runner.program.graphs is not None) == (backend != "sdpa" and not enforce_eager)
        outputs = llm.chat(CONVERSATIONS, use_tqdm=False)
    num_right = sum(output.text == answer for output, (_, answer) in zip(outputs, PROBLEMS, strict=True))
    print(f"{num_right} of {len(PROBLEMS)} right")
    assert num_right >= 990


# Graphs

BATCH_SIZES = {
    1: (1, 2),
    3: range(1, 5),
    12: range(1, 14),
    20: range(1, 22),
    100: (17, 33, 47, 48, 49, 63, 64, 65, 99, 100, 130),
    500: (129, 255, 256, 257, 288, 289, 499, 500, 512),
}


@pytest.mark.parametrize("max_num_seqs", BATCH_SIZES)
def test_graphs_give_the_tokens_of_eager_steps_at_every_batch_size(prompts, params, eager, judge, max_num_seqs):
    """A batch size without a graph of its own is padded. Padding that samples, writes or is read would show here."""
    num_rows = num_ties = 0
    with demo(max_num_seqs=max_num_seqs) as llm:
        at_start = set(captured_forwards(llm))
        assert max(size.num_rows for size in at_start) == max_num_seqs and any(size.num_tiles for size in at_start)
        for size in BATCH_SIZES[max_num_seqs]:
            rows = [(7 * size + i) % NUM_REQUESTS for i in range(size)]
            outputs = generate(llm, [prompts[row] for row in rows], [params[row] for row in rows])
            requests = [(prompts[row], params[row]) for row in rows]
            ours = [output.token_ids for output in outputs]
            num_rows += size
            num_ties += judge.count_ties(requests, ours, [eager[row] for row in rows], f"{size} rows")
        assert llm.metrics()["max_batch_size"] == max_num_seqs
        later = {size for size in captured_forwards(llm) if not size.is_grouped} - at_start
        assert not later, "a capture in the middle of a call takes its time"
    assert num_ties <= 0.01 * num_rows


LONGEST_PROMPTS = [1, 2, 15, 16, 17, 31, 32, 33, 47]


@pytest.fixture(scope="module")
def long_requests() -> list[tuple[list[int], SamplingParams]]:
    """Requests that only max_model_len ends, greedy and sampled in turn."""
    rng = random.Random(3)
    return [
        (
            [rng.randrange(32, 127) for _ in range(length)],
            SamplingParams(temperature=0.8 * (row % 2), max_tokens=5000, ignore_eos=True, seed=row),
        )
        for row, length in enumerate(LONGEST_PROMPTS)
    ]


@pytest.fixture(scope="module")
def long_completions(long_requests) -> list[list[int]]:
    """Up to the model's own 1,024 tokens, without graphs."""
    with demo(enforce_eager=True, kvcache_block_size=64) as llm:
        outputs = generate(llm, *map(list, zip(*long_requests, strict=True)))
    assert [len(output.token_ids) for output in outputs] == [1024 - length for length in LONGEST_PROMPTS]
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("backend", "max_model_len", "block_size"),
    [
        ("triton", 48, 64), ("triton", 48, 16), ("triton", 49, 16), ("triton", 50, 16), ("triton", 1024, 16),
        ("triton", 1024, 1024), ("flash", 256, 256), ("flash", 257, 256), ("flash", 1024, 256),
    ],
)  # fmt: skip
def test_graphs_reach_max_model_len_exactly(long_requests, long_completions, judge, backend, max_model_len, block_size):
    """Tables have one block or as many as possible, full to the last slot. One entry too few would send keys to a block
    of another sequence.
    """
    is_float32 = backend == "triton"
    dtype = "float32" if is_float32 else "bfloat16"
    options = {"max_model_len": max_model_len, "kvcache_block_size": block_size, "max_num_seqs": 12}
    with demo(backend, dtype, **options) as llm:
        outputs = generate(llm, *map(list, zip(*long_requests, strict=True)))
        runner = llm.engine.runner
        size = SentStep(runner.program.sizes.decode_size(1))
        tables = runner.program.table.batch(size).groups[0].block_tables
        assert runner.program.graphs is not None and tables.shape[1] == -(-max_model_len // block_size)
    for length, output in zip(LONGEST_PROMPTS, outputs, strict=True):
        assert output.error is None and output.finish_reason == "length"
        assert length + len(output.token_ids) == max_model_len
    expected = [
        tokens[: max_model_len - length] for length, tokens in zip(LONGEST_PROMPTS, long_completions, strict=True)
    ]
    ours = [output.token_ids for output in outputs]
    num_ties = judge.count_ties(long_requests, ours, expected, f"{backend}, {max_model_len}", is_float32)
    print(f"{num_ties} of {len(ours)} rows differ")
    assert not is_float32 or num_ties <= 1


def test_a_prompt_of_all_but_one_token_of_max_model_len_gets_that_token():
    """This row never decodes: its token comes from the prefill, and its table has the maximum length."""
    prompt = [random.Random(0).randrange(32, 127) for _ in range(63)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with demo(max_model_len=64) as llm:
        short, whole = generate(llm, [prompt[:40], prompt], params)
        too_long = generate(llm, [[*prompt, 32]], params)[0]
    assert len(short.token_ids) == 10 and len(whole.token_ids) == 1 and whole.finish_reason == "length"
    assert too_long.finish_reason == "error" and "max_model_len" in too_long.error


# Filters and rules

PLAIN = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2}]
FILTERS = [
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.1, "top_p": 0.95, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
]
# The demo model's ids are bytes: digits are 48 to 57, and letters 97 to 122.
LETTERS, DIGITS = list(range(97, 123)), list(range(48, 58))
RULES = [
    {"temperature": 0.0, "min_tokens": 12},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "presence_penalty": 2.0, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {65: 100.0}, "ignore_eos": True},
    {"temperature": 0.7, "logit_bias": dict.fromkeys(DIGITS, -2.5) | {32: 1.5}, "bad_words": [[49], [50, 51]]},
    {"temperature": 1.0, "allowed_token_ids": LETTERS},
    {"temperature": 1.1, "min_tokens": 9, "top_p": 0.95, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 1.3, "bad_words": [[digit] for digit in DIGITS], "top_k": 20},
]
# The number of kinds is odd, so that each kind gets questions that the model is sure of and others.
KINDS = {"filters": PLAIN + FILTERS, "rules": PLAIN + RULES, "all": PLAIN + FILTERS + RULES}


def params_of(kind: str, num_rows: int) -> list[SamplingParams]:
    """Plain, greedy and other rows in turn."""
    kinds = KINDS[kind]
    return [SamplingParams(**{"max_tokens": 24, "seed": row, **kinds[row % len(kinds)]}) for row in range(num_rows)]


def assert_obeyed(params: SamplingParams, prompt: list[int], output: RequestOutput, eos_token_ids: set[int]) -> None:
    """Asserts that no token occurs that a request's rules forbid."""
    tokens = output.token_ids
    assert output.error is None, output.error
    if params.min_tokens:
        # The token that ends the completion is not one of the banned tokens.
        assert len(tokens) > params.min_tokens and not set(tokens[: params.min_tokens]) & eos_token_ids
    for *prefix, last in params.bad_words:
        for at, token in enumerate(tokens):
            assert token != last or tokens[max(0, at - len(prefix)) : at] != list(prefix), (prefix, last, tokens)
    if params.allowed_token_ids is not None:
        assert set(tokens) <= set(params.allowed_token_ids)
    if params.logit_bias.get(65) == 100:
        assert tokens == [65] * 24


@dataclass
class MixedRequests:
    """kind: one of KINDS; prompts, params: those of the requests; alone: the tokens of each request run by itself,
    eagerly.
    """

    kind: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    alone: list[list[int]]


NUM_MIXED = 160


@pytest.fixture(scope="module", params=KINDS)
def mixed(request, prompts) -> MixedRequests:
    params = params_of(request.param, NUM_MIXED)
    with demo(enforce_eager=True, overlap=False, max_num_seqs=1, enable_prefix_caching=False) as llm:
        outputs = [generate(llm, [ids], one)[0] for ids, one in zip(prompts, params, strict=False)]
        for ids, one, output in zip(prompts, params, outputs, strict=False):
            assert_obeyed(one, ids, output, llm.engine.eos_token_ids)
    alone = [output.token_ids for output in outputs]
    assert len({tuple(tokens) for tokens in alone}) > NUM_MIXED // 2
    if request.param == "rules":  # each rule must change something
        with demo(enforce_eager=True) as llm:
            plain = [replace(one, **NO_RULES) for one in params]
            without = [output.token_ids for output in generate(llm, prompts[:NUM_MIXED], plain)]
        for number in range(len(PLAIN), len(KINDS["rules"])):
            rows = range(number, NUM_MIXED, len(KINDS["rules"]))
            assert any(alone[row] != without[row] for row in rows), KINDS["rules"][number]
    return MixedRequests(request.param, prompts[:NUM_MIXED], params, alone)


NO_RULES = {
    "min_tokens": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None,
    "bad_words": None, "allowed_token_ids": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("enforce_eager", "overlap", "options"),
    [
        *((enforce_eager, overlap, {}) for enforce_eager in (False, True) for overlap in (False, True)),
        (False, True, {"max_num_batched_tokens": 50}),
        (False, True, {"num_kvcache_blocks": 13, "max_num_seqs": 20}),
    ],
    ids=str,
)
def test_rows_with_filters_and_rules_are_those_of_the_request_alone(mixed, enforce_eager, overlap, options):
    """Plain, greedy, filtered and ruled rows share batches, captured or not; the first call captures what the second
    replays. A captured step that read wrong tensors, or another row's rules, would show here.

    One row in all may differ, where two candidates tie or one is at a filter's edge.
    """
    options = {"max_num_seqs": 100, **options}
    with demo(enforce_eager=enforce_eager, overlap=overlap, **options) as llm:
        for call in ("first", "second"):
            outputs = generate(llm, mixed.prompts, mixed.params)
            for ids, params, output in zip(mixed.prompts, mixed.params, outputs, strict=True):
                assert_obeyed(params, ids, output, llm.engine.eos_token_ids)
            different = num_different([output.token_ids for output in outputs], mixed.alone)
            print(f"{mixed.kind}, {call} call: {different} of {NUM_MIXED} rows differ")
            assert different <= 1, call
        # A step computes only the parts that it needs, and each combination of parts is captured separately.
        rows = range(0, NUM_MIXED, len(KINDS[mixed.kind]))
        greedy = generate(llm, [mixed.prompts[row] for row in rows], SamplingParams(0.0, 24))
        assert num_different([output.token_ids for output in greedy], [mixed.alone[row] for row in rows]) <= 1
        if not enforce_eager:
            found = {(needs.has_filters, needs.rules_version > 0) for needs in captured_samplings(llm)}
            expected = {"filters": (True, False), "rules": (True, True), "all": (True, True)}[mixed.kind]
            assert {(False, False), expected} <= found
            assert mixed.kind != "filters" or not any(has_rules for _, has_rules in found)
        assert "num_kvcache_blocks" not in options or llm.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_functions_that_add_a_bias_give_the_tokens_of_logit_bias(prompts, overlap):
    """Rows with functions share captured steps with others. One row may differ, where two candidates tie."""

    def adds(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.is_cuda and logits.dtype == torch.float32
        logits[50] += 7
        return logits

    plain = [SamplingParams(temperature=row % 2, max_tokens=16, seed=row, top_k=row % 4 * 5) for row in range(60)]
    biased = [replace(params, logit_bias={50: 7.0}) if row % 3 else params for row, params in enumerate(plain)]
    changed = [replace(params, logits_processors=[adds]) if row % 3 else params for row, params in enumerate(plain)]
    with demo(overlap=overlap) as llm:
        expected = [output.token_ids for output in generate(llm, prompts[:60], biased)]
        for _ in range(2):
            outputs = generate(llm, prompts[:60], changed)
            assert not any(output.error for output in outputs)
            assert num_different([output.token_ids for output in outputs], expected) <= 1
        without = [output.token_ids for output in generate(llm, prompts[:60], plain)]
        assert num_different(without, expected) > 10 and captured_forwards(llm)


def test_a_top_k_of_one_is_greedy_and_a_rule_of_nothing_changes_nothing(prompts):
    """Filtered and ruled rows take other kernels; on the same question they must give the same answer."""
    with demo(max_num_seqs=100) as llm:
        size = llm.engine.info.vocab_size
        same = [
            {"temperature": 0.0},
            {"temperature": 1.5, "top_k": 1},
            {"temperature": 0.0, "allowed_token_ids": list(range(size)), "logit_bias": {size - 1: 0.0}},
            {"temperature": 0.7, "top_p": 1e-9},
            {"temperature": 0.7, "min_p": 1.0, "bad_words": [[200, 201, 202]]},
        ]
        rows = [(ids, one) for ids in prompts[0:60:2] for one in same]
        params = [SamplingParams(**{"max_tokens": 24, "seed": row, **one}) for row, (_, one) in enumerate(rows)]
        outputs = [output.token_ids for output in generate(llm, [ids for ids, _ in rows], params)]
    different = [num_different(outputs[i :: len(same)], outputs[:: len(same)]) for i in range(len(same))]
    print(f"of 30 rows, {different} differ")
    assert max(different) <= 1


@pytest.mark.parametrize("overlap", [True, False])
def test_rules_outgrow_their_tensors_while_steps_are_in_flight(prompts, overlap):
    """A request with more edits than any before gets wider tensors. Steps that were captured with the narrow ones, and
    one in flight that reads them, must not be mixed up with those to come."""
    rng = random.Random(7)
    params = [
        SamplingParams(
            temperature=0.8, max_tokens=60 - row, ignore_eos=True, seed=row,  # so that they start in this order
            logit_bias={rng.randrange(97, 123): 2.0 for _ in range(1)}
            | dict.fromkeys(rng.sample(range(128, 250), min(4 * row, 100)), -100.0),
            bad_words=[[rng.randrange(32, 127) for _ in range(1 + row // 4)]],
        )
        for row in range(40)
    ]  # fmt: skip
    with demo(enforce_eager=True, overlap=False, max_num_seqs=1) as llm:
        alone = [generate(llm, [ids], one)[0].token_ids for ids, one in zip(prompts, params, strict=False)]
    # With prefix caching, requests that begin alike start together.
    with demo(max_num_seqs=8, overlap=overlap, enable_prefix_caching=False) as llm:
        before = llm.engine.runner.program.table.rules.version
        for _ in range(2):
            ours = [output.token_ids for output in generate(llm, prompts[: len(params)], params)]
            assert num_different(ours, alone) <= 1
        assert llm.engine.runner.program.table.rules.version >= before + 3
        versions = {needs.rules_version for needs in captured_samplings(llm)}
        assert len(versions) > 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_first_call_after_the_start_equals_the_second(prompts, params, kind, dtype, overlap):
    """The first call compiles and captures what the second replays: a trial that left its token or its keys behind, or
    a graph that kept what the first step knew, would show. The schedule is the same, so that not a bit may differ."""
    wanted = params[:120] if kind == "plain" else params_of(kind, 120)
    with demo(dtype=dtype, max_num_seqs=50, overlap=overlap) as llm:
        calls = []
        for _ in range(3):
            calls.append([output.token_ids for output in generate(llm, prompts[:120], wanted)])
            llm.engine.reset()  # so that the next call finds no cached prefixes either
    assert calls[0] == calls[1] == calls[2]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_shared_prefixes_attended_once_change_no_token(enforce_eager, monkeypatch):
    """Rows join and leave groups of many sizes; steps with groups are captured while other steps are in flight."""
    seen = []
    shared_prefixes = TritonAttention.shared_prefixes

    def noted(self, *args):
        seen.append(shared_prefixes(self, *args))
        return seen[-1]

    monkeypatch.setattr(TritonAttention, "shared_prefixes", noted)
    rng = random.Random(11)
    prefixes = [[rng.randrange(32, 127) for _ in range(length)] for length in (256, 300, 530, 600)]
    prefixes.append(prefixes[2][:512] + [rng.randrange(32, 127) for _ in range(256)])
    prompts = [rng.choice(prefixes) + [rng.randrange(32, 127) for _ in range(rng.randrange(1, 90))] for _ in range(200)]
    prompts += [[rng.randrange(32, 127) for _ in range(rng.randrange(1, 400))] for _ in range(20)]
    rng.shuffle(prompts)
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(2, 60), ignore_eos=True) for _ in prompts]
    tokens = []
    for prefix_grouping in (True, False):
        options = {"prefix_grouping": prefix_grouping, "enforce_eager": enforce_eager, "max_num_seqs": 80}
        with demo(kvcache_block_size=64, **options) as llm:
            tokens.append([output.token_ids for output in generate(llm, prompts, params)])
            tokens.append([output.token_ids for output in generate(llm, prompts, params)])
            if not enforce_eager:
                captured = [size for size in captured_forwards(llm) if size.num_tiles]
                assert captured and any(size.is_grouped for size in captured) == prefix_grouping
        assert any(groups is not None for groups in seen) == prefix_grouping, "or the test says nothing"
        seen.clear()
    # Random prompts have ties; in float32 they affect few rows.
    for others in tokens[:3]:
        different = num_different(others, tokens[3])
        print(f"{different} of {len(prompts)} rows differ")
        assert different <= len(prompts) // 50


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["prompt", "completion"])
def test_a_row_with_nan_logits_ends_alone(tmp_path, where, overlap):
    """Graphs are on. Its error must not end the whole batch, its −1 must not be the next step's token, and its blocks
    must not be served to others.
    """
    save_model(tmp_path, seed=4, vocab_size=2003, hidden_size=64, head_dim=32)
    rng = random.Random(5)
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(17, 60))] for _ in range(20)]
    params = [SamplingParams(0.8 * (row % 2), max_tokens=20, ignore_eos=True, seed=row) for row in range(20)]
    options = {"device": DEVICE, "attention_backend": "triton", "dtype": "float32", "kvcache_block_size": 16}
    with LLM(str(tmp_path), overlap=overlap, max_num_seqs=20, max_model_len=128, **options) as llm:
        assert llm.engine.runner.program.graphs is not None
        healthy = [output.token_ids for output in generate(llm, prompts, params)]

        def only_of(victim: int) -> list[int]:
            others = {token for row in range(20) if row != victim for token in healthy[row] + prompts[row]}
            if where == "prompt":
                return [token for token in prompts[victim] if token not in others and token not in healthy[victim]]
            return [token for token in healthy[victim][3:12] if token not in others and token not in prompts[victim]]

        victim = next(row for row in range(20) if only_of(row))
        token = only_of(victim)[0]
        num_left = 0 if where == "prompt" else healthy[victim].index(token) + 1
        weight = llm.engine.runner.program.model.model.embed_tokens.weight.data
        saved = weight[token].clone()
        for _ in range(2):
            llm.engine.reset()  # else the cache would serve the prompt's old keys
            weight[token] = float("nan")
            outputs = generate(llm, prompts, params)
            assert outputs[victim].finish_reason == "error" and "finite" in outputs[victim].error
            assert outputs[victim].token_ids == healthy[victim][:num_left]
            for row in set(range(20)) - {victim}:
                assert outputs[row].error is None and outputs[row].token_ids == healthy[row], row
            weight[token] = saved
            assert [output.token_ids for output in generate(llm, prompts, params)] == healthy
        llm.engine.scheduler.check_integrity()


def run_by_hand(llm: LLM, requests) -> dict[int, list[int]]:
    """Steps until all is finished: request id -> tokens."""
    for prompt, params in requests:
        llm.engine.add_request(prompt, params)
    finished = {}
    while not llm.engine.is_finished():
        finished |= {seq.seq_id: seq.completion_token_ids for seq in llm.engine.step()}
    return finished


@pytest.mark.parametrize("overlap", [True, False])
def test_aborted_rows_leave_the_others_as_they_were(prompts, params, eager, judge, overlap):
    """A freed entry goes to the next request while a captured step that still writes to it is in flight."""
    rows = list(range(1, 80, 2))  # rows that run for a while
    with demo(max_num_seqs=20, overlap=overlap) as llm:
        ids = {llm.engine.add_request(prompts[row], params[row]): row for row in rows}
        finished = {}
        for number in itertools.count():
            if llm.engine.is_finished():
                break
            if number in (3, 4, 9, 15):
                victims = [seq.seq_id for seq in llm.engine.scheduler.running][::3]
                for victim in victims:
                    row, seq = ids.pop(victim), llm.engine.abort(victim)
                    assert seq.finish_reason == "abort"
                    judge.count_ties(
                        [(prompts[row], params[row])],
                        [seq.completion_token_ids],
                        [eager[row][: len(seq.completion_token_ids)]],
                        "aborted",
                    )
            finished |= {seq.seq_id: seq.completion_token_ids for seq in llm.engine.step()}
            llm.engine.scheduler.check_integrity()
        assert 10 < len(finished) < 40 and finished.keys() == ids.keys()
        requests = [(prompts[row], params[row]) for row in ids.values()]
        num_ties = judge.count_ties(requests, [finished[i] for i in ids], [eager[row] for row in ids.values()], "abort")
        assert num_ties <= 1
        assert llm.metrics()["num_free_kvcache_blocks"] == llm.metrics()["num_kvcache_blocks"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is lost")], ids=repr)
@pytest.mark.parametrize("point", [(ModelRunner, "launch"), (StepInFlight, "wait")], ids=["launch", "wait"])
def test_after_an_exception_between_steps_the_next_call_is_right(prompts, params, eager, judge, point, error, overlap):
    """Steps in flight when Ctrl-C comes go on writing to the cache and to the entries of the next call's rows."""
    rows = list(range(1, 61, 2))
    requests = [(prompts[row], params[row]) for row in rows]
    with demo(max_num_seqs=20, overlap=overlap) as llm:
        for at in (1, 2, 12):
            with Fault(*point, at=at, error=error), pytest.raises(type(error)):
                generate(llm, [prompts[row] for row in rows[::-1]], [params[row] for row in rows[::-1]])
            assert llm.engine.is_finished()
            ours = [output.token_ids for output in generate(llm, *map(list, zip(*requests, strict=True)))]
            assert judge.count_ties(requests, ours, [eager[row] for row in rows], f"after {at} calls") <= 1
            llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_a_reset_with_steps_in_flight_leaves_nothing_behind(prompts, params, eager, judge, num_steps):
    """Data of a sequence on the device must not be used for the next one in the same entry."""
    with demo(max_num_seqs=20) as llm:
        for row in range(40):
            llm.engine.add_request(prompts[row], params[row])
        for _ in range(num_steps):
            llm.engine.step()
        assert llm.engine._in_flight
        llm.engine.reset()
        rows = range(41, 81)
        finished = run_by_hand(llm, [(prompts[row], params[row]) for row in rows])
        ours = [finished[i] for i in sorted(finished)]
        requests = [(prompts[row], params[row]) for row in rows]
        assert judge.count_ties(requests, ours, [eager[row] for row in rows], "after a reset") <= 1


# Memory


def test_two_engines_on_one_card_are_both_right(prompts, params, eager, judge):
    """If state were global, or memory measured as if the card were free, the second engine would break the first."""
    rows = list(range(48))
    requests = [(prompts[row], params[row]) for row in rows]
    with demo(gpu_memory_utilization=0.1) as one, demo(num_kvcache_blocks=200, max_num_seqs=12) as two:
        for llm in (one, two, one, two):
            ours = [output.token_ids for output in generate(llm, *map(list, zip(*requests, strict=True)))]
            assert judge.count_ties(requests, ours, [eager[row] for row in rows], "two engines") <= 1
        # The engines run steps in turn.
        ids = [{llm.engine.add_request(*request): row for row, request in enumerate(requests)} for llm in (one, two)]
        ours = [{}, {}]
        while not (one.engine.is_finished() and two.engine.is_finished()):
            for index, llm in enumerate((one, two)):
                ours[index] |= {ids[index][seq.seq_id]: seq.completion_token_ids for seq in llm.engine.step()}
        for found in ours:
            assert judge.count_ties(requests, [found[row] for row in rows], [eager[row] for row in rows], "turns") <= 1


def test_memory_used_stays_within_utilization_and_makes_use_of_it(dummy_directory):
    """Memory stays within it after the start, and after steps of the largest size, with penalties and top-p."""
    before, total = free_memory(), torch.cuda.mem_get_info()[1]
    promised = 0.12 * total
    options = {"max_num_seqs": 64, "max_model_len": 8192, "gpu_memory_utilization": 0.12, "load_format": "dummy"}
    with LLM(dummy_directory, device=DEVICE, **options) as llm:
        used = before - torch.cuda.mem_get_info()[0]
        assert 0.75 * promised < used <= promised, (used / MIB, promised / MIB)
        assert llm.metrics()["memory_bytes"]["kv_cache"] > 0.5 * promised
        rng = random.Random(0)
        prompts = [[rng.randrange(151936) for _ in range(1500)] for _ in range(64)]
        params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, max_tokens=8, ignore_eos=True)
        outputs = generate(llm, prompts, params)
        used = before - torch.cuda.mem_get_info()[0]
        print(f"{used / MIB:.0f} MiB of {promised / MIB:.0f} MiB used")
        assert used <= promised, (used / MIB, promised / MIB)
    assert all(output.error is None and len(output.token_ids) == 8 for output in outputs)


CLOSING = """
import gc, json, sys, torch
from nanovllm import LLM, SamplingParams

x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
(x @ x).sum().item()
del x

def free():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]

found = [free()]
for backend in ("triton", "flash", "triton"):
    llm = LLM(sys.argv[1], device="cuda", attention_backend=backend, load_format="dummy", max_model_len=4096,
              max_num_seqs=32, gpu_memory_utilization=0.3)
    llm.generate([[5, 6, 7]] * 40, SamplingParams(top_p=0.9, max_tokens=5, ignore_eos=True), use_tqdm=False)
    held = torch.cuda.mem_get_info()[0]
    llm.close()
    del llm
    found += [held, free()]
print(json.dumps(found))
"""


def test_a_closed_engine_gives_its_memory_back(dummy_directory):
    """If something still held a graph, a cache or a backend's buffers, the next engine would have no room."""
    done = subprocess.run([sys.executable, "-c", CLOSING, dummy_directory], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    before, *rest = json.loads(done.stdout.splitlines()[-1])
    print([f"{(before - free) / MIB:.0f} MiB" for free in rest])
    for held, after in zip(rest[::2], rest[1::2], strict=True):
        assert before - held > 2000 * MIB
        assert before - after < 300 * MIB


SWITCHING = """
import torch
from nanovllm.ops.library import cublas_lt
product = torch.ones(8, 8, device="cuda")
with cublas_lt():
    print(torch.backends.cuda.preferred_blas_library(), (product @ product).sum().item())
"""


def test_the_switch_of_the_matrix_library_is_silent():
    """PyTorch once wrote to standard error, once per process, that this switch is experimental."""
    done = subprocess.run([sys.executable, "-c", SWITCHING], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Cublaslt" in done.stdout and "512.0" in done.stdout
    assert "experimental" not in done.stderr


HOLDING = """
import sys, torch
total = torch.cuda.mem_get_info()[1]
held = torch.full((int(0.6 * total),), 255, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
assert (held[:: 2**20] == 255).all()
"""


def test_another_program_with_most_of_the_card_leaves_an_engine_that_runs_right(dummy_directory):
    """The default of 0.9 refers to the whole card, which is more than the memory that is free here."""
    rng = random.Random(1)
    prompts = [[rng.randrange(151936) for _ in range(rng.randrange(1, 300))] for _ in range(32)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"device": DEVICE, "load_format": "dummy", "max_num_seqs": 32, "max_model_len": 32768}
    with LLM(dummy_directory, num_kvcache_blocks=600, **options) as llm:
        expected = [output.token_ids for output in generate(llm, prompts, params)]
    assert len({tuple(tokens) for tokens in expected}) > 20
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDING], **pipes) as holder:
        try:
            assert holder.stdout.readline().strip() == "ready", holder.stderr.read()
            free = free_memory()
            with LLM(dummy_directory, **options) as llm:
                cache = llm.metrics()["memory_bytes"]["kv_cache"]
                left = torch.cuda.mem_get_info()[0]
                ours = [output.token_ids for output in generate(llm, prompts, params)]
            print(f"{free / MIB:.0f} MiB free, {cache / MIB:.0f} MiB of cache, {left / MIB:.0f} MiB left")
            assert ours == expected
            assert 0.7 * free < cache < free and left >= 128 * MIB
        finally:
            errors = holder.communicate(timeout=60)[1]
    assert holder.returncode == 0, errors


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_kvcache_blocks": 10**8}, "num_kvcache_blocks=100000000 .*gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0.001}, "raise gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0.001, "num_kvcache_blocks": 100}, "gpu_memory_utilization"),
    ],
    ids=str,
)
def test_too_much_is_an_error_that_names_the_option_and_leaves_nothing_behind(options, name):
    """An out-of-memory error from PyTorch says neither what to lower nor by how much, and its memory stays taken."""
    with demo() as llm:  # loads everything that is loaded once
        expected = llm.generate("Count", SamplingParams(0.0, 5, ignore_eos=True), use_tqdm=False)[0].token_ids
    before = free_memory()
    with pytest.raises(RuntimeError, match=name):
        demo(**options)
    assert before - free_memory() < 300 * MIB
    with demo() as llm:
        assert llm.generate("Count", SamplingParams(0.0, 5, ignore_eos=True), use_tqdm=False)[0].token_ids == expected


# The choice of a backend


@pytest.mark.parametrize(("dtype", "block_size"), [("auto", None), ("float32", None), ("bfloat16", 64)])
def test_auto_takes_a_gpu_backend_and_says_which(caplog, dtype, block_size):
    """A silent fallback to gathered keys would cost most of a GPU's speed."""
    with (
        caplog.at_level(logging.INFO, "nanovllm"),
        LLM(str(MODEL_DIRECTORY), dtype=dtype, kvcache_block_size=block_size, max_num_seqs=4) as llm,
    ):
        runner = llm.engine.runner
        assert runner.settings.device.type == "cuda" and runner.program.backend.name in ("triton", "flash")
        assert f"attention {runner.program.backend.name} with CUDA graphs" in caplog.text
        assert llm.chat(CONVERSATIONS[:1], use_tqdm=False)[0].text == PROBLEMS[0][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "flash", "dtype": "float32", "kvcache_block_size": None}, "bfloat16 or float16, not .*float32"),
        ({"backend": "flash", "dtype": "bfloat16", "kvcache_block_size": 64}, "multiple of 256, not 64"),
        ({"backend": "triton", "kvcache_block_size": 24}, "multiple of 16, not 24"),
    ],
    ids=str,
)
def test_what_a_backend_cannot_do_is_a_value_error(options, message):
    """FlashAttention's own assertion would come with the first step and name no option of the user's."""
    with pytest.raises(ValueError, match=message):
        demo(**options)
