"""lighteval on nanovllm gives what the LLM gives when it is called directly."""

import pytest
from support.harness_texts import LONG, OPTIONS, SUM, TEMPLATES, WORD, without_tokenizer

from nanovllm import SamplingParams
from nanovllm.demo import MODEL_DIRECTORY


@pytest.fixture(scope="module")
def module():
    pytest.importorskip("lighteval.utils.cache_management")
    from nanovllm.integrations import lighteval

    return lighteval


@pytest.fixture(scope="module")
def model(module, tmp_path_factory):
    options = {"model_name": str(MODEL_DIRECTORY), "options": OPTIONS}
    model = module.NanovllmModel(module.NanovllmConfig(**options, cache_dir=str(tmp_path_factory.mktemp("cache"))))
    model._cache = None  # it needs the tasks of a pipeline
    model.uses_chat_template = model.prompt_manager.use_chat_template = False
    yield model
    model.cleanup()


def make_doc(query: str, choices: list[str] | None = None, **fields):
    from lighteval.tasks.requests import Doc

    return Doc(query=query, choices=choices or [], gold_index=0, **fields)


def test_choices_are_scored_as_by_llm_loglikelihood(model):
    docs = [make_doc(SUM, [" 42", " 43", " 4"]), make_doc(WORD, [" tenalp"]), make_doc("", ["Q:", "A"])]
    found = model.loglikelihood(docs)
    pairs = [(doc.query, choice) for doc in docs for choice in doc.choices]
    contexts, choices = zip(*pairs, strict=True)
    scores = model.llm.loglikelihood(list(contexts), list(choices), use_tqdm=False)
    totals = [total for response in found for total in response.logprobs]
    assert totals == pytest.approx([score.total for score in scores], abs=1e-5)
    assert [response.argmax_logits_eq_gold for response in found][:2] == [[True, False, True], [True]]
    assert found[0].output_tokens == [model.tok_encode(choice) for choice in docs[0].choices]


def test_a_long_context_loses_tokens_on_the_left(model):
    [response] = model.loglikelihood([make_doc(LONG + SUM, [" 42"])])
    [score] = model.llm.loglikelihood([model.tok_encode(LONG + SUM)[-93:]], [" 42"], use_tqdm=False)
    assert response.logprobs == pytest.approx([score.total], abs=1e-5)


def test_generation_is_that_of_llm_generate(model):
    docs = [make_doc(SUM, generation_size=16, stop_sequences=["2"]), make_doc(LONG + WORD, generation_size=20)]
    found = model.greedy_until(docs)
    assert found[0].text == [" 4"]
    prompt = model.tok_encode(LONG + WORD)[-76:]
    [output] = model.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert (found[1].text, found[1].output_tokens) == ([output.text], [output.token_ids])
    assert found[1].input_tokens == prompt


def test_a_chat_reaches_templates_of_both_kinds(model, monkeypatch):
    """A template that goes through parts wrote nothing for lighteval's strings."""
    monkeypatch.setattr(model, "uses_chat_template", True)
    monkeypatch.setattr(model.prompt_manager, "use_chat_template", True)
    doc = make_doc("What is 12 + 30?", ["42", "43"], generation_size=4)
    for template in TEMPLATES:
        monkeypatch.setattr(model._tokenizer, "chat_template", template)
        assert model.greedy_until([doc])[0].input == model.loglikelihood([doc])[0].input == doc.query


def test_rolling_scores_the_whole_query(model):
    token_ids = [model._prefix_id, *model.tok_encode(LONG)]
    whole = sum(
        model.llm.loglikelihood([token_ids[first : first + 1]], [token_ids[first + 1 : first + 96]], use_tqdm=False)[
            0
        ].total
        for first in range(0, len(token_ids) - 1, 95)
    )
    short, long = model.loglikelihood_rolling([make_doc(SUM), make_doc(LONG)])
    assert long.logprobs == pytest.approx([whole], abs=1e-3)
    assert [each for ids in long.output_tokens for each in ids] == token_ids[1:]
    [score] = model.llm.loglikelihood([""], [SUM], use_tqdm=False)
    assert short.logprobs == pytest.approx([score.total], abs=1e-4)


def test_what_cannot_work_is_named(model, module, tmp_path):
    with pytest.raises(ValueError, match=r"96 new tokens leave no room .* max_model_len=96"):
        model.greedy_until([make_doc(SUM, generation_size=96)])
    with pytest.raises(ValueError, match="set a temperature above 0"):
        model.greedy_until([make_doc(SUM, generation_size=4, num_samples=2)])
    with pytest.raises(ValueError, match="no tokenizer"):
        module.NanovllmModel(module.NanovllmConfig(model_name=without_tokenizer(tmp_path), options=OPTIONS))


def test_lighteval_finds_the_model_in_its_file_and_caches_elsewhere(module, tmp_path):
    from lighteval.models.custom.custom_model import CustomModelConfig
    from lighteval.models.model_loader import load_model

    config = CustomModelConfig(
        model_name=str(MODEL_DIRECTORY), model_definition_file_path=module.__file__, cache_dir=str(tmp_path)
    )
    model = load_model(config)
    try:
        assert type(model).__name__ == "NanovllmModel"
        assert model._cache.cache_dir.is_relative_to(tmp_path)
    finally:
        model.cleanup()
