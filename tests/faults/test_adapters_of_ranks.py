"""An adapter of an LLM of two ranks: either all ranks take it or none does, and their weights are those of one rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import Tensors, random_tensors, save_adapter
from support.long import some
from support.model_factory import read_tensors, save_model

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.lora import LoRARequest
from nanovllm.parallel.parallel_runner import TensorParallelRunner

OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 8, "kvcache_block_size": 4}
SHAPES = {"0.self_attn.q_proj": (64, 32), "1.self_attn.o_proj": (32, 64), "1.mlp.down_proj": (32, 40)}
CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": set(SHAPES)}
Digests = dict[str, str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, LoRARequest | None]:
    directory = tmp_path_factory.mktemp("adapter")
    save_adapter(directory, random_tensors(SHAPES), {**CONFIG, "target_modules": None})
    tensors = random_tensors(SHAPES, seed=1)
    return {
        "base": None,
        "files": LoRARequest("files", 1, directory),
        "memory": LoRARequest("memory", 2, tensors=tensors, config=CONFIG),
    }


@pytest.fixture(scope="module")
def of_one_rank(tiny, adapters) -> dict[str, Digests]:
    found = {}
    with LLM(tiny, **OPTIONS) as llm:
        for name, request in adapters.items():
            llm.engine.runner.set_adapter(0, request)
            found[name] = llm.engine.runner.weight_digests()
    assert len({str(digests) for digests in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def ranks(tiny) -> Iterator[TensorParallelRunner]:
    found = TensorParallelRunner(Config(str(tiny), **OPTIONS, tensor_parallel_size=2))
    yield found
    found.close()


@pytest.fixture
def runner(ranks) -> TensorParallelRunner:
    """Two ranks without an adapter."""
    ranks.set_adapter(0, None)
    return ranks


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_an_adapter_that_one_rank_refuses_no_rank_takes(tiny, adapters, of_one_rank, monkeypatch, rank):
    monkeypatch.setenv("FAULT", "refuses once")
    monkeypatch.setenv("FAULTY_RANK", str(rank))
    runner = TensorParallelRunner(Config(str(tiny), **OPTIONS, tensor_parallel_size=2), "support.faulty_worker")
    try:
        with pytest.raises(ValueError, match=rf"the adapter cannot be read \(rank {rank} of 2\)"):
            runner.set_adapter(0, adapters["files"])
        assert runner.weight_digests() == of_one_rank["base"]
        runner.set_adapter(0, adapters["files"])
        assert runner.weight_digests() == of_one_rank["files"]
    finally:
        runner.close()


def test_a_bad_adapter_changes_nothing(runner, adapters, of_one_rank):
    bad = random_tensors(SHAPES)
    bad[next(iter(bad))][0, 0] = float("nan")
    for name in ("base", "memory"):
        runner.set_adapter(0, adapters[name])
        with pytest.raises(ValueError, match=r"adapter 'bad': tensor .*q_proj.* holds numbers .*\(rank 0 of 2\)"):
            runner.set_adapter(0, LoRARequest("bad", 3, tensors=bad, config=CONFIG))
        with pytest.raises(TypeError, match="is a list"):
            runner.set_adapter(0, LoRARequest("bad", 3, tensors={"x": [1]}, config=CONFIG))
        with pytest.raises(ValueError, match=r"lora_path of adapter 'bad': './none' is not a directory"):
            runner.set_adapter(0, LoRARequest("bad", 3, "./none"))
        assert runner.weight_digests() == of_one_rank[name]


def test_ranks_merge_to_the_weights_of_one_rank(runner, adapters, of_one_rank):
    memory = runner.memory()
    for name in ("files", "base", "memory", "files", "files", "base"):
        runner.set_adapter(0, adapters[name])
        assert runner.weight_digests() == of_one_rank[name]
    assert runner.memory() == memory


def test_nothing_is_left_of_the_files_of_an_adapter_in_memory(runner, adapters, monkeypatch):
    seen: list[Path] = []
    ask = runner._ask

    def spied(kind: str, *arguments: Any) -> list:
        if kind == "check_adapter":
            seen.append(Path(arguments[1][2]))
            assert (seen[-1].stat().st_mode & 0o777, len(list(seen[-1].iterdir()))) == (0o700, 1)
        return ask(kind, *arguments)

    monkeypatch.setattr(runner, "_ask", spied)
    runner.set_adapter(0, adapters["memory"])
    assert len(seen) == 1 and not seen[0].exists()


@pytest.mark.parametrize("kind", ["check_adapter", "set_adapter"])
def test_after_ctrl_c_in_the_wait_for_the_ranks_the_next_switch_is_exact(
    runner, adapters, of_one_rank, monkeypatch, kind
):
    ask = TensorParallelRunner._ask

    def interrupted(self, asked: str, *arguments: Any) -> list:
        if asked == kind:
            self._num_asked += 1
            self._write(asked, *arguments, tag=self._num_asked)
            raise KeyboardInterrupt
        return ask(self, asked, *arguments)

    for name in ("memory", "base"):
        with monkeypatch.context() as patch:
            patch.setattr(TensorParallelRunner, "_ask", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runner.set_adapter(0, adapters["files"])
        runner.set_adapter(0, adapters[name])
        assert runner.weight_digests() == of_one_rank[name]


def test_ranks_update_base_weights_only_without_a_merged_adapter(tiny, runner, adapters, of_one_rank):
    weights: Tensors = read_tensors(tiny)
    runner.set_adapter(0, adapters["files"])
    with pytest.raises(RuntimeError, match=r"an adapter is merged into the weights; call set_adapter\(0, None\)"):
        runner.update_weights(list(weights.items()))
    assert runner.weight_digests() == of_one_rank["files"] and runner.undefined_weights() == []
    runner.sleep(2)
    runner.wake_up()
    runner.update_weights(list(weights.items()))
    assert runner.weight_digests() == of_one_rank["base"]
    runner.set_adapter(0, adapters["memory"])
    assert runner.weight_digests() == of_one_rank["memory"]
