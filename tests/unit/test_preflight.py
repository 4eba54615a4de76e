"""Preflight: an LLM treats prompts as Preflight says."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import astuple
from itertools import chain
from pathlib import Path

import huggingface_hub
import pytest
from support.bad_rows import BAD_ROWS
from support.model_factory import edit_config

import nanovllm.preflight
from nanovllm import LLM, Preflight, PreflightSummary, PromptCheck, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.start import preflight_of

WEIGHTS = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
# The length is that of test_bad_input.py, because the rows' errors name it. The cache is large enough for all rows.
OPTIONS = {"max_model_len": 300}
BAD_PARAMS = {
    "stop token": {"stop_token_ids": [259]},
    "bias": {"logit_bias": {300: 1.0}},
    "allowed": {"allowed_token_ids": [5, 2**31]},
    "bad word": {"bad_words": [[65, 259]]},
    "schema": {"structured_outputs": {"json": {"type": "nothing"}}},
    "regex": {"structured_outputs": {"regex": "(?<=a)b"}},
    "grammar": {"structured_outputs": {"grammar": "start: nowhere"}},
    "choice": {"structured_outputs": {"choice": ["a", "<|im_end|>"]}},
}
GOOD_PARAMS = {
    "stop": {"stop": ["x", "yz"], "max_tokens": 5},
    "bad words": {"bad_words": ["no", [65, 66]]},
    "schema": {"structured_outputs": {"json": {"type": "integer"}}, "max_tokens": 3},
    "choice": {"structured_outputs": {"choice": ["a", "b"]}},
    "scored": {"max_tokens": 0, "prompt_logprobs": 0},
    "until the limit": {"max_tokens": None},
    "several": {"n": 3, "temperature": 1.0, "max_tokens": 4},
}


def make_llm(model=MODEL_DIRECTORY, **options) -> LLM:
    return LLM(model, **{"device": "cpu", "num_kvcache_blocks": 256, "max_num_seqs": 8, **options})


def copied(directory: Path, *left_out: str) -> Path:
    """The bundled model, without some of its files."""
    return Path(shutil.copytree(MODEL_DIRECTORY, directory, ignore=shutil.ignore_patterns(*left_out)))


def prompts_with_shared_prefixes(seed: int, num_prefixes: int, num_prompts: int) -> list[list[int]]:
    """Shuffled prompts. Some end with a block, some are the beginnings of others, and some have the same blocks in
    another order."""
    rng = random.Random(seed)
    blocks = [[rng.randrange(256) for _ in range(64)] for _ in range(4)]
    prefixes = [
        list(chain.from_iterable(rng.choices(blocks, k=6)))[: rng.randrange(10, 385)] for _ in range(num_prefixes)
    ]
    prompts = []
    for _ in range(num_prompts):
        prefix = rng.choice(prefixes)
        cut = rng.choice((len(prefix), 64, 128, rng.randrange(1, 400)))
        prompts.append(prefix[:cut] + [rng.randrange(256) for _ in range(rng.choice((0, 1, 40, 150)))])
    return prompts


def num_shared(prompts: list[list[int]], scored: tuple[int, ...] = ()) -> int:
    """The definition, written plainly: whole blocks that an earlier prompt begins with, and never the last token. A
    scored prompt shares no tokens.
    """
    seen, total = set(), 0
    for index, prompt in enumerate(prompts):
        blocks = [tuple(prompt[:end]) for end in range(64, len(prompt) + 1, 64)]
        if index not in scored:
            total += max((len(block) for block in blocks if block in seen and len(block) < len(prompt)), default=0)
        seen.update(blocks)
    return total


# Rows


@pytest.fixture(scope="module")
def llm():
    with make_llm(**OPTIONS) as llm:
        yield llm


def assert_as_generated(preflight: Preflight, llm: LLM, prompts: list, params: list[SamplingParams]) -> None:
    checks = preflight.check(prompts, params)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [check.error for check in checks] == [output.error for output in outputs]
    assert [check.num_prompt_tokens for check in checks] == [output.num_prompt_tokens for output in outputs]


def test_the_errors_are_those_that_generate_returns(llm):
    rows = [row for kind, (row, _) in BAD_ROWS.items() if kind != "beyond the cache"]
    prompts = [*rows, *["Well"] * (len(BAD_PARAMS) + len(GOOD_PARAMS)), "", "Fine", {"prompt": "Fine"}, [65] * 299]
    params = [GREEDY] * len(rows)
    params += [SamplingParams(**each) for each in (*BAD_PARAMS.values(), *GOOD_PARAMS.values())]
    # Preflight and LLM give the same one of two reasons: the last prompts are empty, or good.
    params += [SamplingParams(**BAD_PARAMS["schema"]), GREEDY, GREEDY, SamplingParams(max_tokens=None)]
    preflight = Preflight(MODEL_DIRECTORY, **OPTIONS)
    assert_as_generated(preflight, llm, prompts, params)
    assert preflight.summary().num_prompts == len(prompts)
    assert preflight.summary().num_errors == len(rows) + len(BAD_PARAMS) + 1


def test_a_model_without_a_tokenizer_refuses_the_same_rows(tmp_path):
    bare = copied(tmp_path / "bare", *TOKENIZER)
    kinds = [{}, {"stop": "x"}, {"bad_words": ["no"]}, {"bad_words": [[65]]}, {"structured_outputs": {"choice": ["a"]}}]
    params = [SamplingParams(max_tokens=2, **each) for each in (*kinds, {})]
    with make_llm(bare) as llm:
        preflight = Preflight(bare)
        assert_as_generated(preflight, llm, [*[[65, 66]] * len(kinds), "text"], params)
        assert preflight.get_tokenizer() is None is llm.get_tokenizer()
    # Stop string, bad word, choice and text.
    assert preflight.summary().num_errors == 4


def test_what_only_the_cache_can_tell_is_no_error():
    with make_llm(num_kvcache_blocks=16, kvcache_block_size=16, **OPTIONS) as llm:
        (output,) = llm.generate([[65] * 252], SamplingParams(max_tokens=6), use_tqdm=False)
    assert "KV cache blocks" in output.error
    assert Preflight(MODEL_DIRECTORY, **OPTIONS).check([65] * 252, SamplingParams(max_tokens=6))[0].error is None


def test_no_more_tokens_are_generated_than_it_says_and_so_many_may_be(llm):
    kinds = [{}, {"max_tokens": 7}, {"max_tokens": None}, {"n": 3, "max_tokens": 5}, {"n": 2, "max_tokens": None}]
    params = [SamplingParams(ignore_eos=True, **each) for each in kinds]
    params += [SamplingParams(max_tokens=0, prompt_logprobs=0), SamplingParams(stop_token_ids=[259])]
    prompts = [[65] * length for length in (290, 5, 280, 298, 260, 9, 9)]
    checks = Preflight(MODEL_DIRECTORY, **OPTIONS).check(prompts, params)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    generated = [sum(len(each.token_ids) for each in output.outputs) for output in outputs]
    assert [check.max_num_new_tokens for check in checks] == generated == [10, 7, 20, 6, 80, 0, 0]


def test_prompts_and_parameters_are_those_of_generate():
    preflight = Preflight(MODEL_DIRECTORY)
    assert preflight.check("Hi", GREEDY) == [PromptCheck(2, 2, None)]
    assert preflight.check([72, 105], GREEDY) == [PromptCheck(2, 2, None)]
    assert preflight.check(iter(["Hi", {"prompt_token_ids": [1]}]), [GREEDY, GREEDY]) == [
        PromptCheck(2, 2, None),
        PromptCheck(1, 2, None),
    ]
    assert preflight.check([]) == []
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        preflight.check(["Hi", "Ho"], [GREEDY])
    with pytest.raises(TypeError, match="prompts must be a string"):
        preflight.check(5)
    assert preflight.summary().num_prompts == 4


# The summary


@pytest.mark.parametrize("seed", range(4))
def test_what_was_shared_is_every_block_that_an_earlier_prompt_begins_with(seed):
    prompts = prompts_with_shared_prefixes(seed, num_prefixes=5, num_prompts=60)
    scored = tuple(random.Random(seed).sample(range(60), 10))
    params = [SamplingParams(max_tokens=1, prompt_logprobs=0 if index in scored else None) for index in range(60)]
    preflight = Preflight(MODEL_DIRECTORY)
    preflight.check(prompts, params)
    summary = preflight.summary()
    assert summary.num_shared_tokens == num_shared(prompts, scored) > 1000
    assert summary.num_distinct_prefixes == len({tuple(prompt[:64]) for prompt in prompts if len(prompt) >= 64})
    assert summary.expected_hit_rate == summary.num_shared_tokens / sum(map(len, prompts))


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 64, "max_num_batched_tokens": 500}], ids=str)
def test_the_expected_hit_rate_is_the_one_that_an_llm_has(options):
    """The LLM runs them in another order, so a prompt that ends with a block may share one block more or less."""
    prompts = prompts_with_shared_prefixes(9, num_prefixes=6, num_prompts=80)
    preflight = Preflight(MODEL_DIRECTORY)
    preflight.check(prompts, GREEDY)
    with make_llm(num_kvcache_blocks=800, **options) as llm:
        llm.generate(prompts, GREEDY, use_tqdm=False)
        found = llm.metrics()["prefix_cache_hit_rate"]
    assert preflight.summary().expected_hit_rate == pytest.approx(found, abs=0.005)
    assert 0.3 < found < 0.9


def test_the_summary_does_not_depend_on_the_pieces():
    prompts = [*prompts_with_shared_prefixes(1, num_prefixes=20, num_prompts=300), "", "text", [65] * 2000]
    whole, pieces = Preflight(MODEL_DIRECTORY), Preflight(MODEL_DIRECTORY)
    checks = whole.check(prompts, GREEDY)
    assert checks == [check for start in range(0, 303, 7) for check in pieces.check(prompts[start : start + 7], GREEDY)]
    assert whole.summary() == pieces.summary()


def test_prompts_that_cannot_run_count_only_as_such():
    preflight = Preflight(MODEL_DIRECTORY, **OPTIONS)
    assert astuple(preflight.summary()) == (0, 0, 0, 0, 0, 0, 0, 0.0)
    preflight.check([[1] * 500, [2] * 100, [1] * 90, [2] * 100, ""], GREEDY)
    assert preflight.summary() == PreflightSummary(
        num_prompts=5,
        num_errors=2,
        num_prompt_tokens=290,
        longest_prompt=100,
        max_num_new_tokens=6,
        num_distinct_prefixes=2,
        num_shared_tokens=64,
        expected_hit_rate=64 / 290,
    )


def test_beyond_the_blocks_that_it_remembers_the_hit_rate_is_a_lower_bound(monkeypatch):
    monkeypatch.setattr(nanovllm.preflight, "MAX_KNOWN_BLOCKS", 3)
    preflight = Preflight(MODEL_DIRECTORY)
    first, second = [1] * 130, [2] * 200  # two full blocks, and three
    preflight.check([first, second, first, second, [3] * 64, [3] * 65], GREEDY)
    summary = preflight.summary()
    assert (summary.num_shared_tokens, summary.num_distinct_prefixes) == (128 + 64, 2)
    assert len(preflight._prefixes._known) == 3


# The model


def test_its_options_and_defaults_are_those_of_llm(tmp_path):
    recommended = {"do_sample": True, "temperature": 0.7, "min_new_tokens": 100, "typical_p": 0.9}
    directory = copied(tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(recommended))
    for options in ({}, {"max_model_len": 77}, {"tokenizer": MODEL_DIRECTORY}):
        preflight = Preflight(directory, **options)
        with make_llm(directory, **options) as llm:
            assert preflight.max_model_len == llm.engine.info.max_model_len
            assert preflight.get_default_sampling_params() == llm.get_default_sampling_params()
            assert preflight.check("Hi") == preflight.check("Hi", llm.get_default_sampling_params())
            assert preflight.get_tokenizer()("é")["input_ids"] == llm.get_tokenizer()("é")["input_ids"]


def test_a_very_long_model_has_llms_default_length(tmp_path):
    edit_config(directory := copied(tmp_path / "model"), max_position_embeddings=100_000)
    assert Preflight(directory).max_model_len == 32768
    assert Preflight(directory, max_model_len=50_000).max_model_len == 50_000


def test_no_weight_is_needed_or_fetched(tmp_path, monkeypatch):
    directory = copied(tmp_path / "model", WEIGHTS)
    assert Preflight(directory).check("Hi", GREEDY) == [PromptCheck(2, 2, None)]
    wanted = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **options: wanted.append((args, options)) or directory
    )
    assert Preflight("org/name", revision="v1").check("Hi", GREEDY)[0].error is None
    ((names, options),) = wanted
    assert (names, options["revision"]) == (("org/name",), "v1")
    assert not any("safetensors" in pattern for pattern in options["allow_patterns"])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"model": "/nowhere"}, ValueError, "model '/nowhere' is not a directory"),
        ({"tokenizer": "/nowhere"}, ValueError, "tokenizer '/nowhere' is not a directory"),
        ({"max_model_len": 1}, ValueError, "max_model_len must be at least 2"),
        ({"max_model_len": 1025}, ValueError, "max_model_len=1025 exceeds the 1024 tokens"),
        ({"max_seq_len": 9}, TypeError, "unknown option 'max_seq_len'; did you mean max_model_len"),
        ({"device": "cpu"}, TypeError, "unknown option 'device'; the options are model, revision, tokenizer"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(options, kind, message):
    with pytest.raises(kind, match=message):
        Preflight(**{"model": MODEL_DIRECTORY, **options})


def test_it_starts_no_engine_and_wrong_options_import_no_torch():
    program = (
        "import sys, nanovllm\n"
        "try:\n"
        "    nanovllm.Preflight('m', max_model_len=0)\n"
        "except ValueError:\n"
        "    print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))\n"
        "nanovllm.Preflight(sys.argv[1]).check('Hi')\n"
        "print('nanovllm.runner.model_runner' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(MODEL_DIRECTORY)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["[]", "False"]


def test_the_models_recommendation_may_be_left_out(tmp_path):
    """A job, whose defaults come from here, took it all the same."""
    shutil.copytree(MODEL_DIRECTORY, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"max_new_tokens": 3}')
    for choice, max_tokens in (("auto", 3), ("vllm", 64)):
        preflight = Preflight(tmp_path / "model", generation_config=choice)
        assert preflight.get_default_sampling_params().max_tokens == max_tokens
        options = JobOptions("in", "out", str(tmp_path / "model"), engine={"generation_config": choice})
        assert preflight_of(options).get_default_sampling_params().max_tokens == max_tokens
