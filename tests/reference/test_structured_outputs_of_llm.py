"""Completions under choices, schemas, regular expressions and grammars, through the whole engine."""

import json
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.long import some
from support.model_factory import save_model
from support.schemas import make_schemas
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.sampling_params import completion_seed

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
# They cover one rank and two, with and without overlap, chunks, preemption, and the plain backend.
SCHEDULES = [
    {},
    {"overlap": False, "max_num_batched_tokens": 9},
    {"num_kvcache_blocks": 24, "kvcache_block_size": 8, "max_model_len": 96, "max_num_seqs": 12},
    {"enable_prefix_caching": False, "kvcache_block_size": 4, "attention_backend": "torch"},
    {"tensor_parallel_size": 2},
]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """An untrained model, with the bundled model's tokenizer and more ids than that has."""
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, seed=1, vocab_size=301)
    for path in MODEL_DIRECTORY.iterdir():
        if "token" in path.name:
            shutil.copy(path, directory)
    return directory


def is_valid(text: str, schema) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=CHECKER)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def random_params(rng: random.Random, max_tokens: int, **values) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]) if values.get("n", 1) == 1 else 1.0,
        top_p=rng.choice([1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 0, 3]),
        seed=rng.randrange(100),
        max_tokens=max_tokens,
        **values,
    )


@pytest.mark.parametrize("options", some([{}, {"overlap": False}, {"tensor_parallel_size": 2}], {}), ids=str)
@pytest.mark.parametrize("is_trained", [True, False])
def test_every_completion_is_of_its_schema_or_was_cut(random_model, is_trained, options, count):
    rng = random.Random(f"{is_trained} {options}")
    schemas = make_schemas(count(40, 200)) if not options else make_schemas(40, seed=1)
    params = [
        random_params(rng, 120, n=rng.choice([1, 1, 3]), structured_outputs=StructuredOutputsParams(json=schema))
        for schema in schemas
    ]
    prompts = [f"JSON, {row}:" for row in range(len(schemas))]
    directory = MODEL_DIRECTORY if is_trained else random_model
    with LLM(directory, device="cpu", num_kvcache_blocks=600, max_model_len=256, max_num_seqs=64, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    num_valid = num_cut = 0
    for schema, out in zip(schemas, outputs, strict=True):
        assert out.error is None, (schema, out.error)
        for each in out.outputs:
            if each.finish_reason == "length":
                num_cut += 1
                assert len(each.token_ids) == 120
            else:
                assert each.finish_reason == "stop" and is_valid(each.text, schema), (schema, each)
                num_valid += 1
    print(f"{num_valid} valid, {num_cut} cut")
    assert num_valid > num_cut / 4


@pytest.mark.parametrize("num_ranks", some([1, 2], 2))
def test_a_step_in_flight_whose_constrained_rows_have_all_ended_gets_no_masks(num_ranks):
    """Several ranks once took the masks of no rows for masks without words, and the LLM could not be used again."""
    params = [
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    ]
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=40, tensor_parallel_size=num_ranks) as llm:
        chosen, free = llm.generate(["Is it so?", "1 + 1 ="], params, use_tqdm=False, raise_on_error=True)
    assert chosen.text in ("yes", "no") and len(chosen.token_ids) < 19 and len(free.token_ids) == 20


@pytest.mark.parametrize("options", some(SCHEDULES, *SCHEDULES[1:3]), ids=str)
def test_neighbours_and_schedules_change_nothing(options):
    """Rows under constraints run beside rows without any, with siblings, stop strings and log-probabilities."""
    rng = random.Random(3)
    kinds = [
        {"json": make_schemas(8)[5]}, {"regex": "[a-f]{2,9}(-[0-9]{2})?"}, {"choice": ["yes", "no", "maybe"]},
        {"grammar": 'start: "<" /[a-z]{1,12}/ ">"'}, None, {"json_object": True}, None,
    ]  # fmt: skip
    params = []
    for row, kind in enumerate(kinds * 3):
        values = {} if kind is None else {"structured_outputs": StructuredOutputsParams(**kind)}
        values |= {"n": 2} if row % 4 == 1 else {}
        values |= {"stop": ["-", "z"]} if row % 5 == 2 else {}
        values |= {"logprobs": 1, "logprobs_mode": "processed"} if row % 3 == 0 else {}
        params.append(random_params(rng, rng.choice([3, 20, 40]), **values))
    prompts = [f"{'Prefix of all rows. ' * (row % 3)}Row {row}:" for row in range(len(params))]
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=256) as llm:
        alone = []
        for prompt, each in zip(prompts, params, strict=True):
            seeds = [completion_seed(each.seed, index) for index in range(each.n)]
            rows = [llm.generate(prompt, replace(each, n=1, seed=seed), use_tqdm=False)[0] for seed in seeds]
            alone.append([(row.text, row.token_ids, row.finish_reason) for row in rows])
    with LLM(MODEL_DIRECTORY, device="cpu", **{"num_kvcache_blocks": 256, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if options.get("num_kvcache_blocks"):
            assert llm.metrics()["num_preemptions"] > 0
    for row, out in enumerate(outputs):
        assert [(each.text, each.token_ids, each.finish_reason) for each in out.outputs] == alone[row], row
        if params[row].logprobs is not None:
            assert all((each.logprobs.of_tokens <= 1e-6).all() for each in out.outputs)
    for out, each in zip(outputs, params, strict=True):
        given = each.structured_outputs
        for completion in out.outputs:
            if given is None or completion.finish_reason == "length" or each.stop:
                continue
            if given.regex is not None:
                assert re.fullmatch(given.regex, completion.text)
            if given.choice is not None:
                assert completion.text in given.choice


def test_greedy_over_single_tokens_is_the_choice_that_scores_best():
    choices = ["1", "2", "3", "a", "b", "Z"]
    prompts = [f"Sum: {row}+1\n" for row in range(30)] + [f"Reverse: {chr(97 + row)}b\n" for row in range(20)]
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=choices))
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=256) as llm:
        found = [out.text for out in llm.generate(prompts, params, use_tqdm=False)]
        pairs = [(prompt, choice) for prompt in prompts for choice in choices]
        scores = [row.total for row in llm.loglikelihood(*map(list, zip(*pairs, strict=True)), use_tqdm=False)]
    best = np.array(scores).reshape(len(prompts), -1).argmax(1)
    assert found == [choices[index] for index in best]
    assert len(set(found)) > 2


def test_a_choice_ends_where_it_is_complete_and_needs_no_end_token():
    params = SamplingParams(seed=1, max_tokens=50, structured_outputs=StructuredOutputsParams(choice=["up", "down"]))
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        outputs = llm.generate(["Where?"] * 20, [replace(params, seed=row) for row in range(20)], use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    assert {out.text for out in outputs} == {"up", "down"}
    assert all(out.finish_reason == "stop" for out in outputs)
    assert all(out.token_ids == tokenizer(out.text)["input_ids"] for out in outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_choice_that_begins_another_ends_or_goes_on_as_the_masked_model_says(temperature):
    """The masked reference: the model's probabilities of what may come at a place, divided by their sum."""
    choices, values = ["a", "ab", "b", "abba"], {"logprobs": 5, "logprobs_mode": "processed"}
    structured = StructuredOutputsParams(choice=choices)
    params = [
        SamplingParams(temperature=temperature, seed=seed, structured_outputs=structured, **values)
        for seed in range(40 if temperature else 1)
    ]
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=256) as llm:
        prompt, eos = llm.get_tokenizer()("Reverse: ba\n")["input_ids"], sorted(llm.engine.eos_token_ids)
        outputs = [llm.generate([prompt], each, use_tqdm=False)[0] for each in params]
        may_come = {b"": b"ab", b"a": [*b"b", *eos], b"ab": [*b"b", *eos], b"abb": b"a"}
        for begun, token_ids in may_come.items():
            pairs = [[*prompt, *begun]] * len(token_ids), [[each] for each in token_ids]
            rows = llm.loglikelihood(*pairs, use_tqdm=False)
            scores = np.array([row.total for row in rows])
            may_come[begun] = dict(zip(token_ids, scores - np.logaddexp.reduce(scores), strict=True))
    for out in outputs:
        assert out.finish_reason == "stop" and out.text in choices
        ended = out.token_ids[-1] in eos
        assert ended is (out.text in ("a", "ab")) and bytes(out.token_ids[: -1 if ended else None]).decode() == out.text
        for place, found in enumerate(out.outputs[0].logprobs):
            expected = may_come[bytes(out.token_ids[:place])]
            possible = {each: logprob.logprob for each, logprob in found.items() if logprob.logprob > -1e9}
            assert possible == pytest.approx(expected, abs=2e-5), out.text
    assert temperature == 0 or {out.text for out in outputs} >= {"a", "ab", "b"}


@pytest.mark.parametrize(
    "options", some([{}, {"overlap": False}, {"tensor_parallel_size": 2}], {}, {"overlap": False}), ids=str
)
def test_min_tokens_bans_the_end_as_long_as_the_form_can_go_on(options):
    """Where the form ends earlier, the completion does, too: it is whole, and stopped."""
    cases = {  # form: (min_tokens, other parameters, expected text)
        ("choice", ("a", "ab")): (2, {}, "ab"),
        ("choice", ("up",)): (10, {}, "up"),
        ("regex", "[0-9]{1,3}"): (3, {}, "[0-9]{3}"),
        ("regex", "(yes|no)( sir)*"): (6, {}, "(yes|no)( sir)+"),
        ("regex", "x"): (5, {}, "x"),
        ("json", '{"type":"integer","minimum":1,"maximum":999}'): (3, {}, "[1-9][0-9]{2}"),
        ("json", '{"const":1}'): (9, {}, "1"),
        ("regex", "[ab]{6}"): (3, {"stop_token_ids": [ord("b")]}, "aaa(a*b|aaa)"),
        ("choice", ("bbbb",)): (2, {"stop_token_ids": [ord("b")]}, "bbb"),  # a stop token before that is only content
        ("regex", "[ab]{6}b"): (4, {"stop": "b"}, "[ab]{4}a*"),
    }
    params = [
        SamplingParams(temperature=5.0, seed=seed, min_tokens=least, structured_outputs={kind: form}, **values)
        for (kind, form), (least, values, _) in cases.items()
        for seed in range(8)
    ]
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=256, **options) as llm:
        outputs = llm.generate(["Is it?"] * len(params), params, use_tqdm=False)
    for index, out in enumerate(outputs):
        (_, form), (*_, expected) = list(cases.items())[index // 8]
        assert out.error is None and out.finish_reason == "stop", (form, out)
        assert re.fullmatch(expected, out.text), (form, out)


def test_a_constraint_that_fails_before_min_tokens_ends_its_row_at_once():
    params = SamplingParams(min_tokens=20, structured_outputs=StructuredOutputsParams(grammar='start: "a" start'))
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        (out,) = llm.generate("x", params, use_tqdm=False)
    assert out.finish_reason == "error" and "Too many items" in out.error and len(out.token_ids) == 1


@pytest.mark.parametrize("num_added", [1, 40])
def test_a_tokenizer_may_have_more_tokens_than_the_model(tmp_path, num_added):
    """Gemma 3's has one more, and fine-tunes add tokens. Each schema once was an error with such a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.add_tokens([f'"name {number}"' for number in range(num_added - 1)])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    forms = [{"json": schema} for schema in make_schemas(6)]
    forms += [{"regex": '"name 1"'}, {"choice": ["yes", "no"]}, {"json_object": True}]
    params = [
        SamplingParams(temperature=1.0, seed=7, max_tokens=100, structured_outputs=StructuredOutputsParams(**form))
        for form in forms
    ]
    found = []
    for each in (MODEL_DIRECTORY, tmp_path):
        with LLM(MODEL_DIRECTORY, tokenizer=str(each), device="cpu", num_kvcache_blocks=256) as llm:
            found.append(llm.generate(["JSON:"] * len(params), params, use_tqdm=False))
    assert [out.error for out in found[1]] == [None] * len(params)
    assert [out.token_ids for out in found[1]] == [out.token_ids for out in found[0]]


def test_what_cannot_be_compiled_is_the_error_of_its_row():
    given = [
        {"json": {"type": "object", "not": {}}}, {"regex": "(?=a)b"}, {"grammar": "nonsense"}, {"choice": ["fine"]},
        {"regex": "[0-9]"}, {"json": {"type": "string", "pattern": "(a)\\1"}}, {"json": {"enum": ["x"] * 200_000}},
    ]  # fmt: skip
    params = [SamplingParams(structured_outputs=StructuredOutputsParams(**each), max_tokens=20) for each in given]
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        outputs = llm.generate(["x"] * 7, params, use_tqdm=False)
        with pytest.raises(ValueError, match="prompt 1: "):
            llm.generate(["x"] * 5, [params[3], *params[:4]], use_tqdm=False, raise_on_error=True)
    assert [out.finish_reason for out in outputs] == ["error"] * 3 + ["stop"] * 2 + ["error"] * 2
    assert outputs[3].text == "fine" and outputs[4].text in "0123456789"
    for out, says in zip(
        outputs[:3] + outputs[5:], ("not", "look-around", "GBNF", "backreferences", "too big"), strict=True
    ):
        assert says in out.error


def test_a_constraint_that_fails_while_it_runs_is_the_error_of_its_row():
    """llguidance notices some only at their limits; the tokens so far are kept, and the neighbours go on."""
    params = [
        SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(grammar='start: "a" start')),
        SamplingParams(max_tokens=60, seed=1, ignore_eos=True),
    ]
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64, max_model_len=1024) as llm:
        outputs = llm.generate(["x", "y"], [replace(each, max_tokens=900) for each in params[:1]] + params[1:])
    assert len(outputs[1].token_ids) == 60 and outputs[1].error is None
    assert outputs[0].finish_reason in ("error", "length")
    if outputs[0].finish_reason == "error":
        assert "the structured output cannot go on" in outputs[0].error and set(outputs[0].token_ids)


def test_bans_that_leave_nothing_of_the_constraint_are_the_error_of_the_row():
    structured = StructuredOutputsParams(choice=["ab"])
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64) as llm:
        outputs = llm.generate(["x"], SamplingParams(structured_outputs=structured, bad_words=["a"]), use_tqdm=False)
    assert outputs[0].finish_reason == "error" and "no token is left to sample" in outputs[0].error


def test_an_entry_forgets_the_masks_of_its_last_tenant():
    structured = StructuredOutputsParams(choice=["ab"])
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=64, max_num_seqs=1) as llm:
        (expected,) = llm.generate(["Reverse: abc\n"], SamplingParams(temperature=0), use_tqdm=False)
        llm.generate(["x"], SamplingParams(structured_outputs=structured), use_tqdm=False)
        (found,) = llm.generate(["Reverse: abc\n"], SamplingParams(temperature=0, logit_bias={5: 0.0}), use_tqdm=False)
    assert found.token_ids == expected.token_ids


def test_what_contradicts_a_constraint_is_refused():
    with pytest.raises(ValueError, match="structured_outputs says which tokens may come when; leave out allowed_token"):
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), allowed_token_ids=[1])
    with pytest.raises(TypeError, match="structured_outputs must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")
    assert SamplingParams(structured_outputs={"choice": ["a"]}).structured_outputs.choice == ("a",)
