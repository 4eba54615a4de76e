"""vLLM's module names: what they are, what a script may do with them, and what it is told otherwise."""

import dataclasses
import importlib
import inspect
import os
import pickle
import random
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.vllm_scripts import vllm_names
from transformers import AutoTokenizer

import nanovllm
from nanovllm.accepted import ACCEPTED_OPTIONS, REFUSED_ATTRIBUTES
from nanovllm.demo import MODEL_DIRECTORY

with vllm_names() as vllm_page:
    pass

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
    print(LoRARequest("adapter", 1, "path").lora_name)


if __name__ == "__main__":
    main()
"""


def run(*arguments: object, cwd: Path, path: str = os.pathsep.join(sys.path)) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_a_script_written_for_vllm_runs_as_it_is(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("-m", "nanovllm.integrations.vllm", tmp_path / "script.py", "--model", MODEL_DIRECTORY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        " tenalp", " PAGED", "432", "True", "adapter",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from vllm import Nonsense", "nanovllm has no vllm.Nonsense; docs/vllm.md lists"),
        (
            "from vllm.sampling_params import MISSING",
            "nanovllm has no vllm.sampling_params.MISSING; docs/vllm.md lists",
        ),
        ("import vllm.core.scheduler", "nanovllm has no vllm.core; docs/vllm.md lists"),
        ("from vllm.v1.core import Scheduler", r"nanovllm has no vllm.v1.core; docs/vllm.md lists"),
        ("from vllm.entrypoints.openai.api_server import run_server", "no vllm.entrypoints.openai; nanovllm serves"),
        ("from vllm.entrypoints import openai", "no vllm.entrypoints.openai; nanovllm serves no API"),
        ("from vllm.multimodal.utils import fetch_image", "no vllm.multimodal; nanovllm reads text only"),
        ("from vllm.model_executor.layers.sampler import Sampler", "no vllm.model_executor.layers; llm.update_weights"),
        ("from vllm.lora.models import LoRAModel", "no vllm.lora.models; pass a LoRARequest as lora_request to a call"),
        ("from vllm.utils import get_open_port", "no vllm.utils.get_open_port; a job's --data-parallel-size"),
        (
            "from vllm.v1.sample.logits_processor import BatchUpdate",
            r"nanovllm has no vllm.v1.sample; SamplingParams\(",
        ),
        ("import vllm.model_executor.guided_decoding", "no vllm.model_executor.guided_decoding; use SamplingParams"),
    ],
    ids=lambda value: value if value.startswith(("from", "import")) else "",
)
def test_an_import_of_what_is_missing_says_so(code, message):
    with vllm_names(), pytest.raises(ImportError, match=message):
        exec(code, {})


@pytest.mark.parametrize("name", [name for names in vllm_page.REFUSED_CLASSES.values() for name in names.split()])
def test_a_class_that_is_refused_can_be_imported_and_named_but_not_used(name):
    with vllm_names() as page:
        module = next(module for module, names in page.MODULES.items() if name in names.split())
        refused = getattr(importlib.import_module(module), name)
        advice = next(advice for advice, names in page.REFUSED_CLASSES.items() if name in names.split())
        assert (refused | None) and list[refused] and not isinstance(None, refused)
        assert not hasattr(refused, "from_engine_args") and pickle.loads(pickle.dumps(refused)) is refused
        assert repr(refused) == f"<class '{module}.{name}'>"
        with pytest.raises(ValueError, match=f"^nanovllm has no {name}; {re.escape(advice)}$"):
            refused("adapter", 1, path="x")
        with pytest.raises(AttributeError, match=f"^nanovllm has no {name}.register_model; "):
            refused.register_model("Model", None)


def test_every_name_can_be_imported():
    with vllm_names() as page:
        for module, names in page.MODULES.items():
            for name in names.split():
                exec(f"from {module} import {name}", {})
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.request import LoRARequest

        assert LoRARequest is nanovllm.LoRARequest
        assert EngineArgs is vllm.EngineArgs and issubclass(vllm.LLM, nanovllm.LLM)
        assert find_spec("vllm.lora") is not None
    assert "vllm" not in sys.modules and find_spec("vllm") is None


def test_a_missing_attribute_is_as_of_any_module():
    """pickle looks for an object without a module in every module, and only takes an AttributeError for a no."""
    with vllm_names():
        import vllm.sampling_params

        assert not hasattr(vllm, "Nonsense") and getattr(vllm.sampling_params, "Nonsense", 7) == 7
        assert pickle.whichmodule(SimpleNamespace(__module__=None), "nonsense") == "__main__"
        with pytest.raises(AttributeError, match=r"nanovllm has no vllm.multimodal; nanovllm reads text only"):
            vllm.multimodal.utils  # noqa: B018


def test_the_version_is_one_of_vllms():
    with vllm_names():
        import vllm.version

        assert tuple(map(int, vllm.__version__.split(".")[:3])) == vllm.version.__version_tuple__ == (0, 11, 0)
        assert metadata.version("vllm") == vllm.__version__ and metadata.metadata("vllm")["Name"] == "vllm"
        assert metadata.version("numpy") == np.__version__
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm")


def test_environment_variables_can_be_read_and_set(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    with vllm_names():
        import vllm.envs as envs
        from vllm.envs import VLLM_USE_V1

        assert VLLM_USE_V1 == "1" and envs.VLLM_LOGGING_LEVEL is None and not hasattr(envs, "nonsense")
        envs.VLLM_USE_V1 = False
        assert envs.VLLM_USE_V1 is False


def test_a_module_runs_as_python_would_run_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/helper.py").write_text("from vllm import LLM")
    lines = ["import sys", "from .helper import LLM", "print(sys.argv[1:], __package__, LLM.__name__)"]
    (tmp_path / "package/module.py").write_text("\n".join([*lines, "assert sys.modules[__name__].LLM is LLM"]))
    monkeypatch.chdir(tmp_path)
    with vllm_names() as page:
        page.main(["-m", "package.module", "--flag", "7"])
    assert capsys.readouterr().out == "['--flag', '7'] package LLM\n"


def test_a_check_of_vllms_worker_can_be_replaced():
    """Scripts of courses do this before they make the LLM."""
    with vllm_names(), patch("vllm.worker.worker.Worker._assert_memory_footprint_increased_during_profiling") as check:
        from vllm.worker.worker import Worker

        assert Worker._assert_memory_footprint_increased_during_profiling is check


def test_a_tokenizers_code_is_never_run(monkeypatch):
    given = {}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **options: given.update(options, name=name))
    with vllm_names():
        from vllm.tokenizers import get_tokenizer

        get_tokenizer(tokenizer_name="m", trust_remote_code=True, download_dir="d", tokenizer_mode="slow", revision="r")
    assert given == {"name": "m", "trust_remote_code": False, "cache_dir": "d", "use_fast": False, "revision": "r"}


def test_options_come_from_a_command_line():
    with vllm_names():
        from vllm import EngineArgs
        from vllm.utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        parser.add_argument("--task", choices=["gsm8k"])  # one of LLM's too
        parser.add_argument("--top-k", type=int)
        line = "--max_model_len 128 --trust-remote-code --top_k=7 --no-enable-prefix-caching -tp 2 --dtype half"
        line += " --revision None --gpu-memory-utilization=.5 --task gsm8k --seed -3 --model m_m --enforce_eager"
        args = parser.parse_args([*line.split(), "--limit-mm-per-prompt", '{"image_a": 0}', "-O3"])
        assert (args.task, args.top_k) == ("gsm8k", 7)
        args.task = None
        given = {
            "max_model_len": 128, "trust_remote_code": True, "enable_prefix_caching": False, "dtype": "half",
            "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "seed": -3, "model": "m_m", "enforce_eager": True,
            "limit_mm_per_prompt": {"image_a": 0}, "compilation_config": 3,
        }  # fmt: skip
        engine_args = EngineArgs.from_cli_args(args)
        found = dataclasses.asdict(engine_args)
        assert found == vars(engine_args) == vars(EngineArgs(**given)) == {**vars(EngineArgs()), **given}
        assert EngineArgs().model and EngineArgs("m").model == "m"
        with pytest.raises(TypeError, match="unexpected keyword argument 'max_len'"):
            EngineArgs(max_len=1)


def test_the_defaults_of_engine_args_are_those_of_llm():
    with vllm_names():
        from vllm import EngineArgs

        args = vars(EngineArgs())
    ours = {name: each.default for name, each in inspect.signature(nanovllm.LLM).parameters.items() if name != "model"}
    assert {name: args[name] for name in ours} == ours
    others = {name: value for name, value in args.items() if name not in {*ours, "model"} and value is not None}
    assert others == {
        "pipeline_parallel_size": 1, "data_parallel_size": 1, "trust_remote_code": False, "swap_space": 4
    }  # fmt: skip
    assert all(ACCEPTED_OPTIONS[name].takes(value) for name, value in others.items())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--enforce-eager in.txt", {"enforce_eager": True, "file": "in.txt"}),
        ("--trust-remote-code in.txt", {"trust_remote_code": True, "file": "in.txt"}),
        ("--enable-sleep-mode in.txt", {"enable_sleep_mode": True, "file": "in.txt"}),
        ("--enable-lora in.txt", {"enable_lora": True, "file": "in.txt"}),
        ("--enable-lora --max-loras 4 --max-lora-rank 64", {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64}),
        ("--no-enable-expert-parallel in.txt", {"enable_expert_parallel": False, "file": "in.txt"}),
        ("--max-model-len 8k", {"max_model_len": 8000}),
        ("--max-model-len 8K", {"max_model_len": 8192}),
        ("--max-num-batched-tokens 1m", {"max_num_batched_tokens": 10**6}),
        ("--max-num-batched-tokens 1.5k", {"max_num_batched_tokens": 1500}),
        ("--max-num-seqs None", {"max_num_seqs": None}),
        ("--block-size 32", {"block_size": 32}),
        ("--gpu-memory-utilization .8", {"gpu_memory_utilization": 0.8}),
        ("--revision 1234567", {"revision": "1234567"}),
        ("--model true", {"model": "true"}),
        ("--cpu-offload-gb 0 --max-logprobs 1", {"cpu_offload_gb": 0, "max_logprobs": 1}),
        ("--hf-overrides {}", {"hf_overrides": {}}),
        ('--pooler-config {"normalize":false}', {"pooler_config": {"normalize": False}}),
        ("--task generate", {"task": "generate"}),
        ("--tokenizer", "argument --tokenizer: expected one argument"),
        ("--seed many", "argument --seed: invalid number value: 'many'"),
        ("--max-num-seq 3", "unrecognized arguments: --max-num-seq"),
        ("--config x.yaml", "--config: configuration files are not read; write the file's options on the command line"),
    ],
)
def test_an_option_takes_a_value_of_its_type_or_none(line, expected, capsys):
    with vllm_names():
        from vllm import EngineArgs
        from vllm.utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        parser.add_argument("file", nargs="?")
        if isinstance(expected, str):
            with pytest.raises(SystemExit):
                parser.parse_args(line.split())
            assert expected in capsys.readouterr().err
        else:
            found = vars(parser.parse_args(line.split()))
            assert found == {**vars(EngineArgs()), "file": None, **expected}
            assert all(type(found[name]) is type(value) for name, value in expected.items())


def test_an_llm_takes_what_vllms_methods_take():
    with vllm_names():
        from vllm import LLM, EngineArgs, SamplingParams
        from vllm.config import CompilationConfig, CompilationLevel

        config = CompilationConfig(3, use_inductor=False)
        assert config.level == CompilationLevel.PIECEWISE and config == CompilationConfig(level=3, use_inductor=False)
        options = {"max_model_len": 128, "compilation_config": config, "swap_space": 4}
        llm = LLM.from_engine_args(EngineArgs(model=MODEL_DIRECTORY, **options))
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        assert llm.reset_prefix_cache() is True
        assert llm.generate("Q: What is 2 + 3?\nA:", SamplingParams(temperature=0), False)[0].outputs[0].text == " 5"
        for advice, names in REFUSED_ATTRIBUTES.items():
            for name in names.split():
                with pytest.raises(AttributeError, match=f"^nanovllm's LLM has no {name}; {re.escape(advice)}$"):
                    getattr(llm, name)
        with pytest.raises(AttributeError, match=r"^nanovllm's LLM has no nonsense$"):
            llm.nonsense()
        assert not hasattr(llm, "apply_model")


def test_the_other_names_do_what_scripts_expect(caplog):
    with vllm_names():
        from vllm.config import CompilationMode
        from vllm.logger import init_logger
        from vllm.model_executor import set_random_seed
        from vllm.platforms import current_platform
        from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams
        from vllm.transformers_utils.tokenizer import get_tokenizer
        from vllm.utils import Counter, random_uuid

        tokenizer = get_tokenizer(str(MODEL_DIRECTORY), tokenizer_mode="auto", trust_remote_code=True, revision=None)
        assert tokenizer.decode(tokenizer.encode("paged", add_special_tokens=False)) == "paged"
        with pytest.raises(ValueError, match="tokenizer_mode cannot be 'mistral'; nanovllm loads"):
            get_tokenizer(str(MODEL_DIRECTORY), tokenizer_mode="mistral")
        drawn = []
        for seed in (7, 7, None):
            set_random_seed(seed)
            drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
        assert drawn[0] == drawn[1] and not {*drawn[1]} & {*drawn[2]}
        counter = Counter()
        assert [next(counter), next(counter), counter.counter] == [0, 1, 2]
        counter.reset()
        assert next(counter) == 0 and next(Counter(5)) == 5
        logger = init_logger("script")
        for message in ("%s files", "%s files", "%s rows"):
            logger.warning_once(message, 2)
            init_logger("script").info_once(message, 3)
        assert [record.message for record in caplog.records] == ["2 files", "2 rows"]
        assert {caplog.records[0].funcName} == {"test_the_other_names_do_what_scripts_expect"}
        has_cuda = torch.cuda.is_available()
        assert current_platform.device_type == ("cuda" if has_cuda else "cpu") and not current_platform.is_rocm()
        assert (current_platform.is_cuda(), current_platform.is_cpu()) == (has_cuda, not has_cuda)
        assert current_platform.seed_everything is set_random_seed and CompilationMode(3).name == "VLLM_COMPILE"
        assert len({random_uuid() for _ in range(9)}) == 9 and init_logger("script").name == "script"
        guided = GuidedDecodingParams(choice=["a", "b"], backend="outlines:no-fallback", whitespace_pattern=None)
        params = SamplingParams(guided_decoding=guided, output_kind=RequestOutputKind.FINAL_ONLY)
        assert params.structured_outputs is guided


def test_values_of_rows_that_pool_are_ours(capsys):
    with vllm_names():
        import vllm.outputs
        from vllm import PoolingParams
        from vllm.config import PoolerConfig
        from vllm.utils.print_utils import print_embeddings

        assert PoolingParams(softmax=False) == nanovllm.PoolingParams(normalize=False)
        requests = ("Embedding", "Classification", "Scoring", "Pooling")
        assert {getattr(vllm, f"{name}RequestOutput") for name in requests} == {nanovllm.PoolingRequestOutput}
        with nanovllm.LLM(MODEL_DIRECTORY, pooler_config=PoolerConfig(pooling_type="CLS", normalize=False)) as llm:
            (output,) = llm.embed("ab", use_tqdm=False)
            (first,) = llm.embed("a", pooling="last", use_tqdm=False)
            assert output.outputs.embedding == pytest.approx(first.outputs.embedding, abs=1e-6)
            assert llm.score("a", "ab", use_tqdm=False)[0].outputs.score == pytest.approx(1)
            for kind in ("Embedding", "Classification", "Scoring", "Pooling"):
                assert isinstance(output.outputs, getattr(vllm.outputs, f"{kind}Output"))
        print_embeddings([0.25] * 17, prefix="Vector")
        assert capsys.readouterr().out == f"Vector: [{'0.2500, ' * 16}...] (size=17)\n"


def test_the_page_lists_every_name_and_what_to_do_instead():
    page = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")

    def cell(names: str) -> str:
        return ", ".join(f"`{name}`" if name.startswith("_") else name for name in names.split())

    expected = [f"| {module} | {cell(names)} |" for module, names in vllm_page.MODULES.items() if names]
    for table in (vllm_page.REFUSED_CLASSES, REFUSED_ATTRIBUTES, vllm_page.REFUSED_IMPORTS):
        expected += [f"| {cell(names)} | {advice} |" for advice, names in table.items()]
    begin, end = page.index("## A script as it is"), page.index("## What changes in a script")
    rows = [line for line in page[begin:end].splitlines() if line.startswith("| ") and line.count(" | ") == 1]
    assert [row for row in rows if row not in ("| module | names |", "| name | instead |")] == expected


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


def test_a_child_process_finds_nanovllm_where_its_parent_did(tmp_path):
    """The command finds it in the working directory, which is on no other process's path."""
    code = "import vllm.inputs, sys; print(sys.modules[vllm.LLM.__module__].__file__)"
    lines = [
        "import subprocess, sys",
        "from nanovllm.integrations.vllm import install",
        "install()",  # as it is already
        f"subprocess.run([sys.executable, '-c', {code!r}], cwd=sys.path[0])",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    directory = tmp_path / "checkout"
    directory.mkdir()
    (directory / "nanovllm").symlink_to(Path(nanovllm.__file__).parent)
    done = run("-m", "nanovllm.integrations.vllm", tmp_path / "script.py", cwd=directory, path="")
    assert done.stdout == f"{directory / 'nanovllm/llm.py'}\n", done.stderr


@pytest.mark.parametrize(("arguments", "said"), [((), "usage: "), (("none.py",), "there is no script none.py")])
def test_a_wrong_command_is_one_line(tmp_path, arguments, said):
    done = run("-m", "nanovllm.integrations.vllm", *arguments, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1
