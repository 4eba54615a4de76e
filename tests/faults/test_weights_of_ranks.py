"""New weights of an LLM of two ranks: either all ranks take them or none does, and no file is left behind."""

import os
import random
from pathlib import Path

import pytest
from support.family_factory import FAMILIES, save_family_model
from support.long import some
from support.model_factory import read_tensors
from support.weight_updates import (
    HEAD,
    OPTIONS,
    PARAMS,
    PROMPTS,
    generate,
    make_llm,
    of_fresh_llm,
    outputs_of,
    save_checkpoints,
)

import nanovllm.parallel.weight_files
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.parallel.parallel_runner import TensorParallelRunner


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return save_checkpoints(tmp_path_factory)


@pytest.fixture(scope="module")
def expected(checkpoints) -> list:
    return outputs_of(checkpoints)


@pytest.mark.parametrize("family", some(["phi3", "qwen3_moe", "gemma3"], "qwen3_moe"))
def test_ranks_get_their_shards_of_every_family(tmp_path, family):
    options = FAMILIES[family][2](random.Random(0)) | {"num_attention_heads": 4, "num_key_value_heads": 2}
    options |= {"hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": True, "vocab_size": 50}
    options |= {"moe_intermediate_size": 16} if family == "qwen3_moe" else {}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if family == "phi3" else {}
    options |= {"head_dim": 8, "layer_types": None} if family != "phi3" else {}
    if family != "phi3":
        rope = {"rope_type": "default", "rope_theta": 1e4}
        ropes = {"full_attention": rope, "sliding_attention": rope}
        options["rope_parameters"] = ropes if family == "gemma3" else rope
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        save_family_model(tmp_path / str(number), family, options, seed=number)
    expected = of_fresh_llm(tmp_path / "1")[0]
    with make_llm(tmp_path / "1") as llm:
        digests = llm.weights_digest(per_tensor=True)
    with make_llm(tmp_path / "0", tensor_parallel_size=2) as llm:
        assert all(digest != digests[name] for name, digest in llm.weights_digest(per_tensor=True).items())
        llm.update_weights(read_tensors(tmp_path / "1"))
        assert generate(llm) == expected
        assert llm.weights_digest(per_tensor=True) == digests


def test_nothing_is_left_of_the_files(checkpoints, tmp_path, monkeypatch):
    """None is left in shared memory or in the directory of temporary files. While they exist, only the user can read
    them.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    seen: list[tuple[Path, int]] = []
    ask = TensorParallelRunner._ask

    def spied(self, kind, *arguments):
        if kind == "check_update":
            seen.append((Path(arguments[0]), os.stat(arguments[0]).st_mode & 0o777))
        return ask(self, kind, *arguments)

    monkeypatch.setattr(TensorParallelRunner, "_ask", spied)
    second = read_tensors(checkpoints[1])
    monkeypatch.setattr(nanovllm.parallel.weight_files, "_FILE_BYTES", 10_000)  # several files
    with make_llm(checkpoints[0], tensor_parallel_size=2) as llm:
        before = list(tmp_path.iterdir())  # the file where the ranks met
        for has_memory in (True, False):
            if not has_memory:
                monkeypatch.setattr(nanovllm.parallel.weight_files, "_MEMORY", tmp_path / "none")
            llm.update_weights(second)
            with pytest.raises(ValueError, match="unexpected"):
                llm.update_weights({"x": second[HEAD]})
        assert all(mode == 0o700 and not directory.exists() for directory, mode in seen) and len(seen) == 4
        assert [directory.parent for directory, _ in seen[2:]] == [tmp_path] * 2
        assert list(tmp_path.iterdir()) == before
        monkeypatch.setattr(nanovllm.parallel.weight_files, "_fit_in_memory", lambda num_bytes: False)
        monkeypatch.setattr(
            nanovllm.parallel.weight_files, "save_file", lambda *_: (_ for _ in ()).throw(OSError("no space left"))
        )
        with pytest.raises(RuntimeError, match=r"weights cannot be written to .*no space left; make room.*TMPDIR"):
            llm.update_weights(second)
        assert list(tmp_path.iterdir()) == before
        assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].error is None
    assert not list(tmp_path.iterdir())


def test_shared_memory_is_used_only_if_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(nanovllm.parallel.weight_files, "_MEMORY", tmp_path)
    fit_in_memory = nanovllm.parallel.weight_files._fit_in_memory
    assert fit_in_memory(1) and not fit_in_memory(2**60)
    monkeypatch.setattr(nanovllm.parallel.weight_files, "free_bytes", lambda device: 2**20)
    assert not fit_in_memory(1)


@pytest.mark.parametrize("kind", some(["check_update", "load_update"], "load_update"))
def test_ctrl_c_in_the_wait_for_the_ranks_leaves_no_doubt(checkpoints, expected, monkeypatch, kind):
    """Before the ranks copy, nothing has changed. After that, the driver cannot know whether they have copied."""
    ask = TensorParallelRunner._ask

    def interrupted(self, asked, *arguments):
        if asked == kind:
            self._num_asked += 1
            self._write(asked, *arguments, tag=self._num_asked)
            raise KeyboardInterrupt
        return ask(self, asked, *arguments)

    second = read_tensors(checkpoints[1])
    with make_llm(checkpoints[0], tensor_parallel_size=2) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(TensorParallelRunner, "_ask", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.update_weights(second)
        if kind == "check_update":
            assert generate(llm) == expected[0]
        else:
            with pytest.raises(RuntimeError, match="tensors are undefined"):
                generate(llm)
        llm.update_weights(second)
        assert generate(llm) == expected[1]


@pytest.mark.parametrize("rank", some([0, 1], 1))
@pytest.mark.parametrize("level", some([1, 2], 2))
def test_what_one_rank_refuses_no_rank_does(checkpoints, expected, monkeypatch, rank, level):
    """If one rank has no room to wake up, or cannot read the weights, the other one refuses too."""
    monkeypatch.setenv("FAULT", "refuses once")
    monkeypatch.setenv("FAULTY_RANK", str(rank))
    config = Config(str(checkpoints[0]), **OPTIONS, tensor_parallel_size=2)
    engine = LLMEngine(config, TensorParallelRunner(config, "support.faulty_worker"))
    try:
        second = list(read_tensors(checkpoints[1]).items())
        with pytest.raises(ValueError, match=rf"cannot be read \(rank {rank} of 2\)"):
            engine.update_weights(second)
        assert (engine.weight_version, run(engine)) == (0, expected[0][2][0])
        engine.update_weights(second)
        assert (engine.weight_version, run(engine)) == (1, expected[1][2][0])
        engine.sleep(level)
        asleep = engine.metrics()["memory_bytes"]
        asked, ask = [], engine.runner._ask
        monkeypatch.setattr(engine.runner, "_ask", lambda kind, *rest: (asked.append(kind), ask(kind, *rest))[1])
        with pytest.raises(RuntimeError, match=rf"no room to wake up \(rank {rank} of 2\)"):
            engine.wake_up()
        assert asked == ["restore", "sleep"], "the other rank had woken up"
        assert engine.is_sleeping and engine.metrics()["memory_bytes"] == asleep
        engine.wake_up()
        if level == 2:
            engine.update_weights(second)
        assert run(engine) == expected[1][2][0]
    finally:
        engine.exit()


def run(engine: LLMEngine) -> list[int]:
    engine.add_request(PROMPTS[2], PARAMS)
    finished = []
    while not engine.is_finished():
        finished += engine.step()
    return finished[0].completion_token_ids


@pytest.mark.long
def test_they_can_be_closed_asleep(checkpoints):
    llm = make_llm(checkpoints[0], tensor_parallel_size=2)
    pids = [rank.process.pid for rank in llm.engine.runner._ranks]
    llm.sleep(2)
    llm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
