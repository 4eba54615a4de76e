"""How an embedding is made: the files that sentence-transformers writes, before and after version 5.4."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from support.model_factory import make_model, save_demo_model, save_embedder_files

from nanovllm import LLM
from nanovllm.models.directory import find_model
from nanovllm.models.pooling_config import PoolingConfig, read_pooling_config
from nanovllm.models.read_config import load_model_config

OLD, NEW = "sentence_transformers.models", "sentence_transformers.base.modules"
# What 3.4.1 and 6.2.0 write for the same embedder, without what no reader needs.
FILES: dict[str, dict[str, Any]] = {
    "3.4": {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{OLD}.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OLD}.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{OLD}.Normalize"},
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
            "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False,
            "pooling_mode_weightedmean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True,
        },
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "3.4.1"}, "prompts": {"query": "Q: ", "document": ""},
            "default_prompt_name": None, "similarity_fn_name": "cosine",
        },
        "sentence_bert_config.json": {"max_seq_length": 77, "do_lower_case": False},
        "tokenizer_config.json": {"model_max_length": 99},
    },
    "6.2": {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{NEW}.transformer.Transformer"},
            {
                "idx": 1, "name": "1", "path": "1_Pooling",
                "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
            },
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{NEW}.normalize.Normalize"},
        ],
        "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "lasttoken", "include_prompt": True},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "6.2.0"}, "default_prompt_name": None,
            "model_type": "SentenceTransformer", "prompts": {"document": "", "query": "Q: "},
        },
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction", "module_output_name": "token_embeddings",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        },
        "tokenizer_config.json": {"model_max_length": 77},
    },
}  # fmt: skip
EXPECTED = PoolingConfig("last", True, 77, {"query": "Q: ", "document": ""}, "", None)
POOLING, WHOLE, SETTINGS = "1_Pooling/config.json", "config_sentence_transformers.json", "sentence_bert_config.json"


def write(directory: Path, version: str = "6.2", file: str = "", **changes) -> Path:
    """Writes the files of a version, one of them with changes."""
    for name, content in FILES[version].items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content | changes if name == file else content))
    return directory


def read(directory: Path, version: str = "6.2", file: str = "", **changes) -> PoolingConfig:
    config = read_pooling_config(write(directory, version, file, **changes))
    assert config is not None
    return config


def error_of(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        read_pooling_config(directory)
    return str(error.value)


@pytest.mark.parametrize("version", FILES)
def test_both_forms_are_read(tmp_path, version):
    """The older form's max_seq_length precedes the tokenizer's limit."""
    assert read(tmp_path, version) == EXPECTED


def test_the_config_of_the_model_has_it(tmp_path):
    """A decoder that was saved alone has hidden states and no LM head."""
    assert read_pooling_config(tmp_path) is None
    make_model().model.save_pretrained(tmp_path)
    assert load_model_config(tmp_path).pooling is None
    config = load_model_config(write(tmp_path))
    assert config.pooling == EXPECTED and config.head == "none"


@pytest.mark.parametrize(
    ("version", "changes", "tokens"),
    [
        ("6.2", {"pooling_mode": "mean"}, "mean"),
        ("6.2", {"pooling_mode": ["cls"]}, "first"),
        ("3.4", {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, "mean"),
        ("3.4", {"pooling_mode_lasttoken": False, "pooling_mode_cls_token": True}, "first"),
        ("3.4", {"pooling_mode_lasttoken": False}, "mean"),  # no mode is the mean
    ],
)
def test_modes_of_pooling(tmp_path, version, changes, tokens):
    assert read(tmp_path, version, POOLING, **changes).tokens == tokens


def test_settings_beside_the_pooling(tmp_path):
    changed = read(tmp_path, "6.2", WHOLE, default_prompt_name="query", truncate_dim=16)
    assert (changed.default_prompt, changed.dimensions) == ("Q: ", 16)
    assert read(tmp_path, "6.2", "tokenizer_config.json", model_max_length=10**30).max_length is None
    write(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(FILES["6.2"]["modules.json"][:2]))
    config = read_pooling_config(tmp_path)
    assert config is not None and not config.normalizes


def test_a_cross_encoder_has_no_pooling(tmp_path):
    """Version 6 writes modules.json for it too, with a Transformer alone."""
    write(tmp_path, "6.2", WHOLE, model_type="CrossEncoder")
    (tmp_path / "modules.json").write_text(json.dumps(FILES["6.2"]["modules.json"][:1]))
    assert read_pooling_config(tmp_path) is None


@pytest.mark.parametrize(
    ("version", "file", "changes", "words"),
    [
        ("6.2", POOLING, {"pooling_mode": "max"}, "max"),
        ("6.2", POOLING, {"pooling_mode": "weightedmean"}, "weightedmean"),
        ("6.2", POOLING, {"pooling_mode": ["cls", "mean"]}, "mean"),
        ("6.2", POOLING, {"pooling_mode": [["mean"]]}, "mean"),
        ("3.4", POOLING, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("6.2", POOLING, {"include_prompt": False}, "include_prompt"),
        ("3.4", SETTINGS, {"do_lower_case": True}, "do_lower_case"),
        ("3.4", SETTINGS, {"max_seq_length": 0}, "max_seq_length"),
        ("3.4", SETTINGS, {"max_seq_length": "77"}, "max_seq_length"),
        ("6.2", SETTINGS, {"processing_kwargs": {"text": {"max_length": 3}}}, "processing_kwargs"),
        ("6.2", SETTINGS, {"transformer_task": "fill-mask"}, "transformer_task"),
        ("6.2", SETTINGS, {"modality_config": {"text": {}, "message": {}}}, "chat template"),
        ("6.2", SETTINGS, {"modality_config": 5}, "modality_config"),
        ("6.2", WHOLE, {"default_prompt_name": "q"}, "default_prompt_name"),
        ("6.2", WHOLE, {"default_prompt_name": ["q"]}, "default_prompt_name"),
        ("6.2", WHOLE, {"prompts": ["Q: "]}, "prompts"),
        ("6.2", WHOLE, {"prompts": {"query": 5}}, "prompts"),
        ("6.2", WHOLE, {"truncate_dim": -1}, "truncate_dim"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, version, file, changes, words):
    """Embeddings without it would differ from those of sentence-transformers in silence."""
    message = error_of(write(tmp_path, version, file, **changes))
    assert words in message and str(tmp_path / file) in message


def test_prompts_that_are_pooled_or_not_are_the_same_without_prompts(tmp_path):
    write(tmp_path, "6.2", WHOLE, prompts={"query": None})
    (tmp_path / POOLING).write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    config = read_pooling_config(tmp_path)
    assert config is not None and config.prompts == {"query": "", "document": ""}


MODULES = FILES["3.4"]["modules.json"]


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ([*MODULES[:2], {"path": "2_Dense", "type": f"{OLD}.Dense"}, MODULES[2]], "'Dense'"),
        ([MODULES[0], {"path": "1_Pooling", "type": "custom_st.Pooling"}], "'custom_st.Pooling'"),
        ([MODULES[0], {"path": "..", "type": f"{OLD}.Pooling"}], "in folders of the checkpoint"),
        ([MODULES[0]], "'Transformer'"),
        ([], r"modules"),
        ([{"type": f"{OLD}.Transformer"}], "path"),
        ([5], "cannot be read"),
        ({}, "JSON list"),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path, modules, words):
    write(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    message = error_of(tmp_path)
    assert words in message and str(tmp_path / "modules.json") in message


def test_a_missing_pooling_is_named(tmp_path):
    """By default it is the mean, which is another embedding."""
    (write(tmp_path) / POOLING).unlink()
    assert str(tmp_path / POOLING) in error_of(tmp_path)


def test_modules_are_folders_of_the_checkpoint(tmp_path):
    """A path may not lead out of it."""
    directory = tmp_path / "model"
    directory.mkdir()
    write(tmp_path)
    for name in ("modules.json", WHOLE):
        (tmp_path / name).rename(directory / name)
    (directory / "modules.json").write_text(json.dumps([MODULES[0], MODULES[1] | {"path": "../1_Pooling"}]))
    assert str(directory / POOLING) in error_of(directory)


def test_the_hub_gives_all_of_these_files(tmp_path, monkeypatch):
    patterns = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *args, **options: patterns.extend(options["allow_patterns"]) or "x"
    )
    find_model("name/of-hub", None, with_weights=False)
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in FILES["6.2"])


def test_the_option_pooler_config_decides_where_the_files_cannot_be_followed(tmp_path):
    directory = save_embedder_files(save_demo_model(tmp_path, 1))
    modules = json.loads((directory / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{OLD}.Dense"})
    (directory / "modules.json").write_text(json.dumps(modules))
    with LLM(directory, device="cpu", pooler_config={"pooling_type": "MEAN"}) as llm:
        expected = llm.embed("ab", pooling="mean", use_tqdm=False)[0].embedding
        assert (llm.embed("ab", use_tqdm=False)[0].embedding == expected).all()
        assert llm.pooling_config.tokens == "mean"
    llm = LLM(directory, device="cpu", pooler_config={"normalize": False})
    with llm, pytest.raises(ValueError, match="Dense"):
        llm.embed("ab", use_tqdm=False)
