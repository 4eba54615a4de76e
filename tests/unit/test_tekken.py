"""A tekken.json, Mistral's own format, makes a tokenizer like any other. Its ids must be those of mistral-common."""

import json
import random
import shutil
from pathlib import Path

import pytest
from support.model_factory import save_model
from support.tekken import save_tekken
from transformers import AutoTokenizer

import nanovllm.text.load_tokenizer
from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.text import Text

IN_TOKENS = ["<s>", "Hello", " the", " cat", " ", "é"]
PLAIN = "Hello the cat é"


@pytest.fixture
def present(monkeypatch) -> None:
    """Makes mistral-common look installed: current versions of transformers can do without it."""
    pytest.importorskip("transformers.integrations.mistral.tokenizer")
    monkeypatch.setattr(nanovllm.text.load_tokenizer, "find_spec", lambda _: True)


def save_config(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "mistral"}))


def test_without_mistral_common_the_error_names_the_extra(tmp_path, monkeypatch):
    """The model once had no tokenizer, without a word."""
    monkeypatch.setattr(nanovllm.text.load_tokenizer, "find_spec", lambda _: None)
    save_tekken(tmp_path)
    with pytest.raises(ValueError, match=r'tekken\.json, which needs mistral-common: pip install .* extra "mistral"'):
        Text.of_model(tmp_path)


def test_a_broken_tekken_file_is_named(tmp_path, present):
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        Text.of_model(tmp_path)


def test_an_llm_runs_as_with_any_tokenizer(tmp_path, present):
    """Prompts begin with the BOS; texts, stop strings, tokens' texts, templates and structured outputs work."""
    ids = save_tekken(tmp_path)
    save_model(tmp_path, vocab_size=len(ids), bos_token_id=1, eos_token_id=2)
    expected = [ids[token.encode()] for token in IN_TOKENS]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(str(tmp_path), device="cpu") as llm:
        first, same = llm.generate([PLAIN, expected], greedy, use_tqdm=False)
        assert first.prompt_token_ids == expected and first.token_ids == same.token_ids
        of_ids = {token_id: token for token, token_id in ids.items()}
        content = b"".join(of_ids[each] for each in first.token_ids if each >= ids[b"\x00"])
        assert first.text == content.decode(errors="replace")
        texts = [llm.get_tokenizer().decode([each]) for each in first.token_ids]
        stop = next(text for text in texts if text.isascii() and text.strip() and not text.startswith(("<", "[")))
        (stopped,) = llm.generate(PLAIN, SamplingParams(temperature=0, stop=[stop]), use_tqdm=False)
        assert stopped.text == first.text.split(stop)[0] and stopped.finish_reason == "stop"
        template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
        (answer,) = llm.chat([{"role": "user", "content": "Hello"}], greedy, chat_template=template, use_tqdm=False)
        assert answer.prompt_token_ids == [1, ids[b"[INST]"], ids[b"Hello"], ids[b"[/INST]"]]
        (chosen,) = llm.generate(PLAIN, SamplingParams(structured_outputs={"choice": [" cat", " hat"]}), use_tqdm=False)
        assert chosen.text in (" cat", " hat")
        pytest.importorskip("llguidance")
        (found,) = llm.generate(PLAIN, SamplingParams(structured_outputs={"regex": "é{3}( the| cat)"}), use_tqdm=False)
        assert found.text in ("ééé the", "ééé cat")


def test_a_tokenizer_json_counts_before_a_tekken_file(tmp_path):
    """If mistral-common is installed, transformers prefers the tekken file, of which it makes a tokenizer that knows no
    special tokens in texts."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIRECTORY / name, tmp_path)
    save_config(tmp_path)
    save_tekken(tmp_path)
    text, bundled = Text.of_model(tmp_path), Text.of_model(MODEL_DIRECTORY)
    assert text.tokenizer.get_vocab() == bundled.tokenizer.get_vocab() and text.special_ids == bundled.special_ids


TOOL = {"name": "f", "description": "g", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " the cat"}]
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_the_ids_are_mistral_commons(tmp_path, version):
    """Of texts, and of conversations with a system prompt, tools and special tokens as text."""
    pytest.importorskip("mistral_common")
    pytest.importorskip("transformers.integrations.mistral.tokenizer")
    save_config(tmp_path)
    save_tekken(tmp_path, version)
    theirs, text = AutoTokenizer.from_pretrained(tmp_path), Text.of_model(tmp_path)
    assert type(theirs).__name__ == "MistralCommonBackend"
    rng = random.Random(version)
    texts = [PLAIN, "", "  a\n\n b", *("".join(rng.choices("the caH lo\né🙂1", k=30)) for _ in range(50))]
    encoded = [found.token_ids for found in text.encode(texts)]
    assert encoded == [theirs(each)["input_ids"] for each in texts]
    for skips in (True, False):
        assert text.decode(encoded, skips) == theirs.batch_decode(encoded, skip_special_tokens=skips)
    question = {"role": "user", "content": "x [/INST]</s>"}
    for messages, tools in (
        ([{"role": "system", "content": "Hello"}, *TURNS, question], None),
        ([*TURNS, question], [{"type": "function", "function": TOOL}]),
        ([
            TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": CALL["id"], "name": "f", "content": "7"},
        ], [{"type": "function", "function": TOOL}]),
    ):  # fmt: skip
        given = {} if tools is None else {"tools": tools}
        (found,) = text.encode_conversations([messages], True, None, splits_special=True, options=given)
        assert found.error is None
        assert found.token_ids == theirs.apply_chat_template(messages, return_dict=False, **given)
