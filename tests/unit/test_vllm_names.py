"""vLLM's module names, in processes of their own: what a script does to sys.modules stays there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import argparse
import sys

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.inputs import TextPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import GuidedDecodingParams
import vllm.outputs

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--tensor-parallel-size", type=int, default=1)
args = parser.parse_args()


def main():
    llm = LLM(model=args.model, trust_remote_code=True, tensor_parallel_size=args.tensor_parallel_size, dtype="float32",
              gpu_memory_utilization=0.9, swap_space=4, max_model_len=128, enforce_eager=True, seed=0)
    params = SamplingParams(temperature=0, max_tokens=16, best_of=None)
    tokens = llm.get_tokenizer().encode("Q: Write paged in upper case.\\nA:", add_special_tokens=False)
    prompts = [TextPrompt(prompt="Q: Reverse the word planet.\\nA:"), TokensPrompt(prompt_token_ids=tokens)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert isinstance(output, RequestOutput) and isinstance(output, vllm.outputs.RequestOutput)
        print(output.outputs[0].text)
    guided_decoding = GuidedDecodingParams(choice=["yes", "no"], backend="outlines")
    guided = SamplingParams(temperature=0, guided_decoding=guided_decoding)
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is 47 + 385?"}]}]
    print(llm.chat(messages, params, use_tqdm=False, lora_request=None)[0].outputs[0].text)
    print(llm.generate("Is it?", guided, use_tqdm=False)[0].outputs[0].text in ("yes", "no"))
    del llm
    destroy_model_parallel()
    try:
        LoRARequest("adapter", 1, "path")
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
"""


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_a_script_written_for_vllm_runs_as_it_is(tmp_path):
    from nanovllm.demo import MODEL_DIRECTORY

    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("-m", "nanovllm.integrations.vllm", tmp_path / "script.py", "--model", MODEL_DIRECTORY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        " tenalp", " PAGED", "432", "True",
        "nanovllm loads no adapters; merge it into the model's weights and load the merged model",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from vllm import AsyncLLMEngine", "nanovllm has no vllm.AsyncLLMEngine; docs/vllm.md lists"),
        ("from vllm.sampling_params import BeamSearchParams", "nanovllm has no vllm.sampling_params.BeamSearchParams"),
        ("import vllm.engine", "No module named 'vllm.engine'"),
        (
            "from vllm.sampling_params import GuidedDecodingParams as G; G(regex='a', structural_tag='x')",
            "structural_tag cannot be 'x'; nanovllm has no structural tags; write a grammar",
        ),
    ],
    ids=str,
)
def test_what_is_missing_says_so(tmp_path, code, expected):
    done = run("-c", f"import nanovllm.integrations.vllm\n{code}", cwd=tmp_path)
    assert done.returncode == 1 and expected in done.stderr.splitlines()[-1], done.stderr


def test_an_installed_vllm_stays_unless_asked(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("LLM = 'theirs'")
    code = """
import nanovllm.integrations.vllm as names
import vllm
print(vllm.LLM)
try:
    names.install()
except ImportError as error:
    print(error)
names.install(replace=True)
import vllm
from vllm import LLM
import nanovllm
print(LLM is nanovllm.LLM, names.is_installed())
"""
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "theirs", "vLLM is installed; nanovllm.integrations.vllm.install(replace=True) takes its place", "True True",
    ], done.stderr  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), [((), "usage: "), (("none.py",), "there is no script none.py")])
def test_a_wrong_command_is_one_line(tmp_path, arguments, said):
    done = run("-m", "nanovllm.integrations.vllm", *arguments, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1
