"""A bad adapter is refused by name before anything changes, and after any switches the base is bitwise the base."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import (
    PREFIX,
    Tensors,
    are_packed,
    assert_same_bits,
    fitting,
    load_model,
    random_tensors,
    read_adapter,
    save_adapter,
    weights_of,
)
from support.family_factory import save_divisible_model
from support.model_factory import read_tensors, save_model
from support.thread_ranks import CPU, on_ranks

import nanovllm.models.merge
from nanovllm import LLM
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.engine.runner import Runner
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.linear import Packable
from nanovllm.lora import LoRARequest
from nanovllm.models.adapter import adapter_of
from nanovllm.models.decoder import CausalLM
from nanovllm.models.digest import weight_parts
from nanovllm.models.merge import MergedWeights
from nanovllm.models.read_config import load_model_config
from nanovllm.models.tensors import given_tensors
from nanovllm.models.weight_parts import tensor_digests
from nanovllm.ops.collectives import Parallel

FILE = "adapter_model.safetensors"
Q, DOWN = "0.self_attn.q_proj", "1.mlp.down_proj"
SHAPES = {Q: (64, 32), DOWN: (32, 40)}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
LLM_OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 8, "kvcache_block_size": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory)
    return directory


# Switches


def several_adapters(model: CausalLM) -> list[dict[str, Any] | None]:
    """No adapter, and three that share some layers."""
    layers = [{Q: (64, 32), DOWN: (32, 40)}, {Q: (64, 32), "1.self_attn.v_proj": (32, 32)}, {"0.mlp.up_proj": (40, 32)}]
    return [None, *(fitting(model, CONFIG, random_tensors(each, seed=seed)) for seed, each in enumerate(layers))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_20_switches_the_base_is_the_base_bit_for_bit(tiny, dtype):
    """In float32 the weights are packed. The parameters keep their memory, which captured steps know."""
    model = load_model(tiny, dtype)
    adapters = several_adapters(model)
    before, packed = weights_of(model), are_packed(model)
    assert any(packed) == (dtype == torch.float32)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    fresh = []
    for adapter in adapters:
        other = load_model(tiny, dtype)
        MergedWeights(other).merge(adapter)
        fresh.append(weights_of(other))
    merged, rng = MergedWeights(model), random.Random(0)
    for _ in range(20):
        number = rng.randrange(len(adapters))
        merged.merge(adapters[number])
        assert merged.is_merged == (number > 0)
        assert_same_bits(weights_of(model), fresh[number])
        assert are_packed(model) == packed
    merged.merge(None)
    assert_same_bits(weights_of(model), before)
    assert not merged.is_merged
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_a_weight_is_copied_to_the_host_once(tiny, monkeypatch):
    copied = nanovllm.models.merge._copied
    shapes = []
    monkeypatch.setattr(nanovllm.models.merge, "_copied", lambda it: (shapes.append(tuple(it.shape)), copied(it))[1])
    model = load_model(tiny)
    merged, adapters = MergedWeights(model), several_adapters(model)
    for number in (0, 1, 1, 0, 2, 1, 3, 0, 3):
        merged.merge(adapters[number])
    assert sorted(shapes) == [(32, 32), (32, 40), (40, 32), (64, 32)]


def test_new_values_of_a_weight_are_its_base(tiny):
    model = load_model(tiny, torch.bfloat16)
    merged, adapters = MergedWeights(model), several_adapters(model)
    merged.merge(adapters[1])
    merged.merge(None)
    name = f"model.layers.{Q}.weight"
    merged.forget([name, "model.norm.weight"])
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    weight[:64] = 3.0
    before = weights_of(model)
    for adapter in (adapters[1], None):
        merged.merge(adapter)
        assert (adapter is None) == bool((weight[:64] == 3.0).all())
    assert_same_bits(weights_of(model), before)


class Planted(Exception):
    pass


class Failing:
    """A function whose call of number `place` fails, before or after it has done its work."""

    def __init__(self, real: Callable, place: int, is_after: bool):
        self._real, self._place, self._is_after, self.num_calls = real, place, is_after, 0

    def __call__(self, *arguments: Any, **kw: Any) -> Any:
        self.num_calls += 1
        if self.num_calls != self._place:
            return self._real(*arguments, **kw)
        if self._is_after:
            self._real(*arguments, **kw)
        raise Planted


FAULTS = ["_copied", "_add", "expected_of", "unpack", "pack", "copy back"]


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_failure_anywhere_the_next_switch_is_exact(tiny, fault, monkeypatch):
    """It fails before or after each of the calls that change something."""
    model = load_model(tiny)
    adapters = several_adapters(model)
    before, packed = weights_of(model), are_packed(model)
    other = load_model(tiny)
    MergedWeights(other).merge(adapters[2])
    expected = weights_of(other)
    owner: Any = Packable if fault in ("unpack", "pack") else nanovllm.models.merge
    name = fault
    if fault == "copy back":
        owner, name = torch.Tensor, "copy_"
    real = getattr(owner, name)
    num_failed, place, max_num_calls = 0, 0, 1
    while max_num_calls > place:
        place, max_num_calls = place + 1, 0
        for is_after, (start, target) in product((False, True), ((1, 2), (0, 1), (1, 0))):
            merged, failing = MergedWeights(model), Failing(real, place, is_after)
            merged.merge(adapters[start])
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, lambda *arguments, failing=failing, **kw: failing(*arguments, **kw))
                try:
                    merged.merge(adapters[target])
                except Planted:
                    num_failed += 1
                    assert merged.is_merged
            max_num_calls = max(max_num_calls, failing.num_calls)
            merged.merge(adapters[2])
            assert_same_bits(weights_of(model), expected)
            merged.merge(None)
            assert_same_bits(weights_of(model), before)
            assert are_packed(model) == packed and not merged.is_merged
    assert num_failed >= 4


# Ranks


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe", "qwen3_5"])
def test_two_ranks_merge_to_the_weights_of_one(tmp_path, family):
    """Each rank merges its own rows and columns."""
    save_divisible_model(tmp_path, family, random.Random(family))
    layers = {
        name.removeprefix("model.layers.").removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in read_tensors(tmp_path).items()
        if name.startswith("model.layers.") and re.search(r"_proj\w*\.weight|\.gate\.weight", name)
    }
    tensors = random_tensors(layers)
    assert len(layers) >= 4

    def parts_of(parallel: Parallel) -> list[list]:
        model = load_model(tmp_path, parallel=parallel)
        found = [weight_parts(model)]
        merged = MergedWeights(model)
        for adapter in (fitting(model, CONFIG, tensors), None):
            merged.merge(adapter)
            found.append(weight_parts(model))
        return found

    (of_one,) = on_ranks(1, parts_of)
    of_two = on_ranks(2, parts_of)
    digests = [tensor_digests([parts]) for parts in of_one]
    for number, expected in enumerate(digests):
        assert tensor_digests([of_rank[number] for of_rank in of_two]) == expected
    assert digests[0] == digests[2]
    changed = {name for name in digests[0] if digests[0][name] != digests[1][name]}
    assert changed == {f"model.layers.{layer}.weight" for layer in layers}


# A runner


def test_base_weights_are_updated_only_without_a_merged_adapter(tiny, tmp_path):
    request = LoRARequest("a", 1, save_adapter(tmp_path / "a", random_tensors(SHAPES), CONFIG))
    with LLM(tiny, **LLM_OPTIONS) as llm:
        runner, name = llm.engine.runner, f"model.layers.{Q}.weight"
        base, memory = llm.weights_digest(per_tensor=True), llm.metrics()["memory_bytes"]
        runner.set_adapter(0, request)
        merged = llm.weights_digest(per_tensor=True)
        assert {each for each in base if base[each] != merged[each]} == {
            f"model.layers.{each}.weight" for each in SHAPES
        }
        assert llm.metrics()["memory_bytes"] == memory
        with pytest.raises(RuntimeError, match=r"merged into the weights; call set_adapter\(0, None\) before"):
            llm.update_weights({name: torch.zeros(64, 32)})
        runner.set_adapter(0, None)
        assert llm.weights_digest(per_tensor=True) == base
        llm.update_weights({name: torch.zeros(64, 32)})
        updated = llm.weights_digest(per_tensor=True)
        assert updated != base
        for each in (request, request, None):
            runner.set_adapter(0, each)
        assert llm.weights_digest(per_tensor=True) == updated


@pytest.mark.parametrize("level", [1, 2])
def test_a_merged_adapter_sleeps_as_the_weights_do(tiny, tmp_path, level):
    """After a deep sleep the weights must be given again, and nothing is merged into these."""
    request = LoRARequest("a", 1, save_adapter(tmp_path / "a", random_tensors(SHAPES), CONFIG))
    with LLM(tiny, **LLM_OPTIONS) as llm:
        runner, base = llm.engine.runner, llm.weights_digest()
        runner.set_adapter(0, request)
        merged = llm.weights_digest()
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(read_tensors(tiny))
            assert llm.weights_digest() == base
            runner.set_adapter(0, request)
        assert llm.weights_digest() == merged != base
        runner.set_adapter(0, None)
        assert llm.weights_digest() == base


def test_a_runner_without_weights_takes_no_adapter():
    with pytest.raises(RuntimeError, match="no weights"):
        Runner().set_adapter(0, None)


def test_a_closed_runner_keeps_no_weights(tiny):
    llm = LLM(tiny, **LLM_OPTIONS)
    runner = llm.engine.runner
    runner.set_adapter(0, LoRARequest("a", 1, tensors=random_tensors(SHAPES), config=CONFIG))
    llm.close()
    assert not [each for each in vars(runner).values() if isinstance(each, MergedWeights)]


def test_weights_in_fp8_are_never_merged(tiny):
    config = replace(load_model_config(tiny), fp8=Fp8Config())
    backend = TorchAttention(AttentionShape(1, 1, config.head_dim, torch.float32, CPU))
    model = CausalLM(config, 64, backend, Parallel(), torch.float32, CPU)
    merged = MergedWeights(model)
    merged.merge(None)
    with pytest.raises(ValueError, match="cannot be merged into weights in FP8"):
        merged.merge(fitting(model, CONFIG, random_tensors(SHAPES)))
    assert not merged.is_merged
    with LLM(tiny, quantization="fp8", **LLM_OPTIONS) as llm, pytest.raises(ValueError, match="in FP8"):
        llm.engine.runner.set_adapter(0, LoRARequest("a", 1, tensors=random_tensors(SHAPES), config=CONFIG))


# Errors

A, B = f"{PREFIX}.{Q}.lora_A.weight", f"{PREFIX}.{Q}.lora_B.weight"
BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft's type LOHA; only LORA"),
    ({"use_dora": True}, "has use_dora=True, which nanovllm does not support"),
    ({"bias": "all"}, "bias='all'"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\]"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters="),
    ({"layer_replication": [[0, 2]]}, "layer_replication="),
    ({"use_qalora": True}, "use_qalora=True"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora="),
    ({"init_lora_weights": "pissa_niter_4"}, r"'pissa_niter_4', so it belongs to other base weights.*save_pretrained"),
    ({"use_rslora": "yes"}, "use_rslora='yes'; it must be true or false"),
    ({"r": 0}, f"the rank of model.layers.{Q} must be an integer of at least 1, not 0"),
    ({"r": 4.0}, "the rank of .* must be an integer of at least 1, not 4.0"),
    ({"r": 5}, rf"lora_A.* and .*lora_B.* have shapes \[4, 32\] and \[64, 4\], but the rank of model.layers.{Q} is 5"),
    ({"rank_pattern": {"q_proj": 3}}, f"the rank of model.layers.{Q} is 3"),
    ({"rank_pattern": {"q_proj(": 3}}, r"rank_pattern has the regular expression '.*q_proj\(.*which is wrong"),
    ({"rank_pattern": [1]}, r"rank_pattern must be an object, not \[1\]"),
    ({"lora_alpha": "8"}, f"lora_alpha of model.layers.{Q} must be a number up to 1e.30, not '8'"),
    ({"lora_alpha": float("inf")}, "lora_alpha of .* must be a number up to 1e.30, not inf"),
    ({"alpha_pattern": {"q_proj": None}}, "lora_alpha of .* must be a number up to 1e.30, not None"),
    ({"target_modules": ["k_proj", "proj"]}, r"target_modules=\['k_proj', 'proj'\] does not name tensor .*lora_A"),
    ({"target_modules": "q_proj"}, "target_modules='q_proj' does not name tensor"),
    ({"target_modules": "("}, r"target_modules has the regular expression '\(', which is wrong"),
    ({"target_modules": 5}, "target_modules must be a list or a regular expression, not 5"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS, ids=[message[:30] for _, message in BAD_CONFIGS])
def test_a_config_that_is_not_supported_is_refused_by_name(changes, message):
    tensors = given_tensors(random_tensors({Q: SHAPES[Q]}).items())
    with pytest.raises(ValueError, match=f"adapter 'a'.*{message}"):
        adapter_of({**CONFIG, **changes}, tensors, "adapter 'a'")


def changed(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    names = {"a": A, "b": B}
    return lambda it: it | {names[name]: change(it[names[name]]) for name, change in changes.items()}


def with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[-1, -1] = value
    return tensor


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda it: {name.replace(old, new): tensor for name, tensor in it.items()}


BAD_TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "none": (lambda it: {}, "has no tensors"),
    "no other half": (lambda it: {A: it[A]}, f"{A} has no other half; lora_A and lora_B of model.layers.{Q} go"),
    "no factor": (lambda it: it | {"base_model.model.x": it[A]}, "tensor base_model.model.x is not a factor of LoRA"),
    "embedding": (renamed(f"layers.{Q}.lora_A.weight", "embed_tokens.lora_embedding_A"), "embedding_A is not a"),
    "twice": (lambda it: it | {A.removeprefix("base_model.model."): it[A]}, "are the same factor; keep one"),
    "twice by names": (
        lambda it: it | {name.replace("model.model.model.", "model.model."): tensor for name, tensor in it.items()},
        "are of the same layer; keep one of them",
    ),
    "three dimensions": (changed(a=lambda it: it[None]), r"have shapes \[1, 4, 32\] and \[64, 4\], but the rank"),
    "ranks differ": (changed(b=lambda it: it[:, :3]), r"have shapes \[4, 32\] and \[64, 3\], but the rank"),
    "integers": (changed(b=lambda it: it.int()), f"{B} is torch.int32; only floating-point"),
    "fp8": (changed(a=lambda it: it.to(torch.float8_e4m3fn)), f"{A} is torch.float8_e4m3fn; only floating-point"),
    "nan": (changed(a=lambda it: with_one(it, float("nan"))), f"{A} holds numbers that are infinite or not a number"),
    "infinite": (changed(b=lambda it: with_one(it, float("-inf"))), f"{B} holds numbers that are infinite"),
    "another size": (
        changed(a=lambda it: it[:, :-1]), r"change a weight \[64, 31\], but the model's is \[64, 32\].*another model",
    ),
    "no inputs": (changed(a=lambda it: it[:, :0]), r"change a weight \[64, 0\], but the model's is \[64, 32\]"),
    "another layer": (renamed("layers.0", "layers.2"), "unexpected tensor .*layers.2.self_attn.*no such linear layer"),
    "another name": (renamed("q_proj", "query"), "query.lora_A.weight; the model has no such linear layer"),
    "merged name": (renamed("q_proj", "qkv_proj"), "qkv_proj.lora_A.weight; the model has no such linear layer"),
    "norm": (renamed("self_attn.q_proj", "input_layernorm"), "layernorm.lora_A.weight; the model has no such linear"),
    "head": (renamed(f"layers.{Q}", "lm_head"), "lm_head.lora_A.weight changes lm_head; only linear"),
    "a head": (renamed(f"model.layers.{Q}", "lm_head"), "lm_head.lora_A.weight changes lm_head; only linear layers"),
    "embed_tokens": (renamed(f"layers.{Q}", "embed_tokens"), "changes embed_tokens; only linear layers of the decoder"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tiny) -> CausalLM:
    return load_model(tiny)


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tiny_model, kind):
    change, message = BAD_TENSORS[kind]
    tensors = change(random_tensors({Q: SHAPES[Q]}))
    with pytest.raises(ValueError, match=message):
        fitting(tiny_model, CONFIG, tensors)


def test_a_name_may_have_the_prefix_of_a_wrapping_model(tiny_model):
    expected = fitting(tiny_model, CONFIG, random_tensors(SHAPES))
    assert list(expected) == [f"model.layers.{layer}.weight" for layer in SHAPES]
    for prefix in ("", "model.", "language_model.model.", "base_model.model.model.language_model.", "_orig_mod.model."):
        tensors = random_tensors(SHAPES)
        found = fitting(tiny_model, CONFIG, renamed("base_model.model.model.", prefix)(tensors))
        assert found.keys() == expected.keys()
    found = fitting(tiny_model, CONFIG, renamed(".weight", ".default.weight")(tensors))
    assert found.keys() == expected.keys()


def test_the_first_pattern_that_matches_counts():
    """As in peft: a key is a name's end, after a dot or from its beginning."""
    tensors = given_tensors(random_tensors({Q: (64, 32)}, rank=3).items())
    patterns = {"layers.0": 1, "proj": 2, "self_attn.q_proj": 6, f"model.layers.{Q}": 9}
    config = {"r": 3, "lora_alpha": 12}
    (change,) = adapter_of({**config, "alpha_pattern": patterns}, tensors, "it").values()
    assert change.scale == 2.0
    (change,) = adapter_of({**config, "alpha_pattern": {"proj": 2}, "use_rslora": True}, tensors, "it").values()
    assert change.scale == pytest.approx(12 / 3**0.5)
    (change,) = adapter_of({**config, "r": 5, "rank_pattern": {r"layers\.\d+\..*": 3}}, tensors, "it").values()
    assert (change.scale, change.rank, change.shape) == (4.0, 3, (64, 32))


def test_layers_that_are_listed_but_have_no_tensors_are_named(tiny_model):
    tensors = random_tensors({"0.self_attn.q_proj": (64, 32), "1.self_attn.q_proj": (64, 32)})
    for targets in (["q_proj"], ["q_proj", "w1"], "all-linear", None, r".*_proj"):
        fitting(tiny_model, CONFIG | {"target_modules": targets}, tensors)
    config = CONFIG | {"target_modules": ["q_proj", "v_proj"]}
    fitting(tiny_model, config | {"layers_to_transform": [0]}, tensors)
    fitting(tiny_model, config | {"exclude_modules": ["v_proj"]}, tensors)
    message = "no tensors for model.layers.0.self_attn.v_proj, one of 2 such layers that target_modules names; to leave"
    with pytest.raises(ValueError, match=message):
        fitting(tiny_model, config, tensors)


def test_a_refused_adapter_changes_nothing(tiny, tmp_path):
    good = random_tensors(SHAPES)
    with LLM(tiny, **LLM_OPTIONS) as llm:
        runner, base = llm.engine.runner, llm.weights_digest()
        for adapter in (None, LoRARequest("good", 1, save_adapter(tmp_path / "good", good, CONFIG))):
            runner.set_adapter(0, adapter)
            before = llm.weights_digest()
            bad = save_adapter(tmp_path / "bad", good | {A: with_one(good[A], float("nan"))}, CONFIG)
            with pytest.raises(ValueError, match=rf"adapter 'bad': tensor {A} in {bad / FILE} holds numbers"):
                runner.set_adapter(0, LoRARequest("bad", 2, bad))
            with pytest.raises(TypeError, match=f"tensor {A} is a list"):
                runner.set_adapter(0, LoRARequest("bad", 2, tensors={A: [1.0], B: good[B]}, config=CONFIG))
            assert llm.weights_digest() == before
        assert before != base


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} has no adapter_config.json; give the directory that peft"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{tmp_path} has no adapter_model.safetensors$"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"it has adapter_model.bin, which is not read: load it with peft and save it as"
    ):
        read_adapter(tmp_path)
    (tmp_path / FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read: Expecting"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config.json must hold a JSON object"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"{FILE} is truncated or not a safetensors file: it is a pointer of Git LFS"):
        read_adapter(tmp_path)
