"""Jobs compute each row with its adapter, as one LLM does with this adapter alone."""

import json
from pathlib import Path

import pytest
from support.lora_files import save_for_demo_model
from support.vllm_scripts import run_here

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs import JobOptions, run_batch

MODEL = str(MODEL_DIRECTORY)
ENGINE = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
NAMES = (None, "a", "b")


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("adapters")
    return {name: str(save_for_demo_model(directory / name, seed)) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def expected(directories) -> dict[str | None, list[str]]:
    """The completions of the prompts with each adapter, which differ."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(MODEL, **ENGINE, enable_lora=True) as llm:
        found = {
            name: [output.text for output in llm.generate(prompts(), params, False, request)]
            for name, request in zip(NAMES, (None, *requests(directories)), strict=True)
        }
    assert all(len({found[name][row] for name in NAMES}) > 1 for row in range(3))
    return found


def prompts() -> list[str]:
    return [f"Q: What is {number} + {3 * number}?\nA:" for number in range(11, 31)]


def requests(directories) -> list[LoRARequest]:
    return [LoRARequest(name, number, path) for number, (name, path) in enumerate(directories.items(), 1)]


def completed(directory: Path, rows, directories, **engine) -> dict[str, str | None]:
    """The text of each row by its id, or its error."""
    (directory / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = JobOptions(
        str(directory / "in"), str(directory / "out"), MODEL, {**ENGINE, **engine},
        {"temperature": 0, "max_tokens": 12}, adapters=directories, preflight="off",
    )  # fmt: skip
    run_batch(options)
    found = map(json.loads, (directory / "out").read_text().splitlines())
    return {row["id"]: row["error"] or row["outputs"][0]["text"] for row in found}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("max_loras", [None, 1])
def test_rows_of_several_adapters_are_each_completed_with_their_own(tmp_path, directories, expected, size, max_loras):
    rows = [
        {"id": f"{row} {name}", "prompt": prompt, "adapter": name}
        for row, prompt in enumerate(prompts())
        for name in NAMES
    ]
    found = completed(tmp_path, rows, directories, max_loras=max_loras, data_parallel_size=size)
    assert found == {f"{row} {name}": expected[name][row] for row in range(len(prompts())) for name in NAMES}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_rows_of_one_adapter_are_completed_with_it(tmp_path, directories, expected, size):
    rows = [{"id": str(row), "prompt": prompt, "adapter": "b"} for row, prompt in enumerate(prompts())]
    found = completed(tmp_path, rows, directories, data_parallel_size=size, max_lora_rank=1)  # merged
    assert found == {str(row): text for row, text in enumerate(expected["b"])}


def test_an_adapter_of_another_model_is_named(tmp_path, directories):
    broken = save_for_demo_model(tmp_path / "broken")
    fields = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**fields, "use_dora": True}))
    rows = [{"id": name, "prompt": "Hi", "adapter": name} for name in ("a", "broken")]
    found = completed(tmp_path, rows, {**directories, "broken": str(broken)})
    assert "use_dora" in found["broken"] and "use_dora" not in found["a"]
    (tmp_path / "alone").mkdir()
    with pytest.raises(ValueError, match="use_dora"):
        completed(tmp_path / "alone", rows[1:], {"broken": str(broken)})


def test_a_script_for_vllm_generates_with_its_adapter(directories):
    arguments = ("--model", MODEL, "--lora-path", directories["a"])
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(MODEL, max_model_len=128, enable_lora=True) as llm:
        (output,) = llm.generate("Q: What is 7 + 7?\nA:", params, False, requests(directories)[0])
    assert run_here("lora_adapter", *arguments) == output.text.strip() + "\n" != "14\n"
