"""lm-evaluation-harness on nanovllm gives what the LLM gives when it is called directly."""

import json
import sys

import numpy as np
import pytest
from support.harness_texts import LONG, OPTIONS, SUM, TEMPLATES, WORD, without_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {directory}/rows.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: {target}
{rest}
"""


def rolled(llm: LLM, token_ids: list[int], prefix: int, window: int) -> float:
    """The log-probability of a text, in which each token sees as many tokens before it as a full last window holds."""
    total = 0.0
    for first in range(0, len(token_ids), window):
        end = min(first + window, len(token_ids))
        before = ([prefix, *token_ids])[max(end - window, 0) : first + 1]
        total += llm.loglikelihood([before], [token_ids[first:end]], use_tqdm=False)[0].total
    return total


@pytest.fixture(scope="module")
def module():
    pytest.importorskip("lm_eval")
    from nanovllm.integrations import lm_eval

    return lm_eval


@pytest.fixture(scope="module")
def model(module):
    model = module.NanovllmLM(str(MODEL_DIRECTORY), max_gen_toks=16, batch_size=1, **OPTIONS)
    yield model
    model.llm.close()


def requests(kind: str, *arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_scores_are_those_of_llm_loglikelihood(model):
    pairs = [(SUM, " 42"), (SUM, " 43"), ("", " 42"), (WORD + " ", "tenalp"), ("Q: ", "What")]
    found = model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    contexts, continuations = zip(*pairs, strict=True)
    scores = model.llm.loglikelihood(list(contexts), list(continuations), use_tqdm=False)
    assert [total for total, _ in found] == pytest.approx([score.total for score in scores], abs=1e-5)
    assert [is_greedy for _, is_greedy in found] == [score.all_greedy for score in scores]
    assert found[0][1] and not found[1][1]


def test_a_long_context_loses_tokens_on_the_left(model):
    [(total, _)] = model.loglikelihood(requests("loglikelihood", (LONG + SUM, " 42")), disable_tqdm=True)
    token_ids = model.tok_encode(LONG + SUM)
    [score] = model.llm.loglikelihood([token_ids[-93:]], [" 42"], use_tqdm=False)
    assert total == pytest.approx(score.total, abs=1e-5)
    assert len(score.context_token_ids) + len(score.token_ids) == OPTIONS["max_model_len"]


@pytest.mark.parametrize("num_tokens", [1, 94, 95, 96, 190, 191, len(LONG)])
def test_rolling_scores_each_token_once(model, num_tokens):
    text = LONG[:num_tokens]
    [total] = model.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    expected = rolled(model.llm, model.tok_encode(text), model.prefix_token_id, model.max_length)
    assert total == pytest.approx(expected, abs=1e-3)


def test_generation_is_that_of_llm_generate(model):
    arguments = [
        (SUM, {"until": ["\n"], "do_sample": False, "temperature": 0.7}),
        (SUM, {"until": "2"}),
        (WORD, {"until": ["", "al"], "max_gen_toks": 8}),
        (WORD, {"max_new_tokens": 2, "num_beams": 1}),
        (WORD, {"do_sample": True, "temperature": 1.5, "seed": 3, "top_k": 50}),
    ]
    found = model.generate_until(requests("generate_until", *arguments), disable_tqdm=True)
    params = [
        SamplingParams(temperature=0, max_tokens=16, stop="\n"),
        SamplingParams(temperature=0, max_tokens=16, stop="2"),
        SamplingParams(temperature=0, max_tokens=8, stop="al"),
        SamplingParams(temperature=0, max_tokens=2),
        SamplingParams(temperature=1.5, max_tokens=16, seed=3, top_k=50),
    ]
    outputs = model.llm.generate([prompt for prompt, _ in arguments], params, use_tqdm=False)
    assert found == [output.text for output in outputs]
    assert found[:4] == [" 42", " 4", " ten", " t"]


def test_a_long_prompt_loses_tokens_on_the_left(model):
    request = requests("generate_until", (LONG + SUM, {"max_gen_toks": 20}))
    [output] = model.llm.generate(
        [model.tok_encode(LONG + SUM)[-76:]], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False
    )
    assert model.generate_until(request, disable_tqdm=True) == [output.text]


def test_a_special_token_in_until_ends_the_completion(model):
    special = dict(model._special_ids)
    [output] = model.llm.generate([SUM], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    model._special_ids["<fake>"] = output.token_ids[1]  # makes the answer's first digit a special token
    try:
        [text] = model.generate_until(requests("generate_until", (SUM, {"until": ["<fake>"]})))
    finally:
        model._special_ids = special
    assert text.strip() in ("", "4") and text != output.text


def test_thoughts_are_not_part_of_the_answer(model):
    model._think_end = "4"
    try:
        given = requests("generate_until", (SUM, {"until": [" "]}), (SUM, {"until": ["2"]}))
        assert model.generate_until(given, disable_tqdm=True) == ["2", ""]
    finally:
        model._think_end = None


def test_the_chat_template_is_the_tokenizers(model):
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    expected = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert model.apply_chat_template(messages) == expected
    assert model.chat_template(True) == model.tokenizer.chat_template
    started = [*messages, {"role": "assistant", "content": "The sum"}]
    assert model.apply_chat_template(started, add_generation_prompt=False).endswith("The sum")
    assert model.tokenizer_name and "/" not in model.tokenizer_name


def test_contents_reach_templates_of_both_kinds(model, monkeypatch):
    """Some templates write nothing for a list of parts, and others for a string, both without an error."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = np.array(
        [
            {"role": "user", "content": [{"type": "text", "text": "See this"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": "Hi"},
        ]
    )
    for template in TEMPLATES:
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
        assert model.apply_chat_template(history) == 'See this(f {"a": 1})Hi'
        with pytest.raises(ValueError, match="nanovllm reads text only"):
            model.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize(
    ("gen_kwargs", "error", "message"),
    [
        ({"max_gen_toks": 96}, ValueError, "max_gen_toks=96 leaves no room .* max_model_len=96"),
        ({"num_beams": 4}, TypeError, "no beam search"),
        ({"temprature": 1}, TypeError, "did you mean temperature"),
    ],
)
def test_settings_that_cannot_work_are_named(model, gen_kwargs, error, message):
    with pytest.raises(error, match=message):
        model.generate_until(requests("generate_until", (SUM, gen_kwargs)))


def test_a_continuation_that_fills_the_model_is_refused(model):
    with pytest.raises(ValueError, match=r"continuation of 96 tokens leaves no room .* max_model_len=96"):
        model.loglikelihood(requests("loglikelihood", (SUM, LONG[:96])), disable_tqdm=True)


def test_models_that_cannot_work_are_refused(module, tmp_path):
    with pytest.raises(ValueError, match="no tokenizer"):
        module.NanovllmLM(without_tokenizer(tmp_path), **OPTIONS)
    with pytest.raises(TypeError, match="max_model_len"):
        module.NanovllmLM(str(MODEL_DIRECTORY), max_length=64)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"question": f"What is {n} + {2 * n}?", "choices": [str(3 * n), str(3 * n + 1)], "label": 0, "sum": 3 * n}
        for n in range(11, 19)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {
        "choose": ("multiple_choice", "label", "doc_to_choice: choices\nmetric_list: [{metric: acc}]"),
        "answer": (
            "generate_until",
            "' {{sum}}'",
            'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]',
        ),
    }
    for name, (kind, target, rest) in kinds.items():
        text = TASK.format(name=name, directory=tmp_path, kind=kind, target=target, rest=rest)
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_the_harness_knows_the_model_by_its_name_and_caches_its_answers(module, tasks, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    def evaluate():
        results = simple_evaluate(
            model="nanovllm",
            model_args=f"pretrained={MODEL_DIRECTORY},max_model_len=96,num_kvcache_blocks=64",
            device="cpu",
            tasks=["choose", "answer"],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
            use_cache=str(tasks / "answers"),
        )
        return {task: [value for name, value in each.items() if "," in name] for task, each in
                results["results"].items()}  # fmt: skip

    first = evaluate()
    assert first["choose"][0] == first["answer"][0] == 1.0
    for name in ("generate", "loglikelihood"):
        monkeypatch.setattr(LLM, name, None)
    assert evaluate() == first


def test_the_command_is_the_harness_s_own(module, tasks, monkeypatch, capsys):
    options = f"pretrained={MODEL_DIRECTORY},max_model_len=96,num_kvcache_blocks=64"
    command = f"lm_eval --model nanovllm --model_args {options} --device cpu --include_path {tasks} --tasks choose"
    monkeypatch.setattr(sys, "argv", command.split())
    module.main()
    assert "|choose|" in capsys.readouterr().out.replace(" ", "")
