"""What an LLM imports up to its first token, and which class its tokenizer has. Imports are most of a start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from support.processes import SCRIPT_ENVIRONMENT
from support.small_tokenizers import small_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import LLM
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.text import Text

# transformers' own imports differ among its versions, so they are made first.
SCRIPT = """
import sys
import torch
from transformers import PreTrainedTokenizerFast

before = set(sys.modules)
from nanovllm import LLM, SamplingParams

with LLM(sys.argv[1], device="cpu", max_model_len=64) as llm:
    llm.generate("Hi", SamplingParams(max_tokens=1), use_tqdm=False)
print(*sorted(set(sys.modules) - before))
"""
SLOW = {
    "huggingface_hub.file_download", "llguidance", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "sympy",
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.testing", "torch.utils.tensorboard",
    "transformers.configuration_utils", "transformers.generation", "transformers.modeling_utils",
    "transformers.models.auto", "triton",
}  # fmt: skip


def test_an_llm_on_a_cpu_imports_nothing_slow_but_torch_and_a_tokenizers_class():
    """Importing the auto classes once took as long as importing torch."""
    environment = {**SCRIPT_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SCRIPT, MODEL_DIRECTORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    imported = set(done.stdout.split())
    assert "nanovllm.llm" in imported, done.stderr
    assert imported & SLOW == set()


def test_ranks_load_no_tokenizer():
    def has_tokenizers(pid: int | str) -> bool:
        return "/tokenizers/" in Path(f"/proc/{pid}/maps").read_text()

    with LLM(MODEL_DIRECTORY, tensor_parallel_size=2, device="cpu", num_kvcache_blocks=8, max_model_len=64) as llm:
        assert has_tokenizers("self") and not any(map(has_tokenizers, llm.engine.runner.pids()))


# Types of models with each class. For the second kind only the auto class knows.
NAMED = {
    "PreTrainedTokenizerFast": ["", "llama", "qwen3"],
    "TokenizersBackend": ["gemma3_text", "mistral", "mistral3"],
    "Qwen2Tokenizer": ["qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl_moe"],
    "Qwen2TokenizerFast": ["qwen2_vl", "qwen3", "qwen3_vl"],
    "GemmaTokenizerFast": ["gemma3", "gemma3_text"],
}
NOT_NAMED = {
    "PreTrainedTokenizerFast": ["qwen2", "siglip2"],
    "Qwen2Tokenizer": ["", "llama"],
    "LlamaTokenizerFast": ["llama", "qwen2", "mistral"],
    None: ["llama"],
}


def pairs(types: dict[str | None, list[str]]) -> list[tuple[str | None, str]]:
    return [(name, each) for name, of_class in types.items() for each in of_class]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return small_tokenizers()


def save(tokenizer: PreTrainedTokenizerFast, directory: Path, class_name: str | None, model_type: str) -> None:
    tokenizer.save_pretrained(directory)
    if model_type:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    path = directory / "tokenizer_config.json"
    fields = {**json.loads(path.read_text()), "tokenizer_class": class_name}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    try:
        return tokenizer(text)["input_ids"]
    except Exception:  # Gemma's class needs an <unk>
        return []


@pytest.mark.parametrize(("class_name", "model_type"), pairs(NAMED))
def test_a_tokenizer_that_is_loaded_by_its_name_is_that_of_the_auto_class(
    tokenizers, tmp_path, monkeypatch, class_name, model_type
):
    """Its class, every part, every id, and the chat template."""
    if not hasattr(transformers, class_name):
        pytest.skip("this version of transformers does not know the class")
    for kind, tokenizer in tokenizers.items():
        save(tokenizer, tmp_path / kind, class_name, model_type)
        expected = AutoTokenizer.from_pretrained(tmp_path / kind)
        with monkeypatch.context() as patch:
            patch.delattr(AutoTokenizer, "from_pretrained")
            found = Text.of_model(tmp_path / kind).tokenizer
        assert type(found) is type(expected)
        assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        assert found.special_tokens_map == expected.special_tokens_map
        assert found.chat_template == expected.chat_template
        for text in ("the cat", "  a  b\n", "é🙂<eos> the</s>", ""):
            ids = ids_of(found, text)
            assert ids == ids_of(expected, text)
            assert found.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("class_name", "model_type"), pairs(NOT_NAMED))
def test_the_auto_class_is_asked_for_a_tokenizer_that_only_it_knows(
    tokenizers, tmp_path, monkeypatch, class_name, model_type
):
    """A name that does not fit the model's type may be wrong, and the auto class takes another one then."""
    save(tokenizers["bytes"], tmp_path, class_name, model_type)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizers["byte fallback"])
    assert Text.of_model(tmp_path).tokenizer is tokenizers["byte fallback"]


@pytest.mark.parametrize("change", ["code of its own", "no tokenizer.json", "another model's name"])
def test_the_auto_class_is_asked_if_the_files_need_it(tokenizers, tmp_path, monkeypatch, change):
    save(tokenizers["bytes"], tmp_path, "Qwen2Tokenizer", "qwen3")
    if change == "no tokenizer.json":
        (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    elif change == "another model's name":  # which the auto class reads
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_name": "llava"}))
    else:
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": ["a.B", None]}}))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizers["byte fallback"])
    assert Text.of_model(tmp_path).tokenizer is tokenizers["byte fallback"]
